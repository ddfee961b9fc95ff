"""Hopper: which products `nmjax.kernels.hopper_spmm` computes, and by which tiles."""

from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp

from nmjax.core import versions
from nmjax.core.refusal import Refusal
from nmjax.core.value import Value
from nmjax.kernels import cycles
from nmjax.kernels.family import (
    BARRIERS,
    SHARED,
    Family,
    Shape,
    Target,
    division_refusal,
    memory_refusal,
    tiles_refusal,
)

PARTS = "multiplying in parts of K"


@dataclass(frozen=True, repr=False)
class HopperConfig(Value):
    """The tiles of a product on Hopper. The best ones depend on shapes and device, and are measured.

    >>> HopperConfig(tile_n=128, stages=6)
    HopperConfig(tile_n=128,stages=6)
    """

    tile_m: int = 64  # rows of a warpgroup
    tile_n: int = 256
    tile_k: int = 64  # of 16-bit values; twice as many of 8-bit values
    stages: int = 4
    store_n: int = 64  # columns that are stored at once
    band: int = 8  # tiles along N before the walk turns to the next row of tiles
    cluster: str = ""  # "m": two blocks along M share B; "n": two blocks along N share A
    warpgroups: int = 2
    promote: bool = False  # add up each step's sums in f32, because FP8 tensor cores keep fewer bits of them
    split: int = 1  # parts of K that different thread blocks sum, so that a small result has more tiles

    @property
    def rows(self) -> int:
        """The rows of a thread block."""
        return self.tile_m * self.warpgroups

    def step(self, itemsize: int) -> int:
        """Return the number of values along K that a step takes."""
        return self.tile_k * 2 // itemsize


class Hopper(Family):
    """The kernels have run on an H100."""

    name = "hopper"
    devices = r"H100|H200|GH200|H800|H20\b"
    capability = "9"
    config = HopperConfig
    sums = {f"{'' if p else 'not '}promoted": HopperConfig(tile_n=128, promote=p) for p in (False, True)}

    def refusal(self, shape: Shape) -> Refusal | None:
        """Ask for whole tiles, or whole pieces of the last ones."""
        n = _granularity(shape) or 64
        why = f", and {_why_whole(shape)}" if shape.n % n and n == 64 else ""
        return tiles_refusal(shape, 64, n, 128 // shape.itemsize, why)

    def config_refusal(self, shape: Shape, config: HopperConfig) -> Refusal | None:
        """Ask for tiles that the instructions take, and that fit into shared memory."""
        step = config.step(shape.itemsize)
        sides = (config.tile_m, config.tile_n, config.tile_k)
        if any(side < 64 or side % 64 for side in sides) or config.tile_n > 256:
            return Refusal(f"{config}: the tile's sides are multiples of 64, and tile_n <= 256")
        if config.store_n < 32 or config.store_n % 32 or config.tile_n % config.store_n:
            return Refusal(f"{config}: store_n is a multiple of 32 and divides tile_n")
        if config.warpgroups < 1 or config.band < 1 or config.cluster not in ("", "m", "n"):
            return Refusal(f'{config}: warpgroups and band are at least 1, and cluster is "m", "n" or empty')
        if config.tile_k > 128:
            return Refusal(f"{config}: tile_k <= 128, because a row of a block has at most 128 bytes in shared memory")
        if config.stages < 2:
            return Refusal(f"{config}: stages must be at least 2")
        # A in words of 64 rows; its last tile may reach beyond it if A is contiguous along K.
        m = 64 if not shape.m_major else config.rows * (2 if config.cluster == "m" else 1)
        n = _granularity(shape) or config.tile_n * (2 if config.cluster == "n" else 1)
        refusal = division_refusal(shape, m, n, k=step)
        if refusal is not None:
            return refusal
        if not 1 <= config.split <= shape.k // step:
            return Refusal(f"{config}: split lies between 1 and the {shape.k // step} steps along K")
        a_step, words_step = config.rows * step * shape.itemsize // 2, config.rows * step // 8
        ring = config.stages * (a_step + words_step + config.tile_n * step * shape.itemsize)
        slots = min(2, config.tile_n // config.store_n)
        store = slots * config.rows * config.store_n * jnp.dtype(stored(shape, config)).itemsize
        return memory_refusal(config, ring + store, SHARED - BARRIERS)

    def candidates(self, shape: Shape, target: Target) -> list[HopperConfig]:
        """Return all cuts, the fastest by the model first."""
        clusters = ("m", "n", "")
        if target.interpret and not versions.interprets_clusters():
            clusters = ("",)
        tiles = ((64, 256), (128, 192), (128, 128), (64, 192), (64, 128), (64, 64))
        cuts = [(tile_m, tile_n, 64, stages) for tile_m, tile_n in tiles for stages in (4, 3)]
        cuts += [(tile_m, tile_n, 128, 2) for tile_m, tile_n in tiles]
        configs = [
            HopperConfig(*cut, store_n, cluster=cluster, warpgroups=warpgroups, split=split)
            for cut in cuts
            for cluster in clusters
            for store_n in (64, 32)
            for warpgroups in (2, 1)
            for split in cycles.splits(shape, cut[0] * warpgroups * cut[1], target)
        ]
        fitting = [config for config in configs if self.config_refusal(shape, config) is None]
        return sorted(fitting, key=lambda config: _cycles(shape, config, target))

    def variations(self, config: HopperConfig) -> list[HopperConfig]:
        changes: list[dict[str, Any]] = [{"band": 1}, {"band": 16}, {"tile_k": 128, "stages": 2}]
        changes += [{"stages": s, "store_n": n} for s, n in ((4, 64), (5, 64), (4, 32), (3, 32), (5, 32))]
        changes += [{"split": split} for split in (config.split // 2, 2 * config.split) if config.split > 1]
        return [replace(config, **change) for change in changes]

    def speed(self, shape: Shape, config: HopperConfig, target: Target) -> float:
        """Compare the cycles of the model."""
        return cycles.dense(shape, target) / _cycles(shape, config, target)

    def own_cases(self) -> dict[str, tuple[Shape, HopperConfig]]:
        """Return a product whose K is cut."""
        shape = Shape(256, 256, 1024, "bfloat16", True, True, True)
        return {PARTS: (shape, HopperConfig(tile_n=64, store_n=32, split=3))}

    def own_kinds(self, config: HopperConfig) -> tuple[str, ...]:
        """Return the kind of a product whose K is cut."""
        return (PARTS,) if config.split > 1 else ()


HOPPER = Hopper()


def stored(shape: Shape, config: HopperConfig) -> str:
    """Return the dtype of what a kernel stores: that of the result, or float32 if parts of K are added up later."""
    return "float32" if config.split > 1 else shape.out


def _granularity(shape: Shape) -> int:
    """Return what N must be a multiple of if the last tile along N reaches beyond the operand and the result on Hopper.

    What lies beyond is loaded as zeros and not stored. Blocks in shared memory are cut into pieces, which have to be
    whole: 8 rows of B, and 64 columns of a result that is contiguous along N.

    Returns:
      The number; 0 if the last tile has to be whole, because B is contiguous along N.
    """
    if shape.n_major:
        return 0
    return 8 * (2 // min(jnp.dtype(shape.out).itemsize, 2)) if shape.transpose else 64


def _why_whole(shape: Shape) -> str:
    """Return why N has to be a multiple of 64."""
    operand = "the dense operand" if shape.n_major else "the result"
    return f"{operand} is contiguous along N"


def _cycles(shape: Shape, config: HopperConfig, target: Target) -> float:
    """Return the cycles of a packed product on Hopper."""
    alone = 1 if config.warpgroups > 1 or config.tile_m > 64 else 1.4  # of a single chain of instructions: assumed
    tile = config.rows, config.tile_n
    tiled = cycles.tiled(shape, stored(shape, config), tile, config.split, True, target)
    return alone * tiled / cycles.EFFICIENCY["sparse"]
