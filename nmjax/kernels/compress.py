"""Prune and pack in one pass: a kernel reads a 16-bit array once, and writes its packed form as tensor cores read it.

A program takes 64 x 64 values, whose words are one block of ``words16``. It holds the four members of each group in
four arrays, and prunes them by the pruner's `KernelForm`. It keeps two of them, and their nibble. The noise is
that of the pruner on the whole array: one uniform for each group, by the group's row-major number.

These kernels are Triton's: plain arithmetic on blocks, which a CPU can run too.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, UInt

from nmjax.core import random, versions
from nmjax.core.pruner import Pruner
from nmjax.kernels.activations import Activation, times_derivative
from nmjax.kernels.format import Packed, two_of_four
from nmjax.kernels.targets import result
from nmjax.pruners import identity

Ref = Any  # a reference to a block of an array, inside a kernel

BLOCK = 64


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
    batch, rows, columns = x.shape
    blocks = (batch, rows // BLOCK, columns // BLOCK)
    options = {"pruner": pruner, "whole": whole, "dtype": x.dtype}
    body = partial(_down if axis == -2 else _across, **options)
    if axis == -2:
        seen, seen_block = x, (None, BLOCK, BLOCK)
        kept, kept_block = jax.ShapeDtypeStruct((batch, rows // 2, columns), x.dtype), (None, BLOCK // 2, BLOCK)
    else:  # two members of 16 bits a word: a thread reads or writes a word at once
        seen, seen_block = pairs(x, 4), (None, BLOCK, BLOCK // 4, 2)
        kept, kept_block = jax.ShapeDtypeStruct((batch, rows, columns // 4), jnp.uint32), (None, BLOCK, BLOCK // 4)
    outputs = [(kept, _in_grid(kept_block)), _words_of(blocks, turned=axis == -2)]
    values, places = call(body, blocks, (words, scale, origin), [(seen, _in_grid(seen_block))], outputs, interpret)
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
    batch, rows, columns = g.shape
    grid = (batch, rows // BLOCK, columns // BLOCK)
    body = partial(_activated, activation=activation, pruner=pruner, whole=whole, dtype=g.dtype)
    block = _in_grid((None, BLOCK, BLOCK))
    kept = jax.ShapeDtypeStruct((batch, rows // 2, columns), g.dtype), _in_grid((None, BLOCK // 2, BLOCK))
    outputs = [(jax.ShapeDtypeStruct(g.shape, g.dtype), block), kept, _words_of(grid, turned=True)]
    made, values, places = call(body, grid, (words, scale, origin), [(h, block), (g, block)], outputs, interpret)
    return made, Packed(values, as_words16(places), -2, 2, 4, "words16")


def compress_both(
    x: Float[Array, "batch r c"], pruner: Pruner = identity, *, interpret: bool = False
) -> tuple[Packed, Packed]:  # fmt: skip
    """Pack arrays along their last axis, and along the one before it.

    Args:
      x: 16-bit values, with sides that divide by 64.
      pruner: A pruner of 4 x 4 tiles, as `transposable`. With `identity` the arrays are 2:4 along both axes already.
      interpret: True to run on a CPU.
    """
    batch, rows, columns = x.shape
    blocks = (batch, rows // BLOCK, columns // BLOCK)
    across = jax.ShapeDtypeStruct((batch, rows, columns // 4), jnp.uint32)
    down = jax.ShapeDtypeStruct((batch, rows // 2, columns), x.dtype)
    inputs = [(pairs(x, 4), _in_grid((None, BLOCK, BLOCK // 4, 2)))]
    outputs = [
        (across, _in_grid((None, BLOCK, BLOCK // 4))),
        _words_of(blocks, turned=False),
        (down, _in_grid((None, BLOCK // 2, BLOCK))),
        _words_of(blocks, turned=True),
    ]
    body = partial(_both, pruner=pruner, dtype=x.dtype)
    values, places, values_down, places_down = call(body, blocks, (), inputs, outputs, interpret)
    first = Packed(unpaired(values, x.dtype), as_words16(places), -1, 2, 4, "words16")
    return first, Packed(values_down, as_words16(places_down), -2, 2, 4, "words16")


# ---- the kernels ----


def _across(
    words: Ref, scale: Ref, origin: Ref, seen: Ref, values: Ref, places: Ref, *, pruner: Pruner,
    whole: tuple[int, ...], dtype: jnp.dtype,
) -> None:  # fmt: skip
    """Prune and pack groups along axis -1."""
    x = members_of(seen, slice(None), dtype)
    kept = pruned(pruner, x, words, scale, whole, (1, 4), *_groups(origin, x[0].shape, (1, 4)))
    first, second, nibble = two_of_four(kept, crowded=crowded(pruner, dtype))
    values[...] = together(first, second)
    places[...] = _block_of_words(nibble)


def _down(
    words: Ref, scale: Ref, origin: Ref, seen: Ref, values: Ref, places: Ref, **options: Any
) -> None:  # fmt: skip
    """Prune and pack groups along axis -2."""
    x = [seen[_member(j), :] for j in range(4)]
    _write_down(x, words, scale, origin, values, places, **options)


def _activated(
    words: Ref, scale: Ref, origin: Ref, h: Ref, g: Ref, made: Ref, values: Ref, places: Ref, *,
    activation: Activation, **options: Any,
) -> None:  # fmt: skip
    """Compute the gradient of an activation function's input, write it, prune it, and pack it along axis -2."""
    x = [times_derivative(activation, h[_member(j), :], g[_member(j), :]) for j in range(4)]
    for j in range(4):
        made[_member(j), :] = x[j]
    _write_down(x, words, scale, origin, values, places, **options)


def _member(j: int) -> Any:
    """Return the rows of a block that hold member ``j`` of the groups."""
    return pl.ds(j, BLOCK // 4, stride=4)


def _write_down(
    x: list[jax.Array], words: Ref, scale: Ref, origin: Ref, values: Ref, places: Ref, *, pruner: Pruner,
    whole: tuple[int, ...], dtype: jnp.dtype,
) -> None:  # fmt: skip
    kept = pruned(pruner, x, words, scale, whole, (4, 1), *_groups(origin, x[0].shape, (4, 1)))
    kept = two_of_four(kept, crowded=crowded(pruner, dtype))
    for j in range(2):
        values[pl.ds(j, BLOCK // 4, stride=2), :] = kept[j]
    places[...] = _block_of_words_down(kept[2])


def _both(
    seen: Ref, values: Ref, places: Ref, values_down: Ref, places_down: Ref, *, pruner: Pruner, dtype: jnp.dtype
) -> None:  # fmt: skip
    """Prune and pack the 16 members of 4 x 4 tiles: four groups along axis -1, and four along axis -2."""
    some = lambda i: pl.ds(i, BLOCK // 4, stride=4)
    tile = [members_of(seen, some(i), dtype) for i in range(4)]
    tile = tile if pruner == identity else pruner.kernel_form.tile(tile)
    for i in range(4):
        first, second, nibble = two_of_four(tile[i], crowded=crowded(pruner, dtype))
        values[some(i), :] = together(first, second)
        places[pl.ds(i, 8, stride=4), :] = _block_of_words(nibble)
    for j in range(4):
        kept = two_of_four([tile[i][j] for i in range(4)], crowded=crowded(pruner, dtype))
        for slot in range(2):
            values_down[pl.ds(slot, BLOCK // 4, stride=2), some(j)] = kept[slot]
        places_down[pl.ds(j, 8, stride=4), :] = _block_of_words_down(kept[2])


# ---- shared parts ----


def call(
    body: Callable[..., None], grid: tuple[int, ...], scalars: Sequence[jax.Array],
    inputs: Sequence[tuple[jax.Array, pl.BlockSpec]], outputs: Sequence[tuple[jax.ShapeDtypeStruct, pl.BlockSpec]],
    interpret: bool,
) -> list[jax.Array]:  # fmt: skip
    """Call a Triton kernel.

    Args:
      body: The kernel. It takes a reference to each small array, then to a block of each input and output.
      grid: The programs.
      scalars: Small arrays, which every program sees whole.
      inputs: Large arrays, and the blocks that programs take.
      outputs: The results, and the blocks that programs write.
      interpret: True to run on a CPU.
    """
    whole = [pl.BlockSpec(v.shape, lambda *_, rank=v.ndim: (0,) * rank) for v in scalars]
    kernel = pl.pallas_call(
        body,
        grid=grid,
        in_specs=[*whole, *(spec for _, spec in inputs)],
        out_specs=[spec for _, spec in outputs],
        out_shape=[result(shape.shape, shape.dtype, *scalars, *(v for v, _ in inputs)) for shape, _ in outputs],
        interpret=interpret,
        name="nm_pack",  # the name that profilers show
        **({} if interpret else {"compiler_params": versions.triton_params(num_warps=4, num_stages=1)}),
    )
    return kernel(*scalars, *(v for v, _ in inputs))


def _in_grid(block: tuple[int | None, ...]) -> pl.BlockSpec:
    """Return the blocks of an array whose axes are those of the grid."""
    return pl.BlockSpec(block, lambda b, i, j: (b, i, j, 0)[: len(block)])


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
    return pruner.kernel_form.members(x, u, scale[index // share])


def _groups(origin: Ref, block: tuple[int, ...], group: tuple[int, int]) -> tuple[jax.Array, Callable[[], Any]]:
    """Return the index of a program's array in the whole batch, and a function that returns where its groups are."""
    first = lambda d: where(origin, d, block[d - 1], group[d - 1])
    numbers = lambda: tuple(first(d) + lax.broadcasted_iota(jnp.int32, block, d - 1) for d in (1, 2))
    return where(origin, 0), numbers


def where(origin: Ref, axis: int, block: int = 1, group: int = 1) -> jax.Array:
    """Return where this program begins in the whole array along an axis of the grid, in groups.

    Args:
      origin: Where this part of the array begins, in values.
      axis: The axis.
      block: The number of groups along the axis that a program takes.
      group: The number of values along the axis in a group.
    """
    return origin[axis] // group + pl.program_id(axis) * block


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


def members_of(seen: Ref, rows: Any, dtype: jnp.dtype) -> list[jax.Array]:
    """Return the four members of groups, of some rows of `pairs`."""
    bits = lambda v: lax.bitcast_convert_type(v.astype(jnp.uint16), dtype)
    words = [jnp.squeeze(seen[rows, :, pl.ds(half, 1)], 2) for half in range(2)]
    return [bits(v) for word in words for v in (word & np.uint32(0xFFFF), word >> np.uint32(16))]


def together(first: Float[Array, "r c"], second: Float[Array, "r c"]) -> UInt[Array, "r c"]:
    """Put two 16-bit values into a word, the first one lowest."""
    bits = lambda v: lax.bitcast_convert_type(v, jnp.uint16).astype(jnp.uint32)
    return bits(first) | bits(second) << np.uint32(16)


def _words_of(blocks: tuple[int, ...], turned: bool) -> tuple[jax.ShapeDtypeStruct, pl.BlockSpec]:
    """Return the shape and the blocks of the words as Triton writes them: signed, with q on an axis of its own."""
    batch, i, j = blocks
    shape = (batch, j, i, 32, 4) if turned else (batch, i, j, 32, 4)
    index = (lambda b, i, j: (b, j, i, 0, 0)) if turned else (lambda b, i, j: (b, i, j, 0, 0))
    return jax.ShapeDtypeStruct(shape, jnp.int32), pl.BlockSpec((None, None, None, 32, 4), index)


def as_words16(places: Int[Array, "batch i j 32 4"]) -> UInt[Array, "batch i j 128"]:
    """Return the words of all blocks in the order ``words16``."""
    return lax.bitcast_convert_type(places, jnp.uint32).reshape(*places.shape[:3], 128)


def _block_of_words(nibble: UInt[Array, "rows 16"]) -> Int[Array, "lines 4"]:
    """Put nibbles of 64 rows, or of every fourth row, into words.

    The nibble of row (w, half, g) and group 4 q + t goes to the word at line (w, g) and column q.
    """
    rows, of_g = nibble.shape[0], nibble.shape[0] // 8
    row, group = (lax.broadcasted_iota(jnp.int32, nibble.shape, d) for d in range(2))
    shifted = nibble.astype(jnp.int32) << (group % 4 * 4 + row // of_g % 2 * 16)
    halves = jnp.sum(shifted.reshape(rows, 4, 4), 2)
    return jnp.sum(halves.reshape(4, 2, of_g, 4), 1).reshape(rows // 2, 4)


def _block_of_words_down(nibble: UInt[Array, "16 columns"]) -> Int[Array, "lines 4"]:
    """Do what `_block_of_words` does for groups along axis -2. The columns are the packed matrix's rows."""
    columns, of_g = nibble.shape[1], nibble.shape[1] // 8
    group, column = (lax.broadcasted_iota(jnp.int32, nibble.shape, d) for d in range(2))
    shifted = nibble.astype(jnp.int32) << (group % 4 * 4 + column // of_g % 2 * 16)
    halves = jnp.sum(shifted.reshape(4, 4, columns), 1)
    words = jnp.sum(halves.reshape(4, 4, 2, of_g), 2).reshape(4, columns // 2)
    return words.T  # words rather than nibbles, because there are fewer
