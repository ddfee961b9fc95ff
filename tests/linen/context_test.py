"""The context `sparsify`: models without arguments, doors that others declare, and what is refused."""

import contextlib
import functools
import warnings

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import nmjax as nm
from nmjax import linen
from nmjax.linen.doors import DOORS
from tests.linen import arguments_test as by_argument
from tests.linen.arguments_test import EVERY, METHODS, MICRO, SEED, SOME, STEP, Named, equal, made, recipe

pytestmark = pytest.mark.sampled


@pytest.fixture(autouse=True)
def same_doors():
    """Leave the doors as they were."""
    before = dict(DOORS)
    yield
    DOORS.clear()
    DOORS.update(before)


def without_argument(model: Named) -> Named:
    """Return the model of a layer without our argument."""
    make = model.make
    return Named(
        functools.partial(make.func, *make.args, **{k: v for k, v in make.keywords.items() if "_cls" not in k})
    )


def init(model, x, recipe, *, strict=True, seed=SEED):
    with linen.sparsify(recipe, seed=seed, strict=strict):
        return jax.jit(model.init)(jax.random.key(2), x)


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


# ---- the same bits as with the argument ----

CASES = [(by_argument.dense, m) for m in METHODS]
CASES += [(f, m) for f in (by_argument.general, by_argument.conv) for m in SOME] + [(by_argument.batched, EVERY)]
CASES += [(by_argument.dense, "fwd_rhs=ste(hold(uniform(2,4,rescale=False)))"), (by_argument.dense, "dense")]


@pytest.mark.parametrize(("layer", "text"), CASES, ids=lambda v: getattr(v, "__name__", v))
def test_the_context_gives_the_bits_of_the_argument(layer, text):
    make, shape, *_ = layer(text)
    model, x = Named(make), normal(1, *shape)
    plain, by_rule = without_argument(model), recipe(text)
    expected, variables = made(model, x), init(plain, x, by_rule)
    equal(variables, expected)
    expected = linen.set_step(expected, STEP, MICRO)
    variables = linen.set_step(variables, STEP, MICRO)
    equal(variables, expected)
    g = normal(3, *jax.eval_shape(model.apply, expected, x).shape)

    def results(model, variables):
        y, back = jax.vjp(lambda p, x: model.apply({**variables, "params": p}, x), variables["params"], x)
        return y, back(g)

    wanted = jax.jit(functools.partial(results, model))(expected)
    with linen.sparsify(by_rule, seed=SEED):
        equal(jax.jit(functools.partial(results, plain))(variables), wanted)
    if text not in ("sdgp(2,4,over='group')", "mvue(2,4)", "dense"):
        assert not np.array_equal(plain.apply({"params": variables["params"]}, x), wanted[0])


class Block(nn.Module):
    door: linen.dot_cls | None = None

    @nn.compact
    def __call__(self, x, _=None):
        lifted = nn.remat(nn.Dense)(x.shape[-1], dot_general_cls=self.door, name="up")
        return nn.jit(nn.Dense)(x.shape[-1], dot_general_cls=self.door, name="down")(nn.relu(lifted(x))), None


class Stack(nn.Module):
    door: linen.dot_cls | None = None
    axis: int = 0

    @nn.compact
    def __call__(self, x):
        axes = {"params": self.axis, "nm": self.axis}
        scanned = nn.scan(Block, variable_axes=axes, split_rngs={"params": True}, length=3)
        return scanned(self.door, name="blocks")(x)[0]


@pytest.mark.parametrize("axis", [0, 1])
def test_a_stack_gives_the_bits_of_the_argument(axis):
    x, by_rule = normal(1, 8, 16), recipe(EVERY)
    with_door, plain = Stack(linen.dot_cls(by_rule, SEED), axis), Stack(axis=axis)
    expected, variables = made(with_door, x), init(plain, x, by_rule)
    equal(variables, expected)
    variables = linen.set_step(variables, STEP)
    loss = lambda model: jax.jit(jax.value_and_grad(lambda p: (model.apply({**variables, "params": p}, x) ** 2).sum()))
    wanted = loss(with_door)(variables["params"])
    with linen.sparsify(by_rule, seed=SEED):
        equal(loss(plain)(variables["params"]), wanted)


def test_what_is_compiled_outside_is_not_used_inside():
    model, x, by_rule = Stack(), normal(1, 8, 16), recipe("ste(2,4)")
    variables, apply = init(model, x, by_rule), jax.jit(model.apply)
    dense = model.apply({"params": variables["params"]}, x)
    np.testing.assert_allclose(apply(variables, x), dense, atol=1e-5)
    with linen.sparsify(by_rule, seed=SEED):
        sparse = apply(variables, x)
        with chex.fake_jit():
            np.testing.assert_allclose(model.apply(variables, x), sparse, atol=1e-5)
    assert not np.allclose(sparse, dense, atol=1e-2)
    np.testing.assert_allclose(apply(variables, x), dense, atol=1e-5)
    with linen.sparsify(by_rule, seed=SEED):
        assert np.array_equal(apply(variables, x), sparse)


def test_a_layer_with_the_argument_keeps_it():
    model, x = nn.Dense(8, dot_general_cls=linen.dot_cls(recipe("ste(1,4)"), SEED)), normal(1, 4, 16)
    variables = init(model, x, nm.Recipe({".*": "dense"}))
    with linen.sparsify(nm.Recipe({".*": "ste(2,4)"})):
        y = model.apply(variables, x)
    np.testing.assert_array_equal(y, model.apply(variables, x))
    assert nm.groups.is_nm(linen.harden(variables)["params"]["kernel"], 1, 4, axis=0)


@pytest.mark.parametrize(
    "layer", [lambda: nn.Einsum((16, 8), "bti,io->bto"), lambda: nn.ConvTranspose(8, (3,), strides=(2,))]
)
def test_layers_without_the_argument_are_pruned(layer):
    model, x = layer(), normal(1, 2, 8, 16)
    variables = init(model, x, recipe("s_ste(2,4)"))
    with linen.sparsify(recipe("s_ste(2,4)"), seed=SEED):
        y = jax.jit(model.apply)(variables, x)
    hard = jax.jit(linen.harden)(variables)
    np.testing.assert_array_equal(jax.jit(model.apply)({"params": hard["params"]}, x), y)
    assert [int(n) for n in linen.violations(hard).values()] == [0]
    assert [int(n) > 0 for n in linen.violations(variables).values()] == [True]


# ---- doors that others declare ----


class Einsum(nn.Module):
    """A layer of the form that DeepMind's gemma has."""

    shape: tuple
    weight_name: str = "w"

    @nn.compact
    def __call__(self, eqn, x):
        return jnp.einsum(eqn, x, self.param(self.weight_name, nn.initializers.normal(0.1), self.shape))


class Gated(nn.Module):
    """A feed-forward block whose layers have their weights in its scope."""

    @nn.compact
    def __call__(self, x):
        gating = Einsum((2, 32, 16), "gating_einsum")
        nn.share_scope(self, gating)
        one, other = gating("...F,NHF->N...H", x)
        linear = Einsum((32, 16), "linear")
        nn.share_scope(self, linear)
        return linear("...H,HF->...F", nn.gelu(one) * other)


class Gemma(nn.Module):
    def setup(self):
        self.query, self.out, self.mlp = Einsum((4, 16, 8)), Einsum((4, 8, 16)), Gated()

    def __call__(self, x):
        return x + self.mlp(x + self.out("BTNH,NHD->BTD", self.query("BTD,NDH->BTNH", x)))


NAME = f"{Einsum.__module__}:Einsum"


def test_a_class_that_one_cannot_edit_trains_by_a_door_of_one_line():
    linen.door(NAME, weight="{weight_name}")
    model, x, by_rule = Gemma(), normal(1, 2, 8, 16), nm.Recipe({r"mlp/.*": EVERY, r"query|out": "s_ste(2,4)"})
    variables, target = init(model, x, by_rule), jnp.roll(x, 1, -1)
    assert linen.paths(variables) == ("mlp/gating_einsum", "mlp/linear", "out", "query")
    assert {path: str(pattern) for path, pattern in linen.patterns(variables).items()} == {
        "mlp/gating_einsum": "2:4 along axis 2",
        "mlp/linear": "2:4 along axis 0",
        "out/w": "2:4 along axes 0, 1",
        "query/w": "2:4 along axis 1",
    }
    optimizer = optax.sgd(0.5)

    @jax.jit
    @chex.assert_max_traces(1)
    def train(variables, moments, step):
        variables = linen.set_step(variables, step)
        with linen.sparsify(by_rule, seed=SEED):
            loss = lambda p: jnp.square(model.apply({**variables, "params": p}, x) - target).mean()
            value, grads = jax.value_and_grad(loss)(variables["params"])
        change, moments = optimizer.update(grads, moments)
        return {**variables, "params": optax.apply_updates(variables["params"], change)}, moments, value

    moments, losses = optimizer.init(variables["params"]), []
    for step in range(5):
        variables, moments, value = train(variables, moments, step)
        losses.append(float(value))
    assert losses == sorted(losses, reverse=True)
    hard = linen.harden(variables)
    assert [int(n) for n in linen.violations(hard).values()] == [0] * 4
    patterns = linen.patterns(hard)
    assert not any(map(int, nm.metrics.violations(hard["params"], patterns).values()))
    assert patterns == linen.patterns(variables)


@pytest.mark.parametrize("text", ["s_ste(2,4)", "ste(2,4)", "mdgf(2,4,linear(1,0,9))"])
def test_the_plain_layer_on_hardened_weights_gives_the_same_bits(text):
    linen.door(Einsum, weight="{weight_name}")
    model, x, eqn = Einsum((4, 16, 8)), normal(1, 2, 8, 16), "BTD,NDH->BTNH"
    with linen.sparsify(recipe(text), strict=True):
        variables = linen.set_step(model.init(jax.random.key(0), eqn, x), 9)
        y = model.apply(variables, eqn, x)
    hard = linen.harden(variables)["params"]
    np.testing.assert_array_equal(model.apply({"params": hard}, eqn, x), y)
    assert not np.array_equal(model.apply({"params": variables["params"]}, eqn, x), y)


@pytest.mark.parametrize(
    ("eqn", "shape", "by_hand"),
    [
        ("bi,io->bo", (16, 8), "bi,io->bo"),
        ("bi,oi->bo", (8, 16), "bi,oi->bo"),
        ("bi,nio->nbo", (2, 16, 4), "bi,nio->bno"),
    ],
)
@pytest.mark.parametrize("text", ["s_ste(2,4)", EVERY])
def test_a_declared_layer_is_its_product_by_hand(eqn, shape, by_hand, text):
    linen.door(Einsum, weight="w")
    model, x = Einsum(shape), normal(1, 8, 16)
    with linen.sparsify(recipe(text), seed=SEED, strict=True):
        variables = linen.set_step(model.init(jax.random.key(0), eqn, x), STEP)
        call = lambda w, x: model.apply({**variables, "params": {"w": w}}, eqn, x)
        y, back = jax.vjp(call, variables["params"]["w"], x)
        g = normal(3, *y.shape)
        dw, dx = back(g)
    site = by_argument.the_site(variables)
    ctx = nm.Ctx(None, STEP, site.site.state)
    if site.words is not None:
        ctx = ctx.replace(key=by_argument.sites.site_key(by_argument.sites.site_words(SEED, ""), 0))
    product = lambda w, x: nm.einsum(by_hand, x, w, sparsity=nm.parse(text), ctx=ctx)
    hand, back = jax.vjp(product, variables["params"]["w"], x)
    moved = len(shape) == 3
    np.testing.assert_allclose(jnp.moveaxis(y, 0, 1) if moved else y, hand, rtol=1e-5, atol=1e-6)
    for got, wanted in zip((dw, dx), back(jnp.moveaxis(g, 0, 1) if moved else g), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)


class Experts(nn.Module):
    """Two weights and a scale, made in setup, and a layer of Flax inside."""

    def setup(self):
        draw = nn.initializers.lecun_normal()
        self.up, self.down = self.param("up", draw, (16, 32)), self.param("down", draw, (32, 16))
        self.scale, self.inner, self.drop = self.param("scale", draw, (4, 4)), nn.Dense(16), nn.Dropout(0.5)
        self.count = self.variable("stats", "count", lambda: jnp.zeros(()))

    def __call__(self, x, train=False):
        if not self.is_initializing() and self.is_mutable_collection("stats"):
            self.count.value += 1
        h = self.helper(x) + self.scale.sum()
        return self.inner(self.drop(h @ self.down, deterministic=not train))

    def helper(self, x):
        return nn.relu(x @ self.up)


def test_a_layer_may_have_several_weights_and_layers_and_variables():
    linen.door(Experts, weight=("up", "down"))
    model, x = Experts(), normal(1, 8, 16)
    by_rule = nm.Recipe({r"up": "ste(2,4)", r"down": "ste(1,4)", "inner": "s_ste(2,4)", "scale": "dense"})
    variables = init(model, x, by_rule)
    assert linen.paths(variables) == ("down", "up", "inner")
    rngs = {"dropout": jax.random.key(4)}
    with linen.sparsify(by_rule, seed=SEED):
        y, written = model.apply(variables, x, train=True, rngs=rngs, mutable=["stats"])
        _, seen = model.apply(variables, x, capture_intermediates=True)
    assert float(written["stats"]["count"]) == 1
    assert [len(v) for v in jax.tree.leaves(seen["intermediates"], is_leaf=lambda v: isinstance(v, tuple))] == [1] * 3
    hard = linen.harden(variables)
    plain = {**hard, "stats": variables["stats"]}
    del plain["nm"]
    np.testing.assert_array_equal(model.apply(plain, x, train=True, rngs=rngs), y)
    found = {path: (p.n, p.m) for path, p in linen.patterns(variables).items()}
    assert found == {"down": (1, 4), "up": (2, 4), "inner/kernel": (2, 4)}


def test_another_method_uses_the_weight_too():
    class Table(nn.Module):
        def setup(self):
            self.w = self.param("w", nn.initializers.lecun_normal(), (32, 16))

        def __call__(self, i):
            return self.w[i]

        def attend(self, x):
            return x @ self.w.T

    class Model(nn.Module):
        @nn.compact
        def __call__(self, i):
            table = Table(name="table")
            return table.attend(table(i))

    linen.door(Table, weight="w")
    with pytest.raises(
        ValueError, match=r"table: the door .*Table, weight='w'.* multiplies no input by w of shape \(32, 16\)"
    ):
        init(Model(), jnp.arange(4), recipe("ste(2,4)"))
    init(Model(), jnp.arange(4), recipe("dense"))


class Merging(nn.Module):
    """A layer that merges axes of its weight before the product."""

    @nn.compact
    def __call__(self, x):
        w = self.param("w", nn.initializers.lecun_normal(), (4, 6, 10))
        return x @ w.reshape(24, 10)


def test_a_reshaped_weight_is_pruned_and_has_no_axes():
    linen.door(Merging, weight="w")
    model, x = Merging(), normal(1, 5, 24)
    variables = init(model, x, recipe("fwd_rhs=ste(mse(2,8))"))
    with pytest.raises(ValueError, match=r"reshapes its weight of shape \(4, 6, 10\)"):
        linen.patterns(variables)
    hard = linen.harden(variables)
    w = variables["params"]["w"].reshape(24, 10)
    np.testing.assert_array_equal(hard["params"]["w"].reshape(24, 10), nm.mse(2, 8)(w, 0))
    assert int(linen.violations(hard)["w"]) == 0
    np.testing.assert_array_equal(linen.masks(variables)["w"].reshape(24, 10), nm.mse(2, 8).mask(w, 0))


# ---- what is refused ----


def test_a_door_that_does_not_fit_is_refused():
    x = normal(1, 8, 16)

    class Odd(nn.Module):
        twice: bool = False

        @nn.compact
        def __call__(self, x):
            w = self.param("w", nn.initializers.lecun_normal(), (16, 16))
            return x @ jnp.tanh(w), (x @ w if self.twice else x) @ w.T

    linen.door(Odd, weight="v")
    with pytest.raises(
        ValueError, match=r"layer: the door nm.linen.door\(Odd, weight='v'\) names .* Odd has w \(16, 16\)"
    ):
        init(Named(functools.partial(Odd)), x, recipe("ste(2,4)"))
    with pytest.raises(ValueError, match=r"nm.linen.door\(.*Odd, weight='w'\): the class has a door already, for v"):
        linen.door(Odd, weight="w")
    DOORS[Odd] = ("w",)
    variables = init(Named(functools.partial(Odd)), x, recipe("ste(2,4)"))  # once as it is
    with pytest.raises(ValueError, match=r"layer: .*prunes a weight of shape \(16, 16\) .* it also goes into tanh"):
        linen.harden(variables)
    with pytest.raises(ValueError, match=r"layer: .*Odd multiplies by w of shape \(16, 16\) along different axes"):
        init(Named(functools.partial(Odd, True)), x, recipe("ste(2,4)"))
    DOORS[Odd] = ("{width}",)
    with pytest.raises(ValueError, match=r"layer: .*weight='{width}'\) names 'width', and Odd has no such attribute"):
        init(Named(functools.partial(Odd)), x, recipe("ste(2,4)"))


def test_a_layer_that_differentiates_its_own_product_is_refused():
    """In init, in a call that takes the derivative only later, and in the plan; a dense layer may."""

    class Energy(nn.Module):
        @nn.compact
        def __call__(self, x, force=True):
            w = self.param("w", nn.initializers.lecun_normal(), (16, 16))
            energy = lambda x: jnp.tanh(x @ w).sum()
            return jax.grad(energy)(x) if force else x @ w

    linen.door(Energy, weight="w")
    model, x, said = (
        Named(functools.partial(Energy)),
        normal(1, 8, 16),
        "layer: .*is part of a derivative that the func",
    )
    assert "is part of a derivative" in linen.plan(Energy(), recipe("ste(2,4)"), x).refused[0][1]
    DOORS[Energy] = ("w",)
    with pytest.raises(ValueError, match=said):
        init(model, x, recipe("ste(2,4)"))
    init(model, x, recipe("dense"))
    with linen.sparsify(recipe("ste(2,4)")):
        variables = Energy().init(jax.random.key(2), x, force=False)
    with linen.sparsify(recipe("ste(2,4)")), pytest.raises(ValueError, match="the model: .*is part of a derivative"):
        Energy().apply(variables, x)


def test_a_declaration_of_something_else_is_refused():
    with pytest.raises(TypeError, match="takes a class of flax.linen, got .*int"):
        linen.door(int, weight="w")
    for text in ("Einsum", "a.b:", ":Einsum", "a:b:c"):
        with pytest.raises(ValueError, match="'package.module:Class', got"):
            linen.door(text, weight="w")
    linen.door(Einsum, weight="w")
    linen.door(Einsum, weight="w")


def test_two_doors_for_one_parameter_are_refused():
    class Around(nn.Module):
        @nn.compact
        def __call__(self, x):
            inner = nn.Dense(8)
            nn.share_scope(self, inner)
            return inner(x)

    linen.door(Around, weight="kernel")
    with pytest.raises(
        ValueError,
        match=r"two doors reach the parameter kernel of shape .*Dense, weight='kernel'.*Around, weight='kernel'",
    ):
        init(Around(), normal(1, 8, 16), recipe("ste(2,4)"))


def test_other_axes_than_in_init_are_refused():
    linen.door(Einsum, weight="w")
    model, x = Einsum((16, 16)), normal(1, 8, 16)
    with linen.sparsify(recipe("ste(2,4)")):
        variables = model.init(jax.random.key(0), "bi,io->bo", x)
        with pytest.raises(ValueError, match=r"multiplies by w of shape \(16, 16\) along other axes"):
            model.apply(variables, "bi,oi->bo", x)


def test_nested_contexts_are_refused():
    with pytest.raises(TypeError, match="sparsify takes a Recipe, .* got 's_ste"), linen.sparsify("s_ste(2,4)"):
        pass
    with pytest.raises(TypeError, match="seed=0, got Array"), linen.sparsify(recipe("dense"), seed=jax.random.key(0)):
        pass
    with linen.sparsify(recipe("ste(2,4)")):
        with pytest.raises(ValueError, match="inside another sparsify"), linen.sparsify(recipe("ste(2,4)")):
            pass
        with pytest.raises(ValueError, match="plan is called inside sparsify"):
            linen.plan(nn.Dense(8), jnp.ones((4, 8)))
    with pytest.raises(ValueError, match=r"(?s)These rules of the recipe apply to no layer:.*'mlp'.*layer"):
        init(Named(functools.partial(nn.Dense, 8)), normal(1, 8, 16), nm.Recipe({"mlp": "ste(2,4)"}))
    variables = init(nn.Dense(8), normal(1, 8, 16), recipe("ste(2,4)"))  # the error has left nothing behind
    with (
        linen.sparsify(recipe("ste(1,4)"), seed=SEED),
        pytest.raises(ValueError, match="was made for fwd_rhs=.*mse.2,4"),
    ):
        nn.Dense(8).apply(variables, normal(1, 8, 16))
    noisy = recipe("mvue(2,4)")
    with linen.sparsify(noisy), pytest.raises(ValueError, match="reads the collection 'nm', which is missing"):
        nn.Dense(8).apply({"params": variables["params"]}, normal(1, 8, 16))
    with pytest.raises(ValueError, match=r"layer: fwd_rhs=.*\(18, 8\)"):
        init(Named(functools.partial(nn.Dense, 8)), normal(1, 8, 18), recipe("s_ste(2,4)"))


# ---- what no door reaches ----


class Mixed(nn.Module):
    @nn.compact
    def __call__(self, i):
        x = nn.Embed(10, 16, name="embed")(i)
        for n in range(2):
            x = Einsum((16, 16), name=f"block_{n}")("bi,io->bo", x)
        attention = nn.MultiHeadDotProductAttention(4, name="attention")  # its biases have two axes
        return Stack(name="stack")(attention(x[None])[0])


WARNING = """Rules of the recipe match these parameters, but no door reaches them, so they stay dense:
  embed/embedding (10, 16), of Embed
  block_0-1/w (16, 16), of Einsum
If a layer multiplies by such a parameter, declare its door: nm.linen.door(Embed, weight="embedding"). A parameter \
that is used elsewhere too, as the table of a tied head is, stays dense.
If they are to stay dense, write rules that come before the others: \
(r"embed/embedding", "dense"), (r"block_\\d+/w", "dense")."""


def test_parameters_that_no_door_reaches_are_told_once():
    i, by_rule = jnp.arange(8), recipe("ste(2,4)")
    with linen.sparsify(by_rule), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        variables = Mixed().init(jax.random.key(0), i)
        Mixed().apply(variables, i)
    assert [str(w.message) for w in told] == [WARNING]
    assert told[0].filename == __file__
    with pytest.raises(ValueError, match="but no door reaches them") as refused:
        init(Mixed(), i, by_rule)
    assert str(refused.value) == WARNING
    init(Mixed(), i, nm.Recipe({r"embed/embedding": "dense", r"block_\d+/w": "dense", r".*": "ste(2,4)"}))
    init(Mixed(), i, nm.Recipe({r"embed|block_\d+": "dense", r".*": "ste(2,4)"}))
    init(Mixed(), i, nm.Recipe({r"stack/.*": "ste(2,4)"}))
    with pytest.raises(ValueError, match=r"stay dense:\n  block_0-1/w \(16, 16\), of Einsum\nIf"):
        init(Mixed(), i, nm.Recipe({r"block_.*|stack/.*": "ste(2,4)"}))
    linen.door(Einsum, weight="w")
    init(Mixed(), i, nm.Recipe({r"embed": "dense", r".*": "ste(2,4)"}))


def test_dir_lists_the_public_names():
    assert dir(nm.linen) == sorted(nm.linen.__all__, key=lambda name: (name[0].islower(), name))
    assert all(callable(getattr(nm.linen, name)) for name in dir(nm.linen))
    assert {"sparsify", "door", "plan", "violations"} <= set(dir(nm.linen))


class Counting(nn.Module):
    @nn.compact
    def __call__(self, x):
        count = self.variable("stats", "count", lambda: jnp.zeros(()))
        count.value = count.value + 1
        return x @ self.param("w", nn.initializers.normal(), (16, 8))


def test_a_layer_that_writes_a_variable_in_init():
    x = jnp.ones((4, 16))
    dense = Counting().init(jax.random.key(0), x)
    linen.door(Counting, weight="w")
    with linen.sparsify(recipe("ste(2,4)")):
        variables = Counting().init(jax.random.key(0), x)
        chex.assert_trees_all_equal(variables["stats"], dense["stats"])
        _, written = Counting().apply(variables, x, mutable="stats")
    assert float(written["stats"]["count"]) == float(dense["stats"]["count"]) + 1


def test_a_step_of_a_part_of_the_parameters_is_refused():
    model = nn.Sequential([nn.Dense(8), nn.Dense(8)])
    with linen.sparsify(recipe("drhs_g=mvue(2,4)")):
        variables = model.init(jax.random.key(0), jnp.ones((4, 8)))
    part = {"params": {"layers_0": variables["params"]["layers_0"]}, "nm": variables["nm"]}
    with pytest.raises(ValueError, match="layers_1/kernel is missing from 'params'. Pass the parameters of the whole"):
        linen.set_step(part, 3)


def test_a_call_in_another_dtype_than_that_of_init():
    """Only the dtype of the product differs, and no axis. `dot_cls` takes such calls too."""
    layer, x = nn.Dense(8, param_dtype=jnp.bfloat16), jnp.ones((4, 16))
    with linen.sparsify(recipe("ste(2,4)")):
        with jax.numpy_dtype_promotion("standard"):
            variables = layer.init(jax.random.key(0), x)
        y = layer.apply(variables, x.astype(jnp.bfloat16))
    kernel = nm.prune(nm.mse(2, 4), variables["params"]["kernel"], axis=0)
    chex.assert_trees_all_equal(y, layer.apply({"params": variables["params"] | {"kernel": kernel}}, x.astype(y.dtype)))


@pytest.mark.parametrize("delivered", ["sparsify", "dot_cls"])
def test_a_layer_that_multiplies_by_a_changed_weight_is_refused(delivered):
    """set_step and harden read the stored weight, and nn.map_variables gives the layer another one."""
    own = {"dot_general_cls": nm.linen.dot_cls(recipe("ste(2,4)"))} if delivered == "dot_cls" else {}
    within = nm.linen.sparsify(recipe("ste(2,4)")) if delivered == "sparsify" else contextlib.nullcontext()

    class Stored(nn.Module):
        @nn.compact
        def __call__(self, x):
            turn = lambda params: jax.tree.map(lambda w: w.T, params)
            return nn.map_variables(nn.Dense, "params", turn, turn, init=True)(8, use_bias=False, name="up", **own)(x)

    with (
        within,
        pytest.raises(
            ValueError, match=r"^up: nn.map_variables, or a norm of weights, is around it.*\(r\"up\", \"dense\"\)"
        ),
    ):
        Stored().init(jax.random.key(0), jnp.ones((2, 8)))
