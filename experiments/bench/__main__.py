"""The command line of the benchmarks."""

import argparse
import shlex
import sys
from pathlib import Path

from experiments import bench
from experiments.bench import delivery, train, transforms
from experiments.bench.measure import machine

RESULTS = Path(__file__).parent.parent / "results"


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.bench",
        description=bench.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", choices=["transforms", "delivery", "train"])
    parser.add_argument(
        "--size", type=int, default=4096, help="transforms: rows and columns of the arrays (default 4096)"
    )
    parser.add_argument("--config", action="append", help="train: a page of configs/, with a variant perhaps")
    parser.add_argument("--dir", default="", help="train: where data lies, as --config.data.dir")
    parser.add_argument("--rounds", type=int, default=9, help="how often everything is timed (default 9)")
    parser.add_argument("--save", metavar="NAME", help="also write experiments/results/NAME.md")
    args = parser.parse_args(argv)
    tables = {
        "transforms": lambda: transforms.transforms(args.size, args.rounds),
        "delivery": lambda: delivery.delivery(args.rounds),
        "train": lambda: train.train(args.config or train.PAGES, args.dir, args.rounds),
    }[args.what]()
    command = shlex.join(["python", "-m", "experiments.bench", *argv])
    text = f"# {args.what}\n\n{machine()}  \n`{command}`\n\n" + tables
    print(text)
    if args.save:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{args.save}.md").write_text(text)


if __name__ == "__main__":
    main(sys.argv[1:])
