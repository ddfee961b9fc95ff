"""Packed products and packing for arrays of any batch: checked, chosen for the device, and mapped by `jax.vmap`.

The definition is XLA's: `unpack` and a dense product. A kernel serves where it can; what it cannot serve it says.
"""

import math
from functools import lru_cache, partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap

from nmjax.core import random, versions
from nmjax.core.pruner import Pruner
from nmjax.kernels import ampere, compress as packing_kernels, copies as float8_kernels, hopper, tuning
from nmjax.kernels.copies import Copy
from nmjax.kernels.format import Packed, unpack
from nmjax.kernels.targets import Target, as_varying, target, varying
from nmjax.kernels.tuning import Shape
from nmjax.pruners import identity, mse, mvue, soft


def spmm(
    packed: Packed, b: jax.Array, scale=None, *, axis: int = -2, transpose: bool = False, dtype=None,
    backend: str = "auto", config: tuning.Config | None = None,
) -> jax.Array:  # fmt: skip
    """`nmjax.kernels.spmm`.

    >>> from nmjax.kernels.format import pack
    >>> spmm(pack(jnp.array([[0., 5., 0., 7.]])), jnp.eye(4))
    Array([[0., 5., 0., 7.]], dtype=float32)
    """
    if not isinstance(packed, Packed):
        raise TypeError(f"spmm takes a packed array, got {type(packed).__name__}: pass nm.pack(x, axis).")
    if isinstance(b, Packed) or not jnp.issubdtype(jnp.result_type(b), jnp.floating):
        kind = "a packed array" if isinstance(b, Packed) else f"one of {jnp.result_type(b)}"
        raise TypeError(f"spmm: the other operand is a dense array of floats, got {kind}.")
    b = jnp.asarray(b)
    if packed.axis not in (-1, -2) or axis not in (-1, -2) or b.ndim != packed.values.ndim or b.ndim < 2:
        raise ValueError(
            f"spmm: {packed.shape} packed along axis {packed.axis}, times {b.shape} along {axis}: both have the same number of "
            "axes, at least two, of which each contracts one of its last two, -1 or -2."
        )
    if packed.shape[packed.axis] != b.shape[axis] or packed.shape[:-2] != b.shape[:-2]:
        raise ValueError(
            f"spmm: {packed.shape} packed along axis {packed.axis} does not multiply {b.shape} along axis {axis}: their axes "
            f"have {packed.shape[packed.axis]} and {b.shape[axis]} values, their batches are {packed.shape[:-2]} and {b.shape[:-2]}."
        )
    if scale is not None and jnp.shape(scale) not in ((), b.shape[:-2]):
        raise ValueError(f"spmm: scale is a number, or of the batch's shape {b.shape[:-2]}, got {jnp.shape(scale)}.")
    if config is not None and not isinstance(config, tuning.Config):
        raise TypeError(f"spmm: config is an nm.kernels.hopper.Config or nm.kernels.ampere.Config, got {config!r}.")
    packed, b = jax.tree.map(_no_layer, (packed, b))
    dtype = jnp.dtype(dtype or (packed.dtype if packed.dtype.itemsize > 1 else jnp.bfloat16))
    shape = shape_of(packed, b, axis, transpose, dtype)
    here = target(backend)
    if isinstance(here, Target):
        here = unfit(packed, b, shape, here, config) or fault(here) or here
    if isinstance(here, str):
        if backend in ("pallas", "interpret"):
            raise ValueError(f"spmm: backend={backend!r}, but {here}. Write backend='auto', or 'xla'.")
        return reference(packed, b, scale, axis=axis, transpose=transpose, dtype=dtype)
    return run(packed, b, scale, shape=shape, here=here, config=config)


def reference(packed: Packed, b: jax.Array, scale=None, *, axis: int, transpose: bool, dtype) -> jax.Array:
    """What `spmm` is, by XLA."""
    a = unpack(packed)
    a, b = (v.astype(jnp.bfloat16) if v.dtype.itemsize == 1 else v for v in (a, b))
    batch = tuple(range(a.ndim - 2))
    dims = (((a.ndim + packed.axis,), (b.ndim + axis,)), (batch, batch))
    y = lax.dot_general(a, b, dims, preferred_element_type=jnp.float64 if a.dtype == jnp.float64 else jnp.float32)
    if scale is not None:
        scale = jnp.asarray(scale, y.dtype)
        y = y * (scale[..., None, None] if scale.ndim else scale)
    return (jnp.swapaxes(y, -1, -2) if transpose else y).astype(dtype)


def shape_of(packed: Packed, b: jax.Array, axis: int, transpose: bool, dtype) -> Shape:
    """The product as tables know it."""
    *_, rows, columns = packed.shape
    m, k = (columns, rows) if packed.axis == -2 else (rows, columns)
    n = b.shape[-1 if axis == -2 else -2]
    return Shape(m, n, k, packed.dtype.name, packed.axis == -2, axis == -2, transpose, jnp.dtype(dtype).name)


def unfit(packed: Packed, b: jax.Array, shape: Shape, here: Target, config=None) -> str | None:
    """Why no kernel serves a product; None if one does."""
    if packed.order == "plain":
        return f"{packed.dtype.name} {packed.shape} is packed in plain order, which tensor cores do not read"
    same = b.dtype == packed.dtype if packed.dtype.itemsize == 2 else b.dtype.itemsize == 1
    if not same:
        return (
            f"the operands are {packed.dtype.name} and {b.dtype.name}: both are of one 16-bit kind, or both of 8 bits"
        )
    return shape_unfit(shape, here, config)


def shape_unfit(shape: Shape, here: Target, config=None) -> str | None:
    """Why no kernel serves a product of this shape; None if one does."""
    size = jnp.dtype(shape.dtype).itemsize
    if min(shape.m, shape.n, shape.k) < 1:
        return f"M, N, K = {shape.m}, {shape.n}, {shape.k}: it is empty"
    if shape.out not in ("bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2"):
        return f"a result of {shape.out}, of which kernels know nothing"
    if shape.dtype not in ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"):
        return f"{shape.dtype}: kernels take bfloat16, float16 and 8-bit floats"
    if size == 1 and here.family != "hopper":
        return f"{here.kind} has no FP8 sparse tensor cores that there is a kernel for"
    if size == 1 and (shape.m_major or shape.n_major):
        return "8-bit operands lie along k"
    if here.family == "ampere" and not versions.has_warp_products():
        return f"jax {jax.__version__} has no layouts for Ampere's instructions: they come with 0.11"
    if config is not None:
        return tuning.misfit(shape, config)
    if tuning.chosen(shape, here) is None:
        return f"M, N, K = {shape.m}, {shape.n}, {shape.k} do not divide into tiles: of 128 or 64, 64 and {128 // size}"
    return None


def run(packed: Packed, b: jax.Array, scale, *, shape: Shape, here: Target, config=None) -> jax.Array:
    """The product by its kernel."""
    config = config or tuning.chosen(shape, here)[0]
    batch = packed.shape[:-2]
    flat = lambda v, rank: v.reshape(math.prod(batch), *v.shape[len(batch) :]) if rank != len(batch) else v
    scales = jnp.broadcast_to(jnp.asarray(1.0 if scale is None else scale, jnp.float32), batch).reshape(-1)
    packed, b = jax.tree.map(underived, (packed, b))
    call = _product(packed.axis, packed.order, shape, here, config, scale is not None)
    y = call(flat(packed.values, 1), flat(packed.indices, 1), flat(b, 1), scales)
    return y.reshape(*batch, *y.shape[1:])


@lru_cache
def _product(axis, order, shape, here, config, scaled):
    kernel = hopper if isinstance(config, hopper.Config) else ampere
    options = {"blocks": here.cores} if kernel is hopper else {}
    options |= {"b_axis": -2 if shape.n_major else -1, "transpose": shape.transpose, "dtype": jnp.dtype(shape.out)}

    def call(values, indices, b, scales):
        packed = Packed(values, indices, axis, 2, 4, order)
        return kernel.spmm(packed, b, scales if scaled else None, config=config, interpret=here.interpret, **options)

    return _mapped(call)


@jax.custom_jvp
def _no_layer(v):
    return v


@_no_layer.defjvp
def _(primals, tangents):
    raise TypeError("spmm has no derivative: differentiate a product with a sparsity, as nm.einsum(..., sparsity=...).")


@jax.custom_jvp
def underived(v):
    """What a kernel reads: it has no derivative, and would give zeros for one."""
    return v


@underived.defjvp
def _(primals, tangents):
    raise TypeError(
        "a packed product has no derivative beyond the gradient of its layer: for forward mode or a second derivative, write "
        "backend='xla'."
    )


def fault(here: Target) -> str | None:
    """Why kernels are not to be used here, though they could be."""
    from nmjax.kernels import check

    return None if here.interpret else check.fault(here)


def _mapped(call):
    """A kernel over arrays with a batch in front, which `jax.vmap` makes larger, and `jax.shard_map` differ between devices:
    to a kernel all inputs do, if one does."""

    @custom_vmap
    def mapped(*arrays):
        axes = varying(*arrays)
        out = call(*(as_varying(v, axes) for v in arrays))
        return jax.tree.map(lambda v: as_varying(v, axes), out)

    @mapped.def_vmap
    def rule(size, batched, *arrays):
        spread = lambda v, is_batched: v if is_batched else jnp.broadcast_to(v, (size, *v.shape))
        arrays = [spread(v, b) for v, b in zip(arrays, batched, strict=True)]
        out = mapped(*(v.reshape(-1, *v.shape[2:]) for v in arrays))
        out = jax.tree.map(lambda v: v.reshape(size, -1, *v.shape[1:]), out)
        return out, jax.tree.map(lambda _: True, out)

    return mapped


# ---- packing ----

FUSED = (mse, mvue, soft)
"""Pruners that a kernel prunes and packs by in one pass; what others prune is packed after them."""


def fuses(pruner: Pruner) -> bool:
    """Whether a kernel prunes by this pruner: 2:4, or sparser in groups of four."""
    if isinstance(pruner, soft) and pruner.scale == "now":
        return False  # which is a sum over the whole array
    return pruner == identity or (type(pruner) in FUSED and pruner.m == 4 and pruner.n <= 2)


def compress(x: jax.Array, axis: int = -1, pruner: Pruner = identity, *, key=None, state=None, here: Target) -> Packed:
    """``[..., R, C]`` of 16-bit values pruned along one of the last two axes, and packed, in one pass."""
    call = _compression(axis, pruner, here.interpret)
    *batch, rows, columns = x.shape
    words, scale = _noise(key, state)
    packed = call(x.reshape(-1, rows, columns), words, scale)
    shaped = lambda v: v.reshape(*batch, *v.shape[1:])
    return Packed(shaped(packed.values), shaped(packed.indices), axis, 2, 4, packed.order)


@lru_cache
def _compression(axis, pruner, interpret):
    return _mapped(partial(packing_kernels.compress, axis=axis, pruner=pruner, interpret=interpret))


def compress_both(x: jax.Array, pruner: Pruner = identity, *, here: Target) -> tuple[Packed, Packed]:
    """``[..., R, C]`` packed along the last axis and along the one before, out of one reading."""
    *batch, rows, columns = x.shape
    both = _compression_both(pruner, here.interpret)(x.reshape(-1, rows, columns))
    shaped = lambda v: v.reshape(*batch, *v.shape[1:])
    return tuple(Packed(shaped(p.values), shaped(p.indices), p.axis, 2, 4, p.order) for p in both)


@lru_cache
def _compression_both(pruner, interpret):
    return _mapped(partial(packing_kernels.compress_both, pruner=pruner, interpret=interpret))


def copies(x: jax.Array, wanted: tuple[Copy, ...], *, keys=None, state=None, here: Target) -> list:
    """FP8 forms of ``[..., R, C]`` of 16-bit values, each with the factor that undoes its scale, out of one reading.
    ``keys`` are those of the pruners' draws and of the roundings'."""
    *batch, rows, columns = x.shape
    words = jnp.zeros(4, jnp.uint32) if keys is None else jnp.concatenate([random.words(key) for key in keys])
    _, beta = _noise(None, state)
    call = _copying(tuple(wanted), here.interpret)
    shaped = lambda v: v.reshape(*batch, *v.shape[1:])
    made = call(x.reshape(-1, rows, columns), words[None], beta)
    return [(jax.tree.map(shaped, copy), undo[0]) for copy, undo in made]


def copies_unfit(sides: list[int]) -> str | None:
    """Why a matrix has no FP8 forms; None if it does."""
    by = (float8_kernels.ROWS, float8_kernels.COLUMNS)
    if any(side % unit for side, unit in zip(sides, by, strict=True)):
        return f"FP8 forms of {sides[0]} x {sides[1]}: the first divides by {by[0]} and the second by {by[1]}"
    return None


@lru_cache
def _copying(wanted, interpret):
    return _mapped(partial(float8_kernels.copies, wanted=wanted, interpret=interpret))


def _noise(key, state):
    """The words and the scale of one array."""
    words = jnp.zeros(2, jnp.uint32) if key is None else random.words(key)
    scale = jnp.ones((), jnp.float32) if state is None else jnp.asarray(state, jnp.float32).reshape(())
    return words[None], scale[None]
