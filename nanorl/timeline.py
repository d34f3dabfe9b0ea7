"""What did every process do, and when? Spans of time, recorded while a run goes on; as a file, as text, as a picture.

    python -m nanorl.monitor --timeline RUN [--from SECONDS] [--to SECONDS]

The lanes of a run are its trainer, its engines and its rewards. Nothing here needs torch, so that to look is quick.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanorl.config import STARTED, Refused

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STYLE = {"font.size": 12, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.3}
LOOK = {  # kind of work → its letter and its colour, others are grey; what is short comes last, drawn over the rest
    "wait": (".", "0.88"), "generate": ("g", "C0"), "reward": ("r", "C2"), "score": ("s", "C4"), "update": ("u", "C1"),
    "evaluate": ("e", "C5"), "save": ("v", "C6"), "sync": ("y", "C3"), "interrupt": ("i", "black"),
}  # fmt: skip


@dataclass(frozen=True)
class Span:
    """Something that took time: who (trainer, engine 0, rewards), what, from when to when (time.monotonic(), seconds)."""

    lane: str
    name: str
    start: float
    end: float
    args: Mapping[str, float] = field(default_factory=dict)  # counts of what was done

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end - self.start


class Lane:
    """Short pieces of the same work made into longer spans, their counts added, so that a trace stays small.

    Pieces come in the order in which they end. Idle time of up to `gap` seconds between two that are joined counts as
    work. A span that has lasted `longest` seconds grows no further: a piece that overlaps it starts one that does, too.
    """

    def __init__(self, lane: str, name: str, gap: float = 0.005, longest: float = 0.25):
        self.lane, self.name, self.gap, self.longest = lane, name, gap, longest
        self.spans: list[Span] = []

    def add(self, start: float, end: float, **counts: float) -> None:
        """A piece from start to end. It joins the last span if it begins within `gap` of its end and may lengthen it."""
        spans = self.spans  # one thread adds, another laps: whichever list this is, it is one list to the end
        last = spans[-1] if spans else None
        if last is not None and start <= last.end + self.gap and last.seconds < self.longest:
            summed = {key: last.args.get(key, 0) + counts.get(key, 0) for key in {**last.args, **counts}}
            spans[-1] = replace(last, start=min(last.start, start), end=max(last.end, end), args=summed)
        else:
            spans.append(Span(self.lane, self.name, start, end, counts))

    def lap(self) -> list[Span]:
        """The spans since the last lap."""
        spans, self.spans = self.spans, []
        return spans


class Trace:
    """The trace.json of a run, written while it goes on: Chrome trace events, for ui.perfetto.dev or chrome://tracing.

    A JSON array, a line for each event; viewers do without its closing bracket, so a killed run's file opens too.
    A lane is a process there, and its spans lie on as many threads as keep them apart: viewers drop what overlaps.
    Times are microseconds since `origin`, the start of the program, from which `seconds` in metrics.jsonl counts too.
    """

    def __init__(self, path: str | Path, origin: float = STARTED):
        self.file, self.origin, self.comma = open(path, "w", encoding="utf-8"), origin, ""
        self.ends: dict[str, list[int]] = {}  # lane → when the last span of each of its threads ends
        self.file.write("[\n")

    def write(self, spans: Iterable[Span]) -> None:
        """Append these spans, and flush. They may be earlier than those of other lanes that are written already."""
        for span in sorted(spans, key=lambda span: span.start):
            start, end = (round(1e6 * (time - self.origin)) for time in (span.start, span.end))
            if span.lane not in self.ends:
                self.ends[span.lane] = []
                self.event(name="process_name", ph="M", pid=len(self.ends), args={"name": span.lane})
            pid, ends = list(self.ends).index(span.lane) + 1, self.ends[span.lane]
            thread = next((i for i, until in enumerate(ends) if until <= start), len(ends))
            ends[thread : thread + 1] = [end]
            self.event(name=span.name, ph="X", pid=pid, tid=1000 * pid + thread, ts=start, dur=end - start,
                       args=dict(span.args))  # fmt: skip
        self.file.flush()

    def event(self, **event: Any) -> None:
        """Append one line."""
        self.file.write(f"{self.comma}{json.dumps(event)}\n")
        self.comma = ","

    def close(self) -> None:
        """Close the array, and the file."""
        self.file.write("]\n")
        self.file.close()


def read(path: str | Path) -> list[Span]:
    """The spans in the file of a Trace, in seconds since its origin, without the half line at the end of a killed run.

    Raises Refused for a file that is not there or no trace.
    """
    lanes, spans = {}, []
    try:
        first, *lines = Path(path).read_text(encoding="utf-8").split("\n")[:-1]
        if first != "[":
            raise ValueError(f"it begins with {first[:20]!r}")
        for event in (json.loads(line.removeprefix(",")) for line in lines if line != "]"):
            if event["ph"] == "M":
                lanes[event["pid"]] = event["args"]["name"]
            else:
                start, end = event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6
                spans.append(Span(lanes[event["pid"]], event["name"], start, end, event["args"]))
    except OSError as error:
        raise Refused(f"{path}: cannot be read ({error.strerror}); name the folder of a run") from None
    except (ValueError, KeyError, TypeError) as error:
        raise Refused(f"{path}: not the trace of a run ({error}); name the folder of one") from None
    return spans


def extent(spans: Sequence[Span]) -> tuple[float, float]:
    """The start of the first span and the end of the last, a microsecond later at least; there must be one."""
    first = min(span.start for span in spans)
    return first, max(first + 1e-6, max(span.end for span in spans))


def union(spans: Iterable[Span]) -> list[tuple[float, float]]:
    """The times at which at least one of these spans lasts: disjoint intervals, in order."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted((span.start, span.end) for span in spans):
        if merged and start <= merged[-1][1]:
            first, last = merged.pop()
            start, end = first, max(last, end)
        merged.append((start, end))
    return merged


def busy(spans: Sequence[Span], lane: str) -> float:
    """Utilisation of a lane: |⋃ its spans but for "wait"| / (end of the last − start of the first span, of all lanes)."""
    first, last = extent(spans)
    worked = sum(end - start for start, end in union(s for s in spans if s.lane == lane and s.name != "wait"))
    return min(1.0, worked / (last - first))


def drawn(spans: Sequence[Span], most: int) -> tuple[list[str], list[str]]:
    """The lanes to draw, the trainer's first, and a line on those left out: `most` of engine 0, engine 1, … stay."""
    alike, lanes, notes = {}, [], []
    for lane in sorted({span.lane for span in spans}, key=lambda lane: (len(lane), lane)):
        alike.setdefault(lane.split()[0], []).append(lane)
    for _, names in sorted(alike.items(), key=lambda item: (item[0] != "trainer", item[0])):
        few = names if len(names) <= most else [names[i * (len(names) - 1) // (most - 1)] for i in range(most)]
        lanes += few
        if len(few) < len(names):
            notes.append(f"drawn: {most} of the {len(names)} lanes {names[0]} to {names[-1]}")
    return lanes, notes


def kinds(spans: Iterable[Span]) -> dict[str, tuple[str, str]]:
    """The kinds of work among these spans, in the order of LOOK, each with its letter and its colour."""
    names = {span.name for span in spans}
    ordered = [name for name in LOOK if name in names] + sorted(names - LOOK.keys())
    return {name: LOOK.get(name, ("#", "0.5")) for name in ordered}


def letters(spans: Sequence[Span], first: float, wide: float, slices: int) -> str:
    """A letter for each of so many slices of time, `wide` seconds each: what took most of it; a blank is no span."""

    def filled(spans: Iterable[Span]) -> list[float]:
        """The seconds of each slice in which one of the spans lasts."""
        seconds = [0.0] * slices
        for start, end in union(spans):
            for i in range(int((start - first) / wide), min(slices, int((end - first) / wide) + 1)):
                seconds[i] += max(0.0, min(end, first + (i + 1) * wide) - max(start, first + i * wide))
        return seconds

    letter = {name: look[0] for name, look in kinds(spans).items()}
    took = {own: filled(span for span in spans if letter[span.name] == own) for own in letter.values()}
    took[" "] = [wide - seconds for seconds in filled(spans)]
    return "".join(max(took, key=lambda own: took[own][i]) for i in range(slices))


def text(spans: Sequence[Span], columns: int = 100, most: int = 8) -> str:
    """A row for each lane, `columns` wide: a letter for each slice of time, and at the end how busy the lane was.

    Times are the spans' own, in seconds. Of more than `most` ≥ 2 lanes of a kind some are drawn, and a line says so.
    """
    (first, last), (lanes, notes) = extent(spans), drawn(spans, most)
    margin = max(map(len, (*lanes, "seconds"))) + 2
    slices = max(10, columns - margin - 5)
    wide = (last - first) / slices
    digits = max(0, -math.floor(math.log10(wide)))
    ruler = "".join(f"|{first + i * wide:<13.{digits}f}" for i in range(0, max(1, slices - 12), 14))
    rows = [f"{'seconds':{margin}}{ruler[:slices]:{slices}} busy"]
    for lane in lanes:
        row = letters([span for span in spans if span.lane == lane], first, wide, slices)
        rows.append(f"{lane:{margin}}{row}{busy(spans, lane):5.0%}")
    legend = "   ".join(f"{letter} {name}" for name, (letter, _) in kinds(spans).items())
    return "\n".join((*rows, legend, f"a letter stands for what took most of {wide:.2g} s", *notes))


def gantt(spans: Sequence[Span], most: int = 16) -> Figure:
    """A row for each lane, with a bar for each span in the colour of its kind, and at the right how busy the lane was."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    lanes, notes = drawn(spans, most)
    with matplotlib.rc_context({**STYLE, "axes.grid.axis": "x", "axes.axisbelow": True}):
        figure = Figure(figsize=(12, 2 + 0.35 * len(lanes)), layout="constrained")
        panel = figure.subplots()
        for row, lane in enumerate(lanes):
            own = [span for span in spans if span.lane == lane]
            for name, (_, colour) in kinds(own).items():
                bars = [(start, end - start) for start, end in union(span for span in own if span.name == name)]
                panel.broken_barh(bars, (row - 0.4, 0.8), color=colour, linewidth=0.7)
            panel.text(1.01, row, f"{busy(spans, lane):.0%}", va="center", transform=panel.get_yaxis_transform())
        panel.set(yticks=range(len(lanes)), yticklabels=lanes, ylim=(len(lanes) - 0.5, -0.5), xlim=extent(spans),
                  xlabel="seconds", title="\n".join(notes))  # fmt: skip
        patches = [Patch(color=colour, label=name) for name, (_, colour) in kinds(spans).items()]
        figure.legend(handles=patches, loc="outside lower center", ncols=9, frameon=False)
    return figure


def drawable(path: str, flag: str) -> Path:
    """This file, if a picture may go there. Raises Refused, in the name of this flag."""
    file = Path(path)
    if file.suffix not in (".png", ".svg", ".pdf"):
        raise Refused(f"{flag} {path}: no kind of picture by its name; end it in .png, .svg or .pdf")
    if not file.parent.is_dir():
        raise Refused(f"{flag} {path}: no folder {file.parent}; make it first, or name a file elsewhere")
    return file


def save(draw: Callable[[], Figure], path: str, flag: str) -> None:
    """Write what `draw` returns into this file, .png, .svg or .pdf. Raises Refused, in the name of this flag."""
    file = drawable(path, flag)
    try:
        draw().savefig(file, dpi=110)
    except ImportError:
        raise Refused(f"{flag}: it draws with matplotlib, which is not installed; pip install matplotlib") from None
    except OSError as error:
        raise Refused(f"{flag} {path}: cannot be written ({error.strerror}); name another file") from None


def picture(spans: Sequence[Span], path: str, flag: str = "--picture") -> str:
    """Draw `gantt` into this file; returns what was written, in one line. Raises Refused."""
    save(lambda: gantt(spans), path, flag)
    return f"{path}: what {len({s.lane for s in spans})} lanes did " + "from {:.6g} to {:.6g} s".format(*extent(spans))


def steps(spans: Sequence[Span]) -> tuple[float, float]:
    """From when to when the third to the eighth step took, if there were so many: the trainer waits as a step begins."""
    begins = sorted(span.start for span in spans if (span.lane, span.name) == ("trainer", "wait"))
    return begins[2] if len(begins) > 2 else -math.inf, begins[8] if len(begins) > 8 else math.inf


def show(folder: Path, start: float, end: float) -> None:
    """Print the timeline of a run from when to when, steps 3 to 8 without either, and draw it into its folder."""
    spans = read(folder / "trace.json")
    if (start, end) == (-math.inf, math.inf):
        start, end = steps(spans)
    shown = [replace(span, start=max(span.start, start), end=min(span.end, end))
             for span in spans if span.start < end and span.end > start]  # fmt: skip
    if not shown or start >= end:
        raise Refused(f"--timeline {folder}: nothing from {start:g} to {end:g} s; choose --from, --to anew")
    print(text(shown, shutil.get_terminal_size((100, 24)).columns))
    print(f"{folder / 'trace.json'}: the whole run; open it in ui.perfetto.dev or chrome://tracing")
    print(picture(shown, str(folder / "timeline.png"), "--timeline"))
