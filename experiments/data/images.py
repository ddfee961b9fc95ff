"""Small image sets, whole in memory: digits, published sets, an ``.npz``, or what a function returns."""

import importlib.util
import io
import logging
from pathlib import Path
from typing import NamedTuple

import numpy as np

from experiments.data import cache, others, published, reading, validation
from experiments.data.find import find
from experiments.errors import Missing, Mistake, meant
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
        - ``cifar10``: the folder ``cifar-10-batches-bin``, the archive ``cifar-10-binary.tar.gz`` as it is, or the
          pack ``cifar10_jpegscan.npz``.
        - ``mnist``, ``fashion_mnist``: the four IDX files, gzipped or not, in a folder of the set's name
          (``mnist``, ``MNIST/raw``, ``fashion-mnist``, ``FashionMNIST/raw``). The files of the two sets have the same
          names. So files in no such folder are read from ``dir`` only, and neither set is accepted as the other.
        - each of these three also as an ``.npz`` of its name with x_train, y_train, x_test and y_test.
        - a file ``.npz`` with x and y, or x_train and y_train, and perhaps x_test and y_test. Images are uint8, whole
          numbers from 0 to 255, or floats from 0 to 1, which become 8 bits; their shape is (n, height, width) or
          (n, height, width, channels). Without x_test, an evenly spaced tenth of the images is the test split.
      dir: The folder that is searched first. `find` lists the others.

    Returns:
      The set.

    Raises:
      Mistake: The name is not known, or its files are missing, damaged or not what they should be.
    """
    if names.is_foreign(name):
        data = others.load(name, dir, Images)
        return _checked(f"config.data.name={name!r}", data)
    if name.endswith(".npz"):
        return _own(find((name,), dir, how="Give the path of the file, or its folder by --config.data.dir=DIR."))
    if name == "digits":
        return _digits()
    if name in published.SETS:
        return _published(name, dir)
    sets = ["digits", *published.SETS]
    guess = meant(name, sets, "{}")
    if Path(name).is_dir():
        guess = f" It is a folder: write --config=FILE:folder --config.data.dir={name}."
    raise Mistake(f"no image set is called {name!r}.{guess} Write one of {', '.join(sets)}, a .npz file, or folder.")


def stand_in(name: str, missing: Missing) -> Images:
    """Return black images in the sizes of a published set whose files are missing. Other sets raise the error."""
    if name not in published.SETS:
        raise missing
    known = published.SETS[name]
    part = lambda count: (np.broadcast_to(np.uint8(0), (count, *known.shape)), np.arange(count, dtype=np.int32) % 10)
    return Images(name, *map(part, known.counts), known.classes)


def _checked(where: str, data: Images, shape: tuple[int, ...] | None = None) -> Images:
    """Return a set with labels of int32; refuse what no run can read, or another shape of images."""
    shape = shape or np.shape(data.train[0])[1:]
    splits = {"train": data.train, "test": data.test}
    for split in splits:
        x, y = map(np.asarray, splits[split])
        if x.dtype != np.uint8 or x.ndim != 4 or 0 in x.shape:
            raise Mistake(
                f"{where}: {split} has images of {x.dtype} {x.shape}, not uint8 (n, height, width, channels)."
            )
        if x.shape[1:] != shape:
            raise Mistake(f"{where}: {split} has images of {x.shape[1:]}, not of {shape}. All need one shape.")
        _refuse_no_labels(f"{where}: {split}", x, y)
        if y.min() < 0 or y.max() >= len(data.classes):
            raise Mistake(
                f"{where}: {split} has labels from {y.min()} to {y.max()}, and {len(data.classes)} classes are named: "
                f"they are numbered from 0 to {len(data.classes) - 1}."
            )
        splits[split] = x, y.astype(np.int32)
    return data._replace(**splits)


def _refuse_no_labels(where: str, x: np.ndarray, y: np.ndarray) -> None:
    if y.shape != (len(x),) or y.dtype.kind not in "iu":
        raise Mistake(f"{where} has labels of {y.dtype} {y.shape}, not one whole number for each of {len(x):,} images.")


# ---- digits ----


def _digits() -> Images:
    """Return scikit-learn's digits. The test split has 36 evenly spaced images of each digit, 360 in all."""
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


# ---- published sets ----

# The test sets whose files have the same names are told apart by their first labels.
_FIRST = {"mnist": [7, 2, 1, 0, 4, 1, 4, 9, 5, 9], "fashion_mnist": [9, 2, 1, 1, 6, 1, 4, 6, 5, 7]}


def _published(name: str, dir: str | Path) -> Images:
    known = published.SETS[name]
    places: list[str | Path] = [*known.places]
    if dir and name in _FIRST:
        places += [Path(dir).expanduser().resolve() / (published.IDX[0] + end) for end in ("", ".gz")]
    how = known.how(name)
    path = find(places, dir, ("/usr/share/datasets",) if name in _FIRST else (), how)
    if path.name in published.PICKLED:
        raise Missing(
            f"{path} holds pickles, which nmjax does not read. Fetch the binary archive to the same folder: python -m "
            f"experiments.data get {name} --dir={path.parent}. It is {known.addresses[0]}{known.files[0].name}."
        )
    notes = []
    if path.name == "cifar10_jpegscan.npz":
        splits, notes = _jpegscan(path), ["CIFAR-10 as a lossy JPEG copy (quality 75)"]
    elif path.suffix == ".npz":
        splits, notes = _of_npz(path, ("x_train", "y_train", "x_test", "y_test"))
    elif name == "cifar10":
        path = path.parent if path.suffix == ".bin" else path
        splits = published.cifar10(path)
    else:
        path = path.parent
        splits = published.idx(path)
    data = Images(name, **splits, classes=known.classes, note="; ".join(notes))
    data = _checked(str(path), data, known.shape)
    for other, first in _FIRST.items():
        if other != name and data.test[1][:10].tolist() == first:
            raise Mistake(f"{path} is {other}, and config.data.name is {name!r}. {how}")
    return data


def _jpegscan(path: Path) -> published.Splits:
    """Read a pack of JPEGs: one header for all of them, then their entropy-coded scans, one after another."""
    keys = ("jpeg_header", "len_train", "scan_train", "y_train", "len_test", "scan_test", "y_test")
    z = reading.arrays(path, keys)
    kinds = {name: "u" if name[:4] in ("jpeg", "scan") else "iu" for name in keys}
    if any(z[name].ndim != 1 or z[name].dtype.kind not in kind for name, kind in kinds.items()):
        raise Mistake(f"{path}: its arrays are not rows of bytes, lengths and labels. Copy the file again.")
    lengths = np.concatenate([z["len_train"], z["len_test"]]).astype(np.int64)
    ends, count = np.cumsum(lengths), len(z["y_train"])
    sizes = [(len(z[f"len_{split}"]), len(z[f"y_{split}"])) for split in ("train", "test")]
    fits = all(0 < a == b for a, b in sizes) and len(ends) <= sum(published.SETS["cifar10"].counts)
    if not fits or lengths.min() <= 0 or ends[-1] != len(z["scan_train"]) + len(z["scan_test"]):
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
    return {"train": (images[:count], z["y_train"]), "test": (images[count:], z["y_test"])}


# ---- an .npz ----

_NAMES = ("x", "y", "x_train", "y_train", "x_test", "y_test")
_ASKED = "An image set has x (images) and y (labels), or x_train and y_train. It may also have x_test and y_test."


def _own(path: Path) -> Images:
    """Return the images in an ``.npz``. Refuse it if it is not clear what its arrays mean."""
    splits, notes = _of_npz(path)
    if "test" not in splits:
        x, y = splits["train"]
        splits = dict(zip(("train", "test"), ((x[i], y[i]) for i in validation.positions(y, 0.1)), strict=True))
        notes.append(f"{path.name} has no x_test: an evenly spaced tenth of its images is the test split")
    labels = [y for _, y in splits.values()]
    low, high = min(y.min() for y in labels), max(y.max() for y in labels)
    if low < 0 or np.unique(labels[0]).size != high + 1:
        raise Mistake(
            f"{path}: its labels are from {low} to {high}. Number the classes from 0, without gaps; each class needs "
            "images to train on."
        )
    classes = tuple(map(str, range(high + 1)))
    return _checked(str(path), Images(path.name, **splits, classes=classes, note="; ".join(notes)))


def _of_npz(path: Path, needed: tuple[str, ...] = ()) -> tuple[published.Splits, list[str]]:
    """Return the splits in an ``.npz``, with images of uint8, and notes on what was changed."""
    found = reading.arrays(path, needed, _NAMES)
    own = [name for name in ("x", "x_train") if name in found]
    if len(own) != 1 or own[0].replace("x", "y") not in found or ("x_test" in found) != ("y_test" in found):
        has = f"holds {', '.join(found)}" if found else "has no arrays x and y"
        raise Mistake(f"{path} {has}. {_ASKED}")
    keys = {"train": own[0]} | ({"test": "x_test"} if "x_test" in found else {})
    images, notes = _pixels(path, {name: found[name] for name in keys.values()})
    labels = [found[name.replace("x", "y")] for name in keys.values()]
    labels = [y[:, 0] if y.ndim == 2 and y.shape[1] == 1 else y for y in labels]
    for name, x, y in zip(keys.values(), images, labels, strict=True):
        _refuse_no_labels(f"{path}: {name}", x, y)
    return dict(zip(keys, zip(images, labels, strict=True), strict=True)), notes


def _pixels(path: Path, arrays: dict[str, np.ndarray]) -> tuple[list[np.ndarray], list[str]]:
    """Return images as uint8 (n, height, width, channels), and notes on what was changed."""
    for name, x in arrays.items():
        if x.ndim not in (3, 4) or 0 in x.shape:
            raise Mistake(
                f"{path}: {name} is {x.shape}, not images (n, height, width) or (n, height, width, channels)."
            )
        if x.ndim == 4 and x.shape[1] in (1, 3) and x.shape[2] == x.shape[3] > 4:
            raise Mistake(f"{path}: {name} is {x.shape}, with channels first. Save {name}.transpose(0, 2, 3, 1).")
    every = [x if x.ndim == 4 else x[..., None] for x in arrays.values()]
    if all(x.dtype == np.uint8 for x in every):
        return every, []
    if any(x.dtype.kind not in "iuf" for x in every):
        raise Mistake(f"{path}: its images are {every[0].dtype}, not uint8 or other numbers.")
    low, high = min(x.min() for x in every), max(x.max() for x in every)  # NaN if one of them is
    floats = all(x.dtype.kind == "f" for x in every)
    if floats and low >= 0 and high <= 1:
        return [np.rint(x * np.float32(255)).astype(np.uint8) for x in every], ["numbers from 0 to 1 became 8 bits"]
    if low >= 0 and 1 < high <= 255 and all((x == np.rint(x)).all() for x in every):
        return [x.astype(np.uint8) for x in every], []
    raise Mistake(
        f"{path}: its images are {every[0].dtype} from {low:g} to {high:g}, and it is not clear which value is black "
        "and which is white. Save uint8, whole numbers from 0 to 255, or floats from 0 to 1."
    )
