"""How far is one step? TRPO measures a step by how much it changes the policy, not by how much it changes the weights.

    max_θ E_t[π_θ/π_old·Â_t]  subject to  D̄_KL(π_old‖π_θ) ≤ δ

Near θ_old, with x = θ − θ_old, the objective is gᵀx, g = −∇loss, and the constraint is ½·xᵀFx ≤ δ, where F = ∇²D̄_KL is
the Fisher information. The best x is √(2δ/(gᵀF⁻¹g))·F⁻¹g: the natural gradient, at the length that costs δ. F has the
square of as many entries as there are weights and is never formed: conjugate gradient asks for products F·v alone, and
a product is two backward passes.

Source: arXiv 1502.05477, section 6 and appendix C. Where ours differs: the length of a step (`full_step`, `line_search`).
The first half of this file is mathematics over flat vectors, fit for a bandit; the second half is a language model's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from nanorl.monitor import log
from nanorl.objective import Algorithm
from nanorl.policy import Policy, before
from nanorl.sample import Batch

Product = Callable[[Tensor], Tensor]  # v [n] → F·v [n]
Go = Callable[[float], None]  # s → the weights are θ_old + s·step
ALL = frozenset({"entropy"})  # what a loss may want to know of a pass beside the log-probs


def flat(tensors: Iterable[Tensor]) -> Tensor:
    """All entries in one vector [n]."""
    return torch.cat([tensor.flatten() for tensor in tensors])


def categorical_kl(logp: Tensor, logq: Tensor) -> Tensor:
    """[N] KL(p‖q) = Σ_v p_v·(log p_v − log q_v) of whole distributions, given as log-probs [N, V]."""
    return (logp.exp() * (logp - logq)).sum(1)


def hessian_product(parts: Iterable[Tensor], weights: Sequence[Tensor], v: Tensor) -> Tensor:
    """[n] (∇² Σ parts)·v = Σ ∇(∇part·v): the Hessian's product with v [n], by differentiating twice.

    parts: scalars with a graph to these weights; out of a generator only one graph exists at a time.
    """
    total = torch.zeros_like(v)
    for part in parts:
        slope = flat(torch.autograd.grad(part, weights, create_graph=True, materialize_grads=True))
        total += flat(torch.autograd.grad(slope @ v, weights, materialize_grads=True))
    return total


def conjugate_gradient(product: Product, b: Tensor, iterations: int, tolerance: float = 1e-10) -> tuple[Tensor, float]:
    """x [n] with F·x ≈ b [n] after so many products with a symmetric F ≥ 0, and the residual ‖b − F·x‖/‖b‖.

    After k products x is the best of span(b, Fb, …, F^{k−1}b), by (x − F⁻¹b)ᵀF(x − F⁻¹b): the full step along x gains
    √(2δ·bᵀx), more with every product. The residual may rise meanwhile, above 1 too, and x is still the one to take.
    It ends early where the residual is below the tolerance, or where F has no curvature to divide by (rounding, or b
    outside of its range).
    """
    x, residual, direction, square = torch.zeros_like(b), b, b, b @ b
    enough = tolerance**2 * square
    for _ in range(iterations):
        curved = product(direction)
        curvature = direction @ curved
        if square <= enough or curvature <= 0:
            break
        length = square / curvature
        x, residual = x + length * direction, residual - length * curved
        previous, square = square, residual @ residual
        direction = residual + square / previous * direction
    return x, float((square / (b @ b)).sqrt())


def full_step(x: Tensor, product: Product, delta: float) -> Tensor:
    """[n] √(2δ/(xᵀFx))·x: as far along x as the quadratic model of D̄_KL allows, ½·stepᵀ·F·step = δ.

    Differs from the paper: it writes gᵀF⁻¹g, which is xᵀFx where x = F⁻¹g. Damping, and few iterations of conjugate
    gradient, find another x; F without the damping still says what a step along that one costs.
    """
    return (2 * delta / (x @ product(x))).sqrt() * x


def line_search(kl: Callable[[float], float], gain: Callable[[float], float], delta: float,
                trials: int = 10) -> tuple[float, float, float]:  # fmt: skip
    """(s, KL, gain) of the longest step found with KL(s) ≤ δ and a better surrogate, gain(s) > 0; zeros where none is.

    s = 1 is the full step. KL grows nearly as s², so s ← s·√(0.95·δ/KL) solves for the length, up and down; where that
    leaves the bracket (longest accepted, shortest rejected), its middle is next. Enough at KL > 0.9·δ.

    Differs from the paper, which shortens by a constant factor what is too long and keeps what is too short.
    """
    s, best, rejected = 1.0, (0.0, 0.0, 0.0), math.inf
    for _ in range(trials):
        spent = kl(s)
        if spent <= delta and (gained := gain(s)) > 0:
            best = s, spent, gained
            if spent > 0.9 * delta:
                break
        else:
            rejected = s
        s *= math.sqrt(0.95 / max(spent / delta, 1e-4))  # rounding may leave a KL of 0, or below
        if not best[0] < s < rejected:  # NaN is not
            s = (best[0] + rejected) / 2
    return best


def line(weights: Sequence[Tensor], step: Tensor) -> Go:
    """go(s) puts the weights at θ_old + s·step [n]; go(0) at θ_old, bit for bit, whatever the step holds."""
    olds = [p.detach().clone() for p in weights]
    steps = [part.view_as(p) for p, part in zip(weights, step.split([p.numel() for p in weights]))]

    @torch.no_grad()
    def go(s: float) -> None:
        """To θ_old + s·step."""
        for p, old, part in zip(weights, olds, steps):
            p.copy_(old + s * part if s else old)

    return go


# ---- the language model's side: the expectation is a mean over the sampled tokens of the batch


def natural_step(policy: Policy, update: Batch, algo: Algorithm, tokens: int) -> float:
    """Move the weights along the natural gradient of the loss whose gradient is in p.grad; returns that gradient's norm.

    tokens: of a micro-batch. An accepted step has D̄_KL ≤ δ on all rows of the update. The weights stay as they are,
    bit for bit, where no length is accepted, and where the gradient is 0 or not finite.
    """
    trust, weights = algo.axes.trpo, [p for p in policy.model.parameters() if p.requires_grad]
    g = -flat(torch.zeros_like(p) if p.grad is None else p.grad for p in weights)
    policy.model.zero_grad(set_to_none=True)
    norm = float(g.norm())
    if norm == 0 or not math.isfinite(norm):
        return norm
    rows = update.counted.any(1).nonzero()[:, 0]  # a row without tokens has no curvature
    rows = rows[torch.linspace(0, len(rows) - 1, max(1, round(trust.share * len(rows)))).long()]  # evenly over prompts
    everything, some = over_tokens(update), over_tokens(update.select(rows))
    with sdpa_kernel(SDPBackend.MATH):  # the fused kernels have no second derivative

        def fisher(v: Tensor) -> Tensor:
            """F·v over some of the rows: F shapes the direction; what a step costs is measured on all of them."""
            return hessian_product(divergences(policy, some, tokens), weights, v)

        x, residual = conjugate_gradient(lambda v: fisher(v) + trust.damping * v, g, trust.iterations)
        go = line(weights, full_step(x, fisher, trust.delta))
        s, kl, gain = line_search(lambda s: spent_kl(go, s, policy, everything, tokens),
                                  lambda s: gained(go, s, policy, update, algo, tokens), trust.delta)  # fmt: skip
        go(s)
    for name, value in {"accepted": s > 0, "residual": residual, "kl": kl, "gain": gain, "length": s}.items():
        log(f"trpo/{name}", value)
    return norm


def over_tokens(batch: Batch) -> Batch:
    """The batch with the weights of D̄_KL: 1/N for each token that is counted, whether it has an advantage or not."""
    return replace(batch, weight=batch.counted.to(batch.weight.dtype) / batch.counted.sum(), local_mean=False)


def next_token(policy: Policy, batch: Batch) -> Tensor:
    """[N, V] log π_θ(· | ids[:, :t]) at the temperature: the distributions that the N sampled tokens were drawn from."""
    return policy.logits(before(policy.hidden(batch.ids), batch.mask)).log_softmax(1)


def divergences(policy: Policy, batch: Batch, tokens: int) -> Iterator[Tensor]:
    """The terms of D̄_KL(π_old‖π_θ) at θ = θ_old, one a micro-batch: 0, of gradient 0; their Hessians add up to F."""
    for micro in batch.split(tokens):
        logp = next_token(policy, micro)
        yield (micro.weight[micro.mask] * categorical_kl(logp.detach(), logp)).sum()


@torch.no_grad()
def spent_kl(go: Go, s: float, policy: Policy, batch: Batch, tokens: int) -> float:
    """D̄_KL(π_old‖π_θ) at θ_old + s·step. π_old is computed anew each time: [N, V] for all rows is too much to keep."""
    total = 0.0
    for micro in batch.split(tokens):
        go(0)
        old = next_token(policy, micro)
        go(s)
        total += float((micro.weight[micro.mask] * categorical_kl(old, next_token(policy, micro))).sum())
    return total


@torch.no_grad()
def gained(go: Go, s: float, policy: Policy, update: Batch, algo: Algorithm, tokens: int) -> float:
    """loss(θ_old) − loss(θ_old + s·step), the ratio being to the policy at θ_old."""
    total = 0.0
    for micro in update.split(tokens):
        go(0)
        old = policy(micro, ALL)
        micro = replace(micro, logp_prox=old.logp, done=1.0)
        loss = algo.loss(old, micro)
        go(s)
        total += float((micro.weight * (loss - algo.loss(policy(micro, ALL), micro))).sum())
    return total
