"""python -m crowd predict RUN FILES..., python -m crowd review RUN."""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path

import crowd
from crowd.model import predict
from crowd.review import review_again
from harness import InputError, Parser


def main(argv: list[str] | None = None) -> int:
    form = argparse.RawDescriptionHelpFormatter
    parser = Parser("python -m crowd", description=crowd.__doc__, formatter_class=form)
    commands = parser.add_subparsers(dest="command", required=True, metavar="predict|review")
    p = commands.add_parser("predict", help="labels of new images, or of an .npz, as CSV")
    p.add_argument("run", type=Path, metavar="RUN", help="the folder of a finished run")
    p.add_argument(
        "files",
        type=Path,
        nargs="+",
        metavar="FILES",
        help="images; or .npz files, or folders of .npy files, with x (else x_test, else x_train)",
    )
    p.add_argument("--probabilities", action="store_true", help="a column a class too")
    p.add_argument("--out", type=Path, metavar="FILE", help="where the table goes (default: the terminal)")
    p = commands.add_parser("review", help="a page with the hundred most suspicious samples")
    p.add_argument("run", type=Path, metavar="RUN", help="the folder of a finished run")
    p.add_argument("--dataset", metavar="PATH", help="the run's data, where they have been moved")
    p.add_argument("--data", default="data", metavar="DIR", help="where torchvision's files are (default data)")
    chosen = parser.parse_args(argv)
    try:
        if chosen.command == "review":
            page = review_again(chosen.run, chosen.dataset, chosen.data)
            (chosen.run / "review.html").write_bytes(page.encode("utf-8", "surrogateescape"))
            print(f"written to {chosen.run / 'review.html'}")
            return 0
        text = predict(chosen.run, chosen.files, chosen.probabilities).encode("utf-8", "surrogateescape")
        if chosen.out:
            chosen.out.write_bytes(text)
            print(f"{len(text.splitlines()) - 1:,} labels written to {chosen.out}")
        else:
            with contextlib.suppress(BrokenPipeError):
                sys.stdout.buffer.write(text)
                sys.stdout.flush()
    except (InputError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
