"""The command that writes the report of a run, the comparison of some, or the index of all."""

import argparse
import gc
import os
import sys
from pathlib import Path

from experiments.errors import Mistake
from experiments.files import replace
from experiments.report import compare, compare_page, index, write


def main(args: list[str] | None = None) -> int:
    """Write the page, print its path, and return the exit code. It is 2 if there is no run."""
    parser = argparse.ArgumentParser(
        "python -m experiments.report",
        description="Write report.html for a run, compare.html and compare.md for several runs or a sweep, or "
        "index.html for all runs below any other folder.",
    )
    parser.add_argument("run", type=Path, metavar="DIR", nargs="+", help="the folder of a run, of a sweep, or of runs")
    parser.add_argument(
        "--baseline",
        default="",
        help="the config to compare with, by its name (default: the dense one, else the first)",
    )
    parser.add_argument(
        "--to", type=Path, help="the folder for an index or a comparison (default: the folder that the runs lie in)"
    )
    options = parser.parse_args(args)
    try:
        if len(options.run) == 1 and (options.run[0] / "run.json").exists():
            print(write(options.run[0]))
            return 0
        if len(options.run) == 1 and not options.baseline and not (options.run[0] / "results.jsonl").exists():
            print(_write_index(options.run[0], options.to or options.run[0]))
            return 0
        comparison = compare.compare_folders(options.run, options.baseline)
        folder = options.to or _beside(options.run)
        folder.mkdir(parents=True, exist_ok=True)
        text = compare.markdown(comparison)
        runs = [run for group in comparison.groups for run in group.runs.values()]
        reports = {run.path: run.path / "report.html" for run in runs if (run.path / "report.html").exists()}
        links = {path: Path(os.path.relpath(page, folder.resolve())).as_posix() for path, page in reports.items()}
        replace(folder / "compare.html", compare_page.render(comparison, links))
        replace(folder / "compare.md", text)
        print(f"{text}\n{folder / 'compare.html'}")
    except Mistake as mistake:
        print(mistake, file=sys.stderr)
        return 2
    return 0


def _write_index(folder: Path, to: Path) -> Path:
    """Write index.html of the runs below a folder, and return its path."""
    page, path = index.render(folder, to), to / "index.html"
    to.mkdir(parents=True, exist_ok=True)
    if path.exists() and index.TITLE not in path.read_text(encoding="utf-8", errors="replace"):
        raise Mistake(f"{path} is another page, not an index of runs. Name another folder for the index: --to=DIR.")
    replace(path, page)
    return path


def _beside(folders: list[Path]) -> Path:
    """Return the folder for the comparison: the sweep's own, or the one that all runs lie in."""
    if len(folders) == 1:
        return folders[0]
    common = Path(os.path.commonpath([folder.resolve().parent for folder in folders]))
    if common == Path(common.anchor):
        raise Mistake("these runs lie in no common folder. Name the folder of the comparison: --to=DIR.")
    return common


if __name__ == "__main__":
    gc.disable()  # the process is short, and the collector would walk all the lines of a long run many times
    sys.exit(main())
