"""The architecture, executable: a file imports only from lower floors."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FLOORS = {
    "typing": 0,
    "random": 0,
    "groups": 0,
    "versions": 0,
    "models": 0,
    "schedules": 1,
    "pruners": 1,
    "packing": 1,
    "estimators": 2,
    "combinators": 3,
    "float8": 3,
    "sparsity": 4,
    "kernels": 4,
    "ops": 5,
    "methods": 5,
    "engines": 6,
    "spec": 6,
    "optim": 6,
    "packed": 7,
    "recipes": 7,
    "sites": 7,
    "flops": 7,
    "products": 8,
    "metrics": 9,
    "plans": 9,
    "nnx": 10,
    "linen": 10,
    "__init__": 11,
}
FILES = sorted((ROOT / "nmjax").rglob("*.py"))


def room(path: Path) -> str:
    """The name under which a file stands on its floor: folders stand as one."""
    return path.relative_to(ROOT / "nmjax").with_suffix("").parts[0]


def imported(path: Path) -> set[str]:
    """The rooms of nmjax that a file names in its imports."""
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path} imports relatively"
            names = [node.module] if node.module != "nmjax" else [f"nmjax.{alias.name}" for alias in node.names]
        else:
            continue
        rooms |= {name.split(".")[1] if "." in name else "__init__" for name in names if name.split(".")[0] == "nmjax"}
    return rooms


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_look_down(path):
    here = room(path)
    for other in imported(path) - {here}:
        assert FLOORS[other] < FLOORS[here], f"{here} on floor {FLOORS[here]} imports {other} on floor {FLOORS[other]}"


def test_every_file_has_a_floor():
    assert {room(path) for path in FILES} == set(FLOORS)


def test_the_check_sees_imports():
    assert imported(ROOT / "nmjax" / "engines.py") == {
        "combinators",
        "estimators",
        "float8",
        "kernels",
        "ops",
        "pruners",
        "sparsity",
        "typing",
    }


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_stay_one_idea_long(path):
    assert len(path.read_text().splitlines()) <= 400


def test_the_core_does_without_flax():
    """Pruners, products and plans are of arrays and shapes; Flax is met in its deliveries and in models alone."""
    assert {room(p) for p in FILES if "flax" in p.read_text()} == {"nnx", "linen", "models"}
