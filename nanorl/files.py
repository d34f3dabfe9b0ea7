"""What is asked, where a file says so? GSM8K, or any file of one JSON object a line; what is held out and left out."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from nanorl import reward, tasks
from nanorl.config import Config, Refused
from nanorl.probe import asking, written

if TYPE_CHECKING:
    from nanorl.tasks import Problem, Task

POSITIONAL = ("prompt", "completion", "prompt_ids", "completion_ids", "answer")  # what every reward gets by position


def from_file(cfg: Config) -> Task:
    """GSM8K or any JSONL. Every epoch has its own order; the held-out rows are the same for every seed."""
    rewards = cfg.reward or ("number" if cfg.task == "gsm8k" else "exact",)
    suffix = "\nThink step by step. End with a line '#### ' and the number." if cfg.task == "gsm8k" else ""
    rows, dropped = usable(read(cfg.data, cfg.task), rewards)
    if cfg.eval_data:
        held_out, _ = usable(read(cfg.eval_data, cfg.task), rewards)
        held_out, train = held_out[: cfg.eval_problems], rows
    else:
        order = np.random.default_rng(0).permutation(len(rows))
        n = min(cfg.eval_problems, max(1, len(rows) // 10))
        held_out, train = [rows[i] for i in order[:n]], [rows[i] for i in order[n:]]
    asked, before = {str(p.prompt) for p in held_out}, len(train)
    train = [p for p in train if str(p.prompt) not in asked]  # the same question twice in a file would be a leak
    names = ", ".join(map(reward.label, rewards))
    left_out = f"left out: {dropped} whose answer '{names}' cannot read, {before - len(train)} that are held out too"
    if not train or not held_out:
        raise Refused(f"--data {cfg.data}: {len(train)} problems to train on and {len(held_out)} to hold out, at least "
                      f"one each is needed ({left_out})")

    @lru_cache(maxsize=2)
    def epoch(n: int) -> np.ndarray:
        """The order of the rows in this epoch."""
        return np.random.default_rng((cfg.seed, 2, n)).permutation(len(train))

    return tasks.Task(
        says=f"{cfg.data}: {len(train)} problems to train on, {len(held_out)} held out; {left_out}",
        train=lambda number: train[epoch(number // len(train))[number % len(train)]],
        held_out=held_out,
        rewards=rewards,
        suffix=asking(rewards, suffix) if cfg.prompt_suffix is None else cfg.prompt_suffix,
        answered=lambda p: written(p, rewards),
        problems=(*train, *held_out),
    )  # fmt: skip


def usable(problems: list[Problem], rewards: tuple[str, ...]) -> tuple[list[Problem], int]:
    """The problems whose answer every reward can judge by, and how many it cannot."""
    names = [reward.split(spec)[0] for spec in rewards]
    good = [p for p in problems if all(reward.gold(name, p.answer) for name in names)]
    return good, len(problems) - len(good)


def read(path: str, task: str) -> list[Problem]:
    """The problems of a file, one JSON object a line. Raises Refused with the line's number."""
    ask = "question" if task == "gsm8k" else "prompt"
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").split("\n")  # not splitlines: JSON may hold U+2028
    except (OSError, UnicodeDecodeError) as error:
        raise Refused(f"--data {path}: cannot be read ({error})") from None
    problems = []
    for i, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            json.dumps(row, ensure_ascii=False).encode()  # half a surrogate pair is JSON and no text
        except (ValueError, RecursionError) as error:
            raise Refused(f"{path}, line {i}: not JSON ({error})") from None
        if not isinstance(row, dict) or ask not in row or "answer" not in row:
            raise Refused(f"{path}, line {i}: needs an object with \"{ask}\" and \"answer\"")
        asked = row[ask]
        chat = isinstance(asked, list) and asked and all(
            isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in asked)
        if not (isinstance(asked, str) and asked) and not chat:
            raise Refused(f"{path}, line {i}: \"{ask}\" is neither text nor a list of messages with role and content")
        if not isinstance(row["answer"], (str, int, float)) or isinstance(row["answer"], bool):
            raise Refused(f"{path}, line {i}: \"answer\" is neither text nor a number")
        if not isinstance(row.get("after", ""), str):
            raise Refused(f"{path}, line {i}: \"after\" is not text; it marks where an answer begins")
        rest = {k: v for k, v in row.items() if k != ask and k not in POSITIONAL}
        problems.append(tasks.Problem(asked, str(row["answer"]), rest))
    return problems
