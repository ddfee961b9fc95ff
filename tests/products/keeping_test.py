"""The backward pass keeps a part of x, and gives the same gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec as P

import nmjax as nm
from nmjax.products.keeping import pack, packed_pattern, unpack
from nmjax.products.operations import as_dot
from nmjax.products.pruning import Operand, pruned
from nmjax.products.slot import slot_context
from tests.products.common import MATMUL, TOKENS, normal, placed, products
from tests.products.products_test import DOTS

SLOTS = {  # the share of x that is kept, of 32 float32 features: values, and a bit for each or a place for each row
    "dw_x=rows(mvue(1,4))": 1 / 4 * (1 + 1 / 32),
    "dw_x=rows(mvue(2,4))": 1 / 2 * (1 + 1 / 32),
    "dw_x=mse(2,4)": 1 / 2 + 1 / 32,
    "dw_x=mvue(2,4)": 1 / 2 + 1 / 32,
    "dw_x=mvue(1,8)": 1 / 8 + 1 / 32,
    "dw_x=raw(mse(3,16)); y_x=ste(mse(2,4))": 3 / 16 + 1 / 32,
    "dw_x=raw(rows(mvue(1,4))); y_x=ste(mse(2,4))": 1 / 4 * (1 + 1 / 32),
    "dw_x=mse(2,4); dw_g=rows(mvue(1,4))": 1 / 2 + 1 / 32,
}


def of(text, dims=MATMUL, backend="compact"):
    return lambda x, w: nm.dot_general(x, w, dims, sparsity=nm.parse(text), ctx=nm.Ctx(5, 3), backend=backend)


def by_hand(text, x, g, dims=MATMUL):
    """dw, of operands that are pruned one by one."""
    slots = nm.parse(text).slots
    op, ctx = as_dot(x, jnp.zeros((x.shape[-1], g.shape[-1])), dims), nm.Ctx(nm.random.words(5), 3)
    axes = op.operands(x.ndim, 2)
    prune = lambda name, v: pruned(name, slots[name].pruner, v, axes[name], slot_context(ctx, name))
    forward = prune("y_x", x)
    kept = prune("dw_x", x if slots["dw_x"].raw else forward)
    return jnp.einsum("ti,to->io", kept.reshape(-1, x.shape[-1]), prune("dw_g", g).reshape(-1, g.shape[-1]))


@pytest.mark.slow
@pytest.mark.parametrize("text", SLOTS)
@pytest.mark.parametrize("shape", [(64, 32), (4, 16, 32), (4, 6, 32)])
def test_dw_is_that_of_operands_pruned_by_hand(text, shape):
    if np.prod(shape) // 32 % nm.parse(text).slots["dw_x"].pruner.facts.block:
        return
    dims = MATMUL if len(shape) == 2 else TOKENS
    x, w, g = normal(0, *shape), normal(1, 32, 24), normal(2, *shape[:-1], 24)
    _, _, dw = jax.jit(lambda x, w, g: products(of(text, dims), x, w, g))(x, w, g)
    np.testing.assert_allclose(dw, by_hand(text, x, g, dims), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("text", SLOTS)
def test_what_is_kept_has_the_bytes_of_the_packed_form(text):
    x, w = normal(0, 64, 32), normal(1, 32, 24)
    _, back = jax.vjp(of(text), x, w)
    kept = sum(leaf.nbytes for leaf in jax.tree.leaves(back)) - w.nbytes - 8  # and the words of the key
    assert kept == SLOTS[text] * x.nbytes
    assert not any(leaf.shape == x.shape and leaf.dtype == x.dtype for leaf in jax.tree.leaves(back))


def test_bfloat16_is_kept_in_nine_sixteenths():
    x, w = normal(0, 64, 32, dtype=jnp.bfloat16), normal(1, 32, 24, dtype=jnp.bfloat16)
    _, back = jax.vjp(of("dw_x=mse(2,4)"), x, w)
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(back)) - w.nbytes - 8 == x.nbytes * 9 // 16


def test_x_is_kept_where_the_backward_pass_needs_it():
    x, w = normal(0, 64, 32), normal(1, 32, 24)
    for text in (
        "dw_g=mse(2,4)",
        "dw_x=rows(mvue(1,4),by='both')",
        "dw_x=mse(2,4); dw_g=rows(mse(2,4),by='both')",
    ):
        _, back = jax.vjp(of(text), x, w)
        assert any(leaf.shape == x.shape for leaf in jax.tree.leaves(back))


@pytest.mark.slow
@pytest.mark.parametrize("pattern", [(1, 2), (2, 4), (4, 8), (3, 16), (9, 32), (1, 128)])
@pytest.mark.parametrize("shape", ["plain", "two contracted, permuted", "permuted batch"])
def test_packing_gives_the_operand_back(pattern, shape):
    n, m = pattern
    lhs, rhs, dims = DOTS[shape]
    lhs = tuple(256 if a in dims[0][0][-1:] else size for a, size in enumerate(lhs))
    op = as_dot(jnp.zeros(lhs), jnp.zeros(rhs), dims)
    operand = op.operands(len(lhs), len(rhs))["y_x"]
    for dtype in (jnp.float32, jnp.bfloat16):
        x = normal(3, *lhs, dtype=dtype).at[(0,) * len(lhs)].set(jnp.nan)
        x = pruned("x", nm.mse(n, m), x, operand, nm.Ctx())
        assert packed_pattern(pattern, x, operand) == pattern
        found = jax.jit(lambda x: unpack(pack(x, operand, pattern), x.shape, operand, pattern))(x)
        assert found.dtype == dtype
        np.testing.assert_array_equal(np.asarray(found, np.float32), np.asarray(x, np.float32))


def test_a_packed_form_that_is_not_smaller_is_not_made():
    for n, m in ((15, 16), (31, 32)):
        assert packed_pattern((n, m), jnp.zeros((64, 3), jnp.bfloat16), Operand((0,), (1,), ())) is None
    assert packed_pattern((31, 32), jnp.zeros((64, 3)), Operand((0,), (1,), ())) is None
    assert packed_pattern((30, 32), jnp.zeros((64, 3)), Operand((0,), (1,), ())) == (30, 32)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(2, 12, 3), (4, 6, 3)])
def test_groups_in_one_axis_or_over_several_are_packed(shape):
    operand = Operand((0, 1), (2,), ())
    x = pruned("x", nm.mse(2, 4), normal(0, *shape), operand, nm.Ctx())
    assert packed_pattern((2, 4), x, operand) == (2, 4)
    np.testing.assert_array_equal(unpack(pack(x, operand, (2, 4)), x.shape, operand, (2, 4)), x)


@pytest.mark.slow
def test_bits_that_do_not_fill_bytes_are_not_packed():
    assert packed_pattern((2, 4), jnp.zeros((12, 3)), Operand((0,), (1,), ())) is None
    assert packed_pattern((2, 4), jnp.zeros((2, 12, 3)), Operand((0, 1), (2,), ())) == (2, 4)  # 24 tokens
    assert packed_pattern((2, 4), jnp.zeros((3, 12, 3)), Operand((0, 1), (2,), ())) is None
    x, w, g = normal(0, 12, 8), normal(1, 8, 4), normal(2, 12, 4)
    _, _, dw = products(of("dw_x=mse(2,4)"), x, w, g)
    np.testing.assert_allclose(dw, by_hand("dw_x=mse(2,4)", x, g), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_bytes_that_would_lie_on_two_devices_are_not_packed():
    """12 tokens on each device are whole groups of four, and one and a half bytes of bits."""
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Explicit,))
    arrays = normal(0, 24, 16), normal(1, 16, 8), normal(2, 24, 8)
    there = placed(mesh, arrays, (P("d"), P(), P("d")))
    text, operand = "dw_x=mse(2,4)", Operand((0,), (1,), ())
    assert packed_pattern((2, 4), arrays[0], operand) == (2, 4)
    assert packed_pattern((2, 4), there[0], operand) is None
    with jax.set_mesh(mesh):
        dw = jax.jit(lambda x, w, g: products(of(text), x, w, g))(*there)[2]
    np.testing.assert_allclose(dw, by_hand(text, arrays[0], arrays[2]), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("text", ["dw_x=mse(2,4)", "dw_x=rows(mse(1,4))", "dw_g=rows(mse(1,4))"])
def test_shard_map_sums_dw_over_devices(text):
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))
    x, w, g = normal(0, 64, 32), normal(1, 32, 24), normal(2, 64, 24)
    inside = jax.shard_map(of(text), mesh=mesh, in_specs=(P("d"), P()), out_specs=P("d"))
    _, dx, dw = jax.jit(lambda x, w, g: products(inside, x, w, g))(x, w, g)
    np.testing.assert_allclose(dw, by_hand(text, x, g), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(dx, g @ w.T, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("text", ["dw_x=rows(mvue(1,4))", "dw_x=mse(2,4)"])
def test_remat_and_scan_keep_the_same(text):
    x, w = normal(0, 16, 32), jnp.stack([normal(1, 32, 32), normal(2, 32, 32)]) / 32**0.5  # tanh is far from 1 and -1
    block = lambda x, w: jnp.tanh(of(text)(x, w))
    loss = lambda f: lambda w: jnp.sum(jax.lax.scan(lambda x, w: (f(x, w), None), x, w)[0] ** 2)
    plain, again = (jax.jit(jax.grad(loss(f)))(w) for f in (block, jax.checkpoint(block)))
    np.testing.assert_allclose(plain, again, rtol=0, atol=1e-6 * float(jnp.abs(plain).max()))
