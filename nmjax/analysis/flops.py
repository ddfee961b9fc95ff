"""FLOPs of products: dense, and effective, which counts a zero of an n:m operand as free.

A product of F dense FLOPs has F * n/m effective FLOPs if one of its operands is n:m *along the axis that the product
contracts*. So a weight that is pruned for the forward product saves nothing in dx, which contracts its other axis,
unless its mask is transposable. A multiply-add is two FLOPs, also with the padding of a convolution. The three
products of a layer cost the same when dense.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.extend import core

from nmjax.products.operations import Conv, Dot, RaggedDot
from nmjax.products.sparsity import Sparsity


def flops(op: Dot | Conv | RaggedDot, lhs: tuple[int, ...], rhs: tuple[int, ...]) -> int:
    """Return the FLOPs of a dense product.

    Args:
      op: The operation.
      lhs: The shape of the left operand.
      rhs: The shape of the right operand.

    >>> flops(Dot((((1,), (0,)), ((), ())), None, None, None), (196, 768), (768, 3072)) / 1e9
    0.924844032
    """
    if isinstance(op, Dot):
        (_, contract), (_, batch) = op.dims
        return _cost(lhs, rhs, (*contract, *batch))
    if isinstance(op, RaggedDot):  # each token meets the matrix of its expert only
        return _cost(lhs, rhs, (0, 1))
    out = jax.eval_shape(op, *(jax.ShapeDtypeStruct(s, "float32") for s in (lhs, rhs))).shape
    return _cost(out, rhs, op.dims.rhs_spec[:1])


def _cost(values: tuple[int, ...], rhs: tuple[int, ...], shared: Iterable[int]) -> int:
    """Return two FLOPs for each value, times the axes of the right operand that the values do not share."""
    shared = tuple(shared)
    return 2 * math.prod(values) * math.prod(n for a, n in enumerate(rhs) if a not in shared)


def effective(sparsity: Sparsity, step: int | None = None) -> tuple[float, float, float]:
    """Return the share of the dense FLOPs of each product that is left: (y, dx, dw).

    Args:
      sparsity: The slots and their pruners.
      step: The step of training; without it, every slot is taken at its sparsest.

    >>> import nmjax as nm
    >>> nm.flops.effective(nm.methods.s_ste()), nm.flops.effective(nm.methods.ste(1, 8))
    ((0.5, 1.0, 0.5), (0.125, 1.0, 1.0))
    """
    slots = sparsity.slots
    share = {name: slot.pruner.kept(step) for name, slot in slots.items()}
    # The product for dx uses the pruned weight of the forward product. If this is n:m along both axes, dx has n:m too.
    reused = 1.0 if slots["dx_w"].raw else slots["y_w"].pruner.kept(step, across=True)
    return (
        min(share["y_x"], share["y_w"]),
        min(share["dx_g"], share["dx_w"], reused),
        min(share["dw_g"], share["dw_x"]),
    )


def over(sparsity: Sparsity, steps: int) -> tuple[float, float, float]:
    """Return the mean of `effective` over the steps of a run. Up to 200 steps are sampled.

    Args:
      sparsity: The slots and their pruners.
      steps: The number of steps, at least 1.

    Raises:
      ValueError: There is no step.

    >>> import nmjax as nm
    >>> nm.flops.over(nm.parse("mdgf(2,4,linear(1,0,80))"), 160)
    (0.75, 1.0, 1.0)
    """
    if steps < 1:
        raise ValueError(f"over: steps is the number of steps of a run, at least 1, got {steps}.")
    count = min(steps, 200)
    sampled = [effective(sparsity, int((i + 0.5) * steps / count)) for i in range(count)]
    y, dx, dw = (math.fsum(shares) / count for shares in zip(*sampled, strict=True))
    return y, dx, dw


def counted(jaxpr: core.Jaxpr, mark: str, name: str | None = None) -> Iterator[tuple[str | None, int]]:
    """Yield (name, FLOPs) of every dot and convolution of a program, times how often loops run it.

    A while loop counts as one turn. The costliest branch of a condition counts.

    Args:
      jaxpr: The program.
      mark: The beginning of the names that count. A product has the name of the `jax.named_scope` around it that
        begins so, or None.
      name: The name that products have because of a scope outside the program.

    >>> def f(x):
    ...     with jax.named_scope("layer_0"):
    ...         return x @ x
    >>> list(counted(jax.make_jaxpr(f)(jnp.ones((2, 2))).jaxpr, "layer_"))
    [('layer_0', 16)]
    """
    for equation in jaxpr.eqns:
        scope = re.search(rf"{re.escape(mark)}\w*", str(equation.source_info.name_stack))
        own_name = name or (scope and scope.group())
        kind, parameters = equation.primitive.name, equation.params
        cost = _product_cost(equation)
        if cost is not None:
            yield own_name, cost
        elif kind == "cond":
            branches = [list(counted(branch, mark, own_name)) for branch in programs(parameters["branches"])]
            yield from max(branches, key=lambda products: sum(cost for _, cost in products))
        else:
            times = _times(kind, parameters)
            for program in programs(parameters.values()):
                for inner_name, inner_cost in counted(program, mark, own_name):
                    yield inner_name, times * inner_cost


def reading_data(jaxpr: core.Jaxpr, learned: Sequence[bool], mark: str) -> set[str]:
    """Return the names of the layers whose input does not depend on parameters. Training never computes their dx.

    Args:
      jaxpr: The program.
      learned: For each argument of the program, whether it is a parameter.
      mark: The beginning of the names of layers, as in `counted`.

    >>> def f(w, x):
    ...     with jax.named_scope("layer_0"):
    ...         y = x @ w
    ...     with jax.named_scope("layer_1"):
    ...         return y @ w
    >>> reading_data(jax.make_jaxpr(f)(jnp.ones((2, 2)), jnp.ones((3, 2))).jaxpr, [True, False], "layer_")
    {'layer_0'}
    """
    layers: dict[str, bool] = {}  # whether both operands of a product depend on parameters
    _follow(jaxpr, learned, mark, None, layers)
    return {name for name, both in layers.items() if not both}


def _follow(
    jaxpr: core.Jaxpr, learned: Sequence[bool], mark: str, name: str | None, layers: dict[str, bool]
) -> None:  # fmt: skip
    """For each layer, note in ``layers`` whether both operands of a product depend on parameters."""
    depends = {v for v, is_learned in zip(jaxpr.invars, learned, strict=True) if is_learned}
    for equation in jaxpr.eqns:
        scope = re.search(rf"{re.escape(mark)}\w*", str(equation.source_info.name_stack))
        own_name = name or (scope and scope.group())
        given = [not isinstance(v, core.Literal) and v in depends for v in equation.invars]
        if any(given) and equation.primitive.name != "stop_gradient":
            depends.update(equation.outvars)
        if _product_cost(equation) is None:
            for program in programs(equation.params.values()):
                inner = given[-len(program.invars) :] if equation.primitive.name == "cond" else given
                if equation.primitive.name in ("scan", "while") or len(inner) != len(program.invars):
                    inner = [any(given)] * len(program.invars)  # what a loop carries depends on all that goes into it
                _follow(program, inner, mark, own_name, layers)
        elif own_name:
            layers[own_name] = layers.get(own_name, False) or all(given[:2])


def _product_cost(equation: core.JaxprEqn) -> int | None:
    """Return the FLOPs of an equation that is a dot or a convolution; None for any other."""
    kind, parameters = equation.primitive.name, equation.params
    if kind not in ("dot_general", "ragged_dot_general", "conv_general_dilated"):
        return None
    lhs, rhs = (getattr(v.aval, "shape", ()) for v in equation.invars[:2])
    if kind == "dot_general":
        (_, contract), (_, batch) = parameters["dimension_numbers"]
        return _cost(lhs, rhs, (*contract, *batch))
    if kind == "ragged_dot_general":
        numbers = parameters["ragged_dot_dimension_numbers"]
        (_, contract), (_, batch) = numbers.dot_dimension_numbers
        return _cost(lhs, rhs, (*contract, *batch, *numbers.rhs_group_dimensions))
    out: Any = equation.outvars[0].aval
    return _cost(out.shape, rhs, parameters["dimension_numbers"].rhs_spec[:1])


def _times(kind: str, parameters: Mapping[str, Any]) -> int:
    """Return how often an equation runs the programs in it."""
    if kind == "scan":
        return parameters["length"]
    if kind == "shard_map":  # each program is a shard's, and runs on every shard
        axes = parameters.get("manual_axes", parameters.get("newly_manual_axes"))
        return math.prod(parameters["mesh"].shape[a] for a in axes)
    if kind == "pallas_call":
        return math.prod(n for n in parameters["grid_mapping"].grid if isinstance(n, int))
    return 1


def programs(values: Iterable[Any]) -> Iterator[core.Jaxpr]:
    """Yield the programs among the parameters of an equation.

    Args:
      values: The parameters. Tuples and lists may hold programs too.

    >>> [equation] = jax.make_jaxpr(jax.jit(jnp.sin))(1.0).jaxpr.eqns
    >>> [[inner.primitive.name for inner in program.eqns] for program in programs(equation.params.values())]
    [['sin']]
    """
    for value in values:
        if isinstance(value, core.ClosedJaxpr):
            yield value.jaxpr
        elif isinstance(value, core.Jaxpr):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from programs(value)
