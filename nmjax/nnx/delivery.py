"""Makes the layers of a flax.nnx model sparse, and sets their step, state and seed.

`sparsify` raises one error for all layers that cannot follow the recipe:

- slots that cannot prune the layer's shapes, as a plan says too (`nmjax.products.rule.slot_refusals`)
- layers whose product is the model's own, layers in nnx.WeightNorm or nnx.SpectralNorm, ambiguous stacks, and pruned
  weights of an nnx.Einsum without einsum_str (`layer_refusal`)

Rules that match no layer are refused by ``Recipe.check``. A plan with a recipe lists all of these.
"""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import errors, nnx
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Int32, UInt32

from nmjax.core import layer_paths, random
from nmjax.core.context import Ctx
from nmjax.core.refusal import Refusal
from nmjax.nnx.doors import Layer, layers, over
from nmjax.nnx.variables import NM, Site, unpadded, write
from nmjax.products import sites
from nmjax.products.pruning import Operand
from nmjax.products.rule import slot_refusals
from nmjax.products.slot import SLOTS
from nmjax.products.sparsity import Sparsity
from nmjax.pruners import identity
from nmjax.recipes.table import Recipe

Model = TypeVar("Model")
NO_LAYERS = (
    "has no nnx.Linear, LinearGeneral, Einsum or Conv, so nothing would be pruned. To prune a product that is written "
    "out by hand, write nm.einsum(..., sparsity=...)."
)


def sparsify(model: Model, recipe: Recipe, seed: Any = 0, stack: int | tuple[int, ...] | None = None) -> Model:
    """Apply a recipe to the layers of a model.

    The model is changed in place. Its parameters and their paths stay. Each pruned layer gets a site: the sparse
    product in place of Flax's dense one, with its seed, step and state. A layer that the recipe leaves dense gets none.
    Sites that the model already has are replaced. Scales and held masks are computed from the current weights. Load
    weights first, or call `reset_state` afterwards.

    Args:
      model: Any flax.nnx model. Its Linear, LinearGeneral, Einsum and Conv layers are pruned, also inside attention
        and in stacks of layers.
      recipe: The sparsity of each layer, by its path.
      seed: The seed of all random numbers: an int, a `jax.random.key` or two uint32 words.
      stack: The stacking axis or axes of the weights. Needed only if a weight's shape is ambiguous.

    Returns:
      The model itself.

    Raises:
      TypeError: ``recipe`` is not a Recipe, or ``model`` is not a flax.nnx module.
      ValueError: A rule matches no layer, or a layer cannot follow its rule. All such layers are listed.

    >>> import nmjax as nm
    >>> recipe = nm.Recipe(((".*", "s_ste(2,4)"),))
    >>> model = nm.nnx.sparsify(nnx.Linear(8, 4, rngs=nnx.Rngs(0)), recipe, seed=1)
    >>> model(jnp.ones((4, 8))).shape
    (4, 4)
    """
    if not isinstance(recipe, Recipe):
        raise TypeError(
            f"sparsify takes a Recipe, such as Recipe(((r'.*', 's_ste(2,4)'),)), got {type(recipe).__name__}."
        )
    chosen = [(layer, recipe(layer.path)) for layer in layers(model)]
    recipe.check(layer.path for layer, _ in chosen)
    if not chosen and any(sparsity != Sparsity() for _, sparsity in recipe.rules):
        raise ValueError(f"{type(model).__name__} {NO_LAYERS}")
    axes = (stack,) if isinstance(stack, int) else stack
    sparse = [(layer, sparsity) for layer, sparsity in chosen if sparsity != Sparsity()]
    _check_layers(sparse, axes, normalised(model), [layer.path for layer, _ in chosen])
    for layer, sparsity in chosen:
        put_site(layer, sparsity, recipe.backend, seed, axes)
    return model


def normalised(model: Any) -> set[int]:
    """Return the ids of the layers that are wrapped in nnx.WeightNorm or nnx.SpectralNorm."""
    wrappers = [m for _, m in nnx.iter_modules(model) if isinstance(m, (nnx.WeightNorm, nnx.SpectralNorm))]
    return {id(m.layer_instance) for m in wrappers}


def _check_layers(
    chosen: list[tuple[Layer, Sparsity]], axes: tuple[int, ...] | None, in_norms: set[int], all_paths: list[str]
) -> None:  # fmt: skip
    """Raise one error for all layers that cannot follow the recipe. Layers that differ in numbers share a line."""
    refused = [
        (layer.path, refusal)
        for layer, sparsity in chosen
        for refusal in _refusals(layer, sparsity, axes, id(layer.module) in in_norms)
    ]
    if refused:
        reasons = layer_paths.alike((path, refusal.reason, (path, refusal.reason)) for path, refusal in refused)
        lines = [f"  {layer_paths.short([path for path, _ in alike])}: {alike[0][1]}" for alike in reasons]
        paths = dict.fromkeys(path for path, _ in refused)
        others = [path for path in all_paths if path not in paths]
        dense = [
            p
            for alike in layer_paths.alike((path, None, path) for path in paths)
            for p in layer_paths.patterns(alike, others)
        ]
        rules = [f'  (r"{pattern}", "dense"),' for pattern in dense]
        head, hint = "The recipe cannot be carried out:", "To leave these layers dense, put these rules first:"
        raise ValueError("\n".join([head, *lines, hint, *rules]))


def _refusals(
    layer: Layer, sparsity: Sparsity, axes: tuple[int, ...] | None, in_norm: bool
) -> list[Refusal]:  # fmt: skip
    """Return the reasons why a layer cannot use this sparsity."""
    if isinstance(layer.module.kernel.get_value(), jax.ShapeDtypeStruct) and sites.has_state(sparsity):
        return [
            Refusal(
                "its kernel is a shape without values, and its state is made from values. Make both abstract together: "
                "nnx.eval_shape(lambda: sparsify(...))."
            )
        ]
    refusal = layer_refusal(layer, sparsity, axes, in_norm)
    return [refusal] if refusal is not None else [r for _, r in layer_slot_refusals(layer, sparsity, axes)]


def layer_refusal(
    layer: Layer, sparsity: Sparsity, axes: tuple[int, ...] | None, in_norm: bool
) -> Refusal | None:  # fmt: skip
    """Return the reason why a layer cannot be made sparse, whatever its slots prune; None if it can.

    Args:
      layer: The layer.
      sparsity: What it would prune.
      axes: The stacking axes of the weight, if the caller named them.
      in_norm: True if an nnx.WeightNorm or nnx.SpectralNorm normalises the layer's weight.
    """
    kernel, product = layer.module.kernel.get_value(), getattr(layer.module, layer.door.name)
    foreign = product not in (None, layer.door.plain) and layer.site is None
    if foreign or getattr(layer.module, "dot_general_cls", None):
        name = getattr(product, "__qualname__", type(product).__name__)
        return Refusal(f"its {layer.door.name} is the model's own, {name}, and would be lost.")
    if in_norm:
        return Refusal("a module around it normalises its kernel, so the pruned kernel is not the one multiplied.")
    if type(kernel).__name__ == "BatchTracer" and sites.needs_key(sparsity):
        return Refusal(
            "it is made inside vmap, where all layers of a stack would get the same noise. Call sparsify on the whole "
            "stack."
        )
    try:
        ways = layer.stacks
    except ValueError as error:
        return Refusal(str(error).partition(": ")[2])
    if axes not in ways and len(ways) > 1:
        choices = " or ".join(f"stack={way[0] if len(way) == 1 else way}" for way in ways)
        return Refusal(
            f"its kernel has shape {kernel.shape}, which does not say which axes stack layers. Name them: "
            f"sparsify(..., {choices})."
        )
    if sparsity.fwd_rhs == sparsity.dlhs_rhs == identity or layer.example(1) is not None:
        return None
    return Refusal("its einsum_str comes with the call. Give it to the constructor.")


def layer_slot_refusals(
    layer: Layer, sparsity: Sparsity, axes: tuple[int, ...] | None
) -> tuple[tuple[str, Refusal], ...]:  # fmt: skip
    """Return the slots of a layer that cannot prune operands of its shapes, with the reasons.

    Args:
      layer: A layer that `layer_refusal` does not refuse.
      sparsity: What it would prune.
      axes: The stacking axes of the weight, if the caller named them.
    """
    stack = axes if axes in layer.stacks else layer.stacks[0]
    product = layer.example(tokens=math.lcm(*(getattr(sparsity, slot).block for slot in SLOTS)))
    if product is None:  # only a call says which product it is; its weight is not pruned
        return ()
    kernel = layer.module.kernel.get_value()
    sharding = getattr(kernel, "sharding", None)
    if isinstance(sharding, NamedSharding):
        spec = [*sharding.spec, *[None] * (kernel.ndim - len(sharding.spec))]
        one = NamedSharding(sharding.mesh, PartitionSpec(*(s for a, s in enumerate(spec) if a not in stack)))
        product = product._replace(rhs=jax.ShapeDtypeStruct(product.rhs.shape, product.rhs.dtype, sharding=one))
    return slot_refusals(*product, sparsity)


def put_site(
    layer: Layer, sparsity: Sparsity, backend: str, seed: Any, axes: tuple[int, ...] | None = None
) -> None:  # fmt: skip
    """Install the sparse product in a layer, as a site, or restore Flax's dense one if there is nothing to prune.

    Args:
      layer: The layer.
      sparsity: What it prunes.
      backend: The backend, as in `Recipe`.
      seed: The seed of its random numbers.
      axes: The stacking axes of the weight, if the caller named them.
    """
    if sparsity == Sparsity():
        if layer.site is not None:
            setattr(layer.module, layer.door.name, nnx.static(layer.door.plain))
        return
    stack = axes if axes in layer.stacks else layer.stack
    assert stack is not None
    site = Site(layer.path, sparsity, layer.door.product, backend, len(layer.declared), stack)
    setattr(layer.module, layer.door.name, nnx.data(site))
    if sites.needs_key(sparsity):
        site.words = nnx.data(_variable(layer, _words(layer, seed), state=False))
    if sites.depends_on_step(sparsity) or sites.needs_key(sparsity):
        site.time = nnx.data(_variable(layer, times(layer, 0, 0), state=False))
    if sites.has_state(sparsity):
        product, operand = layer.example(1), layer.operand
        assert product is not None
        assert operand is not None
        make = partial(sparsity.init, contract=operand.contract, out=operand.other, ctx=Ctx(random.words(0)))
        site.ranks = tuple(leaf.ndim for leaf in jax.tree.leaves(jax.eval_shape(make, product.rhs)))
        site.state = nnx.data(jax.tree.map(partial(_variable, layer, state=True), _new_state(layer)))


def _words(layer: Layer, seed: Any) -> UInt32[Array, "..."]:
    """Return the random words of every layer of a stack, two per layer, reshaped to the weight's rank."""
    words = sites.site_words(seed, layer.path, tuple(layer.module.kernel.shape[a] for a in layer.stack))
    words = words.reshape(*words.shape, *(1,) * (len(layer.declared) - 1))
    return jnp.moveaxis(words, range(len(layer.stack)), layer.stack)


def times(layer: Layer, step: Any, micro: Any) -> Int32[Array, "..."]:
    """Return step and micro-step for every layer of a stack, reshaped to the weight's rank."""
    kernel, stack = layer.module.kernel, layer.stack
    own = [a for a in range(kernel.ndim) if a not in stack]
    now = jnp.stack([jnp.asarray(step, jnp.int32), jnp.asarray(micro, jnp.int32)])
    now = now.reshape([2 if a == own[0] else 1 for a in range(kernel.ndim)])
    return jnp.broadcast_to(now, [kernel.shape[a] if a in stack else now.shape[a] for a in range(kernel.ndim)])


def _variable(layer: Layer, value: jax.Array, state: bool) -> NM:
    """Return a variable that is sharded like the weight.

    Stacking axes keep the weight's sharding. In a state, so do all axes of the same size as the weight's.
    """
    kernel, rank = layer.module.kernel, value.ndim
    shared = range(min(rank, kernel.ndim))
    alike = [a for a in shared if a in layer.stack or (state and value.shape[a] == kernel.shape[a])]
    names = lambda spec: tuple(spec[a] if a in alike and a < len(spec) else None for a in range(rank))
    metadata, sharding = kernel.get_metadata(), getattr(kernel.get_value(), "sharding", None)
    if isinstance(sharding, NamedSharding) and not isinstance(value, jax.core.Tracer):
        value = jax.device_put(value, NamedSharding(sharding.mesh, PartitionSpec(*names(sharding.spec))))
    if not metadata.get("out_sharding"):
        return NM(value)
    mesh = {"mesh": metadata["mesh"]} if "mesh" in metadata else {}
    return NM(value, out_sharding=names(metadata["out_sharding"]), **mesh)


# ---- time and state ----


def set_step(model: Any, step: Any, micro: Any = 0) -> None:
    """Set the step of every layer, and update its state if the schedule says so.

    Call it once for every (micro-)step, outside the loss. Inside `jit`, one program serves all steps.

    Args:
      model: The model.
      step: The step of training, an integer. Schedules and random numbers depend on it.
      micro: The micro-step of gradient accumulation, an integer. Every micro-step has its own random numbers; held
        masks stay.

    Raises:
      TypeError: ``step`` or ``micro`` is not an integer.
      ValueError: The model was made outside the current trace, as when the loss calls this.

    >>> import nmjax as nm
    >>> model = nm.nnx.sparsify(nnx.Linear(8, 4, rngs=nnx.Rngs(0)), nm.Recipe(((".*", "mvue(2,4)"),)))
    >>> nm.nnx.set_step(model, 3)
    >>> print(model.dot_general.time[...].ravel())
    [3 0]
    """
    for name, value in (("step", step), ("micro", micro)):
        if not jnp.issubdtype(jnp.result_type(value), jnp.integer):
            raise TypeError(f"set_step: {name} must be an integer, got {value!r}.")
    for layer, site in _with_sites(model):
        try:
            if site.time is not None:
                write(site.time, times(layer, step, micro))
            if site.state is not None:
                with jax.named_scope(site.name):
                    _write_state(site, _new_state(layer, site.states(), step))
        except errors.TraceContextError as error:
            raise ValueError(
                f"{layer.path}: set_step was called in another trace than the one in which the model was made. Call it "
                "outside the function that is differentiated, or merge a copy there: "
                "nnx.merge(graphdef, state, copy=True)."
            ) from error


def reset_state(model: Any) -> None:
    """Recompute scales and held masks from the current weights.

    Call it after you load weights into a sparse model.

    Args:
      model: The model.

    >>> import nmjax as nm
    >>> model = nm.nnx.sparsify(nnx.Linear(8, 4, rngs=nnx.Rngs(0)), nm.Recipe(((".*", "s_ste(2,4)"),)))
    >>> model.kernel[...] = jnp.tile(jnp.array([1., 2., 3., 4.]), 2)[:, None] * jnp.ones((1, 4))
    >>> nm.nnx.reset_state(model)
    >>> nm.nnx.scales(model)
    {'': Array(2.2, dtype=float32)}
    """
    for layer, site in _with_sites(model):
        if site.state is not None:
            time = site.arrays()[1]
            _write_state(site, _new_state(layer, step=0 if time is None else time.reshape(-1)[0]))


def reseed(model: Any, seed: Any) -> None:
    """Change the seed of a model's random numbers. Compiled programs stay valid.

    Args:
      model: The model.
      seed: An int, a `jax.random.key` or two uint32 words.

    >>> import nmjax as nm
    >>> model = nm.nnx.sparsify(nnx.Linear(8, 4, rngs=nnx.Rngs(0)), nm.Recipe(((".*", "mvue(2,4)"),)))
    >>> before = model.dot_general.words[...]
    >>> nm.nnx.reseed(model, seed=1)
    >>> bool((model.dot_general.words[...] == before).any())
    False
    """
    for layer, site in _with_sites(model):
        if site.words is not None:
            write(site.words, _words(layer, seed))


def _with_sites(model: Any) -> list[tuple[Layer, Site]]:
    return [(layer, layer.site) for layer in layers(model) if layer.site is not None]


def _write_state(site: Site, state: Mapping[str, Any]) -> None:
    for variable, value in zip(site.variables(), jax.tree.leaves(state), strict=True):
        write(variable, value)


def _new_state(layer: Layer, state: Any = None, step: Any = 0) -> Any:
    """Return the state of a layer or a stack at a step: updated from ``state``, or initialised if that is None."""
    site, operand = layer.site, layer.operand
    assert site is not None
    assert operand is not None
    static = {"sparsity": site.sparsity, "operand": operand, "stack": layer.stack, "ranks": site.ranks}
    return _states(layer.weight(), site.arrays()[0], state, step, **static)


# Jitted so that eager calls compile once per layer shape.
@partial(jax.jit, static_argnames=("sparsity", "operand", "stack", "ranks"))
def _states(
    weight: jax.Array, words: jax.Array | None, state: Any, step: Any,
    *, sparsity: Sparsity, operand: Operand, stack: tuple[int, ...], ranks: tuple[int, ...],
) -> Any:  # fmt: skip
    def one(weight: jax.Array, words: jax.Array | None, state: Any) -> Any:
        make = sparsity.init if state is None else sparsity.refresh
        own = None if state is None else unpadded(state, ranks)
        ctx = Ctx(None if words is None else words.reshape(2), step, own)
        states = make(weight, contract=operand.contract, out=operand.other, ctx=ctx)
        return jax.tree.map(lambda v: v.reshape(*v.shape, *(1,) * (weight.ndim - v.ndim)), states)

    return over(stack, one)(weight, words, state)
