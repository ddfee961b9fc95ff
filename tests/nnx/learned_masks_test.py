"""Learned masks: what scores begin with, what a masked model computes, what its scores learn, what is refused."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import nmjax as nm
from nmjax.nnx import mask_scores, masked

X = jax.random.normal(jax.random.key(3), (50, 8)) * jnp.arange(1.0, 9.0)[None]


def model():
    make = lambda i: nnx.Linear(8, 8, rngs=nnx.Rngs(i))
    return nnx.Sequential(make(0), nnx.relu, make(1))


def test_at_the_beginning_masks_are_those_of_wanda_and_of_magnitude():
    dense = model()
    recipe = nm.Recipe((("layers/0", "ste(2,4)"), (".*", "dense")))
    for solver, inputs in ((nm.oneshot.wanda, nm.nnx.calibrate(dense, [X])), (nm.oneshot.magnitude, None)):
        scores = mask_scores(dense, "layers/0/kernel", inputs)
        pruned = nm.nnx.prune(dense, recipe, [X], solver).model
        np.testing.assert_allclose(masked(dense, scores)(X), pruned(X), rtol=1e-6)
        np.testing.assert_allclose(scores["layers/0/kernel"].reshape(2, 4, 8).mean(1), 1, rtol=1e-6)


def test_the_gradient_of_a_score_is_that_of_its_weight_times_the_weight():
    """Also where the weight is dropped: there it is the gradient of the product's weight, which is zero."""
    dense, path = model(), "layers/0/kernel"
    scores = mask_scores(dense, path)
    loss = lambda model: jnp.square(model(X) - 1).mean()
    value, found = jax.value_and_grad(lambda scores: loss(masked(dense, scores)))(scores)
    w, mask = dense.layers[0].kernel[...], nm.mse(2, 4).mask(scores[path], 0)

    def by_hand(used):
        return jnp.square(
            jax.nn.relu(X @ used + dense.layers[0].bias[...][None]) @ dense.layers[2].kernel[...] - 1
        ).mean()

    by_hand_value, gradient = jax.value_and_grad(by_hand)(jnp.where(mask, w, 0))
    np.testing.assert_allclose(value, by_hand_value, rtol=1e-6)
    np.testing.assert_allclose(found[path], gradient * w, rtol=1e-4, atol=1e-6)
    assert jnp.any(jnp.where(mask, 0, found[path]))
    of_model = nnx.grad(lambda model: loss(masked(model, scores)))(dense)
    assert not jnp.any(of_model["layers"][0]["kernel"][...])


@pytest.mark.parametrize("seed", [1, 5, 6])
def test_with_a_rate_that_ends_training_may_end_at_the_best_of_all_masks(seed):
    """Of one output, by enumeration, for three seeds of ten. Inputs have correlations: Wanda chooses another mask."""
    normal = lambda i, *shape: jax.random.normal(jax.random.key(100 * i + seed), shape)
    x = normal(0, 64, 3) @ normal(1, 3, 8) + 0.3 * normal(2, 64, 8)
    dense = nnx.Linear(8, 1, use_bias=False, rngs=nnx.Rngs(seed))
    y, w = dense(x), np.asarray(dense.kernel[...])
    pairs = [np.isin(np.arange(4), pair) for pair in itertools.combinations(range(4), 2)]
    masks = [np.concatenate(both)[:, None] for both in itertools.product(pairs, repeat=2)]
    least = min(float(jnp.square(x @ (w * mask) - y).mean()) for mask in masks)
    loss = lambda scores: jnp.square(masked(dense, scores)(x) - y).mean()
    step = jax.jit(lambda scores, rate: jax.tree.map(lambda s, g: s - rate * g, scores, jax.grad(loss)(scores)))
    scores = mask_scores(dense, ".*", nm.nnx.calibrate(dense, [x]))
    assert loss(scores) > 1.2 * least
    for i in range(400):
        scores = step(scores, jnp.float32(0.3 * (1 - i / 400)))
    np.testing.assert_allclose(loss(scores), least, rtol=1e-4)


def test_inputs_that_are_always_zero_leave_the_choice_to_magnitude():
    dense, x = model(), X.at[:, :4].set(0)
    found = masked(dense, mask_scores(dense, "layers/0/kernel", nm.nnx.calibrate(dense, [x]))).layers[0].kernel[...]
    pruned = nm.nnx.prune(dense, nm.Recipe((("layers/0", "ste(2,4)"), (".*", "dense"))), [x], nm.oneshot.wanda)
    np.testing.assert_array_equal(found, pruned.model.layers[0].kernel[...])


def test_bf16_weights_and_scores_without_bounds():
    dense = nnx.Linear(4, 2, param_dtype=jnp.bfloat16, kernel_init=nnx.initializers.constant(-2.0), rngs=nnx.Rngs(0))
    scores = {"kernel": jnp.array([[jnp.inf, 3.0], [1.0, 2.0], [-jnp.inf, 1.0], [2.0, 0.0]])}
    found = masked(dense, scores).kernel[...]
    assert found.dtype == jnp.bfloat16
    np.testing.assert_array_equal(found.astype(jnp.float32), [[-2, -2], [0, -2], [-2, 0], [0, 0]])
    assert not np.signbit(np.asarray(found.astype(jnp.float32)))[np.asarray(found == 0)].any()
    gradient = jax.grad(lambda scores: masked(dense, scores).kernel[...].astype(jnp.float32).sum())(scores)
    np.testing.assert_array_equal(gradient["kernel"], jnp.where(jnp.isfinite(scores["kernel"]), -2.0, 0.0))


def test_what_is_refused_or_odd():
    dense = model()
    zeros = nnx.Linear(4, 1, kernel_init=nnx.initializers.zeros, rngs=nnx.Rngs(0))
    assert not jnp.any(mask_scores(zeros, "kernel")["kernel"])
    inputs = nm.nnx.calibrate(dense, [X], only="layers/0")
    with pytest.raises(ValueError, match="mask_scores: inputs has no statistics of layers/2"):
        mask_scores(dense, ".*kernel", inputs)
    with pytest.raises(ValueError, match="mask_scores: no kernel of a registered layer has a path that matches 'none'"):
        mask_scores(dense, "none")
    with pytest.raises(ValueError, match=r"mask_scores: '\(' is not a regular expression: "):
        mask_scores(dense, "(")
    with pytest.raises(ValueError, match="mask_scores: m=3 does not divide the 8 inputs of layers/0/kernel"):
        mask_scores(dense, ".*kernel", m=3)
    with pytest.raises(ValueError, match="mask_scores: layers/0/nm_state prunes its weight at each step"):
        mask_scores(nm.nnx.sparsify(model(), nm.Recipe({".*": "ste(2,4)"})), ".*kernel")
    conv = nnx.Conv(4, 4, (3, 3), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"mask_scores: kernel has shape \(3, 3, 4, 4\), and only matrices"):
        mask_scores(conv, ".*")
    with pytest.raises(ValueError, match="masked: the model has no parameter 'other', which scores have"):
        masked(dense, {"other": jnp.ones((8, 8))})
    square = nnx.Einsum("nd,od->no", (8, 8), rngs=nnx.Rngs(0))  # its groups would lie along axis 1
    with pytest.raises(ValueError, match=r"only matrices \[inputs, outputs\] are changed"):
        mask_scores(square, ".*")
    tied = model()
    tied.layers[2].kernel = tied.layers[0].kernel
    with pytest.raises(ValueError, match="layers/0/kernel and layers/2/kernel are one weight. Name one of them"):
        mask_scores(tied, ".*kernel")
    scores = mask_scores(dense, "layers/0/kernel")
    with pytest.raises(ValueError, match=r"the scores of layers/0/kernel have shape \(8, 1\), and it has \(8, 8\)"):
        masked(dense, {path: v[:, :1] for path, v in scores.items()})
    with pytest.raises(ValueError, match="masked: n lies between 1 and m, got n=5 and m=4"):
        masked(dense, scores, n=5)
    with pytest.raises(ValueError, match="masked: layers/0/nm_state prunes its weight"):
        masked(nm.nnx.sparsify(model(), nm.Recipe({".*": "ste(2,4)"})), scores)
