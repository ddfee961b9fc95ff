"""Plans, masks, scales and measures of linen variables are those of an nnx model with the same weights."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn, nnx

import nmjax as nm
from nmjax import linen

pytestmark = pytest.mark.sampled

RECIPE = nm.Recipe({
    "up": "s_ste(2,4); dx_g=mvue(2,4)", "down": "fst(every=2)", "out": "mdgf(1,4,linear(1,0,9))", "head": "dense",
})  # fmt: skip
SIZES = {"up": (16, 32), "down": (32, 16), "out": (16, 16), "head": (16, 4)}


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        for name, (_, features) in SIZES.items():
            x = nn.Dense(features, name=name)(x)
        return x


class Nnx(nnx.Module):
    def __init__(self, rngs):
        for name, sizes in SIZES.items():
            setattr(self, name, nnx.Linear(*sizes, rngs=rngs))

    def __call__(self, x):
        for name in SIZES:
            x = getattr(self, name)(x)
        return x


X = jnp.asarray(np.random.default_rng(0).integers(-3, 4, (8, 16)), jnp.float32)


@functools.cache
def both():
    """Return variables and an nnx model with the same weights, at the same step."""
    model = Nnx(nnx.Rngs(0))
    params = {
        name: {"kernel": getattr(model, name).kernel[...], "bias": getattr(model, name).bias[...]} for name in SIZES
    }
    nm.nnx.sparsify(model, RECIPE, seed=7)
    nm.nnx.set_step(model, 4)
    with linen.sparsify(RECIPE, seed=7, strict=True):
        variables = Linen().init(jax.random.key(0), X)
    return linen.set_step(linen.reset_state({**variables, "params": params}), 4), model


@pytest.mark.slow
def test_patterns_are_those_of_nnx():
    variables, model = both()
    expected = nm.nnx.patterns(model)
    assert linen.patterns(variables) == expected
    late = nnx.clone(model)
    nm.nnx.set_step(late, 9)  # where the schedule ends
    hard = linen.harden(linen.set_step(variables, 9))
    assert linen.patterns(hard) == expected == nm.nnx.patterns(nm.nnx.harden(late))
    assert {path: None if n is None else int(n) for path, n in linen.violations(hard).items()} == {
        "up/kernel": 0, "down/kernel": 0, "out/kernel": 0, "head/kernel": None,
    }  # fmt: skip
    for name, n in nm.metrics.violations(variables["params"], linen.patterns(variables)).items():
        assert int(n) == int(linen.violations(variables)[name]) > 0


@pytest.mark.slow
def test_masks_and_scales_are_those_of_nnx():
    variables, model = both()
    masks, expected = linen.masks(variables), nnx.to_pure_dict(nm.nnx.masks(model))
    jax.tree.map(np.testing.assert_array_equal, masks, expected)
    assert all(v.dtype == bool for v in jax.tree.leaves(masks))
    scales, expected = linen.scales(variables), nm.nnx.scales(model)
    assert list(scales) == list(expected) == ["up"]
    np.testing.assert_allclose(scales["up"], expected["up"], rtol=1e-6)


@pytest.mark.slow
def test_measures_are_those_of_nnx():
    variables, model = both()
    measured, expected = linen.weights(variables), nm.nnx.weights(model)
    assert measured.keys() == expected.keys() == {"up", "down", "out"}
    for name in measured:
        assert measured[name]._fields == expected[name]._fields
        np.testing.assert_allclose(measured[name], expected[name], rtol=1e-5)
    with linen.sparsify(RECIPE, seed=7):
        loss = lambda variables, x: (Linen().apply(variables, x) ** 2).sum()
        errors = jax.jit(lambda v: linen.gradient_errors(v, loss, X, draws=3))(variables)
    expected = nm.nnx.gradient_errors(model, lambda model, x: (model(x) ** 2).sum(), X, draws=3)
    assert errors.keys() == expected.keys() == {"up", "down", "out"}
    assert float(errors["up"].variance) > 0
    for name in errors:
        np.testing.assert_allclose(errors[name], expected[name], rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_a_stack_is_measured_as_one_layer():
    class Stack(nn.Module):
        @nn.compact
        def __call__(self, x):
            mapped = {"variable_axes": {"params": 1, "nm": 1}, "split_rngs": {"params": True}, "axis_size": 3}
            return nn.vmap(nn.Dense, in_axes=None, out_axes=0, **mapped)(8, name="all")(x).sum(0)

    recipe = nm.Recipe({".*": "s_ste(2,4)"})
    with linen.sparsify(recipe, strict=True):
        variables = linen.set_step(Stack().init(jax.random.key(0), X), 2)
        loss = lambda variables, x: (Stack().apply(variables, x) ** 2).sum()
        errors = linen.gradient_errors(variables, loss, X, draws=2)
    w, scale = variables["params"]["all"]["kernel"], linen.scales(variables)["all"]
    assert w.shape == (16, 3, 8)
    assert scale.shape == (3,)
    one = [nm.soft(2, 4)(w[:, i], 0, nm.Ctx(state=scale[i])) for i in range(3)]
    hard = linen.harden(variables)["params"]["all"]["kernel"]
    np.testing.assert_allclose(hard, jnp.stack(one, 1), rtol=1e-6)
    np.testing.assert_array_equal(linen.masks(linen.harden(variables))["all"]["kernel"], True)
    assert str(linen.patterns(variables)["all/kernel"]) == "2:4 along axis 0"
    measured = linen.weights(variables)["all"]
    np.testing.assert_allclose(measured.error, jnp.linalg.norm(hard - w) / jnp.linalg.norm(w), rtol=1e-5)
    assert float(errors["all"].variance) > 0


def rows(plan):
    """Return the rows of a plan by their paths, without the classes of the layers. Phases are nnx's alone."""
    return {row.path: row._replace(kind="", phases=()) for row in plan.layers}


@pytest.mark.slow
def test_a_plan_is_that_of_nnx():
    model = Nnx(nnx.Rngs(0))
    plan, expected = linen.plan(Linen(), RECIPE, X), nm.nnx.plan(model, RECIPE, X)
    assert rows(plan) == rows(expected)
    assert (plan.elsewhere, plan.uncovered, plan.parameters) == (0, (), expected.parameters)
    assert plan.forward == expected.forward
    assert {row.kind for row in plan.layers} == {"Dense"}
    shape = jax.ShapeDtypeStruct(X.shape, X.dtype)
    assert rows(linen.plan(Linen(), RECIPE, shape)) == rows(plan)
    dense = linen.plan(Linen(), X)
    assert dense.training == nm.nnx.plan(Nnx(nnx.Rngs(0)), X).training


def test_a_plan_reads_arguments_and_counts_stacks():
    recipe = nm.Recipe({r"blocks/.*": "ste(2,4)"})

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x, train):
            x = nn.Dropout(0.5, deterministic=not train)(nn.Embed(7, 16, name="embed")(x))

            class Block(nn.Module):
                @nn.compact
                def __call__(self, x, _):
                    up = nn.jit(nn.Dense)(32, name="up")
                    return nn.Dense(16, name="down")(up(x)) + x @ x.T @ x, None

            axes = {"params": 0, "nm": 0}
            scanned = nn.scan(Block, variable_axes=axes, split_rngs={"params": True}, length=3)
            return scanned(name="blocks")(x, None)[0]

    tokens = jnp.arange(8) % 7
    for _ in range(2):  # what is compiled already is planned too
        plan = linen.plan(Model(), recipe, tokens, train=True)
        assert [(row.path, row.kernel, row.flops) for row in plan.layers] == [
            ("blocks/down", (3, 32, 16), 3 * 2 * 8 * 32 * 16),
            ("blocks/up", (3, 16, 32), 3 * 2 * 8 * 32 * 16),
        ]
    assert plan.elsewhere == 3 * 2 * (8 * 16 * 8 + 8 * 8 * 16)
    assert plan.uncovered == (("embed/embedding", (7, 16)),)
    assert plan.layers[0].slots[0].groups == 3 * 32 * 16 // 4


@pytest.mark.slow
def test_a_plan_says_what_would_be_refused():
    refused = lambda recipe, model=Linen(): dict(linen.plan(model, recipe, X).refused)
    assert "matches no layer's whole path" in refused(nm.Recipe({"mlp": "ste(2,4)"}))["the rule 'mlp'"]
    assert "do not divide into groups of 5" in refused(nm.Recipe({"up": "ste(2,5)"}))["up"]
    masked = nn.Conv(8, (3,), mask=jnp.ones((3, 16, 8)))
    told = dict(linen.plan(masked, nm.Recipe({".*": "ste(2,4)"}), X[None]).refused)
    said = "multiplies no input by kernel of shape (3, 16, 8): mul takes it"
    assert said in told[""]
    with pytest.raises(ValueError, match=re.escape(said)), linen.sparsify(nm.Recipe({".*": "ste(2,4)"})):
        masked.init(jax.random.key(0), X[None])
    everything = nm.Recipe({".*": "ste(2,4)"})
    assert "has no registered layer" in refused(everything, nn.LayerNorm())["the model"]
    with pytest.raises(ValueError, match="^LayerNorm has no registered layer"), linen.sparsify(everything):
        nn.LayerNorm().init(jax.random.key(0), X)
    with linen.sparsify(nm.Recipe({".*": "dense"})):
        nn.LayerNorm().init(jax.random.key(0), X)
    with pytest.raises(TypeError, match="plan takes a model of flax.linen, got Nnx"):
        linen.plan(Nnx(nnx.Rngs(0)), X)
    with pytest.raises(TypeError, match="plan takes a Recipe"):
        linen.plan(Linen(), "ste(2,4)", X)
