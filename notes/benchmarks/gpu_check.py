"""What does one GPU give? python notes/benchmarks/gpu_check.py [--toy]

Random weights in the shapes of Qwen2.5-0.5B and 1.5B, nothing is fetched. First, whether the GPU computes what the CPU
does: log-probs and gradient of the 0.5B shape, float32 against the CPU's, then bfloat16 against float32. Then for each
shape whole training steps in bfloat16 (rows of 2,048 tokens, all but 64 of them sampled): tokens a second, and the share
of the GPU's peak that the arithmetic of the model fills (MFU; what is computed again for memory's sake does not count).
Then what the local engine samples, and the peak memory of both.

Weights, gradients and Adam's moments are float32, 16 bytes a weight, so the 1.5B shape needs 25 GB beside activations.
Where memory is short, micro-batches are halved until they fit, and the table says what they were. It takes under five
minutes on a GPU; --toy takes seconds on a CPU and shows that the script works.
"""

from __future__ import annotations

import argparse
import copy
import re
import resource
import sys
import time
from dataclasses import replace
from pathlib import Path

import bench
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from nanorl.policy import Policy
from synthetic import Shape, Trainer, answers, credited, gradient, job, sample, seconds

SHAPES = {"0.5B": Shape(151_936, 896, 4864, 24, 14, 2), "1.5B": Shape(151_936, 1536, 8960, 28, 12, 2)}
TOY = {"toy": Shape(512, 64, 128, 2, 4, 2)}
PEAKS = {  # dense bfloat16 operations a second by words of the GPU's name, from the makers' data sheets; first match
    "B200": 2250e12, "GH200": 989e12, "H200": 989e12, "H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12,
    "A100": 312e12, "A800": 312e12, "L40S": 362e12, "L40": 181e12, "L4": 121e12, "A40": 150e12, "A10G": 70e12,
    "A10": 125e12, "A6000": 155e12, "RTX 5090": 210e12, "RTX 4090": 165e12, "RTX 3090": 71e12,
}  # fmt: skip
PROMPT = 64  # tokens of a row that are not sampled


def peak_of(name: str, given: float | None) -> float | None:
    """Peak operations a second of the GPU of this name, unless they are given in TFLOP/s; None where nobody knows.

    >>> peak_of("NVIDIA H100 PCIe", None) / 1e12, peak_of("NVIDIA A100-SXM4-80GB", 300), peak_of("NVIDIA RTX A4000", None)
    (756.0, 300000000000000.0, None)
    """
    if given is not None:
        return given * 1e12
    return next((peak for part, peak in PEAKS.items() if re.search(rf"\b{part}\b", name)), None)


def memory(device: str) -> float:
    """GB: the most that was allocated on the GPU since the last call; on a CPU the process's most so far."""
    if device == "cpu":
        unit = 1 if sys.platform == "darwin" else 1024  # bytes on macOS, kilobytes on Linux
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9
    most = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return most / 1e9


def scored(policy: Policy, groups: list) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of the sampled tokens, and the gradient as one vector, on the CPU."""
    update = credited(groups, str(policy.model.device))
    logp = gradient(policy, update, update.ids.numel())[update.mask]
    slope = torch.cat([weight.grad.flatten() for weight in policy.parameters()])
    policy.zero_grad(set_to_none=True)
    return logp.cpu(), slope.cpu()


def agreement(name: str, shape: Shape, device: str, length: int) -> list[bench.Row]:
    """How far the device's float32 is from the CPU's, and its bfloat16 from its float32."""
    groups = answers(8, length, length // 4, shape.vocabulary)
    model = shape.model()
    cpu = scored(Policy(model), groups)
    there = copy.deepcopy(model).to(device)
    wide = scored(Policy(there), groups)
    narrow = scored(Policy(there, dtype=torch.bfloat16), groups)
    rows = []
    for what, (logp, slope), (base, true) in ((f"{device} float32 − cpu float32", wide, cpu),
                                              (f"{device} bfloat16 − {device} float32", narrow, wide)):  # fmt: skip
        off = (logp - base).abs()
        rows.append({"shape": name, "compared": what, "log-probs, largest difference, nats": float(off.max()),
                     "mean difference, nats": float(off.mean()),
                     "gradient, relative difference": float((slope - true).norm() / true.norm()),
                     "cosine of the gradients": float(torch.cosine_similarity(slope, true, dim=0))})  # fmt: skip
    return rows


def trained(shape: Shape, trainer: Trainer, rows: int, length: int, repeats: int) -> tuple[list[float], int]:
    """Seconds of steps, and tokens of the micro-batches that fitted. Raises OutOfMemoryError where one row does not."""
    groups = answers(rows, length, PROMPT if length > PROMPT else 1, shape.vocabulary)
    while True:
        try:
            took = seconds(lambda: trainer.step(groups), repeats, trainer.policy.model.device)
            return took, trainer.cfg.tokens_per_micro_batch
        except torch.OutOfMemoryError:
            if trainer.cfg.tokens_per_micro_batch <= length:
                raise
            trainer.cfg = replace(trainer.cfg, tokens_per_micro_batch=trainer.cfg.tokens_per_micro_batch // 2)
            trainer.policy.zero_grad(set_to_none=True)


def training(shape: Shape, policy: Policy, args: argparse.Namespace, device: str, peak: float | None) -> bench.Row:
    """Speed, share of the peak and memory of whole steps; or that a row does not fit."""
    memory(device)
    weights, tokens = sum(weight.numel() for weight in policy.parameters()), args.rows * args.length
    try:
        trainer = Trainer(policy, job(tokens=args.tokens_per_micro_batch))
        took, micro = trained(shape, trainer, args.rows, args.length, args.repeats)
    except torch.OutOfMemoryError:
        return {"what": f"training, rows of {args.length:,}: does not fit"}
    rates = [shape.flops(weights, tokens, args.length) / s for s in took]
    return {"what": f"training, {args.rows} rows of {args.length:,}, micro-batches of {micro:,}",
            "tokens/s": [tokens / s for s in took], "TFLOP/s": [rate / 1e12 for rate in rates],
            "MFU, %": None if peak is None else [100 * rate / peak for rate in rates],
            "peak memory, GB": memory(device)}  # fmt: skip


def sampling(shape: Shape, policy: Policy, args: argparse.Namespace, device: str) -> bench.Row:
    """Speed and memory of the local engine."""
    memory(device)
    groups = answers(args.samples, PROMPT, PROMPT, shape.vocabulary)
    took = seconds(lambda: sample(policy, groups, args.new), args.repeats, device)
    return {"what": f"sampling, {args.samples} rows, {args.new} tokens after {PROMPT}",
            "tokens/s": [args.samples * args.new / s for s in took], "peak memory, GB": memory(device)}  # fmt: skip


def speed(name: str, shape: Shape, args: argparse.Namespace, device: str, peak: float | None) -> list[bench.Row]:
    """A row for training and one for sampling."""
    policy = Policy(shape.model(device), dtype=torch.bfloat16)
    base = {"shape": name, "weights, M": sum(weight.numel() for weight in policy.parameters()) / 1e6}
    trains = training(shape, policy, args, device, peak)
    policy.zero_grad(set_to_none=True)
    return [{**base, **trains}, {**base, **sampling(shape, policy, args, device)}]


def main() -> None:
    """All parts, in order, with the time that each takes."""
    parser = bench.arguments(__doc__)
    parser.add_argument("--toy", action="store_true", help="tiny sizes, on the CPU")
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--rows", type=int, default=16, help="rows of a training step, a multiple of 8")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a row")
    parser.add_argument("--tokens-per-micro-batch", type=int, default=8192)
    parser.add_argument("--samples", type=int, default=256, help="answers sampled at once, a multiple of 8")
    parser.add_argument("--new", type=int, default=128, help="tokens of each")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--peak", type=float, help="peak bfloat16 TFLOP/s of the GPU, where its name is not known here")
    args = parser.parse_args()
    if args.rows % 8 or args.samples % 8 or min(args.rows, args.samples, args.new, args.repeats) < 1 or args.length < 2:
        parser.error("--rows and --samples must be multiples of 8, above 0; --new, --repeats at least 1, --length 2")
    if args.toy:
        args.rows, args.length, args.tokens_per_micro_batch, args.samples, args.new, args.repeats = 8, 32, 128, 8, 8, 1
    elif not torch.cuda.is_available():
        parser.error("no GPU here (torch.cuda.is_available() is False); --toy runs on the CPU")
    device, shapes = ("cpu", TOY) if args.toy else ("cuda", {name: SHAPES[name] for name in args.shapes})
    peak = peak_of(torch.cuda.get_device_name() if device == "cuda" else "", args.peak)
    began, rows = time.perf_counter(), []
    first = next(iter(shapes))
    parts = [("agreement", lambda: agreement(first, shapes[first], device, 32 if args.toy else 128))]
    parts += [(name, lambda name=name: speed(name, shapes[name], args, device, peak)) for name in shapes]
    for i, (what, part) in enumerate(parts, 1):
        start = time.perf_counter()
        rows.append(part())
        print(f"part {i}/{len(parts)}, {what}: {time.perf_counter() - start:.0f} s", flush=True)
    rate = "unknown, give --peak" if peak is None else f"{peak / 1e12:g} TFLOP/s"
    print(f"all: {time.perf_counter() - began:.0f} s; peak {rate}")
    record = args.record and not args.toy
    bench.report("gpu_check, agreement", rows[0], record)
    bench.report("gpu_check, speed", [row for part in rows[1:] for row in part], record)


if __name__ == "__main__":
    main()
