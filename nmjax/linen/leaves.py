"""The weights and the variables of layers, as leaves of a model's variables."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
from flax.core import meta

from nmjax.linen.variables import PASS_NM, StateVariable, named
from nmjax.products.sparsity import Sparsity
from nmjax.programs.states import WeightState, first, stored

Names = tuple[Any, ...]


def leaves(variables: Mapping[str, Any]) -> tuple[dict[Names, Any], Any]:
    """Return the leaves of variables by their keys, and the tree. Boxes and variables of layers are whole."""
    whole = lambda v: isinstance(v, (StateVariable, meta.AxisMetadata))
    flat, tree = jax.tree_util.tree_flatten_with_path(variables, is_leaf=whole)
    return {tuple(getattr(part, "key", part) for part in path): leaf for path, leaf in flat}, tree


def sparse_weights(variables: Mapping[str, Any]) -> "list[SparseWeight]":
    """Return every variable of a layer with its weight.

    Raises:
      ValueError: A collection is missing, or a weight of a sparse layer does not have the shape that its variable says.
    """
    if "params" not in variables or "nm" not in variables:
        raise ValueError(f"expected the collections 'params' and 'nm' in one dict, got {sorted(variables)}.")
    by_name, _ = leaves(variables)
    found = [
        SparseWeight(name, v, meta.unbox(by_name.get(("params", *name[1:]))))
        for name, v in by_name.items() if isinstance(v, StateVariable)
    ]  # fmt: skip
    for one in found:
        if one.variable.origin.weight.sparsity != Sparsity():
            with named("/".join(one.name[1:-1])):
                one.check()
    return found


class SparseWeight(NamedTuple):
    """A weight and the variable of its layer, perhaps of a stack of layers.

    Attributes:
      name: The keys that lead to the variable.
      variable: The variable.
      weight: The weight. None if a dense layer does not have it as a parameter.
    """

    name: Names
    variable: StateVariable
    weight: Any

    @property
    def where(self) -> Names:
        """The keys that lead to the weight."""
        return ("params", *self.name[1:])

    @property
    def weight_path(self) -> str:
        """The path of the weight among the parameters."""
        return "/".join(self.where[1:])

    @property
    def path(self) -> str:
        """The path of the layer in the model that ran init."""
        return self.variable.origin.path

    def check(self) -> None:
        """Refuse a weight that is missing, or not stacked as its variable is."""
        if self.weight is None:
            raise ValueError(f"{self.weight_path} is missing from 'params'. Pass the parameters of the whole model.")
        variable, shape = self.variable, self.variable.origin.shape
        if self.weight.ndim != len(shape + variable.stack) or variable.unstacked(self.weight.shape)[1] != shape:
            stacked = f"{shape} stacked along {variable.stack or 'no axis'}"
            raise ValueError(f"its weight has shape {self.weight.shape}, but 'nm' is for {stacked}. {PASS_NM}")

    @property
    def value(self) -> jax.Array:
        """The weight, as the methods of `WeightState` take it."""
        self.check()
        return first(self.weight, self.variable.axes)

    @property
    def state(self) -> WeightState:
        """The state of the weight."""
        with named(self.path):
            return self.variable.weight_state

    @property
    def before(self) -> WeightState:
        """The state of the weight with what its layer pruned before it was hardened."""
        return WeightState(self.state.origin._replace(sparsity=self.variable.origin.weight.sparsity))

    def back(self, weight: jax.Array) -> jax.Array:
        """Return a weight as it is stored, given one like `value`."""
        return stored(weight, self.variable.axes, len(self.variable.origin.shape))
