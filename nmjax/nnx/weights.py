"""What becomes of a model's weights: final forms, masks, scales."""

from collections import defaultdict
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from nmjax import sites
from nmjax.metrics import Pattern
from nmjax.nnx.delivery import furnish
from nmjax.nnx.layers import Layer, layers, over
from nmjax.nnx.site import in_rank, write
from nmjax.pruners import identity
from nmjax.recipes import Recipe
from nmjax.sparsity import along, slot_ctx
from nmjax.typing import Ctx, Pruner


def harden(model):
    """A copy with every weight in its method's final form, as inference will use it, and no sites but for activations.

    A weight is pruned in the dtype that its layer computes in, and keeps its own. `patterns` says which come out n:m.
    """
    hard = nnx.clone(model)
    users, done = _users(hard), set()
    for layer in layers(hard):
        if layer.site is None:
            continue
        p, rest = _final(layer)
        kernel = layer.module.kernel
        if p != identity and id(kernel) not in done:
            _check_shared(layer, p, users[id(kernel)])
            write(kernel, _final_weight(layer))
            done.add(id(kernel))
            if getattr(layer.module, "mask", None) is not None:
                layer.module.mask = None  # the kernel has it now
        furnish(layer, rest, layer.site.backend, 0)
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
            if isinstance(value, nnx.Variable):
                users[id(value)].append(((*path, name), known.get(id(module)) if name == "kernel" else None))
    return users


def _check_shared(layer: Layer, p: Pruner, users: list) -> None:
    """Refuse a weight that others use in another form: there is one array to harden."""
    form = lambda of: (of.sparsity.fwd_rhs.final, of.operand, of.dtype, of.stack)
    for path, other in users:
        if other is None or form(other) != form(layer):
            theirs = "as it is" if other is None or other.site is None else f"by {other.sparsity.fwd_rhs}"
            raise ValueError(
                f"{layer.path}: fwd_rhs={layer.sparsity.fwd_rhs} prunes a weight of shape {layer.module.kernel.shape} that "
                f"{'/'.join(map(str, path))} uses too, {theirs} or along other axes: it has no single final form. Give both one "
                f'rule, or leave this one dense: (r"{layer.path}", "dense").'
            )


def patterns(model) -> dict[str, Pattern | None]:
    """What `harden` makes of every weight that has a layer, by its path: n:m along the axes of its product, or None, dense."""
    found = {}
    for layer in layers(model):
        pattern = _final(layer)[0].pattern
        own = [a for a in range(layer.module.kernel.ndim) if a not in layer.stack]
        axes = () if pattern is None else tuple(own[a] for a in layer.operand.contract)
        found[f"{layer.path}/kernel".lstrip("/")] = None if pattern is None else Pattern(*pattern, axes)
    return found


def masks(model, recipe: Recipe | None = None) -> nnx.State:
    """What the forward masks keep at this step: a tree like the parameters', with True for what has no mask.

    With a recipe, the masks that it would make, as to compare the flips of a dense run with.
    """
    kept = {}
    for layer in layers(model):
        p = layer.sparsity.fwd_rhs if recipe is None else recipe(layer.path).fwd_rhs
        if p != identity:
            kept[id(layer.module.kernel)] = _mask(layer, p, own=recipe is None)
    paths = {path: kept[i] for i, users in _users(model).items() if i in kept for path, _ in users}
    flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return nnx.from_flat_state([(path, v.replace(paths.get(path, jnp.array(True)))) for path, v in flat])


def _mask(layer: Layer, p: Pruner, own: bool) -> jax.Array:
    site = layer.site if own else None
    time = None if site is None or site.time is None else site.time[...].reshape(-1)[0]
    words = None if site is None or site.words is None else site.words[...]

    def one(weight, words, state):
        held = None if state is None else in_rank(state, site.ranks)
        ctx = slot_ctx(Ctx(None if words is None else words.reshape(2), 0 if time is None else time, held), "fwd_rhs")
        kept, back = along(f"{layer.path}: fwd_rhs={p}", p, weight, layer.operand, ctx, p.mask)
        return back(kept)

    return over(layer.stack, one)(layer.weight(), words, None if site is None else site.values())


def scales(model) -> dict[str, jax.Array]:
    """The frozen scales of S-STE, by layer; of a stack one for every layer."""
    found = {}
    for layer in layers(model):
        if layer.site is not None and layer.site.state is not None:
            for value in jax.tree.leaves(layer.site.values().get("fwd_rhs")):
                if jnp.issubdtype(value.dtype, jnp.floating):
                    found[layer.path] = value.reshape([value.shape[a] for a in layer.stack])
    return found
