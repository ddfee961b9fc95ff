"""Files that are written whole or not at all, and lines of JSON that others may append to."""

import contextlib
import fcntl
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path

from experiments.errors import Mistake


@contextlib.contextmanager
def writable(workdir: Path):
    try:
        yield
    except OSError as error:
        raise Mistake(f"--workdir={workdir} cannot be written: {error.strerror or error}.") from error


def replace(path: Path, text: str) -> None:
    """Write a file whole or not at all, and on the disk before what comes after it."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_text(text, encoding="utf-8", newline="\n")
        with draft.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def append(path: Path, texts: Callable[[list[dict]], Iterable[dict]]) -> None:
    """Append lines, made of those that are there, to a file that others may append to. A last line that was cut off, as by a full
    disk, stays a line of its own."""
    with path.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        text = file.read()
        new = [json.dumps(line, default=str) + "\n" for line in texts(lines(path))]
        cut = "\n" * bool(new and text and not text.endswith("\n"))
        file.write(cut + "".join(new))


def lines(path: Path) -> list[dict]:
    """The metrics of a run; a last line that was cut off is left out."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else ():
        with contextlib.suppress(json.JSONDecodeError):
            found.append(json.loads(line))
    return found
