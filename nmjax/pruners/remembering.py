"""Pruners of pruners that remember: a mask that is held, an order that is kept."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from nmjax.core import random
from nmjax.core.context import Ctx
from nmjax.core.pruner import Pattern, Pruner, Remembering, check_inner


@dataclass(frozen=True, repr=False)
class hold(Remembering):
    """Keep a mask for ``every`` steps, or for ever. The mask is state: `init` makes it, `refresh` renews it.

    >>> p = hold(mse(2, 4), every=40)
    >>> p(jnp.array([9., 1., 1., 9.]), ctx=Ctx(state=p.init(jnp.arange(4.))))
    Array([0., 0., 1., 9.], dtype=float32)
    """

    p: Pruner
    every: int | None = None
    reads_step = False

    def __post_init__(self):
        super().__post_init__()
        check_inner(self, self.p)
        _check_every(self)
        if not self.p.selects:
            raise ValueError(
                f"{self} holds a mask, but {self.p} does not only keep or drop. Hold what selects, as in chain(hold(mse(2,4)),...)."
            )

    @property
    def selects(self) -> bool:
        return True

    def __call__(self, x: jax.Array, axis: int = -1, ctx: Ctx = Ctx()) -> jax.Array:
        return jnp.where(self.mask(x, axis, ctx), x, jnp.zeros((), x.dtype))

    def mask(self, x: jax.Array, axis: int = -1, ctx: Ctx = Ctx()) -> jax.Array:
        kept = _state(self, ctx)
        if getattr(kept, "shape", None) != x.shape:
            raise ValueError(
                f"{self} holds a mask of shape {getattr(kept, 'shape', None)}, and was given an array of shape {x.shape}."
            )
        return kept

    def init(self, x: jax.Array, axis: int = -1, ctx: Ctx = Ctx()) -> jax.Array:
        return self.p.mask(x, axis, ctx.replace(state=self.p.init(x, axis, ctx)))

    def refresh(self, x: jax.Array, axis: int = -1, ctx: Ctx = Ctx()) -> jax.Array:
        return _renewed(self, ctx, lambda: self.init(x, axis, ctx.replace(state=None)))

    @property
    def stochastic(self) -> bool:
        return False

    @property
    def pattern(self) -> Pattern | None:
        return self.p.pattern

    @property
    def pattern_across(self) -> Pattern | None:
        return self.p.pattern_across

    @property
    def final(self) -> Pruner:
        return hold(self.p)


@dataclass(frozen=True, repr=False)
class permute(Remembering):
    """Prune in a permuted order of the axis, renewed every ``every`` steps: the one of ``draws`` random ones that keeps
    most non-zeros. Bi-Mask's backward mask (Zhang et al., arXiv 2302.06058): with p applied to an already pruned weight,
    the fewest of its values are lost. The permutation is state; those tried are a function of the step alone.
    """

    p: Pruner
    every: int | None = 100
    draws: int = 100
    reads_step = False

    def __post_init__(self):
        super().__post_init__()
        check_inner(self, self.p)
        _check_every(self)
        if self.draws < 1:
            raise ValueError(f"{self}: draws must be at least 1.")
        if self.p.stochastic or self.p.remembers:
            raise ValueError(f"{self} tries one order after another, so it takes a pruner without noise or state.")

    @property
    def selects(self) -> bool:
        return self.p.selects

    def __call__(self, x: jax.Array, axis: int = -1, ctx: Ctx = Ctx()) -> jax.Array:
        return self._permuted(x, axis, ctx, self.p)

    def mask(self, x: jax.Array, axis: int = -1, ctx: Ctx = Ctx()) -> jax.Array:
        return self._permuted(x, axis, ctx, self.p.mask)

    def _permuted(self, x, axis, ctx, call):
        order = _state(self, ctx)
        if getattr(order, "shape", None) != (x.shape[axis],):
            held = getattr(order, "shape", order)
            raise ValueError(f"{self} holds an order of shape {held}, and axis {axis} of {x.shape} has other values.")
        return jnp.take(call(jnp.take(x, order, axis), axis, ctx.replace(state=None)), jnp.argsort(order), axis)

    def init(self, x: jax.Array, axis: int = -1, ctx: Ctx = Ctx()) -> jax.Array:
        size = x.shape[axis]
        words = random.fold(random.words(0), ctx.step)
        orders = jnp.argsort(random.bits(words, random.counter((self.draws, size))), axis=1)
        left = lambda order: jnp.sum(self.p(jnp.take(x, order, axis), axis) != 0, dtype=jnp.int32)
        return orders[jnp.argmax(lax.map(left, orders))]

    def refresh(self, x: jax.Array, axis: int = -1, ctx: Ctx = Ctx()) -> jax.Array:
        return _renewed(self, ctx, lambda: self.init(x, axis, ctx.replace(state=None)))

    @property
    def reorders(self) -> bool:
        return True

    @property
    def final(self) -> Pruner:
        return permute(self.p.final, None, self.draws)


def _check_every(owner):
    if owner.every is not None and (type(owner.every) is not int or owner.every < 1):
        raise ValueError(f"{owner}: every is a number of steps, or None for ever.")


def _state(owner, ctx):
    if ctx.state is None:
        raise ValueError(
            f"{owner} keeps state between steps and was given none: pass what its init(x, axis) makes as state."
        )
    return ctx.state


def _renewed(owner, ctx, new):
    if owner.every is None:
        return _state(owner, ctx)
    old = jnp.asarray(_state(owner, ctx))
    return lax.cond(
        jnp.asarray(ctx.step) % np.int32(owner.every) == 0, lambda: jnp.asarray(new(), old.dtype), lambda: old
    )
