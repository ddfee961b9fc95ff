"""Runs of launch.py in processes of their own, watched while they go on."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from experiments import config_files
from experiments.errors import Failed

SHORT = [f"--config.{change}" for change in ("epochs=0", "steps=4", "evaluate=4", "measure=2")]
SHORT.append("--config.learning_rate.warmup=0")


def caching(folder: str) -> dict[str, str]:
    """Return the environment of a process that keeps compiled programs in a folder; an empty one without a folder."""
    kept = {"JAX_COMPILATION_CACHE_DIR": folder, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1"}
    return kept if folder else {}


def watched(workdir: Path, config_file: str, *words: str, cache: str = "") -> Iterator[tuple[int, int]]:
    """Run a config file, and yield the process and its last step until it ends.

    Args:
      workdir: The directory of the run.
      config_file: FILE or FILE:VARIANT.
      words: Changes as in a command.
      cache: A folder for compiled programs; "" for the one that launch.py takes.

    Raises:
      Failed: The run failed.
    """
    command = ["launch.py", f"--config={config_file}", f"--workdir={workdir}", *words]
    run = subprocess.Popen(
        [sys.executable, *command], stdout=subprocess.DEVNULL, cwd=config_files.ROOT, env=os.environ | caching(cache)
    )
    while run.poll() is None:
        time.sleep(0.02)
        yield run.pid, last_step(workdir / "metrics.jsonl")
    if run.returncode:
        raise Failed(f"{config_file} failed. See: python {' '.join(command)}")


def last_step(metrics: Path) -> int:
    """Return the step of the last whole line of a file of metrics; 0 if there is none."""
    if not metrics.exists():
        return 0
    with metrics.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 2**16))
        *lines, _ = file.read().split(b"\n")  # a whole line ends with a line feed
    return json.loads(lines[-1])["step"] if lines else 0


def short(config_file: str, *words: str, cache: str = "") -> tuple[float, float, float]:
    """Run a few steps.

    Returns:
      The seconds from the start of the process to the first step, and to its end; and those to the first step that
      the run itself reports, which begin after the imports.
    """
    with tempfile.TemporaryDirectory() as folder:
        start, first = time.perf_counter(), 0.0
        for _, step in watched(Path(folder, "run"), config_file, *SHORT, *words, cache=cache):
            first = first or (time.perf_counter() - start if step else 0.0)
        whole = time.perf_counter() - start
        summary = dict(json.loads(Path(folder, "run", "run.json").read_text())["summary"])
    return first, whole, float(summary["first step"].split()[1])
