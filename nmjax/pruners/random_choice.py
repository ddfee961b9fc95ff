"""Random pruning: the baseline that every rule must beat.

McDanel et al., "Accelerating DNN Training with Structured Data Gradient Pruning" (arXiv 2202.00774) prune at random
without a scale (``rescale=False``), so that a product keeps n/m of its mean; with it the pruning is unbiased.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from nmjax.core import groups, random
from nmjax.core.context import Ctx
from nmjax.core.pruner import Grouped


@dataclass(frozen=True, repr=False)
class uniform(Grouped):
    """Keep a uniformly random n of every m, times m/n if ``rescale``. The n largest of m random words are such a choice.

    >>> uniform(2, 4)(jnp.ones(8), ctx=Ctx(key=1))
    Array([2., 0., 0., 2., 2., 0., 0., 2.], dtype=float32)
    """

    rescale: bool = True
    reads_step = False

    @property
    def stochastic(self) -> bool:
        return True

    @property
    def selects(self) -> bool:
        return not self.rescale

    def __call__(self, x: jax.Array, axis: int = -1, ctx: Ctx = Ctx()) -> jax.Array:
        return self.sample(x, self.draw(x, axis, ctx), axis)

    def draw(self, x: jax.Array, axis: int = -1, ctx: Ctx = Ctx()) -> jax.Array:
        """One uniform for every value."""
        return random.uniform(random.words(ctx.key), x.shape)

    def sample(self, x: jax.Array, u: jax.Array, axis: int = -1) -> jax.Array:
        """The pruned array of the uniforms ``u``, shaped like ``x``."""
        kept = jnp.where(self.chosen(u, axis), x, jnp.zeros((), x.dtype))
        return kept * jnp.asarray(self.m / self.n, x.dtype) if self.rescale else kept

    def mask(self, x: jax.Array, axis: int = -1, ctx: Ctx = Ctx()) -> jax.Array:
        return self.chosen(self.draw(x, axis, ctx), axis)

    def chosen(self, u: jax.Array, axis: int) -> jax.Array:
        axis = groups.position(u.ndim, axis)
        order = lax.bitcast_convert_type(groups.split(u, axis, self.m), np.int32)
        return groups.top_of(order, axis + 1, self.n).reshape(u.shape)
