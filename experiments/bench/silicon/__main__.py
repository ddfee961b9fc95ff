"""Run one row of ``bench silicon`` in this process, or describe the device. Print what was found as the last line."""

import json
import os
import signal
import sys
import threading
import time

import jax

from experiments.bench import turns
from experiments.bench.measure import machine
from experiments.bench.silicon.processes import gpu_state
from experiments.bench.silicon.rows import ROWS
from nmjax.core.refusal import Refusal
from nmjax.kernels.targets import Target, target


def main(name: str, parent: int | None = None) -> int:
    """Run a row, and return the exit code.

    Args:
      name: The name of the row, or "about".
      parent: The process that has started this one, in a group of its own. This one ends when the parent ends.
    """
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    device = target("pallas")
    simulated = isinstance(device, Refusal)
    if isinstance(device, Refusal):
        device = Target("interpreter", "hopper", 2, interpret=True)
    if name == "about":
        seen = jax.devices()[0]
        found = {"device": seen.device_kind, "platform": seen.platform, "jax": jax.__version__, "family": device.family}
        print(json.dumps(found | {"simulated": simulated, "machine": machine()}))
        return 0
    with turns.compiling():
        result = {"result": ROWS[name].run(device)}
    print(json.dumps(result), flush=True)
    print(json.dumps(result | gpu_state()))
    return 0


def _end_with(parent: int) -> None:
    """End this process and those that it has started, once its parent has ended. They would keep the GPU busy."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os.killpg(os.getpgrp(), signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], *map(int, sys.argv[2:])))
