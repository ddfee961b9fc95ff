"""Packed 2:4 times dense by Ampere's sparse ``mma``, for 16-bit values.

A thread block of one warpgroup copies blocks of A, of its words and of B into shared memory (cp.async), and multiplies
out of registers. The words are in the same order as on Hopper: each warp has the words of 16 of 64 rows. The kernel
needs Mosaic's register layouts for ``mma`` (`nmjax.core.versions.has_warp_products`). It has been compiled for sm_80
and sm_90. Its speed has not been tuned.

`spmm` launches `_kernel`, in which a pipeline feeds the steps along K, and `Instructions` multiply and store: those of
the hardware, or their emulation on a CPU.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from nmjax.core import versions
from nmjax.kernels import emulation, instructions
from nmjax.kernels.ampere import AmpereConfig
from nmjax.kernels.batches import result
from nmjax.kernels.family import Shape, Target
from nmjax.kernels.format import Packed
from nmjax.kernels.instructions import swizzled

Ref = Any  # a reference to memory of the device, inside a kernel


def spmm(
    a: Packed, b: Float[Array, "batch r c"], scale: Float[Array, " batch"] | None, shape: Shape, config: AmpereConfig,
    target: Target,
) -> Float[Array, "batch m n"]:  # fmt: skip
    """Multiply a batch of packed matrices by a batch of dense ones. See `nmjax.kernels.family.Family.spmm`."""
    interpret = target.interpret
    g = Geometry(shape, config, a.order, scale is not None)
    batch = a.shape[0]
    words = a.indices.reshape(batch, shape.m // 64, shape.k // 64 * 128)
    inputs = (a.values, words, b) if scale is None else (a.values, words, b, scale)
    sides = (shape.n, shape.m) if shape.transpose else (shape.m, shape.n)

    def ampere_spmm(*refs: Ref) -> None:  # the name that profilers show
        _kernel(g, EMULATED if interpret else HARDWARE, *refs)

    call = plgpu.kernel(
        ampere_spmm,
        out_type=result((batch, *sides), g.dtype, *inputs),
        grid=(batch, shape.m // config.tile_m, shape.n // config.tile_n),
        grid_names=("batch", "m", "n"),
        **versions.launch_options(interpret),
    )
    return call(*inputs)


# ---- the geometry ----


@dataclass(frozen=True)
class Geometry:
    """Everything that a kernel knows before it runs, computed from the product's shape and the config.

    Shared memory of a thread block, where a value of the result has ``r`` bytes::

        what      a buffer                              bytes of a buffer      buffers
        A         [tile_m, tile_k / 2], or turned       tile_m * tile_k        stages
        words     [tile_m / 64, tile_k / 64 * 128]      tile_m * tile_k / 8    stages
        B         [tile_n, tile_k], or turned           tile_n * tile_k * 2    stages
        result    [tile_m, tile_n], or turned           tile_m * tile_n * r    1, in the memory of the others

    The copies of a step form a group that the warpgroup waits for, without barriers in shared memory.
    """

    shape: Shape
    config: AmpereConfig
    order: str  # of the words
    scaled: bool

    @property
    def tile(self) -> tuple[int, int]:
        """The rows and columns of D that a thread block computes."""
        return self.config.tile_m, self.config.tile_n

    @property
    def words_block(self) -> tuple[int, int]:
        """The words of A that a step takes."""
        return self.config.tile_m // 64, self.config.tile_k // 64 * 128

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of the result."""
        return jnp.dtype(self.shape.out)

    @property
    def stored(self) -> tuple[int, int]:
        """The sides of the result's tile in shared memory."""
        return self.tile[::-1] if self.shape.transpose else self.tile

    @cached_property
    def layouts(self) -> "Layouts":
        """The layouts of a step's operands in registers."""
        kind, layout = jnp.dtype(self.shape.dtype), plgpu.Layout
        words = layout.WG_STRIDED(self.words_block, vec_size=1)
        acc, a, b = (getattr(layout, name)(kind) for name in ("MMA_ACC", "MMA_LHS", "MMA_RHS"))  # from jax 0.11 on
        return Layouts(acc, a, words, b)


class Layouts(NamedTuple):
    """The layouts of a step's operands in registers."""

    acc: Any
    a: Any
    words: Any
    b: Any


# ---- the kernel ----


class Tile(NamedTuple):
    """The tile of D that a thread block computes."""

    batch: jax.Array
    m: jax.Array  # its row of tiles
    n: jax.Array


def _kernel(g: Geometry, do: "Instructions", a: Ref, words: Ref, b: Ref, *rest: Ref) -> None:
    """Compute the tile of one thread block."""
    scale, out = rest if g.scaled else (None, *rest)
    tile = Tile(*(lax.axis_index(name) for name in Tile._fields))
    config = g.config
    acc = plgpu.emit_pipeline(
        partial(do.multiply, g),
        grid=(g.shape.k // config.tile_k,),
        max_concurrent_steps=config.stages,
        init_carry=do.zeros(g),
        in_specs=(
            _walk((config.tile_m, config.tile_k // 2), tile.m, g.shape.m_major),
            plgpu.BlockSpec(g.words_block, lambda k: (tile.m, k)),
            _walk((config.tile_n, config.tile_k), tile.n, g.shape.n_major),
        ),
    )(a.at[tile.batch], words.at[tile.batch], b.at[tile.batch])
    if scale is not None:
        acc = acc * scale[tile.batch]
    acc = acc.astype(g.dtype)
    rows, columns = (pl.ds(at * size, size) for at, size in zip((tile.m, tile.n), g.tile, strict=True))
    do.store(g, out, (tile.batch, columns, rows) if g.shape.transpose else (tile.batch, rows, columns), acc)


def _walk(block: tuple[int, int], at: jax.Array, turned: bool) -> plgpu.BlockSpec:
    """Return the blocks of an operand along K, which is its last axis, or its first if it is turned."""
    block = block[::-1] if turned else block
    index = (lambda k: (k, at)) if turned else (lambda k: (at, k))
    return plgpu.BlockSpec(block, index, transforms=swizzled(block[1], 2).transforms)


# ---- the instructions ----


class Instructions(NamedTuple):
    """The operations of a thread block on its accumulator ``[tile_m, tile_n]``."""

    zeros: Callable[[Geometry], jax.Array]
    multiply: Callable[..., jax.Array]  # (g, indices, a, words, b, acc): one step, added to the accumulator
    store: Callable[[Geometry, Ref, tuple[Any, ...], jax.Array], None]  # a tile at a place of the result


def _zeros(g: Geometry) -> jax.Array:
    return plgpu.layout_cast(jnp.zeros(g.tile, jnp.float32), g.layouts.acc)


def _multiply(g: Geometry, indices: Sequence[jax.Array], a: Ref, words: Ref, b: Ref, acc: jax.Array) -> jax.Array:
    layouts = g.layouts
    left = versions.load(a.transpose((1, 0)) if g.shape.m_major else a, layouts.a)
    right = versions.load(b if g.shape.n_major else b.transpose((1, 0)), layouts.b)
    places = versions.load(words, layouts.words)

    @plgpu.inline_mgpu(
        arg_types=layouts,
        return_type=plgpu.ShapeDtypeStruct(g.tile, jnp.float32, layout=layouts.acc),
    )
    def multiply(_: Any, acc: Any, left: Any, places: Any, right: Any) -> Any:
        return instructions.mma_sp(acc, left, places, right)

    return multiply(acc, left, places, right)


def _store(g: Geometry, out: Ref, at: tuple[Any, ...], acc: jax.Array) -> None:
    """Store a tile by way of shared memory, so that whole lines are written."""
    swizzle, transforms = swizzled(g.stored[1], g.dtype.itemsize)

    @partial(pl.run_scoped, tile=plgpu.SMEM(g.stored, g.dtype, transforms=transforms))
    def with_shared_memory(tile: Ref) -> None:
        layout = plgpu.Layout.WGMMA_TRANSPOSED if g.shape.transpose else plgpu.Layout.WGMMA
        (tile.transpose((1, 0)) if g.shape.transpose else tile)[...] = plgpu.layout_cast(acc, layout)
        plgpu.inline_mgpu()(lambda _: instructions.meet())()
        out[at] = versions.load(tile, plgpu.Layout.SMEM_GMEM_COPY(g.stored, g.dtype, swizzle))


HARDWARE = Instructions(_zeros, _multiply, _store)


def _emulated_multiply(
    g: Geometry, indices: Sequence[jax.Array], a: Ref, words: Ref, b: Ref, acc: jax.Array
) -> jax.Array:  # fmt: skip
    form = {"order": g.order, "m_major": g.shape.m_major, "n_major": g.shape.n_major}
    return acc + emulation.product(a[...], words[...], b[...], **form)


def _emulated_store(g: Geometry, out: Ref, at: tuple[Any, ...], acc: jax.Array) -> None:
    out[at] = acc.T if g.shape.transpose else acc


EMULATED = Instructions(lambda g: jnp.zeros(g.tile, jnp.float32), _emulated_multiply, _emulated_store)
