"""Better than what? Credit for every token, from rewards and a baseline.

Pure functions of tensors: no model, no settings, no state; any device, any float dtype. They need nothing but the
methods of the tensors that they are given, so this file imports no torch (the table of algorithms, and with it
--help, would wait two seconds for it), and each function can be copied out alone.

A group is an explicit id per row, never a slice of fixed size: groups may be incomplete, interleaved, alone.
Rewards are [B], group ids [B] int64, masks [B, T] bool; results are new tensors. A reward is never overwritten.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def group_sum(x: Tensor, group: Tensor) -> Tensor:
    """[B] Sum of x over the rows of each row's group: Σ_{j ∈ G(i)} x_j.

    >>> import torch
    >>> group_sum(torch.tensor([1.0, 2.0, 10.0]), torch.tensor([7, 7, 3]))
    tensor([ 3.,  3., 10.])
    """
    ids, place = group.unique(return_inverse=True)
    return x.new_zeros(len(ids)).index_add(0, place, x)[place]


def group_size(x: Tensor, group: Tensor) -> Tensor:
    """[B] Members of each row's group, in x's dtype."""
    return group_sum(x.new_ones(x.shape), group)


def group_mean(reward: Tensor, group: Tensor) -> Tensor:
    """[B] The mean reward of each row's group, R̄ = 1/G Σ_j R_j: the baseline of GRPO (arXiv 2402.03300, eq. 3)."""
    return group_sum(reward, group) / group_size(reward, group)


def group_std(reward: Tensor, group: Tensor, ddof: int = 1) -> Tensor:
    """[B] The standard deviation of rewards within each row's group, σ = √(Σ_j (R_j − R̄)² / (G − ddof)).

    0 where a group has no more than ddof members. ddof 1 is the unbiased variance; libraries differ (TRL, verl: 1;
    open-instruct: 0), the paper does not say.
    """
    deviation = reward - group_mean(reward, group)
    freedom = group_size(reward, group) - ddof
    return (group_sum(deviation.square(), group) / freedom.clamp(min=1)).sqrt() * (freedom > 0)


def centred(reward: Tensor, group: Tensor) -> Tensor:
    """[B] Better than the group's mean: Â_i = R_i − R̄ (Dr.GRPO, arXiv 2503.20783, §3.2).

    Σ_i Â_i = 0 in each group, and a group whose rewards are equal has Â = 0 exactly. A group of one has Â = 0.
    """
    # lab: begin (which baseline keeps the gradient unbiased, and what does it do to its variance?)
    advantage = reward - group_mean(reward, group)
    # lab: end
    return advantage.where(~constant(reward, group), 0.0)


def standardised(reward: Tensor, group: Tensor, ddof: int = 1, eps: float = 1e-6) -> Tensor:
    """[B] Centred and divided by the group's spread: Â_i = (R_i − R̄) / (σ + ε) (GRPO, arXiv 2402.03300, §4.1.2).

    Invariant to R → aR + b, a > 0, as ε → 0. 0 exactly in a group whose rewards are equal, and in a group of one.
    Differs from the paper: it has no ε; where ε stands (outside the root) and its size are TRL's and verl's form.
    """
    return centred(reward, group) / (group_std(reward, group, ddof) + eps)


def leave_one_out(reward: Tensor, group: Tensor) -> Tensor:
    """[B] Better than the others: Â_i = R_i − 1/(G−1) Σ_{j≠i} R_j = G/(G−1)·(R_i − R̄) (RLOO, arXiv 2402.14740, §3.3).

    The baseline does not contain R_i, so the gradient is unbiased at any G. A group of one has nobody to compare
    with: Â = 0 (verl's `rloo` returns the raw reward there).
    """
    size = group_size(reward, group)
    return centred(reward, group) * size / (size - 1).clamp(min=1)


def constant(reward: Tensor, group: Tensor) -> Tensor:
    """[B] bool: all rewards of the row's group are equal, bit for bit. Such a group has no contrast to learn from.

    Tested on the rewards themselves: the mean of equal floats is not always that float, and a difference of 1e-8
    over ε would become an advantage.
    """
    ids, place = group.unique(return_inverse=True)
    low = reward.new_zeros(len(ids)).scatter_reduce(0, place, reward, "amin", include_self=False)
    high = reward.new_zeros(len(ids)).scatter_reduce(0, place, reward, "amax", include_self=False)
    return (low == high)[place]


def broadcast(advantage: Tensor, mask: Tensor) -> Tensor:
    """[B] → [B, T]: every sampled token of a row gets the row's advantage, every other position 0.

    With γ = 1 and one reward at the end the return is the same at every token, so is its advantage.
    """
    return advantage[:, None].where(mask, 0.0)
