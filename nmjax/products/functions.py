"""The products as functions: `jax.lax.dot_general`, `jax.lax.conv_general_dilated`, `jax.lax.ragged_dot` and
`jnp.einsum`, with a sparsity."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from nmjax.core.context import Ctx
from nmjax.products.forms import Form, FormKey
from nmjax.products.operations import as_conv, as_dot, as_ragged_dot, einsum_dims, einsum_operands
from nmjax.products.rule import bilinear
from nmjax.products.sparsity import Sparsity


def dot_general(
    lhs: jax.Array, rhs: jax.Array, dimension_numbers: Any, precision: Any = None, preferred_element_type: Any = None,
    out_sharding: Any = None, *, sparsity: Sparsity, ctx: Ctx = Ctx(), backend: str = "auto", name: str | None = None,
    packed: Mapping[FormKey, Form] | None = None,
) -> jax.Array:  # fmt: skip
    """Return `jax.lax.dot_general` of two arrays, with its three products pruned as ``sparsity`` says.

    If a product contracts several axes, the last one alone is grouped if m divides it; else as few as needed are
    flattened with it, in order.

    Args:
      lhs: The left operand, x.
      rhs: The right operand, the weight.
      dimension_numbers, precision, preferred_element_type, out_sharding: As in `jax.lax.dot_general`.
      sparsity: What is pruned, as ``nm.parse("s_ste(2,4)")`` returns it.
      ctx: The key, if something is drawn; the step, if something changes with it; the state, if the method keeps one.
      backend: One of `nmjax.kernels.targets.BACKENDS`. "auto" packs or compacts what is expected to win on the device,
        "xla" does neither, "compact" compacts the products of chosen rows or raises, "pallas" packs or raises, and
        "interpret" packs in kernels simulated on a CPU.
      name: The layer's name, which begins every error.
      packed: The weight in the forms of kernels, as `nmjax.products.weights.packed_weight` returns them.

    Raises:
      TypeError: If an operand that is pruned is not of floating-point values.
      ValueError: If groups do not fit, or a key or a state is missing.

    >>> import nmjax as nm
    >>> x, w = jnp.ones((1, 4)), jnp.array([[1.], [2.], [3.], [4.]])
    >>> nm.dot_general(x, w, (((1,), (0,)), ((), ())), sparsity=nm.methods.ste(2, 4))
    Array([[7.]], dtype=float32)
    """
    op = as_dot(lhs, rhs, dimension_numbers, precision, preferred_element_type, out_sharding)
    return bilinear(op, lhs, rhs, sparsity, ctx, backend, name=name, packed=packed)


def conv_general_dilated(
    lhs: jax.Array, rhs: jax.Array, window_strides: Sequence[int], padding: Any, lhs_dilation: Any = None,
    rhs_dilation: Any = None, dimension_numbers: Any = None, feature_group_count: int = 1, batch_group_count: int = 1,
    precision: Any = None, preferred_element_type: Any = None, out_sharding: Any = None,
    *, sparsity: Sparsity, ctx: Ctx = Ctx(), backend: str = "auto", name: str | None = None,
    packed: Mapping[FormKey, Form] | None = None,
) -> jax.Array:  # fmt: skip
    """Return `jax.lax.conv_general_dilated` of two arrays, with its three products pruned by ``sparsity``.

    Groups lie along channels, and for dw along batch and space. The arguments are those of
    `jax.lax.conv_general_dilated`, and the others those of `dot_general`.

    >>> import nmjax as nm
    >>> x, w = jnp.ones((1, 5, 4)), jnp.ones((3, 4, 8))
    >>> dims, sparsity = ("NWC", "WIO", "NWC"), nm.methods.ste(2, 4)
    >>> nm.conv_general_dilated(x, w, (1,), "SAME", dimension_numbers=dims, sparsity=sparsity).shape
    (1, 5, 8)
    """
    op = as_conv(
        lhs, rhs, window_strides, padding, lhs_dilation, rhs_dilation, dimension_numbers, feature_group_count,
        batch_group_count, precision, preferred_element_type, out_sharding,
    )  # fmt: skip
    return bilinear(op, lhs, rhs, sparsity, ctx, backend, name=name, packed=packed)


def ragged_dot(
    lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, precision: Any = None, preferred_element_type: Any = None,
    *, sparsity: Sparsity, ctx: Ctx = Ctx(), backend: str = "auto", name: str | None = None,
    packed: Mapping[FormKey, Form] | None = None,
) -> jax.Array:  # fmt: skip
    """Return `jax.lax.ragged_dot` of two arrays, with its three products pruned as ``sparsity`` says.

    It multiplies the tokens of each expert by the expert's matrix, as mixtures of experts do. In the product for dw a
    group has tokens of one expert: an expert's first group begins at its first token, and its last group is filled up
    with zeros, so m need not divide the number of its tokens. Tokens without an expert, at the end, give zeros.

    Args:
      lhs: The tokens, of shape [tokens, in], sorted by expert.
      rhs: The weights, of shape [experts, in, out].
      group_sizes: The number of tokens of each expert, integers of shape [experts].
      precision, preferred_element_type: As in `jax.lax.ragged_dot`.
      sparsity, ctx, backend, name, packed: As in `dot_general`. No kernel computes grouped products.

    Raises:
      TypeError: If an operand that is pruned is not of floating-point values.
      ValueError: If shapes or groups do not fit, or a key or a state is missing.

    >>> import nmjax as nm
    >>> x, w = jnp.ones((3, 4)), jnp.array([[[1.], [2.], [3.], [4.]], [[8.], [7.], [6.], [5.]]])
    >>> nm.ragged_dot(x, w, jnp.array([1, 2]), sparsity=nm.methods.ste(2, 4)).tolist()
    [[7.0], [15.0], [15.0]]
    """
    op = as_ragged_dot(lhs, rhs, group_sizes, precision, preferred_element_type)
    return bilinear(op, lhs, rhs, sparsity, ctx, backend, name=name, packed=packed, extra=(group_sizes,))


def einsum(
    spec: str, lhs: jax.Array, rhs: jax.Array, *, precision: Any = None, preferred_element_type: Any = None,
    out_sharding: Any = None, sparsity: Sparsity, ctx: Ctx = Ctx(), backend: str = "auto", name: str | None = None,
    packed: Mapping[FormKey, Form] | None = None,
) -> jax.Array:  # fmt: skip
    """Return `jnp.einsum` of two arrays, with its three products pruned as ``sparsity`` says.

    Contracted labels are ordered as the right operand, the weight, has them. An axis of length 1 is repeated as often
    as the other operand needs it, before anything is pruned.

    Args:
      spec: The subscripts, of two operands.
      lhs: The left operand, x.
      rhs: The right operand, the weight.
      precision, preferred_element_type, out_sharding: As in `jnp.einsum`.
      sparsity, ctx, backend, name, packed: As in `dot_general`.

    Raises:
      ValueError: If it is not a product of two operands, or groups do not fit, or a key or a state is missing.

    >>> import nmjax as nm
    >>> x, w = jnp.ones((2, 3, 8)), jnp.ones((8, 16))
    >>> nm.einsum("...i,io->...o", x, w, sparsity=nm.methods.ste(2, 4)).shape
    (2, 3, 16)
    """
    dims, order = einsum_dims(spec, lhs.ndim, rhs.ndim)
    lhs, rhs = einsum_operands(spec, lhs, rhs)
    if out_sharding is not None:
        out_sharding = before_transpose(out_sharding, order)
    y = dot_general(
        lhs, rhs, dims, precision, preferred_element_type, out_sharding, sparsity=sparsity, ctx=ctx, backend=backend,
        name=name, packed=packed,
    )  # fmt: skip
    return jnp.transpose(y, order)


def before_transpose(sharding: Any, order: list[int]) -> Any:
    """Return the sharding before a transposition, given the one after it."""
    spec = tuple(sharding.spec if isinstance(sharding, NamedSharding) else sharding)
    spec += (None,) * (len(order) - len(spec))
    before = PartitionSpec(*(spec[order.index(axis)] for axis in range(len(order))))
    return NamedSharding(sharding.mesh, before) if isinstance(sharding, NamedSharding) else before
