"""Pictures of pruned arrays: text in a terminal, SVG in a notebook."""

import math
import os
import sys
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nmjax.core import groups
from nmjax.core.pruner import Pruner
from nmjax.products.pruning import prune

ROWS, COLUMNS = 16, 32  # the most that a picture shows
_CELL, _GAP = 14, 5  # pixels of a cell, and between groups


@dataclass(frozen=True)
class Picture:
    """A picture of a matrix: which values are kept, and in which groups.

    Attributes:
      values: The corner of the matrix that is shown, after pruning; of a mask, its truth values.
      kept: True where a value is not zero.
      shape: The shape of the whole array.
      share: The share of the whole array that is kept.
      m: The size of a group, or 0 if none is known.
      axis: The axis of the array that groups lie along.
      down: True if groups lie along the columns of the picture.

    >>> show(jnp.array([[1.0, 0.0]])).caption
    '1 x 2: 0.5 kept'
    """

    values: np.ndarray
    kept: np.ndarray
    shape: tuple[int, ...]
    share: float
    m: int
    axis: int
    down: bool

    @property
    def caption(self) -> str:
        """A line about the whole array."""
        parts = [" x ".join(map(str, self.shape))]
        if self.kept.size != math.prod(self.shape):
            parts[0] += f", {' x '.join(map(str, self.kept.shape))} shown"
        if self.m > 1:
            parts.append(f"groups of {self.m} along axis {self.axis}")
        return f"{', '.join(parts)}: {self.share:.3g} kept"

    @property
    def full(self) -> float:
        """The magnitude from which on a value has the full colour. A few large values pale nothing."""
        return float(np.quantile(self._sizes[self.kept], 0.95)) or 1.0 if self.kept.any() else 1.0

    @property
    def shades(self) -> np.ndarray:
        """How strong the colour of each value is: 0 if it is dropped, else from 0.06 to 1 by its magnitude."""
        return np.where(self.kept, 0.06 + 0.94 * np.minimum(self._sizes / self.full, 1), 0.0)

    @property
    def _sizes(self) -> np.ndarray:
        return np.abs(np.nan_to_num(self.values.astype(np.float64), posinf=0.0, neginf=0.0))

    def __repr__(self) -> str:
        colour = sys.stdout is not None and sys.stdout.isatty() and "NO_COLOR" not in os.environ
        mask = self.values.dtype == bool
        lines = []
        for i, (row, kept) in enumerate(zip(self.values, self.kept, strict=True)):
            if self.down and self.m > 1 and i and i % self.m == 0:
                lines.append("")
            line = ""
            for j, (value, keep) in enumerate(zip(row, kept, strict=True)):
                cut = not self.down and self.m > 1 and j and j % self.m == 0
                text = ("■" if keep else "·") if mask else f" {f'{value:.3g}' if keep else '·':>7}"
                shade = "\x1b[1;32m" if keep else "\x1b[2m"
                line += (" │" if cut else "") + (" " if mask else "") + (f"{shade}{text}\x1b[0m" if colour else text)
            lines.append(line)
        return "\n".join([*lines, self.caption])

    def _repr_svg_(self) -> str:
        rows, columns = self.kept.shape
        gaps = lambda i, along: (i // self.m) * _GAP if along and self.m > 1 else 0
        width = columns * _CELL + gaps(columns - 1, not self.down) + 2
        height = rows * _CELL + gaps(rows - 1, self.down) + 22
        is_mask, shades = self.values.dtype == bool, self.shades
        scale = "" if is_mask else f". The colour follows the magnitude, and is full from {self.full:.3g}"
        cells = []
        for i in range(rows):
            for j in range(columns):
                x, y = 1 + j * _CELL + gaps(j, not self.down), 1 + i * _CELL + gaps(i, self.down)
                fill = f"#1a7f64' fill-opacity='{shades[i, j]:.2f}" if self.kept[i, j] else "none"
                cells.append(f"<rect x='{x}' y='{y}' width='{_CELL - 2}' height='{_CELL - 2}' fill='{fill}'/>")
        return (
            f"<svg xmlns='http://www.w3.org/2000/svg' width='{max(width, 7 * len(self.caption))}' height='{height}' "
            f"role='img' aria-label='{self.caption}{scale}'><g stroke='#8884' stroke-width='1'>{''.join(cells)}</g>"
            f"<text x='1' y='{height - 6}' font-size='12' font-family='sans-serif' fill='#888'>{self.caption}</text>"
            "</svg>"
        )


def show(
    what: Pruner | Any, x: Any = None, *, axis: int = -1, m: int = 0, key: Any = None, step: Any = 0, state: Any = None
) -> Picture:
    """Return a picture of an array, of a mask, or of what a pruner keeps of an array.

    A terminal shows it as text, and a notebook as SVG: there the colour of a value follows its magnitude. Large
    arrays are cut to their first rows and columns; an array of more than two axes to its first matrix.

    Args:
      what: A pruner; or an array, whose zeros are shown as dropped; or a mask.
      x: The array that the pruner prunes.
      axis: The axis that groups lie along.
      m: The size of a group of an array or a mask, to draw the groups. A pruner has its own.
      key: A key or a seed, if the pruner draws random numbers.
      step: The step of the call.
      state: The state of the pruner, if it needs one.

    Raises:
      TypeError: A pruner without an array, a pruner with ``m``, an array with what only a pruner takes, or an array
        that is not one.
      ValueError: The axis does not divide into groups of ``m``.

    >>> import nmjax as nm
    >>> nm.show(nm.mse(2, 4), jnp.array([[1., -2., 3., -4., 5., 0., 1., 2.]]))
           ·       ·       3      -4 │       5       ·       ·       2
    1 x 8, groups of 4 along axis 1: 0.5 kept
    >>> nm.show(jnp.array([[True, False, False, True]]), m=2)
     ■ · │ · ■
    1 x 4, groups of 2 along axis 1: 0.5 kept
    """
    if isinstance(what, Pruner):
        if x is None:
            raise TypeError(f"show({what}) needs the array to prune: write show({what}, x).")
        if m:
            raise TypeError(f"show got m={m} and a pruner, which has groups of its own. Leave m out.")
        array = np.asarray(jax.device_get(prune(what, x, axis=axis, key=key, step=step, state=state)))
        m = what.facts.block
    else:
        if x is not None or key is not None or state is not None:
            raise TypeError(
                f"show draws one array, and only a pruner takes x, key and state, got {type(what).__name__}."
            )
        if not isinstance(m, int) or m < 0:
            raise TypeError(f"show: m must be a whole number, the size of a group, got {m!r}.")
        array = np.asarray(jax.device_get(what))
    real = any(jnp.issubdtype(array.dtype, kind) for kind in (np.bool_, np.integer, np.floating))
    if not (real and array.size and array.ndim):
        raise TypeError(
            f"show takes a pruner and an array, an array, or a mask, got {type(what).__name__} of shape {array.shape} "
            f"and dtype {array.dtype}."
        )
    array = array if array.dtype == bool else array.astype(np.float64)
    axis = groups.position(array.ndim, axis)
    if m and array.shape[axis] % m:
        raise ValueError(f"show: axis {axis} has {array.shape[axis]} values, which do not divide into groups of {m}.")
    matrix, down = _matrix(array, axis)
    corner = matrix[:ROWS, :COLUMNS]
    kept = corner != 0
    return Picture(corner, kept, array.shape, float(np.mean(array != 0)), m, axis, down)


def _matrix(array: np.ndarray, axis: int) -> tuple[np.ndarray, bool]:
    """Return the first matrix of an array that has the axis of the groups, and whether they lie along its columns."""
    if array.ndim == 1:
        return array[None], False
    other = max(a for a in range(array.ndim) if a != axis)
    first, second = sorted((axis, other))
    index = tuple(slice(None) if a in (first, second) else 0 for a in range(array.ndim))
    return array[index], axis == first
