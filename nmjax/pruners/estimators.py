"""Gradient rules of forward slots. A bare pruner there has the gradient that autodiff gives it: dropped entries get none."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from nmjax.core.context import Ctx
from nmjax.core.pruner import Normal, Pattern, Pruner, check_inner
from nmjax.pruners.nothing import identity
from nmjax.pruners.schedules import Schedule


@dataclass(frozen=True, repr=False)
class Estimator(Pruner):
    """A pruner with a gradient rule of its own: outermost, in a forward slot."""

    p: Pruner

    def __post_init__(self):
        super().__post_init__()
        check_inner(self, self.p)

    @property
    def ruled(self) -> bool:
        return True

    @property
    def bare_noise(self) -> bool:
        return False

    @property
    def selects(self) -> bool:
        return self.p.selects

    @property
    def pattern(self) -> Pattern | None:
        return self.p.pattern

    @property
    def pattern_across(self) -> Pattern | None:
        return self.p.pattern_across

    def normal(self) -> Normal:
        """A gradient rule leaves the values of its part as they are."""
        inner = self.p.normal()
        applied = self if inner.storage is None else replace(self, p=inner.applied)
        return inner._replace(applied=applied, rule=self)

    @property
    def final(self) -> Pruner:
        return self.p.final


@dataclass(frozen=True, repr=False)
class ste(Estimator):
    """Straight-through: the gradient of the pruned values goes unchanged to all values (Bengio et al., arXiv 1308.3432).

    >>> from nmjax.pruners import mse
    >>> jax.grad(lambda w: (ste(mse(2, 4))(w) * jnp.arange(4.)).sum())(jnp.ones(4))
    Array([0., 1., 2., 3.], dtype=float32)
    """

    reads_step = False

    def __call__(self, x: jax.Array, axis: int = -1, ctx: Ctx = Ctx()) -> jax.Array:
        return straight_through(self.p, axis, x, ctx)

    def normal(self) -> Normal:
        """Straight through what does nothing is nothing."""
        form = super().normal()
        inner = self.p.normal().applied
        return form._replace(applied=inner) if inner == identity else form


@dataclass(frozen=True, repr=False)
class sr_ste(Estimator):
    """Straight-through, plus ``lam`` times the dropped weights: they shrink, and masks settle.

    Zhou et al., "Learning N:M Fine-grained Structured Sparse Neural Networks From Scratch" (arXiv 2102.04010)::

        dw = g + lam * (1 - mask) * w

    The term is added to the gradient as it comes, once for every use of the weight: before clipping, and multiplied with
    whatever multiplies the loss. In bf16 part of it is lost to rounding.
    """

    lam: float = 2e-4
    reads_step = False

    def __post_init__(self):
        super().__post_init__()
        if not self.p.selects:
            raise ValueError(
                f"{self} decays what its pruner drops, but {self.p} does not only keep or drop. Use ste({self.p}), or sr_ste(mse(2,4))."
            )

    def __call__(self, x: jax.Array, axis: int = -1, ctx: Ctx = Ctx()) -> jax.Array:
        return _decayed_through(self.p, self.lam, axis, x, ctx)


@dataclass(frozen=True, repr=False)
class decay(Pruner):
    """Dropped entries times D(step), which falls from 1 to 0: mask decay gradient flow (MdGf).

    Bambhaniya et al., "Progressive Gradient Flow for Robust N:M Sparsity Training in Transformers" (arXiv 2402.04744)::

        w~ = w * (mask + D(step) * (1 - mask))

    Two gradients are published. ``"ste"``, of the released PyTorch code: dw = g, never restricted. ``"autodiff"``, of the
    authors' JAX code and the paper's abstract: dw = g * (mask + D(step) * (1 - mask)), which dies with D.
    """

    p: Pruner
    schedule: Schedule
    gradient: str = "ste"

    def __post_init__(self):
        super().__post_init__()
        check_inner(self, self.p)
        if self.gradient not in ("ste", "autodiff"):
            raise ValueError(f"{self}: gradient is 'ste' or 'autodiff'.")
        if not callable(self.schedule):
            raise TypeError(
                f"{self}: schedule is a function of the step, as linear(1,0,1000) or constant({self.schedule!r})."
            )
        if isinstance(self.schedule, Pruner) or not self.p.selects:
            raise ValueError(
                f"{self}: decay takes a pruner that only keeps or drops, then a schedule: decay(mse(2,4),linear(1,0,1000))."
            )

    def __call__(self, x: jax.Array, axis: int = -1, ctx: Ctx = Ctx()) -> jax.Array:
        if self.gradient == "ste":
            return straight_through(replace(self, gradient="autodiff"), axis, x, ctx)
        factor = jnp.asarray(self.schedule(ctx.step)).astype(x.dtype)
        faded = jnp.where(factor == 0, jnp.zeros((), x.dtype), factor * x)
        return jnp.where(self.p.mask(x, axis, ctx), x, faded)

    def kept(self, step: int | None = None) -> float:
        return 1.0 if self._fades(step) else self.p.kept(step)

    def kept_across(self, step: int | None = None) -> float:
        return 1.0 if self._fades(step) else self.p.kept_across(step)

    def _fades(self, step: int | None) -> bool:
        return step is not None and float(self.schedule(step)) != 0

    @property
    def final(self) -> Pruner:
        return self.p.final


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def straight_through(p: Pruner, axis: int, x: jax.Array, ctx: Ctx) -> jax.Array:
    """Return ``p(x)`` with the derivative of x, in forward and reverse mode."""
    return p(x, axis, ctx)


@straight_through.defjvp
def _(p: Pruner, axis: int, primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[jax.Array, jax.Array]:
    return straight_through(p, axis, *primals), tangents[0]


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _decayed_through(p: Pruner, lam: float, axis: int, x: jax.Array, ctx: Ctx) -> jax.Array:
    return p(x, axis, ctx)


def _decayed_forward(
    p: Pruner, lam: float, axis: int, x: jax.Array, ctx: Ctx
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    y = p(x, axis, ctx)
    return y, (x, y)


def _decayed_backward(
    p: Pruner, lam: float, axis: int, residuals: tuple[jax.Array, jax.Array], g: jax.Array
) -> tuple[jax.Array, None]:
    x, y = residuals
    dropped = jnp.where(x == y, jnp.zeros((), x.dtype), x)  # (1 - mask) * x
    return g + jnp.asarray(lam, x.dtype) * dropped, None


_decayed_through.defvjp(_decayed_forward, _decayed_backward)
