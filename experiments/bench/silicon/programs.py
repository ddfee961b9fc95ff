"""Rows of whole programs: steps and blocks beside dense ones, and short runs of studies."""

import importlib.util
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments.bench import steps, turns
from experiments.bench.measure import in_short, in_turn, over
from experiments.training import breakdown
from nmjax.kernels import measured
from nmjax.kernels.targets import Target

NO_SPEED = "right: no speed in the interpreter"
METHODS = {  # by the names of rows
    "dense": "dense",
    "S-STE": "s_ste(2,4)",
    "FST": "fst(2,4)",
    "everything sparse": "s_ste(2,4); dx_g=mvue(2,4)",
    "dense FP8": (
        "y_x=fp8('e4m3'); y_w=ste(fp8('e4m3')); dx_g=fp8('e5m2'); dx_w=fp8('e4m3'); dw_g=fp8('e5m2'); dw_x=fp8('e4m3')"
    ),
    "S-STE FP8": "s_ste(2,4,fp8=True)",
    "everything sparse FP8": "s_ste(2,4,fp8=True); dx_g=chain(mvue(2,4),fp8('e5m2',rounding='random'))",
}
ROUNDS = 5
TRACED = 3  # steps of a breakdown


def step(large: steps.Model, small: steps.Model, method: str, train: bool, device: Target) -> str:
    """Time a training step, or forward and backward passes, beside the dense ones; in FP8 beside dense FP8 too."""
    make, example = small if device.interpret else large
    backend = "interpret" if device.interpret else "auto"
    made = {}
    for name in dict.fromkeys(("dense", *(["dense FP8"] if "FP8" in method and not device.interpret else []), method)):
        recipe = steps.recipe(METHODS[name], "auto" if name == "dense" else backend)
        made[name] = steps.step(make(), example, recipe, train)
    routes = [route for layer in made[method].layers for _, route in layer.runs]
    products = ", ".join(f"{count} {how}" for how, count in Counter(route.how for route in routes).items())
    known = {row.shape for row in measured.table(device.kind)}
    products = f"products: {products}, {sum(route.shape in known for route in routes)} with tiles of a table"
    with turns.alone():  # a step may need most of the memory
        losses = [float(jax.tree.leaves(each.call())[0]) for each in made.values()]
        if not np.isfinite(losses).all():
            return f"wrong: the losses are {losses}"
        if device.interpret:
            return f"{NO_SPEED}; {products}"
        seconds = in_turn({name: each.call for name, each in made.items()}, ROUNDS, 0.3)
        parts = [f"{name} {_shares(made[name])}" for name in ("dense", method)]
    said = [f"right: {over(seconds[method], seconds['dense'])} of the dense time"]
    said.append(f"{made[method].memory / made['dense'].memory:.2f} of its temporary memory")
    if "dense FP8" in seconds and method != "dense FP8":
        said.append(f"{over(seconds[method], seconds['dense FP8'])} of the time of dense FP8")
    own = [f"{name} {np.median(seconds[name]) * 1e3:.2f} ms, {each.memory / 1e9:.2f} GB" for name, each in made.items()]
    return "; ".join([", ".join(said), products, *own, f"of the time on the device: {', '.join(parts)}"])


# ---- the breakdown of a step ----

PRODUCTS = re.compile("_spmm|gemm|nvjet|xmma|cutlass|cublas|splitK|cudnn")  # names of our kernels and of NVIDIA's


def part_of(kernel: str, op_name: str) -> str:
    """Return the part of a step that a kernel belongs to: products, packing or rest.

    Packing is all that a slot does: it prunes, packs and rounds to FP8.

    Args:
      kernel: Its name.
      op_name: The scopes of its instruction, or "".

    >>> part_of("hopper_spmm_mosaic_gpu_kernel", ""), part_of("loop_add_fusion_3", "jit(f)/jvp(up)/y_w/add")
    ('products', 'packing')
    """
    if PRODUCTS.search(kernel):
        return "products"
    return "packing" if "nm_pack" in kernel or breakdown.slots_of(op_name) else "rest"


def parts(trace: Any, program: str) -> dict[str, float]:
    """Return the seconds of each part in a trace of a GPU. Kernels that run at the same time share it.

    A kernel says which instruction it belongs to, or has its name. Of those that a CUDA graph launches, only the names
    tell anything.

    Args:
      trace: A `jax.profiler.ProfileData`.
      program: The text of the compiled program.
    """
    named = {name.replace(".", "_"): found.op_name for name, found in breakdown.instructions(program).items()}
    ops = []
    for event in _events(trace):
        own = (str(name).replace(".", "_") for name in (dict(event.stats).get("hlo_op"), event.name))
        part = part_of(event.name, next((named[name] for name in own if named.get(name)), ""))
        ops.append(breakdown.Op(part, event.start_ns, event.start_ns + event.duration_ns))
    times = breakdown.shared(ops, ()).ops
    return {part: times.get(part, 0.0) / 1e9 for part in ("products", "packing", "rest")} if times else {}


def _events(trace: Any) -> Iterator[Any]:
    for plane in trace.planes:
        for line in plane.lines if plane.name.startswith("/device:GPU") else ():
            yield from line.events if line.name.startswith("Stream") else ()


def _shares(made: steps.Step) -> str:
    """Trace some steps, and return the share of each part as a text. Without a trace, say why."""
    try:
        with tempfile.TemporaryDirectory() as folder:
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0
            jax.profiler.start_trace(folder, profiler_options=options)
            jax.block_until_ready([made.call() for _ in range(TRACED)])
            jax.profiler.stop_trace()
            (path,) = Path(folder).rglob("*.xplane.pb")
            found = parts(jax.profiler.ProfileData.from_file(str(path)), made.text())
    except Exception as error:  # the times are still wanted
        return f"(no breakdown: {in_short(error)})"
    return shared(found) if found else "(no breakdown: the profiler saw no kernels)"


def shared(seconds: Mapping[str, float]) -> str:
    """Return the shares of parts as a text.

    >>> shared({"products": 3.0, "rest": 1.0})
    'products 0.75 rest 0.25'
    """
    return " ".join(f"{part} {each / sum(seconds.values()):.2f}" for part, each in seconds.items())


# ---- studies ----

RESNET, GPT = "experiments/studies/residual.py:gpu", "experiments/studies/methods.py:gpt_gpu"
STUDIES = {  # the first seed of runs, and of the GPT a quarter of its steps
    "ResNet-18, CIFAR-10: dense": (RESNET,),
    "ResNet-18, CIFAR-10: MVUE(dw) 2:4": (RESNET, "--config.sparsity.stages=mvue(2,4)"),
    "GPT of 19 M, 1000 steps: dense": (GPT, "--config.steps=1000"),
    "GPT of 19 M, 1000 steps: S-STE": (GPT, "--config.steps=1000", "--config.sparsity.blocks=s_ste(2,4)"),
    "ResNet-18, CIFAR-10: SDGP 2:4": (RESNET, "--config.sparsity.stages=sdgp(2,4)"),
}
LAUNCH = ("ml_collections", "orbax", "rich")  # packages without which no run begins


def study(name: str, device: Target) -> str:
    """Train a run of a study, or go on with it, and return its score. A row that is ended goes on where it was."""
    if device.interpret:
        return "not run: it takes hours without a GPU"
    lacking = [package for package in LAUNCH if importlib.util.find_spec(package) is None]
    if lacking:
        return f"not run: {', '.join(lacking)} is not installed"
    config_file, *changes = STUDIES[name]
    workdir = measured.own_tables().parent / "runs" / re.sub(r"\W+", "_", name)
    command = [sys.executable, "launch.py", f"--config={config_file}", f"--workdir={workdir}", *changes]
    with turns.alone():
        run = subprocess.run(command, capture_output=True, text=True, check=False)
    said = (run.stderr.strip().splitlines() or [""])[-1]
    if run.returncode:
        missing = run.returncode == 2 or said.startswith("ModuleNotFoundError")  # the data, or a package
        return f"{'not run' if missing else 'failed'}: {said}"
    about = json.loads((workdir / "run.json").read_text())
    return f"right: {about['metric']} {about['figures'][about['metric']]:.4f} after {about['steps']:,} steps"
