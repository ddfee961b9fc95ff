"""Processes that compile side by side, and measure one at a time.

They share a folder that an environment variable names. Without it nobody waits. To measure, a process waits until no
other compiles. New compilations wait until it has finished. Tracing uses no device, and waits for nobody.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
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
    if not os.environ.get(FOLDER):
        yield
        return
    Path(os.environ[FOLDER]).mkdir(parents=True, exist_ok=True)
    with _file("device") as device:
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


@contextmanager
def tracing() -> Iterator[None]:
    """Let others measure while this process traces and lowers. It must not use the device meanwhile."""
    if not _compiles:
        yield
        return
    device = _compiles.pop()
    fcntl.flock(device, fcntl.LOCK_UN)
    try:
        yield
    finally:
        with _queue():
            fcntl.flock(device, fcntl.LOCK_SH)
        _compiles.append(device)


@contextmanager
def _queue() -> Iterator[None]:
    """Wait in the queue. Whoever measures stays at its head."""
    with _file("queue") as queue:
        fcntl.flock(queue, fcntl.LOCK_EX)
        yield


def _file(name: str) -> IO[str]:
    return Path(os.environ[FOLDER], name).open("a+")
