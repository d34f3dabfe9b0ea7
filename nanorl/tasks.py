"""What is asked? Problems by number: additions made here, GSM8K, or any file of JSON lines.

A task is a function from a prompt's number to a problem, so the order of the data needs no state: number n of seed s
is the same problem in every run, also in a resumed one. Held-out problems are never trained on.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from jinja2 import TemplateError

from nanorl import countdown, files, reward
from nanorl.config import Config, Refused, shares
from nanorl.mixture import mixed
from nanorl.probe import asking, checked, ended, written
from nanorl.sample import Prompt


@dataclass(frozen=True)
class Problem:
    """A question (text, or chat messages), the answer it is judged by, the row's other fields; its task, if mixed."""

    prompt: str | list[dict[str, str]]
    answer: str
    row: dict[str, Any] = field(default_factory=dict)
    rewards: tuple[str, ...] = ()
    task: str = ""


@dataclass(frozen=True)
class Task:
    """`train(number)` is the problem of that number; `answered(problem)` a completion as the prompt demands it."""

    says: str
    train: Callable[[int], Problem]
    held_out: list[Problem]
    rewards: tuple[str, ...]  # as --reward names them
    suffix: str
    answered: Callable[[Problem], str]
    problems: tuple[Problem, ...] = ()  # all that train draws from, where that is a list


def fingerprint(task: Task) -> int:
    """A number that changes when the problems do: a run that is resumed must go on with the same."""
    return zlib.crc32(repr([(p.prompt, p.answer) for p in (task.train(0), *task.problems)]).encode())


def load(cfg: Config) -> Task:
    """The task that the flags name, or several mixed. Raises Refused where data or rewards cannot be used."""
    parts = shares(cfg.task)
    makers = {"arithmetic": arithmetic, "countdown": from_numbers, "gsm8k": files.from_file, "jsonl": files.from_file}
    if len(parts) == 1:
        (name,) = parts
        return checked(makers[name](replace(cfg, task=name)), cfg.scoring)
    sizes = {name: max(1, round(cfg.eval_problems * share)) for name, share in parts.items()}
    made = {name: checked(makers[name](replace(cfg, task=name, eval_problems=n)), cfg.scoring) for name, n in sizes.items()}
    return mixed(made, parts, cfg.seed)


# ------------------------------------------------------------------------------------------------ arithmetic


def part(a: int, b: int) -> str:
    """Which of three disjoint sets an addition belongs to: held out (1/16), warm start (7/16), training (8/16)."""
    bucket = zlib.crc32(f"{a}+{b}".encode()) % 16
    return "held out" if bucket == 0 else "warm start" if bucket < 8 else "training"


def addition(rng: np.random.Generator, digits: int, belongs: str) -> tuple[int, int]:
    """Two numbers of so many digits, uniform among the pairs that belong to this part."""
    while True:
        a, b = (int(n) for n in rng.integers(10 ** (digits - 1), 10**digits, 2))
        if part(a, b) == belongs:
            return a, b


def worked(a: int, b: int) -> str:
    """The sum with its working, then the result: column by column from the right, the two digits and their sum with
    the carry from the column before.

    >>> worked(587, 946)
    '(7613,8413,5915)1533'
    """
    columns, carry = [], 0
    for k in range(max(len(str(a)), len(str(b)))):
        x, y = a // 10**k % 10, b // 10**k % 10
        columns.append(f"{x}{y}{x + y + carry:02d}")
        carry = (x + y + carry) // 10
    return f"({','.join(columns)}){a + b}"


def arithmetic(cfg: Config) -> Task:
    """Additions of two numbers of --digits digits, judged by what stands after the working, if there is any."""
    if not 1 <= cfg.digits <= 12:
        raise Refused(f"--digits {cfg.digits}: 1 to 12; the tiny model has room for 256 tokens")

    def problem(a: int, b: int) -> Problem:
        """a + b; the answer is what follows the last bracket."""
        return Problem(f"{a}+{b}=", str(a + b), {"after": ")"})

    rewards = cfg.reward or ("arithmetic",)
    rng, held_out = np.random.default_rng(0), {}
    for _ in range(4 * cfg.eval_problems):  # numbers of one or two digits may have fewer than asked for
        held_out[addition(rng, cfg.digits, "held out")] = None
        if len(held_out) == cfg.eval_problems:
            break
    return Task(
        says=f"additions of two {cfg.digits}-digit numbers, judged exactly",
        train=lambda number: problem(*addition(np.random.default_rng((cfg.seed, 1, number)), cfg.digits, "training")),
        held_out=[problem(a, b) for a, b in held_out],
        rewards=rewards,
        suffix=asking(rewards, "") if cfg.prompt_suffix is None else cfg.prompt_suffix,
        answered=lambda p: written(p, rewards, worked(*map(int, p.prompt[:-1].split("+")))),
    )


# ------------------------------------------------------------------------------------------------ countdown


def from_numbers(cfg: Config) -> Task:
    """Countdown: make a target from three or four numbers, each used once. Whole problems are held out (1/16)."""
    rewards = cfg.reward or ("countdown",)

    def problem(key: str, held_out: bool) -> Problem:
        """The problem of this key in its part."""
        numbers, target, solution = countdown.problem(key, held_out)
        return Problem(*countdown.asked(numbers, target), {"solution": solution})

    own = "" if "format" in map(reward.label, rewards) else "\nWrite the expression between <answer> and </answer>."
    return Task(
        says="countdown with three or four numbers",
        train=lambda number: problem(f"{cfg.seed} {number}", False),
        held_out=[problem(f"held out {i}", True) for i in range(cfg.eval_problems)],
        rewards=rewards,
        suffix=asking(rewards, own) if cfg.prompt_suffix is None else cfg.prompt_suffix,
        answered=lambda p: written(p, rewards),
    )


# ------------------------------------------------------------------------------------------------ rendering


def render(problem: Problem, tokenizer: Any, system: str | None, suffix: str) -> tuple[str, tuple[int, ...]]:
    """The text and the token ids that the model gets: through its chat template where it has one.

    The template writes all special tokens itself, so none are added again (a second BOS costs accuracy in silence).
    Raises Refused where chat messages or a system prompt meet a model without a template.
    """
    if tokenizer.chat_template is None:
        if system is not None or not isinstance(problem.prompt, str):
            raise Refused("--system-prompt and chat messages need a model with a chat template; this one has none")
        text = ended(problem.prompt, suffix)
        return text, tuple(tokenizer(text).input_ids)
    messages = ended(problem.prompt, suffix)
    messages = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
    if system is not None:
        messages = [{"role": "system", "content": system}, *(m for m in messages if m["role"] != "system")]
    try:
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    except TemplateError as error:
        raise Refused(f"--data: the model's chat template refuses {str(messages)[:80]} ({error})") from None
    return text, tuple(tokenizer(text, add_special_tokens=False).input_ids)


def make_prompt(problem: Problem, number: int, tokenizer: Any, cfg: Config, task: Task) -> Prompt:
    """The problem as prompt `number` of the run."""
    text, ids = render(problem, tokenizer, cfg.system_prompt, task.suffix)
    return Prompt(number, ids, text, problem.answer, problem.row, rewards=problem.rewards, task=problem.task)


def check_lengths(task: Task, tokenizer: Any, cfg: Config, room: int) -> None:
    """Raise Refused for the first problem whose prompt and answer together exceed the model's `room` of tokens.

    No tokenizer here makes more tokens than a text has bytes, so only long texts are encoded to find out.
    """
    added = 256 + len(((cfg.system_prompt or "") + task.suffix).encode())  # a template's own tokens are under 256
    for problem in (task.train(0), *task.problems, *task.held_out):
        if len(str(problem.prompt).encode()) + added + cfg.max_new_tokens <= room and problem is not task.held_out[0]:
            continue
        length = len(render(problem, tokenizer, cfg.system_prompt, task.suffix)[1])
        if length + cfg.max_new_tokens > room:
            raise Refused(f"--max-new-tokens {cfg.max_new_tokens}: the model has room for {room} tokens and the prompt "
                          f"{str(problem.prompt)[:40]!r} takes {length}; lower it, or drop that row")
