"""A product, the addition of a bias, and an activation function, as one differentiable function.

The value is that of the three steps. In the backward pass, g is the gradient of the activation function's input. The
kernel that packs g for dw also computes it: it multiplies the gradient of the function's output by the derivative. So
it does not read g from memory.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from nmjax.core.context import Ctx
from nmjax.kernels.activations import Activation, known
from nmjax.products.applying import StaticProduct
from nmjax.products.forms import Form, FormKey, can_fuse, pack_gradient
from nmjax.products.operations import as_dot
from nmjax.products.rule import (
    Inputs,
    Residuals,
    prepare,
    pruned_product,
    pruned_product_backward,
    pruned_product_forward,
    summed_as,
)
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
      precision, preferred_element_type, sparsity, ctx, backend, name, packed: As in `nmjax.dot_general`.

    >>> s = Sparsity()
    >>> activated_dot(jax.nn.relu, jnp.ones((1, 2)), jnp.array([[1., -1.], [2., -2.]]), None, sparsity=s).tolist()
    [[3.0, 0.0]]
    """
    op = as_dot(x, w, (((x.ndim - 1,), (0,)), ((), ())), precision, preferred_element_type)
    call = prepare(op, x, w, sparsity, ctx, backend, name=name, packed=packed)
    one_dtype = bias is None or bias.dtype == jax.eval_shape(op, x, w).dtype
    if (
        call.run is pruned_product
        and one_dtype
        and known(activation)
        and can_fuse(call.product.routes, call.product.sparsity)
    ):
        return _fused(activation, call.product, call.x, call.w, bias, call.inputs)
    return activation(_add_bias(call.compute(), bias))


def _add_bias(y: jax.Array, bias: jax.Array | None) -> jax.Array:
    return y if bias is None else y + jnp.reshape(bias, (1,) * (y.ndim - 1) + (-1,))  # as Flax adds it


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _fused(
    activation: Activation, product: StaticProduct, x: jax.Array, w: jax.Array, bias: jax.Array | None, inputs: Inputs
) -> jax.Array:
    return activation(_add_bias(pruned_product(product, x, w, inputs), bias))


class _Residuals(NamedTuple):
    """The values that the backward pass needs.

    Attributes:
      residuals: Those of the product.
      inputs: The input of the activation function.
      bias: The bias, or None.
    """

    residuals: Residuals
    inputs: jax.Array
    bias: jax.Array | None


def _forward(
    activation: Activation, product: StaticProduct, x: jax.Array, w: jax.Array, bias: jax.Array | None, inputs: Inputs
) -> tuple[jax.Array, _Residuals]:
    y, residuals = pruned_product_forward(product, x, w, inputs)
    h = _add_bias(y, bias)
    return activation(h), _Residuals(residuals, h, bias)


def _backward(activation: Activation, product: StaticProduct, kept: _Residuals, g: jax.Array) -> tuple[Any, ...]:
    residuals, inputs, bias = kept
    assert product.routes is not None
    ctx = residuals.inputs.ctx
    of_inputs, forms = pack_gradient(product.routes, product.sparsity, activation, inputs, g, ctx)
    dx, dw, _ = pruned_product_backward(product, residuals, of_inputs, forms)
    db = None if bias is None else summed_as(jnp.sum(of_inputs, tuple(range(g.ndim - 1))), bias)
    return dx, dw, db, None


_fused.defvjp(_forward, _backward)
