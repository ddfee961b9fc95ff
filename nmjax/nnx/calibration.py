"""Statistics of the inputs of a model's layers, and one-shot pruning by them.

A layer's input passes a tap on its way to the product. The gradient of a tap is defined as the statistic, so the
statistics of all layers come out of one compiled function, under scans and `nnx.remat` too.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from rich.progress import track

from nmjax.core.pruner import Pruner
from nmjax.nnx.delivery import sparsify
from nmjax.nnx.doors import Layer
from nmjax.nnx.hardening import harden
from nmjax.nnx.layers import layers
from nmjax.nnx.recording import example_of, with_calls
from nmjax.nnx.variables import NM, write
from nmjax.oneshot.solvers import Solved, sparsegpt
from nmjax.products.operations import Dot
from nmjax.products.slot import slot_state
from nmjax.programs.rewriting import Product
from nmjax.pruners import wanda
from nmjax.recipes.table import Recipe

Model = TypeVar("Model")
Solver = Callable[[np.ndarray, np.ndarray, int, int], Solved]


class Inputs(NamedTuple):
    """The inputs of a layer, over all batches.

    Attributes:
      squares: The sum of squares of each feature, in float64. In a stack of layers the axes of the stack come first.
      moments: The second moments X'X, in float64; None if they were not asked for.
      tokens: The number of inputs, each with all features.

    >>> import nmjax as nm
    >>> nm.nnx.calibrate(nnx.Linear(2, 4, rngs=nnx.Rngs(0)), [jnp.ones((3, 2))])[""]
    Inputs(squares=array([3., 3.]), moments=None, tokens=3)
    """

    squares: np.ndarray
    moments: np.ndarray | None
    tokens: int


class Pruned(NamedTuple):
    """A model that was pruned in one shot.

    Attributes:
      model: A copy of the model with the pruned weights.
      solved: For each layer, the error of its output: of the solver, and of the largest magnitudes. The layers of a
        stack are numbered, as "blocks/mlp/up[3]".

    >>> import nmjax as nm
    >>> model, x = nnx.Linear(8, 4, rngs=nnx.Rngs(0)), jax.random.normal(jax.random.key(0), (100, 8))
    >>> pruned = nm.nnx.prune(model, nm.Recipe({".*": "ste(2,4)"}), [x])
    >>> error, of_magnitude = pruned.solved[""]
    >>> error < of_magnitude
    True
    """

    model: Any
    solved: dict[str, tuple[float, float]]


class Tap(nnx.Param[jax.Array]):
    """A variable whose gradient is a statistic. As a parameter it is sliced and stacked as the kernel is."""


class Meter(nnx.Module):
    """Stands in a layer's door, and computes its product with the input passed by taps."""

    def __init__(self, layer: Layer, size: tuple[int, ...], moments: bool) -> None:
        """Make the taps.

        Args:
          layer: The layer.
          size: The axes of the stack, and the number of features.
          moments: True for second moments, False for sums of squares.
        """
        self.plain, self.product, self.name = layer.plain, layer.pruned_product, layer.path
        self.tap = Tap(jnp.zeros((*size, size[-1]) if moments else size))
        self.tokens = Tap(jnp.zeros((*size[:-1], 1)))

    def __call__(self, *operands: Any, **options: Any) -> jax.Array:
        assert self.product is not None
        assert self.plain is not None
        example = example_of(self.product, operands, options)
        at = 1 if isinstance(operands[0], str) else 0
        x = self._tapped(operands[at], example.op, example.rhs.ndim)
        return self.plain(*operands[:at], x, *operands[at + 1 :], **options)

    def multiply(self, product: Product, x: jax.Array, w: jax.Array) -> jax.Array:
        """Return the product of a declared layer."""
        return product.op(self._tapped(x, product.op, w.ndim), w, *product.extra)

    def _tapped(self, x: jax.Array, op: Any, rank: int) -> jax.Array:
        if not isinstance(op, Dot) or op.dims[1] != ((), ()):
            raise ValueError(
                f"{self.name}: only products of two matrices can be calibrated, not convolutions, products with batch "
                "axes or those of experts. Leave the layer out of the recipe."
            )
        if self.tokens[...].ndim > 1:
            raise ValueError(
                f"{self.name}: the call slices its parameters, but not its taps, along another axis than 0."
            )
        of_weight = dict(zip(*op.dims[0][::-1], strict=True))  # the axis of x for each contracted axis of the weight
        axes = tuple(of_weight[a] for a in op.operands(x.ndim, rank)["fwd_rhs"].contract)
        return _passed(x, self.tap[...], self.tokens[...], axes)


def _forward(x: jax.Array, tap: jax.Array, tokens: jax.Array, axes: tuple[int, ...]) -> Any:
    return x, (x, tap)


def _backward(axes: tuple[int, ...], kept: Any, g: jax.Array) -> Any:
    x, tap = kept
    rows = jnp.moveaxis(x, axes, range(-len(axes), 0)).reshape(-1, tap.shape[-1]).astype(jnp.float32)
    statistic = jnp.square(rows).sum(0) if tap.ndim == 1 else jnp.einsum("ti,tj->ij", rows, rows, precision="highest")
    return g, statistic, jnp.full((1,), float(len(rows)))


_passed: Any = jax.custom_vjp(lambda x, tap, tokens, axes: x, nondiff_argnums=(3,))
_passed.defvjp(_forward, _backward)


def calibrate(
    model: Any, batches: Iterable[Any], *, moments: bool = False, only: str = ".*", progress: bool = False
) -> dict[str, Inputs]:  # fmt: skip
    """Return statistics of the inputs of a model's layers.

    Args:
      model: A flax.nnx model. It is not changed. Switch off dropout, `model.eval()`.
      batches: Batches of inputs: a tuple of the arguments of the model's call, a dict of keyword arguments, or a single
        array. Batches of one shape compile once.
      moments: True to also return second moments X'X, of as many values as there are features, squared.
      only: A regular expression of the paths of layers.
      progress: True to show a progress bar.

    Returns:
      A dict from the layer's path to its `Inputs`.

    Raises:
      ValueError: There are no batches, no layer has such a path, or a layer's product is not that of two matrices.

    >>> import nmjax as nm
    >>> found = nm.nnx.calibrate(nnx.Linear(2, 4, rngs=nnx.Rngs(0)), [jnp.array([[1., 2.], [3., 0.]])])
    >>> found[""].squares.tolist(), found[""].tokens
    ([10.0, 4.0], 2)
    """
    copy, batches = nnx.clone(model), [_arguments(batch) for batch in batches]
    if not batches:
        raise ValueError("calibrate: there are no batches.")
    with_doors, _ = with_calls(copy, list(layers(copy)), Recipe(((".*", "ste(1,2)"),)), *batches[0])
    chosen = [layer for layer in with_doors if re.fullmatch(only, layer.path) and layer.has_weight]
    if not chosen:
        raise ValueError(f"calibrate: no layer has a path that matches {only!r}.")
    meters = {}
    for layer in chosen:
        stack, operand, product = layer.stack, layer.operand, layer.product
        if operand is None or product is None:
            raise ValueError(
                f"{layer.path}: the call on the first batch does not use this layer. Choose others by only=..."
            )
        if stack != tuple(range(len(stack))):
            raise ValueError(
                f"{layer.path}: its layers are stacked along axes {stack}, and only leading axes are known."
            )
        features = int(np.prod([product.rhs.shape[a] for a in operand.contract]))
        meters[layer.path] = Meter(layer, (*(layer.kernel.shape[a] for a in stack), features), moments)
        layer.put(meters[layer.path])
    graph, taps, rest = nnx.split(copy, Tap, ...)

    @jax.jit
    def statistics(rest: Any, args: Any, options: Any) -> Any:
        def total(taps: Any) -> jax.Array:
            y = nnx.merge(graph, taps, rest, copy=True)(*args, **options)
            numbers = [v for v in jax.tree.leaves(y) if jnp.issubdtype(v.dtype, jnp.floating)]
            return jnp.sum(jnp.stack([jnp.sum(v.astype(jnp.float32)) for v in numbers]))

        found = nnx.merge(graph, jax.grad(total)(taps), rest, copy=True)
        inside = {layer.path: layer.inside for layer in layers(found)}
        return {path: (inside[path].tap[...], inside[path].tokens[...]) for path in meters}

    sums: dict[str, list[np.ndarray]] = {}
    for args, options in track(batches, "Calibrating", disable=not progress):
        for path, parts in statistics(rest, args, options).items():
            parts = [np.asarray(part, np.float64) for part in parts]
            sums[path] = [a + b for a, b in zip(sums[path], parts, strict=True)] if path in sums else parts
    found = {}
    for path, (statistic, tokens) in sums.items():
        squares = np.diagonal(statistic, axis1=-2, axis2=-1).copy() if moments else statistic
        found[path] = Inputs(squares, statistic if moments else None, int(tokens.max()))
    return found


def _arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call, and its keyword arguments."""
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (batch if isinstance(batch, tuple) else (batch,)), {}


def set_norms(model: Any, inputs: Mapping[str, Inputs]) -> None:
    """Give a sparse model the norms by which `nmjax.wanda` prunes weights.

    Args:
      model: A model with ``wanda(n,m)`` in slots ``fwd_rhs``. Its state is changed.
      inputs: The statistics of the layers' inputs, which `calibrate` returned for the model before it was sparse.

    Raises:
      ValueError: No layer has such a pruner, or a layer that has it was not calibrated, or has other features.

    >>> import nmjax as nm
    >>> x = jnp.array([[10., 1., 1., 1.]])
    >>> model = nnx.Linear(4, 1, kernel_init=lambda *_: jnp.array([[1.], [-2.], [3.], [-4.]]), rngs=nnx.Rngs(0))
    >>> found = nm.nnx.calibrate(model, [x])
    >>> model = nm.nnx.sparsify(model, nm.Recipe({".*": "fwd_rhs=ste(wanda(2,4))"}))
    >>> nm.nnx.set_norms(model, found)
    >>> nm.nnx.harden(model).kernel[...].ravel().tolist()
    [1.0, 0.0, 0.0, -4.0]
    """
    sites = {layer.path: layer.site for layer in layers(model) if layer.site is not None}
    chosen = {path: site for path, site in sites.items() if _scores_by_norms(site.sparsity.fwd_rhs)}
    if not chosen:
        raise ValueError("set_norms: no layer prunes its weight by norms. Write fwd_rhs=ste(wanda(2,4)) in the recipe.")
    missing = [path for path in chosen if path not in inputs]
    if missing:
        raise ValueError(f"set_norms: {', '.join(missing[:5])}: calibrate has no statistics of these layers.")
    for path, site in chosen.items():
        norms = np.sqrt(inputs[path].squares)
        holders = jax.tree.leaves(slot_state(site.state, "fwd_rhs"), is_leaf=lambda v: isinstance(v, NM))
        holders = [v for v in holders if jnp.issubdtype(v.dtype, jnp.floating) and v.size == norms.size]
        if len(holders) != 1:
            raise ValueError(
                f"set_norms: {path or 'the model'}: {norms.shape[-1]} features were measured, and the pruner has no so "
                "many norms. It prunes along one axis: leave out layers that contract several, or calibrate this model."
            )
        write(holders[0], jnp.asarray(norms.reshape(holders[0].shape), holders[0].dtype))


def _scores_by_norms(p: Pruner) -> bool:
    return isinstance(p, wanda) or any(map(_scores_by_norms, p.parts))


def prune(
    model: Model, recipe: Recipe, batches: Iterable[Any], solver: Solver = sparsegpt, *, in_turn: bool = True,
    progress: bool = False,
) -> Pruned:  # fmt: skip
    """Prune the weights of a trained model without training, so that the outputs of its layers change little.

    Args:
      model: A flax.nnx model. It is not changed. Switch off dropout, `model.eval()`.
      recipe: It says which layers are pruned, and to which n:m: that of their slot ``fwd_rhs``.
      batches: Batches of inputs, as in `calibrate`.
      solver: A function (weight, moments, n, m) such as `nmjax.oneshot.sparsegpt`, ``wanda`` or ``admm``.
      in_turn: True to calibrate each block on the blocks before it that are already pruned. Blocks that are one stack
        are pruned together.
      progress: True to show progress bars.

    Returns:
      The pruned copy, and the errors of its layers.

    Raises:
      ValueError: The recipe does not fit the model, or a layer's product is not that of two matrices.

    >>> import nmjax as nm
    >>> model, batches = nnx.Linear(8, 4, rngs=nnx.Rngs(0)), [jax.random.normal(jax.random.key(0), (100, 8))]
    >>> pruned = nm.nnx.prune(model, nm.Recipe({".*": "ste(2,4)"}), batches)
    >>> bool(nm.groups.is_nm(pruned.model.kernel[...], 2, 4, axis=0)), pruned.model.hardened
    (True, 2:4 along axis 0)
    """
    batches = list(batches)
    args, options = _arguments(batches[0]) if batches else ((), {})
    hard = harden(sparsify(nnx.clone(model), recipe, *args, **options))
    current = nnx.clone(model)
    targets = {layer.path: layer for layer in layers(hard) if layer.hardened is not None}
    parts: dict[str, list[str]] = {}
    for path in targets:
        number = re.match(r".*?\d+(?=/|$)", path)
        parts.setdefault(number[0] if number and in_turn else "", []).append(path)
    solved: dict[str, tuple[float, float]] = {}
    for paths in track(list(parts.values()), "Pruning", disable=not progress):
        only = "|".join(map(re.escape, paths))
        found = calibrate(current, batches, moments=True, only=only)
        now = {layer.path: layer for layer in with_calls(current, list(layers(current)), recipe, args, options)[0]}
        for path in paths:
            weight = _solve(now[path], found[path], targets[path].hardened, solver, solved)
            write(now[path].kernel, weight)
            write(targets[path].kernel, weight)
    return Pruned(hard, solved)


def _solve(
    layer: Layer, inputs: Inputs, pattern: Any, solver: Solver, solved: dict[str, tuple[float, float]]
) -> jax.Array:  # fmt: skip
    """Return the pruned kernel of a layer or of a stack, and write down the errors."""
    assert layer.operand is not None
    assert inputs.moments is not None
    operand, weight, stack = layer.operand, layer.weight(), len(layer.stack)
    axes = [a + stack for a in (*operand.contract, *operand.other)]
    values = np.asarray(layer.steps.apply(lambda w: w, weight) if not stack else weight, np.float64)
    pruned = np.empty_like(values)
    for index in np.ndindex(values.shape[:stack]):
        moved = values[index].transpose([a - stack for a in axes])
        matrix = moved.reshape(inputs.moments.shape[-1], -1)
        result = solver(matrix, inputs.moments[index], pattern.n, pattern.m)
        solved[layer.path + (f"[{','.join(map(str, index))}]" if stack else "")] = result.error, result.magnitude
        pruned[index] = result.weight.reshape(moved.shape).transpose(np.argsort([a - stack for a in axes]))
    made = jnp.asarray(pruned, weight.dtype)
    back = made if stack else layer.steps.apply(lambda w, p: p.astype(w.dtype), weight, made, back=True)
    return back.astype(layer.kernel.dtype)
