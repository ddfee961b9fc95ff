"""The benchmark of steps: its rows are the slots that a page uses."""

import re

import jax.numpy as jnp
import pytest

from experiments.bench import train
from tests.experiments.runs import as_people_run_it as as_people_run_it


def test_a_copy_is_written_and_nearly_equal():
    x = jnp.array([1.0, -2.0, 0.0])
    assert train.copied()(x).tolist() == pytest.approx([1.0001, -2.0002, 0.0])


@pytest.mark.slow
def test_every_slot_of_a_page_has_a_row_and_a_copy_in_its_place():
    page = "configs/vit_24.py:smoke"
    rows = train.slot_by_slot(page, "", 2)
    wanted = ["dense", "fwd_rhs=.*", "fwd_rhs, a copy", r"drhs_g=mvue\(2,4\)", "drhs_g, a copy", "all"]
    assert len(rows) == len(wanted)
    for name, text in zip(rows, wanted, strict=True):
        assert re.fullmatch(f"{page} `{text}`", name)
    assert all(re.fullmatch(r"\d\.\d\d \(\d+\.\d\d to \d+\.\d\d\)", cell) for (cell,) in rows.values())
    assert rows[f"{page} `dense`"] == ["1.00 (1.00 to 1.00)"]
