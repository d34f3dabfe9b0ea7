"""A step's numbers mean what notes/metrics.md says, for every kind of algorithm, and nothing off the mask moves them."""

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanorl.algorithms import ALGORITHMS, chosen
from nanorl.axes import Axes, Correction
from nanorl.metrics import PUBLISH, average, published, step_metrics
from nanorl.objective import READS, Algorithm
from nanorl.sample import Batch, Group, Prompt, Sample, collate
from nanorl.timeline import Span

torch.set_num_threads(1)
VERSION, LOW, HIGH = 5, 0.2, 0.28
NAN = float("nan")


def make(tokens=(3, 4), reward=0.0, version=0, finish="stop", prompt=(1, 2), logp=None, **more) -> Sample:
    """A sample of one turn: the prompt's ids, then the sampled tokens; the reward at the end."""
    n, m = len(prompt), len(tokens)
    return Sample(
        ids=(*prompt, *tokens), mask=(False,) * n + (True,) * m, logp_behave=(0.0,) * n + tuple(logp or (-1.0,) * m),
        version=(-1,) * n + (version,) * m, finish=finish, rewards=((n + m - 1, reward),), **more,
    )  # fmt: skip


def group_of(*samples: Sample, number: int = 0) -> Group:
    """These samples as the tries at one prompt."""
    return Group(Prompt(number, (1, 2), "1+1=", "2"), samples)


def algorithm(name: str = "grpo", **axes) -> Algorithm:
    """The row of this name with unequal clips and these axes."""
    row = ALGORITHMS[name]
    return replace(row, axes=replace(row.axes, **{"eps_low": LOW, "eps_high": HIGH, **axes}))


notes = st.tuples(st.sampled_from(["style", "worked"]), st.sampled_from([0.0, 1.0, 0.3, NAN]))
samples = st.builds(
    make, tokens=st.lists(st.integers(0, 3), max_size=4).map(tuple), reward=st.sampled_from([0.0, 0.5, 1.0, -2.0]),
    version=st.integers(0, VERSION), finish=st.sampled_from(["stop", "length", "abort"]),
    prompt=st.sampled_from([(1,), (1, 2, 3)]), train=st.sampled_from([True, True, True, False]),
    notes=st.lists(notes, max_size=2).map(tuple),
)  # fmt: skip
steps = st.lists(st.lists(samples, min_size=1, max_size=4).map(lambda s: group_of(*s)), min_size=1, max_size=3).filter(
    lambda groups: any(s.train for g in groups for s in g.samples)
)
corrections = st.builds(Correction, kind=st.sampled_from(["none", "truncate", "mask"]), high=st.sampled_from([1.1, 5.0]),
                        level=st.sampled_from(["token", "sequence", "joint"]), low=st.sampled_from([0.0, 0.9]))  # fmt: skip
algorithms = st.builds(
    algorithm, ratio_level=st.sampled_from(["token", "sequence", "sequence-token", "joint"]), correction=corrections,
    dual_clip=st.sampled_from([None, 1.4]), prox=st.sampled_from(["recompute", "behave"]),
    m2_threshold=st.sampled_from([None, 0.04]),
)  # fmt: skip
seeds = st.integers(0, 2**31)


def batch_of(groups: list[Group], seed: int) -> tuple[Batch, torch.Tensor]:
    """The groups as a batch in float64 with every field that metrics read, at random, and the trainer's log-probs.

    Some rows had no forward pass (NaN in all their log-probs), some had one in the first update (NaN in logp_prox).
    """
    batch, g = collate(groups, VERSION), torch.Generator().manual_seed(seed)

    def noise(scale: float) -> torch.Tensor:
        return torch.randn(batch.mask.shape, generator=g, dtype=torch.float64) * scale

    def some(share: float) -> torch.Tensor:
        return torch.rand(len(batch), 1, generator=g) < share

    behave = -noise(1.0).abs()
    passed = some(0.7)
    logp = (behave + noise(0.3)).where(passed, NAN)
    batch = replace(
        batch, rewards=batch.rewards.double(), logp_behave=behave, keep=noise(1.0) > -1,
        adv=noise(1.0) * (noise(1.0) > -1),
        logp_prox=(behave + noise(0.1)).where(passed & some(0.7), NAN), logp_ref=behave + noise(0.5),
        value=noise(1.0), returns=noise(2.0),
    )  # fmt: skip
    return batch, logp


def close(a: dict[str, float], b: dict[str, float]) -> bool:
    return a.keys() == b.keys() and all(a[k] == pytest.approx(b[k], rel=1e-9, abs=1e-12) for k in a)


def at_level(log_r: list[float], level: str) -> list[float]:
    """exp of each token's log-ratio, of their mean, or of their sum, at every token of a row."""
    row = {"token": log_r, "joint": [sum(log_r)] * len(log_r)}.get(level, [mean(log_r)] * len(log_r))
    return [math.exp(x) for x in row]


def bounded(rho: float, how: Correction) -> float:
    """The coefficient that multiplies a token's loss."""
    return min(max(rho, how.low), how.high) if how.kind == "truncate" else rho * (how.low <= rho <= how.high)


def oracle(groups: list[Group], batch: Batch, logp: torch.Tensor, axes: Axes) -> dict[str, float]:
    """notes/metrics.md, line by line, as loops over plain numbers."""
    rows = [s for group in groups for s in group.samples if s.train]
    out: dict[str, list[float]] = {k: [] for k in (
        "adv", "lag", "ratio", "low", "high", "dual", "prox", "ref", "mismatch", "apart", "surprise", "length", "passed",
        "token", "factor", "kept", "value", "returns", "left")}  # fmt: skip
    for i, s in enumerate(rows):
        at = [t for t, sampled in enumerate(s.mask) if sampled]
        a, new, mu, measured, value, returns = ([float(x[i, t]) for t in at] for x in (
            batch.adv, logp, batch.logp_behave, batch.logp_prox, batch.value, batch.returns))  # fmt: skip
        start = [n if math.isnan(m) else m for n, m in zip(new, measured)]  # π_prox, or π_θ before anything moved
        old = mu if axes.prox == "behave" else start
        r = at_level([n - o for n, o in zip(new, old)], axes.ratio_level)
        rho = at_level([p - m for p, m in zip(start, mu)], axes.correction.level)
        pushed = [mean(a)] * len(at) if axes.ratio_level in ("sequence", "joint") else a
        out["length"].append(len(at))
        out["passed"].append(any(map(math.isfinite, new)))
        out["lag"] += [VERSION - s.version[at[0]]] if at else []
        for k, t in enumerate(at):
            keep = bool(batch.keep[i, t])
            out["adv"].append(a[k])
            out["surprise"].append(-mu[k])
            out["token"].append(s.ids[t])
            out["value"].append(value[k])
            out["returns"].append(returns[k])
            out["left"].append(returns[k] - value[k])
            out["kept"] += [keep] if a[k] != 0 else []
            if math.isnan(new[k]) or not keep:
                continue
            out["ratio"].append(r[k])
            out["low"].append(pushed[k] < 0 and r[k] < 1 - LOW)
            out["high"].append(pushed[k] > 0 and r[k] > 1 + HIGH)
            out["dual"].append(axes.dual_clip is not None and pushed[k] < 0 and r[k] > axes.dual_clip)
            moved = math.exp(new[k] - start[k])
            out["prox"].append(moved - 1 - math.log(moved))
            q = math.exp(float(batch.logp_ref[i, t]) - new[k])  # π_ref/π_θ
            out["ref"].append(q - 1 - math.log(q))
            out["mismatch"].append(abs(start[k] - mu[k]))
            rho_token = math.exp(start[k] - mu[k])
            out["apart"].append(rho_token - 1 - math.log(rho_token))
            out["factor"].append(bounded(rho[k], axes.correction))
    by_group = [[s.reward for s in group.samples if s.train] for group in groups]
    by_group = [r for r in by_group if r]
    metrics = {
        "reward": mean(s.reward for s in rows), "reward/std": std([s.reward for s in rows], NAN),
        "reward/group_std": mean(std(r, 0.0) for r in by_group),
        "contrast": mean(len(set(r)) > 1 for r in by_group),
        "adv/mean": mean(out["adv"]), "adv/std": std(out["adv"], NAN),
        "clip/low": mean(out["low"]), "clip/high": mean(out["high"]),
        "clip": mean(out["low"]) + mean(out["high"]) + mean(out["dual"]),
        "kl/prox": mean(out["prox"]), "kl/ref": mean(out["ref"]), "mismatch/kl": mean(out["apart"]),
        "entropy": mean(out["surprise"]),
        "repeat/token": max(Counter(out["token"]).values(), default=NAN) / max(len(out["token"]), 1),
        "truncated": mean(s.finish == "length" for s in rows), "trained_rows": mean(out["passed"]),
        "samples": len(rows), "tokens": sum(out["length"]), "value/mean": mean(out["value"]),
        "value/explained": 1 - (std(out["left"], NAN) / std(out["returns"], NAN)) ** 2,
    }  # fmt: skip
    for name in ("lag", "ratio", "mismatch", "length"):
        metrics |= {f"{name}/mean": mean(out[name]), f"{name}/max": max(out[name], default=NAN)}
    if axes.dual_clip is not None:
        metrics["clip/dual"] = mean(out["dual"])
    if axes.correction.on:
        metrics |= {"correction/mean": mean(out["factor"]), "correction/max": max(out["factor"], default=NAN),
                    "correction/masked": mean(f == 0 for f in out["factor"])}  # fmt: skip
    if axes.m2_threshold is not None:
        metrics["m2/dropped"] = 1 - mean(out["kept"])
    for name in ("style", "worked"):
        logged = [v for s in rows for n, v in s.notes if n == name]
        silent = sum(map(math.isnan, logged))
        metrics[name] = mean(v for v in logged if not math.isnan(v))
        metrics |= {f"{name}/abstained": silent} if silent else {}
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def mean(values) -> float:
    values = list(values)
    return sum(values) / len(values) if values else NAN


def std(values: list[float], alone: float) -> float:
    m, n = mean(values), len(values)
    return math.sqrt(sum((v - m) ** 2 for v in values) / (n - 1)) if n > 1 else alone


# ---- all of them, for any algorithm


@given(steps, seeds, algorithms)
@settings(max_examples=100)
def test_every_metric_is_its_equation(groups, seed, algo):
    batch, logp = batch_of(groups, seed)
    measured, expected = step_metrics(groups, batch, logp, algo), oracle(groups, batch, logp, algo.axes)
    assert measured.keys() == expected.keys()
    assert close(measured, expected), {k: (measured[k], expected[k]) for k in measured if measured[k] != expected[k]}


@given(steps, seeds, algorithms)
def test_garbage_off_the_mask_changes_nothing(groups, seed, algo):
    batch, logp = batch_of(groups, seed)
    off = ~batch.mask
    trash = torch.tensor([NAN, math.inf, -math.inf, 1e30])[torch.arange(off.numel()).reshape(off.shape) % 4].double()
    floats = ("logp_behave", "logp_prox", "logp_ref", "adv", "value", "returns")
    noisy = replace(
        batch, ids=batch.ids.masked_fill(off, 10**9), version=batch.version.masked_fill(off, -(10**9)),
        keep=batch.keep | off, **{f: getattr(batch, f).where(~off, trash) for f in floats},
    )  # fmt: skip
    assert step_metrics(groups, noisy, logp.where(~off, trash), algo) == step_metrics(groups, batch, logp, algo)


@given(steps, seeds, algorithms)
def test_the_order_of_the_rows_changes_nothing(groups, seed, algo):
    batch, logp = batch_of(groups, seed)
    order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(seed))
    shuffled = step_metrics(groups, batch.select(order), logp[order], algo)
    assert close(shuffled, step_metrics(groups, batch, logp, algo))


@given(steps, seeds, algorithms)
def test_a_batch_given_twice_has_the_same_means_and_twice_the_counts(groups, seed, algo):
    batch, logp = batch_of(groups, seed)
    tensors = {name: value for name, value in vars(batch).items() if isinstance(value, torch.Tensor)}
    twice = replace(batch, **{name: torch.cat([value] * 2) for name, value in tensors.items()})
    twice = replace(twice, group=torch.cat([batch.group, batch.group + len(groups)]))
    once = step_metrics(groups, batch, logp, algo)
    again = step_metrics(groups * 2, twice, logp.repeat(2, 1), algo)
    for name in once.keys() - {"reward/std", "adv/std"}:  # ddof 1: a deviation does change, a share of variances does not
        counts = name in ("samples", "tokens") or name.endswith("/abstained")
        assert again[name] == pytest.approx(once[name] * (2 if counts else 1), rel=1e-9, abs=1e-12), name


# ---- entropy and KL, in expectation


def exact(counts: list[int], **logps: list[float]) -> dict[str, float]:
    """Metrics of a batch in which token v was drawn counts[v] times: its averages are exact expectations."""
    rows = [make((v,)) for v, n in enumerate(counts) for _ in range(n)]
    batch = collate([group_of(*rows)])
    blank = torch.zeros(batch.mask.shape, dtype=torch.float64)

    def of(table: list[float]) -> torch.Tensor:
        return blank.masked_scatter(batch.mask, torch.tensor(table, dtype=torch.float64)[batch.ids[batch.mask]])

    logp = of(logps.pop("logp", [0.0] * len(counts)))
    batch = replace(batch, adv=blank, **{name: of(table) for name, table in logps.items()})
    return step_metrics([], batch, logp, algorithm())


distributions = st.lists(st.integers(1, 6), min_size=5, max_size=5)


@given(distributions, distributions)
def test_entropy_and_both_kls_are_exact_in_expectation(counts, others):
    def log_of(weights):
        return [math.log(w / sum(weights)) for w in weights]

    p, q = log_of(counts), log_of(others)
    kl = sum(math.exp(a) * (a - b) for a, b in zip(p, q))
    assert exact(counts, logp_behave=p)["entropy"] == pytest.approx(-sum(math.exp(a) * a for a in p))
    assert exact(counts, logp_prox=p, logp=q)["kl/prox"] == pytest.approx(kl, abs=1e-12)  # KL(π_prox‖π_θ)
    assert exact(counts, logp=p, logp_ref=q)["kl/ref"] == pytest.approx(kl, abs=1e-12)  # KL(π_θ‖π_ref)
    assert exact(counts, logp_prox=p, logp=q)["ratio/mean"] == pytest.approx(1)  # E_prox[π_θ/π_prox]


# ---- what is there and what is not


GROUPS = [group_of(make(reward=1.0), make((3, 4, 5))), group_of(make(reward=0.5), make((6,)))]


def test_without_logp_prox_the_policy_is_its_own_and_the_ratio_is_one():
    batch, _ = batch_of(GROUPS, 0)
    logp = batch.logp_behave + 0.25
    metrics = step_metrics(GROUPS, replace(batch, logp_prox=None, keep=None), logp, algorithm())
    assert metrics["ratio/mean"] == metrics["ratio/max"] == 1 and metrics["kl/prox"] == metrics["clip"] == 0
    assert metrics["mismatch/mean"] == pytest.approx(0.25)


def test_the_old_policy_is_the_sampler_where_the_algorithm_says_so():
    """And what moved since the step's start is still what kl/prox tells."""
    batch, _ = batch_of(GROUPS, 0)
    batch, logp = replace(batch, logp_prox=batch.logp_behave + 0.25, keep=None), batch.logp_behave + 0.75
    for prox, ratio in (("recompute", math.exp(0.5)), ("behave", math.exp(0.75))):
        metrics = step_metrics(GROUPS, batch, logp, algorithm(prox=prox))
        assert metrics["ratio/mean"] == pytest.approx(ratio) == metrics["ratio/max"]
        assert metrics["kl/prox"] == pytest.approx(math.exp(0.5) - 1.5)
        assert metrics["mismatch/max"] == pytest.approx(0.25)


def test_an_answer_is_clipped_as_a_whole_by_its_mean_advantage():
    """Log-ratios 1, −0.4 with advantages 3, −1: at token level one token on either side, as an answer both above."""
    batch = collate([group_of(make((3, 4)))])
    row = torch.zeros(batch.mask.shape, dtype=torch.float64)
    logp, adv = (row.masked_scatter(batch.mask, torch.tensor(x).double()) for x in ([1.0, -0.4], [3.0, -1.0]))
    batch = replace(batch, logp_prox=row, logp_behave=row, adv=adv)

    def shares(level: str) -> list[float]:
        metrics = step_metrics([], batch, logp, algorithm(ratio_level=level))
        return [metrics[key] for key in ("clip", "clip/low", "clip/high")]

    levels = ("token", "sequence", "sequence-token", "joint")
    assert {level: shares(level) for level in levels} == {
        "token": [1, 0.5, 0.5], "sequence": [1, 0, 1], "sequence-token": [0.5, 0, 0.5], "joint": [1, 0, 1]}  # fmt: skip


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_surrogate_without_a_clip_has_no_share_of_clipped_tokens(name):
    batch, logp = batch_of(GROUPS, 1)
    algo = chosen(name, ALGORITHMS[name].axes, longest=9)
    keys = {key for key in step_metrics(GROUPS, batch, logp, algo) if key.startswith("clip")}
    clips = "eps_low" in READS[ALGORITHMS[name].surrogate]
    assert keys == ({"clip", "clip/low", "clip/high"} if clips else set())


def test_where_π_prox_was_interpolated_nothing_is_said_about_it():
    """In later updates of a step; in the first it is the policy itself."""
    batch, logp = batch_of(GROUPS, 1)
    batch, algo = replace(batch, logp_prox=None, value=None), ALGORITHMS["decoupled_loglinear"]
    one, two = (step_metrics(GROUPS, batch, logp, algo, updates) for updates in (1, 2))
    about = {"ratio/mean", "ratio/max", "clip", "clip/low", "clip/high", "kl/prox", "mismatch/mean", "mismatch/max", "mismatch/kl",
             "correction/mean", "correction/max", "correction/masked"}  # fmt: skip
    assert about <= one.keys() and one == two | {key: one[key] for key in about} and not about & two.keys()


def test_where_π_prox_moved_away_unmeasured_only_what_is_told_by_the_sampler_is_said():
    """With --prox behave the ratio is to the sampler and needs no π_prox; how far that is from either is not known."""
    batch, logp = batch_of(GROUPS, 1)
    batch, algo = replace(batch, value=None), algorithm(prox="behave")
    one, two = (step_metrics(GROUPS, replace(batch, logp_prox=None), logp, algo, updates) for updates in (1, 2))
    about = {"kl/prox", "mismatch/mean", "mismatch/max", "mismatch/kl"}
    assert one == two | {key: one[key] for key in about} and not about & two.keys() and "ratio/max" in two
    assert about <= step_metrics(GROUPS, batch, logp, algo, 2).keys()  # measured


@given(seeds)
def test_explained_is_the_share_of_the_variance_of_returns_that_the_value_takes_away(seed):
    batch, logp = batch_of(GROUPS, seed)
    returns, value = (x[batch.mask].numpy() for x in (batch.returns, batch.value))
    metrics = step_metrics(GROUPS, batch, logp, algorithm())
    assert metrics["value/explained"] == pytest.approx(1 - np.var(returns - value) / np.var(returns), rel=1e-12)
    assert metrics["value/mean"] == pytest.approx(value.mean())
    shifted, twice = replace(batch, value=batch.returns + 7), replace(batch, value=2 * batch.returns)
    assert step_metrics(GROUPS, shifted, logp, algorithm())["value/explained"] == pytest.approx(1)  # a bias is not seen
    assert step_metrics(GROUPS, twice, logp, algorithm())["value/explained"] == pytest.approx(0, abs=1e-12)
    flat = replace(batch, value=torch.zeros_like(batch.value))
    assert step_metrics(GROUPS, flat, logp, algorithm())["value/explained"] == 0  # a critic that says nothing
    equal = replace(batch, returns=torch.ones_like(batch.returns))
    assert "value/explained" not in step_metrics(GROUPS, equal, logp, algorithm())  # nothing to explain
    without = step_metrics(GROUPS, replace(batch, value=None), logp, algorithm())
    assert not [key for key in without if key.startswith("value")]


def test_spread_between_prompts_is_no_spread_within_groups():
    groups = [group_of(make(reward=8.0), make(reward=8.0)), group_of(make(reward=-2.0), make(reward=-2.0))]
    batch, logp = batch_of(groups, 0)
    metrics = step_metrics(groups, batch, logp, algorithm())
    assert metrics["reward/std"] == pytest.approx(math.sqrt(100 / 3))
    assert metrics["reward/group_std"] == 0 and metrics["contrast"] == 0


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_step_without_any_forward_pass_has_no_ratio_and_no_nan(name):
    batch, _ = batch_of(GROUPS, 0)
    algo = chosen(name, ALGORITHMS[name].axes, longest=9)
    metrics = step_metrics(GROUPS, batch, torch.full(batch.mask.shape, NAN), algo)
    assert metrics["trained_rows"] == 0 and not {"ratio/max", "clip", "correction/max", "kl/ref"} & metrics.keys()
    assert all(map(math.isfinite, metrics.values()))


def test_nan_abstains_from_the_mean_and_is_counted():
    means = average([("style", v) for v in (0.5, NAN, NAN, 0.8)])
    assert means == {"style": pytest.approx(0.65), "style/abstained": 2}
    assert average([("style", NAN)]) == {"style/abstained": 1}


def test_what_publishes_took_is_their_mean_and_the_largest_mismatch():
    took = [{**dict.fromkeys(PUBLISH, float(n)), "mismatch": m} for n, m in ((1, 0.5), (4, 0.25))]
    spans = [Span("engine 0", "sync", 0, 1, took[0]), Span("engine 1", "interrupt", 0, 2, took[1]),
             Span("engine 0", "generate", 1, 2, {"rows": 3})]  # fmt: skip
    assert published(spans) == {**{f"sync/{part}": 2.5 for part in PUBLISH}, "sync/mismatch": 0.5}
    assert published(spans[2:]) == {}
    unproven = [Span("engine 0", "sync", 0, 1, {part: 2.0 for part in PUBLISH})]
    assert published(unproven) == {f"sync/{part}": 2.0 for part in PUBLISH}
