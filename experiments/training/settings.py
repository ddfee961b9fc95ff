"""The meaning of a config's fields: the model, durations, the learning rate, the optimizer, the recipe."""

import ast
import difflib
import inspect
import math
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from ml_collections import ConfigDict

import nmjax as nm
from configs import common
from experiments.errors import Mistake, meant, mistaken
from nmjax.core import names
from nmjax.core.names import foreign_names as names_in
from nmjax.products.slot import SLOTS
from nmjax.pruners.input_norms import needs_norms

DTYPES = {"float32": None, "bfloat16": jnp.bfloat16}  # None: the dtype of the parameters, which are float32
KINDS = {str: "a text", bool: "true or false", int: "a whole number", float: "a number", tuple: "a list"}
LONGEST = 1000  # characters of a method in a recorded config
SHAPES = ("constant", "linear", "cosine")


def one_of(name: str, known: Iterable[str], what: str) -> str:
    """Return a name that is known; else refuse it, with the nearest of the known names."""
    known = sorted(known)
    if name in known:
        return name
    raise Mistake(f"{what}={shortened(name)!r} is not known.{meant(name, known)} Write one of {', '.join(known)}.")


def foreign_names(config: ConfigDict) -> list[str]:
    """Return every ``module:name`` that a run with this config would import."""
    groups = [group for group in (config.get("model"), config.get("data")) if isinstance(group, ConfigDict)]
    fields = [config.get("experiment", ""), *(group.get("name", "") for group in groups)]
    named = [str(field) for field in fields if names.is_foreign(str(field))]
    return named + [name for text in _texts([config.get("rules"), config.get("sparsity")]) for name in names_in(text)]


def _texts(value: Any) -> list[str]:
    """Return every text in a value of JSON."""
    if isinstance(value, str):
        return [value]
    inside = value.values() if isinstance(value, dict | ConfigDict) else value
    return [text for part in inside for text in _texts(part)] if isinstance(inside, Iterable) else []


# ---- a config in the directory of a run ----


def check_recorded(held: Any, whole: bool = True) -> None:
    """Refuse a recorded config that no config file makes: its fields have the types that a command line gives them.

    Args:
      held: What config.json holds.
      whole: Whether every field has to be there.

    Raises:
      ValueError: A field is missing, or is of another type.
    """
    if not isinstance(held, dict):
        raise ValueError("it is not an object")
    if names.is_foreign(str(held.get("experiment", ""))):
        return  # its module says which fields it has
    like = common.run()
    if held.get("experiment") == "finetune":
        like = common.finetune("language" if held.get("objective") == "language" else "")
    _check_fields(held, like.to_dict() | {"data": {"name": ""}}, whole)
    pairs = all(isinstance(rule, list | tuple) and len(rule) == 2 for rule in held["rules"])
    texts = [*(part for rule in held["rules"] for part in rule), *held["sparsity"].values()] if pairs else [None]
    if not all(isinstance(part, str) and len(part) <= LONGEST for part in (*texts, *held["sparsity"])):
        raise ValueError(
            "rules is not a list of pairs of texts, or sparsity holds what is no text, or a text is too long"
        )
    data, experiment = held.get("data", {}), held["experiment"]
    if names.is_foreign(data.get("name", "")):
        return
    if experiment == "image":
        like.data = common.folder(1) if data.get("name") == "folder" else common.image("").data
    elif experiment == "text":
        like.data = common.gpt("").data
    _check_fields(data, like.get("data", ConfigDict()).to_dict(), whole, "data.")


def _check_fields(held: dict, fields: dict, whole: bool, what: str = "") -> None:
    """Refuse an object of a recorded config that lacks a field, or has one of another type."""
    for name, like in fields.items():
        if name not in held:
            if whole:
                raise ValueError(f"it has no {what}{name}")
            continue
        value, kinds = held[name], {float: (int, float), tuple: (list, tuple)}.get(type(like), (type(like),))
        if type(value) not in kinds or (type(value) is int and abs(value) >= 2**63):
            raise ValueError(f"{what}{name} is {str(value)[:40]}, not {KINDS.get(type(like), 'an object')}")
        if isinstance(like, dict):
            _check_fields(value, like, whole, f"{what}{name}.")


# ---- the model ----


def dtype(config: ConfigDict) -> Any:
    """Return what layers compute in; None means the dtype of the parameters."""
    return DTYPES[one_of(config.dtype, DTYPES, "config.dtype")]


def model(config: ConfigDict, known: Mapping[str, tuple[Callable, Mapping]], **fixed: Any) -> Callable[..., nnx.Module]:
    """Return the function that makes the model of ``config.model``.

    A model of nmjax gets the sizes that ``config.model.size`` stands for, and the other fields of ``config.model``,
    which override them. A model of another module, ``config.model.name = "mylab.models:Mixer"``, is a subclass of
    `nnx.Module`, or a function that returns one. It is called with keyword arguments alone:

    - every field of ``config.model`` except ``name``; also except ``size`` if that is empty;
    - ``rngs``, an `nnx.Rngs`;
    - ``dtype`` and what the task fixes, unless ``config.model`` has a field of that name. An image task fixes ``image``
      (the side in pixels), ``channels`` and ``classes``; a text task fixes ``vocabulary`` and ``length``. Each of them
      is left out if the class has no parameter of that name.

    Args:
      config: The settings of a run.
      known: The models of nmjax that the task can train: class and table of sizes, by name.
      **fixed: What the task says of a model, by parameter.

    Returns:
      A function that takes ``rngs`` by keyword and returns a dense model.

    Raises:
      Mistake: The name or the size is not known, the name cannot be imported, or its arguments do not fit.
    """
    options = dict(config.model)
    name, size = options.pop("name"), options.pop("size", "")
    fixed["dtype"] = dtype(config)
    if not names.is_foreign(name):
        make, table = known[one_of(name, known, "config.model.name")]
        sizes = table[one_of(size, table, "config.model.size")]
        return partial(make, **(_accepted(make, fixed) | sizes | options))
    with mistaken("config.model.name"):
        make = names.load(name)
    if not callable(make):
        raise Mistake(f"config.model.name={name!r} is a {type(make).__name__}, not a subclass of nnx.Module.")
    if size:
        options["size"] = size
    arguments = _accepted(make, fixed) | options
    try:
        _signature(make).bind(rngs=None, **arguments)
    except TypeError as error:
        raise Mistake(
            f"config.model.name={name!r}: {error}. It is called with rngs, {', '.join(sorted(arguments))}: the fields "
            "of config.model, and what the task fixes."
        ) from error
    return partial(made, make, name, **arguments)


def _signature(make: Callable) -> inspect.Signature:
    """Return the parameters of a function or of a class, without ``self``. nnx's metaclass hides those of a class."""
    if not isinstance(make, type):
        return inspect.signature(make)
    signature = inspect.signature(make.__init__)
    return signature.replace(parameters=list(signature.parameters.values())[1:])


def parameters_of(make: Callable) -> list[str]:
    """Return the names of the parameters of a function or of a class."""
    return list(_signature(make).parameters)


def _accepted(make: Callable, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that a function or a class has parameters for."""
    parameters = _signature(make).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return dict(arguments)
    return {name: value for name, value in arguments.items() if name in parameters}


def made(make: Callable, name: str, /, *inside: nnx.Module, rngs: nnx.Rngs, **arguments: Any) -> nnx.Module:
    """Make a model of another module, perhaps around another model. Refuse what is no model."""
    made = make(*inside, **arguments, rngs=rngs)
    if not isinstance(made, nnx.Module):
        raise Mistake(f"config.model.name={name!r} makes a {type(made).__name__}, not an nnx.Module.")
    return made


# ---- how long ----


def steps(config: ConfigDict, examples: int) -> int:
    """Return the optimizer steps of the whole run: ``config.steps``, or if that is 0 those of ``config.epochs``."""
    if config.batch < 1 or config.accumulate < 1 or config.batch % config.accumulate:
        raise Mistake(
            f"config.batch={config.batch} has to be a positive multiple of config.accumulate={config.accumulate}, the "
            "number of micro-batches."
        )
    if not 0 <= config.epochs < math.inf or config.steps < 0 or config.steps == config.epochs == 0:
        raise Mistake(
            f"config.steps={config.steps} and config.epochs={config.epochs:g}: set one of them to a positive, finite "
            "number, and leave the other at 0 or above."
        )
    return config.steps or max(1, round(config.epochs * examples / config.batch))


def evaluates(done: int, total: int, every: int) -> bool:
    """Return True if a run is evaluated after a number of steps.

    It is evaluated after its last step, and every ``every`` steps before that, counted back from the last. The first
    evaluation is at step ``every`` or later.

    Args:
      done: The number of steps that are done.
      total: The number of steps of the run.
      every: The number of steps from one evaluation to the next.

    >>> [done for done in range(1, 43) if evaluates(done, 42, 10)]
    [12, 22, 32, 42]
    """
    return done == total or (done >= every and (total - done) % every == 0)


def duration(text: str, total: int, what: str) -> int:
    """Return the steps of a duration: "200", or a share of the run, as "5%".

    >>> duration("5%", 2000, "config.evaluate"), duration("30", 2000, "config.evaluate")
    (100, 30)
    """
    try:
        number = float(text.removesuffix("%"))
    except ValueError:
        number = -1.0
    if text.endswith("%"):
        number *= total / 100
    if not (math.isfinite(number) and number >= 0):
        words = 'is not a duration: write steps, as "200", or a share of the run, as "5%".'
        raise Mistake(f"{what}={shortened(text)!r} {words}")
    return round(number)


def shortened(text: str) -> str:
    """Return the beginning of a long text, for a message."""
    return text if len(text) <= 200 else f"{text[:200]}..."


def in_steps(text: str, total: int) -> str:
    """Return a method's text with every share of the run in steps.

    >>> in_steps("mdgf(2,4,linear(1,0,75%))", 2000)
    'mdgf(2,4,linear(1,0,1500))'
    """

    def steps_of(share: re.Match[str]) -> str:
        number = float(share[1]) * total / 100
        if not math.isfinite(number):
            raise Mistake(f"{share[0][:20]}... is no share of a run: write a share such as 75%.")
        return str(round(number))

    return re.sub(r"(?<![\w.])(\d+(?:\.\d*)?|\.\d+)%", steps_of, text)


# ---- recipe, learning rate, optimizer ----


def recipe(config: ConfigDict, total: int) -> nm.Recipe:
    """Return the recipe of ``config.rules`` and ``config.sparsity``, for a run of so many steps."""
    with mistaken("config.rules and config.sparsity"):
        rules = tuple((rule[0], in_steps(rule[1], total)) if _pair(rule) else rule for rule in config.rules)
        table = {name: in_steps(text, total) for name, text in config.sparsity.items()}
        recipe = nm.Recipe.named(rules, table, config.backend)
    for _, sparsity in recipe.rules:
        if any(needs_norms(getattr(sparsity, slot)) for slot in SLOTS):
            raise Mistake(
                f"config.sparsity: {sparsity} chooses by the norms of inputs, which a run does not measure. Prune the "
                "checkpoint first, nmjax prune --method wanda, and hold its mask: y_w=ste(hold(mse(2,4)))."
            )
    return recipe


def _pair(rule: Any) -> bool:
    return isinstance(rule, (tuple, list)) and len(rule) == 2 and isinstance(rule[1], str)


def learning_rate(config: ConfigDict, total: int) -> Callable:
    """Return the learning rate as a function of the step: a linear warm-up to the peak, then ``shape`` to the end."""
    c = config.learning_rate
    if not 0 <= c.peak < math.inf:
        raise Mistake(f"config.learning_rate.peak={c.peak} must be a finite number, at least 0.")
    warmup = duration(c.warmup, total, "config.learning_rate.warmup")
    if warmup >= total:
        raise Mistake(
            f"config.learning_rate.warmup={c.warmup!r} is {warmup} steps, and the run has {total}. Make it shorter."
        )
    shape, left = one_of(c.shape, SHAPES, "config.learning_rate.shape"), total - warmup
    if shape == "constant":
        after = optax.constant_schedule(c.peak)
    elif shape == "linear":
        after = optax.linear_schedule(c.peak, c.end, left)
    else:
        after = lambda step: c.end + (c.peak - c.end) * (1 + jnp.cos(jnp.pi * jnp.minimum(step / left, 1))) / 2
    if not warmup:
        return after
    return optax.join_schedules([lambda step: c.peak * (step + 1) / (warmup + 1), after], [warmup])


def optimizer(config: ConfigDict, rate: Callable, total: int) -> optax.GradientTransformationExtraArgs:
    """Return the optimizer: clipping, masked decay, then an optimizer of Optax or `nm.optim.step_adam`, by its name.

    Only kernels and embeddings decay. If the optimizer has no weight decay of its own, the decay is added to the
    gradient.
    """
    name, options = call(in_steps(config.optimizer, total), "config.optimizer")
    makers = {n: f for n, f in vars(optax).items() if inspect.isfunction(f) and _takes_rate(f)}
    makers = {n: f for n, f in makers.items() if not n.startswith("_") and "scale_by" not in n}
    makers["step_adam"] = nm.optim.step_adam
    makers.pop("lbfgs")  # it needs the loss as a function
    make = makers[one_of(name, makers, "config.optimizer")]
    parameters = inspect.signature(make).parameters
    chain = []
    if config.clip > 0:
        chain.append(optax.clip_by_global_norm(config.clip))
    if config.masked_decay > 0:
        chain.append(nm.optim.masked_decay(config.masked_decay))
    masks = [mask for mask in ("mask", "weight_decay_mask") if mask in parameters]
    options |= dict.fromkeys(masks, _decaying)
    if "weight_decay" in options and "weight_decay" not in parameters:
        chain.append(optax.add_decayed_weights(options.pop("weight_decay"), _decaying))
    elif options.get("weight_decay") and not masks:
        raise Mistake(f"config.optimizer: {name} would decay all parameters, also biases. Leave out weight_decay.")
    if "learning_rate" in options:
        raise Mistake(f"config.optimizer={config.optimizer!r}: set the rate with config.learning_rate.peak, not here.")
    for option in options:
        known = [each for each in parameters if each != "learning_rate"]
        if option not in known:
            hint = meant(option, known)
            raise Mistake(f"config.optimizer: {name} has no option {option!r}.{hint} It has {', '.join(known)}.")
    with mistaken("config.optimizer"):
        chain.append(make(rate, **options))
    if config.get("rates", ()):
        chain.append(optax.stateless(lambda updates, _: scaled(updates, factors(config, updates))))
    return optax.with_extra_args_support(optax.chain(*chain))


def factors(config: ConfigDict, params: Any) -> dict[str, float]:
    """Return for each parameter the factor of its learning rate: that of the first pattern in ``config.rates``, or 1.

    Args:
      config: The settings of a run.
      params: A tree like the parameters.

    Raises:
      Mistake: An entry is no pair of a pattern and a factor, or its pattern matches no parameter.

    >>> config = ConfigDict({"rates": (("tokens/.*", 0.0), (".*/bias", 2.0))})
    >>> factors(config, {"tokens": {"embedding": 1}, "head": {"kernel": 1, "bias": 1}})
    {'head/bias': 2.0, 'head/kernel': 1.0, 'tokens/embedding': 0.0}
    """
    paths = [nm.metrics.path(path) for path, _ in jax.tree_util.tree_flatten_with_path(params)[0]]
    rates = [_rate(entry) for entry in config.get("rates", ())]
    for pattern, _ in rates:
        if not any(pattern.fullmatch(path) for path in paths):
            near = difflib.get_close_matches(pattern.pattern, paths, 3, 0.0)
            raise Mistake(
                f"config.rates: {pattern.pattern!r} matches no whole path of a parameter. The nearest of {len(paths)} "
                f"paths are {', '.join(near)}."
            )
    return {path: next((factor for pattern, factor in rates if pattern.fullmatch(path)), 1.0) for path in paths}


def _rate(entry: Any) -> tuple[re.Pattern, float]:
    """Return the pattern and the factor of an entry of ``config.rates``."""
    try:
        pattern, factor = entry
        compiled, number = re.compile(pattern), float(factor)
        if 0 <= number < math.inf:
            return compiled, number
    except (TypeError, ValueError, re.error):
        pass
    raise Mistake(
        f'config.rates has {entry!r}; an entry is a pattern of paths and a factor of at least 0, as ("tokens/.*", 0.0).'
    )


def scaled(updates: Any, by: Mapping[str, float]) -> Any:
    """Return updates times the factors of their paths. A factor of 0 gives zeros, whatever the update is."""

    def scale(path: Any, update: jax.Array) -> jax.Array:
        factor = by[nm.metrics.path(path)]
        if factor == 1:
            return update
        return jnp.zeros_like(update) if factor == 0 else update * jnp.asarray(factor, update.dtype)

    return jax.tree_util.tree_map_with_path(scale, updates)


def _decaying(params: Any) -> Any:
    """Return True for every kernel and embedding, False for all other parameters."""
    decays = lambda path, _: nm.metrics.path(path).rpartition("/")[2] in ("kernel", "embedding")
    return jax.tree_util.tree_map_with_path(decays, params)


def call(text: str, what: str) -> tuple[str, dict[str, Any]]:
    """Return the name and the options of a call, written as in Python.

    >>> call("sgd(momentum=0.9, nesterov=True)", "config.optimizer")
    ('sgd', {'momentum': 0.9, 'nesterov': True})
    """
    try:
        node = ast.parse(text, mode="eval").body
        node = ast.Call(node, [], []) if isinstance(node, ast.Name) else node
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.args:
            return node.func.id, {str(k.arg): ast.literal_eval(k.value) for k in node.keywords}
        raise ValueError
    except (SyntaxError, TypeError, ValueError, RecursionError, MemoryError):  # MemoryError: of Python's own parser
        raise Mistake(f"{what}={shortened(text)!r} is no call with named options, as 'sgd(momentum=0.9)'.") from None


def _takes_rate(function: Callable) -> bool:
    """Return True if the first parameter of a function is the learning rate."""
    return next(iter(inspect.signature(function).parameters), "") == "learning_rate"
