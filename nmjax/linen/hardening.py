"""Time, state and final forms of the weights in a model's variables."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.core import meta
from jaxtyping import Array, Float

from nmjax.analysis.patterns import Pattern, checked, violations as groups_that_break
from nmjax.core.context import Ctx
from nmjax.core.pruner import Pruner
from nmjax.linen.leaves import Leaves, Names, Sited
from nmjax.linen.planning import other_uses, refused_use
from nmjax.linen.variables import SiteVariable, context_of, named, states
from nmjax.products import sites
from nmjax.products.pruning import along
from nmjax.products.slot import slot_context
from nmjax.products.sparsity import Sparsity
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
    >>> layer = nn.Dense(8, dot_general_cls=nm.linen.dot_cls(nm.Recipe(((".*", "mvue(2,4)"),))))
    >>> variables = nm.linen.set_step(layer.init(jax.random.key(0), jnp.ones((4, 16))), step=3)
    >>> print(variables["nm"]["Product_0"]["site"].time.ravel())
    [3 0]
    """
    sites.check_time(step, micro)
    now = jnp.stack([jnp.asarray(step, jnp.int32), jnp.asarray(micro, jnp.int32)])
    return _with_layers(variables, lambda layer: layer.over(partial(_renewed, now=now, since=_step(layer))))


def reset_state(variables: Variables) -> Variables:
    """Return the variables with scales and held masks made again from the current weights.

    Args:
      variables: As in `set_step`.

    >>> from flax import linen as nn
    >>> import nmjax as nm
    >>> layer = nn.Dense(1, dot_general_cls=nm.linen.dot_cls(nm.Recipe(((".*", "s_ste(2,4)"),))))
    >>> variables = layer.init(jax.random.key(0), jnp.ones((4, 4)))
    >>> variables["params"]["kernel"] = jnp.array([[1.], [2.], [3.], [4.]])
    >>> print(nm.linen.reset_state(variables)["nm"]["Product_0"]["site"].state["fwd_rhs"].ravel())
    [2.2]
    """
    return _with_layers(variables, lambda layer: layer.over(partial(_renewed, now=None, since=None)))


def harden(variables: Variables, model: nn.Module | None = None, *inputs: Any, **options: Any) -> Variables:
    """Return the variables with every weight in its final form, as inference uses it. The model no longer prunes it.

    A weight is pruned in the dtype that its layer computed in at ``init``, and is stored in its own.

    A model may use the weight of a sparse layer elsewhere too, as a tied head does, which multiplies by it without
    pruning. Hardening would change that product. Without ``model`` this is not looked at: pass it if the model reads
    weights of its layers.

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
    >>> layer = nn.Dense(8, dot_general_cls=nm.linen.dot_cls(nm.Recipe(((".*", "ste(2,4)"),))))
    >>> hard = nm.linen.harden(layer.init(jax.random.key(0), jnp.ones((4, 16))))
    >>> bool(nm.groups.is_nm(hard["params"]["kernel"], 2, 4, axis=0))
    True
    """
    before = Leaves.of(variables).sites()
    others: Mapping[str, list[str]] = {} if model is None else other_uses(model, inputs, options)
    for layer in before:
        if layer.site.sparsity.fwd_rhs != identity and layer.weight_path in others:
            raise ValueError(refused_use(layer.path, layer.site.sparsity, others[layer.weight_path]))
    hard = _with_layers(variables, _hard)
    unfinished = [(one.path, sites.inputs_unfinished(one.site.sparsity, one.site.time)) for one in before]
    sites.warn_unfinished(_distances(variables, hard), unfinished, stacklevel=3)
    return hard


def _distances(variables: Mapping[str, Any], hard: Mapping[str, Any]) -> Iterator[sites.Distance]:
    """Yield (path, pruner, step, distance) of each weight with a schedule, as `warn_unfinished` takes them."""
    final = {layer.where: layer.weight for layer in Leaves.of(hard).sites()}
    for layer in Leaves.of(variables).sites():
        p = layer.site.sparsity.fwd_rhs
        step = sites.compared_at(p, layer.site.time)
        if step is not None and not isinstance(final[layer.where], jax.core.Tracer):
            now = called(layer, p, p, back=True)
            yield layer.path, p, step, sites.distance(now, final[layer.where])


def paths(variables: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the paths of all layers. ``recipe.check(paths(variables))`` refuses rules that match no layer.

    Args:
      variables: Variables with the collection "nm".

    >>> from flax import linen as nn
    >>> import nmjax as nm
    >>> recipe = nm.Recipe(((".*", "ste(2,4)"),))
    >>> model = nn.Sequential([nn.Dense(8, dot_general_cls=nm.linen.dot_cls(recipe)), nn.relu])
    >>> nm.linen.paths(model.init(jax.random.key(0), jnp.ones((4, 16))))
    ('layers_0',)
    """
    is_site = lambda v: isinstance(v, SiteVariable)
    return tuple(site.origin.path for site in jax.tree.leaves(variables.get("nm"), is_leaf=is_site))


def _step(layer: Sited) -> Any:
    """Return the step of a layer: one for a whole stack. None if it keeps no time."""
    return None if layer.site.time is None else layer.over(lambda site, _: site.own()[1][0], out=0).max()


def _renewed(
    site: SiteVariable, weight: jax.Array, now: jax.Array | None, since: Any
) -> tuple[SiteVariable, jax.Array]:
    """Return a layer at another time; without a time, with new state at its own."""
    words, time, state = site.own()
    step: Any = 0
    if now is not None:
        step = now[0]
    elif time is not None:
        step = time[0]
    if state is not None:
        make = site.sparsity.init if now is None else site.sparsity.refresh
        state = states(site.origin, make, weight, Ctx(words, step, state, since=since))
    if now is not None and time is not None:
        time = now
    return site.holding(words, time, state), weight


def _hard(layer: Sited) -> tuple[SiteVariable, jax.Array]:
    _ = layer.final  # it raises an error if the weight has no single final form
    return layer.over(_hardened)


def _hardened(site: SiteVariable, weight: jax.Array) -> tuple[SiteVariable, jax.Array]:
    origin, (p, rest) = site.origin, sites.final(site.sparsity)
    if p != identity:
        state = site.own()[2]
        form = lambda w: sites.final_weight(site.sparsity, w, origin.operand, state)
        weight = origin.parameter.apply(form, weight, back=True)
    return site.replace(sparsity=rest, words=None, time=None, state=None), weight


def _with_layers(variables: Variables, change: Callable[[Sited], tuple[SiteVariable, jax.Array]]) -> Variables:
    """Return the variables with the variable and the weight of every sparse layer as ``change`` makes them."""
    leaves = Leaves.of(variables)
    by_name = dict(leaves.by_name)
    for layer in leaves.sites():
        if layer.site.sparsity == Sparsity():
            continue
        with named(layer.path):
            by_name[layer.name], weight = change(layer)
        by_name[layer.where] = meta.replace_boxed(by_name[layer.where], weight)
    return leaves.tree.unflatten(by_name.values())


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
    return {layer.weight_path: _pattern(layer) for layer in Leaves.of(variables).sites()}


def _pattern(layer: Sited) -> Pattern | None:
    pattern, origin = layer.final[0].pattern, layer.site.origin
    if pattern is None:
        return None
    axes = origin.parameter.axes(origin.shape)
    if axes is None:
        raise ValueError(
            f"{layer.path or 'the model'}: the layer reshapes {origin.weight} of shape {origin.shape} before its "
            "product, so that its groups lie along no axes of it. Use violations(variables), which reshapes it too."
        )
    own = list(range(layer.weight.ndim))
    for axis in layer.site.stack:
        own.pop(axis)
    contracted = (axes[a] for a in origin.operand.contract)
    return Pattern(*pattern, tuple(own[a] for a in contracted if a is not None))


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
    return checked({layer.weight_path: _broken(layer) for layer in Leaves.of(variables).sites()})


def _broken(layer: Sited) -> jax.Array | None:
    pattern, origin = layer.final[0].pattern, layer.site.origin
    if pattern is None:
        return None
    promised = Pattern(*pattern, origin.operand.contract)
    count = lambda _, weight: origin.parameter.apply(lambda w: groups_that_break(w, promised), weight)
    return layer.over(count, out=0).sum()


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
    made: dict[Names, jax.Array] = {}
    for layer in Leaves.of(variables).sites():
        p = layer.site.sparsity.fwd_rhs
        if p != identity:
            layer.check()
            made[layer.where] = called(layer, p, p.mask, back=True)
    boxed = lambda v: isinstance(v, meta.AxisMetadata)
    flat, tree = jax.tree_util.tree_flatten_with_path(variables["params"], is_leaf=boxed)
    name = lambda keys: ("params", *(getattr(part, "key", part) for part in keys))
    return tree.unflatten([meta.replace_boxed(v, made.get(name(keys), jnp.array(True))) for keys, v in flat])


def called(layer: Sited, p: Pruner, call: Callable[..., jax.Array], *, back: bool = False) -> jax.Array:
    """Call a pruner, or its mask, on a layer's weight as the product gets it, with the layer's time, noise and state.

    Args:
      layer: The layer, or a stack.
      p: The pruner of its weight.
      call: The pruner itself, or its ``mask``.
      back: True for the result in the layout of the weight; else in that of the operand, with the axes of stacks first.
    """
    origin = layer.site.origin
    label, operand = f"{layer.path or 'the model'}: fwd_rhs={p}", origin.operand

    def one(site: SiteVariable, weight: jax.Array) -> jax.Array:
        ctx = slot_context(context_of(*site.own()), "fwd_rhs")

        def of_operand(w: jax.Array) -> jax.Array:
            result, restore = along(label, p, w, operand, ctx, call)
            return restore(result)

        return origin.parameter.apply(of_operand, weight, back=back)

    return layer.over(one, None if back else 0)


def operand_of(layer: Sited) -> jax.Array:
    """Return the weight as the product gets it, with the axes of stacks first."""
    parameter: Any = layer.site.origin.parameter
    return layer.over(lambda site, weight: parameter.apply(lambda w: w, weight), 0)


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
    by_path = {layer.path: _scale(layer) for layer in Leaves.of(variables).sites()}
    return {path: scale for path, scale in by_path.items() if scale is not None}


def _scale(layer: Sited) -> jax.Array | None:
    """Return the scale in the state of a layer, or None if there is none."""
    state = layer.site.state
    if state is None or "fwd_rhs" not in state:
        return None
    leaves = lambda site: jax.tree.leaves(site.own()[2]["fwd_rhs"])
    of_layer: Callable[..., Any] = lambda site, _: [value for value in leaves(site) if value.ndim == 0]  # no norms
    scale = [v for v in jax.tree.leaves(layer.over(of_layer, 0)) if jnp.issubdtype(v.dtype, jnp.floating)]
    return scale[-1] if scale else None
