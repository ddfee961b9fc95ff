"""The descent of a step, actual and predicted: three diagnostics of S-STE (arXiv 2409.09099, figures 1, 2 and 4).

    python -m experiments.studies descent

The GPT of methods.py is trained. At every fifth step the batch of the step is evaluated again. The loss f is that of
the pruned weights w~, in the form that inference would use. *Actual* descent is f(w~) - f(w~'). *Predicted* descent is
the first-order term <grad f(w~), w~ - w~'>. If a mask changes, the step differs from the one that the gradient
describes. The loss *under the old mask* is the loss of the new weights with the masks before the step. *Flips* are the
share of a 2:4 mask's entries that one step changes. They are measured for a dense run too, although it does not use the
mask.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import nmjax as nm
from experiments.report import curves as cv
from experiments.report.words import PLUS_MINUS, markdown_table, percent
from experiments.studies import looking, methods
from experiments.training.program import Program

NETWORK = "gpt_cpu"
METHODS = {"dense": "dense"} | {name: methods.WHOLE[name] for name in ("STE", "SR-STE", "S-STE")}
MASKS = nm.Recipe(((r"blocks/.*", "ste(2,4)"), (r".*", "dense")))  # for all methods, and for dense weights too
EVERY = 5
CASES = [{"method": method, "seed": seed} for method in METHODS for seed in range(3)]


def make_look(program: Program) -> looking.Look:
    """Return a compiled look at a step: its predicted and actual descent, and the flips of the masks."""
    pruners = [layer.sparsity.y_w for layer in program.plan.layers if layer.sparsity.y_w != nm.identity]
    masks_jump = bool(pruners) and all(pruner.facts.selects for pruner in pruners)

    def masks(state):
        model = nm.nnx.sparsify(nnx.merge(program.graph, state.params, state.rest), MASKS)
        return dict(nnx.to_flat_state(nnx.as_pure(nm.nnx.masks(model))))

    def split(state):
        flat = dict(nnx.to_flat_state(program._harden(state)))
        floats = {path: v for path, v in flat.items() if jnp.issubdtype(v.dtype, jnp.floating)}
        return floats, {path: v for path, v in flat.items() if path not in floats}

    def loss(floats, rest, batch):
        model = nnx.merge(program.hardened_graph, nnx.from_flat_state(list((floats | rest).items())))
        return program.task.loss(model, batch)[0]

    @jax.jit
    def look(before, after, arrays, norm):
        batch = program.task.batch(arrays, before.seed, before.step, program.mesh)
        (old, rest), (new, _) = split(before), split(after)
        loss_before, slope = jax.value_and_grad(loss)(old, rest, batch)
        measures = {"predicted": sum(jnp.vdot(slope[path], old[path] - new[path]) for path in old)}
        measures["actual"] = loss_before - loss(new, rest, batch)
        old_masks, new_masks = masks(before), masks(after)
        pruned = [path for path, mask in old_masks.items() if mask.ndim]
        changed = sum(jnp.sum(old_masks[path] != new_masks[path]) for path in pruned)
        measures["flips"] = changed / sum(old_masks[path].size for path in pruned)
        if masks_jump:
            raw = dict(nnx.to_flat_state(after.params))
            kept = {path: jnp.where(old_masks[path], raw[path], 0) for path in pruned}
            measures["under the old mask"] = loss_before - loss(new | kept, rest, batch)
        return measures

    return look


config, run = looking.case(NETWORK, METHODS, make_look, EVERY)


def summary(rows: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Return the figures of a run, by the names in HEAD."""
    figures = {"raised": float(np.mean(rows["actual"] < 0)), "rise": float(max(-rows["actual"].min(), 0))}
    figures["off"] = float(np.median(np.abs(rows["actual"] - rows["predicted"]) / np.abs(rows["predicted"])))
    if "under the old mask" in rows:
        figures["raised under the old mask"] = float(np.mean(rows["under the old mask"] < 0))
    return figures | {"flips": float(np.mean(rows["flips"]))}


HEAD = {  # the columns' titles
    "raised": "steps that raise the loss",
    "rise": "greatest rise of the loss in a step, nats",
    "raised under the old mask": "steps that would raise the loss under the old mask",
    "off": "median relative error of the predicted descent",
    "flips": "mask entries that flip in a step",
}


def figure(lines: list[dict]) -> tuple[str, dict[str, str]]:
    """Return a table of the figures, and two pictures over the steps: the flips, and actual over predicted descent."""
    table = [["method", *HEAD.values()]]
    runs, amount = looking.by_method(lines), []
    flips = looking.curves(runs, "flips")
    for (method, of), curve in zip(runs.items(), flips, strict=True):
        table.append([method, *_cells([summary(rows) for rows in of.values()])])
        shares = np.array([rows["actual"] / rows["predicted"] for rows in of.values()])
        medians = np.array([np.median(part) for part in np.array_split(shares, len(curve.steps), axis=1)])
        amount.append(cv.Curve(method, curve.steps, medians, curve.colour))
    words, style = "The share of mask entries that a step flips, by step.", {"say": percent, "wide": True}
    pictures = {
        "flips": cv.draw("descent-flips", flips, alt=words, up="mask entries that a step flips", bounds=(0,), **style)
    }
    words = "Actual descent as a share of the predicted descent: medians of the steps of a bin."
    up = "actual descent / predicted descent"
    pictures["amount_of_descent"] = cv.draw("descent-amount", amount, alt=words, up=up, bounds=(0, 1), **style)
    note = f"{PLUS_MINUS} The greatest rise is that of all seeds. For the curves, the steps are divided into "
    note += f"{looking.BINS} bins. Each point is the mean of a bin, or the median for the amount of descent."
    return "\n".join([markdown_table(table, narrow=True), "", note]), pictures


def _cells(summaries: list[dict[str, float]]) -> list[str]:
    cells = []
    for name in HEAD:
        values = np.array([figures[name] for figures in summaries if name in figures])
        if name == "rise":
            cells.append(f"{values.max():.2g}")
        elif len(values) > 1:
            error = values.std(ddof=1) / len(values) ** 0.5
            cells.append(f"{100 * values.mean():.3g} ± {100 * error:.2g} %")
        else:
            cells.append("")
    return cells
