"""The pruner: ``p(x, axis, ctx)`` returns an array of the same shape and dtype, pruned in groups along ``axis``.

Fixed settings (n, m, a schedule) are fields. Key, step and state are passed in ``ctx``, a `Ctx`.
Pruners compare, hash and print, and `nmjax.parse_pruner` reads what they print.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from functools import cached_property
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
      storage: The `fp8` or `fp4` at the end, to which the pruned operand is rounded. None if there is none.
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


class Facts(NamedTuple):
    """What is known of a pruner without a call.

    By default a pruner needs what its parts need, and promises nothing.

    Attributes:
      block: The number that must divide the length of the pruned axis.
      tiles: Groups lie along the other axis of a weight too, so that ``block`` must divide both.
      stochastic: A call draws random numbers, and therefore needs a key.
      needs_key: A call, `Pruner.init` or `Pruner.refresh` draws random numbers.
      noise_in_rule: It draws inside of a gradient rule only. Elsewhere autodiff would differentiate the draw.
      needs_state: A call requires state. `soft` does not: without state its scale is 1.
      has_state: `Pruner.init` makes a state.
      depends_on_step: The result may depend on ``ctx.step``: by a schedule or by random numbers.
      gradient_rule: It has a gradient rule. Only forward slots allow one.
      reorders: A call forms groups in another order of the whole axis, as `permute` does.
      reads_partner: A call reads the norms of the rows of the product's other operand, in ``ctx.partner``.
      reads_gradient: `Pruner.refresh` reads the gradient of the weight, in ``ctx.gradient``.
      pattern: The n:m pattern guaranteed at every step, or None.
      pattern_across: The n:m pattern guaranteed along the other axis of a weight, or None.
      selects: A call only keeps or drops: ``p(x) == where(p.mask(x), x, 0)``.
      keeps_zeros: Zeros of the argument are zeros of the result. Then a `chain` keeps the patterns of the parts before.

    >>> import nmjax as nm
    >>> facts = nm.chain(nm.mse(2, 4), nm.mvue(1, 8)).facts
    >>> facts.block, facts.pattern, facts.stochastic
    (8, (1, 8), True)
    """

    block: int = 1
    tiles: bool = False
    stochastic: bool = False
    needs_key: bool = False
    noise_in_rule: bool = False
    needs_state: bool = False
    has_state: bool = False
    depends_on_step: bool = False
    gradient_rule: bool = False
    reorders: bool = False
    reads_partner: bool = False
    reads_gradient: bool = False
    pattern: Pattern | None = None
    pattern_across: Pattern | None = None
    selects: bool = False
    keeps_zeros: bool = False

    @classmethod
    def of_parts(cls, parts: Iterable["Facts"]) -> "Facts":
        """Return what parts need together, without promises."""
        parts = tuple(parts)
        needs: dict[str, Any] = {name: any(getattr(f, name) for f in parts) for name in _NEEDS}
        drawing = [f for f in parts if f.stochastic]
        in_rule = bool(drawing) and all(f.noise_in_rule for f in drawing)
        return cls(math.lcm(*(f.block for f in parts)), **needs)._replace(noise_in_rule=in_rule)


_NEEDS = Facts._fields[1 : Facts._fields.index("pattern")]


class KernelForm(NamedTuple):
    """What kernels call in the place of a pruner: the same function of the members of groups.

    Attributes:
      members: A function (x, u, state) of the values at each position of a group, a list of m arrays; of one uniform in
        [0, 1) for each group, None if it draws none, or a tuple of as many as ``keys`` returns; and of the scalar. It
        returns the values after pruning, in the same order, in the dtype of the members or, for kernels to round, in a
        wider one. If the pruner has a mask, it takes as ``of`` other arrays, of which it keeps the same members.
      tile: The same for tiles of m x m values, m rows of m arrays. It takes the tile, and ``of``.
      keys: A function of the key of a call. It returns the key of each uniform.
      each: True if a call draws a uniform for each value. ``members`` then takes a list of m arrays as u.
      scalar: A function of the context and the dtype of a call. It returns the scalar: a number, or None. Without it
        the scalar is the state.
      growth: A function of the state. It returns an upper bound of ``max |p(x)| / max |x|``, from which kernels derive
        the scale of FP8.

    >>> import jax.numpy as jnp, nmjax as nm
    >>> group = [jnp.float32(v) for v in (1, -2, 3, -4)]
    >>> [float(v) for v in nm.mse(2, 4).kernel_form.members(group, None, None)]
    [0.0, 0.0, 3.0, -4.0]
    """

    members: Callable[..., list[jax.Array]] | None = None
    tile: Callable[..., list[list[jax.Array]]] | None = None
    keys: Callable[[Any], tuple[Any, ...]] = lambda key: (key,)
    each: bool = False
    scalar: Callable[[Ctx, Any], Any] | None = None
    growth: Callable[[Any], Any] = lambda state: 1.0


# What else a class says of its __call__.
_OF_A_CALL = ("reads_step", "describe", "kept", "phases", "at", "normal_form")


@dataclass(frozen=True, repr=False)
class Pruner(Value):
    """The base of all pruners.

    A subclass is a frozen dataclass that defines ``__call__``; `init` and `refresh` if it has state; and `describe` to
    say what is special about it. All other members have defaults.

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
        """Refuse a class that overrides the ``__call__`` of another pruner, and inherits what that one promises."""
        super().__init_subclass__(**options)
        facts = [name for name in Facts._fields if isinstance(vars(cls).get(name), (bool, property))]
        if facts:
            raise TypeError(
                f"{cls.__name__} defines {', '.join(facts)}. Say it in describe: def describe(self): return "
                f"super().describe()._replace({facts[0]}=...)."
            )
        if "kernel_form" not in vars(cls):  # it is not inherited: the class may compute otherwise
            cls.kernel_form = Pruner.kernel_form
        if "__call__" not in vars(cls):
            return
        owner = lambda name, kinds: next(kind for kind in kinds if name in vars(kind))
        overridden = owner("__call__", cls.__mro__[1:])
        owners = {name: owner(name, cls.__mro__) for name in _OF_A_CALL}
        inherited = [name for name, one in owners.items() if one not in (cls, Pruner)]
        if overridden is not Pruner and inherited:
            base = next(kind for kind in cls.__bases__ if issubclass(kind, overridden))
            raise TypeError(
                f"{cls.__name__} overrides the __call__ of {base.__name__}, and would inherit what that says of "
                f"its own call: define {', '.join(inherited)} too, as in at = nm.Pruner.at, which promises nothing. Or "
                "derive it from nm.Pruner or nm.Grouped, and call the other pruner."
            )

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

    @cached_property
    def facts(self) -> Facts:
        """What is known of it without a call, as `describe` says it."""
        facts = self.describe()
        return facts._replace(
            needs_key=facts.needs_key or facts.stochastic,
            depends_on_step=facts.depends_on_step or facts.stochastic,
            keeps_zeros=facts.keeps_zeros or facts.selects,
        )

    def describe(self) -> Facts:
        """Return the facts of this pruner. A subclass changes those of ``super().describe()`` with ``_replace``.

        >>> import nmjax as nm
        >>> nm.mse(2, 4).describe().pattern
        (2, 4)
        """
        values = [getattr(self, f.name) for f in fields(self)]
        scheduled = any(callable(v) and not isinstance(v, Pruner) for v in values)
        facts = Facts.of_parts(p.facts for p in self.parts)
        return facts._replace(depends_on_step=facts.depends_on_step or self.reads_step or scheduled)

    # ---- what a call returns ----

    def mask(self, x: jax.Array, axis: int = -1, ctx: Ctx = Ctx()) -> jax.Array:
        """Return the mask of the entries that a call with the same arguments keeps.

        Raises:
          TypeError: The pruner has no mask.
        """
        if len(self.parts) == 1:
            return self.parts[0].mask(x, axis, ctx)
        raise TypeError(f"{self} has no mask: {type(self).__name__} does not define mask(x, axis, ctx).")

    def kept(self, step: int | None = None, across: bool = False) -> float:
        """Return the share of values that a call keeps in groups of the pattern.

        Args:
          step: A training step. If None, return the smallest share over all steps.
          across: Whether the groups are those along the other axis of a weight.
        """
        pattern = self.facts.pattern_across if across else self.facts.pattern
        if self.parts or pattern is None:
            return min((p.kept(step, across) for p in self.parts), default=1.0)
        return pattern[0] / pattern[1]

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
    def kernel_form(self) -> KernelForm:
        """What kernels call in its place. By default nothing, so that no kernel prunes by it.

        It is not inherited: a subclass, which may compute otherwise, defines it anew.
        """
        return KernelForm()

    def in_one_pass(self, x: jax.Array, axis: int, ctx: Ctx, mask: bool = False) -> jax.Array | None:
        """Return what a call or `mask` returns, computed by a kernel of ``ctx.kernels``; None if none serves."""
        return None if ctx.kernels is None else ctx.kernels.prune(self, x, axis, ctx, mask)

    # ---- state and final form ----

    @property
    def final(self) -> "Pruner":
        """The form that inference uses: without schedule, random numbers or gradient rule."""
        if self.facts.stochastic:
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
        if p.outermost or (p.facts.gradient_rule and not allow_gradient_rules):
            name, around = type(p).__name__, type(owner).__name__
            raise ValueError(
                f"{p} must be the outermost pruner of its slot: write {name}({around}(...)), not {around}({name}(...))."
            )
