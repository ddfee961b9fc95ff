"""Sparsity in flax.linen models: layers of every kind, stacks, time, state, final forms and errors."""

import dataclasses
import functools

import chex
import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn, nnx
from flax.core import meta
from jax.sharding import NamedSharding, PartitionSpec as P

import nmjax as nm
from nmjax import linen
from nmjax.linen.variables import SiteVariable
from nmjax.programs import sites

pytestmark = [pytest.mark.sampled, pytest.mark.filterwarnings("ignore:harden at step")]  # in the midst of schedules


def whole(seed, *shape, most=3):
    """Return whole numbers. Their sums are exact in any order, so results can be compared for equality."""
    return jnp.asarray(np.random.default_rng(seed).integers(-most, most + 1, shape), jnp.float32)


def recipe(text, pattern=".*"):
    return nm.Recipe(((pattern, text),))


def the_site(variables):
    """Return the only SiteVariable among variables."""
    (site,) = all_sites(variables)
    return site


def all_sites(variables):
    return jax.tree.leaves(variables["nm"], is_leaf=lambda v: isinstance(v, SiteVariable))


def equal(a, b):
    chex.assert_trees_all_equal_structs(a, b)
    jax.tree.map(np.testing.assert_array_equal, a, b)


def differ(a, b):
    """Return True if every array of one tree differs from the other tree's."""
    return all(jax.tree.leaves(jax.tree.map(lambda x, y: not np.array_equal(x, y), a, b)))


class Named(nn.Module):
    """One layer, at the path "layer"."""

    make: functools.partial

    @nn.compact
    def __call__(self, x):
        return self.make(name="layer")(x)


def made(model, x):
    return jax.jit(model.init)(jax.random.key(2), x)


EVERY = (
    "fwd_lhs=ste(mse(2,4)); fwd_rhs=ste(mse(2,4)); dlhs_g=mvue(2,4); dlhs_rhs=raw(mse(2,4)); drhs_g=mvue(2,4); "
    "drhs_lhs=mse(2,4)"
)
METHODS = (
    "ste(2,4)",
    "sr_ste(2,4)",
    "s_ste(2,4)",
    "sdgp(2,4,over='group')",
    "mvue(2,4)",
    "fst(every=3)",
    "bi_mask(every=2,draws=4)",
    "bdwp()",
    "mdgf(2,4,linear(1,0,9))",
    "sdgf(1,4,steps=8)",
    EVERY,
)
HELD = "fwd_rhs=ste(hold(transposable(2,4),every=3)); drhs_g=mvue(2,4)"
SOME = ("s_ste(2,4)", "fst(every=3)", EVERY)
STEP, MICRO, SEED = 3, 1, 5

# ---- every kind of layer does what its product does by hand ----


def dense(text):
    make = functools.partial(nn.Dense, 8, dot_general_cls=linen.dot_cls(recipe(text), SEED))
    return make, (8, 16), lambda x, w, **k: nm.einsum("ti,io->to", x, w, **k), (0,), (1,)


def general(text):
    make = functools.partial(nn.DenseGeneral, (2, 12), (-2, -1), dot_general_cls=linen.dot_cls(recipe(text), SEED))
    return make, (8, 4, 8), lambda x, w, **k: nm.einsum("tab,abcd->tcd", x, w, **k), (0, 1), (2, 3)


def batched(text):
    make = functools.partial(nn.DenseGeneral, 8, batch_dims=0, dot_general_cls=linen.dot_cls(recipe(text), SEED))
    return make, (3, 8, 16), lambda x, w, **k: nm.einsum("eti,eio->eto", x, w, **k), (1,), (2,)


def conv(text):
    door = linen.conv_cls(recipe(text), SEED)
    make = functools.partial(
        nn.Conv, 8, (3, 3), strides=2, feature_group_count=2, padding="SAME", conv_general_dilated_cls=door
    )
    numbers = ("NHWC", "HWIO", "NHWC")
    by_hand = lambda x, w, **k: nm.conv_general_dilated(
        x, w, (2, 2), "SAME", dimension_numbers=numbers, feature_group_count=2, **k
    )
    return make, (4, 8, 8, 16), by_hand, (2,), (3,)


CASES = [(dense, m) for m in METHODS] + [(f, m) for f in (general, conv) for m in SOME] + [(batched, EVERY)]
CASES += [(general, "bi_mask(every=2,draws=4)"), (conv, "sdgp(2,4)")]


@pytest.mark.parametrize(("layer", "text"), CASES, ids=lambda v: getattr(v, "__name__", v))
def test_a_layer_is_its_product_by_hand(layer, text):
    make, shape, product, contract, out = layer(text)
    model, x = Named(make), jax.random.normal(jax.random.key(1), shape)
    variables = made(model, x)

    @jax.jit
    def delivered(params, x, g):
        now = linen.set_step({**variables, "params": params}, STEP, MICRO)
        y, back = jax.vjp(lambda p, x: model.apply({**now, "params": p}, x), params, x)
        dparams, dx = back(g)
        return y, dparams["layer"]["kernel"], dx

    @jax.jit
    def by_hand(w, x, g):
        sparsity, words = nm.parse(text), sites.site_words(SEED, "layer")
        axes = {"contract": contract, "out": out}
        state = sparsity.init(w, **axes, ctx=nm.Ctx(words))
        state = sparsity.refresh(w, **axes, ctx=nm.Ctx(words, STEP, state, since=0))
        ctx = nm.Ctx(sites.site_key(words, MICRO), STEP, state)
        y, back = jax.vjp(lambda w, x: product(x, w, sparsity=sparsity, ctx=ctx), w, x)
        return y, *back(g)

    params = variables["params"]
    g = jax.random.normal(jax.random.key(3), jax.eval_shape(model.apply, variables, x).shape)
    results = zip(delivered(params, x, g), by_hand(params["layer"]["kernel"], x, g), strict=True)
    for got, hand in results:  # the bias is zero
        np.testing.assert_allclose(got, hand, rtol=1e-5, atol=1e-5)


def attention(door, **options):
    return nn.MultiHeadDotProductAttention(4, qkv_dot_general_cls=door, out_dot_general_cls=door, **options)


@pytest.mark.slow
def test_attention_is_its_four_products_by_hand():
    model, x = attention(linen.dot_cls(recipe("s_ste(2,4)"), SEED)), jax.random.normal(jax.random.key(1), (2, 8, 16))
    variables = linen.set_step(made(model, x), STEP)
    assert sorted(linen.paths(variables)) == ["key", "out", "query", "value"]
    sparsity, params = nm.parse("s_ste(2,4)"), variables["params"]

    def by_hand(params):
        def product(name, spec, x, contract, out):
            w = params[name]["kernel"]
            state = sparsity.init(jax.lax.stop_gradient(w), contract=contract, out=out)
            ctx = nm.Ctx(sites.site_key(sites.site_words(SEED, name), 0), STEP, state)
            return nm.einsum(spec, x, w, sparsity=sparsity, ctx=ctx)

        q, k, v = (product(name, "bti,ihd->bthd", x, 0, (1, 2)) for name in ("query", "key", "value"))
        return product("out", "bthd,hdo->bto", nn.dot_product_attention(q, k, v), (0, 1), 2)

    values = lambda f: jax.jit(jax.value_and_grad(lambda p: (f(p) * x).sum()))(params)
    (y, grads), (hand, by_hand_grads) = values(lambda p: model.apply({**variables, "params": p}, x)), values(by_hand)
    np.testing.assert_allclose(y, hand, rtol=1e-5)
    for name in params:  # the biases are zero
        np.testing.assert_allclose(grads[name]["kernel"], by_hand_grads[name]["kernel"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layer", [dense, conv])
def test_a_dense_layer_adds_no_array_and_changes_no_bit(layer):
    make, shape, *_ = layer("dense")
    model, x = Named(make), jax.random.normal(jax.random.key(1), shape)
    plain = Named(
        functools.partial(make.func, *make.args, **{k: v for k, v in make.keywords.items() if "_cls" not in k})
    )
    variables = made(model, x)
    assert not jax.tree.leaves(variables["nm"])
    equal(variables["params"], made(plain, x)["params"])
    params = {"params": variables["params"]}
    loss = lambda m: jax.value_and_grad(lambda v, x: jnp.sin(m.apply(v, x)).sum(), (0, 1))
    equal(loss(model)(params, x), loss(plain)(params, x))
    equal(jax.jit(loss(model))(params, x), jax.jit(loss(plain))(params, x))
    equal(linen.harden(linen.set_step(variables, 3)), variables)


def test_what_needs_nothing_adds_no_array():
    needs = lambda text: jax.tree.map(jnp.shape, the_site(of(text)[1]).site.arrays)
    assert needs("ste(2,4)") == (None, None, None)
    assert needs("mvue(2,4)") == ((2,), (2,), None)
    assert needs("mdgf(2,4,linear(1,0,9))") == (None, (2,), None)
    assert needs("fwd_rhs=ste(hold(mse(2,4),every=3))") == (
        None,
        (2,),
        {"fwd_rhs": (16, 8)},
    )  # it says when the mask was renewed


def of(text, shape=(8, 16), seed=0, pattern=".*"):
    """Return a layer, its variables and an input."""
    model = Named(functools.partial(nn.Dense, 8, dot_general_cls=linen.dot_cls(recipe(text, pattern), seed)))
    x = jax.random.normal(jax.random.key(1), shape)
    return model, made(model, x), x


# ---- noise and time ----


def gradient(model, variables, x):
    return jax.grad(lambda p: jnp.sin(model.apply({**variables, "params": p}, x)).sum())(variables["params"])["layer"][
        "kernel"
    ]


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
    np.testing.assert_array_equal(the_site(start).words.reshape(2), sites.site_words(0, "layer"))
    np.testing.assert_array_equal(the_site(begin).words.reshape(2), sites.site_words(1, "layer"))


def test_layers_draw_apart():
    class Two(nn.Module):
        @nn.compact
        def __call__(self, x):
            door = linen.dot_cls(recipe("mvue(2,4)"))
            return nn.Dense(16, dot_general_cls=door)(x), nn.Dense(16, dot_general_cls=door)(x)

    variables = Two().init(jax.random.key(0), jnp.ones((4, 16)))
    assert linen.paths(variables) == ("Dense_0", "Dense_1")
    one, other = all_sites(variables)
    assert differ(one.words, other.words)


@pytest.mark.parametrize("text", ["fst(every=3)", "fwd_rhs=ste(hold(uniform(2,4,rescale=False),every=3))"])
def test_masks_change_at_their_steps_and_not_by_accumulation(text):
    model, variables, x = of(text)
    set_step = jax.jit(linen.set_step)
    masks, changes = [], []
    for step in range(9):
        kernel = jax.random.normal(jax.random.key(100 + step), (16, 8))
        variables = {**variables, "params": {"layer": {**variables["params"]["layer"], "kernel": kernel}}}
        for micro in range(2):
            variables = set_step(variables, step, micro)
            masks.append(np.asarray(the_site(variables).state["fwd_rhs"]))
        assert np.array_equal(masks[-1], masks[-2])
        changes += [step] if step and not np.array_equal(masks[-1], masks[-3]) else []
    assert changes == [3, 6]


def test_forward_passes_read_and_do_not_write():
    model, variables, x = of("s_ste(2,4)")
    variables = linen.set_step(variables, 4)
    y, after = model.apply(variables, x, mutable=True)
    equal(after["nm"], variables["nm"])
    np.testing.assert_array_equal(y, model.apply(variables, x))


def test_one_compilation_serves_all_steps_and_equal_models():
    @functools.partial(jax.jit, static_argnums=0)
    @chex.assert_max_traces(1)
    def apply(model, variables, x, step):
        return model.apply(linen.set_step(variables, step), x)

    x = jnp.ones((8, 16))
    for _ in range(2):
        model = nn.Dense(8, dot_general_cls=linen.dot_cls(recipe("s_ste(2,4)"), seed=3))
        variables = model.init(jax.random.key(0), x)
        for step in range(3):
            apply(model, variables, x, step)
    assert linen.dot_cls(recipe("ste(2,4)")) != linen.conv_cls(recipe("ste(2,4)"))
    assert repr(linen.dot_cls(recipe("ste(2,4)"), seed=3)) == "dot_cls(Recipe((('.*',fwd_rhs=ste(mse(2,4))),)),seed=3)"


# ---- stacks ----


class Block(nn.Module):
    door: linen.dot_cls

    @nn.compact
    def __call__(self, x, _=None):
        return nn.Dense(x.shape[-1], use_bias=False, dot_general_cls=self.door)(x), None


class Stack(nn.Module):
    """Three blocks, each with weights of its own."""

    door: linen.dot_cls
    axis: int = 0
    nm_axis: int | None = 0
    remat: bool = False
    unroll: int = 1

    @nn.compact
    def __call__(self, x):
        axes = {"params": self.axis} | ({} if self.nm_axis is None else {"nm": self.nm_axis})
        block = nn.remat(Block) if self.remat else Block
        scanned = nn.scan(block, variable_axes=axes, split_rngs={"params": True}, length=3, unroll=self.unroll)
        return scanned(self.door, name="blocks")(x)[0]


def stack(text, axis=0, shape=(8, 16), **options):
    model = Stack(linen.dot_cls(recipe(text), SEED), axis, axis, **options)
    return model, made(model, jnp.ones(shape))


def kernel(variables):
    (leaf,) = jax.tree.leaves(variables["params"])
    return leaf


PATH = "blocks/Dense_0"


@pytest.mark.parametrize("axis", [0, 1, 2, -1])
def test_a_stack_has_noise_and_state_of_its_own_for_every_layer(axis):
    model, variables = stack("s_ste(2,4)", axis)
    site, weights = the_site(variables), jnp.moveaxis(kernel(variables), axis, 0)
    words = sites.site_words(SEED, PATH, (3,))
    np.testing.assert_array_equal(jnp.moveaxis(site.words, axis, 0).reshape(3, 2), words)
    assert len({tuple(row) for row in words.tolist()}) == 3
    betas = [nm.soft(2, 4).init(w, 0) for w in weights]
    np.testing.assert_allclose(site.state["fwd_rhs"].reshape(3), betas, rtol=1e-6)
    assert len({float(b) for b in betas}) == 3
    later = the_site(linen.set_step(variables, 7, 2))
    np.testing.assert_array_equal(jnp.moveaxis(later.time, axis, 0).reshape(3, 2), [[7, 2]] * 3)
    equal(later.replace(time=None), site.replace(time=None))


@pytest.mark.parametrize(("remat", "axis"), [(False, 0), (True, 1)])
@pytest.mark.parametrize("text", [HELD, "bi_mask(every=3,draws=4,lam=0)", "sdgf(1,4,steps=8)", EVERY])
def test_a_stack_is_its_layers_one_after_another(text, remat, axis):
    model, variables = stack(text, axis, remat=remat)
    weights, x, g = whole(0, 3, 16, 16, most=1), whole(1, 8, 16, most=1), whole(2, 8, 16, most=1)

    @jax.jit
    def delivered(weights, x, g):
        params = jax.tree.map(lambda v: jnp.moveaxis(weights, 0, axis), variables["params"])
        now = linen.set_step({**variables, "params": params}, STEP, MICRO)
        y, back = jax.vjp(lambda p, x: model.apply({**now, "params": p}, x), params, x)
        dw, dx = back(g)
        return y, jnp.moveaxis(jax.tree.leaves(dw)[0], axis, 0), dx

    def by_hand(weights, x):
        for w, own in zip(weights, sites.site_words(SEED, PATH, (3,)), strict=True):
            x = one_layer(text, w, own, x)
        return x

    y, back = jax.vjp(by_hand, weights, x)
    equal(delivered(weights, x, g), (y, *back(g)))


@functools.partial(jax.jit, static_argnums=0)
def one_layer(text, w, words, x):
    """Return the output of one layer of a stack, computed by hand."""
    sparsity, plain = nm.parse(text), jax.lax.stop_gradient(w)
    state = sparsity.init(plain, contract=0, out=1)
    state = sparsity.refresh(plain, contract=0, out=1, ctx=nm.Ctx(words, STEP, state, since=0))
    return nm.einsum("ti,io->to", x, w, sparsity=sparsity, ctx=nm.Ctx(sites.site_key(words, MICRO), STEP, state))


def test_a_stack_trains_in_one_compilation():
    model, variables = stack("s_ste(2,4)", remat=True, shape=(32, 16))
    x = jax.random.normal(jax.random.key(3), (32, 16))
    target = jnp.roll(x, 1, axis=1)

    @functools.partial(jax.jit, donate_argnums=0)
    @chex.assert_max_traces(1)
    def train(variables, step):
        variables = linen.set_step(variables, step)
        loss = lambda p: jnp.square(model.apply({**variables, "params": p}, x) - target).sum() / 32
        value, grads = jax.value_and_grad(loss)(variables["params"])
        return {**variables, "params": jax.tree.map(lambda p, g: p - 0.02 * g, variables["params"], grads)}, value

    losses = []
    for step in range(100):
        variables, value = train(variables, step)
        losses.append(float(value))
    assert losses[-1] < losses[0] / 3


class Grid(nn.Module):
    """Two blocks of three experts. All experts get the same input, and their results are added."""

    door: linen.dot_cls
    axes: tuple = (0, 0)  # of the blocks, of the experts

    @nn.compact
    def __call__(self, x):
        outer, inner = self.axes
        mapped = {"in_axes": None, "out_axes": 0, "axis_size": 3, "split_rngs": {"params": True}}

        class Experts(nn.Module):
            door: linen.dot_cls

            @nn.compact
            def __call__(self, x, _):
                experts = nn.vmap(nn.Dense, variable_axes={"params": inner, "nm": inner}, **mapped)
                return experts(16, use_bias=False, dot_general_cls=self.door, name="expert")(x).sum(0), None

        axes = {"params": outer, "nm": outer}
        scanned = nn.scan(Experts, variable_axes=axes, split_rngs={"params": True}, length=2)
        return scanned(self.door, name="blocks")(x, None)[0]


@pytest.mark.slow
@pytest.mark.parametrize(("axes", "text"), [((0, 0), HELD), ((-1, 1), HELD), ((1, 2), "bdwp()")])
def test_a_stack_of_stacks(axes, text):
    model = Grid(linen.dot_cls(recipe(text), SEED), axes)
    weights, x, g = whole(0, 2, 3, 16, 16, most=1), whole(1, 8, 16, most=1), whole(2, 8, 16, most=1)
    variables = made(model, x)
    stacked = jax.vmap(jax.vmap(lambda w: w, 0, axes[1]), 0, axes[0])
    unstacked = jax.vmap(jax.vmap(lambda w: w, axes[1], 0), axes[0], 0)
    words = sites.site_words(SEED, "blocks/expert", (2, 3))
    if text == HELD:
        np.testing.assert_array_equal(unstacked(the_site(variables).words).reshape(2, 3, 2), words)

    @jax.jit
    def delivered(weights, x, g):
        params = jax.tree.map(lambda v: stacked(weights), variables["params"])
        now = linen.set_step({**variables, "params": params}, STEP, MICRO)
        y, back = jax.vjp(lambda p: model.apply({**now, "params": p}, x), params)
        hard = linen.harden(now)
        return y, unstacked(jax.tree.leaves(back(g)[0])[0]), unstacked(kernel(hard)), model.apply(hard, x)

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
    block, x = Block(linen.dot_cls(recipe("mvue(2,4)"))), jax.random.normal(jax.random.key(0), (8, 16))
    variables = jax.vmap(lambda key: block.init(key, x))(jax.random.split(jax.random.key(1), 3))
    with pytest.raises(
        ValueError, match=r"Dense_0: its weight has shape \(3, 16, 16\), but 'nm' is for \(16, 16\) .* made by hand"
    ):
        linen.set_step(variables, 0)
    variables = {**variables, "nm": meta.add_axis(variables["nm"], 0, {})}
    np.testing.assert_array_equal(the_site(variables).words.reshape(3, 2), sites.site_words(0, "Dense_0", (3,)))
    variables = linen.set_step(variables, 2)
    y, _ = jax.lax.scan(lambda x, v: block.apply(v, x), x, variables)
    assert y.shape == x.shape


@pytest.mark.slow
def test_what_init_draws_differs_in_a_stack():
    model, variables = stack("fwd_rhs=ste(hold(uniform(2,4,rescale=False)))")
    masks = the_site(variables).state["fwd_rhs"]
    assert differ(masks[0], masks[1])
    equal(the_site(linen.set_step(variables, 5)).state["fwd_rhs"], masks)
    again = the_site(linen.reset_state(variables)).state["fwd_rhs"]
    words, p = sites.site_words(SEED, PATH, (3,)), nm.parse("fwd_rhs=ste(hold(uniform(2,4,rescale=False)))")
    for i in range(3):
        state = p.init(kernel(variables)[i], contract=0, out=1, ctx=nm.Ctx(words[i]))
        np.testing.assert_array_equal(again[i], state["fwd_rhs"])


def test_a_tied_layer_keeps_one_variable():
    class Tied(nn.Module):
        @nn.compact
        def __call__(self, x):
            tied = nn.scan(Block, variable_broadcast=["params", "nm"], split_rngs={"params": False}, length=3)
            return tied(linen.dot_cls(recipe("s_ste(2,4)")), name="blocks")(x)[0]

    x = jax.random.normal(jax.random.key(0), (8, 16))
    variables = linen.set_step(Tied().init(jax.random.key(1), x), 3)
    hard = linen.harden(variables)
    np.testing.assert_array_equal(Tied().apply(hard, x), Tied().apply(variables, x))
    assert nm.groups.is_nm(kernel(hard), 2, 4, axis=0)


# ---- final forms and state ----


HARD = (
    "ste(2,4)",
    "s_ste(2,4)",
    "s_ste(2,4,fp8=True)",
    "mdgf(2,4,linear(1,0,9))",
    "fst(every=3)",
    "sdgf(1,4,steps=8)",
    "activation(2,4)",
    "bi_mask(draws=4)",
)


@pytest.mark.parametrize(("text", "dtype"), [(t, jnp.bfloat16) for t in HARD] + [("s_ste(2,4)", jnp.float32)])
def test_hardened_is_the_training_form_bit_for_bit(text, dtype):
    make = functools.partial(nn.Dense, 8, dtype=dtype, dot_general_cls=linen.dot_cls(recipe(text), SEED))
    model, x = Named(make), jax.random.normal(jax.random.key(1), (8, 64))
    variables = linen.set_step(made(model, x), 9)
    apply = jax.jit(model.apply)
    y, hard = apply(variables, x), jax.jit(linen.harden)(variables)
    np.testing.assert_array_equal(apply(hard, x), y)
    chex.assert_trees_all_equal_shapes_and_dtypes(hard["params"], variables["params"])
    n = 1 if "sdgf" in text else 4 if "activation" in text else 2
    assert nm.groups.is_nm(hard["params"]["layer"]["kernel"], n, 4, axis=0)
    if n < 4:
        assert not nm.groups.is_nm(variables["params"]["layer"]["kernel"], n, 4, axis=0)
    assert not jax.tree.leaves(hard["nm"])
    equal(linen.harden(hard), hard)
    equal(linen.set_step(hard, 3), hard)


def test_a_weight_is_hardened_in_the_dtype_of_its_product():
    """The ranks of bfloat16 values differ from the ranks of the float32 values that they round."""
    model = Named(
        functools.partial(nn.Dense, 64, dtype=jnp.bfloat16, dot_general_cls=linen.dot_cls(recipe("ste(2,4)")))
    )
    x = jax.random.normal(jax.random.key(1), (8, 256))
    variables = made(model, x)
    w, hard = (v["params"]["layer"]["kernel"] for v in (variables, linen.harden(variables)))
    np.testing.assert_array_equal(hard, nm.mse(2, 4)(w.astype(jnp.bfloat16), 0).astype(jnp.float32))
    assert not np.array_equal(hard != 0, nm.mse(2, 4)(w, 0) != 0)


def test_a_soft_weight_shrinks_once():
    """This holds for a layer that is called twice, too."""

    class Twice(nn.Module):
        @nn.compact
        def __call__(self, x):
            layer = nn.Dense(16, dot_general_cls=linen.dot_cls(recipe("s_ste(2,4)")))
            return layer(layer(x))

    x = jax.random.normal(jax.random.key(1), (8, 16))
    variables = Twice().init(jax.random.key(2), x)
    beta = the_site(variables).state["fwd_rhs"].reshape(())
    hard = linen.harden(variables)
    expected = nm.soft(2, 4)(variables["params"]["Dense_0"]["kernel"], 0, nm.Ctx(state=beta))
    np.testing.assert_array_equal(hard["params"]["Dense_0"]["kernel"], expected)
    np.testing.assert_array_equal(Twice().apply(hard, x), Twice().apply(variables, x))


def test_state_is_made_anew_of_loaded_weights():
    model, variables, x = of("s_ste(2,4)")
    loaded = jax.tree.map(lambda v: jax.random.normal(jax.random.key(9), v.shape) ** 3, variables["params"])
    renewed = linen.reset_state({"params": loaded, "nm": variables["nm"]})["nm"]
    old, new = (linen.set_step({"params": loaded, "nm": v}, 4)["nm"] for v in (variables["nm"], renewed))
    beta = nm.soft(2, 4).init(loaded["layer"]["kernel"], 0)
    one, other = (the_site({"nm": v}).state["fwd_rhs"].reshape(()) for v in (old, new))
    assert float(other) == float(beta) != float(one)


def test_a_part_of_a_model_applies_as_it_does_within():
    """The path in its variable counts, not the path that the part has on its own."""
    model, variables, x = of("ste(2,4)", pattern="layer")
    y = model.apply(variables, x)
    part = model.make()
    np.testing.assert_array_equal(
        part.apply({"params": variables["params"]["layer"], "nm": variables["nm"]["layer"]}, x), y
    )
    assert differ(part.apply({"params": variables["params"]["layer"]}, x), y)


def test_paths_are_of_dense_layers_too():
    door = linen.dot_cls(nm.Recipe(((".*/Dense_0", "s_ste(2,4)"), ("head", "dense"))))

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(4, name="head", dot_general_cls=door)(Stack(door, name="body")(x))

    variables = jax.eval_shape(Model().init, jax.random.key(0), jnp.ones((8, 16)))
    assert linen.paths(variables) == ("body/blocks/Dense_0", "head")
    door.recipe.check(linen.paths(variables))
    with pytest.raises(ValueError, match="mlp"):
        recipe("ste(2,4)", ".*/mlp").check(linen.paths(variables))


# ---- trees, boxes and meshes ----


def test_variables_may_be_unboxed_frozen_and_written():
    model, variables = stack("s_ste(2,4)")
    x = jax.random.normal(jax.random.key(1), (8, 16))
    at = linen.set_step(variables, 3)
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
    model = Named(functools.partial(nn.Dense, 16, kernel_init=names, dot_general_cls=linen.dot_cls(recipe(HELD))))
    x = jnp.ones((8, 16))
    with jax.set_mesh(mesh):
        shardings = nn.get_sharding(jax.eval_shape(model.init, jax.random.key(0), x), mesh)
        variables = jax.jit(model.init, out_shardings=shardings)(jax.random.key(0), x)
        variables = jax.jit(linen.set_step)(variables, 3)
        hard = jax.jit(linen.harden)(variables)
    for boxed in (v["params"]["layer"]["kernel"] for v in (variables, hard)):
        assert isinstance(boxed, nn.Partitioned)
        assert boxed.value.sharding.is_equivalent_to(NamedSharding(mesh, P(None, "data")), 2)
    assert the_site(variables).state["fwd_rhs"].sharding.is_equivalent_to(NamedSharding(mesh, P(None, "data")), 2)
    assert nm.groups.is_nm(hard["params"]["layer"]["kernel"].value, 2, 4, axis=0)


# ---- what is refused ----


def test_a_missing_collection_is_refused_by_the_layer_that_needs_it():
    model, variables, x = of("s_ste(2,4)")
    with pytest.raises(
        ValueError,
        match=r"layer: fwd_rhs=ste\(soft\(2,4\)\); .* reads the collection 'nm', which is missing.*"
        r"'nm': variables\['nm'\]",
    ):
        model.apply({"params": variables["params"]}, x)
    with pytest.raises(ValueError, match="layer: .* reads the collection 'nm'"):
        model.apply({"params": variables["params"]}, x, mutable=True)
    with pytest.raises(ValueError, match="layer: init cannot make its variable"):
        model.init(jax.random.key(0), x, mutable=["params"])
    with pytest.raises(ValueError, match=r"in one dict, got \['nm'\]"):
        linen.set_step({"nm": variables["nm"]}, 0)
    with pytest.raises(ValueError, match=r"in one dict, got \['params'\]"):
        linen.harden({"params": variables["params"]})
    model, variables, x = of("ste(2,4)")
    np.testing.assert_array_equal(model.apply({"params": variables["params"]}, x), model.apply(variables, x))


def shapes(model, x):
    """Return the shapes of the variables. Errors need no arrays."""
    return jax.eval_shape(model.init, jax.random.key(0), x)


def test_a_stack_that_does_not_pass_the_collection_is_refused():
    door, x = linen.dot_cls(recipe("mvue(2,4)")), jnp.ones((8, 16))
    apply = lambda model, variables: jax.eval_shape(model.apply, variables, x)
    with pytest.raises(
        ValueError, match=rf"{PATH}: init cannot make its variable .* variable_axes={{'params': 0, 'nm': 0}}"
    ):
        shapes(Stack(door, nm_axis=None), x)
    variables = shapes(Stack(door), x)
    with pytest.raises(ValueError, match=f"{PATH}: .* reads the collection 'nm'"):
        apply(Stack(door, nm_axis=None), variables)
    with pytest.raises(ValueError, match=rf"{PATH}: 'nm' is stacked along \(0,\), but the call slices it along 1"):
        apply(Stack(door, 0, 1), variables)
    apart = shapes(Stack(door, 1, 0), x)
    for call in (functools.partial(linen.set_step, step=0), linen.harden):
        with pytest.raises(
            ValueError,
            match=rf"{PATH}: its weight has shape \(16, 3, 16\), but 'nm' is for \(16, 16\) stacked along \(0,\)",
        ):
            jax.eval_shape(call, apart)


@pytest.mark.parametrize("text", ["mvue(2,4)", "mdgf(2,4,linear(1,0,9))"])
def test_layers_that_share_a_variable_but_no_weight_are_refused(text):
    """Such layers would draw the same noise."""

    class Shared(nn.Module):
        @nn.compact
        def __call__(self, x):
            options = {"variable_axes": {"params": 0}, "variable_broadcast": "nm", "split_rngs": {"params": True}}
            return nn.scan(Block, length=3, **options)(linen.dot_cls(recipe(text)), name="blocks")(x)[0]

    x = jnp.ones((8, 16))
    with pytest.raises(
        ValueError,
        match=rf"{PATH}: its weight has shape \(3, 16, 16\), but 'nm' is for \(16, 16\) stacked along no axis",
    ):
        jax.eval_shape(linen.set_step, shapes(Shared(), x), 0)
    with pytest.raises(ValueError, match=f"{PATH}: one layer got the variables of a whole stack"):
        jax.eval_shape(Shared().apply, shapes(Stack(linen.dot_cls(recipe(text))), x), x)


def test_another_recipe_or_seed_wants_other_variables():
    door, x = linen.dot_cls(recipe("s_ste(2,4)")), jnp.ones((8, 16))
    variables = nn.Dense(8, dot_general_cls=door).init(jax.random.key(0), x)
    for text, seed in (("ste(2,4)", 0), ("dense", 0), ("s_ste(2,4)", 1)):
        other = nn.Dense(8, dot_general_cls=linen.dot_cls(recipe(text), seed))
        with pytest.raises(
            ValueError, match=rf"the layer: .* with seed 0, and the model has .* seed {seed}.*reset_state"
        ):
            other.apply(variables, x)


def test_groups_that_do_not_divide_are_refused_with_their_layer():
    with pytest.raises(ValueError, match=r"layer: fwd_rhs=.*\(18, 8\)"):
        of("s_ste(2,4)", shape=(8, 18))
    model, variables = stack("mvue(2,4)", remat=True)
    model.apply(variables, jnp.ones((6, 16)))  # which nobody differentiates
    with pytest.raises(ValueError, match=rf"{PATH}: drhs_g=.*\(6, 16\)"):
        jax.grad(lambda p: model.apply({**variables, "params": p}, jnp.ones((6, 16))).sum())(variables["params"])


def test_what_draws_forward_has_no_final_form():
    _, variables, _ = of("fwd_rhs=ste(mvue(2,4))")
    with pytest.raises(ValueError, match=r"layer: mvue\(2,4\) draws new values .* no final form"):
        linen.harden(variables)


class Odd(nn.Module):
    """A user's own layers, whose weights set_step and harden could not find."""

    door: linen.dot_cls
    names: tuple

    @nn.compact
    def __call__(self, x):
        for name in self.names:
            w = self.param(name, nn.initializers.lecun_normal(), (16, 16))
            x = self.door()(x, w, (((1,), (0,)), ((), ())))
        return x


@pytest.mark.parametrize(("names", "words"), [(("w",), "Product_0"), (("kernel", "w"), "Product_1")])
def test_a_weight_that_could_not_be_found_again_is_refused(names, words):
    x = jnp.ones((8, 16))
    with pytest.raises(ValueError, match=rf"the layer: set_step and harden read .* 'kernel' .* this one is {words}"):
        Odd(linen.dot_cls(recipe("ste(2,4)")), names).init(jax.random.key(0), x)
    Odd(linen.dot_cls(recipe("dense")), names).init(jax.random.key(0), x)
    Odd(linen.dot_cls(recipe("ste(2,4)")), ("kernel",)).init(jax.random.key(0), x)


def test_a_masked_kernel_is_refused():
    make = lambda text: nn.Conv(
        8, (3,), mask=jnp.ones((3, 8, 8)), conv_general_dilated_cls=linen.conv_cls(recipe(text))
    )
    with pytest.raises(ValueError, match="without a mask"):
        make("ste(2,4)").init(jax.random.key(0), jnp.ones((4, 8, 8)))
    make("dense").init(jax.random.key(0), jnp.ones((4, 8, 8)))


def test_a_recipe_is_wanted():
    with pytest.raises(TypeError, match="expected a Recipe, .* got 's_ste"):
        linen.dot_cls("s_ste(2,4)")
    with pytest.raises(dataclasses.FrozenInstanceError):
        linen.conv_cls(recipe("ste(2,4)")).seed = 3


@pytest.mark.slow
def test_the_noise_is_nnxs():
    """With the same seed and path, linen and nnx have the same gradient, bit for bit, masks and scales included."""
    text = "fst(every=2); dlhs_g=mvue(2,4)"
    recipe = nm.Recipe(((r"up", text),))

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(16, dot_general_cls=nm.linen.dot_cls(recipe, seed=9), name="up")(x)

    x = jnp.asarray(np.random.default_rng(0).integers(-3, 4, (8, 16)), jnp.float32)
    other = nm.nnx.sparsify(nnx.Dict(up=nnx.Linear(16, 16, rngs=nnx.Rngs(0))), recipe, seed=9)
    variables = Model().init(jax.random.key(0), x)
    variables["params"] = {"up": {name: getattr(other.up, name)[...] for name in ("kernel", "bias")}}
    variables = nm.linen.set_step(nm.linen.reset_state(variables), 6, 1)
    nm.nnx.set_step(other, 6, 1)
    loss = lambda params, x: jnp.sum(Model().apply({"params": params, "nm": variables["nm"]}, x) * jnp.sign(x))
    grads = jax.jit(jax.grad(loss, (0, 1)))(variables["params"], x)
    expected = nnx.jit(nnx.grad(lambda model, x: jnp.sum(model.up(x) * jnp.sign(x)), argnums=(0, 1)))(other, x)
    np.testing.assert_array_equal(grads[0]["up"]["kernel"], expected[0]["up"]["kernel"][...])
    np.testing.assert_array_equal(grads[1], expected[1])
    hard = nm.linen.harden(variables)["params"]["up"]["kernel"]
    np.testing.assert_array_equal(hard, nm.nnx.harden(other).up.kernel[...])
