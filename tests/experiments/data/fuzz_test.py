"""Files that are not what they should be: each is read, or refused in a sentence."""

import gzip
import io
import json
import lzma
import random
import struct

import numpy as np
import pytest

from experiments.data import folder, idx, text
from experiments.errors import Mistake


def changed(rng: random.Random, data: bytes) -> bytes:
    """Return bytes with some of them changed, removed, added or repeated, more often at the beginning."""
    new = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 4, 16])):
        i = rng.randrange(min(len(new), rng.choice([8, 64, 600, 10**9])) or 1)
        number = struct.pack(rng.choice("<>") + "I", rng.choice([0, 1, 255, 65535, 2**31 - 1, 2**31, 2**32 - 1]))
        how = rng.randrange(5)
        if how == 0:
            new[i : i + 1] = bytes([rng.randrange(256)])
        elif how == 1:
            new[i : i + 4] = number
        elif how == 2:
            del new[i : i + rng.choice([1, 4, 100, 10**6])]
        elif how == 3:
            new[i:i] = rng.randbytes(rng.choice([1, 4, 50]))
        else:
            new[i:i] = new[i // 2 : i // 2 + 30]
    return bytes(new)


def read_or_refused(read, path, contents) -> tuple[int, int]:
    """Return how many files were read and how many were refused."""
    fine, said = 0, []
    for content in contents:
        path.write_bytes(content)
        try:
            read(path)
            fine += 1
        except Mistake as error:
            said.append(str(error))
    assert not [sentence for sentence in said if "\n" in sentence or len(sentence) > 800]
    return fine, len(said)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")  # of Pillow, about parts of a file that it leaves out
def test_pictures(tmp_path):
    from PIL import Image

    rng, image, files = random.Random(0), Image.fromarray(np.arange(3600, dtype=np.uint8).reshape(30, 40, 3)), []
    for kind, options in [
        ("JPEG", {}),
        ("JPEG", {"progressive": True}),
        *((k, {}) for k in ("PNG", "GIF", "BMP", "WEBP")),
    ]:
        for mode in ("RGB", "L", "P"):
            if kind not in ("JPEG", "WEBP") or mode != "P":
                image.convert(mode).save(file := io.BytesIO(), kind, **options)
                files.append(file.getvalue())
    contents = [*files, *(changed(rng, rng.choice(files)) for _ in range(600))]
    fine, refused = read_or_refused(lambda path: folder._image(str(path), 16, None), tmp_path / "a.jpg", contents)
    assert fine > len(files)
    assert refused > 200


@pytest.mark.parametrize("kind", ["TIFF", "DDS", "TGA", "PPM", "EPS", "PDF", "ICO"])
def test_pictures_of_other_kinds_are_not_opened(kind, tmp_path):
    """Pillow reads more than forty kinds, some by other programs. Some decoders raise errors of any type."""
    from PIL import Image

    Image.new("RGB", (16, 16)).save(tmp_path / "a.jpg", kind)
    with pytest.raises(folder.Unreadable, match="cannot identify image file"):
        folder._image(str(tmp_path / "a.jpg"), 16, None)


def test_idx_files(tmp_path):
    rng, good = random.Random(0), [struct.pack(">4BIII", 0, 0, 8, 3, 3, 4, 5) + bytes(60)]
    good += [struct.pack(">4BI", 0, 0, 8, 1, 3) + bytes(3)]
    empty = [
        struct.pack(">4BIII", 0, 0, 8, 3, *shape) for shape in ((0, 2**32 - 1, 2**32 - 1), (2**32 - 1, 0, 7), (0, 0, 0))
    ]
    contents = [*good, *empty, *(changed(rng, rng.choice(good)) for _ in range(250))]
    for ending, pack in (("", bytes), (".gz", gzip.compress)):
        for axes in (1, 3):
            packed = [pack(content) for content in contents]
            packed += [changed(rng, content) for content in packed[:100]] if ending else []
            fine, refused = read_or_refused(lambda path: idx._array(path, axes), tmp_path / f"a{ending}", packed)  # noqa: B023
            assert fine >= 1
            assert refused > 200


def test_texts_that_are_packed(tmp_path):
    rng = random.Random(0)
    for ending, pack in ((".gz", gzip.compress), (".xz", lzma.compress)):
        good = pack(bytes(rng.choices(b"abcdefgh ", k=300)) + b"hello\n" * 100)
        contents = [good, *(changed(rng, good) for _ in range(400))]
        fine, refused = read_or_refused(lambda path: text.load(str(path)), tmp_path / f"a.txt{ending}", contents)
        assert fine >= 1
        assert refused > 200


def mutated(rng: random.Random, value, odd):
    """Return a JSON value with some of its parts replaced or left out."""
    if rng.random() < 0.03:
        return rng.choice(odd)
    if isinstance(value, dict):
        return {key: mutated(rng, part, odd) for key, part in value.items() if rng.random() > 0.01}
    return [mutated(rng, part, odd) for part in value] if isinstance(value, list) else value


@pytest.mark.slow
def test_tokenizers(tmp_path, monkeypatch):
    tokenizers = pytest.importorskip("tokenizers")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "tale.txt").write_text("hello world\nabab\n" * 30)
    rng, models = random.Random(0), tokenizers.models
    words = [models.WordLevel({"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]"), models.WordPiece({"a": 0, "[UNK]": 1})]
    words += [models.Unigram([("a", -1.0), ("b", -2.0), ("<unk>", 0.0)], unk_id=2), models.BPE({"a": 0, "b": 1}, [])]
    good = [tokenizers.Tokenizer(model).to_str() for model in words]
    odd = [None, True, -1, 2**31, 2**32, 2**64, 1e308, "", "x" * 5000, [], {}, [[]], {"a": 2**32 - 1}, {"type": "BPE"}]
    contents = [json.dumps(mutated(rng, json.loads(rng.choice(good)), odd)).encode() for _ in range(600)]
    contents += [*(json.dumps(json.loads(each)).encode() for each in good), b'{"a": "\xff', b"", b"[" * 9000]
    read = lambda path: text.load("tale", tmp_path, tokenizer=str(path))
    fine, refused = read_or_refused(read, tmp_path / "words.json", contents)
    assert fine > 50
    assert refused > 200
