"""Around the loop, no science: the command line (options), a run's files (folder), the terminal, its page (report),
and many processes (ranks). torch only; nothing here imports the rest of the project.
"""

from __future__ import annotations

import argparse
import sys


class InputError(ValueError):
    """Something that the user gave is wrong; the message says what, and how to mend it."""


class Parser(argparse.ArgumentParser):
    """A command line whose mistakes cost one line and exit 2."""

    def error(self, message: str):
        from harness import ranks

        if ranks.first():
            print(f"error: {message} (python {self.prog} --help lists the options)", file=sys.stderr)
        raise SystemExit(2)
