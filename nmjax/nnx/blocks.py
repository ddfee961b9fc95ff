"""The blocks of a model, called one after another: each on the outputs of the blocks before it, which are kept."""

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.extend import core

from nmjax.nnx.layers import layers
from nmjax.nnx.recording import PLACE, recording


class Call(NamedTuple):
    """The arguments of a call.

    Attributes:
      args: The positional ones.
      options: The keyword arguments.
    """

    args: tuple[Any, ...]
    options: dict[str, Any]

    @classmethod
    def of(cls, batch: Any) -> "Call":
        """Return the call that a batch asks for: a tuple of arguments, a dict of keyword arguments, or one array.

        >>> Call.of({"x": 1}), Call.of((1, 2))
        (Call(args=(), options={'x': 1}), Call(args=(1, 2), options={}))
        """
        if isinstance(batch, cls):
            return batch
        if isinstance(batch, Mapping):
            return cls((), dict(batch))
        return cls(batch if isinstance(batch, tuple) else (batch,), {})

    def split(self) -> tuple[list[Any], "Rest"]:
        """Return the arrays, and the rest, which is static for `jax.jit`."""
        leaves, tree = jax.tree.flatten((self.args, self.options))
        for v in leaves:
            if not _is_array(v) and not isinstance(v, Hashable):
                raise ValueError(f"an argument of the call is neither an array nor hashable: {v!r}.")
        return [v for v in leaves if _is_array(v)], Rest(tuple(None if _is_array(v) else (v,) for v in leaves), tree)


class Rest(NamedTuple):
    """The rest of a call, without its arrays.

    Attributes:
      leaves: For each leaf of the arguments, None for an array, or a tuple of the value.
      tree: The structure of the arguments.
    """

    leaves: tuple[Any, ...]
    tree: Any

    def call(self, arrays: Iterable[Any]) -> Call:
        """Return the call with these arrays."""
        values = iter(arrays)
        return Call(*jax.tree.unflatten(self.tree, [next(values) if v is None else v[0] for v in self.leaves]))


def _is_array(v: Any) -> bool:
    return isinstance(v, (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct))


def _is_node(v: Any) -> bool:
    return isinstance(v, (nnx.Pytree, nnx.Variable))


def blocks_of(paths: Iterable[str], modules: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the paths of layers by the block that they are in.

    A block is the outermost member of a list, a dict or a sequence of modules. A layer in none of them is in the
    outermost module that holds no such block.

    Args:
      paths: The paths of the layers.
      modules: The modules of the model, by path.

    >>> linear = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
    >>> named = ("bert", "bert/blocks/0", "bert/blocks/0/up", "bert/pooler", "head")
    >>> model = dict.fromkeys(named, linear) | {"bert/blocks": nnx.List([])}
    >>> blocks_of(["bert/blocks/0/up", "bert/pooler", "head"], model)
    {'bert/blocks/0': ['bert/blocks/0/up'], 'bert/pooler': ['bert/pooler'], 'head': ['head']}
    """
    groups: dict[str, list[str]] = {}
    starts = {path: [path[:end] for end in _ends(path)] for path in paths}
    listed = {path: next((one for one in starts[path] if _is_member(one, modules)), None) for path in starts}
    holders = {
        one for path, block in listed.items() if block is not None for one in starts[path] if len(one) < len(block)
    }
    for path, block in listed.items():
        alone = (
            one for one in starts[path] if one in modules and one not in holders and not _is_container(modules[one])
        )
        groups.setdefault(block or next(alone, path), []).append(path)
    return groups


def _ends(path: str) -> list[int]:
    return [i for i, letter in enumerate(path + "/") if letter == "/"]


def _is_container(module: Any) -> bool:
    return isinstance(module, (nnx.List, nnx.Dict, nnx.Sequential))


def _is_member(path: str, modules: Mapping[str, Any]) -> bool:
    """Return True if a module is a member of a list, a dict or a sequence, and is none itself."""
    holder = path.rpartition("/")[0]
    inside = holder in modules and _is_container(modules[holder])
    return path in modules and inside and not _is_container(modules[path])


def modules_of(model: Any) -> dict[str, Any]:
    """Return the modules of a model, by path."""
    return {"/".join(map(str, path)): module for path, module in nnx.iter_modules(model)}


class _Reached(BaseException):
    """Raised in a model's call when it reaches a block. It is no Exception, so that the model does not catch it."""

    def __init__(self, call: Call) -> None:
        self.call = call


class _NoChain(BaseException):
    """Raised in a model's call if its blocks cannot be called on their own."""


class Blocks:
    """The blocks of a model, each of which can be called on its own.

    A model whose blocks are a list runs them one after another. To run block i again, it is enough to know the outputs
    of the blocks before it. They are kept as long as some block needs them, which is most often the next one.

    Attributes:
      paths: The paths of the blocks, in the order of their calls.
    """

    def __init__(self, model: Any, paths: Sequence[str], batches: Sequence[Call], needs: Sequence[set[int]]) -> None:
        self.model, self.paths, self.batches, self.needs = model, list(paths), batches, needs
        self.outputs: list[list[Any]] = [[] for _ in batches]  # of each batch, shapes in place of what is not needed

        def output(graph: Any, rest: Rest, state: Any, arrays: list[Any]) -> Any:
            call = rest.call(arrays)
            return nnx.merge(graph, state, copy=True)(*call.args, **call.options)

        self._output = jax.jit(output, static_argnums=(0, 1))  # blocks that are alike compile once

    @classmethod
    def find(
        cls, model: Any, paths: Sequence[str], needed: Collection[str], batches: Sequence[Call]
    ) -> "Blocks | None":
        """Return the blocks of a model in the order of their calls; None if they cannot be called on their own.

        They can be if the call of the model calls each of them once, in the same order for all batches, with arrays,
        and outside scans, checkpoints, branches and compiled functions; if no two share a variable; and if none of
        their layers is used elsewhere. Those that it does not call are left out, unless they are needed.

        Args:
          model: The model. The blocks are called with the weights that it has at that time.
          paths: The paths of the blocks, in any order.
          needed: Those that have to be among the result.
          batches: The calls of the model.
        """
        modules = modules_of(model)
        paths = [path for path in paths if path in modules]
        kinds = {type(modules[path]) for path in paths}
        if any(kind.__init_subclass__.__func__ is not nnx.Module.__init_subclass__.__func__ for kind in kinds):
            return None  # a subclass, which stands in for a block, may be registered or refused
        called: list[str] | None = None
        needs: list[set[int]] = []
        try:
            for batch in _unlike(batches):
                outputs = _outputs(model, paths, batch)
                if called is not None and called != list(outputs):
                    return None
                called, shapes = list(outputs), list(outputs.values())
                needs = needs or [set() for _ in called]
                found = (_needs(model, called, shapes, i, batch) for i in range(len(called)))
                needs = [one | more for one, more in zip(needs, found, strict=True)]
        except (_NoChain, Exception):  # if the call itself fails, the call of the whole model tells
            return None
        if called is None or not set(needed) <= set(called):
            return None
        variables = [v for path in called for _, v in nnx.iter_graph(modules[path]) if isinstance(v, nnx.Variable)]
        owned = [id(v) for v in variables if not isinstance(v, nnx.RngState)]
        return None if len(set(owned)) < len(owned) else cls(model, called, batches, needs)

    def module(self, number: int) -> Any:
        """Return a block."""
        return modules_of(self.model)[self.paths[number]]

    def calls(self, number: int) -> list[Call]:
        """Return the calls of a block, one for each batch. The outputs of the blocks that it needs were computed."""
        zeros = lambda v: jnp.zeros(v.shape, v.dtype) if isinstance(v, jax.ShapeDtypeStruct) else v
        return [
            _reached(self.model, self.paths, jax.tree.map(zeros, outputs), number, batch)
            for batch, outputs in zip(self.batches, self.outputs, strict=True)
        ]

    def run(self, number: int, calls: Sequence[Call]) -> None:
        """Compute the outputs of a block, keep them, and forget those that no later block needs."""
        later = set().union(*self.needs[number + 1 :])
        graph, state = nnx.split(self.module(number))
        for outputs, call in zip(self.outputs, calls, strict=True):
            arrays, rest = call.split()
            outputs.append(self._output(graph, rest, state, arrays) if later else None)
            outputs[:] = [v if i in later else _shapes(v) for i, v in enumerate(outputs)]


def _unlike(batches: Sequence[Call]) -> Iterable[Call]:
    """Return a batch of each kind: of the same arguments, and of arrays of the same shapes."""
    kinds = {}
    for batch in batches:
        arrays, rest = batch.split()
        kinds.setdefault((rest, tuple((v.shape, str(v.dtype)) for v in arrays)), batch)
    return kinds.values()


def _shapes(tree: Any) -> Any:
    return jax.tree.map(lambda v: jax.ShapeDtypeStruct(v.shape, v.dtype), tree)


# ---- calls of a model whose blocks do something else ----

_IN_PLACE: ContextVar[Callable[[Any, Call], Any]] = ContextVar("in_place")


@cache
def _stand_in(kind: type) -> type:
    """Return a subclass of a class, whose call is that of the context."""
    call = lambda self, *args, **options: _IN_PLACE.get()(self, Call(args, options))
    return type(kind)(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})


def _call(model: Any, paths: Sequence[str], batch: Call, in_place: Callable[[str, Any, Call], Any]) -> Any:
    """Call a copy of a model in which ``in_place(path, block, call)`` stands in the place of the calls of its blocks.

    The class of a block is a subclass for this time, because a model may look up ``__call__`` in the class.
    """
    graph, state = nnx.split(model)
    copy = nnx.merge(graph, state, copy=True)
    modules = modules_of(copy)
    known = {id(modules[path]): path for path in paths}
    outside = core.get_opaque_trace_state(convention="nmjax")

    def reached(block: Any, call: Call) -> Any:
        # In a scan or a checkpoint of Flax, the block is a copy. In a function that JAX transforms, the trace differs.
        if id(block) not in known or core.get_opaque_trace_state(convention="nmjax") != outside:
            raise _NoChain
        return in_place(known[id(block)], block, call)

    for path in paths:
        modules[path].__class__ = _stand_in(type(modules[path]))
    token = _IN_PLACE.set(reached)
    try:
        return copy(*batch.args, **batch.options)
    finally:
        _IN_PLACE.reset(token)


def _outputs(model: Any, paths: Sequence[str], batch: Call) -> dict[str, Any]:
    """Return the shapes of the outputs of blocks, in the order of their calls.

    Layers note in which block they are asked for their product. It must be their own.
    """
    found: dict[str, Any] = {}
    arrays, rest = batch.split()
    inner = [layer.path for layer in layers(model)]
    owners = {path: block for path in inner for block in paths if f"{path}/".startswith(f"{block}/")}
    copy, notes = recording(model, [False] * len(inner))
    graph, state = nnx.split(copy)

    def note(path: str, block: Any, call: Call) -> Any:
        token = PLACE.set(path)
        try:
            y = type(block).__bases__[0].__call__(block, *call.args, **call.options)
        finally:
            PLACE.reset(token)
        given = jax.tree.leaves((call, y), is_leaf=_is_node)
        if path in found or any(map(_is_node, given)) or not all(map(_is_array, jax.tree.leaves(y))):
            raise _NoChain
        found[path] = _shapes(y)
        return y

    def run(state: Any, arrays: list[Any]) -> None:
        _call(nnx.merge(graph, state), paths, rest.call(arrays), note)

    jax.eval_shape(run, state, arrays)
    if any(notes[i].places - {owners[path]} for i, path in enumerate(inner) if path in owners):
        raise _NoChain
    return found


def _reached(model: Any, paths: Sequence[str], outputs: Sequence[Any], number: int, batch: Call) -> Call:
    """Return the arguments of a block, given the outputs of the blocks before it."""

    def reach(path: str, block: Any, call: Call) -> Any:
        del block
        place = paths.index(path)
        if place < number:
            return outputs[place]
        raise _Reached(call) if place == number else _NoChain

    try:
        _call(model, paths, batch, reach)
    except _Reached as reached:
        return reached.call
    raise _NoChain


def _needs(model: Any, paths: Sequence[str], shapes: Sequence[Any], number: int, batch: Call) -> set[int]:
    """Return the numbers of the blocks whose outputs the arguments of a block depend on."""
    arrays, rest = batch.split()
    graph, state = nnx.split(model)

    def arguments(outputs: list[Any], state: Any, arrays: list[Any]) -> list[Any]:
        reached = _reached(nnx.merge(graph, state), paths, [*outputs, *shapes[number:]], number, rest.call(arrays))
        return reached.split()[0]

    earlier = list(shapes[:number])
    program = jax.make_jaxpr(arguments)(earlier, state, arrays).jaxpr
    live = {v for v in program.outvars if isinstance(v, core.Var)}
    for equation in reversed(program.eqns):
        if live.intersection(equation.outvars):
            live.update(v for v in equation.invars if isinstance(v, core.Var))
    owners = [i for i, shape in enumerate(earlier) for _ in jax.tree.leaves(shape)]
    return {i for i, v in zip(owners, program.invars, strict=False) if v in live}
