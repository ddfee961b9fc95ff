"""Tests that `nm.fused` gives the results of a layer and an activation function, and moves fewer bytes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import nmjax as nm
from experiments.bench.counts import counted
from nmjax.models.transformer import Mlp, gelu
from nmjax.products import activated

TOKENS, IN, OUT = 128, 64, 192


def layer(text="s_ste(2,4)", backend="interpret", bias=True):
    made = nnx.Linear(IN, OUT, use_bias=bias, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    nm.nnx.sparsify(made, nm.Recipe(((".*", text),), backend))
    nm.nnx.set_step(made, 3)
    return made


def value_and_gradients(made, call, remat=lambda f: f):
    """A function that computes the value and the gradients of all parameters and of x, and its arguments."""
    draw = np.random.default_rng(0)
    x = jnp.asarray(draw.standard_normal((2, TOKENS // 2, IN)), jnp.bfloat16)
    g = jnp.asarray(draw.standard_normal((2, TOKENS // 2, OUT)), jnp.bfloat16)
    graph, params, rest = nnx.split(made, nnx.Param, ...)

    @jax.jit
    def run(params, x):
        y, back = jax.vjp(remat(lambda params, x: call(nnx.merge(graph, params, rest), x)), params, x)
        return y, *back(g)

    return run, (params, x)


def separate(activation):
    return lambda made, x: activation(made(x))


def fused(activation):
    return lambda made, x: nm.fused(activation, made, x)


def squared_relu(x):
    return jnp.square(jax.nn.relu(x))


def in_float32(activation):
    """The function in float32, so that its derivative is computed in float32, as in kernels."""
    return lambda h: activation(h.astype(jnp.float32)).astype(h.dtype)


def fused_and_separate(made, activation):
    """The results of both, as arrays of float32."""
    for call in (fused(activation), separate(in_float32(activation))):
        run, given = value_and_gradients(made, call)
        yield [np.asarray(v, np.float32) for v in jax.tree.leaves(run(*given))]


@pytest.mark.kernels
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", [jax.nn.gelu, gelu, squared_relu], ids=["tanh", "erf", "squared relu"])
def test_gradients_are_close_to_those_without_fusion(activation, bias):
    made = layer("fwd_rhs=ste(mse(2,4)); drhs_g=mse(2,4)", bias=bias)
    for a, b in zip(*fused_and_separate(made, activation), strict=True):
        assert np.linalg.norm(a - b) < 0.005 * np.linalg.norm(b)


@pytest.mark.kernels
@pytest.mark.parametrize("text", ["s_ste(2,4)", "fst(2,4)", "mvue(2,4)", "drhs_g=identity; dlhs_g=mse(2,4)"])
def test_relu_gives_the_same_bits(text):
    """The derivative of ReLU is 0 or 1, so g has the same bits. With the same noise, dw also has the same bits."""
    for a, b in zip(*fused_and_separate(layer(text), jax.nn.relu), strict=True):
        assert (a == b).all()


@pytest.mark.kernels
def test_bytes_that_the_packing_kernel_moves():
    """It reads two arrays, and writes the gradient and its packed form: 7.125 bytes for each value."""
    found = {}
    for way in (fused, separate):
        run, given = value_and_gradients(layer("mvue(2,4)"), way(jax.nn.gelu))
        found[way] = counted(jax.make_jaxpr(run)(*given).jaxpr)
    assert found[fused].packing == found[separate].packing == 1
    small = 3 * 4 + 2 * 4 + 4  # origin, words and scale
    assert found[fused].packing_bytes - small == 7.125 * TOKENS * OUT
    assert found[separate].packing_bytes - small == 3.125 * TOKENS * OUT


@pytest.mark.parametrize(
    ("made", "activation"),
    [
        (lambda: layer(backend="xla"), jax.nn.gelu),
        (lambda: nnx.Linear(IN, OUT, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)), jax.nn.gelu),
        (lambda: nnx.LinearGeneral(IN, OUT, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)), jax.nn.gelu),
        (lambda: layer(backend="xla"), jax.nn.softmax),
    ],
    ids=["emulated", "dense", "another layer", "softmax"],
)
def test_the_program_is_unchanged_if_nothing_is_packed(made, activation):
    """The lowered programs are the same, so the bits of the results are the same."""
    programs = []
    for way in (fused, separate):
        run, given = value_and_gradients(made(), way(activation))
        programs.append(run.lower(*given).as_text())
    assert programs[0] == programs[1]


@pytest.mark.kernels
def test_unsupported_functions_are_not_fused(monkeypatch):
    monkeypatch.setattr(activated, "_fused", None)
    runs = (value_and_gradients(layer(), way(jax.nn.softmax)) for way in (fused, separate))
    for a, b in zip(*(jax.tree.leaves(run(*given)) for run, given in runs), strict=True):
        assert (np.asarray(a) == np.asarray(b)).all()


@pytest.mark.kernels
@pytest.mark.parametrize("policy", [None, nm.policies.keep_sparse], ids=["all", "lean"])
def test_rematerialisation_gives_the_same_bits(policy):
    results = []
    for remat in (lambda f: f, lambda f: jax.checkpoint(f, policy=policy)):
        run, given = value_and_gradients(layer("mvue(2,4)"), fused(jax.nn.gelu), remat)
        results.append([np.asarray(v) for v in jax.tree.leaves(run(*given))])
    for a, b in zip(*results, strict=True):
        assert (a == b).all()


@pytest.mark.kernels
def test_perceptrons_of_models_are_fused():
    mlp = Mlp(IN, OUT, gelu, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    nm.nnx.sparsify(mlp, nm.Recipe((("up", "mvue(2,4)"), (".*", "dense")), "interpret"))
    nm.nnx.set_step(mlp, 1)
    graph, state = nnx.split(mlp)
    loss = lambda state, x: nnx.merge(graph, state)(x).astype(jnp.float32).sum()
    x = jax.ShapeDtypeStruct((TOKENS, IN), jnp.bfloat16)
    found = counted(jax.make_jaxpr(jax.grad(loss, allow_int=True))(state, x).jaxpr)
    assert found.packing_bytes > 7.125 * TOKENS * OUT
