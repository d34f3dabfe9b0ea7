"""Which way? The loss of every token, and what it counts.

Pure functions of tensors: no model, no settings, no state; any device, bfloat16, float32 or float64, and no import
(see `advantage.py`). Losses are minimised and per token: [B, T] in, [B, T] out, 0 off the mask whatever stands there.
How they are added up is a step of its own, `weights`: loss = Σ weight · per_token.

    r = π_θ/π_prox: ratio of the policy that has the gradient to the trainer's at the start of the step;
    ω, the gradient weight: ∂loss/∂log π_θ = −ω·Â. On-policy (r = 1) every surrogate here has ω = 1.

The first part is what the default run uses; behind the line "the catalogue" stand the other ways to do each thing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

MODES = ("token-mean", "token-sum", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "constant",
         "prompt-mean", "bnpo")  # fmt: skip
BOUND = 20.0  # of log-ratios: e^20 = 4.8e8 tells of a fault, not of a direction, and is still finite everywhere


def log_ratio(logp: Tensor, logp_old: Tensor, mask: Tensor, bound: float = BOUND) -> Tensor:
    """[B, T] log r = log π_θ − log π_old, 0 off the mask, held within ±bound so that exp stays finite.

    Beyond the bound the value stays and the gradient is 0.

    Selected before any arithmetic: a NaN or ∞ off the mask reaches neither the value nor the gradient.
    """
    return (logp.where(mask, 0.0) - logp_old.where(mask, 0.0)).clamp(-bound, bound)


def ratio(logp: Tensor, logp_old: Tensor, mask: Tensor, level: str = "token") -> Tensor:
    """[B, T] r = π_θ/π_old at the level that is compared with the past; 1 off the mask.

        token           r_t = exp(log π_θ(t) − log π_old(t))          PPO, GRPO
        sequence        s = exp(1/n Σ_t log r_t)                      GSPO (arXiv 2507.18071, eq. 7); ∂s/∂log π_t = s/n
        sequence-token  sg(s)·π_θ(t)/sg(π_θ(t))                       GSPO-token (eq. 13, 14): s in value, slope s
        joint           w = exp(Σ_t log r_t)                          the answer's own ratio; explodes with its length

    n counts the row's tokens in the mask; sg stops the gradient. The last three have one value a row. log w is held
    within ±20, as log r_t is. Raises ValueError for another level.
    """
    log_r = log_ratio(logp, logp_old, mask)
    if level == "token":
        return log_r.exp()
    total = log_r.sum(1, keepdim=True)  # [B, 1]
    if level == "joint":
        return total.clamp(-BOUND, BOUND).exp().where(mask, 1.0)
    log_s = total / mask.sum(1, keepdim=True).clamp(min=1)
    if level == "sequence":
        return log_s.exp().where(mask, 1.0)
    if level == "sequence-token":
        own = logp.where(mask, 0.0)
        return (log_s.detach() + (own - own.detach())).exp().where(mask, 1.0)
    raise ValueError(f"ratio level {level!r}; there are token, sequence, sequence-token, joint")


def clipped(ratio: Tensor, adv: Tensor, mask: Tensor, eps_low: float, eps_high: float,
            dual_clip: float | None = None) -> Tensor:  # fmt: skip
    """[B, T] PPO's clipped surrogate, −min(r·Â, clip(r, 1−ε_low, 1+ε_high)·Â) (arXiv 1707.06347, eq. 7).

    ω = r, and 0 where Â > 0 and r > 1+ε_high, or Â < 0 and r < 1−ε_low: nothing pulls a token further than its
    clip, everything may push it back. ε_high > ε_low is DAPO's clip-higher (arXiv 2503.14476, eq. 10). dual_clip
    c > 1+ε_high bounds the push back as well: for Â < 0 the loss is at most −c·Â, so ω = 0 where r > c too
    (arXiv 1912.09729; the δ of INTELLECT-2, arXiv 2505.07291, is the same c).
    """
    adv = adv.where(mask, 0.0)
    # lab: begin (write the surrogate; which of its two terms has a gradient, and when?)
    surrogate = (ratio * adv).minimum(ratio.clamp(1 - eps_low, 1 + eps_high) * adv)
    # lab: end
    if dual_clip is not None:
        surrogate = surrogate.where(adv >= 0, surrogate.maximum(dual_clip * adv))
    return (-surrogate).where(mask, 0.0)


def reinforce(logp: Tensor, adv: Tensor, mask: Tensor) -> Tensor:
    """[B, T] −Â·log π_θ, whose gradient is the policy gradient itself; ω = 1 (Williams 1992)."""
    return -adv.where(mask, 0.0) * logp.where(mask, 0.0)


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
    tokens = mask.ne(0).sum(1)  # [B] n_i, integers: bfloat16 cannot count beyond 256
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

# ---- the catalogue: other surrogates


def importance(ratio: Tensor, adv: Tensor, mask: Tensor) -> Tensor:
    """[B, T] −r·Â, the surrogate that PPO clips and TRPO bounds by a trust region (arXiv 1502.05477, eq. 14); ω = r."""
    return -ratio.where(mask, 0.0) * adv.where(mask, 0.0)


def sapo(ratio: Tensor, adv: Tensor, mask: Tensor, tau_pos: float, tau_neg: float) -> Tensor:
    """[B, T] SAPO's soft gate, −(4/τ)·σ(τ(r − 1))·Â, τ = τ_pos where Â > 0, else τ_neg (arXiv 2511.20347).

    ω = 4σ(1−σ)·r: 1 at r = 1 whatever τ; it rises a little above (1.57 at r = 2.1 for τ = 1), then fades, and is never
    cut. A larger τ_neg fades sooner where tokens are pushed down, which is where instability begins. As τ → 0 the
    gradient becomes that of `importance`.
    """
    tau = adv.new_full(adv.shape, tau_neg).masked_fill(adv > 0, tau_pos)
    gate = 4 / tau * (tau * (ratio.where(mask, 1.0) - 1)).sigmoid()
    return -gate * adv.where(mask, 0.0)


# ---- samples of another policy: μ sampled, π_prox is the trainer's at the start of the step


def correction(logp_prox: Tensor, logp_behave: Tensor, mask: Tensor, kind: str, level: str = "token",
               low: float = 0.0, high: float = float("inf")) -> Tensor:  # fmt: skip
    """[B, T] The coefficient of the decoupled objective, ρ = π_prox/μ, bounded and without gradient; 1 off the mask.

        loss = ρ · (the surrogate of π_θ/π_prox)       (arXiv 2505.24298, eq. 5; 2110.00641, §3)

    kind: "truncate" is ρ held within [low, high] (truncated importance sampling, TIS), "mask" ρ where low ≤ ρ ≤ high
    and 0 elsewhere (IcePop, MIS). truncate without bounds is the paper's own. level: "token", ρ_t; "joint", Π_t ρ_t,
    the only exact one, whose variance grows with length; "sequence", its geometric mean. One quantity is bounded and
    used, so that no token's coefficient passes `high`. A coefficient of 0 takes a token's loss away; what the other
    tokens count stays, since `weights` come from the mask. Raises ValueError for another kind or level.
    Differs from AReaL: at its sequence level out-of-bounds rows alone are truncated, which comes to the same; its
    "max" and "sum" aggregations gate a geometric mean, here what is tested is what is used.
    """
    if level not in ("token", "sequence", "joint"):
        raise ValueError(f"correction level {level!r}; there are token, sequence, joint")
    rho = ratio(logp_prox, logp_behave, mask, level).detach()
    if kind == "truncate":
        return rho.clamp(low, high)
    if kind == "mask":
        return rho * ((rho >= low) & (rho <= high))
    raise ValueError(f"correction {kind!r}; there are truncate, mask")


def second_moment(log_rho: Tensor, adv: Tensor, mask: Tensor, threshold: float) -> Tensor:
    """[B, T] bool: the mask without the tokens that take M₂ past the threshold (M2PO, arXiv 2510.01161).

        M₂ = mean of (log ρ)² over the tokens with Â·log ρ > 0;    drop the largest of these until M₂ < threshold

    ρ = π_prox/μ: those tokens have already moved the way that their advantage pulls, and only these may go; a stale
    token that is to be pushed back does no harm (so the authors' code). It looks across the batch: decided once a step.
    Differs from AReaL: there all tokens count and may go, one always stays, and the loss is divided by those kept.
    Ours keeps the mask's count: dropping a token never makes the others louder.
    """
    moved = mask & (adv * log_rho > 0)
    square, place = log_rho.square().masked_fill(~moved, float("inf")).flatten().sort()
    mean = square.cumsum(0) / square.new_ones(square.shape).cumsum(0)  # M₂ of the smallest k; it grows with k
    kept = (mean < threshold).new_empty(mean.shape).scatter(0, place, mean < threshold).view(mask.shape)
    return mask & (kept | ~moved)


def loglinear(logp: Tensor, logp_behave: Tensor, mask: Tensor, lag: Tensor, done: float) -> Tensor:
    """[B, T] log π_prox without a forward pass: log μ + α(log π_θ − log μ), α = lag/(lag + done), no gradient.

    lag [B, T] is v − v_b, the trainer's version at the start of the step minus the token's; done ∈ [0, 1) the share of
    the step's updates made before this one. The log-probs of a token are taken to move evenly from version v_b to
    v + done, and π_prox stands at v between them (A-3PO, arXiv 2512.06547). done = 0: π_prox is π_θ.
    Differs from AReaL: there versions are labelled one late, and paired with the log-prob of the next token.
    """
    lag = lag.to(logp.dtype)
    alpha = (lag / (lag + done).clamp(min=1e-9)).where(lag + done > 0, 1.0)
    return logp_behave.where(mask, 0.0) + alpha * log_ratio(logp.detach(), logp_behave, mask)


# ---- regularisers


def kl(logp: Tensor, logp_ref: Tensor, mask: Tensor, estimator: str = "k3") -> Tensor:
    """[B, T] Estimate of KL(π_θ‖π_ref) at the sampled token, d = log π_θ − log π_ref; 0 off the mask.

        k1  = d          unbiased; E ∇k1 = 0: useless as a loss, right in a reward
        k2  = d²/2       biased value; E ∇k2 = ∇KL(π_θ‖π_ref), the gradient that one wants, on-policy
        k3  = e^{−d}−1+d unbiased, never negative; E ∇k3 = ∇KL(π_ref‖π_θ), the other direction
        k3+ = k3 in value, k2 in gradient: unbiased, and the gradient that one wants

    Source: Schulman's note "Approximating KL divergence" (2020); gradients: arXiv 2506.09477. k3 is GRPO's (2402.03300,
    eq. 4), k3+ verl's. r·k3 with both factors differentiated (DeepSeek-V3.2, arXiv 2512.02556) has the gradient of k2
    and stays right off-policy: multiply by `ratio`, token level. d is held within ±20 before exp. Raises ValueError for
    another estimator.
    """
    d = log_ratio(logp, logp_ref, mask)
    if estimator == "k1":
        return d
    k2, k3 = d.square() / 2, (-d).expm1() + d
    if estimator == "k2":
        return k2
    if estimator == "k3":
        return k3
    if estimator == "k3+":
        return k2 + (k3 - k2).detach()
    raise ValueError(f"estimator {estimator!r}; there are k1, k2, k3, k3+")


# ---- the critic


def value_loss(value: Tensor, value_old: Tensor, returns: Tensor, mask: Tensor, clip: float | None = None,
               huber: float = float("inf")) -> Tensor:  # fmt: skip
    """[B, T] How wrong the critic is: max(ℓ(V), ℓ(V_old + clip(V − V_old, ±ε))) with ℓ(V) = ½(V − R)².

    The max is PPO's value clip (baselines' ppo2; not in the paper): a value that has moved further than ε from that
    of the step's start, towards the return, has no gradient. clip None leaves it out. huber δ makes ℓ grow linearly
    beyond |V − R| = δ: δ·(|V − R| − δ/2), a gradient of at most δ. Values and returns are in units of reward.
    """
    value, value_old, returns = value.where(mask, 0.0), value_old.where(mask, 0.0), returns.where(mask, 0.0)

    def loss(error: Tensor) -> Tensor:
        """½·error², linear beyond huber."""
        size = error.abs()
        near = size.clamp(max=huber)
        return near * (size - near / 2)

    worst = loss(value - returns)
    if clip is not None:
        worst = worst.maximum(loss(value_old + (value - value_old).clamp(-clip, clip) - returns))
    return worst
