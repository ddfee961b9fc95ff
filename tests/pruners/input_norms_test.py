"""`wanda` and `ria`: the axes that `ria` sums over, and inputs that are always zero."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nmjax as nm

W = jax.random.normal(jax.random.key(0), (5, 6, 8, 4))
NORMS = jnp.arange(1.0, 9.0)


@pytest.mark.slow
@pytest.mark.parametrize("p", [nm.wanda(2, 4), nm.ria(2, 4)])
def test_prune_is_the_call_of_the_pruner(p):
    """Outputs are all other axes of an array that no product prunes."""
    np.testing.assert_array_equal(nm.prune(p, W, axis=2, state=NORMS), p(W, 2, nm.Ctx(state=NORMS)))


@pytest.mark.slow
def test_ria_by_its_formula():
    size = jnp.abs(W)
    share = size / size.sum(2, keepdims=True) + size / size.sum((0, 1, 3), keepdims=True)
    scores = share * jnp.sqrt(NORMS)[None, None, :, None]
    kept = nm.prune(nm.ria(2, 4), W, axis=2, state=NORMS) != 0
    np.testing.assert_array_equal(kept, nm.prune(nm.mse(2, 4), scores, axis=2) != 0)


@pytest.mark.parametrize("p", [nm.wanda(2, 4), nm.ria(2, 4), nm.ria(2, 4, power=2.0)])
@pytest.mark.parametrize("size", [1.0, 1e-9])
def test_weights_of_inputs_that_are_always_zero_are_kept_last(p, size):
    w = size * jnp.array([1.0, 2.0, 3.0, 4.0])
    assert (nm.prune(p, w, state=jnp.array([1.0, 1.0, 0.0, 0.0])) != 0).tolist() == [True, True, False, False]
    assert (nm.prune(p, w, state=jnp.zeros(4)) != 0).tolist() == [False, False, True, True]
