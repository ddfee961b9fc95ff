"""A search for the fastest tiles on this machine, written where the library looks for them.

The products are those of layers, ``tokens x in x out``. Likely tiles come first; then variations of the best of them.
All are compiled side by side, checked against XLA's product, and timed in turn with a dense one.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from experiments.bench import turns
from experiments.bench.measure import Table, compiled, cublas_only, in_short, in_turn, ratio
from experiments.errors import Failed, Mistake
from nmjax.core.refusal import Refusal
from nmjax.kernels import calls, measured, tuning
from nmjax.kernels.format import Packed
from nmjax.kernels.limits import Config, Shape, config_refusal, family_of, product_refusal
from nmjax.kernels.targets import Target, target
from nmjax.models import gpt, vit

MODELS = (*(vit.SIZES[name] for name in "BL"), *(gpt.SIZES[name] for name in ("small", "medium", "large", "xl")))
ERROR = 0.02  # of the largest magnitude: a correct product of bf16 or FP8 operands is off by less

# ---- the products of a layer ----


def layer(tokens: int, inward: int, outward: int) -> dict[str, Shape]:
    """Return the products of a layer as in training, each with one operand packed, in bf16 and FP8.

    Their operands are x [tokens, in], w [in, out] and g [tokens, out]. In FP8 they are k-major, weights and activations
    in e4m3, and gradients in e5m2.
    """
    found = {
        "y": Shape(outward, tokens, inward, m_major=True, transpose=True),
        "dx, w packed": Shape(inward, tokens, outward, transpose=True),
        "dx, g packed": Shape(tokens, inward, outward),
        "dw": Shape(outward, inward, tokens, m_major=True, n_major=True, transpose=True),
    }
    for name, shape in list(found.items()):
        kind = "float8_e5m2" if name in ("dx, g packed", "dw") else "float8_e4m3fn"
        found[f"{name} in FP8"] = replace(shape, dtype=kind, m_major=False, n_major=False)
    return found


def of_text(text: str) -> list[Shape]:
    """Return the products of layers such as ``"8192x1024x4096 4096x4096x4096"``."""
    shapes = []
    for part in text.replace(",", " ").split():
        sizes = part.split("x")
        if len(sizes) != 3 or not all(size.isdigit() and int(size) for size in sizes):
            raise Mistake(f"--shapes {text!r}: {part!r} is no layer. Write tokens x in x out: 8192x1024x4096.")
        shapes += layer(*map(int, sizes)).values()
    return list(dict.fromkeys(shapes))


def default() -> list[Shape]:
    """Return the default products: of square layers, then those of feed-forward blocks that S-STE packs."""
    shapes = of_text(" ".join(f"{n}x{n}x{n}" for n in (4096, 8192, 16384)))
    for size in MODELS:
        for sides in ((size["width"], size["hidden"]), (size["hidden"], size["width"])):
            shapes += [shape for name, shape in layer(16384, *sides).items() if name.startswith(("y", "dw"))]
    return list(dict.fromkeys(shapes))


# ---- operands ----


class Pool:
    """Random values and random legal words. Operands are cut out of them, so that no generator is compiled per shape.

    Args:
      shapes: The products whose operands are cut.
      positive: Whether all values are positive.
    """

    def __init__(self, shapes: Sequence[Shape], positive: bool = False):
        most = max(max(s.m * s.k, s.n * s.k) for s in shapes)
        keys, sign = jax.random.split(jax.random.key(time.time_ns() % 2**32)), jnp.abs if positive else lambda v: v
        self.values = jax.jit(lambda key: sign(jax.random.normal(key, (most + 2**16,), jnp.bfloat16)))(keys[0])
        self.words = jax.jit(partial(_legal, count=most // 32 + 2**12))(keys[1])
        self.cuts = 0

    def pair(self, shape: Shape, packed: bool = True) -> tuple[Packed | jax.Array, jax.Array]:
        """Return the operands of a product: the first one packed, or both dense.

        In FP8 the second one is e4m3, because no library multiplies e5m2 by e5m2.
        """
        m, k, kind = shape.m, shape.k // (1 + packed), jnp.dtype(shape.dtype)
        a, wide = self._cut(self.values, (k, m) if shape.m_major else (m, k), kind), kind.itemsize == 2
        if packed:
            words = self._cut(self.words, (m // 64, shape.k // 64, 128) if wide else (m, shape.k // 32), jnp.uint32)
            a = Packed(a, words, -2 if shape.m_major else -1, 2, 4, "words16" if wide else "words8")
        other = (shape.k, shape.n) if shape.n_major else (shape.n, shape.k)
        return a, self._cut(self.values, other, kind if wide else jnp.float8_e4m3fn)

    def _cut(self, pool: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
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


# ---- programs ----


def dense(shape: Shape, device: Target) -> Callable:
    """Return a program of `several` dense products of the same operands and result, by XLA.

    The product itself returns bf16, because the conversion of a float32 result would take another pass. On a GPU it is
    cuBLAS's product (`experiments.bench.measure.cublas_only`).
    """
    i, j = (0 if major else 1 for major in (shape.m_major, shape.n_major))

    def product(a: jax.Array, b: jax.Array) -> jax.Array:
        left, right, axes = (b, a, ((j,), (i,))) if shape.transpose else (a, b, ((i,), (j,)))
        return lax.dot_general(left, right, (axes, ((), ())), preferred_element_type=jnp.dtype(shape.out))

    return several(product, None if device.interpret else cublas_only())


def packed(shape: Shape, device: Target, config: Config) -> Callable:
    """Return a program of `several` products by the kernel with a config."""
    return several(lambda a, b: calls.run(a, b, None, shape=shape, target=device, config=config))


def several(f: Callable, compiler_options: dict | None = None) -> Callable:
    """Return a program that calls a function once for each tuple of arguments in a list.

    The program then takes longer than its dispatch even if the function is short, and no cache keeps the operands.
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
    configs = family_of(config).variations(config)
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
    count, refused, tried = 1 if device.interpret else repeats(shape), [], 0
    pairs, dense_pairs = ([pool.pair(shape, packed) for _ in range(count)] for packed in (True, False))
    with turns.alone():  # XLA times its own products when it compiles them
        base = partial(dense(shape, device).lower(dense_pairs).compile(), dense_pairs)
        wanted = reference(shape, device)(*pairs[0])
    configs, leader, times = likely(shape, device)[:most], None, {}
    running: dict[Any, Callable] = {"dense": base}
    for _ in range(2):
        for config, program in compiled({c: (packed(shape, device, c), pairs) for c in configs}).items():
            fault = _fault(program, pairs, wanted)
            if fault:
                refused.append(f"{config}: {fault}")
            else:
                running[config] = partial(program, pairs)
        if len(running) == 1:
            return f"no config is right: {refused[0]}"
        tried, times = tried + len(configs), timer(running, 3, 0.01)
        leader = min(running.keys() - {"dense"}, key=lambda config: statistics.median(times[config]))
        running = {"dense": base, leader: running[leader]}
        configs = variations(shape, leader)[:most]
    speed = ratio(times["dense"], times[leader])
    return Best(leader, speed, statistics.median(times[leader]) / count, tried, tuple(refused))


def reference(shape: Shape, device: Target) -> Callable:
    """Return XLA's product of the packed operand."""
    form = {"axis": -2 if shape.n_major else -1, "transpose": shape.transpose, "dtype": jnp.float32}
    product = partial(calls.reference, **form)
    if device.interpret:  # CPUs may have no product of 16-bit operands with a result of 32 bits
        wide = lambda v: v.astype(jnp.float32) if v.dtype in (jnp.bfloat16, jnp.float16) else v
        return jax.jit(lambda *pair: product(*jax.tree.map(wide, pair)))
    return jax.jit(product, compiler_options=cublas_only())


def _fault(program: Any, pairs: list, wanted: jax.Array) -> str | None:
    """Return what is wrong with a compiled config, or None."""
    try:
        if isinstance(program, Exception):
            raise program
        error = float(jnp.max(jnp.abs(program(pairs)[0].astype(jnp.float32) - wanted)) / jnp.max(jnp.abs(wanted)))
    except Exception as failed:  # whatever compilers and drivers raise
        return in_short(failed)
    return None if error < ERROR else f"off by {error:.3g} of the largest magnitude"


def tune(shapes: str | None, ship: bool, minutes: float) -> Iterator[Table]:
    """Return the table of ``bench tune``.

    Args:
      shapes: Layers, as in `of_text`; None for `default`.
      ship: Write the package's table instead of the user's own.
      minutes: Begin no product after so many minutes.

    Raises:
      Failed: This machine has no sparse tensor cores.
    """
    some = of_text(shapes) if shapes else default()
    device = target("auto")
    if isinstance(device, Refusal):
        raise Failed(f"There is nothing to tune: {device}.")
    yield search(some, device, measured.SHIPPED if ship else measured.own_tables(), minutes)


def written(shape: Shape, device: Target, pool: Pool, folder: Path, **search: Any) -> Best | str:
    """Return what `best` finds, which takes ``search``, and write it into the table in a folder."""
    found = best(shape, device, pool, **search)
    if isinstance(found, Best):
        with turns.alone():  # others may write into the table, too
            measured.write(folder, device.kind, [measured.Row(shape, found.config, found.speed)])
    return found


def search(shapes: list[Shape], device: Target, folder: Path, minutes: float, **search: Any) -> Table:
    """Write the best config of each product into a table in a folder as it comes, and return a report."""
    start, shown, pool = time.monotonic(), {}, Pool(shapes)
    for i, shape in enumerate(shapes):
        if time.monotonic() - start > 60 * minutes:
            shown[f"{len(shapes) - i} more"] = ["", "", "", "", f"not begun within {minutes:g} minutes"]
            break
        try:
            found = written(shape, device, pool, folder, **search)
        except Exception as error:  # the other shapes are still wanted
            found = in_short(error)
        shown[repr(shape)] = ["", "", "", "", found] if isinstance(found, str) else [
            f"{found.seconds * 1e3:.3f}", f"{shape.flops / found.seconds / 1e12:,.0f}", found.speed,
            f"{found.tried}, {len(found.refused)} refused", repr(found.config),
        ]  # fmt: skip
        print(f"{i + 1}/{len(shapes)} {time.monotonic() - start:.0f} s {shape} {found}", flush=True)
    note = (
        f"The fastest of the configs that were tried on {device.kind}, written to {folder}, and its speed over "
        "XLA's dense product of operands of the same width."
    )
    return Table("Tiles", note, ["product", "ms", "TFLOP/s", "over dense", "tried", "config"], shown)
