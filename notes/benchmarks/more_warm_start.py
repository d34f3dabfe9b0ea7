"""Would the seconds of reinforcement learning be better spent on more warm start?

    python notes/benchmarks/more_warm_start.py

Trains the tiny model by supervised learning alone for as many seconds as a whole run of `train_grpo.py` takes (--seconds;
the steps that fit are measured first, so that the schedule ends where the time does) and evaluates it the same way.
"""

import asyncio
import sys
import time
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
import bench
from nanorl import config, engine, evaluate, local, policy, reward, rollout, tasks, tiny

parser = bench.arguments(__doc__)
parser.add_argument("--seconds", type=float, default=100, help="the whole time of the run to compare with")
parser.add_argument("--steps", type=int, help="this many steps, where the machine is too busy to measure what fits")
parser.add_argument("--digits", type=int, default=3)
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()

if __name__ == "__main__":
    start = time.monotonic()
    tiny.train(tiny.WarmStart(args.digits, args.seed, steps=40))
    steps = args.steps or int(args.seconds / ((time.monotonic() - start) / 40))
    start = time.monotonic()
    net = tiny.train(tiny.WarmStart(args.digits, args.seed, steps=steps))
    took = time.monotonic() - start

    cfg = config.resolved(config.Config(digits=args.digits, seed=args.seed))
    task, tokenizer = tasks.load(cfg), tiny.tokenizer()
    prompts = [tasks.make_prompt(p, i, tokenizer, cfg, task) for i, p in enumerate(task.held_out)]
    sampler = local.LocalEngine(policy.Policy(net), tokenizer)
    sampling = engine.Sampling(
        cfg.max_new_tokens, 1.0, policy.end_tokens(net, tokenizer), key=(args.seed, rollout.EVALUATE)
    )
    score = partial(reward.score, reward.named(task.rewards[0]))
    results, groups = asyncio.run(
        evaluate.evaluate(sampler, tokenizer, prompts, score, sampling, 1, args.seed, lambda done: None)
    )
    shown = [s for g in groups for s in g.samples if "(" in s.text]
    right = sum(s.reward for s in shown) / max(1, len(shown))
    row = {"steps of warm start": steps, "s": took, "pass@1": results["eval/pass@1"], "greedy": results["eval/greedy"],
           "share with working": len(shown) / len(prompts), "right then": right}  # fmt: skip
    bench.report("more_warm_start", [row], args.record)
