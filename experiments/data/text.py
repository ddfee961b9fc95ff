"""Text as one array of tokens, bytes or a tokenizer's, and the windows of it that a model reads."""

import bisect
import gzip
import itertools
import logging
import lzma
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from experiments.data import cache
from experiments.data.find import find
from experiments.errors import Mistake
from nmjax.core.random import bits

log = logging.getLogger(__name__)

_SUFFIXES = (".txt", ".txt.xz", ".txt.gz")
_PIECE = 1 << 16  # bytes that a tokenizer gets at a time, or a little less: it is cut at the end of a line


class Text(NamedTuple):
    """Tokens are 1-D arrays of uint8, uint16 or uint32, the narrowest that holds the vocabulary."""

    name: str
    train: np.ndarray
    valid: np.ndarray
    vocabulary: int
    decode: Callable[[np.ndarray], str]
    bytes_per_token: float  # of the validation text: bits per byte are bits per token divided by it
    note: str = ""  # to show beside numbers


def load(name: str, dir: str | Path = "", valid: str = "", tokenizer: str = "bytes") -> Text:
    """A text, and how much of it is for validation: the file ``valid``, or else the last tenth of its bytes.

    ``name`` is ``pydoc``, the topics of Python's own help, which are always there; or a file, .txt, .txt.xz or .txt.gz,
    with or without that ending; or a folder of such files, read one after another in the order of their names. `find`
    says where they are looked for.

    Tokens are bytes, any bytes; or ``tokenizer`` is a JSON file of Hugging Face's tokenizers, and the text is UTF-8. It
    is tokenised in pieces of whole lines, at most 64 KiB each, and once: the tokens are kept.
    """
    texts = [_Source.of(each, dir) for each in (name, valid) if each]
    note = f"the help topics of Python {sys.version_info[0]}.{sys.version_info[1]}, which differ between versions"
    note = note if "pydoc" in (name, valid) else ""
    if tokenizer == "bytes":
        train, held = (b"".join(part.data for part in parts) for parts in _split(texts))
        arrays = [np.frombuffer(data, np.uint8) for data in (train, held)]
        return Text(
            name, *arrays, 256, lambda ids: np.asarray(ids, np.uint8).tobytes().decode(errors="replace"), 1.0, note
        )
    path, words = _tokenizer(tokenizer, dir)
    vocabulary = max(words.get_vocab(with_added_tokens=True).values()) + 1
    dtype = np.dtype(np.uint16 if vocabulary <= 1 << 16 else np.uint32)

    def make():
        train, held = _split(texts)
        size = np.array(sum(len(part.data) for part in held))
        return {"train": _encode(words, train, dtype), "valid": _encode(words, held, dtype), "bytes": size}

    key = "-".join([cache.checksum(path), *(text.checksum() for text in texts)])
    tokens = cache.kept(f"tokens-{key}", make)
    decode = lambda ids: words.decode(np.asarray(ids).tolist(), skip_special_tokens=False)
    rate = float(tokens["bytes"]) / max(len(tokens["valid"]), 1)
    return Text(name, tokens["train"], tokens["valid"], vocabulary, decode, rate, note)


# ---- files ----


class _Part(NamedTuple):
    """Bytes, and where they stand: at ``start`` of a file."""

    file: str
    start: int
    data: bytes


class _Source(NamedTuple):
    """One text: files, or what Python brings."""

    files: tuple[Path, ...]
    own: bytes = b""

    @classmethod
    def of(cls, name, dir):
        if name == "pydoc":
            from pydoc_data.topics import topics

            return cls((), "\n".join(topics[key] for key in sorted(topics)).encode())
        path = find([f"{name}{end}" for end in ("", *_SUFFIXES)], dir, how="Add --config.data.dir=DIR, its folder.")
        if not path.is_dir():
            return cls((path,))
        files = tuple(sorted(file for file in path.iterdir() if file.name.endswith(_SUFFIXES)))
        if not files:
            raise Mistake(f"{path} holds no text: no file in it ends in {', '.join(_SUFFIXES)}.")
        return cls(files)

    def checksum(self):
        if self.files:
            return cache.checksum(*self.files)
        return f"{len(self.own)}{zlib.crc32(self.own):08x}"

    def read(self) -> list[_Part]:
        return [_Part(str(file), 0, _read(file)) for file in self.files] or [_Part("pydoc", 0, self.own)]


def _read(file: Path) -> bytes:
    opened = {".xz": lzma.open, ".gz": gzip.open}.get(file.suffix, open)
    try:
        with opened(file, "rb") as f:
            return f.read()
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as e:
        raise Mistake(f"{file} cannot be read ({e}). Copy it anew.") from e


def _split(texts: list[_Source]) -> list[list[_Part]]:
    """Two texts as they are, or nine tenths of one and the rest, cut before a whole character of UTF-8."""
    if len(texts) == 2:
        return [text.read() for text in texts]
    parts = texts[0].read()
    ends = list(itertools.accumulate(len(part.data) for part in parts))
    at = ends[-1] * 9 // 10
    i = bisect.bisect_right(ends, at) if at < ends[-1] else len(parts) - 1
    part = parts[i]
    at = _whole(part.data, at - ends[i] + len(part.data))
    head, tail = part._replace(data=part.data[:at]), part._replace(start=at, data=part.data[at:])
    return [[*parts[:i], head], [tail, *parts[i + 1 :]]]


def _whole(data: bytes, at: int) -> int:
    """The next place, from ``at`` on, where a character of UTF-8 may begin."""
    while at < len(data) and data[at] & 0xC0 == 0x80:
        at += 1
    return at


# ---- a tokenizer ----


def _tokenizer(name, dir):
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise Mistake("data.tokenizer wants Hugging Face's tokenizers: pip install tokenizers; or 'bytes'") from None
    path = find((name, f"{name}.json"), dir, how="Add --config.data.dir=DIR, its folder, or take 'bytes'.")
    try:
        words = Tokenizer.from_file(str(path))
    except Exception as e:  # the library raises no narrower class
        raise Mistake(f"{path} is no JSON file of Hugging Face's tokenizers: {e}") from e
    words.no_truncation()
    words.no_padding()
    return path, words


def _encode(words, parts: list[_Part], dtype: np.dtype) -> np.ndarray:
    pieces = itertools.chain.from_iterable(map(_pieces, parts))
    total, done, said = sum(len(part.data) for part in parts), 0, 0
    out = [np.empty(0, dtype)]
    while group := list(itertools.islice(pieces, 64)):
        for encoded in words.encode_batch_fast([_utf8(piece) for piece in group], add_special_tokens=False):
            out.append(np.array(encoded.ids, dtype))
        done += sum(len(piece.data) for piece in group)
        if done == total or done - said >= 16e6:
            said = done
            log.info("tokenised %.1f of %.1f MB, once", done / 1e6, total / 1e6)
    return np.concatenate(out)


def _pieces(part: _Part) -> Iterator[_Part]:
    start, data = 0, part.data
    while start < len(data):
        stop = min(start + _PIECE, len(data))
        if stop < len(data):
            stop = data.rfind(b"\n", start, stop) + 1 or _whole(data, stop)
        yield _Part(part.file, part.start + start, data[start:stop])
        start = stop


def _utf8(piece: _Part) -> str:
    try:
        return piece.data.decode()
    except UnicodeDecodeError as e:
        raise Mistake(
            f"{piece.file} is not UTF-8: {e.reason} at byte {piece.start + e.start}. Convert it, or take "
            "data.tokenizer='bytes', which reads any bytes."
        ) from None


# ---- windows ----


def windows(n: int, length: int) -> int:
    """How many windows of ``length`` inputs, each with its targets, an epoch of n tokens has.

    They follow one another from a place below ``length`` that each epoch draws anew, so one window's room is left for
    it; a window's last target is the next one's first input.
    """
    if length < 1:
        raise Mistake(f"a window has at least 1 token, got length={length}.")
    if n < 2 * length:
        raise Mistake(f"windows of {length} tokens want a text of {2 * length}, this one has {n}. Take a longer text.")
    return n // length - 1


def rows(tokens: np.ndarray, length: int) -> np.ndarray:
    """The tokens as `take` reads them, (n, length): so that no place in a long text is a number past 32 bits."""
    return tokens[: len(tokens) // length * length].reshape(-1, length)


def take(rows: jax.Array, epoch: jax.Array, index: jax.Array, seed) -> tuple[jax.Array, jax.Array]:
    """Inputs and targets, int32 (batch, length): windows ``index`` of their ``epoch``s, as `order.positions` gives them.

    Inside the compiled step, out of `rows` that lie on the device and are an argument of the step.

    >>> take(jnp.arange(100, 120).reshape(-1, 4), jnp.array([0, 0, 1]), jnp.array([0, 1, 0]), seed=0)[0].tolist()
    [[103, 104, 105, 106], [107, 108, 109, 110], [102, 103, 104, 105]]
    """
    length = rows.shape[1]
    key = jnp.stack([jnp.uint32(length), jnp.asarray(seed).astype(jnp.uint32)])
    shift = (bits(key, epoch.astype(jnp.uint32)) % np.uint32(length)).astype(jnp.int32)
    pairs = jnp.concatenate([rows[index], rows[index + 1]], 1)
    cut = jax.vmap(lambda pair, start: lax.dynamic_slice(pair, (start,), (length + 1,)))(pairs, shift)
    return cut[:, :-1].astype(jnp.int32), cut[:, 1:].astype(jnp.int32)


def cut(tokens: np.ndarray, length: int) -> np.ndarray:
    """For evaluation: int32 (n, length + 1), inputs and targets in one row, no token a target twice.

    What is left over at the end is dropped, less than a row, and the log says how much. The first token is no target.
    """
    n = (len(tokens) - 1) // length if length > 0 else 0
    if n < 1:
        raise Mistake(f"windows of {length} tokens want a validation text of {length + 1}, this one has {len(tokens)}.")
    if left := len(tokens) - 1 - n * length:
        log.info("evaluation leaves out the last %d of %d tokens", left, len(tokens))
    return np.lib.stride_tricks.sliding_window_view(tokens, length + 1)[: n * length : length].astype(np.int32)
