"""How far sampling may run ahead: which settings are refused, and that whatever is not refused goes on for ever."""

from __future__ import annotations

import math
from itertools import islice, product

import pytest

from nanorl.buffer import Buffer
from nanorl.pace import Pace, wrong
from tests.test_buffer import made

P = 8
LOCAL = ("the local engine samples with the weights in training, so nothing is ever stale; add --engine worker, or take "
         "--delay to study stale samples in one process")  # fmt: skip


@pytest.mark.parametrize(("pace", "engine", "says"), [
    (Pace(max_lag=-1), "worker", "--max-lag -1: must be 0 or more, or inf"),
    (Pace(delay=-1), "local", "--delay -1: must be 0 or more, or inf"),
    (Pace(max_lag=2, overtake=-1), "worker", "--overtake -1: must be from 0 to --max-lag 2, of which it is a part"),
    (Pace(max_lag=2, overtake=3), "worker", "--overtake 3: must be from 0 to --max-lag 2, of which it is a part"),
    (Pace(delay=2, overtake=1), "local", "--overtake 1: must be from 0 to --max-lag 0, of which it is a part"),
    (Pace(max_lag=2, in_flight=7), "worker", "--in-flight 7: must be at least --prompts-per-step, 8: a step waits for so many"),
    (Pace(max_lag=2, in_flight=0), "worker", "--in-flight 0: must be at least --prompts-per-step, 8: a step waits for so many"),
    (Pace(max_failed=-0.1), "local", "--max-failed -0.1: must be a share, between 0 and 1"),
    (Pace(max_failed=1.1), "local", "--max-failed 1.1: must be a share, between 0 and 1"),
    (Pace(max_failed=math.nan), "local", "--max-failed nan: must be a share, between 0 and 1"),
    (Pace(deadline=0.0), "local", "--deadline 0.0: must be above 0 and finite"),
    (Pace(deadline=math.inf), "local", "--deadline inf: must be above 0 and finite"),
    (Pace(deadline=math.nan), "local", "--deadline nan: must be above 0 and finite"),
    (Pace(max_lag=2), "local", f"--max-lag 2: {LOCAL}"),
    (Pace(max_lag="inf", in_flight=64), "local", f"--max-lag inf: {LOCAL}"),
    (Pace(delay=2), "worker", "--delay 2: only --engine local delays its weights; with worker the bound is --max-lag"),
    (Pace(delay="inf"), "worker", "--delay inf: only --engine local delays its weights; with worker the bound is --max-lag"),
    (Pace(max_lag="inf"), "worker", "--max-lag inf: nothing would end sampling ahead; add --in-flight, a number of prompts"),
    (Pace(restart_engine=True), "local", "--restart-engine: there is no engine process with --engine local; take --engine worker"),
    (Pace(engine_device="cpu"), "local", "--engine-device: there is no engine process with --engine local; take --engine worker"),
])  # fmt: skip
def test_what_cannot_work_is_refused_in_one_line_that_begins_with_its_flag(pace, engine, says):
    assert wrong(pace, engine, P) == says


@pytest.mark.parametrize(("pace", "engine", "bound"), [
    (Pace(), "local", 0),
    (Pace(), "worker", 0),
    (Pace(delay=3), "local", 3),
    (Pace(delay="inf"), "local", math.inf),
    (Pace(max_lag=1), "worker", 1),
    (Pace(max_lag=4, overtake=4, in_flight=P, max_failed=1.0, deadline=0.5), "worker", 4),
    (Pace(max_lag="inf", in_flight=P, overtake=9, max_failed=0.0), "worker", math.inf),
    (Pace(restart_engine=True, engine_device="cuda:1", dynamic_sampling="shrink"), "worker", 0),
    (Pace(in_flight=P, dynamic_sampling="refill"), "local", 0),
])  # fmt: skip
def test_what_can_work_is_not_and_its_bound_is_the_lag_that_was_asked_for(pace, engine, bound):
    """Up to the edges of each limit."""
    assert wrong(pace, engine, P) is None
    assert pace.bound == bound and pace.stale == (bound > 0)


def test_whatever_is_not_refused_never_stands_still_nor_samples_without_end():
    """Step follows step when all groups finish and the engine follows, as many versions behind as it is told; no step is
    taken that the theorem excludes. For all small settings."""
    for P, engine in product((1, 3), ("local", "worker")):
        for lag, delay, overtake, room in product((0, 1, 2, "inf"), (0, 1, 2, "inf"), (0, 1, 2), (None, P - 1, P, 7)):
            pace = Pace(max_lag=lag, delay=delay, overtake=overtake, in_flight=room)
            if (line := wrong(pace, engine, P)) is None:
                goes_on(pace, P)
            else:
                assert line.startswith("--") and "\n" not in line


def goes_on(pace, P):
    """Six steps, and before each an end to what may start: at (max_lag + 1)·P ≤ 9 groups, or 7 in flight."""
    buffer, behind = Buffer(P, 0, pace), 100 if pace.delay == "inf" else pace.delay
    for step in range(1, 7):
        for number in islice(iter(buffer.admit, None), 9):
            buffer.put(made(number, buffer.acknowledged))
        assert buffer.admit() is None and len(buffer.poll() or ()) == P, pace
        buffer.trained(step)
        buffer.acknowledge(max(0, step - behind))
