"""The command that writes the report of a run, or the comparison of many."""

import argparse
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
        "--baseline", default="", help="the config to compare with, by its name in the table (default: the first)"
    )
    parser.add_argument(
        "--to", type=Path, help="the folder of compare.html (default: the sweep's, or the working directory)"
    )
    options = parser.parse_args(args)
    try:
        if len(options.run) == 1 and (options.run[0] / "run.json").exists():
            print(write(options.run[0]))
            return 0
        comparison = compare.compare_folders(options.run, options.baseline)
        folder = options.to
        if folder is None:
            folder = options.run[0] if len(options.run) == 1 else Path()
        folder.mkdir(parents=True, exist_ok=True)
        text = compare.markdown(comparison)
        replace(folder / "compare.html", compare.render(comparison))
        replace(folder / "compare.md", text)
        print(f"{text}\n{folder / 'compare.html'}")
    except Mistake as mistake:
        print(mistake, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
