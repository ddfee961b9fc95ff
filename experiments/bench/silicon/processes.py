"""Rows in processes of their own, so that a crash costs one row."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NamedTuple, Self

from experiments.bench import turns
from nmjax.kernels import measured

ERRORS = 6000  # characters of what a failed row wrote to its standard error
QUERY = "driver_version,clocks.sm,clocks.max.sm,temperature.gpu,power.draw,power.limit"


class _Running(NamedTuple):
    process: subprocess.Popen[bytes]
    files: tuple[IO[bytes], IO[bytes]]  # its standard output and its standard error
    begin: float
    seconds: float  # that it may take


class Processes:
    """Runs rows in processes. A process that dies or hangs is a result, too. At the end of the context all are ended.

    Args:
      out: The folder of the results.
    """

    def __init__(self, out: Path):
        self.out, self.now = out.absolute(), time.monotonic
        self._running = dict[str, _Running]()

    def start(self, name: str, seconds: float) -> None:
        """Start a row. After so many seconds it is ended, with the processes that it has started."""
        command = [sys.executable, "-m", "experiments.bench.silicon", name, str(os.getpid())]
        environment = os.environ | {"XDG_CACHE_HOME": str(self.out)}  # of tables of tiles, and of the check
        environment |= {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", turns.FOLDER: str(self.out / "turns")}
        environment.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")  # dense GPT-2 takes 60 GB
        environment.setdefault("JAX_COMPILATION_CACHE_DIR", str(measured.own_tables().parent / "programs"))
        environment["CUDA_VISIBLE_DEVICES"] = (os.environ.get("CUDA_VISIBLE_DEVICES") or "0").split(",")[0]  # one GPU
        environment.setdefault("NPROC", "16")  # threads of XLA, which the interpreter blocks
        said, errors = files = _file(), _file()
        pipes = {"stdout": said, "stderr": errors, "stdin": subprocess.DEVNULL}
        process = subprocess.Popen(command, env=environment, start_new_session=True, **pipes)
        self._running[name] = _Running(process, files, self.now(), seconds)

    def ended(self) -> dict[str, dict[str, Any]]:
        """Wait until a row ends, and return what each that has ended found."""
        while True:
            found = {}
            for name, row in list(self._running.items()):
                late = self.now() - row.begin > row.seconds
                if late or row.process.poll() is not None:
                    found[name] = self._end(name) | ({"result": f"stopped after {row.seconds:.0f} s"} if late else {})
            if found:
                return found
            time.sleep(0.1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """End the rows that are running."""
        for name in list(self._running):
            self._end(name)

    def _end(self, name: str) -> dict[str, Any]:
        """End a row that is still running, and return what it found."""
        process, files, begin, _ = self._running.pop(name)
        if process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        code, took = process.wait(), round(self.now() - begin, 1)
        said, errors = (_read(file) for file in files)
        last = next((line for line in reversed(said.splitlines()) if line.startswith("{")), None)
        if code or last is None:
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            message = (errors.strip().splitlines() or [""])[-1][:300]
            return {"result": f"failed with {how}: {message}", "seconds": took, "errors": errors[-ERRORS:]}
        return json.loads(last) | {"seconds": took}


def _file() -> IO[bytes]:
    return tempfile.TemporaryFile()


def _read(file: IO[bytes]) -> str:
    with file:
        file.seek(0)
        return file.read().decode(errors="replace")


def gpu_state() -> dict[str, str]:
    """Return the driver of the first visible GPU, and its state: clock, temperature and power.

    The dict is empty if nvidia-smi does not say them.
    """
    first = (os.environ.get("CUDA_VISIBLE_DEVICES") or "0").split(",")[0]
    command = ["nvidia-smi", f"--id={first}", f"--query-gpu={QUERY}", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=5).stdout
        driver, now, most, warm, power, limit = map(str.strip, said.splitlines()[0].split(","))
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return {}
    return {"driver": driver, "state": f"{now} of {most} MHz, {warm} °C, {power} of {limit} W, driver {driver}"}
