"""Transposable masks: n:m along both axes of a weight, so that one mask serves the forward product and dX.

Hubara et al., "Accelerated Sparse Neural Training" (arXiv 2102.08124) and Hu et al., "Accelerating Transformer
Pre-training with 2:4 Sparsity" (arXiv 2404.01847): in every m x m tile choose the mask with n ones in each row and column
that keeps the largest sum of magnitudes.

2:4 is solved exactly. Of the 90 masks of a tile, two rows have 36 forms but only 19 column counts; the best form of the
upper half with counts c goes with the best of the lower half with counts 2 - c. Other n:m are solved by prices: what a
column must charge so that n rows want it while every row takes its n best, then repaired and polished. Always n of m both
ways; within 0.02 % of the optimum on average at 4:8 and 8:16.
"""

import itertools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from nmjax.core import fusion, groups
from nmjax.core.context import Ctx
from nmjax.core.pruner import Grouped, Pattern

_HUGE = 2.0**124  # what inf, NaN and anything larger weigh: eight of them add up without overflow


@dataclass(frozen=True, repr=False)
class transposable(Grouped):
    """Keep n of every m along ``axis`` and along the weight's other axis, with the largest sum of magnitudes.

    >>> tile = jnp.array([[4., 3., 2., 1.], [-1., -3., .6, .5], [1., 2., 3., 4.], [10., 2., -1., 5.]])
    >>> transposable(2, 4).mask(tile).astype(int)
    Array([[1, 1, 0, 0],
           [0, 1, 1, 0],
           [0, 0, 1, 1],
           [1, 0, 0, 1]], dtype=int32)
    """

    reads_step = False

    def __call__(self, x: jax.Array, axis: int = -1, ctx: Ctx = Ctx()) -> jax.Array:
        return jnp.where(self.mask(x, axis, ctx), x, jnp.zeros((), x.dtype))

    @property
    def selects(self) -> bool:
        return True

    def mask(self, x: jax.Array, axis: int = -1, ctx: Ctx = Ctx()) -> jax.Array:
        axis, m = groups.position(x.ndim, axis), self.m
        other = ctx.axes_of(x.ndim, axis).other
        if other is None or x.shape[other] % m:
            raise ValueError(
                f"{self} prunes both axes of a weight: beside axis {axis} of an array of shape {x.shape} it needs "
                + (
                    "another axis."
                    if other is None
                    else f"axis {other} to divide by {m}. Leave this weight dense, or use mse({self.n},{m})."
                )
            )
        first, second = sorted((axis, other))
        tiles = groups.split(groups.split(x, second, m), first, m)
        rows, columns = first + 1, second + 2  # of a tile
        size = _weight(tiles)
        if (self.n, m) == (2, 4):
            kept = _halves(size, rows, columns)
        else:
            inner = jnp.moveaxis(size, (rows, columns), (-2, -1))
            kept = jnp.moveaxis(_priced(inner, self.n), (-2, -1), (rows, columns))
        return groups.unsplit(groups.unsplit(kept, second + 1), first)

    @property
    def tiles(self) -> bool:
        return True

    @property
    def pattern_across(self) -> Pattern | None:
        return self.pattern

    def kept_across(self, step: int | None = None) -> float:
        return self.kept(step)

    @property
    def by_tile(self) -> bool:
        return (self.n, self.m) == (2, 4)

    def of_tile(self, x: list[list[jax.Array]]) -> list[list[jax.Array]]:
        word = _best_word([[_weight(v) for v in row] for row in x])
        keep = lambda i, j: (word >> np.int32(4 * i + j)) & 1 == 1
        zero = jnp.zeros((), x[0][0].dtype)
        return [[jnp.where(keep(i, j), v, zero) for j, v in enumerate(row)] for i, row in enumerate(x)]


def _weight(x):
    size = jnp.abs(groups.wide(x))
    return jnp.where(size < _HUGE, size, _HUGE)


# ---- 2:4, exactly ----

_PAIRS = tuple(itertools.combinations(range(4), 2))


def _forms() -> dict[tuple[int, ...], list[tuple[int, int]]]:
    """Column counts of two rows -> the pair choices (one pair a row) that give them: 19 counts, 36 forms."""
    forms = {}
    for p, q in itertools.product(range(6), repeat=2):
        forms.setdefault(tuple((j in _PAIRS[p]) + (j in _PAIRS[q]) for j in range(4)), []).append((p, q))
    return forms


def _halves(size, rows, columns):
    """Mask of the best of the 90 tiles, straight-line: bit 4 i + j of a word a tile says whether (i, j) is kept."""
    word = _best_word([groups.members(row, columns) for row in groups.members(size, rows)])
    place = 4 * lax.broadcasted_iota(jnp.int32, size.shape, rows) + lax.broadcasted_iota(jnp.int32, size.shape, columns)
    return (fusion.settled(word.astype(size.dtype)).astype(jnp.int32) >> place) & 1 == 1


def _best_word(a):
    """The mask bits of the best tile, of 4 x 4 arrays of magnitudes."""
    upper, lower = _best_forms(a[:2]), _best_forms(a[2:])
    best, word = None, None
    for counts, (value, bits) in upper.items():
        value_below, bits_below = lower[tuple(2 - c for c in counts)]
        total, joint = value + value_below, bits | bits_below << 8
        if best is None:
            best, word = total, joint
        else:
            better = total > best
            best, word = jnp.where(better, total, best), jnp.where(better, joint, word)
    return word


def _best_forms(pair_of_rows):
    """For each of the 19 column counts the best value and its 8 mask bits."""
    sums = [[row[i] + row[j] for i, j in _PAIRS] for row in pair_of_rows]
    bits = [[(1 << i | 1 << j) << 4 * r for i, j in _PAIRS] for r in range(2)]
    best = {}
    for counts, forms in _forms().items():
        for p, q in forms:
            value, word = sums[0][p] + sums[1][q], jnp.int32(bits[0][p] | bits[1][q])
            if counts not in best:
                best[counts] = value, word
            else:
                better = value > best[counts][0]
                best[counts] = jnp.where(better, value, best[counts][0]), jnp.where(better, word, best[counts][1])
    return best


# ---- any n:m, nearly ----


def _priced(a, n, rounds=16):
    """Mask (..., m, m) with exactly n ones in every row and column."""
    m = a.shape[-1]
    if n == m:
        return jnp.ones_like(a, bool)
    flip = lambda v: jnp.swapaxes(v, -2, -1)
    tied = a * jnp.broadcast_to(_tie_breaker(m, a.dtype), a.shape)  # for the prices alone

    def price(_, v):
        return flip(_cut(flip(tied - _cut(tied - v, n)), n))

    v = lax.fori_loop(0, rounds, price, jnp.zeros_like(a[..., :1, :]))
    kept = _row_top(tied - v, n)
    kept = lax.fori_loop(0, n * (m - n), lambda _, s: _repaired(a, s, n), kept)
    return lax.fori_loop(0, m, lambda r, s: _traded(a, s, r), kept)


def _tie_breaker(m, dtype):
    i, j = np.mgrid[:m, :m]
    return jnp.asarray(1 + 1e-3 * ((i * 0.618034 + j * 0.7548777 + i * j * 0.41421) % 1), dtype)


def _row_top(x, n):
    """The n largest of every row; of equals, row i takes columns i, i + 1, ... first, so that equal rows differ."""
    m, mine, theirs = x.shape[-1], x[..., :, None], x[..., None, :]
    row, j, k = np.mgrid[:m, :m, :m]
    first = ((k - row) % m < (j - row) % m).reshape((1,) * (x.ndim - 2) + (m, m, m))
    ahead = (theirs > mine) | ((theirs == mine) & first)
    return jnp.sum(ahead, -1, dtype=jnp.int32) < n


def _cut(x, n):
    """Half way between the n-th and the next largest of every row."""
    kept = _row_top(x, n)
    least = jnp.min(jnp.where(kept, x, jnp.inf), -1, keepdims=True)
    return (least + jnp.max(jnp.where(kept, -jnp.inf, x), -1, keepdims=True)) / 2


def _at(index, m):
    return index[..., None] == lax.broadcasted_iota(index.dtype, (*index.shape, m), index.ndim)


def _repaired(a, kept, n):
    """Move one unit of one row from an overfull column to an underfull one, at the least loss. While a column is off such
    a row exists, and no more than n * (m - n) units are in excess."""
    count = jnp.sum(kept, -2, keepdims=True, dtype=jnp.int32)
    give = jnp.where(kept & (count > n), a, jnp.inf)
    take = jnp.where(~kept & (count < n), a, -jnp.inf)
    loss = jnp.min(give, -1) - jnp.max(take, -1)
    row = _at(jnp.argmin(loss, -1), a.shape[-1]) & (loss < jnp.inf)
    return kept ^ (row[..., None] & (_at(jnp.argmin(give, -1), a.shape[-1]) | _at(jnp.argmax(take, -1), a.shape[-1])))


def _traded(a, kept, r):
    """Rows i and r - i trade one column each way where that gains: disjoint pairs, and m rounds meet every pair."""
    m = a.shape[-1]
    partner = lambda v: jnp.roll(jnp.flip(v, -2), r + 1, -2)  # row r - i, in place of row i
    theirs, b = partner(kept), partner(a)
    give, take = jnp.where(kept & ~theirs, b - a, -jnp.inf), jnp.where(theirs & ~kept, a - b, -jnp.inf)
    gains = jnp.max(give, -1) + jnp.max(take, -1) > 0
    return kept ^ (gains[..., None] & (_at(jnp.argmax(give, -1), m) | _at(jnp.argmax(take, -1), m)))
