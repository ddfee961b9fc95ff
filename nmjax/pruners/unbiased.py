"""Minimum-variance unbiased estimation: the exact optimum for any n:m.

Chmiel et al., "Minimum Variance Unbiased N:M Sparsity for the Neural Gradients" (arXiv 2203.10991). Of all random blocks
theta with at most n non-zeros and E theta = g, the least total variance has inclusion probabilities and values::

    p_i = min(1, |g_i| / tau),  sum p_i = n          theta_i = g_i / p_i = sign(g_i) * max(|g_i|, tau)

(by Cauchy-Schwarz E theta_i^2 >= g_i^2 / p_i; the rest is convex). 2:4 gives the paper's three-case table. Which n of m
are kept is decided by systematic sampling with one uniform u in [0, 1): lay the unsaturated magnitudes end to end and
keep those that the points (u + j) * tau fall upon. The L1 norm of a group is the same in every draw.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from nmjax.core import fusion, groups, random
from nmjax.core.context import Ctx
from nmjax.core.pruner import Grouped


@dataclass(frozen=True, repr=False)
class mvue(Grouped):
    """Keep n of every m at random, unbiased and with the least variance there is.

    >>> mvue(2, 4)(jnp.array([1., 2., 3., -4.]), ctx=Ctx(key=0))
    Array([5., 0., 5., 0.], dtype=float32)
    """

    reads_step = False

    @property
    def stochastic(self) -> bool:
        return True

    def __call__(self, x: jax.Array, axis: int = -1, ctx: Ctx = Ctx()) -> jax.Array:
        return self.sample(x, self.draw(x, axis, ctx), axis)

    def draw(self, x: jax.Array, axis: int = -1, ctx: Ctx = Ctx()) -> jax.Array:
        """One uniform for every group: shaped like ``x`` with ``axis`` divided by m."""
        return group_uniforms(x, axis, self.m, ctx)

    def sample(self, x: jax.Array, u: jax.Array, axis: int = -1) -> jax.Array:
        """The pruned array of the uniforms ``u``."""
        axis = groups.position(x.ndim, axis)
        g, u = groups.split(x, axis, self.m), jnp.expand_dims(u, axis + 1)
        u = u.astype(groups.wide(x).dtype)
        way = _single if self.n == 1 else _unrolled if self.m <= 16 else _whole
        return way(g, u, axis + 1, self.n).reshape(x.shape)

    @property
    def by_members(self) -> bool:
        return True

    def of_members(self, x: list[jax.Array], u: jax.Array | None = None, state: Any = None) -> list[jax.Array]:
        wide = [groups.wide(v) for v in x]
        hits, tau = chosen(wide, u, self.n)
        tau = tau.astype(x[0].dtype).astype(wide[0].dtype)
        return [jnp.where(hit, _value(v, tau), 0.0).astype(x[0].dtype) for hit, v in zip(hits, wide, strict=True)]

    def growth(self, state: Any = None) -> float:
        return self.m / self.n


def group_uniforms(x: jax.Array, axis: int, m: int, ctx: Ctx) -> jax.Array:
    """One uniform for every group along an axis."""
    axis = groups.position(x.ndim, axis)
    shape = (*x.shape[:axis], x.shape[axis] // m, *x.shape[axis + 1 :])
    return random.uniform(random.words(ctx.key), shape)


def weights(size: jax.Array, m: int) -> jax.Array:
    """Magnitudes to choose by: inf and NaN, and what is so large that m of it would not add up, weigh the same."""
    most = float(jnp.finfo(size.dtype).max) / (4 * m)
    return jnp.where(size < most, size, most)


# Three ways to the same draw, for what they cost: where the choice is one index, one bit a member, or a running sum.


def _single(g, u, axis, n):
    """1:m. tau is the whole mass, and the index of the choice counts the members that end before its point."""
    a = [weights(jnp.abs(groups.wide(v)), g.shape[axis]) for v in groups.members(g, axis)]
    mass = sum(a)
    point, upto, index = u * mass, jnp.zeros_like(u), jnp.zeros_like(u)
    for v in a:
        upto = upto + v
        index = index + ((upto <= point) & (upto < mass)).astype(u.dtype)
    chosen = fusion.settled(index).astype(jnp.int32)
    hit = lax.broadcasted_iota(jnp.int32, g.shape, axis) == chosen
    return _written(g, hit, mass)


def _unrolled(g, u, axis, n):
    """Member by member."""
    hits, tau = chosen([groups.wide(v) for v in groups.members(g, axis)], u, n)
    return _written(g, fusion.spread(hits, g.shape, axis), tau)


def chosen(x: list[jax.Array], u: jax.Array, n: int) -> tuple[list[jax.Array], jax.Array]:
    """Which members of groups a draw keeps, and tau. Without a multiplication that is added to, which a GPU would round
    once where a CPU rounds twice: kernels choose by this too, and choose the same."""
    a = [weights(jnp.abs(v), len(x)) for v in x]
    sat, left, rest = [jnp.zeros_like(v, bool) for v in a], jnp.full_like(u, n), sum(a)
    for _ in range(n - 1):
        sat = [s | ((v * left >= rest) & (v > 0)) for s, v in zip(sat, a, strict=True)]
        left = n - sum(s.astype(u.dtype) for s in sat)
        rest = sum(jnp.where(s, 0.0, v) for s, v in zip(sat, a, strict=True))
    share = sum(jnp.where(left == j, 1 / j, 0.0) for j in range(1, n + 1))  # 1 / left
    tau = rest * share.astype(u.dtype)
    points = [(u + j) * tau for j in range(n)]
    upto, before, hits = jnp.zeros_like(u), jnp.zeros_like(u), []
    for v, s in zip(a, sat, strict=True):
        upto = upto + jnp.where(s, 0.0, v)
        passed = jnp.minimum(sum((point < upto).astype(u.dtype) for point in points), left)
        passed = jnp.where(rest > 0, jnp.where(upto >= rest, left, passed), 0.0)  # all of them where the mass ends
        hits.append(s | (passed > before))
        before = passed
    return hits, tau


def _whole(g, u, axis, n):
    """With reductions and a running sum along the members."""
    a = weights(jnp.abs(groups.wide(g)), g.shape[axis])
    total = lambda v: jnp.sum(v, axis, keepdims=True)
    sat, left, rest = jnp.zeros_like(a, bool), jnp.full_like(u, n), total(a)
    for _ in range(n - 1):
        sat = sat | ((a * left >= rest) & (a > 0))
        left = n - total(sat.astype(u.dtype))
        rest = total(jnp.where(sat, 0.0, a))
    upto = lax.cumsum(jnp.where(sat, 0.0, a), axis)
    rest = lax.slice_in_dim(upto, upto.shape[axis] - 1, upto.shape[axis], axis=axis)
    tau, per_tau = _threshold(rest, left)
    points = _points(upto, rest, per_tau, u, left)
    before = lax.pad(points, jnp.zeros((), u.dtype), [(int(d == axis), -int(d == axis), 0) for d in range(g.ndim)])
    return _written(g, sat | (points > before), tau)


def _threshold(rest, left):
    """tau = what is left of the mass, over what is left of the n; 0 where nothing is."""
    tau = jnp.where(left > 0, rest / jnp.maximum(left, 1), 0.0)
    return tau, jnp.where(tau > 0, 1 / tau, 0.0)


def _points(upto, rest, per_tau, u, left):
    """How many points (u + j) * tau lie before ``upto``. All of them where the mass ends, whatever rounding says."""
    before = jnp.minimum(jnp.ceil(upto * per_tau - u), left)
    return jnp.where(rest > 0, jnp.where(upto >= rest, left, before), 0.0)


def _written(g, hit, tau):
    """The result, of choices and thresholds a group."""
    tau = fusion.settled(_as_stored(tau, g))
    return fusion.rounded(jnp.where(hit, _value(groups.wide(g), tau), 0.0), g.dtype)


def _value(x, tau):
    """sign(x) * max(|x|, tau); NaN as it is."""
    return jnp.where(jnp.abs(x) < tau, jnp.where(x < 0, -tau, tau), x)


def _as_stored(tau, g):
    """tau as the result's dtype will hold it: rounded once a group, not once a value."""
    return lax.reduce_precision(tau, 8, 7) if g.dtype == jnp.bfloat16 else tau
