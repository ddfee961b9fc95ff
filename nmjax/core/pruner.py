"""The pruner: ``p(x, axis, ctx) -> array`` of the same shape and dtype, pruned in groups of m consecutive values along ``axis``.

What is fixed (n, m, a schedule) is a field of the value; what changes (key, step, state) comes in through `Ctx`. Values
compare, hash and print, and `nmjax.parse_pruner` reads back what they print.
"""

import math
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import jax

from nmjax.core.context import Ctx
from nmjax.core.value import Value


@dataclass(frozen=True, repr=False)
class Pruner(Value):
    """Base of all pruners. Combinators inherit their parts' needs; leaves override what they have."""

    outermost: ClassVar[bool] = False  # whether it makes sense as a whole slot only

    def __call__(self, x: jax.Array, axis: int = -1, ctx: Ctx = Ctx()) -> jax.Array:
        raise NotImplementedError

    @property
    def parts(self) -> tuple["Pruner", ...]:
        """The pruners inside this one."""
        return tuple(v for f in fields(self) if isinstance(v := getattr(self, f.name), Pruner))

    @property
    def block(self) -> int:
        """What the pruned axis must divide by."""
        return math.lcm(*(p.block for p in self.parts))

    @property
    def stochastic(self) -> bool:
        """Whether a call draws random numbers and so needs a key."""
        return any(p.stochastic for p in self.parts)

    @property
    def stateful(self) -> bool:
        """Whether a call cannot do without state (`soft` can: its scale is then 1)."""
        return any(p.stateful for p in self.parts)

    @property
    def remembers(self) -> bool:
        """Whether `init` makes a state."""
        return any(p.remembers for p in self.parts)

    @property
    def timed(self) -> bool:
        """Whether a call reads the step: to draw, or for a schedule; of a class from elsewhere, it may."""
        schedules = any(callable(v) and not isinstance(v, Pruner) for f in fields(self) if (v := getattr(self, f.name)))
        foreign = not type(self).__module__.startswith("nmjax.")
        return schedules or foreign or self.stochastic or any(p.timed for p in self.parts)

    @property
    def pattern(self) -> tuple[int, int] | None:
        """(n, m) of what a call gives, whatever the step: the sparsest of its parts'; None where nothing is promised."""
        return min((q for p in self.parts if (q := p.pattern)), key=lambda q: q[0] / q[1], default=None)

    @property
    def ruled(self) -> bool:
        """Whether it brings a gradient rule, which only a forward slot can use."""
        return any(p.ruled for p in self.parts)

    @property
    def selects(self) -> bool:
        """Whether a call only keeps or drops: ``p(x) == where(p.mask(x), x, 0)``."""
        return False

    def mask(self, x: jax.Array, axis: int = -1, ctx: Ctx = Ctx()) -> jax.Array:
        """Which entries are kept."""
        if len(self.parts) == 1:
            return self.parts[0].mask(x, axis, ctx)
        raise TypeError(f"{self} has no mask: it does not select entries by a rule of their own.")

    @property
    def final(self) -> "Pruner":
        """The form that inference uses: without time, noise or gradient rule."""
        if self.stochastic:
            raise ValueError(f"{self} draws anew at every step, so it has no final form for inference to use.")
        return self

    def final_state(self, state):
        """The state that `final` reads, out of this pruner's state."""
        return joined(
            p.final_state(part.state) for p, part in zip(self.parts, apart(self, Ctx(state=state)), strict=True)
        )

    def init(self, x: jax.Array, axis: int = -1, ctx: Ctx = Ctx()) -> Any:
        """The first state; None where there is nothing to remember."""
        return joined(p.init(x, axis, ctx) for p in self.parts)

    def refresh(self, x: jax.Array, axis: int = -1, ctx: Ctx = Ctx()) -> Any:
        """The state of ``ctx.step``, out of ``ctx.state``, that of an earlier step."""
        return joined(p.refresh(x, axis, part) for p, part in zip(self.parts, apart(self, ctx), strict=True))


@dataclass(frozen=True, repr=False)
class Grouped(Pruner):
    """A pruner that keeps at most n of every m consecutive values."""

    n: int
    m: int

    def __post_init__(self):
        super().__post_init__()
        if not 1 <= self.n <= self.m:
            raise ValueError(
                f"{self}: n must lie between 1 and m, for at most n of every m values are kept"
                + (f"; write {type(self).__name__}({self.m},{self.n})?" if 1 <= self.m < self.n else ".")
            )

    @property
    def block(self) -> int:
        return self.m

    @property
    def pattern(self) -> tuple[int, int] | None:
        return (self.n, self.m) if self.n < self.m else None


@dataclass(frozen=True, repr=False)
class Remembering(Pruner):
    """A pruner with a state of its own, beside its parts'."""

    @property
    def stateful(self) -> bool:
        return True

    @property
    def remembers(self) -> bool:
        return True

    def final_state(self, state):
        return state


def joined(states) -> Any:
    """The state of a pruner out of its parts': that of a single part as it is, else a tuple; None if all are."""
    states = tuple(states)
    if all(s is None for s in states):
        return None
    return states[0] if len(states) == 1 else states


def apart(p: Pruner, ctx: Ctx) -> list[Ctx]:
    """A context for every part of ``p``, with that part's own state: the way back from `joined`."""
    if len(p.parts) == 1:
        return [ctx]
    states = (None,) * len(p.parts) if ctx.state is None else ctx.state
    if not isinstance(states, (tuple, list)) or len(states) != len(p.parts):
        raise ValueError(
            f"{p} has {len(p.parts)} parts and wants their states in a tuple, as {type(p).__name__}.init makes it."
        )
    return [ctx._replace(state=s) for s in states]


def check_inner(owner: Pruner, *inner: Pruner, ruled: bool = False) -> None:
    """Refuse what is no pruner, and what makes sense outermost only."""
    for p in inner:
        if not isinstance(p, Pruner):
            hint = f"nm.parse_pruner({p!r})" if isinstance(p, str) else "a pruner, such as mse(2,4)"
            raise TypeError(f"{type(owner).__name__} takes pruners, got {type(p).__name__}: pass {hint}.")
        if p.outermost or (p.ruled and not ruled):
            what, around = type(p).__name__, type(owner).__name__
            raise ValueError(
                f"{p} speaks for a whole slot, so it stands outermost: write {what}({around}(...)), not {around}({what}(...))."
            )
