"""Texts: read, refused by their looks, tokenised."""

import gzip
import json
import logging
import lzma
import tarfile
import zipfile

import numpy as np
import pytest
from PIL import Image

from experiments.data import text
from experiments.errors import Mistake


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


LOOKS = {  # files that are no text, and what is said of each
    "zip": (lambda file: zipfile.ZipFile(file, "w").writestr("a", "text"), "it looks like a zip archive"),
    "tar": (lambda file: file.write(tarfile.TarInfo("a").tobuf(tarfile.GNU_FORMAT)), "it looks like a tar archive"),
    "png": (lambda file: Image.new("RGB", (4, 4)).save(file, "PNG"), "it looks like a PNG image"),
    "gz": (
        lambda file: file.write(gzip.compress(b"text")),
        "it looks like a gzip archive, whose name has to end in .gz",
    ),
    "utf-16": (lambda file: file.write(("text" * 99).encode("utf-16")), "it looks like text in UTF-16"),
    "npy": (lambda file: np.save(file, np.ones(99)), "it looks like an array of NumPy"),
    "zero": (lambda file: file.write(b"text\0text"), "byte 4 is 0, as in a binary file"),
    "latin": (lambda file: file.write("grün".encode("latin-1")), "is not UTF-8: invalid start byte at byte 2"),
    "cut": (lambda file: file.write("grün".encode()[:-2]), "is not UTF-8: unexpected end of data at byte 2"),
}


@pytest.mark.parametrize("tokenizer", ["bytes", "words"])
@pytest.mark.parametrize("name", LOOKS)
def test_what_is_no_text_is_told_by_its_looks(tmp_path, name, tokenizer):
    put, why = LOOKS[name]
    with (tmp_path / "a.txt").open("wb") as file:
        put(file)
    model = {"type": "BPE", "vocab": {"a": 0}, "merges": []}
    (tmp_path / "words.json").write_text(json.dumps({"version": "1.0", "model": model}))
    with pytest.raises(Mistake, match=f"a.txt.*{why}") as caught:
        text.load("a", tmp_path, tokenizer=tokenizer)
    assert "\n" not in str(caught.value)


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
