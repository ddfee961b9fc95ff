"""The measured time and memory of training steps: sparse and dense, and of models that are lean or use remat."""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp

import nmjax as nm
from experiments.bench import steps
from experiments.bench.measure import Table, in_turn, over, peak_bytes

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
            if kept != "remat" or text == "dense" or "drhs_lhs" in text:  # others would keep what dense keeps
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
