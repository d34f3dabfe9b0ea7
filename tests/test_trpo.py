"""The natural gradient step is its equation, whatever the parameters are called, and never leaves the trust region."""

import copy
import math
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel

from nanorl import trpo
from nanorl.monitor import collecting
from nanorl.policy import Policy
from tests import worlds
from tests.worlds import LIMIT, scrambled, world

SEEDS = st.integers(0, 2**32 - 1)
ROUNDING = 2e-6  # the model's norms compute in float32 whatever its weights are


def normal(*shape, seed=0):
    """Normal numbers in float64."""
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape))


def close(a, b, tolerance):
    """The vectors differ by so much of their length, and have one."""
    return b.norm() > 0 and (a - b).norm() <= tolerance * b.norm()


# ---- conjugate gradient


def positive(n, seed):
    """A symmetric matrix [n, n] with eigenvalues from 1 to 10."""
    turn = torch.linalg.qr(normal(n, n, seed=seed))[0]
    return turn @ torch.diag(torch.linspace(1, 10, n, dtype=torch.float64)) @ turn.T


@given(st.integers(1, 12), SEEDS)
def test_after_n_products_conjugate_gradient_has_solved_the_system(n, seed):
    matrix, b = positive(n, seed), normal(n, seed=seed + 1)
    x, residual = trpo.conjugate_gradient(lambda v: matrix @ v, b, n)
    assert np.allclose(x, np.linalg.solve(matrix, b), rtol=0, atol=1e-8 * float(b.norm()))
    assert residual < 1e-8


@given(st.integers(2, 12), st.data(), SEEDS)
def test_after_k_products_it_has_the_best_of_the_krylov_space_and_says_what_is_left(n, data, seed):
    """argmin ½xᵀFx − bᵀx over x = Kc is c = (KᵀFK)⁻¹Kᵀb, K = b, Fb, …, F^{k−1}b."""
    k = data.draw(st.integers(1, min(n, 4)))
    matrix, b = positive(n, seed), normal(n, seed=seed + 1)
    krylov = torch.linalg.qr(torch.stack([torch.linalg.matrix_power(matrix, i) @ b for i in range(k)], 1))[0]
    best = krylov @ torch.linalg.solve(krylov.T @ matrix @ krylov, krylov.T @ b)
    x, residual = trpo.conjugate_gradient(lambda v: matrix @ v, b, k)
    assert close(x, best, 1e-7)
    assert math.isclose(residual, float((b - matrix @ x).norm() / b.norm()), rel_tol=1e-6, abs_tol=1e-12)


@given(st.floats(1.0, 1e4), SEEDS)
def test_each_product_adds_to_the_gain_of_the_full_step_whatever_the_residual_does(spread, seed):
    """bᵀ·step = √(2δ)·bᵀx/√(xᵀFx), the eigenvalues from 1 to the spread. No x has more than F⁻¹b: √(2δ·bᵀF⁻¹b)."""
    turn, b = torch.linalg.qr(normal(6, 6, seed=seed))[0], normal(6, seed=seed + 1)
    matrix = turn @ torch.diag(torch.logspace(0, math.log10(spread), 6, dtype=torch.float64)) @ turn.T

    def product(v):
        return matrix @ v

    gains = [float(b @ trpo.full_step(trpo.conjugate_gradient(product, b, k)[0], product, 0.5)) for k in range(1, 7)]
    most = float((b @ torch.linalg.solve(matrix, b)).sqrt())
    assert gains[0] > 0 and all(more > less * (1 - 1e-9) for less, more in pairwise(gains))
    assert math.isclose(gains[-1], most, rel_tol=1e-6)


def test_a_residual_above_1_is_no_reason_to_stay():
    """F = diag(1, 100), b = (1, 0.1): the best multiple of b is 0.505·b, and b − F·x = (0.495, −4.95)."""
    diagonal, b = torch.tensor([[1.0, 100.0], [1.0, 0.1]], dtype=torch.float64)
    x, residual = trpo.conjugate_gradient(lambda v: diagonal * v, b, 1)
    assert close(x, 0.505 * b, 1e-12) and residual > 4
    assert math.isclose(residual, math.hypot(0.495, 4.95) / math.hypot(1, 0.1), rel_tol=1e-12)


def test_it_stops_when_it_is_done_and_where_there_is_no_curvature():
    calls = []

    def product(v):
        calls.append(v)
        return v * torch.tensor([2.0, 2.0, 5.0, 0.0], dtype=torch.float64)

    b = torch.tensor([1.0, 3.0, -2.0, 0.0], dtype=torch.float64)
    x, residual = trpo.conjugate_gradient(product, b, 100)  # two eigenvalues: two products, and one to see it
    assert len(calls) == 3 and residual < 1e-10 and close(x, torch.tensor([0.5, 1.5, -0.4, 0.0]).double(), 1e-7)
    x, residual = trpo.conjugate_gradient(product, torch.tensor([0.0, 0.0, 0.0, 1.0]).double(), 100)
    assert len(calls) == 4 and not x.any() and residual == 1


# ---- products with the Fisher matrix


@given(st.integers(1, 3), st.integers(2, 5), SEEDS)
def test_the_product_is_the_hessians_of_the_kl_and_the_enumerated_fishers_of_softmax_tables(states, actions, seed):
    """F = ∇²D̄_KL(π_old‖π_θ) = E[∇log π ∇log πᵀ]: state s counts w_s, every action its probability."""
    logits, v = normal(states, actions, seed=seed), normal(states * actions, seed=seed + 1)
    weight = normal(states, seed=seed + 2).softmax(0)
    old = logits.log_softmax(1)

    def mean_kl(table):
        return weight @ trpo.categorical_kl(old, table.view(states, actions).log_softmax(1))

    hessian = torch.autograd.functional.hessian(mean_kl, logits.flatten())
    fisher = torch.zeros_like(hessian)
    for s in range(states):
        for a in range(actions):
            score = torch.zeros_like(logits)
            score[s] = torch.eye(actions, dtype=torch.float64)[a] - old[s].exp()  # ∇log softmax
            fisher += weight[s] * old[s, a].exp() * torch.outer(score.flatten(), score.flatten())
    leaf = logits.clone().requires_grad_()
    parts = (weight[s] * trpo.categorical_kl(old[s, None], leaf[s, None].log_softmax(1))[0] for s in range(states))
    assert close(hessian, fisher, 1e-10)
    assert close(trpo.hessian_product(parts, [leaf], v), fisher @ v, 1e-10)


def fresh(temperature=1.0):
    """The tiny model's first layer in float64, with weights so wide that all of the past shows in its log-probs.

    Every embedding is away from 0, where the norm after it would bend the policy within a thousandth of a weight.
    """
    model = copy.deepcopy(worlds.policy().model)
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            if p.dim() >= 2:
                p.copy_(normal(*p.shape, seed=i) / p.shape[-1] ** 0.5)
    return Policy(model, temperature)


def trainable(policy):
    return [p for p in policy.model.parameters() if p.requires_grad]


def vector(policy):
    """All weights, copied."""
    return trpo.flat(p.detach() for p in policy.model.parameters())


def fisher_product(policy, batch, v, tokens=10**6):
    with sdpa_kernel(SDPBackend.MATH):
        return trpo.hessian_product(trpo.divergences(policy, trpo.over_tokens(batch), tokens), trainable(policy), v)


def test_the_product_is_the_enumerated_fishers_of_a_transformer():
    """(1/N) Σ_t Σ_v π(v|past_t)·∇log π(v|past_t)·(∇log π(v|past_t)·u) by the model's own logits, one gradient a term."""
    policy, batch = fresh(temperature=0.7), update().select(torch.tensor([0, 4, 5, 6]))
    u, tokens = normal(len(vector(policy))), batch.mask.nonzero().tolist()
    wanted = torch.zeros_like(u)
    for row, t in tokens:
        logp = (policy.model(input_ids=batch.ids[row : row + 1, :t]).logits[0, -1] / 0.7).log_softmax(0)
        for token in logp:
            score = trpo.flat(torch.autograd.grad(token, trainable(policy), retain_graph=True))
            wanted += token.exp().detach() * score * (score @ u) / len(tokens)
    assert len(tokens) > 5 and close(fisher_product(policy, batch, u), wanted, ROUNDING)


# ---- a bandit: one softmax, its last logit fixed at 0, exact expectations


def bandit_step(free, payoff, delta, turn):
    """The undamped step of φ [K−1], free logits θ = turn·φ: g = ∇Σ_a π_a·payoff_a, F by double backward."""
    phi = torch.linalg.solve(turn, free).requires_grad_()

    def logp():
        return torch.cat([turn @ phi, phi.new_zeros(1)]).log_softmax(0)[None]

    g = torch.autograd.grad((logp().exp() @ payoff)[0], phi)[0]

    def product(v):
        return trpo.hessian_product([trpo.categorical_kl(logp().detach(), logp()).sum()], [phi], v)

    x, _ = trpo.conjugate_gradient(product, g, 3 * len(free), tolerance=1e-13)
    return trpo.full_step(x, product, delta)


BANDITS = given(st.integers(2, 6), st.floats(1e-6, 1.0), SEEDS)


@BANDITS
def test_the_step_of_a_bandit_is_the_closed_form(arms, delta, seed):
    """F⁻¹g of arm a is Q_a − Q_K, and gᵀF⁻¹g is the variance of Q under π."""
    free, payoff = normal(arms - 1, seed=seed), normal(arms, seed=seed + 1)
    p = torch.cat([free, free.new_zeros(1)]).softmax(0)
    variance = p @ payoff**2 - (p @ payoff) ** 2
    wanted = (2 * delta / variance).sqrt() * (payoff[:-1] - payoff[-1])
    assert close(bandit_step(free, payoff, delta, torch.eye(arms - 1).double()), wanted, 1e-8)


@BANDITS
def test_the_step_does_not_depend_on_what_the_parameters_are(arms, delta, seed):
    """θ = A·φ: the step in φ is A⁻¹ times the step in θ. (The plain gradient's is Aᵀ times it.)"""
    free, payoff = normal(arms - 1, seed=seed), normal(arms, seed=seed + 1)
    turn = positive(arms - 1, seed + 2) @ torch.linalg.qr(normal(arms - 1, arms - 1, seed=seed + 3))[0]
    plain = bandit_step(free, payoff, delta, torch.eye(arms - 1).double())
    assert close(bandit_step(free, payoff, delta, turn), torch.linalg.solve(turn, plain), 1e-8)


# ---- the line search


def search(kl, gain, delta):
    """What line_search finds, and the lengths whose KL it asked for."""
    asked = []

    def counted(s):
        asked.append(s)
        return kl(s)

    return *trpo.line_search(counted, gain, delta), asked


@given(st.floats(1e-8, 1.0), st.floats(1e-3, 1e3), st.floats(-0.3, 1.0))
def test_the_length_is_solved_for_up_and_down(delta, factor, cubic):
    """KL(s) = δ·f·s²·(1 + c·s/(1+s)): the full step costs f times what it should."""
    def kl(s):
        return delta * factor * s * s * (1 + cubic * s / (1 + s))

    s, spent, gained, asked = search(kl, lambda s: s, delta)
    assert 0.9 * delta < spent <= delta and spent == kl(s) and gained == s and s == asked[-1]
    assert len(asked) <= 6
    if cubic == 0:
        assert len(asked) <= 2


@given(st.floats(1e-8, 1.0), st.floats(0.05, 50.0), st.floats(0.02, 5.0))
def test_a_step_that_makes_the_surrogate_worse_is_not_taken(delta, factor, best):
    """gain(s) = s·(best − s), positive below `best` alone."""
    s, spent, gained, _ = search(lambda s: delta * factor * s * s, lambda s: s * (best - s), delta)
    assert 0 < s < best and gained > 0 and spent <= delta
    assert s > 0.8 * min(best, factor**-0.5)  # and nearly the longest there is
    assert search(lambda s: delta * factor * s * s, lambda s: -s, delta)[:3] == (0, 0, 0)


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_a_length_at_which_nothing_is_finite_is_too_long(broken):
    s, spent, _, _ = search(lambda s: s * s if s < 0.3 else broken, lambda s: s, 0.04)
    assert 0.19 < s <= 0.2 and spent <= 0.04
    assert search(lambda s: broken, lambda s: s, 0.04)[:3] == (0, 0, 0)
    assert search(lambda s: s * s, lambda s: broken if s > 0.1 else s, 0.04)[0] <= (0.2 if broken == math.inf else 0.1)


@pytest.mark.parametrize("delta", [1e-9, 5e-324])
def test_a_bound_however_small_divides_by_nothing(delta):
    """Where the KL is rounded to 0, or below, the step becomes longer, as long as it may."""
    s, spent, gained, asked = search(lambda s: 0.0 if s < 1e3 else s, lambda s: s, delta)
    assert spent == 0 and gained == s == max(a for a in asked if a < 1e3) and 900 < s
    assert search(lambda s: -delta, lambda s: s, delta)[0] > 1e10
    assert search(lambda s: 1.0, lambda s: s, delta)[:3] == (0, 0, 0)


# ---- the whole step


def surrogate(out, micro):
    """[b, T] −r·Â."""
    old = micro.logp_prox if micro.done > 0 else out.logp.detach()
    ratio = (out.logp.where(micro.mask, 0.0) - old.where(micro.mask, 0.0)).exp()
    return -ratio * micro.adv.where(micro.mask, 0.0)


def algorithm(delta=0.01, damping=0.1, iterations=5, share=1.0):
    trust = SimpleNamespace(delta=delta, damping=damping, iterations=iterations, share=share)
    return SimpleNamespace(loss=surrogate, axes=SimpleNamespace(trpo=trust))


def update(seed=0, change=lambda batch: batch, aggregation="token-mean"):
    """A world in which every row has an advantage but those of its second group, changed, and weighted."""
    batch = world(seed)
    adv = normal(len(batch), seed=seed + 1).where(batch.group != 1, 0.0)
    adv = adv[:, None].where(batch.mask, 0.0)
    batch = replace(batch, logp_prox=None, done=0.0, adv=adv, keep=batch.mask & adv.ne(0))
    return change(batch).weighted(aggregation, LIMIT)


def step(policy, batch, algo, tokens=10**6, sign=1.0):
    """The loop's inner part and the step: the norm it returned, what it logged."""
    for micro in batch.split(tokens):
        (sign * micro.weight * algo.loss(policy(micro), micro)).sum().backward()
    with collecting() as notes:
        norm = trpo.natural_step(policy, batch, algo, tokens)
    assert all(p.grad is None for p in policy.model.parameters())
    return norm, dict(notes)


def moved(batch, algo, tokens=10**6):
    """The change of all weights by one step from fresh ones."""
    policy = fresh()
    before = vector(policy)
    step(policy, batch, algo, tokens)
    return vector(policy) - before


def distributions(policy, batch):
    """Row by row, the model's own log-probs [T, V] at the temperature; unpadded, with its usual attention."""
    with torch.no_grad():
        return [(policy.model(input_ids=row[None, :n]).logits[0] / policy.temperature).log_softmax(1)
                for row, n in zip(batch.ids, batch.length.tolist())]  # fmt: skip


def spent_and_gained(batch, old, new):
    """D̄_KL(old‖new) and Σ weight·(r − 1)·Â, token by token."""
    kls, gain = [], 0.0
    for i, t in batch.mask.nonzero().tolist():
        token, p, q = int(batch.ids[i, t]), old[i][t - 1], new[i][t - 1]
        kls.append(math.fsum(math.exp(a) * (a - b) for a, b in zip(p.tolist(), q.tolist())))
        gain += float(batch.weight[i, t] * (math.exp(q[token] - p[token]) - 1) * batch.adv[i, t])
    return math.fsum(kls) / len(kls), gain


@settings(max_examples=8)
@given(st.floats(1e-6, 0.1), st.sampled_from([(0.0, 1.0), (0.1, 0.5), (1.0, 0.2), (0.1, 1.0), (1.0, 1.0)]),
       st.floats(0.7, 1.5), st.integers(0, 10**6))  # fmt: skip
def test_an_accepted_step_stays_in_the_trust_region_and_improves_the_surrogate(delta, fisher, temperature, seed):
    """The region is that of all rows, whatever share of them F is from."""
    (damping, share), policy, batch = fisher, fresh(temperature), update(seed)
    old = distributions(policy, batch)
    norm, notes = step(policy, batch, algorithm(delta, damping, share=share))
    kl, gain = spent_and_gained(batch, old, distributions(policy, batch))
    assert notes["trpo/accepted"] == 1 and norm > 0 and 0 <= notes["trpo/residual"]
    assert 0.9 * delta < kl <= delta * (1 + 1e-7) and gain > 0
    assert math.isclose(notes["trpo/kl"], kl, rel_tol=1e-7) and math.isclose(notes["trpo/gain"], gain, rel_tol=1e-7)


def test_the_region_is_that_of_all_tokens_alike_where_each_micro_batch_of_the_loss_has_a_mean_of_its_own():
    """bnpo, two micro-batches: its weights depend on the split, and D̄_KL's do not."""
    policy, batch, v = fresh(), update(aggregation="bnpo"), normal(len(vector(fresh())))
    assert len(list(batch.split(25))) > 1 and batch.local_mean
    assert close(fisher_product(policy, batch, v, 25), fisher_product(policy, update(), v), 1e-12)
    old = distributions(policy, batch)
    notes = step(policy, batch, algorithm(), 25)[1]
    kl, _ = spent_and_gained(batch, old, distributions(policy, batch))
    assert 0.009 < kl <= 0.01 * (1 + 1e-7) and math.isclose(notes["trpo/kl"], kl, rel_tol=1e-7)


@pytest.mark.parametrize("damping", [0.0, 1.0])
@pytest.mark.parametrize("seed", range(3))
def test_the_full_step_costs_what_it_should(seed, damping):
    """Before the line search, whose length is no part of it: damping turns the step and does not shorten it."""
    delta, policy, batch = 1e-4, fresh(), update(seed)
    old, full = distributions(policy, batch), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trpo, "line_search", lambda kl, gain, delta: (full.append(kl(1.0)), (1.0, 0.0, 0.0))[1])
        step(policy, batch, algorithm(delta, damping, iterations=10))
    kl, _ = spent_and_gained(batch, old, distributions(policy, batch))
    assert math.isclose(kl, delta, rel_tol=0.1) and math.isclose(full[0], kl, rel_tol=1e-7)


def test_the_step_is_its_parts_put_together():
    """Along F⁻¹g by the dense damped solve's best in the Krylov space, as far as the line search says."""
    batch, algo, policy = update(), algorithm(damping=0.5, iterations=4), fresh()
    change = moved(batch, algo)
    for micro in batch.split(10**6):
        (micro.weight * surrogate(policy(micro), micro)).sum().backward()
    g = -trpo.flat(p.grad for p in trainable(policy))
    space = [g]
    for _ in range(3):
        space.append(fisher_product(policy, batch, space[-1]) + 0.5 * space[-1])
    krylov = torch.linalg.qr(torch.stack(space, 1))[0]
    damped = torch.stack([fisher_product(policy, batch, k) + 0.5 * k for k in krylov.T], 1)
    best = krylov @ torch.linalg.solve(krylov.T @ damped, krylov.T @ g)
    assert close(change / change.norm(), best / best.norm(), ROUNDING)


@pytest.mark.parametrize("tokens", [1, 12])
def test_no_split_into_micro_batches_changes_the_step(tokens):
    batch, v = update(), normal(len(vector(fresh())))
    assert close(fisher_product(fresh(), batch, v, tokens), fisher_product(fresh(), batch, v), 1e-12)
    assert close(moved(batch, algorithm(), tokens), moved(batch, algorithm()), 1e-9)


def test_padding_and_its_garbage_change_nothing():
    batch, spoilt = update(), update(change=lambda batch: scrambled(batch, columns=3))
    v = normal(len(vector(fresh())))
    assert close(fisher_product(fresh(), spoilt, v), fisher_product(fresh(), batch, v), 1e-12)
    assert close(moved(spoilt, algorithm(), 12), moved(batch, algorithm(), 12), 1e-9)


def test_half_of_the_rows_of_a_doubled_batch_have_its_fisher_matrix():
    batch = update()
    twice = update(change=lambda batch: batch.select(torch.arange(len(batch)).repeat_interleave(2)))
    assert close(moved(twice, algorithm(share=0.5)), moved(batch, algorithm()), 1e-9)


def test_rows_without_advantage_shape_the_step_unless_they_are_left_out_of_the_share():
    alone = update(change=lambda batch: batch.select(torch.tensor([0])))
    pair = update(change=lambda batch: batch.select(torch.tensor([0, 3])))
    assert alone.adv.any() and not pair.adv[1].any() and pair.mask[1].any()

    def direction(batch, share):
        change = moved(batch, algorithm(share=share))
        return change / change.norm()

    assert close(direction(pair, 0.5), direction(alone, 1.0), ROUNDING)
    assert not close(direction(pair, 1.0), direction(alone, 1.0), 0.01)


def test_a_row_without_tokens_is_no_share():
    batch = update(change=lambda batch: batch.select(torch.tensor([1, 0])))
    alone = update(change=lambda batch: batch.select(torch.tensor([0])))
    assert not batch.mask[0].any() and batch.mask[1].any()
    assert close(moved(batch, algorithm(share=0.5)), moved(alone, algorithm()), 1e-9)


@pytest.mark.parametrize("option", [dict(damping=10.0), dict(iterations=1), dict(share=0.3), dict(delta=0.001)])
def test_no_option_is_dead(option):
    assert not close(moved(update(), algorithm(**option)), moved(update(), algorithm()), 1e-3)


def test_a_rejected_step_leaves_the_weights_bit_for_bit():
    """Downhill: no length improves the surrogate."""
    policy = fresh()
    before = vector(policy)
    norm, notes = step(policy, update(), algorithm(), sign=-1.0)
    assert norm > 0 and torch.equal(vector(policy), before)
    assert notes["trpo/accepted"] == notes["trpo/kl"] == notes["trpo/gain"] == notes["trpo/length"] == 0


def test_the_way_back_is_exact_whatever_the_step_holds():
    weights = [normal(2, 3), torch.tensor([-0.0, 1e-320], dtype=torch.float64)]
    before = trpo.flat(weights)
    go = trpo.line(weights, torch.cat([normal(6, seed=1), torch.tensor([math.nan, math.inf])]))
    go(0.5)
    assert torch.equal(weights[0], before[:6].view(2, 3) + 0.5 * normal(6, seed=1).view(2, 3)) and weights[1][0].isnan()
    go(0)
    assert torch.equal(trpo.flat(weights).view(torch.int64), before.view(torch.int64))


def test_the_loss_may_read_the_entropy():
    """Its gain is part of the surrogate's: with the bonus alone, the policy becomes more random."""
    policy, batch = fresh(), update()
    bonus = algorithm()
    bonus.loss = lambda out, micro: 0 * surrogate(out, micro) - (0 if out.entropy is None else out.entropy)

    def randomness():
        with torch.no_grad():
            return float((batch.weight * policy(batch, frozenset({"entropy"})).entropy).sum())

    before = randomness()
    (batch.weight * -policy(batch, frozenset({"entropy"})).entropy).sum().backward()
    with collecting() as notes:
        trpo.natural_step(policy, batch, bonus, 100)
    assert math.isclose(dict(notes)["trpo/gain"], randomness() - before, rel_tol=1e-6) and randomness() > before


@pytest.mark.parametrize("gradient, norm", [(None, 0.0), (0.0, 0.0), (math.nan, math.nan), (-math.inf, math.inf)])
def test_without_a_finite_gradient_there_is_no_step(gradient, norm):
    policy = fresh()
    before = vector(policy)
    if gradient is not None:
        for p in trainable(policy):
            p.grad = torch.zeros_like(p)
        trainable(policy)[0].grad[0] = gradient
    with collecting() as notes:
        got = trpo.natural_step(policy, update(), algorithm(), 100)
    assert got == norm or math.isnan(got) and math.isnan(norm)
    assert torch.equal(vector(policy), before) and all(p.grad is None for p in trainable(policy)) and not notes


def test_frozen_weights_stay():
    policy = fresh()
    for p in policy.model.model.layers.parameters():
        p.requires_grad_(False)
    before, still = vector(policy), trpo.flat(policy.model.model.layers.parameters())
    assert step(policy, update(), algorithm())[1]["trpo/accepted"]
    assert torch.equal(trpo.flat(policy.model.model.layers.parameters()), still)
    assert not torch.equal(vector(policy), before)


# ---- attention


def test_the_step_needs_attention_in_plain_operations_and_log_probs_are_the_same_there():
    policy, batch = fresh(), update()
    usual = policy(batch).logp.detach()
    with sdpa_kernel(SDPBackend.MATH):
        plain = policy(batch).logp.detach()
    assert usual.abs().max() > 1 and (plain - usual).abs().max() < 1e-12
    step(policy, batch, algorithm())
    with pytest.raises(RuntimeError, match="attention.*backward is not implemented"):  # the fused kernels are back
        trpo.hessian_product(trpo.divergences(policy, trpo.over_tokens(batch), 10**6), trainable(policy), vector(policy))
