"""Uses of the weights of layers outside of these layers, in a traced model."""

from collections.abc import Sequence

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


def _note_other_uses(program: core.Jaxpr, known: dict[core.Var, Parameter], found: dict[str, list[str]]) -> None:
    """Note in ``found`` the operations outside of layers that take variables which are parameters."""
    for equation in program.eqns:
        operands = [None if isinstance(v, core.Literal) else known.get(v) for v in equation.invars]
        if not any(operands) or scopes.in_layer(equation):
            continue
        changed = operands[0].after(equation) if len(operands) == 1 and operands[0] is not None else None
        inside = list(flops.programs(equation.params.values()))
        if changed is not None:
            known[equation.outvars[0]] = changed
        for inner in inside:
            given = operands
            if equation.primitive.name == "while":  # constants of the condition, constants of the body, and the carry
                of_condition, of_body = equation.params["cond_nconsts"], equation.params["body_nconsts"]
                carry = operands[of_condition + of_body :]
                is_condition = inner is equation.params["cond_jaxpr"].jaxpr
                given = (operands[:of_condition] if is_condition else operands[of_condition:][:of_body]) + carry
            own = given[-len(inner.invars) :] if inner.invars else []
            assert len(own) == len(inner.invars)
            _note_other_uses(inner, {v: p for v, p in zip(inner.invars, own, strict=True) if p is not None}, found)
        if changed is None and not inside:
            for parameter in filter(None, operands):
                names = found.setdefault(parameter.path, [])
                names.extend([equation.primitive.name] * (equation.primitive.name not in names))
