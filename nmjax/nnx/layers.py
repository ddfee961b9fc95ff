"""The registered layers of a model."""

from collections.abc import Iterator
from typing import Any

import jax
from flax import nnx

from nmjax.core import layer_paths
from nmjax.nnx.layer import Layer, Uses
from nmjax.nnx.registry import types_of
from nmjax.programs import states
from nmjax.programs.parameters import Parameter, Step


def layers(model: Any) -> Iterator[Layer]:
    """Return every registered layer once, in the order of the paths, numbers by value.

    If a class has several weights, each weight counts as a layer.

    Raises:
      TypeError: If the model is not one of flax.nnx.
    """
    if not isinstance(model, (nnx.Pytree, tuple, list)):
        raise TypeError(f"expected an nnx.Module, got {type(model).__name__}. For flax.linen models use nm.linen.")
    tree: Any = model  # iter_modules takes tuples and lists too, though its annotation does not say so
    registered: list[Layer] = []
    traced: dict[Any, Uses | None] = {}
    for path, module in nnx.iter_modules(tree):
        registered += _of_module("/".join(map(str, path)), module, traced)
    return iter(sorted(registered, key=lambda layer: layer_paths.by_number(layer.path)))


def _of_module(path: str, module: Any, traced: dict[Any, Uses | None]) -> list[Layer]:
    types = types_of(module)
    for one in types:
        if not callable(getattr(module, one.method, None)):
            kind = type(module).__name__
            raise ValueError(
                f"{path or 'the model'}: nm.nnx.register_layer({kind}, method={one.method!r}): the class has no "
                "such method."
            )
    return [
        Layer(path if one.alone else f"{path}/{name}".lstrip("/"), module, one, name, traced)
        for one in types
        for name in one.weights
        if getattr(module, name, ...) is not None
    ]


def read(layer: Layer) -> states.WeightState:
    """Return the sparsity state of a layer, or of a stack of layers."""
    assert layer.state is not None
    return states.WeightState(stacked(layer, layer.state.origin), *layer.state.arrays(layer.stack))


def stacked(layer: Layer, origin: states.Origin) -> states.Origin:
    """Return the origin of the weights of a whole stack, given that of one layer."""
    steps = (Step("slice"),) * len(layer.stack) + origin.parameter.steps
    return origin._replace(parameter=Parameter(layer.path, steps))


def value(layer: Layer) -> jax.Array:
    """Return the weight of a layer, in the dtype in which it computes, as the methods of `WeightState` take it."""
    return states.first(layer.weight(), layer.stack)


def shape(layer: Layer) -> jax.ShapeDtypeStruct:
    """Return the shape of the weight, as `value` returns it, in the dtype in which it is stored."""
    kernel = layer.kernel
    order = states.stored_axes(range(kernel.ndim), layer.stack, kernel.ndim)
    return jax.ShapeDtypeStruct(tuple(kernel.shape[axis] for axis in order), kernel.dtype)


def back(layer: Layer, weight: jax.Array) -> jax.Array:
    """Return a weight as the layer stores it, given one like `value`."""
    return states.stored(weight, layer.stack, layer.rank)
