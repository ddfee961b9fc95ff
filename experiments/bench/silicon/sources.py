"""The versions of kernels: digests of their source."""

import ast
import hashlib
from pathlib import Path

from nmjax import kernels

PACKING, TILES, PRODUCTS = "packing", "tiles", "products"  # groups of kernels
ALL = (PACKING, TILES, PRODUCTS)
_FOLDER = Path(kernels.__file__).parent


def versions(family: str) -> dict[str, str]:
    """Return the version of each group of kernels for a family of GPUs."""
    packing = ("packing", "activations", "batches", "format")
    files = {PACKING: packing, TILES: ("tiles", *packing)}
    files[PRODUCTS] = (f"{family}_spmm", "hopper_geometry", "instructions", "batches", "format")
    return {group: digest(*((_FOLDER / f"{name}.py").read_text() for name in names)) for group, names in files.items()}


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
