"""Tables from the names of a checkpoint's tensors to the paths of a model's parameters, and back.

A table is a value, so a checkpoint of any library can be described without a change here.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from nmjax.checkpoints.tensors import CheckpointError, Tensor

SHOWN = 8  # names of a kind that an error lists


class Rename(NamedTuple):
    """Map a tensor of a checkpoint to a parameter. ``{n}`` in both stands for a number, such as a block's.

    If one tensor is several parameters, or the other way round, they lie one after another along an axis.

    Attributes:
      theirs: The name of the tensor; or several names, in their order.
      ours: The path of the parameter; or several paths, in their order.
      axes: For each axis of the parameter the axis of the tensor, as in `numpy.transpose`; None if they are the same.
        An axis of the tensor that is not named must have size 1. None in place of an axis is one of size 1 that the
        tensor lacks.
      along: The axis of the parameter along which several lie one after another.

    >>> Rename("layer.{n}.up.weight", "blocks/{n}/mlp/up/kernel", axes=(1, 0))  # torch keeps [out, in]
    Rename(theirs='layer.{n}.up.weight', ours='blocks/{n}/mlp/up/kernel', axes=(1, 0), along=0)
    """

    theirs: str | tuple[str, ...]
    ours: str | tuple[str, ...]
    axes: tuple[int | None, ...] | None = None
    along: int = 0


class _Part(NamedTuple):
    """A `Rename` with the number of a block in place of ``{n}``."""

    theirs: tuple[str, ...]
    ours: tuple[str, ...]
    axes: tuple[int | None, ...] | None
    along: int


@dataclass(frozen=True)
class Table:
    """The names of a kind of checkpoint.

    Attributes:
      renames: All tensors that are parameters.
      kept: Patterns of the names of tensors that no parameter needs. They are written back as they were read.

    >>> table = Table((Rename("h.{n}.w", "blocks/{n}/kernel", (1, 0)), Rename("out", "head/bias")))
    >>> tensors = {"h.0.w": np.ones((2, 3)), "out": np.ones(4)}
    >>> parameters = table.read(tensors, {"blocks/0/kernel": (3, 2), "head/bias": (4,)})
    >>> {path: value.shape for path, value in parameters.items()}
    {'blocks/0/kernel': (3, 2), 'head/bias': (4,)}
    >>> {name: tensor.shape for name, tensor in table.write(parameters, like=tensors).items()}
    {'h.0.w': (2, 3), 'out': (4,)}
    """

    renames: tuple[Rename, ...]
    kept: tuple[str, ...] = ()

    def read(
        self, tensors: Mapping[str, np.ndarray], shapes: Mapping[str, tuple[int, ...]], *, blank: bool = False
    ) -> dict[str, np.ndarray]:  # fmt: skip
        """Return the parameters of a model. If possible they are views of the tensors.

        Args:
          tensors: The tensors of the checkpoint by name.
          shapes: The shapes of the model's parameters by path.
          blank: True to return zeros, which take no memory, for a parameter that is several tensors.

        Raises:
          CheckpointError: A tensor is missing, unexpected, or of another shape. The message lists them.
        """
        parts = self._parts(list(shapes))
        named = {name for part in parts for name in part.theirs}
        missing = [name for name in sorted(named) if name not in tensors]
        rest = [name for name in tensors if name not in named and not self._keeps(name)]
        unknown = sorted(set(shapes) - {path for part in parts for path in part.ours})
        found: dict[str, np.ndarray] = {}
        misshaped: list[str] = []
        unequal: list[str] = []
        for part in parts:
            if any(name not in tensors for name in part.theirs):
                continue
            wanted = [tuple(shapes[path]) for path in part.ours]
            parts_of = [_moved(tensors[name], part.axes) for name in part.theirs]
            cut = _cut(parts_of, wanted, part.along, blank)
            if cut is None:
                has = ", ".join(f"{name} {tensors[name].shape}" for name in part.theirs)
                misshaped.append(f"{has} for {', '.join(f'{path} {shapes[path]}' for path in part.ours)}")
                continue
            for path, value in zip(part.ours, cut, strict=True):
                if path in found and found[path].tobytes() != value.tobytes():
                    unequal.append(f"{', '.join(part.theirs)} for {path}")
                found[path] = value
        problems = {
            "missing": missing, "unexpected": rest, "of another shape": misshaped,
            "tensors of one parameter with different values": unequal,
            "parameters that the table does not name": unknown,
        }  # fmt: skip
        said = "; ".join(f"{problem}: {_listed(names)}" for problem, names in problems.items() if names)
        if said:
            raise CheckpointError(f"the checkpoint does not fit the model: {said}.")
        return found

    def write(
        self, parameters: Mapping[str, Any], like: Mapping[str, np.ndarray], new: Iterable[str] = ()
    ) -> dict[str, Any]:
        """Return the tensors of a checkpoint, with the names, order and dtypes of another one.

        Args:
          parameters: The parameters of the model by path: arrays of numpy or jax.
          like: The tensors of a checkpoint of the same model. Those that no parameter needs are taken from it.
          new: The names of tensors that the other checkpoint may lack, such as those of a new head.

        Returns:
          Tensors by name. Each is made when numpy asks for it.

        Raises:
          CheckpointError: A tensor has no parameter, a parameter has no tensor, or the shapes differ.
        """
        made: dict[str, Tensor] = {}
        parts = self._parts(list(parameters))
        if unknown := sorted(set(parameters) - {path for part in parts for path in part.ours}):
            raise CheckpointError(f"the checkpoint has no tensors for these parameters: {_listed(unknown)}.")
        for part in parts:
            begin = 0
            sizes = [math.prod(like[name].shape) for name in part.theirs if name in like]
            if len(sizes) == len(part.theirs) and sum(sizes) != sum(math.prod(parameters[p].shape) for p in part.ours):
                theirs = ", ".join(f"{name} {like[name].shape}" for name in part.theirs)
                ours = ", ".join(f"{path} {tuple(parameters[path].shape)}" for path in part.ours)
                raise CheckpointError(f"the checkpoint is of another model: it has {theirs} for {ours}.")
            for name in part.theirs:
                source = like.get(name)
                if source is not None:
                    shape, dtype = source.shape, source.dtype
                elif name in new and len(part.theirs) == len(part.ours) == 1:
                    value = parameters[part.ours[0]]
                    axes = range(len(value.shape)) if part.axes is None else _back(part.axes)
                    shape, dtype = tuple(value.shape[a] for a in axes), np.dtype(value.dtype)
                else:
                    raise CheckpointError(f"{', '.join(part.ours)}: the checkpoint `like` has no tensor {name!r}.")
                cut = None
                if len(part.theirs) > 1:
                    along = part.along if part.axes is None else part.axes[part.along]
                    cut = begin, begin + (1 if along is None else shape[along])
                    begin = cut[1]
                made[name] = Tensor(shape, dtype, partial(_made, part, parameters, cut, shape, dtype, source))
        if left := [name for name in like if name not in made and not self._keeps(name)]:
            raise CheckpointError(f"the model has no parameters for these tensors: {_listed(left)}.")
        return {name: made[name] if name in made else like[name] for name in like} | made

    def several(self, paths: Iterable[str]) -> dict[str, tuple[str, ...]]:
        """Return the names of the tensors of each parameter that is several tensors, and nothing else, by path."""
        return {part.ours[0]: part.theirs for part in self._parts(paths) if len(part.theirs) > len(part.ours) == 1}

    def _keeps(self, name: str) -> bool:
        return any(re.fullmatch(pattern, name) for pattern in self.kept)

    def _parts(self, paths: Iterable[str]) -> list[_Part]:
        """Return a part for each rename and each number of a block of the model."""
        parts: list[_Part] = []
        for theirs, ours, axes, along in self.renames:
            theirs, ours = ((names,) if isinstance(names, str) else names for names in (theirs, ours))
            pattern = _pattern(ours[0])
            for match in filter(None, map(pattern.fullmatch, paths)):
                number = match.groupdict().get("n", "")
                fill = lambda names, number=number: tuple(name.replace("{n}", number) for name in names)
                parts.append(_Part(fill(theirs), fill(ours), axes, along))
        return parts


def _made(
    part: _Part, parameters: Mapping[str, Any], cut: tuple[int, int] | None, shape: tuple[int, ...], dtype: Any,
    source: np.ndarray | None,
) -> np.ndarray:  # fmt: skip
    """Return the values of a tensor.

    Args:
      part: The tensors and parameters that belong together.
      parameters: The parameters by path.
      cut: The places of this tensor along ``part.along``; None if it is alone.
      shape, dtype: The tensor's.
      source: The tensor of the checkpoint that is imitated, or None. Where the parameter still has its value, this
        value is written. So it keeps the precision that it has in the dtype of the tensor.
    """
    values = [np.asarray(parameters[path]) for path in part.ours]
    whole = values[0] if len(values) == 1 else np.concatenate(values, part.along)
    if cut is not None:
        whole = np.moveaxis(np.moveaxis(whole, part.along, 0)[slice(*cut)], 0, part.along)
    if part.axes is not None:
        lacking = tuple(i for i, axis in enumerate(part.axes) if axis is None)
        whole = whole.transpose(*_back(part.axes), *lacking)
    value = whole
    value = value if value.ndim == len(shape) else value.reshape(shape)  # with its axes of size 1
    with np.errstate(invalid="ignore"):  # of a signalling NaN
        made = value.astype(dtype, copy=False)
        if source is not None and value.dtype != dtype and value.shape == source.shape:
            before = source.astype(value.dtype)
            bits = lambda v: np.ascontiguousarray(v).view(f"u{v.itemsize}").reshape(v.shape)
            same = (bits(before) == bits(value)) & ((value != 0) | (source == 0))  # a zero may have been pruned
            made = np.where(same | (np.isnan(before) & np.isnan(value)), source, made)
    return made


def _pattern(name: str) -> re.Pattern[str]:
    """Return the regular expression of a name in which {n} stands for a number."""
    return re.compile(re.escape(name).replace(r"\{n\}", r"(?P<n>0|[1-9]\d*)", 1).replace(r"\{n\}", r"(?P=n)"))


def _back(axes: tuple[int | None, ...]) -> list[int]:
    """Return the axes of a parameter in the order of the tensor's."""
    return [place for _, place in sorted((axis, place) for place, axis in enumerate(axes) if axis is not None)]


def _moved(value: np.ndarray, axes: tuple[int | None, ...] | None) -> np.ndarray:
    """Return a tensor with its axes in the order of the parameter; itself if they do not fit."""
    if axes is None:
        return value
    named = [a for a in axes if a is not None]
    single = [a for a in range(value.ndim) if a not in axes]
    if any(a >= value.ndim for a in named) or any(value.shape[a] != 1 for a in single):
        return value
    return value.transpose(*named, *single).reshape([1 if a is None else value.shape[a] for a in axes])


def _cut(
    values: list[np.ndarray], shapes: list[tuple[int, ...]], along: int, blank: bool
) -> list[np.ndarray] | None:  # fmt: skip
    """Return tensors, one after another, cut into arrays of these shapes; None if they do not fit."""
    if len(values) == len(shapes) == 1:
        return values if values[0].shape == shapes[0] else None
    if any(len(shape) <= along for shape in (*(value.shape for value in values), *shapes)):
        return None
    rest = {v[:along] + v[along + 1 :] for v in (*(value.shape for value in values), *shapes)}
    sizes = [shape[along] for shape in shapes]
    if len(rest) > 1 or sum(sizes) != sum(value.shape[along] for value in values):
        return None
    if blank and len(values) > len(shapes) == 1:
        return [np.broadcast_to(np.zeros((), np.result_type(*values)), shapes[0])]
    whole = values[0] if len(values) == 1 else np.concatenate(values, along)
    return np.split(whole, np.cumsum(sizes)[:-1], along)


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN:,} more" if len(names) > SHOWN else ""
    return f"{', '.join(names[:SHOWN])}{more}"
