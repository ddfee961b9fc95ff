"""Seals: the small files that make checkpoints valid.

`checkpoints/40.json` is the seal of `checkpoints/40/`. It is written last, and holds checksums of all files and of
itself. A folder without a seal was never finished, and is no checkpoint. While a folder is written, `40.begun` is
beside it: it tells which unfinished folders are the run's own, and may be removed.
"""

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from experiments.files import of_json, replace, text


class Seal(NamedTuple):
    """The content of a seal."""

    best: bool  # the checkpoint was the best when it was saved
    pending: list[dict]  # figures of the steps since the last line of metrics
    checksums: dict[str, int]  # a checksum of every file of the checkpoint


def path(directory: Path, step: int) -> Path:
    """Return where the seal of a step is."""
    return directory / f"{step}.json"


def begun(directory: Path, step: int) -> Path:
    """Return the mark of a checkpoint that this run began to write."""
    return directory / f"{step}.begun"


def begun_steps(directory: Path) -> list[int]:
    """Return the steps of all checkpoints that were begun, and whose seal was not written."""
    return sorted(int(mark.stem) for mark in directory.glob("*.begun") if mark.stem.isdecimal())


def write(directory: Path, step: int, best: bool, pending: list[dict]) -> None:
    """Seal the finished checkpoint of a step."""
    seal = Seal(best, pending, _checksums(directory / str(step)))
    replace(path(directory, step), json.dumps({**seal._asdict(), "own": _own(seal._asdict())}))


def _own(content: Mapping[str, Any]) -> int:
    """Return the checksum of a seal itself."""
    return zlib.crc32(json.dumps([content[name] for name in Seal._fields]).encode())


def read(directory: Path, step: int) -> Seal | None:
    """Return the seal of a step, or None if it cannot be read."""
    try:
        content = of_json(text(path(directory, step)))
        whole = content["own"] == _own(content) and content["checksums"]
        return Seal(*(content[name] for name in Seal._fields)) if whole else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def sealed_steps(directory: Path) -> list[int]:
    """Return the steps of all checkpoints that have a seal, in order."""
    return sorted(
        int(seal.stem) for seal in directory.glob("*.json") if seal.stem.isdecimal() and not seal.is_symlink()
    )


def was_best(directory: Path, step: int) -> bool:
    """Return whether a checkpoint was the best when it was saved."""
    seal = read(directory, step)
    return seal is not None and seal.best


def damage(directory: Path, step: int, seal: Seal | None) -> str:
    """Return in words how the files of a checkpoint differ from its seal, or "" if they do not."""
    if seal is None:
        return "its seal cannot be read"
    for name, wanted in seal.checksums.items():
        file = directory / str(step) / name
        if not file.is_file():
            return f"{name} is missing"
        if _checksum(file) != wanted:
            return f"{name} is not what was written"
    return ""


def _checksums(directory: Path) -> dict[str, int]:
    files = sorted(file for file in directory.rglob("*") if file.is_file())
    return {str(file.relative_to(directory)): _checksum(file) for file in files}


def _checksum(path: Path) -> int:
    total = 0
    with path.open("rb") as file:
        while part := file.read(1 << 24):
            total = zlib.crc32(part, total)
    return total
