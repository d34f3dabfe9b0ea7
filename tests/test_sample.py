"""What flows keeps its meaning: masks are the sampler's, rows stay whole, no row is lost, doubled or mixed up."""

from collections import Counter
from dataclasses import FrozenInstanceError, fields, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nanorl.algorithms import ALGORITHMS
from nanorl.loss import MODES
from nanorl.objective import credit
from nanorl.sample import FINISH, Batch, Prompt, Sample, collate, pack
from tests import oracles
from tests.worlds import END, LIMIT, PAD, VOCABULARY, algorithm, group, policy, sample, scrambled, world

GOOD = dict(ids=(5, 6, 7), mask=(False, True, True), logp_behave=(0.0, -1.0, -2.0), version=(-1, 3, 4), finish="stop",
            rewards=((2, 1.0),))  # fmt: skip
GROUPED = [name for name, row in ALGORITHMS.items()  # a group's advantages depend on nothing else
           if row.axes.reward_norm.mean_level == "group" and row.axes.reward_norm.std_level != "batch"]  # fmt: skip


# ---- what cannot be built


def test_a_good_sample_is_built_and_knows_its_reward_and_its_age():
    built = Sample(**{**GOOD, "rewards": ((1, 0.5), (2, 1.0))})
    assert built.reward == 1.5 and built.first_version == 3


@pytest.mark.parametrize("wrong, why", [
    (dict(version=(-1, -1, -1)), "version"), (dict(version=(-1, 3, -1)), "version"),
    (dict(version=(0, 3, 4)), "version"),
    (dict(mask=(True, True, True), version=(2, 3, 4)), "first token"), (dict(mask=(False, True)), "length"),
    (dict(ids=(5, 6)), "length"), (dict(logp_behave=(0.0, -1.0)), "length"), (dict(version=(-1, 3)), "length"),
    (dict(finish="done"), "finish"),
    (dict(rewards=((3, 1.0),)), "reward"),
    (dict(rewards=((-1, 1.0),)), "reward"),
    (dict(ids=(), mask=(), logp_behave=(), version=(), rewards=()), "token"),
])  # fmt: skip
def test_a_sample_that_contradicts_itself_cannot_be_built(wrong, why):
    with pytest.raises(ValueError, match=why):
        Sample(**{**GOOD, **wrong})


@pytest.mark.parametrize("missing", ["mask", "version", "logp_behave", "finish", "rewards"])
def test_a_sample_without_its_origin_cannot_be_built(missing):
    with pytest.raises(TypeError, match=missing):
        Sample(**{name: value for name, value in GOOD.items() if name != missing})


def test_nothing_is_overwritten_once_it_flows():
    for thing in (Sample(**GOOD), Prompt(0, (1,), "", ""), group(Sample(**GOOD)), world(0)):
        for f in fields(thing):
            with pytest.raises(FrozenInstanceError):
                setattr(thing, f.name, None)
    with pytest.raises(AttributeError):
        world(0).reward = None  # an advantage is never stored in a reward


# ---- collate


@st.composite
def tries(draw):
    """Groups of samples over two tokens, one of which ends, pads and is sampled in the middle."""

    def one(ids):
        mask = [False] + draw(st.lists(st.booleans(), min_size=len(ids) - 1, max_size=len(ids) - 1))
        earned = draw(st.lists(st.tuples(st.integers(0, len(ids) - 1), st.sampled_from([0.5, 1.0, -2.0])), max_size=3))
        versions = tuple(draw(st.integers(0, 5)) if m else -1 for m in mask)
        return sample(ids, mask, rewards=tuple(earned), version=versions, finish=draw(st.sampled_from(FINISH)))

    ids = st.lists(st.sampled_from([END, 1]), min_size=1, max_size=6)
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    return [group(*(one(draw(ids)) for _ in range(size)), number=i) for i, size in enumerate(sizes)]


@given(tries())
def test_a_row_of_the_batch_is_its_sample_whatever_its_tokens_are(groups):
    """PAD = END here, so no mask, length or finish can have been read off the ids."""
    batch, samples = collate(groups), [s for g in groups for s in g.samples]
    assert len(batch) == len(samples) and batch.row.tolist() == list(range(len(samples)))
    assert batch.ids.shape[1] == max(len(s.ids) for s in samples)
    assert batch.group.tolist() == [i for i, g in enumerate(groups) for _ in g.samples]
    for i, s in enumerate(samples):
        n, rest = len(s.ids), batch.ids.shape[1] - len(s.ids)
        assert int(batch.length[i]) == n
        assert batch.ids[i].tolist() == list(s.ids) + [PAD] * rest
        assert batch.mask[i].tolist() == list(s.mask) + [False] * rest
        assert batch.version[i].tolist() == list(s.version) + [-1] * rest
        assert batch.logp_behave[i].tolist() == list(s.logp_behave) + [0.0] * rest
        assert batch.rewards[i].tolist() == [sum(v for at, v in s.rewards if at == t) for t in range(n + rest)]
        assert float(batch.reward[i]) == s.reward
        assert bool(batch.truncated[i]) == (s.finish == "length")


def test_identical_prompts_in_two_groups_stay_two_groups():
    """The same question twice, once all wrong and once all right: there is nothing to learn from either."""
    wrong, right = (group(*[sample((1, 2, 3), (0, 1, 1), r)] * 2, number=7) for r in (0.0, 1.0))
    batch = collate([wrong, right])
    assert batch.group.tolist() == [0, 0, 1, 1]
    for name in GROUPED + ["liteppo"]:
        assert not algorithm(name).advantage(batch)[0].any(), name


@pytest.mark.parametrize("name", GROUPED)
def test_an_incomplete_group_is_normalised_by_its_own_members(name):
    rewards, others = [1.0, 0.0, 4.0], group(*(sample((1, 2, 3), (0, 1, 1), r) for r in (3.0, -1.0)), number=1)

    def adv(*groups):
        return algorithm(name).advantage(collate(groups))[0][:2]

    companion = sample((1, 2, 3), (0, 1, 1), 9.0, train=False)
    made = [sample((1, 2, 3), (0, 1, 1), r) for r in rewards]
    assert torch.equal(adv(group(*made[:2]), others), adv(group(*made[:2])))
    assert torch.equal(adv(group(*made[:2], companion), others), adv(group(*made[:2])))
    assert not torch.equal(adv(group(*made), others), adv(group(*made[:2])))


def test_collate_of_nothing_is_an_error():
    for groups in ([], [group()], [group(sample((1, 2), (0, 1), train=False))]):
        with pytest.raises(ValueError, match="no sample"):
            collate(groups)


# ---- select


def tensors(batch: Batch) -> dict[str, torch.Tensor]:
    return {f.name: v for f in fields(batch) if isinstance(v := getattr(batch, f.name), torch.Tensor)}


@given(tries(), st.data())
def test_select_takes_rows_whole_and_only_padding_is_cut(groups, data):
    batch = collate(groups)
    batch = scrambled(replace(batch, adv=torch.randn(batch.mask.shape)), columns=2)
    rows = torch.tensor(data.draw(st.lists(st.integers(0, len(batch) - 1), min_size=1, max_size=6)))
    part = batch.select(rows)
    assert part.row.tolist() == rows.tolist()
    assert part.ids.shape[1] == int(batch.length[rows].max())
    assert tensors(part).keys() == tensors(batch).keys()
    for name, value in tensors(part).items():
        for i, row in enumerate(rows.tolist()):
            n = int(batch.length[row])
            whole = getattr(batch, name)[row]
            assert torch.equal(value[i][:n] if whole.dim() else value[i], whole[:n] if whole.dim() else whole)


def test_select_of_no_rows_is_an_empty_batch():
    assert len(world(0).select(torch.arange(0))) == 0


def test_to_moves_every_tensor():
    batch = replace(credited(0), bootstrap=torch.zeros(len(world(0))))
    assert {f.name for f in fields(Batch)} - tensors(batch).keys() == {"local_mean", "step", "done"}
    assert {v.device.type for v in tensors(batch.to("meta")).values()} == {"meta"}


# ---- pack and split


@given(st.lists(st.integers(1, 12), max_size=12), st.integers(1, 40))
def test_pack_covers_every_length_once_within_the_budget_and_wastes_no_room(lengths, tokens):
    lengths = sorted(lengths, reverse=True)
    parts = pack(lengths, tokens)
    assert [i for start, stop in parts for i in range(start, stop)] == list(range(len(lengths)))
    for start, stop in parts:
        assert stop - start == 1 or (stop - start) * lengths[start] <= tokens
        if stop < len(lengths):  # the next row would not have fitted
            assert (stop - start + 1) * lengths[start] > tokens


def credited(seed: int, name: str = "grpo", mode: str = "token-mean") -> Batch:
    return credit(world(seed), algorithm(name)).weighted(mode, LIMIT)


@given(st.integers(0, 50), st.integers(1, 90), st.sampled_from(MODES))
def test_micro_batches_hold_each_contributing_row_once_and_whole_within_the_budget(seed, tokens, mode):
    batch = credited(seed, mode=mode)
    counted = batch.mask if mode == "bnpo" else batch.weight  # bnpo's means count the tokens without advantage
    contributing = {i for i in range(len(batch)) if counted[i].any()}
    assert 0 < len(contributing) < len(batch)
    seen = Counter()
    for micro in batch.split(tokens):
        assert len(micro) == 1 or micro.ids.numel() <= tokens
        assert micro.ids.shape[1] == int(micro.length.max())
        seen.update(micro.row.tolist())
        for i, row in enumerate(micro.row.tolist()):
            n = int(batch.length[row])
            assert int(micro.length[i]) == n and micro.mask[i].sum() == batch.mask[row].sum()
            for name in ("ids", "mask", "adv", "rewards", "logp_behave", "version") + ("weight",) * (mode != "bnpo"):
                ours, whole = getattr(micro, name)[i, :n], getattr(batch, name)[row, :n]
                torch.testing.assert_close(ours, whole, rtol=0, atol=0, equal_nan=True, msg=name)
    assert max(seen.values()) == 1 and contributing <= seen.keys()
    assert mode == "bnpo" or contributing == seen.keys()


def test_rows_of_one_micro_batch_need_little_padding():
    """200 rows of 5 to 60 tokens, sorted by length: an eighth of a pass is padding; in one rectangle, nearly half."""
    lengths = torch.randint(5, 61, (200,), generator=torch.Generator().manual_seed(0)).tolist()
    batch = collate([group(*(sample([1] * n, [False] + [True] * (n - 1)) for n in lengths))])
    batch = replace(batch, weight=batch.mask.float())
    sizes = [micro.ids.numel() for micro in batch.split(1024)]
    assert sum(sizes) < 1.15 * sum(lengths) and batch.ids.numel() > 1.8 * sum(lengths)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_batch_without_contrast_costs_no_pass_unless_a_kl_term_or_a_critic_learns_from_it(name):
    """Of rewards and of length: an overlong answer among others is a contrast, where that costs."""
    flat = replace(world(0), rewards=torch.zeros(world(0).mask.shape, dtype=torch.float64))
    row = algorithm(name, **{"shaping.overlong_penalty": 0.0})
    update = credit(flat, row).weighted(row.axes.aggregation, LIMIT)
    passed = sum(len(micro) for micro in update.split(64))
    assert passed == (int(flat.mask.any(1).sum()) if row.critic or row.axes.kl_weight else 0)


def one_to_seven(mode: str, tokens: int) -> float:
    """Σ weight·ℓ over micro-batches, of rows with the token losses [3, 4, 5], [6, 7] and [1, 2]."""
    rows = [[3, 4, 5], [6, 7], [1, 2]]
    batch = collate([group(*(sample([1] * (len(r) + 1), [False] + [True] * len(r)) for r in rows))])
    per_token = [[0] + r + [0] * (3 - len(r)) for r in rows]
    batch = replace(batch, adv=torch.tensor(per_token, dtype=torch.float64)).weighted(mode, LIMIT)
    return sum(float((micro.weight * micro.adv).sum()) for micro in batch.split(tokens))


def test_the_mean_over_an_update_is_not_the_mean_of_its_micro_batches():
    """8 tokens hold the first two rows: their mean is 5, the last one's 1.5; the mean of those is 3.25, of all 4."""
    for tokens in (1, 8, 100):
        assert one_to_seven("token-mean", tokens) == pytest.approx(4.0, rel=1e-12)
        assert one_to_seven("token-sum", tokens) == pytest.approx(28.0, rel=1e-12)
        assert one_to_seven("seq-mean-token-mean", tokens) == pytest.approx((4 + 6.5 + 1.5) / 3, rel=1e-12)
        assert one_to_seven("seq-mean-token-sum", tokens) == pytest.approx(28 / 3, rel=1e-12)
    assert [one_to_seven("bnpo", tokens) for tokens in (100, 8, 1)] == pytest.approx([4.0, 3.25, 4.0], rel=1e-12)


def test_a_row_without_tokens_counts_nowhere_in_bnpo_either():
    some, empty = sample((1, 1), (0, 1)), sample((1, 1), (0, 0), finish="abort")
    for rows in ([some, some], [some, some, empty]):
        batch = collate([group(*rows)])
        batch = replace(batch, adv=torch.ones(batch.mask.shape)).weighted("bnpo", LIMIT)
        assert sum(float((micro.weight * micro.adv).sum()) for micro in batch.split(2)) == pytest.approx(1.0)


# ---- weighted


@pytest.mark.parametrize("mode", MODES)
def test_keep_takes_tokens_away_and_leaves_the_others_weights(mode):
    batch = credited(0, mode=mode)
    full = replace(batch, keep=None).weighted(mode, LIMIT).weight
    wanted = oracles.weights(mode, batch.mask.tolist(), batch.group.tolist(), LIMIT)
    torch.testing.assert_close(full, torch.tensor(wanted, dtype=torch.float64), rtol=1e-13, atol=0)
    assert torch.equal(batch.weight, full.where(batch.keep, 0.0)) and not torch.equal(batch.weight, full)
    assert batch.weight.dtype == batch.adv.dtype and batch.local_mean == (mode == "bnpo")


# ---- shuffle_into


@given(st.integers(1, 30), st.integers(1, 5), st.integers(1, 3), st.integers(0, 9))
def test_every_epoch_is_a_partition_into_equal_updates(rows, updates, epochs, step):
    batch = collate([group(*[sample((1, 2), (0, 1))] * rows)])
    parts = batch.shuffle_into(updates, epochs, key=(0, step))
    assert len(parts) == updates * epochs
    for e in range(epochs):
        epoch = parts[e * updates : (e + 1) * updates]
        assert sorted(torch.cat(epoch).tolist()) == list(range(rows))
        assert max(map(len, epoch)) - min(map(len, epoch)) <= 1
    again = batch.shuffle_into(updates, epochs, key=(0, step))
    assert all(torch.equal(a, b) for a, b in zip(parts, again))


def test_shuffles_differ_by_epoch_and_key_and_one_update_is_not_shuffled():
    batch = collate([group(*[sample((1, 2), (0, 1))] * 64)])
    orders = [tuple(torch.cat(batch.shuffle_into(2, 2, key)[i : i + 2]).tolist())
              for key in ((0, 0), (0, 1), (1, 0)) for i in (0, 2)]  # fmt: skip
    assert len(set(orders)) == 6
    assert [part.tolist() for part in batch.shuffle_into(1, 3, (0, 0))] == [list(range(64))] * 3


# ---- alignment: the one shift by one of the project


def scores(ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """log π of a batch with these ids and this mask."""
    batch = collate([group(*(sample(r, m) for r, m in zip(ids.tolist(), mask.tolist())))])
    with torch.no_grad():
        return policy()(batch).logp


def test_logp_scores_the_token_it_stands_at_given_the_tokens_before_it():
    """Token by token against the model's own logits on the prefix alone, which cannot know what comes after."""
    batch = world(1)
    with torch.no_grad():
        logp = policy()(batch).logp
        for i, row in enumerate(batch.mask.tolist()):
            for t, sampled in enumerate(row):
                if not sampled:
                    assert float(logp[i, t]) == 0.0
                    continue
                logits = policy().model(input_ids=batch.ids[i : i + 1, :t]).logits[0, -1]
                assert float(logp[i, t]) == pytest.approx(float(logits.log_softmax(0)[batch.ids[i, t]]), abs=1e-6)


def test_logp_is_a_distribution_over_the_next_token():
    """Σ_v π(v | past) = 1 at every position, the first sampled and the last."""
    ids, mask = torch.randint(0, VOCABULARY, (VOCABULARY, 5), generator=torch.Generator().manual_seed(0)), [1, 2, 4]
    for t in mask:
        each = ids[:1].repeat(VOCABULARY, 1)
        each[:, t] = torch.arange(VOCABULARY)
        chosen_there = torch.zeros_like(each, dtype=torch.bool)
        chosen_there[:, t] = True
        assert float(scores(each, chosen_there)[:, t].exp().sum()) == pytest.approx(1.0, abs=1e-12)
