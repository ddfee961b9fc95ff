"""What tests of products share: numbers, the three products of a function, how near they are, and where arrays lie."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

MATMUL = (((1,), (0,)), ((), ()))
TOKENS = (((2,), (0,)), ((), ()))

# Most of the time of these tests is LLVM's. Where sums are exact, or only shapes are asked, its optimiser adds nothing.
fast_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def whole(seed, *shape, most=3, dtype=jnp.float32):
    """Whole numbers: their sums are exact in any order, so that equality can be demanded of any two ways to add."""
    return jnp.asarray(np.random.default_rng(seed).integers(-most, most + 1, shape), dtype)


def normal(seed, *shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def products(f, x, w, g):
    """y, dx and dw."""
    y, back = jax.vjp(f, x, w)
    return y, *back(g.astype(y.dtype))


def near(found, wanted, bits=8):
    """Assert that arrays are equal to so many bits of the largest value. Eight are one rounding of bfloat16."""
    for a, b in zip(found, wanted, strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.abs(a - b).max() <= 2.0**-bits * np.abs(b).max()


def placed(mesh, arrays, specs):
    return [jax.device_put(v, NamedSharding(mesh, spec)) for v, spec in zip(arrays, specs, strict=True)]


def moves(compiled):
    """Return the operations that bring arrays to other devices, but for those that add them up."""
    return {"all-gather", "all-to-all", "collective-permute"} & {*compiled.as_text().replace("(", " ").split()}
