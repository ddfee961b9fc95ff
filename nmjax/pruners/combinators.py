"""Combinators: pruners made of other pruners."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from nmjax.core import fusion, groups
from nmjax.core.bases import ByParts, SamePattern, inner_at
from nmjax.core.context import Ctx
from nmjax.core.paths import Link, with_part_key
from nmjax.core.pruner import Facts, NormalForm, Pattern, Pruner, check_inner, join_states, split_ctx
from nmjax.core.value import show
from nmjax.pruners.nothing import identity


@dataclass(frozen=True, repr=False, init=False)
class chain(ByParts):
    """Apply pruners one after another, each to the result of the one before it.

    Args:
      *pruners: The pruners, in the order in which they are applied. An empty chain returns ``x``.

    Raises:
      TypeError: An argument is not a pruner.
      ValueError: An argument, such as `ste`, must be outermost.

    >>> import nmjax as nm
    >>> nm.chain(nm.mse(2, 4), nm.mse(1, 4))(jnp.array([1.0, -2.0, 3.1, -4.0]))
    Array([ 0.,  0.,  0., -4.], dtype=float32)
    """

    pruners: tuple[Pruner, ...]
    reads_step = False

    def __init__(self, *pruners: Pruner) -> None:
        object.__setattr__(self, "pruners", pruners)
        super().__post_init__()
        check_inner(self, *self.pruners)

    def __repr__(self) -> str:
        return f"chain({','.join(map(show, self.pruners))})"

    @property
    def parts(self) -> tuple[Pruner, ...]:
        return self.pruners

    def describe(self) -> Facts:
        deciding = [p.facts for p in self._deciding]
        return (
            super()
            .describe()
            ._replace(
                pattern=_sparsest(p.pattern for p in deciding),
                pattern_across=_sparsest(p.pattern_across for p in deciding),
                selects=all(p.facts.selects for p in self.parts),
                keeps_zeros=all(p.facts.keeps_zeros for p in self.parts),
            )
        )

    @property
    def _deciding(self) -> tuple[Pruner, ...]:
        """The parts whose zeros are zeros of the result: the last one that does not keep zeros, and all after it."""
        first = max((i for i, p in enumerate(self.parts) if not p.facts.keeps_zeros), default=0)
        return self.parts[first:]

    def kept(self, step: int | None = None, across: bool = False) -> float:
        return min((p.kept(step, across) for p in self._deciding), default=1.0)

    def normal_form(self) -> NormalForm:
        """Return the normal form. An `fp8` or `fp4` at the end is the storage. If exactly one other part prunes, it is
        the core."""
        if not self.parts:
            return NormalForm(core=identity, applied=self)
        count, last = len(self.parts), self.parts[-1].normal_form()
        core, path = self._core()
        if last.storage is None:
            return NormalForm(core, self, core_path=path)
        applied = chain(*self.parts[:-1], last.applied)
        storage_path = (Link(count - 1, count), *last.storage_path)
        return NormalForm(core, applied, last.storage, core_path=path, storage_path=storage_path)

    def _core(self) -> tuple[Pruner | None, tuple[Link, ...]]:
        """Return `NormalForm.core` and the path to it."""
        count = len(self.parts)
        cores: list[tuple[Pruner | None, tuple[Link, ...]]] = []
        for i, p in enumerate(self.parts):
            form = p.normal_form()
            if i < count - 1 and form.storage is not None:  # an fp8 that is not last counts as pruning, not storage
                form = NormalForm(core=p, applied=p)
            if form.core != identity:
                cores.append((form.core, (Link(i, count), *form.core_path)))
        if not cores:
            return identity, ()
        if len(cores) > 1:
            return None, ()
        return cores[0]

    def __call__(self, x: jax.Array, axis: int = -1, ctx: Ctx = Ctx()) -> jax.Array:
        for p, part in self._parts_with_ctx(ctx):
            x = p(x, axis, part)
        return x

    def mask(self, x: jax.Array, axis: int = -1, ctx: Ctx = Ctx()) -> jax.Array:
        kept = jnp.ones_like(x, bool)
        for p, part_ctx in self._parts_with_ctx(ctx):
            kept, x = kept & p.mask(x, axis, part_ctx), p(x, axis, part_ctx)
        return kept

    def _parts_with_ctx(self, ctx: Ctx) -> Iterator[tuple[Pruner, Ctx]]:
        """Yield each part with its context, which has the part's own state and key."""
        for i, (p, part) in enumerate(zip(self.parts, split_ctx(self, ctx), strict=True)):
            yield p, with_part_key(part, i)

    def at(self, step: int) -> Pruner:
        return chain(*(inner_at(p, step) for p in self.parts)) if type(self) is chain else self

    @property
    def final(self) -> Pruner:
        return chain(*(p.final for p in self.parts))

    def init(self, x: jax.Array, axis: int = -1, ctx: Ctx = Ctx()) -> Any:
        return self._states(x, axis, ctx.replace(state=None), "init")

    def refresh(self, x: jax.Array, axis: int = -1, ctx: Ctx = Ctx()) -> Any:
        return self._states(x, axis, ctx, "refresh")

    def _states(self, x: jax.Array, axis: int, ctx: Ctx, make: str) -> Any:
        """Return the states of the parts, which their method ``make`` returns: "init" or "refresh". Each part gets the
        result of the part before it."""
        states = []
        for p, part_ctx in self._parts_with_ctx(ctx):
            states.append(getattr(p, make)(x, axis, part_ctx))
            x = p(x, axis, part_ctx.replace(state=states[-1]))
        return join_states(states)


def _sparsest(patterns: Iterable[Pattern | None]) -> Pattern | None:
    """Return the pattern that keeps the smallest share, or None if all are None."""
    return min((p for p in patterns if p is not None), key=lambda p: p[0] / p[1], default=None)


@dataclass(frozen=True, repr=False)
class rescale(ByParts, SamePattern):
    """Multiply the kept values so that the L1 norm is that of the array before pruning.

    Paper: McDanel et al., "Accelerating DNN Training with Structured Data Gradient Pruning", arXiv:2202.00774.

    The method of this paper prunes across channels. It then multiplies the values of each sample and channel, in
    float32, by::

        ||x||_1 / ||p(x)||_1

    An array without spatial axes, such as a linear layer's with one axis of samples, has one norm for each group
    instead. If a norm or a product overflows, the result is infinite or NaN.

    Args:
      p: The pruner.
      over: The values that share a norm. "spatial": one norm per sample and channel, over the spatial axes. "group":
        one per group. "auto": "spatial" if the array has spatial axes, else "group". A plan says which one.

    Raises:
      TypeError: ``p`` is not a pruner.
      ValueError: ``over`` is none of the three, or ``p`` must be outermost, as `ste` must. A call raises it if
        ``over`` is "spatial" and the array has no spatial axes.

    >>> import nmjax as nm
    >>> nm.rescale(nm.mse(2, 4))(jnp.array([1., 2., 3., 4.]))  # without space: one norm per group
    Array([0.      , 0.      , 4.285714, 5.714286], dtype=float32)
    """

    p: Pruner
    over: str = "auto"
    reads_step = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_inner(self, self.p)
        if self.over not in ("auto", "spatial", "group"):
            raise ValueError(f"{self}: over must be 'auto', 'spatial' or 'group'.")

    def over_in(self, space: tuple[int, ...]) -> str:
        """Return the values that share a norm in an array with these spatial axes: "spatial" or "group".

        >>> import nmjax as nm
        >>> nm.rescale(nm.mse(2, 4)).over_in((1, 2)), nm.rescale(nm.mse(2, 4)).over_in(())
        ('spatial', 'group')
        """
        if self.over == "spatial" and not space:
            raise ValueError(
                f"{self} needs spatial axes, but the array has none apart from those that groups lie along. Write "
                "over='group', or leave over out: it then chooses by the array."
            )
        if self.over != "auto":
            return self.over
        return "spatial" if space else "group"

    def __call__(self, x: jax.Array, axis: int = -1, ctx: Ctx = Ctx()) -> jax.Array:
        y, axis = self.p(x, axis, ctx), groups.position(x.ndim, axis)
        space = ctx.axes_of(x.ndim, axis).space
        by_group = self.over_in(space) == "group"
        view = lambda v: groups.wide(groups.split(v, axis, self.facts.block) if by_group else v)
        norm = lambda v: jnp.sum(jnp.abs(view(v)), (axis + 1,) if by_group else space, keepdims=True)
        norm_y = norm(y)
        ratio = jnp.where(norm_y == 0, 1.0, norm(x) / jnp.where(norm_y == 0, 1.0, norm_y))
        y = view(y)
        scaled = jnp.where(y == 0, y, y * ratio)  # zeros stay zeros: 0 * inf would be NaN
        return fusion.rounded(scaled.reshape(x.shape), x.dtype)

    def at(self, step: int) -> Pruner:
        now = super().at(step)
        return now if now.facts.block == self.facts.block else self  # groups of another size have other norms

    @property
    def final(self) -> Pruner:
        return rescale(self.p.final, self.over)


@dataclass(frozen=True, repr=False)
class raw(ByParts, SamePattern):
    """Make a backward slot prune the original operand.

    Without `raw` it prunes the value that the forward product used. `raw` must be the outermost
    pruner of ``dx_w`` or ``dw_x``.

    Args:
      p: The pruner.

    Raises:
      TypeError: ``p`` is not a pruner.
      ValueError: ``p`` is a pruner that must be outermost, such as `ste`.

    >>> import nmjax as nm
    >>> nm.Sparsity(y_w=nm.ste(nm.mse(2, 4)), dx_w=raw(nm.mse(2, 4)))
    y_w=ste(mse(2,4)); dx_w=raw(mse(2,4))
    """

    p: Pruner
    outermost = True
    reads_step = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_inner(self, self.p)

    def __call__(self, x: jax.Array, axis: int = -1, ctx: Ctx = Ctx()) -> jax.Array:
        return self.p(x, axis, ctx)

    def normal_form(self) -> NormalForm:
        """Return the normal form of the part, with ``raw=True``."""
        inner = self.p.normal_form()
        applied = self if inner.storage is None else raw(inner.applied)
        return inner._replace(applied=applied, raw=True)

    @property
    def final(self) -> Pruner:
        return raw(self.p.final)
