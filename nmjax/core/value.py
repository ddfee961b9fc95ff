"""Frozen values: plain Python fields, printed as text that parses back to them."""

import copy
import functools
import math
import numbers
import operator
import typing
from dataclasses import MISSING, dataclass, fields
from typing import Any

import jax
import numpy as np

_PLAIN = {"bool": bool, "int": int, "float": float, "int | None": int | None}


@dataclass(frozen=True, repr=False)
class Value:
    """A frozen record of plain Python values. It prints as text that parses back to it."""

    def __post_init__(self) -> None:
        kinds = _kinds(type(self))
        for f in fields(self):
            object.__setattr__(self, f.name, _plain(self, f.name, kinds[f.name], getattr(self, f.name)))

    def __repr__(self) -> str:
        text = written(self)
        if text is not None:
            return text
        shown = []
        for f in fields(self):
            value = getattr(self, f.name)
            if f.default is MISSING:
                shown.append(show(value))
            elif value != f.default:
                shown.append(f"{f.name}={show(value)}")
        return f"{type(self).__name__}({','.join(shown)})"


def show(value: Any) -> str:
    """Return the text of a field, in Python's own grammar and without spaces.

    >>> show((1, "a"))
    "(1,'a')"
    """
    if isinstance(value, tuple):
        return f"({','.join(map(show, value))}{',' if len(value) == 1 else ''})"
    if callable(value) and not isinstance(value, Value):
        return written(value) or f"<callable {getattr(value, '__name__', type(value).__name__)}>"
    return repr(value)


def told(value: Any) -> str:
    """Return what a value is that was given in the place of another, for errors.

    >>> import nmjax as nm
    >>> told(nm.mse)
    'mse itself: call it first, as in mse(2,4)'
    >>> told(nm.methods.ste(2, 4))
    'y_w=ste(mse(2,4)): pass the pruner of one of its slots, such as sparsity.y_w'
    """
    if isinstance(value, str):
        return f"str: parse it first, nm.parse({value!r}) or nm.parse_pruner({value!r})"
    name = getattr(value, "__name__", None)
    if name is not None and callable(value):
        return f"{name} itself: call it first, as in {name}(2,4)"
    if isinstance(value, Value):
        slot = ": pass the pruner of one of its slots, such as sparsity.y_w" if hasattr(value, "y_w") else ""
        return f"{value!r}{slot}"
    return repr(value) if isinstance(value, (int, float, type(None))) else type(value).__name__


def written(value: Any) -> str | None:
    """Return the text that a value of another module was parsed from, or None if it was made in Python."""
    return getattr(value, "_written", None)


def as_written(value: Any, text: str) -> Any:
    """Return a copy of a value that remembers the text it was parsed from, and prints as that text.

    The text is not part of the value: equality and hashes ignore it. Copying and pickling keep it.
    `dataclasses.replace` drops it, because the new value has other fields.

    Args:
      value: A value of another module.
      text: The text.

    Returns:
      An equal value.
    """
    value = copy.copy(value)
    object.__setattr__(value, "_written", text)
    return value


@functools.cache
def _kinds(cls: type) -> dict[str, Any]:
    """Return the types of the fields, also if the annotations of the class are strings."""
    try:
        return typing.get_type_hints(cls)
    except Exception:  # an annotation may use a name that exists only for a type checker
        return {f.name: _PLAIN.get(f.type, f.type) if isinstance(f.type, str) else f.type for f in fields(cls)}


def _plain(owner: Value, name: str, kind: Any, value: Any) -> Any:
    """Return a field as plain Python. Refuse arrays, because a value must hash and must not depend on a trace."""
    field = f"{type(owner).__name__}: {name}"
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, (jax.Array, np.ndarray)):
        raise TypeError(
            f"{field} must be a plain Python value, got an array of shape {value.shape}. "
            "If it changes from step to step, pass it through Ctx(key, step, state) or write a schedule."
        )
    if isinstance(value, (list, tuple)):
        return tuple(_plain(owner, name, None, v) for v in value)
    if kind == int | None and value is None:
        return None
    if kind is bool and not isinstance(value, bool):
        raise TypeError(f"{field} must be True or False, got {value!r}.")
    if kind in (int, int | None):
        number = isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)
        if not number or value != math.floor(value):
            raise TypeError(f"{field} must be a whole number, got {value!r}.")
        return operator.index(math.floor(value))
    if kind is float:
        if not isinstance(value, numbers.Real) or isinstance(value, bool) or math.isnan(value):
            raise TypeError(f"{field} must be a number, got {value!r}.")
        return float(value)
    return value
