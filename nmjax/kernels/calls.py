"""Kernels as the rest of the library calls them, on arrays of any batch.

The functions here flatten the batch, pick the kernel for the device, and define how `jax.vmap` maps it. Callers ask
first if a kernel serves them: `nmjax.kernels.limits` says what fits, and `nmjax.kernels.check` if the kernels work.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Float, UInt32

from nmjax.core import random
from nmjax.core.context import Ctx
from nmjax.core.pruner import Pruner
from nmjax.kernels import shards, tuning
from nmjax.kernels.activations import Activation
from nmjax.kernels.batches import mapped
from nmjax.kernels.emulation import times_blocks
from nmjax.kernels.family import Blocks, Config, Shape, Target
from nmjax.kernels.format import Packed, pack, unpack
from nmjax.kernels.limits import COPY_COLUMNS, COPY_ROWS, FAMILIES, Copy
from nmjax.pruners import float8, identity
from nmjax.pruners.unbiased import group_uniforms


def _kernels() -> Any:
    """Import the kernels that pack when the first one is called.

    Some builds of jaxlib lack Pallas's GPU backends, and a plan or a run on a CPU needs none of them.
    """
    from nmjax.kernels import packing, tiles

    return SimpleNamespace(packing=packing, tiles=tiles)


# ---- products ----


def run(
    packed: Packed, b: Float[Array, "*batch r c"], scale: ArrayLike | Blocks | None, *, shape: Shape, target: Target,
    config: Config | None = None,
) -> Float[Array, "*batch m n"]:  # fmt: skip
    """Compute a product by a kernel.

    Args:
      packed: The packed operand.
      b: The dense operand, with the same batch.
      scale: A factor of the result: a number, or one for every matrix of the batch. Or the scales of blocks, on one
        Blackwell device.
      shape: The product's shape, as `nmjax.kernels.limits.shape_of` gives it.
      target: The device.
      config: The tiles. Without it they are the best that are known. Ignored on several devices.
    """
    batch = packed.shape[:-2]
    if isinstance(scale, Blocks):
        factors = [v.reshape(-1, *v.shape[-2:]) for v in scale]
    else:
        factors = [jnp.broadcast_to(jnp.asarray(1.0 if scale is None else scale, jnp.float32), batch).reshape(-1)]
    packed, b = jax.tree.map(nondifferentiable, (packed, b))
    if target.devices > 1:  # the shape may be that of one device's part
        rows, columns = packed.shape[-2:]
        m, k = (columns, rows) if shape.m_major else (rows, columns)
        shape = replace(shape, m=m, n=b.shape[-1 if shape.n_major else -2], k=k)
    if config is None and target.devices == 1:  # not in the cached function, because a table may be written later
        config = _tiles(shape, target)
    call = _product(packed.axis, packed.order, shape, target, config, scale is not None)
    flat = lambda v: v.reshape(math.prod(batch), *v.shape[len(batch) :])
    y = call(flat(packed.values), flat(packed.indices), flat(b), *factors)
    return y.reshape(*batch, *y.shape[1:])


def _tiles(shape: Shape, target: Target) -> Config:
    """Return the best tiles that are known."""
    tiling = tuning.chosen(shape, target)
    assert tiling is not None, shape  # callers ask limits.product_refusal first
    return tiling.config


@lru_cache
def _product(
    axis: int, order: str, shape: Shape, target: Target, config: Config | None, scaled: bool
) -> Callable[..., jax.Array]:  # fmt: skip
    if target.devices == 1:
        return mapped(_multiply(axis, order, shape, target, config, scaled))
    multiply = partial(_multiply, axis, order, target=target, config=None, scaled=scaled)
    return mapped(shards.product(lambda part: multiply(shape=part), shape, order == "words16", target))


def _multiply(
    axis: int, order: str, shape: Shape, target: Target, config: Config | None, scaled: bool
) -> Callable[..., jax.Array]:  # fmt: skip
    """Return the product of one device as a function of values, words, the dense operand and scales."""
    config = _tiles(shape, target) if config is None else config

    def call(values: jax.Array, indices: jax.Array, b: jax.Array, *factors: jax.Array) -> jax.Array:
        packed, scale = Packed(values, indices, axis, 2, 4, order), None
        if scaled:
            scale = Blocks(*factors) if len(factors) == 2 else factors[0]
        if target.interpret and target.devices > 1:  # the interpreter does not work in a program that XLA partitions
            form = {"axis": -2 if shape.n_major else -1, "transpose": shape.transpose, "dtype": shape.out}
            return reference(packed, b, scale, **form)
        return FAMILIES[target.family].spmm(packed, b, scale, shape, config, target)

    return call


def reference(
    packed: Packed, b: Float[Array, "*batch r c"], scale: ArrayLike | Blocks | None = None, *, axis: int,
    transpose: bool, dtype: DTypeLike,
) -> Float[Array, "*batch m n"]:  # fmt: skip
    """Compute by XLA what `run` computes: `unpack`, then a dense product. This is the definition of the product."""
    a = unpack(packed)
    if isinstance(scale, Blocks):
        (a, b), scale = map(times_blocks, (a, b), scale), None
    a, b = (v.astype(jnp.bfloat16) if v.dtype.itemsize == 1 else v for v in (a, b))
    batch = tuple(range(a.ndim - 2))
    dims = (((a.ndim + packed.axis,), (b.ndim + axis,)), (batch, batch))
    y = lax.dot_general(a, b, dims, preferred_element_type=jnp.float64 if a.dtype == jnp.float64 else jnp.float32)
    if scale is not None:
        scale = jnp.asarray(scale, y.dtype)
        y = y * (scale[..., None, None] if scale.ndim else scale)
    return (jnp.swapaxes(y, -1, -2) if transpose else y).astype(dtype)


@jax.custom_jvp
def nondifferentiable(v: jax.Array) -> jax.Array:
    """Return a kernel's input unchanged, and refuse to differentiate it. Without this its derivative would be zero."""
    return v


@nondifferentiable.defjvp
def _(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> Any:
    raise TypeError(
        "a packed or compacted product has no derivative beyond the gradient of its layer: for forward mode or a "
        "second derivative, write backend='xla'."
    )


# ---- packed and FP8 forms ----

Form = Packed | tuple[jax.Array | Packed, jax.Array]
"""A packed array of 16-bit values; or an FP8 array, packed or not, with the factor that undoes its scale."""


def compress(
    x: Float[Array, "*batch r c"], axis: int = -1, pruner: Pruner = identity, *, key: Any = None, state: Any = None,
    target: Target,
) -> Packed:  # fmt: skip
    """Prune 16-bit values along one of the last two axes and pack them, in one pass.

    Args:
      x: The array. Its last two axes divide by 64.
      axis: The axis of the groups, -1 or -2.
      pruner: A pruner that kernels fuse (`nmjax.kernels.limits.fuses`). With `identity` the array is 2:4 already.
      key: The key of the pruner's draws.
      state: The pruner's state.
      target: The device.
    """
    call = _compression(axis, pruner, target)
    packed = call(_flat(x), words_of_key(key, pruner)[None], _scale(state))
    return _unflat(packed, x.shape[:-2])


@lru_cache
def _compression(axis: int, pruner: Pruner, target: Target) -> Callable[..., Packed]:
    compress = partial(_kernels().packing.compress, axis=axis, pruner=pruner, interpret=target.interpret)
    outputs = ("bij", "bijw" if axis == -1 else "bjiw")

    def call(x: jax.Array, words: jax.Array, scale: jax.Array) -> Packed:
        return _in_parts(partial(compress, whole=x.shape), x, (words, scale), (64, 64), outputs, target)

    return mapped(call)


def compress_activated(
    activation: Activation, h: Float[Array, "*batch r c"], g: Float[Array, "*batch r c"], pruner: Pruner = identity, *,
    key: Any = None, state: Any = None, target: Target,
) -> tuple[Float[Array, "*batch r c"], Packed]:  # fmt: skip
    """Compute the gradient of an activation function's input, prune it along axis -2 and pack it, in one pass.

    Args:
      activation: The function. It is `nmjax.kernels.activations.known`.
      h: Its input.
      g: The gradient of its output.
      pruner, key, state: As in `compress`.
      target: The device. Several devices are not supported.

    Returns:
      The gradient, and its packed form.
    """
    call = _compression_activated(activation, pruner, target)
    made, packed = call(_flat(h), _flat(g), words_of_key(key, pruner)[None], _scale(state))
    return _unflat(made, g.shape[:-2]), _unflat(packed, g.shape[:-2])


@lru_cache
def _compression_activated(activation: Activation, pruner: Pruner, target: Target) -> Callable[..., Any]:
    options = {"activation": activation, "pruner": pruner, "interpret": target.interpret}

    def call(h: jax.Array, g: jax.Array, words: jax.Array, scale: jax.Array) -> tuple[jax.Array, Packed]:
        origin = jnp.zeros(3, jnp.int32)
        return _kernels().packing.compress_activated(h, g, words, scale, origin, whole=g.shape, **options)

    return mapped(call)


def copies(
    x: Float[Array, "*batch r c"], wanted: tuple[Copy, ...], *, keys: Sequence[tuple[Any, Any]] = (),
    state: Any = None, target: Target,
) -> list[Form]:  # fmt: skip
    """Make forms of 16-bit values, in one pass.

    Args:
      x: The array. Its last two axes divide by 64, or as `nmjax.kernels.limits.copies_refusal` says.
      wanted: The forms.
      keys: For each form the key of its pruner's draws, and that of random rounding.
      state: The pruners' state.
      target: The device.
    """
    keys = keys or [(None, None)] * len(wanted)
    words = [
        jnp.concatenate([words_of_key(prune, copy.pruner), words_of_key(rounding)])[None]
        for copy, (prune, rounding) in zip(wanted, keys, strict=True)
    ]
    forms = _copying(tuple(wanted), target)(_flat(x), _scale(state), *words)
    unflat = partial(_unflat, batch=x.shape[:-2])
    return [unflat(form) if undo is None else (unflat(form), undo[0]) for form, undo in forms]


def copy_by_xla(
    x: Float[Array, "*batch r c"], copy: Copy, key: Any = None, rounding: Any = None, state: Any = None
) -> Form:  # fmt: skip
    """Make one form by XLA: the definition of what `copies` makes. ``key, rounding`` are its keys in `copies`."""
    ctx = Ctx(None if key is None else random.words(key), 0, state)
    pruned = copy.pruner(x, copy.axis, ctx)
    if copy.format is None:
        return pack(pruned, copy.axis, order="words16")
    scale = float8.scale(
        float8.largest(x) * copy.pruner.kernel_form.growth(1.0 if state is None else state), copy.format
    )
    draws = None
    if copy.rounding == "random":
        draws = jnp.repeat(group_uniforms(x, copy.axis, 4, Ctx(random.words(rounding))), 4, copy.axis)
    small = float8.cast(pruned.astype(jnp.float32) * scale, copy.format, draws)
    small = jnp.swapaxes(small, -1, -2) if copy.turns else small
    return (pack(small, -1, order="words8") if copy.packed else small), 1 / scale


@lru_cache
def _copying(wanted: tuple[Copy, ...], target: Target) -> Callable[..., list[tuple[Any, jax.Array | None]]]:
    copies = partial(_kernels().tiles.copies, wanted=wanted, interpret=target.interpret)
    outputs: list[str] = []
    for copy in wanted:
        cut = "bji" if copy.turns else "bij"
        outputs += ["bij", cut + "w"] if copy.format is None else [cut] * (1 + copy.packed)
    in_fp8 = any(copy.format is not None for copy in wanted)
    block = (COPY_ROWS, COPY_COLUMNS) if in_fp8 else (64, 64)

    def call(x: jax.Array, beta: jax.Array, *words: jax.Array) -> list[tuple[Any, jax.Array | None]]:
        factors = _kernels().tiles.factors_of(x, beta, wanted)
        forms = _in_parts(partial(copies, whole=x.shape), x, (*words, factors), block, outputs, target)
        undo = [None if copy.format is None else 1 / factors[:, 1 + n] for n, copy in enumerate(wanted)]
        return list(zip(forms, undo, strict=True))

    return mapped(call)


def _in_parts(
    pack: Callable[..., Any], x: jax.Array, scalars: Sequence[jax.Array], block: tuple[int, int],
    outputs: Sequence[str], target: Target,
) -> Any:  # fmt: skip
    """Call a kernel that packs an array. On several devices each packs its part (`nmjax.kernels.shards.blocks`)."""
    if target.devices == 1:
        return pack(x, *scalars, jnp.zeros(3, jnp.int32))
    tree = jax.tree.structure(jax.eval_shape(pack, x, *scalars, jnp.zeros(3, jnp.int32)))
    flat = lambda *arrays: jax.tree.leaves(pack(*arrays))
    return jax.tree.unflatten(tree, shards.blocks(flat, x, scalars, block, outputs))


def _scale(state: Any) -> Float[Array, "1"]:
    """Return the scale of `soft`, with an axis in front."""
    return (jnp.ones((), jnp.float32) if state is None else jnp.asarray(state, jnp.float32).reshape(()))[None]


def words_of_key(key: Any, pruner: Pruner = identity) -> UInt32[Array, " n"]:
    """Return the scrambled words of the keys that a pruner draws by, two for each, and zeros if there is no key."""
    if key is None:
        return jnp.zeros(2, jnp.uint32)
    keys = pruner.kernel_form.keys(key)
    return jnp.concatenate([jnp.stack(random.scrambled(random.words(own))) for own in keys])


# ---- batches ----


def _flat(x: jax.Array) -> jax.Array:
    return x.reshape(-1, *x.shape[-2:])


def _unflat(form: Any, batch: tuple[int, ...]) -> Any:
    return jax.tree.map(lambda v: v.reshape(*batch, *v.shape[1:]), form)
