"""One run, or several side by side, told in order: what is to be done, the loop, what it leaves behind."""

import contextlib
import itertools
import json
import math
import signal
import time
from pathlib import Path

import jax
import numpy as np

from experiments import report
from experiments.errors import Diverged, Failed, Mistake, Stopped
from experiments.scale import processes, shards
from experiments.scale.signals import Stop
from experiments.training.checkpoints import Checkpoints
from experiments.training.meter import Meter, fetched, mean, supplied
from experiments.training.program import Program, State
from experiments.training.record import Record, Silent, check, finished, same_config
from experiments.training.screen import Screen, clock, figures, form, number
from experiments.training.task import Task


class Run:
    """What a run has of its own, alone or beside others: a config, a directory, and how far it has come."""

    record: Record | Silent
    checkpoints: Checkpoints

    def __init__(self, name: str, config, workdir: Path):
        self.name, self.config, self.workdir = name, config, workdir
        self.seen: list[dict] = []  # what its steps since the last line of metrics said
        self.best: float | None = None

    def open(self, about: dict, plan, screen: Screen, sink: str) -> None:
        about = {"name": self.name, **about}
        first = processes.first()
        self.record = Record(self.workdir, self.config, about, plan, screen.line, sink) if first else Silent()
        self.checkpoints = Checkpoints(self.workdir, screen.line)

    def better(self, value: float, higher: bool) -> bool:
        """Whether it is the best yet."""
        found = self.best is None or (value > self.best if higher else value < self.best)
        self.best = value if found else self.best
        return found

    def end(self, error: BaseException) -> None:
        """End before all is done: what is written stays."""
        if processes.count() == 1 or isinstance(error, Stopped | Diverged):
            self.checkpoints.close()  # else the others would have to finish it too
        kind = "diverged" if isinstance(error, Diverged) else "failed"
        outcome = "interrupted" if _stopped(error) else f"{kind}: {error or repr(error)}"
        with contextlib.suppress(Exception):  # the run's own error comes first
            self.record.close(outcome)
            if processes.first():
                report.write(self.workdir)

    def why(self, error: Exception) -> str:
        """What ended it, what is kept, and what may be done about it."""
        text = f"{str(error).rstrip('.')}. {self.checkpoints.kept()}"
        if isinstance(error, Diverged) and self.checkpoints.steps():
            text += f" To go on from it otherwise: --workdir=ANOTHER --from={self.workdir} and what is to change, as a smaller --config.learning_rate.peak."
        return text


def run(
    runs: list[Run], task: Task, mode: str, command: str, origin: Path | None = None, program: Program | None = None,
    sink: str = "",
) -> signal.Signals | None:  # fmt: skip
    """Train, evaluate or plan a run; or train several that differ in their seed alone side by side. ``program`` is that of
    another run which differs in its seed alone, ``origin`` a run whose last state this one begins with, and ``sink`` what
    numbers are sent to beside the files. Gives the signal that came when all was trained, if one did."""
    began, screen, names = time.monotonic(), Screen(task.unit), [each.name for each in runs]
    config, workdir, several = runs[0].config, runs[0].workdir, len(runs) > 1
    named = program is not None or "--workdir" in command  # else its directory bears the time; a sweep's does not
    again = "The same command" + ("" if named else f" with --workdir={workdir}")
    if mode == "train":
        if processes.first():
            for each in runs:
                check(each.workdir, each.config)
        if processes.agreed(lambda: all(finished(each.workdir) for each in runs)):
            screen.line(
                f"finished already: {workdir}/report.html. --mode=eval evaluates it; another --workdir trains anew."
            )
            return
    for option, place in (("--mode=eval: ", workdir if mode == "eval" else None), ("--from=", origin)):
        if place is not None and not Checkpoints(place).steps():
            raise Mistake(f"{option}{place} holds no checkpoints; what is wanted is the directory of a run.")
    program = (Program(config, task) if program is None else program).beside(len(runs))
    facts = header(program)
    screen.header(", ".join(names), facts)
    screen.line(f"\n{program.plan}\n")
    if mode == "plan":
        return
    if mode == "eval":
        evaluate(program, workdir, screen)
        return
    about = {
        "command": command,
        "header": [fact for fact in facts if fact[0] != "note"],
        "unit": task.unit,
        "metric": task.metric,
        "notes": task.notes,
        "steps": program.total,
        "flops": [cost * config.accumulate for cost in program.flops],  # of a step, dense and effective
    }
    going, done = dict(enumerate(runs)), []

    def left(why: str) -> None:
        for each in going.values():
            each.record.close(f"failed: {why}")

    with Stop() as stop:
        for each in runs:
            beside = {"beside": [name for name in names if name != each.name]} if several else {}
            each.open(about | beside, program.plan, screen, sink)
        with processes.at_end(left):
            _seen_by_all(workdir)
        try:
            with processes.at_end(left):
                loop(program, going, screen, began, stop, origin)
                for each in going.values():
                    each.checkpoints.close()
            while going:
                going[next(iter(going))].record.close("finished")
                done.append(going.pop(next(iter(going))))
        except BaseException as error:
            for each in going.values():
                each.end(error)
            kept = " ".join(each.checkpoints.kept() for each in going.values())
            if _stopped(error):
                begun = any(each.checkpoints.steps() for each in going.values())
                kept += f" {again} goes on from there." if begun else f" {again} begins anew."
                text = f"interrupted{error and f' by {error}'}. {kept}"
                raise (Stopped(text, error.signal) if isinstance(error, Stopped) else KeyboardInterrupt(text)) from None
            if isinstance(error, (Failed, Mistake, OSError)):  # a broken file and a full disk too
                kind = type(error) if isinstance(error, Failed) else Failed
                raise kind(
                    "\n".join(f"{each.name}: " * several + each.why(error) for each in going.values())
                ) from error
            raise
    if processes.first():
        for each in done:
            report.write(each.workdir)
            screen.line(f"\n{each.name}" if several else "")
            summary = each.record.about["summary"]
            screen.rows([*summary, ("report", str(each.workdir / "report.html")), ("everything", f"{each.workdir}/")])
    return processes.agreed(lambda: stop.signal)


def _stopped(error: BaseException) -> bool:
    return isinstance(error, (KeyboardInterrupt, Stopped))


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


def header(program: Program) -> list[tuple[str, str]]:
    """What is about to be done, and on what."""
    config, task, plan, devices = program.config, program.task, program.plan, program.mesh.size
    dense, effective = (cost * config.accumulate for cost in program.flops)
    micro = f"{config.accumulate} micro-batches x " if config.accumulate > 1 else ""
    each = config.batch // config.accumulate // (parts := shards.parts(program.mesh))
    axes = [f"{name} {size}" for name, size in program.mesh.shape.items() if size > 1]
    told = f" as {' x '.join(axes)}" if axes and axes != [f"data {devices}"] else ""
    told += f", in {processes.count()} processes" if processes.count() > 1 else ""
    size = f"{config.model.name} {config.model.size}"
    return [
        ("devices", f"{devices} x {jax.devices()[0].device_kind}{told}"),
        ("computing", f"{config.dtype}, parameters float32; {_how(plan.runs, config.backend)}"),
        *[("side by side", f"{program.count} runs, and what is shown of their steps is the mean")]
        * (program.count > 1),
        *task.facts,
        ("batch", f"{config.batch:,} = {micro}{parts} device{'s' * (parts > 1)} x {each:,}"),
        (
            "length",
            f"{program.total:,} steps = {program.total * config.batch / task.examples:.4g} epochs of {task.examples:,}",
        ),
        ("model", f"{size}, {plan.parameters:,} parameters"),
        ("FLOPs a step", f"{number(dense)} dense, {number(effective)} effective ({effective / dense:.2f}), on average"),
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
    program: Program, going: dict[int, Run], screen: Screen, began: float, stop: Stop, origin: Path | None
) -> None:
    """Train runs, by their numbers in the program's state. One that cannot go on is taken out; with the last, its error is
    raised."""
    task, total, config = program.task, program.total, program.config
    evaluations, measures = program.evaluations, program.measures
    start, states = begin(program, list(going.values()), screen, origin)
    feed = iter(task.feed(going[0].config.seed, start, program.mesh))
    higher = task.metric == "accuracy"
    for run in going.values():
        run.record.begin(start)
        run.best = run.record.best(task.metric, higher)
    if start < total:
        with screen.busy("compiling"):
            feed = itertools.chain([arrays := next(feed)], feed)
            program.compile(arrays, measures > 0)
    seeds = [np.uint32(run.config.seed) for run in going.values()]
    state = program.together([program.init(seed) if s is None else s for s, seed in zip(states, seeds, strict=True)])
    del states  # which are donated with it, or take up room

    def lose(i: int, error: Failed) -> None:
        run = going[i]
        if isinstance(error, Diverged):
            run.checkpoints.dump(program.part(state, i))
        if len(going) == 1:
            raise error
        del going[i]
        run.end(error)
        screen.line(f"{run.name}: {run.why(error)} The others go on.")

    def evaluated() -> dict[int, dict[str, float]]:
        found = fetched(program.evaluate(state), program.count)
        return {i: found[i] for i in going}

    def tell(step: int, means: dict[int, dict], rate: float | None) -> None:
        for i, each in means.items():
            if rate is not None:
                each |= {"per_second": rate * config.batch * task.units}
                each |= {"flops_per_second": rate * config.accumulate * program.plan.training[0]}
            going[i].record.write("train", step, **each)
        screen.step(step, mean(means.values()))

    def slow(rate: float) -> None:
        rate = number(rate * config.batch * task.units)
        screen.line(
            f"steps wait for their data, which come at {rate} {task.unit}/s: more cores or a faster disk would help"
        )

    def save(step: int, best: tuple[int, ...] = ()) -> None:
        for i, run in going.items():
            run.checkpoints.save(step, program.part(state, i), run.seen, best=i in best)

    found = evaluated() if start == total else {}
    meter = Meter(math.ceil(total / 500), going, tell, lose)
    with screen.progress(total, start):
        for step, arrays in zip(range(start, total), supplied(feed, slow), strict=False):
            measuring = measures > 0 and step % measures == 0
            if measuring:
                with meter.aside():
                    before, measured = program.masks(state), jax.device_get(program.measure(state, arrays))
            state, shown = program.train(state, arrays)
            meter.push(step, shown)
            if measuring:
                with meter.aside():
                    measured["flip_rate"] = program.flips(before, program.masks(state))
                    measured = fetched({name: table for name, table in measured.items() if table}, program.count)
                    for i, run in going.items():
                        run.record.write("sparsity", step, **measured[i])
            evaluating = (total - step - 1) % evaluations == 0
            if evaluating:
                with meter.aside():
                    meter.flush()  # what is written is whole as far as the checkpoint goes
                    found = evaluated()
                    for i in list(found):
                        if error := _not_finite(found[i], step + 1):
                            lose(i, error)
                    for i, run in going.items():
                        run.record.write("eval", step + 1, **found[i])
                    screen.evaluation(step + 1, mean([found[i] for i in going]))
                    values = {i: found[i].get(f"hardened_{task.metric}", found[i][task.metric]) for i in going}
                    save(step + 1, tuple(i for i, run in going.items() if run.better(values[i], higher)))
            stopping = stop.now()
            if stopping and not evaluating:
                meter.settle()
                save(step + 1)
            if stopping and step + 1 < total:
                raise Stopped(f"{stop.signal.name} after step {step + 1:,}", stop.signal)
    for i, run in list(going.items()):
        run.checkpoints.wait()
        if run.checkpoints.lost:
            lose(i, Failed(run.checkpoints.lost))
    for i, run in going.items():
        names = sorted(found[i], key=lambda name: (task.metric not in name, "hardened" not in name))
        summary = [(name.replace("_", " "), form(name, found[i][name])) for name in names]
        summary += [(f"best {task.metric}", form(task.metric, run.best)), ("time", clock(run.record.elapsed()))]
        if meter.first is not None:
            summary.append(("first step", f"after {meter.first - began:.1f} s"))
        run.record.keep(summary, found[i], program.one.pictures(program.part(state, i)))


def begin(program: Program, runs: list[Run], screen: Screen, origin: Path | None) -> tuple[int, list[State | None]]:
    """Where runs start: from their own last states, from another run's, or from nothing."""
    shapes = program.one.shapes
    found = [run.checkpoints.restore(shapes) for run in runs]
    steps = [each.step for each in found]
    if len(set(steps)) > 1:
        raise Failed(f"runs side by side go on from one step, and these are at {', '.join(map(str, steps))}")
    if steps[0]:
        for run in runs:
            where = run.checkpoints.directory
            screen.line(f"going on from step {steps[0]:,} of {program.total:,}, as {where} holds it")
    elif origin is not None:
        with contextlib.closing(Checkpoints(origin, screen.line)) as there:
            other = there.restore(shapes, mend=False)._replace(seen=[])
        if other.step > program.total:
            raise Mistake(f"--from={origin} is at step {other.step:,}, and this run has {program.total:,}")
        seed = shards.placed(np.uint32(runs[0].config.seed), shards.whole(program.mesh))
        found = [other._replace(state=other.state._replace(seed=seed))]
        screen.line(f"going on from step {other.step:,} of {program.total:,}, as {there.directory} holds it")
    for run, each in zip(runs, found, strict=True):
        run.seen = each.seen
    return found[0].step, [each.state for each in found]


def _not_finite(found: dict[str, float], step: int) -> Diverged | None:
    """No checkpoint is kept of what has diverged."""
    for name, value in found.items():
        if not math.isfinite(value):
            return Diverged(f"the {name.replace('_', ' ')} of the evaluation after step {step:,} is {value}")
    return None


def evaluate(program: Program, workdir: Path, screen: Screen) -> None:
    """The best and the last checkpoint of a run, on the test split."""
    same_config(workdir, program.config)
    with contextlib.closing(Checkpoints(workdir, screen.line)) as checkpoints:
        for name in ("last", "best"):
            step, state, _ = checkpoints.restore(program.shapes, best=name == "best", mend=False)
            if state is not None:
                found = program.evaluate(state)
                screen.line(f"{name}, step {step:,}: " + "   ".join(figures(found)))
