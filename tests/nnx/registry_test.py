"""Registered layers of other classes, against Flax's own layers with the same numbers."""

import copy
import itertools
import pickle
import re
import warnings
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn, nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import nmjax as nm
from nmjax.nnx import registry
from nmjax.programs import states
from tests.delivery_test import whole
from tests.nnx.delivery_test import exact, recipe


class ByEinsum(nnx.Module):
    """A layer with an equation, as Tunix has it."""

    def __init__(self, spec, shape, *, rngs, dtype=jnp.float32):
        self.spec, self.shape, self.dtype = spec, shape, dtype
        self.w = nnx.Param(nnx.initializers.normal()(rngs.params(), shape))

    def __call__(self, x):
        return jnp.einsum(self.spec, x.astype(self.dtype), self.w[...].astype(self.dtype))


class ByMatmul(nnx.Module):
    """A layer with a bias, by the operator of Python."""

    def __init__(self, inward, outward, *, rngs):
        self.w = nnx.Param(nnx.initializers.normal()(rngs.params(), (inward, outward)))
        self.b = nnx.Param(jnp.zeros(outward))

    def __call__(self, x):
        return x @ self.w + jnp.broadcast_to(self.b[...], (*x.shape[:-1], *self.b.shape))


class Transposed(nnx.Module):
    """A layer that keeps its weight as PyTorch does: the outputs first."""

    def __init__(self, inward, outward, *, rngs):
        self.w = nnx.Param(nnx.initializers.normal()(rngs.params(), (outward, inward)))

    @jax.named_scope("transposed")
    def __call__(self, x, scale=None):
        y = jax.jit(lambda x, w: lax.dot_general(x, w.T, (((x.ndim - 1,), (0,)), ((), ()))))(x, self.w[...])
        return y if scale is None else y * scale


class Gated(nnx.Module):
    """A feed-forward layer that holds three weights itself."""

    def __init__(self, width, *, rngs):
        draw = lambda *shape: nnx.Param(nnx.initializers.normal()(rngs.params(), shape))
        self.gate, self.up, self.down = draw(width, 2 * width), draw(width, 2 * width), draw(2 * width, width)

    def __call__(self, x):
        return (jax.nn.relu(x @ self.gate) * (x @ self.up)) @ self.down


class OfCall(nnx.Module):
    """A layer whose caller says which product it is."""

    def __init__(self, shape, *, rngs):
        self.w = nnx.Param(nnx.initializers.normal()(rngs.params(), shape))

    def __call__(self, spec, x):
        return jnp.einsum(spec, x, self.w[...])


nm.nnx.register_layer(ByEinsum, weight="w", input=lambda layer: (-1, *layer.shape[: layer.w.ndim - 1]))
nm.nnx.register_layer(ByMatmul, weight="w", input=lambda layer: (1, -1, layer.w.shape[0]))
nm.nnx.register_layer("tests.nnx.registry_test:Transposed", weight="w", input=lambda layer: (-1, layer.w.shape[-1]))
nm.nnx.register_layer(Gated, weight=("gate", "up", "down"), input=lambda layer: (-1, layer.down.shape[-1]))
nm.nnx.register_layer(OfCall, weight="w")


def test_the_class_comes_back():
    """A sparse layer is of a subclass, and a hardened or dense one of its own class."""
    layer = Transposed(16, 8, rngs=nnx.Rngs(0))
    nm.nnx.sparsify(layer, recipe("ste(2,4)"))
    assert isinstance(layer, Transposed)
    assert type(layer) is not Transposed
    assert isinstance(layer.nm_state, nm.nnx.SparsityState)
    hard = nm.nnx.harden(layer)
    assert type(hard) is Transposed
    assert "nm_state" not in vars(hard)
    fresh, x = Transposed(16, 8, rngs=nnx.Rngs(1)), whole(1, 8, 16)
    nnx.update(fresh, nnx.state(hard, nnx.Param))
    np.testing.assert_array_equal(fresh(x), hard(x))
    wanted = layer(x)
    np.testing.assert_allclose(hard(x), wanted, rtol=0, atol=1e-6 * float(jnp.abs(wanted).max()))
    nm.nnx.sparsify(layer, nm.Recipe(()))
    assert type(layer) is Transposed


def test_other_arguments_reach_the_layer():
    layer, x = Transposed(16, 8, rngs=nnx.Rngs(0)), whole(1, 8, 16)
    nm.nnx.sparsify(layer, recipe("ste(2,4)"))
    np.testing.assert_array_equal(layer(x, scale=jnp.float32(2.0)), 2 * layer(x))
    np.testing.assert_array_equal(layer(x, 2.0), 2 * layer(x))


def test_a_layer_computes_and_hardens_in_its_own_dtype():
    """Values that differ in float32 alone are ties in bfloat16, and the first of equal values stays."""
    layer = ByEinsum("ti,io->to", (4, 1), rngs=nnx.Rngs(0), dtype=jnp.bfloat16)
    layer.w[...] = jnp.array([[1.0], [1.001], [1.002], [0.5]])
    hard = nm.nnx.harden(nm.nnx.sparsify(layer, recipe("ste(2,4)")))
    np.testing.assert_array_equal(hard.w[...][:, 0], np.float32([1.0, 1.0, 0.0, 0.0]))


@pytest.mark.slow
def test_a_layer_of_several_weights():
    """Each weight is a layer of its own for rules, state and noise."""
    model, x = exact(Gated(8, rngs=nnx.Rngs(0))), whole(1, 16, 8)
    rules = nm.Recipe({"down": "s_ste(2,4)", "gate": "mvue(2,4)"})
    nm.nnx.sparsify(model, rules)
    assert list(nm.nnx.patterns(model).items())[0][0] == "down"
    assert [path for path, pattern in nm.nnx.patterns(model).items() if pattern] == ["down"]
    assert set(nm.nnx.scales(model)) == {"down"}
    w = {name: getattr(model, name)[...] for name in ("gate", "up", "down")}
    gate_state, down_state = (vars(model)[f"nm_state_{name}"] for name in ("gate", "down"))

    def by_hand(w, x):
        gate = nm.einsum("ti,io->to", x, w["gate"], sparsity=gate_state.sparsity, ctx=gate_state.ctx())
        return nm.einsum(
            "ti,io->to", jax.nn.relu(gate) * (x @ w["up"]), w["down"], sparsity=down_state.sparsity,
            ctx=down_state.ctx(),
        )  # fmt: skip

    np.testing.assert_array_equal(model(x), by_hand(w, x))
    got = nnx.grad(lambda m: (m(x) ** 2).sum())(model)
    want = jax.grad(lambda w: (by_hand(w, x) ** 2).sum())(w)
    for name in w:
        atol = 1e-5 * float(jnp.abs(want[name]).max())  # sums may be of another order
        np.testing.assert_allclose(got[name][...], want[name], rtol=0, atol=atol)
    hard = nm.nnx.harden(model)
    assert (str(hard.hardened_down), hard.hardened_gate) == ("2:4 along axis 0", None)
    assert type(hard) is Gated
    assert not any(name.startswith("nm_state") for name in vars(hard))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["s_ste(2,4)", "fst(every=3)", "mvue(2,4)"])
def test_a_stack_in_a_scan(method):
    """Each layer of a stack has noise and state of its own, as in a stack of Flax's layers."""

    class Cell(nnx.Module):
        def __init__(self, kind, rngs):
            self.layer = kind(16, 16, rngs=rngs)

        def __call__(self, x):
            return self.layer(x)

    results = []
    for kind, name in ((ByMatmul, "w"), (nnx.Linear, "kernel")):
        cells = nnx.vmap(partial(Cell, kind), in_axes=0, out_axes=0)(nnx.Rngs(0).split(3))
        getattr(cells.layer, name)[...] = jnp.sign(whole(0, 3, 16, 16))
        nm.nnx.sparsify(cells, recipe(method), seed=1)
        axes = nnx.StateAxes({nnx.Param: 0, nm.nnx.SparsityVariable: 0, ...: None})
        run = nnx.scan(lambda x, cell: cell(x), in_axes=(nnx.Carry, axes), out_axes=nnx.Carry)

        def loss(cells, x, run=run):
            return (run(x, cells) ** 2).sum()

        nm.nnx.set_step(cells, 2)
        value, gradients = nnx.value_and_grad(loss)(cells, whole(1, 8, 16))
        hard = nm.nnx.harden(cells)
        results.append((value, gradients["layer"][name][...], getattr(hard.layer, name)[...]))
        assert nm.nnx.plan(cells).layers[0].kernel == (3, 16, 16)
    for ours, flax in zip(*results, strict=True):
        np.testing.assert_array_equal(ours, flax)


class Caller(nnx.Module):
    """A model that tells its layer which product it is."""

    def __init__(self, layer):
        self.layer = layer

    def __call__(self, x, spec="bti,iho->btho"):
        return self.layer(spec, x) if isinstance(self.layer, OfCall) else self.layer(x, spec)


def einsum_of_flax():
    layer = nnx.Einsum("bti,iho->btho", (16, 2, 4), rngs=nnx.Rngs(0))
    layer.einsum_str = None
    return layer


@pytest.mark.slow
@pytest.mark.parametrize(
    "make", [lambda: OfCall((16, 2, 4), rngs=nnx.Rngs(0)), einsum_of_flax], ids=["declared", "flax"]
)
def test_a_product_that_only_the_call_knows(make):
    """Examples of inputs tell it, and it trains, hardens and resets its state after that."""
    model, x = Caller(make()), whole(1, 2, 4, 16)
    with pytest.raises(ValueError, match=r"pass examples of the model's inputs: sparsify\(model, recipe, x\)"):
        nm.nnx.sparsify(model, recipe("s_ste(2,4)"))
    assert nm.nnx.plan(model, recipe("s_ste(2,4)")).refused
    assert not nm.nnx.plan(model, recipe("s_ste(2,4)"), x).refused
    nm.nnx.sparsify(model, recipe("s_ste(2,4)"), x)
    known = nnx.Einsum("bti,iho->btho", (16, 2, 4), rngs=nnx.Rngs(0))
    kernel = model.layer.w if isinstance(model.layer, OfCall) else model.layer.kernel
    known.kernel[...] = kernel[...]
    nm.nnx.sparsify(known, recipe("s_ste(2,4)"))
    np.testing.assert_array_equal(model(x), known(x))
    kernel[...] = known.kernel[...] = whole(3, 16, 2, 4)
    for one in (model, known):
        nm.nnx.reset_state(one)
    np.testing.assert_array_equal(model(x), known(x))
    wanted = nm.nnx.patterns(nm.nnx.harden(known))["kernel"]
    assert list(nm.nnx.patterns(nm.nnx.harden(model)).values()) == [wanted]


@pytest.mark.slow
def test_a_stack_that_looks_like_one_layer():
    """x @ w takes a stack of weights, too. The error says so, and naming the axis mends it."""

    class Wide(nnx.Module):
        def __init__(self, rngs):
            self.features = 16
            self.w = nnx.Param(nnx.initializers.normal()(rngs.params(), (16, 8)))

        def __call__(self, x):
            return jnp.matmul(x, self.w[...])

    nm.nnx.register_layer(Wide, weight="w", input=lambda layer: (-1, layer.features))
    make = lambda: nnx.vmap(Wide, in_axes=0, out_axes=0)(nnx.Rngs(0).split(3))
    axes = nnx.StateAxes({nnx.Param: 0, nm.nnx.SparsityVariable: 0, ...: None})
    run = lambda model, x: nnx.vmap(lambda model, x: model(x), in_axes=(axes, None))(model, x)
    wrong, right, x = make(), make(), whole(0, 4, 16)
    nm.nnx.sparsify(wrong, recipe("ste(2,4)"))
    with pytest.raises(ValueError, match=r"name its axis: sparsify\(\.\.\., stack=0\)"):
        run(wrong, x)
    nm.nnx.sparsify(right, recipe("s_ste(2,4)"), stack=0)
    got = run(right, x)
    for i in range(3):
        one = Wide(nnx.Rngs(0))
        one.w[...] = right.w[...][i]
        wanted = nm.nnx.sparsify(one, recipe("s_ste(2,4)"))(x)
        np.testing.assert_allclose(got[i], wanted, rtol=0, atol=1e-6 * float(jnp.abs(wanted).max()))
    assert nm.nnx.scales(right)[""].shape == (3,)


def test_a_declared_layer_compiles_once_at_the_cost_of_flax():
    """The compiled step of a declared layer is that of Flax's layer."""
    texts, x = [], whole(1, 8, 16)
    for layer in (
        ByEinsum("ti,io->to", (16, 8), rngs=nnx.Rngs(0)),
        nnx.Linear(16, 8, use_bias=False, rngs=nnx.Rngs(0)),
    ):
        nm.nnx.sparsify(layer, recipe("s_ste(2,4)"))
        graph, state = nnx.split(layer)

        @jax.jit
        def step(state, x, graph=graph):
            return nnx.grad(lambda m: (m(x) ** 2).sum())(nnx.merge(graph, state))

        texts.append(step.lower(state, x).compile().cost_analysis())
        for now in range(3):
            nm.nnx.set_step(layer, now)
            step(nnx.split(layer)[1], x)
        assert step._cache_size() == 1
    assert texts[0]["flops"] == texts[1]["flops"]
    assert texts[0]["bytes accessed"] == texts[1]["bytes accessed"]


class Counted(nnx.Module):
    """A projection that counts its traces."""

    traces: list[tuple[int, ...]] = []

    def __init__(self, *, rngs):
        self.w = nnx.Param(jax.random.normal(rngs.params(), (16, 12)))

    def __call__(self, x):
        self.traces.append(x.shape)
        return x @ self.w[...]


@pytest.mark.parametrize("make", [partial(nnx.Linear, 16, 12), Counted])
def test_layers_that_are_alike_are_traced_and_compiled_once(make):
    nm.nnx.register_layer(Counted, weight="w", input=lambda layer: (-1, 16))
    model = nnx.List([make(rngs=nnx.Rngs(i)) for i in range(5)])
    Counted.traces.clear()
    states._states.clear_cache()
    states._final.clear_cache()
    nm.nnx.sparsify(model, recipe("s_ste(2,4)"))
    assert states._states._cache_size() == 1
    assert Counted.traces == ([(1, 16), (4, 16)] if make is Counted else [])
    nm.nnx.harden(model)
    assert states._final._cache_size() == 1


def test_an_abstract_model():
    make = lambda: nm.nnx.sparsify(ByMatmul(16, 8, rngs=nnx.Rngs(0)), recipe("s_ste(2,4)"))
    shapes = nnx.eval_shape(make)
    assert isinstance(shapes.w.get_value(), jax.ShapeDtypeStruct)
    dense = nnx.eval_shape(lambda: ByMatmul(16, 8, rngs=nnx.Rngs(0)))
    plan = nm.nnx.plan(dense, recipe("ste(2,4)"), jax.ShapeDtypeStruct((4, 16), jnp.float32))
    assert (plan.forward, plan.refused, plan.uncovered) == ((1024, 512.0), (), ())


# ---- what no registered layer has ----


class Mixed(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(16, 16, rngs=rngs)
        self.table = nnx.Embed(32, 16, rngs=rngs)
        self.blocks = nnx.List([Inner(rngs) for _ in range(3)])

    def __call__(self, x):
        return self.up(x)


class Inner(nnx.Module):
    """A module with a matrix of its own, which is not registered."""

    def __init__(self, rngs):
        self.matrix = nnx.Param(jnp.ones((16, 4)))
        self.token = nnx.Param(jnp.ones((1, 1, 16)))


SAID = """Rules of the recipe match these parameters, but no registered layer has them, so they stay dense:
  blocks/0-2/matrix (16, 4), of Inner
  table/embedding (32, 16), of Embed
If a layer multiplies by such a parameter, register it: nm.nnx.register_layer(Inner, weight="matrix"). A parameter \
that is used elsewhere too, as the table of a tied head is, stays dense.
If they are to stay dense, write rules that come before the others: \
(r"blocks/\\d+/matrix", "dense"), (r"table/embedding", "dense")."""


def test_what_no_registered_layer_has_is_said():
    model, x = Mixed(nnx.Rngs(0)), whole(0, 8, 16)
    with pytest.raises(ValueError) as error:
        nm.nnx.sparsify(model, recipe("ste(2,4)"), strict=True)
    assert str(error.value) == SAID
    assert model.up.dot_general is lax.dot_general
    plan = nm.nnx.plan(model, recipe("ste(2,4)"), x)
    assert plan.missed == ("blocks/0/matrix", "blocks/1/matrix", "blocks/2/matrix", "table/embedding")
    assert (
        "Parameters that a rule matches and no registered layer has, so they stay dense: blocks/0-2/matrix 16x4, "
        "table/embedding 32x16 288 parameters"
    ) in re.sub(r"[\d,]+ parameters", "288 parameters", " ".join(str(plan).split()))
    with pytest.warns(UserWarning, match="no registered layer has them") as caught:
        nm.nnx.sparsify(model, recipe("ste(2,4)"))
    assert [str(one.message) for one in caught] == [SAID]
    assert caught[0].filename == __file__


def test_dense_rules_silence_the_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rules = nm.Recipe({r"blocks/\d+/matrix": "dense", "table": "dense", ".*": "ste(2,4)"})
        model = nm.nnx.sparsify(Mixed(nnx.Rngs(0)), rules, strict=True)
        assert not nm.nnx.plan(model, rules).refused
        nm.nnx.sparsify(Mixed(nnx.Rngs(0)), recipe("ste(2,4)", "up"), strict=True)


# ---- errors ----

NUMBERS = itertools.count()


def fresh(call=ByMatmul.__call__, shape=(16, 8)):
    """Return a new class, which is not registered. So the classes of other tests are left alone."""

    def init(self):
        self.w, self.b = nnx.Param(jnp.ones(shape)), nnx.Param(jnp.zeros(8))

    members = {"__init__": init, "__call__": call, "__module__": f"fresh{next(NUMBERS)}"}
    return type("Fresh", (nnx.Module,), members)


def registered(*types, call=ByMatmul.__call__, shape=(16, 8)):
    """Register a new class, and make a layer of it sparse."""
    kind = fresh(call, shape)
    for one in types:
        nm.nnx.register_layer(kind, **{"weight": "w", "input": lambda layer: (1, 16)} | one)
    return nm.nnx.sparsify(kind(), recipe("ste(2,4)"))


def by_name():
    kind = fresh()
    name = f"{kind.__module__}:{kind.__qualname__}"
    nm.nnx.register_layer(name, weight="w", method="project")
    try:
        nm.nnx.sparsify(kind(), recipe("ste(2,4)"))
    finally:
        registry.REGISTERED.pop(name)


class Registered(nnx.Module):
    def __init_subclass__(cls, *, key, **options):
        super().__init_subclass__(**options)

    def __call__(self, x):
        return x


NAMED = "weight is an attribute's name, or a tuple of names, got"
REFUSED = {
    "no such parameter": (
        lambda: registered({"weight": "kernel"}),
        r"^the model: nm.nnx.register_layer\(Fresh, weight='kernel'\) names a parameter that the layer does not have. "
        r"It has w \(16, 8\), b \(8,\).$",
    ),
    "one weight twice": (
        lambda: registered({}, {"input": lambda layer: (2, 16)}, {"weight": ("b", "w"), "method": "__init__"}),
        r"^nm.nnx.register_layer\(Fresh, weight='w', method='__init__'\): this weight is registered already, with "
        r"method='__call__'. A weight has one method.$",
    ),
    "two single weights": (
        lambda: registered({}, {"weight": "b"}), r"rules could not tell the two weights apart.*weight=\(\"w\", \"b\"\)",
    ),
    "an input that does not fit": (
        lambda: registered({"input": lambda layer: (1, 12)}),
        r"\(the model\): nm.nnx.register_layer\(Fresh, weight='w'\): __call__ cannot take an input of shape \(1, 12\), "
        r"as registered, with w of shape \(16, 8\): ",
    ),
    "not multiplied": (
        lambda: registered({"weight": ("b", "w")}), r"the method multiplies no input by it.*(\n.*)*b of shape \(8,\)|"
        r"b of shape \(8,\).*(\n.*)*the method multiplies no input by it",
    ),
    "used otherwise": (
        lambda: registered({}, call=lambda self, x: x @ self.w + (self.w[...] ** 2).sum()),
        "the method uses it in other operations too",
    ),
    "two layouts": (
        lambda: registered({}, call=lambda self, x: x @ self.w + x @ self.w.T, shape=(16, 16)),
        "products take w of shape .16, 16. along different axes",
    ),
    "mixed axes": (
        lambda: registered({}, call=lambda self, x: x @ self.w.reshape(16, 8), shape=(4, 4, 8)),
        r"in another shape, \(16, 8\), which mixes axes of \(4, 4, 8\)",
    ),
    "a class of linen": (
        lambda: nm.nnx.register_layer(nn.Dense, weight="kernel"),
        "For classes of flax.linen use nm.linen.register_layer",
    ),
    "a class of Flax": (lambda: nm.nnx.register_layer(nnx.Linear, weight="kernel"), "this class is registered already"),
    "no such method": (lambda: registered({"method": "encode"}), "the class has no such method"),
    "no such method, by name": (by_name, r"method='project'\): the class has no such method"),
    "no class": (
        lambda: nm.nnx.register_layer("ByMatmul", weight="w"),
        "takes a class or a text 'package.module:Class', got 'ByMatmul'",
    ),
    "a class that refuses a subclass": (
        lambda: nm.nnx.register_layer(Registered, weight="w"),
        "Registered.: a sparse layer is of a subclass, and the class refuses one: .*key",
    ),
    "no weight": (lambda: registered({"weight": ()}), rf"{NAMED} \(\)"),
    "a number": (lambda: registered({"weight": 3}), f"{NAMED} 3"),
    "a shape": (lambda: registered({"input": (-1, 8)}), r"Write input=lambda layer: \(-1, 8\)"),
    **{
        f"no shape {number}": (
            lambda given=given: registered({"input": given}),
            r"the registered input does not return a shape, such as \(-1, 8\)",
        )
        for number, given in enumerate((lambda layer: None, lambda layer: layer.nothing, lambda layer: ("a",)))
    },
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_register_layer_refuses(case):
    call, said = REFUSED[case]
    with pytest.raises((TypeError, ValueError), match=said) as error:
        call()
    assert len(str(error.value).splitlines()) <= 4


def test_a_method_that_differentiates_its_own_product():
    """A step of a layer on its own weight has no product of another axis, but a pruner has no part in its gradient."""

    class Fast(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.ones((16, 8)))

        def __call__(self, x):
            return x @ jax.grad(lambda w: jnp.tanh(x @ w).sum())(self.w[...])

    said = "the model.*: a product with this parameter, of shape .16, 8., is part of a derivative"
    nm.nnx.register_layer(Fast, weight="w")
    model = nm.nnx.sparsify(Fast(), recipe("dw_g=mse(2,4)"))  # nothing was traced
    with pytest.raises(ValueError, match=said):
        model(whole(1, 8, 16))
    nm.nnx.register_layer(Fast, weight="w", input=lambda layer: (8, 16))
    with pytest.raises(ValueError, match=said):
        nm.nnx.sparsify(Fast(), recipe("dw_g=mse(2,4)"))
    plan = nm.nnx.plan(Fast(), recipe("ste(2,4)"), whole(1, 8, 16))
    assert "part of a derivative" in plan.refused[0][1]
    assert not nm.nnx.plan(Fast(), recipe("dense"), whole(1, 8, 16)).refused
    outside = nm.nnx.sparsify(ByMatmul(16, 8, rngs=nnx.Rngs(0)), recipe("ste(2,4)"))
    wanted = jax.grad(lambda x: jnp.tanh(x @ nm.prune(nm.mse(2, 4), outside.w[...], axis=0)).sum())(whole(1, 8, 16))
    force = jax.grad(lambda x: jnp.tanh(outside(x)).sum())(whole(1, 8, 16))
    np.testing.assert_allclose(force, wanted, rtol=0, atol=1e-5)


def test_a_call_that_contracts_other_axes_than_the_registered_input():
    model = Caller(OfCall((16, 16), rngs=nnx.Rngs(0)))
    nm.nnx.sparsify(model, recipe("ste(2,4)"), whole(1, 8, 16), spec="bi,io->bo")
    model(whole(1, 8, 16), "bi,io->bo")
    with pytest.raises(ValueError, match=r"layer: the call contracts axes \(1,\) of an operand of shape \(16, 16\)"):
        model(whole(1, 8, 16), "bi,oi->bo")


# ---- layers whose method changes variables ----


class Stateful(nnx.Module):
    """A layer with dropout and a count, which keeps its last result. Its method makes the variable ``last``."""

    def __init__(self, rngs):
        self.w = nnx.Param(jax.random.normal(rngs.params(), (8, 8)))
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.calls = nnx.BatchStat(jnp.zeros(()))

    def __call__(self, x, counter=None):
        self.calls[...] += 1
        if counter is not None:
            counter[...] += x.shape[0]
        y = self.drop(x) @ self.w[...]
        self.last = nnx.Cache(y)
        return y


class Remat(nnx.Module):
    """A layer whose method is computed again in the backward pass."""

    def __init__(self, rngs):
        self.w = nnx.Param(jax.random.normal(rngs.params(), (8, 8)))

    @nnx.remat
    def __call__(self, x):
        return jnp.sin(x) @ self.w[...]


nm.nnx.register_layer(Stateful, weight="w", input=lambda layer: (-1, 8))
nm.nnx.register_layer(Remat, weight="w", input=lambda layer: (-1, 8))
X = jax.random.normal(jax.random.key(7), (16, 8))


@pytest.mark.slow
@pytest.mark.parametrize("jit", [False, True])
def test_what_a_method_changes_is_changed(jit):
    """Against the dense layer, whose weight is pruned by hand."""
    dense, sparse = Stateful(nnx.Rngs(0)), nm.nnx.sparsify(Stateful(nnx.Rngs(0)), recipe("ste(2,4)"))
    dense.w[...] = nm.nnx.harden(nnx.clone(sparse)).w[...]
    call = nnx.jit(lambda layer, x, counter: layer(x, counter)) if jit else lambda layer, x, counter: layer(x, counter)
    counters = nnx.BatchStat(jnp.zeros(())), nnx.BatchStat(jnp.zeros(()))
    for _ in range(3):
        np.testing.assert_array_equal(call(dense, X, counters[0]), call(sparse, X, counters[1]))
    assert (dense.calls[...], counters[0][...]) == (sparse.calls[...], counters[1][...]) == (3, 48)
    assert dense.drop.rngs.count[...] == sparse.drop.rngs.count[...] == 3
    np.testing.assert_array_equal(dense.last[...], sparse.last[...])
    states = [nnx.state(layer, nnx.filterlib.Not(nm.nnx.SparsityVariable)) for layer in (dense, nm.nnx.harden(sparse))]
    assert jax.tree.structure(states[0]) == jax.tree.structure(states[1])


def test_a_plan_of_a_layer_with_dropout():
    assert nm.nnx.plan(Stateful(nnx.Rngs(0)), recipe("ste(2,4)"), X).forward == (2 * 16 * 64, 16 * 64)


def test_a_method_under_remat():
    dense, sparse = Remat(nnx.Rngs(0)), nm.nnx.sparsify(Remat(nnx.Rngs(0)), recipe("ste(2,4)"), X, strict=True)
    dense.w[...] = nm.nnx.harden(nnx.clone(sparse)).w[...]
    loss = lambda layer: (layer(X) ** 2).sum()
    np.testing.assert_array_equal(dense(X), sparse(X))
    wanted = nnx.grad(loss)(dense).w[...]
    atol = 1e-6 * np.abs(wanted).max()  # an entry that nearly cancels rounds as the largest one does
    np.testing.assert_allclose(nnx.grad(loss)(sparse).w[...], wanted, rtol=0, atol=atol)


def test_a_sparse_model_can_be_pickled_and_copied():
    sparse = nm.nnx.sparsify(ByMatmul(16, 8, rngs=nnx.Rngs(0)), recipe("s_ste(2,4)"))
    x = jnp.ones((2, 16))
    for again in (pickle.loads(pickle.dumps(sparse)), copy.deepcopy(sparse)):
        assert type(again) is type(sparse)
        np.testing.assert_array_equal(again(x), sparse(x))
    assert pickle.loads(pickle.dumps(nnx.graphdef(sparse))) == nnx.graphdef(sparse)


def test_a_class_by_name_and_by_itself_are_one():
    kind = fresh()
    text = f"{kind.__module__}:{kind.__qualname__}"
    try:
        nm.nnx.register_layer(text, weight="w", input=lambda layer: (-1, 16))
        nm.nnx.register_layer(kind, weight="w", input=lambda layer: (1, -1, 16))  # declared again
        assert len(registry.types_of(kind())) == 1
        for again in (kind, text):
            with pytest.raises(ValueError, match="rules could not tell the two weights apart"):
                nm.nnx.register_layer(again, weight="b", input=lambda layer: (-1, 16))
    finally:
        registry.REGISTERED.pop(text)


# ---- layers whose product no call uses ----


class OwnCall(nnx.Linear):
    def __call__(self, x):
        return x @ self.kernel[...]


class Wider(nnx.Linear):
    def __call__(self, x):
        return super().__call__(x.astype(jnp.float32))


class Reads(nnx.Module):
    """A model that multiplies by a layer's kernel itself."""

    def __init__(self, rngs):
        self.read, self.called = nnx.Linear(8, 8, rngs=rngs), nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x):
        return self.called(x @ self.read.kernel[...])


def test_layers_that_the_call_does_not_use_are_told():
    said = (
        "Rules of the recipe match these layers, but the call with these inputs does not use their products:\n"
        "  read (8, 8), of Linear\n"
        "If the program multiplies by their weights in another way, that product stays dense.\n"
        'If they are to stay dense, write rules that come before the others: (r"read", "dense").'
    )
    with pytest.raises(ValueError, match=re.escape(said)):
        nm.nnx.sparsify(Reads(nnx.Rngs(0)), recipe("ste(2,4)"), X, strict=True)
    with pytest.warns(UserWarning, match=re.escape(said)) as caught:
        model = nm.nnx.sparsify(Reads(nnx.Rngs(0)), recipe("ste(2,4)"), X)
    assert caught[0].filename == __file__
    assert model.called.nm_state is not None
    without = nm.Recipe({"read": "dense", ".*": "ste(2,4)"})
    nm.nnx.sparsify(Reads(nnx.Rngs(0)), without, X, strict=True)


@pytest.mark.parametrize("inputs", [(), (X,)])
def test_a_layer_of_flax_with_a_call_of_its_own(inputs):
    for kind in (OwnCall, Wider):
        layer = nm.nnx.sparsify(kind(8, 8, rngs=nnx.Rngs(0)), recipe("ste(2,4)"), *inputs, strict=True)
        np.testing.assert_array_equal(layer(X), X @ nm.prune(nm.mse(2, 4), layer.kernel[...], axis=0))


def test_what_a_call_leaves_in_attributes_stays_there():
    class Largest(nnx.Linear):
        calls = 0

        def __call__(self, x):
            y = super().__call__(x)
            self.largest, self.calls, self.seen = jnp.max(y), self.calls + 1, ("x", x.shape)
            self.both, self.mode = nnx.data({"x": x, "y": y}), None
            return y

    layer = nm.nnx.sparsify(Largest(8, 8, rngs=nnx.Rngs(0)), recipe("ste(2,4)"))
    assert layer(X).max() == layer(X).max() == layer.largest
    assert (layer.calls, layer.seen, layer.mode) == (2, ("x", X.shape), None)
    assert (layer.both["y"].max(), layer.both["x"].shape) == (layer.largest, X.shape)


def test_a_layer_of_flax_whose_call_takes_more():
    class Shifted(nnx.Linear):
        def __call__(self, x, shift):
            return super().__call__(x) + shift

    with pytest.raises(ValueError, match=r"missing 1 required positional argument: 'shift' Pass examples of the model"):
        nm.nnx.sparsify(Shifted(8, 8, rngs=nnx.Rngs(0)), recipe("ste(2,4)"))
    layer = nm.nnx.sparsify(Shifted(8, 8, rngs=nnx.Rngs(0)), recipe("ste(2,4)"), X, jnp.ones((1, 8)))
    pruned = nm.prune(nm.mse(2, 4), layer.kernel[...], axis=0)
    np.testing.assert_array_equal(layer(X, jnp.ones((1, 8))), X @ pruned + layer.bias[...][None] + 1)
    assert nm.groups.is_nm(nm.nnx.harden(layer).kernel[...], 2, 4, axis=0)


# ---- calls that change the weight, and stacks of declared layers ----


class OwnLinear(nnx.Linear):
    """Multiplies by its kernel after `change`."""

    def __init__(self, *, rngs):
        super().__init__(8, 4, rngs=rngs)
        self.gain = nnx.Param(jnp.ones((8, 1)))  # at the beginning it changes nothing

    def __call__(self, x):
        return self.dot_general(x, self.change(self.kernel[...]), (((x.ndim - 1,), (0,)), ((), ())))


class Scaled(OwnLinear):
    def change(self, kernel):
        return kernel * self.gain[...]


class Cast(OwnLinear):
    def change(self, kernel):
        return jnp.swapaxes(jnp.swapaxes(checkpoint_name(kernel, "kernel"), 0, 1).astype(jnp.bfloat16), 0, 1)


@pytest.mark.parametrize("inputs", [(), (jnp.ones((4, 8)),), (jnp.ones((2, 4, 8)),)])
def test_a_call_that_computes_with_its_kernel_is_refused(inputs):
    rules = nm.Recipe({".*": "ste(2,4)"})
    with pytest.raises(ValueError, match="scaled: the method multiplies no input by it. mul takes it"):
        nm.nnx.sparsify(nnx.Dict(scaled=Scaled(rngs=nnx.Rngs(0))), rules)
    with pytest.raises(ValueError, match=r"\(the model\): the (method|call).*mul takes"):
        nm.nnx.sparsify(Scaled(rngs=nnx.Rngs(0)), rules, *inputs)
    nm.nnx.sparsify(Scaled(rngs=nnx.Rngs(0)), nm.Recipe({".*": "dense"}), *inputs)
    model, x = nm.nnx.sparsify(Cast(rngs=nnx.Rngs(0)), rules, *inputs), jnp.ones((4, 8))
    np.testing.assert_array_equal(model(x), nm.nnx.harden(model)(x))


class Square(nnx.Module):
    def __init__(self, *, rngs):
        self.w = nnx.Param(jax.random.normal(rngs.params(), (8, 8)))

    def __call__(self, x):
        return x @ self.w[...].T


nm.nnx.register_layer(Square, weight="w")


class StackOfSquares(nnx.Module):
    def __init__(self, size, *, rngs):
        make = lambda rngs: Square(rngs=rngs)
        self.layers = nnx.split_rngs(splits=size)(nnx.vmap(make, in_axes=(0,), out_axes=0))(rngs)

    def __call__(self, x):
        axes = nnx.StateAxes({nnx.Param: 0, nm.nnx.SparsityVariable: 0, ...: None})
        return nnx.scan(lambda layer, x: layer(x), in_axes=(axes, nnx.Carry), out_axes=nnx.Carry)(self.layers, x)


@pytest.mark.slow
@pytest.mark.parametrize("text", ["ste(2,4)", "s_ste(2,4)", "fst(2,4)"])
@pytest.mark.parametrize("size", [4, 8])
def test_a_stack_of_declared_layers_without_an_input(text, size):
    """The call shows which axis stacks the layers. If any axis could, the caller has to name it."""
    model, x, rules = StackOfSquares(size, rngs=nnx.Rngs(0)), jnp.ones((4, 8)), nm.Recipe({".*": text})
    if size == 8:
        with pytest.raises(
            ValueError, match="which does not say which axes stack layers. Name them: .*stack=0\\), or "
        ):
            nm.nnx.sparsify(model, rules, x)
    sparse = nm.nnx.sparsify(model, rules, x, stack=0 if size == 8 else None)
    nm.nnx.set_step(sparse, 0)
    hard = nm.nnx.harden(sparse)
    weight = hard.layers.w[...]
    assert nm.groups.is_nm(weight, 2, 4, axis=2)  # transposed in the call
    wanted = hard(x)  # entries that nearly cancel round as the largest ones do: 8 layers of sums of 8 terms
    np.testing.assert_allclose(sparse(x), wanted, rtol=0, atol=64 * np.finfo(np.float32).eps * np.abs(wanted).max())
    alone = [
        nm.prune(nm.transposable(2, 4) if "fst" in text else nm.mse(2, 4), w.T, axis=0).T for w in model.layers.w[...]
    ]
    if "s_ste" not in text:
        np.testing.assert_array_equal(weight, jnp.stack(alone))


def test_two_weights_of_a_layer_with_an_attribute_without_a_hash():
    @dataclass
    class Settings:
        width: int = 8

    class Two(nnx.Module):
        def __init__(self):
            self.v, self.w = (nnx.Param(jax.random.normal(jax.random.key(i), (8, 8))) for i in range(2))
            self.settings = Settings()

        def __call__(self, x):
            return x @ self.w[...]

        def encode(self, x):
            return x @ self.v[...]

    nm.nnx.register_layer(Two, weight=("w",), input=lambda layer: (-1, 8))
    nm.nnx.register_layer(Two, weight=("v",), method="encode", input=lambda layer: (-1, 8))
    hard = nm.nnx.harden(nm.nnx.sparsify(Two(), nm.Recipe({".*": "ste(2,4)"})))
    assert {path: str(pattern) for path, pattern in nm.nnx.patterns(hard).items()} == {
        "v": "2:4 along axis 0", "w": "2:4 along axis 0",
    }  # fmt: skip


class InTheDtypeOfX(nnx.Module):
    def __init__(self, rngs):
        self.w = nnx.Param(jax.random.normal(rngs.params(), (8, 4)))

    def __call__(self, x):
        return x @ self.w[...].astype(x.dtype)


def test_a_registered_input_serves_every_dtype():
    """The example has the dtype of the weight. A call in another dtype contracts the same axes."""
    nm.nnx.register_layer(InTheDtypeOfX, weight="w", input=lambda layer: (-1, 8))
    made = nm.nnx.sparsify(InTheDtypeOfX(nnx.Rngs(0)), nm.Recipe({".*": "ste(2,4)"}))
    x = jnp.ones((4, 8), jnp.bfloat16)
    np.testing.assert_array_equal(made(x), x @ nm.prune(nm.mse(2, 4), made.w[...].astype(x.dtype), axis=0))


def test_a_class_that_is_no_pytree_keeps_its_parameters():
    class Expand(nnx.Module, pytree=False):
        def __init__(self, rngs):
            self.w = nnx.Param(nnx.initializers.normal()(rngs.params(), (8, 16)))

        def __call__(self, x):
            return x @ self.w

    nm.nnx.register_layer(Expand, weight="w")
    model = nm.nnx.sparsify(Expand(nnx.Rngs(0)), recipe("ste(2,4)"), jnp.ones((4, 8)))
    assert list(nnx.state(model, nnx.Param)) == ["w"]
    gradient = nnx.grad(lambda model: model(jnp.ones((4, 8))).sum())(model)
    assert jnp.abs(gradient.w[...]).max() > 0


def test_a_model_with_state_can_be_tabulated():
    model = nm.nnx.sparsify(nnx.Linear(8, 4, rngs=nnx.Rngs(0)), recipe("s_ste(2,4)"))
    assert "kernel" in nnx.tabulate(model, jnp.ones((2, 8)))
