"""The best tiles for a product, and the expected gain of packing it: measured on a device, or estimated.

``python -m experiments.bench tune`` measures, and writes a table (`nmjax.kernels.measured`).
"""

import math
from functools import lru_cache
from typing import NamedTuple

from nmjax.kernels import cycles
from nmjax.kernels.family import Config, Shape, Target
from nmjax.kernels.limits import FAMILIES, config_refusal, product_refusal
from nmjax.kernels.measured import Row, table

# ---- the best tiles ----


class Tiling(NamedTuple):
    """The config for a product, and its measured speed as a multiple of a dense product's."""

    config: Config
    speed: float | None  # None if it was not measured


def candidates(shape: Shape, target: Target) -> list[Config]:
    """Return the configs that fit a product, the likeliest first: those that are expected to be the fastest."""
    found = FAMILIES[target.family].candidates(shape, target)
    return [config for config in found if config_refusal(shape, config) is None]


def chosen(shape: Shape, target: Target) -> Tiling | None:
    """Return the tiling for a product, or None if none fits.

    The tiling of the same product in a table, else of the nearest at a distance below 1, else the first candidate.
    """
    return _chosen(shape, target, table(target.kind))


@lru_cache  # by the rows too: a table that is written later has others
def _chosen(shape: Shape, target: Target, rows: tuple[Row, ...]) -> Tiling | None:
    fitting_rows = [row for row in rows if row.shape.dtype == shape.dtype]
    fitting_rows = [row for row in fitting_rows if product_refusal(shape, target, row.config) is None]
    for row in fitting_rows:
        if row.shape == shape:
            return Tiling(row.config, row.speed)
    nearest = min(fitting_rows, key=lambda row: _distance(row.shape, shape), default=None)
    if nearest is not None and _distance(nearest.shape, shape) < 1:
        return Tiling(nearest.config, nearest.speed)
    fitting = candidates(shape, target)
    return Tiling(fitting[0], None) if fitting else None


def _distance(a: Shape, b: Shape) -> float:
    """Return how unlike two products are: a factor of 2 in one size counts 1."""
    sizes = sum(abs(math.log2(x / y)) for x, y in ((a.m, b.m), (a.n, b.n), (a.k, b.k)))
    return sizes + 0.1 * sum(getattr(a, name) != getattr(b, name) for name in ("m_major", "n_major", "transpose"))


# ---- the expected gain ----


class Times(NamedTuple):
    """The expected seconds of a product on sparse tensor cores, and of what it takes the place of.

    Attributes:
      dense: The dense product.
      pruning: What XLA would prune for it, if a kernel prunes now.
      packed: The packed product.
      packing: The packing of its operand.
    """

    dense: float
    pruning: float
    packed: float
    packing: float

    @property
    def in_one_pass(self) -> "Times":
        """The times if one pass packs the operand for another product too: half of it counts here."""
        return self._replace(packing=cycles.TWICE * self.packing)

    @property
    def gain(self) -> float:
        """How many times faster the packed product is expected to be."""
        return (self.dense + self.pruning) / (self.packed + self.packing)


def times(shape: Shape, target: Target, packed_before: bool = False, saves_pruning: bool = False) -> Times | None:
    """Return what a packed product is expected to take.

    The speed is the measured one if there is one, else an estimate. There is none if no tiles fit, or if there is
    neither a measured speed nor an estimate, as on Ampere and Blackwell.

    Args:
      shape: The product.
      target: The device.
      packed_before: True if the packing of the operand does not count.
      saves_pruning: True if a kernel prunes the operand while it packs it. Otherwise XLA prunes it before a dense
        product.
    """
    tiling = chosen(shape, target)
    if tiling is None:
        return None
    speed = tiling.speed or FAMILIES[target.family].speed(shape, tiling.config, target)
    if speed is None:
        return None
    dense, values = cycles.dense(shape, target), cycles.packing(shape, target)
    pruning = cycles.PRUNING * values if saves_pruning else 0
    packing = 0 if packed_before else cycles.PACKING * values
    return Times(*(cycles.seconds(count) for count in (dense, pruning, dense / speed, packing)))
