"""What lies in the registers of a thread while a kernel packs: no interpreter knows of it."""

import functools
import itertools
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest
from jax.interpreters import mlir
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import func

from nmjax.kernels import packing, tiles


def owners(layout, shape):
    """For each element of an array: the warp, the lane, and the number in the registers of the thread that holds it."""
    layout = layout.to_mgpu()
    elements = np.arange(np.prod(shape)).reshape(shape)
    for tile in layout.tiling.tiles:
        front = elements.ndim - len(tile)
        sides = [part for size, t in zip(elements.shape[front:], tile, strict=True) for part in (size // t, t)]
        elements = elements.reshape(*elements.shape[:front], *sides)
        outer, inner = (range(front + first, elements.ndim, 2) for first in (0, 1))
        elements = elements.transpose(*range(front), *outer, *inner)
    axes = [d % elements.ndim for d in (*layout.warp_dims, *layout.lane_dims)]
    rest = [d for d in range(elements.ndim) if d not in axes]
    threads = elements.transpose(*axes, *rest).reshape(4, 32, -1)
    found = np.empty((elements.size, 3), int)
    found[threads.reshape(-1)] = np.stack(np.unravel_index(np.arange(elements.size), threads.shape), 1)
    return found.reshape(*shape, 3)


def test_a_thread_holds_the_groups_of_its_word():
    """Word (w, g, q) has rows (w, half, g) and groups 4 q + t, in the order half, t of `_words`."""
    w, half, g, q, t = np.unravel_index(np.arange(1024), (4, 2, 8, 4, 4))
    row, group, wanted = 16 * w + 8 * half + g, 4 * q + t, np.stack([w, 4 * g + q, 4 * half + t], 1)
    assert (owners(packing._ACROSS, (64, 16))[row, group] == wanted).all()
    assert (owners(packing._DOWN, (16, 64))[group, row] == wanted).all()
    line = np.unravel_index(np.arange(128), (4, 8, 4))
    lines = owners(packing._LINES, (32, 4))[8 * line[0] + line[1], line[2]]
    assert (lines == np.stack([line[0], 4 * line[1] + line[2], 0 * line[0]], 1)).all()
    for half_of_group in (0, 1):  # as `_halves` takes them
        words = owners(packing._ROW_WORDS, (64, 32))[row, 2 * group + half_of_group]
        assert (words == np.stack([w, 4 * g + q, 8 * half + 2 * t + half_of_group], 1)).all()


def number(named, bits):
    """The integer with these bits, the highest first. ``named`` has the value of each bit."""
    return functools.reduce(lambda v, bit: 2 * v + named[bit], bits, 0)


@pytest.mark.parametrize("kind", ["_ACROSS16", "_DOWN16", "_ACROSS8", "_DOWN8"])
def test_threads_keep_the_words_of_their_tiles(kind):
    """A nibble moves from the thread of its tile to the thread that keeps its word."""
    into = getattr(tiles, kind)
    chosen, layout = tiles._exchange(into)
    words = owners(layout, (2 ** len(into.rows), 2 ** len(into.columns)))
    tiled = owners(tiles._TILED, (16, 16))
    lanes = [bit for bit in into.position if bit in tiles._LANES]
    for bits in itertools.product((0, 1), repeat=10):
        named = dict(zip(("l1", "l0", *tiles._ROWS, *tiles._COLUMNS), bits, strict=True))
        row, column = number(named, tiles._ROWS), number(named, tiles._COLUMNS)
        warp, lane, register = tiled[row, column]
        assert (warp, register) == (number(named, tiles._WARPS), named["r1"])
        assert lane == number(named, tiles._LANES)
        # An exchange gives a lane bit the value of the row bit that it is paired with.
        moved = named | {lane: named[bit] for bit, lane in chosen.items()}
        assert set(lanes) == set(chosen.values())
        there = words[number(named, into.rows), number(named, into.columns)]
        assert tuple(there) == (warp, number(moved, tiles._LANES), 0)


def test_layouts_of_pairs_and_of_turned_tiles():
    tiled, turned, paired = (
        owners(v, s) for v, s in ((tiles._TILED, (16, 16)), (tiles._TURNED, (16, 16)), (tiles._PAIRED, (16, 32)))
    )
    assert (turned.transpose(1, 0, 2) == tiled).all()
    for half in (0, 1):
        assert (paired[:, half::2, :2] == tiled[..., :2]).all()
        assert (paired[:, half::2, 2] == 2 * tiled[..., 2] + half).all()


def evaluate(emit, inputs):
    """Evaluate what a function emits for the 128 threads of a warpgroup.

    Args:
      emit: A function of registers, which returns the last value.
      inputs: The values of each register, by thread.
    """
    thread, one = np.arange(128, dtype=np.uint32), np.ones(128, np.uint32)
    axis = lambda op, x, others: x if "x" in str(op.attributes["dimension"]) else others
    operations = {
        "arith.constant": lambda op: np.full(128, ir.IntegerAttr(op.attributes["value"]).value).astype(np.uint32),
        "gpu.thread_id": lambda op: axis(op, thread, 0 * one),
        "gpu.block_dim": lambda op: axis(op, 128 * one, one),
        "arith.index_cast": lambda op, v: v,
        "vector.extract": lambda op, v: v,
        "arith.addi": lambda op, a, b: a + b,
        "arith.muli": lambda op, a, b: a * b,
        "arith.shli": lambda op, a, b: a << b,
        "arith.shrui": lambda op, a, b: a >> b,
        "arith.andi": lambda op, a, b: a & b,
        "arith.ori": lambda op, a, b: a | b,
        "arith.cmpi": lambda op, a, b: a == b,
        "arith.select": lambda op, which, a, b: np.where(which, a, b),
        "nvvm.shfl.sync": lambda op, mask, v, distance, clamp: v[thread ^ distance],
    }
    with mlir.make_ir_context(), ir.Location.unknown():
        register = ir.VectorType.get((1,), ir.IntegerType.get_signless(32))
        module = ir.Module.create()
        with ir.InsertionPoint(module.body):
            block = func.FuncOp("threads", ([register] * len(inputs), [])).add_entry_block()
        with ir.InsertionPoint(block):
            last = emit(list(block.arguments))
        values = dict(zip(block.arguments, inputs, strict=True))
        for op in block.operations:
            values[op.results[0]] = operations[op.operation.name](op, *(values[v] for v in op.operands))
        return values[last]


class Registers(NamedTuple):
    """The part of an array of Mosaic that `_word` reads."""

    registers: np.ndarray


@pytest.mark.parametrize("kind", ["_ACROSS16", "_DOWN16", "_ACROSS8", "_DOWN8"])
def test_threads_exchange_parts_of_words(kind):
    into = getattr(tiles, kind)
    chosen, layout = tiles._exchange(into)
    nibbles = np.random.default_rng(0).integers(0, 16, (4, 16, 16)).astype(np.uint32)
    inputs = np.empty((4, 2, 128), np.uint32)  # by line, register and thread
    warp, lane, register = np.moveaxis(owners(tiles._TILED, (16, 16)), -1, 0)
    inputs[:, register, 32 * warp + lane] = nibbles
    lines = lambda arguments: [Registers(np.array(arguments[2 * at : 2 * at + 2], object)) for at in range(4)]
    found = evaluate(lambda arguments: tiles._word(lines(arguments), into, chosen), inputs.reshape(8, 128))
    expected = np.asarray(tiles._gathered(list(jnp.asarray(nibbles)), into, emulated=True))
    warp, lane, _ = np.moveaxis(owners(layout, expected.shape), -1, 0)
    assert (found[32 * warp + lane] == expected).all()
