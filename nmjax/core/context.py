"""The context of a call of a pruner: randomness, time and memory, and which axes of the array mean what."""

import dataclasses
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

from nmjax.core import random


class Axes(NamedTuple):
    """The axes of an operand beside the axis that its groups lie along.

    Args:
      other: The axis that the transposed use of the operand contracts, such as the out-features of a weight. None if
        there is none.
      space: The axes of positions: height and width of an image, or the tokens of a sequence.
      apart: The axes along which rows differ, beside the axis of groups: those of a batch, and outer axes of a
        contraction over several axes.
      others: All axes that the transposed use contracts. ``other`` is the last of them.
    """

    other: int | None
    space: tuple[int, ...]
    apart: tuple[int, ...] = ()
    others: tuple[int, ...] = ()


@dataclass(frozen=True)
class Ctx:
    """The context of a call: everything a pruner reads beside its array.

    All but ``axes`` and ``kernels`` are data and may be traced. These two are static, and products set them.
    Products and `nmjax.prune` derive the noise from key, step and slot. A pruner that is called directly uses the key
    as it is.

    Args:
      key: A `jax.random.key`, an int seed, or two uint32 words. Needed only for calls that draw random numbers.
      step: The training step, which schedules and noise read.
      state: The state that ``init`` or ``refresh`` returned; for a product, a dict from slot to state.
      axes: The other axes of the operand. If None, an array is read as ``(batch, *space, features)``.
      since: The step of the earlier ``refresh`` that returned the state. If None, it is the step before.
      partner: The norms of the rows of the product's other operand, of a shape that is broadcast with the array.
        Products set it for a pruner with ``reads_partner``.
      gradient: The gradient of the array, of its shape, for a `refresh` with ``reads_gradient``. None if there is none.
      kernels: The device whose kernels prune, such as `nmjax.kernels.tpu.Pruning`. None if XLA prunes. It is static,
        and products set it.

    >>> import nmjax as nm
    >>> nm.mvue(2, 4)(jnp.ones(4), ctx=nm.Ctx(key=0))
    Array([2., 0., 2., 0.], dtype=float32)
    """

    key: Any = None
    step: Any = 0
    state: Any = None
    axes: Axes | None = None
    since: Any = None
    partner: jax.Array | None = None
    gradient: jax.Array | None = None
    kernels: Any = None

    def replace(self, **changes: Any) -> "Ctx":
        """Return this context with some fields changed.

        >>> Ctx(key=0).replace(step=5)
        Ctx(key=0, step=5, state=None, axes=None, since=None, partner=None, gradient=None, kernels=None)
        """
        return dataclasses.replace(self, **changes)

    def traceable(self) -> "Ctx":
        """Return this context with an int seed as two words, so that it can be an argument of a JAX transformation.

        >>> Ctx(key=3).traceable().key.tolist()
        [0, 3]
        """
        is_seed = isinstance(self.key, (int, np.integer))
        return self.replace(key=random.words(self.key)) if is_seed else self

    def axes_of(self, ndim: int, axis: int) -> Axes:
        """Return the axes beside the pruned one. If no product has set them, they follow the convention of ``axes``.

        Args:
          ndim: The number of dimensions of the array.
          axis: The pruned axis, not negative.

        Returns:
          The axes that were set, or those of an array ``(batch, *space, features)``.

        >>> Ctx().axes_of(4, 3)
        Axes(other=2, space=(1, 2), apart=(), others=(0, 1, 2))
        """
        if self.axes is not None:
            return self.axes
        others = tuple(a for a in range(ndim) if a != axis)
        return Axes(others[-1] if others else None, tuple(a for a in others if 0 < a < ndim - 1), others=others)


jax.tree_util.register_dataclass(
    Ctx, data_fields=["key", "step", "state", "since", "partner", "gradient"], meta_fields=["axes", "kernels"]
)
