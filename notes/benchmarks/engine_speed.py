"""How fast does the local engine sample, against `model.generate`? python notes/benchmarks/engine_speed.py

256 prompts, answers of very unequal length (geometric, mean 24, the longest 192), the tiny model with fresh weights.
Both sample exactly these many tokens: the engine by each request's limit; `generate` runs its one batch until the
longest row is done, as it always does, and the padding that it makes meanwhile does not count.
"""

import asyncio
import statistics
import sys
import time
from pathlib import Path

import bench
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))
from nanorl import tiny
from nanorl.engine import Sampling
from nanorl.local import LocalEngine
from nanorl.policy import Policy

PROMPTS, MEAN, LONGEST, RUNS = 256, 24, 192, 5

rng = np.random.default_rng(0)
lengths = np.minimum(rng.geometric(1 / MEAN, PROMPTS), LONGEST)
lengths[0] = LONGEST
model, tokenizer = tiny.model(seed=0).eval(), tiny.tokenizer()
texts = [f"{a}+{b}=" for a, b in rng.integers(1, 1000, (PROMPTS, 2))]
prompts = [tokenizer(text).input_ids for text in texts]


async def engine() -> None:
    local = LocalEngine(Policy(model), tokenizer)
    await asyncio.gather(
        *(local.generate(ids, Sampling(int(n), key=(i,))) for i, (ids, n) in enumerate(zip(prompts, lengths)))
    )


def generate() -> None:
    batch = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left")
    model.generate(**batch, do_sample=True, top_k=0, min_new_tokens=LONGEST, max_new_tokens=LONGEST)


def seconds(work) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


if __name__ == "__main__":
    args = bench.arguments(__doc__).parse_args()
    times = {"local engine": [], "model.generate": []}
    for run in range(RUNS + 1):  # in turn, the first to warm up
        for name, work in (("local engine", lambda: asyncio.run(engine())), ("model.generate", generate)):
            took = seconds(work)
            if run:
                times[name].append(took)
    rate = {name: lengths.sum() / statistics.median(t) for name, t in times.items()}
    rows = [{"": name, "tokens/s": rate[name], f"s for {lengths.sum()} tokens": t} for name, t in times.items()]
    rows.append({"": "ratio", "tokens/s": rate["local engine"] / rate["model.generate"]})
    bench.report("engine_speed", rows, args.record)
