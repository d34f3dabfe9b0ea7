"""What does one vLLM server say? A request for tokens, its answer, and whether the server still makes any.

What a server answers is handed on when the versions that it was sampled with are proven (`servers.py` says when they
are). When the server leaves, everything that is in flight there is over at once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import httpx
import numpy as np

from nanorl.config import Lost
from nanorl.engine import Completion, Sampling
from nanorl.policy import first_line
from nanorl.sync import Link, words
from nanorl.timeline import Lane, Span

HANG = 60.0  # seconds without a single new token, after which a server is lost that has something in flight


class Left(Exception):
    """The server has left while this was in flight there: ask another."""


class Server:
    """One server as the rollout's loop sees it; nothing here is called elsewhere."""

    def __init__(self, number: int, link: Link, loop: asyncio.AbstractEventLoop):
        self.link, self.url, self.loop = link, link.url, loop
        # vLLM hangs up after an error, and a connection that is kept would then fail for no reason
        wait, once = httpx.Timeout(HANG, read=None, pool=None), httpx.Limits(max_keepalive_connections=0)
        self.http = httpx.AsyncClient(base_url=self.url, trust_env=False, timeout=wait, limits=once)
        self.version = -1  # proven, and in use; −1: not in use
        self.proven: set[str] = set()  # the versions proven since it was found, as its answers name them
        self.coming: str | None = None  # the version that it is taking
        self.changed = asyncio.Event()  # a proof has passed, or it goes on with what it had
        self.left = loop.create_future()  # done when it leaves
        self.why = ""  # it left
        self.flying, self.since = 0, 0.0  # requests in flight; when the last piece of its work ended
        self.moved, self.count = 0.0, 0.0  # when it was last seen to make tokens, and how many it had made
        self.lane = f"engine {number}"
        self.work = Lane(self.lane, "generate")
        self.updates: list[Span] = []

    @property
    def open(self) -> bool:
        """It takes new requests."""
        return self.version >= 0 and self.coming is None

    async def generate(self, body: dict[str, Any]) -> Completion:
        """One answer. Raises Lost, Left, ValueError for what the server refuses, FloatingPointError."""
        left, tokens = self.left, 0
        if not self.flying:
            self.since = self.moved = time.monotonic()
        self.flying += 1
        asking = self.loop.create_task(self.ask(body))
        asking.add_done_callback(lambda task: task.cancelled() or task.exception())  # heard, also where nobody waits
        try:
            await asyncio.wait({asking, left}, return_when=asyncio.FIRST_COMPLETED)
            if left.done():
                raise Left
            tokens = len(asking.result().ids)
            return asking.result()
        finally:
            asking.cancel()  # closes its connection, at which the server drops it
            self.flying -= 1
            start, self.since = self.since, time.monotonic()
            self.work.add(start, self.since, rows=tokens, prefilled=len(body["token_ids"]) if tokens else 0)

    async def ask(self, body: dict[str, Any]) -> Completion:
        """Ask, and wait for the proof of what the answer was sampled with."""
        try:
            reply = await self.http.post("/inference/v1/generate", json=body)
        except httpx.HTTPError as error:
            raise Lost(f"{self.url}: gone while it generated ({type(error).__name__}: {first_line(error)})") from None
        if reply.status_code in (400, 422):
            raise ValueError(f"{self.url}: {words(reply)}")
        if reply.is_error:
            raise Lost(f"{self.url}: answered {reply.status_code}: {words(reply)}")
        try:
            choice = reply.json()["choices"][0]
        except (ValueError, LookupError, TypeError):  # somebody else's words
            raise Lost(f"{self.url}: its answer is no completion: {words(reply)}") from None
        if choice["finish_reason"] not in ("stop", "length"):
            raise Lost(f"{self.url}: ended an answer by {choice['finish_reason']!r}")
        for span in choice["weight_versions"] or [{"version": "no version"}]:
            while span["version"] not in self.proven:
                if span["version"] != self.coming:
                    raise Lost(f"{self.url}: samples with {span['version']!r}, which this run has not published; "
                               "is it another run's, too, or was it started again?")  # fmt: skip
                await self.changed.wait()
        return read(choice)

    async def look(self) -> None:
        """Raise Lost if it does not answer, or has made no token for HANG seconds with something in flight."""
        try:
            reply = await self.http.get("/metrics", timeout=HANG)
        except httpx.HTTPError as error:
            raise Lost(f"{self.url}: does not answer ({type(error).__name__}: {first_line(error)})") from None
        if reply.is_error:
            raise Lost(f"{self.url}: answered {reply.status_code}: {words(reply)}")
        counts = [line.split()[-1] for line in reply.text.splitlines() if line.startswith("vllm:generation_tokens_total")]
        now, count = time.monotonic(), sum(map(float, counts))
        if count != self.count or not counts:  # with --disable-log-stats it does not count: it answers, that is all
            self.moved, self.count = now, count
        elif now - self.moved > HANG:
            raise Lost(f"{self.url}: has made no token for {now - self.moved:.0f} s, and {self.flying} requests wait")


def body_of(ids: Sequence[int], sampling: Sampling) -> dict[str, Any]:
    """What vLLM is asked: the whole distribution at the temperature; our end tokens and stop texts, and no others."""
    seed = int(np.random.SeedSequence(sampling.key).generate_state(1, np.uint64)[0] >> 1)  # its seeds are signed
    return {"token_ids": list(ids), "sampling_params": {
        "max_tokens": sampling.max_new_tokens, "temperature": sampling.temperature, "top_p": 1.0, "top_k": 0,
        "min_p": 0.0, "seed": seed, "logprobs": 0, "ignore_eos": True, "stop_token_ids": sorted(sampling.end),
        "stop": list(sampling.stop), "detokenize": bool(sampling.stop), "skip_special_tokens": False}}  # fmt: skip


def read(choice: dict[str, Any]) -> Completion:
    """A completion from what the server says of it. Raises FloatingPointError where a log-prob is not a number."""
    logp = tuple(token["logprob"] for token in choice["logprobs"]["content"])
    if min(logp) <= -9999:  # what vLLM says for NaN and −∞
        raise FloatingPointError("log-probs are not finite: the weights are broken; lower --lr, take a checkpoint")
    spans = [(int(span["version"].rpartition(".")[2]), span["end"] - span["start"]) for span in choice["weight_versions"]]
    version = [number for number, tokens in spans for _ in range(tokens)]
    return Completion(tuple(choice["token_ids"]), logp, tuple(version), choice["finish_reason"])
