"""How far a step descends, and how far it should: the three diagnostics of S-STE (arXiv 2409.09099, figures 1, 2 and 4).

    python -m experiments.studies descent

Every fifth step of a GPT's training is looked at with the batch that it was taken on, by the loss f of the pruned weights w~ as
inference would use them. *Actual* descent is f(w~) - f(w~'), *predicted* the first-order term <grad f(w~), w~ - w~'>. Where a mask
jumps, the step that was taken is not the one that the gradient spoke of; *under the old mask* is the loss that the new weights would
have had if no mask had changed. Flips are the share of a 2:4 mask's entries that one step changes; of a dense run too, whose mask
nobody uses.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import nmjax as nm
from experiments.report import curves as cv
from experiments.report.words import percent
from experiments.studies import looking
from experiments.training.program import Program

METHODS = ("dense", "ste(2,4)", "sr_ste(2,4,lam=2e-4)", "s_ste(gradient='dense')")
MASKS = nm.Recipe(((r"blocks/.*/mlp/.*", "ste(2,4)"), (r".*", "dense")))  # of all methods, and of dense weights too
EVERY = 5
CASES = [{"method": method, "seed": seed} for method in METHODS for seed in range(3)]


def looked_at(program: Program):
    """A compiled look at a step: of the states before and after it, on its batch."""
    ruled = [p for p in (layer.sparsity.fwd_rhs for layer in program.plan.layers) if p != nm.identity]
    jumps = bool(ruled) and all(p.selects for p in ruled)

    def model(state):
        return nnx.merge(program.graph, state.params, state.rest)

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
        at, slope = jax.value_and_grad(loss)(old, rest, batch)
        found = {"predicted": sum(jnp.vdot(slope[path], old[path] - new[path]) for path in old)}
        found["actual"] = at - loss(new, rest, batch)
        masks = [dict(nnx.to_flat_state(nnx.as_pure(nm.nnx.masks(model(state), MASKS)))) for state in (before, after)]
        cut = [path for path, mask in masks[0].items() if mask.ndim]
        changed = sum(jnp.sum(masks[0][path] != masks[1][path]) for path in cut)
        found["flips"] = changed / sum(masks[0][path].size for path in cut)
        if jumps:
            raw = dict(nnx.to_flat_state(after.params))
            kept = {path: jnp.where(masks[0][path], raw[path], 0) for path in cut}
            found["under the old mask"] = at - loss(new | kept, rest, batch)
        return found

    return look


def config(method: str, seed: int, *changes: str):
    """Of a run that is looked at."""
    return looking.config("s_ste", f"sparsity.mlp={method}", f"seed={seed}", *changes)


def run(method: str, seed: int, *changes: str) -> tuple[dict, list[str]]:
    """A run of the study's GPT, looked at."""
    program, look = looking.prepared(looked_at, "s_ste", (f"sparsity.mlp={method}", *changes))
    return looking.rows(program, look, seed, EVERY), program.task.notes


def summary(line: dict) -> dict[str, float]:
    """What its rows come to: how many steps raise the loss, and how far what happens is from what was predicted."""
    rows = {name: np.array(values) for name, values in line["rows"].items()}
    found = {"raised": float(np.mean(rows["actual"] < 0))}
    found["off"] = float(np.median(np.abs(rows["actual"] - rows["predicted"]) / np.abs(rows["predicted"])))
    if "under the old mask" in rows:
        found["raised under the old mask"] = float(np.mean(rows["under the old mask"] < 0))
    return found | {"flips": float(np.mean(rows["flips"]))}


def told(line: dict) -> str:
    return ", ".join(f"{name} {value:.3g}" for name, value in summary(line).items())


HEAD = {  # what stands over the columns
    "raised": "steps that raise the loss",
    "raised under the old mask": "they would under the old mask",
    "off": "descent off its prediction, median",
    "flips": "mask entries that flip a step",
}


def figure(lines: list[dict]) -> tuple[str, dict[str, str]]:
    """What the rows come to; over the steps the flips, and how much of the descent that was predicted there was."""
    table, flips, amount = [f"| method | {' | '.join(HEAD.values())} |", "|---" * (len(HEAD) + 1) + "|"], [], []
    for n, method in enumerate(dict.fromkeys(line["case"]["method"] for line in lines)):
        of = [line for line in lines if line["case"]["method"] == method]
        found, cells = [summary(line) for line in of], [f"`{method}`"]
        for name in HEAD:
            values = 100 * np.array([each[name] for each in found if name in each])
            cells.append(f"{values.mean():.3g} ± {values.std(ddof=1):.2g} %" if len(values) > 1 else "")
        table.append(f"| {' | '.join(cells)} |")
        rows = [{name: np.array(values) for name, values in line["rows"].items()} for line in of]
        each = [cv.smoothed(cv.Curve("", row["step"], row["flips"]), 20)[-1] for row in rows]
        flips.append(cv.banded(each, method, colour=f"s{n}"))
        shares = np.array([row["actual"] / row["predicted"] for row in rows])
        share = np.array([np.median(bin) for bin in np.array_split(shares, len(each[0].steps), axis=1)])
        amount.append(cv.Curve(method, flips[-1].steps, share, f"s{n}"))
    words = "The share of mask entries that a step flips, by step."
    pictures = {"flips": cv.draw("descent-flips", flips, alt=words, say=percent, bounds=(0,))}
    words = "By how much the loss fell, of what was predicted: medians of the steps of a bin."
    pictures["amount_of_descent"] = cv.draw("descent-amount", amount, alt=words, say=percent, bounds=(0, 1))
    return "\n".join(
        [
            *table,
            "",
            "Mean ± deviation over seeds. The curves are of 20 bins of steps: means, and of the amount of descent medians.",
        ]
    ), pictures
