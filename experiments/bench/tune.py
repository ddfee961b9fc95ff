"""Which tiles multiply fastest on this machine: measured, and written where the library looks.

The products are those of layers, ``tokens x in x out``. Likely tiles come first; what is best of them is then varied. All
are compiled side by side, checked against XLA's product, and timed in turn with a dense one.
"""

import datetime
import json
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from experiments.bench.measure import compiled, in_turn, markdown, speedup
from nmjax.core.refusal import Refusal
from nmjax.kernels import calls, tuning
from nmjax.kernels.format import Packed
from nmjax.kernels.limits import Config, HopperConfig, Shape, config_refusal, product_refusal
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
ERROR = 0.02  # of the largest magnitude: more than a right product of bf16 or FP8 operands is off

# ---- the products of a layer ----


def layer(tokens: int, inward: int, outward: int) -> dict[str, Shape]:
    """The products of x [tokens, in], w [in, out] and g [tokens, out] with one of them packed, as they lie in training."""
    return {
        "fwd": Shape(outward, tokens, inward, m_major=True, transpose=True),
        "dx, w packed": Shape(inward, tokens, outward, transpose=True),
        "dx, g packed": Shape(tokens, inward, outward),
        "dw": Shape(outward, inward, tokens, m_major=True, n_major=True, transpose=True),
    }


def in_fp8(name: str, shape: Shape) -> Shape:
    """The same product of FP8 operands, which lie along k: weights and activations in e4m3, gradients in e5m2."""
    kind = jnp.float8_e5m2 if name in ("dx, g packed", "dw") else jnp.float8_e4m3fn
    return replace(shape, dtype=jnp.dtype(kind).name, m_major=False, n_major=False)


def of_text(text: str) -> list[Shape]:
    """The products of layers such as ``"8192x1024x4096 4096x4096x4096"``, in bf16 and FP8."""
    shapes = []
    for part in text.replace(",", " ").split():
        sizes = part.split("x")
        if len(sizes) != 3 or not all(size.isdigit() and int(size) for size in sizes):
            raise ValueError(f"--shapes {text!r}: {part!r} is no layer. Write tokens x in x out, as 8192x1024x4096.")
        made = layer(*map(int, sizes))
        shapes += [*made.values(), *(in_fp8(*item) for item in made.items())]
    return list(dict.fromkeys(shapes))


def widths() -> dict[tuple[int, int], str]:
    """(width, hidden) of feed-forward blocks, and the models that have them."""
    found = {}
    for name, size in MODELS.items():
        found.setdefault((size["width"], size["hidden"]), []).append(name)
    return {sides: ", ".join(names) for sides, names in found.items()}


def default() -> list[Shape]:
    """Square layers, then both of feed-forward blocks: those of their products that S-STE packs."""
    shapes = of_text(" ".join(f"{n}x{n}x{n}" for n in (4096, 8192, 16384)))
    for width, hidden in widths():
        for sides in ((width, hidden), (hidden, width)):
            some = {name: shape for name, shape in layer(16384, *sides).items() if name in ("fwd", "dw")}
            shapes += [*some.values(), *(in_fp8(*item) for item in some.items())]
    return list(dict.fromkeys(shapes))


# ---- operands ----


class Pool:
    """Random values and random legal words, out of which operands are cut: a generator for every shape would have to be
    compiled for every shape."""

    def __init__(self, most: int):
        keys = jax.random.split(jax.random.key(0))
        self.values = jax.jit(lambda key: jax.random.normal(key, (most + 2**16,), jnp.bfloat16))(keys[0])
        self.words = jax.jit(partial(_legal, count=most // 32 + 2**12))(keys[1])
        self.cuts = 0

    def dense(self, shape: tuple[int, ...], dtype=jnp.bfloat16) -> jax.Array:
        return self._cut(self.values, shape, dtype)

    def packed(self, shape: Shape) -> Packed:
        """The packed operand of a product, its positions random."""
        m, k = shape.m, shape.k
        values = self.dense((k // 2, m) if shape.m_major else (m, k // 2), jnp.dtype(shape.dtype))
        wide = values.dtype.itemsize == 2
        words = self._cut(self.words, (m // 64, k // 64, 128) if wide else (m, k // 32), jnp.uint32)
        return Packed(values, words, -2 if shape.m_major else -1, 2, 4, "words16" if wide else "words8")

    def pair(self, shape: Shape) -> tuple[Packed, jax.Array]:
        return self.packed(shape), self.other(shape)

    def dense_pair(self, shape: Shape) -> tuple[jax.Array, jax.Array]:
        sides = (shape.k, shape.m) if shape.m_major else (shape.m, shape.k)
        return self.dense(sides, jnp.dtype(shape.dtype)), self.other(shape)

    def other(self, shape: Shape) -> jax.Array:
        """The operand that is dense; of FP8 products in e4m3, for no library multiplies e5m2 by e5m2."""
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
    """Words of eight legal nibbles."""
    nibbles = jnp.array([0x4, 0x8, 0xC, 0x9, 0xD, 0xE], jnp.uint32)[jax.random.randint(key, (count, 8), 0, 6)]
    return jnp.sum(nibbles << (4 * jnp.arange(8, dtype=jnp.uint32))[None], 1, dtype=jnp.uint32)


def largest(shapes: list[Shape]) -> int:
    """How many values the largest operand of some products has."""
    return max(max(s.m * s.k, s.n * s.k) for s in shapes)


# ---- programs ----


def dense(shape: Shape, here: Target):
    """The dense product of the same operands and result, by XLA: bf16 out of the product itself, for a float32 one would be
    converted in another pass. On a GPU it is cuBLAS's, without the minutes in which XLA tries Triton's beside it."""
    a_axis, b_axis = (0 if major else 1 for major in (shape.m_major, shape.n_major))
    out = jnp.dtype(shape.out)

    def product(a, b):
        pairs = ((b, b_axis), (a, a_axis)) if shape.transpose else ((a, a_axis), (b, b_axis))
        (left, i), (right, j) = pairs
        return lax.dot_general(left, right, (((i,), (j,)), ((), ())), preferred_element_type=out)

    return several(product, {} if here.interpret else {"xla_gpu_enable_triton_gemm": False})


def packed(shape: Shape, here: Target, config: Config):
    return several(lambda a, b: calls.run(a, b, None, shape=shape, target=here, config=config))


def several(f: Callable, options: dict | None = None):
    """A function of many arguments' tuples, in one program: what is short is done often enough to hide its dispatch, and
    on other memory each time, so that no cache holds it."""
    one = jax.jit(f)
    return jax.jit(lambda sets: [one(*arguments) for arguments in sets], compiler_options=options or None)


def repeats(shape: Shape) -> int:
    """How many products a program does, to take about half a millisecond."""
    return max(1, min(8, math.ceil(3.5e11 / shape.flops)))


# ---- the search ----


def likely(shape: Shape, here: Target) -> list[Config]:
    """The first nine of all candidates that differ in their tiles or clusters: of the largest tiles, unless these leave the device idle."""
    kinds = {}
    for config in tuning.candidates(shape, here):
        kinds.setdefault((config.tile_m, config.tile_n, getattr(config, "cluster", "")), config)
    return list(kinds.values())[:9]


def variations(shape: Shape, config: Config) -> list[Config]:
    """The same tiles walked, fetched and stored in other ways."""
    changes = [{"stages": stages} for stages in (2, 3, 4, 5)]
    if isinstance(config, HopperConfig):
        changes = [{"band": 1}, {"band": 16}, {"in_flight": 1}]
        changes += [{"stages": s, "store_n": n} for s, n in ((4, 64), (5, 64), (4, 32), (3, 32), (5, 32))]
    made = [replace(config, **change) for change in changes]
    return [c for c in dict.fromkeys(made) if c != config and config_refusal(shape, c) is None]


class Best(NamedTuple):
    """What was found for a product."""

    config: Config
    speed: float  # times the dense product's
    seconds: float
    tried: int
    refused: tuple[str, ...]  # configs that did not compile, failed or were wrong, each with its reason


def best(shape: Shape, here: Target, pool: Pool, timer: Callable = in_turn) -> Best | str:
    """The fastest config for a product; or why there is none."""
    refusal = product_refusal(shape, here)
    if refusal is not None:
        return refusal.reason
    count, refused = repeats(shape), []
    pairs = [pool.pair(shape) for _ in range(count)]
    dense_pairs = [pool.dense_pair(shape) for _ in range(count)]
    made = compiled({"dense": (dense(shape, here), dense_pairs), "right": (_reference(shape, here), *pairs[0])})
    for program in made.values():
        if isinstance(program, Exception):
            raise program
    wanted, base = made["right"](*pairs[0]), partial(made["dense"], dense_pairs)

    def fastest(configs, known):
        """Of these and of what is known, its call and all times."""
        calls = {"dense": base} | known
        for config, program in compiled({c: (packed(shape, here, c), pairs) for c in configs}).items():
            if why := _wrong(program, pairs, wanted):
                refused.append(f"{config}: {why}")
            else:
                calls[config] = partial(program, pairs)
        if len(calls) == 1:
            return None, calls, {}
        times = timer(calls, 3, 0.01)
        return min(calls.keys() - {"dense"}, key=lambda config: statistics.median(times[config])), calls, times

    first = likely(shape, here)
    leader, calls, _ = fastest(first, {})
    if leader is None:
        return f"no config is right: {refused[0]}"
    second = variations(shape, leader)
    leader, _, times = fastest(second, {leader: calls[leader]})
    seconds = statistics.median(times[leader]) / count
    speed = speedup(times[leader], times["dense"])
    return Best(leader, speed, seconds, len(first) + len(second), tuple(refused))


def _reference(shape, here):
    """XLA's product of the packed operand."""
    form = {"axis": -2 if shape.n_major else -1, "transpose": shape.transpose, "dtype": jnp.float32}
    options = None if here.interpret else {"xla_gpu_enable_triton_gemm": False}
    return jax.jit(partial(calls.reference, **form), compiler_options=options)


def _wrong(program, pairs, wanted) -> str | None:
    """What is wrong with a config; None if nothing is."""
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


# ---- the table ----


def write(path: Path, here: Target, rows: list[dict]) -> None:
    """Rows into a table, in place of those of the same products. What the library has read of tables is forgotten."""
    shapes = [tuning.row_of(row)[0] for row in rows]
    known = json.loads(path.read_text())["rows"] if path.exists() else []
    kept = [row for row in known if tuning.row_of(row)[0] not in shapes]
    head = {"device": here.kind, "jax": jax.__version__, "date": f"{datetime.date.today()}"}
    lines = ",\n".join(f"  {json.dumps(row)}" for row in rows + kept)
    path.parent.mkdir(parents=True, exist_ok=True)
    made = path.with_suffix(".part")
    made.write_text(f'{json.dumps(head)[:-1]}, "rows": [\n{lines}\n]}}\n')
    made.replace(path)
    tuning.table.cache_clear()
    tuning.chosen.cache_clear()


def table_of(here: Target, ship: bool) -> Path:
    return (tuning.SHIPPED if ship else tuning.own_tables()) / f"{tuning.slug(here.kind)}.json"


def tune(shapes: list[Shape], ship: bool, minutes: float, timer: Callable = in_turn) -> str | None:
    """The table of what was found, having written it shape by shape; None where there is nothing to tune."""
    here = target("auto")
    if isinstance(here, Refusal):
        print(f"There is nothing to tune: {here}.")
        return None
    return search(shapes, here, table_of(here, ship), minutes, timer)


def search(shapes: list[Shape], here: Target, path: Path, minutes: float, timer: Callable = in_turn) -> str:
    """The best config of each shape, begun before the minutes are over, written one by one."""
    start, rows, shown = time.monotonic(), [], {}
    pool = Pool(largest(shapes))
    for i, shape in enumerate(shapes):
        if time.monotonic() - start > 60 * minutes:
            shown[f"{len(shapes) - i} more"] = ["", "", "", "", f"not begun within {minutes:g} minutes"]
            break
        try:
            found = best(shape, here, pool, timer)
        except Exception as error:  # one shape's: the others are still wanted
            found = f"{type(error).__name__}: {str(error)[:200]}"
        if isinstance(found, str):
            shown[repr(shape)] = ["", "", "", "", found]
        else:
            rows.append(tuning.as_row(shape, found.config, found.speed))
            write(path, here, rows)
            rate = f"{shape.flops / found.seconds / 1e12:,.0f}"
            tried = f"{found.tried}, {len(found.refused)} refused" if found.refused else f"{found.tried}"
            shown[repr(shape)] = [f"{found.seconds * 1e3:.3f}", rate, found.speed, tried, repr(found.config)]
            for reason in found.refused:
                print(f"  refused {reason}", flush=True)
        print(f"{i + 1}/{len(shapes)} {time.monotonic() - start:.0f} s {shape} {shown.get(repr(shape))}", flush=True)
    note = f"The fastest of the configs that were tried, on {here.kind}, written to {path}; how fast against XLA's dense product of operands as wide."
    return markdown("Tiles", note, shown, ["product", "ms", "TFLOP/s", "over dense", "tried", "config"])
