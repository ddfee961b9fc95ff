"""Random pruning: the baseline for every other choice of values.

McDanel et al., "Accelerating DNN Training with Structured Data Gradient Pruning" (arXiv 2202.00774), prune at random
without a scale (``rescale=False``): the mean of a product is then n/m of the exact one. With the scale it is exact.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float

from nmjax.core import fusion, groups, random
from nmjax.core.bases import Grouped
from nmjax.core.context import Ctx
from nmjax.core.pruner import Facts, KernelForm


@dataclass(frozen=True, repr=False)
class uniform(Grouped):
    """Keep n of every m values, chosen uniformly at random, and multiply them by m/n if ``rescale``.

    Paper: McDanel et al., "Accelerating DNN Training with Structured Data Gradient Pruning", arXiv:2202.00774.
    The paper uses it without the factor, as a baseline.

    The choice does not depend on the values, so it may drop infinities and NaN. The multiplication can overflow. On
    CPUs it makes subnormal numbers zero.

    Args:
      n: The number of values to keep in each group.
      m: The size of a group.
      rescale: Whether to multiply by m/n, which makes the result unbiased.

    Raises:
      TypeError: ``n`` or ``m`` is not an integer, or ``rescale`` is not a bool.
      ValueError: ``n`` does not lie between 1 and ``m``.

    >>> uniform(2, 4)(jnp.ones(8), ctx=Ctx(key=1))
    Array([2., 0., 2., 0., 2., 0., 0., 2.], dtype=float32)
    """

    rescale: bool = True
    reads_step = False

    def describe(self) -> Facts:
        return super().describe()._replace(stochastic=True, selects=not self.rescale, keeps_zeros=True)

    def __call__(self, x: jax.Array, axis: int = -1, ctx: Ctx = Ctx()) -> jax.Array:
        pruned = self.in_one_pass(x, axis, ctx)
        return self.sample(x, self.draw(x, axis, ctx), axis) if pruned is None else pruned

    @property
    def kernel_form(self) -> KernelForm:
        return KernelForm(self._members, each=True)

    def _members(
        self, x: list[jax.Array], u: Any, scalar: Any, of: list[jax.Array] | None = None
    ) -> list[jax.Array]:  # fmt: skip
        hits = groups.first_of([lax.bitcast_convert_type(v, np.int32) for v in u], self.n)
        values = of or [groups.wide(v) * (self.m / self.n) if self.rescale else v for v in x]
        return [jnp.where(hit, v, 0.0).astype(x[0].dtype) for hit, v in zip(hits, values, strict=True)]

    def draw(self, x: Float[Array, "..."], axis: int = -1, ctx: Ctx = Ctx()) -> Float[Array, "..."]:
        """Return the random numbers of a call: one uniform in [0, 1) for every value.

        Raises:
          TypeError: ``ctx`` has no key.
        """
        return random.uniform(random.words(ctx.key), x.shape)

    def sample(self, x: Float[Array, "..."], u: Float[Array, "..."], axis: int = -1) -> Float[Array, "..."]:
        """Return the pruned array, given the random numbers.

        Args:
          x: An array of floating-point numbers.
          u: One uniform for every value, as `draw` returns it.
          axis: The axis that groups lie along.
        """
        kept = jnp.where(self.chosen(u, axis), x, jnp.zeros((), x.dtype))
        return fusion.rounded(groups.wide(kept) * (self.m / self.n), x.dtype) if self.rescale else kept

    def mask(self, x: jax.Array, axis: int = -1, ctx: Ctx = Ctx()) -> jax.Array:
        kept = self.in_one_pass(x, axis, ctx, mask=True)
        return self.chosen(self.draw(x, axis, ctx), axis) if kept is None else kept

    def chosen(self, u: Float[Array, "..."], axis: int) -> Bool[Array, "..."]:
        """Return the mask of the values to keep: those of the n largest uniforms of every group."""
        axis = groups.position(u.ndim, axis)
        order = lax.bitcast_convert_type(groups.split(u, axis, self.m), np.int32)
        if self.m > 8:
            return groups.top_of(order, axis + 1, self.n).reshape(u.shape)
        hits = groups.first_of(groups.members(order, axis + 1), self.n)  # so that XLA on GPU writes no random numbers
        return fusion.spread(hits, order.shape, axis + 1).reshape(u.shape)
