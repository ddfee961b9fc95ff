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
from threading import Event

import jax.numpy as jnp
import numpy as np
import pytest

from experiments import files
from experiments.bench import silicon
from experiments.bench.__main__ import main
from experiments.bench.silicon import processes, rows
from nmjax.kernels import HopperConfig, measured
from nmjax.kernels.limits import Shape
from tests.experiments.runs import as_people_run_it as as_people_run_it


@pytest.fixture
def found(monkeypatch):
    """Let rows find "right", or what a test sets, without processes. Keep the names of the rows that ran."""
    results = {"ran": [], "family": "hopper", "code": "1"}

    def run(name, seconds, out, over):
        if name == "about":
            own = {"device": "NVIDIA H200", "jax": "0", "machine": "here", "simulated": False}
            return own | {key: results[key] for key in ("code", "family")}
        results["ran"].append(name)
        return {"result": results.get(name, "right"), "seconds": 1.0}

    monkeypatch.setattr(processes, "run", run)
    return results


def run(out, minutes=600.0, parts=""):
    """Run rows, and return the results of all by row, and the table."""
    (table,) = silicon.silicon(out, None, minutes, parts)
    return {line["row"]: line["result"] for line in files.lines(out / "rows.jsonl")}, str(table)


def test_what_fails_is_refused_by_its_kind(tmp_path, found):
    found["one tile along K"] = "wrong by 1.0e+00"
    found["one tile with A along M"] = "failed with signal 6: "
    lines, table = run(tmp_path)
    assert set(lines) == set(rows.ROWS)
    assert lines["several steps"] == "not run, because multiplying (along K) failed"
    assert lines["one tile as in dw"] == "not run, because multiplying (A along M) failed"
    assert lines["one tile in FP8"] == lines["a partial tile"] == "right"
    assert "| several steps | primitives | not run, because multiplying (along K) failed |" in table
    assert (tmp_path / "silicon.md").read_text().endswith(table)


def test_it_goes_on_after_the_last_whole_row(tmp_path, found):
    run(tmp_path, parts="primitives")
    text = (tmp_path / "rows.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "rows.jsonl").write_text("".join(text[:3]) + text[3][:20])  # killed while it wrote the fourth
    whole = {json.loads(line)["row"] for line in text[:3]}
    found["ran"].clear()
    run(tmp_path, parts="primitives,numerics")
    wanted = [name for name, row in rows.ROWS.items() if row.part in ("primitives", "numerics") and name not in whole]
    assert sorted(found["ran"]) == sorted(wanted)
    found["ran"].clear()
    run(tmp_path, parts="primitives")
    assert found["ran"] == []


@pytest.mark.parametrize("change", [{"code": "2"}, {"jax": "0.1"}, {"device": "NVIDIA A100"}])
def test_rows_of_other_code_or_another_device_run_again(tmp_path, found, change):
    """A kernel that was repaired is tried again, and so is all that waited for it."""
    own = {"device": "NVIDIA H200", "jax": "0", "code": "1", "result": "wrong", "proves": ["multiplying (along K)"]}
    (tmp_path / "rows.jsonl").write_text(json.dumps({"row": "one tile along K", **own, **change}) + "\n")
    run(tmp_path, parts="primitives")
    assert {"one tile along K", "several steps"} <= set(found["ran"])


def test_rows_of_another_family_do_not_run(tmp_path, found):
    found["family"] = "blackwell"
    lines, _ = run(tmp_path)
    assert lines["several steps"] == "not run: it is a row of hopper, and this is blackwell"
    assert lines["packing with noise"] == lines["tiles of ViT-B up: dw"] == "right"


@pytest.mark.slow
def test_rows_run_beside_each_other_after_what_they_need(tmp_path, monkeypatch, found):
    running, most, order, quick = set(), [0], [], processes.run

    def slow(name, seconds, out, over):
        if name == "about":
            return quick(name, seconds, out, over)
        running.add(name)
        most[0] = max(most[0], len(running))
        assert not {kind for other in tuple(running) for kind in rows.ROWS[other].proves} & set(rows.ROWS[name].needs)
        time.sleep(0.1)
        running.remove(name)
        order.append(name)
        return {"result": "right"}

    monkeypatch.setattr(processes, "run", slow)
    monkeypatch.setattr(silicon.os, "cpu_count", lambda: 16)
    run(tmp_path, parts="primitives")
    assert 4 <= most[0] <= silicon.AT_ONCE["primitives"]
    assert order.index("one tile along K") < order.index("several steps")
    most[0] = 0
    run(tmp_path, parts="peers")
    assert most[0] == 1


def test_a_row_stopped_by_the_time_limit_runs_again(tmp_path, found):
    lines, table = run(tmp_path, 0)
    assert f"Not reached: {'; '.join(rows.ROWS)}." in table
    assert not lines
    assert not found["ran"]
    found["several steps"] = "stopped after 1 s"
    assert "several steps" not in run(tmp_path, 0.5)[0]  # less than the row may take
    found["ran"].clear()
    assert run(tmp_path)[0]["several steps"] == "stopped after 1 s"  # with all the time that it may take
    assert found["ran"].count("several steps") == 2  # beside others, and then alone


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


TABLE = {"device": "NVIDIA H200", "kernels": 1, "rows": []}


@pytest.mark.parametrize(
    ("name", "head", "said"),
    [
        (None, {}, "has no table of tiles"),
        ("nvidia_h200", {"rows": []}, "is not a table of tiles"),
        ("nvidia_h200", TABLE | {"device": "NVIDIA A100"}, "Rename it to nvidia_a100.json"),
        ("nvidia_h200", TABLE | {"kernels": 0}, "is of version 0 of the kernels"),
        ("interpreter", TABLE, "has only tiles of the interpreter"),
    ],
)
def test_ship_refuses_other_files_and_old_tables(tmp_path, monkeypatch, capsys, name, head, said):
    monkeypatch.setattr(measured, "SHIPPED", tmp_path / "package")
    if name is not None:
        (tmp_path / "nmjax" / "tables").mkdir(parents=True)
        (tmp_path / "nmjax" / "tables" / f"{name}.json").write_text(json.dumps(head))
    assert main(["silicon", "--ship", str(tmp_path)]) == 2
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
    found = processes.run("no such row", 60, tmp_path, Event())["result"]
    assert found.startswith("failed with exit code 1: KeyError: 'no such row'")
    assert processes.run("one tile along K", 0.2, tmp_path, Event()) == {
        "result": "stopped after 0 s", "seconds": 0.2, "errors": "",
    }  # fmt: skip


@pytest.mark.processes
@pytest.mark.parametrize("interrupted", [False, True])
def test_a_row_that_is_ended_leaves_no_process(tmp_path, monkeypatch, interrupted):
    """It has started another one, which hangs, as a check on a GPU may. Rows that begin later end at once."""
    script = "import os, subprocess, sys, time; sleep = 'import time; time.sleep(600)'"
    script += "; run = subprocess.Popen([sys.executable, '-c', sleep])"
    script += "; open(os.environ['XDG_CACHE_HOME'] + f'/{os.getpid()}.pid', 'w').write(str(run.pid))"
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    text = f"import sys\nif 'a row' in sys.orig_argv:\n    exec({script!r})\n    time.sleep(600)\n"
    (tmp_path / "sitecustomize.py").write_text(text)
    over = Event()
    with ThreadPoolExecutor(3) as pool:
        begun = [pool.submit(processes.run, "a row", 300 if interrupted else 5, tmp_path, over) for _ in range(2)]
        pids = lambda: [path.read_text() for path in tmp_path.glob("*.pid")]
        assert eventually(lambda: sum(map(bool, pids())) == 2)
        if interrupted:
            over.set()
            begun.append(pool.submit(processes.run, "a row", 300, tmp_path, over))
        assert all(row.result(60)["result"].startswith("stopped after ") for row in begun)
    ended = lambda state: not state.exists() or state.read_text().split()[2] == "Z"
    assert eventually(lambda: all(ended(Path(f"/proc/{pid}/stat")) for pid in pids()))


def eventually(happens):
    deadline = time.monotonic() + 60
    while not happens() and time.monotonic() < deadline:
        time.sleep(0.05)
    return happens()


@pytest.mark.processes
def test_a_failing_tool_for_clocks_costs_no_row(tmp_path, monkeypatch):
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 'Failed to initialize NVML: Unknown Error'\nexit 9\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    found = processes.run("packing along the last axis", 120, tmp_path, Event())
    assert (found["result"], "clock" in found) == ("right, value for value", False)
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho '1830, 1980, 41'\n")
    assert processes.run("packing along the last axis", 120, tmp_path, Event())["clock"] == "1830 of 1980 MHz, 41 °C"


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
    command = [sys.executable, "-m", "experiments.bench.silicon", "packing along the last axis", str(gone.pid)]
    row = subprocess.run(command, start_new_session=True, capture_output=True, timeout=120)
    assert row.returncode == -signal.SIGKILL
    assert not row.stdout


@pytest.mark.parametrize(("kind", "change", "said"), [
    (jnp.bfloat16, {}, "right, value for value"),
    (jnp.bfloat16, {5: 1}, "right, but 1 of 2,000 of bfloat16 differ, by up to 1 in the last place"),
    (jnp.bfloat16, {5: 2}, "wrong: 1 of 2,000 of bfloat16 differ, by up to 2 in the last place"),
    (jnp.bfloat16, {5: 1, 6: -1, 7: 1}, "wrong: 3 of 2,000 of bfloat16 differ, by up to 1 in the last place"),
    (np.int16, {0: 1}, "wrong: 1 of 2,000 of int16 differ, by up to 1 in the last place"),
])  # fmt: skip
def test_one_float_in_a_thousand_may_be_rounded_otherwise_and_no_choice(kind, change, said):
    wanted = np.linspace(-1, 1, 2000).astype(kind)
    made = wanted.copy()
    for place, steps in change.items():
        made.view(np.int16)[place] += steps
    assert rows._bits((made, np.arange(9)), (wanted[None], np.arange(9))) == said


@pytest.mark.parametrize(("factor", "said"), [(1.009, "right to"), (1.02, "wrong by"), (np.nan, "wrong by nan")])
def test_results_may_be_off_by_a_hundredth_of_the_largest(factor, said):
    wanted = np.array([0.1, -2.0])
    assert rows._said(wanted * [1, factor], wanted).startswith(said)


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
        assert eventually(lambda: not rows_running(tmp_path))
    assert subprocess.run(command, capture_output=True, check=True)
    lines = files.lines(tmp_path / "rows.jsonl")
    assert sorted(line["row"] for line in lines) == sorted(rows.ROWS)
    wrong = [(line["row"], line["result"]) for line in lines if not line["result"].startswith(("right", "not run: "))]
    assert not wrong
    packed = [line["result"] for line in lines if line["part"] == "training"]
    assert all(int(text.split("; ")[1].split()[0]) >= 2 for text in packed), packed
    (table,) = (tmp_path / "nmjax" / "tables").glob("*.json")
    assert {row.shape.dtype for row in measured.read(table)} == {"bfloat16", "float8_e4m3fn", "float8_e5m2"}
