"""Image sets that others publish: the files, where they are, and how they are read.

MNIST and Fashion-MNIST are IDX files: a magic number with the number of axes, their lengths, bytes. CIFAR-10 is its
*binary* archive, or the folder in it: records of a label and 3,072 bytes, in planes of red, green and blue. Its other
archive holds pickles, which are programs: nmjax reads none.
"""

import io
import itertools
import math
import tarfile
from pathlib import Path
from typing import NamedTuple

import numpy as np

from experiments.data import reading
from experiments.errors import Mistake

Splits = dict[str, tuple[np.ndarray, np.ndarray]]  # "train" and "test": images and labels


class File(NamedTuple):
    """A published file."""

    name: str
    size: int
    md5: str


class Published(NamedTuple):
    """A published set.

    Attributes:
      title: Its name in a sentence.
      folder: The folder into which its files are fetched.
      addresses: Addresses that have the files.
      files: The files.
      counts: The numbers of images to train on and to test.
      shape: The shape of an image.
      classes: The name of each label.
      places: The names under which it is searched.
    """

    title: str
    folder: str
    addresses: tuple[str, ...]
    files: tuple[File, ...]
    counts: tuple[int, int]
    shape: tuple[int, int, int]
    classes: tuple[str, ...]
    places: tuple[str, ...]

    def how(self, name: str) -> str:
        """Return the sentences that say how to get the set."""
        files = " and ".join(file.name for file in self.files)
        return (
            f"{self.title}: python -m experiments.data get {name}. Or put {files} from {self.addresses[0]} into "
            f"{Path('DIR', self.folder)}, and add --config.data.dir=DIR or set NMJAX_DATA=DIR."
        )


PICKLED = ("cifar-10-python.tar.gz", "cifar-10-batches-py", "data_batch_1")  # names of CIFAR-10 that are refused
IDX = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


def _idx_set(title: str, folders: tuple[str, ...], addresses: tuple[str, ...], classes, *sums) -> Published:
    files = tuple(File(f"{name}.gz", *known) for name, known in zip(IDX, sums, strict=True))
    places = [f"{folder}/{IDX[0]}{end}" for folder in folders for end in ("", ".gz")]
    places += [f"{folder}.npz" for folder in folders if "/" not in folder]
    return Published(title, folders[0], addresses, files, (60_000, 10_000), (28, 28, 1), classes, tuple(places))


SETS = {
    "cifar10": Published(
        "CIFAR-10",
        "",
        ("https://www.cs.toronto.edu/~kriz/",),
        (File("cifar-10-binary.tar.gz", 170_052_171, "c32a1d4ab5d03f1284b67883e8d87530"),),
        (50_000, 10_000),
        (32, 32, 3),
        ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
        (
            *("cifar-10-batches-bin", "cifar-10-binary.tar.gz", "cifar10_jpegscan.npz", "cifar10.npz"),
            *("data_batch_1.bin", *PICKLED),
        ),
    ),
    "mnist": _idx_set(
        "MNIST",
        ("mnist", "MNIST/raw", "MNIST"),
        ("https://ossci-datasets.s3.amazonaws.com/mnist/", "https://storage.googleapis.com/cvdf-datasets/mnist/"),
        tuple("0123456789"),
        (9_912_422, "f68b3c2dcbeaaa9fbdd348bbdeb94873"),
        (28_881, "d53e105ee54ea40749a09fcbcd1e9432"),
        (1_648_877, "9fb629c4189551a2d022fa330f9573f3"),
        (4_542, "ec29112dd5afa0611ce80d1b7f02629c"),
    ),
    "fashion_mnist": _idx_set(
        "Fashion-MNIST",
        ("fashion-mnist", "fashion_mnist", "FashionMNIST/raw", "FashionMNIST"),
        (
            "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
            "https://storage.googleapis.com/tensorflow/tf-keras-datasets/",
        ),
        ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
        (26_421_880, "8d4fb7e6c68d591d4c3dfef9ec88bf0d"),
        (29_515, "25c81989df183df01b3e8a0aad5dffbe"),
        (4_422_102, "bef4ecab320f06d8554ea6380940ec79"),
        (5_148, "bb300cfdad3c16e7a12a480ee83cd310"),
    ),
}


# ---- IDX ----

_LARGEST = 256 << 20  # bytes in a file: the images to train on are 47 million


def idx(folder: Path) -> Splits:
    """Return the images and the labels in four IDX files, gzipped or not."""
    x, y, x_test, y_test = (_idx_array(_idx_path(folder, name)) for name in IDX)
    return {"train": (x[..., None], y), "test": (x_test[..., None], y_test)}


def _idx_path(folder: Path, name: str) -> Path:
    for path in (folder / name, folder / f"{name}.gz"):
        if path.exists():
            return path
    raise Mistake(f"{folder} has no {name} or {name}.gz. All four are needed: {', '.join(IDX)}.")


def _idx_array(path: Path) -> np.ndarray:
    """Return the array in an IDX file of bytes, with as many axes as its name says."""
    data, axes = reading.whole(path, _LARGEST), int(path.name.partition("-idx")[2][:1])
    start = 4 + 4 * axes
    if data[:4] != bytes((0, 0, 8, axes)) or len(data) < start:  # 8: unsigned bytes
        begins = data[:4].hex(" ") or "nothing"
        raise Mistake(f"{path} is no IDX file of bytes with {axes} axes: it begins with {begins}.")
    shape = tuple(np.frombuffer(data[4:start], ">u4").tolist())
    if len(data) - start != math.prod(shape) or 0 in shape:
        raise Mistake(f"{path} claims the shape {shape}, and has {len(data) - start} bytes. Copy the file again.")
    return np.frombuffer(data, np.uint8, offset=start).reshape(shape)


# ---- CIFAR-10 ----

_BATCHES = (*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin")
_RECORD, _RECORDS = 1 + 3072, 10_000  # bytes of a record, and records in a file
_ARCHIVE = 192 << 20  # bytes in the archive: its files have 184 million
_MEMBERS = 100  # files and folders in the archive: it has 9


def cifar10(path: Path) -> Splits:
    """Return the images and the labels in the archive, which is not extracted, or in its folder."""
    held = _folder(path) if path.is_dir() else _archive(path)
    batches = []
    for name in _BATCHES:
        data = held.get(name, b"")
        if not data or len(data) % _RECORD or len(data) > _RECORD * _RECORDS:
            raise Mistake(
                f"{path}: {name} should hold up to {_RECORDS:,} records of {_RECORD:,} bytes, and has {len(data):,} "
                "bytes. Download it again."
            )
        batches.append(np.frombuffer(data, np.uint8).reshape(-1, _RECORD))
    rows = {"train": np.concatenate(batches[:-1]), "test": batches[-1]}
    images = lambda row: np.ascontiguousarray(row[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
    return {split: (images(row), row[:, 0]) for split, row in rows.items()}


def _folder(path: Path) -> dict[str, bytes]:
    return {name: reading.whole(path / name, _RECORD * _RECORDS) for name in _BATCHES}


def _archive(path: Path) -> dict[str, bytes]:
    data = reading.whole(path, _ARCHIVE)
    try:
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as archive:
            named = {f"cifar-10-batches-bin/{name}": name for name in _BATCHES}
            members = (member for member in itertools.islice(archive, _MEMBERS) if member.name in named)
            fit = (member for member in members if member.isreg() and member.size <= _RECORD * _RECORDS)
            return {named[member.name]: archive.extractfile(member).read() for member in fit}
    except Exception as e:  # a damaged archive raises anything
        raise Mistake(f"{path} cannot be read ({str(e)[:200]}). Download it again.") from e
