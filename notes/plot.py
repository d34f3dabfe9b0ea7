"""Draw the curves of runs: python notes/plot.py OUT.png RUN [RUN…]   (needs matplotlib)

A panel a number, a line a run, against wall-clock seconds since the program's start or, with --steps, training steps.
"""

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

PANELS = {
    "eval/pass@1": "held-out pass@1",
    "worked": "share of answers with working",
    "length/mean": "mean length, tokens",
}

parser = argparse.ArgumentParser()
parser.add_argument("out", type=Path)
parser.add_argument("runs", type=Path, nargs="+")
parser.add_argument("--steps", action="store_true")
args = parser.parse_args()

if __name__ == "__main__":
    plt.rcParams.update(
        {"font.size": 12, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.3}
    )
    figure, axes = plt.subplots(1, len(PANELS), figsize=(4.6 * len(PANELS), 3.6), constrained_layout=True)
    for run in args.runs:
        settings = json.loads((run / "config.json").read_text())
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        label = f"{settings['algorithm']}, seed {settings['config']['seed']}"
        for axis, key in zip(axes, PANELS):
            points = [(row["step" if args.steps else "seconds"], row[key]) for row in rows if key in row]
            axis.plot(
                *zip(*points), label=label, linewidth=1.8, marker="o" if key.startswith("eval") else None, markersize=3
            )
    for axis, (key, title) in zip(axes, PANELS.items()):
        axis.set_title(title, fontsize=12)
        axis.set_xlabel("training steps" if args.steps else "seconds since the start of the program")
        if not key.startswith("length"):
            axis.set_ylim(0, 1.02)
    axes[0].legend(frameon=False, loc="lower right", fontsize=10)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.out, dpi=110)
