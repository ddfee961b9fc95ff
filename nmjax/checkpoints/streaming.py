"""Pruning of a checkpoint in its files, one block at a time.

The files are copied, the copy is mapped into memory, and the parameters of the model are views of it, in the dtype of
the file. A block is read when it is called; its pruned weights are written in place. So a model needs little more
memory than a block of it. The copy becomes the new checkpoint by one rename. If the process is killed before, the same
call goes on at the block where it was.
"""

import hashlib
import inspect
import math
import os
import re
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from nmjax.checkpoints import models
from nmjax.checkpoints.copies import base, copied, release, stamps
from nmjax.checkpoints.families import Family, Kind
from nmjax.checkpoints.names import Table
from nmjax.checkpoints.tensors import CheckpointError, Tensors
from nmjax.core import layer_paths
from nmjax.core.context import Ctx
from nmjax.nnx.batches import Call
from nmjax.nnx.calibration import axes_in
from nmjax.nnx.layer import Layer
from nmjax.nnx.layers import layers
from nmjax.nnx.one_shot import Solver, Steps, hardened, parameters
from nmjax.oneshot.solvers import OF_NORMS, largest, magnitude
from nmjax.pruners.magnitude import mse
from nmjax.recipes.table import Recipe

CHUNK = 1 << 24  # values that are looked at together


def prune(
    source: str | os.PathLike[str], target: str | os.PathLike[str], recipe: Recipe, batches: Iterable[Any] = (),
    solver: Solver = magnitude, *, family: Kind | None = None, permute: bool = False, memory: float = 8e9,
    overwrite: bool = False, progress: bool = False,
) -> dict[str, tuple[float, float]]:  # fmt: skip
    """Prune the blocks of a checkpoint in one shot, and write it to another folder, one block at a time.

    The result is that of `nmjax.nnx.prune` for the model that `load` returns. Solvers that need only the norms of the
    inputs, such as ``wanda``, get only these, and their errors are those of inputs without correlation.

    Args:
      source, family: The checkpoint, as in `load`.
      target, overwrite: The folder to write to, as in `save`.
      recipe, batches, solver, permute: As in `nmjax.nnx.prune`. Without batches, weights are pruned by magnitude.
      memory: The bytes of memory that it may take, beside the pages of the files. If the outputs of a block do not fit
        into what a block leaves, they are kept in a file beside the target.
      progress: As in `nmjax.nnx.prune`.

    Returns:
      The relative errors of the layers, as `nmjax.nnx.Pruned` has them; not those of blocks that an earlier call
      pruned, which was killed. Without batches, NaN.

    Raises:
      CheckpointError: As `load` and `save`; the memory is too small for a block; the disk is too small for the copy; a
        weight has NaN or infinity; files changed while they were read.
      ValueError: As `nmjax.nnx.prune`.

    >>> import nmjax as nm
    >>> def by_wanda(source, target, batches):
    ...     recipe = nm.Recipe({"blocks/.*": "ste(2,4)", ".*": "dense"})
    ...     return prune(source, target, recipe, batches, nm.oneshot.wanda)
    """
    calls = [Call.of(batch) for batch in batches]
    if not calls and solver is not magnitude:
        raise ValueError("prune: there are no batches, which only magnitude does without.")
    if not calls and permute:
        raise ValueError("prune: permute=True measures the inputs of layers. Pass batches.")
    asked = {"recipe": str(recipe), "solver": _named(solver), "data": _digest(calls), "order": permute}
    asked["family"] = _named(family)
    models.check_target(target, source, overwrite)
    found, before = models.opened(source), stamps(source)
    _check_finite(source, found)
    make, weights = _reader(source, family)
    given = weights(found)
    model = models.made_of(make, given.views, nnx.Rngs(0), lambda v, dtype: v)
    if not calls:
        chosen = _prunable(source, model, recipe)
        with copied(source, target, asked, overwrite, before) as copy:
            given = weights(copy.tensors)
            for layer, pattern in chosen:
                _check_in_files(source, layer.kernel_path, given)
                values = given.read(layer.kernel_path)
                _by_magnitude(values, pattern.n, pattern.m, pattern.contracted[-1])
                if layer.kernel_path in given.several:
                    given.write(layer.kernel_path, values)
        return dict.fromkeys((layer.path for layer, _ in chosen), (math.nan, math.nan))
    _check_dtype(source, model, given.views)
    steps, moments = Steps(model, recipe, calls, permute=permute), solver not in OF_NORMS
    spare = _spare(steps, moments, memory)
    with copied(source, target, asked, overwrite, before) as copy:
        given = weights(copy.tensors)
        for path, variable in parameters(steps.model):
            if path in given.views:
                variable.set_value(given.views[path])
        pruned = {steps.layers[path].kernel_path for path in steps.patterns}
        written = [path for path in given.views if permute or path in pruned]
        for path in written:
            _check_in_files(source, path, given)
        _keep_outputs(steps, copy.folder, spare)
        if copy.continued and copy.done < len(steps.order):  # this block may be half written
            dense, block = weights(models.opened(source)), steps.order[copy.done]
            for path in (path for path in written if f"{path}/".startswith(f"{block}/")):
                given.write(path, dense.read(path))
        for number in range(copy.done):
            with _filled(steps, number, given):
                steps.run(number)
        errors: dict[str, tuple[float, float]] = {}
        for number in steps.shown(copy.done) if progress else range(copy.done, len(steps.order)):
            with _filled(steps, number, given):
                solved = steps.solve(number, solver, moments)
            for path, (values, relative) in solved.items():
                given.write(path, np.asarray(values))
                errors |= relative
            copy.note(number + 1)
            with _filled(steps, number, given):
                steps.run(number)
    return {path: errors[path] for path in sorted(errors, key=layer_paths.by_number)}


def prune_tensors(
    source: str | os.PathLike[str], target: str | os.PathLike[str], names: str, n: int, m: int, *, axis: int = -1,
    overwrite: bool = False,
) -> list[str]:  # fmt: skip
    """Prune matrices of any safetensors checkpoint by magnitude, whatever the model is, and write it to another folder.

    Args:
      source: A file, an index or a folder.
      target, overwrite: The folder to write to, as in `save`.
      names: A regular expression of whole names of tensors.
      n, m: The pattern.
      axis: The axis of the groups: that of the inputs. torch keeps [outputs, inputs].

    Returns:
      The names of the tensors that were pruned.

    Raises:
      CheckpointError: No tensor has such a name; or one of them is no floating-point matrix, or m does not divide it.

    >>> import tempfile
    >>> from nmjax.checkpoints import read, write
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write(folder + "/a.safetensors", {"w": np.array([[1, 2, 3, 4]], np.float32), "b": np.ones(3, np.float32)})
    ...     prune_tensors(folder + "/a.safetensors", folder + "/pruned", "w", 2, 4)
    ...     read(folder + "/pruned")["w"].tolist()
    ['w']
    [[0.0, 0.0, 3.0, 4.0]]
    """
    found = models.opened(source)
    try:
        chosen = [name for name in found if re.fullmatch(names, name)]
    except re.error as error:
        raise CheckpointError(f"{names!r} is not a regular expression: {error}.") from None
    if axis not in (-2, -1, 0, 1):
        raise CheckpointError(f"axis is one of a matrix: -2, -1, 0 or 1, got {axis}.")
    if not chosen:
        raise CheckpointError(
            f"{source}: no tensor has a name that matches {names!r}. It has {', '.join(list(found)[:8])}."
        )
    whole = lambda name: len(found.shape(name)) == 2 and found.shape(name)[axis] % m == 0
    fits = lambda name: whole(name) and _floating(found.dtype(name))
    unfit = [f"{name} {found.dtype(name)} {found.shape(name)}" for name in chosen if not fits(name)]
    if unfit:
        raise CheckpointError(
            f"{source}: {m} must divide axis {axis} of matrices of floating-point numbers, and these are others: "
            f"{'; '.join(unfit[:5])}. Name fewer tensors."
        )
    asked, before = {"names": names, "pattern": f"{n}:{m}", "axis": axis}, stamps(source)
    models.check_target(target, source, overwrite)
    _check_finite(source, found, chosen)
    with copied(source, target, asked, overwrite, before) as copy:
        for name in chosen:
            _by_magnitude(copy.tensors[name], n, m, axis)
    return chosen


def _named(v: Any) -> str:
    """Return a text that identifies a function, with its arguments if it is partial, or another value."""
    if isinstance(v, partial):
        return f"{_named(v.func)}{v.args}{v.keywords}"
    if isinstance(v, Family):
        return f"{_named(v.model)} {v.table}"
    return f"{v.__module__}.{v.__qualname__}" if callable(v) else str(v)


def _digest(calls: list[Call]) -> str:
    """Return a text that identifies the arrays of calls."""
    found = hashlib.sha256()
    for call in calls:
        for v in call.split()[0]:
            found.update(f"{v.shape} {v.dtype} ".encode() + np.asarray(v).tobytes())
    return found.hexdigest()[:16]


# ---- the model ----


@dataclass
class _Weights:
    """The parameters of a model in the files of a checkpoint.

    Attributes:
      table: The names of the tensors.
      held: The tensors.
      views: The parameters by path, views of the tensors in their dtype. Those of several tensors, such as experts, are
        zeros that take no memory.
    """

    table: Table
    held: Tensors
    views: dict[str, np.ndarray]

    @cached_property
    def several(self) -> dict[str, tuple[str, ...]]:
        """The names of the tensors of each parameter that is several."""
        return self.table.several(self.views)

    def read(self, path: str) -> np.ndarray:
        """Return the values of a parameter: its view, or an array of its own."""
        shapes = {path: self.views[path].shape}
        return self.table.read(self._own(path), shapes)[path] if path in self.several else self.views[path]

    def write(self, path: str, values: np.ndarray) -> None:
        """Write the values of a parameter into the files."""
        if path not in self.several:
            self.views[path][...] = values.astype(self.views[path].dtype)
            return
        own = self._own(path)
        for name, value in self.table.write({path: values}, like=own).items():
            own[name][...] = np.asarray(value)

    def _own(self, path: str) -> dict[str, np.ndarray]:
        return {name: self.held[name] for name in self.several[path]}


def _reader(source: Any, family: Kind | None) -> tuple[Callable[..., Any], Callable[[Tensors], _Weights]]:
    """Return a function that makes the model of a checkpoint, and one of its tensors that returns the parameters.

    The model computes in float32, if it takes a dtype.
    """
    about = models.family_at(source, family)
    make: Any = models.architecture(source, family=about)
    options = {"dtype": jnp.float32} if _takes_dtype(make.func) else {}
    views = partial(models.views, source, family=about, blank=True, **options)
    return partial(make, **options), lambda held: _Weights(about.table, held, views(held))


@contextmanager
def _filled(steps: Steps, number: int, given: _Weights) -> Iterator[None]:
    """Give a block the values of its parameters that are several tensors, for a while."""
    begin = "" if steps.blocks is None else f"{steps.order[number]}/"
    chosen = [one for one in parameters(steps.model) if one[0] in given.several and one[0].startswith(begin)]
    for path, variable in chosen:
        variable.set_value(given.read(path))
    yield
    for path, variable in chosen:
        variable.set_value(given.views[path])


def _prunable(source: Any, model: Any, recipe: Recipe) -> list[tuple[Layer, Any]]:
    """Return the layers that a recipe prunes and their patterns, or refuse sizes that do not divide."""
    patterns: dict[str, Any] = {}
    nnx.eval_shape(lambda model: patterns.update(hardened(model, recipe, Call((), {}))[1]), model)
    if not patterns:
        raise ValueError("prune: the recipe prunes no weight to n:m. Write ste(2,4) for the layers to prune.")
    found = [(layer, patterns[layer.path]) for layer in layers(model) if layer.path in patterns]
    for layer, pattern in found:
        shape, axis = layer.kernel.shape, pattern.contracted[-1]
        if shape[axis] % pattern.m:
            raise CheckpointError(
                f"{source}: {layer.path} has shape {shape}, and {pattern.m} does not divide axis {axis}. Leave it out."
            )
    return found


def _takes_dtype(make: Any) -> bool:
    """Return whether a class of models, or a function that makes one, takes the dtype to compute in."""
    return "dtype" in inspect.signature(make.__init__ if isinstance(make, type) else make).parameters


def _check_dtype(source: Any, model: Any, given: Mapping[str, np.ndarray]) -> None:
    """Refuse a model that would compute in the dtype of a file that is not float32."""
    double = next((path for path, v in given.items() if v.dtype == np.float64), None)
    if double is not None:
        raise CheckpointError(f"{source}: {double} is float64, which would be rounded to float32. Use nm.nnx.prune.")
    other = next((path for path, v in given.items() if v.dtype != np.float32), None)
    if other is not None and not _takes_dtype(type(model)):
        raise CheckpointError(
            f"{source}: {other} is {given[other].dtype}, and {type(model).__name__} takes no dtype to compute in. Use "
            "nm.nnx.prune, which takes it in float32."
        )


def _check_in_files(source: Any, path: str, given: _Weights) -> None:
    """Refuse a parameter that neither lies in the file as it is nor is several tensors."""
    if path not in given.several and isinstance(base(given.views[path]), np.ndarray):
        raise CheckpointError(
            f"{source}: {path} is several tensors of the file, which cannot be pruned in place. Use nm.nnx.prune."
        )


def _floating(dtype: Any) -> bool:
    """Return whether a tensor has floating-point numbers that NumPy can hold."""
    return not isinstance(dtype, str) and bool(jnp.issubdtype(dtype, jnp.floating))


def _check_finite(source: Any, held: Tensors, chosen: Collection[str] | None = None) -> None:
    """Refuse tensors with NaN or infinity: the chosen ones, or all."""
    for names in held.files.values():
        for name in names:
            if (chosen is None or name in chosen) and _floating(held.dtype(name)):
                flat = held[name].reshape(-1)
                if not all(np.isfinite(flat[i : i + CHUNK]).all() for i in range(0, flat.size, CHUNK)):
                    raise CheckpointError(
                        f"{source}: the weight {name} has NaN or infinity, so the model is damaged. `nmjax verify` "
                        "lists all such tensors."
                    )
        release(held, names)


def _by_magnitude(v: np.ndarray, n: int, m: int, axis: int) -> None:
    """Prune an array in place, in parts along the other axis."""
    moved = np.moveaxis(v, axis, -1)
    step = max(1, CHUNK // moved[0].size) if moved.ndim > 1 else len(moved)
    for i in range(0, len(moved), step):
        part = moved[i : i + step]
        if v.dtype == np.float64:  # which JAX would round
            keep = largest(np.abs(part).reshape(-1, part.shape[-1]).T, n, m).T.reshape(part.shape)
        else:
            keep = np.asarray(mse(n, m).mask(jnp.asarray(part), -1, Ctx()))
        part[~keep] = 0


def _spare(steps: Steps, moments: bool, memory: float) -> float:
    """Return the memory that the largest block leaves, or refuse it."""
    need = {group: sum(_bytes(steps.layers[path], moments) for path in paths) for group, paths in steps.groups.items()}
    largest = max(need, key=lambda group: need[group])
    if need[largest] > memory and steps.blocks is not None:  # otherwise the whole model is called
        raise CheckpointError(
            f"{largest} takes {_size(need[largest])} of memory to prune, more than {_size(memory)}. Write --memory "
            f"{_size(need[largest]).replace(' ', '')}, or memory=... in Python."
        )
    return memory - need[largest]


def _size(count: float) -> str:
    """Return bytes in KB, MB or GB, rounded up."""
    if count < 1e6:
        return f"{math.ceil(count / 1e3)} KB"
    return f"{math.ceil(count / 1e6)} MB" if count < 1e9 else f"{math.ceil(count / 1e8) / 10} GB"


def _keep_outputs(steps: Steps, folder: Path, spare: float) -> None:
    """Keep outputs of blocks in files if they do not fit into this memory."""

    def keep(outputs: list[Any]) -> list[Any]:  # both of this block and of the one before are there
        fits = 2 * len(steps.calls) * sum(v.nbytes for v in outputs) <= spare
        return list(outputs) if fits else [_on_disk(np.asarray(v), folder) for v in outputs]

    if steps.blocks is not None:
        steps.blocks.keep = keep


def _bytes(layer: Layer, moments: bool) -> int:
    """Return the bytes to prune a layer: of its weight in float32 and float64, and of the statistics of its input."""
    assert layer.product is not None
    axes, size = axes_in(layer), lambda axes: math.prod(layer.product.rhs.shape[a] for a in axes)
    features = size(axes.features)
    statistics = size(axes.batch) * (features**2 if moments else features)
    return 4 * layer.kernel.size + 8 * layer.kernel.size + 16 * statistics


def _on_disk(v: np.ndarray, folder: Path) -> np.ndarray:
    """Return an array in a file without a name, which is gone with the array."""
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(v.tobytes())
        file.flush()
        return np.memmap(file, v.dtype, "r", shape=v.shape)
