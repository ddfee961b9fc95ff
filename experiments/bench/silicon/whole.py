"""The larger rows of ``bench silicon``: tiles, blocks, training steps, and the products of others."""

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import nmjax as nm
from experiments.bench import expected, savings, tune, turns
from experiments.bench.kernels.block import METHODS, timed_block
from experiments.bench.kernels.peers import PRODUCTS, beside, torch_on_a_gpu
from experiments.bench.measure import in_turn, over, speedup
from nmjax.core.refusal import Refusal
from nmjax.kernels import measured
from nmjax.kernels.limits import Shape, product_refusal
from nmjax.kernels.targets import Target

LAYERS = {  # those whose tiles are searched, with the tokens of a step
    "ViT-B up": (64 * 197, 768, 3072),
    "ViT-B down": (64 * 197, 3072, 768),
    "GPT-2 up": (32 * 1024, 768, 3072),
    "4096 wide up": (16384, 4096, 16384),
    "a square": (8192, 8192, 8192),
}


NO_SPEED = "right: no speed in the interpreter"


def searches() -> dict[str, Shape]:
    """Return the products whose tiles are searched: those of training first, and squares last."""
    found = {}
    for name, sizes in LAYERS.items():
        shapes = tune.layer(*sizes)
        for product in ("fwd", "dw", "dx, w packed"):
            found[f"{name}: {product}"] = shapes[product]
            if sizes[1] >= 4096:
                found[f"{name}: {product} in FP8"] = tune.in_fp8(product, shapes[product])
    return found


def tiles(shape: Shape, device: Target) -> str:
    """Search the fastest tiles of a product, and write them into the table of the device."""
    if device.interpret:
        shape = Shape(128, 64, 128, shape.dtype, shape.m_major, shape.n_major, shape.transpose)
    refusal = product_refusal(shape, device)
    if refusal is not None:
        return f"not run: {refusal}"
    pool = tune.Pool(tune.largest([shape]))
    best = tune.best(shape, device, pool, most=1 if device.interpret else 12)
    if isinstance(best, str):
        return f"wrong: {best}"
    with turns.locked(measured.own_tables() / "lock"):
        measured.write(measured.own_tables(), device.kind, [measured.Row(shape, best.config, best.speed)])
    if device.interpret:
        return f"{NO_SPEED}; {best.config}"
    refused = f", {len(best.refused)} refused: {best.refused[0]}" if best.refused else ""
    rate = f"{shape.flops / best.seconds / 1e12:.0f} TFLOP/s, {best.config}, {best.tried} tried{refused}"
    return f"right: {best.speed:.2f} times the dense speed, {rate}"


def feed_forward(width: int, method: str, device: Target) -> str:
    """Time a feed-forward block beside the dense one."""
    tokens, backend = 16384, METHODS[method][1]
    if device.interpret:
        tokens, width, backend = 128, 64, "interpret" if backend == "auto" else backend
    methods = {"dense": ("dense", "auto"), method: (METHODS[method][0], backend)}
    _, programs, times = timed_block(tokens, width, methods, 1 if device.interpret else 9)
    for name in methods:
        if not times.ran(name):
            return f"wrong: {name}: {times.note(name)}"
    if device.interpret:
        return NO_SPEED
    memory = {name: programs[name].call.memory_analysis().temp_size_in_bytes for name in methods}
    shares = f"{over(times[method], times['dense'])} of the dense time, {memory[method] / memory['dense']:.2f} of its"
    return f"right: {shares} temporary memory; dense {times.ms('dense'):.2f} ms"


def _smaller(model: str) -> tuple[Any, Any]:
    """Return a small model of the same kind, and a batch, for the interpreter."""
    sizes: dict[str, Any] = {"width": 64, "hidden": 128, "heads": 2, "depth": 1, "dtype": jnp.bfloat16}
    if model.startswith("ViT"):
        vit = nm.models.ViT(**sizes, image=32, patch=4, classes=10, pool="mean", rngs=nnx.Rngs(0))
        return vit, jax.ShapeDtypeStruct((2, 32, 32, 3), jnp.float32)
    if model.startswith("GPT"):
        gpt = nm.models.GPT(**sizes, vocabulary=64, length=128, rngs=nnx.Rngs(0))
        return gpt, jax.ShapeDtypeStruct((1, 128), jnp.int32)
    return expected.Block(64, nnx.Rngs(0)), jax.ShapeDtypeStruct((128, 64), jnp.bfloat16)


def training(model: str, method: str, device: Target) -> str:
    """Time a whole training step beside the dense one."""
    make, example = expected.MODELS[model]
    made: Callable[[], tuple[Any, Any]] = lambda: (make(), example)
    if device.interpret:
        made = partial(_smaller, model)
    calls, facts = {}, {}
    backend = "interpret" if device.interpret else "auto"
    for name, text in {"dense": "dense", "sparse": expected.METHODS[method]}.items():
        network, like = made()
        loss, batch_of = loss_of(like)
        calls[name], facts[name] = savings.step(text, network, loss, batch_of(), expected.LAYERS, backend)
    losses = {name: float(call()) for name, call in calls.items()}
    if not np.isfinite(list(losses.values())).all():
        return f"wrong: the losses are {losses}"
    if device.interpret:
        return f"{NO_SPEED}; {facts['sparse']['packed']:.0f} products packed"
    seconds = in_turn(calls, 7, 0.3)
    memory, compiling = (facts["sparse"][what] / facts["dense"][what] for what in ("memory", "compile"))
    return (
        f"right: {over(seconds['sparse'], seconds['dense'])} of the dense time, {memory:.2f} of its temporary memory, "
        f"{compiling:.1f} of its compilation, {facts['sparse']['packed']:.0f} products packed; dense "
        f"{statistics.median(seconds['dense']) * 1e3:.1f} ms, {facts['dense']['memory'] / 1e9:.2f} GB"
    )


def loss_of(example: Any) -> tuple[Callable[[Any, Any], jax.Array], Callable[[], jax.Array]]:
    """Return a loss of (model, batch), and a function that draws a batch. ``example`` has the shape of a batch."""
    draw, shape = np.random.default_rng(0), example.shape
    if jnp.issubdtype(example.dtype, jnp.integer):

        def of_text(model: Any, texts: jax.Array) -> jax.Array:
            logits = model(texts)[:, :-1].astype(jnp.float32)
            return optax.softmax_cross_entropy_with_integer_labels(logits, texts[:, 1:]).mean()

        return of_text, lambda: jnp.asarray(draw.integers(0, 64, shape), example.dtype)
    loss = lambda model, x: jnp.square(model(x).astype(jnp.float32)).mean()
    return loss, lambda: jnp.asarray(draw.standard_normal(shape), example.dtype)


def peer(n: int, kind: str, device: Target) -> str:
    """Time the products of cuSPARSELt and torch beside XLA's and ours."""
    torch = torch_on_a_gpu()
    if device.interpret or isinstance(torch, Refusal):
        return f"not run: {torch if isinstance(torch, Refusal) else 'the kernels are interpreted'}"
    times, notes = beside(torch, n, kind, device, tune.Pool(n * n), 9)
    said = [
        f"{name} {times.ms(name):.3f} ms" if times.ran(name) else f"{name}: {times.note(name, notes.get(name, ''))}"
        for name in PRODUCTS
    ]
    ratio = ""
    if times.ran("ours") and times.ran("cuSPARSELt"):
        ratio = f"; ours {speedup(times['ours'], times['cuSPARSELt']):.2f} times as fast as cuSPARSELt"
    note = notes.get("cuSPARSELt", "") if times.ran("cuSPARSELt") else ""
    return f"right: {', '.join(said)}{ratio}{note and f'; cuSPARSELt: {note}'}"
