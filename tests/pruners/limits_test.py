"""The documented limits of pruners: what rounds, what overflows, and which of equal values are kept."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nmjax as nm

SUBNORMAL = np.array([1e-40, -2e-40, 3e-40, 4e-40], np.float32)
KEY = nm.Ctx(key=0)
_SAMPLE = jax.jit(lambda p, x, u: p.sample(x, u), static_argnums=0)


def draws(p, group, u):
    """Return the draws of one group, one for each uniform."""
    u = np.asarray(u, np.float32)
    return np.asarray(_SAMPLE(p, jnp.broadcast_to(group, (len(u), len(group))), u[:, None]))


def zeroed(p):
    return not np.asarray(jax.jit(lambda x: p(x, -1, KEY))(SUBNORMAL)).any()  # numpy compares subnormals too


def test_which_pruners_take_subnormal_numbers_as_zero():
    assert all(map(zeroed, (nm.mvue(2, 4), nm.mvue_approx(2, 4), nm.soft(2, 4), nm.uniform(2, 4))))
    assert not any(map(zeroed, (nm.mse(2, 4), nm.uniform(2, 4, rescale=False))))
    tile = nm.transposable(2, 4)(jnp.asarray(np.broadcast_to(SUBNORMAL, (4, 4))))
    assert (np.asarray(tile) != 0).sum() == 8
    packed = nm.pack(np.concatenate([np.float32([0, 1]), SUBNORMAL[:2]]))  # a third and a fourth value of a group
    assert packed.values.tolist() == [0, 1]


@pytest.mark.parametrize(
    "p", [nm.mvue(2, 4), nm.mvue_approx(2, 4), nm.uniform(2, 4), nm.rescale(nm.mse(2, 4), "group")]
)
def test_results_overflow_above_the_largest_number_of_the_dtype(p):
    largest = {np.float16(40_000): True, np.float16(30_000): False}  # a kept value is doubled
    for value, overflows in largest.items():
        y = np.asarray(p(jnp.full(4, value), -1, KEY))
        assert (np.isinf(y).sum() == 2) == overflows


def test_rescale_of_norms_that_overflow():
    p = nm.rescale(nm.mse(2, 4), over="group")
    assert np.isinf(p(jnp.float32([1e38, 1e38, 9e37, 9e37]))[:2]).all()
    assert np.isnan(p(jnp.float32([3e38, 3e38, 1e38, 1e38]))[:2]).all()


@pytest.mark.parametrize("p", [nm.mvue(1, 4), nm.mvue(2, 4)], ids=str)
def test_probabilities_are_multiples_of_one_in_two_to_the_23(p):
    small = np.float32(2**-26)  # of a threshold of 3 or 1.5
    assert (draws(p, np.float32([small, 1, 1, 1]), [0, 2**-23])[:, 0] != 0).tolist() == [True, False]
    ends = np.concatenate([np.arange(64), 2**23 - 1 - np.arange(64), 2**22 + np.arange(-64, 64)]) / 2**23
    assert not draws(p, np.float32([1, 1, 1, small]), ends)[:, 3].any()


def test_rounding_of_tau_moves_a_mean_by_at_most_one_part_in_256():
    """For 2:4 in bfloat16: the probabilities are exact, and the value is rounded."""
    rng, most = np.random.default_rng(0), 0
    for _ in range(20):
        group = jnp.asarray(rng.uniform(0.5, 1.5, 4), jnp.bfloat16)
        exact = np.asarray(group, np.float64)
        mean = draws(nm.mvue(2, 4), group, (np.arange(2**14) + 0.5) / 2**14).astype(np.float64).mean(0)
        tau = exact.sum() / 2  # no value is above it
        error = np.abs(mean / exact - 1)
        np.testing.assert_allclose(error, abs(float(jnp.bfloat16(tau)) / tau - 1), atol=3e-4)
        most = max(most, error.max())
    assert 0.001 < most <= 2**-8 + 3e-4


def test_which_of_equal_values_are_kept():
    ones = np.ones(4, np.float32)
    assert nm.mse(2, 4)(ones).tolist() == [1, 1, 0, 0]
    u = (np.arange(1000) + 0.5) / 1000
    pairs = [tuple(np.flatnonzero(y)) for y in draws(nm.mvue(2, 4), ones, u)]
    assert {pair: pairs.count(pair) for pair in set(pairs)} == {(0, 2): 500, (1, 3): 500}


@pytest.mark.parametrize(
    ("kind", "low", "high"),
    [("uniform", 1.02, 1.03), ("gaussian", 1.055, 1.065), ("log-normal", 1.14, 1.165), ("heavy log-normal", 1.2, 1.45)],
)
def test_variance_of_two_draws_over_the_least(kind, low, high):
    """By the closed forms of both, in float64, for groups of 2:4 of a million values."""
    rng = np.random.default_rng(0)
    shape = (250_000, 4)
    a = {
        "uniform": lambda: rng.random(shape),
        "gaussian": lambda: np.abs(rng.normal(size=shape)),
        "log-normal": lambda: rng.lognormal(0, 1, shape),
        "heavy log-normal": lambda: rng.lognormal(0, 2, shape),
    }[kind]()
    total, top = a.sum(1), a.max(1)
    least = np.where(2 * top <= total, total**2 / 2, (total - top) ** 2 + top**2) - (a**2).sum(1)
    p = np.zeros_like(a)
    for i, j in itertools.permutations(range(4), 2):  # first i, then j
        both = a[:, i] / total * a[:, j] / (total - a[:, i])
        p[:, i] += both
        p[:, j] += both
    two_draws = (a**2 * (1 / p - 1)).sum(1)
    assert low < two_draws.sum() / least.sum() < high
