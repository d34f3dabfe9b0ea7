"""Which samples may be trained on? Admission, and taking in strict submission order.

The trainer's version is v: completed training steps. Prompts are numbered in the order of their admission, each
step takes the P oldest, so after v steps v·P are trained. A prompt may start while

    (max_lag + e + 1)·P − (trained + outstanding) > 0,

e the version that the engine acknowledged, outstanding = admitted − rejected − trained. With max_lag = 0 that is
synchronous training: P prompts a version, all sampled by the weights that train on them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from nanorl.sample import Group


class Stopped(KeyboardInterrupt):
    """The user asked the run to stop (Ctrl-C, SIGTERM) and it is at a place where nothing is lost."""


class Buffer:
    """Groups between the thread that samples and the thread that trains. All methods may be called from both."""

    def __init__(self, prompts_per_step: int, version: int = 0, max_lag: int = 0):
        self.P, self.max_lag = prompts_per_step, max_lag
        self.version = self.acknowledged = version  # the trainer's; the engine's
        self.admitted = version * prompts_per_step  # a resumed run has trained these (so has their count in the rule)
        self.done: dict[int, Group] = {}
        self.error: BaseException | None = None
        self.changed = threading.Condition()

    def admit(self) -> int | None:
        """The number of the next prompt if it may start now, else None."""
        with self.changed:
            trained = self.version * self.P
            outstanding = self.admitted - trained
            if (self.max_lag + self.acknowledged + 1) * self.P - (trained + outstanding) <= 0:
                return None
            self.admitted += 1
            return self.admitted - 1

    def put(self, group: Group) -> None:
        """A finished group."""
        with self.changed:
            self.done[group.prompt.number] = group
            self.changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Sampling broke: whoever waits in `take` gets this exception."""
        with self.changed:
            self.error = error
            self.changed.notify_all()

    def take(self, timeout: float, stop: Callable[[], bool]) -> list[Group]:
        """The P oldest groups, in submission order, once all of them have finished; their lag is checked.

        Raises what sampling raised; Stopped when `stop()` turns true; TimeoutError, naming what is missing, when
        nothing has finished for `timeout` seconds; RuntimeError if a group is older than max_lag allows.
        """
        first, last = self.version * self.P, (self.version + 1) * self.P
        quiet, finished = time.monotonic(), -1
        with self.changed:
            if stop():  # asked before: not even a step whose groups are ready
                raise Stopped
            while any(n not in self.done for n in range(first, last)):
                if self.error is not None:
                    raise self.error
                if stop():
                    raise Stopped
                if len(self.done) != finished:
                    quiet, finished = time.monotonic(), len(self.done)
                if time.monotonic() - quiet > timeout:
                    missing = [n for n in range(first, last) if n not in self.done]
                    raise TimeoutError(f"waited {timeout:.0f} s for {len(missing)} of {self.P} groups (prompts "
                                       f"{missing[:5]} …) and none finished; the engine or a reward is stuck")
                self.changed.wait(timeout=0.2)
            groups = [self.done.pop(n) for n in range(first, last)]
        for group in groups:
            lag = self.version - min(s.first_version for s in group.samples)
            if not 0 <= lag <= self.max_lag:
                raise RuntimeError(f"prompt {group.prompt.number} has lag {lag}, allowed is {self.max_lag}")
        return groups

    def trained(self, version: int) -> None:
        """The step is done and the engine holds (and has acknowledged) these weights: the next groups may start."""
        with self.changed:
            self.version = self.acknowledged = version
            self.changed.notify_all()
