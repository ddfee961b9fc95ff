"""The arguments of a model's call: arrays, and the rest."""

from collections.abc import Hashable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np


class Call(NamedTuple):
    """The arguments of a call.

    Attributes:
      args: The positional ones.
      options: The keyword arguments.
    """

    args: tuple[Any, ...]
    options: dict[str, Any]

    @classmethod
    def of(cls, batch: Any) -> "Call":
        """Return the call that a batch asks for: a tuple of arguments, a dict of keyword arguments, or one array.

        >>> Call.of({"x": 1}), Call.of((1, 2))
        (Call(args=(), options={'x': 1}), Call(args=(1, 2), options={}))
        """
        if isinstance(batch, cls):
            return batch
        if isinstance(batch, Mapping):
            return cls((), dict(batch))
        return cls(batch if isinstance(batch, tuple) else (batch,), {})

    @property
    def kind(self) -> Hashable:
        """The call without the values of its arrays."""
        arrays, rest = self.split()
        return rest, tuple((v.shape, str(v.dtype)) for v in arrays)

    def split(self) -> tuple[list[Any], "Rest"]:
        """Return the arrays, and the rest, which is static for `jax.jit`."""
        leaves, tree = jax.tree.flatten((self.args, self.options))
        for v in leaves:
            if not is_array(v) and not isinstance(v, Hashable):
                raise ValueError(f"an argument of the call is neither an array nor hashable: {v!r}.")
        return [v for v in leaves if is_array(v)], Rest(tuple(None if is_array(v) else (v,) for v in leaves), tree)


class Rest(NamedTuple):
    """The rest of a call, without its arrays.

    Attributes:
      leaves: For each leaf of the arguments, None for an array, or a tuple of the value.
      tree: The structure of the arguments.
    """

    leaves: tuple[Any, ...]
    tree: Any

    def call(self, arrays: Iterable[Any]) -> Call:
        """Return the call with these arrays."""
        values = iter(arrays)
        return Call(*jax.tree.unflatten(self.tree, [next(values) if v is None else v[0] for v in self.leaves]))


def is_array(v: Any) -> bool:
    """Return True for an array, a number of NumPy, or the shape of an array."""
    return isinstance(v, (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct))
