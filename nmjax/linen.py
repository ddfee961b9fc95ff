"""flax.linen layers made sparse, through the arguments that they have for it: ``dot_general_cls`` of Dense and
DenseGeneral, ``qkv_`` and ``out_dot_general_cls`` of attention, ``conv_general_dilated_cls`` of Conv.

What a method needs lies in the collection ``nm``: words for noise, the time, state such as held masks; for many methods
no arrays at all. It goes wherever ``params`` goes: into ``apply``, and through ``nn.scan`` and ``nn.vmap`` along the same
axis, ``variable_axes={"params": 0, "nm": 0}``.

Time is data. `set_step` is the only writer of time and state; the forward pass reads. The noise of a step is a function of
(seed, path, place in the stack, step, micro-step, slot), whatever came before. A path is the parameters', from the model
that ran ``init``: several models that train together want a seed each.

>>> from flax import linen as nn
>>> layer = nn.Dense(8, dot_general_cls=dot_cls(Recipe(((r".*", "s_ste(2,4)"),))))
>>> variables = set_step(layer.init(jax.random.key(0), jnp.ones((4, 16))), step=3)
>>> layer.apply(variables, jnp.ones((4, 16))).shape
(4, 8)
>>> bool(groups.is_nm(harden(variables)["params"]["kernel"], 2, 4, axis=0))
True
"""

from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn, struct
from flax.core import meta

from nmjax.core import groups, random
from nmjax.core.context import Ctx
from nmjax.core.value import Value
from nmjax.products import operations, rule, sites
from nmjax.products.pruning import Operand
from nmjax.products.sparsity import Sparsity
from nmjax.pruners import identity
from nmjax.recipes.table import Recipe

_GOES = (
    "'nm' goes wherever 'params' goes: model.apply({'params': params, 'nm': variables['nm']}, x), and in nn.scan and nn.vmap "
    "variable_axes={'params': 0, 'nm': 0}, or the axis of 'params'. A stack made by hand is told by "
    "flax.core.meta.add_axis(variables['nm'], 0, {})."
)


@dataclass(frozen=True, repr=False)
class dot_cls(Value):
    """What ``dot_general_cls`` takes: the products of every layer prune as the recipe says for its path."""

    recipe: Recipe
    seed: int = 0

    def __post_init__(self):
        super().__post_init__()
        if not isinstance(self.recipe, Recipe):
            raise TypeError(f"a Recipe is wanted, such as Recipe(((r'.*', 's_ste(2,4)'),)), got {self.recipe!r}.")

    def __call__(self) -> nn.Module:
        return Product(self.recipe, self.seed, operations.as_dot)


@dataclass(frozen=True, repr=False)
class conv_cls(dot_cls):
    """What ``conv_general_dilated_cls`` takes."""

    def __call__(self) -> nn.Module:
        return Product(self.recipe, self.seed, operations.as_conv)


# ---- what a layer keeps ----


class Made(NamedTuple):
    """What a layer was when its variable was made; of a stack, one layer."""

    path: str
    sparsity: Sparsity
    seed: int
    operand: Operand  # of the kernel
    shape: tuple[int, ...]  # of the kernel
    dtype: Any  # that its product computes in
    ranks: tuple[int, ...] = ()  # of words, time and state


class Site(struct.PyTreeNode):
    """The variable of a layer or of a stack. Its arrays have the rank of the kernel, with ones at their end, so that
    whatever axis stacks the one stacks the other."""

    made: Made = struct.field(pytree_node=False)
    sparsity: Sparsity = struct.field(pytree_node=False)  # what its products do: as made, or what hardening left
    stack: tuple[int, ...] = struct.field(pytree_node=False, default=())  # the axes of layers, the outermost first
    words: Any = None
    time: Any = None  # step and micro-step
    state: Any = None

    def own(self) -> tuple[Any, Any, Any]:
        """One layer's words, time and state, in their own shapes."""
        arrays, tree = jax.tree.flatten((self.words, self.time, self.state))
        ranked = [*zip(arrays, self.made.ranks, strict=False)]  # none after hardening
        if off := [v.shape for v, rank in ranked if v.ndim != max(rank, len(self.made.shape))]:
            raise ValueError(f"one layer is reached with the variables of a stack, of shape {off[0]}. {_GOES}")
        return jax.tree.unflatten(tree, [v.reshape(v.shape[:rank]) for v, rank in ranked])

    def holding(self, *own) -> "Site":
        """The way back from `own`."""
        padded = lambda v: v.reshape(*v.shape, *(1,) * (len(self.made.shape) - v.ndim))
        words, time, state = jax.tree.map(padded, own)
        return self.replace(words=words, time=time, state=state)

    def peeled(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """How many layers lie on each axis of the stack, and the shape of one layer's array."""
        one = list(shape)
        return tuple(one.pop(axis) for axis in self.stack), tuple(one)


class Box(Site, meta.AxisMetadata):
    """A site as Flax's transforms see it, told of every axis that they stack layers on."""

    def unbox(self):
        return Site(**vars(self))

    def replace_boxed(self, val):
        return Box(**vars(val))

    def add_axis(self, index, params):
        site = self.replace(stack=(index, *self.stack))
        if self.words is None:
            return site
        sizes, one = site.peeled(self.words.shape)  # every layer has noise of its own
        words = sites.site_words(self.made.seed, self.made.path, sizes).reshape(*sizes, *one)
        for depth, axis in reversed([*enumerate(site.stack)]):
            words = jnp.moveaxis(words, depth, depth + groups.position(words.ndim - depth, axis))
        return site.replace(words=words)

    def remove_axis(self, index, params):
        if self.stack[:1] != (index,):
            found = f"'nm' is stacked along {self.stack or 'no axis'}, and is to be sliced along {index}"
            raise ValueError(f"{self.made.path}: {found}. {_GOES}")
        return self.replace(stack=self.stack[1:])


@contextmanager
def _named(path: str):
    """Errors that say which layer."""
    try:
        yield
    except (TypeError, ValueError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"{path or 'the layer'}: {error}") from error


# ---- what stands in a layer's argument ----


class Product(nn.Module):
    """A layer's product, pruned."""

    recipe: Recipe
    seed: int
    as_op: Callable

    @nn.compact
    def __call__(self, lhs, rhs, *args, **options):
        op = self.as_op(lhs, rhs, *args, **options)
        path, operand = "/".join(self.path[:-1]), op.operands(lhs.ndim, rhs.ndim)["fwd_rhs"]
        with _named(path):
            site = self._site(Made(path, self.recipe(path), self.seed, operand, rhs.shape, rhs.dtype), rhs)
            words, time, state = site.own()
        step, micro = (0, 0) if time is None else time
        key = None if words is None else sites.site_key(words, micro)
        ctx = Ctx(key, step, state)
        return rule.bilinear(op, lhs, rhs, site.sparsity, ctx, self.recipe.backend, name=path or "the layer")

    def _site(self, made, rhs):
        known = self.has_variable("nm", "site")
        if known or self.is_initializing():
            if not known and not self.is_mutable_collection("nm"):
                raise ValueError(f"init cannot make its variable in the collection 'nm'. {_GOES}")
            site = self.variable("nm", "site", lambda: self._new(made, rhs)).value
            was, now = (site.made.sparsity, site.made.seed), (self.recipe(site.made.path), self.seed)
            if was != now:
                raise ValueError(
                    f"its variable in 'nm' was made for {was[0]} with seed {was[1]}, and the model has {now[0]} with seed {now[1]}. "
                    "Make it anew: reset_state({'params': params, 'nm': model.init(key, x)['nm']})."
                )
            return site
        if any(needs(made.sparsity) for needs in (sites.needs_key, sites.timed, sites.remembers)):
            raise ValueError(f"{made.sparsity} reads the collection 'nm', which is not here. {_GOES}")
        return Site(made, made.sparsity)

    def _new(self, made, rhs):
        """The variable of one layer."""
        sparsity, layer = made.sparsity, self.parent
        plain = isinstance(layer, nn.Module) and layer.has_variable("params", "kernel") and self.name == "Product_0"
        if sparsity != Sparsity() and (not plain or getattr(layer, "mask", None) is not None):
            raise ValueError(
                f"set_step and harden look for what {sparsity} prunes in the parameter 'kernel', used as it is by one product "
                f"(Product_0, here {self.name}), without a mask of the layer's own. Give each weight a layer such as nn.Dense, or "
                f'leave this one dense: (r"{made.path}", "dense").'
            )
        words = sites.site_words(made.seed, made.path) if sites.needs_key(sparsity) else None
        time = jnp.zeros(2, jnp.int32) if sites.timed(sparsity) or words is not None else None
        state = None
        if sites.remembers(sparsity):
            # Drawn by init's key, as the kernel is: layers that will be stacked have one path, and so the same words here.
            key = None if words is None else random.words(self.make_rng("params"))
            state = _states(made, sparsity.init, rhs, Ctx(key))
        ranks = tuple(v.ndim for v in jax.tree.leaves((words, time, state)))
        return Box(made._replace(ranks=ranks), sparsity).holding(words, time, state)


# ---- time, state and final forms ----


def set_step(variables, step, micro=0):
    """The variables at a step, their state renewed where its method says so: once a (micro-)step, outside the loss.

    ``micro`` counts the micro-steps of gradient accumulation. Their noise differs; their masks do not.
    """
    now = jnp.stack([jnp.asarray(step, jnp.int32), jnp.asarray(micro, jnp.int32)])
    return _of_layers(variables, partial(_renewed, now=now))


def reset_state(variables):
    """The variables with scales and held masks made anew, of the weights that they have now."""
    return _of_layers(variables, partial(_renewed, now=None))


def harden(variables):
    """The variables with every weight in its method's final form, as inference will use it: the model prunes it no more.

    A weight is pruned as it is stored, in the dtype that its layer computed in when it was made, and keeps its own.
    """
    return _of_layers(variables, _hardened)


def paths(variables) -> tuple[str, ...]:
    """The paths of all layers that the recipe decides for: ``recipe.check(paths(variables))`` refuses rules without any."""
    is_site = lambda v: isinstance(v, Site)
    return tuple(site.made.path for site in jax.tree.leaves(variables.get("nm"), is_leaf=is_site))


def _renewed(site, weight, now):
    """A site at another time; or, where that is None, with new state at its own."""
    words, time, state = site.own()
    step = now[0] if now is not None else 0 if time is None else time[0]
    if state is not None:
        make = site.sparsity.init if now is None else site.sparsity.refresh
        state = _states(site.made, make, weight, Ctx(words, step, state))
    return site.holding(words, time if now is None or time is None else now, state), weight


def _states(made, make, weight, ctx):
    return make(weight.astype(made.dtype), contract=made.operand.contract, out=made.operand.other, ctx=ctx)


def _hardened(site, weight):
    made, (p, rest) = site.made, sites.final(site.sparsity)
    if p != identity:
        pruned = sites.final_weight(site.sparsity, weight.astype(made.dtype), made.operand, site.own()[2])
        weight = pruned.astype(weight.dtype)
    return site.replace(sparsity=rest, words=None, time=None, state=None), weight


def _of_layers(variables, change):
    """The variables with the site and the weight of every sparse layer as ``change`` makes them."""
    if "params" not in variables or "nm" not in variables:
        raise ValueError(f"the collections 'params' and 'nm' are wanted in one dict, got {sorted(variables)}.")
    whole = lambda v: isinstance(v, (Site, meta.AxisMetadata))
    flat, tree = jax.tree_util.tree_flatten_with_path(variables, is_leaf=whole)
    leaves = {tuple(getattr(part, "key", part) for part in path): leaf for path, leaf in flat}
    for name, site in [*leaves.items()]:
        if not isinstance(site, Site) or site.sparsity == Sparsity():
            continue
        kernel = ("params", *name[1:-2], "kernel")  # beside the product, which has the variable
        with _named("/".join(name[1:-2])):
            made, weight, each = site.made, meta.unbox(leaves[kernel]), change
            if weight.ndim != len(made.shape + site.stack) or site.peeled(weight.shape)[1] != made.shape:
                was = f"not {made.shape} stacked along {site.stack or 'no axis'}, as its variable in 'nm' is"
                raise ValueError(f"its weight has shape {weight.shape}, {was}. {_GOES}")
            for axis in reversed(site.stack):
                each = jax.vmap(each, axis, axis)
            leaves[name], weight = each(site, weight)
        leaves[kernel] = meta.replace_boxed(leaves[kernel], weight)
    return tree.unflatten(leaves.values())
