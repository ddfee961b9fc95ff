"""What a sparse weight keeps beside its values, and its methods, in whatever framework it lies.

Products are computed in `nmjax.products.rule`; they only read its `context`.
"""

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from nmjax.analysis import metrics
from nmjax.analysis.metrics import Error, Weight
from nmjax.analysis.patterns import Pattern, violations
from nmjax.core import groups, layer_paths, random
from nmjax.core.context import Ctx
from nmjax.core.pruner import Pruner
from nmjax.kernels.targets import pruning_kernels
from nmjax.products.pruning import Operand, along, pruned
from nmjax.products.slot import SLOTS, WEIGHT, slot_context, slot_state
from nmjax.products.sparsity import Sparsity
from nmjax.programs.parameters import Parameter, moves
from nmjax.pruners import identity
from nmjax.pruners.by_gradient import unobserved

UNFINISHED = 0.01  # exponential decay never reaches its end: less than this share of the norm counts as the end


Unfinished = tuple[list[tuple[str, Pruner, int, float | None]], tuple[str, int | None], str | None]
"""Of a weight: its path, its pruner, a step and its `distance` then, if it is compared; its path and the step at which
the pruner of x is not final, see `inputs_unfinished`; its path if its pruner reads gradients and has seen none."""


class Origin(NamedTuple):
    """The weight that a state is for.

    Attributes:
      parameter: The path of its layer, or its own path, and the steps from the weight to the operand of its product.
      operand: The roles of the operand's axes in the product.
      sparsity: What the products prune: as at the start, or what hardening left.
      several: True if products take the weight in several layouts.
      elsewhere: The names of other operations that use it.
    """

    parameter: Parameter
    operand: Operand
    sparsity: Sparsity
    several: bool = False
    elsewhere: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The path, for errors."""
        return self.parameter.path or "the model"

    @property
    def unnamed(self) -> "Origin":
        """The origin without names. Weights that are alike compile once."""
        return self._replace(parameter=self.parameter._replace(path=""), elsewhere=())


@partial(jax.tree_util.register_dataclass, data_fields=["words", "time", "state"], meta_fields=["origin"])
@dataclass(frozen=True)
class WeightState:
    """The arrays that a method keeps for a weight, or for a stack. Each is None if the method does without it.

    The axes that stack weights are the first axes of all arrays, and of every ``value`` that a method takes.

    Attributes:
      origin: The weight.
      words: Two uint32 from which its noise is drawn.
      time: The step and the micro-step, int32.
      state: The state of the weight's slots, a tree of arrays.
    """

    origin: Origin
    words: Any = None
    time: Any = None
    state: Any = None

    @classmethod
    def new(cls, origin: Origin, value: Any, seed: Any) -> "WeightState":
        """Return the state of a weight at step 0, without what its slots keep. `renewed` computes that.

        Args:
          origin: What it is for.
          value: The weight, or its shape.
          seed: The seed of its noise, as in `noise_words`.
        """
        sparsity, stack = origin.sparsity, origin.parameter.stack(np.shape(value))
        words = noise_words(seed, origin.parameter.path, stack) if needs_key(sparsity) else None
        time = jnp.zeros((*stack, 2), jnp.int32) if needs_arrays(sparsity) else None
        return cls(origin, words, time)

    @property
    def arrays(self) -> tuple[Any, Any, Any]:
        """Words, time and state."""
        return self.words, self.time, self.state

    @property
    def step(self) -> Any:
        """The step: one for a whole stack. 0 if no time is kept."""
        return 0 if self.time is None else self.time[..., 0].max()

    # ---- time and state ----

    def at(self, value: Any, now: jax.Array, since: Any = None) -> "WeightState":
        """Return the state at a step. What is due of it is computed from the weight.

        Args:
          value: The weight. It is not read if there is no state.
          now: The step and the micro-step, as `moment` returns them.
          since: The step of the last call; None if its own time says it.
        """
        if self.time is None:
            return self
        state = self.state
        if state is not None:
            since = self.step if since is None else since
            state = _states(value, self.words, state, now[0], since, origin=self.origin.unnamed)
        return replace(self, time=jnp.array(jnp.broadcast_to(now, self.time.shape)), state=state)  # a buffer of its own

    def observed(self, value: Any, gradient: Any) -> "WeightState":
        """Return the state after the gradient of the weight at this step. Only pruners that read gradients change it.

        Args:
          value: The weight.
          gradient: Its gradient; None if there is none.

        Raises:
          ValueError: There is no gradient, or it has another shape.
        """
        if not reads_gradient(self.origin.sparsity):
            return self
        if gradient is None or np.shape(gradient) != np.shape(value):
            found = "none" if gradient is None else f"one of shape {np.shape(gradient)}"
            raise ValueError(
                f"observe: {self.origin.name} of shape {np.shape(value)} is pruned by its gradient, "
                f"{self.origin.sparsity}, and gradients has {found}. Pass those of all parameters."
            )
        origin, step = self.origin.unnamed, self.step
        return replace(self, state=_states(value, self.words, self.state, step, step, gradient, origin=origin))

    def renewed(self, value: Any) -> "WeightState":
        """Return the state with what the slots keep computed from the weight."""
        if not has_state(self.origin.sparsity):
            return self
        state = _states(value, self.words, None, self.step, None, origin=self.origin.unnamed)
        return replace(self, state=state)

    def at_micro(self, micro: jax.Array) -> "WeightState":
        """Return the state at another micro-step. Nothing is due."""
        if self.time is None:
            return self
        step = self.time[..., :1]
        time = jnp.concatenate([step, jnp.broadcast_to(micro.astype(step.dtype), step.shape)], -1)
        return replace(self, time=time)

    # ---- the weight ----

    def now(self, value: Any) -> jax.Array:
        """Return the weight as its forward product uses it at this step."""
        return self._called(value, self.origin.sparsity.y_w)

    def mask(self, value: Any) -> jax.Array:
        """Return the mask of the weight at this step.

        Raises:
          TypeError: The pruner has no mask, because it does not only keep or drop.
        """
        return self._called(value, self.origin.sparsity.y_w.mask)

    def _called(self, value: Any, call: Callable[..., jax.Array], back: bool = True) -> jax.Array:
        """Call a pruner, or its mask, on the weight as the product gets it. ``back`` gives its layout to the result."""
        origin, p = self.origin, self.origin.sparsity.y_w

        def one(w: jax.Array, words: Any, time: Any, state: Any) -> jax.Array:
            ctx = slot_context(context(words, time, state), "y_w")
            result, restore = along(f"{origin.name}: y_w={p}", p, w, origin.operand, ctx, call)
            return restore(result)

        return origin.parameter.apply(one, value, *self.arrays, back=back)

    def measure(self, value: Any) -> Weight:
        """Measure what pruning does to the weight at this step. A stack counts as one."""
        origin, p = self.origin, self.origin.sparsity.y_w
        stacked = len(origin.parameter.stack(np.shape(value)))
        whole, kept = origin.parameter.apply(lambda w: w, value), self._called(value, p, back=False)
        return metrics.weight(p, whole, kept, tuple(stacked + axis for axis in origin.operand.contract))

    @property
    def scale(self) -> jax.Array | None:
        """The frozen scale of S-STE, one for every weight of a stack; None if there is none."""
        stacked = 0 if self.time is None else self.time.ndim - 1
        leaves = jax.tree.leaves((self.state or {}).get("y_w"))
        scales = [v for v in leaves if jnp.issubdtype(v.dtype, jnp.floating) and v.ndim == stacked]  # norms have more
        return scales[-1] if scales else None

    # ---- the final form ----

    def form(self, value: Any) -> tuple[Pruner, Sparsity]:
        """Return the pruner that hardens the weight, and the sparsity of every product after that.

        Raises:
          ValueError: The weight has no single final form.
        """
        origin, sparsity = self.origin, self.origin.sparsity
        try:
            final = sparsity.y_w.final, sparsity.only(y_x=sparsity.y_x.final)
        except ValueError as error:
            raise ValueError(f"{origin.name}: {error}") from error
        if final[0] != identity and (origin.several or origin.elsewhere):
            others = ", ".join(origin.elsewhere)
            by = f"it also goes into {others}" if others else "products take it in several layouts"
            raise ValueError(
                f"{origin.name}: y_w={sparsity.y_w} prunes a weight of shape {np.shape(value)} that has no "
                f'single final form, because {by}. Leave it dense: (r"{origin.parameter.path}", "dense").'
            )
        return final

    def hardened(self, value: Any) -> "tuple[Any, WeightState]":
        """Return the weight in its final form, as inference uses it, and its state after that."""
        p, rest = self.form(value)
        if p != identity:
            value = _final(value, self.state, origin=self.origin.unnamed)
        return value, WeightState(self.origin._replace(sparsity=rest))

    def pattern(self, value: Any) -> Pattern | None:
        """Return the pattern of the hardened weight along its own axes; None if it ends dense.

        Raises:
          ValueError: The weight has no final form, or its groups lie along no axes of it, because it is reshaped.
        """
        pattern, origin = self.form(value)[0].facts.pattern, self.origin
        if pattern is None:
            return None
        axes = origin.parameter.contracted(np.shape(value), origin.operand.contract)
        if not all(isinstance(axis, int) for axis in axes):
            raise ValueError(
                f"{origin.name}: the layer reshapes its weight of shape {np.shape(value)} before its product, so that "
                "its groups lie along no axes of it. Use violations, which reshapes it too."
            )
        return Pattern(*pattern, axes)

    def broken(self, value: Any) -> jax.Array | None:
        """Return the number of groups that break the pattern of the hardened weight; None if it ends dense."""
        pattern = self.form(value)[0].facts.pattern
        if pattern is None:
            return None
        promised = Pattern(*pattern, self.origin.operand.contract)
        return self.origin.parameter.apply(lambda w: violations(w, promised), value).sum()

    def unfinished(self, value: Any, final: Any) -> Unfinished:
        """Return what `warn_unfinished` takes: how far the weight is from its final form, and what its inputs say."""
        path, sparsity = self.origin.parameter.path, self.origin.sparsity
        step, inputs = compared_at(sparsity.y_w, self.time), (path, inputs_unfinished(sparsity, self.time))
        state = slot_state(self.state, "y_w")
        known = not any(isinstance(v, jax.core.Tracer) for v in jax.tree.leaves(state))
        blind = path if known and unobserved(sparsity.y_w.final, sparsity.y_w.final_state(state)) else None
        if step is None or isinstance(final, jax.core.Tracer):
            return [], inputs, blind
        return [(path, sparsity.y_w, step, distance(self.now(value), final))], inputs, blind


def context(words: Any, time: Any, state: Any) -> Ctx:
    """Return the context of a product, given the words, time and state of one weight."""
    step, micro = (0, 0) if time is None else time
    return Ctx(None if words is None else noise_key(words, micro), step, state)


# Compiled, so that divisions round as in a compiled program.
@partial(jax.jit, static_argnames="origin")
def _states(
    value: jax.Array, words: Any, state: Any, step: Any, since: Any, gradient: Any = None, *, origin: Origin
) -> Any:
    """Return state at a step, made from that of an earlier step; without that, new state."""
    operand = origin.operand
    axes = {"contract": operand.contract, "out": operand.other, "batch": operand.batch}

    def one(w: jax.Array, words: Any, state: Any, gradient: Any) -> Any:
        make: Callable[..., Any] = origin.sparsity.init if state is None else origin.sparsity.refresh
        ctx = Ctx(words, step, state, since=since, gradient=gradient, kernels=pruning_kernels("auto"))
        return make(w, **axes, ctx=ctx)

    if gradient is not None:
        moved = origin.parameter._replace(steps=moves(origin.parameter.steps))  # in its own dtype
        gradient = moved.apply(lambda g: g, gradient)
    return origin.parameter.apply(one, value, words, state, gradient)


@partial(jax.jit, static_argnames="origin")
def _final(value: jax.Array, state: Any, *, origin: Origin) -> jax.Array:
    one = lambda w, state: final_weight(origin.sparsity, w, origin.operand, state)
    return origin.parameter.apply(one, value, state, back=True)


def gradient_errors(
    gradients: Callable[[Callable[[WeightState], WeightState]], dict[str, jax.Array]], draws: int
) -> dict[str, Error]:
    """Return the error of the gradients of weights, by their paths.

    Args:
      gradients: A function that returns the gradients, given what to do with every state.
      draws: The number of draws. Each is a micro-step of its own.
    """

    def forward_only(state: WeightState) -> WeightState:
        whole = state.origin.sparsity
        only = whole.only(y_x=whole.y_x, y_w=whole.y_w)
        return replace(state, origin=state.origin._replace(sparsity=only))

    exact = gradients(forward_only)
    drawn = lax.map(lambda draw: gradients(lambda state: state.at_micro(draw)), jnp.arange(draws))
    return {path: metrics.error(drawn[path], exact[path]) for path in drawn}


# ---- arrays that are stored with the rank of the weight, so that what stacks weights stacks them too ----


def first(v: jax.Array, stack: tuple[int, ...], rank: int | None = None) -> jax.Array:
    """Return an array with the axes that stack weights first.

    Args:
      v: The array as it is stored.
      stack: Its axes that stack weights, the outermost first.
      rank: The rank of one weight's array before it was padded with axes of size 1.
    """
    if stack != tuple(range(len(stack))):
        v = jnp.moveaxis(v, stack, range(len(stack)))
    return v if rank is None else v.reshape(v.shape[: len(stack) + rank])


def stored(v: jax.Array, stack: tuple[int, ...], rank: int) -> jax.Array:
    """Return an array as it is stored, given it as `first` returns it.

    Args:
      v: The array.
      stack: As in `first`.
      rank: The rank of one weight, to which the array is padded with axes of size 1.
    """
    v = v.reshape(*v.shape, *(1,) * (len(stack) + rank - v.ndim))
    return v if stack == tuple(range(len(stack))) else jnp.moveaxis(v, range(len(stack)), stack)


def stored_axes(axes: Iterable[int], stack: tuple[int, ...], rank: int) -> tuple[int, ...]:
    """Return where axes of an array that has the axes of ``stack`` first lie as it is stored, with ``rank`` axes."""
    order = (*stack, *(axis for axis in range(rank) if axis not in stack))
    return tuple(order[axis] for axis in axes)


# ---- noise and time ----


def noise_words(seed: Any, path: str, stack: tuple[int, ...] = ()) -> jax.Array:
    """Return the words from which a layer draws its noise.

    Args:
      seed: A `jax.random.key`, an int seed, or two uint32 words.
      path: The layer's path.
      stack: The sizes of the axes along which such layers are stacked. Every layer of a stack has words of its own.

    Returns:
      An array of shape ``(*stack, 2)``.
    """
    words = random.named(random.words(seed), path)
    for size in stack:
        each = lambda w, n=size: jax.vmap(random.fold, (None, 0))(w, jnp.arange(n))
        words = jax.vmap(each)(words.reshape(-1, 2)).reshape(*words.shape[:-1], size, 2)
    return words


def noise_key(words: jax.Array, micro: Any) -> jax.Array:
    """Return the key of a micro-step. Products fold in the step and the slot."""
    return random.fold(words, micro)


def needs_key(sparsity: Sparsity) -> bool:
    """Return True if a layer draws random numbers: to prune, or to renew its state."""
    return any(sparsity.slots[name].pruner.facts.needs_key for name in SLOTS)


def depends_on_step(sparsity: Sparsity) -> bool:
    """Return True if a layer's products read the step."""
    return any(sparsity.slots[name].pruner.facts.depends_on_step for name in SLOTS)


def has_state(sparsity: Sparsity) -> bool:
    """Return True if a layer keeps state."""
    return any(sparsity.slots[name].pruner.facts.has_state for name in WEIGHT)


def reads_gradient(sparsity: Sparsity) -> bool:
    """Return True if a layer chooses by the gradient of its weight."""
    return any(sparsity.slots[name].pruner.facts.reads_gradient for name in WEIGHT)


def needs_arrays(sparsity: Sparsity) -> bool:
    """Return True if a layer keeps the time, which tells when state was renewed, and perhaps words and state."""
    return needs_key(sparsity) or depends_on_step(sparsity) or has_state(sparsity)


def moment(step: Any, micro: Any) -> jax.Array:
    """Return a step and a micro-step as an array.

    Raises:
      TypeError: One is not an integer.
      ValueError: Its value is known, and is negative or too large.
    """
    for name, value in (("step", step), ("micro", micro)):
        known = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
        if not known and not jnp.issubdtype(jnp.result_type(value), jnp.integer):
            raise TypeError(f"set_step: {name} must be an integer, got {value!r}.")
        if known and not 0 <= value < 2**31:
            raise ValueError(f"set_step: {name} must be at least 0 and less than 2**31, got {value}.")
    return jnp.stack([jnp.asarray(step, jnp.int32), jnp.asarray(micro, jnp.int32)])


# ---- final forms ----


def final_weight(sparsity: Sparsity, w: jax.Array, operand: Operand, state: Any = None) -> jax.Array:
    """Return a weight as inference uses it.

    Args:
      sparsity: The layer's sparsity.
      w: The weight, in the dtype in which its product computes. Rounding can change which values are the largest.
      operand: Where its axes lie.
      state: The state of the layer, if it keeps one.
    """
    p = sparsity.y_w.final
    if p == identity:
        return w
    trained, label = sparsity.y_w, f"y_w={p}"
    ctx = Ctx(state=trained.final_state(slot_state(state, "y_w")))
    if p.facts.block == trained.facts.block:
        return pruned(label, p, w, operand, ctx)
    # A mask has the shape of training, where axes were merged for the groups of another pruner. No key is read.
    hard, restore = along(label, trained, w, operand, ctx.replace(key=0), p)
    return restore(hard)


def distance(now: Any, hard: Any) -> float | None:
    """Return the relative L2 distance of a weight as a step uses it from its final form; None if they are traced."""
    if isinstance(now, jax.core.Tracer) or isinstance(hard, jax.core.Tracer):
        return None
    difference = jnp.linalg.norm(groups.wide(now).ravel() - groups.wide(hard).ravel())
    return float(difference / jnp.maximum(jnp.linalg.norm(groups.wide(hard).ravel()), jnp.finfo(jnp.float32).tiny))


def compared_at(p: Pruner, time: Any) -> int | None:
    """Return the step at which a weight is compared with its final form, to see whether its schedule has ended.

    Args:
      p: The pruner of the weight.
      time: The step and the micro-step of its layer.

    Returns:
      None if there is no schedule, if all that is left of it are random numbers, or if the time is traced.
    """
    if time is None or not p.facts.depends_on_step or (p.facts.needs_key and not p.phases):
        return None
    first = time.reshape(-1)[0]  # inside `jit` this is traced, even if the time is not
    if isinstance(first, jax.core.Tracer):
        return None
    step = int(first)
    return None if p.facts.needs_key and ended(p, step) else step


def ended(p: Pruner, step: int) -> bool:
    """Return True if nothing of a pruner changes after a step, as far as its schedules say when they end."""
    values = [getattr(p, f.name) for f in fields(p)]
    lasts = [getattr(v, "moves", (0, None))[1] for v in values if callable(v) and not isinstance(v, Pruner)]
    own = all(last is not None and last <= step for last in lasts) and all(start <= step for start in p.phases)
    return own and all(ended(part, step) for part in p.parts)


def inputs_unfinished(sparsity: Sparsity, time: Any) -> int | None:
    """Return the step if the pruner of x still changes after it; None if it does not, or if the time is traced."""
    p = sparsity.y_x
    if time is None or not p.phases:
        return None
    first = time.reshape(-1)[0]  # as above
    if isinstance(first, jax.core.Tracer):
        return None
    step = int(first)
    return step if p.at(step) != p.at(max(step, *p.phases)) else None


def warn_unfinished(found: Iterable[Unfinished], stacklevel: int) -> None:
    """Warn of weights that are hardened before their schedule has ended.

    Args:
      found: What `WeightState.unfinished` returned for each.
      stacklevel: As in `warnings.warn`.
    """
    found = list(found)
    distances, inputs = [one for compared, *_ in found for one in compared], [one for _, one, _ in found]
    if blind := [path for *_, path in found if path is not None]:
        warnings.warn(
            f"harden: {_shown(blind)} is pruned by gradients, and has seen none, so that its mask is that of "
            "magnitudes. Call observe with the gradients of each step.",
            stacklevel=stacklevel,
        )
    advice = "Harden after the schedules have ended. If they have, call set_step with the step of the training first."
    if unfinished := [(path, step) for path, step in inputs if step is not None]:
        warnings.warn(
            f"harden at step {unfinished[0][1]}: the schedules of the inputs of "
            f"{_shown(path for path, _ in unfinished)} have not ended. The hardened layers prune their inputs "
            f"differently from this step. {advice}",
            stacklevel=stacklevel,
        )
    far = [(path, ended(p, step), step, d) for path, p, step, d in distances if d is not None and d > UNFINISHED]
    for over in (False, True):
        those = [(path, step, d) for path, done, step, d in far if done == over]
        if not those:
            continue
        what = "have ended at values that are not those of the final form" if over else "have not ended"
        remedy = "End the schedule at the final form: a factor of `decay` at 0." if over else advice
        warnings.warn(
            f"harden at step {those[0][1]}: the schedules of {_shown(path for path, _, _ in those)} {what}. The "
            f"hardened weights differ from those of this step, by up to {max(d for _, _, d in those):.0%} of their "
            f"norm. {remedy}",
            stacklevel=stacklevel,
        )


def _shown(paths: Iterable[str]) -> str:
    short = [layer_paths.short(same) for same in layer_paths.alike((path, None, path) for path in paths)]
    return ", ".join(layer_paths.gathered(short))
