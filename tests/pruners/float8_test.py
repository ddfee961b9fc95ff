"""FP8 rounding at random: on the format's own numbers, either neighbour, and exact on average."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

import nmjax as nm
from nmjax.pruners import float8

DTYPES = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("format", DTYPES)
def test_random_rounding_takes_both_neighbours_and_is_exact_on_average(format, dtype):
    with jax.enable_x64(dtype == "float64"):
        values = np.arange(256, dtype=np.uint8).view(DTYPES[format]).astype(np.float64)
        values = np.unique(values[np.isfinite(values)])
        rng = np.random.default_rng(0)
        x = np.concatenate([values, rng.uniform(-1, 1, 400) * 2.0 ** rng.integers(-20, 8, 400)]).astype(dtype)
        count = 256
        u = (np.arange(count) + 0.5) / count
        cast = jax.jit(lambda x, u: float8.cast(x, format, u).astype(x.dtype))
        drawn = np.asarray(cast(jnp.broadcast_to(x, (count, len(x))), jnp.asarray(u, jnp.float32)[:, None]), np.float64)
    below = values[np.searchsorted(values, x, "right") - 1]
    above = values[np.searchsorted(values, x, "left")]
    assert (drawn.min(0) >= below).all()
    assert (drawn.max(0) <= above).all()
    assert np.isin(drawn, values).all()
    assert (np.abs(drawn.mean(0) - x) <= (above - below) / count + np.abs(x) * 1e-6).all()


@pytest.mark.slow
@pytest.mark.parametrize("format", DTYPES)
def test_random_rounding_of_float64_is_that_of_float32(format):
    x = np.random.default_rng(1).standard_normal((8, 16)).astype(np.float32)
    x[0, 0] = 4.0  # the largest magnitude, with which the scale is a power of two times a whole number
    p = nm.fp8(format, rounding="random")
    narrow = np.asarray(nm.prune(p, jnp.asarray(x), key=0))
    with jax.enable_x64(True):
        wide = nm.prune(p, jnp.asarray(x, jnp.float64), key=0)
        assert wide.dtype == jnp.float64
        np.testing.assert_allclose(np.asarray(wide), narrow, rtol=1e-6)


@pytest.mark.slow
def test_a_layer_takes_an_empty_batch():
    model = nm.nnx.sparsify(nnx.Linear(8, 4, rngs=nnx.Rngs(0)), nm.Recipe({".*": "s_ste(2,4,fp8=True)"}))
    assert model(jnp.ones((0, 8))).shape == (0, 4)


@pytest.mark.parametrize(("format", "most"), [("e4m3", 448), ("e5m2", 57344)])
@pytest.mark.parametrize("u", [None, 0.999])
def test_finite_values_beyond_the_range_are_its_ends_and_infinities_are_nan(format, most, u):
    x = jnp.array([1e6, -1e6, jnp.inf, -jnp.inf, jnp.nan])
    got = float8.cast(x, format, None if u is None else jnp.full(5, u)).astype(jnp.float32)
    np.testing.assert_array_equal(got, [most, -most, np.nan, np.nan, np.nan])
