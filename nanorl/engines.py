"""Which engine samples? The one that the flags ask for: the trainer's own, behind it, beside it, or on servers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import torch

from nanorl import policy
from nanorl.engine import Engine
from nanorl.local import DelayedEngine

if TYPE_CHECKING:
    from nanorl.run import Run


def sampler(run: Run) -> Engine:
    """The engine of this run. Where its weights are its own it has none yet, and the first must come before a request.

    Raises Refused, and Lost where a server breaks off.
    """
    cfg, pace = run.cfg, run.cfg.pace
    if cfg.engine == "worker":
        return worker(run)
    if cfg.engine == "vllm":
        return vllm(run)
    if pace.delay == "inf" and run.last is not None:
        begin = policy.load(str(run.start), run.device)[0]
        return DelayedEngine(policy.Policy(begin, cfg.temperature, run.policy.dtype), run.tokenizer, 0, math.inf)
    if pace.delay != 0:
        return DelayedEngine(run.policy, run.tokenizer, run.step, pace.bound)
    return run.judge


def worker(run: Run) -> Engine:
    """A local engine in a process of its own. Where the two work at the same time they share the cores."""
    from nanorl.worker import WorkerEngine

    cfg, pace, threads = run.cfg, run.cfg.pace, torch.get_num_threads()
    if pace.stale:
        threads = shared(threads)
    for part in (run.policy.model.config, run.tokenizer):
        part.save_pretrained(run.folder / "engine")  # a checkpoint may be gone when an engine starts again
    settings = {"model": str(run.folder / "engine"), "device": pace.engine_device or run.device, "dtype": cfg.dtype,
                "threads": threads, "version": run.step}  # fmt: skip
    return WorkerEngine(settings, run.folder / "engine-0.log", run.rollout.loop, pace.restart_engine,
                        run.acknowledged, run.buffer.stop)  # fmt: skip


def shared(threads: int) -> int:
    """Leave half of the threads, rounded down, to an engine that works at the same time; returns how many, at least 1."""
    torch.set_num_threads(threads - threads // 2)
    return max(1, threads // 2)


def vllm(run: Run) -> Engine:
    """vLLM servers. One on this machine and its CPUs works beside the trainer."""
    from nanorl.serve import LOOPBACK
    from nanorl.servers import VLLMEngine

    remote = run.cfg.remote
    here = any(urlsplit(url).hostname in LOOPBACK for url in remote.servers)
    if here and run.device == "cpu" and run.cfg.pace.stale:
        shared(torch.get_num_threads())
    folder = run.folder / "weights" if remote.weights is None else Path(remote.weights)
    return VLLMEngine(remote, folder, run.policy.model.config, run.rollout.loop, run.acknowledged, run.buffer.stop)


def rooms(run: Run) -> list[int]:
    """Tokens that each vLLM server has room for. Raises Refused for one that is not there, or that has another model."""
    from nanorl.sync import Link

    found = []
    for url in run.cfg.remote.servers:
        link = Link(url, run.cfg.remote.transport)
        found.append(link.check(run.policy.model.config))
        link.close()
    return found
