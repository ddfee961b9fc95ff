"""Rows: one n:m choice along the contraction that all columns share.

A product sums over its contraction, term by term: dw is the sum over tokens t of ``x_t^T g_t``. If a whole row g_t is
dropped, its term is dropped, and nothing of it has to be multiplied. So a product with such an operand can be
computed without sparse tensor cores, on any device: `nmjax.products.compaction` gathers n of every m rows of both
operands and multiplies what is left.

Sampling the terms of a matrix product is known as column-row sampling (Drineas, Kannan and Mahoney 2006). Its training
forms are WTA-CRS (Liu et al. 2023) and VCAS (Wang et al. 2024). Here the choice is n:m, so shapes are static.

The variance of one term, kept with probability p_t and divided by it, is ``(1 / p_t - 1) * |x_t|^2 * |g_t|^2``. For a
given n:m, `mvue` of the weights ``|x_t| * |g_t|`` has the least sum of the variances of single terms, and `mvue` of the
weights ``|g_t|`` has the least variance of g. For 1:m the first is the least variance of dw too. For a larger n, rows
of a group that are kept together add their covariance.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from nmjax.core import fusion, groups
from nmjax.core.bases import ByParts, inner_at
from nmjax.core.context import Axes, Ctx
from nmjax.core.pruner import Facts, Pruner, check_inner
from nmjax.pruners.input_norms import needs_norms
from nmjax.pruners.nothing import identity


@dataclass(frozen=True, repr=False)
class rows(ByParts):
    """Prune whole rows: ``p`` prunes the L2 norms of the rows, and each row is multiplied by p(norm)/norm.

    A row is all that an array holds at one position along the axis. For a gradient of shape [tokens, features] it is
    the gradient of one token. With `mvue` the result is unbiased. With `mse` the largest rows are kept as they are.

    A product with such an operand needs to multiply n of m rows only. Where this is expected to be faster, the
    backend "auto" does so.

    Norms are computed in float32, or in float64 for such arrays.

    Args:
      p: A pruner of the norms, such as ``mvue(1, 4)``.
      by: The weights that ``p`` prunes. "own": the norms of the rows. "both": these times the norms of the rows of
        the product's other operand. Only backward slots allow "both".

    Raises:
      TypeError: ``p`` is not a pruner.
      ValueError: ``p`` has no meaning for norms, or ``by`` is neither of the two.

    >>> import nmjax as nm
    >>> nm.rows(nm.mse(1, 2))(jnp.array([[1., 2.], [3., 1.]]), axis=0)
    Array([[0., 0.],
           [3., 1.]], dtype=float32)
    """

    p: Pruner
    by: str = "own"
    reads_step = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_inner(self, self.p)
        if self.by not in ("own", "both"):
            raise ValueError(f"{self}: by must be 'own' or 'both'.")
        reason = meaningless(self.p, "rows")
        if reason is not None:
            raise ValueError(f"{self}: {reason}")

    def describe(self) -> Facts:
        p, both = self.p.facts, self.by == "both"
        return super().describe()._replace(reads_partner=both, pattern=p.pattern, selects=p.selects, keeps_zeros=True)

    def __call__(self, x: jax.Array, axis: int = -1, ctx: Ctx = Ctx()) -> jax.Array:
        return scaled(x, self.scales(x, axis, ctx))

    def mask(self, x: jax.Array, axis: int = -1, ctx: Ctx = Ctx()) -> jax.Array:
        weights, inner = self._weights(x, axis, ctx)
        return jnp.broadcast_to(self.p.mask(weights, axis, inner), x.shape)

    def scales(self, x: Float[Array, "..."], axis: int = -1, ctx: Ctx = Ctx()) -> Float[Array, "..."]:
        """Return the factor of every row, 0 for a dropped one.

        Args:
          x: An array of floating-point numbers.
          axis: The axis that groups lie along.
          ctx: Key, step and state; the axes along which rows differ beside ``axis``; and the norms of the other
            operand, if ``by`` is "both".

        Returns:
          Factors, with length 1 along the axes that rows have.
        """
        weights, inner = self._weights(x, axis, ctx)
        if self.p.facts.selects:
            return self.p.mask(weights, axis, inner).astype(weights.dtype)
        kept = self.p(weights, axis, inner)
        same, none = kept == weights, kept == 0  # infinities are kept as they are, and NaN stays NaN
        ratio = kept / jnp.where(same | none, 1, weights)
        return jnp.where(none, 0, jnp.where(same, 1, ratio))

    def _weights(self, x: jax.Array, axis: int, ctx: Ctx) -> tuple[jax.Array, Ctx]:
        """Return the weights that ``p`` prunes, and its context."""
        axis = groups.position(x.ndim, axis)
        apart = () if ctx.axes is None else ctx.axes.apart
        weights = norms(x, (axis, *apart))
        if self.by == "both":
            if ctx.partner is None:
                raise ValueError(
                    f"{self} reads the norms of the other operand of a product, and there is none. Use it in a "
                    "backward slot, or write by='own'."
                )
            weights = _relative(weights, axis, self.p.facts.block) * _relative(ctx.partner, axis, self.p.facts.block)
        return weights, ctx.replace(axes=Axes(None, ()), partner=None)

    def at(self, step: int) -> Pruner:
        now = inner_at(self.p, step)
        if now == identity:
            return now
        return self if meaningless(now, "rows") else replace(self, p=now)

    @property
    def final(self) -> Pruner:
        final = self.p.final
        return final if final == identity else rows(final, self.by)

    def init(self, x: jax.Array, axis: int = -1, ctx: Ctx = Ctx()) -> Any:
        return self._state(x, axis, ctx, "init")

    def refresh(self, x: jax.Array, axis: int = -1, ctx: Ctx = Ctx()) -> Any:
        return self._state(x, axis, ctx, "refresh")

    def _state(self, x: jax.Array, axis: int, ctx: Ctx, make: str) -> Any:
        if not self.p.facts.has_state:
            return None
        weights, inner = self._weights(x, axis, ctx)
        return getattr(self.p, make)(weights, axis, inner)


def _relative(size: jax.Array, axis: int, m: int) -> jax.Array:
    """Return norms relative to the largest of their group, so that products neither overflow nor vanish."""
    split = groups.split(size, axis, m)
    most = jnp.max(split, axis + 1, keepdims=True)
    scaled = split / jnp.where((most > 0) & jnp.isfinite(most), most, 1)
    return groups.unsplit(scaled, axis)


def meaningless(p: Pruner, name: str) -> str | None:
    """Return why a pruner cannot prune norms, and what to write instead; None if it can.

    Args:
      p: The pruner.
      name: The pruner that it would stand in, "rows" or "pairs".
    """
    instead = f"Write {name}(mse(2,4))."
    if p.facts.block == 1:
        return f"{name} needs a pruner with groups, such as mse(2,4) or mvue(1,4)."
    if p.facts.tiles:
        return f"{p} prunes along two axes, and the norms of {name} have one. {instead}"
    if p.facts.reorders:
        return f"{p} changes the order of the groups, and {name} needs consecutive ones. {instead}"
    if (storage := p.normal_form().storage) is not None:
        return f"{storage} rounds values, and norms are not rounded. Round after it: chain({name}(mse(2,4)),{storage})."
    if needs_norms(p):
        return f"{p} reads norms of the inputs, which {name} has not. {instead}"
    if p.facts.reads_gradient:
        return f"{p} reads gradients, and those of norms are not known. {instead}"
    if has_rows(p):
        return f"rows cannot stand inside {name}. {instead}"
    return None


def has_rows(p: Pruner) -> bool:
    """Return True if a pruner is a `rows`, or a part of it is one.

    >>> import nmjax as nm
    >>> has_rows(nm.hold(nm.rows(nm.mse(2, 4)))), has_rows(nm.mse(2, 4))
    (True, False)
    """
    return isinstance(p, rows) or any(map(has_rows, p.parts))


def scaled(x: Float[Array, "..."], scales: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return rows times their factors. A factor of 0 gives zeros, also for infinities and NaN.

    Args:
      x: An array.
      scales: Factors that are broadcast with it, as `rows.scales` returns them.

    >>> scaled(jnp.array([[1., 2.], [jnp.nan, 3.]]), jnp.array([[2.], [0.]]))
    Array([[2., 4.],
           [0., 0.]], dtype=float32)
    """
    return fusion.rounded(jnp.where(scales == 0, 0, groups.wide(x) * scales), x.dtype)


def norms(x: Float[Array, "..."], kept: tuple[int, ...]) -> Float[Array, "..."]:
    """Return the L2 norms over all other axes, without overflow or underflow of the squares.

    Each row is divided by a power of two near its largest value, which is exact.

    Args:
      x: An array of floating-point numbers.
      kept: The axes that are not summed over.

    Returns:
      Norms in at least float32, with length 1 along the other axes.

    >>> norms(jnp.array([[3e30, 4e30], [3e-30, 4e-30]]), (0,))
    Array([[5.e+30],
           [5.e-30]], dtype=float32)
    """
    over = tuple(a for a in range(x.ndim) if a not in kept)
    if not over:
        return jnp.abs(groups.wide(x))
    wide = groups.wide(x)
    most = lax.stop_gradient(jnp.max(jnp.abs(wide), over, keepdims=True, initial=0))
    power = _power_of_two(most)
    return _root(jnp.sum(jnp.square(wide * (1 / power)), over, keepdims=True)) * power


def _power_of_two(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return a power of two near each positive number, in a range that has inverses; 1 for what is not finite."""
    kind = jnp.finfo(x.dtype)
    limit = x.dtype.type(2.0 ** (kind.maxexp - 2))
    power = lax.reduce_precision(jnp.clip(x, 1 / limit, limit), kind.nexp, 0)
    return jnp.where(jnp.isfinite(x), power, jnp.ones((), x.dtype))


def _root(squares: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return the square root, with a derivative of 0 at 0."""
    positive = squares != 0
    return jnp.where(positive, jnp.sqrt(jnp.where(positive, squares, 1)), 0)
