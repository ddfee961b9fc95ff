"""The modes of a command: train runs, evaluate a run, or show its plan."""

import contextlib
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import jax
from ml_collections import ConfigDict

from experiments.errors import Failed, Mistake, Stopped
from experiments.scale import processes, shards
from experiments.scale.signals import Stop
from experiments.training import digest, record, tasks
from experiments.training.checkpoints import Checkpoints
from experiments.training.loop import Loop
from experiments.training.program import Program
from experiments.training.run import Run, stopped
from experiments.training.screen import Screen, figures, number


def make_program(config: ConfigDict) -> Program:
    """Return the program of a config, with its task."""
    return Program(config, tasks.task(config))


def carry_out(
    mode: str, runs: list[Run], command: str, origin: Path | None = None, program: Program | None = None, sink: str = ""
) -> signal.Signals | None:  # fmt: skip
    """Train, evaluate or plan a run; or train several runs side by side that differ in their seed alone.

    Args:
      mode: "train", "eval" or "plan".
      runs: One run, or several to train side by side.
      command: The command line, for run.json.
      origin: Directory of a run whose last state is the first state of this one.
      program: The program of another run that differs in its seed alone. Without it one is made.
      sink: Name of the service that gets the numbers of the runs, or "".

    Returns:
      The signal that came when no step was left to be stopped, if one came.
    """
    began, config = time.monotonic(), runs[0].config
    task = tasks.task(config) if program is None else program.task
    screen = Screen(task.unit)
    with _taken(runs) if mode == "train" else contextlib.nullcontext():
        if mode == "train" and processes.agreed(lambda: all(run.finished() for run in runs)):
            page = runs[0].workdir / "report.html"
            screen.line(f"finished already: {page}. --mode=eval evaluates it; another --workdir starts over.")
            return None
        if mode == "eval":
            refuse_without_checkpoints("--mode=eval: ", runs[0].workdir)
        if origin is not None:
            refuse_without_checkpoints("--from=", origin)
        again = "The same command"
        if program is None and "--workdir" not in command:  # then the name of the directory holds the time
            again += f" with --workdir={runs[0].workdir}"
        program = (Program(config, task) if program is None else program).beside(len(runs))
        facts = header(program)
        screen.header(", ".join(run.name for run in runs), facts)
        screen.line(f"\n{program.plan}\n")
        if mode == "plan":
            return None
        if mode == "eval":
            evaluate(runs[0], program, screen)
            return None
        return train(runs, program, screen, _about(program, command, facts), again, began, origin, sink)


@contextlib.contextmanager
def _taken(runs: list[Run]) -> Iterator[None]:
    """Keep other commands from writing to the directories of these runs inside the context. Process 0 does it for all.

    Raises:
      Mistake: If a directory cannot hold its run, or if another command writes to it.
    """
    with contextlib.ExitStack() as taken:
        if processes.first():
            for run in runs:
                taken.enter_context(run.taken())
        yield


def refuse_without_checkpoints(option: str, workdir: Path) -> None:
    """Refuse a directory that an option names as that of a run, if it holds no checkpoint."""
    if not Checkpoints(workdir).steps():
        raise Mistake(f"{option}{workdir} holds no checkpoints. Give the directory of a run that has saved one.")


def _about(program: Program, command: str, facts: list[tuple[str, str]]) -> dict:
    """Return what run.json says of every run of a program."""
    task = program.task
    return {
        "command": command,
        "header": [(label, text) for label, text in facts if label != "note"],
        "unit": task.unit,
        "metric": task.metric,
        "notes": task.notes,
        "steps": program.total,
        "flops": program.step_flops(),
        "sizes": getattr(task, "sizes", {}),  # with them the model can be made without the data
    }


# ---- the header ----


def header(program: Program) -> list[tuple[str, str]]:
    """Return rows (label, text) that say what is about to be done, and on which devices."""
    config, task, plan = program.config, program.task, program.plan
    dense, effective = program.step_flops()
    epochs = program.total * config.batch / task.examples
    rows = [("devices", _devices(program))]
    rows.append(("computing", f"{config.dtype}, parameters float32; {_products(plan.runs, config.backend)}"))
    if program.count > 1:
        rows.append(("side by side", f"{program.count} runs; the figures of their steps on screen are the mean"))
    rows += task.facts
    rows.append(("batch", _batch(program)))
    rows.append(("length", f"{program.total:,} steps = {epochs:.4g} epochs of {task.examples:,}"))
    model = config.get("model", {})  # a task of another module may name its model elsewhere
    name = " ".join(filter(None, (model.get("name"), model.get("size"))))
    rows.append(("model", f"{name}{', ' if name else ''}{plan.parameters:,} parameters"))
    share = effective / dense
    rows.append(("FLOPs a step", f"{number(dense)} dense, {number(effective)} effective ({share:.2f}), on average"))
    if program.hardening_refusal:
        rows.append(("hardened", f"not evaluated: {program.hardening_refusal}"))
    return rows


def _devices(program: Program) -> str:
    """Return the number and the kind of the devices, and how they are arranged."""
    count = program.mesh.size
    axes = [f"{name} {size}" for name, size in program.mesh.shape.items() if size > 1]
    text = f"{count} x {jax.devices()[0].device_kind}"
    if axes and axes != [f"data {count}"]:
        text += f" as {' x '.join(axes)}"
    if processes.count() > 1:
        text += f", in {processes.count()} processes"
    return text


def _batch(program: Program) -> str:
    """Return the size of the batch, and how micro-batches and devices share it."""
    config, parts = program.config, shards.parts(program.mesh)
    each = config.batch // config.accumulate // parts
    micro = f"{config.accumulate} micro-batches x " if config.accumulate > 1 else ""
    devices = "device" if parts == 1 else "devices"
    return f"{config.batch:,} = {micro}{parts} {devices} x {each:,}"


def _products(runs: dict[str, int], backend: str) -> str:
    """Return in words how pruned products run.

    >>> _products({"packed": 12, "emulated": 2}, "auto")
    'pruned products: 12 on sparse tensor cores, 2 emulated, for the reasons in the plan'
    """
    if not runs:
        return "nothing is pruned"
    if set(runs) == {"emulated"}:
        return "n:m products are emulated: zeros are multiplied"
    words = {"packed": "on sparse tensor cores", "fp8": "dense in FP8"}
    if backend == "interpret":
        words = {"packed": "in simulated kernels", "fp8": "in simulated FP8"}
    words["emulated"] = "emulated, for the reasons in the plan"
    return "pruned products: " + ", ".join(f"{runs[how]} {text}" for how, text in words.items() if how in runs)


# ---- training ----


def train(
    runs: list[Run], program: Program, screen: Screen, about: dict, again: str, began: float, origin: Path | None,
    sink: str,
) -> signal.Signals | None:  # fmt: skip
    """Train runs side by side: open their directories, run the loop, and close them with their reports.

    A run that fails is ended and told while the others go on. With the last one its error is raised.
    """
    going = dict(enumerate(runs))  # the loop takes out those that fail
    with Stop() as stop:
        _open(runs, program, screen, about, sink)
        try:
            with processes.at_end(lambda reason: _close_failed(going, reason)):
                Loop(program, going, screen, stop, began).run(origin)
                for run in going.values():
                    run.checkpoints.close()
            finished = list(going.values())
            while going:
                i = next(iter(going))
                going[i].record.close("finished")
                del going[i]  # what comes now is no error of this run
        except BaseException as error:
            for run in going.values():
                run.end(error)
            if stopped(error):
                raise _interrupted(error, list(going.values()), again) from None
            if isinstance(error, Failed | Mistake | OSError):  # OSError: a broken file, or a full disk
                raise _failed(error, list(going.values()), several=len(runs) > 1) from error
            raise
    for run in finished:
        if processes.first():
            _show_summary(run, screen, named=len(runs) > 1)
    return processes.agreed(lambda: stop.signal)


def _open(runs: list[Run], program: Program, screen: Screen, about: dict, sink: str) -> None:
    """Begin to write to the directories of the runs."""
    for run in runs:
        beside = [other.name for other in runs if other is not run]
        run.open(about | {"beside": beside} if beside else about, program, screen, sink)
    with processes.at_end(lambda reason: _close_failed(dict(enumerate(runs)), reason)):
        _refuse_unshared(runs[0].workdir)


def _close_failed(going: dict[int, Run], reason: str) -> None:
    for run in going.values():
        run.record.close(f"failed: {reason}")


def _refuse_unshared(workdir: Path) -> None:
    """Refuse a directory that is another one on another machine: all processes write their parts of a checkpoint."""
    began = processes.agreed(lambda: _began(workdir))
    for _ in range(20):  # a file system of many machines may show a file late
        if _began(workdir) == began:
            return
        time.sleep(0.5)
    raise Mistake(
        f"--workdir={workdir.absolute()} is not the directory that process 0 has by this name. Give a directory that "
        "all processes share, because each writes its part of a checkpoint."
    )


def _began(workdir: Path) -> str | None:
    about = record.read(workdir)
    return None if about is None else about["began"]


def _interrupted(error: BaseException, runs: list[Run], again: str) -> BaseException:
    """Return the error that tells a person where interrupted runs stand, and how they continue."""
    kept = " ".join(run.checkpoints.kept_message() for run in runs)
    begun = any(run.checkpoints.steps() for run in runs)
    by = f" by {error}" if str(error) else ""
    text = f"interrupted{by}. {kept} {again} {'continues from there' if begun else 'starts from the beginning'}."
    return Stopped(text, error.signal) if isinstance(error, Stopped) else KeyboardInterrupt(text)


def _failed(error: Exception, runs: list[Run], several: bool) -> Failed:
    """Return the error that tells a person why runs failed: a line for each, with its name if there are several."""
    kind = type(error) if isinstance(error, Failed) else Failed
    return kind("\n".join(f"{run.name}: {run.explain(error)}" if several else run.explain(error) for run in runs))


def _show_summary(run: Run, screen: Screen, named: bool) -> None:
    screen.line(f"\n{run.name}" if named else "")
    places = [("report", f"{run.workdir}/report.html"), ("everything", f"{run.workdir}/")]
    screen.rows([*run.record.about["summary"], *places])


# ---- evaluating ----


def evaluate(run: Run, program: Program, screen: Screen) -> None:
    """Show the scores of the last and of the best checkpoint of a run, on the test split."""
    digest.refuse_another(run.workdir, run.identity)
    with contextlib.closing(Checkpoints(run.workdir, screen.line)) as checkpoints:
        for name in ("last", "best"):
            step, state, _ = checkpoints.restore(program.shapes, best=name == "best", rename_damaged=False)
            if state is not None:
                screen.line(f"{name}, step {step:,}: " + "   ".join(figures(program.evaluate(state))))
