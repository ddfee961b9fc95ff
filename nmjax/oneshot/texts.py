"""Texts as batches of tokens, for calibration."""

import gzip
import json
import lzma
import os
import warnings
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

LONGEST = 1 << 22  # characters of a line; more than a book has
MOST = 1 << 28  # characters that are read of a file in all
LENGTHS = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 2048)


def read_texts(path: str | os.PathLike[str], count: int) -> list[tuple[str, str | None]]:
    """Return the first texts of a file, each with its second part if it has one.

    Args:
      path: A file of lines of text; or, if its name ends with .jsonl, of JSON objects with "text", and perhaps
        "text_b" and "label". It may be compressed: .gz or .xz.
      count: The greatest number of texts. The file is not read beyond them.

    Raises:
      ValueError: A line is not such an object, or is too long; or the file is a folder, has no texts, is damaged, is
        not in UTF-8, or has more characters before the last of these texts than memory may hold.
      OSError: The file cannot be opened.

    Warns:
      UserWarning: All these texts have the same label.
    """
    path = Path(path)
    opened: Any = {".gz": gzip.open, ".xz": lzma.open}.get(path.suffix, open)
    jsonl = path.name.removesuffix(".gz").removesuffix(".xz").endswith(".jsonl")
    texts: list[tuple[str, str | None]] = []
    labels: list[str] = []
    if path.is_dir():
        raise ValueError(f"{path} is a folder. Give a file of texts.")
    path.open("rb").close()
    try:
        with opened(path, "rt", encoding="utf-8-sig") as file:
            left = MOST
            for number, line in enumerate(iter(lambda: file.readline(LONGEST + 1), ""), 1):
                left -= len(line)
                if len(line) > LONGEST or left < 0:
                    what = f"line {number} has" if len(line) > LONGEST else f"the first {number:,} lines have"
                    most = LONGEST if len(line) > LONGEST else MOST
                    raise ValueError(f"{path}: {what} more than {most:,} characters. Use shorter or fewer texts.")
                if line.strip():
                    first, second, label = _of_json(path, number, line) if jsonl else (line.strip(), None, None)
                    texts.append((first, second))
                    labels += [] if label is None else [json.dumps(label)]
                if len(texts) >= count:  # a large file is not read to its end
                    break
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: this is not text in UTF-8.") from error
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        raise ValueError(f"{path}: the file cannot be read: {error}.") from error
    if not texts:
        raise ValueError(f"{path}: the file has no texts.")
    if len(texts) == len(labels) > 1 and len(set(labels)) == 1:
        warnings.warn(
            f"{path}: the first {len(texts):,} texts all have the label {labels[0][:40]}, and inputs of others are not "
            "measured. Shuffle the file, or take more examples.",
            stacklevel=2,
        )
    return texts


def _of_json(path: Path, number: int, line: str) -> tuple[str, str | None, Any]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}, line {number}: this is not JSON.") from error
    if not isinstance(found, dict) or not isinstance(found.get("text"), str):
        raise ValueError(f"{path}, line {number}: an object with a field 'text' is expected.")
    second = found.get("text_b")
    if not isinstance(second, str | None):
        raise ValueError(f"{path}, line {number}: the field 'text_b' is not a text.")
    return found["text"], second, found.get("label")


def repeated(tokens: Sequence[Sequence[int]], size: int = LENGTHS[0]) -> float:
    """Return the share of the runs of so many tokens that were there before, in the same text or in another one.

    >>> repeated([[1, 2, 3, 4], [2, 3, 4, 5]], size=3)
    0.25
    """
    texts = [np.asarray(one, np.int32) for one in tokens if len(one) >= size]
    runs = [np.lib.stride_tricks.sliding_window_view(one, size) for one in texts]
    if not runs:
        return 0.0
    every = np.ascontiguousarray(np.concatenate(runs)).view(f"V{4 * size}")
    return 1 - len(np.unique(every)) / len(every)


def tokenizer(file: str | os.PathLike[str]) -> Any:
    """Return the tokenizer of a file ``tokenizer.json``, without padding and without truncation.

    Args:
      file: A file of Hugging Face's tokenizers.

    Raises:
      ValueError: The package tokenizers is missing, or the file is missing or damaged.

    >>> tokenizer("nowhere/tokenizer.json")
    Traceback (most recent call last):
    ValueError: nowhere/tokenizer.json: there is no such file, so texts cannot be read as the model reads them.
    """
    try:
        from tokenizers import Tokenizer  # only texts need it
    except ModuleNotFoundError as error:
        raise ValueError("the package tokenizers is missing: pip install tokenizers.") from error
    if not Path(file).is_file():
        raise ValueError(f"{file}: there is no such file, so texts cannot be read as the model reads them.")
    with failing(f"{file} is not a JSON file of Hugging Face's tokenizers"):
        found = Tokenizer.from_file(str(file))
    found.no_padding()
    found.no_truncation()
    return found


@contextmanager
def failing(said: str) -> Iterator[None]:
    """Turn every error of the library tokenizers into one that says this and why.

    Args:
      said: What could not be done.

    Raises:
      ValueError: The library raised an error, or its Rust side panicked.

    >>> with failing("tokenizer.json cannot encode a text"):
    ...     raise Exception("no token for unknown words")
    Traceback (most recent call last):
    ValueError: tokenizer.json cannot encode a text: no token for unknown words.
    """
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library raises no narrower class, and a panic is no Exception
        raise ValueError(f"{said}: {str(error)[:200].rstrip('.')}.") from error


def check_size(words: Any, vocabulary: int, file: str | os.PathLike[str]) -> None:
    """Refuse a tokenizer with more tokens than a model. It may have fewer, because vocabularies are padded.

    Tokens that were added to it do not count: some models have no row for one that their texts never use.

    Args:
      words: The tokenizer.
      vocabulary: The number of tokens of the model.
      file: Its file, for the message.

    Raises:
      ValueError: It has more tokens.
    """
    size = words.get_vocab_size(with_added_tokens=False)
    if size > vocabulary:
        raise ValueError(
            f"{file} has {size:,} tokens, but the model has {vocabulary:,}. The tokenizer is that of another model."
        )


def batches(tokens: list[list[int]], longest: int, size: int = 16) -> Iterator[np.ndarray]:
    """Return tokens in batches without padding: each text is cut to the largest length in `LENGTHS` that fits.

    Args:
      tokens: The tokens of each text. Texts of fewer than 8 tokens are left out.
      longest: The greatest length.
      size: The greatest number of texts in a batch.

    >>> [batch.shape for batch in batches([[1] * 9, [2] * 20, [3] * 10, [4] * 5], longest=16)]
    [(2, 8), (1, 16)]
    """
    lengths = [n for n in LENGTHS if n <= longest]
    by_length: dict[int, list[list[int]]] = {}
    for one in tokens:
        fitting = [n for n in lengths if n <= len(one)]
        if fitting:
            by_length.setdefault(fitting[-1], []).append(one[: fitting[-1]])
    for length in sorted(by_length):
        for begin in range(0, len(by_length[length]), size):
            yield np.asarray(by_length[length][begin : begin + size], np.int32)


def windows(tokens: list[list[int]], length: int, size: int = 8) -> Iterator[np.ndarray]:
    """Return tokens in batches of windows, for models that see only what is before a token. The texts are joined.

    All batches have one shape, so a model compiles once. What is left at the end is dropped. The number of windows in
    a batch is chosen so that few are left.

    Args:
      tokens: The tokens of each text.
      length: The tokens in a window. If there are fewer in all, they are one window.
      size: The greatest number of windows in a batch.

    >>> [batch.tolist() for batch in windows([[1, 2, 3], [4, 5], [6, 7]], length=3, size=2)]
    [[[1, 2, 3], [4, 5, 6]]]
    >>> [len(batch) for batch in windows([[0] * 45], length=3)]  # of 15 windows
    [5, 5, 5]
    """
    joined = np.asarray([token for one in tokens for token in one], np.int32)
    length = min(length, len(joined))
    count = len(joined) // max(length, 1)
    most = min(size, count)
    sizes = range(-(-most // 2) or 1, most + 1)  # not smaller than half, because larger batches are faster
    size = max(sizes, key=lambda one: (count - count % one, one), default=0)
    for begin in range(0, count - size + 1, max(size, 1)):
        yield joined[begin * length : (begin + size) * length].reshape(size, length)
