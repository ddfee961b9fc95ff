"""Runs a traced program with other products in the place of those whose operand is a parameter.

The program is a jaxpr, as `jax.make_jaxpr` returns it. Programs inside it are followed: those of `jax.jit`,
`jax.checkpoint`, `lax.scan`, `lax.cond` and `lax.while_loop`. A parameter is followed through changes of its layout.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.extend import core

from nmjax.analysis.refusals import Use
from nmjax.core import versions
from nmjax.products.functions import before_transpose
from nmjax.products.operations import Conv, DimensionNumbers, Dot, RaggedDot
from nmjax.products.pruning import Operand, shape_of
from nmjax.programs.parameters import Parameter

RAGGED = lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), [0], [0])
Value = tuple[Any, Parameter | None]
States = Mapping[str, Any]


class Product(NamedTuple):
    """A product in a program. One of its operands is a parameter.

    Attributes:
      parameter: The parameter, in the layout of the operand.
      op: The operation, with the parameter as its right operand.
      swapped: True if the program has the parameter as its left operand.
      derived: True if it belongs to a derivative that the program takes itself, such as `jax.grad` in it.
      extra: The operands of the operation after the first two: the group sizes of a `RaggedDot`.
    """

    parameter: Parameter
    op: Dot | Conv | RaggedDot
    swapped: bool
    derived: bool = False
    extra: tuple[Any, ...] = ()

    def refusal(self, w: Any) -> str | None:
        """Return the reason why it cannot be pruned, whatever the method; None if it can.

        In a derivative, x may be a gradient or a tangent, and a product of x and a gradient has no weight at all. A
        pruner and its own gradient rule belong to the products as they were before JAX took the derivative.
        """
        if not self.derived:
            return None
        return (
            f"a product with this parameter, of shape {tuple(w.shape)}, is part of a derivative that the function "
            "takes itself, such as jax.grad, and the products of a derivative cannot be pruned"
        )


class ShapedProduct(NamedTuple):
    """A product with a parameter, and the shapes of its operands, in one layer of a stack."""

    product: Product
    lhs: jax.ShapeDtypeStruct
    rhs: jax.ShapeDtypeStruct

    @classmethod
    def of(cls, product: Product, x: Any, w: Any) -> "ShapedProduct":
        """Return a product and the shapes of its operands. It compares without the operands after the first two."""
        return cls(product._replace(extra=()), shape_of(x), shape_of(w))

    @property
    def operand(self) -> Operand:
        """The roles of the axes of the parameter's operand."""
        return self.product.op.operands(self.lhs.ndim, self.rhs.ndim)["y_w"]

    def use(self, layers: int = 1) -> Use:
        """Return the product as a plan reads it, in a stack of so many layers."""
        return Use(self.product.op, self.lhs, self.rhs, layers)


class Rewriter(NamedTuple):
    """The function that stands in the place of products with parameters.

    Attributes:
      compute: A function (product, x, w, arrays) of the operands and of the parameter's entry of ``states``. It returns
        the value of the product, or None to leave it as it is.
      seen: A function (parameter, name) that is called for every other operation that takes a parameter.
      derived: True inside of an equation that belongs to a derivative, as in `Product`.
    """

    compute: Callable[[Product, Any, Any, Any], Any]
    seen: Callable[[Parameter, str], None]
    derived: bool = False

    def run(self, program: core.Jaxpr, consts: Sequence[Any], inputs: Sequence[Value], states: States) -> list[Value]:
        """Return the results of a program, each with its parameter, or with None if it was computed.

        Args:
          program: The program.
          consts: The values of its constants.
          inputs: Its inputs, each with the parameter that it is.
          states: The arrays of the parameters' sparsity states, by the paths of the parameters.
        """
        values: dict[core.Var, Value] = dict(zip(program.constvars, ((c, None) for c in consts), strict=True))
        values |= dict(zip(program.invars, inputs, strict=True))
        read = lambda v: (v.val, None) if isinstance(v, core.Literal) else values[v]
        for equation in program.eqns:
            operands = [read(v) for v in equation.invars]
            if any(parameter is not None for _, parameter in operands):
                here = self._replace(derived=self.derived or versions.is_derived(equation))
                results = here._rewritten(program, equation, operands, states)
            else:
                results = [(y, None) for y in _plain(program, equation, [x for x, _ in operands])]
            values |= dict(zip(equation.outvars, results, strict=True))
        return [read(v) for v in program.outvars]

    def _rewritten(
        self, program: core.Jaxpr, equation: core.JaxprEqn, operands: list[Value], states: States
    ) -> list[Value]:
        """Return the results of an equation that uses parameters."""
        name, arrays, parameters = equation.primitive.name, [x for x, _ in operands], _parameters(operands)
        inside = INSIDE.get(name)
        if inside is not None:
            return inside(self, equation, operands, states)
        if len(operands) == 1:
            changed = parameters[0].after(equation) if parameters[0] is not None else None
            if changed is not None:
                return [(_plain(program, equation, arrays)[0], changed)]
        product = _product(equation, parameters)
        if product is not None:
            x, w = arrays[::-1] if product.swapped else arrays[:2]
            product = product._replace(derived=self.derived, extra=tuple(arrays[2:]))
            y = self.compute(product, x, w, states.get(product.parameter.path))
            if y is None:
                y = _plain(program, equation, arrays)[0]
            elif product.swapped and isinstance(product.op, Dot):
                y = lax.transpose(y, _order(product.op.dims, equation))
            return [(y, None)]
        for parameter in filter(None, parameters):
            self.seen(parameter, name)
        return [(y, None) for y in _plain(program, equation, arrays)]


def _plain(program: core.Jaxpr, equation: core.JaxprEqn, arrays: Sequence[Any]) -> list[Any]:
    """Return the results of an equation of a program as it stands."""
    pairs = zip(equation.invars, arrays, strict=True)
    given: dict[core.Var, Any] = {v: x for v, x in pairs if not isinstance(v, core.Literal)}
    alone = program.replace(
        constvars=[], invars=[*given], outvars=equation.outvars, eqns=[equation], effects=equation.effects
    )  # fmt: skip
    return core.jaxpr_as_fun(core.ClosedJaxpr(alone, ()))(*given.values())


# ---- products ----


def _product(equation: core.JaxprEqn, parameters: list[Parameter | None]) -> Product | None:
    """Return the product of a parameter and another value that an equation is, or None."""
    name, of = equation.primitive.name, equation.params
    if name == "dot_general" and None in parameters:
        swapped = parameters[0] is not None
        (lc, rc), (lb, rb) = of["dimension_numbers"]
        if swapped:
            lc, rc, lb, rb = rc, lc, rb, lb
        pairs = sorted(zip(map(int, lc), map(int, rc), strict=True), key=lambda pair: pair[1])  # as the weight has them
        contract = (tuple(a for a, _ in pairs), tuple(b for _, b in pairs))
        batch = (tuple(map(int, lb)), tuple(map(int, rb)))
        precision = of["precision"][::-1] if swapped and isinstance(of["precision"], tuple) else of["precision"]
        sharding = of["out_sharding"]
        if swapped and sharding is not None:
            sharding = before_transpose(sharding, _order((contract, batch), equation))
        op = Dot((contract, batch), precision, of["preferred_element_type"], sharding)
        weight = parameters[0] if swapped else parameters[1]
        assert weight is not None
        return Product(weight, op, swapped)
    if name == "conv_general_dilated" and parameters[0] is None and parameters[1] is not None:
        op = Conv(
            tuple(of["window_strides"]), tuple(of["padding"]), tuple(of["lhs_dilation"]), tuple(of["rhs_dilation"]),
            of["dimension_numbers"], of["feature_group_count"], of["batch_group_count"], of["precision"],
            of["preferred_element_type"], of.get("out_sharding"),
        )  # fmt: skip
        return Product(parameters[1], op, swapped=False)
    if name == "ragged_dot_general" and parameters[0] is None and parameters[1] is not None:
        plain = (of["group_offset"], of["out_sharding"]) == (None, None)
        if plain and of["ragged_dot_dimension_numbers"] == RAGGED:  # as `jax.lax.ragged_dot` has them
            return Product(parameters[1], RaggedDot(of["precision"], of["preferred_element_type"]), swapped=False)
    return None


def _order(dims: DimensionNumbers, equation: core.JaxprEqn) -> list[int]:
    """Return the axes of a product of x and a weight in the order that they have if the weight is the left operand.

    Args:
      dims: The dimension numbers with the weight as the right operand.
      equation: The product in the program, with the weight as the left operand.
    """
    (contract, _), (batch, _) = dims
    shapes: list[Any] = [equation.invars[1].aval, equation.outvars[0].aval]
    of_x, first = len(shapes[0].shape) - len(contract), len(batch)
    return [*range(first), *range(of_x, len(shapes[1].shape)), *range(first, of_x)]


# ---- programs inside programs ----


def _opened(program: Any) -> tuple[core.Jaxpr, Sequence[Any]]:
    """Return a program and its constants. JAX has closed programs and open ones in equations."""
    return (program.jaxpr, program.consts) if isinstance(program, core.ClosedJaxpr) else (program, ())


def _parameters(operands: Sequence[Value]) -> list[Parameter | None]:
    return [parameter for _, parameter in operands]


def _arrays(rewriter: Rewriter, results: Sequence[Value], by: str) -> list[Any]:
    """Return the results of an inner program. A parameter among them is not followed further."""
    for parameter in filter(None, _parameters(results)):
        rewriter.seen(parameter, f"the result of {by}")
    return [y for y, _ in results]


def _jit(rewriter: Rewriter, equation: core.JaxprEqn, operands: list[Value], states: States) -> list[Value]:
    of = equation.params
    program, consts = _opened(of["jaxpr"] if "jaxpr" in of else of["call_jaxpr"])
    results = rewriter.run(program, consts, operands, states)
    shardings = of.get("out_shardings", [None] * len(results))
    constrained: list[Value] = []
    for (y, parameter), sharding in zip(results, shardings, strict=True):
        fixed = isinstance(sharding, jax.sharding.Sharding)
        constrained.append((lax.with_sharding_constraint(y, sharding) if fixed else y, parameter))
    return constrained


def _checkpoint(rewriter: Rewriter, equation: core.JaxprEqn, operands: list[Value], states: States) -> list[Value]:
    of, parameters = equation.params, _parameters(operands)
    program, consts = _opened(of["jaxpr"])
    returned: list[Parameter | None] = []  # as `nnx.remat` returns the parameters of a module

    def run(arrays: list[Any], states: States) -> list[Any]:
        results = rewriter.run(program, consts, list(zip(arrays, parameters, strict=True)), states)
        returned[:] = _parameters(results)
        return [y for y, _ in results]

    given = of["prevent_cse"]  # one for all operands, or one for each
    prevent_cse: Any = given if isinstance(given, bool) else (list(given), True)
    again = jax.checkpoint(run, prevent_cse=prevent_cse, policy=of["policy"])
    return list(zip(again([x for x, _ in operands], dict(states)), returned, strict=True))


def _scan(rewriter: Rewriter, equation: core.JaxprEqn, operands: list[Value], states: States) -> list[Value]:
    of, parameters = equation.params, _parameters(operands)
    program, consts = _opened(of["jaxpr"])
    # The operands are constants, then the carry, then stacks. JAX 0.10 says how many of each (`num_consts`), and 0.12
    # says it in another way (`ft_in`). Ranks tell it in both: a scan slices the stacks, so only their ranks change.
    rank = lambda v: len(getattr(v.aval, "shape", ()))
    stacked = sum(rank(v) != rank(w) for v, w in zip(equation.invars, program.invars, strict=True))
    carried = sum(rank(v) == rank(w) for v, w in zip(equation.outvars, program.outvars, strict=True))
    shared = len(operands) - carried - stacked
    sliced = [p and p.sliced for p in parameters[shared + carried :]]
    for parameter in filter(None, parameters[shared : shared + carried]):
        rewriter.seen(parameter, "the carry of scan")
    inside = [*parameters[:shared], *[None] * carried, *sliced]
    own = {p.path: states[p.path] for p in sliced if p is not None and p.path in states}
    constants = [x for x, _ in operands[:shared]]

    def body(carry: list[Any], slices: tuple[list[Any], States]) -> tuple[list[Any], list[Any]]:
        arrays, own = slices
        inputs = list(zip([*constants, *carry, *arrays], inside, strict=True))
        results = _arrays(rewriter, rewriter.run(program, consts, inputs, {**states, **own}), "scan")
        return results[:carried], results[carried:]

    first = [x for x, _ in operands[shared : shared + carried]]
    slices = ([x for x, _ in operands[shared + carried :]], own)
    last, ys = lax.scan(body, first, slices, of["length"], of["reverse"], of["unroll"])
    return [(y, None) for y in (*last, *ys)]


def _cond(rewriter: Rewriter, equation: core.JaxprEqn, operands: list[Value], states: States) -> list[Value]:
    parameters = _parameters(operands)[1:]

    def branch(program: core.Jaxpr, consts: Sequence[Any]) -> Callable[..., list[Any]]:
        inputs = lambda arrays: list(zip(arrays, parameters, strict=True))
        return lambda *arrays: _arrays(rewriter, rewriter.run(program, consts, inputs(arrays), states), "cond")

    branches = [branch(*_opened(program)) for program in equation.params["branches"]]
    index, *arrays = [x for x, _ in operands]
    platforms = equation.params.get("branches_platforms")
    if platforms is None:
        return [(y, None) for y in lax.switch(index, branches, *arrays)]
    by_platform = {name: branch for names, branch in zip(platforms, branches, strict=True) for name in names or ()}
    default = next((branch for names, branch in zip(platforms, branches, strict=True) if names is None), None)
    return [(y, None) for y in lax.platform_dependent(*arrays, default=default, **by_platform)]


def _while(rewriter: Rewriter, equation: core.JaxprEqn, operands: list[Value], states: States) -> list[Value]:
    of = equation.params
    of_condition, of_body = of["cond_nconsts"], of["body_nconsts"]
    condition, body = _opened(of["cond_jaxpr"]), _opened(of["body_jaxpr"])
    asked, used, first = operands[:of_condition], operands[of_condition:][:of_body], operands[of_condition + of_body :]
    for parameter in filter(None, _parameters(first)):
        rewriter.seen(parameter, "while")
    as_values: Callable[[Sequence[Any]], list[Value]] = lambda carry: [(x, None) for x in carry]
    again = lambda carry: rewriter.run(*condition, [*asked, *as_values(carry)], states)[0][0]
    turn = lambda carry: _arrays(rewriter, rewriter.run(*body, [*used, *as_values(carry)], states), "while")
    return as_values(lax.while_loop(again, turn, [x for x, _ in first]))


INSIDE: dict[str, Callable[..., list[Value]]] = {
    "jit": _jit,
    "pjit": _jit,
    "closed_call": _jit,
    "eval_jaxpr": _jit,  # its name in newer versions of jax
    "remat2": _checkpoint,
    "checkpoint": _checkpoint,
    "scan": _scan,
    "cond": _cond,
    "while": _while,
}
