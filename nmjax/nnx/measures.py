"""Measures of what pruning does to a model's weights and gradients, layer by layer. They are cheap enough to log."""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from nmjax.analysis.metrics import Error, Weight
from nmjax.nnx.delivery import store
from nmjax.nnx.hardening import users_of
from nmjax.nnx.layers import layers, read, value
from nmjax.programs import states
from nmjax.programs.states import WeightState
from nmjax.pruners import identity


def weights(model: Any) -> dict[str, Weight]:
    """Measure every pruned weight of the forward pass at this step.

    Args:
      model: A sparse model.

    Returns:
      A dict from the layer's path to its `nmjax.metrics.Weight`. A stack of layers counts as one.

    >>> import nmjax as nm
    >>> recipe = nm.Recipe({".*": "ste(2,4)"})
    >>> model = nm.nnx.sparsify(nnx.Linear(8, 4, rngs=nnx.Rngs(0)), recipe)
    >>> print(nm.nnx.weights(model)[""].density)
    0.5
    """
    by_path: dict[str, Weight] = {}
    for layer in layers(model):
        if layer.sparsity.y_w != identity:
            by_path[layer.path] = read(layer).measure(value(layer))
    return by_path


def gradient_errors(model: Any, loss: Callable[..., jax.Array], *args: Any, draws: int = 4) -> dict[str, Error]:
    """Return the error of each sparse layer's weight gradient at this step.

    The exact gradient is that of the same model with all backward slots empty. Each draw is a micro-step of its own.
    If a method is unbiased, the bias is about as large as the noise, and falls with more draws.

    A draw costs a gradient. Call it inside `jit`, and not at every step.

    Args:
      model: A sparse model.
      loss: A function ``loss(model, *args)`` that returns a scalar.
      *args: What the loss takes beside the model.
      draws: The number of draws.

    Returns:
      A dict from the layer's path to the `nmjax.metrics.Error` of the gradient of its kernel.

    >>> import nmjax as nm
    >>> recipe = nm.Recipe({".*": "mvue(2,4)"})
    >>> model = nm.nnx.sparsify(nnx.Linear(8, 4, rngs=nnx.Rngs(0)), recipe)
    >>> errors = nm.nnx.gradient_errors(model, lambda m, x: (m(x) ** 2).mean(), jnp.eye(4, 8), draws=2)
    >>> errors[""]._fields, bool(errors[""].variance > 0)
    (('bias', 'noise', 'variance', 'cosine'), True)
    """
    users = users_of(model)
    sparse = [layer for layer in layers(model) if layer.state and layer.has_weight]
    paths = {layer.path: [user.path for user in users[id(layer.kernel)]] for layer in sparse}
    graph, state = nnx.split(model)

    def gradients(change: Callable[[WeightState], WeightState]) -> dict[str, jax.Array]:
        copy = nnx.merge(graph, state, copy=True)
        for layer in layers(copy):
            if layer.state is not None:
                store(layer, change(read(layer)))
        return _kernels(nnx.grad(loss)(copy, *args), paths)

    return states.gradient_errors(gradients, draws)


def _kernels(grads: nnx.State[Any, Any], paths: dict[str, list[tuple[Any, ...]]]) -> dict[str, jax.Array]:
    """Return the gradients of kernels, by the paths of their layers. A shared kernel has one gradient, at one of its
    paths."""
    flat = {path: v[...] for path, v in nnx.to_flat_state(grads)}
    found = {layer: [flat[path] for path in places if path in flat] for layer, places in paths.items()}
    return {layer: of_kernel[0] for layer, of_kernel in found.items() if of_kernel}
