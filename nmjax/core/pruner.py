"""The pruner: ``p(x, axis, ctx)`` returns an array of the same shape and dtype, pruned in groups along ``axis``.

Fixed settings (n, m, a schedule) are fields. Key, step and state are passed in ``ctx``, a `Ctx`.
Pruners compare, hash and print, and `nmjax.parse_pruner` reads what they print.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any, ClassVar, NamedTuple

import jax
from jaxtyping import Array, Float

from nmjax.core.context import Ctx
from nmjax.core.paths import Link
from nmjax.core.value import Value

Pattern = tuple[int, int]
"""(n, m): at most n of every m consecutive values are not zero."""


class NormalForm(NamedTuple):
    """The normal form of a slot's pruner: the pruning, the storage and the gradient rule, apart from each other.

    Args:
      core: The only part that changes values, apart from ``storage``. `identity` if no part does; None if several do.
      applied: The pruner without its storage.
      storage: The `fp8` at the end, to which the pruned operand is rounded. None if there is none.
      rule: The pruner that defines the gradient rule. None if there is none.
      raw: True if a backward slot prunes the original operand. False if it prunes the operand that the forward
        product used.
      core_path: The path from the pruner to ``core``. `follow` uses it to find the core's key and state.
      storage_path: The path to ``storage``.
    """

    core: "Pruner | None"
    applied: "Pruner"
    storage: "Pruner | None" = None
    rule: "Pruner | None" = None
    raw: bool = False
    core_path: tuple[Link, ...] = ()
    storage_path: tuple[Link, ...] = ()


# Members that describe what __call__ returns. A class that overrides __call__ does not inherit them.
_PROMISES = (
    "reads_step", "has_prune_members", "has_prune_tile", "pattern", "pattern_across", "kept", "kept_across", "selects",
    "keeps_zeros", "normal_form", "growth", "phases", "at",
)  # fmt: skip


@dataclass(frozen=True, repr=False)
class Pruner(Value):
    """The base of all pruners.

    A subclass is a frozen dataclass that defines ``__call__``. All other members have defaults. Those of `block`,
    `stochastic`, `needs_state` and the like combine the values of the `parts`.

    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True, repr=False)
    ... class above(Pruner):
    ...     threshold: float
    ...     def __call__(self, x, axis=-1, ctx=Ctx()):
    ...         return jnp.where(jnp.abs(x) > self.threshold, x, 0.0)
    >>> above(0.5)(jnp.array([0.1, -2.0, 0.7, 0.3]))
    Array([ 0. , -2. ,  0.7,  0. ], dtype=float32)
    """

    outermost: ClassVar[bool] = False  # True: it cannot be a part of another pruner
    reads_step: ClassVar[bool] = True  # False: __call__ itself uses ctx.step for random numbers only

    def __post_init__(self) -> None:
        super().__post_init__()
        for f in fields(self):
            value = getattr(self, f.name)
            try:
                hash(value)
            except TypeError:
                raise TypeError(
                    f"{type(self).__name__}: {f.name} must be hashable, got a {type(value).__name__}. Write a number, "
                    "a text, a tuple or a frozen dataclass."
                ) from None

    def __init_subclass__(cls, **options: Any) -> None:
        """Reset `_PROMISES` to their defaults if the class overrides the ``__call__`` of another pruner."""
        super().__init_subclass__(**options)
        if "__call__" not in vars(cls):
            return
        overridden = next(base for base in cls.__mro__[1:] if "__call__" in vars(base))
        if overridden is not Pruner:
            for name in _PROMISES:
                if name not in vars(cls):
                    setattr(cls, name, vars(Pruner)[name])

    def __call__(self, x: Float[Array, "..."], axis: int = -1, ctx: Ctx = Ctx()) -> Float[Array, "..."]:
        """Return ``x`` pruned in groups along ``axis``.

        Args:
          x: An array of floating-point numbers.
          axis: The axis that groups lie along.
          ctx: Key, step and state of the call.

        Returns:
          An array of the same shape and dtype.

        Raises:
          TypeError: The array is not floating-point, or a key is missing.
          ValueError: The axis does not divide into groups, or the state is missing or of the wrong shape.
        """
        raise NotImplementedError(f"{type(self).__name__} has no __call__: write __call__(self, x, axis, ctx).")

    # ---- what a call needs ----

    @property
    def parts(self) -> tuple["Pruner", ...]:
        """The pruners inside this one: its fields, and the members of its fields, that are pruners."""
        values = (getattr(self, f.name) for f in fields(self))
        return tuple(p for v in values for p in (v if isinstance(v, tuple) else (v,)) if isinstance(p, Pruner))

    @property
    def block(self) -> int:
        """The number that must divide the length of the pruned axis."""
        return math.lcm(*(p.block for p in self.parts))

    @property
    def stochastic(self) -> bool:
        """True if a call draws random numbers and therefore needs a key."""
        return any(p.stochastic for p in self.parts)

    @property
    def needs_key(self) -> bool:
        """True if a call, `init` or `refresh` draws random numbers."""
        return self.stochastic or any(p.needs_key for p in self.parts)

    @property
    def needs_state(self) -> bool:
        """True if a call requires state. `soft` does not: without state its scale is 1."""
        return any(p.needs_state for p in self.parts)

    @property
    def has_state(self) -> bool:
        """True if `init` makes a state."""
        return any(p.has_state for p in self.parts)

    @property
    def depends_on_step(self) -> bool:
        """True if the result may depend on ``ctx.step``: by a schedule, by random numbers, or by `reads_step`."""
        values = [getattr(self, f.name) for f in fields(self)]
        scheduled = any(callable(v) and not isinstance(v, Pruner) for v in values)
        return self.reads_step or scheduled or self.stochastic or any(p.depends_on_step for p in self.parts)

    @property
    def has_gradient_rule(self) -> bool:
        """True if it has a gradient rule. Only forward slots allow one."""
        return any(p.has_gradient_rule for p in self.parts)

    @property
    def noise_without_rule(self) -> bool:
        """True if a call draws random numbers outside a gradient rule, where autodiff differentiates the draw."""
        return self.stochastic

    @property
    def reorders(self) -> bool:
        """True if a call forms groups in another order of the whole axis, as `permute` does."""
        return any(p.reorders for p in self.parts)

    @property
    def reads_partner(self) -> bool:
        """True if a call reads the norms of the rows of the product's other operand, in ``ctx.partner``."""
        return any(p.reads_partner for p in self.parts)

    @property
    def tiles(self) -> bool:
        """True if groups lie along the other axis of a weight too, so that `block` must divide both."""
        return any(p.tiles for p in self.parts)

    # ---- what a call returns ----

    @property
    def pattern(self) -> Pattern | None:
        """The n:m pattern guaranteed at every step, or None."""
        return None

    @property
    def pattern_across(self) -> Pattern | None:
        """The n:m pattern guaranteed along the other axis of a weight, or None."""
        return None

    @property
    def selects(self) -> bool:
        """True if a call only keeps or drops: ``p(x) == where(p.mask(x), x, 0)``."""
        return False

    @property
    def keeps_zeros(self) -> bool:
        """True if zeros of the argument are zeros of the result. Then a `chain` keeps the patterns of the parts before.

        A class that changes the values that it keeps, and returns zeros for zeros, should define it as True.
        """
        return self.selects

    def mask(self, x: jax.Array, axis: int = -1, ctx: Ctx = Ctx()) -> jax.Array:
        """Return the mask of the entries that a call with the same arguments keeps.

        Raises:
          TypeError: The pruner has no mask.
        """
        if len(self.parts) == 1:
            return self.parts[0].mask(x, axis, ctx)
        raise TypeError(f"{self} has no mask: {type(self).__name__} does not define mask(x, axis, ctx).")

    def kept(self, step: int | None = None) -> float:
        """Return the share of values that a call keeps in groups of the `pattern`.

        Args:
          step: A training step. If None, return the smallest share over all steps.
        """
        if self.parts or self.pattern is None:
            return min((kept_in_groups(p, step) for p in self.parts), default=1.0)
        return self.pattern[0] / self.pattern[1]

    def kept_across(self, step: int | None = None) -> float:
        """Return the share of values that a call keeps in groups along the other axis of a weight, as `kept` does."""
        return min((p.kept_across(step) for p in self.parts), default=1.0)

    @property
    def phases(self) -> tuple[int, ...]:
        """The steps, rising and above 0, at which a new phase begins: at which the result of `at` changes."""
        return ()

    def at(self, step: int) -> "Pruner":
        """Return an equivalent pruner for the phase that contains a step.

        In that phase both return the same values and gradients, and both have the same state. By default it is the
        pruner itself.
        """
        return self

    # ---- slots and kernels ----

    def normal_form(self) -> NormalForm:
        """Return the normal form of a slot that this pruner fills. By default the whole pruner is the core."""
        return NormalForm(core=self, applied=self)

    @property
    def has_prune_members(self) -> bool:
        """True if kernels may call `prune_members`."""
        return False

    @property
    def has_prune_tile(self) -> bool:
        """True if kernels may call `prune_tile`."""
        return False

    def draw_keys(self, key: Any) -> tuple[Any, ...]:
        """Return the key of each random number of a group that kernels draw, given the key of a call."""
        return (key,)

    def prune_members(self, x: list[jax.Array], u: Any = None, state: Any = None) -> list[jax.Array]:
        """Return the pruned values of groups. Kernels call it if `has_prune_members` is True.

        Args:
          x: The values at each position of a group, one array for each of the m positions.
          u: One uniform random number in [0, 1) for each group, if the pruner is stochastic. A tuple of them, if
            `draw_keys` returns several keys.
          state: The state that a call reads in ``ctx``.

        Returns:
          The values after pruning, in the same order.
        """
        raise NotImplementedError(f"{self} is not pruned by kernels.")

    def prune_tile(self, x: list[list[jax.Array]]) -> list[list[jax.Array]]:
        """Return the pruned values of tiles of m x m values. Kernels call it if `has_prune_tile` is True.

        Args:
          x: The values at each position of a tile: m rows of m arrays.

        Returns:
          The values after pruning, in the same order.
        """
        raise NotImplementedError(f"{self} is not pruned by kernels.")

    def growth(self, state: Any = None) -> Any:
        """Return an upper bound of ``max |p(x)| / max |x|``, from which kernels derive the scale of FP8.

        Args:
          state: The state that a call reads in ``ctx``.
        """
        return 1.0

    # ---- state and final form ----

    @property
    def final(self) -> "Pruner":
        """The form that inference uses: without schedule, random numbers or gradient rule."""
        if self.stochastic:
            raise ValueError(f"{self} draws new values at every step, so it has no final form for inference.")
        return self

    def final_state(self, state: Any) -> Any:
        """Convert a state of this pruner to a state of `final`."""
        contexts = split_ctx(self, Ctx(state=state))
        return join_states(p.final_state(part.state) for p, part in zip(self.parts, contexts, strict=True))

    def init(self, x: jax.Array, axis: int = -1, ctx: Ctx = Ctx()) -> Any:
        """Return the initial state, computed from the initial array, or None if the pruner has no state."""
        return join_states(p.init(x, axis, ctx) for p in self.parts)

    def refresh(self, x: jax.Array, axis: int = -1, ctx: Ctx = Ctx()) -> Any:
        """Return the state for step ``ctx.step``, given the array at that step and an earlier state, ``ctx.state``."""
        return join_states(p.refresh(x, axis, part) for p, part in zip(self.parts, split_ctx(self, ctx), strict=True))


def kept_in_groups(p: Pruner, step: int | None = None) -> float:
    """Return `Pruner.kept`; 1 if the pruner has neither parts nor a pattern, because zeros without n:m save nothing."""
    return p.kept(step) if p.parts or p.pattern is not None else 1.0


def join_states(states: Iterable[Any]) -> Any:
    """Return the state of a pruner, given the states of its parts.

    Returns:
      None if all states are None, the state itself if there is one part, else the tuple of states.
    """
    states = tuple(states)
    if all(s is None for s in states):
        return None
    return states[0] if len(states) == 1 else states


def split_ctx(p: Pruner, ctx: Ctx) -> list[Ctx]:
    """Return one context for each part of a pruner. Each has its own part of a state that `join_states` made."""
    if len(p.parts) == 1:
        return [ctx]
    states = (None,) * len(p.parts) if ctx.state is None else ctx.state
    if not isinstance(states, (tuple, list)) or len(states) != len(p.parts):
        raise ValueError(
            f"{p} has {len(p.parts)} parts, so its state is a tuple of their states: pass what its init(x, axis) "
            "returns."
        )
    return [ctx.replace(state=s) for s in states]


def check_inner(owner: Pruner, *inner: Any, allow_gradient_rules: bool = False) -> None:
    """Raise an error if a part is not a pruner, or must be outermost.

    Args:
      owner: The pruner that has the parts.
      *inner: Its parts.
      allow_gradient_rules: Whether parts with a gradient rule are allowed.
    """
    for p in inner:
        if not isinstance(p, Pruner):
            hint = f"nm.parse_pruner({p!r})" if isinstance(p, str) else "a pruner, such as mse(2,4)"
            raise TypeError(f"{type(owner).__name__} takes pruners, got {type(p).__name__}: pass {hint}.")
        if p.outermost or (p.has_gradient_rule and not allow_gradient_rules):
            name, around = type(p).__name__, type(owner).__name__
            raise ValueError(
                f"{p} must be the outermost pruner of its slot: write {name}({around}(...)), not {around}({name}(...))."
            )
