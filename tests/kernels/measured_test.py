"""Tables of tiles: written, read back and followed, and refused if they are of something else."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import nmjax as nm
from nmjax.kernels import AmpereConfig, HopperConfig, calls, measured, tuning
from nmjax.kernels.format import pack
from nmjax.kernels.hopper import HOPPER, Hopper
from nmjax.kernels.limits import Shape
from nmjax.kernels.measured import Row
from nmjax.kernels.targets import Target
from nmjax.products.operations import as_dot
from nmjax.products.routes import explain

H200 = Target("NVIDIA H200", "hopper", 132)
SHAPE, CONFIG = Shape(4096, 4096, 4096, n_major=True), HopperConfig(tile_m=128, tile_n=128, cluster="n")


@pytest.fixture(autouse=True)
def _own(monkeypatch, tmp_path):
    """A folder of the user's own tables, and none that are shipped."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "own"))
    monkeypatch.setattr(measured, "SHIPPED", tmp_path / "shipped")
    measured.table.cache_clear()
    yield
    measured.table.cache_clear()


def test_a_table_is_read_back_and_followed():
    rows = [Row(SHAPE, CONFIG, 1.31), Row(Shape(128, 128, 128, "float16"), HopperConfig(tile_n=64), 0.5)]
    path = measured.write(measured.own_tables(), H200.kind, rows)
    assert path.name == "nvidia_h200.json"
    assert not list(path.parent.glob("*.part"))
    table = json.loads(path.read_text())
    assert (table["device"], table["kernels"], table["jax"]) == (H200.kind, measured.KERNELS, jax.__version__)
    assert measured.table(H200.kind) == measured.read(path) == tuple(rows)
    assert tuning.chosen(SHAPE, H200) == (CONFIG, 1.31)
    assert tuning.chosen(Shape(4096, 6144, 4096, n_major=True), H200) == (CONFIG, 1.31)  # near enough
    assert tuning.chosen(Shape(256, 256, 256), H200)[1] is None
    assert tuning.times(SHAPE, H200, True).gain == pytest.approx(1.31)


def test_a_new_row_replaces_that_of_the_same_product():
    other = Row(Shape(128, 128, 128), HopperConfig(), 1.0)
    measured.write(measured.own_tables(), H200.kind, [Row(SHAPE, CONFIG, 1.31), other])
    assert len(measured.table(H200.kind)) == 2
    measured.write(measured.own_tables(), H200.kind, [Row(SHAPE, HopperConfig(), 1.5)])
    assert measured.table(H200.kind) == (Row(SHAPE, HopperConfig(), 1.5), other)


def test_a_small_speed_stays_positive():
    """As the interpreter has it."""
    row = Row(SHAPE, CONFIG, 1.23456e-7)
    assert measured.read(measured.write(measured.own_tables(), H200.kind, [row])) == (row._replace(speed=1.235e-7),)


def test_a_row_of_another_family_is_not_used():
    ampere = Row(Shape(4096, 4096, 4096), AmpereConfig(), 9.0)
    measured.write(measured.own_tables(), H200.kind, [ampere])
    assert tuning.chosen(ampere.shape, H200).speed is None


def test_the_users_own_rows_come_first():
    measured.write(measured.SHIPPED, H200.kind, [Row(SHAPE, HopperConfig(), 1.1)])
    assert tuning.chosen(SHAPE, H200).speed == 1.1
    measured.write(measured.own_tables(), H200.kind, [Row(SHAPE, CONFIG, 1.2)])
    assert tuning.chosen(SHAPE, H200) == (CONFIG, 1.2)


def test_a_choice_follows_a_table_that_is_written_after_it():
    assert tuning.chosen(SHAPE, H200).speed is None
    assert tuning.times(SHAPE, H200, True).gain != 1.31
    measured.write(measured.own_tables(), H200.kind, [Row(SHAPE, CONFIG, 1.31)])
    assert tuning.chosen(SHAPE, H200) == (CONFIG, 1.31)
    assert tuning.times(SHAPE, H200, True).gain == pytest.approx(1.31)


def test_a_plan_follows_a_table_that_is_written_after_it():
    x, s = jax.ShapeDtypeStruct((512, 512), jnp.bfloat16), nm.parse("ste(2,4)")
    how = lambda: explain(as_dot(x, x, (((1,), (0,)), ((), ()))), x, x, s, "auto")["y"]
    with nm.kernels.on(H200.kind):
        assert "of the emulated speed" in how().why
        shape = Shape(512, 512, 512, m_major=True, transpose=True)
        measured.write(measured.own_tables(), H200.kind, [Row(shape, CONFIG, 50.0)])
        assert how().how == "packed"


def test_products_follow_a_table_that_is_written_after_them(monkeypatch):
    """The kernel is faked. It notes its tiles."""
    seen = []

    def spmm(self, packed, b, scale, shape, config, target):
        seen.append(config)
        return jnp.zeros((*packed.shape[:-1], b.shape[-1]), shape.out)

    monkeypatch.setattr(Hopper, "spmm", spmm)
    a, b = pack(jnp.zeros((1, 128, 128), jnp.bfloat16), -1), jnp.zeros((1, 128, 64), jnp.bfloat16)
    shape = Shape(128, 64, 128, n_major=True)
    calls.run(a, b, None, shape=shape, target=H200)
    row = Row(shape, HopperConfig(tile_n=64, stages=2, warpgroups=1), 1.31)
    assert seen[-1] != row.config
    measured.write(measured.own_tables(), H200.kind, [row])
    calls.run(a, b, None, shape=shape, target=H200)
    assert seen[-1] == row.config


ROW = (
    '{{"device": "NVIDIA H200", "kernels": 1, "rows": [{{"family": "hopper", "config": {{}}, "speed": {speed}, '
    '"shape": {{"m": 128, "n": 256, "k": {k}}}}}]}}'
)


@pytest.mark.parametrize(
    ("text", "said"),
    {
        "{}": r"nvidia_h200.json is not a table of tiles: KeyError\('device'\). Delete it, or run python -m",
        "[1]": "is not a table of tiles: TypeError",
        "no JSON": "is not a table of tiles: JSONDecodeError",
        '{"device": "NVIDIA H200", "kernels": 1, "rows": [{"family": "hopper", "shape": {"m": 64}}]}': (
            "is not a table of tiles: TypeError"
        ),
        '{"device": "NVIDIA A100", "kernels": 1, "rows": []}': "tiles of NVIDIA A100, but this device is NVIDIA H200",
        ROW.format(k=0, speed=1.0): "a size is not positive",
        ROW.format(k=100, speed=1.0): "does not divide by 64",
        ROW.format(k=64, speed=0.0): "the speed is not a positive number",
        ROW.format(k=64, speed="NaN"): "the speed is not a positive number",
    }.items(),
)
def test_a_file_that_is_not_a_table_of_the_device_is_refused_and_kept_when_another_is_written(text, said):
    folder = measured.own_tables()
    folder.mkdir(parents=True)
    (folder / "nvidia_h200.json").write_text(text)
    with pytest.raises(ValueError, match=said):
        tuning.chosen(SHAPE, H200)
    with pytest.warns(UserWarning, match=f"{said}.* The file is now .*nvidia_h200.broken"):
        measured.write(folder, H200.kind, [Row(SHAPE, CONFIG, 1.31)])
    assert (folder / "nvidia_h200.broken").read_text() == text
    assert tuning.chosen(SHAPE, H200) == (CONFIG, 1.31)


def test_a_table_of_other_kernels_is_left_out_and_replaced(monkeypatch):
    monkeypatch.setattr(measured, "KERNELS", 0)
    measured.write(measured.own_tables(), H200.kind, [Row(SHAPE, CONFIG, 1.31)])
    monkeypatch.setattr(measured, "KERNELS", 1)
    with pytest.warns(UserWarning, match=r"not used: .* version 0 of the kernels, and this nmjax has version 1"):
        assert tuning.chosen(SHAPE, H200).speed is None
    measured.write(measured.own_tables(), H200.kind, [Row(SHAPE, HopperConfig(), 1.2)])
    assert measured.table(H200.kind) == (Row(SHAPE, HopperConfig(), 1.2),)


def test_the_shipped_speeds_are_near_the_estimates():
    """The range that docs/how_to/tensor_cores.md states."""
    (path,) = (Path(measured.__file__).parent / "tables").glob("*.json")
    target = Target("NVIDIA H100 80GB HBM3", "hopper", 132)
    rows = measured.read(path, target.kind)
    best = [tuning.candidates(row.shape, target)[0] for row in rows]
    ratios = [row.speed / HOPPER.speed(row.shape, config, target) for row, config in zip(rows, best, strict=True)]
    assert len(ratios) == 12
    assert (round(min(ratios), 2), round(max(ratios), 2)) == (0.84, 1.39)
