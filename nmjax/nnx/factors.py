"""Low-rank changes of pruned weights, which keep their zeros (LoRA under the mask)."""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from nmjax.nnx.layer import Layer
from nmjax.nnx.layers import layers
from nmjax.nnx.one_shot import parameters
from nmjax.nnx.variables import unhardened


class LowRank(NamedTuple):
    """A change of a weight: the product of two factors.

    Attributes:
      down: The first factor, [inputs, rank].
      up: The second factor, [rank, outputs].

    >>> change = LowRank(jnp.ones((8, 1)), jnp.ones((1, 4)))
    >>> (change.down @ change.up).shape
    (8, 4)
    """

    down: Float[Array, "inputs rank"]
    up: Float[Array, "rank outputs"]


def low_rank(model: nnx.Module, names: str, rank: int, *, rngs: nnx.Rngs) -> dict[str, LowRank]:
    """Return factors of low rank for matrices of a model. At the beginning their products are zero.

    Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (arXiv 2106.09685). Train them, by any optimizer, as
    the only parameters: `changed` returns the model with the changed weights.

    >>> import nmjax as nm
    >>> model = nm.nnx.sparsify(nnx.Linear(16, 8, rngs=nnx.Rngs(0)), nm.Recipe({".*": "ste(2,4)"}))
    >>> model = nm.nnx.harden(model)                     # or nm.checkpoints.load("minilm-24")
    >>> factors = low_rank(model, ".*kernel", 2, rngs=nnx.Rngs(1))
    >>> x, y = jnp.ones((4, 16)), jnp.ones((4, 8))
    >>> loss = lambda factors: jnp.square(changed(model, factors)(x) - y).mean()
    >>> for _ in range(200):
    ...     factors = jax.tree.map(lambda v, g: v - 0.1 * g, factors, jax.grad(loss)(factors))
    >>> bool(loss(factors) < 0.01)
    True
    >>> nm.nnx.patterns(changed(model, factors))         # merged: as large and as sparse as before
    {'kernel': 2:4 along axis 0}

    Args:
      model: A model with zeros in its weights.
      names: A regular expression of whole paths of kernels of registered layers, such as ``"blocks/.*/kernel"``.
      rank: The rank of the changes.
      rngs: The random numbers of the first factors, which have the variance 1/inputs.

    Returns:
      The factors by the path of the parameter.

    Raises:
      ValueError: The rank is not positive, no kernel has such a path, one is no matrix, or the model prunes its weights
        at each step.
    """
    if rank < 1:
        raise ValueError(f"low_rank: rank must be at least 1, got {rank}.")
    shapes = {layer.kernel_path: layer.kernel.shape for layer in matrices(model, names, "low_rank")}
    normal = lambda shape: jax.random.normal(rngs.params(), shape) / shape[0] ** 0.5
    return {path: LowRank(normal((i, rank)), jnp.zeros((rank, o))) for path, (i, o) in shapes.items()}


def matrices(model: nnx.Module, names: str, caller: str) -> list[Layer]:
    """Return the layers whose kernels have paths that match, and refuse those that are no matrices.

    Args:
      model: A model that does not prune its weights at each step.
      names: A regular expression of whole paths of kernels of registered layers.
      caller: The function that messages name.
    """
    if (path := unhardened(model)) is not None:
        raise ValueError(f"{caller}: {path} prunes its weight at each step. Pass nm.nnx.harden(model).")
    try:
        chosen = [layer for layer in layers(model) if layer.has_weight and re.fullmatch(names, layer.kernel_path)]
    except re.error as error:
        raise ValueError(f"{caller}: {names!r} is not a regular expression: {error}.") from None
    if not chosen:
        raise ValueError(f"{caller}: no kernel of a registered layer has a path that matches {names!r}.")
    for layer in chosen:
        if len(layer.kernel.shape) != 2 or layer.operand is None or layer.operand.contract != (0,):
            raise ValueError(
                f"{caller}: {layer.kernel_path} has shape {layer.kernel.shape}, and only matrices [inputs, outputs] "
                "are changed. Name others; a model made without scan has matrices, and experts have none."
            )
    owners: dict[int, str] = {}
    for layer in chosen:
        owner = owners.setdefault(id(layer.kernel), layer.kernel_path)
        if owner != layer.kernel_path:
            raise ValueError(f"{caller}: {owner} and {layer.kernel_path} are one weight. Name one of them.")
    return chosen


def changed(model: nnx.Module, factors: Mapping[str, LowRank], scale: float = 1.0) -> Any:
    """Return a copy of a model with the products of factors added to its weights, where these are not zero.

    The masked sum is what the products of the forward pass multiply, so a merged model computes what was trained. It
    can be called in `jax.jit` and differentiated; the weights of the model get no gradient.

    Args:
      model: The model.
      factors: What `low_rank` returned, or trained from it.
      scale: A factor of the changes.

    >>> model = nnx.Linear(2, 1, kernel_init=lambda *_: jnp.array([[0.0], [3.0]]), rngs=nnx.Rngs(0))
    >>> changed(model, {"kernel": LowRank(jnp.ones((2, 1)), jnp.ones((1, 1)))}).kernel[...].tolist()
    [[0.0], [4.0]]
    """
    model, left = nnx.clone(model), dict(factors)
    for path, variable in parameters(model):
        if path in left:
            own, w = left.pop(path), jax.lax.stop_gradient(variable.get_value())
            change = jnp.where(w == 0, 0, scale * (own.down @ own.up))
            variable.set_value(w + change.astype(w.dtype))
    if left:
        raise ValueError(f"changed: the model has no parameter {next(iter(left))!r}, which factors have.")
    return model
