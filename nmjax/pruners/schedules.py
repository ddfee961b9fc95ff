"""Schedules: values that map a step to a float32 scalar. They compare, hash, print and parse; closures do not.

Any function of the step works in their place. It compares by identity and does not parse.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh
from jaxtyping import Array, Float32, Int, Num

from nmjax.core.value import Value, show

Step = int | float | Num[Array, ""]
"""A training step, which may be traced."""

Schedule = Callable[[Any], Any]
"""A function from a step to a scalar."""


LAST_STEP = 2**31 - 1
"""The last step that there is: steps are int32."""

_BELOW_ONE = np.nextafter(np.float32(1), np.float32(0))

Moves = tuple[int, int | None]
"""(first, last): a schedule is constant before step first, and from step last on. last is None if it never ends."""


@dataclass(frozen=True, repr=False)
class constant(Value):
    """Return the same value at every step.

    Args:
      value: The value.

    >>> float(constant(0.5)(100))
    0.5
    """

    value: float

    @property
    def moves(self) -> Moves:
        return 0, 0

    def __call__(self, step: Step) -> Float32[Array, ""]:
        return jnp.float32(self.value)


@dataclass(frozen=True, repr=False)
class _Ramp(Value):
    """The base of schedules that go from ``start`` to ``end`` in ``steps`` steps after ``begin``."""

    start: float
    end: float
    steps: int
    begin: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps < 1:
            raise ValueError(f"{self}: steps must be at least 1, got {self.steps}.")

    @property
    def moves(self) -> Moves:
        return self.begin + 1, self.begin + self.steps

    def __call__(self, step: Step) -> Float32[Array, ""]:
        time = jnp.clip(_since(self.begin, step) / self.steps, 0, 1)
        before = _since(self.begin + self.steps, step) < 0  # then it has not ended, though the division may round to 1
        share = self._share(time)
        share = jnp.where(before, jnp.minimum(share, _BELOW_ONE), share)
        return (1 - share) * self.start + share * self.end

    def _share(self, time: Float32[Array, ""]) -> Float32[Array, ""]:
        """Return the share of the way from start to end at a time between 0 and 1."""
        raise NotImplementedError


@dataclass(frozen=True, repr=False)
class linear(_Ramp):
    """Go from ``start`` to ``end`` along a line.

    Args:
      start: The value until step ``begin``.
      end: The value from step ``begin + steps`` on.
      steps: The number of steps in between, at least 1.
      begin: The step at which the value begins to change.

    Raises:
      ValueError: ``steps`` is below 1.

    >>> [float(linear(1, 0, 10, begin=5)(s)) for s in (0, 5, 10, 15, 99)]
    [1.0, 1.0, 0.5, 0.0, 0.0]
    """

    def _share(self, time: Float32[Array, ""]) -> Float32[Array, ""]:
        return time


@dataclass(frozen=True, repr=False)
class cosine(_Ramp):
    """Go from ``start`` to ``end`` along half a cosine.

    Args:
      start: The value until step ``begin``.
      end: The value from step ``begin + steps`` on.
      steps: The number of steps in between, at least 1.
      begin: The step at which the value begins to change.

    Raises:
      ValueError: ``steps`` is below 1.

    >>> [round(float(cosine(1, 0, 10)(s)), 3) for s in (0, 2, 5, 10, 99)]
    [1.0, 0.905, 0.5, 0.0, 0.0]
    """

    def _share(self, time: Float32[Array, ""]) -> Float32[Array, ""]:
        return (1 - jnp.cos(jnp.pi * time)) / 2


@dataclass(frozen=True, repr=False)
class exponential(Value):
    """Decay exponentially: ``exp(-rate * (step - begin))``.

    Args:
      rate: The rate of decay per step.
      begin: The step until which the value is 1.
      end: The step from which the value is exactly 0. If None, it never is.

    >>> [round(float(exponential(1e-3, begin=10, end=2000)(s)), 4) for s in (0, 1010, 1999, 2000)]
    [1.0, 0.3679, 0.1368, 0.0]
    """

    rate: float
    begin: int = 0
    end: int | None = None

    @property
    def moves(self) -> Moves:
        return self.begin + 1, self.end

    def __call__(self, step: Step) -> Float32[Array, ""]:
        decayed = jnp.exp(-self.rate * jnp.maximum(_since(self.begin, step), 0))
        return decayed if self.end is None else jnp.where(_since(self.end, step) < 0, decayed, 0)


@dataclass(frozen=True, repr=False)
class stairs(Value):
    """Return piecewise constant values: at step t, that of the last row whose first step is at most t.

    Args:
      rows: Pairs (first step, value). The first pair begins at step 0, and first steps rise.

    Raises:
      ValueError: A row is not a pair, the first step is not 0, or steps do not increase.

    >>> [float(stairs(((0, 1), (10, 0.5)))(s)) for s in (0, 9, 10)]
    [1.0, 1.0, 0.5]
    """

    rows: tuple[tuple[int, float], ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        check_rows(self, self.rows)
        object.__setattr__(self, "rows", tuple((start, constant(value).value) for start, value in self.rows))

    @property
    def moves(self) -> Moves:
        return self.rows[min(1, len(self.rows) - 1)][0], self.rows[-1][0]

    def __call__(self, step: Step) -> Float32[Array, ""]:
        return jnp.array([value for _, value in self.rows], jnp.float32)[row_at(self.rows, step)]


@dataclass(frozen=True, repr=False, init=False)
class optax_schedule(Value):
    """Use one of optax's schedules, by its name, as a value that prints and parses.

    Args:
      name: The name of a function in `optax.schedules` that ends with "schedule".
      *args: Its arguments: numbers, texts or tuples.
      **kwargs: Its keyword arguments.

    Raises:
      TypeError: An argument is of another kind, or optax refuses the arguments.
      ValueError: Optax has no schedule of this name.

    >>> optax_schedule("cosine_decay_schedule", 1.0, 1000)
    optax_schedule('cosine_decay_schedule',1.0,1000)
    """

    name: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]

    def __init__(self, name: str, *args: Any, **kwargs: Any) -> None:
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "args", args)
        object.__setattr__(self, "kwargs", tuple(sorted(kwargs.items())))
        super().__post_init__()
        for value in (*args, *kwargs.values()):
            if not isinstance(value, (int, float, str, tuple, list, type(None), np.generic)):
                raise TypeError(
                    f"{self.name}: {value!r} is not a number, a text or a tuple. For piecewise constant values write "
                    "stairs(((0,1.0),(9,0.5)))."
                )
        self._schedule()  # refuses bad arguments now, not at the first step

    def __repr__(self) -> str:
        shown = [repr(self.name), *map(show, self.args), *(f"{k}={show(v)}" for k, v in self.kwargs)]
        return f"optax_schedule({','.join(shown)})"

    def _schedule(self) -> Callable[[Any], Any]:
        import optax  # here, because it takes longer to import than all of nmjax

        make = getattr(optax.schedules, self.name, None)
        if make is None or not self.name.endswith("schedule"):
            known = ", ".join(n for n in dir(optax.schedules) if n.endswith("_schedule") and not n.startswith("_"))
            raise ValueError(f"optax has no schedule {self.name!r}. It has {known}.")
        try:
            return make(*self.args, **dict(self.kwargs))
        except TypeError as error:
            raise TypeError(f"{self}: {error}") from None

    def __call__(self, step: Step) -> Float32[Array, ""]:
        # optax multiplies the step with floats, which strict dtype promotion allows for a float step only
        return jnp.asarray(self._schedule()(jnp.asarray(step).astype(jnp.float32))).astype(jnp.float32)


def value_at(schedule: Schedule, step: int) -> float:
    """Return a schedule's value at a step, computed on this machine, whatever devices a program is traced for."""
    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())), jax.ensure_compile_time_eval():
        return float(schedule(step))


def _since(begin: int, step: Step) -> Float32[Array, ""]:
    """Return ``step - begin``. An integer step is subtracted as an integer: float32 counts to 2**24 only."""
    step = jnp.asarray(step)
    if jnp.issubdtype(step.dtype, jnp.integer):
        return (step.astype(jnp.int32) - np.int32(min(begin, LAST_STEP))).astype(jnp.float32)
    return step.astype(jnp.float32) - begin


def row_at(rows: tuple[tuple[int, Any], ...], step: Step) -> Int[Array, ""]:
    """Return the number of the row (first step, ...) that applies at a step."""
    starts = jnp.array([start for start, _ in rows[1:]], jnp.int32)
    return jnp.sum(jnp.asarray(step).astype(jnp.int32) >= starts, dtype=jnp.int32)


def check_rows(owner: Value, rows: Any) -> None:
    """Refuse rows that are not pairs (first step, value) with first steps that begin at 0 and rise."""
    if not isinstance(rows, tuple) or not rows or not all(isinstance(r, tuple) and len(r) == 2 for r in rows):
        raise ValueError(f"{type(owner).__name__} takes rows ((0, first), (1000, next), ...), got {show(rows)}.")
    starts = [start for start, _ in rows]
    whole = all(type(start) is int for start in starts)
    if not whole or starts[0] != 0 or any(a >= b for a, b in itertools.pairwise(starts)):
        raise ValueError(
            f"{type(owner).__name__}: rows must start at step 0 and rise in whole steps, got first steps {starts}."
        )
