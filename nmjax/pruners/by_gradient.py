"""Choices by gradients of the weight: `saliency`, `movement` and `fisher` score weights, `regrow` renews a mask.

Their state is one array of the shape of the weight, and the number of gradients that it has seen. `nmjax.nnx.observe`
gives them the gradients of the backward pass of training; no other is computed. What is not finite counts as zero. As a
row of `stages`, they begin without gradients at its first step.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from nmjax.core import groups
from nmjax.core.bases import Grouped, Remembering, Selector
from nmjax.core.context import Ctx
from nmjax.core.pruner import Facts, Pruner, split_ctx


@dataclass(frozen=True, repr=False)
class ByGradient(Selector, Grouped, Remembering):
    """The base of pruners that are told the gradients of the weight, in ``ctx.gradient`` of `refresh`.

    A subclass defines `first` and `observed`, and reads in `mask` the array that they return. Without a gradient, a
    `refresh` returns the state as it was.

    Args:
      n: The number of values to keep in each group.
      m: The size of a group.
    """

    reads_step = False

    def describe(self) -> Facts:
        return super().describe()._replace(reads_gradient=True)

    def first(self, x: jax.Array, axis: int) -> jax.Array:
        """Return the array before the first gradient."""
        raise NotImplementedError

    def observed(self, x: jax.Array, axis: int, array: jax.Array, gradient: jax.Array, step: Any) -> jax.Array:
        """Return the array after a gradient.

        Args:
          x: The weight.
          axis: The axis of the groups.
          array: The array before it.
          gradient: The gradient, in the dtype of `groups.wide`; zero where it is not finite.
          step: The step of training.
        """
        raise NotImplementedError

    def array(self, x: jax.Array, ctx: Ctx) -> jax.Array:
        """Return the array of the state. Refuse a state that is not of this weight."""
        state = self.given(ctx)
        return self.like(state[0] if isinstance(state, (tuple, list)) and len(state) == 2 else None, x, "an array")

    def init(self, x: jax.Array, axis: int = -1, ctx: Ctx = Ctx()) -> Any:
        return self.first(x, axis), jnp.zeros((), jnp.int32)

    def refresh(self, x: jax.Array, axis: int = -1, ctx: Ctx = Ctx()) -> Any:
        array = self.array(x, ctx)
        if ctx.gradient is None:
            return ctx.state
        gradient = groups.wide(ctx.gradient)
        gradient = jnp.where(jnp.isfinite(gradient), gradient, jnp.zeros((), gradient.dtype))
        found = self.observed(x, axis, array, gradient, ctx.step).astype(array.dtype)
        return found, ctx.state[1] + np.int32(1)


@dataclass(frozen=True, repr=False)
class _Scored(ByGradient):
    """The base of pruners that keep the n of every m with the largest scores, which gradients add up.

    Magnitudes are the scores of a group whose own are all zero, as at the beginning. Scores that differ in the last bit
    count as equal, and of equal ones the first is kept.
    """

    decay: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.decay <= 1:
            raise ValueError(f"{self}: decay is what is left of a score at each gradient, from 0 to 1.")

    def after(self, scores: jax.Array, product: jax.Array) -> jax.Array:
        """Return the scores after a gradient, given the weight times the gradient."""
        raise NotImplementedError

    def first(self, x: jax.Array, axis: int) -> jax.Array:
        return jnp.zeros(x.shape, groups.wide(x).dtype)

    def observed(self, x: jax.Array, axis: int, array: jax.Array, gradient: jax.Array, step: Any) -> jax.Array:
        product = groups.wide(x).astype(array.dtype) * gradient.astype(array.dtype)
        return self.after(array, jnp.where(jnp.isfinite(product), product, jnp.zeros((), array.dtype)))

    def mask(self, x: jax.Array, axis: int = -1, ctx: Ctx = Ctx()) -> jax.Array:
        axis = groups.position(x.ndim, axis)
        scores = groups.split(self.array(x, ctx), axis, self.m)
        weight = groups.split(groups.wide(x).astype(scores.dtype), axis, self.m)
        unknown = jnp.all(scores == 0, axis + 1, keepdims=True)
        size = groups.magnitude(scores) >> 1
        zero = np.array(np.iinfo(size.dtype).max // 2, size.dtype)
        ordered = jnp.where(scores < 0, zero - 1 - size, zero + size)
        return groups.top_of(jnp.where(unknown, groups.magnitude(weight), ordered), axis + 1, self.n).reshape(x.shape)


@dataclass(frozen=True, repr=False)
class saliency(_Scored):
    """Keep the n of every m with the largest ``|w * gradient|``.

    To first order, this is the change of the loss if the weight is removed. Paper: Lee et al., "SNIP: Single-shot
    Network Pruning based on Connection Sensitivity" (arXiv 1810.02340), which prunes once, before training. Of batch
    t::

        score_t = decay * score_{t-1} + |w_t * gradient_t|

    Args:
      n: The number of values to keep in each group.
      m: The size of a group.
      decay: What is left of a score at each gradient, from 0 to 1.

    >>> p, w = saliency(2, 4), jnp.array([4., -3., 2., 1.])
    >>> state = p.refresh(w, ctx=Ctx(state=p.init(w), gradient=jnp.array([0., 1., 0., -4.])))
    >>> p(w, ctx=Ctx(state=state))
    Array([ 0., -3.,  0.,  1.], dtype=float32)
    """

    def after(self, scores: jax.Array, product: jax.Array) -> jax.Array:
        """Return the decayed scores plus the magnitudes of the products."""
        return jnp.array(self.decay, scores.dtype) * scores + jnp.abs(product)


@dataclass(frozen=True, repr=False)
class fisher(_Scored):
    """Keep the n of every m with the largest sums of ``(w * gradient)^2``.

    Papers: Theis et al., "Faster gaze prediction with dense networks and Fisher pruning" (arXiv 1801.05787); Molchanov
    et al., "Importance Estimation for Neural Network Pruning" (arXiv 1906.10771). Both prune whole feature maps. Where
    the weight changes little, the sum is that of the squared weight times the diagonal of the empirical Fisher
    information, by gradients of batches in place of those of examples. Of batch t::

        score_t^2 = decay * score_{t-1}^2 + (w_t * gradient_t)^2

    Args:
      n: The number of values to keep in each group.
      m: The size of a group.
      decay: What is left of a score at each gradient, from 0 to 1.

    >>> p, w = fisher(1, 2, decay=1.0), jnp.array([1., 1.])
    >>> state = p.init(w)
    >>> for gradient in ([3., 2.], [0., 2.], [0., 2.]):  # 9 < 4 + 4 + 4
    ...     state = p.refresh(w, ctx=Ctx(state=state, gradient=jnp.array(gradient)))
    >>> p(w, ctx=Ctx(state=state))
    Array([0., 1.], dtype=float32)
    """

    def after(self, scores: jax.Array, product: jax.Array) -> jax.Array:
        """Return the root of the sum of squares, which does not vanish as squares do."""
        return jnp.hypot(jnp.array(self.decay**0.5, scores.dtype) * scores, product)


@dataclass(frozen=True, repr=False)
class movement(_Scored):
    """Keep the n of every m that training moves away from zero most: ``-w * gradient``.

    Paper: Sanh et al., "Movement Pruning: Adaptive Sparsity by Fine-Tuning" (arXiv 2005.07683). Of batch t::

        score_t = decay * score_{t-1} - w_t * gradient_t

    Args:
      n: The number of values to keep in each group.
      m: The size of a group.
      decay: What is left of a score at each gradient, from 0 to 1. The paper adds up all: 1.

    >>> p, w = movement(1, 2), jnp.array([5., 1.])
    >>> state = p.refresh(w, ctx=Ctx(state=p.init(w), gradient=jnp.array([1., -1.])))  # the first one shrinks
    >>> p(w, ctx=Ctx(state=state))
    Array([0., 1.], dtype=float32)
    """

    decay: float = 1.0

    def after(self, scores: jax.Array, product: jax.Array) -> jax.Array:
        """Return the decayed scores minus the products."""
        return jnp.array(self.decay, scores.dtype) * scores - product


@dataclass(frozen=True, repr=False)
class regrow(ByGradient):
    """Keep a mask, in which the smallest weights now and then give way to those of large gradients.

    Paper: Evci et al., "Rigging the Lottery: Making All Tickets Winners" (arXiv 1911.11134). At a multiple of ``every``
    each group of m drops the ``k`` smallest of the n weights that it keeps, and keeps instead the k others whose
    gradients are largest; the dropped ones are among the others. The first mask is that of magnitudes. In the paper
    groups are whole layers, the first mask is random, the share of weights that change places falls with the step, and
    a dropped weight gets no updates and returns as zero. Here k is constant, and under ``ste`` a dropped weight is
    trained on, and returns with its value.

    Args:
      n: The number of values to keep in each group.
      m: The size of a group.
      every: The mask changes at steps above 0 that this number divides, as `nmjax.nnx.set_step` sets them, if a
        gradient of such a step is observed.
      until: The step from which on the mask stays. If None, it never does.
      k: The number of weights that each group may exchange.

    Raises:
      ValueError: A number is below 1, or k is not below n: then magnitudes would not count.

    >>> p, w = regrow(2, 4, every=10), jnp.array([4., -3., 2., 1.])
    >>> state = p.refresh(w, ctx=Ctx(step=10, state=p.init(w), gradient=jnp.array([0., 1., 0., -4.])))
    >>> p(w, ctx=Ctx(state=state))
    Array([4., 0., 0., 1.], dtype=float32)
    """

    every: int = 100
    until: int | None = None
    k: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.every < 1 or self.k < 1 or (self.until is not None and self.until < 1):
            raise ValueError(f"{self}: every, until and k are at least 1.")
        if self.k >= self.n:
            raise ValueError(
                f"{self}: a group keeps {self.n} weights, and fewer can be exchanged. Write larger groups of the same "
                f"share, as regrow({2 * self.k * self.n},{2 * self.k * self.m},k={self.k})."
            )

    def mask(self, x: jax.Array, axis: int = -1, ctx: Ctx = Ctx()) -> jax.Array:
        return self.array(x, ctx)

    def first(self, x: jax.Array, axis: int) -> jax.Array:
        return groups.top(x, axis, self.n, self.m)

    def observed(self, x: jax.Array, axis: int, array: jax.Array, gradient: jax.Array, step: Any) -> jax.Array:
        axis, step = groups.position(x.ndim, axis), jnp.asarray(step)
        due = (step % self.every == 0) & (step > 0)
        due = due if self.until is None else due & (step < self.until)
        return lax.cond(due, lambda: self._exchanged(x, axis, array, gradient), lambda: array)

    def _exchanged(self, x: jax.Array, axis: int, kept: jax.Array, gradient: jax.Array) -> jax.Array:
        wide = groups.wide(x).astype(gradient.dtype)
        size, grown, kept = (groups.split(v, axis, self.m) for v in (wide, gradient, kept))
        size, slope = groups.magnitude(size), groups.magnitude(grown)  # gradients are finite, so two are left above
        most = np.array(np.iinfo(size.dtype).max, size.dtype)
        stays = groups.top_of(jnp.where(kept, jnp.minimum(size, most - 2) + 1, 0), axis + 1, self.n - self.k)
        slope = slope + kept.astype(slope.dtype)  # of equal ones those that are kept stay
        return groups.top_of(jnp.where(stays, most - 1, slope), axis + 1, self.n).reshape(x.shape)


def unobserved(p: Pruner, state: Any) -> bool:
    """Return True if a pruner reads gradients, and its state has seen none.

    Args:
      p: The pruner, in its final form.
      state: Its state.

    >>> unobserved(saliency(2, 4), saliency(2, 4).init(jnp.ones(4)))
    True
    """
    if isinstance(p, ByGradient):
        return not np.all(state[1])
    if not p.facts.reads_gradient:
        return False
    if isinstance(p, Remembering):  # it holds a mask, and the state of its part
        return unobserved(p.parts[0], state[1])
    return any(unobserved(part, ctx.state) for part, ctx in zip(p.parts, split_ctx(p, Ctx(state=state)), strict=True))
