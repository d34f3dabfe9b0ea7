"""What runs in a process that scores? The rewards it was told by name, one verdict after the other, each within limits.

Started by `scoring_process.py` with the number of an open socket: python -m nanorl.verdict FD. What is said there is
JSON with its length before it, never a pickle; what a reward prints goes to stderr. The end of the socket ends this
process, and the kernel does where a verdict takes too long, so that it cannot outlive its trainer, however that ends.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import os
import resource
import select
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable
from io import BufferedReader
from pathlib import Path
from typing import Any

from nanorl.config import Refused
from nanorl.monitor import collecting
from nanorl.reward import Unusable, finite, label, named, split

GRACE = 1.0  # seconds after the trainer's limit at which the kernel ends a verdict, should there be no trainer any more


def frame(body: bytes) -> bytes:
    """A message as it travels: its length in 4 bytes, then its JSON.

    >>> frame(b"[]")
    b'\\x00\\x00\\x00\\x02[]'
    """
    return len(body).to_bytes(4, "big") + body


def read(stream: BufferedReader) -> bytes:
    """The next message. Raises EOFError where there is none, and what the stream raises."""
    head = stream.read(4)
    body = stream.read(int.from_bytes(head, "big")) if len(head) == 4 else b""
    if len(head) < 4 or len(body) < int.from_bytes(head, "big"):
        raise EOFError("the other side is gone")
    return body


def total(parts: dict[str, float], specs: tuple[str, ...]) -> float:
    """Σ weight·value over the rewards. Raises Unusable where that is not finite."""
    value = math.fsum(split(spec)[1] * parts[label(spec)] for spec in specs)
    if not math.isfinite(value):
        raise Unusable(f"the weighted sum of {parts} is {value}", "nan")
    return value


def reason(error: BaseException) -> str:
    """Which kind of fault an exception of a reward is: memory, none, nan or exception."""
    return "memory" if isinstance(error, MemoryError) else error.kind if isinstance(error, Unusable) else "exception"


def last_line(error: BaseException) -> str:
    """The last line of a traceback and where it was raised, short enough for a line.

    >>> last_line(ValueError("no gold"))
    'ValueError: no gold'
    """
    says = traceback.format_exception_only(error)[-1].strip()[:300]
    frames = traceback.extract_tb(error.__traceback__)
    return f"{says} ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else says


def judge(rewards: dict[str, Callable[..., Any]], job: dict[str, Any], loop: asyncio.AbstractEventLoop,
          room: int) -> dict[str, Any]:  # fmt: skip
    """One sample's verdict, as the trainer is told it: value, parts by label, what was logged, fault and why.

    The arguments are as they are in the trainer, ids as tuples. A reward that ends the program has raised, no more.
    """
    prompt, completion, prompt_ids, completion_ids, answer = job["args"]
    args = prompt, completion, tuple(prompt_ids), tuple(completion_ids), answer
    value, parts, notes, fault, why = None, {}, [], None, ""
    limit_memory(room)
    try:
        with collecting() as notes:
            for spec in job["specs"]:
                told = rewards[spec](*args, **job["row"])
                if inspect.isawaitable(told):
                    told = loop.run_until_complete(waited(told))
                parts[label(spec)] = finite(told, label(spec), job["number"])
        value = total(parts, job["specs"])
    except BaseException as error:
        limit_memory(None)  # else there may be no room for the words
        fault, why = reason(error), last_line(error)
    limit_memory(None)
    return {"value": value, "parts": parts, "notes": notes, "fault": fault, "why": why}


async def waited(told: Awaitable[Any]) -> Any:
    """What an awaitable of any kind comes to."""
    return await told


def held() -> int:
    """Bytes of address space that this process has; 0 where it cannot be limited (macOS)."""
    if sys.platform != "linux":
        return 0
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def limit_memory(room: int | None) -> None:
    """From now on more than `room` bytes beside what it holds raises MemoryError; None: no limit. Linux alone."""
    if sys.platform == "linux":
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        soft = hard if room is None else held() + room
        resource.setrlimit(resource.RLIMIT_AS, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def limit_time(seconds: float) -> None:
    """The kernel ends this process after so many seconds, and after so many of computing on every core; 0: never.

    Two timers, because a reward may use the first itself (signal.alarm; math-verify does) and leave it off.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for timer, number, factor in ((signal.ITIMER_REAL, signal.SIGALRM, 1), (signal.ITIMER_PROF, signal.SIGPROF, cores)):
        signal.signal(number, signal.SIG_DFL)  # a reward may have left its own handler there
        signal.setitimer(timer, seconds * factor)


def leave() -> None:
    """End this process and those that its rewards have started."""
    os.killpg(0, signal.SIGKILL)  # it leads a session of its own


def watch(connection: socket.socket) -> None:
    """On a thread: leave when the trainer has gone, even in the midst of a verdict that waits for something."""
    poll = select.poll()
    poll.register(connection, 0)  # its other end was closed: always told
    poll.poll()
    leave()


def main() -> None:
    """Say that all rewards are there, or why not; then verdicts, one message each, until the trainer is gone.

    The last that this process gives is marked: after one that took all memory nobody knows what is still held, and what
    rewards keep from verdict to verdict must not add up.
    """
    connection = socket.socket(fileno=int(sys.argv[1]))
    stream = connection.makefile("rb")
    settings = json.loads(read(stream))
    threading.Thread(target=watch, args=[connection], daemon=True).start()
    try:
        rewards = {spec: named(split(spec)[0]) for spec in settings["specs"]}
    except Refused as error:
        connection.sendall(frame(json.dumps({"refused": str(error)}).encode()))
        return
    loop, start, room = asyncio.new_event_loop(), held(), settings["memory"] * 2**20
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a process that is ended leaves no image of its memory behind
    connection.sendall(frame(b'{"ready": true}'))
    while True:
        for job in json.loads(read(stream)):
            limit_time(settings["seconds"] + GRACE)
            told = judge(rewards, job, loop, room)
            limit_time(0)
            told["last"] = told["fault"] == "memory" or held() - start > room
            connection.sendall(frame(json.dumps(told).encode()))


if __name__ == "__main__":
    try:
        main()
    except (EOFError, ConnectionError):
        leave()
