"""How good is it: pass@k by counting subsets, and an evaluation that leaves no trace in training."""

import asyncio
import itertools
from math import comb
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanorl import rollout
from nanorl.buffer import Buffer
from nanorl.engine import Completion, Sampling
from nanorl.local import LocalEngine
from nanorl.evaluate import evaluate, pass_at_k, powers_of_two
from nanorl.policy import Policy
from nanorl.sample import Prompt

# ---- pass@k


@pytest.mark.parametrize("n", range(1, 7))
def test_pass_at_k_is_the_share_of_all_k_subsets_that_hold_a_right_sample(n):
    for c, k in itertools.product(range(n + 1), range(1, n + 1)):
        right = [i < c for i in range(n)]
        subsets = [any(chosen) for chosen in itertools.combinations(right, k)]
        assert pass_at_k(n, c, k) == pytest.approx(sum(subsets) / len(subsets), abs=1e-15)


@given(st.integers(1, 12), st.data(), st.floats(0, 1))
def test_its_expectation_is_the_chance_that_one_of_k_tries_is_right(n, data, p):
    """Unbiased: Σ_c C(n, c) p^c (1−p)^(n−c) · pass@k(n, c) = 1 − (1−p)^k."""
    k = data.draw(st.integers(1, n))
    expected = sum(comb(n, c) * p**c * (1 - p) ** (n - c) * pass_at_k(n, c, k) for c in range(n + 1))
    assert expected == pytest.approx(1 - (1 - p) ** k, abs=1e-12)


@pytest.mark.parametrize(("n", "c", "k"), [(3, 1, 0), (3, 1, 4), (3, -1, 2), (3, 4, 2), (0, 0, 1)])
def test_outside_of_its_range_there_is_no_pass_at_k(n, c, k):
    with pytest.raises(ValueError, match=f"pass@{k}"):
        pass_at_k(n, c, k)


@given(st.integers(1, 5000))
def test_the_powers_of_two_up_to_n(n):
    assert powers_of_two(n) == [k for k in range(1, n + 1) if bin(k).count("1") == 1]


# ---- the evaluation


class Oracle:
    """An engine whose answer to prompt p is p's key: sampled tries as many right as p says, greedy right if p is odd.

    A completion is one token, 1 for right; every third sampled try runs into the length limit with 5 tokens.
    """

    version = 3

    def __init__(self):
        self.asked = []

    async def generate(self, ids, sampling, images=()):
        self.asked.append(sampling)
        await asyncio.sleep(0)
        _, _, number, i, _ = sampling.key
        right = number % 2 if sampling.temperature == 0 else i < number
        n = 5 if sampling.temperature and i % 3 == 2 else 1
        return Completion((int(right),) * n, (0.0,) * n, (self.version,) * n, "length" if n == 5 else "stop")


WORDS = SimpleNamespace(decode=lambda ids, skip_special_tokens: str(ids[0]))


async def judge(prompt, text, ids):
    return 1.5 * float(text == "1")  # 1 or more is a pass


def prompts(n):
    return [Prompt(i, (7, i), "", "") for i in range(n)]


def test_every_number_is_the_mean_over_problems_by_counting():
    """Problem p has p right samples of 5, p = 0 … 5."""
    engine, seen = Oracle(), []
    sampling = Sampling(9, temperature=0.7, end=frozenset({4}), stop=("x",), key=("never used",))
    results, groups = asyncio.run(evaluate(engine, WORDS, prompts(6), judge, sampling, 5, seed=13, deadline=60,
                                           progress=seen.append))  # fmt: skip
    assert results == pytest.approx({
        **{f"eval/pass@{k}": sum(pass_at_k(5, c, k) for c in range(6)) / 6 for k in (1, 2, 4)},
        "eval/greedy": 0.5, "eval/length": (4 * 1 + 5) / 5, "eval/truncated": 1 / 5})  # fmt: skip
    assert [g.prompt.number for g in groups] == list(range(6)) and all(len(g.samples) == 5 for g in groups)
    assert sorted(seen) == seen and seen[-1] == 6 * (5 + 1)
    greedy = [s for s in engine.asked if s.temperature == 0]
    assert sorted(s.key for s in greedy) == [(13, rollout.EVALUATE, p, 0, 0) for p in range(6)]
    tries = [s for s in engine.asked if s.temperature == 0.7]
    assert sorted(s.key for s in tries) == [(13, rollout.EVALUATE, p, i, 0) for p in range(6) for i in range(5)]
    assert {(s.max_new_tokens, s.end, s.stop) for s in engine.asked} == {(9, frozenset({4}), ("x",))}


def test_what_a_reward_raises_ends_the_evaluation():
    async def broken(prompt, text, ids):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        asyncio.run(evaluate(Oracle(), WORDS, prompts(2), broken, Sampling(9), 2, 0, 60, lambda done: None))


@pytest.mark.parametrize("own", [True, False])
def test_an_evaluation_of_which_nothing_is_done_ends_and_says_so_and_a_slow_one_does_not(own):
    """The deadline is for the time between two results; a reward's own timeout stays what it is."""

    async def stuck(prompt, text, ids):
        if prompt.number == 3:
            if own:
                raise TimeoutError("the reward's own")
            await asyncio.Event().wait()
        return 1.0

    async def slow(prompt, text, ids):
        await asyncio.sleep(0.15 * prompt.number)
        return 1.0

    def run(reward, deadline):
        return asyncio.run(evaluate(Oracle(), WORDS, prompts(6), reward, Sampling(9), 2, 0, deadline, lambda done: None))

    line = "the reward's own" if own else r"evaluation: 10 of 18 answers were done, and no other within --deadline 0.3 s"
    with pytest.raises(TimeoutError, match=line):
        run(stuck, 0.3)
    assert run(slow, 0.3)[0]["eval/pass@1"] == 1  # it takes 1.5 s


def trained(tiny_model, evaluations):
    """The tokens of two synchronous steps with so many evaluations before and between them."""
    net, words = tiny_model
    engine, buffer = LocalEngine(Policy(net), words), Buffer(2)
    sampling = Sampling(8, end=frozenset({1}), key=(0, rollout.TRAIN))

    async def make(number):
        return await rollout.group(engine, words, Prompt(number, (2 + number, 4, 12), "", ""), judge, sampling, 2)

    runner, steps = rollout.Rollout(buffer, make), []
    for step in range(2):
        for _ in range(evaluations):
            asked = [Prompt(i, (2 + i, 4, 12), "", "") for i in range(3)]  # the very prompts that are trained on
            _, held_out = runner.call(evaluate(engine, words, asked, judge, sampling, 2, 0, 60, lambda done: None),
                                  "the evaluation", lambda: False)  # fmt: skip
            assert not buffer.done and buffer.placed == 2 * step  # nothing of it reached the buffer
            assert all(g.samples[0].ids != s.ids for g in held_out for t in steps for s in t[0].samples)
        runner.pump()
        steps.append(buffer.take(30, lambda: False))
        engine.update_weights(engine.policy, step + 1)
        buffer.acknowledge(step + 1)
        buffer.trained(step + 1)
    runner.close()
    return [s.ids for groups in steps for g in groups for s in g.samples]


def test_evaluating_changes_nothing_of_what_training_samples(tiny_model):
    assert trained(tiny_model, evaluations=0) == trained(tiny_model, evaluations=2)
