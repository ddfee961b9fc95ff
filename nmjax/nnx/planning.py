"""The plan of a model. A call is traced on shapes, so no value is computed.

The plan's refusals are decided in `nmjax.analysis.refusals`.
"""

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jax.extend import core

from nmjax.analysis import flops
from nmjax.analysis.plan import LayerPlan, Plan, SlotPlan, hardened, runs_of, slots_of
from nmjax.analysis.refusals import Use
from nmjax.core.refusal import Refusal
from nmjax.nnx.delivery import NO_LAYERS, layer_refusal, layer_slot_refusals, normalised
from nmjax.nnx.doors import Example, Layer, layers
from nmjax.products import functions, operations
from nmjax.products.forms import products_of
from nmjax.products.slot import SLOTS
from nmjax.products.sparsity import Sparsity
from nmjax.pruners import identity
from nmjax.recipes.table import Recipe

_MARK = "nmjax_layer_"


class _Notes(list[Example]):
    """The products that a layer was asked for. It compares by identity, so that Flax takes it as static."""

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other


class _Recorder(nnx.Module):
    """Stands in a layer's door, notes the products that it is asked for, and computes them densely.

    It computes in a `jax.named_scope`, so that their FLOPs can be found in the program. The product of a layer that
    stays dense may be the model's own: it is computed as it is, and not noted.
    """

    def __init__(self, layer: Layer, number: int, notes: _Notes, noted: bool) -> None:
        self.plain = _plain_product(layer)
        self.product = layer.door.product if noted else None
        self.number, self.notes = number, nnx.static(notes)

    def __call__(self, *operands: Any, **options: Any) -> jax.Array:
        if self.product is not None:
            self.notes.append(_example(self.product, operands, options))
        with jax.named_scope(f"{_MARK}{self.number}"):
            return self.plain(*operands, **options)


def _plain_product(layer: Layer) -> Callable[..., jax.Array]:
    """Return the dense product of a layer: Flax's in place of a site, else the model's own."""
    product, make = getattr(layer.module, layer.door.name), getattr(layer.module, "dot_general_cls", None)
    if make is not None:
        layer.module.dot_general_cls = None
        product = lambda *operands, **options: make()(*operands, **options)
    return layer.door.plain if layer.site is not None or product is None else product


def _example(product: Callable[..., Any], operands: Sequence[Any], options: Mapping[str, Any]) -> Example:
    """Return the operation that a call of a product asks for."""
    if product is functions.einsum:
        spec, lhs, rhs = operands
        op = operations.as_dot(lhs, rhs, operations.einsum_dims(spec, lhs.ndim, rhs.ndim)[0])
    else:
        lhs, rhs, *rest = operands
        make: Callable[..., Any] = operations.as_dot if product is functions.dot_general else operations.as_conv
        op = make(lhs, rhs, *rest, **{name: value for name, value in options.items() if name != "out_sharding"})
    return Example(op, _shape(lhs), _shape(rhs))


class _Planned(NamedTuple):
    """The sparsity of a layer, from its site or from a recipe.

    Attributes:
      sparsity: The pruner of each slot.
      backend: The backend, as in `Recipe`.
      packed_before: The products whose weight is already packed.
      stack: The axes of the kernel that stack layers.
      refused: The reason why the layer cannot be made sparse; None if it can, or if it stays dense.
      refused_slots: The reason of each slot that `sparsify` would refuse.
    """

    sparsity: Sparsity
    backend: str = "auto"
    packed_before: frozenset[str] = frozenset()
    stack: tuple[int, ...] = ()
    refused: Refusal | None = None
    refused_slots: Mapping[str, Refusal] = {}

    @property
    def noted(self) -> bool:
        """True if the layer is or will be sparse, so its products can be noted."""
        return self.sparsity != Sparsity() and self.refused is None


def _planned_layers(model: Any, recipe: Recipe | None, axes: tuple[int, ...] | None) -> list[_Planned]:
    """Return what each layer prunes: by the recipe, or by its site if there is no recipe."""
    if recipe is not None:
        in_norms = normalised(model)
        return [_by_recipe(layer, recipe, axes, id(layer.module) in in_norms) for layer in layers(model)]
    planned: list[_Planned] = []
    for layer in layers(model):
        site, stack = layer.site, _stack(layer)
        if site is None:
            planned.append(_Planned(Sparsity(), stack=stack))
        else:
            planned.append(_Planned(site.sparsity, site.backend, products_of(site.packed), stack))
    return planned


def _by_recipe(layer: Layer, recipe: Recipe, axes: tuple[int, ...] | None, in_norm: bool) -> _Planned:
    """Return what a layer prunes after `sparsify`, and what `sparsify` would refuse."""
    sparsity, stack = recipe(layer.path), _stack(layer, axes)
    if sparsity == Sparsity():
        return _Planned(sparsity, stack=stack)
    refused = layer_refusal(layer, sparsity, axes, in_norm)
    slots = dict(layer_slot_refusals(layer, sparsity, axes)) if refused is None else {}
    return _Planned(sparsity, recipe.backend, stack=stack, refused=refused, refused_slots=slots)


def plan(
    model: Any, *inputs: Any, recipe: Recipe | None = None, stack: int | tuple[int, ...] | None = None, **options: Any
) -> Plan:  # fmt: skip
    """Return what every layer of a model will do, without doing it.

    The plan says, for each layer, what its slots prune, in how many groups, at how many FLOPs, who runs its products,
    and what training would refuse. It prints as a table.

    Args:
      model: A model, sparse or dense. It may be abstract, as `nnx.eval_shape` returns it.
      *inputs: An example of the model's inputs: arrays or their shapes. Without them, tokens and FLOPs are unknown.
      recipe: If given, the plan is that of the model after ``sparsify(model, recipe, stack=stack)``. The model is not
        changed, and what `sparsify` would refuse is listed in the plan. An abstract model is planned as if it had
        values.
      stack: As in `sparsify`. Only for a plan with a recipe.
      **options: Keyword arguments of the call, such as ``train=False``.

    Returns:
      The `Plan`.

    Raises:
      TypeError: The model is not one of flax.nnx, ``recipe`` is not a Recipe, or ``stack`` comes without a recipe.

    >>> import nmjax as nm
    >>> model = nm.nnx.sparsify(nnx.Linear(8, 4, rngs=nnx.Rngs(0)), nm.Recipe(((".*", "ste(2,4)"),)))
    >>> plan = nm.nnx.plan(model, jnp.ones((16, 8)))
    >>> plan.layers[0].slots[0]
    SlotPlan(name='fwd_rhs', pruner=ste(mse(2,4)), along=(8,), groups=8, refused=None)
    >>> plan.forward  # FLOPs, dense and effective
    (1024, 512.0)

    A recipe can be tried before anything is changed:

    >>> recipe = nm.Recipe(((".*", "s_ste(2,4)"), ("head", "dense")))
    >>> plan = nm.nnx.plan(nnx.Linear(8, 4, rngs=nnx.Rngs(0)), jnp.ones((16, 8)), recipe=recipe)
    >>> plan.forward, plan.refused
    ((1024, 512.0), (("the rule 'head'", "it matches no layer's whole path, or earlier rules decide for its layers."),))
    """
    if recipe is not None and not isinstance(recipe, Recipe):
        raise TypeError(f"plan takes a Recipe, such as Recipe(((r'.*', 's_ste(2,4)'),)), got {type(recipe).__name__}.")
    if recipe is None and stack is not None:
        raise TypeError("plan takes stack only together with a recipe: a sparse model knows which axes stack layers.")
    planned = _planned_layers(model, recipe, (stack,) if isinstance(stack, int) else stack)
    copy, notes = _recording(model, [one.noted for one in planned])
    uncovered, parameters = _parameters(model, list(layers(model)))
    costs: Sequence[int | None] = [None] * len(notes)
    elsewhere = 0
    if inputs or options:
        costs, elsewhere = _costs(_traced(copy, inputs, options), len(notes))
    rows = [_row(*row) for row in zip(layers(model), planned, notes, costs, strict=True)]
    refused = () if recipe is None else _recipe_refusals(model, recipe, [row.path for row in rows])
    return Plan(tuple(rows), elsewhere, uncovered, parameters, refused)


def _recipe_refusals(model: Any, recipe: Recipe, paths: list[str]) -> tuple[tuple[str, str], ...]:
    """Return (where, reason) of what `sparsify` would refuse in a recipe itself."""
    unused = "it matches no layer's whole path, or earlier rules decide for its layers."
    refused = [(f"the rule {pattern!r}", unused) for pattern in recipe.unused(paths)]
    if not paths and any(sparsity != Sparsity() for _, sparsity in recipe.rules):
        refused.append(("the model", f"{type(model).__name__} {NO_LAYERS}"))
    return tuple(refused)


def products_of_call(model: Any, *inputs: Any, **options: Any) -> list[tuple[Layer, list[Example]]]:
    """Return every layer of a model, and the products that one call of the model asks it for."""
    copy, notes = _recording(model, [layer.site is not None for layer in layers(model)])
    _traced(copy, inputs, options)
    return [(layer, list(dict.fromkeys(noted))) for layer, noted in zip(layers(model), notes, strict=True)]


def _recording(model: Any, noted: Sequence[bool]) -> tuple[Any, list[_Notes]]:
    """Return a copy of a model, of shapes, and the notes that its layers take when it is called.

    Args:
      model: The model.
      noted: For each layer, True if its products are to be noted.
    """
    graph, state = nnx.split(model)
    is_variable = lambda v: isinstance(v, nnx.Variable)
    # Flax takes a shape for static unless it is a variable's. So other arrays, as nnx.WeightNorm has, stay.
    shapes = jax.tree.map(lambda v: jax.tree.map(_shape, v) if is_variable(v) else v, state, is_leaf=is_variable)
    copy = nnx.merge(graph, shapes)
    notes: list[_Notes] = []
    for number, layer in enumerate(layers(copy)):
        notes.append(_Notes())
        setattr(layer.module, layer.door.name, nnx.data(_Recorder(layer, number, notes[-1], noted[number])))
    return copy, notes


def _row(layer: Layer, planned: _Planned, notes: _Notes, cost: int | None) -> LayerPlan:
    sparsity = planned.sparsity
    kernel, kind = tuple(layer.module.kernel.shape), type(layer.module).__name__
    shares = flops.effective(sparsity)
    if planned.refused is not None:
        pruners = ((name, getattr(sparsity, name)) for name in SLOTS)
        slots = tuple(SlotPlan(name, p, refused=planned.refused.reason) for name, p in pruners if p != identity)
        return LayerPlan(layer.path, kind, kernel, sparsity, slots, cost, shares, hardened(sparsity))
    products: Iterable[Example] = dict.fromkeys(notes)
    if planned.noted and not notes:
        example = layer.example(tokens=math.lcm(*(getattr(sparsity, slot).block for slot in SLOTS)))
        products = () if example is None else (example,)
    stacked = math.prod(layer.module.kernel.shape[a] for a in planned.stack)
    uses = [Use(*product, stacked) for product in products]
    slots = slots_of(sparsity, uses, bool(notes))
    reasons = {name: refusal.reason for name, refusal in planned.refused_slots.items()}
    slots = tuple(slot._replace(refused=slot.refused or reasons.get(slot.name)) for slot in slots)
    runs = ()
    if notes:
        runs = runs_of(sparsity, uses, planned.backend, planned.packed_before)
    return LayerPlan(
        layer.path, kind, kernel, sparsity, slots, cost, shares, _hardened(layer, sparsity), runs
    )  # fmt: skip


def _shape(v: Any) -> Any:
    """Return the shape of an array, with its sharding if its type has a mesh. Return anything else as it is."""
    if not isinstance(v, (jax.Array, np.ndarray, jax.ShapeDtypeStruct)):
        return v
    kind = jax.typeof(v)
    sharding = None if kind.sharding.mesh.empty else kind.sharding
    return jax.ShapeDtypeStruct(kind.shape, kind.dtype, sharding=sharding, weak_type=kind.weak_type)


def _traced(model: Any, inputs: Sequence[Any], options: Mapping[str, Any]) -> core.Jaxpr:
    """Return the program of a call."""
    graph, state = nnx.split(model)
    leaves, tree = jax.tree.flatten(jax.tree.map(_shape, (state, inputs, options)))
    shapes = [v for v in leaves if isinstance(v, jax.ShapeDtypeStruct)]

    def forward(arrays: list[jax.Array]) -> list[jax.Array]:
        values = iter(arrays)
        whole = [next(values) if isinstance(v, jax.ShapeDtypeStruct) else v for v in leaves]
        state, inputs, options = jax.tree.unflatten(tree, whole)
        result = nnx.merge(graph, state)(*inputs, **options)
        return [v for v in jax.tree.leaves(result) if isinstance(v, jax.Array)]

    return jax.make_jaxpr(forward)(shapes).jaxpr


def _costs(program: core.Jaxpr, count: int) -> tuple[list[int], int]:
    """Return the forward FLOPs of every layer, and those of no layer."""
    costs, elsewhere = [0] * count, 0
    for name, cost in flops.counted(program, _MARK):
        if name is None:
            elsewhere += cost
        else:
            costs[int(name.removeprefix(_MARK))] += cost
    return costs, elsewhere


def _parameters(
    model: Any, with_doors: list[Layer]
) -> tuple[tuple[tuple[str, tuple[int, ...]], ...], int]:  # fmt: skip
    """Return (path, shape) of the matrices that no layer with a door holds, and the number of all parameters."""
    covered = {id(v) for layer in with_doors for v in (layer.module.kernel, layer.module.bias)}
    uncovered: list[tuple[str, tuple[int, ...]]] = []
    count = 0
    for path, variable in nnx.iter_graph(model):
        if isinstance(variable, nnx.Param):
            for v in jax.tree.leaves(variable):
                count += math.prod(np.shape(v))
                names = tuple(map(str, path))
                if id(variable) not in covered and np.ndim(v) > 1 and _rank(names, v.shape, with_doors) > 1:
                    uncovered.append(("/".join(names), tuple(v.shape)))
    return tuple(uncovered), count


def _rank(names: tuple[str, ...], shape: tuple[int, ...], with_doors: list[Layer]) -> int:
    """Return the rank of a parameter in one layer: if all layers beside it are stacked alike, it is stacked too."""
    shared = [len(os.path.commonprefix([names, tuple(layer.path.split("/"))])) for layer in with_doors]
    nearest = [layer for layer, n in zip(with_doors, shared, strict=True) if n == max(shared)]
    stacks: set[tuple[int, ...]] = set()
    for layer in nearest:
        stack, kernel = _stack(layer), layer.module.kernel.shape
        stacks.add(stack if all(a < len(shape) and kernel[a] == shape[a] for a in stack) else ())
    return len(shape) - (len(stacks.pop()) if len(stacks) == 1 else 0)


def _stack(layer: Layer, axes: tuple[int, ...] | None = None) -> tuple[int, ...]:
    try:
        return axes if axes in layer.stacks else layer.stack
    except ValueError:  # a kernel of another shape than its layer declares; such a layer is dense
        return ()


def _hardened(layer: Layer, sparsity: Sparsity) -> str:
    pattern = getattr(layer.module, "hardened", None)
    if pattern is not None and sparsity == Sparsity():
        return f"{pattern.n}:{pattern.m}"
    return hardened(sparsity)
