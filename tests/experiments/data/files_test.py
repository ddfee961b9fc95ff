"""Texts and folders of images: read, tokenised, streamed."""

import gzip
import json
import logging
import lzma
import os
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from experiments.data import folder, text
from experiments.data.order import positions
from experiments.errors import Mistake

PACKS = Path(os.environ.get("NMJAX_DATA") or Path(__file__).parents[4] / "shared" / "data")


@pytest.fixture(autouse=True)
def _nothing_but_here(monkeypatch, tmp_path):
    monkeypatch.delenv("NMJAX_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


# ---- bytes ----


def test_pydoc_is_always_there():
    got = text.load("pydoc")
    assert (got.vocabulary, got.bytes_per_token, got.train.dtype) == (256, 1.0, np.uint8)
    assert len(got.test) == pytest.approx(len(got.train) / 9, rel=1e-3)
    assert "Python 3." in got.note
    whole = got.decode(np.concatenate([got.train, got.test]))
    assert 'The "for" statement' in whole
    assert "\ufffd" not in whole


@pytest.mark.parametrize("name", ["tale", "tale.txt", "tale.txt.xz", "tale.txt.gz", "tales"])
def test_a_text_in_every_wrapping(tmp_path, name):
    data = bytes(np.random.default_rng(0).integers(1, 128, 1000, dtype=np.uint8))
    wrap = {"xz": lzma.compress, "gz": gzip.compress}.get(name.rsplit(".")[-1], bytes)
    if name == "tales":
        for part, cut in (("b.txt.gz", slice(300, 950)), ("a.txt", slice(0, 300)), ("c.txt", slice(950, 1000))):
            path = tmp_path / name / part
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(gzip.compress(data[cut]) if part.endswith("gz") else data[cut])
        (tmp_path / name / "README.md").write_text("not this")
    else:
        (tmp_path / (name if "." in name else f"{name}.txt")).write_bytes(wrap(data))
    got = text.load(name, tmp_path)
    assert (got.train.tobytes(), got.test.tobytes()) == (data[:900], data[900:])
    folder = f"{tmp_path}/tales has 3 files: a.txt, b.txt.gz, c.txt; not read, because their names do not end in .txt, "
    assert got.note == (folder + ".txt.xz, .txt.gz: 1 file: README.md" if name == "tales" else "")


@pytest.mark.parametrize("name", ["tale", "tale.txt", "tale.txt.gz"])
def test_a_text_is_found_in_another_wrapping(tmp_path, name):
    (tmp_path / "tale.txt.xz").write_bytes(lzma.compress(b"once upon a time " * 40))
    assert text.load(name, tmp_path).train.tobytes().startswith(b"once upon")


def test_a_folder_of_many_files_names_a_few(tmp_path):
    for n in range(8):
        (tmp_path / f"{n}.txt").write_text("abc" * 10)
    assert text.load(str(tmp_path)).note == f"{tmp_path} has 8 files: 0.txt, 1.txt, 2.txt, 3.txt, 4.txt and 3 more"


def archives(folder):
    """Write files that are no text, and return what each looks like by its name."""
    with tarfile.open(folder / "a.txt", "w") as file:
        file.add(__file__, "b.py")
    with zipfile.ZipFile(folder / "b.txt", "w") as file:
        file.writestr("a", "text")
    Image.new("RGB", (4, 4)).save(folder / "c.txt", "PNG")
    Image.new("RGB", (4, 4)).save(folder / "d.txt", "JPEG")
    (folder / "e.txt").write_bytes(gzip.compress(b"text"))
    (folder / "f.txt.gz").write_bytes(gzip.compress(lzma.compress(b"text")))
    (folder / "g.txt").write_text("text" * 99, encoding="utf-16")
    np.save(folder / "h.npy", np.ones(99))
    (folder / "i.txt").write_bytes(b"text\0text")
    (folder / "j.txt").write_bytes("grün".encode("latin-1"))
    (folder / "k.txt").write_bytes("grün".encode()[:-2])
    return {
        "a": "a tar archive", "b": "a zip archive", "c": "a PNG image", "d": "a JPEG image", "e": "a gzip archive",
        "f": "an xz archive", "g": "text in UTF-16", "h.npy": "an array of NumPy", "i": "byte 4 is 0, as in a binary",
        "j": "is not UTF-8: invalid start byte at byte 2", "k": "is not UTF-8: unexpected end of data at byte 2",
    }  # fmt: skip


@pytest.mark.parametrize("name", "abcdefgijk")
@pytest.mark.parametrize("tokenizer", ["bytes", "words"])
def test_what_is_no_text_is_told_by_its_looks(tmp_path, name, tokenizer):
    model = {"type": "BPE", "vocab": {"a": 0}, "merges": []}
    (tmp_path / "words.json").write_text(json.dumps({"version": "1.0", "model": model}))
    with pytest.raises(Mistake, match=archives(tmp_path)[name]) as caught:
        text.load(name, tmp_path, tokenizer=tokenizer)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("cut", range(-4, 5))
def test_characters_at_the_end_of_a_block_are_whole(tmp_path, monkeypatch, cut):
    monkeypatch.setattr(text, "_BLOCK", 16)
    data = ("a" * (16 + cut) + "🌳木" * 20).encode()
    (tmp_path / "a.txt").write_bytes(data)
    got = text.load("a", tmp_path)
    assert got.train.tobytes() + got.test.tobytes() == data
    (tmp_path / "a.txt").write_bytes(data[:60] + b"\xff" + data[60:])
    with pytest.raises(UnicodeDecodeError) as wrong:
        (tmp_path / "a.txt").read_bytes().decode()
    with pytest.raises(Mistake, match=f"at byte {wrong.value.start}\\."):
        text.load("a", tmp_path)


def test_a_text_beside_its_validation(tmp_path):
    (tmp_path / "a.txt").write_text("é" * 50, encoding="utf-8")
    (tmp_path / "b.txt").write_bytes(b"xyz")
    got = text.load("a", tmp_path, test="b")
    assert (len(got.train), got.decode(got.test), got.decode(got.train[:1])) == (100, "xyz", "\ufffd")


def test_the_cut_spares_characters(tmp_path):
    (tmp_path / "a.txt").write_text("aaaaaaaaaaa🌳z", encoding="utf-8")  # 16 bytes: 14 is inside the tree
    got = text.load("a", tmp_path)
    assert (got.decode(got.train), got.decode(got.test)) == ("aaaaaaaaaaa🌳", "z")


def test_texts_that_cannot_be_read(tmp_path):
    (tmp_path / "a.txt.xz").write_bytes(lzma.compress(b"x" * 1000)[:-20])
    (tmp_path / "b.txt.gz").write_bytes(b"no gzip")
    (tmp_path / "empty").mkdir()
    for name, why in (("a", "a.txt.xz cannot be read"), ("b", "b.txt.gz cannot be read"), ("empty", "holds no text")):
        with pytest.raises(Mistake, match=why):
            text.load(name, tmp_path)
    with pytest.raises(Mistake, match="found none of c, c.txt, c.txt.xz, c.txt.gz in"):
        text.load("c", tmp_path)


# ---- a tokenizer ----


@pytest.fixture
def tale(tmp_path):
    """A text of 300 kB, of several bytes a character, and a byte-level tokenizer trained on it."""
    tokenizers = pytest.importorskip("tokenizers")
    rng = np.random.default_rng(0)
    words = ["tree", "grüßen", "木", "🌳", "run", "running", "the", "of"]
    lines = [" ".join(rng.choice(words, 12)) for _ in range(4000)]
    story = "\n".join(lines)
    (tmp_path / "tale.txt").write_text(story, encoding="utf-8")
    made = tokenizers.ByteLevelBPETokenizer()
    made.train_from_iterator(lines, vocab_size=280, special_tokens=["<end>"], show_progress=False)
    made.enable_truncation(5)  # which a file may hold, and a text must not suffer
    made.save(str(tmp_path / "words.json"))
    return story


def test_tokens(tmp_path, tale, caplog):
    with caplog.at_level(logging.INFO):
        got = text.load("tale", tmp_path, tokenizer="words")
    assert "tokenised" in caplog.text
    assert (got.vocabulary, got.train.dtype) == (280, np.uint16)
    assert 256 <= got.train.max() < 280  # pairs were merged
    assert got.decode(got.train) + got.decode(got.test) == tale
    as_bytes = text.load("tale", tmp_path)
    assert got.decode(got.test).encode() == as_bytes.test.tobytes()  # one split, whatever the tokens
    assert got.bytes_per_token == len(as_bytes.test) / len(got.test)
    caplog.clear()
    with caplog.at_level(logging.INFO):
        again = text.load("tale", tmp_path, tokenizer=str(tmp_path / "words.json"))
    assert "tokenised" not in caplog.text
    np.testing.assert_array_equal(again.train, got.train)
    assert again.bytes_per_token == got.bytes_per_token
    (tmp_path / "tale.txt").write_text(tale[:-1] + "!", encoding="utf-8")
    assert text.load("tale", tmp_path, tokenizer="words").decode(got.test[:5]) == got.decode(got.test[:5])
    assert text.load("tale", tmp_path, tokenizer="words", test="tale").decode(got.train[:0]) == ""
    assert len(list((tmp_path / "cache" / "nmjax").iterdir())) == 3  # another text, other tokens
    few = json.loads((tmp_path / "words.json").read_text(encoding="utf-8"))
    few["model"]["merges"] = []
    (tmp_path / "words.json").write_text(json.dumps(few), encoding="utf-8")
    assert text.load("tale", tmp_path, tokenizer="words").bytes_per_token == 1


def test_a_line_of_any_length_is_tokenised(tmp_path, tale):
    story = "🌳木" * 40_000  # 280 kB and no line end
    (tmp_path / "line.txt").write_text(story, encoding="utf-8")
    got = text.load("line", tmp_path, tokenizer="words")
    assert got.decode(got.train) + got.decode(got.test) == story


def test_what_is_not_utf8_is_found(tmp_path, tale):
    data = tale.encode()
    at = data.index(b"tree", 150_000)
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "1.txt").write_text(tale, encoding="utf-8")
    (tmp_path / "two" / "2.txt").write_bytes(data[:at] + b"\xff" + data[at + 1 :])
    with pytest.raises(Mistake, match=f"2.txt is not UTF-8: invalid start byte at byte {at:,}. Convert it"):
        text.load("two", tmp_path, tokenizer="words")
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(Mistake, match="bad.json is not a JSON file of Hugging Face's tokenizers"):
        text.load("two", tmp_path, tokenizer="bad")
    with pytest.raises(Mistake, match="found none of gpt2, gpt2.json"):
        text.load("two", tmp_path, tokenizer="gpt2")


def test_the_packs_of_text():
    if not (PACKS / "tinyshakespeare.txt").exists():
        pytest.skip(f"no tinyshakespeare.txt in {PACKS}")
    got = text.load("tinyshakespeare", PACKS)
    assert len(got.train) + len(got.test) == 1_115_394
    assert len(np.unique(got.train)) == 65
    assert got.decode(got.train[:14]) == "First Citizen:"


# ---- folders of images ----


def colour(file):
    """Return the number of the one colour of a picture."""
    return int(Path(file).stem)


@pytest.fixture
def pictures(tmp_path):
    """Pictures of one colour each, whose number is in the name: 7 to train on, 5 to evaluate; PNG and JPEG."""
    Image = pytest.importorskip("PIL.Image")
    pytest.importorskip("grain")
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
    assert [colour(file) for file in pictures.train] == [110, 170, 50, 140, 20, 200, 80]
    assert pictures.train_labels.tolist() == [0, 0, 0, 1, 1, 1, 1]
    assert pictures.val_labels.tolist() == [0, 0, 1, 1, 1]


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


def test_stream_trains_in_the_order_of_positions(pictures):
    stream = lambda **kw: folder.stream(pictures.train, pictures.train_labels, 3, 4, 16, threads=2, **kw)
    batches = taken(stream(), 6)
    for step, batch in enumerate(batches):
        assert (batch["image"].shape, batch["image"].dtype) == ((4, 16, 16, 3), np.uint8)
        index = np.asarray(positions(3, step, 4, 7)[1])
        assert batch["label"].tolist() == pictures.train_labels[index].tolist()
        want = np.array([colour(pictures.train[i]) for i in index])
        np.testing.assert_allclose(batch["image"].mean((1, 2, 3)), want, atol=2)
    gone_on_with_and_in_part(batches, stream, 2)


def test_stream_evaluates_once_and_fills_up(pictures):
    batches = list(folder.stream(pictures.val, pictures.val_labels, 0, 3, 16, train=False, threads=2))
    assert [batch["label"].tolist() for batch in batches] == [[0, 0, 1], [1, 1, -1]]
    want = [colour(file) for file in pictures.val] + [0]
    np.testing.assert_allclose(np.concatenate([b["image"] for b in batches]).mean((1, 2, 3)), want, atol=2)


@pytest.mark.parametrize("end", ["png", "jpg"])
@pytest.mark.parametrize("train", [True, False])
def test_what_part_of_a_picture_is_seen(tmp_path, end, train):
    """Return the area, shape and place of a part of a ramp of red across and green down. Its corners tell them."""
    Image = pytest.importorskip("PIL.Image")
    pytest.importorskip("grain")
    width, height = 480, 240
    y, x = np.mgrid[:height, :width]
    ramp = np.stack([x * 255 / width, y * 255 / height, 0 * x], -1).round().astype(np.uint8)
    Image.fromarray(ramp).save(tmp_path / f"ramp.{end}", quality=100)
    files, labels = [str(tmp_path / f"ramp.{end}")] * 300, np.zeros(300, np.int32)
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
    files, labels = pictures[:2] if train else pictures[2:4]
    BROKEN[how](Path(files[1]))
    with pytest.raises(Mistake, match=rf"{files[1]} cannot be read as an image \(.+\). .* --config.data.skip=true\."):
        taken(folder.stream(files, labels, 0, len(files), 8, train=train, threads=2), 1)


@pytest.fixture
def broken(pictures):
    """Three of seven to train on, two of them in a row and one the last, and two of five to evaluate."""
    bad = [pictures.train[1], pictures.train[2], pictures.train[6], pictures.val[0], pictures.val[3]]
    for how, file in zip([*BROKEN, "truncated"], bad, strict=True):
        BROKEN[how](Path(file))
    return bad


def test_for_a_skipped_picture_the_next_one_is_trained_on(pictures, broken):
    told = []
    skipped = folder.Skipped(told.append)
    stream = lambda **kw: folder.stream(
        pictures.train, pictures.train_labels, 3, 4, 16, threads=2, skipped=skipped, **kw
    )
    batches, stands = taken(stream(), 14), [0, 3, 3, 3, 4, 5, 0]
    for step, batch in enumerate(batches):
        index = [stands[i] for i in positions(3, step, 4, 7)[1].tolist()]
        assert batch["label"].tolist() == pictures.train_labels[index].tolist()
        want = [colour(pictures.train[i]) for i in index]
        np.testing.assert_allclose(batch["image"].mean((1, 2, 3)), want, atol=2)
    gone_on_with_and_in_part(batches, stream, 5)
    assert skipped.files == set(broken[:3])
    assert sorted(line.partition(" cannot be read as an image (")[0] for line in told) == sorted(broken[:3])
    assert told[-1].endswith("): skipped, 3 in all")


def test_a_skipped_picture_is_absent_from_the_evaluation(pictures, broken):
    told = []
    skipped = folder.Skipped(told.append)
    for _ in range(2):
        stream = folder.stream(pictures.val, pictures.val_labels, 0, 3, 16, train=False, threads=2, skipped=skipped)
        batches = list(stream)
        assert [batch["label"].tolist() for batch in batches] == [[-1, 0, 1], [-1, 1, -1]]
        want = [0, *(colour(file) for file in pictures.val[1:3]), 0, colour(pictures.val[4]), 0]
        np.testing.assert_allclose(np.concatenate([b["image"] for b in batches]).mean((1, 2, 3)), want, atol=2)
    assert len(told) == 2


def test_where_nothing_can_be_read_the_folder_is_to_be_looked_at(pictures):
    for file in pictures.train:
        BROKEN["empty"](Path(file))
    told = []
    skipped = folder.Skipped(told.append)
    stream = folder.stream(pictures.train, pictures.train_labels, 0, 2, 8, threads=2, skipped=skipped)
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
    stream = folder.stream(found.val, found.val_labels, 0, 5, 8, train=False, threads=1)
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
