"""The rows of the table once more, each as its papers have it: loops over floats that share nothing with nanorl.

An answer is here the list of its sampled tokens, in order: no prompt, no gap, no padding, no mask. A term of the loss
is, for each token, its value and its slope in every log-prob of its answer, (ℓ_t, [∂ℓ_t/∂log π_k for all k]), so that
gradients are compared and not only values. The numbers of a row (clips, weights) stand in it and are not read anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from math import exp, fsum, inf, sqrt
from statistics import mean, pvariance, stdev
from typing import NamedTuple

from torch import Tensor

from nanorl.sample import Batch
from tests.oracles import weights

Pair = tuple[float, float]  # value and slope in the token's own log-prob
Term = list[tuple[float, list[float]]]  # of an answer: for each token its value and its slope in every log-prob


class Answer(NamedTuple):
    """An answer as the equations see it: a number for each sampled token."""

    at: list[int]  # its columns in the batch
    group: int
    reward: float  # the whole of it
    earned: list[float]  # what each token earned
    logp: list[float]  # log π_θ
    prox: list[float]
    mu: list[float]
    ref: list[float]
    value: list[float]
    lag: list[int]
    done: float  # the share of the step's updates made before this one


World = list[Answer]


def answers(batch: Batch, logp: Tensor) -> World:
    """The batch without its layout. With nothing done yet π_prox is the current policy."""
    found = []
    for i in range(len(batch)):
        at = [t for t in range(batch.mask.shape[1]) if batch.mask[i, t]]
        earned = [0.0] * len(at)
        for t, reward in enumerate(batch.rewards[i].tolist()):
            if at:  # the last sampled token at or before t, else the first
                earned[max([k for k in range(len(at)) if at[k] <= t], default=0)] += reward
        per_token = (logp, logp if batch.done == 0 else batch.logp_prox, batch.logp_behave, batch.logp_ref, batch.value)
        found.append(Answer(at, int(batch.group[i]), fsum(batch.rewards[i].tolist()), earned,
                            *([float(x[i, t]) for t in at] for x in per_token),
                            [batch.step - int(batch.version[i, t]) for t in at], batch.done))  # fmt: skip
    return found


# ---- better than what?


def centred(world: World) -> list[float]:
    """R − the mean of the group."""
    return [a.reward - mean(b.reward for b in world if b.group == a.group) for a in world]


def standardised(world: World) -> list[float]:
    """(R − group mean)/(group std + 1e-6), the std with G − 1; alone there is nothing to compare with."""
    found = []
    for a in world:
        rewards = [b.reward for b in world if b.group == a.group]
        found.append((a.reward - mean(rewards)) / (stdev(rewards) + 1e-6) if len(rewards) > 1 else 0.0)
    return found


def above_the_others(world: World) -> list[float]:
    """R_i − 1/(G−1) Σ_{j≠i} R_j."""
    found = []
    for i, a in enumerate(world):
        rewards = [b.reward for j, b in enumerate(world) if b.group == a.group and j != i]
        found.append(a.reward - mean(rewards) if rewards else 0.0)
    return found


def whitened(rows: list[list[float]]) -> list[list[float]]:
    """(x − mean)/(std + 1e-6) over all numbers of all rows."""
    every = [x for row in rows for x in row]
    return [[(x - mean(every)) / (stdev(every) + 1e-6) for x in row] for row in rows]


def to_go(reward: list[float], gamma: float = 1.0) -> list[float]:
    """Σ_{k ≥ t} γ^{k−t} r_k for every t."""
    return [fsum(gamma ** (k - t) * reward[k] for k in range(t, len(reward))) for t in range(len(reward))]


def less_kl(a: Answer, reward: list[float], beta: float) -> list[float]:
    """r_t − β·(log μ − log π_ref), the log ratio within ±10."""
    return [r - beta * min(max(mu - ref, -10.0), 10.0) for r, mu, ref in zip(reward, a.mu, a.ref)]


def generalised(reward: list[float], value: list[float], gamma: float, lam: float) -> list[float]:
    """Σ_{k ≥ t} (γλ)^{k−t} δ_k with δ_k = r_k + γV_{k+1} − V_k, V = 0 after the end."""
    after = [*value[1:], 0.0]
    return to_go([r + gamma * v1 - v for r, v1, v in zip(reward, after, value)], gamma * lam)


# ---- which way?


def alone(pairs: Iterable[Pair]) -> Term:
    """Each token's loss looks at its own log-prob."""
    pairs = list(pairs)
    return [(v, [slope if k == t else 0.0 for k in range(len(pairs))]) for t, (v, slope) in enumerate(pairs)]


def together(pair: Pair, n: int) -> Term:
    """All n tokens have one loss, with the same slope in every log-prob."""
    return [(pair[0], [pair[1]] * n)] * n


def clipped(d: float, adv: float, low: float, high: float) -> Pair:
    """−min(r·A, clip(r)·A) with r = e^d, by cases instead of by min and clip; the slope in d."""
    r = exp(d)
    if (adv > 0 and r > 1 + high) or (adv < 0 and r < 1 - low):  # further than its clip: flat
        return -adv * (1 + high if adv > 0 else 1 - low), 0.0
    return -adv * r, -adv * r


def clip(a: Answer, adv: float | list[float], low: float = 0.2, high: float = 0.2) -> Term:
    """−min(r_t·A, clip(r_t)·A); A one number an answer or one a token."""
    adv = adv if isinstance(adv, list) else [adv] * len(a.at)
    return alone(clipped(d, credit, low, high) for d, credit in zip(apart(a), adv))


def climb(a: Answer, adv: float | list[float]) -> Term:
    """−A·log π_θ(t)."""
    adv = adv if isinstance(adv, list) else [adv] * len(a.at)
    return alone((-credit * new, -credit) for new, credit in zip(a.logp, adv))


def critics(value: float, old: float, target: float) -> Pair:
    """max(½(V − R)², ½(V_old + clip(V − V_old, ±½) − R)²) and its slope in V."""
    held = min(max(value, old - 0.5), old + 0.5)
    inside = held == value
    if (value - target) ** 2 >= (held - target) ** 2:
        return (value - target) ** 2 / 2, value - target
    return (held - target) ** 2 / 2, (held - target) * inside


def apart(a: Answer) -> list[float]:
    """log π_θ(t) − log π_prox(t)."""
    return [new - old for new, old in zip(a.logp, a.prox)]


def straight(adv: float, logs: list[float]) -> Term:
    """−r·A with r = e^d for each d."""
    return alone((-exp(d) * adv, -exp(d) * adv) for d in logs)


def gate(r: float, adv: float) -> Pair:
    """−(4/τ)·σ(τ(r − 1))·A, τ 1 where A > 0, else 1.05; the slope in log r."""
    tau = 1.0 if adv > 0 else 1.05
    sigma = 1 / (1 + exp(-tau * (r - 1)))
    return -4 / tau * sigma * adv, -4 * sigma * (1 - sigma) * r * adv


def times(term: Term, coefficients: list[float]) -> Term:
    """Each token's loss times a number that has no slope."""
    return [(c * v, [c * s for s in slopes]) for c, (v, slopes) in zip(coefficients, term)]


def plus(one: Term, weight: float, other: Term) -> Term:
    """one + weight·other."""
    return [(v + weight * w, [s + weight * u for s, u in zip(slopes, more)])
            for (v, slopes), (w, more) in zip(one, other)]  # fmt: skip


def divergence(a: Answer, estimator: str) -> Term:
    """The estimate of KL(π_θ‖π_ref) at each token; rk3 is drawn from the sampler, whatever π_prox is."""
    pairs = []
    for new, mu, ref in zip(a.logp, a.mu, a.ref):
        d, r = new - ref, exp(new - mu)
        k3 = exp(-d) - 1 + d
        pairs.append({"k2": (d * d / 2, d), "k3": (k3, 1 - exp(-d)), "k3+": (k3, d),
                      "rk3": (r * k3, r * (k3 + 1 - exp(-d)))}[estimator])  # fmt: skip
    return alone(pairs)


def stale(a: Answer, level: str, kind: str, low: float = 0.0, high: float = inf) -> list[float]:
    """π_prox/μ of each token, of the answer's geometric mean, or of the answer; held within bounds, or 0 beyond."""
    logs = [old - mu for old, mu in zip(a.prox, a.mu)]
    one = {"token": None, "sequence": fsum(logs) / max(len(logs), 1), "joint": fsum(logs)}[level]
    found = [exp(x if one is None else one) for x in logs]
    return [min(max(x, low), high) if kind == "truncate" else x * (low <= x <= high) for x in found]


# ---- the rows


def grpo(world: World) -> Iterator[Term]:
    """(R − group mean)/group std; clipped ratio."""
    for a, adv in zip(world, standardised(world)):
        yield clip(a, adv)


def grpo_deepseekmath(world: World) -> Iterator[Term]:
    """GRPO + 0.04·k3 to the reference, in the loss."""
    for a, adv in zip(world, standardised(world)):
        yield plus(clip(a, adv), 0.04, divergence(a, "k3"))


def grpo_areal_page(world: World) -> Iterator[Term]:
    """δ under the root, G in the denominator; the clipped ratio of the whole answer."""
    for a in world:
        rewards = [b.reward for b in world if b.group == a.group]
        adv = (a.reward - mean(rewards)) / sqrt(pvariance(rewards) + 1e-8)
        yield together(clipped(fsum(apart(a)), adv, 0.2, 0.2), len(a.at))


def dr_grpo(world: World) -> Iterator[Term]:
    """R − group mean; clipped ratio."""
    for a, adv in zip(world, centred(world)):
        yield clip(a, adv)


def liteppo(world: World) -> Iterator[Term]:
    """(R − group mean)/batch std of what is left; clipped ratio."""
    deviations = centred(world)
    for a, deviation in zip(world, deviations):
        yield clip(a, deviation / (stdev(deviations) + 1e-6))


def rloo(world: World) -> Iterator[Term]:
    """R − mean of the others; −A·log π."""
    for a, adv in zip(world, above_the_others(world)):
        yield climb(a, adv)


def plain_reinforce(world: World) -> Iterator[Term]:
    """What was earned from here on; −R·log π."""
    for a in world:
        yield climb(a, to_go(a.earned))


def reinforce_baseline(world: World) -> Iterator[Term]:
    """R − group mean; −A·log π."""
    for a, adv in zip(world, centred(world)):
        yield climb(a, adv)


def gspo(world: World) -> Iterator[Term]:
    """The geometric mean of the answer's ratio, clipped very near 1."""
    for a, adv in zip(world, standardised(world)):
        n = max(len(a.at), 1)
        value, slope = clipped(fsum(apart(a)) / n, adv, 3e-4, 4e-4)
        yield together((value, slope / n), len(a.at))


def gspo_token(world: World) -> Iterator[Term]:
    """GSPO's ratio in value, each token's own slope."""
    for a, adv in zip(world, standardised(world)):
        n = max(len(a.at), 1)
        yield alone([clipped(fsum(apart(a)) / n, adv, 3e-4, 4e-4)] * len(a.at))


def dapo(world: World) -> Iterator[Term]:
    """Clip-higher; where 5 tokens may be, the fifth costs a whole reward."""
    shorter = [a._replace(reward=a.reward - (len(a.at) >= 5)) for a in world]
    for a, adv in zip(world, standardised(shorter)):
        yield clip(a, adv, 0.2, 0.28)


def sapo(world: World) -> Iterator[Term]:
    """Soft gates for a clip."""
    for a, adv in zip(world, standardised(world)):
        yield alone(gate(exp(d), adv) for d in apart(a))


def decoupled_ppo(world: World) -> Iterator[Term]:
    """π_prox/μ, 0 beyond 5, times GRPO's loss."""
    for a, adv in zip(world, standardised(world)):
        yield times(clip(a, adv), stale(a, "token", "mask", high=5.0))


def between(a: Answer) -> list[float]:
    """log μ + α(log π_θ − log μ), α = lag/(lag + done): π_prox stands that share of the way from the sampler to now."""
    share = [lag / (lag + a.done) if lag + a.done > 0 else 1.0 for lag in a.lag]
    return [mu + s * (new - mu) for mu, s, new in zip(a.mu, share, a.logp)]


def decoupled_loglinear(world: World) -> Iterator[Term]:
    """decoupled_ppo around a π_prox that is interpolated."""
    return decoupled_ppo([a._replace(prox=between(a)) for a in world])


def m2po(world: World) -> Iterator[Term]:
    """−(π_θ/μ)·A; the farthest tokens that have moved with A go until the mean of (log π_prox/μ)² is below 0.04."""
    credit = standardised(world)
    far = [[old - mu for old, mu in zip(a.prox, a.mu)] for a in world]
    moved = sorted(d * d for row, adv in zip(far, credit) for d in row if adv * d > 0)
    gone = set()
    while moved and fsum(moved) / len(moved) >= 0.04:
        gone.add(moved.pop())
    for a, row, adv in zip(world, far, credit):
        kept = [0.0 if adv * d > 0 and d * d in gone else 1.0 for d in row]
        yield times(straight(adv, [new - mu for new, mu in zip(a.logp, a.mu)]), kept)


def trpo(world: World) -> Iterator[Term]:
    """−r·A."""
    for a, adv in zip(world, standardised(world)):
        yield straight(adv, apart(a))


def ppo(world: World, gamma: float = 1.0, lam: float = 1.0) -> Iterator[Term]:
    """GAE on rewards less 0.1·KL, whitened; clipped ratio."""
    credit = [generalised(less_kl(a, a.earned, 0.1), a.value, gamma, lam) for a in world]
    for a, adv in zip(world, whitened(credit)):
        yield clip(a, adv)


def ppo_targets(world: World, gamma: float = 1.0, lam: float = 1.0) -> Iterator[list[float]]:
    """What ppo's critic should have said: advantage before it is whitened, plus V."""
    for a in world:
        adv = generalised(less_kl(a, a.earned, 0.1), a.value, gamma, lam)
        yield [x + v for x, v in zip(adv, a.value)]


def diagnostic(world: World) -> Iterator[Term]:
    """Rewards within ±10, whitened over the batch, less 0.05·KL, whitened again over tokens; clipped ratio."""
    rewards = whitened([[min(max(a.reward, -10.0), 10.0) for a in world]])[0]
    credit = [to_go(less_kl(a, [0.0] * (len(a.at) - 1) + [reward], 0.05)) for a, reward in zip(world, rewards)]
    for a, adv in zip(world, whitened(credit)):
        yield clip(a, adv)


ROWS: dict[str, tuple[str, Callable[[World], Iterator[Term]]]] = {
    "grpo": ("token-mean", grpo), "grpo_deepseekmath": ("seq-mean-token-mean", grpo_deepseekmath),
    "grpo_areal_page": ("seq-mean-token-mean", grpo_areal_page), "dr_grpo": ("seq-mean-token-sum-norm", dr_grpo),
    "liteppo": ("token-mean", liteppo), "rloo": ("seq-mean-token-sum", rloo),
    "reinforce": ("seq-mean-token-sum", plain_reinforce),
    "reinforce_baseline": ("seq-mean-token-sum", reinforce_baseline),
    "gspo": ("seq-mean-token-mean", gspo), "gspo_token": ("seq-mean-token-mean", gspo_token),
    "dapo": ("token-mean", dapo), "sapo": ("seq-mean-token-mean", sapo),
    "decoupled_ppo": ("token-mean", decoupled_ppo), "decoupled_loglinear": ("token-mean", decoupled_loglinear),
    "m2po": ("token-mean", m2po), "trpo": ("token-mean", trpo), "ppo": ("token-mean", ppo),
    "diagnostic": ("token-mean", diagnostic),
}  # fmt: skip


def added_up(batch: Batch, world: World, terms: Iterable[Term], mode: str,
             limit: int) -> tuple[float, list[list[float]]]:  # fmt: skip
    """Σ weight·ℓ over all tokens of all answers, and its slope in every log-prob, [B][T] again."""
    weight = weights(mode, batch.mask.tolist(), batch.group.tolist(), limit)
    losses, slopes = [], [[0.0] * batch.mask.shape[1] for _ in world]
    for i, (a, term) in enumerate(zip(world, terms, strict=True)):
        for t, (value, row) in zip(a.at, term, strict=True):
            losses.append(weight[i][t] * value)
            for k, slope in zip(a.at, row, strict=True):
                slopes[i][k] += weight[i][t] * slope
    return fsum(losses), slopes
