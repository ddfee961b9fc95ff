"""Minimum-variance unbiased pruning, tested with averages over grids of uniforms and with float64 oracles."""

import itertools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import optimize

import nmjax as nm
from nmjax.pruners.unbiased import _single, _unrolled, _whole

pytestmark = pytest.mark.sampled

NM = [(1, 2), (1, 4), (2, 4), (4, 8), (3, 8), (8, 32), (1, 128)]
ALMOST_ONE = np.nextafter(np.float32(1), np.float32(0))

_SAMPLE = jax.jit(lambda p, x, u: p.sample(x, u), static_argnums=0)


def sample(p, x, u):
    """Return ``p.sample`` of groups (..., m) with uniforms (...), as a numpy array."""
    return np.asarray(_SAMPLE(p, jnp.asarray(x), jnp.asarray(u)[..., None]))


def grid(count):
    return ((np.arange(count) + 0.5) / count).astype(np.float32)


def on_grid(p, x, count):
    """Return (count, groups, m): the draws of every group at every midpoint of a grid of its uniform."""
    u = np.broadcast_to(grid(count)[:, None], (count, len(x)))
    return sample(p, np.broadcast_to(x, (count, *x.shape)), u)


def water_fill(x, n):
    """Return tau, inclusion probabilities and least variance of groups (g, m), by sorting in float64."""
    tau, p, variance = [], [], []
    for a in np.abs(np.asarray(x, np.float64)):
        order = np.sort(a)[::-1]
        if np.count_nonzero(a) <= n:
            tau.append(0.0), p.append((a > 0).astype(float)), variance.append(0.0)
            continue
        for k in range(n):  # the first k are always kept
            level = order[k:].sum() / (n - k)
            if order[k] <= level:
                break
        tau.append(level)
        p.append(np.minimum(1, a / level))
        rest = order[k:]
        variance.append(rest.sum() ** 2 / (n - k) - np.sum(rest**2))
    return np.array(tau), np.array(p), np.array(variance)


def groups_of(kind, m, count=6, seed=0):
    """Return float32 groups with magnitudes of the named kind and random signs."""
    rng = np.random.default_rng([seed, m])
    if kind == "gaussian":
        x = rng.normal(size=(count, m))
    elif kind == "heavy":
        x = rng.lognormal(0, 2, (count, m))
    elif kind == "zeros":
        x = rng.normal(size=(count, m)) * (rng.random((count, m)) < 0.4)
        x[0], x[1, 1:] = 0, 0
    elif kind == "ties":
        x = np.full((count, m), 1e-30)
        x[:, : (m + 1) // 2] = 1
        x[1], x[2, 0] = 1, 2
    elif kind == "dominated":
        x = np.ones((count, m))
        x[:, -1] = 1e6
        x[1, 0] = 1e6
    return (x * rng.choice([-1, 1], x.shape)).astype(np.float32)


KINDS = ["gaussian", "heavy", "zeros", "ties", "dominated"]


def table_groups(m):
    return np.concatenate([groups_of(kind, m) for kind in KINDS])


# ---- unbiased ----


@pytest.mark.parametrize("scale", [1, 1e-12, 1e4])
@pytest.mark.parametrize(("n", "m"), NM)
def test_mean_over_the_uniform_is_the_input(n, m, scale):
    x = table_groups(m) * np.float32(scale)
    count = 512
    mean = on_grid(nm.mvue(n, m), x, count).astype(np.float64).mean(0)
    tau, *_ = water_fill(x, n)
    # Each member is kept on one arc of the circle of u. The count of midpoints on the arc is right within 1, so the
    # mean is right within tau / count. Ends of arcs and values are rounded to float32: a few ulp of n * tau. If one
    # entry dominates, the values of members that are always kept are exact.
    bound = tau[:, None] * (1 / count + n * m * 1e-7) + np.abs(x) * 1e-6
    assert (np.abs(mean - x) <= bound + 1e-45).all()


@pytest.mark.parametrize(("n", "m"), [(1, 2), (2, 4), (3, 8), (8, 32)])
def test_mean_in_bfloat16(n, m):
    x = jnp.asarray(table_groups(m), jnp.bfloat16)
    wide = np.asarray(x.astype(jnp.float32))
    count = 512
    mean = on_grid(nm.mvue(n, m), np.asarray(x), count).astype(np.float64).mean(0)
    tau, p, _ = water_fill(wide, n)
    rounded = np.asarray(jnp.asarray(tau, jnp.float32).astype(jnp.bfloat16).astype(jnp.float32), np.float64)
    # unsaturated values become the rounded tau, and its float32 value may round to either neighbour
    expected = np.where(p < 1, p * rounded[:, None] * np.sign(wide), wide)
    bound = tau[:, None] * (1 / count + n * m * 1e-7) + np.abs(expected) * 1e-6
    far = np.abs(mean - expected) > bound
    assert (np.abs(mean - wide) <= bound + np.abs(wide) * 2**-8).all()
    assert far.mean() < 0.02  # the few groups whose tau lies half way between two bfloat16 values


def test_rounding_of_tau_in_bfloat16_is_to_nearest():
    x = np.random.default_rng(1).normal(size=(5000, 4)).astype(np.float32)
    x = np.asarray(jnp.asarray(x, jnp.bfloat16))
    tau, p, _ = water_fill(x.astype(np.float32), 2)
    out = sample(nm.mvue(2, 4), x, np.random.default_rng(2).random(5000, np.float32)).astype(np.float64)
    drawn = (out != 0) & (p < 1)
    error = np.abs(np.abs(out) / tau[:, None] - 1)[drawn]
    assert error.max() <= 2**-8 * (1 + 1e-5)  # half an ulp of a value just above a power of two
    assert error.max() > 2**-8 * 0.9  # the bound is nearly reached
    # Signed error: at most uniform over half an ulp either way, one per group; z = 5, one comparison.
    assert abs((np.abs(out) / tau[:, None] - 1)[drawn].mean()) < 5 * 2**-8 / np.sqrt(3 * drawn.any(1).sum())


# ---- every single draw ----


@pytest.mark.parametrize("scale", [1, 1e-12, 1e4])
@pytest.mark.parametrize(("n", "m"), NM)
def test_every_draw_keeps_the_l1_norm(n, m, scale):
    x = table_groups(m) * np.float32(scale)
    u = np.concatenate([[0, ALMOST_ONE, 2**-23, 0.5], np.random.default_rng(3).random(60)]).astype(np.float32)
    out = sample(nm.mvue(n, m), np.broadcast_to(x, (64, *x.shape)), np.broadcast_to(u[:, None], (64, len(x))))
    l1, got = np.abs(x.astype(np.float64)).sum(-1), np.abs(out.astype(np.float64)).sum(-1)
    # 1e-6; a sum of 128 values added one by one is itself off by more
    np.testing.assert_allclose(got, np.broadcast_to(l1, got.shape), rtol=max(1e-6, m * 2**-25), atol=1e-45)


def check_picks(x, out, n):
    kept, nonzeros = (out != 0).sum(-1), (x != 0).sum(-1)
    assert (kept <= n).all()
    assert (kept >= np.minimum(n, nonzeros)).all()
    assert not (out[x == 0] != 0).any()
    assert (np.sign(out) == np.sign(x))[out != 0].all()
    few = nonzeros <= n
    np.testing.assert_array_equal(out[few], x[few])


@pytest.mark.parametrize(
    ("p", "kind"),
    [
        *((nm.mvue(*v), kind) for v in NM for kind in ("fifth zeros", "nearly saturated")),
        (nm.mvue_approx(2, 4), "fifth zeros"),
    ],
)
def test_picks_of_many_random_groups(p, kind):
    rng, n, m = np.random.default_rng(4), p.n, p.m
    count = 200_000 if m <= 4 else 800_000 // m
    x = rng.normal(size=(count, m)).astype(np.float32)
    x[rng.random(x.shape) < 0.2] = 0
    if kind == "nearly saturated":  # one member is a few ulp from the tau of its group
        x = np.abs(x) + np.float32(0.01)
        rest = np.sort(x[:, 1:], axis=1)[:, : m - n].astype(np.float64).sum(1)
        x[:, 0] = (rest * (1 + rng.integers(-6, 7, count) * 2.0**-24)).astype(np.float32)
    u = draws(p, rng, count)
    u[..., ::4] = rng.choice(np.array([0, ALMOST_ONE, 2**-23, 0.5], np.float32), u[..., ::4].shape)
    out = sample_any(p, x, u)
    check_picks(x, out, n)
    if isinstance(p, nm.mvue_approx):
        return  # it does not keep the norm
    l1, got = np.abs(x.astype(np.float64)).sum(-1), np.abs(out.astype(np.float64)).sum(-1)
    np.testing.assert_allclose(got, l1, rtol=max(2e-6, m * 2**-25))


# Subnormal inputs are excluded, because XLA on CPU flushes them to zero and they cannot be chosen. Inputs whose sum
# overflows float32 are excluded too. A group may still span 67 binary orders of magnitude.
AWKWARD = st.one_of(
    st.floats(-(2.0**96), 2.0**96, width=32, allow_subnormal=False),
    st.sampled_from([0.0, -0.0, 1.0, -1.0, 1e-30, 2.0**-126, 2.0**96, 1 + 2.0**-23, 1 - 2.0**-24, 3.0, 2.0]),
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "p", [*(nm.mvue(*v) for v in ((1, 2), (2, 4), (3, 4), (3, 8), (8, 32))), nm.mvue_approx(2, 4)], ids=repr
)
def test_picks_of_awkward_groups(p):
    one = st.one_of(st.floats(0, float(ALMOST_ONE), width=32), st.sampled_from([0.0, 0.5, float(ALMOST_ONE)]))

    @hypothesis.given(st.lists(AWKWARD, min_size=p.m, max_size=p.m), st.tuples(one, one))
    @hypothesis.settings(max_examples=150)
    def check(values, u):
        x, u = np.array([values], np.float32), np.array(u, np.float32)
        out = sample_any(p, x, u[:1] if isinstance(p, nm.mvue) else u[:, None])
        assert np.isfinite(out).all()
        check_picks(x, out, p.n)

    check()


@pytest.mark.parametrize(
    ("values", "n"),
    [
        ([1, 1, 1e-30, 1e-30], 2),
        ([1, 1e-30, 1e-30, 1e-30], 2),
        ([1, 1, 1, 1e6], 2),
        ([3e10, 1, 1e-10, 1e-20], 3),
        ([1, 1, 1, 1], 3),
        ([1, 1, 1, 3], 2),
        ([1, 1, 1, 3 - 2**-22], 2),
        ([1, 1, 1, 3 + 2**-21], 2),
        ([0, 0, 0, 1], 2),
        ([0, 1, 0, 1], 2),
        ([0, 1, 1, 1], 2),
        ([2**-126, 2**-126, 2**-126, 2**-126], 2),
        ([2**-126, 2**96, 2**-126, 2**-126], 2),
    ],
)
def test_edge_cases_at_every_uniform(values, n):
    x = np.broadcast_to(np.array(values, np.float32), (4096, len(values)))
    u = np.concatenate([[0, ALMOST_ONE], grid(4094)]).astype(np.float32)
    out = sample(nm.mvue(n, len(values)), x, u)
    check_picks(x, out, n)
    _, p, _ = water_fill(x[:1], n)
    assert (out[:, p[0] == 1] == x[:, p[0] == 1]).all()


# ---- least variance ----


def spread(out, x):
    return ((out.astype(np.float64) - x) ** 2).mean(0).sum(-1)


@pytest.mark.parametrize(("n", "m"), [(1, 2), (1, 4), (2, 4), (4, 8), (3, 8), (8, 32)])
def test_variance_is_the_closed_form(n, m):
    x = np.concatenate([groups_of(kind, m, 8, seed=1) for kind in KINDS])
    count = 1024
    tau, p, variance = water_fill(x, n)
    got = spread(on_grid(nm.mvue(n, m), x, count), x.astype(np.float64))
    # An inclusion probability off by 1 / count moves a member's share by |tau**2 - 2 tau a| / count <= tau**2 / count.
    # Rounding: squares of values off by an ulp or two.
    bound = tau**2 * (p < 1).sum(1) / count + 1e-6 * (tau**2 * n + variance)
    assert (np.abs(got - variance) <= bound + 1e-45).all()


def pair_table(a):
    """Return the paper's three cases for rising magnitudes: probabilities of the six pairs, and the kept values."""
    a1, a2, a3, a4 = a
    total, rest = a1 + a2 + a3 + a4, a1 + a2 + a3
    pairs = dict.fromkeys(itertools.combinations(range(4), 2), 0.0)
    if a4 >= rest:
        pairs[0, 3], pairs[1, 3], pairs[2, 3] = a1 / rest, a2 / rest, a3 / rest
        return pairs, [rest, rest, rest, a4]
    pairs[2, 3] = (a3 + a4 - a1 - a2) / total
    if 2 * a1 + a3 - a4 > 0:
        pairs[0, 2], pairs[0, 3] = (2 * a1 + a3 - a4) / (2 * total), (2 * a1 - a3 + a4) / (2 * total)
        pairs[1, 2], pairs[1, 3] = (2 * a2 + a3 - a4) / (2 * total), (2 * a2 - a3 + a4) / (2 * total)
    else:
        pairs[0, 3] = 2 * a1 / total
        pairs[1, 2], pairs[1, 3] = (a1 + a2 + a3 - a4) / total, (a2 + a4 - a1 - a3) / total
    return pairs, [total / 2] * 4


def test_two_of_four_has_the_papers_marginals_and_values():
    rng = np.random.default_rng(5)
    x = np.sort(np.abs(np.concatenate([rng.normal(size=(60, 4)), rng.lognormal(0, 1.5, (60, 4))])), axis=1)
    x = x.astype(np.float32)
    count = 4096
    out = on_grid(nm.mvue(2, 4), x, count).astype(np.float64)
    seen = np.zeros(3, int)
    for g, a in enumerate(x.astype(np.float64)):
        pairs, values = pair_table(a)
        assert min(pairs.values()) >= 0
        assert abs(sum(pairs.values()) - 1) < 1e-12
        seen[2 if a[3] >= a[:3].sum() else int(2 * a[0] + a[2] - a[3] <= 0)] += 1
        marginal = [sum(p for pair, p in pairs.items() if i in pair) for i in range(4)]
        np.testing.assert_allclose((out[:, g] != 0).mean(0), marginal, atol=1 / count + 1e-6)
        for i in range(4):
            np.testing.assert_allclose(out[:, g, i][out[:, g, i] != 0], values[i], rtol=1e-6)
    assert (seen >= 10).all()


def least_energy(x, n, extra):
    """Return the least E ||theta||^2 with E theta = x, over distributions of blocks of n entries from a grid."""
    m = len(x)
    atoms = []
    for kept in itertools.combinations(range(m), n):
        for values in itertools.product(*(np.sign(x[i]) * extra for i in kept)):
            theta = np.zeros(m)
            theta[list(kept)] = values
            atoms.append(theta)
    atoms = np.array(atoms)
    constraints = np.concatenate([atoms.T, np.ones((1, len(atoms)))])
    solved = optimize.linprog((atoms**2).sum(1), A_eq=constraints, b_eq=[*x, 1], method="highs")
    return solved.fun if solved.status == 0 else np.inf


@pytest.mark.parametrize(("n", "m"), [(1, 2), (2, 4)])
def test_no_distribution_over_blocks_does_better(n, m):
    """A linear programme over all distributions of blocks finds no lower variance.

    If its grid of values contains those of the closed form, it finds the same optimum.
    """
    rng = np.random.default_rng(6)
    for x in rng.normal(size=(8, m)).astype(np.float32):
        tau, p, variance = water_fill(x[None], n)
        a = np.abs(x.astype(np.float64))
        energy = variance[0] + np.sum(a**2)
        got = spread(on_grid(nm.mvue(n, m), x[None], 2048), x[None].astype(np.float64))[0]
        assert abs(got - variance[0]) <= tau[0] ** 2 * m / 2048 + 1e-5 * energy
        coarse = np.linspace(0, 2.5 * a.sum(), 12)
        assert least_energy(x.astype(np.float64), n, coarse) >= energy * (1 - 1e-9)
        exact = np.unique(np.concatenate([coarse[::3], np.maximum(a, tau[0])]))
        assert least_energy(x.astype(np.float64), n, exact) == pytest.approx(energy, rel=1e-7)


# ---- the ways of drawing agree, NaN and infinities stay ----


def single(g, u, axis, n):
    return _single(g, u, axis)


@pytest.mark.parametrize(
    ("way", "n", "m", "dtype"),
    [
        (single, 1, 2, np.float32),
        (single, 1, 16, np.float32),
        (single, 1, 4, jnp.bfloat16),
        (_unrolled, 1, 4, np.float32),
        (_unrolled, 2, 4, np.float32),
        (_unrolled, 2, 4, jnp.bfloat16),
        (_unrolled, 3, 4, np.float32),
        (_unrolled, 4, 8, np.float32),
        (_unrolled, 4, 8, jnp.bfloat16),
    ],
)
def test_the_ways_of_drawing_agree(way, n, m, dtype):
    rng = np.random.default_rng(8)
    count = 20_000
    x = rng.normal(size=(count, m)).astype(np.float32)
    x[rng.random(x.shape) < 0.1] = 0
    x[::100, 0] = rng.choice(np.array([np.nan, np.inf, -np.inf], np.float32), len(x[::100]))
    x[1::100] = np.sign(x[1::100])
    x = x.astype(dtype)
    u = rng.random((count, 1), np.float32)
    a, b = (np.asarray(jax.jit(f, static_argnums=(2, 3))(x, u, 1, n)).astype(np.float32) for f in (way, _whole))
    # The ways round the ends of arcs differently, by about 1e-7 of tau: few of 20,000 u fall in between. Allow one.
    other = ((a != 0) != (b != 0)).any(1)
    assert other.sum() <= 1
    # if tau lies half way between two bfloat16 values, the order of summation decides
    np.testing.assert_allclose(a[~other], b[~other], rtol=1e-6 if dtype == np.float32 else 2**-7)
    assert (a == b).all(1).mean() > (0.5 if dtype == np.float32 else 0.99)
    assert (a != x.astype(np.float32)).any()


def draws(p, rng, count):
    if isinstance(p, nm.mvue):
        return rng.random(count, np.float32)
    if isinstance(p, nm.mvue_approx):
        return rng.random((2, count), np.float32)
    return rng.random((count, p.m), np.float32)


def sample_any(p, x, u):
    if isinstance(p, nm.mvue):
        return sample(p, x, u)
    u = (jnp.asarray(u[0])[:, None], jnp.asarray(u[1])[:, None]) if isinstance(p, nm.mvue_approx) else jnp.asarray(u)
    return np.asarray(_SAMPLE(p, jnp.asarray(x), u))


@pytest.mark.parametrize(
    "p", [nm.mvue(1, 4), nm.mvue(2, 4), nm.mvue(3, 8), nm.mvue(8, 32), nm.mvue_approx(2, 4)], ids=repr
)
@pytest.mark.parametrize("value", [2.0**126, 1e38, 2.0**127, 3e38])
def test_finite_groups_whose_sum_overflows_are_n_of_m(p, value):
    """If the sum of a group overflows float32, kept values may be inf, but at least one and at most n are kept."""
    rng = np.random.default_rng(14)
    x = (value * rng.uniform(0.9, 1, (500, p.m)) * rng.choice([-1, 1, 1e-3], (500, p.m))).astype(np.float32)
    x[0] = value
    out = sample_any(p, x, draws(p, rng, 500))
    kept = (out != 0).sum(1)
    assert (kept <= p.n).all()
    assert (kept >= 1).all()
    assert not np.isnan(out).any()


LARGE = [nm.mvue(1, 2), nm.mvue(1, 6), nm.mvue(2, 4), nm.mvue(5, 8), nm.mvue(1, 32), nm.mvue(8, 32), nm.mvue(5, 40)]
LARGE += [nm.mvue(1, 4), nm.mvue(3, 8), nm.mvue_approx(2, 4), nm.mvue_approx(2, 8)]


@pytest.mark.parametrize("p", LARGE, ids=repr)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_nothing_broken_is_lost_beside_the_largest(p, dtype):
    """Whatever the finite members and the uniforms are: 0, and the largest below 1, too."""
    rng = np.random.default_rng(15)
    most = float(jnp.finfo(dtype).max)
    x = rng.choice([most, -most, 1.0, 1e-30, 0.0], (4000, p.m)) * rng.choice([1, 1, rng.random()], (4000, p.m))
    order = rng.random(x.shape).argsort(1)
    bad = order < rng.integers(1, p.m + 1, (4000, 1))
    x = np.asarray(jnp.asarray(np.where(bad, rng.choice([np.nan, np.inf, -np.inf], x.shape), x), dtype))
    for u in (0, ALMOST_ONE, 2.0**-23, 0.5, None):
        u = draws(p, rng, 4000) if u is None else np.full_like(draws(p, rng, 4000), u)
        out = sample_any(p, x, u).astype(np.float32)
        np.testing.assert_array_equal((~np.isfinite(out) & bad).sum(1), np.minimum(p.n, bad.sum(1)))
        assert ((out != 0).sum(1) <= p.n).all()
        kept = bad & (out != 0)
        np.testing.assert_array_equal(out[kept], x[kept].astype(np.float32))


@pytest.mark.parametrize("p", [p for p in LARGE if isinstance(p, nm.mvue)], ids=repr)
def test_mean_of_the_largest_groups(p):
    """Values up to the largest float32 are unbiased as long as tau is below it. A larger tau is infinite."""
    rng = np.random.default_rng(16)
    x = rng.uniform(0.2, 1, (200, p.m)) * rng.choice([-1, 1], (200, p.m))
    x[::2, 0] *= 50  # one that is always kept, if n is more than one
    x = (x / np.maximum(np.abs(x).max(1), water_fill(x, p.n)[0])[:, None] * 3.3e38).astype(np.float32)
    tau, *_ = water_fill(x, p.n)
    assert (np.abs(x).sum(1, dtype=np.float64) > 3e38).all()
    count = 512
    mean = on_grid(p, x, count).astype(np.float64).mean(0)
    assert (np.abs(mean - x) <= tau[:, None] * (1 / count + p.n * p.m * 1e-7) + np.abs(x) * 1e-6).all()
    same = np.full((1, p.m), 3.3e38, np.float32)  # tau is this times m/n
    out = sample(p, same, np.float32([0.3]))
    assert np.isinf(out).sum() == p.n
    assert np.isfinite(out).sum() == p.m - p.n


def test_two_draws_of_the_largest_groups_are_those_of_small_ones():
    rng = np.random.default_rng(17)
    x = groups_of("gaussian", 4, 2000).astype(np.float64)
    x = (x / np.abs(x).max(1, keepdims=True)).astype(np.float32)
    x *= np.float32(2) ** rng.integers(-1, 0)
    u = draws(nm.mvue_approx(2, 4), rng, len(x))
    small, large = (sample_any(nm.mvue_approx(2, 4), x * np.float32(s), u) for s in (1, 2.0**127))
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(large, small * np.float32(2.0**127))


@pytest.mark.slow
def test_the_draw_is_the_generators_uniform():
    x = jnp.ones((3, 8, 5))
    for axis, shape in ((1, (3, 2, 5)), (-2, (3, 2, 5))):
        u = nm.mvue(2, 4).draw(x, axis, nm.Ctx(key=5))
        assert u.dtype == jnp.float32
        np.testing.assert_array_equal(np.asarray(u), np.asarray(nm.random.uniform(nm.random.words(5), shape)))
    y = jax.jit(lambda x: nm.mvue(2, 4)(x, 1, nm.Ctx(key=5)))(x)
    expected = sample(
        nm.mvue(2, 4), np.moveaxis(np.asarray(x), 1, -1).reshape(-1, 4), np.moveaxis(np.asarray(u), 1, -1).reshape(-1)
    )
    np.testing.assert_array_equal(np.moveaxis(np.asarray(y), 1, -1).reshape(-1, 4), expected)


# ---- the two-draw approximation ----


def inclusion(a, m):
    """Return the inclusion probabilities of two draws without replacement, by enumerating ordered pairs."""
    a = np.asarray(a, np.float64)
    p = np.zeros(m)
    for i, j in itertools.permutations(range(m), 2):
        if a[i] > 0 and a[j] > 0:
            both = a[i] / a.sum() * a[j] / (a.sum() - a[i])
            p[[i, j]] += both
    return p


def measured_inclusion(x):
    """Return |x| over the kept value of each member when it is drawn first: the probability that p divides by."""
    m = x.shape[1]
    a = np.abs(x.astype(np.float64))
    middle = (np.cumsum(a, 1) - a / 2) / a.sum(1, keepdims=True)
    out = np.zeros_like(x)
    for i in range(m):
        u = np.stack([middle[:, i], np.full(len(x), 0.5)]).astype(np.float32)
        got = sample_any(nm.mvue_approx(2, m), x, u)
        assert (got[:, i] != 0).all()
        out[:, i] = got[:, i]
    return x.astype(np.float64) / out


@pytest.mark.parametrize("m", [4, 8])
def test_two_draws_divide_by_the_true_probability(m):
    x = groups_of("gaussian", m, 300, seed=3)
    np.testing.assert_allclose(measured_inclusion(x), [inclusion(np.abs(v), m) for v in x], rtol=3e-6)


@pytest.mark.parametrize("scale", [1, 1e-12, 1e4])
def test_two_draws_are_unbiased(scale):
    x = np.concatenate([groups_of(kind, 4, 3, seed=4) for kind in KINDS]) * np.float32(scale)
    count = 256
    u = np.stack([v.ravel() for v in np.meshgrid(grid(count), grid(count))])
    u = np.broadcast_to(u[:, :, None], (2, count**2, len(x)))
    big = np.broadcast_to(x, (count**2, *x.shape)).reshape(-1, 4)
    out = sample_any(nm.mvue_approx(2, 4), big, u.reshape(2, -1)).reshape(count**2, *x.shape)
    mean = out.astype(np.float64).mean(0)
    value = np.abs(out).max(0).astype(np.float64)
    # The grid counts every member within 1 in the first draw, and again in the second draw after each of four first
    # ones. The probability is right within 6 / count, and the mean within that times the kept value.
    seen = value > 0
    assert (np.abs(mean - x)[seen] <= (value * 6 / count + 1e-5 * np.abs(x))[seen]).all()
    # members that no midpoint selects have less than the probability of one cell
    assert (np.abs(x) <= np.abs(x).sum(1, keepdims=True) * 2 / count)[~seen].all()


@pytest.mark.slow
def test_variance_of_two_draws():
    rng = np.random.default_rng(13)
    blocks = 100_000
    x = rng.normal(size=(blocks, 4)).astype(np.float32)
    a = np.abs(x.astype(np.float64))
    p = measured_inclusion(x)
    two_draws = np.sum(a**2 * (1 / p - 1), 1)
    half = a.sum(1) / 2
    top = a.max(1)
    rest = a.sum(1) - top
    optimum = np.where(top <= half, 2 * half**2 - (a**2).sum(1), rest**2 - (a**2).sum(1) + top**2)
    assert (two_draws <= 2 * optimum * (1 + 1e-4) + 1e-6).all()
    assert (two_draws >= optimum * (1 - 1e-4) - 1e-6).all()
    energy = np.sum(a**2, 1)
    for variance, stated in ((two_draws, 0.5021), (optimum, 0.4733)):
        ratio = variance.sum() / energy.sum()
        error = (variance - ratio * energy).std() / energy.mean() / np.sqrt(blocks)
        assert abs(ratio - stated) < 4 * error + 1e-4  # 2 comparisons at z = 4, plus the last published digit
        assert error < 1e-3


# ---- random pruning ----


def test_uniform_over_all_orders():
    orders = np.array(list(itertools.permutations([0.1, 0.3, 0.6, 0.9])), np.float32)
    x = np.broadcast_to(np.array([1, -2, 0.5, 1e4], np.float32), (24, 4))
    kept = sample_any(nm.uniform(2, 4, rescale=False), x, orders)
    patterns, counts = np.unique(kept != 0, axis=0, return_counts=True)
    assert len(patterns) == 6
    assert (counts == 4).all()
    np.testing.assert_array_equal(kept[kept != 0], x[kept != 0])
    np.testing.assert_array_equal(sample_any(nm.uniform(2, 4), x, orders).mean(0), x[0])


@pytest.mark.parametrize(("n", "m"), [(1, 2), (1, 4), (3, 8), (8, 32), (1, 128)])
def test_uniform_keeps_n_anywhere_alike(n, m):
    count = 20_000
    kept = np.asarray(jax.jit(lambda x: nm.uniform(n, m).mask(x, -1, nm.Ctx(key=3)))(jnp.ones((count, m))))
    assert (kept.sum(1) == n).all()
    z = (kept.mean(0) - n / m) / np.sqrt(n / m * (1 - n / m) / count)
    assert np.abs(z).max() < 4.5  # 174 places in all: 1.2e-3


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("n", "m"), [(3, 4), (5, 8), (3, 8)])
def test_uniform_multiplies_before_it_rounds(n, m, dtype):
    """A factor m/n that is rounded to the dtype would be wrong for every value in the same direction."""
    x = jax.random.uniform(jax.random.key(0), (256, m), minval=0.5).astype(dtype)
    found = np.asarray(nm.prune(nm.uniform(n, m), x, key=1))
    wanted = (np.asarray(x, np.float64) * (m / n)).astype(found.dtype)
    kept = found != 0
    assert (kept.sum(1) == n).all()
    np.testing.assert_array_equal(found[kept], wanted[kept])
