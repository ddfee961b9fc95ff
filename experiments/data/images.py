"""Small image sets, whole in memory: digits, CIFAR-10, MNIST and Fashion-MNIST."""

import difflib
import importlib.util
import io
import logging
from pathlib import Path
from typing import NamedTuple

import numpy as np

from experiments.data import cache, cifar, idx, npz, others, reading
from experiments.data.find import find
from experiments.errors import Missing, Mistake
from nmjax.core import names

log = logging.getLogger(__name__)


class Images(NamedTuple):
    """A set of labelled images, whole in memory.

    Write a function that returns one to train on images of your own, in any module::

        # mylab/data.py                         config.data.name = "mylab.data:spirals"
        def spirals(dir):                       # dir is config.data.dir, which may be empty
            x, y = ...                          # uint8 (n, height, width, channels), int (n,)
            return Images("spirals", (x[:900], y[:900]), (x[900:], y[900:]), ("left", "right"))

    Attributes:
      name: The set's name, as the header of a run shows it.
      train: Pixels, uint8 (n, height, width, channels), and labels, int32 (n,). A ViT takes square images.
      test: The same for the test split.
      classes: The name of each label, 0, 1, ...
      note: A sentence that has to stand beside the numbers, as that the images are a lossy copy; or "".
    """

    name: str
    train: tuple[np.ndarray, np.ndarray]
    test: tuple[np.ndarray, np.ndarray]
    classes: tuple[str, ...]
    note: str = ""


def load(name: str, dir: str | Path = "") -> Images:
    """Return a set of images.

    Args:
      name: One of these, or ``module:name`` of a function that takes ``dir`` and returns `Images`:

        - ``digits``: scikit-learn's, 8x8 pixels of 16 greys, 1,437 to train and 360 to test.
        - ``cifar10``: the folder ``cifar-10-batches-py``, the archive ``cifar-10-python.tar.gz`` as it is, or the
          pack ``cifar10_jpegscan.npz``.
        - ``mnist``, ``fashion_mnist``: the four IDX files, gzipped or not, in a folder of the set's name
          (``mnist``, ``MNIST/raw``, ``fashion-mnist``, ``FashionMNIST/raw``), or an ``.npz`` of that name with
          x_train, y_train, x_test and y_test. The files of the two sets have the same names. So files in no such
          folder are read from ``dir`` only, and neither set is accepted as the other.
        - a file ``.npz`` with x and y, as `npz.read` describes it.
      dir: The folder that is searched first. `find` lists the others.

    Returns:
      The set.

    Raises:
      Mistake: The name is not known, or its files are missing, damaged or not what they should be.
    """
    if names.is_foreign(name):
        return _checked(name, others.load(name, dir, Images))
    if name.endswith(".npz"):
        path = find((name,), dir, how="Give the path of the file, or its folder by --config.data.dir=DIR.")
        train, test, note = npz.read(path)
        return Images(path.name, train, test, tuple(map(str, range(train[1].max() + 1))), note)
    if name not in _SETS:
        near = difflib.get_close_matches(name, _SETS, n=1)
        guess = f" Did you mean {near[0]}?" if near else ""
        if Path(name).is_dir():
            guess = f" It is a folder: write --config=FILE:folder --config.data.dir={name}."
        raise Mistake(
            f"no image set is called {name!r}.{guess} Write one of {', '.join(_SETS)}, a .npz file, or folder."
        )
    return _SETS[name](dir)


_PUBLISHED = {  # images to train on and to test, and their shape: what a plan needs of sets with ten classes
    "digits": (1_437, 360, (8, 8, 1)),
    "cifar10": (50_000, 10_000, (32, 32, 3)),
    "mnist": (60_000, 10_000, (28, 28, 1)),
    "fashion_mnist": (60_000, 10_000, (28, 28, 1)),
}


def stand_in(name: str, missing: Missing) -> Images:
    """Return black images in the sizes of a published set whose files are missing. Other sets raise the error."""
    if name not in _PUBLISHED:
        raise missing
    train, test, shape = _PUBLISHED[name]
    part = lambda count: (np.broadcast_to(np.uint8(0), (count, *shape)), np.arange(count, dtype=np.int32) % 10)
    return Images(name, part(train), part(test), tuple(map(str, range(10))))


def _checked(name: str, data: Images) -> Images:
    """Return a set of another module with labels of int32; refuse what no run can read."""
    splits = []
    for split in ("train", "test"):
        x, y = map(np.asarray, getattr(data, split))
        where = f"config.data.name={name!r}: {split}"
        if x.dtype != np.uint8 or x.ndim != 4 or not len(x):
            raise Mistake(f"{where} has images of {x.dtype} {x.shape}, not uint8 (n, height, width, channels).")
        if y.shape != (len(x),) or y.dtype.kind not in "iu":
            raise Mistake(
                f"{where} has labels of {y.dtype} {y.shape}, not one whole number for each of {len(x)} images."
            )
        if y.min() < 0 or y.max() >= len(data.classes):
            raise Mistake(
                f"{where} has labels from {y.min()} to {y.max()}, and {len(data.classes)} classes are named: they are "
                f"numbered from 0 to {len(data.classes) - 1}."
            )
        splits.append((x, y.astype(np.int32)))
    train, test = splits
    if train[0].shape[1:] != test[0].shape[1:]:
        raise Mistake(
            f"config.data.name={name!r}: images to train are {train[0].shape[1:]}, those to test {test[0].shape[1:]}. "
            "They need one shape."
        )
    return data._replace(train=train, test=test)


# ---- digits ----


def _digits(dir) -> Images:
    """Return scikit-learn's digits. The test split has 36 evenly spaced images of each digit, 360 in all."""
    del dir
    package = importlib.util.find_spec("sklearn")  # importing it takes a second, and one file of it is enough
    if package is None or package.origin is None:
        raise Missing("the digits come with scikit-learn: pip install scikit-learn")
    data = np.loadtxt(Path(package.origin).parent / "datasets/data/digits.csv.gz", np.int32, delimiter=",")
    x = ((data[:, :64] * 255 + 8) // 16).astype(np.uint8).reshape(-1, 8, 8, 1)
    y = np.ascontiguousarray(data[:, 64])
    of_digit = [np.flatnonzero(y == digit) for digit in range(10)]
    test = np.sort(np.concatenate([i[np.arange(36) * len(i) // 36] for i in of_digit]))
    train = np.setdiff1d(np.arange(len(y)), test)
    return Images("digits", (x[train], y[train]), (x[test], y[test]), tuple("0123456789"))


# ---- CIFAR-10 ----

_IMAGES = 60_000


def _cifar10(dir) -> Images:
    path = find(
        ("cifar-10-batches-py", "cifar-10-python.tar.gz", "cifar10_jpegscan.npz", "data_batch_1"),
        dir,
        how="CIFAR-10: python -m experiments.data get cifar10. Or download cifar-10-python.tar.gz from "
        "https://www.cs.toronto.edu/~kriz/cifar.html into DIR, and add --config.data.dir=DIR or set NMJAX_DATA=DIR.",
    )
    if path.suffix == ".npz":
        note = "CIFAR-10 as a lossy JPEG copy (quality 75)"
        return Images("cifar10", *_jpegscan(path), cifar.CLASSES, note)
    return Images("cifar10", *cifar.read(path.parent if path.name == "data_batch_1" else path), cifar.CLASSES)


def _jpegscan(path: Path):
    """Read a pack of JPEGs: one header for all of them, then their entropy-coded scans, one after another."""
    keys = ("jpeg_header", "len_train", "scan_train", "y_train", "len_test", "scan_test", "y_test")
    z = reading.arrays(path, keys)
    kinds = {name: "u" if name[:4] in ("jpeg", "scan") else "iu" for name in keys}
    if any(z[name].ndim != 1 or z[name].dtype.kind not in kind for name, kind in kinds.items()):
        raise Mistake(f"{path}: its arrays are not rows of bytes, lengths and labels. Copy the file again.")
    lengths = np.concatenate([z["len_train"], z["len_test"]]).astype(np.int64)
    ends = np.cumsum(lengths)
    sizes = [len(z["y_train"]), len(z["y_test"])]
    labels = np.concatenate([z["y_train"], z["y_test"]])
    fits = min(sizes) > 0 and sum(sizes) <= _IMAGES and [len(z["len_train"]), len(z["len_test"])] == sizes
    fits = fits and lengths.min() > 0 and ends[-1] == len(z["scan_train"]) + len(z["scan_test"])
    if not fits or labels.min() < 0 or labels.max() >= len(cifar.CLASSES):
        raise Mistake(f"{path}: its lengths, scans and labels do not fit together. Copy the file again.")

    def decode():
        try:
            from PIL import Image
        except ImportError:
            raise Mistake(f"{path} holds JPEGs, and reading them needs Pillow: pip install pillow") from None
        log.info("decoding %d images of %s, once", len(ends), path)
        header, scans = z["jpeg_header"].tobytes(), z["scan_train"].tobytes() + z["scan_test"].tobytes()
        images = np.empty((len(ends), 32, 32, 3), np.uint8)
        for i, (end, length) in enumerate(zip(ends, lengths, strict=True)):
            try:
                image = Image.open(io.BytesIO(header + scans[end - length : end]), formats=("JPEG",))
                if image.size != (32, 32):  # checked before the pixels take memory
                    raise ValueError(f"it is {image.size[0]} x {image.size[1]}, not 32 x 32")
                images[i] = np.asarray(image)
            except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as e:
                raise Mistake(f"{path}: image {i} is broken ({e}). Copy the file again.") from e
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
        "MNIST: python -m experiments.data get mnist. Or put its four files, train-images-idx3-ubyte.gz and so on, "
        "into DIR/mnist, and add --config.data.dir=DIR or set NMJAX_DATA=DIR.",
    )


def _fashion_mnist(dir) -> Images:
    return _idx(
        "fashion_mnist",
        ("fashion-mnist", "fashion_mnist", "FashionMNIST/raw", "FashionMNIST"),
        dir,
        ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
        "Fashion-MNIST: python -m experiments.data get fashion_mnist. Or put its four files, from "
        "https://github.com/zalandoresearch/fashion-mnist, into DIR/fashion-mnist, and add --config.data.dir=DIR or "
        "set NMJAX_DATA=DIR.",
    )


# The two test sets are told apart by their first labels.
_FIRST = {"mnist": [7, 2, 1, 0, 4, 1, 4, 9, 5, 9], "fashion_mnist": [9, 2, 1, 1, 6, 1, 4, 6, 5, 7]}


def _idx(name, folders, dir, classes, how) -> Images:
    file = idx.FILES[0]
    places = [f"{folder}/{file}{end}" for folder in folders for end in ("", ".gz")]
    places += [f"{folder}.npz" for folder in folders if "/" not in folder]
    if dir:
        places += [Path(dir).expanduser().resolve() / (file + end) for end in ("", ".gz")]
    path = find(places, dir, ("/usr/share/datasets",), how)
    if path.suffix == ".npz":
        arrays = reading.arrays(path, ("x_train", "y_train", "x_test", "y_test"))
        train, test = (tuple(arrays[f"{key}_{part}"] for key in "xy") for part in ("train", "test"))
    else:
        train, test = idx.read(path.parent)
    for x, y in (train, test):
        fits = x.shape == (y.size, 28, 28) and y.ndim == 1 and y.size > 0 and x.dtype == np.uint8
        if not fits or not np.isin(y, np.arange(10)).all():
            raise Mistake(
                f"{path}: expected images of uint8 (n, 28, 28) and n labels of 0..9, got {x.dtype} {x.shape}, and "
                f"labels of {y.dtype} {y.shape} with the values {np.unique(y)[:11].tolist()}."
            )
    for other, first in _FIRST.items():
        if other != name and test[1][:10].tolist() == first:
            raise Mistake(f"{path} is {other}, and config.data.name is {name!r}. {how}")
    train, test = ((x[..., None], y.astype(np.int32)) for x, y in (train, test))
    return Images(name, train, test, classes)


_SETS = {"digits": _digits, "cifar10": _cifar10, "mnist": _mnist, "fashion_mnist": _fashion_mnist}
