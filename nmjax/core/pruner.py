"""The pruner: ``p(x, axis, ctx) -> array`` of the same shape and dtype, pruned in groups of m consecutive values
along ``axis``.

What is fixed (n, m, a schedule) is a field of the value. What changes (key, step, state) comes in through `Ctx`. Values
compare, hash and print, and `nmjax.parse_pruner` reads back what they print.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, NamedTuple

import jax

from nmjax.core import random
from nmjax.core.context import Ctx
from nmjax.core.value import Value

Pattern = tuple[int, int]
"""(n, m): at most n of every m consecutive values are not zero."""


class Link(NamedTuple):
    """One step from a chain of pruners to one of them: its number, and how many there are."""

    number: int
    count: int


class Normal(NamedTuple):
    """The normal form of a pruner that fills a slot: where its value comes from, its gradient, what prunes, and the
    storage.

    Attributes:
      core: the one pruner that prunes; `identity` if none does, None if several do, one after another.
      applied: the pruner without its storage.
      storage: the `fp8` at the end, in which the product of the slot holds the result; None if there is none.
      rule: the pruner that brings the gradient rule; None if there is none.
      raw: True if the operand itself is pruned, not the value that the forward product used.
      core_path: the way from the pruner to ``core``, by which `follow` finds its key and its state.
      storage_path: the way to ``storage``.
    """

    core: "Pruner | None"
    applied: "Pruner"
    storage: "Pruner | None" = None
    rule: "Pruner | None" = None
    raw: bool = False
    core_path: tuple[Link, ...] = ()
    storage_path: tuple[Link, ...] = ()


@dataclass(frozen=True, repr=False)
class Pruner(Value):
    """The base of all pruners.

    A subclass is a frozen dataclass with a ``__call__``. Its other members have defaults that promise nothing. The
    members that say what a call needs are those of its parts, unless the class says otherwise."""

    outermost: ClassVar[bool] = False  # True: it speaks for a whole slot, so it is no part of another pruner
    reads_step: ClassVar[bool] = True  # False: a call never reads ctx.step, other than to draw or through its parts

    def __init_subclass__(cls, **options: Any) -> None:
        """Let a class that computes otherwise inherit none of the promises about the computation."""
        super().__init_subclass__(**options)
        if "__call__" in vars(cls):
            for name in ("reads_step", "by_members", "by_tile"):
                if name not in vars(cls):
                    setattr(cls, name, vars(Pruner)[name])

    def __call__(self, x: jax.Array, axis: int = -1, ctx: Ctx = Ctx()) -> jax.Array:
        """Return ``x`` pruned in groups along ``axis``."""
        raise NotImplementedError(f"{type(self).__name__} has no __call__.")

    # ---- what a call needs ----

    @property
    def parts(self) -> tuple["Pruner", ...]:
        """The pruners inside this one."""
        return tuple(v for f in fields(self) if isinstance(v := getattr(self, f.name), Pruner))

    @property
    def block(self) -> int:
        """The number that must divide the length of the pruned axis."""
        return math.lcm(*(p.block for p in self.parts))

    @property
    def stochastic(self) -> bool:
        """True if a call draws random numbers, and so needs a key."""
        return any(p.stochastic for p in self.parts)

    @property
    def needs_key(self) -> bool:
        """True if a call draws random numbers, or if `init` or `refresh` does."""
        return self.stochastic or any(p.needs_key for p in self.parts)

    @property
    def stateful(self) -> bool:
        """True if a call fails without state. (`soft` does not: its scale is then 1.)"""
        return any(p.stateful for p in self.parts)

    @property
    def remembers(self) -> bool:
        """True if `init` makes a state."""
        return any(p.remembers for p in self.parts)

    @property
    def timed(self) -> bool:
        """True if a call may read the step: to draw, or for a schedule."""
        values = [getattr(self, f.name) for f in fields(self)]
        scheduled = any(callable(v) and not isinstance(v, Pruner) for v in values)
        return self.reads_step or scheduled or self.stochastic or any(p.timed for p in self.parts)

    @property
    def ruled(self) -> bool:
        """True if it brings a gradient rule, which only a forward slot can use."""
        return any(p.ruled for p in self.parts)

    @property
    def bare_noise(self) -> bool:
        """True if a call draws random numbers outside of a gradient rule, so that autodiff would meet the draw."""
        return self.stochastic

    @property
    def reorders(self) -> bool:
        """True if a call moves values along the whole axis."""
        return any(p.reorders for p in self.parts)

    @property
    def tiles(self) -> bool:
        """True if groups lie along the other axis of a weight too, so that `block` must divide both."""
        return any(p.tiles for p in self.parts)

    # ---- what a call returns ----

    @property
    def pattern(self) -> Pattern | None:
        """The n:m that a call returns at every step; None if it promises none."""
        return None

    @property
    def pattern_across(self) -> Pattern | None:
        """The n:m along the other axis of a weight; None if it promises none."""
        return None

    @property
    def selects(self) -> bool:
        """True if a call only keeps or drops: ``p(x) == where(p.mask(x), x, 0)``."""
        return False

    def mask(self, x: jax.Array, axis: int = -1, ctx: Ctx = Ctx()) -> jax.Array:
        """Return the mask of the entries that are kept."""
        if len(self.parts) == 1:
            return self.parts[0].mask(x, axis, ctx)
        raise TypeError(f"{self} has no mask: it does not select entries by a rule of its own.")

    def kept(self, step: int | None = None) -> float:
        """Return the share of values that is left at a step; without a step, at the sparsest."""
        return min((p.kept(step) for p in self.parts), default=1.0)

    def kept_across(self, step: int | None = None) -> float:
        """Return the share that is left in every group along the other axis of a weight."""
        return min((p.kept_across(step) for p in self.parts), default=1.0)

    # ---- slots and kernels ----

    def normal(self) -> Normal:
        """Return the normal form of a slot that this pruner fills. By default all of it is one pruner."""
        return Normal(core=self, applied=self)

    @property
    def by_members(self) -> bool:
        """True if kernels may prune by `of_members`."""
        return False

    @property
    def by_tile(self) -> bool:
        """True if kernels may prune by `of_tile`."""
        return False

    def of_members(self, x: list[jax.Array], u: jax.Array | None = None, state: Any = None) -> list[jax.Array]:
        """Return the pruned members of groups, as a kernel calls it if `by_members`.

        Args:
          x: the members of groups, one array for each of the m positions.
          u: one uniform in [0, 1) for every group, if the pruner is stochastic.
          state: the state that a call would read in ``ctx``.
        """
        raise NotImplementedError(f"{self} is not pruned by kernels.")

    def of_tile(self, x: list[list[jax.Array]]) -> list[list[jax.Array]]:
        """Return the pruned members of tiles of m x m values, as a kernel calls it if `by_tile`."""
        raise NotImplementedError(f"{self} is not pruned by kernels.")

    def growth(self, state: Any = None) -> Any:
        """Return a bound of how many times larger than what it prunes a value can be."""
        return 1.0

    # ---- state and final form ----

    @property
    def final(self) -> "Pruner":
        """The form that inference uses: without time, noise or gradient rule."""
        if self.stochastic:
            raise ValueError(f"{self} draws anew at every step, so it has no final form for inference to use.")
        return self

    def final_state(self, state: Any) -> Any:
        """Return the state that `final` reads, given this pruner's state."""
        contexts = apart(self, Ctx(state=state))
        return joined(p.final_state(part.state) for p, part in zip(self.parts, contexts, strict=True))

    def init(self, x: jax.Array, axis: int = -1, ctx: Ctx = Ctx()) -> Any:
        """Return the first state, or None if there is nothing to remember."""
        return joined(p.init(x, axis, ctx) for p in self.parts)

    def refresh(self, x: jax.Array, axis: int = -1, ctx: Ctx = Ctx()) -> Any:
        """Return the state of ``ctx.step``, given in ``ctx.state`` the state of an earlier step."""
        return joined(p.refresh(x, axis, part) for p, part in zip(self.parts, apart(self, ctx), strict=True))


@dataclass(frozen=True, repr=False)
class Grouped(Pruner):
    """A pruner that keeps at most n of every m consecutive values."""

    n: int
    m: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if 1 <= self.n <= self.m:
            return
        problem = f"{self}: n must lie between 1 and m, because at most n of every m values are kept"
        if 1 <= self.m < self.n:
            raise ValueError(f"{problem}. Did you mean {type(self).__name__}({self.m},{self.n})?")
        raise ValueError(f"{problem}.")

    @property
    def block(self) -> int:
        return self.m

    @property
    def pattern(self) -> Pattern | None:
        return (self.n, self.m) if self.n < self.m else None

    def kept(self, step: int | None = None) -> float:
        return self.n / self.m


@dataclass(frozen=True, repr=False)
class Remembering(Pruner):
    """A pruner with a state of its own, beside its parts'."""

    @property
    def stateful(self) -> bool:
        return True

    @property
    def remembers(self) -> bool:
        return True

    def final_state(self, state: Any) -> Any:
        return state


def sparsest(patterns: Iterable[Pattern | None]) -> Pattern | None:
    """Return the pattern that keeps the smallest share, or None if there is none."""
    return min((p for p in patterns if p is not None), key=lambda p: p[0] / p[1], default=None)


def joined(states: Iterable[Any]) -> Any:
    """Return the state of a pruner, given its parts': a single part's as it is, else a tuple; None if all are None."""
    states = tuple(states)
    if all(s is None for s in states):
        return None
    return states[0] if len(states) == 1 else states


def apart(p: Pruner, ctx: Ctx) -> list[Ctx]:
    """Return a context for every part of ``p``, each with its own part's state. It undoes `joined`."""
    if len(p.parts) == 1:
        return [ctx]
    states = (None,) * len(p.parts) if ctx.state is None else ctx.state
    if not isinstance(states, (tuple, list)) or len(states) != len(p.parts):
        raise ValueError(
            f"{p} has {len(p.parts)} parts, so its state is a tuple of their states, as {type(p).__name__}.init "
            "returns it."
        )
    return [ctx.replace(state=s) for s in states]


def with_part_key(ctx: Ctx, number: int) -> Ctx:
    """Return the context of one part of a chain, with a stream of noise of its own."""
    return ctx if ctx.key is None else ctx.replace(key=random.fold(random.words(ctx.key), number))


def follow(path: Sequence[Link], ctx: Ctx) -> Ctx:
    """Return the context of the pruner at the end of a path, given the context of the pruner where the path begins."""
    for number, count in path:
        ctx = with_part_key(ctx, number)
        if count == 1 or ctx.state is None:
            continue
        if not isinstance(ctx.state, (tuple, list)) or len(ctx.state) != count:
            raise ValueError(f"a chain of {count} pruners has a tuple of {count} states, as its init returns it.")
        ctx = ctx.replace(state=ctx.state[number])
    return ctx


def check_inner(owner: Pruner, *inner: Any, ruled: bool = False) -> None:
    """Refuse parts that are no pruners, and parts that make sense outermost only."""
    for p in inner:
        if not isinstance(p, Pruner):
            hint = f"nm.parse_pruner({p!r})" if isinstance(p, str) else "a pruner, such as mse(2,4)"
            raise TypeError(f"{type(owner).__name__} takes pruners, got {type(p).__name__}: pass {hint}.")
        if p.outermost or (p.ruled and not ruled):
            name, around = type(p).__name__, type(owner).__name__
            raise ValueError(
                f"{p} speaks for a whole slot, so it is outermost: write {name}({around}(...)), "
                f"not {around}({name}(...))."
            )
