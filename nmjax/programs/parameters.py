"""A value in a program that is a parameter, perhaps in another layout."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core


class Step(NamedTuple):
    """One change of layout, from a parameter towards the operand of a product.

    Attributes:
      kind: "dtype", "transpose", "reshape" or "slice". "slice" is what a scan does: it takes one layer of a stack along
        the first axis.
      to: The dtype, the order of the axes, or the shape after the step; () for "slice".
    """

    kind: str
    to: Any = ()


def moves(steps: tuple[Step, ...]) -> tuple[Step, ...]:
    """Return the steps that move values: all but those to a dtype."""
    return tuple(step for step in steps if step.kind != "dtype")


class Parameter(NamedTuple):
    """A parameter, and how a value of a program is made from it.

    Attributes:
      path: The path of the parameter, such as "blocks/0/up/kernel".
      steps: The changes of layout, the first one first.
    """

    path: str
    steps: tuple[Step, ...] = ()

    def after(self, equation: core.JaxprEqn) -> "Parameter | None":
        """Return what an equation makes of this value, if it changes its layout alone; None otherwise."""
        step = _step(equation) if len(equation.outvars) == 1 else None
        return None if step is None else self._replace(steps=(*self.steps, *step))

    @property
    def sliced(self) -> "Parameter":
        """One layer of this stack, as the body of a scan gets it."""
        return self._replace(steps=(*self.steps, Step("slice")))

    def apply(self, f: Callable[..., Any], parameter: jax.Array, *arrays: Any, back: bool = False) -> Any:
        """Apply the steps to the parameter, and return what a function gives for the result.

        Args:
          f: A function of the operand of one layer.
          parameter: The parameter.
          *arrays: Further arguments of the function. Each has the axes of the stacks first.
          back: True to undo the steps on the result, which then has the shape of the operand. A mask stays boolean.
        """
        return _apply(self.steps, f, parameter, arrays, back)

    def axes(self, shape: tuple[int, ...]) -> tuple[int | None, ...] | None:
        """Return, for each axis of the operand, the axis of the parameter that it is.

        Args:
          shape: The shape of the parameter.

        Returns:
          The axes. None stands for an axis of size 1 that the steps added. If a step mixes axes, or does not fit the
          shape, None.

        >>> Parameter("w", (Step("transpose", (1, 0)), Step("reshape", (4, 1, 8)))).axes((8, 4))
        (1, None, 0)
        """
        return None if any(step.kind == "slice" for step in self.steps) else _axes(self.steps, shape)

    def contracted(self, shape: tuple[int, ...], contract: tuple[int, ...]) -> Any:
        """Return the axes of the parameter that a product contracts, the innermost last.

        Args:
          shape: The shape of the parameter, or of the stack of layers that it is.
          contract: The axes of the operand that the product contracts.

        Returns:
          The axes. If a step mixes axes, the steps and ``contract``: such products are equal only if they are alike.

        >>> Parameter("w", (Step("slice"), Step("transpose", (1, 0)))).contracted((3, 8, 4), (0,))
        (2,)
        """
        axes = _axes(self.steps, shape)
        if axes is None:
            return moves(self.steps), contract
        return tuple(axis for i in contract if (axis := axes[i]) is not None)

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...] | None:
        """Return the shape of the operand. If a step mixes axes, None.

        Args:
          shape: The shape of the parameter.

        >>> Parameter("w", (Step("transpose", (1, 0)), Step("reshape", (4, 1, 8)))).shape((8, 4))
        (4, 1, 8)
        """
        axes = self.axes(shape)
        return None if axes is None else tuple(1 if axis is None else shape[axis] for axis in axes)

    def stack(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the sizes of the axes along which the parameter stacks layers, given its shape."""
        sizes: list[int] = []
        for step in self.steps:
            if step.kind == "transpose":
                shape = tuple(shape[a] for a in step.to)
            elif step.kind == "reshape":
                shape = step.to
            elif step.kind == "slice":
                sizes.append(shape[0])
                shape = shape[1:]
        return tuple(sizes)


def _step(equation: core.JaxprEqn) -> tuple[Step, ...] | None:
    """Return the change of layout that an equation is: no step, or one. Return None if it is something else."""
    name, to = equation.primitive.name, equation.params
    before: Any = equation.invars[0].aval
    after: Any = equation.outvars[0].aval
    if name == "convert_element_type":
        both = jnp.issubdtype(before.dtype, jnp.floating) and jnp.issubdtype(after.dtype, jnp.floating)
        return (Step("dtype", after.dtype),) if both else None
    if name == "transpose":
        return (Step("transpose", tuple(to["permutation"])),)
    if name in ("copy", "copy_p", "sharding_constraint", "reshard", "optimization_barrier", "name"):
        return ()
    reshaped = name == "reshape" and to["dimensions"] is None
    if (reshaped or name in ("squeeze", "broadcast_in_dim")) and math.prod(before.shape) == math.prod(after.shape):
        return (Step("reshape", after.shape),)
    return None


def _axes(steps: tuple[Step, ...], shape: tuple[int, ...]) -> tuple[int | None, ...] | None:
    """Return what `Parameter.axes` returns, also for the operand of one layer of a stack."""
    axes: list[int | None] = list(range(len(shape)))
    for step in steps:
        if step.kind == "transpose" and len(step.to) != len(shape):
            return None
        if step.kind == "transpose":
            axes, shape = [axes[a] for a in step.to], tuple(shape[a] for a in step.to)
        elif step.kind == "reshape":
            if [n for n in shape if n > 1] != [n for n in step.to if n > 1]:
                return None
            long = iter([axis for axis, n in zip(axes, shape, strict=True) if n > 1])
            axes, shape = [next(long) if n > 1 else None for n in step.to], step.to
        elif step.kind == "slice":
            axes, shape = axes[1:], shape[1:]
    return tuple(axes)


def _apply(steps: tuple[Step, ...], f: Callable[..., Any], x: jax.Array, arrays: tuple[Any, ...], back: bool) -> Any:
    if not steps:
        return f(x, *arrays)
    (kind, to), rest = steps[0], steps[1:]
    undo: Callable[[Any], Any]
    if kind == "slice":
        return jax.vmap(lambda x, *arrays: _apply(rest, f, x, arrays, back))(x, *arrays)
    if kind == "dtype":
        changed, undo = x.astype(to), lambda y: y if y.dtype == bool else y.astype(x.dtype)
    elif kind == "transpose":
        inverse = tuple(sorted(range(x.ndim), key=to.__getitem__))
        changed, undo = lax.transpose(x, to), lambda y: lax.transpose(y, inverse)
    else:
        changed, undo = x.reshape(to), lambda y: y.reshape(x.shape)
    result = _apply(rest, f, changed, arrays, back)
    return undo(result) if back else result
