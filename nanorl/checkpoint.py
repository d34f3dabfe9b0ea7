"""How does a run go on exactly where it stopped?

    runs/NAME/checkpoints/step-N/
        model.safetensors, config.json, generation_config.json and the tokenizer's files: opens with from_pretrained
        optimizer.safetensors   AdamW's state: "PARAMETER/exp_avg", "PARAMETER/exp_avg_sq", "PARAMETER/step"
        critic.model.safetensors, critic.optimizer.safetensors    the same of a critic, where there is one
        state.json              step, score, what the caller wants back, the size of every other file; written last

A checkpoint is written under another name, forced to disk and then renamed: a kill at any moment leaves the one before
it whole. `latest` believes a folder only if every file is there with its size. Nothing is pickled.

Left out: states of random generators (every random number derives from counters, so the step says it all), and
learning rate and other settings of the optimizer (the run's configuration says them again).
"""

from __future__ import annotations

import dataclasses
import fcntl
import itertools
import json
import math
import os
import platform
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, TextIO

import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from nanorl.axes import Axes
from nanorl.cli import command
from nanorl.config import Config, Refused

WEIGHTS, MOMENTS, STATE = "model.safetensors", "optimizer.safetensors", "state.json"


class Part(NamedTuple):
    """Something that is trained, and what trains it. The first part of a run is its `transformers` model, prefix ""."""

    module: nn.Module
    optimizer: torch.optim.Optimizer
    prefix: str = ""  # of its files' names


def standing(cfg: Config) -> Path:
    """Where the run will write: the deepest folder on the way to it that is there already."""
    path = Path(cfg.resume or cfg.out or "runs").absolute()
    return next(p for p in (path, *path.parents) if p.exists())


def refuse_used(cfg: Config) -> None:
    """Raise Refused if --out holds something, for two runs in one folder would mix, or cannot be a folder."""
    there = standing(cfg)
    if not there.is_dir() or (cfg.out and not cfg.resume and there == Path(cfg.out).absolute() and any(there.iterdir())):
        raise Refused(f"--out {cfg.out}: in use; go on with --resume {cfg.out}, or choose another name")


def refuse_full(cfg: Config, *modules: nn.Module) -> None:
    """Raise Refused if the disk has no room for a run: three checkpoints, the best, one being written, the logs."""
    space, free = 5 * need(*modules) + (64 << 20), shutil.disk_usage(standing(cfg)).free
    if free < space:
        raise Refused(f"--out {cfg.resume or cfg.out or 'runs'}: a run needs about {space / 1e9:.1f} GB there and "
                      f"{free / 1e9:.1f} are free; choose another disk")


def new_folder(cfg: Config, name: str) -> Path:
    """A folder for a new run: --out, or the first free runs/NAME-TASK-N. Raises Refused if --out holds something."""
    refuse_used(cfg)
    if cfg.out:
        Path(cfg.out).mkdir(parents=True, exist_ok=True)
        return Path(cfg.out)
    for number in itertools.count(1):
        folder = Path("runs") / f"{name}-{cfg.task}-{number}"
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            continue


def locked(folder: Path) -> TextIO:
    """The open lock of a run's folder; it falls with the process. Raises Refused while another process has it."""
    handle = open(folder / ".lock", "w")
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise Refused(f"{folder}: another process is training there; wait for it, or choose another --out") from None
    return handle


def write_settings(folder: Path, script: str, name: str, cfg: Config, axes: Axes) -> None:
    """config.json: all settings, the command and the versions; a resumed run writes its own over it."""
    job = dataclasses.asdict(dataclasses.replace(cfg, resume=None, out=str(folder)))
    saved = {"algorithm": name, "config": job, "axes": dataclasses.asdict(axes),
             "command": command(script, name, cfg, axes),
             "versions": {"python": platform.python_version(), "torch": torch.__version__,
                          "transformers": transformers.__version__, "threads": torch.get_num_threads()}}  # fmt: skip
    temporary = folder / ".config.json"
    temporary.write_text(json.dumps(saved, indent=1) + "\n")
    os.replace(temporary, folder / "config.json")


def save(run: Path, step: int, parts: Sequence[Part], tokenizer, state: dict, score: float | None, keep: int = 3) -> Path:
    """Write checkpoints/step-N, `prune` the others, and return the folder. `state` is JSON; floats stay exact.

    A whole checkpoint of the same step stays and only its state and score are renewed: resume is exact, so a step has
    one set of weights, and replacing a folder leaves a moment without it. A score of None does not erase a score.
    Raises Refused if the disk is too full; what was there stays.
    """
    folder = run / "checkpoints"
    final, writing = folder / f"step-{step}", folder / f".writing-{step}"
    folder.mkdir(parents=True, exist_ok=True)
    for leftover in folder.glob(".writing-*"):  # of a killed run
        shutil.rmtree(leftover)
    if final.exists() and broken(final) is None:
        record = read(final)
        record |= {"state": state, "score": record["score"] if score is None else score}
        (final / f".{STATE}").write_text(json.dumps(record))
        swap(final / f".{STATE}", final / STATE)
    else:
        if (free := shutil.disk_usage(folder).free) < (wanted := need(*(part.module for part in parts))):
            raise Refused(f"{folder}: a checkpoint takes about {wanted:,} bytes and {free:,} are free; make room "
                          "and go on with --resume, or start with --out on another disk")
        # One file whatever its size, under the module's own names, so that restore needs no map of them.
        parts[0].module.save_pretrained(writing, max_shard_size=10**18, save_original_format=False)
        tokenizer.save_pretrained(writing)
        for module, optimizer, prefix in parts:
            if prefix:
                save_file(module.state_dict(), writing / f"{prefix}{WEIGHTS}")
            names = {parameter: name for name, parameter in module.named_parameters()}
            save_file({f"{names[parameter]}/{key}": value.contiguous() for parameter, values in optimizer.state.items()
                       for key, value in values.items()}, writing / f"{prefix}{MOMENTS}")  # fmt: skip
        files = {str(file.relative_to(writing)): file.stat().st_size for file in writing.rglob("*") if file.is_file()}
        (writing / STATE).write_text(json.dumps({"step": step, "score": score, "state": state, "files": files}))
        for path in (*writing.rglob("*"), writing):
            flush(path)
        if final.exists():  # broken, so nothing is lost
            shutil.rmtree(final)
        os.rename(writing, final)
        flush(folder)
    prune(run, final, keep)
    return final


def prune(run: Path, just: Path, keep: int) -> None:
    """Delete all checkpoints but the one just written, the last `keep` whole ones and the best; broken ones go too."""
    kept = {just, best(run), *[path for path in steps(run) if broken(path) is None][:keep]}
    for path in steps(run):
        if path not in kept:
            shutil.rmtree(path)


def need(*modules: nn.Module) -> int:
    """Bytes that one checkpoint takes, about: each parameter and its two moments."""
    return 3 * sum(p.numel() * p.element_size() for module in modules for p in module.parameters())


def steps(run: Path) -> list[Path]:
    """Folders of checkpoints, whole or not, newest first: by number, since as text step-9 comes after step-10."""
    found = [path for path in (run / "checkpoints").glob("step-*") if re.fullmatch(r"step-\d+", path.name)]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")), reverse=True)


def read(path: Path) -> dict:
    """state.json of a checkpoint: step, score, state, files."""
    return json.loads((path / STATE).read_text())


def broken(path: Path) -> str | None:
    """What makes this folder no checkpoint, None if it is one: a file that is missing or torn."""
    if not (path / STATE).is_file():
        return f"{STATE} is missing"
    try:
        files = read(path)["files"]
    except (ValueError, KeyError):
        return f"{STATE} is torn"
    for name, size in files.items():
        if not (path / name).is_file():
            return f"{name} is missing"
        if (path / name).stat().st_size != size:
            return f"{name} has {(path / name).stat().st_size} bytes instead of {size}"
    return None


def latest(run: Path) -> Path | None:
    """The newest whole checkpoint, None without one. Newer ones that are broken are named on stderr."""
    for path in steps(run):
        if (wrong := broken(path)) is None:
            return path
        print(f"{path}: skipped, {wrong}", file=sys.stderr)
    return None


def best(run: Path) -> Path | None:
    """The whole checkpoint with the highest score, the earliest of equals; None if none has a score (NaN is none)."""
    scores = {path: read(path)["score"] for path in reversed(steps(run)) if broken(path) is None}
    scored = [path for path, score in scores.items() if score is not None and not math.isnan(score)]
    return max(scored, key=scores.__getitem__, default=None)  # max returns the first of equals


@torch.no_grad()
def restore(path: Path, parts: Sequence[Part]) -> dict:
    """Put the weights and the optimizers' moments of all parts back, bitwise, and return the saved `state`.

    Everything is checked before anything is written. Raises Refused, naming file and parameter, where the checkpoint
    is not whole, a weight is missing, left over or of another shape or dtype, or the optimizer trains something else.
    """
    if (wrong := broken(path)) is not None:
        raise Refused(f"{path}: {wrong}; take another checkpoint of the run")
    found = [(part, placed(path, part), moments(path, part)) for part in parts]
    for part, pairs, state in found:
        for tensor, value in pairs:
            tensor.copy_(value)
        part.optimizer.load_state_dict({"state": state, "param_groups": part.optimizer.state_dict()["param_groups"]})
    return read(path)["state"]


def tensors(file: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, by name. Raises Refused."""
    if not file.is_file():
        raise Refused(f"{file}: missing; take a checkpoint of a run with the same parts")
    try:
        return load_file(file)
    except SafetensorError as error:
        raise Refused(f"{file.parent}: damaged ({error}); delete it, and --resume takes the one before") from None


def placed(path: Path, part: Part) -> list[tuple[Tensor, Tensor]]:
    """Each weight of the part with its saved value. Raises Refused where they do not fit one to one."""
    file = path / f"{part.prefix}{WEIGHTS}"
    weights, pairs = tensors(file), []
    aliases: dict[Tensor, list[str]] = {}  # tied weights are one tensor of several names, saved under one of them
    for name, tensor in part.module.state_dict(keep_vars=True).items():
        aliases.setdefault(tensor, []).append(name)
    for tensor, names in aliases.items():
        name = next((name for name in names if name in weights), names[0])
        value = weights.pop(name, None)
        if value is None or (value.shape, value.dtype) != (tensor.shape, tensor.dtype):
            found = "missing" if value is None else f"{value.dtype} {tuple(value.shape)}"
            raise Refused(f"{file}: {name} is {found}, the model's is {tensor.dtype} {tuple(tensor.shape)}; "
                          "use the model that wrote it")
        pairs.append((tensor, value))
    for name in weights:
        raise Refused(f"{file}: {name} has no place of its own in this model; use the model that wrote it")
    return pairs


def moments(path: Path, part: Part) -> dict[int, dict[str, Tensor]]:
    """The optimizer's state, by a parameter's place in its groups, as optimizers number them. Raises Refused."""
    file = path / f"{part.prefix}{MOMENTS}"
    name_of = {parameter: name for name, parameter in part.module.named_parameters()}
    trained = [name_of[parameter] for group in part.optimizer.param_groups for parameter in group["params"]]
    state: dict[int, dict[str, Tensor]] = {}
    for entry, value in tensors(file).items():
        name, _, key = entry.rpartition("/")
        if name not in trained:
            raise Refused(f"{file}: {name} is not trained by this optimizer; train what the run trained")
        state.setdefault(trained.index(name), {})[key] = value.clone()  # load_file only maps the file
    return state


def swap(temporary: Path, path: Path) -> None:
    """Let a finished file take the place of another: on disk first, then renamed, so that either is whole."""
    flush(temporary)
    os.replace(temporary, path)
    flush(path.parent)


def flush(path: Path) -> None:
    """Force a file, or a folder's list of names, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
