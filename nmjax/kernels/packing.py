"""Prune and pack in one pass: a kernel reads a 16-bit array once, and writes its packed form as tensor cores read it.

A program is a warpgroup, which takes 64 x 64 values: one block of ``words16``. It holds the four members of each group
in four arrays, and prunes them by the pruner's `KernelForm`. It keeps two of them, and their nibble. The noise is
that of the pruner on the whole array: one uniform for each group, by the group's row-major number.

In ``words16`` a word belongs to thread (w, g, q): it has the nibbles of rows (w, 0, g) and (w, 1, g), and of groups 4 q
to 4 q + 3. So the registers of a thread hold just these groups, and no thread needs what another one has. Mosaic loads
and stores by the layouts below: along the last axis 32 bytes of a row at once.

Two steps move values between the registers of a thread, for which Mosaic has no operation: `_halves` and `_words`. On a
CPU they are plain arithmetic, and the rest of a kernel is the same.
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

from nmjax.core import random, versions
from nmjax.core.pruner import Pruner
from nmjax.kernels.activations import Activation, times_derivative
from nmjax.kernels.batches import result
from nmjax.kernels.format import Packed, two_of_four
from nmjax.pruners import identity

Ref = Any  # a reference to a block of an array, inside a kernel

BLOCK = 64
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
    """Prune arrays along one of their axes, and pack them.

    Args:
      x: 16-bit values, with sides that divide by 64.
      words: Scrambled keys of the noise, two words for each random number of a group. Row i serves arrays i * batch/S
        to (i + 1) * batch/S - 1 of the whole batch.
      scale: Scales of `soft`, like ``words``.
      origin: Where x begins in the whole array: [batch, row, column]. Zeros if x is the whole one.
      axis: The axis of the groups, -1 or -2.
      whole: The shape of the whole array, which numbers the groups for the noise.
      pruner: A pruner that `nmjax.kernels.limits.fuses` accepts. With `identity` the arrays are 2:4 already.
      interpret: True to run on a CPU.
    """
    if axis == -2:
        return _compress_down((x,), words, scale, origin, whole=whole, pruner=pruner, interpret=interpret)[1]
    batch, rows, columns = x.shape
    i, j = rows // BLOCK, columns // BLOCK
    like = lambda *shape: result(shape, jnp.uint32, x, words, scale)
    body = partial(_across, pruner=pruner, whole=whole, dtype=x.dtype, emulated=interpret)
    outputs = like(batch, rows, columns // 4), like(batch, i, j, 32, 4)
    values, places = call(body, outputs, (batch, i, j), (words, scale, origin, pairs(x, 2)[..., 0]), interpret)
    return Packed(unpaired(values, x.dtype), as_words16(places), axis, 2, 4, "words16")


def compress_activated(
    h: Float[Array, "batch r c"], g: Float[Array, "batch r c"], words: UInt[Array, "s n"], scale: Float[Array, " s"],
    origin: Int[Array, "3"], *, whole: tuple[int, int, int], activation: Activation, pruner: Pruner = identity,
    interpret: bool = False,
) -> tuple[Float[Array, "batch r c"], Packed]:  # fmt: skip
    """Compute the gradient of an activation function's input, prune it along axis -2, and pack it.

    Args:
      h: The function's input.
      g: The gradient of its output.
      words, scale, origin, whole, pruner, interpret: As in `compress`.
      activation: The function. It is `nmjax.kernels.activations.known`.

    Returns:
      The gradient, and its packed form.
    """
    form = {"whole": whole, "pruner": pruner, "interpret": interpret, "activation": activation}
    (made,), packed = _compress_down((h, g), words, scale, origin, **form)
    return made, packed


def _compress_down(
    arrays: tuple[jax.Array, ...], words: jax.Array, scale: jax.Array, origin: jax.Array, *, interpret: bool,
    activation: Activation | None = None, **options: Any,
) -> tuple[list[jax.Array], Packed]:  # fmt: skip
    """Prune the last array, or the gradient by which an activation function replaces it, and pack it along axis -2."""
    batch, rows, columns = shape = arrays[-1].shape
    i, j, dtype = rows // BLOCK, columns // BLOCK, arrays[-1].dtype
    like = lambda dtype, *shape: result((batch, *shape), dtype, *arrays, words, scale)
    outputs = [like(dtype, rows // 4, 4, columns)] * (activation is not None)
    outputs += [like(dtype, rows // 4, 2, columns), like(jnp.uint32, j, i, 32, 4)]
    body = partial(_down, activation=activation, dtype=dtype, emulated=interpret, **options)
    inputs = [v.reshape(batch, rows // 4, 4, columns) for v in arrays]
    *made, values, places = call(body, outputs, (batch, i, j), (words, scale, origin, *inputs), interpret)
    packed = Packed(values.reshape(batch, rows // 2, columns), as_words16(places), -2, 2, 4, "words16")
    return [v.reshape(shape) for v in made], packed


def _across(
    at: "Place", words: Ref, scale: Ref, origin: Ref, seen: Ref, values: Ref, places: Ref, *, pruner: Pruner,
    whole: tuple[int, ...], dtype: jnp.dtype, emulated: bool,
) -> None:  # fmt: skip
    """Prune and pack groups along axis -1."""
    b, i, j = at
    block = seen.at[b, pl.ds(i * BLOCK, BLOCK), pl.ds(j * (BLOCK // 2), BLOCK // 2)]
    pairs = _halves(loaded(block, _ROW_WORDS, emulated), emulated)
    x = [v for pair in pairs for v in apart(pair, dtype)]
    kept = pruned(pruner, x, words, scale, whole, (1, 4), *_groups(at, origin, x[0].shape, (1, 4), _ACROSS, emulated))
    first, second, nibble = two_of_four(kept, crowded=crowded(pruner, dtype))
    first, second = first.astype(dtype), second.astype(dtype)
    store(values.at[b, pl.ds(i * BLOCK, BLOCK), pl.ds(j * _GROUPS, _GROUPS)], together(first, second), emulated)
    store(places.at[b, i, j], _words(nibble, _ACROSS, emulated), emulated)


def _down(
    at: "Place", words: Ref, scale: Ref, origin: Ref, *refs: Ref, activation: Activation | None, pruner: Pruner,
    whole: tuple[int, ...], dtype: jnp.dtype, emulated: bool,
) -> None:  # fmt: skip
    """Prune and pack groups along axis -2, of an array or of the gradient of an activation function's input."""
    b, i, j = at
    *inputs, values, places = refs
    member = lambda ref, n: ref.at[b, pl.ds(i * _GROUPS, _GROUPS), n, pl.ds(j * BLOCK, BLOCK)]
    read = lambda ref: [loaded(member(ref, n), _DOWN, emulated) for n in range(4)]
    if activation is None:
        x = read(*inputs)
    else:
        h, g, made = inputs
        x = [times_derivative(activation, *both) for both in zip(read(h), read(g), strict=True)]
        for n in range(4):
            store(member(made, n), x[n], emulated)
    kept = pruned(pruner, x, words, scale, whole, (4, 1), *_groups(at, origin, x[0].shape, (4, 1), _DOWN, emulated))
    *kept, nibble = two_of_four(kept, crowded=crowded(pruner, dtype))
    for slot in range(2):
        store(member(values, slot), kept[slot].astype(dtype), emulated)
    store(places.at[b, j, i], _words(nibble, _DOWN, emulated), emulated)


# ---- what kernels that pack share ----

Place = tuple[Any, Any, Any]
"""The array of a program, and its block along rows and columns."""


def call(
    body: Callable[..., None], outputs: Sequence[Any], grid: tuple[int, ...], inputs: Sequence[jax.Array],
    interpret: bool,
) -> Sequence[jax.Array]:  # fmt: skip
    """Call a kernel of Mosaic. Each program of the grid is one warpgroup.

    Args:
      body: The kernel. It takes its place in the grid, and references to whole inputs and whole outputs.
      outputs: The shapes of the results.
      grid: The numbers of arrays, of blocks along rows, and of blocks along columns.
      inputs: The inputs.
      interpret: True to run on a CPU. Programs share nothing, so that Pallas's plain interpreter runs them. It works
        in programs that XLA partitions, and is fast.
    """
    if interpret:
        run = lambda *refs: body(tuple(pl.program_id(d) for d in range(3)), *refs)
        return pl.pallas_call(run, grid=grid, out_shape=tuple(outputs), interpret=True, name="nm_pack")(*inputs)
    names = ("b", "i", "j")

    def nm_pack(*refs: Ref) -> None:  # the name that profilers show
        body(tuple(lax.axis_index(name) for name in names), *refs)

    return plgpu.kernel(
        nm_pack, out_type=tuple(outputs), grid=grid, grid_names=names, num_threads=1, thread_name="wg",
        **versions.launch_options(False),
    )(*inputs)  # fmt: skip


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
    at: Place, origin: Ref, block: tuple[int, ...], group: tuple[int, int], layout: Any, emulated: bool
) -> tuple[jax.Array, Callable[[], Any]]:  # fmt: skip
    """Return the index of a program's array in the whole batch, and a function that returns where its groups are."""

    def numbers() -> tuple[jax.Array, ...]:
        iotas = [iota(block, d, layout, emulated) for d in (0, 1)]
        return tuple(origin[d + 1] // group[d] + at[d + 1] * block[d] + iotas[d] for d in (0, 1))

    return origin[0] + at[0], numbers


def pruned(
    pruner: Pruner, x: list[jax.Array], words: Ref, scale: Ref, whole: tuple[int, ...], group: tuple[int, int],
    index: jax.Array, rows_and_columns: Callable[[], tuple[jax.Array, jax.Array]],
) -> list[jax.Array]:  # fmt: skip
    """Prune the members of groups.

    Args:
      pruner: The pruner.
      x: The members.
      words, scale, whole: As in `compress`.
      group: The rows and columns of a group.
      index: The array's index in the whole batch.
      rows_and_columns: Returns the rows and columns of the groups in the whole array. It is called if they are needed.
    """
    if pruner == identity:
        return x
    share, u = whole[0] // words.shape[0], None  # the number of consecutive arrays that share a key and a scale
    if pruner.facts.stochastic:
        groups = whole[1] // group[0], whole[2] // group[1]
        u = uniforms(words, words.shape[1], index, share, groups, *rows_and_columns())
    members = pruner.kernel_form.members
    assert members is not None, pruner  # `limits.fuses` says so
    return members(x, u, scale[index // share])


def crowded(pruner: Pruner, dtype: jnp.dtype) -> jax.Array | None:
    """Return what a group with over two non-zeros stores: NaN with `identity`, else None, as none occurs."""
    return jnp.array(jnp.nan, dtype) if pruner == identity else None


def uniforms(words: Ref, count: int, *where: Any) -> Any:
    """Draw the random numbers of groups: one array, or a tuple of several.

    Args:
      words: As in `uniform`.
      count: The number of words of a key in use, two for each random number.
      *where: The arguments of `uniform`.
    """
    drawn = tuple(uniform(words, *where, first=first) for first in range(0, count, 2))
    return drawn if len(drawn) > 1 else drawn[0]


def uniform(
    words: Ref, index: jax.Array, share: int, whole: tuple[int, int], row: jax.Array, column: jax.Array, first: int = 0
) -> Float[Array, "r c"]:  # fmt: skip
    """Draw the uniforms of groups.

    Args:
      words: Scrambled keys. Each row serves ``share`` arrays of the batch.
      index: The array's index in the batch.
      share: The number of consecutive arrays that share a key.
      whole: The numbers of groups along the rows and along the columns of the whole array.
      row: The rows of the groups.
      column: Their columns.
      first: The column of a key's first word.
    """
    number = (index % share * whole[0] + row).astype(jnp.uint32) * np.uint32(whole[1]) + column.astype(jnp.uint32)
    return random.as_uniform(random.stream((words[index // share, first], words[index // share, first + 1]), number))


def pairs(x: Float[Array, "*front c"], per_group: int) -> UInt[Array, "*front groups words"]:
    """Put 16-bit values into words of two, with the words of a group on an axis of their own."""
    *front, last = x.shape
    return lax.bitcast_convert_type(x.reshape(*front, last // per_group, per_group // 2, 2), jnp.uint32)


def unpaired(words: jax.Array, dtype: jnp.dtype) -> Float[Array, "*front c"]:
    """Take 16-bit values out of words of two. Values that are in no words are returned as they are."""
    if words.dtype != jnp.uint32:
        return words
    return lax.bitcast_convert_type(words, dtype).reshape(*words.shape[:-1], 2 * words.shape[-1])


def together(first: Float[Array, "r c"], second: Float[Array, "r c"]) -> UInt[Array, "r c"]:
    """Put two 16-bit values into a word, the first one lowest."""
    bits = lambda v: lax.bitcast_convert_type(v, jnp.uint16).astype(jnp.uint32)
    return bits(first) | bits(second) << np.uint32(16)


def apart(words: UInt[Array, "r c"], dtype: jnp.dtype) -> list[jax.Array]:
    """Take the two 16-bit values out of each word, the lowest first."""
    bits = lambda v: lax.bitcast_convert_type(v.astype(jnp.uint16), dtype)
    return [bits(words & np.uint32(0xFFFF)), bits(words >> np.uint32(16))]


def as_words16(places: UInt[Array, "batch i j 32 4"]) -> UInt[Array, "batch i j 128"]:
    """Return the words of all blocks in the order ``words16``."""
    return places.reshape(*places.shape[:3], 128)


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
