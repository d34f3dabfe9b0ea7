"""What sets an algorithm apart? The axes along which the published ones differ, as numbers and names.

Every field is a flag (`--eps-low`, `--reward-norm.mean-level`); each row of `algorithms.ALGORITHMS` sets its own. The
defaults here are grpo's. No torch: flags are parsed before it is imported.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Literal

from nanorl import shaping
from nanorl.shaping import Shaping

Level = Literal["group", "batch", "none"]


@dataclass(frozen=True)
class Norm:
    """(x − mean)/(std + ε), over a group, the batch, or not at all (advantage.normalise)"""

    mean_level: Level = "none"
    """Over what the mean is taken. group: the tries at one prompt, which are its baseline."""
    std_level: Level = "none"
    """Over what the std is taken. none: the scale stays."""
    leave_one_out: bool = False
    """The mean is that of the others (RLOO)."""
    ddof: Literal[0, 1] = 1
    """Degrees of freedom taken off in the std: 1 unbiased, 0 population."""
    eps: float = 1e-6
    """Added to the std. Far below the spread of rewards."""
    eps_in: Literal["std", "variance"] = "std"
    """Where eps is added: to the std, or to the variance under the root."""

    @property
    def on(self) -> bool:
        """It does something."""
        return (self.mean_level, self.std_level) != ("none", "none")


@dataclass(frozen=True)
class Correction:
    """the coefficient π_prox/μ for samples of another policy (loss.correction)"""

    kind: Literal["auto", "none", "truncate", "mask"] = "auto"
    """truncate: held within the bounds; mask: tokens out of bounds lose their loss; auto: truncate for stale samples."""
    level: Literal["token", "sequence", "joint"] = "token"
    """token; sequence: geometric mean over the answer; joint: the product."""
    low: float = 0.0
    """Lower bound. 0: none."""
    high: float = 5.0
    """Upper bound, above 1. 2 to 5; inf leaves the coefficient as it is."""

    @property
    def on(self) -> bool:
        """There is a coefficient."""
        return self.kind in ("truncate", "mask")


@dataclass(frozen=True)
class Critic:
    """the critic and its estimator, for algorithms that have one (train_ppo.py)"""

    trunk: Literal["own", "shared"] = "own"
    """own: a second network, from the start weights; shared: a head on the policy's, half the memory."""
    lr_factor: float = 5.0
    """The critic's learning rate is this times the policy's. 1 to 10."""
    weight: float = 1.0
    """Weight of the value loss; with an own trunk only the clipping of its gradient sees it. shared: 0.1 to 1."""
    gae_lambda: float = 1.0
    """λ of GAE. 1: reward minus value; 0.95 leans on the critic to lower the variance."""
    bootstrap: bool = False
    """The value at the cut stands for what a truncated answer would have earned. Off: it has been judged as it is."""
    clip: float | None = 0.5
    """Value clip, in units of reward. None: no clip."""
    huber: float | None = None
    """The value loss grows linearly beyond this error. None: squared error."""
    warmup_steps: int = 10
    """First steps in which the critic alone learns: one that knows nothing yet gives advantages of noise."""


@dataclass(frozen=True)
class Trpo:
    """the trust region, for trpo"""

    delta: float = 0.003
    """Largest KL(old‖new) of a step: mean over tokens of the whole distribution's, in nats. 0.001 to 0.01."""
    damping: float = 1.0
    """Added to the Fisher matrix. Larger: nearer to the plain gradient; fewer rows need more."""
    iterations: int = 10
    """Steps of conjugate gradient."""
    share: float = 0.1
    """Share of the rows that the Fisher matrix is taken from; the bound on the KL is over all."""


@dataclass(frozen=True)
class Axes:
    """What sets an algorithm apart. The defaults here are grpo's; each row names its own."""

    truncated: Literal["score", "zero", "penalty", "mask", "drop"] = "score"
    """Answers cut at the length limit. score: as judged; zero, penalty: a fixed reward; mask: in the baseline, not in
    the loss; drop: in neither."""
    truncated_penalty: float = -1.0
    """The reward of a truncated answer with --truncated penalty."""
    shaping: Shaping = field(default_factory=Shaping)
    reward_norm: Norm = field(default_factory=lambda: Norm("group", "group"))
    """of rewards, before they are placed: the baseline and scale of a critic-free algorithm"""
    gamma: float = 1.0
    """Discount per sampled token. 1: when a reward comes does not matter."""
    adv_norm: Norm = field(default_factory=Norm)
    """of advantages over sampled tokens: whitening"""
    ratio_level: Literal["token", "sequence", "sequence-token", "joint"] = "token"
    """What is compared with the past: each token, or the answer (geometric mean; its gradient by token; product)."""
    eps_low: float = 0.2
    """The ratio's clip below 1: where A < 0 the pull stops at 1 − this. 0.1 to 0.3; sequence level 3e-4."""
    eps_high: float = 0.2
    """The ratio's clip above 1: where A > 0 the pull stops at 1 + this. 0.2; 0.28 leaves room to explore (DAPO)."""
    dual_clip: float | None = None
    """Where A < 0 and the ratio is above this, above 1, nothing pushes any more. 3; None: no such clip."""
    tau_pos: float = 1.0
    """SAPO's temperature where A > 0: larger fades sooner as the ratio leaves 1."""
    tau_neg: float = 1.05
    """SAPO's temperature where A < 0."""
    prox: Literal["recompute", "loglinear", "behave"] = "recompute"
    """The old policy of later updates: measured at the step's start, interpolated, or the one that sampled."""
    correction: Correction = field(default_factory=Correction)
    m2_threshold: float | None = None
    """M2PO: tokens are left out until the second moment of the others' log π_prox/μ is below this. 0.04."""
    kl_weight: float = 0.0
    """Weight of KL(policy‖reference). 0: no reference is loaded. Change it by factors of ten."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Where the KL stands: added to the loss, or taken out of each token's reward (at the log-probs of the sampler)."""
    kl_estimator: Literal["k1", "k2", "k3", "k3+", "rk3"] = "k3"
    """In the loss k2, k3+, rk3 (ratio × k3) are right, k3 (GRPO's paper) pulls the other way round; in the reward k1."""
    ref_model: str | None = None
    """Folder or Hugging Face id of the reference. Without it the start weights, also after a resume."""
    entropy_weight: float = 0.0
    """Weight of the entropy bonus, in nats a token. 0, or 1e-4 to 1e-2."""
    aggregation: Literal["token-mean", "token-sum", "seq-mean-token-mean", "seq-mean-token-sum",
                         "seq-mean-token-sum-norm", "constant", "prompt-mean", "bnpo"] = "token-mean"  # fmt: skip
    """How the losses of tokens are added up (the table is in loss.weights)."""
    length_limit: int | None = None
    """The constant L of seq-mean-token-sum-norm and constant. Without it --max-new-tokens."""
    critic: Critic = field(default_factory=Critic)
    trpo: Trpo = field(default_factory=Trpo)


FOREIGN = {  # names that people bring from other libraries
    "kl-ctl": "--kl-weight", "beta": "--kl-weight", "kl-coef": "--kl-weight", "init-kl-coef": "--kl-weight",
    "num-generations": "--samples-per-prompt", "n-samples": "--samples-per-prompt", "learning-rate": "--lr",
    "group-size": "--samples-per-prompt", "max-completion-length": "--max-new-tokens", "max-steps": "--steps",
    "per-device-train-batch-size": "--tokens-per-micro-batch", "max-tokens-per-mb": "--tokens-per-micro-batch",
    "gradient-accumulation-steps": "--tokens-per-micro-batch", "train-batch-size": "--prompts-per-step",
    "batch-size": "--prompts-per-step", "num-iterations": "--epochs-per-batch", "epsilon": "--eps-low",
    "ppo-n-minibatches": "--updates-per-batch", "eps-clip": "--eps-low", "epsilon-high": "--eps-high",
    "eps-clip-higher": "--eps-high", "loss-type": "--aggregation", "total-train-steps": "--steps",
    "gradient-clipping": "--max-grad-norm", "output-dir": "--out", "resume-from-checkpoint": "--resume",
    "model-name-or-path": "--model", "save-steps": "--save-every", "eval-steps": "--eval-every",
    "warmup-ratio": "--warmup-steps", "lr-scheduler-type": "--lr-schedule", "reward-funcs": "--reward",
    "dataset-name": "--data", "discount": "--gamma", "gae-lambda": "--critic.gae-lambda", "c-clip": "--dual-clip",
    "importance-sampling-level": "--ratio-level", "entropy-coef": "--entropy-weight",
    "scale-rewards": "--reward-norm.std-level", "vf-coef": "--critic.weight", "cliprange-value": "--critic.clip",
    "lam": "--critic.gae-lambda", "clip-range": "--eps-low",
    "cliprange": "--eps-low", "entropy-coeff": "--entropy-weight", "critic-lr": "--critic.lr-factor",
    "value-clip": "--critic.clip", "importance-weight-cap": "--correction.high",
    "max-head-offpolicyness": "--max-lag", "max-staleness": "--max-lag", "max-concurrent-rollouts": "--in-flight",
    "dynamic-bs": "--dynamic-sampling", "dynamic-filter-fn": "--dynamic-sampling", "filter-groups": "--dynamic-sampling",
    "async-generation": "--engine", "behav-imp-weight-cap": "--correction.high",
    "reward-bias": "--shaping.bias", "reward-scaling": "--shaping.scale", "reward-clip": "--shaping.clip",
    "reward-clip-range": "--shaping.clip", "overlong-reward-penalty": "--shaping.overlong-penalty",
    "overlong-penalty-factor": "--shaping.overlong-penalty", "overlong-tokens": "--shaping.overlong-tokens",
    "overlong-buffer-len": "--shaping.overlong-tokens", "soft-punish-cache": "--shaping.overlong-tokens",
    "mask-truncated-completions": "--truncated", "mask-no-eos-with-zero": "--truncated",
    "stop-properly-penalty-coef": "--truncated",
    "sapo-tau-pos": "--tau-pos", "sapo-tau-neg": "--tau-neg", "prox-logp-method": "--prox",
}  # fmt: skip


def flat(settings: Any, prefix: str = "") -> list[tuple[str, Any]]:
    """Every setting by its dotted name, those of nested parts too.

    >>> flat(Norm())[:2]
    [('mean_level', 'none'), ('std_level', 'none')]
    """
    found = []
    for f in fields(settings):
        value = getattr(settings, f.name)
        found += flat(value, f"{prefix}{f.name}.") if is_dataclass(value) else [(f"{prefix}{f.name}", value)]
    return found


def differences(axes: Axes, usual: Axes) -> list[tuple[str, Any]]:
    """Name and value of each axis that is not the usual one, nested ones with their dots."""
    return [pair for pair, other in zip(flat(axes), flat(usual)) if pair != other]


def idle(axes: Axes) -> dict[str, str]:
    """The axes that another one has switched off, each with the flag that would switch it on."""
    off = {}
    if not axes.kl_weight:
        off |= dict.fromkeys(("kl_in", "kl_estimator", "ref_model"), "--kl-weight 0.01")
    if not axes.correction.on:
        off |= dict.fromkeys(("correction.level", "correction.low", "correction.high"), "--correction.kind truncate")
    if axes.aggregation not in ("seq-mean-token-sum-norm", "constant"):
        off["length_limit"] = "--aggregation seq-mean-token-sum-norm"
    for name, norm in (("reward_norm", axes.reward_norm), ("adv_norm", axes.adv_norm)):
        flag = "--" + name.replace("_", "-")
        if norm.mean_level == "none":
            off[f"{name}.leave_one_out"] = f"{flag}.mean-level group"
        if norm.std_level == "none":
            off |= dict.fromkeys((f"{name}.ddof", f"{name}.eps", f"{name}.eps_in"), f"{flag}.std-level group")
    return off | shaping.idle(axes)


def rebuilt(saved: dict[str, Any]) -> Axes:
    """Axes from `dataclasses.asdict` of them. Raises TypeError for settings that there are not."""
    parts = {f.name: type(value) for f in fields(Axes) if is_dataclass(value := getattr(Axes(), f.name))}
    return Axes(**{name: parts[name](**value) if name in parts else value for name, value in saved.items()})


def wrong(axes: Axes) -> str | None:
    """The first thing about these numbers that can have no meaning, as one line that says what would; None if all may."""
    inf, correction, critic, trpo = float("inf"), axes.correction, axes.critic, axes.trpo
    limits = (  # flag, value, whether it may be, what it must be
        ("eps-low", axes.eps_low, 0 <= axes.eps_low < 1, "0 or more and less than 1; a ratio is never negative"),
        ("eps-high", axes.eps_high, 0 <= axes.eps_high < inf, "0 or more and finite"),
        ("dual-clip", axes.dual_clip, axes.dual_clip is None or axes.dual_clip > 1 + axes.eps_high,
         "above 1 + eps-high; 3 is usual"),
        ("tau-pos", axes.tau_pos, 1e-3 <= axes.tau_pos <= 1e3, "between 0.001 and 1000; near 1"),
        ("tau-neg", axes.tau_neg, 1e-3 <= axes.tau_neg <= 1e3, "between 0.001 and 1000; near 1"),
        ("gamma", axes.gamma, 0 <= axes.gamma <= 1, "between 0 and 1"),
        ("kl-weight", axes.kl_weight, 0 <= axes.kl_weight < inf, "0 or more and finite"),
        ("entropy-weight", axes.entropy_weight, 0 <= axes.entropy_weight < inf, "0 or more and finite"),
        ("m2-threshold", axes.m2_threshold, axes.m2_threshold is None or 0 < axes.m2_threshold < inf, "above 0; 0.04"),
        ("ref-model", repr(axes.ref_model), axes.ref_model != "", "a folder or an id; without it the start weights"),
        ("length-limit", axes.length_limit, axes.length_limit is None or axes.length_limit >= 1, "at least 1"),
        ("reward-norm.eps", axes.reward_norm.eps, 0 < axes.reward_norm.eps < inf, "above 0 and finite"),
        ("adv-norm.eps", axes.adv_norm.eps, 0 < axes.adv_norm.eps < inf, "above 0 and finite"),
        ("correction.low", correction.low, 0 <= correction.low <= 1, "between 0 and 1, the ratio of equal policies"),
        ("correction.high", correction.high, correction.high > 1, "above 1, the ratio of equal policies"),
        ("critic.lr-factor", critic.lr_factor, 0 < critic.lr_factor < inf, "above 0 and finite"),
        ("critic.weight", critic.weight, 0 < critic.weight < inf, "above 0 and finite"),
        ("critic.gae-lambda", critic.gae_lambda, 0 <= critic.gae_lambda <= 1, "between 0 and 1"),
        ("critic.clip", critic.clip, critic.clip is None or critic.clip > 0, "above 0"),
        ("critic.huber", critic.huber, critic.huber is None or critic.huber > 0, "above 0"),
        ("critic.warmup-steps", critic.warmup_steps, critic.warmup_steps >= 0, "0 or more"),
        ("trpo.delta", trpo.delta, 1e-9 <= trpo.delta < inf, "at least 1e-9 and finite; 0.003"),
        ("trpo.damping", trpo.damping, 0 <= trpo.damping < inf, "0 or more and finite"),
        ("trpo.iterations", trpo.iterations, trpo.iterations >= 1, "at least 1"),
        ("trpo.share", trpo.share, 0 < trpo.share <= 1, "above 0 and at most 1"),
        *shaping.limits(axes),
    )
    for flag, value, good, must in limits:
        if not good:
            return f"--{flag} {value}: must be {must}"
    if axes.kl_estimator == "k1" and axes.kl_in == "loss" and axes.kl_weight:
        return ("--kl-estimator k1: as a loss its gradient is 0 on average, whatever the reference; use k2 or k3+, or "
                "--kl-in reward")
    if axes.kl_estimator in ("k3+", "rk3") and axes.kl_in == "reward" and axes.kl_weight:
        return f"--kl-estimator {axes.kl_estimator}: it differs by its gradient, and a reward has none; use k1"
    if axes.prox == "behave" and axes.correction.on:
        return ("--correction.kind: π_prox is the sampler itself with --prox behave, so its ratio to it is 1; "
                "use --prox recompute")
    return None
