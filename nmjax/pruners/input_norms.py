"""Magnitude times the norm of the input: `wanda`, whose state are the norms."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from nmjax.core import groups
from nmjax.core.context import Ctx
from nmjax.core.pruner import Grouped, Remembering


@dataclass(frozen=True, repr=False)
class wanda(Grouped, Remembering):
    """Keep the n largest of every m by magnitude times the norm of the feature that it multiplies.

    Paper: Sun et al., "A Simple and Effective Pruning Approach for Large Language Models", arXiv:2306.11695.

    The norms are state. They begin as ones, which is magnitude pruning: measure a layer's inputs with
    `nmjax.nnx.calibrate`, and give them to the model with `nmjax.nnx.set_norms`. The values themselves stay.

    Args:
      n: The number of values to keep in each group.
      m: The size of a group.

    >>> wanda(2, 4)(jnp.array([1., -2., 3., -4.]), ctx=Ctx(state=jnp.array([10., 1., 1., 1.])))
    Array([ 1.,  0.,  0., -4.], dtype=float32)
    """

    reads_step = False

    def __call__(self, x: jax.Array, axis: int = -1, ctx: Ctx = Ctx()) -> jax.Array:
        return jnp.where(self.mask(x, axis, ctx), x, jnp.zeros((), x.dtype))

    def mask(self, x: jax.Array, axis: int = -1, ctx: Ctx = Ctx()) -> jax.Array:
        norms = self._norms(ctx)
        if jnp.shape(norms) != (x.shape[axis],):
            raise ValueError(
                f"{self} holds norms of shape {jnp.shape(norms)}, but axis {axis} of an array of shape {x.shape} has "
                f"{x.shape[axis]} values. Pass as state what its init(x, axis) returned for this array."
            )
        shape = [1] * x.ndim
        shape[axis] = x.shape[axis]
        return groups.top(x.astype(jnp.float32) * norms.reshape(shape), axis, self.n, self.m)

    @property
    def selects(self) -> bool:
        return True

    def init(self, x: jax.Array, axis: int = -1, ctx: Ctx = Ctx()) -> jax.Array:
        return jnp.ones(x.shape[axis], jnp.float32)

    def refresh(self, x: jax.Array, axis: int = -1, ctx: Ctx = Ctx()) -> jax.Array:
        return self._norms(ctx)

    def _norms(self, ctx: Ctx) -> jax.Array:
        if ctx.state is None:
            raise ValueError(f"{self} needs the norms of the inputs: pass as state what its init(x, axis) returns.")
        return jnp.asarray(ctx.state)
