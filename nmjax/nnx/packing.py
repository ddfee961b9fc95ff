"""Weights packed once for several calls, such as the micro-steps of one optimizer step."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax
from flax import nnx

from nmjax.core.refusal import Refusal
from nmjax.kernels.targets import target
from nmjax.nnx.layer import Example, Layer
from nmjax.nnx.layers import layers, read, value
from nmjax.nnx.recording import products_of_call
from nmjax.nnx.variables import SparsityState, SparsityVariable
from nmjax.products.forms import Form, FormKey
from nmjax.products.weights import packed_weight
from nmjax.programs.states import context


def pack(model: Any, *inputs: Any, **options: Any) -> dict[str, dict[FormKey, Form]]:
    """Return the weights in the forms in which kernels take them, for several calls of a model.

    The forms hold for the weights, the step and the masks of now. Left out are weights that are drawn again at every
    call.

    Args:
      model: A sparse model.
      *inputs: An example of the model's inputs: arrays or their shapes.
      **options: Keyword arguments of the call, such as ``train=False``.

    Returns:
      A dict from the layer's path to its forms, for `packed`. It is empty if no product runs packed, as on a CPU.

    >>> import nmjax as nm
    >>> recipe = nm.Recipe({".*": "ste(2,4)"})
    >>> model = nm.nnx.sparsify(nnx.Linear(8, 4, rngs=nnx.Rngs(0)), recipe)
    >>> nm.nnx.set_step(model, 3)
    >>> forms = nm.nnx.pack(model, jnp.ones((4, 8)))
    >>> with nm.nnx.packed(model, forms):  # in the scan over micro-steps
    ...     y = model(jnp.ones((4, 8)))
    >>> forms  # a CPU has no sparse tensor cores
    {}
    """
    by_path: dict[str, dict[FormKey, Form]] = {}
    if all(layer.state is None or isinstance(target(layer.state.backend), Refusal) for layer in layers(model)):
        return by_path
    for layer, products in products_of_call(model, *inputs, **options):
        # Forms have ranks of their own, so only leading axes can stack them as they stack the kernel.
        leading = layer.stack == tuple(range(len(layer.stack)))
        if layer.state is None or not leading:
            continue
        with jax.named_scope(layer.state.name):
            forms = _forms(layer, layer.state, products)
        if forms:
            by_path[layer.path] = forms
    return by_path


def _forms(layer: Layer, weight_state: SparsityState, products: Sequence[Example]) -> dict[FormKey, Form]:
    """Return the forms in which the products of a layer, or of a stack, take its weight."""

    def one(weight: jax.Array, words: Any, time: Any, state: Any) -> dict[FormKey, Form]:
        ctx = context(words, time, state)
        forms: dict[FormKey, Form] = {}
        for op, lhs, rhs, _ in products:
            w = weight.astype(rhs.dtype)
            forms |= packed_weight(op, lhs, w, weight_state.now, ctx, weight_state.backend, name=weight_state.name)
        return forms

    whole = read(layer)
    return whole.origin.parameter.apply(one, value(layer), *whole.arrays)


@contextmanager
def packed(model: Any, forms: Mapping[str, Mapping[FormKey, Form]]) -> Iterator[None]:
    """Make a model's products take their weights in the forms that `pack` returned, inside a ``with`` block.

    Args:
      model: The sparse model.
      forms: What `pack` returned for it.

    Raises:
      ValueError: The forms name a layer that is not a sparse layer of the model.

    >>> import nmjax as nm
    >>> recipe = nm.Recipe({".*": "ste(2,4)"})
    >>> model = nm.nnx.sparsify(nnx.Linear(8, 4, rngs=nnx.Rngs(0)), recipe)
    >>> with nm.nnx.packed(model, {"up": {}}):
    ...     pass
    Traceback (most recent call last):
    ValueError: packed: the model has no sparse layer 'up', so the forms are another model's. Call pack on this model.
    """
    states = {layer.path: layer.state for layer in layers(model) if layer.state is not None}
    unknown = [path for path in forms if path not in states]
    if unknown:
        names = ", ".join(repr(path) if path else "at its root" for path in unknown)
        raise ValueError(
            f"packed: the model has no sparse layer {names}, so the forms are another model's. Call pack on this model."
        )
    before = {path: states[path].packed for path in forms}
    for path, by_key in forms.items():
        states[path].packed = nnx.data(jax.tree.map(SparsityVariable, by_key))
    try:
        yield
    finally:
        for path, by_key in before.items():
            states[path].packed = nnx.data(by_key)
