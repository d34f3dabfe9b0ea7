"""The update as a whole: each row is its equation, no layout of the batch changes it, rows become each other."""

import itertools
import math
import subprocess
import sys
from dataclasses import replace
from math import fsum
from typing import get_args, get_type_hints

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nanorl import algorithms
from nanorl.algorithms import ALGORITHMS, chosen
from nanorl.axes import Axes, Norm
from nanorl.config import Config
from nanorl.loss import MODES, weights
from nanorl.objective import READS, Algorithm, clipped, credit, importance, reinforce, sapo
from nanorl.policy import Out
from nanorl.sample import Batch, collate
from tests import rows
from tests.worlds import (LIMIT, LONGEST, NAN, Said, Slopes, algorithm, assert_same, changed, descend, group, said,
                          sample, scrambled, slopes, world)  # fmt: skip

OWN = {name: row.axes.aggregation for name, row in ALGORITHMS.items()}
WAYS = [(name, mode) for i, name in enumerate(ALGORITHMS) for mode in dict.fromkeys((OWN[name], MODES[i % 8]))]
SPLIT_FREE = [(name, mode) for name, mode in WAYS if mode != "bnpo"]
RATIOS = [name for name, row in ALGORITHMS.items() if row.has_ratio]
KL_FREE = [name for name, row in ALGORITHMS.items() if not row.axes.kl_weight]
ADDS_UP = [name for name in KL_FREE if ALGORITHMS[name].axes.m2_threshold is None]  # takes a KL and an entropy term
UNWHITENED = {"adv_norm.mean_level": "none", "adv_norm.std_level": "none"}


def update(batch: Batch, algo: Algorithm, tokens: int = 10**6):
    """Loss and gradient in the model's parameters of one optimizer step, in micro-batches of so many tokens."""
    return descend(batch.weighted(algo.axes.aggregation, LIMIT).split(tokens), algo)


def trained(batch: Batch, algo: Algorithm) -> set[int]:
    """The rows that cost a forward pass."""
    return {row for micro in batch.weighted(algo.axes.aggregation, LIMIT).split(20) for row in micro.row.tolist()}


def stale(batch: Batch) -> Batch:
    """The same batch from a sampler four times as far away: coefficients beyond every bound."""
    return replace(batch, logp_behave=batch.logp_prox + 4 * (batch.logp_behave - batch.logp_prox))


def fresh(batch: Batch) -> Batch:
    """The same batch, sampled by π_prox itself."""
    return replace(batch, logp_behave=batch.logp_prox)


def short(batch: Batch) -> Batch:
    """The same batch with one sampled token an answer."""
    return replace(batch, mask=batch.mask & (batch.mask.cumsum(1) == 1))


def assert_equal(got: Slopes, wanted: Slopes, tolerance: float = 1e-10, loss: bool = True) -> None:
    """Two updates have the same slope in everything that was said, and the same loss; the slope is not nothing."""
    assert wanted.logp.norm() > 1e-3
    for a, b in zip(got[not loss :], wanted[not loss :]):
        torch.testing.assert_close(torch.as_tensor(a), torch.as_tensor(b), rtol=tolerance, atol=tolerance / 100)


def unmoved(batch: Batch) -> Batch:
    """The same batch, with nothing earned in the second group."""
    return replace(batch, rewards=batch.rewards.where(batch.group[:, None] != 1, 0.0))


# ---- each row is its equation


def equation(batch: Batch, now: Said, terms: list[rows.Term], mode: str, algo: Algorithm, entropy: float = 0.0,
             gamma: float = 1.0, lam: float = 1.0) -> Slopes:  # fmt: skip
    """The update by loops: these terms added up, an entropy bonus and the loss of ppo's critic beside them."""
    loss, slope = rows.added_up(batch, rows.answers(batch, now.logp), terms, mode, LIMIT)
    weight = weights(mode, batch.mask.double(), batch.group, LIMIT)
    value, bonus = torch.zeros_like(weight), -entropy * weight
    losses = [loss, float((bonus * now.entropy.where(batch.mask, 0.0)).sum())]
    if algo.critic:
        answers = rows.answers(batch, now.logp)
        for i, (a, targets) in enumerate(zip(answers, rows.ppo_targets(answers, gamma, lam))):
            for t, old, target in zip(a.at, a.value, targets):
                error, pull = rows.critics(float(now.value[i, t]), old, target)
                losses.append(float(weight[i, t]) * error)
                value[i, t] = weight[i, t] * pull
    return Slopes(fsum(losses), torch.tensor(slope, dtype=torch.float64), bonus, value)


@pytest.mark.parametrize("seed, done", [(5, 0.5), (6, 0.25), (7, 0.0)])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_row_is_its_equation_in_loss_and_gradient(name, seed, done):
    """In every mode of aggregation; a sampler far away, π_prox apart from π_θ (at done = 0 it is π_θ), clips at work.

    A row of the table without an equation in rows.py fails.
    """
    mode, row = rows.ROWS[name]
    assert OWN[name] == mode
    batch = replace(stale(world(seed)), done=done)
    now = said(batch)
    batch = batch if done else replace(batch, logp_prox=now.logp)
    terms = list(row(rows.answers(batch, now.logp)))
    for mode in MODES:
        algo = algorithm(name, aggregation=mode)
        assert_equal(slopes(batch, algo, now), equation(batch, now, terms, mode, algo))


def test_the_oracle_stands_at_every_kink():
    """Each clip cuts some token and leaves some, on each side; so do the bound of π_prox/μ, M2PO's and the critic's."""
    batch = stale(world(5))
    now = said(batch)
    answers = rows.answers(batch, now.logp)
    for name in ("grpo", "dr_grpo", "liteppo", "dapo", "gspo", "gspo_token", "ppo", "m2po", "decoupled_ppo"):
        pulls = [slopes[t] for term in rows.ROWS[name][1](answers) for t, (_, slopes) in enumerate(term)]
        assert any(pulls) and not all(pulls), name
    coefficients = [c for a in answers for c in rows.stale(a, "token", "mask", high=5.0)]
    assert any(coefficients) and not all(coefficients)
    assert ((now.value - batch.value).abs() > 0.5)[batch.mask].float().mean() not in (0.0, 1.0)


@pytest.mark.parametrize("gamma, lam", [(1.0, 0.9), (0.9, 1.0), (0.8, 0.7), (0.9, 0.0)])
def test_ppo_is_its_equation_at_every_discount(gamma, lam):
    algo = algorithm("ppo", gamma=gamma, **{"critic.gae_lambda": lam})
    batch = world(5)
    now = said(batch)
    terms = list(rows.ppo(rows.answers(batch, now.logp), gamma, lam))
    assert_equal(slopes(batch, algo, now), equation(batch, now, terms, "token-mean", algo, gamma=gamma, lam=lam))


@pytest.mark.parametrize("name, least", [("decoupled_ppo", 5.0), ("decoupled_loglinear", 5.0), ("m2po", math.exp(0.2))])
def test_the_bounds_of_stale_tokens_stand_where_the_rows_have_them(name, least):
    """π_prox/μ a thousandth below the bound: all tokens count; above: none. M2PO's tokens have moved with A."""
    batch, now, algo = replace(world(5), done=0.0), said(world(5)), ALGORITHMS[name]
    sign = ALGORITHMS["grpo"].advantage(batch)[0].sign() if name == "m2po" else 1.0
    for factor, count in ((1.001, 0), (0.999, int(ALGORITHMS["grpo"].advantage(batch)[0].count_nonzero()))):
        away = math.log(least) * factor if name == "m2po" else math.log(least * factor)
        moved = replace(batch, logp_prox=now.logp, logp_behave=now.logp - sign * away)
        assert slopes(moved, algo, now).logp.count_nonzero() == count


@pytest.mark.parametrize("estimator", ["k2", "k3", "k3+", "rk3"])
@pytest.mark.parametrize("name", ADDS_UP)
def test_kl_and_entropy_are_added_to_every_row(name, estimator):
    """β·KL − c·H beside the row's own loss, outside of its clip and its coefficient; rk3's ratio is that to the sampler."""
    algo = algorithm(name, kl_weight=0.3, kl_estimator=estimator, entropy_weight=0.2)
    batch = stale(world(5))
    now = said(batch)
    answers = rows.answers(batch, now.logp)
    terms = [rows.plus(term, 0.3, rows.divergence(a, estimator)) for a, term in zip(answers, rows.ROWS[name][1](answers))]
    assert_equal(slopes(batch, algo, now), equation(batch, now, terms, OWN[name], algo, entropy=0.2))


@pytest.mark.parametrize("level", ["sequence", "joint"])
@pytest.mark.parametrize("seed", [5, 6, 7])
def test_a_ratio_of_the_whole_answer_multiplies_its_mean_advantage(seed, level):
    """All of the answer is kept or clipped at once, also where its tokens have advantages of their own."""
    algo, batch = algorithm("ppo", ratio_level=level), world(seed)
    now, terms = said(batch), []
    now = now._replace(logp=batch.logp_prox + 3 * (now.logp - batch.logp_prox))  # far beyond the clip
    answers = rows.answers(batch, now.logp)
    credit = rows.whitened([rows.generalised(rows.less_kl(a, a.earned, 0.1), a.value, 1.0, 1.0) for a in answers])
    for a, adv in zip(answers, credit):
        n = max(len(a.at), 1)
        share = 1 / n if level == "sequence" else 1.0
        value, slope = rows.clipped(share * fsum(rows.apart(a)), fsum(adv) / n, 0.2, 0.2)
        terms.append(rows.together((value, slope * share), len(a.at)))
    assert_equal(slopes(batch, algo, now), equation(batch, now, terms, "token-mean", algo))


CORRECTED = [name for name in RATIOS if name != "sapo" and ALGORITHMS[name].axes.prox == "recompute"]


@pytest.mark.parametrize("name", CORRECTED)
def test_the_coefficient_multiplies_the_surrogate_alone(name):
    """ρ·surrogate + β·KL: the correction does not disappear with another option, and touches nothing else."""
    batch = stale(world(5))
    now, in_reward = said(batch), ALGORITHMS[name].axes.kl_in == "reward"
    answers = rows.answers(batch, now.logp)
    base = {"decoupled_ppo": rows.grpo, "grpo_deepseekmath": rows.grpo}.get(name, rows.ROWS[name][1])
    surrogate, kl = list(base(answers)), {} if in_reward else dict(kl_weight=0.3, kl_estimator="k2")
    for level, kind, low, high in (
        ("token", "truncate", 0.0, math.inf), ("token", "truncate", 0.5, 2.0), ("token", "mask", 0.5, 2.0),
        ("sequence", "truncate", 0.5, 1.5), ("sequence", "mask", 0.5, 2.0), ("joint", "truncate", 0.1, 3.0),
        ("joint", "mask", 0.0, 3.0),
    ):  # fmt: skip
        correction = {"kind": kind, "level": level, "low": low, "high": high}
        algo = algorithm(name, **{f"correction.{axis}": value for axis, value in correction.items()}, **kl)
        terms = [rows.times(term, rows.stale(a, level, kind, low, high)) for a, term in zip(answers, surrogate)]
        if not in_reward:
            terms = [rows.plus(term, 0.3, rows.divergence(a, "k2")) for a, term in zip(answers, terms)]
        assert_equal(slopes(batch, algo, now), equation(batch, now, terms, OWN[name], algo))


# ---- no layout changes the gradient in the model's parameters


@pytest.mark.parametrize("name, mode", WAYS)
def test_padding_and_its_garbage_change_no_gradient(name, mode):
    """Other tokens and NaN in the padding of ids, log-probs, values, advantages, and more of it."""
    algo, seed = algorithm(name, aggregation=mode, entropy_weight=0.1), MODES.index(mode)
    batch = world(seed)
    assert_same(update(credit(scrambled(batch, columns=3), algo), algo), update(credit(batch, algo), algo))
    assert_same(update(scrambled(credit(batch, algo), columns=3), algo), update(credit(batch, algo), algo))


@pytest.mark.parametrize("name, mode", WAYS)
def test_the_order_of_rows_and_the_names_of_groups_change_no_gradient(name, mode):
    algo, seed = algorithm(name, aggregation=mode), MODES.index(mode)
    batch = world(seed)
    there = batch.select(torch.randperm(len(batch), generator=torch.Generator().manual_seed(seed)))
    there = replace(there, group=90 - 7 * there.group)
    assert_same(update(credit(there, algo), algo), update(credit(batch, algo), algo))


@pytest.mark.parametrize("name, mode", SPLIT_FREE)
def test_no_split_into_micro_batches_or_ranks_changes_the_gradient(name, mode):
    """By token budget, down to one row each; into parts that no budget would make; among ranks that split their own.

    Ranks add their gradients; the weights are made on all of their rows.
    """
    algo, seed = algorithm(name, aggregation=mode, entropy_weight=0.1), MODES.index(mode)
    batch = credit(world(seed), algo)
    whole = update(batch, algo)
    assert_same(update(batch, algo, tokens=20), whole)
    assert_same(update(batch, algo, tokens=1), whole)
    order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(seed))
    parts = [batch.weighted(mode, LIMIT).select(rows) for rows in order.split([1, 4, 3])]
    assert_same(descend(parts, algo), whole)
    ranks = [list(part.split(tokens)) for part, tokens in zip(parts, (1, 20, 10**6))]
    (loss, gradient), *others = (descend(rank, algo) for rank in ranks)
    assert_same((loss + sum(r[0] for r in others), gradient + sum(r[1] for r in others)), whole)


@pytest.mark.parametrize("name", ["grpo", "gspo", "ppo"])
def test_bnpo_is_the_mean_over_micro_batches_of_their_token_means(name):
    """By its definition; so it is the token-mean in one micro-batch, and something else in several."""
    bnpo, mean = algorithm(name, aggregation="bnpo"), algorithm(name, aggregation="token-mean")
    batch = world(3)
    batch = credit(batch.select(batch.mask.any(1).nonzero()[:, 0]), bnpo)  # every micro-batch has tokens
    for tokens in (12, 30):
        micros = list(batch.weighted("bnpo", LIMIT).split(tokens))
        assert sum(int(m.mask.sum()) for m in micros) == int(batch.mask.sum()) and len(micros) > 1
        by_hand = [replace(m, weight=(m.mask & m.keep).double() / int(m.mask.sum()) / len(micros)) for m in micros]
        assert_same(update(batch, bnpo, tokens), descend(by_hand, bnpo))
    whole, split = update(batch, bnpo), update(batch, bnpo, tokens=12)
    assert_same(whole, update(batch, mean))
    assert (whole[1] - split[1]).norm() > 1e-3 * whole[1].norm()


# ---- rows that contribute nothing

QUIET = [*KL_FREE, "diagnostic"]  # its KL is in the reward: nothing but the surrogate stands in its loss


@pytest.mark.parametrize("name", QUIET)
def test_rows_without_advantage_are_left_out_and_the_gradient_does_not_notice(name):
    algo, batch = algorithm(name), unmoved(world(4))
    batch = credit(batch, algo)
    if name == "diagnostic":  # whitened twice over the batch, no advantage is 0 by itself
        batch = replace(batch, adv=batch.adv.where(batch.group[:, None] != 1, 0.0))
        batch = replace(batch, keep=algo.keep(batch))
    silent = {i for i in range(len(batch)) if not batch.adv[i].any()}
    everything = replace(batch, keep=batch.keep | (batch.mask & batch.adv.eq(0)))
    assert len(silent) >= 2 and trained(batch, algo) == set(range(len(batch))) - silent
    assert trained(everything, algo) == {i for i in range(len(batch)) if batch.mask[i].any()}
    assert_same(update(batch, algo), update(everything, algo))


@pytest.mark.parametrize("term", [dict(kl_weight=0.1), dict(entropy_weight=0.1)])
@pytest.mark.parametrize("name", ADDS_UP)
def test_with_a_kl_or_an_entropy_term_rows_without_advantage_stay_and_matter(name, term):
    algo = algorithm(name, **term)
    batch = credit(unmoved(world(4)), algo)
    assert trained(batch, algo) == {i for i in range(len(batch)) if batch.mask[i].any()}
    without = update(replace(batch, keep=batch.keep & batch.adv.ne(0)), algo)
    got = update(batch, algo)
    assert (got[1] - without[1]).norm() > 1e-3 * got[1].norm()


def test_the_critic_learns_from_rows_without_advantage():
    """All is as it was expected, and every token is kept all the same."""
    batch, algo = world(4), algorithm("ppo", kl_weight=0.0, **UNWHITENED)
    nothing = torch.zeros_like(batch.rewards)
    batch = credit(replace(batch, rewards=nothing, value=nothing), algo)
    assert not batch.adv.any() and torch.equal(batch.keep, batch.mask)


def test_the_weights_of_the_others_count_the_rows_that_are_left_out():
    """Two groups of equal lengths, one without contrast: the mean over all tokens is half of that over the others."""

    def loss(*rewards):
        rows = [group(*(sample((1, 2, 3), (0, 1, 1), r) for r in pair), number=i) for i, pair in enumerate(rewards)]
        batch = collate(rows)
        zeros = torch.zeros(batch.mask.shape)
        return slopes(batch, algorithm("grpo"), Said(zeros, zeros, zeros)).logp[:2]

    torch.testing.assert_close(loss((1, 0), (1, 1)), loss((1, 0)) / 2)
    assert loss((1, 0)).any()


def test_a_token_that_m2po_drops_leaves_the_others_weights():
    """The loss is divided by what was sampled, not by what is left."""
    batch, algo = stale(world(5)), algorithm("m2po")
    now = said(batch)
    all_of_them = slopes(batch, chosen("m2po", replace(algo.axes, m2_threshold=1e9)), now).logp
    some = slopes(batch, algo, now).logp
    assert 0 < some.count_nonzero() < all_of_them.count_nonzero()
    torch.testing.assert_close(some, all_of_them.where(some != 0, 0.0), rtol=1e-12, atol=0)


# ---- where nothing has moved yet


@pytest.mark.parametrize("name", ALGORITHMS)
def test_before_the_first_update_every_row_is_reinforce(name):
    """π_θ = π_prox = μ: the slope is −weight·A at each token, and for a ratio of the whole answer the sum over it.

    The sum of a row's slopes is −Σ weight·A for all, but for the geometric mean, of which each token is 1/n.
    """
    algo = algorithm(name, **({} if ALGORITHMS[name].axes.kl_in == "reward" else dict(kl_weight=0.0)))
    batch, now = world(6), said(world(6))
    batch = replace(batch, done=0.0, logp_behave=now.logp, logp_prox=now.logp if name == "m2po" else None)
    made = credit(batch, algo).weighted(algo.axes.aggregation, LIMIT)
    wanted, level = -made.weight * made.adv, algo.axes.ratio_level
    if level in ("sequence", "joint"):
        wanted = wanted.sum(1, keepdim=True) * made.mask
        wanted = wanted / made.mask.sum(1, keepdim=True).clamp(min=1) if level == "sequence" else wanted
    got = slopes(batch, algo, now).logp
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-14)
    assert got.any()


# ---- on average: every group of answers that can be drawn

ANSWERS = [(0,), (1, 0), (1, 1)]  # 0 ends; two tokens are the limit
WORTH = [1.0, -0.5, 2.0]
REFERENCE = torch.tensor([[0.1, 0.9], [-0.4, -1.0]], dtype=torch.float64).log_softmax(1)


def expected_gradient(algo: Algorithm, size: int = 1, value: tuple[float, float] = (0.0, 0.0)):
    """E[∇loss] of one update on a group of this size, by enumeration of all 3^size groups; and ∇(β·KL − E[R]).

    The policy is a table of logits: at the first token, and after a 1. So is the critic: a number for each of these.
    """
    theta = torch.tensor([[0.4, -0.3], [-0.6, 0.2]], dtype=torch.float64, requires_grad=True)
    table, worth = theta.log_softmax(1), torch.tensor([value], dtype=torch.float64)
    answer_logp = [sum(table[t, token] for t, token in enumerate(answer)) for answer in ANSWERS]
    answer_ref = [sum(REFERENCE[t, token] for t, token in enumerate(answer)) for answer in ANSWERS]
    beta = algo.axes.kl_weight
    objective = sum(p.exp() * (r - beta * (p - q)) for p, q, r in zip(answer_logp, answer_ref, WORTH))
    total = torch.zeros((), dtype=torch.float64)
    for picks in itertools.product(range(len(ANSWERS)), repeat=size):
        tries = [sample((1, *ANSWERS[k]), [False] + [True] * len(ANSWERS[k]), WORTH[k]) for k in picks]
        batch = collate([group(*tries)])
        columns = [max(t - 1, 0) for t in range(batch.ids.shape[1])]
        logp, ref = (torch.stack([x[c, batch.ids[:, t]] for t, c in enumerate(columns)], 1) for x in (table, REFERENCE))
        batch = replace(batch, rewards=batch.rewards.double(), logp_behave=logp.detach(), logp_ref=ref,
                        value=worth[:, columns].expand(batch.mask.shape))  # fmt: skip
        batch = credit(batch, algo).weighted(algo.axes.aggregation, LIMIT)
        chance = sum(answer_logp[k] for k in picks).exp().detach()
        total = total + chance * (batch.weight * algo.loss(Out(logp, None, None), batch)).sum()
    return torch.autograd.grad(total, theta, retain_graph=True)[0], -torch.autograd.grad(objective, theta)[0]


def assert_expected(algo: Algorithm, size: int = 1, factor: float = 1.0, value: tuple[float, float] = (0.0, 0.0)):
    """E[∇loss] is this factor times the exact gradient."""
    got, wanted = expected_gradient(algo, size, value)
    assert wanted.norm() > 0.1
    torch.testing.assert_close(got, wanted * factor, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("size", [2, 3])
def test_these_rows_have_the_exact_gradient_of_expected_reward(size):
    """Answers of several lengths. The group's own mean takes 1/G of it away, a constant length has no pull."""
    assert_expected(algorithm("rloo"), size)
    assert_expected(algorithm("reinforce"), size)
    assert_expected(algorithm("reinforce_baseline"), size, (size - 1) / size)
    assert_expected(algorithm("dr_grpo"), size, (size - 1) / (size * LIMIT))


@pytest.mark.parametrize("name, mode", itertools.product(["rloo", "reinforce"], ["token-mean", "seq-mean-token-mean"]))
def test_dividing_by_an_answers_length_bends_the_gradient(name, mode):
    bent, wanted = expected_gradient(algorithm(name, aggregation=mode), 2)
    assert (bent / bent.norm() - wanted / wanted.norm()).norm() > 0.01


@given(st.floats(-3, 3), st.floats(-3, 3), st.sampled_from([0.0, 0.3]))
def test_ppo_with_any_function_of_the_past_as_critic_is_unbiased(first, second, beta):
    """λ = 1 and no whitening: the value is a baseline, right or wrong; so with the KL in the reward."""
    algo = algorithm("ppo", aggregation="seq-mean-token-sum", kl_weight=beta, **UNWHITENED)
    assert_expected(algo, 1, value=(first, second))


@pytest.mark.parametrize("change", [{"critic.gae_lambda": 0.5}, {"gamma": 0.7}])
def test_a_wrong_critic_bends_ppo_below_lambda_1(change):
    algo = algorithm("ppo", aggregation="seq-mean-token-sum", kl_weight=0.0, **UNWHITENED, **change)
    got, wanted = expected_gradient(algo, 1, (0.7, -1.3))
    assert (got - wanted).norm() > 0.05 * wanted.norm()


@pytest.mark.parametrize("name", ["reinforce", "rloo"])
@pytest.mark.parametrize("beta", [0.1, 2.0])
def test_k1_in_the_reward_has_the_gradient_of_the_kl(name, beta):
    """E[∇loss] = ∇(β·KL(π‖π_ref) − E[R]); with rewards of the whole answer it needs its own tokens alone.

    A reward that is normalised is one number a row, before the KL is taken out, so the KL has no baseline there.
    """
    assert_expected(algorithm(name, kl_weight=beta, kl_in="reward", kl_estimator="k1"), 2)


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_other_estimators_in_the_reward_have_another_gradient(estimator):
    algo = algorithm("reinforce", kl_weight=2.0, kl_in="reward", kl_estimator=estimator)
    got, wanted = expected_gradient(algo, 1)
    assert (got - wanted).norm() > 0.05 * wanted.norm()


# ---- rows become each other


def same(one: Algorithm, other: Algorithm, batch: Batch, tolerance: float = 1e-10, **how) -> None:
    """Two rows are one update of this batch."""
    now = said(batch)
    assert_equal(slopes(batch, one, now), slopes(batch, other, now), tolerance, **how)


GRPO = ALGORITHMS["grpo"]


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
@pytest.mark.parametrize("seed", [1, 2])
def test_rows_of_fresh_samples_are_grpo(seed, mode):
    """With μ = π_prox there is nothing to correct; a fresh token's π_prox is its μ (decoupled_loglinear)."""
    batch, grpo = fresh(world(seed)), algorithm("grpo", aggregation=mode)
    same(algorithm("decoupled_ppo", aggregation=mode), grpo, batch)
    new = replace(batch, version=torch.where(batch.mask, batch.step, -1))
    same(algorithm("decoupled_loglinear", aggregation=mode), grpo, new)
    now = said(batch)
    first = replace(batch, done=0.0, logp_behave=now.logp)
    assert_equal(slopes(first, algorithm("decoupled_loglinear", aggregation=mode), now), slopes(first, grpo, now))
    same(algorithm("m2po", aggregation=mode), algorithm("trpo", aggregation=mode), batch)


@pytest.mark.parametrize("seed", [1, 2])
def test_rows_with_the_same_axes_are_the_same(seed):
    batch = stale(world(seed))
    same(algorithm("dapo", eps_high=0.2, **{"shaping.overlong_penalty": 0.0}), GRPO, batch)
    same(algorithm("decoupled_ppo", **{"correction.kind": "none"}), GRPO, batch)
    same(algorithm("grpo_deepseekmath", kl_weight=0.0), algorithm("grpo", aggregation="seq-mean-token-mean"), batch)
    same(algorithm("grpo", dual_clip=1e9), GRPO, batch)
    same(algorithm("trpo"), algorithm("grpo", eps_low=1 - 1e-9, eps_high=1e9), batch)
    same(replace(GRPO, surrogate=importance), algorithm("trpo"), batch)
    same(algorithm("liteppo"), GRPO, replace(batch, group=torch.zeros_like(batch.group)))
    same(algorithm("grpo", **{"reward_norm.eps_in": "variance", "reward_norm.eps": 1e-14}), GRPO, batch, 1e-4)


@pytest.mark.parametrize("seed", [1, 3])
def test_on_answers_of_one_token_the_answers_ratio_is_the_tokens(seed):
    batch = short(world(seed))
    token = dict(eps_low=3e-4, eps_high=4e-4, aggregation="seq-mean-token-mean")
    same(ALGORITHMS["gspo"], algorithm("grpo", **token), batch)
    same(ALGORITHMS["gspo_token"], algorithm("grpo", **token), batch)
    page = ALGORITHMS["grpo_areal_page"]
    same(page, chosen("grpo_areal_page", replace(page.axes, ratio_level="token")), batch)
    for level in ("sequence", "sequence-token", "joint"):
        same(algorithm("ppo", ratio_level=level), ALGORITHMS["ppo"], batch)


@pytest.mark.parametrize("seed", [1, 2])
def test_gspo_is_gspo_token_where_an_answer_has_one_advantage(seed):
    """The same slope at every token, and the same loss; with an advantage of each token's own, another."""
    same(ALGORITHMS["gspo"], ALGORITHMS["gspo_token"], world(seed))
    token, answer = (algorithm("ppo", ratio_level=level) for level in ("sequence-token", "sequence"))
    now = said(world(seed))
    one, other = (slopes(world(seed), algo, now).logp for algo in (token, answer))
    assert (one - other).norm() > 1e-2 * other.norm()


@pytest.mark.parametrize("size", [2, 4, 8])
def test_rloo_is_g_over_g_minus_1_of_reinforce_with_the_groups_mean(size):
    batch = replace(world(1), group=torch.arange(8) // size)
    now = said(batch)
    loss, one, *_ = slopes(batch, ALGORITHMS["rloo"], now)
    other = slopes(batch, ALGORITHMS["reinforce_baseline"], now)
    assert loss == pytest.approx(other.loss * size / (size - 1), rel=1e-11)
    torch.testing.assert_close(one, other.logp * (size / (size - 1)), rtol=1e-11, atol=1e-13)
    assert one.any()


@pytest.mark.parametrize("seed", [1, 2])
def test_ppo_with_a_critic_that_knows_nothing_is_reinforces_return_whitened(seed):
    batch = replace(world(seed), value=torch.zeros_like(world(seed).value))
    ppo, plain = algorithm("ppo", kl_weight=0.0), ALGORITHMS["reinforce"]
    whitened = algorithm("reinforce", adv_norm=ALGORITHMS["ppo"].axes.adv_norm)
    for got, wanted in zip(ppo.advantage(batch), (whitened.advantage(batch)[0], plain.advantage(batch)[0])):
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-14)
        assert got.any()
    diagnostic = algorithm("diagnostic", reward_norm=Norm(), kl_weight=0.1)
    torch.testing.assert_close(ALGORITHMS["ppo"].advantage(batch)[0], diagnostic.advantage(batch)[0])


@pytest.mark.parametrize("tau", [1e-3, 1e-6])
def test_sapo_without_temperature_is_the_bare_ratio(tau):
    """τ → 0: the gate is a straight line; gradients only, its value runs away."""
    bare = replace(ALGORITHMS["sapo"], surrogate=importance)
    same(algorithm("sapo", tau_pos=tau, tau_neg=tau), bare, world(1), tau, loss=False)


# ---- the KL


@pytest.mark.parametrize("name", ALGORITHMS)
def test_without_a_reference_there_is_no_kl_term(name):
    """No logp_ref, or one of NaN, is no term, not a bonus on log π; with a weight and no reference it cannot run."""
    batch, algo = world(10), algorithm(name, kl_weight=0.0)
    now = said(batch)
    wanted = slopes(batch, algo, now)
    for ref in (None, torch.full_like(batch.logp_ref, NAN)):
        assert_equal(slopes(replace(batch, logp_ref=ref), algo, now), wanted, 1e-15)
    with pytest.raises(AttributeError):
        slopes(replace(batch, logp_ref=None), algorithm(name, kl_weight=0.1), now)


@pytest.mark.parametrize("name", QUIET)
def test_the_kl_term_is_linear_in_its_weight_and_nothing_where_the_policies_agree(name):
    batch = world(10)
    now = said(batch)
    way = dict(kl_in="loss", kl_estimator="k2", **UNWHITENED)
    none, one, two = (slopes(batch, algorithm(name, kl_weight=w, **way), now) for w in (0.0, 0.1, 0.2))
    torch.testing.assert_close(two.logp - one.logp, one.logp - none.logp, rtol=1e-10, atol=1e-12)
    agreed = replace(batch, logp_ref=now.logp)
    assert_equal(slopes(agreed, algorithm(name, kl_weight=9.0, **way), now), none)


@pytest.mark.parametrize("name", ["reinforce", "rloo", "ppo", "diagnostic", "grpo", "liteppo"])
def test_the_kl_in_the_reward_is_nothing_where_the_policies_agree_and_comes_after_normalisation(name):
    """β(log μ − log π_ref) is taken out of rewards that are normalised already, so their scale does not scale it."""
    way = dict(kl_in="reward", kl_estimator="k1", **UNWHITENED)
    batch, none = world(10), algorithm(name, kl_weight=0.0, **UNWHITENED)
    algo = algorithm(name, **way, kl_weight=0.5)
    agreed = replace(batch, logp_ref=batch.logp_behave)
    torch.testing.assert_close(algo.advantage(agreed)[0], none.advantage(batch)[0], rtol=1e-12, atol=1e-14)
    taken = none.advantage(batch)[0] - algo.advantage(batch)[0]
    distance = 0.5 * (batch.logp_behave - batch.logp_ref).where(batch.mask, 0.0)
    to_go = distance.flip(1).cumsum(1).flip(1).where(batch.mask, 0.0)
    torch.testing.assert_close(taken, to_go, rtol=1e-10, atol=1e-12)
    assert to_go.any()


def test_the_kl_in_the_reward_is_bounded_for_each_token():
    batch, algo = world(10), algorithm("reinforce", kl_weight=1.0, kl_in="reward", kl_estimator="k1")
    batch = replace(batch, logp_ref=batch.logp_behave - 1000.0, rewards=torch.zeros_like(batch.rewards))
    assert algo.advantage(batch)[0].min() == -10 * batch.mask.sum(1).max()


# ---- credit


@pytest.mark.parametrize("name", ALGORITHMS)
def test_credit_looks_at_rewards_and_leaves_them(name):
    batch = world(9)
    after = credit(batch, algorithm(name))
    assert torch.equal(after.rewards, batch.rewards) and batch.adv is None
    for x in (after.adv, after.returns, after.keep):
        assert x.shape == batch.mask.shape and not x[~batch.mask].any() and x.isfinite().all()
    assert after.keep.dtype == torch.bool and not after.adv.requires_grad


@pytest.mark.parametrize("name, beside", [("ppo", {}), ("reinforce", {"adv_norm.std_level": "batch"})])
def test_the_critics_targets_are_not_whitened(name, beside):
    """Whitening is for the policy: returns stay in units of reward."""
    batch = world(9)
    with_it, without = (algorithm(name, kl_weight=0.0, **{**beside, **more}) for more in ({}, UNWHITENED))
    assert torch.equal(with_it.advantage(batch)[1], without.advantage(batch)[1])
    assert not torch.equal(with_it.advantage(batch)[0], without.advantage(batch)[0])


def test_a_reward_stays_with_the_token_that_earned_it_unless_it_is_normalised():
    """A turn's reward is none of the later turn's; a normalised one is one number a row."""
    tries = [sample((1, 2, 3, 4), (0, 1, 0, 1), rewards=((1, r), (3, 1.0))) for r in (5.0, 3.0)]
    batch = collate([group(*tries)])
    torch.testing.assert_close(ALGORITHMS["reinforce"].advantage(batch)[0],
                               torch.tensor([[0.0, 6.0, 0.0, 1.0], [0.0, 4.0, 0.0, 1.0]]))  # fmt: skip
    torch.testing.assert_close(ALGORITHMS["reinforce_baseline"].advantage(batch)[0],
                               torch.tensor([[0.0, 1.0, 0.0, 1.0], [0.0, -1.0, 0.0, -1.0]]))  # fmt: skip


def test_a_truncated_answer_is_bootstrapped_where_asked_for():
    """V at the cut stands for what was to come: at λ = 1 it is added to every advantage of the row, and to no other."""
    batch = world(9)
    algo, more = algorithm("ppo", kl_weight=0.0, **UNWHITENED), torch.tensor([2.0, 0, 0, -1, 0, 0, 0, 0]).double()
    for got, usual in zip(algo.advantage(replace(batch, bootstrap=more)), algo.advantage(batch)):
        torch.testing.assert_close(got - usual, more[:, None] * batch.mask)


# ---- what is measured

EVERY_WAY = [
    {}, dict(kl_weight=0.1, kl_in="loss", kl_estimator="k2"), dict(kl_weight=0.1, kl_in="reward", kl_estimator="k1"),
    dict(kl_weight=0.0), dict(entropy_weight=0.1), dict(m2_threshold=0.04), dict(prox="loglinear"), dict(prox="behave"),
    {"correction.kind": "truncate"},
]  # fmt: skip


@pytest.mark.parametrize("name, updates", [(n, u) for n in ALGORITHMS for u in (1, 2) if u == 1 or n in RATIOS])
def test_what_is_needed_is_what_is_read(name, updates):
    """Without what it does not need an update is the same; without one thing that it needs it cannot be made."""
    for more in EVERY_WAY:
        assert_needs_are_read(algorithm(name, **more), updates)


def assert_needs_are_read(algo: Algorithm, updates: int) -> None:
    """The theorem above, for a row with these axes."""
    needs = algo.needs(Config(updates_per_batch=updates))
    assert needs <= {"logp_prox", "logp_prox of all rows", "logp_ref", "entropy", "value"}
    axes = algo.axes
    for one, read in (("logp_ref", axes.kl_weight), ("entropy", axes.entropy_weight), ("value", algo.critic)):
        assert (one in needs) == bool(read)
    full, now = replace(world(10), done=0.0 if updates == 1 else 0.5), said(world(10))
    full = replace(full, logp_prox=now.logp) if updates == 1 else full
    empty = {"logp_prox": None, "logp_ref": None, "value": None}

    def made(given) -> Slopes:
        batch = replace(full, **{k: v for k, v in empty.items() if k not in given})
        return slopes(batch, algo, Said(now.logp, now.entropy if "entropy" in given else None, now.value))

    wanted = slopes(full, algo, now)
    assert_equal(Slopes(*(w if g is None else g for g, w in zip(made(needs), wanted))), wanted, 1e-14)
    for one in needs - {"logp_prox of all rows"}:
        with pytest.raises((AttributeError, TypeError)):
            made(needs - {one})


@given(st.sampled_from(list(ALGORITHMS)), st.integers(1, 99), st.none() | st.integers(1, 99))
def test_the_constant_length_is_its_own_or_that_of_the_longest_answer(name, longest, own):
    assert algorithm(name, length_limit=own).limit(Config(max_new_tokens=longest)) == (longest if own is None else own)


WHITENED = {"adv_norm.mean_level": "batch", "adv_norm.std_level": "batch"}


@pytest.mark.parametrize("name, more", [
    *((name, {}) for name in ALGORITHMS), ("grpo", WHITENED), ("grpo", {"entropy_weight": 0.1}),
    ("grpo", {"gamma": 0.9}), ("grpo", {"truncated": "mask"}), ("grpo", {"truncated": "drop"}),
    ("grpo", {"kl_weight": 0.1}), ("grpo", {"kl_weight": 0.1, "ref_model": "M"}),
    ("grpo", {"reward_norm.mean_level": "batch"}), ("grpo", {"reward_norm.std_level": "batch"}),
    ("grpo", {"ratio_level": "joint"}), ("grpo", {"dual_clip": 3.0}), ("dr_grpo", {"reward_norm.leave_one_out": True}),
])  # fmt: skip
def test_the_first_loss_is_what_is_explained(name, more):
    """Where the console says so, and nowhere else: at ratio 1 the loss is −Σ weight·A, and A sums to 0 in each group.

    With a discount an answer has no one advantage. The reference is the policy itself at first, unless one is named.
    """
    algo, batch = algorithm(name, **more), replace(world(6), done=0.0)
    batch = batch.select(batch.mask.any(1).nonzero()[:, 0])  # an answer of no token has its advantage nowhere
    now = said(batch)
    ref = batch.logp_ref if algo.axes.ref_model else now.logp
    batch = replace(batch, logp_behave=now.logp, logp_prox=now.logp, logp_ref=ref, value=0 * now.value)
    made = credit(batch, algo).weighted(algo.axes.aggregation, LIMIT)
    alike = abs(slopes(batch, algo, now).loss + float((made.weight * made.adv).sum())) < 1e-9
    of_answer = made.adv.sum(1) / made.mask.sum(1)
    sums = [abs(float(of_answer[made.group == g].sum())) for g in range(4)]
    assert algo.explained == (alike and max(sums) < 1e-9)


@given(st.integers(1, 4), st.integers(1, 4), st.sampled_from(list(ALGORITHMS)))
def test_later_updates_need_the_old_policy(updates, epochs, name):
    """Also those of a second epoch. M2PO chooses its tokens before the first, so it needs π_prox of all rows."""
    row, m2 = ALGORITHMS[name], name == "m2po"
    needs = row.needs(Config(updates_per_batch=updates, epochs_per_batch=epochs))
    assert ("logp_prox" in needs) == (m2 or (row.has_ratio and row.axes.prox == "recompute" and updates * epochs > 1))
    assert ("logp_prox of all rows" in needs) == m2
    assert row.has_ratio == (row.surrogate is not reinforce)


@pytest.mark.parametrize("name, divides", {
    "ppo": True, "diagnostic": True, "decoupled_ppo": True, "decoupled_loglinear": True, "m2po": True,
    **dict.fromkeys([n for n in ALGORITHMS if n not in (
        "ppo", "diagnostic", "decoupled_ppo", "decoupled_loglinear", "m2po")], False),
}.items())  # fmt: skip
def test_behaviour_says_whose_log_probs_are_read(name, divides):
    """With NaN for the sampler's log-probs a row that does not divide by them is unchanged, and the others are NaN."""
    batch, algo = world(10), algorithm(name)
    now, unknown = said(batch), replace(batch, logp_behave=torch.full_like(batch.logp_behave, NAN))
    assert algo.behaviour == divides
    got, wanted = slopes(unknown, algo, now), slopes(batch, algo, now)
    if divides and name != "m2po":  # comparisons with NaN are false: nothing is kept
        assert math.isnan(got.loss)
    elif not divides:
        assert_equal(got, wanted, 1e-15)


# ---- extremes


def cast(batch: Batch, dtype: torch.dtype) -> Batch:
    """The batch with its numbers in another precision."""
    names = ("rewards", "logp_behave", "logp_prox", "logp_ref", "value")
    return replace(batch, **{name: getattr(batch, name).to(dtype) for name in names})


def finite(batch: Batch, algo: Algorithm, now: Said) -> Slopes:
    """The update, whose loss and slopes are finite."""
    got = slopes(batch, algo, Said(*(x.to(batch.rewards.dtype) for x in now)))
    assert math.isfinite(got.loss) and all(x.isfinite().all() for x in got[1:])
    return got


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_extremes_are_finite_in_loss_and_slope(name, dtype):
    """Log-ratios of ±80 to each of the past, values far off, rewards that differ by a millionth, or not at all."""
    batch = world(11)
    sign = torch.where(torch.arange(batch.mask.shape[1]) % 2 == 0, 1.0, -1.0)
    for a, b, c in itertools.product((80.0, -80.0), repeat=3):
        far = replace(batch, logp_behave=batch.logp_prox + a * sign, logp_ref=batch.logp_prox - b * sign.flip(0))
        now = said(batch)
        for rewards in (batch.rewards, 1e-6 * batch.rewards, 0 * batch.rewards + 1.0):
            moved = Said(batch.logp_prox + c * sign, now.entropy, now.value + a * 100)
            finite(cast(replace(far, rewards=rewards), dtype), algorithm(name, entropy_weight=0.1), moved)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_batches_of_nothing_and_of_one_are_finite(name, dtype):
    batch, algo, now = world(11), algorithm(name), said(world(11))
    nothing = finite(cast(replace(batch, mask=batch.mask & False), dtype), algo, now)
    assert nothing.loss == 0 and not any(x.any() for x in nothing[1:])
    for i in (0, 1, 7):  # the second was cut short before its first token
        rows = torch.tensor([i])
        one = batch.select(rows)
        width = one.mask.shape[1]
        finite(cast(one, dtype), algo, Said(*(x[rows, :width] for x in now)))


# ---- rows


@pytest.mark.parametrize("name", ALGORITHMS)
def test_chosen_binds_the_axes_and_leaves_the_table_alone(name):
    row, batch = ALGORITHMS[name], world(8)
    axes = changed(row.axes, kl_weight=0.2, kl_in="loss", kl_estimator="k2")
    algo = chosen(name, axes, longest=LONGEST)
    decided = {"correction.kind": algo.axes.correction.kind, "shaping": axes.shaping.settled(LONGEST)}
    assert algo.axes == changed(axes, **decided)
    assert ALGORITHMS[name] is row and row.axes != axes
    assert algo.surrogate is row.surrogate and algo.critic == row.critic
    assert slopes(batch, algo, said(batch)).loss != slopes(batch, algorithm(name), said(batch)).loss


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_row_says_what_it_is(name):
    row = ALGORITHMS[name]
    assert row.says.startswith(f"{name}: ") and row.equation and row.differs
    assert "arXiv" in row.paper or "Williams 1992" in row.paper
    assert row.critic == (name == "ppo") and row.natural == (name == "trpo")


def test_every_row_has_an_oracle_and_the_sources_rows_are_there():
    assert set(ALGORITHMS) == set(rows.ROWS) >= {
        "ppo", "grpo", "grpo_deepseekmath", "grpo_areal_page", "dr_grpo", "liteppo", "rloo", "reinforce",
        "reinforce_baseline", "gspo", "gspo_token", "dapo", "sapo", "decoupled_ppo", "decoupled_loglinear", "m2po",
        "trpo", "diagnostic"}  # fmt: skip


def test_the_flag_offers_exactly_the_modes_that_there_are():
    assert get_args(get_type_hints(Axes)["aggregation"]) == MODES


def test_every_mode_of_aggregation_is_a_gradient_of_its_own():
    batch = world(7)
    found = [slopes(batch, algorithm("grpo", aggregation=mode), said(batch)).logp for mode in MODES if mode != "bnpo"]
    for a, b in itertools.combinations(found, 2):
        assert (a - b).norm() > 1e-3 * a.norm()


@pytest.mark.parametrize("name", ALGORITHMS)
def test_what_a_row_does_not_look_at_changes_nothing(name):
    """`unused`: other values of these, all at once, are the same update; and every row but one of them has some."""
    row, batch = ALGORITHMS[name], world(7)
    others = {"eps_low": 0.01, "eps_high": 0.01, "dual_clip": 1.02, "tau_pos": 3.0, "tau_neg": 4.0, "prox": "behave",
              "ratio_level": "joint", "critic.gae_lambda": 0.1, "critic.clip": 0.01, "trpo.delta": 9.0}  # fmt: skip
    unused = {axis: value for axis, value in others.items() if axis.split(".")[0] in row.unused()}
    assert {axis.split(".")[0] for axis in unused} == row.unused()
    got = slopes(batch, algorithm(name, **unused), said(batch))
    assert_equal(got, slopes(batch, algorithm(name), said(batch)), 1e-15)


def test_every_surrogate_is_in_a_row():
    assert {row.surrogate for row in ALGORITHMS.values()} == set(READS) >= {clipped, importance, sapo, reinforce}


# ---- the table on the command line


def test_the_table_has_a_line_for_every_row(capsys):
    assert algorithms.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == list(ALGORITHMS)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_name_prints_its_equation_paper_and_who_differs(name, capsys):
    row = ALGORITHMS[name]
    assert algorithms.main([name]) == 0
    printed = capsys.readouterr().out
    for part in (row.says, row.equation, row.paper, row.differs, f"train_{'ppo' if row.critic else 'grpo'}.py {name}"):
        assert part in printed
    for axis, value in algorithms.differences(row.axes, Axes()):
        assert f"{axis} {value}" in printed
    assert all(axis in printed.split("unused")[1] for axis in row.unused())


@pytest.mark.parametrize("words", [["gpro"], ["grpo", "ppo"], ["--plot"], ["--halp"]])
def test_a_name_that_there_is_not_is_refused_with_those_that_there_are(words, capsys):
    assert algorithms.main(words) == 2
    out, err = capsys.readouterr()
    assert not out and len(err.splitlines()) == 1 and ", ".join(ALGORITHMS) in err


@pytest.mark.parametrize("word", ["-h", "--help"])
def test_help_says_what_can_be_asked(word, capsys):
    """In the words of the file: the table, a row, the plot."""
    assert algorithms.main([word]) == 0
    out, err = capsys.readouterr()
    assert not err and out.count("python -m nanorl.algorithms") == 3 and "--plot FILE" in out


def test_the_table_of_algorithms_imports_no_torch():
    """--help is instant because of it."""
    program = ("import sys, nanorl.config, nanorl.algorithms as table; table.main(['ppo']); "
               "print({'torch', 'transformers'} & set(sys.modules))")  # fmt: skip
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.stdout.splitlines()[-1], done.stderr) == ("set()", "")


def test_the_table_is_a_command():
    command = [sys.executable, "-m", "nanorl.algorithms", "nobody"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "grpo" in done.stderr
