"""Products of packed 2:4 weights on TPUs: the weights stay packed in HBM and are unpacked in VMEM, block by block.

TPUs have no sparse instructions, so this saves bytes and no FLOPs. It is for products that wait for their weights, such
as those of decoding.

The order is ``sublanes`` of `nmjax.kernels.format`. The nibble of a group lies in the lane and the sublane of its
values, so that nothing moves between lanes. In bfloat16 the two values of a group share 32 bits, and so do its members
0 and 1, and 2 and 3.
"""

from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.tpu as pltpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, UInt32

from nmjax.kernels.batches import result
from nmjax.kernels.format import NO_GROUP
from nmjax.kernels.tpu_prune import LANES, quotient, remainder

Ref = Any  # a reference to a block of an array, inside a kernel

CHUNK = 256  # values along k that a register of words unpacks: 8 sublanes x 8 nibbles x 4
BLOCK = 2**21  # bytes of a block of weights once they are unpacked
DEEP, WIDE = 1024, 256  # rows and columns that are unpacked and multiplied at once


def spmm(
    values: Float[Array, "batch kept n"], words: UInt32[Array, "batch w n"], x: Float[Array, "batch m k"],
    scales: Float[Array, " batch"], *, dtype: DTypeLike, interpret: bool = False,
) -> Float[Array, "batch m n"]:  # fmt: skip
    """Multiply dense matrices by packed ones: ``scales * x @ w``. The weights are read once for every 256 rows of x.

    Args:
      values: The values of w ``[K, N]``, packed along K, in float32 or bfloat16.
      words: Their places, in the order ``sublanes``.
      x: The dense matrices, of the dtype of ``values``.
      scales: Factors of the float32 sums.
      dtype: The dtype of the result.
      interpret: True to run on a CPU.
    """
    (batch, m, k), n, size = x.shape, values.shape[-1], values.dtype.itemsize
    up = lambda size, to: pl.cdiv(size, to) * to
    height = min(up(m, 16), 256)
    width = min(up(n, WIDE), max(512, min(16 * height, 4096 // size)))  # x is read again for every column of blocks
    most = BLOCK // (width * size)
    deep = min(up(k, CHUNK), DEEP, most // CHUNK * CHUNK)
    depth = min(up(k, deep), most // deep * deep)
    x = jnp.pad(x, ((0, 0), (0, 0), (0, -k % depth)))  # beyond K are zeros in both operands
    steps = pl.cdiv(k, depth)

    def nm_unpack_and_multiply(
        scales: Ref, x: Ref, values: Ref, words: Ref, y: Ref, sums: Ref, line: Ref, *slabs: Ref
    ) -> None:
        step, scale = pl.program_id(3), scales[pl.program_id(0)]

        @pl.when(step == 0)
        def _() -> None:
            sums[...] = jnp.zeros_like(sums)

        def part(number: Any, _: Any) -> Any:
            down = remainder(number, depth // deep)
            left = quotient(number, depth // deep) * WIDE
            rows = lambda by: pl.ds(pl.multiple_of(down * (deep // by), deep // by), deep // by)
            for lane, slab in enumerate(slabs):
                own = pl.ds(pl.multiple_of(left + lane * LANES, LANES), LANES)
                kept, places = values[rows(2), own], words[rows(32), own]
                if size == 4:
                    line[...] = kept
                for chunk in range(deep // CHUNK):
                    word = places[8 * chunk : 8 * chunk + 8]
                    if k % depth:
                        inside = step * depth + down * deep + chunk * CHUNK < k
                        word = jnp.where(inside, word, np.uint32(0x11111111 * NO_GROUP))
                    word = lax.bitcast_convert_type(word ^ np.uint32(0x88888888), jnp.int32)  # 1, 2, 3 become 3, 0, 1
                    for i in range(8):
                        at = 8 * (8 * chunk + i)  # the first of eight groups
                        if size == 2:
                            members = _pairs(pltpu.bitcast(kept[2 * at : 2 * at + 16], jnp.int32), word, i)
                        else:
                            v0, v1 = (line[pl.ds(2 * at + slot, 8, stride=2), :] for slot in range(2))
                            members = _singles(v0, v1, word, i)
                        for j, member in enumerate(members):
                            slab[pl.ds(size * at + j, 8, stride=size), :] = member
            w = jnp.concatenate([slab[...] if size == 4 else pltpu.bitcast(slab[...], x.dtype) for slab in slabs], 1)
            own = pl.ds(pl.multiple_of(left, WIDE), WIDE)
            sums[:, own] += jnp.dot(x[:, rows(1)], w, preferred_element_type=jnp.float32)
            return np.int32(0)

        lax.fori_loop(np.int32(0), np.int32(width // WIDE * (depth // deep)), part, np.int32(0))

        @pl.when(step == steps - 1)
        def _() -> None:
            y[...] = (sums[...] * scale).astype(y.dtype)

    packed = lambda by: pl.BlockSpec((None, depth // by, width), lambda b, i, j, step: (b, step, j))
    grid = (batch, pl.cdiv(m, height), pl.cdiv(n, width), steps)
    moved = grid[1] * (values.nbytes + words.nbytes) + grid[2] * x.nbytes + batch * m * n * jnp.dtype(dtype).itemsize
    return pl.pallas_call(
        nm_unpack_and_multiply,
        out_shape=result((batch, m, n), dtype, values, words, x, scales),
        grid=grid,
        in_specs=[
            pl.BlockSpec(memory_space=pltpu.SMEM),
            pl.BlockSpec((None, height, depth), lambda b, i, j, step: (b, i, step)),
            packed(2),
            packed(32),
        ],
        out_specs=pl.BlockSpec((None, height, width), lambda b, i, j, step: (b, i, j)),
        scratch_shapes=[
            pltpu.VMEM((height, width), jnp.float32),
            pltpu.VMEM((deep // 2, LANES), values.dtype),
            *[pltpu.VMEM((deep * size // 4, LANES), jnp.int32 if size == 2 else jnp.float32)] * (WIDE // LANES),
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",) * 3 + ("arbitrary",)),
        cost_estimate=pl.CostEstimate(flops=2 * batch * m * n * k, bytes_accessed=moved, transcendentals=0),
        interpret=interpret,
    )(scales, x, values, words)


def _pairs(kept: jax.Array, word: jax.Array, i: int) -> list[jax.Array]:
    """Return members 0 and 1, and 2 and 3, of eight groups of 16-bit values, two in a lane."""
    first, second = _field(word, 4 * i, 16), _field(word, 4 * i + 2, 16)
    low, high = kept & 0xFFFF, lax.shift_right_logical(kept, np.int32(16))
    before, after = second >= 32, first >= 32  # the values are members 0 and 1; 2 and 3; both if there is no group
    return [
        jnp.where(after, 0, jnp.where(before, kept, lax.shift_left(low, first))),
        jnp.where(before, 0, jnp.where(after, kept, lax.shift_left(high, second))),
    ]


def _singles(v0: jax.Array, v1: jax.Array, word: jax.Array, i: int) -> list[jax.Array]:
    """Return the members of eight groups of 32-bit values."""
    first, second = _field(word, 4 * i, 1), _field(word, 4 * i + 2, 1)
    return [
        jnp.where(first == 0, v0, 0.0),
        jnp.where(first == 1, v0, jnp.where(second == 3, v1, 0.0)),
        jnp.where(first == 2, v0, jnp.where(second == 0, v1, 0.0)),
        jnp.where(second == 1, v1, 0.0),
    ]


def _field(word: jax.Array, bit: int, by: int) -> jax.Array:
    """Return the two bits of a word from this one on, times a power of two."""
    left = by.bit_length() - 1 - bit
    return (word << left if left >= 0 else lax.shift_right_logical(word, np.int32(-left))) & (3 * by)
