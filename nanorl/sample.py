"""What flows? Prompt → Sample → Group → Batch, each frozen once it is made.

An episode turns a `Prompt` into a `Sample` for each of G tries; the tries at one prompt are a `Group`; the groups of
a training step are laid side by side in one padded `Batch`, and nothing after that looks back at the objects.

The contract that everything else relies on, called *alignment*:

    every per-token tensor is [B, T] and describes the token it stands at:
    logp[:, t] scores ids[:, t] given ids[:, :t];   mask[:, t] says that the policy sampled ids[:, t].

Column 0 has no past and is never in the mask. Nothing is rolled or shifted here; the one shift by one of the whole
project is in `policy.py`. Masks come from the sampler, never from token values, so padding may be the end token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanorl.loss import weights

FINISH = ("stop", "length", "abort")  # an end token or stop string was sampled; the length limit; cut short


@dataclass(frozen=True)
class Prompt:
    """One question as the engine gets it. `number` counts the prompts of a run and keys all that is random about it."""

    number: int
    ids: tuple[int, ...]
    text: str
    answer: str
    row: dict[str, Any] = field(default_factory=dict)  # the problem's other fields, given to the reward by name
    images: tuple[Any, ...] = ()
    rewards: tuple[str, ...] = ()  # what judges it, where tasks are mixed; else the task's
    task: str = ""  # which of the mixed tasks it is from


@dataclass(frozen=True)
class Sample:
    """One trajectory: prompt, answer and, in several turns, what came between. All tuples have the length of `ids`.

    `version` is the weight version that sampled each token (−1 where mask is False), `rewards` pairs a position with
    a value, `notes` holds the numbers that a reward or an episode logged about this sample (`monitor.log`).
    Raises ValueError where the tuples disagree: a sample without versions and masks cannot be built.
    """

    ids: tuple[int, ...]
    mask: tuple[bool, ...]
    logp_behave: tuple[float, ...]
    version: tuple[int, ...]
    finish: str
    rewards: tuple[tuple[int, float], ...]
    text: str = ""  # the sampled text, as the reward saw it
    notes: tuple[tuple[str, float], ...] = ()
    train: bool = True  # False: counted in baselines that ask for it, never in the loss

    def __post_init__(self) -> None:
        if not len(self.ids) == len(self.mask) == len(self.logp_behave) == len(self.version):
            raise ValueError("ids, mask, logp_behave and version of a sample differ in length")
        if not self.ids:
            raise ValueError("a sample has at least one token")
        if any(not 0 <= position < len(self.ids) for position, _ in self.rewards):
            raise ValueError("a reward of a sample stands outside of its tokens")
        if self.mask[0] or any(m != (v >= 0) for m, v in zip(self.mask, self.version)):
            raise ValueError("a version belongs to each sampled token and to no other; the first token is never sampled")
        if self.finish not in FINISH:
            raise ValueError(f"finish is {self.finish!r}; it is one of {', '.join(FINISH)}")

    @property
    def reward(self) -> float:
        """The whole reward of the trajectory, Σ over positions."""
        return sum(value for _, value in self.rewards)

    @property
    def first_version(self) -> int:
        """Version of the first sampled token: the oldest, so the sample's lag is the trainer's version minus this."""
        return next((v for v in self.version if v >= 0), -1)


@dataclass(frozen=True)
class Group:
    """The tries at one prompt, the unit of baselines, of admission and of lag."""

    prompt: Prompt
    samples: tuple[Sample, ...]


@dataclass(frozen=True)
class Batch:
    """The rows of a step. B rows, T tokens in the longest; padding is on the right and may hold anything."""

    ids: Tensor  # [B, T] int64
    mask: Tensor  # [B, T] bool: sampled by the policy
    logp_behave: Tensor  # [B, T] the engine's, while sampling, at the sampling temperature; 0 off the mask
    version: Tensor  # [B, T] int64, −1 off the mask
    rewards: Tensor  # [B, T] each reward at the position that earned it; 0 elsewhere, padding included
    length: Tensor  # [B] tokens before the padding
    group: Tensor  # [B] id of the group: rows with one id share a prompt, wherever they stand
    finish: Tensor  # [B] index into FINISH
    row: Tensor  # [B] place in the step's batch; it stays with the row through every split
    logp_prox: Tensor | None = None  # [B, T] the trainer's at the start of the step; None: not measured
    logp_ref: Tensor | None = None  # [B, T] the frozen reference's
    value: Tensor | None = None  # [B, T] the critic's at the start of the step, V(ids[:, :t])
    bootstrap: Tensor | None = None  # [B] V of the whole row where it was truncated, 0 elsewhere
    adv: Tensor | None = None  # [B, T] credit
    returns: Tensor | None = None  # [B, T] what the critic should have said
    keep: Tensor | None = None  # [B, T] bool: False takes a token's loss away and leaves all weights as they are
    left_out: Tensor | None = None  # [B] bool: rows without a loss, which no weight counts (--truncated mask, drop)
    weight: Tensor | None = None  # [B, T] what the token's loss counts in its update
    local_mean: bool = False  # bnpo: weights are made anew in every micro-batch
    step: int = 0  # the trainer's version at the start of the step
    done: float = 0.0  # share of the step's updates made before this one; 0: the current policy is π_prox

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def reward(self) -> Tensor:
        """[B] the whole reward of each row."""
        return self.rewards.sum(1)

    @property
    def truncated(self) -> Tensor:
        """[B] bool: ran into the length limit. From the finish reason, never from the row's length."""
        return self.finish == FINISH.index("length")

    @property
    def counted(self) -> Tensor:
        """[B, T] bool: the tokens that weights count, and that may have a loss: the mask, less the rows left out."""
        return self.mask if self.left_out is None else self.mask & ~self.left_out[:, None]

    def select(self, rows: Tensor) -> Batch:
        """The rows at these indices, in this order, without the columns that are padding in all of them."""
        width = int(self.length[rows].max()) if len(rows) else 1
        cut = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, Tensor):
                cut[f.name] = value[rows][:, :width] if value.dim() == 2 else value[rows]
        return replace(self, **cut)

    def to(self, device: torch.device | str) -> Batch:
        """The same batch on another device."""
        moved = {f.name: v.to(device) for f in fields(self) if isinstance(v := getattr(self, f.name), Tensor)}
        return replace(self, **moved)

    def shuffle_into(self, updates: int, epochs: int, key: tuple[int, ...]) -> list[Tensor]:
        """The rows of each optimizer step: `epochs` passes over the batch, each cut into `updates` equal parts.

        One update takes all rows as they stand; more are shuffled anew in every pass by a generator of this key.
        """
        if updates == 1:
            return [torch.arange(len(self))] * epochs
        passes = [np.random.default_rng((*key, epoch)).permutation(len(self)) for epoch in range(epochs)]
        return [torch.from_numpy(part) for rows in passes for part in np.array_split(rows, updates)]

    def weighted(self, aggregation: str, length_limit: int) -> Batch:
        """This update with each token's weight: `loss.weights` over what is counted, then zero where `keep` is False."""
        weight = weights(aggregation, self.counted.to(self.adv.dtype), self.group, length_limit)
        weight = weight if self.keep is None else weight * self.keep
        return replace(self, weight=weight, local_mean=aggregation == "bnpo")

    def split(self, tokens_per_micro_batch: int) -> Iterator[Batch]:
        """Micro-batches of at most this many tokens, padding included; a row is never cut and always fits alone.

        Rows without weight are left out (their gradient is zero and the others' weights already count them); the
        rest is sorted by length, so that rows of one micro-batch need little padding.
        """
        rows = (self.counted if self.local_mean else self.weight.ne(0)).any(1).nonzero()[:, 0]
        rows = rows[self.length[rows].argsort(descending=True, stable=True)]
        parts = pack(self.length[rows].tolist(), tokens_per_micro_batch)
        for start, stop in parts:
            micro = self.select(rows[start:stop])
            if self.local_mean:  # bnpo, by definition: the mean of each micro-batch, then the mean of those
                micro = replace(micro, weight=micro.weight / micro.counted.sum().clamp(min=1) / len(parts))
            yield micro


def pack(lengths: Sequence[int], tokens: int) -> list[tuple[int, int]]:
    """Cut lengths that fall from left to right into runs [start, stop) with rows × longest ≤ tokens.

    >>> pack([9, 8, 3, 3, 3], 18)
    [(0, 2), (2, 5)]
    """
    parts, start = [], 0
    for i in range(1, len(lengths) + 1):
        if i == len(lengths) or (i + 1 - start) * lengths[start] > tokens:
            parts.append((start, i))
            start = i
    return parts


def collate(groups: Sequence[Group], step: int = 0) -> Batch:
    """Lay the samples of all groups side by side, group after group, padded on the right with zeros, for this step.

    A group keeps its identity by an id of its own, its place in the step: two groups that ask the same question stay
    two groups, and a group that lost a member is just smaller. Samples marked `train=False` are left out.
    """
    pairs = [(g, s) for g, group in enumerate(groups) for s in group.samples if s.train]
    if not pairs:
        raise ValueError("collate: no sample to train on")
    samples = [s for _, s in pairs]
    width = max(len(s.ids) for s in samples)

    def rectangle(rows: list[Sequence[float]], dtype: torch.dtype, pad: int = 0) -> Tensor:
        return torch.tensor([list(row) + [pad] * (width - len(row)) for row in rows], dtype=dtype)

    rewards = torch.zeros(len(samples), width)
    for i, s in enumerate(samples):
        for position, value in s.rewards:
            rewards[i, position] += value
    return Batch(
        ids=rectangle([s.ids for s in samples], torch.int64),
        mask=rectangle([s.mask for s in samples], torch.bool),
        logp_behave=rectangle([s.logp_behave for s in samples], torch.float32),
        version=rectangle([s.version for s in samples], torch.int64, pad=-1),
        rewards=rewards,
        length=torch.tensor([len(s.ids) for s in samples]),
        group=torch.tensor([g for g, _ in pairs]),
        finish=torch.tensor([FINISH.index(s.finish) for s in samples]),
        row=torch.arange(len(samples)),
        step=step,
    )
