"""How much faster is asynchronous? Real runs on two cores, and what the simulator says of them: notes/asynchrony.md.

    python notes/benchmarks/async_speed.py FOLDER [--steps 60] [--repeats 3]

Three jobs: one whose phases take about as long as each other (the default's model after 20 steps, when rows without
advantage save half of the training), one where training is slower (the warm start, every row trained on), and one of
very unequal lengths (a model with fresh weights ends an answer at any token with the same small chance). Each in three
ways: in turn on one core, in turn on both cores, and at once, the engine on one core and the trainer on the other. The
learning rate is so small that the job stays what it is. The three ways follow each other `repeats` times, and medians
are told. Then the default job until pass@1 passes 0.95, in turn on both cores and at once. Runs that are done are not
done again, so the command can be stopped and given again. Nothing else should run meanwhile.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median

import bench

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
from nanorl import tiny
from nanorl.forecast import measure

STILL, WHOLE = ["--lr", "1e-9", "--eval-every", "0", "--save-every", "0"], ["--entropy-weight", "1e-9"]  # all rows trained
WAYS = {"in turn, one core": (1, ["--engine", "local"]), "in turn, both cores": (2, ["--engine", "local"]),
        "at once": (2, ["--engine", "worker", "--max-lag", "4"])}  # fmt: skip

parser = bench.arguments(__doc__)
parser.add_argument("folder", type=Path)
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--repeats", type=int, default=3)
args = parser.parse_args()


def train(name: str, threads: int, flags: list[str]) -> Path:
    """A run, unless it is there; its folder."""
    folder = args.folder / name.replace(",", "").replace(" ", "-")
    if not (folder / "summary.json").is_file():
        subprocess.run(["rm", "-rf", str(folder)], check=True)
        words = [sys.executable, str(ROOT / "train_grpo.py"), "--out", str(folder), *flags]
        with open(f"{folder}.log", "w") as log:
            subprocess.run(words, check=True, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": str(threads)})
    return folder


def phases(folder: Path) -> tuple[float, float]:
    """Seconds of sampling and of training of a step, in the second half of a run that does them in turn."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    rows = rows[len(rows) // 2 :]
    mean = {key: sum(row[f"seconds/{key}"] for row in rows) / len(rows) for key in ("generate", "measure", "train")}
    return mean["generate"], mean["measure"] + mean["train"]


def compare(job: str, flags: list[str]) -> list[bench.Row]:
    """The three ways of one job, each with its speeds over the repeats, and the gain of asynchrony pair by pair."""
    found = {way: [] for way in WAYS}
    for number in range(1, args.repeats + 1):
        for way, (threads, engine) in WAYS.items():
            words = [*flags, *STILL, "--steps", str(args.steps), *engine]
            found[way].append(train(f"{job} {way} {number}", threads, words))
    g, t = (median(times) for times in zip(*map(phases, found["in turn, one core"])))
    speeds = {way: [measure(folder).steps_per_second for folder in folders] for way, folders in found.items()}
    gains = [b / a for a, b in zip(speeds["in turn, one core"], speeds["at once"])]
    ideal = (g + t) / max(g, t)
    print(f"{job}: sampling {g:.3f} s, training {t:.3f} s on one core each")
    rows = [{"job": job, "way": way, "steps/s": each} for way, each in speeds.items()]
    rows[-1] |= {"over in turn on one core": gains, "at most": ideal}
    print(bench.table(rows), flush=True)
    runs = [str(folder) for folders in found.values() for folder in folders]
    subprocess.run([sys.executable, "-m", "nanorl.simulate", "--run", *runs], check=True, cwd=ROOT)
    return rows


def seconds_to(goal: float, folder: Path) -> float:
    """Seconds from the first step's start until held-out pass@1 is at least this."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    reached = [row["seconds"] for row in rows if row.get("eval/pass@1", 0) >= goal]
    return reached[0] - rows[0]["seconds"] if reached else float("nan")


if __name__ == "__main__":
    args.folder = args.folder.absolute()
    args.folder.mkdir(parents=True, exist_ok=True)
    fresh = args.folder / "fresh"
    for part in (tiny.model(seed=0), tiny.tokenizer()):
        part.save_pretrained(fresh)
    later = train("start", 2, ["--steps", "20"]) / "checkpoints" / "step-20"
    rows = [*compare("equal phases", ["--model", str(later)]), *compare("nearly equal lengths", WHOLE),
            *compare("very unequal lengths", [*WHOLE, "--model", str(fresh), "--max-new-tokens", "200"])]  # fmt: skip
    bench.report("async_speed", rows, args.record)
    rows = []
    for way, flags in (("in turn, both cores", []), ("at once", ["--engine", "worker", "--max-lag", "2"])):
        folder = train(f"default {way}", 2, flags)
        rows.append({"default job": way, "s to 0.95 held-out pass@1": seconds_to(0.95, folder)})
    bench.report("async_speed, to 0.95", rows, args.record)
