"""Loads models from checkpoints, and saves them as checkpoints of the same form."""

import inspect
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from nmjax.checkpoints import torch_files
from nmjax.checkpoints.drafts import finish, replacing_all
from nmjax.checkpoints.families import Config, Family, Kind, family_of
from nmjax.checkpoints.names import Table
from nmjax.checkpoints.quantized import KINDS, dequantized, described, kind_of, quantized, scales_of
from nmjax.checkpoints.tensors import (
    CheckpointError,
    Tensor,
    Tensors,
    read as read_safetensors,
    read_config,
    refuse_unfinished,
    write_into,
)
from nmjax.checkpoints.torch_files import SUFFIXES
from nmjax.checkpoints.verifying import HALF, verify
from nmjax.nnx.variables import unhardened

TEXTS = (".json", ".txt", ".md", ".model", ".jinja", ".yaml")  # also of tokenizers
WEIGHTS = (".safetensors", ".index.json", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".onnx", ".gguf", ".ot")


def load(
    path: str | os.PathLike[str], *, rngs: nnx.Rngs | None = None, family: Kind | None = None, **options: Any
) -> Any:  # fmt: skip
    """Return the model of a checkpoint in the layout of Hugging Face's transformers, or of timm.

    The file ``config.json`` chooses the model and its sizes: `nmjax.models.BERT`, `ModernBERT`, `ViT`, `GPT` or
    `Decoder`.

    Args:
      path: A folder with ``config.json``, and a safetensors file or the index of several; or the file. A file of torch
        (.bin, .pth, .pt) is opened by torch's restricted loader, if torch is installed.
      rngs: The random number generators of a new head.
      family: The kind of the checkpoint: its model, the model's arguments, and the table of names; or a function that
        returns it for the content of ``config.json`` and the names of the tensors. Without it ``config.json`` chooses
        one of the supported kinds.
      **options: Arguments of the model in place of those of the config, such as ``scan=True``, ``dtype`` or
        ``dropout``. If the checkpoint has no head of so many ``classes``, the head is new, and needs ``rngs``.

    Raises:
      CheckpointError: The kind of the checkpoint is not known; or tensors are missing, unexpected, or of another shape,
        and the message lists them.
      OSError: A file cannot be read.

    >>> import tempfile, nmjax as nm
    >>> config = {"model_type": "gpt2", "vocab_size": 9, "n_positions": 4, "n_embd": 8, "n_layer": 1, "n_head": 2}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with open(folder + "/config.json", "w") as file: json.dump(config, file)
    ...     tensors = {"wte.weight": np.zeros((9, 8), np.float32)}
    ...     nm.checkpoints.write(folder + "/model.safetensors", tensors)
    ...     try: load(folder)
    ...     except CheckpointError as error: print(str(error).partition("model: ")[2][:31])
    missing: h.0.attn.c_attn.bias,
    """
    about, classes = family_at(path, family), options.get("classes", 0)
    if classes and classes != about.options.get("classes") and (rngs is None or not about.head):
        advice = "Pass rngs=nnx.Rngs(0) for a new one." if about.head else "Leave out classes: its kind has no head."
        raise CheckpointError(f"{path}: the checkpoint has no head with {classes} classes. {advice}")
    make, read_ones = architecture(path, family=about, **options), parameters(path, family=about, **options)
    with np.errstate(invalid="ignore"):  # of a signalling NaN
        return made_of(make, read_ones, nnx.Rngs(0) if rngs is None else rngs, jnp.asarray)


def made_of(
    make: Callable[..., Any], given: Mapping[str, Any], rngs: nnx.Rngs, place: Callable[[Any, Any], Any]
) -> Any:  # fmt: skip
    """Return a model with these parameters, and new ones for the rest.

    Args:
      make: A function that makes the model, such as `architecture` returns.
      given: Parameters by path.
      rngs: The random number generators of the rest.
      place: A function of a given parameter and the dtype that the model has for it.
    """
    graph, abstract = nnx.split(nnx.eval_shape(lambda: make(rngs=nnx.Rngs(0))))

    @jax.jit
    def others(key: jax.Array) -> dict[str, jax.Array]:
        """Return the initial values of what is not given."""
        made = _by_path(nnx.state(make(rngs=nnx.Rngs(key))))
        return {name: v.get_value() for name, v in made.items() if name not in given}

    values: dict[str, Any] = dict(others(rngs.params()))
    values |= {name: place(given[name], v.dtype) for name, v in _by_path(abstract).items() if name in given}
    flat = [(key, v.replace(values["/".join(map(str, key))])) for key, v in nnx.to_flat_state(abstract)]
    return nnx.merge(graph, nnx.from_flat_state(flat))


def architecture(
    path: str | os.PathLike[str], *, family: Kind | None = None, **options: Any
) -> Callable[..., Any]:  # fmt: skip
    """Return a function that makes the model of a checkpoint with new parameters. It takes ``rngs`` by keyword.

    Only the config and the names of the tensors are read. The arguments and errors are those of `load`.

    >>> def widths(path):
    ...     model = nnx.eval_shape(lambda: architecture(path)(rngs=nnx.Rngs(0)))
    ...     return [kernel.shape for kernel in jax.tree.leaves(nnx.state(model, nnx.Param))]
    """
    about = family_at(path, family)
    make, given = about.model, about.options | options
    takes = partial(make.__init__, None) if isinstance(make, type) else make  # the signature of a class is Flax's
    try:
        inspect.signature(takes).bind(rngs=None, **given)
    except TypeError as error:
        name = getattr(make, "__name__", make)
        raise CheckpointError(
            f"{path}: the model {name} cannot be made, because of its arguments, which are the options of its family "
            f"and those of the caller: {error}."
        ) from None
    return partial(make, **given)


def parameters(
    path: str | os.PathLike[str], *, family: Kind | None = None, **options: Any
) -> dict[str, np.ndarray]:  # fmt: skip
    """Return the parameters of a checkpoint by their paths in its model. Those of a new head are left out.

    The arguments and errors are those of `load`.

    >>> def density(path):
    ...     return {name: np.count_nonzero(value) / value.size for name, value in parameters(path).items()}
    """
    return views(path, opened(path), family=family, **options)


def views(
    path: str | os.PathLike[str], held: Tensors, *, family: Kind | None = None, blank: bool = False, **options: Any
) -> dict[str, np.ndarray]:
    """Return what `parameters` returns, made of these tensors. Weights of 8 bits become float32.

    With ``blank``, parameters of several tensors are zeros that take no memory.
    """
    about = family_at(path, family)
    make = architecture(path, family=about, **options)
    new = options.get("classes", about.options.get("classes")) != about.options.get("classes")
    heads = [rename.ours for rename in about.table.renames if new and rename.theirs in about.head]
    head = {path for ours in heads for path in ((ours,) if isinstance(ours, str) else ours)}
    wanted = {name: v for name, v in _abstract(make).items() if name not in head}
    try:
        blocks, held = _blocks(wanted), dequantized(read_config(Path(path)), held)
        found = _table(about, new).read(held, {one: block.shape for one, block in blocks.items()}, blank=blank)
        odd = [f"{one} {value.dtype}" for one, value in found.items() if not jnp.issubdtype(value.dtype, jnp.floating)]
        if odd:
            raise CheckpointError(f"parameters are not floating-point numbers: {', '.join(odd[:8])}.")
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    return {
        name: np.stack([found[one] for one in parts]) if (parts := _parts(name, v)) else found[name]
        for name, v in wanted.items()
    }


def check(config: Config, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse shapes of tensors that are not those of the model that a config describes."""
    try:
        about = family_of(config, shapes)
        wanted = _abstract(partial(about.model, **about.options))
    except (TypeError, ValueError, ArithmeticError) as error:
        raise CheckpointError(f"the model cannot be made: {error}") from None
    empty = {name: np.broadcast_to(np.float32(0), shape) for name, shape in shapes.items()}
    about.table.read(empty, {name: v.shape for name, v in wanted.items()})


def save(
    path: str | os.PathLike[str], model: Any, *, like: str | os.PathLike[str], family: Kind | None = None,
    overwrite: bool = False,
) -> None:  # fmt: skip
    """Write the parameters of a model as a checkpoint, in the layout of the one from which it was loaded.

    Names, order, dtypes, metadata and the division into files are those of the other checkpoint. Its other files of
    text are copied, such as the config and the tokenizer. A model that is loaded and saved gives the same tensors.

    Args:
      path: The folder to write to. It is made if it does not exist.
      model: The model. If it was sparse, pass ``nm.nnx.harden(model)``.
      like: The other checkpoint: a folder, or a file beside ``config.json``.
      family: The kind of the checkpoint, as in `load`.
      overwrite: Whether a checkpoint in the folder is replaced. The one that `like` names is always replaced.

    Raises:
      CheckpointError: The other checkpoint and the model do not have the same parameters; the model is not hardened;
        or the folder has files.
      OSError: A file cannot be written. If a disk is full, no file is changed.

    >>> import nmjax as nm
    >>> def prune(source, target):
    ...     model = nm.nnx.sparsify(load(source), nm.Recipe({"blocks/.*": "ste(2,4)", ".*": "dense"}))
    ...     save(target, nm.nnx.harden(model), like=source)
    """
    if (layer := unhardened(model)) is not None:
        raise CheckpointError(f"the model is sparse: it prunes at {layer}. Save nm.nnx.harden(model).")
    about, tensors, folder = family_at(like, family), opened(like), Path(path)
    check_target(folder, like, overwrite)
    config = read_config(Path(like))
    values = _blocks(
        {name: v.get_value() for name, v in _by_path(nnx.state(model, nnx.Param)).items() if 0 not in v.shape}
    )
    classes = values["head/bias"].shape[0] if "head/bias" in values else 0
    new = bool(about.head) and "classes" in about.options and classes != about.options["classes"]
    held = {name: tensors[name] for name in tensors if not (new and name in about.head)}
    try:
        made = _table(about, new=False).write(values, held, about.head if new else ())
    except CheckpointError as error:
        raise CheckpointError(f"{like}: {error}") from None
    texts: dict[str, Any] = {}
    if new and config:
        labels = {str(i): f"LABEL_{i}" for i in range(classes)}
        texts["config.json"] = config | ({"num_classes": classes} if "architecture" in config else {
            "id2label": labels, "label2id": {label: int(i) for i, label in labels.items()}, "num_labels": classes,
        })  # fmt: skip
    _write(folder, like, tensors, made, texts)


def quantize(
    source: str | os.PathLike[str], target: str | os.PathLike[str], kind: str, n: int = 2, m: int = 4, *,
    overwrite: bool = False,
) -> list[str]:  # fmt: skip
    """Write a pruned checkpoint with weights of 8 bits: those that are n:m along their inputs.

    Each has a scale for each output, and its zeros stay zero. Tensors and ``config.json`` are as compressed-tensors
    describes them, for any model. `load` and the functions like it read such a checkpoint in float32.

    Args:
      source: The checkpoint: safetensors beside ``config.json``.
      target, overwrite: The folder to write to, as in `save`.
      kind: "int8", or "fp8" for float8_e4m3fn.
      n, m: The pattern.

    Returns:
      The names of these weights.

    Raises:
      CheckpointError: No matrix ``X.weight`` [outputs, inputs] is n:m; tensors are nearly n:m, or have NaN or infinity.
      OSError: A file cannot be read or written.

    >>> def smaller(pruned, target):
    ...     quantize(pruned, target, "int8")
    ...     return load(target)
    """
    if kind not in KINDS:
        raise CheckpointError(f"weights of 8 bits are {' or '.join(KINDS)}, got {kind!r}.")
    found, folder, config = opened(source), Path(target), _config(source)
    if config.get("model_type") == "gpt2":
        raise CheckpointError(f"{source}: GPT-2 keeps [inputs, outputs], and weights of 8 bits are [outputs, inputs].")
    if folder.exists() and folder.samefile(_home(source)):
        raise CheckpointError(f"{source}: its weights would be lost. Name another folder.")
    check_target(folder, source, overwrite)
    if kind == "int8" and any(".experts." in name for name in found):
        raise CheckpointError(f"{source}: transformers reads experts of 8 bits in FP8 only. Write fp8.")
    if "quantization_config" in config:
        raise CheckpointError(f"{source}: config.json has quantization_config already.")
    checked = verify(source, n, m)
    wrong = [*checked.not_finite, *(one.name for one in checked.broken)]
    if wrong:
        raise CheckpointError(f"{source}: not {n}:{m} in all groups, or not finite: {', '.join(wrong[:5])}.")
    fits = lambda one: len(one.shape) == 2 and 1 in one.axes and one.dtype in HALF and one.name.endswith(".weight")
    chosen = [one.name for one in checked.sparse if fits(one) and "embed" not in one.name]
    if not chosen:
        raise CheckpointError(
            f"{source}: no matrix X.weight [outputs, inputs] is {n}:{m} along its inputs. Prune it first: nmjax prune."
        )
    made: dict[str, Any] = dict(found.tensors)
    part = lambda name, which: lambda: quantized(found[name], kind)[which]
    for name in chosen:
        shape = found.shape(name)
        made[name] = Tensor(shape, np.dtype(KINDS[kind][0]), part(name, 0))
        made[f"{name}_scale"] = Tensor((shape[0], 1), np.dtype(np.float32), part(name, 1))
    others = [one for one in found if one.endswith(".weight") and one not in chosen and len(found.shape(one)) == 2]
    head = r"re:.*(lm_head|predictions).*|decoder$"  # it may have no tensor; that of a ModernBERT is "decoder"
    ignored = dict.fromkeys(one.removesuffix(".weight") for one in others)
    ignored |= {} if "lm_head.weight" in chosen else {head: None}
    config |= {"quantization_config": described(kind, list(ignored))}
    _write(folder, source, found, made, {"config.json": config})
    return chosen


def weights_of_8_bits(path: str | os.PathLike[str]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return the weights of 8 bits of a checkpoint, [outputs, inputs], and their scales."""
    held = opened(path)
    return [(held[name], held[scale]) for name, scale in scales_of(read_config(Path(path)), held).items()]


def _write(folder: Path, like: Any, tensors: Tensors, made: Mapping[str, Any], texts: dict[str, Any]) -> None:
    """Write tensors in the files and the order of another checkpoint, beside its texts and these ones."""
    in_place = folder.exists() and folder.samefile(_home(like))
    others = {str(name): file for name, file in _others(like).items() if not in_place or str(name) == "config.json"}
    files = {path: [name for name in names if name in made] for path, names in tensors.files.items()}
    known = {name for names in files.values() for name in names}
    files[list(files)[-1]] += [name for name in made if name not in known]
    if tensors.index is not None:
        size = sum(int(np.prod(v.shape)) * np.dtype(v.dtype).itemsize for v in made.values())
        where = {name: file_name(path) for path, names in files.items() for name in names}
        texts[tensors.index] = {"metadata": {**tensors.about, "total_size": size}, "weight_map": where}
    write_all(folder, {
        **{file_name(p): ({name: made[name] for name in names}, tensors.texts[p]) for p, names in files.items()},
        **others, **{name: (json.dumps(text, indent=2) + "\n").encode() for name, text in texts.items()},
    })  # fmt: skip


def check_target(path: str | os.PathLike[str], like: str | os.PathLike[str], overwrite: bool = False) -> None:
    """Refuse a folder in which `save` would lose other things, or in which the checkpoint would lie beside other files.

    A checkpoint ``like`` with links to files of other folders is refused too, and one whose weights are quantized.
    """
    refuse_quantized(like)
    source, folder = opened(like), Path(path)
    own = {*map(file_name, source.files), *([source.index] if source.index else []), "config.json"}
    own |= {name.parts[0] for name in _others(like)}
    if not folder.is_dir() or not folder.samefile(_home(like)):
        refuse_others(folder, own, overwrite)


def refuse_quantized(like: str | os.PathLike[str]) -> None:
    """Refuse a checkpoint with weights of 8 bits, in whose form none is written."""
    if kind_of(read_config(Path(like))) is not None:
        raise CheckpointError(
            f"{like}: its weights are quantized, and nothing is written in their place. Name the checkpoint that it "
            "was made from."
        )


def refuse_others(folder: Path, own: set[str], overwrite: bool) -> None:
    """Refuse a file in the place of a folder, and a folder with files. What a killed process left is taken away first.

    If files are replaced, those that are written, ``own``, may be there.
    """
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{folder}: this is a file. Name a folder.")
    finish(folder)
    held = sorted(file.name for file in folder.iterdir() if file.name[0] != ".") if folder.is_dir() else []
    others = [name for name in held if name not in own]
    if others:
        raise CheckpointError(
            f"{folder}: the folder has files that are not of this checkpoint: {', '.join(others[:5])}. Name an empty "
            "folder."
        )
    if held and not overwrite:
        raise CheckpointError(
            f"{folder}: the folder has files already: {', '.join(held[:5])}. Name an empty folder, or ask for "
            "their replacement: --overwrite, or overwrite=True in Python."
        )


def write_all(folder: Path, contents: Mapping[str, bytes | Path | tuple[Mapping[str, Any], Mapping[str, str]]]) -> None:
    """Write files into a folder. All are replaced together.

    A content is bytes, another file, or tensors and their metadata, by the path of the file in the folder.
    """
    with replacing_all(folder, list(contents)) as opened:
        for file, (name, content) in zip(opened, contents.items(), strict=True):
            if isinstance(content, tuple):
                write_into(file, folder / name, *content)
            else:
                file.write(content if isinstance(content, bytes) else content.read_bytes())


def _home(path: str | os.PathLike[str]) -> Path:
    """Return the folder of a checkpoint."""
    return Path(path) if Path(path).is_dir() else Path(path).parent


def file_name(path: Path) -> str:
    """Return the name of a file of tensors that is written: its own, or that of safetensors for a file of torch."""
    return "model.safetensors" if path.suffix in SUFFIXES else path.name


def opened(path: str | os.PathLike[str]) -> Tensors:
    """Open the tensors of a checkpoint: of safetensors, or else of torch."""
    place = Path(path)
    if place.suffix in SUFFIXES:
        return torch_files.read(place)
    of_torch = [file for suffix in SUFFIXES for file in place.glob(f"*{suffix}")] if place.is_dir() else []
    of_torch = [file for file in of_torch if file.name == "pytorch_model.bin"] or of_torch  # there may be others
    if len(of_torch) == 1 and not any(place.glob("[!.]*.safetensors*")):
        return torch_files.read(of_torch[0])
    return read_safetensors(place)


def _others(like: str | os.PathLike[str]) -> dict[Path, Path]:
    """Return the texts of a checkpoint, such as the config and the tokenizer, by their paths in its folder.

    Files of other kinds, hidden files and links to folders are left out. A file beside a config has no folders. A link
    to a file of another folder, which might be private, is refused.
    """
    home = _home(like)
    whole = home.resolve()
    roots = (whole, whole.parents[1] / "blobs") if whole.parent.name == "snapshots" else (whole,)  # the hub's cache
    found = {file.relative_to(home): file for file in _texts(home, Path(like).is_dir())}
    for file in found.values():
        if not any(file.resolve().is_relative_to(root) for root in roots):
            raise CheckpointError(
                f"{file}: this is a link to a file outside of the checkpoint. Copy the file, or remove it."
            )
    return found


def copy_texts(source: str | os.PathLike[str], folder: Path) -> None:
    """Copy the texts of a checkpoint into a folder, such as the config and the tokenizer."""
    for name, file in _others(source).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, folder / name)


def _texts(source: Path, folders: bool) -> Iterator[Path]:
    for file in sorted(source.iterdir()):
        if file.name.startswith(".") or file.name.endswith(WEIGHTS):
            continue
        if file.is_file() and (file.suffix in TEXTS or file.name in ("LICENSE", "NOTICE")):
            yield file
        elif folders and file.is_dir() and not file.is_symlink() and not any(file.glob("[!.]*.safetensors*")):
            yield from _texts(file, folders)  # a folder with tensors is a checkpoint of its own


def _config(path: str | os.PathLike[str]) -> dict[str, Any]:
    file = _home(path) / "config.json"
    refuse_unfinished(file.parent)
    if not file.is_file():
        if not Path(path).exists():
            raise CheckpointError(f"{path}: there is no such file or folder.")
        hint = "Add the config.json, or pass family=nm.checkpoints.Family(...)."
        raise CheckpointError(f"{path}: there is no config.json, so the kind of the model is unknown. {hint}")
    return read_config(file)


def family_at(path: str | os.PathLike[str], family: Kind | None) -> Family:
    """Return the kind of a checkpoint: as it is given, or by its config."""
    if isinstance(family, Family):
        return family
    config: Config = _config(path)
    try:
        choose = family_of if family is None else family
        found = choose(config, opened(path)) if callable(choose) else choose
        if isinstance(found, Family):
            return found
        wanted = "family is an nm.checkpoints.Family, or a function of the config and the names that returns one"
        raise CheckpointError(f"{wanted}, got {found!r:.80}.")
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:  # of a field of another type
        missing = isinstance(error, KeyError)
        what = "config.json has no field" if missing else "a field of config.json is not as expected:"
        by = "" if family is None else f"{getattr(family, '__name__', 'family')}: "
        raise CheckpointError(f"{path}: {by}{what} {error}.") from error


def _table(about: Family, new: bool) -> Table:
    """Return the table of names, without the head if the head is new."""
    if not new:
        return about.table
    renames = tuple(rename for rename in about.table.renames if rename.theirs not in about.head)
    return Table(renames, (*about.table.kept, *map(re.escape, about.head)))


def _by_path(state: Any) -> dict[str, Any]:
    return {"/".join(map(str, key)): v for key, v in nnx.to_flat_state(state)}


def _abstract(make: Callable[..., Any]) -> dict[str, Any]:
    """Return the parameters of a model without values, by path."""
    state = nnx.state(nnx.eval_shape(lambda: make(rngs=nnx.Rngs(0))), nnx.Param)
    return {name: v for name, v in _by_path(state).items() if 0 not in v.shape}


def _parts(name: str, value: Any) -> list[str]:
    """Return the path of each block's part of a stack, such as "blocks/norm/scale"; none if it is no stack."""
    head, _, rest = name.partition("/")
    stacked = head == "blocks" and not rest.partition("/")[0].isdigit()
    return [f"blocks/{i}/{rest}" for i in range(value.shape[0])] if stacked else []


def _blocks(parameters: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return parameters by path, each block's own."""
    found: dict[str, Tensor] = {}
    for name, value in parameters.items():
        parts = _parts(name, value)
        for i, one in enumerate(parts):
            found[one] = Tensor(value.shape[1:], value.dtype, lambda value=value, i=i: np.asarray(value[i]))
        if not parts:
            found[name] = Tensor(value.shape, value.dtype, lambda value=value: np.asarray(value))
    return found
