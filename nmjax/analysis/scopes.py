"""Scopes around the products of layers, by which their FLOPs are found in a traced program."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
from jax.extend import core

from nmjax.analysis import flops

_MARK = "nmjax_layer_"


class Costs(NamedTuple):
    """The forward FLOPs of a program.

    Attributes:
      layers: Those of each layer, by its number.
      elsewhere: Those of products in no layer.
      reading_data: The numbers of the layers whose input depends on no parameter.
    """

    layers: list[int]
    elsewhere: int
    reading_data: set[int]


def of_layer(number: int) -> AbstractContextManager[Any]:
    """Return the scope in which a layer computes its products while a plan traces the model.

    Args:
      number: The number of the layer.
    """
    return jax.named_scope(f"{_MARK}{number}")


def costs_of(program: core.Jaxpr, learned: Sequence[bool], count: int) -> Costs:
    """Return the forward FLOPs of a program.

    Args:
      program: The program.
      learned: For each argument of the program, whether it is a parameter.
      count: The number of layers.

    >>> import jax.numpy as jnp
    >>> def f(w, x):
    ...     with of_layer(1):
    ...         y = x @ w
    ...     return y @ y.T
    >>> costs_of(jax.make_jaxpr(f)(jnp.ones((2, 2)), jnp.ones((3, 2))).jaxpr, [True, False], count=2)
    Costs(layers=[0, 24], elsewhere=36, reading_data={1})
    """
    layers, elsewhere = [0] * count, 0
    for name, cost in flops.counted(program, _MARK):
        if name is None:
            elsewhere += cost
        else:
            layers[_number(name)] += cost
    return Costs(layers, elsewhere, set(map(_number, flops.reading_data(program, learned, _MARK))))


def in_layer(equation: core.JaxprEqn) -> bool:
    """Return True if an equation is in a scope of `of_layer`."""
    return _MARK in str(equation.source_info.name_stack)


def _number(name: str) -> int:
    return int(name.removeprefix(_MARK))
