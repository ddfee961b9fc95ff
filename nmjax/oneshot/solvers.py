"""Solvers of one layer: n:m weights whose output is near that of the dense weights.

They compute in float64 with NumPy, on the host.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from nmjax.pruners.input_norms import LEAST

BLOCK, PART = 128, 16  # inputs that are pruned before all later inputs, or those of their block, are updated
CHUNK = 1 << 18  # values that are looked at together


class Solved(NamedTuple):
    """The result of a solver.

    Attributes:
      weight: The pruned weight, in float64.
      mask: True where a weight is kept.
      error: The relative error ||XW - XP||^2 / ||XW||^2 of the layer's output.
      magnitude_error: The same error with magnitude pruning.

    >>> solved = magnitude(np.array([[1.0], [-2.0], [3.0], [-4.0]]), np.eye(4))
    >>> solved.weight[:, 0].tolist(), round(solved.error, 3)
    ([0.0, 0.0, 3.0, -4.0], 0.167)
    """

    weight: np.ndarray
    mask: np.ndarray
    error: float
    magnitude_error: float


def magnitude(w: np.ndarray, moments: np.ndarray, n: int = 2, m: int = 4) -> Solved:
    """Keep the n largest magnitudes of every m inputs.

    Args:
      w: The weight, [inputs, outputs].
      moments: The second moments X'X of the inputs; or only its diagonal, as if inputs had no correlation.
      n: The number of weights to keep in each group.
      m: The size of a group, along the inputs.

    Raises:
      ValueError: The shapes do not fit, or m does not divide the inputs.

    >>> magnitude(np.array([[1.0], [-2.0], [3.0], [-4.0]]), np.eye(4)).mask[:, 0].tolist()
    [False, False, True, True]
    """
    w, moments = _checked(w, moments, n, m)
    return _solved(w, _mask(w, n, m, lambda rows: np.abs(w[rows])), moments, n, m)


def wanda(w: np.ndarray, moments: np.ndarray, n: int = 2, m: int = 4) -> Solved:
    """Keep the weights with the largest products of magnitude and the norm of their input.

    Sun et al., "A Simple and Effective Pruning Approach for Large Language Models" (arXiv 2306.11695).

    Args:
      w, moments, n, m: As in `magnitude`.

    >>> wanda(np.array([[1.0], [-2.0], [3.0], [-4.0]]), np.diag([100.0, 1.0, 1.0, 1.0])).mask[:, 0].tolist()
    [True, False, False, True]
    """
    w, moments = _checked(w, moments, n, m)
    norms = norms_of(moments)
    return _solved(w, _mask(w, n, m, lambda rows: np.abs(w[rows]) * norms[rows]), moments, n, m)


def ria(w: np.ndarray, moments: np.ndarray, n: int = 2, m: int = 4, power: float = 0.5) -> Solved:
    """Keep the weights of the largest relative importance: their shares of input and output, times a power of the norm.

    Zhang et al., "Plug-and-Play: An Efficient Post-training Pruning Method for Large Language Models" (ICLR 2024).
    Their permutation of the inputs is left out.

    Args:
      w, moments, n, m: As in `magnitude`.
      power: The exponent of the norm of the input.

    >>> ria(np.array([[1.0], [-2.0], [3.0], [-4.0]]), np.eye(4)).mask[:, 0].tolist()
    [False, False, True, True]
    """
    w, moments = _checked(w, moments, n, m)
    tiny, norms = np.finfo(np.float64).tiny, norms_of(moments) ** power
    outputs = np.maximum(sum(np.abs(w[rows]).sum(0) for rows in _parts(w, m)), tiny)

    def scores(rows: slice) -> np.ndarray:
        size = np.abs(w[rows])
        return (size / outputs + size / np.maximum(size.sum(1, keepdims=True), tiny)) * norms[rows]

    return _solved(w, _mask(w, n, m, scores), moments, n, m)


def sparsegpt(w: np.ndarray, moments: np.ndarray, n: int = 2, m: int = 4, damping: float = 0.01) -> Solved:
    """Prune the inputs one after another, and let the later weights make up for each error.

    Frantar and Alistarh, "SparseGPT: Massive Language Models Can Be Accurately Pruned in One-Shot" (arXiv 2301.00774),
    algorithm 1.

    Args:
      w, n, m: As in `magnitude`.
      moments: The second moments X'X of the inputs, [inputs, inputs].
      damping: The share of the mean second moment that is added to each.

    Raises:
      ValueError: The shapes do not fit, m does not divide the inputs, or ``damping`` is not positive.

    >>> x = np.array([[1.0, 1.0, 0.0, 0.0], [0.0, 0.1, 1.0, 0.0], [0.0, 0.0, 0.0, 1.0]])  # two inputs are nearly equal
    >>> solved = sparsegpt(np.array([[1.0], [1.2], [0.1], [1.1]]), x.T @ x)
    >>> solved.mask[:, 0].tolist(), solved.error < solved.magnitude_error
    ([False, True, False, True], True)
    """
    w, moments = _checked(w, moments, n, m)
    if damping <= 0:
        raise ValueError(f"damping must be positive, got {damping}.")
    if moments.ndim == 1:
        raise ValueError(f"moments are all second moments, [inputs, inputs], got {moments.shape}.")
    inputs = len(w)
    # Row i is the first row of inv(damped[i:, i:]), divided by the root of its first entry.
    upper = _root_of_inverse(_damped(moments, damping))
    rest, weight, mask = w.copy(), np.zeros_like(w), np.zeros(w.shape, bool)
    block, part = (max(1, size // m) * m for size in (BLOCK, PART))
    for begin in range(0, inputs, block):
        end = min(begin + block, inputs)
        errors = np.zeros((end - begin, w.shape[1]))
        for first in range(begin, end, part):
            last = min(first + part, end)
            for i in range(first, last):
                if i % m == 0:
                    group = rest[i : i + m] / np.diag(upper)[i : i + m, None]
                    mask[i : i + m] = largest(np.abs(group), n, m)
                weight[i] = np.where(mask[i], rest[i], 0)
                errors[i - begin] = (rest[i] - weight[i]) / upper[i, i]
                rest[i:last] -= np.outer(upper[i, i:last], errors[i - begin])
            rest[last:end] -= upper[first:last, last:end].T @ errors[first - begin : last - begin]
        rest[end:] -= upper[begin:end, end:].T @ errors
    return _solved(weight, mask, moments, n, m, w)


def admm(
    w: np.ndarray,
    moments: np.ndarray,
    n: int = 2,
    m: int = 4,
    damping: float = 0.01,
    mask_steps: int = 20,
    fixed_steps: int = 20,
) -> Solved:
    """Choose masks and weights together by the alternating direction method of multipliers.

    Boža, "Fast and Effective Weight Update for Pruned Large Language Models" (arXiv 2401.02938). Inputs are scaled to
    norm 1. The mask is chosen again in each of the first steps, and then fixed.

    Args:
      w, n, m: As in `magnitude`.
      moments: The second moments X'X of the inputs, [inputs, inputs].
      damping: The share of the mean second moment that is added to each.
      mask_steps: The number of steps in which the mask may change.
      fixed_steps: The number of steps after that.

    Raises:
      ValueError: The shapes do not fit, m does not divide the inputs, or ``damping`` is not positive.

    >>> admm(np.array([[1.0], [-2.0], [3.0], [-4.0]]), np.eye(4)).weight[:, 0].round(3).tolist()
    [0.0, 0.0, 3.0, -4.0]
    """
    w, moments = _checked(w, moments, n, m)
    if damping <= 0:
        raise ValueError(f"damping must be positive, got {damping}.")
    if moments.ndim == 1:
        raise ValueError(f"moments are all second moments, [inputs, inputs], got {moments.shape}.")
    damped = _damped(moments, damping)
    norms = np.sqrt(np.diag(damped))[:, None]
    scaled = damped / norms / norms.T
    goal, inverse = scaled @ (w * norms), np.linalg.inv(scaled + np.eye(len(w)))
    x, dual = w * norms, np.zeros_like(w)
    mask = largest(np.abs(x), n, m)
    for step in range(mask_steps + fixed_steps):
        if step < mask_steps:
            mask = largest(np.abs(x + dual), n, m)
        z = np.where(mask, x + dual, 0)
        dual += x - z
        x = inverse @ (goal + z - dual)
    return _solved(np.where(mask, x + dual, 0) / norms, mask, moments, n, m, w)


# ---- parts ----


OF_NORMS = (magnitude, wanda, ria)  # the solvers that take the diagonal of the moments alone


def _checked(w: np.ndarray, moments: np.ndarray, n: int, m: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the arguments in float64, or refuse them."""
    w, moments = np.asarray(w, np.float64), np.asarray(moments, np.float64)
    if w.ndim != 2 or moments.shape not in ((len(w), len(w)), (len(w),)):
        raise ValueError(
            f"w has shape [inputs, outputs], and moments [inputs, inputs] or [inputs], got {w.shape} and "
            f"{moments.shape}."
        )
    if not 1 <= n <= m or len(w) % m:
        raise ValueError(f"m must divide the {len(w)} inputs, and n must lie between 1 and m, got n={n} and m={m}.")
    if not (np.isfinite(w).all() and np.isfinite(moments).all()):
        raise ValueError("w or moments are not finite.")
    return w, moments


def _parts(w: np.ndarray, m: int) -> Iterator[slice]:
    """Yield slices of the inputs, in whole groups, whose values fit into a cache."""
    step = max(1, CHUNK // (m * max(1, w.shape[1]))) * m
    yield from (slice(i, i + step) for i in range(0, len(w), step))


def _mask(w: np.ndarray, n: int, m: int, scores: Callable[[slice], np.ndarray]) -> np.ndarray:
    """Return the mask of the n largest scores of every m inputs, given a function of a slice of the inputs."""
    mask = np.empty(w.shape, bool)
    for rows in _parts(w, m):
        mask[rows] = largest(scores(rows), n, m)
    return mask


def largest(scores: np.ndarray, n: int, m: int) -> np.ndarray:
    """Return the mask of the n largest of every m along the first axis. Of equal scores the first is kept."""
    groups = scores.reshape(-1, m, scores.shape[1])
    if m > 32:
        rank = np.argsort(np.argsort(-groups, axis=1, kind="stable"), axis=1, kind="stable")
        return (rank < n).reshape(scores.shape)
    rank = np.zeros(groups.shape, np.int32)
    for i in range(1, m):  # a comparison of each pair, which is faster than sorting if there are few
        for j in range(i):
            ahead = groups[:, j] >= groups[:, i]
            rank[:, i] += ahead
            rank[:, j] += ~ahead
    return (rank < n).reshape(scores.shape)


def norms_of(moments: np.ndarray) -> np.ndarray:
    """Return the norms of the inputs as a column. That of an input that is always zero is tiny."""
    norms = np.sqrt(moments if moments.ndim == 1 else np.diag(moments))
    return np.where(norms > 0, norms, LEAST * norms.max() or 1.0)[:, None]


def _damped(moments: np.ndarray, damping: float) -> np.ndarray:
    """Return second moments that have an inverse. Those of inputs that are always zero are the smallest."""
    diagonal = np.diag(moments)
    mean, damped = diagonal.mean() or 1.0, moments.copy()
    np.fill_diagonal(damped, diagonal + np.where(diagonal == 0, 1e-6, damping) * mean)
    return damped


def _root_of_inverse(a: np.ndarray) -> np.ndarray:
    """Return the upper triangular U of U'U = inv(a), for a symmetric a, in whose place it is computed.

    Of a only the lower triangle is read.
    """
    from scipy.linalg import get_lapack_funcs  # here, because `import nmjax` would take longer

    factor, invert = get_lapack_funcs(("potrf", "potri"), (a,))
    root, singular = factor(a.T, overwrite_a=True)  # Fortran's order is that of the transpose
    inverse, failed = invert(root, overwrite_c=True)
    root, indefinite = factor(inverse, overwrite_a=True)
    if singular or failed or indefinite:
        raise ValueError("the second moments are not positive definite. Write a larger damping.")
    return root


def relative_error(w: np.ndarray, pruned: np.ndarray, moments: np.ndarray) -> float:
    """Return ||XW - XP||^2 / ||XW||^2 of a weight and a pruned weight, for inputs with these second moments."""
    return _energy(w - pruned, moments) / (_energy(w, moments) or 1.0)


def _energy(w: np.ndarray, moments: np.ndarray) -> float:
    """Return ||XW||^2."""
    return float(np.vdot(w, moments[:, None] * w if moments.ndim == 1 else moments @ w))


def _solved(
    kept: np.ndarray, mask: np.ndarray, moments: np.ndarray, n: int, m: int, w: np.ndarray | None = None
) -> Solved:  # fmt: skip
    """Return the result with its errors.

    Args:
      kept: The pruned weight, or the dense one if its values stay.
      mask: The mask.
      moments, n, m: As in `magnitude`.
      w: The dense weight; None if it is ``kept``.
    """
    w = kept if w is None else w
    weight, sums = np.where(mask, kept, 0), np.zeros(3)
    for rows in _parts(w, m) if moments.ndim == 1 else (slice(None),):
        own, inputs = w[rows], moments[rows]
        by_magnitude = np.where(largest(np.abs(own), n, m), own, 0)
        sums += [_energy(v, inputs) for v in (own, own - weight[rows], own - by_magnitude)]
    whole, error, of_magnitude = sums.tolist()
    return Solved(weight, mask, error / (whole or 1.0), of_magnitude / (whole or 1.0))
