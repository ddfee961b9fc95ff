"""Figures that papers and their released code state."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nmjax as nm
from tests.pruners.unbiased_test import measured_inclusion


@pytest.mark.slow
@pytest.mark.parametrize(
    ("draw", "beta"),
    [
        (lambda rng: 0.02 * rng.normal(size=(250_000, 4)), 1.483),
        (lambda rng: rng.uniform(-1, 1, (250_000, 4)), 1.751),
        (lambda rng: rng.laplace(size=(250_000, 4)), 1.291),
    ],
    ids=["gaussian", "uniform", "laplace"],
)
def test_the_scale_of_s_ste_at_the_start(draw, beta):
    w = jnp.asarray(draw(np.random.default_rng(3)), jnp.float32)
    assert abs(float(nm.soft(2, 4).init(w)) - beta) < 6e-3  # four standard errors, below 1.4e-3 each


def test_the_fading_of_the_released_config():
    """D at 10, 25, 50, 70 and 100 % of ViT-B's 109,200 steps, with rate 1e-4."""
    got = [float(nm.exponential(1e-4)(int(109_200 * part))) for part in (0.1, 0.25, 0.5, 0.7, 1)]
    np.testing.assert_allclose(got, [0.34, 0.065, 4.3e-3, 4.8e-4, 1.8e-5], rtol=0.02)


def test_what_transposable_masks_keep_of_gaussian_weights():
    x = jax.random.normal(jax.random.key(5), (1024, 1024))
    kept, size = jax.jit(nm.transposable(2, 4).mask)(x).astype(x.dtype), jnp.abs(x)
    assert abs(float((size * kept).sum() / size.sum()) - 0.7024) < 1.3e-3  # four standard errors
    assert abs(float((size**2 * kept).sum() / (size**2).sum()) - 0.8185) < 2e-3


@pytest.mark.parametrize(
    ("a", "expected"),
    [
        ((1, 2, 3, 4), (0.234524, 0.441270, 0.608333, 0.715873)),
        ((1, 1, 1, 1), (0.5, 0.5, 0.5, 0.5)),
        ((0.1, 0.1, 0.1, 5), (0.334059, 0.334059, 0.334059, 0.997823)),
        ((0.3, 0.7, 1.2, 2), (0.179221, 0.397669, 0.624575, 0.798535)),
    ],
)
def test_how_often_two_draws_keep_a_value(a, expected):
    got = measured_inclusion(np.array([a, [-v for v in a]], np.float32))
    np.testing.assert_allclose(got, [expected, expected], atol=1e-6)
