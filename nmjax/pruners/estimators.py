"""Gradient rules of forward slots.

A pruner without a rule has the gradient of autodiff: dropped entries get none.
"""

import math
import numbers
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from nmjax.core.bases import ByParts, SamePattern, inner_at
from nmjax.core.context import Ctx
from nmjax.core.pruner import Facts, KernelForm, NormalForm, Pruner, check_inner
from nmjax.pruners.nothing import identity
from nmjax.pruners.schedules import LAST_STEP, Schedule, constant, cosine, exponential, linear, stairs, value_at

MOVING = (constant, linear, cosine, exponential, stairs)  # schedules with `moves`; a subclass may compute other values


@dataclass(frozen=True, repr=False)
class Estimator(Pruner):
    """The base of gradient rules, which wrap the pruner of a forward slot.

    Args:
      p: The pruner.
    """

    p: Pruner

    def __post_init__(self) -> None:
        super().__post_init__()
        check_inner(self, self.p)

    def describe(self) -> Facts:
        return super().describe()._replace(gradient_rule=True, noise_in_rule=True)

    @property
    def final(self) -> Pruner:
        return self.p.final


@dataclass(frozen=True, repr=False)
class SameValues(ByParts, SamePattern, Estimator):
    """The base of gradient rules whose call returns what their part returns."""

    def describe(self) -> Facts:
        return super().describe()._replace(selects=self.p.facts.selects)

    def normal_form(self) -> NormalForm:
        """Return the normal form of the part with this rule. A rule does not change values."""
        inner = self.p.normal_form()
        applied = self if inner.storage is None else replace(self, p=inner.applied)
        return inner._replace(applied=applied, rule=self)


@dataclass(frozen=True, repr=False)
class ste(SameValues):
    """Prune with the straight-through gradient: dx = dy, for kept and dropped values alike.

    Paper: Bengio et al., "Estimating or Propagating Gradients Through Stochastic Neurons for Conditional
    Computation", arXiv:1308.3432.

    Args:
      p: The pruner.

    Raises:
      TypeError: ``p`` is not a pruner.
      ValueError: ``p`` must be outermost, such as another gradient rule.

    >>> import nmjax as nm
    >>> jax.grad(lambda w: (nm.ste(nm.mse(2, 4))(w) * jnp.arange(4.)).sum())(jnp.ones(4))
    Array([0., 1., 2., 3.], dtype=float32)
    """

    reads_step = False

    def __call__(self, x: jax.Array, axis: int = -1, ctx: Ctx = Ctx()) -> jax.Array:
        return straight_through(self.p, axis, x, ctx.traceable())

    def normal_form(self) -> NormalForm:
        """Return the normal form. If the part prunes nothing, it is applied without the rule, which changes nothing."""
        form = super().normal_form()
        inner = self.p.normal_form().applied
        return form._replace(applied=inner) if inner == identity else form


@dataclass(frozen=True, repr=False)
class sr_ste(SameValues):
    """Prune with the straight-through gradient plus a decay of the dropped weights.

    Paper: Zhou et al., "Learning N:M Fine-grained Structured Sparse Neural Networks From Scratch", arXiv:2102.04010.

    Dropped weights shrink, and the mask settles::

        dw = g + lam * (1 - mask) * w

    The term is added in the backward pass, once for every use of the weight. It is therefore not multiplied by a scale
    of the loss, but clipping applies to it. In bf16 a part of it is lost to rounding.

    Args:
      p: A pruner that only keeps or drops, such as ``mse(2, 4)``.
      lam: The strength of the decay, or a schedule of the step. In AST (Huang et al., arXiv:2407.20584) it rises from
        0.

    Raises:
      TypeError: ``p`` is not a pruner, or ``lam`` is neither a number nor a schedule.
      ValueError: ``p`` also changes the values that it keeps.

    >>> import nmjax as nm
    >>> jax.grad(lambda w: nm.sr_ste(nm.mse(2, 4), lam=0.1)(w).sum())(jnp.array([1., -2., 3., -4.]))
    Array([1.1, 0.8, 1. , 1. ], dtype=float32)
    """

    lam: float | Schedule = 2e-4
    reads_step = False

    def __post_init__(self) -> None:
        super().__post_init__()
        lam: Any = self.lam
        number = isinstance(lam, numbers.Real) and not isinstance(lam, bool) and not math.isnan(lam)
        if isinstance(lam, (Pruner, type)) or not (number or callable(lam)):
            raise TypeError(f"sr_ste: lam must be a number, or a schedule such as linear(0,2e-4,1000), got {lam!r}.")
        if number:
            object.__setattr__(self, "lam", float(lam))
        if not self.p.facts.selects:
            raise ValueError(
                f"{self} decays the weights that its pruner drops, but {self.p} does not only keep or drop: it also "
                f"changes kept values. Write ste({self.p}) or sr_ste(mse(2,4))."
            )

    def __call__(self, x: jax.Array, axis: int = -1, ctx: Ctx = Ctx()) -> jax.Array:
        return _decayed_through(self.p, self.lam, axis, x, ctx.traceable())


@dataclass(frozen=True, repr=False)
class decay(Pruner):
    """Multiply dropped values by D(step), which falls from 1 to 0: mask decay gradient flow (MdGf).

    Paper: Bambhaniya et al., "Progressive Gradient Flow for Robust N:M Sparsity
    Training in Transformers", arXiv:2402.04744.

    The result is::

        w~ = w * (mask + D(step) * (1 - mask))

    Two gradients are published. ``"ste"`` is that of the released PyTorch code: dw = g at every step. ``"autodiff"`` is
    that of the authors' JAX code and of the paper's abstract: dw = g * (mask + D(step) * (1 - mask)), which vanishes
    with D on dropped weights.

    Args:
      p: A pruner that only keeps or drops, such as ``mse(2, 4)``.
      schedule: The factor D, a function of the step.
      gradient: "ste" or "autodiff".

    Raises:
      TypeError: ``p`` is not a pruner, or the schedule is not a function.
      ValueError: ``p`` also changes the values that it keeps, or the gradient is neither of the two.

    >>> import nmjax as nm
    >>> p = nm.decay(nm.mse(2, 4), nm.linear(1, 0, 1000))
    >>> p(jnp.array([1., -2., 3., -4.]), ctx=nm.Ctx(step=500))
    Array([ 0.5, -1. ,  3. , -4. ], dtype=float32)
    """

    p: Pruner
    schedule: Schedule
    gradient: str = "ste"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_inner(self, self.p)
        if self.gradient not in ("ste", "autodiff"):
            raise ValueError(f"{self}: gradient must be 'ste' or 'autodiff'.")
        if not callable(self.schedule):
            raise TypeError(
                f"{self}: schedule must be a function of the step, such as linear(1,0,1000) or "
                f"constant({self.schedule!r})."
            )
        if isinstance(self.schedule, Pruner) or not self.p.facts.selects:
            raise ValueError(
                f"{self}: decay takes a pruner that only keeps or drops and then a schedule, as in "
                "decay(mse(2,4),linear(1,0,1000))."
            )

    def describe(self) -> Facts:
        return super().describe()._replace(keeps_zeros=self.p.facts.keeps_zeros)

    @property
    def phases(self) -> tuple[int, ...]:
        return tuple(sorted({step for step in (*self.p.phases, *self._ends) if step is not None and step > 0}))

    def __call__(self, x: jax.Array, axis: int = -1, ctx: Ctx = Ctx()) -> jax.Array:
        if self.gradient == "ste":
            return straight_through(replace(self, gradient="autodiff"), axis, x, ctx.traceable())
        pruned = self.in_one_pass(x, axis, ctx)
        if pruned is not None:
            return pruned
        factor = self._factor(ctx, x.dtype)
        faded = jnp.where(factor == 0, jnp.zeros((), x.dtype), factor * x)
        return jnp.where(self.p.mask(x, axis, ctx), x, faded)

    @property
    def kernel_form(self) -> KernelForm:
        form = self.p.kernel_form
        if form.members is None or form.scalar is not None or self.p.facts.has_state:
            return KernelForm()
        members = partial(self._members, form.members)
        return KernelForm(members, keys=form.keys, each=form.each, scalar=self._factor)

    def _members(self, prune: Any, x: list[jax.Array], u: Any, factor: Any) -> list[jax.Array]:
        bits = lambda v: lax.bitcast_convert_type(v, jnp.int32)  # those of a kept -0 are not zero
        faded = [jnp.where(factor == 0, 0.0, factor * v) for v in x]
        return [jnp.where(bits(kept) != 0, v, gone) for kept, v, gone in zip(prune(x, u, None), x, faded, strict=True)]

    def _factor(self, ctx: Ctx, dtype: Any) -> jax.Array:
        """Return the factor of dropped values, in the dtype of the array."""
        return jnp.asarray(self.schedule(ctx.step)).astype(dtype)

    def kept(self, step: int | None = None, across: bool = False) -> float:
        return 1.0 if self._fades(step) else self.p.kept(step, across)

    def _fades(self, step: int | None) -> bool:
        """Return True if dropped values are not zero at a step; without a step, if they never are."""
        if step is None and type(self.schedule) in MOVING:
            return self._ends[1] is None
        return value_at(self.schedule, LAST_STEP if step is None else step) != 0

    @property
    def _ends(self) -> tuple[int | None, int | None]:
        """The steps at which values begin to fade, and from which they have faded; None where that is not known."""
        schedule: Any = self.schedule
        first, last = schedule.moves if type(schedule) in MOVING else (None, None)
        whole = first is not None and value_at(self.schedule, first - 1) == 1 and not self.p.facts.has_state
        gone = last is not None and value_at(self.schedule, last) == 0
        return (first if whole and first > 1 else None), (last if gone else None)  # no phase of step 0 alone

    def at(self, step: int) -> Pruner:
        """Return `identity` before values fade, and the part when they have faded, with this gradient."""
        (first, last), now = self._ends, inner_at(self.p, step)
        if last is not None and step >= last:
            return ste(now) if self.gradient == "ste" else now
        if first is not None and step < first:
            return identity
        return replace(self, p=now)

    @property
    def final(self) -> Pruner:
        return self.p.final


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def straight_through(p: Pruner, axis: int, x: jax.Array, ctx: Ctx) -> jax.Array:
    """Return ``p(x, axis, ctx)`` with the derivative of x, in forward and in reverse mode."""
    return p(x, axis, ctx)


@straight_through.defjvp
def _straight_through_jvp(
    p: Pruner, axis: int, primals: tuple[Any, ...], tangents: tuple[Any, ...]
) -> tuple[jax.Array, jax.Array]:
    return straight_through(p, axis, *primals), tangents[0]


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _decayed_through(p: Pruner, lam: float | Schedule, axis: int, x: jax.Array, ctx: Ctx) -> jax.Array:
    return p(x, axis, ctx)


def _decayed_forward(
    p: Pruner, lam: float | Schedule, axis: int, x: jax.Array, ctx: Ctx
) -> tuple[jax.Array, tuple[jax.Array, jax.Array, Any]]:
    y = straight_through(p, axis, x, ctx)  # so that second derivatives pass through too
    return y, (x, y, lam(ctx.step) if callable(lam) else None)


def _decayed_backward(
    p: Pruner, lam: float | Schedule, axis: int, residuals: tuple[jax.Array, jax.Array, Any], g: jax.Array
) -> tuple[jax.Array, None]:
    x, y, now = residuals
    dropped = jnp.where(x == y, jnp.zeros((), x.dtype), x)  # (1 - mask) * x
    return g + jnp.asarray(lam if now is None else now).astype(x.dtype) * dropped, None


_decayed_through.defvjp(_decayed_forward, _decayed_backward)
