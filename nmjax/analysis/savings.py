"""The time and memory that a plan expects a step to save on this device."""

import time
from collections.abc import Iterable
from functools import lru_cache

import jax
import jax.numpy as jnp

from nmjax.analysis.refusals import Use, slot_refusal
from nmjax.core import layer_paths
from nmjax.products.routes import Route
from nmjax.products.rule import kept_bytes
from nmjax.products.sparsity import Sparsity
from nmjax.pruners import identity


def of_time(layers: Iterable[tuple[int | None, Iterable[tuple[str, Route]]]], why: str) -> str:
    """Return the time that the compacted products of some layers save, as text. It is empty if none is compacted.

    Args:
      layers: For each layer the dense FLOPs of one product, and the routes of all.
      why: The reason of the routes that count.
    """
    compacted = lambda route: route.how == "compacted" and route.why == why
    costs = [(cost or 0, route.share) for cost, runs in layers for _, route in runs if compacted(route)]
    dense, left = sum(cost for cost, _ in costs), sum(cost * share for cost, share in costs)
    rate = flops_per_second() if dense else None
    if rate is None:
        return ""
    return f"; saves about {_ms((dense - left) / rate)} of {_ms(dense / rate)} ms here"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.0f}" if seconds >= 0.01 else f"{seconds * 1e3:.2g}"


@lru_cache
def _measured() -> float:
    x, dot = jnp.ones((1024, 1024)), jax.jit(jnp.dot)
    jax.block_until_ready(dot(x, x))
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        jax.block_until_ready(dot(x, x))
        best = min(best, time.perf_counter() - start)
    return 2 * 1024**3 / best


def flops_per_second() -> float | None:
    """Return the FLOPs per second of a dense float32 product on the device of this process.

    The first call measures a product of 1024 x 1024 matrices. Later calls return the same number.

    Returns:
      The number; None if programs are traced for a device that is not there (`nmjax.kernels.on`).

    >>> flops_per_second() > 1e6
    True
    """
    if getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None) is not None:
        return None
    return _measured()


def kept_of(sparsity: Sparsity, uses: list[Use], backend: str) -> tuple[int, int]:
    """Return the bytes of a layer's inputs, and those that the backward pass keeps of them.

    Args:
      sparsity: The pruner of each slot.
      uses: The products that a call asks the layer for.
      backend: The layer's backend.
    """
    if sparsity.drhs_lhs == identity or slot_refusal("drhs_lhs", sparsity, uses, True) is not None:
        return 0, 0
    found = [kept_bytes(use.op, use.lhs, use.rhs, sparsity, backend) for use in uses]
    stacked = uses[0].stacked if uses else 1
    return stacked * sum(before for before, _ in found), stacked * sum(after for _, after in found)


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
    return [f"The backward pass keeps {after:.3g} of {before:.3g} MiB of the inputs of {where}"]
