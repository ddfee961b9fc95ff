"""Time, state and final forms of the weights in a model's variables."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.core import meta
from jaxtyping import Array, Float

from nmjax.analysis.patterns import Pattern, checked
from nmjax.linen.leaves import SparseWeight, leaves, sparse_weights
from nmjax.linen.planning import other_uses, refused_use
from nmjax.linen.variables import StateVariable
from nmjax.products.sparsity import Sparsity
from nmjax.programs.states import Unfinished, WeightState, first, moment, stored_axes, warn_unfinished
from nmjax.pruners import identity

Variables = TypeVar("Variables", bound=Mapping[str, Any])

# ---- time and state ----


def set_step(variables: Variables, step: Any, micro: Any = 0) -> Variables:
    """Return the variables at a step, with due state renewed. Call it once a (micro-)step, outside the loss.

    Args:
      variables: The collections "params" and "nm" in one dict.
      step: The step of training, an integer. Schedules and noise read it.
      micro: The micro-step of gradient accumulation. Every micro-step has its own noise; masks stay.

    Raises:
      TypeError: ``step`` or ``micro`` is not an integer.
      ValueError: A collection is missing, or "nm" is not stacked as "params" is.

    >>> from flax import linen as nn
    >>> import nmjax as nm
    >>> with nm.linen.sparsify(nm.Recipe({".*": "mvue(2,4)"})):
    ...     variables = nn.Dense(8).init(jax.random.key(0), jnp.ones((4, 16)))
    >>> print(nm.linen.set_step(variables, step=3)["nm"]["kernel"].time.ravel())
    [3 0]
    """
    now = moment(step, micro)
    return _with_layers(variables, lambda layer: (layer.state.at(layer.value, now), layer.weight))


def observe(variables: Variables, gradients: Any) -> Variables:
    """Return the variables after the gradients of a step, by which some pruners choose weights.

    They are `nmjax.saliency`, `movement`, `fisher` and `regrow`. Call it after the backward pass of each step; of
    micro-batches, with the mean of their gradients.

    Args:
      variables: As in `set_step`.
      gradients: The gradients of the collection "params", a tree of the same paths.

    Raises:
      ValueError: There is no gradient of a weight whose pruner reads it.

    >>> from flax import linen as nn
    >>> import nmjax as nm
    >>> with nm.linen.sparsify(nm.Recipe({".*": "y_w=ste(saliency(2,4))"})):
    ...     variables = nn.Dense(1).init(jax.random.key(0), jnp.ones((4, 4)))
    >>> variables["params"]["kernel"] = jnp.ones((4, 1))
    >>> variables = observe(variables, {"kernel": jnp.array([[0.], [2.], [2.], [0.]]), "bias": jnp.zeros(1)})
    >>> print(masks(variables)["kernel"].ravel())
    [False  True  True False]
    """
    given, _ = leaves({"params": gradients})

    def renewed(layer: SparseWeight) -> tuple[WeightState, jax.Array]:
        gradient = meta.unbox(given.get(layer.where))
        if gradient is not None and gradient.ndim == layer.weight.ndim:
            gradient = first(gradient, layer.variable.axes)
        return layer.state.observed(layer.value, gradient), layer.weight

    return _with_layers(variables, renewed)


def reset_state(variables: Variables) -> Variables:
    """Return the variables with scales and held masks made again from the current weights.

    Args:
      variables: As in `set_step`.

    >>> from flax import linen as nn
    >>> import nmjax as nm
    >>> with nm.linen.sparsify(nm.Recipe({".*": "s_ste(2,4)"})):
    ...     variables = nn.Dense(1).init(jax.random.key(0), jnp.ones((4, 4)))
    >>> variables["params"]["kernel"] = jnp.array([[1.], [2.], [3.], [4.]])
    >>> print(nm.linen.reset_state(variables)["nm"]["kernel"].state["y_w"].ravel())
    [2.2]
    """
    return _with_layers(variables, lambda layer: (layer.state.renewed(layer.value), layer.weight))


def harden(variables: Variables, model: nn.Module | None = None, *inputs: Any, **options: Any) -> Variables:
    """Return the variables with every weight in its final form, as inference uses it. The model no longer prunes it.

    If the model uses the weight of a sparse layer elsewhere too, as a tied head does, hardening would change that
    product: pass ``model`` and ``inputs``, and it is refused. A weight is pruned in the dtype that its layer computed
    in at ``init``, and is stored in its own.

    Args:
      variables: As in `set_step`.
      model: The model. It is traced on ``inputs``.
      *inputs: Examples of the model's inputs: arrays or their shapes.
      **options: Keyword arguments of the model's call.

    Raises:
      ValueError: A weight has no final form, because it is drawn again at every step, or because the layer, or the
        model on ``inputs``, uses it elsewhere too; or an error of `set_step`.

    Warns:
      UserWarning: The schedule of a method has not ended, so the hardened layers compute something else than at
        this step. Inside `jit` nothing is compared.

    >>> from flax import linen as nn
    >>> import nmjax as nm
    >>> with nm.linen.sparsify(nm.Recipe({".*": "ste(2,4)"})):
    ...     variables = nn.Dense(8).init(jax.random.key(0), jnp.ones((4, 16)))
    >>> hard = nm.linen.harden(variables)
    >>> bool(nm.groups.is_nm(hard["params"]["kernel"], 2, 4, axis=0))
    True
    """
    before = sparse_weights(variables)
    others: Mapping[str, list[str]] = {} if model is None else other_uses(model, inputs, options)
    for layer in before:
        if layer.variable.sparsity.y_w != identity and layer.weight_path in others:
            raise ValueError(refused_use(layer.path, layer.variable.sparsity, others[layer.weight_path]))
    found: list[Unfinished] = []

    def hard(layer: SparseWeight) -> tuple[WeightState, jax.Array]:
        final, state = layer.state.hardened(layer.value)
        found.append(layer.state.unfinished(layer.value, final))
        return state, layer.back(final)

    hardened = _with_layers(variables, hard)
    warn_unfinished(found, stacklevel=3)
    return hardened


def paths(variables: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the paths of all layers. ``recipe.check(paths(variables))`` refuses rules that match no layer.

    Args:
      variables: Variables with the collection "nm".

    >>> from flax import linen as nn
    >>> import nmjax as nm
    >>> with nm.linen.sparsify(nm.Recipe({".*": "ste(2,4)"})):
    ...     variables = nn.Sequential([nn.Dense(8), nn.relu]).init(jax.random.key(0), jnp.ones((4, 16)))
    >>> nm.linen.paths(variables)
    ('layers_0',)
    """
    is_state = lambda v: isinstance(v, StateVariable)
    return tuple(variable.origin.path for variable in jax.tree.leaves(variables.get("nm"), is_leaf=is_state))


def _with_layers(variables: Variables, change: Callable[[SparseWeight], tuple[WeightState, jax.Array]]) -> Variables:
    """Return the variables with the state and the weight of every sparse layer as ``change`` makes them."""
    by_name, tree = leaves(variables)
    for layer in sparse_weights(variables):
        if layer.variable.sparsity == Sparsity():
            continue
        state, weight = change(layer)
        by_name[layer.name] = layer.variable.holding(state)
        by_name[layer.where] = meta.replace_boxed(by_name[layer.where], weight)
    return tree.unflatten(by_name.values())


# ---- patterns, masks and scales ----


def patterns(variables: Mapping[str, Any]) -> dict[str, Pattern | None]:
    """Return the pattern that every layer's weight has after `harden`.

    Args:
      variables: As in `set_step`, or what `harden` returned.

    Returns:
      A dict from the weight's path to its `Pattern`: n:m along the axes that the product contracts. None is dense.

    Raises:
      ValueError: A weight has no final form, or its groups lie along no axes of it, because the layer reshapes it.

    >>> from flax import linen as nn
    >>> import nmjax as nm
    >>> with nm.linen.sparsify(nm.Recipe({".*": "s_ste(2,4)"})):
    ...     variables = nn.Dense(4).init(jax.random.key(0), jnp.ones((2, 8)))
    >>> nm.linen.patterns(variables)
    {'kernel': 2:4 along axis 0}
    """
    return {layer.weight_path: _pattern(layer) for layer in sparse_weights(variables)}


def _pattern(layer: SparseWeight) -> Pattern | None:
    pattern = layer.before.pattern(layer.value)
    axes = layer.variable.axes
    return pattern and replace(pattern, axes=stored_axes(pattern.contracted, axes, layer.weight.ndim))


def violations(variables: Mapping[str, Any]) -> dict[str, jax.Array | None]:
    """Return the number of groups of each weight that break the pattern which `harden` promises.

    Args:
      variables: As in `set_step`, or what `harden` returned.

    Returns:
      A dict from the weight's path to a count. None: nothing was checked, because the final form is dense.

    Raises:
      ValueError: A weight has no final form.

    Warns:
      UserWarning: No weight has an n:m final form, so nothing was checked.

    >>> from flax import linen as nn
    >>> import nmjax as nm
    >>> with nm.linen.sparsify(nm.Recipe({".*": "s_ste(2,4)"})):
    ...     variables = nn.Dense(4).init(jax.random.key(0), jnp.ones((2, 8)))
    >>> nm.linen.violations(nm.linen.harden(variables))
    {'kernel': Array(0, dtype=int32)}
    """
    return checked({layer.weight_path: layer.before.broken(layer.value) for layer in sparse_weights(variables)})


def masks(variables: Mapping[str, Any]) -> Any:
    """Return the masks of the weights at this step.

    Args:
      variables: As in `set_step`.

    Returns:
      A tree like ``variables["params"]``. A parameter without a mask has True.

    Raises:
      TypeError: A pruner has no mask, because it does not only keep or drop.

    >>> from flax import linen as nn
    >>> import nmjax as nm
    >>> with nm.linen.sparsify(nm.Recipe({".*": "ste(2,4)"})):
    ...     variables = nn.Dense(4).init(jax.random.key(0), jnp.ones((2, 8)))
    >>> masks = nm.linen.masks(variables)
    >>> masks["kernel"].shape, int(masks["kernel"].sum()), bool(masks["bias"])
    ((8, 4), 16, True)
    """
    sparse = [one for one in sparse_weights(variables) if one.variable.sparsity.y_w != identity]
    made = {layer.where: layer.back(layer.state.mask(layer.value)) for layer in sparse}
    by_name, tree = leaves({"params": variables["params"]})
    values = [meta.replace_boxed(v, made.get(name, jnp.array(True))) for name, v in by_name.items()]
    return tree.unflatten(values)["params"]


def scales(variables: Mapping[str, Any]) -> dict[str, Float[Array, "*stack"]]:
    """Return the frozen scales of S-STE.

    Args:
      variables: As in `set_step`.

    Returns:
      A dict from the layer's path to its scale; a stack has one scale for every layer. Layers without a scale are left
      out.

    >>> from flax import linen as nn
    >>> import nmjax as nm
    >>> with nm.linen.sparsify(nm.Recipe({".*": "s_ste(2,4)"})):
    ...     variables = nn.Dense(1).init(jax.random.key(0), jnp.ones((2, 4)))
    >>> variables["params"]["kernel"] = jnp.array([[1.], [2.], [3.], [4.]])
    >>> nm.linen.scales(nm.linen.reset_state(variables))
    {'': Array(2.2, dtype=float32)}
    """
    by_path = {layer.path: layer.state.scale for layer in sparse_weights(variables)}
    return {path: scale for path, scale in by_path.items() if scale is not None}
