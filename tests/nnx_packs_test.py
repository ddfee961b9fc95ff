"""A step packs its weights once, whatever the number of its micro-steps, and its numbers do not change by it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import nmjax as nm
from tests.engines_test import on, packers, random


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
    """The sum over micro-steps, with weights packed once or every time."""
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    now = nnx.merge(graph, params, rest, copy=True)
    nm.nnx.set_step(now, 3)
    forms = nm.nnx.pack(now, parts[0]) if share else {}

    def micro(total, numbered):
        number, part = numbered

        def loss(params):
            model = nnx.merge(graph, params, rest, copy=True)
            with nm.nnx.packed(model, forms):
                y = model(part)
            return jnp.mean(y.astype(jnp.float32) ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(jnp.add, total, (value, nnx.as_pure(grads))), None

    zeros = jax.tree.map(jnp.zeros_like, (jnp.float32(0), nnx.as_pure(params)))
    return jax.lax.scan(micro, zeros, (jnp.arange(len(parts)), parts))[0]


@pytest.mark.parametrize(
    ("text", "stacked"),
    [("bi_mask()", False), ("s_ste(fp8=True)", True), ("fwd_rhs=ste(mvue(2,4))", True)],
)
def test_packed_once_the_numbers_are_the_same(text, stacked):
    model, parts = sparse(text, "interpret", stacked), random((2, 128, 128))
    nm.nnx.set_step(model, 3)
    forms = nm.nnx.pack(model, parts[0])
    assert len(forms) == (0 if "mvue" in text else 1 if stacked else 2)
    run = jax.jit(gradients, static_argnames="share")
    for a, b in zip(*(jax.tree.leaves(run(model, parts, share=share)) for share in (True, False)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_forms_of_another_model_are_refused():
    refused = pytest.raises(ValueError, match=r"no sparse layer layers/0: the forms are another model's")
    with refused, nm.nnx.packed(sparse("dense", "auto"), {"layers/0": {}}):
        pass


@pytest.mark.parametrize("stacked", [False, True])
def test_micro_steps_do_not_pack_weights(stacked):
    """On Hopper: of S-STE a layer's forward products take one form, which the scan over micro-steps makes no more."""
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
