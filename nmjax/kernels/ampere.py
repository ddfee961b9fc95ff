"""Ampere and Ada: which products `nmjax.kernels.ampere_spmm` computes, and by which tiles."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from nmjax.core import versions
from nmjax.core.refusal import Refusal
from nmjax.core.value import Value
from nmjax.kernels.family import Family, Shape, Target, division_refusal, memory_refusal, tiles_refusal

_SHARED = 99 * 1024  # bytes of shared memory of sm_86 and sm_89, which have the least


@dataclass(frozen=True, repr=False)
class AmpereConfig(Value):
    """The tiles of a product on Ampere.

    >>> AmpereConfig(stages=4)
    AmpereConfig(stages=4)
    """

    tile_m: int = 128
    tile_n: int = 128
    tile_k: int = 64
    stages: int = 3


class Ampere(Family):
    """The kernels take 16-bit values. Their speed has not been tuned."""

    name = "ampere"
    devices = r"A100|A800|A30\b|A40\b|A10\b|RTX 30|RTX A|L4\b|L40|RTX 40"
    capability = "8"
    config = AmpereConfig
    fp8 = False

    def lacks(self) -> Refusal | None:
        """Ask for layouts of registers."""
        if versions.has_warp_products():
            return None
        return Refusal(f"jax {jax.__version__} has no layouts for Ampere's instructions: they come with 0.11")

    def refusal(self, shape: Shape) -> Refusal | None:
        """Ask for whole tiles."""
        return tiles_refusal(shape, 64, 64, 64)

    def config_refusal(self, shape: Shape, config: AmpereConfig) -> Refusal | None:
        """Ask for whole tiles that fit into shared memory."""
        if shape.itemsize != 2:
            return Refusal(f"{shape.dtype}: Ampere's sparse products take 16-bit values")
        if any(side < 64 or side % 64 for side in (config.tile_m, config.tile_n, config.tile_k)) or config.stages < 2:
            return Refusal(f"{config}: the tile's sides are multiples of 64, and stages must be at least 2")
        refusal = division_refusal(shape, config.tile_m, config.tile_n, config.tile_k)
        if refusal is not None:
            return refusal
        ring = config.stages * (config.tile_m * config.tile_k * 9 // 8 + config.tile_n * config.tile_k * 2)
        store = config.tile_m * config.tile_n * jnp.dtype(shape.out).itemsize  # in the ring's memory, after the product
        return memory_refusal(config, max(ring, store), _SHARED)

    def candidates(self, shape: Shape, target: Target) -> list[AmpereConfig]:
        """Return large tiles first."""
        return [AmpereConfig(m, n) for m, n in ((128, 128), (64, 128), (128, 64), (64, 64))]


AMPERE = Ampere()
