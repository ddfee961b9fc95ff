"""Runs for tests: programs in this process, and launch.py in processes of its own."""

import fcntl
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

from experiments import command, files
from experiments.training import tasks
from experiments.training.checkpoints import Checkpoints
from experiments.training.program import Program

PAGE = ["--config=configs/vit_24.py:smoke", "--config.model.depth=1", "--config.steps=24", "--config.evaluate=4"]
PAGE += ["--config.sparsity.blocks=fwd_rhs=ste(hold(mse(2,4),every=3)); drhs_g=mvue_approx(2,4)"]  # holds, and draws
PAGE += ["--config.measure=0", "--config.ema=0.9", "--config.optimizer=sgd"]


@pytest.fixture(autouse=True)
def as_people_run_it(monkeypatch):
    monkeypatch.chdir(command.ROOT)
    people = {"jax_numpy_dtype_promotion": "standard", "jax_numpy_rank_promotion": "allow"}
    people |= {"jax_enable_compilation_cache": True}
    told = {name: getattr(jax.config, name) for name in people}
    for values in (people, told):  # for all threads, of which some compile
        for name, value in values.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()  # which asks once whether it is to be used
        if values is people:
            yield


# ---- in this process ----


def program(page: str, *changes: str, make=Program):
    config = command.read(["launch.py", f"--config={page}", *changes]).config
    return make(config, tasks.task(config))


def steps(made: Program, count: int):
    state, shown = made.init(jnp.uint32(made.config.seed)), []
    for _, arrays in zip(range(count), made.task.feed(0, 0, made.mesh), strict=False):
        state, found = made.train(state, arrays)
        shown.append({name: float(value) for name, value in found.items()})
    return state, shown


# ---- in a process of its own ----


def free() -> int:
    """A port that nobody listens at."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def xla_flags(devices: int) -> str:
    """Those of this process, but for the number of devices."""
    return re.sub(r"(?<=device_count=)\d+", str(devices), os.environ["XLA_FLAGS"])


def start(
    workdir: Path, cache: Path, *words: str, devices: int = 1, page=PAGE, cwd=command.ROOT, **env: str
) -> subprocess.Popen:
    flags = {"JAX_COMPILATION_CACHE_DIR": str(cache), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    flags |= {"XLA_FLAGS": xla_flags(devices), "JAX_PLATFORMS": "cpu"}
    return subprocess.Popen(
        [sys.executable, command.ROOT / "launch.py", *page, f"--workdir={workdir}", *words], env=os.environ | flags | env, text=True,
        cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def once(factory: pytest.TempPathFactory, name: str, make) -> Path:
    """A folder that ``make(folder)`` fills, once for all workers of these tests: for those that only read it."""
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
    """What metrics.jsonl holds, but for what a clock says."""
    clocks = ("seconds", "per_second", "flops_per_second")
    return [{k: v for k, v in line.items() if k not in clocks} for line in files.lines(workdir / "metrics.jsonl")]


def arrays(workdir: Path) -> dict[str, bytes]:
    """The last state, bit for bit, on whatever devices it lay."""
    import orbax.checkpoint as ocp

    path = (workdir / "checkpoints" / str(Checkpoints(workdir).steps()[-1])).absolute()
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        plain = jax.tree.map(
            lambda _: ocp.RestoreArgs(restore_type=np.ndarray), reader.metadata(path).item_metadata.tree
        )
        tree = reader.restore(path, args=ocp.args.PyTreeRestore(restore_args=plain))
    flat = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path): np.asarray(v).tobytes() for path, v in flat}
