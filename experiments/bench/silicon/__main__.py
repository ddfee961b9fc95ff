"""Run one row of ``bench silicon`` in this process, or describe the device. Print what was found as the last line."""

import json
import sys

import jax

from experiments.bench.measure import machine
from experiments.bench.silicon.rows import ROWS
from nmjax.core.refusal import Refusal
from nmjax.kernels.targets import Target, target


def main(name: str) -> int:
    """Run a row by its name, or "about", and return the exit code."""
    device = target("pallas")
    simulated = isinstance(device, Refusal)
    if isinstance(device, Refusal):
        device = Target("interpreter", "hopper", 2, interpret=True)
    if name == "about":
        kind = jax.devices()[0].device_kind
        print(json.dumps({"device": kind, "jax": jax.__version__, "simulated": simulated, "machine": machine()}))
        return 0
    print(json.dumps({"result": ROWS[name].run(device)}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
