"""What can be set? The flags of a run, parsed and checked before torch is imported (importing it takes seconds).

`Config` is the job: what is asked, how much, how it is optimised, where it goes. The axes of an algorithm (`Axes` in
`axes.py`: clip, KL, normalisation) are a second group, shown by `python train_grpo.py NAME --help`.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import shlex
import sys
import textwrap
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro

from nanorl.algorithms import ALGORITHMS, chosen
from nanorl.axes import FOREIGN, Axes, differences, flat, rebuilt
from nanorl.reward import REWARDS


STARTED = time.monotonic()  # scripts import this file before torch: the start of the program


class Refused(Exception):
    """The input cannot be used. The message is one line: which flag or file, what is wrong, what to do."""


@dataclass(frozen=True)
class Config:
    """Reinforcement learning for language models. The first word names an algorithm (python -m nanorl.algorithms)."""

    # the job
    task: Literal["arithmetic", "gsm8k", "jsonl"] = "arithmetic"
    """What is asked. arithmetic is made here; gsm8k and jsonl read --data."""
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
    reward: str | None = None
    """Verifier, by its name in reward.REWARDS. exact: the text itself; number: GSM8K style. Each task has its own."""

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
    engine: Literal["local"] = "local"
    """Who generates. local: the training model itself, in this process."""
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
    """Seed of everything random. The same seed on the same machine gives the same run."""
    dry_run: bool = False
    """Check everything, show the settings, one prompt as the model gets it and the memory it takes, and stop."""

    @property
    def samples_per_step(self) -> int:
        """Rows of a step, prompts_per_step × samples_per_prompt."""
        return self.prompts_per_step * self.samples_per_prompt


@dataclass(frozen=True)
class Whole(Config):
    """The job and the axes of the algorithm; the flags of both."""

    axes: Annotated[Axes, tyro.conf.arg(name="")] = field(default_factory=Axes)
    """what sets the algorithm apart"""


def parse(argv: list[str], default_name: str = "grpo") -> tuple[str, Config, Axes]:
    """The algorithm's name, the job and the algorithm's axes that a command line asks for.

    With --resume DIR the saved settings of that run are the defaults. Raises Refused; -h prints help and exits 0.
    """
    name, rest, named = default_name, list(argv), bool(argv and not argv[0].startswith("-"))
    if named:
        name, rest = argv[0], argv[1:]
        if name not in ALGORITHMS:
            near = " or ".join(difflib.get_close_matches(name, ALGORITHMS, 3))
            raise Refused(f"{name}: no such algorithm; {f'did you mean {near}?' if near else 'there are'} "
                          f"({', '.join(ALGORITHMS)})")
    for word in rest:
        flag = word.split("=")[0].lstrip("-").replace("_", "-")
        if word.startswith("--") and flag in FOREIGN:
            raise Refused(f"--{flag}: that is another library's name; here it is {FOREIGN[flag]}")
    settings = (tyro.conf.FlagCreatePairsOff,)
    if ("-h" in rest or "--help" in rest) and not named:
        tyro.cli(Config, args=["--help"], prog=f"{Path(sys.argv[0]).name} [NAME]", config=settings)
    default = Whole(axes=ALGORITHMS[name].axes, **ALGORITHMS[name].job)
    folder = resume_folder(rest)
    if folder is not None:
        asked, (name, default) = name, read_saved(folder)
        if named and name != asked:
            raise Refused(f"--resume {folder}: that run is {name}, not {asked}; start a new run instead")
    if ALGORITHMS[name].critic != ALGORITHMS[default_name].critic:
        other, what = ("ppo", "a") if ALGORITHMS[name].critic else ("grpo", "no")
        raise Refused(f"{name}: it has {what} critic; python train_{other}.py {f'--resume {folder}' if folder else name}")
    saved = default
    if "-h" in rest or "--help" in rest:  # only here: flags that the row refuses need no help
        shown = narrowed(default, ALGORITHMS[name].unused())
        tyro.cli(type(shown), default=shown, args=["--help"], prog=f"{Path(sys.argv[0]).name} {name}", config=settings,
                 description=ALGORITHMS[name].says)  # fmt: skip
    whole = tyro.cli(Whole, args=rest, default=default, prog=f"{Path(sys.argv[0]).name} {name}", config=settings,
                     description=ALGORITHMS[name].says)
    job = resolved(Config(**{f.name: getattr(whole, f.name) for f in dataclasses.fields(Config)}))
    for flag in ("task", "digits", "model", "seed", "prompts_per_step") if folder is not None else ():
        if getattr(job, flag) != getattr(saved, flag):  # the start, and what numbers the prompts
            raise Refused(f"{dashed(flag)}: {folder} has {getattr(saved, flag)}, and a run keeps it; start a new run")
    check(name, job, whole.axes)
    return name, job, whole.axes


def narrowed(default: Whole, unused: set[str]) -> Whole:
    """The same settings, of a class whose help hides these axes."""
    kinds = {f.name: type(getattr(default.axes, f.name)) for f in dataclasses.fields(Axes)}
    hidden = [(name, tyro.conf.Suppress[kinds[name]], field(default=getattr(default.axes, name))) for name in unused]
    axes = dataclasses.make_dataclass("Axes", hidden, bases=(Axes,), frozen=True)
    part = ("axes", Annotated[axes, tyro.conf.arg(name="")], field(default_factory=axes))
    whole = dataclasses.make_dataclass("Whole", [part], bases=(Whole,), frozen=True)
    return whole(**{**vars(default), "axes": axes(**vars(default.axes))})


def resolved(cfg: Config) -> Config:
    """The job with the length limit that its task sets, where the flags set none."""
    limit = 6 * cfg.digits + 6 if cfg.task == "arithmetic" else 256
    return cfg if cfg.max_new_tokens is not None else dataclasses.replace(cfg, max_new_tokens=limit)


def resume_folder(words: list[str]) -> Path | None:
    """The folder after --resume, if it is there."""
    for i, word in enumerate(words):
        if word == "--resume" and i + 1 < len(words):
            return Path(words[i + 1])
        if word.startswith("--resume="):
            return Path(word.split("=", 1)[1])
    return None


def read_saved(folder: Path) -> tuple[str, Whole]:
    """The algorithm and the settings in config.json of a run. Raises Refused where there are none."""
    path = folder / "config.json"
    if not path.is_file():
        raise Refused(f"--resume {folder}: no config.json there; name the folder of a run (runs/NAME)")
    try:
        saved = json.loads(path.read_text())
        job = saved["config"] | {"stop": tuple(saved["config"].get("stop", ())), "out": None}  # JSON has no tuples
        if saved["algorithm"] not in ALGORITHMS:
            raise KeyError(f"algorithm {saved['algorithm']}")
        return saved["algorithm"], Whole(**job, axes=rebuilt(saved["axes"]))
    except ValueError as error:
        raise Refused(f"{path}: not JSON ({error}); restore it or start a new run") from None
    except (KeyError, TypeError, AttributeError) as error:
        raise Refused(f"{path}: not the settings of a run ({error}); restore it or start a new run") from None


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
    if cfg.reward is not None and cfg.reward not in REWARDS:
        raise Refused(f"--reward {cfg.reward}: no such verifier; there are {', '.join(REWARDS)}")
    if "" in cfg.stop:
        raise Refused("--stop '': the empty text ends every answer at once; leave it out")
    if cfg.task != "arithmetic" and cfg.data is None:
        raise Refused(f"--task {cfg.task} needs --data FILE: one JSON object a line")
    if cfg.task == "arithmetic" and (cfg.data or cfg.eval_data):
        raise Refused("--data: arithmetic makes its own problems; add --task jsonl or --task gsm8k")
    if cfg.task != "arithmetic" and cfg.model is None:
        raise Refused(f"--task {cfg.task} needs --model DIR: the tiny model only knows arithmetic")
    if cfg.resume and cfg.out and Path(cfg.out) != Path(cfg.resume):
        raise Refused(f"--out {cfg.out}: a resumed run stays in its folder, {cfg.resume}")
    chosen(name, axes).refuse(cfg, ALGORITHMS[name].axes, Refused)


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


def command(script: str, name: str, cfg: Config, axes: Axes) -> str:
    """The one command that makes this run again, with what differs from the defaults."""
    words = ["python", script, name]
    usual = resolved(Config(**{"task": cfg.task, "digits": cfg.digits, **ALGORITHMS[name].job}))
    usual = dataclasses.replace(usual, task=Config.task, digits=Config.digits)
    asked = [(f, value) for (f, value), pair in zip(flat(cfg), flat(usual)) if (f, value) != pair]
    for f, value in asked + differences(axes, ALGORITHMS[name].axes):
        if f in ("resume", "dry_run", "out"):
            continue
        if isinstance(value, bool):
            words.append(dashed(f if value else ".".join((*f.split(".")[:-1], f"no_{f.split('.')[-1]}"))))
        elif isinstance(value, str) and value.startswith("-"):  # else it would read as a flag
            words.append(f"{dashed(f)}={value}")
        else:
            words += [dashed(f), *map(str, value if isinstance(value, tuple) else [value])]
    return shlex.join(words)


def describe(script: str, name: str, cfg: Config, axes: Axes) -> str:
    """Every setting, the counts that follow from them, doubts and the command, as printed at the start of a run."""
    updates, unused = cfg.updates_per_batch * cfg.epochs_per_batch, chosen(name, axes).unused()
    pairs = [f"{f}={value!r}".replace(" ", "\0") for f, value in flat(cfg) + flat(axes) if f.split(".")[0] not in unused]
    settings = textwrap.fill("  ".join(pairs), 118, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)
    return (f"{ALGORITHMS[name].says}\n{settings}\n".replace("\0", " ")
            + f"{cfg.samples_per_step} samples = {cfg.prompts_per_step} prompts × {cfg.samples_per_prompt}; "
            + f"{updates} update{'s' * (updates > 1)} a step; {cfg.steps} steps\n"
            + "".join(f"note: {remark}\n" for remark in chosen(name, axes).remarks(cfg))
            + f"again: {command(script, name, cfg, axes)}")
