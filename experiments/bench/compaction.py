"""Compacted products one by one: the time that is expected, and the time that is measured."""

import statistics
from functools import partial

import jax
import jax.numpy as jnp

import nmjax as nm
from experiments.bench.measure import in_turn, markdown, over
from nmjax.analysis.flops import flops
from nmjax.kernels.targets import platform
from nmjax.products.compaction import FLOPS_PER_BYTE, expected, moved_bytes
from nmjax.products.layout import OPERANDS
from nmjax.products.operations import as_dot

SHAPES = ((2048, 128, 512), (2048, 384, 384), (2048, 384, 1536), (2048, 768, 3072), (8192, 384, 1536))
PATTERNS = ((2, 4), (1, 4), (1, 8))
DIMS = (((1,), (0,)), ((), ()))


def compaction(rounds: int) -> str:
    """Return the table of products for dw with chosen rows of g: tokens x in x out, float32."""
    rows, factors = {}, []
    for shape in SHAPES:
        tokens, inward, outward = shape
        x, w, g = (jax.random.normal(jax.random.key(i), s) for i, s in enumerate(
            [(tokens, inward), (inward, outward), (tokens, outward)]
        ))  # fmt: skip
        op = as_dot(x, w, DIMS)
        texts = {pattern: "drhs_g=rows(mvue({},{}))".format(*pattern) for pattern in PATTERNS}
        calls = {text: partial(jax.jit(partial(_dw, text)), x, w, g) for text in ("dense", *texts.values())}
        seconds = in_turn(calls, rounds)
        for pattern, text in texts.items():
            slots = {operand: nm.parse(text).slots[name] for operand, name in OPERANDS["drhs"].items()}
            given = op, *(jax.ShapeDtypeStruct(v.shape, v.dtype) for v in (x, w)), slots, "g", platform()
            ratio = statistics.median(t / d for t, d in zip(seconds[text], seconds["dense"], strict=True))
            beyond = (ratio - pattern[0] / pattern[1]) * flops(op, x.shape, w.shape)
            factors.append(beyond / moved_bytes(*given))
            name = " x ".join(f"{size:,}" for size in shape)
            dense = f"{statistics.median(seconds['dense']) * 1e3:.1f} ms"
            cells = [expected(*given), over(seconds[text], seconds["dense"]), dense]
            rows[f"{name}, {pattern[0]}:{pattern[1]}"] = cells
    low, middle, high = statistics.quantiles(factors, n=4)
    note = (
        "The product for dw, over the dense one in the same process: the median of the rounds' ratios, with the "
        'quartiles. Choosing and gathering rows is included. "auto" decides by the expected ratio. It assumes that '
        f"moving a byte costs as much as {FLOPS_PER_BYTE[platform()]:.0f} FLOPs of the dense product. In these "
        f"rows it costs {middle:.1f} ({low:.1f} to {high:.1f})."
    )
    return markdown("Compacted products", note, rows, ["tokens x in x out", "expected", "measured", "dense"])


def _dw(text: str, x: jax.Array, w: jax.Array, g: jax.Array) -> jax.Array:
    product = lambda w: nm.dot_general(
        x, w, DIMS, sparsity=nm.parse(text), ctx=nm.Ctx(jnp.uint32([0, 1]), 1), backend="compact"
    )
    return jax.vjp(product, w)[1](g)[0]
