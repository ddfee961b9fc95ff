"""Magnitude pruning: the least squared error that n of m values can leave.

Chmiel et al., "Minimum Variance Unbiased N:M Sparsity for the Neural Gradients" (arXiv 2203.10991), section 3: right for
weights and activations; fails for neural gradients, for it is biased.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from nmjax.core import groups
from nmjax.core.context import Ctx
from nmjax.core.pruner import Grouped


@dataclass(frozen=True, repr=False)
class mse(Grouped):
    """Keep the n largest magnitudes of every m, the first of equals; inf and NaN count as largest.

    >>> mse(2, 4)(jnp.array([1., -2., 3., -4.]))
    Array([ 0.,  0.,  3., -4.], dtype=float32)
    """

    reads_step = False

    def __call__(self, x: jax.Array, axis: int = -1, ctx: Ctx = Ctx()) -> jax.Array:
        return jnp.where(self.mask(x, axis), x, jnp.zeros((), x.dtype))

    def mask(self, x: jax.Array, axis: int = -1, ctx: Ctx = Ctx()) -> jax.Array:
        return groups.top(x, axis, self.n, self.m)

    @property
    def selects(self) -> bool:
        return True

    @property
    def by_members(self) -> bool:
        return True

    def of_members(self, x: list[jax.Array], u: jax.Array | None = None, state: Any = None) -> list[jax.Array]:
        size = [groups.magnitude(v).astype(jnp.int32) for v in x]
        pruned = []
        for i, (v, mine) in enumerate(zip(x, size, strict=True)):
            ahead = [other >= mine if j < i else other > mine for j, other in enumerate(size) if j != i]
            kept = sum(a.astype(jnp.int32) for a in ahead) < self.n
            pruned.append(jnp.where(kept, v, jnp.zeros((), v.dtype)))
        return pruned
