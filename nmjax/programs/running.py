"""Runs a function with other products, given its parameters by name."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from nmjax.programs.parameters import Parameter
from nmjax.programs.rewriting import Rewriter, States


def is_array(v: Any) -> bool:
    """Return True for an array or the shape of one."""
    return isinstance(v, (jax.Array, np.ndarray, jax.ShapeDtypeStruct))


class Result(NamedTuple):
    """A result of a function that was run with other products.

    Attributes:
      value: Its value.
      parameter: The parameter that it is, in its layout; None if it was computed.
    """

    value: Any
    parameter: Parameter | None = None


def run(
    f: Callable[..., Any], params: Any, args: Any, options: Any, rewriter: Rewriter, states: States
) -> Any:  # fmt: skip
    """Trace ``f(params, *args, **options)``, and return what its program gives with other products.

    Args:
      f: A function of a tree of parameters and other arguments.
      params: As in `results`.
      args: As in `results`.
      options: As in `results`.
      rewriter: As in `results`. A parameter that the function returns counts as seen.
      states: As in `results`.
    """

    def value(result: Result) -> Any:
        if result.parameter is not None:
            rewriter.seen(result.parameter, "the result")
        return result.value

    is_result = lambda v: isinstance(v, Result)
    return jax.tree.map(value, results(f, params, args, options, rewriter, states), is_leaf=is_result)


def results(
    f: Callable[..., Any], params: Any, args: Any, options: Any, rewriter: Rewriter, states: States,
    is_leaf: Callable[[Any], bool] | None = None,
) -> Any:  # fmt: skip
    """Trace ``f(params, *args, **options)``, and return the tree of what its program gives, with a `Result` per leaf.

    Args:
      f: A function of a tree of parameters and other arguments.
      params: The tree of parameters. Their paths in it are their names.
      args: The other arguments. Leaves that are not arrays are given to the function as they are.
      options: The keyword arguments, likewise.
      rewriter: What stands in the place of products with parameters.
      states: The arrays of the parameters' sparsity states, by the paths of the parameters.
      is_leaf: Nodes among the other arguments that are given as they are, as in `jax.tree.flatten`.
    """
    rest, tree = jax.tree.flatten((args, options), is_leaf)
    values, params_tree = jax.tree.flatten(params)
    paths = [path for path, value in leaves(params).items() if is_array(value)]
    given = [*filter(is_array, values), *filter(is_array, rest)]
    out: list[Any] = []  # what the function returns: None in the place of every array, and the structure last

    def flat(*given: Any) -> list[Any]:
        arrays = iter(given)
        whole = [next(arrays) if is_array(v) else v for v in [*values, *rest]]
        args, options = jax.tree.unflatten(tree, whole[len(values) :])
        given_back, structure = jax.tree.flatten(
            f(jax.tree.unflatten(params_tree, whole[: len(values)]), *args, **options)
        )
        out[:] = [*(None if is_array(v) else v for v in given_back), structure]
        return [v for v in given_back if is_array(v)]

    closed = jax.make_jaxpr(flat)(*given)
    named = [*map(Parameter, paths), *[None] * (len(given) - len(paths))]
    computed = rewriter.run(closed.jaxpr, closed.consts, list(zip(given, named, strict=True)), states)
    arrays = (Result(*value) for value in computed)
    *kinds, structure = out
    return jax.tree.unflatten(structure, [next(arrays) if kind is None else Result(kind) for kind in kinds])


def leaves(params: Any) -> dict[str, Any]:
    """Return the leaves of a tree by their paths.

    >>> leaves({"up": {"kernel": 1.0}, "blocks": [2.0]})
    {'blocks/0': 2.0, 'up/kernel': 1.0}
    """
    flat = jax.tree_util.tree_flatten_with_path(params)[0]
    named = {_name(keys): value for keys, value in flat}
    if len(named) < len(flat):
        twice = next(name for name in named if sum(_name(keys) == name for keys, _ in flat) > 1)
        raise ValueError(f"two parameters have the path {twice!r}. Rename one: a name in a path has no '/'.")
    return named


def _name(keys: Any) -> str:
    return jax.tree_util.keystr(keys, simple=True, separator="/")
