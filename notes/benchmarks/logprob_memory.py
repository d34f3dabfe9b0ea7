"""What memory do log-probs take at a large vocabulary? python notes/benchmarks/logprob_memory.py

4,096 tokens, a vocabulary of 151,936, hidden width 64, float32, forward and backward. Ours is `Policy.forward`, which
has a chunk of logits at a time; the naive form has them all, takes log_softmax and gathers. Each way is measured in a
process of its own: the peak of resident memory above what weights, their gradients and a first small pass already take.
Log-probs and gradients are compared between the processes. Then ours again with other chunks (--chunks, logits that
exist at a time). Linux only: it reads /proc.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import bench
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))
from nanorl import policy as module
from nanorl.policy import Policy, before, scattered
from nanorl.sample import Batch
from synthetic import Shape, answers, credited

PROMPT = 1  # of each row: its first token has no past


def naive(policy: Policy, batch: Batch) -> Tensor:
    """[B, T] log-probs by all logits at once."""
    past, token = before(policy.hidden(batch.ids), batch.mask), batch.ids[batch.mask]
    return scattered(policy.logits(past).log_softmax(-1).gather(1, token[:, None])[:, 0], batch.mask)


def ours(policy: Policy, batch: Batch) -> Tensor:
    """[B, T] log-probs as nanorl has them."""
    return policy(batch).logp


WAYS = {"naive": naive, "ours": ours}


def resident() -> dict[str, float]:
    """MB of resident memory: now (VmRSS) and at its highest (VmHWM)."""
    status = Path("/proc/self/status").read_text()
    return {name: int(re.search(rf"^{name}:\s+(\d+) kB", status, re.M)[1]) / 1e3 for name in ("VmRSS", "VmHWM")}


def loss(logp: Tensor) -> Tensor:
    """A number in which every log-prob counts differently."""
    return (logp * torch.linspace(0.5, 1.5, logp.numel()).view_as(logp)).sum() / logp.shape[0]


def child(way: str, chunk: int, tokens: int, vocabulary: int, width: int, out: str) -> None:
    """Measure one way in this process: a line of JSON, and log-probs and gradients in a file."""
    module.CHUNK = chunk
    policy = Policy(Shape(vocabulary, width, 2 * width, 1, 1, 1).model())
    rows = max(1, tokens // 256)
    small, batch = (credited(answers(rows, length + PROMPT, PROMPT, vocabulary), "cpu") for length in (1, tokens // rows))
    loss(WAYS[way](policy, small)).backward()  # libraries, threads, and every gradient in place
    for weight in policy.parameters():
        weight.grad.zero_()
    start, begun = resident()["VmHWM"], time.perf_counter()
    logp = WAYS[way](policy, batch)
    loss(logp).backward()
    took, peak = time.perf_counter() - begun, resident()["VmHWM"] - start
    save_file({"log-probs": logp.detach(), **{name: weight.grad for name, weight in policy.named_parameters()}}, out)
    print(json.dumps({"peak": peak, "seconds": took, "tokens": int(batch.mask.sum())}))


def measured(way: str, chunk: int, args, out: Path) -> dict[str, float]:
    """What a child says of one way."""
    words = [way, str(chunk), str(args.tokens), str(args.vocabulary), str(args.width), str(out)]
    done = subprocess.run([sys.executable, __file__, "--child", *words], check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def difference(a: Path, b: Path) -> dict[str, float]:
    """The largest difference of log-probs, and of gradients, each over the largest value."""
    a, b = load_file(a), load_file(b)
    worst = {name: float((a[name] - b[name]).abs().max() / b[name].abs().max().clamp(min=1e-30)) for name in b}
    return {"log-probs": worst.pop("log-probs"), "gradients": max(worst.values())}


def main() -> None:
    """Both ways, compared; then other chunks."""
    parser = bench.arguments(__doc__)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--chunks", type=int, nargs="*", default=[1 << 22, 1 << 26])
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    if sys.platform != "linux":
        parser.error("it reads peak memory from /proc, so it needs Linux")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for way, chunk in (("naive", module.CHUNK), ("ours", module.CHUNK), *(("ours", chunk) for chunk in args.chunks)):
            file = Path(folder) / f"{way}.safetensors"
            runs = [measured(way, chunk, args, file) for _ in range(args.repeats)]
            peaks, took = ([run[key] for run in runs] for key in ("peak", "seconds"))
            row = {"way": way if way == "naive" else f"{way}, {chunk / 1e6:.0f} M logits at a time", "peak, MB": peaks,
                   "forward and backward, s": took}  # fmt: skip
            row["of naive, %"] = 100 * bench.median(peaks) / bench.median(rows[0]["peak, MB"] if rows else peaks)
            if way == "ours":
                row |= {f"{what}, largest relative difference": x for what, x in
                        difference(file, Path(folder) / "naive.safetensors").items()}  # fmt: skip
            rows.append(row)
            print(row, flush=True)
    bench.report("logprob_memory", rows, args.record)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        way, chunk, tokens, vocabulary, width, out = sys.argv[2:]
        child(way, int(chunk), int(tokens), int(vocabulary), int(width), out)
    else:
        main()
