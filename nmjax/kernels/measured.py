"""Tables of the fastest tiles, one for each kind of device, as ``python -m experiments.bench tune`` measures them.

Shipped tables lie in ``tables/`` beside this file. A user's own tables lie in the cache folder, and their rows come
first.
"""

import datetime
import json
import math
import os
import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import fields
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import jax

from nmjax.kernels.family import Config, Shape
from nmjax.kernels.limits import FAMILIES, config_refusal, family_of

SHIPPED = Path(__file__).parent / "tables"
KERNELS = 1  # the version of the kernels: a change that changes which tiles are fastest adds 1


class Row(NamedTuple):
    """A row of a table: the best config for a shape, and its speed as a multiple of a dense product's."""

    shape: Shape
    config: Config
    speed: float


class Stale(ValueError):
    """A table was measured with another version of the kernels."""


def own_tables() -> Path:
    """Return the folder of the user's own tables."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nmjax" / "tables"


def slug(kind: str) -> str:
    """Return a device's name as part of a file's name.

    >>> slug("NVIDIA H200")
    'nvidia_h200'
    """
    return re.sub(r"[^a-z0-9]+", "_", kind.lower()).strip("_")


@lru_cache
def table(kind: str) -> tuple[Row, ...]:
    """Read all rows that were measured on a kind of device, the user's own first.

    A table of other versions of the kernels is left out, with a warning.

    Raises:
      ValueError: If a file is not a table of this kind of device.
    """
    rows: list[Row] = []
    for folder in (own_tables(), SHIPPED):
        path = folder / f"{slug(kind)}.json"
        if path.exists():
            try:
                rows += read(path, kind)
            except Stale as stale:
                warnings.warn(f"the table of tiles is not used: {stale}", stacklevel=2)
    return tuple(rows)


def read(path: Path, kind: str | None = None) -> tuple[Row, ...]:
    """Read a table.

    Args:
      path: The file.
      kind: The kind of device; None for the one that the file names.

    Raises:
      ValueError: If the file is not a table of this kind of device.
      Stale: If it was measured with another version of the kernels.
    """
    again = "Delete it, or run python -m experiments.bench tune on the device."
    try:
        found = json.loads(path.read_text())
        device, version = str(found["device"]), found["kernels"]
        rows = tuple(map(row_of, found["rows"])) if version == KERNELS else ()
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a table of tiles: {error!r}. {again}") from error
    if kind not in (None, device):
        raise ValueError(f"{path} has the tiles of {device}, but this device is {kind}. {again}")
    if path.stem != slug(device):
        raise ValueError(f"{path} has the tiles of {device}. Rename it to {slug(device)}.json, or delete it.")
    if version != KERNELS:
        raise Stale(f"{path} is of version {version} of the kernels, and this nmjax has version {KERNELS}. {again}")
    return rows


def row_of(row: dict[str, Any]) -> Row:
    """Read a row of a table's file."""
    found = Row(Shape(**row["shape"]), FAMILIES[row["family"]].config(**row["config"]), float(row["speed"]))
    refusal = config_refusal(found.shape, found.config) if min(found.shape.sides) > 0 else "a size is not positive"
    if refusal is not None or not 0 < found.speed < math.inf:
        raise ValueError(f"{row}: {refusal or 'the speed is not a positive number'}")
    return found


def write(folder: Path, kind: str, rows: Iterable[Row], origin: Mapping[str, str] | None = None) -> Path:
    """Write rows into the table of a kind of device, in place of those of the same products.

    A table of other versions of the kernels is replaced. A file that is not a table of this kind of device is
    kept under another name, which ends in ``.broken``.

    Args:
      folder: The folder of the table.
      kind: The kind of device.
      rows: The rows.
      origin: The version of JAX and the date of the rows, if they were not measured just now.

    Returns:
      The path of the table.
    """
    path = folder / f"{slug(kind)}.json"
    try:
        known = read(path, kind) if path.exists() else ()
    except Stale:
        known = ()
    except ValueError as error:
        path.replace(path.with_suffix(".broken"))
        warnings.warn(f"{error} The file is now {path.with_suffix('.broken')}.", stacklevel=2)
        known = ()
    by_shape = {row.shape: row for row in (*known, *rows)}
    now = {"jax": jax.__version__, "date": f"{datetime.date.today()}"}
    head = {"device": kind, "kernels": KERNELS, **(now if origin is None else origin)}
    lines = ",\n".join(f"  {json.dumps(_as_json(row))}" for row in by_shape.values())
    folder.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(f".{os.getpid()}.part")
    draft.write_text(f'{json.dumps(head)[:-1]}, "rows": [\n{lines}\n]}}\n')
    draft.replace(path)
    table.cache_clear()
    return path


def _as_json(row: Row) -> dict[str, Any]:
    """Return a row of a table's file, without fields that have their default."""

    def changed(value: Shape | Config) -> dict[str, Any]:
        values = {f.name: getattr(value, f.name) for f in fields(value)}
        return {f.name: values[f.name] for f in fields(value) if values[f.name] != f.default}

    found = {"family": family_of(row.config).name, "shape": changed(row.shape), "config": changed(row.config)}
    return found | {"speed": float(f"{row.speed:.4g}")}
