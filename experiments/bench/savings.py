"""The measured time and memory of training steps: sparse and dense, and of models that are lean or use remat."""

import statistics
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import nmjax as nm
from experiments.bench import turns
from experiments.bench.measure import cublas_only, in_turn, markdown, over, peak_bytes

METHODS = (
    "drhs_g=rows(mvue(2,4))",
    "drhs_g=rows(mvue(1,4))",
    "drhs_g=rows(mvue(1,64))",  # nearly nothing of dw is left: the most that rows in dw can save
    "drhs_g=rows(mvue(1,4),by='both')",
    "drhs_lhs=rows(mvue(1,4))",
    "drhs_lhs=mvue(2,4)",
    "s_ste(2,4)",
)
KEPT = {"": {}, "lean": {"lean": True}, "remat": {"remat": True}}

Made = tuple[nnx.Module, Callable[[Any, Any], jax.Array], Any]
"""A model, its loss of (model, batch), and a batch."""


def gpt(width: int, tokens: int, **form: bool) -> Made:
    """Return a GPT of two stacked blocks, of texts of 128 tokens."""
    sizes = {"width": width, "hidden": 4 * width, "heads": width // 64, "depth": 2, "vocabulary": 256, "length": 128}
    model = nm.models.GPT(**sizes, scan=True, rngs=nnx.Rngs(0), **form)
    texts = jnp.asarray(np.random.default_rng(0).integers(0, 256, (tokens // 128, 128)))

    def loss(model: Any, texts: jax.Array) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(model(texts)[:, :-1], texts[:, 1:]).mean()

    return model, loss, texts


def vit(width: int, tokens: int, **form: bool) -> Made:
    """Return a ViT of two stacked blocks, of images of 64 patches."""
    sizes = {"width": width, "hidden": 4 * width, "heads": width // 64, "depth": 2, "image": 32, "patch": 4}
    model = nm.models.ViT(**sizes, classes=10, pool="mean", scan=True, rngs=nnx.Rngs(0), **form)
    return model, _classify, _images(tokens // 64)


def resnet(width: int, tokens: int, **form: bool) -> Made:
    """Return a ResNet of three bottlenecks of two stages. Most of its convolutions have a kernel of 1."""
    del form  # no block is computed again
    model = nm.models.ResNet(blocks=(2, 1), bottleneck=True, width=width, stem="cifar", classes=10, rngs=nnx.Rngs(0))
    return model, _classify, _images(tokens // 1024)


def _classify(model: Any, batch: tuple[jax.Array, jax.Array]) -> jax.Array:
    images, labels = batch
    return optax.softmax_cross_entropy_with_integer_labels(model(images), labels).mean()


def _images(count: int) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(0)
    images, labels = rng.standard_normal((count, 32, 32, 3)), rng.integers(0, 10, count)
    return jnp.asarray(images, jnp.float32), jnp.asarray(labels)


MODELS = {  # the maker, two widths, and the number of tokens or positions of a step
    "GPT": (gpt, (384, 768), 2048),
    "ViT": (vit, (384, 768), 2048),
    "ResNet": (resnet, (64, 128), 16384),
}


def savings(methods: Iterable[str], rounds: int, models: Iterable[str] = tuple(MODELS)) -> str:
    """Return the tables of ``bench savings``.

    Args:
      methods: The methods of the linear layers of blocks, or of the convolutions of stages.
      rounds: How often everything is timed.
      models: Some names of `MODELS`.
    """
    tables = []
    for name in models:
        make, widths, tokens = MODELS[name]
        for width in widths:
            title = f"{name}, {width} wide, {tokens:,} tokens"
            tables.append(_table(title, partial(make, width, tokens), methods, rounds))
            print(tables[-1], file=sys.stderr, flush=True)  # the next one takes minutes
    return "\n".join(tables)


def _table(title: str, make: Callable[..., Made], methods: Iterable[str], rounds: int) -> str:
    forms = KEPT if make.func is not resnet else {"": {}}
    calls, facts = {}, {}
    for text in ("dense", *methods):
        for kept, form in forms.items():
            if kept == "remat" and text != "dense" and "drhs_lhs" not in text:  # it would keep what dense keeps
                continue
            name = f"{text}, {kept}" if kept else text
            calls[name], facts[name] = step(text, *make(**form))
    peaks = {name: peak_bytes(call) for name, call in calls.items()}
    seconds = in_turn(calls, rounds)
    rows = {}
    for name, times in seconds.items():
        peak, base = peaks[name], peaks["dense"]
        rows[f"`{name}`"] = [
            over(times, seconds["dense"]),
            facts[name]["memory"] / facts["dense"]["memory"],
            peak / base if peak is not None and base else None,
            facts[name]["compile"] / facts["dense"]["compile"],
            f"{statistics.median(times) * 1e3:,.0f} ms, {facts[name]['memory'] / 2**20:,.0f} MiB, "
            f"{facts[name]['compile']:.1f} s",
        ]
    return markdown(
        title,
        "Over the dense step in the same process: the median of the rounds' ratios, with the quartiles. Temporary "
        "memory is XLA's count. The peak is the resident memory that a step adds to the process, which Linux tells. "
        f"Each step is compiled once. AdamW, float32.{_left_dense(facts)}",
        rows, ["", "time", "temporary memory", "peak of the process", "trace and compile", "absolute"],
    )  # fmt: skip


def _left_dense(facts: dict[str, dict[str, float]]) -> str:
    """Return a sentence about the layers that cannot take a method."""
    left = [f"`{name}` in {fact['dense']:.0f}" for name, fact in facts.items() if fact["dense"]]
    return f" Layers that a method does not fit are dense: {', '.join(left)}." if left else ""


def step(
    text: str, model: nnx.Module, loss: Callable, batch: Any, layers: str = r"blocks/.*|stages/.*",
    backend: str = "auto",
) -> tuple[Callable[[], Any], dict[str, float]]:  # fmt: skip
    """Return a training step as a call without arguments, and facts about it.

    The facts are its temporary memory, the seconds of its compilation, the layers that stay dense, and the packed
    products of all layers.

    Args:
      text: The method.
      model: The model.
      loss: Takes the model and a batch.
      batch: The batch.
      layers: A pattern of the paths of the layers that the method prunes.
      backend: Their backend.
    """
    sparsity = replace(nm.parse(text), else_dense=True)  # by='both' fits no kernel larger than 1
    recipe = nm.Recipe(((layers, sparsity), (r".*", "dense")), backend)
    plan = nm.nnx.plan(model, recipe, jax.tree.leaves(batch)[0])
    dense = sum(bool(layer.else_dense) for layer in plan.layers)
    packed = sum(route.how == "packed" for layer in plan.layers for _, route in layer.runs)
    nm.nnx.sparsify(model, recipe)
    nm.nnx.set_step(model, 1)
    optimizer = nnx.Optimizer(model, optax.adamw(1e-4), wrt=nnx.Param)
    graph, state = nnx.split((model, optimizer))

    def update(state: Any, batch: Any) -> tuple[Any, jax.Array]:
        model, optimizer = nnx.merge(graph, state)
        value, gradients = nnx.value_and_grad(loss)(model, batch)
        optimizer.update(model, gradients)
        return nnx.state((model, optimizer)), value

    with turns.alone():
        start = time.perf_counter()
        compiled = jax.jit(update, donate_argnums=0, compiler_options=cublas_only()).lower(state, batch).compile()
        took = time.perf_counter() - start
    now = [state]

    def call() -> jax.Array:
        now[0], value = compiled(now[0], batch)
        return value

    memory = compiled.memory_analysis().temp_size_in_bytes
    return call, {"memory": memory, "compile": took, "dense": dense, "packed": packed}
