"""Counts of kernels and bytes, against numbers known from the shapes."""

import jax
import jax.numpy as jnp
import pytest

import nmjax as nm
from experiments.bench import counts, expected
from experiments.bench.counts import Counted, counted

BLOCK = expected.MODELS["feed-forward block, 4096 wide, 16,384 tokens"]


def test_a_feed_forward_block_is_counted_from_its_shapes():
    """S-STE packs w for y, and g for dw, in both layers: 3.125 bytes a value.

    One kernel computes the gradient of the hidden values and packs it. Beyond packing, it reads one more array and
    writes the gradient: 4 bytes more for each value.
    """
    tokens, width, hidden = 16384, 4096, 16384
    with nm.kernels.on("NVIDIA H200"):
        step, arguments = counts._step(*BLOCK, "s_ste(2,4)", "auto")
        found = counted(jax.make_jaxpr(step)(*arguments).jaxpr)
    values = 2 * width * hidden + tokens * (hidden + width)
    assert (found.packing, found.packed, found.dense) == (4, 4, 2)
    assert (found.values, found.activated) == (values, tokens * hidden)
    bytes_ = 3.125 * values + 4 * tokens * hidden
    assert abs(found.packing_bytes / bytes_ - 1) < 1e-5  # keys and scales are read, too
    dense = 3 * 2 * (2 * width * hidden + 2 * tokens * (hidden + width))  # of all six products in bfloat16
    packed = values * (2 - 1.125)
    assert abs(found.product_bytes / (dense - packed) - 1) < 0.01


@pytest.mark.parametrize("text", expected.METHODS.values())
def test_every_method_is_counted(text):
    with nm.kernels.on("NVIDIA H200"):
        step, arguments = counts._step(*BLOCK, text, "auto")
        found = counted(jax.make_jaxpr(step)(*arguments).jaxpr)
    assert (found.packing, found.activated) == (4, 16384 * 16384)


def test_a_loop_counts_once_for_each_trip():
    def f(x):
        return jax.lax.scan(lambda c, _: (c @ c, None), x, length=5)[0]

    x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    assert counted(jax.make_jaxpr(f)(x).jaxpr) == Counted(dense=5, product_bytes=5 * 3 * 256)


def test_a_kernel_is_lowered_once_for_all_layers_of_a_shape():
    """Six layers, and no more kernels in the program than two layers have."""

    def lowered(layers):
        s = nm.parse("s_ste(2,4)")

        def loss(ws, x):
            for i, w in enumerate(ws):
                ctx = nm.Ctx(nm.random.words(i), 3, {"fwd_rhs": jnp.float32(1.5)})
                x = nm.einsum("ti,io->to", x, w, sparsity=s, ctx=ctx)
            return x.astype(jnp.float32).sum()

        shape = lambda *sides: jax.ShapeDtypeStruct(sides, jnp.bfloat16)
        with nm.kernels.on("NVIDIA H200"):
            traced = jax.jit(jax.grad(loss)).trace([shape(4096, 4096)] * layers, shape(16384, 4096))
            return traced.lower(lowering_platforms=("cuda",)).as_text()

    two, six = lowered(2), lowered(6)
    assert two.count("@mosaic_gpu") == six.count("@mosaic_gpu") >= 4
