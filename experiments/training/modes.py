"""The modes of a command: train runs, evaluate a run, or show its plan."""

import contextlib
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from ml_collections import ConfigDict

from experiments.errors import Failed, Mistake, Stopped
from experiments.scale import processes
from experiments.scale.signals import Stop
from experiments.training import checkpoints, digest, header, record, settings, tasks
from experiments.training.checkpoints import Checkpoints
from experiments.training.digest import Identity
from experiments.training.loop import Loop
from experiments.training.profile import Profile
from experiments.training.program import Program
from experiments.training.run import Run, stopped
from experiments.training.screen import Screen, figures
from nmjax.analysis.plan import Plan


def make_program(config: ConfigDict) -> Program:
    """Return the program of a config, with its task."""
    return Program(config, tasks.task(config))


def check(config: ConfigDict, name: str) -> None:
    """Check that the methods, the learning rate and the optimizer of a config can be read. The data are not read.

    Args:
      config: The config of a run of a sweep.
      name: The name of the run, for the message.
    """
    total = config.steps or 1_000_000  # the number of examples is not known yet
    try:
        settings.recipe(config, total)
        settings.optimizer(config, settings.learning_rate(config, total), total)
    except Mistake as mistake:
        raise Mistake(f"{name}: {mistake}") from mistake


def carry_out(
    mode: str, runs: list[Run], command: str, origin: Path | None = None, program: Program | None = None,
    tracker: str = "", plans: list[Plan] | None = None, traced: int = 0, again: str = "The same command",
) -> signal.Signals | None:  # fmt: skip
    """Train, evaluate or plan a run; or train several runs side by side that differ in their seed alone.

    Args:
      mode: "train", "eval" or "plan".
      runs: One run, or several to train side by side.
      command: The command line, for run.json.
      origin: Directory of a run whose last state is the first state of this one.
      program: The program of another run that differs in its seed alone. Without it one is made.
      tracker: Name of the service that gets the numbers of the runs, or "".
      plans: The plans that earlier runs of a sweep have shown. They are not shown again, and a new one is added.
      traced: The number of steps that a profile traces, or 0.
      again: Words for the command that continues the runs, if they are interrupted.

    Returns:
      The signal that arrived after the last step, too late to interrupt the training; None if there was none.
    """
    began, config = time.monotonic(), runs[0].config
    task = tasks.task(config, plan=mode == "plan") if program is None else program.task
    screen = Screen(task.unit)
    with _taken(runs) if mode == "train" else contextlib.nullcontext():
        if mode == "train" and processes.agreed(lambda: all(record.finished(run.workdir) for run in runs)):
            page = runs[0].workdir / "report.html"
            saved = " The tags and the note that you gave are saved." if runs[0].labels else ""
            screen.line(f"finished already: {page}. --mode=eval evaluates it; another --workdir starts over.{saved}")
            return None
        if mode == "eval":
            refuse_without_checkpoints("--mode=eval: ", runs[0].workdir)
        if origin is not None:
            refuse_origin(origin, runs[0].identity)
        program = (Program(config, task) if program is None else program).beside(len(runs))
        if len(runs) > 1 and program.patience:
            raise Mistake(f"config.stop={config.stop!r}: runs side by side end together. Leave out --seeds_at_once.")
        profile = Profile(traced, program, runs[0].workdir, screen)
        facts, plans, names = header.rows(program), [] if plans is None else plans, ", ".join(run.name for run in runs)
        place = runs[0].workdir if len(runs) == 1 else runs[0].workdir.parent
        if mode == "plan":
            screen.header(names, facts)
            screen.line(f"\n{program.plan}\n")
            return None
        shown = [*facts, ("folder", f"{place}/")]
        screen.header(names, shown if program.plan in plans else [*shown, ("plan", header.in_short(program.plan))])
        screen.line("")
        plans.append(program.plan)
        if mode == "eval":
            evaluate(runs[0], program, screen)
            return None
        return train(runs, program, screen, _about(program, command, facts), again, began, origin, tracker, profile)


def checked(run: Run, origin: Path | None, traced: int) -> Program:
    """Return the program of a run that is to be trained later. Refuse what `carry_out` would refuse then.

    Args:
      run: The run.
      origin: Directory of a run whose last state is the first state of this one.
      traced: The number of steps that a profile traces, or 0.
    """
    if processes.first():
        record.check(run.workdir, run.identity)
    if origin is not None:
        refuse_origin(origin, run.identity)
    program = make_program(run.config)
    Profile(traced, program, run.workdir, Screen(program.task.unit))
    return program


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
    if not checkpoints.steps(workdir):
        raise Mistake(f"{option}{workdir} holds no checkpoints. Give the directory of a run that has saved one.")


def refuse_origin(origin: Path, own: Identity) -> None:
    """Refuse an origin without checkpoints, and one that may have learned from the validation or the test split."""
    refuse_without_checkpoints("--from=", origin)
    there = digest.recorded(origin).fields if (origin / "config.json").is_file() else {}
    here, name = own.fields, "data.validation"
    if here.get(name) and there.get(name, 0) != here[name] and there.get("data.name") == here.get("data.name"):
        raise Mistake(
            f"--from={origin} was trained with config.{name}={there.get(name, 0)}, and may have learned from the "
            f"validation split of this run. Write --config.{name}={there.get(name, 0)}."
        )
    test, alike = "data.test", there.get("data.name") == here.get("data.name")
    if alike and there.get(test, "") != here.get(test, "") and there.get("data.dir") == here.get("data.dir"):
        raise Mistake(
            f"--from={origin} was trained with config.{test}={there.get(test, '')!r}, and may have learned from the "
            f"test split of this run. Write --config.{test}={there.get(test, '')!r}."
        )


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
        "planned_steps": program.total,
        "flops": program.step_flops(),
        "parameters": program.plan.parameters,
        "sizes": getattr(task, "sizes", {}),  # with them the model can be made without the data
        "data": digest.of_data(getattr(task, "data", ())),
        "weights": digest.of_data(program.pretrained),
    }


# ---- training ----


def train(
    runs: list[Run], program: Program, screen: Screen, about: dict, again: str, began: float, origin: Path | None,
    tracker: str, profile: Profile,
) -> signal.Signals | None:  # fmt: skip
    """Train runs side by side: open their directories, run the loop, and close them with their reports.

    If one of several runs fails by itself, it is closed and reported, and the others go on (`Loop.remove`).
    """
    going = dict(enumerate(runs))  # the loop takes out those that fail
    abouts = [about | _lasting(run, about, origin) for run in runs]
    with Stop() as stop:
        _open(runs, program, screen, abouts, tracker)
        try:
            with processes.at_end(lambda reason: _close_failed(going, reason)), profile:
                Loop(program, going, screen, stop, began, profile).run(origin)
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


def _open(runs: list[Run], program: Program, screen: Screen, abouts: list[dict], tracker: str) -> None:
    """Begin to write to the directories of the runs."""
    for run, about in zip(runs, abouts, strict=True):
        beside = [other.name for other in runs if other is not run]
        run.open(about | {"trained_with": beside} if beside else about, program, screen, tracker)
    with processes.at_end(lambda reason: _close_failed(dict(enumerate(runs)), reason)):
        _refuse_unshared(runs[0].workdir)


def _lasting(run: Run, about: dict, origin: Path | None) -> dict:
    """Return what run.json says of the state with which a run began. Refuse to continue it with other data.

    Args:
      run: The run.
      about: What run.json will say of it.
      origin: Directory of a run whose last state is the first state of this one.
    """
    before, begun = record.read(run.workdir) or {}, bool(checkpoints.steps(run.workdir))
    changed = [name for name in ("data", "weights") if begun and before.get(name, about[name]) != about[name]]
    if changed:
        raise Mistake(
            f"--workdir={run.workdir} holds a run that read other {changed[0]}: the files that its config names have "
            "changed since. Put the former ones in their place, or give this run a directory of its own."
        )
    if begun or origin is None:
        if "origin" in before and not begun:
            raise Mistake(
                f"--workdir={run.workdir} holds a run that began with the state of another, and has no checkpoint of "
                f"its own yet. Write --from={before['origin']['directory']} again, or another --workdir."
            )
        first = before.get("origin")
    else:
        first = {"directory": str(origin), "step": checkpoints.steps(origin)[-1]}
    if first is None:
        return {}
    row = ("began with", f"the state of {first['directory']} at step {first['step']:,}")
    return {"origin": first, "header": [*about["header"], row]}


def _close_failed(going: dict[int, Run], reason: str) -> None:
    for run in going.values():
        run.record.close(f"failed: {reason}")


def _refuse_unshared(workdir: Path) -> None:
    """Refuse a directory that the processes do not share. All of them write their parts of a checkpoint there."""
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
    begun = any(checkpoints.steps(run.workdir) for run in runs)
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
    comparison = run.record.about["comparison"]
    screen.rows([*([("in short", comparison)] if comparison else []), *run.record.about["summary"], *places])


# ---- evaluating ----


def evaluate(run: Run, program: Program, screen: Screen) -> None:
    """Show the scores of the last and of the best checkpoint of a run, on every split."""
    digest.refuse_another(run.workdir, run.identity)
    with contextlib.closing(Checkpoints(run.workdir, screen.line)) as saved:
        for name in ("last", "best"):
            step, state, _ = saved.restore(program.shapes, best=name == "best", rename_damaged=False)
            if state is not None:
                for split in ("validation", "test") if program.task.validates else ("test",):
                    scores = figures(program.evaluate(state, split))
                    screen.line(f"{name}, step {step:,}, {split}: " + "   ".join(scores))
    comparison = (record.read(run.workdir) or {}).get("comparison")
    screen.rows([("at its end", comparison)] if comparison else [])
