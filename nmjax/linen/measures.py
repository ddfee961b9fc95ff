"""Measures of what pruning does to a model's weights and gradients, layer by layer. They are cheap enough to log."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax.core import meta
from jax import lax

from nmjax.analysis import metrics
from nmjax.analysis.metrics import Error, Weight
from nmjax.linen.hardening import called, operand_of
from nmjax.linen.leaves import Leaves
from nmjax.linen.variables import SiteVariable
from nmjax.products.sparsity import Sparsity
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
    by_path: dict[str, Weight] = {}
    for layer in Leaves.of(variables).sites():
        p = layer.site.sparsity.fwd_rhs
        if p == identity:
            continue
        contracted = tuple(len(layer.site.stack) + a for a in layer.site.origin.operand.contract)
        by_path[layer.path] = metrics.weight(p, operand_of(layer), called(layer, p, p), contracted)
    return by_path


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
    paths = {layer.where: layer.path for layer in Leaves.of(variables).sites() if layer.site.sparsity != Sparsity()}

    def gradients(change: Callable[[SiteVariable], SiteVariable]) -> dict[str, jax.Array]:
        is_site = lambda v: isinstance(v, SiteVariable)
        changed = lambda v: change(v) if is_site(v) else v
        nm = jax.tree.map(changed, variables["nm"], is_leaf=is_site)
        of = lambda params: loss({**variables, "params": params, "nm": nm}, *args)
        found = Leaves.of({"params": jax.grad(of)(variables["params"]), "nm": {}}).by_name
        return {path: meta.unbox(found[where]) for where, path in paths.items()}

    forward = lambda sparsity: sparsity.only(fwd_lhs=sparsity.fwd_lhs, fwd_rhs=sparsity.fwd_rhs)
    exact = gradients(lambda site: site.replace(sparsity=forward(site.sparsity)))
    drawn = lax.map(lambda draw: gradients(lambda site: _at_micro_step(site, draw)), jnp.arange(draws))
    return {path: metrics.error(drawn[path], exact[path]) for path in paths.values()}


def _at_micro_step(site: SiteVariable, micro: jax.Array) -> SiteVariable:
    """Return a variable, perhaps of a stack, at another micro-step."""
    if site.time is None:
        return site

    def one(time: jax.Array) -> jax.Array:
        return jnp.stack([time.reshape(2)[0], micro.astype(time.dtype)]).reshape(time.shape)

    for axis in reversed(site.stack):
        one = jax.vmap(one, axis, axis)
    return site.replace(time=one(site.time))
