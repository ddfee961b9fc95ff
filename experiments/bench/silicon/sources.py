"""The versions of kernels: digests of their source."""

import ast
import hashlib
from pathlib import Path

import nmjax

PACKING, TILES, PRODUCTS = "packing", "tiles", "products"  # groups of kernels
ALL = (PACKING, TILES, PRODUCTS)
_PRUNERS = ("magnitude", "unbiased", "two_draws", "soft_threshold", "transposable_mask", "float8")  # kernels call them
_COMMON = ("kernels/batches", "kernels/format")
_PACKING = ("kernels/packing", "kernels/activations", "core/random", *(f"pruners/{name}" for name in _PRUNERS))


def versions(family: str) -> dict[str, str]:
    """Return the version of each group of kernels for a family of GPUs."""
    files = {PACKING: _PACKING, TILES: ("kernels/tiles", *_PACKING)}
    files[PRODUCTS] = (f"kernels/{family}_spmm", "kernels/hopper_geometry", "kernels/instructions")
    return {group: digest(*map(_text, (*names, *_COMMON))) for group, names in files.items()}


def _text(name: str) -> str:
    return (Path(nmjax.__file__).parent / f"{name}.py").read_text()


def digest(*sources: str) -> str:
    """Return a digest of Python code. Comments, docstrings and line breaks do not count.

    >>> digest("def f(x):\\n    '''Add.'''\\n    return x+1  # more") == digest("def f(x): return x + 1")
    True
    """
    return hashlib.sha256("\0".join(map(_code, sources)).encode()).hexdigest()[:12]


def _code(source: str) -> str:
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(tree)
