"""Runs whose disk fills in the middle of a file."""

import contextlib
import errno
import gc
import json
import os
import re
import resource
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from experiments import command, config_files, files
from experiments.errors import Failed, Mistake
from experiments.training import checkpoints as checkpoints_module, record
from experiments.training.checkpoints import Checkpoints
from tests.experiments.runs import as_people_run_it as as_people_run_it
from tests.experiments.training.record_test import begun
from tests.experiments.training.resume_test import shapes, small

CONFIG = ["--config=configs/vit_24.py:smoke", "--config.steps=6", "--config.evaluate=2", "--config.measure=0"]


@contextlib.contextmanager
def largest(size: int):
    """Let no file grow beyond a number of bytes inside the context. Writing fails as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def outcome(workdir) -> str:
    return json.loads((workdir / "run.json").read_text())["outcome"]


@pytest.mark.processes
@pytest.mark.slow
def test_on_a_full_disk_a_run_ends_in_a_sentence_and_the_same_command_completes_it(tmp_path):
    """No file may have more than 20 kB, so checkpoints and reports cannot be written; then there is room."""
    words = ["launch.py", *CONFIG, f"--workdir={tmp_path}/run"]
    text = f"import resource, runpy, sys; sys.argv = {words}; sys.path.insert(0, '')\n"
    text += (
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000)); runpy.run_path('launch.py', run_name='__main__')"
    )
    process = subprocess.run(
        [sys.executable, "-c", text], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        cwd=config_files.ROOT, env={**os.environ, "JAX_PLATFORMS": "cpu", "JAX_COMPILATION_CACHE_DIR": ""}, timeout=500,
    )  # fmt: skip
    assert process.returncode == 1, process.stdout
    assert not re.search("Traceback|Exception", process.stdout)
    (sentence,) = [line for line in process.stdout.splitlines() if line.startswith("launch.py: ")]
    assert process.stdout.rstrip().endswith(sentence)
    assert "There is no checkpoint to continue from" in sentence
    assert "step 6/6" in process.stdout  # the run went on
    said = "The checkpoint of step 6 could not be written: "
    assert outcome(tmp_path / "run").startswith(f"failed: {said}")
    lines = files.lines(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in lines if line["kind"] == "eval"] == [2, 4, 6]
    command.main(words, "")
    assert outcome(tmp_path / "run") == "finished"
    assert (tmp_path / "run" / "report.html").exists()


def test_a_save_that_failed_is_not_the_failure_of_the_next_one(tmp_path, capfd):
    told = []
    checkpoints = Checkpoints(tmp_path, told.append)
    states = {step: small(step) for step in (1, 2, 3, 4)}  # compiled, and kept in JAX's cache, while there is room
    checkpoints.save(1, states[1], [], best=False)
    checkpoints.wait()
    with largest(100):
        for step in (2, 3):
            checkpoints.save(step, states[step], [], best=False)
            checkpoints.wait()
    kept = f"The checkpoint of step 1 is kept in {checkpoints.directory}. Training continues."
    for text, step in zip(told, (2, 3), strict=True):
        assert text.startswith(f"The checkpoint of step {step} could not be written: ")
        assert text.endswith(kept)
    checkpoints.save(4, states[4], [], best=False)
    checkpoints.close()
    assert checkpoints.lost is None
    assert Checkpoints(tmp_path).restore(shapes()).step == 4
    assert "Traceback" not in capfd.readouterr().err


def test_python_does_not_warn_of_writes_of_orbax_that_never_began(monkeypatch):
    async def write_fragment():
        """Stands for a write that Orbax never began."""

    async def another():
        """Stands for a coroutine that is not Orbax's."""

    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        checkpoints_module._silence_threads.__wrapped__()  # called once in a process
        for coroutine in (write_fragment, another):
            coroutine()
        gc.collect()
    assert [str(one.message).rpartition(".")[2] for one in told] == ["another' was never awaited"]


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "?"), ValueError("RESOURCE_EXHAUSTED: Error writing")])
def test_a_full_disk_is_named(error, tmp_path):
    checkpoints = Checkpoints(tmp_path, lambda _: None)
    checkpoints._failed(2, error)
    assert checkpoints.lost == "The checkpoint of step 2 could not be written: no space is left on the disk."


def test_closing_after_a_save_that_failed_raises_nothing(tmp_path):
    checkpoints, state = Checkpoints(tmp_path, lambda _: None), small(1)
    with largest(100):
        checkpoints.save(1, state, [], best=False)
        checkpoints.close()
    assert checkpoints.lost is not None
    assert not list(checkpoints.directory.iterdir())  # what was written is gone: the disk is full


def test_where_no_folder_can_be_made_orbax_does_not_wait_for_one(monkeypatch, tmp_path):
    """As on a file system that became read-only. Orbax's threads would wait for five minutes."""

    def refused(*_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    told = []
    (tmp_path / "checkpoints").mkdir()
    checkpoints = Checkpoints(tmp_path, told.append)
    monkeypatch.setattr(checkpoints_module.tempfile, "TemporaryDirectory", refused)
    monkeypatch.setattr(checkpoints._manager, "save", lambda *_, **__: pytest.fail("Orbax was asked to save"))
    checkpoints.save(1, small(1), [], best=False)
    checkpoints.close()
    assert "The checkpoint of step 1 could not be written" in told[0]
    assert not list(tmp_path.rglob("*orbax*"))


def test_run_json_says_the_outcome_though_lines_are_lost(tmp_path):
    run, told = begun(tmp_path), []
    run._tell = told.append
    size = run.metrics.stat().st_size
    with largest(size):  # which run.json may not have either
        run.write("train", 1, loss=1.0)
        assert "metrics.jsonl cannot be written: File too large. New lines are kept in memory." in told[0]
        with pytest.raises(Failed, match=r"1 lines of .*metrics.jsonl could not be written: File too large"):
            run.close("finished")
    assert outcome(tmp_path) == "running"
    run.close("failed: no room")
    assert outcome(tmp_path) == "failed: no room"


@pytest.mark.parametrize(("number", "error"), [(errno.ENOSPC, Failed), (errno.EDQUOT, Failed), (errno.EROFS, Mistake)])
def test_a_full_disk_is_a_failure_and_another_error_a_mistake(number, error):
    said = f"^--workdir=runs/a cannot be written: {os.strerror(number)}.$"
    with pytest.raises(error, match=said), files.writable(Path("runs/a")):
        raise OSError(number, os.strerror(number))


def test_lines_of_results_are_appended_whole_or_not_at_all(tmp_path):
    path = tmp_path / "results.jsonl"
    files.append(path, lambda _: [{"run": 1}])
    before = path.read_bytes()
    with largest(len(before) + 5), pytest.raises(Failed, match="results.jsonl cannot be written: File too large"):
        files.append(path, lambda _: [{"run": 2}])
    assert path.read_bytes() == before
    path.write_bytes(before + b'{"run": 2')  # by a process that was killed
    files.append(path, lambda old: [{"run": len(old) + 1}])
    assert files.lines(path) == [{"run": 1}, {"run": 2}]
    assert record.read(tmp_path) is None


def test_two_processes_append_whole_lines(tmp_path):
    text = "import sys; from pathlib import Path; from experiments import files\n"
    text += "for i in range(40): files.append(Path(sys.argv[1]), lambda _: [{'i': i, 'x': 'x' * 9000}, {'i': i}])"
    path = tmp_path / "results.jsonl"
    words = [sys.executable, "-c", text, path]
    both = [subprocess.Popen(words, cwd=config_files.ROOT) for _ in range(2)]
    assert [process.wait(60) for process in both] == [0, 0]
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(found) == 160
    assert all(
        "x" in one and "x" not in two and one["i"] == two["i"] for one, two in zip(found[::2], found[1::2], strict=True)
    )
