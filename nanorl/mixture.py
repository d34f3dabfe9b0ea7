"""Which task is a prompt from? Several tasks in one run, by weights."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from nanorl.probe import ended

if TYPE_CHECKING:
    from nanorl.tasks import Problem, Task


def mixed(made: dict[str, Task], parts: dict[str, float], seed: int) -> Task:
    """Several tasks in one run: which one prompt n is from is drawn by (seed, n) with the weights as probabilities."""

    def tagged(problem: Problem, name: str) -> Problem:
        """The problem with what its task would have said beside it."""
        prompt = ended(problem.prompt, made[name].suffix)
        return replace(problem, prompt=prompt, rewards=made[name].rewards, task=name)

    def train(number: int) -> Problem:
        """Problem `number`, by the task that is drawn for it."""
        name = str(np.random.default_rng((seed, 3, number)).choice([*parts], p=[*parts.values()]))
        return tagged(made[name].train(number), name)

    return replace(
        next(iter(made.values())),
        says="; ".join(f"{share:.0%} {made[name].says}" for name, share in parts.items()),
        train=train,
        held_out=[tagged(p, name) for name, task in made.items() for p in task.held_out],
        rewards=tuple(dict.fromkeys(spec for task in made.values() for spec in task.rewards)),
        suffix="",
        answered=lambda p: made[p.task].answered(p),
        problems=tuple(tagged(p, name) for name, task in made.items() for p in task.problems),
    )
