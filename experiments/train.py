"""One run, told in order: what is to be done, the loop, what it leaves behind."""

import contextlib
import itertools
import json
import math
import time
from pathlib import Path

import jax
import numpy as np

from experiments import processes, report, shards
from experiments.checkpoints import Checkpoints, Restored
from experiments.errors import Diverged, Failed, Mistake, Stopped
from experiments.meter import Meter, supplied
from experiments.program import Program, Task
from experiments.record import Record, Silent, check, finished, same_config
from experiments.show import Screen, clock, figures, form, number
from experiments.signals import Stop


def run(
    config, task: Task, workdir: Path, mode: str, name: str, command: str, origin: Path | None = None,
    program: Program | None = None, sink: str = "",
) -> Program | None:  # fmt: skip
    """Train, evaluate or plan; and the program, for another run that differs in its seed alone. ``origin`` is a run whose
    last state this one begins with, and ``sink`` what its numbers are sent to beside its files."""
    began, screen = time.monotonic(), Screen(task.unit)
    if mode == "train":
        if processes.first():
            check(workdir, config)
        if processes.agreed(lambda: finished(workdir)):
            screen.line(
                f"finished already: {workdir}/report.html. --mode=eval evaluates it; another --workdir trains anew."
            )
            return program
    for option, place in (("--mode=eval: ", workdir if mode == "eval" else None), ("--from=", origin)):
        if place is not None and not Checkpoints(place).steps():
            raise Mistake(f"{option}{place} holds no checkpoints; what is wanted is the directory of a run.")
    program = Program(config, task) if program is None else program
    screen.header(name, facts := header(program))
    screen.line(f"\n{program.plan}\n")
    if mode == "plan":
        return program
    if mode == "eval":
        evaluate(program, workdir, screen)
        return program
    about = {
        "name": name,
        "command": command,
        "header": [fact for fact in facts if fact[0] != "note"],
        "unit": task.unit,
        "metric": task.metric,
        "notes": task.notes,
        "steps": program.total,
        "flops": [cost * config.accumulate for cost in program.plan.training],  # of a step, dense and effective
    }
    with Stop() as stop:
        record = Record(workdir, config, about, program.plan, screen.line, sink) if processes.first() else Silent()
        ended = lambda why: record.close(f"failed: {why}")
        with processes.at_end(ended):
            _seen_by_all(workdir)
        checkpoints = Checkpoints(workdir, screen.line)
        try:
            with processes.at_end(ended):
                loop(program, config, record, checkpoints, screen, began, stop, origin)
                checkpoints.close()
            record.close("finished")
        except BaseException as error:
            if processes.count() > 1 and not isinstance(error, Stopped | Diverged):
                processes.wait_for_cause(error)  # and not for a checkpoint, which the others would have to finish too
            else:
                checkpoints.close()
            stopped = isinstance(error, (KeyboardInterrupt, Stopped))
            with contextlib.suppress(Exception):  # the run's own error comes first
                record.close("interrupted" if stopped else f"{_kind(error)}: {error or repr(error)}")
                if processes.first():
                    report.write(workdir)
            if stopped:
                goes_on = f"The same command with --workdir={workdir} goes on from it, or begins anew."
                text = f"interrupted{error and f' by {error}'}. {checkpoints.kept()} {goes_on}"
                raise (Stopped(text, error.signal) if isinstance(error, Stopped) else KeyboardInterrupt(text)) from None
            if isinstance(error, (Failed, Mistake, OSError)):  # a broken file and a full disk too
                kind = type(error) if isinstance(error, Failed) else Failed
                raise kind(
                    f"{str(error).rstrip('.')}. {checkpoints.kept()}{_otherwise(error, checkpoints, workdir)}"
                ) from error
            raise
    if processes.first():
        report.write(workdir)
        screen.line("")
        screen.rows([*record.about["summary"], ("report", str(workdir / "report.html")), ("everything", f"{workdir}/")])
    return program


def _seen_by_all(workdir: Path) -> None:
    """Refuse a directory that is another one on another machine."""
    began = lambda: json.loads((workdir / "run.json").read_text())["began"]
    wanted = processes.agreed(began)
    for _ in range(20):  # a file system of many machines may be late
        with contextlib.suppress(OSError, ValueError):
            if began() == wanted:
                return
        time.sleep(0.5)
    raise Mistake(
        f"--workdir={workdir.absolute()} is not the directory that process 0 has by this name: checkpoints want one that all share."
    )


def _kind(error: BaseException) -> str:
    return "diverged" if isinstance(error, Diverged) else "failed"


def _otherwise(error: Exception, checkpoints: Checkpoints, workdir: Path) -> str:
    """What may be done about a run that diverged."""
    if not isinstance(error, Diverged) or not checkpoints.steps():
        return ""
    return f" To go on from it otherwise: --workdir=ANOTHER --from={workdir} and what is to change, as a smaller --config.learning_rate.peak."


def header(program: Program) -> list[tuple[str, str]]:
    """What is about to be done, and on what."""
    config, task, plan, devices = program.config, program.task, program.plan, program.mesh.size
    dense, effective = (cost * config.accumulate for cost in plan.training)
    micro = f"{config.accumulate} micro-batches x " if config.accumulate > 1 else ""
    each = config.batch // config.accumulate // (parts := shards.parts(program.mesh))
    axes = [f"{name} {size}" for name, size in program.mesh.shape.items() if size > 1]
    told = f" as {' x '.join(axes)}" if axes and axes != [f"data {devices}"] else ""
    told += f", in {processes.count()} processes" if processes.count() > 1 else ""
    size = f"{config.model.name} {config.model.size}"
    return [
        ("devices", f"{devices} x {jax.devices()[0].device_kind}{told}"),
        ("computing", f"{config.dtype}, parameters float32; {_how(plan.runs, config.backend)}"),
        *task.facts,
        ("batch", f"{config.batch:,} = {micro}{parts} device{'s' * (parts > 1)} x {each:,}"),
        (
            "length",
            f"{program.total:,} steps = {program.total * config.batch / task.examples:.4g} epochs of {task.examples:,}",
        ),
        ("model", f"{size}, {plan.parameters:,} parameters"),
        ("FLOPs a step", f"{number(dense)} dense, {number(effective)} effective ({effective / dense:.2f})"),
        *[("hardened", f"no such form, so none is evaluated: {program.no_hard}")] * bool(program.no_hard),
    ]


def _how(runs: dict[str, int], backend: str) -> str:
    """How pruned products run, in words."""
    if set(runs) <= {"emulated"}:
        return "n:m products are emulated: zeros are multiplied" if runs else "nothing is pruned"
    words = {"packed": "on sparse tensor cores", "fp8": "dense in FP8", "emulated": "emulated, as the plan tells why"}
    if backend == "interpret":
        words |= {"packed": "in simulated kernels", "fp8": "in simulated FP8"}
    return "pruned products: " + ", ".join(f"{runs[how]} {word}" for how, word in words.items() if how in runs)


def loop(
    program: Program, config, record: Record, checkpoints: Checkpoints, screen: Screen, began: float, stop: Stop,
    origin: Path | None,
) -> None:  # fmt: skip
    task, total = program.task, program.total
    evaluations, measures = program.evaluations, program.measures
    start, state, seen = begin(program, config.seed, checkpoints, screen, origin)
    feed = iter(task.feed(config.seed, start, program.mesh))
    record.begin(start)
    if start < total:
        with screen.busy("compiling"):
            feed = itertools.chain([arrays := next(feed)], feed)
            program.compile(arrays, measures > 0)
    if state is None:
        state = program.init(np.uint32(config.seed))
    best, higher = record.best(task.metric, task.metric == "accuracy"), task.metric == "accuracy"
    found = program.evaluate(state) if start == total else {}

    def tell(step: int, means: dict, rate: float | None) -> None:
        if rate is not None:
            means |= {"per_second": rate * config.batch * task.units}
            means |= {"flops_per_second": rate * config.accumulate * program.plan.training[0]}
        record.write("train", step, **means)
        screen.step(step, means)

    def slow(rate: float) -> None:
        rate = number(rate * config.batch * task.units)
        screen.line(
            f"steps wait for their data, which come at {rate} {task.unit}/s: more cores or a faster disk would help"
        )

    meter = Meter(math.ceil(total / 500), tell, seen)
    with screen.progress(total, start), checkpoints.dumping() as dump:
        for step, arrays in zip(range(start, total), supplied(feed, slow), strict=False):
            measuring = measures > 0 and step % measures == 0
            if measuring:
                with meter.aside():
                    before, measured = program.masks(state), jax.device_get(program.measure(state, arrays))
            state, shown = program.train(state, arrays)
            dump(step + 1, state)
            meter.push(step, shown)
            if measuring:
                with meter.aside():
                    measured["flip_rate"] = jax.device_get(program.flips(before, program.masks(state)))
                    measured = {name: table for name, table in measured.items() if table}
                    record.write("sparsity", step, **jax.tree.map(float, measured))
            evaluating = (total - step - 1) % evaluations == 0
            if evaluating:
                with meter.aside():
                    meter.flush()  # what is written is whole as far as the checkpoint goes
                    found = program.evaluate(state)
                    _finite(found, step + 1)
                    record.write("eval", step + 1, **found)
                    screen.evaluation(step + 1, found)
                    value = found.get(f"hardened_{task.metric}", found[task.metric])
                    better = best is None or (value > best if higher else value < best)
                    best = value if better else best
                    checkpoints.save(step + 1, state, meter.seen, best=better)
            stopping = stop.now()
            if stopping and not evaluating:
                meter.settle()
                checkpoints.save(step + 1, state, meter.seen, best=False)
            if stopping and step + 1 < total:
                raise Stopped(f"{stop.signal.name} after step {step + 1:,}", stop.signal)
    checkpoints.wait()
    if checkpoints.lost:
        raise Failed(checkpoints.lost)
    names = sorted(found, key=lambda name: (task.metric not in name, "hardened" not in name))
    summary = [(name.replace("_", " "), form(name, found[name])) for name in names]
    summary += [(f"best {task.metric}", form(task.metric, best)), ("time", clock(record.elapsed()))]
    if meter.first is not None:
        summary.append(("first step", f"after {meter.first - began:.1f} s"))
    record.keep(summary, found, program.pictures(state))


def begin(program: Program, seed: int, checkpoints: Checkpoints, screen: Screen, origin: Path | None) -> Restored:
    """Where a run starts: from its own last state, from another run's, or from nothing."""
    found = checkpoints.restore(program.shapes)
    if found.step:
        screen.line(f"going on from step {found.step:,} of {program.total:,}, as {checkpoints.directory} holds it")
    elif origin is not None:
        with contextlib.closing(Checkpoints(origin, screen.line)) as there:
            found = there.restore(program.shapes, mend=False)._replace(seen=[])
        if found.step > program.total:
            raise Mistake(f"--from={origin} is at step {found.step:,}, and this run has {program.total:,}")
        found = found._replace(
            state=found.state._replace(seed=shards.placed(np.uint32(seed), shards.whole(program.mesh)))
        )
        screen.line(f"going on from step {found.step:,} of {program.total:,}, as {there.directory} holds it")
    return found


def _finite(found: dict[str, float], step: int) -> None:
    """No checkpoint is kept of what has diverged."""
    for name, value in found.items():
        if not math.isfinite(value):
            raise Diverged(f"the {name.replace('_', ' ')} of the evaluation after step {step:,} is {value}")


def evaluate(program: Program, workdir: Path, screen: Screen) -> None:
    """The best and the last checkpoint of a run, on the test split."""
    same_config(workdir, program.config)
    with contextlib.closing(Checkpoints(workdir, screen.line)) as checkpoints:
        for name in ("last", "best"):
            step, state, _ = checkpoints.restore(program.shapes, best=name == "best", mend=False)
            if state is not None:
                found = program.evaluate(state)
                screen.line(f"{name}, step {step:,}: " + "   ".join(figures(found)))
