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

from nmjax import random, versions
from nmjax.packing import Packed, two_of_four
from nmjax.pruners import identity
from nmjax.typing import Pruner

BLOCK = 64


def compress(
    x: jax.Array, axis: int, pruner: Pruner = identity, key=None, state=None, *, interpret: bool = False
) -> Packed:
    """``[B, R, C]`` pruned along its last axis or the one before, and packed. With `identity` it is 2:4 already."""
    batch, rows, columns = x.shape
    blocks = (batch, rows // BLOCK, columns // BLOCK)
    body = partial(_down if axis == -2 else _across, pruner=pruner, shape=x.shape, dtype=x.dtype)
    if axis == -2:
        seen, seen_block = x, (None, BLOCK, BLOCK)
        kept, kept_block = jax.ShapeDtypeStruct((batch, rows // 2, columns), x.dtype), (None, BLOCK // 2, BLOCK)
    else:  # two members a word, of 16 bits each: what a thread reads or writes at once
        seen, seen_block = pairs(x, 4), (None, BLOCK, BLOCK // 4, 2)
        kept, kept_block = jax.ShapeDtypeStruct((batch, rows, columns // 4), jnp.uint32), (None, BLOCK, BLOCK // 4)
    words, words_block = _words_of(blocks, turned=axis == -2)
    here = lambda shape: pl.BlockSpec(shape, lambda b, i, j: (b, i, j, 0)[: len(shape)])
    values, places = call(
        body, blocks, noise(key, state), [(seen, here(seen_block))], [(kept, here(kept_block)), (words, words_block)],
        interpret,
    )  # fmt: skip
    return Packed(unpaired(values, x.dtype), as_words16(places), axis, 2, 4, "words16")


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


def _across(words, scale, seen, values, places, *, pruner, shape, dtype):
    """Groups along columns."""
    _, rows, columns = shape
    x = members_of(seen, slice(None), dtype)
    u = uniforms(words, (rows, columns // 4), x[0].shape) if pruner.stochastic else None
    first, second, nibble = two_of_four(pruned(pruner, x, u, scale))
    values[...] = together(first, second)
    places[...] = _block_of_words(nibble)


def _down(words, scale, seen, values, places, *, pruner, shape, dtype):
    """Groups along rows."""
    _, rows, columns = shape
    x = [seen[pl.ds(j, BLOCK // 4, stride=4), :] for j in range(4)]
    u = uniforms(words, (rows // 4, columns), x[0].shape) if pruner.stochastic else None
    kept = two_of_four(pruned(pruner, x, u, scale))
    for j in range(2):
        values[pl.ds(j, BLOCK // 4, stride=2), :] = kept[j]
    places[...] = _block_of_words_down(kept[2])


def _both(seen, values, places, values_down, places_down, *, pruner, dtype):
    """The 16 members of 4 x 4 tiles: four groups along columns and four along rows."""
    some = lambda i: pl.ds(i, BLOCK // 4, stride=4)
    tile = [members_of(seen, some(i), dtype) for i in range(4)]
    tile = tile if pruner == identity else pruner.of_tile(tile)
    for i in range(4):
        first, second, nibble = two_of_four(tile[i])
        values[some(i), :] = together(first, second)
        places[pl.ds(i, 8, stride=4), :] = _block_of_words(nibble)
    for j in range(4):
        kept = two_of_four([tile[i][j] for i in range(4)])
        for slot in range(2):
            values_down[pl.ds(slot, BLOCK // 4, stride=2), some(j)] = kept[slot]
        places_down[pl.ds(j, 8, stride=4), :] = _block_of_words_down(kept[2])


# ---- what they share ----


def call(body, grid, scalars, inputs, outputs, interpret):
    """A Triton kernel of some small arrays and of blocks of large ones."""
    whole = [pl.BlockSpec(v.shape, lambda *_: (0,)) for v in scalars]
    kernel = pl.pallas_call(
        body,
        grid=grid,
        in_specs=[*whole, *(spec for _, spec in inputs)],
        out_specs=[spec for _, spec in outputs],
        out_shape=[shape for shape, _ in outputs],
        interpret=interpret,
        **({} if interpret else {"compiler_params": versions.triton(num_warps=4, num_stages=1)}),
    )
    return kernel(*scalars, *(v for v, _ in inputs))


def noise(key, state):
    """What a pruner reads beside values: two words and a scale."""
    words = jnp.zeros(2, jnp.uint32) if key is None else random.words(key)
    scale = jnp.ones(1, jnp.float32) if state is None else jnp.asarray(state, jnp.float32).reshape(1)
    return words, scale


def pruned(pruner, x, u, scale):
    return x if pruner == identity else pruner.of_members(x, u, scale[0])


def uniforms(words, whole, block):
    """One uniform for every group of this program's block, by its number in ``whole``, of every array of a batch."""
    return random.as_uniform(random.bits((words[0], words[1]), numbers(whole, block)))


def numbers(whole, block):
    """Row-major numbers of the places of this program's block."""
    batch, i, j = (pl.program_id(d).astype(jnp.uint32) for d in range(3))
    at = lambda axis, start: start * np.uint32(block[axis]) + lax.broadcasted_iota(jnp.uint32, block, axis)
    row = batch * np.uint32(whole[0]) + at(0, i)
    return row * np.uint32(whole[1]) + at(1, j)


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
