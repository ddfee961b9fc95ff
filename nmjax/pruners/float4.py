"""FP4: numbers of four bits that share a scale with their neighbours, rounded to the nearest or at random.

NVIDIA, "Pretraining Large Language Models with NVFP4" (arXiv 2509.25149). A value is E2M1: 0, 0.5, 1, 1.5, 2, 3, 4 or
6, with a sign. A block of values along the contracted axis has a scale in E4M3, and the tensor has one more::

    x  is about  value * scale of the block * scale of the tensor

Here scales of blocks are rounded up, so that no value lies beyond 6: what is clipped would bias random rounding. The
scale of the tensor is a power of two, and scales of blocks are 2**-6 or more. So a result has six bits of mantissa at
most, which bfloat16 holds exactly. What was rounded to the nearest, and is rounded again, does not change. Where 6
times a scale is beyond the dtype, which only the last twelfth of its range can bring about, 4 times the scale stands
for it.
"""

import itertools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from nmjax.core import fusion, groups
from nmjax.core.context import Ctx
from nmjax.core.pruner import Facts, Pruner
from nmjax.pruners.estimators import straight_through
from nmjax.pruners.float8 import Storage, largest
from nmjax.pruners.unbiased import group_uniforms

VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The magnitudes of E2M1, in the order of their codes."""


def rounded(
    x: Float[Array, "..."], scale: Float[Array, "..."], u: Float[Array, "..."] | None = None
) -> Float[Array, "..."]:  # fmt: skip
    """Round numbers to E2M1 times a scale. Magnitudes above 6 times the scale become that.

    All that is compared is exact for a scale with four bits, or one product, so that every device rounds alike.

    Args:
      x: Finite numbers in float32 or float64.
      scale: Positive numbers that are broadcast with ``x``.
      u: If given, uniforms in [0, 1) that round up or down at random, such that the mean is exact. If None, numbers
        are rounded to the nearest, and those in the middle to the value with an even code.

    Returns:
      The values times the scale, in the dtype of ``x``.

    >>> rounded(jnp.float32([0.3, 1.25, 5.1]), 1), rounded(jnp.float32([5.1, 5.1]), 1, jnp.float32([0.5, 0.6]))
    (Array([0.5, 1. , 6. ], dtype=float32), Array([6., 4.], dtype=float32))
    """
    size, scale = jnp.abs(x), jnp.asarray(scale, x.dtype)
    found = jnp.zeros_like(x)
    for code, (below, above) in enumerate(itertools.pairwise(VALUES)):
        beyond, width = size - below * scale, (above - below) * scale
        if u is not None:
            up = beyond > u.astype(x.dtype) * width
        else:
            up = beyond >= 0.5 * width if code % 2 else beyond > 0.5 * width
        found = found + jnp.where(up, above - below, 0.0)
    return jnp.copysign(found * scale, x)


def scales(x: Float[Array, "..."], axis: int, block: int) -> Float[Array, "..."]:
    """Return the scales of blocks times that of the tensor.

    Args:
      x: Finite numbers in float32 or float64.
      axis: The axis of the blocks.
      block: The values of a block.

    Returns:
      Scales, with the length of ``axis`` divided by ``block``.

    >>> scales(jnp.float32([6.0] * 16 + [2.9] * 16), -1, 16)
    Array([1. , 0.5], dtype=float32)
    """
    axis = groups.position(x.ndim, axis)
    info = jnp.finfo(x.dtype)
    kind = np.dtype(f"uint{info.bits}").type
    bits = lambda v: lax.bitcast_convert_type(v, kind)
    number = lambda v: lax.bitcast_convert_type(v, x.dtype)
    mantissa, dropped = kind((1 << info.nmant) - 1), kind((1 << info.nmant - 3) - 1)
    size = jnp.max(jnp.abs(groups.split(x, axis, block)), axis + 1)
    scale = number((bits(size / VALUES[-1]) + dropped) & ~dropped)  # with three bits of mantissa, rounded up
    tensor = number(bits(jnp.maximum(largest(scale), 2.0**-90)) & ~mantissa) * 2.0**-7  # the largest has 2**7 to 240
    return jnp.maximum(scale, tensor * 2.0**-6)


@dataclass(frozen=True, repr=False)
class fp4(Storage):
    """Round values to FP4 (E2M1), with a scale for each block of values along the axis.

    Paper: NVIDIA, "Pretraining Large Language Models with NVFP4", arXiv:2509.25149.

    Scales are those of NVFP4: E4M3, times a power of two for the tensor. They are computed again at every call, and
    rounded up, so that nothing is clipped. The rounding is simulated: the result keeps its dtype, and bfloat16 holds it
    exactly. The gradient is straight-through.

    Args:
      rounding: "nearest", or "random": up or down at random such that the mean is exact, so an unbiased gradient
        stays unbiased. Each value draws its own random number.
      block: The values that share a scale: 16, or 32 as in sparse products of Blackwell.

    Raises:
      ValueError: The rounding or the block is none of the two.

    >>> fp4()(jnp.array([1.0, 2.3, -6.0] + [0.0] * 13))[:3]
    Array([ 1.,  2., -6.], dtype=float32)
    """

    rounding: str = "nearest"
    block: int = 16
    reads_step = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rounding not in ("nearest", "random"):
            raise ValueError(f"{self}: rounding must be 'nearest' or 'random'.")
        if self.block not in (16, 32):
            raise ValueError(f"{self}: block must be 16 or 32.")

    @property
    def final(self) -> Pruner:
        return fp4(block=self.block)

    def describe(self) -> Facts:
        return super().describe()._replace(keeps_zeros=True, block=self.block, stochastic=self.rounding == "random")

    def __call__(self, x: jax.Array, axis: int = -1, ctx: Ctx = Ctx()) -> jax.Array:
        return straight_through(_Cast(self.rounding, self.block), axis, x, ctx.traceable())


@dataclass(frozen=True, repr=False)
class _Cast(Pruner):
    """The rounding of `fp4`, without its gradient rule."""

    rounding: str
    block: int
    reads_step = False

    def __call__(self, x: jax.Array, axis: int = -1, ctx: Ctx = Ctx()) -> jax.Array:
        axis, wide = groups.position(x.ndim, axis), groups.wide(x)
        finite = jnp.isfinite(wide)
        numbers = jnp.where(finite, wide, 0.0)
        scale = jnp.expand_dims(scales(numbers, axis, self.block), axis + 1)
        u = None if self.rounding == "nearest" else groups.split(group_uniforms(x, axis, 1, ctx), axis, self.block)
        split = groups.split(numbers, axis, self.block)
        made = rounded(split, scale, u)
        beyond = jnp.abs(made) > float(jnp.finfo(x.dtype).max)
        stored = groups.unsplit(jnp.where(beyond, jnp.copysign(VALUES[-2] * scale, split), made), axis)
        return fusion.rounded(jnp.where(finite, stored, wide), x.dtype)
