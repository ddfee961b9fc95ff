"""Counter-based random bits: a pure function of (key words, index), the same on every backend.

Two rounds of MurmurHash3's 32-bit finaliser (Appleby 2011; the mixer of SplittableRandom, Steele, Lea and Flood 2014),
keyed before and between them, as in an Even-Mansour cipher::

    bits(k, i) = mix(mix(i + k0) ^ k1)

Index arithmetic in place of a state: the noise of group i is the same whatever the sharding, and a kernel can draw it
where it needs it. Twenty integer operations a word, where JAX's own generator, with its default settings, spends a whole
Threefry block.
"""

import hashlib

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

_U32 = np.uint32


def mix(x: jax.Array) -> jax.Array:
    """MurmurHash3's finaliser: a bijection of uint32 in which every input bit reaches every output bit."""
    x = (x ^ (x >> _U32(16))) * _U32(0x85EBCA6B)
    x = (x ^ (x >> _U32(13))) * _U32(0xC2B2AE35)
    return x ^ (x >> _U32(16))


def words(key) -> jax.Array:
    """Two uint32 words out of a jax key, an int seed or such words themselves.

    >>> words(5).tolist(), words(jax.random.key(5)).tolist()
    ([0, 5], [0, 5])
    """
    if isinstance(key, (int, np.integer)) and not isinstance(key, bool):
        if not -(2**63) <= key < 2**64:
            raise ValueError(f"an int seed has 64 bits, got {key}.")
        return jnp.asarray(np.array([int(key) >> 32 & 0xFFFFFFFF, int(key) & 0xFFFFFFFF], _U32))
    if isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        if key.ndim:
            raise TypeError(f"one key is wanted, got an array of {key.shape}: index it, or map over it with jax.vmap.")
        data = jax.random.key_data(key)
        return data if data.size == 2 else bits(data[:2], data[2:4])
    if getattr(key, "dtype", None) == jnp.uint32 and key.shape == (2,):
        return jnp.asarray(key)
    got = f"{key.dtype}{list(key.shape)}" if hasattr(key, "dtype") else repr(key)
    seed = isinstance(key, (jax.Array, np.ndarray)) and not key.ndim and jnp.issubdtype(key.dtype, jnp.integer)
    hint = " Of a seed that is an array, or traced: jax.random.key(seed)." if seed else ""
    raise TypeError(f"key must be a jax.random.key, an int seed or two uint32 words, got {got}.{hint}")


def bits(key_words: jax.Array | tuple[jax.Array, jax.Array], index: jax.Array) -> jax.Array:
    """One uint32 for every uint32 index."""
    k0, k1 = key_words[0], key_words[1]
    spread = lambda k: lax.broadcast(k, index.shape)
    return mix(mix(index + spread(k0)) ^ spread(k1))


def fold(key_words: jax.Array, number) -> jax.Array:
    """New words for a number below 2**31: a step, a slot, a part. Distinct numbers give independent streams."""
    number = jnp.asarray(number).astype(jnp.uint32)
    return bits(key_words, jnp.stack([number * _U32(2), number * _U32(2) + _U32(1)]))


def named(key_words: jax.Array, name: str) -> jax.Array:
    """New words for a name, such as a layer's path: the same in every process and version.

    >>> bool((named(words(0), "mlp/up") == named(words(0), "mlp/down")).any())
    False
    """
    digest = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
    return fold(fold(key_words, digest & 0x7FFFFFFF), digest >> 33)


def counter(shape: tuple[int, ...]) -> jax.Array:
    """Row-major positions as uint32, built from iotas so that every device makes its own."""
    if np.prod(shape, dtype=object) > 2**32:
        raise ValueError(f"an array of shape {shape} has more groups than the 2**32 draws that one key gives.")
    index, stride = jnp.zeros(shape, jnp.uint32), 1
    for d in reversed(range(len(shape))):
        if shape[d] > 1:
            index = index + lax.broadcasted_iota(jnp.uint32, shape, d) * _U32(stride)
        stride *= shape[d]
    return index


def uniform(key_words: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Float32 in [0, 1), on a grid of 2**-23."""
    return as_uniform(bits(key_words, counter(shape)))


def as_uniform(drawn: jax.Array) -> jax.Array:
    """Float32 in [0, 1) of the upper 23 bits."""
    return lax.bitcast_convert_type(drawn >> _U32(9) | _U32(0x3F800000), jnp.float32) - 1
