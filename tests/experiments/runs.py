"""Runs for tests: programs in this process, and launch.py in processes of its own."""

import contextlib
import fcntl
import functools
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from experiments import command, config_files, files
from experiments.training import tasks
from experiments.training.checkpoints import steps as steps_of
from experiments.training.program import Program

CONFIG = ["--config=configs/vit_24.py:smoke", "--config.model.depth=1", "--config.steps=24", "--config.evaluate=4"]
CONFIG += ["--config.sparsity.blocks=y_w=ste(hold(mse(2,4),every=3)); dw_g=mvue_approx(2,4)"]  # holds, and draws
CONFIG += ["--config.measure=0", "--config.ema=0.9", "--config.optimizer=sgd"]


@pytest.fixture(autouse=True)
def as_people_run_it(monkeypatch):
    monkeypatch.chdir(config_files.ROOT)
    with configured():
        yield


@contextlib.contextmanager
def configured():
    """Set the options of JAX that people have."""
    people = {"jax_numpy_dtype_promotion": "standard", "jax_numpy_rank_promotion": "allow"}
    people |= {"jax_enable_compilation_cache": True}
    before = {name: getattr(jax.config, name) for name in people}
    configure(people)
    yield
    configure(before)


def configure(values):
    """Set options of JAX for all threads, because some of them compile."""
    for name, value in values.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()  # the cache reads its options once


# ---- in this process ----


def program(config_file: str, *changes: str, make=Program):
    config = command.read(["launch.py", f"--config={config_file}", *changes]).config
    return make(config, tasks.task(config, plan=True))


@functools.cache
def shared(config_file: str, *changes: str) -> Program:
    """Return the one program of all tests that only call it. A test that patches or counts makes its own."""
    return program(config_file, *changes)


def steps(program: Program, count: int):
    """Return the state after so many steps, and the figures of each step."""
    state, shown = program.init(jnp.uint32(program.config.seed)), []
    for _, arrays in zip(range(count), program.task.feed(0, 0, program.mesh), strict=False):
        state, figures = program.train(state, arrays)
        shown.append({name: float(value) for name, value in figures.items()})
    return state, shown


# ---- in a process of its own ----


def free() -> int:
    """Return a port that nobody listens at."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def xla_flags(devices: int) -> str:
    """Return the flags of this process, with another number of devices."""
    return re.sub(r"(?<=device_count=)\d+", str(devices), os.environ["XLA_FLAGS"])


def start(
    workdir: Path, cache: Path, *words: str, devices: int = 1, config=CONFIG, cwd=config_files.ROOT, **env: str
) -> subprocess.Popen:
    flags = {"JAX_COMPILATION_CACHE_DIR": str(cache), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    flags |= {"XLA_FLAGS": xla_flags(devices), "JAX_PLATFORMS": "cpu"}
    launch = [sys.executable, config_files.ROOT / "launch.py", *config, f"--workdir={workdir}", *words]
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(launch, env=os.environ | flags | env, cwd=cwd, **output)


def once(factory: pytest.TempPathFactory, name: str, make) -> Path:
    """Return a folder that ``make(folder)`` fills once for all test workers. Tests only read it."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        make(folder := factory.mktemp(name))
        return folder
    folder = factory.getbasetemp().parent / name
    with open(f"{folder}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "made").exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            make(folder)
            (folder / "made").touch()
    return folder


def timeless(workdir: Path) -> list[dict]:
    """Return the lines of metrics.jsonl without what another process may measure differently: time and memory."""
    clocks = ("seconds", "per_second", "flops_per_second", "process_memory")
    return [{k: v for k, v in line.items() if k not in clocks} for line in files.lines(workdir / "metrics.jsonl")]


def arrays(workdir: Path) -> dict[str, bytes]:
    """Return the bytes of all arrays of the last state, on whatever devices it was."""
    import orbax.checkpoint as ocp

    path = (workdir / "checkpoints" / str(steps_of(workdir)[-1]) / "state").absolute()
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        plain = jax.tree.map(
            lambda _: ocp.RestoreArgs(restore_type=np.ndarray), reader.metadata(path).item_metadata.tree
        )
        tree = reader.restore(path, args=ocp.args.PyTreeRestore(restore_args=plain))
    flat = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path): np.asarray(v).tobytes() for path, v in flat}
