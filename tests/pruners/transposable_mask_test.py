"""Masks along both axes, compared with all 90 patterns for 2:4 and with linear programmes for other n:m."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import optimize, sparse

import nmjax as nm
from nmjax.core.context import Axes
from nmjax.pruners import transposable_mask

pytestmark = pytest.mark.sampled

NM = [(2, 4), (1, 2), (1, 4), (2, 6), (2, 8), (4, 8), (8, 16)]
_MASK = jax.jit(lambda p, x, axis, axes: p.mask(x, axis, nm.Ctx(axes=axes)), static_argnums=(0, 2, 3))


def masked(p, x, axis=-1, axes=None):
    return np.asarray(_MASK(p, jnp.asarray(x), axis, axes))


def on_tiles(p, tiles):
    """Return the masks of tiles (t, m, m), as one weight (m, t m). Few widths occur, because each is compiled."""
    count, m, _ = tiles.shape
    t = 256 if count <= 256 else 5000
    tiles = np.concatenate([tiles, np.zeros((t - count, m, m), tiles.dtype)])
    wide = np.transpose(tiles, (1, 0, 2)).reshape(m, t * m)
    return np.transpose(masked(p, wide).reshape(m, t, m), (1, 0, 2))[:count]


def patterns():
    """Return all 4 x 4 arrays of zeros and ones with two ones in every row and column, out of all 65,536."""
    words = np.arange(2**16)
    bits = (words[:, None] >> np.arange(16) & 1).reshape(-1, 4, 4)
    return bits[(bits.sum(1) == 2).all(1) & (bits.sum(2) == 2).all(1)]


def check_both_ways(mask, n):
    assert (mask.sum(-1) == n).all()
    assert (mask.sum(-2) == n).all()


def test_there_are_90_patterns_and_each_is_found():
    """Every pattern can be the result: it is the optimum for its own entries."""
    all_of_them = patterns()
    assert len(all_of_them) == 90
    np.testing.assert_array_equal(on_tiles(nm.transposable(2, 4), all_of_them.astype(np.float32)), all_of_them)


def tiles_of(kind, count, m, seed=0):
    rng = np.random.default_rng([seed, m])
    if kind == "gaussian":
        return rng.normal(size=(count, m, m)).astype(np.float32)
    if kind == "heavy":
        return rng.lognormal(0, 2, (count, m, m)).astype(np.float32)
    if kind == "small integers":
        return rng.integers(-3, 4, (count, m, m)).astype(np.float32)
    if kind == "zeros and ones":
        return (rng.random((count, m, m)) < rng.random((count, 1, 1))).astype(np.float32)
    return (10.0 ** rng.uniform(-30, 20, (count, 1, 1)) * rng.normal(size=(count, m, m))).astype(np.float32)


@pytest.mark.parametrize("kind", ["gaussian", "heavy", "small integers", "zeros and ones", "all scales"])
def test_two_of_four_is_the_best_of_all_patterns(kind):
    tiles = tiles_of(kind, 5000, 4)
    kept = on_tiles(nm.transposable(2, 4), tiles)
    check_both_ways(kept, 2)
    size = np.abs(tiles.astype(np.float64)).reshape(-1, 16)
    best = (size @ patterns().reshape(90, 16).T).max(1)
    value = (size * kept.reshape(-1, 16)).sum(1)
    if kind in ("small integers", "zeros and ones"):
        np.testing.assert_array_equal(value, best)
    else:  # closer patterns are decided by the rounding of float32 sums
        assert (value >= best * (1 - 8 * 2.0**-24)).all()
        assert (value == best).mean() > 0.999


@pytest.mark.parametrize(
    ("n", "m", "dtype"), [*((*nm, np.float32) for nm in (*NM, (16, 32))), (2, 4, jnp.bfloat16), (4, 8, jnp.bfloat16)]
)
def test_n_of_m_both_ways_whatever_the_input(n, m, dtype):
    rng = np.random.default_rng(1)
    tiles = [
        tiles_of(k, 20, m, seed=2) for k in ("gaussian", "heavy", "small integers", "zeros and ones", "all scales")
    ]
    zeros, ones = np.zeros((1, m, m)), np.ones((1, m, m))
    one_row, one_column, corner, diagonal = (np.zeros((1, m, m)) for _ in range(4))
    one_row[:, 0], one_column[:, :, -1], corner[:, : n + 1, : n + 1], diagonal[0] = 1, 1, 1, np.eye(m)
    broken = np.where(
        rng.random((40, m, m)) < 0.2, rng.choice([np.nan, np.inf, -np.inf], (40, m, m)), rng.normal(size=(40, m, m))
    )
    full = np.concatenate([ones * np.nan, ones * np.inf, ones * 3e38, ones * 1e-45, ones * 1e30])
    ramp = np.arange(m * m, dtype=np.float64).reshape(1, m, m)
    x = np.concatenate([*tiles, zeros, ones, one_row, one_column, corner, diagonal, broken, full, ramp, -ramp])
    check_both_ways(on_tiles(nm.transposable(n, m), x.astype(dtype)), n)


@pytest.mark.parametrize(("n", "m"), NM)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_lone_non_finite_value_is_kept_at_every_place(n, m, value):
    rng = np.random.default_rng(4)
    alone = np.eye(m * m, dtype=bool).reshape(-1, m, m)
    for beside in (3e38, -3e38, 10 ** rng.uniform(34, 38.5, alone.shape), rng.normal(size=alone.shape)):
        tiles = np.where(alone, value, beside).astype(np.float32)
        assert on_tiles(nm.transposable(n, m), tiles)[alone].all()


@pytest.mark.parametrize("beside", [3e38, 1.0, 0.0])
def test_as_many_non_finite_values_are_kept_as_a_pattern_can(beside):
    """The most of all 90 patterns, for 2,000 random sets of NaN and infinities in a tile."""
    rng = np.random.default_rng(5)
    broken = rng.random((2000, 4, 4)) < rng.random((2000, 1, 1))
    tiles = np.where(broken, rng.choice([np.nan, np.inf, -np.inf], broken.shape), beside).astype(np.float32)
    kept = (on_tiles(nm.transposable(2, 4), tiles) & broken).sum((1, 2))
    np.testing.assert_array_equal(kept, np.einsum("tij,pij->tp", broken.astype(int), patterns()).max(1))


@pytest.mark.parametrize(("n", "m"), NM)
def test_whole_permutations_are_kept(n, m):
    """A tile that is already n:m along both axes loses nothing."""
    rng = np.random.default_rng(4)
    base = np.array([[(j - i) % m < n for j in range(m)] for i in range(m)])
    support = np.stack([base[rng.permutation(m)][:, rng.permutation(m)] for _ in range(200)])
    tiles = (support * (0.1 + rng.random(support.shape))).astype(np.float32)
    np.testing.assert_array_equal(on_tiles(nm.transposable(n, m), tiles), support)


def best_by_linear_programme(tile, n):
    """Return the largest sum of a mask, by a linear programme. It is totally unimodular, so its optimum is a mask."""
    m = len(tile)
    rows = sparse.kron(sparse.eye(m), np.ones((1, m)))
    columns = sparse.kron(np.ones((1, m)), sparse.eye(m))
    solved = optimize.linprog(
        -tile.ravel(),
        A_eq=sparse.vstack([rows, columns]).tocsr(),
        b_eq=np.full(2 * m, n),
        bounds=(0, 1),
        method="highs",
    )
    assert solved.status == 0
    return -solved.fun


@pytest.mark.parametrize(
    ("n", "m", "count"), [(1, 4, 60), (2, 6, 60), (2, 8, 60), (4, 8, 100), (8, 16, 30), (16, 32, 9)]
)
@pytest.mark.parametrize("kind", ["gaussian", "heavy"])
def test_gap_to_the_optimum(n, m, count, kind):
    count = count if kind == "gaussian" else count // 3
    tiles = tiles_of(kind, count, m, seed=6)
    size = np.abs(tiles.astype(np.float64))
    value = (size * on_tiles(nm.transposable(n, m), tiles)).sum((1, 2))
    best = np.array([best_by_linear_programme(t, n) for t in size])
    gap = 1 - value / best
    assert gap.min() > -1e-6
    assert gap.max() <= 0.02
    assert gap.mean() <= 2e-4


def test_gap_where_many_values_are_equal():
    """Ties are the hard case."""
    size = np.random.default_rng(11).integers(0, 4, (100, 8, 8)).astype(np.float32)
    value = (size * on_tiles(nm.transposable(2, 8), size)).sum((1, 2))
    gap = 1 - value / np.array([best_by_linear_programme(t, 2) for t in size])
    assert gap.min() > -1e-6
    assert gap.mean() <= 6e-4


@pytest.mark.parametrize(("n", "m"), [(1, 4), (2, 8), (3, 8)])
def test_rows_trade_the_same_columns_where_several_gain_alike(n, m):
    rng = np.random.default_rng(3)
    tiles = rng.integers(0, 3, (5000, m, m)) * rng.integers(1, 3, (5000, m, 1))
    check_both_ways(on_tiles(nm.transposable(n, m), tiles.astype(np.float32)), n)


@pytest.mark.parametrize(("n", "m"), [(1, 8), (1, 16), (4, 8)])
def test_gap_where_rows_and_columns_have_sizes(n, m):
    """The products of two vectors: without trades the mean gap would be 19 % at 1:16."""
    rng = np.random.default_rng(3)
    size = (rng.random((30, m, 1)) * rng.random((30, 1, m))).astype(np.float32)
    value = (size * on_tiles(nm.transposable(n, m), size)).sum((1, 2))
    gap = 1 - value / np.array([best_by_linear_programme(t.astype(np.float64), n) for t in size])
    assert gap.min() > -1e-6
    assert gap.mean() <= 0.01
    assert gap.max() <= 0.1


@pytest.mark.parametrize("m", [*range(2, 21), 32, 48])
def test_the_network_finds_any_two_neighbours_of_what_sorting_gives(m):
    """It is right for all inputs if it is for all of zeros and ones; all of them up to 2^12, else 2,000 random ones."""
    words = np.arange(2**m) if m <= 12 else np.random.default_rng(m).integers(0, 2**62, 2000) % 2**m
    bits = (words[:, None] >> np.arange(m) & 1).astype(np.float32)
    bits = np.concatenate([bits, np.random.default_rng(0).normal(size=(50, m)).astype(np.float32)])
    for n in range(1, m) if m <= 12 else (1, m // 8, m // 4, m // 2, m - 1):
        found = transposable_mask._largest(jnp.asarray(bits), 1, n)
        ordered = -np.sort(-bits, axis=1)
        np.testing.assert_array_equal(np.concatenate(found, 1), ordered[:, n - 1 : n + 1])


@pytest.mark.parametrize(("n", "m"), [(2, 4), (4, 8)])
@pytest.mark.parametrize("axis", [1, -2])
def test_the_mask_serves_both_axes(n, m, axis):
    """The mask of a matrix that is not square is the same along both axes."""
    x = np.random.default_rng(7).normal(size=(2 * m, 3 * m)).astype(np.float32)
    kept = masked(nm.transposable(n, m), x, axis)
    check_both_ways(kept.reshape(2, m, 3, m).transpose(0, 2, 1, 3), n)
    np.testing.assert_array_equal(kept, masked(nm.transposable(n, m), x, 0))
    tiles = x.reshape(2, m, 3, m).transpose(0, 2, 1, 3).reshape(6, m, m)
    expected = on_tiles(nm.transposable(n, m), tiles).reshape(2, 3, m, m).transpose(0, 2, 1, 3).reshape(x.shape)
    np.testing.assert_array_equal(kept, expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n", "m", "layout", "first", "second"), [(2, 4, "hwio", 2, 3), (2, 4, "oihw", 1, 0), (4, 8, "ohwi", 3, 0)]
)
def test_convolution_kernels(n, m, layout, first, second):
    """Tiles cover in- and out-channels at one kernel position, in every layout."""
    sizes = {"h": 3, "w": 2, "i": m, "o": 2 * m}
    x = np.random.default_rng(8).normal(size=[sizes[c] for c in layout]).astype(np.float32)
    space = tuple(layout.index(c) for c in "hw")
    p = nm.transposable(n, m)
    kept = masked(p, x, first, Axes(second, space))
    np.testing.assert_array_equal(kept, masked(p, x, second, Axes(first, space)))
    for h, w in itertools.product(range(3), range(2)):
        place = tuple({"h": h, "w": w}.get(c, slice(None)) for c in layout)
        kernel = x[place]
        tiles = kernel if kernel.shape[0] == m else kernel.T  # (in, out)
        np.testing.assert_array_equal(kept[place] if kernel.shape[0] == m else kept[place].T, masked(p, tiles, 0))
