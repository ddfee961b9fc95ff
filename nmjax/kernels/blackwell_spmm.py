"""Packed 2:4 times dense on Blackwell's sparse tensor cores: ``D[M, N] = A[M, K] @ B[K, N]``, with A packed along K.

A thread block computes one tile of D. One warp loads blocks of A, of its words and of B into a ring buffer in shared
memory (TMA). Another copies the words to tensor memory, and starts the products (``tcgen05.mma.sp``), whose sums stay
in tensor memory. At the end a second warpgroup stores them.

16-bit A is contiguous along K or along M, B along K or along N, and the result is D or its transpose. 8-bit operands
are contiguous along K.

8-bit operands may have scales of blocks (`nmjax.kernels.family.Blocks`), and 4-bit ones must. These lie beside the
words in tensor memory. FP4 is 4:8 of pairs: two of four bytes, with the words of 8-bit values.

The kernel has been compiled for sm_100a and sm_103a and has not run on hardware.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, UInt

from nmjax.core import versions
from nmjax.kernels import emulation
from nmjax.kernels.batches import result
from nmjax.kernels.blackwell import BlackwellConfig
from nmjax.kernels.family import BLOCKS, Blocks, Shape, Target
from nmjax.kernels.format import Packed
from nmjax.kernels.instructions import swizzled

Ref = Any  # a reference to a block of an array, inside a kernel

ROWS = 128  # of a tile: those of tensor memory
STORED = 64  # columns that are stored at once
_LOADS, _MULTIPLIES = 0, 1  # the warps of the first warpgroup


def words_of(packed: Packed) -> UInt[Array, "batch m k 128 4"]:
    """Return the words of a batch of packed matrices in the order of tensor memory: blocks of 128 rows and 128 k.

    A line of tensor memory has four words. For 8-bit values, a line is a row. For 16-bit values, a row is (w, half, g)
    and a line is (w, p, g). Word i of line (w, p, g) holds the nibbles of rows (w, 0, g) and (w, 1, g) for the 16
    values from k = 16 (2 i + p) on.
    """
    words = packed.indices
    if packed.order == "words8":
        batch, m, k = words.shape
        return words.reshape(batch, m // ROWS, ROWS, k // 4, 4).transpose(0, 1, 3, 2, 4)
    batch, m, k, _ = words.shape
    parts = words.reshape(batch, m // 2, 2, k // 2, 2, 4, 8, 2, 2)  # m block, m half, k block, k half, w, g, i, p
    return parts.transpose(0, 1, 3, 2, 5, 8, 6, 4, 7).reshape(batch, m // 2, k // 2, ROWS, 4)


def _in_twos(words: UInt[Array, "*front n"]) -> Array:
    """Return words as integers of two bits, the lowest first: 16 for each word."""
    return lax.bitcast_convert_type(words, jnp.uint2).reshape(*words.shape[:-1], -1)


def _words_back(words: UInt[Array, "1 k 128 4"], order: str) -> UInt[Array, "..."]:
    """Return the words of a block of 128 rows in the order of `nmjax.kernels.format`."""
    if order == "words8":
        return words.transpose(0, 2, 1, 3).reshape(ROWS, -1)
    count = words.shape[1]
    parts = words.reshape(count, 2, 4, 2, 8, 2, 2).transpose(1, 0, 5, 2, 4, 6, 3)  # m half, k, k half, w, g, i, p
    return parts.reshape(2, 2 * count, 128)


def scales_of(scales: Float[Array, "batch rows blocks"], tile: int) -> Float[Array, "batch rows4 blocks4 32 16"]:
    """Return the scales of blocks in the order of tensor memory, for tiles of so many rows.

    A tile is filled up to whole blocks of 128 rows. A line has the scales of four rows, which are 32 rows apart, and of
    four blocks along K.
    """
    batch, rows, blocks = scales.shape
    tiles = scales.reshape(batch, rows // tile, tile, blocks)
    tiles = jnp.pad(tiles, ((0, 0), (0, 0), (0, -tile % ROWS), (0, 0)), constant_values=1)
    parts = tiles.reshape(batch, -1, 4, 32, blocks // 4, 4).transpose(0, 1, 4, 3, 2, 5)
    return parts.reshape(batch, -1, blocks // 4, 32, 16)


def _scales_back(scales: Float[Array, "rows4 blocks4 32 16"], rows: int) -> Float[Array, "rows blocks"]:
    """Return the scales of blocks along K for each row of a tile."""
    parts = scales.reshape(*scales.shape[:3], 4, 4).transpose(0, 3, 2, 1, 4)
    return parts.reshape(-1, 4 * scales.shape[1])[:rows]


def spmm(
    a: Packed, b: Float[Array, "batch r c"], scale: Float[Array, " batch"] | Blocks | None, shape: Shape,
    config: BlackwellConfig, target: Target,
) -> Float[Array, "batch m n"]:  # fmt: skip
    """Multiply a batch of packed matrices by a batch of dense ones. See `nmjax.kernels.family.Family.spmm`."""
    interpret = target.interpret
    batch, n, step, stages = a.shape[0], config.tile_n, config.step(shape.bits), config.stages
    words = words_of(a) if interpret else _in_twos(words_of(a))  # [batch, m, k, 128, 64] of two bits
    blocks: tuple[jax.Array, ...] = ()
    if isinstance(scale, Blocks):
        blocks, scale = (scales_of(scale.a, ROWS), scales_of(scale.b, n)), None
    inputs = (a.values, words, b, *blocks) if scale is None else (a.values, words, b, scale)
    lines = (1, -(-n // ROWS))[: len(blocks)]  # blocks of 128 rows of scales
    a_block = (step // 2, ROWS) if shape.m_major else (ROWS, step // 2)
    b_block = (step, n) if shape.n_major else (n, step)
    transpose = shape.transpose
    sides = (shape.n, shape.m) if transpose else (shape.m, shape.n)
    stored = (STORED, ROWS) if transpose else (ROWS, STORED)
    kind, out = jnp.dtype(shape.dtype), jnp.dtype(shape.out)

    def blackwell_spmm(*refs: Ref) -> None:  # the name that profilers show
        loads = 3 + len(blocks)
        d, a_ring, words_ring, b_ring, store, loaded, used, done, sums, *rest = refs[len(inputs) :]
        at = tuple(lax.axis_index(name) for name in ("b", "i", "j"))
        Tile(
            shape, config, a.order, interpret, inputs=refs[:loads], scale=None if scale is None else refs[3],
            out=d, a=a_ring, words=words_ring, b=b_ring, scales=tuple(rest[: len(blocks)]), store=store, loaded=loaded,
            used=used, done=done, sums=sums, at=at, meta=tuple(rest[len(blocks) :]),
        ).compute()  # fmt: skip

    words_block = (2 if shape.itemsize == 1 else 1, *words.shape[3:])
    of_stage = [((ROWS, 64 * words_block[0]), jnp.uint2, plgpu.TMEMLayout.SPARSE_METADATA_LAYOUT)]
    in_step = step // BLOCKS[shape.bits][0] if blocks else 0  # scales of a row
    of_stage += [((ROWS * count, in_step), blocks[0].dtype, plgpu.TMEMLayout.SCALES_LAYOUT) for count in lines]
    call = plgpu.kernel(
        blackwell_spmm,
        out_type=result((batch, *sides), out, *inputs),
        grid=(batch, shape.m // ROWS, shape.n // n),
        grid_names=("b", "i", "j"),
        num_threads=2,
        thread_name="wg",
        scratch_types=[
            plgpu.SMEM((stages, *a_block), kind, transforms=swizzled(a_block[1], shape.bits / 8).transforms),
            plgpu.SMEM((stages, 1, *words_block), words.dtype),
            plgpu.SMEM((stages, *b_block), b.dtype, transforms=swizzled(b_block[1], shape.bits / 8).transforms),
            plgpu.SMEM((2, *stored), out, transforms=() if transpose else swizzled(STORED, out.itemsize).transforms),
            plgpu.Barrier(num_arrivals=3 + len(blocks), num_barriers=stages),
            plgpu.Barrier(num_barriers=stages, orders_tensor_core=True),
            plgpu.Barrier(orders_tensor_core=True),
            (plgpu.SMEM if interpret else plgpu.TMEM)((ROWS, n), jnp.float32),
            *(plgpu.SMEM((stages, count, in_step // 4, 32, 16), blocks[0].dtype) for count in lines),
            *(plgpu.TMEM(dims, of, layout=layout) for dims, of, layout in of_stage * stages if not interpret),
        ],
        **versions.launch_options(interpret),
    )
    return call(*inputs)


class Tile(NamedTuple):
    """A tile of D, and what its thread block works with."""

    shape: Shape
    config: BlackwellConfig
    order: str  # of the words
    emulated: bool
    inputs: Sequence[Ref]  # A, the words, B and the scales of blocks, of all matrices
    scale: Ref | None
    out: Ref
    a: Ref  # the ring buffers
    words: Ref
    b: Ref
    scales: tuple[Ref, ...]  # those of blocks of A and B, or none
    store: Ref
    loaded: Ref  # barriers: a slot of the ring is filled, it may be filled again, and all products are done
    used: Ref
    done: Ref
    sums: Ref
    at: tuple[Any, ...]  # the matrix of the batch, and the row and column of the tile
    meta: tuple[Ref, ...]  # for each slot the words, and the scales of blocks, in tensor memory

    @property
    def steps(self) -> int:
        """The steps along K."""
        return self.shape.k // self.config.step(self.shape.bits)

    def compute(self) -> None:
        """Compute the tile: one warpgroup loads and multiplies, and the other one stores."""
        wg = lax.axis_index("wg")
        in_turn = self.emulate if self.emulated else self.multiply_in_turn

        @pl.when(wg == 0)
        def _() -> None:
            if self.emulated:
                lax.fori_loop(0, self.steps, in_turn, None)
                self.drain()
                return

            @plgpu.warp_map
            def _(warp: jax.Array) -> None:
                pl.when(warp == _LOADS)(self.load_all)
                pl.when(warp == _MULTIPLIES)(lambda: lax.fori_loop(0, self.steps, in_turn, None))

        pl.when(wg == 1)(self.save)

    def load(self, k: jax.Array, _: None) -> None:
        """Load a step into its slot, as soon as the slot's last products are done."""
        (batch, i, j), stages = self.at, self.config.stages
        n, step = self.config.tile_n, self.config.step(self.shape.bits)
        slot = lax.rem(k, stages)
        pl.when(k >= stages)(lambda: plgpu.barrier_wait(self.used.at[slot]))
        rows, columns = pl.ds(i * ROWS, ROWS), pl.ds(j * n, n)
        count = self.words.shape[2]  # blocks of words
        along, packed = pl.ds(k * step, step), pl.ds(k * (step // 2), step // 2)
        a, words, b, *scales = (v.at[batch] for v in self.inputs)
        parts = (
            a.at[packed, rows] if self.shape.m_major else a.at[rows, packed],
            words.at[pl.ds(i, 1), pl.ds(k * count, count)],
            b.at[along, columns] if self.shape.n_major else b.at[columns, along],
            *(
                v.at[pl.ds(at * ring.shape[1], ring.shape[1]), pl.ds(k * ring.shape[2], ring.shape[2])]
                for v, ring, at in zip(scales, self.scales, (i, j), strict=False)
            ),
        )
        for part, ring in zip(parts, (self.a, self.words, self.b, *self.scales), strict=True):
            plgpu.copy_gmem_to_smem(part, ring.at[slot], self.loaded.at[slot])

    def load_all(self) -> None:
        """Load all steps, and wait until they are used."""
        lax.fori_loop(0, self.steps, self.load, None)
        self.drain()

    def drain(self) -> None:
        """Wait for the products of the last steps."""
        for k in range(max(self.steps - self.config.stages, 0), self.steps):
            plgpu.barrier_wait(self.used.at[k % self.config.stages])

    def multiply(self, k: jax.Array, slot: int) -> None:
        """Start the products of a step."""
        plgpu.barrier_wait(self.loaded.at[slot])
        each = len(self.meta) // self.config.stages
        meta, *scales = self.meta[slot * each : (slot + 1) * each]
        plgpu.async_copy_sparse_metadata_to_tmem(self.words.at[slot], meta)
        for ring, kept in zip(self.scales, scales, strict=True):
            plgpu.async_copy_scales_to_tmem(ring.at[slot], kept)
        options = dict(zip(("a_scale", "b_scale"), scales, strict=True)) if scales else {}
        a, b = self.a.at[slot], self.b.at[slot]
        a = a.transpose((1, 0)) if self.shape.m_major else a
        b = b if self.shape.n_major else b.transpose((1, 0))
        plgpu.tcgen05_mma(self.sums, a, b, self.used.at[slot], a_sparse_metadata=meta, accumulate=k > 0, **options)
        pl.when(k == self.steps - 1)(lambda: plgpu.tcgen05_commit_arrive(self.done))

    def multiply_in_turn(self, k: jax.Array, _: None) -> None:
        """Start the products of a step in its slot. References to tensor memory are known at trace time."""
        for slot in range(self.config.stages):
            pl.when(lax.rem(k, self.config.stages) == slot)(partial(self.multiply, k, slot))

    def emulate(self, k: jax.Array, _: None) -> None:
        """Load a step and multiply it, on a CPU."""
        self.load(k, None)
        slot = lax.rem(k, self.config.stages)
        plgpu.barrier_wait(self.loaded.at[slot])
        majors = {"m_major": self.shape.m_major, "n_major": self.shape.n_major}
        words = _words_back(self.words[slot], self.order)
        sides = ROWS, self.config.tile_n
        scales = [_scales_back(ring[slot], rows) for ring, rows in zip(self.scales, sides, strict=False)]
        product = emulation.product(self.a[slot], words, self.b[slot], *scales, order=self.order, **majors)
        self.sums[...] = jnp.where(k > 0, self.sums[...], 0) + product
        plgpu.barrier_arrive(self.used.at[slot])
        pl.when(k == self.steps - 1)(lambda: plgpu.barrier_arrive(self.done))

    def save(self) -> None:
        """Store the sums, piece by piece."""
        (batch, i, j), n = self.at, self.config.tile_n
        plgpu.barrier_wait(self.done)
        for piece in range(n // STORED):
            slot = self.store.at[piece % 2]
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)  # the piece before the last has left
            part = self.sums.at[:, pl.ds(piece * STORED, STORED)]
            y = part[...] if self.emulated else plgpu.async_load_tmem(part)
            y = (y if self.scale is None else y * self.scale[batch]).astype(self.store.dtype)
            if self.shape.transpose and not self.emulated:
                versions.store(slot.transpose((1, 0)), y)
            else:
                slot[...] = y.T if self.shape.transpose else y
            plgpu.commit_smem()
            rows, columns = pl.ds(i * ROWS, ROWS), pl.ds(j * n + piece * STORED, STORED)
            where = (columns, rows) if self.shape.transpose else (rows, columns)
            plgpu.copy_smem_to_gmem(slot, self.out.at[batch].at[where])
        plgpu.wait_smem_to_gmem(0)
