"""Sparsity in flax.linen models: what is special to their variables, stacks and final forms.

The laws of every delivery are in tests/delivery_test.py.
"""

import functools
from dataclasses import dataclass

import chex
import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax.core import meta
from jax.sharding import NamedSharding, PartitionSpec as P

import nmjax as nm
from nmjax import linen
from nmjax.linen.registry import REGISTERED
from nmjax.linen.variables import StateVariable
from nmjax.programs import states
from tests.delivery_test import DRAWN, HELD, MICRO, SEED, STEP, normal

pytestmark = [pytest.mark.sampled, pytest.mark.filterwarnings("ignore:harden at step")]  # in the midst of schedules


@dataclass(frozen=True)
class Pruned:
    """A model whose methods run inside of `sparsify`."""

    model: nn.Module
    rules: str | nm.Recipe
    seed: int = SEED

    def within(self):
        rules = self.rules if isinstance(self.rules, nm.Recipe) else nm.Recipe({".*": self.rules})
        return linen.sparsify(rules, seed=self.seed, strict=True)

    def init(self, *inputs, **options):
        with self.within():
            return jax.jit(functools.partial(self.model.init, **options))(jax.random.key(2), *inputs)

    def apply(self, *inputs, **options):
        with self.within():
            return self.model.apply(*inputs, **options)


class Named(nn.Module):
    """One layer, at the path "layer"."""

    make: functools.partial
    before: tuple = ()  # what its call takes before x

    @nn.compact
    def __call__(self, x):
        return self.make(name="layer")(*self.before, x)


def named(kind, *args, before=(), **options):
    return Named(functools.partial(kind, *args, **options), before)


class Einsum(nn.Module):
    """A layer of the form that DeepMind's gemma has."""

    shape: tuple
    weight_name: str = "w"

    @nn.compact
    def __call__(self, eqn, x):
        return jnp.einsum(eqn, x, self.param(self.weight_name, nn.initializers.normal(0.1), self.shape))


@pytest.fixture(autouse=True)
def einsum_registered():
    """Register Einsum, and leave the registry as it was."""
    before = dict(REGISTERED)
    linen.register_layer(Einsum, weight="{weight_name}")
    yield
    REGISTERED.clear()
    REGISTERED.update(before)


def whole(seed, *shape):
    """Return whole numbers. Their sums are exact in any order, so results can be compared for equality."""
    return jnp.asarray(np.random.default_rng(seed).integers(-1, 2, shape), jnp.float32)


def all_variables(variables):
    return jax.tree.leaves(variables["nm"], is_leaf=lambda v: isinstance(v, StateVariable))


def the_variable(variables):
    """Return the only StateVariable among variables."""
    (variable,) = all_variables(variables)
    return variable


def weight(variables):
    """Return the only parameter of two axes or more."""
    (leaf,) = [v for v in jax.tree.leaves(variables["params"]) if v.ndim > 1]
    return leaf


def with_weight(variables, w):
    """Return variables with another value of the only parameter of two axes or more."""
    return {**variables, "params": jax.tree.map(lambda v: w if v.ndim > 1 else v, variables["params"])}


def equal(a, b):
    chex.assert_trees_all_equal_structs(a, b)
    jax.tree.map(np.testing.assert_array_equal, a, b)


DENSE = named(nn.Dense, 8)
CONV = named(nn.Conv, 8, (3, 3), strides=2, feature_group_count=2, padding="SAME")


@pytest.mark.slow
@pytest.mark.parametrize(("plain", "shape"), [(DENSE, (8, 16)), (CONV, (4, 8, 8, 16))])
def test_a_dense_layer_adds_no_array_and_changes_no_bit(plain, shape):
    model, x = Pruned(plain, "dense"), normal(1, *shape)
    variables = model.init(x)
    assert not jax.tree.leaves(variables["nm"])
    params = {"params": variables["params"]}
    equal(params, jax.jit(plain.init)(jax.random.key(2), x))
    loss = lambda m: jax.value_and_grad(lambda v, x: jnp.sin(m.apply(v, x)).sum(), (0, 1))
    equal(loss(model)(params, x), loss(plain)(params, x))
    equal(jax.jit(loss(model))(params, x), jax.jit(loss(plain))(params, x))
    equal(linen.harden(linen.set_step(variables, 3)), variables)


def of(text, seed=SEED):
    """Return a layer, its variables and an input."""
    model, x = Pruned(DENSE, text, seed), normal(1, 8, 16)
    return model, model.init(x), x


def test_the_collection_mirrors_the_parameters_and_has_the_arrays_that_are_needed():
    def needs(text):
        variables = of(text)[1]
        return jax.tree.map(jnp.shape, variables["nm"]["layer"]["kernel"].unbox().weight_state.arrays)

    assert needs("ste(2,4)") == (None, None, None)
    assert needs("mvue(2,4)") == ((2,), (2,), None)
    assert needs("mdgf(2,4,linear(1,0,9))") == (None, (2,), None)
    assert needs("y_w=ste(hold(mse(2,4),every=3))") == (None, (2,), {"y_w": (16, 8)})  # when it was renewed


# ---- paths and time ----


def test_paths_are_those_of_all_layers():
    """Those of dense layers too."""
    rules = nm.Recipe({"layers_2": "dense", ".*": "mvue(2,4)"})
    three = Pruned(nn.Sequential([nn.Dense(16), nn.Dense(16), nn.Dense(4)]), rules, seed=1).init(normal(1, 8, 16))
    assert linen.paths(three) == ("layers_0", "layers_1", "layers_2")
    for variable in all_variables(three)[:2]:
        np.testing.assert_array_equal(variable.words.reshape(2), states.noise_words(1, variable.origin.path))


@pytest.mark.slow
def test_forward_passes_read_and_do_not_write():
    model, variables, x = of("s_ste(2,4)")
    variables = linen.set_step(variables, 4)
    y, after = model.apply(variables, x, mutable=True)
    equal(after["nm"], variables["nm"])
    np.testing.assert_array_equal(y, model.apply(variables, x))


# ---- stacks ----


class Block(nn.Module):
    lifted: bool = False

    @nn.compact
    def __call__(self, x, _=None):
        kind = nn.jit(nn.remat(nn.Dense)) if self.lifted else nn.Dense
        return kind(x.shape[-1], use_bias=False, name="up")(x), None


class Stack(nn.Module):
    """Three blocks, each with weights of its own."""

    axis: int = 0
    nm_axis: int | None = 0
    lifted: bool = False

    @nn.compact
    def __call__(self, x):
        axes = {"params": self.axis} | ({} if self.nm_axis is None else {"nm": self.nm_axis})
        block = nn.remat(Block) if self.lifted else Block
        scanned = nn.scan(block, variable_axes=axes, split_rngs={"params": True}, length=3)
        return scanned(self.lifted, name="blocks")(x)[0]


PATH = "blocks/up"


def stack(text, axis=0, **options):
    model = Pruned(Stack(axis, axis, **options), text)
    return model, model.init(jnp.ones((8, 16)))


@functools.partial(jax.jit, static_argnums=0)
def one_layer(text, w, words, x):
    """Return the output of one layer of a stack, computed by hand."""
    sparsity, plain = nm.parse(text), jax.lax.stop_gradient(w)
    state = sparsity.init(plain, contract=0, out=1)
    state = sparsity.refresh(plain, contract=0, out=1, ctx=nm.Ctx(words, STEP, state, since=0))
    return nm.einsum("ti,io->to", x, w, sparsity=sparsity, ctx=nm.Ctx(states.noise_key(words, MICRO), STEP, state))


@pytest.mark.slow
def test_one_compilation_serves_all_steps_and_equal_models():
    @functools.partial(jax.jit, static_argnums=0)
    @chex.assert_max_traces(1)
    def apply(model, variables, x, step):
        return model.apply(linen.set_step(variables, step), x)

    for step in range(3):
        model, variables = stack("s_ste(2,4)", lifted=True)
        apply(model, variables, jnp.ones((8, 16)), step)


@pytest.mark.slow
def test_what_is_compiled_outside_is_not_used_inside():
    model, variables = stack("ste(2,4)", lifted=True)
    x, apply = normal(1, 8, 16), jax.jit(model.model.apply)
    dense = model.model.apply({"params": variables["params"]}, x)
    np.testing.assert_allclose(apply(variables, x), dense, atol=1e-5)
    with model.within():
        sparse = apply(variables, x)
        with chex.fake_jit():
            np.testing.assert_allclose(model.model.apply(variables, x), sparse, atol=1e-5)
    assert not np.allclose(sparse, dense, atol=1e-2)
    np.testing.assert_allclose(apply(variables, x), dense, atol=1e-5)
    with model.within():
        assert np.array_equal(apply(variables, x), sparse)


class Grid(nn.Module):
    """Two blocks of three experts. All experts get the same input, and their results are added."""

    axes: tuple = (0, 0)  # of the blocks, of the experts

    @nn.compact
    def __call__(self, x):
        outer, inner = self.axes
        mapped = {"in_axes": None, "out_axes": 0, "axis_size": 3, "split_rngs": {"params": True}}

        class Experts(nn.Module):
            @nn.compact
            def __call__(self, x, _):
                experts = nn.vmap(nn.Dense, variable_axes={"params": inner, "nm": inner}, **mapped)
                return experts(16, use_bias=False, name="expert")(x).sum(0), None

        axes = {"params": outer, "nm": outer}
        scanned = nn.scan(Experts, variable_axes=axes, split_rngs={"params": True}, length=2)
        return scanned(name="blocks")(x, None)[0]


@pytest.mark.slow
@pytest.mark.parametrize(("axes", "text"), [((0, 0), HELD), ((-1, 1), HELD), ((1, 2), "bdwp()")])
def test_a_stack_of_stacks(axes, text):
    model = Pruned(Grid(axes), text)
    weights, x, g = whole(0, 2, 3, 16, 16), whole(1, 8, 16), whole(2, 8, 16)
    variables = model.init(x)
    stacked = jax.vmap(jax.vmap(lambda w: w, 0, axes[1]), 0, axes[0])
    unstacked = jax.vmap(jax.vmap(lambda w: w, axes[1], 0), axes[0], 0)
    words = states.noise_words(SEED, "blocks/expert", (2, 3))
    if text == HELD:
        np.testing.assert_array_equal(unstacked(the_variable(variables).words).reshape(2, 3, 2), words)

    @jax.jit
    def delivered(weights, x, g):
        now = linen.set_step(with_weight(variables, stacked(weights)), STEP, MICRO)
        y, back = jax.vjp(lambda w: model.apply(with_weight(now, w), x), weight(now))
        hard = linen.harden(now)
        return y, unstacked(back(g)[0]), unstacked(weight(hard)), model.apply(hard, x)

    def by_hand(weights):
        y = x
        for i in range(2):
            y = sum(one_layer(text, weights[i, j], words[i, j], y) for j in range(3))
        return y

    y, dw, hard, hard_y = delivered(weights, x, g)
    hand, back = jax.vjp(by_hand, weights)
    equal((y, dw), (hand, *back(g)))
    assert nm.groups.is_nm(hard, 2, 4, axis=2)
    np.testing.assert_array_equal(hard_y, y)


@pytest.mark.slow
def test_a_stack_made_by_hand_is_refused_until_it_is_told():
    block, x = Pruned(Block(), "mvue(2,4)"), normal(0, 8, 16)
    with block.within():
        variables = jax.vmap(lambda key: block.model.init(key, x))(jax.random.split(jax.random.key(1), 3))
    with pytest.raises(
        ValueError, match=r"up: its weight has shape \(3, 16, 16\), but 'nm' is for \(16, 16\) .* made by hand"
    ):
        linen.set_step(variables, 0)
    variables = {**variables, "nm": meta.add_axis(variables["nm"], 0, {})}
    np.testing.assert_array_equal(the_variable(variables).words.reshape(3, 2), states.noise_words(SEED, "up", (3,)))
    variables = linen.set_step(variables, 2)
    y, _ = jax.lax.scan(lambda x, v: block.apply(v, x), x, variables)
    assert y.shape == x.shape


@pytest.mark.slow
def test_what_init_draws_differs_in_a_stack():
    _, variables = stack(DRAWN)
    masks = the_variable(variables).state["y_w"]
    assert not np.array_equal(masks[0], masks[1])
    equal(the_variable(linen.set_step(variables, 5)).state["y_w"], masks)
    again = the_variable(linen.reset_state(variables)).state["y_w"]
    for i, words in enumerate(states.noise_words(SEED, PATH, (3,))):
        state = nm.parse(DRAWN).init(weight(variables)[i], contract=0, out=1, ctx=nm.Ctx(words))
        np.testing.assert_array_equal(again[i], state["y_w"])


# ---- final forms and state ----

HARDENED = [
    (named(nn.Einsum, (64, 8), "bti,io->bto"), 0),
    (named(nn.ConvTranspose, 8, (3,), strides=(2,)), 1),
    (named(Einsum, (4, 64, 8), before=("BTD,NDH->BTNH",)), 1),
    (named(nn.MultiHeadDotProductAttention, 4), None),
]


@pytest.mark.slow
@pytest.mark.parametrize(("layer", "axis"), HARDENED)
def test_more_layers_are_hardened_to_the_training_form(layer, axis):
    model, x = Pruned(layer, "s_ste(2,4)"), normal(1, 2, 8, 64)
    variables = linen.set_step(model.init(x), 9)
    apply = jax.jit(model.apply)
    y, hard = apply(variables, x), jax.jit(linen.harden)(variables)
    np.testing.assert_array_equal(apply(hard, x), y)
    np.testing.assert_array_equal(jax.jit(layer.apply)({"params": hard["params"]}, x), y)
    chex.assert_trees_all_equal_shapes_and_dtypes(hard["params"], variables["params"])
    assert not any(map(int, linen.violations(hard).values()))
    if axis is None:
        assert sorted(linen.paths(hard)) == [f"layer/{name}" for name in ("key", "out", "query", "value")]
    else:
        assert nm.groups.is_nm(weight(hard), 2, 4, axis=axis)
    assert not jax.tree.leaves(hard["nm"])
    equal(linen.harden(hard), hard)
    equal(linen.set_step(hard, 3), hard)


@pytest.mark.slow
def test_a_call_in_another_dtype_than_that_of_init():
    """Only the dtype of the product differs, and no axis."""
    model, x = Pruned(nn.Dense(8, param_dtype=jnp.bfloat16), "ste(2,4)"), jnp.ones((4, 16))
    with jax.numpy_dtype_promotion("standard"):
        variables = model.init(x)
    y = model.apply(variables, x.astype(jnp.bfloat16))
    hard = with_weight(variables, nm.prune(nm.mse(2, 4), weight(variables), axis=0))
    chex.assert_trees_all_equal(y, model.model.apply(hard, x.astype(y.dtype)))


class Twice(nn.Module):
    """A layer that is called twice, by one method or in a scan."""

    scanned: bool

    @nn.compact
    def __call__(self, x):
        if not self.scanned:
            layer = nn.Dense(16, use_bias=False)
            return layer(layer(x))
        tied = nn.scan(Block, variable_broadcast=["params", "nm"], split_rngs={"params": False}, length=2)
        return tied(name="blocks")(x)[0]


@pytest.mark.slow
@pytest.mark.parametrize("scanned", [False, True])
def test_a_tied_layer_keeps_one_variable_and_a_soft_weight_shrinks_once(scanned):
    model, x = Pruned(Twice(scanned), "s_ste(2,4)"), normal(1, 8, 16)
    variables = linen.set_step(model.init(x), 3)
    hard = linen.harden(variables)
    ctx = nm.Ctx(state=the_variable(variables).state["y_w"].reshape(()))
    np.testing.assert_array_equal(weight(hard), nm.soft(2, 4)(weight(variables), 0, ctx))
    np.testing.assert_array_equal(model.apply(hard, x), model.apply(variables, x))


@pytest.mark.slow
def test_a_part_of_a_model_applies_as_it_does_within():
    """The path in its variable counts, not the path that the part has on its own."""
    model, x = Pruned(DENSE, nm.Recipe({"layer": "ste(2,4)"})), normal(1, 8, 16)
    variables = model.init(x)
    part, dense = Pruned(nn.Dense(8), model.rules), {"params": variables["params"]["layer"]}
    whole_y = model.apply(variables, x)
    np.testing.assert_array_equal(part.apply({**dense, "nm": variables["nm"]["layer"]}, x), whole_y)
    assert not np.array_equal(part.apply(dense, x), whole_y)


# ---- trees, boxes and meshes ----


@pytest.mark.slow
def test_variables_may_be_unboxed_frozen_and_written():
    model, variables = stack("s_ste(2,4)")
    x, at = normal(1, 8, 16), linen.set_step(variables, 3)
    y = model.apply(at, x)
    unboxed = linen.set_step(nn.unbox(variables), 3)
    np.testing.assert_array_equal(model.apply(unboxed, x), y)
    equal(linen.harden(unboxed)["params"], linen.harden(at)["params"])
    frozen = linen.set_step(flax.core.freeze(variables), 3)
    assert isinstance(frozen, flax.core.FrozenDict)
    np.testing.assert_array_equal(model.apply(frozen, x), y)
    written = flax.serialization.to_bytes(at)
    equal(flax.serialization.from_bytes(variables, written), at)


@pytest.mark.slow
def test_masks_lie_where_their_weights_lie():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    names = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "data"))
    model, x = Pruned(named(nn.Dense, 16, kernel_init=names), HELD), jnp.ones((8, 16))
    with jax.set_mesh(mesh):
        shardings = nn.get_sharding(jax.eval_shape(model.init, x), mesh)
        variables = jax.jit(model.init, out_shardings=shardings)(x)
        variables = jax.jit(linen.set_step)(variables, 3)
        hard = jax.jit(linen.harden)(variables)
    expected = NamedSharding(mesh, P(None, "data"))
    for boxed in (v["params"]["layer"]["kernel"] for v in (variables, hard)):
        assert isinstance(boxed, nn.Partitioned)
        assert boxed.value.sharding.is_equivalent_to(expected, 2)
    assert the_variable(variables).state["y_w"].sharding.is_equivalent_to(expected, 2)
    assert nm.groups.is_nm(weight(hard), 2, 4, axis=0)
