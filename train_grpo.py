"""Group-relative policy optimisation: sample G answers to each prompt, and make the better of them more likely.

    python train_grpo.py                          learns to add on a laptop, nothing to download
    python train_grpo.py dr_grpo --digits 4       another algorithm, a harder job
    python train_grpo.py --task gsm8k --data gsm8k.jsonl --model DIR
    python train_grpo.py --help                   the flags of the job;  NAME --help: those of an algorithm too

There is no critic: how good an answer is, its group says. `nanorl/run.py` puts the parts together; this is the loop.
"""

from __future__ import annotations

import sys
from dataclasses import replace

from nanorl.algorithms import credit
from nanorl.launch import launch


def train(run) -> None:
    """The training loop. One turn is one step: sample, measure, credit, update, publish."""
    import torch  # takes seconds, so the flags are known to be good before

    from nanorl.optimize import clip_and_step, learning_rate
    from nanorl.policy import measure
    from nanorl.sample import collate

    cfg, algo, policy, clock = run.cfg, run.algo, run.policy, run.clock
    run.begin()
    while run.step < cfg.steps:
        with clock("generate"):
            groups = run.take()  # waits; every lag is within bounds, or it raises
        batch = collate(groups).to(run.device)
        updates = batch.shuffle_into(cfg.updates_per_batch, cfg.epochs_per_batch, key=(cfg.seed, run.step))
        with clock("measure"):  # no gradient; no needs, no pass
            batch = measure(batch, policy, run.ref, run.needs, updates[1:], cfg.tokens_per_micro_batch)
        batch = credit(batch, algo)  # all that looks across rows: baselines, scales
        trained = torch.full_like(batch.logp_behave, torch.nan)  # [B, T] log-probs as they are when trained
        loss, norms, lr = 0.0, [], learning_rate(run.step, cfg)
        with clock("train"):
            for rows in updates:
                update = batch.select(rows).weighted(algo.axes.aggregation, run.limit)  # weight [B, T]
                if not norms:  # the first update: nothing has moved, so the policy itself is π_prox
                    update = replace(update, logp_prox=None)
                for micro in update.split(cfg.tokens_per_micro_batch):  # never cuts a row
                    logp = policy(micro)
                    micro_loss = (micro.weight * algo.loss(logp, micro)).sum()  # per token [b, T], then the sum
                    micro_loss.backward()
                    trained[micro.row, : logp.shape[1]] = logp.detach()
                    loss += micro_loss.item()
                norms.append(clip_and_step(policy, run.optimizer, lr, cfg.max_grad_norm))
        run.record(groups, batch, trained, loss, lr, norms)  # publish, log, evaluate, save
    run.finish()


if __name__ == "__main__":
    sys.exit(launch(__file__, "grpo", train, sys.argv[1:]))
