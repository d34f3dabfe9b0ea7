"""What runs in a process that scores? The rewards it was told by name, one verdict after the other, each within limits.

Started by `scoring.py` with the number of an open socket: python -m nanorl.verdict FD. What is said there is JSON with its
length before it, never a pickle; what a reward prints goes to stderr. The kernel ends this process where a verdict takes
too long, and the end of the socket ends it otherwise, so that it cannot outlive its trainer, however that ends.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import os
import resource
import signal
import socket
import sys
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


def judge(rewards: dict[str, Callable[..., Any]], job: dict[str, Any], loop: asyncio.AbstractEventLoop) -> dict[str, Any]:
    """One sample's verdict, as the trainer is told it: value, parts by label, what was logged, fault and why.

    The arguments are as they are in the trainer, ids as tuples. A reward that ends the program has raised, no more.
    """
    prompt, completion, prompt_ids, completion_ids, answer = job["args"]
    args = prompt, completion, tuple(prompt_ids), tuple(completion_ids), answer
    value, parts, notes, fault, why = None, {}, [], None, ""
    try:
        with collecting() as notes:
            for spec in job["specs"]:
                told = rewards[spec](*args, **job["row"])
                if inspect.isawaitable(told):
                    told = loop.run_until_complete(waited(told))
                parts[label(spec)] = finite(told, label(spec), job["number"])
        value = total(parts, job["specs"])
    except BaseException as error:
        fault, why = reason(error), last_line(error)
    return {"value": value, "parts": parts, "notes": notes, "fault": fault, "why": why}


async def waited(told: Awaitable[Any]) -> Any:
    """What an awaitable of any kind comes to."""
    return await told


def limit_memory(mebibytes: int) -> None:
    """From now on this process gets so much address space beside what it has; more raises MemoryError. Linux alone."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a process that is ended leaves no image of its memory behind
    if sys.platform == "linux":
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        room = pages * resource.getpagesize() + mebibytes * 2**20
        resource.setrlimit(resource.RLIMIT_AS, (room, room))


def main() -> None:
    """Say that all rewards are there, or why not; then verdicts, one message each, until the trainer is gone."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    stream = connection.makefile("rb")
    settings = json.loads(read(stream))
    try:
        rewards = {spec: named(split(spec)[0]) for spec in settings["specs"]}
    except Refused as error:
        connection.sendall(frame(json.dumps({"refused": str(error)}).encode()))
        return
    loop = asyncio.new_event_loop()
    limit_memory(settings["memory"])
    connection.sendall(frame(b'{"ready": true}'))
    while True:
        for job in json.loads(read(stream)):
            signal.signal(signal.SIGALRM, signal.SIG_DFL)  # a reward may have put its own handler there
            signal.setitimer(signal.ITIMER_REAL, settings["seconds"] + GRACE)
            told = judge(rewards, job, loop)
            signal.setitimer(signal.ITIMER_REAL, 0)
            connection.sendall(frame(json.dumps(told).encode()))


if __name__ == "__main__":
    try:
        main()
    except (EOFError, ConnectionError):  # whatever threads a reward has left behind
        os._exit(0)
