"""Pictures of arrays: what is shown is what is there."""

import re

import jax.numpy as jnp
import numpy as np
import pytest

import nmjax as nm


def test_kept_values_are_shown_and_dropped_ones_are_dots():
    x = jnp.array([[1.0, -2.0, 3.0, -4.0], [0.5, 0.1, 0.2, 4.0]])
    lines = repr(nm.show(nm.mse(2, 4), x)).splitlines()
    assert [line.split() for line in lines[:2]] == [["·", "·", "3", "-4"], ["0.5", "·", "·", "4"]]
    assert lines[2] == "2 x 4, groups of 4 along axis 1: 0.5 kept"


def test_groups_down_the_columns_are_set_apart():
    picture = nm.show(nm.mse(1, 2), jnp.arange(1.0, 9.0).reshape(4, 2), axis=0)
    assert [line.split() for line in repr(picture).splitlines()[:-1]] == [
        ["·", "·"],
        ["3", "4"],
        [],
        ["·", "·"],
        ["7", "8"],
    ]


def test_the_groups_of_an_array_are_drawn_as_those_of_its_pruner():
    x = jnp.arange(1.0, 9.0).reshape(4, 2)
    for axis in (0, 1):
        pruned = nm.show(nm.mse(1, 2), x, axis=axis)
        array = nm.show(nm.prune(nm.mse(1, 2), x, axis=axis), axis=axis, m=2)
        assert (repr(array), array._repr_svg_()) == (repr(pruned), pruned._repr_svg_())


def test_values_of_any_size_are_shown():
    assert repr(nm.show(np.array([1e300, 1e-60]))).split() == ["1e+300", "1e-60", "2:", "1", "kept"]


def test_large_arrays_are_cut_and_counted_whole():
    x = np.zeros((64, 128), np.float32)
    x[:, :32] = 1
    picture = nm.show(x)
    assert picture.caption == "64 x 128, 16 x 32 shown: 0.25 kept"
    assert picture.kept.all()


def test_the_first_matrix_of_many_has_the_axis_of_the_groups():
    x = jnp.arange(24.0).reshape(4, 2, 3) + 1
    picture = nm.show(nm.mse(1, 4), x, axis=0)
    assert picture.down
    np.testing.assert_array_equal(picture.values, np.asarray(nm.prune(nm.mse(1, 4), x, axis=0))[:, 0])


def test_a_notebook_gets_one_cell_for_each_value():
    svg = nm.show(nm.mse(2, 4), jnp.arange(1.0, 17.0).reshape(2, 8))._repr_svg_()
    assert len(re.findall("<rect", svg)) == 16
    assert len(re.findall("fill='none'", svg)) == 8


def test_the_colour_follows_the_magnitude():
    svg = nm.show(np.array([*[4.0] * 20, 40.0, -2.0, 1e-6, 0.0]))._repr_svg_()
    cells = re.findall(r"<rect [^>]*fill='([^']*)'(?: fill-opacity='([\d.]+)')?/>", svg)
    green = "#1a7f64"
    assert cells == [*[(green, "1.00")] * 21, (green, "0.53"), (green, "0.06"), ("none", "")]
    assert "is full from 4'" in svg
    assert "full" not in nm.show(np.array([True, False]))._repr_svg_()


def test_colour_is_for_terminals(monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[1;32m" in repr(nm.show(jnp.array([True, False])))
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in repr(nm.show(jnp.array([True, False])))


@pytest.mark.parametrize(
    ("given", "options", "said"),
    [
        ([nm.mse(2, 4)], {}, r"show\(mse\(2,4\)\) needs the array to prune: write show\(mse\(2,4\), x\)"),
        (["mse(2,4)"], {}, "show takes a pruner and an array, an array, or a mask, got str of shape"),
        ([np.zeros(0)], {}, r"got ndarray of shape \(0,\)"),
        ([nm.mse(2, 4), np.ones(4)], {"m": 4}, "show got m=4 and a pruner, which has groups of its own"),
        ([np.ones(4), np.ones(4)], {}, "show draws one array, and only a pruner takes x, key and state, got"),
        *(([np.ones(4)], {"m": m}, f"m must be a whole number, the size of a group, got {m}") for m in (-4, 2.0)),
        ([np.ones((4, 6))], {"axis": 0, "m": 3}, "show: axis 0 has 4 values, which do not divide into groups of 3"),
        ([np.ones((2, 2))], {"axis": 7}, "axis 7"),
    ],
)
def test_misuse_says_what_to_write(given, options, said):
    with pytest.raises((TypeError, ValueError), match=said):
        nm.show(*given, **options)


def test_captions_say_what_is_cut():
    assert nm.show(nm.mse(2, 4), jnp.arange(8.0) + 1).caption == "8, groups of 4 along axis 0: 0.5 kept"
    assert nm.show(np.ones((3, 2, 4))).caption == "3 x 2 x 4, 2 x 4 shown: 1 kept"
