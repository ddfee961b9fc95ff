"""One-shot pruning of a trained model, block after block."""

import re
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from rich.console import Console
from rich.progress import track

from nmjax.core import layer_paths
from nmjax.nnx.batches import Call
from nmjax.nnx.between import modules_of
from nmjax.nnx.blocks import Blocks, blocks_of
from nmjax.nnx.calibration import Inputs, axes_in, calibrated, statistics
from nmjax.nnx.delivery import sparsify
from nmjax.nnx.hardening import harden_without_warning
from nmjax.nnx.layer import Layer
from nmjax.nnx.layers import back, layers, stacked, value
from nmjax.nnx.recording import order_of_calls, with_calls
from nmjax.nnx.variables import write
from nmjax.oneshot.solvers import Solved, magnitude, relative_error, sparsegpt
from nmjax.products.sparsity import Sparsity
from nmjax.programs.states import first
from nmjax.pruners.whole_rows import has_rows, rows
from nmjax.recipes.table import Recipe

Model = TypeVar("Model")
EVERY = 30.0  # seconds between lines of progress where stderr is no terminal
Solver = Callable[[np.ndarray, np.ndarray, int, int], Solved]


class Pruned(NamedTuple):
    """A model that was pruned in one shot.

    Attributes:
      model: A copy of the model with the pruned weights.
      errors: For each layer, the relative error of its output on the batches: with the solver, and with magnitude
        pruning. The second is that for the inputs that the dense model gives, so it does not depend on the solver. The
        layers of a stack are numbered, as "blocks/mlp/up[3]".

    >>> import nmjax as nm
    >>> model, x = nnx.Linear(8, 4, rngs=nnx.Rngs(0)), jax.random.normal(jax.random.key(0), (100, 8))
    >>> pruned = nm.nnx.prune(model, nm.Recipe({".*": "ste(2,4)"}), [x])
    >>> error, of_magnitude = pruned.errors[""]
    >>> error < of_magnitude
    True
    """

    model: Any
    errors: dict[str, tuple[float, float]]


def prune(
    model: Model, recipe: Recipe | Sparsity | str, batches: Iterable[Any], solver: Solver = sparsegpt, *,
    in_turn: bool = True, progress: bool = False,
) -> Pruned:  # fmt: skip
    """Prune the weights of a trained model without training, so that the outputs of its layers change little.

    Args:
      model: A flax.nnx model. It is not changed. Call `model.eval()` first to switch off dropout. If it is sparse, this
        recipe takes the place of its own, as by `sparsify`, and its weights count as they are.
      recipe: Which layers to prune, and the pattern n:m, which is that of the slot ``y_w``. A
        method, or its text such as "ste(2,4)", is for all layers.
      batches: Batches of inputs, as in `calibrate`.
      solver: A function (weight, moments, n, m) such as `nmjax.oneshot.sparsegpt`, ``wanda`` or ``admm``.
      in_turn: True to calibrate each block on the outputs of the pruned blocks before it, which are kept. The blocks
        are called one after another. If that is not possible, for example in a scan or a checkpoint, the whole model is
        called for each block, and the progress bar says why. Blocks that are one stack are pruned together. Only the
        second moments of one block are in memory. False to calibrate all layers on the model before pruning, at once.
      progress: True to show a progress bar on stderr; where that is no terminal, a line every 30 seconds.

    Returns:
      The pruned copy, and the errors of its layers on these batches. To train on with the masks as they are, use
      ``y_w=ste(hold(mse(2,4)))``.

    Raises:
      ValueError: The recipe does not fit the model, the call does not use a layer, two layers share a weight, or a
        layer is a convolution in groups.

    Warns:
      UserWarning: Layers, or one of their experts, have fewer rows than inputs to calibrate with; or the model raises
        an error when its blocks are called one after another, so the whole model is called for each.

    >>> import nmjax as nm
    >>> model, batches = nnx.Linear(8, 4, rngs=nnx.Rngs(0)), [jax.random.normal(jax.random.key(0), (100, 8))]
    >>> pruned = nm.nnx.prune(model, nm.Recipe({".*": "ste(2,4)"}), batches)
    >>> bool(nm.groups.is_nm(pruned.model.kernel[...], 2, 4, axis=0)), pruned.model.hardened
    (True, 2:4 along axis 0)
    """
    calls = [Call.of(batch) for batch in batches]
    if not calls:
        raise ValueError("prune: there are no batches.")
    recipe = recipe if isinstance(recipe, Recipe) else Recipe({".*": recipe})
    args, options = calls[0]
    sparse = sparsify(nnx.clone(model), recipe, *args, **options)
    _check_pruners(sparse)
    hard, _ = harden_without_warning(sparse)  # its weights are replaced: a schedule that goes on does not matter
    targets = {layer.path: layer for layer in layers(hard) if layer.hardened is not None}
    if not targets:
        raise ValueError("prune: the recipe prunes no weight to n:m. Write ste(2,4) for the layers to prune.")
    current = sparsify(nnx.clone(model), Recipe({".*": "dense"}))  # layers are calibrated without an earlier recipe
    dense = nnx.clone(current)
    now = {layer.path: layer for layer in with_calls(current, list(layers(current)), recipe, args, options)[0]}
    _check_layers([now[path] for path in targets])
    every = blocks_of(now, modules_of(current)) if in_turn else {"": list(now)}
    groups = {
        group: chosen for group, paths in every.items() if (chosen := [path for path in paths if path in targets])
    }
    blocks, title = _blocks(current, list(every), list(groups), calls) if in_turn else (None, "Pruning")
    order = _in_order(current, groups, args, options) if blocks is None else blocks.paths
    dense_blocks = None if blocks is None else blocks.of(dense)
    errors: dict[str, tuple[float, float]] = {}
    by_magnitude: dict[str, tuple[float, float]] = {}
    few: list[str] = []
    measured = statistics()
    for number, group in enumerate(_shown(order, title) if progress else order):
        begin = "" if blocks is None else group
        own = {path: path[len(begin) :].lstrip("/") for path in groups.get(group, ())}
        only = "|".join(map(re.escape, own.values()))
        if in_turn:  # otherwise the inputs below are those of the dense model
            part, asked = _part(dense, calls, dense_blocks, number)
            found = calibrated(part, asked, measured, moments=True, only=only) if own else {}
            for path, inside in own.items():
                _solve(now[path], found[inside], targets[path].hardened, magnitude, by_magnitude)
            if dense_blocks is not None:
                dense_blocks.run(number, asked)
        part, asked = _part(current, calls, blocks, number)
        found = calibrated(part, asked, measured, moments=True, only=only) if own else {}
        for path, inside in own.items():
            inputs = found[inside]
            weight = _solve(now[path], inputs, targets[path].hardened, solver, errors)
            write(now[path].kernel, weight)
            write(targets[path].kernel, weight)
            if inputs.fewest < inputs.squares.shape[-1]:
                of = "" if inputs.fewest == inputs.tokens else " of an expert"
                few.append(f"{path or 'the model'}: {inputs.fewest:,} rows{of} for {inputs.squares.shape[-1]:,} inputs")
        if blocks is not None:
            blocks.run(number, asked)
    if few:
        warnings.warn(
            f"prune: the calibration data has fewer rows than {len(few)} of the layers have inputs, so the errors of "
            f"their outputs would be larger on other data: {'; '.join(few[:3])}. Use more data for calibration.",
            stacklevel=2,
        )
    errors |= {path: (error, by_magnitude[path][1]) for path, (error, _) in errors.items() if in_turn}
    return Pruned(hard, {path: errors[path] for path in sorted(errors, key=layer_paths.by_number)})


def _shown(groups: list[str], title: str) -> Iterator[str]:
    """Yield the blocks, and show the progress on stderr."""
    console = Console(stderr=True)
    if console.is_terminal or console.is_jupyter:
        yield from track(groups, title, console=console)
        return
    began = told = time.monotonic()
    for number, group in enumerate(groups, 1):
        yield group
        now = time.monotonic()
        if now - told >= EVERY:
            told = now
            print(f"{title}: {number} of {len(groups)} blocks in {now - began:.0f} s.", file=sys.stderr, flush=True)


def _part(model: Any, calls: list[Call], blocks: Blocks | None, number: int) -> tuple[Any, list[Call]]:
    """Return what is called to calibrate a block, and its calls: the block, or else the whole model."""
    return (model, calls) if blocks is None else (blocks.module(number), blocks.calls(number))


def _blocks(
    model: Any, paths: list[str], needed: list[str], calls: list[Call]
) -> tuple[Blocks | None, str]:  # fmt: skip
    """Return the blocks if they can be called on their own, and the title of the progress bar, which tells why not."""
    found = Blocks.find(model, paths, needed, calls)
    if isinstance(found, Blocks):
        return found, "Pruning"
    if found.raised:
        warnings.warn(
            "prune: the whole model is called for each block, which takes longer, because its blocks cannot be called "
            f"on their own: {found.reason}",
            stacklevel=3,
        )
        return None, "Pruning"
    return None, f"Pruning, with the whole model for each block, because {found.reason}"


def _in_order(model: Any, groups: dict[str, list[str]], args: Any, options: Any) -> list[str]:
    """Return the groups in the order in which a call asks for their last layers."""
    order = {path: place for place, path in enumerate(order_of_calls(model, args, options))}
    return sorted(groups, key=lambda group: max(order.get(path, -1) for path in groups[group]))


def _check_pruners(sparse: Any) -> None:
    """Refuse pruners that choose for several outputs of a layer at once, all in one message."""
    slots = {layer.path: layer.sparsity.slots["y_w"] for layer in layers(sparse) if layer.has_weight}
    of_rows = lambda slot: isinstance(slot.core, rows) or has_rows(slot.pruner.final)
    joint = lambda slot: of_rows(slot) or slot.pruner.final.facts.pattern_across is not None
    wrong = [f"{path}: {slot.pruner}" for path, slot in slots.items() if joint(slot)]
    if wrong:
        raise ValueError(
            f"prune: solvers choose n of m inputs for each output alone, and these pruners choose for several outputs "
            f"at once: {', '.join(wrong[:5])}. Write ste(2,4)."
        )


def _check_layers(chosen: list[Layer]) -> None:
    """Refuse layers whose inputs cannot be calibrated, and those that share a weight, all in one message."""
    wrong: list[str] = []
    owners: dict[int, str] = {}
    for layer in chosen:
        try:
            axes_in(layer)
        except ValueError as error:
            wrong.append(str(error))
        owner = owners.setdefault(id(layer.kernel), layer.path)
        if owner != layer.path:
            wrong.append(
                f"{owner} and {layer.path} share a weight, which no solver can prune for both. Leave them out."
            )
    if wrong:
        raise ValueError("\n".join(wrong))


def _solve(
    layer: Layer, inputs: Inputs, pattern: Any, solver: Solver, errors: dict[str, tuple[float, float]]
) -> jax.Array:  # fmt: skip
    """Return the pruned kernel of a layer or of a stack, and write down the errors."""
    assert inputs.moments is not None
    weight, stack, axes = value(layer), len(layer.stack), axes_in(layer)
    parameter = stacked(layer, layer.origin).parameter
    values = np.asarray(parameter.apply(lambda w: w, weight), np.float64)
    order = [*range(stack), *(a + stack for part in axes for a in part)]
    moved = values.transpose(order)
    lead = moved.shape[: stack + len(axes.batch)]
    matrices = moved.reshape(*lead, inputs.moments.shape[-1], -1)
    allowed = np.ones((), bool) if layer.mask is None else np.asarray(first(layer.mask, layer.stack), bool)  # of a conv
    allowed = np.broadcast_to(allowed, values.shape).transpose(order).reshape(matrices.shape)
    pruned = np.empty_like(matrices)
    for index in np.ndindex(lead):
        name, w = layer.path + (f"[{','.join(map(str, index))}]" if lead else ""), matrices[index]
        try:
            result = solver(w, inputs.moments[index], pattern.n, pattern.m)
        except ValueError as error:
            raise ValueError(f"{name or 'the model'}: {error}") from error
        pruned[index] = np.where(allowed[index], result.weight, 0)
        errors[name] = relative_error(w, pruned[index], inputs.moments[index]), result.magnitude_error
    made = jnp.asarray(pruned.reshape(moved.shape).transpose(np.argsort(order)), weight.dtype)
    hard = parameter.apply(lambda w, made: made.astype(w.dtype), weight, made, back=True)
    return back(layer, hard).astype(layer.kernel.dtype)
