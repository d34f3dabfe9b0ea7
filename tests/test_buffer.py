"""Which samples may be trained on: every group once, in submission order, never older than the lag that is allowed."""

import itertools
import threading
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanorl.buffer import Buffer, Stopped
from nanorl.sample import Group, Prompt, Sample


def made(number, *versions):
    """The group of a prompt; each of its samples was begun at one of these versions and ended a version later."""
    samples = tuple(Sample(ids=(0, 1, 2), mask=(False, True, True), logp_behave=(0.0,) * 3, version=(-1, v, v + 1),
                           finish="stop", rewards=()) for v in versions)  # fmt: skip
    return Group(Prompt(number, (0,), "", ""), samples)


def never():
    return False


def numbers(groups):
    return [g.prompt.number for g in groups]


def admitted(buffer):
    """All prompts that may start now."""
    return list(iter(buffer.admit, None))


@given(st.integers(1, 5), st.integers(0, 3), st.sampled_from([0, 1, 100]))
def test_exactly_so_many_prompts_may_start_as_the_lag_allows_fresh_or_resumed(P, max_lag, version):
    """(max_lag + 1)·P before the first step, P more after each; with max_lag = 0, P prompts a version. Also at 100."""
    buffer, start = Buffer(P, version, max_lag), version * P
    assert admitted(buffer) == list(range(start, start + (max_lag + 1) * P))
    for step in range(version, version + 3):
        assert buffer.admit() is None
        for number in range(step * P, (step + 1) * P):
            buffer.put(made(number, step))
        assert buffer.admit() is None  # finished, even taken, is not trained
        assert numbers(buffer.take(1, never)) == list(range(step * P, (step + 1) * P))
        assert buffer.admit() is None
        buffer.trained(step + 1)
        assert admitted(buffer) == list(range((step + max_lag + 1) * P, (step + max_lag + 2) * P))


@given(st.data())
def test_under_any_interleaving_each_group_is_trained_once_in_order_and_no_older_than_max_lag(data):
    """0 ≤ v − version(t) ≤ v − s(g) ≤ max_lag, whichever groups finish first and however many may start at a time."""
    P, max_lag, start = data.draw(st.integers(1, 3)), data.draw(st.integers(0, 2)), data.draw(st.sampled_from([0, 7]))
    buffer, making, trained = Buffer(P, start, max_lag), {}, []
    for _ in range(30):
        ready = all(buffer.version * P + i in buffer.done for i in range(P))
        move = data.draw(st.sampled_from(["admit"] + ["finish"] * (2 * bool(making)) + ["train"] * (2 * ready)))
        if move == "admit" and (number := buffer.admit()) is not None:
            making[number] = buffer.version
        elif move == "finish":
            number = data.draw(st.sampled_from(sorted(making)))
            buffer.put(made(number, making.pop(number)))
        elif move == "train":
            groups = buffer.take(1, never)
            assert all(0 <= buffer.version - s.first_version <= max_lag for g in groups for s in g.samples)
            trained += numbers(groups)
            buffer.trained(buffer.version + 1)
    assert trained == list(range(start * P, start * P + len(trained)))
    assert sorted(trained + list(buffer.done) + list(making)) == list(range(start * P, buffer.admitted))


@given(st.permutations(range(6)))
def test_groups_are_taken_in_submission_order_in_whatever_order_they_finish(order):
    buffer = Buffer(3, max_lag=1)
    assert admitted(buffer) == list(range(6))
    for number in order:
        buffer.put(made(number, 0))
    assert numbers(buffer.take(1, never)) == [0, 1, 2]
    buffer.trained(1)
    assert numbers(buffer.take(1, never)) == [3, 4, 5]


@pytest.mark.parametrize(("versions", "lag"), [((4, 5), 1), ((5, 3), 2), ((6,), -1)])
def test_a_group_with_a_sample_too_old_or_from_the_future_is_never_trained_on(versions, lag):
    """The first sampled token of its oldest sample decides."""
    buffer = Buffer(1, version=5)
    buffer.put(made(5, *versions))
    with pytest.raises(RuntimeError, match=f"^prompt 5 has lag {lag}, allowed is 0$"):
        buffer.take(1, never)
    if lag > 0:
        buffer = Buffer(1, version=5, max_lag=lag)
        buffer.put(made(5, *versions))
        assert numbers(buffer.take(1, never)) == [5]


def test_take_waits_for_the_last_group_from_another_thread():
    """However many of later steps are there already."""
    buffer = Buffer(3, max_lag=1)
    for number in (5, 2, 0, 4, 3):
        buffer.put(made(number, 0))
    late = threading.Timer(0.3, lambda: buffer.put(made(1, 0)))
    late.start()
    assert numbers(buffer.take(30, never)) == [0, 1, 2]
    late.join()


def test_the_wait_ends_with_the_names_of_what_is_missing():
    buffer = Buffer(4, version=2)
    for number in (9, 11):
        buffer.put(made(number, 2))
    with pytest.raises(TimeoutError, match=r"2 of 4 groups \(prompts \[8, 10\] …\)"):
        buffer.take(0.05, never)
    buffer.put(made(8, 2))
    buffer.put(made(10, 2))
    assert numbers(buffer.take(0.05, never)) == [8, 9, 10, 11]  # nothing was lost by waiting in vain


def test_the_time_is_that_without_news_not_that_of_the_whole_wait(monkeypatch):
    """By a clock that goes 50 s between two looks: a group at each look keeps a wait of 60 s alive, none does not."""
    buffer, clock = Buffer(3), SimpleNamespace(now=0.0)
    monkeypatch.setattr("nanorl.buffer.time", SimpleNamespace(monotonic=lambda: clock.now))

    def look(news):
        clock.now += 50
        for number in itertools.islice(news, 1):
            buffer.put(made(number, 0))
        return False

    news = iter(range(3))
    assert numbers(buffer.take(60, lambda: look(news))) == [0, 1, 2] and clock.now > 60
    with pytest.raises(TimeoutError, match="waited 60 s"):
        Buffer(3).take(60, lambda: look(iter(())))


def test_what_breaks_sampling_is_raised_where_the_trainer_waits_at_once_or_later():
    error = ValueError("the reward's own")
    buffer = Buffer(2)
    buffer.fail(error)
    with pytest.raises(ValueError) as raised:
        buffer.take(60, never)
    assert raised.value is error
    buffer = Buffer(2)
    later = threading.Timer(0.2, lambda: buffer.fail(error))
    later.start()
    with pytest.raises(ValueError) as raised:
        buffer.take(60, never)
    assert raised.value is error
    later.join()


def test_asked_to_stop_it_raises_what_a_bare_except_does_not_swallow():
    with pytest.raises(Stopped) as raised:
        Buffer(1).take(60, lambda: True)
    assert isinstance(raised.value, KeyboardInterrupt) and not isinstance(raised.value, Exception)
