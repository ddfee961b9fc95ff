"""The directory of a run, which is its own: a new one, and the lock by which one process writes there at a time."""

import contextlib
import errno
import fcntl
import itertools
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from experiments.errors import Failed, Mistake, Taken
from experiments.files import UNSUPPORTED, writable
from experiments.scale import processes
from experiments.training import provenance

NAME = "run.lock"
PATIENCE = 1.0  # seconds to try for: children of a process that was killed may hold its lock for a moment


@contextlib.contextmanager
def new(place: Path) -> Iterator[Path]:
    """Create a directory that was not there, for all processes of a run: NAME, or if that is taken NAME-2, NAME-3, ...

    If an error ends the context and leaves the directory empty, it is removed.
    """
    with writable(place):
        workdir = processes.agreed(lambda: create(place))
    try:
        yield workdir
    except (Mistake, Failed):
        if processes.first():
            with contextlib.suppress(OSError):  # the run has written to it
                workdir.rmdir()
        raise


def create(place: Path) -> Path:
    """Create a directory that was not there, by the first free name, and return its path."""
    place.parent.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(1):
        path = place if number == 1 else place.with_name(f"{place.name}-{number}")
        with contextlib.suppress(FileExistsError):
            path.mkdir()
            break
    return path


@contextlib.contextmanager
def held(workdir: Path) -> Iterator[None]:
    """Hold the lock of a directory inside the context. The file `run.lock` says which process has it.

    The operating system drops the lock when the process ends, however it ends; the file of a process that was killed
    stays, and hinders nobody. Where the file system has no locks, the run goes on without one.

    Args:
      workdir: The directory of a run. It is there.

    Raises:
      Taken: If another process holds the lock.
    """
    path = workdir / NAME
    with writable(workdir):
        file = _opened(path)
    with file:
        with writable(workdir):
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}, since {provenance.now()}\n".encode())
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                path.unlink()


def refuse_taken(workdir: Path) -> None:
    """Raise `Taken` if another process holds the lock of a directory. It may not exist yet."""
    with contextlib.suppress(OSError), (workdir / NAME).open("rb+") as file:  # `held` says why it cannot be opened
        if not _locked(file, fcntl.LOCK_SH):  # several processes may look at once
            raise Taken(_message(file, workdir))


def is_taken(workdir: Path) -> bool:
    """Return whether another process holds the lock of a directory. It may not exist yet."""
    try:
        refuse_taken(workdir)
    except Taken:
        return True
    return False


def _opened(path: Path) -> BinaryIO:
    """Open the file, and lock it."""
    until = time.monotonic() + PATIENCE
    while True:
        with contextlib.ExitStack() as opened:
            file = opened.enter_context(open(path, "ab+", buffering=0, opener=_unlinked))
            locked = _locked(file)
            if locked and _is_at(file, path):
                opened.pop_all()  # it stays open
                return file
            if not locked and time.monotonic() >= until:
                raise Taken(_message(file, path.parent))
        time.sleep(0.05)


def _unlinked(path: str, flags: int) -> int:
    """Open a file that is no link: the lock is written to, and a link may lead to a file of somebody else."""
    try:
        return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, f"{NAME} in it is a link. Remove it") from error
        raise


def _locked(file: BinaryIO, kind: int = fcntl.LOCK_EX) -> bool:
    """Lock a file, and return whether this process may write: it has the lock, or there are no locks."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
    return True


def _is_at(file: BinaryIO, path: Path) -> bool:
    """Return whether an open file is the one of a path. The last owner may have removed it after it was opened."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _message(file: BinaryIO, workdir: Path) -> str:
    file.seek(0)
    owner = " ".join(file.read(200).decode(errors="replace").split()) or "another process"
    return f"--workdir={workdir} is being written by {owner}. Wait until it ends, or give this run another --workdir."
