"""Registered classes of flax.linen, and what `sparsify` refuses and tells."""

import functools
import re
import warnings
from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import nmjax as nm
from nmjax import linen
from nmjax.linen.registry import REGISTERED
from tests.delivery_test import EVERY, SEED, normal
from tests.linen.delivery_test import DENSE, PATH, Block, Einsum, Pruned, Stack, einsum_registered, named, stack

pytestmark = pytest.mark.sampled
fixture = einsum_registered  # in every test

STE = "ste(2,4)"
X = normal(1, 8, 16)


class Layer(nn.Module):
    """A layer that computes a function of x and its weight, and counts its calls."""

    f: Callable
    shape: tuple = (16, 16)

    @nn.compact
    def __call__(self, x, **options):
        count = self.variable("stats", "count", lambda: jnp.zeros(()))
        if self.is_mutable_collection("stats"):
            count.value += 1
        return self.f(x, self.param("w", nn.initializers.lecun_normal(), self.shape), **options)


@pytest.fixture(autouse=True)
def layer_registered(einsum_registered):
    linen.register_layer(Layer, weight="w")


# ---- classes that one cannot edit ----


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


@pytest.mark.slow
def test_a_class_that_one_cannot_edit_trains_by_one_line():
    del REGISTERED[Einsum]
    linen.register_layer(f"{Einsum.__module__}:Einsum", weight="{weight_name}")
    x = normal(1, 2, 8, 16)
    model = Pruned(Gemma(), nm.Recipe({r"mlp/.*": EVERY, r"query|out": "s_ste(2,4)"}))
    variables, target = model.init(x), jnp.roll(x, 1, -1)
    assert linen.paths(variables) == ("mlp/gating_einsum", "mlp/linear", "out", "query")
    assert {path: str(pattern) for path, pattern in linen.patterns(variables).items()} == {
        "mlp/gating_einsum": "2:4 along axis 2",
        "mlp/linear": "2:4 along axis 0",
        "out/w": "2:4 along axes 0, 1",
        "query/w": "2:4 along axis 1",
    }

    @jax.jit
    @chex.assert_max_traces(1)
    def train(variables, step):
        variables = linen.set_step(variables, step)
        loss = lambda p: jnp.square(model.apply({**variables, "params": p}, x) - target).mean()
        value, grads = jax.value_and_grad(loss)(variables["params"])
        return {**variables, "params": jax.tree.map(lambda p, g: p - 0.5 * g, variables["params"], grads)}, value

    losses = []
    for step in range(5):
        variables, value = train(variables, step)
        losses.append(float(value))
    assert losses == sorted(losses, reverse=True)
    hard, patterns = linen.harden(variables), linen.patterns(variables)
    assert [int(n) for n in linen.violations(hard).values()] == [0] * 4
    assert not any(map(int, nm.metrics.violations(hard["params"], patterns).values()))
    assert patterns == linen.patterns(hard)


class Experts(nn.Module):
    """Two weights and a scale, made in setup, and a layer of Flax inside."""

    def setup(self):
        draw = nn.initializers.lecun_normal()
        self.up, self.down = self.param("up", draw, (16, 32)), self.param("down", draw, (32, 16))
        self.scale, self.inner, self.drop = self.param("scale", draw, (4, 4)), nn.Dense(16), nn.Dropout(0.5)

    def __call__(self, x, train=False):
        h = self.helper(x) + self.scale.sum()
        return self.inner(self.drop(h @ self.down, deterministic=not train))

    def helper(self, x):
        return nn.relu(x @ self.up)


class Doubled(nn.Module):
    """A layer that is called twice, with other random numbers, and whose other method takes one of its weights."""

    @nn.compact
    def __call__(self, x, **options):
        layer = Experts(name="of")
        return layer(layer(x, **options), **options) + layer.helper(x).sum()


@pytest.mark.slow
def test_a_layer_may_have_several_weights_and_layers_and_random_numbers():
    linen.register_layer(Experts, weight=("up", "down"))
    rules = nm.Recipe({r"of/up": STE, r"of/down": "ste(1,4)", "of/inner": "s_ste(2,4)", "of/scale": "dense"})
    model = Pruned(Doubled(), rules)
    variables = model.init(X)
    assert linen.paths(variables) == ("of/down", "of/inner", "of/up")
    options = {"train": True, "rngs": {"dropout": jax.random.key(4)}, "capture_intermediates": True}
    plain = {"params": linen.harden(variables)["params"]}
    chex.assert_trees_all_equal(model.apply(variables, X, **options), model.model.apply(plain, X, **options))
    found = {path: (p.n, p.m) for path, p in linen.patterns(variables).items()}
    assert found == {"of/down": (1, 4), "of/up": (2, 4), "of/inner/kernel": (2, 4)}


@pytest.mark.slow
def test_a_layer_that_writes_a_variable_writes_it_once():
    model = Pruned(Layer(jnp.matmul), STE)
    variables, dense = model.init(X), model.model.init(jax.random.key(0), X)
    _, written = model.apply(variables, X, mutable=["stats"])
    assert float(variables["stats"]["count"]) == float(dense["stats"]["count"]) == 1
    assert float(written["stats"]["count"]) == 2


@pytest.mark.slow
def test_a_reshaped_weight_is_pruned_and_has_no_axes():
    model, p = Pruned(Layer(lambda x, w: x @ w.reshape(24, 10), (4, 6, 10)), "y_w=ste(mse(2,8))"), nm.mse(2, 8)
    variables = model.init(normal(1, 5, 24))
    with pytest.raises(ValueError, match=r"reshapes its weight of shape \(4, 6, 10\)"):
        linen.patterns(variables)
    hard, w = linen.harden(variables), variables["params"]["w"].reshape(24, 10)
    np.testing.assert_array_equal(hard["params"]["w"].reshape(24, 10), p(w, 0))
    assert int(linen.violations(hard)["w"]) == 0
    np.testing.assert_array_equal(linen.masks(variables)["w"].reshape(24, 10), p.mask(w, 0))


# ---- what is refused ----


class Around(nn.Module):
    @nn.compact
    def __call__(self, x):
        inner = nn.Dense(8)
        nn.share_scope(self, inner)
        return inner(x)


class Transposed(nn.Module):
    """set_step and harden read the stored weight, and nn.map_variables gives the layer another one."""

    @nn.compact
    def __call__(self, x):
        turn = lambda params: jax.tree.map(lambda w: w.T, params)
        return nn.map_variables(nn.Dense, "params", turn, turn, init=True)(16, use_bias=False, name="up")(x)


class Shared(nn.Module):
    """Blocks with one variable, and with weights of their own: they would draw the same noise."""

    @nn.compact
    def __call__(self, x):
        options = {"variable_axes": {"params": 0}, "variable_broadcast": "nm", "split_rngs": {"params": True}}
        return nn.scan(Block, length=3, **options)(name="blocks")(x)[0]


rows = lambda i, w: w[i]
odd = lambda x, w: (x @ jnp.tanh(w), x @ w.T)
energy = lambda x, w, force=True: jax.grad(lambda x: jnp.tanh(x @ w).sum())(x) if force else x @ w


def shapes(model, rules=STE, x=X, registered=None, **options):
    """Return the shapes of variables. Errors need no arrays."""
    if registered is not None:
        REGISTERED[registered[0]] = registered[1:]
    return jax.eval_shape(functools.partial(Pruned(model, rules).init, **options), x)


def apply(model, variables, rules=STE, x=X, seed=SEED, **options):
    return jax.eval_shape(lambda v: Pruned(model, rules, seed).apply(v, x, **options), variables)


def without(collection, variables):
    return {name: v for name, v in variables.items() if name != collection}


def enter(*args, within=None, **options):
    with linen.sparsify(within) if within else warnings.catch_warnings(), linen.sparsify(*args, **options):
        pass


def plan_inside():
    with linen.sparsify(nm.Recipe({})):
        linen.plan(nn.Dense(8), X)


def two_models():
    with Pruned(None, nm.Recipe({"layer": STE})).within():
        for model in (LAYER, nn.Dense(8)):
            model.init(jax.random.key(0), X)


def other_axes():
    with Pruned(None, STE).within():
        variables = Einsum((16, 16)).init(jax.random.key(0), "bi,io->bo", X)
        Einsum((16, 16)).apply(variables, "bi,oi->bo", X)


def gradient_of_six_tokens():
    model, variables = stack("mvue(2,4)", lifted=True)
    model.apply(variables, jnp.ones((6, 16)))  # which nobody differentiates
    jax.grad(lambda p: model.apply({**variables, "params": p}, jnp.ones((6, 16))).sum())(variables["params"])


def a_part():
    variables = shapes(nn.Sequential([nn.Dense(16), nn.Dense(16)]), "mvue(2,4)")
    linen.set_step({**variables, "params": {"layers_0": variables["params"]["layers_0"]}}, 3)


LAYER, SSTE, NOISE = DENSE, "s_ste(2,4)", "mvue(2,4)"
in_steps = lambda variables: jax.eval_shape(functools.partial(linen.set_step, step=0), variables)
hardened = lambda variables: jax.eval_shape(linen.harden, variables)
apart = lambda: shapes(Stack(1, 0))
one_of = lambda variables: variables | {"params": jax.tree.map(lambda v: v.update(shape=(16, 16)), variables["params"])}
APART = rf"{PATH}: its weight has shape \(16, 3, 16\), but 'nm' is for \(16, 16\) stacked along \(0,\)"
REFUSED = {
    # the registration
    "no such parameter": (lambda: shapes(named(Layer, odd), registered=(Layer, "v")),
        r"layer: nm.linen.register_layer\(Layer, weight='v'\) names .* Layer has w \(16, 16\)"),
    "no such attribute": (lambda: shapes(named(Layer, odd), registered=(Layer, "{width}")),
        r"layer: .*weight='{width}'\) names 'width', and Layer has no such attribute"),
    "other weights": (lambda: linen.register_layer(Layer, weight="v"),
        r"nm.linen.register_layer\(Layer, weight='v'\): the class is registered already, for w"),
    "two layers": (lambda: shapes(Around(), registered=(Around, "kernel")),
        r"two registered layers have the parameter kernel of shape .*Dense, weight='kernel'.*Around, weight='kernel'"),
    "no class of linen": (lambda: linen.register_layer(int, weight="w"),
        "TypeError: .*takes a class of flax.linen, got .*int"),
    **{f"no name {text}": (lambda text=text: linen.register_layer(text, weight="w"), "'package.module:Class', got")
       for text in ("Einsum", "a.b:", ":Einsum", "a:b:c")},
    # the product
    "different axes": (lambda: shapes(named(Layer, lambda x, w: x @ w @ w.T)),
        r"layer: .*Layer multiplies by w of shape \(16, 16\) along different axes"),
    "other axes than in init": (other_axes, r"multiplies by w of shape \(16, 16\) along other axes"),
    "an operation too": (lambda: hardened(shapes(named(Layer, odd))),
        r"layer: .*prunes a weight of shape \(16, 16\) .* it also goes into tanh"),
    "no product": (lambda: shapes(named(Layer, rows), x=jnp.arange(4)),
        r"layer: nm.linen.register_layer.*Layer, weight='w'.* multiplies no input by w of shape \(16, 16\)"),
    "a derivative": (lambda: shapes(named(Layer, energy)), "layer: .*is part of a derivative that the func"),
    "a derivative later": (lambda: apply(Layer(energy), shapes(Layer(energy), force=False)),
        "the model: .*is part of a derivative"),
    "another weight": (lambda: shapes(Transposed()),
        r"^ValueError: up: nn.map_variables, or a norm of weights, is around it.*\(r\"up\", \"dense\"\)"),
    "groups": (lambda: shapes(LAYER, SSTE, jnp.ones((8, 18))), r"layer: y_w=.*\(18, 8\)"),
    "groups of tokens": (gradient_of_six_tokens, rf"{PATH}: dw_g=.*\(6, 16\)"),
    "drawn forward": (lambda: hardened(shapes(LAYER, "y_w=ste(mvue(2,4))")),
        r"layer: mvue\(2,4\) draws new values .* no final form"),
    # the context
    "no recipe": (lambda: enter(SSTE), "TypeError: sparsify takes a Recipe, .* got 's_ste"),
    "a key": (lambda: enter(nm.Recipe({}), seed=jax.random.key(0)), "TypeError: .*seed=0, got Array"),
    "nested": (lambda: enter(nm.Recipe({}), within=nm.Recipe({".*": STE})), "inside another sparsify"),
    "plan inside": (plan_inside, "plan is called inside sparsify"),
    "an idle rule": (lambda: shapes(LAYER, nm.Recipe({"mlp": STE})),
        r"(?s)These rules of the recipe apply to no layer:.*'mlp'.*layer"),
    "a rule of another model": (two_models, "These rules of the recipe apply to no layer"),
    # the collection
    **{f"missing{n}": (lambda o=options: apply(LAYER, without("nm", shapes(LAYER, SSTE)), SSTE, **o),
        r"layer: y_w=ste\(soft\(2,4\)\); .* reads the collection 'nm', which is missing.*'nm': variables\['nm'\]")
       for n, options in enumerate(({}, {"mutable": True}))},
    "not made": (lambda: shapes(LAYER, SSTE, mutable=("params",)), "layer: init cannot make its variable"),
    "no params": (lambda: linen.set_step(without("params", shapes(LAYER)), 0), r"in one dict, got \['nm'\]"),
    "no nm": (lambda: linen.harden(without("nm", shapes(LAYER))), r"in one dict, got \['params'\]"),
    "a part": (a_part, "layers_1/kernel is missing from 'params'. Pass the parameters of the whole"),
    **{f"another {name}": (lambda o=options: apply(LAYER, shapes(LAYER, SSTE), **{"rules": SSTE} | o),
        rf"layer: its .* with seed {SEED}, and the model has .* seed {options.get('seed', SEED)}.*reset_state")
       for name, options in (("method", {"rules": STE}), ("dense", {"rules": "dense"}), ("seed", {"seed": 1}))},
    "a stack without nm": (lambda: shapes(Stack(nm_axis=None), NOISE),
        rf"{PATH}: init cannot make its variable .* variable_axes={{'params': 0, 'nm': 0}}"),
    "a call without nm": (lambda: apply(Stack(nm_axis=None), shapes(Stack(), NOISE), NOISE),
        f"{PATH}: .* reads the collection 'nm'"),
    "another axis": (lambda: apply(Stack(0, 1), shapes(Stack(), NOISE), NOISE),
        rf"{PATH}: 'nm' is stacked along \(0,\), but the call slices it along 1"),
    "axes apart": (lambda: in_steps(apart()), APART),
    "axes apart in harden": (lambda: hardened(apart()), APART),
    **{f"one variable {n}": (lambda text=text: in_steps(shapes(Shared(), text)),
        rf"{PATH}: its weight has shape \(3, 16, 16\), but 'nm' is for \(16, 16\) stacked along no axis")
       for n, text in enumerate((NOISE, "mdgf(2,4,linear(1,0,9))"))},
    "one layer for a stack": (lambda: in_steps(one_of(shapes(Stack(2, 2)))),
        rf"{PATH}: its weight has shape \(16, 16\), but 'nm' is for \(16, 16\) stacked along \(2,\)"),
    "a stack for one": (lambda: apply(Shared(), shapes(Stack(), NOISE), NOISE),
        f"{PATH}: one layer got the variables of a whole stack"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_right_is_refused(case):
    call, said = REFUSED[case]
    with pytest.raises((TypeError, ValueError)) as refused:
        call()
    message = f"{type(refused.value).__name__}: {refused.value}"
    assert re.search(said, message), message


@pytest.mark.slow
def test_dense_layers_and_what_needs_no_variable_are_not_refused():
    shapes(Layer(rows), "dense", jnp.arange(4))
    shapes(Layer(energy), "dense")
    shapes(Transposed(), "dense")
    assert "is part of a derivative" in linen.plan(Layer(energy), nm.Recipe({".*": STE}), X).refused[0][1]
    linen.register_layer(Layer, weight="w")  # twice the same
    model = Pruned(LAYER, STE)
    variables = model.init(X)
    np.testing.assert_array_equal(model.apply(without("nm", variables), X), model.apply(variables, X))


# ---- what no registered layer has ----


class Mixed(nn.Module):
    @nn.compact
    def __call__(self, i):
        x = nn.Embed(10, 16, name="embed")(i)
        for n in range(2):
            x = Einsum((16, 16), name=f"block_{n}")("bi,io->bo", x)
        attention = nn.MultiHeadDotProductAttention(4, name="attention")  # its biases have two axes
        return Stack(name="stack")(attention(x[None])[0])


WARNING = """Rules of the recipe match these parameters, but no registered layer has them, so they stay dense:
  embed/embedding (10, 16), of Embed
  block_0-1/w (16, 16), of Einsum
If a layer multiplies by such a parameter, register it: nm.linen.register_layer(Embed, weight="embedding"). A \
parameter that is used elsewhere too, as the table of a tied head is, stays dense.
If they are to stay dense, write rules that come before the others: \
(r"embed/embedding", "dense"), (r"block_\\d+/w", "dense")."""


@pytest.mark.slow
def test_parameters_outside_registered_layers_are_told_once():
    del REGISTERED[Einsum]
    i, init = jnp.arange(8), lambda rules: shapes(Mixed(), nm.Recipe(rules), i)
    with linen.sparsify(nm.Recipe({".*": STE})), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        variables = Mixed().init(jax.random.key(0), i)
        Mixed().apply(variables, i)
    assert [str(w.message) for w in told] == [WARNING]
    assert told[0].filename == __file__
    with pytest.raises(ValueError, match="^" + re.escape(WARNING)):
        init({".*": STE})
    init({r"embed/embedding": "dense", r"block_\d+/w": "dense", r".*": STE})
    init({r"embed|block_\d+": "dense", r".*": STE})
    init({r"stack/.*": STE})
    with pytest.raises(ValueError, match=r"stay dense:\n  block_0-1/w \(16, 16\), of Einsum\nIf"):
        init({r"block_.*|stack/.*": STE})
    linen.register_layer(Einsum, weight="w")
    init({r"embed": "dense", r".*": STE})


COMPILED_DENSE = nn.jit(nn.Dense)


@nn.jit
def compiled(model, x):
    return x @ model.param("matrix", nn.initializers.lecun_normal(), (16, 16))


class Compiled(nn.Module):
    @nn.compact
    def __call__(self, x):
        return compiled(self, self.method(COMPILED_DENSE(16, name="layer")(x)))

    @nn.jit
    def method(self, x):
        return Einsum((16, 16), name="inner")("bi,io->bo", nn.Dense(16, name="outer")(x))


def test_programs_that_are_compiled_already_are_told_of_again_and_not_compiled_again():
    def init(rules):
        compiled_programs.clear()
        with linen.sparsify(nm.Recipe(rules)), warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            Compiled().init(jax.random.key(0), X)
        return [str(w.message) for w in told], len(compiled_programs)

    compiled_programs = []
    note = lambda name, *_, **options: compiled_programs.append(name) if "backend_compile" in name else None
    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        for rules in ({"outer": STE}, {r".*": STE}, {"layer": "dense", r"inner|outer|matrix": "dw_g=mvue(2,4)"}):
            told, count = init(rules)
            assert count > 0
            assert init(rules) == (told, 0)
            assert len(told) == (0 if "outer" in rules else 1)
            assert all(line.startswith("  matrix (16, 16)") for line in "".join(told).splitlines()[1:2])
    finally:
        jax.monitoring.unregister_event_duration_listener(note)


def test_dir_lists_the_public_names():
    assert dir(nm.linen) == sorted(nm.linen.__all__, key=lambda name: (name[0].islower(), name))
    assert all(callable(getattr(nm.linen, name)) for name in dir(nm.linen))
