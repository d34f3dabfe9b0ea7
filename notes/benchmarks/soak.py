"""Does anything grow? An asynchronous run at lag 4 with rewards that dawdle, filter and fail, watched for a while.

    python notes/benchmarks/soak.py FOLDER [--minutes 30]

Every reward waits a random time (now and then seconds), a prompt in five has equal rewards (its group is filtered and
another takes its place), one reward in 2,000 raises. Once a minute: memory, threads and open files of the trainer and
of the engine's process. Then the run is stopped as by Ctrl-C, and the books are balanced: every prompt that was begun
has been trained, filtered or failed once, or is owed.
"""

import asyncio
import json
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
import bench
import train_grpo
from nanorl import reward
from nanorl.launch import launch


async def moody(prompt, completion, prompt_ids, completion_ids, answer, **row):
    """The exact reward, after a while, with the moods that the file describes."""
    await asyncio.sleep(random.expovariate(20) + (random.random() < 0.001) * 3)
    if random.random() < 1 / 2000:
        raise ValueError("a reward that fails now and then")
    return 0.0 if int(answer) % 5 == 0 else reward.exact(prompt, completion, prompt_ids, completion_ids, answer, **row)


def look(pid: int) -> tuple[float, int, int]:
    """Resident megabytes, threads, open files of a process."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(status["VmRSS"].split()[0]) / 1e3, int(status["Threads"]), len(os.listdir(f"/proc/{pid}/fd"))


def children() -> list[int]:
    """The processes that this one has started."""
    return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]


def watch(minutes: float, rows: list[bench.Row]) -> None:
    """A row a minute, then Ctrl-C."""
    for minute in range(1, round(minutes) + 1):
        time.sleep(60)
        row = {"minute": minute}
        for who, (mb, threads, files) in zip(("trainer", "engine"), map(look, [os.getpid(), *children()])):
            row |= {f"{who}, MB": mb, f"{who}, threads": threads, f"{who}, files": files}
        rows.append(row)
        print(f"minute {minute}/{round(minutes)}   {row}", flush=True)
    os.kill(os.getpid(), signal.SIGINT)


def books(folder: Path) -> str:
    """Trained, filtered, failed and owed prompts against those that were begun."""
    state = json.loads(max(folder.glob("checkpoints/step-*/state.json"), key=os.path.getmtime).read_text())
    buffer, trained = state["state"]["buffer"], [json.loads(line)["prompt"] for line in (folder / "samples.jsonl").open()]
    once = {number: trained.count(number) for number in set(trained[-5000:])}  # a sample a line, 8 a prompt
    ended, owed = buffer["ended"], buffer["again"]
    total = len(set(trained)) + ended.get("filtered", 0) + ended.get("failed", 0) + len(owed)
    assert total == buffer["next"] and not set(owed) & set(trained) and set(once.values()) == {8}
    return f"{buffer['next']:,} prompts begun = {len(set(trained)):,} trained + {ended} + {len(owed)} owed"


if __name__ == "__main__":
    parser = bench.arguments(__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minutes", type=float, default=30)
    args = parser.parse_args()
    rows: list[bench.Row] = []
    threading.Thread(target=watch, args=(args.minutes, rows), daemon=True).start()
    flags = ["--reward", f"{__file__}:moody", "--engine", "worker", "--max-lag", "4", "--overtake", "1", "--dynamic-sampling", "refill",
             "--max-failed", "0.5", "--lr", "1e-6", "--steps", "1000000", "--eval-every", "200",
             "--reward-workers", "0"]  # fmt: skip
    status = launch("train_grpo.py", "grpo", train_grpo.train, [*flags, "--out", str(args.folder)])
    print(f"status {status}; {books(args.folder)}")
    bench.report("soak", rows[:1] + rows[-1:], args.record)
