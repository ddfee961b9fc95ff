"""The time of a step of every config of a study. All configs are timed in turn.

    python -m experiments.studies times

The runs of a study are made at different times, on a machine that may do other work, so their times cannot be
compared. Here all configs of a study take steps in turn in one process. The steps are at five places of the run,
because methods have phases. Let the machine do nothing else.
"""

import time
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from experiments import members
from experiments.studies import STUDIES, Design, named
from experiments.training import tasks
from experiments.training.program import Program

PLACES = (0.1, 0.3, 0.5, 0.7, 0.9)  # of the run
STEPS, ROUNDS = 8, 5  # steps at each place in each round: over all rounds 40 in a row, as many as FST holds a mask
CASES = [{"study": name} for name in STUDIES]


def config(study: str) -> ConfigDict:
    """Return what the times of a study depend on: its config and what it changes."""
    design = _design(study)
    recorded = "arms"  # the name when the times were measured: it is part of their digests
    return ConfigDict({"base": design.config.to_dict(), recorded: str(design.groups)})


def run(study: str) -> tuple[dict[str, list], list[str]]:
    """Return the seconds of a step of each config of a study, round by round, and the notes on its data."""
    design = _design(study)
    return measured(design.config, design.groups), []


def _design(study: str) -> Design:
    module, variant = named(study)
    return module.design(variant)


def measured(base: ConfigDict, groups: Mapping[str, dict[str, Any]]) -> dict[str, list[float]]:
    """Return the mean seconds of a step of each config, round by round.

    Args:
      base: The config of the study.
      groups: What each config changes, by its name.
    """
    known = {}
    for name, changes in groups.items():
        (member,) = members.listed(base, [changes | {"seed": 0}])
        known[name] = _Timed(member.config)
    rounds = [{name: group.take(number) for name, group in known.items()} for number in range(ROUNDS)]
    return {name: [float(f"{each[name]:.5g}") for each in rounds] for name in known}


class _Timed:
    """A config that takes steps.

    Args:
      config: Its config.
    """

    def __init__(self, config: ConfigDict):
        self.program = Program(config, tasks.task(config))
        self.state = self.program.init(jnp.uint32(0))
        self.arrays = next(iter(self.program.task.feed(0, 0, self.program.mesh)))
        for place in PLACES:
            self._steps(place, 0, 2)  # compiles for both kinds of `step`: set by `_steps`, and returned by `train`

    def take(self, number: int) -> float:
        """Return the mean seconds of a step in a round."""
        return float(np.mean([self._steps(place, number, STEPS) for place in PLACES]))

    def _steps(self, place: float, number: int, count: int) -> float:
        """Take steps at a place of the run, and return the mean seconds of one."""
        whole = STEPS * ROUNDS
        first = int(place * self.program.total) // whole * whole + number * STEPS
        train, self.state = self.program.in_phase(first).train, self.state._replace(step=jnp.int32(first))
        start = time.perf_counter()
        for _ in range(count):
            self.state, shown = train(self.state, self.arrays)
        jax.block_until_ready((self.state, shown))
        return (time.perf_counter() - start) / count


def shares(seconds: Mapping[str, list[float]]) -> dict[str, float]:
    """Return the time of a step as a share of dense: the median of the rounds' ratios, without the first round.

    The first round does not count, because a step may be compiled in it.

    Args:
      seconds: What `measured` returns. One of the configs is dense.

    >>> shares({"dense": [9.0, 1.0, 2.0, 4.0], "STE": [8.0, 1.5, 2.0, 2.0]})
    {'dense': 1.0, 'STE': 1.0}
    """
    ratios = {name: np.array(values) / np.array(seconds["dense"]) for name, values in seconds.items()}
    return {name: float(np.median(each[1:])) for name, each in ratios.items()}
