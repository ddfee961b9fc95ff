"""Measures of what pruning does to a model's weights and gradients, layer by layer. They are cheap enough to log."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax.core import meta

from nmjax.analysis.metrics import Error, Weight
from nmjax.linen.leaves import leaves, sparse_weights
from nmjax.linen.variables import StateVariable
from nmjax.products.sparsity import Sparsity
from nmjax.programs import states
from nmjax.programs.states import WeightState
from nmjax.pruners import identity


def weights(variables: Mapping[str, Any]) -> dict[str, Weight]:
    """Measure every pruned weight of the forward pass at this step.

    Args:
      variables: The collections "params" and "nm" in one dict.

    Returns:
      A dict from the layer's path to its `nmjax.metrics.Weight`. A stack of layers counts as one.

    >>> from flax import linen as nn
    >>> import nmjax as nm
    >>> with nm.linen.sparsify(nm.Recipe({".*": "ste(2,4)"})):
    ...     variables = nn.Dense(4).init(jax.random.key(0), jnp.ones((2, 8)))
    >>> print(nm.linen.weights(variables)[""].density)
    0.5
    """
    sparse = [one for one in sparse_weights(variables) if one.variable.sparsity.y_w != identity]
    return {layer.path: layer.state.measure(layer.value) for layer in sparse}


def gradient_errors(
    variables: Mapping[str, Any], loss: Callable[..., jax.Array], *args: Any, draws: int = 4
) -> dict[str, Error]:
    """Return the error of each sparse layer's weight gradient at this step.

    The exact gradient is that of the same model with all backward slots empty. Each draw is a micro-step of its own.
    If a method is unbiased, the bias is about as large as the noise, and falls with more draws.

    A draw costs a gradient. Call it inside `jit`, and not at every step. Call it inside `sparsify` if the model needs
    that to be sparse.

    Args:
      variables: The collections "params" and "nm" in one dict, and others that the loss reads.
      loss: A function ``loss(variables, *args)`` that returns a scalar.
      *args: What the loss takes besides the variables.
      draws: The number of draws.

    Returns:
      A dict from the layer's path to the `nmjax.metrics.Error` of the gradient of its weight.

    >>> from flax import linen as nn
    >>> import nmjax as nm
    >>> model = nn.Dense(4)
    >>> with nm.linen.sparsify(nm.Recipe({".*": "mvue(2,4)"})):
    ...     variables = model.init(jax.random.key(0), jnp.eye(4, 8))
    ...     loss = lambda variables, x: (model.apply(variables, x) ** 2).mean()
    ...     errors = nm.linen.gradient_errors(variables, loss, jnp.eye(4, 8), draws=2)
    >>> errors[""]._fields, bool(errors[""].variance > 0)
    (('bias', 'noise', 'variance', 'cosine'), True)
    """
    layers = [one for one in sparse_weights(variables) if one.variable.sparsity != Sparsity()]

    def gradients(change: Callable[[WeightState], WeightState]) -> dict[str, jax.Array]:
        changed = lambda v: v.holding(change(v.weight_state)) if isinstance(v, StateVariable) else v
        nm = jax.tree.map(changed, variables["nm"], is_leaf=lambda v: isinstance(v, StateVariable))
        of = lambda params: loss({**variables, "params": params, "nm": nm}, *args)
        found, _ = leaves({"params": jax.grad(of)(variables["params"])})
        return {layer.path: meta.unbox(found[layer.where]) for layer in layers}

    return states.gradient_errors(gradients, draws)
