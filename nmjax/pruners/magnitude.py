"""Magnitude pruning: n of m values with the least squared error.

It is right for weights and activations. It fails for neural gradients, because it is biased: Chmiel et al., "Minimum
Variance Unbiased N:M Sparsity for the Neural Gradients" (arXiv 2203.10991), section 3.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from nmjax.core import fusion, groups
from nmjax.core.bases import Grouped, Selector
from nmjax.core.context import Ctx
from nmjax.core.pruner import KernelForm


@dataclass(frozen=True, repr=False)
class mse(Selector, Grouped):
    """Keep the n largest magnitudes of every m. This leaves the least squared error ||x - p(x)||^2.

    Paper: Chmiel et al., "Minimum Variance Unbiased N:M Sparsity for the Neural Gradients", arXiv:2203.10991.
    The paper prunes weights and activations so, and gradients as `mvue` does.

    Of equal magnitudes the first are kept. Infinities and NaN count as largest.

    Args:
      n: The number of values to keep in each group.
      m: The size of a group.

    Raises:
      TypeError: ``n`` or ``m`` is not an integer.
      ValueError: ``n`` does not lie between 1 and ``m``.

    >>> mse(2, 4)(jnp.array([1., -2., 3., -4.]))
    Array([ 0.,  0.,  3., -4.], dtype=float32)
    """

    reads_step = False

    def mask(self, x: jax.Array, axis: int = -1, ctx: Ctx = Ctx()) -> jax.Array:
        return groups.top(x, axis, self.n, self.m)

    @property
    def kernel_form(self) -> KernelForm:
        return KernelForm(self._members)

    def _members(self, x: list[jax.Array], u: Any, state: Any) -> list[jax.Array]:
        size = [groups.magnitude(v).astype(jnp.int32) for v in x]
        pruned = []
        for i, (v, mine) in enumerate(zip(x, size, strict=True)):
            ahead = [other >= mine if j < i else other > mine for j, other in enumerate(size) if j != i]
            kept = fusion.total(a.astype(jnp.int32) for a in ahead) < self.n
            pruned.append(jnp.where(kept, v, jnp.zeros((), v.dtype)))
        return pruned
