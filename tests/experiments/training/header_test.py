"""The header of a run: its plan in a line, its optimizer and rate, and a plan without data."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from ml_collections import ConfigDict

import nmjax as nm
from experiments import command
from experiments.errors import Missing
from experiments.training import header
from nmjax.analysis.plan import LayerPlan, Plan, SlotPlan
from nmjax.pruners import identity
from nmjax.recipes.text import parse
from tests.experiments.runs import as_people_run_it as as_people_run_it, program


def planned(*texts: str) -> Plan:
    """Return a plan of layers of these methods."""
    layers = []
    for number, text in enumerate(texts):
        sparsity = parse(text)
        pruners = {name: getattr(sparsity, name) for name in ("y_x", "y_w", "dx_g", "dw_g")}
        slots = tuple(SlotPlan(name, p) for name, p in pruners.items() if p != identity)
        layers.append(LayerPlan(f"layer{number}", "Linear", (8, 8), sparsity, slots, None, (1, 1, 1), ""))
    return Plan(tuple(layers), 0, (), 0)


def test_a_plan_in_a_line():
    shown = "; --mode=plan shows them"
    assert header.in_short(planned("dense", "dense")) == "2 layers, all dense"
    assert header.in_short(planned("ste(2,4)", "s_ste(2,4)", "dense")) == f"2 of 3 layers 2:4{shown}"
    assert header.in_short(planned("mdgf(1,8,linear(1,0,9))")) == f"1 of 1 layers 1:8{shown}"
    mixed = planned("ste(2,4); dw_g=mvue(1,2)", "dw_g=mvue(2,4)", "ste(2,4)", "dense")
    assert header.in_short(mixed) == f"2 of 4 layers 2:4, 1 of 4 layers 2:4 and 1:2{shown}"


@pytest.mark.slow
def test_the_header_says_how_the_run_learns():
    made = program("configs/vit_24.py:smoke", "--config.masked_decay=0.1", "--config.steps=100")
    rows = dict(header.rows(made))
    assert rows["optimizer"] == (
        "adamw(b1=0.9, b2=0.999, weight_decay=0.05), gradients clipped to norm 1, dropped weights decay by 0.1"
    )
    assert rows["learning rate"] == "0.003 after a warm-up of 25 steps, then cosine to 0"
    rates = [float(made.rate(step)) for step in (24, 25, 100)]  # what the words say
    assert rates[0] < 0.003
    np.testing.assert_allclose(rates[1:], [0.003, 0], atol=1e-9)
    constant = {"peak": 0.1, "warmup": "1", "shape": "linear", "end": 0.01}
    assert (
        header._rate(ConfigDict({"learning_rate": constant}), 9) == "0.1 after a warm-up of 1 step, then linear to 0.01"
    )


# ---- missing data ----


@pytest.fixture
def _nowhere(monkeypatch, tmp_path):
    monkeypatch.delenv("NMJAX_DATA", raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.mark.slow
@pytest.mark.usefixtures("_nowhere")
@pytest.mark.parametrize(
    ("words", "data"),
    [
        (
            ["configs/vit_24.py:cifar10", "--config.model.size=tiny"],
            "cifar10: 45,000 training images, 5,000 validation",
        ),
        (["configs/vit_24.py:mnist", "--config.model.size=tiny"], "mnist: 54,000 training images, 6,000 validation"),
        (
            ["configs/gpt_24.py", "--config.data.name=my.txt"],
            "my.txt: tokens of 256; windows",
        ),
        (
            ["configs/gpt_24.py", "--config.data.dir=/nowhere", "--config.data.name=my.txt"],
            "my.txt: tokens of 256; windows of 128",
        ),
    ],
)
def test_a_plan_does_without_the_data_and_a_run_does_not(words, data, tmp_path, capsys):
    config_file, *changes = words
    command.main(["launch.py", f"--config={config_file}", *changes, "--mode=plan"], "")
    said = capsys.readouterr().out
    assert data in said
    assert "the data are missing; a plan does not need them" in said
    assert "y_w=" in said
    assert "--mode=plan shows them" not in said
    with pytest.raises(Missing, match="found no|which does not exist"):
        command.main(["launch.py", f"--config={config_file}", *changes, f"--workdir={tmp_path / 'run'}"], "")
    assert not list(tmp_path.rglob("*.json"))


def test_the_time_that_is_expected_of_chosen_rows():
    layer, x = nnx.Linear(384, 1536, use_bias=False, rngs=nnx.Rngs(0)), jax.ShapeDtypeStruct((2048, 384), jnp.float32)
    plan = lambda text: nm.nnx.plan(layer, nm.Recipe(((".*", text),)), x)
    rows = plan("dw_g=rows(mvue(1,4))")
    share = dict(rows.layers[0].runs)["dw"].share
    said = f"; {(2 + share) / 3:.2f} of the dense time is expected of the products on this device"
    assert header.expected_time(rows) == said
    assert header.expected_time(plan("dw_g=mvue(1,4)")) == ""


@pytest.mark.slow
def test_the_memory_of_packed_inputs():
    made = program("configs/vit_24.py:smoke", "--config.sparsity.blocks=dw_x=mvue(2,4)")
    tokens, inputs = 16 * (8 // 2) ** 2, 5 * 64 + 256  # query, key, value, out and up read 64 features, down 256
    before = 4 * tokens * inputs / 2**20
    said = dict(header.rows(made))["memory"]
    assert said.startswith(f"Without remat, the backward pass keeps {17 / 32 * before:.3g} of {before:.3g} MiB")
    assert "memory" not in dict(header.rows(program("configs/vit_24.py:smoke")))
