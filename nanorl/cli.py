"""How is a command line read? The algorithm's name, the flags, the settings of a run to go on with; and written again."""

from __future__ import annotations

import dataclasses
import difflib
import json
import shlex
import sys
import textwrap
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from nanorl.algorithms import ALGORITHMS, chosen
from nanorl.axes import FOREIGN, Axes, differences, flat, rebuilt
from nanorl.config import Config, Refused, Remote, check, dashed, resolved
from nanorl.faults import Scoring
from nanorl.pace import Pace


@dataclass(frozen=True)
class Whole(Config):
    """The job and the axes of the algorithm; the flags of both."""

    pace: Annotated[Pace, tyro.conf.arg(name="")] = field(default_factory=Pace)
    """how far sampling may run ahead of training"""
    remote: Annotated[Remote, tyro.conf.arg(name="")] = field(default_factory=Remote)
    """vLLM servers that sample"""
    scoring: Annotated[Scoring, tyro.conf.arg(name="")] = field(default_factory=Scoring)
    """how rewards are called"""
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
        tyro.cli(job_alone(), args=["--help"], prog=f"{Path(sys.argv[0]).name} [NAME]", config=settings)
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


def job_alone() -> type[Config]:
    """Config without what only the second group of the help shows."""
    hidden = [("pace", tyro.conf.Suppress[Pace], field(default_factory=Pace)),
              ("remote", tyro.conf.Suppress[Remote], field(default_factory=Remote)),
              ("scoring", tyro.conf.Suppress[Scoring], field(default_factory=Scoring))]  # fmt: skip
    return dataclasses.make_dataclass("Config", hidden, bases=(Config,), frozen=True)


def narrowed(default: Whole, unused: set[str]) -> Whole:
    """The same settings, of a class whose help hides these axes."""
    kinds = {f.name: type(getattr(default.axes, f.name)) for f in dataclasses.fields(Axes)}
    hidden = [(name, tyro.conf.Suppress[kinds[name]], field(default=getattr(default.axes, name))) for name in unused]
    axes = dataclasses.make_dataclass("Axes", hidden, bases=(Axes,), frozen=True)
    part = ("axes", Annotated[axes, tyro.conf.arg(name="")], field(default_factory=axes))
    whole = dataclasses.make_dataclass("Whole", [part], bases=(Whole,), frozen=True)
    return whole(**{**vars(default), "axes": axes(**vars(default.axes))})


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
        rewards = job.get("reward") or ()
        job["reward"] = (rewards,) if isinstance(rewards, str) else tuple(rewards)  # one text, in older runs
        remote = job.get("remote", {})
        job |= {"pace": Pace(**job.get("pace", {})), "scoring": Scoring(**job.get("scoring", {})),
                "remote": Remote(**{**remote, "servers": tuple(remote.get("servers", ()))})}  # fmt: skip
        if saved["algorithm"] not in ALGORITHMS:
            raise KeyError(f"algorithm {saved['algorithm']}")
        return saved["algorithm"], Whole(**job, axes=rebuilt(saved["axes"]))
    except ValueError as error:
        raise Refused(f"{path}: not JSON ({error}); restore it or start a new run") from None
    except (KeyError, TypeError, AttributeError) as error:
        raise Refused(f"{path}: not the settings of a run ({error}); restore it or start a new run") from None


def command(script: str, name: str, cfg: Config, axes: Axes) -> str:
    """The one command that makes this run again, with what differs from the defaults."""
    words = ["python", script, name]
    usual = resolved(Config(**{"task": cfg.task, "digits": cfg.digits, **ALGORITHMS[name].job}))
    usual = dataclasses.replace(usual, task=Config.task, digits=Config.digits)
    asked = [(bare(f), x) for (f, x), pair in zip(flat(cfg), flat(usual)) if (f, x) != pair]
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


def bare(name: str) -> str:
    """A setting's name as its flag has it.

    >>> bare("pace.max_lag"), bare("kl_weight")
    ('max_lag', 'kl_weight')
    """
    return name.removeprefix("pace.").removeprefix("remote.").removeprefix("scoring.")


def describe(script: str, name: str, cfg: Config, axes: Axes) -> str:
    """Every setting, the counts that follow from them, doubts and the command, as printed at the start of a run."""
    algo, updates = chosen(name, axes, cfg.pace.stale, cfg.max_new_tokens), cfg.updates_per_batch * cfg.epochs_per_batch
    shown = [(f, value) for f, value in flat(cfg) + flat(algo.axes) if f.split(".")[0] not in algo.unused()]
    pairs = [f"{bare(f)}={value!r}".replace(" ", "\0") for f, value in shown]
    settings = textwrap.fill("  ".join(pairs), 118, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)
    return (f"{ALGORITHMS[name].says}\n{settings}\n".replace("\0", " ")
            + f"{cfg.samples_per_step} samples = {cfg.prompts_per_step} prompts × {cfg.samples_per_prompt}; "
            + f"{updates} update{'s' * (updates > 1)} a step; {cfg.steps} steps\n"
            + "".join(f"note: {remark}\n" for remark in algo.remarks(cfg))
            + f"again: {command(script, name, cfg, axes)}")
