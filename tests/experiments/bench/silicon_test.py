"""The queue for a GPU: its order and its slices by a simulated clock; killed and continued; rows that die."""

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import nmjax as nm
from experiments import files
from experiments.bench import silicon, steps
from experiments.bench.__main__ import main
from experiments.bench.silicon import processes, programs, rows, sources
from nmjax.kernels import HopperConfig, measured
from nmjax.kernels.limits import Shape
from nmjax.kernels.targets import Target
from tests.experiments.runs import as_people_run_it as as_people_run_it

HERE = {"device": "NVIDIA H200", "platform": "gpu", "jax": "0", "machine": "here", "simulated": False}


class Simulated:
    """A machine with a clock of its own. Its rows find "right", or what a test sets, at once or after some seconds."""

    def __init__(self, **found):
        self.here, self.results, self.seconds = {**HERE, "family": "hopper"}, found, lambda name: 1.0
        self.clock, self.killed, self.running, self.ran, self.most = 0.0, float("inf"), {}, [], 0

    def now(self):
        return self.clock

    def start(self, name, seconds):
        takes = 8.0 if name == "about" else self.seconds(name)
        late = takes > seconds
        result = f"stopped after {seconds:.0f} s" if late else self.results.get(name, "right")
        self.running[name] = self.clock + min(takes, seconds), result
        self.most = max(self.most, len(self.running))
        needs = set() if name == "about" else set(rows.ROWS[name].needs)
        assert not needs & {kind for other in self.running if other in rows.ROWS for kind in rows.ROWS[other].proves}

    def ended(self):
        name = min(self.running, key=lambda name: self.running[name][0])
        self.clock, result = self.running.pop(name)
        if self.clock > self.killed:
            self.running.clear()
            raise Killed
        if name == "about":
            return {name: self.here}
        self.ran.append(name)
        return {name: {"result": result, "seconds": 1.0}}


class Killed(Exception):
    pass


@pytest.fixture
def machine(monkeypatch):
    machine = Simulated()
    monkeypatch.setattr(silicon, "Processes", lambda out: contextlib.nullcontext(machine))
    monkeypatch.setattr(silicon.sources, "versions", lambda family: dict.fromkeys(sources.ALL, "1"))
    monkeypatch.setattr(silicon, "gpu_state", lambda: {"driver": "580.65.06"})
    monkeypatch.setattr(silicon.os, "cpu_count", lambda: 16)
    return machine


def run(out, minutes=600.0, parts=""):
    """Run rows, and return the results of all by row, and the table."""
    (table,) = silicon.silicon(out, None, minutes, parts)
    lines = [line for line in files.lines(out / "rows.jsonl") if isinstance(line, dict) and "ended" in line]
    return {line["row"]: line["result"] for line in lines}, str(table)


def part(name):
    return [row for row, about in rows.ROWS.items() if about.part == name]


# ---- the order ----

# Seconds of a row, guessed from those of an H100: rows that run side by side wait for each other.
TAKES = {"check": 45, "steps": 75, "blocks": 60, "numerics": 35, "tiles": 25, "peers": 16, "studies": 30, "again": 75}


def test_all_is_measured_in_three_commands_of_nine_minutes_the_most_valuable_first(tmp_path, machine):
    assert sum(part.minutes for part in rows.PARTS.values()) == 27
    machine.seconds = lambda name: TAKES[rows.ROWS[name].part]
    for command in range(3):
        machine.clock = began = 10_000.0 * command
        run(tmp_path, 9)
        assert machine.clock - began <= 9 * 60
    parts = [rows.ROWS[name].part for name in machine.ran]
    assert list(dict.fromkeys(parts)) == list(rows.PARTS)
    assert {name for name in rows.ROWS if name not in machine.ran} <= {*part("again")}


def test_a_part_that_outlasts_its_slice_lets_the_others_go_first(tmp_path, machine):
    slow = TAKES | {"steps": 150}  # fifteen of them, two at once, are 19 minutes: the slice has 10
    machine.seconds = lambda name: slow[rows.ROWS[name].part]
    for command in range(3):
        machine.clock = 10_000.0 * command
        run(tmp_path, 9)
    assert {line["part"] for line in files.lines(tmp_path / "rows.jsonl")} >= set(rows.PARTS) - {"again"}
    run(tmp_path)
    ended = files.lines(tmp_path / "rows.jsonl")
    assert sorted(line["row"] for line in ended) == sorted(rows.ROWS)
    costs = [line["cost"] for line in ended if line["part"] == "steps"]
    in_time = next(count for count in range(len(costs)) if sum(costs[:count]) >= 600)
    assert 5 < in_time < 10
    late = part("steps")[in_time + 1 :]  # one more had begun
    assert {line["row"] for line in ended[-len(late) - 5 :]} == {*late, *part("again")}


def test_rows_run_side_by_side_after_what_they_need(tmp_path, machine):
    run(tmp_path, parts="numerics")
    assert machine.most == rows.PARTS["numerics"].at_once
    assert machine.ran.index("one tile along K") < machine.ran.index("several steps")
    machine.most = 0
    run(tmp_path, parts="peers,studies")
    assert machine.most == 1


def test_after_each_row_it_says_what_is_left(tmp_path, machine, capsys):
    run(tmp_path, parts="check,peers")
    said = capsys.readouterr().out.splitlines()
    assert said[:2] == ["check: the check before use: right", "  left: 4 of peers"]
    assert [line for line in said if "left" in line][-2:] == ["  left: 1 of peers", "  nothing is left"]


# ---- killed, and gone on ----


@pytest.mark.parametrize("seed", range(4))
def test_killed_at_ten_moments_no_row_is_lost_or_measured_twice(tmp_path, machine, seed):
    draw = random.Random(seed)
    machine.seconds = lambda name: TAKES[rows.ROWS[name].part]
    for _ in range(10):
        machine.killed = machine.clock + draw.uniform(10, 250)
        with contextlib.suppress(Killed):
            run(tmp_path)
        with (tmp_path / "rows.jsonl").open("a") as file:
            file.write('{"row": "studies", "part": "st'[: draw.randint(0, 30)])  # killed while it wrote
    machine.killed = float("inf")
    _, table = run(tmp_path)
    lines = [line["row"] for line in files.lines(tmp_path / "rows.jsonl")]
    assert sorted(lines) == sorted(rows.ROWS)
    assert machine.ran == lines
    assert "Nothing is left." in table


def test_a_row_stopped_by_the_time_limit_runs_again(tmp_path, machine):
    lines, table = run(tmp_path, 0.1)  # the description of the machine takes longer
    assert not lines
    assert not machine.ran
    assert "Left: 1 of check, 15 of steps" in table
    machine.seconds = lambda name: 1000.0
    assert not run(tmp_path, 1, "numerics")[0]  # less than a row may take
    machine.seconds = lambda name: 1000.0 if name == "several steps" else 1.0
    machine.ran.clear()
    assert run(tmp_path, parts="numerics")[0]["several steps"] == "stopped after 60 s"  # all that it may take
    assert machine.ran.count("several steps") == 2  # beside others, and then alone


def test_a_step_that_fails_beside_another_runs_again_alone_before_the_next_part(tmp_path, machine):
    _, first, second, *_ = rows.ROWS
    machine.results[second] = "failed with exit code 1: out of memory"
    begin = machine.start

    def start(name, seconds):
        begin(name, seconds)
        if machine.ran.count(second) == 1 and name == second:
            assert list(machine.running) == [second]
            machine.running[second] = machine.running[second][0], "right"

    machine.start = start
    lines, _ = run(tmp_path, parts="steps,blocks")
    assert lines[second] == "right"
    assert machine.ran[: len(part("steps")) + 1].count(second) == 2
    assert machine.ran.count(first) == 1


# ---- rows that do not count ----


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"row": "several steps", "part": "nu', "1 lines are cut off. "),
        ("7\n[]\n", "2 are of other kernels, of another device or of another JAX. "),
        (json.dumps({"row": "several steps", "code": "old", "result": "wrong"}), "1 are of other kernels, "),
        (json.dumps({"row": ["x"], "part": 1, "result": 2, "proves": 3, "cost": 4}), "1 are of other kernels, "),
    ],
)
def test_a_half_written_folder_is_mended(tmp_path, machine, capsys, text, said):
    (tmp_path / "rows.jsonl").write_text(text)
    run(tmp_path, parts="numerics")
    assert {*part("numerics")} == {*machine.ran}
    assert said in capsys.readouterr().out.splitlines()[0]
    machine.ran.clear()
    run(tmp_path, parts="numerics")
    assert machine.ran == []


def test_rows_of_changed_kernels_run_again_and_are_not_mixed(tmp_path, machine, monkeypatch, capsys):
    machine.results["packing by soft"] = "wrong, of the old kernel"
    run(tmp_path, parts="numerics,peers")
    machine.ran.clear()
    capsys.readouterr()
    monkeypatch.setattr(silicon.sources, "versions", lambda family: dict.fromkeys(sources.ALL, "1") | {"packing": "2"})
    machine.results.clear()
    _, table = run(tmp_path, parts="peers")
    said = capsys.readouterr().out
    assert "of other kernels, of another device or of another JAX. Their rows run again" in said
    assert "of the old kernel" not in table
    assert machine.ran == []  # those of peers pack nothing
    run(tmp_path, parts="numerics,peers")
    packing = {name for name, row in rows.ROWS.items() if row.part == "numerics" and sources.PACKING in row.kernels}
    assert set(machine.ran) == packing
    assert {"packing by soft", "slots of mvue(2,4)"} <= packing
    assert not {"several steps", "packing along both axes"} & packing


@pytest.mark.parametrize("change", [{"jax": "0.1"}, {"device": "NVIDIA H100 80GB HBM3"}])
def test_rows_of_another_jax_or_device_run_again(tmp_path, machine, change):
    run(tmp_path, parts="peers")
    machine.here |= change
    machine.ran.clear()
    run(tmp_path, parts="peers")
    assert len(machine.ran) == 4


def test_a_kernel_that_was_repaired_is_tried_again_and_so_is_all_that_waited_for_it(tmp_path, machine, monkeypatch):
    machine.results["one tile along K"] = "wrong by 1.0e+00"
    lines, table = run(tmp_path, parts="numerics")
    assert lines["several steps"] == "not run, because multiplying (along K) failed"
    assert "| several steps | numerics | not run, because multiplying (along K) failed |" in table
    assert lines["one tile as in dw"] == lines["a partial tile"] == "right"
    assert (tmp_path / "silicon.md").read_text().endswith(table)
    machine.results.clear()
    monkeypatch.setattr(silicon.sources, "versions", lambda family: dict.fromkeys(sources.ALL, "2"))
    assert run(tmp_path, parts="numerics")[0]["several steps"] == "right"


def test_versions_of_kernels_are_those_of_their_code():
    found = sources.versions("hopper")
    assert set(found) == set(sources.ALL)
    assert len(set(found.values())) == 3
    blackwell = sources.versions("blackwell")
    assert [group for group in found if found[group] != blackwell[group]] == [sources.PRODUCTS]
    assert sources.digest("x = 1") != sources.digest("x = 2")


# ---- other machines ----


def test_a_gpu_that_is_not_hopper_has_its_numbers_and_tiles_measured_only(tmp_path, machine, capsys):
    machine.here |= {"device": "NVIDIA B200", "family": "blackwell"}
    assert main(["silicon", "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err == (
        "silicon: NVIDIA B200 is not a Hopper GPU (H100, H200), which most parts need: write "
        "--parts=check,numerics,tiles.\n"
    )
    assert not machine.ran
    lines, _ = run(tmp_path, parts="check,numerics,tiles")
    assert lines["several steps"] == "not run: it is a row of hopper, and this is blackwell"
    assert lines["packing with noise"] == lines["tiles of ViT-B up: dw"] == "right"


@pytest.mark.parametrize(
    ("here", "driver", "said"),
    [
        ({"device": "Tesla V100", "simulated": True}, "580.65.06", "Tesla V100 is of none of the families that have"),
        ({"device": "cpu", "platform": "cpu"}, "550.54.14", "Its driver is 550.54.14, and jax-cuda13-plugin needs 580"),
        ({"device": "cpu", "platform": "cpu"}, "580.65.06", "JAX does not see the GPU. Install jax[cuda13], or set"),
        ({"device": "cpu", "platform": "cpu"}, "[N/A]", "JAX does not see the GPU. Install jax[cuda13], or set"),
    ],
)
def test_one_sentence_where_nothing_can_be_measured(tmp_path, machine, monkeypatch, capsys, here, driver, said):
    machine.here |= here
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.setattr(silicon.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(silicon, "find_spec", lambda name: name == "jax_cuda13_plugin")
    monkeypatch.setattr(silicon, "gpu_state", lambda: {"driver": driver})
    assert main(["silicon", "--out", str(tmp_path)]) == 1
    printed = capsys.readouterr()
    assert printed.err.startswith("silicon: ")
    assert said in printed.err
    assert printed.err.count("\n") == 1
    assert not (tmp_path / "rows.jsonl").exists()


def test_a_jax_that_does_not_start_says_so(tmp_path, machine, monkeypatch, capsys):
    machine.here = {"result": "failed with exit code 1: RuntimeError: no CUDA"}
    monkeypatch.setattr(silicon, "find_spec", lambda name: name == "jax_cuda13_plugin")
    monkeypatch.setattr(silicon, "gpu_state", lambda: {"driver": "535.1"})
    assert main(["silicon", "--out", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert "JAX does not start here: failed with exit code 1: RuntimeError: no CUDA. Its driver is 535.1" in said


# ---- whole programs ----

GPU = Target("NVIDIA H200", "hopper", 132)


def test_the_breakdown_of_a_step_is_that_of_its_kernels():
    """Kernels of a graph, which say no instruction or the graph, and those that do. Two at once share their time."""
    event = lambda name, begin, took, **stats: SimpleNamespace(
        name=name, start_ns=begin, duration_ns=took, stats=stats.items()
    )
    program = """
HloModule jit__lambda_
ENTRY %main {
  %fusion.1 = f32[2] fusion(%a), metadata={op_name="jit(f)/jvp(up)/y_w/add"}
  %fusion.2 = f32[2] fusion(%a), metadata={op_name="jit(f)/jvp(up)/add"}
  %custom-call.7 = f32[2] custom-call(%a), metadata={op_name="jit(f)/transpose(jvp())/transpose"}
}
"""
    stream = [
        event("hopper_spmm_mosaic_gpu_kernel", 0, 10e9),
        event("nvjet_hsh_128x256", 10e9, 5e9, hlo_op="custom-call.7"),
        event("nm_pack_mosaic_gpu_kernel", 15e9, 4e9),
        event("fusion_1", 19e9, 1e9, hlo_op="command_buffer_2"),
        event("loop_add_fusion", 20e9, 2e9, hlo_op="fusion.2"),
        event("MemcpyD2D", 30e9, 1e9),
    ]
    other = [event("nm_pack_mosaic_gpu_kernel", 20e9, 2e9)]
    lines = [SimpleNamespace(name=f"Stream #{i}(Compute)", events=events) for i, events in enumerate((stream, other))]
    lines.append(SimpleNamespace(name="XLA Ops", events=stream))
    planes = [SimpleNamespace(name="/device:GPU:0", lines=lines), SimpleNamespace(name="/host:CPU", lines=lines)]
    found = programs.parts(SimpleNamespace(planes=planes), program)
    assert found == {"products": 15.0, "packing": 6.0, "rest": 2.0}
    assert programs.parts(SimpleNamespace(planes=planes[1:]), program) == {}


@pytest.mark.slow
def test_a_step_is_timed_beside_the_dense_ones(monkeypatch):
    """As on a GPU, but here XLA multiplies, and the times are given: of dense, dense FP8 and the method."""
    given = [[0.04] * 5, [0.02] * 5, [0.01, 0.01, 0.012, 0.014, 0.014]]

    def in_turn(calls, rounds, seconds):
        assert rounds == len(given[0])
        assert all(float(call()[0]) == float(call()[0]) for call in calls.values())  # a step that goes on
        return dict(zip(calls, given, strict=True))

    monkeypatch.setattr(programs, "in_turn", in_turn)
    said = programs.step(steps.SMALL[2], steps.SMALL[2], "S-STE FP8", False, GPU)
    size, nothing = r"\d+\.\d\d", r"\(no breakdown: the profiler saw no kernels\)"
    assert re.fullmatch(
        rf"right: 0\.30 \(0\.25 to 0\.35\) of the dense time, {size} of its temporary memory, "
        r"0\.60 \(0\.50 to 0\.70\) of the time of dense FP8; products: 6 emulated, 0 with tiles of a table; "
        rf"dense 40\.00 ms, {size} GB; dense FP8 20\.00 ms, {size} GB; S-STE FP8 12\.00 ms, {size} GB; "
        rf"of the time on the device: dense {nothing}, S-STE FP8 {nothing}",
        said,
    ), said


@pytest.mark.rare
def test_tiles_are_searched_for_every_product_that_a_step_packs():
    searched = set(rows.searches().values())
    with nm.kernels.on("NVIDIA H100 80GB HBM3"):
        for make, example in steps.LARGE.values():
            model = nnx.eval_shape(make)
            for method in ("FST", "everything sparse", "everything sparse FP8"):
                plan = nm.nnx.plan(model, steps.recipe(programs.METHODS[method]), example)
                packed = {route.shape for layer in plan.layers for _, route in layer.runs if route.how == "packed"}
                assert packed <= searched, method
                assert packed or "FP8" in method


@pytest.mark.parametrize(
    ("code", "error", "said"),
    [
        (2, "launch.py: the data set cifar10 is not there.", "not run: launch.py: the data set cifar10 is not there."),
        (1, "Traceback\nModuleNotFoundError: No module named 'grain'", "not run: ModuleNotFoundError: No module"),
        (1, "launch.py: the loss is not finite", "failed: launch.py: the loss is not finite"),
    ],
)
def test_a_study_without_its_data_or_packages_is_not_run(monkeypatch, code, error, said):
    monkeypatch.setattr(programs.subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=code, stderr=error))
    assert programs.study("ResNet-18, CIFAR-10: dense", GPU).startswith(said)


def test_a_study_needs_a_gpu_and_names_the_packages_that_it_lacks(monkeypatch):
    assert programs.study("ResNet-18, CIFAR-10: dense", Target("interpreter", "hopper", 2, True)) == (
        "not run: it takes hours without a GPU"
    )
    monkeypatch.setattr(programs.importlib.util, "find_spec", lambda name: None if name == "ml_collections" else 1)
    assert programs.study("ResNet-18, CIFAR-10: dense", GPU) == "not run: ml_collections is not installed"


@pytest.mark.slow
def test_a_study_gives_the_score_of_its_run(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setitem(programs.STUDIES, "a study", ("configs/vit_dense.py:smoke",))
    said = programs.study("a study", GPU)
    about = json.loads((tmp_path / "nmjax" / "runs" / "a_study" / "run.json").read_text())
    assert said == f"right: accuracy {about['figures']['accuracy']:.4f} after 4 steps"


# ---- tiles ----


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
    assert "Left: 1 of check" in run.stdout


def row(name, seconds, out):
    """What a row finds that runs alone in a process."""
    with processes.Processes(out) as machine:
        machine.start(name, seconds)
        return machine.ended()[name]


@pytest.mark.processes
def test_a_process_that_fails_or_hangs_is_a_result(tmp_path):
    found = row("no such row", 60, tmp_path)["result"]
    assert found.startswith("failed with exit code 1: KeyError: 'no such row'")
    assert row("one tile along K", 0.2, tmp_path)["result"] == "stopped after 0 s"


@pytest.mark.processes
@pytest.mark.parametrize("interrupted", [False, True])
def test_a_row_that_is_ended_leaves_no_process(tmp_path, monkeypatch, interrupted):
    """It has started another one, which hangs, as a check on a GPU may."""
    script = "import os, subprocess, sys, time; sleep = 'import time; time.sleep(600)'"
    script += "; run = subprocess.Popen([sys.executable, '-c', sleep])"
    script += "; open(os.environ['XDG_CACHE_HOME'] + f'/{os.getpid()}.pid', 'w').write(str(run.pid))"
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    text = f"import sys\nif sys.orig_argv[3][:5] == 'a row':\n    exec({script!r})\n    time.sleep(600)\n"
    (tmp_path / "sitecustomize.py").write_text(text)
    pids = lambda: [path.read_text() for path in tmp_path.glob("*.pid")]
    with processes.Processes(tmp_path) as machine:
        for name in ("a row", "a row more"):
            machine.start(name, 300 if interrupted else 5)
        assert eventually(lambda: sum(map(bool, pids())) == 2)
        if not interrupted:
            found = machine.ended()
            found |= {} if len(found) == 2 else machine.ended()
            assert [line["result"] for line in found.values()] == ["stopped after 5 s"] * 2
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
    found = row("packing along the last axis", 120, tmp_path)
    assert (found["result"], "state" in found) == ("right, value for value", False)
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho '580.65.06, 1830, 1980, 41, 612.20, 700.00'\n")
    state = {"driver": "580.65.06", "state": "1830 of 1980 MHz, 41 °C, 612.20 of 700.00 W, driver 580.65.06"}
    assert processes.gpu_state() == state


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
    for place, by in change.items():
        made.view(np.int16)[place] += by
    assert rows._bits((made, np.arange(9)), (wanted[None], np.arange(9))) == said


@pytest.mark.parametrize(("factor", "said"), [(1.009, "right to"), (1.02, "wrong by"), (np.nan, "wrong by nan")])
def test_results_may_be_off_by_a_hundredth_of_the_largest(factor, said):
    wanted = np.array([0.1, -2.0])
    assert rows._said(wanted * [1, factor], wanted).startswith(said)


STUB = """
import json, os, sys, time
if len(sys.orig_argv) > 4 and sys.orig_argv[2] == "experiments.bench.silicon":
    name, parent = sys.orig_argv[3:5]
    if name == "about":
        print(json.dumps({about}))
    else:
        open(os.environ["XDG_CACHE_HOME"] + "/began", "a").write(name + chr(10))
        time.sleep(0.2)
        if os.getppid() == int(parent):
            print(json.dumps(dict(result="right")), flush=True)
    os._exit(0)
"""


@pytest.mark.processes
def test_killed_at_ten_moments_with_rows_in_processes_it_comes_to_its_end(tmp_path, monkeypatch):
    """Rows that only wait stand for those of a GPU. No row is lost; those that ran when it was killed begin again."""
    about = {**HERE, "family": "hopper"}
    (tmp_path / "sitecustomize.py").write_text(STUB.replace("{about}", repr(about)))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    command = [sys.executable, "-m", "experiments.bench", "silicon", "--out", str(tmp_path), "--minutes", "5"]
    written, draw = lambda: len(files.lines(tmp_path / "rows.jsonl")), random.Random(1)
    for _ in range(10):
        run, wanted = subprocess.Popen(command, stdout=subprocess.DEVNULL), written() + draw.randint(1, 10)
        assert eventually(lambda wanted=wanted: written() >= wanted)
        run.kill()  # it alone: the processes of its rows have to end by themselves
        run.wait()
        assert eventually(lambda: not rows_running(tmp_path))
    assert wanted < len(rows.ROWS)
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "Nothing is left." in done.stdout
    assert sorted(line["row"] for line in files.lines(tmp_path / "rows.jsonl")) == sorted(rows.ROWS)
    most = max(part.at_once for part in rows.PARTS.values())
    assert len((tmp_path / "began").read_text().splitlines()) <= len(rows.ROWS) + 10 * most


@pytest.mark.rare  # it takes an hour
@pytest.mark.slow
@pytest.mark.processes
def test_in_the_interpreter_all_rows_are_right(tmp_path):
    command = [sys.executable, "-m", "experiments.bench", "silicon", "--out", str(tmp_path), "--minutes", "60"]
    assert subprocess.run(command, capture_output=True, check=True)
    lines = files.lines(tmp_path / "rows.jsonl")
    assert sorted(line["row"] for line in lines) == sorted(rows.ROWS)
    wrong = [(line["row"], line["result"]) for line in lines if not line["result"].startswith(("right", "not run: "))]
    assert not wrong
    packed = [line["result"] for line in lines if line["part"] == "steps" and not line["result"].startswith("not run")]
    assert len(packed) == 3 + 5  # S-STE in each model, and the other methods in the block
    assert all(re.search(r"[2-9]\d* (packed|fp8)", text) for text in packed), packed
    (table,) = (tmp_path / "nmjax" / "tables").glob("*.json")
    assert {row.shape.dtype for row in measured.read(table)} == {"bfloat16", "float8_e4m3fn", "float8_e5m2"}
