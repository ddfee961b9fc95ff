"""Pruning on a TPU in one pass, and products of packed weights: what its kernels serve, and the calls.

This file imports no Pallas, so that a plan can be made where no kernel can run.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, PartitionSpec
from jax.typing import ArrayLike

from nmjax.core import groups, random
from nmjax.core.context import Ctx
from nmjax.core.pruner import Pruner
from nmjax.core.refusal import Refusal
from nmjax.core.value import Value
from nmjax.kernels.batches import mapped
from nmjax.kernels.family import Shape
from nmjax.kernels.format import Packed
from nmjax.pruners import identity

MOST = 16  # members of a group


@dataclass(frozen=True, repr=False)
class Pruning(Value):
    """A TPU, whose kernels prune in one pass. Products pass it to pruners as ``ctx.kernels``.

    Args:
      kind: The device, as ``jax.Device.device_kind`` names it.
      interpret: True to simulate its kernels on a CPU.

    >>> import nmjax as nm
    >>> print(Pruning("TPU v5 lite").refusal(nm.mse(2, 32), (8, 64), jnp.float32, 1))
    mse(2,32) has groups of 32, and kernels prune groups of at most 16
    """

    kind: str
    interpret: bool = False

    def refusal(
        self, p: Pruner, shape: tuple[int, ...], dtype: Any, axis: int, other: int | None = None
    ) -> Refusal | None:
        """Return the reason why XLA prunes an array in the place of a kernel, or None if a kernel does.

        Args:
          p: The pruner.
          shape: The shape of the array.
          dtype: Its dtype.
          axis: The axis of the groups, not negative.
          other: The other axis of a pruner of tiles.
        """
        form, m = p.kernel_form, p.facts.block
        if form.members is None and form.tile is None:
            parts = [part for part in p.parts if part != identity]
            if not parts or p.facts.reorders:
                return Refusal(f"{p} has no kernel")
            refusals = (self.refusal(part, shape, dtype, axis, other) for part in parts)
            return next((refusal for refusal in refusals if refusal is not None), None)
        if m > MOST:
            return Refusal(f"{p} has groups of {m}, and kernels prune groups of at most {MOST}")
        if jnp.dtype(dtype).name not in ("float32", "bfloat16"):
            return Refusal(f"{jnp.dtype(dtype).name}: kernels prune float32 and bfloat16")
        if len(shape) < 2:
            return Refusal(f"an array of shape {shape} has no tiles of 8 x 128")
        if form.members is None and other is not None and {axis, other} != {len(shape) - 1, len(shape) - 2}:
            return Refusal(f"{p} prunes axes {axis} and {other}, and kernels prune tiles of the last two")
        return None

    def prune(self, p: Pruner, x: jax.Array, axis: int, ctx: Ctx, mask: bool = False) -> jax.Array | None:
        """Return ``p(x, axis, ctx)`` or ``p.mask(x, axis, ctx)``, computed by a kernel; None if no kernel serves."""
        axis = groups.position(x.ndim, axis)
        other = ctx.axes_of(x.ndim, axis).other if p.facts.tiles else None
        form, spec = p.kernel_form, _explicit(x)
        if form.members is None and form.tile is None:
            return None  # a part of it may have a kernel
        if self.refusal(p, x.shape, x.dtype, axis, other) is not None:
            return None
        sides = x.shape if spec is None else jax.typeof(x).sharding.shard_shape(x.shape)
        draws = x.size if form.each else x.size // p.facts.block
        # What the definition refuses, it refuses with its own words.
        if not x.size or any(sides[a] % p.facts.block for a in (axis, other) if a is not None):
            return None
        if p.facts.stochastic and (ctx.key is None or draws > 2**32):
            return None
        if p.facts.has_state and jnp.shape(ctx.state):
            return None
        if spec is not None and x.ndim - axis > 4 and any(spec[axis + 1 : -2]):
            return None  # the axes between are one in the kernel
        if mask:
            return _pruned(self, p, axis, lax.stop_gradient(x), ctx.traceable(), mask=True) != 0
        return _differentiable(self, p, axis, x, ctx.traceable())

    def take(self, x: jax.Array, places: jax.Array, scales: jax.Array | None, m: int) -> jax.Array | None:
        """Return n of every m rows ``[..., rows, columns]``, times their factors, computed by a kernel.

        Args:
          x: The rows.
          places: The places of the kept rows in their groups: [..., groups, n].
          scales: Their factors, or None.
          m: The size of a group.

        Returns:
          The kept rows; None if the kernel does not serve such an array.
        """
        spec = _explicit(x)
        rows = x.shape[-2] if spec is None else jax.typeof(x).sharding.shard_shape(x.shape)[-2]
        if m > MOST or rows % m or x.dtype.name not in ("float32", "bfloat16"):
            return None
        scales = jnp.ones(places.shape, jnp.float32) if scales is None else scales.astype(jnp.float32)
        if spec is None:
            return _take(self, x, places, scales, m)
        chosen = PartitionSpec(*spec[:-1], None)
        places, scales = jax.reshard(places, chosen), jax.reshard(scales, chosen)
        call = partial(_take, self, m=m)
        return jax.shard_map(call, in_specs=(spec, chosen, chosen), out_specs=spec, check_vma=False)(x, places, scales)

    def product_refusal(self, shape: Shape, b: jax.Array, configured: bool = False) -> Refusal | None:
        """Return the reason why XLA multiplies an array packed in ``sublanes``, or None if a kernel does.

        Args:
          shape: The product.
          b: The dense operand.
          configured: True if the caller chose tiles.
        """
        if min(shape.sides) < 1:
            return Refusal(f"M, N, K = {shape.m}, {shape.n}, {shape.k}: it is empty")
        if shape.dtype not in ("float32", "bfloat16") or b.dtype != shape.dtype:
            return Refusal(
                f"the operands are {shape.dtype} and {b.dtype.name}: a TPU's kernel takes both in float32 or bfloat16"
            )
        if shape.out not in ("float32", "bfloat16"):
            return Refusal(f"the result is {shape.out}, which no kernel of a TPU writes")
        if configured:
            return Refusal("the kernel of a TPU has no config")
        if _explicit(b) is not None:
            return Refusal("the mesh has explicit axes: call spmm in jax.shard_map over all axes")
        return None

    def multiply(self, packed: Packed, b: jax.Array, scale: ArrayLike | None, shape: Shape) -> jax.Array:
        """Multiply an array packed in ``sublanes`` by a dense one, as `nmjax.kernels.spmm` describes."""
        batch = b.shape[:-2]
        scales = jnp.broadcast_to(jnp.asarray(1.0 if scale is None else scale, jnp.float32), batch).reshape(-1)
        x = jnp.swapaxes(b, -1, -2) if shape.n_major else b
        flat = (v.reshape(math.prod(batch), *v.shape[-2:]) for v in (packed.values, packed.indices, x))
        y = _kernel("tpu_spmm", "spmm", dtype=shape.out, interpret=self.interpret)(*flat, scales)
        y = y.reshape(*batch, *y.shape[1:])
        return y if shape.transpose else jnp.swapaxes(y, -1, -2)


@lru_cache
def _kernel(file: str, name: str, **options: Any) -> Callable[..., jax.Array]:
    """Return a kernel as a function of arrays with a batch in front. Its file, which needs Pallas, is imported late."""
    return mapped(lambda *arrays: getattr(import_module(f"nmjax.kernels.{file}"), name)(*arrays, **options))


def _explicit(x: jax.Array) -> PartitionSpec | None:
    """Return how an array lies on a mesh of explicit axes; None if there is none."""
    mesh = jax.sharding.get_abstract_mesh()
    return jax.typeof(x).sharding.spec if not mesh.empty and AxisType.Explicit in mesh.axis_types else None


def _take(device: Pruning, x: jax.Array, places: jax.Array, scales: jax.Array, m: int) -> jax.Array:
    call = _kernel("tpu_prune", "take", m=m, interpret=device.interpret)
    y = call(*(v.reshape(-1, *v.shape[-2:]) for v in (x, places, scales)))
    return y.reshape(*x.shape[:-2], *y.shape[-2:])


@partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2))
def _differentiable(device: Pruning, p: Pruner, axis: int, x: jax.Array, ctx: Ctx) -> jax.Array:
    """Prune by a kernel, with the derivative of the definition."""
    return _pruned(device, p, axis, x, ctx)


def _pruned(device: Pruning, p: Pruner, axis: int, x: jax.Array, ctx: Ctx, mask: bool = False) -> jax.Array:
    form = p.kernel_form
    words = jnp.zeros(2, jnp.uint32)
    if p.facts.stochastic:
        words = jnp.concatenate([jnp.stack(random.scrambled(random.words(key))) for key in form.keys(ctx.key)])
    scalar = (ctx.state if p.facts.has_state else None) if form.scalar is None else form.scalar(ctx, x.dtype)
    scalar = jnp.asarray(1.0 if scalar is None else scalar, jnp.float32).reshape(1)
    call = partial(_local, device, p, axis, x.shape, mask)
    spec = _explicit(x)
    if spec is None:
        return call((0,) * x.ndim, x, words[None], scalar)

    def part(x: jax.Array, words: jax.Array, scalar: jax.Array) -> jax.Array:
        cuts = zip(spec or (), x.shape, strict=True)
        return call([lax.axis_index(names) * size if names else 0 for names, size in cuts], x, words, scalar)

    specs = (spec, PartitionSpec(), PartitionSpec())
    return jax.shard_map(part, in_specs=specs, out_specs=spec, check_vma=False)(x, words[None], scalar)


@_differentiable.defjvp
def _(device: Pruning, p: Pruner, axis: int, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    by_xla = lambda x, ctx: p(x, axis, replace(ctx, kernels=None))
    return _differentiable(device, p, axis, *primals), jax.jvp(by_xla, primals, tangents)[1]


def _local(
    device: Pruning, p: Pruner, axis: int, whole: tuple[int, ...], mask: bool, start: Any, x: jax.Array,
    words: jax.Array, scalar: jax.Array,
) -> jax.Array:  # fmt: skip
    """Prune an array that begins at ``start`` in the whole one."""
    view = _view(p, axis, x.ndim)
    front = axis if view == "matrices" else x.ndim - 2
    core = lambda sides: _core(view, tuple(sides[front:]))
    shape, full = core(x.shape), core(whole)
    draws = math.prod(full) if p.kernel_form.each else math.prod(full) // p.facts.block
    numbers = jnp.zeros(x.shape[:front], jnp.uint32)
    for d in range(front):
        place = lax.broadcasted_iota(jnp.uint32, numbers.shape, d) + jnp.asarray(start[d]).astype(jnp.uint32)
        numbers = numbers + place * np.uint32(math.prod(whole[d + 1 : front]) * draws % 2**32)
    origin = list(start[front:])
    if view == "matrices":
        origin = [origin[0], *([0] if len(full) > len(origin) else [origin[1]]), *origin[-2:]]
    by = [p.facts.block if d == (1 if view == "columns" else 0) else 1 for d in range(len(origin))]
    origin = jnp.stack([jnp.asarray(v, jnp.int32) // size for v, size in zip(origin, by, strict=True)])
    options = {"pruner": p, "view": view, "whole": full, "mask": mask, "interpret": device.interpret}
    call = _kernel("tpu_prune", "prune", **options)
    flat = x.reshape(-1, *shape)
    y = call(flat, words, scalar, lax.bitcast_convert_type(numbers.reshape(-1), jnp.int32), origin[None])
    return y.reshape(x.shape)


def _view(p: Pruner, axis: int, ndim: int) -> str:
    if p.kernel_form.members is None:
        return "tiles"
    return {ndim - 1: "columns", ndim - 2: "rows"}.get(axis, "matrices")


def _core(view: str, sides: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of one array of the batch as the kernel sees it."""
    return (sides[0], math.prod(sides[1:-2]), *sides[-2:]) if view == "matrices" else sides
