"""Tensors that are n:m, packed in a safetensors file: the values that are kept, and their places.

A tensor "w" with groups of m along an axis becomes two. "w.values" has n values for each group, in the order of the
group. "w.places" has the place of each value in its group, in 1, 2, 4 or 8 bits: 2 for m=4, and 4 for m=8. The entry
"nmjax" of the file's metadata describes each packed tensor. 2:4 tensors of bfloat16 take 9/16 of the bytes.
"""

import json
import math
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from nmjax.checkpoints.tensors import CheckpointError, Tensors, read, write

ENTRY = "nmjax"


def write_packed(
    path: str | os.PathLike[str], tensors: Mapping[str, Any], axes: Mapping[str, int], n: int = 2, m: int = 4,
    metadata: Mapping[str, str] | None = None,
) -> None:  # fmt: skip
    """Write tensors into a file, and pack those that are n:m.

    Args:
      path: The file, which is replaced if it exists.
      tensors: Arrays by name.
      axes: The axis of the groups of each tensor that is packed.
      n: The largest number of values to store for each group. Here -0.0 counts as a value, unlike in `verify`.
      m: The size of a group.
      metadata: Texts that the file has beside the tensors.

    Raises:
      CheckpointError: A tensor in ``axes`` is not n:m, or two tensors would have one name.
      OSError: The file cannot be written.

    >>> import tempfile
    >>> w = np.array([[0, 1, 0, 2, 3, 0, 0, 0]], np.float32)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_packed(folder + "/a.safetensors", {"w": w}, {"w": 1})
    ...     {name: value.tolist() for name, value in read(folder).items()}
    ...     read_packed(folder)["w"].tolist()
    {'w.values': [[1.0, 2.0, 3.0, 0.0]], 'w.places': [[77]]}
    [[0.0, 1.0, 0.0, 2.0, 3.0, 0.0, 0.0, 0.0]]
    """
    if ENTRY in (metadata or {}):
        raise CheckpointError(f"{path}: the tensors are packed already. Unpack them with read_packed.")
    if not 1 <= n < m <= 256:
        raise CheckpointError(f"{path}: {n}:{m} cannot be packed: n must be less than m, and m at most 256.")
    for name, axis in axes.items():
        if name not in tensors:
            raise CheckpointError(f"{path}: axes names {name!r}, which is not a tensor.")
        if not -np.ndim(tensors[name]) <= axis < np.ndim(tensors[name]):
            raise CheckpointError(f"{path}: {name} has shape {np.shape(tensors[name])}, and so no axis {axis}.")
    made: dict[str, Any] = {}
    about = {}
    for name, value in tensors.items():
        parts = {name: value}
        if name in axes:
            array, axis = np.asarray(value), axes[name] % np.ndim(value)
            try:
                values, places = _packed(array, axis, n, m)
            except ValueError as error:
                raise CheckpointError(f"{path}: {name} is not {n}:{m} along axis {axis}: {error}") from None
            parts = {f"{name}.values": values, f"{name}.places": places}
            about[name] = {"n": n, "m": m, "axis": axis, "shape": list(array.shape)}
        if twice := set(parts) & set(made):
            raise CheckpointError(f"{path}: two tensors would have the name {min(twice)!r}.")
        made |= parts
    write(path, made, {**(metadata or {}), ENTRY: json.dumps(about)})


def packs(array: np.ndarray, axis: int, n: int, m: int) -> bool:
    """Return True if a tensor can be packed along an axis. One with -0.0 where a zero is expected cannot.

    >>> packs(np.array([[0.0, 1.0, 2.0, 0.0]]), 1, 2, 4), packs(np.array([[-0.0, 1.0, 2.0, 0.0]]), 1, 2, 4)
    (True, False)
    """
    return array.shape[axis] % m == 0 and bool((_held(array, axis, m).sum(1) <= n).all())


def read_packed(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Return the tensors of a file that `write_packed` wrote, each as it was before.

    Args:
      path: The file, or a folder that has it.

    Raises:
      CheckpointError: The file is damaged, or not such a file.
      OSError: The file cannot be read.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_packed(folder + "/a.safetensors", {"w": np.eye(4, dtype=np.float16)}, {"w": 0}, 1, 4)
    ...     read_packed(folder)["w"].sum()
    np.float16(4.0)
    """
    tensors = read(path)
    try:
        about: dict[str, Any] = json.loads(tensors.metadata[ENTRY])
        numbers = lambda v: (int(v["n"]), int(v["m"]), int(v["axis"]), tuple(map(int, v["shape"])))
        described = [(name, *numbers(v)) for name, v in about.items()]
    except (KeyError, ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise CheckpointError(f"{path}: the metadata have no entry {ENTRY!r} that describes packed tensors.") from error
    found: dict[str, np.ndarray] = {}
    parts = {f"{name}.{part}" for name, *_ in described for part in ("values", "places")}
    for name in tensors:
        if name not in parts:
            found[name] = tensors[name]
    for name, n, m, axis, shape in described:
        found[name] = _unpacked(path, tensors, name, n, m, axis, shape)
    return found


def _bits(m: int) -> int:
    """Return the bits of a place: 1, 2, 4 or 8, so that places do not straddle bytes."""
    if not 2 <= m <= 256:
        raise ValueError(f"groups of {m} cannot be packed, only those of 2 to 256")
    return next(bits for bits in (1, 2, 4, 8) if m <= 1 << bits)


def _packed(array: np.ndarray, axis: int, n: int, m: int) -> tuple[np.ndarray, np.ndarray]:
    if array.shape[axis] % m:
        raise ValueError(f"{m} does not divide its {array.shape[axis]} values")
    groups, held = np.moveaxis(array, axis, -1).reshape(-1, m), _held(array, axis, m)
    if held.sum(1).max(initial=0) > n:
        raise ValueError(f"a group has {int(held.sum(1).max())} values to store, where -0.0 counts as one")
    places = np.argsort(~held, axis=1, kind="stable")[:, :n]
    places.sort(axis=1)
    values = np.take_along_axis(groups, places, axis=1)
    rows, kept = np.moveaxis(array, axis, -1).shape[:-1], array.shape[axis] // m * n
    packed = _in_bytes(places.reshape(math.prod(rows), kept), _bits(m))
    return values.reshape(*rows, kept), packed.reshape(*rows, packed.shape[1])


def _held(array: np.ndarray, axis: int, m: int) -> np.ndarray:
    """Return which values of each group have a bit that is not 0, so that -0.0 and NaN are kept."""
    groups = np.ascontiguousarray(np.moveaxis(array, axis, -1)).reshape(-1, m)
    return groups.view(f"u{groups.dtype.itemsize}") != 0


def _in_bytes(places: np.ndarray, bits: int) -> np.ndarray:
    """Return places in as few bytes as hold each row. The first place is in the lowest bits."""
    each = 8 // bits
    filled = np.pad(places, ((0, 0), (0, -places.shape[1] % each))).astype(np.uint8)
    parts = filled.reshape(len(places), filled.shape[1] // each, each) << (
        np.arange(each, dtype=np.uint8) * np.uint8(bits)
    )
    return np.bitwise_or.reduce(parts, axis=2)


def _unpacked(
    path: Any, tensors: Tensors, name: str, n: int, m: int, axis: int, shape: tuple[int, ...]
) -> np.ndarray:  # fmt: skip
    rows, kept = (*shape[:axis], *shape[axis + 1 :]), shape[axis] // max(m, 1) * n if 0 <= axis < len(shape) else 0
    fits = 0 <= axis < len(shape) and 1 <= n <= m <= 256 and m > 1 and shape[axis] % m == 0
    if fits:
        sizes = {f"{name}.values": (*rows, kept), f"{name}.places": (*rows, -(-kept * _bits(m) // 8))}
        fits = all(part in tensors and tensors.shape(part) == size for part, size in sizes.items())
        fits = fits and tensors.dtype(f"{name}.places") == np.uint8
    if not fits:
        raise CheckpointError(f"{path}: the values and places of {name!r} are not what the entry {ENTRY!r} describes.")
    values, packed = tensors[f"{name}.values"].reshape(-1, n), tensors[f"{name}.places"]
    bits = _bits(m)
    shifts = np.arange(8 // bits, dtype=np.uint8) * np.uint8(bits)
    places = packed.reshape(math.prod(rows), packed.shape[-1], 1) >> shifts & np.uint8((1 << bits) - 1)
    places = places.reshape(len(places), packed.shape[-1] * len(shifts))[:, :kept].reshape(-1, n)
    if places.max(initial=0) >= m:
        raise CheckpointError(f"{path}: {name!r} has places beyond its groups of {m}.")
    groups = np.zeros((len(values), m), values.dtype)
    np.put_along_axis(groups, places.astype(np.intp), values, axis=1)
    return np.ascontiguousarray(np.moveaxis(groups.reshape(*rows, shape[axis]), -1, axis))
