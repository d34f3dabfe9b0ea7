"""What is happening? Numbers on the console, numbers and samples in files, pictures in TensorBoard.

`log(name, value)` is how a user adds a number of their own, from a reward, an episode or a loss. `Monitor` shows and
writes them beside what a step says about itself (`metrics.py`); `notes/metrics.md` explains each name. No torch until a
`Monitor` is made: a user's reward file imports `log`, and runs without torch. `look.py` shows what was written.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from nanorl import loss as L
from nanorl.config import STARTED, Refused
from nanorl.metrics import average, finite, trained_ratio
from nanorl.timeline import Span

if TYPE_CHECKING:
    from torch import Tensor

    from nanorl.objective import Algorithm
    from nanorl.sample import Batch, Group

WALL_CLOCK = ("seconds", "tokens_per_second", "util/", "buffer/", "sync/")  # such keys are times, or change with them
KEYS = frozenset("""step seconds tokens_per_second samples tokens trained_rows loss grad_norm skipped lr
    reward reward/all reward/std reward/group_std contrast adv/mean adv/std lag/mean lag/max ratio/mean ratio/max
    clip clip/low clip/high clip/dual kl/prox kl/ref mismatch/mean mismatch/max mismatch/kl entropy repeat/token
    correction/mean correction/max correction/masked m2/dropped value/loss value/lr value/grad_norm value/mean
    value/explained length/mean length/max truncated reward/faults/timeout reward/faults/memory
    reward/faults/exception reward/faults/none reward/faults/nan reward/faults/died
    """.split())  # beside these: seconds/…, eval/… and the user's own
EVERY, FLAT = 20, 5  # lines between two headers on the console; steps without contrast before a warning

_outside: list[tuple[str, float]] = []  # logged outside of any sample since the last step was written
_notes = ContextVar("notes", default=_outside)


def log(name: str, value: float) -> None:
    """Log a number of your own under this name: a bool, an int, a float or a tensor with one element.

    Inside an episode or reward it belongs to the sample in the making, elsewhere (a loss) to the step, which reports
    the mean. NaN abstains: the mean is over the others, NAME/abstained counts it. Raises Refused for a taken name.
    """
    if not own(name):
        raise Refused(f"log({name!r}, …): the name is taken, see notes/metrics.md; choose another")
    _notes.get().append((name, float(value.detach() if hasattr(value, "detach") else value)))


@contextmanager
def collecting() -> Iterator[list[tuple[str, float]]]:
    """The list of all that is logged while a sample is made, in this task and those that it starts."""
    token = _notes.set([])
    try:
        yield _notes.get()
    finally:
        _notes.reset(token)


def own(name: str) -> bool:
    """The name is a user's: neither ours nor among the names that we may yet write."""
    return name not in KEYS and not name.startswith((*WALL_CLOCK, "eval/", "shaping/"))


COLUMNS = (  # title, width, key in metrics.jsonl, format; what a person looks at
    ("reward", 8, "reward", ".3f"), ("pass@1", 8, "eval/pass@1", ".3f"), ("contrast", 10, "contrast", ".0%"),
    ("grad", 7, "grad_norm", ".2f"), ("lag", 5, "lag/max", ".0f"), ("ratio", 7, "ratio/max", ".3f"),
    ("clip", 7, "clip", ".1%"), ("entropy", 9, "entropy", ".3f"), ("length", 8, "length/mean", ".1f"),
    ("cut", 6, "truncated", ".0%"), ("tok/s", 8, "tokens_per_second", ",.0f"),
)  # fmt: skip
BESIDE = ("value/explained", "correction/max")  # shown after the columns where there is one
LEGEND = "(pass@1: held out, the last; grad: gradient norm; lag, ratio: largest; cut: answers; see notes/metrics.md)"


class Clock:
    """Seconds spent in each stage of a step: `with clock("train"): …`."""

    SHOWN = {"generate": "wait", "measure": "score", "train": "update", "publish": "sync"}  # in the timeline

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.began = time.monotonic()

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        start = time.monotonic()
        yield
        self.spans.append(Span("trainer", stage, start, time.monotonic()))

    def lap(self) -> tuple[dict[str, float], list[Span], float]:
        """Since the last lap: seconds by stage, the spans as the timeline names them, seconds in all."""
        spans, self.spans, before, self.began = self.spans, [], self.began, time.monotonic()
        seconds: dict[str, float] = {}
        for span in spans:
            seconds[span.name] = seconds.get(span.name, 0.0) + span.seconds
        return seconds, [replace(s, name=self.SHOWN.get(s.name, s.name)) for s in spans], self.began - before


class Monitor:
    """The console and the files of one run. A step is shown and written once, and flushed, when it is over."""

    def __init__(self, folder: Path, start_step: int, steps: int):
        """Begin after start_step, 0 or that of the checkpoint: what a killed run wrote after it is cut away."""
        from torch.utils.tensorboard import SummaryWriter

        kept = start_step or -1  # a run that starts over keeps nothing, not even the evaluation before training
        self.metrics, self.samples = (append_after(folder / f"{name}.jsonl", kept) for name in ("metrics", "samples"))
        self.board = SummaryWriter(str(folder), purge_step=kept + 1, flush_secs=10)
        self.start_step, self.steps, self.began = start_step, steps, time.monotonic()
        self.pass_1, self.lines, self.flat, self.warned = math.nan, 0, 0, set()  # pass_1: the last evaluation's

    def step(self, step: int, metrics: dict[str, float], groups: Sequence[Group], seconds: dict[str, float],
             tokens: Iterable[Mapping[str, object]] = ()) -> None:  # fmt: skip
        """Write and show step number `step`, from 1. seconds: of each stage (generate, measure, train, evaluate).

        metrics: step_metrics', the trainer's, and an evaluation's if there was one: a step is one object in the file.
        tokens: what stands beside each sample that was trained, in their order (`metrics.of_tokens`).
        """
        metrics = {**metrics, **average(_outside), **{f"seconds/{stage}": took for stage, took in seconds.items()}}
        _outside.clear()
        beside = ("evaluate", "save")
        metrics["tokens_per_second"] = metrics["tokens"] / sum(t for stage, t in seconds.items() if stage not in beside)
        self.pass_1 = metrics.get("eval/pass@1", self.pass_1)
        self.write(step, metrics)
        beside_samples = iter(tokens)
        for number, sample in ((group.prompt.number, sample) for group in groups for sample in group.samples):
            row = {"step": step, "prompt": number, "reward": sample.reward, **vars(sample)}
            row["mask"] = [int(m) for m in sample.mask]
            row |= next(beside_samples, {}) if sample.train else {}
            self.samples.write(line(row))
        self.samples.flush()
        self.print_line(step, metrics)
        self.warn(metrics)

    def write(self, step: int, metrics: dict[str, float]) -> None:
        """Append one object to metrics.jsonl, and the same numbers to TensorBoard."""
        metrics = finite({"seconds": time.monotonic() - STARTED, **metrics})
        self.metrics.write(json.dumps({"step": step, **metrics}) + "\n")
        self.metrics.flush()
        for name, value in metrics.items():
            self.board.add_scalar(name, value, step)

    def print_line(self, step: int, metrics: dict[str, float]) -> None:
        """Progress, time left, COLUMNS and the user's own numbers, under a header that comes again now and then."""
        width = 2 * len(str(self.steps)) + 4
        if self.lines % EVERY == 0:
            titles = "step".rjust(width) + "left".rjust(8) + "".join(title.rjust(w) for title, w, _, _ in COLUMNS)
            print(titles if self.lines else f"{LEGEND}\n{titles}")
        self.lines += 1
        left = (time.monotonic() - self.began) / (step - self.start_step) * (self.steps - step)
        shown = finite({"eval/pass@1": self.pass_1, **metrics})
        cells = (f"{shown[key]:{form}}".rjust(w) if key in shown else "–".rjust(w) for _, w, key, form in COLUMNS)
        notes = "".join(f"  {name} {value:.3g}" for name, value in shown.items() if own(name) or name in BESIDE)
        print(f"{step}/{self.steps}".rjust(width) + span(left).rjust(8) + "".join(cells) + notes, flush=True)

    def warn(self, metrics: dict[str, float]) -> None:
        """One line for each thing that is wrong, when it begins and not again until it has ended."""
        self.flat = self.flat + 1 if metrics.get("contrast") == 0 == metrics.get("adv/std", 0) else 0
        wrong = {
            f"no group had contrast for {FLAT} steps, and equal rewards teach nothing; look at reward and problems":
                self.flat >= FLAT,
            "over half of the answers are cut at the length limit; raise --max-new-tokens": metrics["truncated"] > 0.5,
            "over 90 % of the sampled tokens are one: collapse or broken weights; go back to a checkpoint, lower --lr":
                metrics.get("repeat/token", 0) > 0.9,
            "the gradient is not finite: no optimizer step was made; lower --lr": metrics.get("skipped", 0) > 0,
        }  # fmt: skip
        for text, now in wrong.items():
            if now and text not in self.warned:
                print(f"warning: {text}", flush=True)
        self.warned = {text for text, now in wrong.items() if now}

    def evaluation(self, step: int, results: dict[str, float]) -> None:
        """Show an evaluation (keys eval/…), and write it if it is before training, step 0; later `step` writes it."""
        self.pass_1 = results.get("eval/pass@1", self.pass_1)
        if step == 0:
            self.write(0, results)
        numbers = "".join(f"  {name.removeprefix('eval/')} {value:.3f}" for name, value in results.items())
        print(f"evaluation at step {step}:{numbers}", flush=True)

    def show(self, step: int, group: Group) -> None:
        """Print the first sample of this group, whole, and put it on the text page of TensorBoard."""
        sample, indent = group.samples[0], "\n    "
        text = (f"\nprompt      {group.prompt.text}\ncompletion  {sample.text}\nanswer      {group.prompt.answer}\n"
                f"reward      {sample.reward:g} (its group's: {' '.join(f'{s.reward:g}' for s in group.samples)})"
                f"  finish {sample.finish}")  # fmt: skip
        text = "".join(c if c.isprintable() else indent if c == "\n" else "·" for c in text)  # no terminal commands
        print(f"a sample of step {step}, prompt {group.prompt.number}:{text}", flush=True)
        self.board.add_text("sample", text, step)

    def histograms(self, step: int, batch: Batch, logp: Tensor, algo: Algorithm) -> None:
        """Draw reward and length of rows; advantage, lag, ratio, correction of tokens. Arguments as in `step_metrics`."""
        trained, start, ratio = trained_ratio(batch, logp, algo)
        drawn = {"reward": batch.reward, "length": batch.mask.sum(1), "adv": batch.adv[batch.counted],
                 "lag": (batch.step - batch.version)[batch.mask], "ratio": ratio}  # fmt: skip
        if algo.axes.correction.on:
            factor = L.correction(start, batch.logp_behave, batch.mask, **vars(algo.axes.correction))
            drawn["correction"] = factor[trained]
        for name, values in drawn.items():
            if values.isfinite().any():  # TensorBoard takes neither NaN nor nothing
                self.board.add_histogram(f"histogram/{name}", values[values.isfinite()], step)

    def explain_first_step(self, loss: float) -> None:
        """Why the loss of a clipped surrogate says nothing at the first step, and why the ratio is 1."""
        print("The ratio is 1 because the weights that sampled now train. At r = 1 the loss is −Σ weight·A, and the\n"
              "advantages of a group sum to 0 over its answers, not over their tokens: the loss reads 0 where answers\n"
              f"are equally long, here {loss:.3f}, which tells whether right or wrong answers are longer. What learns\n"
              "is its gradient, −Σ weight·A·∇log π: look at reward, contrast and grad.", flush=True)

    def close(self) -> None:
        """Close the files."""
        for file in (self.metrics, self.samples, self.board):
            file.close()


def line(row: dict[str, object]) -> str:
    """The row as a line of JSON; to look for what is not finite, which is rare, would take longer than to write it."""
    try:
        return json.dumps(row, allow_nan=False) + "\n"
    except ValueError:
        return json.dumps({name: plain(value) for name, value in row.items()}) + "\n"


def plain(value: object) -> object:
    """The value as JSON can hold it: what is not finite becomes null."""
    if isinstance(value, (tuple, list)):
        return [plain(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def append_after(path: Path, step: int) -> TextIO:
    """Open a JSONL file after its last line up to this step; what a killed run wrote later, half lines too, is cut."""
    end = 0
    with open(path, "ab+") as file:
        file.seek(0)
        for line in file:
            try:
                if not line.endswith(b"\n") or json.loads(line)["step"] > step:
                    break
            except (ValueError, TypeError, KeyError):
                break
            end += len(line)
        file.truncate(end)
    return open(path, "a", encoding="utf-8")


def span(seconds: float) -> str:
    """A duration for people.

    >>> span(7.4), span(187), span(7500)
    ('7s', '3m07s', '2h05m')
    """
    s = round(seconds)
    return f"{s}s" if s < 60 else f"{s // 60}m{s % 60:02}s" if s < 3600 else f"{s // 3600}h{s % 3600 // 60:02}m"


_said: dict[str, float] = {}  # label → when its last line was printed


def text_progress(label: str, done: int, total: int, started: float) -> None:
    """Progress of other long work that began at `started` (time.monotonic()), with the time left, done ≥ 1.

    One line that rewrites itself on a terminal; elsewhere a line every ten seconds, and the last if there were others.
    """
    now, last, terminal = time.monotonic(), done >= total, sys.stdout.isatty()
    if terminal or (last and now - started >= 10) or now - max(started, _said.get(label, started)) >= 10:
        _said[label], spent = now, now - started
        text = f"{label} {done}/{total}  {span(spent)}, {span(spent / done * (total - done))} left"
        print(f"\r{text:78}" if terminal else text, end="" if terminal and not last else "\n", flush=True)


if __name__ == "__main__":
    from nanorl.look import main

    sys.exit(main(sys.argv[1:]))
