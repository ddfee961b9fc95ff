"""Texts as one array of tokens each, and the windows of them that a model reads. Tokens are bytes or a tokenizer's."""

import itertools
import logging
import re
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from experiments.data import cache, others, reading
from experiments.data.find import find
from experiments.errors import Mistake, mistaken
from experiments.files import opened
from nmjax.core import names
from nmjax.core.random import bits
from nmjax.oneshot.texts import failing, tokenizer as open_tokenizer

log = logging.getLogger(__name__)

PYTHON = f"Python {sys.version_info[0]}.{sys.version_info[1]}, which differ between versions"
_SUFFIXES = (".txt", ".txt.xz", ".txt.gz")
_TOKENS = 1 << 24  # most tokens of a vocabulary
_SHOWN = 5  # so many names of files are shown
_LOOKS = {  # the first bytes of files that are no text -> what such a file is
    b"PK\x03\x04": "a zip archive",
    b"\x1f\x8b": "a gzip archive, whose name has to end in .gz",
    b"\xfd7zXZ": "an xz archive, whose name has to end in .xz",
    b"BZh": "a bzip2 archive",
    b"7z\xbc\xaf": "a 7z archive",
    b"\x28\xb5\x2f\xfd": "a zstd archive",
    b"\x89PNG": "a PNG image",
    b"\xff\xd8\xff": "a JPEG image",
    b"GIF8": "a GIF image",
    b"%PDF": "a PDF",
    b"\x93NUMPY": "an array of NumPy",
    b"\x89HDF": "an HDF5 file",
    b"PAR1": "a Parquet file",
    b"\x7fELF": "a program",
    b"\xff\xfe": "text in UTF-16",
    b"\xfe\xff": "text in UTF-16",
}
_PIECE = 1 << 16  # most bytes that a tokenizer gets at a time; pieces end at the end of a line


class Text(NamedTuple):
    """A text as tokens, whole in memory.

    Write a function that returns one to train on a text of your own, in any module::

        # mylab/data.py                         config.data.name = "mylab.data:notes"
        def notes(dir):                         # dir is config.data.dir, which may be empty
            ids = np.frombuffer(Path(dir, "notes.txt").read_bytes(), np.uint8)
            return Text("notes", ids[:-9000], ids[-9000:], 256, lambda ids: bytes(ids.tolist()).decode("latin-1"))

    Attributes:
      name: The text's name, as the header of a run shows it.
      train: Tokens, a 1-D array of uint8, uint16 or uint32: the narrowest that holds the vocabulary.
      test: The same for the test.
      vocabulary: The number of different tokens; the largest is one less.
      decode: A function from an array of tokens to the text they stand for.
      bytes_per_token: Of the test text. Bits per byte are bits per token divided by it.
      note: A sentence that has to stand beside the numbers, or "".
    """

    name: str
    train: np.ndarray
    test: np.ndarray
    vocabulary: int
    decode: Callable[[np.ndarray], str]
    bytes_per_token: float = 1.0
    note: str = ""


def load(name: str, dir: str | Path = "", test: str = "", tokenizer: str = "bytes") -> Text:
    """Return a text as tokens.

    Args:
      name: One of these, or ``module:name`` of a function that takes ``dir`` and returns a `Text`:

        - ``pydoc``: the topics of Python's own help, which every Python has.
        - a file, .txt, .txt.xz or .txt.gz, named with or without that ending.
        - a folder of such files, which are read one after another in the order of their names.
      dir: The folder that is searched first. `find` lists the others.
      test: The file for the test; "" means the last tenth of the text's bytes.
      tokenizer: "bytes", or a JSON file of Hugging Face's tokenizers. It
        gets the text in pieces of whole lines, at most 64 KiB each, and only once: the tokens are kept in a cache.

    Returns:
      The text.

    Raises:
      Mistake: The text or the tokenizer is missing or cannot be read.
    """
    if names.is_foreign(name):
        if test or tokenizer != "bytes":
            raise Mistake(
                f"config.data.name={name!r} returns tokens and its own test text: leave config.data.test empty "
                "and config.data.tokenizer='bytes'."
            )
        return _checked(name, others.load(name, dir, Text))
    texts = [_Source.of(each, dir) for each in (name, test) if each]
    notes = [text.note for text in texts if text.note]
    if "pydoc" in (name, test):
        notes.append(f"the help topics of {PYTHON}")
    note = "; ".join(notes)
    if tokenizer == "bytes":
        arrays = [np.frombuffer(b"".join(parts), np.uint8) for parts in _split(texts)]
        decode = lambda ids: np.asarray(ids, np.uint8).tobytes().decode(errors="replace")
        return Text(name, *arrays, 256, decode, 1.0, note)
    path, words = _tokenizer(tokenizer, dir)
    vocabulary = max(words.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    if not 0 < vocabulary <= _TOKENS:
        raise Mistake(f"{path} has tokens up to number {vocabulary - 1:,}; they should be from 0 to {_TOKENS - 1:,}.")
    dtype = np.dtype(np.uint16 if vocabulary <= 1 << 16 else np.uint32)

    def make() -> dict[str, np.ndarray]:
        train, held_out = _split(texts)
        size = np.array(sum(map(len, held_out)))
        train, held_out = (_encode(path, words, parts, dtype) for parts in (train, held_out))
        return {"train": train, "test": held_out, "bytes": size}

    key = "-".join([cache.checksum(path), *(text.checksum() for text in texts)])
    tokens = cache.kept(f"text-{key}", make)
    decode = lambda ids: words.decode(np.asarray(ids).tolist(), skip_special_tokens=False)
    rate = float(tokens["bytes"]) / max(len(tokens["test"]), 1)
    return Text(name, tokens["train"], tokens["test"], vocabulary, decode, rate, note)


def _checked(name: str, data: Text) -> Text:
    """Return a text of another module in the narrowest dtype; refuse what is no array of tokens."""
    dtype = next(d for d in (np.uint8, np.uint16, np.uint32) if data.vocabulary <= np.iinfo(d).max + 1)
    arrays = {}
    for split in ("train", "test"):
        ids = np.asarray(getattr(data, split))
        where = f"config.data.name={name!r}: {split}"
        if ids.ndim != 1 or ids.dtype.kind not in "iu" or not len(ids):
            raise Mistake(f"{where} is {ids.dtype} {ids.shape}, not a 1-D array of whole numbers.")
        if ids.min() < 0 or ids.max() >= data.vocabulary:
            raise Mistake(
                f"{where} has tokens from {ids.min()} to {ids.max()}, and the vocabulary is {data.vocabulary}."
            )
        arrays[split] = ids.astype(dtype)
    return data._replace(**arrays)


# ---- files ----


class _Source(NamedTuple):
    """One text: files, or bytes that come with Python."""

    files: tuple[Path, ...]
    own: bytes = b""
    note: str = ""

    @classmethod
    def of(cls, name: str, dir: str | Path) -> "_Source":
        if name == "pydoc":
            from pydoc_data.topics import topics

            return cls((), "\n".join(topics[key] for key in sorted(topics)).encode())
        stem = re.sub(r"\.txt(\.xz|\.gz)?$", "", name)
        asked = dict.fromkeys((name, *(f"{stem}{end}" for end in _SUFFIXES)))
        path = find(asked, dir, how="Add --config.data.dir=DIR, its folder.")
        if not path.is_dir():
            return cls((path,))
        inside = sorted(path.iterdir())
        files = tuple(file for file in inside if file.name.endswith(_SUFFIXES))
        if not files:
            raise Mistake(f"{path} holds no text: no file in it ends in {', '.join(_SUFFIXES)}.")
        others = [file for file in inside if file not in files]
        note = f"{path} has {_listed(files)}"
        if others:
            note += f"; not read, because their names do not end in {', '.join(_SUFFIXES)}: {_listed(others)}"
        return cls(files, note=note)

    def checksum(self) -> str:
        if self.files:
            return cache.checksum(*self.files)
        return f"{len(self.own)}{zlib.crc32(self.own):08x}"

    def read(self) -> list[bytes]:
        return [_read(file) for file in self.files] or [self.own]


def _read(file: Path) -> bytes:
    """Return the bytes of a file. If they are no text in UTF-8, say what they look like."""
    data = reading.whole(file)
    kind = next((kind for start, kind in _LOOKS.items() if data.startswith(start)), None)
    if data[257:262] == b"ustar":
        kind = "a tar archive"
    if kind is not None:
        raise Mistake(f"{file} is no text: it looks like {kind}. Give a text in UTF-8.")
    if b"\0" in data:
        raise Mistake(
            f"{file} is no text: byte {data.index(0):,} is 0, as in a binary file or in UTF-16. Give a text in UTF-8."
        )
    try:
        data.decode()
    except UnicodeDecodeError as e:
        raise Mistake(
            f"{file} is not UTF-8: {e.reason} at byte {e.start:,}. Convert it, for example with "
            "iconv -f LATIN1 -t UTF-8."
        ) from None
    return data


def _listed(files: Sequence[Path]) -> str:
    """Return the names of files in words, the first few of many."""
    names = ", ".join(file.name for file in files[:_SHOWN])
    more = f" and {len(files) - _SHOWN} more" if len(files) > _SHOWN else ""
    return f"{len(files)} file{'s' if len(files) > 1 else ''}: {names}{more}"


def _split(texts: list[_Source]) -> list[list[bytes]]:
    """Return the training and the test text: two texts as they are, or one cut at nine tenths.

    The cut is before a whole character of UTF-8.
    """
    if len(texts) == 2:
        return [text.read() for text in texts]
    parts, halves = texts[0].read(), ([], [])
    left = sum(map(len, parts)) * 9 // 10
    for data in parts:
        at = _whole(data, min(max(left, 0), len(data)))
        halves[0].append(data[:at])
        halves[1].append(data[at:])
        left -= len(data)
    return list(halves)


def _whole(data: bytes, at: int) -> int:
    """Return the next place, from ``at`` on, at which a character of UTF-8 may begin."""
    while at < len(data) and data[at] & 0xC0 == 0x80:
        at += 1
    return at


# ---- a tokenizer ----


def _tokenizer(name: str, dir: str | Path):
    path = find((name, f"{name}.json"), dir, how="Add --config.data.dir=DIR, its folder, or write 'bytes'.")
    with mistaken(f"config.data.tokenizer={name!r}"):
        opened(path).close()
        return path, open_tokenizer(path)


def _encode(path: Path, words, parts: list[bytes], dtype: np.dtype) -> np.ndarray:
    pieces = itertools.chain.from_iterable(map(_pieces, parts))
    total, done, logged = sum(map(len, parts)), 0, 0
    ids = [np.empty(0, dtype)]
    while group := list(itertools.islice(pieces, 64)):
        with mistaken(), failing(f"the tokenizer in {path} cannot encode the text"):
            found = words.encode_batch_fast([piece.decode() for piece in group], add_special_tokens=False)
        ids += [np.array(encoded.ids, dtype) for encoded in found]
        done += sum(map(len, group))
        if done == total or done - logged >= 16e6:
            logged = done
            log.info("tokenised %.1f of %.1f MB, once", done / 1e6, total / 1e6)
    return np.concatenate(ids)


def _pieces(data: bytes) -> Iterator[bytes]:
    start = 0
    while start < len(data):
        stop = min(start + _PIECE, len(data))
        if stop < len(data):
            stop = data.rfind(b"\n", start, stop) + 1 or _whole(data, stop)
        yield data[start:stop]
        start = stop


# ---- windows ----


def windows(n: int, length: int) -> int:
    """Return the number of windows of ``length`` inputs that an epoch of n tokens has.

    Each epoch draws a start below ``length``, and the windows follow one another from there. So there is one window
    less than would fit from 0. The last target of a window is the first input of the next.
    """
    if length < 1:
        raise Mistake(f"a window has at least 1 token, got length={length}.")
    if n < 2 * length:
        raise Mistake(
            f"windows of {length} tokens need a text of {2 * length} tokens, and this one has {n}. Take a longer text, "
            "or set config.data.length lower."
        )
    return n // length - 1


def rows(tokens: np.ndarray, length: int) -> np.ndarray:
    """Return the tokens as `take` reads them, (n, length). So 32 bits suffice for any index."""
    return tokens[: len(tokens) // length * length].reshape(-1, length)


def take(rows: jax.Array, epoch: jax.Array, index: jax.Array, seed) -> tuple[jax.Array, jax.Array]:
    """Return inputs and targets, int32 (batch, length): windows ``index`` of epochs ``epoch``.

    It is traced inside the compiled step, and `rows` is an argument of the step. `order.positions` gives epoch and
    index.

    >>> take(jnp.arange(100, 120).reshape(-1, 4), jnp.array([0, 0, 1]), jnp.array([0, 1, 0]), seed=0)[0].tolist()
    [[102, 103, 104, 105], [106, 107, 108, 109], [101, 102, 103, 104]]
    """
    length = rows.shape[1]
    key = jnp.stack([jnp.uint32(length), jnp.asarray(seed).astype(jnp.uint32)])
    shift = (bits(key, epoch.astype(jnp.uint32)) % np.uint32(length)).astype(jnp.int32)
    pairs = jnp.concatenate([rows[index], rows[index + 1]], 1)
    cut = jax.vmap(lambda pair, start: lax.dynamic_slice(pair, (start,), (length + 1,)))(pairs, shift)
    return cut[:, :-1].astype(jnp.int32), cut[:, 1:].astype(jnp.int32)


def cut(tokens: np.ndarray, length: int, split: str = "test") -> np.ndarray:
    """Return windows for evaluation: int32 (n, length + 1), inputs and targets in one row. No token is a target twice.

    The rest at the end, less than a row, is dropped, and the log says how much. The first token is no target.
    """
    n = (len(tokens) - 1) // length if length > 0 else 0
    if n < 1:
        raise Mistake(
            f"windows of {length} tokens need a {split} text of {length + 1} tokens, and this one has {len(tokens)}. "
            "Take a longer text, or a smaller config.data.length."
        )
    left = len(tokens) - 1 - n * length
    if left:
        log.info("evaluation leaves out the last %d of %d tokens", left, len(tokens))
    return np.lib.stride_tricks.sliding_window_view(tokens, length + 1)[: n * length : length].astype(np.int32)
