"""A run changes over to the program of each phase, and computes what one program for all steps would."""

import json
import threading

import numpy as np
import pytest

from experiments import command
from experiments.training import phases
from experiments.training.program import Program
from tests.experiments.runs import as_people_run_it as as_people_run_it, program

FADING = ("--config.sparsity.blocks=mdgf(2,4,linear(1,0,2,begin=2)); drhs_g=mvue(2,4)", "--config.steps=7")
PAGE = "configs/vit_sste.py:smoke"


def test_a_program_of_each_phase():
    made = program(PAGE, *FADING)
    assert made.phases == (3, 4)
    assert made.in_phase(0) is made.in_phase(2)
    assert made.in_phase(3) is not made.in_phase(4)
    assert made.in_phase(4) is made.in_phase(6)
    assert made.in_phase(4).score is made.score
    assert program(PAGE, "--config.sparsity.blocks=s_ste(2,4)").in_phase(5).phases == ()
    assert program(PAGE, FADING[0], "--config.steps=4").phases == (3,)  # there is no step 4


def test_a_phase_whose_program_does_not_compile_is_told_at_its_step(monkeypatch):
    made = program(PAGE, *FADING)
    arrays = next(iter(made.task.feed(0, 0, made.mesh)))
    of = phases.Phases(made, arrays)
    monkeypatch.setattr(phases, "_compiled", lambda *job: (_ for _ in ()).throw(MemoryError("no room")))
    of._prepare(0)
    assert of.change(3) is made.in_phase(3)  # whose first step compiles in this thread, and raises


def losses(workdir):
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["kind"] == "train"]


def test_a_run_that_is_continued_begins_in_its_phase():
    made = program(PAGE, *FADING)
    arrays = next(iter(made.task.feed(0, 5, made.mesh)))
    first, memory = phases.Phases(made, arrays).begin(5, measure=False)
    assert first is made.in_phase(4)
    assert memory > 0


@pytest.mark.slow
def test_a_run_is_that_of_one_program(tmp_path, monkeypatch):
    threads, compiled = [], phases._compiled
    note = lambda function, arguments: threads.append(threading.current_thread().name) or compiled(function, arguments)
    monkeypatch.setattr(phases, "_compiled", note)
    run = lambda name: command.main(["launch.py", f"--config={PAGE}", *FADING, f"--workdir={tmp_path / name}"], "")
    run("phases")
    assert sum("the next phase" in name for name in threads) == 2
    monkeypatch.setattr(Program, "in_phase", lambda self, step: self)
    run("whole")
    np.testing.assert_allclose(losses(tmp_path / "phases"), losses(tmp_path / "whole"), rtol=1e-4)
