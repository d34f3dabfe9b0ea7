"""Group-relative policy optimisation: sample G answers to each prompt, and make the better of them more likely.

    python train_grpo.py                          learns to add on a laptop, nothing to download
    python train_grpo.py dr_grpo --digits 6       another algorithm, a harder job
    python train_grpo.py --task gsm8k --data gsm8k.jsonl --model DIR
    python train_grpo.py --help                   the flags of the job;  NAME --help: those of an algorithm too

There is no critic: how good an answer is, its group says. `nanorl/run.py` puts the parts together; this is the loop.
"""

from __future__ import annotations

import sys
from dataclasses import replace

from nanorl.launch import launch
from nanorl.objective import credit


def train(run) -> None:
    """The training loop. One turn is one step: sample, measure, credit, update, publish."""
    import torch  # takes seconds, so the flags are known to be good before

    from nanorl.optimize import clip_and_step, learning_rate
    from nanorl.policy import measure
    from nanorl.sample import collate
    from nanorl.trpo import natural_step

    cfg, algo, policy, clock = run.cfg, run.algo, run.policy, run.clock
    run.begin()
    while run.step < cfg.steps:
        with clock("generate"):
            groups = run.take()  # waits; every lag is within bounds, or it raises
        batch = collate(groups, run.step).to(run.device)
        updates = batch.shuffle_into(cfg.updates_per_batch, cfg.epochs_per_batch, key=(cfg.seed, run.step))
        with clock("measure"):  # no gradient; no needs, no pass
            batch = measure(batch, policy, run.ref, run.needs, updates[1:], cfg.tokens_per_micro_batch)
        batch = credit(batch, algo)  # all that looks across rows: baselines, scales
        trained = torch.full_like(batch.logp_behave, torch.nan)  # [B, T] log-probs as they are when trained
        norms, numbers = [], {"loss": 0.0, "lr": learning_rate(run.step, cfg)}
        with clock("train"):
            for i, rows in enumerate(updates):
                update = batch.select(rows).weighted(algo.axes.aggregation, run.limit)  # weight [B, T]
                update = replace(update, done=i / len(updates))  # 0: nothing has moved, the policy itself is π_prox
                for micro in update.split(cfg.tokens_per_micro_batch):  # never cuts a row
                    out = policy(micro, run.needs)
                    loss = (micro.weight * algo.loss(out, micro)).sum()  # per token [b, T], then the sum
                    loss.backward()
                    trained[micro.row, : micro.ids.shape[1]] = out.logp.detach()
                    numbers["loss"] += loss.item()
                if algo.natural:
                    norms.append(natural_step(policy, update, algo, cfg.tokens_per_micro_batch))
                else:
                    norms.append(clip_and_step(policy, run.optimizer, numbers["lr"], cfg.max_grad_norm))
        run.record(groups, batch, trained, norms, numbers)  # publish, log, evaluate, save
    run.finish()


if __name__ == "__main__":
    sys.exit(launch(__file__, "grpo", train, sys.argv[1:]))
