"""Where does a step's time go, and what would the arithmetic alone take? python notes/benchmarks/step_parts.py FOLDER

The default job, a few steps in each way: GRPO, PPO, asynchronous with the worker engine, and with --server URL a real
vLLM server (`python -m nanorl.serve` starts one). Medians over the steps after the first, seconds a step: waiting for
samples (in the synchronous ways that is sampling), log-probs, training, publishing, and the rest (collating, credit,
numbers, files). The arithmetic: 2 operations a weight for each token that was sampled or read, 6 for each token of a
row that was trained on, over the rate of a matrix product measured just before. Runs that are done are not done again.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import bench

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
from nanorl import tiny

PROMPT = 8  # tokens of a prompt of two three-digit numbers
STAGES = {"waiting for samples, s": "generate", "log-probs, s": "measure", "training, s": "train",
          "publishing, s": "publish"}  # fmt: skip


def ways(server: str | None) -> dict[str, list[str]]:
    """Name → script and flags."""
    found = {"GRPO": ["train_grpo.py"], "PPO": ["train_ppo.py"],
             "asynchronous, worker": ["train_grpo.py", "--engine", "worker", "--max-lag", "4"]}  # fmt: skip
    if server:
        found["asynchronous, vLLM"] = ["train_grpo.py", "--engine", "vllm", "--servers", server, "--max-lag", "4"]
    return found


def train(folder: Path, words: Sequence[str], args) -> list[dict]:
    """The rows of metrics.jsonl of a run, made now unless it is there."""
    if not (folder / "summary.json").is_file():
        subprocess.run(["rm", "-rf", str(folder)], check=True)  # of a run that was stopped
        command = [sys.executable, str(ROOT / words[0]), *words[1:], "--steps", str(args.steps), "--eval-every", "0",
                   "--save-every", "0", "--out", str(folder)]  # fmt: skip
        with open(f"{folder}.log", "w") as log:
            env = {**os.environ, "OMP_NUM_THREADS": str(args.threads)}
            subprocess.run(command, check=True, stdout=log, stderr=log, env=env)
    return [json.loads(line) for line in (folder / "metrics.jsonl").open()]


def parts(rows: Sequence[Mapping], weights: int, rate: float) -> bench.Row:
    """Seconds a step, by stage, and what the arithmetic would take at this rate, each as the list over steps."""
    whole = [after["seconds"] - before["seconds"] for before, after in itertools.pairwise(rows)]
    of = {title: [row.get(f"seconds/{stage}", 0.0) for row in rows[1:]] for title, stage in STAGES.items()}
    rest = [step - sum(stages) for step, *stages in zip(whole, *of.values())]
    reads = [row["tokens"] + PROMPT * row["samples"] for row in rows[1:]]
    sums = [(2 * read + 6 * read * row["trained_rows"]) * weights / rate for read, row in zip(reads, rows[1:])]
    return {"s a step": whole, **of, "rest, s": rest, "arithmetic, s": sums,
            "arithmetic, % of the step": [100 * a / b for a, b in zip(sums, whole)]}  # fmt: skip


def main() -> None:
    """A row for each way."""
    parser = bench.arguments(__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--server", help="address of a vLLM server with the default's start model")
    args = parser.parse_args()
    if args.steps < 3:
        parser.error("--steps: at least 3, the first is not counted")
    from synthetic import multiply_rate

    args.folder = args.folder.absolute()
    args.folder.mkdir(parents=True, exist_ok=True)
    rate, weights = multiply_rate(), sum(weight.numel() for weight in tiny.model(seed=0).parameters())
    tiny.warm_started(tiny.WarmStart())
    rows = []
    for name, words in ways(args.server).items():
        run = train(args.folder / f"{name.replace(', ', '-')}-{args.steps}", words, args)
        rows.append({"way": name, **parts(run, weights, rate)})
        print(f"{name}: {bench.shown(rows[-1]['s a step'])} s a step", flush=True)
    print(f"a matrix product of 1,024 × 1,024 runs at {rate / 1e9:.0f} GFLOP/s")
    bench.report("step_parts", [{**row, "GFLOP/s of a product": rate / 1e9} for row in rows], args.record)


if __name__ == "__main__":
    main()
