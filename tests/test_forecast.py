"""The simulator's command line, and what it measures in the folder of a run: the constants that made the folder."""

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanorl.cluster import PRESETS
from nanorl.config import Refused
from nanorl.forecast import Ask, excerpt, fit, main, measure, modes, parse
from nanorl.pace import Pace
from nanorl.simulate import simulate
from nanorl.timeline import Span, Trace

TRUE = {"step_base": 0.05, "step_row": 0.002, "prefill_token": 0.001, "train_base": 0.1, "train_token": 0.003,
        "overhead": 0.11, "load": 0.02, "sync": 0.05}  # fmt: skip
P, G, PROMPT = 3, 2, 7


def folder(path, engine, lag, lengths, steps=12, evaluate=()):
    """The folder of a run that takes these times exactly. lengths(step) → of its P·G answers."""
    c, spans, rows, samples, end, now, free = TRUE, [], [], [], 5.0, 5.0, 5.0
    local, path = engine == "local", path / f"{engine}{lag}"
    path.mkdir()
    for step in range(1, steps + 1):
        start = now  # the trainer waits
        if lag == 0:
            free = end + (c["overhead"] + 0.03 if local else c["sync"] + c["load"]) + 7.0 * (step - 1 in evaluate)
        made = lengths(step)
        for i in range(max(made)):
            active = sum(length > i for length in made)
            read = (P * PROMPT + step % 3 * (lengths is uneven)) * (i == 0)
            took = c["step_base"] + c["step_row"] * active + c["prefill_token"] * read
            gap = 0.01 * (i + 1 < max(made))  # the engine's own work between two spans
            again = {"read_again": step + i, "interrupted": 4 * (step + i)} if lag else {}
            spans.append(Span("engine 0", "generate", free, free + took - gap,
                              {"token_steps": 1, "rows": active, "prefilled": read, **again}))  # fmt: skip
            free += took
        took = c["train_base"] + c["train_token"] * sum(made)
        there = free if lag == 0 else free - c["sync"] - took  # so that the weights come between two token steps
        end = there + took
        spans += [Span("trainer", "wait", start, there), Span("trainer", "update", there, end)]
        if step in evaluate:
            spans.append(Span("trainer", "evaluate", end + 0.02, end + 7.02))
            if local:  # the same engine answers, and its spans are no sampling for training
                counts = {"token_steps": 1, "rows": 1, "prefilled": 0}
                spans.append(Span("engine 0", "generate", end + 0.03, end + 7.0, counts))
        if not local:
            begin = end + c["sync"]
            spans.append(Span("engine 0", "sync" if lag == 0 else "interrupt", begin, begin + c["load"]))
            free += c["load"]
        now = end + c["overhead"] + (7.0 if step in evaluate else 0.0)
        rows.append({"step": step, "seconds": now, "tokens": sum(made), "lag/mean": min(lag, step - 1),
                     **({"seconds/evaluate": 7.0} if step in evaluate else {})})  # fmt: skip
        samples += [{"step": step, "mask": [0] * PROMPT + [1] * length} for length in made]
    config = {"engine": engine, "prompts_per_step": P, "samples_per_prompt": G, "seed": 3, "pace": vars(Pace(lag))}
    (path / "config.json").write_text(json.dumps({"algorithm": "grpo", "config": config, "axes": {}}))
    for name, lines in (("metrics", [{"step": 0, "eval/pass@1": 0.5}, *rows]), ("samples", samples)):
        (path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    trace = Trace(path / "trace.json", origin=0.0)
    trace.write(spans)
    trace.close()
    return path


def uneven(step):
    """Lengths from 2 to 9, other ones in every step."""
    return [2 + (5 * step + 3 * i * i) % 8 for i in range(P * G)]


RUNS = [("worker", 0, ()), ("worker", 0, (4, 8)), ("worker", 2, ()), ("local", 0, (8,))]


@pytest.mark.parametrize("engine, lag, evaluate", RUNS)
def test_what_is_measured_is_what_made_the_folder(tmp_path, engine, lag, evaluate):
    """Every constant to the trace's microseconds, the lengths of the second half, the job."""
    found = measure(folder(tmp_path, engine, lag, uneven, evaluate=evaluate))
    c, local = found.cluster, engine == "local"
    for name, value in {**TRUE, "load": 0.0 if local else TRUE["load"]}.items():
        if name != "sync" or not local:
            assert getattr(c, name) == pytest.approx(value, abs=2e-5), name
    assert c.switch == pytest.approx(0.03 * local, abs=1e-5)
    assert (c.engines, c.trainers, c.colocated) == (1, int(not local), local)
    assert (c.prompts_per_step, c.samples_per_prompt, c.prompt, c.steps, c.seed) == (P, G, PROMPT, 12, 3)
    assert c.measured == tuple(itertools.chain.from_iterable(uneven(step) for step in range(7, 13)))
    assert c.distinct == (0.25 if lag else 1.0)
    assert c.pace == Pace(lag) and found.mean_lag == lag


@pytest.mark.parametrize("engine, evaluate", [("worker", ()), ("worker", (7,)), ("local", (9,))])
def test_a_run_of_equal_answers_is_predicted_exactly(tmp_path, engine, evaluate):
    """Its steps are g + t and what lies between: measured and predicted agree to the trace's microseconds."""
    found = measure(folder(tmp_path, engine, 0, lambda step: [6] * (P * G), evaluate=evaluate))
    made = 6 * (TRUE["step_base"] + TRUE["step_row"] * P * G) + TRUE["prefill_token"] * P * PROMPT
    other = TRUE["overhead"] + 0.03 if engine == "local" else TRUE["sync"] + TRUE["load"]
    second = made + TRUE["train_base"] + TRUE["train_token"] * 36 + other
    assert 1 / found.steps_per_second == pytest.approx(second, abs=1e-5)
    assert 1 / simulate(found.cluster).steps_per_second == pytest.approx(second, abs=5e-5)


def test_of_a_run_that_was_resumed_the_last_start_counts(tmp_path):
    """Its seconds begin anew, and so does the trace."""
    path = folder(tmp_path, "worker", 0, uneven)
    before = [json.dumps({"step": step, "seconds": 900.0 + step, "tokens": 1}) for step in (1, 2, 3)]
    once = measure(path)
    for name, first in (("metrics", before), ("samples", [])):
        lines = [json.loads(line) for line in (path / f"{name}.jsonl").read_text().splitlines()]
        later = [json.dumps({**line, "step": line["step"] + 3}) for line in lines if line["step"] > 0]
        (path / f"{name}.jsonl").write_text("\n".join([*first, *later]) + "\n")
    assert measure(path) == once


@given(st.integers(0, 2**32), st.integers(1, 3))
def test_the_fit_is_the_minimum_over_what_is_not_negative(seed, n):
    """No step along an axis, or towards a random point, that stays at 0 or above makes the squares smaller."""
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(6, n)), rng.normal(size=6)

    def squares(w):
        return ((x @ w - y) ** 2).sum()

    w = np.array(fit(x.tolist(), y.tolist()))
    assert (w >= 0).all()
    for towards in rng.exponential(size=(20, n)) * rng.integers(0, 2, size=(20, n)):
        assert squares(w + 0.01 * (towards - w)) >= squares(w) - 1e-9


def small(*words):
    return [*words, "--steps", "6", "--mean", "40", "--prompts-per-step", "4", "--max-length", "90"]


def test_one_simulation_prints_its_numbers_and_its_timeline(capsys):
    """A table row, lags, what became of the groups, a row for each lane."""
    assert main(small("--filtered", "0.5", "--dynamic-sampling", "refill")) == 0
    printed = capsys.readouterr().out
    result = simulate(parse(small("--filtered", "0.5", "--dynamic-sampling", "refill")))
    assert f"{1 / result.steps_per_second:.4g}" in printed and f"{result.wasted / result.generated:.1%}" in printed
    assert f"filtered {result.steps[-1].buffer['buffer/filtered']}" in printed
    assert all(lane in printed for lane in result.busy) and "g generate" in printed


def test_three_modes_side_by_side_as_text_and_as_a_picture(tmp_path, capsys):
    """Synchronous on all devices, one step ahead without interruption, asynchronous as asked."""
    assert main(small("--compare", "--picture", str(tmp_path / "modes.png"))) == 0
    printed = capsys.readouterr().out
    assert [line.split("  ")[0] for line in printed.splitlines()[1:4]] == list(modes(Ask()))
    assert (tmp_path / "modes.png").stat().st_size > 10_000
    together, ahead, free = modes(parse(small("--overtake", "1"))).values()
    assert (together.colocated, together.pace) == (True, Pace(0))
    assert (ahead.colocated, ahead.interrupt, ahead.pace) == (False, False, Pace(1))
    assert (free.colocated, free.interrupt, free.pace) == (False, True, Pace(4, overtake=1))


def test_the_timelines_of_several_modes_show_as_long_a_time():
    """From 0, in order to compare them."""
    results = [simulate(replace(c, steps=6, mean=40.0)) for c in modes(Ask()).values()]
    shown = excerpt(results)
    long = min(3 / min(r.steps_per_second for r in results), *(r.steps[-1].end - r.half[0] for r in results))
    for result, spans in zip(results, shown):
        assert min(s.start for s in spans) == 0 and max(s.end for s in spans) == pytest.approx(long)
        total = sum(max(0.0, min(s.end, result.half[0] + long) - max(s.start, result.half[0])) for s in result.spans)
        assert sum(s.seconds for s in spans) == pytest.approx(total)


def test_a_sweep_is_a_row_for_each_value(capsys):
    """Each is the simulation with that flag."""
    assert main(small("--sweep", "max_lag=0,2")) == 0
    rows = capsys.readouterr().out.splitlines()[1:]
    for row, lag in zip(rows, ("0", "2"), strict=True):
        assert row.startswith(f"max_lag = {lag}  ")
        assert row.split()[3] == f"{1 / simulate(parse(small('--max-lag', lag))).steps_per_second:.4g}"


def test_runs_are_printed_with_the_error_of_the_prediction(tmp_path, capsys):
    """A line each, in percent."""
    runs = [str(folder(tmp_path, engine, 0, lambda step: [6] * (P * G))) for engine in ("worker", "local")]
    assert main(["--run", *runs]) == 0
    printed = capsys.readouterr().out.splitlines()
    for run, line in zip(runs, printed[1:3]):
        measured, predicted, error, lag, predicted_lag = line.split()[-5:]
        assert measured == predicted and error in ("+0.0%", "-0.0%") and lag == predicted_lag == "0.00"
        assert line.startswith(run[-31:])


@pytest.mark.parametrize("changed, says", [({"engine": "vllm"}, "vLLM's servers do not tell"),
                                           ({"pace": vars(Pace(delay=2))}, "lag given, not found")])  # fmt: skip
def test_runs_that_say_too_little_are_refused(tmp_path, changed, says):
    path = folder(tmp_path, "worker", 0, uneven)
    saved = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**saved, "config": {**saved["config"], **changed}}))
    with pytest.raises(Refused, match=says):
        measure(path)


def test_flags_beside_a_run_are_changes_of_it(tmp_path, capsys):
    """A run in turn, asked what a lag would do: engine and trainer get a device each, all else is as it was measured."""
    path = folder(tmp_path, "local", 0, uneven)
    c = measure(path).cluster
    other = replace(c, colocated=False, trainers=1, switch=0.0, train_base=0.9, pace=Pace(2))
    assert main(["--run", str(path), "--max-lag", "2", "--train-base=0.9"]) == 0
    first, changed = capsys.readouterr().out.splitlines()[1:3]
    expected = simulate(other)
    assert changed.split() == ["with", "the", "other", "flags", "–", f"{expected.steps_per_second:.4g}", "–", "–",
                               f"{expected.mean_lag:.2f}"]  # fmt: skip
    assert expected.mean_lag > 0 and first.split()[-1] == "0.00"


def test_a_published_cluster_is_named_first_and_flags_change_it():
    """areal_1_5b is AReaL's 128 GPUs, three quarters of which generate."""
    ask = parse(["areal_1_5b", "--max-lag", "4"])
    assert ask == Ask(**{**vars(PRESETS["areal_1_5b"]), "pace": Pace(4)})
    assert (ask.engines, ask.trainers, ask.prompts_per_step * ask.samples_per_prompt) == (96, 32, 8192)


WRONG = {
    "areal: no such cluster; there are areal_1_5b": ["areal"],
    "--run --compare: one at a time": ["--compare", "--run", "x"],
    "--picture: it draws one simulation": ["--sweep", "max_lag=0,1", "--picture", "x.png"],
    "--picture x.txt: ": small("--picture", "x.txt"),
    "--run nowhere: config.json cannot be read": ["--run", "nowhere"],
    "--engines 0: must be 1 or more": ["--engines", "0"],
    "--distinct 2.0: must be a share": ["--distinct", "2"],
    "--max-lag -1: ": ["--sweep", "max_lag=0,-1"],
}


def test_whether_a_picture_can_be_drawn_is_known_before_the_work(monkeypatch, capsys):
    monkeypatch.setattr("nanorl.forecast.simulate", lambda cluster: pytest.fail("it has begun"))
    for path in ("x.txt", "nowhere/x.png"):
        assert main(["--picture", path]) == 2 and f"--picture {path}: " in capsys.readouterr().err


@pytest.mark.parametrize("line", WRONG)
def test_bad_input_ends_in_one_line_and_status_2(line, capsys):
    """On stderr."""
    assert main(WRONG[line]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"python -m nanorl.simulate: {line}") and said.count("\n") == 1


def test_files_that_are_no_run_are_refused(tmp_path):
    """Too few steps, no trace, something else in the file."""
    for steps, broken, says in ((4, None, "4 steps are too few"), (12, "metrics.jsonl", "not the files of a run"),
                                (12, "config.json", "not the files of a run"), (12, "trace.json", "trace")):  # fmt: skip
        place = tmp_path / f"{steps}{broken}"
        place.mkdir()
        path = folder(place, "worker", 0, uneven, steps=steps)
        if broken:
            (path / broken).write_text('{"config": {}}\n')
        with pytest.raises(Refused, match=says) as refused:
            measure(path)
        assert "\n" not in str(refused.value)
