"""Pruners out of pruners."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from nmjax.core import fusion, groups
from nmjax.core.context import Ctx
from nmjax.core.pruner import (
    Link,
    Normal,
    Pattern,
    Pruner,
    apart,
    check_inner,
    joined,
    sparsest,
    with_part_key,
)
from nmjax.core.value import show
from nmjax.pruners.magnitude import mse
from nmjax.pruners.nothing import identity
from nmjax.pruners.schedules import check_rows, row_at


@dataclass(frozen=True, repr=False, init=False)
class chain(Pruner):
    """One after another, each on what the one before it gave.

    >>> chain(mse(2, 4), mse(1, 4))(jnp.array([1.0, -2.0, 3.1, -4.0]))
    Array([ 0.,  0.,  0., -4.], dtype=float32)
    """

    pruners: tuple[Pruner, ...]
    reads_step = False

    def __init__(self, *pruners: Pruner):
        object.__setattr__(self, "pruners", pruners)
        super().__post_init__()
        check_inner(self, *self.pruners)

    def __repr__(self) -> str:
        return f"chain({','.join(map(show, self.pruners))})"

    @property
    def parts(self) -> tuple[Pruner, ...]:
        return self.pruners

    @property
    def selects(self) -> bool:
        return all(p.selects for p in self.parts)

    @property
    def pattern(self) -> Pattern | None:
        return sparsest(p.pattern for p in self.parts)

    @property
    def pattern_across(self) -> Pattern | None:
        return sparsest(p.pattern_across for p in self.parts)

    def normal(self) -> Normal:
        """A last `fp8` is storage. If one other part is left that prunes, it is the core."""
        if not self.parts:
            return Normal(core=identity, applied=self)
        count, last = len(self.parts), self.parts[-1].normal()
        cores: list[tuple[Pruner | None, tuple[Link, ...]]] = []
        for i, p in enumerate(self.parts):
            form, link = p.normal(), Link(i, count)
            if i < count - 1 and form.storage is not None:  # rounding before the end is part of the pruning
                form = Normal(core=p, applied=p)
            if form.core != identity:
                cores.append((form.core, (link, *form.core_path)))
        core, path = cores[0] if len(cores) == 1 else (None if cores else identity, ())
        if last.storage is None:
            return Normal(core, self, core_path=path)
        applied = chain(*self.parts[:-1], last.applied)
        return Normal(
            core, applied, last.storage, core_path=path, storage_path=(Link(count - 1, count), *last.storage_path)
        )

    def __call__(self, x: jax.Array, axis: int = -1, ctx: Ctx = Ctx()) -> jax.Array:
        for p, part in self._numbered(ctx):
            x = p(x, axis, part)
        return x

    def mask(self, x: jax.Array, axis: int = -1, ctx: Ctx = Ctx()) -> jax.Array:
        kept = jnp.ones_like(x, bool)
        for p, part in self._numbered(ctx):
            kept, x = kept & p.mask(x, axis, part), p(x, axis, part)
        return kept

    def _numbered(self, ctx: Ctx) -> Iterator[tuple[Pruner, Ctx]]:
        """Yield every part with its context: its own state, and noise of its own."""
        for i, (p, part) in enumerate(zip(self.parts, apart(self, ctx), strict=True)):
            yield p, with_part_key(part, i)

    @property
    def final(self) -> Pruner:
        return chain(*(p.final for p in self.parts))

    def init(self, x: jax.Array, axis: int = -1, ctx: Ctx = Ctx()) -> Any:
        return self._states(x, axis, ctx.replace(state=None), "init")

    def refresh(self, x: jax.Array, axis: int = -1, ctx: Ctx = Ctx()) -> Any:
        return self._states(x, axis, ctx, "refresh")

    def _states(self, x: jax.Array, axis: int, ctx: Ctx, make: str) -> Any:
        """Return the parts' states. Each is made of the values that the part before it returns."""
        states = []
        for p, part in self._numbered(ctx):
            states.append(getattr(p, make)(x, axis, part))
            x = p(x, axis, part.replace(state=states[-1]))
        return joined(states)


@dataclass(frozen=True, repr=False)
class stages(Pruner):
    """Rows (first step, pruner): the last row begun holds. Structure decay, dense phases, dense tails. What state a row
    has is made anew at its first step.

    Between magnitude pruners of one m only n changes, and is traced; else `lax.switch` chooses.

    >>> stages(((0, identity), (100, mse(3, 4)), (200, mse(2, 4))))(jnp.arange(1., 5.), ctx=Ctx(step=150))
    Array([0., 2., 3., 4.], dtype=float32)
    """

    rows: tuple[tuple[int, Pruner], ...]

    def __post_init__(self):
        super().__post_init__()
        check_rows(self, self.rows)
        check_inner(self, *self.parts, ruled=True)

    @property
    def parts(self) -> tuple[Pruner, ...]:
        return tuple(p for _, p in self.rows)

    @property
    def selects(self) -> bool:
        return all(p.selects for p in self.parts)

    def __call__(self, x: jax.Array, axis: int = -1, ctx: Ctx = Ctx()) -> jax.Array:
        if self._one_m():
            return jnp.where(self.mask(x, axis, ctx), x, jnp.zeros((), x.dtype))
        return self._switch(ctx, lambda p, part: p(x, axis, part))

    def mask(self, x: jax.Array, axis: int = -1, ctx: Ctx = Ctx()) -> jax.Array:
        if m := self._one_m():
            ns = jnp.array([p.n if isinstance(p, mse) else m for p in self.parts], jnp.int32)
            return groups.top(x, axis, ns[row_at(self.rows, ctx.step)], m)
        return self._switch(ctx, lambda p, part: p.mask(x, axis, part))

    def _one_m(self) -> int | None:
        """The m that all rows share, where they differ in n alone."""
        ms = {p.m for p in self.parts if type(p) is mse}
        return ms.pop() if len(ms) == 1 and all(type(p) is mse or p == identity for p in self.parts) else None

    def _switch(self, ctx, call):
        branch = lambda i, p: lambda contexts: call(p, contexts[i])
        branches = [branch(i, p) for i, p in enumerate(self.parts)]
        return lax.switch(row_at(self.rows, ctx.step), branches, apart(self, ctx))

    @property
    def bare_noise(self) -> bool:
        return any(p.bare_noise for p in self.parts)

    def kept(self, step: int | None = None) -> float:
        return super().kept(step) if step is None else self._row(step).kept(step)

    def kept_across(self, step: int | None = None) -> float:
        return super().kept_across(step) if step is None else self._row(step).kept_across(step)

    def _row(self, step: int) -> Pruner:
        return self.parts[int(row_at(self.rows, step))]

    @property
    def final(self) -> Pruner:
        return self.parts[-1].final

    def refresh(self, x: jax.Array, axis: int = -1, ctx: Ctx = Ctx()):
        contexts = apart(self, ctx)
        return joined(_begun(start, p, x, axis, part) for (start, p), part in zip(self.rows, contexts, strict=True))

    def final_state(self, state):
        return self.parts[-1].final_state(apart(self, Ctx(state=state))[-1].state)


@dataclass(frozen=True, repr=False)
class rescale(Pruner):
    """Multiply what is kept so that the L1 norm is what it was: the feature maps' (SDGP), or every group's.

    McDanel et al., "Accelerating DNN Training with Structured Data Gradient Pruning" (arXiv 2202.00774): prune across
    channels, then for each sample and channel multiply by ||x||_1 / ||pruned||_1 over space, in float32.

    >>> rescale(mse(2, 4), over="group")(jnp.array([1., 2., 3., 4.]))
    Array([0.      , 0.      , 4.285714, 5.714286], dtype=float32)
    """

    p: Pruner
    over: str = "spatial"
    reads_step = False

    def __post_init__(self):
        super().__post_init__()
        check_inner(self, self.p)
        if self.over not in ("spatial", "group"):
            raise ValueError(f"{self}: over is 'spatial' or 'group'.")

    def __call__(self, x: jax.Array, axis: int = -1, ctx: Ctx = Ctx()) -> jax.Array:
        y, axis = self.p(x, axis, ctx), groups.position(x.ndim, axis)
        if self.over == "group":
            view, over = partial(groups.split, axis=axis, m=self.block), (axis + 1,)
        else:
            view, over = (lambda v: v), ctx.axes_of(x.ndim, axis).space
            if not over:
                raise ValueError(
                    f"{self} rescales over space, and an array of shape {x.shape} pruned along axis {axis} has none. Write over='group'."
                )
        norm = lambda v: jnp.sum(jnp.abs(groups.wide(view(v))), over, keepdims=True)
        kept = norm(y)
        ratio = jnp.where(kept == 0, 1.0, norm(x) / jnp.where(kept == 0, 1.0, kept))
        y = groups.wide(view(y))
        return fusion.rounded(jnp.where(y == 0, y, y * ratio).reshape(x.shape), x.dtype)  # dropped stays dropped

    @property
    def pattern(self) -> Pattern | None:
        return self.p.pattern

    @property
    def pattern_across(self) -> Pattern | None:
        return self.p.pattern_across

    @property
    def final(self) -> Pruner:
        return rescale(self.p.final, self.over)


@dataclass(frozen=True, repr=False)
class raw(Pruner):
    """In a backward slot of an operand: prune the operand itself, not the value that the forward product made of it."""

    p: Pruner
    outermost, reads_step = True, False

    def __post_init__(self):
        super().__post_init__()
        check_inner(self, self.p)

    def __call__(self, x: jax.Array, axis: int = -1, ctx: Ctx = Ctx()) -> jax.Array:
        return self.p(x, axis, ctx)

    @property
    def pattern(self) -> Pattern | None:
        return self.p.pattern

    @property
    def pattern_across(self) -> Pattern | None:
        return self.p.pattern_across

    def normal(self) -> Normal:
        """The operand itself is the source."""
        inner = self.p.normal()
        applied = self if inner.storage is None else raw(inner.applied)
        return inner._replace(applied=applied, raw=True)

    @property
    def final(self) -> Pruner:
        return raw(self.p.final)


def _begun(start, p, x, axis, ctx):
    """The state of a row of stages: from its first step on, of the values that it finds there."""
    if not p.remembers:
        return None
    here = p.refresh(x, axis, ctx)
    fresh = lambda: p.init(x, axis, ctx.replace(state=None))
    return lax.cond(jnp.asarray(ctx.step) == start, fresh, lambda: here) if start else here
