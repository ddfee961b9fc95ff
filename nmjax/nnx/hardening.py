"""What becomes of a model's weights: final forms, masks, scales."""

import re
from collections import defaultdict
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from nmjax.analysis.metrics import Pattern
from nmjax.core import random
from nmjax.core.context import Ctx
from nmjax.core.pruner import Pruner
from nmjax.nnx.delivery import furnish
from nmjax.nnx.doors import Layer, layers, over
from nmjax.nnx.variables import Site, in_rank, one_ctx, write
from nmjax.products import sites
from nmjax.products.pruning import along
from nmjax.products.slot import slot_context
from nmjax.pruners import identity
from nmjax.recipes.table import Recipe


def harden(model):
    """A copy with every weight in its method's final form, as inference will use it, and no sites but for activations.

    A weight is pruned in the dtype that its layer computes in, and keeps its own: what a bfloat16 weight is in a product
    with float32 inputs, it cannot hold. `patterns` says which come out n:m; each layer that was sparse says so too, as its
    attribute ``hardened``.
    """
    hard = nnx.clone(model)
    users, done = _users(hard), set()
    for layer in layers(hard):
        if layer.site is None:
            continue
        p, rest = _final(layer)
        kernel = layer.module.kernel
        if p != identity and id(kernel) not in done:
            _check_shared(layer, users[id(kernel)])
            write(kernel, _final_weight(layer))
            done.add(id(kernel))
            if getattr(layer.module, "mask", None) is not None:
                layer.module.mask = None  # the kernel has it now
        pattern = _pattern(layer, p)
        furnish(layer, rest, layer.site.backend, 0, layer.stack)
        layer.module.hardened = nnx.static(pattern)
    return hard


def _final(layer: Layer):
    try:
        return sites.final(layer.sparsity)
    except ValueError as error:
        raise ValueError(f"{layer.path}: {error}") from error


def _final_weight(layer: Layer) -> jax.Array:
    site = layer.site
    static = {"sparsity": site.sparsity, "operand": layer.operand, "stack": layer.stack, "ranks": site.ranks}
    return _final_weights(layer.weight(), site.values(), **static).astype(layer.module.kernel.dtype)


@partial(
    jax.jit, static_argnames=("sparsity", "operand", "stack", "ranks")
)  # whose divisions round as those of a compiled model
def _final_weights(weight, state, *, sparsity, operand, stack, ranks):
    one = lambda w, state: sites.final_weight(sparsity, w, operand, None if state is None else in_rank(state, ranks))
    return over(stack, one)(weight, state)


def _users(model) -> dict[int, list]:
    """(path, layer or None) of all that use a Variable, by its identity."""
    known, users = {id(layer.module): layer for layer in layers(model)}, defaultdict(list)
    for path, module in nnx.iter_modules(model):
        for name, value in vars(module).items():
            for leaf in jax.tree.leaves(value, is_leaf=lambda v: isinstance(v, (nnx.Variable, nnx.Module))):
                if isinstance(leaf, nnx.Variable):
                    users[id(leaf)].append(((*path, name), known.get(id(module)) if name == "kernel" else None))
    return users


def _check_shared(layer: Layer, users: list) -> None:
    """Refuse a weight that others use in another form: there is one array to harden."""
    mask = lambda of: getattr(of.module, "mask", None)
    form = lambda of: (
        of.sparsity.fwd_rhs,
        of.operand,
        of.dtype,
        of.stack,
        mask(of) if mask(of) is None else id(mask(of)),
    )
    for path, other in users:
        alike = (
            other is not None and form(other) == form(layer) and _same_values(other.site.values(), layer.site.values())
        )
        if not alike:
            theirs = "as it is" if other is None or other.site is None else f"by {other.sparsity.fwd_rhs}"
            raise ValueError(
                f"{layer.path}: fwd_rhs={layer.sparsity.fwd_rhs} prunes a weight of shape {layer.module.kernel.shape} that "
                f"{'/'.join(map(str, path))} uses too, {theirs}, along other axes or with other state: it has no single final "
                f'form. Give both one rule, or leave this one dense: (r"{re.escape(layer.path)}", "dense").'
            )


def _same_values(a, b) -> bool:
    """Whether states are alike, as far as their values are at hand."""
    pairs = list(zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))
    return all(
        isinstance(v, jax.core.Tracer) or isinstance(w, jax.core.Tracer) or bool((v == w).all()) for v, w in pairs
    )


def _pattern(layer: Layer, p: Pruner) -> Pattern | None:
    """n:m along the axes of the kernel that the product contracts; or None, dense."""
    own = [a for a in range(layer.module.kernel.ndim) if a not in layer.stack]
    return None if p.pattern is None else Pattern(*p.pattern, tuple(own[a] for a in layer.operand.contract))


def patterns(model) -> dict[str, Pattern | None]:
    """What `harden` makes, or made, of every weight that has a layer, by its path: n:m along the axes that its product
    contracts, or None, dense."""
    found = {}
    for layer in layers(model):
        made = getattr(layer.module, "hardened", None)
        found[f"{layer.path}/kernel".lstrip("/")] = (
            made if layer.site is None or made else _pattern(layer, _final(layer)[0])
        )
    return found


def masks(model, recipe: Recipe | None = None) -> nnx.State:
    """What the forward masks keep at this step: a tree like the parameters', with True for what has no mask.

    With a recipe, the masks that it would end with, made of the weights at hand: for a dense run, to compare flips with.
    """
    found, kept = list(layers(model)), {}
    if recipe is not None:
        recipe.check(layer.path for layer in found)
    for layer in found:
        p = layer.sparsity.fwd_rhs if recipe is None else recipe(layer.path).fwd_rhs.final
        if p != identity:
            kept[id(layer.module.kernel)] = called(layer, p, p.mask, layer.site if recipe is None else None)
    paths = {path: kept[i] for i, users in _users(model).items() if i in kept for path, _ in users}
    flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return nnx.from_flat_state([(path, v.replace(paths.get(path, jnp.array(True)))) for path, v in flat])


def called(layer: Layer, p: Pruner, call, site: Site | None) -> jax.Array:
    """What a pruner, or its mask, makes of a weight as the layer's product sees it; with what its site holds, if any."""
    label = f"{layer.path}: fwd_rhs={p}"

    def one(weight, words, time, state):
        ctx = Ctx(random.words(0), 0)
        if site is not None:
            ctx = one_ctx(words, time, state, site.ranks)
        elif p.remembers:
            ctx = ctx.replace(state={"fwd_rhs": along(label, p, weight, layer.operand, ctx, p.init)[0]})
        result, back = along(label, p, weight, layer.operand, slot_context(ctx, "fwd_rhs"), call)
        return back(result)

    return over(layer.stack, one)(layer.weight(), *((None, None, None) if site is None else site.held()))


def scales(model) -> dict[str, jax.Array]:
    """The frozen scales of S-STE, by layer; of a stack one for every layer."""
    found = {}
    for layer in layers(model):
        if layer.site is not None and layer.site.state is not None:
            for value in jax.tree.leaves(layer.site.values().get("fwd_rhs")):
                if jnp.issubdtype(value.dtype, jnp.floating):
                    found[layer.path] = value.reshape([value.shape[a] for a in layer.stack])
    return found
