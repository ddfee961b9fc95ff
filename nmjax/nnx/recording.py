"""The products of each layer in a call of a model. The call is traced on shapes, so no value is computed."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import replace
from itertools import count
from typing import Any

import jax
from flax import nnx
from jax.extend import core

from nmjax.analysis import scopes
from nmjax.nnx.doors import DOORS, Example, Layer
from nmjax.nnx.layers import layers
from nmjax.products import functions, operations
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
    """Stands in a layer's door, notes the products that it is asked for, and computes them densely.

    It computes in a scope of `nmjax.analysis.scopes`, so that their FLOPs can be found in the program. The product of a
    layer that stays dense may be the model's own: it is computed as it is, and not noted.
    """

    def __init__(self, layer: Layer, number: int, notes: Notes, noted: bool) -> None:
        self.plain = layer.plain
        self.product = layer.pruned_product
        self.number, self.notes, self.noted = number, nnx.static(notes), noted

    def __call__(self, *operands: Any, **options: Any) -> jax.Array:
        self.notes.ask()
        if self.noted:
            assert self.product is not None
            self.notes.append(example_of(self.product, operands, options))
        assert self.plain is not None
        with scopes.of_layer(self.number):
            return self.plain(*operands, **options)

    def multiply(self, product: Product, x: jax.Array, w: jax.Array) -> jax.Array:
        """Note the product that the method of a declared layer asks for, and return it."""
        self.notes.ask()
        if self.noted:
            self.notes.append(Example(product.op, shape_of(x), shape_of(w), product.parameter.steps))
        with scopes.of_layer(self.number):
            return product.op(x, w, *product.extra)


def example_of(product: Callable[..., Any], operands: Sequence[Any], options: Mapping[str, Any]) -> Example:
    """Return the operation that a call of a product asks for."""
    if product is functions.einsum:
        spec, lhs, rhs = operands
        lhs, rhs = jax.eval_shape(lambda x, w: operations.einsum_operands(spec, x, w), lhs, rhs)
        op = operations.as_dot(lhs, rhs, operations.einsum_dims(spec, lhs.ndim, rhs.ndim)[0])
    elif product is functions.ragged_dot:
        lhs, rhs, _ = operands
        op = operations.as_ragged_dot(*operands, **options)
    else:
        lhs, rhs, *rest = operands
        make: Callable[..., Any] = operations.as_dot if product is functions.dot_general else operations.as_conv
        op = make(lhs, rhs, *rest, **{name: value for name, value in options.items() if name != "out_sharding"})
    return Example(op, shape_of(lhs), shape_of(rhs))


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
        if getattr(layer.module, "dot_general_cls", None) is not None:
            layer.module.dot_general_cls = None  # it would come before the recorder
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
    with_doors = list(layers(model))
    notes, _ = _products(model, [layer.site is not None for layer in with_doors], inputs, options)
    return list(zip(with_doors, notes, strict=True))


def _products(
    model: Any, noted: Sequence[bool], inputs: Sequence[Any], options: Mapping[str, Any]
) -> tuple[list[list[Example]], list[bool]]:  # fmt: skip
    """Return the products that a call asks of each layer, where they are noted, and whether it asks for any."""
    copy, notes = recording(model, noted)
    traced(copy, inputs, options)
    return [list(dict.fromkeys(one)) for one in notes], [one.asked is not None for one in notes]


def with_calls(
    model: Any, with_doors: list[Layer], recipe: Recipe, inputs: Sequence[Any], options: Mapping[str, Any]
) -> tuple[list[Layer], list[Layer]]:  # fmt: skip
    """Return the layers of a model, and those of the recipe that the call asks for no product.

    If a layer does not say its product, the product of the call is added.

    Raises:
      ValueError: The recipe prunes such a layer, and the call asks it for products along different axes of its weight.
    """
    asked = [recipe(layer.path) != Sparsity() and not _says_product(layer) for layer in with_doors]
    completed = list(with_doors)
    products, used = _products(model, asked, inputs, options)
    for i, noted in enumerate(products):
        if len({(one.op.operands(one.lhs.ndim, one.rhs.ndim)["fwd_rhs"], one.steps) for one in noted}) > 1:
            raise ValueError(
                f"{with_doors[i].path}: the call asks for products that take the weight, of shape "
                f"{with_doors[i].kernel.shape}, along different axes, so it has no single pattern. Use nm.transform, "
                "or leave it dense."
            )
        if noted:
            completed[i] = replace(with_doors[i], called=noted[0])
    wanted = [recipe(layer.path) != Sparsity() for layer in with_doors]
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


def never_asked(with_doors: list[Layer], recipe: Recipe) -> list[Layer]:
    """Return the layers of the recipe whose own ``__call__``, in place of Flax's, may not ask for their product.

    Such a layer is called alone, on an input of the shape that a layer of Flax takes. A layer that cannot be called
    so is among them.
    """
    found: list[Layer] = []
    for layer in with_doors:
        if _has_own_call(layer) and recipe(layer.path) != Sparsity() and not _asks(layer):
            found.append(layer)
    return found


def _has_own_call(layer: Layer) -> bool:
    """Return whether a layer of Flax has a ``__call__`` of its own."""
    kind = next((kind for kind in DOORS if isinstance(layer.module, kind)), None)
    return kind is not None and _owner(type(layer.module)).__module__.split(".")[0] not in ("flax", "nmjax")


def _owner(kind: type) -> type:
    """Return the class that defines the call of a class."""
    return next(one for one in kind.__mro__ if "__call__" in vars(one))


def _asks(layer: Layer) -> bool:
    for axes in (0, 1):  # an input of a sequence, or of a token
        try:
            example = layer.example(tokens=1)
            assert example is not None
            x = jax.ShapeDtypeStruct(example.lhs.shape[axes:], example.lhs.dtype)
            return all(_products(layer.module, [False], (x,), {})[1])
        except Exception:  # of code that we do not know
            continue
    return False


def _says_product(layer: Layer) -> bool:
    try:
        return layer.product is not None
    except ValueError:  # it is refused when a recipe asks for it
        return True


LAYOUT = ("convert_element_type", "reshape", "transpose", "squeeze", "broadcast_in_dim", "copy")
LAYOUT += ("name", "optimization_barrier", "reshard", "sharding_constraint")  # they change no value


def multiplies_another_weight(layer: Layer) -> bool:
    """Return whether the own ``__call__`` of a Flax layer changes the kernel before the product.

    The layer is called alone, on shapes. A layer that cannot be called so, such as one of a stack, is not checked.
    """
    if not _has_own_call(layer) or layer.mask is not None:
        return False
    for axes in (0, 1):  # as in `_asks`
        try:
            example = layer.example(tokens=1)
            assert example is not None
            program = _way_to_the_door(layer, jax.ShapeDtypeStruct(example.lhs.shape[axes:], example.lhs.dtype))
        except Exception:  # of code that we do not know
            continue
        needed = {v for v in program.outvars if isinstance(v, core.Var)}
        for equation in reversed(program.eqns):
            if needed & set(equation.outvars):
                if equation.primitive.name not in LAYOUT:
                    return True
                needed |= {v for v in equation.invars if isinstance(v, core.Var)}
        return bool(needed & set(program.invars[1:]))
    return False


def _way_to_the_door(layer: Layer, x: jax.ShapeDtypeStruct) -> core.Jaxpr:
    """Return the program from the kernel, its first argument, and all other arrays to the weight that the door gets."""
    plain, name = layer.plain, layer.door.name
    assert plain is not None
    graph, kernel, rest = nnx.split(layer.module, lambda path, _: tuple(path) == (layer.weight_name,), ...)

    def weights(kernel: Any, rest: Any, x: jax.Array) -> list[jax.Array]:
        seen: list[jax.Array] = []

        def door(*operands: Any, **options: Any) -> jax.Array:
            seen.append([v for v in operands if isinstance(v, jax.Array)][1])
            return plain(*operands, **options)

        copy = nnx.merge(graph, kernel, rest)
        setattr(copy, name, nnx.static(door))
        if getattr(copy, "dot_general_cls", None) is not None:
            copy.dot_general_cls = None
        copy(x)
        return seen

    return jax.make_jaxpr(weights)(kernel, rest, x).jaxpr
