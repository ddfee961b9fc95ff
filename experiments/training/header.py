"""The header of a run: what is about to be done, and on which devices."""

import jax

from experiments.scale import processes, shards
from experiments.training.program import Program
from experiments.training.screen import number


def rows(program: Program) -> list[tuple[str, str]]:
    """Return rows (label, text) about a program."""
    config, task, plan = program.config, program.task, program.plan
    dense, effective = program.step_flops()
    epochs = program.total * config.batch / task.examples
    parts = [("devices", _devices(program))]
    parts.append(("computing", f"{config.dtype}, parameters float32; {_products(plan.runs, config.backend)}"))
    if program.count > 1:
        parts.append(("side by side", f"{program.count} runs; the figures of their steps on screen are the mean"))
    parts += task.facts
    parts.append(("batch", _batch(program)))
    parts.append(("length", f"{program.total:,} steps = {epochs:.4g} epochs of {task.examples:,}"))
    parts.append(("model", f"{config.model.name} {config.model.size}, {plan.parameters:,} parameters"))
    share = effective / dense
    parts.append(("FLOPs a step", f"{number(dense)} dense, {number(effective)} effective ({share:.2f}), on average"))
    if program.no_hard:
        parts.append(("hardened", f"not evaluated: {program.no_hard}"))
    return parts


def _devices(program: Program) -> str:
    """Return the number and the kind of the devices, and how they are arranged."""
    count = program.mesh.size
    axes = [f"{name} {size}" for name, size in program.mesh.shape.items() if size > 1]
    text = f"{count} x {jax.devices()[0].device_kind}"
    if axes and axes != [f"data {count}"]:
        text += f" as {' x '.join(axes)}"
    if processes.count() > 1:
        text += f", in {processes.count()} processes"
    return text


def _batch(program: Program) -> str:
    """Return the size of the batch, and how micro-batches and devices share it."""
    config, parts = program.config, shards.parts(program.mesh)
    each = config.batch // config.accumulate // parts
    micro = f"{config.accumulate} micro-batches x " if config.accumulate > 1 else ""
    devices = "device" if parts == 1 else "devices"
    return f"{config.batch:,} = {micro}{parts} {devices} x {each:,}"


def _products(runs: dict[str, int], backend: str) -> str:
    """Return in words how pruned products run.

    >>> _products({"packed": 12, "emulated": 2}, "auto")
    'pruned products: 12 on sparse tensor cores, 2 emulated, for the reasons in the plan'
    """
    if not runs:
        return "nothing is pruned"
    if set(runs) == {"emulated"}:
        return "n:m products are emulated: zeros are multiplied"
    words = {"packed": "on sparse tensor cores", "fp8": "dense in FP8"}
    if backend == "interpret":
        words = {"packed": "in simulated kernels", "fp8": "in simulated FP8"}
    words["emulated"] = "emulated, for the reasons in the plan"
    return "pruned products: " + ", ".join(f"{runs[how]} {text}" for how, text in words.items() if how in runs)
