"""MNIST's files (http://yann.lecun.com/exdb/mnist): a magic number with the number of axes, their lengths, bytes."""

import gzip
import math
import zlib
from pathlib import Path

import numpy as np

from experiments.data import reading
from experiments.errors import Mistake

_LARGEST = 256 << 20  # bytes in a file: the images to train on are 47 million

FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


def read(folder: Path):
    """Return (images, labels) of the training set and of the test set, from four files, gzipped or not."""
    x, y, x_test, y_test = (_array(_path(folder, name), axes) for name, axes in zip(FILES, (3, 1, 3, 1), strict=True))
    for name, images, labels in ((FILES[0], x, y), (FILES[2], x_test, y_test)):
        if len(images) != len(labels):
            raise Mistake(f"{folder}: {name} holds {len(images)} images, and the file of labels {len(labels)} labels.")
    return (x, y), (x_test, y_test)


def _path(folder: Path, name: str) -> Path:
    for path in (folder / name, folder / f"{name}.gz"):
        if path.exists():
            return path
    raise Mistake(f"{folder} has no {name} or {name}.gz. All four are needed: {', '.join(FILES)}.")


def _array(path: Path, axes: int) -> np.ndarray:
    try:
        with reading.opened(path) as raw, gzip.open(raw) if path.suffix == ".gz" else raw as file:
            data = reading.whole(file, _LARGEST)
    except (OSError, EOFError, zlib.error) as e:
        raise Mistake(f"{path} cannot be read ({e}). Copy the file again.") from e
    start = 4 + 4 * axes
    if data[:4] != bytes((0, 0, 8, axes)) or len(data) < start:  # 8: unsigned bytes
        raise Mistake(
            f"{path} is no IDX file of bytes with {axes} axes: it begins with {data[:4].hex(' ') or 'nothing'}."
        )
    shape = tuple(np.frombuffer(data[4:start], ">u4").tolist())
    if len(data) - start != math.prod(shape):
        raise Mistake(
            f"{path} should hold {shape} = {math.prod(shape)} bytes, and has {len(data) - start}. Copy the file again."
        )
    if 0 in shape:
        raise Mistake(f"{path} holds nothing: its shape is {shape}.")
    return np.frombuffer(data, np.uint8, offset=start).reshape(shape)
