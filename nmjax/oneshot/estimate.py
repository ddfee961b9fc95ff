"""The time that one-shot pruning will take on this machine, from its operations and the speed of products."""

import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

START = 6.0  # seconds to trace and compile, which depend little on the sizes


def seconds(sizes: Sequence[tuple[int, int]], tokens: int, method: str) -> float:
    """Return the estimated duration in seconds. It is good to a factor of about two.

    Args:
      sizes: The inputs and outputs of each weight.
      tokens: The number of rows of the inputs, over all batches.
      method: The name of a solver of `nmjax.oneshot`.

    >>> seconds([(8, 8)], 100, "wanda") < seconds([(512, 512)], 100_000, "sparsegpt")
    True
    """
    on_device = 2 * sum(4 * tokens * i * o + 2 * tokens * i * i for i, o in sizes)  # two forward passes, and X'X, of
    # the pruned model and of the dense one
    on_host = sum(6 * i * i * o + _solving(i, o, method) for i, o in sizes)  # the errors, and the solver
    return START + on_device / _speed_of_device() + on_host / _speed_of_host()


def _solving(i: int, o: int, method: str) -> float:
    """Return the operations of a solver in float64."""
    if method == "sparsegpt":
        return 3 * i**3 + 10 * i * i * o  # its updates within blocks are slower than products
    if method == "admm":
        return 3 * i**3 + 100 * i * i * o
    return 100 * i * o  # it sorts the groups


def _speed_of_device(size: int = 1024) -> float:
    """Return the operations a second of a product in float32."""
    x = jnp.ones((size, size), jnp.float32)
    product = jax.jit(lambda x: x @ x)
    product(x).block_until_ready()
    began = time.perf_counter()
    product(x).block_until_ready()
    return 2 * size**3 / (time.perf_counter() - began)


def _speed_of_host(size: int = 512) -> float:
    """Return the operations a second of a product in float64 on the host."""
    x = np.ones((size, size))
    np.matmul(x, x)
    began = time.perf_counter()
    np.matmul(x, x)
    return 2 * size**3 / (time.perf_counter() - began)


def in_words(duration: float) -> str:
    """Return a duration in words.

    >>> in_words(7.3), in_words(200), in_words(9000)
    ('7 seconds', '3 minutes', '2.5 hours')
    """
    if duration < 90:
        return f"{max(round(duration), 1)} seconds"
    return f"{round(duration / 60)} minutes" if duration < 5400 else f"{duration / 3600:.1f} hours"
