"""The profile of a run: what is traced, where its time goes, and what the devices could do."""

import contextlib
import gzip
import json
import re
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from experiments import command, config_files, files
from experiments.training import breakdown, device
from experiments.training.breakdown import Instruction, Op, Span
from experiments.training.profile import Profile
from experiments.training.screen import Screen
from tests.experiments.runs import CONFIG, arrays, as_people_run_it as as_people_run_it, configured, timeless

pytestmark = pytest.mark.slow

LAYERS = [f"blocks/0/{name}" for name in ("attention/key", "attention/out", "attention/query", "attention/value")]
LAYERS += ["blocks/0/mlp/down", "blocks/0/mlp/up"]


# ---- a run ----


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The folders of two runs of 12 steps, the second with a profile, and what it printed."""
    folder, printed = tmp_path_factory.mktemp("profile"), []
    words = ["launch.py", *CONFIG, "--config.steps=12", "--config.evaluate=6", "--config.measure=6"]
    with pytest.MonkeyPatch.context() as patch, configured():
        patch.chdir(config_files.ROOT)
        command.main([*words, f"--workdir={folder / 'without'}"], "")
        patch.setattr(Screen, "line", lambda self, text: printed.append(text))
        command.main([*words, f"--workdir={folder / 'with'}", "--profile=3"], "")
    return folder / "without", folder / "with", printed


def test_a_profile_changes_no_number_of_the_run(runs):
    without, traced, _ = runs
    assert arrays(without) == arrays(traced)
    assert timeless(without) == timeless(traced)


@pytest.mark.rare
def test_the_trace_is_where_the_screen_says_and_holds_the_steps(runs):
    _, traced, printed = runs
    said = [text for text in printed if text.startswith("--profile")]
    assert said[0] == "--profile: steps 5 to 7 will be traced."
    assert said[1].startswith("--profile: traced steps 5 to 7. ")
    path = re.search(r"Open (\S+) at https://ui.perfetto.dev", said[1])[1]
    with gzip.open(path) as file:  # Chrome's format, which Perfetto reads
        scopes = {(event.get("cat"), event["name"]) for event in json.load(file)["traceEvents"]}
    for layer in LAYERS:
        assert any(part == "pruning" and name.startswith(f"{layer} dw_g ") for part, name in scopes)
        assert any(part == "backward" and name.startswith(f"{layer} ") for part, name in scopes)
    folder = next((traced / "profile").glob("plugins/profile/*"))  # TensorBoard reads it
    assert list(folder.glob("*.xplane.pb"))
    with gzip.open(next(folder.glob("*.trace.json.gz"))) as file:
        events = json.load(file)["traceEvents"]
    steps = [event for event in events if event.get("name") == "train" and "step_num" in event.get("args", {})]
    assert sorted(int(event["args"]["step_num"]) for event in steps) == [5, 6, 7]
    assert not (runs[0] / "profile").exists()


def test_the_breakdown_covers_the_whole_step(runs):
    found = json.loads((runs[1] / "profile" / "breakdown.json").read_text())
    assert (found["first"], found["steps"], found["devices"]) == (5, 3, jax.local_device_count())
    assert list(found["parts"]) == list(breakdown.PARTS)
    assert sum(found["parts"].values()) == pytest.approx(found["seconds"])
    assert all(found["parts"][part] > 0 for part in ("input", "forward", "backward", "pruning", "update"))
    assert set(found["slots"]) == {"y_w", "dw_g"}
    assert sum(found["slots"].values()) == pytest.approx(found["parts"]["pruning"])
    assert sorted(found["layers"]) == LAYERS
    for part in ("forward", "backward", "pruning"):
        of_layers = sum(row[part] for row in found["layers"].values())
        assert 0 < of_layers <= found["parts"][part] * 1.001


def test_the_report_shows_where_the_time_goes(runs):
    without, traced = ((folder / "report.html").read_text() for folder in runs[:2])
    found = json.loads((runs[1] / "profile" / "breakdown.json").read_text())
    section = traced.partition('<section id="steps">')[2].partition("</section>")[0]
    for part, seconds in found["parts"].items():
        assert f"{part}</th><td>{number(1000 * seconds)} ms</td>" in section
    assert all(f">{path}</th>" in section for path in LAYERS)
    assert '<section id="steps">' not in without
    assert "Peak memory of the process" in without


def number(x):
    return f"{x:,.0f}" if x >= 1000 else f"{x:.3g}" if x == 0 or x >= 1e-3 else "·"


def test_lines_of_metrics_tell_the_memory_and_no_share_of_an_unknown_peak(runs):
    lines = [line for line in files.lines(runs[1] / "metrics.jsonl") if line["kind"] == "train"]
    assert all(line["process_memory"] > 2**26 and "device_memory" not in line for line in lines)
    assert not any("mfu" in line for line in lines)
    memory = [line["process_memory"] for line in lines]
    assert memory == sorted(memory)
    summary = dict(json.loads((runs[1] / "run.json").read_text())["summary"])
    assert "of the process" in summary["peak memory"]


def test_the_share_of_a_known_peak(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(device, "peak_flops", lambda kind, dtype: 1e11)
    command.main(["launch.py", *CONFIG, "--config.steps=8", "--config.evaluate=8", f"--workdir={tmp_path}"], "")
    timed = [line for line in files.lines(tmp_path / "metrics.jsonl") if "per_second" in line]
    peak = 1e11 * jax.device_count()
    assert timed
    assert [line["mfu"] for line in timed] == [line["flops_per_second"] / peak for line in timed]
    assert "Model FLOPs utilisation" in (tmp_path / "report.html").read_text()
    printed = capsys.readouterr().out
    assert all(f"FLOP/s  MFU {line['mfu']:.1%}  peak " in printed for line in timed)
    summary = dict(json.loads((tmp_path / "run.json").read_text())["summary"])
    assert summary["MFU (median)"] == f"{np.median([line['mfu'] for line in timed]):.1%}"
    assert re.search(rf"^MFU \(median\) +{summary['MFU (median)']} *$", printed, re.MULTILINE)


# ---- which steps are chosen ----


@pytest.mark.parametrize(
    ("asked", "start", "total", "first", "count"),
    [
        (4, 0, 100, 5, 4),
        (4, 90, 100, 95, 4),
        (4, 93, 100, 96, 4),
        (4, 98, 100, 98, 2),
        (8, 0, 8, 0, 8),
        (4, 8, 8, 8, 0),
    ],
)
def test_traced_steps_come_after_warm_ones_if_there_are_enough(asked, start, total, first, count, tmp_path):
    said = []
    profile = Profile(asked, SimpleNamespace(total=total), tmp_path, SimpleNamespace(line=said.append))
    profile._choose(start)
    assert (profile.first, profile.steps) == (first, count)
    assert len(said) == (count > 0)


def test_a_run_that_ends_early_leaves_no_trace_open(tmp_path):
    said = []
    profile = Profile(2, SimpleNamespace(total=9), tmp_path, SimpleNamespace(line=said.append))
    with profile:
        profile._begin()
    assert said == ["--profile: the run ended before its last traced step, so the report has no breakdown."]
    jax.profiler.start_trace(tmp_path / "another")  # raises an error while another trace is open
    jax.profiler.stop_trace()


def test_a_trace_that_cannot_be_written_does_not_end_the_run(tmp_path):
    said = []
    (tmp_path / "profile").write_text("a file, not a folder")
    profile = Profile(1, SimpleNamespace(total=1), tmp_path, SimpleNamespace(line=said.append))
    meter = SimpleNamespace(untimed=contextlib.nullcontext)
    with profile:
        profile.at(0, (), None, meter)
        profile.at(1, (), None, meter)
    assert said[-1].endswith("The run goes on without a breakdown.")


# ---- the time of operations ----


def test_time_is_shared_by_what_runs_at_a_moment():
    """A picture of every case: a wait, one operation, two at once, a loop around one, other work, idleness."""
    ops = [Op("a", 10, 20), Op("b", 15, 25), Op("loop", 30, 50), Op("c", 35, 40), Op("alien", 50, 52, mine=False)]
    ops.append(Op("a", 60, 64))
    spans = [Span("input", 2, 12), Span("input", 26, 29), Span("untimed", 52, 58)]
    times = breakdown.shared(ops, spans, loops=["loop"])
    assert times.ops == {"a": 5 + 2.5 + 2.5 + 4 - 2.5, "b": 2.5 + 5, "loop": 5 + 10, "c": 5}
    assert (times.others, times.waiting) == (2, 8 + 3)  # the wait is over where an operation runs
    assert times.idle == 1 + 1 + 2  # 25 to 26, 29 to 30, 58 to 60
    assert times.total == (64 - 2) - (58 - 52)
    assert times.total == sum(times.ops.values()) + times.others + times.waiting + times.idle


def test_the_time_of_random_operations_adds_up():
    rng = np.random.default_rng(0)
    begins, lengths = rng.integers(0, 1000, 200), rng.integers(0, 30, 200)
    ops = [Op(f"op{i % 17}", int(b), int(b + n)) for i, (b, n) in enumerate(zip(begins, lengths, strict=True))]
    times = breakdown.shared(ops, [])
    covered = np.zeros(2000, int)
    for op in ops:
        covered[op.begin : op.end] += 1
    first, last = min(op.begin for op in ops), max(op.end for op in ops)
    assert times.idle == np.sum(covered[first:last] == 0)
    assert sum(times.ops.values()) == pytest.approx(np.sum(covered > 0))
    for name in {op.name for op in ops}:
        own = sum((1 / covered[op.begin : op.end]).sum() for op in ops if op.name == name)
        assert times.ops[name] == pytest.approx(own)


@pytest.mark.parametrize(
    ("op_name", "part", "slots"),
    [
        ("jit(train_step)/input/gather", "input", []),
        ("jit(train_step)/jvp()/erfc", "forward", []),
        ("jit(train_step)/while/body/closed_call/jvp(blocks/0/up)/dot_general", "forward", []),
        ("jit(train_step)/transpose(jvp(while))/body/transpose()/dot_general", "backward", []),
        ("jit(train_step)/vmap(transpose(jvp(up)))/dot_general", "backward", []),
        ("jit(train_step)/jvp(up)/y_w/select_n", "pruning", ["y_w"]),
        ("jit(train_step)/transpose(jvp(up))/dx_g+dw_g/pallas_call", "pruning", ["dx_g", "dw_g"]),
        ("jit(train_step)/up/jit(_states)/y_w/sort", "pruning", ["y_w"]),
        ("jit(train_step)/update/mul", "update", []),
        ("jit(train_step)/updates/mul", "other", []),
        ("state.params['up']", "other", []),
        ("", "other", []),
    ],
)
def test_the_part_of_an_operation(op_name, part, slots):
    assert breakdown.part_of(op_name) == part
    assert breakdown.slots_of(op_name) == slots


def test_a_layer_is_found_by_its_whole_path():
    paths = ["blocks/1/up", "blocks/10/up", "up"]
    assert breakdown.layer_of("jit(f)/transpose(jvp(blocks/10/up))/dw_g/mul", paths) == "blocks/10/up"
    assert breakdown.layer_of("jit(f)/jvp(blocks/1/upper)/dot_general", paths) is None


def test_instructions_of_a_program():
    text = """HloModule jit_train_step, is_scheduled=true

%fused (p: f32[2]) -> f32[2] {
  %p = f32[2]{0} parameter(0)
  ROOT %mul.1 = f32[2]{0} multiply(%p, %p), metadata={op_name="jit(train_step)/update/mul" stack_frame_id=4}
}

ENTRY %main.9 (x: f32[2]) -> (f32[2], s32[]) {
  %x = f32[2]{0:T(8,128)} parameter(0), metadata={op_name="state.params[\\'up\\']"}
  %while.2 = (s32[], /*index=1*/f32[2]{0}) while(%t), condition=%c, body=%b
  ROOT fusion.3 = f32[2]{0} fusion(%x), kind=kLoop, calls=%fused
}
"""
    found = breakdown.instructions(text)
    assert found["mul.1"] == Instruction("multiply", "jit(train_step)/update/mul")
    assert found["while.2"].opcode == "while"
    assert found["fusion.3"] == Instruction("fusion", "jit(train_step)/update/mul")  # of the operation in it
    assert found["x"].opcode == "parameter"


def test_events_of_a_trace_are_read():
    """A CPU notes when other threads are done with an operation; a GPU only has the operation."""
    event = lambda name, start, length, **stats: SimpleNamespace(
        name=name, start_ns=start, duration_ns=length, stats=stats.items()
    )
    at = {"hlo_module": "jit_train_step"}
    line = [event("dot.1", 5, 2, hlo_op="dot.1", _p=7, **at), event("end: dot.1", 20, 1, _c=7), event("input", 0, 3)]
    kernels = [event("wgmma", 30, 4, hlo_op="dot.2", hlo_module="jit_train_step(3)"), event("memset", 1, 1)]
    kernels.append(event("k", 40, 1, hlo_op="add.1", hlo_module="jit__measure"))
    planes = [SimpleNamespace(lines=[SimpleNamespace(events=line), SimpleNamespace(events=kernels)])]
    ops, spans = breakdown.events(SimpleNamespace(planes=planes), "jit_train_step")
    assert ops == [Op("dot.1", 5, 21), Op("dot.2", 30, 34), Op("add.1", 40, 41, mine=False)]
    assert spans == [Span("input", 0, 3)]


def test_a_timeline_has_no_two_operations_in_one_row_at_once():
    program = {
        "dot.1": Instruction("dot", "jit(train_step)/jvp(up)/dot_general"),
        "dot.2": Instruction("dot", "jit(train_step)/jvp()/dot_general"),
        "max.1": Instruction("max", "jit(train_step)/transpose(jvp(up))/dw_g/max"),
    }
    ops = [Op("dot.1", 0, 4000), Op("dot.2", 2000, 5000), Op("max.1", 3000, 4000), Op("dot.1", 4000, 6000)]
    events = breakdown.timeline([*ops, Op("x", 9000, 9500, False)], [Span("input", 0, 100)], program, ["up"])
    shown = [event for event in events["traceEvents"] if event["ph"] == "X"]
    row = lambda event: (event["cat"], event["tid"], event["name"], event["ts"], event["dur"])
    assert list(map(row, shown)) == [
        ("host", 1, "input", 0.0, 0.1),
        ("forward", 1, "up dot_general", 0.0, 4.0),
        ("forward", 2, "dot_general", 2.0, 3.0),
        ("pruning", 1, "up dw_g max", 3.0, 1.0),
        ("forward", 1, "up dot_general", 4.0, 2.0),
        ("other", 1, "x", 9.0, 0.5),
    ]
    names = {event["pid"]: event["args"]["name"] for event in events["traceEvents"] if event["ph"] == "M"}
    assert all(names[event["pid"]] == event["cat"] for event in shown)


# ---- devices ----


@pytest.mark.parametrize(
    ("kind", "bfloat16", "float32"),
    [
        ("NVIDIA H100 80GB HBM3", 989.5, 494.7),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None, None),  # a part of one
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None, None),
        ("TPU v5 lite", 197, 197),
        ("TPU v5p", 459, 459),
        ("cpu", None, None),
    ],
)
def test_peaks(kind, bfloat16, float32):
    for dtype, peak in (("bfloat16", bfloat16), ("float32", float32), ("float16", None)):
        found = device.peak_flops(kind, dtype)
        assert found == (None if peak is None else pytest.approx(peak * 1e12))


def test_the_peak_of_all_devices(monkeypatch):
    mesh = Mesh(np.array(jax.devices()), ("data",))
    assert device.peak_of(mesh, "float32") is None
    monkeypatch.setitem(device.PEAKS, "cpu", (3, 2))
    assert device.peak_of(mesh, "float32") == 2e12 * len(jax.devices())


@pytest.mark.rare
def test_the_memory_of_the_fullest_device_or_of_the_process():
    told = lambda peak: SimpleNamespace(memory_stats=lambda: {"peak_bytes_in_use": peak, "bytes_in_use": 1})
    assert device.peak_memory([told(5), told(9)]) == {"device_memory": 9}
    silent = SimpleNamespace(memory_stats=lambda: None)
    before = device.peak_memory([silent])["process_memory"]
    more = np.ones(before // 8 + 2**24)  # more bytes than were ever in use
    assert device.peak_memory([silent])["process_memory"] >= more.nbytes > before
