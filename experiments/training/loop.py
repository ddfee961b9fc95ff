"""The training loop: every step, measurement, evaluation and checkpoint of one run or of several side by side."""

import contextlib
import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments.errors import Diverged, Failed, Mistake, Stopped
from experiments.report.words import milliseconds
from experiments.scale import processes, shards
from experiments.scale.signals import Stop
from experiments.training import baseline, device, digest, settings
from experiments.training.checkpoints import Checkpoints, Restored
from experiments.training.meter import Meter, fetched, mean, supplied
from experiments.training.phases import Phases
from experiments.training.profile import Profile
from experiments.training.program import Program
from experiments.training.run import Run
from experiments.training.screen import Screen, clock, form, number
from experiments.training.state import State, reseeded

WINDOWS = 10  # timed windows of steps that the time of a step needs


class Loop:
    """Trains runs to their last step.

    Read `run` first: it is the whole loop. All runs share one program. Their states are stacked along a new axis.

    Args:
      program: The compiled functions.
      runs: The active runs, by index in the state. A failed run is removed. If it is the only one, its error is raised.
      screen: Shows the progress.
      stop: Asked after each step whether the runs have to stop.
      began: Time at which the command began, for the summary.
      profile: Traces some of the steps.
    """

    state: State

    def __init__(
        self, program: Program, runs: dict[int, Run], screen: Screen, stop: Stop, began: float, profile: Profile
    ):  # fmt: skip
        self.program, self.runs, self.screen, self.stop, self.began = program, runs, screen, stop, began
        self.profile, self.peak = profile, device.peak_of(program.mesh, program.config.dtype)
        self.task, self.total, self.config = program.task, program.total, program.config
        self.higher_is_better = self.task.metric == "accuracy"
        self.split = "validation" if self.task.validates else "test"  # on which the runs are evaluated
        self.scores: dict[int, dict[str, float]] = {}  # of the last evaluation, by run
        self.temporary: int | None = None  # bytes of temporary memory of a step on a device
        self.meter = Meter(math.ceil(self.total / 500), runs, self.report, self.remove)  # at most 500 lines of metrics

    def run(self, origin: Path | None) -> None:
        """Train to the last step, or until no evaluation gets better, and write a summary.

        Args:
          origin: Directory of a run to start from, if the runs have no checkpoints of their own.
        """
        start, feed = self.begin(origin)
        last = start if self.stale(start) else self.total
        if start == last:  # the run was killed after its last checkpoint
            self.scores = self.score(self.split)
        self.profile.at(start, self.state, None, self.meter)
        with self.screen.progress(self.total, start):
            done = start
            for step, arrays in zip(range(start, last), supplied(feed, self.warn_of_slow_feed), strict=False):
                if step in self.program.phases and step > start:
                    with self.meter.untimed():
                        self.program, temporary = self.phases.change(step)
                        self.temporary = max(filter(None, (self.temporary, temporary)), default=None)
                measures = self.program.measures and step % self.program.measures == 0
                with self.measuring(step, arrays) if measures else contextlib.nullcontext():
                    with jax.profiler.StepTraceAnnotation("train", step_num=step):
                        self.state, shown = self.program.train(self.state, arrays)
                    self.meter.push(step, shown)
                done = step + 1
                self.profile.at(done, self.state, arrays, self.meter)
                evaluating = settings.evaluates(done, self.total, self.program.evaluations)
                if evaluating:
                    self.evaluate(done)
                if evaluating and self.stale(done):
                    last = done
                    break
                if self.stop.now():
                    self.stop_after(done, saved=evaluating)
        if done < last:
            raise Failed(_ended(done, last))
        if last < self.total:
            self.screen.line(f"stopped early: no better evaluation for {self.program.patience:,} steps (config.stop)")
        self.finish(last)

    # ---- the beginning ----

    def begin(self, origin: Path | None) -> tuple[int, Iterator]:
        """Make or restore the first state, and compile. Return the first step and the feed."""
        restored = restore(self.program, list(self.runs.values()), self.screen, origin)
        start = restored[0].step
        seed = self.runs[0].config.seed  # not the program's: it may have been made for another seed
        feed = iter(self.task.feed(seed, start, self.program.mesh))
        for run, each in zip(self.runs.values(), restored, strict=True):
            run.pending = each.pending
            run.record.begin(start)
            run.best = processes.agreed(lambda run=run: run.record.best(self.task.metric, self.higher_is_better))
        if start < self.total and not self.stale(start):
            with self.screen.busy("compiling"):
                arrays = next(feed, None)
                if arrays is None:
                    raise Failed(_ended(start, self.total))
                feed = itertools.chain([arrays], feed)
                self.phases = Phases(self.program, arrays)
                self.program, self.temporary = self.phases.begin(start, self.program.measures > 0)
        states = []
        for run, each in zip(self.runs.values(), restored, strict=True):
            first = self.program.init(np.uint32(run.config.seed)) if each.state is None else each.state
            states.append(first)
        self.state = self.program.together(states)
        return start, feed

    @contextlib.contextmanager
    def measuring(self, step: int, arrays: Any) -> Iterator[None]:
        """Measure what pruning does to weights and gradients at the beginning of the step inside, and write it."""
        with self.meter.untimed():
            masks = self.program.masks(self.state)
            tables = jax.device_get(self.program.measure(self.state, arrays))
        yield
        with self.meter.untimed():
            tables["flip_rate"] = self.program.flips(masks, self.program.masks(self.state))
            measured = fetched({name: table for name, table in tables.items() if table}, self.program.count)
            for i, run in self.runs.items():
                run.record.write("sparsity", step, **measured[i])

    # ---- an evaluation, and its checkpoint ----

    def evaluate(self, step: int) -> None:
        """Score the runs after a step, and save them.

        All lines of metrics up to this step are written first. See `Checkpoints.save` for the order of writes.
        """
        with self.meter.untimed():
            self.meter.flush()
            self.scores = self.score(self.split)
            for i, scores in self.scores.items():
                self.remove_if_diverged(i, step, scores)
            for i, run in self.runs.items():
                run.record.write("eval", step, **self.scores[i])
            self.screen.evaluation(step, self.split, mean([self.scores[i] for i in self.runs]))
            higher = self.higher_is_better
            best = [
                i for i, run in self.runs.items() if run.improves(step, self.deciding_score(self.scores[i]), higher)
            ]
            self.save(step, best)
            if step < self.total:  # the last report is written at the end of the run
                for run in self.runs.values():
                    run.record.show()

    def score(self, split: str) -> dict[int, dict[str, float]]:
        """Return the scores of a split, by run."""
        scores = fetched(self.program.evaluate(self.state, split), self.program.count)
        return {i: scores[i] for i in self.runs}

    def deciding_score(self, scores: dict[str, float]) -> float:
        """Return the score that decides which checkpoint is the best: that of hardened weights, if there are any."""
        return scores.get(f"hardened_{self.task.metric}", scores[self.task.metric])

    def stale(self, step: int) -> bool:
        """Return whether the runs stop after a step, because the last better evaluation is too long ago."""
        evaluated = settings.evaluates(step, self.total, self.program.evaluations)
        if not self.program.patience or not evaluated:
            return False
        return all(run.best is not None and step - run.best[0] >= self.program.patience for run in self.runs.values())

    def save(self, step: int, best: list[int]) -> None:
        """Begin to write a checkpoint of each run.

        Args:
          step: Number of steps that are done.
          best: The runs whose best score is at this step.
        """
        for i, run in self.runs.items():
            run.checkpoints.save(step, self.program.part(self.state, i), run.pending, best=i in best)

    # ---- the end of a run ----

    def remove_if_diverged(self, i: int, step: int, scores: dict[str, float]) -> None:
        """Remove a run whose score is not finite, before its state is saved."""
        for name, value in scores.items():
            if not math.isfinite(value):
                text = f"the {name.replace('_', ' ')} of the evaluation after step {step:,} is {value}"
                self.remove(i, Diverged(text))
                return

    def remove(self, i: int, error: Failed) -> None:
        """Remove a failed run. If it diverged, dump its state first. If it is the only run, raise its error."""
        run = self.runs[i]
        if isinstance(error, Diverged):
            run.checkpoints.dump(self.program.part(self.state, i))
        if len(self.runs) == 1:
            raise error
        del self.runs[i]
        run.end(error)
        self.screen.line(f"{run.name}: {run.explain(error)} The other runs continue.")

    def stop_after(self, step: int, saved: bool) -> None:
        """Save the runs if they are not saved yet. Then raise `Stopped`, except after the last step."""
        if not saved:
            self.meter.settle()
            self.save(step, best=[])
        if step < self.total:
            assert self.stop.signal is not None
            raise Stopped(f"{self.stop.signal.name} after step {step:,}", self.stop.signal)

    def finish(self, step: int) -> None:
        """Wait for the last checkpoints, score the test split, and write the data for the reports.

        Args:
          step: Number of steps that the runs have taken.
        """
        for i, run in list(self.runs.items()):
            run.checkpoints.wait()
            if run.checkpoints.lost:
                self.remove(i, Failed(run.checkpoints.lost))
        tests = self.score("test") if self.task.validates else {i: self.scores[i] for i in self.runs}
        for i, scores in tests.items():
            self.remove_if_diverged(i, step, scores)
        for i, run in self.runs.items():
            kept, state = self.best_state(i, step) or (step, self.program.part(self.state, i))
            best = None
            if kept != step and self.task.validates:
                best = (kept, fetched(self.program.one.evaluate(state, "test"), 1)[0])
                run.record.write("test", kept, **best[1])
            which = f"step {kept:,}{', the best evaluation' if run.best and kept == run.best[0] else ''}"
            if told := self.program.one.export(state, run.workdir / "model", which):
                self.screen.line(told)
            run.record.write("test", step, **tests[i])
            pictures = self.program.one.pictures(self.program.part(self.state, i))
            flops, validated = self.flops(step), self.scores[i].items() if self.task.validates else ()
            measured = self.measured(i)
            comparison = baseline.comparison(run.baseline, run.workdir, self.task.metric, tests[i], flops, measured)
            early = [("stopped early", f"after step {step:,} of {self.total:,}")] if step < self.total else []
            figures = tests[i] | {f"validation_{name}": value for name, value in validated}
            about = {"comparison": comparison, "steps": step, "flops": flops, "measured": measured, "figures": figures}
            run.record.keep([*self.summary(i, tests[i], best, measured), *early], about, pictures)

    def flops(self, step: int) -> list[float]:
        """Return the average FLOPs of a step, dense and effective, over so many steps."""
        if step == self.total or self.program.starts_late:
            return self.program.step_flops()
        return [flops * self.config.accumulate for flops in self.program.plan.over(step, data_gradients=False)]

    def measured(self, i: int) -> dict[str, float]:
        """Return what a step takes: "step_seconds", the median over windows, and "step_bytes" of temporary memory.

        The bytes are XLA's count on a device. What is not known is left out. If runs are trained side by side, each
        has an equal share.
        """
        rate = self.runs[i].record.median("per_second", least=WINDOWS)
        taken = {"step_seconds": rate and self.config.batch * self.task.units / rate, "step_bytes": self.temporary}
        return {name: value / self.program.count for name, value in taken.items() if value is not None}

    def best_state(self, i: int, step: int) -> tuple[int, State] | None:
        """Return the step and the state of a run's best checkpoint.

        None: it is the last one, it cannot be read, or nothing needs it.

        Args:
          i: The run.
          step: Number of steps that the run has taken.
        """
        run, needed = self.runs[i], self.task.validates or hasattr(self.task, "export")
        if not needed or run.best is None or run.best[0] == step:
            return None
        found = processes.agreed(lambda: self.step_of_best(run))
        if found in (0, step):
            return None
        names = ("ema",) if self.config.ema else ("params", "rest")  # the optimizer's state is not read
        shapes = self.program.one.shapes
        _, fields = run.checkpoints.restore_fields({n: getattr(shapes, n) for n in names}, best=True)
        return found, self.program.part(self.state, i)._replace(**fields)

    def step_of_best(self, run: Run) -> int:
        """Return the step of the best checkpoint that can be read, or 0."""
        try:
            return run.checkpoints.last(best=True)
        except Failed as error:
            self.screen.line(f"The best checkpoint cannot be read: {error}.")
            return 0

    def summary(
        self, i: int, scores: dict[str, float], best: tuple[int, dict[str, float]] | None,
        measured: dict[str, float],
    ) -> list[tuple[str, str]]:  # fmt: skip
        """Return rows (label, text) about a finished run. The report shows the first rows in large type.

        Args:
          i: The run.
          scores: Its scores on the test split.
          best: The step of its best checkpoint and its scores on the test split, or None if it is the last one.
          measured: What `measured` returns.
        """
        run, metric = self.runs[i], self.task.metric
        names = sorted(scores, key=lambda name: (metric not in name, "hardened" not in name))
        rows = [(f"test {name.replace('_', ' ')}", form(name, scores[name])) for name in names]
        if self.task.validates:
            hardened = "hardened " if f"hardened_{metric}" in scores else ""
            rows.append((f"validation {hardened}{metric}", form(metric, self.deciding_score(self.scores[i]))))
        if run.best is not None:
            text = f"{form(metric, run.best[1])}, step {run.best[0]:,}"
            if best is not None:
                where = "" if best[0] == run.best[0] else f" of step {best[0]:,}, which is kept"
                text += f"; test {form(metric, self.deciding_score(best[1]))}{where}"
            rows.append((f"best {self.split} {metric}", text))
        rows.append(("time", clock(run.record.elapsed())))
        if self.meter.first is not None:
            rows.append(("first step", f"after {self.meter.first - self.began:.1f} s"))
        if "step_seconds" in measured:
            rows.append(("time of a step", milliseconds(measured["step_seconds"])))
        if "step_bytes" in measured:
            rows.append(("temporary memory of a step", f"{number(measured['step_bytes'])}B"))
        if self.peak is not None and (mfu := run.record.median("mfu")) is not None:
            rows.append(("MFU (median)", f"{mfu:.1%}"))
        rows += [
            ("peak memory", f"{number(peak)}B {device.MEMORY[name]}") for name, peak in device.peak_memory().items()
        ]
        return rows

    # ---- reports ----

    def report(self, step: int, means: dict[int, dict], rate: float | None) -> None:
        """Write and show the means of a window of steps."""
        for i, figures in means.items():
            if rate is not None:
                figures["per_second"] = rate * self.config.batch * self.task.units
                figures["flops_per_second"] = rate * self.program.step_flops()[0]
                if self.peak is not None:  # all runs side by side share the devices
                    figures["mfu"] = figures["flops_per_second"] * self.program.count / self.peak
            figures |= device.peak_memory()
            self.runs[i].record.write("train", step, **figures)
        self.screen.step(step, mean(means.values()))

    def warn_of_slow_feed(self, rate: float) -> None:
        """Warn that training waits for data. The rate is in batches per second."""
        supply = f"{number(rate * self.config.batch * self.task.units)} {self.task.unit}/s"
        self.screen.line(
            f"Steps wait for their data, which arrive at {supply}. More processor cores or a faster disk would help."
        )


def _ended(done: int, last: int) -> str:
    return f"the feed of the task ended after step {done:,} of {last:,}. It has to go on until the last step."


def restore(program: Program, runs: list[Run], screen: Screen, origin: Path | None) -> list[Restored]:
    """Return the initial state of each run: its own last one, the last one of another run, or none at step 0.

    Args:
      program: The program of the runs.
      runs: Runs that are trained side by side.
      screen: Shows where the runs continue.
      origin: Directory of another run. It is read if a run has no checkpoint of its own.

    Raises:
      Failed: If the runs are not at the same step.
      Mistake: If the other run is at the last step of this one, or beyond it.
    """
    shapes = program.one.shapes
    restored = [run.checkpoints.restore(shapes) for run in runs]
    steps = [each.step for each in restored]
    if len(set(steps)) > 1:
        raise Failed(
            "Runs side by side have to continue from the same step, and the last checkpoints of these are of steps "
            + ", ".join(map(str, steps))
        )
    if steps[0]:
        for run in runs:
            screen.line(f"continuing from step {steps[0]:,} of {program.total:,}, from {run.checkpoints.directory}")
    elif origin is not None:
        seed = shards.placed(np.uint32(runs[0].config.seed), shards.whole(program.mesh))
        fresh = program.one.init(seed).rest
        with contextlib.closing(Checkpoints(origin, screen.line)) as checkpoints:
            other = checkpoints.restore(shapes, rename_damaged=False)
        if other.step >= program.total:
            raise Mistake(
                f"--from={origin} is at step {other.step:,}, and this run has only {program.total:,} steps. Write a "
                "larger --config.steps, or a larger --config.epochs."
            )
        state = reseeded(other.state, seed, fresh, program.one.model)
        if (origin / "config.json").is_file() and digest.recorded(origin).methods != runs[0].identity.methods:
            state = program.one.renewed(state)
            screen.line("the methods are others than there: scales and held masks are made again from the weights")
        restored = [Restored(other.step, state, pending=[])]
        screen.line(f"continuing from step {other.step:,} of {program.total:,}, from {checkpoints.directory}")
    return restored
