"""The command line of the benchmarks."""

import argparse
import shlex
import sys
from importlib import import_module
from pathlib import Path

from experiments import bench
from experiments.bench.measure import machine

RESULTS = Path(__file__).parent.parent / "results"
TABLES = ("transforms", "delivery", "train", "scale", "kernels", "tune")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.bench",
        description=bench.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", choices=TABLES)
    parser.add_argument(
        "--size", type=int, default=4096, help="transforms: rows and columns of the arrays (default 4096)"
    )
    parser.add_argument("--config", action="append", help="train, scale: a page of configs/, with a variant perhaps")
    parser.add_argument("--dir", default="", help="train, scale: where data lies, as --config.data.dir")
    parser.add_argument("--sizes", default="4096,8192,16384", help="kernels: n of the products n x n x n")
    parser.add_argument("--quick", action="store_true", help="kernels: fewer cases, and smaller ones")
    parser.add_argument(
        "--only",
        default="",
        help="kernels: some stages, as a,c: a products and b packing against float64, c speed of products, d cuSPARSELt, e speed of packing, f a feed-forward block",
    )
    parser.add_argument("--shapes", help="tune: layers as tokens x in x out, such as '8192x1024x4096 8192x4096x1024'")
    parser.add_argument("--ship", action="store_true", help="tune: write the package's table, not one's own")
    parser.add_argument("--minutes", type=float, default=8, help="tune: when to begin no more (default 8)")
    parser.add_argument("--rounds", type=int, default=9, help="how often everything is timed (default 9)")
    parser.add_argument("--save", metavar="NAME", nargs="?", const="", help="also write experiments/results/NAME.md")
    args = parser.parse_args(argv)
    command = shlex.join(["python", "-m", "experiments.bench", *argv])
    path = None if args.save is None else RESULTS / (args.save or args.what)
    module = import_module(f"experiments.bench.{args.what}")  # alone: others want packages that may not be here
    try:
        sizes = tuple(int(n) for n in args.sizes.split(","))
        shapes = module.of_text(args.shapes) if args.what == "tune" and args.shapes else None
    except ValueError as error:
        parser.error(f"--sizes={args.sizes} and --shapes={args.shapes}: {error}")
    if args.shapes and args.what != "tune":
        parser.error("--shapes are tune's; kernels has --sizes.")
    if args.what == "kernels":
        only = args.only.replace(",", " ").split()
        if unknown := set(only) - set(module.STAGES):
            parser.error(f"--only: there are the stages {', '.join(module.STAGES)}, not {', '.join(sorted(unknown))}.")
        return int(not module.kernels(sizes, args.rounds, args.quick, only, path, command)[1])
    tables = {
        "transforms": lambda: module.transforms(args.size, args.rounds),
        "delivery": lambda: module.delivery(args.rounds),
        "train": lambda: module.train(args.config or module.PAGES, args.dir, args.rounds),
        "scale": lambda: module.scale(args.config or module.PAGES, args.dir, args.rounds),
        "tune": lambda: module.tune(shapes or module.default(), args.ship, args.minutes),
    }[args.what]()
    if tables is None:
        return 1
    text = f"# {args.what}\n\n{machine()}  \n`{command}`\n\n" + tables
    print(text)
    if path:
        path.parent.mkdir(exist_ok=True)
        path.with_name(f"{path.name}.md").write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
