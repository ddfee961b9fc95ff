"""Masks that are learned: the n:m weights of a trained model with the largest scores, which training changes."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from nmjax.core import groups
from nmjax.nnx.calibration import Inputs
from nmjax.nnx.factors import matrices
from nmjax.nnx.one_shot import parameters
from nmjax.nnx.variables import unhardened
from nmjax.oneshot.solvers import norms_of


def mask_scores(
    model: nnx.Module, names: str, inputs: Mapping[str, Inputs] | None = None, m: int = 4
) -> dict[str, Float[Array, "inputs outputs"]]:  # fmt: skip
    """Return scores of the weights of matrices, by which `masked` chooses n of every m.

    They are the magnitudes, or with ``inputs`` those of Wanda: times the norm of the input. Each group that is not zero
    has a mean of 1. Train them, by any optimizer, as the only parameters; the weights stay as they are. It is a
    heuristic: a mask may end worse than it began, so let the learning rate end at 0, and compare.

    Sanh et al., "Movement Pruning: Adaptive Sparsity by Fine-Tuning" (arXiv 2005.07683), without training of weights.

    >>> import nmjax as nm
    >>> normal = lambda seed, *shape: jax.random.normal(jax.random.key(seed), shape)
    >>> model = nnx.Linear(8, 4, rngs=nnx.Rngs(7))
    >>> x = normal(7, 64, 3) @ normal(9, 3, 8)             # inputs with correlations, of which Wanda knows nothing
    >>> y = model(x)                                       # what a teacher says
    >>> scores = mask_scores(model, ".*kernel", nm.nnx.calibrate(model, [x]))
    >>> loss = lambda scores: jnp.square(masked(model, scores)(x) - y).mean()
    >>> begin, gradient = loss(scores), jax.jit(jax.grad(loss))
    >>> for step in range(100):                            # the rate ends at 0, so that masks settle
    ...     scores = jax.tree.map(lambda s, g: s - (1 - step / 100) * g, scores, gradient(scores))
    >>> print(f"{begin:.2f} {loss(scores):.2f}")
    0.36 0.13

    Args:
      model: A trained model, which prunes nothing.
      names: A regular expression of whole paths of kernels of registered layers, such as ``"blocks/.*/kernel"``.
      inputs: What `calibrate` returned for the model; None for magnitudes.
      m: The size of a group.

    Returns:
      The scores by the path of the parameter.

    Raises:
      ValueError: No kernel has such a path, one is no matrix [inputs, outputs], two are one weight, m does not divide
        the inputs, a layer was not calibrated, or the model prunes its weights at each step.
    """
    if m < 1:
        raise ValueError(f"mask_scores: m is the size of a group, at least 1, got {m}.")
    scores = {}
    for layer in matrices(model, names, "mask_scores"):
        size = jnp.abs(groups.wide(layer.kernel.get_value()))
        if inputs is not None:
            if layer.path not in inputs:
                raise ValueError(f"mask_scores: inputs has no statistics of {layer.path or 'the model'}.")
            size = size * jnp.asarray(norms_of(inputs[layer.path].squares), size.dtype)
        if len(size) % m:
            raise ValueError(f"mask_scores: m={m} does not divide the {len(size)} inputs of {layer.kernel_path}.")
        group = groups.split(size, 0, m)
        mean = jnp.mean(group, 1, keepdims=True)
        scores[layer.kernel_path] = (group / jnp.where(mean > 0, mean, 1)).reshape(size.shape)
    return scores


def masked(model: nnx.Module, scores: Mapping[str, Float[Array, "inputs outputs"]], n: int = 2, m: int = 4) -> Any:
    """Return a copy of a model in which the n weights of the largest scores of every m are kept, and others are zero.

    It can be called in `jax.jit` and differentiated. The derivative of a score is that of its weight, times the weight,
    as if the mask were the score; also for weights that are zero now. The weights of the model get no gradient. The
    copy shares all other arrays with the model: do not donate them.

    Args:
      model: The model, which prunes nothing.
      scores: What `mask_scores` returned, or trained from it.
      n, m: The pattern.

    Raises:
      ValueError: The model has no such parameter, or one of another shape; n does not lie between 1 and m; m does not
        divide the inputs; or the model prunes its weights at each step.

    >>> w = jnp.array([[1.0], [2.0], [3.0], [4.0]])
    >>> model = nnx.Linear(4, 1, kernel_init=lambda *_: w, rngs=nnx.Rngs(0))
    >>> scores = {"kernel": jnp.array([[9.0], [0.0], [7.0], [1.0]])}
    >>> masked(model, scores).kernel[...].ravel().tolist()
    [1.0, 0.0, 3.0, 0.0]
    """
    if not 1 <= n <= m:
        raise ValueError(f"masked: n lies between 1 and m, got n={n} and m={m}.")
    if (path := unhardened(model)) is not None:
        raise ValueError(f"masked: {path} prunes its weight at each step. Pass nm.nnx.harden(model).")
    model, left = nnx.clone(model), dict(scores)
    for path, variable in parameters(model):
        if path in left:
            score, w = left.pop(path), jax.lax.stop_gradient(variable.get_value())
            if score.shape != w.shape:
                raise ValueError(f"masked: the scores of {path} have shape {score.shape}, and it has {w.shape}.")
            fixed = jax.lax.stop_gradient(score)
            kept = jnp.where(groups.top(fixed, 0, n, m), w, jnp.zeros((), w.dtype))
            zero = jnp.where(jnp.isfinite(fixed), score - fixed, 0)  # with the derivative of the score
            variable.set_value(kept + w * zero.astype(w.dtype))
    if left:
        raise ValueError(f"masked: the model has no parameter {next(iter(left))!r}, which scores have.")
    return model
