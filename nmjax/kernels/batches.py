"""Kernels over a batch, under `jax.vmap` and `jax.shard_map`."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.typing import DTypeLike


def mapped(call: Callable[..., Any]) -> Callable[..., Any]:
    """Make a kernel over arrays with a batch in front ready for `jax.vmap` and `jax.shard_map`.

    vmap enlarges the batch. Under shard_map, if one input varies over an axis, all are marked as varying. The kernel is
    a jitted function, so that it is traced and lowered once for all layers of a shape.
    """
    once = jax.jit(call)

    @custom_vmap
    def mapped(*arrays: jax.Array) -> Any:
        axes = varying(*arrays)
        out = once(*(as_varying(v, axes) for v in arrays))
        return jax.tree.map(lambda v: as_varying(v, axes), out)

    @mapped.def_vmap
    def rule(size: int, batched: Sequence[bool], *arrays: jax.Array) -> tuple[Any, Any]:
        spread = lambda v, is_batched: v if is_batched else jnp.broadcast_to(v, (size, *v.shape))
        enlarged = [spread(v, b) for v, b in zip(arrays, batched, strict=True)]
        out = mapped(*(v.reshape(-1, *v.shape[2:]) for v in enlarged))
        out = jax.tree.map(lambda v: v.reshape(size, -1, *v.shape[1:]), out)
        return out, jax.tree.map(lambda _: True, out)

    return mapped


# ---- devices that hold different values, in jax.shard_map ----


def varying(*inputs: jax.Array | jax.ShapeDtypeStruct) -> frozenset[str]:
    """Return the axes of `jax.shard_map` along which at least one of the inputs varies."""
    return frozenset().union(*(jax.typeof(v).manual_axis_type.varying for v in inputs))


def result(shape: tuple[int, ...], dtype: DTypeLike, *inputs: jax.Array) -> jax.ShapeDtypeStruct:
    """Return the type of a kernel's result, which varies along every axis that an input varies along."""
    kind = jax.typeof(inputs[0]).manual_axis_type.update(varying=varying(*inputs))
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=kind)


def as_varying(y: jax.Array, axes: frozenset[str]) -> jax.Array:
    """Mark a value as varying along these axes."""
    missing = axes - varying(y)
    return jax.lax.pcast(y, tuple(missing), to="varying") if missing else y
