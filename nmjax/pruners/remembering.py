"""Combinators with state: `hold` keeps a mask, `permute` keeps an order of the axis."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from nmjax.core import random
from nmjax.core.bases import Remembering, SamePattern, Selector
from nmjax.core.context import Ctx
from nmjax.core.pruner import Facts, Pruner, check_inner
from nmjax.pruners.input_norms import needs_norms


@dataclass(frozen=True, repr=False)
class hold(Selector, SamePattern, Remembering):
    """Keep a mask for a number of steps.

    The mask is state: `init` makes it, and `refresh` renews it. So is what a pruner that reads gradients keeps.

    Args:
      p: A pruner that only keeps or drops, such as ``mse(2, 4)``.
      every: The mask is renewed at multiples of this step. If steps are left out, it is renewed at the first step after
        a multiple. Going back to an earlier step keeps it. If None, the first mask stays.

    Raises:
      TypeError: ``p`` is not a pruner.
      ValueError: ``p`` also changes the values that it keeps or reads norms of inputs, or ``every`` is not a number of
        steps.

    >>> import nmjax as nm
    >>> p = nm.hold(nm.mse(2, 4), every=40)
    >>> p(jnp.array([9., 1., 1., 9.]), ctx=nm.Ctx(state=p.init(jnp.arange(4.))))
    Array([0., 0., 1., 9.], dtype=float32)
    """

    p: Pruner
    every: int | None = None
    reads_step = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_inner(self, self.p)
        _check_every(self)
        if not self.p.facts.selects:
            raise ValueError(
                f"{self} holds a mask, but {self.p} does not only keep or drop: it also changes kept values. Hold a "
                "pruner that selects, as in chain(hold(mse(2,4)),...)."
            )
        if needs_norms(self.p):
            n, m = self.p.facts.pattern or (2, 4)
            raise ValueError(
                f"{self} holds a mask, but no norms, which {self.p} reads. Prune the model by norms once, with "
                "nm.nnx.prune and the solver nm.oneshot.wanda or ria. Then write "
                f"hold(mse({n},{m})): it holds that mask."
            )

    def describe(self) -> Facts:
        return super().describe()._replace(stochastic=False)

    def mask(self, x: jax.Array, axis: int = -1, ctx: Ctx = Ctx()) -> jax.Array:
        return self.like(self._held(ctx)[0], x, "a mask")

    def _held(self, ctx: Ctx) -> tuple[Any, Any]:
        """Return the mask, and the state of the part if it is kept."""
        state = self.given(ctx)
        return tuple(state) if self.p.facts.reads_gradient else (state, None)

    def init(self, x: jax.Array, axis: int = -1, ctx: Ctx = Ctx()) -> Any:
        inner = self.p.init(x, axis, ctx)
        kept = self.p.mask(x, axis, ctx.replace(state=inner))
        return (kept, inner) if self.p.facts.reads_gradient else kept

    def refresh(self, x: jax.Array, axis: int = -1, ctx: Ctx = Ctx()) -> Any:
        if not self.p.facts.reads_gradient:
            return _renewed(self, ctx, lambda: self.init(x, axis, ctx.replace(state=None)))
        kept, inner = self._held(ctx)
        inner = self.p.refresh(x, axis, ctx.replace(state=inner))
        if ctx.gradient is not None:
            return kept, inner
        new = lambda: self.p.mask(x, axis, ctx.replace(state=inner))
        return _renewed(self, ctx.replace(state=kept), new), inner

    @property
    def final(self) -> Pruner:
        return hold(self.p)


@dataclass(frozen=True, repr=False)
class permute(Remembering):
    """Prune in a permuted order of the axis: the best of several random orders.

    Paper: Zhang et al., "Bi-directional Masks for Efficient N:M Sparse Training", arXiv:2302.06058.

    The best order is the one in which the most non-zeros are kept. The mask in that order is Bi-Mask's backward mask:
    if the weight is already pruned, few of the remaining values are lost. The order is state: `init` chooses it, and
    `refresh` renews it. The orders that are tried depend on the step alone.

    Args:
      p: A pruner without noise and without state, such as ``mse(2, 4)``.
      every: As for `hold`. If None, the first order stays.
      draws: The number of random orders to try.

    Raises:
      TypeError: ``p`` is not a pruner, or ``draws`` is not an integer.
      ValueError: ``p`` draws random numbers or has state, or a number is below 1.

    >>> import nmjax as nm
    >>> p, w = nm.permute(nm.mse(2, 4)), jnp.array([9., 9., 9., 0., 0., 0., 0., 9.])
    >>> p(w, ctx=nm.Ctx(state=p.init(w)))
    Array([9., 9., 9., 0., 0., 0., 0., 9.], dtype=float32)
    """

    p: Pruner
    every: int | None = 100
    draws: int = 100
    reads_step = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_inner(self, self.p)
        _check_every(self)
        if self.draws < 1:
            raise ValueError(f"{self}: draws must be at least 1.")
        if self.p.facts.stochastic or self.p.facts.has_state:
            raise ValueError(
                f"{self} tries several orders, so it takes a pruner without noise or state, such as mse(2,4)."
            )

    def describe(self) -> Facts:
        p = self.p.facts
        return super().describe()._replace(reorders=True, selects=p.selects, keeps_zeros=p.keeps_zeros)

    def __call__(self, x: jax.Array, axis: int = -1, ctx: Ctx = Ctx()) -> jax.Array:
        return self._permuted(x, axis, ctx, self.p)

    def mask(self, x: jax.Array, axis: int = -1, ctx: Ctx = Ctx()) -> jax.Array:
        return self._permuted(x, axis, ctx, self.p.mask)

    def _permuted(self, x: jax.Array, axis: int, ctx: Ctx, call: Callable[..., jax.Array]) -> jax.Array:
        """Call the part, or its mask, in the permuted order."""
        order = self.given(ctx)
        if getattr(order, "shape", None) != (x.shape[axis],):
            shape = getattr(order, "shape", order)
            raise ValueError(
                f"{self} holds an order of shape {shape}, but axis {axis} of an array of shape {x.shape} has "
                f"{x.shape[axis]} values. Pass as state what its init(x, axis) returned for this array."
            )
        return jnp.take(call(jnp.take(x, order, axis), axis, ctx.replace(state=None)), jnp.argsort(order), axis)

    def init(self, x: jax.Array, axis: int = -1, ctx: Ctx = Ctx()) -> jax.Array:
        size = x.shape[axis]
        words = random.fold(random.words(0), ctx.step)
        orders = jnp.argsort(random.bits(words, random.counter((self.draws, size))), axis=1)
        own = ctx.replace(state=None)
        left = lambda order: jnp.sum(self.p(jnp.take(x, order, axis), axis, own) != 0, dtype=jnp.int32)
        return orders[jnp.argmax(lax.map(left, orders))]

    def refresh(self, x: jax.Array, axis: int = -1, ctx: Ctx = Ctx()) -> jax.Array:
        return _renewed(self, ctx, lambda: self.init(x, axis, ctx.replace(state=None)))

    @property
    def final(self) -> Pruner:
        return permute(self.p.final, None, self.draws)


def _check_every(owner: hold | permute) -> None:
    if owner.every is not None and (type(owner.every) is not int or owner.every < 1):
        raise ValueError(f"{owner}: every must be a number of steps, at least 1, or None to keep the first state.")


def _renewed(owner: hold | permute, ctx: Ctx, new: Callable[[], jax.Array]) -> jax.Array:
    """Return a new state at step 0 and if a multiple of ``every`` was reached since the last refresh, else the old."""
    if owner.every is None:
        return owner.given(ctx)
    old, step, every = jnp.asarray(owner.given(ctx)), jnp.asarray(ctx.step), np.int32(owner.every)
    crossed = lambda since: (step == 0) | (step // every > jnp.asarray(since) // every)
    due = step % every == 0 if ctx.since is None else crossed(ctx.since)
    return lax.cond(due, lambda: jnp.asarray(new(), old.dtype), lambda: old)
