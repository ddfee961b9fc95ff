"""Which products run packed, why others do not, and that a layer's numbers do not depend on it."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, PartitionSpec

import nmjax as nm
from nmjax.analysis import savings
from nmjax.analysis.refusals import Use
from nmjax.analysis.savings import kept_of
from nmjax.core import versions
from nmjax.core.refusal import Refusal
from nmjax.kernels.targets import Target, target
from nmjax.products import routes
from nmjax.products.operations import as_conv, as_dot
from nmjax.products.routes import explain, routes_of
from tests.products.common import MATMUL as PLAIN, near


def on(kind="NVIDIA H200", axes=(("x", 1),), kinds=None):
    """A program is traced for this device."""
    names, sizes = zip(*axes, strict=True)
    types = kinds or (AxisType.Auto,) * len(names)
    cores = {"NVIDIA H200": 132}.get(kind, 108)
    device = AbstractDevice(kind, num_cores=cores, platform="cpu" if kind == "cpu" else "gpu")
    return jax.sharding.use_abstract_mesh(AbstractMesh(sizes, names, axis_types=types, abstract_device=device))


def random(shape, seed=0, dtype=jnp.bfloat16):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def everything(f, *arrays, g=None, jit=True):
    """The value and the gradients for a random cotangent."""

    def run(*arrays):
        y, vjp = jax.vjp(f, *arrays)
        return y, *vjp(random(y.shape, 9, y.dtype) if g is None else g)

    return (jax.jit(run) if jit else run)(*arrays)


def first_state(s, w):
    return jax.jit(lambda w: s.init(w, contract=0, out=1))(w)


def packers(jaxpr) -> list[int]:
    """Return how many arrays each kernel that packs makes, in inner programs too: two a form."""
    found = []
    for eqn in jaxpr.eqns:
        if eqn.params.get("name") == "nm_pack":
            found.append(len(eqn.outvars))
            continue
        inside = jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda v: hasattr(v, "jaxpr") or hasattr(v, "eqns"))
        for inner in (getattr(value, "jaxpr", value) for value in inside):
            found += packers(inner) if hasattr(inner, "eqns") else []
    return found


# ---- the same numbers ----

PACKED = {  # how y, dx and dw run
    "ste(2,4)": "packed dense dense",
    "sr_ste(2,4)": "packed dense dense",
    "s_ste()": "packed dense packed",
    "s_ste(gradient='mvue_approx')": "packed dense packed",
    "mvue(2,4)": "dense dense packed",
    "mvue(1,2)": "dense dense packed",
    "sdgp()": "dense packed dense",
    "sdgp(over='group')": "dense packed dense",
    "fst(every=5)": "packed packed packed",
    "bdwp()": "packed packed dense",
    "bi_mask()": "packed emulated dense",
    "ste(1,8)": "packed dense dense",
    "activation()": "packed dense packed",
    "activation(layer='up')": "dense packed packed",
    "y_w=ste(transposable(2,4)); dw_g=mvue(2,4)": "packed packed packed",
    "y_w=ste(chain(mse(2,4),fp8('e4m3')))": "packed dense dense",
    "y_w=mse(2,4); dx_g=mvue(2,4); dw_x=raw(mse(2,4))": "packed packed packed",
    "dx_g=mvue(2,4); dw_g=mvue(2,4)": "dense packed packed",
    "y_x=fp8('e4m3'); y_w=ste(mse(2,4))": "packed dense dense",
    "y_x=fp8('e4m3'); y_w=ste(chain(mse(2,4),fp4()))": "packed dense dense",
    "dw_x=fp4(); dw_g=chain(mvue(2,4),fp4('random'))": "dense dense packed",
    "y_x=mse(2,4); y_w=ste(fp8('e4m3'))": "packed dense dense",
    **{f"{slot}=ste(mse(2,4))": "packed dense dense" for slot in ("y_x", "y_w")},  # by the one operand and the other
    **{f"{slot}=mse(2,4)": "dense packed dense" for slot in ("dx_g", "dx_w")},
    **{f"{slot}=mse(2,4)": "dense dense packed" for slot in ("dw_g", "dw_x")},
}


@pytest.mark.kernels
@pytest.mark.parametrize("text", PACKED)
def test_packed_or_not_the_numbers_are_the_same(text):
    """The pruned values are the same bits, and the sums float32: results differ by a rounding of bf16 at most."""
    s = nm.parse(text)
    x, w = random((128, 256)), random((256, 128), 1)
    state = first_state(s, w)
    run = lambda backend: lambda x, w: nm.dot_general(x, w, PLAIN, sparsity=s, ctx=nm.Ctx(7, 3, state), backend=backend)
    how = explain(as_dot(x, w, PLAIN), x, w, s, "interpret")
    assert " ".join(choice.how for choice in how.values()) == PACKED[text]
    near(everything(run("interpret"), x, w), everything(run("xla"), x, w))


@pytest.mark.kernels
def test_the_dense_operand_of_a_packed_dw_is_kept_in_its_packed_form():
    """g is packed for the kernel, and x, which it reads whole, is kept as values and bits until then."""
    s = nm.parse("dw_g=mvue(2,4); dw_x=mse(4,8)")  # 4:8 is no pattern of kernels
    x, w = random((128, 256)), random((256, 128), 1)
    f = lambda backend: lambda x, w: nm.dot_general(x, w, PLAIN, sparsity=s, ctx=nm.Ctx(7, 3), backend=backend)
    assert explain(as_dot(x, w, PLAIN), x, w, s, "interpret")["dw"].operand == "g"
    _, back = jax.vjp(f("interpret"), x, w)
    kept = sum(leaf.nbytes for leaf in jax.tree.leaves(back)) - w.nbytes - 8  # and the words of the key
    assert kept == x.nbytes * 9 // 16
    shapes = (jax.ShapeDtypeStruct(v.shape, v.dtype) for v in (x, w))
    assert kept_of(s, [Use(as_dot(x, w, PLAIN), *shapes, 1)], "interpret") == (x.nbytes, kept)  # as the plan says
    near(everything(f("interpret"), x, w), everything(f("xla"), x, w))


@pytest.mark.kernels
def test_lean_keeps_the_packed_form_of_x():
    s = nm.parse("dw_x=mse(2,4)")
    x, w = random((128, 256)), random((256, 128), 1)
    f = lambda x, w: nm.dot_general(x, w, PLAIN, sparsity=s, backend="interpret")
    lean = jax.checkpoint(lambda x, w: f(jnp.tanh(x), w), policy=nm.policies.keep_sparse)
    _, back = jax.vjp(lean, x, w)
    assert packers(jax.make_jaxpr(back)(jnp.ones((128, 128), x.dtype)).jaxpr) == []
    near(everything(lean, x, w), everything(lambda x, w: f(jnp.tanh(x), w), x, w))


@pytest.mark.kernels
@pytest.mark.parametrize("backend", ["interpret", "xla"])
def test_all_three_products_against_float64(backend):
    """Packed or not, what is left is one rounding to bf16 and those of float32 sums: 2^-8 of a result, 2^-22 of its terms."""
    s = nm.parse("y_w=ste(transposable(2,4)); dw_g=mse(2,4)")
    x, w, g = random((128, 256)), random((256, 128), 1), random((128, 128), 9)
    made = everything(lambda x, w: nm.dot_general(x, w, PLAIN, sparsity=s, backend=backend), x, w, g=g)
    exact = lambda v: np.asarray(v, np.float64)
    kept = exact(nm.transposable(2, 4)(w, 0))
    products = [(x, kept), (g, kept.T), (exact(x).T, nm.mse(2, 4)(g, 0))]
    for y, (a, b) in zip(made, products, strict=True):
        a, b = exact(a), exact(b)
        assert (np.abs(exact(y) - a @ b) <= 2.0**-8 * np.abs(a @ b) + 2.0**-22 * (np.abs(a) @ np.abs(b))).all()


LAYOUTS = {
    "weights (out, in)": ("ti,oi->to", (128, 64), (64, 64)),
    "batch x tokens": ("...i,io->...o", (2, 64, 64), (64, 128)),
    "several out-features": ("ti,ihd->thd", (128, 64), (64, 4, 32)),
    "several in-features": ("bthd,hdo->bto", (2, 64, 2, 32), (2, 32, 64)),
    "batched products": ("bti,bio->bto", (3, 64, 64), (3, 64, 128)),
    "tokens contiguous": ("it,io->to", (64, 128), (64, 64)),
}


@pytest.mark.kernels
@pytest.mark.parametrize("name", LAYOUTS)
def test_operands_in_every_order(name):
    spec, lhs, rhs = LAYOUTS[name]
    s = nm.parse("y_w=ste(mse(2,4)); dx_g=mse(2,4); dw_g=mvue(2,4)")
    x, w = random(lhs), random(rhs, 1)
    run = lambda backend: lambda x, w: nm.einsum(spec, x, w, sparsity=s, ctx=nm.Ctx(7, 3), backend=backend)
    jaxpr = jax.make_jaxpr(lambda x, w: everything(run("interpret"), x, w))(x, w).jaxpr
    assert packers(jaxpr) == [2, 4]  # w for y, and g for dx and dw
    jit = name != "batch x tokens"  # whose dw XLA sums in bfloat16 along one of the two axes, compiled for a CPU
    near(everything(run("interpret"), x, w), everything(run("xla"), x, w, jit=jit))


@pytest.mark.kernels
def test_fp8_products_err_as_simulated_ones_do():
    """Real FP8 and simulated FP8 round differently, by as much: against products of what was pruned."""
    s = nm.methods.s_ste(fp8=True)
    plain = nm.parse("y_w=ste(chain(soft(2,4),identity)); dw_g=chain(mvue(2,4),identity)")  # the same noise
    x, w = random((256, 256)), random((256, 128), 1)
    state = first_state(s, w)
    run = lambda s, backend: (
        lambda x, w: nm.dot_general(x, w, PLAIN, sparsity=s, ctx=nm.Ctx(7, 3, state), backend=backend)
    )
    exact = everything(run(plain, "xla"), x, w)
    how = explain(as_dot(x, w, PLAIN), x, w, s, "interpret")
    assert [c.how for c in how.values()] == ["packed", "fp8", "packed"]
    off = lambda made: [
        float(jnp.linalg.norm((a - b).astype(jnp.float32)) / jnp.linalg.norm(b.astype(jnp.float32)))
        for a, b in zip(made, exact, strict=True)
    ]
    real, simulated = off(everything(run(s, "interpret"), x, w)), off(everything(run(s, "xla"), x, w))
    np.testing.assert_allclose(real, simulated, rtol=0.1)
    assert 0.02 < real[0] < 0.05  # e4m3 x e4m3
    assert 0.05 < real[1] < 0.09  # e5m2 x e5m2, to the nearest
    assert 0.05 < real[2] < 0.13  # e5m2 at random x e5m2


# ---- under every transformation ----


def layer(backend, text="s_ste()"):
    s = nm.parse(text)
    state = {"y_w": jnp.float32(1.5)} if "s_ste" in text else None

    def f(x, w, step=0):
        return nm.dot_general(x, w, PLAIN, sparsity=s, ctx=nm.Ctx(7, step, state), backend=backend)

    return f


@pytest.mark.kernels
@pytest.mark.parametrize("wrap", ["op by op", "scan", "vmap", "vmap of weights"])
def test_under_transformations(wrap):
    x, w = random((4, 64, 64)), random((64, 64), 1)

    def f(backend):
        one = layer(backend)
        if wrap == "op by op":
            return lambda x, w: one(x[0], w)
        if wrap == "scan":
            return lambda x, w: jax.lax.scan(lambda c, v: (c, one(v, w)), 0, x)[1]
        if wrap == "vmap":
            return lambda x, w: jax.vmap(one, (0, None))(x, w)
        return lambda x, w: jax.vmap(one)(x, jnp.stack([w, 2 * w, 3 * w, -w]))

    jit = wrap != "op by op"
    near(everything(f("interpret"), x, w, jit=jit), everything(f("xla"), x, w, jit=jit), bits=7)


@pytest.mark.kernels
def test_in_a_shard():
    """In `jax.shard_map`, on one device: on several the interpreter stands still."""
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1])
    tokens, whole = PartitionSpec("data"), PartitionSpec()
    x, w = random((64, 64)), random((64, 64), 1)

    def f(backend):
        s = nm.parse("y_w=ste(mse(2,4)); dw_g=mse(2,4)")
        one = lambda x, w: nm.dot_general(x, w, PLAIN, sparsity=s, backend=backend)
        return jax.shard_map(one, mesh=mesh, in_specs=(tokens, whole), out_specs=tokens, check_vma=False)

    near(everything(f("interpret"), x, w), everything(f("xla"), x, w), bits=7)


@pytest.mark.slow
def test_in_shards_on_gpus():
    """Lowered for four: each packs its own tokens, and dw is summed over them."""
    mesh = AbstractMesh(
        (4,),
        ("data",),
        axis_types=(AxisType.Auto,),
        abstract_device=AbstractDevice("NVIDIA H200", num_cores=132, platform="gpu"),
    )
    tokens, whole = PartitionSpec("data"), PartitionSpec()
    s = nm.parse("s_ste()")

    def one(x, w):
        state = {"y_w": jnp.float32(1.5)}
        loss = lambda w: jnp.sum(nm.dot_general(x, w, PLAIN, sparsity=s, ctx=nm.Ctx(7, 3, state)).astype(jnp.float32))
        return jax.grad(loss)(w)

    shapes = [jax.ShapeDtypeStruct(v, jnp.bfloat16) for v in ((32768, 4096), (4096, 4096))]
    with jax.sharding.use_abstract_mesh(mesh):
        sharded = jax.shard_map(one, mesh=mesh, in_specs=(tokens, whole), out_specs=whole)
        text = jax.jit(sharded).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text
    assert text.count("stablehlo.all_reduce") == 1


@pytest.mark.kernels
def test_a_layer_of_a_model():
    """Delivered by a recipe; and gradient accumulation draws anew in every micro-step."""
    made = {}
    for backend in ("xla", "interpret"):
        model = nnx.Linear(64, 64, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
        nm.nnx.sparsify(model, nm.Recipe(((".*", "s_ste()"),), backend))
        loss = lambda m: jnp.sum(m(random((64, 64))).astype(jnp.float32) * random((64, 64), 2, jnp.float32))
        gradient, grads = nnx.jit(nnx.grad(loss)), []
        for micro in range(2):
            nm.nnx.set_step(model, 3, micro)
            grads.append(jax.tree.leaves(gradient(model)))
        assert not np.array_equal(grads[0][-1], grads[1][-1])
        made[backend] = grads[0] + grads[1]
    near(made["interpret"], made["xla"], bits=7)


@dataclass(frozen=True, repr=False)
class half(nm.ste):
    """A gradient rule that changes values."""

    reads_step = False
    describe, phases, at, normal_form = nm.Pruner.describe, nm.Pruner.phases, nm.Pruner.at, nm.Pruner.normal_form

    def __call__(self, x, axis=-1, ctx=nm.Ctx()):
        return jnp.asarray(0.5, x.dtype) * super().__call__(x, axis, ctx)


@dataclass(frozen=True, repr=False)
class shifted(nm.Pruner):
    """A kind of mse that is not 2:4."""

    n: int
    m: int

    def __call__(self, x, axis=-1, ctx=nm.Ctx()):
        return nm.mse(self.n, self.m)(x, axis, ctx) + jnp.asarray(1, x.dtype)


@dataclass(frozen=True, repr=False)
class blurred(nm.Pruner):
    """A pruner that puts values in the place of zeros."""

    def __call__(self, x, axis=-1, ctx=nm.Ctx()):
        return x + jnp.roll(x, 1, axis)


@pytest.mark.kernels
@pytest.mark.parametrize(
    "slots",
    [
        {"y_w": half(nm.mse(2, 4))},
        {"y_w": nm.ste(shifted(2, 4))},
        {"y_w": nm.ste(nm.transposable(2, 4)), "dx_w": blurred()},
    ],
    ids=str,
)
def test_kernels_do_not_replace_the_call_of_another_class(slots):
    """A class from elsewhere computes by its own code, whatever it inherits."""
    x, w, s = random((128, 128)), random((128, 128), 1), nm.Sparsity(**slots)
    run = lambda backend: lambda x, w: nm.dot_general(x, w, PLAIN, sparsity=s, backend=backend)
    near(everything(run("interpret"), x, w), everything(run("xla"), x, w), bits=7)


# ---- choosing ----


def choices(text, lhs=(8192, 4096), rhs=(4096, 16384), dims=PLAIN, dtype=jnp.bfloat16, backend="auto", **options):
    x, w = jax.ShapeDtypeStruct(lhs, dtype), jax.ShapeDtypeStruct(rhs, dtype)
    return explain(as_dot(x, w, dims, **options), x, w, nm.parse(text), backend)


def test_on_a_cpu_nothing_is_packed():
    found = choices("s_ste()")
    assert [c.how for c in found.values()] == ["emulated", "dense", "emulated"]
    assert found["y"].why == "cpu has no sparse tensor cores"
    assert target("auto") == target("pallas") == Refusal("cpu has no sparse tensor cores")


def test_on_hopper_what_pays_is_packed():
    with on():
        assert target("auto") == Target("NVIDIA H200", "hopper", 132)
        found = choices("s_ste()")
        assert [c.how for c in found.values()] == ["packed", "dense", "packed"]
        assert (found["y"].operand, found["dw"].operand) == ("w", "g")
        w, g = found["y"].shape, found["dw"].shape
        assert (w.m, w.n, w.k, w.m_major, w.n_major, w.transpose) == (16384, 8192, 4096, True, False, True)
        assert (g.m, g.n, g.k, g.m_major, g.n_major, g.transpose) == (16384, 4096, 8192, True, True, True)
        small = choices("s_ste()", (512, 256), (256, 256))
        assert small["dw"].how == "emulated"
        assert "of the emulated speed on NVIDIA H200" in small["dw"].why
        assert [c.how for c in choices("s_ste(fp8=True)").values()] == ["packed", "fp8", "packed"]


@pytest.mark.parametrize("sizes", [(768, 2304), (768, 768), (768, 3072), (3072, 768)], ids=str)
def test_the_recipes_run_packed_in_vit_b(sizes):
    """64 images of 197 tokens: 197 is a prime, so the last tile along tokens is partial, and so are the parts of dw."""
    faded = nm.parse("mdgf(2,4,linear(1,0,700)); dw_g=mvue(2,4)").at(700)
    recipes = {"s_ste()": "packed dense packed", "fst()": "packed packed packed", f"{faded}": "packed dense packed"}
    with on():
        for text, hows in recipes.items():
            found = choices(text, (64 * 197, sizes[0]), sizes)
            assert " ".join(route.how for route in found.values()) == hows, found


FLOAT32 = "its operands are x float32 and w float32, but kernels need bfloat16 or float16: set dtype=jnp.bfloat16 in the layer"
MOVED = "the axes of x (64, 64, 64) are not in an order that reads as a matrix without moving them"
BY_KERNELS, MI300X, RTX = "w by hopper's kernels", "AMD Instinct MI300X", "NVIDIA GeForce RTX 5090"
AUTO, MANUAL, EXPLICIT = AxisType.Auto, AxisType.Manual, AxisType.Explicit
TWO = (("data", 8), ("model", 2))
ANY = {"backend": "pallas"}  # whether it pays or not
REASONS = [  # the device and its mesh, the method, the operands, the product, and its reason; of a mesh the beginning
    ({}, "ste(2,4)", ANY | {"dtype": jnp.float32}, "y", FLOAT32),
    ({}, "ste(4,8)", ANY, "y", "w is 4:8, but sparse tensor cores support only 2:4"),
    ({}, "mdgf(2,4,linear(1,0,9))", ANY, "y", "y_w=decay(mse(2,4),linear(1.0,0.0,9)) is not 2:4 at every step"),
    ({}, "ste(2,4)", ANY | {"rhs": (4096, 1000)}, "y", "M, N, K = 1000, 8192, 4096 do not divide into tiles of 64 x 8 x 64"),
    ({}, "ste(2,4)", ANY | {"dims": (((0,), (0,)), ((), ())), "lhs": (64, 2, 64), "rhs": (64, 128)}, "y", BY_KERNELS),
    ({}, "ste(2,4)", ANY | {"lhs": (64, 64, 64), "rhs": (64, 128)}, "y", MOVED),
    ({}, "y_w=ste(fp8('e4m3'))", ANY, "y", "y_w=ste(fp8('e4m3')) leaves w dense"),
    ({}, "y_w=ste(fp4())", ANY, "y", "y_w=ste(fp4()) leaves w dense"),
    ({}, "s_ste(fp8=True)", ANY | {"lhs": (96, 4096)}, "y", "FP8 forms of 96 x 4096: the first side must divide by 128 and the second by 64"),
    ({}, "ste(2,4)", ANY | {"out_sharding": PartitionSpec()}, "y", "out_sharding is given, and kernels do not support it"),
    ({"kind": "NVIDIA A100-SXM4-80GB"}, "s_ste(fp8=True)", {}, "dx", "NVIDIA A100-SXM4-80GB has no FP8 tensor cores"),
    ({"kind": RTX}, "ste(2,4)", {}, "y", f"{RTX}: there are kernels for Hopper, Blackwell and Ampere only"),
    ({"kind": MI300X}, "ste(2,4)", {}, "y", f"{MI300X} has no sparse tensor cores"),
    ({}, "ste(2,4)", {"backend": "xla"}, "y", "backend='xla'"),
    # every device works on its part, and "auto" expects that they share the tokens
    ({"axes": (("data", 2), ("model", 2))}, "ste(2,4)", {"lhs": (32768, 4096)}, "y", f"{BY_KERNELS}, split over 4 devices"),
    ({"axes": (("data", 2),)}, "mvue(2,4)", {"lhs": (8256, 4096)}, "dw", "M, N, K = 16384, 4096, 4128 do not divide into tiles of 64 x 64 x 64, on each of 2 devices"),
    ({"axes": (("data", 3),)}, "ste(2,4)", {}, "y", "8192 tokens do not split evenly over 3 devices"),
    ({"axes": (("data", 8),), "kinds": (MANUAL,)}, "ste(2,4)", {}, "y", BY_KERNELS),
    ({"kinds": (EXPLICIT,)}, "ste(2,4)", {}, "y", "the mesh has explicit axes ('x' of size 1)"),
    ({"axes": TWO, "kinds": (EXPLICIT, AUTO)}, "ste(2,4)", {}, "y", "the mesh has explicit axes ('data' of size 8), and kernels need axes that are all"),
    ({"axes": TWO, "kinds": (AUTO, MANUAL)}, "ste(2,4)", {}, "y", "the mesh has automatic axes beside manual ones ('data' of size 8), and kernels need axes that are all"),
    *(({"axes": TWO, "kinds": kinds}, "ste(2,4)", ANY, "y", BY_KERNELS) for kinds in ((EXPLICIT, AUTO), (AUTO, MANUAL))),
]  # fmt: skip


@pytest.mark.parametrize(("where", "text", "options", "product", "why"), REASONS)
def test_reasons(where, text, options, product, why):
    with on(**where):
        found = choices(text, **options)[product]
    assert found.why.startswith(why) if why.startswith("the mesh has") else found.why == why
    assert found.how == ("packed" if why.startswith(BY_KERNELS) else "emulated")


def test_other_devices(monkeypatch):
    with on("NVIDIA A100-SXM4-80GB"):
        assert target("auto").family == "ampere"
        why = choices("ste(2,4)")["y"].why
        assert "of the emulated speed on NVIDIA A100" in why or "0.11" in why
    monkeypatch.setattr(versions, "stores_transposed", lambda: True)
    with on("NVIDIA B200"):
        none = "no tiles have been measured on NVIDIA B200: run python -m experiments.bench tune"
        assert {route.why for route in choices("s_ste(fp8=True)").values()} == {none}
        assert choices("ste(2,4)", backend="pallas")["y"].why == "w by blackwell's kernels"
        refused = choices("ste(2,4)", (8192, 4032), (4032, 16384), backend="pallas")["y"]
        assert refused.why == "M, N, K = 16384, 8192, 4032 do not divide into tiles of 128 x 64 x 128"


def test_a_device_multiplies_its_part():
    with on(axes=(("data", 2), ("model", 2))):
        assert choices("ste(2,4)", (32768, 4096))["y"].shape.n == 8192
    with on(axes=(("data", 8), ("model", 8))):
        assert "N, K = 16384, 128, 4096, it is expected at" in choices("ste(2,4)")["y"].why
    with on():
        assert choices("ste(2,4)", (0, 4096))["y"].how == "emulated"


@pytest.mark.parametrize(
    ("window", "options", "why"),
    [
        (3, {}, "it is a convolution whose kernel is larger than 1, so dw multiplies patches of x, and kernels multiply matrices"),
        (1, {"strides": (2, 2)}, "it is a convolution with strides, which skip rows of x, and kernels multiply matrices"),
        (1, {"names": ("NCHW", "HWIO", "NHWC"), "x": (8, 64, 32, 32)}, "x (8, 64, 32, 32) does not have the batch first and the channels last, so it does not read as a matrix"),
        (1, {"names": ("NHWC", "HWIO", "NCHW")}, "y (8, 64, 32, 32) does not have the batch first and the channels last, so it does not read as a matrix"),
        (1, {"groups": 2}, "it is a convolution with padding, dilation or groups, and kernels multiply matrices"),
    ],
)  # fmt: skip
def test_a_convolution_that_is_no_matrix_product_is_emulated(window, options, why):
    x = jax.ShapeDtypeStruct(options.get("x", (8, 32, 32, 64)), jnp.bfloat16)
    groups = options.get("groups", 1)
    w = jax.ShapeDtypeStruct((window, window, 64 // groups, 64), jnp.bfloat16)
    names = options.get("names", ("NHWC", "HWIO", "NHWC"))
    op = as_conv(x, w, options.get("strides", (1, 1)), "SAME", dimension_numbers=names, feature_group_count=groups)
    with on():
        assert explain(op, x, w, nm.methods.ste(), "auto")["y"].why == why


@pytest.mark.kernels
@pytest.mark.parametrize("text", ["s_ste(2,4)", "fst(every=5)", "dx_g=mse(2,4); dw_x=mse(2,4)"])
@pytest.mark.parametrize("kernel", ["HWIO", "OIHW"])
def test_a_convolution_of_kernel_1_is_a_product(text, kernel):
    """The images of 8 x 8 have no groups of positions that a merged axis would cut otherwise."""
    s = nm.parse(text)
    sizes = {"H": 1, "W": 1, "I": 64, "O": 128}
    x, w = random((2, 8, 8, 64)), random([sizes[name] for name in kernel], 1)
    contract, out = kernel.index("I"), kernel.index("O")
    state = s.init(w, contract=contract, out=out, ctx=nm.Ctx(nm.random.words(7)))
    f = lambda backend: lambda x, w: nm.conv_general_dilated(
        x, w, (1, 1), "VALID", dimension_numbers=("NHWC", kernel, "NHWC"), sparsity=s, backend=backend,
        ctx=nm.Ctx(7, 3, state or None),
    )  # fmt: skip
    op = as_conv(x, w, (1, 1), "VALID", dimension_numbers=("NHWC", kernel, "NHWC"))
    hows = [route.how for route in explain(op, x, w, s, "interpret").values()]
    assert "packed" in hows
    assert "emulated" not in hows
    near(everything(f("interpret"), x, w), everything(f("xla"), x, w))


@pytest.mark.slow
def test_pallas_or_an_error():
    x, w = random((64, 64)), random((64, 64), 1)
    call = lambda text, backend="pallas": nm.dot_general(
        x, w, PLAIN, sparsity=nm.parse(text), name="up", backend=backend
    )
    with pytest.raises(
        ValueError, match="^up: backend='pallas', but y cannot be packed: cpu has no sparse tensor cores"
    ):
        call("ste(2,4)")
    with on(), pytest.raises(ValueError, match=r"^up: backend='pallas', but y cannot be packed: w is 4:8"):
        call("ste(4,8)")
    assert (call("dense") == x @ w).all()  # nothing to pack is no fault
    assert routes_of(as_dot(x, w, PLAIN), x, w, nm.methods.ste(), "xla") is None


def test_choices_are_made_once():
    before = routes._routes.cache_info()
    for _ in range(5):
        choices("ste(2,4)", (640, 64), (64, 64))
    after = routes._routes.cache_info()
    assert (after.misses - before.misses, after.hits - before.hits) == (1, 4)


# ---- the plan ----


@pytest.mark.slow
def test_a_plan_for_a_device_that_is_not_there():
    recipe = nm.Recipe(((".*", "ste(2,4)"),), backend="pallas")
    model = nm.nnx.sparsify(nnx.Linear(4096, 4096, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)), recipe)
    x = jax.ShapeDtypeStruct((16384, 4096), jnp.bfloat16)
    with nm.kernels.on("NVIDIA H200"):
        plan = nm.nnx.plan(model, x)
    assert (plan.runs, plan.refused) == ({"packed": 1}, ())
    plan = nm.nnx.plan(model, x)
    assert plan.runs == {"refused": 1}
    assert plan.refused == (
        ("", "backend='pallas', but y cannot be packed: cpu has no sparse tensor cores. Write backend='auto'."),
    )
    assert "REFUSED" in str(plan)


@pytest.mark.slow
def test_a_plan_tells_what_is_packed():
    make = lambda: nm.models.GPT(
        vocabulary=256, length=256, width=2048, depth=2, heads=8, hidden=8192, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)
    )
    recipe = nm.Recipe(((r".*/mlp/.*", "s_ste()"), (r".*/attention/out", "ste(4,8)")))
    tokens = jax.ShapeDtypeStruct((64, 256), jnp.int32)
    model = nnx.eval_shape(lambda: nm.nnx.sparsify(make(), recipe))
    here = nm.nnx.plan(model, tokens)
    assert here.runs == {"emulated": 10}
    assert "Emulated (zeros are multiplied) y and dw of blocks/0-1/mlp/(down|up)" in " ".join(str(here).split())
    assert "y of blocks/0-1/attention/out: w is 4:8, but sparse tensor cores support only 2:4" in " ".join(
        str(here).split()
    )
    with on():
        there = nm.nnx.plan(model, tokens)
    text = " ".join(str(there).split())
    assert there.runs["packed"] >= 4
    assert "Packed y of blocks/0-1/mlp/(down|up): w by hopper's kernels; expected at " in text
    assert nm.nnx.plan(model).runs == {}  # which only a call tells


def test_a_plan_adds_up_what_packed_products_are_expected_to_take():
    """Of three layers in a stack, and of one of another shape."""
    with on():
        stack, one = (choices("s_ste()", (8192, sizes[0]), sizes)["dw"] for sizes in ((768, 3072), (4096, 4096)))
    dense, packed, packing = (
        3 * getattr(stack.times, name) + getattr(one.times, name) for name in ("dense", "packed", "packing")
    )
    assert 0 < packing < packed < dense
    flops = 3 * 2 * 8192 * 768 * 3072, 2 * 8192 * 4096 * 4096
    said = savings.of_time([(flops[0], [("dw", stack)]), (flops[1], [("dw", one)])], stack.why, None)
    assert said == f"; expected at {(packed + packing) / dense:.2f} of the dense time, {packing / dense:.2f} to pack"


# ---- what is not to be packed, or not so ----

HOSTILE = [
    "y_x=ste(fp8('e4m3')); y_w=ste(chain(mse(2,4),fp8('e4m3'))); dx_g=fp8('e5m2'); dx_w=raw(chain(soft(2,4),fp8('e5m2')))",
    "y_x=ste(fp8('e4m3')); y_w=ste(chain(transposable(2,4),fp8('e4m3'))); dx_g=fp8('e5m2'); dx_w=fp8('e4m3')",
    "y_w=ste(chain(stages(((0,identity),(10,transposable(2,4)))),mse(2,4)))",
    "y_w=ste(chain(decay(transposable(2,4),constant(0.5)),mse(2,4)))",
    "dw_g=chain(chain(mse(2,4),fp8('e5m2')),identity)",
]


@pytest.mark.kernels
@pytest.mark.parametrize("text", HOSTILE)
def test_odd_mixes_are_as_xla_has_them(text):
    s = nm.parse(text)
    x, w = random((128, 256)), random((256, 128), 1)
    state = first_state(s, w)
    run = lambda backend: lambda x, w: nm.dot_general(x, w, PLAIN, sparsity=s, ctx=nm.Ctx(7, 3, state), backend=backend)
    real, simulated = everything(run("interpret"), x, w), everything(run("xla"), x, w)
    norm = lambda v: float(jnp.linalg.norm(v.astype(jnp.float32)))
    for a, b in zip(real, simulated, strict=True):
        assert norm(a - b) <= (0.12 if "fp8" in text and text.startswith("y_") else 0.01) * norm(b)


@pytest.mark.kernels
def test_derivatives_beyond_the_gradient():
    """If only y is packed, the gradients are XLA's. Otherwise they are refused, and not zero."""
    x, w = random((64, 64)), random((64, 64), 1)
    loss = lambda text, backend: lambda w: jnp.sum(layer(backend, text)(x, w).astype(jnp.float32) ** 2)
    second = lambda text, backend: jax.jit(lambda w: jax.jvp(jax.grad(loss(text, backend)), (w,), (w,)))(w)
    near(second("ste(2,4)", "interpret"), second("ste(2,4)", "xla"))
    forward = lambda backend: jax.jit(lambda *v: jax.jvp(layer(backend, "ste(2,4)"), v, (w, x)))(x, w)
    near(forward("interpret"), forward("xla"))
    with pytest.raises(TypeError, match="no derivative beyond the gradient of its layer: .* write backend='xla'"):
        second("y_w=ste(transposable(2,4))", "interpret")
    packed, b = nm.pack(nm.mse(2, 4)(x)), w
    for backend in ("interpret", "xla"):
        with pytest.raises(TypeError, match="spmm has no derivative: differentiate a product with a sparsity"):
            jax.grad(lambda b, k=backend: nm.kernels.spmm(packed, b, backend=k).astype(jnp.float32).sum())(b)


def test_kernels_are_checked_wherever_their_device_is(monkeypatch):
    """Under a mesh too, which tells of its device by itself. What is wrong is refused by its kind."""
    from nmjax.kernels import check

    class Device:
        device_kind, platform, core_count, compute_capability = "NVIDIA H200", "gpu", 132, "9.0"

    found = {"multiplying (A along M, B along N, transposed)": "gives wrong numbers"}
    found |= {check.FP8: "did not end within 60 s", check.FP8_FORMS: "gives wrong numbers"}
    monkeypatch.setattr(jax, "local_devices", lambda: [Device()])
    monkeypatch.setattr(check, "findings", lambda target, device: found)
    routes._routes.cache_clear()
    with on():
        products = choices("ste(2,4); dw_g=mvue(2,4)")
        assert products["y"].how == "packed"
        wrong = "on NVIDIA H200, multiplying (A along M, B along N, transposed) gives wrong numbers. Please report it"
        assert products["dw"] == routes.Route("emulated", wrong)
        products = choices("s_ste(2,4,fp8=True)")
        assert {route.how for route in products.values()} == {"emulated"}
        assert products["y"].why.startswith(
            "on NVIDIA H200, multiplying in FP8 did not end within 60 s; packing in FP8"
        )
        monkeypatch.setattr(jax, "process_count", lambda: 2)
        routes._routes.cache_clear()
        with pytest.raises(RuntimeError, match="process 0: on NVIDIA H200, multiplying in FP8 did not end"):
            choices("s_ste(2,4,fp8=True)")
    routes._routes.cache_clear()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "gradients", "forward"),
    [
        ("y_w=ste(transposable(2,4))", [4], [2]),  # by XLA's pruner where y alone is wanted
        ("dx_g=mvue(2,4); dw_g=mvue(2,4)", [4], []),
        ("bdwp(2,4)", [4], [2]),
        ("y_w=mse(2,4); dx_w=mse(2,4)", [2, 2], [2]),  # dx prunes the pruned weight again
    ],
)
def test_two_forms_are_packed_out_of_one_reading(text, gradients, forward):
    """By one kernel, which prunes for both products."""
    s, x, w = nm.parse(text), *(jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16),) * 2
    product = lambda x, w: nm.dot_general(x, w, PLAIN, sparsity=s, ctx=nm.Ctx(7, 3)).astype(jnp.float32).sum()
    with on():
        assert packers(jax.make_jaxpr(jax.grad(product, (0, 1)))(x, w).jaxpr) == gradients
        assert packers(jax.make_jaxpr(product)(x, w).jaxpr) == forward
