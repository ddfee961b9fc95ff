"""The benchmark of savings: methods of each kind run in every model."""

import re
from functools import partial

import numpy as np
import pytest

import nmjax as nm
from experiments.bench import compaction, savings
from experiments.bench.measure import peak_bytes
from tests.experiments.runs import as_people_run_it as as_people_run_it

METHODS = ("drhs_g=rows(mvue(1,4),by='both')", "drhs_lhs=rows(mvue(1,4))", "s_ste(2,4)")  # each form compiles a step


def test_they_are_of_the_list():
    assert set(METHODS) < set(savings.METHODS)
    for text in savings.METHODS:
        assert nm.parse(text) != nm.parse("dense")


@pytest.mark.slow
@pytest.mark.parametrize(("make", "tokens"), [(savings.gpt, 256), (savings.vit, 256), (savings.resnet, 2048)])
def test_all_methods_have_rows(make, tokens):
    table = savings._table("tiny", partial(make, 64, tokens), METHODS, 2)
    lines = [re.split(r" *\| *", line)[1:] for line in table.splitlines() if line.startswith("| `")]
    rows = {name: cells for name, *cells in lines}
    forms = ("", ", lean", ", remat") if make is not savings.resnet else ("",)
    assert {f"`dense{form}`" for form in forms} < set(rows)
    assert {f"`{method}`" for method in METHODS} < set(rows)
    assert all(re.fullmatch(r"[\d,]+ ms, [\d,]+ MiB, \d+\.\d s", cells[4]) for cells in rows.values())
    if make is not savings.resnet:  # its temporary memory is what one convolution takes, not what is kept
        memory = {name.strip("`"): float(cells[1]) for name, cells in rows.items()}
        assert memory["dense, remat"] < memory["dense, lean"] < 0.7
        assert memory["drhs_lhs=rows(mvue(1,4)), remat"] < memory["drhs_lhs=rows(mvue(1,4)), lean"] < 0.7
    left = "Layers that a method does not fit are dense: `drhs_g=rows(mvue(1,4),by='both')` in 3." in table
    assert left == (make is savings.resnet)


@pytest.mark.skipif(peak_bytes(lambda: None) is None, reason="the platform does not tell the peak of a process")
def test_the_peak_of_a_call_is_that_of_its_memory():
    """Half of it is freed before the call ends."""
    call = lambda: (np.ones(2**24), np.ones(2**24))[0]  # 128 MiB each
    assert 0.9 * 2**28 < peak_bytes(call) < 1.1 * 2**28


@pytest.mark.slow
def test_single_products(monkeypatch):
    monkeypatch.setattr(compaction, "SHAPES", ((512, 32, 64),))
    table = compaction.compaction(2)
    assert [line.split("|")[1].strip() for line in table.splitlines()[6:]] == [
        f"512 x 32 x 64, {n}:{m}" for n, m in compaction.PATTERNS
    ]
