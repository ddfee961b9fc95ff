"""The packed format of N:M sparse arrays: the n values that are kept of every group of m, and their places in it.

In the *plain* order an index is a byte beside its value. It serves any n:m and any axis. For 2:4 it has the values and
places of PyTorch's compressed form, except in groups with fewer than two non-zeros (docs/how_to/weights.md). Sparse
tensor cores read 2:4 in two orders of their own. Both begin with four bits a group, made of the rising positions
``i0 < i1`` of its two values::

    nibble = i0 | i1 << 2            one of 0x4 0x8 0xC 0x9 0xD 0xE; a group with fewer than two non-zeros
                                     names two positions all the same, and stores their zeros

``words8``, for 8-bit values: a uint32 holds eight nibbles in a row, the lowest k lowest: ``[..., M, K/32]``. Values of
four bits are 4:8 of pairs: two neighbours are kept or dropped together, and their bytes are 2:4 (``[..., M, K/64]``).

``words16``, for 16-bit values: a uint32 is what one of the 128 threads of a warpgroup hands to its instruction for 64
x 64 values of the matrix: ``[..., M/64, K/64, 128]``, 1/16 of the dense bytes. Thread ``t = 32 w + 4 g + q`` has::

    bits 0-15    row 16 w + g,       k = 16 q ... 16 q + 15     four nibbles, the lowest k lowest
    bits 16-31   row 16 w + g + 8,   the same k

The values keep the array's own order, with half of its axis: either axis may be the contiguous one. K is the axis of
the groups, and M is the axis beside it.

``sublanes``, for TPUs and groups along the axis before the last: a uint32 holds eight nibbles of a column, which are
eight groups apart: ``[..., 8 ceil(K/256), M]``. Row ``8 b + s`` has groups ``64 b + s``, ``64 b + 8 + s``, ...
``64 b + 56 + s``, the first lowest. Groups beyond K are 0x3.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Bool, Int, UInt

from nmjax.core import groups
from nmjax.core.refusal import Refusal

ORDERS = ("plain", "words16", "words8", "sublanes")
FP4 = jnp.float4_e2m1fn
NO_GROUP = 3  # the nibble of a group beyond the end


@partial(jax.tree_util.register_dataclass, data_fields=("values", "indices"), meta_fields=("axis", "n", "m", "order"))
@dataclass(frozen=True)
class Packed:
    """An n:m array as the values that it keeps and their places.

    It is a pytree: it goes through jit, scan and vmap.

    Attributes:
      values: The kept values, n of every m.
      indices: The places of the values in their groups: bytes in the plain order, else bits of words.
      axis: The axis of the groups, counted from the end.
      n: The number of values that are kept in each group.
      m: The size of a group.
      order: The order of the words: "plain", or that of a kernel.

    >>> packed = pack(jnp.array([1., 0., 0., 2., 0., 3., 4., 0.]))
    >>> packed.values, packed.shape
    (Array([1., 2., 3., 4.], dtype=float32), (8,))
    """

    values: jax.Array
    indices: jax.Array
    axis: int  # from the end, so that axes in front, as vmap's, change nothing
    n: int
    m: int
    order: str

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array that was packed."""
        at = self.values.ndim + self.axis
        dims = self.values.shape
        return (*dims[:at], dims[at] // self.n * self.m, *dims[at + 1 :])

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of the array that was packed."""
        return self.values.dtype

    @property
    def nbytes(self) -> int:
        """The bytes of the values and indices."""
        return self.values.nbytes + self.indices.nbytes


def pack(x: ArrayLike, axis: int = -1, n: int = 2, m: int = 4, order: str | None = None) -> Packed:
    """Pack an array that has at most n non-zeros in every group of m along an axis.

    CPUs treat subnormal numbers as zero, so they may be dropped.

    >>> packed = pack(jnp.array([0., 5., 0., 7., 0., 0., 0., 0.]))
    >>> packed.values, packed.indices
    (Array([5., 7., 0., 0.], dtype=float32), Array([1, 3, 0, 1], dtype=uint8))

    Args:
      x: An array of floats. Its axis divides by m. FP4 (float4_e2m1fn) is packed 4:8 in pairs, with n=4 and m=8.
      axis: The axis of the groups.
      n: The values that are kept of a group.
      m: The length of a group, at most 256.
      order: ``"plain"``, ``"words16"``, ``"words8"`` or ``"sublanes"``, see `nmjax.kernels.format`. Without it, it is
        the order of sparse tensor cores if they read this array: 2:4 of 16- or 8-bit floats of a fitting shape. Else it
        is plain.

    Returns:
      The packed array. `unpack` gives the array back.

    Raises:
      TypeError: If the array does not hold floats.
      ValueError: If a group has more than n non-zeros, or if the array does not fit the pattern or the order. Under
        `jax.jit` values cannot raise, and such a group becomes NaN.
    """
    x = jnp.asarray(x)
    if x.dtype == FP4:
        return _pack_pairs(x, axis, n, m, order)
    groups.check_floating(x)
    if not 1 <= n <= m or m > 256:
        raise ValueError(f"pack: {n}:{m} is not a pattern: n lies between 1 and m, and m is at most 256.")
    axis = groups.position(x.ndim, axis)
    if order is None:
        order = _natural(x, axis, n, m)
    refusal = order_refusal(x.shape, x.dtype, axis - x.ndim, n, m, order)
    if refusal is not None:
        raise ValueError(f"pack: {refusal}")
    packed, crowded = _pack(x, axis, n, m, order)
    if not isinstance(crowded, jax.core.Tracer) and crowded.any():
        _raise_crowded(np.asarray(crowded), x.shape, axis, n, m)
    return packed


def _pack_pairs(x: jax.Array, axis: int, n: int, m: int, order: str | None) -> Packed:
    """Pack FP4 values, whose bytes are 2:4."""
    last = x.ndim > 1 and axis in (-1, x.ndim - 1)
    if (n, m, order or "words8") != (4, 8, "words8") or not last or x.shape[-1] % 64:
        raise ValueError(
            f"pack: FP4 is packed in pairs, 4:8 along the last axis of at least two, which divides by 64, in the order "
            f"'words8': got shape {x.shape}, axis={axis}, n={n}, m={m}, order={order!r}. Write axis=-1, n=4, m=8."
        )
    if isinstance(x, jax.core.Tracer):
        raise TypeError("pack: FP4 has no NaN that could mark groups with too many non-zeros: pack it outside jax.jit.")
    packed, crowded = _pack(_bytes(jnp.where(x == 0, jnp.zeros((), FP4), x)), x.ndim - 1, 2, 4, "words8")
    if crowded.any():
        raise ValueError(
            f"pack: {int(crowded.sum())} of {crowded.size} groups of 8 along axis -1 of an array of shape {x.shape} "
            "hold more than two pairs with a non-zero. Prune it first, as nm.prune(nm.pairs(nm.mse(2,4)), x)."
        )
    return Packed(_values(packed.values), packed.indices, -1, 4, 8, "words8")


def _bytes(x: jax.Array) -> jax.Array:
    """Return the bytes of pairs of FP4 values."""
    return lax.bitcast_convert_type(groups.split(x, -1, 2), jnp.uint8)


def _values(pairs: jax.Array) -> jax.Array:
    return groups.unsplit(lax.bitcast_convert_type(pairs, FP4), -1)


@partial(jax.jit, static_argnums=(1, 2, 3, 4))
def _pack(x: jax.Array, axis: int, n: int, m: int, order: str) -> tuple[Packed, Bool[Array, "..."]]:
    """Return the packed array, and the groups that have too many non-zeros."""
    split = groups.split(x, axis, m)
    crowded = jnp.sum(split.astype(bool), axis + 1, dtype=jnp.int32) > n
    kept = groups.top_of(split.astype(bool).astype(jnp.int32), axis + 1, n)  # non-zeros, then the first zeros
    values, places = _gathered(split, kept, axis + 1, n)
    nan = jnp.array(0 if x.dtype == jnp.uint8 else jnp.nan, x.dtype)
    values = groups.unsplit(jnp.where(jnp.expand_dims(crowded, axis + 1), nan, values), axis)
    if order == "plain":
        return Packed(values, groups.unsplit(places.astype(jnp.uint8), axis), axis - x.ndim, n, m, order), crowded
    i0, i1 = (v.squeeze(axis + 1).astype(jnp.uint32) for v in groups.members(places, axis + 1))
    words = in_order(i0 | i1 << np.uint32(2), axis - x.ndim, order)
    return Packed(values, words, axis - x.ndim, n, m, order), crowded


def unpack(packed: Packed) -> jax.Array:
    """Return the array that was packed.

    >>> unpack(pack(jnp.array([0., 5., 0., 7.])))
    Array([0., 5., 0., 7.], dtype=float32)

    Args:
      packed: What `pack` returned.

    Raises:
      TypeError: If it is anything else.
    """
    if not isinstance(packed, Packed):
        raise TypeError(f"unpack takes what nm.pack returns, got {type(packed).__name__}.")
    return _unpack(packed)


@jax.jit
def _unpack(packed: Packed) -> jax.Array:
    if packed.dtype == FP4:
        return _values(_unpack(Packed(_bytes(packed.values), packed.indices, packed.axis, 2, 4, packed.order)))
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


def order_refusal(
    shape: tuple[int, ...], dtype: DTypeLike, axis: int, n: int, m: int, order: str
) -> Refusal | None:  # fmt: skip
    """Return the reason why an array cannot be packed in an order, or None if it can.

    Args:
      shape: The shape of the array.
      dtype: Its dtype.
      axis: The axis of the groups, counted from the end.
      n: The values that are kept of a group.
      m: The length of a group.
      order: The order.
    """
    if order not in ORDERS:
        return Refusal(f"the orders are {', '.join(map(repr, ORDERS))}, got {order!r}.")
    if order == "plain":
        return None
    wide, sizes = order == "words16", {"words16": (16,), "words8": (8,), "sublanes": (16, 32)}[order]
    array = f"order {order!r} and an array of shape {tuple(shape)} and dtype {jnp.dtype(dtype).name}"
    if (n, m) != (2, 4):
        return Refusal(f"{array}: it takes 2:4 only, not {n}:{m}. Write order='plain'.")
    if 8 * jnp.dtype(dtype).itemsize not in sizes:
        return Refusal(
            f"{array}: it takes {'- or '.join(map(str, sizes))}-bit values. Cast it, or write order='plain'."
        )
    if order == "sublanes":
        own = Refusal(f"{array}: groups must lie along the axis before the last, not along axis {len(shape) + axis}.")
        return None if axis == -2 else own
    if wide and (len(shape) < 2 or axis not in (-1, -2)):
        return Refusal(f"{array}: groups must lie along one of the last two axes, not along axis {len(shape) + axis}.")
    if not wide and (len(shape) < 2 or axis != -1):
        return Refusal(
            f"{array}: 8-bit values must be contiguous along their groups, the last axis of at least two, "
            f"not along axis {len(shape) + axis}."
        )
    k, rows = shape[axis], shape[-1 if axis == -2 else -2]
    if wide and (k % 64 or rows % 64 or not rows):
        return Refusal(f"{array}: both of its last axes must divide by 64. Pad it with zeros, or write order='plain'.")
    if not wide and k % 32:
        return Refusal(f"{array}: its last axis must divide by 32. Pad it with zeros, or write order='plain'.")
    return None


def _natural(x: jax.Array, axis: int, n: int, m: int) -> str:
    """Return the order of sparse tensor cores if they read this array, else plain."""
    order = {2: "words16", 1: "words8"}.get(x.dtype.itemsize, "plain")
    return "plain" if order_refusal(x.shape, x.dtype, axis - x.ndim, n, m, order) else order


def _raise_crowded(crowded: np.ndarray, shape: tuple[int, ...], axis: int, n: int, m: int) -> None:
    first = tuple(map(int, np.argwhere(crowded)[0]))
    at = ", ".join(f"{m * i}:{m * i + m}" if d == axis else str(i) for d, i in enumerate(first))
    raise ValueError(
        f"pack: {int(crowded.sum())} of {crowded.size} groups of {m} along axis {axis} of an array of shape {shape} "
        f"hold more than {n} non-zeros, the first at [{at}]. "
        f"Prune it first, as nm.prune(nm.mse({n},{m}), x, axis={axis})."
    )


def _gathered(
    split: jax.Array, kept: Bool[Array, "..."], axis: int, n: int
) -> tuple[jax.Array, Int[Array, "..."]]:  # fmt: skip
    """Return the kept values of every group and their places, in rising order."""
    members, keeps = groups.members(split, axis), groups.members(kept, axis)
    values = [jnp.zeros_like(members[0])] * n
    places = [jnp.zeros(members[0].shape, jnp.int32)] * n
    before = places[0]  # how many members before this one are kept
    for j, (value, keep) in enumerate(zip(members, keeps, strict=True)):
        for slot in range(min(j + 1, n)):
            fills = keep & (before == slot)
            values[slot] = jnp.where(fills, value, values[slot])
            places[slot] = jnp.where(fills, j, places[slot])
        before = before + keep.astype(jnp.int32)
    return jnp.concatenate(values, axis), jnp.concatenate(places, axis)


def two_of_four(
    v: list[jax.Array], nonzero: list[jax.Array] | None = None, crowded: ArrayLike | None = None
) -> tuple[jax.Array, jax.Array, UInt[Array, "..."]]:
    """Return the two stored values of groups of four with at most two non-zeros, and their nibbles.

    Kernels call this; it does what `pack` does.

    Args:
      v: The four members, each an array over groups.
      nonzero: Masks of the members that are not zero. Without them, members are compared with 0.
      crowded: What a group with more than two non-zeros stores, a NaN. Without it, such groups must not occur.
    """
    f = nonzero or [x != 0 for x in v]  # NaN is not zero
    both, late = f[2] & f[3], f[1] & (f[2] | f[3])  # the first non-zero of two is member 2, or member 1
    one, two, three = (np.uint32(i) for i in (1, 2, 3))
    low = jnp.where(both, two, jnp.where(late, one, np.uint32(0)))
    high = jnp.where(f[3], three, jnp.where(f[2], two, one))
    first = jnp.where(both, v[2], jnp.where(late, v[1], v[0]))
    second = jnp.where(f[3], v[3], jnp.where(f[2], v[2], v[1]))
    if crowded is not None:
        more = f[0] & f[1] & (f[2] | f[3]) | both & (f[0] | f[1])
        first, second = (jnp.where(more, crowded, x) for x in (first, second))
    return first, second, low | high << np.uint32(2)


# ---- orders of nibbles ----


def in_order(nibbles: UInt[Array, "..."], axis: int, order: str) -> UInt[Array, "..."]:
    """Put nibbles, shaped like the array with a quarter of its axis, into an order of the hardware."""
    if order == "sublanes":
        return _in_sublanes(nibbles)
    if axis == -2:
        nibbles = jnp.swapaxes(nibbles, -1, -2)
    return words16(nibbles) if order == "words16" else _in_words(nibbles, 8)


def _out_of_order(packed: Packed) -> UInt[Array, "..."]:
    if packed.order == "sublanes":
        return _out_of_sublanes(packed.indices)[..., : packed.values.shape[-2] // 2, :]
    if packed.order == "words8":
        return _nibbles_of(packed.indices, 8)
    nibbles = nibbles16(packed.indices)
    return jnp.swapaxes(nibbles, -1, -2) if packed.axis == -2 else nibbles


def words16(nibbles: UInt[Array, "*batch m k4"]) -> UInt[Array, "*batch m64 k64 128"]:
    """Put nibbles into the words of ``words16``."""
    *batch, m, k4 = nibbles.shape
    half = _in_words(nibbles, 4).reshape(*batch, m // 64, 4, 2, 8, k4 // 16, 4)  # block, w, half, g, k block, q
    low, high = half[..., 0, :, :, :], half[..., 1, :, :, :]
    words = jnp.moveaxis(low | high << np.uint32(16), -2, -4)  # block, k block, w, g, q
    return words.reshape(*batch, m // 64, k4 // 16, 128)


def nibbles16(words: UInt[Array, "*batch m64 k64 128"]) -> UInt[Array, "*batch m k4"]:
    """Take the nibbles out of the words of ``words16``."""
    *batch, rows, blocks, _ = words.shape
    w = jnp.moveaxis(words.reshape(*batch, rows, blocks, 4, 8, 4), -4, -2)  # block, w, g, k block, q
    half = jnp.stack([w & np.uint32(0xFFFF), w >> np.uint32(16)], -4)  # block, w, half, g, k block, q
    return _nibbles_of(half.reshape(*batch, 64 * rows, 4 * blocks), 4)


def _in_words(nibbles: UInt[Array, "..."], count: int) -> UInt[Array, "..."]:
    """Put ``count`` nibbles of the last axis into a word, the first lowest."""
    v = nibbles.astype(jnp.uint32).reshape(*nibbles.shape[:-1], nibbles.shape[-1] // count, count)
    return sum((v[..., i] << np.uint32(4 * i) for i in range(1, count)), v[..., 0])


def _nibbles_of(words: UInt[Array, "..."], count: int) -> UInt[Array, "..."]:
    v = jnp.stack([words >> np.uint32(4 * i) & np.uint32(15) for i in range(count)], -1)
    return v.reshape(*words.shape[:-1], words.shape[-1] * count)


def _in_sublanes(nibbles: UInt[Array, "*batch k4 m"]) -> UInt[Array, "*batch w m"]:
    *batch, groups, columns = nibbles.shape
    blocks = -(-groups // 64)
    ends = [(0, 0)] * len(batch) + [(0, 64 * blocks - groups), (0, 0)]
    split = jnp.pad(nibbles, ends, constant_values=NO_GROUP).reshape(*batch, blocks, 8, 8, columns)
    return _in_words(jnp.moveaxis(split, -3, -1), 8).reshape(*batch, 8 * blocks, columns)


def _out_of_sublanes(words: UInt[Array, "*batch w m"]) -> UInt[Array, "*batch k4 m"]:
    *batch, rows, columns = words.shape
    nibbles = _nibbles_of(words[..., None], 8).reshape(*batch, rows // 8, 8, columns, 8)
    return jnp.moveaxis(nibbles, -1, -3).reshape(*batch, 8 * rows, columns)
