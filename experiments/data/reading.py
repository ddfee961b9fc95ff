"""Files of data, read within limits: the size that a file claims is checked before memory is allocated."""

import gzip
import lzma
import os
import zipfile
import zlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from experiments.errors import Mistake
from experiments.files import opened

_UNPACKED = 1 << 30  # bytes that any file may unpack to; larger files may unpack to _RATIO times their size
_RATIO = 100
_KINDS = "biufSU"  # booleans, numbers and strings


def _most(path: str | Path) -> int:
    return max(_UNPACKED, _RATIO * os.stat(path).st_size)


def whole(path: str | Path, limit: int | None = None) -> bytes:
    """Return all bytes of a file, unpacked if its name ends in .gz or .xz.

    Raises:
      Mistake: It cannot be read, or has more than ``limit`` bytes; by default, more than a file of its size may have.
    """
    unpack = {".gz": gzip.open, ".xz": lzma.open}.get(Path(path).suffix)
    parts, size = [], 0
    try:
        limit = _most(path) if limit is None else limit
        with opened(path) as raw, unpack(raw) if unpack else raw as file:
            while part := file.read(1 << 20):
                size += len(part)
                if size > limit:
                    raise OSError(f"it unpacks to more than {limit:,} bytes")
                parts.append(part)
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as e:
        raise Mistake(f"{path} cannot be read ({e}). Copy the file again.") from e
    return b"".join(parts)


def arrays(path: Path, needed: Iterable[str], others: Iterable[str] | None = ()) -> dict[str, np.ndarray]:
    """Return arrays of an ``.npz`` by name.

    Args:
      path: The file.
      needed: Names of arrays that it has to hold.
      others: Names of arrays that it may hold. If None, all that it holds are read.

    Raises:
      Mistake: It cannot be read, lacks an array, or an array is not what its header says.
    """
    try:
        with opened(path) as file, np.lib.npyio.NpzFile(file) as archive:
            if missing := [name for name in needed if name not in archive.files]:
                held = ", ".join(map(_shown, archive.files[:10])) or "nothing"
                raise Mistake(f"{path} has no {', '.join(missing)}. It has {held}, so it is a different kind of file.")
            wanted = [*dict.fromkeys((*needed, *(archive.files if others is None else others)))]
            members = {info.filename.removesuffix(".npy"): info for info in archive.zip.infolist()}
            members = {name: members[name] for name in wanted if name in members}
            size = sum(info.file_size for info in members.values())
            if size > _most(path):
                raise ValueError(f"it unpacks to {size:,} bytes, and is {path.stat().st_size:,} bytes long")
            return {name: _array(archive, info, name) for name, info in members.items()}
    except Mistake:
        raise
    except Exception as e:  # a damaged archive may raise any error
        raise Mistake(f"{path} cannot be read ({_shown(str(e), 200)}). Copy the file again.") from e


def _shown(text: str, most: int = 40) -> str:
    """Return a text of a damaged file on one line, without its end if it is long."""
    line = " ".join(text.split())
    line = line if line.isprintable() else ascii(line)[1:-1]
    return line if len(line) <= most else f"{line[:most]}..."


def _array(archive: np.lib.npyio.NpzFile, info: zipfile.ZipInfo, name: str) -> np.ndarray:
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):  # others unpack without a limit
        raise ValueError(f"{name} is compressed in a way that np.savez does not use")
    array = archive[name]
    if not isinstance(array, np.ndarray) or array.dtype.kind not in _KINDS:
        raise ValueError(f"{name} holds no plain numbers or strings")
    return array
