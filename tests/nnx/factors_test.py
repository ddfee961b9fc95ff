"""Changes of low rank: what they compute, what they keep, and what they are refused for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import nmjax as nm
from nmjax.nnx import LowRank, changed, low_rank

X = jax.random.normal(jax.random.key(3), (6, 8))


def model():
    make = lambda i: nnx.Linear(8, 8, rngs=nnx.Rngs(i))
    sparse = nm.nnx.sparsify(nnx.Sequential(make(0), nnx.relu, make(1)), nm.Recipe({".*": "ste(2,4)"}))
    return nm.nnx.harden(sparse)


def drawn(factors):
    return {
        path: LowRank(*(jax.random.normal(jax.random.key(i), v.shape) for i, v in enumerate(own)))
        for path, own in factors.items()
    }


def test_a_change_is_the_masked_product_by_hand():
    hard = model()
    factors = drawn(low_rank(hard, "layers/0/kernel", 3, rngs=nnx.Rngs(0)))
    assert {path: (v.down.shape, v.up.shape) for path, v in factors.items()} == {"layers/0/kernel": ((8, 3), (3, 8))}
    new, (down, up) = changed(hard, factors, scale=0.5), factors["layers/0/kernel"]
    w = np.asarray(hard.layers[0].kernel[...], np.float64)
    by_hand = w + np.where(w != 0, 0.5 * (np.asarray(down, np.float64) @ np.asarray(up, np.float64)), 0)
    np.testing.assert_allclose(new.layers[0].kernel[...], by_hand, rtol=1e-5)
    assert (np.asarray(new.layers[0].kernel[...] == 0) == (w == 0)).all()
    assert (w == 0).mean() == 0.5
    np.testing.assert_array_equal(hard.layers[0].kernel[...], w.astype(np.float32))  # a copy was changed
    np.testing.assert_array_equal(new.layers[2].kernel[...], hard.layers[2].kernel[...])


def test_at_the_beginning_nothing_changes_and_only_factors_learn():
    hard = model()
    factors = low_rank(hard, ".*kernel", 2, rngs=nnx.Rngs(0))
    np.testing.assert_array_equal(changed(hard, factors)(X), hard(X))
    loss = lambda hard, factors: jnp.square(changed(hard, factors)(X) - 1).mean()
    of_model, of_factors = nnx.jit(nnx.grad(loss, argnums=(0, 1)))(hard, factors)
    assert not any(jnp.any(v) for path, v in nnx.to_flat_state(of_model) if path[-1] == "kernel")
    assert all(jnp.any(v.up) and not jnp.any(v.down) for v in of_factors.values())  # up is zero


def test_a_merged_model_computes_what_was_trained_and_is_saved_as_any_other():
    hard = model()
    factors = drawn(low_rank(hard, ".*kernel", 2, rngs=nnx.Rngs(0)))
    merged = changed(hard, factors)
    assert {str(v) for v in nm.nnx.patterns(merged).values()} == {"2:4 along axis 0"}
    alike = lambda model: [(path, v.shape, v.dtype) for path, v in nnx.to_flat_state(nnx.state(model))]
    assert alike(merged) == alike(hard)


def test_what_does_not_fit_is_refused():
    hard = model()
    with pytest.raises(ValueError, match="rank must be at least 1, got 0"):
        low_rank(hard, ".*", 0, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="no kernel of a registered layer has a path that matches 'head'"):
        low_rank(hard, "head", 2, rngs=nnx.Rngs(0))
    size = {"width": 8, "depth": 2, "heads": 2, "kv_heads": 1, "hidden": 16, "vocabulary": 9, "length": 4}
    scanned = nm.models.Decoder(**size, scan=True, rngs=nnx.Rngs(0))
    with pytest.raises(
        ValueError, match=r"blocks/.* has shape \(2, .*only matrices .* are changed. Name others; a model"
    ):
        low_rank(scanned, ".*", 2, rngs=nnx.Rngs(0))
    sparse = nm.nnx.sparsify(nnx.Linear(8, 4, rngs=nnx.Rngs(0)), nm.Recipe({".*": "ste(2,4)"}))
    with pytest.raises(ValueError, match="prunes its weight at each step. Pass nm.nnx.harden"):
        low_rank(sparse, ".*", 2, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="the model has no parameter 'other', which factors have"):
        changed(hard, {"other": LowRank(jnp.ones((8, 1)), jnp.ones((1, 8)))})
