"""Blackwell: which products `nmjax.kernels.blackwell_spmm` computes, and by which tiles."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from nmjax.core import versions
from nmjax.core.refusal import Refusal
from nmjax.core.value import Value
from nmjax.kernels.family import (
    BARRIERS,
    BLOCKS,
    SHARED,
    Family,
    Shape,
    Target,
    division_refusal,
    memory_refusal,
    tiles_refusal,
)


@dataclass(frozen=True, repr=False)
class BlackwellConfig(Value):
    """The tiles of a product on Blackwell, which have 128 rows.

    >>> BlackwellConfig(tile_n=128)
    BlackwellConfig(tile_n=128)
    """

    tile_n: int = 256
    stages: int = 2

    def step(self, bits: int) -> int:
        """Return the number of values along K that a step takes: 128 of 16 bits, 256 of 8 bits, or 512 of 4 bits."""
        return 2048 // bits


class Blackwell(Family):
    """The kernels have been compiled, and have not run on hardware."""

    name = "blackwell"
    devices = "B100|B200|GB200|B300|GB300"
    capability = "10"
    config = BlackwellConfig
    tuned_only = True
    blocks = True

    def lacks(self) -> Refusal | None:
        """Ask for transposed stores."""
        if versions.stores_transposed():
            return None
        return Refusal(f"jax {jax.__version__} cannot store the results of Blackwell's kernels: from 0.11 on it can")

    def refusal(self, shape: Shape) -> Refusal | None:
        """Ask for whole tiles."""
        return tiles_refusal(shape, 128, 64, 2048 // shape.bits)

    def config_refusal(self, shape: Shape, config: BlackwellConfig) -> Refusal | None:
        """Ask for whole tiles that fit into shared memory."""
        if config.tile_n not in (64, 128, 192, 256) or config.stages < 2:
            return Refusal(f"{config}: tile_n must be 64, 128, 192 or 256, and stages at least 2")
        step = config.step(shape.bits)
        refusal = division_refusal(shape, 128, config.tile_n, step)
        if refusal is not None:
            return refusal
        words = 128 * step // (16 if shape.bits == 4 else 8)
        size, _ = BLOCKS.get(shape.bits, (step, ""))  # of 8 bits too, which may have scales
        scales = (1 + -(-config.tile_n // 128)) * 128 * step // size if shape.bits < 16 else 0
        ring = config.stages * (128 * 256 // 2 + words + scales + config.tile_n * 256)
        return memory_refusal(config, ring + 2 * 128 * 64 * jnp.dtype(shape.out).itemsize, SHARED - BARRIERS)

    def candidates(self, shape: Shape, target: Target) -> list[BlackwellConfig]:
        """Return wide tiles first."""
        return [BlackwellConfig(tile_n=n, stages=s) for n, s in ((256, 2), (192, 2), (128, 3), (64, 4), (64, 3))]


BLACKWELL = Blackwell()
