"""The benchmark of savings: every method of its list runs in every model."""

import re
from functools import partial

import pytest

from experiments.bench import savings
from tests.experiments.runs import as_people_run_it as as_people_run_it


@pytest.mark.slow
@pytest.mark.parametrize(("make", "tokens"), [(savings.gpt, 256), (savings.vit, 256), (savings.resnet, 2048)])
def test_all_methods_have_rows(make, tokens):
    table = savings._table("tiny", partial(make, 64, tokens), savings.METHODS, 2)
    rows = {cells[1]: cells[2:] for line in table.splitlines() if len(cells := re.split(r" *\| *", line)) > 5}
    forms = ("", ", lean", ", remat") if make is not savings.resnet else ("",)
    assert {f"`dense{form}`" for form in forms} < set(rows)
    assert {f"`{method}`" for method in savings.METHODS} < set(rows)
    assert rows["`dense`"][:3] == ["1.00 (1.00 to 1.00)", "1.00", "1.00"]
    kept = [float(rows[f"`{method}`"][1]) for method in ("dense", "drhs_lhs=rows(mvue(1,4))")]
    assert kept[1] < kept[0] or make is not savings.gpt
