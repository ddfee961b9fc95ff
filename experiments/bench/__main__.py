"""The command line of the benchmarks."""

import argparse
import shlex
import sys
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import nmjax as nm
from experiments import bench, files
from experiments.bench.measure import machine
from experiments.errors import Failed, Mistake

RESULTS = Path(__file__).parent.parent / "results"


class Benchmark(NamedTuple):
    """A benchmark: what it measures, its options, and its module, in which a function of its name yields tables."""

    about: str
    options: str = "rounds save"
    module: str = ""


BENCHMARKS = {
    "transforms": Benchmark("pruning of arrays, in copies", "size rounds save"),
    "delivery": Benchmark("sparse models, against the dense one", module="savings"),
    "compaction": Benchmark("products with fewer rows, one by one", module="savings"),
    "savings": Benchmark("the time and memory of training steps", "method model rounds save"),
    "train": Benchmark("training steps of runs, against a plain loop", "config dir rounds save"),
    "runs": Benchmark("reports of long runs and of many runs, and the memory of a run"),
    "scale": Benchmark("many devices, saving, and starting again", "config dir rounds save"),
    "pretrained": Benchmark("reading a checkpoint, and pruning it in one shot"),
    "large": Benchmark("pruning checkpoints of 1.1 and 8 billion parameters in their files", "save"),
    "expected": Benchmark("what sparse tensor cores can bring to a step, computed from plans", "save", "computed"),
    "counts": Benchmark("the kernels of a step, counted in its program", "rounds device save", "computed"),
    "tpu": Benchmark("what a TPU's compiler counts in pruning and in steps, without a TPU", "save"),
    "silicon": Benchmark("what waits for a GPU, row by row; goes on where it stopped", "out ship:dir minutes parts"),
    "tune": Benchmark("the fastest tiles of products, for the library", "shapes ship minutes save"),
}


def _size(text: str) -> int:
    if not text.isdigit() or not int(text) or int(text) % 128:
        raise argparse.ArgumentTypeError(f"{text}: write a multiple of 128.")
    return int(text)


def _method(text: str) -> str:
    try:
        nm.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error}") from None
    return text


OPTIONS: dict[str, dict[str, Any]] = {
    "rounds": {"type": int, "default": 9, "help": "how often everything is timed (default 9)"},
    "save": {"metavar": "NAME", "nargs": "?", "const": "", "help": "also write experiments/results/NAME.md"},
    "device": {"choices": ("a100", "h200"), "help": "count in compiled programs: pruning by XLA, or kernels that pack"},
    "size": {"type": _size, "default": 4096, "help": "rows and columns of the arrays (default 4096)"},
    "config": {"action": "append", "default": [], "help": "a config file, with or without a variant (repeatable)"},
    "dir": {"default": "", "help": "the folder of the data, as --config.data.dir"},
    "method": {"type": _method, "action": "append", "default": [], "help": "in place of all of the list (repeatable)"},
    "model": {"choices": ("GPT", "ViT", "ResNet"), "action": "append", "default": [], "help": "in place of all three"},
    "shapes": {"help": "layers as tokens x in x out, such as '8192x1024x4096 8192x4096x1024'"},
    "ship": {"action": "store_true", "help": "write the package's table instead of the user's own"},
    "minutes": {"type": float, "default": 8, "help": "begin nothing after it (default 8)"},
    "out": {"type": Path, "metavar": "DIR", "help": "the folder of the rows and of their table"},
    "ship:dir": {"type": Path, "metavar": "DIR", "help": "put the tables of tiles of a run in DIR into the package"},
    "parts": {"default": "", "help": "some parts, such as check,numerics (default all)"},
}


def main(argv: list[str]) -> int:
    """Run a benchmark, print its tables, and return the exit code."""
    parser = argparse.ArgumentParser("python -m experiments.bench", description=bench.__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    commands = parser.add_subparsers(dest="what", required=True, metavar="WHAT")
    for name, benchmark in BENCHMARKS.items():
        command = commands.add_parser(name, help=benchmark.about, description=benchmark.about)
        for option in benchmark.options.split():
            command.add_argument(f"--{option.partition(':')[0]}", **OPTIONS[option])
    given = vars(parser.parse_args(argv))
    what, save = given.pop("what"), given.pop("save", None)
    path = None if save is None else RESULTS / f"{save or what}.md"
    module = import_module(f"experiments.bench.{BENCHMARKS[what].module or what}")  # others may lack their packages
    text = ""
    try:
        for table in getattr(module, what)(**given):
            if not text and what != "silicon":  # whose processes need the whole device
                text = f"# {what}\n\n{machine()}  \n`{shlex.join(['python', '-m', 'experiments.bench', *argv])}`\n"
                print(text)
            text += f"\n{table}"
            print(table, flush=True)
            if path is not None:
                path.parent.mkdir(exist_ok=True)
                files.replace(path, text)
    except (Mistake, Failed) as error:
        print(error, file=sys.stderr)
        return error.code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
