"""Folders of images: their layouts, streams of batches, and files that cannot be read."""

import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from experiments.data import folder
from experiments.data.order import positions
from experiments.errors import Mistake


def colour(file):
    """Return the number of the one colour of a picture."""
    return int(Path(file).stem)


@pytest.fixture
def pictures(tmp_path):
    """Pictures of one colour each, whose number is in the name: 7 to train on, 5 to evaluate; PNG and JPEG."""
    sizes = [(40, 30), (30, 40), (200, 50), (64, 64), (1, 90), (300, 300), (33, 37)]
    for part, count in (("train", 7), ("val", 5)):
        for k in range(count):
            name = tmp_path / part / ("cat", "ant")[k % 2] / f"{k * 30 + 20}.{('png', 'JPEG', 'jpg')[k % 3]}"
            name.parent.mkdir(parents=True, exist_ok=True)
            mode = ("RGB", "L")[k == 4]
            Image.new(mode, sizes[k], (k * 30 + 20,) * 3 if mode == "RGB" else k * 30 + 20).save(name)
    (tmp_path / "train" / "ant" / "notes.txt").write_text("no picture")
    return folder.open(tmp_path)


def test_open(pictures):
    assert pictures.classes == ("ant", "cat")
    assert [colour(file) for file in pictures.train[0]] == [110, 170, 50, 140, 20, 200, 80]
    assert pictures.train[1].tolist() == [0, 0, 0, 1, 1, 1, 1]
    assert pictures.test[1].tolist() == [0, 0, 1, 1, 1]


def gone_on_with_and_in_part(batches, stream, start: int) -> None:
    """A stream that starts later, or gives two rows of each batch, is that part of all batches."""
    rest = batches[start:]
    later, part = (taken(stream(start=start, **rows), len(rest)) for rows in ({}, {"rows": np.arange(1, 3)}))
    for batch, resumed, half in zip(rest, later, part, strict=True):
        for key in batch:
            np.testing.assert_array_equal(batch[key], resumed[key])
            np.testing.assert_array_equal(batch[key][1:3], half[key])


def taken(stream, steps):
    return [next(stream) for _ in range(steps)]


@pytest.mark.slow
def test_stream_trains_in_the_order_of_positions(pictures):
    stream = lambda **kw: folder.stream(*pictures.train, 3, 4, 16, threads=2, **kw)
    batches = taken(stream(), 6)
    for step, batch in enumerate(batches):
        assert (batch["image"].shape, batch["image"].dtype) == ((4, 16, 16, 3), np.uint8)
        index = np.asarray(positions(3, step, 4, 7)[1])
        assert batch["label"].tolist() == pictures.train[1][index].tolist()
        want = np.array([colour(pictures.train[0][i]) for i in index])
        np.testing.assert_allclose(batch["image"].mean((1, 2, 3)), want, atol=2)
    gone_on_with_and_in_part(batches, stream, 2)


def test_stream_evaluates_once_and_fills_up(pictures):
    batches = list(folder.stream(*pictures.test, 0, 3, 16, train=False, threads=2))
    assert [batch["label"].tolist() for batch in batches] == [[0, 0, 1], [1, 1, -1]]
    want = [colour(file) for file in pictures.test[0]] + [0]
    np.testing.assert_allclose(np.concatenate([b["image"] for b in batches]).mean((1, 2, 3)), want, atol=2)


@pytest.mark.slow
@pytest.mark.parametrize("end", ["png", "jpg"])
@pytest.mark.parametrize("train", [True, False])
def test_what_part_of_a_picture_is_seen(tmp_path, end, train):
    """Return the area, shape and place of a part of a ramp of red across and green down. Its corners tell them."""
    width, height = 480, 240
    y, x = np.mgrid[:height, :width]
    ramp = np.stack([x * 255 / width, y * 255 / height, 0 * x], -1).round().astype(np.uint8)
    Image.fromarray(ramp).save(tmp_path / f"ramp.{end}", quality=100)
    count = 1 if train else 300  # one file in training: each epoch sees another part of it
    files, labels = [str(tmp_path / f"ramp.{end}")] * count, np.zeros(count, np.int32)
    stream = folder.stream(files, labels, 0, 300, 32, train=train, threads=1)
    image = next(stream)["image"].astype(float)
    thirds = folder.stream(
        files, labels, 0, 100, 32, train=train, threads=1
    )  # each sample of a run has a part of its own
    np.testing.assert_array_equal(np.concatenate([batch["image"] for batch in taken(thirds, 3)]), image)
    left, right = (image[:, 8:-8, i, 0].mean(1) / 255 * width for i in (2, -3))  # centres of pixels 2 and 29 of 32
    top, bottom = (image[:, i, 8:-8, 1].mean(1) / 255 * height for i in (2, -3))
    w, h = (right - left) * 32 / 27, (bottom - top) * 32 / 27
    if not train:
        np.testing.assert_allclose([w, h], 210, rtol=0.03)  # 240 * 224 / 256
        np.testing.assert_allclose((left + right) / 2, 240, atol=3)
        np.testing.assert_allclose((top + bottom) / 2, 120, atol=3)
        return
    area, shape = w * h / (width * height), w / h
    assert 0.07 < area.min() < 0.12
    assert 0.5 < area.max() < 0.8  # 240 high and 4:3 wide is two thirds
    assert 0.7 < shape.min() < 0.8
    assert 1.25 < shape.max() < 1.4
    middle = ((left + right) / 2 - w / 2) / (width - w)  # where the free room lies, 0..1
    assert abs(middle.mean() - 0.5) < 4 / np.sqrt(12 * 300)
    assert middle.min() < 0.05
    assert middle.max() > 0.95


BROKEN = {
    "truncated": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size * 3 // 4]),
    "text": lambda path: path.write_text("no picture, whatever its name"),
    "empty": lambda path: path.write_bytes(b""),
    "gone": lambda path: path.unlink(),
}


@pytest.mark.parametrize("how", BROKEN)
@pytest.mark.parametrize("train", [True, False])
def test_a_broken_picture_is_named_with_the_way_out(how, train, pictures):
    files, labels = pictures.train if train else pictures.test
    BROKEN[how](Path(files[1]))
    with pytest.raises(Mistake, match=rf"{files[1]} cannot be read as an image \(.+\). .* --config.data.skip=true\."):
        taken(folder.stream(files, labels, 0, len(files), 8, train=train, threads=2), 1)


@pytest.fixture
def broken(pictures):
    """Three of seven to train on, two of them in a row and one the last, and two of five to evaluate."""
    bad = [pictures.train[0][1], pictures.train[0][2], pictures.train[0][6], pictures.test[0][0], pictures.test[0][3]]
    for how, file in zip([*BROKEN, "truncated"], bad, strict=True):
        BROKEN[how](Path(file))
    return bad


@pytest.mark.slow
def test_for_a_skipped_picture_the_next_one_is_trained_on(pictures, broken):
    told = []
    skipped = folder.Skipped(told.append)
    stream = lambda **kw: folder.stream(*pictures.train, 3, 4, 16, threads=2, skipped=skipped, **kw)
    batches, stands = taken(stream(), 14), [0, 3, 3, 3, 4, 5, 0]
    for step, batch in enumerate(batches):
        index = [stands[i] for i in positions(3, step, 4, 7)[1].tolist()]
        assert batch["label"].tolist() == pictures.train[1][index].tolist()
        want = [colour(pictures.train[0][i]) for i in index]
        np.testing.assert_allclose(batch["image"].mean((1, 2, 3)), want, atol=2)
    gone_on_with_and_in_part(batches, stream, 5)
    assert skipped.files == set(broken[:3])
    assert sorted(line.partition(" cannot be read as an image (")[0] for line in told) == sorted(broken[:3])
    assert told[-1].endswith("): skipped, 3 in all")


def test_a_skipped_picture_is_absent_from_the_evaluation(pictures, broken):
    told = []
    skipped = folder.Skipped(told.append)
    for _ in range(2):
        stream = folder.stream(*pictures.test, 0, 3, 16, train=False, threads=2, skipped=skipped)
        batches = list(stream)
        assert [batch["label"].tolist() for batch in batches] == [[-1, 0, 1], [-1, 1, -1]]
        want = [0, *(colour(file) for file in pictures.test[0][1:3]), 0, colour(pictures.test[0][4]), 0]
        np.testing.assert_allclose(np.concatenate([b["image"] for b in batches]).mean((1, 2, 3)), want, atol=2)
    assert len(told) == 2


def test_where_nothing_can_be_read_the_folder_is_to_be_looked_at(pictures):
    for file in pictures.train[0]:
        BROKEN["empty"](Path(file))
    told = []
    skipped = folder.Skipped(told.append)
    stream = folder.stream(*pictures.train, 0, 2, 8, threads=2, skipped=skipped)
    with pytest.raises(Mistake, match="100 files in a row cannot be read, from .*. Look at the folder"):
        next(stream)
    assert len(told) == 7


def test_every_format_of_images_is_read(tmp_path):
    """Lossless ones to the last bit, whatever the ending is."""
    colours = {"JPEG": (200, 10, 10), "PNG": (10, 200, 10), "GIF": (0, 0, 255), "BMP": (9, 9, 9), "WEBP": (90, 90, 90)}
    endings = [".jpeg", ".PNG", ".gif", ".bmp", ".webp"]
    for name, (kind, colour), ending in zip("abcde", colours.items(), endings, strict=True):
        for split in ("train", "val"):
            place = tmp_path / split / name
            place.mkdir(parents=True)
            Image.new("RGB", (12, 12), colour).save(place / f"x{ending}", kind)
    found = folder.open(tmp_path)
    assert found.classes == tuple("abcde")
    stream = folder.stream(*found.test, 0, 5, 8, train=False, threads=1)
    batch = next(iter(stream))
    assert sorted(batch["label"]) == list(range(5))
    for image, label in zip(batch["image"], batch["label"], strict=True):
        np.testing.assert_allclose(image.mean((0, 1)), list(colours.values())[label], atol=4)


def test_folders_that_are_not_as_they_should_be(tmp_path, pictures):
    with pytest.raises(Mistake, match="config.data.name='folder' needs --config.data.dir"):
        folder.open("")
    with pytest.raises(Mistake, match="there is no folder .*nowhere"):
        folder.open(tmp_path / "nowhere")
    with pytest.raises(Mistake, match="train/cat holds no folders. Put images into one for each class"):
        folder.open(tmp_path / "train" / "cat")
    (tmp_path / "train" / "bee").mkdir()
    with pytest.raises(Mistake, match="should have the same classes; only one of them has bee"):
        folder.open(tmp_path)
    (tmp_path / "val" / "bee").mkdir()
    with pytest.raises(Mistake, match="train: no .jpg, .jpeg, .png, .gif, .bmp, .webp in bee"):
        folder.open(tmp_path)
    (tmp_path / "flat" / "train").mkdir(parents=True)
    with pytest.raises(Mistake, match="train holds no folders"):
        folder.open(tmp_path / "flat")


def touch(root, *names):
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()


def test_an_image_of_16_bits_has_the_values_of_one_of_8(tmp_path):
    ramp = np.arange(256, dtype=np.uint16).reshape(16, 16)
    files = [tmp_path / "8.png", tmp_path / "16.png"]
    Image.fromarray(ramp.astype(np.uint8)).save(files[0])
    Image.fromarray(257 * ramp).save(files[1])
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
        assert got.test[1].tolist() == [0, 1]  # a tenth of each class
        assert inside(root / others, got.train[0] + got.test[0]) == names
        assert "an evenly spaced tenth of its images is the test split" in got.note
        assert folder.open(root).test[0] == got.test[0]
    touch(tmp_path / "test", *(f"train/{name}" for name in names), "test/ant/1.png", "test/bee/2.png")
    got = folder.open(tmp_path / "test")
    assert (len(got.train[0]), inside(tmp_path / "test", got.test[0])) == (20, ["test/ant/1.png", "test/bee/2.png"])
    assert got.note == "the test split is the folder test"
    touch(tmp_path / "test", "val/ant/3.png", "val/bee/4.png")
    got = folder.open(tmp_path / "test")
    assert inside(tmp_path / "test", got.test[0]) == ["val/ant/3.png", "val/bee/4.png"]
    assert got.note == "the test split is the folder val; the folder test is not read"
    touch(tmp_path / "few", "ant/1.png", "bee/1.png", "cat/1.png")
    with pytest.raises(Mistake, match="few: bee has too few images to be split"):
        folder.open(tmp_path / "few")


def test_a_pipe_among_images_is_an_image_that_cannot_be_read(tmp_path):
    os.mkfifo(tmp_path / "1.png")
    with pytest.raises(folder.Unreadable, match="1.png cannot be read as an image .it is not a regular file"):
        folder._image(str(tmp_path / "1.png"), 8, None)


@pytest.mark.parametrize("kind", ["TIFF", "DDS", "TGA", "PPM", "EPS", "PDF", "ICO"])
def test_pictures_of_other_kinds_are_not_opened(kind, tmp_path):
    """Pillow reads more than forty kinds, some by other programs. Some decoders raise errors of any type."""
    Image.new("RGB", (16, 16)).save(tmp_path / "a.jpg", kind)
    with pytest.raises(folder.Unreadable, match="cannot identify image file"):
        folder._image(str(tmp_path / "a.jpg"), 16, None)
