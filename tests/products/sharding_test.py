"""The same numbers on every mesh, and no communication for pruning alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import nmjax as nm
from tests.products.common import MATMUL, placed, products, whole

pytestmark = pytest.mark.sampled

TYPES = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")


def mesh_of(kind, shape=(4,), names=("d",)):
    return jax.make_mesh(shape, names, axis_types=(TYPES[kind],) * len(names))


def collectives(compiled):
    text = compiled.as_text()
    return [name for name in COLLECTIVES if name in text]


# ---- products ----

METHODS = {
    "dense": "dense()",
    "ste": "ste(2,4)",
    "s_ste": "s_ste(2,4)",
    "sdgp": "sdgp(2,4,over='group')",
    "bdwp": "bdwp(2,4)",
    "transposable": "y_w=ste(transposable(2,4))",
    "transposable 4:8": "y_w=ste(transposable(4,8))",
    "every slot": "y_x=ste(mse(2,4)); y_w=ste(mse(2,4)); dx_g=mvue(2,4); dx_w=raw(mse(2,4)); "
    "dw_g=mvue(2,4); dw_x=raw(mse(2,4))",
}
LAYOUTS = {  # of x (tokens, in), w (in, out) and g (tokens, out)
    "tokens": (P("d"), P(), P("d")),
    "in": (P(), P("d", None), P()),
    "out": (P(), P(None, "d"), P(None, "d")),
    "in, of both": (P(None, "d"), P("d", None), P()),
}


def three_products(x, w, g, key, step, sparsity, out_sharding=None):
    def f(x, w):
        ctx = nm.Ctx(key, step, {"y_w": jnp.float32(1)} if sparsity.y_w.facts.has_state else None)
        return nm.dot_general(x, w, MATMUL, out_sharding=out_sharding, sparsity=sparsity, ctx=ctx)

    return products(f, x, w, g)


def operands(method):
    """16 values for each device, so that groups are aligned. What rescaling divides by is a power of two for +-1."""
    g = whole(2, 64, 64)
    if method == "sdgp":
        g = jnp.where(g < 0, -1.0, 1.0)
    return whole(0, 64, 64), whole(1, 64, 64), g


@functools.cache
def on_one_device(method):
    run = jax.jit(three_products, static_argnames="sparsity")
    return run(*operands(method), jax.random.key(3), 5, nm.parse(METHODS[method]))


def compiled_on(mesh, layout, method, kind):
    """The three products of a method as compiled for a mesh, and the operands where they belong."""
    # where both operands are sharded along what they contract, an explicit mesh wants to be told of the result
    told = NamedSharding(mesh, P()) if kind == "explicit" and layout == "in, of both" else None
    run = jax.jit(three_products, static_argnames=("sparsity", "out_sharding"))
    arguments = (*placed(mesh, operands(method), LAYOUTS[layout]), jax.random.key(3), 5)
    with jax.set_mesh(mesh):
        return run.lower(*arguments, nm.parse(METHODS[method]), told).compile(), arguments


@functools.cache
def collectives_of_dense(layout, kind):
    return collectives(compiled_on(mesh_of(kind), layout, "dense", kind)[0])


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("method", METHODS)
def test_sharded_is_unsharded_and_communicates_as_dense(method, layout, kind):
    mesh = mesh_of(kind)
    compiled, arguments = compiled_on(mesh, layout, method, kind)
    with jax.set_mesh(mesh):
        results = compiled(*arguments)
    for result, like in zip(results, on_one_device(method), strict=True):
        assert result.dtype == like.dtype
        np.testing.assert_array_equal(np.asarray(result), np.asarray(like))
    if layout in ("tokens", "out"):  # elsewhere the partitioner has a choice: to gather the weight, or to add up y
        assert collectives(compiled) == collectives_of_dense(layout, kind) == ["all-reduce"]
        x, w, g, *_ = arguments
        for result, like in zip(results, (g, x, w), strict=True):  # y, dx and dw lie where their operands do
            assert result.sharding.is_equivalent_to(like.sharding, 2)


@pytest.mark.parametrize("kind", TYPES)
def test_two_mesh_axes_and_a_sequence(kind):
    """Batch and sequence both sharded: dw groups tokens along the sequence alone, and moves nothing for it."""
    sparsity = nm.parse("s_ste(2,4); dx_g=mse(2,4)")
    x, w, g = whole(0, 4, 16, 16), whole(1, 16, 8), whole(2, 4, 16, 8)

    def run(x, w, g):
        f = lambda x, w: nm.einsum(
            "bti,io->bto", x, w, sparsity=sparsity, ctx=nm.Ctx(jax.random.key(0), 0, {"y_w": jnp.float32(1)})
        )
        return products(f, x, w, g)

    expected = jax.jit(run)(x, w, g)
    mesh = mesh_of(kind, (2, 2), ("data", "seq"))
    there = placed(mesh, (x, w, g), (P("data", "seq"), P(), P("data", "seq")))
    with jax.set_mesh(mesh):
        compiled = jax.jit(run).lower(*there).compile()
        results = compiled(*there)
    for result, like in zip(results, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(result), np.asarray(like))
    assert collectives(compiled) == ["all-reduce"]  # of dw over its tokens, as without pruning


# ---- pruning alone ----

PRUNERS = (
    "mse(2,4)",
    "mse(1,32)",
    "mvue(2,4)",
    "mvue(3,8)",
    "mvue_approx(2,4)",
    "uniform(2,4)",
    "soft(2,4)",
    "transposable(2,4)",
    "rescale(mse(2,4),over='group')",
)


def pruning(p, axis):
    return jax.jit(lambda x, key: nm.prune(nm.parse_pruner(p), x, axis=axis, key=key, step=3))


@functools.cache
def pruned_on_one_device(p, axis):
    x, key = jnp.asarray(np.random.default_rng(0).standard_normal((128, 128)), jnp.float32), jax.random.key(0)
    return x, key, pruning(p, axis)(x, key)


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("spec", [P("d", None), P(None, "d")], ids=["rows", "columns"])
@pytest.mark.parametrize("p", PRUNERS)
def test_pruning_aligned_groups_moves_nothing(p, spec, axis, kind):
    """Along the sharded axis or across it: no collective, the sharding kept, and the numbers of one device."""
    x, key, expected = pruned_on_one_device(p, axis)
    mesh = mesh_of(kind)
    there = jax.device_put(x, NamedSharding(mesh, spec))
    with jax.set_mesh(mesh):
        compiled = pruning(p, axis).lower(there, key).compile()
        result = compiled(there, key)
    assert collectives(compiled) == []
    assert result.sharding.is_equivalent_to(there.sharding, 2)
    np.testing.assert_array_equal(np.asarray(result), np.asarray(expected))


def test_groups_across_devices_would_be_seen():
    """The check above can fail: with 32 values a device, groups of 64 lie on two of them."""
    mesh = mesh_of("auto")
    x = jax.ShapeDtypeStruct((128, 8), jnp.float32, sharding=NamedSharding(mesh, P("d", None)))
    with jax.set_mesh(mesh):
        compiled = jax.jit(lambda x: nm.prune(nm.mse(1, 64), x, axis=0)).lower(x).compile()
    assert collectives(compiled)


def test_noise_is_of_the_group_not_of_the_device():
    """One array of ones: were noise drawn for every device alike, its quarters would be equal."""
    mesh = mesh_of("explicit")
    x = jax.device_put(jnp.ones((64, 64)), NamedSharding(mesh, P("d", None)))
    with jax.set_mesh(mesh):
        pruned = np.asarray(jax.jit(lambda x: nm.prune(nm.mvue(2, 4), x, axis=1, key=0))(x))
    quarters = pruned.reshape(4, 16, 64)
    for i in range(4):
        for j in range(i):
            assert np.any(quarters[i] != quarters[j])
