"""Whole runs with a real vLLM server: fresh, asynchronous, resumed; and what is refused before anything is written."""

import json
from collections import Counter

import pytest

import train_grpo
from nanorl import launch as launching
from nanorl.metrics import PUBLISH
from nanorl.reward import REWARDS
from tests.server import free_port
from tests.test_train import lines

SMALL = ("--digits", 1, "--prompts-per-step", 4, "--samples-per-prompt", 4, "--eval-problems", 4, "--eval-every", 0,
         "--max-new-tokens", 8, "--reward", "parity", "--reward-workers", 0)  # fmt: skip


@pytest.fixture(autouse=True)
def parity(monkeypatch):
    """A reward that a model knows nothing about earns half of the time, so that there is something to train on."""

    def reward(prompt, completion, prompt_ids, completion_ids, answer, **row):
        return 1.0 if completion.endswith(answer) else 0.5 * (len(completion_ids) % 2)

    monkeypatch.setitem(REWARDS, "parity", reward)


def launch(*flags):
    """The exit status of train_grpo.py with these flags."""
    return launching.launch("train_grpo.py", "grpo", train_grpo.train, [*map(str, flags)])


def served(server, folder, *flags):
    """The flags of a run with this server and the model that it serves."""
    return ("--engine", "vllm", "--servers", server.url, "--model", server.folder / "model", *SMALL, "--out", folder, *flags)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["broadcast", "disk"])
def test_without_lag_every_sample_is_fresh_and_server_and_trainer_agree(real_server, tmp_path, transport):
    """The temperature on both sides, too; every step's weights were proven."""
    folder = tmp_path / "run"
    flags = ("--steps", 4, "--lr", 1e-3, "--temperature", 0.8, "--transport", transport)
    assert launch(*served(real_server, folder, *flags)) == 0
    rows = lines(folder)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert any(row["grad_norm"] > 0 for row in rows)
    for row in (row for row in rows if row["trained_rows"] > 0):
        assert row["lag/max"] == 0 and row["mismatch/max"] < 5e-5 and row["sync/mismatch"] < 1e-5
        assert {f"sync/{part}" for part in PUBLISH} <= row.keys()
    versions = {(line["step"], v) for line in lines(folder, "samples") for v in line["version"] if v >= 0}
    assert versions == {(step, step - 1) for step in range(1, 5)}


@pytest.mark.slow
def test_with_lag_and_after_a_resume_every_prompt_is_trained_once_and_no_sample_is_too_old(real_server, tmp_path):
    folder = tmp_path / "run"
    assert launch(*served(real_server, folder, "--steps", 5, "--max-lag", 2)) == 0
    assert launch("--resume", folder, "--steps", 9) == 0
    prompts = Counter(line["prompt"] for line in lines(folder, "samples"))
    assert set(prompts) == set(range(36)) and set(prompts.values()) == {4}
    for line in lines(folder, "samples"):
        sampled = [v for v in line["version"] if v >= 0]
        assert sampled == sorted(sampled) and 0 <= line["step"] - 1 - sampled[-1] <= line["step"] - 1 - sampled[0] <= 2
    saved = json.loads((folder / "config.json").read_text())["config"]
    assert saved["remote"]["servers"] == [real_server.url]


@pytest.mark.slow
def test_another_model_is_refused_by_the_field_that_differs_and_nothing_is_written(real_server, tmp_path, tiny_model, capsys):
    for part in tiny_model:
        part.save_pretrained(tmp_path / "other")
    flags = [*map(str, served(real_server, tmp_path / "run"))]
    flags[flags.index("--model") + 1] = str(tmp_path / "other")
    assert launch(*flags) == 2 and not (tmp_path / "run").exists()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"train_grpo.py: --servers {real_server.url}: ") and "hidden_size" in line


@pytest.mark.slow
def test_answers_that_the_server_has_no_room_for_are_refused_at_the_start(real_server, tmp_path, capsys):
    """The server's room is smaller than the model's where its --max-model-len is."""
    assert launch(*served(real_server, tmp_path / "run", "--max-new-tokens", 5000)) == 2
    assert "--max-new-tokens 5000" in capsys.readouterr().err and not (tmp_path / "run").exists()


def test_a_server_that_is_not_there_is_refused_with_the_command_that_starts_one(tmp_path, tiny_model, capsys):
    for part in tiny_model:
        part.save_pretrained(tmp_path / "model")
    port = free_port()
    flags = ("--engine", "vllm", "--servers", f"http://127.0.0.1:{port}", "--model", tmp_path / "model", *SMALL)
    assert launch(*flags, "--out", tmp_path / "run") == 2 and not (tmp_path / "run").exists()
    (line,) = capsys.readouterr().err.splitlines()
    assert f"python -m nanorl.serve --model DIR --port {port}" in line
