"""What do stale samples do to the result, and what does the decoupled objective mend? The table of notes/staleness.md.

    python notes/benchmarks/staleness.py FOLDER [--jobs 2] [--steps 60] [--lr 2e-4] [--updates 4] [--seeds 0 1 2]

From one checkpoint (the warm start of seed 0): lag η = 0, 1, 2, 4, 8, 16, ∞ by --delay, each by the naive objective
(the ratio of the clipped surrogate is to μ, the policy that sampled) and the decoupled one, and η = 1 and 4 again
with the worker engine, where η is a bound. A run is a folder in FOLDER; runs that are done are not done again, so the
command can be stopped and given again. At the end, or with --jobs 0 at once, the table, and FOLDER/staleness.png.
"""

import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import bench

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
from nanorl import tiny
from nanorl.monitor import text_progress
from nanorl.timeline import STYLE

OBJECTIVES = {"naive": ["grpo", "--prox", "behave"], "decoupled": ["decoupled_ppo"]}
LAGS = ("0", "1", "2", "4", "8", "16", "inf")

parser = bench.arguments(__doc__)
parser.add_argument("folder", type=Path)
parser.add_argument("--jobs", type=int, default=2)
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--lr", default="2e-4")
parser.add_argument("--updates", default="4")
parser.add_argument("--seeds", nargs="+", default=["0", "1", "2"])
args = parser.parse_args()


def runs() -> dict[tuple[str, str, str, str], list[str]]:
    """(engine, objective, lag, seed) → flags. With lag 0 the two objectives are one."""
    found = {}
    for seed, lag, name in itertools.product(args.seeds, LAGS, OBJECTIVES):
        if lag != "0" or name == "naive":
            found["delay", name, lag, seed] = [*OBJECTIVES[name], "--delay", lag]
        if lag in ("1", "4"):
            found["worker", name, lag, seed] = [*OBJECTIVES[name], "--engine", "worker", "--max-lag", lag]
    return found


def folder_of(run: tuple[str, ...]) -> Path:
    """Where a run lies."""
    return args.folder / "-".join(run)


def train(run: tuple[str, ...], flags: list[str], model: Path) -> None:
    """One run in a process of its own, on one core. Raises CalledProcessError."""
    folder = folder_of(run)
    subprocess.run(["rm", "-rf", str(folder)], check=True)  # of a run that was stopped
    words = [sys.executable, str(ROOT / "train_grpo.py"), *flags, "--model", str(model), "--seed", run[-1], "--lr", args.lr,
             "--updates-per-batch", args.updates, "--steps", str(args.steps), "--eval-every", str(args.steps // 3),
             "--save-every", "0", "--out", str(folder)]  # fmt: skip
    with open(args.folder / f"{folder.name}.log", "w") as log:
        subprocess.run(words, check=True, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"})


def result(run: tuple[str, ...]) -> float:
    """pass@1 on the held-out problems at the end, NaN for a run that is not done."""
    summary = folder_of(run) / "summary.json"
    return json.loads(summary.read_text())["after"]["eval/pass@1"] if summary.is_file() else float("nan")


def table() -> list[bench.Row]:
    """A row a lag: mean ± standard deviation over seeds."""
    rows = []
    for lag in LAGS:
        row = {"η": lag.replace("inf", "∞")}
        for engine, name in itertools.product(("delay", "worker"), OBJECTIVES):
            values = [result((engine, name, lag, seed)) for seed in args.seeds if (engine, name, lag, seed) in runs()]
            spread = statistics.stdev(values) if len(values) > 1 else 0.0
            title = name if engine == "delay" else f"worker, {name}"
            row[title] = f"{statistics.mean(values):.3f} ± {spread:.3f}" if values else "–"
        rows.append(row)
    return rows


def picture(path: Path) -> None:
    """pass@1 at the end against the lag, a point a seed, a line through the means."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(7, 4), layout="constrained")
        axis = figure.subplots()
        for number, name in enumerate(OBJECTIVES):
            at = {i: [result(("delay", "naive" if lag == "0" else name, lag, seed)) for seed in args.seeds]
                  for i, lag in enumerate(LAGS)}  # fmt: skip
            axis.plot(list(at), [statistics.mean(values) for values in at.values()], color=f"C{number}", label=name)
            for i, values in at.items():
                axis.plot([i] * len(values), values, "o", color=f"C{number}", markersize=4, alpha=0.6)
        axis.set(xticks=range(len(LAGS)), xticklabels=[lag.replace("inf", "∞") for lag in LAGS],
                 xlabel="lag of every sample, training steps", ylabel=f"held-out pass@1 after {args.steps} steps")
        axis.legend(frameon=False)
        figure.savefig(path, dpi=110)


if __name__ == "__main__":
    args.folder.mkdir(parents=True, exist_ok=True)
    left = {run: flags for run, flags in runs().items() if not (folder_of(run) / "summary.json").is_file()}
    if args.jobs and left:
        model, started = tiny.warm_started(tiny.WarmStart(digits=3, seed=0)), time.monotonic()
        with ThreadPoolExecutor(args.jobs) as pool:
            jobs = [pool.submit(train, run, flags, model) for run, flags in left.items()]
            for done, job in enumerate(jobs, 1):
                job.result()
                text_progress("runs", done, len(jobs), started)
    bench.report("staleness", table(), args.record)
    picture(args.folder / "staleness.png")
    print(args.folder / "staleness.png")
