"""The task of fine-tuning a checkpoint: on texts with labels, or as a language model."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from ml_collections import ConfigDict

from experiments.data import labelled, order, text, validation
from experiments.errors import Mistake, mistaken
from experiments.files import replace
from experiments.scale import shards
from experiments.training import hardest, pretrained, settings, text as language
from experiments.training.pretrained import Teacher
from experiments.training.tasks import Resident, filled
from nmjax import checkpoints
from nmjax.core import names
from nmjax.oneshot import texts

OBJECTIVES = ("classify", "language")
TEXTS = 8  # how many of the hardest are shown


def task(config: ConfigDict) -> "Classify | Language":
    """Return the task of ``config.objective``."""
    known = settings.one_of(config.objective, OBJECTIVES, "config.objective")
    return Classify(config) if known == "classify" else Language(config)


class _Finetune(Resident):
    """The common part of both tasks: the checkpoint, the teacher, and the file that is written at the end."""

    config: ConfigDict
    facts: list[tuple[str, str]]
    set: Any

    def _begin(self, classes: int | None) -> None:
        """Read the checkpoint and the teacher."""
        config = self.config
        rate = config.model.get("dropout", 0.0)
        if not 0 <= rate < 1:
            raise Mistake(f"config.model.dropout={rate} is not a rate from 0 to less than 1.")
        self.model, self.pretrained = pretrained.start(config, classes)
        told = f"{config.weights}: {sum(v.size for v in self.pretrained.values()):,} values"
        shares = [np.count_nonzero(v) / v.size for v in self.pretrained.values() if v.ndim > 1]
        sparse = [share for share in shares if share < 0.9]
        if sparse:
            told += f"; of {len(sparse)} sparse matrices {np.mean(sparse):.2f} are not zero"
        self.facts.append(("weights", told))
        self.teacher = Teacher(config, self._run) if config.teacher.weights else None
        if self.teacher is None:
            return
        c, wants_hidden = config.teacher, self.teacher.wants_hidden
        self.teacher.check_task(self.set.classes if classes else (), Path(config.weights).expanduser())
        with mistaken("the model"):
            model = nnx.eval_shape(lambda: self.make(nnx.Rngs(0)))
            if wants_hidden and not hasattr(model, "hidden"):
                raise Mistake(
                    f"config.teacher.hidden={c.hidden:g}: {config.model.name} has no methods hidden and logits. Write "
                    "them, or --config.teacher.hidden=0."
                )
            batch = self._shapes(config.batch)
            hidden, logits = nnx.eval_shape(lambda m, b: self._run(m, b, None, wants_hidden), model, batch)
        with mistaken(f"config.teacher.weights={c.weights!r}"):
            self.teacher.check(logits, hidden, batch)
        self.facts.append(
            ("teacher", f"{c.weights}: logits {c.logits:g} of the loss, temperature {c.temperature:g}, hidden states "
             f"{c.hidden:g}; its forward pass is not counted in the FLOPs")
        )  # fmt: skip

    def _keys(self, seed: Any, step: Any) -> jax.Array:
        """Return the keys of dropout of a batch."""
        key = jax.random.fold_in(jax.random.key(seed), step)
        return jax.random.split(jax.random.fold_in(key, 0x64726F70), self.config.batch)

    def _with_teacher(self, state: Any, batch: dict) -> dict:
        return batch if self.teacher is None else batch | self.teacher.outputs(state, batch)

    def arrays(self):
        return self._rows(), () if self.teacher is None else self.teacher.state

    def loss(self, model: Any, batch: dict) -> tuple[jax.Array, dict]:
        teacher = self.teacher
        key = batch["key"][0] if self.drops else None
        hidden, logits = self._run(model, batch, key, teacher is not None and teacher.wants_hidden)
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()
        shown = {} if logits.ndim > 2 else {"accuracy": _right(logits, batch["labels"]).mean()}
        if teacher is None:
            return loss, shown
        total, parts = teacher.loss(loss, logits, hidden, batch, batch.get("mask"))
        return total, shown | parts

    @property
    def drops(self) -> bool:
        """True if the model has dropout."""
        return self.config.model.get("dropout", 0.0) > 0

    def export(self, model: nnx.Module, directory: Path, which: str) -> str:
        """Write a model as a checkpoint of the form of ``config.weights``. Return a sentence about it.

        Args:
          model: The hardened model.
          directory: The folder to write.
          which: The step of the model, in words.
        """
        if self.config.model.name:
            return (
                "the model has a head of its own, so it is not written as a checkpoint; experiments.load.load_run(DIR) "
                "returns it"
            )
        # The folder may have the files of this run already, if it was killed before its last word.
        checkpoints.save(directory, model, like=self.config.weights, overwrite=True)
        return f"the hardened model of {which}: {directory}"


def _right(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return (jnp.argmax(logits, -1) == labels).astype(jnp.float32)


class Classify(_Finetune):
    """Classify texts. Their tokens are on the device, and the compiled step gathers every batch.

    `experiments.training.tasks.Task` says what each member is.
    """

    unit, units, metric = "texts", 1, "accuracy"

    def __init__(self, config: ConfigDict):
        self.config, c = config, config.data
        path = pretrained.folder(config.weights, "config.weights")
        self.set = labelled.load(c.name, c.dir, c.test)
        words = labelled.tokenizer(path)
        model = _model(path)
        longest = min(c.length, getattr(model, "length", c.length))
        special = words.num_special_tokens_to_add(False)
        if longest <= special:
            raise Mistake(f"config.data.length={c.length} leaves no place for a text beside {special} special tokens.")
        labels = np.array([one.label for one in self.set.train])
        kept, held_out = validation.positions(labels, c.validation)
        parts = {"train": [self.set.train[i] for i in kept], "test": self.set.test}
        parts["validation"] = [self.set.train[i] for i in held_out]
        encoded = {name: labelled.encode(words, examples, longest) for name, examples in parts.items()}
        self.length = max(one.tokens.shape[1] for one in encoded.values())
        self.splits = {name: _widened(one, self.length) for name, one in encoded.items()}
        _check_tokens(self.splits, model, path)
        self.examples, self.notes = len(kept), [self.set.note] if self.set.note else []
        cut = sum(int((one.size == longest).sum()) for one in encoded.values())
        if cut and longest == self.length:
            self.notes.append(
                f"{cut:,} texts have at least {longest} tokens, and longer ones are cut (config.data.length)"
            )
        counts = f"{len(kept):,} training texts, {len(held_out):,} validation, {len(self.set.test):,} test"
        shown = ", ".join(self.set.classes[:4]) + (", ..." if len(self.set.classes) > 4 else "")
        self.facts = [("data", f"{self.set.name}: {counts}; {len(self.set.classes)} classes ({shown})")]
        self.facts += [("note", note) for note in self.notes]
        self.sizes = {"classes": list(self.set.classes), "length": self.length}
        self.data = self.set.train, self.set.test
        self._begin(len(self.set.classes))

    def example(self, batch: int) -> tuple:
        tokens = jax.ShapeDtypeStruct((batch, self.length), jnp.int32)
        return tokens, jax.ShapeDtypeStruct(tokens.shape, bool), tokens

    def _rows(self) -> tuple:
        """Return the training texts as arrays, from which batches are gathered."""
        return tuple(self.splits["train"])

    def batch(self, arrays, seed, step, mesh):
        rows, teacher = arrays
        _, index = order.positions(seed, step, self.config.batch, self.examples)
        index = jax.lax.with_sharding_constraint(index, shards.whole(mesh))
        batch = _batch(*(v[index] for v in rows)) | {"key": self._keys(seed, step)}
        return self._with_teacher(teacher, batch)

    def _shapes(self, size: int) -> dict:
        rows = [jax.ShapeDtypeStruct((size, *v.shape[1:]), v.dtype) for v in self.splits["train"]]
        return jax.eval_shape(_batch, *rows)

    def _run(self, model: Any, batch: dict, key: jax.Array | None, hidden: bool) -> tuple[jax.Array | None, jax.Array]:
        """Return the hidden states if they are asked for, else None; and the logits."""
        inputs, keys = (batch["tokens"], batch["mask"], batch["types"]), (None, None)
        if key is not None:
            keys = jax.random.split(key)
        if not hidden:
            return None, model(*inputs, **({} if key is None else {"key": key}))
        states = model.hidden(*inputs, key=keys[0])
        return states, model.logits(states[-1], keys[1], batch["mask"])

    def evaluation(self, split, mesh):
        """Yield batches of tokens and labels. Fillers have label -1."""
        splits = {name: tuple(rows) for name, rows in self.splits.items() if name != "train"}
        return filled(splits, split, 128, (0, 0, 0, -1), mesh)

    def score(self, model, batch) -> dict:
        batch = _batch(*batch)
        return hardest.sums(self._run(model, batch, None, hidden=False)[1], batch["labels"])

    def pictures(self, graph, state, mesh) -> dict:
        """Return the confusion of the test texts, and those with the greatest loss."""

        def look(state, batch):
            batch = _batch(*batch)
            logits = self._run(nnx.merge(graph, state), batch, None, hidden=False)[1]
            return hardest.of_labels(logits, batch["labels"], {}, TEXTS)

        look, classes = jax.jit(look, out_shardings=shards.whole(mesh)), self.set.classes
        looks = (look(state, batch) for batch in self.evaluation("test", mesh))
        every, found = hardest.errors(looks, len(classes), TEXTS)
        shown = []
        for i in np.argsort(-every["loss"])[:TEXTS]:
            one, taken = self.set.test[i], classes[every["predictions"][i]]
            pieces = [f"[{taken} {every['confidence'][i]:.0%}, it is {classes[one.label]}] ", one.text]
            pieces += [] if one.text_b is None else [f" / {one.text_b}"]
            shown.append({"loss": float(every["loss"][i]), "pieces": [(piece, None) for piece in pieces]})
        return {"confusion": found["confusion"], "classes": np.array(classes), "hardest": shown}

    def export(self, model: nnx.Module, directory: Path, which: str) -> str:
        told = super().export(model, directory, which)
        file = directory / "config.json"
        if file.is_file():
            named = {str(i): name for i, name in enumerate(self.set.classes)}
            labels = {"id2label": named, "label2id": {v: int(k) for k, v in named.items()}}
            replace(file, json.dumps(json.loads(file.read_text()) | labels, indent=2) + "\n")
        return told


def _batch(tokens: jax.Array, second: jax.Array, size: jax.Array, labels: jax.Array) -> dict:
    """Return the inputs of a model: tokens, which of them count, which text each belongs to, and the labels."""
    places = jnp.arange(tokens.shape[1])[None]
    mask = places < size[:, None]
    types = ((places >= second[:, None]) & mask).astype(jnp.int32)
    return {"tokens": tokens, "mask": mask, "types": types, "labels": labels}


def _widened(rows: labelled.Tokens, length: int) -> labelled.Tokens:
    """Return tokens in longer arrays."""
    spare = length - rows.tokens.shape[1]
    second = np.where(rows.second >= rows.tokens.shape[1], length, rows.second)
    return rows._replace(tokens=np.pad(rows.tokens, ((0, 0), (0, spare))), second=second.astype(np.int32))


def _model(path: Path) -> Any:
    """Return the model of a checkpoint, with shapes in place of values."""
    with mistaken("config.weights"):
        return nnx.eval_shape(lambda: checkpoints.architecture(path)(rngs=nnx.Rngs(0)))


def _check_tokens(splits: dict[str, labelled.Tokens], model: Any, path: Path) -> None:
    """Refuse a tokenizer with more tokens than the model has."""
    if not hasattr(model, "tokens"):
        return
    count, file = model.tokens.num_embeddings, path / "tokenizer.json"
    with mistaken("config.weights"):
        texts.check_size(labelled.tokenizer(path), count, file)
    greatest = max(int(one.tokens.max(initial=0)) for one in splits.values())
    if greatest >= count:
        raise Mistake(
            f"{file} gives the token {greatest:,}, but the model has {count:,}. The tokenizer is that of another model."
        )


class Language(_Finetune, language.Task):
    """Predict the next token, with the checkpoint's own tokenizer, or of tokens that a function returns."""

    def __init__(self, config: ConfigDict):
        path = pretrained.folder(config.weights, "config.weights")
        foreign = names.is_foreign(config.data.name)  # it returns tokens
        self.tokenizer = "bytes" if foreign else str((path / "tokenizer.json").absolute())
        self.config, self.units = config, config.data.length
        self._load()
        self.facts += [("note", note) for note in self.notes]
        model = _model(path)
        vocabulary, length = model.tokens.num_embeddings, model.length
        if self.set.vocabulary > vocabulary:
            raise Mistake(
                f"config.weights={config.weights!r}: {config.data.name if foreign else 'tokenizer.json'} has "
                f"{self.set.vocabulary:,} tokens, but the model has {vocabulary:,}. Use the tokenizer of the model."
            )
        if config.data.length > length:
            raise Mistake(
                f"config.data.length={config.data.length:,} is longer than the windows of "
                f"config.weights={config.weights!r}, at most {length:,}. Write a smaller config.data.length."
            )
        self.sizes = {"vocabulary": vocabulary}
        self._begin(None)

    def _rows(self) -> np.ndarray:
        """Return the training text as an array, from which batches are gathered."""
        return text.rows(self.train, self.config.data.length)

    def batch(self, arrays, seed, step, mesh):
        rows, teacher = arrays
        inputs, targets = language.Task.batch(self, rows, seed, step, mesh)
        return self._with_teacher(teacher, {"tokens": inputs, "labels": targets, "key": self._keys(seed, step)})

    def _shapes(self, size: int) -> dict:
        tokens = jax.ShapeDtypeStruct((size, self.config.data.length), jnp.int32)
        return {"tokens": tokens, "labels": tokens}

    def _run(self, model: Any, batch: dict, key: jax.Array | None, hidden: bool) -> tuple[jax.Array | None, jax.Array]:
        """Return the hidden states if they are asked for, else None; and the logits."""
        keyed = {} if key is None else {"key": key}
        if not hidden:
            return None, model(batch["tokens"], **keyed)
        states = model.hidden(batch["tokens"], **keyed)
        return states, model.logits(states[-1])
