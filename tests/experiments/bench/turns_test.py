"""Processes that measure one at a time, while no other compiles."""

import json
import select
import subprocess
import sys

import pytest

from experiments.bench import turns

SCRIPT = """
import json, sys, time
from experiments.bench import turns
spans = []
def spend(what, seconds):
    start = time.monotonic()
    time.sleep(seconds)
    spans.append([what, start, time.monotonic()])
with turns.compiling():
    for seconds in (1.0, 0.1):
        spend("compile", seconds)
        with turns.alone():
            spend("measure", 0.1)
print(json.dumps(spans))
"""


@pytest.mark.processes
def test_nobody_compiles_or_measures_beside_a_measurement(tmp_path, monkeypatch):
    monkeypatch.setenv(turns.FOLDER, str(tmp_path / "turns"))
    start = lambda: subprocess.Popen([sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, text=True)
    found = [json.loads(run.communicate(timeout=60)[0]) for run in [start() for _ in range(4)]]
    spans = [(number, *span) for number, own in enumerate(found) for span in own]
    assert len(spans) == 16
    beside = {"compile": 0, "measure": 0}
    for a, what, begin, end in spans:
        for b, other, begin_b, end_b in spans:
            if a != b and begin < end_b and begin_b < end:
                assert "measure" not in (what, other), (a, b)
                beside[other] += 1
    assert beside["compile"] >= 2


@pytest.mark.parametrize("folder", ["", "turns"])
def test_a_measurement_inside_another_waits_for_nobody(tmp_path, monkeypatch, folder):
    """Nor does anyone without a folder."""
    monkeypatch.setenv(turns.FOLDER, folder and str(tmp_path / folder))
    with turns.compiling(), turns.alone(), turns.alone():
        pass
    assert [path.name for path in tmp_path.iterdir()] == [folder] * bool(folder)


@pytest.mark.processes
def test_a_process_that_traces_lets_others_measure(tmp_path, monkeypatch):
    """It compiles again afterwards, when nobody measures."""
    monkeypatch.setenv(turns.FOLDER, str(tmp_path / "turns"))
    script = "from experiments.bench import turns\n"
    script += "with turns.compiling():\n    with turns.tracing():\n        print('traces', flush=True); input()\n"
    script += "    print('compiles', flush=True); input()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", script], **pipes) as other:
        assert other.stdout.readline() == "traces\n"
        with turns.compiling(), turns.alone():  # would wait for the other one for ever
            other.stdin.write("\n")
            other.stdin.flush()
            assert not select.select([other.stdout], [], [], 1)[0]  # which waits now
        assert other.stdout.readline() == "compiles\n"
        other.communicate("\n", timeout=60)
    assert other.returncode == 0
