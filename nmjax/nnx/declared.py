"""Doors that users declare, for layers of any class of flax.nnx, also of a class that they cannot edit.

Such a layer has no attribute for its product. While it is sparse, its class is a subclass. The method of the subclass
traces the method of the layer, and prunes the products with the weight.
"""

import copyreg
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from flax import nnx

from nmjax.nnx.calling import call_with
from nmjax.nnx.doors import DOORS
from nmjax.nnx.variables import Site
from nmjax.programs.rewriting import Product, Rewriter

SITE = "nm_site"


@dataclass(frozen=True)
class Declared:
    """A door that `door` declared.

    Attributes:
      weights: The attributes that hold the weights.
      alone: True if the door names one weight. A rule then matches the path of the layer.
      input: A function of a layer that returns the shape of an input; -1 in it stands for the tokens.
      method: The method that multiplies an input by the weights.
    """

    weights: tuple[str, ...]
    alone: bool
    input: Callable[[Any], Sequence[int]] | None
    method: str

    def attribute(self, weight: str) -> str:
        """Return the attribute of a layer that holds the site of a weight."""
        return SITE if self.alone else f"{SITE}_{weight}"


DECLARED: dict[type | str, tuple[Declared, ...]] = {}
"""The declared doors, by class or by "module:Class"."""


def door(
    kind: type | str, weight: str | tuple[str, ...], *, input: Callable[[Any], Sequence[int]] | None = None,
    method: str = "__call__",
) -> None:  # fmt: skip
    """Declare that layers of a class multiply an input by a weight, so that `sparsify` can prune the product.

    The class is not changed. Declare it once, before `sparsify` or `plan`. The product is found by tracing the method:
    a `jnp.einsum`, ``@``, `jax.lax.dot_general` or convolution with the weight as an operand, perhaps in another dtype
    or with its axes in another order.

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
      ValueError: ``kind`` is a text of another form, the class has no such method, the weight has a door already, or
        the class has a door for another single weight.

    >>> import jax.numpy as jnp, nmjax as nm
    >>> class Projection(nnx.Module):
    ...     def __init__(self, features, rngs):
    ...         self.w = nnx.Param(jax.random.normal(rngs.params(), (features, features)))
    ...     def __call__(self, x):
    ...         return jnp.einsum("bi,oi->bo", x, self.w[...])
    >>> nm.nnx.door(Projection, weight="w", input=lambda layer: (-1, layer.w.shape[1]))
    >>> model = nm.nnx.sparsify(Projection(8, rngs=nnx.Rngs(0)), nm.Recipe({".*": "ste(2,4)"}))
    >>> nm.nnx.patterns(model)
    {'w': 2:4 along axis 1}
    """
    name = kind if isinstance(kind, str) else getattr(kind, "__qualname__", repr(kind))
    if isinstance(kind, str):
        if not all(part and not part.isspace() for part in kind.split(":")) or kind.count(":") != 1:
            raise ValueError(f"nm.nnx.door takes a class or a text 'package.module:Class', got {kind!r}.")
    elif not (isinstance(kind, type) and issubclass(kind, nnx.Module)):
        raise TypeError(
            f"nm.nnx.door takes a class of flax.nnx, got {kind!r}. For classes of flax.linen use nm.linen.door."
        )
    elif not callable(getattr(kind, method, None)):
        raise ValueError(f"nm.nnx.door({name}, method={method!r}): the class has no such method.")
    if kind in DOORS:
        raise ValueError(f"nm.nnx.door({name}): this class has a door already. Declare a door for a subclass.")
    weights = (weight,) if isinstance(weight, str) else tuple(weight) if isinstance(weight, (tuple, list)) else ()
    if not weights or not all(isinstance(one, str) and one for one in weights):
        raise TypeError(f"nm.nnx.door({name}): weight is an attribute's name, or a tuple of names, got {weight!r}.")
    if input is not None and not callable(input):
        raise TypeError(
            f"nm.nnx.door({name}): input is a function of a layer that returns a shape, got {input!r}. Write "
            f"input=lambda layer: {input!r}."
        )
    mine = Declared(weights, isinstance(weight, str), input, method)
    others = [one for one in _doors_of(kind) if (one.weights, one.method) != (mine.weights, method)]
    for one in others:
        twice = [w for w in weights if w in one.weights]
        if twice:
            raise ValueError(
                f"nm.nnx.door({name}, weight={twice[0]!r}, method={method!r}): this parameter has a door already, by "
                f"method={one.method!r}. A parameter has one door."
            )
        if one.alone and mine.alone:
            names = f'"{one.weights[0]}", "{weights[0]}"'
            raise ValueError(
                f"nm.nnx.door({name}, weight={weight!r}): this class has a door for {one.weights[0]!r}, and rules "
                f"could not tell the two weights apart. Declare both as a tuple, such as weight=({names})."
            )
    if isinstance(kind, type):
        sparse_class(kind, (method,))  # a class that refuses a subclass is refused here
    kept = [one for one in DECLARED.get(kind, ()) if one in others]
    DECLARED[kind] = (*kept, mine)


def _text(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _doors_of(kind: type | str) -> list[Declared]:
    """Return the doors of a class, those that were declared by its name included."""
    names = [one for one in DECLARED if (_text(one) if isinstance(one, type) else one) == kind]
    if isinstance(kind, type):
        names = [_text(kind), kind]
    return list({(one.weights, one.method): one for name in names for one in DECLARED.get(name, ())}.values())


def declared_doors(module: Any) -> list[Declared] | None:
    """Return the doors of a module's class: of the nearest class that has some. None if a class of Flax is nearer."""
    for kind in type(module).__mro__:
        if kind in DECLARED or _text(kind) in DECLARED:
            return _doors_of(kind)
        if kind in DOORS:
            return None
    return []


# ---- the class of a sparse layer ----


def dense_class(kind: type) -> type:
    """Return the class that a layer had before it was sparse."""
    return kind.__dict__.get("_nm_dense", kind)


@cache
def sparse_class(kind: type, methods: tuple[str, ...]) -> type:
    """Return a subclass of a class. Its methods use the sites of a layer for the products of the weights."""
    members: dict[str, Any] = {name: _pruned_method(kind, name) for name in methods}
    members |= {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    members |= {"_nm_dense": kind, "_nm_methods": methods}
    try:
        pytree = getattr(kind, "_pytree__is_pytree", True)
        options: dict[str, Any] = {} if pytree else {"pytree": False}  # a subclass does not inherit this option
        return _picklable(type(kind))(kind.__name__, (kind,), members, **options)
    except TypeError as error:
        raise TypeError(
            f"nm.nnx.door({kind.__qualname__}): a sparse layer is of a subclass, and the class refuses one: {error}. "
            "Give its __init_subclass__ defaults, or use nm.transform."
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


def without_sites(module: Any) -> Any:
    """Return a shallow copy of a layer, as it was before it was sparse."""
    plain = object.__new__(dense_class(type(module)))
    vars(plain).update({name: v for name, v in vars(module).items() if not name.startswith(SITE)})
    nodes = {name: data for name, data in module._pytree__nodes.items() if not name.startswith(SITE)}
    object.__setattr__(plain, "_pytree__nodes", type(module._pytree__nodes)(nodes))
    return plain


def _pruned_method(kind: type, name: str) -> Callable[..., Any]:
    plain = getattr(kind, name)

    def method(self: Any, *args: Any, **options: Any) -> Any:
        doors = [one for one in declared_doors(self) or () if one.method == name]
        inside = {w: vars(self).get(one.attribute(w)) for one in doors for w in one.weights}
        sites = {weight: site for weight, site in inside.items() if site is not None}
        if not sites:
            return plain(self, *args, **options)
        values = {weight: getattr(self, weight)[...] for weight in sites}
        for weight, site in sites.items():
            if isinstance(site, Site):
                site.check_one_layer(values[weight].shape)
        multiplied: set[str] = set()
        others: dict[str, list[str]] = {}
        seen = lambda parameter, name: others.setdefault(parameter.path, []).append(name)

        def compute(product: Product, x: Any, w: Any, _: Any) -> Any:
            multiplied.add(product.parameter.path)
            return sites[product.parameter.path].multiply(product, x, w)

        y = call_with(self, without_sites(self), plain, args, options, values, Rewriter(compute, seen))
        for weight, site in sites.items():
            if isinstance(site, Site) and (weight not in multiplied or weight in others):
                does = f"uses it in {others[weight][0]} too" if weight in others else "multiplies no input by it"
                raise ValueError(
                    f"{site.name}: a door names {weight!r}, of shape {values[weight].shape}, and in this call "
                    f"{kind.__name__}.{name} {does}. A door needs a weight that is an operand of products alone."
                )
        return y

    method.__name__, method.__doc__ = name, plain.__doc__
    return method
