"""The cost of sparse models: a training step and its tracing, over those of the untouched model; and planning."""

import time
from functools import partial

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import nmjax as nm
from experiments.bench.measure import best_times, markdown

DENSE_PATCH = (r"patches", nm.methods.dense())  # 3 colours cannot be split into groups of 4


def vit(size: str, **sizes: int) -> nm.models.ViT:
    """Return a vision transformer of a size, with changes."""
    return nm.models.ViT(**nm.models.vit.SIZES[size] | sizes, pool="mean", rngs=nnx.Rngs(0))


def delivery(rounds: int) -> str:
    """Return the tables of ``bench delivery``."""
    recipes = {
        "untouched": None,
        "every rule dense": nm.Recipe(((r".*", "dense"),)),
        **{
            f"{text} on every linear": nm.Recipe((DENSE_PATCH, (r".*", text)))
            for text in ("ste()", "mvue()", "s_ste()")
        },
        "s_ste() on feed-forward": nm.Recipe(((r".*/(up|down)", "s_ste()"), (r".*", "dense"))),
    }
    x = jax.random.normal(jax.random.key(0), (32, 32, 32, 3))
    steps, tracing = {}, dict.fromkeys(recipes, float("inf"))
    for name, recipe in recipes.items():
        model = vit("Ti", depth=4, image=32, patch=4, classes=10)
        if recipe is not None:
            nm.nnx.sparsify(model, recipe)
        steps[name] = _training(model, x)
    lowered = {}
    for _ in range(3):
        for name, (step, arguments) in steps.items():
            jax.clear_caches()
            start = time.perf_counter()
            lowered[name] = jax.jit(lambda *a, step=step: step(*a)).trace(*arguments).lower()
            tracing[name] = min(tracing[name], time.perf_counter() - start)
    compiled = {name: low.compile() for name, low in lowered.items()}
    times = best_times({name: partial(f, *steps[name][1]) for name, f in compiled.items()}, rounds)
    memory = {name: f.memory_analysis().temp_size_in_bytes for name, f in compiled.items()}
    rows = {
        name: [v[name] / v["untouched"] for v in (times, memory, tracing)]
        + [f"{times[name] * 1e3:.0f} ms, {memory[name] / 2**20:.0f} MiB, {tracing[name] * 1e3:.0f} ms"]
        for name in recipes
    }
    first = markdown(
        "A training step",
        "ViT of 4 blocks, 192 wide, 32 images of 64 patches, AdamW: over the model that knows nothing of nmjax. Aim: "
        "every rule dense 1.01, 1 and 1.6; s_ste on every linear 1.25 in time.",
        rows, ["", "time", "temporary memory", "trace and lower", "absolute"],
    )  # fmt: skip
    start = time.perf_counter()
    make = lambda: nm.nnx.sparsify(vit("B", image=224, patch=16, classes=1000), recipes["s_ste() on feed-forward"])
    model = nnx.eval_shape(make)
    sparsified = time.perf_counter()
    plan = nm.nnx.plan(model, jax.ShapeDtypeStruct((8, 224, 224, 3), jnp.float32))
    planned = time.perf_counter()
    seconds = sparsified - start, planned - sparsified
    note = "Made abstractly and sparsified in {:.1f} s, planned in {:.1f} s (aim: 5 s).".format(*seconds)
    return "\n".join((first, f"## The plan of ViT-B/16\n\n{note}\n\n```\n{plan}\n```\n"))


def _training(model, x):
    """Return a step of AdamW as a function of arrays, and its arguments."""
    labels, optimizer = jnp.arange(x.shape[0]) % 10, optax.adamw(1e-3)
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def step(params, rest, state, x, now):
        model = nnx.merge(graph, params, rest)
        nm.nnx.set_step(model, now)
        rest = nnx.split(model, nnx.Param, ...)[2]

        def loss(params):
            logits = nnx.merge(graph, params, rest, copy=True)(x)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        value, grads = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), rest, state, value

    return step, (params, rest, optimizer.init(params), x, jnp.int32(0))
