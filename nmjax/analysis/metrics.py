"""Measures of sparsity: densities, flips of masks, ties, broken patterns and errors of pruned values.

They are functions of arrays or pytrees, in which None is skipped. Sums are taken in float32 and int32. Call them inside
`jax.jit` to log them from a training step.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, PyTree

from nmjax.analysis.patterns import Pattern as Pattern, count, path as path, violations as violations
from nmjax.core import groups, merging, random
from nmjax.core.context import Ctx
from nmjax.core.pruner import Pruner
from nmjax.products.functions import einsum
from nmjax.products.pruning import prune
from nmjax.products.sparsity import Sparsity

Key: TypeAlias = Any  # a jax.random.key, an int seed, or two uint32 words


def density(tree: PyTree) -> Float[Array, ""]:
    """Return the share of non-zeros over all leaves. NaN counts as a non-zero.

    Args:
      tree: An array or a pytree of arrays.

    Returns:
      A float32 scalar between 0 and 1.

    Raises:
      ValueError: The tree has no entries.

    >>> density({"w": jnp.array([[1., 0.], [jnp.nan, 0.]]), "b": jnp.zeros(4)})
    Array(0.25, dtype=float32)
    """
    leaves = _leaves(tree)
    nonzeros: Any = sum(_f32(count(x.astype(bool))) for x in leaves)
    return nonzeros / float(sum(x.size for x in leaves))


def sad(before: PyTree[Bool[Array, "..."]], after: PyTree[Bool[Array, "..."]]) -> PyTree[Float[Array, ""]]:
    """Return the sum of absolute differences ``|m - m'|_1`` of every mask (SR-STE, Zhou et al., arXiv 2102.04010).

    Args:
      before: A mask or a pytree of masks.
      after: The masks of a later step, a pytree of the same structure.

    Returns:
      A pytree of the same structure, with a float32 scalar for each mask.

    Raises:
      ValueError: Two masks differ in shape, or are not bool.

    >>> sad({"w": jnp.array([True, True, False])}, {"w": jnp.array([False, True, True])})
    {'w': Array(2., dtype=float32)}
    """

    def flips(m: Bool[Array, "..."], new: Bool[Array, "..."]) -> Float[Array, ""]:
        if m.shape != new.shape or not m.dtype == new.dtype == bool:
            got = f"{jax.typeof(m)} and {jax.typeof(new)}"
            raise ValueError(f"two masks must be bool and of one shape, got {got}. Write w != 0 for a mask.")
        return _f32(count(m != new))

    return jax.tree.map(flips, before, after)


def flip_rate(before: PyTree, after: PyTree) -> Float[Array, ""]:
    """Return the share of mask entries that changed, ``r = |m xor m'|_1 / d``, over all leaves.

    The masks are those of a sparse run, or those that a dense run would have (Hu et al., arXiv 2404.01847 and
    2409.09099).

    Args:
      before: A mask or a pytree of masks. A scalar True stands for a weight without a mask and does not count.
      after: The masks of a later step, a pytree of the same structure.

    Returns:
      A float32 scalar between 0 and 1.

    Raises:
      ValueError: There is no mask, or two masks differ in shape.

    >>> flip_rate(jnp.array([True, True, False, False]), jnp.array([False, True, True, False]))
    Array(0.5, dtype=float32)
    """
    size = sum(m.size for m in _leaves(before) if m.ndim)
    if not size:
        raise ValueError(f"{before!r} has no mask: all of its leaves are scalars.")
    flips: Any = sum(jax.tree.leaves(sad(before, after)))
    return flips / float(size)


def flip_rates(before: PyTree, after: PyTree) -> dict[str, Float[Array, ""]]:
    """Return the `flip_rate` of every leaf that has a mask, by its path.

    Args:
      before: A pytree of masks, as in `flip_rate`.
      after: The masks of a later step.

    Returns:
      A dict from path, as `path` writes it, to a float32 scalar.

    >>> before = {"up": jnp.array([True, False]), "head": jnp.array(True)}
    >>> flip_rates(before, {"up": jnp.array([True, True]), "head": jnp.array(True)})
    {'up': Array(0.5, dtype=float32)}
    """
    named = zip(jax.tree_util.tree_leaves_with_path(before), jax.tree.leaves(after), strict=True)
    return {path(keys): flip_rate(m, new) for (keys, m), new in named if m.ndim}


def ties(x: Float[Array, "..."], n: int, m: int, axis: int = -1) -> Float[Array, ""]:
    """Return the share of groups whose n-th and (n+1)-th largest magnitudes are equal.

    In such a group the place of a value decides whether it is kept. Two zeros are no tie, because pruning them changes
    nothing.

    Args:
      x: An array.
      n: Number of values kept in each group.
      m: Size of a group.
      axis: The axis that groups lie along.

    Returns:
      A float32 scalar between 0 and 1.

    Raises:
      ValueError: The axis does not divide by m, or n does not lie between 1 and m.

    >>> ties(jnp.array([1., -2., 2., 3.,  1., 0., 0., 0.]), 2, 4)
    Array(0.5, dtype=float32)
    """
    axis = groups.position(x.ndim, *Pattern(n, m, axis).contracted)
    size = groups.magnitude(groups.split(x, axis, m))
    kept = groups.top_of(size, axis + 1, n)
    least = jnp.min(jnp.where(kept, size, jnp.iinfo(size.dtype).max), axis + 1)
    most = jnp.max(jnp.where(kept, 0, size), axis + 1)
    return _f32(count((least == most) & (most > 0))) / float(most.size)


class Weight(NamedTuple):
    """A pruned weight in comparison with the dense one.

    Attributes:
      density: The share of non-zeros.
      error: The relative distance ``||pruned - dense|| / ||dense||`` (L2).
      cosine: The cosine between the two.
      ties: The share of groups in which a tie decides, as in `ties`. NaN if the pruner promises no n:m.

    >>> import nmjax as nm
    >>> weight(nm.mse(2, 4), jnp.array([4., 2., 0., 2.]), jnp.array([4., 2., 0., 0.]), (0,)).ties
    Array(1., dtype=float32)
    """

    density: Float[Array, ""]
    error: Float[Array, ""]
    cosine: Float[Array, ""]
    ties: Float[Array, ""]


def weight(p: Pruner, dense: Float[Array, "..."], pruned: Float[Array, "..."], contract: tuple[int, ...]) -> Weight:
    """Compare a pruned weight with the dense one.

    Args:
      p: The pruner.
      dense: The weight.
      pruned: What the pruner made of it.
      contract: The axes that the product contracts.

    Returns:
      The comparison, in float32.

    >>> import nmjax as nm
    >>> print(*weight(nm.mse(2, 4), jnp.array([0., 3., 0., 4.]), jnp.array([0., 0., 0., 4.]), (0,)))
    0.25 0.6 0.8 0.0
    """
    e, s = groups.wide(dense).ravel(), groups.wide(pruned).ravel()
    norm = jnp.linalg.norm
    tied = jnp.float32(jnp.nan)
    if p.facts.pattern is not None:
        merged = merging.merge(dense, contract, p.facts.pattern[1])
        assert merged is not None
        tied = ties(merged[0], *p.facts.pattern, merged[1])
    return Weight(density(pruned), norm(s - e) / norm(e), jnp.vdot(e, s) / (norm(e) * norm(s)), tied)


class Error(NamedTuple):
    """The distance of draws from an exact value e, relative to its norm.

    All are NaN if the exact value is zero. Noise and variance are NaN for a single draw of a random pruner.

    Attributes:
      bias: ``||mean - e|| / ||e||``.
      noise: The bias that K unbiased draws would show: ``sqrt(variance / K)``.
      variance: The sum of the entries' sample variances, over ``||e||^2``.
      cosine: The cosine between a draw and e, on average.

    >>> print(f"{error(jnp.array([[1., 0.], [1., 2.]]), jnp.array([1., 1.])).bias:.1f}")
    0.0
    """

    bias: Float[Array, ""]
    noise: Float[Array, ""]
    variance: Float[Array, ""]
    cosine: Float[Array, ""]


def error(draws: PyTree, exact: PyTree) -> Error:
    """Return the `Error` of draws. All leaves of a pytree are one vector.

    Args:
      draws: An array or a pytree of arrays, with the draws along a leading axis.
      exact: The exact value, of the same structure without that axis.

    Returns:
      The error, in float32.

    Raises:
      ValueError: The two differ in structure or in shapes.

    >>> print(*error(jnp.array([[2., 0.], [0., 2.]]), jnp.array([1., 1.])))
    0.0 1.0 2.0 0.70710677
    """
    d, e = _leaves(draws), _leaves(exact)
    shapes, wanted = [x.shape for x in d], [(*d[0].shape[:1], *x.shape) for x in e]
    if jax.tree.structure(draws) != jax.tree.structure(exact) or shapes != wanted:
        raise ValueError(f"draws are a tree like exact with a leading axis: expected shapes {wanted}, got {shapes}.")
    return _error(lambda leaves: leaves, d, e)


def pruned_error(
    p: Pruner,
    x: Float[Array, "..."],
    *,
    axis: int = -1,
    key: Key = 0,
    draws: int = 16,
    step: Any = 0,
    state: Any = None,
) -> Error:
    """Return the `Error` of a pruned array.

    Args:
      p: The pruner.
      x: The exact value.
      axis: The axis that groups lie along.
      key: The key from which the keys of the draws are computed.
      draws: Number of draws, each by another key. A pruner that draws nothing is called once.
      step: The step.
      state: The pruner's state.

    Returns:
      The error, in float32.

    >>> import nmjax as nm
    >>> pruned_error(nm.mse(2, 4), jnp.array([2., 1., 2., 0.])).bias
    Array(0.33333334, dtype=float32)
    """
    draw = lambda key: [prune(p, x, axis=axis, key=key, step=step, state=state)]
    return _error(draw, _keys(key, draws if p.facts.stochastic else 1), [x], sure=not p.facts.stochastic)


def gradient_error(
    sparsity: Sparsity,
    x: Float[Array, "*batch tokens k"],
    w: Float[Array, "k n"],
    g: Float[Array, "*batch tokens n"],
    *,
    key: Key = 0,
    draws: int = 16,
    step: Any = 0,
    state: Any = None,
) -> Error:
    """Return the `Error` of ``dw = x^T g`` that pruning in ``dw_g`` and ``dw_x`` causes.

    The exact value is that of the same sparsity with both slots empty.

    Args:
      sparsity: The sparsity. Its forward slots must not draw.
      x: The input of the product.
      w: The weight.
      g: The gradient of the loss with respect to ``y = x w``.
      key: The key from which the keys of the draws are computed.
      draws: Number of draws, each by another key. Slots that draw nothing are computed once.
      step: The step.
      state: The state of the product, a dict from slot to state.

    Returns:
      The error, in float32.

    Raises:
      ValueError: A forward slot draws, so there is no exact value.

    >>> x, w, g = jnp.ones((4, 2)), jnp.ones((2, 3)), jnp.arange(12.0).reshape(4, 3)
    >>> import nmjax as nm
    >>> print(gradient_error(nm.Sparsity(dw_g=nm.mse(2, 4)), x, w, g).bias)
    0.23649506
    """
    if sparsity.y_x.facts.stochastic or sparsity.y_w.facts.stochastic:
        raise ValueError(f"{sparsity}: if a forward slot draws, no dw is the exact one. Leave that slot empty here.")

    def dw(sparsity: Sparsity, key: Key) -> tuple[jax.Array, ...]:
        product = lambda w: einsum("...i,io->...o", x, w, sparsity=sparsity, ctx=Ctx(key, step, state))
        return jax.vjp(product, w)[1](g)

    stochastic = sparsity.dw_g.facts.stochastic or sparsity.dw_x.facts.stochastic
    exact = dw(sparsity.only(y_x=sparsity.y_x, y_w=sparsity.y_w), key)
    return _error(lambda key: dw(sparsity, key), _keys(key, draws if stochastic else 1), exact, sure=not stochastic)


def gradient_variance(grads: PyTree) -> Float[Array, ""]:
    """Return the variance of ``|g|`` over all entries of all leaves.

    It is a measure of noise (Bambhaniya et al., arXiv 2402.04744). For each leaf by itself write
    ``jax.tree.map(gradient_variance, grads)``.

    Args:
      grads: A pytree of gradients.

    Returns:
      A float32 scalar.

    >>> gradient_variance({"w": jnp.array([1., -3.]), "b": jnp.array([[3.], [5.]])})
    Array(2., dtype=float32)
    """
    sizes = [jnp.abs(_f32(x)) for x in _leaves(grads)]
    count = float(sum(v.size for v in sizes))
    mean = sum(jnp.sum(v) / count for v in sizes)
    variance: Any = sum(jnp.sum(jnp.square(v - mean)) / count for v in sizes)
    return variance


def _error(draw: Callable[[Any], Any], inputs: Any, exact: Any, sure: bool = False) -> Error:
    """Return the error of ``draw`` at one input after another.

    A running mean (Welford) keeps memory constant. Values are in units of the largest exact one, so that no square
    underflows. ``sure`` says that there is a single draw, of a pruner that draws nothing.
    """
    largest = jnp.max(jnp.stack([jnp.max(jnp.abs(_f32(e)), initial=0.0) for e in exact]))
    unit = lax.reduce_precision(largest, 8, 0)  # a power of two, so that dividing rounds nothing
    scaled = lambda leaves: [_f32(v) / unit for v in leaves]
    exact, zero = scaled(exact), jnp.float32(0)
    energy = _dot(exact, exact)

    def step(sums: Any, input: Any) -> tuple[Any, None]:
        count, mean, spread, cosines = sums
        count, d = count + 1, scaled(draw(input))
        gap = [v - e - b for v, e, b in zip(d, exact, mean, strict=True)]
        mean = [b + v / count for v, b in zip(gap, mean, strict=True)]
        spread = spread + _dot(gap, gap) * (1 - 1 / count)
        return (count, mean, spread, cosines + _dot(d, exact) / jnp.sqrt(_dot(d, d) * energy)), None

    (count, mean, spread, cosines), _ = lax.scan(step, (zero, [jnp.zeros_like(e) for e in exact], zero, zero), inputs)
    variance = spread / energy / (1 if sure else count - 1)
    return Error(jnp.sqrt(_dot(mean, mean) / energy), jnp.sqrt(variance / count), variance, cosines / count)


def _keys(key: Key, draws: int) -> jax.Array:
    """Return all keys at once. Making each in the loop takes seconds to compile."""
    words = random.words(key)
    return jax.vmap(lambda i: random.fold(words, i))(jnp.arange(draws))


def _leaves(tree: PyTree) -> list[jax.Array]:
    leaves = [jnp.asarray(x) for x in jax.tree.leaves(tree)]
    if not sum(x.size for x in leaves):
        raise ValueError(f"{tree!r} has no entries to measure.")
    return leaves


def _f32(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32)


def _dot(a: list[jax.Array], b: list[jax.Array]) -> jax.Array:
    total: Any = sum(jnp.sum(v * w) for v, w in zip(a, b, strict=True))
    return total
