"""The benchmarks measure what they say: their arithmetic, their books, and that they run; never how fast anything is."""

import argparse
import ast
import copy
import doctest
import importlib
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "notes" / "benchmarks"
SCRIPTS = sorted(path for path in FOLDER.glob("*.py"))
sys.path.insert(0, str(FOLDER))  # as python notes/benchmarks/NAME.py does
from nanorl import policy as module
from nanorl.policy import Policy

NAMES = ("bench", "gpu_check", "growth", "logprob_memory", "peer", "step_parts", "synthetic")
bench, gpu_check, growth, logprob_memory, peer, step_parts, synthetic = map(importlib.import_module, NAMES)
NUMBERS = st.floats(1e-6, 1e9)
CELLS = NUMBERS | st.lists(NUMBERS, min_size=1, max_size=5)
ROWS = st.lists(st.dictionaries(st.sampled_from("abc"), CELLS, min_size=1), min_size=1)


# ------------------------------------------------------------------------------------------------ results


@pytest.mark.parametrize("of", [bench, gpu_check, growth, peer], ids=lambda of: of.__name__)
def test_the_examples_in_docstrings_hold(of):
    failed, tried = doctest.testmod(of)
    assert tried and not failed


@given(ROWS)
def test_a_table_has_a_line_a_row_and_a_cell_a_column(rows):
    lines = bench.table(rows).splitlines()
    assert len(lines) == len(rows) + 2
    assert {line.count("|") for line in lines} == {len({title for row in rows for title in row}) + 1}


def entry(name, value):
    """A line of results.jsonl."""
    return {"benchmark": name, "command": "c", "date": "d", "machine": "m", "versions": {}, "rows": [{"x": value}]}


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(1000, 9999)), min_size=1))
def test_the_readme_gets_the_latest_result_of_each_benchmark_and_keeps_its_words(found):
    page = "words\n<!-- table a -->\nold\n<!-- end -->\nmore\n<!-- table b -->\n<!-- end -->\nlast"
    entries = [entry(name, value) for name, value in found]
    full = bench.filled(page, entries)
    assert bench.filled(full, entries) == full
    words = re.sub(r"(<!-- table \w -->\n).*?(<!-- end)", r"\1\2", full, flags=re.DOTALL)
    assert words == re.sub(r"(<!-- table \w -->\n).*?(<!-- end)", r"\1\2", page, flags=re.DOTALL)
    for name, value in dict(found).items():
        assert f"| {value:,} |" in full.split(f"<!-- table {name} -->")[1].split("<!-- end -->")[0]


def test_the_readme_of_the_benchmarks_shows_what_results_jsonl_says_and_names_every_benchmark():
    page = bench.README.read_text()
    entries = [json.loads(line) for line in bench.RESULTS.read_text().splitlines()]
    assert bench.filled(page, entries) == page, "python notes/benchmarks/bench.py fills it"
    for name in {entry["benchmark"] for entry in entries}:
        assert f"<!-- table {name} -->" in page
    for path in SCRIPTS:
        assert path.name in page


def test_a_report_is_appended_with_what_it_was_measured_on_and_no_record_leaves_the_file(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench, "RESULTS", tmp_path / "results.jsonl")
    monkeypatch.setattr(sys, "argv", ["some/where/x.py", "FOLDER", "--no-record"])
    bench.report("one", [{"s": [1.0, 3.0, 2.0]}], record=False)
    assert not bench.RESULTS.exists() and "2 (1 to 3)" in capsys.readouterr().out
    bench.report("one", [{"s": 1.0}])
    bench.report("two", [{"s": [2.0, 4.0]}])
    one, two = (json.loads(line) for line in bench.RESULTS.read_text().splitlines())
    assert one["benchmark"] == "one" and two["rows"] == [{"s": [2.0, 4.0]}]
    assert one["command"] == "python notes/benchmarks/x.py FOLDER"
    assert {"python", "torch", "transformers", "nanorl"} == set(one["versions"])
    assert "cores" in one["machine"] and "GiB" in one["machine"] and re.match(r"\d{4}-\d\d-\d\d$", one["date"])


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_benchmark_says_how_it_is_run(path):
    tree = ast.parse(path.read_text())
    assert "python " in ast.get_docstring(tree) or path.stem in ("synthetic", "peer_trl")


# ------------------------------------------------------------------------------------------------ one GPU


def test_the_check_of_a_gpu_runs_at_toy_size_without_tyro_and_vllm(monkeypatch, capsys):
    ours = [name for name in sys.modules if name.split(".")[0] in ("nanorl", "gpu_check", "synthetic", "bench")]
    for name in ours:  # imported anew here, and as they were afterwards
        monkeypatch.delitem(sys.modules, name)
    for name in ("tyro", "vllm", "tensorboard", "matplotlib"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--toy"])
    before = bench.RESULTS.read_text()
    fresh = importlib.import_module("gpu_check")
    assert fresh is not gpu_check
    fresh.main()
    said = capsys.readouterr().out
    assert "part 2/2, toy" in said and "| toy | cpu float32 − cpu float32 | 0 | 0 | 0 | 1 |" in said
    assert re.search(r"\| toy \| [\d.]+ \| training, 8 rows of 32, micro-batches of 128 \| [\d.,]+ \|", said)
    assert re.search(r"\| toy \| [\d.]+ \| sampling, 8 rows, 8 tokens after 64 \| [\d.,]+ \|", said)
    assert bench.RESULTS.read_text() == before, "a toy is no result"


def test_bfloat16_and_another_device_are_compared_with_the_right_ones(monkeypatch):
    """Weights that differ on "the device" show in the first comparison and not in the second."""
    shape = gpu_check.TOY["toy"]

    def elsewhere(model):
        """A copy whose weights are off."""
        moved = copy.deepcopy(model)
        with torch.no_grad():
            moved.model.norm.weight.mul_(1.01)
        return moved

    monkeypatch.setattr(gpu_check, "copy", SimpleNamespace(deepcopy=elsewhere))
    wide, narrow = gpu_check.agreement("toy", shape, "cpu", 16)
    assert wide["mean difference, nats"] > 1e-5 and wide["gradient, relative difference"] > 1e-3
    monkeypatch.setattr(gpu_check, "copy", copy)
    same, again = gpu_check.agreement("toy", shape, "cpu", 16)
    assert same["mean difference, nats"] == 0 and again["mean difference, nats"] > 0
    assert narrow["mean difference, nats"] == pytest.approx(again["mean difference, nats"], rel=0.5)


def test_flops_are_those_that_torch_counts_with_half_of_the_attention():
    shape, length = replace(gpu_check.TOY["toy"], width=128, inner=512, vocabulary=1000), 64
    model = shape.model()
    model.set_attn_implementation("eager")  # as plain products, the half that is masked included
    batch = synthetic.credited(synthetic.answers(8, length, 1, shape.vocabulary), "cpu")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        Policy(model)(batch)
    weights = sum(weight.numel() for weight in model.parameters())
    tokens = batch.ids.numel()
    masked = shape.flops(weights, tokens, length, passes=1) - shape.flops(weights, tokens, 0, passes=1)
    assert counter.get_total_flops() == pytest.approx(shape.flops(weights, tokens, length, passes=1) + masked, rel=0.01)
    assert shape.flops(weights, tokens, length) == 3 * shape.flops(weights, tokens, length, passes=1)


def test_out_of_memory_halves_the_micro_batch_until_it_fits_and_one_row_that_does_not_is_told():
    class Full:
        """A trainer with room for 40 tokens."""

        cfg, policy = synthetic.job(tokens=256), Policy(gpu_check.TOY["toy"].model())

        def step(self, groups):
            """Raises where the micro-batch is too large."""
            if self.cfg.tokens_per_micro_batch > 40:
                raise torch.OutOfMemoryError

    assert gpu_check.trained(gpu_check.TOY["toy"], Full(), 8, 16, 1)[1] == 32
    with pytest.raises(torch.OutOfMemoryError):
        gpu_check.trained(gpu_check.TOY["toy"], Full(), 8, 64, 1)


@pytest.mark.parametrize("flags, why", [([], "no GPU here"), (["--rows", "12"], "multiples of 8"),
                                        (["--new", "0"], "--new")])  # fmt: skip
def test_what_the_check_cannot_do_is_refused_in_one_line(flags, why, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", *flags])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="^2$"):
        gpu_check.main()
    assert why in capsys.readouterr().err.splitlines()[-1]


# ------------------------------------------------------------------------------------------------ memory of log-probs


class Live(TorchDispatchMode):
    """The most numbers (float32) that new tensors held together, of those alive at one time."""

    def __init__(self):
        super().__init__()
        self.alive, self.most = {}, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, (tuple, list)) else [made]:
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self.alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes() // 4)
        self.alive = {key: of for key, of in self.alive.items() if not of[0].expired()}
        self.most = max(self.most, sum(size for _, size in self.alive.values()))
        return made


def passes(way, batch, shape):
    """Log-probs, gradients, and what both passes hold at most, of one way; gradients are there before."""
    policy = Policy(shape.model())
    for weight in policy.parameters():
        weight.grad = torch.zeros_like(weight)
    with Live() as live:
        logp = way(policy, batch)
        logprob_memory.loss(logp).backward()
    return logp.detach(), [weight.grad for weight in policy.parameters()], live.most


def test_log_probs_are_those_of_the_naive_form_and_hold_a_few_chunks_of_logits_however_many_there_are(monkeypatch):
    shape, chunk = synthetic.Shape(5003, 8, 16, 1, 1, 1), 100_000
    monkeypatch.setattr(module, "CHUNK", chunk)
    most = []
    for rows in (8, 16):
        batch = synthetic.credited(synthetic.answers(rows, 33, 1, shape.vocabulary), "cpu")
        logp, slopes, ours = passes(logprob_memory.ours, batch, shape)
        true, true_slopes, naive = passes(logprob_memory.naive, batch, shape)
        torch.testing.assert_close(logp, true, rtol=1e-6, atol=0)
        steepest = max(float(of.abs().max()) for of in true_slopes)
        assert max(float((slope - of).abs().max()) for slope, of in zip(slopes, true_slopes)) <= 1e-6 * steepest
        logits, weights = int(batch.mask.sum()) * shape.vocabulary, shape.vocabulary * shape.width
        assert naive >= 2 * logits and ours <= 8 * chunk + 4 * weights
        most.append(ours)
    assert most[1] - most[0] < 0.2 * most[0], "twice the tokens take hardly more"


# ------------------------------------------------------------------------------------------------ growth, parts


@given(st.floats(0.1, 3), st.floats(1e-3, 1e3))
def test_the_exponent_of_a_power_is_its_exponent(power, scale):
    sizes = (1, 3, 10, 40)
    assert growth.exponent(sizes, [scale * size**power for size in sizes]) == pytest.approx(power)


def test_every_panel_of_the_picture_has_its_units():
    sweeps = {name: [{"what": name, "size": size, "sampling, s": [0.1 * size], "training, s": [0.2 * size],
                      "exponent of sampling": 1.0, "exponent of training": 1.0} for size in sizes]
              for name, sizes in growth.SWEEPS.items()}  # fmt: skip
    memory = [{"tokens of a row": length, **dict.fromkeys(growth.PASSES, length)} for length in growth.LONG]
    panels = growth.draw(sweeps, memory, [{"part": part, "s": [1.0]} for part in growth.PARTS]).axes
    across = [*growth.SAYS.values(), "tokens of a row", "start of the default job, seconds"]
    assert [panel.get_xlabel() for panel in panels] == across
    assert all("seconds" in panel.get_ylabel() for panel in panels[:4]) and "MB" in panels[4].get_ylabel()
    for panel, sizes in zip(panels, growth.SWEEPS.values()):
        assert [list(line.get_xdata()) for line in panel.lines] == [list(sizes)] * 2


def test_the_parts_of_a_step_add_up_to_it():
    rows = [{"seconds": s, "seconds/generate": 0.4, "seconds/train": 0.3, "tokens": 1000, "samples": 10,
             "trained_rows": 0.5} for s in (5.0, 6.0, 7.5)]  # fmt: skip
    of = step_parts.parts(rows, weights=100, rate=1e6)
    assert of["s a step"] == [1.0, 1.5]
    assert [sum(of[title][i] for title in (*step_parts.STAGES, "rest, s")) for i in (0, 1)] == pytest.approx([1.0, 1.5])
    read = 1000 + 10 * step_parts.PROMPT
    assert of["arithmetic, s"] == pytest.approx([(2 + 3) * read * 100 / 1e6] * 2)


# ------------------------------------------------------------------------------------------------ the peer


@given(st.lists(st.floats(0, 1), max_size=30), st.floats(0, 1), st.integers(1, 5))
def test_a_goal_is_reached_at_the_first_step_whose_window_is_at_it(rewards, goal, window):
    curve = [(float(i), reward) for i, reward in enumerate(rewards)]
    found = peer.reached(curve, goal, window)
    means = [sum(rewards[i - window + 1 : i + 1]) / window for i in range(window - 1, len(rewards))]
    assert found == next((float(i + window - 1) for i, mean in enumerate(means) if mean >= goal), None)


def test_the_curve_of_a_run_counts_from_its_first_step_and_leaves_out_a_half_written_line(tmp_path):
    args, run = argparse.Namespace(out=tmp_path), tmp_path / "a"
    run.mkdir()
    (run / "metrics.jsonl").write_text('{"step": 1, "seconds": 5.0, "reward": 0.5}\n{"step": 2, "seconds": 6.5, "rew')
    trace = peer.timeline.Trace(run / "trace.json", origin=0.0)
    trace.write([peer.timeline.Span("trainer", "wait", 4.0, 4.5), peer.timeline.Span("engine 0", "generate", 3.0, 4.0)])
    trace.close()
    assert peer.Job("nanorl", "a", 2, 1e-4).curve(args) == [(1.0, 0.5)]
    assert peer.Job("TRL", "b", 2, 1e-4).curve(args) == []
    (tmp_path / "b.jsonl").write_text('{"step": 1, "seconds": 2.0, "reward": 0.25}\n')
    assert peer.Job("TRL", "b", 2, 1e-4).curve(args) == [(2.0, 0.25)]


def test_both_are_asked_for_the_same_job(tmp_path):
    """TRL's page knows every flag it is given, and its prompts are those that a run of nanorl numbers 0, 1, …"""
    args = argparse.Namespace(out=tmp_path, trl="trl")
    known = set(re.findall(r'add_argument\("(--[\w-]+)"', (FOLDER / "peer_trl.py").read_text()))
    words = peer.Job("TRL", "b", 5, 3e-4, 0.9).words(args, tmp_path, tmp_path / "prompts.jsonl")
    assert {word for word in words if word.startswith("--")} <= known
    from nanorl.cli import parse

    words = peer.Job("nanorl", "a", 5, 3e-4).words(args, tmp_path, tmp_path / "prompts.jsonl")
    name, cfg, axes = parse(words[2:])
    assert (name, cfg.lr, cfg.steps, cfg.samples_per_step, axes.aggregation) == ("grpo", 3e-4, 5, 256, "token-mean")
    asked = [json.loads(line) for line in peer.prompts_of(2, tmp_path / "prompts.jsonl").read_text().splitlines()]
    task = peer.tasks.load(cfg)
    assert [row["prompt"] for row in asked] == [task.train(n).prompt for n in range(2 * cfg.prompts_per_step)]
    assert [row["answer"] for row in asked] == [task.train(n).answer for n in range(2 * cfg.prompts_per_step)]
