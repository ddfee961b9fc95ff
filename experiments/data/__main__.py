"""The command that fetches published data sets."""

import argparse
import os
import sys

from rich.console import Console
from rich.progress import DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from experiments.data import fetch
from experiments.errors import Failed, Mistake


def main(args: list[str] | None = None) -> int:
    """Fetch a data set, and return the exit code: 1 if it cannot be fetched, 2 for a mistake."""
    parser = argparse.ArgumentParser("python -m experiments.data", description=__doc__)
    get = parser.add_subparsers(dest="command", required=True).add_parser("get", help="fetch a data set")
    get.add_argument("name", choices=list(fetch.SETS), help="the data set")
    get.add_argument("--dir", default="", help="the folder to put it into (default: $NMJAX_DATA, else this folder)")
    options = parser.parse_args(args)
    columns = TextColumn("{task.description}"), DownloadColumn(), TimeRemainingColumn()
    tasks = {}
    try:
        with Progress(*columns, console=Console(stderr=True)) as progress:

            def show(name: str, done: int, size: int) -> None:
                if name not in tasks:
                    tasks[name] = progress.add_task(name, total=size)
                progress.update(tasks[name], completed=done)

            folder = fetch.get(options.name, options.dir or os.environ.get("NMJAX_DATA") or ".", show)
    except (Mistake, Failed) as error:
        print(error, file=sys.stderr)
        return error.code
    except KeyboardInterrupt:
        print("interrupted; the same command continues.", file=sys.stderr)
        return 130
    place = f" --config.data.dir={options.dir}" if options.dir else ""
    print(f"{options.name} is in {folder}. Train: python launch.py --config=configs/vit_24.py:{options.name}{place}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
