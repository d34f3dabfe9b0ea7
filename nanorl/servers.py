"""Who samples when the servers are vLLM's? The engine over one or several of them: tokens, new weights, what breaks.

    rollout's loop       generate ─ token ids, seed ──► the server with the least in flight ── ids, log-probs, versions
    a thread per server  newest weights ──► Link.publish (sync.py): staged beside the work, loaded, proven

A server is in use once it has proven a version. While it loads a new one, new requests stay away from it, and what it
answers with tokens of the new version waits for the proof. One that is lost, or whose proof fails, leaves: what is in
flight there is thrown away, whole, and asked again elsewhere. Its thread looks for it, and when it is there again it
proves the newest version before its first request. So every request is answered once, by proven weights.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
from transformers import PreTrainedConfig

from nanorl.config import Lost, Refused, Remote
from nanorl.engine import Completion, Sampling, broken
from nanorl.policy import Policy
from nanorl.remote import HANG, Left, Server, body_of
from nanorl.snapshot import Weights, label, snapshot
from nanorl.sync import SERVE, Failed, Link, Unproven
from nanorl.timeline import Span

WATCH = 5.0  # seconds between two looks at a server that has something in flight
AGAIN = 1.0  # seconds between two tries to find a server, or to send it what did not arrive
CLOSING = 10.0  # seconds that a thread gets to end what it does
COLDEST = 0.01  # vLLM samples anything colder at this temperature, in silence


class VLLMEngine:
    """vLLM servers as one engine. `generate` is called on `loop`, the rest from any thread; see Engine.

    acknowledged(version) and failed(error) are called on the loop: when the server with the oldest weights has proven
    newer ones; when there has been none for `patience` seconds, or the first proof has failed. Before the first proof the
    version is −1. Raises Refused where a server is not there, was started otherwise, or has another model.
    """

    def __init__(self, remote: Remote, folder: Path, config: PreTrainedConfig, loop: asyncio.AbstractEventLoop,
                 acknowledged: Callable[[int], None], failed: Callable[[BaseException], None]):  # fmt: skip
        self.remote, self.config, self.loop = remote, config, loop
        self.acknowledged, self.failed = acknowledged, failed
        self.version = -1
        links = [Link(url, remote.transport, folder, HANG, remote.mismatch) for url in remote.servers]
        self.room = min(link.check(config) for link in links)
        self.servers = [Server(i, link, loop) for i, link in enumerate(links)]
        self.turn = asyncio.Event()  # a server is open, or all is over
        self.error: BaseException | None = None
        self.alone: asyncio.TimerHandle | None = None  # runs while no server is in use
        self.news = threading.Condition()  # of what the servers' threads wait for:
        self.weights: Weights | None = None  # the newest,
        self.paused = self.closed = False
        self.lost = set(self.servers)  # those that must be found, and join, first
        self.watching = asyncio.run_coroutine_threadsafe(self.watch(), loop)
        self.threads = [threading.Thread(target=self.tend, args=(server,), name=f"weights of {server.lane}", daemon=True)
                        for server in self.servers]  # fmt: skip
        for thread in self.threads:
            thread.start()

    # ---- on the loop: tokens

    async def generate(self, ids: Sequence[int], sampling: Sampling, images: Sequence[Any] = ()) -> Completion:
        """See Engine. Raises ValueError for what a server has no room for, or cannot sample."""
        if images:
            raise ValueError("the vllm engine takes no images")
        if not ids or len(ids) + sampling.max_new_tokens > self.room:
            raise ValueError(f"{len(ids)} prompt tokens + {sampling.max_new_tokens} new, but room for {self.room}")
        if 0 < sampling.temperature < COLDEST:
            raise ValueError(f"temperature {sampling.temperature:g}: vLLM knows 0, and {COLDEST:g} and above")
        body = body_of(ids, sampling)
        while True:
            server = await self.choose()
            try:
                return await server.generate(body)
            except Left:
                continue
            except Lost as error:
                self.leave(server, error)
            except FloatingPointError as error:
                raise broken(error) from error

    async def choose(self) -> Server:
        """The server with the least in flight, once one is open."""
        while True:
            if self.error is not None:
                raise broken(self.error)
            free = [server for server in self.servers if server.open]
            if free and not self.paused and not self.closed:
                return min(free, key=lambda server: server.flying)
            self.turn.clear()
            await self.turn.wait()

    async def watch(self) -> None:
        """Look at the servers that should be making tokens, every few seconds."""
        while True:
            await asyncio.sleep(WATCH)
            await asyncio.gather(*map(self.look, self.servers))

    async def look(self, server: Server) -> None:
        """Whether this one does."""
        if not server.flying or not server.open or self.paused:
            server.moved = time.monotonic()
            return
        left = server.left
        try:
            await server.look()
        except Lost as error:
            if not left.done():
                self.leave(server, error)

    # ---- on the loop: servers come and go

    def leave(self, server: Server, error: Exception) -> None:
        """It is lost, or holds weights that are not proven: nothing that is in flight there counts any more."""
        if self.closed or self.error is not None:
            return
        if str(error) != server.why:
            print(f"warning: {error}; it gets no request until it has proven its weights", file=sys.stderr, flush=True)
        server.version, server.coming, server.why = -1, None, str(error)
        server.proven.clear()
        server.left.set_result(None)
        server.left = self.loop.create_future()
        with self.news:
            self.lost.add(server)
            self.news.notify_all()
        self.settle()
        if self.alone is None and all(other.version < 0 for other in self.servers):
            self.alone = self.loop.call_later(self.remote.patience, self.give_up)

    def give_up(self) -> None:
        """There has been no server for too long."""
        server = self.servers[0]
        self.fail(Lost(f"no vLLM server for {self.remote.patience:g} s (--patience): {server.why}; start it again: "
                       f"{SERVE} --port {httpx.URL(server.url).port or 80}"))  # fmt: skip

    def fail(self, error: BaseException) -> None:
        """Nothing will be answered any more."""
        if self.error is None and not self.closed:
            self.error = error
            self.turn.set()
            self.failed(error)

    def hold(self, server: Server, version: int) -> None:
        """It is about to load this version."""
        server.coming = label(version)

    def release(self, server: Server) -> None:
        """It goes on with what it has."""
        server.coming = None
        server.changed.set()
        server.changed = asyncio.Event()
        self.turn.set()

    def proven(self, server: Server, version: int) -> None:
        """It samples with this version. One older than what the run knows of may not join: it has to get a newer one."""
        if server in self.lost:
            return
        if version < self.version:
            return self.leave(server, Lost(f"{server.url}: version {version} came too late"))
        if server.why:
            print(f"{server.url} is in use again, with version {version}", flush=True)
        server.version, server.why = version, ""
        server.proven.add(label(version))
        if self.alone is not None:
            self.alone.cancel()
            self.alone = None
        self.release(server)
        self.settle()

    def settle(self) -> None:
        """Tell of the oldest version in use, when it is a newer one."""
        used = [server.version for server in self.servers if server.version >= 0]
        if used and min(used) > self.version:
            self.version = min(used)
            self.acknowledged(self.version)

    # ---- on a thread for each server: weights

    def tend(self, server: Server) -> None:
        """Bring it the newest weights as they come; find it again where it was lost."""
        held, halted, since, count = -1, False, None, 0  # its version, paused by us, since when it fails, publishes
        while self.due(server, held, halted):
            try:
                if self.newer(server, held):
                    held, halted = self.bring(server, prove=count % self.remote.prove_every == 0), False
                    count += 1
                else:
                    server.link.ask("/resume" if halted else "/pause?mode=keep")
                    halted = not halted
                since = None
                continue
            except Failed as error:  # what it had is whole
                if since is None:
                    since = time.monotonic()
                    print(f"warning: {error}; it is tried again", file=sys.stderr, flush=True)
                late = time.monotonic() - since > self.remote.patience
                self.tell(self.leave, server, error) if late else self.tell(self.release, server)
            except (Lost, Unproven) as error:
                self.lost.add(server)
                self.tell(self.leave, server, error)
            except Refused as error:  # by the first proof
                return self.tell(self.fail, error)
            except BaseException as error:  # a mistake, handed to the run, which ends
                self.tell(self.fail, error)
                raise
            self.rest()

    def newer(self, server: Server, held: int) -> bool:
        """There are weights for a server that has this version. While the engine is paused nobody takes any."""
        return self.weights is not None and not self.paused and (server in self.lost or held < self.weights.version)

    def due(self, server: Server, held: int, halted: bool) -> bool:
        """Wait until there is something to do for a server that has this version and is paused or not. False: no more."""
        with self.news:
            self.news.wait_for(lambda: self.closed or self.newer(server, held)
                               or (server not in self.lost and halted != self.paused))  # fmt: skip
        return not self.closed

    def bring(self, server: Server, prove: bool) -> int:
        """The newest weights to this server, found first where it was lost. Raises Failed, Lost, Unproven, Refused."""
        if server in self.lost:
            try:
                server.link.workers("nanorl_about")
                server.link.check(self.config)
            except (Failed, Refused) as error:
                raise Lost(str(error)) from None
            server.link.connect()
            self.lost.discard(server)
        weights, busy, start = self.weights, server.flying, time.monotonic()
        took = server.link.publish(weights, lambda: self.tell(self.hold, server, weights.version), prove)
        cost = {name: value for name, value in vars(took).items() if value is not None}
        name = "interrupt" if busy else "sync"
        server.updates.append(Span(server.lane, name, start, time.monotonic(), {"rows": busy, **cost}))
        self.tell(self.proven, server, weights.version)
        return weights.version

    def rest(self) -> None:
        """A moment, cut short when all is over."""
        with self.news:
            self.news.wait_for(lambda: self.closed, timeout=AGAIN)

    def tell(self, what: Callable[..., None], *given: Any) -> None:
        """Do this on the loop."""
        if not self.closed:
            self.loop.call_soon_threadsafe(what, *given)

    # ---- from any thread

    def update_weights(self, policy: Policy, version: int) -> None:
        """See Engine: copies them; each server's thread takes the newest there are when it is done with the last."""
        weights = snapshot(policy, version)
        with self.news:
            self.weights = weights
            self.news.notify_all()

    def pause(self) -> None:
        """See Engine. Weights that come meanwhile are taken when it goes on: their proof needs a server that samples."""
        self.set_paused(True)

    def resume(self) -> None:
        """See Engine."""
        self.set_paused(False)

    def set_paused(self, paused: bool) -> None:
        """Tell the servers' threads, and those who wait for a server."""
        with self.news:
            self.paused = paused
            self.news.notify_all()
        self.tell(self.turn.set)

    def lap(self) -> list[Span]:
        """See Engine."""
        spans = []
        for server in self.servers:
            updates, server.updates = server.updates, []
            spans += server.work.lap() + updates
        return spans

    def close(self) -> None:
        """Leave the servers, which go on with what they have; what is in flight is never answered."""
        with self.news:
            self.closed = True
            self.news.notify_all()
        self.watching.cancel()
        for server, thread in zip(self.servers, self.threads):
            self.loop.call_soon_threadsafe(lambda left: left.done() or left.set_result(None), server.left)
            thread.join(timeout=CLOSING)
            if not thread.is_alive():  # else it is in the middle of something, and ends with this process
                server.link.close()
