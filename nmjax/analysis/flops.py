"""FLOPs of products, dense and effective: what is left of them where zeros in n:m cost nothing.

A product of dense cost F costs F * n/m where one of its operands is n:m *along the axis that it contracts*. So a weight
pruned for the forward product saves nothing in dx, which contracts its other axis, unless its mask is transposable.
FLOPs are two for every multiply-add, those with a convolution's padding among them, and each of the three products of a
layer costs the same when dense.
"""

import math
import re
from collections.abc import Iterable, Iterator

import jax
from jax.extend import core

from nmjax.core.pruner import Pruner
from nmjax.products.operations import Conv, Dot
from nmjax.products.sparsity import Sparsity


def flops(op: Dot | Conv, lhs: tuple[int, ...], rhs: tuple[int, ...]) -> int:
    """Of the dense product of operands of these shapes.

    >>> flops(Dot((((1,), (0,)), ((), ())), None, None, None), (196, 768), (768, 3072)) / 1e9
    0.924844032
    """
    if isinstance(op, Dot):
        (_, contract), (_, batch) = op.dims
        return _each(lhs, rhs, (*contract, *batch))
    out = jax.eval_shape(op, *(jax.ShapeDtypeStruct(s, "float32") for s in (lhs, rhs))).shape
    return _each(out, rhs, op.dims.rhs_spec[:1])


def _each(values: tuple[int, ...], rhs: tuple[int, ...], but: Iterable[int]) -> int:
    """Two for each of some values and all axes of the right operand but those that they share."""
    return 2 * math.prod(values) * math.prod(n for a, n in enumerate(rhs) if a not in but)


def kept(p: Pruner, step: int | None = None) -> float:
    """Return the share of values that a pruner leaves at a step; without a step, at its sparsest.

    >>> from nmjax.recipes.text import parse_pruner
    >>> kept(parse_pruner("ste(soft(2,4))")), kept(parse_pruner("decay(mse(1,8),linear(1,0,100))"), 50)
    (0.5, 1.0)
    """
    return p.kept(step)


def effective(sparsity: Sparsity, step: int | None = None) -> tuple[float, float, float]:
    """Return the share of its dense FLOPs that each product is left with: (fwd, dlhs, drhs).

    Args:
      sparsity: what is pruned.
      step: the step of training; without it, every slot is taken at its sparsest.

    >>> from nmjax.recipes.text import parse
    >>> effective(parse("s_ste(2,4)")), effective(parse("ste(1,8)")), effective(parse("fst()"))
    ((0.5, 1.0, 0.5), (0.125, 1.0, 1.0), (0.5, 0.5, 0.5))
    """
    slots = sparsity.slots
    share = {name: slot.pruner.kept(step) for name, slot in slots.items()}
    # dx has the forward product's weight, or prunes it again. If that is n:m along both axes, it stays so.
    reused = 1.0 if slots["dlhs_rhs"].raw else slots["fwd_rhs"].pruner.kept_across(step)
    return (
        min(share["fwd_lhs"], share["fwd_rhs"]),
        min(share["dlhs_g"], share["dlhs_rhs"], reused),
        min(share["drhs_g"], share["drhs_lhs"]),
    )


def over(sparsity: Sparsity, steps: int) -> tuple[float, float, float]:
    """What `effective` is on average over so many steps of training, of which up to 200 are looked at.

    >>> from nmjax.recipes.text import parse
    >>> over(parse("mdgf(2,4,linear(1,0,80))"), 160)
    (0.75, 1.0, 1.0)
    """
    count = min(steps, 200)
    looked = [effective(sparsity, int((i + 0.5) * steps / count)) for i in range(count)]
    fwd, dlhs, drhs = (math.fsum(shares) / count for shares in zip(*looked, strict=True))
    return fwd, dlhs, drhs


def counted(jaxpr: core.Jaxpr, mark: str, name: str | None = None) -> Iterator[tuple[str | None, int]]:
    """(name, FLOPs) of every dot and convolution of a program, times how often loops run it. The name is that of the
    `jax.named_scope` around it that begins with ``mark``; None where there is none. A while loop counts as one turn,
    and of branches the costliest."""
    for equation in jaxpr.eqns:
        kind, given = equation.primitive.name, equation.params
        scope = re.search(rf"{re.escape(mark)}\w*", str(equation.source_info.name_stack))
        here = name or (scope and scope.group())
        lhs, rhs = ([getattr(v.aval, "shape", ()) for v in equation.invars] + [(), ()])[:2]
        if kind == "dot_general":
            (_, contract), (_, batch) = given["dimension_numbers"]
            yield here, _each(lhs, rhs, (*contract, *batch))
        elif kind == "ragged_dot_general":
            numbers = given["ragged_dot_dimension_numbers"]
            (_, contract), (_, batch) = numbers.dot_dimension_numbers
            yield here, _each(lhs, rhs, (*contract, *batch, *numbers.rhs_group_dimensions))
        elif kind == "conv_general_dilated":
            yield here, _each(equation.outvars[0].aval.shape, rhs, given["dimension_numbers"].rhs_spec[:1])
        elif kind == "cond":
            branches = [list(counted(branch, mark, here)) for branch in _programs(given["branches"])]
            yield from max(branches, key=lambda found: sum(cost for _, cost in found))
        else:
            for inner in _programs(given.values()):
                for found, cost in counted(inner, mark, here):
                    yield found, _times(kind, given) * cost


def _times(kind: str, given) -> int:
    """How often an equation runs the program in it."""
    if kind == "scan":
        return given["length"]
    if kind == "shard_map":  # a shard's program, on every shard
        return math.prod(given["mesh"].shape[a] for a in given.get("manual_axes", given.get("newly_manual_axes")))
    if kind == "pallas_call":
        return math.prod(n for n in given["grid_mapping"].grid if isinstance(n, int))
    return 1


def _programs(values: Iterable) -> Iterator[core.Jaxpr]:
    """The programs among the parameters of an equation."""
    for value in values:
        if isinstance(value, (core.ClosedJaxpr, core.Jaxpr)):
            yield value.jaxpr if isinstance(value, core.ClosedJaxpr) else value
        elif isinstance(value, (tuple, list)):
            yield from _programs(value)
