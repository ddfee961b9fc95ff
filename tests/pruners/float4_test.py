"""FP4: the codes of the format, scales of blocks, and rounding that is exact on average, alone and after `mvue`."""

import itertools
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import nmjax as nm
from nmjax.pruners import float4

CODES = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float64)  # all numbers of the format
E4M3 = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)  # that are not negative
DTYPES = [np.float32, ml_dtypes.bfloat16, np.float64]


def neighbours(x):
    """Return the numbers of the format below and above each of some numbers within its range."""
    values = np.unique(CODES)
    return values[np.searchsorted(values, x, "right") - 1], values[np.searchsorted(values, x, "left")]


def test_rounding_to_the_nearest_is_the_cast_of_ml_dtypes():
    assert (np.unique(CODES) == [-6, -4, -3, -2, -1.5, -1, -0.5, 0, 0.5, 1, 1.5, 2, 3, 4, 6]).all()
    x = np.arange(-10, 10, 2**-8, dtype=np.float32)  # all numbers, all midpoints, and beyond the range
    got = np.asarray(float4.rounded(jnp.asarray(x), 1))
    want = x.astype(ml_dtypes.float4_e2m1fn).astype(np.float32)
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(np.signbit(got), np.signbit(want))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_random_rounding_takes_both_neighbours_by_their_distance(dtype):
    count = 256
    x = np.concatenate([CODES, np.arange(-6, 6, 2**-5) + 2**-7]).astype(dtype)
    below, above = neighbours(x)
    with jax.enable_x64(True):
        u = jnp.asarray((np.arange(count) + 0.5) / count, jnp.float32)[:, None]
        drawn = np.asarray(float4.rounded(jnp.asarray(np.broadcast_to(x, (count, len(x)))), 1, u))
    assert drawn.dtype == dtype
    assert ((drawn == below) | (drawn == above)).all()
    np.testing.assert_allclose(drawn.mean(0), x, rtol=0, atol=2 / count / 2)  # half a draw, of neighbours 2 apart


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block", [16, 32])
@pytest.mark.parametrize("axis", [0, 1])
def test_results_are_values_times_a_scale_of_e4m3_times_a_power_of_two(axis, block, dtype):
    rng = np.random.default_rng(0)
    x = (rng.standard_normal((64, 96)) * 2.0 ** rng.integers(-25, 5, (64, 96))).astype(dtype)
    with jax.enable_x64(True):
        y, drawn = (
            np.asarray(nm.prune(p, jnp.asarray(x), axis=axis, key=0)).astype(np.float64)
            for p in (nm.fp4(block=block), nm.fp4("random", block))
        )
    x = np.moveaxis(x, axis, -1).reshape(-1, block).astype(np.float64)
    y, drawn = (np.moveaxis(v, axis, -1).reshape(-1, block) for v in (y, drawn))
    least = 2.0 ** np.floor(np.log2(np.abs(x).max() / 6))
    tensor = least * (2 if np.abs(x).max() / 6 > 1.875 * least else 1) / 2**7  # by the scale after it is rounded up
    possible = E4M3[E4M3 >= 2**-6] * tensor
    scale = possible[np.searchsorted(possible, np.abs(x).max(1) / 6 * (1 - 1e-7))][:, None]  # the least that fits
    below, above = (scale * v for v in neighbours(np.clip(x / scale, -6, 6)))
    assert ((drawn == below) | (drawn == above)).all()
    assert (y == (x / scale).astype(np.float32).astype(ml_dtypes.float4_e2m1fn).astype(np.float64) * scale).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_rounding_again_changes_nothing(dtype):
    rng = np.random.default_rng(1)
    x = rng.standard_normal((512, 2, 16)) * 2.0 ** rng.integers(-30, 0, (512, 2, 1))  # blocks of all magnitudes
    with jax.enable_x64(True):
        for part in jnp.asarray(x.reshape(512, 32), dtype).reshape(4, 128, 32):  # each with a scale of its own
            once = nm.prune(nm.fp4(), part)
            assert 0.05 < (once == 0).mean() < 0.7
            assert (nm.prune(nm.fp4(), once) == once).all()
            assert (nm.prune(nm.fp4("random"), once, key=0) == once).all()


def variance_of_rounding(x, block):
    """Return the exact variance of random rounding of each value, given the values."""
    scale = np.repeat(np.asarray(float4.scales(jnp.asarray(x), -1, block), np.float64), block, -1)
    below, above = (scale * v for v in neighbours(np.clip(x / scale, -6, 6)))
    return (x - below) * (above - x)


def z_scores(draws, x, variance):
    """Return the errors of means of draws over their standard deviations, where there is a variance."""
    mean, spread = draws.astype(np.float64).mean(0), np.sqrt(variance / len(draws))
    np.testing.assert_allclose(mean[variance == 0], x[variance == 0], rtol=1e-6)
    return ((mean - x) / np.where(spread > 0, spread, 1))[variance > 0]


def test_random_rounding_has_no_bias_and_the_variance_of_two_neighbours():
    x, count = np.random.default_rng(2).standard_normal((64, 64)).astype(np.float32), 2000
    draw = jax.jit(jax.vmap(lambda key: nm.fp4("random")(x, -1, nm.Ctx(key))))
    draws = np.asarray(draw(jax.random.split(jax.random.key(0), count)), np.float64)
    variance = variance_of_rounding(x, 16)
    z = z_scores(draws, x, variance)
    assert abs(z.mean()) < 5 / np.sqrt(z.size)
    assert abs(np.square(z).mean() - 1) < 5 * np.sqrt(2 / z.size)
    assert abs(draws.var(0).sum() / variance.sum() - 1) < 0.01


def test_pruned_and_rounded_at_random_there_is_no_bias():
    """The scales depend on the draw of mvue, so that the variance is measured and not computed."""
    x, count = np.random.default_rng(3).standard_normal((64, 64)).astype(np.float32), 4000
    p = nm.parse_pruner("chain(mvue(2,4),fp4(rounding='random'))")
    draw = jax.jit(jax.vmap(lambda key: p(x, -1, nm.Ctx(key))))
    draws = np.asarray(draw(jax.random.split(jax.random.key(1), count)), np.float64)
    assert ((draws.reshape(count, -1, 4) != 0).sum(-1) <= 2).all()
    often = (draws != 0).mean(0) > 0.05  # the variance of what is seldom kept is not measured well
    z = z_scores(draws[:, often], x[often], draws.var(0)[often])
    assert abs(z.mean()) < 5 / np.sqrt(z.size)
    assert abs(np.square(z).mean() - 1) < 5 * np.sqrt(2 / z.size)
    to_nearest = jax.jit(jax.vmap(lambda key: nm.fp4()(nm.mvue(2, 4)(x, -1, nm.Ctx(key)))))
    nearest = np.asarray(to_nearest(jax.random.split(jax.random.key(1), count)))
    error = lambda v: np.square(v.mean(0) - x).sum()
    assert error(nearest) > 10 * error(draws)  # rounding to the nearest is biased


@pytest.mark.parametrize("power", [-30, 30])
def test_powers_of_two_pass_through_a_draw(power):
    x = jnp.asarray(np.random.default_rng(4).standard_normal((8, 64)), jnp.float32)
    p = nm.parse_pruner("chain(pairs(mvue(2,4)),fp4('random',block=32))")
    assert (nm.prune(p, x * 2.0**power, key=0) == nm.prune(p, x, key=0) * 2.0**power).all()


def test_tiny_and_huge_tensors():
    x = np.random.default_rng(5).uniform(1, 2, (4, 16)).astype(np.float32)
    for power in (-80, 126):
        y = np.asarray(nm.prune(nm.fp4(), jnp.asarray(x * np.float32(2.0**power)))) / 2.0**power
        assert (np.abs(y - x) <= 1.1 * x / 4).all()
    assert (np.asarray(nm.prune(nm.fp4(), jnp.full((1, 16), 1e-38))) == 0).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_the_largest_values_of_a_dtype_stay_finite(dtype):
    """Six times a scale that was rounded up is beyond the dtype: four times the scale is next on the grid."""
    most = float(jnp.finfo(dtype).max)
    x = np.ones((4, 16))
    x[:, 0], x[1, 1], x[2, 0], x[3, 0] = most, -0.99 * most, 0.9 * most, -most
    x = jnp.asarray(x, dtype)
    for p in (nm.fp4(), nm.fp4("random")):
        y = nm.prune(p, x, key=0)
        assert jnp.isfinite(y).all()
        grid = (
            np.asarray(y, np.float64)[:, 0] / np.asarray(float4.scales(x.astype("float32"), -1, 16), np.float64)[:, 0]
        )
        assert set(np.abs(grid)) <= {4.0, 6.0}
        assert (np.sign(grid) == np.sign(np.asarray(x, np.float64)[:, 0])).all()


def test_pairs_that_cannot_be_pruned_are_told():
    for p, said in (
        (nm.transposable(2, 4), "the norms of pairs have one. Write pairs(mse(2,4))"),
        (nm.fp4(), "Round after it: chain(pairs(mse(2,4)),fp4())"),
        (nm.rows(nm.mse(2, 4)), "rows cannot stand inside pairs"),
    ):
        with pytest.raises(ValueError, match=re.escape(said)):
            nm.pairs(p)
    with pytest.raises(TypeError, match="pairs takes pruners, got int"):
        nm.pairs(3)


def test_the_gradient_passes_through():
    gradient = jax.grad(lambda x: (nm.fp4()(x) * jnp.arange(16.0)).sum())(jnp.ones(16))
    np.testing.assert_array_equal(gradient, np.arange(16.0))


# ---- pairs ----


def test_pairs_are_kept_whole_and_the_largest_are_kept():
    x = np.random.default_rng(6).standard_normal((3, 16, 5)).astype(np.float32)
    y = np.asarray(nm.prune(nm.pairs(nm.mse(2, 4)), jnp.asarray(x), axis=1))
    in_pairs = lambda v: np.moveaxis(v, 1, -1).reshape(-1, 4, 2)
    norms = np.linalg.norm(in_pairs(x), axis=-1)
    kept = norms >= np.sort(norms, -1)[:, 2:3]
    np.testing.assert_array_equal(in_pairs(y), np.where(kept[..., None], in_pairs(x), 0))
    p = nm.pairs(nm.mvue(2, 4))
    assert (p.facts.block, p.facts.pattern, p.facts.stochastic, p.kept()) == (8, (4, 8), True, 0.5)


@pytest.mark.parametrize("text", ["pairs(mse(2,4))", "pairs(mvue(2,4))"])
def test_pairs_with_a_value_that_is_not_finite_come_first(text):
    x = np.ones((64, 4, 2), np.float32)
    rng = np.random.default_rng(8)
    bad = rng.random((64, 4)) < 0.3
    x[bad, 1] = rng.choice([np.nan, np.inf], bad.sum())
    y = np.asarray(nm.prune(nm.parse_pruner(text), jnp.asarray(x.reshape(64, 8)), key=0)).reshape(64, 4, 2)
    found = ~np.isfinite(y).all(-1)
    assert (found <= bad).all()
    np.testing.assert_array_equal(found.sum(-1), np.minimum(bad.sum(-1), 2))


def probabilities(norms):
    """Return the probabilities of keeping n=2 of 4 with the least variance, by trying all saturated sets."""
    order = np.argsort(-norms)
    for count in range(3):
        rest = norms[order[count:]]
        tau = rest.sum() / (2 - count) if count < 2 else 0
        p = np.ones(4)
        p[order[count:]] = rest / tau if tau else 0
        if (p <= 1 + 1e-9).all():
            return np.minimum(p, 1)
    raise AssertionError


def test_random_pairs_have_no_bias_and_the_least_variance():
    rng, count = np.random.default_rng(7), 20000
    x = (rng.standard_normal((32, 8)) * rng.choice([1, 10], (32, 8))).astype(np.float32)
    draw = jax.jit(jax.vmap(lambda key: nm.pairs(nm.mvue(2, 4))(x, -1, nm.Ctx(key))))
    draws = np.asarray(draw(jax.random.split(jax.random.key(2), count)), np.float64)
    kept = draws.reshape(count, 32, 4, 2) != 0
    assert (kept[..., 0] == kept[..., 1]).all()
    assert (kept[..., 0].sum(-1) == 2).all()
    norms = np.linalg.norm(x.astype(np.float64).reshape(32, 4, 2), axis=-1)
    p = np.array([probabilities(v) for v in norms]).repeat(2, -1)
    variance = np.square(x.astype(np.float64)) * (1 / p - 1)
    z = z_scores(draws, x, np.where(p < 1, variance, 0))
    # the two values of a pair, and the pairs of a group, depend on each other: as few as one in eight is independent
    assert abs(z.mean()) < 5 / np.sqrt(z.size / 8)
    assert abs(np.square(z).mean() - 1) < 5 * np.sqrt(2 / (z.size / 8))
    # the variance of any other probabilities with the same sum is larger
    for group, i, j in itertools.product(range(32), range(4), range(4)):
        q = p[group, ::2].copy()
        q[i], q[j] = q[i] + 0.01, q[j] - 0.01
        if i != j and q.max() <= 1 and q.min() > 0:
            assert (norms[group] ** 2 / q).sum() > (norms[group] ** 2 / p[group, ::2]).sum()
