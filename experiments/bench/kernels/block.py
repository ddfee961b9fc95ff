"""A whole feed-forward block, forward and backward."""

from collections.abc import Mapping
from functools import partial

import jax
import jax.numpy as jnp

import nmjax as nm
from experiments.bench.kernels.report import Report, Setting
from experiments.bench.kernels.times import Program, Times, built, timed
from nmjax.products import operations, routes

METHODS = {  # the text of each, and its backend
    "dense bf16": ("dense", "auto"),
    "s_ste()": ("s_ste()", "auto"),
    "s_ste(), by XLA": ("s_ste()", "xla"),
    "transposable and mvue": ("fwd_rhs=ste(transposable(2,4)); drhs_g=mvue(2,4)", "auto"),
    "dense FP8": (
        "fwd_lhs=fp8('e4m3'); fwd_rhs=ste(fp8('e4m3')); dlhs_g=fp8('e5m2'); dlhs_rhs=fp8('e4m3'); "
        "drhs_g=fp8('e5m2'); drhs_lhs=fp8('e4m3')",
        "auto",
    ),
    "s_ste(fp8=True)": ("s_ste(fp8=True)", "auto"),
}


def feed_forward(setting: Setting, report: Report) -> None:
    """Report the time and memory of a block by every method."""
    tokens, widths = (4096, (2048,)) if setting.quick else (16384, (4096, 8192))
    for width in widths:
        report.table(
            f"Forward and backward of {tokens} tokens, {width} -> {4 * width} -> {width}",
            "In bf16, with everything: gelu, pruning, packing, casts. Products that no kernel runs are those that XLA "
            "finds fastest.",
            [
                "method",
                "ms",
                "over dense bf16",
                "temporary memory, GB",
                "of dense bf16's",
                "products that are not dense",
            ],
        )
        operands, programs, times = timed_block(tokens, width, METHODS, setting.rounds)
        for name, (text, backend) in METHODS.items():
            memory, dense_memory = (_memory(programs[which].call) for which in (name, "dense bf16"))
            more = memory / dense_memory if memory and dense_memory else None
            packed = _not_dense(nm.parse(text), backend, *operands)
            note = "; ".join(filter(None, [times.note(name), packed]))
            report.row(name, times.ms(name), times.over(name, "dense bf16"), memory and memory / 1e9, more, note)


def timed_block(
    tokens: int, width: int, methods: Mapping[str, tuple[str, str]], rounds: int
) -> tuple[tuple[jax.Array, ...], dict[str, Program], Times]:  # fmt: skip
    """Time a block by some methods in turn.

    Args:
      tokens: The number of tokens.
      width: The width of the block. The hidden one is four times as large.
      methods: The text of each, and its backend, as in `METHODS`.
      rounds: How often each is timed.

    Returns:
      x and the two weights, the compiled programs, and their times.
    """
    hidden = 4 * width
    shapes = ((tokens, width), (width, hidden), (hidden, width), (tokens, width))
    scales = (1.0, width**-0.5, hidden**-0.5, 1.0)
    normal = jax.jit(
        lambda key, shape, by: jax.random.normal(key, shape, jnp.bfloat16) * jnp.bfloat16(by), static_argnums=(1, 2)
    )
    keys = map(jax.random.key, range(4))
    x, up, down, g = (normal(*arguments) for arguments in zip(keys, shapes, scales, strict=True))
    programs = {}
    for name, (text, backend) in methods.items():
        sparsity = nm.parse(text)
        states = [jax.jit(partial(sparsity.init, contract=0, out=1))(w) for w in (up, down)]
        step = jax.jit(partial(_step, sparsity=sparsity, backend=backend))
        programs[name] = Program(step, (x, up, down, g, states, jnp.int32(0)))
    programs = built(programs)
    return (x, up, down), programs, timed(programs, rounds, seconds=0.1)


def _memory(program) -> int | None:
    return None if isinstance(program, Exception) else program.memory_analysis().temp_size_in_bytes


def _step(x, up, down, g, states, now, *, sparsity, backend):
    """Return the result of a block, and the gradients of its input and weights."""

    def block(x, up, down):
        product = partial(nm.einsum, "ti,io->to", sparsity=sparsity, backend=backend)
        hidden = jax.nn.gelu(product(x, up, ctx=nm.Ctx(0, now, states[0])))
        return product(hidden, down, ctx=nm.Ctx(1, now, states[1]))

    y, back = jax.vjp(block, x, up, down)
    return y, back(g)


def _not_dense(sparsity: nm.Sparsity, backend: str, x: jax.Array, up: jax.Array, down: jax.Array) -> str:
    """Return the products of both layers that are not dense, with the reasons why they run as they do."""
    hidden, texts = jax.ShapeDtypeStruct((x.shape[0], up.shape[1]), x.dtype), []
    for layer, left, right in (("first", x, up), ("second", hidden, down)):
        op = operations.as_dot(left, right, operations.einsum_dims("ti,io->to", 2, 2)[0])
        choices = routes.explain(op, left, right, sparsity, backend)
        texts += [f"{layer} {p} {choice.how}: {choice.why}" for p, choice in choices.items() if choice.how != "dense"]
    return "; ".join(texts)
