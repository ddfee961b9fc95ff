"""How noisy gradients are while a network gets sparse (progressive gradient flow, arXiv 2402.04744, section 4).

    python -m experiments.studies noise

Scalars of the feed-forward weights: the variance of |g| over all entries, of the gradient as it is before it is clipped; and of Adam's
second moment v its norm and its variance, for the paper writes of the one and draws the other. It shows both for SR-STE and MdGf at 1:16, of single runs.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import nmjax as nm
from experiments.report import curves as cv
from experiments.studies import looking, pgf
from experiments.training.program import Program

METHODS = ["dense", *(m for m in pgf.published("cpu") if "(1,16" in m and "stepwise" not in m)]
NAMES = (
    "dense",
    "STE",
    "SR-STE",
    "MdGf linear",
    "its autodiff",
    "MdGf exp.",
    "its autodiff",
    "SdGf geom.",
)  # in pictures
COLOURS = ("s0", "s1", "s2", "s3", "s3", "s4", "s4", "s7")
EVERY, B1 = 10, 0.9  # steps; and of the page's Adam
CASES = [{"method": method, "seed": seed} for method in METHODS for seed in range(3)]


def looked_at(program: Program):
    """A compiled look at a step: of Adam's moments before and after it, out of which comes the gradient that it was given."""

    def weights(tree):
        return [v for path, v in nnx.to_flat_state(tree) if "mlp" in path and path[-1] == "kernel"]

    @jax.jit
    def look(before, after, arrays, norm):
        first = [weights(optax.tree_utils.tree_get(state.opt, "mu")) for state in (before, after)]
        clipped = [(new - B1 * old) / (1 - B1) for old, new in zip(*first, strict=True)]
        whole = jnp.maximum(norm / program.config.clip, 1.0)
        found = {"gradient variance": nm.metrics.gradient_variance([g * whole for g in clipped])}
        second = weights(optax.tree_utils.tree_get(after.opt, "nu"))
        found["second moment"] = optax.tree.norm(second)
        return found | {"variance of the second moment": nm.metrics.gradient_variance(second)}

    return look


def config(method: str, seed: int, *changes: str):
    """Of a run that is looked at."""
    return looking.config("pgf", f"sparsity.mlp={method}", f"seed={seed}", *changes)


def run(method: str, seed: int, *changes: str) -> tuple[dict, list[str]]:
    """A run of the study's ViT, looked at."""
    program, look = looking.prepared(looked_at, "pgf", (f"sparsity.mlp={method}", *changes))
    return looking.rows(program, look, seed, EVERY), program.task.notes


def told(line: dict) -> str:
    return ", ".join(f"{name} {values[-1]:.3g} at the end" for name, values in line["rows"].items() if name != "step")


SHOWN = {  # of a step
    "gradient variance": "Variance of |g| over the feed-forward weights",
    "second moment": "Norm of Adam's second moment",
    "variance of the second moment": "Variance of Adam's second moment",
}


def figure(lines: list[dict]) -> tuple[str, dict[str, str]]:
    """All over the steps, and what they are in the last tenth, of dense's."""
    table = [f"| method, last tenth of its steps | {', of dense | '.join(SHOWN)}, of dense |", "|---" * 4 + "|"]
    curves: dict[str, list] = {name: [] for name in SHOWN}
    dense: dict[str, dict] = {}
    for method in dict.fromkeys(line["case"]["method"] for line in lines):
        at = METHODS.index(method)
        looks = {"label": NAMES[at], "colour": COLOURS[at], "dash": cv.DASHES["autodiff" in method]}
        of, cells = (
            {line["case"]["seed"]: line["rows"] for line in lines if line["case"]["method"] == method},
            [f"`{method}`"],
        )
        for name in SHOWN:
            each = {seed: cv.Curve("", np.array(rows["step"]), np.array(rows[name])) for seed, rows in of.items()}
            last = {seed: float(np.mean(c.values[-max(len(c.values) // 10, 1) :])) for seed, c in each.items()}
            dense.setdefault(name, last)
            shares = [value / dense[name][seed] for seed, value in last.items() if seed in dense[name]]
            error = f" ± {np.std(shares, ddof=1) / len(shares) ** 0.5:.2f}" if len(shares) > 1 else ""
            cells.append(f"{np.mean(shares):.2f}{error}")
            smooth = [cv.smoothed(c, 20)[-1] for c in each.values()]
            curves[name].append(cv.banded(smooth, method, **looks))
        table.append(f"| {' | '.join(cells)} |")
    said = "Means over seeds of the quotient to dense of the same seed, and its standard error; curves are means of 20 bins of steps."
    draw = lambda name: cv.draw(
        f"noise-{name.replace(' ', '-')}", curves[name], alt=f"{SHOWN[name]}, by step.", log=True
    )
    return "\n".join([*table, "", said]), {name.replace(" ", "_"): draw(name) for name in SHOWN if " of " not in name}
