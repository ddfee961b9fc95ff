"""The products of each layer in a call of a model. The call is traced on shapes, so no value is computed."""

from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import replace
from itertools import count
from typing import Any

import jax
from flax import nnx
from jax.extend import core

from nmjax.analysis import scopes
from nmjax.nnx.layer import Example, Layer, MisfitError
from nmjax.nnx.layers import layers
from nmjax.products.pruning import shape_of
from nmjax.products.sparsity import Sparsity
from nmjax.programs import uses
from nmjax.programs.rewriting import Product
from nmjax.recipes.table import Recipe

PLACE: ContextVar[str | None] = ContextVar("place", default=None)  # the block that is called, if somebody says it


class Notes(list[Example]):
    """The products that a layer was asked for. It compares by identity, so that Flax takes it as static.

    Attributes:
      asked: The place of the layer among those that the call asks for a product, in their order; None if it is not
        asked. A product that is not noted counts too.
      clock: The places, common to all layers of a model.
      places: The values of `PLACE` with which it is asked.
    """

    asked: int | None = None
    clock: Iterator[int]
    places: set[str | None]

    def ask(self) -> None:
        """Write down that the layer was asked for a product."""
        self.places.add(PLACE.get())
        if self.asked is None:
            self.asked = next(self.clock)

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other


class Recorder(nnx.Module):
    """Stands in the place of a layer's product, notes what it is asked for, and computes it densely.

    It computes in a scope of `nmjax.analysis.scopes`, so that its FLOPs can be found in the program.
    """

    def __init__(self, layer: Layer, number: int, notes: Notes, noted: bool) -> None:
        self.number, self.notes, self.noted = number, nnx.static(notes), noted

    def _multiply(self, product: Product, x: jax.Array, w: jax.Array) -> jax.Array:
        """Note the product that the layer's method asks for, and return it."""
        self.notes.ask()
        if self.noted:
            self.notes.append(Example(product.op, shape_of(x), shape_of(w), product.parameter.steps))
        with scopes.of_layer(self.number):
            return product.op(x, w, *product.extra)


def recording(model: Any, noted: Sequence[bool]) -> tuple[Any, list[Notes]]:
    """Return a copy of a model with shapes in place of arrays, and the notes that its layers fill in a call.

    Args:
      model: The model.
      noted: For each layer, True if its products are to be noted.
    """
    graph, state = nnx.split(model)
    is_variable = lambda v: isinstance(v, nnx.Variable)
    # Flax takes a shape for static unless it is a variable's. So other arrays, as nnx.WeightNorm has, stay.
    shapes = jax.tree.map(lambda v: jax.tree.map(shape_of, v) if is_variable(v) else v, state, is_leaf=is_variable)
    copy = nnx.merge(graph, shapes)
    notes: list[Notes] = []
    clock = count()
    for number, layer in enumerate(layers(copy)):
        notes.append(Notes())
        notes[-1].clock, notes[-1].places = clock, set()
        layer.put(Recorder(layer, number, notes[-1], noted[number]))
    return copy, notes


def traced(model: Any, inputs: Sequence[Any], options: Mapping[str, Any]) -> tuple[core.Jaxpr, list[bool]]:
    """Return the program of a call, and for each of its arguments whether it is a parameter of the model."""
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    leaves, tree = jax.tree.flatten(jax.tree.map(shape_of, (params, rest, inputs, options)))
    shapes = [v for v in leaves if isinstance(v, jax.ShapeDtypeStruct)]

    def forward(arrays: list[jax.Array]) -> list[jax.Array]:
        values = iter(arrays)
        whole = [next(values) if isinstance(v, jax.ShapeDtypeStruct) else v for v in leaves]
        params, rest, inputs, options = jax.tree.unflatten(tree, whole)
        result = nnx.merge(graph, params, rest)(*inputs, **options)
        return [v for v in jax.tree.leaves(result) if isinstance(v, jax.Array)]

    count = len(jax.tree.leaves(params))
    learned = [i < count for i, v in enumerate(leaves) if isinstance(v, jax.ShapeDtypeStruct)]
    return jax.make_jaxpr(forward)(shapes).jaxpr, learned


def products_of_call(model: Any, *inputs: Any, **options: Any) -> list[tuple[Layer, list[Example]]]:
    """Return every layer of a model, and the products that one call of the model asks it for."""
    registered = list(layers(model))
    notes, _ = _products(model, [layer.state is not None for layer in registered], inputs, options)
    return list(zip(registered, notes, strict=True))


def _products(
    model: Any, noted: Sequence[bool], inputs: Sequence[Any], options: Mapping[str, Any]
) -> tuple[list[list[Example]], list[bool]]:  # fmt: skip
    """Return the products that a call asks of each layer, where they are noted, and whether it asks for any."""
    copy, notes = recording(model, noted)
    traced(copy, inputs, options)
    return [list(dict.fromkeys(one)) for one in notes], [one.asked is not None for one in notes]


def with_calls(
    model: Any, registered: list[Layer], recipe: Recipe, inputs: Sequence[Any], options: Mapping[str, Any]
) -> tuple[list[Layer], list[Layer]]:  # fmt: skip
    """Return the layers of a model, and those of the recipe that the call asks for no product.

    If a layer does not say its product, the product of the call is added.

    Raises:
      ValueError: The recipe prunes such a layer, and the call asks it for products along different axes of its weight.
    """
    asked = [recipe(layer.path) != Sparsity() and not _says_product(layer) for layer in registered]
    completed = list(registered)
    products, used = _products(model, asked, inputs, options)
    for i, noted in enumerate(products):
        if len({(one.operand, one.steps) for one in noted}) > 1:
            raise ValueError(
                f"{registered[i].path}: the call asks for products that take the weight, of shape "
                f"{registered[i].kernel.shape}, along different axes, so it has no single pattern. Use nm.transform, "
                "or leave it dense."
            )
        if noted:
            completed[i] = replace(registered[i], called=noted[0])
    wanted = [recipe(layer.path) != Sparsity() for layer in registered]
    return completed, [layer for layer, w, u in zip(completed, wanted, used, strict=True) if w and not u]


def other_uses(model: Any, inputs: Sequence[Any], options: Mapping[str, Any]) -> dict[int, list[str]]:
    """Return what else than the products of its layers a call does with their weights: operations by a variable's id.

    Args:
      model: The model.
      inputs: Examples of its inputs.
      options: Keyword arguments of the call.
    """
    copy, _ = recording(model, [False] * len(list(layers(model))))
    program, learned = traced(copy, inputs, options)
    params = nnx.split(copy, nnx.Param, ...)[1]
    paths = ["/".join(map(str, path)) for path, v in nnx.to_flat_state(params) for _ in jax.tree.leaves(v)]
    names = iter(paths)
    found = uses.other_uses(program, [next(names) if is_param else None for is_param in learned])
    at = {"/".join(map(str, path)): v for path, v in nnx.iter_graph(model) if isinstance(v, nnx.Variable)}
    return {id(at[path]): operations for path, operations in found.items()}


def order_of_calls(model: Any, inputs: Sequence[Any], options: Mapping[str, Any]) -> list[str]:
    """Return the paths of the layers that a call asks for a product, in the order in which it asks them first."""
    paths = [layer.path for layer in layers(model)]
    copy, notes = recording(model, [False] * len(paths))
    traced(copy, inputs, options)
    asked = {path: one.asked for path, one in zip(paths, notes, strict=True) if one.asked is not None}
    return sorted(asked, key=asked.__getitem__)


def _says_product(layer: Layer) -> bool:
    try:
        return layer.product is not None
    except MisfitError:  # the call may say it
        return False
    except ValueError:  # it is refused when a recipe asks for it
        return True
