"""What sparse tensor cores can bring to a training step, computed from plans; and its kernels, counted in its program.

Nothing is measured but the time to trace and lower.
"""

import math
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

import nmjax as nm
from experiments.bench import compiled
from experiments.bench.measure import Table, in_turn
from experiments.bench.steps import LARGE, METHODS, loss, recipe
from experiments.training.device import peak_flops
from nmjax.kernels.cycles import EFFICIENCY, PACKING, PRUNING, TWICE, memory

DEVICE = "NVIDIA H200"
SPEEDS = (1.2, 1.5, 2.0)  # of a packed product, relative to the dense one
PACKS, MULTIPLIES = "nm_pack", "hopper_spmm"  # names of kernels
PRODUCTS = ("dot_general", "conv_general_dilated")  # those of XLA


def expected() -> Iterator[Table]:
    """Return the table of ``bench expected``: the gain of a step by Amdahl's law."""
    rows = {}
    for model, (make, example) in LARGE.items():
        abstract = nnx.eval_shape(make)
        for method, text in METHODS.items():
            rows[f"{model}: {method}"] = gain(abstract, example, text)
    speeds = ", ".join(map(str, SPEEDS))
    yield Table(
        "What to expect",
        f"Products alone, on an {DEVICE}, for a method in the linear layers of blocks: how many times as fast as the "
        f"dense step a step would be if its packed products ran at {speeds} times the dense speed. Packing counts "
        f"{PACKING} bytes a value, or {2 * TWICE * PACKING} for two products; its time is relative to the dense step. "
        f"Pruning by XLA, which emulated products "
        f"need, counts {PRUNING:.0f}. Dense products are assumed to run at {EFFICIENCY['dense']} of the peak, and "
        f"arrays to be read and written at {memory(DEVICE) / 1e12:.2f} TB/s. "
        "Other parts of a step, which take the same time in both, make the gain smaller. Computed, not measured.",
        ["", "FLOPs in packed products", "time to pack", "emulated", *(f"at {speed}" for speed in SPEEDS)], rows,
    )  # fmt: skip


def gain(model: nnx.Module, example: Any, text: str) -> list[Any]:
    """Return the row of a method: packed products, packing, and the gain if they are emulated and at `SPEEDS`."""
    with nm.kernels.on(DEVICE):
        plan = nm.nnx.plan(model, recipe(text, "pallas"), example)  # "auto" would look at the user's own tiles
    packed, packing, pruning = 0, 0.0, 0.0
    for layer in plan.layers:
        for product, route in layer.runs:
            assert route.how in ("packed", "dense"), (layer.path, product, route)
            if route.how == "packed" and route.shape is not None:
                packed += layer.flops or 0
                twice = [one.operand for _, one in layer.runs if one.how == "packed"].count(route.operand) > 1
                count = route.shape.m * route.shape.k
                packing += (TWICE if twice else 1) * PACKING * count / memory(DEVICE)
                pruning += (0.5 if twice and route.operand == "w" else 1) * PRUNING * count / memory(DEVICE)  # one mask
    rate = EFFICIENCY["dense"] * (peak_flops(DEVICE, "bfloat16") or 0)
    dense = plan.training[0] / rate
    at = lambda speed: dense / (dense - packed / rate * (1 - 1 / speed) + packing)
    return [f"{packed / plan.training[0]:.2f}", packing / dense, dense / (dense + pruning), *map(at, SPEEDS)]


class Counted(NamedTuple):
    """The kernels and products of a program.

    Attributes:
      packing: The number of kernels that pack.
      packed: The number of products in kernels.
      dense: The number of products of XLA.
      values: The number of 16-bit values that kernels pack.
      activated: The number of these values that the kernels also compute, as gradients of activation functions.
      packing_bytes: The bytes that packing kernels read and write.
      product_bytes: The bytes that all products read and write.
    """

    packing: int = 0
    packed: int = 0
    dense: int = 0
    values: int = 0
    activated: int = 0
    packing_bytes: int = 0
    product_bytes: int = 0


def counts(rounds: int, device: str | None = None) -> Iterator[Table]:
    """Return the table of ``bench counts``. Programs are traced and lowered ``rounds`` times, in turn."""
    if device is not None:
        from experiments.bench import machine_code  # which imports kernels

        yield from machine_code.counts() if device == "h200" else compiled.counts(device)
        return
    rows = {}
    for model, (make, example) in LARGE.items():
        steps = {(text, "auto"): gradients(make, example, text, "auto") for text in ("dense", *METHODS.values())}
        steps |= {(text, "xla"): gradients(make, example, text, "xla") for text in METHODS.values()}
        took = in_turn({key: partial(_lowered, *step) for key, step in steps.items()}, rounds)
        for method, text in METHODS.items():
            with nm.kernels.on(DEVICE):
                ours, emulated = (
                    counted(jax.make_jaxpr(step)(*arguments).jaxpr)
                    for step, arguments in (steps[text, "auto"], steps[text, "xla"])
                )
            times = [statistics.median(took[key]) for key in ((text, "auto"), (text, "xla"), ("dense", "auto"))]
            packing = ours.packing_bytes - 4 * ours.activated
            rows[f"{model}: {method}"] = [
                f"{ours.packing}",
                f"{packing / ours.values:.3f}" if ours.values else "",
                f"{6 * ours.activated / 1e9:.2f}, {4 * ours.activated / 1e9:.2f}",
                f"{ours.packed} + {ours.dense}",
                f"{emulated.dense}",
                f"{packing / 1e9:.2f} + {ours.product_bytes / 1e9:.2f}",
                f"{emulated.product_bytes / 1e9:.2f}",
                f"{times[0]:.1f} s, {times[0] / times[1]:.2f}, {times[0] / times[2]:.2f}",
            ]
    yield Table(
        "Kernels and bytes of a step",
        f"A forward and a backward pass, traced for an {DEVICE} and counted in its jaxpr. Nothing is run. Bytes are "
        "those of the operands and results of kernels and of XLA's products. Emulated steps also read and write each "
        "pruned array. XLA may fuse that, so it cannot be counted here. A separate pass over "
        "the gradient of an activation function moves 6 bytes for each value: it reads two arrays and writes one. With "
        "`nm.fused` the packing kernel computes this gradient and moves only 4 bytes more. The table counts only the "
        "gradients that packing kernels compute.",
        [
            "", "packing kernels", "bytes per packed value",
            "GB for gradients of activation functions: separate, fused", "packed + dense products",
            "emulated: products", "GB of packing + products", "emulated: GB of products",
            "time to trace and lower, relative to emulated, relative to dense",
        ], rows,
    )  # fmt: skip


def counted(jaxpr: Any) -> Counted:
    """Count the kernels and products of a program. The body of a `scan` counts once for each iteration."""
    found = Counted()
    for eqn in jaxpr.eqns:
        name, kernel = eqn.primitive.name, eqn.params.get("name")
        moved = sum(map(_bytes, (*eqn.invars, *eqn.outvars)))
        if kernel == PACKS:
            *_, second, largest = sorted([0, *map(_bytes, eqn.invars)])
            values = largest // 2
            each = [Counted(1, values=values, activated=values * (second == largest), packing_bytes=moved)]
        elif kernel == MULTIPLIES:
            each = [Counted(packed=1, product_bytes=moved)]
        elif name in PRODUCTS:
            each = [Counted(dense=1, product_bytes=moved)]
        else:
            times = eqn.params.get("length", 1) if name == "scan" else 1
            each = [Counted(*(times * v for v in counted(inner))) for inner in _inside(eqn)]
        found = Counted(*map(sum, zip(found, *each, strict=True)))
    return found


def _bytes(variable: Any) -> int:
    shape = getattr(variable.aval, "shape", ())
    return math.prod(shape) * jnp.dtype(variable.aval.dtype).itemsize if hasattr(variable.aval, "dtype") else 0


def _inside(eqn: Any) -> Iterator[Any]:
    """Return the programs inside an instruction. Rules for derivatives and batches are skipped."""
    is_program = lambda v: hasattr(v, "jaxpr") or hasattr(v, "eqns")
    for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=is_program):
        inner = getattr(value, "jaxpr", value)
        if hasattr(inner, "eqns"):
            yield inner


def gradients(
    make: Callable[[], nnx.Module], example: Any, text: str, backend: str = "auto"
) -> tuple[Callable, tuple[Any, ...]]:  # fmt: skip
    """Return a forward and backward pass of a model, and its arguments as shapes."""

    def made() -> nnx.Module:
        model = make()
        nm.nnx.sparsify(model, recipe(text, backend))
        nm.nnx.set_step(model, 1)
        return model

    with nm.kernels.on(DEVICE):
        graph, state = nnx.split(nnx.eval_shape(made))
    step = lambda state, batch: nnx.value_and_grad(loss)(nnx.merge(graph, state), batch)
    return step, (state, example)


def _lowered(step: Callable, arguments: tuple[Any, ...]) -> None:
    """Trace and lower a step. The function is new, so that no cache has its program."""
    with nm.kernels.on(DEVICE):
        jax.jit(lambda *arrays: step(*arrays)).trace(*arguments).lower(lowering_platforms=("cuda",))
