"""Prune and pack in one pass by Mosaic: what `nmjax.kernels.compress` does by Triton, which JAX will remove.

A warpgroup takes 64 x 64 values. In ``words16`` a word belongs to thread (w, g, q): it has the nibbles of rows
(w, 0, g) and (w, 1, g), and of groups 4 q to 4 q + 3. So the registers of a thread hold just these groups, and no
thread needs what another one has. Mosaic loads and stores by the layouts below: along the last axis 32 bytes of a row
at once. The noise and the arithmetic are those of Triton's kernels.

Two steps move values between the registers of a thread, for which Mosaic has no operation: `_halves` and `_words`.
"""

import functools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic.gpu import fragmented_array as fa, utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector
from jaxtyping import Array, Float, Int, UInt

from nmjax.core import versions
from nmjax.core.pruner import Pruner
from nmjax.kernels.activations import Activation, times_derivative
from nmjax.kernels.compress import BLOCK, crowded, pairs, pruned, together, unpaired
from nmjax.kernels.format import Packed, two_of_four
from nmjax.kernels.targets import result
from nmjax.pruners import identity

Ref = Any  # a reference to a block of an array, inside a kernel

_GROUPS = BLOCK // 4
# The layouts of [rows, words] and of [rows, groups]. A row is (w, half, g), and q is the part of it that a thread has.
_ROW_WORDS = plgpu.Layout.TILED(
    fa.Tiling(((64, 32), (16, 32), (8, 32), (8,))), warp_dims=(-7,), lane_dims=(-3, -2), vector_dim=-1
)
_ACROSS = plgpu.Layout.TILED(
    fa.Tiling(((64, 16), (16, 16), (8, 16), (4,))), warp_dims=(-7,), lane_dims=(-3, -2), vector_dim=-1
)
# The layout of [groups, columns]. A column is (w, half, g), and q tells which four groups a thread has.
_DOWN = plgpu.Layout.TILED(
    fa.Tiling(((16, 64), (16, 16), (16, 8), (4, 8), (1,))), warp_dims=(-8,), lane_dims=(-2, -5), vector_dim=-1
)
# Of lines (w, g) x q: one word of a thread.
_LINES = plgpu.Layout.TILED(fa.Tiling(((32, 4), (8, 4), (1,))), warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)


def compress(
    x: Float[Array, "batch r c"], words: UInt[Array, "s n"], scale: Float[Array, " s"], origin: Int[Array, "3"], *,
    axis: int, whole: tuple[int, int, int], pruner: Pruner = identity, interpret: bool = False,
) -> Packed:  # fmt: skip
    """Prune arrays along one axis, and pack them. The arguments are those of `nmjax.kernels.compress.compress`."""
    batch, rows, columns = x.shape
    i, j = rows // BLOCK, columns // BLOCK
    like = lambda shape, dtype: result(shape, dtype, x, words, scale)
    if axis == -1:
        seen = pairs(x, 2)[..., 0]
        kept, places = like((batch, rows, columns // 4), jnp.uint32), like((batch, i, j, 32, 4), jnp.uint32)
    else:
        seen = x.reshape(batch, rows // 4, 4, columns)
        kept, places = like((batch, rows // 4, 2, columns), x.dtype), like((batch, j, i, 32, 4), jnp.uint32)
    body = partial(_across if axis == -1 else _down, pruner=pruner, whole=whole, dtype=x.dtype, emulated=interpret)
    values, lines = call(body, (kept, places), (batch, i, j), (words, scale, origin, seen), interpret)
    values = unpaired(values, x.dtype) if axis == -1 else values.reshape(batch, rows // 2, columns)
    return Packed(values, lines.reshape(*lines.shape[:3], 128), axis, 2, 4, "words16")


def compress_activated(
    h: Float[Array, "batch r c"], g: Float[Array, "batch r c"], words: UInt[Array, "s n"], scale: Float[Array, " s"],
    origin: Int[Array, "3"], *, whole: tuple[int, int, int], activation: Activation, pruner: Pruner = identity,
    interpret: bool = False,
) -> tuple[Float[Array, "batch r c"], Packed]:  # fmt: skip
    """Compute the gradient of an activation function's input, prune it along axis -2, and pack it.

    The arguments are those of `nmjax.kernels.compress.compress_activated`.
    """
    batch, rows, columns = g.shape
    grid = batch, rows // BLOCK, columns // BLOCK
    like = lambda shape, dtype: result(shape, dtype, h, g, words, scale)
    lines = lambda v: v.reshape(batch, rows // 4, 4, columns)
    outputs = (
        like((batch, rows // 4, 4, columns), g.dtype),
        like((batch, rows // 4, 2, columns), g.dtype),
        like((batch, grid[2], grid[1], 32, 4), jnp.uint32),
    )
    body = partial(_activated, activation=activation, pruner=pruner, whole=whole, dtype=g.dtype, emulated=interpret)
    made, values, places = call(body, outputs, grid, (words, scale, origin, lines(h), lines(g)), interpret)
    values = values.reshape(batch, rows // 2, columns)
    return made.reshape(g.shape), Packed(values, places.reshape(*places.shape[:3], 128), -2, 2, 4, "words16")


def _across(
    words: Ref, scale: Ref, origin: Ref, seen: Ref, values: Ref, places: Ref, *, pruner: Pruner,
    whole: tuple[int, ...], dtype: jnp.dtype, emulated: bool,
) -> None:  # fmt: skip
    """Prune and pack groups along axis -1."""
    b, i, j = program()
    block = seen.at[b, pl.ds(i * BLOCK, BLOCK), pl.ds(j * (BLOCK // 2), BLOCK // 2)]
    pairs = _halves(loaded(block, _ROW_WORDS, emulated), emulated)
    bits = lambda v: lax.bitcast_convert_type(v.astype(jnp.uint16), dtype)
    x = [bits(v) for pair in pairs for v in (pair & np.uint32(0xFFFF), pair >> np.uint32(16))]
    kept = pruned(pruner, x, words, scale, whole, (1, 4), *_groups(origin, x[0].shape, (1, 4), _ACROSS, emulated))
    first, second, nibble = two_of_four(kept, crowded=crowded(pruner, dtype))
    store(values.at[b, pl.ds(i * BLOCK, BLOCK), pl.ds(j * _GROUPS, _GROUPS)], together(first, second), emulated)
    store(places.at[b, i, j], _words(nibble, _ACROSS, emulated), emulated)


def _down(
    words: Ref, scale: Ref, origin: Ref, seen: Ref, values: Ref, places: Ref, *, emulated: bool, **options: Any
) -> None:  # fmt: skip
    """Prune and pack groups along axis -2."""
    x = [loaded(_member(seen, j), _DOWN, emulated) for j in range(4)]
    _write_down(x, words, scale, origin, values, places, emulated=emulated, **options)


def _activated(
    words: Ref, scale: Ref, origin: Ref, h: Ref, g: Ref, made: Ref, values: Ref, places: Ref, *,
    activation: Activation, emulated: bool, **options: Any,
) -> None:  # fmt: skip
    """Compute the gradient of an activation function's input, write it, prune it, and pack it along axis -2."""
    read = lambda ref, j: loaded(_member(ref, j), _DOWN, emulated)
    x = [times_derivative(activation, read(h, j), read(g, j)) for j in range(4)]
    for j in range(4):
        store(_member(made, j), x[j], emulated)
    _write_down(x, words, scale, origin, values, places, emulated=emulated, **options)


def _member(ref: Ref, j: int) -> Ref:
    """Return a reference to member ``j`` of this program's groups: one of the four members, or of the two kept ones."""
    b, row, column = program()
    return ref.at[b, pl.ds(row * _GROUPS, _GROUPS), j, pl.ds(column * BLOCK, BLOCK)]


def _write_down(
    x: list[jax.Array], words: Ref, scale: Ref, origin: Ref, values: Ref, places: Ref, *, pruner: Pruner,
    whole: tuple[int, ...], dtype: jnp.dtype, emulated: bool,
) -> None:  # fmt: skip
    b, i, j = program()
    kept = pruned(pruner, x, words, scale, whole, (4, 1), *_groups(origin, x[0].shape, (4, 1), _DOWN, emulated))
    *kept, nibble = two_of_four(kept, crowded=crowded(pruner, dtype))
    for slot in range(2):
        store(_member(values, slot), kept[slot], emulated)
    store(places.at[b, j, i], _words(nibble, _DOWN, emulated), emulated)


def call(
    body: Callable[..., None], outputs: Sequence[Any], grid: tuple[int, ...], inputs: Sequence[jax.Array],
    interpret: bool,
) -> Sequence[jax.Array]:  # fmt: skip
    """Call a kernel of Mosaic. Each program of the grid is one warpgroup.

    Args:
      body: The kernel. It takes references to whole inputs and whole outputs.
      outputs: The shapes of the results.
      grid: The numbers of arrays, of blocks along rows, and of blocks along columns.
      inputs: The inputs.
      interpret: True to run on a CPU.
    """

    def nm_pack(*refs: Ref) -> None:  # the name that profilers show
        body(*refs)

    options = {"interpret": versions.interpreter_params(zeros=False)} if interpret else {}
    names = {"grid": grid, "grid_names": ("b", "i", "j"), "num_threads": 1, "thread_name": "wg"}
    return plgpu.kernel(nm_pack, out_type=tuple(outputs), **names, **options)(*inputs)


def program() -> tuple[Any, ...]:
    """Return the indices of this program in the grid."""
    return tuple(lax.axis_index(name) for name in ("b", "i", "j"))


def store(ref: Ref, value: jax.Array, emulated: bool) -> None:
    """Write a block."""
    if emulated:
        ref[...] = value
    else:
        versions.store(ref, value)


def loaded(ref: Ref, layout: Any, emulated: bool) -> jax.Array:
    """Read a block into registers of this layout."""
    return ref[...] if emulated else versions.load(ref, layout)


def iota(shape: tuple[int, ...], axis: int, layout: Any, emulated: bool) -> Int[Array, "r c"]:
    """Return an array of row indices (axis 0) or column indices (axis 1)."""
    if emulated:
        return lax.broadcasted_iota(jnp.int32, shape, axis)
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=layout)


def _groups(
    origin: Ref, block: tuple[int, ...], group: tuple[int, int], layout: Any, emulated: bool
) -> tuple[jax.Array, Callable[[], Any]]:  # fmt: skip
    """Return the index of a program's array in the whole batch, and a function that returns where its groups are."""
    b, *at = program()

    def numbers() -> tuple[jax.Array, ...]:
        iotas = [iota(block, d, layout, emulated) for d in (0, 1)]
        return tuple(origin[d + 1] // group[d] + at[d] * block[d] + iotas[d] for d in (0, 1))

    return origin[0] + b, numbers


# ---- between the registers of a thread ----


def _halves(words: UInt[Array, "64 32"], emulated: bool) -> list[UInt[Array, "64 16"]]:
    """Return the first and the second words of groups."""
    if emulated:
        return [words[:, 0::2], words[:, 1::2]]
    half = plgpu.ShapeDtypeStruct((BLOCK, _GROUPS), jnp.uint32, layout=_ACROSS)

    def split(_: Any, words: fa.FragmentedArray) -> tuple[fa.FragmentedArray, ...]:
        every = lambda first: [
            vector.shuffle(v, v, [first, first + 2, first + 4, first + 6]) for v in words.registers.flat
        ]
        return tuple(of_registers(every(first), _ACROSS, (BLOCK, _GROUPS)) for first in (0, 1))

    return list(plgpu.inline_mgpu(arg_types=(_ROW_WORDS,), return_type=(half, half))(split)(words))


def _words(nibble: UInt[Array, "r c"], layout: Any, emulated: bool) -> UInt[Array, "32 4"]:
    """Put the eight nibbles of a thread into its word: those of four groups, for two rows of the packed matrix."""
    if emulated:
        rows = nibble if layout is _ACROSS else nibble.T
        parts = rows.reshape(4, 2, 8, 4, 4)  # w, half, g, q, group
        half, group = (lax.broadcasted_iota(jnp.uint32, parts.shape, d) for d in (1, 4))
        shifted = parts << (16 * half + 4 * group)
        return jnp.sum(shifted, (1, 4), dtype=jnp.uint32).reshape(32, 4)

    def gather(_: Any, nibble: fa.FragmentedArray) -> fa.FragmentedArray:
        i32 = ir.IntegerType.get_signless(32)
        registers = list(nibble.registers.flat)  # those of the first half, then those of the second
        each = [vector.extract(v, [], [t]) for v in registers for t in range(ir.VectorType(v.type).shape[0])]
        shifts = [16 * (at // 4) + 4 * (at % 4) for at in range(len(each))]
        shifted = [arith.shli(v, utils.c(by, i32)) for v, by in zip(each, shifts, strict=True)]
        word = functools.reduce(arith.ori, shifted)
        return of_registers([vector.broadcast(ir.VectorType.get((1,), i32), word)], _LINES, (32, 4))

    line = plgpu.ShapeDtypeStruct((32, 4), jnp.uint32, layout=_LINES)
    return plgpu.inline_mgpu(arg_types=(layout,), return_type=line)(gather)(nibble)


def of_registers(registers: list[Any], layout: Any, shape: tuple[int, int]) -> fa.FragmentedArray:
    """Return an array of the registers of a thread."""
    layout = layout.to_mgpu()
    held = np.empty(layout.registers_shape(shape), dtype=object)
    held.reshape(-1)[:] = registers
    return fa.FragmentedArray(_registers=held, _layout=layout, _is_signed=False)
