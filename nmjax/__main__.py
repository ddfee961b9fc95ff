"""The command ``nmjax``: converts, verifies, prunes and exports checkpoints, and plans what a recipe would prune."""

import argparse
import json
import math
import os
import re
import shutil
import sys
import tempfile
import warnings
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from nmjax import __version__, checkpoints, models, oneshot
from nmjax.checkpoints.quantized import KINDS
from nmjax.checkpoints.verifying import PROGRAMS
from nmjax.core import layer_paths, names as names_of
from nmjax.nnx.calibration import axes_in
from nmjax.nnx.delivery import sparsify
from nmjax.nnx.layers import layers
from nmjax.nnx.one_shot import GOOD
from nmjax.nnx.planning import plan
from nmjax.oneshot import texts
from nmjax.products.sparsity import Sparsity
from nmjax.recipes.table import Recipe

SOLVERS = ("magnitude", "wanda", "ria", "sparsegpt", "admm")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line, and return its exit status.

    It is 0 for success, and for help, which is also printed without arguments; 1 if `verify` finds no n:m tensor, one
    that is broken, has NaN or infinity or does not fit, or with ``--every`` one that is not n:m; 1 if `plan` finds a
    refusal; 2 for an error.

    >>> main(["verify", "nowhere.safetensors"])  # the error goes to stderr
    2
    """
    parser, words = _parser(), sys.argv[1:] if argv is None else argv
    if not words:
        parser.print_help()
        return 0
    asked = parser.parse_args(words)
    tell = lambda text: print(f"nmjax {asked.command}: {_line(text)}", file=sys.stderr)
    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = lambda message, *about, **options: tell(f"warning: {message}")
        try:
            return asked.run(asked)
        except BrokenPipeError:  # nobody reads the rest
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 2
        except FileNotFoundError as error:
            tell(f"{error.filename}: there is no such file or folder.")
            return 2
        except (ValueError, TypeError, OSError) as error:
            tell(error)
            return 2


def _line(text: object) -> str:
    """Return a message in one line, without control characters."""
    joined = re.sub(r"([:,]?)\s*\n\s*", lambda found: f"{found[1] or ';'} ", str(text).strip())
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in joined)


def _whole(text: str) -> int:
    """Return the whole number above 0 that a text is, for argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _memory(text: str) -> float:
    """Return the bytes that a text such as 8GB or 500MB is, for argparse."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) *([GMK])B?", text, re.IGNORECASE)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 8GB, 500MB or 900KB")
    return float(found[1]) * {"G": 1e9, "M": 1e6, "K": 1e3}[found[2].upper()]


class _Help(argparse.HelpFormatter):
    """Help whose paragraphs wrap to the terminal, and whose lines that begin with spaces stay as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        wrap = lambda line: line if line.startswith(" ") else super(_Help, self)._fill_text(line, width, indent)
        return "\n".join(map(wrap, text.split("\n")))


EXAMPLE = """Example, for a folder minilm in the layout of Hugging Face's transformers:

  nmjax prune minilm --data lines.txt --out minilm-24
  nmjax verify minilm-24

'nmjax COMMAND --help' lists the options of a command."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="nmjax", formatter_class=_Help, epilog=EXAMPLE,
        description="Convert, verify, prune and export N:M sparse checkpoints, and plan recipes for them.",
    )  # fmt: skip
    parser.add_argument("--version", action="version", version=f"nmjax {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, run: Any, text: str) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=text, description=text)
        made.set_defaults(run=run)
        return made

    text = "Write a checkpoint as a folder in the layout of Hugging Face's transformers."
    convert = command("convert", _convert, text)
    convert.add_argument("source", help="a folder, a file .safetensors or .gguf, or an installed package")
    convert.add_argument("--to", required=True, metavar="DIR", help="the folder to write to")
    overwrite: dict[str, Any] = {"action": "store_true", "help": "replace the checkpoint in this folder"}
    convert.add_argument("--overwrite", **overwrite)
    text = "write the n:m weights of a pruned checkpoint in 8 bits, with a scale for each output, as compressed-tensors"
    convert.add_argument("--quantize", choices=KINDS, help=text)
    convert.add_argument("--n", type=_whole, help="of --quantize: the non-zeros allowed in a group (2)")
    convert.add_argument("--m", type=_whole, help="of --quantize: the size of a group (4)")
    text = "the kind of the checkpoint, if nmjax does not know it: an nm.checkpoints.Family, or a function of the "
    text += "config and the names of the tensors that returns one"
    family: dict[str, Any] = {"metavar": "MODULE:NAME", "help": text}
    convert.add_argument("--family", **family)
    text = "Show which tensors of a file are n:m. The exit status is 1 if none is, or if one is broken, "
    text += "has NaN or infinity, or does not fit."
    verify = command("verify", _verify, text)
    verify.add_argument("path", help="a .safetensors file, an index, or a folder")
    verify.add_argument("--n", type=_whole, default=2, help="the non-zeros allowed in a group (2)")
    verify.add_argument("--m", type=_whole, default=4, help="the size of a group (4)")
    text = f"comma-separated programs to check: {','.join(PROGRAMS)}"
    verify.add_argument("--for", dest="programs", default="", metavar="PROGRAMS", help=text)
    text = "check only tensors whose whole name matches; all of them must be n:m"
    verify.add_argument("--every", metavar="REGEX", help=text)
    verify.add_argument("--json", action="store_true", help="print JSON")
    text = (
        "Prune the blocks of a checkpoint in one shot, and write it to a folder. Every method but magnitude measures "
    )
    pruned = command("prune", _prune, f"{text}the inputs of layers on data of yours.")
    pruned.add_argument("path", help="a folder with config.json, a .safetensors file and tokenizer.json")
    pruned.add_argument("--out", required=True, metavar="DIR", help="the folder to write to")
    pruned.add_argument("--overwrite", **overwrite)
    pruned.add_argument("--method", choices=SOLVERS, default="sparsegpt", help="the solver (sparsegpt)")
    pruned.add_argument("--family", **family)
    part = pruned.add_argument_group("what is pruned")
    part.add_argument("--n", type=_whole, default=2, help="the weights to keep in a group (2)")
    part.add_argument("--m", type=_whole, default=4, help="the size of a group (4)")
    text = "the layers to prune, by nmjax's paths, which `nmjax plan` shows (all in blocks but routers)"
    part.add_argument("--layers", default=r"blocks/.*(?<!/router)", metavar="REGEX", help=text)
    text = "instead of layers, prune these tensors of any safetensors file by magnitude, whatever its model is"
    part.add_argument("--tensors", metavar="REGEX", help=text)
    text = "the axis of the groups of --tensors, that of the inputs (-1, as in torch)"
    part.add_argument("--axis", type=int, choices=(-2, -1, 0, 1), help=text)
    part = pruned.add_argument_group("data, which magnitude does not need")
    text = "texts like those that the model is for, of every kind: one per line, or .jsonl with a field text; also .gz "
    text += "and .xz. Or images: .npy of shape [count, height, width, channels], normalised as the model takes them"
    part.add_argument("--data", metavar="FILE", help=text)
    text = "the greatest number of texts or images (128)"
    part.add_argument("--examples", type=_whole, metavar="COUNT", help=text)
    text = "the most tokens of a text, or of a window for GPT and decoders (512, or the model's if it takes fewer)"
    part.add_argument("--length", type=_whole, metavar="COUNT", help=text)
    text = "give hidden features and those of heads the order in which most is kept; the dense function stays the same"
    part.add_argument("--permute", action="store_true", help=text)
    text = "the memory that it may take, beside the pages of files (8GB); outputs of blocks that do not fit go to disk"
    part.add_argument("--memory", type=_memory, metavar="SIZE", help=text)
    exported = command("export", _export, "Export a checkpoint as ONNX, for other programs.")
    exported.add_argument("path", help="a folder with config.json and a .safetensors file")
    exported.add_argument("--to", required=True, metavar="FILE", help="the file to write: .onnx")
    text = "fix the batch size of the ONNX inputs, for programs that need that; without it any size can be given"
    exported.add_argument("--batch", type=_whole, help=text)
    text = "fix the number of tokens of the ONNX inputs; without it any number up to the model's length can be given"
    exported.add_argument("--length", type=_whole, help=text)
    exported.add_argument("--family", **family)
    planned = command("plan", _plan, "Show what a recipe would prune in a checkpoint.")
    planned.add_argument("path", help="a folder with config.json and a .safetensors file")
    planned.add_argument(
        "rules", nargs="+", metavar="RULE",
        help="PATTERN=SPARSITY, such as 'blocks/.*=s_ste(2,4)'; the first that matches a layer decides",
    )  # fmt: skip
    planned.add_argument("--family", **family)
    return parser


def _family(asked: argparse.Namespace) -> Any:
    """Return what ``--family`` names, from Python's path or the current folder; None if it is not given."""
    if asked.family is None:
        return None
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        return names_of.load(asked.family)
    except ValueError as error:
        raise ValueError(f"--family: {error}") from error


def _convert(asked: argparse.Namespace) -> int:
    target = Path(asked.to)
    if asked.quantize is None and (asked.n or asked.m):
        raise ValueError("--n and --m are the pattern of --quantize. Leave them out.")
    source = _gguf(asked.source, target)
    if source is not None:
        if asked.family is not None:
            raise ValueError("--family is for checkpoints with a config.json. A GGUF file names its own kind.")
        if asked.quantize is not None:
            raise ValueError("--quantize is for pruned checkpoints. Convert the GGUF file without it, and prune first.")
        checkpoints.convert_gguf(source, target, overwrite=asked.overwrite)
        print(f"{target}: {len(source)} tensors in float32, the config and the tokenizer, from {asked.source}.")
        return 0
    folder = _folder(asked.source)
    _check_target(target, folder, asked.overwrite)
    if asked.quantize is not None:
        if asked.family is not None:
            raise ValueError("--quantize takes no model: leave out --family.")
        n, m = asked.n or 2, asked.m or 4
        names = checkpoints.quantize(folder, target, asked.quantize, n, m, overwrite=asked.overwrite)
        print(f"{target}: {len(names)} weights that are {n}:{m} are {asked.quantize}, from {folder}.")
        return 0
    family = _family(asked)
    model = checkpoints.load(folder, family=family)
    checkpoints.save(target, model, like=folder, family=family, overwrite=asked.overwrite)
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
    parts = [file for file in files if re.search(r"\.gguf(\.part\d+)?$", file.name)]
    parts.sort(key=lambda file: (len(file.name), file.name))
    names = sorted({re.sub(r"\.part\d+$", "", file.name) for file in parts})
    if len(names) > 1:
        raise checkpoints.CheckpointError(f"{source} has several models: {', '.join(names)}. Write the path of a file.")
    if len(parts) <= 1:
        return checkpoints.Gguf(parts[0]) if parts else None
    place = next(folder for folder in (target, *target.absolute().parents) if folder.is_dir())
    with tempfile.TemporaryFile(dir=place) as whole:  # without a name, so that a kill leaves nothing
        for part in parts:
            with part.open("rb") as file:
                shutil.copyfileobj(file, whole)
        whole.seek(0)
        return checkpoints.Gguf(f"/dev/fd/{whole.fileno()}")  # it stays readable


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
        raise checkpoints.CheckpointError(
            f"{source!r} is neither a path nor an installed package. Give the folder of a checkpoint."
        )
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
    programs = [name.strip() for name in asked.programs.split(",") if name.strip()]
    found = checkpoints.verify(asked.path, asked.n, asked.m, programs=programs, every=asked.every)
    if asked.json:
        print(json.dumps(found.as_dict(), indent=2))
    else:
        print(found)
        counts = f"{len(found.sparse)} of {len(found.tensors)} tensors are {asked.n}:{asked.m}"
        print(f"\n{counts}, {len(found.broken)} are almost {asked.n}:{asked.m}.")
        unfit = [one for one in found.sparse if any(one.misfits.values())]
        if unfit:
            print(f"{len(unfit)} of the {asked.n}:{asked.m} tensors do not fit all programs.")
    return 0 if found.holds else 1


def _prune(asked: argparse.Namespace) -> int:
    if asked.n >= asked.m:
        raise ValueError(f"--n {asked.n} --m {asked.m} prunes nothing: n must be less than m.")
    if asked.length is not None and asked.length < texts.LENGTHS[0]:
        raise ValueError(f"--length {asked.length}: calibration needs texts of at least {texts.LENGTHS[0]} tokens.")
    if asked.tensors is not None and (asked.method != "magnitude" or asked.data):
        raise ValueError("--tensors prunes by magnitude, without data: write --method magnitude.")
    if asked.data is None and asked.method != "magnitude":
        raise ValueError(
            f"--method {asked.method} measures the inputs of layers. Add --data FILE: a hundred texts or images, or "
            "more, of all the kinds that the model is for. --method magnitude needs none."
        )
    idle = [f"--{one}" for one in ("examples", "length", "memory") if vars(asked)[one] is not None]
    if idle and asked.data is None:
        raise ValueError(f"without --data there is no use for {', '.join(idle)}. Leave it out.")
    if asked.tensors is None and asked.axis is not None:
        raise ValueError("--axis is that of the groups of --tensors. For layers it is known.")
    if asked.tensors is not None and (asked.family or asked.permute):
        raise ValueError("--tensors takes no model: leave out --family and --permute.")
    if asked.permute and asked.data is None:
        raise ValueError("--permute measures the inputs of layers. Add --data FILE.")
    source, overwrite, family = _folder(asked.path), asked.overwrite, _family(asked)
    _check_target(Path(asked.out), source, overwrite)
    if asked.tensors is not None:
        axis = -1 if asked.axis is None else asked.axis
        names = checkpoints.prune_tensors(
            source, asked.out, asked.tensors, asked.n, asked.m, axis=axis, overwrite=overwrite
        )
        print(f"{asked.out}: {len(names)} tensors are {asked.n}:{asked.m} along axis {axis}, by magnitude.")
        return 0
    recipe = Recipe(((asked.layers, f"ste({asked.n},{asked.m})"), (".*", "dense")))
    make = checkpoints.architecture(source, family=family)
    model = nnx.eval_shape(lambda: make(rngs=nnx.Rngs(0)))
    _check_layers(asked, model)
    if asked.data is None:
        found = checkpoints.prune(source, asked.out, recipe, family=family, overwrite=overwrite)
        print(f"{asked.out}: {len(found)} weight matrices are {asked.n}:{asked.m}, by magnitude.")
        return 0
    batches, rows, told = _batches(asked, model, source)
    sparsify(nnx.clone(model), recipe)  # it refuses what does not fit before anything is computed
    chosen = [layer for layer in layers(model) if recipe(layer.path) != Sparsity() and layer.has_weight]
    sizes, experts = [*map(_inputs, chosen)], any(axes_in(layer).batch for layer in chosen)
    widest = max(sizes, default=0)
    good = f"{GOOD * widest:,} tokens or more{' for each expert' * experts} are good"
    good = "that is enough" if rows >= GOOD * widest and not experts else good
    print(f"Data: {told}, for layers of up to {widest:,} inputs: {good}.", file=sys.stderr, flush=True)
    solver = getattr(oneshot, asked.method)
    found = checkpoints.prune(
        source, asked.out, recipe, batches, solver, family=family, permute=asked.permute,
        memory=8e9 if asked.memory is None else asked.memory, overwrite=overwrite, progress=True,
    )  # fmt: skip
    print(f"{asked.out}: {len(sizes)} weight matrices are {asked.n}:{asked.m}, by {asked.method} on {told}.")
    errors = np.array(list(found.values()))
    if len(errors):
        of = " of inputs without correlation" if solver in oneshot.solvers.OF_NORMS else ""
        print(
            f"Mean relative error of a layer's output{of}: {errors[:, 0].mean():.4f}, with magnitude "
            f"{errors[:, 1].mean():.4f}."
        )
    return 0


def _check_target(target: Path, source: Path, overwrite: bool) -> None:
    """Refuse a folder that is the source, or that has other things."""
    home = source if source.is_dir() else source.parent
    if target.is_dir() and target.samefile(home):
        raise ValueError(f"{target} is the checkpoint that is read. Name another folder.")
    checkpoints.models.check_target(target, source, overwrite)


def _check_layers(asked: argparse.Namespace, model: Any) -> None:
    """Refuse a --layers that matches no layer."""
    paths = [layer.path for layer in layers(model)]
    if not any(re.fullmatch(asked.layers, path) for path in paths):
        known = ", ".join(layer_paths.patterns(paths, ()))
        raise ValueError(f"--layers {asked.layers!r} matches no layer of the model, whose layers are {known}.")


def _inputs(layer: Any) -> int:
    """Return the number of inputs of a layer."""
    return math.prod(layer.product.rhs.shape[axis] for axis in layer.operand.contract)


def _batches(asked: argparse.Namespace, model: Any, source: Path) -> tuple[list[Any], int, str]:
    """Return the batches of the data, the rows that a layer gets of them, and what they are in words."""
    count = asked.examples or 128
    if isinstance(model, models.ViT):
        if asked.length is not None:
            raise ValueError("--length is for texts, and this model takes images. Leave it out.")
        images = _images(Path(asked.data), model)[:count]
        batches: list[Any] = [jnp.asarray(images[i : i + 16]) for i in range(0, len(images), 16)]
        rows = len(images) * model.positions.shape[-2]
        return batches, rows, f"{len(images)} images, {rows:,} tokens"
    if not hasattr(model, "length"):
        raise ValueError(f"{source}: only models of texts and ViT can be calibrated here. Use nm.nnx.prune in Python.")
    vocabulary, length = model.tokens.num_embeddings, _length(asked, model, 512)
    encoded = _encoded(source, vocabulary, texts.read_texts(asked.data, count))
    tokens, types = [one.ids for one in encoded], [one.type_ids for one in encoded]
    if max(max(one, default=0) for one in tokens) >= vocabulary:
        raise ValueError(f"{source}: the tokenizer has tokens beyond the model's {vocabulary:,}, so it does not fit.")
    alone = isinstance(model, models.BERT) or not getattr(model, "unembed", True)  # a text is an input by itself
    if isinstance(model, models.BERT):
        pairs = zip(texts.batches(tokens, length), texts.batches(types, length), strict=True)
        batches = [(jnp.asarray(one), None, jnp.asarray(kind)) for one, kind in pairs]
    else:
        cut = texts.batches if alone else texts.windows
        batches = [jnp.asarray(batch) for batch in cut(tokens, length)]
    rows = sum(jax.tree.leaves(batch)[0].size for batch in batches)
    if rows < texts.LENGTHS[0]:
        which = "each text has" if alone else "the texts together have"
        hint = "That is too short for calibration. Give longer texts."
        raise ValueError(f"{asked.data}: {which} fewer than {texts.LENGTHS[0]} tokens. {hint}")
    again = texts.repeated([one[:length] for one in tokens])
    if again > 0.5:
        warnings.warn(
            f"{asked.data}: {math.floor(100 * again)} % of the runs of {texts.LENGTHS[0]} tokens were there before, so "
            "the texts are nearly the same. Give more different ones.",
            stacklevel=1,
        )
    return batches, rows, f"{len(tokens)} texts, {rows:,} tokens"


def _length(asked: argparse.Namespace, model: Any, usual: int) -> int:
    """Return the number of tokens that is asked for, or the usual one; refuse more than the model takes."""
    if asked.length is not None and asked.length > model.length:
        raise ValueError(f"--length {asked.length}: the model takes at most {model.length:,} tokens.")
    return asked.length or min(model.length, usual)


def _images(path: Path, model: Any) -> np.ndarray:
    """Return the images of a file, as the model takes them."""
    try:
        images = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError, IsADirectoryError):
        raise ValueError(f"{path}: this model takes images, and this is not a file .npy of an array.") from None
    shape = getattr(images, "shape", None)
    if shape is None or len(shape) != 4 or shape[1:] != model.shape or not len(images):
        wanted = ", ".join(map(str, model.shape))
        raise ValueError(f"{path}: images of shape [count, {wanted}] are expected, got {shape}.")
    if images.dtype.kind != "f":
        raise ValueError(
            f"{path}: images are floating-point numbers, normalised as the model takes them, got {images.dtype}."
        )
    bad = next((i for i, image in enumerate(images) if not np.isfinite(image).all()), None)
    if bad is not None:
        raise ValueError(f"{path}: image {bad} has NaN or infinity.")
    return images


def _encoded(source: Path, vocabulary: int, found: list[tuple[str, str | None]]) -> list[Any]:
    """Return texts as the checkpoint's own tokenizer encodes them."""
    file = (source if source.is_dir() else source.parent) / "tokenizer.json"
    words = texts.tokenizer(file)
    texts.check_size(words, vocabulary, file)
    with texts.failing(f"{file} cannot encode the texts"):
        return [words.encode(first, second) for first, second in found]


def _export(asked: argparse.Namespace) -> int:
    source, target = _folder(asked.path), Path(asked.to)
    if target.suffix != ".onnx":
        raise ValueError(f"--to {target}: the name of the file must end with .onnx.")
    model, inputs, names = _callable(checkpoints.load(source, family=_family(asked)), asked)
    weights = checkpoints.models.weights_of_8_bits(source)
    count = checkpoints.write_onnx(target, model, *inputs, names=names, weights=weights)
    of = f", {count} of {len(weights)} quantized weights in 8 bits" if weights else ""
    headless = "" if getattr(model, "has_head", True) else ", output the last hidden state"
    print(f"{target}: {target.stat().st_size:,} bytes, inputs {', '.join(names)}{headless}{of}.")
    return 0


def _callable(model: Any, asked: argparse.Namespace) -> tuple[Any, list[jax.ShapeDtypeStruct], list[str]]:
    """Return a model for ONNX, the shapes of its inputs, and the names that transformers has for them.

    Axes whose sizes are not asked for are symbolic.
    """
    if isinstance(model, models.ViT):
        if asked.length is not None:
            raise ValueError("--length is for texts, and this model takes images. Leave it out.")
        batch = jax.export.symbolic_shape(str(asked.batch or "batch"))
        images = jax.ShapeDtypeStruct((*batch, *model.shape), jnp.float32)
        return model if model.head.kernel.size else _Tokens(model), [images], ["images"]
    if not hasattr(model, "length"):
        raise ValueError(
            f"{asked.path}: only models of texts and ViT can be exported here. Use nm.checkpoints.write_onnx in Python."
        )
    most = _length(asked, model, model.length)
    bound = [] if asked.length else [f"length <= {most}"]
    shape = jax.export.symbolic_shape(f"{asked.batch or 'batch'}, {asked.length or 'length'}", constraints=bound)
    tokens = jax.ShapeDtypeStruct(shape, np.int64)  # as tokenizers return them
    if not isinstance(model, models.BERT):
        return model, [tokens], ["input_ids"]
    names = ["input_ids", "attention_mask", *([] if model.types is None else ["token_type_ids"])]
    return _Encoder(model), [tokens] * len(names), names


class _Encoder(nnx.Module):
    """BERT with a mask of numbers. Without a head it returns the last hidden state."""

    def __init__(self, model: models.BERT):
        self.model, self.has_head = model, bool(model.head.kernel.size)

    def __call__(self, tokens: jax.Array, mask: jax.Array, types: jax.Array | None = None) -> jax.Array:
        if self.has_head:
            return self.model(tokens, mask != 0, types)
        x = self.model.hidden(tokens, mask != 0, types)[-1]
        return self.model.norm(x) if isinstance(self.model, models.ModernBERT) else x


class _Tokens(nnx.Module):
    """The last hidden state of a ViT without a head, normalised."""

    has_head = False

    def __init__(self, model: models.ViT):
        self.model = model

    def __call__(self, images: jax.Array) -> jax.Array:
        return self.model.norm(self.model.hidden(images)[-1])


def _plan(asked: argparse.Namespace) -> int:
    rules: list[tuple[str, str]] = []
    for rule in asked.rules:
        pattern, equals, sparsity = rule.partition("=")
        if not equals:
            raise ValueError(f"a rule is PATTERN=SPARSITY, such as 'blocks/.*=s_ste(2,4)', got {rule!r}.")
        rules.append((pattern, sparsity))
    found = plan(checkpoints.load(_folder(asked.path), family=_family(asked)), Recipe((*rules, (".*", "dense"))))
    print(found)
    return 1 if found.refused else 0


if __name__ == "__main__":
    sys.exit(main())
