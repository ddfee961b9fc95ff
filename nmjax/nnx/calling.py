"""Calls a method of a layer with other products in place of those of its weights."""

from collections.abc import Callable, Iterable
from typing import Any

import jax
from flax import nnx

from nmjax.programs.rewriting import Rewriter
from nmjax.programs.running import Result, results

Path = tuple[Any, ...]
FLAX = ("_pytree__", "_object__")  # attributes in which Flax keeps a module's bookkeeping


def call_with(
    layer: Any, dense: Any, method: Callable[..., Any], args: Any, options: Any,
    values: dict[str, Any], rewriter: Rewriter, argument: int | None = None,
) -> Any:  # fmt: skip
    """Return what a method returns if a rewriter computes its products with the weights.

    The method is traced on copies of all modules and variables. What it changes, such as statistics or the count of a
    random stream, is written to the layer and to the arguments after the trace.

    Args:
      layer: The layer.
      dense: The layer without its sparsity state. Its variables and inner modules are those of the layer.
      method: The method of the dense layer.
      args: The other arguments of the method.
      options: Its keyword arguments.
      values: The values of the weights, by their attributes.
      rewriter: What stands in the place of the products with the weights.
      argument: The number of the argument that is the weight, if the layer has none: its value is among ``values``.
    """
    if argument is not None:
        args = (*args[:argument], *args[argument + 1 :])
    whole: Any = (dense, [v for v in jax.tree.leaves((args, options), is_leaf=_is_node) if _is_node(v)])
    graph, state = nnx.split(whole)
    changed: dict[Path, nnx.Variable[Any]] = {}
    left: list[tuple[Path, str, bool]] = []  # attributes that the method sets, and whether each is data

    def call(values: dict[str, Any], *args: Any, **options: Any) -> tuple[Any, list[Any], list[Any]]:
        copy = nnx.merge(graph, state, copy=True)
        if argument is not None:
            args = (*args[:argument], *values.values(), *args[argument:])
        for name, value in values.items() if argument is None else ():
            getattr(copy[0], name).set_value(value)
        before, held = {path: v.get_raw_value() for path, v in _variables(copy)}, _attributes(copy)
        nodes = iter(copy[1])
        given = jax.tree.map(lambda v: next(nodes) if _is_node(v) else v, (args, options), is_leaf=_is_node)
        y = method(copy[0], *given[0], **given[1])
        changed.update(
            (path, v)
            for path, v in _variables(copy)
            if path not in before or not _same(v.get_raw_value(), before[path])
        )
        now = {at: v for at, v in _attributes(copy).items() if at not in held or held[at] is not v}
        modules = dict(nnx.iter_modules(copy))
        left.extend((path, name, bool(vars(modules[path]).get("_pytree__nodes", {}).get(name))) for path, name in now)
        return y, [v.get_raw_value() for v in changed.values()], [*now.values()]

    def value(result: Result) -> Any:
        if result.parameter is not None:
            rewriter.seen(result.parameter, "the result")
        return result.value

    is_result = lambda v: isinstance(v, Result)
    y, new, attributes = results(call, values, args, options, rewriter, {}, _is_node)
    old, owners = dict(_variables(whole)), {**dict(nnx.iter_modules(whole)), (0,): layer}
    for (path, variable), raw in zip(changed.items(), new, strict=True):
        itself = [path == (0, v.parameter.path) for v in jax.tree.leaves(raw, is_leaf=is_result) if v.parameter]
        if not all(itself) or not itself:  # `nnx.remat` gives a weight back as it is
            raw = jax.tree.map(value, raw, is_leaf=is_result)
            if path in old:
                old[path].set_raw_value(raw)
            elif path[:-1] in owners:
                setattr(owners[path[:-1]], path[-1], nnx.data(variable.replace(raw)))
    for (path, name, is_data), attribute in zip(left, attributes, strict=True):
        if path in owners:
            attribute = jax.tree.map(value, attribute, is_leaf=is_result)
            setattr(owners[path], name, nnx.data(attribute) if is_data else attribute)
    return jax.tree.map(value, y, is_leaf=is_result)


def _attributes(tree: Any) -> dict[tuple[Path, str], Any]:
    """Return the attributes of modules that hold no module and no variable, by the module's path and their names."""
    plain = lambda v: not any(map(_is_node, jax.tree.leaves(v, is_leaf=_is_node)))
    held = ((path, name, v) for path, m in nnx.iter_modules(tree) for name, v in vars(m).items())
    return {(path, name): v for path, name, v in held if not name.startswith(FLAX) and plain(v)}


def _is_node(v: Any) -> bool:
    return isinstance(v, (nnx.Pytree, nnx.Variable))


def _variables(tree: Any) -> Iterable[tuple[Path, nnx.Variable[Any]]]:
    return ((path, v) for path, v in nnx.iter_graph(tree) if isinstance(v, nnx.Variable))


def _same(a: Any, b: Any) -> bool:
    """Return True if two values are the same arrays."""
    a, b = jax.tree.leaves(a), jax.tree.leaves(b)
    return len(a) == len(b) and all(v is w for v, w in zip(a, b, strict=True))
