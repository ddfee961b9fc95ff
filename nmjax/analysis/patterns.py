"""Patterns of weights: at most n non-zeros in every m values, and the groups that break it."""

import difflib
import math
import operator
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, PyTree

from nmjax.core import groups, merging
from nmjax.core.value import Value


@dataclass(frozen=True, repr=False)
class Pattern(Value):
    """A pattern: at most n non-zeros in every m values of a weight, along the axes that its product contracts.

    Args:
      n: Number of values kept in each group.
      m: Size of a group.
      axes: The contracted axes, the innermost last. If the last one does not divide by m, as many axes as needed are
        flattened, as products do.

    Raises:
      ValueError: ``n`` does not lie between 1 and ``m``.

    >>> Pattern(2, 4, (0, 1))
    2:4 along axes 0, 1
    """

    n: int
    m: int
    axes: tuple[int, ...] | int = (-1,)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "axes", tuple(map(operator.index, self.contracted)))
        if not 1 <= self.n <= self.m:
            raise ValueError(f"{self}: n must lie between 1 and m, because at most n of every m values are kept.")

    def __repr__(self) -> str:
        axes = self.contracted
        return f"{self.n}:{self.m} along {'axis' if len(axes) == 1 else 'axes'} {', '.join(map(str, axes))}"

    @property
    def contracted(self) -> tuple[int, ...]:
        """Return the axes as a tuple, also of a single one."""
        return self.axes if isinstance(self.axes, tuple) else (self.axes,)


def violations(weights: PyTree, patterns: Pattern | Mapping[str, Pattern | None]) -> Any:
    """Return the number of groups that break their pattern, for each weight.

    Args:
      weights: A pytree of weights, or a single array.
      patterns: A `Pattern`, or None for dense, by path as `path` writes it, or by a regular expression of whole
        paths. The first that fits a path decides. A weight that none fits is not counted. A single array takes one
        Pattern.

    Returns:
      A dict from path to an int32 scalar; for one Pattern the scalar alone.

    Raises:
      TypeError: A value of ``patterns`` is no Pattern, or one Pattern is given for several arrays.
      ValueError: A text fits no path or is no regular expression, or a weight's axes do not divide into the pattern.

    >>> weights = {"mlp": {"kernel": jnp.ones((8, 2)), "bias": jnp.ones(2)}, "head": {"kernel": jnp.ones((2, 3))}}
    >>> violations(weights, {"head/.*": None, ".*/kernel": Pattern(2, 4, 0)})
    {'mlp/kernel': Array(4, dtype=int32)}
    """
    named = [(path(keys), x) for keys, x in jax.tree_util.tree_leaves_with_path(weights)]
    if isinstance(patterns, Pattern):
        if len(named) != 1:
            raise TypeError(
                f"one Pattern is for one array, and there are {len(named)}: write {{'.*/kernel': {patterns!r}}}."
            )
        return _violations(*named[0], patterns)
    arrays = dict(named)
    if len(arrays) < len(named):
        names = [name for name, _ in named]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"two arrays have the same path, {twice!r}: rename one.")
    chosen: dict[str, Pattern | None] = {}
    for text, pattern in patterns.items():
        if not isinstance(pattern, Pattern | None):
            raise TypeError(f"{text!r}: expected Pattern(n, m, axes), or None if dense, got {pattern!r}.")
        chosen = dict.fromkeys(_fitting(text, arrays), pattern) | chosen
    counted = {name: pattern for name, pattern in chosen.items() if pattern is not None}
    return {name: _violations(name, x, counted[name]) for name, x in named if name in counted}


def checked(counts: dict[str, jax.Array | None]) -> dict[str, jax.Array | None]:
    """Return counts of violations by path. Warn if there are none, because no weight has an n:m final form."""
    if all(count is None for count in counts.values()):
        warnings.warn("violations: no weight has an n:m final form, so nothing was checked.", stacklevel=3)
    return counts


def path(keys: tuple[Any, ...]) -> str:
    """Return a key path of `jax.tree_util` as text.

    Args:
      keys: The key path. A last attribute ``value``, which is the inside of a boxed variable, is left out.

    Returns:
      The keys, separated by "/".

    >>> [path(keys) for keys, _ in jax.tree_util.tree_leaves_with_path({"layers": [{"kernel": 1}]})]
    ['layers/0/kernel']
    """
    boxed = keys and isinstance(keys[-1], jax.tree_util.GetAttrKey) and keys[-1].name == "value"
    return jax.tree_util.keystr(keys[:-1] if boxed else keys, simple=True, separator="/")


def _fitting(text: str, paths: Mapping[str, Any]) -> list[str]:
    try:
        fits = [text] if text in paths else [p for p in paths if re.fullmatch(text, p)]
    except re.error as error:
        raise ValueError(f"{text!r} is neither a path nor a regular expression: {error}.") from None
    if not fits:
        near = difflib.get_close_matches(text, paths, 10, 0.0)
        more = f", and {len(paths) - len(near)} more" if len(paths) > len(near) else ""
        raise ValueError(f"{text!r} fits no path. The {len(paths)} paths, nearest first: {', '.join(near)}{more}.")
    return fits


def _violations(name: str, x: Any, pattern: Pattern) -> Int[Array, ""]:
    x = jnp.asarray(x)
    axes = tuple(a % x.ndim for a in pattern.contracted if -x.ndim <= a < x.ndim)
    merged = merging.merge(x, axes, pattern.m) if len({*axes}) == len(pattern.contracted) else None
    if merged is None:
        raise ValueError(
            f"{name or 'array'!r} of shape {x.shape} does not divide into {pattern}: name the axes that its product "
            "contracts, or None."
        )
    return count(groups.counts(merged[0], pattern.m, merged[1]) > pattern.n)


def count(hits: Bool[Array, "..."]) -> jax.Array:
    """Count in int32. If that could overflow, count over the innermost axes, and add those counts in float32."""
    first = next(a for a in range(hits.ndim + 1) if math.prod(hits.shape[a:]) < 2**31)
    rows = jnp.sum(hits, tuple(range(first, hits.ndim)), dtype=jnp.int32)
    return jnp.sum(rows.astype(jnp.float32)) if first else rows
