"""Functions with pruned products: through every kind of program, and honest about the rest.

The laws of every delivery are in tests/delivery_test.py.
"""

import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas

import nmjax as nm
from nmjax.programs.transform import leaves


def draw(seed, *shape, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def every(text):
    return nm.Recipe(((".*", text),))


def mask(w, axis, n=2, m=4):
    """2:4 by sorting in NumPy: ties do not occur."""
    lines = np.moveaxis(np.asarray(w, np.float32), axis, -1)
    groups = np.abs(lines.reshape(*lines.shape[:-1], -1, m))
    kept = np.argsort(np.argsort(-groups, -1), -1) < n
    return np.moveaxis(kept.reshape(lines.shape), -1, axis)


def pruned(w, axis):
    return jnp.where(mask(w, axis), w, 0)


def test_nothing_is_added_to_a_compiled_step():
    """The optimised program is that of the pruned product written by hand."""
    x, w = draw(0, 8, 16), draw(1, 16, 32)
    sparsity = nm.parse("ste(2,4)")
    dims = (((1,), (0,)), ((), ()))
    by_hand = lambda params, x: (nm.dot_general(x, params["w"], dims, sparsity=sparsity) ** 2).sum()
    sparse = nm.transform(lambda params, x: x @ params["w"], every("ste(2,4)"))
    ours = lambda params, x: (sparse(params, x) ** 2).sum()
    texts = []
    for f in (by_hand, ours):
        text = jax.jit(jax.grad(f)).lower({"w": w}, x).compile().as_text()
        texts.append(re.sub(r", metadata=\{[^}]*\}|HloModule [^,]*|[%.][\w.]+|FileNames[^$]*", "", text))
    assert sorted(texts[0].split()) == sorted(texts[1].split())


# ---- through programs ----


def check(f, params, x, axes, rest=()):
    """A transformed function is the function of pruned parameters, with the gradients of straight through."""
    sparse = nm.transform(f, nm.Recipe(tuple((path, "ste(2,4)") for path in axes)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state = sparse.init(params, x)
    assert set(state) == set(axes)
    hard = {k: pruned(v, axes[k]) if k in axes else v for k, v in params.items()}
    wanted, grads = jax.value_and_grad(lambda p: (f(p, x) ** 2).mean())(hard)
    got, ours = jax.jit(jax.value_and_grad(lambda p: (sparse(p, x) ** 2).mean()))(params)
    np.testing.assert_allclose(got, wanted, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-5), ours, grads)
    if not rest:
        made, _ = sparse.harden(params, state)
        jax.tree.map(np.testing.assert_array_equal, made, hard)


def stacked(params, x):
    return lax.scan(lambda h, w: (jnp.tanh(h @ w), h.sum()), x, params["w"])[0]


def stacked_with_closure(params, x):
    return lax.scan(lambda h, w: (jnp.tanh(h @ w @ params["same"]), None), x, params["w"], reverse=True, unroll=2)[0]


def stacked_twice(params, x):
    inner = lambda h, w: (jnp.tanh(h @ w), None)
    return lax.scan(lambda h, w: lax.scan(inner, h, w), x, params["w"])[0]


CASES = {
    "matmul": (lambda p, x: x @ p["w"], {"w": (16, 8)}, {"w": 0}),
    "weight left": (lambda p, x: jnp.einsum("io,bi->ob", p["w"], x), {"w": (16, 8)}, {"w": 0}),
    "transposed": (lambda p, x: x @ p["w"].T, {"w": (8, 16)}, {"w": 1}),
    "swapaxes": (lambda p, x: jnp.einsum("bi,oi->bo", x, jnp.swapaxes(p["w"], 0, 1)), {"w": (16, 8)}, {"w": 0}),
    "reshaped": (lambda p, x: x @ p["w"].reshape(16, 8), {"w": (16, 2, 4)}, {"w": 0}),
    "squeezed": (lambda p, x: x @ p["w"][0], {"w": (1, 16, 8)}, {"w": 1}),
    "two axes": (lambda p, x: jnp.einsum("bij,ijo->bo", x.reshape(-1, 4, 4), p["w"]), {"w": (4, 4, 8)}, {"w": 1}),
    "jit": (lambda p, x: jax.jit(lambda w, x: jax.jit(jnp.matmul)(x, w))(p["w"], x), {"w": (16, 8)}, {"w": 0}),
    "vmap": (lambda p, x: jax.vmap(lambda x: x @ p["w"])(x), {"w": (16, 8)}, {"w": 0}),
    "batched": (
        lambda p, x: jax.vmap(jnp.matmul)(jnp.stack([x, 2 * x]), p["w"]), {"w": (2, 16, 8)}, {"w": 1},
    ),
    "checkpoint": (lambda p, x: jax.checkpoint(lambda w, x: jnp.sin(x @ w))(p["w"], x), {"w": (16, 8)}, {"w": 0}),
    "policy": (
        lambda p, x: jax.checkpoint(
            lambda w, x: jnp.sin(x @ w), policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable
        )(p["w"], x),
        {"w": (16, 8)}, {"w": 0},
    ),
    "scan": (stacked, {"w": (3, 16, 16)}, {"w": 1}),
    "scan with a closure": (stacked_with_closure, {"w": (3, 16, 16), "same": (16, 16)}, {"w": 1, "same": 0}),
    "scan in scan": (stacked_twice, {"w": (2, 3, 16, 16)}, {"w": 2}),
    "scan of checkpoint": (
        lambda p, x: lax.scan(jax.checkpoint(lambda h, w: (jnp.tanh(h @ w), None)), x, p["w"])[0],
        {"w": (3, 16, 16)}, {"w": 1},
    ),
    "cond": (
        lambda p, x: lax.cond(x.sum() > 0, lambda x: x @ p["w"], lambda x: 2 * x @ p["w"], x), {"w": (16, 8)}, {"w": 0},
    ),
    "fori_loop": (lambda p, x: lax.fori_loop(0, 3, lambda i, h: jnp.tanh(h @ p["w"]), x), {"w": (16, 16)}, {"w": 0}),
    "custom_jvp around": (lambda p, x: jax.nn.relu(x @ p["w"]), {"w": (16, 8)}, {"w": 0}),
    "not a product": (lambda p, x: x @ p["w"] + p["b"][None], {"w": (16, 8), "b": (8,)}, {"w": 0}),
    "convolution": (
        lambda p, x: lax.conv_general_dilated(
            x.reshape(2, 4, 4, 4), p["w"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        ),
        {"w": (3, 3, 4, 8)}, {"w": 2},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_parameters_are_followed_through_programs(case):
    f, shapes, axes = CASES[case]
    params = {name: draw(n, *shape) / 3 for n, (name, shape) in enumerate(shapes.items())}
    check(f, params, draw(9, 8, 16), axes)


def test_a_while_loop_is_followed_forward():
    f = lambda p, x: lax.while_loop(lambda h: jnp.abs(h).sum() > 1, lambda h: 0.1 * h @ p["w"], x)
    params, x = {"w": draw(0, 16, 16)}, draw(1, 8, 16)
    sparse = nm.transform(f, every("ste(2,4)"))
    wanted = f({"w": pruned(params["w"], 0)}, x)
    np.testing.assert_allclose(sparse(params, x), wanted, rtol=0, atol=1e-5 * float(jnp.abs(wanted).max()))


def test_the_condition_of_a_while_loop_is_pruned_too():
    """A fixed point of the pruned function, not of the dense one."""
    solve = lambda p, x: lax.while_loop(
        lambda h: jnp.abs(jnp.tanh(h @ p["w"] + x) - h).max() > 1e-3,
        lambda h: jnp.tanh(h @ p["w"] + x),
        jnp.zeros_like(x),
    )
    params, x = {"w": draw(0, 16, 16) / 8}, draw(1, 8, 16)
    sparse, hard = nm.transform(solve, every("ste(2,4)")), {"w": pruned(params["w"], 0)}
    got, wanted = sparse(params, x), solve(hard, x)
    assert float(jnp.abs(jnp.tanh(wanted @ hard["w"] + x) - wanted).max()) < 1e-3
    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-6)
    made, _ = sparse.harden(params, sparse.init(params, x))
    np.testing.assert_array_equal(made["w"], hard["w"])


# ---- compilation ----


def test_equal_transforms_share_a_compilation():
    f, traces = (lambda p, x: traces.append(0) or x @ p["w"]), []
    run = jax.jit(lambda sparse, p, x: sparse(p, x), static_argnums=0)
    for _ in range(3):
        run(nm.transform(f, every("ste(2,4)")), {"w": draw(0, 16, 8)}, draw(1, 8, 16))
    assert len(traces) == 1


# ---- what is not pruned ----

MATMUL = lambda p, x: x @ p["w"]


def test_matrices_that_no_product_takes_are_told():
    f = lambda p, x: x @ jnp.tanh(p["w"]) + p["table"][:1] + x @ p["used"] + p["bias"][None]
    params = {"w": draw(0, 16, 16), "table": draw(1, 4, 16), "used": draw(2, 16, 16), "bias": draw(3, 16)}
    sparse, x = nm.transform(f, every("ste(2,4)")), draw(4, 8, 16)
    with pytest.warns(UserWarning, match=r"(?s)so they stay dense:\n  table of shape \(4, 16\).*\n  w of"):
        assert list(sparse.init(params, x)) == ["used"]
    rules = r'put these rules first: \(r"table", "dense"\), \(r"w", "dense"\).$'
    with pytest.raises(ValueError, match=rf"used by tanh\n.* {rules}"):
        sparse.init(params, x, strict=True)
    plan = sparse.plan(params, x)
    assert plan.uncovered == (("table", (4, 16)), ("w", (16, 16)))
    assert [row.path for row in plan.layers] == ["used"]
    quiet = nm.transform(f, nm.Recipe((("w|table", "dense"), (".*", "ste(2,4)"))))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert list(quiet.init(params, x, strict=True)) == ["used"]


def test_a_product_of_two_parameters_is_left_alone():
    f = lambda p, x: x @ (p["a"] @ p["b"])
    params, x = {"a": draw(0, 16, 4), "b": draw(1, 4, 8)}, draw(2, 8, 16)
    sparse = nm.transform(f, every("ste(2,4)"))
    np.testing.assert_array_equal(jax.jit(sparse)(params, x), jax.jit(f)(params, x))
    with pytest.warns(UserWarning, match=r"a of shape \(16, 4\), used by dot_general"):
        sparse.init(params, x)


def test_a_tied_embedding_has_no_single_final_form():
    f = lambda p, tokens: p["e"][tokens] @ p["e"].T
    params = {"e": draw(0, 32, 16)}
    sparse = nm.transform(f, every("ste(2,4)"))
    state = sparse.init(params, jnp.arange(4))
    with pytest.raises(
        ValueError,
        match=r'^e: y_w=.* because it also goes into gather. Leave it dense: \(r"e", "dense"\)',
    ):
        sparse.harden(params, state)


ESCAPES = {
    "scan": lambda w: lax.scan(lambda c, w: (c, w.T), 0.0, w[None])[1][0],
    "cond": lambda w: lax.cond(jnp.sum(w) > 0, lambda a, b: a.T, lambda a, b: b, w, w),
    "while": lambda w: lax.while_loop(lambda c: c[0] < 1, lambda c: (c[0] + 1, w.T), (0, jnp.zeros(w.shape)))[1],
}


@pytest.mark.parametrize("by", ESCAPES)
def test_a_parameter_that_leaves_a_program_is_noted(by):
    sparse = nm.transform(lambda p, x: x @ p["w"] @ ESCAPES[by](p["w"]), every("ste(2,4)"))
    params, x = {"w": draw(0, 16, 16)}, draw(1, 8, 16)
    with pytest.raises(ValueError, match=f"no single final form, because it also goes into .*the result of {by}"):
        sparse.harden(params, sparse.init(params, x))


def test_a_parameter_is_followed_through_a_checkpoint_that_returns_it():
    params, x = {"w": draw(0, 16, 8)}, draw(1, 8, 16)
    through = nm.transform(lambda p, x: x @ jax.checkpoint(lambda w: (w.T, 2.0))(p["w"])[0].T, every("ste(2,4)"))
    plain = nm.transform(lambda p, x: x @ p["w"], every("ste(2,4)"))
    np.testing.assert_array_equal(through(params, x), plain(params, x))
    hard = [f.harden(params, f.init(params, x))[0]["w"] for f in (through, plain)]
    np.testing.assert_array_equal(*hard)


def test_a_parameter_that_is_a_result_is_noted():
    sparse = nm.transform(lambda p, x: (x @ p["w"], p["w"]), every("ste(2,4)"))
    params, x = {"w": draw(0, 16, 16)}, draw(1, 8, 16)
    with pytest.raises(ValueError, match="because it also goes into the result"):
        sparse.harden(params, sparse.init(params, x))


def test_a_stack_that_is_also_used_whole():
    """The scan contracts one axis of it, and the other product two."""
    f = lambda p, x: stacked(p, x) + jnp.einsum("lbi,lio->bo", jnp.stack([x] * 3), p["w"])
    params, x = {"w": draw(0, 3, 16, 16)}, draw(1, 8, 16)
    with pytest.raises(
        ValueError, match="keeps arrays for this parameter, and products take it in 2 different layouts"
    ):
        nm.transform(f, every("mvue(2,4)")).init(params, x)
    with pytest.raises(ValueError, match=r"contract different axes of this parameter, of shape \(3, 16, 16\)"):
        nm.transform(f, every("ste(2,4)")).init(params, x)
    nm.transform(f, every("ste(2,4)"), mask_per_product=True).init(params, x)


def test_the_state_of_other_parameters_is_refused():
    params, x = {"w": draw(0, 16, 8)}, draw(1, 8, 16)
    sparse = nm.transform(MATMUL, every("ste(2,4)"))
    state = sparse.init(params, x)
    other = {"params": params}
    calls = [lambda: sparse.harden(other, state), lambda: sparse.set_step(other, state, 1)]
    calls += [lambda: sparse.violations(other, state), lambda: sparse(other, x, state=state)]
    for call in calls:
        with pytest.raises(ValueError, match="the state is of 'w', which params does not have"):
            call()


def test_effects_names_and_leaves_that_are_no_arrays(capsys):
    def f(params, x):
        jax.debug.print("{}", params["w"].sum())
        jax.debug.callback(lambda w: None, params["w"])
        return params["act"](x @ checkpoint_name(params["w"], "w"))

    params, x = {"w": draw(0, 16, 8), "act": jnp.tanh}, draw(1, 8, 16)
    sparse = nm.transform(f, every("ste(2,4)"))
    np.testing.assert_allclose(sparse(params, x), jnp.tanh(x @ pruned(params["w"], 0)), rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match="two parameters have the path 'a/b'"):
        sparse({"a/b": x, "a": {"b": x}}, x)


def test_shardings_of_results_stay():
    mesh = jax.make_mesh((4,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    wanted = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "a"))
    f = lambda p, x: jax.jit(lambda w, x: x @ w, out_shardings=wanted)(p["w"], x)
    got = jax.jit(nm.transform(f, every("ste(2,4)")))({"w": draw(0, 16, 8)}, draw(1, 8, 16))
    assert got.sharding.is_equivalent_to(wanted, 2)


def test_a_left_weight_on_an_explicit_mesh():
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    spec = jax.sharding.PartitionSpec
    with jax.sharding.set_mesh(mesh):
        w = jax.device_put(draw(0, 16, 8), jax.sharding.NamedSharding(mesh, spec("b", None)))
        x = jax.device_put(draw(1, 8, 16), jax.sharding.NamedSharding(mesh, spec("a", "b")))
        f = lambda p, x: jnp.einsum("io,bi->ob", p["w"], x, out_sharding=spec(None, "a"))
        sparse = nm.transform(f, every("ste(2,4)"))
        assert list(sparse.init({"w": w}, x)) == ["w"]
        got = jax.jit(sparse)({"w": w}, x)
    assert got.sharding.spec == spec(None, "a")
    wanted = (draw(1, 8, 16) @ pruned(draw(0, 16, 8), 0)).T
    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-6 * float(jnp.abs(wanted).max()))


def test_a_state_can_be_donated_after_a_step_is_set():
    params = {"a": draw(0, 16, 16), "b": draw(1, 16, 16)}
    sparse = nm.transform(lambda p, x: x @ p["a"] @ p["b"], every("ste(2,4); dw_g=mvue(2,4)"))
    x = draw(2, 8, 16)
    state = sparse.set_step(params, sparse.init(params, x), 3)
    step = jax.jit(lambda state, p, x: (state, sparse(p, x, state=state).sum()), donate_argnums=0)
    assert jnp.isfinite(step(state, params, x)[1])


def test_a_convolution_keeps_the_sharding_of_its_result():
    mesh = jax.make_mesh((4,), ("a",), axis_types=(jax.sharding.AxisType.Explicit,))
    spec = jax.sharding.PartitionSpec
    with jax.sharding.set_mesh(mesh):
        x, w = jax.device_put(draw(0, 4, 4, 8), jax.sharding.NamedSharding(mesh, spec("a"))), draw(1, 4, 4, 1)
        conv = jax.lax.conv_general_dilated
        f = lambda p, x: conv(x, p["w"], (1,), "SAME", out_sharding=spec("a"))
        got = jax.jit(nm.transform(f, every("ste(2,4)")))({"w": w}, x)
    assert got.sharding.spec == spec("a", None, None)


def test_only_the_branch_of_the_platform_is_compiled():
    """A kernel of a GPU does not compile on a CPU."""
    kernel = lambda x, w: pallas.pallas_call(lambda *refs: None, jax.ShapeDtypeStruct((8, 8), x.dtype))(x, w)
    f = lambda p, x: jax.lax.platform_dependent(x, p["w"], cpu=jnp.matmul, cuda=kernel)
    x, w = draw(0, 8, 16), draw(1, 16, 8)
    got = jax.jit(nm.transform(f, every("ste(2,4)")))({"w": w}, x)
    np.testing.assert_allclose(got, x @ pruned(w, 0), rtol=1e-5)
    f = lambda p, x: jax.lax.platform_dependent(x, p["w"], default=jnp.matmul, cuda=kernel)
    np.testing.assert_array_equal(jax.jit(nm.transform(f, every("ste(2,4)")))({"w": w}, x), got)


@pytest.mark.parametrize(
    ("call", "kind", "said"),
    [
        (lambda: nm.transform(3, every("ste(2,4)")), TypeError, "takes a function"),
        (lambda: nm.transform(max, "ste(2,4)"), TypeError, "takes a Recipe"),
        (
            lambda: nm.transform(max, every("ste(2,4)"), seed="a"),
            TypeError, "^transform: seed must be a whole number, got 'a'",
        ),
        (lambda: nm.transform(max, every("ste(2,4)"), seed=2**64), ValueError, "an int seed must fit 64 bits"),
        (
            lambda: nm.transform(MATMUL, every("mvue(2,4)"))({"w": jnp.ones((8, 8))}, jnp.ones((8, 8))),
            ValueError, r"^w: .* reads what init returns: write state = f.init\(params, ...\)",
        ),
        (
            lambda: nm.transform(MATMUL, every("ste(2,4)")).init({"w": jnp.ones((6, 8))}, jnp.ones((8, 6))),
            ValueError, r"The recipe cannot be carried out:\n  w: y_w=.* whose 6 values do not divide",
        ),
        (
            lambda: nm.transform(MATMUL, nm.Recipe((("v", "ste(2,4)"),))).init(
                {"w": jnp.ones((8, 8))}, jnp.ones((8, 8))
            ),
            ValueError, "These rules of the recipe apply to no layer",
        ),
        (
            lambda: nm.transform(lambda p, x: x @ p["w"] @ p["w"].T, every("s_ste(2,4)")).init(
                {"w": jnp.ones((8, 8))}, jnp.ones((8, 8))
            ),
            ValueError, r'contract different axes .*\(r"w", "dense"\)\.$',
        ),
        (
            lambda: nm.transform(lambda p, x: x @ p["w"] @ p["w"].T, every("s_ste(2,4)"), mask_per_product=True).init(
                {"w": jnp.ones((8, 8))}, jnp.ones((8, 8))
            ),
            ValueError, "keeps arrays for this parameter, and products take it in 2 different layouts",
        ),
    ],
)  # fmt: skip
def test_refusals(call, kind, said):
    with pytest.raises(kind, match=said):
        call()


# ---- parameters that several products take ----


def tied(p, x):
    return jnp.tanh(x @ p["w"]) @ p["w"].T


def refuses(sparse, params, x, said):
    """init, the call and the plan refuse a function, in the same words."""
    with pytest.raises(ValueError, match=rf"The recipe cannot be carried out:\n  w: .*{said}"):
        sparse.init(params, x)
    assert [path for path, reason in sparse.plan(params, x).refused if re.search(said, reason)] == ["w"]
    if not any(v in str(sparse.recipe) for v in ("soft", "mvue", "linear", "sdg")):  # without state
        with pytest.raises(ValueError, match=rf"^w: .*{said}"):
            sparse(params, x)


@pytest.mark.slow
def test_products_along_different_axes_of_a_parameter():
    """Refused, unless the caller says that each product may have a mask of its own."""
    params, x = {"w": draw(0, 16, 8)}, draw(1, 8, 16)
    for text in ("ste(2,4)", "sr_ste(2,4)", "mdgf(2,4,linear(1,0,10))", "bdwp(2,4)"):
        refuses(nm.transform(tied, every(text)), params, x, "products contract different axes of this parameter")
    sparse = nm.transform(tied, every("ste(2,4)"), mask_per_product=True)
    dropped = [pruned(params["w"], axis) - params["w"] for axis in (0, 1)]
    by_hand = lambda p, x: jnp.tanh(x @ (p["w"] + dropped[0])) @ (p["w"] + dropped[1]).T
    hand = jax.value_and_grad(lambda p: (by_hand(p, x) ** 2).sum())(params)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * float(jnp.abs(b).max())),
        jax.value_and_grad(lambda p: (sparse(p, x) ** 2).sum())(params), hand,
    )  # fmt: skip
    assert repr(sparse).endswith("mask_per_product=True)")
    state = sparse.init(params, x)
    with pytest.raises(ValueError, match="no single final form, because products take it in several layouts"):
        sparse.harden(params, state)


@pytest.mark.parametrize("text", ["dw_g=mse(2,4)", "sdgp(2,4)", "y_x=ste(mse(2,4))"])
def test_tied_products_that_do_not_prune_the_parameter(text):
    nm.transform(tied, every(text)).init({"w": draw(0, 16, 8)}, draw(1, 8, 16))


SAME_AXIS = {
    "twice": lambda p, x: jnp.tanh(x @ p["w"]) @ p["w"],
    "left and right": lambda p, x: jnp.einsum("io,bi->bo", p["w"], x) @ p["w"],
    "transposed twice": lambda p, x: jnp.tanh(x @ p["w"]) @ p["w"].T.T,
    "transposed in the product": lambda p, x: jnp.tanh(x @ p["w"]) @ jnp.swapaxes(p["w"], 0, 1)[None][0].T,
    "in a scan and outside": lambda p, x: lax.scan(lambda h, _: (jnp.tanh(h @ p["w"]), None), x, None, 2)[0] @ p["w"],
}


@pytest.mark.parametrize("case", SAME_AXIS)
def test_products_along_one_axis_of_a_parameter(case):
    check(SAME_AXIS[case], {"w": draw(0, 16, 16) / 3}, draw(1, 8, 16), {"w": 0}, rest="several layouts")


def test_layers_of_a_stack_that_are_transposed_before_some_products():
    def f(p, x):
        body = lambda h, w: (jnp.tanh(jnp.einsum("bi,oi->bo", h @ w, jnp.swapaxes(w, 0, 1))), None)
        return lax.scan(body, x, p["w"])[0]

    check(f, {"w": draw(0, 3, 16, 16) / 3}, draw(1, 8, 16), {"w": 1}, rest="several layouts")


@pytest.mark.slow
def test_a_call_that_takes_the_parameter_along_another_axis_than_init():
    f = lambda p, x, back: x @ (p["w"].T if back else p["w"])
    params, x = {"w": draw(0, 16, 16)}, draw(1, 8, 16)
    for text in ("ste(2,4)", "s_ste(2,4)"):
        sparse = nm.transform(f, every(text))
        state = sparse.init(params, x, back=False)
        sparse(params, x, back=False, state=state)
        with pytest.raises(ValueError, match="^w: products contract different axes of this parameter"):
            sparse(params, x, back=True, state=state)


# ---- derivatives inside the function ----

scalar = lambda p, x: jnp.tanh(x @ p["w"]).sum()


@jax.custom_vjp
def own_rule(w, x):
    return x @ w


own_rule.defvjp(lambda w, x: (x @ w, (w, x)), lambda wx, g: (wx[1].T @ g, g @ wx[0].T))
DERIVED = {
    "force": lambda p, x: jax.grad(scalar, 1)(p, x),
    "one for each row": lambda p, x: jax.vmap(jax.grad(lambda x: scalar(p, x[None])))(x),
    "compiled": lambda p, x: jax.jit(jax.grad(jax.jit(scalar), 1))(p, x),
    "in a checkpoint": lambda p, x: jax.checkpoint(jax.grad(scalar, 1))(p, x),
    "of a checkpoint of a scan": lambda p, x: jax.grad(
        jax.checkpoint(lambda x: lax.scan(lambda h, _: (jnp.tanh(h @ p["w"]), None), x, None, 2)[0].sum())
    )(x),
    "in a loop": lambda p, x: lax.fori_loop(0, 2, lambda i, x: x - jax.grad(scalar, 1)(p, x), x),
    "penalty": lambda p, x: scalar(p, x) + (jax.grad(scalar, 1)(p, x) ** 2).sum(),
    "training step": lambda p, x: jax.tree.map(lambda w, g: w - g, p, jax.grad(scalar)(p, x)),
    "gradient of a linear loss": lambda p, x: jax.grad(lambda p: (x @ p["w"]).sum())(p),
    "step, then a call": lambda p, x: x @ (p["w"] - jax.grad(scalar)(p, x)["w"]),
    "value alone": lambda p, x: jax.value_and_grad(scalar)(p, x)[0],
    "transpose of a linear function": lambda p, x: jax.linear_transpose(lambda x: x @ p["w"], x)(x)[0],
    "rule for vjp": lambda p, x: jax.grad(lambda x: jnp.tanh(own_rule(p["w"], x)).sum())(x) + x @ p["w"],
    "tangent of x": lambda p, x: jax.jvp(lambda x: x @ p["w"], (x,), (x,))[1],
    "tangent of w": lambda p, x: jax.jvp(lambda p: jnp.tanh(x @ p["w"]), (p,), (jax.tree.map(jnp.sin, p),))[1],
    "w as its own tangent": lambda p, x: jax.jvp(lambda p: jnp.tanh(x @ p["w"]), (p,), (p,))[1],
    "laplacian": lambda p, x: jax.jvp(lambda x: jax.grad(scalar, 1)(p, x), (x,), (x,))[1],
    "jacfwd": lambda p, x: jax.jacfwd(scalar, 1)(p, x),
    "hessian": lambda p, x: jax.hessian(lambda x: scalar(p, x[None]))(x[0]),
    "of a convolution": lambda p, x: jax.grad(
        lambda x: jnp.tanh(lax.conv_general_dilated(x.T[None], p["w"].T[..., None], (1,), "SAME")).sum()
    )(x),
    "of a grouped product": lambda p, x: jax.grad(
        lambda x: jnp.tanh(lax.ragged_dot(x, p["w"][None], jnp.array([8]))).sum()
    )(x),
}  # fmt: skip


@pytest.mark.parametrize("case", DERIVED)
def test_a_derivative_of_a_pruned_product_inside_the_function_is_refused(case):
    """Whatever the method: its gradient rule and backward slots would be lost, and w be pruned along another axis."""
    params, x = {"w": draw(0, 16, 16)}, draw(1, 8, 16)
    for text in ("ste(2,4)", "sr_ste(2,4)", "dw_g=mvue(2,4)", "y_x=ste(mse(2,4))"):
        said = "is part of a derivative that the function takes itself.* sparse = nm.transform"
        refuses(nm.transform(DERIVED[case], every(text)), params, x, said)
    dense = nm.transform(DERIVED[case], every("dense"))
    assert not dense.plan(params, x).refused
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * float(jnp.abs(b).max()))
    jax.tree.map(close, dense(params, x), DERIVED[case](params, x))


ALLOWED = {
    "of what follows the product": lambda p, x: jax.grad(lambda h: jnp.tanh(h @ jnp.sin(x).T).sum())(x @ p["w"]),
    "of what comes before it": lambda p, x: jax.grad(lambda x: jnp.tanh(x @ x.T).sum())(x) @ p["w"],
    "in a scope with such a name": lambda p, x: jax.named_call(lambda x: x @ p["w"], name="transpose(jvp())")(x),
}


@pytest.mark.parametrize("case", ALLOWED)
def test_a_derivative_that_reaches_no_pruned_product_may_stand_inside(case):
    check(ALLOWED[case], {"w": draw(0, 16, 16) / 3}, draw(1, 8, 16), {"w": 0})


@pytest.mark.slow
def test_a_transformed_function_may_be_differentiated_anywhere():
    """The marks of a derivative are those inside the function, not those around it."""
    f = lambda p, x: jnp.tanh(jax.checkpoint(lambda w, x: jnp.sin(x @ w))(p["w"], x) @ p["w"]).sum()
    params, x = {"w": draw(0, 16, 16) / 3}, draw(1, 8, 16)
    sparse, hard = nm.transform(f, every("ste(2,4)")), {"w": pruned(params["w"], 0)}
    force = lambda f: lambda p: (jax.checkpoint(jax.grad(f, 1))(p, x) ** 2).sum()
    ways = {
        "grad": lambda f: lambda p: jax.jit(jax.grad(f))(p, x),
        "grad of grad": lambda f: jax.grad(force(f)),
        "jvp of grad": lambda f: lambda p: jax.jvp(jax.grad(f, 1), (p, x), ({"w": jnp.cos(params["w"])}, x)),
        "linearize": lambda f: lambda p: jax.linearize(lambda x: f(p, x), x)[1](x),
        "in a scan": lambda f: lambda p: lax.scan(lambda x, _: (jax.grad(f, 1)(p, x), None), x, None, 2)[0],
    }
    for name, way in ways.items():
        jax.tree.map(
            lambda a, b, name=name: np.testing.assert_allclose(
                a, b, rtol=0, atol=1e-5 * float(jnp.abs(b).max()), err_msg=name
            ),
            way(sparse)(params), way(f)(hard),
        )  # fmt: skip


def energy(p, x):
    return jnp.tanh(jnp.tanh(x @ p["a"]) @ p["b"]).sum()


ENERGIES = {
    "ste(2,4)": (0.0, 1),
    "sr_ste(2,4,lam=0.5)": (0.0, 1),
    "mdgf(2,4,linear(1,0,10))": (0.5, 1),
    'mdgf(2,4,linear(1,0,10),gradient="autodiff")': (0.5, 0.5),
}
"""By method: what is left of a dropped value at step 5, and of its gradient."""


@pytest.mark.slow
@pytest.mark.parametrize("text", ENERGIES)
def test_the_gradient_of_a_transformed_energy(text):
    """The force, a loss on it, and the gradient of that loss are those of an energy of weights pruned by hand."""
    params, x, target = {"a": draw(0, 16, 8) / 2, "b": draw(1, 8, 4)}, draw(2, 8, 16), draw(3, 8, 16)
    sparse = nm.transform(energy, every(text))
    state = sparse.set_step(params, sparse.init(params, x), 5)
    value, gradient = ENERGIES[text]
    masks = {name: mask(w, 0) for name, w in params.items()}
    left = lambda name, factor: jnp.where(masks[name], 1, factor)
    hard = {name: w * left(name, value) for name, w in params.items()}
    loss = lambda force: lambda p: ((force(p, x) - target) ** 2).mean()
    ours, by_hand = jax.grad(lambda p, x: sparse(p, x, state=state), 1), jax.grad(energy, 1)
    np.testing.assert_allclose(ours(params, x), by_hand(hard, x), rtol=0, atol=1e-5)
    found = jax.jit(jax.value_and_grad(loss(ours)))(params)
    wanted, grads = jax.value_and_grad(loss(by_hand))(hard)
    decay = 0.5 if text.startswith("sr_ste") else 0
    grads = {n: g * left(n, gradient) + decay * jnp.where(masks[n], 0, params[n]) for n, g in grads.items()}
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-5), found, (wanted, grads))


@pytest.mark.slow
@pytest.mark.parametrize("text", ["s_ste(2,4)", "dw_g=mvue(2,4)", "sdgp(2,4)", "bdwp(2,4)"])
def test_a_loss_on_the_gradient_of_an_energy_needs_empty_backward_slots(text):
    params, x = {"a": draw(0, 16, 8), "b": draw(1, 8, 4)}, draw(2, 8, 16)
    sparse = nm.transform(energy, every(text))
    state = sparse.set_step(params, sparse.init(params, x), 5)
    force = lambda p: jax.grad(lambda x: sparse(p, x, state=state))(x)
    assert jnp.isfinite(force(params)).all()
    with pytest.raises(TypeError, match="has no derivative beyond the gradient of its layer"):
        jax.grad(lambda p: (force(p) ** 2).sum())(params)


def test_vectors_of_a_scanned_stack_are_no_matrices():
    def f(p, x):
        layer = lambda h, w: (jnp.tanh((h * w["scale"][None]) @ w["kernel"]) + w["bias"][None], None)
        return lax.scan(layer, x, p)[0]

    params = {"kernel": draw(0, 3, 16, 16), "scale": draw(1, 3, 16), "bias": draw(2, 3, 16)}
    sparse, x = nm.transform(f, every("ste(2,4)")), draw(3, 8, 16)
    assert list(sparse.init(params, x, strict=True)) == ["kernel"]
    assert (sparse.plan(params, x).uncovered, sparse.plan(params, x).missed) == ((), ())
    whole = nm.transform(lambda p, x: f(p, x) + p["bias"][:1], every("ste(2,4)"))
    with pytest.raises(ValueError, match=r"bias of shape \(3, 16\), used by"):  # a table too
        whole.init(params, x, strict=True)


# ---- other libraries, flags and shapes ----


@pytest.mark.slow
def test_a_linen_model_is_such_a_function():
    model = linen.Sequential([linen.Dense(16), linen.relu, linen.Dense(8)])
    x = draw(0, 4, 16)
    params = model.init(jax.random.key(1), x)
    sparse = nm.transform(model.apply, nm.Recipe(((".*/kernel", "ste(2,4)"),)))
    assert list(sparse.init(params, x)) == ["params/layers_0/kernel", "params/layers_2/kernel"]
    y = jax.jit(sparse)(params, x)
    with nm.linen.sparsify(every("ste(2,4)")):
        np.testing.assert_array_equal(y, jax.jit(model.apply)(model.init(jax.random.key(1), x), x))


def test_flags_reach_the_function_and_results_keep_their_structure():
    def f(params, x, *, train, scale=1.0, name="y"):
        y = x @ params["w"]
        return {name: scale * y if train else y, "name": name, "count": 3, "nothing": None}

    params, x = {"w": draw(0, 16, 8)}, draw(1, 8, 16)
    sparse = nm.transform(f, every("ste(2,4)"))
    got = sparse(params, x, train=True, scale=2.0, name="z")
    assert (set(got), got["name"], got["count"], got["nothing"]) == ({"z", "name", "count", "nothing"}, "z", 3, None)
    np.testing.assert_array_equal(got["z"], 2 * sparse(params, x, train=False)["y"])


def test_a_plan_of_shapes():
    params = jax.eval_shape(lambda: {"w": jnp.ones((3, 64, 64)), "head": jnp.ones((64, 10))})
    f = lambda p, x: stacked(p, x) @ p["head"]
    sparse = nm.transform(f, nm.Recipe((("head", "dense"), (".*", "s_ste(2,4)"))))
    plan = sparse.plan(params, jax.ShapeDtypeStruct((32, 64), jnp.float32))
    assert plan.forward == (2 * 32 * 64 * (3 * 64 + 10), 2 * 32 * 64 * (3 * 32 + 10))
    assert [(row.path, row.hardened) for row in plan.layers] == [("head", "dense"), ("w", "2:4")]
    assert not plan.refused


def test_a_plan_counts_what_the_program_computes():
    """A product of the same shapes twice, and products that no parameter is in."""

    def f(params, x):
        h = jnp.tanh(x @ params["w"])
        return jax.nn.softmax(h @ h.T) @ jnp.tanh(h @ params["w"]) @ params["head"].T

    params, x = {"head": draw(0, 4, 16), "w": draw(1, 16, 16)}, draw(2, 8, 16)
    plan = nm.transform(f, nm.Recipe({"w": "ste(2,4)"})).plan(params, x)
    rows = {row.path: row for row in plan.layers}
    assert (rows["w"].flops, rows["head"].flops) == (2 * 2 * 8 * 16 * 16, 2 * 8 * 16 * 4)
    assert plan.elsewhere == 2 * 2 * 8 * 8 * 16
    assert plan.forward == (8192 + 1024 + 4096, 4096 + 1024 + 4096)
    once = nm.transform(lambda p, x: jnp.tanh(x @ p["w"]) @ p["head"].T, every("ste(2,4)")).plan(params, x)
    assert {row.path: row.reads_data for row in once.layers} == {"head": False, "w": True}
    assert once.over(1, data_gradients=False)[0] == 2 * 4096 + 3 * 1024


def test_a_plan_refuses_what_init_refuses_and_tells_what_init_warns_of():
    f = lambda p, x: x @ jnp.tanh(p["w"]) + x @ p["used"]
    params, x = {"w": draw(0, 16, 16), "used": draw(1, 16, 16)}, draw(2, 8, 16)
    recipe = nm.Recipe((("w", "ste(2,4)"), ("used", "dense")))
    plan = nm.transform(f, recipe).plan(params, x)
    assert (plan.missed, plan.refused) == (("w",), ())
    assert "Parameters that a rule matches and no registered layer has, so they stay dense: w 16x16" in plan._notes()
    with pytest.warns(UserWarning, match="no product takes them"):
        assert nm.transform(f, recipe).init(params, x) == {}
    plan = nm.transform(f, nm.Recipe((("v", "ste(2,4)"), (".*", "dense")))).plan(params, x)
    reason = "it matches no parameter's whole path, or earlier rules decide for its parameters."
    assert (plan.missed, plan.refused) == ((), (("the rule 'v'", reason),))


def test_leaves_are_named_by_their_keys():
    assert list(leaves({"a": [1.0, {"b": 2.0}], "c": (3.0,)})) == ["a/0", "a/1/b", "c/0"]


@pytest.mark.parametrize("seed", [0, 1])
def test_another_seed_is_other_noise(seed):
    params, x = {"w": draw(0, 16, 8)}, draw(1, 8, 16)
    states = [nm.transform(lambda p, x: x @ p["w"], every("mvue(2,4)"), s).init(params, x) for s in (seed, seed + 1)]
    assert (states[0]["w"].words != states[1]["w"].words).any()


def test_products_of_a_scan_in_a_checkpoint_that_is_linearized():
    """Its primal part becomes a call of a closed program, which has a name of its own in JAX."""
    turn = lambda p: lambda c, _: (jnp.tanh(c @ p["w"]), None)
    run = lambda p: jax.checkpoint(lambda x: lax.scan(turn(p), x, None, length=2)[0])
    f = lambda p, x: jax.linearize(run(p), x)[0]
    params, x = {"w": draw(0, 16, 16)}, draw(1, 8, 16)
    names = {equation.primitive.name for equation in jax.make_jaxpr(f)(params, x).eqns}
    assert names & {"closed_call", "eval_jaxpr"}
    with pytest.raises(ValueError, match=r"^w: a product with this parameter, of shape \(16, 16\), is part of a deriv"):
        nm.transform(f, every("ste(2,4)"))(params, x)
