"""Functions with grouped products of parameters: mixtures of experts in plain JAX, and the model of nmjax.models."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import nmjax as nm
from nmjax.models import MoE
from nmjax.products.operations import RaggedDot
from nmjax.programs.states import noise_key

SIZES = jnp.array([5, 0, 9, 2])


def draw(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


PARAMS = {"up": draw(0, 4, 8, 12), "down": draw(1, 4, 12, 8)}
X = draw(2, 16, 8)


def mixture(params, x, sizes=SIZES):
    return lax.ragged_dot(jax.nn.gelu(lax.ragged_dot(x, params["up"], sizes)), params["down"], sizes)


def by_hand(states, text):
    """The mixture with the pruned products written into it."""

    def f(params, x, sizes=SIZES):
        def product(x, name):
            words, time, state = states[name].arrays if name in states else (None, None, None)
            key = None if words is None else noise_key(words, time[1])
            ctx = nm.Ctx(key, 0 if time is None else time[0], state)
            return nm.ragged_dot(x, params[name], sizes, sparsity=nm.parse(text), ctx=ctx)

        return product(jax.nn.gelu(product(x, "up")), "down")

    return f


@pytest.mark.slow
@pytest.mark.parametrize("text", ["ste(2,4)", "s_ste(2,4); dx_g=mvue(2,4)", "fst(2,4,every=2)", "bdwp(2,4)"])
def test_the_products_of_experts_are_pruned(text):
    """The states, the value and the gradients are those of nm.ragged_dot."""
    sparse = nm.transform(mixture, nm.Recipe(((".*", text),)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        states = sparse.init(PARAMS, X)
    states = sparse.set_step(PARAMS, states, 3)
    loss = lambda f: jax.jit(jax.value_and_grad(lambda params, x: (f(params, x) ** 2).sum(), (0, 1)))
    ours = loss(lambda params, x: sparse(params, x, state=states))(PARAMS, X)
    jax.tree.map(np.testing.assert_array_equal, ours, loss(by_hand(states, text))(PARAMS, X))
    dense = loss(mixture)(PARAMS, X)
    assert all((a != b).any() for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(dense), strict=True))
    if text == "fst(2,4,every=2)":
        assert states["up"].state["y_w"].shape[0] == 4
    hard, left = sparse.harden(PARAMS, states)
    counts = sparse.violations(hard, states)
    for name, axis in (("up", 1), ("down", 1)):
        assert bool(nm.groups.is_nm(hard[name], 2, 4, axis))
        assert int(counts[name]) == 0
        assert int(sparse.violations(PARAMS, states)[name]) > 0
    np.testing.assert_array_equal(jax.jit(sparse)(hard, X, state=left), jax.jit(mixture)(hard, X))


@pytest.mark.slow
def test_through_scans_checkpoints_and_changes_of_layout():
    """A stack of mixtures, whose sizes a traced router decides, with kernels that are kept transposed."""

    def f(params, x):
        def block(x, w):
            sizes = jnp.bincount(jnp.argmax(x[:, :4], -1), length=4)
            y = lax.ragged_dot(x.astype(jnp.bfloat16), jnp.swapaxes(w["t"], 1, 2).astype(jnp.bfloat16), sizes)
            return x + y.astype(x.dtype), None

        return lax.scan(jax.checkpoint(block), x, params)[0]

    params = {"t": draw(3, 2, 4, 8, 8)}  # layers, experts, out, in
    sparse = nm.transform(f, nm.Recipe((("t", "ste(2,4)"),)))
    assert sparse.init(params, X)["t"].origin.parameter.stack((2, 4, 8, 8)) == (2,)
    in_bf16 = params["t"].astype(jnp.bfloat16)
    hard = {"t": nm.prune(nm.mse(2, 4), in_bf16, axis=3).astype(jnp.float32)}
    np.testing.assert_array_equal(jax.jit(sparse)(params, X), jax.jit(f)(hard, X))
    noisy = nm.transform(f, nm.Recipe((("t", "mvue(2,4)"),)))
    states = noisy.init(params, X)
    assert states["t"].words.shape == (2, 2)
    grad = jax.jit(jax.grad(lambda params, states: noisy(params, X, state=states).sum()))(params, states)
    assert jnp.isfinite(grad["t"]).all()


def test_the_plan_of_experts():
    sparse = nm.transform(mixture, nm.Recipe((("up", "s_ste(2,4)"), ("down", "ste(2,4)"))), seed=0)
    plan = sparse.plan(PARAMS, X)
    up, down = sorted(plan.layers, key=lambda row: row.path, reverse=True)
    assert (up.path, up.kernel, up.flops) == ("up", (4, 8, 12), 2 * 16 * 8 * 12)
    assert up.shares == (0.5, 1.0, 0.5)
    assert [(slot.name, slot.along, slot.groups) for slot in up.slots] == [
        ("y_w", (8,), 4 * 8 * 12 // 4),
        ("dw_g", (16,), None),  # the sizes of a call decide how many groups there are
    ]
    assert down.hardened == "2:4"
    assert not plan.refused
    assert dict(up.runs)["y"].how == "emulated"
    refused = nm.transform(mixture, nm.Recipe(((".*", "ste(3,5)"),))).plan(PARAMS, X).refused
    assert {where for where, _ in refused} == {"up", "down"}
    with pytest.raises(ValueError, match=r"up: y_w=ste\(mse\(3,5\)\) prunes an array of shape \(4, 8, 12\)"):
        nm.transform(mixture, nm.Recipe(((".*", "ste(3,5)"),))).init(PARAMS, X)


def test_other_ragged_products_stay_as_they_are():
    """Only the form of jax.lax.ragged_dot is pruned, and the rest is told."""
    numbers = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
    f = lambda params, x: lax.ragged_dot_general(x, params["up"][0], jnp.array([3, 5]), numbers)
    params, x = {"up": draw(0, 1, 8, 4)}, draw(1, 8, 4)
    sparse = nm.transform(f, nm.Recipe(((".*", "ste(2,4)"),)))
    with pytest.warns(UserWarning, match="no product takes them, so they stay dense"):
        states = sparse.init(params, x)
    np.testing.assert_array_equal(sparse(params, x, state=states), f(params, x))
    as_left = lambda params, x: lax.ragged_dot(params["x"], x, jnp.array([4, 4]))
    with pytest.warns(UserWarning, match="used by ragged_dot_general"):
        nm.transform(as_left, nm.Recipe(((".*", "ste(2,4)"),))).init({"x": draw(0, 8, 4)}, draw(1, 2, 4, 4))


def test_the_operands_of_one_product_are_told_once():
    """Two calls with other sizes are told as one: a plan does not hold the arrays of a call. Both cost FLOPs."""
    f = lambda params, x, sizes: mixture(params, x, sizes) + mixture(params, x, sizes[::-1])
    sparse = nm.transform(f, nm.Recipe(((".*", "ste(2,4)"),)))
    products = sparse._traced(PARAMS, (X, SIZES), {}).products
    assert [len(found) for found in products.values()] == [1, 1]
    assert products["up"][0].product.op == RaggedDot(None, None)
    assert products["up"][0].product.extra == ()
    once = nm.transform(mixture, sparse.recipe).plan(PARAMS, X, SIZES)
    assert [row.flops for row in sparse.plan(PARAMS, X, SIZES).layers] == [2 * row.flops for row in once.layers]


@pytest.mark.slow
def test_the_model_with_pruned_experts():
    """nm.transform prunes the experts of nmjax.models.MoE, and its gradient is that of the pruned weights."""
    size = {"width": 8, "depth": 2, "heads": 2, "hidden": 16, "experts": 4, "top": 2}
    model = MoE(**size, vocabulary=16, length=8, rngs=nnx.Rngs(0))
    model.eval()
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    flat = nnx.to_flat_state(params)
    arrays = {"/".join(map(str, path)): v[...] for path, v in flat}

    def f(arrays, tokens):
        state = nnx.from_flat_state([(path, v.replace(arrays["/".join(map(str, path))])) for path, v in flat])
        return nnx.merge(graph, state, rest, copy=True)(tokens)

    tokens = jax.random.randint(jax.random.key(0), (3, 8), 0, 16)
    sparse = nm.transform(f, nm.Recipe(((r"blocks/.*/moe/(up|down)/kernel", "ste(2,4); dw_g=mvue(2,4)"),)))
    states = sparse.init(arrays, tokens)
    assert sorted(states) == [f"blocks/{i}/moe/{name}/kernel" for i in range(2) for name in ("down", "up")]
    hard = {k: nm.prune(nm.mse(2, 4), v, axis=1) if k in states else v for k, v in arrays.items()}
    np.testing.assert_array_equal(jax.jit(sparse)(arrays, tokens, state=states), jax.jit(f)(hard, tokens))
    grads = jax.jit(jax.grad(lambda p, s: (sparse(p, tokens, state=s) ** 2).sum()))(arrays, states)
    wanted = jax.jit(jax.grad(lambda p: (f(p, tokens) ** 2).sum()))(hard)
    for path, grad in grads.items():
        if path not in states:  # the gradient reaches what is below through experts whose dx is not pruned
            np.testing.assert_allclose(grad, wanted[path], rtol=1e-4, atol=1e-5)
        else:
            assert (grad != wanted[path]).any()
