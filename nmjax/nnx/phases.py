"""Phases of training: a model whose products are those of the phase that contains a step."""

import operator
from typing import Any, TypeVar

import jax

from nmjax.nnx.layers import layers
from nmjax.nnx.variables import SparsityState
from nmjax.products.fit import assuming_features_fit

Model = TypeVar("Model")


def phase(model: Model, step: int | None) -> Model:
    """Put a model into the phase of training that contains a step.

    The steps at which `decay` has faded and at which `stages` change are known before training. A program for one phase
    may use a sparse kernel or fewer rows where a program for all steps cannot. Values, gradients and state stay the
    same. Call it outside of `jit` and before `set_step`. A new phase is a new graph of the model, so `nnx.jit` traces
    the step again. Calls that do not change the phase do nothing.

    Args:
      model: The model.
      step: A step of training. The model is valid until the next phase begins. None: it is valid for all steps, as
        `sparsify` makes it.

    Returns:
      The model itself.

    Raises:
      TypeError: ``step`` is not an integer that is known before the call.
      ValueError: The model has no sparse layers, no method in it has phases, ``step`` is negative, or the call is
        inside of `jit`.

    >>> from flax import nnx
    >>> import nmjax as nm
    >>> recipe = nm.Recipe(((".*", "mdgf(2,4,linear(1,0,700))"),))
    >>> model = nm.nnx.sparsify(nnx.Linear(8, 4, rngs=nnx.Rngs(0)), recipe)
    >>> nm.nnx.plan(model).phases
    (700,)
    >>> nm.nnx.phase(model, 700).nm_state.now
    y_w=ste(mse(2,4))
    """
    step = None if step is None else _known_step(step)
    with_state = [layer.state for layer in layers(model) if layer.state is not None]
    changing = [(state, phases) for state in with_state if (phases := assuming_features_fit(state.sparsity).phases)]
    if not with_state:
        raise ValueError("phase: the model has no sparse layers. Call nm.nnx.sparsify first.")
    if not changing and step is not None:
        raise ValueError(
            "phase: no method in the model has a phase that ends at a step known before training, so there is nothing "
            "to change. Leave the call out."
        )
    values = [
        v.get_value() for state, _ in changing for v in (state.words, state.time, *state.variables) if v is not None
    ]
    if any(isinstance(value, jax.core.Tracer) for value in values):
        raise ValueError("phase was called inside of jit. Call it outside, where the step is a Python int.")
    for state, phases in changing:
        state.phase = None if step is None else max(start for start in (0, *phases) if start <= step)
    return model


def _known_step(step: Any) -> int:
    """Return a step as an int, and refuse one that is traced, no integer or negative."""
    try:
        known = operator.index(step)
    except TypeError:  # a tracer, too
        raise TypeError(
            f"phase: step must be an integer that is known before the call, got {step!r}. Call nm.nnx.phase outside of "
            "jit with a Python int."
        ) from None
    if known < 0:
        raise ValueError(f"phase: step must be at least 0, got {known}.")
    return known


def check_phase(state: SparsityState, step: Any) -> None:
    """Raise an error if a step is known and lies in another phase than the model's.

    Args:
      state: The sparsity state of a layer.
      step: The step, which may be traced.
    """
    if state.phase is None or isinstance(step, jax.core.Tracer):
        return
    starts = (0, *assuming_features_fit(state.sparsity).phases)
    if max((start for start in starts if start <= int(step)), default=0) != state.phase:
        raise ValueError(
            f"{state.name}: set_step({int(step)}), but the model is in the phase that begins at step {state.phase}. "
            f"Call nm.nnx.phase(model, {int(step)}) first."
        )
