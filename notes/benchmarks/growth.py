"""How does cost grow? Step time against batch, length, width and vocabulary; memory against length; start-up by part.

    python notes/benchmarks/growth.py

One size is changed at a time; the others stay at the default job's: 256 rows of 8 + 24 tokens, width 128, 4 layers, a
vocabulary of 17 (64 rows where the size that grows makes them dear). A step samples every row to its full length with
the local engine and then trains on all rows, so that nothing depends on what a model answers. The exponent is the slope
of log time over log size between a size and the one before: 1 is proportional, and below 1 something that does not grow
still counts. Memory is the peak of a process of its own above what it takes after a small step (Linux only), of 8 rows
in one pass and in micro-batches of the default's 4,096 tokens. Under five minutes; it draws notes/figures/growth.png.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import bench

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ROOT = Path(__file__).parents[2]
PICTURE = ROOT / "notes" / "figures" / "growth.png"
PARTS = ("flags read", "torch", "transformers", "nanorl", "model, folder, engine", "first step", "second step")


@dataclass(frozen=True)
class Size:
    """The sizes of a step."""

    rows: int = 256
    sampled: int = 24
    width: int = 128
    vocabulary: int = 17


SWEEPS = {"rows": (32, 64, 128, 256, 512), "sampled": (24, 48, 96, 192, 384), "width": (64, 128, 256, 512),
          "vocabulary": (1_000, 4_000, 16_000, 64_000)}  # fmt: skip
SAYS = {"rows": "rows of a step", "sampled": "sampled tokens of a row", "width": "width of the model",
        "vocabulary": "tokens in the vocabulary"}  # fmt: skip
SMALLER = {"sampled": Size(rows=64), "vocabulary": Size(rows=64), "width": Size(rows=64)}  # so that all fits in minutes
LONG = (256, 512, 1024, 2048)  # tokens of a row, for memory
PASSES = {"8 rows in a pass, MB": 1 << 30, "4,096 tokens in a pass, MB": 4096}
PROMPT = 8


def exponent(sizes: Sequence[float], costs: Sequence[float]) -> float:
    """The slope of log cost over log size between the last two.

    >>> exponent([1, 2, 4], [5, 6, 24])
    2.0
    """
    return math.log(costs[-1] / costs[-2]) / math.log(sizes[-1] / sizes[-2])


def step_times(size: Size, repeats: int) -> tuple[list[float], list[float]]:
    """Seconds of sampling and of training of several steps."""
    from nanorl.policy import Policy
    from synthetic import Shape, Trainer, answers, job, sample, seconds

    policy = Policy(Shape(size.vocabulary, size.width, 3 * size.width, 4, 4, 4).model())
    groups, trainer = answers(size.rows, PROMPT + size.sampled, PROMPT, size.vocabulary), Trainer(policy, job())
    sampling = seconds(lambda: sample(policy, groups, size.sampled), repeats)
    return sampling, seconds(lambda: trainer.step(groups), repeats)


def swept(name: str, repeats: int) -> list[bench.Row]:
    """A row for each value of one size."""
    rows, base = [], SMALLER.get(name, Size())
    for value in SWEEPS[name]:
        sampling, training = step_times(replace(base, **{name: value}), repeats)
        rows.append({"what": SAYS[name], "size": value, "sampling, s": sampling, "training, s": training})
        for part in ("sampling", "training"):
            if len(rows) > 1:
                costs = [median(row[f"{part}, s"]) for row in rows]
                rows[-1][f"exponent of {part}"] = exponent([row["size"] for row in rows], costs)
        print(bench.table(rows[-1:]), flush=True)
    return rows


def memory_child(length: int, tokens: int) -> None:
    """Print the MB that a step on 8 rows of this length, so many tokens a pass, takes above a small one."""
    from logprob_memory import resident
    from nanorl.policy import Policy
    from synthetic import Shape, Trainer, answers, job

    trainer = Trainer(Policy(Shape(17, 128, 384, 4, 4, 4).model()), job(tokens=tokens))
    trainer.step(answers(8, 16, PROMPT, 17))
    start = resident()["VmHWM"]
    trainer.step(answers(8, length, PROMPT, 17))
    print(json.dumps(resident()["VmHWM"] - start))


def startup_child(folder: str) -> None:
    """In this process: the default job's start by parts, as train_grpo.py goes through them, and two steps."""
    times, start = {}, time.perf_counter()

    def lap(part: str) -> None:
        """The part that ends now."""
        nonlocal start
        times[part], start = time.perf_counter() - start, time.perf_counter()

    sys.path.insert(0, str(ROOT))
    import train_grpo
    from nanorl.cli import parse

    flags = ["--steps", "2", "--eval-every", "0", "--save-every", "0", "--out", folder]
    name, cfg, axes = parse(flags, "grpo")
    lap("flags read")
    import torch  # noqa: F401

    lap("torch")
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: F401

    lap("transformers")
    from nanorl import run as running

    lap("nanorl")
    with running.started("train_grpo.py", name, cfg, axes) as run:
        lap("model, folder, engine")
        record, run.record = run.record, lambda *step: (record(*step), lap(("first step", "second step")[run.step - 1]))
        train_grpo.train(run)
    print(json.dumps(times))


def child(words: Sequence[str]) -> object:
    """What a process of this file prints last, read."""
    done = subprocess.run([sys.executable, __file__, "--child", *words], check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def startups(repeats: int) -> list[bench.Row]:
    """A row a part of the start; the warm start is made before, if it is not cached."""
    from nanorl import tiny

    tiny.warm_started(tiny.WarmStart())
    with tempfile.TemporaryDirectory() as folder:
        times = [child(["startup", str(Path(folder) / str(i))]) for i in range(repeats)]
    return [{"part": part, "s": [of[part] for of in times]} for part in PARTS]


def draw(sweeps: dict[str, list[bench.Row]], memory: list[bench.Row], starts: list[bench.Row]) -> Figure:
    """Six panels: a sweep each, memory, start-up."""
    import matplotlib
    from matplotlib.figure import Figure

    from nanorl.timeline import STYLE

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(12, 7.4), layout="constrained")
        panels = iter(figure.subplots(2, 3).flat)
        for name, rows in sweeps.items():
            lines = {part: [median(row[f"{part}, s"]) for row in rows] for part in ("sampling", "training")}
            curves(next(panels), [row["size"] for row in rows], lines, SAYS[name], "a step, seconds")
        peaks = {how.removesuffix(", MB"): [row[how] for row in memory] for how in PASSES}
        lengths = [row["tokens of a row"] for row in memory]
        curves(next(panels), lengths, peaks, "tokens of a row", "peak memory of a step, MB", 3)
        panel = next(panels)
        panel.barh(range(len(starts)), [median(row["s"]) for row in starts], color="C2", alpha=0.6)
        for row, at in zip(starts, range(len(starts))):
            panel.text(0.02, at, row["part"], va="center", fontsize=11, transform=panel.get_yaxis_transform())
        panel.set(xlabel="start of the default job, seconds", yticks=[])
        panel.invert_yaxis()
    return figure


def curves(panel: Axes, sizes: Sequence[int], lines: dict[str, list[float]], across: str, up: str,
           colour: int = 0) -> None:  # fmt: skip
    """Costs over sizes, both axes logarithmic, ticks at the sizes themselves, slopes in a legend above the lines."""
    for number, (name, costs) in enumerate(lines.items()):
        label = f"{name}: slope {exponent(sizes, costs) + 0.0:.1f}".replace("-0.0", "0.0")
        panel.plot(sizes, costs, "o-", color=f"C{colour + number}", label=label)
    panel.set(xscale="log", yscale="log", xlabel=across, ylabel=up)
    panel.minorticks_off()
    panel.set_xticks(sizes, [f"{size // 1000}k" if size % 1000 == 0 else f"{size}" for size in sizes])
    low, high = panel.get_ylim()
    panel.set_ylim(low, high * (high / low) ** 0.35)
    ticks = [m * 10.0**e for e in range(-4, 6) for m in (1, 2, 5) if low <= m * 10.0**e <= high]
    panel.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    panel.legend(frameon=False, loc="upper left", fontsize=11)


def main() -> None:
    """Everything, in order."""
    parser = bench.arguments(__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--picture", default=str(PICTURE))
    args = parser.parse_args()
    if sys.platform != "linux":
        parser.error("it reads peak memory from /proc, so it needs Linux")
    sys.path.insert(0, str(ROOT))
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # as launch.py does
    from nanorl.timeline import save

    starts = startups(args.repeats)
    print(bench.table(starts), flush=True)
    memory = [{"tokens of a row": length, **{how: child(["memory", str(length), str(tokens)])
                                             for how, tokens in PASSES.items()}} for length in LONG]  # fmt: skip
    print(bench.table(memory), flush=True)
    sweeps = {name: swept(name, args.repeats) for name in SWEEPS}
    bench.report("growth, start-up", starts, args.record)
    bench.report("growth, memory", memory, args.record)
    bench.report("growth, step time", [row for rows in sweeps.values() for row in rows], args.record)
    save(lambda: draw(sweeps, memory, starts), args.picture, "--picture")


if __name__ == "__main__":
    if sys.argv[1:3] == ["--child", "memory"]:
        memory_child(*map(int, sys.argv[3:]))
    elif sys.argv[1:3] == ["--child", "startup"]:
        startup_child(sys.argv[3])
    else:
        main()
