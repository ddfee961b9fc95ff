"""The first run on a GPU: a row that dies costs one row, and the command goes on where it was stopped."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from experiments.bench import silicon
from experiments.bench.__main__ import main
from experiments.bench.silicon import rows
from experiments.bench.silicon.processes import Processes
from nmjax.kernels import HopperConfig, measured
from nmjax.kernels.limits import Shape
from tests.experiments.runs import as_people_run_it as as_people_run_it


@pytest.fixture
def found(monkeypatch):
    """Let rows find "right", or what a test sets, without processes. Keep the names of the rows that ran."""
    results = {"ran": []}

    def run(name, seconds):
        if name == "about":
            own = {"device": "NVIDIA H200", "jax": "0", "code": results.get("code", "1"), "machine": "here"}
            return own | {"simulated": False, "family": results.get("family", "hopper")}
        results["ran"].append(name)
        return {"result": results.get(name, "right"), "seconds": 1.0}

    monkeypatch.setattr(Processes, "run", lambda self, name, seconds, out: run(name, seconds))
    return results


def test_what_fails_is_refused_by_its_kind(tmp_path, found):
    found["one tile along K"] = "wrong by 1.0e+00"
    found["one tile with A along M"] = "failed with signal 6: "
    table = silicon.silicon(tmp_path, 1)
    lines = {line["row"]: line["result"] for line in silicon.read(tmp_path)}
    assert set(lines) == set(rows.ROWS)
    assert lines["several steps"] == "not run, because products along K failed"
    assert lines["one tile as in dw"] == "not run, because products with A along M failed"
    assert lines["one tile in FP8"] == lines["a partial tile"] == "right"
    assert "| several steps | primitives | not run, because products along K failed |" in table
    assert (tmp_path / "silicon.md").read_text().endswith(table)


def test_it_goes_on_after_the_last_whole_row(tmp_path, found):
    silicon.silicon(tmp_path, 1, ["primitives"])
    text = (tmp_path / "rows.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "rows.jsonl").write_text("".join(text[:3]) + text[3][:20])  # killed while it wrote the fourth
    whole = {json.loads(line)["row"] for line in text[:3]}
    found["ran"].clear()
    silicon.silicon(tmp_path, 1, ["primitives", "numerics"])
    wanted = [name for name, row in rows.ROWS.items() if row.part in ("primitives", "numerics") and name not in whole]
    assert sorted(found["ran"]) == sorted(wanted)
    found["ran"].clear()
    silicon.silicon(tmp_path, 1, ["primitives"])
    assert found["ran"] == []


def test_rows_of_another_device_do_not_count(tmp_path, found):
    line = {"row": "several steps", "device": "NVIDIA H200", "jax": "0.1", "result": "right", "proves": []}
    (tmp_path / "rows.jsonl").write_text(json.dumps(line) + "\n")
    silicon.silicon(tmp_path, 1, ["primitives"])
    assert "several steps" in found["ran"]


def test_rows_of_other_code_run_again(tmp_path, found):
    """A kernel that was repaired is tried again, and so is all that waited for it."""
    found["one tile along K"] = "wrong by 1.0e+00"
    silicon.silicon(tmp_path, 600, ["primitives"])
    first = found["ran"][:]
    found |= {"one tile along K": "right", "code": "2", "ran": []}
    silicon.silicon(tmp_path, 600, ["primitives"])
    assert "several steps" in set(found["ran"]) - set(first)


def test_rows_of_another_family_do_not_run(tmp_path, found):
    found["family"] = "blackwell"
    silicon.silicon(tmp_path, 600)
    lines = {line["row"]: line["result"] for line in silicon.read(tmp_path)}
    assert lines["several steps"] == "not run: it is a row of hopper, and this is blackwell"
    assert lines["packing with noise"] == lines["tiles of ViT-B up: dw"] == "right"


def test_rows_run_beside_each_other_after_what_they_need(tmp_path, monkeypatch, found):
    running, most, order, about = set(), [0], [], Processes().run("about", 1, tmp_path)

    def run(self, name, seconds, out):
        if name == "about":
            return about
        running.add(name)
        most[0] = max(most[0], len(running))
        assert not {kind for other in tuple(running) for kind in rows.ROWS[other].proves} & set(rows.ROWS[name].needs)
        time.sleep(0.1)
        running.remove(name)
        order.append(name)
        return {"result": "right"}

    monkeypatch.setattr(Processes, "run", run)
    monkeypatch.setattr(silicon.os, "cpu_count", lambda: 16)
    silicon.silicon(tmp_path, 1, ["primitives"])
    assert 4 <= most[0] <= silicon.AT_ONCE["primitives"]
    assert order.index("one tile along K") < order.index("several steps")
    most[0] = 0
    silicon.silicon(tmp_path, 1, ["peers"])
    assert most[0] == 1


def test_no_row_begins_when_the_time_is_over(tmp_path, found):
    assert f"Not reached: {'; '.join(rows.ROWS)}." in silicon.silicon(tmp_path, 0)
    assert found["ran"] == []


def test_a_row_stopped_by_the_time_limit_runs_again(tmp_path, found):
    found["several steps"] = "stopped after 1 s"
    silicon.silicon(tmp_path, 0.5)  # less than the row may take
    names = [line["row"] for line in silicon.read(tmp_path)]
    assert "several steps" not in names
    found["ran"].clear()
    silicon.silicon(tmp_path, 600)
    assert found["ran"].count("several steps") == 2  # beside others, and then alone
    (line,) = (line for line in silicon.read(tmp_path) if line["row"] == "several steps")
    assert line["result"] == "stopped after 1 s"  # with all the time that it may take


def test_rows_left_over_from_parts_run_at_the_end(tmp_path, monkeypatch, found):
    """The first part uses its share of the time with its first row."""
    monkeypatch.setattr(silicon, "AT_ONCE", {})
    now = [0.0]
    monkeypatch.setattr(silicon.time, "monotonic", lambda: now[0])
    run = Processes.run

    def slow(self, name, seconds, out):
        now[0] += 61 if len(found["ran"]) == 0 and name != "about" else 0
        return run(self, name, seconds, out)

    monkeypatch.setattr(Processes, "run", slow)
    silicon.silicon(tmp_path, 3, ["primitives", "speed", "peers"])
    parts = [rows.ROWS[name].part for name in found["ran"]]
    of = lambda part: [row.part for row in rows.ROWS.values() if row.part == part]
    assert parts == ["primitives", *of("speed"), *of("peers"), *of("primitives")[1:]]


def test_tables_of_tiles_are_shipped(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(measured, "SHIPPED", tmp_path / "package")
    row = measured.Row(Shape(128, 64, 64), HopperConfig(tile_n=64, store_n=32), 1.2)
    origin = {"jax": "0.1", "date": "2026-01-01"}  # of the machine that measured
    measured.write(tmp_path / "run" / "nmjax" / "tables", "NVIDIA H200", [row], origin)
    measured.write(tmp_path / "run" / "nmjax" / "tables", "interpreter", [row], origin)  # from a trial on a CPU
    assert main(["silicon", "--ship", str(tmp_path / "run")]) == 0
    path = tmp_path / "package" / "nvidia_h200.json"
    assert capsys.readouterr().out == f"{path}\n"
    assert measured.read(path) == (row,)
    assert origin.items() <= json.loads(path.read_text()).items()


@pytest.mark.parametrize(
    ("text", "said"),
    {
        None: "has no table of tiles",
        '{"rows": []}': "is not a table of tiles",
        '{"device": "NVIDIA A100", "kernels": 1, "rows": []}': "Rename it to nvidia_a100.json",
        '{"device": "NVIDIA H200", "kernels": 0, "rows": []}': "is of version 0 of the kernels",
        '{"device": "interpreter", "kernels": 1, "rows": []}': "has only tiles of the interpreter",
    }.items(),
)
def test_ship_refuses_other_files_and_old_tables(tmp_path, monkeypatch, capsys, text, said):
    monkeypatch.setattr(measured, "SHIPPED", tmp_path / "package")
    if text is not None:
        (tmp_path / "nmjax" / "tables").mkdir(parents=True)
        name = "interpreter" if "interpreter" in text else "nvidia_h200"
        (tmp_path / "nmjax" / "tables" / f"{name}.json").write_text(text)
    with pytest.raises(SystemExit):
        main(["silicon", "--ship", str(tmp_path)])
    assert said in capsys.readouterr().err
    assert not (tmp_path / "package").exists()


def test_every_need_is_proved_before():
    proved = set()
    for name, row in rows.ROWS.items():
        assert set(row.needs) <= proved, name
        proved |= set(row.proves)


@pytest.mark.processes
def test_it_needs_few_packages_and_leaves_the_device_alone(tmp_path):
    """A machine with a GPU may have no others. A process that starts the device takes most of its memory."""
    script = (
        "import sys; sys.modules.update(dict.fromkeys(('ml_collections', 'grain', 'tensorboardX', 'chex', 'pytest')));"
    )
    script += "from experiments.bench.__main__ import main; main(['silicon', '--out', sys.argv[1], '--minutes', '0'])"
    script += "; from jax._src import xla_bridge; assert not xla_bridge.backends_are_initialized()"
    run = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert "Not reached" in run.stdout


@pytest.mark.processes
def test_a_process_that_fails_or_hangs_is_a_result(tmp_path):
    found = Processes().run("no such row", 60, tmp_path)["result"]
    assert found.startswith("failed with exit code 1: KeyError: 'no such row'")
    assert Processes().run("one tile along K", 0.2, tmp_path) == {
        "result": "stopped after 0 s", "seconds": 0.2, "errors": "",
    }  # fmt: skip


@pytest.mark.processes
def test_a_row_that_is_ended_leaves_no_process(tmp_path, monkeypatch):
    """It has started another one, which hangs, as a check on a GPU may."""
    pid = tmp_path / "pid"
    script = "import subprocess, sys, time; sleep = 'import time; time.sleep(600)'"
    script += f"; run = subprocess.Popen([sys.executable, '-c', sleep]); open({str(pid)!r}, 'w').write(str(run.pid))"
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    text = f"import sys\nif 'a row' in sys.orig_argv:\n    exec({script!r})\n    time.sleep(600)\n"
    (tmp_path / "sitecustomize.py").write_text(text)
    assert Processes().run("a row", 3, tmp_path)["result"] == "stopped after 3 s"
    state = Path(f"/proc/{pid.read_text()}/stat")
    ended = lambda: not state.exists() or state.read_text().split()[2] == "Z"
    deadline = time.monotonic() + 20
    while not ended() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert ended()


@pytest.mark.processes
def test_a_failing_tool_for_clocks_costs_no_row(tmp_path, monkeypatch):
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 'Failed to initialize NVML: Unknown Error'\nexit 9\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    found = Processes().run("packing along the last axis", 120, tmp_path)
    assert (found["result"], "clock" in found) == ("right, value for value", False)
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho '1830, 1980, 41'\n")
    assert Processes().run("packing along the last axis", 120, tmp_path)["clock"] == "1830 of 1980 MHz, 41 °C"


@pytest.mark.processes
def test_all_rows_end_together(tmp_path, monkeypatch):
    """As after an interrupt. A row that begins later ends at once."""
    script = "import pathlib, os, time; pathlib.Path(os.environ['XDG_CACHE_HOME'], f'{os.getpid()}.began').touch()"
    (tmp_path / "sitecustomize.py").write_text(
        f"import sys\nif 'a row' in sys.orig_argv:\n    {script}; time.sleep(600)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    processes, signalled = Processes(), f"failed with signal {signal.SIGKILL:d}: "
    with ThreadPoolExecutor(3) as pool:
        runs = [pool.submit(processes.run, "a row", 300, tmp_path) for _ in range(2)]
        deadline = time.monotonic() + 60
        while len(list(tmp_path.glob("*.began"))) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        processes.end()
        runs.append(pool.submit(processes.run, "a row", 300, tmp_path))
        assert [run.result(60)["result"] for run in runs] == 3 * [signalled]


def rows_running(out):
    """The processes of rows whose cache is this folder."""
    own = f"XDG_CACHE_HOME={out}".encode()
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if own in (process / "environ").read_bytes().split(b"\0"):
                found.append(process.name)
    return found


@pytest.mark.processes
def test_a_row_ends_if_the_process_that_started_it_has_ended_before():
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    command = [sys.executable, "-m", "experiments.bench.silicon", "packing along the axis before", str(gone.pid)]
    row = subprocess.run(command, start_new_session=True, capture_output=True, timeout=120)
    assert row.returncode == -signal.SIGKILL
    assert not row.stdout


@pytest.mark.parametrize(("change", "said"), [
    ({}, "right, value for value"),
    ({5: 1}, "right, but 1 of 2,000 of bfloat16 differ, by up to 1 in the last place"),
    ({5: 2}, "wrong: 1 of 2,000 of bfloat16 differ, by up to 2 in the last place"),
    ({5: 1, 6: -1, 7: 1}, "wrong: 3 of 2,000 of bfloat16 differ, by up to 1 in the last place"),
])  # fmt: skip
def test_one_float_in_a_thousand_may_be_rounded_otherwise(change, said):
    wanted = np.linspace(-1, 1, 2000).astype(jnp.bfloat16)
    made = wanted.copy()
    for place, steps in change.items():
        made.view(np.int16)[place] += steps
    assert rows._bits((made, np.arange(9)), (wanted[None], np.arange(9))) == said


def test_no_choice_may_differ():
    kept, other = np.zeros(2000, np.int8), np.zeros(2000, np.int8)
    other[0] = 1
    assert rows._bits(kept, other) == "wrong: 1 of 2,000 of int8 differ, by up to 1 in the last place"


@pytest.mark.slow
@pytest.mark.processes
def test_killed_at_ten_random_moments_it_comes_to_its_end(tmp_path):
    """In the interpreter. No row is lost, and none runs twice."""
    command = [sys.executable, "-m", "experiments.bench", "silicon", "--out", str(tmp_path), "--minutes", "60"]
    for _ in range(10):
        run = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        time.sleep(random.uniform(4, 25))
        run.kill()  # it alone: the process of its row has to end by itself
        run.wait()
        deadline = time.monotonic() + 60
        while rows_running(tmp_path) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not rows_running(tmp_path)
    assert subprocess.run(command, capture_output=True, check=True)
    lines = silicon.read(tmp_path)
    assert sorted(line["row"] for line in lines) == sorted(rows.ROWS)
    wrong = [(line["row"], line["result"]) for line in lines if not line["result"].startswith(("right", "not run: "))]
    assert not wrong
    packed = [line["result"] for line in lines if line["part"] == "training"]
    assert all(int(text.split("; ")[1].split()[0]) >= 2 for text in packed), packed
    (table,) = (tmp_path / "nmjax" / "tables").glob("*.json")
    assert {row.shape.dtype for row in measured.read(table)} == {"bfloat16", "float8_e4m3fn", "float8_e5m2"}
