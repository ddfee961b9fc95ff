"""The noise of gradients while a network gets sparse (progressive gradient flow, arXiv 2402.04744, section 4).

    python -m experiments.studies noise

The study measures three scalars of the feed-forward weights: the variance of the absolute gradient before clipping, and
the norm and the variance of Adam's second moment. The paper does not make clear which of the last two
it means. It shows SR-STE and MdGf at 1:16, single runs of each. The network is the ViT of methods.py. All layers of its
blocks are pruned.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import nmjax as nm
from experiments.report import curves as cv
from experiments.report.words import PLUS_MINUS, markdown_table, spread
from experiments.studies import forms, looking
from experiments.training.program import Program

NETWORK = "vit_cpu"
NAMES = (forms.SR_STE, forms.LINEAR, forms.AUTODIFF, forms.EXPONENTIAL, forms.GEOMETRIC)
METHODS = {"dense": "dense"} | {name: forms.FORMS[name] for name in NAMES}
EVERY = 10
B1 = 0.9  # of Adam, in the config of the study
CASES = [{"method": method, "seed": seed} for method in METHODS for seed in range(3)]


def make_look(program: Program) -> looking.Look:
    """Return a compiled look at a step. It computes the gradient from Adam's first moment before and after the step."""

    def weights(tree):
        return [v for path, v in nnx.to_flat_state(tree) if "mlp" in path and path[-1] == "kernel"]

    @jax.jit
    def look(before, after, arrays, norm):
        old, new = (weights(optax.tree_utils.tree_get(state.opt, "mu")) for state in (before, after))
        clipped = [(n - B1 * o) / (1 - B1) for o, n in zip(old, new, strict=True)]
        unclip = jnp.maximum(norm / program.config.clip, 1.0)
        second = weights(optax.tree_utils.tree_get(after.opt, "nu"))
        return {
            "gradient variance": nm.metrics.gradient_variance([g * unclip for g in clipped]),
            "second moment": optax.tree.norm(second),
            "variance of the second moment": nm.metrics.gradient_variance(second),
        }

    return look


config, run = looking.case(NETWORK, METHODS, make_look, EVERY)


MEASURES = {  # what a look returns, and the titles of its pictures
    "gradient variance": "Variance of the absolute weight gradient over the feed-forward weights",
    "second moment": "Norm of Adam's second moment",
    "variance of the second moment": "Variance of Adam's second moment",
}
SHORT = {"gradient variance": "variance of |dw|"}  # in the head of the table
ALL = "gradient variance"  # the table has its mean over all steps too
DRAWN = ("gradient variance", "second moment")  # the measures with a picture; the table has all


def figure(lines: list[dict]) -> tuple[str, dict[str, str]]:
    """Return a table relative to dense, of all steps and of the last tenth of them, and pictures over all steps."""
    heads = [f"{SHORT.get(name, name)} / dense, last tenth" for name in MEASURES]
    heads.insert(0, f"{SHORT[ALL]} / dense, all steps")
    table = [["method", *heads]]
    curves: dict[str, list[cv.Curve]] = {name: [] for name in MEASURES}
    dense: dict[str, dict[int, float]] = {}
    dense_mean: dict[int, float] = {}
    for n, method in enumerate(dict.fromkeys(line["case"]["method"] for line in lines)):
        rows_by_seed = {line["case"]["seed"]: line["rows"] for line in lines if line["case"]["method"] == method}
        means = {seed: float(np.mean(rows[ALL])) for seed, rows in rows_by_seed.items()}
        dense_mean = dense_mean or means  # dense is the first method
        cells = [method, _quotient(means, dense_mean)]
        for name in MEASURES:
            by_seed = {
                seed: cv.Curve("", np.array(rows["step"]), np.array(rows[name])) for seed, rows in rows_by_seed.items()
            }
            last = {seed: _last_tenth(curve) for seed, curve in by_seed.items()}
            dense.setdefault(name, last)
            cells.append(_quotient(last, dense[name]))
            smooth = [cv.smoothed(curve, 20)[-1] for curve in by_seed.values()]
            curves[name].append(cv.banded(smooth, method, colour=f"s{n}"))
        table.append(cells)
    note = f"Ratios to the dense run with the same seed: means over seeds. {PLUS_MINUS} "
    note += "For the curves, the steps are divided into 20 bins. Each point is the mean of a bin."
    pictures = {name.replace(" ", "_"): _draw(name, curves[name]) for name in DRAWN}
    return "\n".join([markdown_table(table, narrow=True), "", note]), pictures


def _last_tenth(curve: cv.Curve) -> float:
    return float(np.mean(curve.values[-max(len(curve.values) // 10, 1) :]))


def _quotient(values: dict[int, float], dense: dict[int, float]) -> str:
    """Return the mean over seeds of the ratio to dense, and its standard error, as text."""
    shares = [value / dense[seed] for seed, value in values.items() if seed in dense]
    return spread(shares, ".2f")


def _draw(name: str, curves: list[cv.Curve]) -> str:
    return cv.draw(f"noise-{name.replace(' ', '-')}", curves, alt=f"{MEASURES[name]}, by step.", log=True)
