"""How noisy gradients are while a network gets sparse (progressive gradient flow, arXiv 2402.04744, section 4).

    python -m experiments.studies noise

Two scalars of the feed-forward weights, as the paper has them: the variance of |g| over all entries, of the gradient as it is before it is
clipped, and the norm of Adam's second moment v. The paper shows both for SR-STE and MdGf at 1:16, of single runs.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import nmjax as nm
from experiments import command, image
from experiments.program import Program
from experiments.report import curves as cv
from experiments.studies import pgf

METHODS = ["dense", *(m for m in pgf.published("cpu") if "(1,16" in m and "stepwise" not in m)]
EVERY, B1 = 10, 0.9  # steps; and of the page's Adam
CASES = [{"method": method, "seed": seed} for method in METHODS for seed in range(3)]


def looked_at(program: Program):
    """A compiled look at a step: of Adam's moments before and after it, out of which comes the gradient that it was given."""

    def weights(tree):
        return [v for path, v in nnx.to_flat_state(tree) if "mlp" in path and path[-1] == "kernel"]

    @jax.jit
    def look(before, after, norm):
        first = [weights(optax.tree_utils.tree_get(state, "mu")) for state in (before, after)]
        clipped = [(new - B1 * old) / (1 - B1) for old, new in zip(*first, strict=True)]
        whole = jnp.maximum(norm / program.config.clip, 1.0)
        found = {"gradient variance": nm.metrics.gradient_variance([g * whole for g in clipped])}
        return found | {"second moment": optax.tree.norm(weights(optax.tree_utils.tree_get(after, "nu")))}

    return look


def run(method: str, seed: int, changes: tuple[str, ...] = ()) -> tuple[dict, list[str]]:
    """A run of the study's ViT, looked at."""
    words = ["launch.py", "--config=experiments/studies/pgf.py:cpu", f"--config.sparsity.mlp={method}", *changes]
    config = command.read(words).config
    program = Program(config, image.Task(config))
    look, state = looked_at(program), program.init(jnp.uint32(seed))
    rows: dict[str, list] = {"step": []}
    for step, arrays in zip(range(program.total), program.task.feed(seed, 0, program.mesh), strict=False):
        before = jax.tree.map(jnp.copy, state.opt) if step % EVERY == 0 else None
        state, shown = program.train(state, arrays)
        jax.block_until_ready(shown)
        if before is not None:
            rows["step"].append(step)
            for name, value in look(before, state.opt, shown["gradient_norm"]).items():
                rows.setdefault(name, []).append(float(f"{float(value):.5g}"))
    return rows, program.task.notes


def told(line: dict) -> str:
    return ", ".join(f"{name} {values[-1]:.3g} at the end" for name, values in line["rows"].items() if name != "step")


def figure(lines: list[dict]) -> tuple[str, dict[str, str]]:
    """Both over the steps, and what they are in the last tenth."""
    table = [
        "| method | variance of gradients, last tenth | of dense | second moment, last tenth | of dense |",
        "|---" * 5 + "|",
    ]
    shown: dict[str, list] = {"gradient variance": [], "second moment": []}
    dense: dict[str, np.ndarray] = {}
    for n, method in enumerate(dict.fromkeys(line["case"]["method"] for line in lines)):
        of = sorted((line for line in lines if line["case"]["method"] == method), key=lambda line: line["case"]["seed"])
        cells = [f"`{method}`"]
        for name, curves in shown.items():
            each = [cv.Curve("", np.array(line["rows"]["step"]), np.array(line["rows"][name])) for line in of]
            last = np.array([np.mean(c.values[-max(len(c.values) // 10, 1) :]) for c in each])
            share = last / dense.setdefault(name, last)
            cells += [f"{last.mean():.2e}", f"{share.mean():.2f} ± {share.std(ddof=1) / len(share) ** 0.5:.2f}"]
            each = [cv.smoothed(c, 20)[-1] for c in each]
            curves.append(cv.banded(each, method, colour=f"s{n % 8}", dash=cv.DASHES[n // 8]))
        table.append(f"| {' | '.join(cells)} |")
    words = {
        "gradient variance": "Variance of |g| over the feed-forward weights",
        "second moment": "Norm of Adam's second moment",
    }
    draw = lambda name: cv.draw(f"noise-{name[0]}", shown[name], alt=f"{words[name]}, by step.", log=True)
    return "\n".join(table), {name.replace(" ", "_"): draw(name) for name in shown}
