"""What pruned gradients make of dw, by how much is summed (MVUE, arXiv 2203.10991): where least squares begin to lose.

    python -m experiments.studies dw

A network is trained dense for some steps. Then, of batches of one sequence or picture to hundreds, of whole sequences and of
their beginnings, each layer's dw is computed with whole gradients of its outputs and with pruned ones. The error of one draw,
||dw' - dw|| / ||dw||, is the root of its squared bias and its variance; the mean over the layers, and over batches that have no
example in common, is told. A pruner of least squared error is biased by as much however long the sum; of an unbiased one the errors
of the summands average out, once what they are errors of does not.
"""

import functools
import itertools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import nmjax as nm
from experiments.report import curves as cv
from experiments.report.words import large
from experiments.studies import looking

PRUNERS = ("mse(2,4)", "mvue(2,4)", "mvue_approx(2,4)", "mvue(1,2)", "uniform(2,4)")


class Of(NamedTuple):
    """What is looked at: the network of a study's page, on batches of so many examples, each of so many tokens."""

    page: str
    tokens: int
    batches: tuple[int, ...]


MODELS = {
    "gpt": Of("s_ste", 128, (1, 4, 16, 64, 128)),
    "gpt of 32 tokens": Of("s_ste", 32, (4, 16, 64, 256)),  # the first ones of its windows
    "vit": Of("pgf", 16, (4, 16, 64, 256, 1024)),
}
AFTER = 100  # steps
DRAWS = 4
APART = 4  # batches of one size, of other examples each, as far as there are so many
CASES = [{"model": model, "seed": seed} for model in MODELS for seed in range(3)]


def config(model: str, seed: int, *changes: str):
    """Of the network that is trained."""
    return looking.config(MODELS[model].page, f"seed={seed}", *changes)


@functools.lru_cache(maxsize=1)
def prepared(model: str, *changes: str):
    """What is compiled once for all seeds: the training, and for each pruner the errors of dw in the layers of the blocks."""
    program = looking.program(MODELS[model].page, *changes)

    @functools.partial(jax.jit, static_argnames="pruner")
    def found(params, rest, step, batch, pruner):
        model = nnx.merge(program.graph, params, rest)
        nm.nnx.sparsify(model, nm.Recipe(((r"blocks/.*", f"drhs_g={pruner}"), (r".*", "dense"))))
        nm.nnx.set_step(model, step)
        return nm.nnx.gradient_errors(model, lambda model: program.task.loss(model, batch)[0], draws=DRAWS)

    drawn = jax.jit(lambda arrays, seed, step: program.task.batch(arrays, seed, step, program.mesh))
    return program, found, drawn


def trained(model: str, seed: int, *changes: str, after: int = AFTER):
    """The state of a network that has been trained for some steps, and examples that it goes on with."""
    program, _, drawn = prepared(model, *changes)
    state, feed = program.init(jnp.uint32(seed)), program.task.feed(seed, 0, program.mesh)
    arrays = None
    for arrays in itertools.islice(feed, after):
        state, shown = program.train(state, arrays)
        jax.block_until_ready(shown)
    steps = -(-max(MODELS[model].batches) // program.config.batch)
    many = [drawn(arrays, state.seed, state.step + i) for i in range(steps)]
    begun = lambda v: v[:, : MODELS[model].tokens] if program.config.experiment == "text" else v
    return state, jax.tree.map(lambda *parts: begun(jnp.concatenate(parts)), *many)


def errors(found: Callable, state, batch, pruner: str) -> tuple[float, float]:
    """Of dw over the layers: the mean error of one draw, and the mean variance."""
    each = jax.device_get(found(state.params, state.rest, state.step, batch, pruner))
    return of_one_draw(list(each.values()), nm.parse_pruner(pruner).stochastic)


def of_one_draw(errors: list[nm.metrics.Error], drawn: bool, draws: int = DRAWS) -> tuple[float, float]:
    """The mean error of one draw, and the mean variance: what the bias of so many draws has of their variance is taken off it."""
    variances = [float(e.variance) if drawn else 0.0 for e in errors]
    squared = [float(e.bias) ** 2 - v / draws + v for e, v in zip(errors, variances, strict=True)]
    return float(np.mean(np.sqrt(np.maximum(squared, 0)))), float(np.mean(variances))


def apart(many, n: int) -> list:
    """Batches of n examples, none of which is in two."""
    there = len(jax.tree.leaves(many)[0])
    return [jax.tree.map(lambda v, i=i: v[i : i + n], many) for i in range(0, there - n + 1, n)][:APART]


def run(model: str, seed: int) -> tuple[dict, list[str]]:
    program, found, _ = prepared(model)
    state, many = trained(model, seed)
    of = MODELS[model]
    rows: dict[str, list] = {"tokens": [count * of.tokens for count in of.batches]}
    for pruner in PRUNERS:
        each = [np.mean([errors(found, state, batch, pruner) for batch in apart(many, n)], 0) for n in of.batches]
        rows[pruner] = [float(f"{error:.4g}") for error, _ in each]
        rows[f"variance of {pruner}"] = [float(f"{variance:.4g}") for _, variance in each]
    return rows, program.task.notes


def told(line: dict) -> str:
    rows = line["rows"]
    ends = lambda name: f"{rows[name][0]:.3g} to {rows[name][-1]:.3g}"
    return ", ".join(f"{name} {ends(name)}" for name in PRUNERS)


def figure(lines: list[dict]) -> tuple[str, dict[str, str]]:
    """A table and a picture of each network."""
    table, pictures = [], {}
    for model in dict.fromkeys(line["case"]["model"] for line in lines):
        of = [line["rows"] for line in lines if line["case"]["model"] == model]
        tokens = of[0]["tokens"]
        shown = []
        table += [
            f"| {model}: tokens summed | {' | '.join(f'{n:,}' for n in tokens)} | variance at the end, of the least |"
        ]
        table += ["|---" * (len(tokens) + 2) + "|"]
        least = np.mean([rows["variance of mvue(2,4)"][-1] for rows in of])
        for n, pruner in enumerate(PRUNERS):
            each = np.array([rows[pruner] for rows in of])
            cells = [
                f"{mean:.3f} ± {spread:.3f}" for mean, spread in zip(each.mean(0), each.std(0, ddof=1), strict=True)
            ]
            share = np.mean([rows[f"variance of {pruner}"][-1] for rows in of]) / least
            table += [f"| `{pruner}` | {' | '.join(cells)} | {f'{share:.2f}' if share else ''} |"]
            shown.append(cv.banded([cv.Curve("", np.log2(tokens), values) for values in each], pruner, colour=f"s{n}"))
        table += [""]
        words = f"{model}: error of one draw of dw, of its norm, by the tokens that it sums over."
        pictures[model.replace(" ", "_")] = cv.draw(
            f"dw-{model}",
            shown,
            alt=words,
            bounds=(0,),
            along="tokens",
            since=np.log2(tokens[0]),
            say_step=lambda x: large(2**x),
        )
    return "\n".join([*table, "Mean ± deviation over seeds."]), pictures
