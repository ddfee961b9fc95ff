"""Merging the axes that a product contracts into one axis that divides into groups."""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Shaped

Move = Callable[[jax.Array], jax.Array]


class Merging(NamedTuple):
    """A merging of several axes of an array into one, and the way back.

    Args:
      axis: The merged axis.
      axes: The new number of every old axis, or None if it was merged with others.
      apply: A function that merges the axes of an array.
      restore: A function that gives an array of the merged shape the old shape. If the merged axis has another length,
        as after a choice of some values, the last of the old axes has this length, and the others have length 1.

    >>> merging = merging_of((2, 3, 4), (0, 2), 8)
    >>> merging.axis, merging.apply(jnp.ones((2, 3, 4))).shape, merging.restore(jnp.ones((3, 8))).shape
    (1, (3, 8), (2, 3, 4))
    """

    axis: int
    axes: tuple[int | None, ...]
    apply: Move
    restore: Move


class Merged(NamedTuple):
    """An array in which one axis replaces several, and the way back.

    Args:
      array: The array with the axes merged.
      axis, axes, restore: As in `Merging`.

    >>> merged = merge(jnp.ones((2, 3, 4)), (0, 2), 8)
    >>> merged.array.shape, merged.axis, merged.restore(merged.array).shape
    ((3, 8), 1, (2, 3, 4))
    """

    array: jax.Array
    axis: int
    axes: tuple[int | None, ...]
    restore: Move


def merge(x: Shaped[Array, "..."], axes: tuple[int, ...], block: int) -> Merged | None:
    """Merge as few of ``axes`` as needed into one axis that ``block`` divides.

    Args:
      x: An array.
      axes: The axes that a product contracts, the innermost last. If the last one is enough, nothing moves.
      block: The number that must divide the length of the merged axis.

    Returns:
      The merged array, or None if ``block`` does not divide the product of all lengths.

    >>> merge(jnp.ones((2, 6)), (0, 1), 4).array.shape
    (12,)
    """
    merging = merging_of(x.shape, axes, block)
    return None if merging is None else Merged(merging.apply(x), merging.axis, merging.axes, merging.restore)


def merging_of(shape: tuple[int, ...], axes: tuple[int, ...], block: int) -> Merging | None:
    """Return how `merge` merges the axes of an array of this shape.

    Args:
      shape: The shape of the array.
      axes, block: As in `merge`.
    """
    count = innermost(shape, axes, block)
    if count is None:
        return None
    inner = axes[-count:]
    if count == 1:
        return Merging(inner[0], tuple(range(len(shape))), lambda x: x, lambda y: y)
    outer = [a for a in range(len(shape)) if a not in inner]
    axis = sum(a < inner[-1] for a in outer)
    order = [*outer[:axis], *inner, *outer[axis:]]
    unmerged = [*outer[:axis], None, *outer[axis:]]  # the old axis of each new one
    new_axes = tuple(None if a in inner else unmerged.index(a) for a in range(len(shape)))
    lengths = tuple(shape[a] for a in inner)

    def apply(x: jax.Array) -> jax.Array:
        moved = jnp.transpose(x, order)
        return moved.reshape(*moved.shape[:axis], -1, *moved.shape[axis + count :])

    def restore(y: jax.Array) -> jax.Array:
        inside = lengths if y.shape[axis] == math.prod(lengths) else (*(1,) * (count - 1), y.shape[axis])
        unmerged = y.reshape(*y.shape[:axis], *inside, *y.shape[axis + 1 :])
        return jnp.transpose(unmerged, np.argsort(order).tolist())

    return Merging(axis, new_axes, apply, restore)


def innermost(shape: tuple[int, ...], axes: tuple[int, ...], block: int) -> int | None:
    """Return how many of the last ``axes`` are needed until ``block`` divides their size.

    Args:
      shape: The shape of an array.
      axes: The axes that a product contracts, the innermost last.
      block: The number that must divide the product of their lengths.

    Returns:
      The smallest such number, or None if all axes together do not suffice.

    >>> innermost((2, 6), (0, 1), 4)
    2
    """
    for count in range(1, len(axes) + 1):
        if math.prod(shape[a] for a in axes[-count:]) % block == 0:
            return count
    return None
