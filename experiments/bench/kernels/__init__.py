"""What the kernels compute on this machine, and how fast, beside dense products, cuSPARSELt and the speed of memory.

Without sparse tensor cores it runs the numerics alone, of small arrays in the interpreter. Everything found is written as
it comes, and a stage that fails is recorded as such, so that a run that is cut short has told what it knew.
"""

import time
from pathlib import Path

import jax

from experiments.bench.kernels.block import feed_forward
from experiments.bench.kernels.check_packing import packing
from experiments.bench.kernels.check_products import numerics
from experiments.bench.kernels.peers import cusparselt
from experiments.bench.kernels.report import Report, Setting
from experiments.bench.kernels.speed import packing_speed, products
from nmjax.core.refusal import Refusal
from nmjax.kernels import check
from nmjax.kernels.targets import target

STAGES = {  # and whether they tell times
    "a": (numerics, False),
    "b": (packing, False),
    "c": (products, True),
    "d": (cusparselt, True),
    "e": (packing_speed, True),
    "f": (feed_forward, True),
}


def kernels(
    sizes: tuple[int, ...], rounds: int, quick: bool, only: list[str], path: Path | None, command: str
) -> tuple[str, bool]:  # fmt: skip
    """The report, and whether all stages that ran came to their end."""
    here, device = target("auto"), jax.devices()[0].device_kind
    here = here if isinstance(here, Refusal) else check.fault(here) or here
    there = target("pallas")  # its numerics, where it failed the check before use, tell more of that
    about = f"Kernels run on {device}."
    if isinstance(here, Refusal):
        about = f"Of speed nothing is told, for {here}. Numerics are those of {'the interpreter' if isinstance(there, Refusal) else device}."
    report = Report(path, command, device, about)
    print(about, flush=True)
    setting = Setting(target("interpret") if isinstance(there, Refusal) else there, sizes, rounds, quick)
    failed = False
    for letter, (stage, timed) in STAGES.items():
        if letter not in (only or STAGES):
            continue
        name = f"{letter}. {stage.__name__.replace('_', ' ')}"
        if timed and isinstance(here, Refusal):
            report.stage(name, f"not run, for {here}")
            continue
        report.stage(name, "begun")
        start, error = time.perf_counter(), None
        try:
            stage(setting, report)
        except Exception as raised:  # whatever it is: the other stages are still wanted
            error, failed = raised, True
        report.ended(time.perf_counter() - start, error)
    return report.text(), not failed
