"""How does one look at runs? The command line."""

import sys


def main(words: list[str]) -> int:
    """The timeline, until there is more."""
    from nanorl.timeline import main as timeline

    return timeline(words)
