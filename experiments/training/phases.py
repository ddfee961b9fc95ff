"""Compiles the programs of a run: the first ones before training, and that of each later phase in the background."""

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp

from experiments.training.program import Program


class Phases:
    """The programs of a run, phase after phase.

    Args:
      program: The program of all steps.
      arrays: What the feed yields.
    """

    def __init__(self, program: Program, arrays: Any):
        self.whole, self.arrays = program, arrays
        self.next: Future | None = None

    def begin(self, step: int, measure: bool) -> tuple[Program, int | None]:
        """Compile what a run begins with, in parallel.

        Args:
          step: The first step.
          measure: Compile the measurement of sparsity too.

        Returns:
          The program, and the bytes of temporary memory of its step.
        """
        program, shapes = self.whole.in_phase(step), self.whole.shapes
        jobs: list[tuple[Any, tuple]] = [
            (program.train, (shapes, self.arrays)),
            (program.one.compiled_init, (jnp.uint32(0), program.pretrained)),
        ]
        if measure:
            jobs += [(program.measure, (shapes, self.arrays)), (program.masks, (shapes,))]
        with ThreadPoolExecutor() as pool:
            train, *_ = [job.result() for job in [pool.submit(_compiled, *job) for job in jobs]]
        self._prepare(step)
        return program, _memory(train)

    def change(self, step: int) -> tuple[Program, int | None]:
        """Return the same as `begin` for the phase that begins at a step, and start to compile the phase after it."""
        memory = None
        if self.next is not None and not self.next.exception():  # if it failed, the step compiles again and raises
            memory = _memory(self.next.result())
        self._prepare(step)
        return self.whole.in_phase(step), memory

    def _prepare(self, step: int) -> None:
        """Start to compile, in a thread, the training step of the first phase that begins after a step."""
        later = [start for start in self.whole.phases if start > step]
        if not later:
            return
        pool = ThreadPoolExecutor(1, "the next phase")
        self.next = pool.submit(_compiled, self.whole.in_phase(later[0]).train, (self.whole.shapes, self.arrays))
        pool.shutdown(wait=False)


def _memory(compiled: jax.stages.Compiled) -> int | None:
    """Return the bytes of temporary memory of a program; None if the platform does not report them."""
    memory = compiled.memory_analysis()
    return memory and memory.temp_size_in_bytes


def _compiled(function: Any, arguments: tuple) -> jax.stages.Compiled:
    return function.lower(*arguments).compile()
