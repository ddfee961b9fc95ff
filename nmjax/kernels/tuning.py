"""The best tiles for a product, and the expected gain of packing it: measured on a device, or estimated.

``python -m experiments.bench tune`` measures, and writes a table (`nmjax.kernels.measured`).
"""

import math
from functools import lru_cache
from typing import NamedTuple

import jax.numpy as jnp

from nmjax.core import versions
from nmjax.kernels.limits import (
    AmpereConfig,
    BlackwellConfig,
    Config,
    HopperConfig,
    Shape,
    config_refusal,
    product_refusal,
    stored,
)
from nmjax.kernels.measured import Row, table
from nmjax.kernels.targets import Target

# The model of a multiprocessor, in cycles. An instruction of 64 rows takes half a cycle for each column, dense or
# sparse: sparse ones have twice the K. That and the rate of shared memory are of the H100's white paper. The rest is
# assumed until a table says it.
_SHARED = 128  # bytes that shared memory reads or writes in a cycle
EFFICIENCY = {"dense": 0.8, "sparse": 0.85}  # the share of these bounds that a kernel reaches: assumed
BANDWIDTH = {"H100": 3.0e12, "H200": 4.3e12}  # bytes per second of a large copy; for other devices that of the H200
REACHED = 0.6  # the share of it that pruning and packing reach: on an H100 0.44 for mvue, 0.63 to 0.69 for mse
PACKING, PRUNING = 3.125, 4.0  # bytes of a 16-bit value: read, and written packed; read, and written
_CLOCK = 1.83e9 * 132  # cycles per second of all multiprocessors
_LAUNCH = 4000  # cycles of one kernel more: assumed
_LATENCY = 1000  # cycles from the last product of a tile to the first of the next, apart from storing it: assumed

# ---- the best tiles ----


class Tiling(NamedTuple):
    """The config for a product, and its measured speed as a multiple of a dense product's."""

    config: Config
    speed: float | None  # None if it was not measured


def candidates(shape: Shape, target: Target) -> list[Config]:
    """Return the configs that fit a product, the likeliest first: those that are expected to be the fastest."""
    if target.family == "ampere":
        tiles = [AmpereConfig(tile_m=m, tile_n=n) for m, n in ((128, 128), (64, 128), (128, 64), (64, 64))]
        return [config for config in tiles if config_refusal(shape, config) is None]
    if target.family == "blackwell":
        cuts = [BlackwellConfig(tile_n=n, stages=s) for n, s in ((256, 2), (192, 2), (128, 3), (64, 4), (64, 3))]
        return [config for config in cuts if config_refusal(shape, config) is None]
    return list(_hopper_candidates(shape, target))


def _hopper_candidates(shape: Shape, target: Target) -> list[HopperConfig]:
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
        for split in _splits(shape, cut[0] * warpgroups * cut[1], target)
    ]
    fitting = [config for config in configs if config_refusal(shape, config) is None]
    return sorted(fitting, key=lambda config: _cycles(shape, config, target))


def _splits(shape: Shape, tile: int, target: Target) -> tuple[int, ...]:
    """Return the parts that K may be cut into: several if the result has fewer tiles than the device has room for."""
    tiles = shape.m * shape.n / tile
    return (1,) if tiles > target.cores or target.interpret else (1, 2, 3, 4, 6, 8)


def chosen(shape: Shape, target: Target) -> Tiling | None:
    """Return the tiling for a product, or None if none fits.

    It is that of the same product in a table, else of the nearest one at a distance below 1, else the first candidate.
    """
    return _chosen(shape, target, table(target.kind))


@lru_cache  # by the rows too: a table that is written later has others
def _chosen(shape: Shape, target: Target, rows: tuple[Row, ...]) -> Tiling | None:
    fitting_rows = [row for row in rows if row.shape.dtype == shape.dtype]
    fitting_rows = [row for row in fitting_rows if product_refusal(shape, target, row.config) is None]
    for row in fitting_rows:
        if row.shape == shape:
            return Tiling(row.config, row.speed)
    nearest = min(fitting_rows, key=lambda row: _distance(row.shape, shape), default=None)
    if nearest is not None and _distance(nearest.shape, shape) < 1:
        return Tiling(nearest.config, nearest.speed)
    fitting = candidates(shape, target)
    return Tiling(fitting[0], None) if fitting else None


def _distance(a: Shape, b: Shape) -> float:
    """Return how unlike two products are: a factor of 2 in one size counts 1."""
    sizes = sum(abs(math.log2(x / y)) for x, y in ((a.m, b.m), (a.n, b.n), (a.k, b.k)))
    return sizes + 0.1 * sum(getattr(a, name) != getattr(b, name) for name in ("m_major", "n_major", "transpose"))


# ---- the expected gain ----


def gain(shape: Shape, target: Target, packed_before: bool = False, saves_pruning: bool = False) -> float:
    """Return how many times faster the packed product is expected to be.

    The speed is the measured one if there is one, else an estimate. The gain is 0 if no tiles fit, or if there is
    neither a measured speed nor an estimate, as on Ampere and Blackwell.

    Args:
      shape: The product.
      target: The device.
      packed_before: True if the packing of the operand does not count.
      saves_pruning: True if a kernel prunes the operand while it packs it. Otherwise XLA prunes it before a dense
        product.
    """
    tiling = chosen(shape, target)
    if tiling is None or (tiling.speed is None and target.family != "hopper"):
        return 0.0
    speed = _estimate(shape, tiling.config, target) if tiling.speed is None else tiling.speed
    dense, values = _dense_cycles(shape, target), shape.m * shape.k / (_memory(target) * target.cores)
    pruning = PRUNING * values if saves_pruning else 0
    packing = 0 if packed_before else PACKING * values
    return (dense + pruning) / (dense / speed + packing)


def memory(kind: str) -> float:
    """Return the bytes per second at which a kind of device is expected to prune and pack arrays."""
    return REACHED * next((rate for name, rate in BANDWIDTH.items() if name in kind), BANDWIDTH["H200"])


def _memory(target: Target) -> float:
    """Return the bytes of a multiprocessor in a cycle."""
    return memory(target.kind) / _CLOCK


def _estimate(shape: Shape, config: Config, target: Target) -> float:
    """Estimate a product's speed on Hopper as a multiple of a dense product's."""
    assert isinstance(config, HopperConfig), config
    return _dense_cycles(shape, target) / _cycles(shape, config, target)


def _dense_cycles(shape: Shape, target: Target) -> float:
    """Return the cycles of a dense product on Hopper, cut as well as a packed one may be."""
    tiles = ((128, 256), (256, 128), (128, 192), (128, 128), (64, 128), (64, 64))
    cuts = [(tile, split) for tile in tiles for split in _splits(shape, tile[0] * tile[1], target)]
    return min(_tiled(shape, shape.out, tile, split, False, target) for tile, split in cuts) / EFFICIENCY["dense"]


def _cycles(shape: Shape, config: HopperConfig, target: Target) -> float:
    """Return the cycles of a packed product on Hopper."""
    alone = 1 if config.warpgroups > 1 or config.tile_m > 64 else 1.4  # of a single chain of instructions: assumed
    tile = config.rows, config.tile_n
    tiled = _tiled(shape, stored(shape, config), tile, config.split, True, target)
    return alone * tiled / EFFICIENCY["sparse"]


def _tiled(shape: Shape, dtype: str, tile: tuple[int, int], split: int, packed: bool, target: Target) -> float:
    """Return the cycles of a product that one multiprocessor's tiles take, one after the other.

    In a tile, instructions of 64 rows follow each other along K, as fast as the tensor cores multiply or as shared
    memory is read and filled. Then the sums are stored, while no product runs. XLA then adds the sums of parts of K.

    Args:
      shape: The product.
      dtype: The dtype of what is stored.
      tile: The rows and columns of a tile.
      split: The parts of K.
      packed: True if A is packed.
      target: The device.
    """
    rows, columns = tile
    a, b = (36, 64) if packed else (32, 32)  # bytes along K of an instruction: those of A with its words, and of B
    instructions = rows // 64 * -(-shape.k * shape.itemsize // (b * split))
    read, filled = 64 * a + columns * b, (rows * a + columns * b) * 64 / rows
    storing = 2 * rows * columns * jnp.dtype(dtype).itemsize / _SHARED + _LATENCY  # written to shared memory, and read
    rounds = math.ceil(-(-shape.m // rows) * -(-shape.n // columns) * split / target.cores)
    added = shape.m * shape.n * (4 * split + 2) / (_memory(target) * target.cores) + _LAUNCH if split > 1 else 0
    one = max(columns / 2, (read + filled) / _SHARED)
    return rounds * (instructions * one + storing) + added
