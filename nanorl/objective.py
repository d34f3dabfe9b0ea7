"""How do the axes make a loss? One row of the table of algorithms: a surrogate, its axes, and what the loop calls.

    advantage(batch) → [B, T]     looks across rows: baselines and scales, once, over the whole batch
    keep(batch)      → [B, T]     tokens whose loss counts; a row with none costs no forward pass
    loss(out, micro) → [b, T]     looks within a row: ratio, surrogate, correction, KL, entropy

No torch here, so that --help is instant; `algorithms.py` has the rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from nanorl import advantage as A
from nanorl import loss as L
from nanorl import shaping
from nanorl.axes import Axes, differences, idle, wrong

if TYPE_CHECKING:
    from torch import Tensor

    from nanorl.config import Config
    from nanorl.policy import Out
    from nanorl.sample import Batch


# ---- surrogates: (log π_θ, ratio, adv, mask, axes) → [b, T]


def clipped(logp: Tensor, ratio: Tensor, adv: Tensor, mask: Tensor, axes: Axes) -> Tensor:
    """−min(r·A, clip(r)·A)."""
    return L.clipped(ratio, adv, mask, axes.eps_low, axes.eps_high, axes.dual_clip)


def reinforce(logp: Tensor, ratio: Tensor, adv: Tensor, mask: Tensor, axes: Axes) -> Tensor:
    """−A·log π."""
    return L.reinforce(logp, adv, mask)


def importance(logp: Tensor, ratio: Tensor, adv: Tensor, mask: Tensor, axes: Axes) -> Tensor:
    """−r·A."""
    return L.importance(ratio, adv, mask)


def sapo(logp: Tensor, ratio: Tensor, adv: Tensor, mask: Tensor, axes: Axes) -> Tensor:
    """−(4/τ)·σ(τ(r − 1))·A."""
    return L.sapo(ratio, adv, mask, axes.tau_pos, axes.tau_neg)


READS = {  # the axes that only some surrogates look at
    clipped: {"ratio_level", "prox", "eps_low", "eps_high", "dual_clip"},
    importance: {"ratio_level", "prox"},
    sapo: {"ratio_level", "prox", "tau_pos", "tau_neg"},
    reinforce: set(),
}


@dataclass(frozen=True)
class Algorithm:
    """One row of the table."""

    says: str
    equation: str
    paper: str
    surrogate: Callable[..., Tensor]
    axes: Axes
    differs: str
    critic: bool = False  # V is learned: train_ppo.py
    natural: bool = False  # the step is trpo.natural_step instead of AdamW's
    job: dict[str, Any] = field(default_factory=dict)  # defaults of the job that belong to the algorithm

    @property
    def name(self) -> str:
        """The word that asks for it."""
        return self.says.split(":")[0]

    # ---- what the loop calls

    def needs(self, cfg: Config) -> frozenset[str]:
        """What has to be measured before the first update, or with the log-probs; no needs, no pass."""
        axes, needs = self.axes, set()
        if axes.prox == "recompute" and self.has_ratio and cfg.updates_per_batch * cfg.epochs_per_batch > 1:
            needs.add("logp_prox")
        if axes.m2_threshold is not None:  # decided before the first update, for all rows
            needs |= {"logp_prox", "logp_prox of all rows"}
        needs |= {"logp_ref"} if axes.kl_weight else set()
        needs |= {"entropy"} if axes.entropy_weight else set()
        return frozenset(needs | ({"value"} if self.critic else set()))

    def rewards(self, batch: Batch) -> Tensor:
        """[B, T] what a sampled token earns: rewards shaped, normalised, placed, less the KL where it is in the reward.

        A reward stays with the token that earned it, unless it is normalised: then it is one number a row, at its end.
        """
        axes, mask = self.axes, batch.mask
        if axes.reward_norm.on:
            total = shaping.whole(batch, axes)[:, None]
            total = A.normalise(total, mask.new_ones(total.shape), batch.group, **vars(axes.reward_norm))
            reward = A.at_end(total[:, 0], mask)
        else:
            reward = shaping.shaped(batch, axes)
        if axes.kl_weight and axes.kl_in == "reward":  # at the sampler's log-probs; bounded as in AReaL and verl
            distance = L.kl(batch.logp_behave, batch.logp_ref, mask, axes.kl_estimator)
            reward = reward - axes.kl_weight * distance.clamp(-10, 10)
        return reward

    def advantage(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """[B, T] advantage and returns: of `rewards`, returns to go or GAE; the advantage normalised where asked for."""
        axes, mask, reward = self.axes, batch.mask, self.rewards(batch)
        if self.critic:
            adv = A.gae(reward, batch.value, mask, axes.gamma, axes.critic.gae_lambda, batch.bootstrap)
            returns = adv + batch.value.where(mask, 0.0)
        else:
            adv = returns = A.returns_to_go(reward, mask, axes.gamma)
        return (A.normalise(adv, mask, batch.group, **vars(axes.adv_norm)) if axes.adv_norm.on else adv), returns

    def keep(self, batch: Batch) -> Tensor:
        """[B, T] bool. A row without advantage adds nothing to a surrogate, but it does to KL, entropy and value."""
        axes, keep = self.axes, batch.counted
        if not (self.critic or axes.entropy_weight or (axes.kl_weight and axes.kl_in == "loss")):
            keep = keep & batch.adv.ne(0).any(1, keepdim=True)
        if axes.m2_threshold is not None:
            log_rho = L.log_ratio(batch.logp_prox, batch.logp_behave, batch.mask)
            keep = keep & L.second_moment(log_rho, batch.adv, batch.counted, axes.m2_threshold)
        return keep

    def loss(self, out: Out, micro: Batch) -> Tensor:
        """[b, T] ρ·surrogate + β·KL − c·entropy, each as far as the axes have it."""
        axes, logp, mask = self.axes, out.logp, micro.mask
        prox = proximal(logp, micro, axes)
        ratio = L.ratio(logp, prox, mask, axes.ratio_level)
        per_token = self.surrogate(logp, ratio, self.pull(micro), mask, axes)
        if axes.correction.on:
            per_token = per_token * L.correction(prox, micro.logp_behave, mask, **vars(axes.correction))
        if axes.kl_weight and axes.kl_in == "loss":
            distance = L.kl(logp, micro.logp_ref, mask, "k3" if axes.kl_estimator == "rk3" else axes.kl_estimator)
            if axes.kl_estimator == "rk3":
                distance = L.ratio(logp, micro.logp_behave, mask) * distance
            per_token = per_token + axes.kl_weight * distance
        if axes.entropy_weight:
            per_token = per_token - axes.entropy_weight * out.entropy.where(mask, 0.0)
        return per_token

    def pull(self, batch: Batch) -> Tensor:
        """[B, T] the advantage that the ratio multiplies: where the ratio is the answer's, the answer's mean."""
        whole = self.has_ratio and self.axes.ratio_level in ("sequence", "joint")
        return A.row_mean(batch.adv, batch.mask) if whole else batch.adv

    def value_loss(self, value: Tensor, micro: Batch) -> Tensor:
        """[b, T] the critic's loss, weighted."""
        critic = self.axes.critic
        huber = float("inf") if critic.huber is None else critic.huber
        return critic.weight * L.value_loss(value, micro.value, micro.returns, micro.mask, critic.clip, huber)

    # ---- what the start asks

    def settled(self, stale: bool, longest: int | None = None) -> Algorithm:
        """With what the axes leave open decided: stale samples get a correction, if this objective has a place for it;
        what is overlong follows from the longest answer that there may be."""
        axes = self.axes if longest is None else replace(self.axes, shaping=self.axes.shaping.settled(longest))
        if axes.correction.kind == "auto":
            own = self.surrogate is sapo or axes.prox == "behave" or axes.m2_threshold is not None
            kind = "truncate" if stale and not own else "none"
            axes = replace(axes, correction=replace(axes.correction, kind=kind))
        return replace(self, axes=axes)

    @property
    def has_ratio(self) -> bool:
        """Its loss corrects for the policy's movement, so it can be used for more than one update of a batch."""
        return "prox" in READS[self.surrogate]

    @property
    def behaviour(self) -> bool:
        """It divides by the sampler's probabilities."""
        axes = self.axes
        in_kl = axes.kl_weight and (axes.kl_in == "reward" or axes.kl_estimator == "rk3")
        return bool(in_kl or axes.prox != "recompute" or axes.correction.on or axes.m2_threshold)

    @property
    def explained(self) -> bool:
        """What the console says about the first step holds: the loss is −Σ weight·A, and A sums to 0 in each group."""
        axes = self.axes
        more = axes.adv_norm.on or axes.entropy_weight or axes.gamma < 1 or (axes.kl_weight and axes.ref_model)
        more = more or axes.truncated == "mask"
        return self.surrogate in (clipped, importance) and axes.reward_norm.mean_level == "group" and not more

    def limit(self, cfg: Config) -> int:
        """The constant length L of the aggregations that divide by one."""
        return self.axes.length_limit or cfg.max_new_tokens

    def unused(self) -> set[str]:
        """The axes that this row does not look at."""
        parts = set() if self.critic else {"critic"}
        parts |= set() if self.natural else {"trpo"}
        return parts | set.union(*READS.values()) - READS[self.surrogate]

    def refuse(self, cfg: Config, usual: Axes, refused: type[Exception]) -> None:
        """Raise `refused` for settings under which this row has nothing to learn from or no meaning.

        usual: the row's own axes; a change of one that it does not look at is a mistake.
        """
        axes, updates, name = self.axes, cfg.updates_per_batch * cfg.epochs_per_batch, self.name
        if (line := wrong(axes)) is not None:
            raise refused(line)
        for axis, _ in differences(axes, usual):
            flag = "--" + axis.replace("_", "-")
            if axis.split(".")[0] in self.unused():
                raise refused(f"{flag}: {name} does not look at it; leave it out (python -m nanorl.algorithms {name} "
                              "shows what it has)")
            if axis in idle(axes):
                raise refused(f"{flag}: nothing looks at it here; leave it out, or add {idle(axes)[axis]}")
        over_group = axes.reward_norm.mean_level == "group" or (axes.adv_norm.mean_level == "group" and not self.critic)
        if cfg.samples_per_prompt == 1 and over_group:
            raise refused("--samples-per-prompt 1: this algorithm compares a sample with its group, so one sample has "
                          "advantage 0; use at least 2 (8 is usual)")
        if updates > 1 and not self.has_ratio:
            raise refused("--updates-per-batch, --epochs-per-batch: this loss has no ratio to correct later updates "
                          "by; use 1 and 1, or grpo")
        if updates > 1 and self.natural:
            raise refused("--updates-per-batch, --epochs-per-batch: a natural step is solved for, and there is one a "
                          "batch; use 1 and 1")
        if self.natural and cfg.dtype != "float32":
            raise refused(f"--dtype {cfg.dtype}: its rounding exceeds the KL that bounds a natural step; use float32")
        if self.surrogate is sapo and (axes.correction.on or axes.prox != "recompute"):
            raise refused("--correction.kind, --prox: SAPO's gate is defined on one ratio, to the old policy; the "
                          "decoupled objective has two. Leave them out, or use decoupled_ppo")
        if axes.m2_threshold is not None and (self.critic or axes.entropy_weight or axes.kl_weight):
            raise refused("--m2-threshold: it drops tokens, and critic, KL and entropy are over all; leave those out")
        idle_here = ("lr", "lr_schedule", "warmup_steps", "weight_decay", "max_grad_norm") if self.natural else ()
        for flag in idle_here:
            if getattr(cfg, flag) != getattr(type(cfg), flag):
                raise refused(f"--{flag.replace('_', '-')}: {name} has no optimizer; --trpo.delta sets its step")

    def remarks(self, cfg: Config) -> list[str]:
        """What one should know, and what may be meant so and mostly is not: a line each, printed at the start."""
        axes, found = self.axes, [*shaping.remarks(self.axes)]
        clips, whole = "eps_low" not in self.unused(), axes.ratio_level in ("sequence", "sequence-token")
        if axes.ratio_level != "token" and "none" == axes.reward_norm.std_level == axes.adv_norm.std_level:
            found.append("ratios of whole answers with advantages that no std scales tend to diverge; use "
                         "--ratio-level token or --reward-norm.std-level group")
        if axes.ratio_level in ("sequence", "joint") and axes.aggregation != "seq-mean-token-mean":
            found.append("a loss per answer is meant to be averaged over answers (seq-mean-token-mean); summed over "
                         "tokens it counts long answers more")
        if clips and whole and axes.eps_high >= 0.1:
            found.append(f"ε = {axes.eps_high:g} is a token's clip; a geometric mean stays nearer to 1: 3e-4 is usual")
        if clips and not whole and axes.eps_high < 0.01:
            found.append(f"ε = {axes.eps_high:g} is meant for the geometric mean of an answer; 0.2 is usual here")
        if axes.kl_weight and axes.kl_in == "reward" and axes.kl_estimator != "k1":
            found.append(f"{axes.kl_estimator} in the reward has not the gradient of the KL; k1 has it")
        if self.critic and axes.critic.trunk == "shared" and axes.critic.weight > 0.5:
            found.append(f"on a shared trunk a value loss of weight {axes.critic.weight:g} drowns the policy's; take 0.2")
        if self.critic and axes.critic.warmup_steps:
            found.append(f"in the first {axes.critic.warmup_steps} steps the critic alone learns, the policy stays")
        corrected = axes.correction.on or axes.m2_threshold is not None or axes.prox == "behave"
        if corrected and not cfg.pace.stale:
            found.append("samples are fresh here (every lag is 0): but for rounding there is nothing to correct")
        if cfg.pace.stale and not corrected:
            found.append(f"samples may be {cfg.pace.bound} steps old and nothing corrects for that; "
                         f"{'use decoupled_ppo' if self.surrogate is sapo else '--correction.kind truncate does'}")
        return found

    def refuse_samples(self, groups: list, refused: type[Exception]) -> None:
        """Raise `refused` if a sampled token came without the log-prob that this row divides by."""
        for sample in (sample for group in groups for sample in group.samples) if self.behaviour else ():
            if any(mask and math.isnan(logp) for mask, logp in zip(sample.mask, sample.logp_behave)):
                raise refused("--engine: it gave a token without its log-prob, and this algorithm divides by the "
                              "sampler's probabilities; let the engine return log-probs, or use grpo")


def proximal(logp: Tensor, micro: Batch, axes: Axes) -> Tensor:
    """[b, T] log π_prox, without gradient: where nothing has moved yet it is the current policy, and costs no pass."""
    if axes.prox == "behave":
        return micro.logp_behave
    if micro.done == 0:
        return logp.detach()
    if axes.prox == "loglinear":
        return L.loglinear(logp, micro.logp_behave, micro.mask, micro.step - micro.version, micro.done)
    return micro.logp_prox


def credit(batch: Batch, algo: Algorithm) -> Batch:
    """The batch with `adv`, `returns`, `keep`: all that looks across rows, once, over the whole batch, no gradient.

    With --truncated mask or drop also `left_out`: these rows have no advantage; dropped ones are in no baseline.
    """
    rows, out = shaping.compared(batch, algo.axes), shaping.left_out(batch, algo.axes)
    seen = batch.select(rows) if len(rows) < len(batch) else batch
    adv, returns = (shaping.spread(x, rows, batch.mask) for x in algo.advantage(seen))
    batch = replace(batch, adv=adv.masked_fill(out[:, None], 0.0), returns=returns, left_out=out)
    return replace(batch, keep=algo.keep(batch))
