"""Sparsity for flax.linen layers, through arguments that they have for it.

`dot_cls` is for ``dot_general_cls`` of Dense and DenseGeneral, and for ``qkv_`` and ``out_dot_general_cls`` of
attention. `conv_cls` is for ``conv_general_dilated_cls`` of Conv.

A layer keeps what its method needs in the collection ``nm``: noise words, the time, and state such as held masks. Many
methods need no arrays. Pass the collection wherever ``params`` goes: into ``apply``, and through ``nn.scan`` and
``nn.vmap`` along the same axis, ``variable_axes={"params": 0, "nm": 0}``.

Time is data: one compiled program serves all steps. Only `set_step` and `reset_state` write it and the state. The noise
of a step is a function of seed, path, place in the stack, step, micro-step and slot. The path is that of the parameters
in the model that ran ``init``. Models that train together need different seeds.

>>> from flax import linen as nn
>>> import nmjax as nm
>>> layer = nn.Dense(8, dot_general_cls=nm.linen.dot_cls(nm.Recipe(((r".*", "s_ste(2,4)"),))))
>>> variables = nm.linen.set_step(layer.init(jax.random.key(0), jnp.ones((4, 16))), step=3)
>>> layer.apply(variables, jnp.ones((4, 16))).shape
(4, 8)
"""

from collections.abc import Callable, Iterator, Mapping
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
from nmjax.products.operations import Operation
from nmjax.products.pruning import Operand
from nmjax.products.sparsity import Sparsity
from nmjax.pruners import identity
from nmjax.recipes.table import Recipe

_PASS_NM = (
    "Pass 'nm' wherever 'params' goes: model.apply({'params': params, 'nm': variables['nm']}, x), and in nn.scan and "
    "nn.vmap variable_axes={'params': 0, 'nm': 0}, or the axis of 'params'. For a stack made by hand, write "
    "flax.core.meta.add_axis(variables['nm'], 0, {})."
)


@dataclass(frozen=True, repr=False)
class dot_cls(Value):
    """A value for ``dot_general_cls``: each layer that has it prunes as a recipe says for the layer's path.

    Args:
      recipe: The sparsity of each layer, by its path.
      seed: The seed of all noise, an int.

    Raises:
      TypeError: ``recipe`` is no Recipe.

    >>> from flax import linen as nn
    >>> import nmjax as nm
    >>> layer = nn.Dense(8, dot_general_cls=nm.linen.dot_cls(nm.Recipe(((".*", "ste(2,4)"),)), seed=1))
    >>> variables = layer.init(jax.random.key(0), jnp.ones((4, 16)))
    >>> sorted(variables), layer.apply(variables, jnp.ones((4, 16))).shape
    (['nm', 'params'], (4, 8))
    """

    recipe: Recipe
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.recipe, Recipe):
            raise TypeError(f"expected a Recipe, such as Recipe(((r'.*', 's_ste(2,4)'),)), got {self.recipe!r}.")

    def __call__(self) -> nn.Module:
        """Return the module of a pruned dot product. Flax calls it."""
        return Product(self.recipe, self.seed, operations.as_dot)


@dataclass(frozen=True, repr=False)
class conv_cls(dot_cls):
    """A value for ``conv_general_dilated_cls`` of Conv. Arguments as of `dot_cls`.

    >>> from flax import linen as nn
    >>> import nmjax as nm
    >>> recipe = nm.Recipe(((".*", "ste(2,4)"),))
    >>> layer = nn.Conv(8, (3, 3), conv_general_dilated_cls=nm.linen.conv_cls(recipe))
    >>> layer.init_with_output(jax.random.key(0), jnp.ones((1, 6, 6, 4)))[0].shape
    (1, 6, 6, 8)
    """

    def __call__(self) -> nn.Module:
        """Return the module of a pruned convolution. Flax calls it."""
        return Product(self.recipe, self.seed, operations.as_conv)


# ---- the variable of a layer ----


class Origin(NamedTuple):
    """The layer that a variable was made for. In a stack it is one layer.

    Attributes:
      path: Its path in the model.
      sparsity: What it prunes.
      seed: The seed of its noise.
      operand: Where the axes of its kernel lie in its product.
      shape: The shape of its kernel.
      dtype: The dtype that its product computes in.
      ranks: The ranks of words, time and state before padding.
    """

    path: str
    sparsity: Sparsity
    seed: int
    operand: Operand
    shape: tuple[int, ...]
    dtype: Any
    ranks: tuple[int, ...] = ()


class SiteVariable(struct.PyTreeNode):
    """The variable of a layer, or of a stack of layers, in the collection "nm".

    Its arrays are padded with axes of size 1 to the rank of the kernel, so that an axis that stacks kernels stacks them
    too.

    Attributes:
      origin: The layer that it was made for.
      sparsity: What the layer's products prune: as at the start, or what `harden` left.
      stack: The axes that stack layers, the outermost first.
      words, time, state: Noise words, (step, micro-step), and the state of the weight slots; None if not needed.
    """

    origin: Origin = struct.field(pytree_node=False)
    sparsity: Sparsity = struct.field(pytree_node=False)
    stack: tuple[int, ...] = struct.field(pytree_node=False, default=())
    words: Any = None
    time: Any = None
    state: Any = None

    def own(self) -> tuple[Any, Any, Any]:
        """Return one layer's words, time and state without padding."""
        arrays, tree = jax.tree.flatten((self.words, self.time, self.state))
        ranked = [*zip(arrays, self.origin.ranks, strict=False)]  # none after hardening
        stacked = [v.shape for v, rank in ranked if v.ndim != max(rank, len(self.origin.shape))]
        if stacked:
            raise ValueError(f"one layer got the variables of a whole stack, of shape {stacked[0]}. {_PASS_NM}")
        return jax.tree.unflatten(tree, [v.reshape(v.shape[:rank]) for v, rank in ranked])

    def holding(self, words: Any, time: Any, state: Any) -> "SiteVariable":
        """Return the variable with other words, time and state, as `own` returns them."""
        padded = lambda v: v.reshape(*v.shape, *(1,) * (len(self.origin.shape) - v.ndim))
        words, time, state = jax.tree.map(padded, (words, time, state))
        return self.replace(words=words, time=time, state=state)

    def unstacked(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the sizes of the stacking axes of an array, and the shape of one layer's array."""
        one = list(shape)
        return tuple(one.pop(axis) for axis in self.stack), tuple(one)


class Box(SiteVariable, meta.AxisMetadata[SiteVariable]):
    """A variable as Flax's transforms see it. They tell it of every axis that they stack layers on."""

    def unbox(self) -> SiteVariable:
        """Return the variable without the box."""
        return SiteVariable(**vars(self))

    def replace_boxed(self, val: Any) -> Any:
        """Return a box of another variable."""
        return Box(**vars(val))

    def add_axis(self, index: int, params: Any) -> "Box":
        """Return the variable of a stack along a new axis, with noise of its own for every layer."""
        del params
        site = self.replace(stack=(index, *self.stack))
        if self.words is None:
            return site
        sizes, one = site.unstacked(self.words.shape)
        words = sites.site_words(self.origin.seed, self.origin.path, sizes).reshape(*sizes, *one)
        for depth, axis in reversed([*enumerate(site.stack)]):
            words = jnp.moveaxis(words, depth, depth + groups.position(words.ndim - depth, axis))
        return site.replace(words=words)

    def remove_axis(self, index: int, params: Any) -> "Box":
        """Return the variable of one slice of a stack."""
        del params
        if self.stack[:1] != (index,):
            raise ValueError(
                f"{self.origin.path}: 'nm' is stacked along {self.stack or 'no axis'}, but the call slices it along "
                f"{index}. {_PASS_NM}"
            )
        return self.replace(stack=self.stack[1:])


@contextmanager
def _named(path: str) -> Iterator[None]:
    """Put the layer's path in front of errors."""
    try:
        yield
    except (TypeError, ValueError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"{path or 'the layer'}: {error}") from error


# ---- the module in a layer's argument ----


class Product(nn.Module):
    """The pruned product of a layer, as a module of the layer."""

    recipe: Recipe
    seed: int
    as_op: Callable[..., Operation]  # makes a value of the arguments of a call

    @nn.compact
    def __call__(self, lhs: jax.Array, rhs: jax.Array, *args: Any, **options: Any) -> jax.Array:
        """Return the pruned product of the operands."""
        op = self.as_op(lhs, rhs, *args, **options)
        path, operand = "/".join(self.path[:-1]), op.operands(lhs.ndim, rhs.ndim)["fwd_rhs"]
        with _named(path):
            site = self._site(Origin(path, self.recipe(path), self.seed, operand, rhs.shape, rhs.dtype), rhs)
            words, time, state = site.own()
        step, micro = (0, 0) if time is None else time
        key = None if words is None else sites.site_key(words, micro)
        ctx = Ctx(key, step, state)
        return rule.bilinear(op, lhs, rhs, site.sparsity, ctx, self.recipe.backend, name=path or "the layer")

    def _site(self, origin: Origin, rhs: jax.Array) -> SiteVariable:
        """Return the layer's variable. Make it if the model is initializing."""
        known = self.has_variable("nm", "site")
        if known or self.is_initializing():
            if not known and not self.is_mutable_collection("nm"):
                raise ValueError(f"init cannot make its variable in the collection 'nm'. {_PASS_NM}")
            site = self.variable("nm", "site", lambda: self._new(origin, rhs)).value
            before, now = (site.origin.sparsity, site.origin.seed), (self.recipe(site.origin.path), self.seed)
            if before != now:
                raise ValueError(
                    f"its variable in 'nm' was made for {before[0]} with seed {before[1]}, and the model has {now[0]} "
                    f"with seed {now[1]}. Make it again: "
                    "reset_state({'params': params, 'nm': model.init(key, x)['nm']})."
                )
            return site
        if any(needs(origin.sparsity) for needs in (sites.needs_key, sites.depends_on_step, sites.has_state)):
            raise ValueError(f"{origin.sparsity} reads the collection 'nm', which is missing. {_PASS_NM}")
        return SiteVariable(origin, origin.sparsity)

    def _new(self, origin: Origin, rhs: jax.Array) -> SiteVariable:
        """Return a new variable of one layer."""
        sparsity, layer = origin.sparsity, self.parent
        plain = isinstance(layer, nn.Module) and layer.has_variable("params", "kernel") and self.name == "Product_0"
        if sparsity != Sparsity() and (not plain or getattr(layer, "mask", None) is not None):
            raise ValueError(
                f"set_step and harden prune the parameter 'kernel' by {sparsity}. The layer must use it unchanged, "
                f"without a mask of its own, in one product, Product_0; this one is {self.name}. Give each weight a "
                f'layer such as nn.Dense, or leave this layer dense: (r"{origin.path}", "dense").'
            )
        words = sites.site_words(origin.seed, origin.path) if sites.needs_key(sparsity) else None
        time = jnp.zeros(2, jnp.int32) if sites.depends_on_step(sparsity) or words is not None else None
        state = None
        if sites.has_state(sparsity):
            # Draw by init's key, as the kernel is drawn. Layers that are stacked later have one path, so by their
            # words all of them would get the same state.
            key = None if words is None else random.words(self.make_rng("params"))
            state = _states(origin, sparsity.init, rhs, Ctx(key))
        ranks = tuple(v.ndim for v in jax.tree.leaves((words, time, state)))
        return Box(origin._replace(ranks=ranks), sparsity).holding(words, time, state)


# ---- time, state and final forms ----


def set_step(variables: Mapping[str, Any], step: Any, micro: Any = 0) -> Any:
    """Return the variables at a step, with due state renewed. Call it once a (micro-)step, outside the loss.

    Args:
      variables: The collections "params" and "nm" in one dict.
      step: The step of training, an integer. Schedules and noise read it.
      micro: The micro-step of gradient accumulation. Every micro-step has its own noise; masks stay.

    Raises:
      ValueError: A collection is missing, or "nm" is not stacked as "params" is.

    >>> import nmjax as nm
    >>> layer = nn.Dense(8, dot_general_cls=nm.linen.dot_cls(nm.Recipe(((".*", "mvue(2,4)"),))))
    >>> variables = nm.linen.set_step(layer.init(jax.random.key(0), jnp.ones((4, 16))), step=3)
    >>> print(variables["nm"]["Product_0"]["site"].time.ravel())
    [3 0]
    """
    now = jnp.stack([jnp.asarray(step, jnp.int32), jnp.asarray(micro, jnp.int32)])
    return _with_layers(variables, partial(_renewed, now=now))


def reset_state(variables: Mapping[str, Any]) -> Any:
    """Return the variables with scales and held masks made again from the current weights.

    Args:
      variables: As of `set_step`.

    >>> import nmjax as nm
    >>> layer = nn.Dense(1, dot_general_cls=nm.linen.dot_cls(nm.Recipe(((".*", "s_ste(2,4)"),))))
    >>> variables = layer.init(jax.random.key(0), jnp.ones((4, 4)))
    >>> variables["params"]["kernel"] = jnp.array([[1.], [2.], [3.], [4.]])
    >>> print(nm.linen.reset_state(variables)["nm"]["Product_0"]["site"].state["fwd_rhs"].ravel())
    [2.2]
    """
    return _with_layers(variables, partial(_renewed, now=None))


def harden(variables: Mapping[str, Any]) -> Any:
    """Return the variables with every weight in its final form, as inference uses it. The model prunes it no more.

    A weight is pruned in the dtype that its layer computed in at ``init``, and is stored in its own.

    Args:
      variables: As of `set_step`.

    Raises:
      ValueError: A weight is drawn again at every step, so it has no final form; or as of `set_step`.

    >>> import nmjax as nm
    >>> layer = nn.Dense(8, dot_general_cls=nm.linen.dot_cls(nm.Recipe(((".*", "ste(2,4)"),))))
    >>> hard = nm.linen.harden(layer.init(jax.random.key(0), jnp.ones((4, 16))))
    >>> bool(nm.groups.is_nm(hard["params"]["kernel"], 2, 4, axis=0))
    True
    """
    return _with_layers(variables, _hardened)


def paths(variables: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the paths of all layers. ``recipe.check(paths(variables))`` refuses rules that match no layer.

    Args:
      variables: Variables with the collection "nm".

    >>> import nmjax as nm
    >>> recipe = nm.Recipe(((".*", "ste(2,4)"),))
    >>> model = nn.Sequential([nn.Dense(8, dot_general_cls=nm.linen.dot_cls(recipe)), nn.relu])
    >>> nm.linen.paths(model.init(jax.random.key(0), jnp.ones((4, 16))))
    ('layers_0',)
    """
    is_site = lambda v: isinstance(v, SiteVariable)
    return tuple(site.origin.path for site in jax.tree.leaves(variables.get("nm"), is_leaf=is_site))


def _renewed(site: SiteVariable, weight: jax.Array, now: jax.Array | None) -> tuple[SiteVariable, jax.Array]:
    """Return a layer at another time; without a time, with new state at its own."""
    words, time, state = site.own()
    step: Any = 0
    if now is not None:
        step = now[0]
    elif time is not None:
        step = time[0]
    if state is not None:
        make = site.sparsity.init if now is None else site.sparsity.refresh
        state = _states(site.origin, make, weight, Ctx(words, step, state))
    if now is not None and time is not None:
        time = now
    return site.holding(words, time, state), weight


def _states(origin: Origin, make: Callable[..., Any], weight: jax.Array, ctx: Ctx) -> Any:
    return make(weight.astype(origin.dtype), contract=origin.operand.contract, out=origin.operand.other, ctx=ctx)


def _hardened(site: SiteVariable, weight: jax.Array) -> tuple[SiteVariable, jax.Array]:
    origin, (p, rest) = site.origin, sites.final(site.sparsity)
    if p != identity:
        pruned = sites.final_weight(site.sparsity, weight.astype(origin.dtype), origin.operand, site.own()[2])
        weight = pruned.astype(weight.dtype)
    return site.replace(sparsity=rest, words=None, time=None, state=None), weight


def _with_layers(
    variables: Mapping[str, Any], change: Callable[[SiteVariable, jax.Array], tuple[SiteVariable, jax.Array]]
) -> Any:
    """Return the variables with the site and the weight of every sparse layer as ``change`` makes them."""
    if "params" not in variables or "nm" not in variables:
        raise ValueError(f"expected the collections 'params' and 'nm' in one dict, got {sorted(variables)}.")
    whole = lambda v: isinstance(v, (SiteVariable, meta.AxisMetadata))
    flat, tree = jax.tree_util.tree_flatten_with_path(variables, is_leaf=whole)
    leaves = {tuple(getattr(part, "key", part) for part in path): leaf for path, leaf in flat}
    for name, site in [*leaves.items()]:
        if not isinstance(site, SiteVariable) or site.sparsity == Sparsity():
            continue
        kernel = ("params", *name[1:-2], "kernel")  # beside the Product that has the variable
        with _named("/".join(name[1:-2])):
            shape, weight, each = site.origin.shape, meta.unbox(leaves[kernel]), change
            if weight.ndim != len(shape + site.stack) or site.unstacked(weight.shape)[1] != shape:
                stacked = f"{shape} stacked along {site.stack or 'no axis'}"
                raise ValueError(f"its weight has shape {weight.shape}, but 'nm' is for {stacked}. {_PASS_NM}")
            for axis in reversed(site.stack):
                each = jax.vmap(each, axis, axis)
            leaves[name], weight = each(site, weight)
        leaves[kernel] = meta.replace_boxed(leaves[kernel], weight)
    return tree.unflatten(leaves.values())
