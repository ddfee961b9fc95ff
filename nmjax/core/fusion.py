"""Sums, masks and casts, written so that XLA on CPU computes each value once, in one pass over the array.

The obvious ways to write them have the same results. But there XLA computes the value of a group again for each member
of the group, or makes several passes. On GPUs XLA makes two passes and writes the values of groups between them, so
these take few bytes.
"""

import functools
import operator
from collections.abc import Iterable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Num


def total(terms: Iterable[Num[Array, "..."]]) -> Num[Array, "..."]:
    """Return the sum of arrays of one shape, added one after another.

    Args:
      terms: The arrays, at least one.

    Returns:
      Their sum. The order of the additions is fixed, so every device rounds alike.

    >>> total([jnp.array([1.0, 2.0]), jnp.array([3.0, 4.0])])
    Array([4., 6.], dtype=float32)
    """
    return functools.reduce(operator.add, terms)


def compute_once(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return numbers unchanged, in a way that makes XLA compute them once.

    XLA's CPU fusion would otherwise compute everything that leads to a group's value again for every member: 20 copies
    of the work instead of 1.5. A division by one stops it, because fusion treats divisions as costly.

    Args:
      x: Numbers.

    Returns:
      The same numbers.

    >>> compute_once(jnp.array([0.0, 2.5]))
    Array([0. , 2.5], dtype=float32)
    """
    return x / jnp.where(x == jnp.inf, 2, 1).astype(x.dtype)


def spread(choices: list[Bool[Array, "..."]], shape: tuple[int, ...], axis: int) -> Bool[Array, "..."]:
    """Return the mask of members, given one choice for every member.

    A group's choices are packed into one integer that is computed once, and each member reads its bit. If the choices
    were concatenated instead, XLA's CPU fusion would compute what they share once for every member.

    Args:
      choices: One array for each member, of the shape of the groups, with length 1 along ``axis``.
      shape: The shape of the mask.
      axis: The axis of members, not negative.

    Returns:
      A mask of the given shape.

    >>> spread([jnp.array([[True], [False]]), jnp.array([[False], [False]])], (2, 2), 1).tolist()
    [[True, False], [False, False]]
    """
    place, mask = lax.broadcasted_iota(jnp.int32, shape, axis), jnp.zeros(shape, bool)
    for first in range(0, len(choices), 16):  # float32, the dtype of `compute_once`, is exact for 16 bits
        some = choices[first : first + 16]
        word = compute_once(total(jnp.where(choice, float(1 << j), 0.0) for j, choice in enumerate(some)))
        bit = (whole(word, 2 ** len(some)) >> jnp.clip(place - first, 0, 15)) & 1 == 1
        mask = bit if len(choices) <= 16 else mask | (bit & (place >= first) & (place < first + 16))
    return mask


def whole(x: Float[Array, "..."], end: int) -> Int[Array, "..."]:
    """Return whole numbers as integers, which XLA on GPU stores in as few bytes as they need.

    Args:
      x: Whole numbers from 0 to ``end - 1``.
      end: The end, at most 2**31.

    Returns:
      The same numbers in int32.

    >>> whole(jnp.array([0.0, 255.0]), 256)
    Array([  0, 255], dtype=int32)
    """
    fits = next(kind for kind in (jnp.uint8, jnp.uint16, jnp.int32) if end - 1 <= jnp.iinfo(kind).max)
    return x.astype(jnp.int32).astype(fits).astype(jnp.int32)  # a float would be clipped to the range of bytes


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def rounded(x: Float[Array, "..."], dtype: DTypeLike) -> Float[Array, "..."]:
    """Cast from the dtype of `groups.wide` to a narrower one, with the derivative of a cast.

    A cast from float32 to bf16 takes the upper bits, because XLA on CPU does not fuse operations across its own
    conversion.

    Args:
      x: An array, as `groups.wide` returns it.
      dtype: The dtype of the result.

    Returns:
      The nearest values of that dtype.

    >>> rounded(jnp.array([1.001, 2.0]), jnp.bfloat16)
    Array([1, 2], dtype=bfloat16)
    """
    if dtype != jnp.bfloat16 or x.dtype != jnp.float32:
        return x.astype(dtype)
    high = lax.bitcast_convert_type(lax.reduce_precision(x, 8, 7), jnp.uint32) >> np.uint32(16)
    return lax.bitcast_convert_type(high.astype(jnp.uint16), jnp.bfloat16)


@rounded.defjvp
def _rounded_jvp(
    dtype: DTypeLike, primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    return rounded(primals[0], dtype), tangents[0].astype(dtype)
