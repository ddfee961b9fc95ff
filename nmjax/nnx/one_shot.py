"""One-shot pruning of a trained model, block after block."""

import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from rich.progress import track

from nmjax.nnx.blocks import Blocks, Call, block_of, modules_of
from nmjax.nnx.calibration import Inputs, axes_in, calibrate
from nmjax.nnx.delivery import sparsify
from nmjax.nnx.doors import Layer
from nmjax.nnx.hardening import harden
from nmjax.nnx.layers import layers
from nmjax.nnx.recording import with_calls
from nmjax.nnx.variables import write
from nmjax.oneshot.solvers import Solved, sparsegpt
from nmjax.recipes.table import Recipe

Model = TypeVar("Model")
Solver = Callable[[np.ndarray, np.ndarray, int, int], Solved]


class Pruned(NamedTuple):
    """A model that was pruned in one shot.

    Attributes:
      model: A copy of the model with the pruned weights.
      errors: For each layer, the relative error of its output: with the solver, and with magnitude pruning. The layers
        of a stack are numbered, as "blocks/mlp/up[3]".

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
    model: Model, recipe: Recipe, batches: Iterable[Any], solver: Solver = sparsegpt, *, in_turn: bool = True,
    progress: bool = False,
) -> Pruned:  # fmt: skip
    """Prune the weights of a trained model without training, so that the outputs of its layers change little.

    Args:
      model: A flax.nnx model. It is not changed. Call `model.eval()` first to switch off dropout.
      recipe: Which layers to prune, and the pattern n:m, which is that of the slot ``fwd_rhs``.
      batches: Batches of inputs, as in `calibrate`.
      solver: A function (weight, moments, n, m) such as `nmjax.oneshot.sparsegpt`, ``wanda`` or ``admm``.
      in_turn: True to calibrate each block on the outputs of the pruned blocks before it. Blocks that are one stack are
        pruned together.
      progress: True to show progress bars.

    Returns:
      The pruned copy, and the errors of its layers.

    Raises:
      ValueError: The recipe does not fit the model, the call does not use a layer, or a layer is a convolution in groups.

    >>> import nmjax as nm
    >>> model, batches = nnx.Linear(8, 4, rngs=nnx.Rngs(0)), [jax.random.normal(jax.random.key(0), (100, 8))]
    >>> pruned = nm.nnx.prune(model, nm.Recipe({".*": "ste(2,4)"}), batches)
    >>> bool(nm.groups.is_nm(pruned.model.kernel[...], 2, 4, axis=0)), pruned.model.hardened
    (True, 2:4 along axis 0)
    """
    calls = [Call.of(batch) for batch in batches]
    if not calls:
        raise ValueError("prune: there are no batches.")
    args, options = calls[0]
    hard = harden(sparsify(nnx.clone(model), recipe, *args, **options))
    targets = {layer.path: layer for layer in layers(hard) if layer.hardened is not None}
    current = nnx.clone(model)
    now = {layer.path: layer for layer in with_calls(current, list(layers(current)), recipe, args, options)[0]}
    _check([now[path] for path in targets])
    groups = _groups(current, list(targets)) if in_turn else {"": list(targets)}
    alone = [group for group in groups if group]
    blocks = Blocks.find(current, alone, calls)
    solved: dict[str, tuple[float, float]] = {}
    for group, paths in track(list(groups.items()), "Pruning", disable=not progress):
        if group and blocks is not None:
            number = alone.index(group)
            asked = blocks.calls(number)
            part, own = blocks.module(number), {path: path[len(group) + 1 :] for path in paths}
        else:
            number, asked, part, own = None, calls, current, {path: path for path in paths}
        found = calibrate(part, asked, moments=True, only="|".join(map(re.escape, own.values())))
        for path in paths:
            weight = _solve(now[path], found[own[path]], targets[path].hardened, solver, solved)
            write(now[path].kernel, weight)
            write(targets[path].kernel, weight)
        if number is not None and blocks is not None:
            blocks.run(number, asked)
    return Pruned(hard, solved)


def _groups(model: Any, paths: list[str]) -> dict[str, list[str]]:
    """Return the paths of layers by the block that they are in, "" for those outside."""
    modules, groups = modules_of(model), {}
    for path in paths:
        groups.setdefault(block_of(path, modules) or "", []).append(path)
    return groups


def _check(chosen: list[Layer]) -> None:
    """Refuse layers whose inputs cannot be calibrated, all in one message."""
    wrong = []
    for layer in chosen:
        try:
            axes_in(layer)
        except ValueError as error:
            wrong.append(str(error))
    if wrong:
        raise ValueError("\n".join(wrong))


def _solve(
    layer: Layer, inputs: Inputs, pattern: Any, solver: Solver, solved: dict[str, tuple[float, float]]
) -> jax.Array:  # fmt: skip
    """Return the pruned kernel of a layer or of a stack, and write down the errors."""
    assert inputs.moments is not None
    weight, stack, axes = layer.weight(), len(layer.stack), axes_in(layer)
    values = np.asarray(layer.steps.apply(lambda w: w, weight) if not stack else weight, np.float64)
    order = [*range(stack), *(a + stack for part in axes for a in part)]
    moved = values.transpose(order)
    lead = moved.shape[: stack + len(axes.batch)]
    matrices = moved.reshape(*lead, inputs.moments.shape[-1], -1)
    pruned = np.empty_like(matrices)
    for index in np.ndindex(lead):
        result = solver(matrices[index], inputs.moments[index], pattern.n, pattern.m)
        solved[layer.path + (f"[{','.join(map(str, index))}]" if lead else "")] = result.error, result.magnitude_error
        pruned[index] = result.weight
    made = jnp.asarray(pruned.reshape(moved.shape).transpose(np.argsort(order)), weight.dtype)
    back = made if stack else layer.steps.apply(lambda w, p: p.astype(w.dtype), weight, made, back=True)
    return back.astype(layer.kernel.dtype)
