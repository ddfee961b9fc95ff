"""Frozen values: plain Python fields, printed as the text that parses back to them."""

import math
import numbers
import operator
from dataclasses import MISSING, dataclass, fields

import jax
import numpy as np


@dataclass(frozen=True, repr=False)
class Value:
    """A frozen record of plain Python values that prints as the text which parses back to it."""

    def __post_init__(self):
        for f in fields(self):
            object.__setattr__(self, f.name, _plain(self, f.name, f.type, getattr(self, f.name)))

    def __repr__(self) -> str:
        shown = []
        for f in fields(self):
            value = getattr(self, f.name)
            if f.default is MISSING:
                shown.append(show(value))
            elif value != f.default:
                shown.append(f"{f.name}={show(value)}")
        return f"{type(self).__name__}({','.join(shown)})"


def show(value) -> str:
    """Text of a field: Python's own grammar, without spaces."""
    if isinstance(value, tuple):
        return f"({','.join(map(show, value))}{',' if len(value) == 1 else ''})"
    if callable(value) and not isinstance(value, Value):
        return f"<callable {getattr(value, '__name__', type(value).__name__)}>"
    return repr(value)


def _plain(owner, name, kind, value):
    """Numbers as Python's own, lists as tuples; arrays refused, for a value must hash and outlive a trace."""
    where = f"{type(owner).__name__}: {name}"
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, (jax.Array, np.ndarray)):
        raise TypeError(
            f"{where} must be a plain Python value, got an array of shape {value.shape}. "
            "What changes from step to step goes in through Ctx(key, step, state), or through a schedule of the step."
        )
    if isinstance(value, (list, tuple)):
        return tuple(_plain(owner, name, None, v) for v in value)
    if kind == int | None and value is None:
        return None
    if kind is bool and not isinstance(value, bool):
        raise TypeError(f"{where} must be True or False, got {value!r}.")
    if kind in (int, int | None):
        number = isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)
        if not number or value != math.floor(value):
            raise TypeError(f"{where} must be a whole number, got {value!r}.")
        return operator.index(int(value))
    if kind is float:
        if not isinstance(value, numbers.Real) or isinstance(value, bool) or math.isnan(value):
            raise TypeError(f"{where} must be a number, got {value!r}.")
        return float(value)
    return value
