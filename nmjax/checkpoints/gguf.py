"""Files in the format GGUF, which llama.cpp reads: named tensors, most of them quantised, and the tokenizer.

The format is described at https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. A file is opened by memory map.
A tensor is turned into float32 when it is used.

Every number of the header is checked before a byte is read. The package gguf does not: of a list that says it has 2**60
numbers, its reader makes objects until memory is full. The tokenizer of a Gemma 3 takes it ten seconds, and 0.2 here.
"""

import itertools
import math
import mmap
import os
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from nmjax.checkpoints.tensors import CheckpointError, Tensor, Tensors, refuse_huge

SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
TEXT, ARRAY = 8, 9
PART = 1 << 22  # numbers that are decoded at a time


class Coding(NamedTuple):
    """How numbers are stored: in blocks of ``size`` bytes.

    ``decode`` makes of blocks, uint8 (n, size), float32 (n, numbers).
    """

    name: str
    numbers: int
    size: int
    decode: Callable[[np.ndarray], np.ndarray]


def _as(dtype: Any) -> Callable[[np.ndarray], np.ndarray]:
    """Return the decoding of plain numbers."""
    return lambda blocks: blocks.view(dtype).astype(np.float32)


def _half(blocks: np.ndarray, at: int) -> np.ndarray:
    """Return the float16 at a place of each block, float32 (n, 1)."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32)


def _nibbles(packed: np.ndarray, run: int) -> np.ndarray:
    """Unpack bytes to 4-bit numbers: for each run, first all lower halves, then all upper halves."""
    runs = packed.reshape(len(packed), -1, 1, run)
    return np.concatenate([runs & 15, runs >> 4], axis=2).reshape(len(packed), -1)


def _q4_1(blocks: np.ndarray) -> np.ndarray:
    """Return scale * q + least, with 4 bits."""
    return _half(blocks, 0) * _nibbles(blocks[:, 4:], 16).astype(np.float32) + _half(blocks, 2)


def _q8_0(blocks: np.ndarray) -> np.ndarray:
    """Return scale * q, with 8 bits."""
    return _half(blocks, 0) * np.ascontiguousarray(blocks[:, 2:]).view(np.int8).astype(np.float32)


def _q5_0(blocks: np.ndarray) -> np.ndarray:
    """Return scale * (q - 16), with 5 bits: four in halves of bytes, the fifth in 4 bytes of bits."""
    fifth = np.unpackbits(blocks[:, 2:6], axis=1, bitorder="little")
    q = _nibbles(blocks[:, 6:], 16) | fifth << 4
    return _half(blocks, 0) * (q.astype(np.float32) - 16)


def _q4_k(blocks: np.ndarray) -> np.ndarray:
    """Return scale * q - least, with 4 bits, and a scale and a least value of 6 bits for each 32 numbers."""
    a, b, c = (blocks[:, 4 + 4 * i : 8 + 4 * i] for i in range(3))
    scale = np.concatenate([a & 63, c & 15 | (a >> 6) << 4], axis=1)
    least = np.concatenate([b & 63, c >> 4 | (b >> 6) << 4], axis=1)
    q = _nibbles(blocks[:, 16:], 32).reshape(len(blocks), 8, 32).astype(np.float32)
    scale, least = (h * v.astype(np.float32) for h, v in ((_half(blocks, 0), scale), (_half(blocks, 2), least)))
    return (scale[..., None] * q - least[..., None]).reshape(len(blocks), -1)


def _q6_k(blocks: np.ndarray) -> np.ndarray:
    """Return scale * (q - 32), with 6 bits, and a scale of 8 bits for each 16 numbers."""
    low = _nibbles(blocks[:, :128], 64)
    pairs = blocks[:, 128:192].reshape(len(blocks), 2, 1, 32)
    high = np.concatenate([pairs >> shift & 3 for shift in (0, 2, 4, 6)], axis=2).reshape(len(blocks), -1)
    scale = _half(blocks, 208) * np.ascontiguousarray(blocks[:, 192:208]).view(np.int8).astype(np.float32)
    q = (low | high << 4).astype(np.float32) - 32
    return (scale[..., None] * q.reshape(len(blocks), 16, 16)).reshape(len(blocks), -1)


CODINGS = {
    0: Coding("F32", 1, 4, _as("<f4")),
    1: Coding("F16", 1, 2, _as("<f2")),
    3: Coding("Q4_1", 32, 20, _q4_1),
    6: Coding("Q5_0", 32, 22, _q5_0),
    8: Coding("Q8_0", 32, 34, _q8_0),
    12: Coding("Q4_K", 256, 144, _q4_k),
    14: Coding("Q6_K", 256, 210, _q6_k),
    30: Coding("BF16", 1, 2, _as(jnp.bfloat16)),
}


class Gguf(Tensors):
    """The tensors of a GGUF file by name, in float32.

    Attributes:
      path: The file.
      metadata: The metadata of the file, by name: numbers, texts and lists.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     header = b"GGUF" + struct.pack("<IQQ", 3, 1, 0)
    ...     tensor = struct.pack("<Q", 1) + b"w" + struct.pack("<IQIQ", 1, 2, 0, 0)
    ...     _ = Path(folder, "a.gguf").write_bytes(header + tensor + bytes(7) + struct.pack("<ff", 1, 2))
    ...     Gguf(folder + "/a.gguf")["w"]
    array([1., 2.], dtype=float32)
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Open a file. Its header is read and checked.

        Args:
          path: The file.

        Raises:
          CheckpointError: The file is damaged, or of another format or coding.
          OSError: The file cannot be read.
        """
        self.path = Path(path)
        with self.path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < 24 or file.read(4) != b"GGUF":
                raise CheckpointError(f"{path}: this is not a GGUF file: it does not begin with the letters GGUF.")
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        header = _Header(self.path, content)
        version, count, pairs = header.number("I"), header.number("Q"), header.number("Q")
        if version not in (2, 3):
            raise CheckpointError(f"{path}: GGUF version {version} is not supported, only 2 and 3.")
        metadata = dict(header.pair() for _ in range(header.count(pairs, 12, "fields")))
        found = [header.tensor() for _ in range(header.count(count, 24, "tensors"))]
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise CheckpointError(f"{path}: general.alignment is {alignment!r}, not a power of two.")
        start = -(-header.at // alignment) * alignment
        self._codings: dict[str, Coding] = {}
        tensors: dict[str, Tensor] = {}
        places: list[tuple[int, int, str]] = []
        for name, coding, shape, offset in found:
            begin = start + offset
            end = begin + math.prod(shape) // coding.numbers * coding.size
            if name in tensors:
                raise CheckpointError(f"{path}: the tensor {name!r} appears twice.")
            if end > size or offset % alignment:
                raise CheckpointError(
                    f"{path}: the tensor {name!r} would lie at bytes {begin:,} to {end:,} of {size:,}. The file is cut "
                    "short or damaged."
                )
            self._codings[name] = coding
            tensors[name] = Tensor(shape, np.dtype(np.float32), partial(_decoded, content, coding, shape, begin))
            places.append((begin, end, name))
        for (_, end, before), (begin, _, name) in itertools.pairwise(sorted(places)):
            if begin < end:
                raise CheckpointError(f"{path}: the tensors {before!r} and {name!r} overlap.")
        super().__init__([(self.path, tensors, metadata)])

    def coding(self, name: str) -> str:
        """Return the name of a tensor's coding, such as "Q4_K"."""
        return self._codings[name].name


def _decoded(content: mmap.mmap, coding: Coding, shape: tuple[int, ...], begin: int) -> np.ndarray:
    blocks = math.prod(shape) // coding.numbers
    packed = np.frombuffer(content, np.uint8, blocks * coding.size, begin).reshape(blocks, coding.size)
    numbers = np.empty((blocks, coding.numbers), np.float32)
    part = PART // coding.numbers
    for i in range(0, blocks, part):
        numbers[i : i + part] = coding.decode(packed[i : i + part]).reshape(-1, coding.numbers)
    return numbers.reshape(shape)


class _Header:
    """Reads the header of a file from its beginning on."""

    def __init__(self, path: Path, content: mmap.mmap):
        self.path, self.content, self.at = path, content, 4

    def take(self, size: int) -> bytes:
        if size > len(self.content) - self.at:
            raise CheckpointError(f"{self.path}: the header goes beyond the file. It is cut short or damaged.")
        self.at += size
        return self.content[self.at - size : self.at]

    def number(self, kind: str) -> Any:
        return struct.unpack("<" + kind, self.take(struct.calcsize("<" + kind)))[0]

    def count(self, count: int, least: int, what: str) -> int:
        """Return ``count``. Refuse it if the rest of the file is too short for things of at least ``least`` bytes."""
        if count * least > len(self.content) - self.at:
            raise CheckpointError(f"{self.path}: the header says {count:,} {what}, but the file is too short for them.")
        return count

    def text(self) -> str:
        try:
            return self.take(self.number("Q")).decode()
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self.path}: a text of the header is not UTF-8.") from error

    def value(self, kind: int) -> Any:
        if kind in SCALARS:
            return self.number(SCALARS[kind])
        if kind == TEXT:
            return self.text()
        if kind != ARRAY:
            raise CheckpointError(f"{self.path}: the header has a field of the unknown type {kind}.")
        kind, count = self.number("I"), self.number("Q")
        if kind in SCALARS:
            size = struct.calcsize("<" + SCALARS[kind])
            return list(struct.unpack(f"<{self.count(count, size, 'numbers')}{SCALARS[kind]}", self.take(count * size)))
        if kind != TEXT:
            raise CheckpointError(f"{self.path}: the header has a list of lists, or of the unknown type {kind}.")
        return [self.text() for _ in range(self.count(count, 8, "texts"))]

    def pair(self) -> tuple[str, Any]:
        return self.text(), self.value(self.number("I"))

    def tensor(self) -> tuple[str, Coding, tuple[int, ...], int]:
        name, axes = self.text(), self.number("I")
        if axes > 4:
            raise CheckpointError(f"{self.path}: the tensor {name!r} has {axes} axes, but GGUF has at most 4.")
        shape = tuple(self.number("Q") for _ in range(axes))[::-1]  # the file has the last axis first
        kind, offset = self.number("I"), self.number("Q")
        coding = CODINGS.get(kind)
        if coding is None:
            known = ", ".join(one.name for one in CODINGS.values())
            raise CheckpointError(f"{self.path}: the tensor {name!r} has the unknown type {kind}. Supported: {known}.")
        refuse_huge(self.path, name, shape)
        row = shape[-1] if shape else 1
        if row % coding.numbers:
            raise CheckpointError(
                f"{self.path}: rows of {row} in {name!r} do not divide into blocks of {coding.numbers}."
            )
        return name, coding, shape, offset
