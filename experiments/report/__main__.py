"""The report of a run, or of many beside each other, from the command line."""

import argparse
import sys
from pathlib import Path

from experiments.errors import Mistake
from experiments.files import replace
from experiments.report import compare, write


def main(args: list[str] | None = None) -> int:
    """Writes the page and prints where it is; 2 where a folder is no run."""
    parser = argparse.ArgumentParser(
        "python -m experiments.report",
        description="Make report.html of a run; or of several, or of a sweep, compare.html and compare.md.",
    )
    parser.add_argument("run", type=Path, metavar="RUN", nargs="+", help="the folder of a run, or of a sweep")
    parser.add_argument("--baseline", default="", help="the config to compare with, as the table names it: the first")
    parser.add_argument("--to", type=Path, help="the folder of compare.html: the sweep's, or this one")
    asked = parser.parse_args(args)
    try:
        if len(asked.run) == 1 and (asked.run[0] / "run.json").exists():
            print(write(asked.run[0]))
            return 0
        found = compare.of(asked.run, asked.baseline)
        folder = asked.to or (asked.run[0] if len(asked.run) == 1 else Path())
        folder.mkdir(parents=True, exist_ok=True)
        text = compare.markdown(found)
        replace(folder / "compare.html", compare.render(found))
        replace(folder / "compare.md", text)
        print(f"{text}\n{folder / 'compare.html'}")
    except Mistake as mistake:
        print(mistake, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
