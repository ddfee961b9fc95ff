"""The identity: the pruner of an empty slot and of a dense phase."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from nmjax.core.context import Ctx
from nmjax.core.pruner import Facts, Pruner


@dataclass(frozen=True, repr=False)
class Identity(Pruner):
    """Return the array unchanged. Its only value is `nmjax.identity`.

    >>> identity(jnp.array([1., -2., 3., -4.]))
    Array([ 1., -2.,  3., -4.], dtype=float32)
    """

    reads_step = False

    def __call__(self, x: jax.Array, axis: int = -1, ctx: Ctx = Ctx()) -> jax.Array:
        return x

    def mask(self, x: jax.Array, axis: int = -1, ctx: Ctx = Ctx()) -> jax.Array:
        return jnp.ones_like(x, bool)

    def describe(self) -> Facts:
        return super().describe()._replace(selects=True)

    def __repr__(self) -> str:
        return "identity"


identity = Identity()
