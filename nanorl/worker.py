"""Who samples while the trainer trains? The local engine in a process of its own, with weights of its own.

    trainer's process                                            engine's process (engine_process.py)
    generate         ── requests of one moment, in one message ──►  LocalEngine.generate
                     ◄── ids, log-probs, versions; spans of time ──
    update_weights   ── names and shapes, then raw bytes ────────►  staged by a thread that only reads,
                     ◄── version ────────────────────────────────   loaded between two token steps

The two speak JSON and raw bytes over a pair of sockets; nothing is pickled. The engine's process ends when the socket
does, so that it cannot outlive its trainer, however that ends. With --max-lag 0 a run is bitwise that of the local
engine: requests admitted together travel together, arrive in their order, and the weights are the same bytes.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor, nn

from nanorl.config import Lost
from nanorl.engine import Completion, Sampling, broken
from nanorl.policy import Policy
from nanorl.timeline import Span

OURS = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_")  # torchrun's, not the engine's


def weights_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every parameter and buffer once, tied ones under the first of their names."""
    return itertools.chain(model.named_parameters(), model.named_buffers())


class WorkerEngine:
    """The engine process as the trainer sees it. `generate` is called on `loop`, the rest from any thread; see Engine.

    acknowledged(version) and failed(error) are called on the loop: when the process samples with new weights, and when
    it has died for good.
    """

    def __init__(self, settings: dict[str, Any], log: Path, loop: asyncio.AbstractEventLoop, restart: bool,
                 acknowledged: Callable[[int], None], failed: Callable[[BaseException], None]):  # fmt: skip
        self.settings, self.log, self.loop, self.restart = settings, log, loop, restart
        self.said = open(log, "ab+")  # kept open: its last words are there although somebody tidies up
        self.acknowledged, self.failed = acknowledged, failed
        self.version = settings["version"]
        self.numbers = itertools.count()
        self.asked: dict[int, tuple[dict[str, Any], asyncio.Future]] = {}  # what is not answered yet
        self.outbox: list[dict[str, Any]] = []
        self.spans: list[Span] = []
        self.latest: tuple[dict[str, Any], list[Tensor]] | None = None  # weights for an engine that starts again
        self.lock = threading.Lock()
        self.error: Lost | None = None
        self.closed = False
        self.start()

    def start(self) -> None:
        """Start the process, and the threads that listen and write to it."""
        self.socket, theirs = socket.socketpair()
        kept = {name: value for name, value in os.environ.items() if not name.startswith(OURS)}
        package = str(Path(__file__).parents[1])
        path = os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])
        self.spoken = self.said.seek(0, os.SEEK_END)  # what an earlier process said is not its
        self.process = subprocess.Popen(
            [sys.executable, "-m", "nanorl.engine_process", str(theirs.fileno())], pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL, stdout=self.said, stderr=self.said,
            start_new_session=True,  # Ctrl-C is the trainer's
            env={**kept, "PYTHONPATH": path, "OMP_NUM_THREADS": str(self.settings["threads"])})  # fmt: skip
        theirs.close()
        connection, self.mail = Connection(os.dup(self.socket.fileno())), SimpleQueue()
        for work, name in ((self.listen, "from engine 0"), (self.post, "to engine 0")):
            threading.Thread(target=work, args=(connection, self.mail), name=name, daemon=True).start()
        self.send(self.settings)

    def send(self, message: dict[str, Any], tensors: Sequence[Tensor] = ()) -> None:
        """A message, and the bytes of its tensors, which must not change any more. Never waits for the process."""
        self.mail.put((message, tensors))

    def post(self, connection: Connection, mail: SimpleQueue) -> None:
        """On a thread of its own: send what is there to send."""
        try:
            while (letter := mail.get()) is not None:
                connection.send_bytes(json.dumps(letter[0]).encode())
                for tensor in letter[1]:
                    connection.send_bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
        except OSError:  # it has died: `listen` finds out why, and what is not answered is asked again or ends there
            return

    def listen(self, connection: Connection, mail: SimpleQueue) -> None:
        """On a thread of its own: everything that the process says, until it says no more."""
        try:
            while True:
                self.loop.call_soon_threadsafe(self.receive, json.loads(connection.recv_bytes()))
        except (EOFError, OSError):
            mail.put(None)
            if not self.closed:
                self.loop.call_soon_threadsafe(self.died)

    async def generate(self, ids: Sequence[int], sampling: Sampling, images: Sequence[Any] = ()) -> Completion:
        """See Engine. Raises ValueError as the local engine does."""
        if images:
            raise ValueError("the worker engine takes no images")
        if self.error is not None:
            raise broken(self.error)
        number, future = next(self.numbers), self.loop.create_future()
        request = {"id": number, "ids": list(ids), "sampling": {**vars(sampling), "end": sorted(sampling.end)}}
        self.asked[number] = request, future
        if not self.outbox:  # whoever asks at this moment travels with it
            self.loop.call_soon(self.flush)
        self.outbox.append(request)
        try:
            return await future
        except asyncio.CancelledError:
            self.send({"kind": "cancel", "id": number})
            raise
        finally:
            del self.asked[number]

    def flush(self) -> None:
        """Send the requests of this moment in one message."""
        requests, self.outbox = self.outbox, []
        self.send({"kind": "generate", "requests": requests})

    def update_weights(self, policy: Policy, version: int) -> None:
        """See Engine: sends them; the process acknowledges when it has loaded them, between two token steps."""
        names, tensors = zip(*weights_of(policy.model))
        shapes = [[name, str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in zip(names, tensors)]
        message = {"kind": "weights", "version": version, "tensors": shapes}
        copies = [tensor.detach().to("cpu", copy=True) for tensor in tensors]  # training goes on while they are sent
        with self.lock:  # the trainer's thread is here, and the loop's may be starting the process again
            if self.restart:
                self.latest = message, copies
            self.send(message, copies)

    def pause(self) -> None:
        """See Engine."""
        self.send({"kind": "pause"})

    def resume(self) -> None:
        """See Engine."""
        self.send({"kind": "resume"})

    def lap(self) -> list[Span]:
        """See Engine: what it has told of so far."""
        spans, self.spans = self.spans, []
        return spans

    def receive(self, letter: dict[str, Any]) -> None:
        """On the loop: what the process tells, and what took it time."""
        self.spans.extend(Span(**span) for span in letter["spans"])  # no +=, which would undo a lap meanwhile
        for message in letter["messages"]:
            if "version" in message:
                self.version = message["version"]
                self.acknowledged(self.version)
            elif message["id"] in self.asked and not self.asked[message["id"]][1].done():  # else cancelled meanwhile
                self.answer(self.asked[message["id"]][1], message)

    def answer(self, future: asyncio.Future, message: dict[str, Any]) -> None:
        """What came of a request."""
        if "completion" in message:
            ids, logp, version, finish = message["completion"]
            future.set_result(Completion(tuple(ids), tuple(logp), tuple(version), finish))
        elif "refused" in message:
            future.set_exception(ValueError(message["refused"]))
        else:
            kind, text = message["broken"]
            future.set_exception(broken({"FloatingPointError": FloatingPointError}.get(kind, RuntimeError)(text)))

    def died(self) -> None:
        """On the loop: the process has ended. Once, if asked to, start it again; else nothing will ever be answered."""
        status = self.process.wait(timeout=30)
        how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        self.said.seek(self.spoken)
        words = " / ".join(self.said.read().decode(errors="replace").split("\n")[-4:]).strip(" /") or "none"
        error = Lost(f"the engine process {how}; its last words ({self.log}): {words}")
        if self.restart:
            print(f"warning: {error}; it is started again, once", file=sys.stderr, flush=True)
            self.outbox.clear()  # they are among those that are asked again
            with self.lock:
                self.restart = False
                self.start()
                if self.latest is not None:  # else the first weights are yet to come
                    self.send(*self.latest)
            self.send({"kind": "generate", "requests": [request for request, _ in self.asked.values()]})
            return
        self.error = error
        for _, future in self.asked.values():
            if not future.done():
                future.set_exception(broken(error))
        self.failed(error)

    def close(self) -> None:
        """End the process, and see that it has ended."""
        self.closed = True
        try:
            self.socket.shutdown(socket.SHUT_RDWR)  # both ends read the end of the stream
        except OSError:  # it had ended before
            pass
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.socket.close()
        self.said.close()
