"""What would asynchrony buy me? A cluster on a virtual clock, around the very buffer that training uses.

    python -m nanorl.simulate --compare                     synchronous, one step ahead, asynchronous
    python -m nanorl.simulate areal_1_5b --compare          128 GPUs with published settings, in seconds
    python -m nanorl.simulate --sweep max_lag=0,1,2,4,8     any flag, several values
    python -m nanorl.simulate --run runs/NAME               settings measured in a real run; predicted against measured
    python -m nanorl.simulate --run runs/NAME --max-lag 8   and what that would change

    a token step of an engine with b rows        step_base + step_row·b                  seconds
    reading n tokens, first or again             prefill_token·n
    an update over n sampled tokens              train_base + train_token·n/T
    new weights                                  sync after the update's end, then load, while the engine's rows stand

The rows of an engine make their tokens together: one of length L that joins at token step c leaves at c + L. So only
joins, leaves and new weights are events, and nothing is computed between two of them. `cluster.py` has the settings,
`forecast.py` the command line.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from heapq import heapify, heappop, heappush, heapreplace
from typing import Any

from nanorl.buffer import Buffer
from nanorl.cluster import Cluster, Result, Step, check
from nanorl.config import Refused
from nanorl.sample import Group, Prompt, Sample
from nanorl.timeline import Span

ROUNDING = 1e-9  # token steps; a sum of floats may miss the boundary that it is at


def simulate(cluster: Cluster) -> Result:
    """Run the cluster's steps on the virtual clock. Raises Refused for what cannot be, or what the buffer gives up."""
    check(cluster)
    return Simulation(cluster).run()


@cache
def sample(version: int, reward: float) -> Sample:
    """All that a buffer looks at: the version of the first token, and the reward."""
    return Sample((0, 0), (False, True), (0.0, 0.0), (-1, version), "stop", ((1, reward),))


@dataclass(eq=False)
class Making:
    """A group in the making."""

    number: int
    left: int  # answers that have not ended
    failed: bool
    contrast: bool
    tokens: int = 0  # of the answers that have ended
    versions: list[int] = field(default_factory=list)  # of the first token of each answer that began


@dataclass(eq=False)
class Engine:
    """One device that generates. `count` token steps were over at `time`, which is to come while it reads or loads."""

    lane: str
    time: float = 0.0
    count: int = 0
    leaving: list[tuple[int, int, Making, int]] = field(default_factory=list)  # heap: count at the end, …, length
    joining: list[tuple[Making, int]] = field(default_factory=list)  # answers, from the next token step on
    joined: int = 0  # Σ over rows of the count when they joined
    version: int = 0
    pending: int = 0  # the newest version that has arrived
    acknowledged: int = 0
    plan: int = 0  # number of its latest plan: events of older ones are void
    begun: float | None = None  # since when it generates
    generated: int = 0
    recomputed: int = 0


class Simulation:
    """Engines, a queue of answers before them, the buffer, a trainer, and a heap of events."""

    def __init__(self, cluster: Cluster):
        self.c, self.buffer = cluster, Buffer(cluster.prompts_per_step, pace=cluster.pace)
        devices = cluster.engines + cluster.trainers * cluster.colocated
        self.engines = [Engine(f"engine {i}") for i in range(devices)]
        self.trainers, self.lanes = cluster.trainers, ["trainer"]  # one lane: they are in step
        if cluster.colocated:
            self.trainers, self.lanes = devices, [engine.lane for engine in self.engines]
        self.now, self.order = 0.0, itertools.count()
        self.events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.queue: deque[tuple[Making, int]] = deque()
        self.making: dict[int, Making] = {}  # by number, until they are trained on or rejected
        self.training, self.waits = False, 0.0  # since when the trainer waits
        self.steps: list[Step] = []
        self.spans: list[Span] = []
        self.wasted = 0

    def run(self) -> Result:
        """Event after event until the last step is over."""
        self.admit()
        while len(self.steps) < self.c.steps:
            self.now, _, act, args = heappop(self.events)
            act(*args)
            if self.buffer.error is not None:
                raise Refused(f"the simulated run ends at step {len(self.steps)}: {self.buffer.error}")
        unfinished = sum(group.tokens for group in self.making.values())
        for engine in self.engines:
            if engine.leaving:  # the token steps since the last event
                rows, since = len(engine.leaving), (self.now - engine.time) / self.token_step(engine)
                done = max(0, math.floor(since + ROUNDING))
                engine.count += done
                engine.generated += rows * done
                unfinished += rows * engine.count - engine.joined
                self.span(engine.lane, "generate", engine.begun, self.now)
        spans = [replace(s, end=min(s.end, self.now)) for s in self.spans if s.start < self.now]
        total = {name: sum(getattr(e, name) for e in self.engines) for name in ("generated", "recomputed")}
        return Result(tuple(self.steps), tuple(spans), wasted=self.wasted, unfinished=unfinished, **total)

    def at(self, time: float, act: Callable[..., None], *args: Any) -> None:
        """Let this happen then; what is to happen at the same time happens in the order of these calls."""
        heappush(self.events, (time, next(self.order), act, args))

    def span(self, lane: str, name: str, start: float, end: float) -> None:
        """Something that took time."""
        if end > start:
            self.spans.append(Span(lane, name, start, end))

    # ---- generation

    def admit(self) -> None:
        """Start what the buffer lets start, and hand its answers to the engines."""
        while (number := self.buffer.admit()) is not None:
            lengths, failed, contrast = self.c.draw(number)
            group = self.making[number] = Making(number, len(lengths), failed, contrast)
            self.queue += [(group, length) for length in lengths]
        room = [(-self.room(engine), i) for i, engine in enumerate(self.engines)] if self.queue else []
        heapify(room)
        given = set()
        while self.queue and room[0][0] < 0:  # each to the engine with the fewest rows
            least, i = room[0]
            self.engines[i].joining.append(self.queue.popleft())
            given.add(i)
            heapreplace(room, (least + 1, i))
        for i in sorted(given):
            self.plan(self.engines[i])

    def room(self, engine: Engine) -> int:
        """Rows that may yet join."""
        return 0 if self.drains(engine) else self.c.rows - len(engine.leaving) - len(engine.joining)

    def drains(self, engine: Engine) -> bool:
        """New weights wait for its rows to end, and new rows for the weights."""
        return engine.pending > engine.version and not self.c.interrupt

    def token_step(self, engine: Engine) -> float:
        """Seconds of a token step, step_base + step_row·b."""
        return self.c.step_base + self.c.step_row * len(engine.leaving)

    def plan(self, engine: Engine) -> None:
        """Come back to this engine when a row ends, or at the next boundary if something is to change there."""
        engine.plan += 1
        change = engine.pending > engine.version or engine.joining
        if engine.leaving:
            steps, took = engine.leaving[0][0] - engine.count, self.token_step(engine)
            if change and not self.drains(engine):
                steps = min(steps, max(0, math.ceil((self.now - engine.time) / took - ROUNDING)))
            self.at(max(self.now, engine.time + steps * took), self.boundary, engine, engine.plan, steps)
        elif change:
            self.at(max(self.now, engine.time), self.boundary, engine, engine.plan, 0)

    def boundary(self, engine: Engine, plan: int, steps: int) -> None:
        """So many token steps are over: rows that have their tokens leave, new weights and new rows enter."""
        if plan != engine.plan:
            return
        engine.time, engine.count = self.now, engine.count + steps
        engine.generated += steps * len(engine.leaving)
        ended = []
        while engine.leaving and engine.leaving[0][0] == engine.count:
            end, _, group, length = heappop(engine.leaving)
            engine.joined -= end - length
            group.tokens += length
            group.left -= 1
            if group.left == 0:
                ended.append(group)
        if not engine.leaving and engine.begun is not None:
            self.span(engine.lane, "generate", engine.begun, self.now)
            engine.begun = None
        for group in ended:
            self.end(group)
        if engine.pending > engine.version and not (engine.leaving and self.drains(engine)):
            self.load(engine)
        if self.queue:
            for _ in range(min(self.room(engine), len(self.queue))):
                engine.joining.append(self.queue.popleft())
        if engine.joining and not self.drains(engine):
            self.join(engine)
        self.plan(engine)
        if ended:
            self.train()
            self.admit()

    def load(self, engine: Engine) -> None:
        """The newest weights: the engine stands while it loads them, then reads again what its rows have so far.

            load + prefill_token·distinct·Σ over rows (prompt + tokens so far)
        """
        engine.version, start = engine.pending, engine.time
        engine.time += 0.0 if self.c.colocated else self.c.load
        self.at(engine.time, self.acknowledge, engine, engine.version)
        if engine.leaving:
            tokens = round(self.c.distinct * (len(engine.leaving) * (self.c.prompt + engine.count) - engine.joined))
            engine.recomputed += tokens
            engine.time += self.c.prefill_token * tokens
            self.span(engine.lane, "generate", engine.begun, start)
            engine.begun = engine.time
        self.span(engine.lane, "interrupt" if engine.leaving else "sync", start, engine.time)

    def join(self, engine: Engine) -> None:
        """New rows, their prompts read: each once for all of its answers that join together."""
        engine.begun = engine.time if engine.begun is None else engine.begun
        engine.time += self.c.prefill_token * self.c.prompt * len({group.number for group, _ in engine.joining})
        for group, length in engine.joining:
            group.versions.append(engine.version)
            engine.joined += engine.count
            heappush(engine.leaving, (engine.count + length, next(self.order), group, length))
        engine.joining = []

    def end(self, group: Making) -> None:
        """All answers of a group have ended; only where it has contrast their rewards differ."""
        rejected = self.buffer.ended["filtered"] + self.buffer.ended["failed"]
        if group.failed:
            self.buffer.fail(group.number, RuntimeError(f"prompt {group.number} failed"))
        else:
            samples = (sample(v, float(i == 0 and group.contrast)) for i, v in enumerate(group.versions))
            self.buffer.put(Group(Prompt(group.number, (0,), "", ""), tuple(samples)))
        if self.buffer.ended["filtered"] + self.buffer.ended["failed"] > rejected:
            self.wasted += self.making.pop(group.number).tokens

    def acknowledge(self, engine: Engine, version: int) -> None:
        """The engine samples with this version."""
        engine.acknowledged = version
        self.buffer.acknowledge(min(e.acknowledged for e in self.engines))
        self.admit()

    # ---- training

    def train(self) -> None:
        """Begin the next update if the trainer is free and the groups of a step are there."""
        if self.training or (groups := self.buffer.poll()) is None:
            return
        taken = {number: self.making.pop(number).tokens for number in self.buffer.taken if number in self.making}
        tokens = sum(taken.pop(group.prompt.number) for group in groups)
        self.wasted += sum(taken.values())  # left out where steps shrink
        end = self.now + self.c.train_base + self.c.train_token * tokens / self.trainers
        for lane in self.lanes:
            self.span(lane, "update", self.now, end)
        if not self.c.colocated:
            self.span("trainer", "wait", self.waits, self.now)
        self.training = True
        self.at(end, self.updated, groups, tokens)

    def updated(self, groups: Sequence[Group], tokens: int) -> None:
        """The update is over: a new version, on its way to the engines."""
        version = len(self.steps) + 1
        lags = Counter(version - 1 - s.first_version for group in groups for s in group.samples)
        self.buffer.trained(version)
        self.steps.append(Step(self.now, tokens, lags, self.buffer.lap()))
        free = self.now + self.c.overhead + self.c.switch * self.c.colocated
        for lane in self.lanes:
            self.span(lane, "save", self.now, self.now + self.c.overhead)
            self.span(lane, "sync", self.now + self.c.overhead, free)
        self.at(free if self.c.colocated else self.now + self.c.sync, self.deliver, version)
        self.at(free, self.free)
        self.admit()

    def deliver(self, version: int) -> None:
        """The version is at the engines."""
        for engine in self.engines:
            engine.pending = version
            self.plan(engine)

    def free(self) -> None:
        """The trainer can begin again."""
        self.training, self.waits = False, self.now
        self.train()


if __name__ == "__main__":
    from nanorl.forecast import main

    sys.exit(main(sys.argv[1:]))
