"""How a product is best cut into tiles, and whether packing it pays: measured on a device, or estimated.

``python -m experiments.bench tune`` measures, and writes a table per kind of device: into ``tables/`` beside this file, or
for one's own shapes into the cache folder, whose rows come first.
"""

import json
import math
import os
import re
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path

import jax.numpy as jnp

from nmjax.core import versions
from nmjax.core.value import Value
from nmjax.kernels import ampere, hopper
from nmjax.kernels.targets import Target

SHIPPED = Path(__file__).parent / "tables"


@dataclass(frozen=True, repr=False)
class Shape(Value):
    """A product ``D[M, N] = A[M, K] @ B[K, N]`` of packed A: its sizes and how its operands and its result lie."""

    m: int
    n: int
    k: int
    dtype: str = "bfloat16"
    m_major: bool = False  # A along M
    n_major: bool = False  # B along N
    transpose: bool = False  # the result as [N, M]
    out: str = "bfloat16"

    @property
    def flops(self) -> int:
        """Of the dense product."""
        return 2 * self.m * self.n * self.k


Config = hopper.Config | ampere.Config


def own_tables() -> Path:
    """Where tables of one's own lie."""
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "nmjax" / "tables"


def slug(kind: str) -> str:
    """A device's name as a file's."""
    return re.sub(r"[^a-z0-9]+", "_", kind.lower()).strip("_")


@lru_cache
def table(kind: str) -> tuple[tuple[Shape, Config, float], ...]:
    """(shape, config, speed against a dense product) of all that was measured on a kind of device."""
    rows = []
    for folder in (own_tables(), SHIPPED):
        path = folder / f"{slug(kind)}.json"
        if path.exists():
            try:
                rows += [row_of(row) for row in json.loads(path.read_text())["rows"]]
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(
                    f"{path} is no table of tiles: {error!r}. Delete it, or run the bench's tune again."
                ) from error
    return tuple(rows)


def row_of(row: dict) -> tuple[Shape, Config, float]:
    """A row of a table's file."""
    make = hopper.Config if row["family"] == "hopper" else ampere.Config
    return Shape(**row["shape"]), make(**row["config"]), float(row["speed"])


def as_row(shape: Shape, config: Config, speed: float) -> dict:
    """The way back, without what is default."""
    told = lambda v: {f.name: x for f in fields(v) if (x := getattr(v, f.name)) != f.default}
    family = "hopper" if isinstance(config, hopper.Config) else "ampere"
    return {"family": family, "shape": told(shape), "config": told(config), "speed": round(speed, 4)}


def misfit(shape: Shape, config: Config) -> str | None:
    """Why a product cannot be cut so; None if it can."""
    module = hopper if isinstance(config, hopper.Config) else ampere
    return module.misfit(shape.m, shape.n, shape.k, jnp.dtype(shape.dtype), jnp.dtype(shape.out), config)


def candidates(shape: Shape, target: Target) -> list[Config]:
    """Cuts that fit a product, the likeliest first: large tiles, unless they leave most of the device idle."""
    if target.family == "ampere":
        made = [ampere.Config(tile_m=m, tile_n=n) for m, n in ((128, 128), (64, 128), (128, 64), (64, 64))]
        return [c for c in made if misfit(shape, c) is None]
    clusters = ("m", "n", "") if not target.interpret or versions.interprets_clusters() else ("",)
    made = [
        config
        for tile_m, tile_n in ((64, 256), (128, 128), (64, 192), (64, 128), (64, 64))
        for cluster in clusters
        for store_n, stages in ((64, 4), (32, 4), (32, 3))
        for groups in (2, 1)
        if misfit(
            shape, config := hopper.Config(tile_m, tile_n, 64, stages, store_n, cluster=cluster, warpgroups=groups)
        )
        is None
    ]
    return sorted(made, key=lambda c: (_idle(shape, c, target) > 0.5, c.warpgroups == 1))


def _idle(shape, config, target):
    """The share of the device's time that its last round of tiles wastes."""
    tiles = shape.m // config.rows * (shape.n // config.tile_n)
    return 1 - tiles / (math.ceil(tiles / target.cores) * target.cores)


@lru_cache
def chosen(shape: Shape, target: Target) -> tuple[Config, float | None] | None:
    """The config for a product and its measured speed against a dense one, None where that was not measured; or None
    where nothing fits."""
    rows = [row for row in table(target.kind) if misfit(shape, row[1]) is None and row[0].dtype == shape.dtype]
    for known, config, speed in rows:
        if known == shape:
            return config, speed
    near = min(rows, key=lambda row: _distance(row[0], shape), default=None)
    if near and _distance(near[0], shape) < 1:
        return near[1], near[2]
    fitting = candidates(shape, target)
    return (fitting[0], None) if fitting else None


def _distance(a: Shape, b: Shape) -> float:
    """How unlike two products are: a factor of 2 in one size counts 1."""
    sizes = sum(abs(math.log2(x / y)) for x, y in ((a.m, b.m), (a.n, b.n), (a.k, b.k)))
    return sizes + 0.1 * sum(getattr(a, name) != getattr(b, name) for name in ("m_major", "n_major", "transpose"))


def gain(shape: Shape, target: Target, packed_before: bool = False) -> float:
    """How many times faster than a dense product the packed one is expected to be, its packing included unless it was
    packed before: measured where it was, else estimated as 1.2 times the speed of dense tensor cores on Hopper, in tiles
    narrower than 256 by what reading A adds, and 1 at best on Ampere, where nothing was measured."""
    found = chosen(shape, target)
    if found is None:
        return 0.0
    config, speed = found
    if speed is None:
        speed, idle = 1.0, 0.0
        if isinstance(config, hopper.Config):
            width = lambda n: (
                n / (n + 32)
            )  # of shared memory's bandwidth, an instruction of n columns reads B by so much
            speed = (
                1.2 * width(config.tile_n) / width(256) * (1 if config.warpgroups > 1 else 0.7)
            )  # none fills its waits
            idle = _idle(shape, config, target)
        speed *= 1 - idle if idle < 1 else 1.0
    dense = shape.flops / (_DENSE * target.cores * (2 if jnp.dtype(shape.dtype).itemsize == 1 else 1))
    moved = 0 if packed_before else shape.m * shape.k * 3.125
    return dense / (dense / speed + moved / (_BYTES * target.cores))


_DENSE = 790e12 / 132  # FLOP/s of a multiprocessor in dense bf16 products, as measured on an H200 at its power limit
_BYTES = 0.6 * 4.3e12 / 132  # bytes/s that a multiprocessor's share of a packing kernel moves
