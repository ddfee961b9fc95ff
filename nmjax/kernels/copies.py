"""The FP8 forms of a tensor, out of one reading: cast, transposed, pruned and packed, in whatever formats products want.

FP8 tensor cores take both operands along k alone, so that a tensor that two products contract along different axes is
wanted twice, once transposed. A program takes 128 x 64 values as the 16 members of 4 x 4 tiles, in which groups along
either axis are whole, and turns only what is small by then: a word of four bytes, or of two and a nibble.

A copy is multiplied so that its largest value fits the format, or a bound of it does, and comes with what undoes that.
"""

from functools import partial

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
import numpy as np
from jax import lax

from nmjax.kernels.compress import call, members_of, pairs, uniform
from nmjax.kernels.format import Packed, two_of_four
from nmjax.kernels.limits import COPY_COLUMNS as COLUMNS, COPY_ROWS as ROWS, Copy
from nmjax.pruners import float8, identity, mvue, soft

_FOUR = tuple(range(4))


def copies(
    x: jax.Array, words: jax.Array, beta: jax.Array, *, wanted: tuple[Copy, ...], interpret: bool = False
) -> list[tuple[jax.Array | Packed, jax.Array]]:
    """Copies of ``[B, R, C]`` of 16-bit values, each with the factors that undo its scale. Of ``words [S, 4]``, of the
    draws of pruners and of roundings, and ``beta [S]``, the scale of `soft`, each serves as many arrays of the batch, which
    have one scale in common."""
    batch, rows, columns = x.shape
    share = batch // len(words)
    largest = jax.vmap(float8.largest)(x.reshape(-1, share, rows, columns))
    scales = jnp.stack([float8.scale(largest * growth(copy.pruner, beta), copy.format) for copy in wanted], 1)
    parts = [_parts(copy, x.shape) for copy in wanted]
    written = call(
        partial(_kernel, wanted=wanted, shape=x.shape, dtype=x.dtype, share=share),
        (batch, rows // ROWS, columns // COLUMNS),
        (words, jnp.concatenate([beta[:, None], scales], 1)),
        [(pairs(x, 4), pl.BlockSpec((None, ROWS, COLUMNS // 4, 2), lambda b, i, j: (b, i, j, 0)))],
        [part for both in parts for part in both],
        interpret,
    )
    made = iter(written)
    each = zip(wanted, parts, (1 / scales).T, strict=True)
    return [(_made(copy, [next(made) for _ in both]), undo) for copy, both, undo in each]


def growth(pruner, beta):
    """How much larger than what it prunes a result can be."""
    if isinstance(pruner, mvue):
        return pruner.m / pruner.n
    return jnp.abs(beta) if isinstance(pruner, soft) and pruner.remembers else 1.0


def _parts(copy, shape):
    """The arrays of a copy, and their blocks: bytes as words of four, or pairs as words of two beside those of nibbles."""
    batch, rows, columns = shape
    turned = copy.axis == -2 if copy.packed else copy.turned
    outer, inner, block = (columns, rows, (COLUMNS, ROWS)) if turned else (rows, columns, (ROWS, COLUMNS))
    index = (lambda b, i, j: (b, j, i)) if turned else (lambda b, i, j: (b, i, j))
    part = lambda per, dtype: (
        jax.ShapeDtypeStruct((batch, outer, inner // per), dtype),
        pl.BlockSpec((None, block[0], block[1] // per), index),
    )
    return [part(4, jnp.uint16), part(32, jnp.int32)] if copy.packed else [part(4, jnp.uint32)]


def _made(copy, arrays):
    """The copy out of the arrays of its parts: other views of the same memory."""
    dtype = float8.FORMATS[copy.format]
    flat = lambda v: lax.bitcast_convert_type(v, dtype).reshape(*v.shape[:-1], -1)
    if not copy.packed:
        return flat(arrays[0])
    return Packed(flat(arrays[0]), lax.bitcast_convert_type(arrays[1], jnp.uint32), -1, 2, 4, "words8")


def _kernel(words, factors, seen, *outputs, wanted, shape, dtype, share):
    some = lambda i, count: pl.ds(i, count, stride=4)
    tile = [members_of(seen, some(i, ROWS // 4), dtype) for i in _FOUR]
    turn = lambda word, turned: _turned(word) if turned else word
    outputs = iter(outputs)
    for at, copy in enumerate(wanted):
        down = copy.axis == -2
        rounded = [_rounded(tile, copy, down, i, at, words, factors, shape, share) for i in _FOUR]
        of = (lambda i, j, v=rounded: v[j][i]) if down else (lambda i, j, v=rounded: v[i][j])  # member (i, j)
        if copy.packed:
            values, places = next(outputs), next(outputs)
            for line, group in enumerate(rounded):
                crowded = np.uint32(0x7F) if copy.pruner == identity else None  # a NaN in either format
                first, second, nibble = two_of_four(group, [v & np.uint32(0x7F) != 0 for v in group], crowded)
                word = turn(first | second << np.uint32(8) | nibble << np.uint32(16), down)
                values[some(line, word.shape[0]), :] = (word & np.uint32(0xFFFF)).astype(jnp.uint16)
                places[some(line, word.shape[0]), :] = _row_words(word >> np.uint32(16))
        else:
            bytes_of = next(outputs)
            for line in _FOUR:
                group = [of(i, line) if copy.turned else of(line, i) for i in _FOUR]
                word = turn(sum((v << np.uint32(8 * i) for i, v in enumerate(group) if i), group[0]), copy.turned)
                bytes_of[some(line, word.shape[0]), :] = word


def _rounded(tile, copy, down, line, at, words, factors, shape, share):
    """One line of members of the tile, a group of four, pruned and in the format: as bytes."""
    x = [tile[i][line] for i in _FOUR] if down else tile[line]
    _, rows, columns = shape
    block, of, i, j = x[0].shape, *(pl.program_id(d) for d in range(3))
    row, column = (at * block[d] + lax.broadcasted_iota(jnp.int32, block, d) for d, at in enumerate((i, j)))
    row, column = (row, column * 4 + line) if down else (row * 4 + line, column)
    whole = (rows // 4, columns) if down else (rows, columns // 4)
    draw = lambda first: uniform(words, of, share, whole, row, column, first)
    u = draw(0) if copy.pruner.stochastic else None
    r = draw(2) if copy.rounding == "random" else None
    beta, scale = factors[of // share, 0], factors[of // share, 1 + at]
    x = x if copy.pruner == identity else copy.pruner.of_members(x, u, beta)
    byte = lambda v: lax.bitcast_convert_type(float8.cast(v.astype(jnp.float32) * scale, copy.format, r), jnp.uint8)
    return [byte(v).astype(jnp.uint32) for v in x]


def _turned(word):
    """Transposed, behind a maximum that changes nothing: Triton would otherwise carry all that led to the word through the
    transposition, and compile for minutes. A reduction it leaves alone."""
    twice = jnp.broadcast_to(word.astype(jnp.int32)[None], (2, *word.shape))
    return jnp.max(twice, 0).astype(jnp.uint32).T


def _row_words(nibble):
    """[lines, groups] to [lines, groups/8]: eight nibbles a word, the first lowest."""
    lines, groups = nibble.shape
    shifted = nibble.astype(jnp.int32) << lax.broadcasted_iota(jnp.int32, nibble.shape, 1) % 8 * 4
    return jnp.sum(shifted.reshape(lines, groups // 8, 8), 2)
