"""Packed 2:4 times dense by the sparse ``mma`` of Ampere: the API of `hopper.spmm`, with 16-bit values alone.

A thread block of one warpgroup copies blocks of A, of its words and of B into shared memory (cp.async) and multiplies out
of registers. The words are Hopper's: a warp has 16 rows of the 64. It needs Mosaic's register layouts for ``mma``
(`versions.has_warp_products`). Compiled for sm_80 and sm_90; written to run anywhere, and nowhere to be fast.
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
from nmjax.kernels.limits import AmpereConfig
from nmjax.kernels.targets import result


def spmm(
    a: Packed, b: jax.Array, scale: jax.Array | None = None, *, b_axis: int, transpose: bool, dtype, config: AmpereConfig,
    interpret: bool = False,
) -> jax.Array:  # fmt: skip
    """``[B, M, K]`` packed along K times ``b``, ``[B, K, N]`` or, with ``b_axis`` -1, ``[B, N, K]``: ``[B, M, N]``, or its
    transposed."""
    m_major, n_major = a.axis == -2, b_axis == -2
    batch, *_ = a.shape
    m, k = (a.shape[2], a.shape[1]) if m_major else a.shape[1:]
    n = b.shape[2 if n_major else 1]
    tile_m, tile_n, tile_k = config.tile_m, config.tile_n, config.tile_k
    layout = plgpu.Layout
    acc_layout, lhs, rhs = (of(a.dtype) for of in (layout.MMA_ACC, layout.MMA_LHS, layout.MMA_RHS))
    words = a.indices.reshape(batch, m // 64, k // 64 * 128)
    word_block = (tile_m // 64, tile_k // 64 * 128)
    word_layout = layout.WG_STRIDED(word_block, vec_size=1)
    scales = () if scale is None else (scale,)

    def kernel(a_all, words_all, b_all, *rest):
        scale_all, out_all = (None, *rest) if scale is None else rest
        of_batch, mi, ni = (lax.axis_index(name) for name in ("batch", "m", "n"))

        def step(_, a_block, word_block, b_block, acc):
            left = versions.load(a_block.transpose((1, 0)) if m_major else a_block, lhs)
            right = versions.load(b_block if n_major else b_block.transpose((1, 0)), rhs)
            places = versions.load(word_block, word_layout)

            @plgpu.inline_mgpu(
                arg_types=(acc_layout, lhs, word_layout, rhs),
                return_type=plgpu.ShapeDtypeStruct((tile_m, tile_n), jnp.float32, layout=acc_layout),
            )
            def multiply(_, acc, left, places, right):
                return instructions.mma_sp(acc, left, places, right)

            return multiply(acc, left, places, right)

        def emulated(_, a_block, word_block, b_block, acc):
            form = {"order": a.order, "m_major": m_major, "n_major": n_major}
            return acc + emulation.product(a_block[...], word_block[...], b_block[...], **form)

        def walk(shape, at, turned):
            shape, index = (shape[::-1], lambda i: (i, at)) if turned else (shape, lambda i: (at, i))
            form = swizzled(shape[1], 2)[1]
            return plgpu.BlockSpec(shape, index, transforms=form)

        acc = jnp.zeros((tile_m, tile_n), jnp.float32)
        acc = plgpu.emit_pipeline(
            emulated if interpret else step,
            grid=(k // tile_k,),
            max_concurrent_steps=config.stages,
            init_carry=acc if interpret else plgpu.layout_cast(acc, acc_layout),
            in_specs=(
                walk((tile_m, tile_k // 2), mi, m_major),
                plgpu.BlockSpec(word_block, lambda i: (mi, i)),
                walk((tile_n, tile_k), ni, n_major),
            ),
        )(a_all.at[of_batch], words_all.at[of_batch], b_all.at[of_batch])
        if scale_all is not None:
            acc = acc * scale_all[of_batch]
        acc = acc.astype(dtype)
        down, across = pl.ds(mi * tile_m, tile_m), pl.ds(ni * tile_n, tile_n)
        where = (across, down) if transpose else (down, across)
        if interpret:
            out_all[of_batch, *where] = acc.T if transpose else acc
            return
        stored = (tile_n, tile_m) if transpose else (tile_m, tile_n)
        swizzle, form = swizzled(stored[1], jnp.dtype(dtype).itemsize)

        @partial(pl.run_scoped, held=plgpu.SMEM(stored, dtype, transforms=form))
        def store(held):  # by way of shared memory, for lines that are written whole
            to = layout.WGMMA_TRANSPOSED if transpose else layout.WGMMA
            (held.transpose((1, 0)) if transpose else held)[...] = plgpu.layout_cast(acc, to)
            plgpu.inline_mgpu()(lambda _: instructions.meet())()
            out_all[of_batch, *where] = versions.load(held, layout.SMEM_GMEM_COPY(stored, dtype, swizzle))

    return plgpu.kernel(
        kernel,
        out_type=result((batch, *((n, m) if transpose else (m, n))), dtype, a.values, words, b, *scales),
        grid=(batch, m // tile_m, n // tile_n),
        grid_names=("batch", "m", "n"),
        **({"interpret": versions.interpreter_params()} if interpret else {}),
    )(a.values, words, b, *scales)
