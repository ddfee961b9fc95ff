"""The checkpoint that a run begins with, and the teacher that it learns from."""

import inspect
import json
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from ml_collections import ConfigDict

from experiments.data import labelled
from experiments.errors import Mistake, mistaken
from experiments.training import settings
from nmjax import checkpoints
from nmjax.core import names

Outputs = dict[str, jax.Array]


def folder(path: str, what: str) -> Path:
    """Return the folder of a checkpoint that a config names."""
    if not path:
        raise Mistake(
            f"{what} is empty. Give the folder of a checkpoint, with config.json, tensors and tokenizer.json: "
            "nmjax convert NAME --to DIR writes one."
        )
    found = Path(path).expanduser()
    if not (found / "config.json").is_file():
        raise Mistake(f"{what}={path!r} is not a folder with a config.json. nmjax convert NAME --to DIR writes one.")
    return found


class Start(NamedTuple):
    """The model of a checkpoint, and its values.

    Attributes:
      make: A function of ``rngs``, by keyword, that makes the model with new parameters.
      values: The parameters of the checkpoint by path. Those of a new head are left out.
    """

    make: Callable[..., nnx.Module]
    values: dict[str, np.ndarray]


def start(config: ConfigDict, classes: int | None, values: bool = True) -> Start:
    """Return the model that ``config.weights`` and ``config.model`` describe.

    Args:
      config: The settings of a run. If ``config.model.name`` is ``module:name``, that class is called with the
        checkpoint's model, the keyword arguments ``classes`` and ``rngs``, and the fields of ``config.model`` that it
        has parameters for. The other fields are arguments of the checkpoint's model. Fields that are 0, False or empty
        are left out. The model's parameters keep their values wherever the class puts the model.
      classes: The number of classes; None for a language model.
      values: False to leave out the values.

    Raises:
      Mistake: There is no such checkpoint, or its model does not fit.
    """
    path, options = folder(config.weights, "config.weights"), dict(config.model)
    name = options.pop("name")
    options["dtype"] = settings.dtype(config)
    with mistaken(f"config.weights={config.weights!r}"):
        if not name:
            checkpoints.models.refuse_quantized(path)  # the trained model will be written in its form
            if classes is not None:
                _refuse_without_head(checkpoints.architecture(path), config.weights)
                options["classes"] = classes
            make = checkpoints.architecture(path, **options)
            found = checkpoints.parameters(path, **options) if values else {}
            return Start(make, found)
        options = {key: value for key, value in options.items() if value}
        own, head = _own_head(config, name, options, classes)
        plain = checkpoints.architecture(path, **own)
        places: dict[str, str] = {}

        def make(*, rngs: nnx.Rngs) -> nnx.Module:
            base = plain(rngs=rngs)
            paths = {id(v): path for path, v in variables(base).items()}
            made = settings.made(head, name, base, rngs=rngs)
            places.update({paths[id(v)]: path for path, v in variables(made).items() if id(v) in paths})
            return made

        if not values:
            return Start(make, {})
        nnx.eval_shape(lambda: make(rngs=nnx.Rngs(0)))
        found = checkpoints.parameters(path, **own)
        return Start(make, {places[path]: value for path, value in found.items() if path in places})


def _refuse_without_head(make: Any, weights: str) -> None:
    if "classes" not in inspect.signature(make.func.__init__).parameters:
        raise Mistake(
            f"config.weights={weights!r} is a {make.func.__name__}, which has no head for classes. Write "
            "--config=configs/finetune_24.py:language, or name a head of your own: --config.model.name=module:name."
        )


def _own_head(
    config: ConfigDict, name: str, options: dict[str, Any], classes: int | None
) -> tuple[dict[str, Any], Callable[..., Any]]:  # fmt: skip
    """Return the options of the checkpoint's model, and the function that puts a head on it."""
    if not names.is_foreign(name):
        raise Mistake(f"config.model.name={name!r}: write module:name of a head, or nothing for the checkpoint's own.")
    with mistaken("config.model.name"):
        head = names.load(name)
    known = settings.parameters_of(head)
    own = {key: value for key, value in options.items() if key not in known or key == "dtype"}
    given = {key: value for key, value in options.items() if key in known}
    if classes is not None and "classes" in known:
        given["classes"] = classes
    return own, partial(head, **given)


def variables(model: nnx.Module) -> dict[str, nnx.Variable]:
    """Return the parameters of a model by path."""
    found = {}
    for path, node in nnx.iter_graph(model):
        if isinstance(node, nnx.Param):
            found["/".join(map(str, path))] = node
    return found


def put(model: nnx.Module, values: dict[str, Any]) -> None:
    """Give parameters of a model the values of a checkpoint."""
    own = variables(model)
    for path, value in values.items():
        own[path].set_value(jnp.asarray(value, own[path].dtype))


# ---- the teacher ----


class Teacher:
    """A dense model whose outputs a run learns.

    Args:
      config: The settings of a run: ``config.teacher``.
      run: A function (model, batch, key, hidden) that returns the hidden states, or None if ``hidden`` is False, and
        the logits.
    """

    def __init__(self, config: ConfigDict, run: Callable[..., tuple[jax.Array | None, jax.Array]]):
        c = config.teacher
        if not (0 <= c.logits <= 1 and c.temperature > 0 and c.hidden >= 0):
            raise Mistake(
                "config.teacher: logits is a share from 0 to 1, temperature is above 0, and hidden is at least 0; got "
                f"logits={c.logits}, temperature={c.temperature}, hidden={c.hidden}."
            )
        path = self.path = folder(c.weights, "config.teacher.weights")
        with mistaken(f"config.teacher.weights={c.weights!r}"):
            model = checkpoints.load(path, dtype=settings.dtype(config))
        self.graph, state = nnx.split(model)
        self.state = nnx.as_pure(state)
        self.wants_hidden, self.run, self.parts = c.hidden > 0, run, config.accumulate
        self.settings = c

    def outputs(self, state: Any, batch: Any) -> Outputs:
        """Return the teacher's outputs for a batch, with the axis of the batch first."""

        def part(batch: Any) -> Outputs:
            hidden, logits = self.run(nnx.merge(self.graph, state), batch, None, self.wants_hidden)
            found = {"teacher_logits": logits}
            return found if hidden is None else found | {"teacher_hidden": jnp.moveaxis(hidden, 0, 1)}

        if self.parts == 1:
            return part(batch)
        divided = jax.tree.map(lambda v: v.reshape(self.parts, -1, *v.shape[1:]), batch)
        found = jax.lax.map(part, divided)  # one micro-batch at a time, to save memory
        return jax.tree.map(lambda v: v.reshape(-1, *v.shape[2:]), found)

    def check_task(self, classes: Sequence[str], weights: Path) -> None:
        """Refuse a teacher of other classes, or with another tokenizer.

        Args:
          classes: The names of the classes, in the order of their numbers; none for a language model.
          weights: The folder of the run's checkpoint.
        """
        named = json.loads((self.path / "config.json").read_text()).get("id2label") or {}
        with mistaken(f"config.teacher.weights={self.settings.weights!r}: id2label of config.json"):
            theirs = [str(named[key]) for key in sorted(named, key=int)]
        told = lambda names: not any(re.fullmatch(r"(LABEL_)?\d+", name) for name in names)
        if classes and theirs and told(theirs) and told(classes) and theirs != list(classes):
            raise Mistake(
                f"config.teacher.weights={self.settings.weights!r} has the classes {', '.join(theirs[:5])}, and the "
                f"data {', '.join(classes[:5])}. A teacher has the same classes in the same order."
            )
        vocabulary = lambda folder: labelled.tokenizer(folder).get_vocab()
        if (self.path / "tokenizer.json").is_file() and vocabulary(self.path) != vocabulary(weights):
            raise Mistake(
                f"config.teacher.weights={self.settings.weights!r} has another tokenizer than config.weights, so it "
                "would read other texts. Use a teacher that was fine-tuned from the same checkpoint."
            )

    def check(self, logits: jax.ShapeDtypeStruct, hidden: jax.ShapeDtypeStruct | None, batch: Any) -> None:
        """Refuse a teacher whose outputs have other shapes than those of the model."""
        mine = jax.eval_shape(self.outputs, self.state, batch)
        if mine["teacher_logits"].shape != logits.shape:
            raise Mistake(
                f"config.teacher.weights={self.settings.weights!r} gives logits {mine['teacher_logits'].shape[1:]} and "
                f"the model {logits.shape[1:]}. A teacher has the same classes, or the same tokens."
            )
        if hidden is not None and mine["teacher_hidden"].shape[-1] != hidden.shape[-1]:
            raise Mistake(
                f"config.teacher.hidden={self.settings.hidden}: the teacher is {mine['teacher_hidden'].shape[-1]} wide "
                f"and the model {hidden.shape[-1]}. Write --config.teacher.hidden=0."
            )

    def loss(
        self, label_loss: jax.Array, logits: jax.Array, hidden: jax.Array | None, batch: Any, mask: jax.Array | None
    ) -> tuple[jax.Array, Outputs]:  # fmt: skip
        """Return the loss, and its parts to show.

        Args:
          label_loss: The loss of the labels.
          logits: The logits of the model.
          hidden: Its hidden states, or None.
          batch: The batch, with the teacher's outputs.
          mask: True for tokens, False for padding; None if there is none.
        """
        c = self.settings
        far = divergence(logits, batch["teacher_logits"], c.temperature)
        total, shown = (1 - c.logits) * label_loss + c.logits * far, {"label_loss": label_loss, "teacher_loss": far}
        if hidden is not None:
            shown["hidden_loss"] = distance(hidden, jnp.moveaxis(batch["teacher_hidden"], 1, 0), mask)
            total += c.hidden * shown["hidden_loss"]
        return total, shown


def divergence(logits: jax.Array, teacher: jax.Array, temperature: float) -> jax.Array:
    """Return the mean KL divergence from a teacher's distribution, times the temperature squared.

    Hinton et al., "Distilling the Knowledge in a Neural Network" (arXiv 1503.02531).

    >>> x = jnp.array([[1., 2., 4.]])
    >>> float(divergence(x, x, 2.0)), float(divergence(x + 1, x, 2.0))
    (0.0, 0.0)
    """
    theirs, ours = (jax.nn.log_softmax(v.astype(jnp.float32) / temperature) for v in (teacher, logits))
    return temperature**2 * optax.losses.kl_divergence_with_log_targets(ours, theirs).mean()


def distance(hidden: jax.Array, teacher: jax.Array, mask: jax.Array | None) -> jax.Array:
    """Return the squared distance of hidden states divided by the teacher's squared norm: the mean of layers and texts.

    If the models have different depths, each state is compared with the teacher's at the same share of the depth.

    Args:
      hidden: The hidden states [states, batch, time, width].
      teacher: Those of the teacher.
      mask: True for tokens, False for padding.

    >>> x = jnp.arange(1., 9.).reshape(2, 1, 2, 2)
    >>> float(distance(x, x, None)), float(distance(0 * x, x, None))
    (0.0, 1.0)
    """
    last = len(hidden) - 1
    chosen = np.array([round(i * (len(teacher) - 1) / max(last, 1)) for i in range(last + 1)])
    hidden, teacher = hidden.astype(jnp.float32), teacher[chosen].astype(jnp.float32)
    weight = 1.0 if mask is None else mask[None, ..., None]
    sums = [jnp.sum(jnp.square(v) * weight, (2, 3)) for v in (hidden - teacher, teacher)]
    tiny = jnp.finfo(jnp.float32).tiny
    return jnp.mean(jnp.where(sums[1] > 0, sums[0] / jnp.maximum(sums[1], tiny), 0))  # a text may have no tokens
