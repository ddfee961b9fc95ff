"""What the kernels compute on this machine, and how fast, beside dense products, cuSPARSELt and the speed of memory.

Without sparse tensor cores it runs the numerics alone, of small arrays in the interpreter. Everything found is written as
it comes, and a stage that fails is recorded as such, so that a run that is cut short has told what it knew.
"""

import importlib.util
import json
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import import_module
from itertools import cycle, product
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

import nmjax as nm
from experiments.bench import tune
from experiments.bench.measure import compiled, in_short, in_turn, machine, markdown, speedup
from nmjax import engines, float8, ops, random, versions
from nmjax.kernels import ampere, api, hopper, tuning
from nmjax.kernels.copies import Copy, _growth
from nmjax.kernels.targets import Target, target
from nmjax.kernels.tuning import Shape
from nmjax.pruners.mvue import group_uniforms

KEY, ROUNDING, BETA = 3, 4, 1.25  # of draws, of roundings to FP8, and of the soft threshold


class Setting(NamedTuple):
    """What is asked for."""

    here: Target
    sizes: tuple[int, ...]
    rounds: int
    quick: bool


# ---- what is told ----


class Report:
    """What was found so far, written after every row."""

    def __init__(self, path: Path | None, command: str, device: str, about: str):
        self.path = path
        self.found = {"command": command, "machine": machine(), "device": device, "about": about, "stages": {}}

    def stage(self, name: str, state: str) -> None:
        self.here = self.found["stages"][name] = {"state": state, "seconds": None, "error": None, "tables": []}
        print(f"\n{name}: {state}", flush=True)
        self.save()

    def ended(self, seconds: float, error: Exception | None) -> None:
        told = error and in_short(error)
        self.here |= {"state": "failed" if error else "done", "seconds": round(seconds, 1), "error": told}
        print(f"{self.here['state']} in {seconds:.1f} s" + (f": {told}" if error else ""), flush=True)
        self.save()

    def table(self, title: str, note: str, head: list[str]) -> None:
        self.here["tables"].append({"title": title, "note": note, "head": head, "rows": []})
        print(f"  {title}. {note}\n    {' | '.join(head)}", flush=True)

    def row(self, *values) -> None:
        self.here["tables"][-1]["rows"].append([v.item() if hasattr(v, "item") else v for v in values])
        print(f"    {' | '.join(map(_shown, values))}", flush=True)
        self.save()

    def save(self) -> None:
        if self.path:
            self.path.parent.mkdir(exist_ok=True)
            for ending, text in ((".json", json.dumps(self.found, indent=1)), (".md", self.text())):
                made = self.path.with_name(f"{self.path.name}{ending}.part")
                made.write_text(text)
                made.replace(self.path.with_name(self.path.name + ending))

    def text(self) -> str:
        lines = [f"# kernels\n\n{self.found['machine']}  \n`{self.found['command']}`\n\n{self.found['about']}\n"]
        for name, stage in self.found["stages"].items():
            took = f", {stage['seconds']} s" if stage["seconds"] is not None else ""
            lines.append(f"# {name}: {stage['state']}{took}\n")
            lines += [f"`{stage['error']}`\n"] if stage["error"] else []
            for table in stage["tables"]:
                rows = {row[0]: [_shown(v) for v in row[1:]] for row in table["rows"]}
                lines.append(markdown(table["title"], table["note"], rows, table["head"]))
        return "\n".join(lines)


def _shown(value) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    return f"{value:,.0f}" if isinstance(value, int) or abs(value) >= 1000 else f"{value:.3g}"


# ---- what is run ----


def kernels(
    sizes: tuple[int, ...], rounds: int, quick: bool, only: list[str], path: Path | None, command: str
) -> tuple[str, bool]:  # fmt: skip
    """The report, and whether all stages that ran came to their end."""
    here, device = target("auto"), jax.devices()[0].device_kind
    there = _unchecked() if isinstance(here, str) else here
    about = f"Kernels run on {device}."
    if isinstance(here, str):
        about = f"Of speed nothing is told, for {here}. Numerics are those of {'the interpreter' if isinstance(there, str) else device}."
    report = Report(path, command, device, about)
    print(about, flush=True)
    setting = Setting(target("interpret") if isinstance(there, str) else there, sizes, rounds, quick)
    failed = False
    for letter, (stage, timed) in STAGES.items():
        if letter not in (only or STAGES):
            continue
        name = f"{letter}. {stage.__name__.replace('_', ' ')}"
        if timed and isinstance(here, str):
            report.stage(name, f"not run, for {here}")
            continue
        report.stage(name, "begun")
        start, error = time.perf_counter(), None
        try:
            stage(setting, report)
        except Exception as raised:  # whatever it is: the other stages are still wanted
            error, failed = raised, True
        report.ended(time.perf_counter() - start, error)
    return report.text(), not failed


def _unchecked() -> Target | str:
    """The device as a target even where its kernels failed their check: the numerics tell more of that."""
    device = jax.devices()[0]
    kind = AbstractDevice(device.device_kind, getattr(device, "core_count", None), device.platform)
    mesh = AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=kind)
    with jax.sharding.use_abstract_mesh(mesh):
        return target("pallas")


# ---- a. products, against float64 ----


class Case(NamedTuple):
    """A product to be checked."""

    shape: Shape
    other: str  # the dense operand's dtype
    config: tuning.Config
    batch: tuple[int, ...] = ()


def numerics(setting: Setting, report: Report) -> None:
    here, draw = setting.here, np.random.default_rng(time.time_ns())
    sides = (256, 128, 256) if here.interpret else (256, 512, 512)
    cases, said = _cases(here, *sides, setting.quick), "Relative to the largest magnitude, of fresh random values"
    said += " at random positions, against float64. " + (
        "By the interpreter."
        if here.interpret
        else "Each program first multiplied other values into memory of the same size: what it does not write, shows."
    )
    off = _errors("Largest error of {} x {} x {}".format(*sides), said, cases, here, draw, report)
    if not here.interpret:
        title = "Largest error of more tiles than the device has cores"
        off += _errors(title, "As above, of 4096 x 4096 x 512.", _many_tiles(here), here, draw, report)
    if here.family == "hopper" and not here.interpret:
        _accumulation(here, draw, report)
    if off:
        raise AssertionError(f"{len(off)} are off by more than 0.01: {'; '.join(off)}")


def _errors(title: str, note: str, cases: list[Case], here: Target, draw, report: Report) -> list[str]:
    """A table of errors, layouts by configs; and which are too large."""
    rows: dict[str, dict[str, Case]] = {}
    for case in cases:
        rows.setdefault(_layout(case), {})[repr(case.config)] = case
    heads, off = sorted({name for row in rows.values() for name in row}), []
    print(f"    compiling {len(cases)} kernels", flush=True)
    first = {case: (_program(case, here), *_operands(case, draw)[0]) for case in cases}
    made = compiled(first)
    report.table(title, note, ["operands", *heads])
    for layout, row in rows.items():
        errors = {}
        for name, case in row.items():
            try:
                y, wanted = _ran(made[case], case, draw, () if here.interpret else first[case][1:])
                errors[name] = float(np.abs(y - wanted).max() / np.abs(wanted).max())
            except Exception as error:  # the other cases are still wanted
                errors[name] = in_short(error)
        off += [f"{layout} by {name}: {_shown(e)}" for name, e in errors.items() if isinstance(e, str) or not e < 0.01]
        report.row(layout, *(errors.get(name) for name in heads))
    return off


def _cases(here: Target, m: int, n: int, k: int, quick: bool) -> list[Case]:
    """Every layout of every kind of operands, each by all configs, or by one of them."""
    if here.family == "ampere":
        configs = [ampere.Config(), ampere.Config(64, 128), ampere.Config(128, 64), ampere.Config(64, 64)]
    elif here.interpret:
        clusters = ("", "m", "n") if versions.interprets_clusters() else ("",)
        configs = [*(hopper.Config(tile_n=64, cluster=c) for c in clusters), hopper.Config(128, 128)]
    else:
        configs = [hopper.Config(), *(hopper.Config(cluster=c) for c in "mn"), hopper.Config(128, 128)]
        configs += [hopper.Config(tile_n=64), hopper.Config(tile_n=128, in_flight=0), hopper.Config(warpgroups=1)]
    bf16, f16, e4m3, e5m2 = "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"
    layouts = [(kind, kind, *lies) for kind in (bf16, f16) for lies in product((False, True), repeat=3)]
    if here.family == "hopper":
        pairs = ((e4m3, e4m3), (e5m2, e4m3), (e5m2, e5m2))
        layouts += [(*pair, False, False, turned) for pair in pairs for turned in (False, True)]
    if quick and here.interpret:
        layouts = [(bf16, bf16, True, False, True), (e5m2, e4m3, False, False, True)]
    turn, cases = cycle(configs), []
    for a, b, m_major, n_major, turned in layouts:
        shape = Shape(m, n, k, a, m_major, n_major, turned, a if a in (bf16, f16) else bf16)
        fitting = [c for c in configs if tuning.misfit(shape, c) is None]
        for config in [next(c for c in turn if c in fitting)] if quick or here.interpret else fitting:
            cases.append(Case(shape, b, config, (3,) if m_major and turned and not quick else ()))
    if not quick:
        wide = configs[0] if here.family == "ampere" or here.interpret else hopper.Config(tile_n=128)
        cases += [
            Case(replace(c.shape, out="float32"), c.other, wide, c.batch) for c in cases if c.config == configs[0]
        ]
    return cases


def _many_tiles(here: Target) -> list[Case]:
    """Products in which a thread block does several tiles, one after another."""
    wide = [Shape(4096, 4096, 512, m_major=True, n_major=True, transpose=True), Shape(4096, 4096, 512)]
    if here.family == "ampere":
        return [Case(shape, shape.dtype, ampere.Config()) for shape in wide]
    small = Shape(4096, 4096, 512, "float8_e4m3fn", transpose=True)
    configs = [*(hopper.Config(cluster=c) for c in ("", "m", "n")), hopper.Config(128, 128, band=1)]
    return [Case(shape, shape.dtype, config) for shape in (*wide, small) for config in configs]


def _layout(case: Case) -> str:
    s = case.shape
    kinds = " x ".join(re.sub("float8_|fn$", "", kind) for kind in (s.dtype, case.other))
    lies = f"A along {'M' if s.m_major else 'K'}, B along {'N' if s.n_major else 'K'}"
    out = f"{s.out}{' transposed' if s.transpose else ''}"
    return f"{kinds}, {lies}, {out}{', 3 of a batch' if case.batch else ''}"


def _program(case: Case, here: Target):
    return jax.jit(lambda a, b, scale: api.run(a, b, scale, shape=case.shape, here=here, config=case.config))


def _operands(case: Case, draw, positive: bool = False) -> tuple[tuple, np.ndarray]:
    """Arguments of a program, and what it is to give, in float64."""
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
    """What a program gives, after it has multiplied other arguments, and what it should."""
    if isinstance(program, Exception):
        raise program
    if before:
        jax.block_until_ready(program(*before))
    arguments, wanted = _operands(case, draw, positive)
    return np.asarray(program(*arguments), np.float64), wanted


def _accumulation(here: Target, draw, report: Report) -> None:
    """How many bits the sums of FP8 products keep."""
    shape = Shape(256, 256, 16384, "float8_e4m3fn", out="float32")
    report.table(
        "Sums of FP8 products over K = 16384",
        "e4m3 x e4m3 into float32, by tiles of 128, against float64: the largest error relative to the largest magnitude, and the norm of the "
        "error relative to that of the result. Sums of positive values show what is cut off at every addition.",
        ["values", "largest error", "norm of the error"],
    )  # fmt: skip
    cases = {p: Case(shape, shape.dtype, hopper.Config(tile_n=128, promote=p)) for p in (False, True)}
    first = {p: (_program(case, here), *_operands(case, draw)[0]) for p, case in cases.items()}
    made = compiled(first)
    for promote, positive in product((False, True), repeat=2):
        name = f"{'positive' if positive else 'of both signs'}, {'promoted' if promote else 'not promoted'}"
        try:
            y, wanted = _ran(made[promote], cases[promote], draw, first[promote][1:], positive)
            largest = np.abs(y - wanted).max() / np.abs(wanted).max()
            report.row(name, float(largest), float(np.linalg.norm(y - wanted) / np.linalg.norm(wanted)))
        except Exception as error:  # the other rows are still wanted
            report.row(name, in_short(error), None)


# ---- b. packing, bit for bit ----

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
        by_kernel = lambda x, here: api.compress(x, axis, p, here=here, **noise)
        return f"{p}, axis {axis}", by_kernel, lambda x: nm.pack(p(x, axis, nm.Ctx(**noise)), axis), x

    def forms(name, wanted):
        by_kernel = lambda x, here: api.copies(x, wanted, keys=(KEY, ROUNDING), state=BETA, here=here)
        return f"{name}: {', '.join(map(_copy, wanted))}", by_kernel, lambda x: [_form(x, copy) for copy in wanted], x

    ready = [(axis, nm.mse(2, 4)(x, axis)) for axis in (-1, -2)]
    both, by = nm.transposable(2, 4), lambda x: tuple(nm.pack(x, axis) for axis in (-1, -2))
    rows = [
        *(one(p, axis, **noise) for p, noise in PRUNERS for axis in (-1, -2)),
        *((*one(nm.identity, axis)[:3], given) for axis, given in ready),
        (f"both axes, {both}", lambda x, here: api.compress_both(x, both, here=here), lambda x: by(both(x)), x),
        ("both axes, 2:4 already", lambda x, here: api.compress_both(x, here=here), by, both(x)),
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
    scale = float8.scale(float8.largest(x) * _growth(copy.pruner, BETA), copy.format)
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


# ---- times ----


class Program(NamedTuple):
    """Something to time: a call, or a jitted function and its arguments; how many times it does what is told of."""

    call: Callable
    arguments: tuple = ()
    count: int = 1


class Times(dict):
    """Seconds of what runs, round by round, and of the others what they raised."""

    def ms(self, name) -> float | None:
        return statistics.median(self[name]) * 1e3 if self.ran(name) else None

    def rate(self, name, amount: float) -> float | None:
        """An amount a second, in units of 1e12."""
        return amount / self.ms(name) / 1e9 if self.ran(name) else None

    def over(self, name, base) -> float | None:
        """How many times faster than the base."""
        return speedup(self[name], self[base]) if self.ran(name) and self.ran(base) else None

    def note(self, name, otherwise: str = "") -> str:
        return self[name] if isinstance(self.get(name), str) else otherwise

    def ran(self, name) -> bool:
        return isinstance(self.get(name), list)


def timed(programs: dict[Any, Program], rounds: int, **options) -> Times:
    """All that run, in turn."""
    calls, failed = {}, {}
    for name, (call, arguments, _) in programs.items():
        try:
            if isinstance(call, Exception):
                raise call
            jax.block_until_ready(call(*arguments))
            calls[name] = partial(call, *arguments)
        except Exception as error:  # the others are still wanted
            failed[name] = in_short(error)
    times = in_turn(calls, rounds, **options)
    return Times({name: [s / programs[name].count for s in seconds] for name, seconds in times.items()} | failed)


def built(programs: dict[Any, Program]) -> dict[Any, Program]:
    made = compiled({name: (program.call, *program.arguments) for name, program in programs.items()})
    return {name: program._replace(call=made[name]) for name, program in programs.items()}


def repeated(f: Callable, make: Callable, count: int) -> Program:
    """A function so often in one program, of other arguments each time."""
    return Program(f, ([make() for _ in range(count)],), count)


# ---- c. the speed of products ----


def products(setting: Setting, report: Report) -> None:
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
        "Operands are packed before. Rates are those of the dense product. Over: how many times faster, the median of what each "
        "round says. Dense are cuBLAS's products of operands that lie as they do in training, into bf16; in FP8 both lie along "
        "k. A star marks a config that was measured before, and not guessed."
    )
    for title, layers, told in (
        ("Square products", square, note),
        ("The first layer of feed-forward blocks: tokens x in x out", blocks, "As above."),
    ):
        report.table(title, told, head)
        for name, shapes in layers.items():
            _layer(name, shapes, setting, pool, report)


def _layer(name: str, shapes: dict[str, Shape], setting: Setting, pool, report: Report) -> None:
    """Rows of the products of one layer."""
    here, programs, notes = setting.here, {}, {}
    every = {
        (p, kind): s if kind == "bf16" else tune.in_fp8(p, s) for p, s in shapes.items() for kind in ("bf16", "FP8")
    }
    for (p, kind), shape in every.items():
        count = tune.repeats(shape)
        programs[p, kind, "dense"] = repeated(tune.dense(shape, here), partial(pool.dense_pair, shape), count)
        notes[p, kind, "packed"] = why = api.shape_unfit(shape, here)
        if why is None:
            config, speed = tuning.chosen(shape, here)
            notes[p, kind, "packed"] = f"{config}{'*' if speed else ''}"
            programs[p, kind, "packed"] = repeated(tune.packed(shape, here, config), partial(pool.pair, shape), count)
    programs = built(programs)
    for p in shapes:
        times = timed({key: program for key, program in programs.items() if key[0] == p}, setting.rounds)
        for kind, which in product(("bf16", "FP8"), ("dense", "packed")):
            key, bases = (p, kind, which), [(p, base, "dense") for base in ("bf16", "FP8")]
            rate = times.rate(key, every[p, kind].flops)
            over, note = [times.over(key, base) for base in bases], times.note(key, notes.get(key, ""))
            report.row(f"{name}, {p}, {which} {kind}", times.ms(key), rate, *over, note)


# ---- d. cuSPARSELt ----


def cusparselt(setting: Setting, report: Report) -> None:
    torch = import_module("torch") if importlib.util.find_spec("torch") else None
    if torch is None or not torch.cuda.is_available():
        why = "PyTorch, through which it is called, " + ("sees no GPU." if torch else "is not installed.")
        report.table("cuSPARSELt", why, ["product"])
        return
    report.table(
        "cuSPARSELt",
        f"Through torch {torch.__version__}, by the algorithm that its search finds; torch's dense products, XLA's and ours beside "
        "it, timed in turn: n x n x n, both operands along k, a plain result in bf16.",
        ["product", "ms", "TFLOP/s", "over torch's dense", "over cuSPARSELt", "note"],
    )
    here, pool = setting.here, tune.Pool(max(setting.sizes) ** 2)
    for n, kind in product(setting.sizes, ("bf16", "FP8")):
        shape = Shape(n, n, n, "bfloat16" if kind == "bf16" else "float8_e4m3fn")
        programs = {"XLA dense": repeated(tune.dense(shape, here), partial(pool.dense_pair, shape), 1)}
        theirs, notes = _by_torch(torch, n, kind)
        notes["ours"] = why = api.shape_unfit(shape, here)
        if why is None:
            config = tuning.chosen(shape, here)[0]
            programs["ours"] = repeated(tune.packed(shape, here, config), partial(pool.pair, shape), 1)
            notes["ours"] = f"{config}"
        wait = lambda made: (jax.block_until_ready(made), torch.cuda.synchronize())
        times = timed(built(programs) | theirs, setting.rounds, wait=wait)
        for name in ("torch dense", "cuSPARSELt", "XLA dense", "ours"):
            over = [times.over(name, base) for base in ("torch dense", "cuSPARSELt")]
            note = times.note(name, notes.get(name, ""))
            report.row(f"{n}, {kind}, {name}", times.ms(name), times.rate(name, shape.flops), *over, note)
        del theirs, programs
        torch.cuda.empty_cache()


def _by_torch(torch, n: int, kind: str) -> tuple[dict[str, Program], dict[str, str]]:
    """The dense and the sparse product of random values, at random positions, and what is to be said of them."""
    draw = torch.Generator("cuda").manual_seed(n)
    dense, w, x = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16, generator=draw) for _ in range(3))
    kept = torch.rand(n, n // 4, 4, device="cuda", generator=draw).argsort(-1).argsort(-1) < 2
    w, out = w * kept.view(n, n), None
    times = lambda a: a @ x.t()
    if kind == "FP8":
        dense, w, x = (v.to(torch.float8_e4m3fn) for v in (dense, w, x))
        one, out = torch.ones((), device="cuda"), torch.bfloat16
        times = lambda a: torch._scaled_mm(a, x.t(), scale_a=one, scale_b=one, out_dtype=out, use_fast_accum=True)
    programs, notes = {"torch dense": Program(partial(times, dense))}, {}
    try:
        compressed, found = torch._cslt_compress(w), (0, 1, -1)
        try:
            found = torch._C._cusparselt.mm_search(compressed, x.t(), None, None, out, False)[:3]
            notes["cuSPARSELt"] = f"algorithm, split and its mode: {', '.join(map(str, found))}"
        except Exception as error:  # torch names it otherwise, or cannot search
            notes["cuSPARSELt"] = f"its default algorithm, for the search failed: {in_short(error)}"
        sparse = lambda: torch._cslt_sparse_mm(compressed, x.t(), None, None, out, False, *found)
        y, wanted = sparse().float(), times(w).float()
        notes["cuSPARSELt"] += f"; off by {((y - wanted).abs().max() / wanted.abs().max()).item():.2g}"
        programs["cuSPARSELt"] = Program(sparse)
    except Exception as error:  # the other products are still wanted
        notes["cuSPARSELt"] = in_short(error)
    return programs, notes


# ---- e. the speed of packing ----


def packing_speed(setting: Setting, report: Report) -> None:
    here, both = setting.here, nm.transposable(2, 4)
    report.table(
        "Packing beside its memory floor",
        "Of n x n in bf16. Bytes are those of the array, read once, and of all that is written; the floor is the time of a device "
        "copy of as many, x * 1.0078125 of bf16, in the same rounds. FP8 forms want the largest magnitude first, and so a "
        "second reading, which is in the time and not in the floor.",
        ["what", "ms", "bytes a value", "TB/s", "TB/s of the copy", "time over floor"],
    )
    ways: dict[str, tuple[Callable, float]] = {
        f"{p}, axis {axis}": (lambda x, p=p, axis=axis, told=told: api.compress(x, axis, p, here=here, **told), 3.125)
        for p, told in PRUNERS
        for axis in (-1, -2)
    }
    ways["both axes, 2:4 already"] = lambda x: api.compress_both(x, here=here), 4.25
    ways[f"both axes, {both}"] = lambda x: api.compress_both(x, both, here=here), 4.25
    for name, wanted in FORMS.items() if here.family == "hopper" else ():
        way = partial(api.copies, wanted=wanted, keys=(KEY, ROUNDING), state=BETA, here=here)
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
    return x * jnp.bfloat16(1.0078125)  # the least above 1: 1.0001 is 1 in bf16, and nothing would be computed


# ---- f. a feed-forward block ----

METHODS = {  # and the backend
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
    tokens, widths = (4096, (2048,)) if setting.quick else (16384, (4096, 8192))
    for width in widths:
        report.table(
            f"Forward and backward of {tokens} tokens, {width} -> {4 * width} -> {width}",
            "In bf16, with everything: gelu, pruning, packing, casts. Products that no kernel runs are those that XLA finds fastest.",
            [
                "method",
                "ms",
                "over dense bf16",
                "temporary memory, GB",
                "of dense bf16's",
                "products that are not dense",
            ],
        )
        _block(tokens, width, setting.rounds, report)


def _block(tokens: int, width: int, rounds: int, report: Report) -> None:
    hidden = 4 * width
    shapes = ((tokens, width), (width, hidden), (hidden, width), (tokens, width))
    scales = (1.0, width**-0.5, hidden**-0.5, 1.0)
    normal = jax.jit(
        lambda key, shape, by: jax.random.normal(key, shape, jnp.bfloat16) * jnp.bfloat16(by), static_argnums=(1, 2)
    )
    keys = map(jax.random.key, range(4))
    x, up, down, g = (normal(*of_one) for of_one in zip(keys, shapes, scales, strict=True))
    programs = {}
    for name, (text, backend) in METHODS.items():
        sparsity = nm.parse(text)
        states = [jax.jit(partial(sparsity.init, contract=0, out=1))(w) for w in (up, down)]
        step = jax.jit(partial(_step, sparsity=sparsity, backend=backend))
        programs[name] = Program(step, (x, up, down, g, states, jnp.int32(0)))
    programs = built(programs)
    times = timed(programs, rounds, seconds=0.1)
    for name, (text, backend) in METHODS.items():
        memory, of_dense = (_memory(programs[which].call) for which in (name, "dense bf16"))
        more = memory / of_dense if memory and of_dense else None
        told = _told(nm.parse(text), backend, x, up, down)
        note = "; ".join(filter(None, [times.note(name), told]))
        report.row(name, times.ms(name), times.over(name, "dense bf16"), memory and memory / 1e9, more, note)


def _memory(program) -> int | None:
    return None if isinstance(program, Exception) else program.memory_analysis().temp_size_in_bytes


def _step(x, up, down, g, states, now, *, sparsity, backend):
    """The result of a block, and the gradients of its input and weights."""

    def block(x, up, down):
        product = partial(nm.einsum, "ti,io->to", sparsity=sparsity, backend=backend)
        hidden = jax.nn.gelu(product(x, up, ctx=nm.Ctx(0, now, states[0])))
        return product(hidden, down, ctx=nm.Ctx(1, now, states[1]))

    y, back = jax.vjp(block, x, up, down)
    return y, back(g)


def _told(sparsity, backend: str, x, up, down) -> str:
    """How those products of both layers run that are not dense."""
    hidden, told = jax.ShapeDtypeStruct((x.shape[0], up.shape[1]), x.dtype), []
    for layer, left, right in (("first", x, up), ("second", hidden, down)):
        op = ops.as_dot(left, right, ops.einsum_dims("ti,io->to", 2, 2)[0])
        choices = engines.explain(op, left, right, sparsity, backend)
        told += [f"{layer} {p} {choice.how}: {choice.why}" for p, choice in choices.items() if choice.how != "dense"]
    return "; ".join(told)


STAGES = {  # and whether they tell times
    "a": (numerics, False),
    "b": (packing, False),
    "c": (products, True),
    "d": (cusparselt, True),
    "e": (packing_speed, True),
    "f": (feed_forward, True),
}
