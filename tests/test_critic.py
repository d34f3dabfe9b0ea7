"""What is to be expected: a value sees the past alone, whatever stands after it, and nobody but the critic learns it."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanorl import tiny
from nanorl.config import Config
from nanorl.critic import Critic, centre, valued
from nanorl.optimize import adamw
from nanorl.policy import Policy
from nanorl.sample import FINISH
from tests import rows
from tests.worlds import algorithm, policy, scrambled, world

TRUNKS = ["own", "shared"]


def outspoken(trunk: str, net: Policy | None = None) -> Critic:
    """A critic in float64 on the tiny policy, which has an opinion: its own trunk has moved, its head is not zero."""
    critic, random = Critic(net or policy(), trunk).double(), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in critic.parameters():
            p.add_(torch.randn(p.shape, generator=random, dtype=p.dtype), alpha=0.1)
    return critic


def told(critic: Critic, batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Values [B, T] and those of whole rows [B], without gradient."""
    with torch.no_grad():
        return critic(batch, policy().hidden(batch.ids) if critic.trunk is None else None)


# ---- what it sees


@pytest.mark.parametrize("trunk", TRUNKS)
def test_the_value_of_a_token_is_that_of_the_prefix_before_it_alone(trunk):
    """Prefix by prefix, each on its own, so nothing after it can be known; 0 off the mask; the whole row at its end."""
    batch, critic = world(1), outspoken(trunk)
    value, end = told(critic, batch)
    body = policy().model.base_model if trunk == "shared" else critic.trunk

    def alone(i: int, n: int) -> float:
        with torch.no_grad():
            return float(critic.head(body(input_ids=batch.ids[i : i + 1, :n]).last_hidden_state[0, -1]))

    assert value.shape == batch.mask.shape and value[batch.mask].std() > 0.1
    for i, row in enumerate(batch.mask.tolist()):
        assert float(end[i]) == pytest.approx(alone(i, int(batch.length[i])), abs=1e-6)
        for t, sampled in enumerate(row):
            assert float(value[i, t]) == (pytest.approx(alone(i, t), abs=1e-6) if sampled else 0.0)


@pytest.mark.parametrize("trunk", TRUNKS)
@settings(max_examples=20)
@given(st.integers(1, 7), st.integers(0, 99))
def test_what_comes_at_and_after_a_token_does_not_change_its_value(trunk, t, seed):
    batch, critic = world(0), outspoken(trunk)
    later = torch.randint(1, 17, batch.ids.shape, generator=torch.Generator().manual_seed(seed))
    changed = replace(batch, ids=torch.where(torch.arange(batch.ids.shape[1]) < t, batch.ids, later))
    ours, theirs = told(critic, batch)[0], told(critic, changed)[0]
    assert torch.allclose(ours[:, : t + 1], theirs[:, : t + 1], rtol=0, atol=1e-12)


@pytest.mark.parametrize("trunk", TRUNKS)
def test_padding_changes_nothing_whatever_it_holds_and_however_wide_it_is(trunk):
    batch, critic = world(2), outspoken(trunk)
    value, end = told(critic, batch)
    for seed in range(3):
        wide, whole = told(critic, scrambled(batch, 3, seed))
        assert torch.allclose(wide[:, : value.shape[1]], value, rtol=0, atol=1e-12)
        assert wide[:, value.shape[1] :].eq(0).all()
        assert torch.allclose(whole, end, rtol=0, atol=1e-12)


# ---- how it begins, and who learns


@pytest.mark.parametrize("trunk", TRUNKS)
def test_it_expects_nothing_at_first_and_a_trunk_of_its_own_is_a_copy_of_the_policys(trunk):
    critic, body = Critic(policy(), trunk), policy().model.base_model
    assert all(x.eq(0).all() for x in told(critic.double(), world(0)))
    theirs = {} if critic.trunk is None else dict(critic.trunk.named_parameters())
    assert (theirs.keys() == dict(body.named_parameters()).keys()) == (trunk == "own")
    for name, p in body.named_parameters() if trunk == "own" else ():
        assert torch.equal(p, theirs[name]) and p.data_ptr() != theirs[name].data_ptr()
    trained = {id(p) for group in adamw(critic, Config()).param_groups for p in group["params"]}
    assert trained == {id(p) for p in critic.parameters()} and (len(trained) == 2) == (trunk == "shared")


@pytest.mark.parametrize("trunk", TRUNKS)
def test_the_values_gradient_reaches_the_policy_through_a_shared_trunk_and_only_then(trunk):
    net = Policy(tiny.model(seed=0).double())
    critic, batch = outspoken(trunk, net), world(0)
    value, _ = critic(batch, net(batch).hidden)
    value.sum().backward()
    reached = [p.grad is not None and bool(p.grad.ne(0).any()) for p in net.parameters()]
    assert all(reached) if trunk == "shared" else not any(reached)
    assert all(p.grad is not None and p.grad.ne(0).any() for p in critic.parameters())


def test_a_zero_head_on_a_shared_trunk_sends_nothing_into_it_yet():
    """So the first step moves the policy exactly as without a critic."""
    net, batch = Policy(tiny.model(seed=0).double()), world(0)
    critic = Critic(net, "shared").double()
    (critic(batch, net(batch).hidden)[0] - 1).square().sum().backward()
    assert all(p.grad is None or p.grad.eq(0).all() for p in net.parameters()) and critic.head.weight.grad.ne(0).any()


@pytest.mark.parametrize("trunk", TRUNKS)
def test_under_bfloat16_passes_weights_and_values_stay_float32(trunk):
    wide, narrow = (Policy(tiny.model(seed=0), dtype=dtype) for dtype in (torch.float32, torch.bfloat16))
    batch, values = world(0), []
    for net in (wide, narrow):
        critic = outspoken(trunk, net).float()
        value, _ = critic(batch, net(batch).hidden)
        value.sum().backward()
        assert {p.dtype for p in critic.parameters()} == {p.grad.dtype for p in critic.parameters()} == {value.dtype}
        values.append(value.detach())
    assert values[0].dtype == torch.float32 and 0 < (values[0] - values[1]).abs().max() < 0.3


# ---- valued


@pytest.mark.parametrize("trunk", TRUNKS)
@pytest.mark.parametrize("tokens", [1, 20, 10**6])
def test_values_are_the_same_in_passes_of_any_size_and_carry_no_gradient(trunk, tokens):
    batch, critic = world(3), outspoken(trunk)
    measured = valued(batch, critic, policy(), tokens, bootstrap=False)
    assert torch.allclose(measured.value, told(critic, batch)[0], rtol=0, atol=1e-12) and not measured.value.requires_grad
    assert measured.bootstrap is None and measured.row.tolist() == batch.row.tolist()


@pytest.mark.parametrize("trunk", TRUNKS)
@pytest.mark.parametrize("how", [{}, {"gamma": 0.8}, {"reward_norm.mean_level": "batch", "kl_weight": 0.3}])
def test_a_centred_critic_says_the_mean_return_of_a_sampled_token_everywhere_and_explains_nothing_yet(trunk, how):
    """The return that the policy is trained on: of rewards as they are normalised, less the KL, discounted."""
    batch, net, algo = world(3), policy(), algorithm("ppo", **how)
    critic, answers, every = Critic(net, trunk), rows.answers(batch, batch.logp_prox), []
    centre(critic, batch, algo)
    for a in answers:
        of_row = [0.0] * (len(a.at) - 1) + [a.reward - sum(b.reward for b in answers) / len(answers)]
        earned = of_row if algo.axes.reward_norm.on else a.earned
        every += rows.to_go(rows.less_kl(a, earned, algo.axes.kl_weight), algo.axes.gamma) if a.at else []
    mean = sum(every) / len(every)
    value, end = (x.detach() for x in critic(batch, net.hidden(batch.ids)))
    assert torch.allclose(value, batch.mask.double() * mean, atol=1e-12) and len({*every}) > 2 and abs(mean) > 1e-3
    assert torch.allclose(end, torch.full_like(end, mean), atol=1e-12) and not critic.head.weight.any()
    returns = algo.advantage(replace(batch, value=value))[1]
    assert float((returns - value)[batch.mask].std()) == pytest.approx(float(returns[batch.mask].std()), rel=1e-12)


def test_where_nothing_was_sampled_a_centred_critic_expects_nothing():
    batch, critic = world(3), Critic(policy(), "shared")
    centre(critic, replace(batch, mask=batch.mask & False), algorithm("ppo"))
    assert not critic.head.bias.any()


@settings(max_examples=20)
@given(st.lists(st.sampled_from(FINISH), min_size=8, max_size=8), st.integers(1, 60))
def test_the_bootstrap_is_the_value_of_the_whole_row_where_it_was_truncated_and_zero_elsewhere(finish, tokens):
    batch, critic = world(0), outspoken("shared")
    batch = replace(batch, finish=torch.tensor([FINISH.index(f) for f in finish]))
    measured, end = valued(batch, critic, policy(), tokens, bootstrap=True), told(critic, batch)[1]
    judged = [float(v) if f == "length" and m.any() else 0.0 for v, f, m in zip(end, finish, batch.mask)]
    assert measured.bootstrap.tolist() == pytest.approx(judged, abs=1e-12) and end.abs().min() > 1e-3
