"""Nothing: the empty slot, the dense phase, the neutral element of `chain`."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from nmjax.core.context import Ctx
from nmjax.core.pruner import Pruner


@dataclass(frozen=True, repr=False)
class Identity(Pruner):
    """Every value as it is."""

    reads_step = False

    def __call__(self, x: jax.Array, axis: int = -1, ctx: Ctx = Ctx()) -> jax.Array:
        return x

    def mask(self, x: jax.Array, axis: int = -1, ctx: Ctx = Ctx()) -> jax.Array:
        return jnp.ones_like(x, bool)

    @property
    def selects(self) -> bool:
        return True

    def __repr__(self) -> str:
        return "identity"


identity = Identity()
