"""Who calls a reward safely? Processes that score, each verdict within a limit of time and of memory.

    trainer's process                                               a process that scores (verdict.py)
    score ─► queue ─► a thread each ── prompts and answers, JSON ──►  verdict after verdict, each under its own timer,
          ◄── future ──────────────── ◄── a message a verdict ──────  together with what the reward has logged

A process that passes a limit is killed and another takes its place; who stood behind the sample that it passed the limit
over is scored by the next. A process that died by itself may have been struck from outside: its sample is tried again,
once. So every sample gets one verdict, and none that has no score passes for one that earned 0: it is counted by reason,
and leaves its group, stops the run, or gets a fixed reward, as --on-reward-error says. Over half of the last WINDOW
verdicts without a score end the run in any case: a broken reward does not run for hours.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanorl import reward
from nanorl.config import Lost, Refused, Scoring, number
from nanorl.monitor import collecting, own
from nanorl.reward import label, named, split
from nanorl.verdict import frame, last_line, read, reason, total

if TYPE_CHECKING:
    from nanorl.sample import Prompt

FAULTS = ("timeout", "memory", "exception", "none", "nan", "died")  # why a sample has no score
BROKEN = ("exception", "none", "nan")  # of these, those that are the reward's own doing
WINDOW = 64  # verdicts of which half at most may be without a score
STARTING = 120.0  # seconds that a process may take to import the rewards
QUICK, BATCH, BYTES = 0.005, 64, 2**20  # jobs that travel together: seconds they should take, how many, their size


@dataclass(frozen=True)
class Verdict:
    """What one sample is worth: Σ weight·value, None if it has no score; the values by label; what was logged."""

    value: float | None
    parts: dict[str, float]
    notes: tuple[tuple[str, float], ...]
    fault: str | None = None
    why: str = ""


@dataclass
class Job:
    """A sample that waits for its verdict. `again`: a process has died over it."""

    number: int
    asked: bytes
    told: Future
    again: bool = False


class Worker:
    """A process that scores, as its thread sees it."""

    def __init__(self, specs: tuple[str, ...], seconds: float, memory_mib: int):
        self.socket, theirs = socket.socketpair()
        path = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-m", "nanorl.verdict", str(theirs.fileno())], pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL, stdout=2,  # what rewards print is no verdict
            start_new_session=True,  # Ctrl-C is the trainer's; and what a reward has started ends with it
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"})  # fmt: skip
        theirs.close()
        self.stream = self.socket.makefile("rb")
        self.send(json.dumps({"specs": specs, "seconds": seconds, "memory": memory_mib}).encode())

    def send(self, body: bytes) -> None:
        """Hand it a message. Raises OSError where it has died or does not read."""
        self.socket.settimeout(STARTING)
        self.socket.sendall(frame(body))

    def receive(self, seconds: float) -> dict[str, Any]:
        """What it says next. Raises TimeoutError after so many seconds, EOFError or OSError where it has died."""
        self.socket.settimeout(seconds)
        return json.loads(read(self.stream))

    def kill(self) -> None:
        """End it, and what its rewards have started."""
        if self.process.returncode is None:  # else the number may be another's by now
            os.killpg(self.process.pid, signal.SIGKILL)

    def end(self) -> int:
        """The status with which it has ended, killed if it had not."""
        self.kill()
        status = self.process.wait()
        self.stream.close()
        self.socket.close()
        return status


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
        self.counts, self.seen, self.recent = Counter(), set(), deque(maxlen=WINDOW)
        self.workers: set[Worker] = set()
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
        if self.here:
            verdict = await self.unlimited(prompt, completion, completion_ids)
        else:
            job = Job(prompt.number, asked(self.specs, prompt, completion, completion_ids), Future())
            with self.changed:
                if self.error is not None:
                    raise self.error
                self.queue.append(job)
                self.changed.notify()
            verdict = await asyncio.wrap_future(job.told)
        verdict = self.settled(verdict, prompt.number)
        parts = [(f"reward/{name}", value) for name, value in verdict.parts.items()] if len(self.specs) > 1 else []
        return replace(verdict, notes=(*verdict.notes, *parts))

    async def unlimited(self, prompt: Prompt, completion: str, completion_ids: Sequence[int]) -> Verdict:
        """A verdict in this process. What stops the run is raised as the reward raised it, with its traceback."""
        parts, notes = {}, []
        try:
            with collecting() as notes:
                for spec in self.specs:
                    parts[label(spec)] = await reward.score(self.here[spec], prompt, completion, completion_ids)
            return Verdict(total(parts, self.specs), parts, tuple(notes))
        except Exception as error:
            if self.stops(reason(error)):
                raise
            return Verdict(None, parts, tuple(notes), reason(error), last_line(error))

    def stops(self, fault: str) -> bool:
        """A sample that has no score for this reason stops the run."""
        return self.on_error == "stop" or (self.on_error == "auto" and fault in BROKEN)

    def settled(self, verdict: Verdict, prompt: int) -> Verdict:
        """The verdict, counted; one without a score as --on-reward-error says, and told if it is the first of its kind."""
        fault, first = verdict.fault, False
        with self.changed:
            self.recent.append(fault is not None)
            if fault is None:
                return verdict
            first = fault not in self.seen
            self.counts[fault] += 1
            self.seen.add(fault)
            failed = sum(self.recent)
        line = f"prompt {prompt} has no score ({fault}): {verdict.why}"
        if self.stops(fault):
            raise Lost(f"{line}; --reward-workers 0 shows the traceback, --on-reward-error drop goes on without such samples")
        if failed > WINDOW // 2:
            raise Lost(f"{failed} of the last {len(self.recent)} samples have no score, at last {line}; mend the reward")
        if first:
            done = "left out of its group" if self.on_error in ("auto", "drop") else f"given {self.on_error}"
            print(f"warning: {line}; it is {done}, and more of them are counted in reward/faults/{fault}", flush=True)
        return replace(verdict, value=number(self.on_error))

    def lap(self) -> dict[str, float]:
        """Samples without a score since the last lap, by reason, those of evaluations too; no key where there is none."""
        with self.changed:
            counts, self.counts = self.counts, Counter()
        return {f"reward/faults/{fault}": counts[fault] for fault in FAULTS if counts[fault]}

    def close(self) -> None:
        """End all processes and threads. Who still waits for a verdict is told that nothing is scored any more."""
        self.fail(Lost("the run is over, so nothing is scored any more"))
        with self.changed:
            workers = [*self.workers]
        for worker in workers:
            worker.kill()
        for thread in self.threads:
            thread.join(timeout=10)

    # ---- on the threads

    def work(self) -> None:
        """One process after the other takes what is queued, in order."""
        took = math.inf  # seconds that a verdict took in the last batch
        try:
            worker = self.begin()
            while jobs := self.take(took):
                began = time.monotonic()
                if not self.judged(worker, jobs):
                    worker = self.begin()
                took = (time.monotonic() - began) / len(jobs)
            self.ended(worker)
        except (Lost, Refused) as error:
            self.fail(error)

    def begin(self) -> Worker:
        """A process that is ready. Raises Refused for a reward that it cannot find, Lost where it ends before."""
        with self.changed:  # so that `close` sees every process that there is
            if self.error is not None:
                raise self.error
            worker = Worker(self.specs, self.seconds, self.memory_mib)
            self.workers.add(worker)
        try:
            told = worker.receive(STARTING)
        except (EOFError, OSError) as error:
            late = f"was not ready within {STARTING:.0f} s" if isinstance(error, TimeoutError) else None
            status = self.ended(worker)
            raise Lost(f"a process that scores {late or how(status)} while it imported {' '.join(self.specs)}; "
                       "its last words are above") from None  # fmt: skip
        if "refused" in told:
            self.ended(worker)
            raise Refused(told["refused"])
        return worker

    def ended(self, worker: Worker) -> int:
        """End a process; its status."""
        status = worker.end()
        with self.changed:
            self.workers.discard(worker)
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
                    if job.again or job.told.running() or job.told.set_running_or_notify_cancel():
                        jobs.append(job)
                        size += len(job.asked)
        return jobs

    def judged(self, worker: Worker, jobs: list[Job]) -> bool:
        """Verdicts on these jobs, in order. False if the process has ended: those without a verdict are queued again."""
        waiting, fault, why = deque(jobs), None, ""
        try:
            worker.send(b"[" + b",".join(job.asked for job in jobs) + b"]")
            while waiting and fault != "memory":  # what such a process still holds, nobody knows
                told = worker.receive(self.seconds)
                fault = told["fault"]
                waiting.popleft().told.set_result(Verdict(**{**told, "notes": tuple(map(tuple, told["notes"]))}))
            if fault != "memory":
                return True
            fault = None
        except TimeoutError:
            fault = "timeout"
        except (EOFError, OSError):
            fault = "died"
        status = self.ended(worker)
        if fault == "timeout" or status == -signal.SIGALRM:
            fault, why = "timeout", f"not done within --reward-seconds {self.seconds:g}"
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
            if job.told.running() or job.told.set_running_or_notify_cancel():
                job.told.set_exception(self.error)


def scorer(specs: tuple[str, ...], flags: Scoring) -> Scorer:
    """Processes that score, as the flags ask for them."""
    return Scorer(specs, flags.reward_workers, flags.reward_seconds, flags.reward_memory, flags.on_reward_error)


def asked(specs: tuple[str, ...], prompt: Prompt, completion: str, completion_ids: Sequence[int]) -> bytes:
    """A job as it travels. Fields of the row that JSON cannot hold, pictures say, stay here."""
    job = {"number": prompt.number, "specs": specs,
           "args": [prompt.text, completion, [*prompt.ids], [*completion_ids], prompt.answer]}  # fmt: skip
    try:
        return json.dumps({**job, "row": prompt.row}).encode()
    except (TypeError, ValueError):
        return json.dumps({**job, "row": {name: value for name, value in prompt.row.items() if plain(value)}}).encode()


def plain(value: Any) -> bool:
    """JSON can hold this.

    >>> plain([1, "a", None]), plain(b"picture")
    (True, False)
    """
    try:
        return json.dumps(value) is not None
    except (TypeError, ValueError):
        return False


def how(status: int) -> str:
    """How a process ended, in words.

    >>> how(-11), how(3)
    ('was ended by SIGSEGV', 'ended with status 3')
    """
    return f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
