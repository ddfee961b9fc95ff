"""The task of modelling text: its model, its windows of tokens, its loss in nats per token."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from ml_collections import ConfigDict

import nmjax as nm
from experiments.data import order, text
from experiments.scale import shards
from experiments.training import settings

MODELS = {"gpt": (nm.models.GPT, nm.models.gpt.SIZES)}


class Task:
    """Predict the next token. The tokens lie on the device, and the compiled step cuts every batch out of them.

    `experiments.training.task.Task` says what each member is.
    """

    unit, metric, streamed = "tokens", "loss", False

    def __init__(self, config: ConfigDict):
        self.config, c = config, config.data
        self.units = c.length
        self.set = text.load(c.name, c.dir, c.valid, c.tokenizer)
        self.examples = text.windows(len(self.set.train), c.length)
        self.tests_cut = text.cut(self.set.valid[: c.tests * c.length + 1] if c.tests else self.set.valid, c.length)
        self.notes = [self.set.note] if self.set.note else []
        counts = (
            f"{len(self.set.train):,} training tokens, {len(self.set.valid):,} to validate, of {self.set.vocabulary:,}"
        )
        self.facts = [("data", f"{self.set.name}: {counts}; windows of {c.length}")]
        self.facts += [("note", note) for note in self.notes]
        self.sizes = {"model": {"vocabulary": self.set.vocabulary, "length": c.length}}
        self.model = settings.model(config, MODELS, **self.sizes["model"])

    def make(self, rngs: nnx.Rngs) -> nnx.Module:
        return self.model(rngs=rngs)

    def example(self, batch: int) -> tuple:
        return (jax.ShapeDtypeStruct((batch, self.config.data.length), jnp.int32),)

    def feed(self, seed: int, start: int, mesh):
        rows = shards.placed(text.rows(self.set.train, self.config.data.length), shards.whole(mesh))
        while True:
            yield rows

    def batch(self, rows, seed, step, mesh):
        positions = order.positions(seed, step, self.config.batch, self.examples)
        epoch, index = jax.lax.with_sharding_constraint(positions, shards.whole(mesh))
        return text.take(rows, epoch, index, seed)

    def loss(self, model, batch):
        inputs, targets = batch
        return optax.softmax_cross_entropy_with_integer_labels(model(inputs), targets).mean(), {}

    def tests(self, mesh):
        """Yield batches of windows, and which of them count. The last is filled up, so that devices share it evenly."""
        windows = self.tests_cut
        size = -(-min(64, len(windows)) // mesh.size) * mesh.size
        spare = -len(windows) % size
        windows = np.concatenate([windows, np.zeros((spare, windows.shape[1]), windows.dtype)])
        counts = np.arange(len(windows)) < len(self.tests_cut)
        split = shards.batch(mesh)
        for i in range(0, len(windows), size):
            yield shards.placed((windows[i : i + size], counts[i : i + size]), split)

    def score(self, model, batch) -> dict:
        windows, counts = batch
        windows = windows.astype(jnp.int32)
        loss = optax.softmax_cross_entropy_with_integer_labels(model(windows[:, :-1]), windows[:, 1:]).mean(-1)
        return {"count": jnp.sum(counts, dtype=jnp.float32), "loss": jnp.sum(jnp.where(counts, loss, 0))}

    def pictures(self, graph, state, mesh) -> dict:
        """Return texts that the model writes after the first words of the validation split."""
        prompt = self.set.valid[: min(32, self.config.data.length // 2)].astype(np.int32)
        draw = lambda state, key: nm.models.generate(
            nnx.merge(graph, state), jnp.asarray(prompt)[None], key, count=200, temperature=0.8
        )
        keys = jax.random.split(jax.random.key(0), 2)
        drawn = jax.jit(jax.vmap(draw, in_axes=(None, 0)), out_shardings=shards.whole(mesh))(state, keys)
        return {
            "prompt": self.set.decode(prompt),
            "samples": [self.set.decode(np.asarray(d)[0, len(prompt) :]) for d in drawn],
        }
