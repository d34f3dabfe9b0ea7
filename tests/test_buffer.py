"""Which samples may be trained on: the theorem of `buffer.py` under any interleaving, and what each end of it does."""

from __future__ import annotations

import json
import threading
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, get_state_machine_test, initialize, invariant, precondition, rule

from nanorl.buffer import BARREN, HEARTBEAT, RECENT, Buffer, Stopped
from nanorl.pace import Pace
from nanorl.sample import Group, Prompt, Sample


def made(number, *versions, rewards=(0.0, 1.0)):
    """The group of a prompt: for each reward a sample whose tokens were sampled by these versions."""
    n = len(versions)
    samples = tuple(Sample(ids=(0,) * (n + 1), mask=(False,) + (True,) * n, logp_behave=(0.0,) * (n + 1),
                           version=(-1, *versions), finish="stop", rewards=((n, r),)) for r in rewards)  # fmt: skip
    return Group(Prompt(number, (0,), "", ""), samples)


def barren(number, *versions):
    """The same without contrast."""
    return made(number, *versions, rewards=(1.0, 1.0))


def never():
    return False


def numbers(groups):
    return None if groups is None else [g.prompt.number for g in groups]


def admitted(buffer):
    """All prompts that may start now."""
    return list(iter(buffer.admit, None))


def begun(buffer):
    """The next prompt, which may start."""
    number = buffer.admit()
    assert number is not None
    return number


@st.composite
def paces(draw, lags=(0, 1, 2, 3, 4, "inf"), modes=("off", "refill", "shrink")):
    """P and a pace for it. An unbounded lag has a limit in flight, a bounded one may have one."""
    P, max_lag = draw(st.integers(1, 4)), draw(st.sampled_from(lags))
    limit = st.integers(P, 4 * P)
    return P, Pace(max_lag=max_lag, overtake=draw(st.integers(0, 3 if max_lag == "inf" else max_lag)),
                   dynamic_sampling=draw(st.sampled_from(modes)), max_failed=1.0,
                   in_flight=draw(limit if max_lag == "inf" else st.none() | limit))  # fmt: skip


# ---- the theorem

HOW = {"good": made, "barren": barren}
ENDS = (("good",), ("good", "good", "barren"), ("good", "barren", "failed"))
DICE = st.randoms(use_true_random=True)  # one draw a move, not one a number


class AnyInterleaving(RuleBasedStateMachine):
    """A sampler, an engine and a trainer who take turns as they please, with all that can happen to a group.

    Beside the buffer stands what really happened, in lists that only grow until a resume. Tokens carry any versions from
    that of the admission to the engine's at their end; the engine loads late and acknowledges later.
    """

    @initialize(pace=paces(), start=st.sampled_from([0, 7]), adverse=st.booleans(), ends=st.sampled_from(ENDS))
    def begin(self, pace, start, adverse, ends):
        (self.P, self.pace), self.v, self.adverse, self.ends = pace, start, adverse, ends
        self.order = list(range(start * self.P))  # by rank: every group that was not rejected, those trained included
        self.trained, self.gone = set(self.order), {"filtered": [], "failed": []}
        self.left_out, self.next, self.crashes = 0, start * self.P, 0
        self.start_over(Buffer(self.P, start, self.pace), owed=[])
        self.save()

    def start_over(self, buffer, owed):
        """Nothing is in the making, and the engine has the trainer's weights."""
        self.buffer, self.owed, self.step = buffer, owed, None
        self.engine = self.acknowledged = self.began = self.v
        self.born, self.making, self.done, self.slow = {}, [], {}, None

    @rule(who=st.sampled_from(["sampler", "trainer", "engine"]), dice=DICE)
    def turn(self, who, dice):
        """One of the three goes on. One rule, since hypothesis leaves rules out of whole runs: none of these may miss."""
        {"sampler": self.sample, "trainer": self.train, "engine": self.publish}[who](dice)

    # what the sampler does

    def sample(self, dice):
        """Some groups begin, and some end."""
        self.admit(dice.randint(0, 20))
        for _ in range(min(dice.randint(0, 8), len(self.making))):
            quick = [n for n in self.making if n != self.slow]
            if not quick and dice.random() < 0.9:
                break
            number = dice.choice(quick or self.making)
            versions = sorted(dice.choices(range(self.born[number], self.engine + 1), k=2))
            self.end(number, dice.choice(self.ends), *versions)

    def admit(self, wish):
        """In the order of their numbers, those owed from an earlier start first.

        An adverse world makes the last that may start the slow one, which ends after all others, and late.
        """
        for _ in range(wish):
            if (number := self.buffer.admit()) is None:
                if self.adverse and self.making and self.slow not in self.making:
                    self.slow = self.making[-1]
                return
            assert number == (self.owed.pop(0) if self.owed else self.next)
            self.next = max(self.next, number + 1)
            self.order.append(number)
            self.making.append(number)
            self.born[number] = self.acknowledged

    def end(self, number, how, *versions):
        self.making.remove(number)
        if self.buffer.barren + 1 == BARREN * self.P:  # so many in a row would end the run
            how = "good"
        if how == "failed":
            self.reject(number, how)
            return self.buffer.fail(number, ValueError())
        if how == "barren" and self.pace.dynamic_sampling == "refill":
            self.reject(number, "filtered")
        else:
            self.done[number] = HOW[how](number, *versions)
        self.buffer.put(HOW[how](number, *versions))

    def reject(self, number, why):
        self.order.remove(number)
        self.gone[why].append(number)

    # what the trainer does

    def train(self, dice):
        """A step begins, or ends. There may be a checkpoint, also while groups are missing, and of a step that is refused."""
        if self.step is None:
            self.take()
        else:
            self.update()
        if dice.random() < 0.5:
            self.save()

    def take(self):
        """A step can be taken exactly if P groups may be; it is theirs in the order of admission, and none is too old."""
        able = len(self.takeable()) >= self.P
        try:
            self.step = self.buffer.poll()
        except RuntimeError as error:
            pytest.fail(f"the guard had something to do: {error}")
        assert (self.step is not None) == able
        if able:
            taken = numbers(self.step)
            assert taken == sorted(taken, key=self.order.index) and set(taken) <= set(self.done)
            for group in self.step:
                lag = self.v - self.born[group.prompt.number]
                tokens = [self.v - version for s in group.samples for version in s.version if version >= 0]
                assert all(0 <= token <= lag for token in tokens) and lag <= self.pace.bound

    def takeable(self):
        """All that may be taken by and by: finished, and at most overtake·P places behind the first that has not."""
        first = next((i for i, n in enumerate(self.order) if n in self.making), len(self.order))
        return [n for n in self.order[: first + self.pace.overtake * self.P + 1] if n in self.done]

    def update(self):
        """P groups are gone, within their windows; of those that were left out of the step none has contrast."""
        self.v += 1
        self.buffer.trained(self.v)
        owed = self.buffer.state()["again"]
        went = [n for n in self.order if n not in self.trained and n not in owed]
        left = set(went) - set(numbers(self.step))
        assert len(went) == self.P and set(numbers(self.step)) <= set(went) <= set(self.done)
        assert not left or self.pace.dynamic_sampling == "shrink"
        assert not any(len({s.reward for s in self.done[n].samples}) > 1 for n in left)
        rank = {n: i for i, n in enumerate(self.order)}
        oldest = min((rank[n] for n in owed if n in rank), default=len(rank))
        assert max(rank[n] for n in went) - oldest <= self.pace.overtake * self.P  # 0: strictly in order
        self.trained |= set(went)
        self.left_out += len(left)
        self.done = {n: group for n, group in self.done.items() if n not in went}
        self.step = None

    # what the engine does

    @property
    def weights(self):
        """The newest: those of the running update may be published before the buffer hears of it."""
        return self.v + (self.step is not None)

    def publish(self, dice):
        """It loads a newer version, or not yet, and acknowledges one of those that it has had, or not yet."""
        self.engine = dice.randint(self.engine, self.weights)
        self.acknowledged = dice.randint(self.acknowledged, self.engine)
        self.buffer.acknowledge(self.acknowledged)

    # what a crash does

    def save(self):
        gone = {why: list(which) for why, which in self.gone.items()}
        self.saved = json.dumps(self.buffer.state()), self.v, set(self.trained), gone, self.left_out

    @precondition(lambda self: self.v > self.began and self.crashes < 2)
    @rule()
    def resume(self):
        """Back to the checkpoint: what was outstanding then is asked first, in its order."""
        self.crashes += 1
        text, self.v, trained, gone, self.left_out = self.saved
        self.trained, self.gone = set(trained), {why: list(which) for why, which in gone.items()}
        self.order, state = list(trained), json.loads(text)
        self.next = state["next"]
        self.start_over(Buffer(self.P, self.v, self.pace, state), list(state["again"]))

    # what is true after each

    def outstanding(self):
        return [n for n in self.order if n not in self.trained]

    @invariant()
    def every_group_is_counted_for_what_it_is(self):
        lap, taken = self.buffer.lap(), self.P * (self.step is not None)
        assert [lap[f"buffer/{what}"] for what in ("waiting", "making", "filtered", "failed")] == [
            len(self.done) - taken, len(self.making), len(self.gone["filtered"]), len(self.gone["failed"])]  # fmt: skip

    @invariant()
    def every_prompt_is_trained_once_rejected_once_or_outstanding(self):
        state, ended = self.buffer.state(), self.gone["filtered"] + self.gone["failed"]
        assert state["again"] == self.outstanding() + self.owed and len(self.trained) == self.v * self.P
        assert sorted([*self.trained, *ended, *state["again"]]) == list(range(state["next"]))
        assert self.buffer.lap()["buffer/left_out"] == self.left_out

    def teardown(self):
        """No deadlock: when all groups finish and the engine answers, step follows step until every group is trained."""
        if self.step is not None:
            self.update()
        last = self.v
        while self.outstanding() or self.owed or self.v == last:
            self.engine = self.acknowledged = self.v
            self.buffer.acknowledge(self.v)
            while self.owed or not self.outstanding() or len(self.outstanding()) % self.P:  # what fills the last step
                before = len(self.making)
                self.admit(1)
                if len(self.making) == before:
                    break
            for number in self.making[::-1]:
                self.end(number, "good", self.engine)
            self.take()
            assert self.step is not None, "deadlock"
            self.update()
        # so all that finished and were not filtered are trained: as much is in the lists that `update` and `end` keep


test_under_any_interleaving_lag_is_bounded_nothing_is_lost_and_nothing_stops = get_state_machine_test(
    AnyInterleaving, settings=settings(max_examples=200, stateful_step_count=60)
)


# ---- who samples


@given(paces(lags=(0, 1, 2, 3)), st.sampled_from([0, 1, 100]), st.data())
def test_exactly_so_many_prompts_may_start_as_the_lag_allows_fresh_or_resumed(pace, start, data):
    """The N_r-th group that is not rejected may start if ⌊(N_r − 1)/P⌋ ≤ η + e, not counting those that are; and if fewer
    than the limit are in flight. Those that are left out of their step count like any other."""
    P, pace = pace
    buffer, asked = Buffer(P, start, pace), start * P
    for step in range(start, start + 3):
        while asked // P <= pace.max_lag - pace.overtake + step and asked - step * P < (pace.in_flight or 100):
            how = made if buffer.barren > 5 else data.draw(st.sampled_from([made, barren]))
            buffer.put(how(begun(buffer), step))
            asked += how is made or pace.dynamic_sampling != "refill"
        assert buffer.admit() is None
        assert buffer.poll() is not None and buffer.admit() is None  # taken is not trained
        buffer.trained(step + 1)
        buffer.acknowledge(step + 1)


def test_a_resumed_run_may_start_as_many_as_one_that_never_stopped():
    """Lag 4, 8 prompts a step, version 100: 40 groups, not (4 + 100 + 1)·8 = 840."""
    assert admitted(Buffer(8, 100, Pace(max_lag=4))) == list(range(800, 840))
    state = {"next": 850, "again": [803, 840, 841], "ended": {"failed": 7}}
    assert admitted(Buffer(8, 100, Pace(max_lag=4), state)) == [803, 840, 841, *range(850, 887)]


@pytest.mark.parametrize("delay", [0, 1, 2, 3, "inf"])
def test_delayed_weights_make_every_sample_exactly_so_old(delay):
    """An engine that acknowledges v − N: from step N on the lag is N, neither more nor less, and no step has to wait."""
    buffer, lag = Buffer(2, 0, Pace(delay=delay)), 100 if delay == "inf" else delay
    for step in range(8):
        for number in admitted(buffer):
            buffer.put(made(number, buffer.acknowledged))
        groups = buffer.poll()
        assert numbers(groups) == [2 * step, 2 * step + 1]
        assert {step - s.first_version for g in groups for s in g.samples} == {min(step, lag)}
        buffer.trained(step + 1)
        buffer.acknowledge(max(0, step + 1 - lag))


@given(st.integers(1, 4), st.integers(1, 4), st.data())
def test_the_bound_is_reached_whatever_part_of_it_is_for_overtaking(P, max_lag, data):
    """The last group admitted at version 0 may be trained at max_lag, and no step can be taken without it then.

    (Where all of the lag is for overtaking, no more than a step's groups are outstanding, and nobody can be overtaken.)
    """
    buffer = Buffer(P, 0, Pace(max_lag=max_lag, overtake=data.draw(st.integers(0, max_lag - 1))))
    *quick, slow = admitted(buffer)
    for step in range(max_lag):
        for number in quick:
            buffer.put(made(number, step))
        assert slow not in numbers(buffer.poll())
        buffer.trained(step + 1)
        buffer.acknowledge(step + 1)
        quick = admitted(buffer)
    for number in quick:
        buffer.put(made(number, max_lag))
    assert buffer.poll() is None
    buffer.put(made(slow, 0, max_lag))
    assert slow in numbers(buffer.poll())


@given(paces(), st.integers(0, 4), st.data())
def test_a_run_starts_no_group_that_none_of_its_steps_would_train_on(pace, steps, data):
    """When the last step is over nothing is left, whatever was filtered on the way."""
    buffer = Buffer(pace[0], 0, pace[1], steps=steps)
    for step in range(steps):
        while (number := buffer.admit()) is not None:
            how = made if buffer.barren > 5 else data.draw(st.sampled_from([made, barren]))
            buffer.put(how(number, step))
        assert buffer.poll() is not None
        buffer.trained(step + 1)
        buffer.acknowledge(step + 1)
    lap = buffer.lap()
    assert buffer.admit() is None and lap["buffer/waiting"] == lap["buffer/making"] == 0
    assert buffer.next == steps * buffer.P + lap["buffer/filtered"]


def test_a_group_without_contrast_gives_its_place_back_where_steps_are_refilled():
    buffer = Buffer(2, 0, Pace(dynamic_sampling="refill"))
    assert admitted(buffer) == [0, 1]
    buffer.put(barren(0, 0))
    buffer.put(made(1, 0))
    assert buffer.poll() is None and admitted(buffer) == [2]
    buffer.put(made(2, 0))
    assert numbers(buffer.poll()) == [1, 2]


def test_refilling_gives_up_when_nothing_has_contrast_for_many_steps_in_a_row():
    """And one group with contrast ends the row. Then nothing more starts."""
    buffer, many = Buffer(2, 0, Pace(dynamic_sampling="refill")), 2 * BARREN
    for how in [barren] * (many - 1) + [made] + [barren] * (many - 1):
        buffer.put(how(begun(buffer), 0))
    assert buffer.error is None
    buffer.put(barren(begun(buffer), 0))
    with pytest.raises(RuntimeError, match=f"^--dynamic-sampling refill: {many} groups in a row had no contrast"):
        buffer.take(60, never)
    assert buffer.admit() is None


@pytest.mark.parametrize("flat", range(4))
def test_groups_left_out_of_their_step_count_as_trained(flat):
    """So that trained = v·P, whatever the share without contrast: P more may start for each version, not one more."""
    buffer = Buffer(4, 0, Pace(max_lag=1, dynamic_sampling="shrink"))
    for number in admitted(buffer):
        buffer.put((barren if number % 4 < flat else made)(number, 0))
    for version in (1, 2):
        assert len(buffer.poll()) == 4 - flat
        buffer.trained(version)
        buffer.acknowledge(version)
        assert len(admitted(buffer)) == 4


@pytest.mark.parametrize("share", [0.0, 0.02, 0.5])
def test_the_first_failure_is_raised_when_more_than_the_share_have_failed(share):
    """Of the last hundred: older ones are forgotten."""
    allowed, errors = round(share * RECENT), [ValueError(i) for i in range(RECENT + 1)]
    buffer = Buffer(1, 0, Pace(max_failed=share))

    def fail(errors):
        for error in errors:
            buffer.fail(begun(buffer), error)

    fail(errors[:allowed])
    for _ in range(RECENT):  # as many that ended well push them out
        buffer.put(made(buffer.admit(), buffer.version))
        buffer.poll()
        buffer.trained(buffer.version + 1)
        buffer.acknowledge(buffer.version)
    fail(errors[:allowed])
    assert buffer.error is None
    fail(errors[allowed:][:1])
    with pytest.raises(ValueError) as raised:
        buffer.take(60, never)
    assert raised.value is errors[0] and buffer.lap()["buffer/failed"] == 2 * allowed + 1


def test_a_run_in_which_all_of_the_last_hundred_failed_stops_whatever_share_may():
    buffer = Buffer(1, 0, Pace(max_failed=1.0))
    for i in range(RECENT):
        assert buffer.error is None
        buffer.fail(begun(buffer), ValueError(i))
    assert buffer.error.args == (0,) and buffer.admit() is None


# ---- who trains


@given(st.permutations(range(6)))
def test_groups_are_taken_in_submission_order_in_whatever_order_they_finish(order):
    buffer = Buffer(3, 0, Pace(max_lag=1))
    assert admitted(buffer) == list(range(6))
    for number in order:
        buffer.put(made(number, 0))
    assert numbers(buffer.poll()) == [0, 1, 2]
    buffer.trained(1)
    assert numbers(buffer.poll()) == [3, 4, 5]


@pytest.mark.parametrize("overtake", range(4))
def test_a_slow_group_is_overtaken_by_overtake_steps_and_no_more(overtake):
    buffer = Buffer(2, 0, Pace(max_lag=8, overtake=overtake))
    for number in admitted(buffer)[1:]:
        buffer.put(made(number, 0))
    for step in range(overtake):
        assert numbers(buffer.poll()) == [2 * step + 1, 2 * step + 2]
        buffer.trained(step + 1)
    assert buffer.poll() is None and buffer.poll() is None
    buffer.put(made(0, 0))
    assert numbers(buffer.poll()) == [0, 2 * overtake + 1]


def test_a_step_shrinks_by_the_groups_without_contrast_unless_none_has_any():
    buffer = Buffer(3, 0, Pace(max_lag=1, dynamic_sampling="shrink"))
    for number in admitted(buffer):
        buffer.put(made(number, 0) if number in (0, 2) else barren(number, 0))
    assert numbers(buffer.poll()) == [0, 2] and buffer.lap()["buffer/left_out"] == 0
    buffer.trained(1)
    assert buffer.lap()["buffer/left_out"] == 1
    assert numbers(buffer.poll()) == [3, 4, 5] and buffer.lap()["buffer/left_out"] == 1


@pytest.mark.parametrize("mode", ["off", "refill", "shrink"])
@pytest.mark.parametrize(("versions", "lag"), [((4, 5), 1), ((3, 4), 2), ((5, 6), -1), ((3, 6), -1), ((6, 6), -1)])
def test_the_trainer_would_not_train_on_what_the_theorem_excludes(versions, lag, mode):
    """Should an engine stamp or acknowledge wrongly: each token of each sample counts, the last one's too."""
    for max_lag in range(3):
        buffer = Buffer(1, 5, Pace(max_lag=max_lag, dynamic_sampling=mode))
        group, fresh = made(buffer.admit(), *versions), made(5, 5)
        buffer.put(Group(group.prompt, fresh.samples + group.samples))
        if 0 <= lag <= max_lag:
            assert numbers(buffer.poll()) == [5]
        else:
            with pytest.raises(RuntimeError, match=f"^prompt 5 has lag {lag}, allowed is {max_lag}$"):
                buffer.poll()


def test_what_waits_what_is_made_and_what_became_of_the_rest_is_counted():
    """The mean reward is that of all samples that finished since it was last asked, filtered ones included."""
    buffer = Buffer(2, 0, Pace(max_lag=1, dynamic_sampling="refill", max_failed=1.0))

    def counts():
        lap = buffer.lap()
        found = [lap[f"buffer/{what}"] for what in ("waiting", "making", "filtered", "failed", "left_out")]
        return found, lap.get("reward/all")

    assert counts() == ([0, 0, 0, 0, 0], None)
    assert admitted(buffer) == [0, 1, 2, 3]
    buffer.put(barren(1, 0))
    buffer.put(made(3, 0))
    buffer.fail(2, ValueError())
    assert counts() == ([1, 1, 1, 1, 0], 0.75)
    buffer.put(made(0, 0))
    assert counts() == ([2, 0, 1, 1, 0], 0.5)
    assert buffer.poll() is not None and counts() == ([0, 0, 1, 1, 0], None)
    assert admitted(buffer) == [4, 5] and counts() == ([0, 2, 1, 1, 0], None)
    buffer.trained(1)
    assert counts() == ([0, 2, 1, 1, 0], None)


# ---- waiting


def tick(monkeypatch, buffer, seconds, news=lambda: None):
    """Time goes by in the waits of this buffer alone, so many seconds in each, and `news` happens meanwhile."""
    clock = SimpleNamespace(now=0.0)

    def wait(timeout):
        clock.now += seconds
        news()

    monkeypatch.setattr("nanorl.buffer.time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(buffer.changed, "wait", wait)
    return clock


def test_take_waits_for_the_last_group_from_another_thread():
    """However many of later steps are there already."""
    buffer = Buffer(3, 0, Pace(max_lag=1))
    assert admitted(buffer) == list(range(6))
    for number in (5, 2, 0, 4, 3):
        buffer.put(made(number, 0))
    late = threading.Timer(0.05, lambda: buffer.put(made(1, 0)))
    late.start()
    assert numbers(buffer.take(30, never)) == [0, 1, 2]
    late.join()


@pytest.mark.parametrize(("admits", "finished", "missing"), [
    (0, (), "4 of 4 groups (none was admitted)"),
    (3, (0, 2), "3 of 4 groups (prompts 1)"),  # 2 is there and has to wait for its turn
    (8, (), "4 of 4 groups (prompts 0, 1, 2, 3, 4 …)"),
    (8, (0, 1, 2, 4), "1 of 4 groups (prompts 3, 5, 6, 7)"),
])  # fmt: skip
def test_the_wait_ends_with_the_names_of_what_is_missing(admits, finished, missing, monkeypatch):
    buffer = Buffer(4, 0, Pace(max_lag=1))
    asked = [buffer.admit() for _ in range(admits)]
    for number in finished:
        buffer.put(made(number, 0))
    tick(monkeypatch, buffer, 50)
    with pytest.raises(TimeoutError) as raised:
        buffer.take(60, never)
    assert str(raised.value) == f"waited 60 s for {missing} and none ended; the engine or a reward is stuck"
    for number in sorted({*asked, *admitted(buffer)} - set(finished)):
        buffer.put(made(number, 0))
    assert numbers(buffer.take(60, never)) == [0, 1, 2, 3]  # nothing was lost by waiting in vain


@pytest.mark.parametrize("end", ["put", "filter", "fail"])
def test_the_time_is_that_without_news_not_that_of_the_whole_wait(end, monkeypatch):
    """A group that ends in each wait, however it does, keeps a wait of 60 s alive."""
    buffer = Buffer(3, 0, Pace(dynamic_sampling="refill", max_failed=1.0))

    def news():
        number = buffer.admit()
        if number > 3 or end == "put":
            buffer.put(made(number, 0))
        elif end == "filter":
            buffer.put(barren(number, 0))
        else:
            buffer.fail(number, ValueError())

    clock = tick(monkeypatch, buffer, 50, news)
    try:
        assert len(buffer.take(60, never)) == 3 and clock.now == (150 if end == "put" else 350)
    except TimeoutError as late:
        pytest.fail(str(late))


def test_whoever_waits_long_says_for_what_now_and_then(monkeypatch, capsys):
    """And keeps silent before."""
    buffer, start = Buffer(2, 3, Pace(max_lag=1)), iter(range(1000))
    assert admitted(buffer) == [6, 7, 8, 9]
    for number in (6, 9):
        buffer.put(made(number, 3))
    buffer.acknowledge(4)
    clock = tick(monkeypatch, buffer, 1, lambda: next(start) < 2.5 * HEARTBEAT or buffer.put(made(7, 3)))
    assert numbers(buffer.take(1e9, never)) == [6, 7] and clock.now > 2.5 * HEARTBEAT
    said = "waiting for 1 of 2 groups (prompts 7, 8), 1 others are done; trainer at version 3, engine at 4\n"
    assert capsys.readouterr().out == 2 * said


def test_what_breaks_sampling_is_raised_where_the_trainer_waits_at_once_or_later():
    """The first thing that broke, even where a step is ready."""
    error, buffer = ValueError("the reward's own"), Buffer(1)
    buffer.put(made(buffer.admit(), 0))
    buffer.stop(error)
    buffer.stop(KeyError("what came of it"))
    with pytest.raises(ValueError) as raised:
        buffer.take(60, never)
    assert raised.value is error
    buffer = Buffer(2)
    later = threading.Timer(0.05, lambda: buffer.fail(buffer.admit(), error))
    later.start()
    with pytest.raises(ValueError) as raised:
        buffer.take(60, never)
    assert raised.value is error
    later.join()


def test_asked_to_stop_it_raises_what_a_bare_except_does_not_swallow():
    """Before anything else: neither an error nor a step that is ready comes first."""
    buffer = Buffer(1)
    buffer.put(made(buffer.admit(), 0))
    with pytest.raises(Stopped) as raised:
        buffer.take(60, lambda: True)
    assert isinstance(raised.value, KeyboardInterrupt) and not isinstance(raised.value, Exception)
    assert numbers(buffer.take(60, never)) == [0]
    buffer.stop(ValueError())
    with pytest.raises(Stopped):
        buffer.take(60, lambda: True)
