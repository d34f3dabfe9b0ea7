"""What is a version of the weights, once training goes on? Copies as they travel, digests, a probe's log-probs.

Whoever receives a version can tell from the digests that it has the same bytes, and from the probe that it computes the
same with them.
"""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from nanorl.policy import Policy
from nanorl.transfer import describe, digest, lay_out

PROBE = 64  # tokens
RUN = secrets.token_hex(4)  # of this process


def label(version: int) -> str:
    """What a server calls this version: versions of another run, which may publish to the same server, are others."""
    return f"{RUN}.{version}"


@dataclass(frozen=True)
class Probe:
    """A fixed sequence of token ids, and the trainer's log-probs of ids[1:] at temperature 1."""

    ids: tuple[int, ...]
    logp: tuple[float, ...]


@dataclass(frozen=True)
class Weights:
    """One version as the trainer has it. Nothing in it changes any more: any number of threads may send it."""

    version: int
    buckets: list[Tensor]  # flat memory of their own, as it travels
    tensors: dict[str, Tensor]  # in the buckets, by Hugging Face name, tied ones once
    digests: dict[str, str]
    probe: Probe
    copy: float  # seconds that each part took
    digest: float


@torch.no_grad()
def snapshot(policy: Policy, version: int) -> Weights:
    """Copies of the weights, their digests, and what the probe's tokens score under them. On the trainer's thread."""
    start = time.monotonic()
    named = dict(policy.model.named_parameters())
    layout = lay_out(describe(named), policy.model.device)
    tensors = {name: tensor for _, inside in layout for name, tensor in inside.items()}
    for name, tensor in tensors.items():
        tensor.copy_(named[name])
    copied = time.monotonic()
    digests = {name: digest(tensor) for name, tensor in tensors.items()}
    digested = time.monotonic()
    vocabulary = policy.model.get_input_embeddings().weight.shape[0]
    seeded = torch.Generator().manual_seed(0)
    ids = torch.randint(vocabulary, (1, PROBE), generator=seeded)
    scorer, there = Policy(policy.model, dtype=policy.dtype), ids.to(policy.model.device)
    logp = scorer.score(scorer.hidden(there)[0, :-1], there[0, 1:])
    probe = Probe(tuple(ids[0].tolist()), tuple(logp.tolist()))
    buckets = [bucket for bucket, _ in layout]
    return Weights(version, buckets, tensors, digests, probe, copied - start, digested - copied)
