"""Data sets found and read: real files of every kind, whole and damaged."""

import gzip
import hashlib
import io
import os
import pickle
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest

from experiments.data import cache, idx, images
from experiments.data.find import find
from experiments.errors import Mistake

PACKS = Path(os.environ.get("NMJAX_DATA") or Path(__file__).parents[4] / "shared" / "data")


def pack(name):
    if not (PACKS / name).exists():
        pytest.skip(f"no {name} in {PACKS}")
    return PACKS


@pytest.fixture(autouse=True)
def _nothing_but_here(monkeypatch, tmp_path):
    monkeypatch.delenv("NMJAX_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")


def write(path: Path, data: bytes = b"") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


# ---- where ----


def test_find_prefers_the_place_asked_for(monkeypatch, tmp_path):
    places = [tmp_path / place for place in ("asked", "cwd", "env", "system")]
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
    with pytest.raises(Mistake) as e:
        find(("a", "b"), tmp_path, ("/nowhere",), "Buy it.")
    assert str(e.value) == (
        f"found none of a, b in {tmp_path} (--config.data.dir), the current folder, "
        "$NMJAX_DATA (not set), /nowhere. Buy it."
    )
    with pytest.raises(Mistake, match="found no a in the current folder"):
        find(("a",))
    with pytest.raises(Mistake, match="--config.data.dir is '/nowhere', which does not exist"):
        find(("a",), "/nowhere")
    monkeypatch.setenv("NMJAX_DATA", str(write(tmp_path / "file")))
    with pytest.raises(Mistake, match="NMJAX_DATA is .* which is a file, not a folder"):
        find(("a",))


# ---- what is kept ----


def test_kept_makes_once(tmp_path):
    made = []

    def make():
        made.append(1)
        return {"a": np.arange(5), "b": np.ones((2, 3), np.uint8)}

    for _ in range(2):
        got = cache.kept("name", make)
        np.testing.assert_array_equal(got["a"], np.arange(5))
        assert got["b"].dtype == np.uint8
    assert len(made) == 1
    assert [path.name for path in (tmp_path / "cache" / "nmjax").iterdir()] == ["name.npz"]


def test_kept_makes_again_what_is_damaged(tmp_path, caplog):
    cache.kept("name", lambda: {"a": np.arange(1000)})
    path = tmp_path / "cache" / "nmjax" / "name.npz"
    data = path.read_bytes()
    alone, locked, no_array = data.index(b"\x93NUMPY"), bytearray(data), io.BytesIO()
    locked[6] = locked[data.index(b"PK\x01\x02") + 8] = 1  # "encrypted"
    with zipfile.ZipFile(no_array, "w") as file:
        file.writestr("a.npy", b"no array")
    cut = (data[:600], b"", data[:600] + b"?" + data[601:])
    for damaged in (*cut, data[alone : data.index(b"PK\x01\x02")], bytes(locked), no_array.getvalue()):
        path.write_bytes(damaged)
        np.testing.assert_array_equal(cache.kept("name", lambda: {"a": np.arange(1000)})["a"], np.arange(1000))
        assert path.read_bytes() == data
    assert caplog.text.count("it will be made again") == 6


def test_kept_where_nothing_can_be_written(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("XDG_CACHE_HOME", str(write(tmp_path / "file")))
    assert cache.kept("name", lambda: {"a": np.arange(3)})["a"].tolist() == [0, 1, 2]
    assert "XDG_CACHE_HOME" in caplog.text


# ---- digits ----


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


def test_an_unknown_set():
    with pytest.raises(
        Mistake, match="no image set is called 'cifar-10'. Did you mean cifar10[?] Write one of digits, "
    ):
        images.load("cifar-10")


# ---- CIFAR-10 ----


class Python2(pickle._Pickler):
    """Pickles as Python 2 did: strings and bytes are its one kind of string."""

    dispatch = dict(pickle._Pickler.dispatch)

    def save_string(self, value):
        data = value if isinstance(value, bytes) else value.encode("latin-1")
        self.write(pickle.BINSTRING + len(data).to_bytes(4, "little") + data)
        self.memoize(value)

    dispatch[str] = dispatch[bytes] = save_string


def python2(value) -> bytes:
    file = io.BytesIO()
    Python2(file, 2).dump(value)
    return file.getvalue().replace(b"numpy._core.multiarray", b"numpy.core.multiarray")


def cifar_files(rng):
    """Six files of 4 images each, and what they hold."""
    x, y = rng.integers(0, 256, (24, 32, 32, 3), dtype=np.uint8), rng.integers(0, 10, 24)
    rows = x.transpose(0, 3, 1, 2).reshape(24, 3072)  # planes of red, green, blue
    names = [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]
    files = {
        name: python2({"batch_label": name, "labels": y[i : i + 4].tolist(), "data": rows[i : i + 4].copy()})
        for name, i in zip(names, range(0, 24, 4), strict=True)
    }
    return files, x, y


@pytest.mark.parametrize("kind", ["folder", "files", "archive"])
def test_cifar10_as_it_is_published(tmp_path, kind):
    files, x, y = cifar_files(np.random.default_rng(0))
    if kind == "archive":
        with tarfile.open(tmp_path / "cifar-10-python.tar.gz", "w:gz") as archive:
            for name, data in files.items():
                info = tarfile.TarInfo(f"cifar-10-batches-py/{name}")
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
    for name, data in files.items() if kind != "archive" else ():
        write(tmp_path / ("cifar-10-batches-py" if kind == "folder" else "") / name, data)
    got = images.load("cifar10", tmp_path)
    for (a, b), part in ((got.train, slice(0, 20)), (got.test, slice(20, 24))):
        np.testing.assert_array_equal(a, x[part])
        np.testing.assert_array_equal(b, y[part])
        assert (a.dtype, b.dtype) == (np.uint8, np.int32)
    assert got.note == ""
    if kind == "archive":
        path = tmp_path / "cifar-10-python.tar.gz"
        path.write_bytes(path.read_bytes()[:-3000])
        with pytest.raises(Mistake, match="cifar-10-python.tar.gz: .* cannot be read"):
            images.load("cifar10", tmp_path)


class Evil:
    def __reduce__(self):
        return os.mkdir, ("evil",)


def test_a_pickle_is_not_run(tmp_path):
    files, *_ = cifar_files(np.random.default_rng(0))
    for name, data in files.items():
        write(tmp_path / "cifar-10-batches-py" / name, data)
    bad = tmp_path / "cifar-10-batches-py" / "data_batch_3"
    for data, why in (
        (pickle.dumps(Evil(), 2), "names (posix|nt).mkdir, which CIFAR-10 does not"),
        (files["data_batch_3"][:-50], "data_batch_3 is no batch"),
        (python2({"labels": [1, 2], "batch_label": "x"}), "no batch of CIFAR-10: it has no array called data"),
        (python2({"labels": [1, 2], "data": np.zeros((3, 3072), np.uint8)}), "fit 9216 bytes and 2 labels"),
    ):
        bad.write_bytes(data)
        with pytest.raises(Mistake, match=why):
            images.load("cifar10", tmp_path)
    assert not Path("evil").exists()
    bad.unlink()
    with pytest.raises(Mistake, match="data_batch_3 cannot be read"):
        images.load("cifar10", tmp_path)


def test_cifar10_of_a_small_pack(tmp_path):
    """Every JPEG's own header is the shared one; the pixels are what Pillow says."""
    Image = pytest.importorskip("PIL.Image")
    rng, files = np.random.default_rng(0), []
    for _ in range(7):
        file = io.BytesIO()
        Image.fromarray(rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(file, "JPEG", quality=75)
        files.append(file.getvalue())
    header = files[0][:623]
    scans = [file[623:] for file in files]
    join = lambda scans: np.frombuffer(b"".join(scans), np.uint8)
    arrays = {"jpeg_header": np.frombuffer(header, np.uint8), "y_train": np.arange(5, dtype=np.uint8)}
    arrays |= {"len_train": np.array([*map(len, scans[:5])], np.uint16), "scan_train": join(scans[:5])}
    arrays |= {"len_test": np.array([*map(len, scans[5:])], np.uint16), "scan_test": join(scans[5:])}
    np.savez(tmp_path / "cifar10_jpegscan.npz", **arrays, y_test=np.arange(2, dtype=np.uint8))
    for _ in range(2):
        got = images.load("cifar10", tmp_path)
        both = np.concatenate([got.train[0], got.test[0]])
        np.testing.assert_array_equal(both, [np.asarray(Image.open(io.BytesIO(file))) for file in files])
        assert got.test[1].tolist() == [0, 1]
        assert "lossy" in got.note
    np.savez(tmp_path / "cifar10_jpegscan.npz", **arrays | {"scan_test": join(scans[5:])[:-1]}, y_test=np.arange(2))
    with pytest.raises(Mistake, match="do not fit together"):
        images.load("cifar10", tmp_path)


@pytest.mark.slow
def test_cifar10_of_the_pack(monkeypatch):
    features = pytest.importorskip("PIL.features")
    got = images.load("cifar10", pack("cifar10_jpegscan.npz"))
    assert got.note == "CIFAR-10 as a lossy JPEG copy (quality 75)"
    (x, y), (x_test, y_test) = got.train, got.test
    assert (x.shape, x_test.shape) == ((50_000, 32, 32, 3), (10_000, 32, 32, 3))
    assert np.bincount(y).tolist() == [5000] * 10
    assert np.bincount(y_test).tolist() == [1000] * 10
    np.testing.assert_allclose(x[::7].mean((0, 1, 2)) / 255, [0.4913, 0.4821, 0.4465], atol=5e-3)
    if features.version("libjpeg_turbo") == "3.2.0":  # another decoder may differ by a count
        digests = [hashlib.sha256(part.tobytes()).hexdigest()[:8] for part in (x, x_test)]
        assert digests == ["bf3aabd5", "5a6aa818"]
    monkeypatch.setitem(__import__("sys").modules, "PIL", None)  # a second time it is not decoded
    np.testing.assert_array_equal(images.load("cifar10", PACKS).test[0], x_test)


# ---- MNIST ----


def idx_bytes(x: np.ndarray) -> bytes:
    return bytes((0, 0, 8, x.ndim)) + b"".join(n.to_bytes(4, "big") for n in x.shape) + x.tobytes()


def mnist_arrays(first):
    rng = np.random.default_rng(0)
    x, x_test = (rng.integers(0, 256, (n, 28, 28), dtype=np.uint8) for n in (30, 12))
    y, y_test = (rng.integers(0, 10, n, dtype=np.uint8) for n in (30, 12))
    y_test[:10] = images._FIRST[first]
    return x, y, x_test, y_test


def write_mnist(place, arrays, end=""):
    for name, x in zip(idx.FILES, arrays, strict=True):
        write(place / f"{name}{end}", gzip.compress(idx_bytes(x)) if end else idx_bytes(x))


@pytest.mark.parametrize(
    ("name", "place", "end"),
    [
        ("mnist", "mnist", ""),
        ("mnist", "MNIST/raw", ".gz"),
        ("mnist", ".", ".gz"),
        ("fashion_mnist", "fashion-mnist", ".gz"),
        ("fashion_mnist", "FashionMNIST/raw", ""),
        ("fashion_mnist", "fashion_mnist.npz", ""),
        ("mnist", "mnist.npz", ""),
    ],
)
def test_mnist_and_fashion_mnist(tmp_path, name, place, end):
    arrays = mnist_arrays(name)
    if place.endswith(".npz"):
        np.savez(tmp_path / place, **dict(zip(("x_train", "y_train", "x_test", "y_test"), arrays, strict=True)))
    else:
        write_mnist(tmp_path / place, arrays, end)
    got = images.load(name, tmp_path)
    for x, want in zip((*got.train, *got.test), arrays, strict=True):
        np.testing.assert_array_equal(x, want[..., None] if want.ndim == 3 else want)
    assert (got.train[0].dtype, got.train[1].dtype) == (np.uint8, np.int32)


def test_mnist_is_not_read_as_fashion_mnist(monkeypatch, tmp_path):
    write_mnist(tmp_path, mnist_arrays("mnist"))
    with pytest.raises(Mistake, match="is mnist, and config.data.name is 'fashion_mnist'. Fashion-MNIST: python -m"):
        images.load("fashion_mnist", tmp_path)
    monkeypatch.setenv("NMJAX_DATA", str(tmp_path))  # files whose folder does not say whose they are
    with pytest.raises(Mistake, match="found none of mnist/train"):
        images.load("mnist")
    write_mnist(tmp_path / "fashion-mnist", mnist_arrays("fashion_mnist"))
    assert images.load("fashion_mnist", tmp_path).classes[0] == "T-shirt/top"
    assert images.load("mnist", tmp_path).classes[0] == "0"


def test_damaged_idx_files_are_named(tmp_path):
    x, y, x_test, y_test = mnist_arrays("mnist")
    place = tmp_path / "mnist"
    for name, data, why in (
        (idx.FILES[0], idx_bytes(x)[:-1], f"{idx.FILES[0]} should hold .* = 23520 bytes, and has 23519"),
        (idx.FILES[0], idx_bytes(x) + b"?", "and has 23521"),
        (idx.FILES[1], idx_bytes(y)[:6], f"{idx.FILES[1]} is no IDX file of bytes with 1 axes"),
        (idx.FILES[2], idx_bytes(y_test), f"{idx.FILES[2]} is no IDX file of bytes with 3 axes: .* 00 00 08 01"),
        (idx.FILES[3], idx_bytes(y_test[1:]), f"{idx.FILES[2]} holds 12 images, and the file of labels 11 labels"),
        (idx.FILES[3], idx_bytes(y_test + np.uint8(9)), "labels of 0..9, got"),
    ):
        write_mnist(place, (x, y, x_test, y_test))
        write(place / name, data)
        with pytest.raises(Mistake, match=why):
            images.load("mnist", tmp_path)
    (place / idx.FILES[3]).unlink()
    with pytest.raises(Mistake, match=f"has no {idx.FILES[3]} or"):
        images.load("mnist", tmp_path)
    write(place / f"{idx.FILES[3]}.gz", gzip.compress(idx_bytes(y_test))[:-9])
    with pytest.raises(Mistake, match=f"{idx.FILES[3]}.gz cannot be read"):
        images.load("mnist", tmp_path)
    np.savez(tmp_path / "fashion-mnist.npz", x_train=x)
    with pytest.raises(Mistake, match="has no y_train, x_test, y_test. It has x_train, so"):
        images.load("fashion_mnist", tmp_path)
    write(tmp_path / "fashion-mnist.npz", (tmp_path / "fashion-mnist.npz").read_bytes()[:-40])
    with pytest.raises(Mistake, match="fashion-mnist.npz cannot be read"):
        images.load("fashion_mnist", tmp_path)


def test_fashion_mnist_of_the_pack():
    got = images.load("fashion_mnist", pack("fashion_mnist.npz"))
    assert (got.train[0].shape, got.test[0].shape) == ((60_000, 28, 28, 1), (10_000, 28, 28, 1))
    assert np.bincount(got.test[1]).tolist() == [1000] * 10
    assert got.test[1][:10].tolist() == images._FIRST["fashion_mnist"]


@pytest.mark.parametrize("split", ["train", "test"])
def test_a_set_without_images_is_refused(tmp_path, split):
    x, y = np.zeros((20, 28, 28), np.uint8), np.arange(20) % 10
    arrays = {"x_train": x, "y_train": y, "x_test": x, "y_test": y}
    arrays |= {f"x_{split}": x[:0], f"y_{split}": y[:0]}
    np.savez(tmp_path / "mnist.npz", **arrays)
    with pytest.raises(
        Mistake, match=r"expected images of uint8 \(n, 28, 28\) and n labels of 0..9, got uint8 \(0, 28"
    ):
        images.load("mnist", tmp_path)
