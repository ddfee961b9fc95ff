"""One-shot pruning of a trained model, block after block."""

import math
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
from nmjax.oneshot.orders import FreeInputs
from nmjax.oneshot.solvers import Solved, relative_error, sparsegpt
from nmjax.products.sparsity import Sparsity
from nmjax.programs.states import first
from nmjax.pruners.whole_rows import has_rows, rows
from nmjax.recipes.table import Recipe

Model = TypeVar("Model")
EVERY = 30.0  # seconds between lines of progress where stderr is no terminal
GOOD = 10  # rows for an input: a fit of half the inputs then errs by about a tenth more on other data than on these
Solver = Callable[[np.ndarray, np.ndarray, int, int], Solved]


class Pruned(NamedTuple):
    """A model that was pruned in one shot.

    Attributes:
      model: A copy of the model with the pruned weights.
      errors: For each layer, the relative error of its output on the batches: with the solver, and with magnitude
        pruning of this layer alone. The layers of a stack are numbered, as "blocks/mlp/up[3]".

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
    in_turn: bool = True, permute: bool = False, progress: bool = False,
) -> Pruned:  # fmt: skip
    """Prune the weights of a trained model without training, so that the outputs of its layers change little.

    Args:
      model: A flax.nnx model. It is not changed. Call `model.eval()` first to switch off dropout. If it is sparse, this
        recipe takes the place of its own, as by `sparsify`, and its weights count as they are.
      recipe: Which layers to prune, and the pattern n:m, which is that of the slot ``y_w``. A
        method, or its text such as "ste(2,4)", is for all layers.
      batches: Batches of inputs, as in `calibrate`.
      solver: A function (weight, moments, n, m) such as `nmjax.oneshot.sparsegpt`, ``wanda`` or ``admm``. It returns an
        `nmjax.oneshot.Solved`, whose errors are those of the result.
      in_turn: True to calibrate each block on the outputs of the pruned blocks before it, which are kept. The blocks
        are called one after another. If that is not possible, for example in a scan or a checkpoint, the whole model is
        called for each block, and the progress bar says why. Blocks that are one stack are pruned together. Only the
        second moments of one block are in memory. False to calibrate all layers on the model before pruning, at once.
      permute: True to give inputs whose order is free, of the layers of `nmjax.models`, the order in which the pattern
        keeps most: hidden features of a perceptron, and features of a head of values. The dense function stays the
        same. It needs ``in_turn``.
      progress: True to show a progress bar on stderr; where that is no terminal, a line every 30 seconds.

    Returns:
      The pruned copy, and the errors of its layers on these batches. To train on with the masks as they are, use
      ``y_w=ste(hold(mse(2,4)))``.

    Raises:
      ValueError: The recipe does not fit the model, the call does not use a layer, two layers share a weight, or a
        layer is a convolution in groups.

    Warns:
      UserWarning: A layer, or one of its experts, has fewer rows than inputs to calibrate with, which is told once,
        before its block is solved; or the model raises an error when its blocks are called one after another, so the
        whole model is called for each.

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
    steps = Steps(model, recipe, calls, in_turn, permute)
    hard, _ = hardened(model, recipe, calls[0])  # its weights are replaced: a schedule that goes on does not matter
    variables = [dict(parameters(one)) for one in (steps.model, hard)]
    errors: dict[str, tuple[float, float]] = {}
    for number in steps.shown() if progress else steps:
        for path, (values, found) in steps.solve(number, solver).items():
            for own in variables:
                write(own[path], values)
            errors |= found
        steps.run(number)
    return Pruned(hard, {path: errors[path] for path in sorted(errors, key=layer_paths.by_number)})


def hardened(model: Model, recipe: Recipe, call: Call) -> tuple[Model, dict[str, Any]]:
    """Return a hardened copy of a model, and the pattern of each layer that is n:m in it."""
    sparse = sparsify(nnx.clone(model), recipe, *call.args, **call.options)
    _check_pruners(sparse)
    hard, _ = harden_without_warning(sparse)
    return hard, {layer.path: layer.hardened for layer in layers(hard) if layer.hardened is not None}


class Steps:
    """One-shot pruning of a model, block after block. It writes no weight: whoever calls it does.

    Iterating yields the numbers of the blocks. Each is solved, its weights are written, and then it is run.

    Attributes:
      model: The model without an earlier recipe. It shares the arrays of the one that was given.
      layers: Its layers, by path.
      patterns: The pattern of each layer that is pruned, by path.
      order: The paths of the blocks, in the order of their calls, up to the last one that is pruned.
    """

    def __init__(
        self, model: Any, recipe: Recipe, calls: list[Call], in_turn: bool = True, permute: bool = False
    ) -> None:
        """Find the blocks. The arguments are those of `prune`."""
        if permute and not (in_turn and any(hasattr(module, "free_inputs") for module in modules_of(model).values())):
            raise ValueError(
                "prune: permute=True needs in_turn=True, and modules with a method free_inputs, as nm.models have."
            )
        self.permute = permute
        args, options = calls[0]
        found: list[dict[str, Any]] = []
        nnx.eval_shape(lambda model: found.append(hardened(model, recipe, calls[0])[1]), model)
        (self.patterns,) = found
        if not self.patterns:
            raise ValueError("prune: the recipe prunes no weight to n:m. Write ste(2,4) for the layers to prune.")
        self.model = sparsify(nnx.clone(model), Recipe({".*": "dense"}))
        every = with_calls(self.model, list(layers(self.model)), recipe, args, options)[0]
        self.layers = {layer.path: layer for layer in every}
        _check_layers([self.layers[path] for path in self.patterns])
        groups = blocks_of(self.layers, modules_of(self.model)) if in_turn else {"": list(self.layers)}
        chosen = {group: [path for path in paths if path in self.patterns] for group, paths in groups.items()}
        self.groups = {group: paths for group, paths in chosen.items() if paths}
        self.calls, self._told, self._measured = calls, False, statistics()
        self.blocks, self.title = None, "Pruning"
        if in_turn:
            self.blocks, self.title = _blocks(self.model, list(groups), list(self.groups), calls)
        order = _in_order(self.model, self.groups, args, options) if self.blocks is None else self.blocks.paths
        self.order = order[: max(order.index(group) for group in self.groups) + 1]

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self.order)))

    def shown(self, begin: int = 0) -> Iterator[int]:
        """Yield the numbers of the blocks from ``begin`` on, and show the progress on stderr."""
        return _shown(range(begin, len(self.order)), self.title)

    def solve(
        self, number: int, solver: Solver, moments: bool = True
    ) -> dict[str, tuple[jax.Array, dict[str, tuple[float, float]]]]:
        """Return the new values of parameters of a block, by path, and the errors of layers that are pruned.

        Args:
          number: The number of the block.
          solver: As in `prune`.
          moments: False to measure only the norms of the inputs. Errors are those of inputs without correlation then.
        """
        group = self.order[number]
        begin = "" if self.blocks is None else group
        own = {path: path[len(begin) :].lstrip("/") for path in self.groups.get(group, ())}
        if not own:
            return {}
        part = self.model if self.blocks is None else self.blocks.module(number)
        asked = self.calls if self.blocks is None else self.blocks.calls(number)
        only = "|".join(map(re.escape, own.values()))
        inputs = calibrated(part, asked, self._measured, moments=moments, only=only)
        self._tell_few_rows({path: inputs[inside] for path, inside in own.items()})
        solved: dict[str, tuple[jax.Array, dict[str, tuple[float, float]]]] = {}
        orders, moves = self._orders(part, begin, {path: inputs[inside] for path, inside in own.items()})
        for path, inside in own.items():
            found = inputs.pop(inside)
            order = orders.get(path)
            solved[self.layers[path].kernel_path] = _solve(self.layers[path], found, self.patterns[path], solver, order)
        held = dict(parameters(self.model)) if moves else {}
        for layer, outputs in moves.items():
            for path in (path for path in held if path.startswith(f"{layer}/")):
                values, errors = solved.get(path) or (jnp.asarray(held[path].get_value()), {})
                solved[path] = values[..., outputs], errors
        return solved

    def _orders(
        self, part: Any, begin: str, inputs: dict[str, Inputs]
    ) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """Return the new order of the inputs of layers, and of the outputs of the layers whose outputs these are."""
        orders: dict[str, np.ndarray] = {}
        moves: dict[str, np.ndarray] = {}
        for place, module in modules_of(part).items() if self.permute else ():
            prefix = "/".join(filter(None, (begin, place)))
            for free in module.free_inputs() if hasattr(module, "free_inputs") else ():
                path = f"{prefix}/{free.layer}".lstrip("/")
                for name in (free.layer, *free.made_by):
                    if f"{prefix}/{name}".lstrip("/") not in self.layers:
                        owner = prefix or "the model"
                        raise ValueError(f"prune: free_inputs of {owner} names {name!r}, which is no layer of it.")
                if path in inputs:
                    if inputs[path].squares.ndim > 1:
                        raise ValueError(f"prune: {path} is a stack. permute=True needs blocks in a list: scan=False.")
                    kernel, pattern = np.asarray(self.layers[path].kernel.get_value(), np.float64), self.patterns[path]
                    scores = np.square(kernel) * inputs[path].squares[:, None]
                    makers = [f"{prefix}/{name}".lstrip("/") for name in free.made_by]
                    self._check_free(free, path, len(scores), makers)
                    orders[path], of_outputs = free.orders(scores, pattern.n, pattern.m)
                    moves |= dict.fromkeys(makers, of_outputs)
        return orders, moves

    def _check_free(self, free: FreeInputs, path: str, inputs: int, makers: list[str]) -> None:
        """Refuse sizes that do not fit."""
        size, m = inputs // (free.parts * free.uses), self.patterns[path].m
        wrong = [one for one in makers if self.layers[one].kernel.shape[-1] != size * free.parts]
        if wrong or inputs % (free.parts * free.uses):
            raise ValueError(
                f"prune: {free} of a layer of {inputs} inputs, {path}, needs layers of {inputs / free.uses:g} outputs "
                f"in {free.parts} parts, and {' and '.join(wrong) or path} has others."
            )
        if size % m:
            raise ValueError(
                f"prune: permute=True orders the inputs of {path} in parts of {size}, which m={m} does not divide. "
                "Leave it out, or choose another pattern."
            )

    def run(self, number: int) -> None:
        """Compute the outputs of a block with the weights that it has now, if a later one is pruned."""
        if self.blocks is not None and number + 1 < len(self.order):
            self.blocks.run(number, self.blocks.calls(number))

    def _tell_few_rows(self, inputs: dict[str, Inputs]) -> None:
        """Warn of the layer that lacks most rows, before it is solved, unless another one was told."""
        missing = {path: found.squares.shape[-1] / max(found.fewest, 1) for path, found in inputs.items()}
        path = max(missing, key=lambda path: missing[path])
        if self._told or missing[path] <= 1:
            return
        found, self._told = inputs[path], True
        of = "" if found.fewest == found.tokens else " of an expert"
        features = found.squares.shape[-1]
        more = f"{math.ceil(GOOD * missing[path]):,} times as much" if found.fewest else "much more"
        warnings.warn(
            f"prune: {path or 'the model'} has {found.fewest:,} rows{of} for {features:,} inputs in the calibration "
            f"data. With fewer rows than inputs, the errors of outputs would be larger on other data. Give {more}: "
            f"{GOOD} rows for an input are good.",
            stacklevel=3,
        )


def _shown(numbers: range, title: str) -> Iterator[int]:
    """Yield the numbers of blocks, and show the progress on stderr: after the first block how long the others take."""
    console = Console(stderr=True)
    if console.is_terminal or console.is_jupyter:
        yield from track(numbers, title, console=console)
        return
    began, told = time.monotonic(), -EVERY
    for done, number in enumerate(numbers, 1):
        yield number
        now = time.monotonic() - began
        if now - told >= EVERY:
            told, rest = now, len(numbers) - done
            left = f", about {in_words(now / done * rest)} left" if rest else ""
            text = f"{title}: {done} of {len(numbers)} blocks in {in_words(now)}{left}."
            print(text, file=sys.stderr, flush=True)


def in_words(duration: float) -> str:
    """Return a duration in words.

    >>> in_words(7.3), in_words(200), in_words(9000)
    ('7 seconds', '3 minutes', '2.5 hours')
    """
    if duration < 90:
        return f"{max(round(duration), 1)} seconds"
    return f"{round(duration / 60)} minutes" if duration < 5400 else f"{duration / 3600:.1f} hours"


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
            stacklevel=4,
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


def parameters(model: Any) -> Iterator[tuple[str, nnx.Variable[Any]]]:
    """Yield the path and the variable of each parameter of a model."""
    for path, node in nnx.iter_graph(model):
        if isinstance(node, nnx.Param):
            yield "/".join(map(str, path)), node


def _solve(
    layer: Layer, inputs: Inputs, pattern: Any, solver: Solver, order: np.ndarray | None
) -> tuple[jax.Array, dict[str, tuple[float, float]]]:  # fmt: skip
    """Return the pruned kernel of a layer or of a stack, and the errors of each layer. Its inputs get this order."""
    moments = inputs.squares if inputs.moments is None else inputs.moments
    if order is not None:
        moments = moments[order] if inputs.moments is None else moments[order][:, order]
    weight, stack, axes = value(layer), len(layer.stack), axes_in(layer)
    parameter = stacked(layer, layer.origin).parameter
    values = np.asarray(parameter.apply(lambda w: w, weight), np.float64)
    places = [*range(stack), *(a + stack for part in axes for a in part)]
    moved = values.transpose(places)
    lead = moved.shape[: stack + len(axes.batch)]
    matrices = moved.reshape(*lead, inputs.squares.shape[-1], -1)
    matrices = matrices if order is None else matrices[order]
    allowed = np.ones((), bool) if layer.mask is None else np.asarray(first(layer.mask, layer.stack), bool)  # of a conv
    allowed = np.broadcast_to(allowed, values.shape).transpose(places).reshape(matrices.shape)
    pruned = np.empty_like(matrices)
    errors: dict[str, tuple[float, float]] = {}
    for index in np.ndindex(lead):
        name, w = layer.path + (f"[{','.join(map(str, index))}]" if lead else ""), matrices[index]
        try:
            result = solver(w, moments[index], pattern.n, pattern.m)
        except ValueError as error:
            raise ValueError(f"{name or 'the model'}: {error}") from error
        pruned[index], error = result.weight, result.error
        if not allowed[index].all():
            pruned[index] = np.where(allowed[index], result.weight, 0)
            error = relative_error(w, pruned[index], moments[index])
        errors[name] = error, result.magnitude_error
    made = jnp.asarray(pruned.reshape(moved.shape).transpose(np.argsort(places)), weight.dtype)
    hard = parameter.apply(lambda w, made: made.astype(w.dtype), weight, made, back=True)
    return back(layer, hard).astype(layer.kernel.dtype), errors
