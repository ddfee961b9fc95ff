"""N:M arithmetic: groups of m consecutive values along any axis, split where they lie.

Nothing is moved: a reshape puts the members of a group on an axis of their own, right after the axis of groups. Moving
axes would cost ten copies, and under a sharded axis a neighbour's data.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def split(x: jax.Array, axis: int, m: int) -> jax.Array:
    """(..., k, ...) -> (..., k/m, m, ...): the members of a group lie on axis + 1."""
    axis = position(x.ndim, axis)
    k = x.shape[axis]
    if k % m or not k:
        raise ValueError(
            f"axis {axis} of an array of shape {x.shape} has {k} values, which do not divide into groups of {m}. "
            f"Choose an m that divides {k}, or leave this array dense (identity)."
        )
    return x.reshape(*x.shape[:axis], k // m, m, *x.shape[axis + 1 :])


def unsplit(g: jax.Array, axis: int) -> jax.Array:
    """The way back from `split`. One axis at a time, or a sharded one could not be told where it went."""
    axis = position(g.ndim - 1, axis)
    return g.reshape(*g.shape[:axis], g.shape[axis] * g.shape[axis + 1], *g.shape[axis + 2 :])


def position(ndim: int, axis: int) -> int:
    """A non-negative axis, checked."""
    if not -ndim <= axis < ndim:
        raise ValueError(f"axis {axis} does not exist in an array of {ndim} dimensions.")
    return axis % ndim


def members(g: jax.Array, axis: int) -> list[jax.Array]:
    """The members of split groups, one array each, with their axis kept as 1."""
    return [lax.slice_in_dim(g, j, j + 1, axis=axis) for j in range(g.shape[axis])]


def check_floating(x: jax.Array) -> None:
    """Refuse integers, whose bits say something else."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(
            f"an array of shape {x.shape} and dtype {x.dtype}: only floating-point values are pruned. Cast it."
        )


def magnitude(x: jax.Array) -> jax.Array:
    """Magnitudes as signed integers: the order of |x|, with inf and then NaN above all finite values."""
    check_floating(x)
    kind = np.dtype(f"int{8 * x.dtype.itemsize}")
    most = np.iinfo(kind).max
    size = lax.bitcast_convert_type(x, kind) & np.array(most, kind)
    size = jnp.minimum(size, np.array(most - 1, kind))  # so that size + 1 fits
    return size if x.dtype.itemsize > 1 else size.astype(jnp.int16)  # places are counted in the same integers


def top(x: jax.Array, axis: int, n, m: int) -> jax.Array:
    """Mask of the n largest magnitudes of every group of m: exactly n, the first of equals. n may be traced.

    >>> top(jnp.array([1., -2., 2., 2.]), 0, 2, 4)
    Array([False,  True,  True, False], dtype=bool)
    """
    axis = position(x.ndim, axis)
    return top_of(magnitude(split(x, axis, m)), axis + 1, n).reshape(x.shape)


def top_of(size: jax.Array, axis: int, n) -> jax.Array:
    """Mask of the n largest integers along a whole axis, the first of equals."""
    m = size.shape[axis]
    if isinstance(n, int) and n == 1 and m > 4:
        return _first_largest(size, axis)
    if m <= 16:
        return _by_rank(size, axis, n)
    return _by_bisection(size, axis, n)


def _place(size, axis):
    return lax.broadcasted_iota(size.dtype, size.shape, axis)


def _by_rank(size, axis, n):
    """Count for every entry those ahead of it: larger ones, and equal ones that come first."""
    place, one = _place(size, axis), np.array(1, size.dtype)
    rank = jnp.zeros_like(size)
    for j, other in enumerate(members(size, axis)):
        earlier = jnp.where(place > j, one, np.array(0, size.dtype))
        rank = rank + (other + earlier > size).astype(size.dtype)
    return rank < jnp.asarray(n).astype(size.dtype)


def _first_largest(size, axis):
    place = _place(size, axis)
    largest = jnp.max(size, axis, keepdims=True)
    first = jnp.min(jnp.where(size == largest, place, np.array(size.shape[axis], size.dtype)), axis, keepdims=True)
    return place == first


def _by_bisection(size, axis, n):
    """The n-th largest, bit by bit, and then how far into its equals to go, bit by bit."""
    place, n = _place(size, axis), jnp.asarray(n).astype(jnp.int32)
    count = lambda hits: jnp.sum(hits, axis, keepdims=True, dtype=jnp.int32)
    start = lax.slice_in_dim(size, 0, 1, axis=axis) * np.array(0, size.dtype)

    def largest(reached, width):
        """The largest number of so many bits for which ``reached`` holds: it holds up to there and no further."""

        def body(i, best):
            trial = best | lax.shift_left(np.array(1, size.dtype), (width - 1 - i).astype(size.dtype))
            return jnp.where(reached(trial), trial, best)

        return lax.fori_loop(0, width, body, start)

    bound = largest(lambda t: count(size >= t) >= n, np.iinfo(size.dtype).bits - 1)
    room = n - count(size > bound)
    equal = size == bound
    last = largest(lambda q: count(equal & (place < q)) < room, size.shape[axis].bit_length())
    return (size > bound) | (equal & (place <= last) & (room > 0))


def is_nm(x: jax.Array, n: int, m: int, axis: int = -1) -> jax.Array:
    """Whether every group of m holds at most n non-zeros.

    >>> bool(is_nm(jnp.array([0., 1., 2., 0.]), 2, 4))
    True
    """
    return jnp.all(counts(x, m, axis) <= n)


def counts(x: jax.Array, m: int, axis: int = -1) -> jax.Array:
    """Non-zeros of every group; NaN counts as one."""
    axis = position(x.ndim, axis)
    return jnp.sum(split(x, axis, m).astype(bool), axis + 1, dtype=jnp.int32)


class Merged(NamedTuple):
    """An array with one axis in the place of several, and the way back.

    Attributes:
      array: the array, with the axes merged.
      axis: the merged axis.
      axes: for every axis of the array as it was, the same axis now; None if it was merged.
      restore: a function that gives an array of the merged shape the shape as it was.
    """

    array: jax.Array
    axis: int
    axes: tuple[int | None, ...]
    restore: Callable[[jax.Array], jax.Array]


def merge(x: jax.Array, axes: tuple[int, ...], block: int) -> Merged | None:
    """Merge as few of ``axes`` as needed into one axis that ``block`` divides.

    Args:
      x: an array.
      axes: the axes that a product contracts, the innermost last. Often the last alone is enough, and nothing moves.
      block: the number that must divide the merged axis.

    Returns:
      The merged array, or None if ``block`` does not divide all axes together either.

    >>> merge(jnp.ones((2, 6)), (0, 1), 4).array.shape
    (12,)
    """
    count = innermost(x.shape, axes, block)
    if count is None:
        return None
    inner = axes[-count:]
    if count == 1:
        return Merged(x, inner[0], tuple(range(x.ndim)), lambda y: y)
    outer = [a for a in range(x.ndim) if a not in inner]
    axis = sum(a < inner[-1] for a in outer)
    order = [*outer[:axis], *inner, *outer[axis:]]
    moved = jnp.transpose(x, order)
    flat = moved.reshape(*moved.shape[:axis], -1, *moved.shape[axis + count :])
    unmerged = [*outer[:axis], None, *outer[axis:]]  # which old axis each new one is
    new_axes = tuple(None if a in inner else unmerged.index(a) for a in range(x.ndim))
    restore = lambda y: jnp.transpose(y.reshape(moved.shape), np.argsort(order))
    return Merged(flat, axis, new_axes, restore)


def innermost(shape: tuple[int, ...], axes: tuple[int, ...], block: int) -> int | None:
    """Return how many of the last ``axes`` it takes until ``block`` divides their size; None if all are too few."""
    for count in range(1, len(axes) + 1):
        if math.prod(shape[a] for a in axes[-count:]) % block == 0:
            return count
    return None


def wide(x: jax.Array) -> jax.Array:
    """At least float32: what sums and thresholds are computed in."""
    check_floating(x)
    return x if x.dtype.itemsize >= 4 else x.astype(jnp.float32)


def settled(x: jax.Array) -> jax.Array:
    """Non-negative floats as they are, divided by one. XLA's CPU fusion counts a division as costly, and so computes
    a group's value once, where it would else compute all that led to it once more for every member: 1.5 copies, not
    20."""
    return x / jnp.where(x < 0, 2, 1).astype(x.dtype)


def spread(choices: list[jax.Array], shape: tuple[int, ...], axis: int) -> jax.Array:
    """One choice for every member of groups, as a mask of the members: by one settled word a group, of whose bits each
    member reads its own. Written side by side instead, each would carry along all that led to it: XLA's CPU fusion then
    computes what came before a group once for every branch, and in bf16 once for every path."""
    place, mask = lax.broadcasted_iota(jnp.int32, shape, axis), jnp.zeros(shape, bool)
    for first in range(0, len(choices), 16):  # as many as float32 holds, in which they are settled
        word = settled(
            sum(jnp.where(choice, float(1 << j), 0.0) for j, choice in enumerate(choices[first : first + 16]))
        )
        bit = (word.astype(jnp.int32) >> jnp.clip(place - first, 0, 15)) & 1 == 1
        mask = bit if len(choices) <= 16 else mask | (bit & (place >= first) & (place < first + 16))
    return mask


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def rounded(x: jax.Array, dtype) -> jax.Array:
    """From the dtype of `wide` back. To bf16 by its bits: XLA's own conversion keeps the CPU from fusing around it."""
    if dtype != jnp.bfloat16:
        return x.astype(dtype)
    high = lax.bitcast_convert_type(lax.reduce_precision(x, 8, 7), jnp.uint32) >> np.uint32(16)
    return lax.bitcast_convert_type(high.astype(jnp.uint16), jnp.bfloat16)


@rounded.defjvp
def _(dtype, primals, tangents):
    return rounded(primals[0], dtype), tangents[0].astype(dtype)
