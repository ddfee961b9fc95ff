"""The linear operations as frozen values: which axes each operand contracts, and how an einsum is a dot."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax

from nmjax.core import groups
from nmjax.products.sparsity import Operand


@dataclass(frozen=True)
class Dot:
    """`jax.lax.dot_general` as a value."""

    dims: tuple
    precision: Any
    preferred_element_type: Any
    out_sharding: Any

    def __call__(self, lhs, rhs):
        return lax.dot_general(
            lhs, rhs, self.dims, self.precision, self.preferred_element_type, out_sharding=self.out_sharding
        )  # fmt: skip

    def operands(self, lhs_ndim: int, rhs_ndim: int) -> dict[str, Operand]:
        (lc, rc), (lb, rb) = self.dims
        lf = tuple(a for a in range(lhs_ndim) if a not in lc + lb)
        rf = tuple(a for a in range(rhs_ndim) if a not in rc + rb)
        g_lf = tuple(range(len(lb), len(lb) + len(lf)))
        g_rf = tuple(range(len(lb) + len(lf), len(lb) + len(lf) + len(rf)))
        between = lambda ndim, contract: tuple(a for a in range(1, ndim - 1) if a not in contract)
        return {
            "fwd_lhs": Operand(lc, lf, between(lhs_ndim, lc)),
            "fwd_rhs": Operand(rc, rf, between(rhs_ndim, rc)),
            "dlhs_g": Operand(g_rf, g_lf, between(len(lb + lf + rf), g_rf)),
            "dlhs_rhs": Operand(rf, rc, between(rhs_ndim, rf)),
            "drhs_g": Operand(g_lf, g_rf, between(len(lb + lf + rf), g_lf)),
            "drhs_lhs": Operand(lf, lc, between(lhs_ndim, lf)),
        }


@dataclass(frozen=True)
class Conv:
    """`jax.lax.conv_general_dilated` as a value. Groups lie along channels, and for dw along batch and space."""

    window_strides: tuple
    padding: Any
    lhs_dilation: Any
    rhs_dilation: Any
    dims: lax.ConvDimensionNumbers
    feature_group_count: int
    batch_group_count: int
    precision: Any
    preferred_element_type: Any
    out_sharding: Any

    def __call__(self, lhs, rhs):
        options = {} if self.out_sharding is None else {"out_sharding": self.out_sharding}
        return lax.conv_general_dilated(
            lhs, rhs, self.window_strides, self.padding, self.lhs_dilation, self.rhs_dilation, self.dims,
            self.feature_group_count, self.batch_group_count, self.precision, self.preferred_element_type, **options,
        )  # fmt: skip

    def operands(self, lhs_ndim: int, rhs_ndim: int) -> dict[str, Operand]:
        (xb, xc, *xs), (wo, wi, *ws), (gb, gc, *gs) = self.dims.lhs_spec, self.dims.rhs_spec, self.dims.out_spec
        space = lambda axes: tuple(sorted(axes))
        features, batches = self.feature_group_count, self.batch_group_count
        return {
            "fwd_lhs": Operand((xc,), (xb,), space(xs), features),
            "fwd_rhs": Operand((wi,), (wo,), space(ws)),
            "dlhs_g": Operand((gc,), (gb,), space(gs), features * batches),
            "dlhs_rhs": Operand((wo,), (wi,), space(ws), features * batches),
            "drhs_g": Operand((gb, *space(gs)), (gc,), space(gs)),
            "drhs_lhs": Operand((xb, *space(xs)), (xc,), space(xs), batches),
        }


def as_dot(lhs, rhs, dimension_numbers, precision=None, preferred_element_type=None, out_sharding=None) -> Dot:
    """The arguments of `jax.lax.dot_general` as a value."""
    (lc, rc), (lb, rb) = dimension_numbers
    whole = lambda axes, ndim: tuple(groups.position(ndim, int(a)) for a in axes)
    dims = ((whole(lc, lhs.ndim), whole(rc, rhs.ndim)), (whole(lb, lhs.ndim), whole(rb, rhs.ndim)))
    precision = tuple(precision) if isinstance(precision, list) else precision
    return Dot(dims, precision, _dtype(preferred_element_type), out_sharding)


def as_conv(
    lhs, rhs, window_strides, padding, lhs_dilation=None, rhs_dilation=None, dimension_numbers=None,
    feature_group_count=1, batch_group_count=1, precision=None, preferred_element_type=None, out_sharding=None,
) -> Conv:  # fmt: skip
    """The arguments of `jax.lax.conv_general_dilated` as a value."""
    ints = lambda v: None if v is None else tuple(map(int, v))
    padding = padding if isinstance(padding, str) else tuple(ints(pair) for pair in padding)
    dims = lax.conv_dimension_numbers(lhs.shape, rhs.shape, dimension_numbers)
    precision = tuple(precision) if isinstance(precision, list) else precision
    return Conv(
        ints(window_strides), padding, ints(lhs_dilation), ints(rhs_dilation), dims, int(feature_group_count),
        int(batch_group_count), precision, _dtype(preferred_element_type), out_sharding,
    )  # fmt: skip


def einsum_dims(spec: str, lhs_ndim: int, rhs_ndim: int) -> tuple[tuple, list[int]]:
    """An einsum as dimension numbers of a dot, and the order of that dot's axes in the result."""
    left, right, out = einsum_labels(spec, lhs_ndim, rhs_ndim)
    batch = [c for c in left if c in right and c in out]
    summed = [c for c in right if c in left and c not in out]
    dims = tuple(tuple(tuple(map(side.index, axes)) for side in (left, right)) for axes in (summed, batch))
    made = batch + [c for c in left if c not in right] + [c for c in right if c not in left]
    return dims, [made.index(c) for c in out]


def einsum_labels(spec: str, lhs_ndim: int, rhs_ndim: int) -> tuple[list, list, list]:
    """The labels of both operands and of the result, an ellipsis spelt out."""
    inputs, arrow, out = spec.replace(" ", "").partition("->")
    operands = inputs.split(",")
    if len(operands) != 2:
        raise ValueError(
            f"einsum {spec!r} has {len(operands)} operands: a product has two. Split it, or use jnp.einsum for what is not pruned."
        )
    sides = []
    for labels, ndim in zip(operands, (lhs_ndim, rhs_ndim), strict=True):
        head, dots, tail = labels.partition("...")
        hidden = ndim - len(head) - len(tail)
        if hidden < 0 or (hidden and not dots):
            raise ValueError(f"einsum {spec!r}: {labels!r} does not fit an operand of {ndim} dimensions.")
        sides.append([*head, *range(-hidden, 0), *tail])
    left, right = sides
    hidden = sorted({c for c in left + right if isinstance(c, int)})
    if arrow:
        head, dots, tail = out.partition("...")
        result = [*head, *(hidden if dots else []), *tail]
    else:
        result = hidden + sorted(c for c in {*left, *right} - {*hidden} if (left + right).count(c) == 1)
    for side in (left, right, result):
        if repeated := {c for c in side if side.count(c) > 1}:
            raise ValueError(
                f"einsum {spec!r} repeats {repeated} within one array, a diagonal. Take it with jnp.diagonal first."
            )
    if unknown := [c for c in result if c not in left + right]:
        raise ValueError(f"einsum {spec!r}: {unknown} of the result is in neither operand.")
    for c in left + right:
        if c not in result and not (c in left and c in right):
            shown = c if isinstance(c, str) else "..."
            raise ValueError(
                f"einsum {spec!r} sums {shown!r} over one operand alone, which is no product. Sum it before."
            )
    return left, right, result


def _dtype(dtype):
    return None if dtype is None else jnp.dtype(dtype)
