"""Products of packed weights on TPUs, simulated on a CPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec as P

import nmjax as nm
from tests.products.products_test import normal

pytestmark = [pytest.mark.kernels, pytest.mark.sampled]

times = functools.partial(nm.kernels.spmm, axis=-1, transpose=True)


def packed_weight(*shape, dtype=jnp.float32, draw=normal):
    w = nm.prune(nm.mse(2, 4), draw(13, *shape).astype(dtype), axis=-2)
    return nm.pack(w, -2, order="sublanes"), np.asarray(w, np.float64)


def integers(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).integers(-3, 4, shape), jnp.float32)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("m", "k", "n"), [(1, 4, 1), (3, 260, 300), (17, 1100, 40), (300, 256, 600)])
def test_a_kernel_multiplies_by_packed_weights(m, k, n, dtype):
    """Sums of integers are exact, so that one wrong place of a weight is seen."""
    packed, w = packed_weight(k, n, dtype=dtype, draw=integers)
    x = integers(14, m, k).astype(dtype)
    y = times(packed, x, dtype=jnp.float32, backend="interpret")
    np.testing.assert_array_equal(y, np.asarray(x, np.float64) @ w)
    np.testing.assert_array_equal(times(packed, x, backend="interpret"), y.astype(dtype))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_its_sums_are_float32(dtype):
    packed, w = packed_weight(520, 24, dtype=dtype)
    x = normal(14, 8, 520).astype(dtype)
    y = times(packed, x, dtype=jnp.float32, backend="interpret")
    exact, most = np.asarray(x, np.float64) @ w, np.abs(np.asarray(x, np.float64)) @ np.abs(w)
    assert (np.abs(y - exact) <= 260 * 2.0**-24 * most).all()  # of 260 products that are not zero


def test_packed_weights_in_batches_loops_and_shards():
    packed, w = packed_weight(3, 64, 40, draw=integers)
    x, scale = integers(14, 3, 5, 64), jnp.array([0.5, 1.0, -2.0])
    expected = np.asarray(x) @ w
    call = functools.partial(times, backend="interpret")
    np.testing.assert_array_equal(call(packed, x), expected)
    np.testing.assert_array_equal(call(packed, x, scale), expected * np.asarray(scale)[:, None, None])
    np.testing.assert_array_equal(jax.vmap(call)(packed, x), expected)
    np.testing.assert_array_equal(jax.lax.scan(lambda n, v: (n, call(*v)), 0, (packed, x))[1], expected)
    for axis, transpose in ((-1, False), (-2, True), (-2, False)):
        b, y = x if axis == -1 else x.mT, expected if transpose else expected.swapaxes(1, 2)
        np.testing.assert_array_equal(call(packed, b, axis=axis, transpose=transpose), y)
    mesh = jax.make_mesh((3,), ("a",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:3])
    with jax.set_mesh(mesh):
        part = jax.shard_map(call, in_specs=(P("a"), P("a")), out_specs=P("a"), check_vma=False)
        np.testing.assert_array_equal(part(*jax.reshard((packed, x), P("a", None, None))), expected)
        with pytest.raises(ValueError, match="the mesh has explicit axes: call spmm in jax.shard_map over all axes"):
            call(*jax.reshard((packed, x), P("a", None, None)))


def test_only_tpus_multiply_by_weights_in_their_order():
    (packed, _), x = packed_weight(64, 64, dtype=jnp.bfloat16), normal(14, 8, 64).astype(jnp.bfloat16)
    other = nm.pack(nm.unpack(packed), -2)
    runs = lambda kind, packed: [device(kind, packed, backend) for backend in ("auto", "compact", "xla")]

    def device(kind, packed, backend):
        with nm.kernels.on(kind):
            return "pallas_call" in str(jax.make_jaxpr(functools.partial(times, backend=backend))(packed, x))

    assert runs("TPU v6 lite", packed) == [True, False, False]
    assert runs("TPU v6 lite", other) == runs("NVIDIA H200", packed) == [False, False, False]


def test_what_no_kernel_multiplies_is_told():
    (packed, _), x = packed_weight(64, 8), normal(14, 8, 64)
    half = packed_weight(64, 8, dtype=jnp.float16)[0]
    for arguments, options, match in (
        ((packed, x), {"backend": "pallas"}, "^spmm: backend='pallas', but only TPUs read the order 'sublanes'. Write"),
        ((packed, x.astype(jnp.bfloat16)), {}, "the operands are float32 and bfloat16: a TPU's kernel takes both in"),
        ((half, x.astype(jnp.float16)), {}, "the operands are float16 and float16"),
        ((packed, x), {"dtype": jnp.float16}, "the result is float16, which no kernel of a TPU writes"),
        ((packed, x), {"config": nm.kernels.HopperConfig()}, "the kernel of a TPU has no config"),
        ((packed, x[:0]), {}, "M, N, K = 8, 0, 64: it is empty"),
    ):
        with pytest.raises(ValueError, match=match):
            times(*arguments, **{"backend": "interpret"} | options)
    with pytest.raises(TypeError, match="spmm has no derivative"):
        jax.grad(lambda x: times(packed, x, backend="interpret").sum())(x)


def test_numbers_of_64_bits():
    (packed, _), x = packed_weight(520, 136, dtype=jnp.bfloat16), normal(15, 8, 520).astype(jnp.bfloat16)
    expected = times(packed, x, backend="interpret")
    with jax.enable_x64(True):
        np.testing.assert_array_equal(times(packed, x, backend="interpret"), expected)
