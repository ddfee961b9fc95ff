"""Pruning on TPUs: the kernels give the bits of the definition, simulated on a CPU."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, PartitionSpec as P

import nmjax as nm
from experiments.bench.steps import LARGE
from nmjax.kernels.targets import pruning
from nmjax.kernels.tpu import Pruning
from tests.products.products_test import normal

pytestmark = [pytest.mark.kernels, pytest.mark.sampled]

TPU = Pruning("TPU v5 lite", interpret=True)
KEY, STEP = np.uint32([3, 7]), 30
SCALE = np.float32(1.25)  # of `soft`

PRUNERS = [
    "mse(2,4)", "mse(1,2)", "mse(3,5)", "mse(8,16)", "mvue(2,4)", "mvue(1,4)", "mvue(3,8)", "mvue(2,7)",
    "mvue_approx(2,4)", "soft(2,4)", "soft(2,4,'one')", "soft(5,8)", "uniform(2,4)", "uniform(1,3,rescale=False)",
    "transposable(2,4)", "decay(mse(2,4),linear(1,0,100))", "decay(mse(2,4),linear(1,0,100),'autodiff')",
    "decay(mse(2,4),linear(1,0,20))", "decay(uniform(2,4,rescale=False),linear(1,0,100),'autodiff')", "ste(mse(2,4))",
    "sr_ste(mse(2,4),2e-4)", "chain(mse(2,4),mvue(1,4))", "stages(((0,identity),(5,mse(3,4)),(50,mse(2,4))))",
]  # fmt: skip
SHAPES = {  # k stands for the axis of groups
    "rows": ("k", 48), "columns": (48, "k"), "batch of rows": (2, 3, "k", 40), "batch of columns": (2, 60, "k"),
    "matrices": (3, "k", 5, 24), "deep matrices": ("k", 2, 5, 8), "many columns": (520, "k"), "narrow": ("k", 1),
}  # fmt: skip
SIZES = {"rows": 40, "columns": 40, "many columns": 3}  # in groups; 13 of the others
SPECIAL = np.array([np.nan, -0.0, np.inf, -np.inf, 1e-41, 3e38, 0.0], np.float32)


def array(shape, m, dtype, tiles=False):
    groups = SIZES.get(shape, 13)
    sides = tuple(groups * m if side == "k" else -(-side // m) * m if tiles else side for side in SHAPES[shape])
    x = np.array(normal(1, *sides))
    flat = x.reshape(-1)
    flat[5::11][: len(SPECIAL)] = SPECIAL[: len(flat[5::11])]
    flat[3::7] = flat[2::7][: len(flat[3::7])]  # ties
    return jnp.asarray(x).astype(dtype), SHAPES[shape].index("k")


def bits(v):
    return np.asarray(v).view({2: np.uint16, 4: np.uint32}[v.dtype.itemsize])


@functools.partial(jax.jit, static_argnums=(0, 2))
def called(p, x, axis, ctx):
    return p(x, axis, ctx)


def context(p):
    return nm.Ctx(key=KEY, step=STEP, state=SCALE if p.facts.has_state else None)


def runs_a_kernel(f, *args):
    return "pallas_call" in str(jax.make_jaxpr(f)(*args))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("text", PRUNERS)
def test_a_kernel_gives_the_bits_of_the_definition(text, shape, dtype):
    p = nm.parse_pruner(text)
    if p.facts.tiles and ("matrices" in shape or shape == "narrow"):
        pytest.skip("its tiles lie along the last two axes")
    x, axis = array(shape, p.facts.block, dtype, p.facts.tiles)
    ctx = context(p)
    on_tpu = ctx.replace(kernels=TPU)
    assert runs_a_kernel(lambda x, ctx: p(x, axis, ctx), x, on_tpu.traceable())
    np.testing.assert_array_equal(bits(called(p, x, axis, on_tpu)), bits(called(p, x, axis, ctx)))


@pytest.mark.parametrize("shape", ["rows", "columns", "batch of rows"])
@pytest.mark.parametrize(
    "text", ["mse(2,4)", "mse(3,5)", "uniform(2,4)", "transposable(2,4)", "hold(mse(2,4))", "stages(((0,mse(3,4)),))",
             "decay(transposable(2,4),linear(1,0,100))"]
)  # fmt: skip
def test_a_kernel_gives_the_mask_of_the_definition(text, shape):
    p = nm.parse_pruner(text)
    x, axis = array(shape, p.facts.block, jnp.bfloat16, p.facts.tiles)
    made = p.init if p.facts.has_state else p if text.startswith("decay") else p.mask
    on_tpu, ctx = nm.Ctx(KEY, STEP, kernels=TPU), nm.Ctx(KEY, STEP)
    assert runs_a_kernel(lambda x, ctx: made(x, axis, ctx), x, on_tpu)
    expected = jax.jit(made, static_argnums=1)(x, axis, ctx)
    got = jax.jit(made, static_argnums=1)(x, axis, on_tpu)
    assert got.dtype == expected.dtype
    np.testing.assert_array_equal(got.astype(jnp.float32), expected.astype(jnp.float32))


@pytest.mark.parametrize("text", ["mse(2,4)", "mvue(2,4)", "soft(2,4)", "mvue_approx(2,4)", "uniform(2,4)"])
def test_a_batch_of_keys_and_scales_is_mapped(text):
    p, x = nm.parse_pruner(text), normal(2, 3, 24, 20)
    keys, scales = jnp.arange(6, dtype=jnp.uint32).reshape(3, 2), jnp.array([0.5, 1.0, 2.0])
    ctx = lambda key, scale, device: nm.Ctx(key, STEP, scale if p.facts.has_state else None, kernels=device)
    f = lambda device: jax.vmap(lambda x, key, scale: p(x, -2, ctx(key, scale, device)))(x, keys, scales)
    np.testing.assert_array_equal(f(TPU), f(None))


@pytest.mark.parametrize("spec", [P("a", None), P(None, "b"), P("b", "a"), P(("a", "b"), None), P()], ids=str)
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("text", ["mvue(2,4)", "uniform(2,4)", "mse(2,4)", "transposable(2,4)"])
def test_every_device_prunes_its_part(text, axis, spec):
    """The draws are numbered in the whole array, so that they do not depend on how it is cut."""
    p, x = nm.parse_pruner(text), normal(3, 32, 48)
    expected = called(p, x, axis, nm.Ctx(KEY, STEP))
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        cut, ctx = jax.reshard(x, spec), nm.Ctx(KEY, STEP, kernels=TPU)
        assert runs_a_kernel(lambda x: p(x, axis, ctx), cut)
        y = called(p, cut, axis, ctx)
        assert jax.typeof(y).sharding.spec == jax.typeof(cut).sharding.spec
        np.testing.assert_array_equal(y, expected)
    cut = jax.device_put(normal(3, 2, 3, 32, 24), jax.NamedSharding(mesh, P("a", None, "b", None)))
    with jax.set_mesh(mesh):
        y = called(p, cut, -1, ctx)
    np.testing.assert_array_equal(y, called(p, normal(3, 2, 3, 32, 24), -1, nm.Ctx(KEY, STEP)))


def test_matrices_are_cut_too():
    p, x = nm.mvue(2, 4), normal(4, 16, 6, 20)
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        for spec in (P("a", "b", None), P(None, "a", "b"), P(("a", "b"), None, None)):
            y = called(p, jax.reshard(x, spec), 0, nm.Ctx(KEY, STEP, kernels=TPU))
            np.testing.assert_array_equal(y, called(p, x, 0, nm.Ctx(KEY, STEP)))


@pytest.mark.parametrize("text", ["mse(2,4)", "soft(2,4)", "decay(mse(2,4),linear(1,0,100),'autodiff')"])
def test_the_derivative_is_that_of_the_definition(text):
    p, x, t = nm.parse_pruner(text), normal(5, 24, 20), normal(6, 24, 20)
    loss = lambda device: lambda x: jnp.sum(p(x, 0, context(p).replace(kernels=device)) * t)
    np.testing.assert_array_equal(jax.grad(loss(TPU))(x), jax.grad(loss(None))(x))
    tangent = lambda device: jax.jvp(loss(device), (x,), (t,))
    np.testing.assert_array_equal(tangent(TPU), tangent(None))


METHODS = ["ste(2,4)", "s_ste(2,4)", "ste(2,4); dw_g=mvue(2,4)", "sr_ste(2,4)", "mdgf(2,4,linear(1,0,60))", "fst()",
           "sdgp(2,4)", "bdwp(2,4)", "bi_mask(2,4,draws=2)"]  # fmt: skip


@pytest.mark.parametrize("text", METHODS)
def test_a_step_of_training_has_the_same_bits(text):
    sparsity, x, w = nm.parse(text), normal(7, 2, 12, 24), normal(8, 24, 16)
    state = sparsity.init(w, contract=0, out=1, ctx=nm.Ctx(KEY, 0))
    ctx = nm.Ctx(KEY, STEP, state)

    def loss(x, w, backend):
        return jnp.sum(jnp.sin(nm.einsum("bti,io->bto", x, w, sparsity=sparsity, ctx=ctx, backend=backend)))

    step = lambda backend: jax.jit(lambda x, w: jax.value_and_grad(loss, (0, 1))(x, w, backend))
    expected = step("xla")(x, w)
    with nm.kernels.on("TPU v5 lite"):
        assert runs_a_kernel(step("interpret"), x, w)
        assert not runs_a_kernel(step("xla"), x, w)
        got = step("interpret")(x, w)
    jax.tree.map(np.testing.assert_array_equal, got, expected)


REFUSED = [
    ("mse(2,32)", (8, 64), jnp.float32, 1, "mse(2,32) has groups of 32, and kernels prune groups of at most 16"),
    ("mse(2,4)", (8, 64), jnp.float16, 1, "float16: kernels prune float32 and bfloat16"),
    ("mse(2,4)", (64,), jnp.float32, 0, "an array of shape (64,) has no tiles of 8 x 128"),
    ("wanda(2,4)", (8, 64), jnp.float32, 1, "wanda(2,4) has no kernel"),
    ("soft(2,4,scale='now')", (8, 64), jnp.float32, 1, "soft(2,4,scale='now') has no kernel"),
    ("ste(wanda(2,4))", (8, 64), jnp.float32, 1, "wanda(2,4) has no kernel"),
    ("permute(mse(2,4))", (8, 64), jnp.float32, 1, "permute(mse(2,4)) has no kernel"),
    ("ste(transposable(1,4))", (8, 64), jnp.float32, 1, "transposable(1,4) has no kernel"),
]


@pytest.mark.parametrize(("text", "shape", "dtype", "axis", "said"), REFUSED)
def test_what_no_kernel_prunes_is_told_and_xla_prunes_it(text, shape, dtype, axis, said):
    p = nm.parse_pruner(text)
    refusal = TPU.refusal(p, shape, dtype, axis)
    assert refusal is not None
    assert str(refusal).endswith(said)
    if "wanda" not in text and "permute" not in text:
        x = normal(9, *shape).astype(dtype)
        np.testing.assert_array_equal(p(x, axis, context(p).replace(kernels=TPU)), p(x, axis, context(p)))


def test_errors_are_those_of_the_definition():
    for device in (TPU, None):
        with pytest.raises(ValueError, match=r"10 values, which do not divide into groups of 4"):
            nm.mse(2, 4)(jnp.ones((10, 8)), 0, nm.Ctx(kernels=device))
        with pytest.raises(TypeError, match="key must be"):
            nm.mvue(2, 4)(jnp.ones((8, 8)), 0, nm.Ctx(kernels=device))


def test_the_device_that_prunes():
    assert "only TPUs" in str(pruning("auto"))
    with nm.kernels.on("TPU v3"):
        assert str(pruning("auto")) == "TPU v3: kernels are for TPU v4 and later"
    for kind in ("TPU v4", "TPU v5 lite", "TPU v5", "TPU v6 lite", "TPU7x"):
        with nm.kernels.on(kind):
            assert (pruning("auto"), pruning("interpret")) == (Pruning(kind), Pruning(kind, interpret=True))
            assert str(pruning("xla")) == "backend='xla'"


def test_kernels_need_explicit_axes_or_one_device():
    device = jax.sharding.AbstractDevice("TPU v6 lite", 1, "tpu")
    for kinds in itertools.product(AxisType, repeat=2):
        mesh = jax.sharding.AbstractMesh((2, 2), ("a", "b"), axis_types=kinds, abstract_device=device)
        with jax.sharding.use_abstract_mesh(mesh):
            served = isinstance(pruning("auto"), Pruning)
        assert served == (set(kinds) in ({AxisType.Explicit}, {AxisType.Manual})), kinds


# ---- chosen rows ----


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("sides", [(1, 24, 40), (3, 132, 130), (2, 1040, 8)], ids=str)
@pytest.mark.parametrize(("n", "m"), [(1, 4), (2, 4), (1, 2), (3, 4)])
def test_a_kernel_takes_the_rows_that_were_chosen(n, m, sides, dtype):
    batch, rows, _ = sides
    x = normal(10, *sides).astype(dtype)
    draw = np.random.default_rng(11).permuted(np.broadcast_to(np.arange(m), (batch, rows // m, m)), axis=-1)
    places, scales = draw[..., :n].astype(np.int32), np.array(normal(12, batch, rows // m, n))
    scales[0, 0] = 0
    expected = np.take_along_axis(np.asarray(x).reshape(batch, -1, m, sides[-1]), places[..., None], 2)
    plain = TPU.take(x, places, None, m)
    np.testing.assert_array_equal(plain, expected.reshape(batch, -1, sides[-1]))
    scaled = (expected.astype(np.float32) * scales[..., None]).reshape(batch, -1, sides[-1])
    np.testing.assert_array_equal(TPU.take(x, places, scales, m), scaled.astype(dtype))


@pytest.mark.parametrize("subscripts", ["bti,io->bto", "ti,io->to"])
@pytest.mark.parametrize("text", ["dw_g=rows(mvue(1,4))", "dw_x=rows(mvue(2,4))", "dw_g=rows(mvue(1,4),by='both')"])
def test_a_compacted_product_on_a_tpu_has_the_bits_of_one_on_a_cpu(text, subscripts):
    sparsity, w = nm.parse(text), normal(8, 24, 16)
    x = normal(7, *((2, 16, 24) if subscripts.startswith("b") else (16, 24)))

    def step(backend):
        ctx = nm.Ctx(KEY, STEP)
        f = lambda x, w: nm.einsum(subscripts, x, w, sparsity=sparsity, ctx=ctx, backend=backend)
        return jax.jit(lambda *v: jax.grad(lambda *v: jnp.sum(jnp.sin(f(*v))), (0, 1))(*v))

    assert "gather" in str(jax.make_jaxpr(step("compact"))(x, w))
    expected = step("compact")(x, w)
    with nm.kernels.on("TPU v5 lite"):
        program = str(jax.make_jaxpr(step("interpret"))(x, w))
        assert "pallas_call" in program
        assert "gather" not in program
        jax.tree.map(np.testing.assert_array_equal, step("interpret")(x, w), expected)


def llama():
    sizes = {"vocabulary": 128256, "width": 2048, "depth": 16, "heads": 32, "kv_heads": 8, "hidden": 8192}
    return nm.models.Decoder(**sizes, length=4096, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ViT-B/16, 64 images", "GPT-2 124M, 32 x 1024 tokens", "Llama-3.2-1B"])
def test_the_plan_of_a_model_on_sixteen_tpus_says_what_runs(name):
    make, x = LARGE.get(name, (llama, jax.ShapeDtypeStruct((16, 1024), jnp.int32)))
    device = jax.sharding.AbstractDevice("TPU v5 lite", 1, "tpu")
    for kind, said in (
        (AxisType.Explicit, "operands are pruned in one pass"),
        (AxisType.Auto, "set a mesh of explicit axes"),
    ):
        mesh = jax.sharding.AbstractMesh((16,), ("fsdp",), axis_types=(kind,), abstract_device=device)
        with jax.sharding.use_abstract_mesh(mesh):
            plan = nm.nnx.plan(nnx.eval_shape(make), nm.Recipe({r"blocks/.*": "s_ste(2,4)"}), x)
        routes = [route for layer in plan.layers if layer.slots for _, route in layer.runs if route.how != "dense"]
        assert len(routes) >= 100
        assert all(route.why.startswith("TPU v5 lite has no sparse tensor cores; ") for route in routes)
        assert all(said in route.why for route in routes)


# ---- what kernels leave to the definition ----


class First:
    """A mask of its own, for a class that comes before another pruner."""

    def mask(self, x, axis=-1, ctx=None):
        return jnp.broadcast_to(jnp.arange(x.shape[-1]) % 4 < 2, x.shape)


OWN = [
    type("masked", (nm.mse,), {"mask": First.mask}), type("mixed", (First, nm.mse), {}),
    type("drawn", (nm.mvue,), {"draw": lambda self, x, axis, ctx: jnp.zeros((*x.shape[:-1], x.shape[-1] // 4))}),
]  # fmt: skip


@pytest.mark.parametrize("kind", OWN, ids=lambda kind: kind.__name__)
def test_a_subclass_computes_what_it_says(kind):
    p, x = kind(2, 4), normal(13, 8, 16)
    np.testing.assert_array_equal(p(x, -1, nm.Ctx(KEY, kernels=TPU)), p(x, -1, nm.Ctx(KEY)))
    assert str(TPU.refusal(p, (8, 16), jnp.float32, 1)) == f"{p} has no kernel"


def test_scales_and_steps_have_the_derivative_of_the_definition():
    x = normal(14, 8, 16)
    soft = lambda device: lambda s: nm.soft(2, 4)(x, -1, nm.Ctx(state=s, kernels=device)).sum()
    np.testing.assert_allclose(jax.grad(soft(TPU))(1.5), jax.grad(soft(None))(1.5), rtol=1e-5)
    fading = nm.parse_pruner("decay(mse(2,4),linear(1,0,100),'autodiff')")
    faded = lambda device: lambda step: fading(x, -1, nm.Ctx(step=step, kernels=device)).sum()
    np.testing.assert_allclose(jax.grad(faded(TPU))(30.0), jax.grad(faded(None))(30.0), rtol=1e-5)


def test_a_group_that_a_mesh_cuts_is_left_to_the_definition():
    mesh = jax.make_mesh((4,), ("a",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        x = jax.reshard(normal(15, 24, 8), P("a", None))
        assert TPU.prune(nm.mse(2, 4), x, 0, nm.Ctx(KEY)) is None
        assert TPU.prune(nm.mse(2, 2), x, 0, nm.Ctx(KEY)) is not None


def test_arrays_that_kernels_do_not_take():
    for shape in ((0, 8), (2, 0, 8)):
        assert nm.mse(2, 4)(jnp.ones(shape), -1, nm.Ctx(kernels=TPU)).shape == shape
    assert TPU.prune(nm.mse(2, 4), jnp.ones((4, 8)), -1, nm.Ctx(state={"a": 1})) is not None
    large = jax.ShapeDtypeStruct((2**19, 2**16), jnp.bfloat16)
    with pytest.raises(ValueError, match=r"more than the 2\*\*32 draws"):
        jax.eval_shape(lambda x: nm.uniform(2, 4)(x, -1, nm.Ctx(KEY, kernels=TPU)), large)


def test_numbers_of_64_bits():
    x = normal(16, 40, 24)
    with jax.enable_x64(True):
        for text in ("mse(2,4)", "mvue(2,4)", "transposable(2,4)"):
            p = nm.parse_pruner(text)
            for axis in (0, 1):
                np.testing.assert_array_equal(p(x, axis, nm.Ctx(KEY, kernels=TPU)), p(x, axis, nm.Ctx(KEY)))
        p, x = nm.mvue(2, 4), normal(17, 16, 3, 8)
        np.testing.assert_array_equal(p(x, 0, nm.Ctx(KEY, kernels=TPU)), p(x, 0, nm.Ctx(KEY)))


def test_a_plan_says_what_dx_multiplies():
    layer = nnx.Linear(16, 24, rngs=nnx.Rngs(0))
    with nm.kernels.on("TPU v5 lite"):
        plan = nm.nnx.plan(layer, nm.Recipe({".*": "y_w=ste(transposable(1,4))"}), jnp.ones((8, 16)))
    said = {product: route.why for product, route in plan.layers[0].runs}
    assert "XLA prunes y_w: transposable(1,4) has no kernel" in said["y"]
    assert said["dx"] == said["y"]
