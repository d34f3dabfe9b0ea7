"""Do prompt and reward speak of the same format? One answer as the prompt asks for it, and an empty one, before any work.

Nothing is learned where the right answer, written as asked, is not paid, or an empty one is. Both show at the start.
"""

from __future__ import annotations

import asyncio
import inspect
from typing import TYPE_CHECKING

from nanorl import reward
from nanorl.config import Lost, Refused
from nanorl.faults import Scoring
from nanorl.monitor import collecting
from nanorl.sample import Prompt
from nanorl.scoring import Scorer

if TYPE_CHECKING:
    from nanorl.tasks import Problem, Task


def checked(task: Task, how: Scoring) -> Task:
    """The task, whose rewards pay an answer written as the prompt asks in full, and an empty one not. Raises Refused.

    A verifier has to give 1 and less than 1, a penalty is not asked, and the sum of all has to be higher. A reward of
    your own is called as in the run, in a process with limits: what hangs there shows here.
    """
    problem = task.train(0)
    text, sums = task.answered(problem), [0.0, 0.0]
    for spec in task.rewards:
        full, empty = (worth(spec, problem, said, how) for said in (text, ""))
        name, weight = reward.split(spec)
        sums = [sums[0] + weight * full, sums[1] + weight * empty]
        if name not in reward.REWARDS or name in reward.PENALTIES:
            continue
        if full != 1.0:  # prompt and verifier must speak of the same format, or nothing can be learned
            raise Refused(f"--reward {name}: gives {full} to the right answer {problem.answer!r}, written as "
                          f"{text[-60:]!r}; choose another")
        if empty >= 1.0:
            raise Refused(f"--reward {name}: gives {empty} to an empty answer; choose another")
    if sums[0] <= sums[1]:
        raise Refused(f"--reward {' '.join(task.rewards)}: the right answer, written as {text[-60:]!r}, gets {sums[0]:g} "
                      f"and an empty one {sums[1]:g}; choose other rewards or weights")
    return task


def worth(spec: str, problem: Problem, text: str, how: Scoring) -> float:
    """What one reward gives this text; what it logs is nobody's. Raises Refused where it gives none."""
    if reward.split(spec)[0] in reward.REWARDS or how.reward_workers == 0:
        with collecting():
            told = reward.named(spec)("", text, (), (), problem.answer, **problem.row)
            return asyncio.run(told) if inspect.iscoroutine(told) else told
    scorer = Scorer((spec,), 1, how.reward_seconds, how.reward_memory, "stop")
    try:
        verdict = asyncio.run(scorer.score(Prompt(0, (), "", problem.answer, problem.row), text, ()))
        return verdict.parts[reward.label(spec)]
    except Lost as error:
        raise Refused(f"--reward {spec}: of the answer {text[-60:]!r}: {error}") from None
    finally:
        scorer.close()


def written(problem: Problem, rewards: tuple[str, ...], text: str = "") -> str:
    """The right answer as the prompt asks for it: this text, or the gold in the form that the first verifier reads; in
    tags where `format` is among the rewards."""
    names = [reward.split(spec)[0] for spec in rewards]
    first = next((name for name in names if name not in (*reward.PENALTIES, "format")), "exact")
    answer = problem.answer.rsplit("####")[-1].strip()
    forms = {"number": f"So it is.\n#### {answer}", "count": f"So it is.\nAnswer: {answer}",
             "choice": f"The answer is {answer}", "countdown": f"<answer>{problem.row.get('solution', '')}</answer>",
             "math": answer if "\\boxed" in answer else rf"So it is \boxed{{{answer}}}"}  # fmt: skip
    text = text or forms.get({"geometry": "math"}.get(first, first)) or problem.row.get("after", "") + problem.answer
    return f"<think>\nSo it is.\n</think>\n<answer>{text}</answer>" if "format" in names and first != "countdown" else (
        f"<think>\nSo it is.\n</think>\n{text}" if "format" in names else text)


def asking(rewards: tuple[str, ...], own: str) -> str:
    """A task's own suffix, and the tags where `format` is among the rewards."""
    tags = "\nThink between <think> and </think>, then answer between <answer> and </answer>."
    return own + tags if any(reward.label(spec) == "format" for spec in rewards) else own


def ended(prompt: str | list[dict[str, str]], suffix: str) -> str | list[dict[str, str]]:
    """A prompt with this text behind it: behind its last message, where it has several."""
    if isinstance(prompt, str):
        return prompt + suffix
    return [*prompt[:-1], {**prompt[-1], "content": prompt[-1]["content"] + suffix}]
