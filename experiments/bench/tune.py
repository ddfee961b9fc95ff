"""A search for the fastest tiles on this machine, written where the library looks for them.

The products are those of layers, ``tokens x in x out``. Likely tiles come first; then variations of the best of them.
All are compiled side by side, checked against XLA's product, and timed in turn with a dense one.
"""

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from experiments.bench import turns
from experiments.bench.measure import compiled, cublas_only, in_turn, markdown, speedup
from nmjax.core.refusal import Refusal
from nmjax.kernels import HopperConfig, calls, measured, tuning
from nmjax.kernels.format import Packed
from nmjax.kernels.limits import Config, Shape, config_refusal, product_refusal
from nmjax.kernels.targets import Target, target
from nmjax.models import gpt, vit

MODELS = {
    "ViT-B": vit.SIZES["B"],
    "ViT-L": vit.SIZES["L"],
    "GPT-2 124M": gpt.SIZES["small"],
    "GPT-2 355M": gpt.SIZES["medium"],
    "GPT-2 774M": gpt.SIZES["large"],
    "GPT-2 1.5B": gpt.SIZES["xl"],
}
ERROR = 0.02  # of the largest magnitude: a correct product of bf16 or FP8 operands is off by less

# ---- the products of a layer ----


def layer(tokens: int, inward: int, outward: int) -> dict[str, Shape]:
    """Return the products of a layer as in training, each with one operand packed.

    Their operands are x [tokens, in], w [in, out] and g [tokens, out].
    """
    return {
        "fwd": Shape(outward, tokens, inward, m_major=True, transpose=True),
        "dx, w packed": Shape(inward, tokens, outward, transpose=True),
        "dx, g packed": Shape(tokens, inward, outward),
        "dw": Shape(outward, inward, tokens, m_major=True, n_major=True, transpose=True),
    }


def in_fp8(name: str, shape: Shape) -> Shape:
    """Return the same product with FP8 operands, k-major: weights and activations in e4m3, gradients in e5m2."""
    kind = jnp.float8_e5m2 if name in ("dx, g packed", "dw") else jnp.float8_e4m3fn
    return replace(shape, dtype=jnp.dtype(kind).name, m_major=False, n_major=False)


def of_text(text: str) -> list[Shape]:
    """Return the products of layers such as ``"8192x1024x4096 4096x4096x4096"``, in bf16 and FP8."""
    shapes = []
    for part in text.replace(",", " ").split():
        sizes = part.split("x")
        if len(sizes) != 3 or not all(size.isdigit() and int(size) for size in sizes):
            raise ValueError(f"--shapes {text!r}: {part!r} is no layer. Write tokens x in x out: 8192x1024x4096.")
        products = layer(*map(int, sizes))
        shapes += [*products.values(), *(in_fp8(*item) for item in products.items())]
    return list(dict.fromkeys(shapes))


def widths() -> dict[tuple[int, int], str]:
    """Return the sizes (width, hidden) of feed-forward blocks, and the models that have them."""
    models: dict[tuple[int, int], list[str]] = {}
    for name, size in MODELS.items():
        models.setdefault((size["width"], size["hidden"]), []).append(name)
    return {sides: ", ".join(names) for sides, names in models.items()}


def default() -> list[Shape]:
    """Return the default products: of square layers, then those of feed-forward blocks that S-STE packs."""
    shapes = of_text(" ".join(f"{n}x{n}x{n}" for n in (4096, 8192, 16384)))
    for width, hidden in widths():
        for sides in ((width, hidden), (hidden, width)):
            some = {name: shape for name, shape in layer(16384, *sides).items() if name in ("fwd", "dw")}
            shapes += [*some.values(), *(in_fp8(*item) for item in some.items())]
    return list(dict.fromkeys(shapes))


# ---- operands ----


class Pool:
    """Random values and random legal words. Operands are cut out of them, so that no generator is compiled per shape.

    Args:
      most: The number of values of the largest operand.
    """

    def __init__(self, most: int):
        keys = jax.random.split(jax.random.key(0))
        self.values = jax.jit(lambda key: jax.random.normal(key, (most + 2**16,), jnp.bfloat16))(keys[0])
        self.words = jax.jit(partial(_legal, count=most // 32 + 2**12))(keys[1])
        self.cuts = 0

    def dense(self, shape: tuple[int, ...], dtype: Any = jnp.bfloat16) -> jax.Array:
        """Return random values."""
        return self._cut(self.values, shape, dtype)

    def packed(self, shape: Shape) -> Packed:
        """Return the packed operand of a product, with random positions."""
        m, k = shape.m, shape.k
        values = self.dense((k // 2, m) if shape.m_major else (m, k // 2), jnp.dtype(shape.dtype))
        wide = values.dtype.itemsize == 2
        words = self._cut(self.words, (m // 64, k // 64, 128) if wide else (m, k // 32), jnp.uint32)
        return Packed(values, words, -2 if shape.m_major else -1, 2, 4, "words16" if wide else "words8")

    def pair(self, shape: Shape) -> tuple[Packed, jax.Array]:
        """Return the operands of a product, one of them packed."""
        return self.packed(shape), self.other(shape)

    def dense_pair(self, shape: Shape) -> tuple[jax.Array, jax.Array]:
        """Return the operands of a product, both dense."""
        sides = (shape.k, shape.m) if shape.m_major else (shape.m, shape.k)
        return self.dense(sides, jnp.dtype(shape.dtype)), self.other(shape)

    def other(self, shape: Shape) -> jax.Array:
        """Return the dense operand. In FP8 it is e4m3, because no library multiplies e5m2 by e5m2."""
        kind = jnp.dtype(shape.dtype)
        kind = jnp.float8_e4m3fn if kind.itemsize == 1 else kind
        return self.dense((shape.k, shape.n) if shape.n_major else (shape.n, shape.k), kind)

    def _cut(self, pool, shape, dtype):
        self.cuts += 1
        start = self.cuts * 7919 % (pool.size - math.prod(shape) + 1)
        return _cut(pool, np.int32(start), shape=shape, dtype=jnp.dtype(dtype))


@partial(jax.jit, static_argnames=("shape", "dtype"))
def _cut(pool, start, *, shape, dtype):
    return lax.dynamic_slice(pool, (start,), (math.prod(shape),)).reshape(shape).astype(dtype)


def _legal(key, *, count):
    """Return words of eight legal nibbles."""
    nibbles = jnp.array([0x4, 0x8, 0xC, 0x9, 0xD, 0xE], jnp.uint32)[jax.random.randint(key, (count, 8), 0, 6)]
    return jnp.sum(nibbles << (4 * jnp.arange(8, dtype=jnp.uint32))[None], 1, dtype=jnp.uint32)


def largest(shapes: list[Shape]) -> int:
    """Return the number of values of the largest operand of some products."""
    return max(max(s.m * s.k, s.n * s.k) for s in shapes)


# ---- programs ----


def dense(shape: Shape, device: Target) -> Callable:
    """Return the dense product of the same operands and result, by XLA.

    The product itself returns bf16, because the conversion of a float32 result would take another pass. On a GPU it is
    cuBLAS's product (`experiments.bench.measure.cublas_only`).
    """
    a_axis, b_axis = (0 if major else 1 for major in (shape.m_major, shape.n_major))
    out = jnp.dtype(shape.out)

    def product(a, b):
        pairs = ((b, b_axis), (a, a_axis)) if shape.transpose else ((a, a_axis), (b, b_axis))
        (left, i), (right, j) = pairs
        return lax.dot_general(left, right, (((i,), (j,)), ((), ())), preferred_element_type=out)

    return several(product, None if device.interpret else cublas_only())


def packed(shape: Shape, device: Target, config: Config) -> Callable:
    """Return the product by the kernel with a config."""
    return several(lambda a, b: calls.run(a, b, None, shape=shape, target=device, config=config))


def several(f: Callable, compiler_options: dict | None = None) -> Callable:
    """Return a program that calls a function once for each tuple of arguments in a list.

    The program then takes longer than its dispatch even if the function is short, and no cache keeps the operands.

    Args:
      f: The function.
      compiler_options: Options of XLA's compiler.
    """
    one = jax.jit(f)
    return jax.jit(lambda sets: [one(*arguments) for arguments in sets], compiler_options=compiler_options)


def repeats(shape: Shape) -> int:
    """Return how many products a program computes so that it takes about half a millisecond."""
    return max(1, min(8, math.ceil(3.5e11 / shape.flops)))


# ---- the search ----


def likely(shape: Shape, device: Target) -> list[Config]:
    """Return the first nine candidates that differ in their tiles or clusters.

    They have the largest tiles, unless these leave the device idle.
    """
    kinds = {}
    for config in tuning.candidates(shape, device):
        kinds.setdefault((getattr(config, "tile_m", 128), config.tile_n, getattr(config, "cluster", "")), config)
    return list(kinds.values())[:9]


def variations(shape: Shape, config: Config) -> list[Config]:
    """Return configs with the same tiles, walked, fetched and stored in other ways."""
    changes = [{"stages": stages} for stages in (2, 3, 4, 5)]
    if isinstance(config, HopperConfig):
        changes = [{"band": 1}, {"band": 16}]
        changes += [{"stages": s, "store_n": n} for s, n in ((4, 64), (5, 64), (4, 32), (3, 32), (5, 32))]
        changes += [{"tile_k": 128, "stages": 2}]
        changes += [{"split": split} for split in (config.split // 2, 2 * config.split) if config.split > 1]
    configs = [replace(config, **change) for change in changes]
    return [c for c in dict.fromkeys(configs) if c != config and config_refusal(shape, c) is None]


class Best(NamedTuple):
    """The best config of a product."""

    config: Config
    speed: float  # relative to the dense product's
    seconds: float
    tried: int
    refused: tuple[str, ...]  # configs that did not compile, failed or were wrong, each with its reason


def best(shape: Shape, device: Target, pool: Pool, timer: Callable = in_turn, most: int = 12) -> Best | str:
    """Return the fastest config for a product, or the reason why there is none.

    Args:
      shape: The product.
      device: Where it runs.
      pool: Its operands.
      timer: Times calls in turn, as `in_turn` does.
      most: How many tiles are tried at most, and how many variations of the best one.
    """
    refusal = product_refusal(shape, device)
    if refusal is not None:
        return refusal.reason
    count, refused = 1 if device.interpret else repeats(shape), []
    pairs = [pool.pair(shape) for _ in range(count)]
    dense_pairs = [pool.dense_pair(shape) for _ in range(count)]
    with turns.alone():  # XLA times its own products when it compiles them
        programs = compiled(
            {"dense": (dense(shape, device), dense_pairs), "right": (_reference(shape, device), *pairs[0])}
        )
    for program in programs.values():
        if isinstance(program, Exception):
            raise program
    wanted, base = programs["right"](*pairs[0]), partial(programs["dense"], dense_pairs)

    def fastest(configs, known):
        """Return the fastest of these configs and of the known calls, all calls, and their times."""
        calls = {"dense": base} | known
        for config, program in compiled({c: (packed(shape, device, c), pairs) for c in configs}).items():
            fault = _fault(program, pairs, wanted)
            if fault:
                refused.append(f"{config}: {fault}")
            else:
                calls[config] = partial(program, pairs)
        if len(calls) == 1:
            return None, calls, {}
        times = timer(calls, 3, 0.01)
        return min(calls.keys() - {"dense"}, key=lambda config: statistics.median(times[config])), calls, times

    first = likely(shape, device)[:most]
    leader, calls, _ = fastest(first, {})
    if leader is None:
        return f"no config is right: {refused[0]}"
    second = variations(shape, leader)[:most]
    leader, _, times = fastest(second, {leader: calls[leader]})
    seconds = statistics.median(times[leader]) / count
    speed = speedup(times[leader], times["dense"])
    return Best(leader, speed, seconds, len(first) + len(second), tuple(refused))


def _reference(shape: Shape, device: Target) -> Callable:
    """Return XLA's product of the packed operand."""
    form = {"axis": -2 if shape.n_major else -1, "transpose": shape.transpose, "dtype": jnp.float32}
    return jax.jit(partial(calls.reference, **form), compiler_options=None if device.interpret else cublas_only())


def _fault(program: Any, pairs: list, wanted: jax.Array) -> str | None:
    """Return what is wrong with a compiled config, or None."""
    if isinstance(program, Exception):
        return f"{type(program).__name__}: {str(program)[:100]}"
    try:
        error = float(_error(program(pairs)[0], wanted))
    except Exception as failed:  # whatever drivers raise
        return f"{type(failed).__name__}: {str(failed)[:100]}"
    return None if error < ERROR else f"off by {error:.3g} of the largest magnitude"


@jax.jit
def _error(y, wanted):
    return jnp.max(jnp.abs(y.astype(jnp.float32) - wanted)) / jnp.max(jnp.abs(wanted))


def tune(shapes: list[Shape], ship: bool, minutes: float, timer: Callable = in_turn) -> str | None:
    """Tune the products, and return a report. Return None if this machine has no sparse tensor cores.

    Args:
      shapes: The products.
      ship: Write the package's table instead of the user's own.
      minutes: Begin no product after so many minutes.
      timer: Times calls in turn, as `in_turn` does.
    """
    device = target("auto")
    if isinstance(device, Refusal):
        print(f"There is nothing to tune: {device}.")
        return None
    return search(shapes, device, measured.SHIPPED if ship else measured.own_tables(), minutes, timer)


def search(shapes: list[Shape], device: Target, folder: Path, minutes: float, timer: Callable = in_turn) -> str:
    """Write the best config of each product into a table as it comes, and return a report.

    Args:
      shapes: The products.
      device: Where they run.
      folder: The folder of the table.
      minutes: Begin no product after so many minutes.
      timer: Times calls in turn, as `in_turn` does.
    """
    start, shown = time.monotonic(), {}
    pool = Pool(largest(shapes))
    for i, shape in enumerate(shapes):
        if time.monotonic() - start > 60 * minutes:
            shown[f"{len(shapes) - i} more"] = ["", "", "", "", f"not begun within {minutes:g} minutes"]
            break
        try:
            winner = best(shape, device, pool, timer)
        except Exception as error:  # the other shapes are still wanted
            winner = f"{type(error).__name__}: {str(error)[:200]}"
        if isinstance(winner, str):
            shown[repr(shape)] = ["", "", "", "", winner]
        else:
            measured.write(folder, device.kind, [measured.Row(shape, winner.config, winner.speed)])
            rate = f"{shape.flops / winner.seconds / 1e12:,.0f}"
            tried = f"{winner.tried}, {len(winner.refused)} refused" if winner.refused else f"{winner.tried}"
            shown[repr(shape)] = [f"{winner.seconds * 1e3:.3f}", rate, winner.speed, tried, repr(winner.config)]
            for reason in winner.refused:
                print(f"  refused {reason}", flush=True)
        print(f"{i + 1}/{len(shapes)} {time.monotonic() - start:.0f} s {shape} {shown.get(repr(shape))}", flush=True)
    note = (
        f"The fastest of the configs that were tried on {device.kind}, written to {folder}, and its speed over "
        "XLA's dense product of operands of the same width."
    )
    return markdown("Tiles", note, shown, ["product", "ms", "TFLOP/s", "over dense", "tried", "config"])
