"""Shows which tensors of a file are n:m, and which programs can use them as such."""

import math
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from nmjax.checkpoints.quantized import scales_of
from nmjax.checkpoints.tensors import CheckpointError, read, read_config
from nmjax.core import layer_paths

CHUNK = 1 << 24  # values that are looked at together
HALF = ("float32", "float16", "bfloat16")  # float32 is cast to one of the others before it is compressed
LEAST: dict[str, dict[str, tuple[int, int]]] = {
    "torch": {**dict.fromkeys(HALF, (32, 64)), "int8": (16, 128)},
    "cusparselt": {**dict.fromkeys(HALF, (16, 16)), "int8": (32, 32), "float8_e4m3fn": (32, 32)},
}
"""The numbers that must divide rows and columns, by program and dtype.

They are those of torch 2.13, `torch.sparse.semi_structured`: "torch" is its CUTLASS form.
"""
PROGRAMS = ("torch", "cusparselt", "tensorrt")


class Checked(NamedTuple):
    """A tensor and its groups.

    Attributes:
      name, shape, dtype: The tensor.
      density: The share of values that are not zero. -0.0 is zero, and NaN is not.
      axes: The axes along which all groups of m have at most n non-zeros.
      axis: The axis with the fewest broken groups; None if no axis divides into groups.
      groups: The number of groups along that axis.
      broken: The number of groups along that axis with more than n non-zeros.
      misfits: For each program, the reason why it cannot use the tensor as 2:4; None if it can.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    density: float
    axes: tuple[int, ...]
    axis: int | None
    groups: int
    broken: int
    misfits: dict[str, str | None]

    @property
    def state(self) -> str:
        """The tensor in one word: "n:m"; "zero"; "broken" if at least 9 of 10 groups are n:m, but not all; "dense"."""
        if not self.density:
            return "zero"
        if self.axes:
            return "n:m"
        return "broken" if self.groups and 10 * self.broken <= self.groups else "dense"


@dataclass(frozen=True)
class Verified:
    """The tensors of a checkpoint with two axes or more. It prints as a table.

    Attributes:
      n, m: The pattern that was looked for.
      tensors: The tensors.
      every: True if each tensor has to be n:m.
      not_finite: The names of tensors that have NaN or infinity, also of those with one axis.

    >>> groups = {"groups": 16, "broken": 1, "misfits": {}}
    >>> one = Checked("up", (8, 8), "float16", 0.5, axes=(), axis=1, **groups)
    >>> Verified(2, 4, (one,)).holds, one.state
    (False, 'broken')
    """

    n: int
    m: int
    tensors: tuple[Checked, ...]
    every: bool = False
    not_finite: tuple[str, ...] = ()

    @property
    def holds(self) -> bool:
        """True if a tensor is n:m, the programs can use all n:m tensors, and none is broken or has NaN or infinity.

        If every tensor must be n:m, it is also False if a tensor is dense or all zeros.
        """
        fits = all(reason is None for one in self.sparse for reason in one.misfits.values())
        all_sparse = len(self.sparse) == len(self.tensors)
        whole = not self.broken and not self.not_finite
        return bool(self.sparse) and fits and whole and (all_sparse or not self.every)

    @property
    def sparse(self) -> tuple[Checked, ...]:
        """The tensors that are n:m, and not zero."""
        return tuple(one for one in self.tensors if one.state == "n:m")

    @property
    def broken(self) -> tuple[Checked, ...]:
        """The tensors of which at least nine of ten groups are n:m, but not all."""
        return tuple(one for one in self.tensors if one.state == "broken")

    @property
    def dense(self) -> tuple[Checked, ...]:
        """The other tensors that are not zero."""
        return tuple(one for one in self.tensors if one.state == "dense")

    def as_dict(self) -> dict[str, Any]:
        """Return the same as values for a JSON file."""
        rows = [{**one._asdict(), "state": one.state} for one in self.tensors]
        about = {"n": self.n, "m": self.m, "holds": self.holds, "not_finite": list(self.not_finite)}
        return about | {"tensors": rows}

    def __str__(self) -> str:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        programs = list(self.tensors[0].misfits) if self.tensors else []
        for name in ("tensor", "shape", "dtype", "non-zero", f"{self.n}:{self.m}", *programs):
            table.add_column(name, overflow="fold")
        alike = ((one.name, (*one[1:3], one.state, one.axes, one.axis, str(one.misfits)), one) for one in self.tensors)
        for same in layer_paths.alike(alike):
            one = same[0]
            names = layer_paths.short([each.name for each in same])
            shape = " x ".join(map(str, one.shape)) + (f" ({len(same)} tensors)" if len(same) > 1 else "")
            density = f"{sum(each.density for each in same) / len(same):.3f}"
            reasons = [reason or "yes" for reason in one.misfits.values()]
            table.add_row(escape(_shown(names)), shape, one.dtype, density, _said(same, self.n), *reasons)
        console = Console(width=160, color_system=None)
        with console.capture() as captured:
            console.print(table)
        lines = "\n".join(line.rstrip() for line in captured.get().splitlines()).strip("\n")
        return "\n".join([lines, *(f"NaN or infinity in {_shown(name)}" for name in self.not_finite)])


def _shown(name: str) -> str:
    """Return a name without control characters."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in name)


def _said(same: Sequence[Checked], n: int) -> str:
    one = same[0]
    if one.state == "zero":
        return "all zero"
    if one.axes:
        return f"along axis {' and '.join(map(str, one.axes))}"
    if one.axis is None:
        return "no"
    broken, groups = sum(each.broken for each in same), sum(each.groups for each in same)
    if one.state == "broken":
        return f"{broken:,} of {groups:,} groups along axis {one.axis} have more than {n}"
    return f"no: {math.floor(100 * broken / groups)} % of groups have more than {n}"


def verify(
    path: str | os.PathLike[str], n: int = 2, m: int = 4, *, programs: Iterable[str] = (), every: str | None = None
) -> Verified:  # fmt: skip
    """Look for an n:m pattern in the tensors of a checkpoint, whoever wrote it.

    Tensors of floating-point numbers and int8 with two axes or more are looked at, one at a time. Those with one axis
    are searched for NaN and infinity only. Weights that `quantize` made must have their scales.

    Args:
      path: A safetensors file, an index, or a folder that has one of them.
      n: The number of non-zeros allowed in a group.
      m: The size of a group.
      programs: Programs for which to check the tensors: "torch", "cusparselt" and "tensorrt". They take 2:4 along the
        last axis of a matrix [outputs, inputs], and tensorrt also along the second axis of a convolution.
      every: A regular expression. Only tensors whose whole name matches are looked at, and all of them have to be n:m.

    Raises:
      CheckpointError: The file is damaged, scales do not fit the weights of 8 bits, a program is not known, or no name
        of a matrix matches.
      ValueError: ``n`` is not at least 1 and less than ``m``.
      OSError: The file cannot be read.

    >>> import tempfile
    >>> import nmjax as nm
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     tensors = {"up": np.eye(32, 64, dtype=np.float16), "down": np.ones((64, 32), np.float16)}
    ...     nm.checkpoints.write(folder + "/model.safetensors", tensors)
    ...     print(verify(folder, programs=["torch"]))
     tensor   shape     dtype     non-zero   2:4                                    torch
     ────────────────────────────────────────────────────────────────────────────────────────────
     up       32 x 64   float16   0.016      along axis 0 and 1                     yes
     down     64 x 32   float16   1.000      no: 100 % of groups have more than 2   it is not 2:4
    """
    if not 1 <= n < m:
        raise ValueError(f"n must be at least 1 and less than m, got n={n} and m={m}.")
    programs = tuple(programs)
    for program in programs:
        if program not in PROGRAMS:
            raise CheckpointError(f"the programs are {', '.join(PROGRAMS)}, got {program!r}.")
    tensors = read(path)
    try:
        scales = scales_of(read_config(Path(path)), tensors).values()
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    names = [name for name in tensors if name not in scales and (every is None or _matches(every, name))]
    if every is not None and not names:
        raise CheckpointError(
            f"{path}: no tensor has a name that matches {every!r}. Write a regular expression for whole names as the "
            f"file has them, such as {', '.join(map(repr, [*tensors][:3]))}."
        )
    rows: list[Checked] = []
    unread: list[str] = []
    not_finite: list[str] = []
    for name in names:
        shape, dtype = tensors.shape(name), tensors.dtype(name)
        if "float" in str(dtype) and not _finite(tensors[name]):
            not_finite.append(name)
        if len(shape) > 1 and 0 not in shape and ("float" in str(dtype) or dtype == "int8"):
            rows.append(_checked(name, tensors[name], n, m, programs))
        elif len(shape) > 1 and 0 not in shape:
            unread.append(f"{name} {dtype}")
    if unread and every is not None:
        raise CheckpointError(
            f"{path}: only floating-point numbers and int8 can be verified, not {', '.join(unread[:5])}."
        )
    if every is not None and not rows:
        raise CheckpointError(f"{path}: the tensors that match {every!r} are empty or have one axis, so none is n:m.")
    return Verified(n, m, tuple(rows), every is not None, tuple(not_finite))


def _matches(pattern: str, name: str) -> bool:
    try:
        return re.fullmatch(pattern, name) is not None
    except re.error as error:
        raise CheckpointError(f"{pattern!r} is not a regular expression: {error}.") from None


def _finite(x: np.ndarray) -> bool:
    flat = x.reshape(-1)
    return all(np.isfinite(flat[i : i + CHUNK]).all() for i in range(0, flat.size, CHUNK))


def _checked(name: str, x: np.ndarray, n: int, m: int, programs: tuple[str, ...]) -> Checked:
    kept, broken = 0, {a: 0 for a, size in enumerate(x.shape) if size % m == 0}
    for axis in range(x.ndim):  # parts that lie along another axis hold whole groups of this one
        other = 0 if axis else 1
        step = max(1, CHUNK * x.shape[other] // x.size)
        for begin in range(0, x.shape[other], step):
            part = np.moveaxis(np.moveaxis(x, other, 0)[begin : begin + step], 0, other) != 0
            kept += int(part.sum()) if axis == 0 else 0
            if axis in broken:
                groups = np.moveaxis(part, axis, -1).reshape(-1, m)
                broken[axis] += int((groups.sum(1, dtype=np.uint8 if m < 256 else int) > n).sum())
    best = min(broken, key=lambda a: (broken[a], -a), default=None)
    axes = tuple(a for a in broken if not broken[a])
    dtype, density = str(x.dtype), kept / x.size
    least = 0 if best is None else broken[best]
    holds_2_4 = axes if (n <= 2 and m % 4 == 0) or (n, m) == (1, 2) else ()
    misfits = {program: _misfit(program, x.shape, dtype, holds_2_4, (n, m)) for program in programs}
    return Checked(name, tuple(x.shape), dtype, density, axes, best, 0 if best is None else x.size // m, least, misfits)


def _misfit(
    program: str, shape: tuple[int, ...], dtype: str, axes: tuple[int, ...], pattern: tuple[int, int]
) -> str | None:  # fmt: skip
    """Return why a program cannot use a tensor as 2:4, or None if it can."""
    if not axes:
        return "it is not 2:4" if pattern == (2, 4) else "not checked for 2:4; use n=2, m=4"
    if 1 not in axes:
        return f"its groups lie along axis {' and '.join(map(str, axes))}; programs need axis 1"
    if shape[1] % 4:
        return "its inputs do not divide by 4"
    if program == "tensorrt":
        return None if dtype in (*HALF, "int8") else f"it has no kernel for {dtype}"
    if len(shape) != 2:
        return "it is not a matrix"
    least = LEAST[program].get(dtype)
    if least is None:
        return f"it has no kernel for {dtype}"
    if shape[0] % least[0] or shape[1] % least[1]:
        return f"rows and columns must be multiples of {least[0]} and {least[1]}"
    return None
