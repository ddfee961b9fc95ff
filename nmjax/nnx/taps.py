"""Record statistics of the inputs of layers.

A tap is a variable whose gradient is defined as a statistic of the layer's input. So one call of `jax.grad` returns the
statistics of all layers, also under scans and `nnx.remat`.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from nmjax.nnx.layer import Layer
from nmjax.products.operations import Conv, Dot, Operation, RaggedDot
from nmjax.programs.rewriting import Product

BLOCK = 1 << 11  # rows that are summed in float32 as they are


class Axes(NamedTuple):
    """The axes of a weight, by their part in one-shot pruning.

    Attributes:
      batch: The axes of independent products, such as experts.
      features: The axes that the product contracts. The innermost, along which groups lie, is the last.
      outputs: The others.
    """

    batch: tuple[int, ...]
    features: tuple[int, ...]
    outputs: tuple[int, ...]


def axes_of(op: Operation, rank: int) -> Axes:
    """Return the axes of the weight of a product.

    Args:
      op: The product.
      rank: The number of axes of the weight.

    Raises:
      ValueError: The product is a convolution in feature groups, whose parts see different inputs.
    """
    if isinstance(op, Conv) and (op.feature_group_count > 1 or op.batch_group_count > 1):
        raise ValueError("convolutions in groups cannot be calibrated.")
    operand = op.operands(rank, rank)["y_w"] if isinstance(op, Conv) else op.operands(2, rank)["y_w"]
    batch = op.dims[1][1] if isinstance(op, Dot) else (0,) if isinstance(op, RaggedDot) else ()
    features = (*operand.space, *operand.contract) if isinstance(op, Conv) else operand.contract
    return Axes(batch, features, tuple(a for a in range(rank) if a not in (*batch, *features)))


class Tap(nnx.Param[jax.Array]):
    """A variable whose gradient is a statistic. As a parameter it is sliced and stacked as the kernel is."""


class Meter(nnx.Module):
    """Replaces the product of a layer, dense or pruned, by one that also records its input."""

    def __init__(self, layer: Layer, stack: Sequence[int], shape: Sequence[int], axes: Axes, moments: bool) -> None:
        """Make the taps.

        Args:
          layer: The layer.
          stack: The sizes of the axes of the stack.
          shape: The shape of the operand that is made of one layer's weight.
          axes: Its axes.
          moments: True for second moments, False for sums of squares.
        """
        self.name = layer.path
        self.state = layer.state  # it computes the product of a sparse layer
        features = math.prod(shape[a] for a in axes.features)
        lead = (*stack, *(shape[a] for a in axes.batch))
        self.moments = moments
        self.rank = len(axes.batch) + (2 if moments else 1)  # of the statistic of one layer
        self.tap = Tap(jnp.zeros((*lead, features, features) if moments else (*lead, features)))
        self.tokens = Tap(jnp.zeros((*lead, 1)))

    def _multiply(self, product: Product, x: jax.Array, w: jax.Array) -> jax.Array:
        """Return the product, and record its input."""
        x = self._tapped(x, product.op, w.shape, product.extra)
        return product.op(x, w, *product.extra) if self.state is None else self.state._multiply(product, x, w)

    def _tapped(self, x: jax.Array, op: Any, shape: tuple[int, ...], extra: tuple[Any, ...]) -> jax.Array:
        if self.tap[...].ndim != self.rank:
            raise ValueError(
                f"{self.name}: the call slices this layer's parameters along an axis other than 0, which calibration "
                "does not support."
            )
        return _passed(x, self.tap[...], self.tokens[...], extra, (op, shape, self.moments))


def _forward(x: jax.Array, tap: jax.Array, tokens: jax.Array, extra: tuple[Any, ...], about: Any) -> Any:
    return x, (x, tap, tokens, extra)


def _backward(about: Any, kept: Any, g: jax.Array) -> Any:
    op, shape, moments = about
    x, tap, tokens, extra = kept
    statistic, count = (
        _of_experts(x, extra[0], moments) if isinstance(op, RaggedDot) else _of_rows(op, x, shape, moments)
    )
    none = jax.tree.map(lambda v: jnp.zeros(v.shape, jax.dtypes.float0), extra)
    return g, statistic.reshape(tap.shape), jnp.broadcast_to(count, tokens.shape).astype(jnp.float32), none


_passed: Any = jax.custom_vjp(lambda x, tap, tokens, extra, about: x, nondiff_argnums=(4,))
_passed.defvjp(_forward, _backward)


def _of_rows(op: Any, x: jax.Array, shape: tuple[int, ...], moments: bool) -> tuple[jax.Array, Any]:
    """Return the statistic of a dot or of a convolution, and the number of tokens."""
    rows = (_patches(op, x, shape) if isinstance(op, Conv) else _rows(op, x, shape)).astype(jnp.float32)
    return _in_blocks(_second_moments if moments else _squares, rows), _count(rows)


def _second_moments(rows: jax.Array) -> jax.Array:
    return jnp.einsum("...ti,...tj->...ij", rows, rows, precision="highest")


def _squares(rows: jax.Array) -> jax.Array:
    return jnp.square(rows).sum(-2)


def _in_blocks(statistic: Callable[[jax.Array], jax.Array], rows: jax.Array) -> jax.Array:
    """Return a sum over rows. Many rows are added block by block, with what each addition rounds off (Kahan)."""
    count = rows.shape[-2]
    if count <= BLOCK or any(jax.typeof(rows).sharding.spec):  # the rows of an explicit mesh cannot be cut
        return statistic(rows)
    last = count - count % BLOCK

    def add(i: jax.Array, sums: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        total, excess = sums
        part = statistic(lax.dynamic_slice_in_dim(rows, i * BLOCK, BLOCK, axis=-2)) - excess
        return total + part, (total + part - total) - part

    first = statistic(rows[..., last:, :])
    return lax.fori_loop(0, count // BLOCK, add, (first, jnp.zeros_like(first)))[0]


def _count(rows: jax.Array) -> jax.Array:
    """Return the number of tokens.

    The ones do not depend on the values of the rows, but are computed from them. A constant would have no mapped axis
    under `jax.vmap`, and then the gradient of the tap would not be summed over this axis: it would count one example.
    """
    return jnp.where(jnp.isnan(rows[..., 0]), 1.0, 1.0).sum(-1, keepdims=True)


def _rows(op: Dot, x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Return the input of a dot as [*batch, tokens, features], in the order of the weight's axes."""
    (lhs, rhs), (batch, _) = op.dims
    own = dict(zip(rhs, lhs, strict=True))  # the axis of x for each contracted axis of the weight
    features = [own[a] for a in op.operands(x.ndim, len(shape))["y_w"].contract]
    tokens = [a for a in range(x.ndim) if a not in (*batch, *features)]
    moved = x.transpose(*batch, *tokens, *features)
    size = math.prod(x.shape[a] for a in features)
    return moved.reshape(*(x.shape[a] for a in batch), -1, size)


def _patches(op: Conv, x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Return the patches that a convolution multiplies as [tokens, features]: the axes of the window, then channels."""
    _, inside, *space = op.dims.rhs_spec
    window = tuple(shape[a] for a in space)
    # The result has the channels of x before those of the window, in the order of the dimension numbers.
    found = lax.conv_general_dilated_patches(
        x, window, op.window_strides, op.padding, op.lhs_dilation, op.rhs_dilation,
        dimension_numbers=op.dims, precision=lax.Precision.HIGHEST,
    )  # fmt: skip
    found = jnp.moveaxis(found, op.dims.out_spec[1], -1).reshape(-1, shape[inside], *window)
    order = sorted(range(len(space)), key=lambda i: space[i])
    return found.transpose(0, *(2 + i for i in order), 1).reshape(len(found), -1)


def _of_experts(x: jax.Array, sizes: jax.Array, moments: bool) -> tuple[jax.Array, jax.Array]:
    """Return the statistics of the tokens of each expert, and their numbers."""
    x, sizes = x.astype(jnp.float32), sizes.astype(jnp.int32)
    expert = jnp.repeat(jnp.arange(len(sizes)), sizes, total_repeat_length=len(x))
    count = sizes[:, None]
    inside = jnp.arange(len(x))[:, None] < sizes.sum()
    x = jnp.where(inside, x, 0)
    if not moments:
        return jax.ops.segment_sum(jnp.square(x), expert, len(sizes)), count
    weights = jnp.zeros((len(sizes), x.shape[1], x.shape[1]), jnp.float32)
    product = lambda w: lax.ragged_dot(x, w, sizes, precision=lax.Precision.HIGHEST)
    return jax.vjp(product, weights)[1](x)[0], count
