"""The equations once more, as slow loops over floats, and the small worlds that the theorems are tried in.

The oracles share nothing with `advantage.py` and `loss.py`: lists in, lists out, one index at a time. A per-token
function returns its value and its slope ∂ℓ/∂log π, so that gradients are compared and not only values.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from math import exp, fsum, sqrt

import numpy as np
import torch
from torch import Tensor

from nanorl import tiny
from nanorl.algorithms import Algorithm
from nanorl.policy import Policy
from nanorl.sample import Batch, Group, Prompt, Sample, collate

NAN = float("nan")
VOCABULARY = 17  # the tiny model's
END = PAD = 0  # the hard case: nothing in the ids tells an end token from padding
LIMIT = 11  # L of the modes that divide by a constant


# ---- advantages: rewards [B], group ids [B] → [B]


def members(group: list[int], i: int) -> list[int]:
    """The rows of row i's group, itself among them."""
    return [j for j in range(len(group)) if group[j] == group[i]]


def centred(reward: list[float], group: list[int]) -> list[float]:
    """R_i − R̄, 0 where all rewards of the group are equal."""
    out = []
    for i in range(len(reward)):
        others = [reward[j] for j in members(group, i)]
        out.append(0.0 if min(others) == max(others) else reward[i] - fsum(others) / len(others))
    return out


def standardised(reward: list[float], group: list[int], ddof: int, eps: float) -> list[float]:
    """(R_i − R̄) / (σ + ε), σ² = Σ(R_j − R̄)²/(G − ddof)."""
    out, deviation = [], centred(reward, group)
    for i in range(len(reward)):
        rows = members(group, i)
        variance = fsum(deviation[j] ** 2 for j in rows) / (len(rows) - ddof) if len(rows) > ddof else 0.0
        out.append(deviation[i] / (sqrt(variance) + eps))
    return out


def leave_one_out(reward: list[float], group: list[int]) -> list[float]:
    """R_i − the mean of the others; 0 without others."""
    out = []
    for i in range(len(reward)):
        others = [reward[j] for j in members(group, i) if j != i]
        out.append(reward[i] - fsum(others) / len(others) if others else 0.0)
    return out


# ---- losses of one token: (value, slope)


def clipped(logp: float, prox: float, adv: float, low: float, high: float) -> tuple[float, float]:
    """−min(r·Â, clip(r)·Â), by cases instead of by min and clip."""
    r = exp(logp - prox)
    if (adv > 0 and r > 1 + high) or (adv < 0 and r < 1 - low):  # further than its clip: flat
        return -adv * (1 + high if adv > 0 else 1 - low), 0.0
    return -adv * r, -adv * r


def reinforce(logp: float, adv: float) -> tuple[float, float]:
    """−Â·log π."""
    return -adv * logp, -adv


def kl(logp: float, ref: float, estimator: str) -> tuple[float, float]:
    """k1, k2, k3 of d = log π − log π_ref."""
    d = logp - ref
    return {"k1": (d, 1.0), "k2": (d * d / 2, d), "k3": (exp(-d) - 1 + d, 1 - exp(-d))}[estimator]


# ---- weights: mask [B][T], group [B] → [B][T]


def weights(mode: str, mask: list[list[bool]], group: list[int], limit: int) -> list[list[float]]:
    """The table of aggregation modes, token by token. Rows and prompts without a sampled token do not exist."""
    n = [sum(row) for row in mask]
    rows = sum(1 for k in n if k)
    prompts = len({group[i] for i in range(len(n)) if n[i]})
    out = []
    for i in range(len(mask)):
        of_prompt = sum(n[j] for j in members(group, i))
        counts = {
            "token-mean": sum(n), "token-sum": 1, "bnpo": 1, "seq-mean-token-mean": rows * n[i],
            "seq-mean-token-sum": rows, "seq-mean-token-sum-norm": rows * limit, "constant": limit,
            "prompt-mean": prompts * of_prompt,
        }  # fmt: skip
        out.append([1 / counts[mode] if sampled else 0.0 for sampled in mask[i]])
    return out


def update(batch: Batch, logp: Tensor, algo: Algorithm, adv: list[float], clip: bool) -> tuple[float, list]:
    """Loss of one optimizer step and its slope in every log-prob [B][T]: Σ_i Σ_t w_it·(surrogate + β·KL)."""
    axes, mask = algo.axes, batch.mask.tolist()
    weight = weights(axes.aggregation, mask, batch.group.tolist(), LIMIT)
    loss, slopes = [], [[0.0] * len(row) for row in mask]
    for i, row in enumerate(mask):
        for t, sampled in enumerate(row):
            if not sampled:
                continue
            new, old, ref = float(logp[i, t]), float(batch.logp_prox[i, t]), float(batch.logp_ref[i, t])
            value, slope = clipped(new, old, adv[i], axes.eps_low, axes.eps_high) if clip else reinforce(new, adv[i])
            extra, pull = kl(new, ref, axes.kl_estimator)
            loss.append(weight[i][t] * (value + axes.kl_weight * extra))
            slopes[i][t] = weight[i][t] * (slope + axes.kl_weight * pull)
    return fsum(loss), slopes


# ---- worlds


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
    contrast; one row that was cut short before its first token; NaN in every log-prob off the mask.
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
                tries.append(sample(prompt + tuple(answer), mask, reward, finish="stop"))
        groups.append(group(*tries, number=number, prompt=prompt))
    batch = collate(groups)

    def near_uniform() -> Tensor:
        return torch.from_numpy(rng.normal(-np.log(VOCABULARY), 0.4, batch.mask.shape)).where(batch.mask, NAN)

    return replace(batch, rewards=batch.rewards.double(), logp_behave=batch.logp_behave.double(),
                   logp_prox=near_uniform(), logp_ref=near_uniform())  # fmt: skip


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
    )  # fmt: skip


@cache
def policy() -> Policy:
    """The tiny model with fresh weights in float64, cut to its first layer: every kind of weight, less time."""
    net = tiny.model(seed=0).double()
    net.model.layers = net.model.layers[:1]
    return Policy(net)


def descend(parts: Iterable[Batch], algo: Algorithm) -> tuple[float, Tensor]:
    """Loss and gradient, all parameters in one vector, of micro-batches one after another: train_grpo's inner loop."""
    net, loss = policy(), 0.0
    net.zero_grad()
    for micro in parts:
        micro_loss = (micro.weight * algo.loss(net(micro), micro)).sum()
        micro_loss.backward()
        loss += micro_loss.item()
    return loss, torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in net.parameters()])


def assert_same(got: tuple[float, Tensor], wanted: tuple[float, Tensor], tolerance: float = 1e-12) -> None:
    """Two descents have the same loss and the same gradient, relative to its length, and there is a gradient."""
    assert wanted[1].norm() > 1e-6
    assert abs(got[0] - wanted[0]) <= tolerance * max(1.0, abs(wanted[0]))
    assert (got[1] - wanted[1]).norm() <= tolerance * wanted[1].norm()
