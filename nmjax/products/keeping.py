"""The left operand as the backward pass will use it: only what dw needs of it is kept.

If the rows of x that dw multiplies are chosen by ``dw_x``, these rows are kept. If ``dw_x`` prunes entries of x
n:m, the packed form is kept: n values of each group, and a bit for each entry. The choice is made in the forward pass,
so that x itself can be freed.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, UInt8

from nmjax.core import fusion, groups, merging
from nmjax.core.pruner import Pattern
from nmjax.products.pruning import Operand, lie_on_one_device

KEPT = "nmjax_kept"
"""The name, for `jax.checkpoint`, of what dw needs of x, and of the results of kernels."""


class Entries(NamedTuple):
    """An n:m operand in its packed form.

    Attributes:
      values: n values for each group: its non-zeros in their order, then zeros. The axis of groups has n in place of m.
      bits: One bit for each entry, eight in a byte along the axis of groups. 1 if the entry is not zero.
    """

    values: Float[Array, "..."]
    bits: UInt8[Array, "..."]


@jax.tree_util.register_static
@dataclass(frozen=True)
class Aval:
    """The type of an operand that is not kept."""

    type: jax.ShapeDtypeStruct


def like(x: jax.Array) -> Aval:
    """Return the type of an array."""
    kind = jax.typeof(x)
    sharding = None if kind.sharding.mesh.empty else kind.sharding
    manual = kind.manual_axis_type
    return Aval(jax.ShapeDtypeStruct(kind.shape, kind.dtype, sharding=sharding, manual_axis_type=manual))


def packed_pattern(pattern: Pattern | None, x: jax.Array, operand: Operand) -> Pattern | None:
    """Return the pattern of an operand if it has a packed form; else None.

    It has none if it would not be smaller, or if its bits do not fill whole bytes, each on one device.

    Args:
      pattern: The operand's pattern along its contraction.
      x: The operand.
      operand: Where its axes lie.
    """
    if pattern is None or operand.ragged or operand.runs > 1:
        return None
    n, m = pattern
    smaller, block = 8 * n * x.dtype.itemsize + m < 8 * m * x.dtype.itemsize, math.lcm(m, 8)
    fits = smaller and merging.innermost(x.shape, operand.contract, block) is not None
    return pattern if fits and lie_on_one_device(x, operand.contract, block) else None


def pack(x: Float[Array, "..."], operand: Operand, pattern: Pattern) -> Entries:
    """Return the packed form of an operand that is pruned n:m along its contraction.

    Args:
      x: The operand. At most n entries of each group are not zero.
      operand: Where its axes lie.
      pattern: n and m.

    >>> packed = pack(jnp.array([0., 3., 0., 0., 5., 0., 0., 7.]), Operand((0,), (), ()), (2, 4))
    >>> packed.values.tolist(), packed.bits.tolist()
    ([3.0, 0.0, 5.0, 7.0], [146])
    """
    n, m = pattern
    way = _merging(x.shape, operand, m)
    merged, members = way.apply(x), way.axis + 1
    number = _numbers(groups.split(merged != 0, way.axis, m), members)
    split = groups.split(merged, way.axis, m)
    if n * m <= 64:  # member by member, so that XLA fuses it into one pass
        pairs = list(zip(groups.members(number, members), groups.members(split, members), strict=True))
        values = [fusion.total(jnp.where(at == j + 1, v, 0) for at, v in pairs) for j in range(n)]
    else:
        choose = lambda j: jnp.where(number == j + 1, split, 0)
        values = [jnp.sum(choose(j), members, keepdims=True, dtype=split.dtype) for j in range(n)]
    return Entries(groups.unsplit(jnp.concatenate(values, members), way.axis), _as_bytes(merged != 0, way.axis))


def unpack(packed: Entries, shape: tuple[int, ...], operand: Operand, pattern: Pattern) -> jax.Array:
    """Undo `pack`.

    Args:
      packed: The packed form.
      shape: The shape of the operand.
      operand: Where its axes lie.
      pattern: n and m.

    >>> x, operand = jnp.array([0., 3., 0., 0., 5., 0., 0., 7.]), Operand((0,), (), ())
    >>> unpack(pack(x, operand, (2, 4)), (8,), operand, (2, 4)).tolist()
    [0.0, 3.0, 0.0, 0.0, 5.0, 0.0, 0.0, 7.0]
    """
    n, m = pattern
    way = _merging(shape, operand, m)
    axis = way.axis
    number = _numbers(groups.split(_as_bits(packed.bits, axis), axis, m), axis + 1)
    values = groups.members(groups.split(packed.values, axis, n), axis + 1)
    x = jnp.zeros((), packed.values.dtype)
    for j, value in enumerate(values):
        x = jnp.where(number == j + 1, value, x)
    return way.restore(groups.unsplit(x, axis))


def _merging(shape: tuple[int, ...], operand: Operand, m: int) -> merging.Merging:
    found = merging.merging_of(shape, operand.contract, math.lcm(m, 8))  # groups of m stay where they are
    assert found is not None, "the slot has refused it"
    return found


def _numbers(kept: Bool[Array, "..."], members: int) -> jax.Array:
    """Return 1, 2, ... for the entries of a group that are kept, in their order, and 0 for the others."""
    size = kept.shape[members]
    if size > 32:
        return jnp.where(kept, jnp.cumsum(kept, members, dtype=jnp.int32), 0)
    place = lax.broadcasted_iota(jnp.uint32, kept.shape, members)
    word = jnp.sum(kept.astype(jnp.uint32) << place, members, keepdims=True, dtype=jnp.uint32)
    upto = word & (np.uint32(0xFFFFFFFF) >> (np.uint32(31) - place))
    return jnp.where(kept, lax.population_count(upto), 0).astype(jnp.int32)


def _as_bytes(bits: Bool[Array, "..."], axis: int) -> UInt8[Array, "..."]:
    """Return eight bits along an axis as one byte, the first one lowest."""
    eight = groups.split(bits, axis, 8).astype(jnp.uint8)
    return jnp.sum(eight << _places(eight, axis + 1), axis + 1, dtype=jnp.uint8)


def _as_bits(packed: UInt8[Array, "..."], axis: int) -> Bool[Array, "..."]:
    """Undo `_as_bytes`."""
    byte = jnp.expand_dims(packed, axis + 1)
    eight = jnp.broadcast_to(byte, (*byte.shape[: axis + 1], 8, *byte.shape[axis + 2 :]))
    return groups.unsplit((eight >> _places(eight, axis + 1)) & np.uint8(1) == 1, axis)


def _places(x: jax.Array, axis: int) -> UInt8[Array, "..."]:
    return lax.broadcasted_iota(jnp.uint8, x.shape, axis)
