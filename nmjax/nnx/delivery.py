"""A model made sparse, its time and its state."""

import math
import re
from functools import partial

import jax
import jax.numpy as jnp
from flax import errors, nnx
from jax.sharding import NamedSharding, PartitionSpec

from nmjax.core import random
from nmjax.core.context import Ctx
from nmjax.nnx.doors import Layer, layers, over
from nmjax.nnx.variables import NM, Site, in_rank, write
from nmjax.products import sites
from nmjax.products.pruning import Operand
from nmjax.products.rule import refusals
from nmjax.products.slot import SLOTS
from nmjax.products.sparsity import Sparsity
from nmjax.pruners import identity
from nmjax.recipes.table import Recipe


def sparsify(model, recipe: Recipe, seed=0, stack: int | tuple[int, ...] | None = None):
    """The model itself, with every layer's product pruned as the recipe says. Whatever sparsity it had is replaced.

    Scales and masks are made of the weights that the model has now: load weights before, or call `reset_state` after.
    ``stack`` is needed where shapes leave open which axes of a kernel stack layers.
    """
    if not isinstance(recipe, Recipe):
        raise TypeError(
            f"sparsify takes a Recipe, such as Recipe(((r'.*', 's_ste(2,4)'),)), got {type(recipe).__name__}."
        )
    chosen = [(layer, recipe(layer.path)) for layer in layers(model)]
    recipe.check(layer.path for layer, _ in chosen)
    if not chosen and any(sparsity != Sparsity() for _, sparsity in recipe.rules):
        raise ValueError(
            f"{type(model).__name__} has no nnx.Linear, LinearGeneral, Einsum or Conv, so nothing would be pruned. A product written "
            "out by hand is nm.einsum(..., sparsity=...)."
        )
    told = (stack,) if isinstance(stack, int) else stack
    wrapped = _wrapped(model)
    problems = [
        (layer.path, text)
        for layer, sparsity in chosen
        if sparsity != Sparsity()
        for text in _problems(layer, sparsity, told, wrapped)
    ]
    if problems:
        raise ValueError(
            "The recipe cannot be carried out:\n"
            + "\n".join(f"  {path or 'the model'}: {text}" for path, text in problems)
            + "\nRules that leave these layers dense, to be put first:\n"
            + "\n".join(f'  (r"{re.escape(path)}", "dense"),' for path in dict.fromkeys(path for path, _ in problems))
        )
    for layer, sparsity in chosen:
        furnish(layer, sparsity, recipe.backend, seed, told)
    return model


def _wrapped(model) -> set[int]:
    """The layers whose kernels something else changes between parameter and product."""
    wrappers = [m for _, m in nnx.iter_modules(model) if isinstance(m, (nnx.WeightNorm, nnx.SpectralNorm))]
    return {id(m.layer_instance) for m in wrappers}


def _problems(layer: Layer, sparsity: Sparsity, told, wrapped) -> list[str]:
    """What stands in the way of a sparsity, in words."""
    kernel, there = layer.module.kernel.get_value(), getattr(layer.module, layer.door.name)
    if isinstance(kernel, jax.ShapeDtypeStruct) and sites.remembers(sparsity):
        return [
            "its kernel is a shape. Make the model and its sparsity abstract together: nnx.eval_shape(lambda: sparsify(...))."
        ]
    if there not in (None, layer.door.plain) and layer.site is None or getattr(layer.module, "dot_general_cls", None):
        return [f"its {layer.door.name} is the model's own, {there!r}, and would be lost."]
    if id(layer.module) in wrapped:
        return ["what stands around it normalises its kernel, so that what is pruned would not be what is multiplied."]
    if type(kernel).__name__ == "BatchTracer" and sites.needs_key(sparsity):
        return [
            "it is being made inside vmap, where all layers of a stack would draw alike: call sparsify on the whole stack."
        ]
    try:
        ways = layer.stacks
    except ValueError as error:
        return [str(error).partition(": ")[2]]
    if told not in ways and len(ways) > 1:
        ways = " or ".join(f"stack={way[0] if len(way) == 1 else way}" for way in ways)
        return [
            f"the axes of its kernel, of shape {kernel.shape}, leave open which stacks layers. Say so: sparsify(..., {ways})."
        ]
    product = layer.example(tokens=math.lcm(*(getattr(sparsity, slot).block for slot in SLOTS)))
    if product is None:
        if sparsity.fwd_rhs == sparsity.dlhs_rhs == identity:
            return []
        return ["its einsum_str comes with the call: give it to the constructor."]
    stack, sharding = told if told in ways else ways[0], getattr(kernel, "sharding", None)
    if isinstance(sharding, NamedSharding):
        spec = [*sharding.spec, *[None] * (kernel.ndim - len(sharding.spec))]
        one = NamedSharding(sharding.mesh, PartitionSpec(*(s for a, s in enumerate(spec) if a not in stack)))
        product = product._replace(rhs=jax.ShapeDtypeStruct(product.rhs.shape, product.rhs.dtype, sharding=one))
    return [text for _, text in refusals(*product, sparsity)]


def furnish(layer: Layer, sparsity: Sparsity, backend: str, seed, told=None) -> None:
    """Put a site into a layer's door, or what Flax has there."""
    if sparsity == Sparsity():
        if layer.site is not None:
            setattr(layer.module, layer.door.name, nnx.static(layer.door.plain))
        return
    stack, rank = told if told in layer.stacks else layer.stack, len(layer.declared)
    site = Site(layer.path, sparsity, layer.door.product, backend, rank, stack, None, None, None, ())
    setattr(layer.module, layer.door.name, nnx.data(site))
    if sites.needs_key(sparsity):
        site.words = nnx.data(_variable(layer, _words(layer, seed), data=False))
    if sites.timed(sparsity) or sites.needs_key(sparsity):
        site.time = nnx.data(_variable(layer, times(layer, 0, 0), data=False))
    if sites.remembers(sparsity):
        operand, first = layer.operand, Ctx(random.words(0))
        make = partial(sparsity.init, contract=operand.contract, out=operand.other, ctx=first)
        site.ranks = tuple(leaf.ndim for leaf in jax.tree.leaves(jax.eval_shape(make, layer.example(1).rhs)))
        site.state = nnx.data(jax.tree.map(partial(_variable, layer, data=True), _remade(layer)))


def _words(layer: Layer, seed) -> jax.Array:
    """Two words for every layer of a stack, in the kernel's rank."""
    words = sites.site_words(seed, layer.path, tuple(layer.module.kernel.shape[a] for a in layer.stack))
    words = words.reshape(*words.shape, *(1,) * (len(layer.declared) - 1))
    return jnp.moveaxis(words, range(len(layer.stack)), layer.stack)


def times(layer: Layer, step, micro) -> jax.Array:
    """The time for every layer of a stack, in the kernel's rank."""
    kernel, stack = layer.module.kernel, layer.stack
    own = [a for a in range(kernel.ndim) if a not in stack]
    now = jnp.stack([jnp.asarray(step, jnp.int32), jnp.asarray(micro, jnp.int32)])
    now = now.reshape([2 if a == own[0] else 1 for a in range(kernel.ndim)])
    return jnp.broadcast_to(now, [kernel.shape[a] if a in stack else now.shape[a] for a in range(kernel.ndim)])


def _variable(layer: Layer, value: jax.Array, data: bool) -> NM:
    """Held where the kernel is: sharded as it is along the axes that both have, which are those of the stack at least."""
    kernel = layer.module.kernel
    alike = [
        a for a in range(min(value.ndim, kernel.ndim)) if a in layer.stack or data and value.shape[a] == kernel.shape[a]
    ]
    names = lambda spec: tuple(spec[a] if a in alike and a < len(spec) else None for a in range(value.ndim))
    told, sharding = kernel.get_metadata(), getattr(kernel.get_value(), "sharding", None)
    if isinstance(sharding, NamedSharding) and not isinstance(value, jax.core.Tracer):
        value = jax.device_put(value, NamedSharding(sharding.mesh, PartitionSpec(*names(sharding.spec))))
    if not told.get("out_sharding"):
        return NM(value)
    return NM(value, out_sharding=names(told["out_sharding"]), **({"mesh": told["mesh"]} if "mesh" in told else {}))


# ---- time and state ----


def set_step(model, step, micro=0) -> None:
    """Tell every layer the time, and renew what its method renews then: once a (micro-)step, outside the loss, inside jit.

    ``micro`` counts the micro-steps of gradient accumulation. Their noise differs; their masks do not.
    """
    for name, value in (("step", step), ("micro", micro)):
        if not jnp.issubdtype(jnp.result_type(value), jnp.integer):
            raise TypeError(f"set_step: {name} is a whole number, got {value!r}.")
    for layer in _sparse(model):
        site = layer.site
        try:
            if site.time is not None:
                write(site.time, times(layer, step, micro))
            if site.state is not None:
                _write(site, _remade(layer, site.values(), step))
        except errors.TraceContextError as error:
            raise ValueError(
                f"{layer.path}: set_step was called in another trace than the one in which the model was made. Call it outside "
                "the function that is differentiated, or merge a copy there: nnx.merge(graphdef, state, copy=True)."
            ) from error


def reset_state(model) -> None:
    """Make scales and held masks anew, of the weights that the model has now."""
    for layer in _sparse(model):
        if layer.site.state is not None:
            time = layer.site.held()[1]
            _write(layer.site, _remade(layer, step=0 if time is None else time.reshape(-1)[0]))


def reseed(model, seed) -> None:
    """Other noise, in the same compiled program."""
    for layer in _sparse(model):
        if layer.site.words is not None:
            write(layer.site.words, _words(layer, seed))


def _sparse(model) -> list[Layer]:
    return [layer for layer in layers(model) if layer.site is not None]


def _write(site: Site, values) -> None:
    for variable, value in zip(site.variables(), jax.tree.leaves(values), strict=True):
        write(variable, value)


def _remade(layer: Layer, state=None, step=0):
    """The state of a layer or stack: that of a step, out of the one before; or made anew."""
    site = layer.site
    static = {"sparsity": site.sparsity, "operand": layer.operand, "stack": layer.stack, "ranks": site.ranks}
    return _states(layer.weight(), site.held()[0], state, step, **static)


@partial(
    jax.jit, static_argnames=("sparsity", "operand", "stack", "ranks")
)  # outside jit, once for all layers of a shape
def _states(weight, words, state, step, *, sparsity: Sparsity, operand: Operand, stack, ranks):
    def one(weight, words, state):
        make = sparsity.init if state is None else sparsity.refresh
        held = None if state is None else in_rank(state, ranks)
        ctx = Ctx(None if words is None else words.reshape(2), step, held)
        states = make(weight, contract=operand.contract, out=operand.other, ctx=ctx)
        return jax.tree.map(lambda v: v.reshape(*v.shape, *(1,) * (weight.ndim - v.ndim)), states)

    return over(stack, one)(weight, words, state)
