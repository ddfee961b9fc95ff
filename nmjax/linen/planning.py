"""The plan of a flax.linen model: what every layer will do. Nothing is computed."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import linen as nn

from nmjax.analysis import scopes
from nmjax.analysis.plan import Plan, layer_plan
from nmjax.analysis.refusals import Use
from nmjax.analysis.savings import speed_of
from nmjax.analysis.scopes import Costs
from nmjax.core import layer_paths
from nmjax.linen.delivery import ACTIVE, NO_LAYERS, RECIPE, Reached
from nmjax.linen.layer import Call, Uses
from nmjax.linen.registry import Weight, weights_of
from nmjax.products.pruning import shape_of
from nmjax.products.sparsity import Sparsity
from nmjax.programs import running, uses
from nmjax.programs.rewriting import Rewriter
from nmjax.programs.running import is_array
from nmjax.pruners import identity
from nmjax.recipes.table import Recipe, recipe_of, unused_rules


class Planned(NamedTuple):
    """A weight, and what calls do with it.

    Attributes:
      number: Its place among the weights, in the order in which calls reach them.
      weight: The weight.
      size: The number of values in one layer's weight.
      uses: Its products: the operation, and the shapes of x and of the operand.
      refused: The reasons why it cannot be pruned.
    """

    number: int
    weight: Weight
    size: int
    uses: dict[tuple[Any, Any, Any], None]
    refused: list[str]


def refused_use(path: str, sparsity: Sparsity, operations: list[str]) -> str:
    """Return the error for a weight that a layer prunes, and that these operations outside of the layer take too."""
    return (
        f"{path or 'the model'}: y_w={sparsity.y_w} prunes the weight in the layer only, but the model also "
        f"uses it elsewhere, in {', '.join(operations)}, as a tied head does. It has no single final form, so leave it "
        f'dense: (r"{path}", "dense").'
    )


class Planner:
    """The interceptor of `plan`. It notes the products of weights, and computes them densely, each in a scope."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe, self.reached = recipe, Reached()
        self.planned: dict[str, Planned] = {}  # by the paths of the weights
        self.copies: list[nn.Module] = []

    def __call__(
        self, next_fun: Callable[..., Any], args: Any, options: Any, context: nn.module.InterceptorContext
    ) -> Any:  # fmt: skip
        """Return the result of a method of the dense model."""
        module, method = context.module, context.method_name
        if method == "setup" or module.scope is None or not callable(getattr(type(module), method, None)):
            return next_fun(*args, **options)
        weights = () if any(module is copy for copy in self.copies) else weights_of(module)
        self.reached.by_layer |= {(*module.path, weight.name): weight.path for weight in weights}
        if not weights or module.is_initializing():
            y = next_fun(*args, **options)
            self.reached.note(module)
            return y
        return self._of_layer(Call(module, weights, method, args, options, self.copies.append))

    def _of_layer(self, call: Call) -> Any:
        before = len(self.copies)

        def compute(product: Any, x: Any, w: Any, _: Any) -> jax.Array:
            with scopes.of_layer(numbers[product.parameter.path]):
                return product.op(x, w, *product.extra)

        try:
            numbers = {name: self._noted(call, uses) for name, uses in call.uses().items()}
            return call.computed(Rewriter(compute, lambda parameter, name: None), {})
        finally:
            del self.copies[before:]

    def _noted(self, call: Call, uses: Uses) -> int:
        """Write down what a call does with a weight, and return the number of the weight."""
        weight, sparsity = uses.weight, self.recipe(uses.weight.path)
        new = Planned(len(self.planned), weight, uses.value.size, {}, [])
        row = self.planned.setdefault("/".join((*call.module.path, weight.name)), new)
        row.uses.update(dict.fromkeys((one.product.op, one.lhs, one.rhs) for one in uses.products))
        if sparsity != Sparsity() and (uses.products or call.method == "__call__"):
            try:
                uses.origin(sparsity, 0)
            except ValueError as error:
                row.refused.append(str(error))
        return row.number


def plan(model: nn.Module, *given: Any, **options: Any) -> Plan:
    """Return what every layer of a model will do, without doing it.

    The plan says, for each layer, what its slots prune, in how many groups, at how many FLOPs, who runs its products,
    and what training would refuse. It prints as a table.

    Args:
      model: A model. Nothing of it is computed.
      *given: First the recipe of `sparsify`. Without it, the plan is that of the dense model. Then an example of
        the model's inputs: arrays or their shapes.
      **options: Keyword arguments of the call, such as ``train=False``.

    Returns:
      The `nmjax.nnx.Plan`.

    Raises:
      TypeError: The model is not one of flax.linen, or ``recipe`` is not a Recipe.
      ValueError: It is called inside `sparsify`.

    >>> import jax.numpy as jnp
    >>> import nmjax as nm
    >>> recipe = nm.Recipe({".*": "s_ste(2,4)"})
    >>> plan = nm.linen.plan(nn.Dense(4), recipe, jnp.ones((16, 8)))
    >>> print(plan.layers[0].slots[0])
    y_w=ste(soft(2,4))
      8 groups along 8
    >>> plan.forward  # FLOPs, dense and effective
    (1024, 512.0)
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"plan takes a model of flax.linen, got {type(model).__name__}. For flax.nnx use nm.nnx.plan.")
    recipe, inputs = recipe_of("nm.linen.plan", given, options)
    if getattr(ACTIVE, "delivery", None) is not None:
        raise ValueError("plan is called inside sparsify. Call it outside: plan(model, recipe, x).")
    recipe = Recipe(()) if recipe is None else recipe
    planner, shapes, costs, others = _traced(model, recipe, inputs, options)
    rows = []
    for where in sorted(planner.planned, key=layer_paths.by_number):
        row, shape = planner.planned[where], np.shape(shapes[where])
        path, sparsity = row.weight.path, recipe(row.weight.path)
        if sparsity.y_w != identity and where in others:
            row.refused.append(refused_use(path, sparsity, others[where]))
        of = [Use(op, lhs, rhs, math.prod(shape) // row.size) for op, lhs, rhs in row.uses]
        rows.append(layer_plan(
            path, row.weight.kind, shape, sparsity, of, backend=recipe.backend, cost=costs.layers[row.number],
            reads_data=row.number in costs.reading_data, refused=next(iter(row.refused), None),
        ))  # fmt: skip
    reached = planner.reached
    left = tuple(("/".join(path), of[0]) for path, of in reached.matrices.items() if path not in reached.by_layer)
    count = sum(math.prod(v.shape) for v in shapes.values())
    refused = unused_rules(recipe, reached.paths)
    if not reached.by_layer and any(sparsity != Sparsity() for _, sparsity in recipe.rules):
        refused.append(("the model", f"{type(model).__name__} {NO_LAYERS}"))
    missed = tuple(one.path for one in reached.missed(recipe))
    return Plan(tuple(rows), costs.elsewhere, left, count, tuple(refused), missed, speed_of(row.runs for row in rows))


def _traced(
    model: nn.Module, recipe: Recipe, inputs: Any, options: Any
) -> tuple[Planner, dict[str, Any], Costs, dict[str, list[str]]]:  # fmt: skip
    """Return what a planner found, the parameters' shapes by their paths, the FLOPs, and `other_uses`."""
    planner = Planner(recipe)
    leaves, tree = jax.tree.flatten((inputs, options))
    arrays = [shape_of(v) for v in leaves if is_array(v)]
    key = jax.random.key(0)

    def call(arrays: list[jax.Array]) -> tuple[Any, Any]:
        given = iter(arrays)
        return jax.tree.unflatten(tree, [next(given) if is_array(v) else v for v in leaves])

    def init(arrays: list[jax.Array]) -> Any:
        args, keywords = call(arrays)
        return nn.unbox(model.init(key, *args, **keywords))

    with RECIPE(object()), nn.intercept_methods(planner):  # what nn.jit has compiled before is traced again
        variables = jax.eval_shape(init, arrays)
    params = {"params": variables["params"]} if "params" in variables else {}
    rest = {name: of for name, of in variables.items() if name != "params"}

    def forward(params: Any, arrays: list[jax.Array]) -> list[jax.Array]:
        args, keywords = call(arrays)
        made = jax.tree.map(lambda v: jax.numpy.zeros(v.shape, v.dtype), rest)
        y = model.apply(params | made, *args, rngs={"params": key}, mutable=True, **keywords)
        return [v for v in jax.tree.leaves(y) if isinstance(v, jax.Array)]

    with RECIPE(object()), nn.intercept_methods(planner):
        program = jax.make_jaxpr(forward)(params, arrays).jaxpr
    shapes = running.leaves(params.get("params", {}))
    names = [*shapes, *[None] * (len(program.invars) - len(shapes))]
    costs = scopes.costs_of(program, [name is not None for name in names], len(planner.planned))
    return planner, shapes, costs, uses.other_uses(program, names)


def other_uses(model: nn.Module, inputs: Any, options: Any) -> dict[str, list[str]]:
    """Return what else than the products of its layers a call of a model does with their weights, by their paths."""
    return _traced(model, Recipe(()), inputs, options)[-1]
