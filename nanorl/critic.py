"""What is to be expected? V(past), the critic of PPO: a number for every sampled token, before it is sampled.

    value[:, t] = V(ids[:, :t]), from the hidden state at t − 1, as log-probs are; the reward still to come, expected

Its trunk is its own network, begun from the policy's weights, or the policy's, of which it reads the hidden states.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
from torch import Tensor, nn

from nanorl.advantage import returns_to_go
from nanorl.objective import Algorithm
from nanorl.policy import Policy, before, scattered
from nanorl.sample import Batch
from nanorl.shaping import compared, left_out


class Critic(nn.Module):
    """A linear head on hidden states, 0 until `centre` has seen returns. `trunk` is None where it reads the policy's."""

    def __init__(self, policy: Policy, trunk: str):
        super().__init__()
        self.trunk = copy.deepcopy(policy.model.base_model) if trunk == "own" else None
        self.autocast = policy.autocast  # the same precision
        width, like = policy.model.config.get_text_config().hidden_size, policy.model
        self.head = nn.Linear(width, 1, device=like.device, dtype=like.dtype)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, batch: Batch, hidden: Tensor | None) -> tuple[Tensor, Tensor]:
        """[B, T] V before each sampled token, 0 where the mask is False; [B] V of the whole row.

        hidden [B, T, H] are the policy's last hidden states; a critic with its own trunk computes others.
        """
        if self.trunk is not None:
            with self.autocast():
                hidden = self.trunk(input_ids=batch.ids, use_cache=False).last_hidden_state
        every = self.head(hidden.to(self.head.weight.dtype))[:, :, 0]  # [B, T] V(ids[:, :t+1])
        end = every.gather(1, batch.length[:, None] - 1)[:, 0]
        return scattered(before(every, batch.mask), batch.mask), end


@torch.no_grad()
def centre(critic: Critic, batch: Batch, algo: Algorithm) -> None:
    """Let V begin at the mean return of the batch's sampled tokens, of those that have a loss.

    A bias moves by one learning rate a step, so a head that began at 0 would learn the mean through all of its weights
    at once, and what it says about single tokens would be noise meanwhile.
    """
    batch = batch.select(compared(batch, algo.axes))
    counted = batch.mask & ~left_out(batch, algo.axes)[:, None]
    returns = returns_to_go(algo.rewards(batch), batch.mask, algo.axes.gamma)[counted]
    critic.head.bias.fill_(returns.sum() / max(1, len(returns)))


@torch.no_grad()
def valued(batch: Batch, critic: Critic, policy: Policy, tokens: int, bootstrap: bool) -> Batch:
    """The batch with `value`, and where asked for `bootstrap`: V at the cut of rows that were truncated, 0 elsewhere."""
    value, end = torch.zeros_like(batch.logp_behave), torch.zeros_like(batch.logp_behave[:, 0])
    for micro in replace(batch, weight=batch.mask.float(), local_mean=False).split(tokens):
        v, last = critic(micro, None if critic.trunk is not None else policy.hidden(micro.ids))
        value[micro.row, : v.shape[1]], end[micro.row] = v.to(value.dtype), last.to(end.dtype)
    return replace(batch, value=value, bootstrap=end * batch.truncated if bootstrap else None)
