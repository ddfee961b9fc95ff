"""The 8-bit floats of FP8 training: which there are, how a tensor is scaled to fit, rounding, and the pruner that simulates
them.

E4M3 has a mantissa bit more and serves forward, E5M2 more range and serves gradients (Micikevicius et al., arXiv
2209.05433). A tensor is multiplied so that its largest magnitude is the format's.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from nmjax.core import fusion, groups
from nmjax.core.context import Ctx
from nmjax.core.pruner import Normal, Pruner
from nmjax.pruners.estimators import straight_through
from nmjax.pruners.nothing import identity
from nmjax.pruners.unbiased import group_uniforms

FORMATS = {"e4m3": jnp.float8_e4m3fn, "e5m2": jnp.float8_e5m2}


def scale(largest: jax.Array, format: str) -> jax.Array:
    """What a tensor of this largest magnitude is multiplied by; 1 for one of zeros."""
    most = float(jnp.finfo(FORMATS[format]).max)
    ratio = jnp.where(largest > 0, most / jnp.where(largest > 0, largest, 1.0), 1.0)
    return jnp.minimum(ratio, jnp.finfo(ratio.dtype).max)  # of the tiniest tensors


def largest(x: jax.Array) -> jax.Array:
    """The largest finite magnitude."""
    wide = groups.wide(x)
    return jnp.max(jnp.where(jnp.isfinite(wide), jnp.abs(wide), 0.0))


def cast(x: jax.Array, format: str, u: jax.Array | None = None) -> jax.Array:
    """Float32 in the format, what is too large as its largest, inf and NaN as NaN; to the nearest, or with uniforms ``u`` in [0, 1) up or down
    at random, by how near each is: right on average.

    >>> cast(jnp.float32(1.1), "e5m2"), cast(jnp.float32([1.1, 1.1]), "e5m2", jnp.float32([0.5, 0.7]))
    (Array(1, dtype=float8_e5m2), Array([1, 1.25], dtype=float8_e5m2))
    """
    dtype = FORMATS[format]
    info = jnp.finfo(dtype)
    if u is not None:
        step, per_step = _step(x, info)
        x = jnp.where(x < 0, -1.0, 1.0) * (jnp.floor(jnp.abs(x) * per_step + u) * step)
    x = jnp.where(jnp.abs(x) < jnp.inf, jnp.clip(x, -float(info.max), float(info.max)), jnp.nan)
    return x.astype(dtype)


def _step(x, info):
    """The distance of neighbours in the format, where x lies, and its reciprocal: powers of two, by their bits, so that
    every device multiplies exactly."""
    exponent = lax.bitcast_convert_type(x, jnp.int32) >> np.int32(23) & np.int32(0xFF)
    exponent = jnp.maximum(exponent, np.int32(127 + info.minexp)) - np.int32(info.nmant)
    power = lambda e: lax.bitcast_convert_type(e << np.int32(23), jnp.float32)
    return power(exponent), power(np.int32(254) - exponent)


@dataclass(frozen=True, repr=False)
class fp8(Pruner):
    """Values as FP8 holds them, scaled so that the largest just fits (per tensor, anew at every call). Simulated: the
    result keeps its dtype. Its gradient is straight-through. In bf16 arrays the scale itself costs another 0.2 %.

    With ``rounding="random"`` a value goes up or down by how near each is, so that an unbiased gradient stays so; four
    neighbours along the axis share a draw.

    >>> fp8("e5m2")(jnp.array([1., 2.3, -7.]))
    Array([ 1. ,  2.5, -7. ], dtype=float32)
    """

    format: str
    rounding: str = "nearest"
    reads_step = False

    def __post_init__(self):
        super().__post_init__()
        if self.format not in FORMATS:
            raise ValueError(f"{self}: the formats are {' and '.join(map(repr, FORMATS))}.")
        if self.rounding not in ("nearest", "random"):
            raise ValueError(f"{self}: rounding is 'nearest' or 'random'.")

    @property
    def stochastic(self) -> bool:
        return self.rounding == "random"

    @property
    def block(self) -> int:
        return 4 if self.stochastic else 1

    @property
    def final(self) -> Pruner:
        return fp8(self.format)

    def __call__(self, x: jax.Array, axis: int = -1, ctx: Ctx = Ctx()) -> jax.Array:
        return straight_through(_Cast(self.format, self.rounding), axis, x, ctx)

    def mask(self, x: jax.Array, axis: int = -1, ctx: Ctx = Ctx()) -> jax.Array:
        return jnp.ones_like(x, bool)

    def normal(self) -> Normal:
        """A slot that is only rounded prunes nothing, and its product holds the operand in FP8."""
        return Normal(core=identity, applied=identity, storage=self)


@dataclass(frozen=True, repr=False)
class _Cast(Pruner):
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
        held = cast(jnp.where(finite, wide, 0.0) * factor, self.format, u).astype(wide.dtype) / factor
        return fusion.rounded(jnp.where(finite, held, wide), x.dtype)
