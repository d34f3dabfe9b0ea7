"""What happened when: nothing is lost on the way into the file, the text and the picture."""

import builtins
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nanorl.config import Refused
from nanorl.look import main
from nanorl.timeline import LOOK, Lane, Span, Trace, busy, drawn, gantt, picture, read, text, union

ROOT = Path(__file__).parent.parent
GRID, END = 16, 20  # times are whole numbers of 1/16 s up to 20 s, so that their sums are exact
moment = st.integers(0, END * GRID).map(lambda k: k / GRID)
LANES = ("trainer", "engine 0", "engine 1", "engine 10", "rewards")


def spans_of(lanes=LANES, names=(*LOOK, "nap", "doze"), times=moment):
    """Some spans in any order, overlapping or not, some of no length."""
    counts = st.dictionaries(st.sampled_from(["rows", "prefilled"]), st.integers(0, 9))
    one = st.builds(lambda lane, name, ends, counts: Span(lane, name, *sorted(ends), counts), st.sampled_from(lanes),
                    st.sampled_from(names), st.tuples(times, times), counts)  # fmt: skip
    return st.lists(one, min_size=1, max_size=12)


def length(spans) -> float:
    return sum(end - start for start, end in union(spans))


def slow_length(spans) -> float:
    """The time in which at least one of the spans lasts, moment by moment."""
    return sum(any(s.start <= k / GRID < s.end for s in spans) for k in range(END * GRID)) / GRID


def cluster(engines: int, steps: int = 10) -> list[Span]:
    """In each of the steps, two seconds long, the trainer waits and trains, and the engines generate and pause."""
    spans = []
    for t in range(0, 2 * steps, 2):
        spans += [Span("trainer", "wait", t, t + 1), Span("trainer", "update", t + 1, t + 2)]
        spans += [Span(f"engine {e}", "generate", t, t + 1.5) for e in range(engines)]
    return spans


# Lane


@given(st.lists(st.tuples(moment, st.integers(0, 2 * GRID), st.integers(1, 9)), min_size=1, max_size=20),
       st.sampled_from([0.0, 1 / GRID, 0.5]), st.sampled_from([0.0, 0.25, 99.0]), st.integers(0, 20))  # fmt: skip
def test_a_lane_keeps_the_counts_and_the_time_worked_but_for_its_gaps(pieces, gap, longest, lap_after):
    """Pieces may begin in any order; they come in that of their ends."""
    pieces = sorted(((start, start + k / GRID, rows) for start, k, rows in pieces), key=lambda piece: piece[1])
    lane, spans = Lane("rewards", "reward", gap, longest), []
    for i, (start, end, rows) in enumerate(pieces):
        lane.add(start, end, rows=rows, pieces=1)
        spans += lane.lap() if i == lap_after else []
    spans += lane.lap()
    own = [Span("rewards", "reward", start, end) for start, end, _ in pieces]
    assert sum(span.args["rows"] for span in spans) == sum(rows for _, _, rows in pieces)
    assert sum(span.args["pieces"] for span in spans) == len(pieces) and lane.lap() == []
    assert 0 <= length(spans) - length(own) <= gap * (len(pieces) - len(spans))
    assert all(any(span.start <= piece.start and piece.end <= span.end for span in spans) for piece in own)
    assert all(span.seconds <= longest + gap + max(piece.seconds for piece in own) for span in spans)
    assert {(span.lane, span.name) for span in spans} == {("rewards", "reward")}


def test_pieces_join_up_to_the_gap_and_while_the_span_is_short():
    lane = Lane("engine 0", "generate", gap=0.5, longest=4.0)
    for start, end in ((0, 1), (1.5, 2), (2.75, 3), (3, 6.75), (6.75, 7), (7, 8)):
        lane.add(start, end, rows=1)
    lane.add(20, 21, rows=1, prefilled=5)
    lane.add(21, 22, rows=1)
    spans = [(span.start, span.end, dict(span.args)) for span in lane.lap()]
    assert spans == [(0, 2, {"rows": 2}), (2.75, 6.75, {"rows": 2}), (6.75, 8, {"rows": 2}),
                     (20, 22, {"rows": 2, "prefilled": 5})]  # fmt: skip


# The file


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """One that the examples of hypothesis share."""
    return tmp_path_factory.mktemp("run")


def written(path, laps, origin=0.0) -> Path:
    trace = Trace(path, origin)
    for spans in laps:
        trace.write(spans)
    trace.close()
    return path


def in_order(spans):
    return sorted(spans, key=lambda s: (s.start, s.end, s.lane, s.name, sorted(s.args.items())))


@given(st.lists(spans_of(times=st.floats(1234.5, 9999.0)), max_size=4))
def test_what_is_written_is_read_to_the_microsecond(folder, laps):
    path = written(folder / "trace.json", laps, origin=1234.5)
    wanted = [replace(span, start=round(span.start - 1234.5, 6), end=round(span.end - 1234.5, 6))
              for spans in laps for span in spans]  # fmt: skip
    for got, own in zip(in_order(read(path)), in_order(wanted), strict=True):
        assert (got.lane, got.name, got.args) == (own.lane, own.name, own.args)
        assert (got.start, got.end) == pytest.approx((own.start, own.end), abs=1.1e-6, rel=0)


@given(st.lists(spans_of(), min_size=1, max_size=4))
@settings(max_examples=25)
def test_the_file_is_chrome_s_and_no_track_has_two_spans_at_once(folder, laps):
    """A viewer leaves out what overlaps on a track: one process and thread."""
    path = written(folder / "trace.json", laps, origin=-2.0)
    assert path.read_text().endswith("}\n]\n")
    events = json.loads(path.read_text())
    named = [(event["pid"], event["args"]["name"]) for event in events if event["ph"] == "M"]
    appeared = dict.fromkeys(span.lane for spans in laps for span in sorted(spans, key=lambda span: span.start))
    assert named == list(enumerate(appeared, 1)) and {e["name"] for e in events if e["ph"] == "M"} == {"process_name"}
    tracks: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for event in events:
        if event["ph"] != "M":
            assert event["ph"] == "X" and event["ts"] >= 2_000_000 and event["dur"] >= 0
            assert type(event["ts"]) is type(event["dur"]) is int and event["pid"] in dict(named)
            tracks.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    assert len({tid for _, tid in tracks}) == len(tracks) and all(tid > 0 for _, tid in tracks)  # some ignore the process
    for spans in tracks.values():
        assert all(end <= start for (_, end), (start, _) in zip(spans, spans[1:]))


def test_spans_that_do_not_overlap_share_a_track(folder):
    lap = [Span("trainer", "update", 1, 2), Span("trainer", "wait", 0, 1)]
    events = json.loads(written(folder / "trace.json", [lap, [Span("trainer", "wait", 2, 3)]]).read_text())
    assert len({event["tid"] for event in events if event["ph"] == "X"}) == 1


@given(spans_of(), st.data())
@settings(max_examples=30)
def test_a_killed_run_leaves_all_but_what_it_was_writing(folder, spans, data):
    """What was written is there before the end; cut anywhere, its whole lines can be read, also by a viewer."""
    path = folder / "trace.json"
    trace = Trace(path, origin=0)
    trace.write(spans)
    whole = path.read_bytes()
    assert whole.endswith(b"}\n")
    everything = read(path)
    trace.close()
    assert in_order(everything) == in_order(spans)
    at = data.draw(st.integers(len(b"[\n"), len(whole)))
    torn = folder / "torn.json"
    torn.write_bytes(whole[:at])
    lines = whole[:at].rsplit(b"\n", 1)[0]
    count = lines.count(b'"ph": "X"')
    assert read(torn) == everything[:count]
    assert sum(event["ph"] == "X" for event in json.loads(lines + b"]")) == count


def test_a_run_without_work_has_an_empty_trace(folder):
    assert read(written(folder / "trace.json", [])) == []


def test_times_count_from_the_start_of_the_program(folder):
    from nanorl.config import STARTED

    trace = Trace(folder / "trace.json")
    trace.write([Span("trainer", "wait", STARTED + 3, STARTED + 4)])
    trace.close()
    assert [(span.start, span.end) for span in read(folder / "trace.json")] == [(3, 4)]


BROKEN = {"a picture": b"\x89PNG\r\n\x1a\n\x00\xff\n", "nothing": b"", "an object": b'{"traceEvents": []}\n',
          "no event": b"[\n1\n]\n",
          "half a line amid": b'[\n{"ph": \n,{"ph": "M", "pid": 1, "args": {"name": "trainer"}}\n]\n',
          "a nameless lane": b'[\n{"ph": "X", "pid": 1, "name": "wait", "ts": 0, "dur": 1, "args": {}}\n]\n'}  # fmt: skip


@pytest.mark.parametrize("name", [*BROKEN, "no file", "a folder"])
def test_what_is_no_trace_is_refused_in_one_line(name, tmp_path):
    path = tmp_path / "trace.json"
    if name in BROKEN:
        path.write_bytes(BROKEN[name])
    elif name == "a folder":
        path.mkdir()
    why = "not the trace of a run" if name in BROKEN else "cannot be read"
    with pytest.raises(Refused, match=why) as refused:
        read(path)
    assert str(refused.value).startswith(f"{path}: ") and "\n" not in str(refused.value)


# How busy


@given(spans_of())
@example([Span("trainer", "update", 3, 3)])
def test_a_lane_is_as_busy_as_moment_by_moment(spans):
    first, last = min(span.start for span in spans), max(span.end for span in spans)
    for lane in LANES:
        worked = slow_length([span for span in spans if span.lane == lane and span.name != "wait"])
        assert busy(spans, lane) == pytest.approx(worked / (last - first) if last > first else 0, abs=1e-12)


@given(spans_of(lanes=("trainer",), times=st.floats(0, 1)))
def test_no_lane_is_more_than_busy(spans):
    assert 0 <= busy(spans, "trainer") <= 1


@given(spans_of())
def test_a_union_is_disjoint_and_in_order(spans):
    merged = union(spans)
    assert all(end < start for (_, end), (start, _) in zip(merged, merged[1:]))
    assert length(spans) == slow_length(spans)


# Text


def slow_seconds(spans, start: float, end: float) -> dict[str, float]:
    """The seconds between start and end of each letter, cut at every beginning and end; nothing is a blank."""
    cuts = sorted({start, end, *(t for span in spans for t in (span.start, span.end) if start < t < end)})
    took: dict[str, float] = {}
    for a, b in zip(cuts, cuts[1:]):
        lasting = {span.name for span in spans if span.start <= (a + b) / 2 < span.end}
        for letter in {LOOK[name][0] if name in LOOK else "#" for name in lasting} or {" "}:
            took[letter] = took.get(letter, 0) + b - a
    return took


@given(spans_of(), st.integers(40, 130))
@example([Span("trainer", "nap", 0, 2), Span("trainer", "doze", 2, 4), Span("trainer", "wait", 4, 4)], 100)
def test_a_letter_is_what_took_most_of_its_slice(spans, columns):
    first, last = min(span.start for span in spans), max(span.end for span in spans)
    head, *lines = text(spans, columns).split("\n")
    lanes = {span.lane for span in spans}
    margin = max(map(len, lanes | {"seconds"})) + 2
    wide = (last - first) / (columns - margin - 5)
    assert len(head) == columns and head.endswith("busy")
    for lane, line in zip([lane for lane in LANES if lane in lanes], lines):
        own = [span for span in spans if span.lane == lane]
        assert len(line) == columns and line[:margin].strip() == lane and line[-5:] == f"{busy(spans, lane):5.0%}"
        for i, letter in enumerate(line[margin:-5] if last > first else ""):
            took = slow_seconds(own, first + i * wide, first + (i + 1) * wide)
            assert took.get(letter, 0) >= max(took.values()) - 1e-9
    legend, scale = lines[len(lanes) :]
    assert set(re.findall(r"(\S) (\w+)", legend)) == {(LOOK.get(s.name, "#")[0], s.name) for s in spans}
    assert "a letter stands for" in scale


@given(st.floats(0, 1e5), st.sampled_from([1e-3, 0.3, 7.0, 1000.0, 200_000.0]), st.integers(60, 130))
def test_the_ruler_tells_the_time_of_the_letter_under_its_mark(first, seconds, columns):
    spans = [Span("trainer", "update", first, first + seconds)]
    head, row = text(spans, columns).split("\n")[:2]
    left, right = len("seconds  "), columns - 5
    wide = (first + seconds - first) / (right - left)
    marks = list(re.finditer(r"\|(\S+)", head))
    assert marks[0].start() == left and len(marks) >= 2 and marks[-1].end() <= right
    assert all(float(mark[1]) == pytest.approx(first + (mark.start() - left) * wide, abs=0.501 * wide) for mark in marks)
    assert row[left:right] == "u" * (right - left)


def test_of_many_lanes_some_are_drawn_evenly_in_order_and_a_line_says_so():
    spans = cluster(100)
    lanes, notes = drawn(spans[::-1] + [Span("rewards", "reward", 0, 1)], 5)
    assert lanes == ["trainer", "engine 0", "engine 24", "engine 49", "engine 74", "engine 99", "rewards"]
    assert notes == ["drawn: 5 of the 100 lanes engine 0 to engine 99"]
    lines = text(spans).split("\n")
    assert [line.split("  ")[0] for line in lines[1:10]] == drawn(spans, 8)[0] and lines[-1] == drawn(spans, 8)[1][0]
    assert drawn(cluster(5), 5)[1] == [] and "drawn" not in text(cluster(8))


def test_a_regular_run_as_text():
    spans = cluster(2, steps=2)
    assert text(spans, columns=15 + 16).split("\n") == [
        "seconds   |0.0             busy",
        "trainer   ....uuuu....uuuu  50%",
        "engine 0  gggggg  gggggg    75%",
        "engine 1  gggggg  gggggg    75%",
        ". wait   g generate   u update",
        "a letter stands for what took most of 0.25 s",
    ]


# The picture


def bars(panel) -> dict[tuple[int, tuple[float, ...]], float]:
    """Row and colour → the seconds that are drawn so."""
    drawn: dict[tuple[int, tuple[float, ...]], float] = {}
    for collection in panel.collections:
        for path in collection.get_paths():
            (left, low), (right, high) = path.vertices.min(0), path.vertices.max(0)
            key = round((low + high) / 2), tuple(collection.get_facecolor()[0])
            drawn[key] = drawn.get(key, 0) + right - left
    return drawn


@given(spans_of())
@settings(max_examples=5)
@example(cluster(2))
@example(cluster(129))
def test_the_picture_has_a_row_for_each_lane_and_a_bar_for_all_that_it_did(spans):
    from matplotlib.colors import to_rgba

    figure = gantt(spans)
    (panel,), (lanes, notes) = figure.axes, drawn(spans, 16)
    assert [label.get_text() for label in panel.get_yticklabels()] == lanes
    assert [(t.get_position()[1], t.get_text()) for t in panel.texts] == [
        (row, f"{busy(spans, lane):.0%}") for row, lane in enumerate(lanes)]  # fmt: skip
    wanted: dict[tuple[int, tuple[float, ...]], float] = {}
    for row, lane in enumerate(lanes):
        for name in {span.name for span in spans if span.lane == lane}:
            key = row, to_rgba(LOOK[name][1] if name in LOOK else "0.5")
            its = length([span for span in spans if (span.lane, span.name) == (lane, name)])
            wanted[key] = wanted.get(key, 0) + its
    assert bars(panel) == pytest.approx(wanted, abs=1e-9)
    legend = {text.get_text(): patch.get_facecolor() for text, patch in
              zip(figure.legends[0].get_texts(), figure.legends[0].get_patches())}  # fmt: skip
    assert legend == {span.name: to_rgba(LOOK[span.name][1] if span.name in LOOK else "0.5") for span in spans}
    assert panel.get_title() == "\n".join(notes) and panel.get_xlabel() == "seconds"


@pytest.mark.parametrize("engines", [1, 129])
def test_a_picture_is_written_and_one_line_says_so(engines, tmp_path):
    said = picture(cluster(engines), str(tmp_path / "t.png"))
    assert said == f"{tmp_path / 't.png'}: what {engines + 1} lanes did from 0 to 20 s"
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert (tmp_path / "t.png").stat().st_size > 10_000


@pytest.mark.parametrize("name, why", [("no/t.png", "no folder"), ("t.gif", "end it in .png"),
                                       ("d.png", "cannot be written")])  # fmt: skip
def test_a_picture_that_cannot_be_written_is_refused_by_the_flag_that_asked(name, why, tmp_path):
    (tmp_path / "d.png").mkdir()
    with pytest.raises(Refused, match=why) as refused:
        picture(cluster(1), str(tmp_path / name), "--draw")
    assert str(refused.value).startswith(f"--draw {tmp_path / name}: ") and "\n" not in str(refused.value)
    assert [path.name for path in tmp_path.iterdir()] == ["d.png"]


# The command


@pytest.fixture
def run(tmp_path, monkeypatch):
    """The folder of a run of ten steps."""
    monkeypatch.setenv("COLUMNS", "71")
    written(tmp_path / "trace.json", [cluster(1)])
    return tmp_path


def told(capsys, *words) -> tuple[int, str, str]:
    status = main(list(map(str, words)))
    return status, *capsys.readouterr()


def test_the_command_shows_steps_3_to_8_draws_them_and_names_the_viewers(run, capsys):
    status, out, _ = told(capsys, "--timeline", run)
    shown = [replace(s, end=min(s.end, 16)) for s in cluster(1) if 4 <= s.start < 16]
    assert status == 0 and out.startswith(text(shown, 71) + "\n")
    assert out.split("\n")[-3:] == [
        f"{run / 'trace.json'}: the whole run; open it in ui.perfetto.dev or chrome://tracing",
        f"{run / 'timeline.png'}: what 2 lanes did from 4 to 16 s", ""]  # fmt: skip
    assert (run / "timeline.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("flags, first, last", [(("--from", 3.5, "--to", 7.25), 3.5, 7.25), (("--from", "0"), 0, 20),
                                                (("--to", "2.5"), 0, 2.5)])  # fmt: skip
def test_the_command_shows_the_time_that_is_asked_for(flags, first, last, run, capsys, monkeypatch):
    monkeypatch.setattr("nanorl.timeline.gantt", lambda spans: Blank())
    status, out, _ = told(capsys, "--timeline", run, *flags)
    shown = [replace(s, start=max(s.start, first), end=min(s.end, last))
             for s in cluster(1) if s.start < last and s.end > first]  # fmt: skip
    assert status == 0 and out.startswith(text(shown, 71) + "\n") and f"from {first} to {last} s" in out


@pytest.mark.parametrize("steps, first, last", [(1, 0, 2), (2, 0, 4), (3, 4, 6), (8, 4, 16), (9, 4, 16)])
def test_of_a_short_run_the_command_shows_what_there_is(steps, first, last, run, capsys, monkeypatch):
    monkeypatch.setattr("nanorl.timeline.gantt", lambda spans: Blank())
    written(run / "trace.json", [cluster(1, steps)])
    assert f"from {first} to {last} s" in told(capsys, "--timeline", run)[1]


class Blank:
    """A picture that is written at once."""

    def savefig(self, path, dpi):
        pass


@pytest.mark.parametrize("words, why", [
    (["--timeline"], "--timeline"), (["--timeline", "RUN", "RUN"], "--timeline: one run at a time"),
    (["RUN", "--to", "3"], "go with --timeline"),
    (["--timeline", "RUN", "--from", "x"], "--from"), (["--timeline", "RUN", "--speed"], "--speed"),
    (["--timeline", "RUN/no"], "RUN/no/trace.json: cannot be read"),
    (["--timeline", "RUN", "--from", "20"], "nothing from 20"),
    (["--timeline", "RUN", "--from", "5", "--to", "5"], "nothing"),
    (["--timeline", "RUN", "--from", "nan"], "nothing"),
])  # fmt: skip
def test_what_the_command_cannot_show_it_refuses_in_one_line(words, why, run, capsys):
    status, out, error = told(capsys, *(word.replace("RUN", str(run)) for word in words))
    assert (status, out) == (2, "") and error.count("\n") == 1 and why.replace("RUN", str(run)) in error
    assert not (run / "timeline.png").exists()


def test_a_run_that_has_not_begun_is_refused(run, capsys):
    written(run / "trace.json", [])
    status, out, error = told(capsys, "--timeline", run)
    assert (status, out) == (2, "") and error.count("\n") == 1 and "nothing" in error


def test_without_matplotlib_the_text_is_shown_and_it_says_what_to_install(run, capsys, monkeypatch):
    there = builtins.__import__

    def absent(name, *rest):
        if name.split(".")[0] == "matplotlib":
            raise ImportError(name)
        return there(name, *rest)

    monkeypatch.setattr(builtins, "__import__", absent)
    status, out, error = told(capsys, "--timeline", run)
    assert status == 2 and "trainer" in out and "perfetto" in out
    assert error == "--timeline: it draws with matplotlib, which is not installed; pip install matplotlib\n"


def test_the_command_is_the_monitor_s_and_needs_no_torch(run):
    code = "import sys, runpy; sys.modules['torch'] = None; runpy.run_module('nanorl.monitor', run_name='__main__')"
    ended = subprocess.run([sys.executable, "-c", code, "--timeline", str(run)], cwd=ROOT, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "") and "trainer" in ended.stdout and (run / "timeline.png").exists()


def test_a_lap_in_the_middle_of_an_addition_loses_nothing(monkeypatch):
    """One thread adds while another laps."""
    lane, lapped = Lane("rewards", "reward"), []
    monkeypatch.setattr("nanorl.timeline.replace", lambda span, **new: (lapped.append(lane.lap()), replace(span, **new))[1])
    lane.add(0.0, 0.1, rewards=1)
    lane.add(0.1, 0.2, rewards=1)
    assert lapped == [[Span("rewards", "reward", 0.0, 0.2, {"rewards": 2})]] and lane.lap() == []
