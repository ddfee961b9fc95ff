"""The table of what sparse tensor cores can bring."""

import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import nmjax as nm
from experiments.bench import expected
from nmjax.kernels import tuning
from nmjax.products import routes
from tests.experiments.runs import as_people_run_it as as_people_run_it


def test_a_row_by_hand():
    """One layer with y packed: 2 of 6 parts of its FLOPs remain dense, and its weight is packed once."""
    model = nnx.eval_shape(lambda: expected.Block(4096, nnx.Rngs(0)))
    x = jax.ShapeDtypeStruct((16384, 4096), jnp.bfloat16)
    share, emulated, *at = expected._row(model, x, "ste(2,4)")
    product, rate, weights = 2 * 16384 * 4096 * 16384, 0.8 * 989.5e12, 2 * 4096 * 16384
    dense = 6 * product / rate
    assert share == "0.33"
    assert emulated == pytest.approx(dense / (dense + 4 * weights / 2.58e12))
    assert at[2] == pytest.approx(dense / (5 * product / rate + 3.125 * weights / 2.58e12))


def test_a_row_does_not_depend_on_the_tiles_of_the_user(monkeypatch):
    model = nnx.eval_shape(lambda: expected.Block(4096, nnx.Rngs(0)))
    x = jax.ShapeDtypeStruct((16384, 4096), jnp.bfloat16)
    before = expected._row(model, x, "ste(2,4)")
    monkeypatch.setattr(tuning, "gain", lambda *_, **__: 0.7)  # as if a table said that packing is slower
    routes._routes.cache_clear()
    found = expected._row(model, x, "ste(2,4)")
    monkeypatch.undo()
    routes._routes.cache_clear()  # other tests have the tiles that there are
    assert found == before


@pytest.mark.slow
def test_all_rows():
    table = expected.expected()
    assert len(re.findall(r"(?m)^\| .*: (S-STE|FST|MdGf)", table)) == 9


@pytest.mark.parametrize(
    ("text", "step", "packed"),
    [
        ("mdgf(2,4,linear(1,0,100)); drhs_g=mvue(2,4)", 100, {"fwd", "drhs"}),  # it has faded
        ("s_ste(2,4)", None, {"fwd", "drhs"}),
        ("fst(2,4)", None, {"fwd", "dlhs", "drhs"}),
    ],
)
def test_a_vit_of_base_size_runs_packed(text, step, packed):
    """All layers of its blocks, with 197 x 64 tokens."""
    make, images = expected.MODELS["ViT-B/16, 64 images"]
    recipe = nm.Recipe(((r"blocks/.*", text), (r".*", "dense")))
    with nm.kernels.on("NVIDIA H200"):
        model = nnx.eval_shape(lambda: nm.nnx.sparsify(make(), recipe))
        if step is not None:
            nm.nnx.phase(model, step)
        plan = nm.nnx.plan(model, images)
    layers = [layer for layer in plan.layers if layer.path.startswith("blocks/")]
    assert len(layers) == 72
    for layer in layers:
        assert {product for product, route in layer.runs if route.how == "packed"} == packed, layer.path
