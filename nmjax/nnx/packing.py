"""Weights packed once for several calls, as the micro-steps of one optimizer step are."""

from contextlib import contextmanager

import jax
from flax import nnx

from nmjax.core.refusal import Refusal
from nmjax.kernels.targets import target
from nmjax.nnx.doors import DOORS, Layer, layers, over
from nmjax.nnx.planning import uses
from nmjax.nnx.variables import NM, one_ctx
from nmjax.products.rule import packed_weight

CALLS = {kind.__call__ for kind in DOORS}


def pack(model, *inputs, **options) -> dict[str, dict]:
    """The packed forms of the weights, by layer, that calls of the model with these inputs, or shapes, take. Empty where
    nothing runs packed; without weights that are drawn anew at every call, or that a layer's own ``__call__`` changes. They
    hold for the weights, the step and the masks of now::

        set_step(model, step)
        forms = pack(model, x)
        ...  # in the scan over micro-steps
        with packed(model, forms):
            loss = ...
    """
    found = {}
    if any(layer.site and not isinstance(target(layer.site.backend), Refusal) for layer in layers(model)):
        for layer, products in uses(model, *inputs, **options):
            in_front = layer.stack == tuple(range(len(layer.stack)))  # where forms of any rank have these axes too
            own = type(layer.module).__call__ in CALLS  # else its door may be given another weight
            if layer.site is not None and own and in_front and (forms := _forms(layer, products)):
                found[layer.path] = forms
    return found


def _forms(layer: Layer, products) -> dict:
    site = layer.site

    def one(weight, words, time, state):
        ctx, made = one_ctx(words, time, state, site.ranks), {}
        for op, lhs, rhs in products:
            made |= packed_weight(op, lhs, weight.astype(rhs.dtype), site.sparsity, ctx, site.backend, name=site.name)
        return made

    return over(layer.stack, one)(layer.weight(), *site.held())


@contextmanager
def packed(model, forms: dict[str, dict]):
    """Within it, products take their weights in the forms that `pack` made."""
    sites = {layer.path: layer.site for layer in layers(model)}
    if unknown := [path for path in forms if sites.get(path) is None]:
        names = ", ".join(path or "at its root" for path in unknown)
        raise ValueError(f"packed: the model has no sparse layer {names}: the forms are another model's.")
    before = {path: sites[path].packed for path in forms}
    for path, made in forms.items():
        sites[path].packed = nnx.data(jax.tree.map(NM, made))
    try:
        yield
    finally:
        for path, made in before.items():
            sites[path].packed = nnx.data(made)
