"""The time and memory that a plan expects a step to save on this device."""

import math
import time
from collections.abc import Iterable
from functools import lru_cache

import jax
import jax.numpy as jnp

from nmjax.analysis.refusals import Use, slot_refusal
from nmjax.core import layer_paths, random
from nmjax.core.context import Ctx
from nmjax.kernels.targets import platform
from nmjax.products.applying import StaticProduct, kept_of_x
from nmjax.products.routes import Route, compacted_in, explain
from nmjax.products.sparsity import Sparsity
from nmjax.pruners import identity

Runs = Iterable[tuple[str, Route]]


def seconds_of(cost: int | None, runs: Runs, speed: float | None) -> float | None:
    """Return the seconds that the compacted products of a layer save; None if the speed is not known.

    Args:
      cost: The dense FLOPs of one product.
      runs: The routes of all.
      speed: What `speed_of` returned.
    """
    return None if speed is None else sum((cost or 0) * (1 - route.share) for _, route in runs) / speed


def of_time(layers: Iterable[tuple[int | None, Runs]], why: str, speed: float | None) -> str:
    """Return the time that compacted or packed products of some layers are expected to save, as text.

    It is empty if it is not known.

    Args:
      layers: For each layer the dense FLOPs of one product, and the routes of all.
      why: The reason of the routes that count.
      speed: What `speed_of` returned.
    """
    routes = [(cost or 0, route) for cost, runs in layers for _, route in runs if route.why == why]
    calls = [(cost / math.prod(r.packed_shape.sides), r.times) for cost, r in routes if r.times is not None]
    if dense := sum(count * times.dense for count, times in calls):
        packing = sum(count * times.packing for count, times in calls) / dense
        left = packing + sum(count * times.packed for count, times in calls) / dense
        if any(route.formats for _, route in routes):
            return f"; expected at {left:.2f} of the time of dense FP8 products, without making forms"
        return f"; expected at {left:.2f} of the dense time, {packing:.2f} to pack"
    costs = [(cost, route.share) for cost, route in routes if route.how == "compacted"]
    dense, left = sum(cost for cost, _ in costs), sum(cost * share for cost, share in costs)
    if speed is None or not dense:
        return ""
    return f"; saves about {_ms((dense - left) / speed)} of {_ms(dense / speed)} ms here"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.0f}" if seconds >= 0.01 else f"{seconds * 1e3:.2g}"


def speed_of(layers: Iterable[Runs]) -> float | None:
    """Return the FLOPs per second of a dense float32 product on this device, if a layer has a compacted product.

    The first call measures a product of 1024 x 1024 matrices. Later calls return the same number.

    Args:
      layers: The routes of each layer.

    Returns:
      The number; None if it is not needed, or if programs are traced for a device that is not there, or for a GPU or
      TPU, where so small a product does not show the speed.
    """
    needed = any(route.how == "compacted" for runs in layers for _, route in runs)
    elsewhere = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None) is not None
    return _measured() if needed and not elsewhere and platform() == "cpu" else None


@lru_cache
def _measured() -> float:
    with jax.ensure_compile_time_eval():  # also while a program is traced
        x, dot = jnp.ones((1024, 1024)), jax.jit(jnp.dot)
        jax.block_until_ready(dot(x, x))
        best = float("inf")
        for _ in range(3):
            start = time.perf_counter()
            jax.block_until_ready(dot(x, x))
            best = min(best, time.perf_counter() - start)
    return 2 * 1024**3 / best


def kept_of(sparsity: Sparsity, uses: list[Use], backend: str) -> tuple[int, int]:
    """Return the bytes of a layer's inputs, and those that the backward pass keeps of them.

    Both are 0 if ``dw_x`` is empty or refused. If a kernel keeps its own form of an input, the whole input counts.

    Args:
      sparsity: The pruner of each slot.
      uses: The products that a call asks the layer for.
      backend: The layer's backend.
    """
    if sparsity.dw_x == identity or slot_refusal("dw_x", sparsity, uses, True) is not None:
        return 0, 0
    found = [_kept_bytes(use, sparsity, backend) for use in uses]
    stacked = uses[0].stacked if uses else 1
    return stacked * sum(before for before, _ in found), stacked * sum(after for _, after in found)


def _kept_bytes(use: Use, sparsity: Sparsity, backend: str) -> tuple[int, int]:
    """Return the bytes of x, and those that the backward pass keeps of it."""
    x = jax.ShapeDtypeStruct(use.lhs.shape, use.lhs.dtype)
    dense, routes = x.size * x.dtype.itemsize, explain(use.op, use.lhs, use.rhs, sparsity, backend)
    if routes["dw"].takes("x"):
        return dense, dense  # the kernel's own form of x is smaller, but it is not counted
    product = StaticProduct(use.op, sparsity, None, None, compacted_in(routes))
    kept = jax.eval_shape(lambda x: kept_of_x(product, x, use.rhs, x, Ctx(random.words(0))), x)
    return dense, sum(v.size * v.dtype.itemsize for v in jax.tree.leaves(kept)) if kept is not None else dense


def of_memory(layers: Iterable[tuple[str, tuple[int, int]]]) -> list[str]:
    """Return a line about the layers of whose inputs the backward pass keeps less; none if there are none.

    Args:
      layers: For each layer its path, and what `kept_of` returned.
    """
    less = [(path, kept) for path, kept in layers if kept[1] < kept[0]]
    if not less:
        return []
    before, after = (sum(kept[i] for _, kept in less) / 2**20 for i in (0, 1))
    ranges = [layer_paths.short(paths) for paths in layer_paths.alike((path, None, path) for path, _ in less)]
    where = ", ".join(layer_paths.gathered(ranges))
    return [
        f"Without remat, the backward pass keeps {after:.3g} of {before:.3g} MiB of the inputs of {where}. "
        "An input that several layers read counts for each of them."
    ]
