"""Who calls a reward safely? Processes that score, each verdict within a limit of time and of memory.

    trainer's process                                               a process that scores (verdict.py)
    score ─► queue ─► a thread each ── prompts and answers, JSON ──►  verdict after verdict, each under its own timer,
          ◄── future ──────────────── ◄── a message a verdict ──────  together with what the reward has logged

A process that passes a limit is killed and another takes its place; who stood behind the sample that it passed the limit
over is scored by the next. A process that died by itself may have been struck from outside: its sample is tried again,
once. So every sample gets one verdict, and none that has no score passes for one that earned 0: it is counted by reason,
and leaves its group, stops the run, or gets a fixed reward, as --on-reward-error says. Where half of the samples have no
score (`broken`), the run ends unless that reward is fixed: a broken reward does not run for hours.
"""

from __future__ import annotations

import asyncio
import math
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from nanorl import reward
from nanorl.config import Lost, Refused
from nanorl.faults import LIMITS, MISTAKES, WINDOW, Scoring, broken, number
from nanorl.monitor import collecting, own
from nanorl.reward import label, named, split
from nanorl.scoring_process import WRITING, Job, Process, asked, how
from nanorl.verdict import last_line, reason, total

if TYPE_CHECKING:
    from nanorl.sample import Prompt

QUICK, BATCH, BYTES = 0.005, 64, 2**20  # jobs that travel together: seconds they should take, how many, their size


@dataclass(frozen=True)
class Verdict:
    """What one sample is worth: Σ weight·value, None if it has no score; the values by label; what was logged."""

    value: float | None
    parts: dict[str, float]
    notes: tuple[tuple[str, float], ...]
    fault: str | None = None  # of LIMITS or MISTAKES, also where --on-reward-error gave it a value
    why: str = ""


class Scorer:
    """Rewards by name, called safely. `score` may be awaited on any loop; `workers` 0: called on that loop, unlimited."""

    def __init__(self, specs: tuple[str, ...], workers: int, seconds: float, memory_mib: int, on_error: str):
        """Start the processes, and wait for none of them. Raises Refused for rewards that cannot be logged apart."""
        for spec in specs if len(specs) > 1 else ():
            if not own(f"reward/{label(spec)}") or [label(other) for other in specs].count(label(spec)) > 1:
                raise Refused(f"--reward {spec}: reward/{label(spec)} is logged already; give that function another name")
        self.specs, self.seconds, self.memory_mib, self.on_error = specs, seconds, memory_mib, on_error
        self.here = {spec: named(split(spec)[0]) for spec in specs} if workers == 0 else {}
        self.queue: deque[Job] = deque()
        self.changed = threading.Condition()
        self.error: Exception | None = None  # nothing is scored any more, and why
        self.counts: Counter[str] = Counter()  # faults since the last lap
        self.seen: set[str] = set()  # those that were told
        self.recent: deque[str | None] = deque(maxlen=WINDOW)  # the last verdicts' faults
        self.processes: set[Process] = set()
        if workers and sys.platform == "darwin":
            print("note: --reward-memory: macOS limits no process's memory; a reward may take all there is", flush=True)
        self.threads = [threading.Thread(target=self.work, name=f"scoring {i}", daemon=True) for i in range(workers)]
        for thread in self.threads:
            thread.start()

    # ---- who samples

    async def score(self, prompt: Prompt, completion: str, completion_ids: Sequence[int]) -> Verdict:
        """What one sample is worth; with several rewards each is in the notes as reward/LABEL.

        Raises Lost where a sample without a score is to stop the run, or too many have none.
        """
        specs = prompt.rewards or self.specs
        if self.here:
            verdict, error = await self.unlimited(specs, prompt, completion, completion_ids)
        else:
            job, error = Job(asked(specs, prompt, completion, completion_ids), Future()), None
            with self.changed:
                if self.error is not None:
                    raise self.error
                self.queue.append(job)
                self.changed.notify()
            verdict = await asyncio.wrap_future(job.told)
        verdict = self.settled(verdict, prompt.number, error)
        parts = [(f"reward/{name}", value) for name, value in verdict.parts.items()] if len(specs) > 1 else []
        return replace(verdict, notes=(*verdict.notes, *parts))

    async def unlimited(self, specs: tuple[str, ...], prompt: Prompt, completion: str,
                        completion_ids: Sequence[int]) -> tuple[Verdict, Exception | None]:  # fmt: skip
        """A verdict in this process, and what the reward raised."""
        parts, notes = {}, []
        try:
            with collecting() as notes:
                for spec in specs:
                    parts[label(spec)] = await reward.score(self.here[spec], prompt, completion, completion_ids)
            return Verdict(total(parts, specs), parts, tuple(notes)), None
        except Exception as error:
            return Verdict(None, parts, tuple(notes), reason(error), last_line(error)), error

    def settled(self, verdict: Verdict, prompt: int, error: Exception | None) -> Verdict:
        """The verdict, counted; one without a score as --on-reward-error says, and told if it is the first of its kind.

        Raises Lost where that ends the run; the reward's own error, with its traceback, where it was raised here.
        """
        fault = verdict.fault
        with self.changed:
            self.recent.append(fault)
            if fault is None:
                return verdict
            first = fault not in self.seen
            self.counts[fault] += 1
            self.seen.add(fault)
            over = broken(self.recent)
            failed = len(self.recent) - self.recent.count(None)
        line = f"prompt {prompt} has no score ({fault}): {verdict.why}"
        if self.on_error == "stop" or (self.on_error == "drop" and over):
            share = "" if self.on_error == "stop" else f"; {failed} of the last {len(self.recent)} samples have none"
            raise error or Lost(f"{line}{share}; mend the reward (--reward-workers 0 shows the traceback), or give such "
                                "samples a reward, --on-reward-error NUMBER")  # fmt: skip
        if first:
            done = "left out of its group" if self.on_error == "drop" else f"given {self.on_error}"
            print(f"warning: {line}; it is {done}, and more of them are counted in reward/faults/{fault}", flush=True)
        return replace(verdict, value=number(self.on_error))

    def lap(self) -> dict[str, float]:
        """Samples without a score since the last lap, by reason, those of evaluations too; no key where there is none."""
        with self.changed:
            counts, self.counts = self.counts, Counter()
        return {f"reward/faults/{fault}": counts[fault] for fault in LIMITS + MISTAKES if counts[fault]}

    def close(self) -> None:
        """End all processes and threads. Who still waits for a verdict is told that nothing is scored any more."""
        self.fail(Lost("the run is over, so nothing is scored any more"))
        with self.changed:
            processes = [*self.processes]
        for process in processes:
            process.kill()
        for thread in self.threads:
            thread.join(timeout=10)

    # ---- on the threads

    def work(self) -> None:
        """One process after the other takes what is queued, in order."""
        took = math.inf  # seconds that a verdict took in the last batch
        try:
            process = self.begin()
            while jobs := self.take(took):
                began = time.monotonic()
                if not self.judged(process, jobs):
                    process = self.begin()
                took = (time.monotonic() - began) / len(jobs)
            self.ended(process)
        except Exception as error:  # whatever it is, who waits for a verdict must hear of it
            self.fail(error)

    def begin(self) -> Process:
        """A process that is ready. Raises Lost where it ends before, or does not find its rewards."""
        with self.changed:  # so that `close` sees every process that there is
            if self.error is not None:
                raise self.error
            process = Process(self.specs, self.seconds, self.memory_mib)
            self.processes.add(process)
        try:
            told = process.receive(WRITING)
        except (EOFError, OSError) as error:
            late = f"was not ready within {WRITING:.0f} s" if isinstance(error, TimeoutError) else None
            status = self.ended(process)
            raise Lost(f"a process that scores {late or how(status)} while it imported {' '.join(self.specs)}; "
                       "its last words are above") from None  # fmt: skip
        if "refused" in told:
            self.ended(process)
            raise Lost(told["refused"])
        return process

    def ended(self, process: Process) -> int:
        """End a process; its status."""
        status = process.end()
        with self.changed:
            self.processes.discard(process)
        return status

    def take(self, took: float) -> list[Job]:
        """The jobs for one process: as many as are quick, its share of the queue at most. Waits; [] at the end."""
        jobs, size = [], 0
        with self.changed:
            while not jobs:
                self.changed.wait_for(lambda: self.queue or self.error is not None)
                if self.error is not None:
                    return []
                most = min(BATCH, QUICK / took, math.ceil(len(self.queue) / len(self.threads)))
                while self.queue and (not jobs or (len(jobs) < most and size < BYTES)):
                    job = self.queue.popleft()
                    if job.starts():
                        jobs.append(job)
                        size += len(job.asked)
        return jobs

    def judged(self, process: Process, jobs: list[Job]) -> bool:
        """Verdicts on these jobs, in order. False if the process has ended: those without a verdict are queued again."""
        waiting, fault, last, why = deque(jobs), None, False, ""
        process.send(b"[" + b",".join(job.asked for job in jobs) + b"]")
        try:
            while waiting and not last:
                told = process.receive(self.seconds)
                last = told.pop("last")
                told["notes"] = tuple(map(tuple, told["notes"]))
                waiting.popleft().told.set_result(Verdict(**told))
            if not last:
                return True
        except TimeoutError:
            fault = "timeout"
        except (EOFError, OSError, ValueError):  # it is gone, or says what is no verdict
            fault = "died"
        status = self.ended(process)
        if fault == "timeout":
            why = f"not done within --reward-seconds {self.seconds:g}"
        elif fault == "died":
            why = f"the process that scored it {how(status)}, twice"
            if not waiting[0].again:
                waiting[0].again, fault = True, None
        if fault is not None:
            waiting.popleft().told.set_result(Verdict(None, {}, (), fault, why))
        with self.changed:
            self.queue.extendleft(reversed(waiting))
            self.changed.notify_all()
        return False

    def fail(self, error: Exception) -> None:
        """Nothing is scored any more: who waits, and who comes, gets this error, or the first of such."""
        with self.changed:
            self.error = self.error or error
            jobs, self.queue = self.queue, deque()
            self.changed.notify_all()
        for job in jobs:
            if job.starts():
                job.told.set_exception(self.error)


def scorer(specs: tuple[str, ...], flags: Scoring) -> Scorer:
    """Processes that score, as the flags ask for them."""
    return Scorer(specs, flags.reward_workers, flags.reward_seconds, flags.reward_memory, flags.on_reward_error)
