"""The plan of a model: seen by tracing it on shapes, without a value being computed."""

import math
import os

import jax
import numpy as np
from flax import nnx

from nmjax.analysis import flops
from nmjax.analysis.plan import LayerPlan, Plan, Use, hardened, runs_of, slots_of
from nmjax.nnx.doors import Example, Layer, layers
from nmjax.products import functions, operations
from nmjax.products.forms import products_of
from nmjax.products.slot import SLOTS

_MARK = "nmjax_layer_"


class _Notes(list):
    """A list that is static: it compares by identity."""

    __hash__ = object.__hash__
    __eq__ = object.__eq__


class _Recorder(nnx.Module):
    """Stands in a layer's door, notes what it is asked for, and computes it under a name that the program shows: as
    Flax does in place of a site, else as what stood there."""

    def __init__(self, layer: Layer, number: int, notes: _Notes):
        there, made = getattr(layer.module, layer.door.name), getattr(layer.module, "dot_general_cls", None)
        if made is not None:
            layer.module.dot_general_cls = None
            there = lambda *operands, **options: made()(*operands, **options)
        self.plain = layer.door.plain if layer.site is not None or there is None else there
        self.product = None if layer.site is None else layer.door.product
        self.number, self.notes = number, nnx.static(notes)

    def __call__(self, *operands, **options):
        if self.product is not None:
            told = {k: v for k, v in options.items() if k != "out_sharding"}
            if self.product is functions.einsum:
                spec, lhs, rhs = operands
                operation = operations.as_dot(lhs, rhs, operations.einsum_dims(spec, lhs.ndim, rhs.ndim)[0])
            else:
                lhs, rhs, *rest = operands
                make = operations.as_dot if self.product is functions.dot_general else operations.as_conv
                operation = make(lhs, rhs, *rest, **told)
            self.notes.append(Example(operation, _shape(lhs), _shape(rhs)))
        with jax.named_scope(f"{_MARK}{self.number}"):
            return self.plain(*operands, **options)


def plan(model, *inputs, **options) -> Plan:
    """What every layer will do, without doing it: slots, groups, FLOPs, and what would be refused and why.

    ``inputs`` and ``options`` are an example of what the model is called with, arrays or their shapes and whatever else
    it takes, as ``train=False``; without them tokens and FLOPs stay unknown. The model may be abstract itself, as
    `nnx.eval_shape` makes it.
    """
    copy, notes = _recording(model)
    uncovered, parameters = _parameters(model, list(layers(model)))
    given = bool(inputs or options)
    costs, elsewhere = _costs(_traced(copy, inputs, options), len(notes)) if given else ([None] * len(notes), 0)
    rows = [_row(*row) for row in zip(layers(model), notes, costs, strict=True)]
    return Plan(tuple(rows), elsewhere, uncovered, parameters)


def uses(model, *inputs, **options) -> list[tuple[Layer, list[Example]]]:
    """Every layer, and the products that a call asks it for."""
    copy, notes = _recording(model)
    _traced(copy, inputs, options)
    return [(layer, list(dict.fromkeys(seen))) for layer, seen in zip(layers(model), notes, strict=True)]


def _recording(model) -> tuple[nnx.Module, list[_Notes]]:
    """A copy of a model, of shapes, whose layers note what they are asked for."""
    graph, state = nnx.split(model)
    copy = nnx.merge(graph, jax.tree.map(_shape, state))
    notes = []
    for number, layer in enumerate(layers(copy)):
        notes.append(_Notes())
        setattr(layer.module, layer.door.name, nnx.data(_Recorder(layer, number, notes[-1])))
    return copy, notes


def _row(layer: Layer, seen: _Notes, cost: int | None) -> LayerPlan:
    sparsity, uses = layer.sparsity, dict.fromkeys(seen)
    if layer.site is not None and not seen:
        tokens = math.lcm(*(getattr(sparsity, slot).block for slot in SLOTS))
        uses = filter(None, [layer.example(tokens)])
    stacked = math.prod(layer.module.kernel.shape[a] for a in _stack(layer))
    uses = [Use(*product, stacked) for product in uses]
    slots = slots_of(sparsity, uses, bool(seen))
    runs = ()
    if seen and layer.site is not None:
        runs = runs_of(sparsity, uses, layer.site.backend, products_of(layer.site.packed))
    kernel, kind = tuple(layer.module.kernel.shape), type(layer.module).__name__
    shares = flops.effective(sparsity)
    return LayerPlan(layer.path, kind, kernel, sparsity, slots, cost, shares, _hardened(layer), runs)


def _shape(v):
    """The shape of what is an array, on the mesh that its type tells of."""
    if not isinstance(v, (jax.Array, np.ndarray, jax.ShapeDtypeStruct)):
        return v
    kind = jax.typeof(v)
    sharding = None if kind.sharding.mesh.empty else kind.sharding
    return jax.ShapeDtypeStruct(kind.shape, kind.dtype, sharding=sharding, weak_type=kind.weak_type)


def _traced(model, inputs, options):
    """The program of a call."""
    graph, state = nnx.split(model)
    leaves, tree = jax.tree.flatten(jax.tree.map(_shape, (state, inputs, options)))
    shapes = [v for v in leaves if isinstance(v, jax.ShapeDtypeStruct)]

    def forward(arrays):
        given = iter(arrays)
        whole = [next(given) if isinstance(v, jax.ShapeDtypeStruct) else v for v in leaves]
        state, inputs, options = jax.tree.unflatten(tree, whole)
        result = nnx.merge(graph, state)(*inputs, **options)
        return [v for v in jax.tree.leaves(result) if isinstance(v, jax.Array)]

    return jax.make_jaxpr(forward)(shapes).jaxpr


def _costs(program, count: int) -> tuple[list[int], int]:
    """Forward FLOPs of every layer, and of what is no layer's."""
    costs, elsewhere = [0] * count, 0
    for name, cost in flops.counted(program, _MARK):
        if name is None:
            elsewhere += cost
        else:
            costs[int(name.removeprefix(_MARK))] += cost
    return costs, elsewhere


def _parameters(model, found: list[Layer]) -> tuple[tuple[tuple[str, tuple[int, ...]], ...], int]:
    """(path, shape) of every parameter of more than one axis that is no layer's with a door, and how many numbers."""
    covered = {id(v) for layer in found for v in (layer.module.kernel, layer.module.bias)}
    uncovered, count = [], 0
    for path, variable in nnx.iter_graph(model):
        if isinstance(variable, nnx.Param):
            for v in jax.tree.leaves(variable):
                count += math.prod(np.shape(v))
                names = tuple(map(str, path))
                if id(variable) not in covered and np.ndim(v) > 1 and _rank(names, v.shape, found) > 1:
                    uncovered.append(("/".join(names), tuple(v.shape)))
    return tuple(uncovered), count


def _rank(names: tuple[str, ...], shape: tuple[int, ...], found: list[Layer]) -> int:
    """The rank of a parameter in one layer: where all layers beside it are one stack, it is too."""
    shared = [len(os.path.commonprefix([names, tuple(layer.path.split("/"))])) for layer in found]
    near = [layer for layer, n in zip(found, shared, strict=True) if n == max(shared)]
    alike = lambda layer, a: a < len(shape) and layer.module.kernel.shape[a] == shape[a]
    stacks = {_stack(layer) if all(alike(layer, a) for a in _stack(layer)) else () for layer in near}
    return len(shape) - (len(stacks.pop()) if len(stacks) == 1 else 0)


def _stack(layer: Layer) -> tuple[int, ...]:
    try:
        return layer.stack
    except ValueError:  # of a kernel that is not as its layer declares it; the layer is dense
        return ()


def _hardened(layer: Layer) -> str:
    made = getattr(layer.module, "hardened", None)
    return f"{made.n}:{made.m}" if made is not None and layer.site is None else hardened(layer.sparsity)
