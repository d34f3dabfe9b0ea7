"""What becomes of a reward before it is compared? Four steps on it, and what counts of an answer that was cut.

    R    what the reward function said, added up over the row; `Batch.rewards` keeps it, and `reward` in the metrics
    1    truncated   R ← 0, or a fixed number, for an answer that was cut     --truncated zero, penalty
    2    overlong    R ← R − κ·min(max(n − (L − C), 0)/C, 1), n its tokens    --shaping.overlong-penalty κ
    3    scale       R ← (R + b)·s, or R·s + b                                --shaping.bias b, --shaping.scale s
    4    clip        R ← min(max(R, −c), c)                                   --shaping.clip c

Then comes `advantage.normalise`, and after it the KL. The order is that of AReaL's code; each step is off unless asked
for. The steps see one number a row: in several turns the bias is added once, and n counts all turns. Pure functions of
tensors and of the axes; like `advantage.py` this file imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from nanorl import advantage as A

if TYPE_CHECKING:
    from torch import Tensor

    from nanorl.axes import Axes
    from nanorl.sample import Batch


@dataclass(frozen=True)
class Shaping:
    """what becomes of a reward before it is normalised (shaping.py)"""

    overlong_penalty: float = 0.0
    """What an answer as long as the limit loses; a shorter one less, or nothing. 0: off; 1 is DAPO's."""
    overlong_tokens: int | None = None
    """Tokens before the limit over which that penalty grows from 0. Without it a fifth of the limit, DAPO's share."""
    overlong_limit: int | None = None
    """The limit, in sampled tokens of a trajectory. Without it --max-new-tokens; more where there are several turns."""
    bias: float = 0.0
    """Added to rewards. -0.5 puts 0 and 1 on both sides of 0. A baseline takes it out again."""
    scale: float = 1.0
    """Rewards times this. 1, or 10 with a critic; dividing by a std takes it out again."""
    form: Literal["code", "page"] = "code"
    """code: (R + bias)·scale, as AReaL's code has it; page: R·scale + bias, as its project page has it."""
    clip: float | None = None
    """Rewards are held within ± this, after scaling. Well beyond their range, 10 or 20; None: no clip."""

    def settled(self, longest: int) -> Shaping:
        """With the limit and its tokens decided where they are left open: answers may have `longest` tokens."""
        if not self.overlong_penalty:
            return self
        limit = longest if self.overlong_limit is None else self.overlong_limit
        return replace(self, overlong_limit=limit,
                       overlong_tokens=max(1, limit // 5) if self.overlong_tokens is None else self.overlong_tokens)


# ---- the steps: rewards [B] in, rewards [B] out


def overlong(reward: Tensor, tokens: Tensor, limit: int, margin: int, factor: float = 1.0) -> Tensor:
    """[B] R − κ·min(max(n − (L − C), 0)/C, 1), n = tokens [B], L = limit, C = margin, κ = factor: length costs, softly.

    Nothing up to L − C tokens, then evenly more, κ at L and beyond. Source: DAPO (arXiv 2503.14476, eq. 13), there with
    κ = 1, L = 20,480, C = 4,096. In AReaL: overlong_reward_penalty, overlong_tokens (C), overlong_penalty_factor (κ).
    Differs from AReaL and verl: a row beyond L (several turns) loses κ and not more.

    >>> import torch
    >>> overlong(torch.ones(4), torch.tensor([15, 20, 22, 25]), limit=25, margin=5)
    tensor([1.0000, 1.0000, 0.6000, 0.0000])
    """
    # lab: begin (from which length on does a token cost, and how much?)
    share = (tokens - (limit - margin)).clamp(0, margin).to(reward.dtype) / margin
    return reward - factor * share
    # lab: end


def scaled(reward: Tensor, bias: float, scale: float, form: str = "code") -> Tensor:
    """[B] (R + b)·s with form "code", R·s + b with "page".

    In AReaL: reward_bias, reward_scaling. Its code has the first form, its project page (the GRPO section) the second:
    for b = −0.5 and s = 10 rewards of 1 and 0 become ±5 by one, 9.5 and −0.5 by the other. Raises ValueError for
    another form.

    >>> import torch
    >>> scaled(torch.tensor([1.0, 0.0]), -0.5, 10.0), scaled(torch.tensor([1.0, 0.0]), -0.5, 10.0, "page")
    (tensor([ 5., -5.]), tensor([ 9.5000, -0.5000]))
    """
    if form not in ("code", "page"):
        raise ValueError(f"form {form!r}; there are code, page")
    return (reward + bias) * scale if form == "code" else reward * scale + bias


def clipped(reward: Tensor, bound: float) -> Tensor:
    """[B] min(max(R, −c), c), c = bound. In AReaL: reward_clip, 20 unless set.

    Differs from OpenRLHF, which clips at 10 what has been divided by the group's std and is smaller for certain.

    >>> import torch
    >>> clipped(torch.tensor([5.0, -30.0]), 20.0)
    tensor([  5., -20.])
    """
    return reward.clamp(-bound, bound)


# ---- put together


def stages(batch: Batch, axes: Axes) -> Iterator[tuple[str, Tensor]]:
    """Name and rewards [B] after it of each step in use, in their order; nothing where none is.

    --truncated mask and drop take rows out (`left_out`, `compared`) and leave their rewards, so that step is here too.
    """
    how, reward = axes.shaping, batch.reward
    if axes.truncated != "score":
        fixed = {"zero": 0.0, "penalty": axes.truncated_penalty}.get(axes.truncated)
        reward = reward if fixed is None else reward.masked_fill(batch.truncated, fixed)
        yield "truncated", reward
    if how.overlong_penalty:
        reward = overlong(reward, batch.mask.sum(1), how.overlong_limit, how.overlong_tokens, how.overlong_penalty)
        yield "overlong", reward
    if how.bias or how.scale != 1:
        reward = scaled(reward, how.bias, how.scale, how.form)
        yield "scale", reward
    if how.clip is not None:
        yield "clip", clipped(reward, how.clip)


def whole(batch: Batch, axes: Axes) -> Tensor:
    """[B] the shaped reward of each row: what the last step makes of it, or what the reward said."""
    *_, (_, reward) = ("raw", batch.reward), *stages(batch, axes)
    return reward


def shaped(batch: Batch, axes: Axes) -> Tensor:
    """[B, T] the shaped reward by token, for what is not normalised; the sum of a row is its `whole`.

    Each reward is scaled where it was earned. What else the steps do (a penalty, the bias, what a clip takes away) is
    the trajectory's, and stands at its last sampled token; so does the fixed reward of a truncated answer.
    """
    earned = A.placed(batch.rewards, batch.mask)
    fixed = axes.truncated in ("zero", "penalty")
    if axes.shaping == Shaping() and not fixed:
        return earned  # bit for bit
    earned = earned.masked_fill(batch.truncated[:, None] & fixed, 0.0) * axes.shaping.scale
    return earned + A.at_end(whole(batch, axes) - earned.sum(1), batch.mask)


# ---- truncated answers that are not trained on


def left_out(batch: Batch, axes: Axes) -> Tensor:
    """[B] bool: rows without a loss, which no weight counts: those truncated, with --truncated mask or drop.

    In TRL: mask_truncated_completions, which is mask. AReaL's mask_no_eos_with_zero sets the *normalised* reward to 0:
    such a row is nearly masked, but still counts in the weights, and its KL stays.
    """
    return batch.truncated & (axes.truncated in ("mask", "drop"))


def compared(batch: Batch, axes: Axes) -> Tensor:
    """[n] the rows that baselines, scales and whitening see: all, but with --truncated drop those truncated.

    Masked rows are among them: their reward is a try at the prompt like any other's, only their tokens teach nothing.
    """
    return (~batch.truncated | (axes.truncated != "drop")).nonzero()[:, 0]


def spread(x: Tensor, rows: Tensor, mask: Tensor) -> Tensor:
    """[n, t] of these rows [n] → [B, T] like the mask, 0 in all others and beyond t."""
    wide = x.new_zeros(mask.shape)
    wide[rows, : x.shape[1]] = x
    return wide


# ---- what the start asks


def limits(axes: Axes) -> tuple[tuple[str, Any, bool, str], ...]:
    """Of each number here its flag, its value, whether it may be, and what it must be."""
    how, inf = axes.shaping, float("inf")
    longest = inf if how.overlong_limit is None else how.overlong_limit
    return (
        ("shaping.overlong-penalty", how.overlong_penalty, 0 <= how.overlong_penalty < inf,
         "0 or more and finite; it is taken off"),
        ("shaping.overlong-limit", how.overlong_limit, longest >= 1, "at least 1"),
        ("shaping.overlong-tokens", how.overlong_tokens,
         how.overlong_tokens is None or 1 <= how.overlong_tokens <= longest,
         "at least 1" + f" and at most the limit, {longest}" * (longest < inf)),
        ("shaping.bias", how.bias, -inf < how.bias < inf, "finite"),
        ("shaping.scale", how.scale, 0 < how.scale < inf, "above 0 and finite; 0 leaves nothing to learn from"),
        ("shaping.clip", how.clip, how.clip is None or 0 < how.clip < inf, "above 0 and finite; None: no clip"),
        ("truncated-penalty", axes.truncated_penalty, -inf < axes.truncated_penalty < inf, "finite"),
    )


def idle(axes: Axes) -> dict[str, str]:
    """The settings here that another one has switched off, each with the flag that would switch it on."""
    how, off = axes.shaping, {}
    if not how.overlong_penalty:
        off |= dict.fromkeys(("shaping.overlong_tokens", "shaping.overlong_limit"), "--shaping.overlong-penalty 1")
    if not how.bias or how.scale == 1:
        off["shaping.form"] = "--shaping.bias -0.5 --shaping.scale 10"
    if axes.truncated != "penalty":
        off["truncated_penalty"] = "--truncated penalty"
    return off


def remarks(axes: Axes) -> Iterator[str]:
    """What may be meant so and mostly is not, a line each."""
    how, norm = axes.shaping, axes.reward_norm
    low, high = (scaled(reward, how.bias, how.scale, how.form) for reward in (0.0, 1.0))  # of floats as of tensors
    if how.clip is not None and (low >= how.clip or high <= -how.clip):
        yield f"after the clip at {how.clip:g} rewards of 0 ({low:g} by then) and of 1 ({high:g}) are one; widen it"
    undone = [flag for flag, is_undone in (("--shaping.bias", how.bias and norm.mean_level != "none"),
                                           ("--shaping.scale", how.scale != 1 and norm.std_level != "none")) if is_undone]
    if axes.critic.bootstrap and axes.truncated in ("zero", "penalty"):
        yield "a cut answer gets its fixed reward and V at the cut; leave out --truncated or --critic.bootstrap"
    if undone and how.clip is None:
        yield f"{' and '.join(undone)}: the reward norm takes {'it' if len(undone) == 1 else 'them'} out again"
