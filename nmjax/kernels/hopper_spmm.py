"""Packed 2:4 times dense on Hopper's sparse tensor cores: ``D[M, N] = A[M, K] @ B[K, N]``, with A packed along K.

One warpgroup of a thread block loads blocks of A, of its 2:4 metadata (the words) and of B into a ring buffer in shared
memory (TMA). The others multiply. The kernel is persistent: one thread block per multiprocessor loops over tiles of D.
Two thread blocks may form a cluster. If they are neighbours along M, they share B, and each loads half of it; if they
are neighbours along N, they share A likewise.

16-bit A is contiguous along K or along M, B along K or along N, and the result is D or its transpose. So no operand or
result of training has to be transposed separately. 8-bit operands are contiguous along K.

The parts, from the top: `spmm` launches `_kernel`, which loops over the tiles (`_schedule`). For each tile a pipeline
(`_pipeline`) feeds the steps of the main loop, and `_epilogue` stores the sums. A `Geometry` holds everything that is
known at trace time. `Instructions` are those of the hardware, or their emulation on a CPU. The rest of the kernel is
the same for both.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from nmjax.core import versions
from nmjax.kernels import emulation, instructions
from nmjax.kernels.batches import result
from nmjax.kernels.family import Shape, Target
from nmjax.kernels.format import Packed
from nmjax.kernels.hopper import HopperConfig
from nmjax.kernels.hopper_geometry import Geometry, Ref

_ACC = versions.sums_layout()


def spmm(
    a: Packed, b: Float[Array, "batch r c"], scale: Float[Array, " batch"] | None, shape: Shape, config: HopperConfig,
    target: Target,
) -> Float[Array, "batch m n"]:  # fmt: skip
    """Multiply a batch of packed matrices by a batch of dense ones. See `nmjax.kernels.family.Family.spmm`."""
    interpret = target.interpret
    g = Geometry(shape, config, a.shape[0], a.order, scale is not None)
    words = a.indices
    if g.wide:
        words = words.reshape(g.batch, shape.m // 64, shape.k // 64 * 128)
    inputs = (a.values, words, b) if scale is None else (a.values, words, b, scale)

    def hopper_spmm(*refs: Ref) -> None:  # the name that profilers show
        _kernel(g, EMULATED if interpret else HARDWARE, *refs)

    sides = g.whole_sides if interpret else g.result_sides  # the interpreter refuses to store beyond an array
    call = plgpu.kernel(
        hopper_spmm,
        out_type=result((g.batch * g.parts, *sides), g.dtype, *inputs),
        grid=(target.cores // g.cluster,),
        grid_names=("block",),
        cluster=(g.cluster,),
        cluster_names=("cluster",),
        num_threads=g.warpgroups + 1,
        thread_name="wg",
        **versions.launch_options(interpret, zeros=g.beyond),
    )
    y = call(*inputs)
    if interpret:
        y = y[:, : g.result_sides[0], : g.result_sides[1]]
    if g.parts == 1:
        return y
    return jnp.sum(y.reshape(g.batch, g.parts, *g.result_sides), 1).astype(shape.out)


# ---- the kernel ----


class Tile(NamedTuple):
    """The tile of D that a thread block computes."""

    batch: jax.Array
    part: jax.Array  # the index of its part of K
    m: jax.Array  # the row index of the tile
    n: jax.Array  # its column index


def _kernel(g: Geometry, operations: "Instructions", a: Ref, words: Ref, b: Ref, *rest: Ref) -> None:
    """Compute the tiles of one thread block, one after the other."""
    scale, out = rest if g.scaled else (None, *rest)
    nothing = lambda *_, **__: None

    # `run_scoped` and `nd_loop` call the functions below at once. The first pipeline is used only for its allocations,
    # which do not depend on what it computes.

    @partial(
        pl.run_scoped,
        ring=_pipeline(g, nothing, nothing).get_allocations(a.at[0], words.at[0], b.at[0]),
        results=g.results,
        collective_axes="wg",
    )
    def with_shared_memory(ring: Any, results: Ref) -> None:
        wg, rank = lax.axis_index("wg"), lax.axis_index("cluster")

        @plgpu.nd_loop((g.batch * g.parts * g.grid[0] * g.grid[1],), collective_axes="block")
        def each_tile(loop: Any) -> None:
            tile = _schedule(g, rank, loop.index[0])

            def compute(run_steps: Callable[[jax.Array], jax.Array]) -> None:
                acc = operations.settle(g, run_steps(operations.zeros(g)))
                _epilogue(g, operations, wg, tile, acc, scale, out, results)

            panels = [
                block.panel(operand, tile.batch, at, tile.part, g.steps)
                for block, operand, at in zip(g.blocks, (a, words, b), (tile.m, tile.m, tile.n), strict=True)
            ]
            _pipeline(g, partial(operations.multiply, g, wg), compute)(*panels, allocations=ring)

    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last stores have left shared memory


def _schedule(g: Geometry, rank: jax.Array, index: jax.Array) -> Tile:
    """Return the tile for a loop index, in snake order within bands of ``config.band`` tiles along N. The rank is the
    thread block's place in its cluster."""
    tiles = g.grid[0] * g.grid[1]
    batch, part = index // (tiles * g.parts), index // tiles % g.parts
    m, n = plgpu.planar_snake(index % tiles, g.grid, 1, g.config.band)
    m = m * 2 + rank if g.along[0] == 2 else m
    n = n * 2 + rank if g.along[1] == 2 else n
    return Tile(batch, part, m, n)


def _pipeline(g: Geometry, body: Callable[..., Any], compute: Callable[..., None]) -> Any:
    """Return the pipeline along K, with its ring buffer: ``compute`` wraps the loop, and ``body`` is one step."""
    return plgpu.emit_pipeline_warp_specialized(
        body,
        grid=(g.steps,),
        memory_registers=40,
        wg_axis="wg",
        num_compute_wgs=g.warpgroups,
        max_concurrent_steps=g.config.stages,
        compute_context=compute,
        in_specs=[block.spec() for block in g.blocks],
    )


def _epilogue(
    g: Geometry, operations: "Instructions", wg: jax.Array, tile: Tile, acc: jax.Array, scale: Ref | None,
    out: Ref, results: Ref,
) -> None:  # fmt: skip
    """Scale the sums of a warpgroup, round them, and store them through up to two buffers in shared memory."""
    (tile_m, tile_n), buffers = g.tile, g.results.shape[1]
    if scale is not None:
        acc = acc * scale[tile.batch]
    acc = operations.round(g, acc)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the stores of the tile before are done: all buffers are free
    for i in range(tile_n // g.store_n):
        buffer = results.at[wg, i % buffers]
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)  # at most one store still reads its buffer: the other is free
        operations.store(g, buffer, acc[:, i * g.store_n : (i + 1) * g.store_n])
        plgpu.commit_smem()
        rows = pl.ds(tile.m * g.config.rows + wg * tile_m, tile_m)
        columns = pl.ds(tile.n * tile_n + i * g.store_n, g.store_n)
        at = (columns, rows) if g.shape.transpose else (rows, columns)
        plgpu.copy_smem_to_gmem(buffer, out.at[tile.batch * g.parts + tile.part, *at])


# ---- the instructions ----


class Instructions(NamedTuple):
    """The operations of a warpgroup on its accumulator ``[tile_m, tile_n]``."""

    zeros: Callable[[Geometry], jax.Array]
    multiply: Callable[..., jax.Array]  # (g, wg, indices, a, words, b, acc): one step, added to the accumulator
    settle: Callable[[Geometry, jax.Array], jax.Array]  # wait for all steps, and return the sums
    round: Callable[[Geometry, jax.Array], jax.Array]  # to the dtype of the result, or to bf16 if `store` converts it
    store: Callable[[Geometry, Ref, jax.Array], None]  # some columns into a buffer of results


def _zeros(g: Geometry) -> jax.Array:
    return plgpu.layout_cast(jnp.zeros(g.tile, jnp.float32), _ACC)


def _multiply(
    g: Geometry, wg: jax.Array, indices: Sequence[jax.Array], a: Ref, words: Ref, b: Ref, acc: jax.Array
) -> jax.Array:  # fmt: skip
    """Compute a step, and wait for its instructions. An H100 gave wrong sums when steps overlapped."""
    tile_m, _ = g.tile
    rows = pl.ds(wg * tile_m, tile_m)
    a = a.at[:, rows] if g.a.turned else a.at[rows]
    words = words.at[pl.ds(wg * g.words_of_group, g.words_of_group)]
    if g.wide:
        words = versions.load(words, g.words_layout)
        if g.beyond:  # a word of zeros names no two positions: let it name the first two
            words = jnp.where(words == 0, np.uint32(0x44444444), words)
    words_type = g.words_layout if g.wide else plgpu.RefType(())

    @plgpu.inline_mgpu(
        arg_types=(_ACC, plgpu.RefType(g.a.transforms), words_type, plgpu.RefType(g.b.transforms)),
        return_type=plgpu.ShapeDtypeStruct(g.tile, jnp.float32, layout=_ACC),
    )
    def issue(_: Any, acc: Any, a: Any, words: Any, b: Any) -> Any:
        return instructions.wgmma_step(
            acc, a, words, b, a_swizzle=g.a.swizzle, b_swizzle=g.b.swizzle, m_major=g.a.turned, n_major=g.b.turned,
            promote=g.config.promote,
        )  # fmt: skip

    return issue(acc, a, words, b)


def _settle(g: Geometry, acc: jax.Array) -> jax.Array:
    @plgpu.inline_mgpu(
        arg_types=(_ACC,),
        return_type=plgpu.ShapeDtypeStruct(g.tile, jnp.float32, layout=plgpu.Layout.WGMMA),
    )
    def settle(_: Any, acc: Any) -> Any:
        return instructions.settle(acc)

    return settle(acc)


def _is_8bit_transposed(g: Geometry) -> bool:
    """Return True if the result is 8-bit and transposed. It is transposed as bf16, because 8-bit values cannot be
    transposed."""
    return g.shape.transpose and g.dtype.itemsize == 1


def _round(g: Geometry, acc: jax.Array) -> jax.Array:
    return acc.astype(jnp.bfloat16 if _is_8bit_transposed(g) else g.dtype)


def _store(g: Geometry, buffer: Ref, part: jax.Array) -> None:
    if not g.shape.transpose:
        buffer[...] = part
        return
    part = plgpu.layout_cast(part, plgpu.Layout.WGMMA_TRANSPOSED)
    if _is_8bit_transposed(g):
        part = part.astype(jnp.float32).astype(g.dtype)
    buffer.transpose((1, 0))[...] = part


HARDWARE = Instructions(_zeros, _multiply, _settle, _round, _store)


def _emulated_multiply(
    g: Geometry, wg: jax.Array, indices: Sequence[jax.Array], a: Ref, words: Ref, b: Ref, acc: jax.Array
) -> jax.Array:  # fmt: skip
    tile_m, _ = g.tile
    layout = {"order": g.order, "m_major": g.a.turned, "n_major": g.b.turned}
    sums = emulation.product(a[...], words[...], b[...], **layout)
    plgpu.commit_smem()  # before the pipeline loads into this buffer again
    return acc + lax.dynamic_slice_in_dim(sums, wg * tile_m, tile_m)


def _emulated_store(g: Geometry, buffer: Ref, part: jax.Array) -> None:
    buffer[...] = part.T if g.shape.transpose else part


EMULATED = Instructions(
    zeros=lambda g: jnp.zeros(g.tile, jnp.float32),
    multiply=_emulated_multiply,
    settle=lambda g, acc: acc,
    round=lambda g, acc: acc.astype(g.dtype),
    store=_emulated_store,
)
