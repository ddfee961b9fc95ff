"""The table of what sparse tensor cores can bring."""

import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from experiments.bench import expected
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


@pytest.mark.slow
def test_all_rows():
    table = expected.expected()
    assert len(re.findall(r"(?m)^\| .*: (S-STE|FST|MdGf)", table)) == 9
