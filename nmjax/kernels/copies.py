"""The FP8 forms of a tensor, made in one pass: cast, transposed, pruned and packed, in the formats that products take.

FP8 tensor cores take both operands contiguous along k. If two products contract a tensor along different axes, they
need it twice, once transposed. A program takes 128 x 64 values as the 16 members of 4 x 4 tiles, so that groups along
either axis are whole. It transposes words, which are few: words of four bytes, or of two bytes and a nibble.

A copy is scaled so that its largest value, or a bound of it, fits the format. It comes with the factor that undoes
this.
"""

from functools import partial
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, UInt

from nmjax.kernels.compress import call, members_of, pairs, uniform, uniforms, where
from nmjax.kernels.format import Packed, two_of_four
from nmjax.kernels.limits import COPY_COLUMNS as COLUMNS, COPY_ROWS as ROWS, Copy
from nmjax.pruners import float8, identity

Ref = Any  # a reference to a block of an array, inside a kernel

Lines = list[list[jax.Array]]  # four lines of four members of 4 x 4 tiles

FOUR = range(4)


def copies(
    x: Float[Array, "batch r c"], words: UInt[Array, "s n"], factors: Float[Array, "s f"], origin: Int[Array, "3"], *,
    wanted: tuple[Copy, ...], whole: tuple[int, int, int], interpret: bool = False,
) -> list[jax.Array | Packed]:  # fmt: skip
    """Make FP8 forms of arrays.

    Args:
      x: 16-bit values. R divides by 128 and C by 64.
      words: Scrambled keys: two words for each random number of the pruners, and two for the roundings. Row i serves
        arrays i * batch/S to (i + 1) * batch/S - 1 of the whole batch, which also share one scale.
      factors: What `factors_of` returns.
      origin: Where x begins in the whole array: [batch, row, column]. Zeros if x is the whole one.
      wanted: The forms.
      whole: The shape of the whole array, which numbers the groups for the noise.
      interpret: True to run on a CPU.
    """
    batch, rows, columns = x.shape
    parts = [_parts(copy, x.shape) for copy in wanted]
    written = call(
        partial(_kernel, wanted=wanted, whole=whole, dtype=x.dtype),
        (batch, rows // ROWS, columns // COLUMNS),
        (words, factors, origin),
        [(pairs(x, 4), pl.BlockSpec((None, ROWS, COLUMNS // 4, 2), lambda b, i, j: (b, i, j, 0)))],
        [part for both in parts for part in both],
        interpret,
    )
    arrays = iter(written)
    return [form_of(copy, [next(arrays) for _ in both]) for copy, both in zip(wanted, parts, strict=True)]


def factors_of(
    x: Float[Array, "batch r c"], beta: Float[Array, " s"], wanted: tuple[Copy, ...]
) -> Float[Array, "s f"]:  # fmt: skip
    """Return a scale of `soft`, and then a scale of each form, for each of the S parts of a batch."""
    largest = jax.vmap(float8.largest)(x.reshape(len(beta), -1, *x.shape[1:]))
    scales = [float8.scale(largest * copy.pruner.kernel_form.growth(beta), copy.format) for copy in wanted]
    return jnp.stack([beta, *scales], 1)


def _parts(copy: Copy, shape: tuple[int, ...]) -> list[tuple[jax.ShapeDtypeStruct, pl.BlockSpec]]:
    """Return the shapes of the arrays of a copy, and their blocks.

    They are words of four bytes; for a packed copy, words of two bytes, and words of eight nibbles.
    """
    batch, rows, columns = shape
    outer, inner, block = (columns, rows, (COLUMNS, ROWS)) if copy.turns else (rows, columns, (ROWS, COLUMNS))
    index = (lambda b, i, j: (b, j, i)) if copy.turns else (lambda b, i, j: (b, i, j))
    part = lambda per, dtype: (
        jax.ShapeDtypeStruct((batch, outer, inner // per), dtype),
        pl.BlockSpec((None, block[0], block[1] // per), index),
    )
    return [part(4, jnp.uint16), part(32, jnp.int32)] if copy.packed else [part(4, jnp.uint32)]


def form_of(copy: Copy, arrays: list[jax.Array]) -> jax.Array | Packed:
    """Return a copy, given the arrays of words that the kernel wrote: their bits are viewed as FP8 values."""
    dtype = float8.FORMATS[copy.format]
    flat = lambda v: lax.bitcast_convert_type(v, dtype).reshape(*v.shape[:-1], -1)
    if not copy.packed:
        return flat(arrays[0])
    return Packed(flat(arrays[0]), lax.bitcast_convert_type(arrays[1], jnp.uint32), -1, 2, 4, "words8")


def _kernel(
    words: Ref, factors: Ref, origin: Ref, seen: Ref, *outputs: Ref, wanted: tuple[Copy, ...],
    whole: tuple[int, ...], dtype: jnp.dtype,
) -> None:  # fmt: skip
    """Write the blocks of all forms."""
    tile = [members_of(seen, _every_fourth(i, ROWS // 4), dtype) for i in FOUR]
    block = tile[0][0].shape
    numbers = (lax.broadcasted_iota(jnp.int32, block, d) for d in range(2))
    at = (where(origin, 0), *(where(origin, d + 1, block[d], 4) + number for d, number in enumerate(numbers)))
    blocks = iter(outputs)
    for number, copy in enumerate(wanted):
        groups = [rounded(tile, copy, line, words, factors, number, whole, at) for line in FOUR]
        if copy.packed:
            _write_packed(copy, groups, next(blocks), next(blocks))
        else:
            _write_bytes(copy, groups, next(blocks))


def _every_fourth(first: int, count: int) -> Any:
    return pl.ds(first, count, stride=4)


def _write_packed(copy: Copy, groups: Lines, values: Ref, places: Ref) -> None:
    """Write the two kept bytes of groups, and their nibbles."""
    for line, group in enumerate(groups):
        both, nibble = kept_bytes(copy, group)
        word = both | nibble << np.uint32(16)
        word = _turned(word) if copy.turns else word
        values[_every_fourth(line, word.shape[0]), :] = (word & np.uint32(0xFFFF)).astype(jnp.uint16)
        places[_every_fourth(line, word.shape[0]), :] = _row_words(word >> np.uint32(16))


def _write_bytes(copy: Copy, groups: Lines, output: Ref) -> None:
    """Write all bytes, four to a word."""
    for line, word in enumerate(words_of_bytes(copy, groups)):
        word = _turned(word) if copy.turns else word
        output[_every_fourth(line, word.shape[0]), :] = word


def rounded(
    tile: Lines, copy: Copy, line: int, words: Ref, factors: Ref, number: int, whole: tuple[int, ...],
    at: tuple[jax.Array, ...],
) -> list[UInt[Array, "r c"]]:  # fmt: skip
    """Prune and round one line of the tile's members, a group of four, and return their bytes.

    Args:
      tile: The 16 members of the tiles, by row and column.
      copy: The form that is wanted.
      line: A row of the tiles if the axis of the form is -1, and a column if it is -2.
      words, factors, whole: As in `copies`.
      number: The index of the form in ``wanted``.
      at: The array's index in the whole batch, and the row and column of each tile in the whole array, in tiles.
    """
    down = copy.axis == -2
    x = [tile[i][line] for i in FOUR] if down else tile[line]
    (index, row, column), share = at, whole[0] // words.shape[0]
    row, column = (row, column * 4 + line) if down else (row * 4 + line, column)
    groups = (whole[1] // 4, whole[2]) if down else (whole[1], whole[2] // 4)
    numbers, last = (index, share, groups, row, column), words.shape[1] - 2
    u = uniforms(words, last, *numbers) if copy.pruner.facts.stochastic else None
    r = uniform(words, *numbers, last) if copy.rounding == "random" else None
    beta, scale = factors[index // share, 0], factors[index // share, 1 + number]
    x = x if copy.pruner == identity else copy.pruner.kernel_form.members(x, u, beta)
    byte = lambda v: lax.bitcast_convert_type(float8.cast(v.astype(jnp.float32) * scale, copy.format, r), jnp.uint8)
    return [byte(v).astype(jnp.uint32) for v in x]


def kept_bytes(copy: Copy, group: list[UInt[Array, "r c"]]) -> tuple[UInt[Array, "r c"], UInt[Array, "r c"]]:
    """Return the two kept bytes of each group, with the first in the low byte, and the group's nibble."""
    crowded = np.uint32(0x7F) if copy.pruner == identity else None  # a NaN in either format
    first, second, nibble = two_of_four(group, [v & np.uint32(0x7F) != 0 for v in group], crowded)
    return first | second << np.uint32(8), nibble


def words_of_bytes(copy: Copy, groups: Lines) -> list[UInt[Array, "r c"]]:
    """Return the four lines of the form's tiles, each as words of four bytes."""
    groups_lie_as_words = (copy.axis == -2) == copy.turns
    lines = groups if groups_lie_as_words else [[group[line] for group in groups] for line in FOUR]
    return [sum((v << np.uint32(8 * i) for i, v in enumerate(line) if i), line[0]) for line in lines]


def _turned(word: UInt[Array, "r c"]) -> UInt[Array, "c r"]:
    """Transpose words, behind a maximum that changes nothing.

    Without the maximum, Triton carries everything that leads to the word through the transposition, and compiles for
    minutes. It leaves reductions alone.
    """
    twice = jnp.broadcast_to(word.astype(jnp.int32)[None], (2, *word.shape))
    return jnp.max(twice, 0).astype(jnp.uint32).T


def _row_words(nibble: UInt[Array, "lines groups"]) -> Array:
    """Put eight nibbles of a line into a word, the first lowest."""
    lines, groups = nibble.shape
    shifted = nibble.astype(jnp.int32) << lax.broadcasted_iota(jnp.int32, nibble.shape, 1) % 8 * 4
    return jnp.sum(shifted.reshape(lines, groups // 8, 8), 2)
