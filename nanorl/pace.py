"""How far may sampling run ahead of training? The flags of asynchrony; `buffer.py` has the rule and its proof.

    --max-lag 0                     synchronous: every sample is trained by the weights that sampled it
    --engine worker --max-lag N     asynchronous (or vllm): sampling runs on meanwhile, no sample is more than N steps old
    --delay N                       one process, for study: every sample is N steps old
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Pace:
    """how far sampling may run ahead of training"""

    max_lag: int | Literal["inf"] = 0
    """Training steps that a sample may be old (--engine worker). 0: synchronous. 2 to 8; inf needs --in-flight."""
    delay: int | Literal["inf"] = 0
    """Steps that the weights of --engine local lie behind: stale samples for study. inf: it keeps the start weights."""
    overtake: int = 0
    """Steps of the lag given up so that finished groups may overtake slow ones. 0: strictly in order."""
    dynamic_sampling: Literal["off", "refill", "shrink"] = "off"
    """Groups without contrast. refill: others are sampled in their place; shrink: the step goes without them."""
    in_flight: int | None = None
    """Prompts at most that have begun and are not trained yet. Without it as many as the lag allows."""
    max_failed: float = 0.0
    """Share of the last 100 groups that may fail; more stop the run. 0: the first failure does."""
    deadline: float = 1800.0
    """Seconds that a group may take; then it has failed. An evaluation of which nothing is done so long ends the run."""
    restart_engine: bool = False
    """Start a worker engine that died again, once."""
    engine_device: str | None = None
    """Where the worker engine runs. Without it --device."""

    @property
    def bound(self) -> float:
        """The largest lag there can be, in training steps; ∞ where nothing bounds it."""
        return math.inf if "inf" in (self.max_lag, self.delay) else max(self.max_lag, self.delay)

    @property
    def stale(self) -> bool:
        """A sample may be older than the weights that train on it."""
        return self.bound > 0


def wrong(pace: Pace, engine: str, prompts_per_step: int) -> str | None:
    """The first thing about these settings that cannot work, as one line that says what would; None if all may."""
    limits = (
        ("max-lag", pace.max_lag, pace.max_lag == "inf" or pace.max_lag >= 0, "0 or more, or inf"),
        ("delay", pace.delay, pace.delay == "inf" or pace.delay >= 0, "0 or more, or inf"),
        ("overtake", pace.overtake, 0 <= pace.overtake <= (math.inf if pace.max_lag == "inf" else pace.max_lag),
         f"from 0 to --max-lag {pace.max_lag}, of which it is a part"),
        ("in-flight", pace.in_flight, pace.in_flight is None or pace.in_flight >= prompts_per_step,
         f"at least --prompts-per-step, {prompts_per_step}: a step waits for so many"),
        ("max-failed", pace.max_failed, 0 <= pace.max_failed <= 1, "a share, between 0 and 1"),
        ("deadline", pace.deadline, 0 < pace.deadline < math.inf, "above 0 and finite"),
    )  # fmt: skip
    for flag, value, good, must in limits:
        if not good:
            return f"--{flag} {value}: must be {must}"
    if engine == "local" and pace.max_lag != 0:
        return (f"--max-lag {pace.max_lag}: the local engine samples with the weights in training, so nothing is ever "
                "stale; add --engine worker, or take --delay to study stale samples in one process")
    if engine != "local" and pace.delay != 0:
        return f"--delay {pace.delay}: only --engine local delays its weights; with {engine} the bound is --max-lag"
    if pace.max_lag == "inf" and pace.in_flight is None:
        return "--max-lag inf: nothing would end sampling ahead; add --in-flight, a number of prompts"
    for flag in ("restart_engine", "engine_device"):
        if engine != "worker" and getattr(pace, flag) not in (None, False):
            return f"--{flag.replace('_', '-')}: there is no engine process with --engine {engine}; take --engine worker"
    return None
