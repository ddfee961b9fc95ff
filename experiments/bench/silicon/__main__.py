"""Run one row of ``bench silicon``, in this process, and print what it found as the last line."""

import json
import sys

from experiments.bench.silicon.rows import ROWS
from nmjax.core.refusal import Refusal
from nmjax.kernels.targets import Target, target


def main(name: str) -> int:
    """Run a row by its name, and return the exit code."""
    device = target("pallas")
    if isinstance(device, Refusal):
        device = Target("interpreter", "hopper", 2, interpret=True)
    print(json.dumps({"result": ROWS[name].run(device)}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
