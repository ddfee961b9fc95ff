"""Optax transformations for masked training.

Decay of dropped weights, a proximal step towards n:m, and an Adam that decides when masks begin.
"""

import itertools
import math
import numbers
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import keystr, tree_flatten_with_path
from jaxtyping import Array, Float, Int, PyTree

from nmjax.core import groups
from nmjax.pruners.schedules import Schedule


def masked_decay(lam: float | Schedule) -> optax.GradientTransformationExtraArgs:
    """Return a transformation that adds ``lam`` times the dropped weights to the gradient.

    Dropped weights shrink, and masks settle. Hu et al., "Accelerating Transformer Pre-training with 2:4 Sparsity"
    (arXiv 2404.01847), after Zhou et al. (arXiv 2102.04010)::

        g <- g + lam * (1 - mask) * w

    Put it after clipping, which would shrink the term, and before Adam, whose moments have to see it.
    `optax.MultiSteps` goes around a chain: inside a chain it passes no masks on. `sr_ste` adds the same term in the
    weight's own dtype; here the sum is taken in float32 and rounded once.

    Args:
      lam: Strength of the decay, or a schedule of the number of updates done.

    Returns:
      A transformation whose ``update`` takes the parameters and ``masks=``: a tree like the parameters', of bool
      arrays of their shapes, or True for a weight without a mask. Masks of what `optax.masked` and
      `optax.multi_transform` leave out are ignored.

    Raises:
      ValueError: In ``update``: masks or parameters are missing, or the trees do not match.
      TypeError: In ``update``: a mask is not bool.

    >>> w, mask = jnp.array([1., -2., 3., -4.]), jnp.array([False, False, True, True])
    >>> tx = optax.chain(optax.clip_by_global_norm(1.), masked_decay(.5), optax.sgd(1.))
    >>> tx.update(jnp.array([0., 0., 0., 10.]), tx.init(w), w, masks=mask)[0]
    Array([-0.5,  1. , -0. , -1. ], dtype=float32)
    """

    def init(params: PyTree) -> Any:
        del params
        return optax.ScaleByScheduleState(jnp.zeros((), jnp.int32)) if callable(lam) else optax.EmptyState()

    def update(
        updates: PyTree, state: Any, params: PyTree | None = None, *, masks: PyTree | None = None, **extra: Any
    ) -> tuple[PyTree, Any]:
        del extra
        if masks is None:
            raise ValueError(
                "masked_decay got no masks: write optimizer.update(model, grads, masks=nm.nnx.masks(model)), "
                "or tx.update(grads, state, params, masks=masks)."
            )
        if params is None:
            raise ValueError(
                "masked_decay got no parameters to decay: write tx.update(grads, state, params, masks=masks)."
            )
        rate = lam
        if callable(lam):
            rate, state = lam(state.count), optax.ScaleByScheduleState(optax.safe_increment(state.count))
        return _map_matched(lambda g, w, keep: _decayed(g, w, keep, rate), updates, params, masks), state

    return optax.GradientTransformationExtraArgs(init, update)


def _decayed(g: jax.Array, w: jax.Array, keep: jax.Array, rate: Any) -> jax.Array:
    """Return the gradient, plus the decay where a weight is dropped. A NaN in a kept weight has no effect."""
    total = _wide(g)
    rate = jnp.asarray(rate, total.dtype)
    return jnp.where(keep | (rate == 0), g, (total + rate * w.astype(total.dtype)).astype(g.dtype))


def _map_matched(
    f: Callable[[jax.Array, jax.Array, jax.Array], jax.Array], updates: PyTree, params: PyTree, masks: PyTree
) -> PyTree:
    """Return ``f(g, w, keep)`` of all updates, matched by path.

    If `optax.masked` leaves out a subtree, updates and parameters have a node without leaves there, and masks may not.
    """
    absent = lambda node: node is None or isinstance(node, optax.MaskedNode)
    leaves, structure = tree_flatten_with_path(updates, is_leaf=absent)
    weights, kept = (dict(tree_flatten_with_path(tree)[0]) for tree in (params, masks))
    new: list[Any] = []
    left_out: list[tuple[Any, ...]] = []
    for path, g in leaves:
        if absent(g):
            left_out.append(path)
        else:
            g, w, keep = jnp.asarray(g), weights.pop(path, None), kept.pop(path, None)
            _check_matched(path, g, w, keep)
            g = f(g, jnp.asarray(w), jnp.asarray(keep))
        new.append(g)
    for kind, rest in (("mask", kept), ("parameter", weights)):
        for path in rest:
            if not any(path[: len(start)] == start for start in left_out):
                raise ValueError(
                    f"masked_decay: the {kind}{_at(path)}, of shape {jnp.shape(rest[path])}, has no gradient. "
                    "The trees of gradients, parameters and masks must be alike."
                )
    return structure.unflatten(new)


def _check_matched(path: tuple[Any, ...], g: jax.Array, w: Any, keep: Any) -> None:
    if w is None or keep is None:
        missing = "parameter" if w is None else "mask"
        raise ValueError(
            f"masked_decay: the gradient{_at(path)}, of shape {g.shape}, has no {missing}. "
            "The trees of gradients, parameters and masks must be alike; a weight without a mask has True."
        )
    if jnp.shape(w) != g.shape:
        raise ValueError(f"masked_decay: the gradient{_at(path)} has shape {g.shape}, its parameter {jnp.shape(w)}.")
    if jnp.shape(keep) not in ((), g.shape):
        raise ValueError(
            f"masked_decay: the mask{_at(path)} has shape {jnp.shape(keep)}, its parameter {g.shape}. "
            "Give a mask of the parameter's shape, or True for a weight without one."
        )
    if jnp.result_type(keep) != jnp.bool_:
        raise TypeError(
            f"masked_decay: the mask{_at(path)} has dtype {jnp.result_type(keep)}. Write mask != 0: True where kept."
        )


def _at(path: tuple[Any, ...]) -> str:
    return f" at {keystr(path)}" if path else ""


def _wide(x: Any) -> jax.Array:
    """Return an array in at least float32, to compute in. A tree of parameters may hold integers too."""
    return groups.at_least_float32(jnp.asarray(x))


def proximal(n: int, m: int, strength: float | Schedule, axis: int = -2) -> optax.GradientTransformationExtraArgs:
    """Return a transformation that moves weights towards n:m after each update, by a proximal step.

    Liu et al., "ProxSparse: Regularized Learning of Semi-Structured Sparsity Masks for Pretrained LLMs" (arXiv
    2502.00258). Its regularizer is zero for n:m weights, and differentiable where all weights of a group are not zero.
    For 2:4 it is the sum of all products of three magnitudes::

        r(w) = |w1 w2 w3| + |w1 w2 w4| + |w1 w3 w4| + |w2 w3 w4|             otherwise: products of n + 1 of the m
        w <- the x of least  1/2 |x - (w + update)|^2 + strength * r(x)      in each group

    So a group with one small weight loses little, and the choice is put off while several weights are alike. Put it
    last in a chain. Train with dense weights, until `nm.groups.is_nm` holds for most groups, and then prune them by
    magnitude; or take only the mask from the trained weights, as the paper does, and keep the values of the first ones.

    Weights have to be float32: in bfloat16 small steps are lost.

    Args:
      n: The number of weights to keep in each group.
      m: The size of a group, at most 8.
      strength: The factor of the regularizer times the learning rate, or a schedule of the number of updates done.
      axis: The axis of the groups: that of the inputs. Kernels of Flax are [..., inputs, outputs].

    Returns:
      A transformation whose ``update`` takes the parameters. It changes all of them that have two or more axes, in a
      stack of layers also biases; choose by `optax.masked`.

    Raises:
      TypeError: n, m or the axis is not a plain number, but for example traced.
      ValueError: n does not lie between 1 and m, m is more than 8, or the strength is negative. In ``update``: there
        are no parameters, or m does not divide the axis.

    >>> w = jnp.array([[1.0], [0.9], [0.2], [0.1]])
    >>> tx = optax.chain(optax.sgd(0.0), proximal(2, 4, strength=0.1))
    >>> state = tx.init(w)
    >>> for _ in range(3):
    ...     w = optax.apply_updates(w, tx.update(jnp.zeros_like(w), state, w)[0])
    >>> [f"{v:.2f}" for v in w[:, 0]]                      # the two largest are nearly unchanged
    ['0.99', '0.89', '0.00', '0.00']
    """
    for name, value in (("n", n), ("m", m), ("axis", axis)):
        if not isinstance(value, numbers.Integral):
            raise TypeError(
                f"proximal: {name} must be a plain number, got {type(value).__name__}. With optax.inject_hyperparams, "
                "write static_args=('n', 'm', 'axis')."
            )
    if not 1 <= n <= m <= 8:
        raise ValueError(f"proximal: n lies between 1 and m, and m is at most 8; got n={n} and m={m}.")
    if isinstance(strength, numbers.Real) and strength < 0:
        raise ValueError(f"proximal: strength is at least 0, got {strength}.")

    def init(params: PyTree) -> Any:
        del params
        return optax.ScaleByScheduleState(jnp.zeros((), jnp.int32)) if callable(strength) else optax.EmptyState()

    def update(updates: PyTree, state: Any, params: PyTree | None = None, **extra: Any) -> tuple[PyTree, Any]:
        del extra
        if params is None:
            raise ValueError("proximal got no parameters to move: write tx.update(grads, state, params).")
        rate = strength
        if callable(strength):
            rate, state = strength(state.count), optax.ScaleByScheduleState(optax.safe_increment(state.count))

        def moved(path: tuple[Any, ...], u: jax.Array, w: jax.Array) -> jax.Array:
            if w.ndim < 2:
                return u
            if w.shape[axis] % m:
                raise ValueError(
                    f"proximal: m={m} does not divide axis {axis} of the parameter{_at(path)}, of shape {w.shape}. "
                    "Leave it out by optax.masked."
                )
            new = _wide(w) + _wide(u)
            near = _nearest(new, jnp.asarray(rate, new.dtype), n, m, groups.position(w.ndim, axis))
            return (near - _wide(w)).astype(u.dtype)

        return jax.tree_util.tree_map_with_path(moved, updates, params), state

    return optax.GradientTransformationExtraArgs(init, update)


SWEEPS = 16  # over the members of a group


@partial(jax.jit, static_argnums=(2, 3, 4))
def _nearest(w: jax.Array, strength: jax.Array, n: int, m: int, axis: int) -> jax.Array:
    """Return the x of least 1/2 |x - w|^2 + strength * r(x), in each group.

    Magnitudes of the minimum have the order of those of w. So its support is the n, n + 1, ..., or m largest. With k of
    them, x is the fixed point of x_i = max(w_i - strength * s(x without x_i), 0), where s is the sum of all products of
    n members; with n it is w. Of these the best is taken.
    """
    size = groups.members(groups.split(jnp.abs(w), axis, m), axis + 1)
    order = [groups.magnitude(v) for v in size]
    kept = lambda k: tuple(jnp.where(keep, v, 0) for keep, v in zip(groups.first_of(order, k), size, strict=True))
    away = lambda x: sum((jnp.square(a - b) / 2 for a, b in zip(x, size, strict=True)), jnp.zeros_like(size[0]))
    best = kept(n)
    least = away(best)
    for k in range(n + 1, m + 1):
        first = kept(k)

        def sweep(_: Any, x: Any, first: Any = first) -> Any:
            for i in range(m):
                x = (*x[:i], jnp.maximum(first[i] - strength * _products(x[:i] + x[i + 1 :], n), 0), *x[i + 1 :])
            return x

        mean, ways = sum(first, jnp.zeros_like(size[0])) / k, math.comb(k - 1, n)
        share = jnp.ones_like(mean)  # what is left of k equal magnitudes, by Newton's method
        for _ in range(4):
            pull = strength * ways * mean ** (n - 1) * share ** (n - 1)
            share = share - (share + pull * share - 1) / (1 + n * pull)
        x = jax.lax.fori_loop(0, SWEEPS, sweep, tuple(v * share for v in first))
        cost = away(x) + strength * _products(x, n + 1)
        better = cost < least
        best = tuple(jnp.where(better, new, old) for new, old in zip(x, best, strict=True))
        least = jnp.where(better, cost, least)
    return jnp.concatenate(best, axis + 1).reshape(w.shape) * jnp.sign(w)


def _products(x: Sequence[jax.Array], n: int) -> jax.Array:
    """Return the sum of all products of n of these arrays."""
    sums = [jnp.ones_like(x[0]), *[jnp.zeros_like(x[0])] * n]
    for v in x:
        sums = [sums[0], *(high + v * low for low, high in itertools.pairwise(sums))]
    return sums[n]


class StepAdamState(NamedTuple):
    """The state of `step_adam`: arrays only.

    Attributes:
      count: Number of updates done.
      since: 0 while dense, then the number of the next sparse step: 1, 2, ...
      mu: The first moments, in float32.
      nu: The second moments, in float32, frozen after the switch.
      window: Z of the last updates, in a ring.

    >>> state = step_adam(1e-3, after=1, before=2).init({"w": jnp.ones(2)})
    >>> int(state.count), int(state.since)
    (0, 0)
    """

    count: Int[Array, ""]
    since: Int[Array, ""]
    mu: PyTree
    nu: PyTree
    window: Float[Array, " updates"]


def step_adam(
    learning_rate: float | Schedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    *,
    after: int,
    before: int,
    mean: str = "arithmetic",
    mask: PyTree | Callable[[PyTree], PyTree] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Return AdamW that trains dense weights until its variance settles, and then sparse weights with that variance.

    Lu et al., "STEP: Learning N:M Structured Sparsity Masks from Scratch with Precondition" (arXiv 2302.01172):
    gradients of masked weights spoil Adam's estimate of their variance. With its moments m and v, at update t from 1::

        dense     w <- w - lr * (m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps) + weight_decay * w)
        switches  after the update if Z < eps and t > after, or if t > before
                  Z is the mean |v_t - v_(t-1)| of all weights over the last 1 / (1 - b2) updates
        sparse    w <- w - lr * (m / (1 - b1^t) / (sqrt(v*) + eps^(3/4)) + weight_decay * w),  v* is v at the switch

    The sparse denominator is that of the code that FST's authors (arXiv 2404.01847) compare with. Only pruned weights
    need the switch: give them this optimizer by `optax.multi_transform`, and all others `optax.adamw`.

    The model learns of the switch by `since`, as its step. Its weights are
    ``ste(stages(((0,identity),(1,mse(2,4)))))``, and every update begins with ``nm.nnx.set_step(model,
    nm.optim.since(opt_state))``. Moments are float32, also those of bf16 weights; updates have the gradients' dtype.

    Args:
      learning_rate: A number, or a schedule of the number of updates done.
      b1: Decay of the first moment.
      b2: Decay of the second moment.
      eps: Term in the denominator, and the threshold of the switch.
      weight_decay: Strength of the weight decay.
      after: The switch comes after update ``after + 1`` at the earliest. Published runs have 10 % of all updates.
      before: The switch comes after update ``before + 1`` at the latest. Published runs have 50 % of all updates.
      mean: The mean over the weights: "arithmetic", or "geometric", which is 0 as long as one weight has never had a
        gradient. The mean over the updates is arithmetic. At the beginning it is over the updates that there are.
      mask: Weights that decay, a tree of bools or a function from parameters to one, as in `optax.adamw`. All decay
        without it.

    Returns:
      The optimizer.

    Raises:
      TypeError: ``b2``, ``after`` or ``before`` is not a plain number, but for example traced.
      ValueError: A number is out of its range, or ``mean`` is unknown. In ``update``: there are no parameters.

    >>> w = jnp.ones(4)
    >>> tx = step_adam(.1, after=1, before=2)
    >>> state, seen = tx.init(w), []
    >>> for step in range(5):
    ...     seen.append(int(since(state)))                  # set_step(model, ...), and then the gradients
    ...     updates, state = tx.update(w, state, w)
    >>> seen                                                # 3 dense steps, then sparse ones
    [0, 0, 0, 1, 2]
    """
    _check_step_adam(b1, b2, eps, after, before, mean)
    after, before = int(after), int(before)
    steps = math.floor(round(1 / (1 - b2), 6))  # rounded first, because 1 / (1 - 0.999) is a little less than 1000

    def init(params: PyTree) -> StepAdamState:
        zeros = lambda: jax.tree.map(lambda p: jnp.zeros_like(_wide(p)), params)
        count, since = (
            jnp.zeros((), jnp.int32),
            jnp.zeros((), jnp.int32),
        )  # two buffers: a donated state must not hold one twice
        return StepAdamState(count, since, zeros(), zeros(), jnp.zeros(steps, jnp.float32))

    def update(updates: PyTree, state: Any, params: PyTree | None = None, **extra: Any) -> tuple[PyTree, Any]:
        del extra
        decays = not isinstance(weight_decay, numbers.Real) or weight_decay != 0
        if decays and params is None:
            raise ValueError("step_adam got no parameters to decay: write tx.update(grads, state, params).")
        if decays and mask is not None:
            decayed = mask(params) if callable(mask) else mask
            params = jax.tree.map(
                lambda keep, part: part if keep else jax.tree.map(jnp.zeros_like, part), decayed, params
            )
        sparse, t = state.since > 0, jnp.asarray(optax.safe_increment(state.count))
        grads = jax.tree.map(_wide, updates)
        # |v_t - v_(t-1)|, computed without that difference, whose rounding would give zeros to the geometric mean
        change = jax.tree.map(lambda g, v: (1 - b2) * jnp.abs(g * g - v), grads, state.nu)
        window = jnp.where(sparse, state.window, state.window.at[state.count % steps].set(_mean_change(change, mean)))
        settled = (jnp.sum(window) / jnp.minimum(t, steps).astype(jnp.float32) < eps) & (t > after)
        since = jnp.where(sparse, optax.safe_increment(state.since), (settled | (t > before)).astype(jnp.int32))

        mu = optax.tree.update_moment(grads, state.mu, b1, 1)
        nu = optax.tree.update_moment(grads, state.nu, b2, 2)
        nu = jax.tree.map(lambda v, new: jnp.where(sparse, v, new), state.nu, nu)
        m_hat, v_hat = (optax.tree.bias_correction(x, b, t.astype(jnp.float32)) for x, b in ((mu, b1), (nu, b2)))
        rate = learning_rate(state.count) if callable(learning_rate) else learning_rate

        def step(g: Any, m_hat: jax.Array, v_hat: jax.Array, v: jax.Array, w: Any = None) -> jax.Array:
            d = m_hat / jnp.where(sparse, jnp.sqrt(v) + eps**0.75, jnp.sqrt(v_hat) + eps)
            d = d + weight_decay * jnp.asarray(w, d.dtype) if decays else d
            return (jnp.asarray(-rate, d.dtype) * d).astype(jnp.result_type(g))

        new = jax.tree.map(step, updates, m_hat, v_hat, nu, *([params] if decays else []))
        return new, StepAdamState(t, since, mu, nu, window)

    return optax.GradientTransformationExtraArgs(init, update)


def _check_step_adam(b1: float, b2: float, eps: float, after: int, before: int, mean: str) -> None:
    if mean not in ("arithmetic", "geometric"):
        raise ValueError(f"step_adam: mean is 'arithmetic' or 'geometric', got {mean!r}.")
    for name, value in (("b2", b2), ("after", after), ("before", before)):
        if not isinstance(value, numbers.Real):
            raise TypeError(
                f"step_adam: {name} must be a plain number, got {type(value).__name__}. With optax.inject_hyperparams, "
                "write static_args=('b2', 'after', 'before', 'mean')."
            )
    for name, value in (("b1", b1), ("b2", b2)):
        if isinstance(value, numbers.Real) and not 0 <= value < 1:
            raise ValueError(f"step_adam: {name} must be at least 0 and less than 1, got {value}.")
    if isinstance(eps, numbers.Real) and not eps > 0:
        raise ValueError(f"step_adam: eps must be positive, because it is also the threshold of the switch; got {eps}.")
    if after % 1 or before % 1 or not 0 <= after <= before:
        raise ValueError(
            "step_adam: after and before are whole numbers of updates, 0 <= after <= before; "
            f"got after={after}, before={before}. For shares, write int(0.1 * updates) and int(0.5 * updates)."
        )


def _mean_change(change: PyTree, mean: str) -> jax.Array:
    """Return Z of one update: the mean over the values of all arrays."""
    leaves = jax.tree.leaves(change)
    size = sum(x.size for x in leaves)
    if not size:
        raise ValueError("step_adam got no parameters, so it has no variance to watch. Check the labels or the mask.")
    if mean == "geometric":
        return jnp.exp(sum(jnp.sum(jnp.log(x)).astype(jnp.float32) for x in leaves) / float(size))
    total: Any = sum(jnp.sum(x).astype(jnp.float32) for x in leaves)
    return total / float(size)


def since(opt_state: PyTree) -> Int[Array, ""]:
    """Return 0 while `step_adam` trains densely, then the number of the next sparse step.

    Args:
      opt_state: The state of an optimizer that holds one `step_adam`, anywhere in it.

    Returns:
      An int32 scalar, to be the model's step.

    Raises:
      ValueError: The state holds no `step_adam`, or several.

    >>> tx = optax.chain(optax.clip(1.0), step_adam(1e-3, after=10, before=50))
    >>> since(tx.init(jnp.ones(4)))
    Array(0, dtype=int32)
    """
    is_state = lambda node: isinstance(node, StepAdamState)
    states = [node for node in jax.tree.leaves(opt_state, is_leaf=is_state) if is_state(node)]
    if not states:
        raise ValueError(
            f"since reads the state of one step_adam, found none in a {type(opt_state).__name__}. "
            "Give it the state of such an optimizer."
        )
    if len(states) > 1:
        raise ValueError(
            f"since reads the state of one step_adam, found {len(states)} in a {type(opt_state).__name__}. "
            "Give it the part that holds the one meant."
        )
    return jax.tree.leaves(states[0].since)[0]  # in the state of an nnx.Optimizer it is a Variable
