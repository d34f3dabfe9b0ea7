"""Which combination has which name? A dict of frozen rows, each a surrogate and its axes.

    python -m nanorl.algorithms                    the table
    python -m nanorl.algorithms gspo               a row: its equation, its axes, its paper, who differs
    python -m nanorl.algorithms --plot FILE        loss and gradient weight of each surrogate against the ratio

A bare name is what one should use; a name with an origin is that source to the letter; `differs` says who differs.
AReaL's documents and papers place the baseline in the advantages or the rewards; its shipped settings whiten advantages
over the batch at the end in every variant, and under that dr_grpo, liteppo and rloo are one algorithm (a constant
factor is all that sets them apart). The rows here keep them apart, as the papers do. No torch here: --help is instant.
"""

from __future__ import annotations

import sys
from dataclasses import replace

from nanorl.axes import Axes, Correction, Norm, Trpo, differences
from nanorl.objective import Algorithm, clipped, importance, reinforce, sapo
from nanorl.pace import Pace
from nanorl.shaping import Shaping

CLIP = "ℓ_t = −min(r_t·A, clip(r_t, 1−ε_low, 1+ε_high)·A),  r_t = π_θ(t)/π_prox(t)"
GRPO = Axes()
GROUP = "A = (R − group mean)/(group std + ε)"
ROWS = [
    Algorithm(
        says="grpo: A = (R − group mean)/(group std + ε); clipped ratio; mean over tokens",
        equation=f"{GROUP};  {CLIP};  Σ ℓ_t/N over the N tokens of the batch",
        paper="DeepSeekMath, arXiv 2402.03300", surrogate=clipped, axes=GRPO,
        differs="the paper averages over answers and adds 0.04·KL (grpo_deepseekmath); today's practice, ours, averages "
                "over tokens and has no KL. ε: TRL 1e-4, verl 1e-6, ours 1e-6; std: open-instruct takes ddof 0",
    ),
    Algorithm(
        says="grpo_deepseekmath: GRPO as its paper has it: mean over answers, KL to the reference in the loss",
        equation=f"{GROUP};  {CLIP} + 0.04·(e^(−d) − 1 + d), d = log π_θ/π_ref;  mean over an answer, then over answers",
        paper="DeepSeekMath, arXiv 2402.03300, eq. 3 and 4", surrogate=clipped,
        axes=Axes(aggregation="seq-mean-token-mean", kl_weight=0.04, kl_estimator="k3"),
        differs="nothing but the ε beside the std, which the paper lacks. Its KL estimate pulls towards KL(ref‖policy): "
                "--kl-estimator k3+ has the gradient of KL(policy‖ref)",
    ),
    Algorithm(
        says="grpo_areal_page: GRPO with the ratio of the whole answer, δ under the root",
        equation="r = scale·R + bias;  A = (r − μ)/√(1/G Σ(r_j − μ)² + δ);  ρ = π_θ(o|q)/π_old(o|q);  "
                 "−1/G Σ min(ρA, clip(ρ, 1−ε, 1+ε)A)",
        paper="AReaL's project page, GRPO section (arXiv 2402.03300 is its source)", surrogate=clipped,
        axes=Axes(reward_norm=Norm("group", "group", ddof=0, eps=1e-8, eps_in="variance"), ratio_level="joint",
                  aggregation="seq-mean-token-mean", shaping=Shaping(form="page")),
        differs="everybody, AReaL's own code too, takes the ratio token by token: the product explodes with length. "
                "Scale and bias are 1 and 0 unless set (--shaping.scale, --shaping.bias), as there; its code has "
                "(R + bias)·scale",
    ),
    Algorithm(
        says="dr_grpo: A = R − group mean; clipped ratio; sum over tokens / (answers × a constant length)",
        equation=f"A = R − group mean;  {CLIP};  Σ ℓ_t/(B·L)",
        paper="Understanding R1-Zero-like training, arXiv 2503.20783", surrogate=clipped,
        axes=Axes(reward_norm=Norm("group", "none"), aggregation="seq-mean-token-sum-norm"),
        differs="nothing; OpenRLHF and others drop the std and forget the constant length, verl divides by the padded "
                "width",
    ),
    Algorithm(
        says="liteppo: A = (R − group mean)/(batch std + ε); clipped ratio; mean over tokens",
        equation=f"A = (R − group mean)/(batch std + ε);  {CLIP};  Σ ℓ_t/N",
        paper="Tricks or Traps, arXiv 2508.08221", surrogate=clipped, axes=Axes(reward_norm=Norm("group", "batch")),
        differs="the std is of what is left after the mean, AReaL's form; TRL's scale_rewards='batch' takes that of raw "
                "rewards, which also counts how prompts differ",
    ),
    Algorithm(
        says="rloo: A = R − mean of the others; REINFORCE on the whole answer",
        equation="A = R_i − 1/(G−1) Σ_{j≠i} R_j;  −A·Σ_t log π_θ(t), mean over answers",
        paper="Back to Basics, arXiv 2402.14740", surrogate=reinforce,
        axes=Axes(reward_norm=Norm("group", "none", leave_one_out=True), aggregation="seq-mean-token-sum"),
        differs="the paper takes β·KL out of the reward (--kl-weight 0.05 --kl-in reward --kl-estimator k1); off here. "
                "TRL clips the ratio of the whole answer instead; verl's rloo gives a group of one its raw reward",
    ),
    Algorithm(
        says="reinforce: A = R, no baseline; −A·log π on the whole answer",
        equation="−R·Σ_t log π_θ(t), mean over answers",
        paper="Williams 1992 (Machine Learning 8); arXiv 2402.14740 for language models", surrogate=reinforce,
        axes=Axes(reward_norm=Norm(), aggregation="seq-mean-token-sum"),
        differs="AReaL's file of this name clips a ratio, whitens advantages, has 0.001·k1 in the reward, and rewards of "
                "±5 (--shaping.bias -0.5 --shaping.scale 10)",
    ),
    Algorithm(
        says="reinforce_baseline: A = R − group mean; −A·log π on the whole answer",
        equation="−(R − group mean)·Σ_t log π_θ(t), mean over answers",
        paper="Williams 1992 (Machine Learning 8), with a baseline", surrogate=reinforce,
        axes=Axes(reward_norm=Norm("group", "none"), aggregation="seq-mean-token-sum"),
        differs="rloo is G/(G−1) times this. REINFORCE++-baseline (arXiv 2501.03262) whitens over tokens afterwards "
                "(--adv-norm.mean-level batch --adv-norm.std-level batch); AReaL's adds 0.001·k2 in the reward",
    ),
    Algorithm(
        says="gspo: GRPO with one ratio an answer, the geometric mean; clipped very near 1; mean over answers",
        equation=f"{GROUP};  s = (Π_t π_θ(t)/π_prox(t))^(1/n);  −1/B Σ min(s·A, clip(s, 1−ε_low, 1+ε_high)·A)",
        paper="GSPO, arXiv 2507.18071, eq. 5–7", surrogate=clipped,
        axes=Axes(ratio_level="sequence", eps_low=3e-4, eps_high=4e-4, aggregation="seq-mean-token-mean"),
        differs="AReaL averages the loss over tokens, which counts long answers more; libraries leave ε at 0.2 unless "
                "told, which for a geometric mean is no clip at all",
    ),
    Algorithm(
        says="gspo_token: GSPO's ratio in value, each token's own gradient, so advantages may differ by token",
        equation=f"{GROUP};  s_t = sg(s)·π_θ(t)/sg(π_θ(t));  ℓ_t = −min(s_t·A_t, clip(s_t, 1−ε_low, 1+ε_high)·A_t)",
        paper="GSPO, arXiv 2507.18071, eq. 13–17", surrogate=clipped,
        axes=Axes(ratio_level="sequence-token", eps_low=3e-4, eps_high=4e-4, aggregation="seq-mean-token-mean"),
        differs="nothing; with one advantage an answer its gradient is gspo's, token for token. It is verl's gspo",
    ),
    Algorithm(
        says="dapo: GRPO with clip-higher, the mean over tokens, dynamic sampling and a soft penalty on overlong answers",
        equation=f"R of n tokens less min(max(n − (L − C), 0)/C, 1);  {GROUP};  {CLIP}, ε_high > ε_low;  "
                 "Σ ℓ_t/N over the groups with contrast",
        paper="DAPO, arXiv 2503.14476, eq. 8 to 13", surrogate=clipped,
        axes=Axes(eps_high=0.28, shaping=Shaping(overlong_penalty=1.0)),
        differs="the paper samples until the step is full of groups with contrast (--dynamic-sampling refill), which "
                "costs ever more as the job is solved; AReaL lets the step shrink, and so does this. L is "
                "--max-new-tokens and C a fifth of it, the paper's share; AReaL takes 512 of 4,096",
        job={"pace": Pace(dynamic_sampling="shrink")},
    ),
    Algorithm(
        says="sapo: GRPO with soft gates instead of a clip; mean over answers",
        equation=f"{GROUP};  ℓ_t = −(4/τ)·σ(τ(r_t − 1))·A, τ by A's sign;  mean over an answer, then over answers",
        paper="SAPO, arXiv 2511.20347", surrogate=sapo, axes=Axes(aggregation="seq-mean-token-mean"),
        differs="AReaL averages over tokens",
    ),
    Algorithm(
        says="decoupled_ppo: GRPO's advantage; ρ = π_prox/μ times the clipped ratio around π_prox; for stale samples",
        equation=f"{GROUP};  sg(π_prox/μ)·ℓ_t, 0 where π_prox/μ > 5;  {CLIP};  Σ/N",
        paper="arXiv 2110.00641; AReaL, arXiv 2505.24298, eq. 5", surrogate=clipped,
        axes=Axes(correction=Correction("mask")),
        differs="the papers do not bound ρ (--correction.kind truncate --correction.high inf); AReaL's code masks tokens "
                "at 5 by default and applies no ρ at all unless rejection_sampling is set",
    ),
    Algorithm(
        says="decoupled_loglinear: decoupled_ppo with π_prox interpolated between sampler and current policy, no pass",
        equation="log π_prox ≈ log μ + α(log π_θ − log μ), α = (v − v_b)/(v + u/U − v_b);  then decoupled_ppo",
        paper="A-3PO, arXiv 2512.06547", surrogate=clipped, axes=Axes(correction=Correction("mask"), prox="loglinear"),
        differs="AReaL labels π_prox's version one late (fresh tokens get α = 0) and pairs it with the next token's "
                "log-prob",
    ),
    Algorithm(
        says="m2po: GRPO's advantage; −(π_θ/μ)·A; the stalest tokens left out until the second moment is small",
        equation=f"{GROUP};  ℓ_t = −(π_θ/μ)·A;  tokens with A·log ρ > 0, ρ = π_prox/μ, go, largest first, until "
                 "mean (log ρ)² < 0.04",
        paper="M2PO, arXiv 2510.01161", surrogate=importance, axes=Axes(prox="behave", m2_threshold=0.04),
        differs="AReaL tests all tokens, with its decoupled objective, and divides by the tokens that are left",
    ),
    Algorithm(
        says="trpo: GRPO's advantage; natural gradient with a bound on the KL of each step",
        equation="max mean r·A  s.t.  D_KL(π_old‖π_θ) ≤ δ:  θ += √(2δ/gᵀF⁻¹g)·F⁻¹g, then a line search on D_KL",
        paper="TRPO, arXiv 1502.05477", surrogate=importance, axes=Axes(trpo=Trpo()), natural=True,
        differs="the paper has no language models; KL is a mean over sampled tokens of the whole distribution's, and the "
                "line search solves for the step's length instead of halving it",
    ),
    Algorithm(
        says="ppo: A from a critic by GAE, whitened; clipped ratio; KL taken out of the reward",
        equation=f"r_t = −β(log μ − log π_ref) + [R at the end];  A = GAE(γ, λ);  {CLIP};  V: ½(V − (A + V_old))²",
        paper="PPO, arXiv 1707.06347; GAE, arXiv 1506.02438; KL in the reward, arXiv 1909.08593", surrogate=clipped,
        axes=Axes(reward_norm=Norm(), adv_norm=Norm("batch", "batch"), kl_weight=0.1, kl_in="reward", kl_estimator="k1"),
        differs="λ = 1 as AReaL and OpenRLHF have it; the paper's robots and TRL take 0.95. The critic learns alone for "
                "10 steps (VC-PPO, arXiv 2503.01491). verl adds a dual clip of 3",
        critic=True,
    ),
    Algorithm(
        says="diagnostic: rewards and advantages whitened over the batch, KL 0.05, short answers: does anything move?",
        equation=f"A = whiten(whiten(clip(R, −10, 10)) − 0.05·k1);  {CLIP};  Σ ℓ_t/N",
        paper="AReaL's guide to runs that do not learn (arXiv 2505.24298)", surrogate=clipped,
        axes=Axes(reward_norm=Norm("batch", "batch"), adv_norm=Norm("batch", "batch"), kl_weight=0.05, kl_in="reward",
                  kl_estimator="k1", shaping=Shaping(clip=10.0)),
        differs="nothing; the clip does nothing to rewards of 0 and 1",
        job={"samples_per_prompt": 8, "max_new_tokens": 64},
    ),
]  # fmt: skip
ALGORITHMS: dict[str, Algorithm] = {row.name: row for row in ROWS}


def chosen(name: str, axes: Axes, stale: bool = False, longest: int | None = None) -> Algorithm:
    """The row of this name with these axes; what they leave open depends on whether samples may be stale, and on how
    many tokens an answer may have."""
    return replace(ALGORITHMS[name], axes=axes).settled(stale, longest)


def main(words: list[str]) -> int:
    """Print the table, or one row of it; with --plot FILE draw the surrogates. Returns the exit status."""
    if words[:1] == ["--plot"] and len(words) == 2:
        from nanorl.config import Refused
        from nanorl.plots import surrogates

        try:
            print(surrogates(words[1]))
        except Refused as error:
            print(error, file=sys.stderr)
            return 2
    elif not words:
        print("\n".join(row.says for row in ROWS))
    elif len(words) == 1 and words[0] in ALGORITHMS:
        row = ALGORITHMS[words[0]]
        unlike = ", ".join(f"{axis} {value}" for axis, value in differences(row.axes, GRPO)) or "none"
        print(f"{row.says}\n\n  equation   {row.equation}\n  paper      {row.paper}\n  differs    {row.differs}\n"
              f"  surrogate  {row.surrogate.__doc__}  {'natural gradient step' if row.natural else 'AdamW'}\n"
              f"  axes       unlike grpo's: {unlike}\n  unused     {', '.join(sorted(row.unused()))}\n"
              f"  run        python train_{'ppo' if row.critic else 'grpo'}.py {words[0]}")  # fmt: skip
    elif words in (["-h"], ["--help"]):
        print(__doc__)
    else:
        print(f"python -m nanorl.algorithms [NAME | --plot FILE]; the names are {', '.join(ALGORITHMS)}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
