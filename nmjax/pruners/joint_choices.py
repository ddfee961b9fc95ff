"""Joint choices: an n:m choice of pieces of an array, each of which is kept or dropped as a whole.

A piece is a vector in the place of a value. The unbiased choice of vectors v_i with the least variance has the
probabilities of `mvue` of the norms |v_i|: the variance is ``sum |v_i|^2 (1 / p_i - 1)``.

Pairs are for FP4: Blackwell's sparse products of FP4 operands take groups of eight values along the contraction, which
are four pairs, of which two are kept: 4:8 of pairs (NVIDIA, PTX ISA, ``tcgen05.mma.sp`` with ``.kind::mxf4nvf4``).

Values that v neighbours share are V:N:M: of every m columns the same few are kept in v consecutive rows, and inside
them each row is 2:4 (Castro et al., "VENOM: A Vectorized N:M Format for Unleashing the Power of Sparse Tensor Cores",
arXiv 2310.02065). A product gathers the kept columns, and multiplies them by sparse tensor cores.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax

from nmjax.core import groups
from nmjax.core.bases import ByParts, inner_at
from nmjax.core.context import Axes, Ctx
from nmjax.core.pruner import Facts, Pruner, check_inner
from nmjax.pruners.nothing import identity
from nmjax.pruners.whole_rows import meaningless, rows


@dataclass(frozen=True, repr=False)
class _Joint(ByParts):
    """The base of pruners of pieces: ``p`` prunes their L2 norms, and each piece is multiplied by p(norm)/norm.

    `rows` does it, for an array whose rows are the pieces. A subclass defines `_pieces`.
    """

    p: Pruner
    reads_step = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_inner(self, self.p)
        reason = meaningless(self.p, type(self).__name__)
        if reason is not None:
            raise ValueError(f"{self}: {reason}")

    def _pieces(self, x: jax.Array, axis: int, other: int | None) -> tuple[jax.Array, int, tuple[int, ...]]:
        """Return an array whose rows are the pieces, the axis that they lie along, and the axes of a piece."""
        raise NotImplementedError

    def _view(self, x: jax.Array, axis: int, ctx: Ctx) -> tuple[jax.Array, int, Ctx]:
        """Return what `rows` is called with."""
        axis = groups.position(x.ndim, axis)
        pieces, axis, own = self._pieces(x, axis, ctx.axes_of(x.ndim, axis).other)
        apart = tuple(a for a in range(pieces.ndim) if a not in (axis, *own))
        return pieces, axis, ctx.replace(axes=Axes(None, (), apart), partner=None)

    def describe(self) -> Facts:
        return rows(self.p).facts

    def __call__(self, x: jax.Array, axis: int = -1, ctx: Ctx = Ctx()) -> jax.Array:
        return rows(self.p)(*self._view(x, axis, ctx)).reshape(x.shape)

    def mask(self, x: jax.Array, axis: int = -1, ctx: Ctx = Ctx()) -> jax.Array:
        return rows(self.p).mask(*self._view(x, axis, ctx)).reshape(x.shape)

    def at(self, step: int) -> Pruner:
        now = inner_at(rows(self.p), step)
        return replace(self, p=now.p) if isinstance(now, rows) else now

    @property
    def final(self) -> Pruner:
        final = self.p.final
        return final if final == identity else replace(self, p=final)

    def init(self, x: jax.Array, axis: int = -1, ctx: Ctx = Ctx()) -> Any:
        return rows(self.p).init(*self._view(x, axis, ctx))

    def refresh(self, x: jax.Array, axis: int = -1, ctx: Ctx = Ctx()) -> Any:
        return rows(self.p).refresh(*self._view(x, axis, ctx))


@dataclass(frozen=True, repr=False)
class pairs(_Joint):
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

    def describe(self) -> Facts:
        p = super().describe()
        pattern = None if p.pattern is None else (2 * p.pattern[0], 2 * p.pattern[1])
        return p._replace(block=2 * p.block, pattern=pattern)

    def _pieces(self, x: jax.Array, axis: int, other: int | None) -> tuple[jax.Array, int, tuple[int, ...]]:
        return groups.split(x, axis, 2), axis, (axis + 1,)


@dataclass(frozen=True, repr=False)
class shared(_Joint):
    """Let v neighbours along the other axis share a choice: ``p`` prunes their L2 norms.

    Each v values are multiplied by p(norm)/norm. With `mvue` the result is unbiased.

    ``chain(shared(mse(4,8),16),mse(2,8))`` is 16:2:8 of VENOM: of every 8 columns, 4 are kept in 16 consecutive rows,
    and 2 of them in each row. So is ``chain(shared(mvue(4,8),16),mvue(2,8))``, and it is unbiased.

    Args:
      p: A pruner of the norms, such as ``mse(4, 8)``.
      v: The number of neighbours, which must divide the other axis: tokens for activations, outputs for weights.

    Raises:
      TypeError: ``p`` is not a pruner.
      ValueError: ``p`` has no meaning for norms, or v is less than 1. In a call: there is no other axis, or v does not
        divide it.

    >>> import nmjax as nm
    >>> nm.shared(nm.mse(1, 2), 2)(jax.numpy.array([[3.0, 2.0], [0.0, 2.5]]))
    Array([[0. , 2. ],
           [0. , 2.5]], dtype=float32)
    """

    v: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.v < 1:
            raise ValueError(f"{self}: v is the number of neighbours that share a choice, at least 1.")

    def _pieces(self, x: jax.Array, axis: int, other: int | None) -> tuple[jax.Array, int, tuple[int, ...]]:
        if other is None:
            raise ValueError(
                f"{self}: this array has no other axis, along which neighbours could share. Write {self.p}."
            )
        if x.shape[other] % self.v:
            raise ValueError(
                f"{self}: axis {other} of an array of shape {x.shape} has {x.shape[other]} values, which {self.v} "
                f"neighbours do not divide. Choose a v that divides {x.shape[other]}."
            )
        return groups.split(x, other, self.v), axis + (other < axis), (other + 1,)
