"""Tables of tiles: written, read back and followed, and refused if they are of something else."""

import json

import jax
import pytest

from nmjax.kernels import measured, tuning
from nmjax.kernels.limits import AmpereConfig, HopperConfig, Shape
from nmjax.kernels.measured import Row
from nmjax.kernels.targets import Target

H200 = Target("NVIDIA H200", "hopper", 132)
SHAPE, CONFIG = Shape(4096, 4096, 4096, n_major=True), HopperConfig(tile_m=128, tile_n=128, cluster="n")


@pytest.fixture(autouse=True)
def _own(monkeypatch, tmp_path):
    """A folder of the user's own tables, and none that are shipped."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "own"))
    monkeypatch.setattr(measured, "SHIPPED", tmp_path / "shipped")
    _forget()
    yield
    _forget()


def _forget():
    measured.table.cache_clear()
    tuning.chosen.cache_clear()


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
    assert tuning.gain(SHAPE, H200, True) == pytest.approx(1.31)


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
    _forget()
    assert tuning.chosen(SHAPE, H200) == (CONFIG, 1.2)


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
def test_a_file_that_is_not_a_table_of_the_device_is_refused(text, said):
    folder = measured.own_tables()
    folder.mkdir(parents=True)
    (folder / "nvidia_h200.json").write_text(text)
    with pytest.raises(ValueError, match=said):
        tuning.chosen(SHAPE, H200)
    with pytest.raises(ValueError, match=said):
        measured.write(folder, H200.kind, [])


def test_a_table_of_other_kernels_is_left_out_and_replaced(monkeypatch):
    monkeypatch.setattr(measured, "KERNELS", 0)
    measured.write(measured.own_tables(), H200.kind, [Row(SHAPE, CONFIG, 1.31)])
    monkeypatch.setattr(measured, "KERNELS", 1)
    with pytest.warns(UserWarning, match=r"not used: .* version 0 of the kernels, and this nmjax has version 1"):
        assert tuning.chosen(SHAPE, H200).speed is None
    measured.write(measured.own_tables(), H200.kind, [Row(SHAPE, HopperConfig(), 1.2)])
    assert measured.table(H200.kind) == (Row(SHAPE, HopperConfig(), 1.2),)
