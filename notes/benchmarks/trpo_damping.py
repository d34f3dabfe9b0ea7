"""What damping, and the share of rows in the Fisher matrix, do to a natural step: the table of notes/trpo.md.

    python notes/benchmarks/trpo_damping.py RUN [--delta 0.01] [--shares 1 0.1] [--dampings 0 0.1 1 3]

RUN is the folder of a default run (`python train_grpo.py --steps 1`): its first step's samples are taken up again with
the weights that drew them, the warm start. Ten products of conjugate gradient; nothing is trained.
"""

import json
import sys
from pathlib import Path

import bench
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).parents[2]))
from nanorl import tiny, trpo
from nanorl.algorithms import ALGORITHMS
from nanorl.objective import credit
from nanorl.policy import Policy, load
from nanorl.sample import Group, Prompt, Sample, collate

TOKENS = 4096

parser = bench.arguments(__doc__)
parser.add_argument("run", type=Path)
parser.add_argument("--delta", type=float, default=0.01)
parser.add_argument("--shares", type=float, nargs="+", default=[1.0, 0.1])
parser.add_argument("--dampings", type=float, nargs="+", default=[0.0, 0.1, 1.0, 3.0])
args = parser.parse_args()


def first_step(run: Path) -> list[Group]:
    """The groups of the run's first step, from samples.jsonl."""
    groups: dict[int, list[Sample]] = {}
    for line in (run / "samples.jsonl").open():
        row = json.loads(line)
        if row["step"] == 1:
            sampled = [bool(m) for m in row["mask"]]
            groups.setdefault(row["prompt"], []).append(
                Sample(tuple(row["ids"]), tuple(sampled), tuple(row["logp_behave"]), tuple(row["version"]), row["finish"],
                       tuple(map(tuple, row["rewards"]))))  # fmt: skip
    return [Group(Prompt(number, (), "", ""), tuple(samples)) for number, samples in groups.items()]


if __name__ == "__main__":
    settings = json.loads((args.run / "config.json").read_text())["config"]
    start = tiny.warm_started(tiny.WarmStart(digits=settings["digits"], seed=settings["seed"]))
    policy, algo = Policy(load(str(start), "cpu")[0]), ALGORITHMS["trpo"]
    update = credit(collate(first_step(args.run)), algo).weighted("token-mean", 1)
    for micro in update.split(TOKENS):
        (micro.weight * algo.loss(policy(micro), micro)).sum().backward()
    weights = list(policy.model.parameters())
    g = -trpo.flat(p.grad for p in weights)
    print(f"{len(update)} answers, {int(update.mask.sum())} sampled tokens, {len(g):,} weights, δ = {args.delta}")
    everything = trpo.over_tokens(update)
    rows = []
    for share in args.shares:
        rows = torch.linspace(0, len(update) - 1, round(share * len(update))).long()
        some = trpo.over_tokens(update.select(rows))
        for damping in args.dampings:
            with sdpa_kernel(SDPBackend.MATH):

                def fisher(v: torch.Tensor, some=some) -> torch.Tensor:
                    """F·v over these rows."""
                    return trpo.hessian_product(trpo.divergences(policy, some, TOKENS), weights, v)

                x, _ = trpo.conjugate_gradient(lambda v, d=damping: fisher(v) + d * v, g, 10)
                go = trpo.line(weights, trpo.full_step(x, fisher, args.delta))
                full = trpo.spent_kl(go, 1.0, policy, everything, TOKENS)
                found = trpo.line_search(lambda s: trpo.spent_kl(go, s, policy, everything, TOKENS),
                                         lambda s: trpo.gained(go, s, policy, update, algo, TOKENS), args.delta)  # fmt: skip
                go(0)
            rows.append({"share": share, "damping": damping, "KL of the full step/δ": full / args.delta,
                         "gain within δ": found[2]})  # fmt: skip
            print(bench.table(rows[-1:]), flush=True)
    bench.report("trpo_damping", rows, args.record)
