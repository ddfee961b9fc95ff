"""Prune arrays on TPUs in one pass: every value is read once and written once.

A TPU stores the last two axes of an array in tiles of 8 x 128 values. XLA therefore copies an array many times to give
the members of groups an axis of their own. These kernels load a block into the memory of a core and read it there by
every m-th row, 128 columns at a time. Groups along the last axis are transposed before and after. Groups along an axis
before the last two are of whole matrices.

The pruning itself is that of `nmjax.KernelForm`, in float32, which rounds once at the end as the definition does.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.tpu as pltpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, UInt32

from nmjax.core import random
from nmjax.core.pruner import Pruner
from nmjax.kernels.batches import result

Ref = Any  # a reference to a block of an array, inside a kernel

LANES, SUBLANES = 128, 16  # the tile of a 16-bit array; that of a 32-bit one is half as high
BLOCK = 2**18  # values, of which in and out have two each at a time


def prune(
    x: Float[Array, "batch ..."], words: UInt32[Array, "s n"], scalar: Float[Array, " s"],
    numbers: Int[Array, " batch"], origin: Int[Array, "1 d"], *, pruner: Pruner, view: str, whole: tuple[int, ...],
    mask: bool = False, interpret: bool = False,
) -> Float[Array, "batch ..."]:  # fmt: skip
    """Prune a batch of arrays.

    Args:
      x: The arrays, in float32 or bfloat16: [batch, rows, columns]; [batch, k, depth, rows, columns] if ``view`` is
        "matrices".
      words: Scrambled keys of the noise, two words for each random number of a group. Row i serves arrays i * batch/S
        to (i + 1) * batch/S - 1.
      scalar: The scalars of the pruner, like ``words``.
      numbers: The number of the first draw of every array.
      origin: Where x begins in the whole arrays, along each axis but the batch. Zeros if x is whole.
      pruner: A pruner with a `KernelForm`.
      view: Where groups lie: "columns" along the last axis, "rows" along the one before it, "matrices" along axis 1,
        "tiles" along both of the last.
      whole: The shape of one whole array, which numbers the draws.
      mask: True to return 1 for each value that is kept, and 0 for the others.
      interpret: True to run on a CPU.
    """
    m, share = pruner.facts.block, x.shape[0] // words.shape[0]
    shape = x.shape
    if view == "matrices":
        x = x.reshape(shape[0], shape[1] // m, m, *shape[2:])
    run, block, grid, scratch = (_of_matrices if view == "matrices" else _of_rows)(x, m, view)

    def nm_prune(words: Ref, scalar: Ref, numbers: Ref, origin: Ref, x: Ref, y: Ref, *memory: Ref) -> None:
        array = pl.program_id(0)
        key = quotient(array, share)

        def pruned(members: list[jax.Array], at: list[Any]) -> list[jax.Array]:
            """Prune members whose groups lie at these positions, one for each axis."""
            at = [start + place for start, place in zip((origin[0, d] for d in range(len(whole))), at, strict=True)]
            form, u = pruner.kernel_form, None
            draw = lambda at, sizes: _uniforms(words, key, numbers[array], at, sizes)
            axis = {"columns": 1, "rows": 0}.get(view, 0)
            if pruner.facts.stochastic and form.each:
                u = [draw([p * m + j if d == axis else p for d, p in enumerate(at)], whole) for j in range(m)]
            elif pruner.facts.stochastic:
                u = draw(at, tuple(size // m if d == axis else size for d, size in enumerate(whole)))
            assert form.members is not None
            of = {"of": [jnp.ones_like(v) for v in members]} if mask else {}
            return form.members(members, u, scalar[key], **of)

        run(x, y, memory, _tile_pruner(pruner, mask) if view == "tiles" else pruned)

    if not interpret:  # else XLA would first copy it to fast memory, where the kernel takes its blocks anyway
        x = pltpu.with_memory_space_constraint(x, pltpu.HBM)
    spec = pl.BlockSpec(block, lambda *at: at)
    small = pl.BlockSpec(memory_space=pltpu.SMEM)
    flops = x.size * 8 * m  # a rank among m, and the draws
    y = pl.pallas_call(
        nm_prune,
        out_shape=result(x.shape, x.dtype, x, words, scalar, numbers, origin),
        grid=grid,
        in_specs=[small] * 4 + [spec],
        out_specs=spec,
        scratch_shapes=[pltpu.VMEM(size, jnp.float32) for size in scratch],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",) * len(grid)),
        cost_estimate=pl.CostEstimate(flops=flops, bytes_accessed=2 * x.size * x.dtype.itemsize, transcendentals=0),
        interpret=interpret,
    )(words, scalar, numbers, origin, x)
    return y.reshape(shape)


def _uniforms(words: Ref, key: Any, first: Any, at: list[Any], sizes: tuple[int, ...]) -> Any:
    """Draw the random numbers at positions of an array of these sizes: one array, or a tuple of several."""
    number, stride = first, 1
    for place, size in zip(reversed(at), reversed(sizes), strict=True):
        number, stride = number + place * jnp.int32(_wrapped(stride)), stride * size
    number = number.astype(jnp.uint32)
    stream = lambda n: random.stream((words[key, n], words[key, n + 1]), number)
    drawn = tuple(random.as_uniform(stream(n)) for n in range(0, words.shape[1], 2))
    return drawn if len(drawn) > 1 else drawn[0]


def _wrapped(number: int) -> int:
    """Return the int32 with the bits of the number's lowest word."""
    return (number + 2**31) % 2**32 - 2**31


# ---- groups along one of the last two axes, or both ----


def _of_rows(x: jax.Array, m: int, view: str) -> Any:
    """Return the body, the block, the grid and the memory of a kernel whose groups lie along the last two axes."""
    _, rows, columns = x.shape
    unit = m * LANES if view == "tiles" else math.lcm(8 * m, LANES)
    along, across = (columns, rows) if view == "columns" else (rows, columns)
    along = min(_up(along, unit), max(unit, 512 // unit * unit))
    across = min(_up(across, LANES), max(LANES, BLOCK // along // LANES * LANES))
    sides = (across, along) if view == "columns" else (along, across)
    grid = (x.shape[0], pl.cdiv(rows, sides[0]), pl.cdiv(columns, sides[1]))
    memory = [(unit, LANES)] + [(LANES, LANES)] * (m if view == "tiles" else 0)
    return functools.partial(_rows, view=view, unit=unit, m=m), (None, *sides), grid, memory


def _rows(x: Ref, y: Ref, memory: tuple[Ref, ...], pruned: Callable[..., Any], *, view: str, unit: int, m: int) -> None:
    slab, *lines = memory
    flip = (lambda v: v.T) if view == "columns" else (lambda v: v)
    along, across = x.shape[::-1] if view == "columns" else x.shape
    steps = along // unit
    first = [pl.program_id(d + 1) * side for d, side in enumerate(x.shape)]
    member = lambda ref, j: ref.at[pl.ds(j, ref.shape[0] // m, stride=m), :]

    def step(number: Any, _: Any) -> Any:
        i, j = remainder(number, steps) * unit, quotient(number, steps) * LANES
        own = pl.ds(pl.multiple_of(i, unit), unit), pl.ds(pl.multiple_of(j, LANES), LANES)
        own = own[::-1] if view == "columns" else own
        slab[...] = flip(x[own].astype(jnp.float32))
        if view == "tiles":
            _prune_tiles(slab, lines, pruned, member)
        else:
            groups, ones = (lax.broadcasted_iota(jnp.int32, (unit // m, LANES), d) for d in (0, 1))
            start, other = (first[1] + i, first[0] + j) if view == "columns" else (first[0] + i, first[1] + j)
            at = [quotient(start, m) + groups, other + ones]
            kept = pruned([member(slab, n)[...] for n in range(m)], at[::-1] if view == "columns" else at)
            for n, v in enumerate(kept):
                member(slab, n)[...] = v
        y[own] = flip(slab[...]).astype(y.dtype)
        return np.int32(0)

    lax.fori_loop(np.int32(0), np.int32(steps * (across // LANES)), step, np.int32(0))


def _tile_pruner(pruner: Pruner, mask: bool) -> Callable[..., Any]:
    prune = pruner.kernel_form.tile
    assert prune is not None
    return (lambda tile: prune(tile, of=[[jnp.ones_like(v) for v in row] for row in tile])) if mask else prune


def _prune_tiles(slab: Ref, lines: list[Ref], prune: Callable[..., Any], member: Callable[[Ref, int], Ref]) -> None:
    """Prune tiles of m x m: take the rows apart, turn each, and take its columns apart."""
    m = len(lines)
    for i, line in enumerate(lines):
        line[...] = member(slab, i)[...].T
    tile = prune([[member(line, j)[...] for j in range(m)] for line in lines])
    for i, line in enumerate(lines):
        for j, v in enumerate(tile[i]):
            member(line, j)[...] = v
        member(slab, i)[...] = line[...].T


# ---- groups along an axis before the last two ----


def _of_matrices(x: jax.Array, m: int, view: str) -> Any:
    """Return the body, the block, the grid and the memory of a kernel whose members are matrices."""
    batch, groups, _, depth, rows, columns = x.shape
    height, width = min(_up(rows, SUBLANES), LANES), min(_up(columns, LANES), 4 * LANES)
    width = min(width, max(LANES, BLOCK // (m * height) // LANES * LANES))
    count = max(1, min(groups, BLOCK // (m * height * width)))
    grid = (batch, pl.cdiv(groups, count), 1, depth, pl.cdiv(rows, height), pl.cdiv(columns, width))
    return _matrices, (None, count, m, None, height, width), grid, ()


def _matrices(x: Ref, y: Ref, memory: tuple[Ref, ...], pruned: Callable[..., Any]) -> None:
    count, m, height, width = x.shape
    steps = height // SUBLANES
    group, depth, row, column = (pl.program_id(d) * size for d, size in ((1, count), (3, 1), (4, height), (5, width)))

    def step(number: Any, _: Any) -> Any:
        g, r = quotient(number, steps), remainder(number, steps) * SUBLANES
        own = pl.ds(pl.multiple_of(r, SUBLANES), SUBLANES)
        rows, columns = (lax.broadcasted_iota(jnp.int32, (SUBLANES, width), d) for d in (0, 1))
        members = [x[g, j, own, :].astype(jnp.float32) for j in range(m)]
        for j, v in enumerate(pruned(members, [group + g, depth, row + r + rows, column + columns])):
            y[g, j, own, :] = v.astype(y.dtype)
        return np.int32(0)

    lax.fori_loop(np.int32(0), np.int32(count * steps), step, np.int32(0))


def quotient(number: Any, by: int) -> Any:
    """Return the quotient, in int32 also where JAX counts loops in 64 bits. Mosaic lowers no ``//`` of such numbers."""
    return lax.div(_int32(number), np.int32(by))


def remainder(number: Any, by: int) -> Any:
    """Return the remainder, likewise."""
    return lax.rem(_int32(number), np.int32(by))


def _int32(number: Any) -> Any:
    return lax.convert_element_type(number, jnp.int32)


def _up(size: int, to: int) -> int:
    """Return the size rounded up to a multiple."""
    return -(-size // to) * to


# ---- chosen rows ----


def take(
    x: Float[Array, "batch k c"], places: Int[Array, "batch g n"], scales: Float[Array, "batch g n"], *, m: int,
    interpret: bool = False,
) -> Float[Array, "batch kept c"]:  # fmt: skip
    """Return n rows of every m consecutive rows, times their factors. A factor of 0 gives zeros.

    Args:
      x: The arrays, in float32 or bfloat16.
      places: The places of the rows in their groups.
      scales: Their factors.
      m: The size of a group.
      interpret: True to run on a CPU.
    """
    (batch, rows, columns), n = x.shape, places.shape[-1]
    unit = math.lcm(8 * m, LANES)
    height = min(_up(rows, unit), max(unit, 512 // unit * unit))
    width = min(_up(columns, LANES), max(LANES, BLOCK // height // LANES * LANES))
    count, steps = unit // m, height // unit

    def nm_take(x: Ref, places: Ref, scales: Ref, y: Ref, slab: Ref, kept: Ref) -> None:
        block = x[...].astype(jnp.float32)  # all at once, so that XLA can compute it here
        for i in range(slab.shape[0]):
            rows, columns = i % steps * unit, i // steps * LANES
            slab[i] = block[rows : rows + unit, columns : columns + LANES]

        def step(number: Any, _: Any) -> Any:
            i, j = remainder(number, steps), quotient(number, steps) * LANES
            groups = pl.ds(pl.multiple_of(i * count, 8), count)
            members = [slab[_int32(number), pl.ds(place, count, stride=m), :] for place in range(m)]
            for one in range(n):
                place, scale = (ref[groups, one : one + 1] for ref in (places, scales))
                row = members[0]
                for other in range(1, m):
                    row = jnp.where(place == other, members[other], row)
                kept[pl.ds(one, count, stride=n), :] = jnp.where(scale == 0, 0.0, row * scale)
            own = pl.ds(pl.multiple_of(i * count * n, 8), count * n), pl.ds(pl.multiple_of(j, LANES), LANES)
            y[own] = kept[...].astype(y.dtype)
            return np.int32(0)

        lax.fori_loop(np.int32(0), np.int32(slab.shape[0]), step, np.int32(0))

    chosen = pl.BlockSpec((None, height // m, n), lambda b, i, j: (b, i, 0))
    kept = n * rows // m
    order = ("parallel",) * 3
    options = pltpu.CompilerParams(dimension_semantics=order, allow_input_fusion=[True, False, False])
    memory = (steps * width // LANES, unit, LANES), (count * n, LANES)
    moved = batch * (rows + kept) * columns * x.dtype.itemsize + 2 * batch * (rows // m) * LANES * 4
    return pl.pallas_call(
        nm_take,
        out_shape=result((batch, kept, columns), x.dtype, x, places, scales),
        grid=(batch, pl.cdiv(rows, height), pl.cdiv(columns, width)),
        in_specs=[pl.BlockSpec((None, height, width), lambda *at: at), chosen, chosen],
        out_specs=pl.BlockSpec((None, height // m * n, width), lambda *at: at),
        scratch_shapes=[pltpu.VMEM(size, jnp.float32) for size in memory],
        compiler_params=options,
        cost_estimate=pl.CostEstimate(flops=batch * kept * columns * m, bytes_accessed=moved, transcendentals=0),
        interpret=interpret,
    )(x, places, scales)
