"""Counter-based random bits: a pure function of (key words, index), the same on every backend.

The function is two rounds of MurmurHash3's 32-bit finaliser (Appleby 2011; the mixer of SplittableRandom, Steele, Lea
and Flood 2014). One word of the scrambled key enters before each round, as in an Even-Mansour cipher::

    bits(k, i) = mix(mix(i + a) ^ b),  (a, b) = scrambled(k)

A key is scrambled once per call. So keys that resemble each other, such as ``layer << 32 | seed`` or ``[layer, seed]``,
give unrelated words.

There is no state: the noise of group i depends on the key and on i alone. It is therefore the same under every
sharding, and a kernel can draw it where it needs it. One word costs twenty integer operations. JAX's own generator with
its default settings costs a whole Threefry block.
"""

import hashlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float32, Int, UInt32

Words = UInt32[Array, "2"]
"""A key as two uint32 words."""

_U32 = np.uint32


def mix(x: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """Apply MurmurHash3's finaliser: a bijection of uint32 in which every input bit affects every output bit.

    Args:
      x: Words of 32 bits.

    Returns:
      Mixed words of the same shape.

    >>> mix(jnp.uint32([0, 1])).tolist()
    [0, 1364076727]
    """
    x = (x ^ (x >> _U32(16))) * _U32(0x85EBCA6B)
    x = (x ^ (x >> _U32(13))) * _U32(0xC2B2AE35)
    return x ^ (x >> _U32(16))


def words(key: Any) -> Words:
    """Return a key as two uint32 words.

    Args:
      key: A `jax.random.key`, an int seed of at most 64 bits, or two uint32 words.

    Returns:
      Two words.

    Raises:
      TypeError: The key is of another kind, or an array of several keys.
      ValueError: The seed does not fit 64 bits.

    >>> words(5).tolist(), words(jax.random.key(5)).tolist()
    ([0, 5], [0, 5])
    """
    if isinstance(key, (int, np.integer)) and not isinstance(key, bool):
        if not -(2**63) <= key < 2**64:
            raise ValueError(f"an int seed must fit 64 bits, got {key}.")
        return jnp.asarray(np.array([int(key) >> 32 & 0xFFFFFFFF, int(key) & 0xFFFFFFFF], _U32))
    if isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        if key.ndim:
            raise TypeError(
                f"key must be one key, got an array of keys of shape {key.shape}. Index it, or map over it with "
                "jax.vmap."
            )
        data = jax.random.key_data(key)
        return data if data.size == 2 else bits(data[:2], data[2:4])
    if getattr(key, "dtype", None) == jnp.uint32 and getattr(key, "shape", None) == (2,):
        return jnp.asarray(key)
    raise TypeError(f"key must be a jax.random.key, an int seed or two uint32 words, got {_description(key)}")


def _description(key: Any) -> str:
    """Return what a refused key is, and a hint if it is a seed in an array."""
    if not hasattr(key, "dtype"):
        return f"{key!r}."
    text = f"{key.dtype}{list(key.shape)}."
    if isinstance(key, (jax.Array, np.ndarray)) and not key.ndim and jnp.issubdtype(key.dtype, jnp.integer):
        return f"{text} If the seed is an array or traced, pass jax.random.key(seed)."
    return text


def scrambled(key_words: Words) -> tuple[UInt32[Array, ""], UInt32[Array, ""]]:
    """Return two words in which each bit depends on all bits of a key.

    It is a bijection of 64 bits: a Feistel network with three rounds of `mix` (Luby and Rackoff 1988).

    Args:
      key_words: A key, as `words` returns it.

    Returns:
      Two words for `stream`.

    >>> [word.item() for word in scrambled(words(0))], [word.item() for word in scrambled(words(1))]
    ([2060969114, 1088392394], [518083217, 1113212911])
    """
    a, b = key_words[0], key_words[1]
    for constant in (0x9E3779B9, 0x3C6EF372, 0xDAA66D2B):  # multiples of 2**32 over the golden ratio
        a, b = b, a ^ mix(b + _U32(constant))
    return a, b


def bits(key_words: Words, index: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """Return one random word for every index.

    Args:
      key_words: A key, as `words` returns it.
      index: Positions, as `counter` returns them.

    Returns:
      Words of the shape of ``index``.

    >>> bits(words(5), counter((2,))).tolist()
    [1941338416, 570833491]
    """
    return stream(scrambled(key_words), index)


def stream(
    scrambled_words: tuple[UInt32[Array, ""], UInt32[Array, ""]], index: UInt32[Array, "..."]
) -> UInt32[Array, "..."]:
    """Return one random word for every index, as `bits` does, for a key that is scrambled already.

    Args:
      scrambled_words: Two words, as `scrambled` returns them. Kernels get them as an input.
      index: Positions, as `counter` returns them.

    Returns:
      Words of the shape of ``index``.

    >>> stream(scrambled(words(5)), counter((2,))).tolist() == bits(words(5), counter((2,))).tolist()
    True
    """
    a, b = scrambled_words
    spread = lambda word: lax.broadcast(word, index.shape)
    return mix(mix(index + spread(a)) ^ spread(b))


def fold(key_words: Words, number: int | Int[Array, ""]) -> Words:
    """Return the key of one of many independent streams, such as that of a step, a slot or a part.

    Args:
      key_words: A key, as `words` returns it.
      number: The number of the stream, from 0 to 2**31 - 1. It may be traced.

    Returns:
      A new key.

    >>> fold(words(5), 7).tolist()
    [3161199523, 234652034]
    """
    return _folded(key_words, jnp.asarray(number).astype(jnp.uint32))


@jax.jit  # traced only once, not for every layer and slot
def _folded(key_words: Words, number: UInt32[Array, ""]) -> Words:
    return bits(key_words, jnp.stack([number * _U32(2), number * _U32(2) + _U32(1)]))


def named(key_words: Words, name: str) -> Words:
    """Return the key of the stream of a name, such as a layer's path. It is the same in every process and version.

    Args:
      key_words: A key, as `words` returns it.
      name: Any text.

    Returns:
      A new key.

    >>> bool((named(words(0), "mlp/up") == named(words(0), "mlp/down")).any())
    False
    """
    digest = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
    return fold(fold(key_words, digest & 0x7FFFFFFF), digest >> 33)


def counter(shape: tuple[int, ...]) -> UInt32[Array, "..."]:
    """Return the row-major positions of an array, built from iotas so that every device makes its own.

    Args:
      shape: The shape of the array.

    Returns:
      Positions of that shape.

    Raises:
      ValueError: The shape has more than 2**32 entries.

    >>> counter((2, 3)).tolist()
    [[0, 1, 2], [3, 4, 5]]
    """
    if np.prod(shape, dtype=object) > 2**32:
        raise ValueError(
            f"an array of shape {shape} needs more than the 2**32 draws that one key gives. Draw it in parts, "
            "each with a key of its own."
        )
    index, stride = jnp.zeros(shape, jnp.uint32), 1
    for d in reversed(range(len(shape))):
        if shape[d] > 1:
            index = index + lax.broadcasted_iota(jnp.uint32, shape, d) * _U32(stride)
        stride *= shape[d]
    return index


def uniform(key_words: Words, shape: tuple[int, ...]) -> Float32[Array, "..."]:
    """Return uniform random numbers in [0, 1), multiples of 2**-23.

    Args:
      key_words: A key, as `words` returns it.
      shape: The shape of the result.

    Returns:
      Float32 numbers of that shape.

    >>> [round(float(u), 3) for u in uniform(words(5), (2,))]
    [0.452, 0.133]
    """
    return as_uniform(bits(key_words, counter(shape)))


def as_uniform(drawn: UInt32[Array, "..."]) -> Float32[Array, "..."]:
    """Return numbers in [0, 1) made of the upper 23 bits of random words.

    Args:
      drawn: Random words, as `bits` returns them.

    Returns:
      Float32 numbers of the same shape.

    >>> as_uniform(jnp.uint32([0, 2**31]))
    Array([0. , 0.5], dtype=float32)
    """
    return lax.bitcast_convert_type(drawn >> _U32(9) | _U32(0x3F800000), jnp.float32) - 1
