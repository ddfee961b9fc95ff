"""The task of a config: what an experiment brings to the training loop. It may be somebody else's."""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from ml_collections import ConfigDict

from experiments.errors import Missing, Mistake, mistaken
from experiments.scale import shards
from experiments.training import settings
from nmjax.core import names

TASKS = {
    "image": "experiments.training.image:Task",
    "text": "experiments.training.text:Task",
    "finetune": "experiments.training.finetune:task",
}


class Task(Protocol):
    """A model, its data, its loss and its scores.

    A task is made from a run's config: `Task(config)`. The program and the loop read its attributes and call its
    methods. Examples are `experiments/training/image.py` and `experiments/training/text.py`.

    A task may also have these members: `pretrained`, values of parameters by path with which a run begins; `sizes`,
    what run.json records of the data; `data`, the arrays and texts that it reads, which a run that continues has to
    find unchanged; and `export(model, directory, which)`, which writes the hardened model and returns a sentence about
    it.

    Attributes:
      examples: Number of training examples in one epoch.
      unit: Name of what throughput counts, as "images" or "tokens".
      units: Number of these in one example.
      metric: Name of the score that decides which checkpoint is the best: "accuracy" (highest) or "loss" (lowest).
      validates: True if there is a validation split. It decides which checkpoint is the best, and the test split is
        scored at the end of a run. Without it the test split is used for both.
      streamed: True if the feed depends on the seed. Runs of several seeds then cannot share one feed.
      facts: Rows (label, text) that the header of a run shows.
      notes: Sentences that have to stand beside the numbers, as that the data are synthetic.
    """

    examples: int
    unit: str
    units: int
    metric: str
    validates: bool
    streamed: bool
    facts: list[tuple[str, str]]
    notes: list[str]

    def make(self, rngs: nnx.Rngs) -> nnx.Module:
        """Return a new dense model. The program makes it sparse."""
        ...

    def example(self, batch: int) -> tuple[Any, ...]:
        """Return the model's arguments for so many examples, as `jax.ShapeDtypeStruct`s."""
        ...

    def feed(self, seed: int, start: int, mesh: Mesh) -> Iterator[Any]:
        """Yield the arrays of every step from `start` on: the same resident arrays again and again, or new batches."""
        ...

    def batch(self, arrays: Any, seed: int | jax.Array, step: int | jax.Array, mesh: Mesh) -> Any:
        """Return the batch of a step, made of the feed's arrays. It is traced inside the compiled step."""
        ...

    def loss(self, model: nnx.Module, batch: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Return the mean loss of a batch, and other scalars to show beside it, by name."""
        ...

    def evaluation(self, split: str, mesh: Mesh) -> Iterable[Any]:
        """Yield the batches of a split, "validation" or "test"."""
        ...

    def score(self, model: nnx.Module, batch: Any) -> dict[str, jax.Array]:
        """Return sums over a batch of a split: "count" examples, "loss", and others by name. The scores are means."""
        ...

    def pictures(self, graph: nnx.GraphDef, state: Any, mesh: Mesh) -> dict[str, Any]:
        """Return arrays and texts that the report shows of the final model, which is given as nnx.split gives it."""
        ...


METHODS = tuple(name for name, member in vars(Task).items() if callable(member) and not name.startswith("_"))


def task(config: Any, plan: bool = False) -> Task:
    """Return the task that ``config.experiment`` names, made from the config.

    Args:
      config: The settings of a run. Its experiment is "image", "text", "finetune", or ``module:name`` of a class with
        the members of `experiments.training.tasks.Task`, as in ``mylab.tasks:Segmentation``. The class is called with
        the config.
      plan: Whether the task is only planned. Then its data may be missing, if their sizes are known.

    Returns:
      The task.

    Raises:
      Mistake: The name is not known, cannot be imported, or is not that of a task.
    """
    name = config.experiment
    own = not names.is_foreign(name)
    with mistaken(f"config.experiment={name!r}"):
        make = names.load(TASKS[settings.one_of(name, TASKS, "config.experiment")] if own else name)
    if own:
        made = make(config)
        if made.missing is not None and not plan:
            raise made.missing
        return made
    if not isinstance(make, type):
        raise Mistake(f"config.experiment={name!r} is a {type(make).__name__}, not a class with the members of Task.")
    _check(name, make, METHODS)
    made = make(config)
    _check(name, made, (*METHODS, *Task.__annotations__))
    return made


def _check(name: str, owner: Any, members: tuple[str, ...]) -> None:
    missing = [member for member in members if not hasattr(owner, member)]
    if missing:
        raise Mistake(
            f"config.experiment={name!r} is not a task: it has no {', '.join(missing)}. "
            "experiments/training/tasks.py says what a task has."
        )


class Resident:
    """What tasks share whose data lie on the devices, whole."""

    config: ConfigDict
    model: Any
    streamed = False
    missing: Missing | None = None  # the error if the data are missing

    @property
    def validates(self) -> bool:
        return self.config.data.get("validation", 0.0) > 0

    def make(self, rngs: nnx.Rngs) -> nnx.Module:
        return self.model(rngs=rngs)

    def arrays(self) -> Any:
        """Return the arrays from which every batch is made."""
        raise NotImplementedError

    def feed(self, seed: int, start: int, mesh: Mesh) -> Iterator[Any]:
        arrays = shards.placed(self.arrays(), shards.whole(mesh))
        while True:
            yield arrays


def filled(splits: dict[str, tuple], split: str, most: int, filler: Sequence[Any], mesh: Mesh) -> Iterator[Any]:
    """Yield the batches of a split. The last is filled up, so that the devices share it evenly.

    Args:
      splits: The arrays of every split. All splits have batches of one size, and so one program.
      split: The split.
      most: The number of examples in a batch, at most.
      filler: For each array the value that rows are filled up with.
      mesh: The devices.
    """
    arrays = splits[split]
    size = math.ceil(min(most, max(len(each[0]) for each in splits.values())) / mesh.size) * mesh.size
    spare = -len(arrays[0]) % size
    full = [
        np.concatenate([v, np.full((spare, *v.shape[1:]), value, v.dtype)])
        for v, value in zip(arrays, filler, strict=True)
    ]
    for i in range(0, len(full[0]), size):
        yield shards.placed(tuple(v[i : i + size] for v in full), shards.batch(mesh))
