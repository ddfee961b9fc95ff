"""A user's own images: .npz files and folders of classes; files with wrong headers, without an end, or not regular."""

import gzip
import io
import lzma
import os
import resource
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest

from experiments import command, config_files
from experiments.data import folder, idx, images, reading, text
from experiments.errors import Missing, Mistake
from experiments.training import tasks

X = np.random.default_rng(0).integers(0, 256, (40, 6, 6, 3), dtype=np.uint8)
Y = np.arange(40) % 4


@pytest.fixture(autouse=True)
def _nothing_but_here(monkeypatch, tmp_path):
    monkeypatch.delenv("NMJAX_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


# ---- npz ----


def test_an_npz_with_a_test_split():
    np.savez("a.npz", x=X[:30], y=Y[:30], x_test=X[30:], y_test=Y[30:])
    got = images.load("a.npz")
    for have, want in zip((*got.train, *got.test), (X[:30], Y[:30], X[30:], Y[30:]), strict=True):
        np.testing.assert_array_equal(have, want)
    assert (got.name, got.classes, got.note) == ("a.npz", ("0", "1", "2", "3"), "")
    assert (got.train[0].dtype, got.train[1].dtype) == (np.uint8, np.int32)


def test_an_npz_without_one_is_split_by_class(tmp_path):
    np.savez_compressed("b.npz", x_train=X, y_train=Y[:, None])
    got = images.load("b.npz", tmp_path)
    assert np.bincount(got.test[1]).tolist() == [1, 1, 1, 1]
    assert len(got.train[1]) == 36
    both = sorted(x.tobytes() for x in (*got.train[0], *got.test[0]))
    assert both == sorted(x.tobytes() for x in X)  # each image once
    assert got.note == "b.npz has no x_test: an evenly spaced tenth of its images is the test split"
    again = images.load("b.npz")
    np.testing.assert_array_equal(got.test[0], again.test[0])


@pytest.mark.parametrize(
    ("x", "want"),
    [
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
    np.testing.assert_array_equal(got.train[0], want[:30])
    np.testing.assert_array_equal(got.test[0], want[30:])
    assert got.train[0].dtype == np.uint8
    assert ("8 bits" in got.note) == (x.max() <= 1)


WRONG = {
    "no y": ({"x": X}, "a.npz holds x. An image set has x"),
    "half a test split": ({"x": X, "y": Y, "x_test": X}, "holds x, y, x_test. An image set has x"),
    "two": ({"x": X, "x_train": X, "y": Y, "y_train": Y}, "An image set has x"),
    "flat": ({"x": X.reshape(40, -1), "y": Y}, r"x is \(40, 108\), not images"),
    "none": ({"x": X[:0], "y": Y[:0]}, r"x is \(0, 6, 6, 3\), not images"),
    "channels first": ({"x": X.transpose(0, 3, 1, 2), "y": Y}, r"channels first. Save x.transpose\(0, 2, 3, 1\)"),
    "two shapes": ({"x": X, "y": Y, "x_test": X[:, :5], "y_test": Y}, "its images are of two shapes"),
    "below 0": ({"x": X / 127.5 - 1, "y": Y}, "float64 from -1 to 1, and it is not clear"),
    "above 255": ({"x": X.astype(int) * 257, "y": Y}, "int64 from 0 to 65535, and it is not clear"),
    "0 and 1 as numbers": ({"x": (X > 9).astype(int), "y": Y}, "int64 from 0 to 1, and it is not clear"),
    "parts of 255": ({"x": X * 0.7, "y": Y}, "and it is not clear"),
    "NaN": ({"x": np.where(X > 9, X / 255, np.nan), "y": Y}, "from nan to nan"),
    "booleans": ({"x": X > 9, "y": Y}, "its images are bool"),
    "words": ({"x": X.astype(str), "y": Y}, "its images are <U3"),
    "labels of floats": ({"x": X, "y": Y / 1}, r"y is float64 \(40,\), not one whole number for each of 40 images"),
    "too few labels": ({"x": X, "y": Y[:39]}, r"y is int64 \(39,\)"),
    "one-hot": ({"x": X, "y": np.eye(4)[Y]}, r"y is float64 \(40, 4\)"),
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


def test_names_that_are_no_npz(tmp_path):
    with pytest.raises(Missing, match="found no b.npz in the current folder.* Give the path of the file"):
        images.load("b.npz")
    (tmp_path / "pictures").mkdir()
    with pytest.raises(Mistake, match="'pictures'. It is a folder: write --config=FILE:folder --config.data.dir=pic"):
        images.load("pictures")


# ---- wrong headers ----


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
    "no header": (b"no header", "cannot be read"),
    "a long header": (b"\x93NUMPY\x02\x00" + (1 << 30).to_bytes(4, "little") + b"{" * 99, "cannot be read"),
    "a program": (member((1,), "|O", bytes(8)), "x holds object, not plain numbers"),
    "a dtype of dtypes": (member((1,), [("a", "|O")], bytes(8)), "x holds"),
    "version 9": (b"\x93NUMPY\x09\x00" + bytes(50), "version 9.0"),
}


@pytest.mark.parametrize("name", LIES)
def test_headers_that_lie(name, tmp_path):
    data, why = LIES[name]
    archive("a.npz", {"x": data, "y": member((1,), data=b"0")})
    with pytest.raises(Mistake, match=f"a.npz cannot be read .*{why}" if "cannot" not in why else why):
        reading.arrays(tmp_path / "a.npz", ("x", "y"))


def test_what_a_damaged_file_says_is_on_one_line():
    """NumPy's reasons have several lines, and names in an archive may be long or hold any character."""
    many = member((9,) * 6000, data=b"0")
    archive("a.npz", {"x": many, "y": many})
    with pytest.raises(
        Mistake, match=r"cannot be read \(Header info length .*large.* To allow.*\.\.\.\). Copy"
    ) as error:
        images.load("a.npz")
    assert "\n" not in str(error.value)
    odd = {"a\nb": b"", "e\x1b[2J": b"", "long" * 200: b""} | {f"{'z' * 90}{i}": b"" for i in range(50)}
    archive("mnist.npz", odd)
    with pytest.raises(Mistake, match=r"has no x_train, .*. It has a b, e\\x1b\[2J, longlong") as error:
        images.load("mnist")
    assert str(error.value).isprintable()
    assert len(str(error.value)) < 800


def bombs(here: Path):
    """Small files that would unpack to gigabytes."""
    zeros = gzip.compress(bytes(1 << 20)) * 1100  # members of gzip follow one another
    (here / "bomb.txt.gz").write_bytes(zeros)
    (here / "bomb.txt.xz").write_bytes(lzma.compress(bytes(1 << 20)) * 1100)
    (here / "mnist").mkdir()
    (here / "mnist" / f"{idx.FILES[0]}.gz").write_bytes(zeros)
    parts = {"y": member((1,), data=b"0"), "x": member((1 << 30,))}
    with zipfile.ZipFile(here / "bomb.npz", "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("y.npy", parts["y"])
        with file.open("x.npy", "w", force_zip64=True) as out:
            out.write(parts["x"])
            for _ in range(1 << 10):
                out.write(bytes(1 << 20))
    archive(here / "bz.npz", {"x": member((9,), data=bytes(9)), "y": parts["y"]}, zipfile.ZIP_BZIP2)


BOMBS = """
import resource, sys
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
def test_bombs_are_refused_before_they_take_memory(tmp_path):
    bombs(tmp_path)
    root = Path(__file__).parents[3]
    child = {"env": os.environ | {"PYTHONPATH": str(root)}, "cwd": tmp_path, "capture_output": True, "text": True}
    said = subprocess.run([sys.executable, "-c", BOMBS], **child).stdout.splitlines()
    assert "bomb.npz cannot be read (it unpacks to 1,073,742," in said[0]
    assert "unpacks to more than 268,435,456 bytes" in said[1]
    assert "x is compressed in a way that np.savez does not use" in said[2]
    assert int(said[3].split()[0]) < 700


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bomb.txt.gz", "bomb.txt.xz"])
def test_texts_that_unpack_without_end(tmp_path, name):
    bombs(tmp_path)
    with pytest.raises(Mistake, match=r"cannot be read \(it unpacks to more than 1,073,741,824 bytes\)"):
        text.load(name)


# ---- what is not a regular file ----


PIPES = {
    "cifar-10-batches-py/data_batch_1": lambda: images.load("cifar10"),
    "data_batch_1": lambda: images.load("cifar10"),
    "cifar-10-python.tar.gz": lambda: images.load("cifar10"),
    "cifar10_jpegscan.npz": lambda: images.load("cifar10"),
    f"mnist/{idx.FILES[0]}": lambda: images.load("mnist"),
    f"mnist/{idx.FILES[0]}.gz": lambda: images.load("mnist"),
    "mnist.npz": lambda: images.load("mnist"),
    "a.npz": lambda: images.load("a.npz"),
    "a.txt": lambda: text.load("a"),
    "b.txt.gz": lambda: text.load("b"),
    "texts/c.txt.xz": lambda: text.load("texts"),
    "words.json": lambda: text.load("pydoc", tokenizer="words"),
}


@pytest.mark.parametrize("name", PIPES)
def test_a_named_pipe_is_refused_and_not_waited_for(tmp_path, name):
    if name == "words.json":
        pytest.importorskip("tokenizers")
    (tmp_path / name).parent.mkdir(exist_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises(Mistake, match="it is not a regular file"):
        PIPES[name]()


def test_a_pipe_among_images_is_an_image_that_cannot_be_read(tmp_path):
    pytest.importorskip("PIL")
    pytest.importorskip("grain")
    (tmp_path / "a").mkdir()
    os.mkfifo(tmp_path / "a" / "1.png")
    with pytest.raises(Mistake, match="1.png cannot be read as an image .it is not a regular file"):
        next(folder.stream([str(tmp_path / "a" / "1.png")], np.zeros(1, np.int32), 0, 1, 8, threads=1))


def test_devices_and_folders_are_refused():
    for path in ("/dev/zero", "/dev/null", "/"):
        with pytest.raises(OSError, match="not a regular file"):
            reading.opened(path)


def test_an_archive_in_a_pipe_of_another_kind(tmp_path):
    """A link in the archive to a device is not a file of CIFAR-10."""
    with tarfile.open(tmp_path / "cifar-10-python.tar.gz", "w:gz") as file:
        info = tarfile.TarInfo("cifar-10-batches-py/data_batch_1")
        info.type, info.linkname = tarfile.SYMTYPE, "/dev/zero"
        file.addfile(info)
    with pytest.raises(Mistake, match="data_batch_1 cannot be read .the archive does not hold it"):
        images.load("cifar10")


# ---- a pack of JPEGs ----


def pack(**changes):
    image = pytest.importorskip("PIL.Image")
    file = io.BytesIO()
    image.new("RGB", (32, 32), (9, 99, 199)).save(file, "JPEG")
    data = file.getvalue()
    arrays = {"jpeg_header": data[:600], "scan_train": data[600:] * 2, "scan_test": data[600:]}
    arrays = {name: np.frombuffer(value, np.uint8) for name, value in arrays.items()}
    arrays |= {"len_train": np.full(2, len(data) - 600), "len_test": np.full(1, len(data) - 600)}
    arrays |= {"y_train": np.array([1, 2]), "y_test": np.array([3])}
    np.savez("cifar10_jpegscan.npz", **arrays | changes)
    return arrays


def test_a_pack_of_jpegs_is_checked():
    pack()
    got = images.load("cifar10")
    assert np.abs(got.train[0].astype(int) - [9, 99, 199]).max() < 6
    image = pytest.importorskip("PIL.Image")
    file = io.BytesIO()
    image.new("L", (9000, 9000)).save(file, "JPEG")
    large = np.frombuffer(file.getvalue(), np.uint8)
    size = len(large)
    bomb = {"jpeg_header": large[:300], "scan_train": np.tile(large[300:], 2), "scan_test": large[300:]}
    bomb |= {"len_train": np.full(2, size - 300), "len_test": np.full(1, size - 300)}
    for changes, why in (
        ({"y_train": np.array([1, 10])}, "do not fit together"),
        ({"y_test": np.array([-1])}, "do not fit together"),
        ({"y_train": np.array([0.5, 1])}, "not rows of bytes, lengths and labels"),
        ({"len_train": np.array([-5, 5])}, "do not fit together"),
        ({"scan_train": np.zeros(9)}, "not rows of bytes, lengths and labels"),
        ({"jpeg_header": np.zeros((3, 3), np.uint8)}, "not rows of bytes, lengths and labels"),
        ({"y_train": np.zeros(0, int), "len_train": np.zeros(0, int)}, "do not fit together"),
        ({"jpeg_header": np.zeros(9, np.uint8)}, "image 0 is broken"),
        (bomb, "image 0 is broken .it is 9000 x 9000, not 32 x 32"),
    ):
        pack(**changes)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with pytest.raises(Mistake, match=why):
            images.load("cifar10")
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 60 << 10  # the pixels take 81 MB


# ---- folders ----


def touch(root, *names):
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()


def test_an_image_of_16_bits_has_the_values_of_one_of_8(tmp_path):
    pil = pytest.importorskip("PIL.Image")
    pytest.importorskip("grain")
    ramp = np.arange(256, dtype=np.uint16).reshape(16, 16)
    files = [tmp_path / "8.png", tmp_path / "16.png"]
    pil.fromarray(ramp.astype(np.uint8)).save(files[0])
    pil.fromarray(257 * ramp).save(files[1])
    eight, sixteen = (folder._image(str(file), 16, None) for file in files)
    assert eight.max() > 200
    np.testing.assert_array_equal(eight, sixteen)


def test_folders_of_every_layout(tmp_path):
    names = [f"{kind}/{i}.png" for kind in ("ant", "bee") for i in range(10, 20)]
    inside = lambda root, files: sorted(str(Path(file).relative_to(root)) for file in files)
    for part, others in (("flat", ""), ("alone", "train/")):
        root = tmp_path / part
        touch(root, *(others + name for name in names))
        got = folder.open(root)
        assert got.val_labels.tolist() == [0, 1]  # a tenth of each class
        assert inside(root / others, got.train + got.val) == names
        assert "an evenly spaced tenth of its images is the test split" in got.note
        assert folder.open(root).val == got.val
    touch(tmp_path / "test", *(f"train/{name}" for name in names), "test/ant/1.png", "test/bee/2.png")
    got = folder.open(tmp_path / "test")
    assert (len(got.train), inside(tmp_path / "test", got.val)) == (20, ["test/ant/1.png", "test/bee/2.png"])
    assert got.note == "the test split is the folder test"
    touch(tmp_path / "test", "val/ant/3.png", "val/bee/4.png")
    got = folder.open(tmp_path / "test")
    assert inside(tmp_path / "test", got.val) == ["val/ant/3.png", "val/bee/4.png"]
    assert got.note == "the test split is the folder val; the folder test is not read"
    touch(tmp_path / "few", "ant/1.png", "bee/1.png", "cat/1.png")
    with pytest.raises(Mistake, match="few: bee has too few images to be split"):
        folder.open(tmp_path / "few")
