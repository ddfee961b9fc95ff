"""Magnitudes and the norms of the inputs: `wanda` and `ria`, whose state holds the norms."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from nmjax.core import groups
from nmjax.core.bases import Grouped, Remembering, Selector
from nmjax.core.context import Ctx
from nmjax.core.pruner import Pruner, join_states, split_ctx

LEAST = 1e-12  # the norm of an input that is always zero, as a share of the largest norm: its weights are kept last


@dataclass(frozen=True, repr=False)
class ByNorms(Selector, Grouped, Remembering):
    """The base of pruners that hold the norm of each feature that the weight multiplies.

    The norms are state. They begin as ones: measure a layer's inputs with `nmjax.nnx.calibrate`, and give them to the
    model with `nmjax.nnx.set_norms`. With `nmjax.linen` and `nmjax.transform`, replace these first values in the
    state by your own norms. The kept values stay as they are.

    Args:
      n: The number of values to keep in each group.
      m: The size of a group.
    """

    reads_step = False

    def mask(self, x: jax.Array, axis: int = -1, ctx: Ctx = Ctx()) -> jax.Array:
        norms = self._norms(ctx)
        if jnp.shape(norms) != (x.shape[axis],):
            raise ValueError(
                f"{self} holds norms of shape {jnp.shape(norms)}, but axis {axis} of an array of shape {x.shape} has "
                f"{x.shape[axis]} values. Pass as state what its init(x, axis) returned for this array."
            )
        shape = [1] * x.ndim
        shape[axis] = x.shape[axis]
        largest = norms.max()
        norms = jnp.where(norms > 0, norms, jnp.where(largest > 0, LEAST * largest, 1))
        axes = ctx.axes_of(x.ndim, axis % x.ndim)
        outputs = tuple({*axes.others, *axes.space})
        return groups.top(self.scores(x.astype(jnp.float32), axis, outputs, norms.reshape(shape)), axis, self.n, self.m)

    def scores(self, x: jax.Array, axis: int, outputs: tuple[int, ...], norms: jax.Array) -> jax.Array:
        """Return the scores. The n of largest magnitude in each group are kept.

        Args:
          x: The weight in float32.
          axis: The axis of the groups.
          outputs: The axes of outputs: the out-features, and the positions of a convolution's kernel.
          norms: The norms, of a shape that is broadcast with ``x``.
        """
        raise NotImplementedError

    def init(self, x: jax.Array, axis: int = -1, ctx: Ctx = Ctx()) -> jax.Array:
        return jnp.ones(x.shape[axis], jnp.float32)

    def refresh(self, x: jax.Array, axis: int = -1, ctx: Ctx = Ctx()) -> jax.Array:
        return self._norms(ctx)

    def _norms(self, ctx: Ctx) -> jax.Array:
        if ctx.state is None:
            raise ValueError(f"{self} needs the norms of the inputs: pass as state what its init(x, axis) returns.")
        return jnp.asarray(ctx.state)


@dataclass(frozen=True, repr=False)
class wanda(ByNorms):
    """Keep the n largest of every m by magnitude times the norm of the feature that the weight multiplies.

    Paper: Sun et al., "A Simple and Effective Pruning Approach for Large Language Models", arXiv:2306.11695.

    The norms are state, as `nmjax.nnx.set_norms` sets it. With norms of one, this is magnitude pruning.

    Args:
      n: The number of values to keep in each group.
      m: The size of a group.

    >>> wanda(2, 4)(jnp.array([1., -2., 3., -4.]), ctx=Ctx(state=jnp.array([10., 1., 1., 1.])))
    Array([ 1.,  0.,  0., -4.], dtype=float32)
    """

    def scores(self, x: jax.Array, axis: int, outputs: tuple[int, ...], norms: jax.Array) -> jax.Array:
        """Return the weight times the norm."""
        del axis, outputs
        return x * norms


@dataclass(frozen=True, repr=False)
class ria(ByNorms):
    """Keep the n largest of every m by relative importance times a power of the norm.

    Paper: Zhang et al., "Plug-and-Play: An Efficient Post-training Pruning Method for Large Language Models" (ICLR
    2024). Its permutation of the inputs is left out. The score is::

        score = (|w| / sum of |w| over inputs + |w| / sum of |w| over outputs) * norm ** power

    The norms are state, as `nmjax.nnx.set_norms` sets it.

    Args:
      n: The number of values to keep in each group.
      m: The size of a group.
      power: The exponent of the norm.

    >>> ria(2, 4)(jnp.array([[1., 1.], [-2., 9.], [3., 1.], [-4., 1.]]), 0, Ctx(state=jnp.ones(4)))
    Array([[ 0.,  1.],
           [ 0.,  9.],
           [ 3.,  0.],
           [-4.,  0.]], dtype=float32)
    """

    power: float = 0.5

    def scores(self, x: jax.Array, axis: int, outputs: tuple[int, ...], norms: jax.Array) -> jax.Array:
        """Return relative importance times a power of the norm."""
        finite, tiny = jnp.isfinite(x), jnp.finfo(jnp.float32).tiny
        size = jnp.where(finite, jnp.abs(x), 0)
        share = lambda axes: size / jnp.maximum(size.sum(axes, keepdims=True), tiny)
        importance = (share((axis,)) + share(outputs)) * norms**self.power
        return jnp.where(finite, importance, jnp.inf)


def keep_norms(p: Pruner, state: Any, measured: Any) -> Any:
    """Return a state with the norms of another state of the same pruner.

    Args:
      p: The pruner.
      state: Its state.
      measured: The state whose norms are taken.
    """
    if isinstance(p, ByNorms):
        return measured
    if not needs_norms(p):
        return state
    parts = zip(p.parts, split_ctx(p, Ctx(state=state)), split_ctx(p, Ctx(state=measured)), strict=True)
    return join_states(keep_norms(part, own.state, other.state) for part, own, other in parts)


def needs_norms(p: Pruner) -> bool:
    """Return True if a pruner holds norms of inputs, or a part of it does.

    >>> import nmjax as nm
    >>> needs_norms(nm.ste(nm.wanda(2, 4))), needs_norms(nm.ste(nm.mse(2, 4)))
    (True, False)
    """
    return isinstance(p, ByNorms) or any(map(needs_norms, p.parts))
