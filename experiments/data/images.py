"""Small image sets, whole in memory: digits, CIFAR-10, MNIST and Fashion-MNIST."""

import difflib
import importlib.util
import io
import logging
import zipfile
from pathlib import Path
from typing import NamedTuple

import numpy as np

from experiments.data import cache, cifar, idx
from experiments.data.find import find
from experiments.errors import Mistake

log = logging.getLogger(__name__)


class Images(NamedTuple):
    """Pixels are uint8 (n, height, width, channels), labels int32 (n,)."""

    name: str
    train: tuple[np.ndarray, np.ndarray]
    test: tuple[np.ndarray, np.ndarray]
    classes: tuple[str, ...]
    note: str = ""  # to show beside numbers


def load(name: str, dir: str | Path = "") -> Images:
    """The set of that name; `find` says where it is looked for.

    - ``digits``: scikit-learn's, 8x8 of 16 greys, 1,437 and 360.
    - ``cifar10``: the folder ``cifar-10-batches-py``, the archive ``cifar-10-python.tar.gz`` as it is, or the pack
      ``cifar10_jpegscan.npz``.
    - ``mnist``, ``fashion_mnist``: the four IDX files, gzipped or not, in a folder of the set's name (``mnist``,
      ``MNIST/raw``, ``fashion-mnist``, ``FashionMNIST/raw``), or an ``.npz`` of that name with x_train, y_train, x_test
      and y_test. The two sets share their files' names, so files that lie in no such folder are taken only from
      ``dir``; and one is not read as the other.
    """
    if name not in _SETS:
        near = difflib.get_close_matches(name, _SETS, n=1)
        guess = f" Did you mean {near[0]}?" if near else ""
        raise Mistake(f"no image set is called {name!r}.{guess} There are {', '.join(_SETS)}.")
    return _SETS[name](dir)


# ---- digits ----


def _digits(dir) -> Images:
    """Of the images of each digit, in scikit-learn's order, 36 evenly spaced ones are for the test: 360 in all."""
    del dir
    there = importlib.util.find_spec("sklearn")  # whose file is read: to import it takes a second
    if there is None or there.origin is None:
        raise Mistake("digits come with scikit-learn: pip install scikit-learn")
    data = np.loadtxt(Path(there.origin).parent / "datasets/data/digits.csv.gz", np.int32, delimiter=",")
    x = ((data[:, :64] * 255 + 8) // 16).astype(np.uint8).reshape(-1, 8, 8, 1)
    y = np.ascontiguousarray(data[:, 64])
    own = [np.flatnonzero(y == digit) for digit in range(10)]
    test = np.sort(np.concatenate([i[np.arange(36) * len(i) // 36] for i in own]))
    train = np.setdiff1d(np.arange(len(y)), test)
    return Images("digits", (x[train], y[train]), (x[test], y[test]), tuple("0123456789"))


# ---- CIFAR-10 ----


def _cifar10(dir) -> Images:
    found = find(
        ("cifar-10-batches-py", "cifar-10-python.tar.gz", "cifar10_jpegscan.npz", "data_batch_1"),
        dir,
        how="CIFAR-10: download cifar-10-python.tar.gz from https://www.cs.toronto.edu/~kriz/cifar.html into DIR and "
        "add --config.data.dir=DIR",
    )
    if found.suffix == ".npz":
        note = "CIFAR-10 as a lossy JPEG copy (quality 75)"
        return Images("cifar10", *_jpegscan(found), cifar.CLASSES, note)
    return Images("cifar10", *cifar.read(found.parent if found.name == "data_batch_1" else found), cifar.CLASSES)


def _jpegscan(path: Path):
    """All its JPEGs have one header, which it holds once; their entropy-coded scans follow one another."""
    z = _npz(path, ("jpeg_header", "len_train", "scan_train", "y_train", "len_test", "scan_test", "y_test"))
    lengths = np.concatenate([z["len_train"], z["len_test"]]).astype(np.int64)
    ends = np.cumsum(lengths)
    sizes = [len(z["y_train"]), len(z["y_test"])]
    if ends[-1] != len(z["scan_train"]) + len(z["scan_test"]) or [len(z["len_train"]), len(z["len_test"])] != sizes:
        raise Mistake(f"{path}: its lengths, scans and labels do not fit together. Copy it anew.")

    def decode():
        try:
            from PIL import Image
        except ImportError:
            raise Mistake(f"{path} holds JPEGs, which want Pillow: pip install pillow") from None
        log.info("decoding %d images of %s, once", len(ends), path)
        header, scans = z["jpeg_header"].tobytes(), z["scan_train"].tobytes() + z["scan_test"].tobytes()
        images = np.empty((len(ends), 32, 32, 3), np.uint8)
        for i, (end, length) in enumerate(zip(ends, lengths, strict=True)):
            try:
                images[i] = np.asarray(Image.open(io.BytesIO(header + scans[end - length : end])))
            except (OSError, ValueError) as e:
                raise Mistake(f"{path}: image {i} is broken ({e}). Copy the file anew.") from e
        return {"images": images}

    images = cache.kept(f"{path.stem}-{path.stat().st_size}-{cache.checksum(path)}", decode)["images"]
    train, test = (z[key].astype(np.int32) for key in ("y_train", "y_test"))
    return (images[: sizes[0]], train), (images[sizes[0] :], test)


# ---- MNIST and Fashion-MNIST ----


def _mnist(dir) -> Images:
    return _idx(
        "mnist",
        ("mnist", "MNIST/raw", "MNIST"),
        dir,
        tuple("0123456789"),
        "MNIST: download its four files, train-images-idx3-ubyte.gz and so on, into DIR/mnist and add "
        "--config.data.dir=DIR",
    )


def _fashion_mnist(dir) -> Images:
    return _idx(
        "fashion_mnist",
        ("fashion-mnist", "fashion_mnist", "FashionMNIST/raw", "FashionMNIST"),
        dir,
        ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
        "Fashion-MNIST: apt-get install dataset-fashion-mnist, or download its four files from "
        "https://github.com/zalandoresearch/fashion-mnist into DIR/fashion-mnist and add --config.data.dir=DIR",
    )


# The first labels of the two test sets, which tell them apart.
_FIRST = {"mnist": [7, 2, 1, 0, 4, 1, 4, 9, 5, 9], "fashion_mnist": [9, 2, 1, 1, 6, 1, 4, 6, 5, 7]}


def _idx(name, folders, dir, classes, how) -> Images:
    file = idx.FILES[0]
    names = [f"{folder}/{file}{end}" for folder in folders for end in ("", ".gz")]
    names += [f"{folder}.npz" for folder in folders if "/" not in folder]
    if dir:
        names += [Path(dir).expanduser().resolve() / (file + end) for end in ("", ".gz")]
    found = find(names, dir, ("/usr/share/datasets",), how)
    if found.suffix == ".npz":
        arrays = _npz(found, ("x_train", "y_train", "x_test", "y_test"))
        train, test = (tuple(arrays[f"{key}_{part}"] for key in "xy") for part in ("train", "test"))
    else:
        train, test = idx.read(found.parent)
    for x, y in (train, test):
        if x.shape != (len(y), 28, 28) or x.dtype != np.uint8 or not (np.isin(y, np.arange(10))).all():
            raise Mistake(
                f"{found}: images of uint8 (n, 28, 28) and n labels of 0..9 are wanted, got {x.dtype} {x.shape}."
            )
    for other, first in _FIRST.items():
        if other != name and test[1][:10].tolist() == first:
            raise Mistake(f"{found} is {other}, where {name} was asked for. {how}")
    train, test = ((x[..., None], y.astype(np.int32)) for x, y in (train, test))
    return Images(name, train, test, classes)


def _npz(path: Path, keys) -> dict[str, np.ndarray]:
    try:
        with open(path, "rb") as file, np.load(file) as z:
            if lost := [key for key in keys if key not in z]:
                raise Mistake(f"{path} has no {', '.join(lost)}, but {', '.join(z)}. It is not the file meant.")
            return {key: z[key] for key in keys}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as e:
        raise Mistake(f"{path} cannot be read ({e}). Copy it anew.") from e


_SETS = {"digits": _digits, "cifar10": _cifar10, "mnist": _mnist, "fashion_mnist": _fashion_mnist}
