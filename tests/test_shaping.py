"""What becomes of a reward before it is compared: each step is its equation, what is left out is as if it never was."""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import mean, stdev

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanorl import shaping
from nanorl.advantage import placed
from nanorl.algorithms import ALGORITHMS
from nanorl.axes import Axes, wrong
from nanorl.critic import Critic, centre
from nanorl.loss import MODES, weights
from nanorl.metrics import step_metrics
from nanorl.objective import credit
from nanorl.sample import FINISH, Batch, Group, collate
from nanorl.shaping import Shaping, clipped, overlong, scaled, shaped, stages, whole
from nanorl.trpo import over_tokens
from tests.worlds import LIMIT, NAN, algorithm, changed, group, policy, said, sample, slopes, world

KINDS = ("score", "zero", "penalty", "mask", "drop")
OUT = ("mask", "drop")
CUT = "length"

numbers = st.sampled_from([-2.0, -0.5, 0.0, 0.125, 1.0, 3.0])  # and their sums are exact
hows = st.builds(
    Shaping, overlong_penalty=st.sampled_from([0.0, 0.5, 1.0]), overlong_tokens=st.integers(1, 3),
    overlong_limit=st.integers(3, 5), bias=st.sampled_from([0.0, -0.5, 2.0]), scale=st.sampled_from([1.0, 0.5, 10.0]),
    form=st.sampled_from(["code", "page"]), clip=st.sampled_from([None, 0.7, 20.0]),
)  # fmt: skip
axes_of_all_kinds = st.builds(Axes, truncated=st.sampled_from(KINDS), truncated_penalty=numbers, shaping=hows)


@st.composite
def tries(draw):
    """A sample of up to 6 tokens after its prompt, some of somebody else's turn; up to 3 rewards, wherever they stand."""
    mask = [False, *draw(st.lists(st.booleans(), max_size=6))]
    rewards = draw(st.lists(st.tuples(st.integers(0, len(mask) - 1), numbers), max_size=3))
    return sample(range(len(mask)), mask, finish=draw(st.sampled_from(FINISH)), rewards=tuple(rewards))


groupings = st.lists(st.lists(tries(), min_size=1, max_size=4).map(lambda s: group(*s)), min_size=1, max_size=3)


def laid(groups: list[Group]) -> Batch:
    """The batch of these groups in float64."""
    batch = collate(groups)
    return replace(batch, rewards=batch.rewards.double())


def steps_of(reward: float, tokens: int, cut: bool, axes: Axes) -> list[tuple[str, float]]:
    """Name and reward after it of each step in use, by cases."""
    how, found = axes.shaping, []
    if axes.truncated != "score":
        if cut and axes.truncated in ("zero", "penalty"):
            reward = 0.0 if axes.truncated == "zero" else axes.truncated_penalty
        found.append(("truncated", reward))
    if how.overlong_penalty > 0:
        free = how.overlong_limit - how.overlong_tokens
        if tokens >= how.overlong_limit:
            reward -= how.overlong_penalty
        elif tokens > free:
            reward -= how.overlong_penalty * (tokens - free) / how.overlong_tokens
        found.append(("overlong", reward))
    if (how.bias, how.scale) != (0, 1):
        reward = reward * how.scale + how.bias * (how.scale if how.form == "code" else 1.0)
        found.append(("scale", reward))
    if how.clip is not None:
        reward = how.clip if reward > how.clip else -how.clip if reward < -how.clip else reward
        found.append(("clip", reward))
    return found


def by_loops(groups: list[Group], axes: Axes) -> list[list[tuple[str, float]]]:
    """`steps_of` every sample."""
    return [steps_of(math.fsum(r for _, r in s.rewards), sum(s.mask), s.finish == CUT, axes)
            for g in groups for s in g.samples]  # fmt: skip


def permuted(batch: Batch, seed: int) -> tuple[Batch, torch.Tensor]:
    """The batch with its rows, and so its groups, in another order, and that order."""
    order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(seed))
    return batch.select(order), order


# ---- the steps


@given(groupings, axes_of_all_kinds)
def test_each_step_is_its_equation_and_nothing_is_overwritten(groups, axes):
    batch = laid(groups)
    raw = batch.rewards.clone()
    got, wanted = [*stages(batch, axes)], by_loops(groups, axes)
    assert all([name for name, _ in steps] == [name for name, _ in got] for steps in wanted)
    for i, (_, reward) in enumerate(got):
        assert reward.tolist() == pytest.approx([steps[i][1] for steps in wanted], abs=1e-12)
    assert torch.equal(batch.rewards, raw) and torch.equal(whole(batch, axes), got[-1][1] if got else batch.reward)


@given(groupings, axes_of_all_kinds, st.integers(0, 9))
def test_permuting_a_batch_permutes_its_shaped_rewards(groups, axes, seed):
    batch = laid(groups)
    other, order = permuted(batch, seed)
    assert torch.equal(whole(other, axes), whole(batch, axes)[order])
    assert torch.equal(shaped(other, axes), shaped(batch, axes)[order][:, : other.mask.shape[1]])


@given(groupings, axes_of_all_kinds, st.integers(0, 9))
def test_in_any_order_of_groups_and_rows_each_row_has_its_advantage(groups, axes, seed):
    algo, batch = replace(algorithm("grpo"), axes=axes), laid(groups)
    other, order = permuted(batch, seed)
    got, adv = credit(other, algo), credit(batch, algo).adv[order]
    assert torch.allclose(got.adv, adv[:, : other.mask.shape[1]], rtol=1e-9, atol=1e-9)


@given(groupings)
def test_what_is_not_asked_for_is_not_done_bit_for_bit(groups):
    batch, axes = laid(groups), Axes()
    assert not [*stages(batch, axes)] and torch.equal(whole(batch, axes), batch.reward)
    assert torch.equal(shaped(batch, axes), placed(batch.rewards, batch.mask))
    assert not shaping.left_out(batch, axes).any() and len(shaping.compared(batch, axes)) == len(batch)


def test_both_forms_of_bias_and_scale_have_their_stated_values():
    right_and_wrong = torch.tensor([1.0, 0.0])
    assert scaled(right_and_wrong, -0.5, 10.0).tolist() == scaled(right_and_wrong, -0.5, 10.0, "code").tolist() == [5, -5]
    assert scaled(right_and_wrong, -0.5, 10.0, "page").tolist() == [9.5, -0.5]
    with pytest.raises(ValueError, match="there are code, page"):
        scaled(right_and_wrong, -0.5, 10.0, "paper")


def test_the_penalty_is_dapos_at_its_own_numbers_and_has_a_floor():
    tokens = torch.tensor([0, 16_384, 16_385, 18_432, 20_480, 20_481, 99_999])
    got = overlong(torch.zeros(7, dtype=torch.float64), tokens, limit=20_480, margin=4_096)
    assert got.tolist() == [0, 0, -1 / 4096, -0.5, -1, -1, -1]


@given(st.integers(1, 30).flatmap(lambda limit: st.tuples(st.just(limit), st.integers(1, limit))), st.floats(0.1, 9))
def test_a_longer_answer_never_earns_more_and_none_loses_more_than_the_penalty(lengths, factor):
    (limit, margin), tokens = lengths, torch.arange(40)
    got = overlong(torch.ones(40, dtype=torch.float64), tokens, limit, margin, factor)
    assert (got.diff() <= 0).all() and (got[: limit - margin + 1] == 1).all()
    assert torch.allclose(got[limit:], torch.tensor(1 - factor, dtype=torch.float64), rtol=1e-12, atol=0)


@given(st.lists(st.floats(-50, 50), min_size=1), st.floats(0.1, 20))
def test_a_clip_holds_within_its_bound_and_leaves_what_is_within(rewards, bound):
    got = clipped(torch.tensor(rewards, dtype=torch.float64), bound)
    assert got.tolist() == [bound if r > bound else -bound if r < -bound else r for r in rewards]


@pytest.mark.parametrize("axes, reward", [
    ({"truncated": "zero", "shaping.overlong_penalty": 1.0}, -1.0),  # zero first: a cut answer is still overlong
    ({"truncated": "penalty", "shaping.scale": 10.0}, -20.0),  # the fixed reward is in the reward's own units
    ({"shaping.overlong_penalty": 1.0, "shaping.scale": 10.0}, 20.0),  # and so is the penalty
    ({"shaping.overlong_penalty": 1.0, "shaping.clip": 2.5}, 2.0),  # the clip after the penalty: 3 − 1, not 2.5 − 1
    ({"shaping.scale": 10.0, "shaping.clip": 2.5}, 2.5),  # and after scaling: not 25
    ({"shaping.bias": -0.5, "shaping.scale": 10.0, "shaping.clip": 24.0}, 24.0),
])  # fmt: skip
def test_the_order_of_the_steps(axes, reward):
    """A cut answer of five tokens and reward 3, where the limit is 5."""
    batch = laid([group(sample(range(6), [0, 1, 1, 1, 1, 1], 3.0, finish=CUT))])
    usual = {"truncated_penalty": -2.0, "shaping.overlong_tokens": 2, "shaping.overlong_limit": 5}
    assert whole(batch, changed(Axes(), **usual, **axes)).tolist() == [reward]


def test_truncated_is_what_the_engine_said_and_not_the_length():
    """As long as the limit but ended, and cut short by somebody else: as judged."""
    rows = [sample((1, 2, 3), (0, 1, 1), 1.0, finish=finish) for finish in ("stop", "length", "abort")]
    short = sample((1, 2), (0, 1), 1.0, finish=CUT)
    batch = laid([group(*rows, short)])
    assert whole(batch, Axes(truncated="zero")).tolist() == [1, 0, 1, 0]
    assert shaping.left_out(batch, Axes(truncated="mask")).tolist() == [False, True, False, True]
    assert shaping.compared(batch, Axes(truncated="drop")).tolist() == [0, 2]


# ---- by token: what is not normalised


@given(groupings, axes_of_all_kinds)
def test_by_token_a_shaped_reward_adds_up_to_the_rows_and_stands_on_sampled_tokens(groups, axes):
    batch = laid(groups)
    got, sampled = shaped(batch, axes), batch.mask.any(1)
    assert torch.allclose(got.sum(1)[sampled], whole(batch, axes)[sampled], rtol=0, atol=1e-9)
    assert not got[~batch.mask].any()


@given(groupings, st.sampled_from([0.5, 10.0]), st.sampled_from([-0.5, 2.0]), st.sampled_from(["code", "page"]))
def test_each_turn_is_scaled_where_it_stands_and_the_bias_is_added_once_at_the_end(groups, scale, bias, form):
    batch = laid(groups)
    got = shaped(batch, Axes(shaping=Shaping(bias=bias, scale=scale, form=form)))
    wanted = placed(batch.rewards, batch.mask) * scale
    for i, row in enumerate(batch.mask.tolist()):
        if any(row):
            wanted[i, max(t for t, sampled in enumerate(row) if sampled)] += bias * (scale if form == "code" else 1)
    assert torch.allclose(got, wanted, rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", ["reinforce", "ppo"])
@given(groupings, axes_of_all_kinds.filter(lambda axes: axes.truncated not in OUT))
def test_without_a_norm_the_first_token_is_owed_the_whole_shaped_reward(name, groups, axes):
    """Of the critic too: what it should have said at the start of an answer, with γ = λ = 1."""
    batch = laid(groups)
    batch = replace(batch, value=torch.rand(batch.mask.shape, dtype=torch.float64).where(batch.mask, NAN))
    algo = algorithm(name, kl_weight=0.0, truncated=axes.truncated, truncated_penalty=axes.truncated_penalty)
    returns = credit(batch, replace(algo, axes=replace(algo.axes, shaping=axes.shaping))).returns
    rows = batch.mask.any(1)
    first = returns.gather(1, batch.mask.int().argmax(1, keepdim=True))[:, 0]
    assert torch.allclose(first[rows], whole(batch, axes)[rows], rtol=0, atol=1e-9)


# ---- what a norm takes out again


@given(groupings, st.sampled_from([-0.5, 2.0]), st.sampled_from([0.5, 10.0]), st.sampled_from(["code", "page"]))
def test_a_baseline_takes_the_bias_out_and_a_std_the_scale(groups, bias, scale, form):
    batch, how = laid(groups), {"shaping.bias": bias, "shaping.scale": scale, "shaping.form": form}
    for name, left in (("dr_grpo", scale), ("grpo", 1.0)):
        got, raw = (algorithm(name, **axes).advantage(batch)[0] for axes in (how, {}))
        assert torch.allclose(got, left * raw, rtol=1e-4, atol=1e-8)  # ε is 1e-6, the least std 0.06


def test_an_overlong_answer_is_worse_than_its_group_though_all_are_right():
    long, short = sample(range(6), [0, 1, 1, 1, 1, 1], 1.0), sample(range(3), [0, 1, 1], 1.0)
    adv = algorithm("dapo").advantage(laid([group(long, short, short)]))[0]
    assert adv[0, 1] < 0 < adv[1, 1] == adv[2, 1]


# ---- truncated answers


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("kind, reward", [("zero", 0.0), ("penalty", -0.7)])
def test_a_fixed_reward_is_that_reward_and_nothing_else(name, kind, reward):
    batch = world(3)
    at_end = torch.arange(batch.mask.shape[1]) == batch.length[:, None] - 1
    replaced = replace(batch, rewards=batch.rewards.where(~batch.truncated[:, None], reward * at_end.double()))
    got, wanted = (slopes(b, algo, said(batch)) for b, algo in (
        (batch, algorithm(name, truncated=kind, **({"truncated_penalty": reward} if reward else {}))),
        (replaced, algorithm(name))))  # fmt: skip
    assert got.loss == pytest.approx(wanted.loss, rel=1e-12) and torch.allclose(got.logp, wanted.logp, atol=1e-12)


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("seed", [1, 2])
def test_dropped_answers_are_as_if_they_had_never_been(name, seed):
    """In advantage bit for bit, in weight, loss and gradient of policy and critic."""
    batch = world(seed)
    kept = (~batch.truncated).nonzero()[:, 0]
    without = batch.select(kept)
    now, width = said(batch), without.mask.shape[1]
    then = type(now)(*(x[kept, :width] for x in now))
    drop, score = algorithm(name, truncated="drop"), algorithm(name)
    assert torch.equal(credit(batch, drop).adv[kept, :width], credit(without, score).adv)
    got, wanted = slopes(batch, drop, now), slopes(without, score, then)
    assert 0 < len(kept) < len(batch) and got.loss == pytest.approx(wanted.loss, rel=1e-12)
    for mine, theirs in zip(got[1:], wanted[1:]):
        if mine is not None:
            assert torch.allclose(mine[kept, :width], theirs, rtol=1e-12, atol=1e-15)
            assert not mine[batch.truncated].any()


@given(groupings.filter(lambda groups: any(s.finish != CUT for g in groups for s in g.samples)), hows,
       st.sampled_from(["grpo", "rloo", "liteppo"]))  # fmt: skip
def test_dropping_is_collating_without(groups, how, name):
    """Incomplete groups and groups that vanish among them."""
    some = [replace(g, samples=tuple(s for s in g.samples if s.finish != CUT)) for g in groups]
    batch, without = laid(groups), laid([g for g in some if g.samples])
    row = algorithm(name)
    algo = replace(row, axes=replace(row.axes, truncated="drop", shaping=how))
    got, width = credit(batch, algo).adv[~batch.truncated], without.mask.shape[1]
    assert torch.equal(got[:, :width], credit(without, algo).adv) and not got[:, width:].any()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", OUT)
def test_what_is_left_out_counts_in_no_weight(kind, mode):
    """The weights are those of a batch in which nobody sampled the truncated rows."""
    batch = credit(world(1), algorithm("ppo", truncated=kind))
    empty = batch.mask & ~batch.truncated[:, None]
    got = batch.weighted(mode, LIMIT)
    assert torch.equal(got.weight, weights(mode, empty.double(), batch.group, LIMIT)) and empty.sum() < batch.mask.sum()
    whole_again = torch.zeros(len(batch), dtype=torch.long)
    for micro in got.split(12):
        whole_again[micro.row] += 1
    assert whole_again.tolist() == empty.any(1).int().tolist()


@pytest.mark.parametrize("name", ALGORITHMS)
def test_masked_answers_stay_in_the_baseline(name):
    """The others' advantages are those of the answers as judged; the masked ones have neither advantage nor slope."""
    batch = world(2)
    mask, score = credit(batch, algorithm(name, truncated="mask")), credit(batch, algorithm(name))
    cut = batch.truncated
    assert torch.equal(mask.adv[~cut], score.adv[~cut]) and not mask.adv[cut].any() and not mask.keep[cut].any()
    got = slopes(batch, algorithm(name, truncated="mask"), said(batch))
    assert not got.logp[cut].any() and got.logp[~cut].any()


def test_the_reward_of_a_masked_answer_is_felt_and_that_of_a_dropped_one_is_not():
    def adv(kind: str, reward: float) -> list[float]:
        rows = [sample((1, 2), (0, 1), r, finish=f) for r, f in ((1.0, "stop"), (0.0, "stop"), (reward, CUT))]
        return credit(laid([group(*rows)]), algorithm("dr_grpo", truncated=kind)).adv[:2, 1].tolist()

    assert adv("mask", 2.0) == pytest.approx([0.0, -1.0]) and adv("mask", -1.0) == pytest.approx([1.0, 0.0])
    assert adv("drop", 2.0) == adv("drop", -1.0) == [0.5, -0.5]


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("kind", OUT)
def test_where_all_answers_are_truncated_there_is_nothing_to_pass_and_nothing_is_nan(name, kind):
    batch = replace(world(1), finish=torch.full((8,), FINISH.index(CUT)))
    algo = algorithm(name, truncated=kind)
    update = credit(batch, algo).weighted(algo.axes.aggregation, LIMIT)
    assert [*update.split(64)] == [] and update.adv.eq(0).all() and update.returns[batch.mask].isfinite().all()
    logp = torch.full(batch.mask.shape, NAN)
    assert all(map(math.isfinite, step_metrics([], update, logp, algo).values()))


@pytest.mark.parametrize("kind", OUT)
def test_a_critic_begins_at_the_returns_that_it_will_learn(kind):
    """Dropped rows are in no norm of theirs either."""
    batch, critic, biases = world(3), Critic(policy(), "shared"), []
    norm = {"reward_norm.mean_level": "batch"}
    kept = batch.select((~batch.truncated).nonzero()[:, 0])
    for rows, how in ((batch, kind), (kept, "score"), (batch, "score")):
        centre(critic, rows, algorithm("ppo", truncated=how, **norm))
        biases.append(critic.head.bias.item())
    assert (biases[0] == pytest.approx(biases[1], abs=1e-6)) == (kind == "drop") and abs(biases[0] - biases[2]) > 1e-3


@pytest.mark.parametrize("kind", OUT)
def test_a_trust_region_is_over_the_tokens_that_are_counted(kind):
    batch = credit(world(2), algorithm("trpo", truncated=kind)).weighted("token-mean", LIMIT)
    weight = over_tokens(batch).weight
    assert not weight[batch.truncated].any() and weight.sum() == pytest.approx(1, rel=1e-12)
    assert (weight[batch.counted] == 1 / int(batch.counted.sum())).all()


# ---- what is said


@settings(max_examples=30)
@given(groupings, axes_of_all_kinds)
def test_every_step_in_use_says_its_mean_std_and_share_changed(groups, axes):
    batch = laid(groups)
    algo = replace(algorithm("dr_grpo"), axes=replace(axes, reward_norm=algorithm("dr_grpo").axes.reward_norm))
    metrics = step_metrics(groups, credit(batch, algo), torch.full(batch.mask.shape, NAN), algo)
    got = {key: value for key, value in metrics.items() if key.startswith("shaping/") and "/norm/" not in key}
    cut, wanted = batch.truncated.tolist(), {}
    before, kept = batch.reward.tolist(), [i for i in range(len(batch)) if axes.truncated != "drop" or not cut[i]]
    for i, (name, _) in enumerate(stages(batch, axes)):
        after = [steps[i][1] for steps in by_loops(groups, axes)]
        changed_rows = [abs(a - b) > 1e-12 for a, b in zip(after, before)]
        if name == "truncated":
            share = mean(float(c or (axes.truncated in OUT and gone)) for c, gone in zip(changed_rows, cut))
        else:
            share = mean(float(changed_rows[i]) for i in kept) if kept else NAN
        seen, before = [after[i] for i in kept], after
        wanted |= {f"shaping/{name}/mean": mean(seen) if seen else NAN, f"shaping/{name}/changed": share,
                   f"shaping/{name}/std": stdev(seen) if len(seen) > 1 else NAN}  # fmt: skip
    assert got == pytest.approx({key: value for key, value in wanted.items() if math.isfinite(value)}, abs=1e-9)
    assert metrics["reward"] == pytest.approx(mean(batch.reward.tolist()), abs=1e-12)  # what the reward function said
    assert ("shaping/norm/mean" in metrics) == bool(wanted and kept)


def test_the_norm_says_what_it_made_of_the_shaped_rewards():
    batch, algo = world(0), algorithm("grpo", **{"shaping.bias": -0.5})
    metrics = step_metrics([], credit(batch, algo), torch.full(batch.mask.shape, NAN), algo)
    rows = [algorithm("grpo").advantage(replace(batch, mask=torch.ones_like(batch.mask)))[0][i, 0] for i in range(8)]
    assert metrics["shaping/norm/mean"] == pytest.approx(float(sum(rows)) / 8, abs=1e-9)
    assert metrics["shaping/norm/std"] == pytest.approx(float(torch.stack(rows).std()), rel=1e-9)


# ---- settings


def test_the_limit_is_that_of_answers_and_the_margin_a_fifth_unless_they_are_said():
    on = Shaping(overlong_penalty=1.0)
    assert [(on.settled(n).overlong_limit, on.settled(n).overlong_tokens) for n in (20_480, 24, 3)] == [
        (20_480, 4_096), (24, 4), (3, 1)]  # fmt: skip
    assert replace(on, overlong_tokens=7).settled(24) == replace(on, overlong_tokens=7, overlong_limit=24)
    assert replace(on, overlong_limit=50).settled(24) == replace(on, overlong_tokens=10, overlong_limit=50)
    assert Shaping().settled(24) == Shaping()


def test_a_margin_beyond_the_limit_is_refused():
    long = {"shaping.overlong_penalty": 1.0, "shaping.overlong_tokens": 6}
    assert wrong(algorithm("grpo", **long).axes).endswith("must be at least 1 and at most the limit, 5")
    assert wrong(algorithm("grpo", **(long | {"shaping.overlong_tokens": 5})).axes) is None


@pytest.mark.parametrize("name, axes, says", [
    ("reinforce", {"shaping.bias": -10.0, "shaping.clip": 5.0}, "rewards of 0 (-10 by then) and of 1 (-9) are one"),
    ("reinforce", {"shaping.bias": 5.0, "shaping.clip": 5.0}, "rewards of 0 (5 by then) and of 1 (6) are one"),
    ("reinforce", {"shaping.bias": 4.5, "shaping.clip": 5.0}, None),
    ("reinforce", {"shaping.bias": -0.5, "shaping.scale": 10.0}, None),
    ("grpo", {"shaping.bias": -0.5}, "--shaping.bias: the reward norm takes it out again"),
    ("grpo", {"shaping.bias": -0.5, "shaping.scale": 10.0}, "--shaping.scale: the reward norm takes them out again"),
    ("dr_grpo", {"shaping.scale": 10.0}, None), ("grpo", {"shaping.scale": 10.0, "shaping.clip": 2.0}, None),
    ("ppo", {"truncated": "zero", "critic.bootstrap": True}, "gets its fixed reward and V at the cut"),
    ("ppo", {"truncated": "mask", "critic.bootstrap": True}, None),
])  # fmt: skip
def test_what_would_swallow_the_signal_is_said(name, axes, says):
    lines = [*shaping.remarks(algorithm(name, **axes).axes)]
    assert len(lines) == (says is not None) and (says or "") in "".join(lines)


@given(groupings, st.sampled_from(["zero", "penalty"]), numbers, st.sampled_from([1.0, 0.5]))
def test_by_token_a_cut_answer_has_its_fixed_reward_at_its_end_and_nothing_before(groups, kind, fixed, scale):
    batch = laid(groups)
    axes = Axes(truncated=kind, truncated_penalty=fixed, shaping=Shaping(scale=scale))
    wanted = torch.zeros_like(batch.rewards)
    for i, row in enumerate(batch.mask.tolist()):
        if any(row):
            wanted[i, max(t for t, sampled in enumerate(row) if sampled)] = (0.0 if kind == "zero" else fixed) * scale
    cut = batch.truncated
    assert torch.allclose(shaped(batch, axes)[cut], wanted[cut], rtol=0, atol=1e-9)
