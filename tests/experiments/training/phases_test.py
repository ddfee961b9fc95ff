"""A run changes over to the program of each phase, and computes what one program for all steps would."""

import json
import threading

import numpy as np
import pytest

from experiments import command
from experiments.training import header, phases
from experiments.training.program import Program
from nmjax.products import compaction, routes
from tests.experiments.runs import as_people_run_it as as_people_run_it, program

METHOD = "y_w=ste(stages(((0,identity),(2,mse(2,4))))); dw_g=stages(((0,identity),(3,rows(mvue(1,4))),(5,mvue(2,4))))"
ROWS = (f"--config.sparsity.blocks={METHOD}", "--config.steps=7")
CONFIG_FILE = "configs/vit_sste.py:smoke"


@pytest.fixture(autouse=True)
def rows_pay(monkeypatch):
    """Also in arrays as small as these."""
    monkeypatch.setattr(compaction, "expected", lambda *_: 0.5)
    routes._routes.cache_clear()
    yield
    routes._routes.cache_clear()


@pytest.mark.slow
def test_programs_change_where_products_run_in_a_better_way():
    made = program(CONFIG_FILE, *ROWS)
    assert made.plan.phases == (2, 3, 5)
    assert made.phases == (3, 5)  # fewer rows are multiplied from 3 on; at 2, weights are pruned in the same program
    assert made.in_phase(0) is made.in_phase(2) is made
    assert made.in_phase(3) is made.in_phase(4) is not made
    assert made.in_phase(5) is made.in_phase(6) is made
    assert made.in_phase(3).in_phase(5) is made
    assert made.in_phase(3).score is made.score
    assert program(CONFIG_FILE, "--config.sparsity.blocks=s_ste(2,4)").in_phase(5).phases == ()
    assert (
        program(CONFIG_FILE, "--config.sparsity.blocks=mdgf(2,4,linear(1,0,2,begin=2))").phases == ()
    )  # no device gains
    assert program(CONFIG_FILE, ROWS[0], "--config.steps=4").phases == (3,)  # there is no step 5
    words = dict(header.rows(made))["computing"]
    assert "from step 3 pruned products: 6 compacted to the chosen rows, 6 emulated" in words


@pytest.mark.slow
def test_a_compilation_that_fails_in_the_background_does_not_end_the_run(monkeypatch):
    """The first step of the phase compiles again, in the thread of the run, where an error is raised."""
    made = program(CONFIG_FILE, *ROWS)
    arrays = next(iter(made.task.feed(0, 0, made.mesh)))
    of = phases.Phases(made, arrays)
    monkeypatch.setattr(phases, "_compiled", lambda *job: (_ for _ in ()).throw(MemoryError("no room")))
    of._prepare(0)
    changed, memory = of.change(3)
    assert (changed, memory) == (made.in_phase(3), None)
    state, figures = changed.train(made.init(np.uint32(0)), arrays)
    assert np.isfinite(figures["loss"])


@pytest.mark.slow
def test_a_run_that_is_continued_begins_in_its_phase():
    made = program(CONFIG_FILE, *ROWS)
    arrays = next(iter(made.task.feed(0, 4, made.mesh)))
    first, memory = phases.Phases(made, arrays).begin(4, measure=False)
    assert first is made.in_phase(3)
    assert memory > 0


def losses(workdir):
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["kind"] == "train"]


@pytest.mark.slow
def test_a_run_is_that_of_one_program(tmp_path, monkeypatch):
    threads, compiled = [], phases._compiled
    note = lambda function, arguments: threads.append(threading.current_thread().name) or compiled(function, arguments)
    monkeypatch.setattr(phases, "_compiled", note)
    run = lambda name: command.main(["launch.py", f"--config={CONFIG_FILE}", *ROWS, f"--workdir={tmp_path / name}"], "")
    run("phases")
    assert sum("the next phase" in name for name in threads) == 2
    monkeypatch.setattr(Program, "in_phase", lambda self, step: self)
    run("whole")
    np.testing.assert_allclose(losses(tmp_path / "phases"), losses(tmp_path / "whole"), rtol=1e-4)
