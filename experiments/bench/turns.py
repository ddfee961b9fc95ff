"""Processes that compile side by side, and measure one at a time.

They share a folder that an environment variable names. Without it nobody waits. To measure, a process waits until no
other compiles. New compilations wait until it has finished.
"""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import IO

try:
    import fcntl
except ImportError:  # Windows, where nobody sets the variable
    fcntl = None

FOLDER = "NMJAX_TURNS"  # the variable
_compiles: list[IO[str]] = []  # the open lock file, while this process compiles


@contextmanager
def compiling() -> Iterator[None]:
    """Keep others from measuring while this process compiles."""
    folder = os.environ.get(FOLDER)
    if not folder:
        yield
        return
    Path(folder).mkdir(parents=True, exist_ok=True)
    with (Path(folder) / "device").open("a+") as device:
        with _queue():
            fcntl.flock(device, fcntl.LOCK_SH)
        _compiles.append(device)
        try:
            yield
        finally:
            _compiles.clear()


@contextmanager
def alone() -> Iterator[None]:
    """Measure, or compile what others could disturb, while no other process does either."""
    if not _compiles:
        yield
        return
    device = _compiles.pop()
    fcntl.flock(device, fcntl.LOCK_UN)
    with _queue():
        fcntl.flock(device, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(device, fcntl.LOCK_SH)
            _compiles.append(device)


def _queue() -> AbstractContextManager[None]:
    """Wait in the queue. Whoever measures stays at its head."""
    return locked(Path(os.environ[FOLDER]) / "queue")


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Lock a file, which is made if it is missing, and wait for others that have locked it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
