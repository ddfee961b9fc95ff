"""What the sparse instructions compute, for kernels that run on a CPU: everything around them stays as it is."""

import jax
import jax.numpy as jnp

from nmjax.kernels.format import Packed, unpack


def product(
    a: jax.Array, words: jax.Array, b: jax.Array, *, order: str, m_major: bool, n_major: bool
) -> jax.Array:  # fmt: skip
    """Sums ``[M, N]`` of a block of packed values and words, as they lie in shared memory, and one of B."""
    if order == "words16":
        words = words.reshape(words.shape[0], -1, 128)
    left = unpack(Packed(a, words, -2 if m_major else -1, 2, 4, order)).astype(jnp.float32)
    right = b.astype(jnp.float32)
    return (left.T if m_major else left) @ (right if n_major else right.T)
