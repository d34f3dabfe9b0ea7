"""Who generates? Episodes, the groups made of them, and the thread that keeps them going.

An episode is an asynchronous function of one trajectory: it asks the engine for tokens and a reward for a number, as
often as it likes, and returns what was sampled. G of them at one prompt are a group.

    python -m nanorl.rollout CHECKPOINT "123+456="          what does this checkpoint answer? (ask.py)
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import TimeoutError as NotYet
from dataclasses import replace
from typing import Any

if __name__ == "__main__":  # before the imports below, which take seconds: whoever asks for help waits for none
    from nanorl.ask import main

    sys.exit(main(sys.argv[1:]))

from nanorl.buffer import HEARTBEAT, Buffer, Stopped
from nanorl.config import Lost
from nanorl.engine import Broken, Completion, Engine, Sampling
from nanorl.monitor import collecting
from nanorl.sample import Group, Prompt, Sample

CLOSING = 10.0  # seconds that a thread gets to end what it does
TRAIN, EVALUATE = 0, 1  # the streams of random numbers: evaluation never moves what training draws


class Unscored(Exception):
    """Raised by a Score: this sample has none, for a reason that is counted. It leaves its group."""


Score = Callable[[Prompt, str, Sequence[int]], Awaitable[float]]  # prompt, sampled text, sampled ids → reward


class Turns:
    """The engine as one trajectory sees it: every `generate` is its next turn, with random numbers of its own."""

    def __init__(self, engine: Engine, tokenizer: Any, sampling: Sampling):
        self.engine, self.tokenizer, self.sampling, self.turn = engine, tokenizer, sampling, 0

    async def generate(self, ids: Sequence[int], images: Sequence[Any] = ()) -> Completion:
        """Continue these ids."""
        sampling = replace(self.sampling, key=(*self.sampling.key, self.turn))
        self.turn += 1
        return await self.engine.generate(ids, sampling, images)

    def text(self, completion: Completion) -> str:
        """The sampled text without special tokens, as a reward reads it."""
        return self.tokenizer.decode(completion.ids, skip_special_tokens=True)


Episode = Callable[[Turns, Prompt, Score], Awaitable[list[Sample]]]


async def one_turn(engine: Turns, prompt: Prompt, score: Score) -> list[Sample]:
    """The episode of one question and one answer: generate, score, done. The reward stands at the last sampled token."""
    completion = await engine.generate(prompt.ids, prompt.images)
    text = engine.text(completion)
    reward = await score(prompt, text, completion.ids)
    n = len(prompt.ids)
    return [
        Sample(
            ids=(*prompt.ids, *completion.ids),
            mask=(False,) * n + (True,) * len(completion.ids),
            logp_behave=(0.0,) * n + completion.logp,
            version=(-1,) * n + completion.version,
            finish=completion.finish,
            rewards=((n + len(completion.ids) - 1, reward),),
            text=text,
        )
    ]


async def group(engine: Engine, tokenizer: Any, prompt: Prompt, score: Score, sampling: Sampling, samples: int,
                episode: Episode = one_turn) -> Group:  # fmt: skip
    """Try one prompt `samples` times at once. `sampling.key` is (seed, stream); number, sample and turn are added.

    A try without a score is left out; raises Unscored where all are.
    """

    async def trajectory(i: int) -> list[Sample] | None:
        """One of the tries; None if it has no score."""
        with collecting() as notes:
            turns = Turns(engine, tokenizer, replace(sampling, key=(*sampling.key, prompt.number, i)))
            try:
                return [replace(s, notes=tuple(notes)) for s in await episode(turns, prompt, score)]
            except Unscored:
                return None
            except (SystemExit, KeyboardInterrupt) as error:  # in an asyncio task they would end the thread unheard
                raise RuntimeError(f"prompt {prompt.number}: its episode or reward ended with {error!r}") from error

    try:
        async with asyncio.TaskGroup() as together:  # where one fails, the others are ended: nobody waits for them
            tries = [together.create_task(trajectory(i)) for i in range(samples)]
    except ExceptionGroup as failed:
        first = failed.exceptions[0]
        raise first from first.__cause__
    scored = [made for one in tries if (made := one.result()) is not None]
    if not scored:
        raise Unscored(f"prompt {prompt.number}: none of its {samples} tries has a score")
    return Group(prompt, tuple(sample for made in scored for sample in made))


class Rollout:
    """A thread that keeps as many groups in the making as the buffer admits, and answers other questions meanwhile."""

    def __init__(self, buffer: Buffer, make: Callable[[int], Coroutine[Any, Any, Group]]):
        self.buffer, self.make, self.tasks, self.closed = buffer, make, set(), False
        self.deadline = buffer.pace.deadline
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, name="rollout", daemon=True)
        self.thread.start()

    def pump(self) -> None:
        """Start every group that may start now. Call it whenever the buffer's rule may have changed."""
        self.loop.call_soon_threadsafe(self.start_admitted)

    def start_admitted(self) -> None:
        """On the thread: groups admitted together reach the engine together, in order."""
        while not self.closed and (number := self.buffer.admit()) is not None:
            task = self.loop.create_task(self.one(number))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)

    async def one(self, number: int) -> None:
        """One group into the buffer, or one that failed; what ends sampling (an exit, too) reaches the trainer."""
        try:
            async with asyncio.timeout(self.deadline) as limit:
                made = await self.make(number)
            if not any(sample.train for sample in made.samples):
                raise ValueError(f"prompt {number}: its episodes returned no sample to train on")
            self.buffer.put(made)
        except Broken as broken:
            self.buffer.stop(broken.__cause__)
        except Unscored:
            self.buffer.fail(number, None)
        except Lost as lost:
            self.buffer.stop(lost)
        except TimeoutError as error:  # ours, or the reward's own
            late = TimeoutError(f"prompt {number}: not done within --deadline {self.deadline:g} s")
            self.buffer.fail(number, late if limit.expired() else error)
        except Exception as error:
            self.buffer.fail(number, error)
        except BaseException as error:
            if not self.closed:
                self.buffer.stop(error)
        self.start_admitted()  # a group that was rejected has given its place back

    def call(self, question: Coroutine[Any, Any, Any], what: str, stop: Callable[[], bool]) -> Any:
        """The answer to a question asked on the thread; after HEARTBEAT seconds it says `what` it waits for.

        Raises Stopped when `stop()` turns true; what ended sampling; Lost when an episode or a reward that does not
        await has held the thread for --deadline seconds.
        """
        future = asyncio.run_coroutine_threadsafe(question, self.loop)
        said = self.moved = time.monotonic()
        while True:
            self.loop.call_soon_threadsafe(self.here)
            try:
                return future.result(timeout=0.2)
            except NotYet:
                if future.done():
                    return future.result()  # it came meanwhile; or the question's own timeout
                if stop() or self.buffer.error is not None:
                    future.cancel()
                    raise self.buffer.error or Stopped from None
            held = (now := time.monotonic()) - self.moved
            if held > self.deadline:
                raise Lost(f"an episode or a reward has held its thread for {held:.0f} s (--deadline {self.deadline:g}), "
                           f"and with it {what}; let it await, or make it faster")  # fmt: skip
            if now - said > HEARTBEAT:
                said = now
                why = f": an episode or a reward holds its thread since {held:.0f} s" if held > 1 else ""
                print(f"waiting for {what}{why}", flush=True)

    def here(self) -> None:
        """On the thread: it is not held."""
        self.moved = time.monotonic()

    def between(self, do: Callable[[], None], what: str) -> None:
        """Do this on the thread, between two token steps."""
        async def doing() -> None:
            """On the thread."""
            do()

        self.call(doing(), what, lambda: False)

    def close(self) -> None:
        """End what is in the making, and the thread."""
        self.closed = True

        async def cancel() -> None:
            """On the thread: end every task."""
            for task in self.tasks:  # the groups first, and to their end: asyncio reports what nobody waited for
                task.cancel()
            await asyncio.gather(*self.tasks, return_exceptions=True)
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()
        try:
            asyncio.run_coroutine_threadsafe(cancel(), self.loop).result(timeout=CLOSING)
        except NotYet:
            print(f"warning: an episode or a reward has held its thread for {CLOSING:.0f} s; it is left behind",
                  file=sys.stderr, flush=True)  # fmt: skip
            return
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(timeout=30)
