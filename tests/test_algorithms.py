"""The update as a whole: no layout of the batch changes its gradient, each row is its equation, no option is dead."""

import itertools
import math
import subprocess
import sys
from dataclasses import fields, replace
from typing import get_args, get_type_hints

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nanorl import config
from nanorl.algorithms import ALGORITHMS, Algorithm, Axes, chosen, credit
from nanorl.config import Config, Refused
from nanorl.loss import MODES
from nanorl.sample import Batch, collate
from tests import oracles
from tests.oracles import LIMIT, NAN, assert_same, descend, group, sample, scrambled, world

SPLIT_FREE = [mode for mode in MODES if mode != "bnpo"]
EVERY_WAY = list(itertools.product(ALGORITHMS, MODES))


def algorithm(name: str, **axes) -> Algorithm:
    """The row with some axes changed."""
    return chosen(name, replace(ALGORITHMS[name].axes, **axes))


def update(batch: Batch, algo: Algorithm, tokens: int = 10**6):
    """Loss and gradient in the model's parameters of one optimizer step, in micro-batches of so many tokens."""
    return descend(batch.weighted(algo.axes.aggregation, LIMIT).split(tokens), algo)


def trained(batch: Batch, algo: Algorithm) -> set[int]:
    """The rows that cost a forward pass."""
    return {row for micro in batch.weighted(algo.axes.aggregation, LIMIT).split(20) for row in micro.row.tolist()}


def slopes(batch: Batch, algo: Algorithm, logp: torch.Tensor, limit: int = LIMIT) -> tuple[float, torch.Tensor]:
    """Loss and gradient in the log-probs [B, T] of one optimizer step, no model: logp is what a policy would say."""
    leaf = logp.where(batch.mask, 0.0).requires_grad_()
    update = credit(batch, algo).weighted(algo.axes.aggregation, limit)
    per_token = algo.loss(leaf, update)
    total = (update.weight * per_token).sum()
    return total.item(), torch.autograd.grad(total, leaf)[0]


def said(batch: Batch, seed: int = 0) -> torch.Tensor:
    """Log-probs [B, T] near the batch's π_prox, on both sides of the clip."""
    noise = torch.randn(batch.mask.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return batch.logp_prox + 0.3 * noise


# ---- invariance of the gradient in the model's parameters


@pytest.mark.parametrize("name, mode", EVERY_WAY)
def test_padding_and_its_garbage_change_no_gradient(name, mode):
    """Other tokens and NaN in the padding of ids, log-probs, advantages, and more of it: the same loss and gradient."""
    algo, seed = algorithm(name, aggregation=mode, kl_weight=0.1), MODES.index(mode)
    batch = credit(world(seed), algo)
    assert_same(update(scrambled(batch, columns=3), algo), update(batch, algo))


@pytest.mark.parametrize("name, mode", EVERY_WAY)
def test_the_order_of_rows_and_the_names_of_groups_change_no_gradient(name, mode):
    algo, seed = algorithm(name, aggregation=mode), MODES.index(mode)
    batch = world(seed)
    there = batch.select(torch.randperm(len(batch), generator=torch.Generator().manual_seed(seed)))
    there = replace(there, group=90 - 7 * there.group)
    assert_same(update(credit(there, algo), algo), update(credit(batch, algo), algo))


@pytest.mark.parametrize("name, mode", itertools.product(ALGORITHMS, SPLIT_FREE))
def test_no_split_into_micro_batches_changes_the_gradient(name, mode):
    """By token budget, down to one row each, and into parts that no budget would make."""
    algo, seed = algorithm(name, aggregation=mode, kl_weight=0.1, kl_estimator="k2"), MODES.index(mode)
    batch = credit(world(seed), algo)
    whole = update(batch, algo)
    assert_same(update(batch, algo, tokens=20), whole)
    assert_same(update(batch, algo, tokens=1), whole)
    order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(seed))
    weighted = batch.weighted(mode, LIMIT)
    assert_same(descend([weighted.select(rows) for rows in order.split([1, 4, 3])], algo), whole)


@pytest.mark.parametrize("name", ALGORITHMS)
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


@pytest.mark.parametrize("name, mode", EVERY_WAY)
def test_rows_without_advantage_are_left_out_and_the_gradient_does_not_notice(name, mode):
    algo = algorithm(name, aggregation=mode)
    batch = credit(world(4), algo)
    everything = replace(batch, keep=batch.mask)
    rows, all_rows = trained(batch, algo), trained(everything, algo)
    silent = {i for i in range(len(batch)) if not batch.adv[i].any()}
    assert len(silent) >= 3 and (rows == all_rows if mode == "bnpo" else rows == set(range(len(batch))) - silent)
    assert_same(update(batch, algo), update(everything, algo))


@pytest.mark.parametrize("estimator", ["k2", "k3"])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_with_a_kl_term_rows_without_advantage_stay_and_matter(name, estimator):
    algo = algorithm(name, kl_weight=0.1, kl_estimator=estimator)
    batch = credit(world(4), algo)
    assert trained(batch, algo) == {i for i in range(len(batch)) if batch.mask[i].any()}
    without = update(replace(batch, keep=batch.mask & batch.adv.ne(0)), algo)
    got = update(batch, algo)
    assert (got[1] - without[1]).norm() > 1e-3 * got[1].norm()


def test_the_weights_of_the_others_count_the_rows_that_are_left_out():
    """Two groups of equal lengths, one without contrast: the mean over all tokens is half of that over the others."""

    def loss(*rewards):
        rows = [group(*(sample((1, 2, 3), (0, 1, 1), r) for r in pair), number=i) for i, pair in enumerate(rewards)]
        batch = replace(collate(rows), logp_ref=None)
        return slopes(batch, algorithm("grpo"), torch.zeros(batch.mask.shape))[1][:2]

    torch.testing.assert_close(loss((1, 0), (1, 1)), loss((1, 0)) / 2)
    assert loss((1, 0)).any()


# ---- oracles of whole rows


@pytest.mark.parametrize("name, mode", EVERY_WAY)
@pytest.mark.parametrize("kl_weight, estimator", [(0.0, "k3"), (0.3, "k2"), (0.3, "k3")])
def test_every_row_is_its_equation_in_loss_and_gradient(name, mode, kl_weight, estimator):
    """The update as loops over floats: advantage, surrogate, KL, weight; π_prox apart from π, so that the clip acts."""
    algo = algorithm(name, aggregation=mode, kl_weight=kl_weight, kl_estimator=estimator, eps_low=0.1, eps_high=0.28)
    batch = world(5)
    reward, ids, axes = batch.reward.tolist(), batch.group.tolist(), algo.axes
    adv = {
        "grpo": oracles.standardised(reward, ids, axes.std_ddof, axes.std_eps),
        "dr_grpo": oracles.centred(reward, ids),
        "rloo": oracles.leave_one_out(reward, ids),
    }[name]
    logp = said(batch)
    loss, slope = oracles.update(batch, logp, algo, adv, clip=name != "rloo")
    got_loss, got_slope = slopes(batch, algo, logp)
    assert got_loss == pytest.approx(loss, rel=1e-10, abs=1e-12)
    torch.testing.assert_close(got_slope, torch.tensor(slope, dtype=torch.float64), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_without_logp_prox_the_policy_itself_is_it(name):
    """One update a batch: r = 1, the gradient is that of REINFORCE with the row's advantage, nothing is clipped."""
    algo, batch = algorithm(name), replace(world(6), logp_prox=None)
    logp = said(world(6))
    update = credit(batch, algo).weighted(algo.axes.aggregation, LIMIT)
    torch.testing.assert_close(slopes(batch, algo, logp)[1], -update.weight * update.adv, rtol=1e-12, atol=1e-14)
    assert update.adv.any()


# ---- on average: every group of answers that can be drawn

ANSWERS = [(0,), (1, 0), (1, 1)]  # 0 ends; two tokens are the limit
WORTH = [1.0, -0.5, 2.0]


def expected_gradient(algo: Algorithm, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """E[∇loss] of one update on a group of this size, and −∇E[R], by enumeration of all 3^size groups.

    The policy is a table of logits: at the first token, and after a 1.
    """
    theta = torch.tensor([[0.4, -0.3], [-0.6, 0.2]], dtype=torch.float64, requires_grad=True)
    table = theta.log_softmax(1)
    answer_logp = [sum(table[t, token] for t, token in enumerate(answer)) for answer in ANSWERS]
    objective = sum(logp.exp() * worth for logp, worth in zip(answer_logp, WORTH))
    total = torch.zeros((), dtype=torch.float64)
    for picks in itertools.product(range(len(ANSWERS)), repeat=size):
        tries = [sample((1, *ANSWERS[k]), [False] + [True] * len(ANSWERS[k]), WORTH[k]) for k in picks]
        batch = collate([group(*tries)])
        batch = credit(replace(batch, rewards=batch.rewards.double()), algo).weighted(algo.axes.aggregation, LIMIT)
        logp = torch.stack([table[max(t - 1, 0), batch.ids[:, t]] for t in range(batch.ids.shape[1])], 1)
        chance = sum(answer_logp[k] for k in picks).exp().detach()
        total = total + chance * (batch.weight * algo.loss(logp, batch)).sum()
    return torch.autograd.grad(total, theta, retain_graph=True)[0], -torch.autograd.grad(objective, theta)[0]


@pytest.mark.parametrize("size", [2, 3])
def test_rloo_is_the_exact_gradient_of_expected_reward(size):
    """Answers of several lengths. The group's own mean takes 1/G of it away; dividing by length bends it."""
    got, wanted = expected_gradient(algorithm("rloo"), size)
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-14)
    shrunk, wanted = expected_gradient(algorithm("dr_grpo", aggregation="seq-mean-token-sum"), size)
    torch.testing.assert_close(shrunk, wanted * (size - 1) / size, rtol=1e-12, atol=1e-14)
    for mode in ("token-mean", "seq-mean-token-mean"):
        bent, wanted = expected_gradient(algorithm("rloo", aggregation=mode), size)
        assert (bent / bent.norm() - wanted / wanted.norm()).norm() > 0.01, mode


@pytest.mark.parametrize("size", [2, 3])
def test_dr_grpo_has_the_direction_of_the_exact_gradient(size):
    """A constant length has no pull: the whole row is (G−1)/(G·L) of the gradient of expected reward."""
    got, wanted = expected_gradient(algorithm("dr_grpo"), size)
    torch.testing.assert_close(got, wanted * (size - 1) / (size * LIMIT), rtol=1e-12, atol=1e-14)


# ---- options

OTHER = {  # for every axis a value that must make a difference, beside axes that give it something to do
    "eps_low": (dict(eps_low=0.9), {}), "eps_high": (dict(eps_high=3.0), {}), "kl_weight": (dict(kl_weight=0.1), {}),
    "kl_estimator": (dict(kl_estimator="k2"), dict(kl_weight=0.1)), "std_ddof": (dict(std_ddof=0), {}),
    "std_eps": (dict(std_eps=0.5), {}), "aggregation": (dict(aggregation="token-sum"), {}),
    "length_limit": (dict(length_limit=5), dict(aggregation="seq-mean-token-sum-norm")),
}  # fmt: skip


def limit(algo: Algorithm) -> int:
    """L as a run has it, with LIMIT for --max-new-tokens."""
    return algo.axes.length_limit or LIMIT


@pytest.mark.parametrize("axis", [f.name for f in fields(Axes)])
def test_no_option_is_dead(axis):
    """Each axis changes the gradient of some row; a new axis without a case here fails."""
    changed, beside = OTHER[axis]
    batch, differ = world(7), []
    for name in ALGORITHMS:
        one, other = algorithm(name, **beside), algorithm(name, **beside, **changed)
        a, b = (slopes(batch, algo, said(batch), limit(algo))[1] for algo in (one, other))
        differ.append(bool((a - b).norm() > 1e-3 * a.norm()))
    assert any(differ)


def test_every_mode_of_aggregation_is_a_gradient_of_its_own():
    batch = world(7)
    found = [slopes(batch, algorithm("grpo", aggregation=mode), said(batch))[1] for mode in MODES if mode != "bnpo"]
    for a, b in itertools.combinations(found, 2):
        assert (a - b).norm() > 1e-3 * a.norm()


def test_the_flag_offers_exactly_the_modes_that_there_are():
    assert get_args(get_type_hints(Axes)["aggregation"]) == MODES


@pytest.mark.parametrize("axis", [f.name for f in fields(Axes)])
def test_every_axis_is_a_flag(axis):
    value = OTHER[axis][0][axis]
    _, _, axes = config.parse(["grpo", config.dashed(axis), str(value)])
    assert axes == replace(ALGORITHMS["grpo"].axes, **{axis: value})


# ---- rows


@pytest.mark.parametrize("name", ALGORITHMS)
def test_chosen_binds_the_axes_and_leaves_the_table_alone(name):
    row = ALGORITHMS[name]
    axes = replace(row.axes, std_eps=0.5, eps_low=0.05, eps_high=0.05, kl_weight=0.2)
    algo, batch = chosen(name, axes), world(8)
    assert algo.axes is axes and ALGORITHMS[name] is row and row.axes != axes
    assert torch.equal(algo.advantage(batch), row.advantage(batch, axes))
    update = credit(batch, algo)
    assert torch.equal(algo.loss(said(batch), update), row.loss(said(batch), update, axes))
    assert not torch.equal(algo.loss(said(batch), update), row.loss(said(batch), update, row.axes))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_row_says_what_it_is(name):
    row = ALGORITHMS[name]
    assert row.says.startswith(f"{name}: ") and "arXiv" in row.paper and row.differs
    assert row.group_baseline == (not algorithm(name).advantage(collate([group(sample((1, 2), (0, 1), 3.0))])).any())


@pytest.mark.parametrize("name", ALGORITHMS)
def test_credit_looks_at_rewards_and_leaves_them(name):
    batch = world(9)
    after = credit(batch, algorithm(name))
    assert torch.equal(after.rewards, batch.rewards) and after.adv.shape == batch.mask.shape
    assert not after.adv[~batch.mask].any() and torch.equal(after.keep, after.adv.ne(0)) and batch.adv is None


@pytest.mark.parametrize("name", ALGORITHMS)
def test_without_a_reference_there_is_no_kl_term(name):
    """No logp_ref, or one of NaN, is no term, not a bonus on log π; with a weight and no reference it cannot run."""
    batch, algo = world(10), algorithm(name)
    logp, wanted = said(batch), slopes(batch, algo, said(batch))
    for ref in (None, torch.full_like(batch.logp_ref, NAN)):
        got = slopes(replace(batch, logp_ref=ref), algo, logp)
        assert got[0] == wanted[0] and torch.equal(got[1], wanted[1])
    with pytest.raises(AttributeError):
        slopes(replace(batch, logp_ref=None), algorithm(name, kl_weight=0.1), logp)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_kl_term_is_linear_in_its_weight_and_nothing_where_the_policies_agree(name):
    batch = world(10)
    logp = said(batch)
    none, one, two = (slopes(batch, algorithm(name, kl_weight=w), logp)[1] for w in (0.0, 0.1, 0.2))
    torch.testing.assert_close(two - one, one - none, rtol=1e-10, atol=1e-12)
    same = replace(batch, logp_ref=logp)
    torch.testing.assert_close(slopes(same, algorithm(name, kl_weight=9.0), logp), slopes(same, algorithm(name), logp))


@given(st.integers(1, 4), st.integers(1, 4), st.sampled_from([0.0, 0.1]), st.sampled_from(list(ALGORITHMS)))
def test_needs_are_what_the_updates_and_the_kl_term_read(updates, epochs, kl_weight, name):
    row, cfg = ALGORITHMS[name], Config(updates_per_batch=updates, epochs_per_batch=epochs)
    needs = row.needs(cfg, replace(row.axes, kl_weight=kl_weight))
    assert ("logp_prox" in needs) == (row.has_ratio and updates * epochs > 1)
    assert ("logp_ref" in needs) == (kl_weight > 0)
    assert needs <= {"logp_prox", "logp_ref"}


REFUSED = [
    (dict(samples_per_prompt=1), {}, "--samples-per-prompt 1: .*at least 2"),
    ({}, dict(eps_low=-0.1), "--eps-low -0.1: .*0 or more"), ({}, dict(eps_low=1.0), "--eps-low 1.0: .*less than 1"),
    ({}, dict(eps_high=-1.0), "--eps-high -1.0: .*0 or more"), ({}, dict(eps_high=math.inf), "--eps-high inf: .*fini"),
    ({}, dict(kl_weight=-0.1), "--kl-weight -0.1: .*0 or more"), ({}, dict(kl_weight=NAN), "--kl-weight nan: .*finite"),
    ({}, dict(std_eps=0.0), "--std-eps 0.0: .*above 0"), ({}, dict(length_limit=0), "--length-limit 0: .*at least 1"),
    ({}, dict(std_eps=NAN), "--std-eps nan: .*finite"),
    ({}, dict(std_eps=math.inf), "--std-eps inf: .*finite"),
]  # fmt: skip


@pytest.mark.parametrize("job, axes, says", REFUSED)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_what_has_no_meaning_is_refused_in_one_line(name, job, axes, says):
    with pytest.raises(Refused, match=f"^{says}") as refusal:
        ALGORITHMS[name].refuse(replace(Config(), **job), replace(ALGORITHMS[name].axes, **axes), Refused)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("job", [dict(updates_per_batch=2), dict(epochs_per_batch=2)])
def test_more_than_one_update_needs_a_ratio(job):
    for row in ALGORITHMS.values():
        if row.has_ratio:
            row.refuse(Config(**job), row.axes, Refused)
        else:
            with pytest.raises(Refused, match="--updates-per-batch, --epochs-per-batch: .*no ratio.*use 1 and 1"):
                row.refuse(Config(**job), row.axes, Refused)


@pytest.mark.parametrize("axes", [{}, dict(eps_low=0.0, eps_high=0.0), dict(eps_low=0.99), dict(length_limit=1)])
def test_what_has_a_meaning_is_not_refused(axes):
    for row in ALGORITHMS.values():
        row.refuse(Config(samples_per_prompt=2), replace(row.axes, **axes), Refused)


def test_the_table_of_algorithms_imports_no_torch():
    """--help is instant because of it."""
    program = "import sys, nanorl.config, nanorl.algorithms; print({'torch', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.stdout.strip(), done.stderr) == ("set()", "")
