"""Combinators: pruners made of other pruners."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from nmjax.core import fusion, groups
from nmjax.core.context import Ctx
from nmjax.core.paths import Link, with_part_key
from nmjax.core.pruner import NormalForm, Pattern, Pruner, SamePattern, check_inner, join_states, split_ctx
from nmjax.core.value import show
from nmjax.pruners.magnitude import mse
from nmjax.pruners.nothing import identity
from nmjax.pruners.schedules import check_rows, row_at


@dataclass(frozen=True, repr=False, init=False)
class chain(Pruner):
    """Apply pruners one after another, each to the result of the one before it.

    Args:
      *pruners: The pruners, in the order in which they are applied. An empty chain returns ``x``.

    Raises:
      TypeError: An argument is not a pruner.
      ValueError: An argument, such as `ste`, must be outermost.

    >>> chain(mse(2, 4), mse(1, 4))(jnp.array([1.0, -2.0, 3.1, -4.0]))
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

    @property
    def selects(self) -> bool:
        return all(p.selects for p in self.parts)

    @property
    def pattern(self) -> Pattern | None:
        return _sparsest(p.pattern for p in self.parts)

    @property
    def pattern_across(self) -> Pattern | None:
        return _sparsest(p.pattern_across for p in self.parts)

    def normal_form(self) -> NormalForm:
        """Return the normal form. An `fp8` at the end is the storage. If exactly one other part prunes, it is
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
class stages(Pruner):
    """Use different pruners in different phases of training.

    Paper: Bambhaniya et al., "Progressive Gradient Flow for Robust N:M Sparsity
    Training in Transformers", arXiv:2402.04744.

    Examples are the structure decay of this paper (SdGf) and a dense phase at the end. Step t uses
    the last row whose first step is <= t. Each row's state is initialized at its first step. If every row is `identity`
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

    @property
    def selects(self) -> bool:
        return all(p.selects for p in self.parts)

    def __call__(self, x: jax.Array, axis: int = -1, ctx: Ctx = Ctx()) -> jax.Array:
        if self._one_m() is not None:
            return jnp.where(self.mask(x, axis, ctx), x, jnp.zeros((), x.dtype))
        return self._switch(ctx, lambda p, part: p(x, axis, part))

    def mask(self, x: jax.Array, axis: int = -1, ctx: Ctx = Ctx()) -> jax.Array:
        m = self._one_m()
        if m is not None:
            ns = jnp.array([p.n if isinstance(p, mse) else m for p in self.parts], jnp.int32)
            return groups.top(x, axis, ns[row_at(self.rows, ctx.step)], m)
        return self._switch(ctx, lambda p, part: p.mask(x, axis, part))

    def _one_m(self) -> int | None:
        """Return m if all rows are `mse` with this m or `identity`, at least one `mse`. Otherwise return None."""
        sizes = {p.m for p in self.parts if type(p) is mse}
        same = all(type(p) is mse or p == identity for p in self.parts)
        return sizes.pop() if same and len(sizes) == 1 else None

    def _switch(self, ctx: Ctx, call: Callable[[Pruner, Ctx], jax.Array]) -> jax.Array:
        """Call the pruner of the row that applies."""

        def branch(i: int, p: Pruner) -> Callable[[list[Ctx]], jax.Array]:
            return lambda contexts: call(p, contexts[i])

        branches = [branch(i, p) for i, p in enumerate(self.parts)]
        return lax.switch(row_at(self.rows, ctx.step), branches, split_ctx(self, ctx))

    @property
    def noise_without_rule(self) -> bool:
        return any(p.noise_without_rule for p in self.parts)

    def kept(self, step: int | None = None) -> float:
        return super().kept(step) if step is None else self._row(step).kept(step)

    def kept_across(self, step: int | None = None) -> float:
        return super().kept_across(step) if step is None else self._row(step).kept_across(step)

    def _row(self, step: int) -> Pruner:
        return self.parts[int(row_at(self.rows, step))]

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
class rescale(SamePattern):
    """Multiply the kept values so that the L1 norm is that of the array before pruning.

    Paper: McDanel et al., "Accelerating DNN Training with Structured Data Gradient Pruning", arXiv:2202.00774.

    The method of this paper prunes across channels. It then multiplies the values of each sample and channel, in
    float32, by::

        ||x||_1 / ||p(x)||_1

    An array without axes of space, such as a linear layer's with one axis of samples, has one norm for each group
    instead. If a norm or a product overflows, the result is infinite or NaN.

    Args:
      p: The pruner.
      over: The values that share a norm. "spatial": one norm per sample and channel, over the axes of space. "group":
        one per group. "auto": "spatial" if the array has axes of space, else "group". A plan says which one.

    Raises:
      TypeError: ``p`` is not a pruner.
      ValueError: ``over`` is none of the three, or ``p`` must be outermost, as `ste` must. A call raises it if
        ``over`` is "spatial" and the array has no axes of space.

    >>> rescale(mse(2, 4))(jnp.array([1., 2., 3., 4.]))  # without space: one norm per group
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
        """Return the values that share a norm in an array with these axes of space: "spatial" or "group".

        >>> rescale(mse(2, 4)).over_in((1, 2)), rescale(mse(2, 4)).over_in(())
        ('spatial', 'group')
        """
        if self.over == "spatial" and not space:
            raise ValueError(
                f"{self} needs axes of space, but the array has none apart from those that groups lie along. Write "
                "over='group', or leave over out: it then chooses by the array."
            )
        if self.over != "auto":
            return self.over
        return "spatial" if space else "group"

    def __call__(self, x: jax.Array, axis: int = -1, ctx: Ctx = Ctx()) -> jax.Array:
        y, axis = self.p(x, axis, ctx), groups.position(x.ndim, axis)
        space = ctx.axes_of(x.ndim, axis).space
        by_group = self.over_in(space) == "group"
        view = lambda v: groups.wide(groups.split(v, axis, self.block) if by_group else v)
        norm = lambda v: jnp.sum(jnp.abs(view(v)), (axis + 1,) if by_group else space, keepdims=True)
        norm_y = norm(y)
        ratio = jnp.where(norm_y == 0, 1.0, norm(x) / jnp.where(norm_y == 0, 1.0, norm_y))
        y = view(y)
        scaled = jnp.where(y == 0, y, y * ratio)  # zeros stay zeros: 0 * inf would be NaN
        return fusion.rounded(scaled.reshape(x.shape), x.dtype)

    @property
    def final(self) -> Pruner:
        return rescale(self.p.final, self.over)


@dataclass(frozen=True, repr=False)
class raw(SamePattern):
    """Make a backward slot prune the original operand.

    Without `raw` it prunes the value that the forward product used. `raw` must be the outermost
    pruner of ``dlhs_rhs`` or ``drhs_lhs``.

    Args:
      p: The pruner.

    Raises:
      TypeError: ``p`` is not a pruner.
      ValueError: ``p`` is a pruner that must be outermost, such as `ste`.

    >>> import nmjax as nm
    >>> nm.Sparsity(fwd_rhs=nm.ste(nm.mse(2, 4)), dlhs_rhs=raw(nm.mse(2, 4)))
    fwd_rhs=ste(mse(2,4)); dlhs_rhs=raw(mse(2,4))
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


def _row_state(start: int, p: Pruner, x: jax.Array, axis: int, ctx: Ctx) -> Any:
    """Return the state of one row of `stages`, initialized at the first step of the row."""
    if not p.has_state:
        return None
    refreshed = p.refresh(x, axis, ctx)
    if start == 0:
        return refreshed
    fresh = lambda: p.init(x, axis, ctx.replace(state=None))
    return lax.cond(jnp.asarray(ctx.step) == start, fresh, lambda: refreshed)
