"""How does one look at runs? The command line of their curves, of one sample, of the timeline.

    python -m nanorl.monitor RUN [RUN…]                 curves as a picture, which settings differ, what was reached
    python -m nanorl.monitor --sample RUN STEP [ROW]    the samples of a step, or one of them token by token
    python -m nanorl.monitor --timeline RUN             what every process did, and when
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import NoReturn

from nanorl import curves, timeline, token_table
from nanorl.config import Refused, unread


class Parser(argparse.ArgumentParser):
    """A parser that refuses in one line."""

    def error(self, message: str) -> NoReturn:
        """Raise Refused."""
        raise Refused(f"{message}; {self.prog} --help says what there is")


def parser() -> Parser:
    """The flags."""
    flags = Parser("python -m nanorl.monitor", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("runs", metavar="RUN", type=Path, nargs="*", help="folders of runs")
    flags.add_argument("--out", metavar="FILE", help="where the curves go, .png, .svg or .pdf; else curves.png in the "
                       "folder of the run, or of several runs here")  # fmt: skip
    flags.add_argument("--keys", metavar="KEY", nargs="+", help="what to draw, by the names of notes/metrics.md")
    flags.add_argument("--smooth", metavar="N", type=int, default=1, help="draw means over the last N steps")
    flags.add_argument("--against", choices=[*curves.AGAINST], default="step", help="what is drawn to the right")
    flags.add_argument("--sample", metavar=("RUN", "STEP ROW"), nargs="+", help="instead: samples, as tables")
    flags.add_argument("--timeline", metavar="RUN", type=Path, help="instead: what every process did, steps 3 to 8 …")
    flags.add_argument("--from", dest="start", metavar="SECONDS", type=float, default=-math.inf, help="… or from then on")
    flags.add_argument("--to", dest="end", metavar="SECONDS", type=float, default=math.inf, help="… or until then")
    return flags


def main(words: list[str]) -> int:
    """Do what the command line asks for. Returns the exit status: 0 done, 2 refused."""
    try:
        asked = parser().parse_args(words)
        if asked.smooth < 1:
            raise Refused(f"--smooth {asked.smooth}: must be at least 1")
        if (asked.sample or asked.timeline) and asked.runs:
            raise Refused(f"--{'sample' if asked.sample else 'timeline'}: one run at a time; leave {asked.runs[0]} away")
        if (asked.start, asked.end) != (-math.inf, math.inf) and not asked.timeline:
            raise Refused("--from, --to: they go with --timeline RUN")
        if asked.sample and not 2 <= len(asked.sample) <= 3:
            raise Refused(f"--sample {' '.join(asked.sample)}: name a run, a step and, for one sample, a row")
        if asked.timeline:
            timeline.show(asked.timeline, asked.start, asked.end)
        elif asked.sample:
            print(token_table.shown(*asked.sample))
        elif asked.runs:
            curves.show(asked.runs, asked.out, asked.keys, asked.smooth, asked.against)
        else:
            raise Refused("name the folder of a run; python -m nanorl.monitor --help says what there is")
    except Refused as error:
        print(error, file=sys.stderr)
        return 2
    except BrokenPipeError:
        return unread()
    return 0
