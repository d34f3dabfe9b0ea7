"""What runs in the engine's process? A LocalEngine, and the messages to and from the trainer (`worker.py`).

Started by the trainer with the number of an open socket: python -m nanorl.engine_process FD
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from nanorl.engine import Broken, Sampling
from nanorl.local import LocalEngine
from nanorl.policy import Policy
from nanorl.timeline import Span
from nanorl.worker import weights_of


class Serving:
    """A LocalEngine, and the messages to and from it."""

    def __init__(self, connection: Connection, engine: LocalEngine):
        self.connection, self.engine = connection, engine
        self.tasks: dict[int, asyncio.Task] = {}
        self.outbox: list[dict[str, Any]] = []
        self.kinds = {"generate": self.generate, "cancel": self.cancel, "weights": self.load,
                      "pause": self.pause, "resume": self.resume}  # fmt: skip

    async def run(self) -> None:
        """Serve until the trainer is gone; an error that belongs to no request ends the process with its traceback."""
        self.loop = asyncio.get_running_loop()
        failed = self.loop.create_future()
        self.loop.set_exception_handler(lambda loop, context: failed.set_exception(
            context.get("exception") or RuntimeError(context["message"])))  # fmt: skip
        threading.Thread(target=self.listen, name="trainer", daemon=True).start()
        await failed

    def listen(self) -> None:
        """On a thread of its own: read messages and the weights behind them, which are complete before they are used."""
        try:
            while True:
                message, staged = json.loads(self.connection.recv_bytes()), []
                for _, dtype, shape in message.get("tensors", ()):
                    tensor = torch.empty(shape, dtype=getattr(torch, dtype))
                    self.connection.recv_bytes_into(tensor.reshape(-1).view(torch.uint8).numpy())
                    staged.append(tensor)
                self.loop.call_soon_threadsafe(self.kinds[message["kind"]], message, staged)
        except (EOFError, OSError):
            os._exit(0)  # the trainer is gone, whatever is being sampled

    def generate(self, message: dict[str, Any], _: list[Tensor]) -> None:
        """Requests, in their order."""
        for request in message["requests"]:
            task = self.tasks[request["id"]] = self.loop.create_task(self.answer(request))
            task.add_done_callback(lambda _, number=request["id"]: self.tasks.pop(number))

    async def answer(self, request: dict[str, Any]) -> None:
        """One request, to its end."""
        asked = request["sampling"]
        sampling = Sampling(**{**asked, "end": frozenset(asked["end"]), "stop": tuple(asked["stop"]),
                               "key": tuple(asked["key"])})  # fmt: skip
        try:
            done = await self.engine.generate(request["ids"], sampling)
            told = {"completion": [done.ids, done.logp, done.version, done.finish]}
        except ValueError as error:
            told = {"refused": str(error)}
        except Broken as error:
            traceback.print_exception(error)
            told = {"broken": [type(error.__cause__).__name__, str(error)]}
        self.tell(id=request["id"], **told)

    def tell(self, **message: Any) -> None:
        """Something for the trainer, in one letter with all else of this token step: opening letters takes it time."""
        if not self.outbox:
            self.loop.call_soon(self.flush)
        self.outbox.append(message)

    def flush(self) -> None:
        """Send what there is to tell, with what took time since the last letter."""
        messages, self.outbox = self.outbox, []
        spans = [vars(span) for span in self.engine.lap()]
        self.connection.send_bytes(json.dumps({"messages": messages, "spans": spans}).encode())

    def cancel(self, message: dict[str, Any], _: list[Tensor]) -> None:
        """Nobody waits for this request any more."""
        if message["id"] in self.tasks:
            self.tasks[message["id"]].cancel()

    @torch.no_grad()
    def load(self, message: dict[str, Any], staged: list[Tensor]) -> None:
        """New weights, between two token steps. Raises ValueError where they do not fit this model one to one."""
        start, interrupted = time.monotonic(), len(self.engine.rows)
        mine = dict(weights_of(self.engine.policy.model))
        theirs = {name: tensor for (name, *_), tensor in zip(message["tensors"], staged)}
        for name in mine.keys() | theirs.keys():
            if name not in mine or name not in theirs or mine[name].shape != theirs[name].shape:
                raise ValueError(f"the trainer's weights are not those of this model: {name}")
        for name, tensor in mine.items():
            tensor.copy_(theirs[name])
        self.engine.update_weights(self.engine.policy, message["version"])
        took = Span("engine 0", "interrupt" if interrupted else "sync", start, time.monotonic(), {"rows": interrupted})
        self.engine.updates.append(took)
        self.tell(version=message["version"])

    def pause(self, message: dict[str, Any], _: list[Tensor]) -> None:
        """See Engine."""
        self.engine.pause()

    def resume(self, message: dict[str, Any], _: list[Tensor]) -> None:
        """See Engine."""
        self.engine.resume()


def main() -> None:
    """The engine's process: the first message says on how many threads, and where the model's configuration lies.

    The weights come from the trainer, before the first request.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = Connection(int(sys.argv[1]))
    settings = json.loads(connection.recv_bytes())
    torch.set_num_threads(settings["threads"])
    config, tokenizer = (kind.from_pretrained(settings["model"]) for kind in (AutoConfig, AutoTokenizer))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(settings["device"])
    policy = Policy(model, dtype=getattr(torch, settings["dtype"])).requires_grad_(False)
    asyncio.run(Serving(connection, LocalEngine(policy, tokenizer, settings["version"])).run())


if __name__ == "__main__":
    main()
