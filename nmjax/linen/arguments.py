"""Values for the arguments that Flax's layers have for their product: `dot_cls` and `conv_cls`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from flax import linen as nn

from nmjax.core.value import Value
from nmjax.linen.variables import SiteVariable, WeightOrigin, named, site_of
from nmjax.products import operations, rule
from nmjax.products.fit import fitting
from nmjax.products.operations import Operation
from nmjax.products.sparsity import Sparsity
from nmjax.programs.parameters import Step
from nmjax.programs.sites import context
from nmjax.recipes.table import Recipe


@dataclass(frozen=True, repr=False)
class dot_cls(Value):
    """A value for ``dot_general_cls``: each layer that has it prunes as a recipe says for the layer's path.

    Args:
      recipe: The sparsity of each layer, by its path.
      seed: The seed of all noise, an int.

    Raises:
      TypeError: ``recipe`` is no Recipe.

    >>> import jax.numpy as jnp
    >>> from flax import linen as nn
    >>> import nmjax as nm
    >>> layer = nn.Dense(8, dot_general_cls=nm.linen.dot_cls(nm.Recipe(((".*", "ste(2,4)"),)), seed=1))
    >>> variables = layer.init(jax.random.key(0), jnp.ones((4, 16)))
    >>> sorted(variables), layer.apply(variables, jnp.ones((4, 16))).shape
    (['nm', 'params'], (4, 8))
    """

    recipe: Recipe
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.recipe, Recipe):
            raise TypeError(f"expected a Recipe, such as Recipe(((r'.*', 's_ste(2,4)'),)), got {self.recipe!r}.")

    def __call__(self) -> nn.Module:
        """Return the module of a pruned dot product. Flax calls it."""
        return Product(self.recipe, self.seed, operations.as_dot)


@dataclass(frozen=True, repr=False)
class conv_cls(dot_cls):
    """A value for ``conv_general_dilated_cls`` of Conv. The arguments are those of `dot_cls`.

    >>> import jax.numpy as jnp
    >>> from flax import linen as nn
    >>> import nmjax as nm
    >>> recipe = nm.Recipe(((".*", "ste(2,4)"),))
    >>> layer = nn.Conv(8, (3, 3), conv_general_dilated_cls=nm.linen.conv_cls(recipe))
    >>> layer.init_with_output(jax.random.key(0), jnp.ones((1, 6, 6, 4)))[0].shape
    (1, 6, 6, 8)
    """

    def __call__(self) -> nn.Module:
        """Return the module of a pruned convolution. Flax calls it."""
        return Product(self.recipe, self.seed, operations.as_conv)


class Product(nn.Module):
    """The pruned product of a layer, as a module of the layer."""

    recipe: Recipe
    seed: int
    as_op: Callable[..., Operation]  # makes an operation from the arguments of a call

    @nn.compact
    def __call__(self, lhs: jax.Array, rhs: jax.Array, *args: Any, **options: Any) -> jax.Array:
        """Return the pruned product of the operands."""
        op = self.as_op(lhs, rhs, *args, **options)
        path, operand = "/".join(self.path[:-1]), op.operands(lhs.ndim, rhs.ndim)["fwd_rhs"]
        with named(path):
            steps = (Step("dtype", rhs.dtype),)
            origin = WeightOrigin(path, self.recipe(path), self.seed, operand, rhs.shape, steps)
            site = self._site(origin, rhs, fitting(op, lhs, rhs, origin.sparsity, tokens_known=False)[0])
            ctx = context(*site.of_one_layer.arrays)
        return rule.bilinear(op, lhs, rhs, site.sparsity, ctx, self.recipe.backend, name=path or "the layer")

    def _site(self, origin: WeightOrigin, rhs: jax.Array, fitted: Sparsity) -> SiteVariable:
        assert self.scope is not None
        if self.is_initializing() and not self.has_variable("nm", "site") and self.is_mutable_collection("nm"):
            self._check(origin)
        return site_of(self.scope, origin, rhs, self.recipe, fitted)

    def _check(self, origin: WeightOrigin) -> None:
        """Refuse a layer whose weight could not be found again."""
        sparsity, layer = origin.sparsity, self.parent
        plain = isinstance(layer, nn.Module) and layer.has_variable("params", "kernel") and self.name == origin.name
        if sparsity != Sparsity() and (not plain or getattr(layer, "mask", None) is not None):
            raise ValueError(
                f"set_step and harden read the parameter 'kernel' for {sparsity}. The layer must have this parameter, "
                f"and use it unchanged, without a mask of its own, in one product, Product_0; this one is {self.name}. "
                f'Give each weight a layer such as nn.Dense, or leave this layer dense: (r"{origin.path}", "dense").'
            )
