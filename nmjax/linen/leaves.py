"""The weights and the variables of layers, as leaves of a model's variables."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
from flax.core import meta

from nmjax.core.pruner import Pruner
from nmjax.linen.variables import PASS_NM, SiteVariable, named
from nmjax.products import sites
from nmjax.products.sparsity import Sparsity
from nmjax.pruners import identity

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
      site: The variable.
      weight: The weight. None if a dense layer does not have it as a parameter.
    """

    weight_path: str
    path: str
    name: Names
    where: Names
    site: SiteVariable
    weight: Any

    def check(self) -> None:
        """Refuse a weight that is missing, or not stacked as its variable is."""
        if self.weight is None:
            raise ValueError(f"{self.weight_path} is missing from 'params'. Pass the parameters of the whole model.")
        site, shape = self.site, self.site.origin.shape
        if self.weight.ndim != len(shape + site.stack) or site.unstacked(self.weight.shape)[1] != shape:
            stacked = f"{shape} stacked along {site.stack or 'no axis'}"
            raise ValueError(f"its weight has shape {self.weight.shape}, but 'nm' is for {stacked}. {PASS_NM}")

    def over(self, f: Callable[..., Any], out: int | None = None) -> Any:
        """Return what ``f(site, weight)`` gives for each layer.

        Args:
          f: A function of the variable and the weight of one layer.
          out: The axis of the results that stacks layers; if None, that which stacks the weights.
        """
        for axis in reversed(self.site.stack):
            f = jax.vmap(f, axis, axis if out is None else out)
        return f(self.site, self.weight)

    @property
    def final(self) -> tuple[Pruner, Sparsity]:
        """The pruner that hardens the weight, and the sparsity after that.

        Raises:
          ValueError: The weight has no single final form.
        """
        origin = self.site.origin
        with named(self.path):
            final = sites.final(origin.sparsity)
            if final[0] != identity and origin.elsewhere:
                raise ValueError(
                    f"fwd_rhs={origin.sparsity.fwd_rhs} prunes {origin.weight} of shape {origin.shape}, which has no "
                    f"single final form, because it also goes into {', '.join(origin.elsewhere)}. "
                    f'Leave the layer dense: (r"{origin.path}", "dense").'
                )
            return final
