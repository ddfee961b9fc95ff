"""A check of packing, bit for bit."""

import time
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

import nmjax as nm
from experiments.bench.kernels.report import Report, Setting
from experiments.bench.measure import compiled, in_short
from nmjax.kernels import calls
from nmjax.kernels.limits import FAMILIES, Copy
from nmjax.kernels.targets import Target, target
from nmjax.pruners import float8

KEY, ROUNDING, BETA = 3, 4, 1.25  # the keys of draws and of roundings to FP8, and the scale of the soft threshold


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
"""The forms that S-STE in FP8 makes of x [tokens, in], w [in, out] and g [tokens, out]."""


def packing(setting: Setting, report: Report) -> None:
    """Report how many values differ between the kernels, their interpreter and XLA.

    Raises:
      AssertionError: If any differ, or if a row did not run.
    """
    device = setting.target
    own = ", which is the kernel itself here," if device.interpret else ""
    report.table(
        "Values that differ",
        f"Of packed values, words and FP8 forms, bit for bit: from the same kernel interpreted on the CPU{own} and "
        f"from pruning and packing by XLA on {'the CPU' if device.interpret else device.kind}.",
        ["what", "values", "from the interpreter", "from XLA"],
    )
    sides = (128, 128) if device.interpret else (512, 1024)
    x = jnp.asarray(np.random.default_rng(time.time_ns()).standard_normal(sides), jnp.bfloat16)
    rows, wrong = _packings(x, device), 0
    rows = rows[2::5] if setting.quick and device.interpret else rows
    programs = {}
    for name, by_kernel, by_xla, x in rows:
        programs[name, "kernel"] = jax.jit(partial(by_kernel, device=device)), x
        programs[name, "XLA"] = jax.jit(by_xla), x
        if not device.interpret:
            simulated = jax.jit(partial(by_kernel, device=target("interpret")))
            programs[name, "interpreter"] = simulated, jax.device_put(x, jax.devices("cpu")[0])
    executables = compiled(programs)
    for name, *_ in rows:
        try:
            outputs = {
                way: _called(executables[row, way], argument)
                for (row, way), (_, argument) in programs.items()
                if row == name
            }
            others = [outputs.get(way) for way in ("interpreter", "XLA")]
            counts = [None if other is None else _differing(outputs["kernel"], other) for other in others]
        except Exception as error:  # the other rows are still wanted
            wrong += 1
            report.row(name, None, in_short(error), None)
            continue
        wrong += any(counts)
        report.row(name, sum(v.size for v in jax.tree.leaves(outputs["kernel"])), *counts)
    if wrong:
        raise AssertionError(f"{wrong} of {len(rows)} rows differ, or did not run")


def _packings(x: jax.Array, device: Target) -> list[tuple[str, Callable, Callable, jax.Array]]:
    """Return the rows: (name, function by a kernel, function by XLA, their argument)."""

    def one(p, axis, **noise):
        by_kernel = lambda x, device: calls.compress(x, axis, p, target=device, **noise)
        return f"{p}, axis {axis}", by_kernel, lambda x: nm.pack(p(x, axis, nm.Ctx(**noise)), axis), x

    def forms(name, wanted):
        by_kernel = lambda x, device: calls.copies(x, wanted, keys=(KEY, ROUNDING), state=BETA, target=device)
        by_xla = lambda x: [calls.copy_by_xla(x, copy, KEY, ROUNDING, BETA) for copy in wanted]
        return f"{name}: {', '.join(map(_copy, wanted))}", by_kernel, by_xla, x

    ready = [(axis, nm.mse(2, 4)(x, axis)) for axis in (-1, -2)]
    both, by = nm.transposable(2, 4), lambda x: tuple(nm.pack(x, axis) for axis in (-1, -2))
    rows = [
        *(one(p, axis, **noise) for p, noise in PRUNERS for axis in (-1, -2)),
        *((*one(nm.identity, axis)[:3], pruned) for axis, pruned in ready),
        (f"both axes, {both}", lambda x, device: calls.compress_both(x, both, target=device), lambda x: by(both(x)), x),
        ("both axes, 2:4 already", lambda x, device: calls.compress_both(x, target=device), by, both(x)),
    ]
    if FAMILIES[device.family].fp8:
        plain = {f: (Copy(f, packed=True, pruner=nm.mse(2, 4)),) for f in float8.FORMATS}
        rows += [forms(f"FP8 forms, {name}", wanted) for name, wanted in (FORMS | plain).items()]
    return rows


PRUNERS = ((nm.mse(2, 4), {}), (nm.mvue(2, 4), {"key": KEY}), (nm.soft(2, 4), {"state": BETA}))
"""The pruners that a kernel fuses with packing, and their noise or state."""


def _copy(copy: Copy) -> str:
    words = [copy.format, "transposed" if copy.turned else "", f"{copy.pruner}" if copy.pruner != nm.identity else ""]
    words += ["packed" if copy.packed else "", "rounded at random" if copy.rounding == "random" else ""]
    return " ".join(filter(None, words))


def _called(program, argument):
    if isinstance(program, Exception):
        raise program
    return program(argument)


def _differing(one, other) -> int:
    """Return how many values of two outputs differ."""
    bits = lambda v: np.asarray(v).view(f"uint{8 * v.dtype.itemsize}")
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return sum(int((bits(a) != bits(b)).sum()) for a, b in pairs)
