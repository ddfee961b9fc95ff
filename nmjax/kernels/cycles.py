"""A model of a multiprocessor, in cycles: how long dense and packed products take on Hopper.

An instruction of 64 rows takes half a cycle for each column, dense or sparse: sparse ones have twice the K. That
and the rate of shared memory are of the H100's white paper. The rest is assumed until a table says it.
"""

import math

import jax.numpy as jnp

from nmjax.kernels.family import Shape, Target

_SHARED = 128  # bytes that shared memory reads or writes in a cycle
EFFICIENCY = {"dense": 0.8, "sparse": 0.85}  # the share of these bounds that a kernel reaches: assumed
BANDWIDTH = {"H100": 3.0e12, "H200": 4.3e12}  # bytes per second of a large copy; for other devices that of the H200
REACHED = 0.6  # the share of it that pruning and packing reach: on an H100 0.44 for mvue, 0.63 to 0.69 for mse
PACKING, PRUNING = 3.125, 4.0  # bytes of a 16-bit value: read, and written packed; read, and written
TWICE = 4.25 / (2 * PACKING)  # of the bytes of two forms, those of both in one pass
_CLOCK, _CORES = 1.83e9, 132  # cycles per second of a multiprocessor, and the number of them, of an H100 or H200
_LAUNCH = 4000  # cycles of one kernel more: assumed
_LATENCY = 1000  # cycles from the last product of a tile to the first of the next, apart from storing it: assumed


def memory(kind: str) -> float:
    """Return the bytes per second at which a kind of device is expected to prune and pack arrays."""
    return REACHED * next((rate for name, rate in BANDWIDTH.items() if name in kind), BANDWIDTH["H200"])


def seconds(cycles: float) -> float:
    """Return the seconds that so many cycles take."""
    return cycles / _CLOCK


def _memory(target: Target) -> float:
    """Return the bytes of a multiprocessor in a cycle."""
    return memory(target.kind) / (_CLOCK * _CORES)


def splits(shape: Shape, tile: int, target: Target) -> tuple[int, ...]:
    """Return the parts that K may be cut into: several if the result has fewer tiles than the device has room for."""
    tiles = shape.m * shape.n / tile
    return (1,) if tiles > target.cores or target.interpret else (1, 2, 3, 4, 6, 8)


def dense(shape: Shape, target: Target) -> float:
    """Return the cycles of a dense product, cut as well as a packed one may be."""
    tiles = ((128, 256), (256, 128), (128, 192), (128, 128), (64, 128), (64, 64))
    cuts = [(tile, split) for tile in tiles for split in splits(shape, tile[0] * tile[1], target)]
    return min(tiled(shape, shape.out, tile, split, False, target) for tile, split in cuts) / EFFICIENCY["dense"]


def packing(shape: Shape, target: Target) -> float:
    """Return the cycles in which a byte of each value of A is read or written."""
    return shape.m * shape.k / (_memory(target) * target.cores)


def tiled(shape: Shape, dtype: str, tile: tuple[int, int], split: int, packed: bool, target: Target) -> float:
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
