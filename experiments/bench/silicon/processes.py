"""Rows in processes of their own, so that a crash costs one row."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from threading import Event
from typing import Any

from experiments.bench import turns
from nmjax.kernels import measured

ERRORS = 6000  # characters of what a failed row wrote to its standard error


def run(name: str, seconds: float, out: Path, over: Event) -> dict[str, Any]:
    """Run a row in a process, and return what it found. A process that dies or hangs is a result, too.

    Args:
      name: The row.
      seconds: After this time the process is ended, and those that it has started.
      out: The folder.
      over: If it is set, the process is ended at once.
    """
    start = time.monotonic()
    command = [sys.executable, "-m", "experiments.bench.silicon", name, str(os.getpid())]
    environment = os.environ | {"XDG_CACHE_HOME": str(out.absolute())}  # of tables of tiles, and of the check
    environment |= {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", turns.FOLDER: str(out.absolute() / "turns")}
    environment.setdefault("JAX_COMPILATION_CACHE_DIR", str(measured.own_tables().parent / "programs"))
    environment["CUDA_VISIBLE_DEVICES"] = (os.environ.get("CUDA_VISIBLE_DEVICES") or "0").split(",")[0]  # one GPU
    environment.setdefault("NPROC", "16")  # threads of XLA, which the interpreter blocks
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL}
    with subprocess.Popen(command, text=True, env=environment, start_new_session=True, **pipes) as process:
        late = False
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                said, errors = process.communicate(timeout=0.1)
                break
            late = time.monotonic() - start > seconds or over.is_set()
            if late:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
    if late:
        return {"result": f"stopped after {seconds:.0f} s", "seconds": seconds, "errors": errors[-ERRORS:]}
    took = round(time.monotonic() - start, 1)
    last = next((line for line in reversed(said.splitlines()) if line.startswith("{")), None)
    if process.returncode or last is None:
        code = process.returncode
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        message = (errors.strip().splitlines() or [""])[-1][:300]
        return {"result": f"failed with {how}: {message}", "seconds": took, "errors": errors[-ERRORS:]}
    return json.loads(last) | {"seconds": took}
