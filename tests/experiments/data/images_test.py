"""Image sets in memory: one value from every kind of file, and a sentence for each that is not what it should be."""

import gzip
import hashlib
import io
import os
import resource
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from experiments import command, config_files
from experiments.data import cache, images, published, reading, text
from experiments.data.find import find
from experiments.errors import Missing, Mistake
from experiments.training import tasks

PACKS = Path(os.environ.get("NMJAX_DATA") or Path(__file__).parents[4] / "shared" / "data")
X = np.random.default_rng(0).integers(0, 256, (40, 6, 6, 3), dtype=np.uint8)
Y = np.arange(40) % 4


@pytest.fixture(autouse=True)
def here(monkeypatch, tmp_path):
    """No data but those of the test, and the current folder is empty."""
    monkeypatch.delenv("NMJAX_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


def write(path, data: bytes = b"") -> Path:
    (path := Path(path)).parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


# ---- where ----


def test_find_prefers_the_place_asked_for(monkeypatch, tmp_path):
    places = [tmp_path / place for place in ("asked", "here", "env", "system")]
    for place in places:
        write(place / "b")
    write(places[2] / "a")
    monkeypatch.setenv("NMJAX_DATA", str(places[2]))
    look = lambda dir="": find(("a", "b"), dir, (places[3],)).resolve()
    assert look(places[0]) == places[0] / "b"  # an earlier place, before an earlier name
    assert look() == places[1] / "b"
    (places[1] / "b").unlink()
    assert look() == places[2] / "a"
    monkeypatch.delenv("NMJAX_DATA")
    assert look() == places[3] / "b"
    assert find((places[0] / "b",), places[1]) == places[0] / "b"


def test_find_says_what_where_and_how(monkeypatch, tmp_path):
    with pytest.raises(Missing) as e:
        find(("a", "b"), tmp_path, ("/nowhere",), "Buy it.")
    assert str(e.value) == (
        f"found none of a, b in {tmp_path} (--config.data.dir), the current folder, "
        "$NMJAX_DATA (not set), /nowhere. Buy it."
    )
    with pytest.raises(Missing, match="--config.data.dir is '/nowhere', which does not exist"):
        find(("a",), "/nowhere")
    monkeypatch.setenv("NMJAX_DATA", str(write(tmp_path / "file")))
    with pytest.raises(Mistake, match="NMJAX_DATA is .* which is a file, not a folder"):
        find(("a",))


def test_names_of_no_set(here):
    with pytest.raises(
        Mistake, match="no image set is called 'cifar-10'. Did you mean cifar10[?] Write one of digits, "
    ):
        images.load("cifar-10")
    with pytest.raises(Missing, match="found no b.npz in the current folder.* Give the path of the file"):
        images.load("b.npz")
    (here / "pictures").mkdir()
    with pytest.raises(Mistake, match="'pictures'. It is a folder: write --config=FILE:folder --config.data.dir=pic"):
        images.load("pictures")


# ---- what is kept ----


def test_kept_makes_once_and_makes_again_what_is_damaged(tmp_path, caplog):
    made = []

    def make():
        made.append(1)
        return {"a": np.arange(1000), "b": np.ones((2, 3), np.uint8)}

    def again(times):
        got = cache.kept("name", make)
        np.testing.assert_array_equal(got["a"], np.arange(1000))
        assert (got["b"].dtype, len(made)) == (np.uint8, times)

    again(1)
    again(1)
    (path,) = (tmp_path / "cache" / "nmjax").iterdir()
    data = path.read_bytes()
    for times, damaged in enumerate((data[:600], b"", data[:600] + b"?" + data[601:]), 2):
        path.write_bytes(damaged)
        again(times)
        assert path.read_bytes() == data
    assert caplog.text.count("it will be made again") == 3


def test_kept_where_nothing_can_be_written(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("XDG_CACHE_HOME", str(write(tmp_path / "file")))
    assert cache.kept("name", lambda: {"a": np.arange(3)})["a"].tolist() == [0, 1, 2]
    assert "XDG_CACHE_HOME" in caplog.text


# ---- published sets ----


def test_digits():
    datasets = pytest.importorskip("sklearn.datasets")
    got = images.load("digits")
    (x, y), (x_test, y_test) = got.train, got.test
    assert (x.shape, x_test.shape, x.dtype, y.dtype) == ((1437, 8, 8, 1), (360, 8, 8, 1), np.uint8, np.int32)
    assert np.bincount(y_test).tolist() == [36] * 10
    data = datasets.load_digits()
    levels = np.round(data.images * 255 / 16).astype(int)  # no level lies half-way
    key = lambda x, y: sorted((image.tobytes(), int(label)) for image, label in zip(x.astype(np.uint8), y, strict=True))
    both = np.concatenate([x, x_test])[..., 0], np.concatenate([y, y_test])
    assert key(*both) == key(levels, data.target)
    # The split is fixed for good: it depends on no generator.
    assert hashlib.sha256(x_test.tobytes()).hexdigest()[:16] == "1b066ba54b6018fc"


def idx_bytes(x: np.ndarray) -> bytes:
    return bytes((0, 0, 8, x.ndim)) + b"".join(n.to_bytes(4, "big") for n in x.shape) + x.tobytes()


def mnist_arrays(first):
    rng = np.random.default_rng(0)
    x, x_test = (rng.integers(0, 256, (n, 28, 28), dtype=np.uint8) for n in (30, 12))
    y, y_test = (rng.integers(0, 10, n, dtype=np.uint8) for n in (30, 12))
    y_test[:10] = images._FIRST[first]
    return x, y, x_test, y_test


def write_mnist(place, arrays, end=""):
    for name, x in zip(published.IDX, arrays, strict=True):
        write(Path(place) / f"{name}{end}", gzip.compress(idx_bytes(x)) if end else idx_bytes(x))


def cifar_arrays():
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (24, 32, 32, 3), dtype=np.uint8), rng.integers(0, 10, 24, dtype=np.uint8)
    return x[:20], y[:20], x[20:], y[20:]


def cifar_files(arrays) -> dict[str, bytes]:
    """Six files of four records: a label, then planes of red, green and blue."""
    x, y = np.concatenate(arrays[::2]), np.concatenate(arrays[1::2])
    rows = [
        bytes([label]) + b"".join(image[..., c].tobytes() for c in range(3)) for image, label in zip(x, y, strict=True)
    ]
    names = [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]
    return {name: b"".join(rows[4 * i : 4 * i + 4]) for i, name in enumerate(names)}


def tar(files) -> bytes:
    """Return an archive of the files of CIFAR-10, each as bytes, or as what its header says with its bytes."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz", format=tarfile.GNU_FORMAT) as archive:
        for name, data in files.items():
            info, data = data if isinstance(data, tuple) else (tarfile.TarInfo(), data)
            info.name, info.size = f"cifar-10-batches-bin/{name}", len(data)
            archive.addfile(info, io.BytesIO(data))
    return out.getvalue()


def write_cifar(place, arrays):
    for name, data in cifar_files(arrays).items():
        write(Path(place) / name, data)


def write_npz(path, arrays):
    np.savez(path, **dict(zip(("x_train", "y_train", "x_test", "y_test"), arrays, strict=True)))


SOURCES = {
    "mnist": ("mnist", write_mnist),
    "MNIST/raw": ("mnist", lambda place, arrays: write_mnist(place, arrays, ".gz")),
    ".": ("mnist", lambda place, arrays: write_mnist(place, arrays, ".gz")),
    "mnist.npz": ("mnist", write_npz),
    "fashion-mnist": ("fashion_mnist", lambda place, arrays: write_mnist(place, arrays, ".gz")),
    "FashionMNIST/raw": ("fashion_mnist", write_mnist),
    "fashion_mnist.npz": ("fashion_mnist", write_npz),
    "cifar-10-batches-bin": ("cifar10", write_cifar),
    "./": ("cifar10", write_cifar),
    "cifar-10-binary.tar.gz": ("cifar10", lambda path, arrays: write(path, tar(cifar_files(arrays)))),
    "cifar10.npz": ("cifar10", write_npz),
}


@pytest.mark.parametrize("source", SOURCES)
def test_a_published_set_has_one_value_whatever_its_files_are(tmp_path, source):
    name, put = SOURCES[source]
    arrays = cifar_arrays() if name == "cifar10" else mnist_arrays(name)
    put(tmp_path / source, arrays)
    got = images.load(name, tmp_path)
    for x, want in zip((*got.train, *got.test), arrays, strict=True):
        np.testing.assert_array_equal(x, want[..., None] if want.ndim == 3 else want)
    assert (got.train[0].dtype, got.train[1].dtype, got.note) == (np.uint8, np.int32, "")
    assert (len(got.classes), len(images.stand_in(name, Missing()).classes)) == (10, 10)


def test_one_set_is_not_read_as_the_other(monkeypatch, tmp_path):
    write_mnist(tmp_path, mnist_arrays("mnist"))
    with pytest.raises(Mistake, match="is mnist, and config.data.name is 'fashion_mnist'. Fashion-MNIST: python -m"):
        images.load("fashion_mnist", tmp_path)
    monkeypatch.setenv("NMJAX_DATA", str(tmp_path))  # files whose folder does not say whose they are
    with pytest.raises(
        Missing, match="found none of mnist/train.* MNIST: python -m experiments.data get mnist. Or put"
    ):
        images.load("mnist")
    write_mnist(tmp_path / "fashion-mnist", mnist_arrays("fashion_mnist"))
    assert images.load("fashion_mnist", tmp_path).classes[0] == "T-shirt/top"
    assert images.load("mnist", tmp_path).classes[0] == "0"


@pytest.mark.parametrize("name", ["cifar-10-python.tar.gz", "cifar-10-batches-py", "data_batch_1"])
def test_for_pickles_of_cifar10_the_binary_archive_is_named(tmp_path, name):
    write(tmp_path / name / "data_batch_1" if "batches" in name else tmp_path / name)
    write_cifar("cifar-10-batches-bin", cifar_arrays())  # in the current folder: another copy, perhaps a lossy one
    command = f"python -m experiments.data get cifar10 --dir={tmp_path}. It is https://www.cs.toronto.edu/~kriz/"
    with pytest.raises(Missing, match=f"{name} holds pickles, which nmjax does not read. .*: {command}cifar-10-binary"):
        images.load("cifar10", tmp_path)
    write(tmp_path / "cifar-10-binary.tar.gz", tar(cifar_files(cifar_arrays())))
    assert len(images.load("cifar10", tmp_path).test[1]) == 4


def test_damaged_idx_files_are_named(tmp_path):
    x, y, x_test, y_test = mnist_arrays("mnist")
    names, place = published.IDX, tmp_path / "mnist"
    for name, data, why in (
        (names[0], idx_bytes(x)[:-1], rf"{names[0]} claims the shape \(30, 28, 28\), and has 23519 bytes"),
        (names[0], idx_bytes(x) + b"?", "and has 23521"),
        (names[0], bytes((0, 0, 8, 3, 0, 0, 0, 0)) + b"\xff" * 8, r"claims the shape \(0, 4294967295, 4294967295\)"),
        (names[1], idx_bytes(y)[:6], f"{names[1]} is no IDX file of bytes with 1 axes"),
        (names[2], idx_bytes(y_test), f"{names[2]} is no IDX file of bytes with 3 axes: .* 00 00 08 01"),
        (names[3], idx_bytes(y_test[1:]), r"mnist: test has labels of uint8 \(11,\), not .* each of 12 images"),
        (names[3], idx_bytes(y_test + np.uint8(9)), "mnist: test has labels from 9 to "),
        (names[0], idx_bytes(x[:, 1:]), r"mnist: train has images of \(27, 28, 1\), not of \(28, 28, 1\)"),
    ):
        write_mnist(place, (x, y, x_test, y_test))
        write(place / name, data)
        with pytest.raises(Mistake, match=why):
            images.load("mnist", tmp_path)
    (place / names[3]).unlink()
    with pytest.raises(Mistake, match=f"has no {names[3]} or"):
        images.load("mnist", tmp_path)
    write(place / f"{names[3]}.gz", gzip.compress(idx_bytes(y_test))[:-9])
    with pytest.raises(Mistake, match=f"{names[3]}.gz cannot be read"):
        images.load("mnist", tmp_path)
    np.savez(tmp_path / "fashion-mnist.npz", x_train=x)
    with pytest.raises(Mistake, match="has no y_train, x_test, y_test. It has x_train, so"):
        images.load("fashion_mnist", tmp_path)
    write(tmp_path / "fashion-mnist.npz", (tmp_path / "fashion-mnist.npz").read_bytes()[:-40])
    with pytest.raises(Mistake, match="fashion-mnist.npz cannot be read"):
        images.load("fashion_mnist", tmp_path)


def header(kind: bytes, link: str = "") -> tarfile.TarInfo:
    (info := tarfile.TarInfo()).type, info.linkname = kind, link
    return info


def archives() -> dict[str, tuple[bytes, str]]:
    """Return archives that are damaged or made by an enemy, and the reason why each is refused."""
    files = cifar_files(cifar_arrays())
    third = "data_batch_3.bin should hold .*, and has {} bytes. Download it again"
    (info := header(tarfile.GNUTYPE_SPARSE)).name = "cifar-10-batches-bin/data_batch_3.bin"
    hole = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    hole[386:494] = b"0" * 24 * 4 + b"\0" + b"77777777777"  # no data, of 8 GB
    hole[148:156] = b"%06o\0 " % (sum(hole[:148]) + sum(hole[156:]) + 8 * 32)
    sparse = gzip.compress(bytes(hole) + gzip.decompress(tar({n: d for n, d in files.items() if "3" not in n})))
    return {
        "no archive": (b"what", "cannot be read"),
        "an early end": (tar(files)[:-3000], "cannot be read"),
        "a file less": (tar({n: d for n, d in files.items() if "3" not in n}), third.format(0)),
        "half a record": (tar(files | {"data_batch_3.bin": files["data_batch_3.bin"][:-1]}), third.format("12,291")),
        "too many records": (tar(files | {"data_batch_3.bin": bytes(3073 * 10_001)}), third.format(0)),
        "a link": (tar(files | {"data_batch_3.bin": (header(tarfile.SYMTYPE, "/etc/passwd"), b"")}), third.format(0)),
        "many files": (tar({f"{i}": b"" for i in range(101)} | files), "data_batch_1.bin should hold .* has 0 bytes"),
        "a sparse file of 8 GB": (sparse, third.format(0)),
        "a bomb": (gzip.compress(bytes(16 << 20)) * 13, "it unpacks to more than 201,326,592 bytes"),
        "a label of 10": (tar(files | {"test_batch.bin": b"\x0a" + bytes(3072)}), "test has labels from 10 to 10"),
    }


@pytest.mark.parametrize("name", archives())
def test_damaged_archives_of_cifar10_are_refused_and_none_is_extracted(tmp_path, here, name):
    data, why = archives()[name]
    write(tmp_path / "in" / "cifar-10-binary.tar.gz", data)
    with pytest.raises(Mistake, match=f"cifar-10-binary.tar.gz.*{why}") as refused:
        images.load("cifar10", tmp_path / "in")
    assert str(refused.value).isprintable()
    assert not [*here.iterdir()]
    assert [path.name for path in (tmp_path / "in").iterdir()] == ["cifar-10-binary.tar.gz"]


def test_fashion_mnist_of_the_pack():
    if not (PACKS / "fashion_mnist.npz").exists():
        pytest.skip(f"no fashion_mnist.npz in {PACKS}")
    got = images.load("fashion_mnist", PACKS)
    assert (got.train[0].shape, got.test[0].shape) == ((60_000, 28, 28, 1), (10_000, 28, 28, 1))
    assert np.bincount(got.test[1]).tolist() == [1000] * 10
    assert got.test[1][:10].tolist() == images._FIRST["fashion_mnist"]


# ---- a pack of JPEGs ----


def jpeg(pixels: np.ndarray) -> np.ndarray:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=75)
    return np.frombuffer(file.getvalue(), np.uint8)


def pack(files, cut=623) -> dict[str, np.ndarray]:
    """Return the arrays of a pack of JPEGs with one header, the last of them to test."""
    scans, lengths = [file[cut:] for file in files], np.array([len(file) - cut for file in files])
    arrays = {"jpeg_header": files[0][:cut], "scan_train": np.concatenate(scans[:-1]), "scan_test": scans[-1]}
    arrays |= {"len_train": lengths[:-1], "len_test": lengths[-1:]}
    return arrays | {"y_train": np.arange(len(files) - 1, dtype=np.uint8), "y_test": np.array([7], np.uint8)}


def test_a_pack_of_jpegs_has_the_pixels_of_each_and_is_checked():
    files = [jpeg(x) for x in np.random.default_rng(0).integers(0, 256, (7, 32, 32, 3), dtype=np.uint8)]
    arrays = pack(files)
    np.savez("cifar10_jpegscan.npz", **arrays)
    for _ in range(2):
        got = images.load("cifar10")
        both = np.concatenate([got.train[0], got.test[0]])
        np.testing.assert_array_equal(both, [np.asarray(Image.open(io.BytesIO(file.tobytes()))) for file in files])
        assert (got.train[1].tolist(), got.test[1].tolist()) == ([*range(6)], [7])
        assert "lossy" in got.note
    for changes, why in (
        ({"scan_test": arrays["scan_test"][:-1]}, "do not fit together"),
        ({"len_train": np.full(6, -5)}, "do not fit together"),
        ({"y_train": np.zeros(0, int), "len_train": np.zeros(0, int)}, "do not fit together"),
        ({"y_test": np.array([-1])}, "test has labels from -1 to -1"),
        ({"y_train": np.full(6, 0.5)}, "not rows of bytes, lengths and labels"),
        ({"scan_train": np.zeros(9)}, "not rows of bytes, lengths and labels"),
        ({"jpeg_header": np.zeros((3, 3), np.uint8)}, "not rows of bytes, lengths and labels"),
        ({"jpeg_header": np.zeros(9, np.uint8)}, "image 0 is broken"),
        (pack([jpeg(np.zeros((9000, 9000), np.uint8))] * 3, 300), "image 0 is broken .it is 9000 x 9000, not 32 x 32"),
    ):
        np.savez("cifar10_jpegscan.npz", **arrays | changes)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with pytest.raises(Mistake, match=why):
            images.load("cifar10")
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 60 << 10  # the pixels take 81 MB


@pytest.mark.slow
def test_cifar10_of_the_pack(monkeypatch):
    features = pytest.importorskip("PIL.features")
    if not (PACKS / "cifar10_jpegscan.npz").exists():
        pytest.skip(f"no cifar10_jpegscan.npz in {PACKS}")
    got = images.load("cifar10", PACKS)
    (x, y), (x_test, y_test) = got.train, got.test
    assert np.bincount(y).tolist() == [5000] * 10
    assert np.bincount(y_test).tolist() == [1000] * 10
    np.testing.assert_allclose(x[::7].mean((0, 1, 2)) / 255, [0.4913, 0.4821, 0.4465], atol=5e-3)
    if features.version("libjpeg_turbo") == "3.2.0":  # another decoder may differ by a count
        digests = [hashlib.sha256(part.tobytes()).hexdigest()[:8] for part in (x, x_test)]
        assert digests == ["bf3aabd5", "5a6aa818"]
    monkeypatch.setitem(sys.modules, "PIL", None)  # a second time it is not decoded
    np.testing.assert_array_equal(images.load("cifar10", PACKS).test[0], x_test)


# ---- an npz of one's own ----


@pytest.mark.parametrize(
    ("x", "want"),
    [
        (X, X),
        (X / np.float64(255), X),
        ((X / 255).astype(np.float16), X),
        (X.astype(np.float32), X),
        (X.astype(">i8"), X),
        (X[..., 0], X[..., :1]),
        (np.asfortranarray(X), X),
    ],
)
def test_pixels_that_are_clear(x, want):
    np.savez("a.npz", x=x[:30], y=Y[:30], x_test=x[30:], y_test=Y[30:])
    got = images.load("a.npz")
    for have, wanted in zip((*got.train, *got.test), (want[:30], Y[:30], want[30:], Y[30:]), strict=True):
        np.testing.assert_array_equal(have, wanted)
    assert (got.name, got.classes) == ("a.npz", ("0", "1", "2", "3"))
    assert (got.train[0].dtype, got.train[1].dtype) == (np.uint8, np.int32)
    assert got.note == ("numbers from 0 to 1 became 8 bits" if x.max() <= 1 else "")


def test_an_npz_without_a_test_split_is_split_by_class(here):
    np.savez_compressed("b.npz", x_train=X, y_train=Y[:, None])
    got = images.load("b.npz", here)
    assert np.bincount(got.test[1]).tolist() == [1, 1, 1, 1]
    both = sorted(x.tobytes() for x in (*got.train[0], *got.test[0]))
    assert both == sorted(x.tobytes() for x in X)  # each image once
    assert got.note == "b.npz has no x_test: an evenly spaced tenth of its images is the test split"
    np.testing.assert_array_equal(got.test[0], images.load("b.npz").test[0])


WRONG = {
    "no y": ({"x": X}, "a.npz holds x. An image set has x"),
    "half a test split": ({"x": X, "y": Y, "x_test": X}, "holds x, y, x_test. An image set has x"),
    "two": ({"x": X, "x_train": X, "y": Y, "y_train": Y}, "An image set has x"),
    "flat": ({"x": X.reshape(40, -1), "y": Y}, r"x is \(40, 108\), not images"),
    "none": ({"x": X[:0], "y": Y[:0]}, r"x is \(0, 6, 6, 3\), not images"),
    "channels first": ({"x": X.transpose(0, 3, 1, 2), "y": Y}, r"channels first. Save x.transpose\(0, 2, 3, 1\)"),
    "two shapes": ({"x": X, "y": Y, "x_test": X[:, :5], "y_test": Y}, r"test has images of \(5, 6, 3\), not of \(6, 6"),
    "below 0": ({"x": X / 127.5 - 1, "y": Y}, "float64 from -1 to 1, and it is not clear"),
    "above 255": ({"x": X.astype(int) * 257, "y": Y}, "int64 from 0 to 65535, and it is not clear"),
    "0 and 1 as numbers": ({"x": (X > 9).astype(int), "y": Y}, "int64 from 0 to 1, and it is not clear"),
    "parts of 255": ({"x": X * 0.7, "y": Y}, "and it is not clear"),
    "NaN": ({"x": np.where(X > 9, X / 255, np.nan), "y": Y}, "from nan to nan"),
    "booleans": ({"x": X > 9, "y": Y}, "its images are bool"),
    "words": ({"x": X.astype(str), "y": Y}, "its images are <U3"),
    "labels of floats": (
        {"x": X, "y": Y / 1},
        r"labels of float64 \(40,\), not one whole number for each of 40 images",
    ),
    "too few labels": ({"x": X, "y": Y[:39]}, r"labels of int64 \(39,\)"),
    "one-hot": ({"x": X, "y": np.eye(4)[Y]}, r"labels of float64 \(40, 4\)"),
    "labels from 1": ({"x": X, "y": Y + 1}, "its labels are from 1 to 4. Number the classes from 0"),
    "labels below 0": ({"x": X, "y": Y - 1}, "its labels are from -1 to 2"),
    "a gap": ({"x": X, "y": Y + (Y > 2)}, "its labels are from 0 to 4. Number the classes from 0, without gaps"),
    "a large label": ({"x": X, "y": np.where(Y > 2, 2**60, Y)}, "its labels are from 0 to 1152921504606846976"),
    "a class to test alone": ({"x": X, "y": Y, "x_test": X, "y_test": Y + 1}, "from 0 to 4"),
    "objects": ({"x": np.array([None, 1]), "y": Y}, "x holds object, not plain numbers"),
    "fields": ({"x": np.zeros(3, "u1,f4"), "y": Y}, "x holds .* not plain numbers"),
}


@pytest.mark.parametrize("name", WRONG)
def test_an_npz_that_is_not_clear(name):
    arrays, why = WRONG[name]
    np.savez("a.npz", **arrays)
    with pytest.raises(Mistake, match=why):
        images.load("a.npz")


def test_images_that_are_not_square_are_refused_for_a_vit():
    """A ResNet takes them."""
    np.savez("wide.npz", x=np.repeat(X, 2, axis=2), y=Y)
    config_of = lambda name: command.read(
        ["launch.py", f"--config={config_files.ROOT}/configs/{name}", "--config.data.name=wide.npz"]
    )
    why = (
        "config.data.name='wide.npz' holds images of 6 x 12 pixels, and a ViT takes square images. Pad, crop or resize"
    )
    with pytest.raises(Mistake, match=why):
        tasks.task(config_of("vit_24.py").config)
    assert tasks.task(config_of("resnet_24.py:smoke").config).shape == (6, 12, 3)


# ---- wrong headers, and what unpacks without end ----


def member(shape, descr="|u1", data=b"", version=1) -> bytes:
    """Return a .npy with a header and data that may not fit together."""
    file = io.BytesIO()
    write = {1: np.lib.format.write_array_header_1_0, 2: np.lib.format.write_array_header_2_0}[version]
    write(file, {"descr": descr, "fortran_order": False, "shape": shape})
    return file.getvalue() + data


def archive(path, members, compression=zipfile.ZIP_DEFLATED):
    with zipfile.ZipFile(path, "w", compression) as file:
        for name, data in members.items():
            file.writestr(f"{name}.npy", data)


LIES = {
    "4 TB": (member((1 << 42,)), "x should hold uint8 .4398046511104,., 4,398,046,511,104 bytes, and holds 0"),
    "too short": (member((9,), data=bytes(8)), "9 bytes, and holds 8"),
    "too long": (member((9,), data=bytes(10), version=2), "9 bytes, and holds 10"),
    "below 0": (member((-2, -3), data=bytes(6)), "should hold"),
    "no header": (b"no header", ""),
    "a long header": (b"\x93NUMPY\x02\x00" + (1 << 30).to_bytes(4, "little") + b"{" * 99, ""),
    "a program": (member((1,), "|O", bytes(8)), "x holds object, not plain numbers"),
    "a dtype of dtypes": (member((1,), [("a", "|O")], bytes(8)), "x holds"),
    "version 9": (b"\x93NUMPY\x09\x00" + bytes(50), "version 9.0"),
    "many lines": (member((9,) * 6000, data=b"0"), "Header info length .*large.* To allow"),
}


@pytest.mark.parametrize("name", LIES)
def test_headers_that_lie(name, here):
    data, why = LIES[name]
    archive("a.npz", {"x": data, "y": member((1,), data=b"0")})
    with pytest.raises(Mistake, match=rf"a.npz cannot be read \(.*{why}") as error:
        reading.arrays(here / "a.npz", ("x", "y"))
    assert "\n" not in str(error.value)


def test_names_in_a_damaged_file_are_shown_on_one_line():
    odd = {"a\nb": b"", "e\x1b[2J": b"", "long" * 200: b""} | {f"{'z' * 90}{i}": b"" for i in range(50)}
    archive("mnist.npz", odd)
    with pytest.raises(Mistake, match=r"has no x_train, .*. It has a b, e\\x1b\[2J, longlong") as error:
        images.load("mnist")
    assert str(error.value).isprintable()
    assert len(str(error.value)) < 800


BOMBS = """
import resource
from experiments.data import images, text
from experiments.errors import Mistake
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for load in (lambda: images.load("bomb.npz"), lambda: images.load("mnist", "."), lambda: images.load("bz.npz")):
    try:
        load()
    except Mistake as error:
        print(str(error)[:90])
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024, "MiB")
"""


@pytest.mark.slow
def test_bombs_are_refused_before_they_take_memory(here):
    """Small files that would unpack to gigabytes."""
    zeros = gzip.compress(bytes(1 << 20)) * 1100  # members of gzip follow one another
    write(f"mnist/{published.IDX[0]}.gz", zeros)
    write("bomb.txt.gz", zeros)
    y = member((1,), data=b"0")
    with zipfile.ZipFile("bomb.npz", "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("y.npy", y)
        with file.open("x.npy", "w", force_zip64=True) as out:
            out.write(member((1 << 30,)))
            for _ in range(1 << 10):
                out.write(bytes(1 << 20))
    archive("bz.npz", {"x": member((9,), data=bytes(9)), "y": y}, zipfile.ZIP_BZIP2)
    child = {"env": os.environ | {"PYTHONPATH": str(config_files.ROOT)}, "capture_output": True, "text": True}
    said = subprocess.run([sys.executable, "-c", BOMBS], **child).stdout.splitlines()
    assert "bomb.npz cannot be read (it unpacks to 1,073,742," in said[0]
    assert "unpacks to more than 268,435,456 bytes" in said[1]
    assert "x is compressed in a way that np.savez does not use" in said[2]
    assert int(said[3].split()[0]) < 700
    with pytest.raises(Mistake, match=r"cannot be read \(it unpacks to more than 1,073,741,824 bytes\)"):
        text.load("bomb.txt.gz")


PIPES = {
    "cifar-10-batches-bin/data_batch_1.bin": lambda: images.load("cifar10"),
    "cifar-10-binary.tar.gz": lambda: images.load("cifar10"),
    "cifar10_jpegscan.npz": lambda: images.load("cifar10"),
    f"mnist/{published.IDX[0]}": lambda: images.load("mnist"),
    f"mnist/{published.IDX[0]}.gz": lambda: images.load("mnist"),
    "a.npz": lambda: images.load("a.npz"),
    "a.txt": lambda: text.load("a"),
    "texts/c.txt.xz": lambda: text.load("texts"),
    "words.json": lambda: text.load("pydoc", tokenizer="words"),
}


@pytest.mark.parametrize("name", PIPES)
def test_a_named_pipe_is_refused_and_not_waited_for(here, name):
    (here / name).parent.mkdir(exist_ok=True)
    os.mkfifo(here / name)
    with pytest.raises(Mistake, match="it is not a regular file"):
        PIPES[name]()


def test_devices_and_folders_are_refused():
    for path in ("/dev/zero", "/dev/null", "/"):
        with pytest.raises(OSError, match="not a regular file"):
            reading.opened(path)
