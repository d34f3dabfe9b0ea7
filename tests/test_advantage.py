"""Credit: each estimator is its equation, knows its group and nothing else, and what it promises on average holds."""

import itertools
import math
from functools import partial

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nanorl import loss
from nanorl.advantage import (
    at_end, constant, gae, group_size, group_std, group_sum, normalise, placed, returns_to_go, row_mean,
)  # fmt: skip
from tests import oracles

NAN = math.nan
DTYPES = [torch.bfloat16, torch.float32, torch.float64]
GRPO = dict(mean_level="group", std_level="group")
DR_GRPO = dict(mean_level="group", std_level="none")
RLOO = dict(mean_level="group", std_level="none", leave_one_out=True)
LITE_PPO = dict(mean_level="group", std_level="batch")
WHITE = dict(mean_level="batch", std_level="batch")
NAMED = [GRPO, DR_GRPO, RLOO, LITE_PPO]  # with a baseline in the group
SETTINGS = [dict(mean_level=m, std_level=s, leave_one_out=one) for m, s, one in itertools.product(
    ("group", "batch", "none"), ("group", "batch", "none"), (False, True)) if not (one and m == "none")]  # fmt: skip


def values(x, dtype=torch.float64):
    return torch.tensor(x, dtype=dtype)


def close(got, wanted, tolerance=1e-10):
    wanted = wanted if isinstance(wanted, torch.Tensor) else values(wanted)
    torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)


def of_rewards(reward, group, **settings):
    """[B] Rewards of whole answers, normalised: one element a row."""
    return normalise(reward[:, None], torch.ones(len(reward), 1, dtype=torch.bool), group, **settings)[:, 0]


@st.composite
def grouped(draw):
    """Rewards on a grid, and ids: groups of 1 to 5 members whose rows stand anywhere."""
    reward = st.integers(-16, 16).map(lambda k: k / 8)
    groups = draw(st.lists(st.lists(reward, min_size=1, max_size=5), min_size=1, max_size=4))
    names = draw(st.permutations([3, 1, 70, 12]))
    rows = draw(st.permutations([(r, names[g]) for g, rewards in enumerate(groups) for r in rewards]))
    return values([r for r, _ in rows]), torch.tensor([g for _, g in rows])


@st.composite
def tokens(draw):
    """(x, value, mask, group): rows of tokens with gaps, some without a sampled one, groups that stand anywhere."""
    b, t = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    cell = st.integers(-16, 16).map(lambda k: k / 8)
    columns = (cell, st.floats(-3, 3), st.booleans())
    x = [draw(st.lists(st.lists(c, min_size=t, max_size=t), min_size=b, max_size=b)) for c in columns]
    group = draw(st.lists(st.sampled_from([4, 9]), min_size=b, max_size=b))
    return values(x[0]), values(x[1]), torch.tensor(x[2]), torch.tensor(group)


discounts = st.sampled_from([(1.0, 1.0), (1.0, 0.95), (0.9, 0.8), (0.99, 0.0), (0.0, 1.0)])


# ---- normalise: its equation, and its names


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: "-".join(str(v) for v in s.values()))
@hypothesis.settings(max_examples=25)
@given(tokens(), st.sampled_from([0, 1]), st.sampled_from([1e-4, 1e-8]), st.sampled_from(["std", "variance"]))
def test_normalise_is_its_equation(settings, batch, ddof, eps, eps_in):
    x, _, mask, group = batch
    settings = dict(**settings, ddof=ddof, eps=eps, eps_in=eps_in)
    wanted = oracles.normalise(x.tolist(), mask.tolist(), group.tolist(), **settings)
    close(normalise(x, mask, group, **settings), wanted)


@given(grouped(), st.sampled_from([0, 1]), st.sampled_from([1e-4, 1e-6]))
def test_the_named_settings_are_the_papers(rows, ddof, eps):
    """Each paper's formula by numpy, group by group."""
    reward, group = rows
    r, g = reward.numpy(), group.numpy()
    of = [r[g == name] for name in g]
    mean, size = np.array([x.mean() for x in of]), np.array([len(x) for x in of])
    others = np.array([(x.sum() - own) / max(1, len(x) - 1) for x, own in zip(of, r)])

    def std(x):  # 1 where there is no freedom; the deviation is 0 there
        return x.std(ddof=ddof) if len(x) > ddof else 1.0

    centred = r - mean
    for settings, wanted in [
        (GRPO, centred / (np.array([std(x) for x in of]) + eps)), (DR_GRPO, centred),
        (LITE_PPO, centred / (std(centred) + eps)), (RLOO, np.where(size > 1, r - others, 0.0)),
        (WHITE, (r - r.mean()) / (std(r) + eps)),
    ]:  # fmt: skip
        close(of_rewards(reward, group, **settings, ddof=ddof, eps=eps), torch.from_numpy(wanted))


def test_rows_of_the_papers_page_in_numbers():
    """R = (1, 0, 0, 1 | 2): δ under the root, population variance: ±½/√(¼ + δ); one of five is alone."""
    reward, group, delta = values([1, 0, 0, 1, 2]), torch.tensor([0, 0, 0, 0, 1]), 0.11
    half = 0.5 / math.sqrt(0.25 + delta)
    page = of_rewards(reward, group, **GRPO, ddof=0, eps=delta, eps_in="variance")
    close(page, [half, -half, -half, half, 0.0], 1e-14)
    close(of_rewards(reward, group, **RLOO), [2 / 3, -2 / 3, -2 / 3, 2 / 3, 0.0], 1e-14)
    close(of_rewards(reward, group, mean_level="none", std_level="group", ddof=0, eps=0.0)[:4],
          [math.sqrt(2), 0.0, 0.0, math.sqrt(2)], 1e-14)  # around 0, the mean that was taken off  # fmt: skip


# ---- which rows a row is compared with


def test_the_mean_is_the_groups_not_the_batchs():
    """Two easy answers and two hard ones: nothing to tell apart within either question."""
    for settings in NAMED:
        assert of_rewards(values([1, 1, 0, 0]), torch.tensor([0, 0, 1, 1]), **settings).tolist() == [0, 0, 0, 0]
        assert of_rewards(values([1, 0, 1, 0]), torch.tensor([0, 0, 1, 1]), **settings)[:2].sum() == 0
    assert of_rewards(values([1, 0, 5, 3]), torch.tensor([0, 0, 1, 1]), **DR_GRPO).tolist() == [0.5, -0.5, 1, -1]


def test_a_row_alone_in_its_group_has_no_advantage():
    """However many others are in the batch, and whatever the std is without a degree of freedom."""
    for settings, reward, ddof in itertools.product(NAMED, ([1, 2, 3, 4], [0.3, 0.3, 7, 7]), (0, 1)):
        assert of_rewards(values(reward), torch.arange(4), **settings, ddof=ddof).tolist() == [0, 0, 0, 0]


def test_an_incomplete_group_is_normalised_by_its_own_members():
    """Groups of 3 and 1 where 4 and 4 were asked for: the three are as without the fourth row."""
    reward, group = values([1, 0, 0.25, 9]), torch.tensor([0, 0, 0, 1])
    for settings in (GRPO, DR_GRPO, RLOO):
        alone = of_rewards(reward[:3], group[:3], **settings)
        close(of_rewards(reward, group, **settings), torch.cat([alone, values([0.0])]), 1e-14)


@given(tokens(), st.randoms(use_true_random=False))
def test_where_the_rows_stand_and_what_ids_are_called_is_nothing(batch, random):
    x, _, mask, group = batch
    order = list(range(len(group)))
    random.shuffle(order)
    for settings in SETTINGS:
        there = normalise(x, mask, group, **settings)
        close(normalise(x[order], mask[order], group[order], **settings), there[order], 1e-12)
        close(normalise(x, mask, 100 - 7 * group, **settings), there, 1e-12)
    for statistic in (group_sum, group_std, lambda a, b: group_size(a, b)):
        there = statistic(x[:, 0], group)
        close(statistic(x[order, 0], group[order]), there[order], 1e-12)
        close(statistic(x[:, 0], 100 - 7 * group), there, 1e-12)


@given(grouped(), st.lists(st.integers(-8, 8), min_size=1, max_size=3))
def test_another_group_changes_nothing(rows, more):
    reward, group = rows
    ids = torch.cat([torch.full((len(more),), 999), group])
    for settings in (GRPO, DR_GRPO, RLOO):
        close(of_rewards(torch.cat([values(more), reward]), ids, **settings)[len(more) :],
              of_rewards(reward, group, **settings), 1e-12)  # fmt: skip


# ---- identities


@given(grouped())
def test_advantages_of_a_group_sum_to_zero(rows):
    reward, group = rows
    for settings in NAMED:
        assert float(group_sum(of_rewards(reward, group, **settings), group).abs().max()) < 1e-9


@given(grouped(), st.sampled_from([0.25, 1.0, 3.0, 1e4]), st.integers(-5, 5))
def test_scale_and_offset_of_the_reward(rows, a, b):
    """R → aR + b: no offset matters; the scale is nothing where a std divides, as ε → 0, and linear elsewhere."""
    reward, group = rows
    for ddof, settings in itertools.product((0, 1), (GRPO, LITE_PPO, WHITE)):
        there = of_rewards(reward, group, **settings, ddof=ddof, eps=1e-30)
        close(of_rewards(a * reward + b, group, **settings, ddof=ddof, eps=1e-30), there, 1e-9)
    for settings in (DR_GRPO, RLOO, dict(mean_level="batch", std_level="none")):
        close(of_rewards(a * reward + b, group, **settings), a * of_rewards(reward, group, **settings), 1e-9)


@given(grouped())
def test_leave_one_out_is_g_over_g_minus_1_of_centred(rows):
    reward, group = rows
    size = group_size(reward, group)
    share = (size / (size - 1)).where(size > 1, 0.0)
    close(of_rewards(reward, group, **RLOO), share * of_rewards(reward, group, **DR_GRPO), 1e-12)


@pytest.mark.parametrize("ddof", [0, 1])
def test_one_success_among_g_is_worth_its_rarity(ddof):
    """R = (1, 0, …, 0): Â of the success is √(G−1) with the population std, (G−1)/√G with the unbiased one."""
    for size in range(2, 9):
        reward, group = values([1] + [0] * (size - 1)), torch.zeros(size, dtype=torch.int64)
        wanted = math.sqrt(size - 1) if ddof == 0 else (size - 1) / math.sqrt(size)
        assert float(of_rewards(reward, group, **GRPO, ddof=ddof, eps=0.0)[0]) == pytest.approx(wanted, rel=1e-12)


@given(tokens(), st.sampled_from([0, 1]))
def test_whitened_tokens_have_mean_0_and_variance_1(batch, ddof):
    """Over the sampled tokens of the batch, not over rows: a long answer weighs more."""
    x, _, mask, group = batch
    white = normalise(x, mask, group, **WHITE, ddof=ddof, eps=1e-30)[mask]
    if len(set(x[mask].tolist())) > 1:
        assert abs(float(white.sum())) < 1e-9
        assert float(white.square().sum()) == pytest.approx(len(white) - ddof, rel=1e-9)
    else:
        assert not white.any()


# ---- nearly equal and equal rewards


@pytest.mark.parametrize("ddof", [0, 1])
@pytest.mark.parametrize("eps, eps_in", [(1e-4, "std"), (1e-6, "std"), (1e-8, "std"), (1e-10, "variance")])
def test_near_constant_rewards_obey_the_equation(ddof, eps, eps_in):
    """A spread of 1e-5 is where the place and the size of ε decide: libraries differ by a factor of ten here."""
    reward, group = [1 + 1e-5 * k for k in range(4)], torch.zeros(4, dtype=torch.int64)
    settings = dict(**GRPO, ddof=ddof, eps=eps, eps_in=eps_in)
    wanted = values(oracles.normalise([[r] for r in reward], [[True]] * 4, [0] * 4, **settings))[:, 0]
    torch.testing.assert_close(of_rewards(values(reward), group, **settings), wanted, rtol=1e-9, atol=0)
    single = of_rewards(values(reward, torch.float32), group, **settings)
    torch.testing.assert_close(single.double(), wanted, rtol=0.03, atol=0.03)


@given(st.floats(-1e6, 1e6, width=32), st.integers(1, 12), st.sampled_from(DTYPES))
def test_equal_rewards_are_exactly_no_advantage(reward, size, dtype):
    x, group = torch.full((size,), reward, dtype=dtype), torch.zeros(size, dtype=torch.int64)
    for settings in (*NAMED, WHITE):
        assert torch.equal(of_rewards(x, group, **settings), torch.zeros(size, dtype=dtype))


@pytest.mark.parametrize("size, dtype", [(3, torch.float64), (7, torch.float32)])
def test_a_tenth_three_times_is_exactly_no_advantage(size, dtype):
    """The mean of equal floats is not that float, and the difference over ε would teach; so for tokens of the batch."""
    tenths, group = torch.full((size,), 0.1, dtype=dtype), torch.zeros(size, dtype=torch.int64)
    assert bool((tenths - group_sum(tenths, group) / size).ne(0).any())  # so the test can fail
    for settings in (*NAMED, WHITE):
        assert of_rewards(tenths, group, **settings).tolist() == [0.0] * size
        mask = torch.tensor([[False] + [True] * size])
        spoilt = torch.cat([torch.full((1,), NAN, dtype=dtype), tenths])[None]
        assert normalise(spoilt, mask, group[:1], **settings).tolist() == [[0.0] * (size + 1)]


@given(grouped())
def test_constant_names_the_groups_without_contrast(rows):
    reward, group = rows
    r, g = reward.tolist(), group.tolist()
    wanted = [len({r[j] for j in oracles.members(g, i)}) == 1 for i in range(len(r))]
    assert constant(reward, reward, group).tolist() == wanted
    above = reward + 1  # rows whose own low and high differ
    assert not constant(reward, above, group).any()


# ---- statistics


@given(grouped())
def test_sums_sizes_and_stds_are_numpys(rows):
    reward, group = rows
    of = [reward.numpy()[group.numpy() == name] for name in group.numpy()]
    close(group_sum(reward, group), [x.sum() for x in of], 1e-13)
    close(group_size(reward, group), [float(len(x)) for x in of], 0.0)
    close(group_std(reward, group), [x.std(ddof=1) if len(x) > 1 else 0.0 for x in of], 1e-13)


# ---- where a reward lands


@given(tokens())
def test_placed_is_its_equation_and_keeps_the_sum_of_each_row(batch):
    rewards, _, mask, _ = batch
    got = placed(rewards, mask)
    close(got, oracles.placed(rewards.tolist(), mask.tolist()), 1e-13)
    close(got.sum(1), rewards.sum(1).where(mask.any(1), 0.0), 1e-12)
    assert not got[~mask].any()
    close(placed(got, mask), got, 0.0)  # what is at its place stays there


def test_a_reward_goes_to_the_token_that_earned_it():
    """Before the first sampled token there is only that one; after a gap it is the last before the gap."""
    mask = torch.tensor([[False, True, False, False, True, False]])
    for position, lands in enumerate([1, 1, 1, 1, 4, 4]):
        reward = torch.zeros(1, 6)
        reward[0, position] = 2.0
        assert placed(reward, mask).nonzero().tolist() == [[0, lands]]


@given(tokens())
def test_at_end_is_the_last_sampled_token(batch):
    x, _, mask, _ = batch
    got = at_end(x[:, 0], mask)
    for i, row in enumerate(mask.tolist()):
        last = max((t for t, m in enumerate(row) if m), default=None)
        assert got[i].tolist() == [x[i, 0].item() if t == last else 0.0 for t in range(len(row))]


# ---- along a row


@given(tokens(), discounts)
def test_returns_to_go_are_their_double_sum(batch, discount):
    reward, _, mask, _ = batch
    close(returns_to_go(reward, mask, discount[0]), oracles.returns_to_go(reward.tolist(), mask.tolist(), discount[0]))


@given(tokens(), discounts, st.booleans())
def test_gae_is_its_double_sum(batch, discount, cut):
    reward, value, mask, _ = batch
    bootstrap = value[:, 0] + 1 if cut else None
    after = bootstrap.tolist() if cut else [0.0] * len(mask)
    wanted = oracles.gae(reward.tolist(), value.tolist(), mask.tolist(), *discount, after)
    close(gae(reward, value, mask, *discount, bootstrap), wanted)


@given(tokens())
def test_with_one_reward_at_the_end_and_no_discount_every_token_gets_it(batch):
    reward, _, mask, _ = batch
    got = returns_to_go(at_end(reward[:, 0], mask), mask)
    assert torch.equal(got, reward[:, :1].expand(mask.shape).where(mask, 0.0))


@given(tokens(), st.sampled_from([1.0, 0.9]))
def test_limits_of_lambda(batch, gamma):
    """λ = 1: Â + V is the return, whatever the critic says; λ = 0: the TD error; V exact: no advantage, whatever λ."""
    reward, value, mask, _ = batch
    total = returns_to_go(reward, mask, gamma)
    close(gae(reward, value, mask, gamma, 1.0) + value.where(mask, 0.0), total, 1e-12)
    following = torch.zeros_like(value)
    for i, t in mask.nonzero().tolist():
        later = [u for u in range(t + 1, mask.shape[1]) if mask[i, u]]
        following[i, t] = value[i, later[0]] if later else 0.0
    close(gae(reward, value, mask, gamma, 0.0), (reward + gamma * following - value).where(mask, 0.0), 1e-12)
    for lam in (0.0, 0.95, 1.0):
        close(gae(reward, total, mask, gamma, lam), torch.zeros_like(total), 1e-12)


@given(tokens(), discounts, st.integers(0, 5), st.integers(1, 3))
def test_tokens_of_others_neither_discount_nor_reset(batch, discount, where, how_many):
    """A tool's answer put in anywhere, with NaN for its reward and value: every sampled token keeps what it had."""
    reward, value, mask, _ = batch
    where = min(where, mask.shape[1])

    def inserted(x, garbage):
        return torch.cat([x[:, :where], x.new_full((len(x), how_many), garbage), x[:, where:]], 1)

    long_mask = inserted(mask, False)
    long = gae(inserted(reward, NAN), inserted(value, NAN), long_mask, *discount, value[:, 0])
    close(long[long_mask], gae(reward, value, mask, *discount, value[:, 0])[mask], 1e-13)
    assert not long[~long_mask].any()
    long = returns_to_go(inserted(reward, NAN), long_mask, discount[0])
    close(long[long_mask], returns_to_go(reward, mask, discount[0])[mask], 1e-13)


def test_gae_across_a_tools_answer_in_numbers():
    """γ = ½, λ = 1, a reward of 8, two sampled tokens and five columns away: 8·½², less V of the token itself."""
    mask = torch.tensor([[True, False, False, True, False, True]])
    reward, value = values([[0, 0, 0, 0, 0, 8.0]]), values([[0.3, NAN, NAN, 0.2, NAN, 0.1]])
    close(gae(reward, value, mask, 0.5, 1.0), [[2 - 0.3, 0, 0, 4 - 0.2, 0, 8 - 0.1]], 1e-14)
    close(returns_to_go(reward, mask, 0.5), [[2.0, 0, 0, 4.0, 0, 8.0]], 1e-14)


def test_a_bootstrap_is_what_would_have_come():
    """An answer cut in two: V of the rest, at the cut, stands for the rewards after it."""
    reward, value = values([[0.5, 0.25, 1.0, -2.0]]), values([[0.1, 0.7, -0.3, 0.4]])
    mask = torch.ones(1, 4, dtype=torch.bool)
    for gamma, lam in ((1.0, 0.0), (0.9, 0.0), (0.9, 0.5)):
        whole, cut = (gae(reward[:, :n], value[:, :n], mask[:, :n], gamma, lam, b)
                      for n, b in ((4, None), (2, value[:, 2])))  # fmt: skip
        rest = whole[0, 2] * (gamma * lam)  # the advantage after the cut is the only thing that is lost
        close(cut[0, 1], whole[0, 1] - rest, 1e-13)


@given(tokens())
def test_row_mean_is_its_loop(batch):
    x, _, mask, _ = batch
    got = row_mean(x, mask)
    for i, row in enumerate(mask.tolist()):
        sampled = [x[i, t].item() for t, m in enumerate(row) if m]
        wanted = math.fsum(sampled) / max(1, len(sampled))
        close(got[i], [wanted if m else 0.0 for m in row], 1e-13)


# ---- what must never reach a credit; what must come out


FUNCTIONS = {  # every function of a rectangle, as a function of (x, value, mask, group)
    **{f"normalise {m} {s}": lambda x, value, mask, group, m=m, s=s: normalise(x, mask, group, m, s)
       for m, s in itertools.product(("group", "batch", "none"), repeat=2)},
    "leave one out": lambda x, value, mask, group: normalise(x, mask, group, **RLOO),
    "gae": lambda x, value, mask, group: gae(x, value, mask, 0.9, 0.8),
    "returns_to_go": lambda x, value, mask, group: returns_to_go(x, mask, 0.9),
    "row_mean": lambda x, value, mask, group: row_mean(x, mask),
}  # fmt: skip
SMALL = (
    values([[0, 1, 0, -2], [0, 0.5, 3, 0], [0, 0, 0, 0]]), values([[0, 0.1, 0, 0.2], [0, -0.3, 1, 0], [0, 0, 0, 0]]),
    torch.tensor([[0, 1, 0, 1], [0, 1, 1, 0], [0, 0, 0, 0]]).bool(),
)  # fmt: skip
PLACING = {
    "placed": lambda x, value, mask, group: placed(x, mask),
    "at_end": lambda x, value, mask, group: at_end(x[:, 0], mask),
}


@pytest.mark.parametrize("garbage", [NAN, math.inf, -math.inf])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_nothing_off_the_mask_reaches_a_credit_or_its_gradient(name, garbage):
    x, value, mask = SMALL
    results = []
    for inputs in ([x, value], [x.where(mask, garbage), value.where(mask, garbage)]):
        leaves = [x.clone().requires_grad_() for x in inputs]
        credit = FUNCTIONS[name](*leaves, mask, torch.tensor([0, 0, 1]))
        gradient = torch.autograd.grad((credit * (1 + torch.arange(4.0))).sum(), leaves, allow_unused=True)
        results.append([credit.detach(), *(g for g in gradient if g is not None)])
    for wanted, got in zip(*results, strict=True):
        assert torch.equal(wanted, got)
        assert not got[~mask].any() and bool(got[mask].any())


@pytest.mark.parametrize("name", [*FUNCTIONS, *PLACING])
def test_the_gradient_of_a_credit_is_the_slope_of_its_value(name):
    """Central differences; nobody trains through a credit, but nothing in one is detached either."""
    x, value, mask = SMALL
    f = partial((FUNCTIONS | PLACING)[name], value=value, mask=mask, group=torch.tensor([0, 0, 1]))
    assert torch.autograd.gradcheck(f, x.clone().requires_grad_(), eps=1e-6, rtol=1e-6)
    if name == "gae":
        of_value = partial(gae, x, mask=mask, gamma=0.9, lam=0.8)
        assert torch.autograd.gradcheck(of_value, value.clone().requires_grad_(), eps=1e-6, rtol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [*FUNCTIONS, *PLACING])
def test_whatever_comes_in_what_comes_out_is_finite(name, dtype):
    """Rewards of ±1e4 beside 1e-4, rows and batches without a token, one sample, no row; the dtype is the rewards'."""
    x = values([[1e4, -1e4, 1e-4], [0, 0, 0], [1, 1, 1], [-1e4, 0, 3]], dtype)
    mask = torch.tensor([[False, True, True], [False, True, False], [False, False, False], [True, True, True]])
    group = torch.tensor([5, 5, 2, 8])
    every, one, masked, none = slice(None), slice(0, 1), slice(2, 3), slice(0, 0)
    for rows, m in ((every, mask), (one, mask), (masked, mask), (none, mask), (every, mask & False)):
        got = (FUNCTIONS | PLACING)[name](x[rows], x[rows] / 2, m[rows], group[rows])
        assert got.dtype == dtype and got.shape == x[rows].shape
        assert bool(got.isfinite().all()) and not got[~m[rows]].any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_statistics_of_no_row_are_no_number_and_of_one_row_finite(dtype):
    for rows in (0, 1):
        reward, group = torch.full((rows,), 1e4, dtype=dtype), torch.zeros(rows, dtype=torch.int64)
        for got in (group_sum(reward, group), group_size(reward, group), group_std(reward, group)):
            assert got.shape == (rows,) and got.dtype == dtype and bool(got.isfinite().all())
        assert constant(reward, reward, group).tolist() == [True] * rows


def test_rewards_are_never_overwritten():
    x, value, mask = (a.clone() for a in SMALL)
    for f in (FUNCTIONS | PLACING).values():
        f(x, value, mask, torch.tensor([0, 0, 1]))
        assert torch.equal(x, SMALL[0]) and torch.equal(value, SMALL[1])


# ---- on average: every group that can be drawn


def named(name, reward, group):
    """[B] The advantages under this name."""
    return reward if name == "none" else of_rewards(reward, group, **{"leave_one_out": RLOO, "centred": DR_GRPO}[name])


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
    adv = named(name, reward, group)
    per_token = loss.reinforce(logp.reshape(-1, 1), adv[:, None], torch.ones(adv[:, None].shape, dtype=torch.bool))
    got = torch.autograd.grad((chance * per_token.view(-1, size).mean(1)).sum(), theta)[0]

    share = (size - 1) / size if name == "centred" else 1.0
    torch.testing.assert_close(got, share * wanted, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("lam", [0.0, 0.5, 1.0])
def test_with_the_exact_critic_gae_has_the_exact_gradient(lam):
    """E[Σ_t Â_t ∇log π_t] = ∇E[R] for every λ if V is the policy's own; for λ = 1 for any V of what came before.

    By enumeration of answers of two tokens out of three; a tool's token, which nobody samples, stands between them.
    """
    first, second = values([0.3, -1.0, 0.5]).requires_grad_(), values([[0.1, 1, -1], [2, 0, 0.5], [0, -0.7, 0.2]])
    second.requires_grad_()
    worth = values([[1, 0, -2], [0.5, 3, 0], [-1, 0.25, 2]])
    a, b = first.log_softmax(0), second.log_softmax(1)
    chance = (a[:, None] + b).exp()
    wanted = torch.autograd.grad(-(chance * worth).sum(), (first, second), retain_graph=True)

    answers = torch.cartesian_prod(torch.arange(3), torch.arange(3))
    i, j = answers.T
    logp = torch.stack([a[i], values([NAN] * 9), b[i, j]], 1)
    mask = torch.tensor([[True, False, True]]).expand(9, 3)
    after = (b.exp() * worth).sum(1).detach()  # V after each first token
    exact = torch.stack([(a.exp() * after).sum().detach().expand(9), values([NAN] * 9), after[i]], 1)
    other = torch.stack([values([0.7] * 9), values([NAN] * 9), values([1.0, -2.0, 3.0])[i]], 1)
    for value in [exact] if lam < 1 else [exact, other]:
        adv = gae(at_end(worth[i, j], mask), value, mask, 1.0, lam)
        per_token = loss.reinforce(logp, adv, mask).sum(1)
        got = torch.autograd.grad((chance[i, j].detach() * per_token).sum(), (first, second), retain_graph=True)
        for g, w in zip(got, wanted):
            close(g, w, 1e-12)


def test_the_baseline_lowers_the_variance():
    """Rewards 10 and 11: without a baseline the gradient's second moment is over a hundred times as large."""
    theta, worth = values([0.2, -0.2]), values([10.0, 11.0])
    pi = theta.softmax(0)
    moment = {}
    for name in ("none", "leave_one_out"):
        moment[name] = 0.0
        for a, b in itertools.product(range(2), repeat=2):
            adv = named(name, worth[[a, b]], torch.zeros(2, dtype=torch.int64))
            grad = sum(adv[i] * (torch.eye(2, dtype=torch.float64)[x] - pi) for i, x in enumerate((a, b))) / 2
            moment[name] += float(pi[a] * pi[b] * grad.square().sum())
    assert moment["none"] > 100 * moment["leave_one_out"] > 0
