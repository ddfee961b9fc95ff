"""The rows of ``bench silicon``. Each is a function of the device, in order from the simplest to the largest."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import nmjax as nm
from experiments.bench import expected, tune
from experiments.bench.kernels.block import METHODS
from experiments.bench.measure import in_turn, over
from experiments.bench.silicon import whole
from nmjax.core import versions
from nmjax.kernels import HopperConfig, calls, check, tuning
from nmjax.kernels.format import pack, unpack
from nmjax.kernels.limits import Copy, Shape
from nmjax.kernels.targets import Target
from nmjax.pruners import mse, mvue, mvue_approx, soft, transposable

PARTS = ("primitives", "check", "numerics", "speed", "tiles", "training", "peers")
ERROR = 0.01  # of a result, relative to its largest value


class Row(NamedTuple):
    """A row.

    Attributes:
      part: One of `PARTS`.
      run: Takes the device, and returns what it found as a text that begins with "right" or "wrong".
      proves: The kinds of kernels that fail if it fails.
      needs: The kinds that must not have failed before.
      seconds: The time that it may take, with compilation.
      alike: In the interpreter, only the first of the rows with the same text here runs. Empty if it always runs.
      family: The family of devices that it is a row of. Empty for all.
    """

    part: str
    run: Callable[[Target], str]
    proves: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    seconds: float = 60
    alike: str = ""
    family: str = ""


def multiply(shape: Shape, config: HopperConfig, device: Target) -> str:
    """Multiply a packed matrix by a dense one, and compare with float64."""
    if config.cluster and device.interpret and not versions.interprets_clusters():
        return "not run: the interpreter of this JAX knows no clusters"
    draw = np.random.default_rng()
    kept = draw.random((shape.m, shape.k // 4, 4)).argsort(-1).argsort(-1) < 2
    a = (draw.standard_normal((shape.m, shape.k)) * kept.reshape(shape.m, shape.k)).astype(jnp.dtype(shape.dtype))
    b = draw.standard_normal((shape.n, shape.k)).astype(jnp.dtype(shape.dtype))
    packed = pack(a.T if shape.m_major else a, -2 if shape.m_major else -1)
    run = jax.jit(partial(calls.run, scale=None, shape=shape, target=device, config=config))
    y = np.asarray(run(packed, jnp.asarray(b.T if shape.n_major else b)), np.float64)
    wanted = np.asarray(a, np.float64) @ np.asarray(b, np.float64).T
    return _said(y.T if shape.transpose else y, wanted)


def _said(found: np.ndarray, wanted: np.ndarray, bound: float = ERROR) -> str:
    error = float(np.abs(found - wanted).max() / np.abs(wanted).max())
    return f"right to {error:.1e}" if error < bound else f"wrong by {error:.1e}"  # NaN is wrong


def _packing(p: nm.Pruner, axis: int, device: Target) -> str:
    """Prune and pack by a kernel, and compare the bits with the pruner and `pack`."""
    x = jnp.asarray(np.random.default_rng().standard_normal((256, 512)), jnp.bfloat16)
    made = jax.jit(lambda x: calls.compress(x, axis, p, key=3, target=device))(x)
    return _bits(made, jax.jit(lambda x: pack(p(x, axis, nm.Ctx(key=3)), axis))(x))


def _packing_activated(device: Target, size: int = 256) -> str:
    """Compute the gradient of GELU's input and pack it in one pass. Compare the bits.

    At a larger size, compare the time with that of two passes.
    """
    size, timed = (256, False) if device.interpret else (size, size > 256)
    h, g = (jnp.asarray(np.random.default_rng().standard_normal((size, size)), jnp.bfloat16) for _ in range(2))
    p = mvue(2, 4)

    def apart(h: jax.Array, g: jax.Array) -> Any:
        made = jax.vjp(jax.nn.gelu, h)[1](g)[0]
        return made, calls.compress(made, -2, p, key=3, target=device)

    together = jax.jit(lambda h, g: calls.compress_activated(jax.nn.gelu, h, g, p, key=3, target=device))
    made, packed = together(h, g)
    wanted = jax.vjp(jax.nn.gelu, h.astype(jnp.float32))[1](g.astype(jnp.float32))[0]
    said = _said(np.asarray(made, np.float64), np.asarray(wanted, np.float64))
    bits = _bits(packed, jax.jit(lambda x: pack(p(x, -2, nm.Ctx(key=3)), -2))(made))
    if not (said.startswith("right") and bits.startswith("right")) or not timed:
        return bits if said.startswith("right") else said
    ways = {"together": partial(together, h, g), "apart": partial(jax.jit(apart), h, g)}
    seconds = in_turn(ways, 9, seconds=0.05)
    return f"{said}; {over(seconds['together'], seconds['apart'])} of the time of two passes"


class _Packers(NamedTuple):
    """Two functions that pack an array to the same forms."""

    mosaic: Callable[[jax.Array], Any]
    xla: Callable[[jax.Array], Any]


def _along(p: nm.Pruner, axis: int, size: int, device: Target) -> _Packers:
    return _Packers(
        lambda x: calls.compress(x, axis, p, key=3, target=device), lambda x: pack(p(x, axis, nm.Ctx(key=3)), axis)
    )


def _along_both(size: int, device: Target) -> _Packers:
    p = transposable(2, 4)
    return _Packers(
        lambda x: calls.compress_both(x, p, target=device), lambda x: (pack(p(x, -1), -1), pack(p(x, -1), -2))
    )


def _in_fp8(size: int, device: Target) -> _Packers:
    random = Copy("e5m2", packed=True, pruner=mvue(2, 4), axis=-2, rounding="random")
    wanted = (Copy("e4m3", packed=True, pruner=mse(2, 4)), Copy("e5m2", turned=True), random)
    return _Packers(
        lambda x: [form for form, _ in calls.copies(x, wanted, keys=(3, 4), target=device)],
        lambda x: [calls.copy_by_xla(x[0], copy, 3, 4)[0] for copy in wanted],
    )


def _by_mosaic(packers: Callable[[int, Target], _Packers], device: Target) -> str:
    """Prune and pack by a kernel. Compare the bits with XLA's, and give the rate."""
    size = 128 if device.interpret else 8192
    x = jnp.asarray(np.random.default_rng().standard_normal((1, size, size)), jnp.bfloat16)
    mosaic, xla = (jax.jit(way) for way in packers(size, device))
    made = mosaic(x)
    said = _bits(made, xla(x))
    if device.interpret:
        return said
    seconds = in_turn({"Mosaic": partial(mosaic, x)}, 9, seconds=0.05)
    rate = sum(v.nbytes for v in (x, *jax.tree.leaves(made))) / np.median(seconds["Mosaic"]) / 1e12
    return f"{said}; {rate:.2f} TB/s"


def _check(device: Target) -> str:
    """Run the check before use, so that no later row has to."""
    if device.interpret:
        return "not run: the interpreter needs no check"
    wrong = check.findings(device, jax.devices()[0])
    return f"wrong: {'; '.join(f'{kind} {text}' for kind, text in wrong.items())}" if wrong else "right"


def _packing_both(device: Target) -> str:
    x, p = jnp.asarray(np.random.default_rng().standard_normal((256, 512)), jnp.bfloat16), transposable(2, 4)
    made = jax.jit(lambda x: calls.compress_both(x, p, target=device))(x)
    return _bits(made, jax.jit(lambda x: (pack(p(x, -1), -1), pack(p(x, -1), -2)))(x))


def _packing_in_fp8(device: Target) -> str:
    x = jnp.asarray(np.random.default_rng().standard_normal((256, 512)), jnp.bfloat16)
    wanted = (Copy("e4m3", packed=True, pruner=mse(2, 4)), Copy("e5m2", turned=True))
    (packed, undo), (dense, undo_dense) = jax.jit(lambda x: calls.copies(x, wanted, target=device))(x)
    exact = lambda v, undo: np.asarray(v, np.float64) * float(undo)
    pruned = np.asarray(mse(2, 4)(x), np.float64)
    errors = (
        np.abs(exact(nm.unpack(packed), undo) - pruned),
        np.abs(exact(dense, undo_dense).T - np.asarray(x, np.float64)),
    )
    error = max(float(e.max()) for e in errors) / float(np.abs(np.asarray(x, np.float64)).max())
    return f"right to {error:.1e}" if error < 2**-3 else f"wrong by {error:.1e}"  # e5m2 has two bits


def _bits(made: object, wanted: object) -> str:
    """Compare the bits. One float in a thousand may differ in the last place, because compilers round divisions."""
    leaves = ([np.asarray(leaf).reshape(-1) for leaf in jax.tree.leaves(tree)] for tree in (made, wanted))
    said, right = [], True
    for a, b in zip(*leaves, strict=True):
        apart = a != b
        if apart.any():
            bits = [v[apart].view(f"int{8 * v.itemsize}").astype(np.int64) for v in (a, b)]
            steps = int(np.abs(bits[0] - bits[1]).max())
            said.append(f"{apart.sum():,} of {apart.size:,} of {a.dtype} differ, by up to {steps} in the last place")
            right = right and jnp.issubdtype(a.dtype, jnp.floating) and steps == 1 and apart.mean() <= 1e-3
    if not right:
        return f"wrong: {', '.join(said)}"
    return f"right, but {', '.join(said)}" if said else "right, value for value"


def _slots(text: str, device: Target) -> str:
    """Compare y, dx and dw of kernels with those of XLA. In FP8 the two round at other scales."""
    bound = 0.2 if "fp8" in text else ERROR
    s, draw = nm.parse(text), np.random.default_rng()
    size = 128 if device.interpret else 1024
    x, w, g = (jnp.asarray(draw.standard_normal((size, size)), jnp.bfloat16) for _ in range(3))
    state = s.init(w, contract=0, out=1, ctx=nm.Ctx(nm.random.words(1))) or None

    def products(backend: str, x: jax.Array, w: jax.Array, g: jax.Array) -> tuple[jax.Array, ...]:
        ctx = nm.Ctx(7, 3, state)
        y, back = jax.vjp(lambda x, w: nm.einsum("ti,io->to", x, w, sparsity=s, ctx=ctx, backend=backend), x, w)
        return y, *back(g)

    kernels = "interpret" if device.interpret else "pallas"
    found, wanted = (jax.jit(partial(products, backend))(x, w, g) for backend in (kernels, "xla"))
    said = [
        _said(np.asarray(a, np.float64), np.asarray(b, np.float64), bound) for a, b in zip(found, wanted, strict=True)
    ]
    right = all(text.startswith("right") for text in said)
    return ("right: " if right else "wrong: ") + ", ".join(
        f"{name} {t}" for name, t in zip(("y", "dx", "dw"), said, strict=True)
    )


def _speed(size: int, dtype: str, device: Target) -> str:
    """Return the time of a product of squares relative to the dense one."""
    if device.interpret:
        return whole.NO_SPEED
    shape, pool = Shape(size, size, size, dtype), tune.Pool(size * size)
    tiling = tuning.chosen(shape, device)
    assert tiling is not None, shape
    packed, b = pool.pair(shape)
    sparse, dense = tune.packed(shape, device, tiling.config), tune.dense(shape, device)
    run = {"sparse": partial(sparse, [(packed, b)]), "dense": partial(dense, [pool.dense_pair(shape)])}
    some = [np.asarray(v[:64], np.float64) for v in (unpack(packed), b)]  # rows of A and columns of B
    said = _said(np.asarray(run["sparse"]()[0][:64, :64], np.float64), some[0] @ some[1].T)
    seconds = in_turn(run, 9, seconds=0.1)
    tflops = shape.flops / np.median(seconds["sparse"]) / 1e12
    return f"{said}; {over(seconds['dense'], seconds['sparse'])} times the dense speed, {tflops:.0f} TFLOP/s"


def _layout(name: str, m_major: bool, n_major: bool, transpose: bool) -> dict[str, Row]:
    kind = f"products {name}"
    shape = Shape(128, 64, 128, "bfloat16", m_major, n_major, transpose)
    tile = HopperConfig(tile_n=64, store_n=32, stages=2)
    return {f"one tile {name}": Row("primitives", partial(multiply, shape, tile), (kind,), family="hopper")}


_TILE = HopperConfig(tile_n=64, store_n=32, stages=2)
_BASE = ("products along K",)


def _cut(shape: Shape, *needs: str, **cut: object) -> Row:
    config = HopperConfig(**{"tile_n": 64, "store_n": 32, "stages": 2} | cut)
    return Row("primitives", partial(multiply, shape, config), needs=needs or _BASE, family="hopper")


def _packs(p: nm.Pruner, axis: int, *needs: str, proves: str = "") -> Row:
    return Row("primitives", partial(_packing, p, axis), (proves,) if proves else (), needs)


def _needs(shape: Shape) -> tuple[str, ...]:
    """Return the kinds of kernels that must not have failed before the tiles of a product are searched."""
    if shape.itemsize == 1:
        return ("FP8",)
    if shape.m_major and shape.n_major:
        return ("products as in dw",)
    also = {"products with A along M": shape.m_major, "products transposed": shape.transpose}
    return _BASE + tuple(kind for kind, so in also.items() if so)


ROWS: dict[str, Row] = {
    "packing along the last axis": _packs(mse(2, 4), -1, proves="packing along the last axis"),
    "packing along the axis before": _packs(mse(2, 4), -2, proves="packing along the axis before"),
    "packing with noise": _packs(mvue(2, 4), -2, "packing along the axis before", proves="noise"),
    "packing with two draws": _packs(mvue_approx(2, 4), -2, "noise"),
    "packing by soft": _packs(soft(2, 4), -1, "packing along the last axis"),
    "packing along both axes": Row("primitives", _packing_both, ("packing along both axes",)),
    "packing with an activation's derivative": Row(
        "primitives", _packing_activated, ("packing with an activation's derivative",),
        ("packing along the axis before", "noise"), alike="activated",
    ),
    **_layout("along K", False, False, False),
    **_layout("with A along M", True, False, False),
    **_layout("with B along N", False, True, False),
    **_layout("transposed", False, False, True),
    "one tile as in dw": Row(
        "primitives", partial(multiply, Shape(128, 64, 128, m_major=True, n_major=True, transpose=True), _TILE),
        ("products as in dw",), ("products with A along M", "products with B along N", "products transposed"),
        family="hopper",
    ),
    "one tile in float16": _cut(Shape(128, 64, 128, "float16")),
    "several steps": _cut(Shape(128, 64, 512)),
    "several tiles": _cut(Shape(512, 256, 128)),
    "a cluster along M": _cut(Shape(512, 128, 128), cluster="m"),
    "a cluster along N": _cut(Shape(256, 256, 128), cluster="n"),
    "tall tiles": _cut(Shape(256, 64, 128), tile_m=128),
    "long steps": _cut(Shape(128, 64, 512), tile_k=128),
    "parts of K": _cut(Shape(128, 64, 512, m_major=True, n_major=True, transpose=True), "products as in dw", split=3),
    "a partial tile": _cut(Shape(128, 104, 128, transpose=True), "products transposed"),
    "packing in FP8": Row("primitives", _packing_in_fp8, ("FP8",)),
    "one tile in FP8": Row(
        "primitives", partial(multiply, Shape(128, 64, 256, "float8_e4m3fn", transpose=True), _TILE), ("FP8",),
        family="hopper",
    ),
    "the check before use": Row("check", _check, seconds=360),
    **{
        f"slots of {text}": Row("numerics", partial(_slots, text), (), needs, 120)
        for text, needs in {
            "ste(2,4)": ("packing along the axis before", "products with A along M", "products transposed"),
            "mvue(2,4)": ("noise", "products as in dw"),
            "s_ste(2,4)": ("noise", "products as in dw"),
            "bdwp(2,4)": ("packing along the last axis", *_BASE),
            "fst(2,4)": ("noise", "packing along both axes", "products as in dw"),
            "s_ste(2,4,fp8=True)": ("FP8",),
        }.items()
    },
    **{
        f"packing by Mosaic: {p} along axis {axis}": Row("speed", partial(_by_mosaic, partial(_along, p, axis)))
        for p, axis in ((mse(2, 4), -1), (mse(2, 4), -2), (mvue(2, 4), -2))
    },
    "packing by Mosaic along both axes": Row("speed", partial(_by_mosaic, _along_both)),
    "packing by Mosaic in FP8": Row("speed", partial(_by_mosaic, _in_fp8)),
    "packing with an activation's derivative, 8192 x 8192": Row(
        "speed", partial(_packing_activated, size=8192), (), ("packing with an activation's derivative",),
        alike="activated",
    ),
    **{
        f"{dtype} {size} x {size} x {size}": Row("speed", partial(_speed, size, dtype), (), needs, 120, "speed")
        for dtype, needs in {"bfloat16": _BASE, "float8_e4m3fn": ("FP8",)}.items()
        for size in (4096, 8192)
    },
    **{
        f"feed-forward, {width} wide, {method}": Row(
            "speed", partial(whole.feed_forward, width, method), (), (), 120, method
        )
        for width in (4096, 8192)
        for method in METHODS if method != "dense bf16"
    },
    **{
        f"tiles of {name}": Row(
            "tiles", partial(whole.tiles, shape), (), _needs(shape), 180, f"{_needs(shape)} {shape.dtype}"
        )
        for name, shape in whole.searches().items()
    },
    **{
        f"step of {model}: {method}": Row("training", partial(whole.training, model, method), seconds=240)
        for method in expected.METHODS
        for model in expected.MODELS
    },
    **{
        f"cuSPARSELt, {kind}, {n} x {n} x {n}": Row("peers", partial(whole.peer, n, kind), (), (), 120, "peers")
        for n in (4096, 8192)
        for kind in ("bf16", "FP8")
    },
}  # fmt: skip
