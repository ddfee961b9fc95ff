"""A registered layer: its weight, its product, and the state that makes it sparse.

The product is found by tracing the registered method on shapes, or by a call of the model.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations
from typing import Any, NamedTuple

import jax
from flax import nnx

from nmjax.analysis.patterns import Pattern
from nmjax.nnx.registry import (
    STATE,
    LayerType,
    Shape,
    dense_class,
    mask_of,
    sparse_class,
    types_of,
    weight_of,
    without_state,
)
from nmjax.nnx.variables import SparsityState
from nmjax.products.operations import Operation
from nmjax.products.pruning import Operand, shape_of
from nmjax.products.sparsity import Sparsity
from nmjax.programs.parameters import Parameter, Step
from nmjax.programs.rewriting import Product, Rewriter
from nmjax.programs.running import run
from nmjax.programs.states import Origin

Shapes = tuple[tuple[tuple[Any, ...], jax.ShapeDtypeStruct], ...]


class Example(NamedTuple):
    """An operation, the shapes of its operands, and the layout changes from the weight to its operand.

    Attributes:
      op: The operation.
      lhs: The shape of the input.
      rhs: The shape of the operand that is made of the weight.
      steps: The changes of layout and dtype that make it.
    """

    op: Operation
    lhs: jax.ShapeDtypeStruct
    rhs: jax.ShapeDtypeStruct
    steps: tuple[Step, ...] = ()

    @property
    def operand(self) -> Operand:
        """The roles of the axes of the weight's operand."""
        return self.op.operands(self.lhs.ndim, self.rhs.ndim)["y_w"]


@dataclass(frozen=True, eq=False)
class Layer:
    """A layer of a registered class. If the class has several weights, there is one for each.

    Attributes:
      path: Its path in the model, such as "blocks/0/mlp/up".
      module: The layer.
      layer_type: What is registered of its class.
      weight_name: The attribute of the module that holds the weight.
      traced: A cache of traced layers. Layers that are alike are traced once.
      called: The product that a call asked it for. Needed only if its class does not say which.
      axes: The stacking axes, if the caller named them.
    """

    path: str
    module: Any
    layer_type: LayerType
    weight_name: str
    traced: dict[Any, "Uses | None"] = field(repr=False)
    called: Example | None = None
    axes: tuple[int, ...] | None = None

    @property
    def text(self) -> str:
        """The declaration, for errors."""
        return f"nm.nnx.register_layer({type(self.module).__name__}, weight={self.weight_name!r})"

    @property
    def where(self) -> str:
        """The beginning of errors: the path, and the call that registered the class if a user did."""
        return (self.path or "the model") + ("" if self.layer_type.shape else f": {self.text}")

    # ---- the weight ----

    @property
    def has_weight(self) -> bool:
        """True if an operand of the product is a weight. If not, ``kernel`` is a variable that takes its place."""
        return self.layer_type.argument is None

    @property
    def kernel(self) -> Any:
        """The variable of the weight."""
        kernel = getattr(self.module, self.weight_name, None)
        if not isinstance(kernel, nnx.Variable):
            held = [f"{name} {tuple(v.shape)}" for name, v in vars(self.module).items() if isinstance(v, nnx.Param)]
            raise ValueError(
                f"{self.path or 'the model'}: {self.text} names a parameter that the layer does not have. It has "
                f"{', '.join(held) or 'none'}."
            )
        return kernel

    @property
    def kernel_path(self) -> str:
        """The path of the weight."""
        return f"{self.path}/{self.weight_name}".lstrip("/") if self.layer_type.alone else self.path

    def weight(self) -> jax.Array:
        """Return the weight as `steps` takes it: the parameter, times its mask."""
        return weight_of(self.module, self.weight_name)

    @property
    def mask(self) -> Any:
        """The mask that a convolution of Flax multiplies its kernel by, or None."""
        return mask_of(self.module)

    def drop_mask(self) -> None:
        """Drop the mask of a convolution, after `weight` was written into the kernel."""
        if self.mask is not None:
            self.module.mask = None

    @property
    def dtype(self) -> Any:
        """The dtype that the layer computes in, if its inputs do not widen it."""
        product = self.product
        return self.kernel.dtype if product is None else product.rhs.dtype

    @property
    def other_readers(self) -> list[str]:
        """The methods of the class that name the weight beside the registered method."""
        if self.layer_type.shape is not None:
            return []
        kind, method = dense_class(type(self.module)), self.layer_type.method
        members = {name: v for one in reversed(kind.__mro__) for name, v in vars(one).items()}
        code = {name: getattr(v, "__code__", None) for name, v in members.items() if name not in ("__init__", method)}
        return [name for name, one in code.items() if one is not None and self.weight_name in one.co_names]

    # ---- its sparsity state ----

    @property
    def inside(self) -> Any:
        """What stands in the place of the product: a sparsity state, something that `put` put there, or None."""
        return vars(self.module).get(self.layer_type.attribute(self.weight_name))

    def put(self, product: nnx.Module | None) -> None:
        """Put something in the place of the product; None is the product itself.

        It is a module with a method ``_multiply``, whose name keeps it out of `nnx.tabulate`.
        """
        if product is not None:
            setattr(self.module, self.layer_type.attribute(self.weight_name), nnx.data(product))
            methods = tuple(dict.fromkeys(one.method for one in types_of(self.module)))
            self._become(sparse_class(dense_class(type(self.module)), methods))
        elif self.inside is not None:
            delattr(self.module, self.layer_type.attribute(self.weight_name))
            if not any(name.startswith(STATE) for name in vars(self.module)):
                self._become(dense_class(type(self.module)))

    def _become(self, kind: type) -> None:
        object.__setattr__(self.module, "__class__", kind)  # Flax would list the class among the attributes

    @property
    def state(self) -> SparsityState | None:
        """The sparsity state that `sparsify` put into the layer; None if it is dense."""
        return self.inside if isinstance(self.inside, SparsityState) else None

    @property
    def sparsity(self) -> Sparsity:
        """The sparsity of the layer; all slots are empty if it is dense."""
        return Sparsity() if self.state is None else self.state.sparsity

    @property
    def origin(self) -> Origin:
        """The weight of one layer, and what its products prune."""
        operand = self.operand or Operand((), (), ())  # if only a call says it, no weight is pruned
        return Origin(self.steps._replace(path=self.path), operand, self.sparsity)

    @property
    def _hardened(self) -> str:
        return "hardened" if self.layer_type.alone else f"hardened_{self.weight_name}"

    @property
    def hardened(self) -> Pattern | None:
        """The pattern that `harden` gave the weight; None if it ended dense, or was not hardened."""
        return vars(self.module).get(self._hardened)

    def harden(self, pattern: Pattern | None) -> None:
        """Write down the pattern of the hardened weight."""
        setattr(self.module, self._hardened, nnx.static(pattern))

    # ---- stacks ----

    @property
    def rank(self) -> int:
        """The number of axes of one layer's weight."""
        return self.kernel.ndim - len(self.stack)

    @property
    def stack(self) -> tuple[int, ...]:
        """The axes of the weight that stack layers."""
        at_state = None if self.state is None else self.state.stack
        return at_state if at_state in self.stacks else self.stacks[0]  # inside a scan, one layer is no stack

    @cached_property
    def stacks(self) -> list[tuple[int, ...]]:
        """The axes of the weight that may stack layers: without them it fits the method. Leading axes first."""
        if self.layer_type.shape is not None:
            return self._stacks_of(tuple(self.layer_type.shape(self.module)))
        if self.axes is not None:
            return [self.axes]
        if self.state is not None:
            return [self.state.stack if self.kernel.ndim > self.state.rank else ()]
        if self.layer_type.examples is None:
            return self._stacks_of_call()
        stacked = combinations(range(self.kernel.ndim), 1) if self.kernel.ndim > 2 else ()
        first: MisfitError | None = None
        for way in ((), *stacked):
            try:
                self._traced(1, way)
                return [way]
            except MisfitError as error:
                first = first or error
        assert first is not None
        raise first

    def _stacks_of(self, declared: Shape) -> list[tuple[int, ...]]:
        """Return the axes without which the weight has the shape that the layer declares."""
        shape = tuple(self.kernel.shape)
        if not self.has_weight:
            return [tuple(range(len(shape) - len(declared)))]
        ways = combinations(range(len(shape)), max(0, len(shape) - len(declared)))
        fitting = [way for way in ways if tuple(n for a, n in enumerate(shape) if a not in way) == declared]
        if not fitting:
            raise ValueError(
                f"{self.path or 'the model'}: the kernel has shape {shape}, which is not {declared}, the shape that "
                f"the layer declares, nor a stack of such kernels. Give the layer a kernel of shape {declared}."
            )
        return fitting

    def _stacks_of_call(self) -> list[tuple[int, ...]]:
        """Return the axes, at most one, without which the kernel has the shape that the call multiplies by."""
        if self.called is None:
            return [()]
        shape, operand = tuple(self.kernel.shape), self.called.rhs.shape
        ways: list[tuple[int, ...]] = [(), *((axis,) for axis in range(len(shape)))]
        own = lambda way: tuple(n for axis, n in enumerate(shape) if axis not in way)
        return [way for way in ways if self.steps.shape(own(way)) == operand] or [()]

    def stacked(self, axes: tuple[int, ...] | None) -> "Layer":
        """Override the inferred stack axes, if these fit and differ from them."""
        if axes is None or self.layer_type.shape is not None or axes in self.stacks or self.layer_type.examples is None:
            return self
        try:
            self._traced(1, axes)
        except ValueError:
            return self
        return replace(self, axes=axes)

    # ---- the product ----

    def example(self, tokens: int) -> Example | None:
        """Return the layer's product for ``tokens`` tokens; None if only a call says which product it is."""
        if self.called is not None:
            return self.called
        traced = None if self.layer_type.examples is None else self._traced(tokens, self.stack)
        return traced or (None if self.state is None else self.state.example)

    @property
    def product(self) -> Example | None:
        """One layer's product; None if only a call says which product it is."""
        if self.state is not None and self.state.example is not None:
            return self.state.example
        return self.example(1)

    @property
    def operand(self) -> Operand | None:
        """The roles of the axes of the weight's operand; None if only a call says which product it is."""
        product = self.product
        return None if product is None else product.operand

    @property
    def steps(self) -> Parameter:
        """Layout changes from the weight, as `weight` returns it, to its operand."""
        product = self.product
        return Parameter("", () if product is None else product.steps)

    @property
    def why_unknown(self) -> str:
        """The reason why the product is unknown before a call, and the remedy."""
        if self.layer_type.shape is not None:
            lead = "its einsum_str comes with the call. Give it to the constructor, or"
        else:
            lead = "only a call says which product it is. "
            lead += f"Declare its input, {self.text[:-1]}, input=lambda layer: ...), or"
        return f"{lead} pass examples of the model's inputs: sparsify(model, recipe, x)."

    def _traced(self, tokens: int, stack: tuple[int, ...]) -> Example | None:
        """Return the product of the weight when the method takes the examples of its class."""
        graph, flat = self._parts
        for axis in sorted(stack, reverse=True):
            size = self.kernel.shape[axis]
            alike = lambda v, axis=axis, size=size: len(v.shape) > axis and v.shape[axis] == size
            flat = tuple((path, _without(axis, v) if alike(v) else v) for path, v in flat)
        key: Any = (graph, flat, self.layer_type, self.weight_name, tokens)
        try:
            hash(key)
        except TypeError:  # the layer has an attribute without a hash
            key = (id(self.module), flat, self.layer_type, self.weight_name, tokens)
        if key not in self.traced:
            try:
                self.traced[key] = _uses(graph, flat, self.layer_type, self.weight_name, tokens)
            except MisfitError as error:
                raise MisfitError(f"{self.where}: {error}") from error
        used = self.traced[key]
        if used is None:
            return None
        at, shape = next((i, v.shape) for i, (path, v) in enumerate(flat) if path == (self.weight_name,))
        name = str(at) if self.has_weight else self.weight_name
        return used.product(self.where, name, f"{self.weight_name} of shape {shape}")

    @cached_property
    def _parts(self) -> tuple[Any, Shapes]:
        """The graph of the layer without its sparsity state, and the shapes of its variables by their paths."""
        graph, state = nnx.split(without_state(self.module))
        shape = lambda v: jax.ShapeDtypeStruct(v.shape, v.dtype)  # without the sharding, which the input has not
        return graph, tuple((path, shape(v.get_value())) for path, v in nnx.to_flat_state(state))


class MisfitError(ValueError):
    """The method of a layer cannot take the examples of its class."""


class Uses:
    """The products of the weights of a layer in its calls, and the other operations that take them."""

    def __init__(self) -> None:
        self.products: dict[str, list[Example]] = {}
        self.others: dict[str, list[str]] = {}
        self.refusals: dict[str, str] = {}

    def rewriter(self) -> Rewriter:
        """Return a rewriter that writes down what it sees, and changes nothing."""

        def compute(product: Product, x: Any, w: Any, _: Any) -> None:
            example = Example(product.op, shape_of(x), shape_of(w), product.parameter.steps)
            self.products.setdefault(product.parameter.path, []).append(example)
            refusal = product.refusal(w)
            if refusal is not None:
                self.refusals[product.parameter.path] = refusal

        return Rewriter(compute, lambda parameter, name: self.others.setdefault(parameter.path, []).append(name))

    def product(self, where: str, path: str, weight: str) -> Example:
        """Return the one product of a weight, or refuse it.

        Args:
          where: The beginning of errors.
          path: The path of the weight in the traced function.
          weight: The weight in words.
        """
        if path in self.refusals:
            raise ValueError(f"{where}: {self.refusals[path]}. Take the derivative outside the method.")
        found, others = list(dict.fromkeys(self.products.get(path, []))), list(dict.fromkeys(self.others.get(path, [])))
        if not found or others:
            lead = "multiplies no input by it" if not found else "uses it in other operations too"
            by = f". {', '.join(others)} takes it" if others else ""
            raise ValueError(
                f"{where}: the method {lead}{by}. A registered layer may use {weight} as an operand of products "
                "alone. For other programs there is nm.transform."
            )
        if len({(one.operand, one.steps) for one in found}) > 1:
            raise ValueError(f"{where}: products take {weight} along different axes, so it has no single pattern.")
        return found[0]


def _uses(graph: Any, flat: Shapes, layer_type: LayerType, weight: str, tokens: int) -> Uses | None:
    """Trace the method of a layer on shapes, and return what it does with its weights.

    Args:
      graph: The graph of the layer.
      flat: The shapes of its variables, by their paths.
      layer_type: What is registered of its class.
      weight: The name of the weight that the caller looks for. The input has its dtype, and errors name it.
      tokens: The number of tokens in the input.

    Returns:
      The uses; None if only a call says them.
    """
    assert layer_type.examples is not None
    paths, shapes = zip(*flat, strict=True)
    kernel = dict(flat)[(weight,)]
    try:
        given = layer_type.examples(_merged(graph, paths, shapes), tokens, kernel.dtype)
    except Exception as error:  # of code that we do not know
        raise MisfitError(
            f"the registered input does not return a shape, such as (-1, 8): {str(error).splitlines()[0]}"
        ) from error
    if given is None:
        return None
    params, rest = {str(i): v for i, v in enumerate(shapes)}, given
    if layer_type.argument is not None:
        params |= {weight: given[layer_type.argument]}
        rest = given[: layer_type.argument] + given[layer_type.argument + 1 :]
    used = Uses()

    def call(params: dict[str, Any], *args: Any) -> Any:
        module = _merged(graph, paths, [params[str(i)] for i in range(len(paths))])
        if layer_type.argument is not None:
            args = (*args[: layer_type.argument], params[weight], *args[layer_type.argument :])
        return getattr(type(module), layer_type.method)(module, *args)

    def traced(params: dict[str, Any], args: Any) -> None:
        run(call, params, args, {}, used.rewriter(), {})

    try:
        jax.eval_shape(traced, params, rest)
    except Exception as error:  # of code that we do not know
        shown = " and ".join(str(v.shape) for v in given)
        raise MisfitError(
            f"{layer_type.method} cannot take an input of shape {shown}, as registered, with {weight} of shape "
            f"{kernel.shape}: {str(error).splitlines()[0]} Pass examples of the model's inputs: sparsify(model, "
            "recipe, x)."
        ) from error
    return used


def _merged(graph: Any, paths: Sequence[Any], values: Iterable[Any]) -> Any:
    return nnx.merge(graph, nnx.from_flat_state(list(zip(paths, values, strict=True))))


def _without(axis: int, v: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(tuple(n for a, n in enumerate(v.shape) if a != axis), v.dtype)
