"""The error of dw with pruned gradients, by the number of tokens summed (MVUE, arXiv 2203.10991).

It shows for how many tokens unbiased pruning has a smaller error than least squares.

    python -m experiments.studies dw

A network is trained dense for some steps. Then each layer's dw is computed twice, with unpruned gradients of its
outputs and with pruned ones. A batch has 1 to 1,024 examples, with whole sequences or only their first tokens. The
error of one draw, ||dw' - dw|| / ||dw||, is the root of squared bias plus variance. The results hold its mean over the
layers, and over batches that share no example. A longer sum does not make the bias of a pruner of least squared error
smaller. The errors of an unbiased pruner average out. The relative error becomes smaller only if dw itself does not
average out.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from ml_collections import ConfigDict

import nmjax as nm
from experiments.report import curves as cv
from experiments.report.words import PLUS_MINUS, markdown_table, spread
from experiments.studies import looking
from experiments.training.program import Program

PRUNERS = ("mse(2,4)", "mvue(2,4)", "mvue_approx(2,4)", "mvue(1,2)", "uniform(2,4)")


class Network(NamedTuple):
    """A network of methods.py, and the batches on which its dw is computed."""

    variant: str  # of the config file
    tokens: int  # of each example
    batches: tuple[int, ...]  # their numbers of examples


NETWORKS = {
    "gpt": Network("gpt_cpu", 256, (1, 4, 16, 64)),
    "gpt of 32 tokens": Network("gpt_cpu", 32, (4, 16, 64, 256)),  # the first 32 tokens of each window
    "vit": Network("vit_cpu", 16, (4, 16, 64, 256, 1024)),
}
STEPS = 1000  # of training, before
DRAWS = 4
MOST_BATCHES = 4  # of one size
CASES = [{"model": model, "seed": seed} for model in NETWORKS for seed in range(3)]


def config(model: str, seed: int, *changes: str) -> ConfigDict:
    """Return the config of the network that is trained."""
    return looking.config(NETWORKS[model].variant, f"seed={seed}", *changes)


@functools.lru_cache(maxsize=1)
def prepared(model: str, *changes: str) -> tuple[Program, Callable, Callable]:
    """Return what is compiled once for all seeds.

    Returns:
      The program of the training; the errors of dw in the layers of the blocks, by (params, rest, step, batch,
      pruner); and the batch of a step, by (arrays, seed, step).
    """
    program = looking.program(NETWORKS[model].variant, *changes)

    @functools.partial(jax.jit, static_argnames="pruner")
    def layer_errors(params, rest, step, batch, pruner):
        model = nnx.merge(program.graph, params, rest)
        nm.nnx.sparsify(model, nm.Recipe(((r"blocks/.*", f"dw_g={pruner}"), (r".*", "dense"))))
        nm.nnx.set_step(model, step)
        return nm.nnx.gradient_errors(model, lambda model: program.task.loss(model, batch)[0], draws=DRAWS)

    draw = jax.jit(lambda arrays, seed, step: program.task.batch(arrays, seed, step, program.mesh))
    return program, layer_errors, draw


def train(model: str, seed: int, *changes: str, steps: int = STEPS) -> tuple[Any, Any]:
    """Train a network for some steps. Return its state, and examples that follow those it has seen."""
    program, _, draw = prepared(model, *changes)
    state, feed = program.init(jnp.uint32(seed)), program.task.feed(seed, 0, program.mesh)
    arrays = None
    for arrays in itertools.islice(feed, steps):
        state, shown = program.train(state, arrays)
        jax.block_until_ready(shown)
    count = -(-max(NETWORKS[model].batches) // program.config.batch)
    batches = [draw(arrays, state.seed, state.step + i) for i in range(count)]
    examples = jax.tree.map(lambda *parts: jnp.concatenate(parts), *batches)
    if program.config.experiment == "text":
        examples = jax.tree.map(lambda v: v[:, : NETWORKS[model].tokens], examples)
    return state, examples


def mean_errors(layer_errors: Callable, state: Any, batch: Any, pruner: str) -> tuple[float, float]:
    """Return the error of one draw of dw and its variance, both as means over the layers."""
    errors = jax.device_get(layer_errors(state.params, state.rest, state.step, batch, pruner))
    return error_of_one_draw(list(errors.values()), nm.parse_pruner(pruner).facts.stochastic)


def error_of_one_draw(errors: list[nm.metrics.Error], stochastic: bool, draws: int = DRAWS) -> tuple[float, float]:
    """Return the mean error of one draw, and the mean variance.

    The measured bias is that of a mean over some draws. Its share of their variance is subtracted.

    Args:
      errors: One for each layer.
      stochastic: If false, the variance is zero.
      draws: How many draws the bias is measured with.
    """
    variances = [float(e.variance) if stochastic else 0.0 for e in errors]
    squared = [float(e.bias) ** 2 - v / draws + v for e, v in zip(errors, variances, strict=True)]
    return float(np.mean(np.sqrt(np.maximum(squared, 0)))), float(np.mean(variances))


def disjoint_batches(examples: Any, n: int) -> list:
    """Return at most MOST_BATCHES batches of n examples. No example is in two of them."""
    count = len(jax.tree.leaves(examples)[0])
    return [jax.tree.map(lambda v, i=i: v[i : i + n], examples) for i in range(0, count - n + 1, n)][:MOST_BATCHES]


def run(model: str, seed: int) -> tuple[dict[str, list], list[str]]:
    """Return the tokens, errors and variances of one case, and the notes on its data."""
    program, layer_errors, _ = prepared(model)
    state, examples = train(model, seed)
    network = NETWORKS[model]
    rows: dict[str, list] = {"tokens": [count * network.tokens for count in network.batches]}
    for pruner in PRUNERS:
        means = []
        for n in network.batches:
            batches = disjoint_batches(examples, n)
            means.append(np.mean([mean_errors(layer_errors, state, batch, pruner) for batch in batches], 0))
        rows[pruner] = [float(f"{error:.4g}") for error, _ in means]
        rows[f"variance of {pruner}"] = [float(f"{variance:.4g}") for _, variance in means]
    return rows, program.task.notes


def figure(lines: list[dict]) -> tuple[str, dict[str, str]]:
    """Return a table with a part for each network, and a picture of each."""
    table, pictures = [], {}
    for model in dict.fromkeys(line["case"]["model"] for line in lines):
        runs = [line["rows"] for line in lines if line["case"]["model"] == model]
        table += [_table(model, runs), ""]
        pictures[model.replace(" ", "_")] = _draw(model, runs)
    return "\n".join([*table, PLUS_MINUS]), pictures


def _table(model: str, runs: list[dict]) -> str:
    head = [f"{model}: tokens summed", *(f"{n:,}" for n in runs[0]["tokens"])]
    rows = [[*head, "variance at the largest batch, relative to `mvue(2,4)`"]]
    least = np.mean([run["variance of mvue(2,4)"][-1] for run in runs])
    for pruner in PRUNERS:
        cells = [spread(values, ".3f") for values in zip(*(run[pruner] for run in runs), strict=True)]
        share = np.mean([run[f"variance of {pruner}"][-1] for run in runs]) / least
        rows.append([f"`{pruner}`", *cells, f"{share:.2f}" if share else ""])
    return markdown_table(rows, narrow=True)


def _draw(model: str, runs: list[dict]) -> str:
    steps = np.log2(runs[0]["tokens"])  # of the axis: each doubling is a step
    curves = []
    for n, pruner in enumerate(PRUNERS):
        by_seed = [cv.Curve("", steps, np.array(rows[pruner])) for rows in runs]
        curves.append(cv.banded(by_seed, pruner, colour=f"s{n}"))
    words = f"{model}: error of one draw of dw, relative to the norm of dw, by the number of tokens."
    options = {"bounds": (0,), "along": "tokens", "since": steps[0], "say_step": lambda x: f"{2**x:,.0f}"}
    return cv.draw(f"dw-{model}", curves, alt=words, up="relative error of one draw of dw", wide=True, **options)
