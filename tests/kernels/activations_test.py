"""Derivatives of activation functions in kernels: those of JAX, and one pass for the derivative and packing."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nmjax as nm
from nmjax.core import versions
from nmjax.kernels import activations, calls, compress, packing
from nmjax.kernels.targets import Target
from nmjax.pruners import identity, mse, mvue, soft

HERE = Target("interpreter", "hopper", 2, interpret=True)


KNOWN = list(activations._DERIVATIVES)


@pytest.mark.parametrize("f", KNOWN, ids=lambda f: f.__name__)
def test_derivatives_are_those_of_jax(f):
    """Compare with float64. In float32, 1 - tanh(x) loses digits, and GELU multiplies this error by x cubed."""
    h, g = (np.linspace(*ends, 4001, dtype=np.float32).astype(float) for ends in ((-9, 9), (-2, 3)))
    found = activations.times_derivative(f, jnp.asarray(h, jnp.float32), jnp.asarray(g, jnp.float32))
    with jax.enable_x64():
        wanted = jax.vjp(f, jnp.asarray(h))[1](jnp.asarray(g))[0]
    assert np.abs(np.asarray(found).astype(float) - np.asarray(wanted)).max() < 3e-5


def test_the_formula_of_the_error_function():
    x = np.linspace(-6, 6, 20001, dtype=np.float32)
    found = np.asarray(activations._erf(jnp.asarray(x)), float)
    assert np.abs(found - np.asarray(jax.scipy.special.erf(x), float)).max() < 5e-7


def test_functions_are_known_by_identity():
    """An unhashable function is compared too."""

    @dataclass
    class Scaled:
        by: float

    assert activations.known(jax.nn.gelu)
    for f in (jnp.sin, lambda x: jax.nn.gelu(x), partial(jax.nn.gelu), Scaled(2.0)):
        assert not activations.known(f)


@pytest.mark.kernels
@pytest.mark.parametrize("p", [mse(2, 4), mvue(2, 4), soft(2, 4), identity], ids=str)
@pytest.mark.parametrize("f", [jax.nn.gelu, nm.squared_relu], ids=lambda f: f.__name__)
def test_the_derivative_and_packing_in_one_pass(f, p):
    draw = np.random.default_rng(0)
    h, g = (jnp.asarray(draw.standard_normal((2, 128, 192)), jnp.bfloat16) for _ in range(2))
    g = jnp.where(jnp.arange(128)[:, None] % 4 < 2, g, 0) if p == identity else g
    made, packed = calls.compress_activated(f, h, g, p, key=3, state=1.25, target=HERE)
    wanted = jax.vjp(f, h.astype(jnp.float32))[1](g.astype(jnp.float32))[0]
    assert (
        np.abs(np.asarray(made, np.float32) - np.asarray(wanted)).max() <= 2**-8 * np.abs(np.asarray(wanted)).max()
    )  # the result is rounded to bfloat16
    apart = calls.compress(made, -2, p, key=3, state=1.25, target=HERE)
    for a, b in zip(jax.tree.leaves(packed), jax.tree.leaves(apart), strict=True):
        assert (np.asarray(a) == np.asarray(b)).all()


@pytest.mark.kernels
@pytest.mark.skipif(not versions.packs_in_interpreter(), reason="this interpreter cannot write to a part of an array")
def test_mosaic_and_triton_give_the_same_bits():
    draw = np.random.default_rng(0)
    h, g = (jnp.asarray(draw.standard_normal((2, 128, 192)), jnp.bfloat16) for _ in range(2))
    keys, one, origin = calls.words_of_key(3, mvue(2, 4))[None], jnp.ones(1), jnp.zeros(3, jnp.int32)
    options = {"whole": g.shape, "activation": jax.nn.gelu, "pruner": mvue(2, 4), "interpret": True}
    made = [
        jax.jit(lambda h, g, by=by: by.compress_activated(h, g, keys, one, origin, **options))(h, g)
        for by in (packing, compress)
    ]
    for a, b in zip(*map(jax.tree.leaves, made), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
