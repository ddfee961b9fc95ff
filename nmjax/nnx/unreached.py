"""The parameters of a model outside its registered layers."""

import math
import os
from typing import Any

import jax
import numpy as np
from flax import nnx

from nmjax.nnx.layer import Layer
from nmjax.products.sparsity import Sparsity
from nmjax.recipes.missed import Missed
from nmjax.recipes.table import Recipe


def unreached(model: Any, registered: list[Layer]) -> tuple[list[Missed], int]:
    """Return the parameters of two axes or more outside registered layers, and the number of values in all.

    Axes of size 1 and axes that stack layers do not count as axes. The bias of a registered layer is left out.

    Args:
      model: The model.
      registered: Its registered layers.
    """
    reached = {id(v) for layer in registered for v in (layer.kernel, getattr(layer.module, "bias", None))}
    owners = {"/".join(map(str, path)): type(module).__name__ for path, module in nnx.iter_modules(model)}
    found: list[Missed] = []
    count = 0
    for path, variable in nnx.iter_graph(model):
        if isinstance(variable, nnx.Param):
            for v in jax.tree.leaves(variable):
                count += math.prod(np.shape(v))
                names = tuple(map(str, path))
                if id(variable) not in reached and np.ndim(v) > 1 and _rank(names, v.shape, registered) > 1:
                    owner = "/".join(names[:-1])
                    found.append(Missed("/".join(names), tuple(v.shape), owners.get(owner, "")))
    return found, count


def wanted(recipe: Recipe, found: list[Missed]) -> list[Missed]:
    """Return the parameters that a rule of a recipe was meant to prune."""
    return [one for one in found if recipe.of_parameter(one.path) != Sparsity()]


def rule_paths(found: list[Missed]) -> list[str]:
    """Return the paths by which a rule may leave these parameters dense: their own, and those of their modules."""
    return [path for one in found for path in (one.path, one.path.rpartition("/")[0])]


def _rank(names: tuple[str, ...], shape: tuple[int, ...], registered: list[Layer]) -> int:
    """Return the number of axes of a parameter in one layer, without those of size 1.

    If all layers that are nearest to it in the tree are stacked alike, it is stacked too.
    """
    long = sum(n > 1 for n in shape)
    shared = [len(os.path.commonprefix([names, tuple(layer.path.split("/"))])) for layer in registered]
    most = max(shared, default=0)
    nearest = [layer for layer, n in zip(registered, shared, strict=True) if n == most]
    stacks: set[tuple[int, ...]] = set()
    for layer in nearest:
        stack, kernel = stack_of(layer), layer.kernel.shape
        stacks.add(stack if all(a < len(shape) and kernel[a] == shape[a] for a in stack) else ())
    return long - (sum(shape[a] > 1 for a in stacks.pop()) if len(stacks) == 1 else 0)


def stack_of(layer: Layer, axes: tuple[int, ...] | None = None) -> tuple[int, ...]:
    """Return the stacking axes of a layer: ``axes`` if they fit it. A layer that cannot be sparse has none."""
    try:
        return axes if axes in layer.stacks else layer.stack
    except ValueError:  # a kernel of another shape than its layer declares
        return ()
