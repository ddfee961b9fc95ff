"""The cost of sparse models: a training step and its tracing, over those of the untouched model; and planning."""

import time
from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

import nmjax as nm
from experiments.bench import steps
from experiments.bench.measure import Table, in_turn, ratio

DENSE_PATCH = (r"patches", "dense")  # 3 colours cannot be split into groups of 4
RECIPES = {
    "untouched": None,
    "every rule dense": nm.Recipe(((r".*", "dense"),)),
    "ste() on every linear": nm.Recipe((DENSE_PATCH, (r".*", "ste()"))),
    "mvue() on every linear": nm.Recipe((DENSE_PATCH, (r".*", "mvue()"))),
    "s_ste() on every linear": nm.Recipe((DENSE_PATCH, (r".*", "s_ste()"))),
    "s_ste() on feed-forward": nm.Recipe(((r".*/(up|down)", "s_ste()"), (r".*", "dense"))),
}


def delivery(rounds: int) -> Iterator[Table]:
    """Return the tables of ``bench delivery``."""
    images = jax.ShapeDtypeStruct((32, 32, 32, 3), jnp.float32)
    made = {name: steps.step(steps.vit(192, depth=4), images, recipe) for name, recipe in RECIPES.items()}
    times = in_turn({name: step.call for name, step in made.items()}, rounds)
    tracing = in_turn({name: step.trace for name, step in made.items()}, 3)
    base = made["untouched"].memory
    rows = {}
    for name, step in made.items():
        over = [ratio(times[name], times["untouched"]), step.memory / base, ratio(tracing[name], tracing["untouched"])]
        absolute = f"{min(times[name]) * 1e3:.0f} ms, {step.memory / 2**20:.0f} MiB, {min(tracing[name]) * 1e3:.0f} ms"
        rows[name] = [*over, absolute]
    yield Table(
        "A training step",
        "ViT of 4 blocks, 192 wide, 32 images of 64 patches, AdamW: over the model that knows nothing of nmjax. Aim: "
        "every rule dense 1.01, 1 and 1.6; s_ste on every linear 1.25 in time.",
        ["", "time", "temporary memory", "trace and lower", "absolute"], rows,
    )  # fmt: skip
    start = time.perf_counter()
    make = partial(steps.vit, 768, depth=12, image=224, patch=16, classes=1000)
    model = nnx.eval_shape(lambda: nm.nnx.sparsify(make(), RECIPES["s_ste() on feed-forward"]))
    sparsified = time.perf_counter()
    plan = nm.nnx.plan(model, jax.ShapeDtypeStruct((8, 224, 224, 3), jnp.float32))
    planned = time.perf_counter()
    seconds = sparsified - start, planned - sparsified
    note = "Made abstractly and sparsified in {:.1f} s, planned in {:.1f} s (aim: 5 s).".format(*seconds)
    yield Table("The plan of ViT-B/16", f"{note}\n\n```\n{plan}\n```")
