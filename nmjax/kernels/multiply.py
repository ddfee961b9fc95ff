"""Products of packed arrays as users call them: checked, and computed by a kernel if one serves them, else by XLA."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Float

from nmjax.core.refusal import Refusal
from nmjax.kernels import calls, check, tuning
from nmjax.kernels.family import BLOCKS, Blocks, Config, Shape, Target
from nmjax.kernels.format import Packed
from nmjax.kernels.limits import (
    FAMILIES,
    operands_refusal,
    product_refusal,
    shape_of,
)
from nmjax.kernels.targets import platform, pruning, target as target_of
from nmjax.kernels.tpu import Pruning


def spmm(
    packed: Packed, b: Float[Array, "*batch r c"], scale: ArrayLike | Blocks | None = None, *,
    axis: int = -2,
    transpose: bool = False, dtype: DTypeLike | None = None, backend: str = "auto", config: Config | None = None,
) -> Float[Array, "*batch m n"]:  # fmt: skip
    """Multiply a packed array by a dense one.

    It computes ``scale * A @ B`` for every matrix of a batch, where A is ``[M, K]`` and B is ``[K, N]``. Sums are
    float32, or float64 for a float64 A. Where no kernel serves the product, XLA computes it.

    TPUs have no sparse instructions. Their kernel reads arrays that are packed in the order ``"sublanes"``, and unpacks
    them in the memory of a core: it reads 0.5625 of the bytes of dense bfloat16 weights.

    It has no derivative. A product with a `nmjax.Sparsity`, such as `nmjax.einsum`, has one.

    >>> import nmjax as nm
    >>> packed = nm.pack(jnp.array([[0., 5., 0., 7.]]))
    >>> nm.kernels.spmm(packed, jnp.eye(4))
    Array([[0., 5., 0., 7.]], dtype=float32)
    >>> nm.kernels.spmm(packed, jnp.ones((1, 4)), 0.5, axis=-1)
    Array([[6.]], dtype=float32)
    >>> weight = nm.pack(jnp.array([[1., 2.], [0., 0.], [0., 4.], [3., 0.]]), axis=-2, order="sublanes")  # for TPUs
    >>> nm.kernels.spmm(weight, jnp.ones((1, 4)), axis=-1, transpose=True)  # x @ weight
    Array([[4., 6.]], dtype=float32)

    Args:
      packed: ``[..., M, K]`` packed along its last axis, or ``[..., K, M]`` packed along the one before it.
      b: ``[..., K, N]``, or ``[..., N, K]`` with ``axis=-1``. Its batch is that of ``packed``.
      scale: A factor of the result: a number, or an array with one number for every matrix of the batch. Or, of 8- and
        4-bit operands along K, the `nmjax.kernels.Blocks` of both. Blackwell's kernel takes these with
        ``backend="pallas"``.
      axis: The axis of ``b`` that is contracted, -1 or -2.
      transpose: If True, return ``[..., N, M]``.
      dtype: The dtype of the result. Without it, that of ``packed``, or bfloat16 for 8-bit values.
      backend: One of `nmjax.kernels.targets.BACKENDS`. ``"compact"`` does the same as ``"xla"``: a packed array has no
        chosen rows.
      config: The kernel's tiles, such as an `nmjax.kernels.HopperConfig`, of the device's family. Without it they are
        the best that are known.

    Returns:
      ``[..., M, N]``, or ``[..., N, M]`` with ``transpose``.

    Raises:
      TypeError: If an operand is of the wrong kind, or if the product is differentiated.
      ValueError: If shapes do not match, or if ``backend`` asks for a kernel and none serves the product.
    """
    _check_operands(packed, b, axis)
    b = jnp.asarray(b)
    if isinstance(scale, Blocks):
        _check_blocks(packed, b, axis, scale)
    elif scale is not None and jnp.shape(scale) not in ((), b.shape[:-2]):
        raise ValueError(f"spmm: scale is a number, or has the batch's shape {b.shape[:-2]}, got {jnp.shape(scale)}.")
    kinds = tuple(family.config for family in FAMILIES.values())
    if config is not None and not isinstance(config, kinds):
        names = ", ".join(f"nm.kernels.{kind.__name__}" for kind in kinds)
        raise TypeError(f"spmm: config is one of {names}, got {config!r}.")
    packed, b = jax.tree.map(_underived, (packed, b))
    if dtype is None:
        dtype = packed.dtype if packed.dtype.itemsize > 1 else jnp.bfloat16
    shape = shape_of(packed, b, axis, transpose, dtype)
    target = _serving(packed, b, shape, backend, config)
    if not isinstance(target, Refusal) and (isinstance(scale, Blocks) or shape.bits == 4):
        target = _of_blocks(target, backend, scale)
    if isinstance(target, Pruning) and not isinstance(scale, Blocks):
        return target.multiply(packed, b, scale, shape)
    if isinstance(target, Target):
        return calls.run(packed, b, scale, shape=shape, target=target, config=config)
    if backend in ("pallas", "interpret"):
        raise ValueError(f"spmm: backend={backend!r}, but {target}. Write backend='auto' or 'xla'.")
    return calls.reference(packed, b, scale, axis=axis, transpose=transpose, dtype=dtype)


def _check_operands(packed: Packed, b: jax.Array, axis: int) -> None:
    if not isinstance(packed, Packed):
        raise TypeError(f"spmm takes a packed array, got {type(packed).__name__}: pass nm.pack(x, axis).")
    if isinstance(b, Packed):
        raise TypeError("spmm: the other operand is a dense array of floats, got a packed array.")
    if not jnp.issubdtype(jnp.result_type(b), jnp.floating):
        raise TypeError(f"spmm: the other operand is a dense array of floats, got one of {jnp.result_type(b)}.")
    left, right = f"{packed.shape} packed along axis {packed.axis}", f"{jnp.shape(b)} along axis {axis}"
    rank = packed.values.ndim
    if packed.axis not in (-1, -2) or axis not in (-1, -2) or jnp.ndim(b) != rank or rank < 2:
        raise ValueError(
            f"spmm: {left}, times {right}: both operands must have the same number of axes, at least two, "
            "and each contracts its axis -1 or -2."
        )
    lengths = packed.shape[packed.axis], jnp.shape(b)[axis]
    batches = packed.shape[:-2], jnp.shape(b)[:-2]
    if lengths[0] != lengths[1] or batches[0] != batches[1]:
        raise ValueError(
            f"spmm: {left} does not multiply {right}: "
            f"their axes have {lengths[0]} and {lengths[1]} values, their batches are {batches[0]} and {batches[1]}."
        )


def _check_blocks(packed: Packed, b: jax.Array, axis: int, scale: Blocks) -> None:
    bits = {jnp.finfo(v.dtype).bits for v in (packed, b)}
    size, kind = BLOCKS.get(min(bits), BLOCKS[8])
    if packed.axis != -1 or axis != -1 or bits not in ({8}, {4}) or b.shape[-1] % size:
        raise ValueError(
            f"spmm: blocks with scales lie along the last axis of two 8-bit or two 4-bit operands, and {size} divides "
            f"it, got {packed.dtype.name} {packed.shape} packed along axis {packed.axis}, and {b.dtype.name} {b.shape} "
            f"along axis {axis}."
        )
    wanted = tuple((*v.shape[:-1], v.shape[-1] // size) for v in (packed, b))
    found, kinds = tuple(v.shape for v in scale), {v.dtype.name for v in scale}
    if found != wanted or kinds != {kind}:
        raise ValueError(
            f"spmm: the scales of blocks are {kind} of shapes {wanted[0]} and {wanted[1]}, got "
            f"{' and '.join(sorted(kinds))} of {found[0]} and {found[1]}."
        )


def _of_blocks(target: Target | Pruning, backend: str, scale: Any) -> Target | Refusal:
    """Return a device whose kernel takes scales of blocks, or why there is none."""
    if not isinstance(target, Target) or not FAMILIES[target.family].blocks or target.devices > 1:
        return Refusal("only Blackwell's kernels take scales of blocks, on one device")
    if not isinstance(scale, Blocks):
        return Refusal("FP4 products need the scales of blocks: pass nm.kernels.Blocks(...) as scale")
    if backend == "auto":
        return Refusal("the kernel with scales of blocks has not run on hardware: write backend='pallas' to use it")
    return target


def _serving(
    packed: Packed, b: jax.Array, shape: Shape, backend: str, config: Config | None
) -> Target | Pruning | Refusal:  # fmt: skip
    """Return the device whose kernels compute a product, or a refusal."""
    target = target_of(backend)
    if packed.order == "sublanes" and backend not in ("xla", "compact"):
        if backend == "interpret":
            target = Pruning("interpreter", interpret=True)
        else:
            target = pruning(backend) if platform() == "tpu" else Refusal("only TPUs read the order 'sublanes'")
        if isinstance(target, Refusal):
            return target
        return target.product_refusal(shape, b, config is not None) or target
    if isinstance(target, Refusal):
        return target
    refusal = operands_refusal(packed, b) or product_refusal(shape, target, config)
    if refusal is not None:
        return refusal
    if config is None and (tiling := tuning.chosen(shape, target)) is not None:
        config = tiling.config
    first, _packing, *others = check.kinds_of(shape, config=config)
    return check.fault(target, [first, *others]) or target


@jax.custom_jvp
def _underived(v: jax.Array) -> jax.Array:
    return v


@_underived.defjvp
def _(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> Any:
    raise TypeError("spmm has no derivative: differentiate a product with a sparsity, as nm.einsum(..., sparsity=...).")
