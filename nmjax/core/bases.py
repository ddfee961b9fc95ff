"""Bases of pruners: with groups, with a mask, with a state of their own, and made of other pruners."""

from dataclasses import dataclass, fields, replace
from typing import Any

import jax
import jax.numpy as jnp

from nmjax.core.context import Ctx
from nmjax.core.pruner import Facts, Pruner


@dataclass(frozen=True, repr=False)
class Grouped(Pruner):
    """The base of pruners that keep at most n of every m consecutive values.

    Args:
      n: The number of values to keep in each group.
      m: The size of a group.

    Raises:
      TypeError: ``n`` or ``m`` is not an integer.
      ValueError: ``n`` does not lie between 1 and ``m``.

    >>> import nmjax as nm
    >>> nm.mse(2, 4).facts.block, nm.mse(2, 4).facts.pattern, nm.mse(2, 4).kept()
    (4, (2, 4), 0.5)
    """

    n: int
    m: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if 1 <= self.n <= self.m:
            return
        problem = f"{self}: n must lie between 1 and m, because at most n of every m values are kept"
        if 1 <= self.m < self.n:
            raise ValueError(f"{problem}. Did you mean {self.m} of {self.n}, as in ({self.m},{self.n})?")
        raise ValueError(f"{problem}.")

    def describe(self) -> Facts:
        return super().describe()._replace(block=self.m, pattern=(self.n, self.m) if self.n < self.m else None)


@dataclass(frozen=True, repr=False)
class Selector(Pruner):
    """The base of pruners that only keep or drop. A subclass defines `mask`.

    >>> import nmjax as nm
    >>> isinstance(nm.mse(2, 4), nm.Selector), nm.mse(2, 4).facts.selects
    (True, True)
    """

    def __call__(self, x: jax.Array, axis: int = -1, ctx: Ctx = Ctx()) -> jax.Array:
        pruned = self.in_one_pass(x, axis, ctx)
        return jnp.where(self.mask(x, axis, ctx), x, jnp.zeros((), x.dtype)) if pruned is None else pruned

    def describe(self) -> Facts:
        return super().describe()._replace(selects=True)


@dataclass(frozen=True, repr=False)
class Remembering(Pruner):
    """The base of pruners with a state of their own. A subclass defines `init` and `refresh`.

    >>> import nmjax as nm
    >>> isinstance(nm.hold(nm.mse(2, 4), every=10), nm.Remembering)
    True
    """

    def describe(self) -> Facts:
        return super().describe()._replace(needs_state=True, has_state=True)

    def given(self, ctx: Ctx) -> Any:
        """Return the state of a call, or refuse a call without one."""
        if ctx.state is None:
            raise ValueError(
                f"{self} keeps state between steps and was given none: pass as state what its init(x, axis) returns."
            )
        return ctx.state

    def like(self, held: Any, x: jax.Array, what: str) -> jax.Array:
        """Return an array of the state, or refuse one that is not of the shape of ``x``."""
        shape = getattr(held, "shape", None)
        if shape != x.shape:
            raise ValueError(
                f"{self} holds {what} of shape {shape}, but the array has shape {x.shape}. Pass as state what its "
                "init(x, axis) returned for this array."
            )
        return held

    def final_state(self, state: Any) -> Any:
        return state


@dataclass(frozen=True, repr=False)
class ByParts(Pruner):
    """The base of pruners that change with the step only as their parts do. Its phases are those of its parts.

    >>> import nmjax as nm
    >>> nm.ste(nm.stages(((0, nm.mse(3, 4)), (100, nm.mse(2, 4))))).at(100)
    ste(mse(2,4))
    """

    @property
    def phases(self) -> tuple[int, ...]:
        return tuple(sorted({step for p in self.parts for step in p.phases}))

    def at(self, step: int) -> Pruner:
        pruners = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(self, **{name: inner_at(p, step) for name, p in pruners.items() if isinstance(p, Pruner)})


def inner_at(p: Pruner, step: int) -> Pruner:
    """Return ``p.at(step)`` for a part of another pruner; ``p`` itself if only ``p.at(step)`` has a gradient rule.

    Args:
      p: The part.
      step: The step.
    """
    now = p.at(step)
    return p if now.facts.gradient_rule and not p.facts.gradient_rule else now


@dataclass(frozen=True, repr=False)
class SamePattern(Pruner):
    """The base of pruners that wrap one pruner, and keep its patterns and its zeros.

    Args:
      p: The wrapped pruner.
    """

    p: Pruner

    def describe(self) -> Facts:
        p = self.p.facts
        return (
            super().describe()._replace(pattern=p.pattern, pattern_across=p.pattern_across, keeps_zeros=p.keeps_zeros)
        )
