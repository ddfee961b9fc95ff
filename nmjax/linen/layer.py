"""A call of a layer, run with other products of its weights."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
from flax import linen as nn
from flax.core import Scope, unfreeze
from flax.core.scope import subtract_filters

from nmjax.analysis.refusals import fitting_all
from nmjax.linen.registry import Weight
from nmjax.linen.variables import StateVariable, WeightOrigin, named, variable_of
from nmjax.products import rule
from nmjax.products.pruning import Operand
from nmjax.products.sparsity import Sparsity
from nmjax.programs.parameters import Parameter, Step, moves
from nmjax.programs.rewriting import Product, Rewriter, ShapedProduct
from nmjax.programs.running import run
from nmjax.programs.states import Origin, context
from nmjax.recipes.table import Recipe


def _layout(of: ShapedProduct) -> tuple[Operand, tuple[Step, ...]]:
    """Return the roles of the axes of the operand, and the steps from the weight to it."""
    return of.operand, of.product.parameter.steps


class Uses(NamedTuple):
    """The products and other operations of a call of a layer that take a weight.

    Attributes:
      weight: The weight.
      value: Its array.
      products: Its products.
      others: The names of other operations that take it.
    """

    weight: Weight
    value: Any
    products: list[ShapedProduct]
    others: list[str]

    @property
    def layouts(self) -> list[tuple[Operand, tuple[Step, ...]]]:
        """The ways in which products take the weight."""
        return list(dict.fromkeys(map(_layout, self.products)))

    @property
    def has_one_layout(self) -> bool:
        """True if all products take the whole weight in one way."""
        return len(self.layouts) == 1 and not any(step.kind == "slice" for step in self.layouts[0][1])

    def origin(self, sparsity: Sparsity, seed: int) -> WeightOrigin:
        """Return the origin of the weight's variable.

        Raises:
          ValueError: The weight is in no product, or in products along different axes.
        """
        shape, layouts = tuple(self.value.shape), self.layouts
        dense = f'leave the layer dense: (r"{self.weight.path}", "dense")'
        if not layouts:
            by = f": {', '.join(dict.fromkeys(self.others))} takes it" if self.others else ""
            raise ValueError(
                f"{self.weight}: {self.weight.kind} multiplies no input by {self.weight.name} of shape {shape}{by}. "
                f"Name the parameter that is an operand of a product, or {dense}."
            )
        refusals = [one.product.refusal(one.rhs) for one in self.products if one.product.derived]
        if refusals and sparsity != Sparsity():
            raise ValueError(f"{self.weight}: {refusals[0]}. Take the derivative outside the layer, or {dense}.")
        if not self.has_one_layout:
            raise ValueError(
                f"{self.weight}: {self.weight.kind} multiplies by {self.weight.name} of shape {shape} along different "
                f"axes, or by slices of it. It has no single pattern, so {dense}."
            )
        (operand, steps), others = layouts[0], tuple(dict.fromkeys(self.others))
        fitted = fitting_all(sparsity, [one.use() for one in self.products], tokens_known=False)[0]
        origin = Origin(Parameter(self.weight.path, steps), operand, fitted, elsewhere=others)
        return WeightOrigin(origin, sparsity, seed, shape)


class Call(NamedTuple):
    """A call of a registered layer.

    Attributes:
      module: The layer.
      weights: Its weights.
      method: The name of the method.
      args, options: What the method got.
      inside: A function that is called with the copy of the layer before the copy's method runs.
    """

    module: nn.Module
    weights: tuple[Weight, ...]
    method: str
    args: tuple[Any, ...]
    options: dict[str, Any]
    inside: Callable[[nn.Module], None]

    @property
    def scope(self) -> Scope:
        """The scope of the layer."""
        assert self.module.scope is not None
        return self.module.scope

    def values(self) -> dict[str, Any]:
        """Return the weights' arrays by their names.

        Raises:
          ValueError: The layer has no such parameter.
        """
        params = self.scope.variables().get("params", {})
        values: dict[str, Any] = {}
        for weight in self.weights:
            leaves = jax.tree.leaves(params.get(weight.name))
            if len(leaves) != 1 or isinstance(params[weight.name], Mapping):
                held = ", ".join(f"{name} {_shapes(v)}" for name, v in params.items()) or "none"
                raise ValueError(
                    f"{'/'.join(self.module.path) or 'the layer'}: {weight} names a parameter that the layer does not "
                    f"have. {weight.kind} has {held}."
                )
            values[weight.name] = leaves[0]
        return values

    def uses(self) -> dict[str, Uses]:
        """Return what the call does with the weights, by their names. Nothing is computed."""
        values = self.values()
        found = {weight.name: Uses(weight, values[weight.name], [], []) for weight in self.weights}
        note = lambda product, x, w, _: found[product.parameter.path].products.append(ShapedProduct.of(product, x, w))
        rewriter = Rewriter(note, lambda parameter, name: found[parameter.path].others.append(name))
        jax.eval_shape(lambda: self._run(rewriter, {}, initializing=True) and None)
        return found

    def variables(self, uses: Mapping[str, Uses] | None, recipe: Recipe, seed: int) -> dict[str, StateVariable]:
        """Return the variables of the weights, by their names. Make them if the model is initializing.

        Args:
          uses: What the call does with the weights. Needed to make variables.
          recipe: The sparsity of each layer.
          seed: The seed of all noise.
        """
        made: dict[str, StateVariable] = {}
        values = self.values()
        for weight in self.weights:
            sparsity = recipe(weight.path)
            with named(weight.path):
                if uses is None:
                    unknown = Origin(Parameter(weight.path, ()), Operand((), (), ()), sparsity)
                    origin = WeightOrigin(unknown, sparsity, seed)
                elif weight.name not in uses or (sparsity == Sparsity() and not uses[weight.name].has_one_layout):
                    continue  # the call does not multiply by it, or there is nothing to prune and no pattern to know
                else:
                    origin = uses[weight.name].origin(sparsity, seed)
                made[weight.name] = variable_of(self.scope, weight.name, origin, values[weight.name], recipe)
        return made

    def pruned(self, variables: Mapping[str, StateVariable], backend: str, initializing: bool) -> Any:
        """Return the result of the call with pruned products.

        Args:
          variables: What `variables` returned.
          backend: The backend, as in `Recipe`.
          initializing: True if the layer has run already, to make its parameters.
        """
        own: dict[str, Any] = {}
        for name, variable in variables.items():
            with named(variable.origin.path):
                own[name] = variable.of_one_layer.arrays

        def compute(product: Product, x: jax.Array, w: jax.Array, arrays: Any) -> jax.Array | None:
            name = product.parameter.path
            variable, path = variables[name], variables[name].origin.path
            if variable.sparsity == Sparsity():
                return None
            refusal = product.refusal(w)
            if refusal is not None:
                raise ValueError(f"{path or 'the model'}: {refusal}. Take the derivative outside the layer.")
            made_for, (operand, steps) = variable.origin.weight, _layout(ShapedProduct.of(product, x, w))
            if variable.origin.shape and (made_for.operand, moves(made_for.parameter.steps)) != (operand, moves(steps)):
                raise ValueError(
                    f"{path or 'the model'}: this call multiplies by {name} of shape {variable.origin.shape} along "
                    "other axes than the call in init did. It has no single pattern, so leave the layer dense: "
                    f'(r"{path}", "dense").'
                )
            of, ctx = path or "the layer", context(*arrays)
            return rule.bilinear(product.op, x, w, variable.sparsity, ctx, backend, name=of, extra=product.extra)

        return self.computed(Rewriter(compute, lambda parameter, name: None), own, initializing)

    def computed(self, rewriter: Rewriter, states: Mapping[str, Any], initializing: bool = False) -> Any:
        """Return the result of the call with other products. Variables that the layer writes are written.

        Args:
          rewriter: What stands in the place of products with the weights.
          states: The arrays of the weights' states, by the names of the weights.
          initializing: As in `pruned`.
        """
        y, written = self._run(rewriter, states, initializing)
        if initializing:
            return y  # the layer's own call has written them
        for collection, variables in written.items():
            for name, value in variables.items():
                if (collection, name) != ("intermediates", self.method):  # Flax writes it for the layer itself
                    self.scope.put_variable(collection, name, value)
        return y

    def _run(self, rewriter: Rewriter, states: Mapping[str, Any], initializing: bool) -> tuple[Any, Any]:
        """Return the result of a copy of the layer, and the variables that it may write."""
        scope = self.scope
        frozen: Any = scope.variables()
        mutable = subtract_filters(scope.mutable, ("params", "nm"))

        def call(values: dict[str, Any], *args: Any, **options: Any) -> tuple[Any, Any]:
            variables = unfreeze(frozen)
            for name, value in values.items():
                held = variables["params"][name]
                variables["params"][name] = jax.tree.unflatten(jax.tree.structure(held), [value])
            at = scope.path, scope.debug_path, scope.flags
            inner = Scope(variables, scope.rngs, scope.name, mutable, None, *at)
            if not initializing:
                inner.rng_counters = scope.rng_counters
            copy = self.module.clone(parent=inner, _deep_clone=True)
            self.inside(copy)
            return getattr(copy, self.method)(*args, **options), inner.mutable_variables()

        return run(call, self.values(), self.args, self.options, rewriter, states)


def _shapes(v: Any) -> Any:
    return jax.tree.map(lambda leaf: tuple(leaf.shape), v)
