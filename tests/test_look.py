"""The curves of runs: drawn as the files have them, told apart, and one line for what cannot be drawn."""

import json
import math
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanorl import cli, curves, monitor
from nanorl.algorithms import ALGORITHMS
from nanorl.config import Config
from nanorl.curves import SHOWN, UNITS, added_up, chosen, differing, flags, names, picture, read, reached, smoothed
from nanorl.look import main

ROOT = Path(__file__).resolve().parents[1]
SETTINGS = {"algorithm": "grpo", "config": {"steps": 3, "lr": 1e-3, "out": "x", "pace": {"max_lag": 0}},
            "axes": {"kl_weight": 0.0, "critic": {"weight": 1.0}}, "versions": {"torch": "2.13.0"}}  # fmt: skip
FULL = [{"step": 0, "seconds": 3.0, "eval/pass@1": 0.48}] + [
    {"step": i, "seconds": 3.0 + 2 * i, "reward": 0.4 + i / 20, "entropy": 1 / i, "length/mean": 12.0, "grad_norm": 0.5,
     "mismatch/mean": 3e-7, **({"eval/pass@1": min(0.97, 0.8 + i / 20)} if i % 2 == 0 else {})} for i in range(1, 9)
]  # fmt: skip


def make(folder, rows=FULL, settings=SETTINGS, tail=""):
    """The folder of a run with these lines in metrics.jsonl, and something after the last."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(settings))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + tail)
    return folder


def told(capsys, *words):
    """Exit status, output and errors of the command."""
    return main(list(map(str, words))), *capsys.readouterr()


def drawn(figure):
    """Title → [(x, y) of each line], of the panels that are used."""
    return {panel.get_title(): [(list(line.get_xdata()), list(line.get_ydata())) for line in panel.lines]
            for panel in figure.axes if panel.axison}  # fmt: skip


# ---- the numbers


def test_a_picture_has_the_curves_that_the_files_have(tmp_path):
    short = FULL[:2] + [{"step": 2, "seconds": 9.0, "reward": 0.1, "kl/ref": 0.2, "mismatch/mean": 0.3}]
    runs = [read(make(tmp_path / "a")), read(make(tmp_path / "b", short))]
    figure = picture(runs, chosen(runs, None))
    found = drawn(figure)
    assert list(found) == [f"{key}, {UNITS[key]}" if key in UNITS else key for key in SHOWN]
    for key, lines in zip(SHOWN, found.values()):
        wanted = [[(row["step"], row[key]) for row in rows if key in row] for rows in (FULL, short)]
        assert lines == [tuple(map(list, zip(*points))) for points in wanted if points]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a", "b"]
    colours = [line.get_color() for line in figure.axes[0].lines]
    assert colours == [line.get_color() for line in figure.legends[0].get_lines()] and len(set(colours)) == 2
    assert all(panel.get_xlabel() == "training steps" for panel in figure.axes if panel.axison)


def test_against_seconds_the_same_values_stand_at_their_times(tmp_path):
    figure = picture([read(make(tmp_path / "a"))], ["reward"], against="seconds")
    assert drawn(figure) == {"reward": [([r["seconds"] for r in FULL[1:]], [r["reward"] for r in FULL[1:]])]}
    assert "seconds" in figure.axes[0].get_xlabel()


def test_the_units_are_those_of_the_page_of_metrics():
    page = (ROOT / "notes" / "metrics.md").read_text().replace(r"\|", "")
    rows = [[cell.strip() for cell in line.split("|")] for line in page.splitlines() if line.startswith("| `")]
    unit = {row[1].split("`")[1]: row[3] for row in rows}
    assert {key: unit[key] for key in UNITS} == UNITS and {*SHOWN} <= unit.keys()


def test_two_samplers_that_agree_but_for_rounding_get_no_panel_unless_asked(tmp_path):
    runs = [read(make(tmp_path / "a"))]
    assert chosen(runs, None) == [key for key in SHOWN if key not in ("mismatch/mean", "kl/ref")]
    assert chosen(runs, ["mismatch/mean"]) == ["mismatch/mean"]


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=20), st.integers(1, 25))
def test_smoothing_is_the_mean_of_a_window_that_ends_at_the_point(values, window):
    told = smoothed(values, window)
    assert len(told) == len(values) and told[0] == values[0]
    assert all(min(values) - 1e-6 <= x <= max(values) + 1e-6 for x in told)
    for i, x in enumerate(told):
        part = [values[j] for j in range(len(values)) if i - window < j <= i]
        assert x == pytest.approx(sum(part) / len(part), abs=1e-6)
    if window == 1:
        assert told == values


def test_smoothed_lines_lie_over_all_points_and_evaluations_stay(tmp_path):
    found = drawn(picture([read(make(tmp_path / "a"))], ["reward", "eval/pass@1", "seconds"], smooth=3))
    rewards = [row["reward"] for row in FULL[1:]]
    assert [y for _, y in found["reward"]] == [rewards, smoothed(rewards, 3)]
    assert len(found["eval/pass@1, 0–1"]) == len(found["seconds, s"]) == 1


@given(st.lists(st.lists(st.floats(0.1, 100), min_size=1, max_size=5).map(sorted), min_size=1, max_size=4))
def test_seconds_of_resumed_runs_add_up_and_never_fall(parts):
    """Where a part begins below the end of the one before; else nobody can tell a resume from a long step."""
    rows = [{"seconds": second} for part in parts for second in part]
    after = [row["seconds"] for row in added_up(rows)]
    assert after == sorted(after)
    before = [r["seconds"] for r in rows]
    gaps = [y - x if y >= x else y for x, y in zip([0.0, *before], before)]
    assert after == pytest.approx([math.fsum(gaps[: i + 1]) for i in range(len(gaps))])


@given(st.lists(st.lists(st.sampled_from("abc"), min_size=1, max_size=4).map(lambda parts: Path("/", *parts)), min_size=1,
                max_size=5))  # fmt: skip
def test_names_tell_folders_apart_and_are_their_ends(folders):
    short = names(folders)
    assert all(str(folder).endswith(name) for folder, name in zip(folders, short))
    assert all((a == b) == (x == y) for a, x in zip(folders, short) for b, y in zip(folders, short))
    if len({folder.name for folder in folders}) == len(set(folders)):
        assert short == [folder.name for folder in folders]


# ---- the report


def test_the_table_says_what_differs_and_what_was_reached(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    other = {**SETTINGS, "config": {**SETTINGS["config"], "lr": 3e-4, "pace": {"max_lag": 4}, "out": "y"},
             "axes": {"kl_weight": 0.0}, "versions": {"torch": "2.12.0"}}  # fmt: skip
    make(tmp_path / "p" / "grpo"), make(tmp_path / "q" / "grpo", FULL[:3], other)
    status, out, error = told(capsys, "p/grpo", "q/grpo")
    assert (status, error) == (0, "") and (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    lines = [line.split("  ") for line in out.splitlines()]
    cells = [[cell.strip() for cell in line if cell.strip()] for line in lines]
    assert cells[:6] == [["settings that differ", "p/grpo", "q/grpo"], ["--lr", "0.001", "0.0003"],
                         ["--max-lag", "0", "4"], ["--critic.weight", "1.0", "–"], ["torch", "2.13.0", "2.12.0"], []]
    assert cells[6:9] == [
        ["run", "steps", "time", "last reward", "best pass@1", "pass@1 ≥ 0.9"],
        ["p/grpo", "8", "19s", "0.800", "0.970 (step 4, 11s)", "step 2, 7s"],
        ["q/grpo", "2", "7s", "0.500", "0.900 (step 2, 7s)", "step 2, 7s"],
    ]
    assert out.splitlines()[-1].startswith("curves.png: reward, eval/pass@1, length/mean,")


def test_equal_settings_are_said_to_be_equal_and_one_run_has_nothing_to_compare(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    a, b = make(tmp_path / "a"), make(tmp_path / "b")
    assert "their settings are the same" in told(capsys, a, b)[1]
    status, out, _ = told(capsys, a)
    assert status == 0 and "settings that differ" not in out and "the same" not in out and (a / "curves.png").exists()
    assert len(told(capsys, a, tmp_path / "b" / ".." / "a")[1].splitlines()) == 4, "a run named twice is one run"


def test_what_a_run_never_had_is_a_dash():
    assert reached(curves.Curves(Path("a"), {}, [{"step": 1}])) == ["1", "–", "–", "–", "–"]


def test_settings_are_named_as_on_the_command_line(capsys):
    axes = ALGORITHMS["grpo"].axes
    own = flags({"algorithm": "grpo", "config": asdict(Config()), "axes": asdict(axes)}).keys() - {"algorithm"}
    with pytest.raises(SystemExit, match="^0$"):
        cli.parse(["grpo", "--help"])
    shown = set(re.findall(r"(?<![\w-])--[a-z][\w.-]*", capsys.readouterr().out))
    assert {"--lr", "--max-lag", "--servers", "--reward-norm.std-level", "--kl-weight"} <= own & shown
    assert not {"--out", "--resume", "--dry-run"} & own


def test_settings_of_another_version_are_compared_as_far_as_they_go():
    runs = [curves.Curves(Path(name), settings, FULL) for name, settings in (("a", {}), ("b", SETTINGS))]
    assert ["algorithm", "–", "grpo"] in differing(runs)


# ---- what the files may be like


@pytest.mark.parametrize("tail", ["", '{"step": 9, "rew', '{"step": 9, "reward": 1.0}'])
def test_a_half_written_last_line_is_not_there_yet(tail, tmp_path):
    assert read(make(tmp_path / "a", tail=tail)).rows == FULL


def test_what_is_not_finite_is_no_point_and_a_single_step_is_a_dot(tmp_path):
    row = {"step": 1, "seconds": 1.0, "reward": math.nan, "mine": None, "loss": math.inf, "grad_norm": 0.5, "ok": True}
    run = read(make(tmp_path / "a", [row]))
    assert (run.points("reward"), run.points("mine"), run.points("loss"), run.points("ok")) == ([], [], [], [])
    figure = picture([run], chosen([run], None))
    assert drawn(figure) == {"grad_norm": [([1], [0.5])], "seconds, s": [([1], [1.0])]}
    assert figure.axes[0].lines[0].get_marker() == "o"


@pytest.mark.parametrize("words, why", [
    ([], "name the folder of a run"), (["NO"], "NO/config.json: cannot be read"),
    (["RUN", "--keys", "rewrad"], "--keys rewrad: no run has it; there are entropy"),
    (["RUN", "--smooth", "0"], "--smooth 0"), (["RUN", "--against", "time"], "--against"),
    (["RUN", "--speed"], "--speed"),
    (["RUN", "--out", "NO/c.png"], "--out NO/c.png: no folder"), (["RUN", "--out", "c"], "end it in .png"),
    (["RUN", "--out", "DIR.png"], "--out DIR.png: cannot be written"),
    (["EMPTY"], "EMPTY/metrics.jsonl: no step yet"), (["TORN"], "TORN/metrics.jsonl, line 2: not JSON"),
    (["LIST"], "LIST/metrics.jsonl, line 1: not a JSON object"), (["OLD"], "OLD/metrics.jsonl, line 1: no step"),
    (["RUN", "BYTES"], "BYTES/metrics.jsonl: cannot be read (not text)"), (["HALF"], "HALF/config.json: not JSON"),
])  # fmt: skip
def test_what_cannot_be_drawn_is_refused_in_one_line(words, why, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make(Path("RUN")), make(Path("EMPTY"), []), make(Path("TORN"), FULL[:1], tail='{"step\n{}\n')
    make(Path("LIST"), [[1]]), make(Path("OLD"), [{"iteration": 1}])
    make(Path("BYTES")), make(Path("HALF")), Path("DIR.png").mkdir()
    Path("BYTES/metrics.jsonl").write_bytes(b"\xff\xfe\n")
    Path("HALF/config.json").write_text('{"algor')
    status, out, error = told(capsys, *words)
    assert status == 2 and error.count("\n") == 1 and why in error
    assert not list(tmp_path.glob("**/*curves.png"))


def test_the_command_is_the_monitor_s_and_needs_no_torch(tmp_path):
    run = make(tmp_path / "a")
    code = "import sys, runpy; sys.modules['torch'] = None; runpy.run_module('nanorl.monitor', run_name='__main__')"
    ended = subprocess.run([sys.executable, "-c", code, run], cwd=ROOT, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "") and (run / "curves.png").exists()


def test_the_timeline_is_asked_for_as_before(tmp_path, capsys):
    status, _, error = told(capsys, "--timeline", tmp_path)
    assert status == 2 and "trace.json: cannot be read" in error
    assert told(capsys, f"--timeline={tmp_path}")[0] == 2


def test_a_run_s_own_monitor_writes_what_is_read(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SETTINGS))
    watch = monitor.Monitor(tmp_path, 0, 2)
    watch.evaluation(0, {"eval/pass@1": 0.5})
    watch.step(1, {"tokens": 3, "truncated": 0.0, "reward": 0.25}, [], {"train": 1.0})
    watch.close()
    run = read(tmp_path)
    assert run.points("eval/pass@1") == [(0, 0.5)] and run.points("reward") == [(1, 0.25)]
