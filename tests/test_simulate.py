"""A cluster on a virtual clock: closed forms to the last digit, a loop over single tokens, what no cluster can break."""

import heapq
import itertools
import math
from collections import Counter, deque
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanorl.buffer import Buffer
from nanorl.cluster import PRESETS, Cluster, check
from nanorl.config import Refused
from nanorl.pace import Pace
from nanorl.sample import Group, Prompt, Sample
from nanorl.simulate import simulate

TIME = st.floats(0, 4).map(lambda x: round(x, 3))
SMALL = {"prompts_per_step": st.integers(1, 3), "samples_per_prompt": st.integers(1, 3), "mean": st.floats(1, 8),
         "step_base": TIME.map(lambda x: x + 0.1), "step_row": TIME, "train_base": TIME, "train_token": TIME,
         "overhead": TIME, "sync": TIME, "trainers": st.integers(1, 3), "seed": st.integers(0, 99)}  # fmt: skip


def cluster(**changes):
    """One engine, one trainer, nothing for free but what is not under test."""
    usual = {"engines": 1, "trainers": 1, "rows": 4, "step_base": 1.0, "step_row": 0.25, "prefill_token": 0.0,
             "train_base": 1.0, "train_token": 0.125, "overhead": 0.0, "sync": 0.0, "load": 0.0, "switch": 0.0,
             "prompts_per_step": 2, "samples_per_prompt": 2, "prompt": 0, "lengths": "constant", "mean": 4.0,
             "max_length": 100, "steps": 8, "pace": Pace()}  # fmt: skip
    return Cluster(**{**usual, **changes})


@st.composite
def clusters(draw, **fixed):
    """Any small cluster, in any mode."""
    c = cluster(**{name: draw(strategy) for name, strategy in SMALL.items()}, max_length=draw(st.integers(1, 12)),
                lengths=draw(st.sampled_from(["constant", "geometric", "lognormal"])), prompt=draw(st.integers(0, 3)),
                prefill_token=draw(TIME), distinct=draw(st.sampled_from([1.0, 0.4, 0.0])), load=draw(TIME),
                rows=draw(st.integers(1, 12)), switch=draw(TIME),
                engines=draw(st.integers(1, 3)), steps=draw(st.integers(1, 8)), interrupt=draw(st.booleans()),
                filtered=draw(st.sampled_from([0, 0.3])), failed=draw(st.sampled_from([0, 0.2])))  # fmt: skip
    lag = draw(st.sampled_from([0, 1, 2, 3, "inf"]))
    P, G = c.prompts_per_step, c.samples_per_prompt
    pace = Pace(lag, overtake=draw(st.integers(0, 1 if lag == "inf" else lag)), max_failed=1.0,
                dynamic_sampling=draw(st.sampled_from(["off", "shrink"] + ["refill"] * (G > 1))),
                in_flight=draw(st.sampled_from([P, 2 * P] + [None] * (lag != "inf"))))  # fmt: skip
    return replace(c, **{"pace": pace, "colocated": lag == 0 and draw(st.booleans()), **fixed})


def lane(spans, *names):
    """The spans of these kinds, in order."""
    return sorted((s for s in spans if s.name in names), key=lambda s: s.start)


def phases(c):
    """Seconds of generating the P·G answers of a step on one engine, and of training on them on one device."""
    rows, prompts = c.prompts_per_step * c.samples_per_prompt, c.prompts_per_step * c.prompt
    tokens = round(c.mean)
    return (c.prefill_token * prompts + tokens * (c.step_base + c.step_row * rows),
            c.train_base + c.train_token * rows * tokens / c.trainers)  # fmt: skip


@st.composite
def even(draw, **fixed):
    """Clusters of one engine that decodes the answers of a step together, all of one length."""
    c = cluster(**{name: draw(strategy) for name, strategy in SMALL.items()}, load=draw(TIME), prefill_token=draw(TIME),
                prompt=draw(st.integers(0, 3)))  # fmt: skip
    return replace(c, rows=c.prompts_per_step * c.samples_per_prompt, **fixed)


def period(c):
    """Seconds a step."""
    return 1 / simulate(c).steps_per_second


@given(even())
def test_alternating_a_step_takes_the_sum_of_its_phases(c):
    """g + t + sync + load."""
    g, t = phases(c)
    assert period(c) == pytest.approx(g + t + max(c.sync + c.load, c.overhead - g), rel=1e-12)


@given(even(colocated=True, switch=0.75), st.integers(1, 3), st.integers(0, 2))
def test_colocated_all_devices_generate_and_then_all_train(c, engines, trainers):
    """D = E + T: b = P·G/D rows each; g(b) + t/D + overhead + switch."""
    D = engines + trainers
    c = replace(c, engines=engines, trainers=trainers, samples_per_prompt=D * c.samples_per_prompt)
    g, t = phases(replace(c, samples_per_prompt=c.samples_per_prompt // D, trainers=1))
    result = simulate(replace(c, trainers=trainers))
    assert 1 / result.steps_per_second == pytest.approx(g + t + c.overhead + c.switch, rel=1e-12)
    assert set(result.busy) == {f"engine {i}" for i in range(D)}


@given(even(load=0.0, prefill_token=0.0), st.integers(0, 4))
def test_asynchronous_a_step_takes_the_longer_phase_or_its_share_of_the_way_around(c, lag):
    """max(g, t + overhead, (g + t + sync)/(max_lag + 1)), so more lag is never slower, and no lag is the sum."""
    g, t = phases(c)
    want = max(g, t + c.overhead, (g + t + c.sync) / (lag + 1))
    result = simulate(replace(c, steps=8 * (lag + 1), pace=Pace(lag)))
    assert 1 / result.steps_per_second == pytest.approx(want, rel=1e-9)
    assert result.tokens_per_second == pytest.approx(c.rows * round(c.mean) / want)
    assert result.busy["trainer"] == pytest.approx((t + c.overhead) / want)
    assert g / want - 1e-9 <= result.busy["engine 0"] <= 1 + 1e-9  # it works off its lead slowly where g is little less


@given(even(interrupt=False, pace=Pace(1), steps=16))
def test_one_step_ahead_a_step_takes_the_longer_phase_or_half_the_way_around(c):
    """max(g + load, t + overhead, (g + load + t + sync)/2): new weights enter when the batch under way has ended."""
    g, t = phases(c)
    g += c.load
    assert period(c) == pytest.approx(max(g, t + c.overhead, (g + t + c.sync) / 2), rel=1e-9)


def test_an_interruption_by_hand():
    """Prompt 2, 4 tokens; new weights at 6.75 and 12.75 wait for the boundary, load, read prompt and tokens again."""
    c = cluster(rows=1, step_row=0.0, prefill_token=0.25, load=0.5, train_base=2.25, train_token=0.0, prompt=2, steps=3,
                prompts_per_step=1, samples_per_prompt=1, pace=Pace(1))  # fmt: skip
    result = simulate(c)
    # the second answer: prompt till 5, tokens at 6, 7; loading till 7.5, reading 2 + 2 till 8.5; tokens at 9.5, 10.5
    assert [(s.start, s.end) for s in lane(result.spans, "interrupt")] == [(7.0, 8.5), (13.0, 14.5)]
    assert [(s.start, s.end) for s in lane(result.spans, "update")] == [(4.5, 6.75), (10.5, 12.75), (16.5, 18.75)]
    assert [s.name for s in lane(result.spans, "wait", "update")] == ["wait", "update"] * 3
    assert result.recomputed == 8
    assert [step.lags for step in result.steps] == [{0: 1}, {1: 1}, {1: 1}]
    assert (result.trained, result.wasted) == (12, 0)
    assert simulate(replace(c, interrupt=False)).recomputed == 0


def test_without_interruption_the_slowest_engine_decides_what_may_start_by_hand():
    """Two engines, a row each; the third answer runs from 4 to 8, so engine 1 waits with versions 1 and 2 till 8.5."""
    c = cluster(engines=2, rows=1, step_row=0.0, load=0.5, train_token=0.0, prompts_per_step=1, samples_per_prompt=1,
                steps=4, interrupt=False, pace=Pace(2))  # fmt: skip
    spans = [s for s in simulate(c).spans if s.start < 9]
    work = {name: [(s.name, s.start, s.end) for s in lane(spans, "generate", "sync", "update") if s.lane == name]
            for name in ("engine 0", "engine 1", "trainer")}  # fmt: skip
    assert work["trainer"] == [("update", 4, 5), ("update", 5, 6), ("update", 8, 9)]
    assert work["engine 0"] == [("generate", 0, 4), ("generate", 4, 8), ("sync", 8, 8.5), ("generate", 8.5, 12.5)]
    assert work["engine 1"] == [("generate", 0, 4), ("sync", 5, 5.5), ("sync", 6, 6.5), ("generate", 8.5, 12.5)]


@settings(max_examples=150)
@given(clusters())
def test_no_cluster_loses_a_token_is_busier_than_always_or_breaks_the_bound(c):
    """Generated = trained + wasted + unfinished; P groups a step; lag within max_lag; no device does two things."""
    result = simulate(c)
    P, G, left = c.prompts_per_step, c.samples_per_prompt, 0
    assert len(result.steps) == c.steps
    assert result.generated == result.trained + result.wasted + result.unfinished
    assert result.trained <= P * G * c.max_length * c.steps
    for step in result.steps:
        left, before = step.buffer["buffer/left_out"], left
        assert step.lags.total() == (P - (left - before)) * G
        assert 0 <= min(step.lags) <= max(step.lags) <= c.pace.bound
    lanes = {}
    for span in sorted(result.spans, key=lambda s: (s.start, s.end)):
        assert span.start >= lanes.get(span.lane, 0) - 1e-9 and span.end >= span.start
        lanes[span.lane] = span.end
    assert max(lanes.values()) <= result.steps[-1].end
    assert all(0 <= share <= 1 + 1e-9 for share in result.busy.values())
    assert set(lanes) <= {f"engine {i}" for i in range(c.engines + c.trainers * c.colocated)} | {"trainer"}
    assert simulate(c) == result


@given(clusters(colocated=False, pace=Pace(0), failed=0.0))
def test_with_lag_0_engines_and_trainer_take_turns(c):
    """No engine makes a token while the trainer updates, and every sample is fresh."""
    result = simulate(c)
    for update, made in itertools.product(lane(result.spans, "update"), lane(result.spans, "generate")):
        assert min(update.end, made.end) <= max(update.start, made.start) + 1e-9
    assert set(result.lags) == {0}


def token_by_token(c):
    """The end and the lags of each step, by a loop over single token steps. For one engine beside its trainer."""
    buffer, order = Buffer(c.prompts_per_step, pace=c.pace), itertools.count()
    queue, rows, groups, events = deque(), [], {}, []
    version, pending, training, steps, tick, running, free = 0, 0, False, [], 0.0, False, 0.0

    def later(time, kind, value=None):
        heapq.heappush(events, (time, next(order), kind, value))

    def admit():
        for number in iter(buffer.admit, None):
            lengths, failed, contrast = c.draw(number)
            groups[number] = {"lengths": lengths, "failed": failed, "contrast": contrast, "left": len(lengths),
                              "versions": []}  # fmt: skip
            queue.extend((number, length) for length in lengths)

    def end(number, group):
        if group["failed"]:
            return buffer.fail(number, RuntimeError("failed"))
        rewards = [float(i == 0 and group["contrast"]) for i in range(len(group["lengths"]))]
        samples = (Sample((0, 0), (False, True), (0.0, 0.0), (-1, v), "stop", ((1, r),))
                   for v, r in zip(group["versions"], rewards))  # fmt: skip
        return buffer.put(Group(Prompt(number, (0,), "", ""), tuple(samples)))

    def train(now):
        nonlocal training
        if not training and (taken := buffer.poll()) is not None:
            training = True
            tokens = sum(sum(groups[g.prompt.number]["lengths"]) for g in taken)
            later(now + c.train_base + c.train_token * tokens / c.trainers, "updated", taken)

    admit()
    while len(steps) < c.steps:
        if events and events[0][0] <= tick:
            now, _, kind, value = heapq.heappop(events)
            if kind == "updated":
                steps.append((now, Counter(len(steps) - s.first_version for g in value for s in g.samples)))
                buffer.trained(len(steps))
                later(now + c.sync, "arrives", len(steps))
                later(now + c.overhead, "free")
            elif kind == "arrives":
                pending = value
            elif kind == "acknowledged":
                buffer.acknowledge(value)
            else:
                training = False
                train(now)
            admit()
            if tick == math.inf and (queue or pending > version):
                tick, running = max(now, free), False
            continue
        now, pause = tick, 0.0
        for row in rows if running else ():
            row[2] += 1
        ended = []
        for row in [row for row in rows if row[1] == row[2]]:
            rows.remove(row)
            groups[row[0]]["left"] -= 1
            ended += [row[0]] * (groups[row[0]]["left"] == 0)
        for number in ended:
            end(number, groups[number])
        if pending > version and (c.interrupt or not rows):
            version, pause = pending, c.load + c.prefill_token * round(c.distinct * sum(c.prompt + row[2] for row in rows))
            later(now + c.load, "acknowledged", version)
        new = []
        while queue and len(rows) < c.rows and pending == version:
            number, length = queue.popleft()
            new.append(number)
            rows.append([number, length, 0])
            groups[number]["versions"].append(version)
        pause += c.prefill_token * c.prompt * len(set(new))
        if ended:
            train(now)
            admit()
        running = bool(pause == 0 and rows and not (queue and len(rows) < c.rows and pending == version))
        free = now + pause
        tick = free if not running else now + c.step_base + c.step_row * len(rows)
        if not rows and not queue:
            tick = math.inf
    return steps


@given(clusters(colocated=False, engines=1), st.integers(0, 2**32))
def test_events_are_what_a_loop_over_single_tokens_finds(c, seed):
    """Ends and lags of all steps, with one engine, for times of which no two are commensurable."""
    times = ("step_base", "step_row", "prefill_token", "train_base", "train_token", "overhead", "sync", "load")
    c = replace(c, **dict(zip(times, np.random.default_rng(seed).uniform(0.01, 3, len(times)).tolist())))
    slow, fast = token_by_token(c), simulate(c).steps
    assert [step.end for step in fast] == pytest.approx([end for end, _ in slow], rel=1e-9)
    assert [step.lags for step in fast] == [lags for _, lags in slow]


FATES = [("off", 0.4, 0), ("refill", 0.4, 0), ("shrink", 0.4, 0), ("off", 0, 0.4)]


@pytest.mark.parametrize("way, filtered, failed", FATES)
def test_what_becomes_of_groups_without_contrast_and_of_those_that_fail(way, filtered, failed):
    """Refilled and failed ones are wasted, others come in their place; shrunk steps go without; else all train."""
    c = cluster(lengths="geometric", filtered=filtered, failed=failed, prompts_per_step=4, steps=5,
                pace=Pace(0, dynamic_sampling=way, max_failed=1.0))  # fmt: skip
    result, P = simulate(c), c.prompts_per_step
    drawn = [(number, *c.draw(number)) for number in range(100)]
    good = [n for n, _, fails, contrast in drawn if not fails and (contrast or way != "refill")]
    last = good[P * c.steps - 1]  # strictly in order, and nothing else has been begun when the last step is over
    trained = [n for n in good if n <= last and (drawn[n][3] or way != "shrink")]
    assert result.trained == sum(sum(drawn[n][1]) for n in trained)
    assert result.wasted == sum(sum(drawn[n][1]) for n in range(last + 1) if n not in trained)
    assert result.unfinished == 0
    assert (result.wasted > 0) == (way != "off" or failed > 0)


def test_too_many_failures_or_groups_without_contrast_end_it_in_one_line():
    """As they would end a run."""
    with pytest.raises(Refused, match=r"ends at step \d+: prompt \d+ failed"):
        simulate(cluster(failed=0.3, steps=20))
    with pytest.raises(Refused, match=r"ends at step \d+: --dynamic-sampling refill: 20 groups in a row"):
        simulate(cluster(filtered=0.99, pace=Pace(dynamic_sampling="refill")))


@given(st.sampled_from(["constant", "geometric", "lognormal"]), st.integers(0, 5), st.floats(1, 50), st.booleans())
def test_a_prompt_has_the_same_answers_in_every_mode(lengths, number, mean, measured):
    """Drawn by (seed, number), within 1 and the cut, whatever the cluster is."""
    c = cluster(lengths=lengths, mean=mean, max_length=40, samples_per_prompt=8, measured=(3, 5) * measured)
    other = replace(c, engines=3, colocated=True, steps=2, rows=1, sync=1.0)
    assert c.draw(number) == other.draw(number)
    assert set(c.draw(number)[0]) <= set((3, 5) if measured else range(1, 41))
    assert lengths == "constant" and not measured or len({tuple(c.draw(n)[0]) for n in range(50)}) > 1 or mean < 1.5


def test_the_distributions_have_their_mean():
    """Over 20,000 answers, without a cut, within four standard errors."""
    for lengths, spread in (("constant", 0.0), ("geometric", 1.0), ("lognormal", math.sqrt(math.exp(0.25) - 1))):
        c = cluster(lengths=lengths, mean=200.0, sigma=0.5, max_length=10**9, samples_per_prompt=20_000)
        assert np.mean(c.draw(0)[0]) == pytest.approx(200, abs=4 * 200 * spread / math.sqrt(20_000) + 1e-9)


def test_an_eighth_of_areals_cluster_is_between_2_and_3_5_times_as_fast_asynchronous():
    """12 + 4 devices and 64 prompts; published: 41.0 h / 14.8 h = 2.77. Trainer-bound, so every lag is at the bound."""
    c = replace(PRESETS["areal_1_5b"], engines=12, trainers=4, prompts_per_step=64)
    asynchronous, synchronous = simulate(c), simulate(replace(c, colocated=True, steps=6, pace=Pace(0)))
    assert 2 < asynchronous.steps_per_second / synchronous.steps_per_second < 3.5
    assert synchronous.trained / 6 / 1024 == pytest.approx(9300, rel=0.03)  # the mean length that it was set for
    assert synchronous.lags.keys() == {0} and max(asynchronous.lags) == 8


WRONG = {"engines": 0, "trainers": 0, "rows": 0, "step_base": -1.0, "step_row": math.inf, "train_token": math.nan,
         "filtered": 1.0, "failed": -0.1, "steps": 0, "mean": 0.5, "sigma": -1.0, "switch": -1.0, "seed": -1,
         "max-lag": Pace(-1), "overtake": Pace(1, overtake=2), "in-flight": Pace(1, in_flight=1), "delay": Pace(delay=1),
         "deadline": Pace(deadline=60), "restart-engine": Pace(restart_engine=True),
         "engine-device": Pace(engine_device="cpu")}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_simulated_is_refused_in_one_line_that_names_the_flag(name):
    """As every refusal."""
    changed = {"pace" if isinstance(WRONG[name], Pace) else name: WRONG[name]}
    with pytest.raises(Refused) as refused:
        check(cluster(**changed))
    assert str(refused.value).startswith(f"--{name.replace('_', '-')} ") or f"--{name}:" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_settings_that_contradict_each_other_are_refused():
    """Two flags each."""
    for changes, words in (({"colocated": True, "pace": Pace(1)}, "--colocated --max-lag 1: "),
                           ({"step_base": 0.0, "step_row": 0.0}, "--step-base 0 --step-row 0: "),
                           ({"pace": Pace("inf")}, "--max-lag inf: ")):  # fmt: skip
        with pytest.raises(Refused, match=words):
            check(cluster(**changes))
    check(cluster(trainers=0, colocated=True))
