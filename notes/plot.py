"""Draw the curves of runs: python notes/plot.py OUT.png RUN [RUN…]

A panel a number (--panels, by the names of metrics.md), a line a run, against wall-clock seconds since the program's
start or, with --steps, training steps. A run is named by its algorithm and by what its axes have of their own.
"""

import argparse
import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

sys.path.insert(0, str(Path(__file__).parents[1]))
from nanorl.algorithms import ALGORITHMS
from nanorl.axes import differences, rebuilt
from nanorl.pace import Pace
from nanorl.timeline import STYLE

TITLES = {
    "eval/pass@1": "held-out pass@1",
    "worked": "share of answers with working",
    "length/mean": "mean length, tokens",
    "value/explained": "explained variance of the critic",
    "lag/mean": "mean lag of a sample, steps",
    "correction/mean": "mean correction π_prox/μ",
    "correction/max": "largest correction π_prox/μ",
    "mismatch/mean": "mean |log π_prox/μ|, nats",
    "util/train": "utilisation of the trainer",
    "util/engine/0": "utilisation of the engine",
    "kl/ref": "KL to the reference, nats a token",
    "ratio/max": "largest ratio of a step",
    "clip": "share of tokens clipped",
    "trpo/kl": "KL of the step, nats a token",
    "reward": "reward",
}

parser = argparse.ArgumentParser()
parser.add_argument("out", type=Path)
parser.add_argument("runs", type=Path, nargs="+")
parser.add_argument("--steps", action="store_true")
parser.add_argument("--panels", nargs="+", default=["eval/pass@1", "worked", "length/mean"])
args = parser.parse_args()

if __name__ == "__main__":
    plt.rcParams.update(STYLE)
    figure, axes = plt.subplots(1, len(args.panels), figsize=(4.6 * len(args.panels), 3.6), constrained_layout=True)
    for number, run in enumerate(args.runs):
        settings = json.loads((run / "config.json").read_text())
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        own = differences(rebuilt(settings["axes"]), ALGORITHMS[settings["algorithm"]].axes)
        label = ", ".join([settings["algorithm"], *(f"{axis} {value}" for axis, value in own)])
        pace = differences(Pace(**settings["config"].get("pace", {})), Pace())
        label += "".join(f", {flag.replace('_', ' ')} {value}" for flag, value in pace)
        label += f", seed {settings['config']['seed']}" if settings["config"]["seed"] else ""
        for axis, key in zip(axes, args.panels):
            points = [(row["step" if args.steps else "seconds"], row[key]) for row in rows if key in row]
            if not points:  # this run has no such number
                continue
            axis.plot(
                *zip(*points), label=label, color=f"C{number}", linewidth=1.8, marker="o" if key.startswith("eval") else None, markersize=3
            )
    for axis, key in zip(axes, args.panels):
        axis.set_title(TITLES.get(key, key), fontsize=12)
        axis.set_xlabel("training steps" if args.steps else "seconds since the start of the program")
        if key in ("eval/pass@1", "worked", "reward"):
            axis.set_ylim(0, 1.02)
        elif key == "ratio/max":
            axis.set_yscale("log")
    axes[0].legend(frameon=False, loc="lower right", fontsize=10)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.out, dpi=110)
