"""The numbers mean what notes/metrics.md says; the files hold each step once; a user's number finds its sample."""

import asyncio
import io
import json
import math
import re
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanorl import monitor
from nanorl.config import Refused
from nanorl.monitor import KEYS, WALL_CLOCK, Monitor, average, collecting, log, step_metrics, text_progress
from nanorl.sample import Batch, Group, Prompt, Sample, collate

torch.set_num_threads(1)
VERSION, LOW, HIGH = 5, 0.2, 0.28
NAN = float("nan")
PAGE = Path(__file__).parent.parent / "notes" / "metrics.md"


def make(tokens=(3, 4), reward=0.0, version=0, finish="stop", prompt=(1, 2), logp=None, **more) -> Sample:
    """A sample of one turn: the prompt's ids, then the sampled tokens; the reward at the end."""
    n, m = len(prompt), len(tokens)
    return Sample(
        ids=(*prompt, *tokens), mask=(False,) * n + (True,) * m, logp_behave=(0.0,) * n + tuple(logp or (-1.0,) * m),
        version=(-1,) * n + (version,) * m, finish=finish, rewards=((n + m - 1, reward),), **more,
    )  # fmt: skip


def group_of(*samples: Sample, number: int = 0) -> Group:
    return Group(Prompt(number, (1, 2), "1+1=", "2"), samples)


samples = st.builds(
    make, tokens=st.lists(st.integers(0, 3), max_size=4).map(tuple), reward=st.sampled_from([0.0, 0.5, 1.0, -2.0]),
    version=st.integers(0, VERSION), finish=st.sampled_from(["stop", "length", "abort"]),
    prompt=st.sampled_from([(1,), (1, 2, 3)]), train=st.sampled_from([True, True, True, False]),
    notes=st.lists(st.tuples(st.sampled_from(["style", "worked"]), st.sampled_from([0.0, 1.0, 0.3, NAN])), max_size=2).map(tuple),
)  # fmt: skip
steps = st.lists(st.lists(samples, min_size=1, max_size=4), min_size=1, max_size=3).filter(
    lambda groups: any(s.train for g in groups for s in g)
)


def batch_of(groups: list[Group], seed: int) -> tuple[Batch, torch.Tensor]:
    """The groups as a batch in float64 with every field that metrics read, at random, and the trainer's log-probs.

    Some rows had no forward pass (NaN in all their log-probs), some had one in the first update (NaN in logp_prox).
    """
    batch, g = collate(groups), torch.Generator().manual_seed(seed)

    def noise(scale: float) -> torch.Tensor:
        return torch.randn(batch.mask.shape, generator=g, dtype=torch.float64) * scale

    def some(share: float) -> torch.Tensor:
        return torch.rand(len(batch), 1, generator=g) < share

    behave = -noise(1.0).abs()
    passed = some(0.7)
    logp = (behave + noise(0.3)).where(passed, NAN)
    batch = replace(
        batch, rewards=batch.rewards.double(), logp_behave=behave, adv=noise(1.0), keep=noise(1.0) > -1,
        logp_prox=(behave + noise(0.1)).where(passed & some(0.7), NAN), logp_ref=behave + noise(0.5),
    )  # fmt: skip
    return batch, logp


def close(a: dict[str, float], b: dict[str, float]) -> bool:
    return a.keys() == b.keys() and all(a[k] == pytest.approx(b[k], rel=1e-9, abs=1e-12) for k in a)


def oracle(groups: list[Group], batch: Batch, logp: torch.Tensor) -> dict[str, float]:
    """notes/metrics.md, line by line, as loops over plain numbers."""
    rows = [s for group in groups for s in group.samples if s.train]
    out: dict[str, list[float]] = {k: [] for k in (
        "adv", "lag", "ratio", "low", "high", "prox", "ref", "mismatch", "surprise", "length", "passed", "token")}  # fmt: skip
    for i, s in enumerate(rows):
        at = [t for t, sampled in enumerate(s.mask) if sampled]
        out["length"].append(len(at))
        out["passed"].append(any(math.isfinite(logp[i, t]) for t in at))
        out["lag"] += [VERSION - s.version[at[0]]] if at else []
        for t in at:
            a, new, mu, old = (float(x[i, t]) for x in (batch.adv, logp, batch.logp_behave, batch.logp_prox))
            out["adv"].append(a)
            out["surprise"].append(-mu)
            out["token"].append(s.ids[t])
            if math.isnan(new) or not batch.keep[i, t]:
                continue
            old = new if math.isnan(old) else old
            r = math.exp(new - old)
            out["ratio"].append(r)
            out["low"].append(a < 0 and r < 1 - LOW)
            out["high"].append(a > 0 and r > 1 + HIGH)
            out["prox"].append(r - 1 - math.log(r))
            q = math.exp(float(batch.logp_ref[i, t]) - new)  # π_ref/π_θ
            out["ref"].append(q - 1 - math.log(q))
            out["mismatch"].append(abs(old - mu))
    by_group = [[s.reward for s in group.samples if s.train] for group in groups]
    by_group = [r for r in by_group if r]
    metrics = {
        "reward": mean(s.reward for s in rows), "reward/std": std([s.reward for s in rows], NAN),
        "reward/group_std": mean(std(r, 0.0) for r in by_group),
        "contrast": mean(len(set(r)) > 1 for r in by_group),
        "adv/mean": mean(out["adv"]), "adv/std": std(out["adv"], NAN),
        "clip/low": mean(out["low"]), "clip/high": mean(out["high"]), "clip": mean(out["low"]) + mean(out["high"]),
        "kl/prox": mean(out["prox"]), "kl/ref": mean(out["ref"]), "entropy": mean(out["surprise"]),
        "repeat/token": max(Counter(out["token"]).values(), default=NAN) / max(len(out["token"]), 1),
        "truncated": mean(s.finish == "length" for s in rows), "trained_rows": mean(out["passed"]),
        "samples": len(rows), "tokens": sum(out["length"]),
    }  # fmt: skip
    for name in ("lag", "ratio", "mismatch", "length"):
        metrics |= {f"{name}/mean": mean(out[name]), f"{name}/max": max(out[name], default=NAN)}
    for name in ("style", "worked"):
        logged = [v for s in rows for n, v in s.notes if n == name]
        silent = sum(map(math.isnan, logged))
        metrics[name] = mean(v for v in logged if not math.isnan(v))
        metrics |= {f"{name}/abstained": silent} if silent else {}
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def mean(values) -> float:
    values = list(values)
    return sum(values) / len(values) if values else NAN


def std(values: list[float], alone: float) -> float:
    m, n = mean(values), len(values)
    return math.sqrt(sum((v - m) ** 2 for v in values) / (n - 1)) if n > 1 else alone


# What the numbers mean


@given(steps, st.integers(0, 2**31))
@settings(max_examples=150, deadline=None)
def test_every_metric_is_its_equation(step, seed):
    groups = [group_of(*g) for g in step]
    batch, logp = batch_of(groups, seed)
    measured = step_metrics(groups, batch, logp, VERSION, LOW, HIGH)
    expected = oracle(groups, batch, logp)
    assert measured.keys() == expected.keys()
    assert close(measured, expected), {k: (measured[k], expected[k]) for k in measured if measured[k] != expected[k]}


@given(steps, st.integers(0, 2**31))
@settings(max_examples=60, deadline=None)
def test_garbage_off_the_mask_changes_nothing(step, seed):
    groups = [group_of(*g) for g in step]
    batch, logp = batch_of(groups, seed)
    off = ~batch.mask
    trash = torch.tensor([NAN, math.inf, -math.inf, 1e30])[torch.arange(off.numel()).reshape(off.shape) % 4].double()
    noisy = replace(
        batch, ids=batch.ids.masked_fill(off, 10**9), version=batch.version.masked_fill(off, -(10**9)), keep=batch.keep | off,
        **{f: getattr(batch, f).where(~off, trash) for f in ("logp_behave", "logp_prox", "logp_ref", "adv")},
    )  # fmt: skip
    clean = step_metrics(groups, batch, logp, VERSION, LOW, HIGH)
    assert step_metrics(groups, noisy, logp.where(~off, trash), VERSION, LOW, HIGH) == clean


@given(steps, st.integers(0, 2**31))
@settings(max_examples=60, deadline=None)
def test_the_order_of_the_rows_changes_nothing(step, seed):
    groups = [group_of(*g) for g in step]
    batch, logp = batch_of(groups, seed)
    order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(seed))
    shuffled = step_metrics(groups, batch.select(order), logp[order], VERSION, LOW, HIGH)
    assert close(shuffled, step_metrics(groups, batch, logp, VERSION, LOW, HIGH))


@given(steps, st.integers(0, 2**31))
@settings(max_examples=60, deadline=None)
def test_a_batch_given_twice_has_the_same_means_and_twice_the_counts(step, seed):
    groups = [group_of(*g) for g in step]
    batch, logp = batch_of(groups, seed)
    twice = replace(
        batch, **{f: torch.cat([getattr(batch, f)] * 2) for f in vars(batch) if isinstance(getattr(batch, f), torch.Tensor)}
    )
    twice = replace(twice, group=torch.cat([batch.group, batch.group + len(groups)]))
    once = step_metrics(groups, batch, logp, VERSION, LOW, HIGH)
    again = step_metrics(groups * 2, twice, logp.repeat(2, 1), VERSION, LOW, HIGH)
    for name in once.keys() - {"reward/std", "adv/std"}:  # ddof 1: a deviation does change
        counts = name in ("samples", "tokens") or name.endswith("/abstained")
        assert again[name] == pytest.approx(once[name] * (2 if counts else 1), rel=1e-9, abs=1e-12), name


def exact(counts: list[int], **logps: list[float]) -> dict[str, float]:
    """Metrics of a batch in which token v was drawn counts[v] times: its averages are exact expectations."""
    rows = [make((v,)) for v, n in enumerate(counts) for _ in range(n)]
    batch = collate([group_of(*rows)])
    blank = torch.zeros(batch.mask.shape, dtype=torch.float64)

    def of(table: list[float]) -> torch.Tensor:
        return blank.masked_scatter(batch.mask, torch.tensor(table, dtype=torch.float64)[batch.ids[batch.mask]])

    logp = of(logps.pop("logp", [0.0] * len(counts)))
    batch = replace(batch, adv=blank, **{name: of(table) for name, table in logps.items()})
    return step_metrics([], batch, logp, VERSION, LOW, HIGH)


distributions = st.lists(st.integers(1, 6), min_size=5, max_size=5)


@given(distributions, distributions)
@settings(max_examples=40, deadline=None)
def test_entropy_and_both_kls_are_exact_in_expectation(counts, others):
    def log_of(weights):
        return [math.log(w / sum(weights)) for w in weights]

    p, q = log_of(counts), log_of(others)
    kl = sum(math.exp(a) * (a - b) for a, b in zip(p, q))
    assert exact(counts, logp_behave=p)["entropy"] == pytest.approx(-sum(math.exp(a) * a for a in p))
    assert exact(counts, logp_prox=p, logp=q)["kl/prox"] == pytest.approx(kl, abs=1e-12)  # KL(π_prox‖π_θ)
    assert exact(counts, logp=p, logp_ref=q)["kl/ref"] == pytest.approx(kl, abs=1e-12)  # KL(π_θ‖π_ref)
    assert exact(counts, logp_prox=p, logp=q)["ratio/mean"] == pytest.approx(1)  # E_prox[π_θ/π_prox]


def test_without_logp_prox_the_policy_is_its_own_and_the_ratio_is_one():
    groups = [group_of(make(reward=1.0), make())]
    batch, logp = batch_of(groups, 0)
    logp = batch.logp_behave + 0.25
    metrics = step_metrics(groups, replace(batch, logp_prox=None, keep=None), logp, VERSION, LOW, HIGH)
    assert metrics["ratio/mean"] == metrics["ratio/max"] == 1 and metrics["kl/prox"] == metrics["clip"] == 0
    assert metrics["mismatch/mean"] == pytest.approx(0.25)


def test_spread_between_prompts_is_no_spread_within_groups():
    groups = [group_of(make(reward=8.0), make(reward=8.0)), group_of(make(reward=-2.0), make(reward=-2.0))]
    batch, logp = batch_of(groups, 0)
    metrics = step_metrics(groups, batch, logp, VERSION, LOW, HIGH)
    assert metrics["reward/std"] == pytest.approx(math.sqrt(100 / 3))
    assert metrics["reward/group_std"] == 0 and metrics["contrast"] == 0


def test_a_step_without_any_forward_pass_has_no_ratio_and_no_nan():
    groups = [group_of(make(), make())]
    batch, _ = batch_of(groups, 0)
    metrics = step_metrics(groups, batch, torch.full(batch.mask.shape, NAN), VERSION, LOW, HIGH)
    assert metrics["trained_rows"] == 0 and "ratio/max" not in metrics and "clip" not in metrics
    assert all(map(math.isfinite, metrics.values()))


# A user's own numbers


def test_nan_abstains_from_the_mean_and_is_counted():
    means = average([("style", v) for v in (0.5, NAN, NAN, 0.8)])
    assert means == {"style": pytest.approx(0.65), "style/abstained": 2}
    assert average([("style", NAN)]) == {"style/abstained": 1}


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
        metrics = step_metrics(GROUPS, batch, logp, VERSION, LOW, HIGH) | {"grad_norm": 1 / step, "skipped": 0}
        results = {"eval/pass@1": step / 12} if step % 6 == 0 else {}
        if results:
            watch.evaluation(step, results)
        watch.step(step, metrics | results, GROUPS, SECONDS)
        watch.show(step, GROUPS[0])
        watch.histograms(step, batch, logp)
    watch.close()


def without_clock(rows: list[dict]) -> list[dict]:
    return [{k: v for k, v in row.items() if not k.startswith(WALL_CLOCK)} for row in rows]


@pytest.mark.parametrize("checkpoint", [7, 9])
def test_a_killed_and_resumed_run_leaves_the_files_of_an_undisturbed_one(tmp_path, checkpoint):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    train(whole, 0, 12)
    train(resumed, 0, 9)  # killed after step 9, in the middle of a line
    for name in ("metrics.jsonl", "samples.jsonl"):
        with open(resumed / name, "a") as file:
            file.write('{"step": 10, "rew')
    time.sleep(1.1)  # event files are named, and read, by the second
    train(resumed, checkpoint, 12)
    assert without_clock(read(resumed / "metrics.jsonl")) == without_clock(read(whole / "metrics.jsonl"))
    assert (resumed / "samples.jsonl").read_bytes() == (whole / "samples.jsonl").read_bytes()
    assert [row["step"] for row in read(whole / "metrics.jsonl")] == list(range(13))
    for folder in (whole, resumed):
        board = EventAccumulator(str(folder)).Reload()
        assert [e.step for e in board.Scalars("reward")] == list(range(1, 13))
        assert [e.step for e in board.Scalars("eval/pass@1")] == [0, 6, 12]
        assert {"histogram/reward", "histogram/adv", "histogram/length", "histogram/ratio"} == set(board.Tags()["histograms"])
        assert board.Tags()["tensors"] == ["sample/text_summary"]


def test_a_run_that_starts_over_keeps_nothing_of_the_old_one(tmp_path):
    train(tmp_path, 0, 3)
    train(tmp_path, 0, 2)
    assert [row["step"] for row in read(tmp_path / "metrics.jsonl")] == [0, 1, 2]
    assert {row["step"] for row in read(tmp_path / "samples.jsonl")} == {1, 2}


@given(step=steps)
@settings(max_examples=20, deadline=None)
def test_samples_are_stored_whole(tmp_path_factory, step):
    folder, groups = tmp_path_factory.mktemp("run"), [group_of(*g, number=n) for n, g in enumerate(step)]
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
    trainer = {"loss", "lr", "eval/greedy", "eval/pass@k", "eval/length", "eval/truncated"}
    page = PAGE.read_text()
    rows = re.findall(r"^\| `(\S+)`( ●)? \|(.*)\|$", page, re.MULTILINE)
    defined = [key for key, _, _ in rows]
    assert len(defined) == len(set(defined)) and set(defined) == written | trainer
    assert all(len(rest.replace(r"\|", "").split("|")) == 4 for _, _, rest in rows)  # meaning, unit, healthy, broken
    assert {key for key, mark, _ in rows if mark} == {key for _, _, key, _ in monitor.COLUMNS}
    assert KEYS == {key for key in defined if not key.startswith(("seconds/", "eval/"))}


# The console


def test_columns_stand_under_their_titles_and_the_line_fits(tmp_path, capsys):
    values = dict.fromkeys(KEYS - {"step", "seconds"}, 0.123)
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
