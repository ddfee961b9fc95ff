"""The command line of the benchmarks."""

import argparse
import shlex
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import nmjax as nm
from experiments import bench
from experiments.bench.measure import machine
from experiments.errors import Failed, Mistake

RESULTS = Path(__file__).parent.parent / "results"
TABLES = (
    "transforms",
    "delivery",
    "compaction",
    "savings",
    "train",
    "runs",
    "scale",
    "pretrained",
    "expected",
    "counts",
    "kernels",
    "silicon",
    "tune",
)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.bench",
        description=bench.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("what", choices=TABLES)
    add("--size", type=int, default=4096, help="transforms: rows and columns of the arrays (default 4096)")
    add("--config", action="append", help="train, scale: a config file, with or without a variant")
    add("--dir", default="", help="train, scale: the folder of the data, as --config.data.dir")
    add("--method", action="append", help="savings: a method in place of those of the list")
    models = ("GPT", "ViT", "ResNet")
    add("--model", action="append", choices=models, help="savings: one of the models, in place of all three")
    add("--sizes", default="4096,8192,16384", help="kernels: n of the products n x n x n")
    add("--quick", action="store_true", help="kernels: fewer and smaller cases")
    stages = "a products and b packing against float64, c speed of products, d cuSPARSELt, e speed of packing, "
    add("--only", default="", help=f"kernels: some stages, such as a,c: {stages}f a feed-forward block")
    add("--shapes", help="tune: layers as tokens x in x out, such as '8192x1024x4096 8192x4096x1024'")
    ship = "tune: write the package's table instead of the user's own; silicon: put the tables of a run in DIR there"
    add("--ship", metavar="DIR", nargs="?", const="", help=ship)
    add("--minutes", type=float, default=8, help="tune: start no product after it; silicon: the time limit (default 8)")
    add("--out", type=Path, help="silicon: the folder of its rows and its table")
    add("--parts", default="", help="silicon: some parts, such as primitives,numerics (default all)")
    add("--rounds", type=int, default=9, help="how often everything is timed (default 9)")
    add("--save", metavar="NAME", nargs="?", const="", help="also write experiments/results/NAME.md")
    return parser


def main(argv: list[str]) -> int:
    """Run a benchmark, print its tables, and return the exit code."""
    parser = _parser()
    args = parser.parse_args(argv)
    command = shlex.join(["python", "-m", "experiments.bench", *argv])
    path = None if args.save is None else RESULTS / (args.save or args.what)
    module = import_module(f"experiments.bench.{args.what}")  # not the others: they may need packages that are missing
    if args.shapes and args.what != "tune":
        parser.error("--shapes belongs to tune. kernels has --sizes.")
    try:
        sizes = tuple(int(n) for n in args.sizes.split(","))
        shapes = module.of_text(args.shapes) if args.shapes else None
    except ValueError as error:
        parser.error(f"--sizes={args.sizes} and --shapes={args.shapes}: {error}")
    if args.size < 1 or args.size % 128:
        parser.error(f"--size={args.size}: write a multiple of 128.")
    for method in args.method or ():
        try:
            nm.parse(method)
        except ValueError as error:
            parser.error(f"--method: {error}")
    if args.what == "kernels":
        only = args.only.replace(",", " ").split()
        unknown = sorted(set(only) - set(module.STAGES))
        if unknown:
            parser.error(f"--only: {', '.join(unknown)} is none of the stages {', '.join(module.STAGES)}.")
        _, complete = module.kernels(sizes, args.rounds, args.quick, only, path, command)
        return 0 if complete else 1
    if args.what == "silicon":
        parts = args.parts.replace(",", " ").split() or module.PARTS
        unknown = sorted(set(parts) - set(module.PARTS))
        if args.ship == "":
            parser.error("silicon --ship DIR: name the folder of a run.")
        if args.ship is not None:
            try:
                print(*module.ship(Path(args.ship)), sep="\n")
            except ValueError as error:
                parser.error(f"--ship: {error}")
            return 0
        if unknown:
            parser.error(f"--parts: {', '.join(unknown)} is none of the parts {', '.join(module.PARTS)}.")
        if args.out is None:
            parser.error("silicon: write --out DIR, the folder of its results.")
        print(module.silicon(args.out, args.minutes, parts))
        return 0
    try:
        tables = _tables(args, module, shapes)
    except (Mistake, Failed) as error:
        print(error, file=sys.stderr)
        return error.code
    if tables is None:
        return 1
    text = f"# {args.what}\n\n{machine()}  \n`{command}`\n\n" + tables
    print(text)
    if path:
        path.parent.mkdir(exist_ok=True)
        path.with_name(f"{path.name}.md").write_text(text)
    return 0


def _tables(args: argparse.Namespace, module: ModuleType, shapes: Any) -> str | None:
    """Return the tables of a benchmark; None if it cannot run on this machine."""
    return {
        "transforms": lambda: module.transforms(args.size, args.rounds),
        "delivery": lambda: module.delivery(args.rounds),
        "compaction": lambda: module.compaction(args.rounds),
        "savings": lambda: module.savings(args.method or module.METHODS, args.rounds, args.model or module.MODELS),
        "train": lambda: module.train(args.config or module.CONFIG_FILES, args.dir, args.rounds),
        "runs": lambda: module.runs(args.rounds),
        "scale": lambda: module.scale(args.config or module.CONFIG_FILES, args.dir, args.rounds),
        "pretrained": lambda: module.pretrained(args.rounds),
        "expected": lambda: module.expected(),
        "counts": lambda: module.counts(args.rounds),
        "tune": lambda: module.tune(shapes or module.default(), args.ship is not None, args.minutes),
    }[args.what]()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
