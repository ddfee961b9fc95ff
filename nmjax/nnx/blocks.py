"""The blocks of a model, called one after another: each on the outputs of the blocks before it, which are kept."""

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import jax
from flax import nnx

from nmjax.nnx.batches import Call, Rest
from nmjax.nnx.between import BlockInputs, NotAlone, modules_of, outputs_of, ways_to


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


class Blocks:
    """The blocks of a model, each of which can be called on its own.

    A model whose blocks are a list runs them one after another. To run block i again, it is enough to know the outputs
    of the blocks before it. They are kept as long as some block needs them, which is most often the next one.

    Attributes:
      paths: The paths of the blocks, in the order of their calls.
      keep: A function of the outputs of a block for a batch, which returns what is kept of them, such as a file.
    """

    def __init__(
        self, model: Any, paths: Sequence[str], batches: Sequence[Call], ways: Sequence[list[BlockInputs]]
    ) -> None:
        self.model, self.paths, self.batches, self.ways = model, list(paths), batches, ways
        self.keep: Callable[[list[Any]], list[Any]] = list
        self.outputs: list[list[list[Any]]] = [[way.placeholders for way in own] for own in ways]  # arrays, by batch

        def output(graph: Any, rest: Rest, state: Any, arrays: list[Any]) -> list[Any]:
            call = rest.call(arrays)
            return jax.tree.leaves(nnx.merge(graph, state, copy=True)(*call.args, **call.options))

        self._output = jax.jit(output, static_argnums=(0, 1))  # blocks that are alike compile once

    @classmethod
    def find(
        cls, model: Any, paths: Sequence[str], needed: Collection[str], batches: Sequence[Call]
    ) -> "Blocks | NotAlone":
        """Return the blocks of a model in the order of their calls, or the reason why they cannot be called alone.

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
        for kind in {type(modules[path]) for path in paths}:
            if kind.__init_subclass__.__func__ is not nnx.Module.__init_subclass__.__func__:
                # a subclass, which stands in for a block, may be registered or refused
                return NotAlone(f"the class {kind.__name__} has an __init_subclass__ of its own")
        called: list[str] = []
        ways: dict[Hashable, list[BlockInputs]] = {}
        for kind, batch in {batch.kind: batch for batch in batches}.items():
            outputs = outputs_of(model, paths, batch)
            if isinstance(outputs, NotAlone):
                return outputs
            own = ways_to(model, outputs, batch)
            if isinstance(own, NotAlone):
                return own
            if ways and called != list(outputs):
                return NotAlone("batches of different shapes call them in different orders")
            called, ways[kind] = list(outputs), own
        idle = [path for path in needed if path not in called]
        if idle:
            return NotAlone(f"the call does not call {idle[0] or 'the model'}")
        variables = [v for path in called for _, v in nnx.iter_graph(modules[path]) if isinstance(v, nnx.Variable)]
        owned = [id(v) for v in variables if not isinstance(v, nnx.RngState)]
        if len(set(owned)) < len(owned):
            return NotAlone("two of them share a variable")
        return cls(model, called, batches, [ways[batch.kind] for batch in batches])

    def module(self, number: int) -> Any:
        """Return a block."""
        return modules_of(self.model)[self.paths[number]]

    def calls(self, number: int) -> list[Call]:
        """Return the calls of a block, one for each batch. Before, `run` must have run the blocks that it needs."""
        state = jax.tree.leaves(nnx.split(self.model)[1])
        return [
            ways[number].call([*chain(*outputs), *state, *batch.split()[0]])
            for batch, outputs, ways in zip(self.batches, self.outputs, self.ways, strict=True)
        ]

    def run(self, number: int, calls: Sequence[Call]) -> None:
        """Compute the outputs of a block, keep them, and forget those that no later block needs."""
        graph, state = nnx.split(self.module(number))
        for outputs, call, ways in zip(self.outputs, calls, self.ways, strict=True):
            later = set().union(*(way.needs for way in ways[number + 1 :]))
            if number in later:
                arrays, rest = call.split()
                outputs[number] = self.keep(self._output(graph, rest, state, arrays))
            outputs[:] = [v if i in later else ways[i].placeholders for i, v in enumerate(outputs)]
