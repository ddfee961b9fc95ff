"""What pruning does to a model's weights and gradients, layer by layer, cheap enough to log."""

from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from nmjax.analysis import metrics
from nmjax.analysis.metrics import Error
from nmjax.core import groups
from nmjax.nnx.delivery import times
from nmjax.nnx.doors import layers
from nmjax.nnx.hardening import called
from nmjax.nnx.variables import write
from nmjax.products.slot import BACKWARD
from nmjax.pruners import identity


class Weight(NamedTuple):
    """A forward weight at this step: the share that is not zero, how far it is from the dense one (relative L2) and in
    which direction (cosine), and the share of groups that a tie decides (NaN where no n:m is promised)."""

    density: jax.Array
    error: jax.Array
    cosine: jax.Array
    ties: jax.Array


def weights(model) -> dict[str, Weight]:
    """What every pruned forward weight is, by layer; a stack of layers counts as one."""
    found = {}
    for layer in layers(model):
        p = layer.sparsity.fwd_rhs
        if p == identity:
            continue
        w, pruned = layer.weight(), called(layer, p, p, layer.site)
        dense, sparse = groups.wide(w).ravel(), groups.wide(pruned).ravel()
        norm = jnp.linalg.norm
        cosine = jnp.vdot(dense, sparse) / (norm(dense) * norm(sparse))
        found[layer.path] = Weight(
            metrics.density(pruned), norm(sparse - dense) / norm(dense), cosine, _ties(layer, p, w)
        )
    return found


def _ties(layer, p, w):
    if p.pattern is None:
        return jnp.float32(jnp.nan)
    own = [a for a in range(w.ndim) if a not in layer.stack]
    merged = groups.merge(w, tuple(own[a] for a in layer.operand.contract), p.pattern[1])
    return metrics.ties(merged[0], *p.pattern, merged[1])


def gradient_errors(model, loss, *args, draws: int = 4) -> dict[str, Error]:
    """How far each sparse layer's dw is from that of the same model with all backward slots empty: bias, variance and cosine
    over some draws of the step that the model is at. ``loss(model, *args)`` is a scalar.

    The bias of an unbiased method is about its ``noise``, and falls with more draws; a biased one's does not. Every draw costs
    a gradient: call it inside jit, and now and then.
    """
    exact = nnx.clone(model)
    for layer in layers(exact):
        if layer.site is not None:
            layer.site.sparsity = replace(layer.site.sparsity, **dict.fromkeys(BACKWARD, identity))
    paths = [layer.path for layer in layers(model) if layer.site is not None]
    graph, state = nnx.split(model)

    def one(draw):
        copy = nnx.merge(graph, state, copy=True)
        for layer in layers(copy):
            if layer.site is not None and layer.site.time is not None:
                write(layer.site.time, times(layer, layer.site.held()[1].reshape(-1)[0], draw))
        return _kernels(nnx.grad(loss)(copy, *args), paths)

    drawn, wanted = lax.map(one, jnp.arange(draws)), _kernels(nnx.grad(loss)(exact, *args), paths)
    return {path: metrics.error(drawn[path], wanted[path]) for path in paths}


def _kernels(grads, paths: list[str]) -> dict[str, jax.Array]:
    flat = {"/".join(map(str, path)): v[...] for path, v in nnx.to_flat_state(grads)}
    return {path: flat[f"{path}/kernel".lstrip("/")] for path in paths if f"{path}/kernel".lstrip("/") in flat}
