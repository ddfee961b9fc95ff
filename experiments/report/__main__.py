"""The report of one run, from the command line."""

import argparse
import sys
from pathlib import Path

from experiments.errors import Mistake
from experiments.report import write


def main(args: list[str] | None = None) -> int:
    """Writes the page and prints where it is; 2 where the folder is no run."""
    parser = argparse.ArgumentParser("python -m experiments.report", description="Make report.html of a run.")
    parser.add_argument("run", type=Path, metavar="RUN", help="the folder of a run")
    try:
        print(write(parser.parse_args(args).run))
    except Mistake as mistake:
        print(mistake, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
