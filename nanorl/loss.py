"""Which way? The loss of every token, and what it counts.

Pure functions of tensors: no model, no settings, no state; any device, bfloat16, float32 or float64, and no import
(see `advantage.py`). Losses are minimised and per token: [B, T] in, [B, T] out, 0 off the mask whatever stands there.
How they are added up is a step of its own, `weights`: loss = Σ weight · per_token.

    r = π_θ/π_prox: ratio of the policy that has the gradient to the trainer's at the start of the step;
    ω, the gradient weight: ∂loss/∂log π_θ = −ω·Â. On-policy (r = 1) every loss here has ω = 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

MODES = ("token-mean", "token-sum", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "constant",
         "prompt-mean", "bnpo")  # fmt: skip


def log_ratio(logp: Tensor, logp_old: Tensor, mask: Tensor, bound: float = 20.0) -> Tensor:
    """[B, T] log r = log π_θ − log π_old, 0 off the mask, held within ±bound so that exp stays finite.

    Beyond the bound (r > 4.8e8) the value stays and the gradient is 0: such a token tells of a fault, not of a direction.

    Selected before any arithmetic: a NaN or ∞ off the mask reaches neither the value nor the gradient.
    """
    return (logp.where(mask, 0.0) - logp_old.where(mask, 0.0)).clamp(-bound, bound)


def clipped(logp: Tensor, logp_prox: Tensor, adv: Tensor, mask: Tensor, eps_low: float, eps_high: float) -> Tensor:
    """[B, T] PPO's clipped surrogate, −min(r·Â, clip(r, 1−ε_low, 1+ε_high)·Â) (arXiv 1707.06347, eq. 7).

    ω = r, and 0 where Â > 0 and r > 1+ε_high, or Â < 0 and r < 1−ε_low: nothing pulls a token further than its
    clip, everything may push it back. ε_high > ε_low is DAPO's clip-higher (arXiv 2503.14476, eq. 10).
    """
    adv = adv.where(mask, 0.0)
    ratio = log_ratio(logp, logp_prox, mask).exp()
    # lab: begin (write the surrogate; which of its two terms has a gradient, and when?)
    surrogate = (ratio * adv).minimum(ratio.clamp(1 - eps_low, 1 + eps_high) * adv)
    # lab: end
    return (-surrogate).where(mask, 0.0)


def reinforce(logp: Tensor, adv: Tensor, mask: Tensor) -> Tensor:
    """[B, T] −Â·log π_θ, whose gradient is the policy gradient itself; ω = 1 (Williams 1992)."""
    return -adv.where(mask, 0.0) * logp.where(mask, 0.0)


def kl(logp: Tensor, logp_ref: Tensor, mask: Tensor, estimator: str = "k3") -> Tensor:
    """[B, T] Estimate of KL(π_θ‖π_ref) at the sampled token, d = log π_θ − log π_ref; 0 off the mask.

        k1 = d          unbiased; E ∇k1 = 0: useless as a loss, right in a reward
        k2 = d²/2       biased value; E ∇k2 = ∇KL(π_θ‖π_ref), the gradient that one wants, on-policy
        k3 = e^{−d}−1+d unbiased, never negative; E ∇k3 = ∇KL(π_ref‖π_θ), the other direction

    Source: Schulman's note "Approximating KL divergence" (2020); gradients: arXiv 2506.09477. k3 is GRPO's (2402.03300,
    eq. 4). d is held within ±20 before exp. Raises ValueError for another estimator.
    """
    d = log_ratio(logp, logp_ref, mask)
    if estimator == "k1":
        return d
    if estimator == "k2":
        return d.square() / 2
    if estimator == "k3":
        return (-d).expm1() + d
    raise ValueError(f"estimator {estimator!r}; there are k1, k2, k3")


def weights(mode: str, mask: Tensor, group: Tensor, length_limit: int) -> Tensor:
    """[B, T] What each token's loss counts in an update of B rows: loss = Σ weight·ℓ, whatever the split.

    m the mask (bool, or 0 and 1 in the float dtype that the weights shall have), n_i = Σ_t m_it, N = Σ_i n_i; B and P
    count the rows and prompts that have a token in the mask.

        token-mean               1/N            every token alike: DAPO, verl
        token-sum                1
        seq-mean-token-mean      1/(B·n_i)      every answer alike: GRPO's paper; GSPO's, for a loss per sequence
        seq-mean-token-sum       1/B            the log-prob of an answer is a sum: RLOO; LUSPO's, for a loss per sequence
        seq-mean-token-sum-norm  1/(B·L)        Dr.GRPO: L = length_limit, a constant, so that length has no pull
        constant                 1/L
        prompt-mean              1/(P·N_p)      every prompt alike: ScaleRL (arXiv 2510.13786); N_p its tokens
        bnpo                     1              divided by the tokens of its own micro-batch later (TRL's bnpo)

    Rows without a token in the mask count nowhere. Raises ValueError for another mode.
    """
    m = mask * 1.0  # a bool mask gives the default float dtype, a float mask keeps its own
    tokens = m.sum(1)  # [B] n_i
    rows = (tokens > 0).sum().clamp(min=1)
    if mode == "token-mean":
        return m / m.sum().clamp(min=1)
    if mode in ("token-sum", "bnpo"):
        return m
    if mode == "seq-mean-token-mean":
        return m / (rows * tokens.clamp(min=1))[:, None]
    if mode == "seq-mean-token-sum":
        return m / rows
    if mode == "seq-mean-token-sum-norm":
        return m / (rows * length_limit)
    if mode == "constant":
        return m / length_limit
    if mode == "prompt-mean":
        ids, place = group.unique(return_inverse=True)
        per_prompt = tokens.new_zeros(len(ids)).index_add(0, place, tokens)  # [P] N_p
        return m / ((per_prompt > 0).sum().clamp(min=1) * per_prompt.clamp(min=1)[place])[:, None]
    raise ValueError(f"aggregation {mode!r}; there are {', '.join(MODES)}")
