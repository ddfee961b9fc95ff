"""The command that writes the report of a run, or the comparison of many."""

import argparse
import os
import sys
from pathlib import Path

from experiments.errors import Mistake
from experiments.files import replace
from experiments.report import compare, write


def main(args: list[str] | None = None) -> int:
    """Write the page, print its path, and return the exit code. It is 2 if a folder is no run."""
    parser = argparse.ArgumentParser(
        "python -m experiments.report",
        description="Make report.html of a run; or of several, or of a sweep, compare.html and compare.md.",
    )
    parser.add_argument("run", type=Path, metavar="RUN", nargs="+", help="the folder of a run, or of a sweep")
    parser.add_argument(
        "--baseline",
        default="",
        help="the config to compare with, by its name (default: the dense one, else the first)",
    )
    parser.add_argument(
        "--to", type=Path, help="the folder of compare.html (default: the sweep's, or the one that all runs lie in)"
    )
    options = parser.parse_args(args)
    try:
        if len(options.run) == 1 and (options.run[0] / "run.json").exists():
            print(write(options.run[0]))
            return 0
        comparison = compare.compare_folders(options.run, options.baseline)
        folder = options.to or _beside(options.run)
        folder.mkdir(parents=True, exist_ok=True)
        text = compare.markdown(comparison)
        runs = [run for group in comparison.groups for run in group.runs.values()]
        reports = {run.path: run.path / "report.html" for run in runs if (run.path / "report.html").exists()}
        links = {path: Path(os.path.relpath(page, folder.resolve())).as_posix() for path, page in reports.items()}
        replace(folder / "compare.html", compare.render(comparison, links))
        replace(folder / "compare.md", text)
        print(f"{text}\n{folder / 'compare.html'}")
    except Mistake as mistake:
        print(mistake, file=sys.stderr)
        return 2
    return 0


def _beside(folders: list[Path]) -> Path:
    """Return the folder for the comparison: the sweep's own, or the one that all runs lie in."""
    if len(folders) == 1:
        return folders[0]
    common = Path(os.path.commonpath([folder.resolve().parent for folder in folders]))
    if common == Path(common.anchor):
        raise Mistake("these runs lie in no common folder. Name the folder of the comparison: --to=DIR.")
    return common


if __name__ == "__main__":
    sys.exit(main())
