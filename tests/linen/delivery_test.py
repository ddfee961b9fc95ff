"""Sparsity in flax.linen models: layers of every kind, stacks, time, state and final forms."""

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
from nmjax.linen.doors import DOORS
from nmjax.linen.variables import SiteVariable
from nmjax.programs import sites

pytestmark = [pytest.mark.sampled, pytest.mark.filterwarnings("ignore:harden at step")]  # in the midst of schedules

EVERY = "y_x=ste(mse(2,4)); y_w=ste(mse(2,4)); dx_g=mvue(2,4); dx_w=raw(mse(2,4)); dw_g=mvue(2,4); dw_x=mse(2,4)"
METHODS = (
    "ste(2,4)", "sr_ste(2,4)", "s_ste(2,4)", "sdgp(2,4,over='group')", "mvue(2,4)", "fst(every=3)",
    "bi_mask(every=2,draws=4)", "bdwp()", "mdgf(2,4,linear(1,0,9))", "sdgf(1,4,steps=8)", EVERY,
)  # fmt: skip
HELD = "y_w=ste(hold(transposable(2,4),every=3)); dw_g=mvue(2,4)"
DRAWN = "y_w=ste(hold(uniform(2,4,rescale=False)))"
STEP, MICRO, SEED = 3, 1, 5


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
def door():
    """Declare the door of Einsum, and leave the doors as they were."""
    before = dict(DOORS)
    linen.door(Einsum, weight="{weight_name}")
    yield
    DOORS.clear()
    DOORS.update(before)


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


def whole(seed, *shape):
    """Return whole numbers. Their sums are exact in any order, so results can be compared for equality."""
    return jnp.asarray(np.random.default_rng(seed).integers(-1, 2, shape), jnp.float32)


def all_sites(variables):
    return jax.tree.leaves(variables["nm"], is_leaf=lambda v: isinstance(v, SiteVariable))


def the_site(variables):
    """Return the only SiteVariable among variables."""
    (site,) = all_sites(variables)
    return site


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


# ---- every kind of layer does what its product does by hand ----


def by_einsum(spec):
    return lambda x, w, **k: nm.einsum(spec, x, w, **k)


def by_conv(x, w, **k):
    numbers = ("NHWC", "HWIO", "NHWC")
    return nm.conv_general_dilated(x, w, (2, 2), "SAME", dimension_numbers=numbers, feature_group_count=2, **k)


# The layer, the shape of x, its product by hand, and the axes of the weight that the product contracts and keeps.
LAYERS = {
    "Dense": (named(nn.Dense, 8), (8, 16), by_einsum("ti,io->to"), (0,), (1,)),
    "DenseGeneral": (
        named(nn.DenseGeneral, (2, 12), (-2, -1), use_bias=False),
        (8, 4, 8), by_einsum("tab,abcd->tcd"), (0, 1), (2, 3),
    ),
    "batched": (
        named(nn.DenseGeneral, 8, batch_dims=0, use_bias=False), (3, 8, 16), by_einsum("eti,eio->eto"), (1,), (2,),
    ),
    "Conv": (
        named(nn.Conv, 8, (3, 3), strides=2, feature_group_count=2, padding="SAME"), (4, 8, 8, 16), by_conv, (2,), (3,),
    ),
    "declared": (named(Einsum, (16, 8), before=("bi,io->bo",)), (8, 16), by_einsum("bi,io->bo"), (0,), (1,)),
    "turned": (named(Einsum, (8, 16), before=("bi,oi->bo",)), (8, 16), by_einsum("bi,oi->bo"), (1,), (0,)),
    "in front": (
        named(Einsum, (2, 16, 4), before=("bi,nio->nbo",)), (8, 16),
        lambda x, w, **k: jnp.moveaxis(nm.einsum("bi,nio->bno", x, w, **k), 1, 0), (1,), (0, 2),
    ),
}  # fmt: skip
CASES = [("Dense", m) for m in (*METHODS, DRAWN)] + [("batched", EVERY), ("Conv", "sdgp(2,4)")]
CASES += [(layer, m) for layer in ("DenseGeneral", "Conv") for m in ("s_ste(2,4)", "fst(every=3)", EVERY)]
CASES += [("DenseGeneral", "bi_mask(every=2,draws=4)")]
CASES += [(layer, m) for layer in ("declared", "turned", "in front") for m in ("s_ste(2,4)", EVERY)]


@pytest.mark.parametrize(("layer", "text"), CASES)
def test_a_layer_is_its_product_by_hand(layer, text):
    plain, shape, product, contract, out = LAYERS[layer]
    model, x = Pruned(plain, text), normal(1, *shape)
    variables = linen.reset_state(model.init(x))

    @jax.jit
    def delivered(w, x, g):
        now = linen.set_step(with_weight(variables, w), STEP, MICRO)
        y, back = jax.vjp(lambda w, x: model.apply(with_weight(now, w), x), w, x)
        return y, *back(g)

    @jax.jit
    def by_hand(w, x, g):
        sparsity, words = nm.parse(text), sites.site_words(SEED, "layer")
        axes = {"contract": contract, "out": out}
        state = sparsity.init(w, **axes, ctx=nm.Ctx(words))
        state = sparsity.refresh(w, **axes, ctx=nm.Ctx(words, STEP, state, since=0))
        ctx = nm.Ctx(sites.site_key(words, MICRO), STEP, state)
        y, back = jax.vjp(lambda w, x: product(x, w, sparsity=sparsity, ctx=ctx), w, x)
        return y, *back(g)

    w, g = weight(variables), normal(3, *jax.eval_shape(model.apply, variables, x).shape)
    for got, hand in zip(delivered(w, x, g), by_hand(w, x, g), strict=True):  # the bias is zero
        np.testing.assert_allclose(got, hand, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layer", ["Dense", "Conv"])
def test_a_dense_layer_adds_no_array_and_changes_no_bit(layer):
    plain, shape, *_ = LAYERS[layer]
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
    model, x = Pruned(LAYERS["Dense"][0], text, seed), normal(1, 8, 16)
    return model, model.init(x), x


def test_the_collection_mirrors_the_parameters_and_has_the_arrays_that_are_needed():
    def needs(text):
        variables = of(text)[1]
        return jax.tree.map(jnp.shape, variables["nm"]["layer"]["kernel"].unbox().site.arrays)

    assert needs("ste(2,4)") == (None, None, None)
    assert needs("mvue(2,4)") == ((2,), (2,), None)
    assert needs("mdgf(2,4,linear(1,0,9))") == (None, (2,), None)
    assert needs("y_w=ste(hold(mse(2,4),every=3))") == (None, (2,), {"y_w": (16, 8)})  # when it was renewed


# ---- noise and time ----


def gradient(model, variables, x):
    return jax.grad(lambda w: jnp.sin(model.apply(with_weight(variables, w), x)).sum())(weight(variables))


@pytest.mark.slow
def test_noise_is_a_function_of_seed_path_step_and_micro_step():
    model, start, x = of("mvue(2,4)")
    at = lambda *time: gradient(model, linen.set_step(start, *time), x)
    drawn = [at(0), at(1), at(0, 1), at(1, 1)]
    other, begin, _ = of("mvue(2,4)", seed=1)
    drawn.append(gradient(other, linen.set_step(begin, 0), x))
    assert len({v.tobytes() for v in map(np.asarray, drawn)}) == 5
    late = functools.reduce(lambda v, step: linen.set_step(v, *step), [(9, 3), (4, 0), (1, 1)], start)
    np.testing.assert_array_equal(gradient(model, late, x), drawn[3])
    rules = nm.Recipe({"layers_2": "dense", ".*": "mvue(2,4)"})
    three = Pruned(nn.Sequential([nn.Dense(16), nn.Dense(16), nn.Dense(4)]), rules, seed=1).init(x)
    assert linen.paths(three) == ("layers_0", "layers_1", "layers_2")  # those of dense layers too
    for site in (the_site(begin), *all_sites(three)[:2]):
        np.testing.assert_array_equal(site.words.reshape(2), sites.site_words(1, site.origin.path))


@pytest.mark.parametrize("text", ["fst(every=3)", "y_w=ste(hold(uniform(2,4,rescale=False),every=3))"])
def test_masks_change_at_their_steps_and_not_by_accumulation(text):
    _, variables, _ = of(text)
    set_step = jax.jit(linen.set_step)
    masks, changes = [], []
    for step in range(9):
        variables = with_weight(variables, normal(100 + step, 16, 8))
        for micro in range(2):
            variables = set_step(variables, step, micro)
            masks.append(np.asarray(the_site(variables).state["y_w"]))
        assert np.array_equal(masks[-1], masks[-2])
        changes += [step] if step and not np.array_equal(masks[-1], masks[-3]) else []
    assert changes == [3, 6]


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
    return nm.einsum("ti,io->to", x, w, sparsity=sparsity, ctx=nm.Ctx(sites.site_key(words, MICRO), STEP, state))


def test_one_compilation_serves_all_steps_and_equal_models():
    @functools.partial(jax.jit, static_argnums=0)
    @chex.assert_max_traces(1)
    def apply(model, variables, x, step):
        return model.apply(linen.set_step(variables, step), x)

    for step in range(3):
        model, variables = stack("s_ste(2,4)", lifted=True)
        apply(model, variables, jnp.ones((8, 16)), step)


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


@pytest.mark.parametrize("axis", [0, 1, 2, -1])
def test_a_stack_has_noise_and_state_of_its_own_for_every_layer(axis):
    _, variables = stack("s_ste(2,4)", axis)
    site, weights = the_site(variables), jnp.moveaxis(weight(variables), axis, 0)
    words = sites.site_words(SEED, PATH, (3,))
    np.testing.assert_array_equal(jnp.moveaxis(site.words, axis, 0).reshape(3, 2), words)
    assert len({tuple(row) for row in words.tolist()}) == 3
    betas = [nm.soft(2, 4).init(w, 0) for w in weights]
    np.testing.assert_allclose(site.state["y_w"].reshape(3), betas, rtol=1e-6)
    assert len({float(b) for b in betas}) == 3
    later = the_site(linen.set_step(variables, 7, 2))
    np.testing.assert_array_equal(jnp.moveaxis(later.time, axis, 0).reshape(3, 2), [[7, 2]] * 3)
    equal(later.replace(time=None), site.replace(time=None))


@pytest.mark.parametrize(("lifted", "axis"), [(False, 0), (True, 1)])
@pytest.mark.parametrize("text", [HELD, "bi_mask(every=3,draws=4,lam=0)", "sdgf(1,4,steps=8)", EVERY])
def test_a_stack_is_its_layers_one_after_another(text, lifted, axis):
    model, variables = stack(text, axis, lifted=lifted)
    weights, x, g = whole(0, 3, 16, 16), whole(1, 8, 16), whole(2, 8, 16)

    @jax.jit
    def delivered(weights, x, g):
        now = linen.set_step(with_weight(variables, jnp.moveaxis(weights, 0, axis)), STEP, MICRO)
        y, back = jax.vjp(lambda w, x: model.apply(with_weight(now, w), x), weight(now), x)
        dw, dx = back(g)
        return y, jnp.moveaxis(dw, axis, 0), dx

    def by_hand(weights, x):
        for w, own in zip(weights, sites.site_words(SEED, PATH, (3,)), strict=True):
            x = one_layer(text, w, own, x)
        return x

    y, back = jax.vjp(by_hand, weights, x)
    equal(delivered(weights, x, g), (y, *back(g)))


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
    words = sites.site_words(SEED, "blocks/expert", (2, 3))
    if text == HELD:
        np.testing.assert_array_equal(unstacked(the_site(variables).words).reshape(2, 3, 2), words)

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


def test_a_stack_made_by_hand_is_refused_until_it_is_told():
    block, x = Pruned(Block(), "mvue(2,4)"), normal(0, 8, 16)
    with block.within():
        variables = jax.vmap(lambda key: block.model.init(key, x))(jax.random.split(jax.random.key(1), 3))
    with pytest.raises(
        ValueError, match=r"up: its weight has shape \(3, 16, 16\), but 'nm' is for \(16, 16\) .* made by hand"
    ):
        linen.set_step(variables, 0)
    variables = {**variables, "nm": meta.add_axis(variables["nm"], 0, {})}
    np.testing.assert_array_equal(the_site(variables).words.reshape(3, 2), sites.site_words(SEED, "up", (3,)))
    variables = linen.set_step(variables, 2)
    y, _ = jax.lax.scan(lambda x, v: block.apply(v, x), x, variables)
    assert y.shape == x.shape


@pytest.mark.slow
def test_what_init_draws_differs_in_a_stack():
    _, variables = stack(DRAWN)
    masks = the_site(variables).state["y_w"]
    assert not np.array_equal(masks[0], masks[1])
    equal(the_site(linen.set_step(variables, 5)).state["y_w"], masks)
    again = the_site(linen.reset_state(variables)).state["y_w"]
    for i, words in enumerate(sites.site_words(SEED, PATH, (3,))):
        state = nm.parse(DRAWN).init(weight(variables)[i], contract=0, out=1, ctx=nm.Ctx(words))
        np.testing.assert_array_equal(again[i], state["y_w"])


# ---- final forms and state ----

HARD = (
    "ste(2,4)", "s_ste(2,4)", "s_ste(2,4,fp8=True)", "mdgf(2,4,linear(1,0,9))", "fst(every=3)", "sdgf(1,4,steps=8)",
    "activation(2,4)", "bi_mask(draws=4)",
)  # fmt: skip
HARDENED = [(named(nn.Dense, 8, dtype=jnp.bfloat16), text, 0) for text in HARD]
HARDENED += [(named(nn.Dense, 8), "s_ste(2,4)", 0), (named(nn.Einsum, (64, 8), "bti,io->bto"), "s_ste(2,4)", 0)]
HARDENED += [(named(nn.ConvTranspose, 8, (3,), strides=(2,)), "s_ste(2,4)", 1)]
HARDENED += [(named(Einsum, (4, 64, 8), before=("BTD,NDH->BTNH",)), "mdgf(2,4,linear(1,0,9))", 1)]
HARDENED += [(named(nn.MultiHeadDotProductAttention, 4), "s_ste(2,4)", None)]


@pytest.mark.parametrize(("layer", "text", "axis"), HARDENED)
def test_hardened_is_the_training_form_bit_for_bit(layer, text, axis):
    model, x = Pruned(layer, text), normal(1, 2, 8, 64)
    variables = linen.set_step(model.init(x), 9)
    apply = jax.jit(model.apply)
    y, hard = apply(variables, x), jax.jit(linen.harden)(variables)
    np.testing.assert_array_equal(apply(hard, x), y)
    inputs_too = "activation" in text or "fp8" in text
    assert np.array_equal(jax.jit(layer.apply)({"params": hard["params"]}, x), y) != inputs_too
    chex.assert_trees_all_equal_shapes_and_dtypes(hard["params"], variables["params"])
    if axis is None:
        assert not any(map(int, linen.violations(hard).values()))
        assert sorted(linen.paths(hard)) == [f"layer/{name}" for name in ("key", "out", "query", "value")]
    else:
        n = 1 if "sdgf" in text else 4 if "activation" in text else 2
        assert nm.groups.is_nm(weight(hard), n, 4, axis=axis)
        assert nm.groups.is_nm(weight(variables), n, 4, axis=axis) == (n == 4)
    assert not jax.tree.leaves(hard["nm"])
    equal(linen.harden(hard), hard)
    equal(linen.set_step(hard, 3), hard)


def test_a_weight_is_hardened_in_the_dtype_of_its_product():
    """The ranks of bfloat16 values differ from the ranks of the float32 values that they round."""
    variables = Pruned(named(nn.Dense, 64, dtype=jnp.bfloat16), "ste(2,4)").init(normal(1, 8, 256))
    w, hard = weight(variables), weight(linen.harden(variables))
    np.testing.assert_array_equal(hard, nm.mse(2, 4)(w.astype(jnp.bfloat16), 0).astype(jnp.float32))
    assert not np.array_equal(hard != 0, nm.mse(2, 4)(w, 0) != 0)


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


@pytest.mark.parametrize("scanned", [False, True])
def test_a_tied_layer_keeps_one_variable_and_a_soft_weight_shrinks_once(scanned):
    model, x = Pruned(Twice(scanned), "s_ste(2,4)"), normal(1, 8, 16)
    variables = linen.set_step(model.init(x), 3)
    hard = linen.harden(variables)
    ctx = nm.Ctx(state=the_site(variables).state["y_w"].reshape(()))
    np.testing.assert_array_equal(weight(hard), nm.soft(2, 4)(weight(variables), 0, ctx))
    np.testing.assert_array_equal(model.apply(hard, x), model.apply(variables, x))


def test_state_is_made_anew_of_loaded_weights():
    _, variables, _ = of("s_ste(2,4)")
    loaded = with_weight(variables, normal(9, 16, 8) ** 3)
    old, new = (linen.set_step(v, 4) for v in (loaded, linen.reset_state(loaded)))
    one, other = (float(the_site(v).state["y_w"].reshape(())) for v in (old, new))
    assert other == float(nm.soft(2, 4).init(weight(loaded), 0)) != one


def test_a_part_of_a_model_applies_as_it_does_within():
    """The path in its variable counts, not the path that the part has on its own."""
    model, x = Pruned(LAYERS["Dense"][0], nm.Recipe({"layer": "ste(2,4)"})), normal(1, 8, 16)
    variables = model.init(x)
    part, dense = Pruned(nn.Dense(8), model.rules), {"params": variables["params"]["layer"]}
    whole_y = model.apply(variables, x)
    np.testing.assert_array_equal(part.apply({**dense, "nm": variables["nm"]["layer"]}, x), whole_y)
    assert not np.array_equal(part.apply(dense, x), whole_y)


# ---- trees, boxes and meshes ----


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
    assert the_site(variables).state["y_w"].sharding.is_equivalent_to(expected, 2)
    assert nm.groups.is_nm(weight(hard), 2, 4, axis=0)
