"""``else dense``: what does not fit stays dense, everywhere in the same way, and a plan lists it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn, nnx
from jax.sharding import NamedSharding, PartitionSpec as P

import nmjax as nm
from nmjax.products.fit import fitting
from nmjax.products.operations import as_dot
from tests.products.common import MATMUL, products, whole


def gradients(x, w, text, key=0):
    product = lambda x, w: nm.dot_general(
        x, w, MATMUL, sparsity=nm.parse(text), ctx=nm.Ctx(jax.random.key(key), step=0)
    )
    return products(product, x, w, whole(9, len(x), w.shape[1]))


def equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.parametrize(
    ("text", "tokens", "inward", "outward", "same_as"),
    [
        # one slot
        ("ste(2,4); dw_g=mvue(2,4) else dense", 6, 8, 4, "ste(2,4)"),
        ("ste(2,4); dw_g=mvue(2,4) else dense", 8, 8, 4, "ste(2,4); dw_g=mvue(2,4)"),
        ("y_w=ste(mse(2,4)) else dense; dw_g=mvue(2,4)", 8, 6, 4, "dw_g=mvue(2,4)"),
        ("y_w=ste(mse(2,4)) else dense; dx_g=mse(2,4) else dense", 8, 6, 6, "dense"),
        ("y_w=ste(mse(2,4)) else dense; dx_g=mse(2,4) else dense", 8, 8, 6, "ste(2,4)"),
        # the whole layer
        ("bdwp() else dense", 8, 8, 8, "bdwp()"),
        ("bdwp() else dense", 8, 6, 8, "dense"),
        ("bdwp() else dense", 8, 8, 6, "dense"),
        # its slots of dw alone, because the number of tokens is another in each call
        ("ste(2,4); dw_g=mvue(2,4); else dense", 6, 8, 4, "ste(2,4)"),
        ("ste(2,4); dw_g=mvue(2,4); else dense", 6, 6, 4, "dense"),
    ],
)
def test_a_product_prunes_what_fits(text, tokens, inward, outward, same_as):
    x, w = whole(0, tokens, inward), whole(1, inward, outward)
    equal(gradients(x, w, text), gradients(x, w, same_as))


def test_what_fits_does_not_depend_on_64_bits():
    x, w = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((2, 6, 8), (8, 8)))
    s = nm.parse("dw_g=rows(mvue(1,4),by='both') else dense")
    with jax.enable_x64(True):
        assert fitting(as_dot(x, w, (((2,), (0,)), ((), ()))), x, w, s)[0].dw_g == s.dw_g


def test_without_else_dense_misfits_are_refused():
    with pytest.raises(ValueError, match="y_w=ste.mse.2,4.. prunes an array of shape .6, 4."):
        gradients(whole(0, 8, 6), whole(1, 6, 4), "y_w=ste(mse(2,4)); dw_g=mvue(2,4) else dense")


def test_the_reasons_name_slot_and_size():
    x, w = whole(0, 6, 6), whole(1, 6, 4)
    op = as_dot(x, w, MATMUL)
    sparsity, reasons = fitting(op, x, w, nm.parse("ste(2,4); dw_g=mvue(2,4) else dense; y_x=mse(2,4) else dense"))
    assert str(sparsity) == "y_w=ste(mse(2,4))"
    assert list(reasons) == ["y_x", "dw_g"]
    assert reasons["dw_g"].startswith("dw_g=mvue(2,4) prunes an array of shape (6, 4) along its contraction axis 0")


def test_groups_on_two_devices_are_no_reason():
    """The number of devices does not decide which layers are dense."""
    mesh = jax.make_mesh((2,), ("a",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        w = jax.device_put(whole(1, 4, 4), NamedSharding(mesh, P("a", None)))
        x = jax.device_put(whole(0, 8, 4), NamedSharding(mesh, P(None, "a")))
        with pytest.raises(ValueError, match="would lie on two devices"):
            nm.dot_general(x, w, MATMUL, sparsity=nm.parse("ste(2,4) else dense"), out_sharding=P(None, None))


class Net(nnx.Module):
    """A layer that does not divide into groups of four, and two that do."""

    def __init__(self, rngs):
        self.first, self.second = nnx.Linear(6, 8, rngs=rngs), nnx.Linear(8, 8, rngs=rngs)
        self.head = nnx.Linear(8, 6, rngs=rngs)

    def __call__(self, x):
        return self.head(jnp.sin(self.second(jnp.sin(self.first(x)))))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "tokens", "first", "others"),
    [
        ("s_ste(2,4) else dense", 8, "dense", "s_ste(2,4)"),
        ("s_ste(2,4) else dense", 6, "dense", "y_w=ste(soft(2,4))"),
        ("y_w=ste(soft(2,4)) else dense; dw_g=mvue(2,4) else dense", 8, "dw_g=mvue(2,4)", "s_ste(2,4)"),
        ("y_w=ste(soft(2,4)) else dense; dw_g=mvue(2,4) else dense", 6, "dense", "y_w=ste(soft(2,4))"),
    ],
)
def test_a_model_prunes_what_fits(text, tokens, first, others):
    """The layers that fit train as with a rule for them alone, also those with state."""
    x, loss = whole(0, tokens, 6), lambda model: (model(x) ** 2).sum()
    results = []
    for recipe in (nm.Recipe({".*": text}), nm.Recipe({"first": first, ".*": others})):
        model = nm.nnx.sparsify(Net(nnx.Rngs(0)), recipe, seed=1)
        nm.nnx.set_step(model, 2)
        results.append(nnx.value_and_grad(loss)(model))
        patterns = {path: str(pattern) for path, pattern in nm.nnx.patterns(nm.nnx.harden(model)).items()}
        both = dict.fromkeys(("second/kernel", "head/kernel"), "2:4 along axis 0")
        assert patterns == {"first/kernel": "None", **both}
    (one, g), (other, h) = results
    np.testing.assert_array_equal(one, other)
    equal(jax.tree.leaves(g), jax.tree.leaves(h))


def test_a_plan_lists_what_stays_dense():
    recipe, model = nm.Recipe({".*": "s_ste(2,4) else dense"}), Net(nnx.Rngs(0))
    plan = nm.nnx.plan(model, recipe, whole(0, 6, 6))
    assert not plan.refused
    by_path = {layer.path: (str(layer.sparsity), [slot for slot, _ in layer.else_dense]) for layer in plan.layers}
    assert by_path == {
        "first": ("dense", ["y_w", "dw_g"]),
        "second": ("y_w=ste(soft(2,4)); else dense", ["dw_g"]),
        "head": ("y_w=ste(soft(2,4)); else dense", ["dw_g"]),
    }
    said = " ".join(str(plan).split())
    assert said.count("Dense, as the rule says: ") == 2
    assert "Dense, as the rule says: first: y_w=ste(soft(2,4)) prunes an array of shape (6, 8)" in said
    assert plan.forward == (2 * 6 * (48 + 64 + 48), 6 * (2 * 48 + 64 + 48))
    sparse = nm.nnx.plan(nm.nnx.sparsify(model, recipe), whole(0, 6, 6))
    assert sparse.training == plan.training


@pytest.mark.slow
def test_a_function_prunes_what_fits():
    """`nm.transform` leaves the same dense, with state and without."""
    params, x = {"a": whole(1, 6, 8), "b": whole(2, 8, 4)}, whole(0, 8, 6)
    f = lambda params, x: jnp.sin(x @ params["a"]) @ params["b"]
    for text in ("s_ste(2,4)", "ste(2,4)"):
        some = nm.transform(f, nm.Recipe({".*": f"{text} else dense"}), seed=1)
        one = nm.transform(f, nm.Recipe({"a": "dense", ".*": text}), seed=1)
        states = [some.init(params, x), one.init(params, x)]
        assert [list(s) for s in states] == [["b"], ["b"]]
        both = zip((some, one), states, strict=True)
        got, wanted = (jax.grad(lambda p, f=f, s=s: (f(p, x, state=s) ** 2).sum())(params) for f, s in both)
        equal(got, wanted)
        assert [layer.path for layer in some.plan(params, x).layers if layer.else_dense] == ["a"]


def test_what_else_dense_refuses():
    ste = nm.ste(nm.mse(2, 4))
    with pytest.raises(ValueError, match="'dw_g' is not a slot that prunes"):
        nm.Sparsity(y_w=ste, else_dense=("dw_g",))
    assert nm.Sparsity(else_dense=True) == nm.Sparsity()
    assert nm.Sparsity(y_w=ste, else_dense=()) == nm.Sparsity(y_w=ste)


@pytest.mark.slow
def test_a_linen_model_prunes_what_fits():
    """The variables of a layer that stays dense are those of a dense rule."""
    model, x = nn.Sequential([nn.Dense(8), jnp.sin, nn.Dense(8)]), whole(0, 8, 6)
    results = []
    for rules in ({".*": "s_ste(2,4) else dense"}, {"layers_0": "dense", ".*": "s_ste(2,4)"}):
        with nm.linen.sparsify(nm.Recipe(rules), seed=1):
            variables = model.init(jax.random.key(0), x)
            loss = lambda params, variables=variables: (model.apply({**variables, "params": params}, x) ** 2).sum()
            results.append(jax.value_and_grad(loss)(variables["params"]))
        assert {path: str(pattern) for path, pattern in nm.linen.patterns(variables).items()} == {
            "layers_0/kernel": "None", "layers_2/kernel": "2:4 along axis 0"
        }  # fmt: skip
        assert set(nm.linen.scales(variables)) == {"layers_2"}
        assert nm.linen.violations(nm.linen.harden(variables))["layers_2/kernel"] == 0
    equal(*results)
    plan = nm.linen.plan(model, nm.Recipe({".*": "s_ste(2,4) else dense"}), x)
    assert [layer.path for layer in plan.layers if layer.else_dense] == ["layers_0"]
    assert not plan.refused


@pytest.mark.slow
def test_a_slot_that_no_call_can_prune_is_dense_before_any_call():
    """Both operands have rows for a kernel of 1, and for no larger one, however many tokens there are."""
    model = nnx.Sequential(nnx.Conv(8, 8, (3, 3), rngs=nnx.Rngs(0)), nnx.Conv(8, 8, (1, 1), rngs=nnx.Rngs(0)))
    text = "ste(2,4); dw_g=rows(mvue(1,4),by='both')"
    with pytest.raises(ValueError, match="layers/0: .*a convolution whose kernel is larger than 1.*Write by='own'"):
        nm.nnx.sparsify(nnx.clone(model), nm.Recipe({".*": text}))
    x, results = whole(0, 32, 8).reshape(2, 4, 4, 8), []
    for rules in ({".*": f"{text}; else dense"}, {"layers/0": "ste(2,4)", ".*": text}):
        sparse = nm.nnx.sparsify(nnx.clone(model), nm.Recipe(rules), seed=1)
        nm.nnx.set_step(sparse, 2)
        results.append(nnx.grad(lambda model: (model(x) ** 2).sum())(sparse))
    equal(*map(jax.tree.leaves, results))
