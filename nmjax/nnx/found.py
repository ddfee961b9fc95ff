"""The layers of classes whose doors were declared. Their products are found by tracing a method."""

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations
from typing import Any

import jax
from flax import nnx

from nmjax.analysis.patterns import Pattern
from nmjax.nnx.declared import SITE, Declared, declared_doors, dense_class, sparse_class, without_sites
from nmjax.nnx.doors import Example, Layer, Shape
from nmjax.products.pruning import shape_of
from nmjax.programs.rewriting import Product, Rewriter
from nmjax.programs.running import run

Shapes = tuple[tuple[tuple[Any, ...], jax.ShapeDtypeStruct], ...]


@dataclass(frozen=True, eq=False)
class DeclaredLayer(Layer):
    """A layer whose class has a declared door. If it has several weights, there is one for each.

    Attributes:
      declaration: The door.
      axes: The stacking axes, if the caller named them.
      traced: A cache of traced layers. Layers that are alike are traced once.
    """

    door: Any = None  # it has no attribute for a product
    declaration: Declared = field(kw_only=True)
    axes: tuple[int, ...] | None = field(kw_only=True, default=None)
    traced: dict[Any, "Uses"] = field(kw_only=True, repr=False)

    @property
    def text(self) -> str:
        """The declaration, for errors."""
        return f"nm.nnx.door({type(self.module).__name__}, weight={self.weight_name!r})"

    @property
    def kernel(self) -> Any:
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
        return f"{self.path}/{self.weight_name}".lstrip("/") if self.declaration.alone else self.path

    # ---- the product ----

    @property
    def inside(self) -> Any:
        return vars(self.module).get(self.declaration.attribute(self.weight_name))

    def put(self, product: nnx.Module | None) -> None:
        if product is not None:
            setattr(self.module, self.declaration.attribute(self.weight_name), nnx.data(product))
            self.module.__class__ = sparse_class(dense_class(type(self.module)), self._methods)
        elif self.inside is not None:
            delattr(self.module, self.declaration.attribute(self.weight_name))
            if not any(name.startswith(SITE) for name in vars(self.module)):
                self.module.__class__ = dense_class(type(self.module))

    @property
    def _methods(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(one.method for one in declared_doors(self.module) or ()))

    @property
    def plain(self) -> None:
        return None  # the method itself

    @property
    def pruned_product(self) -> None:
        return None

    @property
    def foreign(self) -> str | None:
        return None

    @property
    def hardened(self) -> Pattern | None:
        return vars(self.module).get(self._hardened)

    def harden(self, pattern: Pattern | None) -> None:
        setattr(self.module, self._hardened, nnx.static(pattern))

    def drop_mask(self) -> None:
        pass  # `weight` returns the kernel alone

    @property
    def _hardened(self) -> str:
        return "hardened" if self.declaration.alone else f"hardened_{self.weight_name}"

    # ---- shapes ----

    @property
    def declared(self) -> Shape:
        return tuple(n for a, n in enumerate(self.kernel.shape) if a not in self.stack)

    @property
    def rank(self) -> int:
        return self.kernel.ndim - len(self.stack)

    @cached_property
    def stacks(self) -> list[tuple[int, ...]]:
        if self.axes is not None:
            return [self.axes]
        if self.site is not None:
            return [self.site.stack if self.kernel.ndim > self.site.rank else ()]
        if self.declaration.input is None:
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

    def _stacks_of_call(self) -> list[tuple[int, ...]]:
        """Return the axes, at most one, without which the kernel has the shape that the call multiplies by."""
        if self.called is None:
            return [()]
        shape, operand = tuple(self.kernel.shape), self.called.rhs.shape
        ways: list[tuple[int, ...]] = [(), *((axis,) for axis in range(len(shape)))]
        own = lambda way: tuple(n for axis, n in enumerate(shape) if axis not in way)
        return [way for way in ways if self.steps.shape(own(way)) == operand] or [()]

    def stacked(self, axes: tuple[int, ...] | None) -> Layer:
        if axes is None or axes in self.stacks or self.declaration.input is None:
            return self
        try:
            self._traced(1, axes)
        except ValueError:
            return self
        return replace(self, axes=axes)

    def example(self, tokens: int) -> Example | None:
        if self.declaration.input is None:
            return self.called or (None if self.site is None else self.site.example)
        return self._traced(tokens, self.stack)

    def _traced(self, tokens: int, stack: tuple[int, ...]) -> Example:
        """Return the product of the weight when the method takes the input that the door gives."""
        graph, flat = self._parts
        for axis in stack:
            size = self.kernel.shape[axis]
            alike = lambda v, axis=axis, size=size: len(v.shape) > axis and v.shape[axis] == size
            flat = tuple((path, _without(axis, v) if alike(v) else v) for path, v in flat)
        where = f"{self.path or 'the model'}: {self.text}"
        key: Any = (graph, flat, self.declaration, self.weight_name, tokens)
        try:
            hash(key)
        except TypeError:  # the layer has an attribute without a hash
            key = (id(self.module), flat, self.declaration, self.weight_name, tokens)
        if key not in self.traced:
            try:
                self.traced[key] = _uses(graph, flat, self.declaration, self.weight_name, tokens)
            except MisfitError as error:
                raise MisfitError(f"{where}: {error}") from error
        at, shape = next((i, v.shape) for i, (path, v) in enumerate(flat) if path == (self.weight_name,))
        return self.traced[key].product(where, str(at), f"{self.weight_name} of shape {shape}")

    @cached_property
    def _parts(self) -> tuple[Any, Shapes]:
        """The graph of the layer without its sites, and the shapes of its variables by their paths."""
        graph, state = nnx.split(without_sites(self.module))
        return graph, tuple((path, shape_of(v.get_value())) for path, v in nnx.to_flat_state(state))

    @property
    def other_readers(self) -> list[str]:
        kind, door = dense_class(type(self.module)), self.declaration.method
        members = {name: v for one in reversed(kind.__mro__) for name, v in vars(one).items()}
        code = {name: getattr(v, "__code__", None) for name, v in members.items() if name not in ("__init__", door)}
        return [name for name, one in code.items() if one is not None and self.weight_name in one.co_names]

    @property
    def own_product(self) -> Example | None:
        return self.product

    @property
    def why_unknown(self) -> str:
        return (
            f"only a call says which product it is. Declare its input, {self.text[:-1]}, input=lambda layer: ...), or "
            "pass examples of the model's inputs: sparsify(model, recipe, x)."
        )

    def weight(self) -> jax.Array:
        return self.kernel[...]

    @property
    def dtype(self) -> Any:
        product = self.product
        return self.kernel.dtype if product is None else product.rhs.dtype


class MisfitError(ValueError):
    """The method of a layer cannot take the input that the door gives."""


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
          where: The beginning of errors: the layer and its door.
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
                f"{where}: the method {lead}{by}. A door needs {weight} to be an operand of products alone. For other "
                "programs there is nm.transform."
            )
        forms = {(one.op.operands(one.lhs.ndim, one.rhs.ndim)["fwd_rhs"], one.steps) for one in found}
        if len(forms) > 1:
            raise ValueError(f"{where}: products take {weight} along different axes, so it has no single pattern.")
        return found[0]


def _uses(graph: Any, flat: Shapes, declaration: Declared, weight: str, tokens: int) -> Uses:
    """Trace the method of a layer on shapes, and return what it does with its weights.

    Args:
      graph: The graph of the layer.
      flat: The shapes of its variables, by their paths.
      declaration: Its door.
      weight: The name of the weight that the caller looks for. The input has its dtype, and errors name it.
      tokens: The number of tokens in the input.
    """
    assert declaration.input is not None
    paths, shapes = zip(*flat, strict=True)
    kernel = dict(flat)[(weight,)]
    try:
        given = tuple(operator.index(n) for n in declaration.input(_merged(graph, paths, shapes)))
    except Exception as error:  # of code that we do not know
        raise MisfitError(
            f"the input of its door does not return a shape, such as (-1, 8): {str(error).splitlines()[0]}"
        ) from error
    x = jax.ShapeDtypeStruct(tuple(tokens if n == -1 else n for n in given), kernel.dtype)
    used = Uses()

    def call(params: dict[str, Any], x: Any) -> Any:
        module = _merged(graph, paths, [params[str(i)] for i in range(len(paths))])
        return getattr(type(module), declaration.method)(module, x)

    def traced(params: dict[str, Any], x: Any) -> None:
        run(call, params, (x,), {}, used.rewriter(), {})

    try:
        jax.eval_shape(traced, {str(i): v for i, v in enumerate(shapes)}, x)
    except Exception as error:  # of code that we do not know
        raise MisfitError(
            f"{declaration.method} cannot take an input of shape {x.shape}, as the door gives it, with {weight} of "
            f"shape {kernel.shape}: {str(error).splitlines()[0]}"
        ) from error
    return used


def _merged(graph: Any, paths: Sequence[Any], values: Iterable[Any]) -> Any:
    return nnx.merge(graph, nnx.from_flat_state(list(zip(paths, values, strict=True))))


def _without(axis: int, v: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(tuple(n for a, n in enumerate(v.shape) if a != axis), v.dtype)
