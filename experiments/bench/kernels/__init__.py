"""The kernels on this machine: their results, and their speed beside dense products, cuSPARSELt and memory.

Without sparse tensor cores only the numerics run, with small arrays in the interpreter. Every row is written as it
comes, and a stage that fails is recorded, so that a run that is cut short keeps its results.
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

STAGES = {  # by letter: the stage, and whether it measures times
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
    """Run the stages. Return the report, and whether no stage failed.

    Args:
      sizes: The n of the products n x n x n.
      rounds: How often everything is timed.
      quick: Run fewer and smaller cases.
      only: The letters of the stages; all if empty.
      path: The results' path without an ending; None to write no file.
      command: The command, for the report.
    """
    device = jax.devices()[0].device_kind
    timed_on = target("auto")
    if not isinstance(timed_on, Refusal):
        timed_on = check.fault(timed_on, check.cases(timed_on)) or timed_on
    checked_on = target("pallas")  # also if it failed the check before use: its numerics show more of the fault
    simulated = isinstance(checked_on, Refusal)
    if isinstance(checked_on, Refusal):
        checked_on = target("interpret")
    about = f"Kernels run on {device}."
    if isinstance(timed_on, Refusal):
        about = f"No speed is measured, because {timed_on}. "
        about += f"Numerics are those of {'the interpreter' if simulated else device}."
    report = Report(path, command, device, about)
    print(about, flush=True)
    setting = Setting(checked_on, sizes, rounds, quick)
    failed = False
    for letter, (stage, timed) in STAGES.items():
        if letter not in (only or STAGES):
            continue
        name = f"{letter}. {stage.__name__.replace('_', ' ')}"
        if timed and isinstance(timed_on, Refusal):
            report.stage(name, f"not run, because {timed_on}")
            continue
        report.stage(name, "begun")
        start, error = time.perf_counter(), None
        try:
            stage(setting, report)
        except Exception as raised:  # the other stages are still wanted
            error, failed = raised, True
        report.ended(time.perf_counter() - start, error)
    return report.text(), not failed
