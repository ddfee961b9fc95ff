"""What the words of a config mean: durations, the learning rate, the optimizer, the recipe."""

import ast
import difflib
import inspect
import math
import re
from collections.abc import Callable, Iterable
from contextlib import contextmanager

import jax
import jax.numpy as jnp
import optax

import nmjax as nm
from experiments.errors import Mistake

DTYPES = {"float32": None, "bfloat16": jnp.bfloat16}  # None: as the parameters, which are float32


@contextmanager
def as_mistake(about: str = ""):
    """What the library refuses of a person's settings, in one line and under the name of the setting."""
    try:
        yield
    except (ValueError, TypeError) as error:
        text = re.sub(r"\s*\n\s*", " ", str(error))
        raise Mistake(f"{about}: {text}" if about else text) from error


def one_of(name: str, known: Iterable[str], what: str) -> str:
    """The name, if it is known; else what comes near it."""
    known = sorted(known)
    if name in known:
        return name
    near = difflib.get_close_matches(name, known, 1, 0.4)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise Mistake(f"{what}={name!r} is not known.{hint} There are {', '.join(known)}.")


def dtype(config):
    return DTYPES[one_of(config.dtype, DTYPES, "config.dtype")]


def model(config, known: dict, rngs, **fixed):
    """The model of ``config.model``: its class by name, that size of it, and what else the page says, over what is ``fixed``."""
    options = dict(config.model)
    name, size = options.pop("name"), options.pop("size")
    make, sizes = known[one_of(name, known, "config.model.name")]
    options = fixed | sizes[one_of(size, sizes, "config.model.size")] | options
    return make(**options, dtype=dtype(config), rngs=rngs)


def steps(config, examples: int) -> int:
    """Optimizer steps of the whole run: ``config.steps``, or where that is 0 ``config.epochs``."""
    if config.batch < 1 or config.accumulate < 1 or config.batch % config.accumulate:
        raise Mistake(
            f"config.batch={config.batch} is cut into config.accumulate={config.accumulate} micro-batches, so it has to be a "
            "multiple of it."
        )
    if min(config.steps, config.epochs) < 0 or config.steps == config.epochs == 0:
        raise Mistake(
            f"config.steps={config.steps} and config.epochs={config.epochs:g}: one of them says how long the run is, and "
            "neither is negative."
        )
    return config.steps or max(1, round(config.epochs * examples / config.batch))


def duration(text: str, total: int, what: str) -> int:
    """Steps, of "200" or of a share of the run, as "5%".

    >>> duration("5%", 2000, "config.evaluate"), duration("30", 2000, "config.evaluate")
    (100, 30)
    """
    try:
        found = float(text.removesuffix("%")) * (total / 100 if text.endswith("%") else 1)
    except ValueError:
        found = -1.0
    if not (math.isfinite(found) and found >= 0):
        raise Mistake(f'{what}={text!r} is no duration: write steps, as "200", or a share of the run, as "5%".')
    return round(found)


def in_steps(text: str, total: int) -> str:
    """A method's text with shares of the run as steps.

    >>> in_steps("mdgf(2,4,linear(1,0,75%))", 2000)
    'mdgf(2,4,linear(1,0,1500))'
    """
    return re.sub(r"(\d+(?:\.\d*)?)%", lambda found: str(round(float(found[1]) * total / 100)), text)


def recipe(config, total: int) -> nm.Recipe:
    with as_mistake("config.rules and config.sparsity"):
        rules = tuple((r[0], in_steps(r[1], total)) if _pair(r) else r for r in config.rules)
        table = {name: in_steps(text, total) for name, text in config.sparsity.items()}
        return nm.Recipe.named(rules, table, config.backend)


def _pair(rule) -> bool:
    return isinstance(rule, (tuple, list)) and len(rule) == 2 and isinstance(rule[1], str)


def learning_rate(config, total: int) -> Callable:
    """A linear warm-up to the peak, then constant, linear or cosine to the end of the run."""
    c = config.learning_rate
    warmup = duration(c.warmup, total, "config.learning_rate.warmup")
    if warmup >= total:
        raise Mistake(f"config.learning_rate.warmup={c.warmup!r} is {warmup} steps, and the run has {total}.")
    after = {
        "constant": lambda left: optax.constant_schedule(c.peak),
        "linear": lambda left: optax.linear_schedule(c.peak, c.end, left),
        "cosine": lambda left: (
            lambda step: c.end + (c.peak - c.end) * (1 + jnp.cos(jnp.pi * jnp.minimum(step / left, 1))) / 2
        ),
    }[one_of(c.shape, ("constant", "linear", "cosine"), "config.learning_rate.shape")](total - warmup)
    if not warmup:
        return after
    return optax.join_schedules([lambda step: c.peak * (step + 1) / (warmup + 1), after], [warmup])


def optimizer(config, rate: Callable, total: int) -> optax.GradientTransformationExtraArgs:
    """Clipping, then the decay of masked weights, then an optimizer of Optax, or `nm.optim.step_adam`, by its name.

    Weight decay is of kernels and embeddings only: where the optimizer has none of its own, it is added to the gradient.
    """
    name, options = call(in_steps(config.optimizer, total), "config.optimizer")
    ours = {"step_adam": nm.optim.step_adam}
    known = [
        n for n, f in vars(optax).items() if inspect.isfunction(f) and _rates(f) and n[0] != "_" and "scale_by" not in n
    ]
    make = ours.get(name) or getattr(optax, one_of(name, [*known, *ours], "config.optimizer"))
    takes = inspect.signature(make).parameters
    chain = [optax.clip_by_global_norm(config.clip)] * (config.clip > 0)
    chain += [nm.optim.masked_decay(config.masked_decay)] * (config.masked_decay > 0)
    matrix = lambda path, _: nm.metrics.path(path).rpartition("/")[2] in ("kernel", "embedding")
    matrices = lambda params: jax.tree_util.tree_map_with_path(matrix, params)
    if "weight_decay" in options and "weight_decay" not in takes:
        chain.append(optax.add_decayed_weights(options.pop("weight_decay"), matrices))
    elif "mask" in takes:
        options["mask"] = matrices
    for option in options:
        one_of(option, takes, f"config.optimizer: an option of {name}")
    with as_mistake("config.optimizer"):
        chain.append(make(rate, **options))
    return optax.with_extra_args_support(optax.chain(*chain))


def call(text: str, what: str) -> tuple[str, dict]:
    """The name and the options of a call, written as in Python.

    >>> call("sgd(momentum=0.9, nesterov=True)", "config.optimizer")
    ('sgd', {'momentum': 0.9, 'nesterov': True})
    """
    try:
        node = ast.parse(text, mode="eval").body
        node = ast.Call(node, [], []) if isinstance(node, ast.Name) else node
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.args:
            return node.func.id, {str(k.arg): ast.literal_eval(k.value) for k in node.keywords}
        raise ValueError
    except (SyntaxError, ValueError):
        raise Mistake(f"{what}={text!r} is no call with named options, as 'sgd(momentum=0.9)'.") from None


def _rates(function) -> bool:
    return next(iter(inspect.signature(function).parameters), "") == "learning_rate"
