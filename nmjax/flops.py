"""FLOPs of products, dense and effective: what is left of them where zeros in n:m cost nothing.

A product of dense cost F costs F * n/m where one of its operands is n:m *along the axis that it contracts*. So a weight
pruned for the forward product saves nothing in dx, which contracts its other axis, unless its mask is transposable.
FLOPs are two for every multiply-add, and each of the three products of a layer costs the same when dense.
"""

import math
from collections.abc import Iterator

import jax
from jax.extend import core

from nmjax.combinators import stages
from nmjax.estimators import decay
from nmjax.products import Conv, Dot
from nmjax.pruners import identity, transposable
from nmjax.schedules import row_at
from nmjax.sparsity import Sparsity
from nmjax.typing import Grouped, Pruner


def flops(op: Dot | Conv, lhs: tuple[int, ...], rhs: tuple[int, ...]) -> int:
    """Of the dense product of operands of these shapes.

    >>> flops(Dot((((1,), (0,)), ((), ())), None, None, None), (196, 768), (768, 3072)) / 1e9
    0.924844032
    """
    if isinstance(op, Dot):
        (contract, _), (batch, _) = op.dims
        return 2 * math.prod(lhs) * math.prod(rhs) // math.prod(lhs[a] for a in (*contract, *batch))
    out = jax.eval_shape(op, *(jax.ShapeDtypeStruct(s, "float32") for s in (lhs, rhs))).shape
    return 2 * math.prod(out) * math.prod(rhs) // rhs[op.dims.rhs_spec[0]]


def kept(p: Pruner, step: int | None = None) -> float:
    """The share of values that a pruner leaves at a step; without a step, where it leaves least.

    >>> from nmjax.spec import parse_pruner
    >>> kept(parse_pruner("ste(soft(2,4))")), kept(parse_pruner("decay(mse(1,8),linear(1,0,100))"), 50)
    (0.5, 1.0)
    """
    if isinstance(p, Grouped):
        return p.n / p.m
    if isinstance(p, stages):
        rows = p.parts if step is None else [p.parts[int(row_at(p.rows, step))]]
        return min(kept(q, step) for q in rows)
    if isinstance(p, decay) and step is not None and float(p.schedule(step)) != 0:
        return 1.0
    return min((kept(q, step) for q in p.parts), default=1.0)


def effective(sparsity: Sparsity, step: int | None = None) -> tuple[float, float, float]:
    """The share of its dense FLOPs that each product is left with: (fwd, dlhs, drhs).

    >>> from nmjax.spec import parse
    >>> effective(parse("s_ste(2,4)")), effective(parse("ste(1,8)")), effective(parse("fst()"))
    ((0.5, 1.0, 0.5), (0.125, 1.0, 1.0), (0.5, 0.5, 0.5))
    """
    share = lambda slot: kept(getattr(sparsity, slot), step)
    reused = kept(sparsity.fwd_rhs, step) if sparsity.dlhs_rhs == identity and _both_ways(sparsity.fwd_rhs) else 1.0
    return (
        min(share("fwd_lhs"), share("fwd_rhs")),
        min(share("dlhs_g"), share("dlhs_rhs"), reused),
        min(share("drhs_g"), share("drhs_lhs")),
    )


def _both_ways(p: Pruner) -> bool:
    return isinstance(p, transposable) or any(map(_both_ways, p.parts))


def counted(jaxpr: core.Jaxpr, mark: str) -> Iterator[tuple[str | None, int]]:
    """(name, FLOPs) of every dot and convolution of a program, times how often loops run it. The name is that of the
    jitted function around it that begins with ``mark``; None where there is none. A while loop counts as one turn, and of
    branches the costliest counts."""
    for equation in jaxpr.eqns:
        kind, parameters = equation.primitive.name, equation.params
        shapes = [getattr(v.aval, "shape", ()) for v in equation.invars]
        if kind == "dot_general":
            yield None, flops(Dot(parameters["dimension_numbers"], None, None, None), *shapes)
        elif kind == "conv_general_dilated":
            out, rhs = equation.outvars[0].aval.shape, shapes[1]
            yield None, 2 * math.prod(out) * math.prod(rhs) // rhs[parameters["dimension_numbers"].rhs_spec[0]]
        elif kind == "cond":
            branches = [list(counted(b.jaxpr, mark)) for b in parameters["branches"]]
            yield from max(branches, key=lambda found: sum(f for _, f in found))
        else:
            times = parameters["length"] if kind == "scan" else 1
            name = parameters.get("name")
            for inner in _jaxprs(parameters):
                for found, cost in counted(inner, mark):
                    yield (name if isinstance(name, str) and name.startswith(mark) else found), times * cost


def _jaxprs(parameters) -> Iterator[core.Jaxpr]:
    """The programs inside an equation."""
    for value in jax.tree.leaves(
        list(parameters.values()), is_leaf=lambda v: isinstance(v, (core.Jaxpr, core.ClosedJaxpr))
    ):
        if isinstance(value, core.ClosedJaxpr):
            yield value.jaxpr
        elif isinstance(value, core.Jaxpr):
            yield value
