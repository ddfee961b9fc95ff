"""Choices that neighbours share: against the best choice by enumeration, in every layout, unbiased, refused."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nmjax as nm
from nmjax.core.context import Axes

VENOM = nm.chain(nm.shared(nm.mse(4, 8), 4), nm.mse(2, 8))


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


def test_columns_are_those_of_the_largest_norms_and_values_the_largest_of_them():
    x = normal(0, 8, 16)
    kept = np.zeros((8, 16), bool)
    for rows, columns in itertools.product((slice(0, 4), slice(4, 8)), (slice(0, 8), slice(8, 16))):
        tile = np.asarray(x[rows, columns], np.float64)
        chosen = np.argsort(-np.square(tile).sum(0))[:4]
        for i, row in enumerate(tile):
            kept[rows.start + i, columns.start + chosen[np.argsort(-np.abs(row[chosen]))[:2]]] = True
    np.testing.assert_array_equal(nm.prune(VENOM, x, axis=1), np.where(kept, x, 0))
    assert VENOM.kept() == 0.25
    assert nm.prune(VENOM, x.T, axis=0).T.tolist() == nm.prune(VENOM, x, axis=1).tolist()


def test_kept_magnitude_is_near_the_best_of_all_choices():
    """Of 70 sets of columns for four rows: 98 % of the best sum on average, never less than 85 %."""
    x = normal(1, 4 * 100, 8)
    found = np.abs(np.asarray(nm.prune(VENOM, x, axis=1))).reshape(100, 32).sum(1)
    size = np.abs(np.asarray(x)).reshape(100, 4, 8)
    sets = [np.sort(size[..., list(s)], -1)[..., -2:].sum((1, 2)) for s in itertools.combinations(range(8), 4)]
    shares = found / np.max(sets, 0)
    assert shares.max() < 1 + 1e-6
    assert shares.mean() > 0.975
    assert shares.min() > 0.85


def test_neighbours_are_tokens_of_activations_and_outputs_of_weights():
    x = normal(2, 3, 8, 16)
    together = jnp.stack([nm.prune(VENOM, one, axis=1) for one in x])
    np.testing.assert_array_equal(nm.prune(VENOM, x, axis=2), together)
    weight = nm.Ctx(axes=Axes(1, ()))
    np.testing.assert_array_equal(VENOM(normal(3, 16, 8), 0, weight), VENOM(normal(3, 16, 8).T, 1, nm.Ctx()).T)


@pytest.mark.parametrize("axis", [0, 1])
def test_unbiased_choices_are_unbiased(axis):
    x, draws = normal(4, 16, 16), 20_000
    p = nm.chain(nm.shared(nm.mvue(4, 8), 8), nm.mvue(2, 8))
    draw = jax.jit(jax.vmap(lambda key: nm.prune(p, x, axis=axis, key=key)))
    found = np.asarray(draw(jax.random.split(jax.random.key(5), draws)), np.float64)
    scores = (found.mean(0) - np.asarray(x)) / (found.std(0) / np.sqrt(draws))
    assert np.abs(scores).max() < 4.5  # of 256 values; by chance in 0.2 % of seeds
    moved = np.moveaxis(found, 1 + axis, -1).reshape(draws, -1, 2, 8)
    assert ((moved != 0).sum(-1) == 2).all()
    columns = (moved.reshape(draws, 2, 8, 2, 8) != 0).any(2).sum(-1)  # that eight neighbours use
    assert columns.max() == 4


def test_a_layer_computes_what_its_slots_say():
    x, w = normal(6, 8, 16), normal(7, 16, 4)
    sparsity = nm.parse("vnm(4); y_w=ste(mse(2,4))")
    kept, pruned = nm.prune(VENOM, x, axis=1), nm.prune(nm.mse(2, 4), w, axis=0)

    def product(x, w):
        return nm.einsum("ti,io->to", x, w, sparsity=sparsity)

    y, gradient = jax.vjp(product, x, w)
    np.testing.assert_allclose(y, kept @ pruned, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(gradient(y)[1], kept.T @ y, rtol=1e-5, atol=1e-5)  # dw multiplies what is kept


def test_a_dense_tail_has_no_pruner():
    method = nm.parse("vnm(16,2,8,dense_from=10)")
    assert method.at(9) == nm.methods.vnm()
    assert method.at(10) == nm.methods.dense()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: nm.shared(nm.mse(4, 8), 0), "v is the number of neighbours that share a choice, at least 1"),
        (lambda: nm.shared(nm.transposable(2, 4)), r"the norms of shared have one. Write shared\(mse\(2,4\)\)"),
        (lambda: nm.shared(nm.mse(4, 8), 5)(jnp.ones((8, 8))), "axis 0 of an array of shape .* has 8 values, which 5"),
        (lambda: nm.shared(nm.mse(4, 8))(jnp.ones(8)), r"no other axis.* Write mse\(4,8\)"),
        (lambda: nm.methods.vnm(n=5), "vnm: n lies between 1 and 4, and m is more than 4; got n=5 and m=8"),
        (lambda: nm.methods.vnm(m=4), "got n=2 and m=4"),
    ],
)
def test_what_does_not_fit_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
