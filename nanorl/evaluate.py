"""How good is it? Greedy accuracy and unbiased pass@k on held-out problems.

Evaluation samples by a stream of random numbers of its own, on its own admission, and nothing of it is trained on.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import comb
from typing import Any

from nanorl.engine import Engine, Sampling
from nanorl.rollout import EVALUATE, Score, Unscored, group
from nanorl.sample import Group, Prompt


def pass_at_k(n: int, c: int, k: int) -> float:
    """The chance that k of n samples, drawn without replacement, hold one of the c right ones: 1 − C(n−c, k)/C(n, k).

    Its mean over problems is the unbiased estimate of pass@k (arXiv 2107.03374, eq. 1); 1 − (1 − c/n)^k is too low.
    Raises ValueError unless 1 ≤ k ≤ n and 0 ≤ c ≤ n.

    >>> pass_at_k(4, 1, 2)
    0.5
    """
    if not (1 <= k <= n and 0 <= c <= n):
        raise ValueError(f"pass@{k} of {c} right in {n}")
    return 1.0 - comb(n - c, k) / comb(n, k)


def powers_of_two(n: int) -> list[int]:
    """1, 2, 4, … up to n.

    >>> powers_of_two(6)
    [1, 2, 4]
    """
    return [2**i for i in range(n.bit_length()) if 2**i <= n]


async def evaluate(engine: Engine, tokenizer: Any, prompts: Sequence[Prompt], score: Score, sampling: Sampling,
                   samples: int, seed: int, deadline: float,
                   progress: Callable[[int], None]) -> tuple[dict[str, float], list[Group]]:  # fmt: skip
    """eval/pass@k for k = 1, 2, 4 … ≤ samples, eval/greedy, answers' mean length and truncated share, and the groups.

    A sample passes if its reward is 1 or more; one without a score does not. Raises what the engine or a reward raises,
    and TimeoutError when nothing was done for `deadline` seconds.
    """
    done = 0

    async def one(prompt: Prompt, how: Sampling, n: int) -> Group:
        """n samples of one held-out problem, by the random numbers of evaluation."""
        nonlocal done
        try:
            result = await group(engine, tokenizer, prompt, score, replace(how, key=(seed, EVALUATE)), n)
        except Unscored:
            result = Group(prompt, ())
        done += n
        progress(done)
        limit.reschedule(asyncio.get_running_loop().time() + deadline)
        return result

    try:
        async with asyncio.timeout(deadline) as limit:
            sampled = await asyncio.gather(*(one(p, sampling, samples) for p in prompts))
            greedy = await asyncio.gather(*(one(p, replace(sampling, temperature=0.0), 1) for p in prompts))
    except TimeoutError as error:
        if not limit.expired():  # a reward's own
            raise
        raise TimeoutError(f"evaluation: {done} of {len(prompts) * (samples + 1)} answers were done, and no other within "
                           f"--deadline {deadline:g} s; the engine or a reward is stuck") from error  # fmt: skip
    right = [sum(s.reward >= 1 for s in g.samples) for g in sampled]
    every = [s for g in sampled for s in g.samples]
    results = {f"eval/pass@{k}": mean(pass_at_k(samples, c, k) for c in right) for k in powers_of_two(samples)}
    results["eval/greedy"] = mean(float(any(s.reward >= 1 for s in g.samples)) for g in greedy)
    results["eval/length"] = mean(float(sum(s.mask)) for s in every)
    results["eval/truncated"] = mean(float(s.finish == "length") for s in every)
    return results, list(sampled)


def mean(values: Any) -> float:
    """The arithmetic mean, NaN over nothing."""
    values = list(values)
    return sum(values) / len(values) if values else math.nan
