"""Is nanorl faster than TRL, which people would pick instead? The same job in both, in turn.

    python notes/benchmarks/peer.py --trl trl/bin/python --out FOLDER              completions a second, 20 steps, 5 pairs
    python notes/benchmarks/peer.py --trl trl/bin/python --out FOLDER --to 0.93    seconds until that training reward

The environment of TRL is its own: see peer_trl.py. Both start from the default's warm start, ask the same prompts in the
same order, sample 32 × 8 answers a step, judge them by the same function, and make one optimizer step (AdamW with the
same constants, the same loss: clipped, mean over tokens, no KL). Both have --threads threads. Seconds count from the
first step's start, so imports and warm start are in neither. For the first table the runs alternate, nanorl, TRL,
nanorl, …; for the second each runs at every rate of --rates until the mean reward of the last 20 steps is at the goal,
and the best rate of each is compared. Every run keeps its curve in FOLDER; runs that are done are not done again, so the
command can be stopped and given again. Nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import bench

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
from nanorl import tasks, timeline, tiny
from nanorl.config import Config, resolved

CFG, WINDOW = resolved(Config()), 20
PEERS = ("nanorl", "TRL")
Curve = list[tuple[float, float]]  # (seconds since the first step began, mean reward of the batch), one a step


def reached(curve: Curve, goal: float, window: int = WINDOW) -> float | None:
    """Seconds until the mean reward of the last `window` steps is at the goal, None if it never is.

    >>> reached([(1.0, 0.0), (2.0, 1.0), (3.0, 1.0), (4.0, 1.0)], 1.0, window=2)
    3.0
    >>> reached([(1.0, 1.0)], 1.0, window=2) is None
    True
    """
    for last in range(window, len(curve) + 1):
        if sum(reward for _, reward in curve[last - window : last]) / window >= goal:
            return curve[last - 1][0]
    return None


@dataclass(frozen=True)
class Job:
    """One run of one of the two: so many steps at a rate, or until a goal is reached."""

    peer: str
    name: str
    steps: int
    lr: float
    goal: float | None = None

    def curve(self, args: argparse.Namespace) -> Curve:
        """What the run's files say so far."""
        folder = args.out / self.name
        file = folder / "metrics.jsonl" if self.peer == "nanorl" else args.out / f"{self.name}.jsonl"
        if not file.is_file():
            return []
        lines = file.read_text().split("\n")[:-1]  # the last one may be half written
        rows = [row for row in map(json.loads, lines) if "reward" in row and row["step"] > 0]
        if not rows or self.peer == "TRL":
            return [(row["seconds"], row["reward"]) for row in rows]
        began = min(span.start for span in timeline.read(folder / "trace.json") if span.lane == "trainer")
        return [(row["seconds"] - began, row["reward"]) for row in rows]

    def words(self, args: argparse.Namespace, model: Path, prompts: Path) -> list[str]:
        """The command."""
        if self.peer == "nanorl":
            return [sys.executable, str(ROOT / "train_grpo.py"), "--model", str(model), "--steps", str(self.steps),
                    "--lr", str(self.lr), "--eval-every", "0", "--save-every", "0", "--out",
                    str(args.out / self.name)]  # fmt: skip
        goal = [] if self.goal is None else ["--until", str(self.goal), "--window", str(WINDOW)]
        return [args.trl, str(Path(__file__).parent / "peer_trl.py"), "--model", str(model), "--prompts", str(prompts),
                "--steps", str(self.steps), "--lr", str(self.lr), "--group", str(CFG.samples_per_prompt), "--batch",
                str(CFG.samples_per_step), "--max-new-tokens", str(CFG.max_new_tokens), "--out",
                str(args.out / f"{self.name}.jsonl"), *goal]  # fmt: skip

    def run(self, args: argparse.Namespace, model: Path, prompts: Path) -> Curve:
        """The curve of the whole run, made now unless it is there. Raises SystemExit, naming the log, where it fails."""
        done, log = args.out / f"{self.name}.done", args.out / f"{self.name}.log"
        if not done.is_file():
            shutil.rmtree(args.out / self.name, ignore_errors=True)  # of a run that was stopped
            env = {**os.environ, "OMP_NUM_THREADS": str(args.threads), "GOMP_SPINCOUNT": "1000"}  # as launch.py sets it
            with log.open("w") as file, subprocess.Popen(self.words(args, model, prompts), stdout=file, stderr=file,
                                                         env=env) as process:  # fmt: skip
                while process.poll() is None:
                    time.sleep(1)
                    if self.peer == "nanorl" and self.goal and reached(self.curve(args), self.goal) is not None:
                        process.send_signal(signal.SIGINT)  # as by Ctrl-C: it saves and ends
                        break
            if process.returncode not in ((0, 130) if self.goal else (0,)):
                sys.exit(f"{self.peer} ended with {process.returncode}; the end of {log}:\n{log.read_text()[-800:]}")
            done.touch()
        curve = self.curve(args)
        seconds, reward = curve[-1]
        print(f"{self.name}: {len(curve)} steps, {seconds / len(curve):.3f} s each, reward {reward:.3f}", flush=True)
        return curve


def prompts_of(steps: int, file: Path) -> Path:
    """The prompts of so many steps, in the order in which nanorl asks them."""
    task = tasks.load(CFG)
    problems = map(task.train, range(steps * CFG.prompts_per_step))
    file.write_text("".join(json.dumps({"prompt": p.prompt, "answer": p.answer}) + "\n" for p in problems))
    return file


def speeds(args: argparse.Namespace, model: Path, prompts: Path) -> list[bench.Row]:
    """Completions a second of both, in turn, and their ratio pair by pair."""
    rates: dict[str, list[float]] = {peer: [] for peer in PEERS}
    for pair in range(1, args.pairs + 1):
        for peer in PEERS:
            job = Job(peer, f"{peer}-speed-{args.steps}-{pair}", args.steps, args.rates[len(args.rates) // 2])
            curve = job.run(args, model, prompts)
            rates[peer].append(CFG.samples_per_step * args.steps / curve[args.steps - 1][0])
    ratios = [a / b for a, b in zip(*rates.values())]
    rows = [{"": peer, "completions/s": rates[peer], "s a step": [CFG.samples_per_step / rate for rate in rates[peer]]}
            for peer in PEERS]  # fmt: skip
    return [*rows, {"": f"nanorl over TRL, {args.pairs} pairs", "completions/s": ratios}]


def goals(args: argparse.Namespace, model: Path, prompts: Path) -> list[bench.Row]:
    """Seconds to the goal, a row a rate and peer, and the ratio of the best."""
    rows, best = [], {}
    for lr in args.rates:
        for peer in PEERS:
            curve = Job(peer, f"{peer}-to-{args.to}-lr-{lr}", args.most_steps, lr, args.to).run(args, model, prompts)
            seconds = reached(curve, args.to)
            rows.append({"": peer, "lr": f"{lr:g}", f"s to {args.to}": seconds, "steps": len(curve),
                         "s a step": curve[-1][0] / len(curve), "last mean reward":
                         sum(reward for _, reward in curve[-WINDOW:]) / len(curve[-WINDOW:])})  # fmt: skip
            best[peer] = min(best.get(peer, float("inf")), float("inf") if seconds is None else seconds)
    if best["nanorl"] < float("inf"):
        rows.append({"": "TRL over nanorl, each at its best rate", f"s to {args.to}": best["TRL"] / best["nanorl"]})
    return rows


def main() -> None:
    """The first table, or with --to the second."""
    parser = bench.arguments(__doc__)
    parser.add_argument("--trl", required=True, help="the python of TRL's environment")
    parser.add_argument("--out", type=Path, required=True, help="where runs and curves are kept")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20, help="of a run of the first table")
    parser.add_argument("--to", type=float, help="the mean training reward of 20 steps to reach")
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-4, 2e-4, 4e-4], help="learning rates; the first "
                        "table takes the middle one")  # fmt: skip
    parser.add_argument("--most-steps", type=int, default=400, help="of a run of the second table")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    if shutil.which(args.trl) is None:
        parser.error(f"--trl {args.trl}: no such program; peer_trl.py says how to make TRL's environment")
    args.out = args.out.absolute()
    args.out.mkdir(parents=True, exist_ok=True)
    model = tiny.warm_started(tiny.WarmStart(CFG.digits, CFG.seed))
    prompts = prompts_of(max(args.steps, args.most_steps), args.out / "prompts.jsonl")
    of = subprocess.run([args.trl, "-c", "from importlib.metadata import version; print(version('trl'))"],
                        check=True, capture_output=True, text=True).stdout.strip()  # fmt: skip
    rows = (goals if args.to else speeds)(args, model, prompts)
    name = "peer, time to reward" if args.to else "peer, speed"
    bench.report(name, [{**row, "TRL": of} for row in rows], args.record)


if __name__ == "__main__":
    main()
