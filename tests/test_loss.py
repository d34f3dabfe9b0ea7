"""Losses: value and gradient of each are its equation, nothing off the mask exists, KLs estimate what they say."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nanorl import loss
from nanorl.loss import MODES, clipped, kl, log_ratio, reinforce, weights
from tests import oracles
from tests.oracles import LIMIT, NAN

KLS = ["k1", "k2", "k3"]
LOSSES = {
    "clipped": lambda logp, old, adv, mask: clipped(logp, old, adv, mask, 0.2, 0.28),
    "reinforce": lambda logp, old, adv, mask: reinforce(logp, adv, mask),
    **{k: lambda logp, old, adv, mask, k=k: kl(logp, old, mask, k) for k in KLS},
}


def values(x, dtype=torch.float64):
    return torch.tensor(x, dtype=dtype)


def slope(per_token, logp):
    """∂(Σ per_token)/∂logp."""
    return torch.autograd.grad(per_token.sum(), logp)[0]


def omega(logp, prox, adv, **clip):
    """The gradient weight of one token: ∂loss/∂log π = −ω·Â."""
    leaf = values([[logp]]).requires_grad_()
    per_token = clipped(leaf, values([[prox]]), values([[adv]]), torch.tensor([[True]]), **clip)
    return -float(slope(per_token, leaf)) / adv


token = st.tuples(st.floats(-4, 0), st.floats(-4, 0), st.floats(-3, 3), st.booleans())
rows = st.lists(token, min_size=1, max_size=6)


# ---- oracles: value, and gradient by autograd


@given(rows, st.sampled_from([(0.2, 0.2), (0.1, 0.28), (0.0, 0.0), (0.9, 5.0)]))
def test_every_loss_is_its_equation_in_value_and_gradient(tokens, eps):
    low, high = eps
    logp, old, adv = (values([list(x)]) for x in list(zip(*tokens))[:3])
    mask = torch.tensor([[m for *_, m in tokens]])
    ours = {"clipped": lambda x: clipped(x, old, adv, mask, low, high), "reinforce": lambda x: reinforce(x, adv, mask)}
    ours |= {k: lambda x, k=k: kl(x, old, mask, k) for k in KLS}
    theirs = {"clipped": lambda a, b, c: oracles.clipped(a, b, c, low, high)}
    theirs |= {"reinforce": lambda a, b, c: oracles.reinforce(a, c)}
    theirs |= {k: lambda a, b, c, k=k: oracles.kl(a, b, k) for k in KLS}
    for name in ours:
        leaf = logp.clone().requires_grad_()
        per_token = ours[name](leaf)
        wanted = [theirs[name](a, b, c) if m else (0.0, 0.0) for a, b, c, m in tokens]
        torch.testing.assert_close(per_token[0], values([v for v, _ in wanted]), rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(slope(per_token, leaf)[0], values([s for _, s in wanted]), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", LOSSES)
def test_the_gradient_is_the_slope_of_the_value(name):
    """Central differences, at every token that stands away from a kink."""
    logp, old = values([[-1.0, -2.0, -0.5, -1.5]]), values([[-1.1, -1.2, -1.3, -1.45]])
    adv, mask, step = values([[1.0, -2.0, 0.5, -0.3]]), torch.ones(1, 4, dtype=torch.bool), 1e-6
    leaf = logp.clone().requires_grad_()
    got = slope(LOSSES[name](leaf, old, adv, mask), leaf)
    up, down = (LOSSES[name](logp + s, old, adv, mask) for s in (step, -step))
    torch.testing.assert_close(got, (up - down) / (2 * step), rtol=1e-7, atol=1e-7)


# ---- the clip


def test_the_clip_flattens_what_goes_too_far_and_nothing_else():
    """ω in all cells: the sign of Â × the ratio below, within, above the clip (0.8, 1.28)."""
    table = {  # ratio: (is ω the ratio where Â > 0, and where Â < 0)
        0.01: (True, False), 0.5: (True, False), 0.8 - 1e-9: (True, False), 0.8 + 1e-9: (True, True), 1.0: (True, True),
        1.28 - 1e-9: (True, True), 1.28 + 1e-9: (False, True), 2.0: (False, True), 50.0: (False, True),
    }  # fmt: skip
    for ratio, moves in table.items():
        for sign, moving in zip((1, -1), moves):
            for size in (0.1, 1.0, 7.0):
                got = omega(-5.0 + math.log(ratio), -5.0, sign * size, eps_low=0.2, eps_high=0.28)
                assert got == pytest.approx(ratio if moving else 0.0, abs=1e-12), (ratio, sign * size)


@pytest.mark.parametrize("adv, bound", [(1.0, 1.28), (-1.0, 0.8)])
def test_at_the_kink_the_gradient_is_between_its_two_sides(adv, bound):
    assert -1e-12 <= omega(math.log(bound), 0.0, adv, eps_low=0.2, eps_high=0.28) <= bound + 1e-12


@given(rows, st.floats(0, 0.9), st.floats(0, 3))
def test_on_policy_the_clipped_surrogate_is_the_policy_gradient(tokens, low, high):
    """r = 1: value −Â and gradient −Â, whatever the clip, even one of no width; so it is REINFORCE."""
    logp, _, adv = (values([list(x)]) for x in list(zip(*tokens))[:3])
    mask = torch.tensor([[m for *_, m in tokens]])
    leaf = logp.clone().requires_grad_()
    per_token = clipped(leaf, logp, adv, mask, low, high)
    torch.testing.assert_close(per_token, -adv.where(mask, 0.0), rtol=1e-14, atol=0)
    torch.testing.assert_close(slope(per_token, leaf), slope(reinforce(leaf, adv, mask), leaf), rtol=1e-14, atol=0)


@given(rows, st.floats(0, 0.9), st.floats(0, 3))
def test_the_surrogate_never_promises_more_than_the_ratio(tokens, low, high):
    """A lower bound: loss ≥ −r·Â, with equality where the clip does not act; an infinite clip never acts."""
    logp, prox, adv = (values([list(x)]) for x in list(zip(*tokens))[:3])
    mask = torch.ones(logp.shape, dtype=torch.bool)
    plain = -(logp - prox).exp() * adv
    assert bool((clipped(logp, prox, adv, mask, low, high) >= plain - 1e-12).all())
    torch.testing.assert_close(clipped(logp, prox, adv, mask, 1.0, math.inf), plain, rtol=1e-12, atol=1e-12)


# ---- KL, by enumeration of a distribution over four tokens

PAIRS = [  # logits of π and of π_ref
    ([0.5, -1.0, 2.0, 0.0], [0.0, 0.3, 1.0, -0.7]), ([0.0, 0.0, 0.0, 0.0], [1.0, 0.0, -1.0, 2.0]),
    ([3.0, -2.0, 0.1, 0.2], [-1.0, 1.0, 0.5, 0.0]),
]  # fmt: skip
EVERY = torch.ones(1, 4, dtype=torch.bool)


def exact(logp, logq):
    """KL(p‖q) = Σ p·(log p − log q)."""
    return (logp.exp() * (logp - logq)).sum()


def expected(theta, ref, estimator):
    """E_{x~π} of the estimator's value and of its gradient in the logits: π weighs the tokens, as sampling does."""
    logp = theta.log_softmax(0)[None]
    per_token = kl(logp, ref.log_softmax(0)[None], EVERY, estimator)
    mean = (logp.detach().exp() * per_token).sum()
    return mean.detach(), torch.autograd.grad(mean, theta)[0]


@pytest.mark.parametrize("logits, reference", PAIRS)
def test_k1_and_k3_are_unbiased_for_the_kl_and_k2_is_not(logits, reference):
    theta, ref = values(logits).requires_grad_(), values(reference)
    wanted = exact(theta.log_softmax(0), ref.log_softmax(0)).detach()
    assert float(wanted) > 0.1
    for estimator in ("k1", "k3"):
        torch.testing.assert_close(expected(theta, ref, estimator)[0], wanted, rtol=1e-12, atol=1e-12)
    assert abs(float(expected(theta, ref, "k2")[0] - wanted)) > 1e-3


@pytest.mark.parametrize("logits, reference", PAIRS)
def test_what_the_gradient_of_each_kl_descends(logits, reference):
    """E∇k1 = 0, E∇k2 = ∇KL(π‖ref), E∇k3 = ∇KL(ref‖π)."""
    theta, ref = values(logits).requires_grad_(), values(reference)
    logp, logq = theta.log_softmax(0), ref.log_softmax(0)
    ours = torch.autograd.grad(exact(logp, logq), theta, retain_graph=True)[0]
    other = torch.autograd.grad(exact(logq, logp), theta)[0]
    assert float((ours - other).norm()) > 0.05  # so the test tells them apart
    for estimator, wanted in (("k1", torch.zeros(4)), ("k2", ours), ("k3", other)):
        torch.testing.assert_close(expected(theta, ref, estimator)[1], wanted.double(), rtol=1e-12, atol=1e-12)


@given(rows)
def test_k2_and_k3_are_never_negative_and_zero_only_where_the_policies_agree(tokens):
    logp, ref, _ = (values([list(x)]) for x in list(zip(*tokens))[:3])
    mask = torch.ones(logp.shape, dtype=torch.bool)
    apart = (logp - ref).abs() > 1e-6
    for estimator in ("k2", "k3"):
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
    with pytest.raises(ValueError, match="k4.*k1, k2, k3"):
        kl(values([[0.0]]), values([[0.0]]), torch.tensor([[True]]), "k4")


# ---- what must never reach a gradient


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("garbage", [NAN, math.inf, -math.inf, 1e30])
def test_nothing_off_the_mask_reaches_value_or_gradient(name, garbage):
    mask = torch.tensor([[False, True, False, True]])
    clean = values([[0.0, -1.0, 0.0, -2.0]]), values([[0.0, -1.1, 0.0, -1.9]]), values([[0.0, 0.5, 0.0, -0.5]])
    results = []
    for inputs in (clean, [x.where(mask, garbage) for x in clean]):
        leaf = inputs[0].clone().requires_grad_()
        per_token = LOSSES[name](leaf, *inputs[1:], mask)
        results.append((per_token.detach(), slope(per_token, leaf)))
    for wanted, got in zip(*results):
        assert torch.equal(wanted, got)
        assert got[~mask].tolist() == [0.0, 0.0] and bool(got[mask].ne(0).all())


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_log_ratios_of_100_are_finite_in_value_and_gradient(name, dtype):
    """exp(100) is no float32: bounded before the exp, not after, or the gradient is NaN."""
    cases = list(itertools.product([-1.0, -101.0, -1000.0], [-1.0, -101.0, -1000.0], [-2.0, 0.0, 2.0]))
    logp, old, adv = (values([list(x)], dtype) for x in zip(*cases))
    leaf = logp.clone().requires_grad_()
    per_token = LOSSES[name](leaf, old, adv, torch.ones(logp.shape, dtype=torch.bool))
    assert per_token.dtype == dtype
    assert bool(per_token.isfinite().all()) and bool(slope(per_token, leaf).isfinite().all())


def test_the_log_ratio_is_exact_within_its_bound():
    logp, old = values([[-1.0, -30.0, 0.0, -3.0]]), values([[-2.5, -1.0, -99.0, NAN]])
    mask = torch.tensor([[True, True, True, False]])
    assert log_ratio(logp, old, mask).tolist() == [[1.5, -20.0, 20.0, 0.0]]
    assert log_ratio(logp, old, mask, bound=1.0).tolist() == [[1.0, -1.0, 1.0, 0.0]]


@pytest.mark.parametrize("name", LOSSES)
def test_bfloat16_agrees_with_float64_to_its_precision(name):
    logp, old = values([[-1.0, -2.0, -0.5]]), values([[-1.125, -1.25, -0.75]])
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


@given(masks())
def test_fully_masked_rows_count_nowhere(rows):
    mask, group = rows
    some = mask.any(1)
    for mode in MODES:
        assert torch.equal(weights(mode, mask, group, LIMIT)[some], weights(mode, mask[some], group[some], LIMIT))


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
