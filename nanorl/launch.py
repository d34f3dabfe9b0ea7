"""How does a script start? Flags first, torch when they are good; one line for a refusal, a status for every end."""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nanorl.cli import describe, parse
from nanorl.config import Lost, Refused, unread


class Stop:
    """Ctrl-C and SIGTERM ask the run to stop where it can be saved; asked twice, it stops at once."""

    def __init__(self) -> None:
        self.asked = False

    def __call__(self) -> bool:
        return self.asked

    def handle(self, number: int, frame: object) -> None:
        """The signal handler."""
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        print(f"\n{signal.Signals(number).name}: stopping after this step; once more stops at once", file=sys.stderr)


def launch(script: str, default_name: str, train: Callable[[Any], None], argv: list[str]) -> int:
    """Parse, check, put the run together, `train(run)`. Returns the exit status: 0 done, 2 refused, 130 stopped, 1 lost.

    torch is imported when the flags are known to be good.
    """
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # a terminal without Unicode shows ? instead of ending the run
    early: list[int] = []  # an interrupted import leaves half a library, so a signal waits for the imports
    try:
        name, cfg, axes = parse(argv, default_name)
        print(describe(Path(script).name, name, cfg, axes), flush=True)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, frame: early.append(number))
        # Threads that wait for each other should soon sleep: on a machine that does something else as well, spinning
        # made a step of the tiny model 25 times slower (0.1 s became 4 s); this count costs nothing on a quiet one.
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
        if cfg.engine == "vllm":  # copies of the weights in huge pages: a publish takes two thirds of the time
            os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
        from nanorl import run

        for number in (signal.SIGINT, signal.SIGTERM):  # until the run has handlers of its own
            signal.signal(number, signal.default_int_handler)
        if early:
            raise KeyboardInterrupt
        with run.started(script, name, cfg, axes) as parts:
            if parts is not None:
                train(parts)
    except Refused as error:
        print(f"{Path(script).name}: {error}", file=sys.stderr)
        return 2
    except Lost as error:
        print(f"{Path(script).name}: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        return unread()
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        print(f"{Path(script).name}: the disk is full ({error}); make room, and go on from the last checkpoint with "
              "--resume", file=sys.stderr)  # fmt: skip
        return 1
    except KeyboardInterrupt as stopped:
        saved = str(stopped) or "nothing is saved beside earlier checkpoints"
        print(f"{Path(script).name}: stopped; {saved}", file=sys.stderr)
        return 130
    return 0
