"""The test of every model of another library: plan, train five steps, harden, and run the unpatched model hardened."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import nmjax as nm
from nmjax.analysis.patterns import violations


def goes_sparse(make, call, method="s_ste(2,4)", inputs=(), options=None, stays_dense=()):
    """Train a model n:m, and check that every matrix is reached or told.

    Args:
      make: A function that makes the dense model, always with the same numbers.
      call: A function of a model that returns its output, an array.
      method: The method of all layers.
      inputs: Examples of the inputs, if `sparsify` needs them.
      options: Keyword arguments of the call, likewise.
      stays_dense: The paths of the parameters that no registered layer has.
    """
    recipe, model, options = nm.Recipe({".*": method}), make(), options or {}
    plan = nm.nnx.plan(model, recipe, *inputs, **options)
    assert plan.missed == tuple(stays_dense)
    assert not plan.refused
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        nm.nnx.sparsify(model, recipe, *inputs, seed=1, **options)
    said = [str(one.message) for one in caught if "no registered layer has" in str(one.message)]
    assert len(said) == bool(stays_dense)
    matrices = {p for p, v in flat(model).items() if sum(n > 1 for n in v.shape) > 1 and p.split("/")[-1] != "bias"}
    assert matrices == set(nm.nnx.patterns(model)) | set(stays_dense)

    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, now):
        nm.nnx.set_step(model, now)
        loss, gradients = nnx.value_and_grad(lambda m: (call(m).astype(jnp.float32) ** 2).mean())(model)
        optimizer.update(model, gradients)
        return loss

    losses = [step(model, optimizer, jnp.int32(i)) for i in range(5)]
    assert np.isfinite(losses).all()
    assert losses[4] < losses[0]

    hard = nm.nnx.harden(model)
    values, promised = flat(hard), nm.nnx.patterns(hard)
    assert all(promised.values())
    for path, pattern in promised.items():
        assert int(violations(values[path], pattern)) == 0
        assert float((values[path] != 0).mean()) <= pattern.n / pattern.m
    unpatched = make()
    nnx.update(unpatched, nnx.state(hard, nnx.Param))
    assert {type(m) for _, m in nnx.iter_modules(unpatched)} == {type(m) for _, m in nnx.iter_modules(hard)}
    run = nnx.jit(call)
    np.testing.assert_array_equal(run(unpatched), run(hard))
    return hard


def flat(model):
    """Return the parameters of a model by their paths."""
    return {"/".join(map(str, path)): v[...] for path, v in nnx.to_flat_state(nnx.state(model, nnx.Param))}


def tokens(batch=2, length=8, vocabulary=64):
    """Return tokens, their positions, and a causal mask."""
    ids = jax.random.randint(jax.random.key(0), (batch, length), 0, vocabulary)
    positions = jnp.tile(jnp.arange(length), (batch, 1))
    return ids, positions, jnp.tile(jnp.tril(jnp.ones((length, length), bool)), (batch, 1, 1))
