"""What will a cluster do, and what did it do? The simulator's command line, and its settings measured in a real run."""

from __future__ import annotations

import gc
import itertools
import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import tyro

from nanorl import timeline
from nanorl.cluster import PRESETS, Cluster, Result
from nanorl.config import Refused, dashed, unread
from nanorl.pace import Pace
from nanorl.simulate import simulate
from nanorl.timeline import Span


@dataclass(frozen=True)
class Ask(Cluster):
    """What would asynchrony buy me? The first word may name a published cluster."""

    compare: bool = False
    """The same cluster synchronous, one step ahead, and asynchronous."""
    sweep: str | None = None
    """Any flag at several values: max_lag=0,1,2,4,8."""
    run: tuple[str, ...] = ()
    """Folders of real runs: settings measured there, then speed and lag predicted and compared."""
    picture: str | None = None
    """Draw the timeline into this file, .png, .svg or .pdf."""


GAP = 0.05  # seconds between two spans of sampling; shorter ones are the engine's own work, longer ones its waiting


@dataclass(frozen=True)
class Measured:
    """A real run: as a cluster, and what it reached in the second half of its steps, evaluations taken out."""

    cluster: Cluster
    steps_per_second: float
    mean_lag: float


def measure(run: Path) -> Measured:
    """`measured` of the files in this run's folder. Raises Refused."""
    try:
        config = json.loads((run / "config.json").read_text())["config"]
        rows, samples = ([json.loads(line) for line in (run / f"{name}.jsonl").read_text().splitlines()]
                         for name in ("metrics", "samples"))  # fmt: skip
        rows = [row for row in rows if row["step"] > 0]
        begun = max((i for i in range(1, len(rows)) if rows[i]["seconds"] < rows[i - 1]["seconds"]), default=0)
        return measured(config, rows[begun:], samples, timeline.read(run / "trace.json"))
    except OSError as error:
        raise Refused(f"--run {run}: {Path(error.filename).name} cannot be read ({error.strerror}); "
                      "name the folder of a run (runs/NAME)") from None
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise Refused(f"--run {run}: not the files of a run ({type(error).__name__}: {error}); name another") from None


def measured(config: dict[str, Any], rows: list[dict], samples: list[dict], spans: list[Span]) -> Measured:
    """What a run's files say. rows: of metrics.jsonl, one a step since the last start; samples: of samples.jsonl.

    Every time is from the timeline. Sampling: by the token steps, rows and tokens read of its spans, and the gaps between
    them, of the whole run, since answers are interrupted, and much is read at once, at its beginning above all. All else
    is of the second half. Training: from the groups being there to the update's end, by the tokens of the step.
    """
    if config["pace"]["delay"] != 0:
        raise Refused("--run: a run with --delay has its lag given, not found; take one of --engine worker")
    if config["engine"] == "vllm":
        raise Refused("--run: vLLM's servers do not tell of their token steps; take a run of --engine worker")
    local, P = config["engine"] == "local", config["prompts_per_step"]
    kinds = {name: [s for s in by_start(spans) if s.lane == "trainer" and s.name == name]
             for name in ("wait", "update", "evaluate")}  # fmt: skip
    waits, updates, evaluations = kinds.values()
    steps = list(zip(rows, waits, updates))
    if len(steps) < 6:
        raise Refused(f"--run: {len(steps)} steps are too few to measure; 6 at least, better 30")
    half, begin = len(steps) // 2, updates[len(steps) // 2 - 1].end
    masks = [sample["mask"] for sample in samples if sample["step"] >= rows[half]["step"]]
    undisturbed = [s for s in by_start(spans) if s.name == "generate"  # an evaluation is no sampling, and disturbs it
                   and not any(e.start <= s.start < e.end for e in evaluations)]  # fmt: skip
    made = [s for s in undisturbed if s.start >= begin]
    loads = [s for s in spans if s.lane != "trainer" and s.name in ("sync", "interrupt") and s.start >= begin]
    ends = np.cumsum([row["seconds"] - before["seconds"] - row.get("seconds/evaluate", 0)
                      for before, row in itertools.pairwise(rows[half - 1 : len(steps)])])  # fmt: skip
    train = fit([[1, row["tokens"]] for row, _, _ in steps[half:]], [u.end - w.end for _, w, u in steps[half:]])
    engine = fit([[s.args[part] for part in ("token_steps", "rows", "prefilled")] for s in undisturbed],
                 lasting(undisturbed, [s for s in spans if s.name in ("sync", "interrupt")]))  # fmt: skip
    read, of = (sum(s.args.get(part, 0) for s in made) for part in ("read_again", "interrupted"))
    overhead = np.mean([later.start - update.end - within(evaluations, update.end, later.start)
                        for later, update in zip(waits[half:], updates[half - 1 :])])  # fmt: skip
    sync, load = arrival(loads, updates[half - 1 :])
    if config["pace"]["max_lag"] == 0:  # all of the way from an update to the next that is not sampling
        sync = np.mean([around(made, evaluations, update.end, wait.end)
                        for update, wait in zip(updates[half - 1 :], waits[half:])]) - load  # fmt: skip
    filtered, failed, left = (rows[-1].get(f"buffer/{why}", 0) for why in ("filtered", "failed", "left_out"))
    ended = P * rows[-1]["step"] + filtered + failed
    known = ("max_lag", "overtake", "dynamic_sampling", "in_flight", "max_failed")
    cluster = Cluster(
        engines=1, trainers=int(not local), colocated=local, rows=512, step_base=engine[0], step_row=engine[1],
        prefill_token=engine[2], distinct=read / of if of else 1.0, train_base=train[0], train_token=train[1],
        overhead=overhead, sync=max(0.0, sync), load=load, switch=max(0.0, sync - overhead) * local, prompts_per_step=P,
        steps=len(steps), seed=config["seed"], samples_per_prompt=config["samples_per_prompt"],
        prompt=round(np.mean([len(mask) - sum(mask) for mask in masks])), measured=tuple(map(sum, masks)),
        filtered=(filtered + left) / ended, failed=failed / ended,
        pace=Pace(**{name: config["pace"][name] for name in known}),
    )  # fmt: skip
    return Measured(cluster, len(ends) / ends[-1], float(np.mean([row["lag/mean"] for row, _, _ in steps[half:]])))


def by_start(spans: Sequence[Span]) -> list[Span]:
    """In the order in which they begin."""
    return sorted(spans, key=lambda span: span.start)


def lasting(spans: Sequence[Span], loads: Sequence[Span]) -> list[float]:
    """Seconds of each span, with the gap before the next one where that, without loading weights, is under GAP."""
    gaps = [later.start - span.end - within(loads, span.end, later.start) for span, later in itertools.pairwise(spans)]
    return [span.seconds + (gap if 0 < gap < GAP else 0.0) for span, gap in zip(spans, (*gaps, 0.0))]


def within(spans: Sequence[Span], start: float, end: float) -> float:
    """Seconds of these spans between two times."""
    return sum(max(0.0, min(end, span.end) - max(start, span.start)) for span in spans)


def around(made: Sequence[Span], evaluations: Sequence[Span], start: float, end: float) -> float:
    """Seconds from start to end, the end of an update and the groups of the next, without sampling and evaluating."""
    inside = [span for span in made if start <= span.start < end]
    return end - start - within(evaluations, start, end) - (inside[-1].end - inside[0].start)


def arrival(loads: Sequence[Span], updates: Sequence[Span]) -> tuple[float, float]:
    """Median seconds from the end of an update until its weights are at an engine, and mean seconds of loading them."""
    if not loads:
        return 0.0, 0.0
    took = [load.start - max(u.end for u in updates if u.end <= load.start) for load in loads]
    return float(np.median(took)), float(np.mean([load.seconds for load in loads]))


def fit(features: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """The w ≥ 0 that minimises Σ (seconds − features·w)²: the best of the least squares over every set of features.

    >>> fit([[1, 0], [1, 1], [1, 2]], [5, 4, 3])
    [4.0, 0.0]
    """
    x, y = np.array(features, dtype=float), np.array(seconds, dtype=float)
    best = np.zeros(x.shape[1])
    for size in range(1, x.shape[1] + 1):
        for chosen in map(list, itertools.combinations(range(x.shape[1]), size)):
            w = np.zeros(x.shape[1])
            w[chosen] = np.linalg.lstsq(x[:, chosen], y, rcond=None)[0]
            if (w >= 0).all() and ((x @ w - y) ** 2).sum() < ((x @ best - y) ** 2).sum():
                best = w
    return best.tolist()


def modes(c: Cluster) -> dict[str, Cluster]:
    """The cluster in three modes; those that settle at once take a third of the steps."""
    few = max(2, c.steps // 3)
    return {
        "synchronous": replace(c, colocated=True, steps=few, pace=replace(c.pace, max_lag=0, overtake=0)),
        "one step ahead": replace(c, colocated=False, interrupt=False, steps=few,
                                  pace=replace(c.pace, max_lag=1, overtake=0)),
        f"asynchronous, lag ≤ {c.pace.max_lag}": replace(c, colocated=False),
    }  # fmt: skip


def table(results: dict[str, Result]) -> str:
    """A row for each simulation: what matters, and how much faster than the first it is."""
    titles = ("s/step", "speed", "tokens/s", "engines", "trainer", "lag", "max", "wasted", "read again")
    lines = [" " * 22 + "".join(title.rjust(11) for title in titles)]
    first = next(iter(results.values())).steps_per_second
    for name, r in results.items():
        busy = r.busy
        trainer = f"{busy.pop('trainer'):.0%}" if "trainer" in busy else "–"
        cells = (f"{1 / r.steps_per_second:.4g}", f"{r.steps_per_second / first:.2f}", f"{r.tokens_per_second:,.0f}",
                 f"{sum(busy.values()) / len(busy):.0%}", trainer, f"{r.mean_lag:.2f}", f"{max(r.lags)}",
                 f"{r.wasted / r.generated:.1%}", f"{r.recomputed / r.generated:.1%}")  # fmt: skip
        lines.append(f"{name:22}" + "".join(cell.rjust(11) for cell in cells))
    return "\n".join(lines)


def excerpt(results: Sequence[Result]) -> list[list[Span]]:
    """Of each simulation the spans of as long a time, some three steps of the slowest, counted from its second half."""
    long = min(3 / min(r.steps_per_second for r in results), *(r.steps[-1].end - r.half[0] for r in results), np.inf)
    return [[replace(s, start=max(0.0, s.start - r.half[0]), end=min(long, s.end - r.half[0])) for s in r.spans
             if s.end > r.half[0] and s.start < r.half[0] + long] for r in results]  # fmt: skip


def show(clusters: dict[str, Cluster], picture: str | None) -> None:
    """Simulate all of them; print the table and the timelines, and draw these where asked to."""
    results = {name: simulate(c) for name, c in clusters.items()}
    print(table(results))
    drawn = []
    for (name, result), spans in zip(results.items(), excerpt(list(results.values()))):
        total = result.lags.total()
        lags = "  ".join(f"{lag}: {n / total:.0%}" for lag, n in sorted(result.lags.items()))
        ends = "  ".join(f"{key.removeprefix('buffer/')} {n:,.0f}" for key, n in result.steps[-1].buffer.items()
                         if key.startswith("buffer/"))  # fmt: skip
        print(f"\n{name}: samples by lag  {lags};  groups at the end  {ends}")
        print(timeline.text(spans, shutil.get_terminal_size((100, 24)).columns, most=3))
        few = {f"engine {i}" for i in range(4)} | {"trainer"}
        prefix = f"{name}: " if len(results) > 1 else ""
        drawn += [replace(span, lane=prefix + span.lane) for span in spans if span.lane in few]
    if picture is not None:
        print(timeline.picture(drawn, picture))


def otherwise(c: Cluster, ask: Ask, words: Sequence[str]) -> Cluster:
    """The measured cluster with what these flags change; with a lag, engine and trainer get a device each."""
    asked = [word[2:].split("=")[0].removeprefix("no-").replace("-", "_") for word in words if word.startswith("--")]
    pace = replace(c.pace, **{name: getattr(ask.pace, name) for name in asked if hasattr(Pace, name)})
    split = {"colocated": False, "trainers": 1, "switch": 0.0} if c.colocated and pace.stale else {}
    own = {name: getattr(ask, name) for name in asked if name in vars(c)}
    return replace(c, **{**split, **own, "pace": pace})


def predict(ask: Ask, words: Sequence[str]) -> None:
    """Measure each run, simulate what was measured, print both and how far that is off; then with the other flags."""
    runs = ask.run
    lines = [f"{'run':32}{'steps/s':>10}{'predicted':>11}{'error':>9}{'mean lag':>10}{'predicted':>11}"]
    inputs = []
    for run in runs:
        found = measure(Path(run))
        result = simulate(found.cluster)
        error = result.steps_per_second / found.steps_per_second - 1
        lines.append(f"{run[-31:]:32}{found.steps_per_second:10.4g}{result.steps_per_second:11.4g}{error:+9.1%}"
                     f"{found.mean_lag:10.2f}{result.mean_lag:11.2f}")  # fmt: skip
        c = found.cluster
        if (other := otherwise(c, ask, words)) != c:
            result = simulate(other)
            lines.append(f"{'  with the other flags':32}{'–':>10}{result.steps_per_second:11.4g}{'–':>9}{'–':>10}"
                         f"{result.mean_lag:11.2f}")  # fmt: skip
        inputs.append(f"{run}: a token step {1e3 * c.step_base:.3g} ms + {1e6 * c.step_row:.3g} µs a row; reading "
                      f"{1e6 * c.prefill_token:.3g} µs a token, of interrupted answers {c.distinct:.0%}; an update "
                      f"{1e3 * c.train_base:.3g} ms + "
                      f"{1e6 * c.train_token:.3g} µs a token; overhead {1e3 * c.overhead:.3g} ms; weights after "
                      f"{1e3 * c.sync:.3g} ms, loaded in {1e3 * c.load:.3g} ms; {c.steps} steps, "
                      f"{np.mean(c.measured):.4g} tokens an answer")  # fmt: skip
    print("\n".join((*lines, *inputs, "Of the second half of the steps; the seconds of evaluations are taken out.")))


def parse(words: Sequence[str]) -> Ask:
    """The command line: a name of PRESETS or none, then flags. Raises Refused; -h prints help and exits 0."""
    named = bool(words) and not words[0].startswith("-")
    if named and words[0] not in PRESETS:
        raise Refused(f"{words[0]}: no such cluster; there are {', '.join(PRESETS)}, or give flags only")
    default = Ask(**vars(PRESETS[words[0]])) if named else Ask()
    ask = tyro.cli(Ask, args=words[named:], default=default, prog="python -m nanorl.simulate",
                   config=(tyro.conf.FlagCreatePairsOff,))  # fmt: skip
    asked = [dashed(name) for name in ("run", "compare", "sweep") if getattr(ask, name)]
    if len(asked) > 1:
        raise Refused(f"{' '.join(asked)}: one at a time")
    if ask.picture is not None and (ask.run or ask.sweep):
        raise Refused(f"--picture: it draws one simulation or --compare; leave {asked[0]} away")
    if ask.picture is not None:
        timeline.drawable(ask.picture, "--picture")
    return ask


def main(words: list[str]) -> int:
    """Simulate what is asked, print what came of it. Returns the exit status."""
    gc.freeze()  # what torch has made stays; looking through it again and again would take a fifth of the time
    try:
        ask = parse(words)
        if ask.run:
            predict(ask, words)
        elif ask.sweep is not None:
            name, _, values = ask.sweep.partition("=")
            if name not in {**vars(Cluster()), **vars(Pace())} or not values:
                raise Refused(f"--sweep {ask.sweep}: must be a flag of this command and its values, as max_lag=0,1,2")
            each = {f"{name} = {v}": parse([*words, dashed(name), v]) for v in values.split(",")}
            print(table({name: simulate(c) for name, c in each.items()}))
        else:
            show(modes(ask) if ask.compare else {"simulated": ask}, ask.picture)
    except Refused as error:
        print(f"python -m nanorl.simulate: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        return unread()
    return 0
