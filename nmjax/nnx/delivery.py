"""Makes the layers of a flax.nnx model sparse, and sets their step, state and seed."""

import inspect
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import jax
from flax import errors, nnx
from jax.sharding import NamedSharding, PartitionSpec

from nmjax.analysis.patterns import path
from nmjax.nnx.checks import NO_LAYERS, check_layers, check_uses, fitted, normalised
from nmjax.nnx.layer import Layer
from nmjax.nnx.layers import layers, read, shape, stacked, value
from nmjax.nnx.phases import check_phase
from nmjax.nnx.recording import other_uses, with_calls
from nmjax.nnx.unreached import rule_paths, unreached, wanted
from nmjax.nnx.variables import SparsityState, SparsityVariable, write
from nmjax.products.sparsity import Sparsity
from nmjax.programs import states
from nmjax.programs.running import is_array
from nmjax.recipes import missed
from nmjax.recipes.table import Recipe

Model = TypeVar("Model")


def sparsify(
    model: Model, recipe: Recipe, *inputs: Any, seed: Any = 0, stack: int | tuple[int, ...] | None = None,
    strict: bool = False, **options: Any,
) -> Model:  # fmt: skip
    """Apply a recipe to the layers of a model.

    The model is changed in place, and stays what it was: the same class, parameters, paths and call. Each pruned layer
    gets a `SparsityState`, and computes its products with it. Applying another recipe replaces the first. Scales and
    held masks are computed from the current weights: load weights first, or call `reset_state` afterwards.

    Args:
      model: Any flax.nnx model. Its Linear, LinearGeneral, Einsum and Conv layers are pruned, also inside attention
        and in stacks of layers, and layers of classes that `nmjax.nnx.register_layer` was given.
      recipe: The sparsity of each layer, by its path.
      *inputs: Examples of the model's inputs: arrays or their shapes. The model is traced once on their shapes, and
        there is a warning for layers that the call does not use. Inputs are needed if only a call says what the product
        of a layer is, as for an nnx.Einsum without einsum_str.
      seed: The seed of all random numbers: an int, a `jax.random.key` or two uint32 words.
      stack: The stacking axis or axes of the weights. Needed only if a weight's shape is ambiguous.
      strict: True to raise an error in place of the warnings.
      **options: Keyword arguments of the model's call, as for ``inputs``.

    Returns:
      The model itself.

    Raises:
      TypeError: ``recipe`` is not a Recipe, ``model`` is not a flax.nnx module, or its call does not take ``inputs``.
      ValueError: A rule matches no layer; layers cannot follow their rules, and all are listed; the call with
        ``inputs`` uses a pruned weight elsewhere too; or ``strict`` is True and there would be a warning.

    Warns:
      UserWarning: A rule matches a parameter of two axes or more outside registered layers, or a layer whose product
        the call with ``inputs`` does not use. It stays dense.

    >>> import nmjax as nm
    >>> up, down = nnx.Linear(8, 16, rngs=nnx.Rngs(0)), nnx.Linear(16, 4, rngs=nnx.Rngs(1))
    >>> model = nnx.Sequential(up, nnx.relu, down)
    >>> recipe = nm.Recipe({r"layers/0": "s_ste(2,4)", r".*": "dense"})
    >>> model = nm.nnx.sparsify(model, recipe)
    >>> model(jnp.ones((32, 8))).shape
    (32, 4)
    >>> nm.nnx.patterns(model)
    {'layers/0/kernel': 2:4 along axis 0, 'layers/2/kernel': None}
    """
    if not isinstance(recipe, Recipe):
        raise TypeError(
            f"sparsify takes a Recipe, such as Recipe(((r'.*', 's_ste(2,4)'),)), got {type(recipe).__name__}."
        )
    axes = (stack,) if isinstance(stack, int) else stack
    registered = [layer.stacked(axes) for layer in layers(model)]
    beyond, _ = unreached(model, registered)
    recipe.check([layer.path for layer in registered], rule_paths(beyond))
    if inputs or options:
        _check_call(model, inputs, options)
        try:
            registered, unused = with_calls(model, registered, recipe, inputs, options)
        except Exception as error:  # of the model's own call, perhaps
            error.add_note(
                f"sparsify called {type(model).__name__} on the examples of its inputs. To pass a seed, write seed=..."
            )
            raise
    else:
        unused: list[Layer] = []
    chosen = [(layer, fitted(layer, recipe(layer.path), axes)[0]) for layer in registered]
    if not chosen and any(sparsity != Sparsity() for _, sparsity in recipe.rules):
        raise ValueError(f"{type(model).__name__} {NO_LAYERS}")
    sparse = [(layer, sparsity) for layer, sparsity in chosen if sparsity != Sparsity()]
    paths = [layer.path for layer in registered]
    missed.report(wanted(recipe, beyond), "nm.nnx.register_layer", paths, strict, stacklevel=2)
    check_layers(sparse, axes, normalised(model), paths)
    _report_unused(unused, paths, strict)
    if inputs or options:
        others, idle = other_uses(model, inputs, options), {layer.path for layer in unused}
        check_uses([row for row in sparse if row[0].path not in idle], others)
    for layer, sparsity in chosen:
        if layer.hardened is not None:  # of an earlier recipe
            layer.harden(None)
        put_state(layer, sparsity, recipe.backend, seed, axes)
    return model


def _check_call(model: Any, inputs: Sequence[Any], options: Mapping[str, Any]) -> None:
    """Refuse arguments that the model's call does not take, such as a misspelt ``seed``."""
    if not any(map(is_array, jax.tree.leaves((inputs, options)))):
        given = [*map(repr, inputs), *(f"{name}={value!r}" for name, value in options.items())]
        raise TypeError(
            "sparsify takes seed, stack and strict by name, and examples of the model's inputs, got "
            f"{', '.join(given)}."
        )
    try:
        inspect.signature(model).bind(*inputs, **options)
    except TypeError as error:
        raise TypeError(f"sparsify: the call of {type(model).__name__} refuses these examples: {error}.") from None


def _report_unused(unused: list[Layer], paths: list[str], strict: bool) -> None:
    """Warn of layers that a rule matches and whose product is not used, or refuse them."""
    if not unused:
        return
    gone = [missed.Missed(layer.path, tuple(layer.kernel.shape), type(layer.module).__name__) for layer in unused]
    lead = "Rules of the recipe match these layers, but the call with these inputs does not use their products:"
    why = "If the program multiplies by their weights in another way, that product stays dense."
    missed.tell(lead, gone, paths, why, strict, stacklevel=3)


def put_state(
    layer: Layer, sparsity: Sparsity, backend: str, seed: Any, axes: tuple[int, ...] | None = None
) -> None:  # fmt: skip
    """Give a layer a `SparsityState`, or restore Flax's dense product if there is nothing to prune.

    Args:
      layer: The layer.
      sparsity: What it prunes.
      backend: The backend, as in `Recipe`.
      seed: The seed of its random numbers.
      axes: The stacking axes of the weight, if the caller named them.
    """
    if sparsity == Sparsity():
        if layer.state is not None:
            layer.put(None)
        return
    stack = axes if axes in layer.stacks else layer.stack
    origin = layer.origin._replace(sparsity=sparsity)
    weight_state = SparsityState(origin, backend, layer.rank, stack, layer.product)
    layer.put(weight_state)
    made = states.WeightState.new(stacked(layer, origin), shape(layer), seed)
    variable = lambda v, state: _variable(layer, states.stored(v, stack, layer.rank), state)
    if made.words is not None:
        weight_state.words = nnx.data(variable(made.words, state=False))
    if made.time is not None:
        weight_state.time = nnx.data(variable(made.time, state=False))
    if states.has_state(sparsity):
        state = read(layer).renewed(value(layer)).state
        weight_state.ranks = tuple(v.ndim - len(stack) for v in jax.tree.leaves(state))
        weight_state.state = nnx.data(jax.tree.map(partial(variable, state=True), state))


def _variable(layer: Layer, value: jax.Array, state: bool) -> SparsityVariable:
    """Return a variable that is sharded like the weight.

    Stacking axes keep the weight's sharding. In a state, so do all axes of the same size as the weight's.
    """
    kernel, rank = layer.kernel, value.ndim
    shared = range(min(rank, kernel.ndim))
    alike = [a for a in shared if a in layer.stack or (state and value.shape[a] == kernel.shape[a])]
    names = lambda spec: tuple(spec[a] if a in alike and a < len(spec) else None for a in range(rank))
    metadata, sharding = kernel.get_metadata(), getattr(kernel.get_value(), "sharding", None)
    if isinstance(sharding, NamedSharding) and not isinstance(value, jax.core.Tracer):
        value = jax.device_put(value, NamedSharding(sharding.mesh, PartitionSpec(*names(sharding.spec))))
    if not metadata.get("out_sharding"):
        return SparsityVariable(value)
    mesh = {"mesh": metadata["mesh"]} if "mesh" in metadata else {}
    return SparsityVariable(value, out_sharding=names(metadata["out_sharding"]), **mesh)


# ---- time and state ----


def set_step(model: Any, step: Any, micro: Any = 0, since: Any = None) -> None:
    """Set the step of every layer. Call it once for every (micro-)step, outside the loss.

    Schedules and random numbers follow the step, and masks and scales that are due are computed again. Inside `jit`,
    one program serves all steps.

    Args:
      model: The model.
      step: The step of training, an integer or an integer array of shape ().
      micro: The micro-step of gradient accumulation, an integer. Every micro-step has its own random numbers; held
        masks stay.
      since: The step of the last call. By default the model's own time says it. Under `jax.vmap` over models, pass
        one number: then new masks are computed only at steps at which they are due, and not at every step.

    Raises:
      TypeError: ``step`` or ``micro`` is not an integer.
      ValueError: The model is in a phase that does not contain ``step``; or the model was made outside the current
        trace, as when the loss function calls `set_step`.

    >>> import nmjax as nm
    >>> recipe = nm.Recipe({".*": "mvue(2,4)"})
    >>> model = nm.nnx.sparsify(nnx.Linear(8, 4, rngs=nnx.Rngs(0)), recipe)
    >>> @nnx.jit
    ... def gradients(model, x, step):
    ...     nm.nnx.set_step(model, step)
    ...     return nnx.grad(lambda model: (model(x) ** 2).mean())(model)
    >>> gradients(model, jnp.ones((4, 8)), 3)["kernel"].shape
    (8, 4)
    """
    now = states.moment(step, micro)
    for layer, weight_state in _with_state(model):
        check_phase(weight_state, step)
        try:
            with jax.named_scope(weight_state.name):
                weight = None if weight_state.state is None else value(layer)
                store(layer, read(layer).at(weight, now, since))
        except errors.TraceContextError as error:
            raise ValueError(
                f"{layer.path or 'the model'}: set_step was called in another trace than the one in which the model "
                "was made. Call it outside the function that is differentiated, or merge a copy there: "
                "nnx.merge(graphdef, state, copy=True)."
            ) from error


def observe(model: Any, gradients: Any) -> None:
    """Give a model the gradients of a step, by which some pruners choose weights.

    They are `nmjax.saliency`, `movement`, `fisher` and `regrow`. Call it after the backward pass of each step, with the
    gradients that the optimizer gets; of micro-batches, with their mean. Other layers stay as they are.

    Args:
      model: The model.
      gradients: The gradients of its parameters: what `nnx.grad` returned, or a tree of arrays of the same paths.

    Raises:
      ValueError: There is no gradient of a weight whose pruner reads it, or it has another shape.

    >>> import nmjax as nm
    >>> recipe = nm.Recipe({".*": "y_w=ste(saliency(2,4))"})
    >>> model = nm.nnx.sparsify(nnx.Linear(4, 1, rngs=nnx.Rngs(0)), recipe)
    >>> gradients = nnx.grad(lambda model: model(jnp.array([[0., 9., 9., 0.]])).sum())(model)
    >>> observe(model, gradients)
    >>> nm.nnx.masks(model)["kernel"].ravel().tolist()
    [False, True, True, False]
    """
    given = {path(keys): v for keys, v in jax.tree_util.tree_leaves_with_path(gradients)}
    first_path = {id(node): "/".join(map(str, keys)) for keys, node in nnx.iter_graph(model)}  # of a shared weight
    for layer, weight_state in _with_state(model):
        if states.reads_gradient(weight_state.sparsity):
            gradient = given.get(first_path[id(layer.kernel)])
            if gradient is not None and gradient.ndim == layer.kernel.ndim:
                gradient = states.first(gradient, layer.stack)
            with jax.named_scope(weight_state.name):
                store(layer, read(layer).observed(value(layer), gradient))


def reset_state(model: Model) -> Model:
    """Recompute scales and held masks from the current weights.

    Call it after you load weights into a sparse model. The norms of inputs, for `wanda` and `ria`, are 1 again: call
    `set_norms` afterwards. What pruners have seen of gradients is gone.

    Args:
      model: The model.

    Returns:
      The model itself.

    >>> import nmjax as nm
    >>> recipe = nm.Recipe({".*": "s_ste(2,4)"})
    >>> model = nm.nnx.sparsify(nnx.Linear(8, 4, rngs=nnx.Rngs(0)), recipe)
    >>> model.kernel[...] = jnp.tile(jnp.array([1., 2., 3., 4.]), 2)[:, None] * jnp.ones((1, 4))
    >>> model = nm.nnx.reset_state(model)
    >>> nm.nnx.scales(model)
    {'': Array(2.2, dtype=float32)}
    """
    for layer, weight_state in _with_state(model):
        if weight_state.state is not None:
            store(layer, read(layer).renewed(value(layer)))
    return model


def reseed(model: Any, seed: Any) -> None:
    """Change the seed of a model's random numbers. Compiled programs stay valid.

    Args:
      model: The model.
      seed: An int, a `jax.random.key` or two uint32 words.

    >>> import nmjax as nm
    >>> recipe = nm.Recipe({".*": "mvue(2,4)"})
    >>> model = nm.nnx.sparsify(nnx.Linear(8, 4, rngs=nnx.Rngs(0)), recipe)
    >>> before = model.nm_state.words[...]
    >>> nm.nnx.reseed(model, seed=1)
    >>> bool((model.nm_state.words[...] == before).any())
    False
    """
    for layer, state in _with_state(model):
        if state.words is not None:
            sizes = tuple(layer.kernel.shape[a] for a in layer.stack)
            write(state.words, states.stored(states.noise_words(seed, layer.path, sizes), layer.stack, layer.rank))


def _with_state(model: Any) -> list[tuple[Layer, SparsityState]]:
    return [(layer, layer.state) for layer in layers(model) if layer.state is not None]


def store(layer: Layer, new: states.WeightState) -> None:
    """Write time and state of a layer's state, and what the layer prunes."""
    weight_state = layer.state
    assert weight_state is not None
    if new.origin.sparsity != weight_state.sparsity:
        weight_state.origin = nnx.static(weight_state.origin._replace(sparsity=new.origin.sparsity))
    variables = [v for v in (weight_state.time, *weight_state.variables) if v is not None]
    for variable, v in zip(variables, jax.tree.leaves((new.time, new.state)), strict=True):
        write(variable, states.stored(v, layer.stack, layer.rank))
