"""The check before use: by kinds of kernels, in a process of its own, and once for a device."""

from types import SimpleNamespace

import pytest

import nmjax as nm
from nmjax.core import versions
from nmjax.kernels import HopperConfig, calls, check, hopper, packing, tiles, tuning
from nmjax.kernels.limits import Shape
from nmjax.kernels.targets import Target
from nmjax.pruners import mse, mvue, transposable

INTERPRETER, H200 = Target("interpreter", "hopper", 2, True), Target("NVIDIA H200", "hopper", 132)


@pytest.mark.kernels
def test_every_kind_is_right_in_the_interpreter():
    assert {kind: right() for kind, right in check.cases(INTERPRETER).items() if not right()} == {}


@pytest.mark.kernels
def test_wrong_kernels_are_found_by_their_kind(monkeypatch):
    """Two words swapped: packing is wrong, and products of arrays that XLA has packed are right."""
    right = packing.as_words16
    for file in (packing, tiles):
        monkeypatch.setattr(file, "as_words16", lambda places: right(places)[..., ::-1])
    caches = calls._compression, calls._copying
    try:
        for cache in caches:
            cache.cache_clear()
        kinds = [check.LAST, check.BEFORE, check.NOISE, check.BOTH, "multiplying (along K)"]
        assert [check.cases(INTERPRETER)[kind]() for kind in kinds] == [False, False, False, False, True]
    finally:
        for cache in caches:
            cache.cache_clear()


def test_every_kind_of_a_product_is_checked():
    known = set(check.cases(H200))
    for layout in range(8):
        shape = Shape(128, 128, 128, "bfloat16", *(bool(layout & bit) for bit in (1, 2, 4)))
        for p in (mse(2, 4), mvue(2, 4), transposable(2, 4)):
            assert known >= set(check.kinds_of(shape, p)), (shape, p)
    assert check.kinds_of(Shape(128, 128, 128), transposable(2, 4))[1:] == (check.LAST, check.BOTH)
    assert check.kinds_of(None) == (check.FP8_FORMS,)
    assert check.kinds_of(Shape(128, 128, 128, "float8_e5m2")) == (check.FP8, check.FP8_FORMS)
    split = check.kinds_of(Shape(128, 128, 128), mse(2, 4), HopperConfig(split=2))
    assert (split[-1], known >= set(split)) == (hopper.PARTS, True)


@pytest.mark.parametrize("kind", ["NVIDIA H200", "NVIDIA A100-SXM4-80GB", "NVIDIA B200"])
def test_every_case_has_tiles(kind, monkeypatch):
    """On each family of devices: the shapes are those of the cases."""
    for known in ("has_warp_products", "stores_transposed"):
        monkeypatch.setattr(versions, known, lambda: True)
    with nm.kernels.on(kind):
        device = nm.kernels.target("pallas")
    shapes = [right.args[0] for right in check.cases(device).values() if right.func is check._multiplies]
    assert len(shapes) >= 8
    assert all(tuning.chosen(shape, device) is not None for shape in shapes)


BROKEN = """
import os, sys
if "nmjax.kernels" in " ".join(sys.orig_argv):
    from nmjax.kernels import calls, check
    cases = check.cases
    check.cases = lambda target: {"right": lambda: True, "wrong": lambda: False, "dead": lambda: os.abort(),
                                  "raising": lambda: 1 / 0, "right too": lambda: True}
"""


@pytest.mark.processes
def test_a_kernel_that_kills_its_process_leaves_the_others_and_this_one_alive(monkeypatch, tmp_path):
    """The processes import a `sitecustomize`, in which some kinds are broken."""
    (tmp_path / "sitecustomize.py").write_text(BROKEN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(
        check, "cases", lambda target: dict.fromkeys(["right", "wrong", "dead", "raising", "right too"])
    )
    assert check.check_apart(INTERPRETER, "interpret", 0) == {
        "wrong": "gives wrong numbers",
        "dead": "failed with signal 6",
        "raising": "failed with exit code 1: ZeroDivisionError: division by zero",
    }


@pytest.mark.processes
@pytest.mark.kernels
def test_the_process_that_checks_finds_the_kernels_right(monkeypatch):
    monkeypatch.setattr(check, "cases", lambda target: dict.fromkeys([check.LAST, "multiplying (along K)"]))
    assert check.check_apart(INTERPRETER, "interpret", 0) == {}


@pytest.mark.rare
@pytest.mark.processes
def test_a_process_that_hangs_is_ended(monkeypatch, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(BROKEN.replace("os.abort()", "__import__('time').sleep(600)"))
    monkeypatch.syspath_prepend(tmp_path)
    assert check._in_a_process("interpret", 0, ["dead"], 9) == ({"started": ""}, "did not end within 9 s")


@pytest.mark.processes
def test_a_device_that_does_not_start_says_nothing_about_kernels(monkeypatch, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(BROKEN.replace("cases = check.cases", "os._exit(3)"))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(check, "cases", lambda target: dict.fromkeys(["right", "wrong"]))
    found = check.check_apart(INTERPRETER, "interpret", 0)
    assert set(found) == {"right", "wrong"}
    assert found["right"].startswith("could not be checked: its process failed with exit code 3")


def test_what_was_checked_is_not_checked_again(monkeypatch, tmp_path):
    """The file is that of a device, CUDA, and this code. A check that did not take place leaves none."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    ran, wrong = [], {check.FP8: f"{check.NOT_CHECKED} failed with exit code 1"}
    device = lambda driver: SimpleNamespace(
        device_kind="NVIDIA H200", local_hardware_id=3, client=SimpleNamespace(platform_version=driver)
    )
    monkeypatch.setattr(check, "check_apart", lambda *how: ran.append(how) or dict(wrong))
    look = check.findings.__wrapped__
    assert look(H200, device("1")) == wrong
    wrong[check.FP8] = "gives wrong numbers"
    assert look(H200, device("1")) == look(H200, device("1")) == look(H200, device("2")) == wrong
    assert ran == [(H200, "pallas", 3)] * 3
    for path in (tmp_path / "nmjax" / "checked").iterdir():
        path.write_text("")  # a full disk cut it off
    assert look(H200, device("1")) == wrong
    assert len(ran) == 4
