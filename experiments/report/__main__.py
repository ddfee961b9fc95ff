"""The command that writes the report of a run, the comparison of some, or the index of all.

In the root of the repository: ``python -m experiments.report``. Elsewhere: ``python REPOSITORY/experiments/report``.
"""

import argparse
import errno
import gc
import os
import sys
from pathlib import Path

if not __package__:  # the folder is run, and Python searches modules in it
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from experiments.errors import Failed, Mistake, visible
from experiments.files import FULL, replace, text
from experiments.report import compare_page, index, read, render


def main(args: list[str] | None = None) -> int:
    """Write the page, print its path, and return the exit code: 2 for a mistake, 1 for a failure of the disk."""
    parser = argparse.ArgumentParser(
        "python -m experiments.report",
        description="Write report.html for a run, compare.html and compare.md for several runs or a sweep, or "
        "index.html for all runs below any other folder.",
    )
    parser.add_argument("run", type=Path, metavar="DIR", nargs="+", help="the folder of a run, of a sweep, or of runs")
    parser.add_argument(
        "--baseline",
        default="",
        help="the config to compare with, by its name (default: the dense one with the best score, else the first)",
    )
    parser.add_argument(
        "--to", type=Path, help="the folder for an index or a comparison (default: the folder that the runs lie in)"
    )
    options = parser.parse_args(args)
    doing = "read"
    try:
        pages, said = _pages(options.run, options.baseline, options.to)
        doing = "written"
        for path, page in pages.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            replace(path, page)
    except Mistake as mistake:
        print(visible(mistake), file=sys.stderr)
        return mistake.code
    except OSError as error:
        said = f"{error.filename or options.run[0]} cannot be {doing}: {error.strerror or error}."
        print(visible(said), file=sys.stderr)
        return Failed.code if error.errno in (*FULL, errno.EIO) else Mistake.code
    print(visible(said))
    return 0


def _pages(folders: list[Path], baseline: str, to: Path | None) -> tuple[dict[Path, str], str]:
    """Return the pages by their paths, and what the command prints when they are written."""
    first = folders[0]
    if len(folders) == 1 and (first / "run.json").exists():
        if baseline or to:
            raise Mistake(f"{first} is one run. Leave out --baseline and --to: its report is {first / 'report.html'}.")
        return {first / "report.html": render(read(first))}, f"{first / 'report.html'}"
    if len(folders) == 1 and not baseline and not (first / "results.jsonl").exists():
        path = (to or first) / "index.html"
        page = index.render(first, to or first)
        if path.exists() and index.TITLE not in text(path, errors="replace"):
            raise Mistake(f"{path} is another page, not an index of runs. Name another folder for the index: --to=DIR.")
        return {path: page}, f"{path}"
    folder = to or _beside(folders)
    pages = compare_page.pages(folders, folder, baseline)
    return pages, f"{pages[folder / 'compare.md']}\n{folder / 'compare.html'}"


def _beside(folders: list[Path]) -> Path:
    """Return the folder for the comparison: the sweep's own, or the one that all runs lie in."""
    if len(folders) == 1:
        return folders[0]
    common = Path(os.path.commonpath([folder.resolve().parent for folder in folders]))
    if common == Path(common.anchor):
        raise Mistake("these runs lie in no common folder. Name the folder of the comparison: --to=DIR.")
    return common


if __name__ == "__main__":
    gc.disable()  # the process is short, and the collector would visit every line of a long run many times
    sys.exit(main())
