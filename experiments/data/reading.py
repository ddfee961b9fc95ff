"""Files of data, read within limits: the size that a file claims is checked before memory is allocated."""

import gzip
import lzma
import math
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
    """Return arrays of an ``.npz`` by name. They are read-only.

    Args:
      path: The file.
      needed: Names of arrays that it has to hold.
      others: Names of arrays that it may hold. If None, all that it holds are read.

    Raises:
      Mistake: It cannot be read, lacks an array, or an array is not what its header says.
    """
    try:
        with opened(path) as file, zipfile.ZipFile(file) as archive:
            members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
            if missing := [name for name in needed if name not in members]:
                held = ", ".join(map(_shown, list(members)[:10])) or "nothing"
                raise Mistake(f"{path} has no {', '.join(missing)}. It has {held}, so it is a different kind of file.")
            names = (*needed, *(members if others is None else others))
            wanted = {name: members[name] for name in names if name in members}
            size = sum(info.file_size for info in wanted.values())
            if size > _most(path):
                raise ValueError(f"it unpacks to {size:,} bytes, and is {path.stat().st_size:,} bytes long")
            return {name: _array(archive, info, name) for name, info in wanted.items()}
    except Mistake:
        raise
    except Exception as e:  # a damaged archive may raise any error
        raise Mistake(f"{path} cannot be read ({_shown(str(e), 200)}). Copy the file again.") from e


def _shown(text: str, most: int = 40) -> str:
    """Return a text of a damaged file on one line, without its end if it is long."""
    line = " ".join(text.split())
    line = line if line.isprintable() else ascii(line)[1:-1]
    return line if len(line) <= most else f"{line[:most]}..."


def _array(archive: zipfile.ZipFile, info: zipfile.ZipInfo, name: str) -> np.ndarray:
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):  # others unpack without a limit
        raise ValueError(f"{name} is compressed in a way that np.savez does not use")
    headers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    with archive.open(info) as file:
        version = np.lib.format.read_magic(file)
        if version not in headers:
            raise ValueError(f"{name} has the header of version {version[0]}.{version[1]}, not 1.0 or 2.0")
        shape, fortran, dtype = headers[version](file)
        if dtype.kind not in _KINDS or dtype.subdtype:
            raise ValueError(f"{name} holds {str(dtype)[:40]}, not plain numbers or strings")
        held, size = info.file_size - file.tell(), math.prod(shape) * dtype.itemsize
        if min(shape, default=0) < 0 or held != size:
            raise ValueError(f"{name} should hold {dtype} {shape}, {size:,} bytes, and holds {held:,}")
        data = file.read(size)
    return np.frombuffer(data, dtype).reshape(shape, order="F" if fortran else "C")
