"""Statistics of the inputs of a model's layers, and one-shot pruning by them."""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from rich.progress import track

from nmjax.core.pruner import Pruner
from nmjax.nnx.delivery import sparsify
from nmjax.nnx.doors import Layer
from nmjax.nnx.hardening import harden
from nmjax.nnx.layers import layers
from nmjax.nnx.recording import with_calls
from nmjax.nnx.taps import Axes, Meter, Tap, axes_of
from nmjax.nnx.variables import NM, write
from nmjax.oneshot.solvers import Solved, sparsegpt
from nmjax.products.slot import slot_state
from nmjax.pruners import wanda
from nmjax.recipes.table import Recipe

Model = TypeVar("Model")
Solver = Callable[[np.ndarray, np.ndarray, int, int], Solved]


class Inputs(NamedTuple):
    """The inputs of a layer, over all batches.

    Attributes:
      squares: The sum of squares of each feature, in float64. In a stack of layers the axes of the stack come first,
        and for experts their axis. The features of a convolution are the places of its window, each with all channels.
      moments: The second moments X'X, in float64; None if they were not asked for.
      tokens: The number of inputs, each with all features; of experts, the greatest number.

    >>> import nmjax as nm
    >>> nm.nnx.calibrate(nnx.Linear(2, 4, rngs=nnx.Rngs(0)), [jnp.ones((3, 2))])[""]
    Inputs(squares=array([3., 3.]), moments=None, tokens=3)
    """

    squares: np.ndarray
    moments: np.ndarray | None
    tokens: int


class Pruned(NamedTuple):
    """A model that was pruned in one shot.

    Attributes:
      model: A copy of the model with the pruned weights.
      solved: For each layer, the error of its output: of the solver, and of the largest magnitudes. The layers of a
        stack are numbered, as "blocks/mlp/up[3]".

    >>> import nmjax as nm
    >>> model, x = nnx.Linear(8, 4, rngs=nnx.Rngs(0)), jax.random.normal(jax.random.key(0), (100, 8))
    >>> pruned = nm.nnx.prune(model, nm.Recipe({".*": "ste(2,4)"}), [x])
    >>> error, of_magnitude = pruned.solved[""]
    >>> error < of_magnitude
    True
    """

    model: Any
    solved: dict[str, tuple[float, float]]


def calibrate(
    model: Any, batches: Iterable[Any], *, moments: bool = False, only: str = ".*", progress: bool = False
) -> dict[str, Inputs]:  # fmt: skip
    """Return statistics of the inputs of a model's layers.

    Args:
      model: A flax.nnx model. It is not changed. Switch off dropout, `model.eval()`.
      batches: Batches of inputs: a tuple of the arguments of the model's call, a dict of keyword arguments, or a single
        array. Batches of one shape compile once.
      moments: True to also return second moments X'X, of as many values as there are features, squared.
      only: A regular expression of the paths of layers.
      progress: True to show a progress bar.

    Returns:
      A dict from the layer's path to its `Inputs`.

    Raises:
      ValueError: There are no batches, no layer has such a path, or a layer is a convolution in groups.

    >>> import nmjax as nm
    >>> found = nm.nnx.calibrate(nnx.Linear(2, 4, rngs=nnx.Rngs(0)), [jnp.array([[1., 2.], [3., 0.]])])
    >>> found[""].squares.tolist(), found[""].tokens
    ([10.0, 4.0], 2)
    """
    copy, batches = nnx.clone(model), [_arguments(batch) for batch in batches]
    if not batches:
        raise ValueError("calibrate: there are no batches.")
    with_doors, _ = with_calls(copy, list(layers(copy)), Recipe(((".*", "ste(1,2)"),)), *batches[0])
    chosen = [layer for layer in with_doors if re.fullmatch(only, layer.path) and layer.has_weight]
    if not chosen:
        raise ValueError(f"calibrate: no layer has a path that matches {only!r}.")
    meters = {}
    for layer in chosen:
        stack, product = layer.stack, layer.product
        if product is None:
            raise ValueError(
                f"{layer.path}: the call on the first batch does not use this layer. Choose others by only=..."
            )
        if stack != tuple(range(len(stack))):
            raise ValueError(
                f"{layer.path}: its layers are stacked along axes {stack}, and only leading axes are known."
            )
        sizes = [layer.kernel.shape[a] for a in stack]
        meters[layer.path] = Meter(layer, sizes, product.rhs.shape, _axes(layer), moments)
        layer.put(meters[layer.path])
    graph, taps, rest = nnx.split(copy, Tap, ...)

    @jax.jit
    def statistics(rest: Any, args: Any, options: Any) -> Any:
        def total(taps: Any) -> jax.Array:
            y = nnx.merge(graph, taps, rest, copy=True)(*args, **options)
            numbers = [v for v in jax.tree.leaves(y) if jnp.issubdtype(v.dtype, jnp.floating)]
            return jnp.sum(jnp.stack([jnp.sum(v.astype(jnp.float32)) for v in numbers]))

        found = nnx.merge(graph, jax.grad(total)(taps), rest, copy=True)
        inside = {layer.path: layer.inside for layer in layers(found)}
        return {path: (inside[path].tap[...], inside[path].tokens[...]) for path in meters}

    sums: dict[str, list[np.ndarray]] = {}
    for args, options in track(batches, "Calibrating", disable=not progress):
        for path, parts in statistics(rest, args, options).items():
            parts = [np.asarray(part, np.float64) for part in parts]
            sums[path] = [a + b for a, b in zip(sums[path], parts, strict=True)] if path in sums else parts
    found = {}
    for path, (statistic, tokens) in sums.items():
        squares = np.diagonal(statistic, axis1=-2, axis2=-1).copy() if moments else statistic
        found[path] = Inputs(squares, statistic if moments else None, int(tokens.max()))
    return found


def _axes(layer: Layer) -> Axes:
    """Return the axes of a layer's weight, as its product has them."""
    assert layer.product is not None
    try:
        return axes_of(layer.product.op, layer.product.rhs.ndim)
    except ValueError as error:
        raise ValueError(f"{layer.path}: {error} Leave the layer out of the recipe.") from None


def _arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call, and its keyword arguments."""
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (batch if isinstance(batch, tuple) else (batch,)), {}


def set_norms(model: Any, inputs: Mapping[str, Inputs]) -> None:
    """Give a sparse model the norms by which `nmjax.wanda` prunes weights.

    Args:
      model: A model with ``wanda(n,m)`` in slots ``fwd_rhs``. Its state is changed.
      inputs: The statistics of the layers' inputs, which `calibrate` returned for the model before it was sparse.

    Raises:
      ValueError: No layer has such a pruner, or a layer that has it was not calibrated, or has other features.

    >>> import nmjax as nm
    >>> x = jnp.array([[10., 1., 1., 1.]])
    >>> model = nnx.Linear(4, 1, kernel_init=lambda *_: jnp.array([[1.], [-2.], [3.], [-4.]]), rngs=nnx.Rngs(0))
    >>> found = nm.nnx.calibrate(model, [x])
    >>> model = nm.nnx.sparsify(model, nm.Recipe({".*": "fwd_rhs=ste(wanda(2,4))"}))
    >>> nm.nnx.set_norms(model, found)
    >>> nm.nnx.harden(model).kernel[...].ravel().tolist()
    [1.0, 0.0, 0.0, -4.0]
    """
    sites = {layer.path: layer.site for layer in layers(model) if layer.site is not None}
    chosen = {path: site for path, site in sites.items() if _scores_by_norms(site.sparsity.fwd_rhs)}
    if not chosen:
        raise ValueError("set_norms: no layer prunes its weight by norms. Write fwd_rhs=ste(wanda(2,4)) in the recipe.")
    missing = [path for path in chosen if path not in inputs]
    if missing:
        raise ValueError(f"set_norms: {', '.join(missing[:5])}: calibrate has no statistics of these layers.")
    for path, site in chosen.items():
        norms = np.sqrt(inputs[path].squares)
        holders = jax.tree.leaves(slot_state(site.state, "fwd_rhs"), is_leaf=lambda v: isinstance(v, NM))
        holders = [v for v in holders if jnp.issubdtype(v.dtype, jnp.floating) and v.size == norms.size]
        if len(holders) != 1:
            raise ValueError(
                f"set_norms: {path or 'the model'}: {norms.shape[-1]} features were measured, and the pruner has no so "
                "many norms. It prunes along one axis: leave out layers that contract several, or calibrate this model."
            )
        write(holders[0], jnp.asarray(norms.reshape(holders[0].shape), holders[0].dtype))


def _scores_by_norms(p: Pruner) -> bool:
    return isinstance(p, wanda) or any(map(_scores_by_norms, p.parts))


def prune(
    model: Model, recipe: Recipe, batches: Iterable[Any], solver: Solver = sparsegpt, *, in_turn: bool = True,
    progress: bool = False,
) -> Pruned:  # fmt: skip
    """Prune the weights of a trained model without training, so that the outputs of its layers change little.

    Args:
      model: A flax.nnx model. It is not changed. Switch off dropout, `model.eval()`.
      recipe: It says which layers are pruned, and to which n:m: that of their slot ``fwd_rhs``.
      batches: Batches of inputs, as in `calibrate`.
      solver: A function (weight, moments, n, m) such as `nmjax.oneshot.sparsegpt`, ``wanda`` or ``admm``.
      in_turn: True to calibrate each block on the blocks before it that are already pruned. Blocks that are one stack
        are pruned together.
      progress: True to show progress bars.

    Returns:
      The pruned copy, and the errors of its layers.

    Raises:
      ValueError: The recipe does not fit the model, or a layer is a convolution in groups.

    >>> import nmjax as nm
    >>> model, batches = nnx.Linear(8, 4, rngs=nnx.Rngs(0)), [jax.random.normal(jax.random.key(0), (100, 8))]
    >>> pruned = nm.nnx.prune(model, nm.Recipe({".*": "ste(2,4)"}), batches)
    >>> bool(nm.groups.is_nm(pruned.model.kernel[...], 2, 4, axis=0)), pruned.model.hardened
    (True, 2:4 along axis 0)
    """
    batches = list(batches)
    args, options = _arguments(batches[0]) if batches else ((), {})
    hard = harden(sparsify(nnx.clone(model), recipe, *args, **options))
    current = nnx.clone(model)
    targets = {layer.path: layer for layer in layers(hard) if layer.hardened is not None}
    parts: dict[str, list[str]] = {}
    for path in targets:
        number = re.match(r".*?\d+(?=/|$)", path)
        parts.setdefault(number[0] if number and in_turn else "", []).append(path)
    solved: dict[str, tuple[float, float]] = {}
    for paths in track(list(parts.values()), "Pruning", disable=not progress):
        only = "|".join(map(re.escape, paths))
        found = calibrate(current, batches, moments=True, only=only)
        now = {layer.path: layer for layer in with_calls(current, list(layers(current)), recipe, args, options)[0]}
        for path in paths:
            weight = _solve(now[path], found[path], targets[path].hardened, solver, solved)
            write(now[path].kernel, weight)
            write(targets[path].kernel, weight)
    return Pruned(hard, solved)


def _solve(
    layer: Layer, inputs: Inputs, pattern: Any, solver: Solver, solved: dict[str, tuple[float, float]]
) -> jax.Array:  # fmt: skip
    """Return the pruned kernel of a layer or of a stack, and write down the errors."""
    assert inputs.moments is not None
    weight, stack, axes = layer.weight(), len(layer.stack), _axes(layer)
    values = np.asarray(layer.steps.apply(lambda w: w, weight) if not stack else weight, np.float64)
    order = [*range(stack), *(a + stack for part in axes for a in part)]
    moved = values.transpose(order)
    lead = moved.shape[: stack + len(axes.batch)]
    matrices = moved.reshape(*lead, inputs.moments.shape[-1], -1)
    pruned = np.empty_like(matrices)
    for index in np.ndindex(lead):
        result = solver(matrices[index], inputs.moments[index], pattern.n, pattern.m)
        solved[layer.path + (f"[{','.join(map(str, index))}]" if lead else "")] = result.error, result.magnitude
        pruned[index] = result.weight
    made = jnp.asarray(pruned.reshape(moved.shape).transpose(np.argsort(order)), weight.dtype)
    back = made if stack else layer.steps.apply(lambda w, p: p.astype(w.dtype), weight, made, back=True)
    return back.astype(layer.kernel.dtype)
