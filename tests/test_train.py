"""Whole runs of both pages: what a step does to the weights, what a run leaves, and that a stop changes nothing."""

import asyncio
import copy
import dataclasses
import errno
import itertools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

import train_grpo
import train_ppo
from nanorl import checkpoint, cli, objective, optimize, reward, timeline, tiny
from nanorl import launch as launching
from nanorl.algorithms import ALGORITHMS
from nanorl.critic import Critic
from nanorl.monitor import COLUMNS, KEYS, WALL_CLOCK, log
from nanorl.objective import Algorithm
from nanorl.policy import Policy
from nanorl.run import Run
from nanorl.sample import Group, Prompt, Sample, collate

ROOT = Path(__file__).resolve().parents[1]
DEFAULT = {train_grpo: "grpo", train_ppo: "ppo"}
AT_ONCE = {train_grpo: (), train_ppo: ("--critic.warmup-steps", 0)}  # the policy learns from the first step on
P, G = 4, 4
SIZES = ("--prompts-per-step", P, "--samples-per-prompt", G, "--eval-problems", 8, "--eval-every", 3)
RATE = ("--lr", 1e-3)


@pytest.fixture(autouse=True, scope="module")
def impatient():
    """A run that waits for samples which never come fails at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nanorl.run.TIMEOUT", 20.0)
        yield


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """The folder of a small model that is right now and then about a + b, so that its groups have contrast."""
    folder, tokenizer = tmp_path_factory.mktemp("start"), tiny.tokenizer()
    torch.manual_seed(0)
    net = Qwen3ForCausalLM(Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=64, pad_token_id=0, eos_token_id=1,
    ))  # fmt: skip
    rows = [tokenizer(f"{a}+{b}={a + b}").input_ids + [1] for a in range(1, 10) for b in range(1, 10)]
    ids = torch.tensor([row + [0] * (7 - len(row)) for row in rows])
    labels = torch.tensor([[-100] * 4 + row[4:] + [-100] * (7 - len(row)) for row in rows])
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for _ in range(60):
        cross_entropy(net(input_ids=ids).logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    net.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def launch(*flags, page=train_grpo, train=None):
    """The exit status of a page's script with these flags, run here; the first may name an algorithm."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        script = Path(page.__file__).name
        return launching.launch(script, DEFAULT[page], train or page.train, [*map(str, flags)])
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def addition(start, folder, *flags, rate=RATE):
    """The flags of a run on additions of one digit, whose reward is called here, so that a test may replace it."""
    return ("--model", start, "--digits", 1, "--reward-workers", 0, *SIZES, *rate, "--out", folder, *flags)


def trained(start, folder, *flags, steps=12, page=train_grpo):
    """The folder of such a run, finished."""
    assert launch(*addition(start, folder, "--steps", steps, *flags), page=page) == 0
    return folder


def lines(folder, name="metrics"):
    """The objects of a JSONL file."""
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def content(folder):
    """All of a run that its repetition has to have, bit for bit."""
    last = checkpoint.latest(folder)
    metrics = [{key: value for key, value in line.items() if not key.startswith(WALL_CLOCK)} for line in lines(folder)]
    return {"step": last.name, "metrics": metrics, "samples": (folder / "samples.jsonl").read_text(),
            "state": checkpoint.read(last)["state"],
            **{file.name: file.read_bytes() for file in last.glob("*.safetensors")}}  # fmt: skip


def same(folder, other):
    """Both runs have the same content; one key at a time, so that a difference has a name."""
    ours, theirs = content(folder), content(other)
    return ours.keys() == theirs.keys() and [key for key in ours if ours[key] != theirs[key]] == []


def moved(start, folder, prefix=""):
    """Training changed the weights of every layer: of the policy, or of a critic's trunk, prefix critic."""
    before = load_file(start / checkpoint.WEIGHTS)
    after = load_file(checkpoint.latest(folder) / f"{prefix}{checkpoint.WEIGHTS}")
    if prefix:
        before = {name.replace("model.", "trunk.", 1): tensor for name, tensor in before.items() if "lm_head" not in name}
    return all(not torch.equal(before[name], after[name]) for name in before)


@pytest.fixture
def watched(monkeypatch):
    """What happens in the runs of this test: weights before and after each step (a critic's too), passes by step.

    Of a critic without the bias of its head: that begins at the mean return, where its gradient is rounding and no more.
    `batches`: what was trained on in each step; `moments`: whether the policy's optimizer has any after it.
    `stop_at`: SIGINT reaches the process when that many steps are done.
    """
    seen = SimpleNamespace(weights=[], critics=[], passes=[], batches=[], moments=[], stop_at=None, step=0)
    begin, record, take, forward = Run.begin, Run.record, Run.take, Policy.forward

    def copied(run):
        for kept, module in ((seen.weights, run.policy.model), (seen.critics, run.critic)):
            if module is not None:
                weights = module.state_dict().items()
                kept.append({name: tensor.clone() for name, tensor in weights if name != "head.bias"})

    def watched_begin(run):
        copied(run)
        begin(run)

    def watched_take(run):
        seen.step = run.step
        if run.step == seen.stop_at:
            signal.raise_signal(signal.SIGINT)
        return take(run)

    def watched_record(run, groups, batch, *more):
        copied(run)
        seen.batches.append(batch)
        seen.moments.append(bool(run.optimizer.state))
        record(run, groups, batch, *more)

    def watched_forward(policy, batch, needs=frozenset()):
        seen.passes.append((seen.step, torch.is_grad_enabled(), batch))
        return forward(policy, batch, needs)

    for target, name, function in ((Run, "begin", watched_begin), (Run, "take", watched_take),
                                   (Run, "record", watched_record), (Policy, "forward", watched_forward)):  # fmt: skip
        monkeypatch.setattr(target, name, function)
    return seen


def pays(monkeypatch, worth):
    """The reward of this test's runs: worth(completion_ids), 1 for none, since the right answer has to earn 1, and 0 for an empty one."""
    def paid(prompt, completion, prompt_ids, completion_ids, answer, **row):
        return worth(completion_ids) if completion_ids else float(bool(completion))
    monkeypatch.setitem(reward.REWARDS, "arithmetic", paid)


def even(ids):
    """A reward that some answers to every prompt earn and some do not."""
    return float(sum(ids) % 2 == 0)


def passed(watched, step, gradient):
    """The rows of the policy's passes in a step, with or without gradient."""
    return [row for at, on, micro in watched.passes if (at, on) == (step, gradient) for row in micro.row.tolist()]


def equal(one, other):
    """Two sets of weights are the same, bit for bit."""
    return all(torch.equal(one[name], other[name]) for name in one)


def changed(weights):
    """For each step: did it change the weights?"""
    return [not equal(*pair) for pair in zip(weights, weights[1:])]


# ------------------------------------------------------------------------------------------------ a step


def test_weights_move_where_a_group_has_contrast_and_nowhere_else(start, tmp_path, watched, monkeypatch):
    pays(monkeypatch, lambda ids: even(ids) if watched.step in (1, 3) else 0.5)
    folder = trained(start, tmp_path / "run", "--weight-decay", 0.1, steps=5)
    assert changed(watched.weights) == [False, True, False, True, False]
    assert [line["contrast"] > 0 for line in lines(folder)[1:]] == changed(watched.weights)
    assert {step for step, _, _ in watched.passes} == {1, 3}


@pytest.mark.parametrize("name", ["grpo", "rloo", "ppo"])
def test_the_better_half_becomes_more_likely(start, tmp_path, watched, monkeypatch, name):
    """Pay for answers of an even sum: they are sampled more and more. A wrong sign would make them rare."""
    pays(monkeypatch, even)
    page = train_ppo if name == "ppo" else train_grpo
    assert launch(name, *addition(start, tmp_path / "run", "--steps", 30, "--lr", 3e-3, "--eval-every", 0), page=page) == 0
    rewards = [line["reward"] for line in lines(tmp_path / "run")]
    assert sum(rewards[-5:]) > sum(rewards[:5]) + 1


@pytest.mark.parametrize("updates, epochs", [(1, 1), (2, 1), (1, 2), (4, 3)])
def test_only_rows_of_later_updates_cost_a_pass_without_gradient(start, tmp_path, watched, updates, epochs):
    trained(start, tmp_path / "run", "--updates-per-batch", updates, "--epochs-per-batch", epochs, steps=3)
    for step in range(3):
        scored = passed(watched, step, gradient=False)
        assert len(scored) == len(set(scored))
        assert len(scored) == (P * G * (updates - 1) // updates if epochs == 1 else P * G)


@pytest.mark.parametrize("kl_weight", [0, 0.1])
def test_rows_without_advantage_stay_out_of_the_passes_unless_they_have_a_kl_term(start, tmp_path, watched, kl_weight):
    folder = trained(start, tmp_path / "run", "--kl-weight", kl_weight, steps=4)
    rows = lines(folder, "samples")
    for step in range(4):
        now = [row["reward"] for row in rows if row["step"] == step + 1]
        contrast = {i for i in range(P * G) if len({*now[i // G * G : i // G * G + G]}) > 1}
        trains = passed(watched, step, gradient=True)
        assert sorted(trains) == (list(range(P * G)) if kl_weight else sorted(contrast))
        assert lines(folder)[step + 1]["trained_rows"] == len(trains) / (P * G)
    assert any(line["contrast"] < 1 for line in lines(folder)[1:])


@pytest.mark.parametrize("page", [train_grpo, train_ppo], ids=DEFAULT.get)
def test_the_size_of_micro_batches_does_not_change_the_weights(start, tmp_path, watched, page):
    trained(start, tmp_path / "one", *AT_ONCE[page], steps=2, page=page)
    trained(start, tmp_path / "many", "--tokens-per-micro-batch", 1, *AT_ONCE[page], steps=2, page=page)
    assert max(len(micro) for _, _, micro in watched.passes[-3:]) == 1
    trained_ones = [(watched.weights, 1e-3)] + [(watched.critics, 5e-3)] * (page is train_ppo)
    for weights, rate in trained_ones:
        one, many = weights[1], weights[4]  # after one step: Adam makes signs of the smallest differences
        assert not equal(weights[0], one)
        for name in one:
            torch.testing.assert_close(one[name], many[name], rtol=0, atol=0.2 * rate)


def test_the_learning_rate_of_the_schedule_is_the_one_that_moves_the_weights(start, tmp_path, watched, monkeypatch):
    """Adam's first step moves every weight by the rate, less only where the gradient is as small as its ε."""
    pays(monkeypatch, even)
    folder = trained(start, tmp_path / "run", "--warmup-steps", 5, steps=1)
    before, after = watched.weights
    assert lines(folder)[1]["lr"] == pytest.approx(2e-4)
    assert max(float((after[name] - before[name]).abs().max()) for name in before) == pytest.approx(2e-4, rel=1e-2)


@pytest.mark.parametrize("page", [train_grpo, train_ppo], ids=DEFAULT.get)
def test_in_every_update_of_a_step_the_old_policy_is_that_of_its_start(start, tmp_path, monkeypatch, page):
    """What the loss takes for π_prox, update by update, and what share of the updates it is told to be made."""
    pays(monkeypatch, even)
    at_start, seen, take, loss = [], [], Run.take, Algorithm.loss

    def watched_take(run):
        at_start.append(copy.deepcopy(run.policy))
        return take(run)

    def watched_loss(algo, out, micro):
        with torch.no_grad():
            start = at_start[-1](micro).logp
            away = (objective.proximal(out.logp, micro, algo.axes) - start)[micro.mask].abs().max()
            seen.append((len(at_start), micro.done, float(away), float((out.logp - start)[micro.mask].abs().max())))
        return loss(algo, out, micro)

    monkeypatch.setattr(Run, "take", watched_take)
    monkeypatch.setattr(Algorithm, "loss", watched_loss)
    flags = ("--updates-per-batch", 2, "--epochs-per-batch", 2, *AT_ONCE[page])
    trained(start, tmp_path / "run", *flags, steps=2, page=page)
    assert [(step, done) for step, done, *_ in seen] == [(step, i / 4) for step in (1, 2) for i in range(4)]
    assert max(away for *_, away, _ in seen) < 1e-5 and min(moved for _, done, _, moved in seen if done) > 1e-3


def test_the_constant_length_is_the_flags_or_else_the_longest_answer_that_may_be(start, tmp_path, monkeypatch):
    """Half as long a constant is twice the gradient."""
    pays(monkeypatch, even)

    @cache
    def gradient(*flags):
        folder = tmp_path / f"run{'-'.join(map(str, flags))}"
        flags = addition(start, folder, "--steps", 1, "--max-new-tokens", 6, "--eval-every", 0, *flags)
        assert launch("dr_grpo", *flags) == 0
        return lines(folder)[0]["grad_norm"]

    assert gradient() == gradient("--length-limit", 6) > 0
    assert gradient("--length-limit", 3) == pytest.approx(2 * gradient("--length-limit", 6), rel=1e-4)


# ------------------------------------------------------------------------------------------------ the critic


@pytest.mark.parametrize("trunk", ["own", "shared"])
def test_at_first_the_critic_alone_learns(start, tmp_path, watched, monkeypatch, trunk):
    """For --critic.warmup-steps the policy stays as it is, bit for bit, also where the critic reads its hidden states.

    Its optimizer gathers nothing meanwhile, so that its first step is that of a fresh one.
    """
    pays(monkeypatch, even)
    flags = ("--critic.warmup-steps", 3, "--critic.trunk", trunk, "--weight-decay", 0.1)
    trained(start, tmp_path / "run", *flags, steps=5, page=train_ppo)
    assert changed(watched.weights) == watched.moments == [False, False, False, True, True]
    assert changed(watched.critics) == [True] * 5
    assert [line["lr"] > 0 for line in lines(tmp_path / "run")[1:]] == changed(watched.weights)


def test_the_critic_learns_at_its_own_rate(start, tmp_path, watched, monkeypatch):
    """Adam's first step moves every weight by the rate, less only where the gradient is as small as its ε."""
    pays(monkeypatch, even)
    trained(start, tmp_path / "run", "--critic.lr-factor", 3, *AT_ONCE[train_ppo], steps=1, page=train_ppo)
    for (before, after), rate in ((watched.weights, 1e-3), (watched.critics, 3e-3)):
        assert max(float((after[name] - before[name]).abs().max()) for name in before) == pytest.approx(rate, rel=1e-2)


def test_the_critics_rate_follows_the_schedule_and_is_there_while_the_policys_is_not(start, tmp_path, watched, monkeypatch):
    pays(monkeypatch, even)
    flags = ("--lr-schedule", "linear", "--warmup-steps", 2, "--critic.warmup-steps", 3, "--critic.lr-factor", 3)
    rows = lines(trained(start, tmp_path / "run", *flags, steps=5, page=train_ppo))[1:]
    assert [row["value/lr"] for row in rows] == pytest.approx([1.5e-3, 3e-3, 3e-3, 2e-3, 1e-3])
    assert [row["lr"] for row in rows] == pytest.approx([0, 0, 0, 2e-3 / 3, 1e-3 / 3])


@pytest.mark.parametrize("trunk", ["own", "shared"])
def test_a_shared_trunk_learns_from_the_critic_and_no_other(start, tmp_path, watched, monkeypatch, trunk):
    """A policy whose own loss pulls nowhere; and in the first step the critic's head is zero, and sends nothing down."""
    pays(monkeypatch, even)
    monkeypatch.setattr(Algorithm, "loss", lambda algo, out, micro: 0 * out.logp)
    trained(start, tmp_path / "run", "--critic.trunk", trunk, *AT_ONCE[train_ppo], steps=3, page=train_ppo)
    assert changed(watched.weights) == [False, trunk == "shared", trunk == "shared"]
    assert changed(watched.critics) == [True] * 3


@pytest.mark.parametrize("asked", [False, True])
def test_the_value_at_the_cut_stands_for_the_rest_only_where_asked_for(start, tmp_path, watched, monkeypatch, asked):
    pays(monkeypatch, even)
    flags = ("--critic.bootstrap",) * asked
    trained(start, tmp_path / "run", "--max-new-tokens", 2, *flags, steps=1, page=train_ppo)
    (batch,) = watched.batches
    assert batch.truncated.any() and not batch.truncated.all()
    assert torch.equal(batch.bootstrap.ne(0), batch.truncated) if asked else batch.bootstrap is None


def test_the_critic_is_put_at_the_mean_return_once_in_a_run(start, tmp_path, monkeypatch):
    steps = []
    monkeypatch.setattr("nanorl.critic.centre", lambda critic, batch, algo: steps.append(batch.step))
    run = trained(start, tmp_path / "run", steps=2, page=train_ppo)
    assert launch("--resume", run, "--steps", 3, page=train_ppo) == 0 and steps == [0]


def test_the_critic_comes_to_know_what_an_answer_earns_once_its_first_token_is_there(start, tmp_path, monkeypatch):
    """Before it nobody can; all later values of the answer are one number, which one token decides."""
    pays(monkeypatch, lambda ids: float(ids[0] % 2))
    flags = ("--prompts-per-step", 16, "--critic.warmup-steps", 40, "--eval-every", 0)
    rows = lines(trained(start, tmp_path / "run", *flags, steps=40, page=train_ppo))
    samples = [(row["reward"], sum(row["mask"])) for row in lines(tmp_path / "run", "samples") if row["step"] == 1]
    mean = sum(reward * n for reward, n in samples) / sum(n for _, n in samples)
    assert rows[0]["value/mean"] == pytest.approx(mean, rel=1e-5) and rows[0]["value/explained"] == pytest.approx(0, abs=1e-5)
    assert sum(row["value/explained"] for row in rows[-10:]) / 10 > 0.3
    assert abs(sum(row["value/mean"] - row["reward"] for row in rows[-10:])) / 10 < 0.1


# ------------------------------------------------------------------------------------------------ every algorithm


OPTIONAL = frozenset("""kl/ref clip/dual correction/mean correction/max correction/masked m2/dropped
    value/loss value/lr value/grad_norm value/mean value/explained reward/faults/timeout reward/faults/memory
    reward/faults/exception reward/faults/none reward/faults/nan reward/faults/died
    """.split())  # of some algorithms alone, and where a reward fails


def step_of_any(key):
    """The key as notes/metrics.md has it: shaping/clip/mean is shaping/STEP/mean there."""
    return re.sub(r"^shaping/\w+/", "shaping/STEP/", key)


def own_keys(row, updates):
    """The keys of KEYS that a step of this row says."""
    axes, prefixes = row.axes, ()
    if "eps_low" in row.unused():
        prefixes += ("clip",)
    if axes.prox == "loglinear" and updates > 1:
        prefixes += ("ratio", "clip", "kl/prox", "mismatch", "correction")
    more = [(axes.kl_weight, "kl/ref"), (axes.dual_clip, "clip/dual"), (axes.correction.on, "correction"),
            (axes.m2_threshold, "m2"), (row.critic, "value")]  # fmt: skip
    also = tuple(key for asked, key in more if asked)
    return {key for key in KEYS if (key not in OPTIONAL or key.startswith(also)) and not key.startswith(prefixes or "∅")}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_trains(start, tmp_path, monkeypatch, name):
    """Three steps, of two updates where the row allows it: finite losses, moved weights, the keys that it should have."""
    pays(monkeypatch, even)
    row = ALGORITHMS[name]
    page, updates = train_ppo if row.critic else train_grpo, 2 if row.has_ratio and not row.natural else 1
    folder = tmp_path / "run"
    flags = ("--steps", 3, "--max-new-tokens", 6, "--updates-per-batch", updates, "--eval-every", 0, *AT_ONCE[page])
    assert launch(name, *addition(start, folder, *flags, rate=() if row.natural else RATE), page=page) == 0
    assert moved(start, folder)
    page = (ROOT / "notes" / "metrics.md").read_text()
    documented = {*re.findall(r"^\| `([^`]+)`", page, re.MULTILINE)}
    for line in lines(folder):
        assert line.keys() & KEYS == own_keys(row, updates)
        assert {step_of_any(key) for key in line} - documented <= {"worked"}
        assert line["grad_norm"] > 0 and line["skipped"] == 0


# ------------------------------------------------------------------------------------------------ the reference


def test_another_reference_pulls_elsewhere(start, tmp_path):
    """--ref-model: its distance is there from the first step, and another gradient with it."""
    elsewhere = checkpoint.latest(trained(start, tmp_path / "far", "--lr", 1e-2, steps=3))
    own = trained(start, tmp_path / "own", "--kl-weight", 0.5, steps=2)
    other = trained(start, tmp_path / "other", "--kl-weight", 0.5, "--ref-model", elsewhere, steps=2)
    assert lines(own)[1]["kl/ref"] == 0 < 1e-3 < lines(other)[1]["kl/ref"]
    assert content(own)["model.safetensors"] != content(other)["model.safetensors"]


@pytest.mark.parametrize("more", [(), ("--dry-run",)])
def test_a_reference_that_does_not_fit_is_refused_in_one_line_before_anything_is_made(start, tmp_path, capsys, more):
    flags = addition(start, tmp_path / "run", "--kl-weight", 0.5, "--ref-model", tmp_path / "none", *more)
    assert launch(*flags) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(f"train_grpo.py: --ref-model {tmp_path}/none: no such folder")
    assert not [*tmp_path.iterdir()]


def test_a_reference_with_less_room_than_prompts_and_answers_take_is_refused_in_one_line(start, tmp_path, capsys):
    """Positions that it has not learnt would be scored by chance."""
    net = AutoModelForCausalLM.from_pretrained(start)
    net.config.max_position_embeddings = 15
    for part in (net, tiny.tokenizer()):
        part.save_pretrained(tmp_path / "short")
    flags = addition(start, tmp_path / "run", "--max-new-tokens", 12, "--kl-weight", 0.5, "--dry-run")
    assert launch(*flags) == 0  # 4 of the prompt and 12
    capsys.readouterr()
    assert launch(*flags, "--ref-model", tmp_path / "short") == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("train_grpo.py: --max-new-tokens 12: the model has room for 15 tokens and the prompt")


# ------------------------------------------------------------------------------------------------ a gradient of NaN


def poisoned(monkeypatch, when, whose=Policy):
    """Put a NaN into one number of the gradient of the updates of one part, counted from 0, for which `when` holds."""
    step, calls = optimize.clip_and_step, []

    def clip_and_step(part, *args):
        if isinstance(part, whose):
            calls.append(None)
            if when(len(calls) - 1):
                next(p for p in part.parameters() if p.grad is not None).grad.view(-1)[0] = torch.nan
        return step(part, *args)

    monkeypatch.setattr(optimize, "clip_and_step", clip_and_step)


def test_a_step_without_a_finite_gradient_is_skipped_counted_and_said(start, tmp_path, watched, monkeypatch, capsys):
    pays(monkeypatch, even)
    poisoned(monkeypatch, lambda update: update % 5 != 4)  # never five in a row
    folder = trained(start, tmp_path / "run", steps=10)
    sound = [False, False, False, False, True] * 2
    assert changed(watched.weights) == sound
    assert [line["skipped"] == 0 for line in lines(folder)[1:]] == sound
    assert ["grad_norm" in line for line in lines(folder)[1:]] == sound
    assert capsys.readouterr().out.count("warning: the gradient is not finite") == 2
    assert all(tensor.isfinite().all() for tensor in load_file(checkpoint.latest(folder) / checkpoint.WEIGHTS).values())


@pytest.mark.parametrize("kind", ["mask", "drop"])
def test_a_step_whose_answers_are_all_truncated_is_no_update_and_still_a_version(start, tmp_path, watched, monkeypatch, kind):
    """Answers of one token, here never the end; their rewards differ."""
    pays(monkeypatch, even)
    folder = trained(start, tmp_path / "run", "--max-new-tokens", 1, "--truncated", kind, steps=3)
    said = [line for line in lines(folder) if "truncated" in line]
    assert [line["step"] for line in said] == [1, 2, 3] and all(line["truncated"] == 1 for line in said)
    assert not any(changed(watched.weights)) and not any(line["grad_norm"] + line["skipped"] for line in said)
    assert all(line["shaping/truncated/changed"] == 1 and line["trained_rows"] == 0 for line in said)


def test_five_such_steps_in_a_row_stop_the_run(start, tmp_path, watched, monkeypatch):
    pays(monkeypatch, even)
    poisoned(monkeypatch, lambda update: update >= 2)
    with pytest.raises(FloatingPointError, match="5 steps in a row"):
        launch(*addition(start, tmp_path / "run", "--steps", 100))
    assert [line["skipped"] for line in lines(tmp_path / "run")[1:]] == [0, 0, 1, 1, 1, 1, 1]
    assert equal(watched.weights[2], watched.weights[-1])


@pytest.mark.parametrize("updates", [1, 2])
def test_a_critic_without_a_finite_gradient_is_counted_said_and_stops_the_run_too(start, tmp_path, watched, monkeypatch,
                                                                                 capsys, updates):  # fmt: skip
    """The policy goes on meanwhile: it is the critic's five steps without any update that end it."""
    pays(monkeypatch, even)
    poisoned(monkeypatch, lambda update: update >= 2 * updates, Critic)
    flags = addition(start, tmp_path / "run", "--steps", 100, "--updates-per-batch", updates, *AT_ONCE[train_ppo])
    with pytest.raises(FloatingPointError, match="5 steps in a row"):
        launch(*flags, page=train_ppo)
    rows = lines(tmp_path / "run")[1:]
    assert [row["skipped"] for row in rows] == [0, 0, *[updates] * 5]
    assert [("grad_norm" in row, "value/grad_norm" in row) for row in rows] == [(True, True)] * 2 + [(True, False)] * 5
    assert changed(watched.critics) == [True] * 2 + [False] * 5 and changed(watched.weights) == [True] * 7
    assert "warning: the gradient is not finite" in capsys.readouterr().out


@pytest.mark.parametrize("whose", [Policy, Critic])
def test_a_step_of_which_one_update_was_made_is_no_lost_step(start, tmp_path, monkeypatch, whose):
    pays(monkeypatch, even)
    poisoned(monkeypatch, lambda update: update % 2 == 0, whose)
    flags = ("--updates-per-batch", 2, *AT_ONCE[train_ppo])
    folder = trained(start, tmp_path / "run", *flags, steps=6, page=train_ppo)
    assert [row["skipped"] for row in lines(folder)[1:]] == [1] * 6


# ------------------------------------------------------------------------------------------------ stop and go on


WAYS = {
    "grpo": (),
    "updates, falling lr": ("--updates-per-batch", 2, "--epochs-per-batch", 2, "--lr-schedule", "cosine",
                            "--warmup-steps", 9, "--weight-decay", 0.1),
    "kl, entropy, hot": ("--kl-weight", 0.1, "--entropy-weight", 0.01, "--temperature", 1.3),
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_stopped_after_7_of_12_steps_and_resumed_a_run_is_the_same(start, tmp_path, watched, capsys, way):
    whole = trained(start, tmp_path / "whole", *WAYS[way])
    watched.stop_at = 7
    halves = tmp_path / "halves"
    assert launch(*addition(start, halves, "--steps", 12, *WAYS[way])) == 130
    assert f"saved in {halves}/checkpoints/step-7" in capsys.readouterr().err
    assert len(lines(halves)) == 8 and not (halves / "summary.json").exists()
    watched.stop_at = None
    assert launch("--resume", halves) == 0
    assert same(halves, whole) and moved(start, whole)
    assert [line["step"] for line in lines(halves)] == [*range(13)]
    after = [json.loads((folder / "summary.json").read_text()) for folder in (halves, whole)]
    assert (after[0]["before"], after[0]["after"]) == (after[1]["before"], after[1]["after"])


PPO_WAYS = {
    "own, updates": ("--updates-per-batch", 2, "--critic.warmup-steps", 4, "--critic.bootstrap", "--max-new-tokens", 3),
    "shared": ("--critic.trunk", "shared", "--critic.weight", 0.2, *AT_ONCE[train_ppo]),
}  # fmt: skip


@pytest.mark.parametrize("way", PPO_WAYS)
def test_3_steps_and_3_more_are_6_with_a_critic_too(start, tmp_path, way):
    """Policy, critic, both optimizers, samples and metrics, bit for bit. The KL's reference is the start, not step 3."""
    whole = trained(start, tmp_path / "whole", *PPO_WAYS[way], steps=6, page=train_ppo)
    halves = trained(start, tmp_path / "halves", *PPO_WAYS[way], steps=3, page=train_ppo)
    assert launch("--resume", halves, "--steps", 6, page=train_ppo) == 0
    assert {"critic.model.safetensors", "critic.optimizer.safetensors"} <= content(halves).keys()
    assert same(halves, whole) and moved(start, whole)
    assert way == "shared" or moved(start, whole, "critic.")
    assert lines(whole)[1]["kl/ref"] == 0 < lines(whole)[6]["kl/ref"]


def test_a_run_of_natural_steps_resumes_too(start, tmp_path):
    """AdamW has no part in them, so its state is empty."""
    for folder, steps in (("whole", 2), ("halves", 1)):
        assert launch("trpo", *addition(start, tmp_path / folder, "--steps", steps, rate=())) == 0
    assert launch("--resume", tmp_path / "halves", "--steps", 2) == 0
    assert same(tmp_path / "halves", tmp_path / "whole")


@pytest.mark.parametrize("page", [train_grpo, train_ppo], ids=DEFAULT.get)
def test_the_warm_start_is_the_reference_also_after_a_resume(start, tmp_path, monkeypatch, page):
    """Where no flag names the model: its folder is asked for again, and the checkpoint's weights are not taken for it."""
    monkeypatch.setattr(Run, "warm_start", lambda run: str(start))
    flags = ("--digits", 1, *SIZES, "--kl-weight", 0.1, *AT_ONCE[page], "--out")
    assert launch(*flags, tmp_path / "whole", "--steps", 2, page=page) == 0
    assert launch(*flags, tmp_path / "halves", "--steps", 1, page=page) == 0
    assert launch("--resume", tmp_path / "halves", "--steps", 2, page=page) == 0
    assert same(tmp_path / "halves", tmp_path / "whole") and lines(tmp_path / "whole")[2]["kl/ref"] > 0


@pytest.mark.parametrize("first, then", [("own", "shared"), ("shared", "own")])
def test_another_critic_than_the_runs_is_refused_in_one_line_and_the_run_can_go_on(start, tmp_path, capsys, first, then):
    run = trained(start, tmp_path / "run", "--critic.trunk", first, steps=2, page=train_ppo)
    capsys.readouterr()
    assert launch("--resume", run, "--steps", 3, "--critic.trunk", then, page=train_ppo) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert "critic.model.safetensors" in said and "trunk." in said
    assert launch("--resume", run, "--steps", 3, page=train_ppo) == 0


def test_a_checkpoint_without_its_critic_is_refused_in_one_line(start, tmp_path, capsys):
    run = trained(start, tmp_path / "run", steps=1, page=train_ppo)
    last = checkpoint.latest(run)
    state = json.loads((last / checkpoint.STATE).read_text())
    for name in ("critic.model.safetensors", "critic.optimizer.safetensors"):
        (last / name).unlink()
        del state["files"][name]
    (last / checkpoint.STATE).write_text(json.dumps(state))
    capsys.readouterr()
    assert launch("--resume", run, "--steps", 2, page=train_ppo) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(f"train_ppo.py: {last}/critic.model.safetensors: missing")


def test_a_run_of_7_steps_can_have_5_more(start, tmp_path, run, capsys):
    halves = trained(start, tmp_path / "halves", steps=7)
    capsys.readouterr()
    assert launch("--resume", halves) == 2  # it is done
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(f"train_grpo.py: --resume {halves}: that run is done (7 steps)")
    assert launch("--resume", halves, "--steps", 12) == 0
    assert same(halves, run.folder) and json.loads((halves / "config.json").read_text())["config"]["steps"] == 12


def test_a_run_resumes_around_the_end_of_an_epoch(start, tmp_path):
    """13 rows, one of them held out: an epoch of the others is exactly three steps. Before its end, there and after it."""
    pairs = [*itertools.product(range(1, 10), repeat=2)][5::6]
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in pairs]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ("--task", "jsonl", "--data", data, "--model", start, *SIZES, "--max-new-tokens", 6, "--out")
    assert launch(*flags, tmp_path / "whole", "--steps", 6) == 0
    for first in (2, 3, 4):
        halves = tmp_path / f"{first} and the rest"
        assert launch(*flags, halves, "--steps", first) == 0
        assert launch("--resume", halves, "--steps", 6) == 0
        assert same(halves, tmp_path / "whole")
    asked = [row["ids"][: row["mask"].index(1)] for row in lines(tmp_path / "whole", "samples")[::G]]
    epochs = [sorted(map(tuple, asked[:12])), sorted(map(tuple, asked[12:]))]
    assert epochs[0] == epochs[1] and len(set(epochs[0])) == 12 and asked[:12] != asked[12:]


def test_a_run_can_be_moved_and_resumed_from_elsewhere(start, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trained(start, Path("here"), steps=2)
    Path("here").rename("there")
    (tmp_path / "desk").mkdir()
    monkeypatch.chdir(tmp_path / "desk")
    assert launch("--resume", tmp_path / "there", "--steps", 3) == 0
    assert launch("--resume", "../there/", "--steps", 4) == 0
    assert [line["step"] for line in lines(tmp_path / "there")] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("moment", ["evaluation", "sampling"])
def test_stopped_before_its_first_step_nothing_is_half_made(start, tmp_path, watched, monkeypatch, capsys, moment):
    whole, folder = trained(start, tmp_path / "whole", steps=3), tmp_path / "run"

    def stopped_evaluate(run):
        signal.raise_signal(signal.SIGINT)
        return run.rollout.call(asyncio.sleep(60), "sleep", run.stop)

    with monkeypatch.context() as patch:
        if moment == "evaluation":
            patch.setattr(Run, "evaluate", stopped_evaluate)
        else:
            watched.stop_at = 0
        capsys.readouterr()
        assert launch(*addition(start, folder, "--steps", 3)) == 130
    said, saved = capsys.readouterr().err, checkpoint.steps(folder)
    assert [path.name for path in saved] == (["step-0"] if moment == "sampling" else [])
    assert bool(saved) == ("saved in" in said) == ("nothing is saved" not in said)
    assert not [path for path in folder.rglob("*") if path.name.startswith(".") and path.name != ".lock"]
    watched.stop_at = None
    assert launch("--resume", folder) == 0
    assert same(folder, whole)


def test_a_second_stop_ends_a_run_at_once(start, tmp_path, run, monkeypatch, capsys):
    record = Run.record

    def stopped_record(run, *args):
        if run.step == 3:
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGINT)
        record(run, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Run, "record", stopped_record)
        assert launch(*addition(start, tmp_path / "run", "--steps", 12, "--save-every", 2)) == 130
    said = capsys.readouterr().err
    assert "SIGTERM: stopping after this step" in said and "Traceback" not in said
    assert [line["step"] for line in lines(tmp_path / "run")] == [0, 1, 2, 3]
    assert checkpoint.latest(tmp_path / "run").name == "step-2"
    assert launch("--resume", tmp_path / "run") == 0
    assert same(tmp_path / "run", run.folder)


def test_a_reward_that_fails_ends_the_run_saved_with_its_own_error(start, tmp_path, watched, monkeypatch, capsys):
    pays(monkeypatch, lambda ids: even(ids) if watched.step < 3 else float("nan"))
    with pytest.raises(ValueError, match="must be a finite number"):
        launch(*addition(start, tmp_path / "run", "--steps", 12, "--eval-every", 0))
    assert "saved in" in capsys.readouterr().err and checkpoint.latest(tmp_path / "run").name == "step-3"


def test_samples_without_a_score_leave_their_group_and_are_counted(start, tmp_path):
    """In processes that score: a group is smaller by those of its samples, and every one of them is in the count."""
    (tmp_path / "mine.py").write_text("""
def reward(prompt, completion, prompt_ids, completion_ids, answer, **row):
    if not completion_ids:
        return float(bool(completion))
    return float("nan") if sum(completion_ids) % 5 == 1 else float(sum(completion_ids) % 2 == 0)
""")
    flags = ("--reward", f"{tmp_path / 'mine.py'}:reward", "--reward-workers", 2, "--eval-every", 0)
    folder = trained(start, tmp_path / "run", *flags, steps=4)
    faults = failed = 0
    for line in lines(folder):
        rows = [row for row in lines(folder, "samples") if row["step"] == line["step"]]
        sampled = [sum(i for i, m in zip(row["ids"], row["mask"]) if m) for row in rows]
        assert [row["reward"] for row in rows] == [float(n % 2 == 0) for n in sampled]
        assert all(n % 5 != 1 for n in sampled)
        dropped = line.get("reward/faults/nan", 0)
        assert line["samples"] == len(rows) == G * (P + line["buffer/failed"] - failed) - dropped
        faults, failed = faults + dropped, line["buffer/failed"]
    assert faults > 0


# ------------------------------------------------------------------------------------------------ signals, for real


def until(what, process, seconds=120):
    """Wait until what() is true while the process lives."""
    end = time.monotonic() + seconds
    while not what():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.01)


@pytest.fixture(scope="module")
def victims(start, tmp_path_factory):
    """Runs in processes of their own, each ended by a signal while it trains.

    {signal: (folder, status of a second process there, status, stderr)}
    """
    environment, processes, ended = os.environ | {"OMP_NUM_THREADS": "1"}, {}, {}
    for number in (signal.SIGTERM, signal.SIGKILL):
        folder = tmp_path_factory.mktemp("victims") / "run"
        flags = addition(start, folder, "--steps", 10**6, "--save-every", 1 if number == signal.SIGKILL else 0)
        process = subprocess.Popen([sys.executable, "train_grpo.py", *map(str, flags)], cwd=ROOT, env=environment,
                                   stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)  # fmt: skip
        processes[number] = folder, folder / "metrics.jsonl", process
    try:
        for number, (folder, metrics, process) in processes.items():
            until(lambda: metrics.exists() and metrics.read_bytes().count(b"\n") > 4, process)
            second = launch("--resume", folder, train=lambda run: None)  # while it trains
            process.send_signal(number)
            said = process.communicate(timeout=60)[1]
            ended[number] = folder, second, process.returncode, said
        yield ended
    finally:
        for *_, process in processes.values():
            process.kill()


def test_a_signal_saves_says_so_and_ends_with_130(victims):
    folder, second, status, said = victims[signal.SIGTERM]
    assert status == 130 and second == 2
    saved = re.search(r"saved in ([^\s;]+)", said)[1]
    assert Path(saved) == checkpoint.latest(folder) == folder / "checkpoints" / f"step-{lines(folder)[-1]['step']}"
    assert "SIGTERM" in said and "Traceback" not in said


def test_after_any_signal_the_run_can_go_on_as_if_nothing_had_happened(victims, start, tmp_path):
    steps = max(lines(folder)[-1]["step"] for folder, *_ in victims.values()) + 2
    whole = trained(start, tmp_path / "whole", steps=steps)
    for folder, *_ in victims.values():
        assert launch("--resume", folder, "--steps", steps) == 0
        assert same(folder, whole)
    assert victims[signal.SIGKILL][2] == -signal.SIGKILL and moved(start, whole)


def test_a_signal_while_libraries_load_ends_with_130_and_leaves_nothing(start, tmp_path):
    script = [sys.executable, "-u", str(ROOT / "train_grpo.py"), *map(str, addition(start, tmp_path / "run"))]
    process = subprocess.Popen(script, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    for line in process.stdout:
        if line.startswith("again: "):  # torch is next
            break
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=60)[1]
    assert process.returncode == 130 and len(said.splitlines()) == 1, said
    assert not [*tmp_path.iterdir()]


# ------------------------------------------------------------------------------------------------ what a run leaves


@pytest.fixture(scope="module")
def run(start, tmp_path_factory):
    """A finished run with a checkpoint every 3 steps, and what it printed."""
    folder, printed = tmp_path_factory.mktemp("finished") / "run", tmp_path_factory.mktemp("printed") / "out"
    with open(printed, "w") as out, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", out)
        trained(start, folder, "--save-every", 3)
    said, metrics, samples = printed.read_text(), lines(folder), lines(folder, "samples")
    return SimpleNamespace(folder=folder, said=said, metrics=metrics, samples=samples)


def tuples(value):
    """What JSON made of a tuple of tuples."""
    return tuple(map(tuples, value)) if isinstance(value, list) else value


def test_metrics_have_an_object_a_step_with_documented_keys_alone(run):
    assert [line["step"] for line in run.metrics] == [*range(13)]
    page = (ROOT / "notes" / "metrics.md").read_text()
    documented = {*re.findall(r"^\| `([^`]+)`", page, re.MULTILINE)}
    for line in run.metrics[1:]:
        keys = {re.sub(r"^eval/pass@\d+$", "eval/pass@k", key) if key != "eval/pass@1" else key for key in line}
        assert keys - documented <= {"worked", "eval/worked"}  # the task's own
        required = KEYS - OPTIONAL if line["trained_rows"] else {"loss", "reward", "grad_norm", "lr"}
        assert required <= keys
        assert ("eval/pass@1" in line) == (line["step"] % 3 == 0)
    assert {key for key in run.metrics[0] if not key.startswith("eval/")} == {"step", "seconds"}  # before training


def test_samples_rebuild_the_batches_that_were_trained(run, start):
    """Rows of a step make its groups again, the numbers of the step follow, and its weights give the same log-probs."""
    fields = {f.name for f in dataclasses.fields(Sample)}
    for line in run.metrics[1:]:
        rows = [row for row in run.samples if row["step"] == line["step"]]
        groups = {}
        for row in rows:
            sample = Sample(**{key: tuples(value) for key, value in row.items() if key in fields})
            assert sample.reward == row["reward"]
            groups.setdefault(row["prompt"], []).append(sample)
        assert [*groups] == [*range((line["step"] - 1) * P, line["step"] * P)]
        batch = collate([Group(Prompt(number, (), "", ""), (*samples,)) for number, samples in groups.items()])
        assert len(batch) == line["samples"] == P * G and int(batch.mask.sum()) == line["tokens"]
        assert float(batch.reward.double().mean()) == line["reward"]
        assert set(batch.version[batch.mask].tolist()) == {line["step"] - 1}
        weights = {1: start, 10: run.folder / "checkpoints" / "step-9"}.get(line["step"])
        if weights:
            with torch.no_grad():
                logp = Policy(AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float32))(batch).logp
            torch.testing.assert_close(logp[batch.mask], batch.logp_behave[batch.mask], rtol=0, atol=1e-4)


def test_tensorboard_has_the_numbers_of_the_file(run):
    board = EventAccumulator(str(run.folder)).Reload()
    for key in ("reward", "grad_norm", "eval/pass@1"):
        there = {line["step"]: line[key] for line in run.metrics if key in line}
        assert {event.step: event.value for event in board.Scalars(key)} == pytest.approx(there, abs=1e-6)
    assert board.Tags()["histograms"] and any("sample" in tag for tag in board.Tags()["tensors"])


def test_the_console_shows_ten_numbers_a_step_and_says_why_the_first_loss_is_0(run):
    assert len(COLUMNS) >= 10
    titles = next(line for line in run.said.splitlines() if line.split()[:1] == ["step"])
    assert titles.split() == ["step", "left", *(title for title, *_ in COLUMNS)]
    shown = {int(m[1]): m[2].split() for m in re.finditer(r"^ +(\d+)/12 +\S+ (.*)$", run.said, re.MULTILINE)}
    assert [*shown] == [*range(1, 13)]
    pass_1 = run.metrics[0]["eval/pass@1"]
    for line in run.metrics[1:]:
        pass_1 = line.get("eval/pass@1", pass_1)
        for cell, (_, _, key, form) in zip(shown[line["step"]], COLUMNS):
            value = {**line, "eval/pass@1": pass_1}.get(key)
            assert cell == ("–" if value is None else f"{value:{form}}")
        assert shown[line["step"]][-2:] == ["worked", f"{line['worked']:.3g}"]
    assert run.said.count("The ratio is 1 because the weights that sampled now train.") == 1
    first = run.metrics[1]  # at ratio 1 the token mean of the loss is that of −A
    assert first["loss"] == pytest.approx(-first["adv/mean"], abs=1e-5) and first["ratio/max"] == 1
    assert f"here {first['loss']:.3f}," in run.said
    first = next(row for row in run.samples if row["step"] == 1 and row["prompt"] == 1)
    asked = tiny.tokenizer().decode(first["ids"][: first["mask"].index(1)])
    assert f"a sample of step 1, prompt 1:\n    prompt      {asked}\n    completion  {first['text']}\n" in run.said


@pytest.mark.parametrize("name, flags, holds", [
    ("dr_grpo", (), True), ("grpo", ("--updates-per-batch", 2), False), ("rloo", (), False), ("ppo", (), False)])  # fmt: skip
def test_the_first_loss_is_explained_only_where_the_explanation_holds(start, tmp_path, capsys, name, flags, holds):
    """One update, of a surrogate that is −r·A at r = 1, with advantages that sum to 0 in a group."""
    flags = addition(start, tmp_path / "run", "--steps", 1, "--eval-every", 0, *flags)
    assert launch(name, *flags, page=train_ppo if name == "ppo" else train_grpo) == 0
    assert ("The ratio is 1 because" in capsys.readouterr().out) == holds


def test_the_run_ends_by_saying_what_it_reached_and_where_it_lies(run):
    summary = json.loads((run.folder / "summary.json").read_text())
    saved = json.loads((run.folder / "config.json").read_text())
    assert summary["steps"] == 12 and summary["seconds"] > 0
    assert summary["before"] == {key: value for key, value in run.metrics[0].items() if key.startswith("eval/")}
    assert {"eval/pass@1", "eval/pass@2", "eval/pass@4", "eval/greedy"} <= {*summary["after"]}
    assert f"{summary['before']['eval/greedy']:.3f} → {summary['after']['eval/greedy']:.3f}" in run.said
    end = run.said[run.said.index("done: step 12") :]
    for words in (run.folder, checkpoint.latest(run.folder), "tensorboard --logdir", "--resume", "--eval-only"):
        assert str(words) in end
    assert summary["command"] == saved["command"] == re.search("^again: (.*)$", run.said, re.MULTILINE)[1]
    name, cfg, axes = cli.parse(shlex.split(summary["command"])[2:])
    assert json.loads(json.dumps(dataclasses.asdict(cfg))) == saved["config"] | {"out": None}
    assert (name, dataclasses.asdict(axes)) == (saved["algorithm"], saved["axes"])


def test_every_command_that_the_end_proposes_is_accepted(run):
    proposed = re.findall(r"^[a-z ]{14}python train_grpo.py (.*)$", run.said, re.MULTILINE)
    assert len(proposed) == 4 and "grpo --digits 6" in proposed
    for words in proposed:
        cli.parse(shlex.split(words))


def test_the_evaluation_that_the_end_proposes_repeats_it(start, tmp_path, capsys):
    unusual = ("--seed", 3, "--temperature", 1.5, "--prompt-suffix", "0=", "--eval-samples", 8)
    trained(start, tmp_path / "run", *unusual, steps=1)
    said = capsys.readouterr().out
    assert launch(*shlex.split(re.search(r"^evaluate +python train_grpo.py (.*)$", said, re.MULTILINE)[1])) == 0
    again = re.findall(r"^  (\S+) +([\d.]+)$", capsys.readouterr().out, re.MULTILINE)
    assert again == re.findall(r"^  (\S+) +(?:[\d.]+ → )?([\d.]+)$", said[said.index("done: step 1") :], re.MULTILINE)
    assert {"pass@1", "pass@8"} <= {*dict(again)}


def test_the_command_makes_the_same_run_again(run, tmp_path):
    words = shlex.split(json.loads((run.folder / "config.json").read_text())["command"])
    assert launch(*words[2:], "--out", tmp_path / "again") == 0
    assert same(tmp_path / "again", run.folder)


@pytest.mark.parametrize("step", [9, 12])
def test_evaluation_alone_repeats_that_of_the_run(run, tmp_path, monkeypatch, capsys, step):
    monkeypatch.chdir(tmp_path)
    flags = ("--digits", 1, "--eval-problems", 8, "--model", run.folder / "checkpoints" / f"step-{step}")
    assert launch("--eval-only", *flags, "--eval-samples", 1) == 0  # as within the run; at the end it takes more
    printed = re.findall(r"^  (\S+) +([\d.]+)$", capsys.readouterr().out, re.MULTILINE)
    assert printed == [(key[5:], f"{value:.3f}") for key, value in run.metrics[step].items() if key.startswith("eval/")]
    assert not [*tmp_path.iterdir()]


def test_without_evaluation_nothing_is_evaluated(start, tmp_path, monkeypatch):
    monkeypatch.setattr(Run, "evaluate", lambda *args, **kwargs: pytest.fail("evaluated"))
    folder = trained(start, tmp_path / "run", "--eval-every", 0, steps=2)
    assert [line["step"] for line in lines(folder)] == [1, 2]


def test_a_number_logged_in_a_reward_is_the_mean_over_its_step(start, tmp_path, monkeypatch, capsys):
    def logging(ids):
        log("style", len(ids))
        return even(ids)

    pays(monkeypatch, logging)
    folder = trained(start, tmp_path / "run", steps=2)
    said = capsys.readouterr().out
    for line in lines(folder)[1:]:
        rows = [row for row in lines(folder, "samples") if row["step"] == line["step"]]
        assert all(["style", sum(row["mask"])] in row["notes"] for row in rows)
        assert line["style"] == pytest.approx(line["length/mean"]) and f"  style {line['style']:.3g}" in said
    assert "eval/style" in lines(folder)[0]


def test_two_seeds_sample_differently_and_one_seed_the_same(start, tmp_path):
    runs = [trained(start, tmp_path / name, "--seed", seed, steps=2) for name, seed in (("a", 1), ("b", 1), ("c", 2))]
    assert same(runs[0], runs[1]) and not same(runs[0], runs[2])


# ------------------------------------------------------------------------------------------------ what a run keeps


@pytest.mark.parametrize("flag", [("--seed", 5), ("--prompts-per-step", 8), ("--digits", 2)])
def test_a_resumed_run_keeps_what_numbers_its_prompts(start, tmp_path, capsys, flag):
    trained(start, tmp_path / "run", steps=2)
    assert launch("--resume", tmp_path / "run", "--steps", 4, *flag) == 2
    assert capsys.readouterr().err.startswith(f"train_grpo.py: {flag[0]}: ")


def test_a_resumed_run_goes_on_with_the_same_problems(start, tmp_path, capsys):
    rows = [json.dumps({"prompt": f"{i}+{i}=", "answer": str(2 * i)}) for i in range(40)]
    data, run = tmp_path / "rows.jsonl", tmp_path / "run"
    data.write_text("\n".join(rows))
    flags = ("--task", "jsonl", "--data", data, "--model", start, "--prompts-per-step", 4, "--samples-per-prompt", 4,
             "--eval-every", 0, "--out", run)  # fmt: skip
    assert launch(*flags, "--steps", 1, "--max-new-tokens", 8) == 0
    data.write_text("\n".join(rows[1:]))
    assert launch("--resume", run, "--steps", 2) == 2 and "other problems" in capsys.readouterr().err
    data.write_text("\n".join(rows))
    assert launch("--resume", run, "--steps", 2) == 0


def test_broken_weights_end_a_run_and_are_not_saved(start, tmp_path, monkeypatch):
    pays(monkeypatch, even)
    with pytest.raises(FloatingPointError, match="not finite"):
        launch(*addition(start, tmp_path / "run", "--steps", 9, "--save-every", 1, "--lr", 1e308))
    assert not checkpoint.steps(tmp_path / "run")


def test_a_stop_in_the_last_evaluation_is_made_up_for_by_a_resume(start, tmp_path, monkeypatch, capsys):
    run, evaluate = tmp_path / "run", Run.evaluate

    def stopped(self, samples=1, within_step=False):
        if self.step == 2 and not within_step:
            raise KeyboardInterrupt
        return evaluate(self, samples, within_step)

    with monkeypatch.context() as patch:
        patch.setattr(Run, "evaluate", stopped)
        assert launch(*addition(start, run, "--steps", 2)) == 130
    assert not (run / "summary.json").exists()
    assert launch("--resume", run) == 0 and (run / "summary.json").exists()
    assert launch("--resume", run) == 2 and "that run is done" in capsys.readouterr().err


def test_every_evaluation_is_in_the_timeline_the_first_and_the_last_too(start, tmp_path):
    spans = timeline.read(trained(start, tmp_path / "run", steps=3) / "trace.json")
    found = [span for span in spans if span.name == "evaluate"]
    updates = [span for span in spans if span.name == "update"]
    assert len(found) == 3 and found[0].end <= updates[0].start and updates[-1].end <= found[-1].start


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES])
def test_a_full_disk_ends_a_run_in_one_line_and_other_errors_keep_their_traceback(start, tmp_path, monkeypatch, capsys, number):
    def full(self, spans):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(timeline.Trace, "write", full)
    flags = addition(start, tmp_path / "run", "--steps", 2)
    if number == errno.EACCES:
        with pytest.raises(PermissionError):
            launch(*flags)
    else:
        assert launch(*flags) == 1
        line = capsys.readouterr().err.splitlines()[-1]
        assert line.startswith("train_grpo.py: the disk is full (") and line.endswith("with --resume")
