"""A linear layer and its activation function in one call, so that one kernel can serve both in the backward pass."""

from collections.abc import Callable

import jax


def fused(
    activation: Callable[[jax.Array], jax.Array], layer: Callable[[jax.Array], jax.Array], x: jax.Array
) -> jax.Array:
    """Return ``activation(layer(x))``. Its backward pass may read and write less.

    If a kernel packs the gradient of a sparse layer's output for dw, the same kernel multiplies by the derivative of
    the activation function. This saves one reading of that gradient, 2 of about 9 bytes a value, and differs from
    ``activation(layer(x))`` by rounding. In all other cases the result is ``activation(layer(x))``: if the layer is
    dense, if its dw is not packed, on several devices, and for functions whose derivative kernels cannot compute.

    Args:
      activation: An elementwise function, such as `jax.nn.gelu`, or any other.
      layer: A layer. It saves something only if it is an nnx.Linear.
      x: The layer's input.

    >>> import jax.numpy as jnp
    >>> negative = lambda x: -x  # in place of a layer
    >>> fused(jax.nn.relu, negative, jnp.array([1., -2.]))
    Array([0., 2.], dtype=float32)
    """
    through = getattr(getattr(layer, "dot_general", None), "activated", None)  # of `nmjax.nnx.Site`
    return activation(layer(x)) if through is None else through(activation, layer, x)
