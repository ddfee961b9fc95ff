"""The public names of nmjax, and the pages of the reference that list each of them once."""

import ast
import importlib
import inspect
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

SPACES = {  # the module, and what its page is called
    "nmjax": "Pruners, products and recipes",
    "nmjax.methods": "Methods",
    "nmjax.nnx": "flax.nnx models",
    "nmjax.linen": "flax.linen models",
    "nmjax.checkpoints": "Checkpoints",
    "nmjax.oneshot": "One-shot pruning",
    "nmjax.optim": "Optimizers",
    "nmjax.policies": "Rematerialisation",
    "nmjax.metrics": "Metrics",
    "nmjax.flops": "FLOPs",
    "nmjax.groups": "Groups",
    "nmjax.random": "Random numbers",
    "nmjax.kernels": "Kernels",
    "nmjax.models": "Models",
}


class Public(NamedTuple):
    """A public name."""

    name: str  # as users write it: nmjax.mse
    value: Any


def module(space: str) -> ModuleType:
    """Return the module that users know by this name. It may lie in another folder, as nmjax.methods does."""
    first, *rest = space.split(".")
    value = importlib.import_module(first)
    for part in rest:
        value = getattr(value, part)
    assert isinstance(value, ModuleType), space
    return value


def names(space: str) -> list[Public]:
    """Return the public names of a space: what it defines, and what it exports by `import x as x` or `import *`."""
    home = module(space)
    imports = [node for node in ast.parse(inspect.getsource(home)).body if isinstance(node, ast.ImportFrom)]
    re_exported = {alias.name for node in imports for alias in node.names if alias.asname == alias.name}
    for node in imports:
        if node.names[0].name == "*":
            re_exported |= set(importlib.import_module(str(node.module)).__all__)
    members = [
        Public(f"{space}.{name}", value)
        for name, value in vars(home).items()
        if not name.startswith("_") and callable(value) and (name in re_exported or _origin(value) == home.__name__)
    ]
    return sorted(members, key=lambda member: member.name.lower())


def _origin(value: Any) -> str:
    return getattr(value, "__module__", None) or type(value).__module__


def write(folder: Path) -> None:
    """Write one page of the reference for each space."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for space, title in SPACES.items():
        (folder / f"{space}.rst").write_text(_page(space, title), encoding="utf-8")


def _page(space: str, title: str) -> str:
    heading = f"{title}: ``{space.replace('nmjax', 'nm', 1)}``"
    lines = [
        heading,
        "=" * len(heading),
        "",
        inspect.getdoc(module(space)) or "",
        "",
        f".. py:currentmodule:: {space}",
        "",
    ]
    for name, value in names(space):
        if inspect.isclass(value):
            lines += [f".. autoclass:: {name}", *(["   :members:"] if _shows_members(value) else []), ""]
        elif inspect.isfunction(value) or inspect.isbuiltin(value):
            lines += [f".. autofunction:: {name}", ""]
        else:
            lines += [f".. autodata:: {name}", "   :no-value:", ""]
    return "\n".join(lines)


def _shows_members(value: type) -> bool:
    """Return whether a class is more than a value that users construct: pruners other than the bases are not."""
    from nmjax.core.bases import Grouped
    from nmjax.core.pruner import Pruner

    return not issubclass(value, Pruner) or value in (Pruner, Grouped)
