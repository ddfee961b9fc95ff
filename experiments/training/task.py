"""The task protocol: what an experiment brings to the training loop."""

from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import jax
from flax import nnx
from jax.sharding import Mesh


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
