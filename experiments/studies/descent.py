"""How far a step descends, and how far it should: the three diagnostics of S-STE (arXiv 2409.09099, figures 1, 2 and 4).

    python -m experiments.studies.descent

Every fifth step of a GPT's training is looked at with the batch that it was taken on, by the loss f of the pruned weights w~ as
inference would use them. *Actual* descent is f(w~) - f(w~'), *predicted* the first-order term <grad f(w~), w~ - w~'>. Where a mask
jumps, the step that was taken is not the one that the gradient spoke of; *under the old mask* is the loss that the new weights would
have had if no mask had changed. Flips are the share of a 2:4 mask's entries that one step changes; of a dense run too, whose mask
nobody uses.
"""

import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import nmjax as nm
from experiments import command, text
from experiments.program import Program

METHODS = ("dense", "ste(2,4)", "sr_ste(2,4,lam=2e-4)", "s_ste(gradient='dense')")
MASKS = nm.Recipe(((r"blocks/.*/mlp/.*", "ste(2,4)"), (r".*", "dense")))  # of all methods, and of dense weights too
EVERY = 5
RESULTS = Path(__file__).parent.parent / "results" / "descent_cpu.jsonl"


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
        model = nnx.merge(program.graph_of_hard, nnx.from_flat_state(list((floats | rest).items())))
        return program.task.loss(model, batch)[0]

    @jax.jit
    def look(before, after, arrays):
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


def run(method: str, seed: int, changes: tuple[str, ...] = ()) -> dict:
    """A run of the study's GPT, looked at."""
    words = ["launch.py", "--config=experiments/studies/s_ste.py:cpu", f"--config.sparsity.mlp={method}", *changes]
    config = command.read(words).config
    program = Program(config, text.Task(config))
    look, state = looked_at(program), program.init(jnp.uint32(seed))
    rows: dict[str, list] = {"step": []}
    for step, arrays in zip(range(program.total), program.task.feed(seed, 0, program.mesh), strict=False):
        before = jax.tree.map(jnp.copy, state) if step % EVERY == 0 else None
        state, shown = program.train(state, arrays)
        jax.block_until_ready(shown)  # programs of several devices that run at once may wait for each other without end
        if before is not None:
            rows["step"].append(step)
            for name, value in look(before, state, arrays).items():
                rows.setdefault(name, []).append(float(f"{float(value):.5g}"))
    return {"method": method, "seed": seed, "rows": rows}


def told(line: dict) -> dict[str, float]:
    """What its rows come to: how many steps raise the loss, and how far what happens is from what was predicted."""
    rows = {name: np.array(values) for name, values in line["rows"].items()}
    found = {"raised": float(np.mean(rows["actual"] < 0))}
    found["off"] = float(np.median(np.abs(rows["actual"] - rows["predicted"]) / np.abs(rows["predicted"])))
    if "under the old mask" in rows:
        found["raised under the old mask"] = float(np.mean(rows["under the old mask"] < 0))
    return found | {"flips": float(np.mean(rows["flips"]))}


def main() -> int:
    held = [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []
    for method in METHODS:
        for seed in range(3):
            if not any((line["method"], line["seed"]) == (method, seed) for line in held):
                line = run(method, seed)
                with RESULTS.open("a") as file:
                    file.write(json.dumps(line) + "\n")
                print(method, seed, told(line), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
