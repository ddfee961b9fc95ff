"""Tests that Mosaic packs 4 x 4 tiles to the same bits as Triton, along both axes and in FP8."""

import functools
import itertools
from typing import NamedTuple

import jax
import jax.experimental.mosaic.gpu  # registers the dialects that JAX's contexts load
import jax.numpy as jnp
import numpy as np
import pytest
from jax.interpreters import mlir
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import func

from nmjax.core import random
from nmjax.kernels import compress, copies, tiles
from nmjax.kernels.limits import Copy
from nmjax.pruners import identity, mse, mvue, soft, transposable
from tests.kernels.packing_test import interpreted, owners


def values(*shape):
    x = jnp.asarray(np.random.default_rng(0).standard_normal(shape), jnp.bfloat16)
    return x.at[0, 0, :8].set(jnp.asarray([0, -0.0, np.inf, np.nan, 1, 1, 1, 1], jnp.bfloat16))


def same(ours, theirs):
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert a.shape == b.shape
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.mark.kernels
@interpreted
@pytest.mark.parametrize("p", [transposable(2, 4), identity], ids=str)
def test_both_axes_have_the_same_bits(p):
    x = values(2, 128, 192) if p != identity else transposable(2, 4)(values(2, 128, 192))
    pack = lambda by: jax.jit(lambda x: by.compress_both(x, p, interpret=True))(x)
    same(pack(tiles), pack(compress))


FORMS = [
    Copy("e4m3"),
    Copy("e5m2", turned=True),
    Copy("e4m3", packed=True, pruner=soft(2, 4)),
    Copy("e4m3", pruner=soft(2, 4), axis=-2),
    Copy("e5m2", packed=True, pruner=mvue(2, 4), axis=-2, rounding="random"),
    Copy("e4m3", pruner=mse(2, 4), turned=True, rounding="random"),
]


@pytest.mark.kernels
@interpreted
@pytest.mark.parametrize("wanted", [FORMS[:2], FORMS[2:4], FORMS[4:]], ids=["dense", "soft", "random"])
def test_forms_in_fp8_have_the_same_bits(wanted):
    x, keys = values(2, 128, 192), jnp.concatenate([jnp.stack(random.scrambled(random.words(k))) for k in (3, 4)])[None]
    factors = copies.factors_of(x, jnp.asarray([1.25]), wanted)
    form = {"wanted": tuple(wanted), "whole": (6, 512, 512), "interpret": True}
    origin = jnp.asarray([3, 256, 64], jnp.int32)
    make = lambda by: jax.jit(lambda x: by.copies(x, keys, factors, origin, **form))(x)
    same(make(tiles), make(copies))


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
