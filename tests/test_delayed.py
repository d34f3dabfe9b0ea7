"""What stale samples are: of exactly the weights whose version they carry, and exactly as old as was asked for."""

from __future__ import annotations

import asyncio
import copy
import itertools
import json
import math
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from nanorl import reward, tiny
from nanorl.engine import Sampling
from nanorl.local import DelayedEngine, LocalEngine, Request
from nanorl.policy import Policy, admit
from nanorl.run import Run
from nanorl.sample import Group, Prompt, Sample, collate
from tests.test_train import content, launch, lines, same, tuples

V, P, G = 17, 2, 2
WORDS = tiny.tokenizer()


def wide(net, seed):
    """The model with weights of its own for each seed, so large that another past or another version shows."""
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in net.parameters():
            if p.dim() >= 2:
                p.copy_(torch.randn(p.shape, generator=random) * 1.5 / p.shape[-1] ** 0.5)
    return net


def small():
    """A policy around a small transformer with the tiny model's vocabulary."""
    config = LlamaConfig(vocab_size=V, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
                         max_position_embeddings=1024, pad_token_id=0, bos_token_id=None, eos_token_id=1)  # fmt: skip
    return Policy(wide(admit(LlamaForCausalLM(config), "small"), 0))


def weights(policy):
    """A copy of all weights."""
    return copy.deepcopy(policy.model.state_dict())


def equal(one, other):
    """The same weights, bit for bit."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def jobs_of(new=24, **how):
    """Six prompts of unequal lengths, one of them asked twice; each answer has its own length and its own numbers."""
    seeded = torch.Generator().manual_seed
    prompts = [tuple(torch.randint(0, V, (n,), generator=seeded(n)).tolist()) for n in (4, 25, 1, 9, 9, 30)]
    return [(ids, Sampling(new + 3 * i, key=(0, 0, i, 0, 0), **how)) for i, ids in enumerate(prompts)]


def as_batch(jobs, answers):
    """Prompts and their completions as the trainer sees them."""
    rows = []
    for (ids, _), c in zip(jobs, answers):
        n = len(ids)
        rows.append(Sample(ids=ids + c.ids, mask=(False,) * n + (True,) * len(c.ids), logp_behave=(0.0,) * n + c.logp,
                           version=(-1,) * n + c.version, finish=c.finish, rewards=()))  # fmt: skip
    return collate([Group(Prompt(0, (0,), "", ""), tuple(rows))])


def check_exact(policy, kept, jobs, answers):
    """Every token has the log-prob that the weights of its version give it after its own prefix, and its own number.

    kept: {version: weights}. The policy's weights are overwritten. The t-th token is where the cumulative distribution
    of those weights passes the t-th uniform number of its key.
    """
    batch = as_batch(jobs, answers)
    assert set(batch.version[batch.mask].tolist()) <= kept.keys()
    uniform = torch.zeros(batch.ids.shape, dtype=torch.float64)
    for row, ((ids, how), c) in enumerate(zip(jobs, answers)):
        uniform[row, len(ids) : len(ids) + len(c.ids)] = torch.tensor(Request(ids, how, None).uniform[: len(c.ids)])
    for version in kept:
        policy.model.load_state_dict(kept[version])
        with torch.no_grad():
            logits = policy.model(input_ids=batch.ids).logits.double()  # padded on the right: no token sees it
            logp = policy(batch).logp
        here = batch.mask & (batch.version == version)
        torch.testing.assert_close(batch.logp_behave[here], logp[here], rtol=0, atol=1e-4)
        edges = torch.nn.functional.pad(logits.softmax(2).cumsum(2), (1, 0))[:, :-1]  # [B, T − 1, V + 1]
        low, high = (edges.gather(2, batch.ids[:, 1:, None] + i)[..., 0][here[:, 1:]] for i in (0, 1))
        assert (low - 1e-4 <= uniform[here]).all() and (uniform[here] <= high + 1e-4).all()


def interrupt(engine, jobs, publications):
    """The answers to these jobs; publications: {token steps of the oldest row: function to call then}."""

    async def all_of_them():
        running = [asyncio.ensure_future(engine.generate(*job)) for job in jobs]
        for steps, publish in sorted(publications.items()):
            while not any(len(request.new) >= steps for request in engine.rows):
                await asyncio.sleep(0)
            publish()
        return await asyncio.gather(*running)

    return asyncio.run(asyncio.wait_for(all_of_them(), timeout=60))


# ------------------------------------------------------------------------------------------------ interruption


@settings(max_examples=6)
@given(st.sampled_from([None, 0, 1, 2, 3]), st.sets(st.integers(1, 22), min_size=2, max_size=5),
       st.sampled_from([2, 512]))  # fmt: skip
def test_every_token_is_sampled_by_the_weights_whose_version_it_carries(delay, moments, max_rows):
    """None: the local engine, whose weights are those in training. Each token was sampled once, and none thrown away."""
    policy = small()
    engine = LocalEngine(policy, WORDS) if delay is None else DelayedEngine(policy, WORDS, 0, delay)
    engine.max_rows, kept, numbers = max_rows, {0: weights(policy)}, itertools.count(1)

    def publish():
        version = next(numbers)
        wide(policy.model, version)
        kept[version] = weights(policy)
        engine.update_weights(policy, version)

    jobs = jobs_of()
    answers = interrupt(engine, jobs, dict.fromkeys(moments, publish))
    newest = max(0, len(moments) - (delay or 0))
    assert max(c.version[-1] for c in answers) == newest == engine.version
    assert all(list(c.version) == sorted(c.version) for c in answers)
    assert max(len(set(c.version)) for c in answers) == newest + 1
    assert [len(c.ids) for c in answers] == [how.max_new_tokens for _, how in jobs]
    assert {c.finish for c in answers} == {"length"}
    work = [span for span in engine.lap() if span.name == "generate"]
    assert sum(span.args["rows"] for span in work) == sum(len(c.ids) for c in answers)
    check_exact(policy, kept, jobs, answers)


# ------------------------------------------------------------------------------------------------ which version


@pytest.mark.parametrize("start", [0, 5])
@pytest.mark.parametrize("delay", [0, 1, 2, 4, math.inf])
def test_it_samples_with_the_version_that_lies_so_far_behind_but_not_before_its_start(start, delay):
    """Bit for bit those weights, whatever becomes of the trainer's; it holds one copy of each version still to come."""
    policy = small()
    kept, engine = {start: weights(policy)}, DelayedEngine(policy, WORDS, start, delay)
    for v in range(start + 1, start + 9):
        wide(policy.model, v)
        kept[v] = weights(policy)
        engine.update_weights(policy, v)
        wide(policy.model, 1000 + v)  # what the trainer does next is nothing to it
        assert engine.version == max(start, v - delay)
        assert equal(weights(engine.policy), kept[engine.version])
        assert len(engine.kept) == (0 if delay == math.inf else min(v - start, delay))
    assert [span.name for span in engine.lap()] == ["sync"] * (0 if delay == math.inf else 8)
    assert not any(p.requires_grad for p in engine.policy.parameters())
    assert all(p.requires_grad for p in policy.parameters())


# ------------------------------------------------------------------------------------------------ whole runs


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """The folder of a small model."""
    folder = tmp_path_factory.mktemp("start")
    for part in (small().model, WORDS):
        part.save_pretrained(folder)
    return folder


@pytest.fixture
def trained(start, monkeypatch, capsys):
    """trained(folder, *flags): such a run, finished; nearly every group has contrast, and the weights move far."""
    monkeypatch.setattr("nanorl.run.TIMEOUT", 20.0)
    monkeypatch.setitem(reward.REWARDS, "arithmetic", lambda prompt, text, asked, ids, answer, **row:
                        (1 + sum(ids)) % 7 if ids or text else 0.0)  # fmt: skip

    def run(folder, *flags):
        sizes = ("--prompts-per-step", P, "--samples-per-prompt", G, "--eval-problems", 4, "--eval-every", 0)
        rest = ("--model", start, "--digits", 1, "--max-new-tokens", 6, "--lr", 3e-2, "--out", folder,
                "--reward-workers", 0)  # fmt: skip
        assert launch(*sizes, *rest, *flags) == 0
        return folder

    return run


def lags(folder):
    """[(smallest, mean, largest)] lag over the samples of each step."""
    found = {}
    for row in lines(folder, "samples"):
        found.setdefault(row["step"], []).append(row["step"] - 1 - row["version"][row["mask"].index(1)])
    return [(min(of), sum(of) / len(of), max(of)) for of in found.values()]


@pytest.mark.parametrize("delay", [1, 3, "inf"])
def test_every_sample_is_as_old_as_was_asked_for_and_the_run_repeats_bit_for_bit(trained, tmp_path, delay):
    once, again = (trained(tmp_path / name, "--delay", delay, "--steps", 6) for name in ("once", "again"))
    expected = [min(step, float(delay)) for step in range(6)]
    assert lags(once) == [(lag, lag, lag) for lag in expected]
    assert [line["lag/max"] for line in lines(once)] == [line["lag/mean"] for line in lines(once)] == expected
    assert same(once, again)


def test_a_delay_changes_what_is_trained_on_and_nothing_before_it_can(trained, tmp_path):
    """The first step has no older weights than its own; from the second on they are others."""
    now, late = trained(tmp_path / "now", "--steps", 3), trained(tmp_path / "late", "--delay", 1, "--steps", 3)
    texts = [[row["ids"] for row in lines(folder, "samples")] for folder in (now, late)]
    assert texts[0][: 2 * P * G] != texts[1][: 2 * P * G] and texts[0][: P * G] == texts[1][: P * G]
    assert content(now)["model.safetensors"] != content(late)["model.safetensors"]


@pytest.mark.parametrize("delay", [2, "inf"])
def test_every_sample_has_the_log_probs_of_its_version(trained, tmp_path, monkeypatch, delay):
    """Those that the trainer's weights had, that many steps before; with ∞ those of the start, whatever was learnt."""
    kept, begin, publish = {}, Run.begin, Run.publish

    def copied(then):
        def remembered(run):
            kept[run.step] = weights(run.policy)
            return then(run)

        return remembered

    monkeypatch.setattr(Run, "begin", copied(begin))
    monkeypatch.setattr(Run, "publish", copied(publish))
    folder = trained(tmp_path / "run", "--delay", delay, "--steps", 5)
    fields, policy, worst = set(Sample.__dataclass_fields__), small(), []
    for row in lines(folder, "samples"):
        sample = Sample(**{key: tuples(value) for key, value in row.items() if key in fields})
        batch = collate([Group(Prompt(0, (0,), "", ""), (sample,))])
        (version,) = set(batch.version[batch.mask].tolist())
        differ = []
        for of in (version, 5):
            policy.model.load_state_dict(kept[of])
            with torch.no_grad():
                differ.append(float((policy(batch).logp - batch.logp_behave)[batch.mask].abs().max()))
        worst.append(differ)
    assert max(own for own, _ in worst) < 1e-4 and min(last for _, last in worst) > 1e-2


def test_with_the_start_weights_for_ever_a_resumed_run_is_the_same(trained, tmp_path):
    whole = trained(tmp_path / "whole", "--delay", "inf", "--steps", 6)
    halves = trained(tmp_path / "halves", "--delay", "inf", "--steps", 3)
    assert launch("--resume", halves, "--steps", 6) == 0
    assert same(halves, whole) and lags(halves)[-1] == (5, 5, 5)


def test_a_resumed_run_has_no_older_weights_than_those_it_resumes_with(trained, tmp_path):
    halves = trained(tmp_path / "halves", "--delay", 2, "--steps", 3)
    assert launch("--resume", halves, "--steps", 7) == 0
    assert [largest for *_, largest in lags(halves)] == [0, 1, 2, 0, 1, 2, 2]


def test_evaluation_is_by_the_weights_of_now(trained, tmp_path, capsys):
    """Those of the checkpoint, which the run did not sample with."""
    evaluated = ("--eval-every", 1, "--save-every", 1, "--eval-samples", 1, "--eval-problems", 16)
    folder = trained(tmp_path / "run", "--delay", "inf", "--steps", 3, *evaluated)
    rows = lines(folder)
    assert len({json.dumps({key: line[key] for key in line if key.startswith("eval/")}) for line in rows}) > 1
    for step in (1, 3):
        capsys.readouterr()
        how = ("--digits", 1, "--max-new-tokens", 6, "--eval-problems", 16, "--eval-samples", 1,
               "--reward-workers", 0)  # fmt: skip
        assert launch("--eval-only", "--model", folder / "checkpoints" / f"step-{step}", *how) == 0
        said = dict(re.findall(r"^  (\S+) +([\d.]+)$", capsys.readouterr().out, re.MULTILINE))
        assert said == {key[5:]: f"{value:.3f}" for key, value in rows[step].items() if key.startswith("eval/")}
