"""Packing, bit for bit."""

import time
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

import nmjax as nm
from experiments.bench.kernels.report import Report, Setting
from experiments.bench.measure import compiled, in_short
from nmjax.core import random
from nmjax.kernels import calls
from nmjax.kernels.limits import Copy
from nmjax.kernels.targets import Target, target
from nmjax.pruners import float8
from nmjax.pruners.unbiased import group_uniforms

KEY, ROUNDING, BETA = 3, 4, 1.25  # of draws, of roundings to FP8, and of the soft threshold


FORMS = {
    "x of S-STE": (Copy("e4m3"), Copy("e5m2", turned=True)),
    "w of S-STE": (
        Copy("e4m3", turned=True, packed=True, pruner=nm.soft(2, 4), axis=-2),
        Copy("e5m2", pruner=nm.soft(2, 4), axis=-2),
    ),
    "g of S-STE": (
        Copy("e5m2"),
        Copy("e5m2", turned=True, packed=True, pruner=nm.mvue(2, 4), axis=-2, rounding="random"),
    ),
}
"""What S-STE in FP8 makes of x [tokens, in], w [in, out] and g [tokens, out]."""


def packing(setting: Setting, report: Report) -> None:
    here = setting.here
    report.table(
        "Values that differ",
        "Of packed values, words and FP8 forms, bit for bit: from the same kernel interpreted on the CPU"
        f"{', which is here the kernel itself,' if here.interpret else ''} and from pruning and packing by XLA on {'the CPU' if here.interpret else here.kind}.",
        ["what", "values", "from the interpreter", "from XLA"],
    )
    sides = (128, 128) if here.interpret else (512, 1024)
    x = jnp.asarray(np.random.default_rng(time.time_ns()).standard_normal(sides), jnp.bfloat16)
    rows, wrong = _packings(x, here), 0
    rows = rows[2::5] if setting.quick and here.interpret else rows
    programs = {}
    for name, by_kernel, by_xla, given in rows:
        programs[name, "kernel"] = jax.jit(partial(by_kernel, here=here)), given
        programs[name, "XLA"] = jax.jit(by_xla), given
        if not here.interpret:
            simulated = jax.jit(partial(by_kernel, here=target("interpret")))
            programs[name, "interpreter"] = simulated, jax.device_put(given, jax.devices("cpu")[0])
    built_ones = compiled(programs)
    for name, *_ in rows:
        try:
            made = {
                which: _called(built_ones[key], programs[key][1])
                for key in programs
                if key[0] == name
                for which in key[1:]
            }
            counts = [_differing(made["kernel"], made[by]) if by in made else None for by in ("interpreter", "XLA")]
        except Exception as error:  # the other rows are still wanted
            wrong += 1
            report.row(name, None, in_short(error), None)
            continue
        wrong += any(counts)
        report.row(name, sum(v.size for v in jax.tree.leaves(made["kernel"])), *counts)
    if wrong:
        raise AssertionError(f"{wrong} of {len(rows)} rows differ, or did not run")


def _packings(x, here: Target) -> list[tuple[str, Callable, Callable, jax.Array]]:
    """(what, by a kernel, by XLA, of which array)."""

    def one(p, axis, **noise):
        by_kernel = lambda x, here: calls.compress(x, axis, p, target=here, **noise)
        return f"{p}, axis {axis}", by_kernel, lambda x: nm.pack(p(x, axis, nm.Ctx(**noise)), axis), x

    def forms(name, wanted):
        by_kernel = lambda x, here: calls.copies(x, wanted, keys=(KEY, ROUNDING), state=BETA, target=here)
        return f"{name}: {', '.join(map(_copy, wanted))}", by_kernel, lambda x: [_form(x, copy) for copy in wanted], x

    ready = [(axis, nm.mse(2, 4)(x, axis)) for axis in (-1, -2)]
    both, by = nm.transposable(2, 4), lambda x: tuple(nm.pack(x, axis) for axis in (-1, -2))
    rows = [
        *(one(p, axis, **noise) for p, noise in PRUNERS for axis in (-1, -2)),
        *((*one(nm.identity, axis)[:3], given) for axis, given in ready),
        (f"both axes, {both}", lambda x, here: calls.compress_both(x, both, target=here), lambda x: by(both(x)), x),
        ("both axes, 2:4 already", lambda x, here: calls.compress_both(x, target=here), by, both(x)),
    ]
    if here.family == "hopper":
        plain = {f: (Copy(f, packed=True, pruner=nm.mse(2, 4)),) for f in float8.FORMATS}
        rows += [forms(f"FP8 forms, {name}", wanted) for name, wanted in (FORMS | plain).items()]
    return rows


PRUNERS = ((nm.mse(2, 4), {}), (nm.mvue(2, 4), {"key": KEY}), (nm.soft(2, 4), {"state": BETA}))
"""Those that a kernel fuses with packing, and what they are told."""


def _copy(copy: Copy) -> str:
    words = [copy.format, "transposed" if copy.turned else "", f"{copy.pruner}" if copy.pruner != nm.identity else ""]
    words += ["packed" if copy.packed else "", "rounded at random" if copy.rounding == "random" else ""]
    return " ".join(filter(None, words))


def _form(x, copy: Copy):
    """One FP8 form of a tensor by XLA, and what undoes its scale."""
    pruned = copy.pruner(x, copy.axis, nm.Ctx(random.words(KEY), 0, BETA))
    scale = float8.scale(float8.largest(x) * copy.pruner.growth(BETA), copy.format)
    draws = None
    if copy.rounding == "random":
        draws = jnp.repeat(group_uniforms(x, copy.axis, 4, nm.Ctx(random.words(ROUNDING))), 4, copy.axis)
    small = float8.cast(pruned.astype(jnp.float32) * scale, copy.format, draws)
    small = small.T if copy.turned else small
    return (nm.pack(small, -1, order="words8") if copy.packed else small), 1 / scale


def _called(program, given):
    if isinstance(program, Exception):
        raise program
    return program(given)


def _differing(made, other) -> int:
    bits = lambda v: np.asarray(v).view(f"uint{8 * v.dtype.itemsize}")
    pairs = zip(jax.tree.leaves(made), jax.tree.leaves(other), strict=True)
    return sum(int((bits(a) != bits(b)).sum()) for a, b in pairs)
