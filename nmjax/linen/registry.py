"""The classes of flax.linen layers whose weights a recipe can prune, and those that users register."""

from typing import Any, NamedTuple

from flax import linen as nn

from nmjax.linen.others import OTHERS

REGISTERED: dict[type | str, tuple[str, ...]] = {
    nn.Dense: ("kernel",),
    nn.DenseGeneral: ("kernel",),
    nn.Einsum: ("kernel",),
    nn.Conv: ("kernel",),
    nn.ConvTranspose: ("kernel",),
    **OTHERS,
}
"""The names of the weights, by class or by "package.module:Class"."""


class Weight(NamedTuple):
    """A weight of a registered layer.

    Attributes:
      name: The name of the parameter in the layer.
      path: The path that rules match: of the layer, or "layer/name" if the layer has several weights.
      kind: The class of the layer.
    """

    name: str
    path: str
    kind: str

    def __str__(self) -> str:
        """Return the registration in words, for errors."""
        return f"nm.linen.register_layer({self.kind}, weight={self.name!r})"


def register_layer(kind: type | str, weight: str | tuple[str, ...]) -> None:
    """Register a class of layers by its parameter, so that `sparsify` can prune them.

    The class is not changed. Register it once, before `sparsify`. Subclasses count as their class. The product
    is found by tracing the layer: a `jnp.einsum`, ``@``, `jax.lax.dot_general` or convolution with the parameter as an
    operand, perhaps in another dtype or with its axes in another order.

    Args:
      kind: A class of flax.linen; or a text "package.module:Class", which imports nothing.
      weight: The name of the parameter. "{attribute}" in it stands for an attribute of the layer, as in
        "{weight_name}". Rules match the path of the layer. If the layer has several weights, pass a tuple of their
        names: rules then match "path/name".

    Raises:
      TypeError: ``kind`` is not a subclass of `flax.linen.Module`.
      ValueError: ``kind`` is a text of another form, or the class is registered with other weights.

    >>> import jax, jax.numpy as jnp
    >>> import nmjax as nm
    >>> class Projection(nn.Module):
    ...     features: int
    ...     @nn.compact
    ...     def __call__(self, x):
    ...         w = self.param("w", nn.initializers.lecun_normal(), (x.shape[-1], self.features))
    ...         return jnp.einsum("bi,io->bo", x, w)
    >>> nm.linen.register_layer(Projection, weight="w")
    >>> with nm.linen.sparsify(nm.Recipe({".*": "ste(2,4)"})):
    ...     variables = Projection(4).init(jax.random.key(0), jnp.ones((2, 8)))
    >>> nm.linen.patterns(variables)
    {'w': 2:4 along axis 0}
    """
    if isinstance(kind, str):
        package, colon, name = kind.partition(":")
        if not (package.strip() and colon and name.strip()) or ":" in name:
            raise ValueError(f"nm.linen.register_layer takes a class or a text 'package.module:Class', got {kind!r}.")
    elif not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise TypeError(
            f"nm.linen.register_layer takes a class of flax.linen, got {kind!r}. For classes of flax.nnx use "
            "nm.nnx.register_layer."
        )
    else:
        name = kind.__qualname__
    weights = (weight,) if isinstance(weight, str) else tuple(weight)
    declared = REGISTERED.get(kind, weights)
    if declared != weights:
        raise ValueError(
            f"nm.linen.register_layer({name}, weight={weight!r}): the class is registered already, for "
            f"{', '.join(declared)}. If it has several weights, pass a tuple of their names."
        )
    REGISTERED[kind] = weights


def weights_of(module: nn.Module) -> tuple[Weight, ...]:
    """Return the registered weights of a bound layer: those of its nearest registered base class, or ().

    Raises:
      ValueError: A registered weight is no attribute of the layer.
    """
    for kind in type(module).__mro__:
        texts = REGISTERED.get(kind) or REGISTERED.get(f"{kind.__module__}:{kind.__qualname__}")
        if texts is not None:
            names = [_filled(module, text) for text in texts]
            path, shared = "/".join(module.path), len(names) > 1 or _shares_scope(module)
            name = type(module).__name__
            return tuple(Weight(w, f"{path}/{w}".lstrip("/") if shared else path, name) for w in names)
    return ()


def _filled(module: nn.Module, text: str) -> str:
    try:
        return text.format_map(vars(module))
    except KeyError as error:
        path, kind = "/".join(module.path) or "the layer", type(module).__name__
        raise ValueError(
            f"{path}: nm.linen.register_layer({kind}, weight={text!r}) names {error}, and {kind} has no such attribute."
        ) from None


def _shares_scope(module: Any) -> bool:
    """Return True if a layer has its parameters in the scope of another, as `flax.linen.share_scope` does."""
    path = module.path
    return path[-1] != module.name if path else isinstance(module.parent, nn.Module)
