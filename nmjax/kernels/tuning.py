"""The best tiles for a product, and the expected gain of packing it: measured on a device, or estimated.

``python -m experiments.bench tune`` measures, and writes one table per kind of device. Shipped tables lie in
``tables/`` beside this file. A user's own tables lie in the cache folder, and their rows come first.
"""

import json
import math
import os
import re
from dataclasses import fields
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from nmjax.core import versions
from nmjax.kernels.limits import AmpereConfig, Config, HopperConfig, Shape, config_refusal
from nmjax.kernels.targets import Target

SHIPPED = Path(__file__).parent / "tables"

_DENSE = 790e12 / 132  # FLOP/s of a multiprocessor in dense bf16 products: assumed, 0.8 of an H200's peak
_BYTES = 0.6 * 4.3e12 / 132  # bytes/s that a multiprocessor's share of a packing kernel moves: assumed

# ---- tables ----


class Row(NamedTuple):
    """A row of a table: the best config for a shape, and its speed as a multiple of a dense product's."""

    shape: Shape
    config: Config
    speed: float


def own_tables() -> Path:
    """Return the folder of the user's own tables."""
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "nmjax" / "tables"


def slug(kind: str) -> str:
    """Return a device's name as part of a file's name.

    >>> slug("NVIDIA H200")
    'nvidia_h200'
    """
    return re.sub(r"[^a-z0-9]+", "_", kind.lower()).strip("_")


@lru_cache
def table(kind: str) -> tuple[Row, ...]:
    """Read all rows that were measured on a kind of device, the user's own first."""
    rows: list[Row] = []
    for folder in (own_tables(), SHIPPED):
        path = folder / f"{slug(kind)}.json"
        if path.exists():
            try:
                rows += [row_of(row) for row in json.loads(path.read_text())["rows"]]
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(
                    f"{path} is not a table of tiles: {error!r}. Delete it, or run the bench's tune again."
                ) from error
    return tuple(rows)


def row_of(row: dict[str, Any]) -> Row:
    """Read a row of a table's file."""
    make = HopperConfig if row["family"] == "hopper" else AmpereConfig
    return Row(Shape(**row["shape"]), make(**row["config"]), float(row["speed"]))


def as_row(shape: Shape, config: Config, speed: float) -> dict[str, Any]:
    """Return a row of a table's file, without fields that have their default."""

    def changed(value: Shape | Config) -> dict[str, Any]:
        values = {f.name: getattr(value, f.name) for f in fields(value)}
        return {f.name: values[f.name] for f in fields(value) if values[f.name] != f.default}

    family = "hopper" if isinstance(config, HopperConfig) else "ampere"
    return {"family": family, "shape": changed(shape), "config": changed(config), "speed": round(speed, 4)}


# ---- the best tiles ----


class Tiling(NamedTuple):
    """The config for a product, and its measured speed as a multiple of a dense product's."""

    config: Config
    speed: float | None  # None if it was not measured


def candidates(shape: Shape, target: Target) -> list[Config]:
    """Return the configs that fit a product, the likeliest first: large tiles, unless they leave most cores idle."""
    if target.family == "ampere":
        tiles = [AmpereConfig(tile_m=m, tile_n=n) for m, n in ((128, 128), (64, 128), (128, 64), (64, 64))]
        return [config for config in tiles if config_refusal(shape, config) is None]
    return list(_hopper_candidates(shape, target))


def _hopper_candidates(shape: Shape, target: Target) -> list[HopperConfig]:
    clusters = ("m", "n", "")
    if target.interpret and not versions.interprets_clusters():
        clusters = ("",)
    configs = [
        HopperConfig(tile_m, tile_n, 64, stages, store_n, cluster=cluster, warpgroups=warpgroups)
        for tile_m, tile_n in ((64, 256), (128, 128), (64, 192), (64, 128), (64, 64))
        for cluster in clusters
        for store_n, stages in ((64, 4), (32, 4), (32, 3))
        for warpgroups in (2, 1)
    ]
    fitting = [config for config in configs if config_refusal(shape, config) is None]
    return sorted(fitting, key=lambda config: (_idle(shape, config, target) > 0.5, config.warpgroups == 1))


@lru_cache
def chosen(shape: Shape, target: Target) -> Tiling | None:
    """Return the tiling for a product, or None if none fits.

    It is that of the same product in a table, else of the nearest one, else the likeliest of `candidates`.
    """
    rows = [row for row in table(target.kind) if row.shape.dtype == shape.dtype]
    rows = [row for row in rows if config_refusal(shape, row.config) is None]
    for row in rows:
        if row.shape == shape:
            return Tiling(row.config, row.speed)
    nearest = min(rows, key=lambda row: _distance(row.shape, shape), default=None)
    if nearest is not None and _distance(nearest.shape, shape) < 1:
        return Tiling(nearest.config, nearest.speed)
    fitting = candidates(shape, target)
    return Tiling(fitting[0], None) if fitting else None


def _distance(a: Shape, b: Shape) -> float:
    """Return how unlike two products are: a factor of 2 in one size counts 1."""
    sizes = sum(abs(math.log2(x / y)) for x, y in ((a.m, b.m), (a.n, b.n), (a.k, b.k)))
    return sizes + 0.1 * sum(getattr(a, name) != getattr(b, name) for name in ("m_major", "n_major", "transpose"))


def _idle(shape: Shape, config: HopperConfig, target: Target) -> float:
    """Return the share of the device's time that the last round of tiles wastes."""
    tiles = shape.m // config.rows * (shape.n // config.tile_n)
    return 1 - tiles / (math.ceil(tiles / target.cores) * target.cores)


# ---- the expected gain ----


def gain(shape: Shape, target: Target, packed_before: bool = False) -> float:
    """Return how many times faster than a dense product the packed one is expected to be; 0 if no tiles fit.

    The speed is the measured one if there is one, else an estimate. The packing of the operand counts too, unless
    ``packed_before``.
    """
    tiling = chosen(shape, target)
    if tiling is None:
        return 0.0
    speed = _estimate(shape, tiling.config, target) if tiling.speed is None else tiling.speed
    dense = shape.flops / (_DENSE * target.cores * (2 if shape.itemsize == 1 else 1))
    moved = 0 if packed_before else shape.m * shape.k * 3.125
    return dense / (dense / speed + moved / (_BYTES * target.cores))


def _estimate(shape: Shape, config: Config, target: Target) -> float:
    """Estimate a product's speed as a multiple of a dense product's.

    On Ampere nothing was measured, so that it is 1. On Hopper it is 1.2 for tiles of 256 columns and two warpgroups.
    It is less for narrower tiles, for one warpgroup, and for a last round of tiles that leaves cores idle.
    """
    if isinstance(config, AmpereConfig):
        return 1.0
    speed = 1.2 * _share_of_b(config.tile_n) / _share_of_b(256) * (1 if config.warpgroups > 1 else 0.7)
    return speed * (1 - _idle(shape, config, target))


def _share_of_b(columns: int) -> float:
    """Return the share of shared memory's bandwidth with which an instruction reads B. With the rest it reads A."""
    return columns / (columns + 32)
