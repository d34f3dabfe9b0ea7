"""A sample as a table: every number is the file's, the texts add up to the answer, and one line for what is not there."""

import ast
import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanorl import tiny
from nanorl.config import Refused
from nanorl.look import main
from nanorl.metrics import of_tokens as known
from nanorl.monitor import Monitor
from nanorl.token_table import TITLES, cells, decoder, of_step, of_tokens, pieces, tokens
from tests.test_metrics import NAN, algorithm, batch_of, group_of, make, steps
from tests.test_monitor import PLAIN, SECONDS

float32 = st.floats(-20, 0, width=32)
GROUPS = [group_of(make((3, 4), 1.0, text="12", notes=(("worked", 1.0),)), make((5,), 0.0, finish="length"), number=7),
          group_of(make((6, 1), 0.5, train=False, text="a\nb"), make((7,), 0.25), number=8)]  # fmt: skip


def written(folder, groups=GROUPS, step=5, of=None):
    """A run's folder with a step in its samples.jsonl, as a run writes it; returns what was known of the tokens."""
    batch, logp = batch_of(groups, 0)
    told = known(batch, logp, algorithm(), 1) if of is None else of
    watch = Monitor(folder, 0, step)
    watch.step(step, PLAIN, groups, SECONDS, told)
    watch.close()
    (folder / "config.json").write_text(json.dumps({"algorithm": "grpo", "config": {"model": None}}))
    return told


def said(capsys, *words):
    """Exit status, output and errors of the command, without what was printed before."""
    capsys.readouterr()
    return main(["--sample", *map(str, words)]), *capsys.readouterr()


def columns(text):
    """title → the cells of the column, of the table in this output; cells are cut where their titles stand."""
    head, *lines = text.split("\n\n")[1].split("\n")
    ends = {title: head.index(title) + len(title) for title in TITLES}
    starts = dict(zip(TITLES, [0, *(ends[title] for title in TITLES)]))
    starts["mask"] = head.index("mask") - 1
    ends["text"] = starts["mask"]
    return {title: [line[starts[title] : ends[title]].strip() for line in lines] for title in TITLES}


# ---- what the run writes


@given(steps, st.integers(0, 2**31))
@settings(max_examples=25)
def test_what_is_known_of_the_tokens_is_the_batch_s(step, seed):
    batch, logp = batch_of(step, seed)
    rows = known(batch, logp, algorithm(), 1)
    assert len(rows) == len(batch)
    for i, row in enumerate(rows):
        n, mask = int(batch.length[i]), batch.mask[i]
        start = [float(logp[i, t] if batch.logp_prox[i, t].isnan() else batch.logp_prox[i, t]) for t in range(n)]
        assert row["adv"] == [float(batch.adv[i, t]) if mask[t] else 0.0 for t in range(n)]
        if any(math.isnan(start[t]) for t in range(n) if mask[t]):
            assert row["logp_prox"] is None
        else:
            assert row["logp_prox"] == [start[t] if mask[t] else 0.0 for t in range(n)]


def test_a_policy_that_moved_away_unmeasured_is_not_called_the_one_at_the_start():
    batch, logp = batch_of(GROUPS, 0)
    batch = replace(batch, logp_prox=None)
    assert any(row["logp_prox"] for row in known(batch, torch.zeros_like(logp), algorithm(), 1))
    assert not any(row["logp_prox"] for row in known(batch, torch.zeros_like(logp), algorithm(), 2))


def test_samples_that_are_not_trained_take_nobody_s_numbers(tmp_path):
    told = written(tmp_path)
    rows = of_step(tmp_path / "samples.jsonl", 5)
    assert [row.get("adv") for row in rows] == [told[0]["adv"], told[1]["adv"], None, told[2]["adv"]]
    assert [len(row["ids"]) for row in rows if "adv" in row] == [len(row["adv"]) for row in told]


# ---- the table


@given(st.lists(st.tuples(st.booleans(), float32, float32, st.floats(-3, 3, width=32), st.integers(0, 9)), min_size=1))
def test_the_table_is_the_sample_bit_by_bit(rows):
    """Nine digits are a float32; ratio is exp(logp_prox − logp_behave)."""
    mask, behave, prox, adv, version = zip(*rows)
    sample = {"ids": list(range(len(rows))), "mask": list(map(int, mask)), "logp_behave": behave, "logp_prox": prox,
              "adv": adv, "version": version, "rewards": [[len(rows) - 1, 0.5], [len(rows) - 1, 0.25]]}  # fmt: skip
    told = of_tokens(sample, lambda ids: "".join(map(chr, ids)))
    for i, token in enumerate(told):
        cell = dict(zip(TITLES, cells(token), strict=True))
        assert (cell["position"], cell["id"], cell["mask"]) == (str(i), str(i), str(int(mask[i])))
        assert ast.literal_eval(cell["text"]) == chr(i)
        assert cell["reward"] == ("0.75" if i == len(rows) - 1 else "")
        if mask[i]:
            assert np.float32(cell["logp_behave"]) == np.float32(behave[i]) and cell["version"] == str(version[i])
            assert np.float32(cell["logp_prox"]) == np.float32(prox[i]) and np.float32(cell["adv"]) == np.float32(adv[i])
            assert float(cell["ratio"]) == pytest.approx(math.exp(prox[i] - behave[i]), rel=1e-6)
        else:
            assert not any(cell[name] for name in ("logp_behave", "logp_prox", "ratio", "version", "adv"))


def test_the_command_shows_the_sample_with_its_texts(tmp_path, capsys):
    told = written(tmp_path)
    status, out, error = said(capsys, tmp_path, 5, 0)
    assert (status, error) == (0, "") and out.startswith(
        "step 5, row 0: prompt 7, reward 1.0, finish stop, 2 tokens sampled, worked 1.0\n")  # fmt: skip
    table, decode = columns(out), tiny.tokenizer().decode
    assert table["id"] == ["1", "2", "3", "4"] and table["mask"] == ["0", "0", "1", "1"]
    assert [ast.literal_eval(text) for text in table["text"]] == [decode([i]) for i in (1, 2, 3, 4)]
    assert table["logp_behave"] == ["", "", "-1", "-1"] and table["reward"] == ["", "", "", "1.0"]
    assert [np.float32(cell) for cell in table["adv"][2:]] == [np.float32(x) for x in told[0]["adv"][2:]]


def test_the_samples_of_a_step_are_listed_and_cannot_command_the_terminal(tmp_path, capsys):
    written(tmp_path)
    status, out, _ = said(capsys, tmp_path, 5)
    lines = [line.split() for line in out.splitlines()]
    assert status == 0 and lines == [["row", "prompt", "reward", "finish", "tokens", "begins"],
        ["0", "7", "1.0", "stop", "2", "12"], ["1", "7", "0.0", "length", "1"],
        ["2", "8", "0.5", "stop", "2", r"a\nb"], ["3", "8", "0.25", "stop", "1"]]  # fmt: skip


def test_a_run_of_before_has_dashes_and_so_has_a_row_without_a_pass(tmp_path, capsys):
    written(tmp_path, of=())
    table = columns(said(capsys, tmp_path, 5, 0)[1])
    assert table["logp_prox"] == table["adv"] == table["ratio"] == ["", "", "–", "–"]
    assert table["logp_behave"] == ["", "", "-1", "-1"]
    told = tokens(of_step(tmp_path / "samples.jsonl", 5)[0] | {"logp_prox": None, "adv": [0.0] * 4}, None, 0)
    assert columns(told)["logp_prox"][2:] == ["–", "–"] and columns(told)["adv"][2:] == ["0", "0"]
    assert columns(told)["text"] == ["–"] * 4 and "tokenizer" in told


def test_log_probs_that_were_not_finite_are_dashes(tmp_path, capsys):
    groups = [group_of(make((3, 4), NAN, logp=(NAN, -1.0)))]
    written(tmp_path, groups, of=[{"logp_prox": [0, 0, -2.0, -1.0], "adv": [0.0] * 4}])
    table = columns(said(capsys, tmp_path, 5, 0)[1])
    assert table["logp_behave"][2:] == ["–", "-1"] and table["ratio"][2:] == ["–", "1"]
    assert table["reward"][2:] == ["", "nan"]
    assert said(capsys, tmp_path, 5)[0] == 0


# ---- texts of tokens


@given(st.text(max_size=9))
@settings(max_examples=25)
def test_the_texts_of_tokens_of_bytes_add_up_but_for_unfinished_characters(text):
    ids = list(text.encode())
    told = pieces(lambda some: bytes(some).decode(errors="replace"), ids)
    assert len(told) == len(ids)
    assert "".join(piece for piece in told if piece != "�") == text.replace("�", "")


@given(st.lists(st.sampled_from(["▁the", "▁a", "cat", "s"]), min_size=1, max_size=12))
def test_the_texts_keep_the_blanks_that_a_decoder_takes_from_the_front(words):
    """As SentencePiece's does: the first token's blank is lost, those within a text are not."""
    told = pieces(lambda some: "".join(some).replace("▁", " ").removeprefix(" "), words)
    assert told == [word.replace("▁", " " if i else "") for i, word in enumerate(words)]


def test_the_tokenizer_is_a_checkpoint_s_else_the_start_model_s_else_none(tmp_path):
    (tmp_path / "config.json").write_text('{"config": {"model": "%s"}}' % (tmp_path / "gone"))
    assert decoder(tmp_path) is None
    (tmp_path / "config.json").write_text('{"config": {"model": null}}')
    assert decoder(tmp_path)([4, 14, 1]) == tiny.tokenizer().decode([4, 14, 1])
    tiny.tokenizer().save_pretrained(tmp_path / "checkpoints" / "step-3")
    (tmp_path / "config.json").write_text("torn")
    assert decoder(tmp_path)([4, 14, 1]) == tiny.tokenizer().decode([4, 14, 1])


# ---- what is not there


@pytest.mark.parametrize("words, why", [
    (["RUN"], "name a run, a step"), (["RUN", "5", "0", "1"], "name a run, a step"),
    (["RUN", "x"], "x is no number"),
    (["RUN", "5", "-1"], "-1 is no number"), (["RUN", "5", "4"], "no such row; that step has 0 to 3"),
    (["RUN", "6"], "no such step; RUN/samples.jsonl has steps 5 to 5"), (["NO", "5"], "NO/samples.jsonl: cannot be read"),
    (["EMPTY", "1"], "no sample yet"), (["TORN", "5"], "TORN/samples.jsonl, line 5: not JSON"),
    (["OTHER", "5"], "OTHER/samples.jsonl, line 1: not a sample"), (["OLD", "5", "0"], "samples of another version"),
    (["OLD", "5"], "samples of another version"), (["UNEQUAL", "5", "0"], "samples of another version"),
])  # fmt: skip
def test_what_cannot_be_shown_is_refused_in_one_line(words, why, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("RUN", "EMPTY", "TORN", "OTHER", "OLD", "UNEQUAL"):
        (tmp_path / name).mkdir()
        written(tmp_path / name)
    half = (tmp_path / "RUN" / "samples.jsonl").read_text()
    for name, text in (("RUN", half + '{"step": 6, "pro'), ("EMPTY", '{"step": 1, "ids'),
                       ("TORN", half + '{"step": 5, "i\n'),
                       ("OTHER", '{"iteration": 5}\n'), ("OLD", '{"step": 5, "tokens": []}\n'),
                       ("UNEQUAL", half.replace('"mask": [0, 0, 1, 1]', '"mask": [0, 0, 1]', 1))):  # fmt: skip
        (tmp_path / name / "samples.jsonl").write_text(text)
    status, out, error = said(capsys, *words)
    assert (status, out) == (2, "") and error.count("\n") == 1 and why in error


def test_a_step_is_found_without_reading_the_others_as_json(tmp_path):
    (tmp_path / "samples.jsonl").write_text('{"step": 4, broken\n{"step": 5, "ids": []}\n{"step": 50, broken\n')
    assert of_step(tmp_path / "samples.jsonl", 5) == [{"step": 5, "ids": []}]
    with pytest.raises(Refused, match="steps 4 to 50"):
        of_step(tmp_path / "samples.jsonl", 6)
