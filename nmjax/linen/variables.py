"""The variable of a layer in the collection "nm": what it was made for, noise words, time and state."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from flax.core import Scope, meta

from nmjax.core import groups, random
from nmjax.products.sparsity import Sparsity
from nmjax.programs import states
from nmjax.programs.parameters import Parameter, Step
from nmjax.programs.states import Origin, WeightState, first, stored
from nmjax.recipes.table import Recipe

PASS_NM = (
    "Pass 'nm' wherever 'params' goes: model.apply({'params': params, 'nm': variables['nm']}, x), and in nn.scan and "
    "nn.vmap variable_axes={'params': 0, 'nm': 0}, or the axis of 'params'. If a scan shares its weights, as nn.RNN "
    "does, write variable_broadcast=('params', 'nm'). For a stack made by hand, write "
    "flax.core.meta.add_axis(variables['nm'], 0, {})."
)


class WeightOrigin(NamedTuple):
    """The weight that a variable was made for. In a stack it is the weight of one layer.

    Attributes:
      weight: The weight, and what the layer prunes, without what ``else dense`` leaves empty.
      asked: The sparsity in the recipe.
      seed: The seed of its noise.
      shape: The shape of the weight; () if only a call that makes variables would know it.
      ranks: The ranks of words, time and state before padding.
    """

    weight: Origin
    asked: Sparsity
    seed: int
    shape: tuple[int, ...] = ()
    ranks: tuple[int, ...] = ()

    @property
    def path(self) -> str:
        """The path of its layer in the model."""
        return self.weight.parameter.path


class StateVariable(struct.PyTreeNode):
    """The variable of a layer, or of a stack of layers, in the collection "nm".

    Its arrays are padded with axes of size 1 to the rank of the weight, so that an axis that stacks weights stacks them
    too.

    Attributes:
      origin: The weight that it was made for.
      sparsity: What the layer's products prune: as at the start, or what `harden` left.
      stack: The axes that stack layers, the outermost first.
      words, time, state: Noise words, (step, micro-step), and the state of the weight slots; None if not needed.
    """

    origin: WeightOrigin = struct.field(pytree_node=False)
    sparsity: Sparsity = struct.field(pytree_node=False)
    stack: tuple[int, ...] = struct.field(pytree_node=False, default=())
    words: Any = None
    time: Any = None
    state: Any = None

    @property
    def axes(self) -> tuple[int, ...]:
        """The axes that stack layers, each as an axis of the whole array."""
        own = list(range(len(self.stack) + len(self.origin.shape)))
        return tuple(own.pop(axis) for axis in self.stack)

    @property
    def weight_state(self) -> WeightState:
        """The state, without padding.

        Raises:
          ValueError: The arrays are not stacked as ``stack`` says.
        """
        leaves, tree = jax.tree.flatten((self.words, self.time, self.state))
        ranked = [*zip(leaves, self.origin.ranks, strict=False)]  # none after hardening
        stacked = [v.shape for v, rank in ranked if v.ndim != len(self.stack) + max(rank, len(self.origin.shape))]
        if stacked:
            raise ValueError(f"one layer got the variables of a whole stack, of shape {stacked[0]}. {PASS_NM}")
        arrays = jax.tree.unflatten(tree, [first(v, self.axes, rank) for v, rank in ranked])
        steps = (Step("slice"),) * len(self.stack) + self.origin.weight.parameter.steps
        parameter = Parameter(self.origin.path, steps)
        return WeightState(self.origin.weight._replace(parameter=parameter, sparsity=self.sparsity), *arrays)

    @property
    def of_one_layer(self) -> WeightState:
        """The state of the layer that is called. A stack that was sliced by hand is not told of it."""
        return self.replace(stack=()).weight_state

    def holding(self, weight_state: WeightState) -> "StateVariable":
        """Return the variable with what a state prunes, and with its arrays."""
        rank = len(self.origin.shape)
        words, time, state = jax.tree.map(lambda v: stored(v, self.axes, rank), weight_state.arrays)
        return self.replace(sparsity=weight_state.origin.sparsity, words=words, time=time, state=state)

    def unstacked(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the sizes of the stacking axes of an array, and the shape of one layer's array."""
        one = list(shape)
        return tuple(one.pop(axis) for axis in self.stack), tuple(one)


class Box(StateVariable, meta.AxisMetadata[StateVariable]):
    """A variable as Flax's transforms see it. They tell it of every axis that they stack layers on."""

    def unbox(self) -> StateVariable:
        """Return the variable without the box."""
        return StateVariable(**vars(self))

    def replace_boxed(self, val: Any) -> Any:
        """Return a box of another variable."""
        return Box(**vars(val))

    def add_axis(self, index: int, params: Any) -> "Box":
        """Return the variable of a stack along a new axis, with noise of its own for every layer."""
        del params
        stacked = self.replace(stack=(index, *self.stack))
        if self.words is None:
            return stacked
        sizes, one = stacked.unstacked(self.words.shape)
        words = states.noise_words(self.origin.seed, self.origin.path, sizes).reshape(*sizes, *one)
        for depth, axis in reversed([*enumerate(stacked.stack)]):
            words = jnp.moveaxis(words, depth, depth + groups.position(words.ndim - depth, axis))
        return stacked.replace(words=words)

    def remove_axis(self, index: int, params: Any) -> "Box":
        """Return the variable of one slice of a stack."""
        del params
        if self.stack[:1] != (index,):
            raise ValueError(
                f"{self.origin.path or 'the model'}: 'nm' is stacked along {self.stack or 'no axis'}, but the call "
                f"slices it along {index}. {PASS_NM}"
            )
        return self.replace(stack=self.stack[1:])


@contextmanager
def named(path: str) -> Iterator[None]:
    """Put the layer's path in front of errors."""
    try:
        yield
    except (TypeError, ValueError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"{path or 'the layer'}: {error}") from error


def variable_of(scope: Scope, name: str, origin: WeightOrigin, weight: Any, recipe: Recipe) -> StateVariable:
    """Return the variable of a layer. Make it if the model is initializing.

    Args:
      scope: The scope of the layer.
      name: The name of the weight in the layer, and of the variable.
      origin: What the variable is, or would be, made for.
      weight: The weight.
      recipe: The recipe of the model. A known variable is compared with the rule for the path that it was made for.

    Raises:
      ValueError: It is missing and cannot be made, or was made for another recipe or seed; or the layer does not
        multiply by the weight that is stored.
    """
    if origin.weight.sparsity != Sparsity() and any("map_variables(" in part for part in scope.debug_path):
        raise ValueError(
            "nn.map_variables, or a norm of weights, is around it, so it multiplies by another weight than the one "
            f'that is stored, which set_step and harden read. Leave the layer dense: (r"{origin.path}", "dense").'
        )
    if not scope.has_variable("nm", name):
        if not scope.get_flag("initializing", False):
            if states.needs_arrays(origin.weight.sparsity):
                raise ValueError(f"{origin.weight.sparsity} reads the collection 'nm', which is missing. {PASS_NM}")
            return StateVariable(origin, origin.weight.sparsity)
        if not scope.is_mutable_collection("nm"):
            raise ValueError(f"init cannot make its variable in the collection 'nm'. {PASS_NM}")
        scope.put_variable("nm", name, _new(scope.push(f"nm {name}", reuse=True), origin, weight))
    variable = meta.unbox(scope.get_variable("nm", name))
    before, now = (variable.origin.asked, variable.origin.seed), (recipe(variable.origin.path), origin.seed)
    if before != now:
        raise ValueError(
            f"its variable in 'nm' was made for {before[0]} with seed {before[1]}, and the model has {now[0]} with "
            f"seed {now[1]}. Make it again: reset_state({{'params': params, 'nm': model.init(key, x)['nm']}})."
        )
    return variable


def _new(scope: Scope, origin: WeightOrigin, weight: jax.Array) -> StateVariable:
    """Return a new variable of one layer. What it draws is drawn in a scope of its own."""
    weight_state = WeightState.new(origin.weight, weight, origin.seed)
    if states.has_state(origin.weight.sparsity):
        # Draw by init's key, as the weight is drawn. Layers that are stacked later have one path, so by their words
        # all of them would get the same state.
        key = None if weight_state.words is None else random.words(scope.make_rng("params"))
        weight_state = replace(weight_state, state=WeightState(origin.weight, key).renewed(weight).state)
    ranks = tuple(v.ndim for v in jax.tree.leaves(weight_state.arrays))
    return Box(origin._replace(ranks=ranks), origin.weight.sparsity).holding(weight_state)
