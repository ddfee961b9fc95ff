"""S-STE's continuous soft threshold.

Hu et al., "S-STE: Continuous Pruning Function for Efficient 2:4 Sparse Pre-Training" (arXiv 2409.09099), section 3::

    t = the (m-n)-th smallest magnitude of the group        (2:4: the second smallest)
    s = sign(w) * max(|w| - t, 0)
    w~ = beta * s,   beta = <w, s> / <s, s>  over the whole tensor, once, from the initial weights

A hard mask jumps when two magnitudes change places. Here both are zero at that moment, so the function is continuous.
beta is frozen: it is the state of this pruner, and 1 without state. The paper compares with a beta that is computed
again at every step, which grows too large, and with beta = 1.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from nmjax.core import fusion, groups
from nmjax.core.bases import Grouped, Remembering
from nmjax.core.context import Ctx
from nmjax.core.pruner import Facts, KernelForm


@dataclass(frozen=True, repr=False)
class soft(Remembering, Grouped):
    """Shrink every magnitude by the largest one that n:m drops, and multiply by a scale beta.

    Paper: Hu et al., "S-STE: Continuous Pruning Function for Efficient 2:4 Sparse Pre-training", arXiv:2409.09099.

    For a group with threshold t, the largest dropped magnitude::

        p(w) = beta * sign(w) * max(|w| - t, 0)

    ``ste(soft(2, 4))`` has the gradient of the paper. Without `ste` the gradient is that of autodiff. CPUs treat
    subnormal numbers as zero.

    Args:
      n: The number of values to keep in each group.
      m: The size of a group.
      scale: "frozen": beta is computed once, by ``init``, and kept as state. "now": beta is computed at every call.
        "one": beta is 1.

    Raises:
      TypeError: ``n`` or ``m`` is not an integer.
      ValueError: ``n`` does not lie between 1 and ``m``, or the scale is none of the three.

    >>> soft(2, 4)(jnp.array([1., -2., 3., -4.]))
    Array([ 0.,  0.,  1., -2.], dtype=float32)
    """

    scale: str = "frozen"
    reads_step = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scale not in ("frozen", "now", "one"):
            raise ValueError(f"{self}: scale must be 'frozen', 'now' or 'one'.")

    def describe(self) -> Facts:
        frozen = self.scale == "frozen"  # without state the scale is 1
        return super().describe()._replace(keeps_zeros=True, needs_state=False, has_state=frozen)

    def __call__(self, x: jax.Array, axis: int = -1, ctx: Ctx = Ctx()) -> jax.Array:
        pruned = self.in_one_pass(x, axis, ctx)
        if pruned is not None:
            return pruned
        shrunk = self._shrunk(x, axis)
        if self.scale == "now":
            shrunk = shrunk * self._best(x, shrunk).astype(shrunk.dtype)
        elif self.facts.has_state and ctx.state is not None:
            if jnp.shape(ctx.state):
                raise ValueError(
                    f"{self} has one scale for a whole tensor, but got state of shape {jnp.shape(ctx.state)}: pass the "
                    "scalar that its init(x, axis) returns."
                )
            shrunk = shrunk * jnp.asarray(ctx.state).astype(shrunk.dtype)
        return fusion.rounded(shrunk, x.dtype)

    def _shrunk(self, x: jax.Array, axis: int) -> jax.Array:
        """Return the shrunk values in float32, because subtracting the threshold in bf16 would make ties."""
        axis = groups.position(x.ndim, axis)
        if self.n == self.m:
            return groups.wide(x)
        g = groups.split(x, axis, self.m)
        if self.m <= 4:  # member by member, so that XLA fuses it into one pass
            return jnp.concatenate(_shrunk_members(groups.members(g, axis + 1), self.n), axis + 1).reshape(x.shape)
        kept, w = groups.split(self.mask(x, axis), axis, self.m), groups.wide(g)
        threshold = jnp.max(jnp.where(kept, 0.0, jnp.abs(w)), axis + 1, keepdims=True)
        return _beyond(w, threshold, kept).reshape(x.shape)

    @property
    def kernel_form(self) -> KernelForm:
        if self.scale == "now":  # a sum over the whole array
            return KernelForm()
        return KernelForm(self._members, growth=self._growth)

    def _members(self, x: list[jax.Array], u: Any, state: Any) -> list[jax.Array]:
        scale = state if self.facts.has_state and state is not None else 1.0
        return [(v * scale).astype(x[0].dtype) for v in _shrunk_members(x, self.n)]

    def _growth(self, state: Any) -> Any:
        return jnp.abs(state) if self.facts.has_state and state is not None else 1.0

    def mask(self, x: jax.Array, axis: int = -1, ctx: Ctx = Ctx()) -> jax.Array:
        """Return the mask of the n largest magnitudes. Elsewhere the result is zero."""
        return groups.top(x, axis, self.n, self.m)

    def init(self, x: jax.Array, axis: int = -1, ctx: Ctx = Ctx()) -> jax.Array | None:
        """Return beta, the scale of least squared error, or None if the scale is not state."""
        return self._best(x, self._shrunk(x, axis)) if self.facts.has_state else None

    def _best(self, x: Float[Array, "..."], shrunk: Float[Array, "..."]) -> Float[Array, ""]:
        """Return <x, shrunk> / <shrunk, shrunk>."""
        energy = jnp.sum(shrunk * shrunk)
        return jnp.where(energy > 0, jnp.sum(groups.wide(x) * shrunk) / jnp.where(energy > 0, energy, 1.0), 1.0)

    def refresh(self, x: jax.Array, axis: int = -1, ctx: Ctx = Ctx()) -> jax.Array | None:
        """Return beta unchanged, because it is frozen."""
        if not self.facts.has_state:
            return None
        if ctx.state is None:
            raise ValueError(
                f"{self} keeps its scale between steps and was given none: pass as state what its init(x, axis) "
                "returns."
            )
        return ctx.state


def _shrunk_members(x: list[jax.Array], n: int) -> list[jax.Array]:
    """Return the members of groups, shrunk by the largest dropped magnitude of their group."""
    w = [groups.wide(v) for v in x]
    order = [groups.magnitude(v) for v in w]  # of float32: XLA shuffles 16-bit integers at twice the cost
    kept = groups.first_of(order, n)
    threshold = functools.reduce(jnp.maximum, (jnp.where(k, 0.0, jnp.abs(v)) for k, v in zip(kept, w, strict=True)))
    return [_beyond(v, threshold, k) for v, k in zip(w, kept, strict=True)]


def _beyond(w: Float[Array, "..."], threshold: Float[Array, "..."], kept: Bool[Array, "..."]) -> Float[Array, "..."]:
    """Return kept values minus the threshold. NaN stays NaN, and infinity minus an infinite threshold is NaN."""
    within = (jnp.abs(w) <= threshold) & (threshold < jnp.inf)
    beyond = jnp.abs(w) - threshold
    return jnp.where(within, 0.0, jnp.where(kept, jnp.where(w < 0, -beyond, beyond), 0.0))  # Mosaic has no ~
