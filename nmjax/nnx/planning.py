"""The plan of a model. A call is traced on shapes, so no value is computed.

The plan's refusals are decided in `nmjax.analysis.refusals`.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from nmjax.analysis import scopes
from nmjax.analysis.plan import LayerPlan, Plan, layer_plan
from nmjax.analysis.refusals import Use
from nmjax.analysis.savings import speed_of
from nmjax.core.refusal import Refusal
from nmjax.nnx.checks import NO_LAYERS, check_uses, fitted, layer_refusal, layer_slot_refusals, normalised
from nmjax.nnx.layer import Layer
from nmjax.nnx.layers import layers
from nmjax.nnx.recording import Notes, other_uses, recording, traced, with_calls
from nmjax.nnx.unreached import rule_paths, stack_of, unreached, wanted
from nmjax.products.forms import products_of
from nmjax.products.slot import SLOTS
from nmjax.products.sparsity import Sparsity
from nmjax.pruners import identity
from nmjax.recipes.table import Recipe, recipe_of, unused_rules


class _Planned(NamedTuple):
    """The sparsity of a layer, from its state or from a recipe.

    Attributes:
      sparsity: The pruner of each slot.
      backend: The backend, as in `Recipe`.
      packed_before: The products whose weight is already packed.
      phase: The phase of the layer, if one is set.
      stack: The axes of the kernel that stack layers.
      refused: The reason why the layer cannot be made sparse; None if it can, or if it stays dense.
      refused_slots: The reason of each slot that `sparsify` would refuse.
      else_dense: (slot, reason) of the slots that `sparsify` would leave dense.
    """

    sparsity: Sparsity
    backend: str = "auto"
    packed_before: frozenset[str] = frozenset()
    phase: int | None = None
    stack: tuple[int, ...] = ()
    refused: Refusal | None = None
    refused_slots: Mapping[str, Refusal] = {}
    else_dense: tuple[tuple[str, str], ...] = ()

    @property
    def noted(self) -> bool:
        """True if the layer is or will be sparse, so its products can be noted."""
        return self.sparsity != Sparsity() and self.refused is None


def _planned_layers(
    model: Any, registered: list[Layer], recipe: Recipe | None, axes: tuple[int, ...] | None
) -> list[_Planned]:  # fmt: skip
    """Return what each layer prunes: by the recipe, or by its state if there is no recipe."""
    if recipe is not None:
        in_norms = normalised(model)
        return [_by_recipe(layer, recipe, axes, id(layer.module) in in_norms) for layer in registered]
    planned: list[_Planned] = []
    for layer in registered:
        state, stack = layer.state, stack_of(layer)
        if state is None:
            planned.append(_Planned(Sparsity(), stack=stack))
        else:
            planned.append(_Planned(state.sparsity, state.backend, products_of(state.packed), state.phase, stack))
    return planned


def _by_recipe(layer: Layer, recipe: Recipe, axes: tuple[int, ...] | None, in_norm: bool) -> _Planned:
    """Return what a layer prunes after `sparsify`, and what `sparsify` would refuse."""
    stack = stack_of(layer, axes)
    sparsity, else_dense = fitted(layer, recipe(layer.path), axes)
    if sparsity == Sparsity():
        return _Planned(sparsity, stack=stack, else_dense=else_dense)
    refused = layer_refusal(layer, sparsity, axes, in_norm)
    slots = dict(layer_slot_refusals(layer, sparsity, axes)) if refused is None else {}
    return _Planned(
        sparsity, recipe.backend, stack=stack, refused=refused, refused_slots=slots, else_dense=else_dense
    )  # fmt: skip


def plan(model: Any, *given: Any, stack: int | tuple[int, ...] | None = None, **options: Any) -> Plan:
    """Return what every layer of a model will do, without doing it.

    The plan says, for each layer, what its slots prune, in how many groups, at how many FLOPs, who runs its products,
    and what training would refuse. It prints as a table.

    Args:
      model: A model, sparse or dense. It may be abstract, as `nnx.eval_shape` returns it.
      *given: First a `Recipe`, if there is one: then the plan is that of the model after ``sparsify(model, recipe,
        *inputs, stack=stack)``. The model is not changed, and what `sparsify` would refuse is listed in the plan. An
        abstract model is planned as if it had values. Then an example of the model's inputs: arrays or their shapes.
        Without them, tokens and FLOPs are unknown.
      stack: As in `sparsify`. Only for a plan with a recipe.
      **options: Keyword arguments of the call, such as ``train=False``.

    Returns:
      The `Plan`.

    Raises:
      TypeError: The model is not one of flax.nnx, ``recipe`` is not a Recipe, or ``stack`` comes without a recipe.
      ValueError: There is a recipe, and the call asks a layer for products along different axes of its weight.

    >>> from flax import nnx
    >>> import jax.numpy as jnp, nmjax as nm
    >>> recipe = nm.Recipe({".*": "ste(2,4)"})
    >>> model = nm.nnx.sparsify(nnx.Linear(8, 4, rngs=nnx.Rngs(0)), recipe)
    >>> plan = nm.nnx.plan(model, jnp.ones((16, 8)))
    >>> plan.forward  # FLOPs, dense and effective
    (1024, 512.0)
    >>> plan.layers[0].slots[0]
    SlotPlan(name='y_w', pruner=ste(mse(2,4)), along=(8,), groups=8, refused=None, norms=(), of_rows=False)

    A recipe can be tried before anything is changed:

    >>> recipe = nm.Recipe(((".*", "s_ste(2,4)"), ("head", "dense")))
    >>> plan = nm.nnx.plan(nnx.Linear(8, 4, rngs=nnx.Rngs(0)), recipe, jnp.ones((16, 8)))
    >>> plan.forward, plan.refused
    ((1024, 512.0), (("the rule 'head'", "it matches no layer's whole path, or earlier rules decide for its layers."),))
    """
    recipe, inputs = recipe_of("nm.nnx.plan", given, options)
    if recipe is None and stack is not None:
        raise TypeError("plan takes stack only together with a recipe: a sparse model knows which axes stack layers.")
    axes = (stack,) if isinstance(stack, int) else stack
    registered = [layer.stacked(axes) for layer in layers(model)]
    if recipe is not None and (inputs or options):
        registered, _ = with_calls(model, registered, recipe, inputs, options)
    planned = _planned_layers(model, registered, recipe, axes)
    copy, notes = recording(model, [one.noted for one in planned])
    beyond, parameters = unreached(model, registered)
    costs: Sequence[int | None] = [None] * len(notes)
    elsewhere, of_data = 0, set()
    of_weights: Mapping[int, list[str]] = {}
    if inputs or options:
        costs, elsewhere, of_data = scopes.costs_of(*traced(copy, inputs, options), len(notes))
        of_weights = other_uses(model, inputs, options) if recipe is not None else {}
    rows = tuple(
        _row(*row, reads_data=i in of_data) for i, row in enumerate(zip(registered, planned, notes, costs, strict=True))
    )
    uncovered, speed = tuple((one.path, one.shape) for one in beyond), speed_of(row.runs for row in rows)
    if recipe is None:
        return Plan(rows, elsewhere, uncovered, parameters, speed=speed)
    refused = _recipe_refusals(model, recipe, [row.path for row in rows], rule_paths(beyond))
    if inputs or options:
        try:
            rows_of = zip(registered, planned, notes, strict=True)
            called = [(layer, p.sparsity) for layer, p, n in rows_of if p.refused is None and n.asked is not None]
            check_uses(called, of_weights)
        except ValueError as error:
            refused += (("the model", str(error)),)
    missed = tuple(one.path for one in wanted(recipe, beyond))
    return Plan(rows, elsewhere, uncovered, parameters, refused, missed, speed)


def _recipe_refusals(
    model: Any, recipe: Recipe, paths: list[str], unreached: list[str]
) -> tuple[tuple[str, str], ...]:  # fmt: skip
    """Return (where, reason) of what `sparsify` would refuse in a recipe itself."""
    refused = unused_rules(recipe, paths, unreached)
    if not paths and any(sparsity != Sparsity() for _, sparsity in recipe.rules):
        refused.append(("the model", f"{type(model).__name__} {NO_LAYERS}"))
    return tuple(refused)


def _row(layer: Layer, planned: _Planned, notes: Notes, cost: int | None, reads_data: bool) -> LayerPlan:
    sparsity, products = planned.sparsity, list(dict.fromkeys(notes))
    if planned.noted and not notes:
        example = layer.example(tokens=math.lcm(*(getattr(sparsity, slot).facts.block for slot in SLOTS)))
        products += [] if example is None else [example]
    stacked = math.prod(layer.kernel.shape[a] for a in planned.stack)
    uses = [Use(product.op, product.lhs, product.rhs, stacked) for product in products]
    kernel = tuple(layer.kernel.shape) if layer.has_weight else ()
    row = layer_plan(
        layer.path, type(layer.module).__name__, kernel, sparsity, uses, backend=planned.backend, called=bool(notes),
        cost=cost, reads_data=reads_data, refused=None if planned.refused is None else planned.refused.reason,
        refused_slots={name: refusal.reason for name, refusal in planned.refused_slots.items()},
        packed_before=planned.packed_before, phase=planned.phase, in_phases=True,
    )  # fmt: skip
    row = row._replace(else_dense=(*planned.else_dense, *row.else_dense))
    pattern, own = layer.hardened, layer.sparsity == row.sparsity  # a recipe would clear the pattern of another method
    if pattern is not None and own and row.sparsity.y_w == identity:
        return row._replace(hardened=f"{pattern.n}:{pattern.m}")
    return row
