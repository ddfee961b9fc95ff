"""Trackers: with a package of our own that keeps what it is sent, and with the real ones if they are installed."""

import json
import os
import subprocess
import sys
import time
from importlib.util import find_spec

import pytest
from ml_collections import ConfigDict

from experiments import command, config_files, files
from experiments.errors import Mistake
from experiments.scale import trackers
from experiments.training import digest, record
from nmjax.analysis.plan import Plan
from tests.experiments.runs import as_people_run_it as as_people_run_it
from tests.experiments.sweep_test import CONFIG_FILE

KEEPS = """
import json, os, time

Settings = dict


def said(what, *values):
    if os.environ.get("FAILS") == what:
        raise SystemExit(3) if what == "finish" else ConnectionError("no route.")
    while os.environ.get("HANGS") == what:
        time.sleep(0.01)
    with open(os.environ["SENT"], "a") as file:
        file.write(json.dumps([what, *values]) + "\\n")


def setup(settings):
    pass


class Run(dict):
    offline, url, summary = False, "http://there/run", property(lambda self: self)

    def define_metric(self, name, step_metric):
        said("metric", name, step_metric)

    def log(self, values):
        said("log", values)

    def finish(self, exit_code):
        said("finish", exit_code, self)


def init(dir, settings, **options):
    said("init", options)
    return Run()
"""


@pytest.fixture
def sent(tmp_path, monkeypatch):
    """Return what a package by the name of wandb has been sent."""
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "wandb.py").write_text(KEEPS)
    monkeypatch.syspath_prepend(tmp_path / "packages")
    monkeypatch.setenv("SENT", str(tmp_path / "sent"))
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    yield lambda: [json.loads(line) for line in (tmp_path / "sent").read_text().splitlines()]
    sys.modules.pop("wandb", None)


def made(path, step=0, tell=print):
    path.mkdir(exist_ok=True)
    config = ConfigDict({"seed": 3, "data": {"name": "digits", "crop": 1}})
    run = record.Record(path, digest.identity(config), {"name": "x"}, Plan((), 0, (), 0), tell, "wandb")
    run.begin(step)
    return run


def test_numbers_are_sent_with_their_steps_and_the_end_with_its_outcome(tmp_path, sent):
    told = []
    run = made(tmp_path / "mine", tell=told.append)
    run.write("sparsity", 0, density={"blocks/up": 0.5, "head": 1.0})
    run.write("train", 1, loss=2.5)
    run.keep([("best loss", "2.5000")], {"figures": {"loss": 2.5}}, {})
    run.close("finished")
    id = json.loads((tmp_path / "mine" / "run.json").read_text())["sent"]["wandb"]
    config = {"seed": 3, "data.name": "digits", "data.crop": 1}
    options = {"project": "nmjax", "id": id, "name": "mine", "config": config}
    assert sent() == [
        ["init", {**options, "resume": "allow", "reinit": "create_new"}],
        ["metric", "*", "step"],
        ["log", {"step": 0, "sparsity/density/blocks/up": 0.5, "sparsity/density/head": 1.0}],
        ["log", {"step": 1, "train/loss": 2.5}],
        ["finish", 0, {"outcome": "finished", "summary/best loss": "2.5000"}],
    ]
    assert told == ["wandb: http://there/run"]


def test_a_run_that_goes_on_does_so_where_it_was(tmp_path, sent):
    for step in (0, 2, 0):
        run = made(tmp_path / "mine", step)
        run.write("train", step + 1, loss=1.0)
        run.close("interrupted")
    first, on, anew = (line[1]["id"] for line in sent() if line[0] == "init")
    assert first == on != anew
    nothing = digest.identity(ConfigDict())
    record.Record(tmp_path / "mine", nothing, {"name": "x"}, Plan((), 0, (), 0)).close("failed")  # it sends nothing
    assert json.loads((tmp_path / "mine" / "run.json").read_text())["sent"] == {"wandb": anew}


@pytest.mark.slow
def test_every_run_of_a_sweep_is_sent_as_it_is_written(tmp_path, sent, monkeypatch):
    (tmp_path / "mine.py").write_text(CONFIG_FILE.replace('("ste(2,4)", "s_ste(2,4)")', '("ste(2,4)",)'))
    words = [f"--config={tmp_path / 'mine.py'}", f"--workdir={tmp_path / 'runs'}", "--config.measure=50%"]
    command.main(["launch.py", *words, "--sweep", "--tracker=wandb"], "")
    lines, runs = sent(), {}
    for what, *values in lines:
        if what == "init":
            written = runs[values[0]["name"]] = []
            config = values[0]["config"]
            assert f"seed={config['seed']}" == values[0]["name"]
            assert (config["sparsity.blocks"], config["steps"]) == ("ste(2,4)", 4)
        elif what == "log":
            written.append(values[0])
        elif what == "finish":
            assert values[1]["outcome"] == "finished"
            assert values[1]["summary/test accuracy"].endswith("%")
    assert list(runs) == ["seed=0", "seed=1"]
    for name, written in runs.items():
        there = files.lines(tmp_path / "runs" / name / "metrics.jsonl")
        assert [len(row) for row in written] == [len(_flat(line)) + 1 for line in there]
        for row, line in zip(written, there, strict=True):
            assert row == {"step": line["step"], **_flat(line)}


def _flat(line):
    found = {}
    for name, value in line.items():
        if isinstance(value, dict):
            found |= {f"{line['kind']}/{name}/{layer}": v for layer, v in value.items()}
        elif name not in ("step", "kind", "seconds"):
            found[f"{line['kind']}/{name}"] = value
    return found


@pytest.mark.parametrize(
    ("how", "what"),
    [("FAILS", what) for what in ("init", "metric", "log", "finish")] + [("HANGS", "init"), ("HANGS", "log")],
)
def test_a_tracker_that_fails_or_hangs_is_told_of_once_left_alone_and_not_waited_for(
    how, what, tmp_path, sent, monkeypatch
):
    monkeypatch.setenv(how, what)
    monkeypatch.setattr(trackers, "PATIENCE", 30.0 if how == "FAILS" else 0.2)
    told, began = [], time.monotonic()
    run = made(tmp_path / "mine", tell=told.append)
    for step in range(100):
        run.write("train", step + 1, loss=1.0)
    run.close("finished")
    assert time.monotonic() - began < 5
    why = (
        "SystemExit: 3" if what == "finish" else "ConnectionError: no route" if how == "FAILS" else "not done after 0 s"
    )
    assert told[-1] == f"wandb: {why}. Nothing more is sent to it; metrics.jsonl has everything."
    assert len(told) == 1 + (what in ("log", "finish"))
    assert [line["step"] for line in files.lines(run.metrics)] == [*range(1, 101)]
    assert json.loads((tmp_path / "mine" / "run.json").read_text())["outcome"] == "finished"


@pytest.mark.parametrize("name", trackers.TRACKERS)
def test_a_package_that_is_missing_is_told_before_anything_begins(name, tmp_path, monkeypatch):
    words = ["launch.py", "--config=configs/vit_24.py:smoke", f"--workdir={tmp_path / 'run'}", f"--tracker={name}"]
    said = f"--tracker={name}: the package {name} is missing: pip install {name}."
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, name, None)
        with pytest.raises(Mistake, match=said):
            command.main(words, "")
    if find_spec(name) is None:
        (tmp_path / "here" / name).mkdir(parents=True)  # where such packages leave files of their own
        monkeypatch.syspath_prepend(tmp_path / "here")
        with pytest.raises(Mistake, match=said):
            command.main(words, "")
    assert not (tmp_path / "run").exists()


# ---- the real ones ----

TWICE = """
import pathlib, sys
from ml_collections import ConfigDict
from experiments.training import digest, record
from nmjax.analysis.plan import Plan

place, tracker = pathlib.Path(sys.argv[1]), sys.argv[2]
place.mkdir()
for begin, end, outcome in ((0, 3, "interrupted"), (3, 5, "finished")):
    config = digest.identity(ConfigDict({"seed": 3, "data": {"crop": 1}, "mesh": begin}))  # which may change
    run = record.Record(place, config, {"name": "x"}, Plan((), 0, (), 0), tracker=tracker)
    run.begin(begin)
    for step in range(begin, end):
        run.write("train", step + 1, loss=step / 4)
        run.write("sparsity", step, density={"blocks/0-1/up": 0.5, "head": step / 2})
    if outcome == "finished":
        run.keep([("best loss", "0.0000"), ("MFU (median)", "1 %")], {"figures": {}}, {})
    run.close(outcome)
"""

BACK = {
    "wandb": """
import json, pathlib, struct, sys
from wandb.proto.wandb_internal_pb2 import Record

def records(data):  # blocks of 32 kB, of pieces with a header of 7 bytes, after a header of 7 bytes
    at, whole = 7, b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        size, kind = struct.unpack("<xxxxHB", data[at : at + 7])
        whole, at = whole + data[at + 7 : at + 7 + size], at + 7 + size
        if kind in (1, 4):  # all of it, or its last piece
            yield Record.FromString(whole)
            whole = b""

rows, end, config, ids = [], {}, {}, set()
for file in sorted(pathlib.Path(sys.argv[1]).glob("wandb/*-run-*/*.wandb")):
    for found in records(file.read_bytes()):
        if found.HasField("run"):
            ids.add(found.run.run_id)
            config |= {c.key: json.loads(c.value_json) for c in found.run.config.update if c.key}
        if found.HasField("history"):
            row = {"".join(i.nested_key) or i.key: json.loads(i.value_json) for i in found.history.item}
            rows += [[k, row["step"], v] for k, v in row.items() if k != "step" and not k.startswith("_")]
        if found.HasField("summary"):
            end |= {i.key: json.loads(i.value_json) for i in found.summary.update}
print(json.dumps([len(ids), rows, end, config]))
""",
    "trackio": """
import json
from trackio.sqlite_storage import SQLiteStorage as Storage

(name,) = Storage.get_runs("nmjax")
rows, end = [], {}
for row in Storage.get_logs("nmjax", name):
    step = row.pop("step")
    row.pop("timestamp")
    if "outcome" in row:
        end = row
    else:
        rows += [[k, step, v] for k, v in row.items()]
print(json.dumps([1, rows, end, Storage.get_run_config("nmjax", name)]))
""",
    "mlflow": """
import json, mlflow

client = mlflow.MlflowClient()
runs = client.search_runs([client.get_experiment_by_name("nmjax").experiment_id])
data, rows = runs[0].data, []
for key in data.metrics:
    rows += [[key, m.step, m.value] for m in client.get_metric_history(runs[0].info.run_id, key)]
assert runs[0].info.status == "FINISHED"
print(json.dumps([len(runs), rows, data.tags, {k: int(v) for k, v in data.params.items()}]))
""",
}


@pytest.mark.processes
@pytest.mark.parametrize("name", trackers.TRACKERS)
def test_the_real_package_keeps_what_it_is_sent(name, tmp_path):
    if find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    kept = {"TRACKIO_DIR": str(tmp_path / "trackio"), "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path / 'mlflow.db'}"}
    kept |= {"WANDB_MODE": "offline", "JAX_PLATFORMS": "cpu"}

    def python(*words):
        return subprocess.run(
            [sys.executable, "-c", *words], env=os.environ | kept, capture_output=True, text=True, cwd=config_files.ROOT
        )

    done = python(TWICE, str(tmp_path / "mine"), name)
    assert done.returncode == 0, done.stderr
    assert "Nothing more is sent" not in done.stdout
    back = python(BACK[name], str(tmp_path / "mine"))
    assert back.returncode == 0, back.stderr
    count, rows, end, config = json.loads(back.stdout.splitlines()[-1])
    assert count == 1  # one run, though it was gone on with
    want = [["train/loss", step + 1, step / 4] for step in range(5)]
    want += [["sparsity/density/head", step, step / 2] for step in range(5)]
    want += [["sparsity/density/blocks/0-1/up", step, 0.5] for step in range(5)]
    assert sorted(rows) == sorted(want)
    assert (end["outcome"], end["summary/best loss"]) == ("finished", "0.0000")
    assert (config["seed"], config["data.crop"]) == (3, 1)
