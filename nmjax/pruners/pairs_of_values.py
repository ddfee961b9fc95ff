"""Pairs: an n:m choice of pairs of neighbours, which are kept or dropped together.

Blackwell's sparse products of FP4 operands take groups of eight values along the contraction, which are four pairs, of
which two are kept: 4:8 of pairs (NVIDIA, PTX ISA, ``tcgen05.mma.sp`` with ``.kind::mxf4nvf4``).

For vectors v_i in the place of values, the unbiased choice with the least variance has the probabilities of `mvue` of
the norms |v_i|: the variance is ``sum |v_i|^2 (1 / p_i - 1)``.
"""

from dataclasses import dataclass
from typing import Any

import jax

from nmjax.core import groups
from nmjax.core.bases import ByParts, inner_at
from nmjax.core.context import Axes, Ctx
from nmjax.core.pruner import Facts, Pruner, check_inner
from nmjax.pruners.nothing import identity
from nmjax.pruners.whole_rows import meaningless, rows


@dataclass(frozen=True, repr=False)
class pairs(ByParts):
    """Prune pairs of neighbours along the axis: ``p`` prunes their L2 norms, as in `rows`.

    Each pair is multiplied by p(norm)/norm. With `mvue` the result is unbiased, with the least variance that a choice
    of pairs can have. With `mse` the largest pairs are kept as they are.

    Args:
      p: A pruner of the norms, such as ``mvue(2, 4)``. The result is then 4:8.

    Raises:
      TypeError: ``p`` is not a pruner.
      ValueError: ``p`` has no meaning for norms.

    >>> import nmjax as nm
    >>> nm.pairs(nm.mse(1, 2))(jax.numpy.array([3.0, 0.0, -2.0, 2.5]))
    Array([ 0. ,  0. , -2. ,  2.5], dtype=float32)
    """

    p: Pruner
    reads_step = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_inner(self, self.p)
        reason = meaningless(self.p, "pairs")
        if reason is not None:
            raise ValueError(f"{self}: {reason}")

    def describe(self) -> Facts:
        p = rows(self.p).facts
        pattern = None if p.pattern is None else (2 * p.pattern[0], 2 * p.pattern[1])
        return p._replace(block=2 * p.block, pattern=pattern)

    def __call__(self, x: jax.Array, axis: int = -1, ctx: Ctx = Ctx()) -> jax.Array:
        return rows(self.p)(*_view(x, axis, ctx)).reshape(x.shape)

    def mask(self, x: jax.Array, axis: int = -1, ctx: Ctx = Ctx()) -> jax.Array:
        return rows(self.p).mask(*_view(x, axis, ctx)).reshape(x.shape)

    def at(self, step: int) -> Pruner:
        now = inner_at(rows(self.p), step)
        return pairs(now.p) if isinstance(now, rows) else now

    @property
    def final(self) -> Pruner:
        final = self.p.final
        return final if final == identity else pairs(final)

    def init(self, x: jax.Array, axis: int = -1, ctx: Ctx = Ctx()) -> Any:
        return rows(self.p).init(*_view(x, axis, ctx))

    def refresh(self, x: jax.Array, axis: int = -1, ctx: Ctx = Ctx()) -> Any:
        return rows(self.p).refresh(*_view(x, axis, ctx))


def _view(x: jax.Array, axis: int, ctx: Ctx) -> tuple[jax.Array, int, Ctx]:
    """Return an array whose rows are the pairs, with the axis that they lie along, and the context."""
    axis = groups.position(x.ndim, axis)
    pairs = groups.split(x, axis, 2)
    apart = tuple(a for a in range(pairs.ndim) if a not in (axis, axis + 1))
    return pairs, axis, ctx.replace(axes=Axes(None, (), apart), partner=None)
