"""What every benchmark says beside its numbers: machine, versions, date; medians and spreads; a line in results.jsonl.

    python notes/benchmarks/bench.py        puts the latest table of each benchmark into notes/benchmarks/README.md

A result is a table, a list of rows; a row is a dict from a column's title, unit included, to a text, a number, or the
list of the numbers that were measured, shown as "median (least to greatest)".
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).parent
RESULTS, README = HERE / "results.jsonl", HERE / "README.md"
Row = Mapping[str, Any]


def arguments(doc: str) -> argparse.ArgumentParser:
    """A parser that shows the benchmark's own text and knows --no-record."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-record", dest="record", action="store_false", help="leave results.jsonl as it is")
    return parser


def machine() -> str:
    """Processor, cores, memory and GPU in words."""
    cpus = Path("/proc/cpuinfo").read_text() if sys.platform == "linux" else ""
    names = re.findall(r"^model name\s*: (.*)$", cpus, re.M) or [platform.processor() or platform.machine()]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    import torch  # takes seconds, and some benchmarks set its environment first

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    cores = f"{os.cpu_count()} cores, {torch.get_num_threads()} threads"
    return f"{names[0]}, {cores}, {memory:.0f} GiB, {gpu}"


def versions() -> dict[str, str]:
    """Versions of python and of packages, and nanorl's commit, with a + where files differ from it."""
    git = ["git", "-C", str(HERE), "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        commit = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):  # no git, or not a clone
        commit = "no commit"
    packages = {name: version(name) for name in ("torch", "transformers")}
    return {"python": platform.python_version(), **packages, "nanorl": commit}


def number(x: float) -> str:
    """A number as a table shows it: three digits, whole ones whole.

    >>> number(1234567), number(1234.5), number(0.98765), number(3e-7)
    ('1,234,567', '1,234', '0.988', '3e-07')
    """
    return f"{x:,.0f}" if isinstance(x, int) or abs(x) >= 100 else f"{x:.3g}"


def shown(value: Any) -> str:
    """A cell: a text as it is, a number, or the median and the range of several.

    >>> shown([3.0, 1.0, 2.0]), shown([2.0]), shown("ours"), shown(None)
    ('2 (1 to 3)', '2', 'ours', '–')
    """
    if isinstance(value, (list, tuple)):
        spread = f" ({number(min(value))} to {number(max(value))})" if len(value) > 1 else ""
        return number(median(value)) + spread
    return "–" if value is None else number(value) if isinstance(value, (int, float)) else str(value)


def table(rows: Sequence[Row]) -> str:
    """The rows as Markdown, columns in the order in which they first appear."""
    titles = list(dict.fromkeys(title for row in rows for title in row))
    lines = [titles, ["---"] * len(titles), *([shown(row.get(title)) for title in titles] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def about(entry: Mapping[str, Any]) -> str:
    """One line: the command, its day, machine and versions."""
    software = ", ".join(f"{name} {what}" for name, what in entry["versions"].items())
    return f"`{entry['command']}` ({entry['date']}; {entry['machine']}; {software})"


def report(name: str, rows: Sequence[Row], record: bool = True) -> None:
    """Print a table under what it was measured on, and unless told otherwise append both to results.jsonl."""
    words = [Path(sys.argv[0]).name, *(word for word in sys.argv[1:] if word != "--no-record")]
    entry = {"benchmark": name, "command": f"python notes/benchmarks/{' '.join(words)}", "date": str(date.today()),
             "machine": machine(), "versions": versions(), "rows": list(rows)}  # fmt: skip
    print(f"\n{name}: {about(entry)}\n\n{table(rows)}", flush=True)
    if record:
        with RESULTS.open("a") as file:
            file.write(json.dumps(entry, ensure_ascii=False) + "\n")


def filled(page: str, entries: Sequence[Mapping[str, Any]]) -> str:
    """The page with the latest table of NAME after each line `<!-- table NAME -->`, up to `<!-- end -->`."""
    latest = {entry["benchmark"]: entry for entry in entries}

    def fill(found: re.Match) -> str:
        """One passage, anew; that of a benchmark without results says so."""
        entry = latest.get(found[1])
        text = f"{about(entry)}\n\n{table(entry['rows'])}" if entry else "Not in results.jsonl yet."
        return f"<!-- table {found[1]} -->\n{text}\n<!-- end -->"

    return re.sub(r"<!-- table (.+?) -->\n.*?<!-- end -->", fill, page, flags=re.DOTALL)


if __name__ == "__main__":
    README.write_text(filled(README.read_text(), [json.loads(line) for line in RESULTS.read_text().splitlines()]))
