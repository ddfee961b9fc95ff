"""The profile of a run (--profile=STEPS): a trace of some steps in WORKDIR/profile, and their breakdown."""

import gzip
import json
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax

from experiments.errors import Mistake
from experiments.files import replace
from experiments.scale import processes
from experiments.training import breakdown
from experiments.training.meter import Meter
from experiments.training.program import Program
from experiments.training.screen import Screen

WARM = 5  # steps before the trace: the first ones also fill caches
IN_KEY = "jax_compilation_cache_include_metadata_in_key"


class Profile:
    """Traces some steps of a run. It is a context around the run's loop.

    Args:
      steps: The number of steps to trace; 0 means that nothing is traced.
      program: The program of the run.
      workdir: The run's directory.
      screen: Says what is traced, and where the trace is.

    Raises:
      Mistake: If the run has fewer steps.
    """

    def __init__(self, steps: int, program: Program, workdir: Path, screen: Screen):
        if steps > program.total:
            raise Mistake(f"--profile={steps} is more than the {program.total:,} steps of the run. Give fewer.")
        self.steps = steps  # all processes wait at the same steps; the first one traces
        self.program, self.folder, self.screen = program, workdir / "profile", screen
        self.first: int | None = None  # the first traced step
        self._tracing = False
        self._in_key = getattr(jax.config, IN_KEY)

    def __enter__(self) -> "Profile":
        if self.steps:  # a program that was compiled under other names is then not taken from the cache
            jax.config.update(IN_KEY, True)
        return self

    def __exit__(self, *_: Any) -> None:
        jax.config.update(IN_KEY, self._in_key)
        if self._tracing:
            with suppress(Exception):  # the run's own error is more important
                jax.profiler.stop_trace()
            self.screen.line("--profile: the run ended before its last traced step, so the report has no breakdown.")

    def at(self, done: int, state: Any, arrays: Any, meter: Meter) -> None:
        """Begin or end the trace, if it begins or ends after this step.

        Args:
          done: The number of steps that are done.
          state: The state after them.
          arrays: What the feed yielded for the last of them; None before the first step.
          meter: Leaves the time that is spent here out of the rate.
        """
        if not self.steps:
            return
        if self.first is None:
            self._choose(done)
        begins, ends = done == self.first, done == self.first + self.steps
        if not self.steps or not (begins or ends):
            return
        with meter.untimed():
            jax.block_until_ready(state)  # steps that still run belong to one side of this moment
            try:
                if begins and processes.first():
                    self._begin()
                elif self._tracing:
                    self._end(arrays)
            except (OSError, RuntimeError) as error:  # for example, because the disk is full
                self._tracing = False
                self.screen.line(f"--profile: {error}. The run goes on without a breakdown.")

    def _choose(self, start: int) -> None:
        """Choose the traced steps: those after `WARM` steps, or the last ones if the run has too few."""
        total = self.program.total
        self.steps = min(self.steps, total - start)
        self.first = min(start + WARM, total - self.steps)
        if self.steps:
            self.screen.line(f"--profile: {_steps(self.first, self.steps)} will be traced.")

    def _begin(self) -> None:
        (self.folder / "breakdown.json").unlink(missing_ok=True)  # from an earlier command, like its trace
        shutil.rmtree(self.folder / "plugins", ignore_errors=True)
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # a trace of every Python call would slow the host down
        jax.profiler.start_trace(str(self.folder), profiler_options=options)
        self._tracing = True

    def _end(self, arrays: Any) -> None:
        self._tracing = False
        jax.profiler.stop_trace()
        traces = sorted(self.folder.glob("plugins/profile/*/*.xplane.pb"))
        if not traces:
            self.screen.line(f"--profile: the profiler of this backend wrote no trace into {self.folder}.")
            return
        self._write(traces[-1], arrays)
        self.screen.line(
            f"--profile: traced {_steps(self.first or 0, self.steps)}. The report will show where the time went. "
            f"Open {self.folder}/scopes.json.gz at https://ui.perfetto.dev, or pip install xprof and run xprof "
            f"--logdir={self.folder}."
        )

    def _write(self, trace: Path, arrays: Any) -> None:
        """Write the breakdown of a trace, and the trace under the names of scopes."""
        program = self.program.in_phase((self.first or 0) + self.steps - 1)
        text = program.train.lower(program.shapes, arrays).compile().as_text()
        own = breakdown.instructions(text)
        name = text.partition("HloModule ")[2].partition(",")[0]
        ops, spans = breakdown.events(jax.profiler.ProfileData.from_file(str(trace)), name)
        loops = [each for each, instruction in own.items() if instruction.opcode in breakdown.LOOPS]
        paths = [layer.path for layer in program.plan.layers if layer.slots]
        found = {"first": self.first, "steps": self.steps, "device": jax.devices()[0].device_kind}
        found |= {"devices": jax.local_device_count()}
        found |= breakdown.table(breakdown.shared(ops, spans, loops), own, paths, self.steps)
        replace(self.folder / "breakdown.json", json.dumps(found, indent=1))
        with gzip.open(self.folder / "scopes.json.gz", "wt") as file:
            json.dump(breakdown.timeline(ops, spans, own, paths), file)


def _steps(first: int, count: int) -> str:
    return f"step {first:,}" if count == 1 else f"steps {first:,} to {first + count - 1:,}"
