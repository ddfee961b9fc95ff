"""A product, a bias and an activation function as one differentiable function.

Its value is that of the three. If a kernel packs g for dw, it also computes g: it multiplies the gradient of the
activation function's output by the derivative, prunes and packs, and reads each value once.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from nmjax.core.context import Ctx
from nmjax.kernels.activations import Activation
from nmjax.products.applying import StaticProduct
from nmjax.products.forms import Form, FormKey, activated, activates
from nmjax.products.operations import as_dot
from nmjax.products.rule import Inputs, Residuals, prepare, ruled, ruled_backward, ruled_forward, summed_as
from nmjax.products.sparsity import Sparsity


def activated_dot(
    activation: Activation, x: jax.Array, w: jax.Array, bias: jax.Array | None, *, precision: Any = None,
    preferred_element_type: Any = None, sparsity: Sparsity, ctx: Ctx = Ctx(), backend: str = "auto",
    name: str | None = None, packed: Mapping[FormKey, Form] | None = None,
) -> jax.Array:  # fmt: skip
    """Return ``activation(x @ w + bias)``, with the three products pruned as ``sparsity`` says.

    Args:
      activation: The function.
      x: The left operand. Its last axis is contracted.
      w: The weight, of shape [in, out].
      bias: The bias, of shape [out], or None.
      precision, preferred_element_type, sparsity, ctx, backend, name, packed: As of `nmjax.dot_general`.

    >>> s = Sparsity()
    >>> activated_dot(jax.nn.relu, jnp.ones((1, 2)), jnp.array([[1., -1.], [2., -2.]]), None, sparsity=s).tolist()
    [[3.0, 0.0]]
    """
    op = as_dot(x, w, (((x.ndim - 1,), (0,)), ((), ())), precision, preferred_element_type)
    call = prepare(op, x, w, sparsity, ctx, backend, name=name, packed=packed)
    y = jax.eval_shape(op, x, w)
    h = jax.eval_shape(_plus, y, bias)
    one_type = h.dtype == y.dtype and call.run is ruled
    if one_type and activates(call.product.routes, call.product.sparsity, activation, h):
        return _fused(activation, call.product, call.x, call.w, bias, call.inputs)
    return activation(_plus(call(), bias))


def _plus(y: jax.Array, bias: jax.Array | None) -> jax.Array:
    return y if bias is None else y + jnp.reshape(bias, (1,) * (y.ndim - 1) + (-1,))  # as Flax adds it


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _fused(
    activation: Activation, product: StaticProduct, x: jax.Array, w: jax.Array, bias: jax.Array | None, inputs: Inputs
) -> jax.Array:
    return activation(_plus(ruled(product, x, w, inputs), bias))


class _Kept(NamedTuple):
    """The values that the backward pass keeps: those of the product, the function's input h, and the bias."""

    residuals: Residuals
    h: jax.Array
    bias: jax.Array | None


def _forward(
    activation: Activation, product: StaticProduct, x: jax.Array, w: jax.Array, bias: jax.Array | None, inputs: Inputs
) -> tuple[jax.Array, _Kept]:
    y, residuals = ruled_forward(product, x, w, inputs)
    h = _plus(y, bias)
    return activation(h), _Kept(residuals, h, bias)


def _backward(activation: Activation, product: StaticProduct, kept: _Kept, g: jax.Array) -> tuple[Any, ...]:
    residuals, h, bias = kept
    assert product.routes is not None
    g, made = activated(product.routes, product.sparsity, activation, h, g, residuals.inputs.ctx)
    dx, dw, _ = ruled_backward(product, residuals, g, made)
    spread = lambda bias: jnp.broadcast_to(bias, g.shape)
    db = None if bias is None else summed_as(jax.linear_transpose(spread, bias)(g)[0], bias)
    return dx, dw, db, None


_fused.defvjp(_forward, _backward)
