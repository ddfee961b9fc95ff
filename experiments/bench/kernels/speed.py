"""The speed of products and of packing."""

from collections.abc import Callable
from functools import partial
from itertools import product

import jax.numpy as jnp

import nmjax as nm
from experiments.bench import tune
from experiments.bench.kernels.check_packing import BETA, FORMS, KEY, PRUNERS, ROUNDING
from experiments.bench.kernels.report import Report, Setting
from experiments.bench.kernels.times import built, repeated, timed
from experiments.bench.measure import NEAR_ONE
from nmjax.kernels import calls, tuning
from nmjax.kernels.limits import Shape, product_refusal


def products(setting: Setting, report: Report) -> None:
    """Report the speed of packed and dense products, of square layers and of feed-forward blocks."""
    head = ["product", "ms", "TFLOP/s", "over dense bf16", "over dense FP8", "config"]
    tokens = (8192,) if setting.quick else (8192, 16384, 65536)
    square = {f"{n}": tune.layer(n, n, n) for n in setting.sizes}
    blocks = {
        f"{models}: {t} x {width} x {hidden}": {
            name: shape for name, shape in tune.layer(t, width, hidden).items() if name in ("fwd", "dw")
        }
        for t in tokens
        for (width, hidden), models in tune.widths().items()
    }
    pool = tune.Pool(
        tune.largest([s for layers in (square, blocks) for shapes in layers.values() for s in shapes.values()])
    )
    note = (
        "Operands are packed before. Rates are those of the dense product. Over: how many times faster, the median of "
        "the rounds' ratios. Dense are cuBLAS's products into bf16, of operands with the layouts of training; in FP8 "
        "both are k-major. A star marks a config that was measured before; the others are guessed."
    )
    for title, layers, text in (
        ("Square products", square, note),
        ("The first layer of feed-forward blocks: tokens x in x out", blocks, "As above."),
    ):
        report.table(title, text, head)
        for name, shapes in layers.items():
            _layer(name, shapes, setting, pool, report)


def _layer(name: str, shapes: dict[str, Shape], setting: Setting, pool: tune.Pool, report: Report) -> None:
    """Report the products of one layer."""
    device, programs, notes = setting.target, {}, {}
    every = {
        (p, kind): s if kind == "bf16" else tune.in_fp8(p, s) for p, s in shapes.items() for kind in ("bf16", "FP8")
    }
    for (p, kind), shape in every.items():
        count = tune.repeats(shape)
        programs[p, kind, "dense"] = repeated(tune.dense(shape, device), partial(pool.dense_pair, shape), count)
        refusal = product_refusal(shape, device)
        if refusal is not None:
            notes[p, kind, "packed"] = refusal.reason
        else:
            config, speed = tuning.chosen(shape, device)
            notes[p, kind, "packed"] = f"{config}{'*' if speed else ''}"
            programs[p, kind, "packed"] = repeated(tune.packed(shape, device, config), partial(pool.pair, shape), count)
    programs = built(programs)
    for p in shapes:
        times = timed({key: program for key, program in programs.items() if key[0] == p}, setting.rounds)
        for kind, which in product(("bf16", "FP8"), ("dense", "packed")):
            key, bases = (p, kind, which), [(p, base, "dense") for base in ("bf16", "FP8")]
            rate = times.rate(key, every[p, kind].flops)
            over, note = [times.over(key, base) for base in bases], times.note(key, notes.get(key, ""))
            report.row(f"{name}, {p}, {which} {kind}", times.ms(key), rate, *over, note)


def packing_speed(setting: Setting, report: Report) -> None:
    """Report the speed of packing, over the time of a copy of as many bytes."""
    device, both = setting.target, nm.transposable(2, 4)
    report.table(
        "Packing beside its memory floor",
        "Of n x n in bf16. Bytes are those of the array, read once, and of all that is written. The floor is the time "
        "of a device copy of as many bytes, x * 1.0078125 of bf16, in the same rounds. FP8 forms need the largest "
        "magnitude first, and so a second reading, which is in the time but not in the floor.",
        ["what", "ms", "bytes a value", "TB/s", "TB/s of the copy", "time over floor"],
    )
    ways: dict[str, tuple[Callable, float]] = {
        f"{p}, axis {axis}": (
            lambda x, p=p, axis=axis, noise=noise: calls.compress(x, axis, p, target=device, **noise),
            3.125,
        )
        for p, noise in PRUNERS
        for axis in (-1, -2)
    }
    ways["both axes, 2:4 already"] = lambda x: calls.compress_both(x, target=device), 4.25
    ways[f"both axes, {both}"] = lambda x: calls.compress_both(x, both, target=device), 4.25
    for name, wanted in FORMS.items() if device.family == "hopper" else ():
        way = partial(calls.copies, wanted=wanted, keys=(KEY, ROUNDING), state=BETA, target=device)
        ways[f"FP8 forms, {name}"] = way, 2 + sum(0.625 if copy.packed else 1 for copy in wanted)
    pool = tune.Pool(max(setting.sizes) ** 2 * 5 // 4)
    for n in setting.sizes:
        programs = {}
        for name, (way, size) in ways.items():
            count, lines = max(1, min(16, int(2e9 / (n * n * size)))), int(n * n * size) // 4096
            programs[name] = repeated(tune.several(way), lambda n=n: (pool.dense((n, n)),), count)
            programs[size] = repeated(tune.several(_copied), lambda lines=lines: (pool.dense((lines, 1024)),), count)
        times = timed(built(programs), setting.rounds)
        for name, (_, size) in ways.items():
            rates = [times.rate(which, n * n * size) for which in (name, size)]
            slower = times.over(size, name)
            report.row(
                f"{n}: {name}{times.note(name) and ', ' + times.note(name)}", times.ms(name), size, *rates, slower
            )


def _copied(x):
    return x * jnp.bfloat16(NEAR_ONE)
