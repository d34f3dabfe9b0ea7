"""How are many answers sampled at once? The engine that runs in this process, on the weights in training or a copy."""

from __future__ import annotations

import asyncio
import copy
import math
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from nanorl.config import Refused
from nanorl.engine import Completion, Sampling, broken
from nanorl.policy import Policy, room
from nanorl.timeline import Lane, Span


class Request:
    """One answer in the making: what is known of it so far and who waits for it."""

    def __init__(self, ids: Sequence[int], sampling: Sampling, answer: asyncio.Future):
        self.ids, self.sampling, self.answer = tuple(ids), sampling, answer
        self.new: list[int] = []
        self.logp: list[float] = []
        self.version: list[int] = []
        seed = np.random.SeedSequence(sampling.key)
        self.uniform = np.random.Generator(np.random.Philox(seed)).random(sampling.max_new_tokens)


class LocalEngine:
    """The training model itself, in this process, decoding many answers at once.

    The rows of the key-value cache are aligned at the right, so a token step is one forward pass over [B, 1] however
    unequal the rows are. Rows that finish leave, rows that arrive are prefilled (each distinct prompt once) and join
    with padding on their left, and when the longest row leaves, the left edge is cut off.
    Raises Refused for models whose cache is not one of keys and values at every position.
    """

    def __init__(self, policy: Policy, tokenizer: Any, version: int = 0, max_rows: int = 512, prefill: int = 1 << 14):
        self.policy, self.tokenizer, self.version = policy, tokenizer, version
        self.max_rows, self.prefill_tokens = max_rows, prefill
        self.room = room(policy.model)
        for layer in DynamicCache(config=policy.model.config).layers:
            if type(layer) is not DynamicLayer:
                raise Refused(f"--model: --engine local knows no {type(layer).__name__}, only full attention")
        self.waiting: list[Request] = []
        self.rows: list[Request] = []
        self.cache, self.length = None, None  # keys and values [B, heads, S, D] a layer; [B] real tokens of each row
        self.driver: asyncio.Task | None = None
        self.running = True
        self.work = Lane("engine 0", "generate")
        self.updates: list[Span] = []

    async def generate(self, ids: Sequence[int], sampling: Sampling, images: Sequence[Any] = ()) -> Completion:
        """See Engine. Raises ValueError for what the model has no room for, whatever the sampling raised."""
        if images:
            raise ValueError("the local engine takes no images")
        if not ids or len(ids) + sampling.max_new_tokens > self.room:
            raise ValueError(f"{len(ids)} prompt tokens + {sampling.max_new_tokens} new, but room for {self.room}")
        loop = asyncio.get_running_loop()
        request = Request(ids, sampling, loop.create_future())
        self.waiting.append(request)
        if self.driver is None or self.driver.done():
            self.driver = loop.create_task(self.drive())
        return await request.answer

    def pause(self) -> None:
        """See Engine."""
        self.running = False

    def resume(self) -> None:
        """See Engine."""
        self.running = True

    def update_weights(self, policy: Policy, version: int) -> None:
        """See Engine. The weights are shared, so only the cache is old: rows in flight are prefilled again."""
        self.waiting = self.rows + self.waiting
        self.rows, self.cache, self.length = [], None, None
        self.version = version

    def lap(self) -> list[Span]:
        """See Engine."""
        updates, self.updates = self.updates, []
        return self.work.lap() + updates

    def close(self) -> None:
        """See Engine: it has started nothing."""

    async def drive(self) -> None:
        """Token steps until nobody waits; between two of them others (new requests, rewards) get their turn."""
        try:
            while self.waiting or self.rows:
                if self.running:
                    start = time.monotonic()
                    with torch.no_grad(), self.policy.autocast():  # not inference_mode: its tensors cannot be trained
                        counts = self.token_step()
                    self.work.add(start, time.monotonic(), **counts)
                await asyncio.sleep(0 if self.running else 0.01)
        except Exception as error:  # handed to everybody who waits, so that it ends the run with its traceback
            for request in self.rows + self.waiting:
                if not request.answer.done():
                    request.answer.set_exception(broken(error))
            self.rows, self.waiting, self.cache, self.length = [], [], None, None

    def token_step(self) -> dict[str, int]:
        """One token for every row: decode the rows there are, prefill the new ones, sample, let the finished leave.

        Returns what that took: tokens sampled (rows), tokens of distinct prefixes read (prefilled), and of answers that
        were interrupted, those of distinct prefixes (read_again) and all (interrupted).
        """
        states = []
        if self.rows:
            states.append(self.decode())
        new = self.admitted()
        self.rows += new
        if new:
            states.append(self.prefill(new))
        self.sample(torch.cat(states))
        prefixes, again = ([r.ids + tuple(r.new[:-1]) for r in some] for some in (new, [r for r in new if r.new[1:]]))
        counts = {"token_steps": 1, "rows": len(self.rows), "prefilled": sum(map(len, set(prefixes))),
                  "read_again": sum(map(len, set(again))), "interrupted": sum(map(len, again))}  # fmt: skip
        self.leave()
        return counts

    def decode(self) -> Tensor:
        """[B, H] the last hidden state of every row, after its latest token."""
        device, span = self.length.device, self.cache.get_seq_length() + 1
        token = torch.tensor([[r.new[-1]] for r in self.rows], device=device)
        mask = torch.arange(span, device=device) >= (span - 1 - self.length)[:, None]  # [B, S+1]
        out = self.policy.model.base_model(input_ids=token, attention_mask=mask, position_ids=self.length[:, None],
                                           past_key_values=self.cache, use_cache=True)  # fmt: skip
        self.length = self.length + 1
        return out.last_hidden_state[:, -1]

    def admitted(self) -> list[Request]:
        """The requests that join now, in order of arrival: as many as there are rows for and one prefill should hold."""
        new, distinct, longest, free = [], set(), 0, self.max_rows - len(self.rows)
        if self.rows and free < min(len(self.waiting), self.max_rows // 4):  # every joining copies the whole cache
            return []
        for request in self.waiting[: max(0, free)]:
            prefix = request.ids + tuple(request.new)
            distinct.add(prefix)
            longest = max(longest, len(prefix))
            if new and len(distinct) * longest > self.prefill_tokens:
                break
            new.append(request)
        del self.waiting[: len(new)]
        return new

    def prefill(self, new: list[Request]) -> Tensor:
        """[n, H] the last hidden states of the new rows, whose keys and values join the cache."""
        device = self.policy.model.device
        prefixes = [r.ids + tuple(r.new) for r in new]
        place = {prefix: i for i, prefix in enumerate(dict.fromkeys(prefixes))}  # each distinct prefix once
        span = max(map(len, place))
        ids = torch.tensor([[0] * (span - len(p)) + list(p) for p in place], device=device)
        length = torch.tensor([len(p) for p in place], device=device)
        mask = torch.arange(span, device=device) >= (span - length)[:, None]
        position = (mask.cumsum(1) - 1).clamp(min=0)
        cache = DynamicCache(config=self.policy.model.config)
        out = self.policy.model.base_model(input_ids=ids, attention_mask=mask, position_ids=position,
                                           past_key_values=cache, use_cache=True)  # fmt: skip
        rows = torch.tensor([place[p] for p in prefixes], device=device)
        cache.batch_select_indices(rows)
        self.cache = cache if self.cache is None else join(self.cache, cache)
        self.length = length[rows] if self.length is None else torch.cat([self.length, length[rows]])
        return out.last_hidden_state[rows, -1]

    def sample(self, hidden: Tensor) -> None:
        """Draw one token for every row by the inverse of its cumulative distribution at the row's own uniform number."""
        logits = self.policy.model.get_output_embeddings()(hidden).float()  # [B, V]
        heat = torch.tensor([[r.sampling.temperature] for r in self.rows], device=logits.device)
        logits = logits / heat.where(heat > 0, 1.0)
        wide = torch.float32 if logits.device.type == "mps" else torch.float64
        u = torch.tensor([[r.uniform[len(r.new)]] for r in self.rows], dtype=wide, device=logits.device)
        u = u.clamp(max=1 - torch.finfo(wide).eps)  # rounded to 1 it would pick the last token, likely or not
        # lab: begin (sample a token from logits with one uniform number)
        cumulative = logits.softmax(1).cumsum(1, dtype=wide)
        token = torch.searchsorted(cumulative, u * cumulative[:, -1:], right=True).clamp(max=logits.shape[1] - 1)
        # lab: end
        token = token.where(heat > 0, logits.argmax(1, keepdim=True))
        logp = logits.log_softmax(1).gather(1, token)
        if not logp.isfinite().all():
            raise FloatingPointError("log-probs are not finite: the weights are broken; lower --lr, take a checkpoint")
        for request, t, p in zip(self.rows, token[:, 0].tolist(), logp[:, 0].tolist()):
            request.new.append(t)
            request.logp.append(p)
            request.version.append(self.version)

    def leave(self) -> None:
        """Answer the requests that are finished; their rows leave the cache, and with them what only they needed."""
        stay = []
        for i, r in enumerate(self.rows):
            finish = self.finished(r)
            if finish is None and not r.answer.cancelled():
                stay.append(i)
            elif not r.answer.cancelled():
                r.answer.set_result(Completion(tuple(r.new), tuple(r.logp), tuple(r.version), finish))
        if len(stay) == len(self.rows):
            return
        self.rows = [self.rows[i] for i in stay]
        if not stay:
            self.cache, self.length = None, None
            return
        rows = torch.tensor(stay, device=self.length.device)
        self.length = self.length[rows]
        self.cache.batch_select_indices(rows)
        edge = self.cache.get_seq_length() - int(self.length.max())
        for layer in self.cache.layers:
            layer.keys, layer.values = layer.keys[:, :, edge:], layer.values[:, :, edge:]

    def finished(self, r: Request) -> str | None:
        """Why the request ends after its latest token, or None."""
        if r.new[-1] in r.sampling.end:
            return "stop"
        if r.sampling.stop:  # a text may span several tokens, so look at a tail that surely holds it
            longest = max(len(text.encode()) for text in r.sampling.stop)  # a token is a byte at least
            tail = self.tokenizer.decode(r.new[-(longest + 8) :])
            if any(text in tail for text in r.sampling.stop):
                return "stop"
        return "length" if len(r.new) == r.sampling.max_new_tokens else None


def join(a: DynamicCache, b: DynamicCache) -> DynamicCache:
    """The rows of two caches below each other, aligned at the right: the shorter gets zeros on its left."""
    span = max(a.get_seq_length(), b.get_seq_length())
    for x, y in zip(a.layers, b.layers):
        for name in ("keys", "values"):
            pair = (getattr(x, name), getattr(y, name))
            setattr(x, name, torch.cat([F.pad(t, (0, 0, span - t.shape[2], 0)) for t in pair]))
    return a


class DelayedEngine(LocalEngine):
    """The local engine with weights of some steps ago: stale samples for study, in one process.

    It samples with a second copy of the model and, when the trainer publishes version v, acknowledges max(0, v − delay);
    a resumed run has none older than those it resumes with. So every sample has a lag of exactly `delay` training steps
    from step `delay` + 1 on, where the bound of asynchronous training, AReaL's η, only says that none has more.
    A delay of ∞ keeps the weights that it begins with.
    """

    def __init__(self, policy: Policy, tokenizer: Any, version: int, delay: float):
        super().__init__(copy.deepcopy(policy).requires_grad_(False), tokenizer, version)
        self.delay = delay
        self.kept: deque[tuple[int, list[Tensor]]] = deque()  # newer versions, not yet sampled with; one copy each

    @torch.no_grad()
    def update_weights(self, policy: Policy, version: int) -> None:
        """Remember these weights, and sample with those of `delay` versions ago, once there are any."""
        if self.delay == math.inf:
            return
        start = time.monotonic()
        self.kept.append((version, [tensor.clone() for tensor in policy.state_dict().values()]))
        while self.kept and self.kept[0][0] <= version - self.delay:
            older, weights = self.kept.popleft()
            for mine, theirs in zip(self.policy.state_dict().values(), weights):
                mine.copy_(theirs)
            super().update_weights(policy, older)
        self.updates.append(Span("engine 0", "sync", start, time.monotonic()))
