"""Pruners that change at given steps of training."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from nmjax.core import groups
from nmjax.core.bases import inner_at
from nmjax.core.context import Ctx
from nmjax.core.paths import Link
from nmjax.core.pruner import Facts, KernelForm, NormalForm, Pruner, check_inner, join_states, split_ctx
from nmjax.pruners.input_norms import keep_norms
from nmjax.pruners.magnitude import largest, mse
from nmjax.pruners.nothing import identity
from nmjax.pruners.schedules import check_rows, row_at


@dataclass(frozen=True, repr=False)
class stages(Pruner):
    """Use different pruners in different phases of training.

    Paper: Bambhaniya et al., "Progressive Gradient Flow for Robust N:M Sparsity
    Training in Transformers", arXiv:2402.04744.

    Examples are the structure decay of this paper (SdGf) and a dense phase at the end. Step t uses
    the last row whose first step is <= t. Each row's state is initialized at its first step, or at
    the first one after it that is not left out. If every row is `identity`
    or `mse` with the same m, one call with a traced n serves all rows. Otherwise `lax.switch` selects the row.

    Args:
      rows: Pairs (first step, pruner). The first pair begins at step 0, and first steps increase.

    Raises:
      TypeError: A row holds no pruner.
      ValueError: A row is not a pair, the first step is not 0, steps do not increase, or a pruner must be outermost.

    >>> stages(((0, identity), (100, mse(3, 4)), (200, mse(2, 4))))(jnp.arange(1., 5.), ctx=Ctx(step=150))
    Array([0., 2., 3., 4.], dtype=float32)
    """

    rows: tuple[tuple[int, Pruner], ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        check_rows(self, self.rows)
        check_inner(self, *self.parts, allow_gradient_rules=True)

    @property
    def parts(self) -> tuple[Pruner, ...]:
        return tuple(p for _, p in self.rows)

    def describe(self) -> Facts:
        parts = [p.facts for p in self.parts]
        return (
            super()
            .describe()
            ._replace(selects=all(p.selects for p in parts), keeps_zeros=all(p.keeps_zeros for p in parts))
        )

    @property
    def phases(self) -> tuple[int, ...]:
        starts = [start for start, _ in self.rows]
        inner = (
            step
            for (start, p), end in zip(self.rows, (*starts[1:], math.inf), strict=True)
            for step in p.phases
            if start < step < end
        )
        return tuple(sorted({*starts[1:], *inner}))

    def __call__(self, x: jax.Array, axis: int = -1, ctx: Ctx = Ctx()) -> jax.Array:
        if self._one_m() is not None:
            pruned = self.in_one_pass(x, axis, ctx)
            return jnp.where(self.mask(x, axis, ctx), x, jnp.zeros((), x.dtype)) if pruned is None else pruned
        return self._switch(ctx, lambda p, part: p(x, axis, part))

    def mask(self, x: jax.Array, axis: int = -1, ctx: Ctx = Ctx()) -> jax.Array:
        m = self._one_m()
        if m is not None:
            kept = self.in_one_pass(x, axis, ctx, mask=True)
            return groups.top(x, axis, self._n(ctx, m), m) if kept is None else kept
        return self._switch(ctx, lambda p, part: p.mask(x, axis, part))

    @property
    def kernel_form(self) -> KernelForm:
        m = self._one_m()
        if m is None:
            return KernelForm()
        members = lambda x, u, n, of=None: largest(x, n.astype(jnp.int32), of)
        return KernelForm(members, scalar=lambda ctx, dtype: self._n(ctx, m))

    def _n(self, ctx: Ctx, m: int) -> jax.Array:
        """Return the number of values to keep of every m at a step."""
        ns = jnp.array([p.n if isinstance(p, mse) else m for p in self.parts], jnp.int32)
        return ns[row_at(self.rows, ctx.step)]

    def _one_m(self) -> int | None:
        """Return m if all rows are `mse` with this m or `identity`, at least one `mse`. Otherwise return None."""
        sizes = {p.m for p in self.parts if type(p) is mse}
        same = all(type(p) is mse or p == identity for p in self.parts)
        return sizes.pop() if same and len(sizes) == 1 else None

    def _switch(self, ctx: Ctx, call: Callable[[Pruner, Ctx], jax.Array]) -> jax.Array:
        """Call the pruner of the row that applies."""
        branches = [partial(call, p, part) for p, part in zip(self.parts, split_ctx(self, ctx), strict=True)]
        return lax.switch(row_at(self.rows, ctx.step), branches)

    def kept(self, step: int | None = None, across: bool = False) -> float:
        return super().kept(step, across) if step is None else self._row(step).kept(step, across)

    def _row(self, step: int) -> Pruner:
        return self.parts[self.number(step)]

    def number(self, step: int) -> int:
        """Return the number of the row that applies at a step, from 0."""
        return max(i for i, (start, _) in enumerate(self.rows) if start <= step)

    def at(self, step: int) -> Pruner:
        """Return the pruner of the row that applies; a `stage` if rows have state."""
        row = self._row(step)
        return stage(self, step) if self.facts.has_state else inner_at(row, step)

    @property
    def final(self) -> Pruner:
        return self.parts[-1].final

    def refresh(self, x: jax.Array, axis: int = -1, ctx: Ctx = Ctx()) -> Any:
        contexts = split_ctx(self, ctx)
        rows = zip(self.rows, contexts, strict=True)
        return join_states(_row_state(start, p, x, axis, part) for (start, p), part in rows)

    def final_state(self, state: Any) -> Any:
        return self.parts[-1].final_state(split_ctx(self, Ctx(state=state))[-1].state)


@dataclass(frozen=True, repr=False)
class stage(Pruner):
    """One row of a `stages`, with the state of all rows. `Pruner.at` returns it if rows have state.

    Args:
      whole: The stages.
      step: A step at which the row applies, at least 0.

    >>> import nmjax as nm
    >>> p = nm.stages(((0, nm.hold(nm.mse(2, 4))), (100, identity)))
    >>> p.at(100)
    stage(stages(((0,hold(mse(2,4))),(100,identity))),100)
    >>> p.at(100)(jnp.arange(1.0, 5.0), ctx=nm.Ctx(state=p.init(jnp.arange(1.0, 5.0))))
    Array([1., 2., 3., 4.], dtype=float32)
    """

    whole: stages
    step: int
    reads_step = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.whole, stages) or self.step < 0:
            raise ValueError(f"stage takes a stages and then a step of at least 0, got {self.whole} and {self.step}.")

    @property
    def now(self) -> Pruner:
        """The pruner of the row."""
        return inner_at(self.whole.parts[self.whole.number(self.step)], self.step)

    @property
    def parts(self) -> tuple[Pruner, ...]:
        return (self.now,)

    def __call__(self, x: jax.Array, axis: int = -1, ctx: Ctx = Ctx()) -> jax.Array:
        return self.now(x, axis, self._of_row(ctx))

    def mask(self, x: jax.Array, axis: int = -1, ctx: Ctx = Ctx()) -> jax.Array:
        return self.now.mask(x, axis, self._of_row(ctx))

    def _of_row(self, ctx: Ctx) -> Ctx:
        return split_ctx(self.whole, ctx)[self.whole.number(self.step)]

    def describe(self) -> Facts:
        whole = self.whole.facts
        return self.now.facts._replace(
            block=whole.block, tiles=whole.tiles, needs_key=whole.needs_key, has_state=whole.has_state,
            depends_on_step=whole.depends_on_step,
        )  # fmt: skip

    def normal_form(self) -> NormalForm:
        """Return the normal form of the row, with the path to its state. Storage in the row counts as pruning."""
        inner = self.now.normal_form()
        if inner.storage is not None:
            return NormalForm(core=self, applied=self, rule=inner.rule)
        link = Link(self.whole.number(self.step), len(self.whole.parts), keyed=False)
        return inner._replace(applied=self, core_path=(link, *inner.core_path))

    @property
    def final(self) -> Pruner:
        return self.whole.final

    def final_state(self, state: Any) -> Any:
        return self.whole.final_state(state)

    def init(self, x: jax.Array, axis: int = -1, ctx: Ctx = Ctx()) -> Any:
        return self.whole.init(x, axis, ctx)

    def refresh(self, x: jax.Array, axis: int = -1, ctx: Ctx = Ctx()) -> Any:
        return self.whole.refresh(x, axis, ctx)


def _row_state(start: int, p: Pruner, x: jax.Array, axis: int, ctx: Ctx) -> Any:
    """Return the state of one row of `stages`, initialized when its first step is reached. Measured norms are kept."""
    if not p.facts.has_state:
        return None
    refreshed = p.refresh(x, axis, ctx)
    if start == 0:
        return refreshed
    fresh = lambda: keep_norms(p, p.init(x, axis, ctx.replace(state=None)), refreshed)
    step = jnp.asarray(ctx.step)
    begins = step == start if ctx.since is None else (step >= start) & (jnp.asarray(ctx.since) < start)
    return lax.cond(begins, fresh, lambda: refreshed)
