"""What does a step say about itself? Numbers that are functions of its batch alone; `notes/metrics.md` explains each."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from nanorl import advantage as A
from nanorl import loss as L
from nanorl import shaping
from nanorl.timeline import Span, union

if TYPE_CHECKING:
    from torch import Tensor

    from nanorl.objective import Algorithm
    from nanorl.sample import Batch, Group


def average(notes: Iterable[tuple[str, float]]) -> dict[str, float]:
    """The mean of each name over the values that are finite, and NAME/abstained, the count of others, if there are.

    >>> average([("style", 0.5), ("style", float("nan")), ("style", 1.0)])
    {'style': 0.75, 'style/abstained': 1}
    """
    values, means = {}, {}
    for name, value in notes:
        values.setdefault(name, []).append(value)
    for name, logged in values.items():
        given = [value for value in logged if math.isfinite(value)]
        if given:
            means[name] = math.fsum(given) / len(given)
        if len(given) < len(logged):
            means[f"{name}/abstained"] = len(logged) - len(given)
    return means


def finite(metrics: dict[str, float]) -> dict[str, float]:
    """Without the values that are NaN or infinite, which neither JSON nor a chart can hold."""
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def mean(x: Tensor) -> float:
    """The mean in float64, NaN over nothing."""
    return float(x.cpu().double().mean())


def std(x: Tensor) -> float:
    """The standard deviation (ddof 1) in float64, NaN over less than two."""
    return float(x.cpu().double().std()) if len(x) > 1 else math.nan


def mean_max(name: str, x: Tensor) -> dict[str, float]:
    """NAME/mean and NAME/max."""
    return {f"{name}/mean": mean(x), f"{name}/max": float(x.max()) if len(x) else math.nan}


def trained_ratio(batch: Batch, logp: Tensor, algo: Algorithm) -> tuple[Tensor, Tensor, Tensor]:
    """The tokens that were trained [B, T]; log-probs at the start of the step [B, T]; their ratio r = π_θ/π_old [N].

    logp [B, T]: log π_θ when the token was trained, NaN in rows without a forward pass. Where nothing was measured at
    the start it is π_θ's own. π_old is that, or the sampler with `--prox behave`; r is at the algorithm's level.
    """
    trained = batch.mask & logp.isfinite() & (batch.mask if batch.keep is None else batch.keep)
    start = logp if batch.logp_prox is None else logp.where(batch.logp_prox.isnan(), batch.logp_prox)
    old = batch.logp_behave if algo.axes.prox == "behave" else start
    return trained, start, L.ratio(logp, old, batch.mask, algo.axes.ratio_level)[trained]


def step_metrics(groups: Sequence[Group], batch: Batch, logp: Tensor, algo: Algorithm,
                 updates: int = 1) -> dict[str, float]:  # fmt: skip
    """What a step of so many updates says about itself, by the names of notes/metrics.md; what is undefined or not finite
    is left out, and so is what looks at π_prox where that moved away without having been measured.

    batch: after `credit`. logp [B, T]: log π_θ of each token when it was trained, NaN in rows without a forward pass.
    groups: for the users' numbers. Nothing off the mask is looked at.
    """
    mask, reward, group = batch.mask, batch.reward.cpu().double(), batch.group.cpu()
    trained, start, ratio = trained_ratio(batch, logp, algo)
    share = 1 / A.group_size(reward, group)  # [B] adds up to 1 in a group, so that every group counts alike
    first = batch.version.gather(1, mask.int().argmax(1, keepdim=True))[:, 0]  # argmax: where the first True stands
    tokens, counts = mask.sum(1), batch.ids[mask].unique(return_counts=True)[1]
    metrics = {
        "reward": mean(reward), "reward/std": std(reward),
        "reward/group_std": float((share * A.group_std(reward, group)).sum() / share.sum()),
        "contrast": float((share * ~A.constant(reward, reward, group)).sum() / share.sum()),
        "adv/mean": mean(batch.adv[batch.counted]), "adv/std": std(batch.adv[batch.counted]),
        **mean_max("lag", (batch.step - first)[tokens > 0]), **mean_max("ratio", ratio),
        **clip_shares(batch, trained, ratio, algo),
        "kl/prox": mean(L.kl(start, logp, trained)[trained]),  # samples of π_prox: KL(π_prox‖π_θ), E[r − 1 − log r]
        **mean_max("mismatch", (start - batch.logp_behave)[trained].abs()),
        "mismatch/kl": mean(L.kl(batch.logp_behave, start, trained)[trained]),  # samples of μ: KL(μ‖π_prox)
        "entropy": -mean(batch.logp_behave[mask]),
        "repeat/token": int(counts.max()) / int(counts.sum()) if len(counts) else math.nan,
        **mean_max("length", tokens), "truncated": mean(batch.truncated),
        "samples": len(batch), "tokens": int(tokens.sum()), "trained_rows": mean((mask & logp.isfinite()).any(1)),
        **shaping_metrics(batch, algo),
    }  # fmt: skip
    if batch.logp_ref is not None:
        metrics["kl/ref"] = mean(L.kl(logp, batch.logp_ref, trained)[trained])
    if batch.value is not None:
        left, total = std((batch.returns - batch.value)[batch.counted]), std(batch.returns[batch.counted])
        metrics |= {"value/mean": mean(batch.value[mask]), "value/explained": 1 - (left / (total or math.nan)) ** 2}
    if algo.axes.correction.on:
        factor = L.correction(start, batch.logp_behave, mask, **vars(algo.axes.correction))[trained]
        metrics |= {**mean_max("correction", factor), "correction/masked": mean(factor == 0)}
    if algo.axes.m2_threshold is not None:
        metrics["m2/dropped"] = 1 - mean(batch.keep[mask & batch.adv.ne(0)])
    if updates > 1 and batch.logp_prox is None:  # π_prox was not measured, and π_θ has moved away from it
        of_prox = ("kl/prox", "mismatch", "correction") + (("ratio", "clip") if algo.axes.prox == "loglinear" else ())
        metrics = {name: x for name, x in metrics.items() if not name.startswith(of_prox)}
    return finite({**metrics, **average(n for g in groups for s in g.samples if s.train for n in s.notes)})


def shaping_metrics(batch: Batch, algo: Algorithm) -> dict[str, float]:
    """shaping/STEP/…: mean and std of the rewards after each step in use, and the share of rows that it changed.

    Over the rows that baselines see; `truncated` counts the rows that it took out of the loss as changed, and is over
    all rows there. Where there is such a step the reward norm is one too.
    """
    axes, before, rows = algo.axes, batch.reward, shaping.compared(batch, algo.axes)
    out, found = shaping.left_out(batch, axes), {}
    steps = list(shaping.stages(batch, axes))
    if steps and axes.reward_norm.on:
        seen = steps[-1][1][rows, None]
        seen = A.normalise(seen, seen.new_ones(seen.shape).bool(), batch.group[rows], **vars(axes.reward_norm))
        steps.append(("norm", before.index_copy(0, rows, seen[:, 0])))
    for name, after in steps:
        changed = (after != before)[rows] if name != "truncated" else (after != before) | out
        found |= {f"shaping/{name}/mean": mean(after[rows]), f"shaping/{name}/std": std(after[rows]),
                  f"shaping/{name}/changed": mean(changed)}  # fmt: skip
        before = after
    return found


def of_tokens(batch: Batch, logp: Tensor, algo: Algorithm, updates: int) -> list[dict[str, list[float] | None]]:
    """What the trainer knows of each row's tokens, for samples.jsonl: logp_prox and adv, 0 where nothing was sampled.

    Arguments as in `step_metrics`. None in place of log-probs for a row without a forward pass, and for all rows where
    π_prox moved away without having been measured.
    """
    start, off = trained_ratio(batch, logp, algo)[1], ~batch.mask
    known = (start.isfinite() | off).all(1) & (updates == 1 or batch.logp_prox is not None)
    rows = zip(batch.length.tolist(), known.tolist(), start.masked_fill(off, 0).tolist(),
               batch.adv.masked_fill(off, 0).tolist())  # fmt: skip
    return [{"logp_prox": prox[:n] if measured else None, "adv": adv[:n]} for n, measured, prox, adv in rows]


def utilisation(spans: Sequence[Span], seconds: float) -> dict[str, float]:
    """util/train and util/engine/N: the share of these seconds that the trainer trained, and that each engine worked.

    Work counts where it is reported, at its end, and at most as all of the time.
    """
    work: dict[str, list[Span]] = {"util/train": [s for s in spans if s.name in ("score", "update")]}
    for span in spans:
        if span.lane.startswith("engine"):
            work.setdefault(f"util/{span.lane.replace(' ', '/')}", []).append(span)
    return {key: min(1.0, sum(end - start for start, end in union(of)) / seconds) for key, of in work.items()}


PUBLISH = ("bytes", "copy", "digest", "transfer", "load", "probe")  # what a publish takes


def published(spans: Sequence[Span]) -> dict[str, float]:
    """sync/…: what the publishes among these spans took, in the mean, and the largest mismatch of their proofs."""
    if not (took := [span.args for span in spans if "transfer" in span.args]):
        return {}
    means = {f"sync/{part}": sum(args[part] for args in took) / len(took) for part in PUBLISH}
    return finite({**means, "sync/mismatch": max(args.get("mismatch", -math.inf) for args in took)})


def clip_shares(batch: Batch, trained: Tensor, ratio: Tensor, algo: Algorithm) -> dict[str, float]:
    """Shares of trained tokens that the clip leaves without gradient; nothing for a surrogate without a clip."""
    if "eps_low" in algo.unused():
        return {}
    axes = algo.axes
    adv = algo.pull(batch)[trained]
    low, high = mean((adv < 0) & (ratio < 1 - axes.eps_low)), mean((adv > 0) & (ratio > 1 + axes.eps_high))
    dual = {} if axes.dual_clip is None else {"clip/dual": mean((adv < 0) & (ratio > axes.dual_clip))}
    return {"clip": low + high + dual.get("clip/dual", 0.0), "clip/low": low, "clip/high": high, **dual}
