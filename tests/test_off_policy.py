"""Samples of another policy: what the gradient is of, with each correction and without; by enumeration of answers."""

import itertools
import math
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nanorl import loss as L
from nanorl.algorithms import ALGORITHMS, chosen
from nanorl.axes import Axes
from nanorl.metrics import step_metrics
from nanorl.objective import Algorithm, credit, proximal, reinforce, sapo
from nanorl.pace import Pace
from nanorl.policy import Out
from nanorl.sample import Batch, collate
from tests.worlds import LIMIT, LONGEST, algorithm, changed, group, said, sample, slopes, world

INF, GRPO = math.inf, ALGORITHMS["grpo"]
ANSWERS = [(0,), *itertools.product((1, 2), range(3))]  # 0 ends; two tokens are the limit
WORTH = [1.0, -0.5, 2.0, 0.25, 1.5, -1.0, 0.125]  # in float32, which samples have, exact
SHORT, PRIZES = [(0,), (1,), (2,)], [1.0, -0.75, 0.5]  # answers of one token
BARE = {"reward_norm.mean_level": "none", "reward_norm.std_level": "none", "aggregation": "seq-mean-token-sum"}
OTHERS = {"reward_norm.std_level": "none", "reward_norm.leave_one_out": True, "aggregation": "seq-mean-token-sum"}
UNBOUNDED = {"correction.kind": "truncate", "correction.high": INF}
EXACT = {**UNBOUNDED, "correction.level": "joint"}


def table(seed: int) -> Tensor:
    """[3, 3] a policy: its logits at the first token (row 0), after a 1, after a 2."""
    return torch.randn((3, 3), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def chance(logits: Tensor, answers: list = ANSWERS) -> Tensor:
    """[answers] the probability of each."""
    logp = logits.log_softmax(1)
    return torch.stack([logp[0, a[0]] + (logp[a[0], a[1]] if len(a) == 2 else 0) for a in answers]).exp()


class Mean(NamedTuple):
    """What a loss is on average over all that μ may sample."""

    loss: float
    slope: Tensor  # [3, 3] in the logits of π


def mean(algo: Algorithm, policy: Tensor, sampler: Tensor, size: int = 1, answers: list = ANSWERS,
         worth: list = WORTH) -> Mean:  # fmt: skip
    """E_μ of the loss of a group of this size in its first update: every group that there is, weighed by its chance."""
    picks = list(itertools.product(range(len(answers)), repeat=size))
    batch = collate([group(*(sample((1, *answers[k]), [False] + [True] * len(answers[k]), worth[k]) for k in of))
                     for of in picks])  # fmt: skip
    before = batch.ids.roll(1, 1).where(torch.arange(batch.ids.shape[1]) > 1, 0)  # rows of the table
    leaf = policy.clone().requires_grad_()
    logp, behave = (logits.log_softmax(1)[before, batch.ids] for logits in (leaf, sampler))
    batch = replace(batch, rewards=batch.rewards.double(), logp_behave=behave)
    update = credit(batch, algo).weighted(algo.axes.aggregation, LIMIT)
    likely = torch.stack([chance(sampler, answers)[list(of)].prod() for of in picks])[batch.group]  # [rows]
    loss = ((update.weight * algo.loss(Out(logp, None, None), update)).sum(1) * likely).sum() * len(picks)
    return Mean(loss.item(), torch.autograd.grad(loss, leaf)[0])


def rise(objective, policy: Tensor) -> Tensor:
    """The exact slope of objective(logits)."""
    leaf = policy.clone().requires_grad_()
    return torch.autograd.grad(objective(leaf), leaf)[0]


def reward(policy: Tensor, answers: list = ANSWERS, worth: list = WORTH) -> Tensor:
    """J = E_π[R]."""
    return (chance(policy, answers) * torch.tensor(worth, dtype=torch.float64)).sum()


def local(policy: Tensor, sampler: Tensor) -> Tensor:
    """Σ_s d_μ(s) Σ_a π(a|s)·Q_μ(s, a): one token by π, what stands before it and what comes after it by μ."""
    pi, mu = policy.softmax(1), sampler.softmax(1)
    r = dict(zip(ANSWERS, WORTH))
    first = sum(pi[0, a] * (sum(mu[a, b] * r[a, b] for b in range(3)) if a else r[0,]) for a in range(3))
    return first + sum(mu[0, a] * pi[a, b] * r[a, b] for a in (1, 2) for b in range(3))


def close(got: Tensor, wanted: Tensor, tolerance: float = 1e-11) -> None:
    """Equal, and not both nothing."""
    assert wanted.abs().max() > 1e-3
    torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance * 1e-2)


PAIRS = [(table(seed), table(seed + 50)) for seed in range(3)]


# ---- what the gradient is of


@pytest.mark.parametrize("policy, sampler", PAIRS)
def test_weighed_by_the_answers_own_ratio_other_samples_have_the_exact_gradient(policy, sampler):
    """E_μ[Πρ·∇loss] = −∇J, whatever μ; and a baseline out of μ's own group takes nothing away."""
    wanted = -rise(reward, policy)
    for name in ("reinforce", "grpo", "trpo", "liteppo"):
        close(mean(algorithm(name, **BARE, **EXACT), policy, sampler).slope, wanted)
        close(mean(algorithm(name, **OTHERS, **EXACT), policy, sampler, 2).slope, wanted)
    value = sum(p * r * len(a) for p, r, a in zip(chance(policy), WORTH, ANSWERS))  # at r = 1 a token's loss is −ρ·A
    assert mean(algorithm("grpo", **BARE, **EXACT), policy, sampler).loss == pytest.approx(-float(value), rel=1e-12)


@pytest.mark.parametrize("policy, sampler", PAIRS)
def test_weighed_by_token_each_token_is_right_and_its_past_and_future_are_the_samplers(policy, sampler):
    """E_μ[Σ_t ρ_t·A·∇log π_t] = ∇_π Σ_s d_μ(s) Σ_a π(a|s)·Q_μ(s, a), which is not ∇J; the geometric mean is neither."""
    wanted = -rise(lambda logits: local(logits, sampler), policy)
    for name in ("reinforce", "grpo"):
        close(mean(algorithm(name, **BARE, **UNBOUNDED), policy, sampler).slope, wanted)
    ratio = mean(algorithm("trpo", prox="behave", **BARE), policy, sampler)  # E_μ[r_t·A] is that surrogate itself
    close(ratio.slope, wanted)
    assert ratio.loss == pytest.approx(-float(local(policy, sampler)), rel=1e-12)
    exact = -rise(reward, policy)
    assert (wanted - exact).norm() > 0.05 * exact.norm()
    geometric = mean(algorithm("reinforce", **BARE, **UNBOUNDED, **{"correction.level": "sequence"}), policy, sampler)
    assert all((geometric.slope - other).norm() > 0.02 * exact.norm() for other in (wanted, exact))


def test_the_error_of_weights_by_token_is_of_first_order_in_how_far_the_sampler_is():
    """‖E − ∇J‖ halves with the distance, as without any weights; at none both are exact."""
    policy, away = PAIRS[0]
    exact = -rise(reward, policy)
    for how in (UNBOUNDED, {"correction.kind": "none"}):
        algo = algorithm("reinforce", **BARE, **how)
        far, near = ((mean(algo, policy, policy + h * away).slope - exact).norm() for h in (2e-4, 1e-4))
        assert far / near == pytest.approx(2, rel=1e-2) and far > 1e-6
        close(mean(algo, policy, policy).slope, exact)


@pytest.mark.parametrize("policy, sampler", PAIRS)
def test_for_answers_of_one_token_all_levels_are_exact(policy, sampler):
    for level in ("token", "sequence", "joint"):
        algo = algorithm("grpo", **BARE, **UNBOUNDED, **{"correction.level": level})
        close(mean(algo, policy, sampler, 1, SHORT, PRIZES).slope, -rise(lambda x: reward(x, SHORT, PRIZES), policy))


@pytest.mark.parametrize("policy, sampler", PAIRS)
def test_without_a_correction_the_samplers_answers_are_imitated_in_proportion_to_their_reward(policy, sampler):
    """E_μ[A·∇log π] = ∇ E_μ[A·log π(y)]: how likely an answer has become does not come into it."""

    def imitation(logits):
        return (chance(sampler) * torch.tensor(WORTH, dtype=torch.float64) * chance(logits).log()).sum()

    wanted = -rise(imitation, policy)
    for name in ("reinforce", "grpo"):
        got = mean(algorithm(name, **BARE), policy, sampler)
        close(got.slope, wanted)
        assert (got.slope + rise(reward, policy)).norm() > 0.05 * wanted.norm()
    value = mean(algorithm("reinforce", **BARE), policy, sampler).loss
    assert value == pytest.approx(-float(imitation(policy)), rel=1e-12)


@pytest.mark.parametrize("chi", [0.04, 0.5])
def test_the_weight_of_an_answer_scatters_exponentially_with_its_length_and_that_of_a_token_not(chi):
    """E_μ[ρ²] = (1 + χ²)^n for n tokens of χ² each, at the token 1 + χ²; both are 1 on average, not the geometric mean."""
    shift = math.sqrt(chi) / 2
    pi, mu = torch.tensor([0.5 + shift, 0.5 - shift], dtype=torch.float64), torch.full((2,), 0.5, dtype=torch.float64)
    for n in range(1, 6):
        answers = torch.tensor(list(itertools.product((0, 1), repeat=n)))
        likely, mask = mu[answers].prod(1), torch.ones_like(answers, dtype=torch.bool)
        token, joint, root = (L.correction(pi[answers].log(), mu[answers].log(), mask, "truncate", level)[:, -1]
                              for level in ("token", "joint", "sequence"))  # fmt: skip
        for weight, square in ((token, 1 + chi), (joint, (1 + chi) ** n)):
            assert float(likely @ weight) == pytest.approx(1, rel=1e-12)
            assert float(likely @ weight.square()) == pytest.approx(square, rel=1e-12)
        assert float(likely @ root) < 1 - 1e-3 or n == 1


# ---- what a bound takes away


def test_the_example_of_the_page():
    """μ = 0.1, 0.9 and π = 0.6, 0.4: ρ = 6 and 0.444. Rewards 1 and ½, without a baseline and with ¾."""
    pi, mu = (torch.tensor([[p, 1 - p, 1e-300]], dtype=torch.float64).log().expand(3, 3) for p in (0.6, 0.1))
    cases = {"exact": (UNBOUNDED, 0.12, 0.12), "truncate": ({"correction.kind": "truncate"}, 0.08, 0.11),
             "mask": ({"correction.kind": "mask"}, -0.12, 0.06), "none": ({"correction.kind": "none"}, -0.23, 0.145),
             "behave": ({"prox": "behave"}, -0.12, 0.0)}  # fmt: skip
    for how, *wanted in cases.values():
        for worth, slope in zip(([1.0, 0.5], [0.25, -0.25]), wanted):
            got = -mean(algorithm("grpo", **BARE, **how), pi, mu, 1, SHORT[:2], worth).slope[0, 0]
            assert float(got) == pytest.approx(slope, rel=1e-12, abs=1e-15)


logits = st.lists(st.floats(-2, 2), min_size=3, max_size=3).map(lambda x: torch.tensor([x] * 3, dtype=torch.float64))


@pytest.mark.parametrize("kind", ["truncate", "mask"])
@settings(max_examples=25)
@given(logits, logits, st.sampled_from([1.2, 2.0, 5.0]))
def test_what_a_bound_leaves_is_another_objective_and_what_it_takes_is_the_mass_beyond_it(kind, policy, sampler, high):
    """Up to C·μ it is Σ π·A. Beyond, truncation goes on as C·μ·A·log π, masking stands still.

    What is missing: δ·A·∇log π, δ = (π − C·μ)⁺ or π·1[ρ > C]; at most max|A|·max‖∇log π‖·Σδ; 1 − E_μ[ρ̄] = Σδ.
    """
    pi, mu, prize = policy.softmax(1)[0], sampler.softmax(1)[0], torch.tensor(PRIZES, dtype=torch.float64)
    out = pi > high * mu
    missing = (pi - high * mu * (kind == "truncate")) * out

    def objective(logits):
        now = logits.softmax(1)[0]
        beyond = high * mu * (1 + (now / (high * mu)).log()) if kind == "truncate" else high * mu
        return (prize * now.where(~out, beyond)).sum()

    algo = algorithm("grpo", **BARE, **{"correction.kind": kind, "correction.high": high})
    got, exact = -mean(algo, policy, sampler, 1, SHORT, PRIZES).slope, rise(lambda x: reward(x, SHORT, PRIZES), policy)
    torch.testing.assert_close(got, rise(objective, policy), rtol=1e-11, atol=1e-13)
    longest = max(rise(lambda x, a=a: x.log_softmax(1)[0, a], policy).norm() for a in range(3))
    assert (got - exact).norm() <= prize.abs().max() * longest * missing.sum() + 1e-13
    mask = torch.ones(3, 1, dtype=torch.bool)
    coefficient = L.correction(pi.log()[:, None], mu.log()[:, None], mask, kind, "token", 0.0, high)[:, 0]
    assert float(1 - mu @ coefficient) == pytest.approx(float(missing.sum()), rel=1e-9, abs=1e-13)


# ---- the naive objective, whose clip stands around μ


@pytest.mark.parametrize("done", [0.0, 0.5])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_clip_around_the_sampler_is_a_mask_with_one_bound_chosen_by_the_advantages_sign(seed, done):
    """In every update: ω = π_θ/μ, and nothing where A > 0 and it is above 1.2, or A < 0 and it is below 0.8."""
    batch = replace(world(seed), done=done, logp_prox=(now := said(world(seed))).logp)
    naive = slopes(batch, algorithm("grpo", prox="behave"), now).logp
    above, below = ({"correction.kind": "mask", "correction.low": low, "correction.high": high}
                    for low, high in ((0.0, 1.2), (0.8, INF)))  # fmt: skip
    adv = credit(batch, GRPO).adv
    wanted = slopes(batch, algorithm("grpo", **above), now).logp.where(
        adv > 0, slopes(batch, algorithm("grpo", **below), now).logp)  # fmt: skip
    torch.testing.assert_close(naive, wanted, rtol=1e-12, atol=1e-15)
    silent = (naive == 0) & batch.mask & (adv != 0)
    rho = L.ratio(now.logp, batch.logp_behave, batch.mask)
    assert silent.any() and (naive[batch.mask] != 0).any() and bool(((adv > 0) == (rho > 1.2))[silent].all())


@pytest.mark.parametrize("policy, sampler", PAIRS)
def test_the_naive_gradient_lacks_exactly_the_tokens_that_have_moved_the_right_way(policy, sampler):
    """E = ∇J − Σ π·A·∇log π over the answers of one token that are beyond the clip on the side of their advantage."""
    pi, mu, silent = policy.softmax(1)[0], sampler.softmax(1)[0], 0
    for worth in (PRIZES, [-prize for prize in PRIZES]):
        prize = torch.tensor(worth, dtype=torch.float64)
        beyond = ((prize > 0) & (pi > 1.2 * mu)) | ((prize < 0) & (pi < 0.8 * mu))
        exact = rise(lambda x, worth=worth: reward(x, SHORT, worth), policy)
        gone = (pi * prize).where(beyond, 0.0)
        missing = rise(lambda x, gone=gone: gone @ x.log_softmax(1)[0], policy)
        got = mean(algorithm("grpo", prox="behave", **BARE), policy, sampler, 1, SHORT, worth).slope
        torch.testing.assert_close(got, missing - exact, rtol=1e-11, atol=1e-13)
        silent += int(beyond.sum())
    assert silent


# ---- the decoupled objective


@pytest.mark.parametrize("name", [n for n, row in ALGORITHMS.items() if row.axes.ratio_level == "token"
                                  and row.surrogate is not sapo and row.axes.prox == "recompute"])  # fmt: skip
def test_with_one_update_it_is_the_policy_gradient_with_truncated_weights(name):
    """The slope of each token is −w·min(π_θ/μ, 5)·A, and no pass has measured π_prox."""
    row, batch = ALGORITHMS[name], world(4)
    now = said(batch)
    axes = changed(row.axes, **{"correction.kind": "auto", "kl_weight": 0.0})
    far = replace(batch, done=0.0, logp_prox=None, logp_behave=now.logp + 6 * (batch.logp_behave - now.logp))
    algo = chosen(name, axes, stale=True, longest=LONGEST)
    made = credit(far, algo).weighted(axes.aggregation, LIMIT)
    rho = L.ratio(now.logp, far.logp_behave, far.mask)
    got = slopes(far, algo, now).logp
    torch.testing.assert_close(got, -made.weight * rho.clamp(max=5) * made.adv, rtol=1e-11, atol=1e-14)
    assert rho.max() > 5 and rho[far.mask].min() < 0.2 and got.any()


@pytest.mark.parametrize("done", [0.0, 0.5])
@pytest.mark.parametrize("prox", ["recompute", "loglinear"])
def test_unbounded_and_unclipped_the_split_of_the_ratio_changes_nothing(prox, done):
    """π_prox/μ · π_θ/π_prox = π_θ/μ whatever π_prox is: it says where the clip stands and what the bound sees."""
    batch = replace(world(5), done=done)
    now = said(batch)
    ways = {"prox": prox, **UNBOUNDED}, {"prox": "behave"}
    split, whole = (slopes(batch, algorithm("trpo", **how), now) for how in ways)
    assert split.loss == pytest.approx(whole.loss, rel=1e-12) and abs(whole.loss) > 1e-3
    close(split.logp, whole.logp)
    split, whole = (slopes(batch, algorithm("grpo", **how), now) for how in ways)  # clipped, and there it matters
    assert (split.logp - whole.logp).norm() > 0.01 * whole.logp.norm()


def test_each_half_has_its_own_job():
    """ρ scales a token's pull by a constant of the step; whether it pulls is up to π_θ/π_prox alone."""
    batch, free = world(6), algorithm("decoupled_ppo", **{**UNBOUNDED, "correction.high": 1e9})
    now, made = said(batch), credit(batch, free).weighted("token-mean", LIMIT)
    rho = L.ratio(batch.logp_prox, batch.logp_behave, batch.mask)
    r = L.ratio(now.logp, batch.logp_prox, batch.mask)
    silent = ((made.adv > 0) & (r > 1.2)) | ((made.adv < 0) & (r < 0.8))
    wanted = (-made.weight * rho * r * made.adv).masked_fill(silent, 0.0)
    got = slopes(batch, free, now)
    close(got.logp, wanted)
    older = slopes(replace(batch, logp_behave=batch.logp_behave - 0.7), free, now)  # every ρ twice as large
    close(older.logp, math.exp(0.7) * wanted)
    assert older.loss == pytest.approx(math.exp(0.7) * got.loss, rel=1e-12)
    assert silent.any() and ((rho > 1.2) & ~silent & (wanted != 0)).any()


def test_m2po_is_the_unbounded_weight_without_the_tokens_that_it_drops():
    """In the first update; in later ones it has no clip, and the decoupled objective has."""
    batch = world(7)
    now = said(batch)
    first = replace(batch, done=0.0, logp_prox=now.logp)
    weighed = algorithm("grpo", m2_threshold=0.04, **UNBOUNDED)
    got, wanted, all_of_them = (slopes(first, algo, now) for algo in (ALGORITHMS["m2po"], weighed, GRPO))
    assert got.loss == pytest.approx(wanted.loss, rel=1e-12) and abs(got.loss) > 1e-3
    close(got.logp, wanted.logp)
    assert ((got.logp == 0) & (all_of_them.logp != 0)).any()
    later = slopes(batch, ALGORITHMS["m2po"], now).logp, slopes(batch, weighed, now).logp
    assert ((later[0] != 0) & (later[1] == 0)).any() and not ((later[0] == 0) & (later[1] != 0)).any()


# ---- which rows correct


TRUNCATED = {"grpo", "grpo_deepseekmath", "grpo_areal_page", "dr_grpo", "liteppo", "rloo", "reinforce",
             "reinforce_baseline", "gspo", "gspo_token", "dapo", "trpo", "ppo", "diagnostic"}  # fmt: skip
MASKED, OWN = {"decoupled_ppo", "decoupled_loglinear"}, {"sapo", "m2po"}


@pytest.mark.parametrize("pace", [Pace(), Pace(delay=3), Pace(delay="inf"), Pace(max_lag=1), Pace(max_lag="inf")])
def test_stale_samples_are_corrected_wherever_the_objective_has_a_place_for_it(pace):
    assert TRUNCATED | MASKED | OWN == set(ALGORITHMS)
    for name, row in ALGORITHMS.items():
        algo = chosen(name, row.axes, pace.stale)
        on = "mask" if name in MASKED else "truncate" if name in TRUNCATED and pace != Pace() else "none"
        assert algo.axes == changed(row.axes, **{"correction.kind": on})  # and nothing else is settled
        assert (algo.axes.correction.low, algo.axes.correction.high, algo.axes.correction.level) == (0, 5, "token")
        for asked in ("none", "truncate", "mask"):  # what was asked for stays
            axes = changed(row.axes, **{"correction.kind": asked})
            assert chosen(name, axes, pace.stale).axes == axes
        naive = chosen(name, changed(row.axes, **{"prox": "behave", "correction.kind": "auto"}), pace.stale)
        assert naive.axes.correction.kind == "none"


@pytest.mark.parametrize("done", [0.0, 0.5])
@pytest.mark.parametrize("seed", [1, 2])
def test_grpo_of_stale_samples_is_decoupled_ppo_with_truncation(seed, done):
    batch = replace(world(seed), done=done)
    now, far = said(batch), replace(batch, logp_behave=batch.logp_prox + 6 * (batch.logp_behave - batch.logp_prox))
    got = slopes(far, chosen("grpo", Axes(), stale=True), now)
    wanted = slopes(far, algorithm("decoupled_ppo", **{"correction.kind": "truncate"}), now)
    assert got.loss == wanted.loss and torch.equal(got.logp, wanted.logp) and got.logp.any()
    for other in (algorithm("decoupled_ppo"), chosen("grpo", Axes(), stale=False)):
        assert (slopes(far, other, now).logp - got.logp).norm() > 0.01 * got.logp.norm()


@pytest.mark.parametrize("done", [0.0, 0.5])
@pytest.mark.parametrize("name", sorted(TRUNCATED | MASKED))
def test_where_the_sampler_is_the_policy_every_correction_does_nothing(name, done):
    """Lag 0: at each kind and level, and however narrow its bounds, the update is the uncorrected one, bit by bit."""
    batch = replace(world(8), done=done)
    now = said(batch)
    now = now._replace(logp=batch.logp_prox + 1e-3 * (now.logp - batch.logp_prox))  # gspo's clip is a narrow one
    batch = replace(batch, logp_behave=now.logp if done == 0 else batch.logp_prox,
                    version=torch.where(batch.mask, batch.step, -1))  # fmt: skip
    wanted = slopes(batch, algorithm(name, **{"correction.kind": "none"}), now)
    assert wanted.logp.any()
    for kind, level in itertools.product(("truncate", "mask"), ("token", "sequence", "joint")):
        how = {"correction.kind": kind, "correction.level": level, "correction.low": 0.999, "correction.high": 1.001}
        got = slopes(batch, algorithm(name, **how), now)
        assert got.loss == wanted.loss and torch.equal(got.logp, wanted.logp)


def test_a_surrogate_without_a_ratio_is_weighed_too():
    """−min(ρ, C)·A·log π_θ: REINFORCE with truncated importance weights; the weight itself has no gradient."""
    batch, algo = replace(world(9), done=0.0), chosen("rloo", ALGORITHMS["rloo"].axes, stale=True)
    assert algo.surrogate is reinforce
    now = said(batch)
    leaf = now.logp.clone().requires_grad_()
    made = credit(batch, algo)
    per_token = algo.loss(Out(leaf, None, None), made)
    rho = L.ratio(now.logp, batch.logp_behave, batch.mask).clamp(max=5)
    wanted = (-rho * made.adv * now.logp).where(batch.mask, 0.0)
    torch.testing.assert_close(per_token.detach(), wanted, rtol=1e-12, atol=1e-15)
    close(torch.autograd.grad(per_token.sum(), leaf)[0], (-rho * made.adv).where(batch.mask, 0.0))


# ---- versions and what they show


def interrupted() -> Batch:
    """Two answers at step 9: of versions 5 5 7 7, whose weights came in the middle of it, and of 8."""
    old = sample((1, 2, 3, 4, 0), [False, True, True, True, True], 1.0, version=(-1, 5, 5, 7, 7))
    new = sample((1, 2, 0), [False, True, True], 0.0, version=(-1, 8, 8))
    return collate([group(old, new)], step=9)


def test_a_tokens_lag_is_its_own_and_a_samples_that_of_its_first_token():
    """lag = step − version: 4 4 2 2 and 1 1; the metrics are over samples, 4 and 1; loglinear goes by the token."""
    batch = replace(interrupted(), done=0.5)
    logp = batch.logp_behave + 0.6
    prox = proximal(logp, batch, algorithm("decoupled_loglinear").axes)
    moved = ((prox - batch.logp_behave) / 0.6)[batch.mask]
    lag = torch.tensor([4, 4, 2, 2, 1, 1])
    torch.testing.assert_close(moved, lag / (lag + 0.5), rtol=1e-6, atol=0)
    metrics = step_metrics([], credit(batch, GRPO), logp, GRPO)
    assert (metrics["lag/mean"], metrics["lag/max"]) == (2.5, 4)


def test_what_a_stale_step_shows_is_what_its_update_used():
    """ρ of the six tokens: 8, 2, ½, 1, 1 and 1/16, bounded at 5; mismatch is |log ρ|, of what was learned since."""
    batch = replace(interrupted(), done=0.0)
    log_rho = torch.zeros(batch.mask.shape, dtype=torch.float64)
    log_rho[batch.mask] = torch.tensor([8, 2, 0.5, 1, 1, 0.0625], dtype=torch.float64).log()
    logp = batch.logp_behave.double() + log_rho
    batch = replace(batch, logp_behave=batch.logp_behave.double(), rewards=batch.rewards.double())
    for kind, used in (("truncate", [5, 2, 0.5, 1, 1, 0.0625]), ("mask", [0, 2, 0.5, 1, 1, 0.0625])):
        algo = chosen("grpo", changed(Axes(), **{"correction.kind": kind}), stale=True)
        made = credit(batch, algo).weighted("token-mean", LIMIT)
        metrics = step_metrics([], made, logp, algo)
        leaf = logp.clone().requires_grad_()
        pulls = torch.autograd.grad((made.weight * algo.loss(Out(leaf, None, None), made)).sum(), leaf)[0]
        close((pulls / -(made.weight * made.adv))[batch.mask], torch.tensor(used, dtype=torch.float64))
        assert metrics["correction/mean"] == pytest.approx(sum(used) / 6) and metrics["correction/max"] == max(used)
        assert metrics["correction/masked"] == (1 / 6 if kind == "mask" else 0)
        assert metrics["mismatch/mean"] == pytest.approx(9 * math.log(2) / 6)
        assert metrics["mismatch/max"] == pytest.approx(4 * math.log(2)) and metrics["ratio/max"] == 1
