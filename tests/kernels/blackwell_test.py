"""Blackwell's products: the order of their words against JAX's own, and numerics in the interpreter."""

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

import nmjax as nm
from nmjax.core import versions
from nmjax.kernels import blackwell, tuning
from nmjax.kernels.format import pack
from nmjax.kernels.limits import BlackwellConfig, Shape, config_refusal, product_refusal
from nmjax.kernels.targets import Target
from nmjax.products.operations import as_dot
from nmjax.products.routes import explain

B200 = Target("NVIDIA B200", "blackwell", 148)
RNG = np.random.default_rng(0)


def two_of_four(*shape):
    """Random values with two of four kept along the last axis, at random places, and these places [..., groups, 2]."""
    groups = (*shape[:-1], shape[-1] // 4)
    places = np.sort(RNG.random((*groups, 4)).argsort(-1)[..., :2], -1)
    kept = (np.arange(4) == places[..., :1]) | (np.arange(4) == places[..., 1:])
    values = RNG.choice([-1, 1], shape) * RNG.uniform(0.5, 1.5, shape)  # none is rounded to 0
    return values * kept.reshape(shape), places


@pytest.mark.parametrize("kind", ["bfloat16", "float8_e4m3fn"])
def test_the_words_are_those_of_jax(kind):
    """JAX formats pairs of places of two bits each; ours are a permutation of the words that Hopper reads."""
    values, places = two_of_four(256, 512)
    wanted = plgpu.format_tcgen05_sparse_metadata(jnp.asarray(places).astype(jnp.uint2), jnp.dtype(kind))
    packed = pack(jnp.asarray(values.astype(jnp.dtype(kind)))[None])
    made = blackwell.words_of(packed)
    assert made.shape == (1, 2, 4, 128, 4)
    bits = (np.asarray(made)[..., None] >> (2 * np.arange(16, dtype=np.uint32))) & 3
    assert (bits.reshape(2, 4, 128, 64) == np.asarray(wanted.astype(jnp.uint8))).all()
    back = [blackwell._words_back(tile[None], packed.order) for tile in made[0]]  # as the emulation reads them
    assert (np.concatenate(back) == np.asarray(packed.indices[0])).all()
    assert (np.asarray(blackwell._in_twos(made).astype(jnp.uint8)).ravel() == bits.ravel()).all()


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("kind", "layout"),
    [*(("bfloat16", (a, b, c)) for a in (False, True) for b in (False, True) for c in (False, True))]
    + [
        ("float16", (True, False, True)),
        ("float8_e4m3fn", (False, False, True)),
        ("float8_e5m2", (False, False, False)),
        ("float8_e4m3fn", (False, False, False)),  # times float8_e5m2
    ],
)
def test_products_against_float64(kind, layout):
    """Two matrices, each with its factor; three steps in a ring of two."""
    (m_major, n_major, transpose), (m, n, k) = layout, (256, 128, 768)
    a = two_of_four(2, m, k)[0].astype(jnp.dtype(kind))
    other = "float8_e5m2" if (kind, transpose) == ("float8_e4m3fn", False) else kind
    b = RNG.standard_normal((2, n, k)).astype(jnp.dtype(other))
    turned = lambda v, so: jnp.asarray(v.swapaxes(-1, -2) if so else v)
    y = blackwell.spmm(
        pack(turned(a, m_major), -2 if m_major else -1),
        turned(b, n_major),
        jnp.asarray([1.0, -0.5]),
        b_axis=-2 if n_major else -1,
        transpose=transpose,
        dtype=jnp.float32,
        config=BlackwellConfig(tile_n=64),
        interpret=True,
    )
    y = np.asarray(y, np.float64)
    wanted = np.asarray([1.0, -0.5])[:, None, None] * (a.astype(np.float64) @ b.astype(np.float64).swapaxes(-1, -2))
    assert np.abs((y.swapaxes(-1, -2) if transpose else y) - wanted).max() < 1e-5 * np.abs(wanted).max()


@pytest.fixture(autouse=True)
def _any_version(monkeypatch):
    """The interpreter multiplies on versions of JAX, too, on which the kernels are refused."""
    monkeypatch.setattr(versions, "stores_transposed", lambda: True)
    tuning._chosen.cache_clear()
    yield
    tuning._chosen.cache_clear()


def test_an_old_jax_is_refused(monkeypatch):
    monkeypatch.setattr(versions, "stores_transposed", lambda: False)
    assert "from 0.11 on it can" in str(product_refusal(Shape(1024, 1024, 1024), B200))


def test_what_fits():
    why = lambda *sides, **cut: str(config_refusal(Shape(*sides), BlackwellConfig(**cut)))
    assert why(1024, 1024, 1024) == why(1024, 1024, 1024, tile_n=128, stages=3) == "None"
    assert "of shared memory" in why(1024, 1024, 1024, stages=3)
    assert "M = 64 does not divide by 128" in why(64, 1024, 1024)
    assert "tile_n must be 64, 128, 192 or 256" in why(1024, 1024, 1024, tile_n=96)
    for sides in ((128, 64, 128), (256, 192, 384), (1024, 1024, 1024), (64, 64, 128), (128, 64, 64), (128, 32, 128)):
        for kind in ("bfloat16", "float8_e4m3fn"):
            shape = Shape(*sides, kind)
            assert (product_refusal(shape, B200) is None) == (tuning.chosen(shape, B200) is not None), shape


def test_auto_leaves_blackwell_alone_until_tiles_are_measured():
    assert tuning.gain(Shape(8192, 8192, 8192), B200) < 1
    with nm.kernels.on("NVIDIA B200", 148):
        assert nm.kernels.target("auto") == B200
        x = jax.eval_shape(lambda: jnp.zeros((8192, 8192), jnp.bfloat16))
        found = explain(as_dot(x, x, (((1,), (0,)), ((), ()))), x, x, nm.parse("s_ste()"), "auto")
        assert {route.how for route in found.values()} == {"emulated", "dense"}
