"""The weights and the variables of layers, as leaves of a model's variables."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
from flax.core import meta

from nmjax.linen.variables import PASS_NM, SiteVariable, named
from nmjax.products.sparsity import Sparsity
from nmjax.programs.sites import Site, first, stored

Names = tuple[Any, ...]


class Leaves(NamedTuple):
    """The leaves of a model's variables by their keys, and the structure of the tree."""

    by_name: dict[Names, Any]
    tree: Any

    @classmethod
    def of(cls, variables: Mapping[str, Any]) -> "Leaves":
        """Return the leaves of variables. Boxes and variables of layers are whole."""
        if "params" not in variables or "nm" not in variables:
            raise ValueError(f"expected the collections 'params' and 'nm' in one dict, got {sorted(variables)}.")
        whole = lambda v: isinstance(v, (SiteVariable, meta.AxisMetadata))
        flat, tree = jax.tree_util.tree_flatten_with_path(variables, is_leaf=whole)
        return cls({tuple(getattr(part, "key", part) for part in path): leaf for path, leaf in flat}, tree)

    def sites(self) -> "list[Sited]":
        """Return every variable of a layer with its weight.

        Raises:
          ValueError: A weight of a sparse layer does not have the shape that its variable says.
        """
        return [self._sited(name, v) for name, v in self.by_name.items() if isinstance(v, SiteVariable)]

    def _sited(self, name: Names, site: SiteVariable) -> "Sited":
        where = ("params", *name[1:-2], site.origin.weight)  # beside the scope that has the variable
        weight = meta.unbox(self.by_name.get(where))
        found = Sited("/".join(where[1:]), site.origin.path, name, where, site, weight)
        if site.origin.sparsity != Sparsity():
            with named("/".join(name[1:-2])):
                found.check()
        return found


class Sited(NamedTuple):
    """A weight and the variable of its layer, perhaps of a stack of layers.

    Attributes:
      weight_path: The path of the weight among the parameters.
      path: The path of the layer in the model that ran init.
      name: The keys that lead to the variable.
      where: The keys that lead to the weight.
      variable: The variable.
      weight: The weight. None if a dense layer does not have it as a parameter.
    """

    weight_path: str
    path: str
    name: Names
    where: Names
    variable: SiteVariable
    weight: Any

    def check(self) -> None:
        """Refuse a weight that is missing, or not stacked as its variable is."""
        if self.weight is None:
            raise ValueError(f"{self.weight_path} is missing from 'params'. Pass the parameters of the whole model.")
        site, shape = self.variable, self.variable.origin.shape
        if self.weight.ndim != len(shape + site.stack) or site.unstacked(self.weight.shape)[1] != shape:
            stacked = f"{shape} stacked along {site.stack or 'no axis'}"
            raise ValueError(f"its weight has shape {self.weight.shape}, but 'nm' is for {stacked}. {PASS_NM}")

    @property
    def value(self) -> jax.Array:
        """The weight, as the verbs of a site take it."""
        self.check()
        return first(self.weight, self.variable.axes)

    @property
    def site(self) -> Site:
        """The site of the weight."""
        with named(self.path):
            return self.variable.site

    @property
    def before(self) -> Site:
        """The site of the weight with what its layer pruned before it was hardened."""
        return Site(self.site.origin._replace(sparsity=self.variable.origin.sparsity))

    def back(self, weight: jax.Array) -> jax.Array:
        """Return a weight as it is stored, given one like `value`."""
        return stored(weight, self.variable.axes, len(self.variable.origin.shape))
