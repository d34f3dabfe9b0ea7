"""Better than what? Credit for every token, from rewards and a baseline.

Pure functions of tensors: no model, no settings, no state; any device, float32 or float64 (sums of many bfloat16
numbers lose their digits; what comes out of them is finite). They need nothing but the methods of the tensors that they
are given, so this file imports no torch (the table of algorithms, and with it --help, would wait two seconds for it),
and each function can be copied out alone.

A group is an explicit id per row, never a slice of fixed size: groups may be incomplete, interleaved, alone.
Group ids are [B] int64, masks [B, T] bool; results are new tensors. A reward is never overwritten.

The way of a reward: `normalise` it (its baseline and its scale), `placed` at a sampled token, `returns_to_go` or `gae`
over the row, and, where the algorithm says so, `normalise` again over tokens.
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


def constant(low: Tensor, high: Tensor, group: Tensor) -> Tensor:
    """[B] bool: the least `low` of the row's group is its greatest `high`, bit for bit; for rewards, low = high = R.

    Such a group has no contrast to learn from. Tested on the numbers themselves: the mean of equal floats is not
    always that float, and a difference of 1e-8 over ε would become an advantage.
    """
    ids, place = group.unique(return_inverse=True)
    least = low.new_zeros(len(ids)).scatter_reduce(0, place, low, "amin", include_self=False)
    greatest = high.new_zeros(len(ids)).scatter_reduce(0, place, high, "amax", include_self=False)
    return (least == greatest)[place]


def normalise(x: Tensor, mask: Tensor, group: Tensor, mean_level: str = "group", std_level: str = "group",
              leave_one_out: bool = False, ddof: int = 1, eps: float = 1e-6, eps_in: str = "std") -> Tensor:  # fmt: skip
    """[B, T] (x − μ)/(σ + ε), μ and σ over the elements in the mask of the row's group, of the batch, or none; 0 off it.

    Rewards are [B, 1], every row in the mask. Some settings of mean_level and std_level have names:

        group, group                Â_i = (R_i − R̄)/(σ + ε)          GRPO (arXiv 2402.03300, §4.1.2)
        group, none                 Â_i = R_i − R̄                     Dr.GRPO (2503.20783, §3.2)
        group, none, leave_one_out  Â_i = R_i − 1/(G−1) Σ_{j≠i} R_j = G/(G−1)·(R_i − R̄)    RLOO (2402.14740, §3.3)
        group, batch                Â_i = (R_i − R̄)/(σ_batch + ε)     LitePPO (2508.08221)

    σ² = Σ (x − μ)²/(n − ddof), around the mean that was taken off; eps_in "variance" divides by √(σ² + ε) instead. With
    no more than ddof elements σ = 1. Where all of a pool is equal x − μ is 0 exactly, so equal rewards, and a group of
    one, have no advantage. Over tokens longer answers weigh more. Source of the form: AReaL's NormConfig.
    Differs from AReaL: groups are ids, not slices of fixed size, so an incomplete group is normalised by its own.
    """
    tokens, x = mask.sum(1).to(x.dtype), x.where(mask, 0.0)
    pool = {"group": group, "batch": group.new_zeros(group.shape)}

    def pooled(rows: Tensor, level: str) -> Tensor:
        """[B, 1] the sum over the row's pool."""
        return group_sum(rows, pool[level])[:, None]

    # lab: begin (which baseline keeps the gradient unbiased, and what does it do to its variance?)
    if mean_level != "none":
        n = pooled(tokens, mean_level).clamp(min=1)
        low, high = x.masked_fill(~mask, float("inf")).amin(1), x.masked_fill(~mask, float("-inf")).amax(1)
        contrast = mask & ~constant(low, high, pool[mean_level])[:, None]
        x = (x - pooled(x.sum(1), mean_level) / n).where(contrast, 0.0)
        x = x * n / (n - 1).clamp(min=1) if leave_one_out else x
    # lab: end
    if std_level != "none":
        freedom = pooled(tokens, std_level) - ddof
        variance = (pooled(x.square().sum(1), std_level) / freedom.clamp(min=1)).where(freedom > 0, 1.0)
        x = x / ((variance + eps).sqrt() if eps_in == "variance" else variance.sqrt() + eps)
    return x


def placed(rewards: Tensor, mask: Tensor) -> Tensor:
    """[B, T] Each reward at the sampled token that earned it: the last in the mask at or before it, else the first.

    So an answer whose end is not the policy's (a user's turn, a tool's) keeps its reward. A row without a sampled
    token has nobody to credit: 0.

    >>> import torch
    >>> placed(torch.tensor([[0.0, 0.0, 1.0, 5.0]]), torch.tensor([[False, True, True, False]]))
    tensor([[0., 0., 6., 0.]])
    """
    column = mask.long().new_ones(mask.shape).cumsum(1) - 1
    last = column.where(mask, -1).cummax(1).values
    target = last.where(last >= 0, mask.int().argmax(1, keepdim=True))
    return rewards.new_zeros(rewards.shape).scatter_add(1, target, rewards).where(mask, 0.0)


def at_end(reward: Tensor, mask: Tensor) -> Tensor:
    """[B] → [B, T]: the reward of a row at its last sampled token; 0 elsewhere, and in a row without one."""
    rewards = reward.new_zeros(mask.shape)
    rewards[:, -1] = reward
    return placed(rewards, mask)


def returns_to_go(reward: Tensor, mask: Tensor, gamma: float = 1.0) -> Tensor:
    """[B, T] G_t = Σ_{k ≥ t} γ^{k−t} r_k, k over the sampled tokens of the row; 0 off the mask.

    With γ = 1 and one reward, at the end, every token of the answer gets it. It is `gae` with V = 0 and λ = 1.
    """
    if gamma == 1:
        return reward.where(mask, 0.0).flip(1).cumsum(1).flip(1).where(mask, 0.0)
    return gae(reward, reward.new_zeros(reward.shape), mask, gamma, 1.0)


# ---- the catalogue: with a critic, and within a row


def gae(reward: Tensor, value: Tensor, mask: Tensor, gamma: float, lam: float,
        bootstrap: Tensor | None = None) -> Tensor:  # fmt: skip
    """[B, T] Generalised advantage estimation (arXiv 1506.02438, eq. 16), right to left over the sampled tokens.

        δ_t = r_t + γV_{t+1} − V_t        Â_t = δ_t + γλÂ_{t+1}        (t+1: the row's next sampled token)

    value[:, t] is V before token t. λ = 0 is the TD error; λ = 1 is `returns_to_go` − V_t. After the last token V and Â
    are 0, or V is bootstrap [B]: V of the whole row where it was cut and not judged. Tokens off the mask neither
    discount nor reset; rewards there are not seen (`placed` moves them). Returns, the critic's targets, are Â + V.
    """
    advantage, after = reward.new_zeros(reward.shape), reward.new_zeros(len(reward))
    value_after = after if bootstrap is None else bootstrap
    for t in reversed(range(reward.shape[1])):
        sampled, v = mask[:, t], value[:, t]
        # lab: begin (what does λ trade?)
        delta = reward[:, t] + gamma * value_after - v
        after = (delta + gamma * lam * after).where(sampled, after)
        # lab: end
        value_after = v.where(sampled, value_after)
        advantage[:, t] = after
    return advantage.where(mask, 0.0)


def row_mean(x: Tensor, mask: Tensor) -> Tensor:
    """[B, T] The mean of x over the row's tokens in the mask, at each of them; 0 off the mask.

    What a ratio of the whole answer multiplies: all of the answer is kept or clipped at once.
    """
    total = x.where(mask, 0.0).sum(1, keepdim=True)
    return (total / mask.sum(1, keepdim=True).clamp(min=1)).where(mask, 0.0)


# ---- statistics for the metrics


def group_size(x: Tensor, group: Tensor) -> Tensor:
    """[B] Members of each row's group, in x's dtype."""
    return group_sum(x.new_ones(x.shape), group)


def group_std(reward: Tensor, group: Tensor) -> Tensor:
    """[B] The standard deviation of rewards within each row's group, √(Σ (R_j − R̄)²/(G − 1)); 0 in a group of one."""
    size = group_size(reward, group)
    deviation = reward - group_sum(reward, group) / size
    return (group_sum(deviation.square(), group) / (size - 1).clamp(min=1)).sqrt()
