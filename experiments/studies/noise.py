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
    runs = looking.by_method(lines)
    dense = next(iter(runs.values()))  # the first method
    heads = {f"{SHORT[ALL]} / dense, all steps": lambda rows: np.mean(rows[ALL])}
    for name in MEASURES:
        last = lambda rows, name=name: np.mean(rows[name][-max(len(rows[name]) // 10, 1) :])
        heads[f"{SHORT.get(name, name)} / dense, last tenth"] = last
    table = [["method", *heads]]
    for method, of in runs.items():
        both = [(rows, dense[seed]) for seed, rows in of.items() if seed in dense]
        table.append([method, *(spread([mean(a) / mean(b) for a, b in both], ".2f") for mean in heads.values())])
    note = f"Ratios to the dense run with the same seed: means over seeds. {PLUS_MINUS} "
    note += "For the curves, the steps are divided into 20 bins. Each point is the mean of a bin."
    pictures = {}
    for name in DRAWN:
        curves, alt = looking.curves(runs, name), f"{MEASURES[name]}, by step."
        pictures[name.replace(" ", "_")] = cv.draw(
            f"noise-{name.replace(' ', '-')}", curves, alt=alt, up=MEASURES[name], log=True, wide=True
        )
    return "\n".join([markdown_table(table, narrow=True), "", note]), pictures
