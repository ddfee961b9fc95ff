"""Pack 4 x 4 tiles in one pass: along both axes at once, and in FP8, in the formats that products take.

FP8 tensor cores take both operands contiguous along k. If two products contract a tensor along different axes, they
need it twice, once transposed. A form is scaled so that its largest value, or a bound of it, fits the format, and comes
with the factor that undoes this.

A warpgroup takes a block of 64 x 64 values, which is 16 x 16 tiles. A kernel holds a block as 16 arrays of 16 x 16, one
for each member of a tile. A thread holds two tiles. They are in the same column, two rows apart.

The row of a tile has four bits, "r3" to "r0", and its column has four bits, "c3" to "c0". "r3" and "c3" give the warp.
The bits in `_LANES` give the lane. "r1" tells the two tiles of a thread apart.

A word holds nibbles of several threads. Threads exchange parts of words by shuffles (`_gathered`).
"""

import functools
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic.gpu import fragmented_array as fa, utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector
from jaxtyping import Array, Float, UInt

from nmjax.kernels.batches import result
from nmjax.kernels.format import Packed, two_of_four
from nmjax.kernels.limits import Copy
from nmjax.kernels.packing import (
    BLOCK,
    Place,
    apart,
    as_words16,
    call,
    crowded,
    iota,
    loaded,
    of_registers,
    pairs,
    store,
    together,
    uniform,
    uniforms,
    unpaired,
)
from nmjax.pruners import float8, identity

Ref = Any  # a reference to a block of an array, inside a kernel
Scalar = Any  # a value of MLIR
Lines = list[list[jax.Array]]  # four lines of four members of 4 x 4 tiles

FOUR = range(4)

_TILES = BLOCK // 4
_ROWS, _COLUMNS = ("r3", "r2", "r1", "r0"), ("c3", "c2", "c1", "c0")
_WARPS, _LANES = ("r3", "c3"), ("r2", "r0", "c2", "c1", "c0")


class _Words(NamedTuple):
    """The layout of a block's nibbles in words.

    The bits "l1" and "l0" number the four lines of a tile: its rows, or its columns for axis -2.

    Attributes:
      position: The three bits of a nibble's position in its word, the lowest first.
      rows: The bits of a word's row, the highest first.
      columns: The bits of a word's column, the highest first.
    """

    position: tuple[str, ...]
    rows: tuple[str, ...]
    columns: tuple[str, ...]


# ``words16`` (see `nmjax.kernels.format`): rows are w and g of a thread, and columns are its q. The position in a word
# is that of a nibble in a half, and the half.
_ACROSS16 = _Words(("c0", "c1", "r1"), ("r3", "r2", "r0", "l1", "l0"), ("c3", "c2"))
_DOWN16 = _Words(("r0", "r1", "c1"), ("c3", "c2", "c0", "l1", "l0"), ("r3", "r2"))
# ``words8``: a word holds eight neighbouring groups of a row.
_ACROSS8 = _Words(("c0", "c1", "c2"), (*_ROWS, "l1", "l0"), ("c3",))
_DOWN8 = _Words(("r0", "r1", "r2"), (*_COLUMNS, "l1", "l0"), ("r3",))


def _layout(rows: Sequence[str], columns: Sequence[str], each: int = 1) -> Any:
    """Return the layout of an array whose row and column bits have these names.

    Args:
      rows: The bits of the rows, the highest first.
      columns: The bits of the columns, the highest first. A column is ``each`` neighbouring values.
      each: The number of values that a register of a thread holds.
    """
    sides = [2 ** len(rows), 2 ** len(columns) * each]
    tiles = [tuple(sides)]
    for _ in rows[:-1]:  # each tiling splits off one bit
        sides[0] //= 2
        tiles.append(tuple(sides))
    for _ in columns:
        sides[1] //= 2
        tiles.append((sides[1],))
    # The tiled array has a dimension for each row bit, with one of size 1 between two of them, then one for each column
    # bit, and then one of size ``each``.
    place = {bit: 2 * i - 2 * (len(rows) - 1) - len(columns) - 2 for i, bit in enumerate(rows)}
    place |= {bit: i - len(columns) - 1 for i, bit in enumerate(columns)}
    of = lambda bits: tuple(place[bit] for bit in bits)
    return plgpu.Layout.TILED(fa.Tiling(tuple(tiles)), warp_dims=of(_WARPS), lane_dims=of(_LANES), vector_dim=-1)


_TILED = _layout(_ROWS, _COLUMNS)
_TURNED = _layout(_COLUMNS, _ROWS)
_PAIRED = _layout(_ROWS, _COLUMNS, each=2)


# ---- the kernels ----


def copies(
    x: Float[Array, "batch r c"], *scalars: jax.Array, wanted: tuple[Copy, ...], whole: tuple[int, int, int],
    interpret: bool = False,
) -> list[jax.Array | Packed]:  # fmt: skip
    """Make forms of arrays.

    Args:
      x: 16-bit values, with sides that divide by 64. R divides by 128 if a form is in FP8.
      *scalars: For each form its scrambled keys ``[S, n]``: two words for each random number of its pruner, and two for
        its rounding. Row i serves arrays i * batch/S to (i + 1) * batch/S - 1 of the whole batch, which also share
        scales. Then what `factors_of` returns, and where x begins in the whole array: [batch, row, column].
      wanted: The forms.
      whole: The shape of the whole array, which numbers the groups for the noise.
      interpret: True to run on a CPU.
    """
    batch, rows, columns = x.shape
    grid = batch, rows // BLOCK, columns // BLOCK
    written = [v for copy in wanted for v in _outputs(copy, rows, columns)]
    outputs = [result((batch, *v.shape), v.dtype, x, *scalars[:-1]) for v in written]
    body = partial(_copies, wanted=wanted, whole=whole, dtype=x.dtype, emulated=interpret)
    made = iter(call(body, outputs, grid, (*scalars, _seen(x)), interpret))
    return [_form_of(copy, [next(made) for _ in range(1 + copy.packed)], x) for copy in wanted]


def factors_of(
    x: Float[Array, "batch r c"], beta: Float[Array, " s"], wanted: tuple[Copy, ...]
) -> Float[Array, "s f"]:  # fmt: skip
    """Return a scale of `soft`, and then a scale of each form, for each of the S parts of a batch."""
    largest = jax.vmap(float8.largest)(x.reshape(len(beta), -1, *x.shape[1:]))  # XLA leaves it out if no form needs it
    bounds = [largest * copy.pruner.kernel_form.growth(beta) for copy in wanted]
    scale = lambda copy, bound: jnp.ones_like(beta) if copy.format is None else float8.scale(bound, copy.format)
    return jnp.stack([beta, *map(scale, wanted, bounds)], 1)


def _outputs(copy: Copy, rows: int, columns: int) -> list[jax.ShapeDtypeStruct]:
    """Return the arrays of words that the kernel writes for a form of ``[rows, columns]`` values."""
    like = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype)
    outer, inner = (columns, rows) if copy.turns else (rows, columns)
    if copy.format is not None:
        places = [like(jnp.uint32, outer, inner // 32)] * copy.packed
        return [like(jnp.uint16 if copy.packed else jnp.uint32, outer // 4, 4, inner // 4), *places]
    places = like(jnp.uint32, outer // BLOCK, inner // BLOCK, 32, 4)
    return [like(jnp.uint32, rows // 4, *((2, columns // 2) if copy.turns else (4, columns // 4))), places]


def _form_of(copy: Copy, arrays: list[jax.Array], x: jax.Array) -> jax.Array | Packed:
    """Return a form of ``x``, given the arrays of words that the kernel wrote."""
    batch, rows, columns = x.shape
    if copy.format is None:
        shape = (batch, rows // 2, columns) if copy.turns else (batch, rows, columns // 2)
        return Packed(unpaired(arrays[0], x.dtype).reshape(shape), as_words16(arrays[1]), copy.axis, 2, 4, "words16")
    values = lax.bitcast_convert_type(arrays[0], float8.FORMATS[copy.format])
    values = values.reshape(batch, columns if copy.turns else rows, -1)
    return Packed(values, arrays[1], -1, 2, 4, "words8") if copy.packed else values


def _copies(
    at: Place, *refs: Ref, wanted: tuple[Copy, ...], whole: tuple[int, ...], dtype: jnp.dtype, emulated: bool
) -> None:  # fmt: skip
    """Write the blocks of all forms."""
    (b, i, j), count = at, len(wanted)
    words, (factors, origin, seen), outputs = refs[:count], refs[count : count + 3], iter(refs[count + 3 :])
    tile = _members(at, seen, dtype, emulated)
    first = [start // 4 + block * _TILES for start, block in ((origin[1], i), (origin[2], j))]
    tiles = [first[d] + iota((_TILES, _TILES), d, _TILED, emulated) for d in range(2)]
    index, share = origin[0] + b, whole[0] // factors.shape[0]
    beta, *scales = (factors[index // share, n] for n in range(1 + count))  # once: a compiler merges no readings
    of_tiles = {p: p.kernel_form.tile for p in (copy.pruner for copy in wanted)}
    masked = {p: prune(tile) for p, prune in of_tiles.items() if prune is not None}  # once for all forms
    for n, copy in enumerate(wanted):
        of = masked.get(copy.pruner, tile), copy, words[n], beta, scales[n], whole, (index, share, *tiles)
        groups, there = (_group(*of, line) for line in FOUR), (b, j, i) if copy.turns else at
        if not copy.packed:
            _write_lines(copy, _words_of_bytes(copy, list(groups)), next(outputs), there, emulated)
            continue
        kept, values, places = [_kept(copy, group, dtype) for group in groups], next(outputs), next(outputs)
        nibbles = [nibble for *_, nibble in kept]
        if copy.format is not None:
            _write_lines(copy, [first | second << np.uint32(8) for first, second, _ in kept], values, there, emulated)
            of_words, into = (pl.ds(there[1] * BLOCK, BLOCK), pl.ds(there[2] * 2, 2)), (_ACROSS8, _DOWN8)
        else:
            _write16(copy, kept, values, at, emulated)
            of_words, into = there[1:], (_ACROSS16, _DOWN16)
        store(places.at[b, *of_words], _gathered(nibbles, into[copy.turns], emulated), emulated)


def _write_lines(
    copy: Copy, lines: list[UInt[Array, "16 16"]], output: Ref, at: Place, emulated: bool
) -> None:  # fmt: skip
    """Write the four lines of tiles to the block ``at`` of a form."""
    b, i, j = at
    for line, word in enumerate(lines):
        word = _turned(word, emulated) if copy.turns else word
        block = output.at[b, pl.ds(i * _TILES, _TILES), line, pl.ds(j * _TILES, _TILES)]
        store(block, word.astype(output.dtype), emulated)


def _write16(copy: Copy, kept: list[Any], output: Ref, at: Place, emulated: bool) -> None:
    """Write the two kept values of each group to the block ``at`` of a 16-bit form."""
    if not copy.turns:
        _write_lines(copy, [together(first, second) for first, second, _ in kept], output, at, emulated)
        return
    b, i, j = at
    for slot in range(2):
        words = [together(kept[c][slot], kept[c + 1][slot]) for c in (0, 2)]
        block = output.at[b, pl.ds(i * _TILES, _TILES), slot, pl.ds(j * (BLOCK // 2), BLOCK // 2)]
        store(block, _joined(words, emulated), emulated)


def _group(
    tile: Lines, copy: Copy, words: Ref, beta: jax.Array, scale: jax.Array, whole: tuple[int, ...],
    at: tuple[Any, ...], line: int,
) -> list[jax.Array]:  # fmt: skip
    """Prune one line of the tile's members, a group of four. In FP8, round them and return their bytes.

    Args:
      tile: The 16 members of the tiles, by row and column. A pruner of tiles has pruned them.
      copy: The form that is wanted.
      words: Its scrambled keys.
      beta: The scale of `soft`.
      scale: The scale of the form.
      whole: As in `copies`.
      at: The array's index in the whole batch, the number of arrays that share a key, and the row and column of each
        tile in the whole array, in tiles.
      line: A row of the tiles if the axis of the groups is -1, and a column if it is -2.
    """
    down = copy.axis == -2
    x = [tile[i][line] for i in FOUR] if down else tile[line]
    index, share, row, column = at
    row, column = (row, column * 4 + line) if down else (row * 4 + line, column)
    groups = (whole[1] // 4, whole[2]) if down else (whole[1], whole[2] // 4)
    numbers, last = (index, share, groups, row, column), words.shape[1] - 2
    u = uniforms(words, last, *numbers) if copy.pruner.facts.stochastic else None
    prune, dtype = copy.pruner.kernel_form.members, x[0].dtype
    x = x if prune is None else prune(x, u, beta)  # `identity` has none, and pruners of tiles
    if copy.format is None:
        return x
    r = uniform(words, *numbers, last) if copy.rounding == "random" else None
    wide = lambda v: v.astype(dtype).astype(jnp.float32)
    byte = lambda v: lax.bitcast_convert_type(float8.cast(wide(v) * scale, copy.format, r), jnp.uint8)
    return [byte(v).astype(jnp.uint32) for v in x]


def _kept(copy: Copy, group: list[jax.Array], dtype: jnp.dtype) -> tuple[jax.Array, jax.Array, UInt[Array, "r c"]]:
    """Return the two kept values of each group, in FP8 as bytes, and the group's nibble."""
    if copy.format is None:
        first, second, nibble = two_of_four(group, crowded=crowded(copy.pruner, dtype))
        return first.astype(dtype), second.astype(dtype), nibble
    spoilt = np.uint32(0x7F) if copy.pruner == identity else None  # a NaN in either format
    return two_of_four(group, [v & np.uint32(0x7F) != 0 for v in group], spoilt)


def _words_of_bytes(copy: Copy, groups: Lines) -> list[UInt[Array, "r c"]]:
    """Return the four lines of the form's tiles, each as words of four bytes."""
    groups_lie_as_words = (copy.axis == -2) == copy.turns
    lines = groups if groups_lie_as_words else [[group[line] for group in groups] for line in FOUR]
    return [sum((v << np.uint32(8 * i) for i, v in enumerate(line) if i), line[0]) for line in lines]


# ---- shared parts ----


def _seen(x: Float[Array, "batch r c"]) -> UInt[Array, "batch i 4 words"]:
    """View arrays as words of two values, of shape [batch, rows / 4, 4, columns / 2]."""
    batch, rows, columns = x.shape
    return pairs(x, 2)[..., 0].reshape(batch, rows // 4, 4, columns // 2)


def _members(at: Place, seen: Ref, dtype: jnp.dtype, emulated: bool) -> Lines:
    """Load the 16 members of a block's tiles."""
    b, i, j = at
    block = lambda line: seen.at[b, pl.ds(i * _TILES, _TILES), line, pl.ds(j * (BLOCK // 2), BLOCK // 2)]
    lines = [_halves(loaded(block(line), _PAIRED, emulated), emulated) for line in FOUR]
    return [[v for word in line for v in apart(word, dtype)] for line in lines]


def _halves(words: UInt[Array, "16 32"], emulated: bool) -> list[UInt[Array, "16 16"]]:
    """Split the two words of each group into two arrays."""
    if emulated:
        return [words[:, 0::2], words[:, 1::2]]
    half = plgpu.ShapeDtypeStruct((_TILES, _TILES), jnp.uint32, layout=_TILED)

    def split(_: Any, words: fa.FragmentedArray) -> tuple[fa.FragmentedArray, ...]:
        every = lambda at: [_one(vector.extract(v, [], [at])) for v in words.registers.flat]
        return tuple(of_registers(every(at), _TILED, (_TILES, _TILES)) for at in range(2))

    return list(plgpu.inline_mgpu(arg_types=(_PAIRED,), return_type=(half, half))(split)(words))


def _joined(words: list[UInt[Array, "16 16"]], emulated: bool) -> UInt[Array, "16 32"]:
    """Interleave two arrays of words: the two words of a group lie beside each other."""
    if emulated:
        return jnp.stack(words, -1).reshape(_TILES, 2 * _TILES)
    whole = plgpu.ShapeDtypeStruct((_TILES, 2 * _TILES), jnp.uint32, layout=_PAIRED)

    def join(_: Any, *words: fa.FragmentedArray) -> fa.FragmentedArray:
        both = [vector.shuffle(a, b, [0, 1]) for a, b in zip(*(v.registers.flat for v in words), strict=True)]
        return of_registers(both, _PAIRED, (_TILES, 2 * _TILES))

    return plgpu.inline_mgpu(arg_types=(_TILED, _TILED), return_type=whole)(join)(*words)


def _turned(v: UInt[Array, "16 16"], emulated: bool) -> UInt[Array, "16 16"]:
    """Transpose an array. No value moves between threads; only the layout changes."""
    if emulated:
        return v.T
    whole = plgpu.ShapeDtypeStruct((_TILES, _TILES), v.dtype, layout=_TURNED)

    def turn(_: Any, v: fa.FragmentedArray) -> fa.FragmentedArray:
        new = [
            llvm.freeze(r) for r in v.registers.flat
        ]  # new values: Mosaic takes arrays of the same values for one array
        return of_registers(new, _TURNED, (_TILES, _TILES))

    return plgpu.inline_mgpu(arg_types=(_TILED,), return_type=whole)(turn)(v)


def _gathered(nibbles: list[UInt[Array, "16 16"]], into: _Words, emulated: bool) -> UInt[Array, "r c"]:
    """Put the nibbles of tiles into words.

    Args:
      nibbles: An array for each of the four lines of tiles.
      into: The layout of the nibbles in words.
      emulated: True in the interpreter.
    """
    shape = (2 ** len(into.rows), 2 ** len(into.columns))
    if emulated:
        bits = ("l1", "l0", *_ROWS, *_COLUMNS)
        axes = [bits.index(bit) for bit in (*into.rows, *into.columns, *into.position[::-1])]
        words = jnp.stack(nibbles).reshape((2,) * 10).transpose(axes).reshape(*shape, 8)
        shifted = words << 4 * lax.broadcasted_iota(jnp.uint32, words.shape, 2)
        return jnp.sum(shifted, 2, dtype=jnp.uint32)
    chosen, layout = _exchange(into)

    def gather(_: Any, *nibbles: fa.FragmentedArray) -> fa.FragmentedArray:
        return of_registers([_one(_word(nibbles, into, chosen))], layout, shape)

    word = plgpu.ShapeDtypeStruct(shape, jnp.uint32, layout=layout)
    return plgpu.inline_mgpu(arg_types=(_TILED,) * 4, return_type=word)(gather)(*nibbles)


def _exchange(into: _Words) -> tuple[dict[str, str], Any]:
    """Return which word each thread keeps, and the layout of the words.

    A thread holds nibbles of several words, and each of these words has nibbles in as many threads. These threads
    exchange nibbles, and each keeps one word.

    For example, a word of ``_ACROSS8`` has eight nibbles, at the positions c2, c1, c0. They lie in eight threads, which
    differ in these bits. Each thread holds nibbles of the same eight words: r1 says of which of its two tiles, and l1
    and l0 of which line. Each of these row bits is paired with a bit of the lane, r1 with c0, l1 with c1, and l0 with
    c2. So the thread with c0 = 1, c1 = 0 and c2 = 0 keeps the word with r1 = 1, l1 = 0 and l0 = 0.

    Args:
      into: The layout of the nibbles in words.

    Returns:
      The lane bit of each row bit that is in neither the warp nor the lane, and the layout of the words.

    >>> _exchange(_ACROSS8)[0]
    {'r1': 'c0', 'l1': 'c1', 'l0': 'c2'}
    """
    lanes = [bit for bit in into.position if bit in _LANES]
    kept = [bit for bit in into.rows if bit not in (*_WARPS, *_LANES)]
    chosen = dict(zip(kept, lanes, strict=True))
    return chosen, _layout([chosen.get(bit, bit) for bit in into.rows], into.columns)


def _word(nibbles: Sequence[fa.FragmentedArray], into: _Words, chosen: dict[str, str]) -> Scalar:
    """Return the word that this thread keeps.

    It shifts its nibbles to their positions, and exchanges parts of words with the threads that share the words.
    """
    constant = lambda v: utils.c(v, ir.IntegerType.get_signless(32))
    bit_of = lambda bit: arith.andi(arith.shrui(utils.thread_idx(), constant(_lane_bit(bit))), constant(1))
    of_lane = [arith.shli(bit_of(bit), constant(2 + p)) for p, bit in enumerate(into.position) if bit in _LANES]
    shift = functools.reduce(arith.addi, of_lane)
    words: Any = np.empty((2, 2, 2), object)  # by l1, l0 and r1
    for line, nibble in enumerate(nibbles):
        for r1, register in enumerate(nibble.registers.flat):
            own = 4 * r1 << into.position.index("r1") if "r1" in into.position else 0
            words[line // 2, line % 2, r1] = arith.shli(_only(register), arith.addi(shift, constant(own)))
    axes = ["l1", "l0", "r1"]
    if "r1" in into.position:
        axes.remove("r1")
        words = np.frompyfunc(arith.ori, 2, 1)(words[..., 0], words[..., 1])
    for bit, lane in chosen.items():
        if_0, if_1 = (words.take(v, axes.index(bit)) for v in (0, 1))
        axes.remove(bit)
        is_1 = arith.cmpi(arith.CmpIPredicate.eq, bit_of(lane), constant(1))
        keep = lambda a, b, is_1=is_1: arith.select(is_1, b, a)
        send = lambda a, b, is_1=is_1, lane=lane: utils.shfl_bfly(arith.select(is_1, a, b), 1 << _lane_bit(lane))
        join = lambda a, b, keep=keep, send=send: arith.ori(keep(a, b), send(a, b))
        words = np.frompyfunc(join, 2, 1)(if_0, if_1)
    return words


def _lane_bit(bit: str) -> int:
    """Return the index of a lane bit in the number of a thread, 0 for the lowest."""
    return _LANES[::-1].index(bit)


def _only(register: Scalar) -> Scalar:
    return vector.extract(register, [], [0])


def _one(value: Scalar) -> Scalar:
    """Return a register of one value."""
    return vector.broadcast(ir.VectorType.get((1,), value.type), value)
