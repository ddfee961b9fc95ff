"""The public names of nmjax, and the pages of the reference that list each of them once."""

import ast
import importlib
import inspect
import re
import shutil
from collections.abc import Iterable
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


# The names of a page in groups, in the order in which one uses them. Names of other pages are in alphabetical order.
ORDER = {
    "nmjax": {
        "Sparsity as text and as a value": "parse Recipe Sparsity parse_pruner",
        "Prune arrays, products and functions": (
            "prune show einsum dot_general conv_general_dilated ragged_dot transform fused"
        ),
        "Pruners": (
            "mse nonzeros mvue mvue_approx uniform soft transposable rows pairs shared wanda ria saliency fisher "
            "movement regrow identity"
        ),
        "Gradient rules of weights": "ste sr_ste decay",
        "Pruners made of others": "raw rescale fp8 fp4 chain hold permute stages stage",
        "Schedules": "constant linear cosine exponential stairs optax_schedule",
        "Packed arrays and activation functions": "pack unpack Packed squared_relu exact_gelu",
        "To write a pruner": "Pruner Grouped Selector Remembering Ctx Facts KernelForm Picture",
    },
    "nmjax.methods": {
        "Weights": "s_ste mdgf sdgf sr_ste ste fst bdwp bi_mask slope random_mask",
        "Gradients": "mvue sdgp top_gradient",
        "Activations, and none": "activation vnm dense",
    },
    "nmjax.nnx": {
        "Train": "sparsify plan set_step observe harden patterns violations",
        "More layers, seeds and weights that are loaded later": "register_layer reset_state reseed phase",
        "Prune in one shot": "prune calibrate set_norms Pruned Inputs",
        "Train changes of low rank, or masks": "low_rank changed LowRank mask_scores masked",
        "Look inside": "weights masks scales gradient_errors",
        "Inference": "pack packed",
        "What a plan holds": "Plan LayerPlan SlotPlan Route",
        "What a sparse layer holds": "SparsityState SparsityVariable",
    },
    "nmjax.linen": {
        "Train": "sparsify plan set_step observe harden patterns violations",
        "More layers, and weights that are loaded later": "register_layer reset_state paths",
        "Look inside": "weights masks scales gradient_errors",
    },
    "nmjax.checkpoints": {
        "Models": "load save prune prune_tensors quantize architecture verify write_onnx convert_gguf",
        "Tensors": "read write parameters Tensors Gguf Verified CheckpointError",
        "To add a kind of checkpoint": "Family Table Rename",
        "Kinds of which a checkpoint has two": "clip_text clip_vision",
    },
    "nmjax.oneshot": {"Solvers": "magnitude wanda ria sparsegpt admm Solved", "Orders": "FreeInputs"},
    "nmjax.metrics": {
        "Masks": "density flip_rate flip_rates sad ties violations",
        "Errors": "pruned_error gradient_error gradient_variance error weight",
        "Results": "Error Weight Pattern path",
    },
    "nmjax.kernels": {
        "Products": "spmm Blocks",
        "Devices": "on target Target",
        "Tiles": "HopperConfig BlackwellConfig AmpereConfig",
    },
    "nmjax.models": {"Models": "ViT GPT MoE BERT ModernBERT Decoder ResNet", "Parts and text": "generate Rotary"},
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
    members.sort(key=lambda member: member.name.lower())
    place = {f"{space}.{name}": i for i, name in enumerate(" ".join(ORDER.get(space, {}).values()).split())}
    return sorted(members, key=lambda member: place.get(member.name, len(place)))


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
    own = names(space)
    for title, group in ORDER.get(space, {"Names": " ".join(one.name.rpartition(".")[2] for one in own)}).items():
        lines += _summary(title, [one for one in own if one.name.rpartition(".")[2] in group.split()])
    for name, value in own:
        if inspect.isclass(value):
            lines += [f".. autoclass:: {name}", *(["   :members:"] if _shows_members(value) else []), ""]
        elif inspect.isfunction(value) or inspect.isbuiltin(value):
            lines += [f".. autofunction:: {name}", ""]
        else:
            lines += [f".. autodata:: {name}", "   :no-value:", ""]
    return "\n".join(lines)


def _summary(title: str, group: Iterable[Public]) -> list[str]:
    """Return a table of names, each with the first sentence of its docstring."""
    lines = [f".. rubric:: {title}", "", ".. list-table::", "   :class: names", "   :widths: 25 75", ""]
    for name, value in group:
        paragraph = " ".join((inspect.getdoc(value) or "").split("\n\n")[0].split())
        sentence = re.match(r"(.*?\.)(?: |$)", paragraph)
        short = name.rpartition(".")[2]
        lines += [f"   * - `{short} <{name}>`", f"     - {sentence[1] if sentence else paragraph}"]
    return [*lines, ""]


def _shows_members(value: type) -> bool:
    """Return whether a class is more than a value that users construct or look at, as most pruners are."""
    from nmjax.core.bases import Grouped
    from nmjax.core.pruner import Pruner
    from nmjax.nnx.variables import SparsityState

    if value is SparsityState:
        return False

    return not issubclass(value, Pruner) or value in (Pruner, Grouped)
