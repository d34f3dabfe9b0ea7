"""Which samples may be trained on? Admission, taking, and what becomes of each group.

Let P be the prompts of a step, v the trainer's version (completed training steps), e the version that the slowest
engine has acknowledged, η = max_lag − overtake. Groups stand in the order of their admission; a rejected one (no
contrast, or it failed) leaves the order and gives its place back; v·P have been trained.

    admission   a group may start while  (η + e + 1)·P − (trained + outstanding) > 0,
                outstanding = admitted − rejected − trained; a group counts until the update that trains on it is over
    taking      a finished group may be taken if its rank is below that of the oldest group not taken + W,
                W = overtake·P + 1; taken ones keep their rank; every step takes exactly P
    theorem     0 ≤ v − version(t) ≤ v − s(g) ≤ max_lag   for every token t trained at v, g admitted at e = s(g)

Proof: when g is admitted at e its rank is r ≤ (η + e + 1)·P − 1, and ranks only fall. If g is not taken when the step
of version v begins, all v·P groups taken so far have ranks below r + W, and none of them is g, so
v·P ≤ r + W − 1 ≤ (η + e + 1 + overtake)·P − 1, hence v ≤ max_lag + e. Tokens are sampled by e or later. ∎
`notes/asynchrony.md` goes through it. With overtake = 0 and max_lag = 0 this is synchronous training.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

from nanorl.pace import Pace
from nanorl.sample import Group

RECENT = 100  # ended groups of which --max-failed is a share
BARREN = 10  # steps' worth of groups without contrast in a row, after which refilling gives up
HEARTBEAT = 30.0  # seconds of waiting between two lines that say what is waited for


class Stopped(KeyboardInterrupt):
    """The user asked the run to stop (Ctrl-C, SIGTERM) and it is at a place where nothing is lost."""


class Buffer:
    """Groups between those who sample and the one who trains. All methods may be called from several threads."""

    def __init__(self, prompts_per_step: int, version: int = 0, pace: Pace = Pace(),
                 state: dict[str, Any] | None = None, steps: float = math.inf):  # fmt: skip
        """Empty at this version; `state`, from `self.state()`, says which prompts of an earlier start are still owed.

        steps: the run's; groups that none of them would train on do not start.
        """
        self.P, self.pace, self.steps = prompts_per_step, pace, steps
        self.version = self.acknowledged = version  # the trainer's, v; the slowest engine's, e
        self.placed = version * prompts_per_step  # trained + outstanding: a resumed run has trained these
        state = {"next": self.placed, "again": [], "ended": {}} if state is None else state
        self.next, self.again = state["next"], deque(state["again"])  # the next new prompt; those to be asked first
        self.ended = Counter(state["ended"])  # groups that are gone by why: filtered, failed; and left out of their step
        self.line: list[int] = []  # prompts by rank, from the oldest not yet trained on
        self.taken: set[int] = set()  # those of `line` that are taken
        self.done: dict[int, Group] = {}  # finished and not taken
        self.hand: list[Group] = []  # taken for the next step
        self.running: list[Group] = []  # those of the step that trains now,
        self.left = 0  # and how many of them were left out of it
        self.barren, self.recent = 0, deque(maxlen=RECENT)  # filtered in a row; of the last groups, which failed
        self.rewards: list[float] = []  # of every sample that finished since the last lap, filtered or not
        self.error: BaseException | None = None
        self.first: BaseException | None = None  # of the failures, the one that is told
        self.changed = threading.Condition()

    # ---- who samples

    def admit(self) -> int | None:
        """The number of the next prompt if its group may start now, else None."""
        with self.changed:
            outstanding = self.placed - self.version * self.P
            if (self.pace.bound - self.pace.overtake + self.acknowledged + 1) * self.P - self.placed <= 0:
                return None
            if outstanding >= self.limit or self.placed >= self.steps * self.P or self.error is not None:
                return None
            number = self.again.popleft() if self.again else self.next
            self.next = max(self.next, number + 1)
            self.placed += 1
            self.line.append(number)
            return number

    @property
    def limit(self) -> float:
        """Outstanding groups that there may be at most, whatever the lag: without a bound on the lag, this is one."""
        return self.pace.in_flight or (self.P if self.pace.delay == "inf" else math.inf)

    def put(self, group: Group) -> None:
        """A finished group. Where steps are refilled, one without contrast gives its place back."""
        with self.changed:
            self.rewards += [sample.reward for sample in group.samples]
            self.recent.append(False)
            if self.pace.dynamic_sampling == "refill" and not contrast(group):
                self.reject(group.prompt.number, "filtered")
                self.barren += 1
                if self.barren >= BARREN * self.P:
                    self.stop(RuntimeError(f"--dynamic-sampling refill: {self.barren} groups in a row had no contrast, "
                                           "so no step fills up; the job is solved, too hard, or its reward broken"))
            else:
                self.barren = 0
                self.done[group.prompt.number] = group
            self.changed.notify_all()

    def fail(self, number: int, error: BaseException | None) -> None:
        """An episode or reward raised: the group's place is free again. Above --max-failed, `take` raises the first.

        None: none of its samples has a score; whoever scores knows when there are too many of those.
        """
        with self.changed:
            self.reject(number, "failed")
            self.changed.notify_all()
            if error is None:
                return
            self.recent.append(True)
            self.first = self.first or error
            if sum(self.recent) > self.pace.max_failed * RECENT or sum(self.recent) == RECENT:  # nothing works any more
                self.stop(self.first)
            self.changed.notify_all()

    def reject(self, number: int, why: str) -> None:
        """The group leaves the order. Called with the lock held."""
        self.line.remove(number)
        self.placed -= 1
        self.ended[why] += 1

    def stop(self, error: BaseException) -> None:
        """Sampling is over: whoever waits in `take` gets this exception."""
        with self.changed:
            self.error = self.error or error
            self.changed.notify_all()

    def acknowledge(self, version: int) -> None:
        """Every engine in use samples with this version or a later one."""
        with self.changed:
            self.acknowledged = max(self.acknowledged, version)
            self.changed.notify_all()

    # ---- who trains

    def poll(self) -> list[Group] | None:
        """The P groups of the next step, in the order of their admission, if all are there; else None, and no waiting.

        Where steps shrink, groups without contrast are left out, unless all are. Raises RuntimeError for a group that
        is older than the bound, which the theorem excludes.
        """
        with self.changed:
            while len(self.hand) < self.P and (number := self.takeable()) is not None:
                self.taken.add(number)
                self.hand.append(self.done.pop(number))
            if len(self.hand) < self.P:
                return None
            rank = {number: i for i, number in enumerate(self.line)}
            groups, self.hand = sorted(self.hand, key=lambda group: rank[group.prompt.number]), []
            for group in groups:
                lags = [self.version - v for s in group.samples for v in s.version if v >= 0]
                for lag in (min(lags, default=0), max(lags, default=0)):
                    if not 0 <= lag <= self.pace.bound:
                        raise RuntimeError(f"prompt {group.prompt.number} has lag {lag}, allowed is {self.pace.bound}")
            kept = [g for g in groups if contrast(g)] if self.pace.dynamic_sampling == "shrink" else groups
            self.running, self.left = groups, len(groups) - len(kept or groups)
            return kept or groups

    def takeable(self) -> int | None:
        """The first finished group within the window that begins at the oldest group not taken."""
        oldest = next((i for i, number in enumerate(self.line) if number not in self.taken), len(self.line))
        window = self.line[oldest : oldest + self.pace.overtake * self.P + 1]
        return next((number for number in window if number in self.done), None)

    def take(self, timeout: float, stop: Callable[[], bool]) -> list[Group]:
        """`poll`, waiting for it.

        Raises Stopped when `stop()` turns true; what ended sampling; TimeoutError, naming what is missing, when nothing
        has ended for `timeout` seconds. After HEARTBEAT seconds it says what it waits for.
        """
        quiet = said = time.monotonic()
        ended = -1
        with self.changed:
            while True:
                if stop():  # first, so that not even a step whose groups are ready begins
                    raise Stopped
                if self.error is not None:
                    raise self.error
                if (groups := self.poll()) is not None:
                    return groups
                now, total = time.monotonic(), len(self.done) + len(self.hand) + self.ended.total()
                quiet, ended = (quiet, ended) if total == ended else (now, total)
                if now - quiet > timeout:
                    raise TimeoutError(f"waited {timeout:.0f} s for {self.missing()} and none ended; the engine or a "
                                       "reward is stuck")
                if now - said > HEARTBEAT:
                    said = now
                    print(f"waiting for {self.missing()}, {len(self.done)} others are done; trainer at version "
                          f"{self.version}, engine at {self.acknowledged}", flush=True)
                self.changed.wait(timeout=0.2)

    def missing(self) -> str:
        """What the next step lacks, in words."""
        making = [n for n in self.line if n not in self.taken and n not in self.done]
        named = f"prompts {', '.join(map(str, making[:5]))}{' …' * (len(making) > 5)}" if making else "none was admitted"
        return f"{self.P - len(self.hand)} of {self.P} groups ({named})"

    def trained(self, version: int) -> None:
        """The update is over and the trainer has this version: its groups are not outstanding any more."""
        with self.changed:
            self.version = version
            self.ended["left out"] += self.left
            self.running, self.left = [], 0
            while self.line and self.line[0] in self.taken:
                self.taken.discard(self.line.pop(0))
            self.changed.notify_all()

    def lap(self) -> dict[str, float]:
        """What waits now, what became of all groups so far, the mean reward of all that finished since the last lap."""
        with self.changed:
            rewards, self.rewards = self.rewards, []
            found = {"buffer/waiting": len(self.done) + len(self.hand),
                     "buffer/making": len(self.line) - len(self.taken) - len(self.done),
                     "buffer/filtered": self.ended["filtered"], "buffer/failed": self.ended["failed"],
                     "buffer/left_out": self.ended["left out"]}  # fmt: skip
            return found | ({"reward/all": sum(rewards) / len(rewards)} if rewards else {})

    def state(self) -> dict[str, Any]:
        """What a checkpoint of now has to say so that every prompt is trained, filtered or failed once.

        What is outstanding, also in a step that is not over, is asked again first, in its order.
        """
        with self.changed:
            mine = {group.prompt.number for group in self.hand + self.running}
            owed = [number for number in self.line if number not in self.taken or number in mine]
            return {"next": self.next, "again": owed + list(self.again), "ended": dict(self.ended)}


def contrast(group: Group) -> bool:
    """Its samples' rewards differ: only then a baseline of the group leaves something to learn.

    >>> contrast(Group(None, ()))
    False
    """
    return len({sample.reward for sample in group.samples}) > 1
