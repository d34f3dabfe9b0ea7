"""The equations once more, as slow loops over floats.

The oracles share nothing with `advantage.py` and `loss.py`: lists in, lists out, one index at a time, by cases where
the code takes a minimum. What has a gradient comes with its slope, so that gradients are compared and not only values.
"""

from __future__ import annotations

from collections.abc import Callable
from math import exp, fsum, inf, sqrt

Row = list[float]
Cells = list[list[float]]
Mask = list[list[bool]]
BOUND = 20.0  # of log-ratios


def members(group: list[int], i: int) -> list[int]:
    """The rows of row i's group, itself among them."""
    return [j for j in range(len(group)) if group[j] == group[i]]


# ---- credit


def normalise(x: Cells, mask: Mask, group: list[int], mean_level: str, std_level: str, leave_one_out: bool = False,
              ddof: int = 1, eps: float = 1e-6, eps_in: str = "std") -> Cells:  # fmt: skip
    """(x − μ)/(σ + ε), each element against its own pool: the elements of its group, or of the batch."""
    cells = [(i, t) for i in range(len(mask)) for t in range(len(mask[i])) if mask[i][t]]

    def pool(level: str, i: int) -> list[tuple[int, int]]:
        return [(j, u) for j, u in cells if level == "batch" or group[j] == group[i]]

    centred = {}
    for i, t in cells:
        others = [c for c in pool(mean_level, i) if not (leave_one_out and c == (i, t))]
        if mean_level == "none":
            centred[i, t] = x[i][t]
        elif len({x[j][u] for j, u in pool(mean_level, i)}) == 1:
            centred[i, t] = 0.0
        else:
            centred[i, t] = x[i][t] - fsum(x[j][u] for j, u in others) / len(others)
    out = [[0.0] * len(row) for row in mask]
    for i, t in cells:
        rows = pool(std_level, i)
        variance = fsum(centred[c] ** 2 for c in rows) / (len(rows) - ddof) if len(rows) > ddof else 1.0
        scale = sqrt(variance + eps) if eps_in == "variance" else sqrt(variance) + eps
        out[i][t] = centred[i, t] / (1.0 if std_level == "none" else scale)
    return out


def placed(rewards: Cells, mask: Mask) -> Cells:
    """Every reward walks left to the nearest sampled token, or, where there is none, right."""
    out = [[0.0] * len(row) for row in mask]
    for i, row in enumerate(rewards):
        for t, reward in enumerate(row):
            way = [*range(t, -1, -1), *range(t, len(row))]
            sampled = [u for u in way if mask[i][u]]
            if sampled:
                out[i][sampled[0]] += reward
    return out


def gae(reward: Cells, value: Cells, mask: Mask, gamma: float, lam: float, after: list[float]) -> Cells:
    """Â_k = Σ_{l ≥ k} (γλ)^{l−k}·δ_l, a double sum over the sampled tokens of the row; `after` is V after the last."""
    out = [[0.0] * len(row) for row in mask]
    for i in range(len(mask)):
        there = [t for t in range(len(mask[i])) if mask[i][t]]
        values = [value[i][t] for t in there] + [after[i]]
        delta = [reward[i][t] + gamma * values[k + 1] - values[k] for k, t in enumerate(there)]
        for k, t in enumerate(there):
            out[i][t] = fsum((gamma * lam) ** (m - k) * delta[m] for m in range(k, len(there)))
    return out


def returns_to_go(reward: Cells, mask: Mask, gamma: float) -> Cells:
    """G_k = Σ_{l ≥ k} γ^{l−k}·r_l, over the sampled tokens."""
    out = [[0.0] * len(row) for row in mask]
    for i in range(len(mask)):
        there = [t for t in range(len(mask[i])) if mask[i][t]]
        for k, t in enumerate(there):
            out[i][t] = fsum(gamma ** (m - k) * reward[i][there[m]] for m in range(k, len(there)))
    return out


# ---- surrogates: a shape is (r, Â) → (loss, ω)

Shape = Callable[[float, float], tuple[float, float]]


def clipped(r: float, adv: float, low: float, high: float, dual: float = inf) -> tuple[float, float]:
    """PPO's clip, the regions one by one: flat where the ratio has gone too far, −r·Â elsewhere."""
    if adv > 0 and r > 1 + high:
        return -adv * (1 + high), 0.0
    if adv < 0 and r < 1 - low:
        return -adv * (1 - low), 0.0
    if adv < 0 and r > dual:
        return -adv * dual, 0.0
    return -adv * r, r


def importance(r: float, adv: float) -> tuple[float, float]:
    """−r·Â."""
    return -adv * r, r


def sapo(r: float, adv: float, tau_pos: float, tau_neg: float) -> tuple[float, float]:
    """−(4/τ)·σ(τ(r−1))·Â, ω = 4σ(1−σ)·r."""
    tau = tau_pos if adv > 0 else tau_neg
    sigma = 1 / (1 + exp(-tau * (r - 1)))
    return -adv * 4 / tau * sigma, 4 * sigma * (1 - sigma) * r


def held(x: float) -> tuple[float, float]:
    """A log-ratio within its bound, and its slope: 1 within, 0 beyond."""
    return max(-BOUND, min(BOUND, x)), 1.0 if abs(x) <= BOUND else 0.0


def surrogate(shape: Shape, level: str, logp: Row, old: Row, adv: Row, mask: list[bool]) -> tuple[Row, Row]:
    """Loss of each token of a row, and ∂(their sum)/∂log π of each, for a ratio of this level.

    A ratio of the whole answer moves with each of its tokens, so each token's loss pulls at all: by s/n of a geometric
    mean, by w of a product. GSPO-token's pulls at its own.
    """
    there = [t for t in range(len(mask)) if mask[t]]
    log_r = {t: held(logp[t] - old[t]) for t in there}
    total, n = fsum(x for x, _ in log_r.values()), len(there)
    value, slope = [0.0] * len(mask), [0.0] * len(mask)
    for t in there:
        log_level = {"token": log_r[t][0], "joint": held(total)[0]}.get(level, total / n)
        value[t], omega = shape(exp(log_level), adv[t])
        share = {"token": log_r[t][1], "sequence-token": 1.0, "sequence": 1 / n, "joint": held(total)[1]}[level]
        for u in there if level in ("sequence", "joint") else [t]:
            slope[u] -= omega * adv[t] * share * (log_r[u][1] if level in ("sequence", "joint") else 1.0)
    return value, slope


def reinforce(logp: float, adv: float) -> tuple[float, float]:
    """−Â·log π and its slope."""
    return -adv * logp, -adv


# ---- samples of another policy


def correction(prox: Row, behave: Row, mask: list[bool], kind: str, level: str, low: float, high: float) -> Row:
    """ρ of each token of a row, held within the bounds or 0 outside of them; 1 off the mask."""
    log_rho = {t: held(prox[t] - behave[t])[0] for t in range(len(mask)) if mask[t]}
    total, out = fsum(log_rho.values()), [1.0] * len(mask)
    for t, own in log_rho.items():
        rho = exp({"token": own, "joint": held(total)[0], "sequence": total / len(log_rho)}[level])
        inside = low <= rho <= high
        out[t] = rho if inside else 0.0 if kind == "mask" else (low if rho < low else high)
    return out


def second_moment(log_rho: Cells, adv: Cells, mask: Mask, threshold: float) -> Mask:
    """While the mean square of the harmful tokens is not below the threshold, the largest of them goes."""
    keep = [list(row) for row in mask]
    harmful = [(i, t) for i in range(len(mask)) for t in range(len(mask[i]))
               if mask[i][t] and adv[i][t] * log_rho[i][t] > 0]  # fmt: skip
    while harmful and fsum(log_rho[i][t] ** 2 for i, t in harmful) / len(harmful) >= threshold:
        i, t = max(harmful, key=lambda c: abs(log_rho[c[0]][c[1]]))
        harmful.remove((i, t))
        keep[i][t] = False
    return keep


def loglinear(logp: float, behave: float, lag: int, done: float) -> float:
    """The line through (−lag, log μ) and (done, log π_θ), at 0; where they are one point, log π_θ."""
    return logp if lag + done == 0 else (done * behave + lag * logp) / (lag + done)


# ---- regularisers and the critic: (value, slope)


def kl(logp: float, ref: float, estimator: str) -> tuple[float, float]:
    """k1, k2, k3 of d = log π − log π_ref; k3+ has the value of k3 and the slope of k2."""
    d, free = held(logp - ref)
    value = {"k1": d, "k2": d * d / 2}.get(estimator, exp(-d) - 1 + d)
    return value, free * {"k1": 1.0, "k2": d, "k3": 1 - exp(-d), "k3+": d}[estimator]


def value_loss(value: float, old: float, target: float, clip: float | None, huber: float) -> tuple[float, float]:
    """½(V − R)², linear beyond huber; a V that has moved further than clip counts as stopped there if that is worse."""

    def error(v: float) -> tuple[float, float]:
        e = v - target
        return (e * e / 2, e) if abs(e) <= huber else (huber * (abs(e) - huber / 2), huber if e > 0 else -huber)

    if clip is not None and abs(value - old) > clip:
        stopped = error(old + clip if value > old else old - clip)[0]
        if stopped > error(value)[0]:
            return stopped, 0.0
    return error(value)


# ---- weights: mask [B][T], group [B] → [B][T]


def weights(mode: str, mask: Mask, group: list[int], limit: int) -> Cells:
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
