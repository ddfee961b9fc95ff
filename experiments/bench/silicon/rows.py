"""The rows of ``bench silicon``. Each is a function of the device, in order from the simplest to the largest."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import nmjax as nm
from experiments.bench import steps, tune
from experiments.bench.measure import compiled, copy, in_turn, over
from experiments.bench.silicon import programs, sources
from experiments.bench.silicon.peers import peer
from experiments.bench.silicon.programs import NO_SPEED
from experiments.bench.silicon.sources import PACKING, PRODUCTS, TILES
from nmjax.core import versions
from nmjax.kernels import HopperConfig, calls, check, measured
from nmjax.kernels.check import ACTIVATED, BEFORE, BOTH, FP8, FP8_FORMS, LAST, NOISE
from nmjax.kernels.format import pack
from nmjax.kernels.limits import Copy, Shape, product_refusal
from nmjax.kernels.targets import Target
from nmjax.pruners import mse, mvue, mvue_approx, soft, transposable

ERROR = 0.01  # of a result, relative to its largest value
BF16, F16, E4M3, E5M2 = "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"


class Part(NamedTuple):
    """A part of the queue.

    Attributes:
      minutes: Its slice of time. Rows of it that are left when the slice is over come after all other parts; with a
        slice of 0 all of them do.
      at_once: The number of rows that run side by side.
      every: Whether it is of every family of GPUs, or of Hopper only.
    """

    minutes: float
    at_once: int
    every: bool = False


PARTS = {  # in the order of their value. Together they take three commands of nine minutes
    "check": Part(1, 1, every=True),
    "steps": Part(10, 2),  # two have memory beside each other
    "blocks": Part(3, 6),
    "numerics": Part(4, 8, every=True),
    "tiles": Part(4, 6, every=True),
    "peers": Part(2, 1),
    "studies": Part(3, 1),
    "again": Part(0, 2),  # steps, with the tiles that were found since
}


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
      kernels: The groups of kernels that it runs. It runs again when the version of one has changed.
    """

    part: str
    run: Callable[[Target], str]
    proves: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    seconds: float = 60
    alike: str = ""
    family: str = ""
    kernels: tuple[str, ...] = sources.ALL


def _normal(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng().standard_normal(shape), jnp.bfloat16)


def _said(found: Any, wanted: Any, bound: float = ERROR) -> str:
    """Compare a result with the right one, relative to its largest value."""
    found, wanted = (np.asarray(v, np.float64) for v in (found, wanted))
    error = float(np.abs(found - wanted).max() / np.abs(wanted).max())
    return f"right to {error:.1e}" if error < bound else f"wrong by {error:.1e}"  # NaN is wrong


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


# ---- products ----


def multiply(shape: Shape, config: HopperConfig, device: Target) -> str:
    """Multiply a packed matrix by a dense one, and compare with XLA's product."""
    if config.cluster and device.interpret and not versions.interprets_clusters():
        return "not run: the interpreter of this JAX knows no clusters"
    pair = tune.Pool([shape]).pair(shape)
    return _said(tune.packed(shape, device, config)([pair])[0], tune.reference(shape, device)(*pair))


def _every_layout(kind: str, device: Target) -> str:
    """Multiply in every layout by every likely config; in the interpreter by one.

    Each program first multiplies other values into memory of the same size, so values that it misses show.
    """
    refusal = product_refusal(Shape(256, 512, 512, kind), device)
    if refusal is not None:
        return f"not run: {refusal}"
    cases, sides = [], (128, 64, 256) if device.interpret else (256, 512, 512)
    same = BF16 if kind in (E4M3, E5M2) else kind
    wide = [] if device.interpret else [(4096, 4096, 512, same), (*sides, "float32")]  # more tiles than cores
    for lies in product((False, True), repeat=3):
        for m, n, k, out in [(*sides, same), *wide]:
            shape = Shape(m, n, k, kind, *lies, out)
            configs = tune.likely(shape, device) if product_refusal(shape, device) is None else []
            cases += [(shape, c) for c in (configs[:1] if device.interpret or m > sides[0] else configs)]
    pool = tune.Pool([shape for shape, _ in cases])
    first = {case: pool.pair(case[0]) for case in cases}
    programs = compiled({case: (tune.packed(case[0], device, case[1]), [first[case]]) for case in cases})
    wrong, worst = [], 0.0
    for (shape, config), run in programs.items():
        if isinstance(run, Exception):
            raise run
        jax.block_until_ready(run([first[shape, config]]))
        pair = pool.pair(shape)
        said = _said(run([pair])[0], tune.reference(shape, device)(*pair))
        wrong += [f"{shape} by {config} {said}"] if said.startswith("wrong") else []
        worst = max(worst, float(said.split()[-1]))
    told = f"{len(wrong)} of {len(cases)}: {'; '.join(wrong[:3])}"
    return f"wrong: {told}" if wrong else f"right to {worst:.1e}, {len(cases)} kernels"


def _sums_in_fp8(device: Target) -> str:
    """Tell how exact long sums are. Those of positive values show what is cut off at every addition."""
    shape, texts = Shape(*((128, 128, 512) if device.interpret else (256, 256, 16384)), E4M3, out="float32"), []
    for promote, positive in product((False, True), repeat=2):
        pair = tune.Pool([shape], positive).pair(shape)
        y = tune.packed(shape, device, HopperConfig(tile_n=128, promote=promote))([pair])[0]
        said = _said(y, tune.reference(shape, device)(*pair), bound=0.1)
        texts.append(f"{said} {'promoted' if promote else 'not promoted'}{', positive' if positive else ''}")
    return f"{'right' if all(text.startswith('right') for text in texts) else 'wrong'}: {'; '.join(texts)}"


def _slots(text: str, device: Target) -> str:
    """Compare y, dx and dw of kernels with those of XLA. In FP8 the two round at other scales."""
    bound, size = 0.2 if "fp8" in text else ERROR, 128 if device.interpret else 1024
    s, (x, w, g) = nm.parse(text), (_normal(size, size) for _ in range(3))
    state = s.init(w, contract=0, out=1, ctx=nm.Ctx(nm.random.words(1))) or None

    def products(backend: str, x: jax.Array, w: jax.Array, g: jax.Array) -> tuple[jax.Array, ...]:
        ctx = nm.Ctx(7, 3, state)
        y, back = jax.vjp(lambda x, w: nm.einsum("ti,io->to", x, w, sparsity=s, ctx=ctx, backend=backend), x, w)
        return y, *back(g)

    kernels = "interpret" if device.interpret else "pallas"
    found, wanted = (jax.jit(partial(products, backend))(x, w, g) for backend in (kernels, "xla"))
    said = [_said(a, b, bound) for a, b in zip(found, wanted, strict=True)]
    right = all(text.startswith("right") for text in said)
    return f"{'right' if right else 'wrong'}: " + ", ".join(map("{} {}".format, ("y", "dx", "dw"), said))


LAYERS = {  # of the steps that are timed, with their tokens
    "4096 wide up": (16384, 4096, 16384),
    "4096 wide down": (16384, 16384, 4096),
    **{
        f"{model} {name}": (tokens, *sides)
        for name, sides in {"up": (768, 3072), "down": (3072, 768), "attention": (768, 768)}.items()
        for model, tokens in {"ViT-B": 64 * 197, "GPT-2": 32 * 1024}.items()
    },
}
SQUARES = {(n, kind): Shape(n, n, n, kind) for n in (4096, 8192) for kind in (BF16, E4M3)}  # those of peers


def searches() -> dict[str, Shape]:
    """Return the products whose tiles are searched: those of most steps first."""
    found = {}
    for name in ("y", "dw", "y in FP8", "dw in FP8", "dx, g packed", "dx, w packed", "dx, g packed in FP8"):
        for layer, sizes in LAYERS.items():
            if not (name.endswith("FP8") and layer.startswith("ViT")):  # 128 does not divide its tokens
                found[f"{layer}: {name}"] = tune.layer(*sizes)[name]
        if name == "dw in FP8":
            found |= {f"{n} x {n} x {n} in {kind}": shape for (n, kind), shape in SQUARES.items()}
    return found


def _tiles(shape: Shape, device: Target) -> str:
    """Search the fastest tiles of a product, and write them into the table of the device."""
    if device.interpret:
        shape = Shape(128, 64, 128, shape.dtype, shape.m_major, shape.n_major, shape.transpose)
    refusal = product_refusal(shape, device)
    if refusal is not None:
        return f"not run: {refusal}"
    best = tune.written(shape, device, tune.Pool([shape]), measured.own_tables(), most=1 if device.interpret else 12)
    if isinstance(best, str):
        return f"wrong: {best}"
    if device.interpret:
        return f"{NO_SPEED}; {best.config}"
    refused = f", {len(best.refused)} refused: {best.refused[0]}" if best.refused else ""
    rate = f"{shape.flops / best.seconds / 1e12:.0f} TFLOP/s, {best.config}, {best.tried} tried{refused}"
    return f"right: {best.speed:.2f} times the dense speed, {rate}"


# ---- packing ----

KEYS = (3, 4)  # of draws, and of roundings to FP8


class _Ways(NamedTuple):
    """Functions that pack an array to the same forms: by a kernel, and by XLA."""

    kernel: Callable[[jax.Array], Any]
    xla: Callable[[jax.Array], Any]


def _along(p: nm.Pruner, axis: int, device: Target) -> _Ways:
    return _Ways(
        lambda x: calls.compress(x, axis, p, key=KEYS[0], target=device),
        lambda x: pack(p(x, axis, nm.Ctx(key=KEYS[0])), axis),
    )


def _along_both(p: nm.Pruner, device: Target) -> _Ways:
    wanted = tuple(Copy(None, packed=True, pruner=p, axis=axis) for axis in (-2, -1))
    return _Ways(
        lambda x: calls.copies(x, wanted, keys=[(key, None) for key in KEYS], target=device),
        lambda x: [calls.copy_by_xla(x, *given) for given in zip(wanted, KEYS, strict=True)],
    )


def _in_fp8(device: Target) -> _Ways:
    random = Copy("e5m2", packed=True, pruner=mvue(2, 4), axis=-2, rounding="random")
    wanted = (Copy("e4m3", packed=True, pruner=mse(2, 4)), Copy("e5m2", turned=True), random)
    keys = [(KEYS[0] + i, KEYS[1] + 4 + i) for i in range(len(wanted))]
    return _Ways(
        lambda x: [form for form, _ in calls.copies(x, wanted, keys=keys, target=device)],
        lambda x: [calls.copy_by_xla(x[0], one, *own)[0] for one, own in zip(wanted, keys, strict=True)],
    )


def _kind(kind: str, device: Target) -> str:
    """Run the case of a kind of kernel in the check before use: value for value."""
    case = check.cases(device).get(kind)
    if case is None:
        return f"not run: {device.family} has no kernel for it"
    return "right, value for value" if case() else "wrong numbers"


def _packs(p: nm.Pruner, axis: int, device: Target) -> str:
    """Prune and pack along an axis, and compare the bits with XLA's."""
    x = _normal(256, 512)
    ways = _along(p, axis, device)
    return _bits(jax.jit(ways.kernel)(x), jax.jit(ways.xla)(x))


def _packing(ways: Callable[[Target], _Ways], device: Target) -> str:
    """Prune and pack by a kernel. Compare the bits with XLA's, and give the rate beside that of a copy of the array."""
    x = _normal(1, *(2 * (128 if device.interpret else 8192,)))
    kernel, xla = (jax.jit(way) for way in ways(device))
    made = kernel(x)
    said = _bits(made, xla(x))
    if device.interpret:
        return said
    seconds = in_turn({"kernel": partial(kernel, x), "copy": partial(jax.jit(copy), x)}, 9, 0.05)
    rates = [sum(v.nbytes for v in (x, *jax.tree.leaves(made))), 2 * x.nbytes]
    ours, floor = (n / np.median(seconds[name]) / 1e12 for n, name in zip(rates, ("kernel", "copy"), strict=True))
    return f"{said}; {ours:.2f} TB/s, and a copy {floor:.2f} TB/s"


def _packing_activated(device: Target) -> str:
    """Compute the gradient of GELU's input and pack it in one pass, and in two."""
    if device.interpret:
        return NO_SPEED
    h, g, p = _normal(8192, 8192), _normal(8192, 8192), mvue(2, 4)

    def apart(h: jax.Array, g: jax.Array) -> Any:
        made = jax.vjp(jax.nn.gelu, h)[1](g)[0]
        return made, calls.compress(made, -2, p, key=KEYS[0], target=device)

    together = jax.jit(lambda h, g: calls.compress_activated(jax.nn.gelu, h, g, p, key=KEYS[0], target=device))
    made, packed = together(h, g)
    said = _said(made, jax.vjp(jax.nn.gelu, h.astype(jnp.float32))[1](g.astype(jnp.float32))[0])
    bits = _bits(packed, jax.jit(lambda x: pack(p(x, -2, nm.Ctx(key=KEYS[0])), -2))(made))
    if not bits.startswith("right"):
        return bits
    seconds = in_turn({"together": partial(together, h, g), "apart": partial(jax.jit(apart), h, g)}, 9, 0.05)
    return f"{said}; {over(seconds['together'], seconds['apart'])} of the time of two passes"


# ---- the check before use ----


def _check(device: Target) -> str:
    """Run the check before use, so that no later row has to."""
    if device.interpret:
        return "not run: the interpreter needs no check"
    wrong = check.findings(device, jax.devices()[0])
    return f"wrong: {'; '.join(f'{kind} {text}' for kind, text in wrong.items())}" if wrong else "right"


# ---- the rows ----

_AS_DW = {"m_major": True, "n_major": True, "transpose": True}
_K, _A, _B, _TURNED, _Y, _DW = (
    check.layout_kind(Shape(128, 64, 128, **lies))
    for lies in (
        {},
        {"m_major": True},
        {"n_major": True},
        {"transpose": True},
        {"m_major": True, "transpose": True},
        _AS_DW,
    )
)


def _cut(shape: Shape, needs: tuple[str, ...] = (_K,), proves: tuple[str, ...] = (), **cut: Any) -> Row:
    config = HopperConfig(**{"tile_n": 64, "store_n": 32, "stages": 2} | cut)
    return Row("numerics", partial(multiply, shape, config), proves, needs, family="hopper", kernels=(PRODUCTS,))


def _form(shape: Shape) -> tuple[str, ...]:
    """Return the kinds of kernels that must not have failed before the tiles of a product are searched."""
    return (FP8,) if shape.itemsize == 1 else (check.layout_kind(shape),)


def _steps(part: str, methods: Sequence[str], tiles: str = "") -> dict[str, Row]:
    """Return the rows of whole steps: all of the block 4096 wide, and then those of the models, method by method."""
    models = list(zip(steps.LARGE.items(), steps.SMALL, strict=True))
    found = {}
    for own in (models[2:], models[:2]):
        for method in methods:
            for (model, large), small in own:
                if "FP8" not in method or not model.startswith("ViT"):  # 128 does not divide its tokens
                    run, alike = partial(programs.step, large, small, method, True), method * (method != "S-STE")
                    found[f"step of {model}: {method}{tiles}"] = Row(part, run, (), (), 240, alike + tiles)
    return found


ROWS: dict[str, Row] = {
    "the check before use": Row("check", _check, seconds=360),
    **_steps("steps", [method for method in programs.METHODS if method != "dense"]),
    **{
        f"feed-forward, {width} wide, {method}": Row(
            "blocks",
            partial(programs.step, steps.block(16384, width), steps.block(128, 64), method, False),
            seconds=120,
            alike=f"block {method}",
        )
        for width in (4096, 8192)
        for method in ("S-STE", "dense FP8", "S-STE FP8")
    },
    **{
        kind: Row("numerics", partial(_kind, kind), (kind,), needs, kernels=kernels)
        for kind, needs, kernels in (
            (LAST, (), (PACKING,)),
            (BEFORE, (), (PACKING,)),
            (NOISE, (BEFORE,), (PACKING,)),
            (BOTH, (), (TILES,)),
            (ACTIVATED, (), (PACKING,)),
            (FP8_FORMS, (), (TILES,)),
        )
    },
    "packing with two draws": Row(
        "numerics", partial(_packs, mvue_approx(2, 4), -2), (), (NOISE,), kernels=(PACKING,)
    ),
    "packing by soft": Row("numerics", partial(_packs, soft(2, 4), -1), (), (LAST,), kernels=(PACKING,)),
    "one tile along K": _cut(Shape(128, 64, 128), (), (_K,)),
    "one tile with A along M": _cut(Shape(128, 64, 128, m_major=True), (), (_A,)),
    "one tile with B along N": _cut(Shape(128, 64, 128, n_major=True), (), (_B,)),
    "one tile transposed": _cut(Shape(128, 64, 128, transpose=True), (), (_TURNED,)),
    "one tile as in dw": _cut(Shape(128, 64, 128, **_AS_DW), (_A, _B, _TURNED), (_DW,)),
    "one tile as in y": _cut(Shape(128, 64, 128, m_major=True, transpose=True), (_A, _TURNED), (_Y,)),
    "one tile in float16": _cut(Shape(128, 64, 128, F16)),
    "several steps": _cut(Shape(128, 64, 512)),
    "several tiles": _cut(Shape(512, 256, 128)),
    "a cluster along M": _cut(Shape(512, 128, 128), cluster="m"),
    "a cluster along N": _cut(Shape(256, 256, 128), cluster="n"),
    "tall tiles": _cut(Shape(256, 64, 128), tile_m=128),
    "long steps": _cut(Shape(128, 64, 512), tile_k=128),
    "parts of K": _cut(Shape(128, 64, 512, **_AS_DW), (_DW,), split=3),
    "a partial tile": _cut(Shape(128, 104, 128, transpose=True), (_TURNED,)),
    "one tile in FP8": _cut(Shape(128, 64, 256, E4M3, transpose=True), (), (FP8,)),
    **{
        f"slots of {text}": Row("numerics", partial(_slots, text), (), needs, 120)
        for text, needs in {
            "ste(2,4)": (BEFORE, _Y),
            "mvue(2,4)": (NOISE, _DW),
            "s_ste(2,4)": (NOISE, _DW),
            "bdwp(2,4)": (LAST, _K),
            "fst(2,4)": (NOISE, BOTH, _DW),
            "s_ste(2,4,fp8=True)": (FP8_FORMS, FP8),
        }.items()
    },
    **{
        f"every layout in {kind}": Row("numerics", partial(_every_layout, kind), (), needs, 240, kernels=(PRODUCTS,))
        for kind, needs in {BF16: (_DW,), F16: (_DW,), E4M3: (FP8,), E5M2: (FP8,)}.items()
    },
    "long sums in FP8": Row("numerics", _sums_in_fp8, (), (FP8,), family="hopper", kernels=(PRODUCTS,)),
    **{
        f"packing by Mosaic{name}": Row("numerics", partial(_packing, ways), kernels=(kernels,))
        for name, ways, kernels in (
            (f": {mse(2, 4)} along axis -1", partial(_along, mse(2, 4), -1), PACKING),
            (f": {mse(2, 4)} along axis -2", partial(_along, mse(2, 4), -2), PACKING),
            (f": {mvue(2, 4)} along axis -2", partial(_along, mvue(2, 4), -2), PACKING),
            (" along both axes", partial(_along_both, transposable(2, 4)), TILES),
            (f": {mvue(2, 4)} along both axes", partial(_along_both, mvue(2, 4)), TILES),
            (" in FP8", _in_fp8, TILES),
        )
    },
    f"{ACTIVATED}, 8192 x 8192": Row("numerics", _packing_activated, (), (ACTIVATED, NOISE), kernels=(PACKING,)),
    **{
        f"tiles of {name}": Row(
            "tiles", partial(_tiles, shape), (), _form(shape), 180, f"{_form(shape)} {shape.dtype}", kernels=(PRODUCTS,)
        )
        for name, shape in searches().items()
    },
    **{
        f"cuSPARSELt, {'FP8' if kind == E4M3 else 'bf16'}, {n} x {n} x {n}": Row(
            "peers", partial(peer, shape), (), (), 120, "peers", kernels=(PRODUCTS,)
        )
        for (n, kind), shape in SQUARES.items()
    },
    **{name: Row("studies", partial(programs.study, name), seconds=240, alike="studies") for name in programs.STUDIES},
    **_steps("again", ("S-STE", "S-STE FP8"), ", with the tiles of this run"),
}  # fmt: skip
