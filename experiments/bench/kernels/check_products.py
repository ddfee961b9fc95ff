"""A check of products against float64."""

import re
import time
from dataclasses import replace
from itertools import cycle, product
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import nmjax as nm
from experiments.bench.kernels.report import Report, Setting, shown
from experiments.bench.measure import compiled, in_short
from nmjax.kernels import calls
from nmjax.kernels.limits import FAMILIES, Config, Shape, config_refusal
from nmjax.kernels.targets import Target


class Case(NamedTuple):
    """A product to be checked."""

    shape: Shape
    other: str  # the dense operand's dtype
    config: Config
    batch: tuple[int, ...] = ()


def numerics(setting: Setting, report: Report) -> None:
    """Report the errors of products.

    Raises:
      AssertionError: If an error is larger than 0.01.
    """
    device, draw = setting.target, np.random.default_rng(time.time_ns())
    sides = (256, 128, 256) if device.interpret else (256, 512, 512)
    cases = _cases(device, *sides, setting.quick)
    note = "Relative to the largest magnitude, with new random values at random positions, against float64. "
    if device.interpret:
        note += "By the interpreter."
    else:
        note += "Each program first multiplied other values into memory of the same size, so values it misses show."
    off = _errors("Largest error of {} x {} x {}".format(*sides), note, cases, device, draw, report)
    if not device.interpret:
        title = "Largest error of more tiles than the device has cores"
        off += _errors(title, "As above, of 4096 x 4096 x 512.", _many_tiles(device), device, draw, report)
    if FAMILIES[device.family].sums and not device.interpret:
        _accumulation(device, draw, report)
    if off:
        raise AssertionError(f"{len(off)} are off by more than 0.01: {'; '.join(off)}")


def _errors(title: str, note: str, cases: list[Case], device: Target, draw, report: Report) -> list[str]:
    """Report a table of errors, layouts by configs. Return those that are too large."""
    rows: dict[str, dict[str, Case]] = {}
    for case in cases:
        rows.setdefault(_layout(case), {})[repr(case.config)] = case
    heads, off = sorted({name for row in rows.values() for name in row}), []
    print(f"    compiling {len(cases)} kernels", flush=True)
    first = {case: (_program(case, device), *_operands(case, draw)[0]) for case in cases}
    executables = compiled(first)
    report.table(title, note, ["operands", *heads])
    for layout, row in rows.items():
        errors = {}
        for name, case in row.items():
            try:
                y, wanted = _ran(executables[case], case, draw, () if device.interpret else first[case][1:])
                errors[name] = float(np.abs(y - wanted).max() / np.abs(wanted).max())
            except Exception as error:  # the other cases are still wanted
                errors[name] = in_short(error)
        off += [f"{layout} by {name}: {shown(e)}" for name, e in errors.items() if isinstance(e, str) or not e < 0.01]
        report.row(layout, *(errors.get(name) for name in heads))
    return off


def _cases(device: Target, m: int, n: int, k: int, quick: bool) -> list[Case]:
    """Return every layout of every kind of operands, each with all configs, or with one of them in turn."""
    family = FAMILIES[device.family]
    configs = family.checked(device.interpret)
    bf16, f16, e4m3, e5m2 = "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"
    layouts = [(kind, kind, *lies) for kind in (bf16, f16) for lies in product((False, True), repeat=3)]
    if family.fp8:
        pairs = ((e4m3, e4m3), (e5m2, e4m3), (e5m2, e5m2))
        layouts += [(*pair, False, False, turned) for pair in pairs for turned in (False, True)]
    if quick and device.interpret:
        layouts = [(bf16, bf16, True, False, True), (e5m2, e4m3, False, False, True)]
    turn, cases = cycle(configs), []
    for a, b, m_major, n_major, turned in layouts:
        shape = Shape(m, n, k, a, m_major, n_major, turned, a if a in (bf16, f16) else bf16)
        fitting = [c for c in configs if config_refusal(shape, c) is None]
        for config in [next(c for c in turn if c in fitting)] if quick or device.interpret else fitting:
            cases.append(Case(shape, b, config, (3,) if m_major and turned and not quick else ()))
    if not quick:
        single = Shape(m, n, k, out="float32")
        wide = max((c for c in configs if config_refusal(single, c) is None), key=lambda c: c.tile_n)
        cases += [
            Case(replace(c.shape, out="float32"), c.other, wide, c.batch) for c in cases if c.config == configs[0]
        ]
    return cases


def _many_tiles(device: Target) -> list[Case]:
    """Return products in which a thread block computes several tiles, one after another."""
    family, wide = FAMILIES[device.family], Shape(4096, 4096, 512)
    shapes = [replace(wide, m_major=True, n_major=True, transpose=True), wide]
    shapes += [replace(wide, dtype="float8_e4m3fn", transpose=True)] * family.fp8
    return [Case(shape, shape.dtype, config) for shape in shapes for config in family.checked(interpret=False)[:4]]


def _layout(case: Case) -> str:
    s = case.shape
    kinds = " x ".join(re.sub("float8_|fn$", "", kind) for kind in (s.dtype, case.other))
    lies = f"A along {'M' if s.m_major else 'K'}, B along {'N' if s.n_major else 'K'}"
    out = f"{s.out}{' transposed' if s.transpose else ''}"
    return f"{kinds}, {lies}, {out}{', 3 of a batch' if case.batch else ''}"


def _program(case: Case, device: Target):
    return jax.jit(lambda a, b, scale: calls.run(a, b, scale, shape=case.shape, target=device, config=case.config))


def _operands(case: Case, draw, positive: bool = False) -> tuple[tuple, np.ndarray]:
    """Return the arguments of a program, and its exact result in float64."""
    s = case.shape
    normal = lambda *shape: np.abs(draw.standard_normal(shape)) if positive else draw.standard_normal(shape)
    kept = draw.random((*case.batch, s.m, s.k // 4, 4)).argsort(-1).argsort(-1) < 2
    a, b = normal(*case.batch, s.m, s.k) * kept.reshape(*case.batch, s.m, s.k), normal(*case.batch, s.n, s.k)
    a, b = (np.asarray(v, jnp.dtype(kind)) for v, kind in ((a, s.dtype), (b, case.other)))
    scale = draw.uniform(0.5, 2, case.batch).astype(np.float32) if a.dtype.itemsize == 1 else None
    wanted = np.asarray(a, np.float64) @ np.swapaxes(np.asarray(b, np.float64), -1, -2)
    wanted = wanted if scale is None else wanted * scale[..., None, None]
    turned = lambda v, turn: np.swapaxes(v, -1, -2) if turn else v
    form = {"axis": -2 if s.m_major else -1, "order": "words16" if scale is None else "words8"}
    arguments = _pack(jnp.asarray(turned(a, s.m_major)), **form), jnp.asarray(turned(b, s.n_major)), scale
    return arguments, turned(wanted, s.transpose)


_pack = jax.jit(nm.pack, static_argnames=("axis", "order"))


def _ran(program, case: Case, draw, before: tuple, positive: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Return the result of a program, and the exact one. The program first multiplies the arguments ``before``."""
    if isinstance(program, Exception):
        raise program
    if before:
        jax.block_until_ready(program(*before))
    arguments, wanted = _operands(case, draw, positive)
    return np.asarray(program(*arguments), np.float64), wanted


def _accumulation(device: Target, draw, report: Report) -> None:
    """Report how exact the sums of FP8 products are."""
    shape = Shape(256, 256, 16384, "float8_e4m3fn", out="float32")
    report.table(
        "Sums of FP8 products over K = 16384",
        "e4m3 x e4m3 into float32, by tiles of 128, against float64: the largest error relative to the largest "
        "magnitude, and the norm of the error relative to that of the result. Sums of positive values show what is cut "
        "off at every addition.",
        ["values", "largest error", "norm of the error"],
    )  # fmt: skip
    cases = {how: Case(shape, shape.dtype, config) for how, config in FAMILIES[device.family].sums.items()}
    first = {how: (_program(case, device), *_operands(case, draw)[0]) for how, case in cases.items()}
    executables = compiled(first)
    for how, positive in product(cases, (False, True)):
        name = f"{'positive' if positive else 'of both signs'}, {how}"
        try:
            y, wanted = _ran(executables[how], cases[how], draw, first[how][1:], positive)
            largest = np.abs(y - wanted).max() / np.abs(wanted).max()
            report.row(name, float(largest), float(np.linalg.norm(y - wanted) / np.linalg.norm(wanted)))
        except Exception as error:  # the other rows are still wanted
            report.row(name, in_short(error), None)
