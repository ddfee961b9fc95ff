"""The geometry of Hopper's kernel: its tiles, its blocks in shared memory, and its grid."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from nmjax.kernels.family import Shape
from nmjax.kernels.hopper import HopperConfig, stored
from nmjax.kernels.instructions import swizzled

Ref = Any  # a reference to memory of the device, inside a kernel


class Block(NamedTuple):
    """The part of an operand that a step fetches. Blocks of consecutive steps follow each other along K."""

    rows: int  # along M or N
    columns: int  # along K
    turned: bool  # K is the first axis
    shared: bool  # between the thread blocks of a cluster
    swizzle: int = 0
    transforms: tuple[Any, ...] = ()

    def spec(self) -> plgpu.BlockSpec:
        """Return the specification of the block for a pipeline along K."""
        options: dict[str, Any] = {"collective_axes": ("cluster",)} if self.shared else {}
        return plgpu.BlockSpec(
            (self.columns, self.rows) if self.turned else (self.rows, self.columns),
            (lambda k: (k, 0)) if self.turned else (lambda k: (0, k)),
            memory_space=plgpu.SMEM,
            transforms=self.transforms,
            **options,
        )

    def panel(self, operand: Ref, batch: jax.Array, at: jax.Array, part: jax.Array, steps: int) -> Ref:
        """Return what one tile reads of an operand.

        Args:
          operand: The operand.
          batch: The matrix of the batch.
          at: The row index of the tile for A and its words, or the column index for B.
          part: The index of its part of K.
          steps: The steps of a part.
        """
        rows = pl.ds(at * self.rows, self.rows)
        columns = pl.ds(part * (steps * self.columns), steps * self.columns)
        return operand.at[batch, columns, rows] if self.turned else operand.at[batch, rows, columns]


@dataclass(frozen=True)
class Geometry:
    """Everything that a kernel knows before it runs, computed from the product's shape and the config.

    Shared memory of a thread block, where a value of A and B has ``s`` bytes and one of the result ``r`` bytes::

        what      a buffer                                 bytes of a buffer      buffers
        A         [rows, step / 2], or turned              rows * step * s / 2    stages
        words     16-bit: [rows / 64, step / 64 * 128]     rows * step / 8        stages
                  8-bit:  [rows, step / 32]
        B         [tile_n, step], or turned                tile_n * step * s      stages
        results   [tile_m, store_n], or turned             tile_m * store_n * r   warpgroups * min(2, tile_n / store_n)

    Its barriers::

        what      count     a phase ends when
        full      stages    the stage's A, words and B have arrived: three arrivals
        empty     stages    every warpgroup that multiplies is done with the stage, in both blocks if they share it
        results   none      a warpgroup waits until its own stores have left shared memory
    """

    shape: Shape
    config: HopperConfig
    batch: int
    order: str  # of the words
    scaled: bool

    @property
    def wide(self) -> bool:
        """True for 16-bit operands."""
        return self.shape.itemsize == 2

    # The tile of a thread block, and its walk along K.

    @property
    def warpgroups(self) -> int:
        """The warpgroups that multiply."""
        return self.config.warpgroups

    @property
    def tile(self) -> tuple[int, int]:
        """The rows and columns of D that one warpgroup computes."""
        return self.config.tile_m, self.config.tile_n

    @property
    def step(self) -> int:
        """The values along K of a step."""
        return self.config.step(self.shape.itemsize)

    @property
    def steps(self) -> int:
        """The steps along K, or along a part of it."""
        return -(-self.all_steps // self.config.split)

    @property
    def all_steps(self) -> int:
        """The steps along all of K."""
        return self.shape.k // self.step

    @property
    def parts(self) -> int:
        """The parts of K whose sums are stored apart."""
        return -(-self.all_steps // self.steps)

    @property
    def beyond(self) -> bool:
        """True if the last part has steps beyond K, where all that is loaded is zero."""
        return self.parts * self.steps > self.all_steps

    # The grid.

    @property
    def along(self) -> tuple[int, int]:
        """The thread blocks of a cluster along M and along N."""
        return (2 if self.config.cluster == "m" else 1), (2 if self.config.cluster == "n" else 1)

    @property
    def cluster(self) -> int:
        """The thread blocks of a cluster."""
        return self.along[0] * self.along[1]

    @property
    def grid(self) -> tuple[int, int]:
        """The tiles of one matrix of the batch along M and along N, those of a cluster counted as one.

        The last ones may reach beyond the matrix.
        """
        (along_m, along_n), (_, tile_n) = self.along, self.tile
        return -(-self.shape.m // (self.config.rows * along_m)), -(-self.shape.n // (tile_n * along_n))

    # The operands in shared memory.

    @cached_property
    def a(self) -> Block:
        """The block of A's values."""
        turned, tile_m = self.shape.m_major, self.config.tile_m
        swizzle, transforms = swizzled(tile_m if turned else self.step // 2, self.shape.itemsize)
        return Block(self.config.rows, self.step // 2, turned, self.along[1] == 2, swizzle, transforms)

    @cached_property
    def words(self) -> Block:
        """The block of A's words."""
        shared = self.along[1] == 2
        if self.wide:
            return Block(self.config.rows // 64, self.step // 64 * 128, False, shared)
        return Block(self.config.rows, self.step // 32, False, shared)

    @cached_property
    def b(self) -> Block:
        """The block of B."""
        turned, (_, tile_n) = self.shape.n_major, self.tile
        swizzle, transforms = swizzled(tile_n if turned else self.step, self.shape.itemsize)
        return Block(tile_n, self.step, turned, self.along[0] == 2, swizzle, transforms)

    @property
    def blocks(self) -> tuple[Block, Block, Block]:
        """The blocks of A's values, of its words and of B."""
        return self.a, self.words, self.b

    @property
    def words_of_group(self) -> int:
        """The rows of words of one warpgroup."""
        return self.words.rows // self.warpgroups

    @cached_property
    def words_layout(self) -> Any:
        """The layout of 16-bit values' words in registers: each thread has its own."""
        return plgpu.Layout.WG_STRIDED((self.words_of_group, self.words.columns), vec_size=1)

    # The result.

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of what is stored."""
        return jnp.dtype(stored(self.shape, self.config))

    @property
    def result_sides(self) -> tuple[int, int]:
        """The sides of a matrix of the result."""
        sides = self.shape.m, self.shape.n
        return sides[::-1] if self.shape.transpose else sides

    @property
    def whole_sides(self) -> tuple[int, int]:
        """The sides of a matrix that all tiles fill."""
        (along_m, along_n), (m, n) = self.along, self.grid
        sides = m * along_m * self.config.rows, n * along_n * self.config.tile_n
        return sides[::-1] if self.shape.transpose else sides

    @property
    def store_n(self) -> int:
        """The columns of D that are stored at once."""
        return min(self.config.store_n, self.config.tile_n)

    @cached_property
    def results(self) -> Any:
        """The buffers that results are stored through."""
        tile_m, tile_n = self.tile
        block = (self.store_n, tile_m) if self.shape.transpose else (tile_m, self.store_n)
        _, transforms = swizzled(block[1], self.dtype.itemsize)
        shape = (self.warpgroups, min(2, tile_n // self.store_n), *block)
        return plgpu.SMEM(shape, self.dtype, transforms=transforms)
