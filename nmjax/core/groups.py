"""N:M arithmetic on groups of m consecutive values along any axis.

Groups are split in place: a reshape puts the members of a group on a new axis, right after the axis of groups. Moving
axes instead would cost ten copies, and would break sharding along the moved axis.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Num, Shaped

Count = int | Int[Array, ""]
"""A number of values to keep: an int, or a traced integer."""


def split(x: Shaped[Array, "..."], axis: int, m: int) -> Shaped[Array, "..."]:
    """Split an axis into groups: (..., k, ...) becomes (..., k/m, m, ...), with members on ``axis + 1``.

    Args:
      x: An array.
      axis: The axis to split. It may be negative.
      m: The size of a group.

    Returns:
      The array with one more axis.

    Raises:
      ValueError: The axis does not exist, is empty, or its length is not a multiple of m.

    >>> split(jnp.ones((3, 8)), -1, 4).shape
    (3, 2, 4)
    """
    axis = position(x.ndim, axis)
    k = x.shape[axis]
    if k % m or not k:
        raise ValueError(
            f"axis {axis} of an array of shape {x.shape} has {k} values, which do not divide into groups of {m}. "
            f"Choose an m that divides {k}, or leave this array dense."
        )
    return x.reshape(*x.shape[:axis], k // m, m, *x.shape[axis + 1 :])


def unsplit(x: Shaped[Array, "..."], axis: int) -> Shaped[Array, "..."]:
    """Undo `split`: merge ``axis`` and the axis after it.

    Merge one pair of axes at a time, because JAX cannot propagate a sharding through several merges at once.

    Args:
      x: An array that was split.
      axis: The axis that was given to `split`. A negative one counts in the merged array.

    Returns:
      The array with one axis less.

    >>> unsplit(jnp.ones((3, 2, 4)), 1).shape
    (3, 8)
    """
    axis = position(x.ndim - 1, axis)
    return x.reshape(*x.shape[:axis], x.shape[axis] * x.shape[axis + 1], *x.shape[axis + 2 :])


def position(ndim: int, axis: int) -> int:
    """Return an axis as a number from 0 to ``ndim - 1``.

    Args:
      ndim: The number of dimensions of the array.
      axis: An axis. It may be negative.

    Returns:
      The same axis, not negative.

    Raises:
      ValueError: The array has no such axis.

    >>> position(3, -1)
    2
    """
    if not -ndim <= axis < ndim:
        raise ValueError(f"axis {axis} does not exist in an array of {ndim} dimensions.")
    return axis % ndim


def members(x: Shaped[Array, "..."], axis: int) -> list[Shaped[Array, "..."]]:
    """Return the slices of length 1 along an axis. After `split` these are the members of all groups.

    Args:
      x: An array.
      axis: The axis of members, not negative.

    Returns:
      One array for each position along the axis.

    >>> [m.tolist() for m in members(split(jnp.arange(4.0), 0, 2), 1)]
    [[[0.0], [2.0]], [[1.0], [3.0]]]
    """
    return [lax.slice_in_dim(x, j, j + 1, axis=axis) for j in range(x.shape[axis])]


def check_floating(x: Shaped[Array, "..."]) -> None:
    """Refuse an array whose values are not floating-point numbers, or cannot be pruned.

    Args:
      x: An array.

    Raises:
      TypeError: The dtype is an integer, a boolean or complex, has fewer than 8 bits, or has no zero.

    >>> check_floating(jnp.ones(4))
    """
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(
            f"an array of shape {x.shape} has dtype {x.dtype}, but only floating-point values can be pruned. Cast it, "
            "as in x.astype(jnp.float32)."
        )
    reason = dtype_refusal(x.dtype)
    if reason is not None:
        raise TypeError(f"an array of shape {x.shape} has dtype {x.dtype}, {reason}, as in x.astype(jnp.float32).")


def dtype_refusal(dtype: DTypeLike) -> str | None:
    """Return why values of a floating-point dtype cannot be pruned, and what to do. None if they can.

    Args:
      dtype: A floating-point dtype.

    Returns:
      A clause that follows the name of the dtype in a message, or None.

    >>> dtype_refusal(jnp.float8_e8m0fnu)
    'which has no zero, so nothing can be dropped: cast it'
    """
    if dtype == jnp.float8_e8m0fnu:
        return "which has no zero, so nothing can be dropped: cast it"
    if jnp.finfo(dtype).bits < 8:
        return "but values of fewer than 8 bits cannot be pruned: cast it"
    return None


def magnitude(x: Float[Array, "..."]) -> Int[Array, "..."]:
    """Return integers in the order of ``|x|``, with infinities and then NaN above all finite values.

    They are the bits of the number without its sign; 128 for NaN of dtypes whose only NaN has the bits of -0. Ranking
    integers is faster than ranking floats in bf16, and keeps NaN visible.

    Args:
      x: An array of floating-point numbers.

    Returns:
      Signed integers of the width of ``x``, at least 16 bits. The largest one is left free.

    Raises:
      TypeError: The array is not floating-point, or its dtype is refused by `dtype_refusal`.

    >>> jnp.argsort(magnitude(jnp.array([jnp.nan, -3.0, jnp.inf, 2.0]))).tolist()
    [3, 1, 2, 0]
    """
    check_floating(x)
    kind = np.dtype(f"int{8 * x.dtype.itemsize}")
    most = np.iinfo(kind).max
    bits = lax.bitcast_convert_type(x, kind)
    size = bits & np.array(most, kind)
    if x.dtype.itemsize > 1:
        return jnp.minimum(size, np.array(most - 1, kind))  # so that size + 1 fits
    size = size.astype(jnp.int16)  # ranking counts positions in this dtype
    if x.dtype.name.endswith("fnuz"):  # there is no -0, and its bits are the only NaN
        size = jnp.where(bits == np.int8(-128), np.int16(128), size)
    return size


def top(x: Float[Array, "..."], axis: int, n: Count, m: int) -> Bool[Array, "..."]:
    """Return the mask of the n largest magnitudes of every group of m. Of equal ones the first are kept.

    Args:
      x: An array of floating-point numbers.
      axis: The axis that groups lie along.
      n: The number of values to keep in each group. It may be traced.
      m: The size of a group.

    Returns:
      A mask of the shape of ``x`` with exactly n entries set in every group.

    Raises:
      TypeError: The array is not floating-point.
      ValueError: The axis does not exist, or its length is not a multiple of m.

    >>> top(jnp.array([1., -2., 2., 2.]), 0, 2, 4)
    Array([False,  True,  True, False], dtype=bool)
    """
    axis = position(x.ndim, axis)
    return top_of(magnitude(split(x, axis, m)), axis + 1, n).reshape(x.shape)


def top_of(size: Int[Array, "..."], axis: int, n: Count) -> Bool[Array, "..."]:
    """Return the mask of the n largest integers along a whole axis. Of equal ones the first are kept.

    Args:
      size: Signed integers, none of them negative or the largest of the dtype.
      axis: The axis to choose along, not negative.
      n: The number of entries to keep. It may be traced.

    Returns:
      A mask of the same shape.

    >>> top_of(jnp.array([1, 5, 3, 5]), 0, 2)
    Array([False,  True, False,  True], dtype=bool)
    """
    m = size.shape[axis]
    if isinstance(n, int) and n == 1 and m > 4:
        return _first_largest(size, axis)
    if m in (4, 8) and axis < size.ndim - 1:
        return _by_partner(size, axis, n)
    if m <= 16:
        return _by_rank(size, axis, n)
    return _by_bisection(size, axis, n)


def first_of(size: list[Int[Array, "..."]], n: Count) -> list[Bool[Array, "..."]]:
    """Return for each member of groups whether it is among the n largest. Of equal ones the first are.

    Args:
      size: Integers, one array for each position of a group.
      n: The number of members. It may be traced.

    Returns:
      One mask for each position.

    >>> [hit.tolist() for hit in first_of([jnp.array([1]), jnp.array([5]), jnp.array([5])], 1)]
    [[False], [True], [False]]
    """
    ahead = lambda i: [(v >= size[i] if j < i else v > size[i]) for j, v in enumerate(size) if j != i]
    zero = jnp.zeros(size[0].shape, jnp.int32)
    return [sum((a.astype(jnp.int32) for a in ahead(i)), zero) < n for i in range(len(size))]


def _positions(size: Int[Array, "..."], axis: int) -> Int[Array, "..."]:
    """Return the position of every entry along an axis, in the dtype of ``size`` unless the axis is too long for it."""
    fits = size.shape[axis] <= np.iinfo(size.dtype).max
    return lax.broadcasted_iota(size.dtype if fits else jnp.int32, size.shape, axis)


def _by_rank(size: Int[Array, "..."], axis: int, n: Count) -> Bool[Array, "..."]:
    """Keep an entry if fewer than n are ahead of it: larger ones, and equal ones that come first."""
    place, one = _positions(size, axis), np.array(1, size.dtype)
    rank = jnp.zeros_like(size)
    for j, other in enumerate(members(size, axis)):
        earlier = jnp.where(place > j, one, np.array(0, size.dtype))
        rank = rank + (other + earlier > size).astype(size.dtype)
    return rank < jnp.asarray(n).astype(size.dtype)


def _by_partner(size: Int[Array, "..."], axis: int, n: Count) -> Bool[Array, "..."]:
    """Do the same for m a power of two, with one comparison less: every entry has m - 1 partners.

    Partner b of entry i is entry i ^ b. XLA on GPU reads them in the same pass. It writes the members of `_by_rank` to
    memory first. Along the last axis this is slower on CPUs.
    """
    m = size.shape[axis]
    place, one, rank = _positions(size, axis), np.array(1, size.dtype), jnp.zeros_like(size)
    bits = m.bit_length() - 1
    halves = size.reshape(*size.shape[:axis], *(2,) * bits, *size.shape[axis + 1 :])
    for b in range(1, m):
        partner = lax.rev(halves, [axis + bits - 1 - i for i in range(bits) if b >> i & 1]).reshape(size.shape)
        earlier = (place >> np.array(b.bit_length() - 1, size.dtype)) & one  # the highest bit that differs decides
        rank = rank + (partner + earlier > size).astype(size.dtype)
    return rank < jnp.asarray(n).astype(size.dtype)


def _first_largest(size: Int[Array, "..."], axis: int) -> Bool[Array, "..."]:
    place = _positions(size, axis)
    largest = jnp.max(size, axis, keepdims=True)
    first = jnp.min(jnp.where(size == largest, place, np.array(size.shape[axis], place.dtype)), axis, keepdims=True)
    return place == first


def _by_bisection(size: Int[Array, "..."], axis: int, n: Count) -> Bool[Array, "..."]:
    """Find the n-th largest value bit by bit, then the last position, among its equals, that is still kept."""
    place, n = _positions(size, axis), jnp.asarray(n).astype(jnp.int32)
    count = lambda hits: jnp.sum(hits, axis, keepdims=True, dtype=jnp.int32)
    start = lax.slice_in_dim(size, 0, 1, axis=axis) * np.array(0, size.dtype)
    bound = _largest_with(lambda trial: count(size >= trial) >= n, start, np.iinfo(size.dtype).bits - 1)
    room = n - count(size > bound)
    equal = size == bound
    width = size.shape[axis].bit_length()
    last = _largest_with(lambda trial: count(equal & (place < trial)) < room, start.astype(place.dtype), width)
    return (size > bound) | (equal & (place <= last) & (room > 0))


def _largest_with(
    holds: Callable[[Int[Array, "..."]], Bool[Array, "..."]], start: Int[Array, "..."], width: int
) -> Int[Array, "..."]:
    """Return the largest number of ``width`` bits for which a condition holds that fails for all larger ones."""

    def set_bit(i: Int[Array, ""], best: Int[Array, "..."]) -> Int[Array, "..."]:
        trial = best | lax.shift_left(np.array(1, start.dtype), (width - 1 - i).astype(start.dtype))
        return jnp.where(holds(trial), trial, best)

    return lax.fori_loop(0, width, set_bit, start)


def is_nm(x: Num[Array | np.ndarray[Any, Any], "..."], n: int, m: int, axis: int = -1) -> Bool[Array, ""]:
    """Test if every group of m holds at most n non-zeros.

    Args:
      x: An array.
      n: The number of non-zeros allowed in a group.
      m: The size of a group.
      axis: The axis that groups lie along.

    Returns:
      A boolean scalar.

    Raises:
      ValueError: The axis does not exist, or its length is not a multiple of m.

    >>> bool(is_nm(jnp.array([0., 1., 2., 0.]), 2, 4))
    True
    """
    return jnp.all(counts(x, m, axis) <= n)


def counts(x: Num[Array | np.ndarray[Any, Any], "..."], m: int, axis: int = -1) -> Int[Array, "..."]:
    """Count the non-zeros of every group. NaN is not zero.

    Args:
      x: An array.
      m: The size of a group.
      axis: The axis that groups lie along.

    Returns:
      Integers, with ``axis`` divided by m.

    Raises:
      ValueError: The axis does not exist, or its length is not a multiple of m.

    >>> counts(jnp.array([0., 1., 2., 0., 0., 0., 0., 3.]), 4)
    Array([2, 1], dtype=int32)
    """
    axis = position(x.ndim, axis)
    return jnp.sum(split(jnp.asarray(x.astype(bool)), axis, m), axis + 1, dtype=jnp.int32)


def wide(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return the array in at least float32, in which sums and thresholds are computed.

    Args:
      x: An array of floating-point numbers.

    Returns:
      The array itself if it has 32 bits or more, else in float32.

    Raises:
      TypeError: The array is not floating-point.

    >>> wide(jnp.ones(4, jnp.bfloat16)).dtype
    dtype('float32')
    """
    check_floating(x)
    return at_least_float32(x)


def at_least_float32(x: Num[Array, "..."]) -> Num[Array, "..."]:
    """Return the array itself if its numbers have 32 bits or more, else in float32.

    Args:
      x: An array of numbers, which need not be floating-point.

    Returns:
      The array in a dtype of at least 32 bits.

    >>> at_least_float32(jnp.ones(4, jnp.bfloat16)).dtype, at_least_float32(jnp.ones(4, jnp.int32)).dtype
    (dtype('float32'), dtype('int32'))
    """
    return x if x.dtype.itemsize >= 4 else x.astype(jnp.float32)
