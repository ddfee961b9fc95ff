"""Minimum-variance unbiased estimation: the exact optimum for any n:m.

Chmiel et al., "Minimum Variance Unbiased N:M Sparsity for the Neural Gradients" (arXiv 2203.10991). Consider all random
blocks theta with at most n non-zeros and E theta = g. The total variance is least for these inclusion probabilities and
values::

    p_i = min(1, |g_i| / tau),  sum p_i = n          theta_i = g_i / p_i = sign(g_i) * max(|g_i|, tau)

The proof: E theta_i^2 >= g_i^2 / p_i by Cauchy-Schwarz, and minimizing the sum of these bounds is a convex problem. For
2:4 the result is the paper's table of three cases.

Systematic sampling with one uniform u in [0, 1) chooses the n of m. Members with |g_i| >= tau are *saturated*: p_i = 1,
and they are always kept. The magnitudes of the others are laid end to end, and a member is kept if one of the points
(u + j) * tau falls on it. The L1 norm of a group is the same in every draw.
"""

import itertools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32

from nmjax.core import fusion, groups, random
from nmjax.core.bases import Grouped
from nmjax.core.context import Ctx
from nmjax.core.pruner import Facts, KernelForm


@dataclass(frozen=True, repr=False)
class mvue(Grouped):
    """Keep n of every m values at random, unbiased and with the least possible variance.

    Paper: Chmiel et al., "Minimum Variance Unbiased N:M Sparsity for the Neural Gradients", arXiv:2203.10991.

    The expected result is the array itself, E[p(g)] = g. For a threshold tau of each group, a value g_i is kept with
    probability ``min(1, |g_i| / tau)``, and a kept value becomes ``sign(g_i) * max(|g_i|, tau)``. It is infinite if
    tau overflows, in float16 above 65,504. Infinities and NaN are kept first.

    Probabilities are multiples of 2**-23. Tau is rounded once to the dtype of the array. CPUs treat subnormal numbers
    as zero.

    Args:
      n: The number of values to keep in each group.
      m: The size of a group.

    Raises:
      TypeError: ``n`` or ``m`` is not an integer.
      ValueError: ``n`` does not lie between 1 and ``m``.

    >>> mvue(2, 4)(jnp.array([1., 2., 3., -4.]), ctx=Ctx(key=0))
    Array([5., 0., 5., 0.], dtype=float32)
    """

    reads_step = False

    def describe(self) -> Facts:
        return super().describe()._replace(stochastic=True, keeps_zeros=True)

    def __call__(self, x: jax.Array, axis: int = -1, ctx: Ctx = Ctx()) -> jax.Array:
        pruned = self.in_one_pass(x, axis, ctx)
        return self.sample(x, self.draw(x, axis, ctx), axis) if pruned is None else pruned

    def draw(self, x: Float[Array, "..."], axis: int = -1, ctx: Ctx = Ctx()) -> Float32[Array, "..."]:
        """Return the random numbers of a call: one uniform in [0, 1) for every group.

        Raises:
          TypeError: ``ctx`` has no key.
        """
        return group_uniforms(x, axis, self.m, ctx)

    def sample(self, x: Float[Array, "..."], u: Float[Array, "..."], axis: int = -1) -> Float[Array, "..."]:
        """Return the pruned array, given the random numbers.

        Args:
          x: An array of floating-point numbers.
          u: One uniform for every group, as `draw` returns it.
          axis: The axis that groups lie along.
        """
        axis = groups.position(x.ndim, axis)
        g, u = groups.split(x, axis, self.m), jnp.expand_dims(u, axis + 1)
        u = u.astype(groups.wide(x).dtype)
        if self.n == 1:
            return _single(g, u, axis + 1).reshape(x.shape)
        if self.m <= 16:
            return _unrolled(g, u, axis + 1, self.n).reshape(x.shape)
        return _whole(g, u, axis + 1, self.n).reshape(x.shape)

    @property
    def kernel_form(self) -> KernelForm:
        return KernelForm(self._members, growth=lambda state: self.m / self.n)

    def _members(self, x: list[jax.Array], u: Any, state: Any) -> list[jax.Array]:
        if u is None:
            raise TypeError(f"{self} draws random numbers: pass one uniform for every group as u.")
        wide = [groups.wide(v) for v in x]
        hits, tau = chosen(wide, u, self.n)
        return [jnp.where(hit, _value(v, tau), 0.0) for hit, v in zip(hits, wide, strict=True)]


def group_uniforms(x: Float[Array, "..."], axis: int, m: int, ctx: Ctx) -> Float32[Array, "..."]:
    """Return one uniform in [0, 1) for every group.

    Args:
      x: An array.
      axis: The axis that groups lie along.
      m: The size of a group.
      ctx: The context. Only its key is read.

    Returns:
      Numbers of the shape of ``x`` with the length of ``axis`` divided by m.
    """
    axis = groups.position(x.ndim, axis)
    shape = (*x.shape[:axis], x.shape[axis] // m, *x.shape[axis + 1 :])
    return random.uniform(random.words(ctx.key), shape)


def weights(size: list[jax.Array]) -> tuple[list[jax.Array], jax.Array]:
    """Return the weights that members of groups are drawn by: their magnitudes, scaled so that no sum overflows.

    Args:
      size: The magnitudes of the members, one array for each of the m positions, in at least float32.

    Returns:
      For every member its weight; and for every group the factor that undoes its scale, as `scales` returns it.
    """
    scale, undo, most = scales(fusion.total(size), len(size))
    return [_limited(v * scale, most) for v in size], undo


def scales(mass: jax.Array, m: int) -> tuple[jax.Array, jax.Array, float]:
    """Return the scale of the finite members of a group, its reciprocal, and the weight of infinities and NaN.

    The scale is 1, except in *large* groups: those in which a sum could overflow, or not all members are finite. All
    scales are powers of two. In a large group an infinity or NaN weighs at least 2**26 times as much as all finite
    members together.

    Args:
      mass: The sum of all magnitudes of a group, with overflow.
      m: The size of a group.
    """
    info, bits = jnp.finfo(mass.dtype), (m - 1).bit_length()
    most, smaller = 2.0 ** (info.maxexp - 2 - bits), 2.0 ** -(30 + 2 * bits)
    fits = mass < most  # False for NaN
    scale, undo = (jnp.where(fits, 1.0, mass.dtype.type(v)) for v in (smaller, 1 / smaller))
    return scale, undo, most


def _limited(size: jax.Array, most: float) -> jax.Array:
    """Return scaled magnitudes, and ``most`` for infinities and NaN, with one instruction of a CPU."""
    return jnp.where(size < most, size, most)


def above_zero(u: jax.Array, undo: jax.Array) -> jax.Array:
    """Return uniforms that are not 0 in a large group, where 0 would draw a finite member in place of NaN.

    Args:
      u: Uniforms in [0, 1), multiples of 2**-23.
      undo: The factor that undoes the scale of a group.
    """
    return jnp.maximum(u, jnp.where(undo > 1, jnp.asarray(2.0**-24, u.dtype), 0))  # a select needs equal shardings


# Three ways compute the same draw, each the fastest for some n:m: one index per group for 1:m, one bit per member for
# small m, and a running sum for large m.


def _single(g: jax.Array, u: jax.Array, axis: int) -> jax.Array:
    """Draw 1:m. tau is the sum of all magnitudes, and one member is kept: that on which the point u * tau falls."""
    a, undo = weights([jnp.abs(groups.wide(v)) for v in groups.members(g, axis)])
    mass, u = fusion.total(a), above_zero(u, undo)
    point, upto, index = u * mass, jnp.zeros_like(u), jnp.zeros_like(u)
    for v in a:
        upto = upto + v
        index = index + ((upto <= point) & (upto < mass)).astype(u.dtype)
    kept = fusion.whole(fusion.compute_once(index), g.shape[axis] + 1)
    hit = lax.broadcasted_iota(jnp.int32, g.shape, axis) == kept
    return _result(g, hit, mass * undo)


def _unrolled(g: jax.Array, u: jax.Array, axis: int, n: int) -> jax.Array:
    """Draw member by member."""
    hits, tau = chosen([groups.wide(v) for v in groups.members(g, axis)], u, n)
    return _result(g, fusion.spread(hits, g.shape, axis), tau)


def chosen(x: list[jax.Array], u: jax.Array, n: int) -> tuple[list[jax.Array], jax.Array]:
    """Choose the members that a draw keeps.

    No product is an operand of an addition, because a GPU would round both at once and a CPU one after the other.
    Kernels call this function too, and therefore make the same choices.

    Args:
      x: The members of groups, one array for each of the m positions, in at least float32.
      u: One uniform in [0, 1) for every group.
      n: The number of members to keep.

    Returns:
      For every member a mask of the groups that keep it; and the threshold tau of every group.
    """
    a, undo = weights([jnp.abs(v) for v in x])
    saturated, left, upto = [jnp.zeros_like(v, bool) for v in a], jnp.full_like(u, n, jnp.int32), _sums(a)
    for _ in range(n - 1):
        least = jnp.where(upto[-1] > 0, upto[-1], jnp.inf)  # no zero is saturated
        if n == 2:  # the same, with one product for each group
            saturated = [v >= least * 0.5 for v in a]
        else:
            saturated = [s | (v * left.astype(u.dtype) >= least) for s, v in zip(saturated, a, strict=True)]
        left = n - fusion.total(s.astype(jnp.int32) for s in saturated)
        upto = _sums([jnp.where(s, 0.0, v) for s, v in zip(saturated, a, strict=True)])
    share = jnp.full_like(u, 1 / n)  # 1 / left; where none are left, all that is kept is above tau
    for j in range(1, n):
        share = jnp.where(left == j, 1 / j, share)
    tau, u = upto[-1] * share, above_zero(u, undo)
    kind = np.dtype(f"int{jnp.finfo(u.dtype).bits}")  # numbers that are not negative compare as their bits do
    bits = lambda v: lax.bitcast_convert_type(v, kind)
    hits = list(saturated)
    for j in range(n):
        counts = (left > j) & (upto[-1] > 0)
        end = bits(upto[-1]) - kind.type(1)  # the last sum is beyond every point, despite rounding
        point = jnp.minimum(bits((u + j if j else u) * tau), end)
        point, before = jnp.where(counts, point, kind.type(np.iinfo(kind).max)), jnp.zeros_like(counts)
        for i, passed in enumerate([*(bits(v) > point for v in upto[:-1]), counts]):
            hits[i], before = hits[i] | passed ^ before, passed
    return hits, tau * undo


def _sums(a: list[jax.Array]) -> list[jax.Array]:
    return list(itertools.accumulate(a))


def _whole(g: jax.Array, u: jax.Array, axis: int, n: int) -> jax.Array:
    """Draw with reductions and a running sum along the members."""
    size = jnp.abs(groups.wide(g))
    total = lambda v: jnp.sum(v, axis, keepdims=True)
    scale, undo, most = scales(total(size), g.shape[axis])
    a, u = _limited(size * scale, most), above_zero(u, undo)
    saturated, left, rest = jnp.zeros_like(a, bool), jnp.full_like(u, n), total(a)
    for _ in range(n - 1):
        saturated = saturated | ((a * left >= rest) & (a > 0))
        left = n - total(saturated.astype(u.dtype))
        rest = total(jnp.where(saturated, 0.0, a))
    upto = lax.cumsum(jnp.where(saturated, 0.0, a), axis)
    rest = lax.slice_in_dim(upto, upto.shape[axis] - 1, upto.shape[axis], axis=axis)
    tau, per_tau = _threshold(rest, left)
    points = _points(upto, rest, per_tau, u, left)
    before = lax.pad(points, jnp.zeros((), u.dtype), [(int(d == axis), -int(d == axis), 0) for d in range(g.ndim)])
    return _result(g, saturated | (points > before), tau * undo)


def _threshold(rest: jax.Array, left: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return tau and 1 / tau: the sum of unsaturated magnitudes over the number still to keep; 0 if that is none."""
    tau = jnp.where(left > 0, rest / jnp.maximum(left, 1), 0.0)
    return tau, jnp.where(tau > 0, 1 / tau, 0.0)


def _points(upto: jax.Array, rest: jax.Array, per_tau: jax.Array, u: jax.Array, left: jax.Array) -> jax.Array:
    """Count the points (u + j) * tau below ``upto``. At the end of the sum these are all, despite rounding."""
    before = jnp.minimum(jnp.ceil(upto * per_tau - u), left)
    return jnp.where(rest > 0, jnp.where(upto >= rest, left, before), 0.0)


def _result(g: jax.Array, hit: jax.Array, tau: jax.Array) -> jax.Array:
    """Return the pruned groups, given the mask of kept members and the threshold of every group."""
    tau = fusion.compute_once(_as_stored(tau, g))
    return fusion.rounded(jnp.where(hit, _value(groups.wide(g), tau), 0.0), g.dtype)


def _value(x: jax.Array, tau: jax.Array) -> jax.Array:
    """Return sign(x) * max(|x|, tau), and NaN for NaN."""
    kind = np.dtype(f"uint{jnp.finfo(x.dtype).bits}")
    sign = lax.bitcast_convert_type(x, kind) & kind.type(1 << 8 * kind.itemsize - 1)
    size = lax.bitcast_convert_type(jnp.maximum(jnp.abs(x), tau), kind)
    return lax.bitcast_convert_type(sign | size, x.dtype)


def _as_stored(tau: jax.Array, g: jax.Array) -> jax.Array:
    """Return tau, rounded if the result is bfloat16: once per group instead of once per value."""
    return fusion.rounded(tau, g.dtype).astype(tau.dtype) if g.dtype == jnp.bfloat16 else tau
