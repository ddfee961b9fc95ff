"""Uses of the weights of layers outside of these layers, in a traced model."""

from collections.abc import Iterable, Sequence

from jax.extend import core

from nmjax.analysis import flops, scopes
from nmjax.programs.parameters import Parameter


def other_uses(program: core.Jaxpr, names: Sequence[str | None]) -> dict[str, list[str]]:
    """Return what else than products of layers a program does with its parameters, by their names.

    Args:
      program: The program. The products of layers are in scopes of `nmjax.analysis.scopes`.
      names: For each argument of the program, the name of the parameter that it is, or None.

    Returns:
      For each such parameter the names of the operations, each once.

    >>> import jax
    >>> import jax.numpy as jnp
    >>> def f(w, x):
    ...     with scopes.of_layer(0):
    ...         y = x @ w
    ...     return jnp.tanh(y) @ w.T
    >>> other_uses(jax.make_jaxpr(f)(jnp.ones((2, 4)), jnp.ones((3, 2))).jaxpr, ["w", None])
    {'w': ['dot_general']}
    """
    found: dict[str, list[str]] = {}
    known = {v: Parameter(name) for v, name in zip(program.invars, names, strict=True) if name is not None}
    _note_other_uses(program, known, found)
    return found


# Operations that run the program in them on their own operands. Others that hold a program, such as a scatter with its
# update, use what they take.
CALLS = ("jit", "pjit", "closed_call", "remat2", "checkpoint", "custom_jvp_call", "custom_vjp_call")
CALLS += ("custom_vjp_call_jaxpr", "shard_map", "cond", "scan", "while")


def _note_other_uses(program: core.Jaxpr, known: dict[core.Var, Parameter], found: dict[str, list[str]]) -> None:
    """Note in ``found`` the operations outside of layers that take parameters. ``known`` gets those that are made of
    parameters by a change of layout, or that inner programs return."""

    def note(parameters: Iterable[Parameter | None], name: str) -> None:
        for parameter in filter(None, parameters):
            names = found.setdefault(parameter.path, [])
            names.extend([name] * (name not in names))

    for equation in program.eqns:
        name = equation.primitive.name
        operands = [None if isinstance(v, core.Literal) else known.get(v) for v in equation.invars]
        if scopes.in_layer(equation) or not any(operands):
            continue
        changed = operands[0].after(equation) if len(operands) == 1 and operands[0] is not None else None
        if changed is not None:
            known[equation.outvars[0]] = changed
            continue
        inside = [(inner, _given(equation, inner, operands)) for inner in flops.programs(equation.params.values())]
        if name not in CALLS or any(len(given) != len(inner.invars) for inner, given in inside):
            note(operands, name)
            continue
        results: list[list[Parameter | None]] = []
        for inner, given in inside:
            own = {v: p for v, p in zip(inner.invars, given, strict=True) if p is not None}
            _note_other_uses(inner, own, found)
            if name == "while" and inner is equation.params["cond_jaxpr"].jaxpr:
                continue
            results.append([None if isinstance(v, core.Literal) else own.get(v) for v in inner.outvars])
            if name in ("scan", "while"):  # a parameter that only the next turn gets is not followed there
                pairs = zip(results[-1], _carry(equation, inner, given), strict=False)
                note((new for new, old in pairs if old is None), f"the carry of {name}")
        for v, *parameters in zip(equation.outvars, *results, strict=True):  # of each branch of a cond
            if len({p and p.path for p in parameters}) == 1 and parameters[0] is not None:
                known[v] = parameters[0]
            else:
                note(parameters, f"the result of {name}")


def _given(equation: core.JaxprEqn, inner: core.Jaxpr, operands: list[Parameter | None]) -> list[Parameter | None]:
    """Return the operands of an equation that a program in it takes."""
    if equation.primitive.name == "while":  # constants of the condition, constants of the body, and the carry
        of_condition, of_body = equation.params["cond_nconsts"], equation.params["body_nconsts"]
        carry = operands[of_condition + of_body :]
        if inner is equation.params["cond_jaxpr"].jaxpr:
            return operands[:of_condition] + carry
        return operands[of_condition:][:of_body] + carry
    return operands[1:] if equation.primitive.name == "cond" else operands


def _carry(equation: core.JaxprEqn, inner: core.Jaxpr, given: list[Parameter | None]) -> list[Parameter | None]:
    """Return the carry that the body of a loop takes."""
    if equation.primitive.name == "while":
        return given[len(given) - len(equation.outvars) :]
    rank = lambda v: len(getattr(v.aval, "shape", ()))  # a scan slices stacks, so only their ranks change
    stacked = sum(rank(v) != rank(w) for v, w in zip(equation.invars, inner.invars, strict=True))
    carried = sum(rank(v) == rank(w) for v, w in zip(equation.outvars, inner.outvars, strict=True))
    return given[len(given) - stacked - carried : len(given) - stacked]
