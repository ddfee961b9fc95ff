"""The command that fetches published data sets."""

import argparse
import os
import sys
import time

from experiments.data import fetch
from experiments.errors import Failed, Mistake


class _Shown:
    """Shows how much of a file has arrived: a line that changes on a terminal, and in a log a line for each file."""

    def __init__(self):
        self._live, self._last = sys.stderr.isatty(), 0.0

    def __call__(self, name: str, done: int, size: int) -> None:
        now = time.monotonic()
        if done < size and (not self._live or now - self._last < 0.2):
            return
        self._last = now
        text = f"{name}: {done / 1e6:,.1f} of {size / 1e6:,.1f} MB"
        print(f"\r{text}" if self._live else text, end="\n" if done == size else "", file=sys.stderr, flush=True)


def main(args: list[str] | None = None) -> int:
    """Fetch a data set, and return the exit code: 1 if it cannot be fetched, 2 for a mistake."""
    parser = argparse.ArgumentParser("python -m experiments.data", description=__doc__)
    get = parser.add_subparsers(dest="command", required=True).add_parser("get", help="fetch a data set")
    get.add_argument("name", choices=list(fetch.SETS), help="the data set")
    get.add_argument("--dir", default="", help="the folder to put it into (default: $NMJAX_DATA, else this folder)")
    options = parser.parse_args(args)
    try:
        folder = fetch.get(options.name, options.dir or os.environ.get("NMJAX_DATA") or ".", _Shown())
    except (Mistake, Failed) as error:
        print(error, file=sys.stderr)
        return error.code
    except KeyboardInterrupt:
        print("\ninterrupted; the same command continues.", file=sys.stderr)
        return 130
    place = f" --config.data.dir={options.dir}" if options.dir else ""
    print(f"{options.name} is in {folder}. Train: python launch.py --config=configs/vit_24.py:{options.name}{place}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
