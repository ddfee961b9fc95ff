"""Products with chosen rows: compacted and emulated give one value, in every shape, transformation and mesh."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import nmjax as nm
from nmjax.products import compaction
from nmjax.products.operations import as_conv, as_dot
from nmjax.products.routes import explain
from tests.products.common import MATMUL, TOKENS, fast_jit, moves, near, normal, placed, products
from tests.products.products_test import DOTS

SLOTS = {  # the product that each one compacts
    "dw_g=rows(mvue(1,4))": "dw",
    "dw_x=rows(mvue(2,4))": "dw",
    "dw_g=rows(mvue(2,4),by='both')": "dw",
    "dw_x=raw(rows(mse(2,4),by='both'))": "dw",
    "y_x=ste(rows(mse(2,4)))": "y",
    "y_w=sr_ste(rows(mse(1,2)),0.1)": "y",
    "y_w=rows(soft(2,4,scale='one'))": "y",
    "dx_g=rows(uniform(1,4))": "dx",
    "dx_w=rows(mvue(1,2),by='both')": "dx",
    "dw_g=rows(mvue(1,4)); dw_x=mse(2,4); y_w=ste(mse(2,4))": "dw",
    "dw_g=rows(mvue(2,4)); dw_x=rows(mvue(1,4)); dx_g=rows(mse(2,4))": "dw",
}
MERGED = {
    "tokens, merged": ((2, 6, 12), (12, 16), (((2,), (0,)), ((), ()))),
    "two contracted, merged": ((8, 2, 6), (2, 6, 16), (((1, 2), (0, 1)), ((), ()))),
}
SHAPES = {name: DOTS[name] for name in DOTS if not {"vector", "product"} & {*name.split()}} | MERGED


close = functools.partial(near, bits=20)


def dot_of(dims, text, **more):
    """A function of x, w and a backend."""
    sparsity = nm.parse(text)
    return lambda x, w, backend: nm.dot_general(
        x, w, dims, sparsity=sparsity, ctx=nm.Ctx(5, 3), backend=backend, **more
    )  # fmt: skip


def both(f, x, w, jit=fast_jit):
    """y, dx and dw, compacted and emulated."""
    g = normal(9, *jax.eval_shape(functools.partial(f, backend="xla"), x, w).shape)
    run = lambda backend: jit(lambda x, w: products(functools.partial(f, backend=backend), x, w, g))(x, w)
    return run("compact"), run("xla")


def fitting_cases():
    for i, (shape, text) in enumerate(itertools.product(SHAPES, SLOTS)):
        if i % 5 == 0 or "merged" in shape or "batch" in shape:
            yield shape, text


@pytest.mark.sampled
@pytest.mark.parametrize(("shape", "text"), list(fitting_cases()))
def test_a_compacted_dot_has_the_value_of_the_emulated_one(shape, text):
    lhs, rhs, dims = SHAPES[shape]
    close(*both(dot_of(dims, text), normal(0, *lhs), normal(1, *rhs)))


@pytest.mark.parametrize("text", SLOTS)
def test_the_product_multiplies_fewer_rows(text):
    x, w = normal(0, 16, 8), normal(1, 8, 24)

    def sizes(backend):
        """The multiplications of y, dx and dw in the program, by their number of terms."""
        f = functools.partial(dot_of(MATMUL, text), backend=backend)
        jaxpr = jax.make_jaxpr(lambda x, w: products(f, x, w, jnp.ones((16, 24))))(x, w)
        return [cost for _, cost in nm.flops.counted(jaxpr.jaxpr, "layer")]

    n, m = nm.parse(text).slots["dw_x" if "dw_x=rows(mvue(1" in text else text.partition("=")[0]].pattern
    dense, few = sizes("xla"), sizes("compact")
    at = ("y", "dx", "dw").index(SLOTS[text])
    assert few[at] * m == dense[at] * n


@pytest.mark.parametrize("backend", ["compact", "xla"])
def test_padding_is_skipped_without_a_change_of_dw_and_more_rows_than_said_are_nan(backend):
    x, w, g = normal(0, 4, 16, 8), normal(1, 8, 24), normal(2, 4, 16, 24)
    lengths = jnp.array([12, 9, 0, 1])
    whole = jnp.where(jnp.arange(16)[None, :, None] < lengths[:, None, None], g, 0)
    dw = lambda text, g: jax.jit(
        lambda x, w, g: products(
            lambda x, w: nm.einsum("bti,io->bto", x, w, sparsity=nm.parse(text), backend=backend), x, w, g
        )
    )(x, w, g)
    found, dense = dw("dw_g=rows(nonzeros(12,16))", whole), dw("dense", whole)
    near(found, dense, bits=20)
    assert jnp.isnan(dw("dw_g=rows(nonzeros(11,16))", whole)[2]).all()


@pytest.mark.sampled
@pytest.mark.parametrize("text", ["dw_g=rows(mvue(1,4))", "dw_x=rows(mvue(2,4))", "dx_g=rows(mse(1,2))",
                                  "y_w=ste(rows(mse(1,2)))", "dw_g=rows(mvue(1,4),by='both')"])  # fmt: skip
@pytest.mark.parametrize(
    ("space", "strides", "padding"),
    [((4, 4), (1, 1), "SAME"), ((4, 4), (2, 2), "SAME"), ((3, 6), (1, 1), "VALID"), ((4, 4), (1, 2), ((0, 0), (0, 0)))],
)
def test_a_convolution_of_kernel_1_is_compacted(text, space, strides, padding):
    if "dw_x" in text:  # strides would skip rows of x
        strides = (1, 1)
    f = lambda x, w, backend: nm.conv_general_dilated(
        x, w, strides, padding, dimension_numbers=("NHWC", "HWIO", "NHWC"), sparsity=nm.parse(text),
        ctx=nm.Ctx(5, 3), backend=backend,
    )  # fmt: skip
    close(*both(f, normal(0, 2, *space, 8), normal(1, 1, 1, 8, 12)))


@pytest.mark.parametrize("text", ["dx_g=rows(mse(1,2))", "y_x=ste(rows(mse(1,2)))", "y_w=ste(rows(mse(2,4)))"])
def test_channels_of_any_convolution_are_compacted(text):
    f = lambda x, w, backend: nm.conv_general_dilated(
        x, w, (2,), "SAME", dimension_numbers=("NCW", "OIW", "NCW"), sparsity=nm.parse(text), backend=backend
    )
    close(*both(f, normal(0, 2, 8, 9), normal(1, 12, 8, 3)))


@pytest.mark.parametrize("text", ["y_w=ste(rows(mse(2,4)))", "dx_g=rows(mvue(1,4))"])
def test_features_of_a_grouped_product_are_compacted(text):
    f = lambda x, w, backend: nm.ragged_dot(
        x, w, jnp.array([3, 0, 4]), sparsity=nm.parse(text), ctx=nm.Ctx(5, 3), backend=backend
    )
    close(*both(f, normal(0, 8, 8), normal(1, 3, 8, 12)))


@pytest.mark.slow
def test_dw_of_a_grouped_product_is_unbiased_by_both():
    x, w, g, sizes = normal(0, 10, 3), jnp.zeros((3, 3, 2)), normal(1, 10, 2), jnp.array([5, 0, 4])

    def dw(text, step):
        f = lambda w: nm.ragged_dot(x, w, sizes, sparsity=nm.parse(text), ctx=nm.Ctx(5, step))
        return jax.vjp(f, w)[1](g)[0]

    draws = jax.jit(lambda: jax.lax.map(lambda s: dw("dw_g=rows(mvue(1,4),by='both')", s), jnp.arange(2000)))()
    error = np.abs(draws.mean(0) - dw("dense", 0))
    assert (error <= 5 * draws.std(0) / 2000**0.5 + 1e-5).all()


def test_bfloat16_keeps_its_dtype():
    x, w = normal(0, 16, 8, dtype=jnp.bfloat16), normal(1, 8, 24, dtype=jnp.bfloat16)
    close(*both(dot_of(MATMUL, "dw_g=rows(mvue(1,4)); y_w=ste(rows(mse(1,2)))"), x, w), bits=7)


# ---- transformations ----

WAYS = {
    "op by op": lambda f, x, w: f(x, w),
    "remat": lambda f, x, w: jax.checkpoint(f)(x, w),
    "vmap": lambda f, x, w: jax.vmap(f, (0, None))(jnp.stack([x, 2 * x]), w),
    "scan": lambda f, x, w: jax.lax.scan(lambda c, w: (c + f(x, w),) * 2, jnp.zeros((16, 24)), jnp.stack([w, w]))[1],
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_transformations_change_nothing(way):
    text = "dw_x=rows(mvue(1,4)); y_w=ste(rows(mse(2,4))); dx_g=rows(mvue(2,4),by='both')"
    f = lambda x, w, backend: WAYS[way](functools.partial(dot_of(MATMUL, text), backend=backend), x, w)
    found, wanted = both(f, normal(0, 16, 8), normal(1, 8, 24), jit=(lambda f: f) if way == "op by op" else fast_jit)
    close(found, wanted, bits=18)


@pytest.mark.parametrize("text", ["y_w=ste(rows(mse(2,4))); y_x=fp8('e4m3')", "dw_x=mse(2,4)"])
def test_a_second_derivative_is_refused_if_the_first_has_a_rule(text):
    """Otherwise it would be zero: y is made of an operand that no derivative reaches."""
    f = dot_of(MATMUL, text)
    loss = lambda w: jnp.sin(f(normal(0, 16, 8), w, "compact")).sum()
    with pytest.raises(TypeError, match="no derivative beyond the gradient"):
        jax.grad(lambda w: (jax.grad(loss)(w) ** 2).sum())(normal(1, 8, 24))


def test_no_tokens_are_no_error():
    for backend in ("auto", "compact"):
        f = lambda x, w, backend=backend: dot_of(MATMUL, "dw_g=rows(mvue(1,4))")(x, w, backend)
        assert f(jnp.zeros((0, 8)), jnp.zeros((8, 24))).shape == (0, 24)


@pytest.mark.slow
def test_a_dropped_row_is_not_read():
    """So NaN there is seen by the emulated product only."""
    x, w, g = normal(0, 8, 4).at[0].set(jnp.nan), normal(1, 4, 8), normal(2, 8, 8).at[0].multiply(1e-3)
    f = dot_of(MATMUL, "dw_g=rows(mse(1,4))")
    found = [np.isnan(products(functools.partial(f, backend=b), x, w, g)[2]).any() for b in ("compact", "xla")]
    assert found == [False, True]


@pytest.mark.slow
def test_forward_mode_works_if_only_y_is_compacted():
    x, w = normal(0, 16, 8), normal(1, 8, 24)
    f = dot_of(MATMUL, "y_x=ste(rows(mse(2,4)))")
    tangents = [jax.jvp(functools.partial(f, backend=b), (x, w), (2 * x, w)) for b in ("compact", "xla")]
    close(*tangents)


LAYOUTS = {"tokens": (P("d"), P(), P("d")), "in": (P(None, "d"), P("d"), P()), "out": (P(), P(None, "d"), P(None, "d"))}
RESULT = {"tokens": P("d", None), "in": P(None, None), "out": P(None, "d")}


@pytest.mark.sampled
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "text", ["dw_g=rows(mvue(1,4),by='both')", "dw_x=rows(mvue(1,4))", "y_w=ste(rows(mse(2,4)))", "dw_x=mse(2,4)"]
)
def test_devices_gather_their_own_rows(kind, layout, text):
    mesh = jax.make_mesh((4,), ("d",), axis_types=(kind,))
    arrays = normal(0, 64, 64), normal(1, 64, 64), normal(2, 64, 64)
    there = placed(mesh, arrays, LAYOUTS[layout])
    out = RESULT[layout] if kind == AxisType.Explicit else None

    def run(x, w, g, backend, out=None):
        return products(functools.partial(dot_of(MATMUL, text, out_sharding=out), backend=backend), x, w, g)

    with jax.set_mesh(mesh):
        compiled = jax.jit(functools.partial(run, backend="compact", out=out)).lower(*there).compile()
        found = compiled(*there)
    close(found, jax.jit(functools.partial(run, backend="xla"))(*arrays))
    if layout == "tokens" and "dw" in text:  # dw is summed over devices; no array of tokens moves
        assert not moves(compiled)


@pytest.mark.parametrize(
    ("kind", "tokens"), [(AxisType.Explicit, (8, 6)), (AxisType.Explicit, (8, 4)), (AxisType.Auto, (8, 4))]
)
@pytest.mark.parametrize("text", ["dw_g=rows(mvue(1,4),by='both')", "dw_x=rows(mvue(1,4))", "dw_x=mse(2,4)"])
def test_texts_that_devices_share(text, kind, tokens):
    """The rows of merged tokens that are left do not lie on the axes of the result that the caller names."""
    mesh = jax.make_mesh((4,), ("d",), axis_types=(kind,))
    out = P("d", None, None)
    x, w, g = normal(0, *tokens, 16), normal(1, 16, 8), normal(2, *tokens, 8)
    run = lambda backend, **more: functools.partial(
        products, functools.partial(dot_of(TOKENS, text, **more), backend=backend)
    )
    compacted = run("compact", out_sharding=out if kind == AxisType.Explicit else None)
    with jax.set_mesh(mesh):
        found = jax.jit(compacted)(*placed(mesh, (x, w, g), (out, P(), out)))
    close(found, fast_jit(run("xla"))(x, w, g))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["compact", "xla"])
@pytest.mark.parametrize("text", ["dw_g=rows(mse(1,4),by='both')", "dw_x=rows(mse(1,4),by='both')"])
@pytest.mark.parametrize("kind", ["texts", "merged texts", "batched", "convolution"])
def test_rows_by_both_norms_by_hand(kind, text, backend):
    """Of every four tokens the one with the largest product of norms is kept, as float64 NumPy chooses it."""
    lead = (2, 6) if kind == "merged texts" else (2, 2, 4) if kind == "convolution" else (2, 8)
    x, g = normal(0, *lead, 12), normal(1, *lead, 8)
    w = normal(2, *((2,) if kind == "batched" else (1, 1) if kind == "convolution" else ()), 12, 8)
    if kind == "convolution":
        conv = as_conv(x, w, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        options = {"dimension_numbers": conv.dims, "sparsity": nm.parse(text), "backend": backend}
        f = lambda x, w: nm.conv_general_dilated(x, w, (1, 1), "VALID", **options)
    else:
        batch = ((0,), (0,)) if kind == "batched" else ((), ())
        f = functools.partial(dot_of((((2,), (1 if kind == "batched" else 0,)), batch), text), backend=backend)
    dw = np.asarray(products(f, x, w, g)[2], np.float64)
    a, b = (np.asarray(v, np.float64).reshape(-1, 4, v.shape[-1]) for v in (x, g))
    first = (np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1)).argmax(-1)[:, None, None]
    terms = np.take_along_axis(a, first, 1)[:, 0, :, None] * np.take_along_axis(b, first, 1)[:, 0, None, :]
    wanted = terms.reshape(2, -1, 12, 8).sum(1) if kind == "batched" else terms.sum(0)
    np.testing.assert_allclose(dw.reshape(wanted.shape), wanted, rtol=1e-5, atol=1e-5)


def test_groups_that_lie_on_two_devices_are_refused():
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))
    w = jax.device_put(normal(1, 24, 8), NamedSharding(mesh, P("d")))
    with pytest.raises(ValueError, match="would lie on two devices"):
        dot_of(MATMUL, "y_w=ste(rows(mse(2,4)))")(normal(0, 16, 24), w, "compact")


# ---- which products are compacted ----


def routes(text, tokens=4096, inputs=768, outputs=3072, backend="auto"):
    x, w = jax.ShapeDtypeStruct((tokens, inputs), jnp.float32), jax.ShapeDtypeStruct((inputs, outputs), jnp.float32)
    return explain(as_dot(x, w, MATMUL), x, w, nm.parse(text), backend)


def test_auto_compacts_what_is_expected_to_be_faster():
    found = routes("dw_g=rows(mvue(1,4))")
    assert [route.how for route in found.values()] == ["dense", "dense", "compacted"]
    assert found["dw"].why.startswith("1:4 of its rows, 0.3")
    small = routes("dw_g=rows(mvue(3,4))", inputs=8, outputs=8)["dw"]
    assert small.how == "emulated"
    assert "expected at" in small.why
    assert routes("dw_g=rows(mvue(1,4))", backend="xla")["dw"].how == "emulated"


def test_bytes_that_choosing_and_gathering_move():
    x, w = jax.ShapeDtypeStruct((4096, 768), jnp.float32), jax.ShapeDtypeStruct((768, 3072), jnp.float32)

    def moved(text):
        slots = {"x": nm.parse(text).slots["dw_x"], "g": nm.parse(text).slots["dw_g"]}
        return compaction.moved_bytes(as_dot(x, w, MATMUL), x, w, slots, "g", "cpu")

    of_x, of_g = 4 * 4096 * 768, 4 * 4096 * 3072
    assert moved("dw_g=rows(mvue(1,4))") == of_g + 2 / 4 * (of_x + of_g)
    assert moved("dw_g=rows(mvue(1,4),by='both')") == of_x + of_g + 2 / 4 * (of_x + of_g)


def test_the_sparser_of_two_operands_is_chosen():
    assert routes("dw_g=rows(mvue(1,4)); dw_x=rows(mvue(2,4))")["dw"].operand == "g"
    assert routes("dw_g=rows(mvue(2,4)); dw_x=rows(mvue(1,4))")["dw"].operand == "x"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("dw_g=rows(stages(((0,mse(2,4)),(9,mse(1,4)))))", "not n:m at every step"),
        ("dw_g=chain(rows(mse(2,4)),fp8('e5m2'))", "is rounded to FP8"),
        ("dw_g=rows(chain(mse(1,4),mse(7,8)))", "groups of different sizes"),
        ("dw_g=rescale(rows(mse(2,4)))", "rows is a part of another pruner"),
        ("dw_g=stages(((0,identity),(9,rows(mse(2,4)))))", "rows is a part of another pruner"),
    ],
)
def test_what_is_emulated_says_why(text, why):
    assert why in routes(text)["dw"].why
    x, w = normal(0, 16, 8), normal(1, 8, 24)
    with pytest.raises(ValueError, match="backend='compact', but dw cannot be compacted: .*" + why):
        jax.grad(lambda w: dot_of(MATMUL, text)(x, w, "compact").sum())(w)


def test_kernels_do_not_choose_by_what_the_forward_pass_does_not_know():
    """x and w are packed in the forward pass, before g is known. g is packed in the backward pass."""
    shape, dtype = (128, 128), jnp.bfloat16
    x, w = jax.ShapeDtypeStruct(shape, dtype), jax.ShapeDtypeStruct(shape, dtype)
    how = lambda text: [r.how for r in explain(as_dot(x, w, MATMUL), x, w, nm.parse(text), "interpret").values()]
    assert how("dw_x=rows(mvue(2,4),by='both')") == ["dense", "dense", "emulated"]
    assert how("dx_w=rows(mvue(2,4),by='both')") == ["dense", "emulated", "dense"]
    assert how("dw_g=rows(mvue(2,4),by='both')") == ["dense", "dense", "packed"]
    assert how("dw_x=rows(mvue(2,4))") == ["dense", "dense", "packed"]


def test_convolutions_say_why():
    x, w = jax.ShapeDtypeStruct((8, 16, 16, 64), jnp.float32), jax.ShapeDtypeStruct((3, 3, 64, 64), jnp.float32)
    op = as_conv(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    assert "patches of x" in explain(op, x, w, nm.parse("dw_g=rows(mvue(1,4))"), "auto")["dw"].why
    f = lambda w: nm.conv_general_dilated(
        jnp.ones(x.shape), w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"),
        sparsity=nm.parse("dw_g=rows(mvue(1,4),by='both')"), ctx=nm.Ctx(0), name="conv",
    )  # fmt: skip
    with pytest.raises(ValueError, match="^conv: dw_g=.*patches of x. Write by='own'"):
        jax.vjp(f, jnp.ones(w.shape))


def test_axes_of_space_in_another_order_are_refused():
    x, w = jnp.ones((2, 3, 4, 8)), jnp.ones((1, 1, 8, 12))
    f = lambda w, text, backend: nm.conv_general_dilated(
        x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NWHC"), sparsity=nm.parse(text),
        ctx=nm.Ctx(0), backend=backend,
    )  # fmt: skip
    with pytest.raises(ValueError, match="different orders. Write by='own'"):
        jax.vjp(lambda w: f(w, "dw_g=rows(mvue(1,4),by='both')", "xla"), w)
    with pytest.raises(ValueError, match="cannot be compacted: .*different orders"):
        f(w, "dw_g=rows(mvue(1,4))", "compact")


@pytest.mark.slow
@pytest.mark.parametrize("text", ["y_w=ste(rows(hold(mse(2,4))))", "y_w=ste(rows(soft(2,4)))"])
def test_each_matrix_of_a_batch_has_rows_and_state_of_its_own(text):
    w, x, sparsity = normal(0, 3, 8, 5), normal(1, 3, 6, 8), nm.parse(text)
    state = sparsity.init(w, contract=1, out=2, batch=0)["y_w"]
    norms = jnp.linalg.norm(w, axis=2, keepdims=True)
    if "hold" in text:
        np.testing.assert_array_equal(state, nm.mse(2, 4).mask(norms, 1))
    else:
        np.testing.assert_allclose(state, nm.soft(2, 4).init(norms, 1), rtol=1e-6)
    y = nm.einsum("eti,eio->eto", x, w, sparsity=sparsity, ctx=nm.Ctx(state={"y_w": state}), backend="compact")
    layer = nnx.Einsum("eti,eio->eto", w.shape, rngs=nnx.Rngs(0))
    layer.kernel[...] = w
    nm.nnx.sparsify(layer, nm.Recipe(((".*", text),)), x)
    np.testing.assert_allclose(layer(x), y, rtol=1e-5, atol=1e-5)
    f = nm.transform(lambda p, x: jnp.einsum("eti,eio->eto", x, p["w"]), nm.Recipe(((".*", text),)))
    states = f.init({"w": w}, x)
    np.testing.assert_allclose(f({"w": w}, x, state=states), y, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("text", ["dx_w=hold(rows(mse(2,4),by='both'))", "dx_w=rows(soft(2,4),by='both')"])
def test_state_and_both_norms_exclude_each_other(text):
    with pytest.raises(ValueError, match="it keeps state, but the norms of the other operand are new"):
        nm.parse(text)


def test_an_operand_of_one_row_is_refused():
    with pytest.raises(
        ValueError,
        match=r"dw_g=rows\(mvue\(2,4\)\) prunes an array of shape \(1, 24\).*one value, and a group has 4",
    ):
        jax.vjp(lambda w: dot_of(MATMUL, "dw_g=rows(mvue(2,4))")(jnp.ones((1, 8)), w, "auto"), jnp.ones((8, 24)))


# ---- the plan ----


def test_the_plan_says_what_is_saved_here():
    model = nnx.Linear(384, 1536, rngs=nnx.Rngs(0))
    x = jax.ShapeDtypeStruct((8, 256, 384), jnp.float32)
    plan = nm.nnx.plan(model, nm.Recipe(((".*", "dw_x=rows(mvue(1,4))"),)), x)
    said = " ".join(repr(plan).split())
    assert "512 groups of rows along 8 x 256" in said
    assert "Compacted dw everywhere: 1:4 of its rows, 0.31 of the dense time; saves about " in said
    assert " ms here" in said
    assert "Without remat, the backward pass keeps 0.752 of 3 MiB of the inputs of" in said
    assert plan.layers[0].kept == (2048 * 384 * 4, 512 * (384 + 1) * 4)
    assert plan.runs == {"compacted": 1}
    ((seconds, kept),) = plan.saved.values()
    assert seconds == plan.layers[0].flops * (1 - dict(plan.layers[0].runs)["dw"].share) / plan.speed
    assert kept == 2048 * 384 * 4 - 512 * (384 + 1) * 4
    assert plan.layers[0].flops == 2 * 2048 * 384 * 1536
    with nm.kernels.on("NVIDIA H200"):
        elsewhere = nm.nnx.plan(model, nm.Recipe(((".*", "dw_g=rows(mvue(1,4))"),)), x)
    assert " ms here" not in repr(elsewhere)
    assert list(elsewhere.saved.values()) == [(None, 0)]
    convolution = nnx.Conv(8, 8, (3, 3), rngs=nnx.Rngs(0))
    for slot in ("dw_g", "dw_x"):
        demanding = nm.Recipe({".*": f"{slot}=rows(mvue(1,4))"}, backend="compact")
        refused = nm.nnx.plan(convolution, demanding, jnp.ones((1, 8, 8, 8))).refused
        assert "dw cannot be compacted" in refused[0][1]


@pytest.mark.slow
def test_a_stage_of_rows_multiplies_the_rows_of_its_own_groups():
    """The groups of a row of `stages` are smaller than those that fit all rows."""
    stages = nm.stages(((0, nm.rows(nm.hold(nm.mse(2, 4)))), (100, nm.rows(nm.hold(nm.mse(1, 8))))))
    x, w, whole = normal(0, 4, 16), normal(1, 16, 8), nm.Sparsity(y_w=nm.ste(stages))
    state = whole.init(w, contract=0, out=1)
    for step in (0, 100):
        ctx = nm.Ctx(step=step, state=state)
        expected = nm.dot_general(x, w, MATMUL, sparsity=whole, ctx=ctx, backend="xla")
        found = nm.dot_general(x, w, MATMUL, sparsity=whole.at(step), ctx=ctx, backend="compact")
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
