"""What can be set? The flags of a run and what is refused, before torch is imported (importing it takes seconds).

`Config` is the job: what is asked, how much, how it is optimised, where it goes. How far sampling runs ahead (`Pace` in
`pace.py`), the vLLM servers (`Remote`), how rewards are called (`Scoring` in `faults.py`) and the axes of an algorithm
(`Axes` in `axes.py`: clip, KL, normalisation) are a second group, shown by `python train_grpo.py NAME --help`. `cli.py`
reads the command line.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from nanorl.algorithms import ALGORITHMS, chosen
from nanorl import faults, pace
from nanorl.axes import Axes
from nanorl.faults import Scoring
from nanorl.pace import Pace
from nanorl.reward import label, named, split

MADE_HERE, FROM_FILE = ("arithmetic", "countdown"), ("gsm8k", "jsonl")  # tasks
STARTED = time.monotonic()  # scripts import this file before torch: the start of the program


class Refused(Exception):
    """The input cannot be used. The message is one line: which flag or file, what is wrong, what to do."""


class Lost(Exception):
    """Something beside this process that the run needs is gone. The message is one line: what, how, its last words."""


def unread() -> int:
    """Nobody reads the output any more (… | head): no word about that at the exit. Returns the exit status."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1


@dataclass(frozen=True)
class Remote:
    """vLLM servers that sample (--engine vllm); python -m nanorl.serve starts one"""

    servers: tuple[str, ...] = ()
    """Addresses of vLLM servers, http://HOST:PORT each. Two lines of the README start one."""
    transport: Literal["broadcast", "disk"] = "broadcast"
    """How weights travel. broadcast: a process group with each server; disk: files in --weights that both can read."""
    weights: str | None = None
    """Folder for --transport disk, under the same path on every machine. Without it RUN/weights."""
    mismatch: float = 5e-5
    """Mean difference of log-probs, trainer's and server's, that the first publish may have. More in bfloat16."""
    prove_every: int = 1
    """Publishes between two proofs that the server's weights are the trainer's. More than 1 only for large models."""
    patience: float = 120.0
    """Seconds without any server that answers, after which the run saves and ends."""


@dataclass(frozen=True)
class Config:
    """Reinforcement learning for language models. The first word names an algorithm (python -m nanorl.algorithms);
    NAME --help shows the flags of asynchrony and of the algorithm too."""

    # the job
    task: str = "arithmetic"
    """What is asked. arithmetic, countdown: made here; gsm8k, jsonl: read --data. Mixed: arithmetic=3,countdown=1."""
    digits: int = 3
    """Digits of each number in arithmetic. 3 learns in two minutes; more take longer."""
    data: str | None = None
    """File of problems, one JSON object a line: "prompt" (text or chat messages), "answer", anything for the reward."""
    eval_data: str | None = None
    """File of held-out problems. Without it a tenth of --data, at most --eval-problems, is held out."""
    model: str | None = None
    """Folder or Hugging Face id of the start weights. Without it a tiny model is made and warm-started here."""
    system_prompt: str | None = None
    """System message put before every prompt of a chat model."""
    prompt_suffix: str | None = None
    """Text added to every prompt; say there how to answer. Each task has its own; '' takes it away."""
    stop: tuple[str, ...] = ()
    """Texts that end an answer, besides the model's end tokens; the answer keeps them. For base models, without end."""
    reward: tuple[str, ...] = ()
    """Rewards by name (notes/rewards.md), or FILE.py:NAME, summed by weight: number format=0.2. Each task has its own."""

    # sizes
    steps: int = 200
    """Training steps; each takes new samples. Tens for a look, hundreds for a result."""
    prompts_per_step: int = 32
    """Prompts a step. More is smoother; the gradient's noise falls with its square root."""
    samples_per_prompt: int = 8
    """Samples of each prompt, the group of the baseline. 8 to 16; harder tasks need more to find a success."""
    max_new_tokens: int | None = None
    """Tokens an answer may have. Without it 6 × digits + 6 for arithmetic, 256 else. It should cut under 5 %."""
    temperature: float = 1.0
    """Sampling temperature, for sampling and scoring alike. 1 unless you know why."""
    tokens_per_micro_batch: int = 4096
    """Tokens, padding included, in one forward pass. As large as memory allows; only bnpo's gradient depends on it."""
    updates_per_batch: int = 1
    """Optimizer steps in one pass over a step's samples. 1 is on-policy; up to 4 is common."""
    epochs_per_batch: int = 1
    """Passes over a step's samples. 1 unless samples are dear."""

    # optimiser
    lr: float = 2e-4
    """AdamW's learning rate at its peak. 2e-4 for the tiny model, 1e-6 to 5e-6 for models of a billion and more."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How lr goes on after the warm-up: stays, or falls to 0 at the last step."""
    warmup_steps: int = 0
    """Steps in which lr rises linearly from 0. 0 to 10."""
    weight_decay: float = 0.0
    """AdamW's weight decay on matrices, per step times lr. 0 to 0.1."""
    max_grad_norm: float = 1.0
    """Gradients longer than this are scaled down to it. 1; watch grad_norm."""

    # engine
    engine: Literal["local", "worker", "vllm"] = "local"
    """Who generates. local: the training model itself, in this process; worker: a second process; vllm: --servers."""
    device: str = "auto"
    """cpu, cuda, cuda:1, mps; auto takes cuda where there is one, else cpu."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the passes. Weights and Adam's moments stay float32 in either."""

    # evaluation
    eval_every: int = 10
    """Steps between evaluations on held-out problems; also before the first and after the last. 0: never."""
    eval_problems: int = 512
    """Held-out problems. 512 tells differences of 0.04 apart (two standard errors)."""
    eval_samples: int = 4
    """Samples a held-out problem at the end, for pass@1 … pass@k, k the largest power of two in it."""
    eval_only: bool = False
    """Evaluate --model and stop."""

    # output
    out: str | None = None
    """Folder of the run. Without it the first free runs/NAME-TASK-N."""
    resume: str | None = None
    """Folder of a run to go on with, by its own settings; flags given beside it change them (--steps 120)."""
    save_every: int = 20
    """Steps between checkpoints; also the last, and on Ctrl-C. The last 3 and the best are kept. 0: the last only."""
    seed: int = 0
    """Seed of everything random. The same seed on the same machine gives the same run, if it is synchronous."""
    dry_run: bool = False
    """Check everything, show the settings, one prompt as the model gets it and the memory it takes, and stop."""

    pace: Pace = field(default_factory=Pace)
    """how far sampling may run ahead of training"""
    remote: Remote = field(default_factory=Remote)
    """vLLM servers that sample"""
    scoring: Scoring = field(default_factory=Scoring)
    """how rewards are called"""

    @property
    def samples_per_step(self) -> int:
        """Rows of a step, prompts_per_step × samples_per_prompt."""
        return self.prompts_per_step * self.samples_per_prompt


def resolved(cfg: Config) -> Config:
    """The job with the length limit that its task sets, where the flags set none."""
    limit = 6 * cfg.digits + 6 if [*shares(cfg.task)] == ["arithmetic"] else 256
    return cfg if cfg.max_new_tokens is not None else dataclasses.replace(cfg, max_new_tokens=limit)


def check(name: str, cfg: Config, axes: Axes) -> None:
    """Refuse what cannot work, before any work, in one line that says what would."""
    counts = ("steps", "prompts_per_step", "samples_per_prompt", "max_new_tokens", "tokens_per_micro_batch",
              "updates_per_batch", "epochs_per_batch", "digits", "eval_problems", "eval_samples")  # fmt: skip
    from_0 = ("eval_every", "save_every", "warmup_steps", "weight_decay", "seed")
    for flags, good, must in ((counts, lambda x: x >= 1, "at least 1"),
                              (("lr", "max_grad_norm"), lambda x: 0 < x < float("inf"), "above 0 and finite"),
                              (from_0, lambda x: 0 <= x < float("inf"), "0 or more")):  # fmt: skip
        for flag in flags:
            if not good(getattr(cfg, flag)):
                raise Refused(f"{dashed(flag)} {getattr(cfg, flag)}: must be {must}")
    if not 0.05 <= cfg.temperature < float("inf"):
        raise Refused(f"--temperature {cfg.temperature}: must be at least 0.05; greedy answers (0) are for evaluation, "
                      "they have no spread to learn from")
    if cfg.samples_per_step % cfg.updates_per_batch:
        near = divisors_near(cfg.samples_per_step, cfg.updates_per_batch)
        raise Refused(f"--updates-per-batch {cfg.updates_per_batch}: does not divide {cfg.samples_per_step} samples "
                      f"({cfg.prompts_per_step} prompts × {cfg.samples_per_prompt}); nearest that do: {near}")
    if cfg.seed >= 2**63:
        raise Refused(f"--seed {cfg.seed}: must be below 2**63")
    refuse_rewards(cfg.reward)
    if "" in cfg.stop:
        raise Refused("--stop '': the empty text ends every answer at once; leave it out")
    mixed = shares(cfg.task)
    from_file = [name for name in mixed if name in FROM_FILE]
    if from_file and cfg.data is None:
        raise Refused(f"--task {cfg.task} needs --data FILE: one JSON object a line")
    if not from_file and (cfg.data or cfg.eval_data):
        raise Refused(f"--data: {cfg.task} makes its own problems; add --task jsonl or --task gsm8k")
    if len(from_file) > 1:
        raise Refused(f"--task {cfg.task}: one task may read --data; put both files into one, as jsonl")
    if [*mixed] != ["arithmetic"] and cfg.model is None:
        raise Refused(f"--task {cfg.task} needs --model DIR: the tiny model only knows arithmetic")
    if cfg.resume and cfg.out and Path(cfg.out) != Path(cfg.resume):
        raise Refused(f"--out {cfg.out}: a resumed run stays in its folder, {cfg.resume}")
    if (line := pace.wrong(cfg.pace, cfg.engine, cfg.prompts_per_step) or faults.wrong(cfg.scoring)) is not None:
        raise Refused(line)
    refuse_servers(cfg)
    chosen(name, axes, cfg.pace.stale, cfg.max_new_tokens).refuse(cfg, ALGORITHMS[name].axes, Refused)


def shares(task: str) -> dict[str, float]:
    """The share of each task in a run; they sum to 1. Raises Refused for a task that there is none of.

    >>> shares("arithmetic=3,countdown")
    {'arithmetic': 0.75, 'countdown': 0.25}
    """
    pairs = [split(part) for part in task.split(",")]
    for name, weight in pairs:
        if name not in (*MADE_HERE, *FROM_FILE):
            raise Refused(f"--task {name}: no such task; there are {', '.join((*MADE_HERE, *FROM_FILE))}")
        if not 0 < weight < float("inf") or [n for n, _ in pairs].count(name) > 1:
            raise Refused(f"--task {task}: each task once, with a weight above 0")
    total = sum(weight for _, weight in pairs)
    return {name: weight / total for name, weight in pairs}


def refuse_rewards(specs: tuple[str, ...]) -> None:
    """Raise Refused for rewards that are not there, have no finite weight, or would be logged under one name."""
    labels = [label(spec) for spec in specs]
    for spec, name in zip(specs, labels):
        named(spec)
        if not abs(split(spec)[1]) < float("inf"):
            raise Refused(f"--reward {spec}: its weight must be finite")
        if labels.count(name) > 1 or name in ("all", "std", "group_std", "faults"):
            raise Refused(f"--reward {spec}: reward/{name} is taken in the metrics; name each reward once, or rename it")


def refuse_servers(cfg: Config) -> None:
    """Raise Refused for settings of servers that cannot work."""
    remote = cfg.remote
    if cfg.engine != "vllm" and remote != Remote():
        flag = next(dashed(f.name) for f in dataclasses.fields(Remote) if getattr(remote, f.name) != f.default)
        raise Refused(f"{flag}: only --engine vllm has servers; add it, or leave {flag} away")
    if cfg.engine == "vllm" and not remote.servers:
        raise Refused("--engine vllm: name its servers, --servers http://127.0.0.1:8000; "
                      "python -m nanorl.serve starts one")  # fmt: skip
    for url in remote.servers:
        try:
            good = urlsplit(url).scheme in ("http", "https") and urlsplit(url).hostname and urlsplit(url).port != 0
        except ValueError:  # a port that is no number, or too large
            good = False
        if not good or remote.servers.count(url) > 1:
            raise Refused(f"--servers {url}: must be addresses like http://127.0.0.1:8000, each once")
    if remote.weights is not None and remote.transport != "disk":
        raise Refused(f"--weights {remote.weights}: only --transport disk writes there; add it")
    for flag, good, must in (("mismatch", 0 < remote.mismatch < float("inf"), "above 0 and finite"),
                             ("prove_every", remote.prove_every >= 1, "at least 1"),
                             ("patience", 0 < remote.patience < float("inf"), "above 0 and finite")):  # fmt: skip
        if not good:
            raise Refused(f"{dashed(flag)} {getattr(remote, flag)}: must be {must}")


def divisors_near(total: int, wanted: int) -> str:
    """The divisors of total next below and above wanted, as text.

    >>> divisors_near(256, 3)
    '2 or 4'
    """
    divisors = [d for d in range(1, total + 1) if total % d == 0]
    below, above = [d for d in divisors if d < wanted], [d for d in divisors if d > wanted]
    return " or ".join(str(d) for d in below[-1:] + above[:1])


def dashed(name: str) -> str:
    """The flag of a field: max_new_tokens → --max-new-tokens."""
    return "--" + name.replace("_", "-")
