"""The task of classifying images: its model, its data, its loss and scores."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from ml_collections import ConfigDict

import nmjax as nm
from experiments.data import augment, folder, images, order, validation
from experiments.data.find import ABSENT
from experiments.errors import Missing, Mistake
from experiments.scale import shards
from experiments.training import hardest, settings
from experiments.training.tasks import Resident, filled

MODELS = {"vit": (nm.models.ViT, nm.models.vit.SIZES), "resnet": (nm.models.ResNet, nm.models.resnet.SIZES)}


def moments(images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean and the standard deviation of every channel of uint8 images, as shares of 255.

    They are exact, because the values are counted. A channel in which all values are the same gets the
    deviation 1, because images are divided by it.
    """
    counts = np.stack([np.bincount(images[..., c].ravel(), minlength=256) for c in range(images.shape[-1])])
    shares, values = counts / counts.sum(1, keepdims=True), np.arange(256) / 255
    mean = shares @ values
    deviation = np.sqrt(np.maximum(shares @ values**2 - mean**2, 0))
    return np.float32(mean), np.float32(np.where((shares == 1).any(1), 1, deviation))


class Task(Resident):
    """Classify images. Small sets lie on the device, and the compiled step gathers and augments every batch.

    Folders are streamed. `experiments.training.tasks.Task` says what each member is.
    """

    unit, units, metric = "images", 1, "accuracy"

    def __init__(self, config: ConfigDict):
        self.config, c = config, config.data
        for name, fits in {"crop": c.crop >= 0, "mixup": c.mixup >= 0, "smoothing": 0 <= c.smoothing < 1}.items():
            if not fits:
                raise Mistake(f"config.data.{name}={c[name]} is out of range: at least 0, and smoothing below 1.")
        self.notes: list[str] = []
        self.streamed, self.skipped = c.name == "folder", None
        if self.streamed and "skip" not in c:
            raise Mistake(
                "config.data.name='folder' needs settings that this config does not have. Use the variant of a config "
                "file: --config=configs/vit_24.py:folder --config.data.dir=DIR."
            )
        if self.streamed:
            self._open_folder()
        else:
            self._load_set()
        fixed = {"image": self.shape[0], "channels": self.shape[-1], "classes": self.classes}
        self.model = settings.model(config, MODELS, **fixed)
        if self.missing is None:
            self.data = self.set.train, self.set.test
        self.sizes = {"model": fixed, "mean": self.mean.tolist(), "std": self.std.tolist()}

    def _load_set(self) -> None:
        c = self.config.data
        try:
            self.set = images.load(c.name, c.dir)
        except Missing as error:
            self.set, self.missing = images.stand_in(c.name, error), error
            self.notes.append(ABSENT)
        parts = [
            tuple(v[i] for v in self.set.train)
            for i in validation.positions(self.set.train[1], c.get("validation", 0.0))
        ]
        (x, y), self.splits = parts[0], {"validation": parts[1], "test": self.set.test}
        self.train = x, y
        self.classes, self.examples, self.shape = len(self.set.classes), len(x), x.shape[1:]
        self._refuse_other_shapes()
        self.mean, self.std = moments(x if self.missing is None else x[:1])
        if self.set.note:
            self.notes.append(self.set.note)
        self.notes += validation.note(len(self.splits["validation"][1]))
        held_out = ", ".join(f"{len(labels):,} {name}" for name, (_, labels) in self.splits.items() if len(labels))
        counts = f"{len(x):,} training images, {held_out}; {self.classes} classes"
        self.facts = [("data", f"{self.set.name}: {counts}, {' x '.join(map(str, self.shape))}")]
        self.facts += [("note", note) for note in self.notes]

    def _refuse_other_shapes(self) -> None:
        """Refuse images that are not square for a ViT. Other models may take them, as a ResNet does."""
        height, width, _ = self.shape
        if height != width and self.config.model.name == "vit":
            raise Mistake(
                f"config.data.name={self.config.data.name!r} holds images of {height} x {width} pixels, and a ViT "
                f"takes square images. Pad, crop or resize them, or train a ResNet, as in configs/resnet_24.py."
            )

    def _open_folder(self) -> None:
        c = self.config.data
        self.skipped = folder.Skipped() if c.skip else None
        try:
            self.set = folder.open(c.dir)
        except Missing as error:
            if not c.examples or not c.classes:
                raise
            self.set, self.missing = None, error
        self.examples, self.classes = self._counts()
        labels = np.zeros(self.examples) if self.set is None else self.set.train[1]
        kept, chosen = validation.positions(labels, c.get("validation", 0.0))
        if self.set is not None:
            files = np.array(self.set.train[0])
            self.splits = {"train": (files[kept].tolist(), labels[kept])}
            self.splits["validation"] = files[chosen].tolist(), labels[chosen]
            self.splits["test"] = self.set.test
        self.examples = len(kept)
        self.shape = (c.size, c.size, 3)
        self.mean, self.std = np.float32([0.485, 0.456, 0.406]), np.float32([0.229, 0.224, 0.225])  # ImageNet's
        counts = f"{len(kept):,} training images, {len(chosen):,} validation; {self.classes:,} classes"
        note = ABSENT if self.set is None else self.set.note
        self.notes += ([note] if note else []) + validation.note(len(chosen))
        self.facts = [("data", f"the folder {c.dir or 'DIR'}: {counts}"), *(("note", note) for note in self.notes)]

    def example(self, batch: int) -> tuple:
        return (jax.ShapeDtypeStruct((batch, *self.shape), jnp.float32),)

    # ---- training ----

    def arrays(self):
        return self.train

    def feed(self, seed: int, start: int, mesh):
        return self._stream("train", mesh, seed, start) if self.streamed else super().feed(seed, start, mesh)

    def _stream(self, split: str, mesh, seed: int = 0, start: int = 0):
        """Yield the batches of a split of a folder."""
        c, (files, labels) = self.config, self.splits[split]
        more = {"train": split == "train", "rows": shards.rows(mesh, c.batch), "skipped": self.skipped}
        for batch in folder.stream(files, labels, seed, c.batch, c.data.size, start, **more):
            yield shards.gathered((batch["image"], batch["label"]), mesh, c.batch)

    def batch(self, arrays, seed, step, mesh):
        c = self.config.data
        x, y = arrays
        if not self.streamed:
            _, index = order.positions(seed, step, self.config.batch, self.examples)
            # every device draws all of the order, because drawing it in parts costs messages between devices
            index = jax.lax.with_sharding_constraint(index, shards.whole(mesh))
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

    # ---- evaluation ----

    def evaluation(self, split, mesh):
        """Yield batches of images and labels. Fillers have label -1."""
        return self._stream(split, mesh) if self.streamed else filled(self.splits, split, 1024, (0, -1), mesh)

    def score(self, model, batch) -> dict:
        x, y = batch
        return hardest.sums(model(augment.normalise(x, self.mean, self.std)), y)

    def pictures(self, graph, state, mesh) -> dict:
        """Return the model's errors on the test split, and some test images with its predictions."""

        def look(state, x, y):
            logits = nnx.merge(graph, state)(augment.normalise(x, self.mean, self.std))
            return hardest.of_labels(logits, y, {"images": x}, hardest.IMAGES)

        look = jax.jit(look, out_shardings=shards.whole(mesh))
        looks = (look(state, *batch) for batch in self.evaluation("test", mesh))
        every, errors = hardest.errors(looks, self.classes, hardest.IMAGES)
        errors = {name if name == "confusion" else f"hardest_{name}": value for name, value in errors.items()}
        errors["classes"] = np.array(self.set.classes)
        if self.streamed or not every:
            return errors
        some = slice(None, None, max(1, len(self.set.test[0]) // 24))
        del every["loss"]
        shown = {"samples": self.set.test[0], **every}
        return errors | {name: value[some][:24] for name, value in shown.items()}

    def _counts(self) -> tuple[int, int]:
        """Return the numbers of training images and classes. If the config states them, refuse other numbers."""
        c = self.config.data
        if self.set is None:
            return c.examples, c.classes
        sizes = {"examples": len(self.set.train[1]), "classes": len(self.set.classes)}
        for name, size in sizes.items():
            if c[name] and size != c[name]:
                raise Mistake(
                    f"{c.dir} holds {size:,} {name}, and config.data.{name}={c[name]:,}. "
                    f"Write --config.data.{name}={size}."
                )
        return sizes["examples"], sizes["classes"]
