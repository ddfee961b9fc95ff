"""Schedules as values: ``step -> float32 scalar``. They compare, hash, print and parse, where a closure does not.

Any callable of the step works in their place; it compares by identity and does not parse.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nmjax.core.value import Value, show

Schedule = Callable[[Any], Any]
"""``step -> scalar``. The values of this file print and parse; any other callable works too."""


@dataclass(frozen=True, repr=False)
class constant(Value):
    """The same value at every step."""

    value: float

    def __call__(self, step) -> jax.Array:
        return jnp.float32(self.value)


@dataclass(frozen=True, repr=False)
class _Ramp(Value):
    """From ``start`` to ``end`` in ``steps`` steps after ``begin``."""

    start: float
    end: float
    steps: int
    begin: int = 0

    def __post_init__(self):
        super().__post_init__()
        if self.steps < 1:
            raise ValueError(f"{self}: steps must be at least 1.")

    def __call__(self, step) -> jax.Array:
        gone = self._gone(jnp.clip((jnp.asarray(step).astype(jnp.float32) - self.begin) / self.steps, 0, 1))
        return (1 - gone) * self.start + gone * self.end

    def _gone(self, time: jax.Array) -> jax.Array:
        raise NotImplementedError


@dataclass(frozen=True, repr=False)
class linear(_Ramp):
    """From ``start`` to ``end`` in ``steps`` steps after ``begin``, along a line.

    >>> [float(linear(1, 0, 10, begin=5)(s)) for s in (0, 5, 10, 15, 99)]
    [1.0, 1.0, 0.5, 0.0, 0.0]
    """

    def _gone(self, time: jax.Array) -> jax.Array:
        return time


@dataclass(frozen=True, repr=False)
class cosine(_Ramp):
    """From ``start`` to ``end`` in ``steps`` steps after ``begin``, along half a cosine."""

    def _gone(self, time: jax.Array) -> jax.Array:
        return (1 - jnp.cos(jnp.pi * time)) / 2


@dataclass(frozen=True, repr=False)
class exponential(Value):
    """``exp(-rate * (step - begin))``: 1 until ``begin``, and exactly 0 from ``end`` on, which it would never reach.

    >>> [round(float(exponential(1e-3, begin=10, end=2000)(s)), 4) for s in (0, 1010, 1999, 2000)]
    [1.0, 0.3679, 0.1368, 0.0]
    """

    rate: float
    begin: int = 0
    end: int | None = None

    def __call__(self, step) -> jax.Array:
        step = jnp.asarray(step).astype(jnp.float32)
        decayed = jnp.exp(-self.rate * jnp.maximum(step - self.begin, 0))
        return decayed if self.end is None else jnp.where(step < self.end, decayed, 0)


@dataclass(frozen=True, repr=False)
class stairs(Value):
    """Piecewise constant: rows (first step, value), the first of them at step 0.

    >>> [float(stairs(((0, 1), (10, 0.5)))(s)) for s in (0, 9, 10)]
    [1.0, 1.0, 0.5]
    """

    rows: tuple[tuple[int, float], ...]

    def __post_init__(self):
        super().__post_init__()
        check_rows(self, self.rows)
        object.__setattr__(self, "rows", tuple((start, constant(value).value) for start, value in self.rows))

    def __call__(self, step) -> jax.Array:
        return jnp.array([value for _, value in self.rows], jnp.float32)[row_at(self.rows, step)]


@dataclass(frozen=True, repr=False, init=False)
class optax_schedule(Value):
    """One of optax's schedules, by name, as a value.

    >>> optax_schedule("cosine_decay_schedule", 1.0, 1000)
    optax_schedule('cosine_decay_schedule',1.0,1000)
    """

    name: str
    args: tuple
    kwargs: tuple[tuple[str, Any], ...]

    def __init__(self, name: str, *args, **kwargs):
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "args", args)
        object.__setattr__(self, "kwargs", tuple(kwargs.items()))
        super().__post_init__()
        for value in (*args, *kwargs.values()):
            if not isinstance(value, (int, float, str, tuple, list, type(None), np.generic)):
                raise TypeError(
                    f"{self.name}: {value!r} is no number, text or tuple. For pieces, stairs(((0,1.0),(9,0.5)))."
                )
        self._made()

    def __repr__(self) -> str:
        shown = [repr(self.name), *map(show, self.args), *(f"{k}={show(v)}" for k, v in self.kwargs)]
        return f"optax_schedule({','.join(shown)})"

    def _made(self):
        import optax  # here, for it takes longer to import than all of nmjax

        make = getattr(optax.schedules, self.name, None)
        if make is None or not self.name.endswith("schedule"):
            known = ", ".join(n for n in dir(optax.schedules) if n.endswith("_schedule") and not n.startswith("_"))
            raise ValueError(f"optax has no schedule {self.name!r}; it has {known}.")
        try:
            return make(*self.args, **dict(self.kwargs))
        except TypeError as error:
            raise TypeError(f"{self}: {error}") from None

    def __call__(self, step) -> jax.Array:
        # a float step, for optax multiplies it with floats, which strict promotion would refuse an integer
        return jnp.asarray(self._made()(jnp.asarray(step).astype(jnp.float32))).astype(jnp.float32)


def row_at(rows, step) -> jax.Array:
    """Which of the rows (first step, ...) holds at a step."""
    starts = jnp.array([start for start, _ in rows[1:]], jnp.int32)
    return jnp.sum(jnp.asarray(step).astype(jnp.int32) >= starts, dtype=jnp.int32)


def check_rows(owner, rows) -> None:
    """Rows (first step, value): the first at 0, then rising."""
    if not isinstance(rows, tuple) or not rows or not all(isinstance(r, tuple) and len(r) == 2 for r in rows):
        raise ValueError(f"{type(owner).__name__} takes rows ((0, first), (1000, next), ...), got {show(rows)}.")
    starts = [start for start, _ in rows]
    if (
        starts[0] != 0
        or any(type(s) is not int for s in starts)
        or any(a >= b for a, b in zip(starts, starts[1:], strict=False))
    ):
        raise ValueError(
            f"{type(owner).__name__}: rows must start at step 0 and rise in whole steps, got starts {starts}."
        )
