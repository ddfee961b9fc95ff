"""The task of modelling text: its model, its windows of tokens, its loss in nats per token."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from ml_collections import ConfigDict

import nmjax as nm
from experiments.data import order, text, validation
from experiments.data.find import ABSENT
from experiments.errors import Missing
from experiments.scale import shards
from experiments.training import hardest, settings
from experiments.training.tasks import Resident, filled

MODELS = {"gpt": (nm.models.GPT, nm.models.gpt.SIZES), "moe": (nm.models.MoE, nm.models.moe.SIZES)}


class Task(Resident):
    """Predict the next token. The tokens lie on the device, and the compiled step cuts every batch out of them.

    `experiments.training.tasks.Task` says what each member is.
    """

    unit, metric = "tokens", "loss"

    def __init__(self, config: ConfigDict):
        self.config, c = config, config.data
        self.units, self.tokenizer = c.length, c.tokenizer
        try:
            self._load()
        except Missing as error:
            self._do_without(error)
        self.facts += [("note", note) for note in self.notes]
        self.model = settings.model(config, MODELS, **self.sizes["model"])

    def _load(self) -> None:
        c = self.config.data
        self.set = text.load(c.name, c.dir, c.test, self.tokenizer)
        self.train, held_out = validation.tokens(self.set.train, c.get("validation", 0.0))
        self.examples = text.windows(len(self.train), c.length)
        splits = {"validation": held_out, "test": self.set.test} if self.validates else {"test": self.set.test}
        self.windows = {name: self._cut(tokens, name) for name, tokens in splits.items()}
        self.notes = [self.set.note] if self.set.note else []
        others = ", ".join(f"{len(tokens):,} {name}" for name, tokens in splits.items())
        counts = f"{len(self.train):,} training tokens, {others}, of {self.set.vocabulary:,}"
        self.facts = [("data", f"{self.set.name}: {counts}; windows of {c.length}")]
        self.sizes = {"model": {"vocabulary": self.set.vocabulary, "length": c.length}}
        self.data = self.set.train, self.set.test

    def _do_without(self, missing: Missing) -> None:
        """Take the sizes that a plan needs from the config, or raise the error if it does not have them."""
        c = self.config.data
        vocabulary = self.config.model.get("vocabulary", 0) or (256 if c.tokenizer == "bytes" else 0)
        if not vocabulary or not self.config.steps:
            raise missing
        self.missing, self.examples, self.notes = missing, 0, [ABSENT]
        self.facts = [("data", f"{c.name}: tokens of {vocabulary:,}; windows of {c.length}")]
        self.sizes = {"model": {"vocabulary": vocabulary, "length": c.length}}

    def _cut(self, tokens: np.ndarray, split: str) -> np.ndarray:
        """Return the windows of a split on which the model is evaluated."""
        c = self.config.data
        return text.cut(tokens[: c.windows * c.length + 1] if c.windows else tokens, c.length, split)

    def example(self, batch: int) -> tuple:
        return (jax.ShapeDtypeStruct((batch, self.config.data.length), jnp.int32),)

    def arrays(self):
        return text.rows(self.train, self.config.data.length)

    def batch(self, rows, seed, step, mesh):
        positions = order.positions(seed, step, self.config.batch, self.examples)
        epoch, index = jax.lax.with_sharding_constraint(positions, shards.whole(mesh))
        return text.take(rows, epoch, index, seed)

    def loss(self, model, batch):
        inputs, targets = batch
        return optax.softmax_cross_entropy_with_integer_labels(model(inputs), targets).mean(), {}

    def evaluation(self, split, mesh):
        """Yield batches of windows, and which of them count."""
        splits = {name: (windows, np.ones(len(windows), bool)) for name, windows in self.windows.items()}
        return filled(splits, split, 64, (0, False), mesh)

    def score(self, model, batch) -> dict:
        windows, counts = batch
        windows = windows.astype(jnp.int32)
        loss = optax.softmax_cross_entropy_with_integer_labels(model(windows[:, :-1]), windows[:, 1:]).mean(-1)
        return {"count": jnp.sum(counts, dtype=jnp.float32), "loss": jnp.sum(jnp.where(counts, loss, 0))}

    def pictures(self, graph, state, mesh) -> dict:
        """Return texts that the model writes after the first words of the test split, and its hardest windows."""
        prompt = self.set.test[: min(32, self.config.data.length // 2)].astype(np.int32)
        draw = lambda state, key: nm.models.generate(
            nnx.merge(graph, state), jnp.asarray(prompt)[None], key, count=200, temperature=0.8
        )
        keys = jax.random.split(jax.random.key(0), 2)
        each = lambda state, keys: jax.lax.map(
            lambda key: draw(state, key), keys
        )  # vmap over the keys alone does not map the weights, and ragged_dot needs that
        drawn = jax.jit(each, out_shardings=shards.whole(mesh))(state, keys)

        def look(state, windows, counts):
            windows = windows.astype(jnp.int32)
            return hardest.of_windows(nnx.merge(graph, state)(windows[:, :-1]), windows, counts)

        look = jax.jit(look, out_shardings=shards.whole(mesh))
        return {
            "prompt": self.set.decode(prompt),
            "samples": [self.set.decode(np.asarray(d)[0, len(prompt) :]) for d in drawn],
            "hardest": hardest.windows(
                (look(state, *batch) for batch in self.evaluation("test", mesh)), self.set.decode
            ),
        }
