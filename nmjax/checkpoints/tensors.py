"""Files of named tensors in the format safetensors: read by memory map, and written whole or not at all.

A file has the length of its header in 8 bytes, the header in JSON, and the bytes of the tensors. The header gives each
tensor a dtype, a shape, and the range of its bytes. Large checkpoints are several files and an index, a JSON file that
says which tensor is in which file. The format is described at https://huggingface.co/docs/safetensors.

Nothing in a file is executed, and every number of a header is checked before a byte is read.
"""

import json
import math
import mmap
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import jax.numpy as jnp
import numpy as np

from nmjax.checkpoints.drafts import replacing

DTYPES: dict[str, Any] = {
    "BOOL": np.bool_, "U8": np.uint8, "I8": np.int8, "U16": np.uint16, "I16": np.int16, "U32": np.uint32,
    "I32": np.int32, "U64": np.uint64, "I64": np.int64, "F8_E4M3": jnp.float8_e4m3fn,
    "F8_E5M2": jnp.float8_e5m2, "F8_E8M0": jnp.float8_e8m0fnu, "F16": np.float16,
    "F8_E4M3FNUZ": jnp.float8_e4m3fnuz, "F8_E5M2FNUZ": jnp.float8_e5m2fnuz,
    "BF16": jnp.bfloat16, "F32": np.float32, "F64": np.float64, "C64": np.complex64,
}  # fmt: skip
OPAQUE = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}  # bits; NumPy has no arrays of them, so their values are not read
NAMES = {np.dtype(kind): name for name, kind in DTYPES.items()}
INDEX = ".safetensors.index.json"
LARGEST_JSON = 32_000_000  # bytes of a header or an index: half a million tensors. JSON takes 30 times that in memory


class CheckpointError(ValueError):
    """Raised if a checkpoint is damaged, or does not fit the model or the request.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     try: read(folder)
    ...     except CheckpointError as error: print(str(error).replace(folder, "FOLDER"))
    FOLDER: the folder has no .safetensors file.
    """


@dataclass(frozen=True, eq=False, slots=True)
class Tensor:
    """A tensor whose values are read or computed when NumPy asks for them. So only one at a time is in memory.

    Attributes:
      shape: Its shape.
      dtype: Its dtype; the name in the format if NumPy has no such dtype.
      make: A function that returns the values.

    >>> np.asarray(Tensor((2,), np.dtype(np.int8), lambda: np.ones(2, np.int8)))
    array([1, 1], dtype=int8)
    """

    shape: tuple[int, ...]
    dtype: Any
    make: Callable[[], np.ndarray]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        value = self.make()
        return value if dtype is None else value.astype(dtype, copy=False)


class Tensors(Mapping[str, np.ndarray]):
    """The tensors of a file or of several files, by name. A tensor is a read-only view of its file.

    They come in the order in which the files hold them. Only the parts of a file that are used are read from the disk.

    Attributes:
      tensors: The shape and dtype of each tensor, and a function that returns its values.
      metadata: The metadata of the first file, strings by name, such as {"format": "pt"}.
      texts: The metadata of each file, by the path of the file.
      files: The names of the tensors of each file, by the path of the file.
      index: The name of the index; None if there is none.
      about: The field "metadata" of the index.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write(folder + "/model.safetensors", {"w": np.zeros((2, 3), np.float16)}, {"format": "pt"})
    ...     tensors = read(folder)
    >>> list(tensors), tensors.shape("w"), tensors.metadata
    (['w'], (2, 3), {'format': 'pt'})
    """

    def __init__(self, opened: Iterable[tuple[Path, dict[str, Tensor], dict[str, Any]]]) -> None:
        """Make the mapping from each file's path, tensors and metadata. No two files may have the same tensor."""
        self.texts: dict[Path, dict[str, Any]] = {}
        self.files: dict[Path, tuple[str, ...]] = {}
        self.index: str | None = None
        self.about: dict[str, Any] = {}
        self.tensors: dict[str, Tensor] = {}
        for path, tensors, metadata in opened:
            twice = next((name for name in tensors if name in self.tensors), None)
            if twice is not None:
                raise CheckpointError(f"{path}: the tensor {twice!r} is in another file of this checkpoint too.")
            self.texts[path], self.files[path] = metadata, tuple(tensors)
            self.tensors |= tensors

    @property
    def metadata(self) -> dict[str, Any]:
        return next(iter(self.texts.values()), {})

    def __getitem__(self, name: str) -> np.ndarray:
        return self.tensors[name].make()

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return self.tensors[name].shape

    def dtype(self, name: str) -> np.dtype[Any] | str:
        """Return the dtype of a tensor; its name in the format if NumPy has no such dtype."""
        return self.tensors[name].dtype


def read(path: str | os.PathLike[str], *, writable: bool = False) -> Tensors:
    """Open the tensors of a checkpoint. Their values are read when they are used.

    Args:
      path: A file .safetensors, an index .safetensors.index.json, or a folder that has one of them.
      writable: True for tensors that may be changed in place, which changes the files.

    Returns:
      The tensors by name.

    Raises:
      CheckpointError: The file is damaged, or of another format; or a folder has no such file, or several.
      OSError: A file cannot be read.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write(folder + "/model.safetensors", {"w": np.array([[1, 0], [0, 2]], np.float32)})
    ...     read(folder)["w"].tolist()
    [[1.0, 0.0], [0.0, 2.0]]
    """
    folder, path = Path(path), _found(Path(path))
    if not path.name.endswith(INDEX):
        return Tensors([_opened(path, writable)])
    tensors, whole = _of_index(path, writable), path.with_name(path.name.removesuffix(".index.json"))
    if folder.is_dir() and whole.exists() and whole not in tensors.files:
        raise CheckpointError(
            f"{folder}: the folder has {path.name} and, of other tensors, {whole.name}, which other programs read in "
            "its place. Name one of them, or remove one."
        )
    return tensors


def write(
    path: str | os.PathLike[str], tensors: Mapping[str, Any], metadata: Mapping[str, str] | None = None
) -> None:  # fmt: skip
    """Write tensors to a file. If writing fails, no file is made, and an existing file is not changed.

    Args:
      path: The file, which is replaced if it exists.
      tensors: Arrays by name, in the order in which the file will hold them. One at a time is copied to the host.
      metadata: Strings by name that the file has beside the tensors.

    Raises:
      CheckpointError: The format has no such dtype, or no such name.
      OSError: The file cannot be written.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write(folder + "/model.safetensors", {"w": jnp.array([1, -0.0], jnp.bfloat16)})
    ...     read(folder)["w"].tolist()
    [1.0, -0.0]
    """
    with replacing(Path(path)) as file:
        write_into(file, Path(path), tensors, metadata)


def write_into(
    file: BinaryIO, path: Path, tensors: Mapping[str, Any], metadata: Mapping[str, str] | None = None
) -> None:  # fmt: skip
    """Write tensors into an open file, as `write`. Errors name ``path``."""
    header, begin = dict[str, Any](), 0
    if metadata:
        header["__metadata__"] = dict(metadata)
    for name, value in tensors.items():
        dtype = NAMES.get(np.dtype(value.dtype).newbyteorder("="))
        if dtype is None:
            raise CheckpointError(f"{path}: the tensor {name!r} has dtype {value.dtype}, which safetensors lacks.")
        if name == "__metadata__":
            raise CheckpointError(f"{path}: a tensor cannot be named '__metadata__'. Pass metadata=... instead.")
        end = begin + math.prod(value.shape) * np.dtype(value.dtype).itemsize
        header[name] = {"dtype": dtype, "shape": list(value.shape), "data_offsets": [begin, end]}
        begin = end
    if not all(isinstance(text, str) for one in (metadata or {}).items() for text in one):
        raise CheckpointError(f"{path}: metadata must be strings by name, got {metadata}.")
    try:
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise CheckpointError(f"{path}: a name or a text of the metadata is not valid Unicode: {error}.") from None
    text += b" " * (-len(text) % 8)
    try:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, value in tensors.items():
            file.write(_bytes(path, name, value))
    except OSError as error:
        error.filename = str(path)
        raise


def _bytes(path: Path, name: str, value: Any) -> Any:
    array = np.asarray(value)
    if (array.shape, array.dtype) != (tuple(value.shape), np.dtype(value.dtype)):
        raise CheckpointError(
            f"{path}: the tensor {name!r} was declared with shape {tuple(value.shape)}, and has {array.shape} of "
            f"{array.dtype}."
        )
    little = array.astype(array.dtype.newbyteorder("<"), copy=False)
    return np.ascontiguousarray(little).reshape(-1).view(np.uint8).data


def read_config(path: Path) -> dict[str, Any]:
    """Return the content of the ``config.json`` of a checkpoint, a folder or a file in it; nothing if there is none."""
    file = (path if path.is_dir() else path.parent) / "config.json"
    if not file.is_file():
        return {}
    try:
        config = json.loads(file.read_text())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: this is not JSON: {str(error)[:200]}.") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{file}: a config is a JSON object, got {type(config).__name__}.")
    return config


# ---- which files ----


def _found(path: Path) -> Path:
    """Return the file or the index that a path means."""
    if not path.is_dir():
        return path
    refuse_unfinished(path)
    candidates = sorted({*path.glob(f"*{INDEX}")} or {*path.glob("*.safetensors")})
    if len(candidates) != 1:
        has = f"has {', '.join(one.name for one in candidates)}: name one" if candidates else "has no .safetensors file"
        raise CheckpointError(f"{path}: the folder {has}.")
    return candidates[0]


def refuse_unfinished(folder: Path) -> None:
    """Refuse a folder whose files are being replaced."""
    for rest in folder.glob(".*.whole"):
        if any(not file.is_dir() for file in rest.rglob("*")):
            raise CheckpointError(
                f"{folder}: a process replaces this checkpoint, or was killed while it did. Write it again as before, "
                f"or move the files of {rest.name} into the folder."
            )


def _of_index(path: Path, writable: bool) -> Tensors:
    """Open the files of an index, in the order in which it first names them."""
    with path.open("rb") as file:
        content = _json(path, file.read(LARGEST_JSON + 1))
    names = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(names, dict) or not names or not all(isinstance(file, str) for file in names.values()):
        raise CheckpointError(f"{path}: an index has a table 'weight_map' from tensors to files; this one has none.")
    files = list(dict.fromkeys(names.values()))
    for file in files:
        if file in ("", ".", "..") or Path(file).name != file or "\\" in file or "\0" in file:
            raise CheckpointError(f"{path}: {file!r} is not the name of a file in the same folder.")
    tensors = Tensors(_opened(path.with_name(file), writable) for file in files)
    held = {(name, one.name) for one, within in tensors.files.items() for name in within}
    missing = next((one for one in names.items() if one not in held), None)
    if missing is not None:
        raise CheckpointError(f"{path}: the tensor {missing[0]!r} is not in {missing[1]}, where the index has it.")
    unnamed = next((name for name in tensors if name not in names), None)
    if unnamed is not None:
        raise CheckpointError(f"{path}: the files have a tensor {unnamed!r} that the index does not have.")
    tensors.index = path.name
    tensors.about = content["metadata"] if isinstance(content.get("metadata"), dict) else {}
    return tensors


# ---- one file ----


def _opened(path: Path, writable: bool) -> tuple[Path, dict[str, Tensor], dict[str, str]]:
    """Return a file's path, its tensors in the order of their bytes, and its metadata."""
    with path.open("r+b" if writable else "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size < 8:
            raise CheckpointError(f"{path}: a safetensors file has at least 8 bytes, and this one has {size}.")
        length = int.from_bytes(file.read(8), "little")
        if length > size - 8:
            raise CheckpointError(
                f"{path}: the header would have {length:,} bytes, and the file has {size:,}. It is cut short, or not a "
                "safetensors file."
            )
        header = _json(path, file.read(min(length, LARGEST_JSON + 1)))
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        content = mmap.mmap(file.fileno(), 0, access=access)
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: the header is not a JSON object.")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise CheckpointError(f"{path}: '__metadata__' in the header is not a table of texts.")
    ranges = sorted((_range(path, name, about) for name, about in header.items()), key=lambda one: one[1:3])
    tensors: dict[str, Tensor] = {}
    end = 0
    for name, begin, stop, dtype, shape in ranges:
        if begin != end:
            kind = "overlaps the one before it" if begin < end else f"begins {begin - end:,} bytes after the one before"
            raise CheckpointError(f"{path}: the tensor {name!r} {kind}.")
        tensors[name], end = _view(content, 8 + length + begin, name, dtype, shape), stop
    if 8 + length + end != size:
        cut = "The file is cut short" if 8 + length + end > size else "The rest belongs to no tensor"
        raise CheckpointError(f"{path}: the tensors end at byte {8 + length + end:,} of {size:,}. {cut}.")
    return path, tensors, metadata


def _view(content: mmap.mmap, begin: int, name: str, dtype: str, shape: tuple[int, ...]) -> Tensor:
    def make() -> np.ndarray:
        if dtype in OPAQUE:
            raise CheckpointError(f"the tensor {name!r} has dtype {dtype}, which NumPy cannot hold.")
        return np.frombuffer(content, DTYPES[dtype], math.prod(shape), begin).reshape(shape)

    return Tensor(shape, dtype if dtype in OPAQUE else np.dtype(DTYPES[dtype]), make)


def _range(path: Path, name: str, about: Any) -> tuple[str, int, int, str, tuple[int, ...]]:
    """Return the name, begin, end, dtype and shape of a tensor, as the header gives them."""
    whole = lambda v: isinstance(v, list) and all(type(n) is int and 0 <= n < 1 << 63 for n in v)
    if not isinstance(about, dict) or not whole(about.get("shape")) or not whole(about.get("data_offsets")):
        raise CheckpointError(f"{path}: the header does not say dtype, shape and data_offsets of the tensor {name!r}.")
    dtype, shape, offsets = about.get("dtype"), tuple(about["shape"]), about["data_offsets"]
    if not isinstance(dtype, str) or dtype not in {*DTYPES, *OPAQUE}:
        known = ", ".join((*DTYPES, *OPAQUE))
        raise CheckpointError(f"{path}: the tensor {name!r} has dtype {dtype!r}. Supported: {known}.")
    if len(shape) > 32:
        raise CheckpointError(f"{path}: the tensor {name!r} has {len(shape)} axes, and at most 32 are supported.")
    refuse_huge(path, name, shape)
    bits = OPAQUE.get(dtype) or 8 * np.dtype(DTYPES[dtype]).itemsize
    size = -(-math.prod(shape) * bits // 8)
    if len(offsets) != 2 or offsets[1] - offsets[0] != size:
        raise CheckpointError(
            f"{path}: the tensor {name!r} of shape {shape} and dtype {dtype} has {size:,} bytes, and its data_offsets "
            f"are {offsets}."
        )
    return name, offsets[0], offsets[1], dtype, shape


def refuse_huge(path: Path, name: str, shape: tuple[int, ...]) -> None:
    """Refuse the shape of an empty array that NumPy cannot make. One with values is limited by the file."""
    if 0 in shape and math.prod(n for n in shape if n) >= 1 << 59:
        raise CheckpointError(f"{path}: the tensor {name!r} of shape {shape} is too large.")


def _json(path: Path, text: bytes) -> Any:
    """Return the content of a JSON text without duplicate names, whose texts are valid Unicode."""
    if len(text) > LARGEST_JSON:
        raise CheckpointError(f"{path}: the names and shapes of the tensors take more than {LARGEST_JSON:,} bytes.")

    def table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        content = dict(pairs)
        if len(content) < len(pairs):
            twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
            raise CheckpointError(f"{path}: the name {twice!r} appears twice.")
        return content

    try:
        content = json.loads(text.decode(), object_pairs_hook=table)
        if rb"\u" in text:  # an escape may be half of a character
            json.dumps(content, ensure_ascii=False).encode()
        return content
    except UnicodeEncodeError:
        raise CheckpointError(f"{path}: a name or a text is not valid Unicode.") from None
    except CheckpointError:
        raise
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: this is not valid JSON: {str(error).splitlines()[0]}.") from None
