"""Run one row of ``bench silicon`` in this process, or describe the device. Print what was found as the last line."""

import json
import shutil
import subprocess
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
    result = ROWS[name].run(device)
    print(json.dumps({"result": result} | clock()))
    return 0


def clock() -> dict[str, str]:
    """Return the clock of the first GPU, what it may be at most, and its temperature; nothing if nobody tells it."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return {}
    fields = "--query-gpu=clocks.sm,clocks.max.sm,temperature.gpu"
    said = subprocess.run([tool, fields, "--format=csv,noheader,nounits"], capture_output=True, text=True, check=False)
    now, most, warm = (said.stdout.splitlines() or [",,"])[0].split(",")
    return {"clock": f"{now.strip()} of {most.strip()} MHz, {warm.strip()} °C"} if now else {}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
