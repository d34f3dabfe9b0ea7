"""The axes: none is dead, each is a flag, numbers without meaning and combinations that cannot work are refused."""

import dataclasses
import json
import math
import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nanorl import cli, config
from nanorl.algorithms import ALGORITHMS, chosen
from nanorl.axes import Axes, Correction, Norm, differences, flat, idle, rebuilt, wrong
from nanorl.config import Config, Refused
from nanorl.objective import sapo
from tests.worlds import NAN, algorithm, changed, group, said, sample, slopes, world

NAMES = [name for name, _ in flat(Axes())]

# For every axis a row, another value that must make a difference there, and what gives it something to do.
OTHER = {
    "reward_norm.mean_level": ("grpo", "batch", {}), "reward_norm.std_level": ("grpo", "batch", {}),
    "reward_norm.leave_one_out": ("dr_grpo", True, {}), "reward_norm.ddof": ("grpo", 0, {}),
    "reward_norm.eps": ("grpo", 0.5, {}), "reward_norm.eps_in": ("grpo", "variance", {"reward_norm.eps": 0.5}),
    "gamma": ("reinforce", 0.9, {}), "adv_norm.mean_level": ("ppo", "none", {}),
    "adv_norm.std_level": ("ppo", "group", {}), "adv_norm.ddof": ("ppo", 0, {}),
    "adv_norm.leave_one_out": ("ppo", True, {"adv_norm.std_level": "none"}),
    "adv_norm.eps": ("ppo", 0.5, {}), "adv_norm.eps_in": ("ppo", "variance", {"adv_norm.eps": 0.5}),
    "ratio_level": ("grpo", "sequence", {}), "eps_low": ("grpo", 0.9, {}), "eps_high": ("grpo", 3.0, {}),
    "dual_clip": ("grpo", 1.02, {"eps_high": 0.01}), "tau_pos": ("sapo", 3.0, {}), "tau_neg": ("sapo", 3.0, {}),
    "prox": ("grpo", "loglinear", {}), "correction.kind": ("grpo", "truncate", {}),
    "correction.level": ("decoupled_ppo", "sequence", {}), "correction.low": ("decoupled_ppo", 0.9, {}),
    "correction.high": ("decoupled_ppo", 1.1, {}), "m2_threshold": ("grpo", 0.01, {}), "kl_weight": ("grpo", 0.1, {}),
    "kl_in": ("grpo", "reward", {"kl_weight": 0.1, "kl_estimator": "k2"}),
    "kl_estimator": ("grpo_deepseekmath", "k2", {}), "entropy_weight": ("grpo", 0.1, {}),
    "aggregation": ("grpo", "token-sum", {}), "length_limit": ("dr_grpo", 5, {}), "critic.weight": ("ppo", 0.5, {}),
    "critic.gae_lambda": ("ppo", 0.5, {}), "critic.clip": ("ppo", 0.1, {}), "critic.huber": ("ppo", 0.1, {}),
    "truncated": ("grpo", "mask", {}), "truncated_penalty": ("grpo", 3.0, {"truncated": "penalty"}),
    "shaping.overlong_penalty": ("grpo", 1.0, {}), "shaping.overlong_tokens": ("dapo", 3, {}),
    "shaping.overlong_limit": ("dapo", 6, {}), "shaping.bias": ("reinforce", -0.5, {}),
    "shaping.scale": ("reinforce", 10.0, {}), "shaping.clip": ("reinforce", 0.1, {}),
    "shaping.form": ("reinforce", "page", {"shaping.bias": -0.5, "shaping.scale": 10.0}),
}  # fmt: skip

# Axes that are read outside of the loss, by critic.py, trpo.py, run.py and the scripts, whose tests look at them.
ELSEWHERE = {
    "ref_model": ("grpo", "M", {"kl_weight": 0.1}), "critic.trunk": ("ppo", "shared", {}),
    "critic.lr_factor": ("ppo", 2.0, {}), "critic.bootstrap": ("ppo", True, {}), "critic.warmup_steps": ("ppo", 3, {}),
    "trpo.delta": ("trpo", 0.02, {}), "trpo.damping": ("trpo", 0.2, {}), "trpo.iterations": ("trpo", 5, {}),
    "trpo.share": ("trpo", 0.5, {}),
}  # fmt: skip
NUMBERS = [name for name, (_, value, _) in {**OTHER, **ELSEWHERE}.items()
           if type(value) in (int, float) and not name.endswith("ddof")]  # fmt: skip
SIGNED = {"truncated_penalty", "shaping.bias"}


def pulls(name: str, axes: dict) -> torch.Tensor:
    """Every slope of an update in this row, one after another."""
    batch = world(7)
    return torch.stack(slopes(batch, algorithm(name, **axes), said(batch))[1:])


def words(axes: dict) -> list[str]:
    """Flags that ask for these axes."""
    return [word for axis, value in axes.items()
            for word in ([config.dashed(axis)] if value is True else [config.dashed(axis), str(value)])]  # fmt: skip


def asked(name: str, flags: list[str]) -> tuple[str, Config, Axes]:
    """What the script of this row makes of these flags."""
    return cli.parse([name, *flags], "ppo" if ALGORITHMS[name].critic else "grpo")


# ---- no axis is dead, and each is a flag


def test_every_axis_has_a_case():
    assert {*OTHER} | {*ELSEWHERE} == {*NAMES} and not {*OTHER} & {*ELSEWHERE}


@pytest.mark.parametrize("axis", OTHER)
def test_no_option_is_dead(axis):
    name, value, beside = OTHER[axis]
    one, other = pulls(name, beside), pulls(name, {**beside, axis: value})
    assert dict(flat(algorithm(name, **beside).axes))[axis] != value
    assert (one - other).norm() > 1e-3 * one.norm() > 0


@pytest.mark.parametrize("axis", NAMES)
def test_every_axis_is_a_flag(axis):
    """Alone or beside what it needs, in the words of the command line, in the row that reads it."""
    name, value, beside = {**OTHER, **ELSEWHERE}[axis]
    _, _, axes = asked(name, words({**beside, axis: value}))
    assert axes == changed(ALGORITHMS[name].axes, **beside, **{axis: value})


def test_flat_names_every_setting_once_with_its_value():
    axes = Axes(reward_norm=Norm("batch", eps=0.5), correction=Correction("mask", high=math.inf), gamma=0.5)
    pairs = flat(axes)
    assert len(pairs) == len(dict(pairs)) == len(NAMES) and not any(dataclasses.is_dataclass(v) for _, v in pairs)
    for name, value in pairs:
        part, _, inner = name.rpartition(".")
        assert getattr(getattr(axes, part), inner) == value if part else getattr(axes, name) == value


@pytest.mark.parametrize("axis", NAMES)
def test_differences_are_what_differs(axis):
    name, value, beside = {**OTHER, **ELSEWHERE}[axis]
    usual = changed(ALGORITHMS[name].axes, **beside)
    assert differences(changed(usual, **{axis: value}), usual) == [(axis, value)] and differences(usual, usual) == []


@pytest.mark.parametrize("name", ALGORITHMS)
def test_axes_outlive_json(name):
    """As config.json keeps them: nested parts, none and infinity."""
    axes = changed(ALGORITHMS[name].axes, **{"correction.high": math.inf, "critic.clip": None, "length_limit": 7})
    assert rebuilt(json.loads(json.dumps(dataclasses.asdict(axes)))) == axes


@pytest.mark.parametrize("saved", [{"gone": 1}, {"critic": {"gone": 1}}, {"correction": 3}])
def test_settings_that_there_are_not_are_an_error(saved):
    with pytest.raises(TypeError):
        rebuilt(saved)


# ---- numbers without meaning


@pytest.mark.parametrize("axis, value", [(axis, value) for axis in NUMBERS for value in (NAN, -1.0)
                                         if value != -1 or axis not in SIGNED])  # fmt: skip
def test_no_axis_takes_what_is_no_number_or_negative(axis, value):
    name, _, beside = {**OTHER, **ELSEWHERE}[axis]
    line = wrong(changed(ALGORITHMS[name].axes, **beside, **{axis: value})) or "fine"
    assert re.match(rf"--{axis.replace('_', '-')} {value}: must be ", line) and "\n" not in line


BOUNDS = {  # the last values that may be, and the first that may not
    "eps_low": ([0.0, 0.99], [1.0]), "eps_high": ([0.0, 100.0], [math.inf]), "dual_clip": ([1.3, None], [1.2, 1.0]),
    "tau_pos": ([1e-3, 1e3], [9e-4, 1001.0]), "tau_neg": ([1e-3, 1e3], [9e-4, 1001.0]), "gamma": ([0.0, 1.0], [1.01]),
    "kl_weight": ([0.0], [math.inf]), "entropy_weight": ([0.0], [math.inf]),
    "m2_threshold": ([None, 1e-9], [0.0, math.inf]),
    "length_limit": ([None, 1], [0]), "reward_norm.eps": ([1e-9], [0.0, math.inf]),
    "adv_norm.eps": ([1e-9], [0.0, math.inf]), "correction.low": ([0.0, 1.0], [1.01]),
    "correction.high": ([1.01, math.inf], [1.0]), "critic.lr_factor": ([0.1], [0.0, math.inf]),
    "critic.weight": ([0.1], [0.0, math.inf]), "critic.gae_lambda": ([0.0, 1.0], [1.01]),
    "critic.clip": ([None, 1e-3], [0.0]), "critic.huber": ([None, 1e-3], [0.0]), "critic.warmup_steps": ([0], []),
    "trpo.delta": ([1e-9, 9.0], [9e-10, math.inf]), "trpo.damping": ([0.0], [math.inf]), "trpo.iterations": ([1], [0]),
    "trpo.share": ([1e-3, 1.0], [0.0, 1.01]), "shaping.overlong_penalty": ([0.0, 9.0], [math.inf]),
    "shaping.overlong_tokens": ([None, 1], [0]), "shaping.overlong_limit": ([None, 1], [0]),
    "shaping.bias": ([-9.0, 9.0], [math.inf, -math.inf]), "shaping.scale": ([1e-9, 9.0], [0.0, math.inf]),
    "shaping.clip": ([None, 1e-9], [0.0, math.inf]), "truncated_penalty": ([-9.0, 9.0], [math.inf, -math.inf]),
}  # fmt: skip


@pytest.mark.parametrize("axis", NUMBERS)
def test_the_bounds_of_every_number(axis):
    good, bad = BOUNDS[axis]
    for value in good:
        assert wrong(changed(Axes(), **{axis: value})) is None
    for value in bad:
        line = wrong(changed(Axes(), **{axis: value})) or "fine"
        assert line.startswith(f"--{axis.replace('_', '-')} {value}: must be ")


K1 = {"kl_weight": 0.1, "kl_estimator": "k1"}


@pytest.mark.parametrize("axes, says", [
    (K1, "--kl-estimator k1: as a loss its gradient is 0"),
    ({"kl_weight": 0.1, "kl_in": "reward", "kl_estimator": "k3+"}, r"--kl-estimator k3\+: .*a reward has none; use k1"),
    ({"kl_weight": 0.1, "kl_in": "reward", "kl_estimator": "rk3"}, "--kl-estimator rk3: .*use k1"),
    ({"prox": "behave", "correction.kind": "mask"}, "--correction.kind: .*--prox behave.*use --prox recompute"),
    ({"kl_weight": 0.1, "ref_model": ""}, "--ref-model '': must be a folder or an id; without it the start weights"),
])  # fmt: skip
def test_axes_that_contradict_each_other_are_wrong(axes, says):
    line = wrong(changed(Axes(), **axes)) or "fine"
    assert re.match(says, line) and "\n" not in line
    with pytest.raises(Refused, match=f"^{says}"):
        asked("grpo", words(axes))


@pytest.mark.parametrize("axes", [
    {**K1, "kl_in": "reward"}, {"kl_weight": 0.1, "ref_model": "M"}, {"prox": "behave"},
    {"reward_norm.leave_one_out": True}, {"adv_norm.mean_level": "batch", "adv_norm.leave_one_out": True},
    {"kl_weight": 0.1, "kl_estimator": "k3+"}, {"kl_weight": 0.1, "kl_estimator": "rk3"},
])  # fmt: skip
def test_their_neighbours_are_not(axes):
    assert wrong(changed(Axes(), **axes)) is None
    asked("grpo", words(axes))


# ---- combinations that cannot work, by row

ROUNDS = "--updates-per-batch, --epochs-per-batch: "


@pytest.mark.parametrize("flags, says", [
    ("sapo --correction.kind truncate", "--correction.kind, --prox: SAPO's gate .*decoupled"),
    ("sapo --prox loglinear", "--correction.kind, --prox: SAPO's gate"),
    ("sapo --prox behave", "--correction.kind, --prox: SAPO's gate"),
    *((flags, "--m2-threshold: it drops tokens, and critic, KL and entropy are over all; leave those out") for flags in (
        "ppo --m2-threshold 0.04", "m2po --entropy-weight 0.1", "m2po --kl-weight 0.1", "diagnostic --m2-threshold 0.04")),
    *((f"{name} --samples-per-prompt 1", "--samples-per-prompt 1: .*at least 2") for name, row in ALGORITHMS.items()
      if row.axes.reward_norm.mean_level == "group"),
    ("reinforce --samples-per-prompt 1 --adv-norm.mean-level group", "--samples-per-prompt 1: .*at least 2"),
    *((f"{name} {flag} 2", f"{ROUNDS}.*no ratio.*use 1 and 1, or grpo")
      for name in ("rloo", "reinforce", "reinforce_baseline") for flag in ("--updates-per-batch", "--epochs-per-batch")),
    ("trpo --updates-per-batch 2", f"{ROUNDS}a natural step is solved for"),
    ("trpo --epochs-per-batch 2", f"{ROUNDS}a natural step is solved for"),
    *((f"trpo --{flag} {value}", f"--{flag}: trpo has no optimizer; --trpo.delta sets its step") for flag, value in (
        ("lr", "0.1"), ("lr-schedule", "cosine"), ("warmup-steps", "3"), ("weight-decay", "0.1"), ("max-grad-norm", "2"))),
    ("trpo --dtype bfloat16", "--dtype bfloat16: its rounding exceeds the KL .*use float32"),
    ("rloo --eps-low 0.1", "--eps-low: rloo does not look at it"), ("m2po --eps-high 0.3", "--eps-high: m2po does not"),
    ("rloo --ratio-level sequence", "--ratio-level: rloo does not"), ("rloo --prox behave", "--prox: rloo does not"),
    ("trpo --dual-clip 3", "--dual-clip: trpo does not"), ("grpo --tau-pos 2", "--tau-pos: grpo does not"),
    ("ppo --tau-neg 2", "--tau-neg: ppo does not"), ("sapo --eps-low 0.1", "--eps-low: sapo does not"),
    ("grpo --critic.clip 0.2", "--critic.clip: grpo does"), ("grpo --critic.bootstrap", "--critic.bootstrap: grpo"),
    ("grpo --trpo.delta 0.1", "--trpo.delta: grpo does"), ("trpo --critic.huber 1", "--critic.huber: trpo does"),
])  # fmt: skip
def test_what_a_row_cannot_do_is_refused_with_the_reason(flags, says):
    name, *flags = flags.split()
    with pytest.raises(Refused, match=f"^{says}") as refusal:
        asked(name, flags)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_what_has_a_meaning_is_not_refused(name):
    """The bare row; many updates where there is a ratio; one sample where no group is a baseline, of rewards or alone."""
    row = ALGORITHMS[name]
    asked(name, [])
    if row.has_ratio and not row.natural:
        asked(name, ["--updates-per-batch", "2", "--epochs-per-batch", "2"])
    if row.axes.reward_norm.mean_level != "group":
        asked(name, ["--samples-per-prompt", "1"])
    if row.critic:
        asked(name, ["--samples-per-prompt", "1", "--adv-norm.mean-level", "group"])
    adds = {} if row.axes.m2_threshold is not None else {"entropy_weight": 0.1}
    asked(name, words({"aggregation": "constant", "length_limit": 1, "gamma": 0.5, **adds}))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_each_unused_axis_is_refused_and_each_other_is_not(name):
    """A flag that nothing reads is a mistake; so says the one line."""
    row = ALGORITHMS[name]
    for axis, (_, value, _) in {**OTHER, **ELSEWHERE}.items():
        part = axis.split(".")[0]
        axes = changed(row.axes, **{axis: value})
        if part in row.unused() and wrong(axes) is None and axes != row.axes:
            with pytest.raises(Refused, match=f"^{config.dashed(axis)}: {name} does not look at it"):
                chosen(name, axes).refuse(config.resolved(Config()), row.axes, Refused)
    assert sapo is row.surrogate or {"tau_pos", "tau_neg"} <= row.unused()


IDLE = {  # an axis: what switches it off, what the refusal advises
    "kl_in": ({}, "--kl-weight"), "kl_estimator": ({}, "--kl-weight"), "ref_model": ({}, "--kl-weight"),
    "correction.level": ({}, "--correction.kind"), "correction.low": ({}, "--correction.kind"),
    "correction.high": ({}, "--correction.kind"), "length_limit": ({}, "--aggregation"),
    "reward_norm.leave_one_out": ({"reward_norm.mean_level": "none"}, "--reward-norm.mean-level"),
    "adv_norm.leave_one_out": ({}, "--adv-norm.mean-level"), "truncated_penalty": ({}, "--truncated penalty"),
    **dict.fromkeys(("shaping.overlong_tokens", "shaping.overlong_limit"), ({}, "--shaping.overlong-penalty 1")),
    "shaping.form": ({}, "--shaping.bias -0.5 --shaping.scale 10"),
    **{f"{norm}.{axis}": ({f"{norm}.std_level": "none"}, f"--{norm.replace('_', '-')}.std-level")
       for norm in ("reward_norm", "adv_norm") for axis in ("ddof", "eps", "eps_in")},
}  # fmt: skip


@pytest.mark.parametrize("axis", NAMES)
def test_an_axis_that_another_has_switched_off_is_refused_with_the_flag_that_switches_it_on(axis):
    """And only such: where it is on, it is a flag (above)."""
    off, advice = IDLE.get(axis, ({}, ""))
    assert (axis in idle(changed(Axes(), **off))) == (axis in IDLE)
    if axis in IDLE:
        value = {**OTHER, **ELSEWHERE}[axis][1]
        flags = [f"{config.dashed(name)}={value}" for name, value in off.items()] + words({axis: value})
        with pytest.raises(Refused, match=f"^{config.dashed(axis)}: nothing looks at it here; .* add {advice}"):
            asked("grpo", flags)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_no_row_sets_an_axis_that_is_off_in_it(name):
    """But for the form of bias and scale, which waits for their numbers."""
    axes = ALGORITHMS[name].axes
    set_here = {axis for axis, _ in differences(axes, Axes())} - {"shaping.form"}
    assert not set_here & {*idle(axes)}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_script_runs_the_rows_of_its_own_kind(name):
    critic = ALGORITHMS[name].critic
    right, wrong_one = ("ppo", "grpo") if critic else ("grpo", "ppo")
    assert cli.parse([name], right)[0] == name
    says = f"^{name}: it has {'a' if critic else 'no'} critic; python train_{right}.py {name}$"
    with pytest.raises(Refused, match=says):
        cli.parse([name], wrong_one)


# ---- samples without log-probs

LOGP = [name for name, row in ALGORITHMS.items() if row.behaviour]


def test_these_rows_divide_by_the_samplers_probabilities():
    assert LOGP == ["decoupled_ppo", "decoupled_loglinear", "m2po", "ppo", "diagnostic"]


@pytest.mark.parametrize("axes", [
    {}, {**K1, "kl_in": "reward"}, {"prox": "loglinear"}, {"prox": "behave"}, {"correction.kind": "truncate"},
    {"m2_threshold": 0.1},
])  # fmt: skip
@pytest.mark.parametrize("name", ["grpo", *LOGP])
def test_a_token_without_its_log_prob_is_refused_where_it_is_divided_by(name, axes):
    algo = algorithm(name, **axes)
    good = sample((1, 2, 3), (0, 1, 1))
    unknown = replace(good, logp_behave=(0.0, -1.0, NAN))
    unsampled = replace(good, logp_behave=(NAN, -1.0, -1.0))
    algo.refuse_samples([group(good, unsampled)], Refused)
    if name == "grpo" and not axes:
        algo.refuse_samples([group(good, unknown)], Refused)
    else:
        with pytest.raises(Refused, match="^--engine: it gave a token without its log-prob") as refusal:
            algo.refuse_samples([group(good), group(good, unknown)], Refused)
        assert "\n" not in str(refusal.value)


# ---- remarks

FRESH = "samples are fresh here"
AS_IT_IS = {"ppo": ["the critic alone learns"], **dict.fromkeys(("decoupled_ppo", "decoupled_loglinear", "m2po"), [FRESH])}


def remarked(name: str, cfg: Config, axes: Axes, says: list[str]) -> bool:
    """At the start of the run these are the remarks, each known by some of its words, a line each."""
    remarks, shown = chosen(name, axes).remarks(cfg), cli.describe("train.py", name, cfg, axes)
    noted = [line.removeprefix("note: ") for line in shown.splitlines() if line.startswith("note: ")]
    return noted == remarks and len(says) == len(remarks) and all(words in line for words, line in zip(says, remarks))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_row_as_it_is_has_no_remark_but_what_one_should_know_of_it(name):
    assert remarked(*asked(name, []), AS_IT_IS.get(name, []))


@pytest.mark.parametrize("flags, says", [
    ("gspo --reward-norm.std-level none", ["no std scales"]),
    ("grpo_areal_page --reward-norm.std-level none", ["no std scales"]),
    ("dr_grpo --ratio-level sequence-token --eps-high 4e-4", ["no std scales"]),
    ("gspo --aggregation token-mean", ["counts long answers more"]), ("gspo_token --aggregation token-mean", []),
    ("grpo --ratio-level joint", ["counts long answers more"]),
    ("gspo --eps-high 0.2", ["ε = 0.2 is a token's clip"]), ("gspo_token --eps-high 0.1", ["ε = 0.1 is a token's clip"]),
    ("grpo --eps-high 4e-4", ["ε = 0.0004 is meant for the geometric mean"]), ("grpo --eps-high 0.01", []),
    ("sapo --ratio-level sequence", []),  # it has no clip
    ("diagnostic --kl-estimator k2", ["k2 in the reward has not the gradient of the KL"]),
    ("ppo --critic.warmup-steps 0", []), ("ppo --critic.warmup-steps 3", ["in the first 3 steps the critic alone learns"]),
    ("ppo --critic.warmup-steps 0 --critic.trunk shared", ["a value loss of weight 1 drowns the policy's"]),
    ("ppo --critic.warmup-steps 0 --critic.trunk shared --critic.weight 0.5", []),
    ("grpo --prox behave", [FRESH]), ("grpo --m2-threshold 0.1", [FRESH]), ("m2po --m2-threshold None", [FRESH]),
    ("decoupled_ppo --correction.kind none", []),
])  # fmt: skip
def test_what_is_mostly_a_mistake_is_remarked_and_not_refused(flags, says):
    name, *flags = flags.split()
    assert remarked(*asked(name, flags), says)


@given(st.sampled_from(["token", "sequence", "sequence-token", "joint"]), st.sampled_from(["group", "batch", "none"]),
       st.sampled_from(["group", "batch", "none"]))  # fmt: skip
def test_ratios_of_answers_with_unscaled_advantages_are_remarked(level, reward, adv):
    """Either of the two normalisations scales."""
    axes = changed(Axes(), ratio_level=level, aggregation="seq-mean-token-mean",
                   **{"reward_norm.std_level": reward, "adv_norm.std_level": adv})  # fmt: skip
    found = ["no std scales" in remark for remark in chosen("grpo", axes).remarks(Config())]
    assert any(found) == (level != "token" and reward == adv == "none")
