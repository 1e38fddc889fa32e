"""The paper's tables and figures, each from one command.

    python -m paper list                        what there is, what each needs, how long it takes
    python -m paper table2                      at the size of a laptop: embedded digits, three seeds
    python -m paper table2 --scale paper        the paper's own experiment, for those who have the cards
    python -m paper fig5 --jobs 2 --seeds 0     two runs at a time
    python -m paper noise-battery               where the noise report of one's own data holds, and its guard
    python -m paper crowds --jobs 2             what made-up annotators' votes become: labels, accuracy, annotators
    python -m paper arena --jobs 2              who wins: methods x data x seeds, with their CPU-seconds
    python -m paper branches                    what --tau auto, any fixed tau or --irnet plus make of one run
    python -m paper open-set                    which samples belong to no class, with known strangers
    python -m paper compare RUN RUN...          any finished runs of train.py, side by side on one page

A table or figure is a grid of train.py runs under --out, which they share. Finished runs are not repeated, broken
ones are resumed, so that it may be stopped and started again at any time; --jobs 0 runs nothing and shows the table
of what is finished. A table is written as Markdown with the paper's cell beside ours, a figure as PNG.
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import json
import os
import sys
from pathlib import Path

from harness import InputError, Parser, report
from paper import arena, battery, branches, crowds, openset, when
from paper.figures import FIGURES, rows_of
from paper.grid import SCALES, Grid
from paper.tables import TABLES


def main(argv: list[str] | None = None) -> int:
    try:
        return command(sys.argv[1:] if argv is None else argv)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nstopped; what is finished is kept: the same command goes on", file=sys.stderr)
        return 130


def command(argv: list[str]) -> int:
    own = dict(compare=compare, arena=arena.main, branches=branches.main, crowds=crowds.main)
    own |= {"open-set": openset.main, "noise-battery": battery.main}  # all of them with options of their own
    if argv and argv[0] in own:
        return own[argv[0]](argv[1:])
    wanted = ["list", *own, "e0", *TABLES, *FIGURES]
    parser = Parser("python -m paper", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=wanted, metavar="WHAT", help=", ".join(wanted))
    parser.add_argument("--scale", default="digits", choices=list(SCALES), help="size of the runs (default digits)")
    parser.add_argument(
        "--preset", default="ours", choices=["ours", "released"], help="as train.py's (default ours)"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="(default 0 1 2)")
    jobs = "runs at the same time (default 1); 0: none, the table of what is finished"
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help=jobs)
    parser.add_argument("--out", type=Path, default=Path("reproduced"), help="folder (default reproduced)")
    parser.add_argument("--data", default="", metavar="DIR", help="as train.py's --data")
    parser.add_argument("--options", nargs=argparse.REMAINDER, default=[], help="the rest goes to every train.py")
    chosen = parser.parse_args(argv)
    if chosen.what in own:
        parser.error(f"{chosen.what} comes first, then its options: python -m paper {chosen.what} --help")
    if chosen.jobs < 0 or not chosen.seeds:
        parser.error("--jobs: 0 or more; --seeds: at least one")
    if chosen.jobs == 0 and chosen.what not in TABLES:
        parser.error(f"--jobs 0: the table of what is finished; {chosen.what} is no table")
    if chosen.what == "e0":
        if chosen.options or chosen.seeds != [0, 1, 2] or chosen.preset != "ours" or chosen.jobs != 1:
            parser.error("e0 has settings of its own: only --scale, --data and --out go with it")
        return when.main(chosen.out, chosen.data, chosen.scale)
    if chosen.what == "list":
        show_list(chosen.scale, chosen.seeds, chosen.out)
        return 0
    if chosen.what in FIGURES and (missing := missing_packages(chosen.what)):
        print(f"error: {chosen.what} needs {', '.join(missing)}: pip install {' '.join(missing)}", file=sys.stderr)
        return 2
    grid = Grid(chosen.scale, chosen.seeds, chosen.out, chosen.data, chosen.options, chosen.preset)
    make = (TABLES | FIGURES)[chosen.what](grid)
    if not grid.jobs and chosen.what != "table6":  # which is counted, not run
        raise InputError(f"{chosen.what}: the paper has none of it at --scale {chosen.scale}")
    grid.check()
    failed = grid.run(chosen.jobs) if chosen.jobs else []
    if failed:
        print(f"error: {len(failed)} runs failed; the same command tries them again", file=sys.stderr)
        return 1
    grid.folder.mkdir(parents=True, exist_ok=True)
    if chosen.what in FIGURES:
        path = grid.folder / f"{chosen.what}.png"
        draw(make, path)
    else:
        name = f"Table {chosen.what[5:]}" if chosen.what.startswith("table") else chosen.what.capitalize()
        text = f"## {name}: {TABLES[chosen.what].__doc__}\n\n" + "\n".join(make()) + "\n"
        path = grid.folder / f"{chosen.what}.md"
        path.write_text(text)
        print(f"\n{text}")
    print(f"written to {path}")
    return 0


def compare(argv: list[str]) -> int:
    """One page about several runs."""
    parser = Parser("python -m paper compare", description="Several finished runs side by side on one page.")
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="the folder of a finished run")
    parser.add_argument("--out", type=Path, default=Path("compare.html"), help="page (default compare.html)")
    chosen = parser.parse_args(argv)
    try:
        runs = [finished_run(folder) for folder in chosen.runs]
        names = [folder.resolve().name for folder in chosen.runs]
        if len(set(names)) < len(names):
            names = [str(folder) for folder in chosen.runs]
        page = report.compare([dict(name=name) | run for name, run in zip(names, runs, strict=True)])
        chosen.out.write_bytes(page.encode("utf-8", "surrogateescape"))
    except (InputError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"written to {chosen.out}")
    return 0


def finished_run(folder: Path) -> dict:
    """Its rows and summary, and what its accuracy is measured on."""
    try:
        rows, summary = rows_of(folder), json.loads((folder / "summary.json").read_text())
        if not isinstance(summary, dict) or not rows or not all("epoch" in row for row in rows):
            raise ValueError
    except (OSError, ValueError, TypeError):
        raise InputError(
            f"{folder} is not the folder of a finished run: it needs metrics.jsonl, summary.json"
        ) from None
    run = dict(rows=rows, summary=summary)
    if "score" in summary:
        return run | dict(score=summary["score"])
    try:
        with (folder / "labels.csv").open(encoding="utf-8", errors="replace", newline="") as table:
            aside = any(row.get("split") == "score" for row in csv.DictReader(table))
    except (OSError, csv.Error):
        aside = False
    return run | (dict(score="set-aside score") if aside else {})


def missing_packages(what: str) -> list[str]:
    needed = {"matplotlib": "matplotlib"} | ({"sklearn": "scikit-learn"} if what in ("fig7", "fig8") else {})
    return [package for module, package in needed.items() if importlib.util.find_spec(module) is None]


def draw(make, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=make.size, layout="constrained")
    make(figure)
    figure.savefig(path, dpi=120)


def show_list(scale: str, seeds: list[int], out: Path) -> None:
    cores = os.cpu_count()
    print(f"{'':9}{'runs':>5}{'finished':>10}   at --scale {scale}, seeds {', '.join(map(str, seeds))}")
    for name, table in (TABLES | FIGURES).items():
        grid = Grid(scale, seeds, out, "", [])
        try:
            table(grid)
            if not grid.jobs and name != "table6":  # which is counted, not run
                raise InputError("the paper has none of it at this scale")
        except InputError as error:
            print(f"{name:9}{'-':>5}{'-':>10}   {error}")
            continue
        finished = [folder for folder in grid.jobs if grid.finished(folder)]
        print(f"{name:9}{len(grid.jobs):5d}{len(finished):10d}   {table.__doc__}")
    minutes = {"digits": "half a minute", "kmnist": "half an hour at the most", "paper": "several days on a CPU"}
    print(f"\na run takes about {minutes[scale]}; this machine has {cores} cores: --jobs {cores}")


if __name__ == "__main__":
    raise SystemExit(main())
