"""Which package of nmjax and of experiments may import from which."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# The packages of each root. A file imports from its own package and from earlier ones, and no file from itself by way
# of others. Imports inside of functions do not count.
PACKAGES = {
    "nmjax": (
        "core pruners kernels products recipes analysis programs policies fusing optim oneshot models nnx linen "
        "checkpoints tutorials __init__ __main__"
    ),
    "experiments": (
        "errors files config_files data scale report training load members collected sweep usage command studies bench "
        "recorded claims evidence frontier reproduce gallery cover"
    ),
}  # fmt: skip
PLACES = {f"{root}.{package}": i for root, packages in PACKAGES.items() for i, package in enumerate(packages.split())}
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): path
    for root in PACKAGES
    for path in sorted((ROOT / root).rglob("*.py"))
}


def imports(source: str) -> list[str]:
    """Return every module or name that a file imports outside of functions."""
    found: list[str] = []
    left: list[ast.AST] = [ast.parse(source)]
    while left:
        node = left.pop()
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "a relative import"
            found += [f"{node.module}.{alias.name}" for alias in node.names]
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            left += ast.iter_child_nodes(node)
    return found


def file_of(module: str) -> str | None:
    """Return the file of ours that a module, or a name in it, lies in."""
    ways = (module, f"{module}.__init__", module.rpartition(".")[0], f"{module.rpartition('.')[0]}.__init__")
    return next((name for name in ways if name in FILES), None)


OURS = {
    name: {file for module in imports(path.read_text()) if (file := file_of(module)) not in (None, name)}
    for name, path in FILES.items()
}


def package_of(name: str) -> str:
    return ".".join(name.split(".")[:2])


def test_a_package_imports_from_earlier_packages():
    wrong = [
        f"{name} imports {other}"
        for name, others in OURS.items()
        for other in others
        if (name.split(".")[0], other.split(".")[0]) == ("nmjax", "experiments")
        or (name.split(".")[0] == other.split(".")[0] and PLACES[package_of(other)] > PLACES[package_of(name)])
    ]
    assert not wrong, "\n".join(wrong)


def test_every_package_has_a_place():
    own = {f"{root}.__init__" for root in PACKAGES}
    assert {package_of(name) for name in FILES} - own == PLACES.keys() - own


def test_no_file_imports_itself_by_way_of_others():
    done, path = set(), []

    def visit(name):
        assert name not in path, f"a circle: {' -> '.join([*path, name])}"
        if name not in done:
            path.append(name)
            for other in OURS[name]:
                visit(other)
            path.pop()
            done.add(name)

    for name in FILES:
        visit(name)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import nmjax.core.value", ["nmjax.core.value"]),
        ("from nmjax.core import groups, value", ["nmjax.core.groups", "nmjax.core.value"]),
        ("def f():\n    from nmjax.kernels import hopper", []),
        ("class C:\n    def f(self):\n        import jax", []),
        ("if True:\n    import jax.experimental.pallas as pl", ["jax.experimental.pallas"]),
    ],
)
def test_the_check_sees_imports(source, expected):
    assert imports(source) == expected


@pytest.mark.slow
def test_a_plan_needs_no_pallas():
    """Plans and limits are made where no kernel can run, so `import nmjax` imports no file that needs Pallas."""
    code = "import nmjax, sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = FILES.keys() & done.stdout.split()
    assert "nmjax.kernels.limits" in loaded
    assert not [name for name in loaded if any("pallas" in module for module in imports(FILES[name].read_text()))]


@pytest.mark.slow
def test_methods_are_parsed_without_a_device():
    """Processes may not have found each other yet, and `jax.distributed.initialize` refuses to come after a device."""
    code = (
        "import nmjax as nm; nm.parse('mdgf(2,4,linear(1,0,60)); dw_g=stages(((0,identity),(9,mvue(2,4))))');"
        "from jax._src import xla_bridge; assert not xla_bridge._backends, xla_bridge._backends"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_the_core_does_without_flax():
    """Pruners, products and plans are of arrays and shapes. Other packages use Flax."""
    users = {
        name.split(".")[1] for name, path in FILES.items() if name.startswith("nmjax.") and "flax" in path.read_text()
    }
    assert users == {"nnx", "linen", "models", "checkpoints", "tutorials", "__main__"}


def test_no_module_has_the_name_of_something_its_package_exports():
    """Then `import nmjax.nnx.plan` would give a function instead of a module."""
    for name in FILES:
        package, _, last = name.rpartition(".")
        if name.startswith("nmjax.") and last != "__init__":
            exported = vars(importlib.import_module(package)).get(last)
            module = importlib.import_module(name)
            assert exported in (None, module), f"{package} exports {last}, which is also the module {name}"
