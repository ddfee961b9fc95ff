"""What differs between versions of JAX: names without a promise are in one file, and a missing one says so."""

import re
from pathlib import Path

import jax.experimental.pallas.mosaic_gpu as plgpu
import pytest

import nmjax
from nmjax.core import versions


@pytest.mark.parametrize(
    ("module", "name"), [("jax._src.none", "Transform"), ("jax._src.source_info_util", "Nothing"), ("jax", "Array.no")]
)
def test_a_missing_private_name_says_what_needs_it(module, name):
    with pytest.raises(ImportError, match=rf"^jax [\d.]+ has no {module}.{name}, a private name that a test needs"):
        versions.private(module, name, "a test")


def test_without_the_layout_of_its_sums_the_error_names_hoppers_kernel(monkeypatch):
    monkeypatch.setattr(plgpu, "Layout", object())
    with pytest.raises(ImportError, match=r"Layout\._WGMMA_ACC_32BIT, a private name that Hopper's kernel needs"):
        versions.sums_layout()


def test_private_names_of_jax_are_in_one_file():
    private = re.compile(r"jax\._src|\b(?:jax|lax|jnp|pl|plgpu|pltpu)\.(?:\w+\.)*_[a-zA-Z]|\bLayout\._")
    files = Path(nmjax.__file__).parent.rglob("*.py")
    assert {p.name for p in files if private.search(p.read_text())} == {"versions.py"}
