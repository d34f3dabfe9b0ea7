"""What a checkpoint answers: sampled as a run samples, judged where the task knows the answer, refused in one line."""

import asyncio
import dataclasses
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nanorl import ask, rollout, tiny
from nanorl.algorithms import ALGORITHMS
from nanorl.ask import Asked, beneath, known, main, parser
from nanorl.config import Config, resolved
from nanorl.engine import Sampling
from nanorl.local import LocalEngine
from nanorl.policy import Policy
from nanorl.sample import Prompt

ROOT = Path(__file__).resolve().parents[1]
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}="


def saved(folder, chat=False):
    """The tiny model with fresh weights in this folder, as a checkpoint has it."""
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = TEMPLATE if chat else None
    tiny.model(seed=0).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def run_of(folder, chat=False, checkpoints=(3, 12), **job):
    """The folder of a run of these settings with checkpoints."""
    folder.mkdir(parents=True)
    cfg = dataclasses.asdict(resolved(Config(**job)))
    axes = dataclasses.asdict(ALGORITHMS["grpo"].axes)
    (folder / "config.json").write_text(json.dumps({"algorithm": "grpo", "config": cfg, "axes": axes}))
    for step in checkpoints:
        path = saved(folder / "checkpoints" / f"step-{step}", chat)
        (path / "state.json").write_text(json.dumps({"step": step, "score": None, "state": {}, "files": {}}))
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of the default job, with two checkpoints."""
    return run_of(tmp_path_factory.mktemp("runs") / "a", temperature=1.5)


def told(capsys, *words):
    """Exit status, output and errors of the command."""
    return main(list(map(str, words))), *capsys.readouterr()


def asked(*words):
    """The model of this command line."""
    return Asked(parser().parse_args(list(map(str, words))))


# ---- the samples


def test_it_samples_what_the_engine_of_the_run_samples(run):
    model = asked(run, "12+3=", "--seed", 5, "--samples", 3)
    group = model.answers(0, "12+3=")
    net, tokenizer = tiny.model(seed=0).eval(), tiny.tokenizer()
    engine = LocalEngine(Policy(net, 1.5), tokenizer)

    async def nothing(*of):
        return 0.0

    prompt = Prompt(0, tuple(tokenizer("12+3=").input_ids), "12+3=", "15", {"after": ")"})
    sampling = Sampling(resolved(Config()).max_new_tokens, 1.5, frozenset({1}), (), (5, rollout.EVALUATE))
    wanted = asyncio.run(rollout.group(engine, tokenizer, prompt, nothing, sampling, 3))
    for sample, other in zip(group.samples, wanted.samples, strict=True):
        assert (sample.ids, sample.logp_behave, sample.finish) == (other.ids, other.logp_behave, other.finish)
        scores = (net(torch.tensor([sample.ids])).logits[0].detach() / 1.5).log_softmax(-1)
        for t in (i for i, m in enumerate(sample.mask) if m):
            assert sample.logp_behave[t] == pytest.approx(float(scores[t - 1, sample.ids[t]]), abs=1e-4)


def test_greedy_is_one_answer_of_the_likeliest_tokens(run):
    (sample,) = asked(run, "12+3=", "--greedy", "--max-new-tokens", 4).answers(0, "12+3=").samples
    scores = tiny.model(seed=0).eval()(torch.tensor([sample.ids])).logits[0]
    assert list(sample.ids[5:]) == scores[4:-1].argmax(-1).tolist() and sum(sample.mask) <= 4


@pytest.mark.parametrize("text, answer", [("123+456=", "579"), ("0+0=", "0"), ("12+3", None), ("hello", None),
                                          ("1+2=3", None)])  # fmt: skip
def test_of_additions_the_answer_is_known(text, answer):
    problem = known(text, Config(), None)
    assert (problem.answer if problem else None) == answer


def test_the_verdict_is_the_verifier_s(run, monkeypatch, capsys):
    """Right with or without working; what is no addition has no verdict."""
    texts = ["(1315)15", "16", "15"]
    monkeypatch.setattr("nanorl.rollout.Turns.text", lambda self, completion: texts[self.sampling.key[-1]])
    out = told(capsys, run, "12+3=", "--samples", 3)[1]
    assert [line.split(",")[0] for line in out.splitlines() if "finish" in line] == ["1: right", "2: wrong", "3: right"]
    assert "(right: 15)" in out
    monkeypatch.setattr("nanorl.rollout.Turns.text", lambda self, completion: "15")
    out = told(capsys, run, "12+", "--samples", 1)[1]
    assert "1: finish" in out and "right" not in out and "wrong" not in out


def test_a_run_of_problems_in_a_file_knows_their_answers_and_its_prompts_go_through_the_template(tmp_path, capsys):
    data = tmp_path / "d.jsonl"
    data.write_text('{"prompt": "12", "answer": "3"}\n{"prompt": "45", "answer": "9"}\n')
    folder = run_of(tmp_path / "r", True, task="jsonl", data=str(data), system_prompt="7", prompt_suffix="+1")
    model = asked(folder, "12", "--max-new-tokens", 5)
    assert (model.prompt(0, "12").text, model.prompt(0, "12").answer) == ("712+1=", "3")
    assert (model.prompt(1, "99").text, model.prompt(1, "99").answer) == ("799+1=", "")
    data.unlink()
    capsys.readouterr()
    assert asked(folder, "12", "--max-new-tokens", 5).prompt(0, "12").text == "712+1="
    assert "not there" in capsys.readouterr().out


# ---- where the model is


def test_a_run_means_its_newest_whole_checkpoint_and_a_checkpoint_has_its_run_s_settings(run):
    newest, third = run / "checkpoints" / "step-12", run / "checkpoints" / "step-3"
    assert ask.found(str(run))[0] == str(newest) and ask.found(str(run))[1].temperature == 1.5
    assert ask.found(str(third))[0] == str(third) and ask.found(str(third))[1].temperature == 1.5
    os.rename(newest / "state.json", newest / "gone")
    assert ask.found(str(run))[0] == str(third)
    os.rename(newest / "gone", newest / "state.json")


def test_a_model_of_no_run_is_asked_as_it_is(tmp_path, capsys):
    status, out, _ = told(capsys, saved(tmp_path / "m"), "1+2=", "--samples", 1)
    assert status == 0 and "temperature 1, at most 32 new tokens; it is of no run" in out and "(right: 3)" in out


# ---- the command


def test_prompts_come_from_the_line_and_from_standard_input(run, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("2+2=\n\n3+3=\r\n"))
    status, out, error = told(capsys, run, "1+1=", "-", "--samples", 1, "--max-new-tokens", 3)
    assert (status, error) == (0, "")
    assert [line for line in out.splitlines() if "(right: " in line] == [
        "1+1=   (right: 2)", "2+2=   (right: 4)", "3+3=   (right: 6)"]  # fmt: skip


@given(st.lists(st.tuples(st.text(max_size=9), st.floats(-99, 0)), min_size=1, max_size=12), st.integers(20, 90))
def test_every_token_stands_above_its_log_prob_and_the_lines_fit(tokens, columns):
    texts, logp = zip(*tokens)
    lines = beneath(texts, logp, columns).split("\n")
    assert " ".join(lines[1::2]).split() == [f"{p:.3f}" for p in logp]
    assert all(line.isprintable() for line in lines) and len(lines) % 2 == 0
    shown = [repr(text)[1:-1].replace(" ", "·") for text in texts]
    if all(len(text) < 15 for text in shown):
        assert all(len(line) <= columns for line in lines)
    assert "".join("".join(lines[::2]).split(" ")) == "".join(shown)


@pytest.mark.parametrize("words, why", [
    ([], "required"), (["RUN"], "PROMPT"), (["RUN", "1+1=", "--speed"], "--speed"),
    (["RUN", "", "--greedy"], "PROMPT ''"),
    (["RUN", "1+1=", "--samples", "0"], "--samples 0"), (["RUN", "1+1=", "--temperature", "0"], "--greedy"),
    (["RUN", "1+1=", "--temperature", "nan"], "--temperature"), (["RUN", "1+1=", "--seed", "-1"], "--seed -1"),
    (["RUN", "1+1=", "--max-new-tokens", "0"], "--max-new-tokens 0"),
    (["./NO", "1+1="], "CHECKPOINT ./NO: no such folder"),
    (["RUN", "1+1=", "--max-new-tokens", "300"], "the model takes 256"), (["RUN", "\udcff"], "not text"),
    (["BARE", "1+1="], "BARE: no checkpoint there yet"), (["OLD", "1+1="], "OLD/config.json: not the settings"),
])  # fmt: skip
def test_what_cannot_be_asked_is_refused_in_one_line(words, why, run, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_of(tmp_path / "BARE", checkpoints=())
    (tmp_path / "OLD").mkdir()
    (tmp_path / "OLD" / "config.json").write_text('{"algorithm": "grpo", "config": {"speed": 1}, "axes": {}}')
    status, out, error = told(capsys, *(str(run) if word == "RUN" else word for word in words))
    assert status == 2 and error.count("\n") == 1 and why in error


def test_ctrl_c_ends_it_in_one_line(run, capsys, monkeypatch):
    def interrupted(*of):
        raise KeyboardInterrupt

    monkeypatch.setattr(Asked, "answers", interrupted)
    assert told(capsys, run, "1+1=")[::2] == (130, "stopped\n")


def test_help_is_the_rollout_s_and_needs_no_torch():
    code = "import sys, runpy; sys.modules['torch'] = None; runpy.run_module('nanorl.rollout', run_name='__main__')"
    ended = subprocess.run([sys.executable, "-c", code, "--help"], cwd=ROOT, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "") and "CHECKPOINT" in ended.stdout


@pytest.mark.slow
def test_a_process_that_waits_for_a_prompt_is_ended_by_ctrl_c(run):
    process = subprocess.Popen([sys.executable, "-m", "nanorl.rollout", str(run), "-"], cwd=ROOT, text=True,
                               stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)  # fmt: skip
    assert "temperature" in process.stdout.readline()
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60)[1] == "stopped\n" and process.returncode == 130
