"""The packed form of N:M sparse arrays: the n values that every group of m keeps, and where in the group they stood.

In the *plain* order an index is a byte beside its value; any n:m, any axis. Sparse tensor cores read 2:4 in orders of
their own. Both begin with four bits a group, of the rising positions ``i0 < i1`` of its two values::

    nibble = i0 | i1 << 2            one of 0x4 0x8 0xC 0x9 0xD 0xE; a group with fewer than two non-zeros
                                     names two positions all the same, and stores their zeros

For 8-bit values, ``words8``: a uint32 holds eight nibbles in a row, the lowest k lowest: ``[..., M, K/32]``.

For 16-bit values, ``words16``: a uint32 is what one of the 128 threads of a warpgroup hands to its instruction for
64 x 64 of the matrix: ``[..., M/64, K/64, 128]``, 1/16 of the dense bytes. Thread ``t = 32 w + 4 g + q`` has::

    bits 0-15    row 16 w + g,       k = 16 q ... 16 q + 15     four nibbles, the lowest k lowest
    bits 16-31   row 16 w + g + 8,   the same k

The values keep the array's own order, with half of its axis: either axis may be the contiguous one. M is the axis
beside the groups', K that of the groups.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from nmjax.core import groups

ORDERS = ("plain", "words16", "words8")


@partial(jax.tree_util.register_dataclass, data_fields=("values", "indices"), meta_fields=("axis", "n", "m", "order"))
@dataclass(frozen=True)
class Packed:
    """An n:m array as the values that it keeps and their places. A pytree: it goes through jit, scan and vmap."""

    values: jax.Array
    indices: jax.Array
    axis: int  # from the end, so that axes in front, as vmap's, change nothing
    n: int
    m: int
    order: str

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the array that was packed."""
        at = self.values.ndim + self.axis
        dims = self.values.shape
        return (*dims[:at], dims[at] // self.n * self.m, *dims[at + 1 :])

    @property
    def dtype(self):
        return self.values.dtype

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.indices.nbytes


def pack(x: jax.Array, axis: int = -1, n: int = 2, m: int = 4, order: str | None = None) -> Packed:
    """An array with at most n non-zeros in every group of m along ``axis``, packed.

    Without an ``order`` it is the hardware's, where it has one: 2:4 of 16- or 8-bit floats of fitting shape. Under `jit`,
    where nothing can be raised, a group with too many non-zeros becomes NaN.

    >>> packed = pack(jnp.array([0., 5., 0., 7., 0., 0., 0., 0.]))
    >>> packed.values, packed.indices
    (Array([5., 7., 0., 0.], dtype=float32), Array([1, 3, 0, 1], dtype=uint8))
    """
    x = jnp.asarray(x)
    groups.check_floating(x)
    if not 1 <= n <= m or m > 256:
        raise ValueError(f"pack: {n}:{m} is no pattern: n lies between 1 and m, and m is at most 256.")
    axis = groups.position(x.ndim, axis)
    order = _natural(x, axis, n, m) if order is None else order
    if why := misfit(x.shape, x.dtype, axis - x.ndim, n, m, order):
        raise ValueError(f"pack: {why}")
    packed, crowd = _pack(x, axis, n, m, order)
    if not isinstance(crowd, jax.core.Tracer) and crowd.any():
        _refuse(np.asarray(crowd), x.shape, axis, n, m)
    return packed


@partial(jax.jit, static_argnums=(1, 2, 3, 4))
def _pack(x, axis, n, m, order):
    """The packed array, and which groups have too many non-zeros."""
    split = groups.split(x, axis, m)
    crowd = jnp.sum(split.astype(bool), axis + 1, dtype=jnp.int32) > n
    kept = groups.top_of(split.astype(bool).astype(jnp.int32), axis + 1, n)  # non-zeros, then the first zeros
    values, places = _gathered(split, kept, axis + 1, n)
    broken = jnp.array(jnp.nan, x.dtype)
    values = groups.unsplit(jnp.where(jnp.expand_dims(crowd, axis + 1), broken, values), axis)
    if order == "plain":
        return Packed(values, groups.unsplit(places.astype(jnp.uint8), axis), axis - x.ndim, n, m, order), crowd
    i0, i1 = (v.squeeze(axis + 1).astype(jnp.uint32) for v in groups.members(places, axis + 1))
    return Packed(values, in_order(i0 | i1 << np.uint32(2), axis - x.ndim, order), axis - x.ndim, n, m, order), crowd


def unpack(packed: Packed) -> jax.Array:
    """The array that was packed.

    >>> unpack(pack(jnp.array([0., 5., 0., 7.])))
    Array([0., 5., 0., 7.], dtype=float32)
    """
    if not isinstance(packed, Packed):
        raise TypeError(f"unpack takes what nm.pack made, got {type(packed).__name__}.")
    return _unpack(packed)


@jax.jit
def _unpack(packed):
    axis = packed.values.ndim + packed.axis
    values = groups.split(packed.values, axis, packed.n)
    if packed.order == "plain":
        places = groups.split(packed.indices, axis, packed.n)
    else:
        nibbles = _out_of_order(packed)
        places = jnp.stack([nibbles & np.uint32(3), nibbles >> np.uint32(2)], axis + 1)
    value, place = groups.members(values, axis + 1), groups.members(places.astype(jnp.int32), axis + 1)
    zero = jnp.zeros((), values.dtype)
    whole = []
    for j in range(packed.m):
        member = zero
        for v, p in zip(value, place, strict=True):
            member = jnp.where(p == j, v, member)
        whole.append(member)
    return jnp.concatenate(whole, axis + 1).reshape(packed.shape)


def misfit(shape: tuple[int, ...], dtype, axis: int, n: int, m: int, order: str) -> str | None:
    """Why an array cannot be packed in an order; None if it can. ``axis`` counts from the end."""
    if order not in ORDERS:
        return f"the orders are {', '.join(map(repr, ORDERS))}, got {order!r}."
    if order == "plain":
        return None
    size = jnp.dtype(dtype).itemsize
    what = f"order {order!r} and an array of shape {tuple(shape)} and dtype {jnp.dtype(dtype).name}"
    if (n, m) != (2, 4):
        return f"{what}: sparse tensor cores know 2:4 alone, not {n}:{m}. Write order='plain'."
    if size != (2 if order == "words16" else 1):
        return f"{what}: it is of {'16' if order == 'words16' else '8'}-bit values. Cast it, or write order='plain'."
    if len(shape) < 2 or axis not in ((-1, -2) if order == "words16" else (-1,)):
        last = "one of the last two axes" if order == "words16" else "the last axis: 8-bit operands lie along k"
        return f"{what}: groups lie along {last}, not along axis {len(shape) + axis}."
    k, rows = shape[axis], shape[-1 if axis == -2 else -2]
    if order == "words16" and (k % 64 or rows % 64 or not rows):
        return f"{what}: both of the last axes divide by 64. Pad it with zeros, or write order='plain'."
    if order == "words8" and k % 32:
        return f"{what}: its last axis divides by 32. Pad it with zeros, or write order='plain'."
    return None


def _natural(x, axis, n, m):
    """The order of the hardware where it serves, else plain."""
    order = {2: "words16", 1: "words8"}.get(x.dtype.itemsize, "plain")
    return "plain" if misfit(x.shape, x.dtype, axis - x.ndim, n, m, order) else order


def _refuse(crowd, shape, axis, n, m):
    first = tuple(map(int, np.argwhere(crowd)[0]))
    at = ", ".join(f"{m * i}:{m * i + m}" if d == axis else str(i) for d, i in enumerate(first))
    raise ValueError(
        f"pack: {int(crowd.sum())} of {crowd.size} groups of {m} along axis {axis} of an array of shape {shape} hold more than "
        f"{n} non-zeros, the first of them [{at}]. Prune it first, as nm.prune(nm.mse({n},{m}), x, axis={axis})."
    )


def _gathered(split, kept, axis, n):
    """What is kept of every group and where it stood, in rising order."""
    members, keeps = groups.members(split, axis), groups.members(kept, axis)
    values = [jnp.zeros_like(members[0])] * n
    places = [jnp.zeros(members[0].shape, jnp.int32)] * n
    before = places[0]
    for j, (value, keep) in enumerate(zip(members, keeps, strict=True)):
        for slot in range(min(j + 1, n)):
            here = keep & (before == slot)
            values[slot] = jnp.where(here, value, values[slot])
            places[slot] = jnp.where(here, j, places[slot])
        before = before + keep.astype(jnp.int32)
    return jnp.concatenate(values, axis), jnp.concatenate(places, axis)


def two_of_four(
    v: list[jax.Array], full: list[jax.Array] | None = None, crowded=None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Of the members of groups of four with at most two non-zeros the two that are stored, and their nibble: what `pack`
    does, for kernels. A group with more stores ``crowded``, if that is given, a NaN. ``full`` says which are not zero,
    where ``v`` are bits."""
    full = [f.astype(jnp.int32) for f in full or [x != 0 for x in v]]  # NaN is not
    count = sum(full)
    zeros_first = jnp.minimum(count, 2)  # the rank of the first zero
    keep, fulls, zeros = [], jnp.zeros_like(full[0]), zeros_first
    for f in full:
        keep.append(jnp.where(f == 1, fulls, zeros) < 2)
        fulls, zeros = fulls + f, zeros + 1 - f
    one, two, three = (np.uint32(i) for i in (1, 2, 3))
    low = jnp.where(keep[0], np.uint32(0), jnp.where(keep[1], one, two))
    high = jnp.where(keep[3], three, jnp.where(keep[2], two, one))
    first = jnp.where(keep[0], v[0], jnp.where(keep[1], v[1], v[2]))
    second = jnp.where(keep[3], v[3], jnp.where(keep[2], v[2], v[1]))
    if crowded is not None:
        first, second = (jnp.where(count > 2, crowded, x) for x in (first, second))
    return first, second, low | high << np.uint32(2)


# ---- orders of nibbles ----


def in_order(nibbles: jax.Array, axis: int, order: str) -> jax.Array:
    """Nibbles, shaped like the array with a quarter of its axis, in an order of the hardware."""
    if axis == -2:
        nibbles = jnp.swapaxes(nibbles, -1, -2)
    return words16(nibbles) if order == "words16" else _in_words(nibbles, 8)


def _out_of_order(packed):
    if packed.order == "words8":
        return _nibbles_of(packed.indices, 8)
    nibbles = nibbles16(packed.indices)
    return jnp.swapaxes(nibbles, -1, -2) if packed.axis == -2 else nibbles


def words16(nibbles: jax.Array) -> jax.Array:
    """[..., M, K/4] to [..., M/64, K/64, 128]."""
    *batch, m, k4 = nibbles.shape
    half = _in_words(nibbles, 4).reshape(*batch, m // 64, 4, 2, 8, k4 // 16, 4)  # block, w, which half, g, k block, q
    low, high = half[..., 0, :, :, :], half[..., 1, :, :, :]
    words = jnp.moveaxis(low | high << np.uint32(16), -2, -4)  # block, k block, w, g, q
    return words.reshape(*batch, m // 64, k4 // 16, 128)


def nibbles16(words: jax.Array) -> jax.Array:
    """[..., M/64, K/64, 128] to [..., M, K/4]."""
    *batch, rows, blocks, _ = words.shape
    w = jnp.moveaxis(words.reshape(*batch, rows, blocks, 4, 8, 4), -4, -2)  # block, w, g, k block, q
    half = jnp.stack([w & np.uint32(0xFFFF), w >> np.uint32(16)], -4)  # block, w, which half, g, k block, q
    return _nibbles_of(half.reshape(*batch, 64 * rows, 4 * blocks), 4)


def _in_words(nibbles, count):
    """``count`` nibbles of the last axis in a word, the first lowest."""
    v = nibbles.astype(jnp.uint32).reshape(*nibbles.shape[:-1], -1, count)
    return sum((v[..., i] << np.uint32(4 * i) for i in range(1, count)), v[..., 0])


def _nibbles_of(words, count):
    v = jnp.stack([words >> np.uint32(4 * i) & np.uint32(15) for i in range(count)], -1)
    return v.reshape(*words.shape[:-1], -1)
