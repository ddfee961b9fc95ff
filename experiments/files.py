"""Files that are written whole or not at all, and files of JSON lines that several processes may append to."""

import contextlib
import fcntl
import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from experiments.errors import Mistake


@contextlib.contextmanager
def writable(workdir: Path) -> Iterator[None]:
    """Turn an error of writing to a run's directory into a mistake that names the directory."""
    try:
        yield
    except OSError as error:
        raise Mistake(f"--workdir={workdir} cannot be written: {error.strerror or error}.") from error


def replace(path: Path, text: str) -> None:
    """Write a file whole or not at all. It is on the disk when this returns."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_text(text, encoding="utf-8", newline="\n")
        with draft.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def append(path: Path, new: Callable[[list[dict]], Iterable[dict]]) -> None:
    """Append JSON lines to a file, which is locked meanwhile.

    Args:
      path: The file. A last line that was cut off, as by a full disk, stays a line of its own.
      new: Returns the lines to append, given those that are there.
    """
    with path.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        text = file.read()
        written = "".join(json.dumps(line, default=str) + "\n" for line in new(lines(path)))
        if written and text and not text.endswith("\n"):
            written = "\n" + written
        file.write(written)


def lines(path: Path) -> list[dict]:
    """Return the JSON lines of a file, without those that were cut off. A file that is not there has none."""
    if not path.exists():
        return []
    parsed = []
    for line in path.read_text().splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            parsed.append(json.loads(line))
    return parsed
