"""The check before use: by kinds of kernels, in a process of its own, and once for a device."""

from types import SimpleNamespace

import pytest

from nmjax.kernels import calls, check, compress
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
    right = compress.as_words16
    monkeypatch.setattr(compress, "as_words16", lambda places: right(places)[..., ::-1])
    caches = calls._compression, calls._compression_both
    try:
        for cache in caches:
            cache.cache_clear()
        kinds = [check.LAST, check.BEFORE, check.NOISE, check.BOTH, "products (along K)"]
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
    assert check.kinds_of(Shape(128, 128, 128, "float8_e5m2")) == check.kinds_of(None) == (check.FP8,)


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
    monkeypatch.setattr(check, "cases", lambda target: dict.fromkeys([check.LAST, "products (along K)"]))
    assert check.check_apart(INTERPRETER, "interpret", 0) == {}


@pytest.mark.processes
def test_a_process_that_hangs_is_ended(monkeypatch, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(BROKEN.replace("os.abort()", "__import__('time').sleep(600)"))
    monkeypatch.syspath_prepend(tmp_path)
    assert check._in_a_process("interpret", 0, ["dead"], 2) == ({}, "did not end within 2 s")


def test_what_was_right_once_is_not_checked_again(monkeypatch, tmp_path):
    """The file is that of a device, its driver, and this code."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    ran, wrong = [], {check.FP8: "gives wrong numbers"}
    device = lambda driver: SimpleNamespace(
        device_kind="NVIDIA H200", local_hardware_id=3, client=SimpleNamespace(platform_version=driver)
    )
    monkeypatch.setattr(check, "check_apart", lambda *how: ran.append(how) or dict(wrong))
    look = check.findings.__wrapped__
    assert look(H200, device("1")) == wrong  # what is wrong is looked at again
    wrong.clear()
    assert look(H200, device("1")) == look(H200, device("1")) == look(H200, device("2")) == {}
    assert ran == [(H200, "pallas", 3)] * 3
