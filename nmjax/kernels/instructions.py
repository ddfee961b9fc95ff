"""Sparse tensor-core instructions, which Pallas lacks: their PTX text, and the operands that they take.

Hopper's ``wgmma.mma_async.sp`` multiplies 64 rows of packed A by up to 256 columns of B, along 32 k for 16-bit values
and 64 k for 8-bit ones. Either way it takes 32 bytes of a row of A and 64 bytes of B, so that descriptors, swizzles
and strides are the same. A and B come from shared memory: 16-bit values in either order, 8-bit values contiguous along
k. The accumulator lies in the registers of the 128 threads of a warpgroup. Each thread also hands over one word of
positions (`nmjax.kernels.format`).

Ampere's ``mma.sp`` does 16 x 8 x 32 out of the registers of a warp, with the same words.

Everything here runs while a kernel is lowered, in Mosaic's lane semantics, where an array is the registers of one
thread.
"""

from typing import Any, NamedTuple

import jax.experimental.pallas.mosaic_gpu as plgpu
import numpy as np
from jax.experimental.mosaic.gpu import fragmented_array as fa, mma_utils, utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref, nvvm

Operand = Any  # a value of MLIR, inside a kernel that is lowered

_PTX = {"bf16": "bf16", "f16": "f16", "f8E4M3FN": "e4m3", "f8E5M2": "e5m2"}


class Swizzled(NamedTuple):
    """The layout of rows in shared memory."""

    swizzle: int  # bytes
    transforms: tuple[Any, ...]


def swizzled(values: int, itemsize: float) -> Swizzled:
    """Return the layout of rows of so many values in shared memory."""
    bits = int(8 * itemsize)
    swizzle = plgpu.find_swizzle(values * bits)
    return Swizzled(swizzle, (plgpu.TilingTransform((8, 8 * swizzle // bits)), plgpu.SwizzleTransform(swizzle)))


def _i32() -> ir.Type:
    return ir.IntegerType.get_signless(32)


def _constant(value: int) -> Operand:
    return llvm.ConstantOp(_i32(), ir.IntegerAttr.get(_i32(), value)).result


def _wgmma_text(n: int, a: str, b: str, wide: bool) -> tuple[str, str]:
    """Return PTX text and its constraints.

    The operands are n/2 accumulators tied to the results, the descriptors of A and B, the word, its selector, a flag to
    accumulate, two signs and, for 16-bit values, two transpositions.
    """
    size = n // 2
    first = 2 * size  # of the operands that are not accumulators
    results = ",".join(f"${i}" for i in range(size))
    flips = f", ${first + 7}, ${first + 8}" if wide else ""
    text = (
        f"{{ .reg .pred p; setp.ne.b32 p, ${first + 4}, 0; "
        f"wgmma.mma_async.sp.sync.aligned.m64n{n}k{32 if wide else 64}.f32.{a}.{b} "
        f"{{{results}}}, ${first}, ${first + 1}, ${first + 2}, ${first + 3}, p, ${first + 5}, ${first + 6}{flips}; }}\n"
    )
    ties = [str(i) for i in range(size)]
    return text, ",".join(["=f"] * size + ties + ["l", "l", "r"] + ["n"] * (6 if wide else 4))


def wgmma_step(
    acc: fa.FragmentedArray, a: Operand, words: Any, b: Operand, *, a_swizzle: int, b_swizzle: int, m_major: bool,
    n_major: bool, promote: bool,
) -> fa.FragmentedArray:  # fmt: skip
    """Issue the instructions of one step along K, and wait for them.

    Args:
      acc: The accumulator.
      a: A's values in shared memory, as they lie.
      words: A's words: in registers for 16-bit values, in shared memory for 8-bit ones.
      b: B in shared memory, as it lies.
      a_swizzle: The swizzle of A in bytes.
      b_swizzle: The swizzle of B.
      m_major: True if A is contiguous along M.
      n_major: True if B is contiguous along N.
      promote: True to add the sums of the step to the accumulator in f32.
    """
    turned = lambda ref: utils.memref_transpose(ref, (1, 0, 3, 2))
    a = turned(a) if m_major else a
    b = b if n_major else turned(b)
    words = loaded_words(words) if isinstance(words, fa.FragmentedArray) else row_words(words)
    sums = fence(zeros(acc) if promote else acc)
    sums = wgmma_sp(sums, a, words, b, a_swizzle=a_swizzle, b_swizzle=b_swizzle, a_m_major=m_major)
    commit()
    wait()
    return acc + barrier(sums) if promote else sums


def wgmma_sp(
    acc: fa.FragmentedArray, a: Operand, words: list[Operand], b: Operand, *, a_swizzle: int, b_swizzle: int,
    a_m_major: bool = False,
) -> fa.FragmentedArray:  # fmt: skip
    """Issue ``acc[M, N] += A[M, K] @ B[K, N]`` without waiting for it.

    Args:
      acc: The accumulator.
      a: A's values in shared memory, ``[M, K/2]``.
      words: A thread's words. One word serves two instructions along K for 16-bit values, and one for 8-bit ones.
      b: B in shared memory, ``[K, N]``.
      a_swizzle: The swizzle of A in bytes.
      b_swizzle: The swizzle of B.
      a_m_major: True if A is contiguous along M.
    """
    (m, kept), a_type = mma_utils.tiled_memref_shape(a)
    (k, n), b_type = mma_utils.tiled_memref_shape(b)
    wide = utils.bitwidth(a_type) == 16
    per_a, per_b = (16, 32) if wide else (32, 64)  # values of a row that an instruction takes
    assert (k, n % 8, m % 64, k % 64) == (2 * kept, 0, 0, 0), (m, n, k, kept)
    group_a = kept if a_m_major else a_swizzle // (2 if wide else 1)
    group_b = b_swizzle // (2 if wide else 1)
    (a_base, (_, a_step)), (a_row_stride, a_group_stride), a_fast = mma_utils.create_descriptor(
        a, swizzle=a_swizzle, large_tile=(64, group_a), group_size=(64, group_a), logical_k_major=False
    )
    (b_base, (_, b_step)), (_, b_group_stride), b_fast = mma_utils.create_descriptor(
        b, swizzle=b_swizzle, group_size=(group_b, n), logical_k_major=True, mma_bytewidth_k=64
    )
    flips = [int(fast != mma_utils.Dim.K) for fast in (a_fast, b_fast)]
    assert wide or not any(flips), "8-bit operands lie along k"
    text, constraints = _wgmma_text(n, _PTX[str(a_type)], _PTX[str(b_type)], wide)
    f32 = ir.VectorType.get((1,), ir.F32Type.get())
    results = llvm.StructType.get_literal([f32] * (n // 2))
    registers = acc.registers.copy()
    for mi in range(m // 64):
        tile = list(registers[mi : mi + 1].flat)
        assert (len(tile), tile[0].type) == (n // 2, f32), (len(tile), tile[0].type)
        for ki in range(k // per_b):
            at_a, at_b = ki * per_a, ki * per_b
            offset_a = mi * a_row_stride + at_a // group_a * a_group_stride + at_a % group_a // per_a * a_step[0]
            offset_b = at_b // group_b * b_group_stride + at_b % group_b // per_b * b_step[0]
            word = words[mi * (k // 64) + (ki // 2 if wide else ki)]
            immediates = [ki % 2 if wide else 0, 1, 1, 1, *(flips if wide else ())]
            operands = [*tile, _moved(a_base, offset_a), _moved(b_base, offset_b), word, *map(_constant, immediates)]
            done: Any = llvm.inline_asm(results, operands, text, constraints, asm_dialect=0, has_side_effects=True)
            tile = [llvm.extractvalue(f32, done, [i]) for i in range(n // 2)]
        registers[mi : mi + 1] = np.array(tile, dtype=object).reshape(registers[mi : mi + 1].shape)
    return fa.FragmentedArray(_registers=registers, _layout=acc.layout, _is_signed=acc.is_signed)


def _moved(descriptor: Operand, offset: int) -> Operand:
    """Return the descriptor of a place some bytes further on."""
    if not offset:
        return descriptor
    step = utils.c(mma_utils.encode_addr(offset), ir.IntegerType.get_signless(64))
    return llvm.add(descriptor, step, overflow_flags=llvm.IntegerOverflowFlags.none)


def fence(array: fa.FragmentedArray) -> fa.FragmentedArray:
    """Order the registers' last accesses before an instruction that reads or writes them."""
    array = barrier(array)
    nvvm.wgmma_fence_aligned()
    return array


def commit() -> None:
    """Close a group of issued instructions."""
    nvvm.wgmma_commit_group_sync_aligned()


def wait() -> None:
    """Wait for all issued instructions."""
    nvvm.wgmma_wait_group_sync_aligned(0)


def settle(acc: fa.FragmentedArray) -> fa.FragmentedArray:
    """Wait for all instructions, and return the accumulator in the layout that stores know."""
    wait()
    return fa.optimization_barrier(acc).to_layout(fa.WGMMA_LAYOUT)


def barrier(array: fa.FragmentedArray) -> fa.FragmentedArray:
    """Keep the compiler from moving accesses to an array's registers across this point."""
    return fa.optimization_barrier(array)


def zeros(like: fa.FragmentedArray) -> fa.FragmentedArray:
    """Return zeros in the shape and layout of an array."""
    return fa.FragmentedArray.splat(utils.c(0.0, ir.F32Type.get()), like.shape, layout=like.layout)


def meet() -> None:
    """Wait for the other threads of the warpgroup."""
    utils.warpgroup_barrier()


def loaded_words(words: fa.FragmentedArray) -> list[Operand]:
    """Return a thread's words of an array in registers."""
    one = ir.VectorType.get((1,), _i32())
    take = lambda v: llvm.extractelement(utils.bitcast(v, one), _constant(0))
    return [take(v) if isinstance(v.type, ir.VectorType) else utils.bitcast(v, _i32()) for v in words.registers.flat]


def row_words(words: Operand) -> list[Operand]:
    """Load a thread's words out of ``words8`` rows in shared memory.

    Thread 32 w + 4 g + 2 b + a has every second word, from column b on, of row 16 w + g + 8 a.
    """
    rows, columns = ir.MemRefType(words.type).shape
    thread = arith.remui(utils.thread_idx(), _constant(128))
    part = lambda by, of: arith.remui(arith.divui(thread, _constant(by)), _constant(of))
    scaled = lambda v, by: arith.muli(v, _constant(by))
    row = arith.addi(arith.addi(scaled(part(32, 4), 16), part(4, 8)), scaled(part(1, 2), 8))
    column = part(2, 2)
    place = lambda v, more: arith.index_cast(ir.IndexType.get(), arith.addi(v, _constant(more)))
    return [
        memref.load(words, [place(row, 64 * i), place(column, 2 * j)])
        for i in range(rows // 64)
        for j in range(columns // 2)
    ]


def mma_sp(
    acc: fa.FragmentedArray, a: fa.FragmentedArray, words: fa.FragmentedArray, b: fa.FragmentedArray
) -> fa.FragmentedArray:  # fmt: skip
    """Return ``acc[M, N] + A[M, K] @ B[K, N]`` out of registers, in the layouts that Mosaic has for dense mma."""
    f32, pair = ir.F32Type.get(), ir.VectorType.get((2,), ir.F32Type.get())
    (m, n), kept = acc.shape, a.shape[1]
    kind = _PTX[str(a.mlir_dtype)]
    thread_words = [utils.bitcast(v, _i32()) for v in words.registers.flat]
    bits = lambda part: [utils.bitcast(v, _i32()) for v in part.registers.flat]
    results = llvm.StructType.get_literal([f32] * 4)
    acc = fa.FragmentedArray(_registers=acc.registers.copy(), _layout=acc.layout, _is_signed=None)
    for mi in range(m // 64):
        for ni in range(n // 8):
            at = (slice(64 * mi, 64 * mi + 64), slice(8 * ni, 8 * ni + 8))
            tile = acc[at]
            c = [llvm.extractelement(v, _constant(i)) for v in tile.registers.flat for i in range(2)]
            for ki in range(kept // 16):
                left = bits(a[at[0], 16 * ki : 16 * ki + 16])
                right = [v for half in range(2) for v in bits(b[32 * ki + 16 * half : 32 * ki + 16 * half + 16, at[1]])]
                word = thread_words[mi * (kept // 32) + ki // 2]
                text = (
                    f"mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col.f32.{kind}.{kind}.f32 "
                    f"{{$0,$1,$2,$3}}, {{$4,$5,$6,$7}}, {{$8,$9,$10,$11}}, {{$12,$13,$14,$15}}, $16, {ki % 2};"
                )
                operands, constraints = [*left, *right, *c, word], "=f,=f,=f,=f," + "r," * 8 + "f,f,f,f,r"
                done: Any = llvm.inline_asm(results, operands, text, constraints, has_side_effects=False)
                c = [llvm.extractvalue(f32, done, [i]) for i in range(4)]
            joined = lambda x, y: llvm.insertelement(
                llvm.insertelement(llvm.mlir_undef(pair), x, _constant(0)), y, _constant(1)
            )
            registers = np.array([joined(c[0], c[1]), joined(c[2], c[3])], dtype=object)
            acc[at] = fa.FragmentedArray(
                _registers=registers.reshape(tile.registers.shape), _layout=tile.layout, _is_signed=None
            )
    return acc
