"""Packed 2:4 times dense on Hopper's sparse tensor cores: ``D[M, N] = A[M, K] @ B[K, N]``, A packed along K.

Blocks of A, of its words and of B travel through a ring of shared memory: one warpgroup fetches (TMA), the others
multiply. The grid is as large as the device and walks over the tiles. Of two thread blocks of a cluster that lie along M
each fetches half of what both need of B, along N of A.

16-bit A may lie along K or along M, B along K or along N, and the result may be written as D or as its transposed: so no
product of training needs a transposition. 8-bit values lie along K alone.

With ``interpret`` the same kernel runs on a CPU, but for its instructions, whose arithmetic is then that of `unpack`.
"""

from functools import partial

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from nmjax.core import versions
from nmjax.kernels import emulation, instructions
from nmjax.kernels.format import Packed
from nmjax.kernels.instructions import swizzled
from nmjax.kernels.limits import HopperConfig
from nmjax.kernels.targets import result

_ACC = plgpu.Layout._WGMMA_ACC_32BIT  # one f32 a register: in pairs, LLVM makes ptxas serialise the instructions


def spmm(
    a: Packed, b: jax.Array, scale: jax.Array | None = None, *, b_axis: int, transpose: bool, dtype, config: HopperConfig,
    blocks: int, interpret: bool = False,
) -> jax.Array:  # fmt: skip
    """``[B, M, K]`` packed along K times ``b``, ``[B, K, N]`` or, with ``b_axis`` -1, ``[B, N, K]``: ``[B, M, N]``, or its
    transposed. Of f32 sums, times ``scale [B]``, rounded to ``dtype``. ``blocks`` is the size of the grid."""
    m_major, n_major = a.axis == -2, b_axis == -2
    batch, *_ = a.shape
    m, k = (a.shape[2], a.shape[1]) if m_major else a.shape[1:]
    n = b.shape[2 if n_major else 1]
    size = a.dtype.itemsize
    wide = size == 2
    tile_m, tile_n, tile_k = config.tile_m, config.tile_n, config.tile_k * 2 // size
    groups, rows = config.warpgroups, config.rows
    in_flight = min(config.in_flight, k // tile_k - 1)  # a block that is held for longer than all steps is never let go
    a_swizzle, a_form = swizzled(tile_m if m_major else tile_k // 2, size)
    b_swizzle, b_form = swizzled(tile_n if n_major else tile_k, size)
    columns = min(config.store_n, tile_n)
    stored = (columns, tile_m) if transpose else (tile_m, columns)
    _, out_form = swizzled(stored[1], jnp.dtype(dtype).itemsize)
    slots = min(2, tile_n // columns)
    along_m, along_n = (2 if config.cluster == axis else 1 for axis in "mn")
    cluster = along_m * along_n
    shared = {"collective_axes": ("cluster",)}
    share_a, share_b = shared if along_n == 2 else {}, shared if along_m == 2 else {}
    words = a.indices.reshape(batch, m // 64, k // 64 * 128) if wide else a.indices
    word_block = (rows // 64, tile_k // 64 * 128) if wide else (rows, tile_k // 32)
    words_of_group = word_block[0] // groups
    word_layout = plgpu.Layout.WG_STRIDED((words_of_group, word_block[1]), vec_size=1)
    scales = () if scale is None else (scale,)

    def kernel(a_all, words_all, b_all, *rest):
        scale_all, out_all = (None, *rest) if scale is None else rest

        def pipeline(body, context):
            ring = partial(plgpu.BlockSpec, memory_space=plgpu.SMEM, delay_release=in_flight)
            return plgpu.emit_pipeline_warp_specialized(
                body,
                grid=(k // tile_k,),
                memory_registers=40,
                wg_axis="wg",
                num_compute_wgs=groups,
                max_concurrent_steps=config.stages,
                compute_context=context,
                in_specs=[
                    ring(*_block((rows, tile_k // 2), m_major), transforms=a_form, **share_a),
                    ring(*_block(word_block, False), **share_a),
                    ring(*_block((tile_n, tile_k), n_major), transforms=b_form, **share_b),
                ],
            )

        nothing = lambda *_, **__: None

        @partial(
            pl.run_scoped,
            ring=pipeline(nothing, nothing).get_allocations(a_all.at[0], words_all.at[0], b_all.at[0]),
            out_shared=plgpu.SMEM((groups, slots, *stored), dtype, transforms=out_form),
            collective_axes="wg",
        )
        def scoped(ring, out_shared):
            wg, rank = lax.axis_index("wg"), lax.axis_index("cluster")
            tiles = (m // rows // along_m, n // tile_n // along_n)

            @plgpu.nd_loop((batch * tiles[0] * tiles[1],), collective_axes="block")
            def tile(loop):
                of_batch = loop.index[0] // (tiles[0] * tiles[1])
                mi, ni = plgpu.planar_snake(loop.index[0] % (tiles[0] * tiles[1]), tiles, 1, config.band)
                mi = mi * 2 + rank if along_m == 2 else mi
                ni = ni * 2 + rank if along_n == 2 else ni

                def multiply_and_store(run):
                    acc = jnp.zeros((tile_m, tile_n), jnp.float32)
                    acc = run(acc) if interpret else _settled(run(plgpu.layout_cast(acc, _ACC)), (tile_m, tile_n))
                    if scale_all is not None:
                        acc = acc * scale_all[of_batch]
                    narrow = transpose and jnp.dtype(dtype).itemsize == 1 and not interpret
                    acc = acc.astype(jnp.bfloat16 if narrow else dtype)  # stores transpose 16-bit values alone
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    for i in range(tile_n // columns):
                        slot = out_shared.at[wg, i % slots]
                        plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                        part = acc[:, i * columns : (i + 1) * columns]
                        down, across = (
                            pl.ds(mi * rows + wg * tile_m, tile_m),
                            pl.ds(ni * tile_n + i * columns, columns),
                        )
                        if not transpose:
                            slot[...] = part
                        elif interpret:
                            slot[...] = part.T
                        else:
                            part = plgpu.layout_cast(part, plgpu.Layout.WGMMA_TRANSPOSED)
                            slot.transpose((1, 0))[...] = part.astype(jnp.float32).astype(dtype) if narrow else part
                        plgpu.commit_smem()
                        where = (across, down) if transpose else (down, across)
                        plgpu.copy_smem_to_gmem(slot, out_all.at[of_batch, *where])

                def step(at, a_block, word_block, b_block, acc):
                    a_part = a_block.at[(slice(None),) * m_major + (pl.ds(wg * tile_m, tile_m),)]
                    some = word_block.at[pl.ds(wg * words_of_group, words_of_group)]
                    words_in = versions.load(some, word_layout) if wide else some
                    types = (
                        _ACC,
                        plgpu.RefType(a_form),
                        word_layout if wide else plgpu.RefType(()),
                        plgpu.RefType(b_form),
                    )

                    @plgpu.inline_mgpu(
                        arg_types=types,
                        return_type=plgpu.ShapeDtypeStruct((tile_m, tile_n), jnp.float32, layout=_ACC),
                    )
                    def issue(_, acc, a, words, b):
                        from jax.experimental.mosaic.gpu import utils

                        turned = lambda ref: utils.memref_transpose(ref, (1, 0, 3, 2))
                        a, b = turned(a) if m_major else a, b if n_major else turned(b)
                        words = (
                            instructions.loaded_words(words)
                            if wide
                            else instructions.row_words(words, tile_m, tile_k // 32)
                        )
                        into = instructions.fence(instructions.zeros(acc) if config.promote else acc)
                        options = {"a_swizzle": a_swizzle, "b_swizzle": b_swizzle, "a_m_major": m_major}
                        into = instructions.wgmma_sp(into, a, words, b, **options)
                        instructions.commit()
                        instructions.wait(0 if config.promote else in_flight)
                        return acc + instructions.barrier(into) if config.promote else into

                    acc = issue(acc, a_part, words_in, b_block)
                    if in_flight:  # at the end all slots are let go at once

                        @pl.when(at[0] == k // tile_k - 1)
                        def _():
                            plgpu.inline_mgpu()(lambda _: instructions.wait(0))()

                    return acc

                def emulated(_, a_block, word_block, b_block, acc):
                    form = {"order": a.order, "m_major": m_major, "n_major": n_major}
                    sums = emulation.product(a_block[...], word_block[...], b_block[...], **form)
                    plgpu.commit_smem()  # before the ring fills this slot again
                    return acc + lax.dynamic_slice_in_dim(sums, wg * tile_m, tile_m)

                pick = lambda ref, at, axis, size: ref.at[of_batch, *((slice(None),) * axis), pl.ds(at * size, size)]
                pipeline(emulated if interpret else step, multiply_and_store)(
                    pick(a_all, mi, int(m_major), rows),
                    pick(words_all, mi, 0, word_block[0]),
                    pick(b_all, ni, int(n_major), tile_n),
                    allocations=ring,
                )

        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    call = plgpu.kernel(
        kernel,
        out_type=result((batch, *((n, m) if transpose else (m, n))), dtype, a.values, words, b, *scales),
        grid=(blocks // cluster,),
        grid_names=("block",),
        cluster=(cluster,),
        cluster_names=("cluster",),
        num_threads=groups + 1,
        thread_name="wg",
        **({"interpret": versions.interpreter_params()} if interpret else {}),
    )
    return call(a.values, words, b, *scales)


def _block(shape: tuple[int, int], turned: bool):
    """A block that walks along k, which is the second axis, or of a turned one the first."""
    return (shape[::-1], lambda i: (i, 0)) if turned else (shape, lambda i: (0, i))


def _settled(acc, shape):
    @plgpu.inline_mgpu(
        arg_types=(_ACC,),
        return_type=plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=plgpu.Layout.WGMMA),
    )
    def settle(_, acc):
        return instructions.settle(acc)

    return settle(acc)
