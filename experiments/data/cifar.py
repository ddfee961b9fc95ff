"""CIFAR-10's own files (https://www.cs.toronto.edu/~kriz/cifar.html): pickles, read as data and never as a program."""

import io
import pickle
import tarfile
import zlib
from pathlib import Path

import numpy as np

from experiments.errors import Mistake

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_FILES = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")
# The only names in these files: those by which Python 2 pickled an array.
_ALLOWED = {
    ("numpy.core.multiarray", "_reconstruct"): np.empty(0).__reduce__()[0],
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
}


def read(path: Path):
    """Return (images, labels) of the training set and of the test set, from the folder or from the archive."""
    batches = [_batch(path, name, data) for name, data in _contents(path)]
    x, y = (np.concatenate(parts) for parts in zip(*batches[:-1], strict=True))
    return (x, y), batches[-1]


def _contents(path: Path):
    """Yield the names and the bytes of the six files. An archive is read without extracting anything."""
    name = ""
    try:
        if path.is_dir():
            for name in _FILES:
                yield name, (path / name).read_bytes()
            return
        with tarfile.open(path) as archive:
            for name in _FILES:
                file = archive.extractfile(f"cifar-10-batches-py/{name}")
                if file is None:
                    raise KeyError(f"{name} is no file")
                yield name, file.read()
    except (OSError, EOFError, KeyError, tarfile.TarError, zlib.error) as e:
        raise Mistake(f"{path}: {name or 'the archive'} cannot be read ({e}). Download it again.") from e


class _Reader(pickle.Unpickler):
    def find_class(self, module, name):
        if (module, name) in _ALLOWED:
            return _ALLOWED[module, name]
        raise pickle.UnpicklingError(f"it names {module}.{name}, which CIFAR-10 does not, so it was not read")


def _batch(path: Path, name: str, data: bytes):
    where = f"{path}: {name}"
    try:
        batch = _Reader(io.BytesIO(data), encoding="bytes").load()
        x, y = batch[b"data"], np.array(batch[b"labels"])
    except Exception as e:  # a damaged pickle raises anything
        raise Mistake(f"{where} is no batch of CIFAR-10: {type(e).__name__}: {e}. Download it again.") from e
    if not isinstance(x, np.ndarray) or x.dtype != np.uint8 or x.shape != (len(y), 3072) or y.dtype.kind != "i":
        raise Mistake(
            f"{where} should hold uint8 (n, 3072) and n labels, got {getattr(x, 'shape', x)!r} and {y.shape}."
        )
    return x.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1).copy(), y.astype(np.int32)
