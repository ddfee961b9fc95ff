"""The linear operations as frozen values: which axes each operand contracts, and how an einsum is a dot."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from nmjax.core import groups
from nmjax.products.pruning import Operand, Shaped

Axes = tuple[int, ...]
DimensionNumbers = tuple[tuple[Axes, Axes], tuple[Axes, Axes]]


class Operation(Protocol):
    """A bilinear function of two arrays, as a frozen value that knows the axes of its operands."""

    @property
    def preferred_element_type(self) -> Any:
        """The dtype of the result; None if it is the operands'."""
        ...

    @property
    def out_sharding(self) -> Any:
        """The sharding that the caller wants of the result; None if XLA chooses."""
        ...

    @property
    def __call__(self) -> Callable[..., jax.Array]:
        """The product of lhs and rhs. It must be linear in each of them, because JAX transposes it.

        Further operands, such as the sizes of a `RaggedDot`, are not differentiated.
        """
        ...

    def operands(self, lhs_ndim: int, rhs_ndim: int) -> dict[str, Operand]:
        """Return where the axes of every slot's operand lie, by slot."""
        ...


@dataclass(frozen=True)
class Dot:
    """`jax.lax.dot_general` as a value."""

    dims: DimensionNumbers
    precision: Any
    preferred_element_type: Any
    out_sharding: Any

    def __call__(self, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        return lax.dot_general(
            lhs, rhs, self.dims, self.precision, self.preferred_element_type, out_sharding=self.out_sharding
        )  # fmt: skip

    def operands(self, lhs_ndim: int, rhs_ndim: int) -> dict[str, Operand]:
        (lc, rc), (lb, rb) = self.dims
        lf = tuple(a for a in range(lhs_ndim) if a not in lc + lb)
        rf = tuple(a for a in range(rhs_ndim) if a not in rc + rb)
        g_b, g_lf = tuple(range(len(lb))), tuple(range(len(lb), len(lb) + len(lf)))
        g_rf = tuple(range(len(lb) + len(lf), len(lb) + len(lf) + len(rf)))

        def operand(ndim: int, contract: Axes, other: Axes, batch: Axes) -> Operand:
            space = tuple(a for a in range(1, ndim - 1) if a not in contract + batch)
            return Operand(contract, other, space, batch)

        g_ndim = len(lb + lf + rf)
        return {
            "y_x": operand(lhs_ndim, lc, lf, lb),
            "y_w": operand(rhs_ndim, rc, rf, rb),
            "dx_g": operand(g_ndim, g_rf, g_lf, g_b),
            "dx_w": operand(rhs_ndim, rf, rc, rb),
            "dw_g": operand(g_ndim, g_lf, g_rf, g_b),
            "dw_x": operand(lhs_ndim, lf, lc, lb),
        }


@dataclass(frozen=True)
class Conv:
    """`jax.lax.conv_general_dilated` as a value. Groups lie along channels, and for dw along batch and space."""

    window_strides: tuple[int, ...]
    padding: Any
    lhs_dilation: Any
    rhs_dilation: Any
    dims: lax.ConvDimensionNumbers
    feature_group_count: int
    batch_group_count: int
    precision: Any
    preferred_element_type: Any
    out_sharding: Any

    def __call__(self, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
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
            "y_x": Operand((xc,), (xb,), space(xs), runs=features),
            "y_w": Operand((wi,), (wo,), space(ws), other_runs=features * batches),
            "dx_g": Operand((gc,), (gb,), space(gs), runs=features * batches),
            "dx_w": Operand((wo,), (wi,), space(ws), runs=features * batches),
            "dw_g": Operand((gb, *space(gs)), (gc,), space(gs)),
            "dw_x": Operand((xb, *space(xs)), (xc,), space(xs), runs=batches),
        }


@dataclass(frozen=True)
class RaggedDot:
    """`jax.lax.ragged_dot` as a value: the tokens of each expert, times the expert's matrix.

    The operands have the shapes [tokens, in] and [experts, in, out]. A third one says how many tokens each expert has.
    A group along tokens has tokens of one expert (`nmjax.products.ragged`).
    """

    precision: Any
    preferred_element_type: Any

    @property
    def out_sharding(self) -> Any:
        return None

    def __call__(self, lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array) -> jax.Array:
        with plain_vmap_error():
            return lax.ragged_dot(lhs, rhs, group_sizes, self.precision, self.preferred_element_type)

    def operands(self, lhs_ndim: int, rhs_ndim: int) -> dict[str, Operand]:
        return {
            "y_x": Operand((1,), (0,), ()),
            "y_w": Operand((1,), (2,), ()),
            "dx_g": Operand((1,), (0,), ()),
            "dx_w": Operand((2,), (1,), ()),
            "dw_g": Operand((0,), (1,), (), ragged=True),
            "dw_x": Operand((0,), (1,), (), ragged=True),
        }


@contextmanager
def plain_vmap_error() -> Iterator[None]:
    """Say in plain words that `jax.vmap` maps a part of the operands of a grouped product. JAX has no rule for that."""
    try:
        yield
    except NotImplementedError as error:
        if "vmap" not in str(error):
            raise
        raise NotImplementedError(
            "jax.vmap of ragged_dot must map the tokens, the weights and the group sizes, all three; JAX has not "
            "implemented the rest. A step or a key that vmap maps also maps what is pruned with it. Write jax.lax.map "
            "in the place of jax.vmap."
        ) from error


def result_shape(op: Operation, lhs: Shaped, rhs: Shaped) -> jax.ShapeDtypeStruct:
    """Return the shape and dtype of a product of operands of these shapes."""
    extra = (jax.ShapeDtypeStruct(rhs.shape[:1], jnp.int32),) if isinstance(op, RaggedDot) else ()
    return jax.eval_shape(op, *(jax.ShapeDtypeStruct(v.shape, v.dtype) for v in (lhs, rhs)), *extra)


def as_dot(
    lhs: Shaped, rhs: Shaped, dimension_numbers: Any, precision: Any = None, preferred_element_type: Any = None,
    out_sharding: Any = None,
) -> Dot:  # fmt: skip
    """Return the arguments of `jax.lax.dot_general` as a value."""
    (lc, rc), (lb, rb) = dimension_numbers
    dims = ((_axes(lc, lhs), _axes(rc, rhs)), (_axes(lb, lhs), _axes(rb, rhs)))
    precision = tuple(precision) if isinstance(precision, list) else precision
    return Dot(dims, precision, _dtype(preferred_element_type), out_sharding)


def _axes(axes: Sequence[int], x: Shaped) -> tuple[int, ...]:
    return tuple(groups.position(x.ndim, int(a)) for a in axes)


def as_ragged_dot(
    lhs: Shaped, rhs: Shaped, group_sizes: Shaped, precision: Any = None, preferred_element_type: Any = None
) -> RaggedDot:
    """Return the arguments of `jax.lax.ragged_dot` as a value.

    Raises:
      TypeError: The group sizes are not an array.
      ValueError: The operands do not have the axes of a grouped product.
    """
    if not hasattr(group_sizes, "shape"):
        raise TypeError(f"ragged_dot takes group sizes as an array, got {group_sizes!r}. Write jnp.array(...).")
    shapes = tuple(lhs.shape), tuple(rhs.shape), tuple(group_sizes.shape)
    if tuple(map(len, shapes)) != (2, 3, 1) or lhs.shape[1:] != rhs.shape[1:2] or rhs.shape[:1] != group_sizes.shape:
        raise ValueError(
            "ragged_dot takes tokens [tokens, in], sorted by expert, weights [experts, in, out] and group sizes "
            f"[experts], got shapes {', '.join(map(str, shapes))}. Write x.reshape(-1, x.shape[-1]) to flatten tokens."
        )
    precision = tuple(precision) if isinstance(precision, list) else precision
    return RaggedDot(precision, _dtype(preferred_element_type))


def as_conv(
    lhs: Shaped, rhs: Shaped, window_strides: Sequence[int], padding: Any, lhs_dilation: Any = None,
    rhs_dilation: Any = None, dimension_numbers: Any = None, feature_group_count: int = 1, batch_group_count: int = 1,
    precision: Any = None, preferred_element_type: Any = None, out_sharding: Any = None,
) -> Conv:  # fmt: skip
    """Return the arguments of `jax.lax.conv_general_dilated` as a value."""
    padding = padding if isinstance(padding, str) else tuple(_ints(pair) for pair in padding)
    dims = lax.conv_dimension_numbers(lhs.shape, rhs.shape, dimension_numbers)
    precision = tuple(precision) if isinstance(precision, list) else precision
    return Conv(
        _ints(window_strides), padding, _dilation(lhs_dilation), _dilation(rhs_dilation), dims,
        int(feature_group_count), int(batch_group_count), precision, _dtype(preferred_element_type), out_sharding,
    )  # fmt: skip


def _ints(values: Sequence[int]) -> tuple[int, ...]:
    return tuple(map(int, values))


def _dilation(values: Sequence[int] | None) -> tuple[int, ...] | None:
    return None if values is None else _ints(values)


Labels = list[str | int]


def einsum_dims(spec: str, lhs_ndim: int, rhs_ndim: int) -> tuple[DimensionNumbers, list[int]]:
    """Return an einsum as dimension numbers of a dot, and the order of that dot's axes in the result."""
    left, right, out = einsum_labels(spec, lhs_ndim, rhs_ndim)
    batch = [c for c in left if c in right and c in out]
    summed = [c for c in right if c in left and c not in out]
    positions = lambda side, labels: tuple(map(side.index, labels))
    contract = (positions(left, summed), positions(right, summed))
    batched = (positions(left, batch), positions(right, batch))
    labels = batch + [c for c in left if c not in right] + [c for c in right if c not in left]
    return (contract, batched), [labels.index(c) for c in out]


def einsum_operands(spec: str, lhs: jax.Array, rhs: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the operands of an einsum with axes of length 1 as long as those of the other operand."""
    left, right, _ = einsum_labels(spec, lhs.ndim, rhs.ndim)
    sizes = [dict(zip(left, lhs.shape, strict=True)), dict(zip(right, rhs.shape, strict=True))]
    longest = {c: max(of.get(c, 0) for of in sizes) for c in left + right}
    wide = lambda labels, v: tuple(longest[c] if n == 1 else n for c, n in zip(labels, v.shape, strict=True))
    return jnp.broadcast_to(lhs, wide(left, lhs)), jnp.broadcast_to(rhs, wide(right, rhs))


def einsum_labels(spec: str, lhs_ndim: int, rhs_ndim: int) -> tuple[Labels, Labels, Labels]:
    """Return the labels of both operands and of the result. Axes of an ellipsis are negative integers.

    Raises:
      ValueError: If it is not a product of two operands.
    """
    inputs, arrow, out = spec.replace(" ", "").partition("->")
    operands = inputs.split(",")
    if len(operands) != 2:
        raise ValueError(
            f"einsum {spec!r} has {len(operands)} operands, and a product has two. Split it, or use jnp.einsum if "
            "nothing is pruned."
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
                f"einsum {spec!r} sums {shown!r} over one operand alone, which is no product. Sum it first."
            )
    return left, right, result


def _dtype(dtype: Any) -> Any:
    return None if dtype is None else jnp.dtype(dtype)
