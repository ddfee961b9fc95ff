"""A cache of arrays that take long to make, in ``$XDG_CACHE_HOME/nmjax`` or ``~/.cache/nmjax``."""

import hashlib
import io
import logging
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

from experiments.data import reading
from experiments.errors import Mistake
from experiments.files import opened, replace

log = logging.getLogger(__name__)


def kept(name: str, make: Callable[[], dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Return the arrays that ``make`` returns, made once and kept in an uncompressed ``.npz``.

    A file appears whole or not at all, so processes may make the same one at the same time. If nothing can be written,
    a warning says so, and the next run makes the arrays again.

    Args:
      name: Name of the file. It has to contain all that the arrays depend on.
      make: Makes the arrays.

    Returns:
      Arrays by name.
    """
    try:
        path = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "nmjax" / f"{name}.npz"
    except RuntimeError as e:  # no home
        log.warning("cannot keep %s: %s Set XDG_CACHE_HOME.", name, e)
        return make()
    if os.path.exists(path):
        try:
            return reading.arrays(path, (), None)
        except Mistake as e:
            log.warning("it will be made again: %s", e)
    arrays, content = make(), io.BytesIO()
    try:
        np.savez(content, **arrays)
        path.parent.mkdir(parents=True, exist_ok=True)
        replace(path, content.getbuffer())
    except OSError as e:
        log.warning("cannot keep %s, so the next run makes it again: %s. XDG_CACHE_HOME says where.", path, e)
    return arrays


def checksum(*paths: str | Path) -> str:
    """Return 16 hex digits that depend on all bytes of some files, and on the order of the files."""
    digests = []
    for path in paths:
        with opened(path) as file:
            digests.append(hashlib.file_digest(file, "sha256").hexdigest())
    return (hashlib.sha256(" ".join(digests).encode()).hexdigest() if len(digests) > 1 else digests[0])[:16]
