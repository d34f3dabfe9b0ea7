"""What is shown and written: the files hold each step once, a user's number finds its sample, the console can be read."""

import asyncio
import io
import json
import math
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings

from nanorl import metrics, monitor
from nanorl.axes import Correction
from nanorl.config import Refused
from nanorl.metrics import step_metrics
from nanorl.monitor import BESIDE, KEYS, WALL_CLOCK, Monitor, collecting, log, text_progress
from nanorl.sample import Sample
from nanorl.scoring import LIMITS, MISTAKES
from tests.test_metrics import NAN, algorithm, batch_of, group_of, make, steps

torch.set_num_threads(1)
PAGE = Path(__file__).parent.parent / "notes" / "metrics.md"


# A user's own numbers


def test_a_number_finds_its_sample_among_concurrent_ones_and_threads():
    async def sample(i):
        with collecting() as notes:
            for turn in range(3):
                await asyncio.sleep(0.001 * ((i * 7 + turn) % 5))  # all samples interleave
                log("mine", i)
            await asyncio.to_thread(log, "mine", i)
            await asyncio.gather(helper(i), helper(i))
        return notes

    async def helper(i):
        await asyncio.sleep(0)
        log("mine", i)

    async def all_of_them():
        return await asyncio.gather(*map(sample, range(8)))

    assert asyncio.run(all_of_them()) == [[("mine", float(i))] * 6 for i in range(8)]
    assert monitor._outside == []


@pytest.mark.parametrize("value", [True, 1, 1.0, torch.tensor(1), torch.tensor(1.0, requires_grad=True), torch.tensor(True)])
def test_log_takes_any_single_number(value, recwarn):
    with collecting() as notes:
        log("own", value)
    assert notes == [("own", 1.0)] and type(notes[0][1]) is float and not recwarn.list


@pytest.mark.parametrize("name", ["reward", "eval/pass@1", "seconds/mine", "tokens_per_second", "loss"])
def test_a_taken_name_is_refused(name):
    with collecting() as notes, pytest.raises(Refused, match=re.escape(repr(name))):
        log(name, 1.0)
    assert notes == []


def test_collecting_ends_also_when_the_sample_fails(tmp_path):
    with pytest.raises(ZeroDivisionError), collecting() as inner:
        log("own", 1)
        1 / 0
    with collecting() as outer:
        log("own", 2)
        with collecting() as nested:
            log("own", 3)
        log("own", 4)
    assert (inner, outer, nested) == ([("own", 1.0)], [("own", 2.0), ("own", 4.0)], [("own", 3.0)])


def test_a_reward_file_imports_log_without_torch():
    code = "import sys; from nanorl.monitor import log; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=PAGE.parent.parent).returncode == 0


# Files


GROUPS = [group_of(make(reward=1.0, text="2", notes=(("worked", 1.0),)), make((4, 4, 4), finish="length"), number=7)]
SECONDS = {"generate": 1.0, "measure": 0.0, "train": 0.5, "evaluate": 60.0}
EVERYTHING = algorithm(dual_clip=3.0, correction=Correction("mask"), m2_threshold=0.04)  # all that can be said of a step
PLAIN = {"tokens": 30, "truncated": 0.0, "contrast": 1.0, "repeat/token": 0.1, "skipped": 0}


def read(path: Path) -> list[dict]:
    def refuse(constant):
        raise AssertionError(f"{constant} in {path}")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def train(folder: Path, start: int, stop: int, steps: int = 12) -> None:
    """A run that measures the same at the same step, whoever asks, as a deterministic program would."""
    folder.mkdir(exist_ok=True)
    watch = Monitor(folder, start, steps)
    if start == 0:
        watch.evaluation(0, {"eval/pass@1": 0.5})
    for step in range(start + 1, stop + 1):
        log("gradient_cosine", step)
        batch, logp = batch_of(GROUPS, step)
        metrics = step_metrics(GROUPS, batch, logp, EVERYTHING) | {"grad_norm": 1 / step, "skipped": 0}
        results = {"eval/pass@1": step / 12} if step % 6 == 0 else {}
        if results:
            watch.evaluation(step, results)
        watch.step(step, metrics | results, GROUPS, SECONDS)
        watch.show(step, GROUPS[0])
        watch.histograms(step, batch, logp, EVERYTHING)
    watch.close()


def without_clock(rows: list[dict]) -> list[dict]:
    return [{k: v for k, v in row.items() if not k.startswith(WALL_CLOCK)} for row in rows]


def test_a_killed_and_resumed_run_leaves_the_files_of_an_undisturbed_one(tmp_path):
    """Killed after step 9, in the middle of a line; its last checkpoint is that of step 7, or of step 9 itself."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    whole, *resumed = (tmp_path / name for name in ("whole", "7", "9"))
    train(whole, 0, 12)
    for folder in resumed:
        train(folder, 0, 9)
        for name in ("metrics.jsonl", "samples.jsonl"):
            with open(folder / name, "a") as file:
                file.write('{"step": 10, "rew')
    time.sleep(1.1)  # event files are named, and read, by the second
    for folder in resumed:
        train(folder, int(folder.name), 12)
        assert without_clock(read(folder / "metrics.jsonl")) == without_clock(read(whole / "metrics.jsonl"))
        assert (folder / "samples.jsonl").read_bytes() == (whole / "samples.jsonl").read_bytes()
    assert [row["step"] for row in read(whole / "metrics.jsonl")] == list(range(13))
    for folder in (whole, *resumed):
        board = EventAccumulator(str(folder)).Reload()
        assert [e.step for e in board.Scalars("reward")] == list(range(1, 13))
        assert [e.step for e in board.Scalars("eval/pass@1")] == [0, 6, 12]
        assert {"histogram/reward", "histogram/adv", "histogram/length", "histogram/ratio",
                "histogram/lag", "histogram/correction"} == set(board.Tags()["histograms"])
        assert board.Tags()["tensors"] == ["sample/text_summary"]


def test_a_run_that_starts_over_keeps_nothing_of_the_old_one(tmp_path):
    train(tmp_path, 0, 3)
    train(tmp_path, 0, 2)
    assert [row["step"] for row in read(tmp_path / "metrics.jsonl")] == [0, 1, 2]
    assert {row["step"] for row in read(tmp_path / "samples.jsonl")} == {1, 2}


@given(step=steps)
@settings(max_examples=20, deadline=None)
def test_samples_are_stored_whole(tmp_path_factory, step):
    folder, groups = tmp_path_factory.mktemp("run"), [group_of(*g.samples, number=n) for n, g in enumerate(step)]
    watch = Monitor(folder, 0, 1)
    watch.step(1, PLAIN, groups, SECONDS)
    watch.close()

    def deep(value):
        return tuple(map(deep, value)) if isinstance(value, list) else NAN if value is None else value

    stored = [{k: deep(v) for k, v in row.items()} for row in read(folder / "samples.jsonl")]
    rebuilt = [(row.pop("step"), row.pop("prompt"), row.pop("reward"), Sample(**row | {"mask": tuple(map(bool, row["mask"]))}))
               for row in stored]  # fmt: skip
    assert repr(rebuilt) == repr([(1, g.prompt.number, s.reward, s) for g in groups for s in g.samples])  # repr: NaN = NaN


def test_what_is_logged_outside_of_samples_belongs_to_one_step(tmp_path):
    watch = Monitor(tmp_path, 0, 2)
    for value in (1.0, NAN, 4.0):
        log("cosine", value)
    watch.step(1, PLAIN, [], SECONDS)
    watch.step(2, PLAIN, [], SECONDS)
    watch.close()
    first, second = read(tmp_path / "metrics.jsonl")
    assert (first["cosine"], first["cosine/abstained"]) == (2.5, 1) and not any("cosine" in key for key in second)


def test_times_are_recognised_by_their_names_and_evaluation_does_not_slow_the_tokens(tmp_path):
    train(tmp_path, 0, 1)
    row = read(tmp_path / "metrics.jsonl")[1]
    times = {key for key in row if key.startswith(WALL_CLOCK)}
    assert times == {"seconds", "tokens_per_second", *(f"seconds/{stage}" for stage in SECONDS)}
    assert row["tokens_per_second"] == row["tokens"] / 1.5 and row["seconds/evaluate"] == 60


def test_files_hold_no_nan(tmp_path):
    broken = make(logp=(NAN, -math.inf), reward=NAN, notes=(("style", NAN),))
    watch = Monitor(tmp_path, 0, 2)
    watch.step(1, PLAIN | {"grad_norm": math.inf, "loss": NAN, "skipped": 1}, [group_of(broken)], SECONDS)
    watch.close()
    (row,), (sample,) = read(tmp_path / "metrics.jsonl"), read(tmp_path / "samples.jsonl")  # read refuses NaN
    assert row["skipped"] == 1 and not {"grad_norm", "loss"} & row.keys()
    assert sample["logp_behave"][2:] == [None, None] and sample["reward"] is None and sample["notes"] == [["style", None]]


def test_the_page_defines_exactly_the_keys_that_exist(tmp_path):
    train(tmp_path, 0, 6)
    written = set().union(*read(tmp_path / "metrics.jsonl")) - {"worked", "gradient_cosine"}
    trainer = {"loss", "lr", "value/loss", "value/lr", "value/grad_norm", "eval/greedy", "eval/pass@k", "eval/length",
               "eval/truncated", "reward/all", "reward/NAME", "task/NAME/reward", "seconds/publish", "seconds/save", "util/train", "util/engine/0",
               *(f"reward/faults/{fault}" for fault in LIMITS + MISTAKES),
               *(f"shaping/STEP/{what}" for what in ("mean", "std", "changed")),
               *(f"buffer/{what}" for what in ("waiting", "making", "filtered", "failed", "left_out")),
               *(f"sync/{what}" for what in (*metrics.PUBLISH, "mismatch"))}  # fmt: skip
    page = PAGE.read_text()
    rows = re.findall(r"^\| `(\S+)`( ●)? \|(.*)\|$", page, re.MULTILINE)
    defined = [key for key, _, _ in rows if not key.startswith("trpo/")]  # those the natural step logs itself
    assert len(defined) == len(set(defined)) and set(defined) == written | trainer
    assert all(len(rest.replace(r"\|", "").split("|")) == 4 for _, _, rest in rows)  # meaning, unit, healthy, broken
    assert {key for key, mark, _ in rows if mark} == {key for _, _, key, _ in monitor.COLUMNS}
    others = ("seconds/", "eval/", "util/", "buffer/", "sync/", "shaping/")
    assert KEYS == {key for key in defined if not key.startswith(others) and "NAME" not in key}


# The console


def test_columns_stand_under_their_titles_and_the_line_fits(tmp_path, capsys):
    values = dict.fromkeys(KEYS - {"step", "seconds", *BESIDE}, 0.123)
    values |= {"grad_norm": 12.3, "length/mean": 123.4, "lag/max": 4, "tokens": 18000}
    watch = Monitor(tmp_path, 0, 1000)
    for step in range(1, 42):
        watch.step(step, values | ({} if step == 1 else {"eval/pass@1": 0.97}) | {"worked": 0.62}, [], SECONDS)
    watch.close()
    lines = [line for line in capsys.readouterr().out.splitlines() if "/1000" in line or "contrast " in line]
    header = lines[0]
    assert [i for i, line in enumerate(lines) if line == header] == [0, 21, 42]
    ends = [m.end() for m in re.finditer(r"\S+", header)]
    for line in lines[1:21]:
        body = line.replace(" %", "%").removesuffix("  worked 0.62")
        assert [m.end() for m in re.finditer(r"\S+", body)] == ends and line.endswith("  worked 0.62") and len(line) <= 130
    assert "–" in lines[1] and "0.970" in lines[2]


def test_how_much_a_critic_explains_stands_after_the_columns_where_there_is_a_critic(tmp_path, capsys):
    watch = Monitor(tmp_path, 0, 2)
    watch.step(1, PLAIN, [], SECONDS)
    watch.step(2, PLAIN | {"value/explained": 0.512, "value/mean": 0.3}, [], SECONDS)
    watch.close()
    one, two = [line for line in capsys.readouterr().out.splitlines() if "/2 " in line]
    assert two.endswith("  value/explained 0.512") and "value" not in one


def test_pass_at_1_stays_on_the_console_until_the_next_evaluation(tmp_path, capsys):
    watch = Monitor(tmp_path, 0, 3)
    watch.evaluation(0, {"eval/pass@1": 0.511})
    watch.step(1, PLAIN, [], SECONDS)
    watch.step(2, PLAIN | {"eval/pass@1": 0.722}, [], SECONDS)
    watch.step(3, PLAIN, [], SECONDS)
    watch.close()
    lines = [line for line in capsys.readouterr().out.splitlines() if "/3 " in line]
    assert [re.search(r"0\.\d{3}", line)[0] for line in lines] == ["0.511", "0.722", "0.722"]
    assert [row.get("eval/pass@1") for row in read(tmp_path / "metrics.jsonl")] == [0.511, None, 0.722, None]


@pytest.mark.parametrize(
    "trouble, lines",  # the steps at which the trouble warns when it lasts through steps 2–8 and 11–16
    [({"contrast": 0.0}, [6, 15]), ({"truncated": 0.6}, [2, 11]), ({"repeat/token": 0.95}, [2, 11]), ({"skipped": 1}, [2, 11])],
)
def test_a_warning_is_said_once_each_time_it_begins(tmp_path, capsys, trouble, lines):
    watch, warned = Monitor(tmp_path, 0, 20), []
    for step in range(1, 21):
        watch.step(step, PLAIN | (trouble if 2 <= step <= 8 or 11 <= step <= 16 else {}), [], SECONDS)
        warned += [step] * capsys.readouterr().out.count("warning: ")
    watch.close()
    assert warned == lines


def test_a_sample_is_shown_whole_and_cannot_command_the_terminal(tmp_path, capsys):
    watch = Monitor(tmp_path, 0, 3)
    watch.show(2, group_of(make(text="line one\nline\x1b[2J two", reward=0.5), make(reward=1.0), number=4))
    watch.close()
    out = capsys.readouterr().out
    for part in ("step 2", "prompt 4", "1+1=", "line one", "line·[2J two", "answer      2", "0.5 (its group's: 0.5 1)", "stop"):
        assert part in out
    assert "\x1b" not in out


def test_progress_is_a_line_every_ten_seconds_or_one_that_rewrites_itself(monkeypatch, capsys):
    clock = 1000.0
    monkeypatch.setattr(monitor.time, "monotonic", lambda: clock)

    def run(total=100):
        nonlocal clock
        started = clock
        for done in range(1, total + 1):
            clock += 0.5
            text_progress("warm start", done, total, started)

    run()
    assert capsys.readouterr().out.splitlines() == [
        f"warm start {done}/100  {done // 2}s, {50 - done // 2}s left" for done in (20, 40, 60, 80, 100)
    ]
    clock += 60
    run(30)  # the label's former run does not count
    assert [line.split()[2] for line in capsys.readouterr().out.splitlines()] == ["20/30", "30/30"]

    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stdout", terminal)
    run(4)
    assert terminal.getvalue().count("\r") == 4 and terminal.getvalue().count("\n") == 1
