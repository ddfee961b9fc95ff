"""The plan of a model: seen by tracing it on shapes, without a value being computed."""

import math

import jax
from flax import nnx

from nmjax import flops, products
from nmjax.nnx.layers import Door, layers
from nmjax.plans import LayerPlan, Plan, Use, slots_of
from nmjax.sparsity import SLOTS

_MARK = "nmjax_layer_"


class _Notes(list):
    """A list that is static: it compares by identity."""

    __hash__ = object.__hash__
    __eq__ = object.__eq__


class _Recorder(nnx.Module):
    """Stands in a layer's door, notes what it is asked for, and computes it under a name that the program shows."""

    def __init__(self, door: Door, number: int, notes: _Notes):
        self.door, self.number, self.notes = nnx.static(door), number, nnx.static(notes)

    def __call__(self, *operands, **options):
        if self.door.product is products.einsum:
            spec, lhs, rhs = operands
            operation = products.as_dot(lhs, rhs, products.einsum_dims(spec, lhs.ndim, rhs.ndim)[0])
            plain = lambda lhs, rhs: self.door.plain(spec, lhs, rhs, **options)
        else:
            lhs, rhs, *rest = operands
            make = products.as_dot if self.door.product is products.dot_general else products.as_conv
            operation = make(lhs, rhs, *rest, **{k: v for k, v in options.items() if k != "out_sharding"})
            plain = lambda lhs, rhs: self.door.plain(lhs, rhs, *rest, **options)
        shape = lambda v: jax.ShapeDtypeStruct(v.shape, v.dtype)
        self.notes.append((operation, shape(lhs), shape(rhs)))
        plain.__name__ = f"{_MARK}{self.number}"
        return jax.jit(plain)(lhs, rhs)


def plan(model, *inputs, **options) -> Plan:
    """What every layer will do, without doing it: slots, groups, FLOPs, and what would be refused and why.

    ``inputs`` are an example of what the model is called with, arrays or their shapes; without them tokens and FLOPs stay
    unknown. The model may be abstract itself, as `nnx.eval_shape` makes it.
    """
    graph, state = nnx.split(model)
    copy = nnx.merge(graph, jax.tree.map(_shape, state))
    found, notes = list(layers(model)), []
    for number, layer in enumerate(layers(copy)):
        notes.append(_Notes())
        setattr(layer.module, layer.door.name, nnx.data(_Recorder(layer.door, number, notes[-1])))
    costs: list[int | None] = [None] * len(found)
    elsewhere = 0
    if inputs:
        costs, elsewhere = _costs(copy, inputs, options, len(found))
    plans = []
    for layer, seen, cost in zip(found, notes, costs, strict=True):
        stacked = math.prod(layer.module.kernel.shape[a] for a in layer.stack)
        tokens = math.lcm(*(getattr(layer.sparsity, slot).block for slot in SLOTS))
        products = seen if inputs else [layer.example(tokens)] if layer.example(tokens) else []
        slots = slots_of(layer.sparsity, [Use(*p, stacked) for p in dict.fromkeys(products)], bool(inputs))
        kernel, kind = tuple(layer.module.kernel.shape), type(layer.module).__name__
        plans.append(LayerPlan(layer.path, kind, kernel, layer.sparsity, slots, cost, flops.effective(layer.sparsity)))
    params = nnx.to_flat_state(nnx.state(copy, nnx.Param))
    doors = {layer.path for layer in found}
    named = [("/".join(map(str, path[:-1])), "/".join(map(str, path)), tuple(v.shape)) for path, v in params]
    uncovered = tuple((name, shape) for parent, name, shape in named if parent not in doors and len(shape) > 1)
    return Plan(tuple(plans), elsewhere, uncovered, sum(math.prod(v.shape) for _, v in params))


def _shape(v):
    return jax.ShapeDtypeStruct(v.shape, v.dtype) if hasattr(v, "shape") and hasattr(v, "dtype") else v


def _costs(model, inputs, options, count: int) -> tuple[list[int], int]:
    """Forward FLOPs of every layer, and of what is no layer's."""
    graph, state = nnx.split(model)
    leaves, tree = jax.tree.flatten((inputs, options))
    traced = [_shape(v) for v in leaves if hasattr(v, "dtype")]

    def forward(state, traced):
        given = iter(traced)
        inputs, options = jax.tree.unflatten(tree, [next(given) if hasattr(v, "dtype") else v for v in leaves])
        return nnx.merge(graph, state)(*inputs, **options)

    costs, elsewhere = [0] * count, 0
    for name, cost in flops.counted(jax.make_jaxpr(forward)(state, traced).jaxpr, _MARK):
        if name is None:
            elsewhere += cost
        else:
            costs[int(name.removeprefix(_MARK))] += cost
    return costs, elsewhere
