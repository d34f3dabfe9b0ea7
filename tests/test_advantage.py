"""Credit: each estimator is its equation, knows its group and nothing else, and what it promises on average holds."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nanorl import advantage, loss
from nanorl.advantage import (
    broadcast,
    centred,
    constant,
    group_mean,
    group_size,
    group_std,
    leave_one_out,
    standardised,  # fmt: skip
)
from tests import oracles

ESTIMATORS = [centred, standardised, leave_one_out]
DTYPES = [torch.bfloat16, torch.float32, torch.float64]


def values(x, dtype=torch.float64):
    return torch.tensor(x, dtype=dtype)


@st.composite
def grouped(draw):
    """Rewards on a grid, and ids: groups of 1 to 5 members whose rows stand anywhere."""
    reward = st.integers(-16, 16).map(lambda k: k / 8)
    groups = draw(st.lists(st.lists(reward, min_size=1, max_size=5), min_size=1, max_size=4))
    names = draw(st.permutations([3, 1, 70, 12]))
    rows = draw(st.permutations([(r, names[g]) for g, rewards in enumerate(groups) for r in rewards]))
    return values([r for r, _ in rows]), torch.tensor([g for _, g in rows])


# ---- oracles


@given(grouped(), st.sampled_from([0, 1]), st.sampled_from([1e-4, 1e-6, 1e-9]))
def test_every_estimator_is_its_equation(rows, ddof, eps):
    reward, group = rows
    r, g = reward.tolist(), group.tolist()
    for got, wanted in [
        (centred(reward, group), oracles.centred(r, g)),
        (leave_one_out(reward, group), oracles.leave_one_out(r, g)),
        (standardised(reward, group, ddof, eps), oracles.standardised(r, g, ddof, eps)),
    ]:
        torch.testing.assert_close(got, values(wanted), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("ddof", [0, 1])
def test_std_is_numpys_and_zero_without_freedom(ddof):
    reward, group = values([1, 2, 4, 7, 9]), torch.tensor([0, 0, 0, 0, 1])
    wanted = math.sqrt((2.5**2 + 1.5**2 + 0.5**2 + 3.5**2) / (4 - ddof))
    torch.testing.assert_close(group_std(reward, group, ddof), values([wanted] * 4 + [0]), rtol=1e-14, atol=0)


# ---- which rows a row is compared with


def test_the_mean_is_the_groups_not_the_batchs():
    """Two easy answers and two hard ones: nothing to tell apart within either question."""
    for estimator in ESTIMATORS:
        assert estimator(values([1, 1, 0, 0]), torch.tensor([0, 0, 1, 1])).tolist() == [0, 0, 0, 0]
        assert estimator(values([1, 0, 1, 0]), torch.tensor([0, 0, 1, 1]))[:2].sum() == 0
    assert centred(values([1, 0, 5, 3]), torch.tensor([0, 0, 1, 1])).tolist() == [0.5, -0.5, 1, -1]


def test_a_row_alone_in_its_group_has_no_advantage():
    for estimator, reward in itertools.product(ESTIMATORS, ([1, 2, 3, 4], [0.3, 0.3, 7, 7])):
        assert estimator(values(reward), torch.arange(4)).tolist() == [0, 0, 0, 0]


@given(grouped(), st.randoms(use_true_random=False))
def test_where_the_rows_stand_and_what_ids_are_called_is_nothing(rows, random):
    reward, group = rows
    order = list(range(len(group)))
    random.shuffle(order)
    for estimator in (*ESTIMATORS, group_mean, group_size, group_std):
        there = estimator(reward, group)
        torch.testing.assert_close(estimator(reward[order], group[order]), there[order], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(estimator(reward, 100 - 7 * group), there, rtol=1e-12, atol=1e-12)


@given(grouped(), st.lists(st.integers(-8, 8), min_size=1, max_size=3))
def test_another_group_changes_nothing(rows, more):
    reward, group = rows
    for estimator in ESTIMATORS:
        with_others = estimator(torch.cat([values(more), reward]), torch.cat([torch.full((len(more),), 999), group]))
        torch.testing.assert_close(with_others[len(more) :], estimator(reward, group), rtol=1e-12, atol=1e-12)


# ---- identities


@given(grouped())
def test_advantages_of_a_group_sum_to_zero(rows):
    reward, group = rows
    for estimator in ESTIMATORS:
        for g in group.unique():
            assert abs(float(estimator(reward, group)[group == g].sum())) < 1e-9


@given(grouped(), st.sampled_from([0.25, 1.0, 3.0, 1e4]), st.integers(-5, 5))
def test_scale_and_offset_of_the_reward(rows, a, b):
    """No offset matters; the scale is nothing to the standardised one as ε → 0, and linear in the others."""
    reward, group = rows
    for ddof in (0, 1):
        torch.testing.assert_close(
            standardised(a * reward + b, group, ddof, eps=1e-30), standardised(reward, group, ddof, eps=1e-30),
            rtol=1e-9, atol=1e-9,
        )  # fmt: skip
    for estimator in (centred, leave_one_out):
        torch.testing.assert_close(estimator(a * reward + b, group), a * estimator(reward, group), rtol=1e-9, atol=1e-9)


@given(grouped())
def test_leave_one_out_is_g_over_g_minus_1_of_centred(rows):
    reward, group = rows
    size = group_size(reward, group)
    alone = size == 1
    wanted = (size / (size - 1)).where(~alone, 0.0) * (reward - group_mean(reward, group))
    torch.testing.assert_close(leave_one_out(reward, group), wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("ddof", [0, 1])
def test_one_success_among_g_is_worth_its_rarity(ddof):
    """R = (1, 0, …, 0): Â of the success is √(G−1) with the population std, (G−1)/√G with the unbiased one."""
    for size in range(2, 9):
        best = standardised(values([1] + [0] * (size - 1)), torch.zeros(size, dtype=torch.int64), ddof, eps=0.0)[0]
        wanted = math.sqrt(size - 1) if ddof == 0 else (size - 1) / math.sqrt(size)
        assert float(best) == pytest.approx(wanted, rel=1e-12)


# ---- nearly equal and equal rewards


@pytest.mark.parametrize("ddof", [0, 1])
@pytest.mark.parametrize("eps", [1e-4, 1e-6, 1e-8])
def test_near_constant_rewards_obey_the_equation(ddof, eps):
    """A spread of 1e-5 is where the place and the size of ε decide: libraries differ by a factor of ten here."""
    reward = [1 + 1e-5 * k for k in range(4)]
    group = torch.zeros(4, dtype=torch.int64)
    wanted = values(oracles.standardised(reward, [0] * 4, ddof, eps))
    torch.testing.assert_close(standardised(values(reward), group, ddof, eps), wanted, rtol=1e-9, atol=0)
    single = standardised(values(reward, torch.float32), group, ddof, eps)
    torch.testing.assert_close(single.double(), wanted, rtol=0.03, atol=0.03)


@given(st.floats(-1e6, 1e6, width=32), st.integers(1, 12), st.sampled_from(DTYPES))
def test_equal_rewards_are_exactly_no_advantage(reward, size, dtype):
    x, group = torch.full((size,), reward, dtype=dtype), torch.zeros(size, dtype=torch.int64)
    for estimator in ESTIMATORS:
        assert torch.equal(estimator(x, group), torch.zeros(size, dtype=dtype))


def test_seven_tenths_are_exactly_no_advantage():
    """0.1 seven times in float32: the mean of equal floats is not that float, and the difference over ε would teach."""
    tenths, group = torch.full((7,), 0.1), torch.zeros(7, dtype=torch.int64)
    assert bool((tenths - group_mean(tenths, group)).ne(0).any())  # so the test can fail
    for estimator in ESTIMATORS:
        assert estimator(tenths, group).tolist() == [0.0] * 7


@given(grouped())
def test_constant_names_the_groups_without_contrast(rows):
    reward, group = rows
    r, g = reward.tolist(), group.tolist()
    assert constant(reward, group).tolist() == [len({r[j] for j in oracles.members(g, i)}) == 1 for i in range(len(r))]


def test_rewards_are_never_overwritten():
    reward, group = values([1, 0, 0.5, 0.5]), torch.tensor([0, 0, 1, 1])
    for estimator in (*ESTIMATORS, group_mean, group_std, constant):
        estimator(reward, group)
        assert reward.tolist() == [1, 0, 0.5, 0.5]


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_dtype_is_the_rewards(dtype):
    for estimator in ESTIMATORS:
        assert estimator(values([1, 0], dtype), torch.tensor([0, 0])).dtype == dtype


def test_every_sampled_token_has_its_rows_credit_and_no_other_token_any():
    mask = torch.tensor([[False, True, False, True], [False, False, False, False], [False, False, True, False]])
    wanted = [[0, 2, 0, 2], [0, 0, 0, 0], [0, 0, 5, 0]]
    assert broadcast(values([2, 3, 5]), mask).tolist() == wanted


# ---- on average: every group that can be drawn


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("name", ["leave_one_out", "centred", "none"])
def test_expected_gradient_over_all_groups(name, size):
    """E[1/G Σ_i Â_i ∇log π(a_i)] is ∇E[R] with the others' mean, (G−1)/G of it with the group's, ∇E[R] with none.

    By enumeration of all 3^G groups of answers of one token. The group's mean contains R_i itself, which is what
    takes 1/G of the gradient away.
    """
    theta = values([0.3, -0.5, 1.1]).requires_grad_()
    worth = values([1.0, 0.25, -2.0])
    wanted = torch.autograd.grad(-(theta.softmax(0) * worth).sum(), theta)[0]  # the loss is −E[R]

    groups = torch.tensor(list(itertools.product(range(3), repeat=size)))  # [3^G, G]
    logp = theta.log_softmax(0)[groups]
    chance = logp.sum(1).exp().detach()
    reward, group = worth[groups].flatten(), torch.arange(len(groups)).repeat_interleave(size)
    adv = reward if name == "none" else getattr(advantage, name)(reward, group)
    per_token = loss.reinforce(logp.reshape(-1, 1), adv[:, None], torch.ones(adv[:, None].shape, dtype=torch.bool))
    got = torch.autograd.grad((chance * per_token.view(-1, size).mean(1)).sum(), theta)[0]

    share = (size - 1) / size if name == "centred" else 1.0
    torch.testing.assert_close(got, share * wanted, rtol=1e-12, atol=1e-13)


def test_the_baseline_lowers_the_variance():
    """Rewards 10 and 11: without a baseline the gradient's second moment is over a hundred times as large."""
    theta, worth = values([0.2, -0.2]), values([10.0, 11.0])
    pi = theta.softmax(0)
    moment = {}
    for name, baseline in [("none", False), ("leave_one_out", True)]:
        moment[name] = 0.0
        for a, b in itertools.product(range(2), repeat=2):
            reward = worth[[a, b]]
            adv = leave_one_out(reward, torch.zeros(2, dtype=torch.int64)) if baseline else reward
            grad = sum(adv[i] * (torch.eye(2, dtype=torch.float64)[x] - pi) for i, x in enumerate((a, b))) / 2
            moment[name] += float(pi[a] * pi[b] * grad.square().sum())
    assert moment["none"] > 100 * moment["leave_one_out"] > 0
