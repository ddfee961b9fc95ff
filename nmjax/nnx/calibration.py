"""Statistics of the inputs of a model's layers."""

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from rich.progress import track

from nmjax.nnx.blocks import Call, Rest
from nmjax.nnx.layer import Layer
from nmjax.nnx.layers import layers
from nmjax.nnx.recording import with_calls
from nmjax.nnx.taps import Axes, Meter, Tap, axes_of
from nmjax.nnx.variables import SparsityVariable, write
from nmjax.products.slot import slot_state
from nmjax.pruners.input_norms import needs_norms
from nmjax.recipes.table import Recipe


class Inputs(NamedTuple):
    """The inputs of a layer, over all batches.

    Attributes:
      squares: The sum of squares of each feature, in float64. In a stack of layers the axes of the stack come first,
        and for experts their axis. The features of a convolution are the places of its window, each with all channels.
      moments: The second moments X'X, in float64; None if they were not asked for.
      tokens: The number of rows of the input, each with all features. For experts, the largest number of one expert.
      fewest: The same number; for experts, the smallest number of one expert.

    >>> import nmjax as nm
    >>> nm.nnx.calibrate(nnx.Linear(2, 4, rngs=nnx.Rngs(0)), [jnp.ones((3, 2))])[""]
    Inputs(squares=array([3., 3.]), moments=None, tokens=3, fewest=3)
    """

    squares: np.ndarray
    moments: np.ndarray | None
    tokens: int
    fewest: int


def calibrate(
    model: Any, batches: Iterable[Any], *, moments: bool = False, only: str = ".*", progress: bool = False
) -> dict[str, Inputs]:  # fmt: skip
    """Return statistics of the inputs of a model's layers, as the model computes them.

    A layer that is sparse stays so. Its inputs are measured before it prunes them. For the statistics of a dense model,
    pass the model as it was before `sparsify`.

    Batches are added in float64. Within a batch sums are in float32, and those of many rows are compensated.

    Args:
      model: A flax.nnx model. It is not changed. Call `model.eval()` first to switch off dropout.
      batches: Batches of inputs: a tuple of the arguments of the model's call, a dict of keyword arguments, or a single
        array. Batches of one shape compile once. Padding counts as input: pass texts without it.
      moments: True to also return second moments X'X, an array [features, features] for each layer.
      only: A regular expression of the paths of layers.
      progress: True to show a progress bar.

    Returns:
      A dict from the layer's path to its `Inputs`. A call of a layer whose result has no gradient is not counted.

    Raises:
      ValueError: There are no batches, no layer has such a path, a chosen layer is a convolution in groups or is used
        along several axes of its weight, or no gradient of the output reaches a layer.

    >>> import nmjax as nm
    >>> found = nm.nnx.calibrate(nnx.Linear(2, 4, rngs=nnx.Rngs(0)), [jnp.array([[1., 2.], [3., 0.]])])
    >>> found[""].squares.tolist(), found[""].tokens
    ([10.0, 4.0], 2)
    """
    calls = [Call.of(batch) for batch in batches]
    if not calls:
        raise ValueError("calibrate: there are no batches.")
    return calibrated(model, calls, statistics(), moments=moments, only=only, progress=progress)


def calibrated(
    model: Any, calls: list[Call], measured: Any, *, moments: bool, only: str, progress: bool = False
) -> dict[str, Inputs]:  # fmt: skip
    """Return what `calibrate` returns, by a compiled function that several models can share.

    Args:
      model, moments, only, progress: As in `calibrate`.
      calls: The calls of the model.
      measured: The function that `statistics` returned.

    Raises:
      ValueError: As `calibrate`.
    """
    copy = nnx.clone(model)
    registered, _ = with_calls(copy, list(layers(copy)), Recipe(((only, "ste(1,2)"),)), *calls[0])
    chosen = [layer for layer in registered if re.fullmatch(only, layer.path) and layer.has_weight]
    if not chosen:
        raise ValueError(f"calibrate: no layer has a path that matches {only!r}.")
    for layer in chosen:
        axes = axes_in(layer)
        assert layer.product is not None
        layer.put(Meter(layer, [layer.kernel.shape[a] for a in layer.stack], layer.product.rhs.shape, axes, moments))
    paths = tuple(layer.path for layer in chosen)
    graph, taps, rest = nnx.split(copy, Tap, ...)
    sums: dict[str, list[np.ndarray]] = {}
    for call in track(calls, "Calibrating", disable=not progress):
        arrays, others = call.split()
        for path, parts in measured(graph, paths, others, taps, rest, arrays).items():
            if path not in sums:
                sums[path] = [np.zeros(part.shape, np.float64) for part in parts]
            for total, part in zip(sums[path], parts, strict=True):
                np.add(total, np.asarray(part), out=total)
    unseen = [path or "the model" for path, (_, tokens) in sums.items() if not tokens.any()]
    if unseen:
        raise ValueError(
            f"{', '.join(unseen[:8])}: no gradient of the output reaches these layers, so their inputs were not "
            "measured. Their results are unused, or pass through jax.lax.stop_gradient or a branch that did not run. "
            "Leave them out."
        )
    found = {}
    for path, (statistic, tokens) in sums.items():
        squares = np.diagonal(statistic, axis1=-2, axis2=-1).copy() if moments else statistic
        found[path] = Inputs(squares, statistic if moments else None, int(tokens.max()), int(tokens.min()))
    return found


def statistics() -> Any:
    """Return a new compiled function of the statistics of a batch. Models that are alike compile once."""

    def measured(graph: Any, paths: tuple[str, ...], others: Rest, taps: Any, rest: Any, arrays: list[Any]) -> Any:
        call = others.call(arrays)

        def total(taps: Any) -> jax.Array:
            y = nnx.merge(graph, taps, rest, copy=True)(*call.args, **call.options)
            arrays = [v for v in jax.tree.leaves(y) if isinstance(v, jax.Array)]
            numbers = [v for v in arrays if jnp.issubdtype(v.dtype, jnp.floating)]
            return sum((jnp.sum(v.astype(jnp.float32)) for v in numbers), jnp.zeros(()))

        found = nnx.merge(graph, jax.grad(total)(taps), rest, copy=True)
        inside = {layer.path: layer.inside for layer in layers(found)}
        return {path: (inside[path].tap[...], inside[path].tokens[...]) for path in paths}

    return jax.jit(measured, static_argnums=(0, 1, 2))


def axes_in(layer: Layer) -> Axes:
    """Return the axes of a layer's weight, as its product has them.

    Raises:
      ValueError: The call does not use the layer, its stack is not of leading axes, or it is a convolution in groups.
    """
    stack, product = layer.stack, layer.product
    if product is None:
        raise ValueError(
            f"{layer.path or 'the model'}: the call on the first batch does not use this layer. Leave it out."
        )
    if stack != tuple(range(len(stack))):
        raise ValueError(
            f"{layer.path or 'the model'}: its layers are stacked along axes {stack}. Only leading axes are supported."
        )
    try:
        return axes_of(product.op, product.rhs.ndim)
    except ValueError as error:
        raise ValueError(f"{layer.path or 'the model'}: {error} Leave the layer out.") from None


def set_norms(model: Any, inputs: Mapping[str, Inputs]) -> None:
    """Give a sparse model the norms by which `nmjax.wanda` and `nmjax.ria` prune weights.

    Args:
      model: A model with ``wanda(n,m)`` or ``ria(n,m)`` in slots ``y_w``. Its state is changed.
      inputs: The statistics of the layers' inputs, which `calibrate` returned for the model before it was sparse.

    Raises:
      ValueError: No layer has such a pruner, or a layer that has it was not calibrated, or has other features.

    >>> import nmjax as nm
    >>> x = jnp.array([[10., 1., 1., 1.]])
    >>> model = nnx.Linear(4, 1, kernel_init=lambda *_: jnp.array([[1.], [-2.], [3.], [-4.]]), rngs=nnx.Rngs(0))
    >>> found = nm.nnx.calibrate(model, [x])
    >>> recipe = nm.Recipe({".*": "y_w=ste(wanda(2,4))"})
    >>> model = nm.nnx.sparsify(model, recipe)
    >>> nm.nnx.set_norms(model, found)
    >>> nm.nnx.harden(model).kernel[...].ravel().tolist()
    [1.0, 0.0, 0.0, -4.0]
    """
    sparse = [(layer.path, layer.state) for layer in layers(model) if layer.state is not None]
    chosen = {path: weight_state for path, weight_state in sparse if needs_norms(weight_state.sparsity.y_w)}
    if not chosen:
        raise ValueError("set_norms: no layer prunes its weight by norms. Write y_w=ste(wanda(2,4)) in the recipe.")
    missing = [path for path in chosen if path not in inputs]
    if missing:
        shown = ", ".join(path or "the model" for path in missing)
        raise ValueError(
            f"set_norms: inputs has no statistics of {shown}. Calibrate these layers too: "
            "nm.nnx.calibrate(model, batches) before sparsify."
        )
    for path, weight_state in chosen.items():
        norms = np.sqrt(inputs[path].squares)
        kept = slot_state(weight_state.state, "y_w")
        holders = jax.tree.leaves(kept, is_leaf=lambda v: isinstance(v, SparsityVariable))
        holders = [v for v in holders if jnp.issubdtype(v.dtype, jnp.floating) and v.size == norms.size]
        if not holders:
            raise ValueError(
                f"set_norms: {path or 'the model'}: norms of shape {norms.shape} were measured, but the pruner does "
                "not hold so many. It holds one vector. Leave out layers that contract several axes, and prune "
                "experts with nm.nnx.prune and nm.oneshot.wanda. Or calibrate this model."
            )
        for holder in holders:  # several parts of a pruner may read norms
            write(holder, jnp.asarray(norms.reshape(holder.shape), holder.dtype))
