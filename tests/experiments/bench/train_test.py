"""The benchmark of steps: its rows are the slots that a config file uses."""

import os
import re
import subprocess
import sys

import jax.numpy as jnp
import pytest

from experiments import config_files
from experiments.bench import measure, train
from experiments.config_files import ROOT
from tests.experiments.runs import as_people_run_it as as_people_run_it, xla_flags


def test_a_copy_is_written_and_nearly_equal():
    for dtype in (jnp.float32, jnp.bfloat16):
        x = jnp.array([1.0, -2.0, 0.0], dtype)
        assert train.copied()(x).tolist() == [1.0078125, -2.015625, 0.0]


def test_a_copy_is_not_removed_in_16_bits():
    """XLA removes a product with 1, and a plain copy is faster than a product."""
    x, programs = jnp.ones((64, 64), jnp.bfloat16), []
    in_turn = lambda calls, rounds: programs.append(calls["copy"].func.lower(x).compile().as_text()) or {"copy": 1.0}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "best_times", in_turn)
        measure.in_copies({}, x, 1)
    assert "multiply" in programs[0]


@pytest.mark.slow
def test_every_slot_of_a_config_file_has_a_row_and_a_copy_in_its_place():
    config_file = "configs/vit_24.py:smoke"
    rows = train.slot_by_slot(config_file, "", 2)
    wanted = ["dense", "fwd_rhs=.*", "fwd_rhs, a copy", r"drhs_g=mvue\(2,4\)", "drhs_g, a copy", "all"]
    assert len(rows) == len(wanted)
    for name, text in zip(rows, wanted, strict=True):
        assert re.fullmatch(f"{config_file} `{text}`", name)
    assert all(re.fullmatch(r"\d\.\d\d \(\d+\.\d\d to \d+\.\d\d\)", cell) for (cell,) in rows.values())
    assert rows[f"{config_file} `dense`"] == ["1.00 (1.00 to 1.00)"]


@pytest.mark.slow
def test_slots_of_methods_that_are_written_in_the_rules(monkeypatch):
    monkeypatch.setattr(train, "in_turn", lambda calls, rounds: dict.fromkeys(calls, [1.0]))
    texts, program = [], train.Program

    def recorded(config, task):
        made = program(config, task)
        texts.append({str(layer.sparsity) for layer in made.plan.layers})
        return made

    config = config_files.load("configs/vit_24.py:smoke")
    config.unlock()
    config.rules, config.sparsity = (("blocks/.*", "s_ste(2,4)"), (".*", "dense")), {}
    monkeypatch.setattr(config_files, "load", lambda name: config)
    monkeypatch.setattr(train, "Program", recorded)
    train.slot_by_slot("", "", 1)
    assert texts[1] == {"dense"}
    assert {"dense", "drhs_g=mvue(2,4)"} in texts
    config.rules = ((".*", "dense"),)
    assert list(train.slot_by_slot("", "", 1)) == [" `dense`", " `all`"]


@pytest.mark.slow
@pytest.mark.processes
def test_the_tables_as_they_are_printed():
    config_file = "configs/vit_24.py:smoke"
    command = [sys.executable, "-m", "experiments.bench", "train", f"--config={config_file}", "--rounds=1"]
    env = os.environ | {"XLA_FLAGS": xla_flags(1), "JAX_PLATFORMS": "cpu"}
    said = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True).stdout
    rows = {cells[1]: cells[2:-1] for cells in (re.split(r" *\| *", line) for line in said.splitlines()) if cells[2:]}
    assert rows[f"{config_file} plain"][:2] == ["1.00 (1.00 to 1.00)", "1.00"]
    for name in ("sparse", "dense", "plain"):
        _, memory, rate, time = rows[f"{config_file} {name}"]
        images, milliseconds = float(rate.removesuffix(" images").replace(",", "")), float(time.removesuffix(" ms"))
        assert images * milliseconds / 1e3 == pytest.approx(16, rel=0.02)  # a step is 16 images
        assert float(memory) >= 0.99
    first, whole = map(float, rows[config_file])
    assert 0 < first < whole
