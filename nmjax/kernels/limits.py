"""The shapes, tiles and forms that kernels take, and the reasons why something does not fit.

This file imports no Pallas, so that a plan can be made where no kernel can run.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from nmjax.core import versions
from nmjax.core.pruner import Pruner
from nmjax.core.refusal import Refusal
from nmjax.core.value import Value
from nmjax.kernels.format import Packed
from nmjax.kernels.targets import Target
from nmjax.pruners import identity

HOPPER_SHARED = 227 * 1024  # bytes of shared memory that a thread block of Hopper or Blackwell may have
AMPERE_SHARED = 99 * 1024  # of sm_86 and sm_89, which have the least
BARRIERS = 1024  # bytes that the barriers of a Hopper or Blackwell kernel take at most
COPY_ROWS, COPY_COLUMNS = 128, 64  # the block that a program of `nmjax.kernels.copies` takes

# ---- products ----


@dataclass(frozen=True, repr=False)
class Shape(Value):
    """A product ``D[M, N] = A[M, K] @ B[K, N]`` with A packed: its sizes, and the orders of its operands and result."""

    m: int
    n: int
    k: int
    dtype: str = "bfloat16"
    m_major: bool = False  # A is contiguous along M
    n_major: bool = False  # B is contiguous along N
    transpose: bool = False  # the result is [N, M]
    out: str = "bfloat16"

    @property
    def sides(self) -> tuple[int, int, int]:
        """M, N and K."""
        return self.m, self.n, self.k

    @property
    def flops(self) -> int:
        """The floating-point operations of the dense product."""
        return 2 * self.m * self.n * self.k

    @property
    def itemsize(self) -> int:
        """The bytes of a value of A."""
        return jnp.dtype(self.dtype).itemsize


def shape_of(packed: Packed, b: jax.Array, axis: int, transpose: bool, dtype: DTypeLike) -> Shape:
    """Return the shape of the product of two operands, ignoring their batches.

    Args:
      packed: ``[..., M, K]``, or ``[..., K, M]`` if it is packed along axis -2.
      b: ``[..., K, N]``, or ``[..., N, K]`` with ``axis=-1``.
      axis: The axis of ``b`` that is contracted, -1 or -2.
      transpose: True for a result ``[..., N, M]``.
      dtype: The dtype of the result.
    """
    *_, rows, columns = packed.shape
    m, k = (columns, rows) if packed.axis == -2 else (rows, columns)
    n = b.shape[-1 if axis == -2 else -2]
    return Shape(m, n, k, packed.dtype.name, packed.axis == -2, axis == -2, transpose, jnp.dtype(dtype).name)


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


@dataclass(frozen=True, repr=False)
class BlackwellConfig(Value):
    """The tiles of a product on Blackwell, which have 128 rows.

    >>> BlackwellConfig(tile_n=128)
    BlackwellConfig(tile_n=128)
    """

    tile_n: int = 256
    stages: int = 2

    def step(self, itemsize: int) -> int:
        """Return the number of values along K that a step takes: 128 of 16 bits, or 256 of 8 bits."""
        return 256 // itemsize


Config = HopperConfig | AmpereConfig | BlackwellConfig
FAMILIES: dict[str, type[Config]] = {"hopper": HopperConfig, "ampere": AmpereConfig, "blackwell": BlackwellConfig}
"""The configs of each family of devices."""


def product_refusal(shape: Shape, target: Target, config: Config | None = None) -> Refusal | None:
    """Return the reason why no kernel computes a product, or None if a kernel does.

    Args:
      shape: The product.
      target: The device.
      config: The tiles. Without it, any tiles that fit will do.
    """
    sizes = f"M, N, K = {shape.m}, {shape.n}, {shape.k}"
    if min(shape.m, shape.n, shape.k) < 1:
        return Refusal(f"{sizes}: it is empty")
    if shape.out not in ("bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2"):
        return Refusal(f"the result is {shape.out}, which no kernel writes")
    if shape.dtype not in ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"):
        return Refusal(f"{shape.dtype}: kernels take bfloat16, float16 and 8-bit floats")
    if shape.itemsize == 1 and target.family == "ampere":
        return Refusal(f"there is no kernel for FP8 sparse products on {target.kind}")
    if shape.itemsize == 1 and (shape.m_major or shape.n_major):
        return Refusal("8-bit operands must be contiguous along k")
    if target.family == "ampere" and not versions.has_warp_products():
        return Refusal(f"jax {jax.__version__} has no layouts for Ampere's instructions: they come with 0.11")
    if target.family == "blackwell" and not versions.stores_transposed():
        return Refusal(f"jax {jax.__version__} cannot store the results of Blackwell's kernels: from 0.11 on it can")
    if config is not None and not isinstance(config, FAMILIES[target.family]):
        return Refusal(f"{config} is not a config of {target.kind}: write {FAMILIES[target.family].__name__}(...)")
    if config is not None:
        return config_refusal(shape, config)
    m, n, step, why = 64, 64, 128 // shape.itemsize, ""  # the smallest tiles
    if target.family == "blackwell":
        m, step = 128, 2 * step
    if target.family == "hopper":
        n = _granularity(shape) or 64
        why = f", and {_why_whole(shape)}" if shape.n % n and n == 64 else ""
    if shape.m % m or shape.n % n or shape.k % step:
        return Refusal(f"{sizes} do not divide into tiles of {m} x {n} x {step}{why}")
    return None


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


def operands_refusal(packed: Packed, b: jax.Array) -> Refusal | None:
    """Return the reason why no kernel reads two operands of a product, whatever their shapes, or None."""
    if packed.order == "plain":
        return Refusal(f"{packed.dtype.name} {packed.shape} is packed in plain order, which tensor cores do not read")
    wide = packed.dtype.itemsize == 2
    if (wide and b.dtype != packed.dtype) or (not wide and b.dtype.itemsize != 1):
        return Refusal(
            f"the operands are {packed.dtype.name} and {b.dtype.name}: "
            "both must have the same 16-bit dtype, or both an 8-bit dtype"
        )
    return None


def config_refusal(shape: Shape, config: Config) -> Refusal | None:
    """Return the reason why a product cannot be cut into these tiles, or None if it can."""
    if isinstance(config, HopperConfig):
        return _hopper_refusal(shape, config)
    return _ampere_refusal(shape, config) if isinstance(config, AmpereConfig) else _blackwell_refusal(shape, config)


def _hopper_refusal(shape: Shape, config: HopperConfig) -> Refusal | None:
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
    refusal = _division_refusal(shape, m, n, k=step)
    if refusal is not None:
        return refusal
    if not 1 <= config.split <= shape.k // step:
        return Refusal(f"{config}: split lies between 1 and the {shape.k // step} steps along K")
    a_step, words_step = config.rows * step * shape.itemsize // 2, config.rows * step // 8
    ring = config.stages * (a_step + words_step + config.tile_n * step * shape.itemsize)
    slots = min(2, config.tile_n // config.store_n)
    store = slots * config.rows * config.store_n * jnp.dtype(stored(shape, config)).itemsize
    return _memory_refusal(config, ring + store, HOPPER_SHARED - BARRIERS)


def stored(shape: Shape, config: Config) -> str:
    """Return the dtype of what a kernel stores: that of the result, or float32 if parts of K are added up later."""
    return "float32" if isinstance(config, HopperConfig) and config.split > 1 else shape.out


def _ampere_refusal(shape: Shape, config: AmpereConfig) -> Refusal | None:
    if shape.itemsize != 2:
        return Refusal(f"{shape.dtype}: Ampere's sparse products take 16-bit values")
    if any(side < 64 or side % 64 for side in (config.tile_m, config.tile_n, config.tile_k)) or config.stages < 2:
        return Refusal(f"{config}: the tile's sides are multiples of 64, and stages must be at least 2")
    refusal = _division_refusal(shape, config.tile_m, config.tile_n, config.tile_k)
    if refusal is not None:
        return refusal
    ring = config.stages * (config.tile_m * config.tile_k * 9 // 8 + config.tile_n * config.tile_k * 2)
    store = config.tile_m * config.tile_n * jnp.dtype(shape.out).itemsize  # in the ring's memory, after the product
    return _memory_refusal(config, max(ring, store), AMPERE_SHARED)


def _blackwell_refusal(shape: Shape, config: BlackwellConfig) -> Refusal | None:
    if config.tile_n not in (64, 128, 192, 256) or config.stages < 2:
        return Refusal(f"{config}: tile_n must be 64, 128, 192 or 256, and stages at least 2")
    step = config.step(shape.itemsize)
    refusal = _division_refusal(shape, 128, config.tile_n, step)
    if refusal is not None:
        return refusal
    ring = config.stages * (128 * step * shape.itemsize // 2 + 128 * step // 8 + config.tile_n * step * shape.itemsize)
    return _memory_refusal(config, ring + 2 * 128 * 64 * jnp.dtype(shape.out).itemsize, HOPPER_SHARED - BARRIERS)


def _division_refusal(shape: Shape, m: int, n: int, k: int) -> Refusal | None:
    for name, size, by in (("M", shape.m, m), ("N", shape.n, n), ("K", shape.k, k)):
        if size % by:
            return Refusal(f"{name} = {size} does not divide by {by}")
    return None


def _memory_refusal(config: Config, size: int, limit: int) -> Refusal | None:
    if size > limit:
        return Refusal(f"{config} takes {size:,} bytes of shared memory, and there are {limit:,}")
    return None


# ---- packed and FP8 forms ----


class Copy(NamedTuple):
    """One FP8 form of a tensor ``[R, C]``."""

    format: str
    turned: bool = False  # as [C, R]; has no effect on packed forms
    packed: bool = False
    pruner: Pruner = identity
    axis: int = -1  # of its groups
    rounding: str = "nearest"

    @property
    def turns(self) -> bool:
        """True if the form is ``[C, R]``. The last axis of a packed form is that of its groups, so ``axis`` decides."""
        return self.axis == -2 if self.packed else self.turned


def copies_refusal(sides: Sequence[int]) -> Refusal | None:
    """Return the reason why a matrix with these sides has no FP8 forms, or None if it has."""
    rows, columns = sides
    if rows % COPY_ROWS or columns % COPY_COLUMNS:
        return Refusal(
            f"FP8 forms of {rows} x {columns}: "
            f"the first side must divide by {COPY_ROWS} and the second by {COPY_COLUMNS}"
        )
    return None


def fuses(pruner: Pruner) -> bool:
    """Return True if a kernel prunes and packs by this pruner in one pass. Other arrays are packed after pruning."""
    if pruner == identity:
        return True
    pattern = pruner.facts.pattern
    by_members = pruner.kernel_form.members is not None
    return by_members and pattern is not None and pattern[0] <= 2 and pattern[1] == 4
