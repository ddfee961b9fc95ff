"""FP8: the two formats, the scale of a tensor, rounding, and the pruner that simulates all of it.

Micikevicius et al., "FP8 Formats for Deep Learning" (arXiv 2209.05433). E4M3 has one more bit of mantissa and is used
forward. E5M2 has more range and is used for gradients. A tensor is multiplied by a scale that takes its largest
magnitude to the largest value of the format.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, UInt

from nmjax.core import fusion, groups
from nmjax.core.context import Ctx
from nmjax.core.pruner import Facts, NormalForm, Pruner
from nmjax.pruners.estimators import straight_through
from nmjax.pruners.nothing import identity
from nmjax.pruners.unbiased import group_uniforms

FORMATS = {"e4m3": jnp.float8_e4m3fn, "e5m2": jnp.float8_e5m2}


def scale(largest: Float[Array, "..."], format: str) -> Float[Array, "..."]:
    """Return the scale of tensors: the largest value of the format over the largest magnitude of a tensor.

    Args:
      largest: The largest magnitude of each tensor, as `largest` returns it.
      format: "e4m3" or "e5m2".

    Returns:
      The scales, 1 for a tensor of zeros.

    >>> scale(jnp.float32(7.0), "e4m3")
    Array(64., dtype=float32)
    """
    most = float(jnp.finfo(FORMATS[format]).max)
    ratio = jnp.where(largest > 0, most / jnp.where(largest > 0, largest, 1.0), 1.0)
    return jnp.minimum(ratio, jnp.finfo(ratio.dtype).max)  # the ratio of a tiny tensor is inf


def largest(x: Float[Array, "..."]) -> Float[Array, ""]:
    """Return the largest finite magnitude of an array, in float32 or a wider dtype.

    >>> largest(jnp.array([1.0, -7.0, jnp.inf]))
    Array(7., dtype=float32)
    """
    size = jnp.where(jnp.isfinite(x), jnp.abs(x), 0)  # not in float32: XLA may write it to memory
    return groups.wide(jnp.max(size, initial=0))


def cast(x: Float[Array, "..."], format: str, u: Float[Array, "..."] | None = None) -> Float[Array, "..."]:
    """Round numbers to an 8-bit format. Values beyond its range become its largest value, with their sign.

    Infinities and NaN become NaN.

    Args:
      x: An array of float32 or float64.
      format: "e4m3" or "e5m2".
      u: If given, uniforms in [0, 1) that round up or down at random, such that the mean is exact. If None, values
        are rounded to the nearest.

    Returns:
      An array of the 8-bit dtype.

    >>> cast(jnp.float32(1.1), "e5m2"), cast(jnp.float32([1.1, 1.1]), "e5m2", jnp.float32([0.5, 0.7]))
    (Array(1, dtype=float8_e5m2), Array([1, 1.25], dtype=float8_e5m2))
    """
    if u is not None:
        return lax.bitcast_convert_type(_drawn(x, format, u).astype(jnp.uint8), FORMATS[format])
    most = float(jnp.finfo(FORMATS[format]).max)
    return jnp.where(jnp.abs(x) < jnp.inf, jnp.clip(x, -most, most), jnp.nan).astype(FORMATS[format])


def _drawn(x: Float[Array, "..."], format: str, u: Float[Array, "..."]) -> UInt[Array, "..."]:
    """Return the bits of numbers that are rounded up or down at random, in integers of the width of x.

    Let s be the distance of neighbours of x in the format. The integer part of |x| / s + u counts such steps from 0, if
    x is subnormal in the format, or else from 2**e: the power of two below x, less the first bit of its mantissa. Codes
    of neighbours differ by one, so this integer is added to the code of that number.
    """
    wide, info = jnp.finfo(x.dtype), jnp.finfo(FORMATS[format])
    kind = np.dtype(f"uint{wide.bits}").type
    digits, most = wide.nmant, (1 << wide.nexp) - 1  # of the mantissa, and the largest biased exponent
    one = most >> 1  # the biased exponent of 1.0
    least = one + int(info.minexp)
    drop = digits - info.nmant
    size = lax.bitcast_convert_type(x, kind) & kind(most << digits | (1 << digits) - 1)
    power = jnp.maximum(size, kind(least << digits)) & kind(most << digits)
    per_step = lax.bitcast_convert_type(kind(2 * one + info.nmant << digits) - power, x.dtype)
    steps = (jnp.abs(x) * per_step + u.astype(x.dtype)).astype(jnp.int32).astype(kind)  # Mosaic has no floor
    code = (power >> kind(drop)) + steps - kind(least << info.nmant)
    last = int(np.asarray(info.max).view(np.uint8))
    code = jnp.where(size < kind(most << digits), jnp.minimum(code, kind(last)), kind(0x7F))
    return code | jnp.where(x < 0, kind(0x80), kind(0))


class Storage(Pruner):
    """A pruner that rounds values to those of a format, and drops none."""

    def mask(self, x: jax.Array, axis: int = -1, ctx: Ctx = Ctx()) -> jax.Array:
        return jnp.ones_like(x, bool)

    def normal_form(self) -> NormalForm:
        """Return the normal form of a slot that prunes nothing and stores its operand in the format."""
        return NormalForm(core=identity, applied=identity, storage=self)


@dataclass(frozen=True, repr=False)
class fp8(Storage):
    """Round values to FP8, scaled so that the largest magnitude of the tensor just fits.

    Paper: Micikevicius et al., "FP8 Formats for Deep Learning", arXiv:2209.05433.

    The scale is computed again at every call. The rounding is simulated: the result keeps its dtype. The gradient is
    straight-through. In bf16 arrays dividing by the scale costs another 0.2 % of precision.

    Args:
      format: "e4m3" or "e5m2".
      rounding: "nearest", or "random": up or down at random such that the mean is exact, so an unbiased gradient
        stays unbiased. Groups of four values along the axis share a random number.

    Raises:
      ValueError: The format or the rounding is none of the two.

    >>> fp8("e5m2")(jnp.array([1., 2.3, -7.]))
    Array([ 1. ,  2.5, -7. ], dtype=float32)
    """

    format: str
    rounding: str = "nearest"
    reads_step = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.format not in FORMATS:
            raise ValueError(f"{self}: format must be {' or '.join(map(repr, FORMATS))}.")
        if self.rounding not in ("nearest", "random"):
            raise ValueError(f"{self}: rounding must be 'nearest' or 'random'.")

    @property
    def final(self) -> Pruner:
        return fp8(self.format)

    def describe(self) -> Facts:
        facts = super().describe()._replace(keeps_zeros=True)
        return facts._replace(stochastic=True, block=4) if self.rounding == "random" else facts

    def __call__(self, x: jax.Array, axis: int = -1, ctx: Ctx = Ctx()) -> jax.Array:
        return straight_through(_Cast(self.format, self.rounding), axis, x, ctx.traceable())


@dataclass(frozen=True, repr=False)
class _Cast(Pruner):
    """The rounding of `fp8`, without its gradient rule."""

    format: str
    rounding: str
    reads_step = False

    def __call__(self, x: jax.Array, axis: int = -1, ctx: Ctx = Ctx()) -> jax.Array:
        wide = groups.wide(x)
        finite = jnp.isfinite(wide)
        factor = scale(largest(wide), self.format).astype(wide.dtype)
        u = None if self.rounding == "nearest" else group_uniforms(x, axis, 4, ctx)
        if u is not None:
            u = jnp.repeat(u, 4, groups.position(x.ndim, axis))
        stored = cast(jnp.where(finite, wide, 0.0) * factor, self.format, u).astype(wide.dtype) / factor
        return fusion.rounded(jnp.where(finite, stored, wide), x.dtype)
