"""The identity of a config: its values by dotted names, its digest, and the run that a directory holds."""

import hashlib
import json
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from ml_collections import ConfigDict

from experiments.errors import Mistake
from experiments.files import of_json, text


class Identity(NamedTuple):
    """All values of a config. It is made once for a run; whatever compares, writes or sends a config reads it."""

    text: str  # the content of config.json
    fields: dict[str, Any]  # the values by dotted names, as "model.depth"

    @property
    def methods(self) -> dict[str, Any]:
        """The fields that say which layer is pruned by which method."""
        return {name: value for name, value in self.fields.items() if name.partition(".")[0] in ("sparsity", "rules")}

    @property
    def lasting(self) -> dict[str, Any]:
        """The fields that decide what a run computes: all but its baseline, and what changes only rounding: the mesh,
        and whether the model is lean."""
        others = ("baseline", "model.lean")
        return {
            name: value for name, value in self.fields.items() if name not in others and not name.startswith("mesh.")
        }

    @property
    def digest(self) -> str:
        """Twelve hexadecimal digits that name this config in files of results."""
        return hashlib.sha256(json.dumps(self.lasting, sort_keys=True).encode()).hexdigest()[:12]


def identity(config: ConfigDict) -> Identity:
    """Return the identity of a config.

    >>> identity(ConfigDict({"seed": 0, "model": {"depth": 2}})).fields
    {'model.depth': 2, 'seed': 0}
    """
    return _read(json.dumps(config.to_dict(), indent=1, sort_keys=True))


def of_data(tree: Any) -> str:
    """Return eight hexadecimal digits that depend on every byte of arrays and every letter of texts in a pytree."""
    total = 0
    for leaf in jax.tree.leaves(tree):
        data = (
            leaf.encode(errors="surrogatepass") if isinstance(leaf, str) else np.ascontiguousarray(leaf).view(np.uint8)
        )
        total = zlib.crc32(data, total)
    return f"{total:08x}"


def recorded(workdir: Path) -> Identity:
    """Return the identity of the config whose run a directory holds."""
    path = workdir / "config.json"
    try:
        return _read(text(path))
    except (OSError, ValueError) as error:
        raise Mistake(
            f"{path} is damaged: {error}. Replace it by the config.json of a run with the same config and seed, or "
            "give another directory."
        ) from error


def _read(content: str) -> Identity:
    values = of_json(content)
    if not isinstance(values, dict):
        raise ValueError("it holds no object")
    return Identity(content, flat(values))


def refuse_another(workdir: Path, own: Identity) -> None:
    """Refuse a directory that holds the run of another config. Only the fields in `Identity.lasting` are compared.

    Args:
      workdir: The directory of a run that has begun.
      own: The identity of the config that is to be continued or evaluated there.

    Raises:
      Mistake: If the configs differ, or if the directory has lost its config.json.
    """
    if not (workdir / "config.json").is_file():
        raise Mistake(
            f"--workdir={workdir} holds metrics or checkpoints but no config.json, so its run cannot be identified. "
            "Give another directory."
        )
    old, new = recorded(workdir).lasting, own.lasting
    if old != new:
        names = [name for name in sorted(old | new) if old.get(name) != new.get(name)]
        changed = "; ".join(f"{name}: {old.get(name)!r} there, {new.get(name)!r} here" for name in names[:4])
        raise Mistake(
            f"--workdir={workdir} holds a run of another config ({changed}). Give this run a directory of its own. "
            f"To evaluate that run, write --mode=eval --workdir={workdir} and no --config. To continue from its last "
            f"checkpoint, write --from={workdir} and another --workdir."
        )


def flat(tree: dict[str, Any], separator: str = ".", prefix: str = "") -> dict[str, Any]:
    """Return the leaves of nested dicts by their whole names.

    >>> flat({"a": 1, "b": {"c": 2}}, "/")
    {'a': 1, 'b/c': 2}
    """
    leaves = {}
    for name, value in tree.items():
        if isinstance(value, dict):
            leaves |= flat(value, separator, f"{prefix}{name}{separator}")
        else:
            leaves[prefix + name] = value
    return leaves
