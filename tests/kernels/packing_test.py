"""Mosaic's packing has the bits of Triton's, for all pruners, both axes, and parts of a larger array."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nmjax.core import random, versions
from nmjax.kernels import compress, packing
from nmjax.pruners import identity, mse, mvue, mvue_approx, soft

why = "this interpreter stores no parts of arrays"
interpreted = pytest.mark.skipif(not versions.packs_in_interpreter(), reason=why)


@pytest.mark.kernels
@interpreted
@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("p", [mse(2, 4), mvue(2, 4), mvue_approx(2, 4), soft(2, 4), identity], ids=str)
def test_both_kernels_write_the_same_bits(p, axis):
    x = np.random.default_rng(0).standard_normal((2, 128, 192))
    x = jnp.asarray(x, jnp.bfloat16).at[0, 0, :8].set(jnp.asarray([0, -0.0, np.inf, np.nan, 1, 1, 1, 1], jnp.bfloat16))
    x = mse(2, 4)(x, axis) if p == identity else x
    keys = jnp.concatenate([jnp.stack(random.scrambled(random.words(own))) for own in p.kernel_form.keys(3)])[None]
    form = {"axis": axis, "whole": (6, 512, 512), "pruner": p, "interpret": True}
    origin, scale = jnp.asarray([3, 256, 64], jnp.int32), jnp.asarray([1.25])
    pack = lambda by: jax.jit(lambda x: by.compress(x, keys, scale, origin, **form))(x)
    for a, b in zip(jax.tree.leaves(pack(packing)), jax.tree.leaves(pack(compress)), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


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
