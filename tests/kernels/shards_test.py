"""Kernels on arrays that XLA cuts: four virtual devices give the results of one, with as few collectives as possible.

In a program that XLA partitions, the interpreter of Hopper's kernels does not work. There XLA multiplies packed arrays.
The rest is as on a GPU: which device packs which part, the noise, and the sums. `cuda_test.py` compiles the kernels for
four devices.
"""

from collections import Counter
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import nmjax as nm
from experiments.bench.collectives import collectives
from nmjax.kernels import calls, shards
from nmjax.kernels.limits import Shape
from nmjax.kernels.targets import Target
from nmjax.products import routes
from tests.products.common import normal, placed

FOUR = Target("interpreter", "hopper", 2, True, devices=4)
H200 = Target("NVIDIA H200", "hopper", 132)
LINE = {"data": 4}
SQUARE = {"data": 2, "tensor": 2}


def mesh_of(axes):
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def random(shape, seed=0):
    return normal(seed, *shape, dtype=jnp.bfloat16)


SHAPES = (512, 256), (256, 384), (512, 384)


def products(text, equation="ti,io->to", shapes=SHAPES, backend="interpret"):
    """A function of x, w and g to y, dx and dw, and its arguments."""
    s = nm.parse(text)
    x, w, g = (random(shape, seed) for seed, shape in enumerate(shapes))
    state = s.init(w, contract=0, out=1, ctx=nm.Ctx(nm.random.words(1))) or None

    def run(x, w, g):
        product = partial(nm.einsum, equation, sparsity=s, ctx=nm.Ctx(7, 3, state), backend=backend)
        y, back = jax.vjp(product, x, w)
        return y, *back(g)

    return jax.jit(run), (x, w, g)


def wanted(text, arrays, equation="ti,io->to", shapes=SHAPES):
    """y, dx and dw of one device by XLA, in float32: some versions of XLA sum products of bfloat16 in bfloat16."""
    f, _ = products(text, equation, shapes, "xla")
    return f(*(jnp.asarray(np.asarray(v), jnp.float32) for v in arrays))


def sent(f, *arrays):
    """The number of collectives of a compiled program, by kind."""
    return dict(Counter(row.kind for row in collectives(f.lower(*arrays).compile().as_text())))


def near(made, wanted, share=2.0**-7):
    for a, b in zip(made, wanted, strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.abs(a - b).max() <= share * np.abs(b).max()


PLACES = {
    "tokens": (LINE, (P("data"), P(), P("data")), {"all-reduce": 1}),  # dw is summed
    "weights along out": (SQUARE, (P("data"), P(None, "tensor"), P("data", "tensor")), {"all-reduce": 2}),  # and dx
    "weights along in": (SQUARE, (P("data", "tensor"), P("tensor"), P("data")), {"all-reduce": 2}),  # y and dw
    "everything whole": (LINE, (P(), P(), P()), {}),
}


@pytest.mark.kernels
@pytest.mark.parametrize("text", ["ste(2,4)", "s_ste(2,4)", "fst(2,4)", "bdwp(2,4)"])
@pytest.mark.parametrize("place", PLACES)
def test_four_devices_are_equal_to_one(text, place):
    """Noise too: a group draws the same number wherever it lies. Sums of parts round in another order."""
    axes, specs, least = PLACES[place]
    mesh = mesh_of(axes)
    f, arrays = products(text)
    with jax.set_mesh(mesh):
        there = placed(mesh, arrays, specs)
        near(f(*there), wanted(text, arrays))
        assert sent(f, *there) == least


@pytest.mark.kernels
def test_in_fp8_the_scale_is_that_of_the_whole_array():
    """The largest value lies on the last device, and the forms have the same bits as those of one device."""
    mesh = mesh_of(LINE)
    x = random((512, 256)).at[500, 3].set(100.0)
    forms = (
        calls.Copy("e4m3", packed=True, pruner=nm.mvue(2, 4), axis=-2, rounding="random"),
        calls.Copy("e5m2", turned=True),
        calls.Copy(None, packed=True, pruner=nm.mvue(2, 4)),
    )
    one, four = (
        jax.jit(lambda x, target=target: calls.copies(x, forms, keys=[(3, 4), (5, 6), (7, 8)], target=target))
        for target in (Target("interpreter", "hopper", 2, True), FOUR)
    )
    with jax.set_mesh(mesh):
        for spec in (P("data"), P(None, "data"), P()):
            made = four(jax.device_put(x, NamedSharding(mesh, spec)))
            for a, b in zip(jax.tree.leaves(made), jax.tree.leaves(one(x)), strict=True):
                assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
        assert sent(four, jax.device_put(x, NamedSharding(mesh, P("data")))) == {"all-reduce": 1}  # the largest


@pytest.mark.kernels
@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("p", [nm.mvue(2, 4), nm.mvue_approx(2, 4), nm.soft(2, 4)], ids=str)
def test_packed_arrays_have_the_bits_of_one_device(p, axis):
    mesh, x = mesh_of(SQUARE), random((2, 256, 384))
    f = lambda x, target: calls.compress(x, axis, p, key=3, state=1.25, target=target)
    wanted = jax.jit(partial(f, target=Target("interpreter", "hopper", 2, True)))(x)
    with jax.set_mesh(mesh):
        for spec in (P(None, "data", "tensor"), P("tensor", None, "data"), P(None, ("data", "tensor"))):
            made = jax.jit(partial(f, target=FOUR))(jax.device_put(x, NamedSharding(mesh, spec)))
            for a, b in zip(jax.tree.leaves(made), jax.tree.leaves(wanted), strict=True):
                assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.mark.kernels
@pytest.mark.parametrize("specs", [(P("data"), P(), P("data")), (P("data"), P(None, "tensor"), P("data", "tensor"))])
def test_products_in_fp8(specs, monkeypatch):
    """Packed in 8 bits. The rounding is that of one device, so only the sums differ."""
    monkeypatch.setattr(routes, "target", lambda backend: FOUR)  # without a mesh, too
    mesh = mesh_of(SQUARE)
    f, arrays = products("s_ste(2,4,fp8=True)")
    alone = f(*arrays)
    with jax.set_mesh(mesh):
        near(f(*placed(mesh, arrays, specs)), alone)


@pytest.mark.parametrize(
    ("shape", "misfit"),
    {
        Shape(256, 512, 384, "float8_e4m3fn"): "k",  # 192 on each of two devices, in steps of 128
        Shape(256, 512, 1024): "",
        Shape(192, 512, 1024): "m",  # 96, in words of 64 rows
        Shape(192, 512, 384, "float8_e4m3fn"): "km",
    }.items(),
)
def test_only_what_does_not_fit_is_gathered(shape, misfit):
    mesh = mesh_of({"a": 2, "b": 2})
    cuts = {"b": (), "m": ("b",), "n": ("a",), "k": ("b",)}  # as no mesh cuts them: each letter by itself
    left, part = shards._fitting(shape, 1, cuts, mesh, H200)
    assert {letter for letter in cuts if cuts[letter] != left[letter]} == set(misfit)
    assert part.n == 256
    assert (part.m, part.k) == (shape.m // 2 ** bool(left["m"]), shape.k // 2 ** bool(left["k"]))


@pytest.mark.kernels
def test_parts_that_fit_no_kernel_are_gathered():
    """192 tokens are 48 on a device: no words of 64 rows. The result is right all the same."""
    mesh = mesh_of(LINE)
    text = "dx_g=mse(2,4)"
    f, arrays = products(text, shapes=((192, 128), (128, 64), (192, 64)))
    with jax.set_mesh(mesh):
        near(f(*placed(mesh, arrays, (P("data"), P(), P("data")))), wanted(text, arrays))


@pytest.mark.kernels
def test_no_mesh_needs_to_be_set(monkeypatch):
    """`launch.py` sets no mesh around its program."""
    monkeypatch.setattr(routes, "target", lambda backend: FOUR)
    mesh = mesh_of(LINE)
    f, arrays = products("s_ste(2,4)")
    there = placed(mesh, arrays, (P("data"), P(), P("data")))
    assert sent(f, *there) == {"all-reduce": 1}
    near(f(*there), wanted("s_ste(2,4)", arrays))


@pytest.mark.kernels
def test_batches_and_vmap():
    mesh = mesh_of(SQUARE)
    form = "bti,io->bto", ((4, 128, 256), (256, 128), (4, 128, 128))
    f, arrays = products("s_ste(2,4)", *form)
    expected = wanted("s_ste(2,4)", arrays, *form)
    with jax.set_mesh(mesh):
        x, w, g = placed(mesh, arrays, (P("data"), P(None, "tensor"), P("data", None, "tensor")))
        near(f(x, w, g), expected)
        near(jax.vmap(f)(*(jnp.stack([v, 2 * v]) for v in (x, w, g))), [jnp.stack([v, 4 * v]) for v in expected])
