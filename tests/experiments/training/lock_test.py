"""The directory of a run: one process writes there at a time, and a run that says "finished" has everything."""

import contextlib
import errno
import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, Lock

import pytest

from experiments import command, config_files, files, report
from experiments.errors import Mistake, Taken
from experiments.training import checkpoints, lock, modes, record
from tests.experiments.runs import as_people_run_it as as_people_run_it, start, timeless

COMMAND = ["launch.py", "--config=configs/vit_24.py:smoke", "--config.model.depth=1", "--config.measure=0"]


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr(lock, "PATIENCE", 0.0)


# ---- a directory of its own ----


def test_however_many_ask_at_once_each_gets_a_directory_of_its_own(tmp_path):
    together = Barrier(8)

    def create(_):
        together.wait()
        return lock.create(tmp_path / "runs" / "vit-12")

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(create, range(8)))
    assert sorted(path.name for path in found) == ["vit-12", *(f"vit-12-{number}" for number in range(2, 9))]
    assert all(path.is_dir() for path in found)


def test_two_runs_of_the_same_second_have_two_directories(tmp_path, monkeypatch):
    places = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command.time, "strftime", lambda _: "20260131-120000")
    monkeypatch.setattr(modes, "carry_out", lambda mode, runs, *_, **__: places.append(str(runs[0].workdir)))
    for words in ([], [], ["--mode=plan"], ["--config.seed=1"]):
        command.main([*COMMAND, *words], "")
    name = "runs/vit_24_smoke-20260131-120000"
    assert [*places[:2], places[3]] == [name, f"{name}-2", f"{name}-3"]
    assert len(list((tmp_path / "runs").iterdir())) == 3  # a plan takes none


def test_a_default_directory_that_cannot_be_made_is_a_mistake(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").write_text("")
    with pytest.raises(Mistake, match=r"--workdir=runs/vit_24_smoke-\d+-\d+ cannot be written: File exists"):
        command.main(COMMAND, "")


# ---- the lock ----


def test_a_second_holder_is_refused_by_process_and_host_until_the_first_ends(tmp_path):
    with lock.held(tmp_path):
        with pytest.raises(Taken) as refused, lock.held(tmp_path):
            pass
        said = str(refused.value)
        assert f"--workdir={tmp_path} is being written by process {os.getpid()} on {socket.gethostname()}, " in said
        assert "\n" not in said
    with pytest.raises(KeyError), lock.held(tmp_path):
        raise KeyError
    with lock.held(tmp_path):
        pass


def test_however_many_wait_one_holds_it(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "PATIENCE", 60.0)
    together, alone = Barrier(6), Lock()

    def contend(_):
        together.wait()
        for _ in range(100):
            with lock.held(tmp_path):
                assert alone.acquire(blocking=False)
                alone.release()

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(contend, range(6)))


def test_a_file_that_its_last_holder_has_removed_is_no_lock(tmp_path, monkeypatch):
    """It was opened before it was removed; a third process would make another one."""
    locked = lock._locked

    def late(file):
        monkeypatch.setattr(lock, "_locked", locked)
        (tmp_path / lock.NAME).unlink()
        return locked(file)

    monkeypatch.setattr(lock, "_locked", late)
    with lock.held(tmp_path), pytest.raises(Taken), lock.held(tmp_path):
        pass


HOLDS = "import sys, time\nfrom pathlib import Path\nfrom experiments.training import lock\n"
HOLDS += "with lock.held(Path(sys.argv[1])):\n    print('held', flush=True)\n    time.sleep(60)"


@pytest.mark.processes
def test_a_lock_dies_with_its_process(tmp_path):
    child = subprocess.Popen([sys.executable, "-c", HOLDS, tmp_path], stdout=subprocess.PIPE, cwd=config_files.ROOT)
    try:
        assert child.stdout.readline() == b"held\n"
        with (
            pytest.raises(Taken, match=f"process {child.pid} on {socket.gethostname()}, since 20"),
            lock.held(tmp_path),
        ):
            pass
    finally:
        child.kill()
        child.communicate()
    assert (tmp_path / lock.NAME).exists()  # it was killed
    with lock.held(tmp_path):
        assert (tmp_path / lock.NAME).read_text().startswith(f"process {os.getpid()} on ")
    assert not (tmp_path / lock.NAME).exists()


@pytest.mark.parametrize("number", [errno.ENOTSUP, errno.ENOLCK, errno.ENOSYS, errno.EIO])
def test_where_there_are_no_locks_a_run_goes_on_without_and_on_a_broken_disk_it_does_not(number, tmp_path, monkeypatch):
    def none(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(lock.fcntl, "flock", none)
    said = pytest.raises(Mistake, match="cannot be written: Input/output error")
    with said if number == errno.EIO else contextlib.nullcontext(), lock.held(tmp_path), lock.held(tmp_path):
        pass


def test_a_directory_that_is_written_is_refused_before_anything_is_done_and_read_all_the_same(tmp_path, capsys):
    words = [*COMMAND, f"--workdir={tmp_path}"]
    with lock.held(tmp_path):
        with pytest.raises(Taken, match="is being written by process"):
            command.main(words, "")
        assert [path.name for path in tmp_path.iterdir()] == [lock.NAME]
        assert not capsys.readouterr().out
        command.main([*words, "--mode=plan"], "")
        with pytest.raises(Mistake, match="holds no checkpoints"):
            command.main([*words, "--mode=eval"], "")


@pytest.mark.processes
def test_while_a_run_writes_another_is_refused(tmp_path):
    cache, words = os.environ.get("JAX_COMPILATION_CACHE_DIR", tmp_path / "cache"), ["--config.steps=4000"]
    first = start(tmp_path / "run", cache, *words)
    try:
        assert any(line.startswith("step") for line in first.stdout)
        second = start(tmp_path / "run", cache, *words)
        said = second.communicate(timeout=120)[0]
        assert second.returncode == 2
        assert f"is being written by process {first.pid} on {socket.gethostname()}, since " in said
        assert len(said.splitlines()) == 1
        first.send_signal(signal.SIGINT)
        said = first.communicate(timeout=120)[0]
        assert "interrupted by SIGINT after step" in said
    finally:
        first.kill()


# ---- finished ----


@pytest.fixture(scope="module")
def cut(tmp_path_factory):
    """A run that was killed when it was about to write its report."""
    workdir = tmp_path_factory.mktemp("cut") / "run"
    words = [*COMMAND, f"--workdir={workdir}"]
    text = "import os, signal\nfrom experiments import command, report\n"
    text += "ended = lambda about: about is not None and about['outcome'] == 'finished'\n"
    text += "write = report.write\n"
    text += "kill = lambda: os.kill(os.getpid(), signal.SIGKILL)\n"
    text += "report.write = lambda path, about=None: kill() if ended(about) else write(path, about)\n"
    text += f"command.main({words}, '')"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, cwd=config_files.ROOT)
    assert done.returncode == -signal.SIGKILL, done.stderr
    return workdir


@pytest.mark.processes
def test_killed_before_its_report_a_run_is_finished_by_the_next_start(cut, tmp_path, capsys):
    workdir = shutil.copytree(cut, tmp_path / "run")
    assert "finished</span>" not in (workdir / "report.html").read_text()
    assert json.loads((workdir / "run.json").read_text())["outcome"] == "running"
    before = timeless(workdir)
    command.main([*COMMAND, f"--workdir={workdir}"], "")
    assert "continuing from step 4 of 4" in capsys.readouterr().out
    assert json.loads((workdir / "run.json").read_text())["outcome"] == "finished"
    assert timeless(workdir) == before
    whole(workdir)


def whole(workdir):
    """Check that a report is there, and that it is the one of the files as they are at the end."""
    page = (workdir / "report.html").read_text()
    assert "</span> finished</span>" in page
    assert page == report.render(report.read(workdir))


@pytest.mark.slow
def test_finished_is_written_last_and_a_report_that_is_gone_is_made(tmp_path, monkeypatch, capsys):
    seen, replace = [], files.replace

    def watched(path, text):
        if path.name == "run.json" and json.loads(text)["outcome"] == "finished":
            seen.append(sorted(p.name for p in tmp_path.iterdir()))
            assert checkpoints.steps(tmp_path)[-1] == 4
            assert [line["step"] for line in files.lines(tmp_path / "metrics.jsonl")][-1] == 4
        replace(path, text)

    monkeypatch.setattr(record, "replace", watched)
    command.main([*COMMAND, f"--workdir={tmp_path}"], "")
    names = ["checkpoints", "config.json", "metrics.jsonl", "pictures.npz", "plan.html", "plan.txt", "report.html"]
    assert seen == [[*names, "run.json", lock.NAME, "tensorboard"]]
    assert sorted(p.name for p in tmp_path.iterdir()) == [*names, "run.json", "tensorboard"]
    whole(tmp_path)
    page = (tmp_path / "report.html").read_bytes()
    (tmp_path / "report.html").unlink()
    capsys.readouterr()
    command.main([*COMMAND, f"--workdir={tmp_path}"], "")
    assert capsys.readouterr().out.startswith("finished already: ")
    assert (tmp_path / "report.html").read_bytes() == page


def test_two_processes_may_look_at_a_lock_that_nobody_holds(tmp_path):
    (tmp_path / lock.NAME).write_text("process 1 on x, since 2026")  # of a process that was killed
    with (tmp_path / lock.NAME).open("rb+") as other:
        fcntl.flock(other, fcntl.LOCK_SH)
        assert not lock.is_taken(tmp_path)
    assert not lock.is_taken(tmp_path / "absent")
    with lock.held(tmp_path):
        assert lock.is_taken(tmp_path)
