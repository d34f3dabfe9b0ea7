"""The small worlds that the theorems are tried in: batches in which everything goes wrong at once, and a tiny policy."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from nanorl import tiny
from nanorl.algorithms import ALGORITHMS, chosen
from nanorl.axes import Axes
from nanorl.critic import Critic
from nanorl.objective import Algorithm, credit
from nanorl.policy import Out, Policy
from nanorl.sample import Batch, Group, Prompt, Sample, collate

NAN = float("nan")
VOCABULARY = 17  # the tiny model's
END = PAD = 0  # the hard case: nothing in the ids tells an end token from padding
LIMIT = 11  # L of the modes that divide by a constant
LONGEST = 5  # tokens after which an answer is overlong, where that costs: some of `world` are


def sample(ids: Iterable[int], mask: Iterable[bool], reward: float = 0.0, **more) -> Sample:
    """A sample of these tokens; reward at the last, version 0, every sampled token at log-prob −1."""
    ids, mask = tuple(ids), tuple(bool(m) for m in mask)
    usual = dict(finish="stop", rewards=((len(ids) - 1, reward),), version=tuple(0 if m else -1 for m in mask))
    return Sample(ids=ids, mask=mask, logp_behave=tuple(-1.0 if m else 0.0 for m in mask), **{**usual, **more})


def group(*samples: Sample, number: int = 0, prompt: tuple[int, ...] = (1, 2)) -> Group:
    """These samples as the tries at one prompt."""
    return Group(Prompt(number, prompt, "1+1=", "2"), samples)


def world(seed: int) -> Batch:
    """A batch in float64 with all that goes wrong in batches, for a policy near the uniform one.

    8 rows in groups of 3, 2, 2 and 1; unequal lengths; several turns (gaps in the mask); END = PAD; one group without
    contrast; rewards in the middle of one; one row that was cut short before its first token, two that ran into the
    length limit, one of them alone in its group; NaN in every log-prob off the mask; tokens of versions 0 to 2, trained
    at step 2 when half of the updates are made.
    """
    rng = np.random.default_rng(seed)
    groups = []
    for number, size in enumerate((3, 2, 2, 1)):
        prompt = tuple(int(x) for x in rng.integers(1, VOCABULARY, rng.integers(1, 4)))
        tries = []
        for i in range(size):
            answer = [int(x) for x in rng.integers(0, VOCABULARY, rng.integers(1, 7))] + [END]
            mask = [False] * len(prompt) + [bool(x) for x in rng.random(len(answer) - 1) < 0.75] + [True]
            reward = 0.1 if number == 1 else float(rng.normal())
            if number == 0 and i == 1:
                tries.append(sample(prompt, [False] * len(prompt), reward, finish="abort"))
            else:
                version = tuple(int(v) if m else -1 for v, m in zip(rng.integers(0, 3, len(mask)), mask))
                middle = len(prompt) + len(answer) // 2 if number == 2 else len(mask) - 1
                rewards = ((middle, reward / 3), (len(mask) - 1, reward - reward / 3))
                finish = "length" if (number, i) in ((0, 2), (3, 0)) else "stop"
                tries.append(sample(prompt + tuple(answer), mask, version=version, rewards=rewards, finish=finish))
        groups.append(group(*tries, number=number, prompt=prompt))
    batch = collate(groups)

    def near_uniform() -> Tensor:
        return torch.from_numpy(rng.normal(-np.log(VOCABULARY), 0.4, batch.mask.shape)).where(batch.mask, NAN)

    return replace(batch, rewards=batch.rewards.double(), logp_behave=near_uniform(), logp_prox=near_uniform(),
                   logp_ref=near_uniform(), value=near_uniform(), done=0.5, step=2)  # fmt: skip


def scrambled(batch: Batch, columns: int, seed: int = 0) -> Batch:
    """The same batch with more padding, and garbage in all of it: other tokens, NaN for every float."""
    wide = batch.mask.shape[1] + columns
    padding = torch.arange(wide) >= batch.length[:, None]
    noise = torch.randint(0, VOCABULARY, padding.shape, generator=torch.Generator().manual_seed(seed))

    def spoilt(x: Tensor | None, garbage: Tensor | float) -> Tensor | None:
        if x is None:
            return None
        stretched = torch.cat([x, x.new_zeros(len(x), columns)], 1)
        return torch.where(padding, torch.as_tensor(garbage, dtype=x.dtype), stretched)

    return replace(
        batch, ids=spoilt(batch.ids, noise), mask=spoilt(batch.mask, False), version=spoilt(batch.version, 99),
        rewards=spoilt(batch.rewards, 0.0), logp_behave=spoilt(batch.logp_behave, NAN), adv=spoilt(batch.adv, NAN),
        logp_prox=spoilt(batch.logp_prox, NAN), logp_ref=spoilt(batch.logp_ref, NAN), keep=spoilt(batch.keep, True),
        value=spoilt(batch.value, NAN), returns=spoilt(batch.returns, NAN),
    )  # fmt: skip


def changed(axes: Axes, **others) -> Axes:
    """The axes with some others; those of nested parts go by their dotted names."""
    for name, value in others.items():
        part, _, inner = name.rpartition(".")
        axes = replace(axes, **({part: replace(getattr(axes, part), **{inner: value})} if part else {name: value}))
    return axes


def algorithm(name: str, **others) -> Algorithm:
    """The row with some axes changed."""
    return chosen(name, changed(ALGORITHMS[name].axes, **others), longest=LONGEST)


# ---- updates without a model: log-probs, entropies and values are given


class Said(NamedTuple):
    """What a policy and a critic might say in the middle of a step, [B, T] each; NaN off the mask."""

    logp: Tensor
    entropy: Tensor
    value: Tensor


class Slopes(NamedTuple):
    """Loss of an update and its slope in everything that was said, [B, T] each."""

    loss: float
    logp: Tensor
    entropy: Tensor
    value: Tensor


def said(batch: Batch, seed: int = 0) -> Said:
    """Log-probs near the batch's π_prox, on both sides of the clip, and values as near those of the step's start."""
    rng = torch.Generator().manual_seed(seed)
    noise = torch.randn((3, *batch.mask.shape), generator=rng, dtype=torch.float64)
    return Said(batch.logp_prox + 0.3 * noise[0], noise[1].abs().where(batch.mask, NAN), batch.value + 0.6 * noise[2])


def slopes(batch: Batch, algo: Algorithm, now: Said) -> Slopes:
    """The whole way of a batch: credit, weights, loss and value loss, and back."""
    update = credit(batch, algo).weighted(algo.axes.aggregation, algo.axes.length_limit or LIMIT)
    leaves = [None if x is None else x.detach().clone().requires_grad_() for x in now]
    logp, entropy, value = leaves
    per_token = algo.loss(Out(logp, entropy, None), update)
    total = (update.weight * per_token).sum()
    if algo.critic:
        total = total + (update.weight * algo.value_loss(value, update)).sum()
    there = [x for x in leaves if x is not None]
    found = iter(torch.autograd.grad(total, there, materialize_grads=True))
    return Slopes(total.item(), *(None if x is None else next(found) for x in leaves))


# ---- updates of a model


@cache
def policy() -> Policy:
    """The tiny model with fresh weights in float64, cut to its first layer: every kind of weight, less time."""
    net = tiny.model(seed=0).double()
    net.model.layers = net.model.layers[:1]
    return Policy(net)


@cache
def critic() -> Critic:
    """A critic on the policy's trunk, whose head is not zero any more."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        head = Critic(policy(), "shared").double()
        torch.nn.init.normal_(head.head.weight)
    return head


def descend(parts: Iterable[Batch], algo: Algorithm) -> tuple[float, Tensor]:
    """Loss and gradient, all parameters in one vector, of micro-batches one after another: the scripts' inner loop."""
    net, values, loss = policy(), critic(), 0.0
    net.zero_grad()
    values.zero_grad()
    for micro in parts:
        out = net(micro, frozenset({"entropy"}))
        per_token = algo.loss(out, micro)
        if algo.critic:
            per_token = per_token + algo.value_loss(values(micro, out.hidden)[0], micro)
        micro_loss = (micro.weight * per_token).sum()
        micro_loss.backward()
        loss += micro_loss.item()
    weights = [*net.parameters(), *values.parameters()]
    return loss, torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in weights])


def assert_same(got: tuple[float, Tensor], wanted: tuple[float, Tensor], tolerance: float = 1e-12) -> None:
    """Two descents have the same loss and the same gradient, relative to its length, and there is a gradient."""
    assert wanted[1].norm() > 1e-6
    assert abs(got[0] - wanted[0]) <= tolerance * max(1.0, abs(wanted[0]))
    assert (got[1] - wanted[1]).norm() <= tolerance * wanted[1].norm()
