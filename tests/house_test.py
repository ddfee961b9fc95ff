"""The house, executable: what may import what, and what may not."""

import ast
import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# The rooms of each package and the files of each room, in order: a file imports from earlier files of its own room and
# from earlier rooms. A room without a list holds files of any order, but no circles.
HOUSE = {
    "nmjax": {
        "core": (
            "versions", "refusal", "value", "names", "random", "context", "fusion", "groups", "merging", "paths",
            "layer_paths", "pruner", "bases",
        ),
        "pruners": (
            "schedules", "nothing", "magnitude", "unbiased", "two_draws", "random_choice", "soft_threshold",
            "transposable_mask", "estimators", "float8", "combinators", "input_norms", "in_stages", "remembering",
            "whole_rows", "__init__",
        ),
        "kernels": (
            "targets", "format", "activations", "limits", "measured", "tuning", "emulation", "instructions", "shards",
            "ampere", "blackwell", "hopper_geometry", "hopper", "compress", "copies", "packing", "tiles", "calls",
            "check", "multiply", "__init__",
        ),
        "products": (
            "slot", "pruning", "ragged", "sparsity", "operations", "compaction", "layout", "routes", "forms", "fit",
            "keeping", "applying", "weights", "rule", "activated", "functions",
        ),
        "recipes": ("methods", "text", "table", "missed"),
        "analysis": ("flops", "scopes", "refusals", "savings", "runs", "plan", "patterns", "metrics", "picture"),
        "programs": ("parameters", "uses", "rewriting", "running", "sites", "transform", "__init__"),
        "policies": (),
        "fusing": (),
        "optim": (),
        "oneshot": ("solvers", "texts", "estimate", "__init__"),
        "models": ("transformer", "vit", "gpt", "moe", "bert", "decoder", "resnet", "__init__"),
        "nnx": (
            "variables", "doors", "calling", "declared", "found", "others", "layers", "unreached", "recording",
            "checks", "phases", "delivery", "planning", "packing", "hardening", "measures",
            "taps", "batches", "between", "blocks", "calibration", "one_shot", "__init__",
        ),
        "linen": (
            "variables", "arguments", "others", "doors", "layer", "delivery", "planning", "leaves", "hardening",
            "measures", "__init__",
        ),
        "checkpoints": (
            "drafts", "tensors", "torch_files", "packing", "gguf", "names", "families", "models", "gemma", "onnx",
            "verifying",
            "__init__",
        ),
        "__init__": (),
        "__main__": (),
    },
    "experiments": {
        "errors": (),
        "files": (),
        "config_files": (),
        "data": (
            "augment", "reading", "validation", "cache", "find", "order", "others", "cifar", "idx", "npz", "folder",
            "images", "text", "labelled", "fetch", "__main__",
        ),
        "scale": ("address", "processes", "signals", "shards", "sinks"),
        "report": (
            "words", "runs", "curves", "dots", "pictures", "figures", "hardest", "live", "terms", "steps",
            "page", "__init__", "effects", "compare", "compare_table", "compare_page", "index", "__main__",
        ),
        "training": (
            "settings", "task", "state", "pretrained", "corner", "gains", "program", "phases", "hardest", "image",
            "text", "finetune", "tasks", "provenance", "lock", "digest", "events", "board", "record", "seals",
            "checkpoints", "device", "screen", "twin", "header", "meter", "breakdown", "profile", "run", "loop",
            "modes",
        ),
        "load": (),
        "members": (),
        "collected": (),
        "sweep": (),
        "usage": (),
        "command": (),
        "studies": (
            "__init__", "one_shot", "recover", "baselines", "methods", "recipe", "equal_flops", "held", "unbiased",
            "whole_rows", "forms", "residual", "finetuning", "times", "looking", "descent", "dw", "noise", "__main__",
        ),
        "bench": (
            "turns", "measure", "collectives", "tune", "kernels", "delivery", "compaction", "savings", "scale", "train",
            "runs", "pretrained", "expected", "silicon", "counts", "transforms", "__init__", "__main__",
        ),
        "recorded": (),
        "claims": (),
        "evidence": (),
        "head": (),
        "frontier": (),
        "reproduce": (),
        "gallery": (),
    },
}  # fmt: skip

# Imports inside functions: file -> what it imports there. Each has its reason.
LATE = {
    "nmjax/oneshot/texts.py": {"tokenizers"},  # an extra, which only texts need
    "nmjax/checkpoints/drafts.py": {"fcntl"},  # not on Windows
    "nmjax/checkpoints/torch_files.py": {"torch"},  # where somebody installed it
    "nmjax/checkpoints/onnx.py": {"jax2onnx"},  # an extra
    "nmjax/kernels/calls.py": {"nmjax.kernels"},  # not every jaxlib has Mosaic, and plans do without kernels
    "nmjax/core/versions.py": {  # the same; and a name that differs between versions of JAX
        "jax._src.pallas.mosaic_gpu.interpret.params", "jax.experimental.pallas", "jax.experimental.pallas.mosaic_gpu",
    },
    "nmjax/pruners/schedules.py": {"optax"},  # takes longer to import than all of nmjax
    "experiments/command.py": {"jax", "experiments.training"},  # a mistake in the command is told without JAX
    "experiments/training/events.py": {"tensorboardX", "tensorboardX.proto"},  # a plan does not need it
    "experiments/training/checkpoints.py": {"orbax.checkpoint"},  # takes two seconds, and a plan does without it
    "experiments/report/pictures.py": {"PIL"},  # a report without pictures does without it
    "experiments/report/curves.py": {"matplotlib.style", "matplotlib.figure", "matplotlib.ticker"},  # slow to import
    "experiments/report/compare.py": {"scipy.special"},  # slow to import
    "experiments/report/effects.py": {"scipy.special"},
    "experiments/report/dots.py": {"matplotlib.style", "matplotlib.figure", "matplotlib.ticker"},
    "experiments/scale/address.py": {"jax._src"},  # a mistake is reported without JAX
    "experiments/scale/processes.py": {"jax", "jax._src", "jax.experimental"},  # a mistake is told without JAX
    "experiments/scale/sinks.py": {"wandb", "trackio", "mlflow"},  # each is there only where somebody installed it
    "experiments/data/images.py": {"PIL"},  # digits do without it
    "experiments/data/folder.py": {"PIL", "grain"},  # grain takes two seconds
    "experiments/data/text.py": {"pydoc_data.topics"},  # of one data set
    "experiments/bench/transforms.py": {"qwix._src.core.sparsity"},  # a peer, where somebody installed it
}  # fmt: skip

# Files that import a module by a name that is only known as the program runs.
BY_NAME = {
    "nmjax.core.names",  # module:name, as a person wrote it
    "experiments.studies.__main__", "experiments.studies.__init__", "experiments.bench.__main__",  # what is asked for
    "experiments.bench.kernels.peers", "experiments.bench.scale",  # torch, where it is there; the trainer, as launch.py
}  # fmt: skip

# Files that import Pallas or Mosaic.
PALLAS = {
    f"nmjax.kernels.{file}"
    for file in (
        "instructions",
        "hopper_geometry",
        "hopper",
        "ampere",
        "blackwell",
        "compress",
        "copies",
        "packing",
        "tiles",
    )
}

FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): path
    for package in HOUSE
    for path in sorted((ROOT / package).rglob("*.py"))
}


def imports(source: str) -> list[tuple[str, bool]]:
    """Every module that a file imports, and whether it does so inside a function."""
    tree = ast.parse(source)
    functions = [n for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]
    inside = {id(n) for function in functions for n in ast.walk(function)}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "a relative import"
            names = [node.module]
            if node.module.split(".")[0] in HOUSE:  # a module by its own name, where one is imported
                names = [
                    f"{node.module}.{a.name}" if _file(f"{node.module}.{a.name}") else node.module for a in node.names
                ]
        else:
            continue
        found += [(name, id(node) in inside) for name in names]
    return found


def _file(module: str) -> str | None:
    """The name of the file that a module of ours is."""
    return next((name for name in (module, f"{module}.__init__") if name in FILES), None)


def place(name: str) -> tuple[int, int]:
    """Return the position of a file: the number of its room, and its own number in the room."""
    package, room, *rest = name.split(".")
    rooms = HOUSE[package]
    order = rooms[room]
    return list(rooms).index(room), order.index(rest[0]) if rest and order else 0


OURS = {
    name: sorted({f for module, _ in imports(path.read_text()) if (f := _file(module)) and f != name})
    for name, path in FILES.items()
}
PACKAGES = tuple(
    name for name in FILES if name.endswith(".__init__") and not OURS[name]
)  # a sentence, and nothing else


@pytest.mark.parametrize("name", [name for name in FILES if name not in PACKAGES])
def test_a_file_imports_from_above(name):
    package = name.split(".")[0]
    for other in OURS[name]:
        if other.split(".")[0] != package or other in PACKAGES:
            assert (package, other.split(".")[0]) != ("nmjax", "experiments"), f"{name} imports {other}"
        else:
            mine, theirs = place(name), place(other)
            same_folder = name.split(".")[:3] == other.split(".")[:3] and name.count(".") > 2
            assert theirs < mine or same_folder, f"{name} at {mine} imports {other} at {theirs}"


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


def test_every_file_has_a_place():
    for package, rooms in HOUSE.items():
        assert {
            name.split(".")[1] for name in FILES if name.startswith(f"{package}.") and name != f"{package}.__init__"
        } | {"__init__"} == set(rooms) | {"__init__"}
    for name in FILES:
        if name not in PACKAGES:
            place(name)


def test_imports_inside_functions_are_the_listed_ones():
    late = {}
    for path in (*FILES.values(), ROOT / "launch.py"):
        names = {
            ".".join(name.split(".")[:2]) if name.startswith("nmjax.kernels") else name
            for name, inside in imports(path.read_text())
            if inside
        }
        if names:
            late[str(path.relative_to(ROOT))] = {
                re.sub(r"^experiments\.training\..*", "experiments.training", name) for name in names
            }
    assert late == LATE


def test_imports_by_name_stand_in_the_listed_files():
    """`importlib.import_module` hides an import from the tests above."""
    users = {name for name, path in FILES.items() if re.search(r"\b(import_module|__import__)\(", path.read_text())}
    assert users == BY_NAME


def test_only_kernels_import_pallas():
    """Plans and limits are made where no kernel can run, so nothing else imports Pallas or a file that does."""
    for name, path in FILES.items():
        if name in PALLAS or not name.startswith("nmjax."):
            continue
        for module, inside in imports(path.read_text()):
            assert inside or not re.search(r"pallas|mosaic", module), f"{name} imports {module}"
            assert inside or module not in PALLAS, f"{name} imports {module}"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import nmjax.core.value", [("nmjax.core.value", False)]),
        ("from nmjax.core import groups, value", [("nmjax.core.groups", False), ("nmjax.core.value", False)]),
        ("from nmjax.core.value import Value", [("nmjax.core.value", False)]),
        ("def f():\n    from nmjax.kernels import hopper", [("nmjax.kernels.hopper", True)]),
        ("class C:\n    def f(self):\n        import jax", [("jax", True)]),
        ("if True:\n    import jax.experimental.pallas as pl", [("jax.experimental.pallas", False)]),
    ],
)
def test_the_check_sees_imports(source, expected):
    assert imports(source) == expected


@pytest.mark.parametrize("name", FILES)
def test_docstrings_begin_plainly(name):
    """With a verb, or with what the thing is; never with a question word."""
    for node in ast.walk(ast.parse(FILES[name].read_text())):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
            first = (ast.get_docstring(node) or "").split("\n")[0]
            assert not re.match(r"(What|Whether|How|Why|Where|Those|Of|That)\b", first), first


def test_the_core_does_without_flax():
    """Pruners, products and plans are of arrays and shapes. Other rooms use Flax."""
    users = {
        name.split(".")[1] for name, path in FILES.items() if name.startswith("nmjax.") and "flax" in path.read_text()
    }
    assert users == {"nnx", "linen", "models", "checkpoints", "__main__"}


def test_no_module_has_the_name_of_something_its_package_exports():
    """Then `import nmjax.nnx.plan` would give a function instead of a module."""
    for name in FILES:
        package, _, last = name.rpartition(".")
        if name.startswith("nmjax.") and last != "__init__":
            exported = vars(importlib.import_module(package)).get(last)
            module = importlib.import_module(name)
            assert exported in (None, module), f"{package} exports {last}, which is also the module {name}"
