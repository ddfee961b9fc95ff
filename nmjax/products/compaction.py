"""Compacted products: n of every m rows of both operands are gathered, and what is left is multiplied.

An operand that `rows` prunes has rows of zeros along the axis that the product contracts. Their terms are zeros, so the
product is that of two smaller operands. The operation itself stays the same: dimension numbers do not depend on sizes.
Shapes are static, because exactly n rows of each group are gathered. A group that keeps fewer is filled up with rows of
zeros. Nothing is sorted or scattered. Groups stay in place, so a device gathers its own rows only.

A choice has the axes ``[*batch, *outer, groups, n]``: those of the product's batch; the outer axes of a contraction
over several axes, unless groups run over them; the groups; and the kept rows of a group.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from nmjax.core import groups, merging
from nmjax.core.context import Ctx
from nmjax.core.refusal import Refusal
from nmjax.products.operations import Conv, Operation, RaggedDot, result_shape
from nmjax.products.pruning import Operand, Shaped, along
from nmjax.products.slot import Slot
from nmjax.pruners.whole_rows import norms, rows, scaled


class Choice(NamedTuple):
    """The rows of an operand that a product multiplies.

    Attributes:
      places: The places of the kept rows in their groups.
      scales: Their factors.
    """

    places: Int[Array, "..."]
    scales: Float[Array, "..."]


class Rows(NamedTuple):
    """The rows that a product multiplies.

    Attributes:
      values: The rows, times their factors.
      places: Their places in their groups.
    """

    values: Float[Array, "..."]
    places: Int[Array, "..."]


class _View(NamedTuple):
    """An operand with its groups split, and the axes that a choice has.

    Attributes:
      array: The operand, with groups on ``axis`` and members on ``axis + 1``.
      axis: The axis of groups.
      order: The axes of a choice except the last, as axes of the merged operand before its groups are split.
      restore: Gives an array with a shorter contraction the axes of the operand.
    """

    array: jax.Array
    axis: int
    order: tuple[int, ...]
    restore: merging.Move


def choose(label: str, p: rows, x: jax.Array, operand: Operand, ctx: Ctx) -> Choice:
    """Return the rows that a pruner keeps.

    Args:
      label: The slot and its pruner, which begin every error.
      p: The pruner. It has a pattern n:m.
      x: The operand.
      operand: Where its axes lie.
      ctx: What the pruner reads.
    """
    scales, _ = along(label, p, x, operand, ctx, p.scales)
    assert p.facts.pattern is not None
    n, m = p.facts.pattern
    view = _view(x, operand, m)
    rest = tuple(a for a in range(scales.ndim) if a not in _unsplit(view))
    scales = jnp.squeeze(scales, rest)  # the remaining axes are in ascending order
    scales = groups.split(jnp.transpose(scales, _ranks(view.order)), len(view.order) - 1, m)
    kept = scales != 0
    number = jnp.cumsum(kept, -1, dtype=jnp.int32)[..., None, :]
    nth = lax.broadcasted_iota(jnp.int32, (*scales.shape[:-1], n, m), scales.ndim - 1) + 1
    hit = kept[..., None, :] & (number == nth)
    place = lax.broadcasted_iota(jnp.int32, hit.shape, hit.ndim - 1)
    return Choice(jnp.sum(jnp.where(hit, place, 0), -1), jnp.sum(jnp.where(hit, scales[..., None, :], 0), -1))


def take(
    x: jax.Array, operand: Operand, places: Int[Array, "..."], m: int, scales: Float[Array, "..."] | None = None,
    kernels: Any = None,
) -> jax.Array:  # fmt: skip
    """Return the chosen rows of an operand, in the order of its axes.

    Args:
      x: The operand that was chosen from, or the other one of the product.
      operand: Where its axes lie.
      places: The places of the rows in their groups.
      m: The size of a group.
      scales: Their factors, if they are to be multiplied.
      kernels: The device whose kernels take rows, or None (`nmjax.core.context.Ctx`).
    """
    view = _view(x, operand, m)
    here = [a + (a > view.axis) for a in _unsplit(view)]  # the axes of a choice in `view.array`, without the members
    chosen = sorted([*here, view.axis + 1])
    rising = np.argsort(view.order).tolist()  # the order in which a choice's axes lie in the operand
    count = len(rising)
    moved = [a for i in rising for a in ((i, count) if i == count - 1 else (i,))]  # kept rows right after groups
    places = jnp.transpose(places, moved)
    scales = None if scales is None else jnp.transpose(scales, moved)
    if kernels is not None and view.axis == view.array.ndim - 3:  # rows of the last two axes
        front = [size if a in here else 1 for a, size in enumerate(view.array.shape[: view.axis])]
        spread = lambda v: jnp.broadcast_to(
            v.reshape(*front, *v.shape[-2:]), (*view.array.shape[: view.axis], *v.shape[-2:])
        )
        both = (spread(places), None if scales is None else spread(scales))
        taken = kernels.take(groups.unsplit(view.array, view.axis), *both, m)
        if taken is not None:
            return view.restore(taken)
    batched = tuple(i for i, a in enumerate(chosen) if a != view.axis + 1)
    dims = lax.GatherDimensionNumbers(
        offset_dims=tuple(a for a in range(view.array.ndim) if a not in chosen),
        collapsed_slice_dims=(view.axis + 1,),
        start_index_map=(view.axis + 1,),
        operand_batching_dims=tuple(here),
        start_indices_batching_dims=batched,
    )
    sizes = [1 if a in chosen else size for a, size in enumerate(view.array.shape)]
    taken = lax.gather(view.array, places[..., None], dims, sizes, mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS)
    if scales is not None:
        shape = [size if a in chosen else 1 for a, size in enumerate(taken.shape)]
        taken = scaled(taken, scales.reshape(shape))
    return view.restore(groups.unsplit(taken, view.axis))


def partner_norms(own: Operand, ndim: int, other: jax.Array, operand: Operand) -> jax.Array:
    """Return the norms of the rows of a product's other operand, in the order of the own operand's axes.

    Args:
      own: Where the axes of the own operand lie.
      ndim: The number of its dimensions.
      other: The other operand.
      operand: Where its axes lie.
    """
    theirs, mine = (*operand.batch, *operand.contract), (*own.batch, *own.contract)
    found = norms(other, theirs)
    found = jnp.squeeze(found, tuple(a for a in range(other.ndim) if a not in theirs))
    found = jnp.transpose(found, np.argsort(np.argsort(theirs)).tolist())  # as `theirs` lists the axes
    found = jnp.transpose(found, np.argsort(mine).tolist())
    return jnp.expand_dims(found, tuple(a for a in range(ndim) if a not in mine))


def operation_refusal(op: Operation, lhs: Shaped, rhs: Shaped, product: str, operand: str) -> Refusal | None:
    """Return why a product of an operation cannot be compacted; None if it can.

    Args:
      op: The operation.
      lhs, rhs: Its operands, or their shapes.
      product: "y", "dx" or "dw".
      operand: The operand whose rows are chosen.
    """
    if isinstance(op, RaggedDot) and product == "dw":
        return Refusal("its tokens are sorted by expert, and how many each expert has is known only from a call")
    if not isinstance(op, Conv):
        return None
    if op.feature_group_count * op.batch_group_count > 1:
        return Refusal("it is a convolution with groups")
    return tokens_refusal(op, lhs, rhs, operand) if product == "dw" else None


def tokens_refusal(op: Operation, lhs: Shaped, rhs: Shaped, operand: str) -> Refusal | None:
    """Return why dw does not multiply each row of x with exactly one row of g; None if it does.

    Args:
      op: The operation.
      lhs, rhs: Its operands, or their shapes.
      operand: The operand whose rows are chosen, x or g.
    """
    if not isinstance(op, Conv):
        return None
    window = tuple(rhs.shape[a] for a in op.dims.rhs_spec[2:])
    if set(window) != {1}:
        return Refusal("it is a convolution whose kernel is larger than 1, so dw multiplies patches of x")
    sizes, padding = tuple(lhs.shape[a] for a in op.dims.lhs_spec[2:]), op.padding
    if isinstance(padding, str):
        padding = lax.padtype_to_pads(sizes, window, op.window_strides, padding)
    dilated = {*(op.lhs_dilation or ()), *(op.rhs_dilation or ())} - {1}
    if any(map(any, padding)) or dilated or op.feature_group_count * op.batch_group_count > 1:
        return Refusal("it is a convolution with padding, dilation or groups")
    if np.argsort(op.dims.lhs_spec[2:]).tolist() != np.argsort(op.dims.out_spec[2:]).tolist():
        return Refusal("it is a convolution whose x and y have their spatial axes in different orders")
    if operand == "x" and set(op.window_strides) != {1}:
        return Refusal("it is a convolution with strides, which skip rows of x")
    return None


def partner_refusal(op: Operation, lhs: Shaped, rhs: Shaped, slot: Slot) -> Refusal | None:
    """Return why a slot's pruner cannot read the norms of the other operand's rows; None if it can, or reads none."""
    if not slot.pruner.facts.reads_partner or not slot.name.startswith("dw_"):
        return None
    refusal = tokens_refusal(op, lhs, rhs, "x" if slot.name == "dw_x" else "g")
    return None if refusal is None else Refusal(f"it reads the rows of both operands, but {refusal}. Write by='own'.")


def without_strides(op: Operation, x: jax.Array) -> tuple[Operation, jax.Array]:
    """Return an operation without strides, and the rows of x that the operation does not skip.

    Args:
      op: An operation that `tokens_refusal` does not refuse.
      x: Its left operand.
    """
    if not isinstance(op, Conv) or set(op.window_strides) == {1}:
        return op, x
    steps = [1] * x.ndim
    for axis, stride in zip(op.dims.lhs_spec[2:], op.window_strides, strict=True):
        steps[axis] = stride
    return replace(op, window_strides=(1,) * len(op.window_strides)), lax.slice(x, [0] * x.ndim, x.shape, steps)


FLOPS_PER_BYTE = {"cpu": 14.0, "gpu": 300.0, "tpu": 300.0}
"""The FLOPs of a dense product that take as long as moving one byte.

On a CPU it was fitted to the times of single products, which ``experiments.bench compaction`` measures. On other
devices it is the ratio of peak FLOPs to memory bandwidth in their data sheets.
"""


def expected(
    op: Operation, lhs: jax.ShapeDtypeStruct, rhs: jax.ShapeDtypeStruct, slots: Mapping[str, Slot], operand: str,
    platform: str,
) -> float:  # fmt: skip
    """Return the expected time of a compacted product, as a share of the dense product's.

    It is n/m, plus the time to move the bytes that choosing and gathering rows read and write.

    Args:
      op: The operation.
      lhs, rhs: The shapes of its operands.
      slots: The slots of the product's operands: x, w and g.
      operand: The one whose rows are chosen. Its slot has a pattern n:m.
      platform: "cpu", "gpu" or "tpu".

    Returns:
      The share; infinity if there is nothing to multiply.
    """
    weight = op.operands(lhs.ndim, rhs.ndim)["y_w"]
    terms = math.prod(rhs.shape[a] for a in (*weight.contract, *(weight.space if isinstance(op, Conv) else ())))
    flops = 2 * result_shape(op, lhs, rhs).size * terms
    if not flops:
        return math.inf
    moved = moved_bytes(op, lhs, rhs, slots, operand, platform)
    return _share(slots[operand]) + moved * FLOPS_PER_BYTE.get(platform, 300.0) / flops


def moved_bytes(
    op: Operation, lhs: jax.ShapeDtypeStruct, rhs: jax.ShapeDtypeStruct, slots: Mapping[str, Slot], operand: str,
    platform: str,
) -> float:  # fmt: skip
    """Return the bytes that choosing and gathering rows move. The arguments are those of `expected`.

    A CPU computes in float32, so narrower values cost as much there.
    """
    arrays = {"x": lhs, "w": rhs, "g": result_shape(op, lhs, rhs)}
    least = 4 if platform == "cpu" else 1
    size = {name: arrays[name].size * max(arrays[name].dtype.itemsize, least) for name in slots}
    read = sum(size.values()) if slots[operand].pruner.facts.reads_partner else size[operand]  # for the norms
    return read + 2 * _share(slots[operand]) * sum(size.values())  # kept rows are read and written


def _share(slot: Slot) -> float:
    assert slot.pattern is not None
    return slot.pattern[0] / slot.pattern[1]


def _view(x: jax.Array, operand: Operand, m: int) -> _View:
    merged = merging.merge(x, operand.contract, m)
    assert merged is not None, "choose has refused it"
    alone = (merged.axes[a] for a in (*operand.batch, *operand.contract))
    order = [axis for axis in alone if axis is not None and axis != merged.axis]
    return _View(groups.split(merged.array, merged.axis, m), merged.axis, (*order, merged.axis), merged.restore)


def _unsplit(view: _View) -> list[int]:
    """Return the axes of a choice, rising, as axes of the operand before groups were split."""
    return sorted(view.order)


def _ranks(order: tuple[int, ...]) -> list[int]:
    """Return the permutation that brings axes in ascending order into the given order."""
    return np.argsort(np.argsort(order)).tolist()
