"""S-STE's continuous soft threshold.

Hu et al., "S-STE: Continuous Pruning Function for Efficient 2:4 Sparse Pre-Training" (arXiv 2409.09099), section 3::

    t = the (m-n)-th smallest magnitude of the group        (2:4: the second smallest)
    s = sign(w) * max(|w| - t, 0)
    w~ = beta * s,   beta = <w, s> / <s, s>  over the whole tensor, once, from the initial weights

A hard mask jumps where two magnitudes swap; here both are zero when they meet. beta is frozen: it is the state of this
pruner, and 1 where no state is given. For comparison, as in the paper: ``scale="now"``, computed anew at every step, by
which it grows unexpectedly large, and ``scale="one"``.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from nmjax.core import fusion, groups
from nmjax.core.context import Ctx
from nmjax.core.pruner import Grouped, Remembering


@dataclass(frozen=True, repr=False)
class soft(Remembering, Grouped):
    """Shrink every magnitude by the largest one that n:m drops. Wrap in `ste` for the paper's gradient; bare, autodiff's.

    >>> soft(2, 4)(jnp.array([1., -2., 3., -4.]))
    Array([ 0.,  0.,  1., -2.], dtype=float32)
    """

    scale: str = "frozen"
    reads_step = False

    def __post_init__(self):
        super().__post_init__()
        if self.scale not in ("frozen", "now", "one"):
            raise ValueError(f"{self}: scale is 'frozen', 'now' or 'one'.")

    def __call__(self, x: jax.Array, axis: int = -1, ctx: Ctx = Ctx()) -> jax.Array:
        shrunk = self._shrunk(x, axis)
        if self.scale == "now":
            shrunk = shrunk * self._best(x, shrunk).astype(shrunk.dtype)
        elif self.remembers and ctx.state is not None:
            if jnp.shape(ctx.state):
                raise ValueError(f"{self} has one scale for a whole tensor, not state of shape {jnp.shape(ctx.state)}.")
            shrunk = shrunk * jnp.asarray(ctx.state).astype(shrunk.dtype)
        return fusion.rounded(shrunk, x.dtype)

    def _shrunk(self, x: jax.Array, axis: int) -> jax.Array:
        """In float32: a threshold subtracted in bf16 would make ties."""
        axis = groups.position(x.ndim, axis)
        if self.n == self.m:
            return groups.wide(x)
        g = groups.split(x, axis, self.m)
        if self.m <= 4:  # member by member, so that XLA fuses it into one pass
            return jnp.concatenate(_shrunk(groups.members(g, axis + 1), self.n), axis + 1).reshape(x.shape)
        kept, w = groups.split(self.mask(x, axis), axis, self.m), groups.wide(g)
        t = jnp.max(jnp.where(kept, 0.0, jnp.abs(w)), axis + 1, keepdims=True)
        return _beyond(w, t, kept).reshape(x.shape)

    @property
    def by_members(self) -> bool:
        return self.scale != "now"  # that scale is a sum over the whole array

    def of_members(self, x: list[jax.Array], u: jax.Array | None = None, state: Any = None) -> list[jax.Array]:
        scale = state if self.remembers and state is not None else 1.0
        return [(v * scale).astype(x[0].dtype) for v in _shrunk(x, self.n)]

    def growth(self, state: Any = None) -> Any:
        return jnp.abs(state) if self.remembers and state is not None else 1.0

    def mask(self, x: jax.Array, axis: int = -1, ctx: Ctx = Ctx()) -> jax.Array:
        """The n largest magnitudes, where the result may be other than zero: what flip rates count."""
        return groups.top(x, axis, self.n, self.m)

    @property
    def stateful(self) -> bool:
        return False  # without state the scale is 1

    @property
    def remembers(self) -> bool:
        return self.scale == "frozen"

    def init(self, x: jax.Array, axis: int = -1, ctx: Ctx = Ctx()) -> jax.Array | None:
        """beta, the scale of least squared error."""
        return self._best(x, self._shrunk(x, axis)) if self.remembers else None

    def _best(self, x: jax.Array, s: jax.Array) -> jax.Array:
        energy = jnp.sum(s * s)
        return jnp.where(energy > 0, jnp.sum(groups.wide(x) * s) / jnp.where(energy > 0, energy, 1.0), 1.0)

    def refresh(self, x: jax.Array, axis: int = -1, ctx: Ctx = Ctx()) -> jax.Array | None:
        """beta as it was: frozen."""
        if not self.remembers:
            return None
        if ctx.state is None:
            raise ValueError(f"{self} keeps its scale, and was given none: pass what its init(x, axis) makes as state.")
        return ctx.state


def _shrunk(members, n):
    """The members of a group less the largest magnitude that is dropped."""
    w = [groups.wide(v) for v in members]
    order = [groups.magnitude(v) for v in w]  # of float32: XLA shuffles 16-bit integers at twice the cost
    kept = []
    for i, mine in enumerate(order):
        ahead = [other >= mine if j < i else other > mine for j, other in enumerate(order) if j != i]
        kept.append(sum(a.astype(jnp.int32) for a in ahead) < n)
    t = functools.reduce(jnp.maximum, (jnp.where(k, 0.0, jnp.abs(v)) for k, v in zip(kept, w, strict=True)))
    return [_beyond(v, t, k) for v, k in zip(w, kept, strict=True)]


def _beyond(w, t, kept):
    """What of a kept value lies beyond the threshold. NaN as it is, and NaN where an infinity meets another."""
    within = (jnp.abs(w) <= t) & (t < jnp.inf)
    return jnp.where(kept & ~within, jnp.sign(w) * (jnp.abs(w) - t), 0.0)
