"""What a call of a pruner reads beside its array: randomness, time and memory as data, and where the array's axes
lie."""

import dataclasses
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax


class Axes(NamedTuple):
    """The axes of an operand beside the axis that its groups lie along.

    Attributes:
      other: the axis that the transposed use of the operand contracts, such as the out-features of a weight.
      space: the axes of positions: image height and width, or a sequence's tokens.
    """

    other: int | None
    space: tuple[int, ...]


@dataclass(frozen=True)
class Ctx:
    """The context of a call: randomness, time and memory.

    ``key``, ``step`` and ``state`` are data and may be traced. Products set ``axes``, which is static. Products and
    `prune` draw by (key, step, slot); a pruner that is called by itself draws by the key as it is.

    Attributes:
      key: a `jax.random.key`, an int seed, or two uint32 words. Only stochastic pruners need one.
      step: the step of training, which schedules and noise read.
      state: what `init` returned; for a product, a dict from slot to state.
      axes: the other axes of the operand. If None, an array is read as (batch, *space, features).
    """

    key: Any = None
    step: Any = 0
    state: Any = None
    axes: Axes | None = None

    def replace(self, **changes: Any) -> "Ctx":
        """Return this context with some fields changed."""
        return dataclasses.replace(self, **changes)

    def axes_of(self, ndim: int, axis: int) -> Axes:
        """Return the axes beside ``axis`` of an array of ``ndim`` dimensions, by convention if no product has set
        them."""
        if self.axes is not None:
            return self.axes
        others = [a for a in range(ndim) if a != axis]
        return Axes(others[-1] if others else None, tuple(a for a in others if 0 < a < ndim - 1))


jax.tree_util.register_dataclass(Ctx, data_fields=["key", "step", "state"], meta_fields=["axes"])
