"""How are the weights moved? AdamW, its schedule, and the one step that refuses what is not finite."""

from __future__ import annotations

import math

import torch
from torch import nn

from nanorl.config import Config


def adamw(model: nn.Module, cfg: Config) -> torch.optim.AdamW:
    """AdamW with moments in float32, like the weights (bfloat16 moments round small updates away).

    Weight decay acts on matrices alone: decaying a norm's scale only changes the learning rate.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": [p for p in trained if p.dim() >= 2], "weight_decay": cfg.weight_decay},
              {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0}]  # fmt: skip
    return torch.optim.AdamW(groups, lr=cfg.lr, betas=(0.9, 0.95), eps=1e-8)


def learning_rate(step: int, cfg: Config) -> float:
    """The rate of training step `step` = 0, 1, …: a linear rise over warmup_steps, then constant, or a fall to 0.

    A function of the step alone, so that a resumed run needs no scheduler's state.
    """
    if step < cfg.warmup_steps:
        return cfg.lr * (step + 1) / cfg.warmup_steps
    done = (step - cfg.warmup_steps) / max(1, cfg.steps - cfg.warmup_steps)
    if cfg.lr_schedule == "linear":
        return cfg.lr * (1 - done)
    if cfg.lr_schedule == "cosine":
        return cfg.lr * 0.5 * (1 + math.cos(math.pi * done))
    return cfg.lr


def clip_and_step(model: nn.Module, optimizer: torch.optim.Optimizer, lr: float, max_grad_norm: float) -> float:
    """One optimizer step along the gradient, shortened to max_grad_norm; returns its norm before that.

    No step where there is no gradient (no group had contrast) or where it is not finite: one bad batch must not
    write NaN into every weight. The caller counts those. At a rate of 0 there is none either, so that the moments do
    not gather what is not followed.
    """
    trained = [p for p in model.parameters() if p.grad is not None]
    norm = float(torch.nn.utils.clip_grad_norm_(trained, max_grad_norm)) if trained else 0.0
    if trained and math.isfinite(norm) and lr > 0:
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm
