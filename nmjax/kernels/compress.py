"""Prune and pack in one pass: a 16-bit array is read once, and its packed form written as tensor cores read it.

A program takes 64 x 64 values, whose words are one block of ``words16``. It has the members of groups of four in four
arrays, prunes them by the pruner's own `of_members`, keeps two, and their nibble. Noise is that of the pruner on the
whole array: one uniform a group, by its row-major number.

These kernels are Triton's: plain arithmetic on blocks, which a CPU can run as it stands.
"""

from functools import partial

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
import numpy as np
from jax import lax

from nmjax.core import random, versions
from nmjax.core.pruner import Pruner
from nmjax.kernels.format import Packed, two_of_four
from nmjax.kernels.targets import result
from nmjax.pruners import identity

BLOCK = 64


def compress(
    x: jax.Array, words: jax.Array, scale: jax.Array, *, axis: int, pruner: Pruner = identity, interpret: bool = False
) -> Packed:
    """``[B, R, C]`` pruned along its last axis or the one before, and packed. With `identity` it is 2:4 already. Of
    ``words [S, 2]`` and ``scale [S]``, those of the noise and of `soft`, each serves as many arrays of the batch."""
    batch, rows, columns = x.shape
    blocks = (batch, rows // BLOCK, columns // BLOCK)
    options = {"pruner": pruner, "shape": x.shape, "dtype": x.dtype, "share": batch // len(words)}
    body = partial(_down if axis == -2 else _across, **options)
    if axis == -2:
        seen, seen_block = x, (None, BLOCK, BLOCK)
        kept, kept_block = jax.ShapeDtypeStruct((batch, rows // 2, columns), x.dtype), (None, BLOCK // 2, BLOCK)
    else:  # two members a word, of 16 bits each: what a thread reads or writes at once
        seen, seen_block = pairs(x, 4), (None, BLOCK, BLOCK // 4, 2)
        kept, kept_block = jax.ShapeDtypeStruct((batch, rows, columns // 4), jnp.uint32), (None, BLOCK, BLOCK // 4)
    places, places_block = _words_of(blocks, turned=axis == -2)
    here = lambda shape: pl.BlockSpec(shape, lambda b, i, j: (b, i, j, 0)[: len(shape)])
    values, written = call(
        body, blocks, (words, scale), [(seen, here(seen_block))], [(kept, here(kept_block)), (places, places_block)],
        interpret,
    )  # fmt: skip
    return Packed(unpaired(values, x.dtype), as_words16(written), axis, 2, 4, "words16")


def compress_both(x: jax.Array, pruner: Pruner = identity, *, interpret: bool = False) -> tuple[Packed, Packed]:
    """``[B, R, C]`` packed along its last axis and along the one before, out of one reading. It is 2:4 along both as it
    comes, or by `transposable`."""
    batch, rows, columns = x.shape
    blocks = (batch, rows // BLOCK, columns // BLOCK)
    across = jax.ShapeDtypeStruct((batch, rows, columns // 4), jnp.uint32)
    down = jax.ShapeDtypeStruct((batch, rows // 2, columns), x.dtype)
    here = lambda shape: pl.BlockSpec(shape, lambda b, i, j: (b, i, j, 0)[: len(shape)])
    values, places, values_down, places_down = call(
        partial(_both, pruner=pruner, dtype=x.dtype), blocks, (),
        [(pairs(x, 4), here((None, BLOCK, BLOCK // 4, 2)))],
        [
            (across, here((None, BLOCK, BLOCK // 4))), _words_of(blocks, turned=False),
            (down, here((None, BLOCK // 2, BLOCK))), _words_of(blocks, turned=True),
        ],
        interpret,
    )  # fmt: skip
    first = Packed(unpaired(values, x.dtype), as_words16(places), -1, 2, 4, "words16")
    return first, Packed(values_down, as_words16(places_down), -2, 2, 4, "words16")


# ---- the kernels ----


def _across(words, scale, seen, values, places, *, pruner, shape, dtype, share):
    """Groups along columns."""
    _, rows, columns = shape
    x = members_of(seen, slice(None), dtype)
    kept = _pruned(pruner, x, words, scale, (rows, columns // 4), share)
    first, second, nibble = two_of_four(kept, crowded=_nan(pruner, dtype))
    values[...] = together(first, second)
    places[...] = _block_of_words(nibble)


def _down(words, scale, seen, values, places, *, pruner, shape, dtype, share):
    """Groups along rows."""
    _, rows, columns = shape
    x = [seen[pl.ds(j, BLOCK // 4, stride=4), :] for j in range(4)]
    kept = _pruned(pruner, x, words, scale, (rows // 4, columns), share)
    kept = two_of_four(kept, crowded=_nan(pruner, dtype))
    for j in range(2):
        values[pl.ds(j, BLOCK // 4, stride=2), :] = kept[j]
    places[...] = _block_of_words_down(kept[2])


def _both(seen, values, places, values_down, places_down, *, pruner, dtype):
    """The 16 members of 4 x 4 tiles: four groups along columns and four along rows."""
    some = lambda i: pl.ds(i, BLOCK // 4, stride=4)
    tile = [members_of(seen, some(i), dtype) for i in range(4)]
    tile = tile if pruner == identity else pruner.of_tile(tile)
    for i in range(4):
        first, second, nibble = two_of_four(tile[i], crowded=_nan(pruner, dtype))
        values[some(i), :] = together(first, second)
        places[pl.ds(i, 8, stride=4), :] = _block_of_words(nibble)
    for j in range(4):
        kept = two_of_four([tile[i][j] for i in range(4)], crowded=_nan(pruner, dtype))
        for slot in range(2):
            values_down[pl.ds(slot, BLOCK // 4, stride=2), some(j)] = kept[slot]
        places_down[pl.ds(j, 8, stride=4), :] = _block_of_words_down(kept[2])


# ---- what they share ----


def call(body, grid, scalars, inputs, outputs, interpret):
    """A Triton kernel of some small arrays and of blocks of large ones."""
    whole = [pl.BlockSpec(v.shape, lambda *_, rank=v.ndim: (0,) * rank) for v in scalars]
    kernel = pl.pallas_call(
        body,
        grid=grid,
        in_specs=[*whole, *(spec for _, spec in inputs)],
        out_specs=[spec for _, spec in outputs],
        out_shape=[result(shape.shape, shape.dtype, *scalars, *(v for v, _ in inputs)) for shape, _ in outputs],
        interpret=interpret,
        **({} if interpret else {"compiler_params": versions.triton_params(num_warps=4, num_stages=1)}),
    )
    return kernel(*scalars, *(v for v, _ in inputs))


def _pruned(pruner, x, words, scale, whole, share):
    """The members of groups pruned, with one uniform a group by its number in ``whole``, the shape of an array's groups."""
    block, of, i, j = x[0].shape, *(pl.program_id(d) for d in range(3))
    row, column = (at * block[d] + lax.broadcasted_iota(jnp.int32, block, d) for d, at in enumerate((i, j)))
    u = uniform(words, of, share, whole, row, column) if pruner.stochastic else None
    return x if pruner == identity else pruner.of_members(x, u, scale[of // share])


def _nan(pruner, dtype):
    """What a group becomes that was to be 2:4 as it came, and is not."""
    return jnp.array(jnp.nan, dtype) if pruner == identity else None


def uniform(words, of, share, whole, row, column, first: int = 0):
    """The uniforms of groups at these rows and columns, in array ``of`` of a batch whose every ``share`` have two words,
    from the ``first`` on."""
    number = (of % share * whole[0] + row).astype(jnp.uint32) * np.uint32(whole[1]) + column.astype(jnp.uint32)
    return random.as_uniform(random.bits((words[of // share, first], words[of // share, first + 1]), number))


def pairs(x, per_group):
    """16-bit values two a word, and the words of a group on an axis of their own."""
    *front, last = x.shape
    return lax.bitcast_convert_type(x.reshape(*front, last // per_group, per_group // 2, 2), jnp.uint32)


def unpaired(words, dtype):
    """16-bit values out of words of two."""
    if words.dtype != jnp.uint32:
        return words
    return lax.bitcast_convert_type(words, dtype).reshape(*words.shape[:-1], 2 * words.shape[-1])


def members_of(seen, rows, dtype):
    """The members of groups of four, of some rows of `pairs`."""
    bits = lambda v: lax.bitcast_convert_type(v.astype(jnp.uint16), dtype)
    words = [jnp.squeeze(seen[rows, :, pl.ds(half, 1)], 2) for half in range(2)]
    return [bits(v) for word in words for v in (word & np.uint32(0xFFFF), word >> np.uint32(16))]


def together(first, second):
    bits = lambda v: lax.bitcast_convert_type(v, jnp.uint16).astype(jnp.uint32)
    return bits(first) | bits(second) << np.uint32(16)


def _words_of(blocks, turned):
    """The words of all blocks, as Triton reduces them: signed, with the lanes q apart."""
    batch, i, j = blocks
    shape = (batch, j, i, 32, 4) if turned else (batch, i, j, 32, 4)
    index = (lambda b, i, j: (b, j, i, 0, 0)) if turned else (lambda b, i, j: (b, i, j, 0, 0))
    return jax.ShapeDtypeStruct(shape, jnp.int32), pl.BlockSpec((None, None, None, 32, 4), index)


def as_words16(places):
    return lax.bitcast_convert_type(places, jnp.uint32).reshape(*places.shape[:3], 128)


def _block_of_words(nibble):
    """[rows, 16 groups] of 64 rows, or of every fourth, to [rows/2 (w, g), 4 q]: row (w, half, g), group 4 q + t."""
    rows, of_g = nibble.shape[0], nibble.shape[0] // 8
    row, group = (lax.broadcasted_iota(jnp.int32, nibble.shape, d) for d in range(2))
    shifted = nibble.astype(jnp.int32) << (group % 4 * 4 + row // of_g % 2 * 16)
    halves = jnp.sum(shifted.reshape(rows, 4, 4), 2)
    return jnp.sum(halves.reshape(4, 2, of_g, 4), 1).reshape(rows // 2, 4)


def _block_of_words_down(nibble):
    """The same of [16 groups, columns], whose columns are the rows of the packed matrix. Transposed when it is small."""
    columns, of_g = nibble.shape[1], nibble.shape[1] // 8
    group, column = (lax.broadcasted_iota(jnp.int32, nibble.shape, d) for d in range(2))
    shifted = nibble.astype(jnp.int32) << (group % 4 * 4 + column // of_g % 2 * 16)
    halves = jnp.sum(shifted.reshape(4, 4, columns), 1)
    return jnp.sum(halves.reshape(4, 4, 2, of_g), 2).reshape(4, columns // 2).T
