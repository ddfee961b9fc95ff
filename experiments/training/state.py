"""The state of a run at a step; and the state of several runs, which lie along one axis of it."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

import nmjax as nm


class State(NamedTuple):
    """Training state at a step."""

    step: jax.Array
    seed: jax.Array
    params: Any
    rest: Any  # all that is no parameter: means of BatchNorm; noise, time, masks and scales of nmjax
    opt: Any
    ema: Any  # averages of params and of statistics such as means of BatchNorm, and a copy of the other rest; or ()


RUNS: Any = State(None, 0, 0, 0, 0, 0)  # the axis of the runs in a state of several; they are all at one step


def stack(*states: State) -> State:
    """Return the state of several runs, made of their own states."""
    runs = [state._replace(step=()) for state in states]
    return jax.tree.map(lambda *values: jnp.stack(values), *runs)._replace(step=states[0].step)


def part(state: State, number: jax.Array) -> State:
    """Return the state of one of several runs."""
    return jax.tree.map(lambda value: value[number], state._replace(step=()))._replace(step=state.step)


def reseeded(state: State, seed: jax.Array, fresh: Any, model: nnx.Module) -> State:
    """Return a state with the noise of another seed: in dropout and in random pruning.

    Args:
      state: The state.
      seed: The other seed.
      fresh: The rest of the first state of a run with that seed.
      model: The sparse model, as shapes.
    """
    kinds = nnx.split(model, nnx.Param, ...)[2]

    def chosen(path: tuple, variable: nnx.Variable, old: jax.Array, new: jax.Array) -> jax.Array:
        words = isinstance(variable, nm.nnx.SparsityVariable) and nm.metrics.path(path).endswith("words")
        return new if words or isinstance(variable, nnx.RngKey) else old

    is_leaf = lambda value: isinstance(value, nnx.Variable)
    take = lambda rest: jax.tree_util.tree_map_with_path(chosen, kinds, rest, fresh, is_leaf=is_leaf)
    ema = (state.ema[0], take(state.ema[1])) if state.ema else state.ema
    return state._replace(seed=seed, rest=take(state.rest), ema=ema)


def averaged(averages: Any, values: Any, model: nnx.Module, decay: float, step: jax.Array) -> Any:
    """Return the averages after a step. The first steps weigh more, so that the initial values are soon forgotten.

    Parameters and statistics are averaged. What sparse layers hold, such as S-STE's scale, is copied: when a stage
    begins, the scale is computed anew, and an average would lag behind.

    Args:
      averages: The averages before the step, of ``(params, rest)``.
      values: The parameters and the rest after the step.
      model: The sparse model, as shapes.
      decay: The share of an old average that a late step keeps.
      step: The number of the step.
    """
    rate = 1 - jnp.minimum(decay, (1.0 + step) / (10.0 + step))

    def average(variable: nnx.Variable, old: jax.Array, new: jax.Array) -> jax.Array:
        if isinstance(variable, nm.nnx.SparsityVariable) or not jnp.issubdtype(new.dtype, jnp.floating):
            return new
        return (old + rate * (new - old)).astype(new.dtype)

    kinds = nnx.split(model, nnx.Param, ...)[1:]
    return jax.tree.map(average, kinds, averages, values, is_leaf=lambda v: isinstance(v, nnx.Variable))
