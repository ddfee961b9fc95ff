"""The documented limits of pruners: what rounds, what overflows, and which of equal values are kept."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nmjax as nm
from tests.pruners.unbiased_test import sample

SUBNORMAL = np.array([1e-40, -2e-40, 3e-40, 4e-40], np.float32)
KEY = nm.Ctx(key=0)


def draws(p, group, u):
    """Return the draws of one group, one for each uniform."""
    return sample(p, np.broadcast_to(group, (len(u), len(group))), np.asarray(u, np.float32))


def zeroed(p):
    return not np.asarray(jax.jit(lambda x: p(x, -1, KEY))(SUBNORMAL)).any()  # numpy compares subnormals too


@pytest.mark.slow
def test_which_pruners_take_subnormal_numbers_as_zero():
    assert all(map(zeroed, (nm.mvue(2, 4), nm.mvue_approx(2, 4), nm.soft(2, 4), nm.uniform(2, 4))))
    assert not any(map(zeroed, (nm.mse(2, 4), nm.uniform(2, 4, rescale=False))))
    tile = nm.transposable(2, 4)(jnp.asarray(np.broadcast_to(SUBNORMAL, (4, 4))))
    assert (np.asarray(tile) != 0).sum() == 8
    packed = nm.pack(np.concatenate([np.float32([0, 1]), SUBNORMAL[:2]]))  # a third and a fourth value of a group
    assert packed.values.tolist() == [0, 1]


@pytest.mark.slow
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


def test_which_of_equal_values_are_kept():
    ones = np.ones(4, np.float32)
    assert nm.mse(2, 4)(ones).tolist() == [1, 1, 0, 0]
    u = (np.arange(1000) + 0.5) / 1000
    pairs = [tuple(np.flatnonzero(y)) for y in draws(nm.mvue(2, 4), ones, u)]
    assert {pair: pairs.count(pair) for pair in set(pairs)} == {(0, 2): 500, (1, 3): 500}
