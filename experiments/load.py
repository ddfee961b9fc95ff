"""The weights of a run, out of its directory: `load_run`."""

import contextlib
import dataclasses
import warnings
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from ml_collections import ConfigDict

import nmjax as nm
from experiments import report
from experiments.data import augment
from experiments.errors import Mistake, mistaken
from experiments.training import image, modes, pretrained, settings, tasks, text
from experiments.training.checkpoints import Checkpoints
from nmjax.core import names

MODELS = {"image": image.MODELS, "text": text.MODELS}  # of the tasks whose models are made without their data


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class LoadedRun:
    """A run that was loaded from its directory, on one device.

    Attributes:
      directory: The run's directory.
      config: All settings of the run.
      step: The number of steps after which the checkpoint was saved.
      model: The sparse model, as the evaluation of the run scores it: with the averages of the weights if the run has
        them (``config.ema``), else with the weights in training.
      metrics: The lines of metrics.jsonl by kind, "train", "eval", "sparsity" and "test", each kind by rising steps.
      sizes: What the run recorded of its data: arguments of the model; for images the mean and the standard deviation
        of each channel, as shares of 255. It is {} for a task of another module, and for fine-tuning.
    """

    directory: Path
    config: ConfigDict
    step: int
    model: nnx.Module
    metrics: dict[str, list[dict[str, Any]]]
    sizes: dict[str, Any]

    def __repr__(self) -> str:
        return f"LoadedRun({self.directory}, step {self.step:,}, {type(self.model).__name__})"

    @cached_property
    def hardened(self) -> nnx.Module:
        """The model with hardened weights.

        Raises:
          Mistake: The model has no hardened form.
        """
        with mistaken(f"the model of {self.directory} has no hardened form"):
            return nm.nnx.harden(self.model)

    @cached_property
    def weights(self) -> dict[str, np.ndarray]:
        """The hardened weights and all other parameters by their paths, such as "blocks/0/mlp/up/kernel"."""
        params = nnx.to_flat_state(nnx.state(self.hardened, nnx.Param))
        return {"/".join(map(str, path)): np.asarray(value[...]) for path, value in params}

    def predict(self, *inputs: Any, hardened: bool = True) -> np.ndarray:
        """Return the logits of the model.

        The function is compiled once for every shape of the inputs.

        Args:
          *inputs: What the task of the run takes. Images, [batch, height, width, channels], with pixels from 0 to 255
            as integers or floats; they are normalised as in the evaluation. Or tokens, [batch, time]; if tokens are
            bytes, also a str. One image or text without the axis of the batch gives logits without it. The model of a
            task of another module, and that of fine-tuning, gets the inputs as they are.
          hardened: False for `model` instead of the hardened model.

        Raises:
          Mistake: The inputs do not fit, or there is no hardened model.
        """
        alone = False
        if self.sizes:
            if len(inputs) != 1:
                raise Mistake(f"predict takes one array, got {len(inputs)}.")
            array, axes = _images(inputs[0], self.sizes) if "mean" in self.sizes else _tokens(inputs[0], self)
            alone = array.ndim < axes
            inputs = (array[None] if alone else array,)
        graph, state = nnx.split(self.hardened if hardened else self.model)
        with mistaken("predict"):
            logits = np.asarray(self._apply(graph, state, inputs))
        return logits[0] if alone else logits

    @cached_property
    def _apply(self) -> Callable:
        """The compiled model, as a function of its graph, its state and its inputs."""

        def apply(graph: nnx.GraphDef, state: Any, inputs: tuple) -> Any:
            if "mean" in self.sizes:
                mean, std = (np.float32(self.sizes[name]) for name in ("mean", "std"))
                inputs = (augment.normalise(inputs[0], mean, std),)
            return nnx.merge(graph, state)(*inputs)

        return jax.jit(apply, static_argnums=0)


def load_run(directory: str | Path, checkpoint: Literal["last", "best"] = "last", foreign: bool = False) -> LoadedRun:
    """Return a run with the model of a checkpoint, to read its weights or to predict with it.

    The run may have been trained on any number of devices. It is loaded on one. The data set is not needed, unless the
    task is of another module.

    Args:
      directory: The run's directory.
      checkpoint: "last" or "best". The best is the one with the best evaluation.
      foreign: Import the modules that the run's config names as ``module:name``. That runs their code.

    Raises:
      Mistake: It is not a run directory, it has no checkpoint, or its config names modules and `foreign` is False.
      Failed: The checkpoints are damaged, or they are of another model.

    >>> load_run("runs/none")
    Traceback (most recent call last):
    experiments.errors.Mistake: runs/none is not a run directory: it has no run.json. Give the folder that a run wrote.
    """
    directory = Path(directory)
    settings.one_of(checkpoint, ("last", "best"), "checkpoint")
    record = report.read(directory)
    config = ConfigDict(record.config)
    _check(directory / "config.json", config, foreign)
    try:
        settings.check_recorded(record.config, whole=False)
    except ValueError as error:
        raise Mistake(f"{directory / 'config.json'} is damaged: {error}.") from error
    modes.refuse_without_checkpoints("", directory)
    make, total, sizes = _described(config, record.about)
    graph, params, rest = _split(make, settings.recipe(config, total))
    fields = {"ema": (params, rest)} if config.ema else {"params": params, "rest": rest}
    with contextlib.closing(Checkpoints(directory, warnings.warn)) as checkpoints:
        step, state = checkpoints.restore_fields(fields, best=checkpoint == "best")
    if not step:
        raise Mistake(
            f"{directory} holds no best checkpoint: none was saved at an evaluation. Write checkpoint='last'."
        )
    values = state["ema"] if config.ema else (state["params"], state["rest"])
    model = nnx.merge(graph, *values)
    model.eval()
    return LoadedRun(directory, config, step, model, record.metrics, sizes)


def _check(path: Path, config: ConfigDict, foreign: bool) -> None:
    """Refuse a config that is not whole, and one that would have modules imported if that is not asked for."""
    missing = [name for name in ("experiment", "rules", "sparsity", "backend", "ema") if name not in config]
    if missing:
        raise Mistake(f"{path} is missing, or has no {', '.join(missing)}, so the model of the run is not known.")
    named = settings.foreign_names(config)
    if named and not foreign:
        raise Mistake(
            f"{path} names {', '.join(named)}, and names from a file are imported only if you ask for it. If "
            "you trust that code, write load_run(DIR, foreign=True)."
        )


def _described(config: ConfigDict, about: dict[str, Any]) -> tuple[Callable[..., nnx.Module], int, dict[str, Any]]:
    """Return the function that makes the dense model, the steps of the run, and what it recorded of its data."""
    known, sizes = MODELS.get(config.experiment), about.get("sizes")
    total = about["planned_steps"]
    if config.experiment == "finetune" and sizes:  # the checkpoint that it began with says what model it is
        classes = len(sizes["classes"]) if "classes" in sizes else None
        return pretrained.start(config, classes, values=False).make, total, {}
    if known and sizes:
        return settings.model(config, known, **sizes["model"]), total, sizes
    task = tasks.task(config)  # with its data: it is of another module
    make = lambda rngs: task.make(rngs)
    return make, settings.steps(config, task.examples), task.sizes if known else {}


def _split(make: Callable[..., nnx.Module], recipe: nm.Recipe) -> tuple[nnx.GraphDef, Any, Any]:
    """Return the graph of the sparse model; and its parameters and its other state as shapes, on one device."""
    if recipe.backend == "pallas":  # which refuses products that this machine cannot pack
        recipe = dataclasses.replace(recipe, backend="auto")
    key = jax.random.key(0)
    with mistaken("the model"):
        model = nnx.eval_shape(lambda: nm.nnx.sparsify(make(rngs=nnx.Rngs(0)), recipe, seed=key))
    _, params, rest = nnx.split(model, nnx.Param, ...)
    place = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    shape = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)
    return nnx.split(model)[0], *jax.tree.map(shape, (nnx.as_pure(params), nnx.as_pure(rest)))


# ---- inputs: the array of a batch or of one example, and the number of axes of a batch ----


def _images(given: Any, sizes: dict[str, Any]) -> tuple[np.ndarray, int]:
    """Return images as uint8 or float32. Refuse other shapes, and pixels that are not from 0 to 255."""
    images, channels = np.asarray(given), len(sizes["mean"])
    if images.ndim not in (3, 4) or images.shape[-1] != channels or not images.size:
        raise Mistake(
            f"predict takes images of shape [batch, height, width, {channels}], or one without the batch, "
            f"got {images.shape}."
        )
    if images.dtype == np.uint8:
        return images, 4
    if not (jnp.issubdtype(images.dtype, jnp.integer) or jnp.issubdtype(images.dtype, jnp.floating)):
        raise Mistake(f"predict takes images as uint8, or as floats from 0 to 255, got {images.dtype}.")
    low, high = float(images.min()), float(images.max())
    if not (low >= 0 and high <= 255):
        raise Mistake(f"predict takes pixels from 0 to 255 and normalises them itself, got {low:g} to {high:g}.")
    if 0 < high <= 1:
        raise Mistake(f"predict takes pixels from 0 to 255, and these are from {low:g} to {high:g}. Multiply by 255.")
    return images.astype(np.float32), 4


def _tokens(given: Any, run: LoadedRun) -> tuple[np.ndarray, int]:
    """Return tokens as int32. Refuse other shapes, and tokens that the vocabulary does not have."""
    data, vocabulary = run.config.data, run.sizes["model"]["vocabulary"]
    if isinstance(given, str):
        if data.tokenizer != "bytes" or names.is_foreign(data.name):
            raise Mistake(
                "predict takes a str only if the tokens of the run are bytes, and here they are not. Pass the tokens."
            )
        given = np.frombuffer(given.encode(), np.uint8)
    tokens = np.asarray(given)
    if tokens.ndim not in (1, 2) or tokens.dtype.kind not in "iu" or not tokens.size:
        raise Mistake(
            "predict takes tokens, integers of shape [batch, time], or one text without the batch, "
            f"got {tokens.dtype} {tokens.shape}."
        )
    if not 0 <= tokens.min() <= tokens.max() < vocabulary:
        raise Mistake(
            f"predict: the tokens are from {tokens.min()} to {tokens.max()}, and the vocabulary is {vocabulary}."
        )
    return tokens.astype(np.int32), 2
