"""Seals: the small files that make checkpoints valid.

`checkpoints/40.json` is the seal of `checkpoints/40/`. It is written last, and holds checksums of all files. A folder
without a seal was never finished, and is no checkpoint.
"""

import json
import zlib
from pathlib import Path
from typing import NamedTuple

from experiments.files import replace


class Seal(NamedTuple):
    """The content of a seal."""

    best: bool  # the checkpoint was the best when it was saved
    pending: list[dict]  # figures of the steps since the last line of metrics
    checksums: dict[str, int]  # a checksum of every file of the checkpoint


def path(directory: Path, step: int) -> Path:
    """Return where the seal of a step is."""
    return directory / f"{step}.json"


def write(directory: Path, step: int, best: bool, pending: list[dict]) -> None:
    """Seal the finished checkpoint of a step."""
    seal = Seal(best, pending, _checksums(directory / str(step)))
    replace(path(directory, step), json.dumps(seal._asdict()))


def read(directory: Path, step: int) -> Seal | None:
    """Return the seal of a step, or None if it cannot be read."""
    try:
        content = json.loads(path(directory, step).read_text())
        return Seal(content["best"], content["pending"], content["checksums"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def sealed_steps(directory: Path) -> list[int]:
    """Return the steps of all checkpoints that have a seal, in order."""
    return sorted(int(seal.stem) for seal in directory.glob("*.json") if seal.stem.isdigit())


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
