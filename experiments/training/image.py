"""Image classification: its model, its data on the device, its loss and scores."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import nmjax as nm
from experiments.data import augment, folder, images, order
from experiments.errors import Mistake
from experiments.scale import shards
from experiments.training import settings

MODELS = {"vit": (nm.models.ViT, nm.models.vit.SIZES), "resnet": (nm.models.ResNet, nm.models.resnet.SIZES)}


def moments(images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of every channel of uint8 images, as shares of 255; exact, by counting values."""
    counts = np.stack([np.bincount(images[..., c].ravel(), minlength=256) for c in range(images.shape[-1])])
    shares, values = counts / counts.sum(1, keepdims=True), np.arange(256) / 255
    mean = shares @ values
    return np.float32(mean), np.float32(np.sqrt(shares @ values**2 - mean**2))


class Task:
    """Small sets lie on the device and every batch is gathered and augmented inside the compiled step; folders are streamed."""

    unit, units, metric = "images", 1, "accuracy"

    def __init__(self, config):
        self.config, c = config, config.data
        for name, good in {"crop": c.crop >= 0, "mixup": c.mixup >= 0, "smoothing": 0 <= c.smoothing < 1}.items():
            if not good:
                raise Mistake(f"config.data.{name}={c[name]} is out of range: at least 0, and smoothing below 1.")
        self.notes, self.streamed = [], c.name == "folder"
        self.skipped = folder.Skipped() if self.streamed and c.skip else None
        if self.streamed:
            self.files = folder.open(c.dir) if c.dir or not c.examples else None  # None: sizes alone, for a plan
            self.examples, self.classes = self._counts()
            self.shape = (c.size, c.size, 3)
            self.mean, self.std = np.float32([0.485, 0.456, 0.406]), np.float32([0.229, 0.224, 0.225])  # ImageNet's
            text = f"the folder {c.dir}: {self.examples:,} training images, {self.classes:,} classes"
            self.facts = [("data", text)]
            return
        self.set = images.load(c.name, c.dir)
        x, tests = self.set.train[0], self.set.test[0]
        self.classes, self.examples, self.shape = len(self.set.classes), len(x), x.shape[1:]
        self.mean, self.std = moments(x)
        self.notes += [self.set.note] * bool(self.set.note)
        counts = f"{len(x):,} training images, {len(tests):,} to test, {self.classes} classes"
        self.facts = [("data", f"{self.set.name}: {counts}, {' x '.join(map(str, self.shape))}")]
        self.facts += [("note", note) for note in self.notes]

    def make(self, rngs: nnx.Rngs) -> nnx.Module:
        fixed = {"channels": self.shape[-1], "classes": self.classes}
        fixed |= {"image": self.shape[0]} if self.config.model.name == "vit" else {}
        return settings.model(self.config, MODELS, rngs, **fixed)

    def example(self, batch: int) -> tuple:
        return (jax.ShapeDtypeStruct((batch, *self.shape), jnp.float32),)

    # ---- training ----

    def feed(self, seed: int, start: int, mesh):
        if not self.streamed:
            arrays = shards.placed(tuple(self.set.train), shards.whole(mesh))
            while True:
                yield arrays
        c, found = self.config, self._there()
        mine, size = shards.rows(mesh, c.batch), c.data.size
        files, labels = found.train, found.train_labels
        for batch in folder.stream(files, labels, seed, c.batch, size, start, rows=mine, skipped=self.skipped):
            yield shards.gathered((batch["image"], batch["label"]), mesh, c.batch)

    def batch(self, arrays, seed, step, mesh):
        c = self.config.data
        x, y = arrays
        if not self.streamed:
            _, index = order.positions(seed, step, self.config.batch, self.examples)
            index = jax.lax.with_sharding_constraint(
                index, shards.whole(mesh)
            )  # or they would ask each other as they draw
            x, y = x[index], y[index]
        keys = jax.random.split(jax.random.fold_in(jax.random.key(seed), step), 3)
        if c.crop:
            x = augment.crop(keys[0], x, c.crop)
        if c.flip:
            x = augment.flip(keys[1], x)
        x = augment.normalise(x, self.mean, self.std)
        return augment.mixup(keys[2], x, augment.one_hot(y, self.classes, c.smoothing), c.mixup)

    def loss(self, model, batch):
        x, target = batch
        logits = model(x)
        right = jnp.argmax(logits, -1) == jnp.argmax(target, -1)
        return optax.softmax_cross_entropy(logits, target).mean(), {"accuracy": jnp.mean(right, dtype=jnp.float32)}

    # ---- the test split ----

    def tests(self, mesh):
        """Batches of normalised images and labels, -1 where there is none: whole ones, for devices share them evenly."""
        if self.streamed:
            c, found = self.config, self._there()
            mine, size = shards.rows(mesh, c.batch), c.data.size
            files, labels = found.val, found.val_labels
            stream = folder.stream(files, labels, 0, c.batch, size, train=False, rows=mine, skipped=self.skipped)
            return (shards.gathered((batch["image"], batch["label"]), mesh, c.batch) for batch in stream)
        x, y = self.set.test
        size = math.ceil(min(1024, len(x)) / mesh.size) * mesh.size
        spare = -len(x) % size
        x = np.concatenate([x, np.zeros((spare, *x.shape[1:]), x.dtype)])
        y = np.concatenate([y, np.full(spare, -1, y.dtype)])
        parts = ((x[i : i + size], y[i : i + size]) for i in range(0, len(x), size))
        return (shards.placed(part, shards.batch(mesh)) for part in parts)

    def score(self, model, batch) -> dict:
        x, y = batch
        logits, there = model(augment.normalise(x, self.mean, self.std)), y >= 0
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(y, 0))
        right = jnp.argmax(logits, -1) == y
        sums = {"count": there, "loss": jnp.where(there, loss, 0), "accuracy": there & right}
        return {name: jnp.sum(value, dtype=jnp.float32) for name, value in sums.items()}

    def pictures(self, graph, state, mesh) -> dict:
        """Test images with what the model takes them for."""
        if self.streamed:
            return {}
        x, y = (v[:: max(1, len(v) // 24)][:24] for v in self.set.test)
        predict = jax.jit(
            lambda state, x: jax.nn.softmax(nnx.merge(graph, state)(augment.normalise(x, self.mean, self.std))),
            out_shardings=shards.whole(mesh),
        )
        shares = np.asarray(predict(state, x))
        found = {"predictions": shares.argmax(-1), "confidence": shares.max(-1), "classes": np.array(self.set.classes)}
        return {"samples": x, "labels": y, **found}

    def _counts(self) -> tuple[int, int]:
        """Images and classes of the folder, which are those that the page says, if it says any."""
        c = self.config.data
        if self.files is None:
            return c.examples, c.classes
        sizes = {"examples": len(self.files.train), "classes": len(self.files.classes)}
        for name, size in sizes.items():
            if c[name] and size != c[name]:
                raise Mistake(
                    f"{c.dir} holds {size:,} {name}, and config.data.{name}={c[name]:,}. Write --config.data.{name}={size}."
                )
        return sizes["examples"], sizes["classes"]

    def _there(self) -> folder.Folder:
        if self.files is None:
            raise Mistake(
                "config.data.name='folder' wants --config.data.dir=DIR, which holds train/CLASS/*.jpg and val/CLASS/*.jpg."
            )
        return self.files
