"""Flags: what is accepted reproduces itself, what is refused says why in one line, before any work."""

import dataclasses
import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from nanorl import config, files, tasks, tiny
from nanorl import launch as launching
from nanorl.algorithms import ALGORITHMS, chosen
from nanorl.axes import FOREIGN, Axes, flat
from nanorl.cli import bare, command, describe, parse
from nanorl.config import Config, Refused, Remote, dashed, divisors_near
from nanorl.faults import Scoring
from nanorl.pace import Pace
from tests.worlds import changed

ROOT = Path(__file__).resolve().parents[1]
PACE, REMOTE, SCORING, AXES = ([dashed(name) for name, _ in flat(group())] for group in (Pace, Remote, Scoring, Axes))
JOB = [dashed(name) for name, _ in flat(Config()) if not name.startswith(("pace.", "remote.", "scoring."))]
EVERY = JOB + PACE + REMOTE + SCORING + AXES
PAGE = {name: "ppo" if row.critic else "grpo" for name, row in ALGORITHMS.items()}  # whose script runs it


@pytest.fixture(autouse=True)
def handlers():
    """`launch` takes SIGTERM over; a test gives it back."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture(scope="module")
def model(tmp_path_factory, tiny_model):
    """A folder with a model that has room for 256 tokens, a token a character."""
    folder = tmp_path_factory.mktemp("model")
    for part in tiny_model:
        part.save_pretrained(folder)
    return folder


@pytest.fixture
def desk(tmp_path, monkeypatch, model):
    """An empty folder to work in; MODEL in flags means the model's folder. Warm starts, which take long, fail."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tiny, "warm_started", lambda how: pytest.fail("work began before the refusal"))
    return tmp_path


def launched(*flags):
    """The exit status of these flags; training itself fails."""
    return launching.launch("train_grpo.py", "grpo", lambda run: pytest.fail("trained"), [*map(str, flags)])


def refusal(capfd, *flags):
    """The one line on stderr with which these flags are refused, with status 2."""
    capfd.readouterr()
    status, lines = launched(*flags), capfd.readouterr().err.splitlines()
    assert (status, len(lines)) == (2, 1), lines
    assert lines[0].startswith("train_grpo.py: ")
    return lines[0].removeprefix("train_grpo.py: ")


def helped(capsys, *words):
    """What these words and --help print, as {flag: text}; a flag that takes away counts as the one it takes away."""
    with pytest.raises(SystemExit) as exit:
        parse([*words, "--help"], *(PAGE[name] for name in words))
    assert exit.value.code == 0
    shown = {}
    for line in capsys.readouterr().out.splitlines():
        if flag := re.match(r"[│ ] (?:-h, )?(--[a-z][a-z0-9.-]+)", line):
            text = shown[flag[1].replace(".no-", ".")] = []
            line = line[flag.end() :]
        if shown:
            text.append(line.strip("│ "))
    return {flag: " ".join(text) for flag, text in shown.items() if flag != "--help"}


# ------------------------------------------------------------------------------------------------ help and names


def test_help_shows_every_flag_of_the_job_with_its_rule_and_at_most_35(capsys):
    shown = helped(capsys)
    assert set(shown) == set(JOB) and len(shown) <= 35
    for flag, text in shown.items():
        assert re.search(r"[a-z].{15,}\.\)? *\(default: ", text), f"{flag} has no text"


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_axes_that_an_algorithm_looks_at_are_a_second_group(capsys, name):
    shown = helped(capsys, name)
    used = [dashed(axis) for axis, _ in flat(Axes()) if axis.split(".")[0] not in ALGORITHMS[name].unused()]
    assert set(shown) == {*JOB, *PACE, *REMOTE, *SCORING, *used}
    assert f"(default: {ALGORITHMS[name].axes.aggregation})" in shown["--aggregation"]  # its own, not grpo's
    for flag in PACE + REMOTE + SCORING + used:
        assert re.search(r"[a-z].{15,}\.\)? *\(default: ", shown[flag]), f"{flag} has no text"


def test_the_script_shows_its_help_without_torch():
    code = """
import runpy, sys
sys.argv = ["train_grpo.py", "--help"]
try:
    runpy.run_path("train_grpo.py", run_name="__main__")
except SystemExit as exit:
    print(exit.code, {"torch", "transformers"} & {*sys.modules})"""
    said = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "--prompts-per-step" in said and said.splitlines()[-1] == "0 set()"


@pytest.mark.parametrize("flag", [flag for flag in EVERY if len(flag) > 4])
def test_a_misspelt_flag_is_refused_with_the_right_one(capsys, flag):
    middle = len(flag) // 2
    before, (a, b), after = flag[:middle], flag[middle : middle + 2], flag[middle + 2 :]
    wrong = before + b + (a if len(flag) > 7 and len(flag) % 2 else "") + after  # two letters swapped, or one left out
    if wrong not in EVERY:
        with pytest.raises(SystemExit) as exit:
            parse([wrong, "1"])
        assert exit.value.code == 2 and f" {flag} " in capsys.readouterr().err.replace("\n", " ")


@pytest.mark.parametrize("name", FOREIGN)
def test_names_of_other_libraries_are_answered_with_ours(name):
    ours = FOREIGN[name]
    assert ours in EVERY and f"--{name}" not in EVERY
    for words in ([f"--{name}", "1"], [f"--{name}=1"], ["grpo", "--steps", "3", f"--{name.replace('-', '_')}", "1"]):
        with pytest.raises(Refused, match=f"--{name}: .* {ours}$"):
            parse(words)


@pytest.mark.parametrize("wrong, right", [("gpro", "grpo"), ("drgrpo", "dr_grpo"), ("rlo", "rloo")])
def test_a_misspelt_algorithm_is_refused_with_the_nearest(wrong, right):
    with pytest.raises(Refused, match=rf"^{wrong}: .*did you mean [^?]*\b{right}\b"):
        parse([wrong])
    with pytest.raises(Refused, match=".*".join(ALGORITHMS)):  # nothing is near: all of them
        parse(["xyz"])


# ------------------------------------------------------------------------------------------------ reproduction


def texts(listed=False):
    """Texts that a shell can pass on. tyro reads None as none, and takes no lists of texts that begin with -."""
    any_text = st.text(st.characters(blacklist_categories=("Cs",), blacklist_characters="\0"), max_size=6)
    text = any_text | st.sampled_from(["-1", "--beta", "a b", "it's", '"$HOME"', "a=b", "\n", "*"])
    return text.filter(lambda t: t != "None" and not (listed and t[:1] in ("", "-")))


counts, positive = st.integers(1, 10**4), st.floats(0, exclude_min=True, allow_infinity=False)
VALUES = {
    "task": st.sampled_from(["arithmetic", "gsm8k", "jsonl"]), "reward": st.sampled_from([("exact",), ("number", "format=0.2")]),
    "digits": st.integers(1, 12), "stop": st.lists(texts(listed=True), min_size=1, max_size=3).map(tuple),
    "temperature": st.floats(0.05, 100), "lr_schedule": st.sampled_from(["constant", "linear", "cosine"]),
    "remote.servers": st.sampled_from([("http://a:1",), ("http://127.0.0.1:8000", "https://b")]), "remote.weights": texts(),
    "remote.transport": st.just("disk"), "remote.mismatch": positive, "remote.patience": positive,
    "truncated": st.sampled_from(["zero", "mask", "drop"]), "shaping.form": st.just("page"),
    "shaping.clip": st.none() | positive, "scoring.on_reward_error": st.sampled_from(["drop", "stop", "0.5"]),
    **dict.fromkeys(("truncated_penalty", "shaping.bias", "shaping.scale"), st.floats(-1e6, 1e6)),
    "shaping.overlong_penalty": st.floats(0, 1e6), "scoring.reward_workers": st.integers(0, 9),
    "engine": st.sampled_from(["local", "worker", "vllm"]), "pace.max_lag": st.sampled_from([0, 3, "inf"]),
    "pace.delay": st.sampled_from([0, 2, "inf"]), "pace.dynamic_sampling": st.sampled_from(["refill", "shrink"]),
    "pace.overtake": st.sampled_from([0, 1]), "pace.max_failed": st.floats(0, 1), "pace.deadline": positive,
    "pace.restart_engine": st.just(True), "pace.engine_device": texts(),
    "dtype": st.sampled_from(["float32", "bfloat16"]), "eval_only": st.just(True),
    "eps_low": st.floats(0, 1, exclude_max=True), "kl_estimator": st.sampled_from(["k2", "k3"]),
    "aggregation": st.sampled_from(["token-sum", "constant", "bnpo"]), "updates_per_batch": st.sampled_from([2, 4]),
    "ratio_level": st.sampled_from(["token", "joint"]), "prox": st.sampled_from(["loglinear", "recompute"]),
    "kl_in": st.sampled_from(["loss", "reward"]), "correction.kind": st.sampled_from(["none", "truncate", "mask"]),
    "correction.level": st.sampled_from(["token", "joint"]), "correction.low": st.floats(0, 1),
    "correction.high": st.floats(1, exclude_min=True), "critic.trunk": st.sampled_from(["own", "shared"]),
    "ref_model": texts().filter(bool), "trpo.delta": st.floats(1e-9, allow_infinity=False),
    **dict.fromkeys(("tau_pos", "tau_neg"), st.floats(1e-3, 1e3)),
    **{f"{norm}.{axis}": st.sampled_from(values) for norm in ("reward_norm", "adv_norm") for axis, values in (
        ("mean_level", ["group", "batch"]), ("std_level", ["group", "batch", "none"]), ("leave_one_out", [True, False]),
        ("ddof", [0, 1]), ("eps_in", ["std", "variance"]))},
    **dict.fromkeys(("m2_threshold", "critic.clip", "critic.huber", "dual_clip"), st.none() | positive),
    **dict.fromkeys(("gamma", "critic.gae_lambda"), st.floats(0, 1)), "critic.bootstrap": st.booleans(),
    **dict.fromkeys(("entropy_weight", "trpo.damping"), st.floats(0, allow_infinity=False)),
    **dict.fromkeys(("data", "eval_data", "model", "system_prompt", "prompt_suffix", "device"), texts()),
    **dict.fromkeys(("weight_decay", "eps_high", "kl_weight"), st.floats(0, allow_infinity=False)),
    **dict.fromkeys(("lr", "max_grad_norm", "reward_norm.eps", "adv_norm.eps", "critic.weight", "critic.lr_factor"), positive),
    **dict.fromkeys(("warmup_steps", "eval_every", "save_every", "seed", "critic.warmup_steps"), st.integers(0, 10**6)),
}  # fmt: skip


def some_of(group, unused=()):
    """Values for some of a group's settings, at most eight."""
    names = [name for name, _ in flat(group()) if name.split(".")[0] not in {"out", "resume", "dry_run", *unused}]
    some = st.lists(st.sampled_from(names), max_size=8, unique=True)
    return some.flatmap(lambda chosen: st.fixed_dictionaries({name: VALUES.get(name, counts) for name in chosen}))


def again(name, cfg, axes):
    """The settings that the command printed at the start of a run asks for."""
    said = describe("train.py", name, cfg, axes)
    words = shlex.split(said[said.index("\nagain: ") :].removeprefix("\nagain: "))
    assert words[:3] == ["python", "train.py", name]
    return parse(words[2:], PAGE[name])


@given(st.sampled_from([*ALGORITHMS]), st.data())
def test_the_printed_command_gives_the_same_settings_again(name, data):
    """Of the job and of the axes, nested ones, none and infinity among them."""
    job, others = data.draw(some_of(Config)), data.draw(some_of(Axes, ALGORITHMS[name].unused()))
    if "remote.servers" in job:
        job["engine"] = "vllm"
    parts = {part: {flag.removeprefix(f"{part}."): job.pop(flag) for flag in [*job] if flag.startswith(f"{part}.")}
             for part in ("pace", "remote", "scoring")}  # fmt: skip
    job |= {"pace": Pace(**parts["pace"]), "remote": Remote(**parts["remote"]), "scoring": Scoring(**parts["scoring"])}
    cfg, axes = config.resolved(Config(**{**ALGORITHMS[name].job, **job})), changed(ALGORITHMS[name].axes, **others)
    try:
        config.check(name, cfg, axes)
    except Refused:
        assume(False)
    assert again(name, cfg, axes) == (name, cfg, axes)


@pytest.mark.parametrize("name, others", [
    ("decoupled_ppo", {"correction.kind": "truncate", "correction.high": float("inf")}),
    ("ppo", {"critic.clip": None, "critic.huber": 2.0, "critic.bootstrap": True, "critic.gae_lambda": 0.95}),
    ("m2po", {"m2_threshold": None}), ("grpo", {"dual_clip": 3.0, "kl_weight": 0.1, "ref_model": "--beta"}),
    ("rloo", {"reward_norm.leave_one_out": False}), ("grpo", {"adv_norm.std_level": "batch", "adv_norm.ddof": 0}),
])  # fmt: skip
def test_nested_axes_none_infinity_and_what_is_taken_away_are_printed_as_flags(name, others):
    cfg, axes = config.resolved(Config()), changed(ALGORITHMS[name].axes, **others)
    assert again(name, cfg, axes) == (name, cfg, axes)


def test_an_algorithm_has_defaults_for_its_job(capsys):
    """They give way to flags, and a command that repeats them says nothing."""
    _, cfg, axes = parse(["diagnostic"])
    assert (cfg.samples_per_prompt, cfg.max_new_tokens) == (8, 64)
    assert command("t.py", "diagnostic", cfg, axes) == "python t.py diagnostic"
    assert "(default: 64)" in helped(capsys, "diagnostic")["--max-new-tokens"]
    _, cfg, axes = parse(["diagnostic", "--max-new-tokens", "5"])
    assert cfg.max_new_tokens == 5 and command("t.py", "diagnostic", cfg, axes).endswith("diagnostic --max-new-tokens 5")


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_run_is_resumed_by_its_own_axes(desk, name):
    """Nested ones too, as config.json keeps them; flags beside --resume change them."""
    others = {"gamma": 0.25, "adv_norm.mean_level": "group", "adv_norm.std_level": "batch", "adv_norm.eps": 0.125}
    saved = changed(ALGORITHMS[name].axes, **others, **({"critic.clip": None} if PAGE[name] == "ppo" else {}))
    cfg = config.resolved(Config(**ALGORITHMS[name].job, stop=("x",), steps=7))
    (desk / "run").mkdir()
    parts = {"algorithm": name, "config": dataclasses.asdict(cfg), "axes": dataclasses.asdict(saved)}
    (desk / "run" / "config.json").write_text(json.dumps(parts))
    resumed = dataclasses.replace(cfg, resume="run")
    assert parse(["--resume", "run"], PAGE[name]) == (name, resumed, saved)
    assert parse([name, "--resume=run", "--gamma", "0.5"], PAGE[name])[2] == changed(saved, gamma=0.5)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_run_is_not_resumed_by_the_script_of_other_algorithms(desk, capfd, name):
    """It says which one does, and leaves the run as it is."""
    cfg, right = config.resolved(Config()), PAGE[name]
    wrong = {"ppo": "grpo", "grpo": "ppo"}[right]
    parts = {"algorithm": name, "config": dataclasses.asdict(cfg), "axes": dataclasses.asdict(ALGORITHMS[name].axes)}
    (desk / "run").mkdir()
    saved = desk / "run" / "config.json"
    saved.write_text(json.dumps(parts))
    for words in (["--resume", "run"], ["--resume=run", "--steps", "900"]):
        assert launching.launch(f"train_{wrong}.py", wrong, lambda run: pytest.fail("trained"), words) == 2
        (line,) = capfd.readouterr().err.splitlines()
        kind = "a" if right == "ppo" else "no"
        assert line == f"train_{wrong}.py: {name}: it has {kind} critic; python train_{right}.py --resume run"
        assert saved.read_text() == json.dumps(parts) and [*(desk / "run").iterdir()] == [saved]


@settings(max_examples=20)
@given(st.data())
def test_the_command_names_what_differs_from_the_defaults_and_nothing_else(data):
    flag = data.draw(st.sampled_from(["steps", "samples_per_prompt", "lr", "eps_high", "max_grad_norm", "seed"]))
    value = data.draw(VALUES.get(flag, st.integers(2, 10**6)))
    group = Config if hasattr(Config, flag) else Axes
    usual = getattr(group, flag)
    assume(value != usual)
    name, cfg, axes = parse([f"{dashed(flag)}={value}"])
    assert command("train_grpo.py", name, cfg, axes) == f"python train_grpo.py grpo {dashed(flag)} {value}"
    assert command("train_grpo.py", *parse([f"{dashed(flag)}={usual}"])) == "python train_grpo.py grpo"


@given(st.integers(1, 500), st.integers(2, 64), st.integers(1, 4), st.integers(1, 3), st.integers(1, 999))
def test_the_derived_counts_are_printed(prompts, samples, updates, epochs, steps):
    cfg = config.resolved(Config(prompts_per_step=prompts, samples_per_prompt=samples, updates_per_batch=updates,
                                 epochs_per_batch=epochs, steps=steps))  # fmt: skip
    said, axes = describe("train_grpo.py", "grpo", cfg, Axes()), chosen("grpo", Axes()).axes
    count = "1 update a step" if updates * epochs == 1 else f"{updates * epochs} updates a step"
    assert f"{prompts * samples} samples = {prompts} prompts × {samples}; {count}" in said
    for name, value in flat(cfg) + flat(axes):
        setting = bare(name)
        unused = setting.split(".")[0] in ALGORITHMS["grpo"].unused()
        assert bool(re.search(rf"(^|\s){setting}={re.escape(repr(value))}(\s|$)", said)) != unused


@pytest.mark.parametrize("task, digits, limit", [("arithmetic", 1, 12), ("arithmetic", 3, 24), ("jsonl", 3, 256)])
def test_the_task_sets_the_length_limit_where_the_flags_do_not(task, digits, limit):
    cfg = Config(task=task, digits=digits)
    assert config.resolved(cfg).max_new_tokens == limit
    assert config.resolved(dataclasses.replace(cfg, max_new_tokens=5)).max_new_tokens == 5


# ------------------------------------------------------------------------------------------------ refused by the flags


@pytest.mark.parametrize("flags, says", [
    ("--samples-per-prompt 1", r"^--samples-per-prompt 1: .*at least 2"),
    ("dr_grpo --samples-per-prompt 1", r"^--samples-per-prompt 1: .*at least 2"),
    ("rloo --samples-per-prompt 1", r"^--samples-per-prompt 1: .*at least 2"),
    ("--updates-per-batch 3", r"^--updates-per-batch 3: does not divide 256 samples \(32 prompts × 8\); .* 2 or 4$"),
    ("--updates-per-batch 300", r"^--updates-per-batch 300: does not divide 256 .* 256$"),
    ("rloo --updates-per-batch 2", r"^--updates-per-batch, --epochs-per-batch: .*no ratio"),
    ("rloo --epochs-per-batch 2", r"^--updates-per-batch, --epochs-per-batch: .*no ratio"),
    ("--temperature 0", r"^--temperature 0.0: .*greedy"), ("--temperature nan", r"^--temperature nan: "),
    ("--temperature -1", r"^--temperature -1.0: "), ("--temperature inf", r"^--temperature inf: "),
    *((f"{flag} 0", rf"^{flag} 0: must be at least 1$") for flag in (
        "--steps", "--prompts-per-step", "--samples-per-prompt", "--max-new-tokens", "--tokens-per-micro-batch",
        "--updates-per-batch", "--epochs-per-batch", "--digits", "--eval-problems", "--eval-samples")),
    *((f"--lr {value}", rf"^--lr {value}: ") for value in ("0.0", "nan", "inf")),
    *((f"--max-grad-norm {value}", rf"^--max-grad-norm {value}: ") for value in ("0.0", "nan", "inf")),
    *((f"{flag} -1", rf"^{flag} -1") for flag in (
        "--eval-every", "--save-every", "--warmup-steps", "--weight-decay", "--seed")),
    ("--eps-low 1", r"^--eps-low 1.0: "), ("--eps-low -0.1", r"^--eps-low -0.1: "),
    ("--eps-high nan", r"^--eps-high nan: "), ("--kl-weight -1", r"^--kl-weight -1.0: "),
    ("--reward-norm.eps 0", r"^--reward-norm.eps 0.0: "), ("--adv-norm.eps nan", r"^--adv-norm.eps nan: "),
    ("ppo", r"^ppo: it has a critic; python train_ppo.py ppo$"),
    ("--engine vllm", r"^--engine vllm: name its servers, --servers http"),
    ("--servers http://a:1", r"^--servers: only --engine vllm has servers"),
    ("--prove-every 2", r"^--prove-every: only --engine vllm has servers"),
    *((f"--engine vllm --servers {url}", rf"^--servers {url.split()[-1]}: must be addresses") for url in (
        "a:1", "ftp://a", "http://", "http://a:99999", "http://a:b", "http://a:1 http://b:1 http://a:1")),
    *((f"--engine vllm --servers http://a:1 {flag}", rf"^{flag}") for flag in (
        "--mismatch 0.0", "--mismatch inf", "--prove-every 0", "--patience nan", "--weights folder", "--restart-engine",
        "--delay 2")),
    *((flag, rf"^{flag}(.0)?: must be ") for flag in (
        "--reward-workers -1", "--reward-seconds 0", "--reward-seconds nan", "--reward-memory 0", "--on-reward-error nan",
        "--on-reward-error maybe")),
    ("--length-limit 0", r"^--length-limit 0: "), ("--digits 13", r"^--digits 13: 1 to 12"),
    ("--task jsonl", r"^--task jsonl needs --data FILE"), ("--task chess", r"^--task chess: no such task; there are arithmetic"),
    ("--task countdown", r"^--task countdown needs --model DIR"), ("--task arithmetic=0", r"^--task arithmetic=0: each task once"),
    ("--task arithmetic,arithmetic", r"^--task arithmetic,arithmetic: each task once"),
    ("--task gsm8k,jsonl --model M --data F", r"one task may read --data"),
    ("--reward nobody", r"^--reward nobody: no such verifier"), ("--reward exact exact=2", r"^--reward exact: reward/exact is taken"),
    ("--reward exact format=nan", r"^--reward format=nan: its weight must be finite"),
    ("--task gsm8k --model M", r"^--task gsm8k needs --data FILE"),
    ("--task jsonl --data rows.jsonl", r"^--task jsonl needs --model DIR"),
    ("--data rows.jsonl", r"^--data: arithmetic makes its own problems"),
    ("--eval-data rows.jsonl", r"^--data: arithmetic makes its own problems"),
    ("--resume nowhere", r"^--resume nowhere: no config.json"),
    ("--resume=nowhere", r"^--resume nowhere: no config.json"),
    ("--kl-ctl 0.1", r"^--kl-ctl: .*--kl-weight$"), ("gpro", r"^gpro: .*grpo"),
])  # fmt: skip
def test_flags_that_cannot_work_are_refused_in_one_line(desk, capfd, flags, says):
    assert re.search(says, refusal(capfd, *flags.split()))
    assert not [*desk.iterdir()]


@given(st.integers(1, 400), st.integers(1, 500))
def test_the_nearest_sizes_named_are_the_nearest_that_divide(total, wanted):
    assume(total % wanted)
    near = [int(n) for n in divisors_near(total, wanted).split(" or ")]
    assert all(total % n == 0 for n in near)
    assert not any(total % n == 0 for n in range(near[0] + 1, near[-1] if near[-1] > wanted else total + 1))
    assert near[0] < wanted and (near[-1] > wanted or wanted > total)


@pytest.mark.parametrize("content, says", [
    ("{", ""), ("[]", ""), ("{}", ""),
    ('{"architectures": ["Qwen3ForCausalLM"], "hidden_size": 32}', ""),  # a checkpoint instead of its run
    ('{"algorithm": "grpo", "config": {"gone": 1, "stop": []}, "axes": {}}', "gone"),  # of another version
    ('{"algorithm": "gone", "config": {"stop": []}, "axes": {}}', "gone"),
])  # fmt: skip
def test_a_folder_that_is_not_a_run_is_not_resumed(desk, capfd, content, says):
    (desk / "run").mkdir()
    (desk / "run" / "config.json").write_text(content)
    line = refusal(capfd, "--resume", "run")
    assert "run" in line and "config.json" in line and says in line, line


# ------------------------------------------------------------------------------------------------ refused by the input


ROW = '{"prompt": "3+4=", "answer": "7"}\n'
ROWS = "".join(json.dumps({"prompt": f"{a}+4=", "answer": str(a + 4)}) + "\n" for a in range(20))


@pytest.mark.parametrize("content, says", [
    (None, r"^--data rows.jsonl: cannot be read"),
    (b"\xff\xfe", r"^--data rows.jsonl: cannot be read"),
    (ROW + "\n" + ROW[:-3], r"^rows.jsonl, line 3: not JSON"),  # an empty line counts
    (ROW + '{"prompt": "3+4="}\n' + ROW, r'^rows.jsonl, line 2: .*"answer"'),
    (ROW + '{"answer": "7"}\n', r'^rows.jsonl, line 2: .*"prompt"'),
    (ROW + "7\n", r"^rows.jsonl, line 2: needs an object"),
    (ROW + '{"prompt": "", "answer": "7"}\n', r'^rows.jsonl, line 2: "prompt" is neither text nor'),
    (ROW + '{"prompt": [{"role": "user"}], "answer": "7"}\n', r'^rows.jsonl, line 2: "prompt" is neither text nor'),
    (ROW + '{"prompt": "3+4=", "answer": null}\n', r'^rows.jsonl, line 2: "answer" is neither'),
    (ROW + '{"prompt": "3+4=", "answer": true}\n', r'^rows.jsonl, line 2: "answer" is neither'),
    (ROWS.replace('"}', '", "after": null}'), r"after"),
    (ROW * 9, r"^--data rows.jsonl: "),  # one problem nine times cannot be both
    (ROW, r"^--data rows.jsonl: 0 problems to train on and 1 to hold out, at least one each"),
    ("", r"^--data rows.jsonl: 0 problems to train on and 0"),
    (ROW + '{"prompt": [{"role": "user", "content": "3+4="}], "answer": "7"}\n', r"chat messages .*template"),
    (ROWS + json.dumps({"prompt": "1" * 249, "answer": "7"}), r"^--max-new-tokens 8: .* 256 .*'1{40}' takes 249"),
])  # fmt: skip
def test_bad_data_is_refused_by_file_and_line(desk, capfd, model, content, says):
    if content is not None:
        (desk / "rows.jsonl").write_bytes(content if isinstance(content, bytes) else content.encode())
    line = refusal(capfd, "--task", "jsonl", "--data", "rows.jsonl", "--model", model, "--max-new-tokens", 8)
    assert re.search(says, line), line


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85"])
def test_only_a_newline_ends_a_line_of_data(desk, separator):
    rows = [{"prompt": f"3{separator}{n}=", "answer": "7"} for n in range(3)]
    Path("rows.jsonl").write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    assert [problem.prompt for problem in files.read("rows.jsonl", "jsonl")] == [row["prompt"] for row in rows]


@given(st.lists(st.integers(1, 1500), min_size=2, max_size=6), st.integers(0, 700), st.integers(1, 600),
       st.integers(200, 2000))  # fmt: skip
def test_prompts_fit_if_and_only_if_the_longest_does(lengths, suffix, answer, room):
    problems = [tasks.Problem("1" * n, "7") for n in lengths]
    task = tasks.Task("", lambda number: problems[1], problems[:1], max, "2" * suffix, str, (*problems,))
    fits = max(lengths) + suffix + answer <= room
    try:
        tasks.check_lengths(task, tiny.tokenizer(), Config(task="jsonl", max_new_tokens=answer), room)
        assert fits
    except Refused as refused:
        assert not fits and f"--max-new-tokens {answer}: " in str(refused)


def nothing(model):
    Path("M").mkdir()


def a_file(model):
    Path("M").write_text("weights")


def endless(model):
    """Neither the tokenizer nor the generation config names an end token."""
    shutil.copytree(model, "M")
    inner = tiny.tokenizer().backend_tokenizer
    PreTrainedTokenizerFast(tokenizer_object=inner, pad_token=tiny.PAD, unk_token=tiny.PAD).save_pretrained("M")
    for file in ("config.json", "generation_config.json"):
        said = json.loads((Path("M") / file).read_text())
        (Path("M") / file).write_text(json.dumps(said | {"eos_token_id": None}))


def torn(model):
    shutil.copytree(model, "M")
    (Path("M") / "model.safetensors").write_bytes((model / "model.safetensors").read_bytes()[:1000])


def another(model):
    """config.json is not that of the weights."""
    shutil.copytree(model, "M")
    said = json.loads(Path("M/config.json").read_text())
    Path("M/config.json").write_text(json.dumps(said | {"hidden_size": 64}))


@pytest.mark.parametrize("make, says", [
    (nothing, r"^--model M: no config.json"), (a_file, r"^--model M: no config.json"),
    (lambda model: None, r"^--model M: cannot be loaded"), (endless, r"^--model.*end token"),
    (torn, r"^--model M: cannot be loaded"), (another, r"^--model M: cannot be loaded"),
])  # fmt: skip
def test_what_is_no_model_to_train_is_refused(desk, capfd, model, make, says):
    make(model)
    line = refusal(capfd, "--model", "M")
    assert re.search(says, line), line


# ------------------------------------------------------------------------------------------------ refused by the place


@pytest.mark.parametrize("device", ["banana", "cuda:99"])
def test_a_device_that_is_not_there_is_refused(desk, capfd, model, device):
    assert refusal(capfd, "--model", model, "--device", device).startswith(f"--device {device}: ")
    flags = ("--model", model, "--engine", "worker", "--engine-device", device)
    assert refusal(capfd, *flags).startswith(f"--engine-device {device}: ")


def test_an_output_folder_in_use_is_refused_before_the_warm_start(desk, capfd):
    (desk / "mine").mkdir()
    (desk / "mine" / "thesis.tex").touch()
    (desk / "file").touch()
    assert refusal(capfd, "--out", "mine").startswith("--out mine: ")
    assert refusal(capfd, "--out", "file").startswith("--out file: ")
    assert refusal(capfd, "--out", "file/run").startswith("--out file/run: ")
    assert sorted(path.name for path in desk.rglob("*")) == ["file", "mine", "thesis.tex"]


def test_too_little_disk_is_refused_and_leaves_nothing_in_the_way(desk, capfd, monkeypatch, model):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9, 10**6))
    first, again = (refusal(capfd, "--model", model, "--out", "run") for _ in range(2))
    assert re.search(r"^--out run: .*GB", first) and again == first


# ------------------------------------------------------------------------------------------------ only looking


def test_a_dry_run_shows_the_prompt_and_the_memory_and_leaves_nothing(desk, capfd, model):
    flags = ("--digits", 2, "--eval-problems", 8, "--prompt-suffix", "=0", "--kl-weight", 0.1)
    assert launched("--model", model, "--dry-run", *flags) == 0
    said = capfd.readouterr().out
    assert "256 samples = 32 prompts × 8" in said and "again: python train_grpo.py grpo --digits 2 " in said
    a, b = map(int, re.search(r"8 tokens.*\n(\d\d)\+(\d\d)==0\n", said).groups())
    assert f"answer '{a + b}'" in said
    shown = re.findall(r"^  (\w.*?) +about +([\d.]+) GB", said, re.MULTILINE)
    sizes = {what: float(size) for what, size in shown}
    weights = sum(tensor.numel() for tensor in tiny.model(0).parameters())
    assert sizes.pop("on disk, a checkpoint") == pytest.approx(12 * weights / 1e9, abs=0.005)
    assert sizes["weights, gradients, Adam (float32)"] == pytest.approx(16 * weights / 1e9, abs=0.005)
    assert sizes["reference"] == pytest.approx(4 * weights / 1e9, abs=0.005)
    assert sizes.pop("together") == pytest.approx(sum(sizes.values()), abs=0.005 * len(sizes))
    assert not [*desk.iterdir()]
