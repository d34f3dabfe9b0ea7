"""Losses: value and gradient of each are its equation, nothing off the mask exists, KLs estimate what they say."""

import itertools
import math
from functools import partial

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nanorl import loss
from nanorl.loss import (
    MODES, clipped, correction, importance, kl, log_ratio, loglinear, ratio, reinforce, sapo, second_moment, value_loss,
    weights,
)  # fmt: skip
from tests import oracles

NAN, LIMIT = math.nan, 11  # LIMIT: L of the modes that divide by a constant
LEVELS = ["token", "sequence", "sequence-token", "joint"]
ESTIMATORS = ["k1", "k2", "k3", "k3+"]
DTYPES = [torch.bfloat16, torch.float32, torch.float64]
SURROGATES = {  # name: (ours of (ratio, adv, mask), the oracle's shape)
    "importance": (importance, oracles.importance),
    "clip": (partial(clipped, eps_low=0.2, eps_high=0.2), partial(oracles.clipped, low=0.2, high=0.2)),
    "clip-higher": (partial(clipped, eps_low=0.1, eps_high=0.28), partial(oracles.clipped, low=0.1, high=0.28)),
    "gspo's clip": (partial(clipped, eps_low=3e-4, eps_high=4e-4), partial(oracles.clipped, low=3e-4, high=4e-4)),
    "dual clip": (partial(clipped, eps_low=0.2, eps_high=0.28, dual_clip=3.0),
                  partial(oracles.clipped, low=0.2, high=0.28, dual=3.0)),
    "sapo": (partial(sapo, tau_pos=1.0, tau_neg=1.05), partial(oracles.sapo, tau_pos=1.0, tau_neg=1.05)),
    "sapo, far apart": (partial(sapo, tau_pos=0.3, tau_neg=5.0), partial(oracles.sapo, tau_pos=0.3, tau_neg=5.0)),
}  # fmt: skip
LOSSES = {  # every loss as a function of (logp, old, adv, mask); old and adv stand for V_old and R in the critic's
    **{f"{name}, {level}": lambda x, old, adv, mask, f=f, level=level: f(ratio(x, old, mask, level), adv, mask)
       for (name, (f, _)), level in itertools.product(SURROGATES.items(), LEVELS)},
    "reinforce": lambda x, old, adv, mask: reinforce(x, adv, mask),
    **{k: lambda x, old, adv, mask, k=k: kl(x, old, mask, k) for k in ESTIMATORS},
    "rk3": lambda x, old, adv, mask: ratio(x, old, mask) * kl(x, adv, mask),
    "decoupled": lambda x, old, adv, mask: (correction(old, adv, mask, "truncate", "token", 0.0, 5.0)
                                            * clipped(ratio(x, old, mask), adv, mask, 0.2, 0.2)),
    "value": lambda x, old, adv, mask: value_loss(x, old, adv, mask),
    "value, clipped": lambda x, old, adv, mask: value_loss(x, old, adv, mask, clip=0.2137),
    "value, clipped, huber": lambda x, old, adv, mask: value_loss(x, old, adv, mask, clip=0.2137, huber=0.7),
}  # fmt: skip
COEFFICIENTS = {  # what multiplies a loss and has no gradient, as a function of (logp, old, adv, mask)
    **{f"{kind}, {level}": lambda x, old, adv, mask, k=kind, level=level: correction(x, old, mask, k, level, 0.5, 5.0)
       for kind, level in itertools.product(("truncate", "mask"), ("token", "sequence", "joint"))},
    "second moment": lambda x, old, adv, mask: second_moment(log_ratio(x, old, mask).detach(), adv, mask, 0.04) * 1.0,
    "loglinear": lambda x, old, adv, mask: loglinear(x, old, mask, torch.ones(x.shape, dtype=torch.int64), 0.5),
}  # fmt: skip


def values(x, dtype=torch.float64):
    return torch.tensor(x, dtype=dtype)


def slope(per_token, logp):
    """∂(Σ per_token)/∂logp."""
    return torch.autograd.grad(per_token.sum(), logp)[0]


def both(name, logp, *rest):
    """Value and slope of a loss."""
    leaf = logp.clone().requires_grad_()
    per_token = LOSSES[name](leaf, *rest)
    return per_token.detach(), slope(per_token, leaf)


def close(got, wanted, tolerance=1e-10):
    wanted = wanted if isinstance(wanted, torch.Tensor) else values(wanted)
    torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)


@st.composite
def batches(draw, most=4):
    """(logp, old, adv, mask): rows of tokens with gaps, some log-ratios beyond the bound, some rows without a token."""
    b, t = draw(st.integers(1, 3)), draw(st.integers(1, most))
    logp = st.floats(-4, 0) | st.just(-60.0)
    columns = (logp, st.floats(-4, 0), st.floats(-3, 3), st.booleans())
    x = [draw(st.lists(st.lists(c, min_size=t, max_size=t), min_size=b, max_size=b)) for c in columns]
    return values(x[0]), values(x[1]), values(x[2]), torch.tensor(x[3])


def slowly(equation, mask, *columns):
    """The oracle of one token at each token of the mask: values and slopes [B, T]; 0 off the mask."""
    pairs = [[equation(*(c[i][t].item() for c in columns)) if m else (0.0, 0.0) for t, m in enumerate(row)]
             for i, row in enumerate(mask.tolist())]  # fmt: skip
    return tuple(values([[pair[k] for pair in row] for row in pairs]) for k in (0, 1))


def row_by_row(oracle, *columns):
    """The oracle of a row at each row; the columns are [B, T]."""
    return [oracle(*row) for row in zip(*(c.tolist() for c in columns))]


# ---- oracles: value, and gradient by autograd


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", SURROGATES)
@settings(max_examples=25)
@given(batches())
def test_every_surrogate_at_every_level_is_its_equation_in_value_and_gradient(name, level, batch):
    rows = row_by_row(partial(oracles.surrogate, SURROGATES[name][1], level), *batch)
    for got, wanted in zip(both(f"{name}, {level}", *batch), zip(*rows)):
        close(got, list(wanted))


@pytest.mark.parametrize("level", LEVELS)
@settings(max_examples=25)
@given(batches())
def test_the_ratio_is_its_equation_in_value_and_gradient(level, batch):
    """As −importance of an advantage of 1: value r, slope r where a token has its own; 1 off the mask."""
    logp, old, _, mask = batch
    rows = row_by_row(partial(oracles.surrogate, oracles.importance, level), logp, old, -torch.ones_like(old), mask)
    leaf = logp.clone().requires_grad_()
    got = ratio(leaf, old, mask, level)
    close(got.detach(), values([v for v, _ in rows]).where(mask, 1.0))
    close(slope(got, leaf), [s for _, s in rows])


@given(batches())
def test_every_other_loss_is_its_equation_in_value_and_gradient(batch):
    logp, old, adv, mask = batch
    equations = {
        "reinforce": slowly(oracles.reinforce, mask, logp, adv),
        **{k: slowly(partial(oracles.kl, estimator=k), mask, logp, old) for k in ESTIMATORS},
        "value": slowly(partial(oracles.value_loss, clip=None, huber=math.inf), mask, logp, old, adv),
        "value, clipped": slowly(partial(oracles.value_loss, clip=0.2137, huber=math.inf), mask, logp, old, adv),
        "value, clipped, huber": slowly(partial(oracles.value_loss, clip=0.2137, huber=0.7), mask, logp, old, adv),
    }
    for name, wanted in equations.items():
        for got, value in zip(both(name, *batch), wanted):
            close(got, value)


@pytest.mark.parametrize("level", ["token", "sequence", "joint"])
@pytest.mark.parametrize("kind", ["truncate", "mask"])
@settings(max_examples=25)
@given(batches(), st.sampled_from([(0.0, math.inf), (0.0, 2.0), (0.5, 5.0), (0.9, 1.1)]))
def test_the_correction_is_its_equation_and_has_no_gradient(kind, level, batch, bounds):
    prox, behave, _, mask = batch
    got = correction(prox.clone().requires_grad_(), behave, mask, kind, level, *bounds)
    rows = zip(prox.tolist(), behave.tolist(), mask.tolist())
    close(got, [oracles.correction(*row, kind, level, *bounds) for row in rows])
    assert not got.requires_grad


NOT_DETACHED = [name for name in LOSSES if not name.endswith(("sequence-token", "k3+"))]


@pytest.mark.parametrize("name", NOT_DETACHED)
def test_the_gradient_is_the_slope_of_the_value(name):
    """Central differences, at tokens that stand away from a kink, where nothing is detached."""
    logp, old = values([[-1.0, -2.0, -0.5, -1.5], [-1.1, -1.0, -0.9, -0.7]]), values([[-1.1, -1.2, -1.3, -1.45]] * 2)
    adv, mask = values([[1.0, -2.0, 0.5, -0.3], [-0.4, 0.3, 0.7, 0.9]]), torch.tensor([[1, 1, 1, 1], [1, 0, 1, 1]]) > 0
    f = partial(LOSSES[name], old=old, adv=adv, mask=mask)
    assert torch.autograd.gradcheck(f, logp.requires_grad_(), eps=1e-6, rtol=1e-6)


# ---- the clip


def omega(r, adv, **clip):
    """The gradient weight of one token: ∂loss/∂log π = −ω·Â."""
    leaf = values([[math.log(r)]]).requires_grad_()
    one, mask = values([[float(adv)]]), torch.tensor([[True]])
    return -float(slope(clipped(ratio(leaf, values([[0.0]]), mask), one, mask, **clip), leaf)) / adv


BELOW, ABOVE = 1 - 1e-9, 1 + 1e-9
TABLE = [  # (factor of a bound, of which bound, does Â > 0 move the token, does Â < 0); c the dual clip
    (0.01, "low", True, False), (0.6, "low", True, False), (BELOW, "low", True, False), (ABOVE, "low", True, True),
    (1.25, "low", True, True), (BELOW, "high", True, True), (ABOVE, "high", False, True), (1.5, "high", False, True),
    (BELOW, "dual", False, True), (ABOVE, "dual", False, False), (9.0, "dual", False, False),
]  # fmt: skip


@pytest.mark.parametrize("low, high", [(0.2, 0.2), (0.2, 0.28), (3e-4, 4e-4)])
def test_the_clip_flattens_what_goes_too_far_and_nothing_else(low, high):
    """ω in all cells, sign of Â × region of r, and on both sides of each kink; without the dual clip as with it."""
    bounds = {"low": 1 - low, "high": 1 + high, "dual": 3.0}
    for factor, bound, better, worse in TABLE:
        r = factor * bounds[bound]
        if bound == "low" and r > 1 + high:
            continue  # a narrow clip: 1.25 of its lower bound is not within
        for sign, size in itertools.product((1, -1), (0.1, 1.0, 7.0)):
            moves = better if sign > 0 else worse
            got = omega(r, sign * size, eps_low=low, eps_high=high, dual_clip=3.0)
            assert got == pytest.approx(r if moves else 0.0, abs=1e-12), (r, sign * size)
            moves = moves or (bound == "dual" and sign < 0)
            got = omega(r, sign * size, eps_low=low, eps_high=high)
            assert got == pytest.approx(r if moves else 0.0, abs=1e-12), (r, sign * size)


@pytest.mark.parametrize("adv, bound", [(1.0, 1.28), (-1.0, 0.8), (-1.0, 3.0)])
def test_at_the_kink_the_gradient_is_between_its_two_sides(adv, bound):
    assert -1e-12 <= omega(bound, adv, eps_low=0.2, eps_high=0.28, dual_clip=3.0) <= bound + 1e-12


@pytest.mark.parametrize("name", SURROGATES)
@settings(max_examples=20)
@given(batches())
def test_on_policy_every_surrogate_is_the_policy_gradient(name, batch):
    """r = 1: ω = 1 at each token, so the slope is REINFORCE's; an answer's ratio gives each the row's mean, or sum."""
    logp, _, adv, mask = batch
    f, _ = SURROGATES[name]
    plain = slope(reinforce(leaf := logp.clone().requires_grad_(), adv, mask), leaf)
    shares = {"token": plain, "sequence-token": plain, "joint": plain.sum(1, keepdim=True).where(mask, 0.0)}
    shares["sequence"] = shares["joint"] / mask.sum(1, keepdim=True).clamp(min=1)
    for level in LEVELS:
        leaf = logp.clone().requires_grad_()
        per_token = f(ratio(leaf, logp, mask, level), adv, mask)
        close(slope(per_token, leaf), shares[level], 1e-13)
        if name.startswith("sapo"):
            continue  # its value has an offset that no gradient sees
        close(per_token.detach(), -adv.where(mask, 0.0), 1e-13)


@given(batches(), st.floats(0, 0.9))
def test_on_policy_even_a_clip_of_no_width_is_reinforce(batch, low):
    logp, _, adv, mask = batch
    leaf = logp.clone().requires_grad_()
    got = slope(clipped(ratio(leaf, logp, mask), adv, mask, low, 0.0), leaf)
    close(got, -adv.where(mask, 0.0), 1e-14)


@given(batches(), st.floats(0, 0.9), st.floats(0, 3))
def test_the_surrogate_never_promises_more_than_the_ratio(batch, low, high):
    """A lower bound: loss ≥ −r·Â, with equality where the clip does not act; the dual clip gives it up where Â < 0."""
    logp, old, adv, mask = batch
    r = ratio(logp, old, mask)
    plain, single = importance(r, adv, mask), clipped(r, adv, mask, low, high)
    assert bool((single >= plain - 1e-12 * plain.abs()).all())
    assert bool((clipped(r, adv, mask, low, high, dual_clip=1.1 + high) <= single).all())


# ---- limits and reductions


def same_loss(got, wanted, logp, tolerance=1e-12):
    """Two functions of log π have the same value and the same slope."""
    results = []
    for f in (got, wanted):
        leaf = logp.clone().requires_grad_()
        per_token = f(leaf)
        results += [per_token.detach(), slope(per_token, leaf)]
    close(results[0], results[2], tolerance)
    close(results[1], results[3], tolerance)


@given(batches())
def test_limits_of_the_clips(batch):
    """ε → ∞: `importance`; c → ∞: the clip; INTELLECT-2's −min(min(r, δ)·Â, clip(r)·Â) is the dual clip with c = δ."""
    logp, old, adv, mask = batch
    of = partial(ratio, logp_old=old, mask=mask)
    bounds = dict(adv=adv, mask=mask, eps_low=0.2, eps_high=0.28)
    same_loss(lambda x: clipped(of(x), adv, mask, 1.0, math.inf), lambda x: importance(of(x), adv, mask), logp)
    same_loss(lambda x: clipped(of(x), **bounds, dual_clip=1e12), lambda x: clipped(of(x), **bounds), logp)

    def delta_clip(x):
        r = of(x)
        return -(r.clamp(max=4.0) * adv).minimum(r.clamp(0.8, 1.28) * adv).where(mask, 0.0)

    same_loss(lambda x: clipped(of(x), **bounds, dual_clip=4.0), delta_clip, logp)


@given(batches())
def test_as_tau_vanishes_sapo_is_the_importance_weight(batch):
    """(4/τ)·σ(τ(r−1)) = 2/τ + (r−1) + O(τ²): in value up to a constant, in gradient as it is."""
    logp, old, adv, mask = batch
    near = ((logp - old).abs() < 5) & mask
    tau = 1e-4
    same_loss(lambda x: sapo(ratio(x, old, near), adv, near, tau, tau) + (2 / tau - 1) * adv.where(near, 0.0),
              lambda x: importance(ratio(x, old, near), adv, near), logp, 2e-2)  # fmt: skip
    inside = ((logp - old) < 1) & near  # r < e, where the next term is below τ²·r³
    same_loss(lambda x: sapo(ratio(x, old, inside), adv, inside, tau, tau) + (2 / tau - 1) * adv.where(inside, 0.0),
              lambda x: importance(ratio(x, old, inside), adv, inside), logp, 1e-6)  # fmt: skip


@pytest.mark.parametrize("name", SURROGATES)
@settings(max_examples=20)
@given(batches(most=1))
def test_for_answers_of_one_token_all_levels_are_one(name, batch):
    logp, old, adv, mask = batch
    old = old.where((logp - old).abs() < 20, logp)  # GSPO-token has a slope beyond the bound
    for level in LEVELS[1:]:
        same_loss(partial(LOSSES[f"{name}, {level}"], old=old, adv=adv, mask=mask),
                  partial(LOSSES[f"{name}, token"], old=old, adv=adv, mask=mask), logp)  # fmt: skip


@pytest.mark.parametrize("name", SURROGATES)
@settings(max_examples=20)
@given(batches())
def test_with_one_advantage_a_row_gspo_and_gspo_token_are_one(name, batch):
    """Weighed as a mean over answers of token means: the same loss and gradient, alike at all tokens of the answer."""
    logp, old, adv, mask = batch
    old = old.where((logp - old).abs() < 20, logp)
    adv = adv[:, :1].expand(adv.shape)
    weight = weights("seq-mean-token-mean", mask.double(), torch.arange(len(mask)), LIMIT)
    of = {level: partial(LOSSES[f"{name}, {level}"], old=old, adv=adv, mask=mask) for level in LEVELS}
    same_loss(lambda x: (weight * of["sequence"](x)).sum(), lambda x: (weight * of["sequence-token"](x)).sum(), logp)
    pull = slope(of["sequence"](leaf := logp.clone().requires_grad_()), leaf)
    for row, sampled in zip(pull, mask):
        assert len({round(x, 12) for x in row[sampled].tolist()}) <= 1


@given(batches())
def test_the_sequence_ratio_is_the_nth_root_of_the_joint_one(batch):
    logp, old, _, mask = batch
    old = old.where((logp - old).abs() < 5, logp)
    n = mask.sum(1, keepdim=True).clamp(min=1)
    close(ratio(logp, old, mask, "sequence").pow(n), ratio(logp, old, mask, "joint"), 1e-12)
    close(ratio(logp, old, mask, "sequence-token"), ratio(logp, old, mask, "sequence"), 1e-14)


def test_an_unknown_level_is_refused():
    with pytest.raises(ValueError, match="'word'.*token, sequence, sequence-token, joint"):
        ratio(values([[0.0]]), values([[0.0]]), torch.tensor([[True]]), "word")


# ---- samples of another policy


def coefficient(rho, kind, low, high):
    """The correction of one token with this ρ."""
    prox = values([[math.log(rho)]])
    return float(correction(prox, torch.zeros_like(prox), torch.tensor([[True]]), kind, "token", low, high))


def test_the_bounds_of_the_correction_are_those_of_pi_prox_over_mu_and_inclusive():
    """0.65 and 1.3 are within [0.6, 1.4], 1.6 is not; the inverse ratio would have it the other way round."""
    for rho, truncated, masked in [(0.3, 0.6, 0), (0.65, 0.65, 0.65), (1.3, 1.3, 1.3), (1.6, 1.4, 0), (100.0, 1.4, 0)]:
        assert coefficient(rho, "truncate", 0.6, 1.4) == pytest.approx(truncated, rel=1e-12)
        assert coefficient(rho, "mask", 0.6, 1.4) == pytest.approx(masked, rel=1e-12)
    for rho in (0.7, 1.3):  # exactly at a bound, and one bit beyond it
        there = coefficient(rho, "mask", 0.0, math.inf)
        assert coefficient(rho, "mask", there, math.inf) == there == coefficient(rho, "mask", 0.0, there)
        assert coefficient(rho, "mask", math.nextafter(there, 9), math.inf) == 0
        assert coefficient(rho, "mask", 0.0, math.nextafter(there, 0)) == 0


@pytest.mark.parametrize("kind, level", itertools.product(["truncate", "mask"], ["token", "sequence", "joint"]))
@given(batches())
def test_no_coefficient_passes_its_bounds(kind, level, batch):
    """Whatever is tested is what is used: no token of ρ = 100 in an answer whose mean is 1 keeps its 100."""
    prox, behave, _, mask = batch
    rho = correction(prox, behave, mask, kind, level, 0.5, 2.0)
    assert bool((rho <= 2.0).all()) and bool(((rho >= 0.5) | ((rho == 0) & (kind == "mask"))).all())
    assert bool((rho[~mask] == 1).all())


@given(batches())
def test_decoupled_from_the_policy_that_sampled_the_objective_is_the_plain_one(batch):
    """π_prox = μ: ρ = 1 at every level; and any ρ times the surrogate has ω = ρ·r."""
    logp, behave, adv, mask = batch
    for kind, level in itertools.product(("truncate", "mask"), ("token", "sequence", "joint")):
        assert bool((correction(behave, behave, mask, kind, level, 0.9, 1.1) == 1).all())
    prox = logp.where((logp - behave).abs() < 20, behave)  # on-policy now, sampled by another
    leaf = prox.clone().requires_grad_()
    rho = correction(leaf, behave, mask, "truncate")
    per_token = rho * clipped(ratio(leaf, prox, mask), adv, mask, 0.2, 0.2)
    close(slope(per_token, leaf), -(prox - behave).exp().where(mask, 0.0) * adv)


TREE = list(itertools.product(range(3), repeat=2))  # every answer of two tokens out of three
WORTH = values([0.3, -1.0, 2.0, 0.5, 0.0, 1.5, -0.7, 0.1, 4.0])


def tree_logp(first, second):
    """[9, 2] The log-probs of every answer's tokens: logits of the first, and of the second after each first."""
    a, b = first.log_softmax(0), second.log_softmax(1)
    return torch.stack([torch.stack([a[i], b[i, j]]) for i, j in TREE])


def policy(seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in ((3,), (3, 3))]


@pytest.mark.parametrize("seed", range(3))
def test_the_joint_correction_makes_other_samples_mean_what_ones_own_would(seed):
    """E_μ[ρ·f] = E_π[f], and the decoupled gradient is ∇E_π[R]: by enumeration. Squared, or by token, it is neither."""
    theta, mu, mask = policy(seed), tree_logp(*policy(seed + 50)).detach(), torch.ones(9, 2, dtype=torch.bool)
    logp = tree_logp(*theta)
    here, there = logp.sum(1).exp(), mu.sum(1).exp()
    wanted = (here * WORTH).sum()  # E_π[R]
    rho = correction(logp, mu, mask, "truncate", "joint")
    close((there * rho[:, 0] * WORTH).sum(), wanted.detach(), 1e-12)
    per_token = rho * importance(ratio(logp, logp.detach(), mask), WORTH[:, None].expand(9, 2), mask)
    got = torch.autograd.grad((there[:, None] * per_token).sum(), theta, retain_graph=True)
    for g, w in zip(got, torch.autograd.grad(-wanted, theta, retain_graph=True)):
        close(g, w, 1e-12)
    for wrong in (rho.square()[:, 0], correction(logp, mu, mask, "truncate", "token")[:, 1]):
        assert float(((there * wrong * WORTH).sum() - wanted).detach().abs()) > 1e-2


def test_an_unknown_correction_is_refused():
    one = values([[0.0]]), values([[0.0]]), torch.tensor([[True]])
    with pytest.raises(ValueError, match="'clip'.*truncate, mask"):
        correction(*one, "clip")
    with pytest.raises(ValueError, match="'word'"):
        correction(*one, "mask", "word")


grid = st.integers(-12, 12).map(lambda k: k / 8)  # sums of their squares are exact, and ties are common
moments = st.integers(1, 4).flatmap(lambda t: st.lists(
    st.lists(st.tuples(grid, st.sampled_from([-1.0, 0.0, 0.5, 2.0]), st.booleans()), min_size=t, max_size=t),
    min_size=1, max_size=3))  # fmt: skip


@given(moments, st.sampled_from([0.04, 0.25, 0.5, 1.0, 1e9]))
def test_the_second_moment_drops_as_a_greedy_loop_does(rows, threshold):
    """Which of equals goes is nobody's matter: compared is what is kept by size, and by token where sizes differ."""
    log_rho, adv, mask = (torch.tensor([[token[k] for token in row] for row in rows]) for k in range(3))
    log_rho, adv = log_rho.double(), adv.double()
    got = second_moment(log_rho, adv, mask, threshold)
    wanted = torch.tensor(oracles.second_moment(log_rho.tolist(), adv.tolist(), mask.tolist(), threshold))
    assert log_rho[got].abs().sort().values.tolist() == log_rho[wanted].abs().sort().values.tolist()
    harmful = mask & (adv * log_rho > 0)
    assert torch.equal(got & ~harmful, mask & ~harmful)  # only what has already moved its way may go
    sizes = log_rho[harmful].abs().tolist()
    if len(set(sizes)) == len(sizes):
        assert torch.equal(got, wanted)


def test_the_second_moment_in_numbers():
    """A mean of the threshold is not below it. A token that is pushed back stays, however far; none to drop, or all."""
    log_rho, mask = values([[0.1, -0.2, 0.3, -3.0, NAN]]), torch.tensor([[True] * 4 + [False]])
    adv = values([[1.0, -1.0, 1.0, 1.0, NAN]])
    for threshold, wanted in [(1e-9, [0, 0, 0, 1]), (0.02, [1, 0, 0, 1]), (0.04, [1, 1, 0, 1]), (0.05, [1, 1, 1, 1])]:
        assert second_moment(log_rho, adv, mask, threshold).tolist() == [[bool(x) for x in wanted] + [False]]
    two = values([[0.25, 0.25, 0.25]])  # mean 0.0625, exactly
    every = torch.ones(1, 3, dtype=torch.bool)
    assert not second_moment(two, two, every, 0.0625).any() and second_moment(two, two, every, 0.0626).all()
    assert second_moment(two, -two, every, 1e-9).all() and second_moment(two, 0 * two, every, 1e-9).all()


@given(batches(), st.lists(st.integers(0, 5), min_size=12, max_size=12), st.sampled_from([0.0, 0.25, 0.5, 0.9]))
def test_loglinear_is_its_line(batch, lags, done):
    logp, behave, _, mask = batch
    logp = logp.where((logp - behave).abs() < 20, behave)
    lag = torch.tensor(lags)[: mask.numel()].reshape(mask.shape)
    got = loglinear(logp.clone().requires_grad_(), behave, mask, lag, done)
    wanted = [[oracles.loglinear(a.item(), b.item(), c.item(), done) if m else 0.0 for a, b, c, m in zip(*row)]
              for row in zip(logp, behave, lag, mask)]  # fmt: skip
    close(got, wanted)
    assert not got.requires_grad


def test_loglinear_is_exact_where_log_probs_move_evenly():
    """log π at version u is a + b·u, the trainer's is v. At the step's start π_prox is π_θ; of a fresh token, μ."""
    a, b, lag, v, done = values([[-1.0, -2.0, -0.5]]), values([[0.3, -0.2, 0.1]]), values([[1.0, 3.0, 0.0]]), 7, 0.75
    mask = torch.ones(1, 3, dtype=torch.bool)
    behave, logp = a + b * (v - lag), a + b * (v + done)
    close(loglinear(logp, behave, mask, lag, done), a + b * v, 1e-12)
    close(loglinear(logp, behave, mask, lag, 0.0), logp, 1e-12)
    close(loglinear(logp, behave, mask, 0 * lag, done), behave, 1e-12)


# ---- KL, by enumeration of distributions over three to five tokens

PAIRS = [  # logits of π and of π_ref
    ([0.5, -1.0, 2.0, 0.0], [0.0, 0.3, 1.0, -0.7]), ([0.0, 0.0, 0.0], [1.0, 0.0, -1.0]),
    ([3.0, -2.0, 0.1, 0.2, 1.0], [-1.0, 1.0, 0.5, 0.0, 0.7]),
]  # fmt: skip


def exact(logp, logq):
    """KL(p‖q) = Σ p·(log p − log q)."""
    return (logp.exp() * (logp - logq)).sum()


def expected(theta, ref, estimator, sampler=None, level="token"):
    """E of the estimator's value and of its gradient in the logits: the sampler (without one π) weighs the tokens."""
    logp, logq = theta.log_softmax(0)[None], ref.log_softmax(0)[None]
    mu = logp.detach() if sampler is None else sampler.log_softmax(0)[None]
    mask = torch.ones(logp.shape, dtype=torch.bool)
    if estimator == "rk3":
        per_token = ratio(logp, mu, mask, level) * kl(logp, logq, mask, "k3")
    else:
        per_token = kl(logp, logq, mask, estimator)
    mean = (mu.exp() * per_token).sum()
    return mean.detach(), torch.autograd.grad(mean, theta)[0]


def both_kls(theta, ref):
    """∇KL(π‖ref) and ∇KL(ref‖π)."""
    logp, logq = theta.log_softmax(0), ref.log_softmax(0)
    ours = torch.autograd.grad(exact(logp, logq), theta, retain_graph=True)[0]
    other = torch.autograd.grad(exact(logq, logp), theta)[0]
    assert float((ours - other).norm()) > 0.05  # so a test tells them apart
    return ours, other


@pytest.mark.parametrize("logits, reference", PAIRS)
def test_k1_and_k3_are_unbiased_for_the_kl_and_k2_is_not(logits, reference):
    theta, ref = values(logits).requires_grad_(), values(reference)
    wanted = exact(theta.log_softmax(0), ref.log_softmax(0)).detach()
    assert float(wanted) > 0.1
    for estimator in ("k1", "k3", "k3+", "rk3"):
        close(expected(theta, ref, estimator)[0], wanted, 1e-12)
    assert abs(float(expected(theta, ref, "k2")[0] - wanted)) > 1e-3


@pytest.mark.parametrize("logits, reference", PAIRS)
def test_what_the_gradient_of_each_kl_in_the_loss_descends(logits, reference):
    """E∇k1 = 0 (the trap), E∇k2 = E∇k3+ = E∇(r·k3) = ∇KL(π‖ref), E∇k3 = ∇KL(ref‖π), the other direction."""
    theta, ref = values(logits).requires_grad_(), values(reference)
    ours, other = both_kls(theta, ref)
    for estimator, wanted in {"k1": 0 * ours, "k2": ours, "k3+": ours, "rk3": ours, "k3": other}.items():
        close(expected(theta, ref, estimator)[1], wanted, 1e-12)


@pytest.mark.parametrize("logits, reference", PAIRS)
def test_off_policy_only_the_ratio_times_k3_stays_right(logits, reference):
    """Samples of μ: E_μ[r·k3] = KL(π‖ref), in value and gradient; k2 weighs the tokens by μ."""
    theta, ref = values(logits).requires_grad_(), values(reference)
    mu = values([0.5, -0.5, 0.3, 0.0, -1.0][: len(logits)])
    ours, _ = both_kls(theta, ref)
    value, gradient = expected(theta, ref, "rk3", mu)
    close(value, exact(theta.log_softmax(0), ref.log_softmax(0)).detach(), 1e-12)
    close(gradient, ours, 1e-12)
    for estimator in ("k2", "k3+"):
        assert float((expected(theta, ref, estimator, mu)[1] - ours).norm()) > 0.05
    assert float((expected(theta, ref, "rk3", mu, "sequence")[1] - ours).norm()) > 0.05  # token level alone


@pytest.mark.parametrize("logits, reference", PAIRS)
def test_what_the_gradient_of_each_kl_in_the_reward_descends(logits, reference):
    """−k in the reward has E[k·∇log π]: ∇KL(π‖ref) for k1; less ∇KL(ref‖π) for k3, a trap; neither for k2."""
    theta, ref = values(logits).requires_grad_(), values(reference)
    ours, other = both_kls(theta, ref)
    logp, logq = theta.log_softmax(0)[None], ref.log_softmax(0)[None]
    mask, got = torch.ones(logp.shape, dtype=torch.bool), {}
    for estimator in ("k1", "k2", "k3"):
        per_token = reinforce(logp, -kl(logp, logq, mask, estimator).detach(), mask)
        got[estimator] = torch.autograd.grad((logp.detach().exp() * per_token).sum(), theta, retain_graph=True)[0]
    close(got["k1"], ours, 1e-12)
    close(got["k3"], ours - other, 1e-12)
    assert float((got["k3"] - ours).norm()) > 0.05 and float((got["k2"] - ours).norm()) > 0.05


@given(batches())
def test_k2_and_k3_are_never_negative_and_zero_only_where_the_policies_agree(batch):
    logp, ref, _, _ = batch
    mask = torch.ones(logp.shape, dtype=torch.bool)
    apart = (logp - ref).abs() > 1e-6
    for estimator in ("k2", "k3", "k3+"):
        assert bool((kl(logp, ref, mask, estimator) >= 0).all())
        assert torch.equal(kl(logp, ref, mask, estimator)[apart] > 0, apart[apart])
        assert float(kl(logp, logp, mask, estimator).abs().max()) == 0


def test_k3_keeps_its_digits_where_the_policies_nearly_agree():
    """k3 = d²/2 − d³/6 + …; in float32, exp(−d) − 1 + d is all rounding at d = 1e-4, expm1 is not."""
    d = torch.tensor([[1e-4, -1e-4, 1e-3]])
    wanted = d.double().square() / 2 - d.double() ** 3 / 6
    got = kl(d, torch.zeros_like(d), torch.ones_like(d).bool(), "k3")
    torch.testing.assert_close(got.double(), wanted, rtol=5e-3, atol=0)


def test_an_unknown_estimator_is_refused():
    with pytest.raises(ValueError, match="k4.*k1, k2, k3, k3\\+"):
        kl(values([[0.0]]), values([[0.0]]), torch.tensor([[True]]), "k4")


# ---- the critic


def critics_pull(value, old, target, **settings):
    """∂loss/∂V of one token."""
    leaf = values([[value]]).requires_grad_()
    return float(slope(value_loss(leaf, values([[old]]), values([[target]]), torch.tensor([[True]]), **settings), leaf))


def test_the_value_clip_stops_what_has_moved_towards_the_return_and_nothing_else():
    """V_old = 0, ε = 0.5, R = 2 or −2: towards it the pull ends at ±0.5, away from it it stays V − R."""
    near = (-0.5 - 1e-9, -0.5 + 1e-9, 0.5 - 1e-9, 0.5 + 1e-9)
    for value, target in itertools.product((-3.0, *near, 0.0, 1.0), (2.0, -2.0)):
        stopped = abs(value) > 0.5 and value * target > 0 and abs(value - target) < 1.5
        wanted = 0.0 if stopped else value - target
        assert critics_pull(value, 0.0, target, clip=0.5) == pytest.approx(wanted, abs=1e-12), (value, target)
        assert critics_pull(value, 0.0, target) == pytest.approx(value - target, abs=1e-12)
    assert critics_pull(0.5 + 1e-9, 0.0, 2.0, clip=0.5) == 0 > critics_pull(0.5 - 1e-9, 0.0, 2.0, clip=0.5)


def test_hubers_pull_is_the_error_held_within_delta():
    for error in (-9.0, -0.7 - 1e-9, -0.7, -0.7 + 1e-9, -0.1, 0.0, 0.3, 0.7, 0.7 + 1e-9, 50.0):
        wanted = max(-0.7, min(0.7, error))
        assert critics_pull(2.0 + error, 0.0, 2.0, huber=0.7) == pytest.approx(wanted, abs=1e-12)


@given(batches())
def test_limits_of_the_value_loss(batch):
    """huber → ∞ is ½ error²; clip → ∞ is no clip; and a clip never makes the critic look better."""
    value, old, target, mask = batch
    squared = ((value - target).square() / 2).where(mask, 0.0)
    close(value_loss(value, old, target, mask), squared, 1e-14)
    same_loss(lambda v: value_loss(v, old, target, mask, huber=1e6), lambda v: value_loss(v, old, target, mask), value)
    same_loss(lambda v: value_loss(v, old, target, mask, clip=1e6), lambda v: value_loss(v, old, target, mask), value)
    assert bool((value_loss(value, old, target, mask, clip=0.3) >= squared - 1e-12).all())


# ---- what must never reach a gradient


@pytest.mark.parametrize("garbage", [NAN, math.inf, -math.inf, 1e30])
@pytest.mark.parametrize("name", [*LOSSES, *COEFFICIENTS])
def test_nothing_off_the_mask_reaches_value_or_gradient(name, garbage):
    mask = torch.tensor([[False, True, False, True]])
    clean = values([[0.0, -1.0, 0.0, -2.0]]), values([[0.0, -1.1, 0.0, -1.95]]), values([[0.0, 0.5, 0.0, -0.9]])
    results = []
    for inputs in (clean, [x.where(mask, garbage) for x in clean]):
        if name in LOSSES:
            results.append(both(name, *inputs, mask))
        else:
            results.append((COEFFICIENTS[name](*inputs, mask),))
    for wanted, got in zip(*results):
        assert torch.equal(wanted, got)
    if name in LOSSES:
        assert all(got[~mask].tolist() == [0.0, 0.0] for got in results[1])
        flat = name.startswith("gspo's clip, token") or name == "value, clipped, huber"
        assert flat or bool(results[1][1][mask].ne(0).any())


@pytest.mark.parametrize("name", SURROGATES)
def test_a_surrogate_looks_at_no_ratio_off_the_mask(name):
    f, _ = SURROGATES[name]
    mask, adv = torch.tensor([[True, False, True]]), values([[1.0, NAN, -1.0]])
    for garbage in (NAN, math.inf, 0.0):
        r = values([[1.01, garbage, 0.99]]).requires_grad_()
        per_token = f(r, adv, mask)
        assert float(per_token.detach()[0, 1]) == float(slope(per_token, r)[0, 1]) == 0
        assert bool(per_token[mask].ne(0).all())


FAR = list(itertools.product([-1.0, -81.0, -201.0, -1000.0], [-1.0, -81.0, -201.0, -1000.0], [-2.0, 0.0, 2.0]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [*LOSSES, *COEFFICIENTS])
def test_whatever_comes_in_what_comes_out_is_finite(name, dtype):
    """Log-ratios of ±80, ±200 and more, a row without a token, one row, no row: no exp overflows, nor its slope."""
    f = (LOSSES | COEFFICIENTS)[name]
    logp, old, adv = (values(x, dtype).reshape(4, 12) for x in zip(*FAR))
    mask = torch.ones(4, 12, dtype=torch.bool)
    mask[2] = False
    for rows in (slice(None), slice(2, 3), slice(0, 1), slice(0, 0)):
        leaf = logp[rows].clone().requires_grad_()
        per_token = f(leaf, old[rows], adv[rows], mask[rows])
        assert per_token.dtype == (dtype if name != "second moment" else torch.float32)
        assert per_token.shape == leaf.shape
        assert bool(per_token.isfinite().all())
        if name in LOSSES:
            assert bool(slope(per_token, leaf).isfinite().all())


def test_the_log_ratio_is_exact_within_its_bound_and_flat_beyond():
    logp, old = values([[-1.0, -30.0, 0.0, -3.0]]).requires_grad_(), values([[-2.5, -1.0, -99.0, NAN]])
    mask = torch.tensor([[True, True, True, False]])
    got = log_ratio(logp, old, mask)
    assert got.tolist() == [[1.5, -20.0, 20.0, 0.0]] and slope(got, logp).tolist() == [[1.0, 0.0, 0.0, 0.0]]
    assert log_ratio(logp, old, mask, bound=1.0).tolist() == [[1.0, -1.0, 1.0, 0.0]]


@pytest.mark.parametrize("name", LOSSES)
def test_bfloat16_agrees_with_float64_to_its_precision(name):
    logp, old = values([[-1.0, -2.0, -0.5]]), values([[-1.125, -1.75, -0.75]])
    adv, mask = values([[1.0, -2.0, -0.5]]), torch.ones(1, 3, dtype=torch.bool)
    narrow = LOSSES[name](*(x.bfloat16() for x in (logp, old, adv)), mask)
    torch.testing.assert_close(narrow.double(), LOSSES[name](logp, old, adv, mask), rtol=0.03, atol=0.03)


# ---- weights


@st.composite
def masks(draw):
    """Masks of unequal rows with gaps, some of them empty, and groups that stand anywhere."""
    b, t = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    mask = draw(st.lists(st.lists(st.booleans(), min_size=t, max_size=t), min_size=b, max_size=b))
    group = draw(st.lists(st.sampled_from([0, 5, 2]), min_size=b, max_size=b))
    return torch.tensor(mask), torch.tensor(group)


@given(masks(), st.integers(1, 9))
def test_the_weights_of_every_mode_are_the_tables(rows, limit):
    mask, group = rows
    for mode in MODES:
        wanted = values(oracles.weights(mode, mask.tolist(), group.tolist(), limit))
        torch.testing.assert_close(weights(mode, mask.double(), group, limit), wanted, rtol=1e-13, atol=0)


@given(masks())
def test_the_weights_of_a_mean_sum_to_one(rows):
    mask, group = rows
    for mode in ("token-mean", "seq-mean-token-mean", "prompt-mean"):
        total = float(weights(mode, mask.double(), group, LIMIT).sum())
        assert total == pytest.approx(1.0 if mask.any() else 0.0, rel=1e-12)


@given(masks(), st.integers(1, 4))
def test_masked_columns_change_nothing(rows, columns):
    """A mean is over the mask, not over the width of the rectangle."""
    mask, group = rows
    wide = torch.cat([mask, torch.zeros(len(mask), columns, dtype=torch.bool)], 1)
    for mode in MODES:
        assert torch.equal(weights(mode, wide, group, LIMIT)[:, : mask.shape[1]], weights(mode, mask, group, LIMIT))
        assert not weights(mode, wide, group, LIMIT)[:, mask.shape[1] :].any()


@given(batches(), st.integers(1, 4))
def test_masked_columns_change_no_ratio_of_an_answer(batch, columns):
    """The n of a geometric mean counts the mask as well."""
    logp, old, _, mask = batch
    padded = ((logp, NAN), (old, NAN), (mask, False))
    wide = [torch.cat([x, x.new_full((len(x), columns), garbage)], 1) for x, garbage in padded]
    for level in LEVELS:
        assert torch.equal(ratio(*wide, level)[:, : mask.shape[1]], ratio(logp, old, mask, level))
        assert bool((ratio(*wide, level)[:, mask.shape[1] :] == 1).all())


@example((torch.tensor([[False, False], [True, True], [True, False]]), torch.tensor([0, 5, 5])))  # a whole prompt
@given(masks())
def test_fully_masked_rows_count_nowhere(rows):
    mask, group = rows
    some = mask.any(1)
    for mode in MODES:
        assert torch.equal(weights(mode, mask, group, LIMIT)[some], weights(mode, mask[some], group[some], LIMIT))


@pytest.mark.parametrize("dtype", [torch.bool, *DTYPES])
def test_a_batch_without_a_row_or_a_token_has_no_weight(dtype):
    for mode, rows in itertools.product(MODES, (0, 1, 3)):
        got = weights(mode, torch.zeros(rows, 4, dtype=dtype), torch.arange(rows), LIMIT)
        assert got.shape == (rows, 4) and not got.any()


def test_of_two_rows_one_masked_the_loss_is_the_others_alone():
    mask = torch.tensor([[True] * 10, [False] * 10])
    per_token = torch.ones(2, 10)
    for mode, group in itertools.product(("token-mean", "seq-mean-token-mean", "prompt-mean"), ([0, 0], [0, 1])):
        assert float((weights(mode, mask, torch.tensor(group), LIMIT) * per_token).sum()) == pytest.approx(1.0)


def test_the_mean_of_means_is_not_the_mean():
    """One token of loss 1 in an answer of its own, nine of loss 0 in another."""
    mask = torch.arange(9) < torch.tensor([[1], [9]])
    per_token = torch.zeros(2, 9, dtype=torch.float64)
    per_token[0, 0] = 1.0
    wanted = {
        "token-mean": 0.1, "seq-mean-token-mean": 0.5, "prompt-mean": 0.1, "token-sum": 1.0, "bnpo": 1.0,
        "seq-mean-token-sum": 0.5, "seq-mean-token-sum-norm": 0.5 / LIMIT, "constant": 1 / LIMIT,
    }  # fmt: skip
    assert set(wanted) == set(MODES)
    for mode, value in wanted.items():
        got = float((weights(mode, mask.double(), torch.tensor([0, 0]), LIMIT) * per_token).sum())
        assert got == pytest.approx(value, rel=1e-12), mode


def test_weights_take_the_dtype_of_the_mask():
    for mode, dtype in itertools.product(MODES, (torch.float32, torch.float64)):
        assert weights(mode, torch.ones(2, 3, dtype=dtype), torch.tensor([0, 1]), LIMIT).dtype == dtype
        assert weights(mode, torch.ones(2, 3, dtype=torch.bool), torch.tensor([0, 1]), LIMIT).dtype == torch.float32


def test_an_unknown_mode_is_refused():
    with pytest.raises(ValueError, match="'mean'.*token-mean"):
        loss.weights("mean", torch.ones(1, 1), torch.tensor([0]), LIMIT)
