"""The layers of a model that have a door."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
from flax import nnx

from nmjax.core import layer_paths
from nmjax.models.transformer import Scores
from nmjax.nnx.declared import declared_doors
from nmjax.nnx.doors import DOORS, Layer, ScoresLayer
from nmjax.nnx.found import DeclaredLayer, Uses


def layers(model: Any) -> Iterator[Layer]:
    """Return every layer with a door once, in the order of the paths, numbers by value.

    If a door names several weights, each weight counts as a layer.

    Raises:
      TypeError: If the model is not one of flax.nnx.
    """
    if not isinstance(model, (nnx.Pytree, tuple, list)):
        raise TypeError(f"expected an nnx.Module, got {type(model).__name__}. For flax.linen models use nm.linen.")
    tree: Any = model  # iter_modules takes tuples and lists too, though its annotation does not say so
    with_doors: list[Layer] = []
    traced: dict[Any, Uses] = {}
    for path, module in nnx.iter_modules(tree):
        with_doors += _of_module("/".join(map(str, path)), module, traced)
    return iter(sorted(with_doors, key=lambda layer: layer_paths.by_number(layer.path)))


def _of_module(path: str, module: Any, traced: dict[Any, Uses]) -> list[Layer]:
    declared = declared_doors(module)
    if declared is None:
        door = next(door for kind, door in DOORS.items() if isinstance(module, kind))
        if isinstance(module, Scores):
            return [ScoresLayer(path, module, door, weight_name="marker")]
        return [Layer(path, module, door)]
    for one in declared:
        if not callable(getattr(module, one.method, None)):
            kind = type(module).__name__
            raise ValueError(
                f"{path or 'the model'}: nm.nnx.door({kind}, method={one.method!r}): the class has no such method."
            )
    return [
        DeclaredLayer(
            path if one.alone else f"{path}/{name}".lstrip("/"), module,
            declaration=one, weight_name=name, traced=traced,
        )
        for one in declared
        for name in one.weights
        if getattr(module, name, ...) is not None
    ]  # fmt: skip


def over(stack: tuple[int, ...], f: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of a whole stack's arrays.

    Args:
      stack: The axes that stack layers.
      f: A function of one layer's arrays, which have the kernel's rank.
    """
    for axis in stack:
        f = jax.vmap(f, in_axes=axis, out_axes=axis)
    return f
