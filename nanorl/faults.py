"""What becomes of a sample without a score? It leaves its group, stops the run or gets a fixed reward; never a silent 0.

`scoring.py` finds the faults; here are their names, the flags that say what is done, and when a reward counts as broken.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

LIMITS = ("timeout", "memory", "died")  # why a sample has no score: a limit was passed,
MISTAKES = ("exception", "none", "nan")  # or the reward raised, or told no finite number
WINDOW = 64  # the verdicts that `broken` looks at


@dataclass(frozen=True)
class Scoring:
    """how rewards are called"""

    reward_workers: int = 2
    """Processes that score, one sample each at a time. More for rewards that wait. 0: in this process, without limits."""
    reward_seconds: float = 5.0
    """Seconds that the score of one sample may take; then its process is killed and another takes its place."""
    reward_memory: int = 512
    """MiB that the score of one sample may take beside what its process holds at its start. Not on macOS."""
    on_reward_error: str = "drop"
    """A sample without a score. drop: it leaves its group, and the run stops where half have none; stop: the run stops
    at the first; a number: that is its reward."""


def wrong(scoring: Scoring) -> str | None:
    """What cannot work in these settings, in one line that begins with a flag; None if nothing."""
    how = scoring.on_reward_error
    for flag, good, must in (
        ("reward-workers", scoring.reward_workers >= 0, "0 or more"),
        ("reward-seconds", 0.01 <= scoring.reward_seconds < 10**6, "at least 0.01 and below a million"),
        ("reward-memory", scoring.reward_memory >= 1, "at least 1"),
        ("on-reward-error", how in ("drop", "stop") or number(how) is not None, "drop, stop or a number"),
    ):  # fmt: skip
        if not good:
            return f"--{flag} {getattr(scoring, flag.replace('-', '_'))}: must be {must}"
    return None


def number(text: str) -> float | None:
    """The finite number that a text is, else None."""
    try:
        return float(text) if math.isfinite(float(text)) else None
    except ValueError:
        return None


def broken(recent: Sequence[str | None]) -> bool:
    """More than half of the last verdicts, or of WINDOW where there were fewer, have no score; MISTAKES count at once.

    So a reward that raises at its very first verdict is broken; one that is slow there may be unlucky.

    >>> broken(["nan"]), broken(["timeout"]), broken(["nan", None]), broken(["died"] * 33)
    (True, False, False, True)
    """
    mistakes = sum(fault in MISTAKES for fault in recent)
    return mistakes > len(recent) / 2 or len(recent) - list(recent).count(None) > WINDOW / 2
