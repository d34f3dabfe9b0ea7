"""How did runs go? Their curves as one picture, what they were asked differently, and what each reached, as text.

    python -m nanorl.monitor RUN [RUN…] [--out FILE] [--keys KEY…] [--smooth N] [--against step|seconds]

Only the files of a run are read, so it may be going on, on another machine, or long over. No torch, to look is quick.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanorl.cli import bare
from nanorl.config import Refused, dashed
from nanorl.monitor import span
from nanorl.timeline import STYLE, drawable, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SHOWN = ("reward", "eval/pass@1", "length/mean", "entropy", "grad_norm", "kl/ref", "mismatch/mean", "seconds")
UNITS = {  # as in notes/metrics.md; a panel of another key has no unit
    "eval/pass@1": "0–1", "eval/greedy": "0–1", "contrast": "0–1", "truncated": "0–1", "clip": "0–1",
    "length/mean": "tokens", "entropy": "nats a token", "kl/ref": "nats a token", "kl/prox": "nats a token",
    "mismatch/mean": "nats", "lag/mean": "steps", "lag/max": "steps", "seconds": "s", "seconds/generate": "s",
    "seconds/train": "s", "tokens_per_second": "tokens/s", "util/train": "0–1", "util/engine/0": "0–1",
}  # fmt: skip
AGAINST = {"step": "training steps", "seconds": "seconds since the start"}
ROUNDING = 1e-4  # nats, up to which mismatch/mean may be rounding alone
DOTS = 40  # points up to which each has one
GOOD = 0.9  # pass@1 from which the table says when it was reached


@dataclass(frozen=True)
class Curves:
    """What the files of one run say: the settings in config.json, the rows of metrics.jsonl."""

    folder: Path
    settings: dict[str, Any]
    rows: list[dict[str, Any]]

    def points(self, key: str, against: str = "step") -> list[tuple[float, float]]:
        """Where the key is there and finite: (step or seconds, its value), in the order of the file."""
        return [(row[against], row[key]) for row in self.rows if number(row.get(key)) and number(row.get(against))]


def number(value: object) -> bool:
    """A finite number, and no bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def read(folder: Path) -> Curves:
    """The files of a run, without the half line at the end of one that is going on or was killed. Raises Refused."""
    settings = json_object(contents(folder / "config.json"), str(folder / "config.json"))
    *lines, _ = contents(path := folder / "metrics.jsonl").split("\n")
    rows = [json_object(line, f"{path}, line {i}") for i, line in enumerate(lines, 1)]
    for i, row in enumerate(rows, 1):
        if not number(row.get("step")):
            raise Refused(f"{path}, line {i}: no step; it is not the file of a run, or of another version")
    if not rows:
        raise Refused(f"{path}: no step yet; wait for the first, or name another run")
    return Curves(folder, settings, added_up(rows))


def contents(path: Path) -> str:
    """The text of a run's file. Raises Refused."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not text"
        raise Refused(f"{path}: cannot be read ({why}); name the folder of a run") from None


def json_object(text: str, where: str) -> dict[str, Any]:
    """The object that this text is. Raises Refused, naming where it stands."""
    try:
        row = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Refused(f"{where}: not JSON ({error}); name the folder of a run") from None
    if not isinstance(row, dict):
        raise Refused(f"{where}: not a JSON object; name the folder of a run")
    return row


def added_up(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows with `seconds` that go on after a resume, where they begin again: those of the parts add up.

    >>> [row["seconds"] for row in added_up([{"seconds": 5.0}, {"seconds": 9.0}, {"seconds": 2.0}, {"seconds": 3.0}])]
    [5.0, 9.0, 11.0, 12.0]
    """
    before, last, moved = 0.0, 0.0, []
    for row in rows:
        if number(now := row.get("seconds")):
            before, last = before + (last if now < last else 0.0), now
            row = {**row, "seconds": before + now}
        moved.append(row)
    return moved


def smoothed(values: Sequence[float], window: int) -> list[float]:
    """For each value the mean of it and those before it, `window` in all, or as many as there are.

    >>> smoothed([1.0, 2.0, 3.0, 4.0], 2)
    [1.0, 1.5, 2.5, 3.5]
    """
    return [math.fsum(part) / len(part) for part in (values[max(0, i + 1 - window) : i + 1] for i in range(len(values)))]


def names(folders: Sequence[Path]) -> list[str]:
    """A name for each folder: its last part, or as many of the last as tell all of them apart.

    >>> names([Path("a/grpo"), Path("b/grpo")])
    ['a/grpo', 'b/grpo']
    """
    parts = [Path(os.path.abspath(folder)).parts for folder in folders]
    for n in range(1, max(map(len, parts)) + 1):
        short = [str(Path(*part[-n:])) for part in parts]
        if len(set(short)) == len(set(parts)):
            break
    return short


def flags(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Every setting in a config.json by its flag: the algorithm, the job, the axes, and the versions below it.

    >>> flags({"algorithm": "grpo", "config": {"steps": 5, "pace": {"max_lag": 0}}, "axes": {"critic": {"weight": 1.0}}})
    {'algorithm': 'grpo', '--steps': 5, '--max-lag': 0, '--critic.weight': 1.0}
    """
    found: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, dict):
            found |= flags(value, f"{prefix}{name}.")
        elif prefix.startswith(("config.", "axes.")):
            found[dashed(bare(f"{prefix}{name}".split(".", 1)[1]))] = value
        elif prefix == "versions." or name == "algorithm":
            found[name] = value
    return {name: value for name, value in found.items() if name not in ("--out", "--resume", "--dry-run")}


def differing(runs: Sequence[Curves]) -> list[list[str]]:
    """A row for each setting that is not the same in all runs: its flag, then its value in each; – where one has none."""
    every = [flags(run.settings) for run in runs]
    ordered = dict.fromkeys(name for own in every for name in own)
    told = [[name, *(str(own[name]) if name in own else "–" for own in every)] for name in ordered]
    return [row for row in told if len(set(row[1:])) > 1]


def reached(run: Curves) -> list[str]:
    """What a run reached: steps, time, last reward, best pass@1 and where, when pass@1 first was GOOD or more."""
    rewards, times, evaluated = run.points("reward"), dict(run.points("seconds")), run.points("eval/pass@1")

    def when(step: float) -> str:
        """The step, and how long it took to get there."""
        return f"step {step:g}" + (f", {span(times[step])}" if step in times else "")

    best = max(evaluated, key=lambda point: point[1], default=None)  # the first of equals
    first = next((step for step, value in evaluated if value >= GOOD), None)
    return [f"{run.rows[-1]['step']:g}", span(max(times.values())) if times else "–",
            f"{rewards[-1][1]:.3f}" if rewards else "–", f"{best[1]:.3f} ({when(best[0])})" if best else "–",
            "–" if first is None else when(first)]  # fmt: skip


def table(rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> str:
    """The rows as text, each column as wide as its widest cell, those numbered `left` flush left and the others right.

    >>> print(table([["run", "steps"], ["a", "200"]]))
    run  steps
    a      200
    """
    wide = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ((cell.ljust(w) if i in left else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, wide)))
             for row in rows)
    return "\n".join("  ".join(line).rstrip() for line in lines)


def report(runs: Sequence[Curves]) -> str:
    """Which settings differ, where there are several runs, and what each of them reached."""
    called = names([run.folder for run in runs])
    titles = ["run", "steps", "time", "last reward", "best pass@1", f"pass@1 ≥ {GOOD}"]
    text = table([titles, *([name, *reached(run)] for name, run in zip(called, runs))])
    if len(runs) == 1:
        return text
    rows = differing(runs)
    return (table([["settings that differ", *called], *rows]) if rows else "their settings are the same") + f"\n\n{text}"


def chosen(runs: Sequence[Curves], keys: Sequence[str] | None) -> list[str]:
    """The keys to draw: those asked for, else those of SHOWN that a run has. Raises Refused for one that none has.

    Where engine and trainer agree but for rounding, in all runs, that is not worth a panel unless it is asked for.
    """
    there = dict.fromkeys(key for run in runs for row in run.rows for key, value in row.items() if number(value))
    for key in keys or ():
        if key not in there:
            raise Refused(f"--keys {key}: no run has it; there are {' '.join(sorted(there))}")
    agree = all(value <= ROUNDING for run in runs for _, value in run.points("mismatch/mean"))
    return list(dict.fromkeys(keys or [key for key in SHOWN if key in there and not (agree and key == "mismatch/mean")]))


def style(i: int) -> dict[str, str]:
    """Colour and dashes of the line of run i, unlike those of the 39 before it."""
    return {"color": f"C{i % 10}", "linestyle": ("-", "--", ":", "-.")[i // 10 % 4]}


def draw(panel: Axes, points: Sequence[tuple[float, float]], i: int, smooth: int) -> None:
    """The line of run i through these points, a dot at each of a few. Below a smoothed line lies a faint one of all."""
    if not points:
        return
    x, y = zip(*points)
    if smooth > 1:
        panel.plot(x, y, **style(i), linewidth=1, alpha=0.25)
    dots = {"marker": "o", "markersize": 3.5} if len(points) <= DOTS else {}  # one point alone makes no line
    panel.plot(x, smoothed(y, smooth), **style(i), linewidth=1.8, **dots)


def picture(runs: Sequence[Curves], keys: Sequence[str], smooth: int = 1, against: str = "step") -> Figure:
    """A panel for each key, a line for each run. Neither evaluations, which are means of many, nor times are smoothed."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    columns = min(3, len(keys))  # as many as can be read at the width of a README
    rows = math.ceil(len(keys) / columns)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(max(6.0, 3.9 * columns), 0.5 + 2.8 * rows), layout="constrained")
        panels = list(figure.subplots(rows, columns, squeeze=False).flat)
        for panel, key in zip(panels, keys):
            panel.set_title(f"{key}, {UNITS[key]}" if key in UNITS else key, fontsize=12)
            panel.set_xlabel(AGAINST[against])
            for i, run in enumerate(runs):
                draw(panel, run.points(key, against), i, 1 if key.startswith(("eval/", "seconds")) else smooth)
            if UNITS.get(key) == "0–1":
                panel.set_ylim(-0.02, 1.04)
        for empty in panels[len(keys) :]:
            empty.axis("off")
        lines = [Line2D([], [], **style(i), label=name) for i, name in enumerate(names([run.folder for run in runs]))]
        figure.legend(handles=lines, loc="outside lower center", ncols=columns, frameon=False)
    return figure


def show(folders: Sequence[Path], out: str | None = None, keys: Sequence[str] | None = None, smooth: int = 1,
         against: str = "step") -> None:  # fmt: skip
    """Print the report on these runs and draw their curves: into --out, else the one run's folder, else this one."""
    runs = [read(folder) for folder in {os.path.abspath(folder): folder for folder in folders}.values()]
    keys = chosen(runs, keys)
    file = out or str(runs[0].folder / "curves.png" if len(runs) == 1 else "curves.png")
    drawable(file, "--out")
    print(report(runs), flush=True)
    save(lambda: picture(runs, keys, smooth, against), file, "--out")
    print(f"\n{file}: {', '.join(keys)} against {AGAINST[against]}" + (f", means of {smooth}" if smooth > 1 else ""))
