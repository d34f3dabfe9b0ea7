"""How does the trainer speak with a process that scores? A socket, jobs as JSON, and an end that nothing survives.

`verdict.py` is what runs there, `scoring.py` keeps several of them at work.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanorl.verdict import frame, read

if TYPE_CHECKING:
    from nanorl.sample import Prompt

WRITING = 120.0  # seconds in which a process has to take what it is sent, and to be ready


@dataclass
class Job:
    """A sample that waits for its verdict. `again`: a process has died over it."""

    asked: bytes
    told: Future
    again: bool = False

    def starts(self) -> bool:
        """It may be scored now; False if nobody waits for it any more."""
        return self.told.running() or self.told.set_running_or_notify_cancel()


class Process:
    """A process that scores, as its thread sees it."""

    def __init__(self, specs: tuple[str, ...], seconds: float, memory_mib: int):
        """Start it; `receive` says when it is ready."""
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
        """Hand it a message; one that has died says so when it is asked to `receive`."""
        self.socket.settimeout(WRITING)
        try:
            self.socket.sendall(frame(body))
        except OSError:
            self.process.kill()

    def receive(self, seconds: float) -> dict[str, Any]:
        """What it says next. Raises TimeoutError after so many seconds, EOFError or OSError where it has died."""
        self.socket.settimeout(seconds)
        return json.loads(read(self.stream))

    def kill(self) -> None:
        """End it, and what its rewards have started."""
        if self.process.returncode is None:  # else the number may be another's by now
            try:
                os.killpg(self.process.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):  # macOS's word for a group whose only member has ended
                pass

    def end(self) -> int:
        """The status with which it has ended, killed if it had not."""
        self.kill()
        status = self.process.wait()
        self.stream.close()
        self.socket.close()
        return status


def asked(specs: tuple[str, ...], prompt: Prompt, completion: str, completion_ids: Sequence[int]) -> bytes:
    """A job as it travels. Fields of the row that JSON cannot hold, pictures say, are left out."""
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
