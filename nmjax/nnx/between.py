"""The computation of a model between its blocks, found by a call in which other functions stand for the blocks."""

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from contextvars import ContextVar
from functools import cache
from itertools import islice
from typing import Any, NamedTuple

import jax
from flax import nnx
from jax.extend import core

from nmjax.nnx.batches import Call, Rest, is_array
from nmjax.nnx.layers import layers
from nmjax.nnx.recording import PLACE, recording
from nmjax.products.pruning import shape_of


class NotAlone(NamedTuple):
    """The reason why the blocks of a model cannot be called on their own.

    Attributes:
      reason: The reason, worded so that a sentence can end with it.
      raised: True if the model's own code raised an error.
    """

    reason: str
    raised: bool = False


class BlockInputs(NamedTuple):
    """Computes a block's inputs from the outputs of the blocks before it.

    Attributes:
      needs: The numbers of these blocks, as far as the arguments of the block depend on them.
      inputs: The places of the inputs of ``compute`` among the outputs of all blocks, the model's state, and the arrays
        of its call.
      compute: A function of the inputs, which returns the arrays among the arguments of the block.
      rest: The rest of these arguments.
      placeholders: A None for each array that the block itself returns.
    """

    needs: set[int]
    inputs: list[int]
    compute: Callable[..., list[Any]]
    rest: Rest
    placeholders: list[None]

    def call(self, values: Sequence[Any]) -> Call:
        """Return the call of the block, given the outputs of all blocks, the state and the arrays."""
        return self.rest.call(self.compute(*(values[i] for i in self.inputs)))


def modules_of(model: Any) -> dict[str, Any]:
    """Return the modules of a model, by path."""
    return {"/".join(map(str, path)): module for path, module in nnx.iter_modules(model)}


_IN_PLACE: ContextVar[Callable[[Any, Call], Any]] = ContextVar("in_place")


@cache
def _stand_in(kind: type) -> type:
    """Return a subclass of a class, whose call is that of the context."""
    call = lambda self, *args, **options: _IN_PLACE.get()(self, Call(args, options))
    return type(kind)(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})


def _own_call(block: Any, call: Call) -> Any:
    """Return the result of a block's own call. The class of the block is a `_stand_in`."""
    return type(block).__bases__[0].__call__(block, *call.args, **call.options)


def _call(
    graph: Any, state: Any, paths: Collection[str], batch: Call, in_place: Callable[[str, Any, Call], Any]
) -> NotAlone | None:  # fmt: skip
    """Call a model in which ``in_place(path, block, call)`` stands in the place of the calls of its blocks.

    The class of a block is a subclass for this time, because a model may look up ``__call__`` in the class.

    Returns:
      The reason why its blocks cannot be called on their own, or None.
    """
    copy = nnx.merge(graph, state, copy=True)
    modules = modules_of(copy)
    known = {id(modules[path]): path for path in paths}
    outside = core.get_opaque_trace_state(convention="nmjax")
    inside: list[Any] = []

    def reached(block: Any, call: Call) -> Any:
        # In a scan or a checkpoint of Flax, the block is a copy. In a function that JAX transforms, the trace differs.
        if id(block) in known and core.get_opaque_trace_state(convention="nmjax") == outside:
            return in_place(known[id(block)], block, call)
        inside.append(block)
        return _own_call(block, call)

    for path in paths:
        modules[path].__class__ = _stand_in(type(modules[path]))
    token = _IN_PLACE.set(reached)
    try:
        copy(*batch.args, **batch.options)
    except Exception as error:  # of the model's own code, which we do not know
        first_line = str(error).partition("\n")[0]
        return NotAlone(f"calling them so raised {type(error).__name__}: {first_line}", raised=True)
    finally:
        _IN_PLACE.reset(token)
    return NotAlone("one is called in a scan, a checkpoint, a branch or a compiled function") if inside else None


def _is_node(v: Any) -> bool:
    return isinstance(v, (nnx.Pytree, nnx.Variable))


def outputs_of(model: Any, paths: Sequence[str], batch: Call) -> dict[str, Any] | NotAlone:
    """Return the shapes of the outputs of blocks, in the order of their calls.

    Layers note in which block they are asked for their product. It must be their own.
    """
    arrays, rest = batch.split()
    inner = [layer.path for layer in layers(model)]
    owners = {path: block for path in inner for block in paths if f"{path}/".startswith(f"{block}/")}
    copy, notes = recording(model, [False] * len(inner))
    graph, state = nnx.split(copy)
    found: list[dict[str, Any] | NotAlone] = []

    def run(state: Any, arrays: list[Any]) -> None:
        seen: list[tuple[str, Call, Any]] = []

        def note(path: str, block: Any, call: Call) -> Any:
            token = PLACE.set(path)
            try:
                y = _own_call(block, call)
            finally:
                PLACE.reset(token)
            seen.append((path, call, y))
            return y

        found.append(_call(graph, state, paths, rest.call(arrays), note) or _shapes(seen))

    jax.eval_shape(run, state, arrays)
    outside = [path for i, path in enumerate(inner) if path in owners and notes[i].places - {owners[path]}]
    if outside and not isinstance(found[0], NotAlone):
        return NotAlone(f"{outside[0]} is used outside {owners[outside[0]]}")
    return found[0]


def _shapes(seen: Sequence[tuple[str, Call, Any]]) -> dict[str, Any] | NotAlone:
    """Return the shapes of the outputs of blocks, given (path, call, output) of each call of a block."""
    found: dict[str, Any] = {}
    for path, call, y in seen:
        if path in found:
            return NotAlone(f"{path} is called twice")
        if any(map(_is_node, jax.tree.leaves((call, y), is_leaf=_is_node))):
            return NotAlone(f"{path} takes or returns a module or a variable")
        if not all(is_array(v) or isinstance(v, Hashable) for v in jax.tree.leaves(call)):
            return NotAlone(f"{path} takes an argument that is neither an array nor hashable")
        if not all(map(is_array, jax.tree.leaves(y))):
            return NotAlone(f"{path} returns something that is not an array")
        found[path] = jax.tree.map(shape_of, y)
    return found


def ways_to(model: Any, outputs: Mapping[str, Any], batch: Call) -> list[BlockInputs] | NotAlone:
    """Return the way to each block in a call of a model.

    Args:
      model: The model.
      outputs: The shapes of the outputs of its blocks, by their paths, in the order of their calls.
      batch: The call of the model.
    """
    (arrays, rest), (graph, state) = batch.split(), nnx.split(model)
    called: list[str] = []
    counts: list[int] = []  # of the arrays among the arguments of each block
    rests: list[Rest] = []
    refused: list[NotAlone | None] = []

    def arguments(outputs: list[Any], state: Any, arrays: list[Any]) -> list[Any]:
        given = dict(zip(paths, outputs, strict=True))
        found: list[Any] = []

        def note(path: str, block: Any, call: Call) -> Any:
            del block
            own, others = call.split()
            called.append(path)
            counts.append(len(own))
            rests.append(others)
            found.extend(own)
            return given[path]

        refused.append(_call(graph, state, paths, rest.call(arrays), note))
        return found

    paths, shapes = list(outputs), list(outputs.values())
    program = jax.make_jaxpr(arguments)(shapes, state, arrays)
    if called != paths:  # an error after the last block does not matter
        return refused[0] or NotAlone("given the outputs of its blocks, the model calls them in another order")
    sizes, results = [len(jax.tree.leaves(shape)) for shape in shapes], iter(program.jaxpr.outvars)
    owners = [i for i, size in enumerate(sizes) for _ in range(size)]
    ways: list[BlockInputs] = []
    for count, size, others in zip(counts, sizes, rests, strict=True):
        compute, inputs = _part(program, list(islice(results, count)))
        needs = {owners[i] for i in inputs if i < len(owners)}
        ways.append(BlockInputs(needs, inputs, compute, others, [None] * size))
    return ways


def _part(program: core.ClosedJaxpr, results: list[Any]) -> tuple[Callable[..., list[Any]], list[int]]:
    """Return a function of some results of a program, and the numbers of the inputs that it takes."""
    whole = program.jaxpr
    live = {v for v in results if isinstance(v, core.Var)}
    equations: list[core.JaxprEqn] = []
    for equation in reversed(whole.eqns):
        if live.intersection(equation.outvars):
            live.update(v for v in equation.invars if isinstance(v, core.Var))
            equations.append(equation)
    inputs = [i for i, v in enumerate(whole.invars) if v in live]
    effects = frozenset().union(*(equation.effects for equation in equations))
    part = whole.replace(
        invars=[whole.invars[i] for i in inputs], outvars=results, eqns=equations[::-1], effects=effects
    )
    return jax.jit(core.jaxpr_as_fun(core.ClosedJaxpr(part, program.consts))), inputs
