"""Compacted products one by one: the time that is expected, and the time that is measured."""

import statistics
from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp

import nmjax as nm
from experiments.bench.measure import Table, in_turn, over, ratio
from nmjax.analysis.flops import flops
from nmjax.kernels.targets import platform
from nmjax.products.compaction import FLOPS_PER_BYTE, expected, moved_bytes
from nmjax.products.layout import OPERANDS
from nmjax.products.operations import as_dot

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
        texts = {f"drhs_g=rows(mvue({n},{m}))": (n, m) for n, m in PATTERNS}
        calls = {text: partial(jax.jit(partial(_dw, text)), x, w, g) for text in ("dense", *texts)}
        seconds = in_turn(calls, rounds)
        for text, (n, m) in texts.items():
            slots = {operand: nm.parse(text).slots[name] for operand, name in OPERANDS["drhs"].items()}
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
