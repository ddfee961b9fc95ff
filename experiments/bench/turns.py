"""Processes that compile side by side, and measure one at a time.

They share a folder that an environment variable names. Without it nobody waits. A process that wants to measure waits
until the others have compiled what they have begun. Until it has measured, none of them begins to compile.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

FOLDER = "NMJAX_TURNS"  # the variable
_device: list[IO[str]] = []  # the lock that this process holds, shared with the others, outside of `alone`


@contextmanager
def compiling() -> Iterator[None]:
    """Let no other process measure, except while this one measures or waits for its turn."""
    folder = os.environ.get(FOLDER)
    if not folder:
        yield
        return
    Path(folder).mkdir(parents=True, exist_ok=True)
    with (Path(folder) / "device").open("a") as device:
        with _queue():
            fcntl.flock(device, fcntl.LOCK_SH)
        _device.append(device)
        try:
            yield
        finally:
            _device.clear()


@contextmanager
def alone() -> Iterator[None]:
    """Measure while no other process compiles or measures."""
    if not _device:
        yield
        return
    (device,) = _device
    fcntl.flock(device, fcntl.LOCK_UN)
    with _queue():
        fcntl.flock(device, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(device, fcntl.LOCK_SH)


@contextmanager
def _queue() -> Iterator[None]:
    """Wait in the queue. Whoever measures stays at its head."""
    with (Path(os.environ[FOLDER]) / "queue").open("a") as queue:
        fcntl.flock(queue, fcntl.LOCK_EX)
        yield
