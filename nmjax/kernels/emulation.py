"""The arithmetic of the sparse instructions, for kernels that run on a CPU. Everything around them stays as it is."""

import jax.numpy as jnp
from jaxtyping import Array, Float, UInt

from nmjax.kernels.format import Packed, unpack


def times_blocks(x: Float[Array, "rows k"], scale: Float[Array, "rows blocks"]) -> Float[Array, "rows k"]:
    """Return values in f32, times the scales of their blocks along the last axis."""
    return x.astype(jnp.float32) * jnp.repeat(scale.astype(jnp.float32), x.shape[-1] // scale.shape[-1], -1)


def product(
    a: Float[Array, "..."], words: UInt[Array, "..."], b: Float[Array, "..."], *scales: Float[Array, "rows blocks"],
    order: str, m_major: bool, n_major: bool,
) -> Float[Array, "m n"]:  # fmt: skip
    """Return the f32 sums of a block of packed values and one of dense ones.

    Args:
      a: The packed values as they lie in shared memory: ``[M, K/2]``, or ``[K/2, M]`` with ``m_major``.
      words: Their words.
      b: ``[N, K]``, or ``[K, N]`` with ``n_major``.
      *scales: None, or those of blocks of A and B.
      order: The order of the words.
      m_major: True if A is contiguous along M.
      n_major: True if B is contiguous along N.
    """
    if order == "words16":
        words = words.reshape(words.shape[0], -1, 128)
    left = unpack(Packed(a, words, -2 if m_major else -1, 2, 4, order)).astype(jnp.float32)
    right = b.astype(jnp.float32)
    left, right = left.T if m_major else left, right.T if n_major else right
    if scales:
        left, right = map(times_blocks, (left, right), scales)
    return left @ right.T
