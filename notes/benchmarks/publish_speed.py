"""What does it cost to bring a version of the weights to a server? Bytes per second, and the parts of a publish.

    python notes/benchmarks/publish_speed.py MODEL [--server URL] [--repeats 8]

MODEL: a folder. First the bytes alone, between two processes over a group as with a server (gloo, loopback): a
plain broadcast into memory that is warm, one into new memory, and one as a server takes it, into new memory and
digested as it comes, from the first byte until all digests agree. With --server, of `python -m nanorl.serve --model MODEL`,
whole publishes by both transports.
"""

from __future__ import annotations

import os

os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # as launch.py and serve.py do

import sys
import tempfile
import time
from datetime import timedelta
from multiprocessing import Process
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[2]))
import bench
import torch
from torch.distributed import TCPStore
from transformers import AutoModelForCausalLM

from nanorl import transfer
from nanorl.metrics import PUBLISH
from nanorl.policy import Policy
from nanorl.snapshot import snapshot
from nanorl.sync import Link

WAYS = ("plain, warm memory", "plain, new memory", "digested, new memory")


def receive(port: int, described: list, digests: dict[str, str], repeats: int, record: bool) -> None:
    """The server's side of the first part: reports each way."""
    torch.set_num_threads(1)
    group = transfer.Group("gloo", TCPStore("127.0.0.1", port, 2, timeout=timedelta(seconds=60)), 1, 2, "127.0.0.1", 60)
    warm, seconds = transfer.lay_out(described, "cpu"), {way: [] for way in WAYS}
    size = sum(bucket.nbytes for bucket, _ in warm)
    for _ in range(repeats):
        for way in WAYS:
            group.group.barrier().wait()
            start = time.perf_counter()
            layout = warm if "warm" in way else transfer.lay_out(described, "cpu")
            for _, (_, tensors) in zip(group.broadcast([bucket for bucket, _ in layout]), layout):
                assert not ("digested" in way and transfer.differing(tensors, digests))
            seconds[way].append(time.perf_counter() - start)
    plain = median(seconds[WAYS[0]])
    bench.report("publish_speed, bytes", [{"way": way, "s": took, "GB/s": size / median(took) / 1e9, "MB": size / 1e6,
                                           "times the first": median(took) / plain} for way, took in seconds.items()],
                 record)  # fmt: skip


def main() -> None:
    """Both parts."""
    parser = bench.arguments(__doc__)
    parser.add_argument("model")
    parser.add_argument("--server")
    parser.add_argument("--repeats", type=int, default=8)
    args = parser.parse_args()
    torch.set_num_threads(1)
    policy = Policy(AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32))
    weights = snapshot(policy, 1)
    size = sum(bucket.nbytes for bucket in weights.buckets)
    print(f"{len(weights.tensors)} tensors, {size / 1e6:,.0f} MB; copied in {weights.copy:.3f} s, digested in "
          f"{weights.digest:.3f} s", flush=True)  # fmt: skip
    store = transfer.meeting_point("127.0.0.1", 2, 60)
    what = (store.port, transfer.describe(weights.tensors), weights.digests, args.repeats, args.record)
    process = Process(target=receive, args=what)
    process.start()
    group = transfer.Group("gloo", store, 0, 2, "127.0.0.1", 60)
    for _ in range(args.repeats * len(WAYS)):
        group.group.barrier().wait()
        for _ in group.broadcast(weights.buckets):
            pass
    process.join()
    rows = []
    for transport in ("broadcast", "disk") if args.server else ():
        with tempfile.TemporaryDirectory() as folder:
            link = Link(args.server, transport, Path(folder))
            link.check(policy.model.config)
            took = [link.publish(snapshot(policy, version)) for version in range(1, args.repeats + 1)][1:]
            link.close()
        parts = {f"{part}, s": [getattr(t, part) for t in took] for part in PUBLISH if part != "bytes"}
        rows.append({"transport": transport, **parts, "GB/s": size / median(t.transfer for t in took) / 1e9,
                     "largest mismatch, nats": max(t.mismatch for t in took)})  # fmt: skip
    if rows:
        bench.report("publish_speed, whole publishes", rows, args.record)


if __name__ == "__main__":
    main()
