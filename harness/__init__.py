"""Around the loop, no science: the command line (options), a run's files (folder), the terminal, its page (report),
and many processes (ranks). torch only; nothing here imports the rest of the project.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from pathlib import Path

NAMES = {"pico": "PiCO", "pico+": "PiCO+", "supervised": "Supervised learning", "dividemix": "DivideMix"}


class InputError(ValueError):
    """Something that the user gave is wrong; the message says what, and how to mend it."""


class Parser(argparse.ArgumentParser):
    """A command line whose mistakes cost one line and exit 2."""

    def __init__(self, *args, **more):
        super().__init__(*args, **more)
        for stream in (sys.stdout, sys.stderr):  # a name that a terminal cannot show is no reason to stop
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="backslashreplace")

    def error(self, message: str):
        from harness import ranks

        if ranks.first():
            python = "" if self.prog.startswith("python") else "python "
            print(f"error: {message} ({python}{self.prog} --help lists the options)", file=sys.stderr)
        raise SystemExit(2)


def nearest(option: str, value: str, names: list[str], listed: bool = True) -> str:
    guess = difflib.get_close_matches(value, names, 1)
    choose = f"; choose {', '.join(names)}" if listed else ""
    return f"{option} {value}: unknown{choose}" + (f" (did you mean {guess[0]}?)" if guess else "")


def is_table(path: Path) -> bool:
    """One's own data as a table beside its images."""
    return path.suffix.lower() in (".csv", ".tsv")


def flag(name: str) -> str:
    """An option as it is typed."""
    return f"--{name.replace('_', '-')}"


def title(base: str) -> str:
    """A method as the paper writes it."""
    return NAMES.get(base, base.upper())
