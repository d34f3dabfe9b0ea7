"""Which combination has which name? A dict of frozen rows; each row is three small functions and what they need.

    advantage(batch, axes) → [B, T]      looks across rows: baselines and scales, once, over the whole batch
    keep(batch, axes)      → [B, T]      tokens whose loss counts; a row with none costs no forward pass
    loss(logp, micro, axes) → [b, T]     looks within a row: ratio, surrogate, KL

`Axes` are the numbers that these functions read; every one is a flag. A name is what one should use; where it
differs from its source, `differs` says how. No torch here, so that --help is instant.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Literal

from nanorl import advantage as A
from nanorl import loss as L

if TYPE_CHECKING:
    from torch import Tensor

    from nanorl.config import Config
    from nanorl.sample import Batch


@dataclass(frozen=True)
class Axes:
    """What sets an algorithm apart, as numbers. The defaults here are grpo's; each row names its own."""

    eps_low: float = 0.2
    """The ratio's clip below 1: tokens with A < 0 stop at 1 − this. 0.1 to 0.3."""
    eps_high: float = 0.2
    """The ratio's clip above 1: tokens with A > 0 stop at 1 + this. 0.2; 0.28 leaves room to explore (DAPO)."""
    kl_weight: float = 0.0
    """Weight of KL(policy‖reference) in the loss. 0: no reference is loaded. Change it by factors of ten."""
    kl_estimator: Literal["k2", "k3"] = "k3"
    """k2 has the gradient of KL(policy‖reference), k3 (GRPO's paper) that of KL(reference‖policy): see loss.kl."""
    std_ddof: Literal[0, 1] = 1
    """Degrees of freedom taken off in the group's std: 1 unbiased, 0 population."""
    std_eps: float = 1e-6
    """Added to the group's std. Far below the spread of rewards."""
    aggregation: Literal["token-mean", "token-sum", "seq-mean-token-mean", "seq-mean-token-sum",
                         "seq-mean-token-sum-norm", "constant", "prompt-mean", "bnpo"] = "token-mean"  # fmt: skip
    """How the losses of tokens are added up (the table is in loss.weights)."""
    length_limit: int | None = None
    """The constant L of seq-mean-token-sum-norm and constant. Without it --max-new-tokens."""


@dataclass(frozen=True)
class Algorithm:
    """One row of the table. `needs` names what `policy.measure` must compute beforehand."""

    says: str
    paper: str
    advantage: Callable[..., Tensor]
    loss: Callable[..., Tensor]
    axes: Axes
    differs: str = ""
    group_baseline: bool = True  # compares a sample with its group: one sample a prompt has no advantage
    has_ratio: bool = True  # its loss can be used for more than one update of a batch

    def keep(self, batch: Batch, axes: Axes) -> Tensor:
        """[B, T] bool. A token without advantage adds nothing to these surrogates, but it does to a KL term."""
        return batch.mask if axes.kl_weight else batch.mask & batch.adv.ne(0)

    def needs(self, cfg: Config, axes: Axes) -> frozenset[str]:
        """What has to be measured before the first update: log-probs of the step's start, of the reference."""
        prox = {"logp_prox"} if self.has_ratio and cfg.updates_per_batch * cfg.epochs_per_batch > 1 else set()
        return frozenset(prox | ({"logp_ref"} if axes.kl_weight else set()))

    def limit(self, cfg: Config) -> int:
        """The constant length L of the aggregations that divide by one."""
        return self.axes.length_limit or cfg.max_new_tokens

    def refuse(self, cfg: Config, axes: Axes, refused: type[Exception]) -> None:
        """Raise `refused` for settings under which this row has nothing to learn from or no meaning."""
        if self.group_baseline and cfg.samples_per_prompt == 1:
            raise refused("--samples-per-prompt 1: this algorithm compares a sample with its group, so one sample has "
                          "advantage 0; use at least 2 (8 is usual)")
        if not self.has_ratio and cfg.updates_per_batch * cfg.epochs_per_batch > 1:
            raise refused("--updates-per-batch, --epochs-per-batch: this loss has no ratio to correct later updates "
                          "by; use 1 and 1, or grpo")
        for flag, value in (("--eps-low", axes.eps_low), ("--eps-high", axes.eps_high), ("--kl-weight", axes.kl_weight)):
            if not 0 <= value < float("inf"):
                raise refused(f"{flag} {value}: must be 0 or more and finite")
        if axes.eps_low >= 1:
            raise refused(f"--eps-low {axes.eps_low}: a ratio is never negative; use less than 1")
        if not 0 < axes.std_eps < float("inf"):
            raise refused(f"--std-eps {axes.std_eps}: must be above 0 and finite")
        if axes.length_limit is not None and axes.length_limit < 1:
            raise refused(f"--length-limit {axes.length_limit}: must be at least 1")


def with_kl(per_token: Tensor, logp: Tensor, micro: Batch, axes: Axes) -> Tensor:
    """[b, T] the surrogate's loss plus β times the KL estimate against the reference, if β > 0."""
    if not axes.kl_weight:
        return per_token
    return per_token + axes.kl_weight * L.kl(logp, micro.logp_ref, micro.mask, axes.kl_estimator)


def clipped(logp: Tensor, micro: Batch, axes: Axes) -> Tensor:
    """[b, T] the clipped surrogate around π_prox, which is the current policy where no later update follows."""
    prox = logp.detach() if micro.logp_prox is None else micro.logp_prox
    return with_kl(L.clipped(logp, prox, micro.adv, micro.mask, axes.eps_low, axes.eps_high), logp, micro, axes)


def reinforce(logp: Tensor, micro: Batch, axes: Axes) -> Tensor:
    """[b, T] −Â·log π."""
    return with_kl(L.reinforce(logp, micro.adv, micro.mask), logp, micro, axes)


def standardised(batch: Batch, axes: Axes) -> Tensor:
    """[B, T] (R − group mean) / (group std + ε)."""
    return A.broadcast(A.standardised(batch.reward, batch.group, axes.std_ddof, axes.std_eps), batch.mask)


def centred(batch: Batch, axes: Axes) -> Tensor:
    """[B, T] R − group mean."""
    return A.broadcast(A.centred(batch.reward, batch.group), batch.mask)


def leave_one_out(batch: Batch, axes: Axes) -> Tensor:
    """[B, T] R − mean of the others."""
    return A.broadcast(A.leave_one_out(batch.reward, batch.group), batch.mask)


ALGORITHMS: dict[str, Algorithm] = {
    "grpo": Algorithm(
        says="grpo: A = (R − group mean)/(group std + ε); clipped ratio; mean over tokens",
        paper="DeepSeekMath, arXiv 2402.03300",
        advantage=standardised, loss=clipped, axes=Axes(),
        differs="the paper averages over answers (seq-mean-token-mean) and adds 0.04·KL; "
                "today's practice, ours, averages over tokens and has no KL",
    ),
    "dr_grpo": Algorithm(
        says="dr_grpo: A = R − group mean; clipped ratio; sum over tokens / (answers × a constant length)",
        paper="Understanding R1-Zero-like training, arXiv 2503.20783",
        advantage=centred, loss=clipped, axes=Axes(aggregation="seq-mean-token-sum-norm"),
        differs="nothing; several libraries drop the std and forget the constant length",
    ),
    "rloo": Algorithm(
        says="rloo: A = R − mean of the others; REINFORCE on the whole answer",
        paper="Back to Basics, arXiv 2402.14740",
        advantage=leave_one_out, loss=reinforce, axes=Axes(aggregation="seq-mean-token-sum"), has_ratio=False,
        differs="the paper takes β·KL out of the reward; ours adds it to the loss, off by default",
    ),
}  # fmt: skip


def chosen(name: str, axes: Axes) -> Algorithm:
    """The row of this name with its functions bound to these axes: advantage(batch), loss(logp, micro)."""
    row = ALGORITHMS[name]
    return replace(row, axes=axes, advantage=partial(row.advantage, axes=axes), loss=partial(row.loss, axes=axes))


def credit(batch: Batch, algo: Algorithm) -> Batch:
    """The batch with `adv` and `keep`: all that looks across rows, once, without gradient, over the whole batch."""
    batch = replace(batch, adv=algo.advantage(batch))
    return replace(batch, keep=algo.keep(batch, algo.axes))
