"""The kernels of a training step and what they read and write, counted in the program that is traced for a GPU."""

import math
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

import nmjax as nm
from experiments.bench.expected import DEVICE, LAYERS, METHODS, MODELS
from experiments.bench.measure import markdown
from experiments.bench.silicon.whole import loss_of

PACKS, MULTIPLIES = "nm_pack", "hopper_spmm"  # names of kernels
PRODUCTS = ("dot_general", "conv_general_dilated")  # those of XLA


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


def counts(rounds: int) -> str:
    """Return the table of ``bench counts``. Programs are traced and lowered ``rounds`` times, in turn."""
    rows = {}
    for model, (make, example) in MODELS.items():
        steps = {text: _step(make, example, text, "auto") for text in ("dense", *METHODS.values())}
        steps |= {f"{text}, by XLA": _step(make, example, text, "xla") for text in METHODS.values()}
        took = {name: [] for name in steps}
        for _ in range(rounds):
            for name, step in steps.items():
                took[name].append(_seconds(*step))
        for method, text in METHODS.items():
            with nm.kernels.on(DEVICE):
                ours, emulated = (
                    counted(jax.make_jaxpr(step)(*arguments).jaxpr)
                    for step, arguments in (steps[text], steps[f"{text}, by XLA"])
                )
            times = [statistics.median(took[name]) for name in (text, f"{text}, by XLA", "dense")]
            rows[f"{model}: {method}"] = [
                f"{ours.packing}",
                f"{(ours.packing_bytes - 4 * ours.activated) / ours.values:.3f}" if ours.values else "",
                f"{6 * ours.activated / 1e9:.2f}, {4 * ours.activated / 1e9:.2f}",
                f"{ours.packed} + {ours.dense}",
                f"{emulated.dense}",
                f"{(ours.packing_bytes - 4 * ours.activated) / 1e9:.2f} + {ours.product_bytes / 1e9:.2f}",
                f"{emulated.product_bytes / 1e9:.2f}",
                f"{times[0]:.1f} s, {times[0] / times[1]:.2f}, {times[0] / times[2]:.2f}",
            ]
    note = (
        f"A forward and a backward pass, traced for an {DEVICE} and counted in its jaxpr. Nothing is run. Bytes are "
        "those of the operands and results of kernels and of XLA's products. Emulated steps also read and write each "
        "pruned array. XLA may fuse that, so it cannot be counted here. A separate pass over "
        "the gradient of an activation function moves 6 bytes for each value: it reads two arrays and writes one. With "
        "`nm.fused` the packing kernel computes this gradient and moves only 4 bytes more. The table counts only the "
        "gradients that packing kernels compute."
    )
    head = [
        "", "packing kernels", "bytes per packed value", "GB for gradients of activation functions: separate, fused",
        "packed + dense products", "emulated: products", "GB of packing + products", "emulated: GB of products",
        "time to trace and lower, relative to emulated, relative to dense",
    ]  # fmt: skip
    return markdown("Kernels and bytes of a step", note, rows, head)


def counted(jaxpr: Any) -> Counted:
    """Count the kernels and products of a program. The body of a `scan` counts once for each iteration."""
    found = Counted()
    for eqn in jaxpr.eqns:
        name, kernel = eqn.primitive.name, eqn.params.get("name")
        read, written = (sum(map(_bytes, variables)) for variables in (eqn.invars, eqn.outvars))
        one = Counted()
        if kernel == PACKS:
            *_, second, largest = sorted([0, *map(_bytes, eqn.invars)])
            values = largest // 2
            one = Counted(1, values=values, activated=values * (second == largest), packing_bytes=read + written)
        elif kernel == MULTIPLIES:
            one = Counted(packed=1, product_bytes=read + written)
        elif name in PRODUCTS:
            one = Counted(dense=1, product_bytes=read + written)
        else:
            times = eqn.params.get("length", 1) if name == "scan" else 1
            for inner in _inside(eqn):
                one = _plus(one, Counted(*(times * v for v in counted(inner))))
        found = _plus(found, one)
    return found


def _plus(a: Counted, b: Counted) -> Counted:
    return Counted(*(x + y for x, y in zip(a, b, strict=True)))


def _bytes(variable: Any) -> int:
    shape = getattr(variable.aval, "shape", ())
    return math.prod(shape) * jnp.dtype(variable.aval.dtype).itemsize if hasattr(variable.aval, "dtype") else 0


def _inside(eqn: Any) -> Iterator[Any]:
    """Return the programs inside an instruction. Rules for derivatives and batches are skipped."""
    for value in jax.tree.leaves(
        list(eqn.params.values()), is_leaf=lambda v: hasattr(v, "jaxpr") or hasattr(v, "eqns")
    ):
        inner = getattr(value, "jaxpr", value)
        if hasattr(inner, "eqns"):
            yield inner


def _step(make: Callable[[], nnx.Module], example: Any, text: str, backend: str) -> tuple[Callable, tuple[Any, ...]]:
    """Return a forward and backward pass of a model, and its arguments as shapes."""

    def made() -> nnx.Module:
        model = make()
        nm.nnx.sparsify(model, nm.Recipe(((LAYERS, text), (r".*", "dense")), backend))
        nm.nnx.set_step(model, 1)
        return model

    with nm.kernels.on(DEVICE):
        model = nnx.eval_shape(made)
    graph, state = nnx.split(model)
    loss, _ = loss_of(example)

    def step(state: Any, batch: Any) -> Any:
        return nnx.value_and_grad(loss)(nnx.merge(graph, state), batch)

    return step, (state, example)


def _seconds(step: Callable, arguments: tuple[Any, ...]) -> float:
    """Return the seconds that tracing and lowering take. The function is new, so that no cache has its program."""
    start = time.perf_counter()
    with nm.kernels.on(DEVICE):
        jax.jit(lambda *arrays: step(*arrays)).trace(*arguments).lower(lowering_platforms=("cuda",))
    return time.perf_counter() - start
