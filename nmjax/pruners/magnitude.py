"""Magnitude pruning: n of m values with the least squared error.

It is right for weights and activations. It fails for neural gradients, because it is biased: Chmiel et al., "Minimum
Variance Unbiased N:M Sparsity for the Neural Gradients" (arXiv 2203.10991), section 3.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from nmjax.core import groups
from nmjax.core.bases import Grouped, Selector
from nmjax.core.context import Ctx
from nmjax.core.pruner import Facts, KernelForm


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
        kept = self.in_one_pass(x, axis, ctx, mask=True)
        return groups.top(x, axis, self.n, self.m) if kept is None else kept

    @property
    def kernel_form(self) -> KernelForm:
        return KernelForm(self._members)

    def _members(self, x: list[jax.Array], u: Any, state: Any, of: list[jax.Array] | None = None) -> list[jax.Array]:
        return largest(x, self.n, of)


@dataclass(frozen=True, repr=False)
class nonzeros(Grouped):
    """Keep the non-zeros, at most n of every m. What is kept of a group that has more is NaN.

    It says of an operand that it has zeros already, and changes no value. ``dw_g=rows(nonzeros(n, m))`` skips tokens
    whose gradients are zero, such as padding, if at most n of every m consecutive tokens have others. m may be the
    length to which each text is padded.

    Args:
      n: The most non-zeros of a group.
      m: The size of a group.

    Raises:
      TypeError: ``n`` or ``m`` is not an integer.
      ValueError: ``n`` does not lie between 1 and ``m``.

    >>> nonzeros(2, 4)(jnp.array([0., 5., 0., -1., 0., 5., 1., -1.]))
    Array([ 0.,  5.,  0., -1.,  0., nan, nan,  0.], dtype=float32)
    """

    reads_step = False

    def describe(self) -> Facts:
        return super().describe()._replace(keeps_zeros=True)

    def __call__(self, x: jax.Array, axis: int = -1, ctx: Ctx = Ctx()) -> jax.Array:
        axis = groups.position(x.ndim, axis)
        split = groups.split(x, axis, self.m)
        fits = jnp.sum(split != 0, axis + 1, keepdims=True, dtype=jnp.int32) <= self.n
        kept = jnp.where(fits, split, jnp.array(jnp.nan, x.dtype)).reshape(x.shape)
        return jnp.where(groups.top(x, axis, self.n, self.m), kept, jnp.zeros((), x.dtype))


def largest(x: list[jax.Array], n: Any, of: list[jax.Array] | None = None) -> list[jax.Array]:
    """Return the members of groups, with zeros in the place of all but the n largest magnitudes.

    Args:
      x: The members, one array for each position of a group.
      n: The number of values to keep. It may be traced.
      of: Other arrays, to be returned in the place of the members.
    """
    hits = groups.first_of([groups.magnitude(v).astype(jnp.int32) for v in x], n)
    return [jnp.where(hit, v, jnp.zeros((), v.dtype)) for hit, v in zip(hits, of or x, strict=True)]
