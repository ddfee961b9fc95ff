"""The classes that multiply an input by a weight: those of Flax and those that users register.

While a layer is sparse, its class is a subclass, also if the class is one that nobody here can edit. The method of the
subclass traces the method of the layer, and prunes the products with the weight.
"""

import copyreg
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from nmjax.models.moe import Experts
from nmjax.models.transformer import Scores
from nmjax.nnx.calling import call_with
from nmjax.nnx.variables import SparsityState
from nmjax.programs.rewriting import Product, Rewriter

STATE = "nm_state"


Shape = tuple[int, ...]


@dataclass(frozen=True)
class LayerType:
    """The weights by which layers of a class multiply their input.

    Attributes:
      weights: The attributes that hold the weights.
      alone: True if there is one weight. A rule then matches the path of the layer.
      examples: A function (layer, tokens, dtype of the weight) that returns the shapes of the method's arguments; or
        None, itself or its result, if only a call says them.
      method: The method that multiplies an input by the weights.
      shape: A function of a layer that returns the shape of one layer's weight. Then more axes than these are stacks of
        layers. Without it, a trace of the method tells.
      argument: The argument of the method that takes the weight's place, if the layer has no weight.
    """

    weights: tuple[str, ...]
    alone: bool
    examples: Callable[[Any, int, Any], tuple[jax.ShapeDtypeStruct, ...] | None] | None
    method: str = "__call__"
    shape: Callable[[Any], Shape] | None = None
    argument: int | None = None

    def attribute(self, weight: str) -> str:
        """Return the attribute of a layer that holds the sparsity state of a weight."""
        return STATE if self.alone else f"{STATE}_{weight}"


def _one(
    input: Callable[[Any], Sequence[int]], layer: Any, tokens: int, dtype: Any
) -> tuple[jax.ShapeDtypeStruct, ...]:  # fmt: skip
    """Return `LayerType.examples` of a method that takes one array."""
    given = input(layer)
    return (jax.ShapeDtypeStruct(tuple(tokens if n == -1 else n for n in map(operator.index, given)), dtype),)


def _linear(m: nnx.Linear) -> Shape:
    return (1, -1, m.in_features)  # positions of one sequence, because pruners may use spatial axes


def _general(m: nnx.LinearGeneral) -> Shape:
    rank = len(m.batch_axis) + 2 + len(m.in_features)
    batch: Any = m.batch_axis
    sizes: dict[int, int] = {axis % rank: size for axis, size in batch.items()}
    sizes |= dict(zip((axis % rank for axis in m.axis), m.in_features, strict=True))
    free = [axis for axis in range(rank) if axis not in sizes]
    sizes |= {free[0]: 1, free[1]: -1}
    return tuple(sizes[axis] for axis in range(rank))


def _conv(m: nnx.Conv) -> Shape:
    """Return an image of the kernel's size for each token."""
    size, dilation = m.kernel_size, m.kernel_dilation
    dilation = dilation if isinstance(dilation, Sequence) else (dilation or 1,) * len(size)
    return (-1, *((k - 1) * d + 1 for k, d in zip(size, dilation, strict=True)), m.in_features)


def _einsum(m: nnx.Einsum) -> Shape:
    inputs, kernel = m.einsum_str.replace(" ", "").partition("->")[0].split(",")
    sizes = dict(zip(kernel, m.kernel_shape, strict=True))
    return tuple(sizes.get(label, -1) for label in inputs.replace("...", "."))


def _experts(m: Experts, tokens: int, dtype: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
    experts, inputs, _ = m.kernel_shape
    return jax.ShapeDtypeStruct((tokens, inputs), dtype), jax.ShapeDtypeStruct((experts,), jnp.int32)


def _scores(m: Scores, tokens: int, dtype: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
    shapes = (1, m.heads, tokens, tokens), (1, tokens, m.heads, m.features)
    scores, values = (jax.ShapeDtypeStruct(shape, m.dtype or jnp.float32) for shape in shapes)
    return scores, values


def _kernel(examples: Callable[..., Any], shape: Callable[[Any], Shape]) -> LayerType:
    return LayerType(("kernel",), True, examples, shape=shape)


FLAX: dict[type, LayerType] = {
    nnx.Linear: _kernel(partial(_one, _linear), lambda m: (m.in_features, m.out_features)),
    nnx.LinearGeneral: _kernel(
        partial(_one, _general), lambda m: (*m.batch_axis.values(), *m.in_features, *m.out_features)
    ),
    nnx.Einsum: _kernel(
        lambda m, *rest: None if m.einsum_str is None else _one(_einsum, m, *rest), lambda m: tuple(m.kernel_shape)
    ),
    nnx.Conv: _kernel(partial(_one, _conv), lambda m: tuple(m.kernel_shape)),
    Experts: _kernel(_experts, lambda m: tuple(m.kernel_shape)),
    Scores: LayerType(("marker",), True, _scores, shape=lambda m: (1,) * 4, argument=1),  # its values
}
"""The layers of Flax and of `nmjax.models`."""

REGISTERED: dict[type | str, tuple[LayerType, ...]] = {}
"""What users registered, by class or by "module:Class"."""


def register_layer(
    kind: type | str, weight: str | tuple[str, ...], *, input: Callable[[Any], Sequence[int]] | None = None,
    method: str = "__call__",
) -> None:  # fmt: skip
    """Register a class of layers by its weight, so that `sparsify` can prune them.

    Register it once, before `sparsify` or `plan`. The class is not changed, and can be one that you cannot edit. Its
    method multiplies an input by the weight: with ``@``, `jnp.einsum`, `jax.lax.dot_general` or a convolution, perhaps
    in another dtype or with the axes of the weight in another order. The product is found by tracing the method.

    Args:
      kind: The class, a subclass of `flax.nnx.Module`; or a text "package.module:Class", which imports nothing.
      weight: The attribute that holds the weight, an `nnx.Param`. Rules match the path of the layer. If the layer has
        several weights, pass a tuple of their names: rules then match "path/name".
      input: A function of a layer that returns the shape of an input of its method. -1 in it stands for the tokens.
        Without it, or if the method takes more than one array, pass examples of the model's inputs to `sparsify`.
      method: The name of the method.

    Raises:
      TypeError: ``kind`` is not a subclass of `flax.nnx.Module`, the class refuses to have a subclass, or another
        argument is of the wrong type.
      ValueError: ``kind`` is a text of another form, the class has no such method, the weight is registered already,
        or another single weight of the class is.

    >>> import jax.numpy as jnp, nmjax as nm
    >>> class Projection(nnx.Module):  # w has the shape [out, in]
    ...     def __init__(self, features, rngs):
    ...         self.w = nnx.Param(jax.random.normal(rngs.params(), (features, features)))
    ...     def __call__(self, x):
    ...         return jnp.einsum("bi,oi->bo", x, self.w[...])
    >>> nm.nnx.register_layer(Projection, weight="w", input=lambda layer: (-1, layer.w.shape[1]))
    >>> recipe = nm.Recipe({".*": "ste(2,4)"})
    >>> model = nm.nnx.sparsify(Projection(8, rngs=nnx.Rngs(0)), recipe)
    >>> nm.nnx.patterns(model)
    {'w': 2:4 along axis 1}
    """
    name = kind if isinstance(kind, str) else getattr(kind, "__qualname__", repr(kind))
    if isinstance(kind, str):
        if not all(part and not part.isspace() for part in kind.split(":")) or kind.count(":") != 1:
            raise ValueError(f"nm.nnx.register_layer takes a class or a text 'package.module:Class', got {kind!r}.")
    elif not (isinstance(kind, type) and issubclass(kind, nnx.Module)):
        raise TypeError(
            f"nm.nnx.register_layer takes a class of flax.nnx, got {kind!r}. For classes of flax.linen use "
            "nm.linen.register_layer."
        )
    elif not callable(getattr(kind, method, None)):
        raise ValueError(f"nm.nnx.register_layer({name}, method={method!r}): the class has no such method.")
    if kind in FLAX:
        raise ValueError(f"nm.nnx.register_layer({name}): this class is registered already. Register a subclass.")
    weights = (weight,) if isinstance(weight, str) else tuple(weight) if isinstance(weight, (tuple, list)) else ()
    if not weights or not all(isinstance(one, str) and one for one in weights):
        raise TypeError(
            f"nm.nnx.register_layer({name}): weight is an attribute's name, or a tuple of names, got {weight!r}."
        )
    if input is not None and not callable(input):
        raise TypeError(
            f"nm.nnx.register_layer({name}): input is a function of a layer that returns a shape, got {input!r}. Write "
            f"input=lambda layer: {input!r}."
        )
    mine = LayerType(weights, isinstance(weight, str), None if input is None else partial(_one, input), method)
    others = [one for one in _types_of(kind) if (one.weights, one.method) != (mine.weights, method)]
    for one in others:
        twice = [w for w in weights if w in one.weights]
        if twice:
            raise ValueError(
                f"nm.nnx.register_layer({name}, weight={twice[0]!r}, method={method!r}): this weight is registered "
                f"already, with method={one.method!r}. A weight has one method."
            )
        if one.alone and mine.alone:
            names = f'"{one.weights[0]}", "{weights[0]}"'
            raise ValueError(
                f"nm.nnx.register_layer({name}, weight={weight!r}): this class is registered for "
                f"{one.weights[0]!r}, and rules could not tell the two weights apart. Register both as a tuple, such "
                f"as weight=({names})."
            )
    if isinstance(kind, type):
        sparse_class(kind, (method,))  # a class that refuses a subclass is refused here
    kept = [one for one in REGISTERED.get(kind, ()) if one in others]
    REGISTERED[kind] = (*kept, mine)


def _text(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _types_of(kind: type | str) -> list[LayerType]:
    """Return what is registered of a class, also by its name."""
    names = [one for one in REGISTERED if (_text(one) if isinstance(one, type) else one) == kind]
    if isinstance(kind, type):
        names = [_text(kind), kind]
    return list({(one.weights, one.method): one for name in names for one in REGISTERED.get(name, ())}.values())


def types_of(module: Any) -> list[LayerType]:
    """Return what is registered of a module's class, or else of its nearest base class."""
    for kind in type(module).__mro__:
        if kind in REGISTERED or _text(kind) in REGISTERED:
            return _types_of(kind)
        if kind in FLAX:
            return [FLAX[kind]]
    return []


# ---- the class of a sparse layer ----


def dense_class(kind: type) -> type:
    """Return the class that a layer had before it was sparse."""
    return kind.__dict__.get("_nm_dense", kind)


@cache
def sparse_class(kind: type, methods: tuple[str, ...]) -> type:
    """Return a subclass of a class. Its methods use the sparsity state of a layer for the products of the weights."""
    members: dict[str, Any] = {name: _pruned_method(kind, name) for name in methods}
    members |= {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    members |= {"_nm_dense": kind, "_nm_methods": methods}
    try:
        pytree = getattr(kind, "_pytree__is_pytree", True)
        options: dict[str, Any] = {} if pytree else {"pytree": False}  # a subclass does not inherit this option
        return _picklable(type(kind))(kind.__name__, (kind,), members, **options)
    except TypeError as error:
        raise TypeError(
            f"nm.nnx.register_layer({kind.__qualname__}): a sparse layer is of a subclass, and the class refuses one: "
            f"{error}. Give its __init_subclass__ defaults, or use nm.transform."
        ) from error


@cache
def _picklable(meta: type) -> type:
    """Return a metaclass. `pickle` cannot find its classes by name, so it makes them again with `sparse_class`."""
    made = type(meta.__name__, (meta,), {})
    own = lambda kind: "_nm_dense" in vars(kind)  # a subclass of a sparse class is found by its name
    copyreg.pickle(
        made, lambda kind: (sparse_class, (kind._nm_dense, kind._nm_methods)) if own(kind) else kind.__qualname__
    )
    return made


def without_state(module: Any) -> Any:
    """Return a shallow copy of a layer, as before it was sparse, and without the mask that `weight_of` applies."""
    plain = object.__new__(dense_class(type(module)))
    vars(plain).update({name: v for name, v in vars(module).items() if not name.startswith(STATE)})
    nodes = {name: data for name, data in module._pytree__nodes.items() if not name.startswith(STATE)}
    object.__setattr__(plain, "_pytree__nodes", type(module._pytree__nodes)(nodes))
    if mask_of(module) is not None:
        plain.mask = None
    return plain


def mask_of(module: Any) -> Any:
    """Return the mask that a convolution of Flax multiplies its kernel by, or None."""
    return getattr(module, "mask", None) if isinstance(module, nnx.Conv) else None


def weight_of(module: Any, name: str) -> jax.Array:
    """Return a weight of a layer, times its mask if it has one."""
    weight, mask = getattr(module, name)[...], mask_of(module)
    return weight if mask is None else weight * mask


def _pruned_method(kind: type, name: str) -> Callable[..., Any]:
    """Return a method that traces the dense one (`call_with`), and runs its program with `compute` for the products."""
    plain = getattr(kind, name)

    def method(self: Any, *args: Any, **options: Any) -> Any:
        types = [one for one in types_of(self) if one.method == name]
        attributes = {w: vars(self).get(one.attribute(w)) for one in types for w in one.weights}
        inside = {weight: put for weight, put in attributes.items() if put is not None}  # see `Layer.put`
        if not inside:
            return plain(self, *args, **options)
        argument = types[0].argument
        values = {w: weight_of(self, w) if argument is None else args[argument] for w in inside}
        for weight, state in inside.items():
            if isinstance(state, SparsityState):
                state.check_one_layer(getattr(self, weight).shape)
        multiplied: set[str] = set()
        others: dict[str, list[str]] = {}
        seen = lambda parameter, name: others.setdefault(parameter.path, []).append(name)

        def compute(product: Product, x: Any, w: Any, _: Any) -> Any:
            multiplied.add(product.parameter.path)
            return inside[product.parameter.path]._multiply(product, x, w)

        dense = without_state(self)
        y = call_with(self, dense, plain, args, options, values, Rewriter(compute, seen), argument)
        for weight, state in inside.items():
            if isinstance(state, SparsityState) and (weight not in multiplied or weight in others):
                does = f"uses it in {others[weight][0]} too" if weight in others else "multiplies no input by it"
                raise ValueError(
                    f"{state.name}: the layer is registered with {weight!r}, of shape {values[weight].shape}, and in "
                    f"this call {kind.__name__}.{name} {does}. A registered weight may be an operand of products alone."
                )
        return y

    method.__name__, method.__doc__ = name, plain.__doc__
    return method
