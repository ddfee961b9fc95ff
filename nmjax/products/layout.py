"""The operands of a layer as matrices.

Kernels see each operand as a matrix. Its axes are two of T (tokens), I (in-features) and O (out-features). Each product
contracts the axis that its result does not have::

    y [T, O] = x . w    over I            dx = g . w    over O            dw = x . g    over T
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import jax

from nmjax.core.refusal import Refusal
from nmjax.products.compaction import tokens_refusal
from nmjax.products.operations import Conv, Dot, Operation, RaggedDot, result_shape
from nmjax.products.pruning import Shaped

CONTRACTED = {"y": "I", "dx": "O", "dw": "T"}
OPERANDS = {  # product -> operand -> the slot that prunes it
    "y": {"x": "y_x", "w": "y_w"},
    "dx": {"g": "dx_g", "w": "dx_w"},
    "dw": {"g": "dw_g", "x": "dw_x"},
}
LAID_AS = {"y": "g", "dx": "x", "dw": "w"}  # product -> the operand whose axes its result has


class Matrix(NamedTuple):
    """An operand as a matrix: its two axes, such as "TI", and the shape of the array. The second axis is contiguous."""

    axes: str
    shape: tuple[int, ...]


class Layout(NamedTuple):
    """The operands of a layer as matrices, and the sizes of their axes. B is the leading batch axis."""

    x: Matrix
    w: Matrix
    g: Matrix
    sizes: tuple[tuple[str, int], ...]

    def matrix(self, operand: str) -> Matrix:
        """Return the matrix of "x", "w" or "g"."""
        return {"x": self.x, "w": self.w, "g": self.g}[operand]

    def size(self, axis: str) -> int:
        """Return the size of T, I, O or B."""
        return dict(self.sizes)[axis]

    def sides(self, operand: str) -> list[int]:
        """Return the two sizes of an operand's matrix."""
        return [self.size(axis) for axis in self.matrix(operand).axes]


def layout_of(op: Operation, lhs: Shaped, rhs: Shaped) -> Layout | Refusal:
    """Return the layout of the operands as matrices."""
    if isinstance(op, RaggedDot):
        return Refusal("it is a grouped product, and kernels multiply two matrices")
    if isinstance(op, Conv):
        return _of_convolution(op, lhs, rhs)
    assert isinstance(op, Dot)
    (lc, rc), (lb, rb) = op.dims
    lf = tuple(a for a in range(len(lhs.shape)) if a not in lc + lb)
    rf = tuple(a for a in range(len(rhs.shape)) if a not in rc + rb)
    x_axes, w_axes = _order(lb, {"T": lf, "I": lc}), _order(rb, {"O": rf, "I": rc})
    for name, axes, v in (("x", x_axes, lhs), ("w", w_axes, rhs)):
        if axes is None:
            return Refusal(
                f"the axes of {name} {tuple(v.shape)} are not in an order that reads as a matrix without moving them"
            )
    size = lambda v, axes: math.prod(v.shape[a] for a in axes)
    sizes = (("T", size(lhs, lf)), ("I", size(lhs, lc)), ("O", size(rhs, rf)), ("B", size(lhs, lb)))
    g_shape = jax.eval_shape(op, lhs, rhs).shape
    return Layout(Matrix(str(x_axes), lhs.shape), Matrix(str(w_axes), rhs.shape), Matrix("TO", g_shape), sizes)


def _of_convolution(op: Conv, lhs: Shaped, rhs: Shaped) -> Layout | Refusal:
    """Return the layout of a convolution whose kernel is 1: a matrix product with a row for each position."""
    refusal = tokens_refusal(op, lhs, rhs, "x")
    if refusal is not None:
        return Refusal(f"{refusal.reason}, and kernels multiply matrices")
    y = result_shape(op, lhs, rhs)
    for name, v, spec in (("x", lhs, op.dims.lhs_spec), ("y", y, op.dims.out_spec)):
        if spec[0] or spec[1] != len(spec) - 1:
            return Refusal(
                f"{name} {tuple(v.shape)} does not have the batch first and the channels last, so it does not read as "
                "a matrix"
            )
    out, inward = op.dims.rhs_spec[:2]
    w_axes = "OI" if out < inward else "IO"  # the other axes have one value
    sizes = (("T", math.prod(lhs.shape[:-1])), ("I", lhs.shape[-1]), ("O", y.shape[-1]), ("B", 1))
    return Layout(Matrix("TI", lhs.shape), Matrix(w_axes, rhs.shape), Matrix("TO", y.shape), sizes)


def _order(batch: tuple[int, ...], parts: Mapping[str, tuple[int, ...]]) -> str | None:
    """Return the names of two parts in the order of their axes, such as "TI". None if the axes of an operand are not
    those of the batch, then of one part, then of the other."""
    for first, second in (tuple(parts), tuple(parts)[::-1]):
        axes = (*batch, *parts[first], *parts[second])
        if axes == tuple(range(len(axes))):
            return first + second
    return None
