"""The shapes, tiles and forms that kernels take, and the reasons why something does not fit.

This file imports no Pallas, so that a plan can be made where no kernel can run.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from nmjax.core.pruner import Pruner
from nmjax.core.refusal import Refusal
from nmjax.kernels.ampere import AMPERE
from nmjax.kernels.blackwell import BLACKWELL
from nmjax.kernels.family import Config, Family, Shape, Target
from nmjax.kernels.format import Packed
from nmjax.kernels.hopper import HOPPER
from nmjax.pruners import identity

COPY_ROWS, COPY_COLUMNS = 128, 64  # what the sides of an array with FP8 forms divide by

# ---- products ----


FAMILIES: dict[str, Family] = {family.name: family for family in (HOPPER, BLACKWELL, AMPERE)}
"""The families of devices that have kernels. A new one is a file, and a place in this table."""


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
    family = FAMILIES[target.family]
    fp4 = ("float4_e2m1fn",) * family.blocks
    if shape.dtype not in ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", *fp4):
        return Refusal(f"{shape.dtype}: kernels take bfloat16, float16 and 8-bit floats{', and FP4' * len(fp4)}")
    if shape.itemsize == 1 and not family.fp8:
        return Refusal(f"there is no kernel for FP8 sparse products on {target.kind}")
    if shape.itemsize == 1 and (shape.m_major or shape.n_major):
        return Refusal("8-bit operands must be contiguous along k")
    if (lacks := family.lacks()) is not None:
        return lacks
    if config is None:
        return family.refusal(shape)
    if not isinstance(config, family.config):
        return Refusal(f"{config} is not a config of {target.kind}: write {family.config.__name__}(...)")
    return family.config_refusal(shape, config)


def operands_refusal(packed: Packed, b: jax.Array) -> Refusal | None:
    """Return the reason why no kernel reads two operands of a product, whatever their shapes, or None."""
    if packed.order == "plain":
        return Refusal(f"{packed.dtype.name} {packed.shape} is packed in plain order, which tensor cores do not read")
    bits = [jnp.finfo(v.dtype).bits for v in (packed, b)]
    if bits[0] != bits[1] or (bits[0] == 16 and b.dtype != packed.dtype):
        return Refusal(
            f"the operands are {packed.dtype.name} and {b.dtype.name}: "
            "both must have the same 16-bit dtype, or both an 8-bit dtype"
        )
    return None


def config_refusal(shape: Shape, config: Config) -> Refusal | None:
    """Return the reason why a product cannot be cut into these tiles, or None if it can."""
    return family_of(config).config_refusal(shape, config)


def family_of(config: Config) -> Family:
    """Return the family of devices whose products are cut by these tiles."""
    return next(family for family in FAMILIES.values() if isinstance(config, family.config))


# ---- packed and FP8 forms ----


class Copy(NamedTuple):
    """One form of a tensor ``[R, C]``: packed in 16 bits, or in FP8, packed or not."""

    format: str | None  # of FP8; None for 16 bits
    turned: bool = False  # as [C, R]; has no effect on packed forms
    packed: bool = False
    pruner: Pruner = identity
    axis: int = -1  # of its groups
    rounding: str = "nearest"

    @property
    def turns(self) -> bool:
        """True if the form is ``[C, R]``; in 16 bits its words. If it is packed, the axis of its groups decides."""
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
    form = pruner.kernel_form
    by_members = form.members is not None and not form.each and form.scalar is None
    return by_members and pattern is not None and pattern[0] <= 2 and pattern[1] == 4
