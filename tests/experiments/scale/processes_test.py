"""Runs of several processes: real ones, on this machine, over gloo."""

import io
import json
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from experiments import command, config_files
from experiments.errors import Mistake
from experiments.scale import address, processes
from experiments.scale.address import Address
from experiments.training import checkpoints
from tests.experiments.runs import CONFIG, arrays, as_people_run_it as as_people_run_it, free, once, start, timeless

CUT = "--config.mesh.fsdp=4"  # over all devices of both


def together(workdir, cache, *words, own=((), ()), config=CONFIG) -> list[subprocess.Popen]:
    """Start a process of two devices for each of ``own`` words."""
    port = free()
    told = [f"--distributed=127.0.0.1:{port},{len(own)},{index}" for index in range(len(own))]
    return [
        start(workdir, cache, *words, *mine, how, devices=2, config=config) for mine, how in zip(own, told, strict=True)
    ]


def said(found: list[subprocess.Popen], timeout=300) -> list[str]:
    try:
        return [process.communicate(timeout=timeout)[0] for process in found]
    finally:
        for process in found:
            process.kill()


def until_a_step(process, step=1) -> None:
    for line in process.stdout:
        if (found := re.match(r"step (\d+)/", line)) and int(found[1]) >= step:
            return
    raise AssertionError("it ended before its first steps")


@pytest.fixture(scope="session")
def alone(tmp_path_factory):
    """The same on four devices of one process, which sums over them in the same order: by gloo too."""

    def make(folder):
        process = start(folder / "alone", folder / "cache", f"--distributed=127.0.0.1:{free()},1,0", CUT, devices=4)
        (text,) = said([process])
        assert process.returncode == 0, text

    folder = once(tmp_path_factory, "one_process", make)
    return folder / "alone", folder / "cache"


@pytest.mark.processes
@pytest.mark.parametrize("killed", [0, pytest.param(1, marks=pytest.mark.rare)])
def test_one_that_dies_ends_the_other(alone, killed, tmp_path):
    both = together(tmp_path / "run", alone[1], CUT)
    until_a_step(both[0], 9)  # when the checkpoint of step 4 is whole
    both[killed].kill()
    texts = said(both, timeout=30)
    left = 1 - killed
    assert both[left].returncode == 1
    gone = f"launch.py: process {killed} of 2 is gone, and gave no reason. Look at its own output"
    assert f"{gone}. process {left} of 2" in texts[left]
    outcome = json.loads((tmp_path / "run" / "run.json").read_text())["outcome"]
    assert outcome == "running" if killed == 0 else outcome.startswith("failed: process 1 of 2 is gone")
    if killed == 0:
        goes_on_as_one(tmp_path / "run", *alone)


def goes_on_as_one(run, alone, cache):
    """The next start ends the run, which two processes began, as one process that nothing disturbed: bit for bit."""
    both = together(run, cache, CUT)
    texts = said(both)
    assert [process.returncode for process in both] == [0, 0], texts
    assert timeless(run) == timeless(alone)
    assert arrays(run) == arrays(alone)
    assert "4 x cpu as fsdp 4, in 2 processes" in texts[0]
    assert re.search(r"continuing from step \d+ of 24", texts[0])
    others = re.compile(r"\[Gloo\]|peer ranks|waits for the others")  # ranks may write into each other's lines
    assert not [line for line in texts[1].splitlines() if line.strip() and not others.search(line)]  # one speaks
    assert (run / "report.html").exists()
    both = together(run, cache, CUT, "--mode=eval")
    texts = said(both)
    assert [process.returncode for process in both] == [0, 0], texts
    assert re.search(r"^last, step 24, test: .*\nbest, step \d+, validation: ", texts[0], re.MULTILINE)


@pytest.mark.processes
def test_whichever_is_told_to_stop_all_stop_after_the_same_step(alone, tmp_path):
    """Each has written its part of the parameters, and one process goes on with all of them."""
    words = [CUT, "--config.steps=160", "--config.evaluate=80"]
    both = together(tmp_path / "run", alone[1], *words)
    until_a_step(both[0])
    both[1].send_signal(signal.SIGINT)  # which it hands on as SIGTERM
    texts = said(both, timeout=60)
    assert [process.returncode for process in both] == [143, 130], texts
    step = re.search(r"interrupted by SIGTERM after step ([\d,]+)\. The checkpoint of step \1 is kept", texts[0])[1]
    assert checkpoints.steps(tmp_path / "run")[-1] == int(step.replace(",", ""))
    assert json.loads((tmp_path / "run" / "run.json").read_text())["outcome"] == "interrupted"
    run = start(tmp_path / "run", alone[1], *words[1:], "--config.mesh.fsdp=2", devices=2)
    (text,) = said([run])
    assert run.returncode == 0, text
    assert f"continuing from step {step} of 160" in text


@pytest.mark.processes
def test_what_is_wrong_in_one_process_is_told_by_it_and_ends_all(tmp_path, alone):
    both = together(tmp_path / "run", alone[1], own=((), ("--config.batch=32",)))
    why = r"launch\.py: process 1 of 2 on \S+: batch is 32 here and 16 in process 0\. All processes of a run"
    refused(both, why)


@pytest.mark.processes
def test_processes_of_another_count_do_not_train(tmp_path):
    """Process 0 would train alone, and process 1 wait for a third."""
    port = free()
    both = [
        start(tmp_path / "run", tmp_path / "cache", f"--distributed=127.0.0.1:{port},{count},{index}")
        for index, count in enumerate((2, 3))
    ]
    texts = said(both, timeout=120)
    assert [process.returncode for process in both] == [2, 2], texts
    for index, (text, own, other) in enumerate(zip(texts, (2, 3), (3, 2), strict=True)):
        assert f"process {index} has N={own}, and process {1 - index} has N={other}" in text
        assert "Traceback" not in text


def test_process_0_listens_where_its_host_leads_to(monkeypatch):
    place = lambda host: Address(f"{host}:8476", 2, 0).place()
    assert place("127.0.0.1") == "127.0.0.1"
    assert place("localhost") == "127.0.0.1"
    monkeypatch.setattr(address.socket, "gethostbyname", {"node1": "127.0.1.1", "node2": "127.0.0.1"}.__getitem__)
    assert place("node1") == ""  # others know it by another address
    monkeypatch.setattr(address.socket, "gethostbyname", lambda host: "192.0.2.1")
    assert place("gateway") == ""  # of another machine
    monkeypatch.setattr(address.socket, "create_server", lambda *_: io.BytesIO())  # as if it were of this machine
    assert place("node3") == place("192.0.2.1") == "192.0.2.1"


def test_a_port_at_which_another_program_listens_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as server:
        where = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(Mistake, match=f"process 0 cannot listen at {where}, where another process may listen"):
            Address(where, 2, 0).refuse_taken_port()
        Address(where, 2, 1).refuse_taken_port()  # it does not listen


@pytest.mark.rare
@pytest.mark.processes
def test_a_directory_that_others_do_not_see_is_refused(tmp_path, alone):
    """It has the same name on another machine; here, in another folder."""
    both, port = [], free()
    for index in range(2):
        (place := tmp_path / f"machine{index}").mkdir()
        (place / "configs").symlink_to(config_files.ROOT / "configs")
        how = f"--distributed=127.0.0.1:{port},2,{index}"
        both.append(start(Path("run"), alone[1], how, devices=2, cwd=place))
    refused(
        both, r"launch\.py: process 1 of 2 on \S+: .*machine1/run is not the directory that process 0 has by this name"
    )


def refused(both, why: str) -> None:
    texts = said(both, timeout=120)
    assert [process.returncode for process in both] == [2, 2], texts
    assert re.search(why, texts[1])
    assert re.search(rf"{why}.* process 0 of 2 on \S+ ends with it", texts[0])


@pytest.mark.processes
def test_of_files_every_process_reads_its_part(alone, tmp_path):
    """Each epoch has three batches of four; the five test files make two."""
    draw = np.random.default_rng(0)
    for part, count in (("train", 12), ("val", 5)):
        for i in range(count):
            (into := tmp_path / part / "ab"[i % 2]).mkdir(parents=True, exist_ok=True)
            Image.fromarray(draw.integers(0, 256, (40, 48, 3), np.uint8)).save(into / f"{i}.png")
    words = [f"--config.data.dir={tmp_path}", "--config.data.size=16", "--config.steps=4", "--config.batch=4"]
    words += ["--config.epochs=0", "--config.model.size=tiny", "--config.dtype=float32", "--config.measure=0"]
    config = ["--config=configs/resnet_24.py:folder"]
    both = together(tmp_path / "both", alone[1], *words, config=config)
    command.main(["launch.py", *config, *words, f"--workdir={tmp_path / 'one'}"], "")
    texts = said(both)
    assert [process.returncode for process in both] == [0, 0], texts
    for ours, theirs in zip(timeless(tmp_path / "both"), timeless(tmp_path / "one"), strict=True):
        assert ours.pop("kind") == theirs.pop("kind")
        assert ours == pytest.approx(theirs, rel=1e-3)
    with np.load(tmp_path / "both" / "pictures.npz") as ours, np.load(tmp_path / "one" / "pictures.npz") as theirs:
        np.testing.assert_array_equal(ours["confusion"], theirs["confusion"])
        np.testing.assert_array_equal(ours["confusion"].sum(1), [3, 2])  # images 0, 2 and 4 are a, 1 and 3 are b
        np.testing.assert_array_equal(ours["hardest_images"], theirs["hardest_images"])
        assert list(ours["classes"]) == ["a", "b"]


@pytest.mark.processes
def test_slurm_is_found_by_itself(alone, tmp_path):
    port = free()
    env = {"SLURM_JOB_ID": str(port), "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": "2"}
    env |= {"SLURM_STEP_NUM_TASKS": "2"}
    both = [
        start(
            tmp_path / "run", alone[1], "--distributed=auto", "--mode=plan", devices=2, SLURM_PROCID=str(index),
            SLURM_LOCALID=str(index), **env,
        )
        for index in range(2)
    ]  # fmt: skip
    texts = said(both)
    assert [process.returncode for process in both] == [0, 0], texts
    assert "in 2 processes" in texts[0]


@pytest.mark.parametrize("who", ["SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"])
def test_several_of_one_command_that_do_not_know_of_each_other_are_refused(who, monkeypatch):
    monkeypatch.setenv(who, "2")
    with pytest.raises(Mistake, match="has started several processes.* --distributed=auto"):
        command.main(["launch.py", "--config=configs/vit_24.py:smoke", "--mode=plan"], "")
    with processes.joined("off"):  # each a run of its own
        assert processes.count() == 1


def test_what_is_left_to_do_at_another_ones_end_stays_known_until_its_cause_is(monkeypatch):
    """A collective fails before the line tells who has died."""
    known, left = [], lambda why: None
    monkeypatch.setattr(processes, "_count", 2)
    monkeypatch.setattr(processes.time, "sleep", lambda _: known.extend(processes._at_end))
    with pytest.raises(RuntimeError), processes.at_end(left):
        raise RuntimeError("gloo: connection reset by peer")
    assert known == [left]
    assert not processes._at_end


@pytest.mark.rare
@pytest.mark.processes
def test_one_that_nobody_meets_says_so_and_gives_up():
    words = ["launch.py", *CONFIG, f"--distributed=127.0.0.1:{free()},2,1"]
    text = "from experiments import command; from experiments.scale import processes; processes.MEETING_TIMEOUT = 12; "
    text += f"command.main({words}, '')"
    done = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, cwd=config_files.ROOT, timeout=100
    )
    assert done.returncode == 1
    (waits, ended) = [line for line in done.stderr.splitlines() if "process 1 of 2" in line]
    assert re.fullmatch(r"process 1 of 2 at 127.0.0.1:\d+ waits for the others, up to 12 s", waits)
    assert re.fullmatch(
        r"launch.py: process 1 of 2 at 127.0.0.1:\d+ has waited 12 s for the others. Start all .* and N", ended
    )
