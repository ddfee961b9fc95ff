"""The cost and the gain of sparse models: training steps, their memory and tracing; and products with fewer rows."""

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

import nmjax as nm
from experiments.bench import steps
from experiments.bench.measure import Table, in_turn, over, peak_bytes, ratio
from nmjax.analysis.flops import flops
from nmjax.kernels.targets import platform
from nmjax.products.compaction import FLOPS_PER_BYTE, expected, moved_bytes
from nmjax.products.layout import OPERANDS
from nmjax.products.operations import as_dot

# ---- delivery: steps over those of the untouched model, and planning ----

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


# ---- savings: steps over the dense one, also of models that are lean or use remat ----

METHODS = (
    "dw_g=rows(mvue(2,4))",
    "dw_g=rows(mvue(1,4))",
    "dw_g=rows(mvue(1,64))",  # nearly nothing of dw is left: the most that rows in dw can save
    "dw_g=rows(mvue(1,4),by='both')",
    "dw_x=rows(mvue(1,4))",
    "dw_x=mvue(2,4)",
    "s_ste(2,4)",
)
KEPT = {"": {}, "lean": {"lean": True}, "remat": {"remat": True}}
IMAGES, TEXTS = jax.ShapeDtypeStruct((1, 32, 32, 3), jnp.float32), jax.ShapeDtypeStruct((1, 128), jnp.int32)
MODELS = {  # the maker, whether its blocks can keep less, one sample, its tokens or positions, and those of a step
    "GPT": (partial(steps.gpt, scan=True), KEPT, (384, 768), TEXTS, 128, 2048),
    "ViT": (partial(steps.vit, scan=True), KEPT, (384, 768), IMAGES, 64, 2048),
    "ResNet": (steps.resnet, {"": {}}, (64, 128), IMAGES, 1024, 16384),
}


def savings(method: Sequence[str], model: Sequence[str], rounds: int) -> Iterator[Table]:
    """Return the tables of ``bench savings``.

    Args:
      method: The methods of the linear layers of blocks, or of the convolutions of stages; empty for `METHODS`.
      model: Some names of `MODELS`; empty for all.
      rounds: How often everything is timed.
    """
    for name in model or MODELS:
        for width in MODELS[name][2]:
            yield table(name, width, MODELS[name][-1], method or METHODS, rounds)


def table(name: str, width: int, tokens: int, methods: Sequence[str], rounds: int) -> Table:
    """Return the table of a model of a width, for so many tokens in a step."""
    make, forms, _, sample, each, _ = MODELS[name]
    example = jax.ShapeDtypeStruct((tokens // each, *sample.shape[1:]), sample.dtype)
    made = {}
    for text in ("dense", *methods):
        sparsity = replace(nm.parse(text), else_dense=True)  # by='both' fits no kernel larger than 1
        for kept, form in forms.items():
            if kept != "remat" or text == "dense" or "dw_x" in text:  # others would keep what dense keeps
                label = f"{text}, {kept}" if kept else text
                made[label] = steps.step(make(width, **form), example, steps.recipe(sparsity))
    peaks = {label: peak_bytes(step.call) for label, step in made.items()}
    seconds = in_turn({label: step.call for label, step in made.items()}, rounds)
    base, peak, rows = made["dense"], peaks["dense"], {}
    for label, step in made.items():
        rows[f"`{label}`"] = [
            over(seconds[label], seconds["dense"]),
            step.memory / base.memory,
            peaks[label] / peak if peak else None,
            step.compile / base.compile,
            f"{statistics.median(seconds[label]) * 1e3:,.0f} ms, {step.memory / 2**20:,.0f} MiB, {step.compile:.1f} s",
        ]
    left = {label: sum(bool(layer.else_dense) for layer in step.layers) for label, step in made.items()}
    texts = ", ".join(f"`{label}` in {count}" for label, count in left.items() if count)
    return Table(
        f"{name}, {width} wide, {tokens:,} tokens",
        "Over the dense step in the same process: the median of the rounds' ratios, with the quartiles. Temporary "
        "memory is XLA's count. The peak is the resident memory that a step adds to the process, which Linux tells. "
        "Each step is compiled once. AdamW, float32."
        + (f" Layers that a method does not fit are dense: {texts}." if texts else ""),
        ["", "time", "temporary memory", "peak of the process", "trace and compile", "absolute"], rows,
    )  # fmt: skip


# ---- compaction: products one by one, expected and measured ----

SHAPES = ((2048, 128, 512), (2048, 384, 384), (2048, 384, 1536), (2048, 768, 3072), (8192, 384, 1536))
PATTERNS = ((2, 4), (1, 4), (1, 8))
DIMS = (((1,), (0,)), ((), ()))


def compaction(rounds: int) -> Iterator[Table]:
    """Return the table of products for dw with chosen rows of g: tokens x in x out, float32."""
    rows, factors = {}, []
    for shape in SHAPES:
        sides = [shape[:2], shape[1:], shape[::2]]
        x, w, g = (jax.random.normal(jax.random.key(i), side) for i, side in enumerate(sides))
        op = as_dot(x, w, DIMS)
        texts = {f"dw_g=rows(mvue({n},{m}))": (n, m) for n, m in PATTERNS}
        calls = {text: partial(jax.jit(partial(_dw, text)), x, w, g) for text in ("dense", *texts)}
        seconds = in_turn(calls, rounds)
        for text, (n, m) in texts.items():
            slots = {operand: nm.parse(text).slots[name] for operand, name in OPERANDS["dw"].items()}
            given = op, *(jax.ShapeDtypeStruct(v.shape, v.dtype) for v in (x, w)), slots, "g", platform()
            beyond = (ratio(seconds[text], seconds["dense"]) - n / m) * flops(op, x.shape, w.shape)
            factors.append(beyond / moved_bytes(*given))
            dense = f"{statistics.median(seconds['dense']) * 1e3:.1f} ms"
            name = " x ".join(f"{size:,}" for size in shape)
            rows[f"{name}, {n}:{m}"] = [expected(*given), over(seconds[text], seconds["dense"]), dense]
    low, middle, high = statistics.quantiles(factors, n=4)
    yield Table(
        "Compacted products",
        "The product for dw, over the dense one in the same process: the median of the rounds' ratios, with the "
        'quartiles. Choosing and gathering rows is included. "auto" decides by the expected ratio. It assumes that '
        f"moving a byte costs as much as {FLOPS_PER_BYTE[platform()]:.0f} FLOPs of the dense product. In these "
        f"rows it costs {middle:.1f} ({low:.1f} to {high:.1f}).",
        ["tokens x in x out", "expected", "measured", "dense"], rows,
    )  # fmt: skip


def _dw(text: str, x: jax.Array, w: jax.Array, g: jax.Array) -> jax.Array:
    product = lambda w: nm.dot_general(
        x, w, DIMS, sparsity=nm.parse(text), ctx=nm.Ctx(jnp.uint32([0, 1]), 1), backend="compact"
    )
    return jax.vjp(product, w)[1](g)[0]
