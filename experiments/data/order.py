"""The order in which a run sees its samples: a pure function of (seed, step). Nothing is kept, and nothing restored.

An epoch's order is a permutation in closed form. A Feistel network over the bits of an index permutes a power of two;
it is applied until the index is below n (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002)::

    high <- high ^ F(low),  low <- low ^ F(high),  F(x) = mix(x ^ key),  a key for each (seed, epoch, round)

The two parts may differ in width, so the power of two is the smallest that holds n, and at most half of its indices
need another pass. Four rounds suffice for many samples, but a set of
five needs sixteen, so there are always sixteen. `mix` is that of
nmjax.random. The work is that of one batch, wherever the batch is in the run.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from experiments.errors import Mistake
from nmjax.core.random import mix

_U32 = np.uint32
_ROUNDS = 16


def positions(seed, step, batch: int, n: int, xp=jnp) -> tuple[jax.Array, jax.Array]:
    """Return the epoch and the index of each sample of a batch: int32 (batch,), (batch,).

    Sample p = step * batch + i of a run is number ``p % n`` of epoch ``p // n``, in the epoch's own order. So every
    epoch holds each of the n samples once, batches go over its end, and nothing is dropped.

    Args:
      seed: The seed of the run, below 2**32; it may be traced.
      step: The step; it may be traced.
      batch: Number of samples in a batch.
      n: Number of samples in the set.
      xp: `jax.numpy`, or numpy for a thread that must not wait for the device. The numbers are the same.

    Returns:
      Epochs and indices.

    Raises:
      Mistake: A number is out of its range. A run has at most 2**32 samples, because p is a uint32.

    >>> [positions(0, step, 4, 6)[1].tolist() for step in range(3)]          # two epochs of 6 in three batches of 4
    [[2, 4, 1, 3], [5, 0, 3, 2], [0, 5, 4, 1]]
    """
    _check(seed, step, batch, n)
    fill = lambda x: xp.full(batch, _U32(x) if isinstance(x, int) else x, xp.uint32)
    p = xp.arange(batch, dtype=xp.uint32) + fill(step) * _U32(batch)
    epoch, place = p // _U32(n), p % _U32(n)
    key = mix(mix(fill(seed) + _U32(0x9E3779B9)) + epoch)
    keys = [mix(key + _U32(i * 0x9E3779B9 & 0xFFFFFFFF)) for i in range(1, _ROUNDS + 1)]
    index = _walk(place, lambda x: _encipher(x, keys, (n - 1).bit_length()), n, xp)
    return epoch.astype(xp.int32), index.astype(xp.int32)


def _encipher(x, keys, bits: int):
    """Permute 0 .. 2**bits - 1."""
    low, high = _U32((1 << bits // 2) - 1), _U32((1 << bits - bits // 2) - 1)
    shift = _U32(bits // 2)
    for i in range(0, len(keys), 2):
        x = x ^ (mix((x & low) ^ keys[i]) & high) << shift
        x = x ^ (mix((x >> shift) ^ keys[i + 1]) & low)
    return x


def _walk(x, encipher, n: int, xp):
    """Permute 0 .. n - 1 by a permutation of more: an index of n or more is permuted again."""

    def on(state):
        x, beyond = state
        x = xp.where(beyond, encipher(x), x)
        return x, x >= _U32(n)

    state = x, xp.ones(x.shape, bool)
    if xp is np:
        while state[1].any():
            state = on(state)
        return state[0]
    return lax.while_loop(lambda state: state[1].any(), on, state)[0]


def _check(seed, step, batch, n):
    if not 0 < n < 2**31:
        raise Mistake(f"a data set has at least 1 and less than 2**31 samples; this one has {n}.")
    if batch < 1:
        raise Mistake(f"a batch has at least 1 sample, got batch={batch}.")
    if isinstance(seed, int | np.integer) and not 0 <= seed < 2**32:
        raise Mistake(f"the seed of the data is at least 0 and less than 2**32, got {seed}.")
    if isinstance(step, int | np.integer) and not 0 <= (int(step) + 1) * batch <= 2**32:
        raise Mistake(f"a run has at most 2**32 samples, and step {step} of {batch} goes beyond.")
