"""Weights packed once for all micro-steps of a step. The numbers do not change."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import nmjax as nm
from nmjax.products.operations import as_dot
from nmjax.products.weights import packed_weight
from tests.products.routes_test import PLAIN, on, packers, random


class Two(nnx.Module):
    """Two layers, alone or stacked."""

    def __init__(self, width: int, stacked: bool):
        make = lambda rngs: nnx.Linear(width, width, use_bias=False, dtype=jnp.bfloat16, rngs=rngs)
        rngs = nnx.Rngs(0)
        self.stacked = stacked
        self.layers = (
            nnx.vmap(make, in_axes=0, out_axes=0)(rngs.split(2)) if stacked else nnx.List([make(rngs), make(rngs)])
        )

    def __call__(self, x):
        if not self.stacked:
            return self.layers[1](jax.nn.gelu(self.layers[0](x)))
        return nnx.scan(lambda layer, x: jax.nn.gelu(layer(x)), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(
            self.layers, x
        )


def sparse(text, backend, stacked=False, width=128):
    return nm.nnx.sparsify(Two(width, stacked), nm.Recipe(((".*", text),), backend=backend))


def gradients(model, parts, share):
    """Return the sum of gradients over micro-steps, with weights packed once or each time."""
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    now = nnx.merge(graph, params, rest, copy=True)
    nm.nnx.set_step(now, 3)
    forms = nm.nnx.pack(now, parts[0]) if share else {}

    def micro(total, numbered):
        number, part = numbered
        model = nnx.merge(graph, params, rest, copy=True)
        nm.nnx.set_step(model, 3, number)
        at_step = nnx.split(model, nnx.Param, ...)[2]

        def loss(params):
            model = nnx.merge(graph, params, at_step, copy=True)
            with nm.nnx.packed(model, forms):
                y = model(part)
            return jnp.mean(y.astype(jnp.float32) ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(jnp.add, total, (value, nnx.as_pure(grads))), None

    zeros = jax.tree.map(jnp.zeros_like, (jnp.float32(0), nnx.as_pure(params)))
    return jax.lax.scan(micro, zeros, (jnp.arange(len(parts)), parts))[0]


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("text", "stacked"),
    [("y_w=ste(hold(mse(2,4),3))", False), ("s_ste(fp8=True)", True), ("y_w=ste(mvue(2,4))", True)],
)
def test_packed_once_the_numbers_are_the_same(text, stacked):
    """Masks that are renewed at the step are those that are packed."""
    model, parts = sparse(text, "interpret", stacked), random((2, 128, 128))
    for layer in [model.layers] if stacked else model.layers:
        layer.kernel.set_value(layer.kernel[...] + 0.1 * random(layer.kernel.shape, 5, jnp.float32))
    forms = nnx.jit(nm.nnx.pack)(model, parts[0])
    assert len(forms) == (0 if "mvue" in text else 1 if stacked else 2)
    run = jax.jit(gradients, static_argnames="share")
    for a, b in zip(*(jax.tree.leaves(run(model, parts, share=share)) for share in (True, False)), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.kernels
@pytest.mark.parametrize(("text", "count"), [("y_w=ste(transposable(2,4))", 2), ("s_ste(fp8=True)", 2)])
def test_forms_are_what_is_multiplied(text, count):
    """If one form is doubled, either y or dx is doubled, and nothing else changes."""
    s, x, w, g = nm.parse(text), random((128, 128)), random((128, 128), 1), random((128, 128), 2)
    op, state = as_dot(x, w, PLAIN), s.init(w, contract=0, out=1)
    ctx = nm.Ctx(7, 3, state)
    forms = jax.jit(lambda x, w: packed_weight(op, x, w, s, ctx, "interpret"))(x, w)
    assert len(forms) == count

    @jax.jit
    def all_of(packed):
        call = lambda x: nm.dot_general(x, w, PLAIN, sparsity=s, ctx=ctx, packed=packed, backend="interpret")
        y, vjp = jax.vjp(call, x)
        return {"y": y.astype(jnp.float32), "dx": vjp(g)[0].astype(jnp.float32)}

    right = all_of(None)
    for key, form in forms.items():
        twice = (form[0], form[1] * 2) if isinstance(form, tuple) else replace(form, values=form.values * 2)
        for product, result in all_of(forms | {key: twice}).items():
            np.testing.assert_array_equal(result, right[product] * (2 if key.product == product else 1))


@pytest.mark.kernels
def test_a_stacks_forms_are_sliced_as_its_kernels():
    model = sparse("ste(2,4)", "interpret", stacked=True)
    axes = nnx.StateAxes({nnx.Param: 0, ...: None})
    run = nnx.scan(lambda layer, x: layer(x), in_axes=(axes, nnx.Carry), out_axes=nnx.Carry)
    x = random((128, 128))
    forms = nm.nnx.pack(model, x)
    refused = pytest.raises(
        ValueError, match=r"layers: .*its packed form has shape \(2, 1, 128, 128\).*nm.nnx.SparsityVariable: 0"
    )
    with nm.nnx.packed(model, forms), refused:
        run(model.layers, x)


def test_what_was_packed_before_pays_sooner():
    """The plan says that small micro-steps run packed only if the weights are packed before."""
    with on():
        model = nnx.eval_shape(lambda: sparse("ste(2,4)", "auto", width=4096))
        x = jax.ShapeDtypeStruct((2048, 4096), jnp.bfloat16)
        assert nm.nnx.plan(model, x).runs == {"emulated": 2}
        with nm.nnx.packed(model, jax.eval_shape(lambda model: nm.nnx.pack(model, x), model)):
            assert nm.nnx.plan(model, x).runs == {"packed": 2}
        few, many = jax.ShapeDtypeStruct((4096, 768), jnp.bfloat16), jax.ShapeDtypeStruct((16384, 768), jnp.bfloat16)
        s, w = nm.parse("y_w=ste(transposable(2,4))"), jax.ShapeDtypeStruct((768, 3072), jnp.bfloat16)

        def gradient(x, w):  # packed for fewer tokens: what is missing then is packed by itself
            packed = packed_weight(as_dot(few, w, PLAIN), few, w, s)
            product = lambda x: nm.dot_general(x, w, PLAIN, sparsity=s, packed=packed)
            return jax.grad(lambda x: product(x).astype(jnp.float32).sum())(x)

        assert packers(jax.make_jaxpr(gradient)(many, w).jaxpr)


def test_a_slot_that_does_not_fit_is_no_reason_not_to_pack_the_weight():
    """4,104 tokens are no whole groups of 16, so dw is dense. y is packed."""
    x, w = jax.ShapeDtypeStruct((4104, 1024), jnp.bfloat16), jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16)
    s = nm.parse("ste(2,4); dw_g=mvue(2,16) else dense")
    with on():
        forms = lambda w: packed_weight(as_dot(x, w, PLAIN), x, w, s, backend="pallas")
        made = jax.eval_shape(lambda w: {key.product: form for key, form in forms(w).items()}, w)
        assert list(made) == ["y"]


def test_forms_of_another_model_are_refused():
    refused = pytest.raises(ValueError, match=r"no sparse layer 'layers/0', so the forms are another model's")
    with refused, nm.nnx.packed(sparse("dense", "auto"), {"layers/0": {}}):
        pass


@pytest.mark.parametrize("stacked", [False, True])
def test_micro_steps_do_not_pack_weights(stacked):
    """On Hopper a layer of S-STE takes one form forward, and the scan over micro-steps does not make it."""
    with on():
        model, parts = (
            nnx.eval_shape(lambda: sparse("s_ste()", "auto", stacked, 2048)),
            jax.ShapeDtypeStruct((4, 8192, 2048), jnp.bfloat16),
        )
        inside = {}
        for share in (True, False):
            program = jax.make_jaxpr(lambda m, p, share=share: gradients(m, p, share))(model, parts).jaxpr
            (scan,) = (eqn for eqn in program.eqns if eqn.primitive.name == "scan" and eqn.params["length"] == 4)
            inside[share], whole = len(packers(scan.params["jaxpr"].jaxpr)), len(packers(program))
            assert whole - inside[share] == (0 if not share else 1 if stacked else 2)
    assert inside[False] - inside[True] == (1 if stacked else 2)
