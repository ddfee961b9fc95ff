"""Rows in processes of their own, so that a crash costs one row."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from experiments.bench import turns
from nmjax.kernels import measured

ERRORS = 6000  # characters of what a failed row wrote to its standard error


class Processes:
    """The processes of rows that run now. Several threads may start some."""

    def __init__(self) -> None:
        self._groups: set[int] = set()
        self._over = False
        self._lock = threading.Lock()

    def run(self, name: str, seconds: float, out: Path) -> dict[str, Any]:
        """Run a row, and return what it found. A process that dies or hangs is a result, too.

        Args:
          name: The row.
          seconds: After this time the process is ended.
          out: The folder.
        """
        start = time.monotonic()
        command = [sys.executable, "-m", "experiments.bench.silicon", name, str(os.getpid())]
        environment = os.environ | {"XDG_CACHE_HOME": str(out.absolute())}  # of tables of tiles, and of the check
        environment |= {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", turns.FOLDER: str(out.absolute() / "turns")}
        environment.setdefault("JAX_COMPILATION_CACHE_DIR", str(measured.own_tables().parent / "programs"))
        environment["CUDA_VISIBLE_DEVICES"] = (os.environ.get("CUDA_VISIBLE_DEVICES") or "0").split(",")[0]  # one GPU
        environment.setdefault("NPROC", "16")  # threads of XLA, which the interpreter blocks
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL}
        with subprocess.Popen(command, text=True, env=environment, start_new_session=True, **pipes) as run:
            self._add(run.pid)
            try:
                said, errors = run.communicate(timeout=seconds)
            except subprocess.TimeoutExpired:
                _end(run.pid)
                return {"result": f"stopped after {seconds:.0f} s", "seconds": seconds, "errors": _last(run)}
            except BaseException:
                _end(run.pid)
                raise
            finally:
                self._remove(run.pid)
        took = round(time.monotonic() - start, 1)
        last = next((line for line in reversed(said.splitlines()) if line.startswith("{")), None)
        if run.returncode or last is None:
            how = f"signal {-run.returncode}" if run.returncode < 0 else f"exit code {run.returncode}"
            message = (errors.strip().splitlines() or [""])[-1][:300]
            return {"result": f"failed with {how}: {message}", "seconds": took, "errors": errors[-ERRORS:]}
        return json.loads(last) | {"seconds": took}

    def end(self) -> None:
        """End all of them, and those that threads are about to start."""
        with self._lock:
            self._over = True
            for group in self._groups:
                _end(group)

    def _add(self, group: int) -> None:
        with self._lock:
            self._groups.add(group)
            if self._over:
                _end(group)

    def _remove(self, group: int) -> None:
        with self._lock:
            self._groups.discard(group)


def _end(group: int) -> None:
    """End a process, and those that it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def _last(run: subprocess.Popen[str]) -> str:
    """Return the end of what an ended process wrote to its standard error."""
    return run.communicate()[1][-ERRORS:]
