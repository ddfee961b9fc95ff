"""The search for tiles: the products that it times, and the tables that it writes. Kernels run interpreted."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nmjax as nm
from experiments.bench import tune
from nmjax.kernels import HopperConfig, calls, measured, tuning
from nmjax.kernels.limits import Shape, config_refusal
from nmjax.kernels.targets import target
from nmjax.products import operations, routes

DEVICE = target("interpret")
FIRST, SECOND, THIRD = (HopperConfig(tile_n=n) for n in (64, 128, 256))


@pytest.fixture(autouse=True)
def own(monkeypatch, tmp_path):
    """Write tables into a temporary folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    yield measured.own_tables()
    measured.table.cache_clear()


@pytest.fixture
def fake(monkeypatch):
    """Let a search have these configs, then these variations, and these times of each."""

    def faked(first, second, times):
        monkeypatch.setattr(tune, "likely", lambda shape, device: first)
        monkeypatch.setattr(tune, "variations", lambda shape, config: second)
        return lambda calls, rounds, seconds: {name: [times.get(name, 1.0)] * rounds for name in calls}

    return faked


@pytest.mark.parametrize(
    ("text", "products"),
    [
        ("s_ste()", {"y": "y", "dw": "dw"}),
        ("y_w=ste(transposable(2,4))", {"y": "y", "dx": "dx, w packed"}),
        ("sdgp(rescale=False)", {"dx": "dx, g packed"}),
        ("s_ste(fp8=True)", {"y": "y in FP8", "dw": "dw in FP8"}),
    ],
)
def test_layers_are_those_of_training(text, products):
    x, w = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((256, 384), (384, 640)))
    op = operations.as_dot(x, w, operations.einsum_dims("ti,io->to", 2, 2)[0])
    choices, layer = routes.explain(op, x, w, nm.parse(text), "interpret"), tune.layer(256, 384, 640)
    assert {product: choices[product].shape for product in products} == {p: layer[n] for p, n in products.items()}


@pytest.mark.slow
@pytest.mark.parametrize("shape", tune.layer(128, 192, 256).values())
def test_dense_products_are_those_of_what_was_packed(shape):
    packed, b = tune.Pool([shape]).pair(shape)
    a = nm.unpack(packed)
    assert packed.order == ("words8" if shape.itemsize == 1 else "words16")
    assert a.shape == ((shape.k, shape.m) if shape.m_major else (shape.m, shape.k))
    assert 0.49 < np.mean(np.asarray(a, np.float32) != 0) <= 0.5  # e5m2 and e4m3 flush some to zero
    (y,) = tune.dense(shape, DEVICE)([(a, b)])
    wanted = tune.reference(shape, DEVICE)(packed, b)
    assert y.shape == wanted.shape
    np.testing.assert_allclose(np.asarray(y, np.float32), wanted, atol=0.01 * float(jnp.abs(wanted).max()))
    assert [v.shape for v in tune.Pool([shape]).pair(shape, packed=False)] == [a.shape, b.shape]


def test_the_default_list_is_worth_tuning():
    shapes = tune.default()
    assert len(shapes) == len(set(shapes))
    assert {s.dtype for s in shapes} == {"bfloat16", "float8_e4m3fn", "float8_e5m2"}
    assert all(len(tune.likely(s, DEVICE)) <= 9 for s in shapes)
    for shape in shapes[:3]:
        config = tune.likely(shape, DEVICE)[0]
        varied = tune.variations(shape, config)
        assert config not in varied
        assert {c.band for c in varied} == {1, 8, 16}
        assert all(config_refusal(shape, c) is None for c in varied)


@pytest.mark.kernels
def test_what_tune_writes_is_what_products_choose(monkeypatch, fake, own):
    shape, varied = Shape(128, 64, 128, transpose=True), HopperConfig(tile_n=64, stages=3)
    monkeypatch.setattr(tune, "repeats", lambda shape: 1)
    assert tuning.chosen(shape, DEVICE)[1] is None  # a guess, and now remembered
    timer = fake([FIRST], [varied], {"dense": 3.0, FIRST: 2.0, varied: 1.5})
    table = tune.search([shape], DEVICE, own, minutes=1, timer=timer)
    assert measured.table(DEVICE.kind) == ((shape, varied, 2.0),)
    assert tuning.chosen(shape, DEVICE) == (varied, 2.0)
    assert table.rows[repr(shape)][2:] == [2.0, "2, 0 refused", repr(varied)]


@pytest.mark.slow
def test_wrong_and_broken_configs_are_refused(monkeypatch, fake):
    """The kernels are faked: XLA's product, which is wrong for one config and raises for another."""

    def packed(shape, device, config):
        def product(a, b):
            if config == THIRD:
                raise RuntimeError("too many registers")
            y = calls.reference(a, b, axis=-1, transpose=False, dtype=jnp.bfloat16)
            return jnp.roll(y, 1, 0) if config == FIRST else y

        return tune.several(product)

    monkeypatch.setattr(tune, "packed", packed)
    shape = Shape(128, 128, 128)
    winner = tune.best(shape, DEVICE, tune.Pool([shape]), fake([FIRST, SECOND, THIRD], [], {}))
    assert (winner.config, winner.speed, winner.tried) == (SECOND, 1.0, 3)
    assert [reason.partition(": ")[0] for reason in winner.refused] == [repr(FIRST), repr(THIRD)]
    assert "of the largest magnitude" in winner.refused[0]
    assert "too many registers" in winner.refused[1]
    reason = tune.best(shape, DEVICE, tune.Pool([shape]), fake([FIRST, THIRD], [], {}))
    assert reason.startswith("no config is right: HopperConfig(tile_n=64): off by")


def test_no_product_is_begun_when_the_minutes_are_over(own):
    table = tune.search([Shape(128, 128, 128), Shape(256, 128, 128)], DEVICE, own, minutes=0)
    assert list(table.rows) == ["2 more"]
    assert not own.exists()
