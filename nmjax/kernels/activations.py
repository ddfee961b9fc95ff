"""Derivatives of activation functions in kernels.

A kernel computes the derivative that JAX derives, operation by operation, in float32. It supports the operations in
`_RULES`. The compilers of kernels have no error function, so a formula approximates it.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from nmjax.core.refusal import Refusal

Activation = Callable[[jax.Array], jax.Array]


def times_derivative(
    activation: Activation, h: Float[Array, "..."], g: Float[Array, "..."]
) -> Float[Array, "..."]:  # fmt: skip
    """Return g times the derivative of an activation function at h, as kernels compute it.

    Args:
      activation: The function. `refusal` returns None for it.
      h: Its input.
      g: The gradient of its output.

    Returns:
      The gradient of its input, in the dtype of g.

    >>> times_derivative(jax.nn.relu, jnp.array([-1., 2.]), jnp.array([5., 5.]))
    Array([0., 5.], dtype=float32)
    """
    wide = [v.astype(jnp.float32) for v in (h, g)]
    return _evaluate(_derivative(activation, wide[0]), wide)[0].astype(g.dtype)


def refusal(activation: Activation, h: jax.ShapeDtypeStruct) -> Refusal | None:
    """Return the reason why kernels cannot compute the derivative of a function, or None if they can.

    Args:
      activation: The function.
      h: Its input.

    >>> h = jax.ShapeDtypeStruct((8, 4), jnp.bfloat16)
    >>> refusal(jax.nn.gelu, h), str(refusal(jnp.sin, h))
    (None, 'its derivative uses the operation cos, which kernels do not support')
    """
    result = jax.eval_shape(activation, h)
    if (result.shape, result.dtype) != (h.shape, h.dtype):
        return Refusal("its result and its input differ in shape or dtype")
    jaxpr = _derivative(activation, h)
    unknown = sorted(_operations(jaxpr) - set(_RULES) - set(_CALLS))
    if unknown:
        return Refusal(f"its derivative uses the operation {unknown[0]}, which kernels do not support")
    return Refusal("it uses a constant array") if jaxpr.consts else None


def _derivative(activation: Activation, h: Any) -> Any:
    """Return the jaxpr of (h, g) -> g times the derivative at h. Both have the shape and dtype of ``h``."""
    array = jax.ShapeDtypeStruct(h.shape, h.dtype)
    return jax.make_jaxpr(lambda h, g: jax.vjp(activation, h)[1](g)[0])(array, array)


def _operations(jaxpr: Any) -> set[str]:
    """Return the names of the operations of a jaxpr, and of the jaxprs that it calls."""
    spreads = lambda eqn: eqn.primitive.name == "broadcast_in_dim" and eqn.invars[0].aval.shape
    names = {"broadcast_in_dim of an array" if spreads(eqn) else eqn.primitive.name for eqn in jaxpr.eqns}
    called = (_called(eqn) for eqn in jaxpr.eqns if eqn.primitive.name in _CALLS)
    return names.union(*map(_operations, called))


def _called(eqn: Any) -> Any:
    return eqn.params[_CALLS[eqn.primitive.name]]


def _evaluate(jaxpr: Any, inputs: list[Any]) -> list[Any]:
    """Evaluate a jaxpr by `_RULES`."""
    known = dict(zip((*jaxpr.jaxpr.constvars, *jaxpr.jaxpr.invars), (*jaxpr.consts, *inputs), strict=True))
    value = lambda v: v.val if hasattr(v, "val") else known[v]
    for eqn in jaxpr.eqns:
        name, values = eqn.primitive.name, list(map(value, eqn.invars))
        found = _evaluate(_called(eqn), values) if name in _CALLS else [_RULES[name](eqn.params, *values)]
        known |= dict(zip(eqn.outvars, found, strict=True))
    return list(map(value, jaxpr.jaxpr.outvars))


_CALLS = {"jit": "jaxpr", "pjit": "jaxpr", "custom_jvp_call": "call_jaxpr"}  # the parameter that holds the jaxpr


def _erf(x: jax.Array) -> jax.Array:
    """Approximate the error function by formula 7.1.26 of Abramowitz and Stegun.

    The formula is right to 1.5e-7. In float32, rounding adds to that: 5e-7 in all.
    """
    size = jnp.abs(x)
    t = 1.0 / (1.0 + 0.3275911 * size)
    sums = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    positive = 1.0 - sums * jnp.exp(-size * size)
    return jnp.where(x < 0, -positive, positive)


def _power(x: jax.Array, y: int) -> jax.Array:
    product = functools.reduce(jnp.multiply, [x] * abs(y), jnp.ones((), x.dtype))
    return product if y >= 0 else 1.0 / product


_RULES: dict[str, Callable[..., Any]] = {
    "abs": lambda _, x: jnp.abs(x),
    "add": lambda _, x, y: x + y,
    "and": lambda _, x, y: x & y,
    "add_any": lambda _, x, y: x + y,
    "bitcast_convert_type": lambda params, x: lax.bitcast_convert_type(x, params["new_dtype"]),
    "broadcast_in_dim": lambda _, x: x,
    "convert_element_type": lambda params, x: jnp.asarray(x, params["new_dtype"]),
    "copy": lambda _, x: x,
    "div": lambda _, x, y: x / y,
    "eq": lambda _, x, y: x == y,
    "erf": lambda _, x: _erf(x),
    "erfc": lambda _, x: 1.0 - _erf(x),
    "exp": lambda _, x: jnp.exp(x),
    "ge": lambda _, x, y: x >= y,
    "gt": lambda _, x, y: x > y,
    "integer_pow": lambda params, x: _power(x, params["y"]),
    "le": lambda _, x, y: x <= y,
    "logistic": lambda _, x: 1.0 / (1.0 + jnp.exp(-x)),
    "lt": lambda _, x, y: x < y,
    "max": lambda _, x, y: jnp.maximum(x, y),
    "min": lambda _, x, y: jnp.minimum(x, y),
    "mul": lambda _, x, y: x * y,
    "neg": lambda _, x: -x,
    "one_minus_square": lambda _, x: 1.0 - x * x,
    "or": lambda _, x, y: x | y,
    "polynomial": lambda _, x, *factors: functools.reduce(lambda sums, factor: sums * x + factor, factors[::-1]),
    "select_n": lambda _, which, x, y: jnp.where(which, y, x),
    "square": lambda _, x: x * x,
    "stop_gradient": lambda _, x: x,
    "sub": lambda _, x, y: x - y,
    "tanh": lambda _, x: jnp.tanh(x),
}  # by the name of the operation: (its parameters, its inputs) -> its result
