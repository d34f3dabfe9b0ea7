"""Who samples the tokens? The `Engine` interface; `local.py` and `worker.py` have the engines.

What is sampled is decided by counters: the t-th token of a turn is drawn by the t-th uniform number of a generator
keyed by (seed, stream, prompt number, sample, turn). So it depends neither on the rest of the batch nor on the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from nanorl.policy import Policy
from nanorl.timeline import Span


class Broken(Exception):
    """The engine itself broke (`__cause__` says how): no request will succeed, so the run ends."""


def broken(error: Exception) -> Broken:
    """A Broken that comes from this error."""
    wrapped = Broken(str(error))
    wrapped.__cause__ = error
    return wrapped


@dataclass(frozen=True)
class Sampling:
    """How to sample. `end` are the token ids that end an answer, `stop` the texts; temperature 0 is greedy."""

    max_new_tokens: int
    temperature: float = 1.0
    end: frozenset[int] = frozenset()
    stop: tuple[str, ...] = ()
    key: tuple[int, ...] = ()  # (seed, stream, prompt number, sample, turn)


@dataclass(frozen=True)
class Completion:
    """What came back: the sampled tokens (the end token included), each with its log-prob and weight version."""

    ids: tuple[int, ...]
    logp: tuple[float, ...]
    version: tuple[int, ...]
    finish: str


class Engine(Protocol):
    """Whoever can do this may generate. Versions are completed training steps."""

    version: int  # acknowledged: whatever is sampled from now on is sampled by it or a later one

    async def generate(self, ids: Sequence[int], sampling: Sampling, images: Sequence[Any] = ()) -> Completion:
        """Continue these token ids; tokens in, tokens out, nothing is ever decoded and encoded again. Raises Broken."""

    def pause(self) -> None:
        """Sample no token until resume."""

    def update_weights(self, policy: Policy, version: int) -> None:
        """Sample with these weights within a token step. What is in flight keeps its tokens and goes on under them."""

    def resume(self) -> None:
        """Go on sampling."""

    def lap(self) -> list[Span]:
        """What it did since the last lap."""

    def close(self) -> None:
        """End what it has started."""
