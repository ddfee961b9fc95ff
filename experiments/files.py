"""Files that are written whole or not at all, and files of JSON lines that several processes may append to."""

import contextlib
import errno
import fcntl
import json
import os
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from experiments.errors import Failed, Mistake

FULL = (errno.ENOSPC, errno.EDQUOT)  # the disk or the quota of the user is full
DRAFTS = f".*.{8 * '[0-9a-f]'}.draft"  # files that are being written
DEEPEST = 64  # lists and objects inside each other: no file of ours has more than ten
LARGEST = 1 << 26  # bytes of a file of JSON or of text, other than one of lines
LONGEST = 1 << 30  # bytes of a file of lines
UNSUPPORTED = (errno.ENOTSUP, errno.ENOLCK, errno.ENOSYS)  # some shared file systems have no locks


def opened(path: str | Path, links: bool = True) -> BinaryIO:
    """Open a file for reading. Named pipes, devices and folders are refused: reading them may never end.

    Args:
      path: The file.
      links: Whether it may be a link to another file.

    Raises:
      OSError: It cannot be opened, or is not a regular file.
    """
    if not links and os.path.islink(path):
        raise OSError("it is a link to another file, and in the folder of a run links are not followed")
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | (0 if links else os.O_NOFOLLOW))  # never waits for a writer
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError("it is not a regular file, but a folder, a named pipe or a device")
    return os.fdopen(handle, "rb")


def text(path: Path, limit: int = LARGEST, errors: str = "strict") -> str:
    """Return the text of a file that a run wrote.

    Raises:
      OSError: It cannot be opened, is a link or no regular file, or has more than ``limit`` bytes.
      UnicodeDecodeError: It is not UTF-8, and ``errors`` is "strict".
    """
    return _bytes(path, limit).decode(errors=errors)


def _bytes(path: Path, limit: int) -> bytes:
    with opened(path, links=False) as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise OSError(f"it has more than {limit:,} bytes")
    return data


def of_json(content: str | bytes) -> Any:
    """Return a value of JSON.

    Raises:
      ValueError: It is not JSON, or is nested so deeply that no program of ours wrote it.
    """
    try:
        value = json.loads(content)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    opening = ("[", "{") if isinstance(content, str) else (b"[", b"{")
    level = [value] if sum(map(content.count, opening)) > DEEPEST else []
    for _ in range(DEEPEST):
        level = [one for each in level if isinstance(each, list | dict) for one in _parts(each)]
    if level:
        raise ValueError("it is nested too deeply")
    return value


def _parts(value: list | dict) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value


@contextlib.contextmanager
def writable(workdir: Path) -> Iterator[None]:
    """Turn an error of writing to a run's directory into one that names the directory.

    Raises:
      Failed: The disk is full.
      Mistake: The directory cannot be written for another reason.
    """
    try:
        yield
    except OSError as error:
        kind = Failed if error.errno in FULL else Mistake
        raise kind(f"--workdir={workdir} cannot be written: {error.strerror or error}.") from error


def replace(path: Path, content: str | bytes | memoryview) -> None:
    """Write a file whole or not at all. It is on the disk when this returns."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}.draft")  # another machine may have the same process id
    try:
        draft.write_bytes(content.encode() if isinstance(content, str) else content)
        with draft.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(draft, path)
    except OSError as error:
        error.filename = str(path)  # an error while writing, such as a full disk, names no file
        raise
    finally:
        draft.unlink(missing_ok=True)


def remove_drafts(folder: Path) -> None:
    """Remove what `replace` left in a folder when its process was killed. No process may be writing there."""
    for path in folder.glob(DRAFTS):
        if path.is_file():
            path.unlink(missing_ok=True)


def write_whole(file: BinaryIO, data: bytes, size: int) -> None:
    """Write all of these bytes to the end of a file, or none of them.

    Args:
      file: An unbuffered file that is open for appending.
      data: The bytes.
      size: The size of the file. If an error is raised, it has this size afterwards.
    """
    done = 0
    try:
        while done < len(data):
            done += file.write(data[done:])
    except OSError:
        with contextlib.suppress(OSError):
            file.truncate(size)
        raise


def append(path: Path, new: Callable[[list[dict]], Iterable[dict]]) -> None:
    """Append JSON lines to a file, all or none of them. The file is locked during this, if the file system has locks.

    Args:
      path: The file. A last line that was cut off, for example by a killed process, stays a line of its own.
      new: Returns the lines to append, given those that are there.

    Raises:
      Failed: The file cannot be written.
    """
    try:
        with path.open("ab+", buffering=0) as file:
            _lock(file)
            size = file.seek(0, os.SEEK_END)
            written = "".join(json.dumps(line, default=str) + "\n" for line in new(lines(path)))
            if written and size and not _ends_a_line(file):
                written = "\n" + written
            write_whole(file, written.encode(), size)
    except OSError as error:
        raise Failed(f"{path} cannot be written: {error.strerror or error}") from error


def _lock(file: BinaryIO) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise


def _ends_a_line(file: BinaryIO) -> bool:
    file.seek(-1, os.SEEK_END)
    return file.read(1) == b"\n"


def lines(path: Path) -> list[dict]:
    """Return the JSON lines of a file, without those that were cut off. A file that is not there has none.

    Raises:
      Mistake: It cannot be read.
    """
    try:
        data = _bytes(path, LONGEST)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise Mistake(f"{path} cannot be read: {error.strerror or error}.") from error
    parsed = []
    for line in data.splitlines():
        with contextlib.suppress(ValueError):  # not JSON, not UTF-8, or an integer of thousands of digits
            parsed.append(of_json(line))
    return parsed
