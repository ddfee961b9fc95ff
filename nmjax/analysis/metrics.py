"""What a run reports of its sparsity: densities, flips and ties, violated patterns, errors of what was pruned.

Functions of arrays or pytrees (None is skipped), reductions in float32 and int32, to be logged from inside `jax.jit`.
"""

import difflib
import math
import operator
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from nmjax.core import groups, random
from nmjax.core.context import Ctx
from nmjax.core.pruner import Pruner
from nmjax.core.value import Value
from nmjax.products.functions import einsum
from nmjax.products.pruning import prune
from nmjax.products.sparsity import Sparsity
from nmjax.pruners import identity


def density(tree) -> jax.Array:
    """The share of non-zeros over all leaves; NaN counts as one.

    >>> density({"w": jnp.array([[1., 0.], [jnp.nan, 0.]]), "b": jnp.zeros(4)})
    Array(0.25, dtype=float32)
    """
    leaves = _leaves(tree)
    return sum(_f32(_count(x.astype(bool))) for x in leaves) / float(sum(x.size for x in leaves))


def sad(before, after):
    """The sum of absolute differences ``|m - m'|_1`` of every mask (SR-STE, Zhou et al., arXiv 2102.04010), in float32.

    >>> sad({"w": jnp.array([True, True, False])}, {"w": jnp.array([False, True, True])})
    {'w': Array(2., dtype=float32)}
    """

    def flips(m, new):
        if m.shape != new.shape or not m.dtype == new.dtype == bool:
            raise ValueError(f"masks are bool, of one shape, as w != 0: got {jax.typeof(m)} and {jax.typeof(new)}.")
        return _f32(_count(m != new))

    return jax.tree.map(flips, before, after)


def flip_rate(before, after) -> jax.Array:
    """The share of mask entries that changed, ``r = |m xor m'|_1 / d`` over all leaves: of masks that are held, or that a
    dense run would have (Hu et al., arXiv 2404.01847 and 2409.09099).

    >>> flip_rate(jnp.array([True, True, False, False]), jnp.array([False, True, True, False]))
    Array(0.5, dtype=float32)
    """
    size = sum(m.size for m in _leaves(before) if m.ndim)  # in a tree of masks, True by itself stands for what has none
    if not size:
        raise ValueError(f"{before!r} has no mask.")
    return sum(jax.tree.leaves(sad(before, after))) / float(size)


def flip_rates(before, after) -> dict[str, jax.Array]:
    """`flip_rate` of every leaf that has a mask, by its path.

    >>> flip_rates({"up": jnp.array([True, False]), "head": jnp.array(True)}, {"up": jnp.array([True, True]), "head": jnp.array(True)})
    {'up': Array(0.5, dtype=float32)}
    """
    named = zip(jax.tree_util.tree_leaves_with_path(before), jax.tree.leaves(after), strict=True)
    return {path(keys): flip_rate(m, new) for (keys, m), new in named if m.ndim}


def ties(x: jax.Array, n: int, m: int, axis: int = -1) -> jax.Array:
    """The share of groups whose n-th and (n+1)-th largest magnitudes are equal, so that place decides which is kept. Where
    both are 0 is no tie: pruning changes nothing there.

    >>> ties(jnp.array([1., -2., 2., 3.,  1., 0., 0., 0.]), 2, 4)
    Array(0.5, dtype=float32)
    """
    axis = groups.position(x.ndim, *Pattern(n, m, axis).axes)
    size = groups.magnitude(groups.split(x, axis, m))
    kept = groups.top_of(size, axis + 1, n)
    least = jnp.min(jnp.where(kept, size, jnp.iinfo(size.dtype).max), axis + 1)
    most = jnp.max(jnp.where(kept, 0, size), axis + 1)
    return _f32(_count((least == most) & (most > 0))) / float(most.size)


@dataclass(frozen=True, repr=False)
class Pattern(Value):
    """At most n non-zeros of every m along the axes of a weight that its product contracts, the last the innermost: of
    several as few as needed are flattened, as products do.

    >>> Pattern(2, 4, (0, 1))
    2:4 along axes 0, 1
    """

    n: int
    m: int
    axes: tuple[int, ...] | int = (-1,)

    def __post_init__(self):
        super().__post_init__()
        axes = self.axes if isinstance(self.axes, tuple) else (self.axes,)
        object.__setattr__(self, "axes", tuple(map(operator.index, axes)))
        if not 1 <= self.n <= self.m:
            raise ValueError(f"{self}: n must lie between 1 and m, for at most n of every m values are kept.")

    def __repr__(self) -> str:
        return f"{self.n}:{self.m} along {'axis' if len(self.axes) == 1 else 'axes'} {', '.join(map(str, self.axes))}"


def violations(weights, patterns: Pattern | Mapping[str, Pattern | None]) -> Any:
    """How many groups break their pattern: a dict from path to count, of any pytree of weights.

    ``patterns`` are `Pattern` or None (dense, not counted) by path, as `path` writes it, or by a regular expression of
    whole paths. The first that fits a path decides; a path that none fits is not counted. A single array takes a single
    Pattern, and gives its count.

    >>> weights = {"mlp": {"kernel": jnp.ones((8, 2)), "bias": jnp.ones(2)}, "head": {"kernel": jnp.ones((2, 3))}}
    >>> violations(weights, {"head/.*": None, ".*/kernel": Pattern(2, 4, 0)})
    {'mlp/kernel': Array(4, dtype=int32)}
    """
    named = [(path(keys), x) for keys, x in jax.tree_util.tree_leaves_with_path(weights)]
    if isinstance(patterns, Pattern):
        if len(named) != 1:
            raise TypeError(f"one Pattern is for one array, not for {len(named)}: write {{'.*/kernel': {patterns!r}}}.")
        return _violations(*named[0], patterns)
    arrays = dict(named)
    if len(arrays) < len(named):
        raise ValueError(f"two arrays have one path, of {', '.join(sorted(name for name, _ in named))}: rename one.")
    chosen: dict[str, Pattern | None] = {}
    for text, pattern in patterns.items():
        if not isinstance(pattern, Pattern | None):
            raise TypeError(f"{text!r} is for Pattern(n, m, axes), or None where dense, got {pattern!r}.")
        chosen = dict.fromkeys(_fitting(text, arrays), pattern) | chosen
    return {name: _violations(name, x, pattern) for name, x in named if (pattern := chosen.get(name))}


def path(keys) -> str:
    """A key path of `jax.tree_util` as text. A last attribute ``value``, the inside of a boxed variable, is not named.

    >>> [path(keys) for keys, _ in jax.tree_util.tree_leaves_with_path({"layers": [{"kernel": 1}]})]
    ['layers/0/kernel']
    """
    boxed = keys and isinstance(keys[-1], jax.tree_util.GetAttrKey) and keys[-1].name == "value"
    return jax.tree_util.keystr(keys[:-1] if boxed else keys, simple=True, separator="/")


def _fitting(text, paths):
    try:
        fits = [text] if text in paths else [p for p in paths if re.fullmatch(text, p)]
    except re.error as error:
        raise ValueError(f"{text!r} is no path, and no regular expression either: {error}.") from None
    if not fits:
        near = difflib.get_close_matches(text, paths, 10, 0.0)
        more = f", and {len(paths) - len(near)} more" if len(paths) > len(near) else ""
        raise ValueError(f"{text!r} fits no path. The {len(paths)} paths, nearest first: {', '.join(near)}{more}.")
    return fits


def _violations(name, x, pattern):
    x = jnp.asarray(x)
    axes = tuple(a % x.ndim for a in pattern.axes if -x.ndim <= a < x.ndim)
    merged = groups.merge(x, axes, pattern.m) if len({*axes}) == len(pattern.axes) else None
    if merged is None:
        raise ValueError(
            f"{name or 'array'!r} of shape {x.shape} does not divide into {pattern}: name the axes that its product contracts, or None."
        )
    return _count(groups.counts(merged[0], pattern.m, merged[1]) > pattern.n)


class Error(NamedTuple):
    """How far draws lie from an exact value, relative to its norm: NaN where that is zero, and noise and variance where one
    random draw does not tell."""

    bias: jax.Array  # ||mean - exact|| / ||exact||
    noise: jax.Array  # what the bias of K unbiased draws comes out as: sqrt(variance / K)
    variance: jax.Array  # the entries' sample variances added up / ||exact||^2
    cosine: jax.Array  # between a draw and the exact value, on average


def error(draws, exact) -> Error:
    """The `Error` of draws along a leading axis, of arrays or pytrees; all leaves are one vector.

    >>> print(*error(jnp.array([[2., 0.], [0., 2.]]), jnp.array([1., 1.])))
    0.0 1.0 2.0 0.70710677
    """
    d, e = _leaves(draws), _leaves(exact)
    shapes, wanted = [x.shape for x in d], [(*d[0].shape[:1], *x.shape) for x in e]
    if jax.tree.structure(draws) != jax.tree.structure(exact) or shapes != wanted:
        raise ValueError(f"draws are a tree like exact with a leading axis: wanted shapes {wanted}, got {shapes}.")
    return _error(lambda leaves: leaves, d, e)


def pruned_error(p: Pruner, x: jax.Array, *, axis: int = -1, key=0, draws: int = 16, step=0, state=None) -> Error:
    """The `Error` of a pruned array, over draws by different keys; one, if p draws nothing.

    >>> from nmjax.pruners import mse
    >>> pruned_error(mse(2, 4), jnp.array([2., 1., 2., 0.])).bias
    Array(0.33333334, dtype=float32)
    """
    draw = lambda key: [prune(p, x, axis=axis, key=key, step=step, state=state)]
    return _error(draw, _keys(key, draws if p.stochastic else 1), [x], sure=not p.stochastic)


def gradient_error(
    sparsity: Sparsity, x: jax.Array, w: jax.Array, g: jax.Array, *, key=0, draws: int = 16, step=0, state=None
) -> Error:
    """The `Error` of dw = x^T g that comes of pruning in ``drhs_g`` and ``drhs_lhs``: against the same with both empty.

    x is (..., tokens, in), w (in, out), and g (..., tokens, out) the gradient of y.
    """
    if sparsity.fwd_lhs.stochastic or sparsity.fwd_rhs.stochastic:
        raise ValueError(f"{sparsity}: where a forward slot draws, no one dw is exact. Leave it empty here.")

    def dw(sparsity, key):
        product = lambda w: einsum("...i,io->...o", x, w, sparsity=sparsity, ctx=Ctx(key, step, state))
        return jax.vjp(product, w)[1](g)

    stochastic = sparsity.drhs_g.stochastic or sparsity.drhs_lhs.stochastic
    exact = dw(replace(sparsity, drhs_g=identity, drhs_lhs=identity), key)
    return _error(lambda key: dw(sparsity, key), _keys(key, draws if stochastic else 1), exact, sure=not stochastic)


def gradient_variance(grads) -> jax.Array:
    """The variance of |g| over all entries of all leaves, as a measure of noise (Bambhaniya et al., arXiv 2402.04744). Of
    every leaf for itself: ``jax.tree.map(gradient_variance, grads)``.

    >>> gradient_variance({"w": jnp.array([1., -3.]), "b": jnp.array([[3.], [5.]])})
    Array(2., dtype=float32)
    """
    sizes = [jnp.abs(_f32(x)) for x in _leaves(grads)]
    count = float(sum(v.size for v in sizes))
    mean = sum(jnp.sum(v) / count for v in sizes)
    return sum(jnp.sum(jnp.square(v - mean)) / count for v in sizes)


def _error(draw, inputs, exact, sure=False):
    """The error of ``draw`` at one input after another, so that memory does not grow with them (Welford's running mean).
    In units of the largest exact value, for no square to underflow."""
    largest = jnp.max(jnp.stack([jnp.max(jnp.abs(_f32(e)), initial=0.0) for e in exact]))
    unit = lax.reduce_precision(largest, 8, 0)  # a power of two, so that dividing rounds nothing
    scaled = lambda leaves: [_f32(v) / unit for v in leaves]
    exact, zero = scaled(exact), jnp.float32(0)
    energy = _dot(exact, exact)

    def step(sums, input):
        count, mean, spread, cosines = sums
        count, d = count + 1, scaled(draw(input))
        gap = [v - e - b for v, e, b in zip(d, exact, mean, strict=True)]
        mean = [b + v / count for v, b in zip(gap, mean, strict=True)]
        spread = spread + _dot(gap, gap) * (1 - 1 / count)
        return (count, mean, spread, cosines + _dot(d, exact) / jnp.sqrt(_dot(d, d) * energy)), None

    (count, mean, spread, cosines), _ = lax.scan(step, (zero, [jnp.zeros_like(e) for e in exact], zero, zero), inputs)
    variance = spread / energy / (1 if sure else count - 1)
    return Error(jnp.sqrt(_dot(mean, mean) / energy), jnp.sqrt(variance / count), variance, cosines / count)


def _keys(key, draws):
    words = random.words(key)
    return jax.vmap(lambda i: random.fold(words, i))(jnp.arange(draws))  # made in the loop, they compile for seconds


def _leaves(tree):
    leaves = [jnp.asarray(x) for x in jax.tree.leaves(tree)]
    if not sum(x.size for x in leaves):
        raise ValueError(f"{tree!r} has no entries to measure.")
    return leaves


def _f32(x):
    return x.astype(jnp.float32)


def _count(hits):
    """How many, in int32; where that could overflow, of the innermost axes, and then in float32."""
    first = next(a for a in range(hits.ndim + 1) if math.prod(hits.shape[a:]) < 2**31)
    rows = jnp.sum(hits, tuple(range(first, hits.ndim)), dtype=jnp.int32)
    return jnp.sum(_f32(rows)) if first else rows


def _dot(a, b):
    return sum(jnp.sum(v * w) for v, w in zip(a, b, strict=True))
