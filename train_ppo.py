"""Proximal policy optimisation: a critic says what is to be expected, and what went better becomes more likely.

    python train_ppo.py                           learns to add on a laptop, nothing to download
    python train_ppo.py ppo --critic.trunk shared --critic.weight 0.2
    python train_ppo.py ppo --help                the flags of the job, of the algorithm and of its critic

This page is `train_grpo.py` and a critic: the lines with a `+` are what it adds. What it lacks is TRPO's step, which is
for rows without a critic.
"""

from __future__ import annotations

import sys
from dataclasses import replace

from nanorl.launch import launch
from nanorl.objective import credit


def train(run) -> None:
    """The training loop. One turn is one step: sample, measure, credit, update, publish."""
    import torch  # takes seconds, so the flags are known to be good before

    from nanorl.critic import centre, valued  # +
    from nanorl.optimize import clip_and_step, learning_rate
    from nanorl.policy import measure
    from nanorl.sample import collate

    cfg, algo, policy, clock = run.cfg, run.algo, run.policy, run.clock
    critic, how = run.critic, run.algo.axes.critic  # +
    run.begin()
    while run.step < cfg.steps:
        with clock("generate"):
            groups = run.take()  # waits; every lag is within bounds, or it raises
        batch = collate(groups, run.step).to(run.device)
        updates = batch.shuffle_into(cfg.updates_per_batch, cfg.epochs_per_batch, key=(cfg.seed, run.step))
        with clock("measure"):  # no gradient; no needs, no pass
            batch = measure(batch, policy, run.ref, run.needs, updates[1:], cfg.tokens_per_micro_batch)
            if run.step == 0:  # +
                centre(critic, batch, algo)  # + V begins at the mean return
            batch = valued(batch, critic, policy, cfg.tokens_per_micro_batch, how.bootstrap)  # + V before each token
        batch = credit(batch, algo)  # all that looks across rows: baselines, scales
        trained = torch.full_like(batch.logp_behave, torch.nan)  # [B, T] log-probs as they are when trained
        norms, numbers = [], {"loss": 0.0, "lr": learning_rate(run.step, cfg)}
        numbers |= {"value/loss": 0.0, "value/lr": how.lr_factor * numbers["lr"]}  # +
        numbers["lr"] *= run.step >= how.warmup_steps  # + at first the critic alone learns
        with clock("train"):
            for i, rows in enumerate(updates):
                update = batch.select(rows).weighted(algo.axes.aggregation, run.limit)  # weight [B, T]
                update = replace(update, done=i / len(updates))  # 0: nothing has moved, the policy itself is π_prox
                for micro in update.split(cfg.tokens_per_micro_batch):  # never cuts a row
                    out = policy(micro, run.needs)
                    loss = (micro.weight * algo.loss(out, micro)).sum()  # per token [b, T], then the sum
                    value, _ = critic(micro, out.hidden)  # +
                    value_loss = (micro.weight * algo.value_loss(value, micro)).sum()  # +
                    (loss + value_loss).backward()  # + value_loss
                    trained[micro.row, : micro.ids.shape[1]] = out.logp.detach()
                    numbers["loss"] += loss.item()
                    numbers["value/loss"] += value_loss.item()  # +
                norms.append(clip_and_step(policy, run.optimizer, numbers["lr"], cfg.max_grad_norm))
                norm = clip_and_step(critic, run.critic_optimizer, numbers["value/lr"], cfg.max_grad_norm)  # +
                run.value_norms.append(norm)  # +
        run.record(groups, batch, trained, norms, numbers)  # publish, log, evaluate, save
    run.finish()


if __name__ == "__main__":
    sys.exit(launch(__file__, "ppo", train, sys.argv[1:]))
