"""The launchers: with stand-ins for ssh, srun and scontrol, and with the real run behind them."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from experiments import command, config_files
from experiments.training import checkpoints
from tests.experiments.runs import free, xla_flags

LAUNCHERS = config_files.ROOT / "launchers"


def stand_in(folder: Path, name: str, script: str) -> None:
    (folder / name).write_text(f"#!/usr/bin/env bash\n{script}\n")
    (folder / name).chmod(0o755)


HEARS = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)  # which what tests were begun with in the background ignores
os.execv(sys.argv[1], sys.argv[1:])
"""


@pytest.mark.rare
@pytest.mark.processes
def test_ssh_starts_a_process_a_machine_and_hands_on_that_they_are_to_stop(tmp_path):
    stand_in(tmp_path, "ssh", 'shift; exec bash -c "$*"')
    words = [
        "--config=configs/vit_dense.py:smoke",
        "--config.measure=0",
        "--config.steps=800",
        "--config.evaluate=400",
        f"--workdir={tmp_path / 'run'}",
    ]
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHON": sys.executable, "PORT": str(free())}
    env |= {"XLA_FLAGS": xla_flags(1), "JAX_PLATFORMS": "cpu"}
    process = subprocess.Popen(
        [sys.executable, "-c", HEARS, LAUNCHERS / "ssh.sh", "localhost", "127.0.0.1", "--", *words],
        env=os.environ | env, cwd=config_files.ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        head = []
        for line in process.stdout:
            head.append(line)
            if line.startswith("localhost: step"):
                break
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=120)[0]
    finally:
        process.kill()
    assert process.returncode == 143, "".join(head) + said
    assert "localhost: launch.py: interrupted by SIGTERM after step" in said
    assert checkpoints.steps(tmp_path / "run")


@pytest.mark.processes
def test_ssh_says_what_it_wants():
    done = subprocess.run([LAUNCHERS / "ssh.sh", "node1", "--config=x"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "ssh.sh HOST... -- --config=FILE" in done.stderr


@pytest.mark.processes
@pytest.mark.parametrize(("code", "again"), [(0, False), (1, False), (2, False), (143, True)])
def test_slurm_queues_again_what_was_told_to_stop_alone(code, again, tmp_path):
    stand_in(tmp_path, "srun", f'echo "srun $*"; exit {code}')
    stand_in(tmp_path, "scontrol", 'echo "scontrol $*"')
    env = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_ARRAY_TASK_ID": "3",
        "SLURM_JOB_ID": "77",
        "SLURM_CPUS_PER_TASK": "8",
    }
    words = ["bash", LAUNCHERS / "slurm.sbatch", "--config=configs/vit_24.py", "--sweep_index=ARRAY"]
    done = subprocess.run(words, env=os.environ | env, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    srun, *rest = done.stdout.splitlines()
    launched = "launch.py --distributed=auto --config=configs/vit_24.py --sweep_index=3"
    assert srun == f"srun --cpus-per-task=8 .venv/bin/python {launched}"
    assert rest == ["scontrol requeue 77"] * again
    asked = command.read(launched.split())
    assert (asked.distributed, asked.sweep_index) == ("auto", 3)


def test_the_jobset_agrees_with_itself():
    jobset = yaml.safe_load((LAUNCHERS / "jobset.yaml").read_text())
    (group,) = jobset["spec"]["replicatedJobs"]
    job = group["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    asked = command.read(["launch.py", *container["args"]])
    host, count, index = asked.distributed.split(",")
    name = jobset["metadata"]["name"]
    assert (
        host.partition(":")[0] == f"{name}-{group['name']}-0-0.{name}"
    )  # the first pod of the first job, in its domain
    assert int(count) == job["parallelism"] == job["completions"]
    assert index == f"$({container['env'][0]['name']})"
    assert {v["name"] for v in container["volumeMounts"]} == {v["name"] for v in job["template"]["spec"]["volumes"]}
