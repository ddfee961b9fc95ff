"""Activation functions whose derivatives kernels compute, in float32.

Functions are found by identity: a function of a user is never called or traced here. The compilers of kernels have no
error function, so a formula approximates it.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

Activation = Callable[[jax.Array], jax.Array]


def exact_gelu(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return GELU by the error function, as in BERT and ViT.

    GPT-2 has the tanh form, which is `jax.nn.gelu`.

    >>> round(float(exact_gelu(jnp.array(1.0))), 4)
    0.8413
    """
    return jax.nn.gelu(x, approximate=False)


def squared_relu(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return the square of ReLU, which is zero where x is not positive.

    >>> squared_relu(jnp.array([-1., 3.]))
    Array([0., 9.], dtype=float32)
    """
    return jnp.square(jax.nn.relu(x))


def known(activation: Activation) -> bool:
    """Return True if kernels can compute the derivative of a function.

    >>> known(jax.nn.gelu), known(jnp.sin)
    (True, False)
    """
    return any(activation is f for f in _DERIVATIVES)


def times_derivative(
    activation: Activation, h: Float[Array, "..."], g: Float[Array, "..."]
) -> Float[Array, "..."]:  # fmt: skip
    """Return g times the derivative of an activation function at h.

    Args:
      activation: The function, which is `known`.
      h: Its input.
      g: The gradient of its result.

    Returns:
      The gradient of its input, in the dtype of g.

    >>> times_derivative(jax.nn.relu, jnp.array([-1., 2.]), jnp.array([5., 5.]))
    Array([0., 5.], dtype=float32)
    """
    return (g.astype(jnp.float32) * _DERIVATIVES[activation](h.astype(jnp.float32))).astype(g.dtype)


def _of_gelu(x: jax.Array) -> jax.Array:
    slope, cubic = math.sqrt(2 / math.pi), 0.044715
    t = jnp.tanh(slope * x * (1.0 + cubic * x * x))
    return 0.5 * (1.0 + t) + 0.5 * slope * x * (1.0 - t) * (1.0 + t) * (1.0 + 3.0 * cubic * x * x)


def _of_exact_gelu(x: jax.Array) -> jax.Array:
    return 0.5 * (1.0 + _erf(x * math.sqrt(0.5))) + x * jnp.exp(-0.5 * x * x) * (1 / math.sqrt(2 * math.pi))


def _of_silu(x: jax.Array) -> jax.Array:
    s = 1.0 / (1.0 + jnp.exp(-x))
    return s * (1.0 + x * (1.0 - s))


def _erf(x: jax.Array) -> jax.Array:
    """Approximate the error function by formula 7.1.26 of Abramowitz and Stegun.

    The formula is right to 1.5e-7. In float32, rounding adds to that: 5e-7 in all.
    """
    size = jnp.abs(x)
    t = 1.0 / (1.0 + 0.3275911 * size)
    sums = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    positive = 1.0 - sums * jnp.exp(-size * size)
    return jnp.where(x < 0, -positive, positive)


_DERIVATIVES: dict[Activation, Callable[[jax.Array], jax.Array]] = {
    jax.nn.gelu: _of_gelu,
    exact_gelu: _of_exact_gelu,
    jax.nn.relu: lambda x: jnp.where(x > 0, 1.0, 0.0),
    squared_relu: lambda x: 2.0 * jnp.maximum(x, 0.0),
    jax.nn.silu: _of_silu,
}
