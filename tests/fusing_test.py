"""Tests that `nm.fused` gives the results of a layer and an activation function, and moves fewer bytes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import nmjax as nm
from experiments.bench.computed import counted
from nmjax.models.transformer import Mlp
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
@pytest.mark.parametrize(
    "activation", [jax.nn.gelu, nm.exact_gelu, nm.squared_relu], ids=["tanh", "erf", "squared relu"]
)
def test_gradients_are_close_to_those_without_fusion(activation, bias):
    made = layer("y_w=ste(mse(2,4)); dw_g=mse(2,4)", bias=bias)
    for a, b in zip(*fused_and_separate(made, activation), strict=True):
        bound = 0.02 if a.ndim == 1 else 0.005  # Flax sums the gradient of a bias in bfloat16
        assert np.linalg.norm(a - b) < bound * np.linalg.norm(b)


@pytest.mark.kernels
@pytest.mark.parametrize("text", ["s_ste(2,4)", "fst(2,4)", "mvue(2,4)", "dw_g=identity; dx_g=mse(2,4)"])
def test_relu_gives_the_same_bits(text):
    """The derivative of ReLU is 0 or 1, so g has the same bits. With the same noise, dw also has the same bits.

    The gradient of a bias has not: it is summed in float32, and Flax sums it in bfloat16.
    """
    for a, b in zip(*fused_and_separate(layer(text, bias=False), jax.nn.relu), strict=True):
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


class Learned:
    """An unhashable function with a parameter, which looks at the shape and counts its calls."""

    __hash__ = None

    def __init__(self):
        self.slope, self.calls = jnp.bfloat16(0.25), 0

    def __eq__(self, other):
        return self is other

    def __call__(self, x):
        self.calls += 1
        return jnp.where(x > 0, x * x.shape[0], self.slope * x)


@pytest.mark.kernels
@pytest.mark.parametrize("activation", [jax.nn.softmax, lambda h: jax.nn.gelu(h) * h.shape[0]])
def test_other_functions_are_not_fused(activation, monkeypatch):
    monkeypatch.setattr(activated, "_fused", None)
    runs = (value_and_gradients(layer(), way(activation)) for way in (fused, separate))
    for a, b in zip(*(jax.tree.leaves(run(*given)) for run, given in runs), strict=True):
        assert (np.asarray(a) == np.asarray(b)).all()


@pytest.mark.kernels
def test_a_function_is_called_once_and_keeps_the_gradient_of_its_parameter():
    activation, x = Learned(), jnp.ones((TOKENS, IN), jnp.bfloat16)
    made = layer()

    def loss(slope):
        activation.slope = slope
        return nm.fused(activation, made, x).astype(jnp.float32).sum()

    assert float(jax.grad(loss)(jnp.bfloat16(0.25))) != 0
    assert activation.calls == 1


@pytest.mark.kernels
@pytest.mark.parametrize("bias", [True, False])
def test_gradients_are_traced_in_shard_map(bias):
    """The tokens are cut, and the parameters are not: their gradients are sums."""
    graph, params, rest = nnx.split(layer("mvue(2,4)", bias=bias), nnx.Param, ...)
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    cut, whole = jax.P("data"), jax.P()

    @jax.shard_map(mesh=mesh, in_specs=(whole, whole, cut), out_specs=(whole, cut))
    def gradients(params, rest, x):
        loss = lambda params, x: nm.fused(jax.nn.gelu, nnx.merge(graph, params, rest), x).astype(jnp.float32).sum()
        return jax.grad(loss, (0, 1))(params, x)

    x = jax.ShapeDtypeStruct((TOKENS, IN), jnp.bfloat16)
    assert counted(jax.make_jaxpr(gradients)(params, rest, x).jaxpr).activated == TOKENS * OUT  # it is fused
    found, _ = jax.eval_shape(gradients, params, rest, x)
    assert jax.tree.map(jnp.shape, found) == jax.tree.map(jnp.shape, params)


@pytest.mark.kernels
def test_a_bias_of_another_dtype_is_not_fused():
    made = layer("mvue(2,4)")
    made.promote_dtype = lambda arrays, dtype: (*(v.astype(dtype) for v in arrays[:2]), arrays[2])
    run, given = value_and_gradients(made, lambda made, x: nm.fused(jax.nn.gelu, made, x).astype(jnp.bfloat16))
    with jax.numpy_dtype_promotion("standard"):
        _, gradients, _ = run(*given)
    assert gradients["bias"].get_value().dtype == jnp.float32


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
    mlp = Mlp(IN, OUT, nm.exact_gelu, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    nm.nnx.sparsify(mlp, nm.Recipe((("up", "mvue(2,4)"), (".*", "dense")), "interpret"))
    nm.nnx.set_step(mlp, 1)
    graph, state = nnx.split(mlp)
    loss = lambda state, x: nnx.merge(graph, state)(x).astype(jnp.float32).sum()
    x = jax.ShapeDtypeStruct((TOKENS, IN), jnp.bfloat16)
    found = counted(jax.make_jaxpr(jax.grad(loss, allow_int=True))(state, x).jaxpr)
    assert found.packing_bytes > 7.125 * TOKENS * OUT
