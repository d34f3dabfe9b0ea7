"""What does a model answer? A few samples of any prompt, token by token, with the verdict where the task knows it.

    python -m nanorl.rollout CHECKPOINT PROMPT [PROMPT…]    CHECKPOINT: a run, one of its checkpoints, or any model
    python -m nanorl.rollout CHECKPOINT -                   a prompt for each line of standard input

It samples just as the run does: same episode, same engine, same chat template, and the flags of the run's config.json.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from nanorl.cli import read_saved
from nanorl.config import FROM_FILE, Config, Lost, Refused, resolved, shares, unread
from nanorl.look import Parser
from nanorl.token_table import pieces

if TYPE_CHECKING:
    from nanorl.sample import Group, Prompt, Sample
    from nanorl.tasks import Problem, Task

LIMIT = 32  # new tokens of a model without a run's settings


def parser() -> Parser:
    """The flags."""
    flags = Parser("python -m nanorl.rollout", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("checkpoint", metavar="CHECKPOINT", help="folder of a run (its newest checkpoint), of a "
                       "checkpoint or of a model; or a Hugging Face id")  # fmt: skip
    flags.add_argument("prompts", metavar="PROMPT", nargs="+", help="what to ask; -: each line of input")
    flags.add_argument("--samples", metavar="N", type=int, default=4, help="answers to each (4)")
    flags.add_argument("--temperature", metavar="T", type=float, help="without it the run's, or 1")
    flags.add_argument("--greedy", action="store_true", help="one answer, of the likeliest tokens")
    flags.add_argument("--max-new-tokens", metavar="N", type=int, help=f"without it the run's, or {LIMIT}")
    flags.add_argument("--seed", metavar="N", type=int, default=0, help="the same one gives the same answers (0)")
    return flags


def check(asked: argparse.Namespace) -> None:
    """Refuse numbers that have no meaning."""
    for flag, value, good, must in (
        ("samples", asked.samples, asked.samples >= 1, "at least 1"),
        ("temperature", asked.temperature, asked.temperature is None or 0.05 <= asked.temperature < math.inf,
         "at least 0.05; --greedy takes the likeliest tokens"),
        ("max-new-tokens", asked.max_new_tokens, asked.max_new_tokens is None or asked.max_new_tokens >= 1, "at least 1"),
        ("seed", asked.seed, 0 <= asked.seed < 2**63, "0 or more, below 2**63"),
    ):  # fmt: skip
        if not good:
            raise Refused(f"--{flag} {value}: must be {must}")


def found(name: str) -> tuple[str, Config | None]:
    """The model that this name means and the settings of its run, None where it is of no run. Raises Refused."""
    folder = Path(name)
    for run in (folder, *([folder.parent.parent] if folder.parent.name == "checkpoints" else [])):
        settings = run / "config.json"
        if settings.is_file() and '"algorithm"' in settings.read_text(errors="replace"):
            job = read_saved(run)[1]
            if run != folder:
                return name, job
            from nanorl import checkpoint

            if (last := checkpoint.latest(run)) is None:
                raise Refused(f"{run}: no checkpoint there yet; wait for one, or name a model")
            return str(last), job
    return name, None


def known(text: str, job: Config, task: Task | None) -> Problem | None:
    """The problem that this prompt asks, with its answer: an addition, or one of the task's; None for any other."""
    from nanorl.tasks import Problem

    if sum_of := re.fullmatch(r"([0-9]{1,12})\+([0-9]{1,12})=", text):
        if "arithmetic" in shares(job.task):
            return Problem(text, str(int(sum_of[1]) + int(sum_of[2])), {"after": ")"})
    return next((problem for problem in (task.problems if task else ()) if problem.prompt == text), None)


class Asked:
    """A model that is loaded and asked one prompt after the other."""

    def __init__(self, asked: argparse.Namespace):
        import torch

        from nanorl import policy, rollout, scoring, tasks
        from nanorl.engine import Sampling
        from nanorl.local import LocalEngine

        self.name, job = found(asked.checkpoint)
        self.of_run = job is not None
        self.job = resolved(job) if job else Config(max_new_tokens=LIMIT)
        limit = asked.max_new_tokens or self.job.max_new_tokens
        temperature = asked.temperature or self.job.temperature
        device = ("cuda" if torch.cuda.is_available() else "cpu") if self.job.device == "auto" else self.job.device
        model, self.tokenizer = policy.load(self.name, device, "CHECKPOINT")
        self.engine = LocalEngine(policy.Policy(model, temperature, getattr(torch, self.job.dtype)), self.tokenizer)
        self.end = policy.end_tokens(model, self.tokenizer)
        self.sampling = Sampling(limit, 0.0 if asked.greedy else temperature, self.end, self.job.stop,
                                 (asked.seed, rollout.EVALUATE))  # fmt: skip
        self.samples, self.task = 1 if asked.greedy else asked.samples, None
        self.scorer = None
        if not {*FROM_FILE} & {*shares(self.job.task)} or Path(self.job.data or "").is_file():
            self.task = tasks.load(self.job)
            self.scorer = scoring.scorer(self.task.rewards, self.job.scoring)
        else:
            print(f"--data {self.job.data}: not there, so no verdicts, and no prompt suffix but that of the flags")

    def prompt(self, number: int, text: str) -> Prompt:
        """The prompt as the run would give it to the model, with the answer where it is known. Raises Refused."""
        from nanorl import sample, tasks

        problem = known(text, self.job, self.task)
        suffix = self.task.suffix if self.task else self.job.prompt_suffix or ""
        rendered, ids = tasks.render(problem or tasks.Problem(text, ""), self.tokenizer, self.job.system_prompt, suffix)
        if not ids or len(ids) + self.sampling.max_new_tokens > self.engine.room:
            raise Refused(f"PROMPT {text[:40]!r}: {len(ids)} tokens, and {self.sampling.max_new_tokens} new ones; a "
                          f"prompt has at least one, and the model takes {self.engine.room}; change --max-new-tokens")
        return sample.Prompt(number, ids, rendered, problem.answer if problem else "", problem.row if problem else {},
                             rewards=problem.rewards if problem else ())  # fmt: skip

    def answers(self, number: int, text: str) -> Group:
        """The samples of this prompt; their reward is NaN where the answer is not known."""
        from nanorl import rollout

        async def score(prompt: Prompt, completion: str, ids: Sequence[int]) -> float:
            """The run's verdict, if there can be one."""
            told = (await self.scorer.score(prompt, completion, ids)).value if prompt.answer and self.scorer else None
            return math.nan if told is None else told

        return asyncio.run(rollout.group(self.engine, self.tokenizer, self.prompt(number, text), score, self.sampling,
                                         self.samples))  # fmt: skip

    def told(self, group: Group, columns: int) -> str:
        """The samples as text: how each ended and what it is worth, then its tokens, each above its log-prob."""
        expected = f"   (right: {group.prompt.answer})" if group.prompt.answer else ""
        blocks = [f"{printable(group.prompt.text)}{expected}"]
        for i, sample in enumerate(group.samples, 1):
            sampled = [(t, p) for t, p, m in zip(sample.ids, sample.logp_behave, sample.mask) if m]
            worth = "" if math.isnan(sample.reward) else "right, " if sample.reward >= 1 else "wrong, "
            worth += "" if sample.reward in (0.0, 1.0) or not worth else f"reward {sample.reward:g}, "
            blocks.append(f"{i}: {worth}finish {sample.finish}, {len(sampled)} tokens, "
                          f"log-prob {math.fsum(p for _, p in sampled):.4f}\n{printable(sample.text)}\n"
                          f"{beneath(self.pieces(sample), [p for _, p in sampled], columns)}")  # fmt: skip
        return "\n\n".join(blocks)

    def pieces(self, sample: Sample) -> list[str]:
        """The text of each sampled token."""
        return [text for text, m in zip(pieces(self.tokenizer.decode, sample.ids), sample.mask) if m]


def printable(text: str) -> str:
    """The text with its line breaks, and without what would command a terminal."""
    return "".join(c if c.isprintable() or c == "\n" else "·" for c in text)


def beneath(texts: Sequence[str], logp: Sequence[float], columns: int) -> str:
    """Each text above its log-prob, in lines of at most so many columns; a blank in a text is shown as ·.

    >>> print(beneath(["(", " 36"], [-0.5, -0.25], 40))
         (     ·36
    -0.500  -0.250
    """
    pairs = [(repr(text)[1:-1].replace(" ", "·"), f"{p:.3f}") for text, p in zip(texts, logp, strict=True)]
    lines, width = [["", ""]], 0
    for text, p in pairs:
        wide = max(len(text), len(p)) + 2
        if width and width + wide > columns:
            lines, width = [*lines, ["", ""]], 0
        width += wide
        lines[-1][0] += text.rjust(wide)
        lines[-1][1] += p.rjust(wide)
    return "\n".join(line[2:] for pair in lines for line in pair)


def asked_for(prompts: Sequence[str]) -> Iterator[str]:
    """The prompts, and for each - the lines of standard input that are not empty. Raises Refused."""
    for prompt in prompts:
        try:
            prompt.encode()  # a command line may hold bytes that are no text
            yield from (filter(None, (line.rstrip("\r\n") for line in sys.stdin)) if prompt == "-" else [prompt])
        except UnicodeError as error:
            raise Refused(f"PROMPT {prompt!r}: not text ({error}); use UTF-8") from None


def main(words: list[str]) -> int:
    """Ask and print. Returns the exit status: 0 done, 2 refused, 130 stopped by Ctrl-C."""
    model = None
    try:
        check(asked := parser().parse_args(words))
        model = Asked(asked)
        how = "greedy" if asked.greedy else f"temperature {model.sampling.temperature:g}"
        print(f"{model.name}, {how}, at most {model.sampling.max_new_tokens} new tokens"
              + ("" if model.of_run else "; it is of no run here, so prompts go in as they are"), flush=True)  # fmt: skip
        for number, text in enumerate(asked_for(asked.prompts)):
            group = model.answers(number, text)
            print(f"\n{model.told(group, shutil.get_terminal_size((100, 24)).columns)}", flush=True)
    except (Refused, Lost) as error:
        print(error, file=sys.stderr)
        return 2
    except BrokenPipeError:
        return unread()
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    finally:
        if model is not None and model.scorer is not None:
            model.scorer.close()
    return 0
