"""Pruning and packing in one pass: bit for bit what the pruner and `pack` give one after the other."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nmjax as nm
from nmjax.core import random
from nmjax.kernels import Target, activations, calls
from nmjax.kernels.limits import Copy, fuses
from nmjax.pruners import float8, identity, mse, mvue, mvue_approx, soft, transposable

HERE = Target("interpreter", "hopper", 2, True)


def normal(shape, dtype=jnp.bfloat16, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def hostile(shape, dtype=jnp.bfloat16):
    """Normal values, and groups of zeros, ties, infinities, NaN and the tiniest numbers."""
    draw = np.random.default_rng(1)
    some = np.array([0.0, -0.0, 1.0, -1.0, 2.0, np.inf, -np.inf, np.nan, 1e-30, -1e30])
    odd = np.where(draw.random(shape) < 0.5, draw.choice(some, shape), draw.integers(-2, 3, shape))
    half = (np.arange(shape[-2])[:, None] // 64 + np.arange(shape[-1]) // 64) % 2 == 0
    return jnp.asarray(np.where(half, draw.standard_normal(shape), odd), jnp.float32).astype(dtype)


def same(a, b):
    """Bit for bit, but for the sign of zeros, which a value has that is not kept, and NaN for NaN."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        np.testing.assert_array_equal(*(np.asarray(v, np.float64) for v in (x, y)))


PRUNERS = [mse(2, 4), mvue(2, 4), mvue_approx(2, 4), soft(2, 4), mse(1, 4), mvue(1, 4), identity]


@pytest.mark.kernels
@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("p", PRUNERS, ids=str)
def test_a_kernel_prunes_and_packs_as_the_reference_does(p, dtype, axis):
    """Normal values bit for bit. Where others lie, what is unpacked is equal."""
    state = jnp.float32(1.7) if isinstance(p, soft) else None
    x, odd = normal((2, 128, 192), dtype), hostile((2, 128, 192), dtype)
    x, odd = (mse(2, 4)(v, axis) if p == identity else v for v in (x, odd))
    prune = lambda x: p(x, axis, nm.Ctx(key=3, state=state))
    kernel = partial(calls.compress, axis=axis, pruner=p, key=3, state=state, target=HERE)
    same(kernel(x), jax.jit(lambda x: nm.pack(prune(x), axis, order="words16"))(x))
    same(nm.unpack(kernel(odd)), jax.jit(prune)(odd))


PAIRS = [
    ((transposable(2, 4), -2), (transposable(2, 4), -1)),
    ((identity, -1), (identity, -2)),
    ((mvue(2, 4), -1), (mvue(2, 4), -2)),
    ((mvue(1, 4), -2), (mvue_approx(2, 4), -2)),
    ((soft(2, 4), -2), (mse(2, 4), -1)),
]


@pytest.mark.kernels
@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair[0][0]}, {pair[1][0]}")
def test_two_forms_out_of_one_reading(pair):
    """Each by its own pruner, along its own axis, with the noise of its own key."""
    x, odd, state = normal((2, 128, 192)), hostile((2, 128, 192)), jnp.float32(1.7)
    x, odd = (transposable(2, 4)(v) if pair[0][0] == identity else v for v in (x, odd))
    wanted = tuple(Copy(None, packed=True, pruner=p, axis=axis) for p, axis in pair)
    make = partial(calls.copies, wanted=wanted, keys=[(3, None), (4, None)], state=state, target=HERE)
    for (p, axis), key, form, of_odd in zip(pair, (3, 4), make(x), make(odd), strict=True):
        prune = lambda x, p=p, axis=axis, key=key: p(x, axis, nm.Ctx(key=key, state=state))
        same(form, jax.jit(lambda x, axis=axis, prune=prune: nm.pack(prune(x), axis, order="words16"))(x))
        same(nm.unpack(of_odd), jax.jit(prune)(odd))


@pytest.mark.kernels
@pytest.mark.parametrize("axis", [-1, -2])
def test_what_is_not_two_of_four_becomes_nan(axis):
    """As in `pack` under jit: a kernel too drops nothing silently."""
    x = normal((64, 64)) if axis == -1 else normal((64, 64)).T
    groups_of = lambda v: np.asarray(v, np.float32).reshape((64, 16, 4) if axis == -1 else (16, 4, 64))
    crowded = (groups_of(x) != 0).sum(-1 if axis == -1 else 1) > 2
    made = np.isnan(groups_of(nm.unpack(calls.compress(x, axis, target=HERE)))).any(-1 if axis == -1 else 1)
    np.testing.assert_array_equal(made, crowded)
    both, _ = calls.copies(x, tuple(Copy(None, packed=True, axis=a) for a in (axis, -3 - axis)), target=HERE)
    np.testing.assert_array_equal(np.isnan(groups_of(nm.unpack(both))).any(-1 if axis == -1 else 1), crowded)


@pytest.mark.kernels
@pytest.mark.parametrize("format", ["e4m3", "e5m2"])
def test_in_fp8_too(format):
    x = normal((128, 64)).at[0].set(0)
    ((made, _),) = calls.copies(x, (Copy(format, packed=True),), target=HERE)
    seen = np.isnan(np.asarray(made.values, np.float32)).reshape(128, 16, 2).any(-1)
    assert seen[1:].all()
    assert not seen[0].any()


def test_pruning_that_is_not_in_fours_is_packed_after_it():
    assert fuses(mse(2, 4))
    assert fuses(mvue(1, 4))
    assert not any(map(fuses, (mse(3, 4), mse(1, 8), nm.uniform(2, 4), transposable(2, 4), nm.ste(mse(2, 4)))))


@pytest.mark.kernels
def test_noise_of_stacked_layers_is_their_own():
    """Mapped over layers each has its key's noise, as the reference mapped has; a batch in one array has one key's."""
    x, keys = normal((3, 64, 128)), jnp.stack([random.words(i) for i in range(3)])
    made = jax.vmap(lambda x, k: calls.compress(x, -2, mvue(2, 4), key=k, target=HERE))(x, keys)
    same(made, jax.jit(jax.vmap(lambda x, k: nm.pack(mvue(2, 4)(x, -2, nm.Ctx(key=k)), -2)))(x, keys))
    made = calls.compress(x, -1, mvue(2, 4), key=5, target=HERE)
    same(made, jax.jit(lambda x: nm.pack(mvue(2, 4)(x, -1, nm.Ctx(key=5)), -1))(x))


# ---- the forms of FP8 ----

WANTED = {
    "x of S-STE": (Copy("e4m3"), Copy("e5m2", turned=True)),
    "g of S-STE": (Copy("e5m2"), Copy("e5m2", packed=True, pruner=mvue(2, 4), axis=-2, rounding="random")),
    "g of FST": (Copy("e5m2", packed=True, pruner=mvue_approx(2, 4), axis=-2, rounding="random"),),
    "w of S-STE": (Copy("e4m3", packed=True, pruner=soft(2, 4), axis=-2), Copy("e5m2", pruner=soft(2, 4), axis=-2)),
    "in 16 bits and in FP8": (
        Copy(None, packed=True, pruner=mvue(2, 4)),
        Copy("e5m2", packed=True, pruner=mvue(2, 4), axis=-2, rounding="random"),
    ),
    "packed along columns": (Copy("e4m3", packed=True, pruner=mse(2, 4)), Copy("e4m3", turned=True, pruner=mse(2, 4))),
}


@pytest.mark.kernels
@pytest.mark.parametrize("name", WANTED)
def test_forms_of_fp8(name):
    """Those of XLA bit for bit, whose scales are of the largest value, or of a bound of it. Each form has its keys."""
    x, wanted, beta = normal((2, 128, 192)), WANTED[name], 1.5
    keys = [(3, 4), (5, 6)][: len(wanted)]
    made = calls.copies(x, wanted, keys=keys, state=jnp.float32(beta), target=HERE)
    for copy, (key, rounding), form in zip(wanted, keys, made, strict=True):
        by_xla = partial(calls.copy_by_xla, copy=copy, key=key, rounding=rounding, state=jnp.float32(beta))
        if copy.format is None:
            same(form, jax.jit(by_xla)(x))
            continue
        (form, undo), (held, factor) = form, jax.jit(by_xla)(x)
        same(form, held)
        np.testing.assert_allclose(undo, factor, rtol=1e-6)
        grows = {mvue: 2.0, mvue_approx: 16 / 7, soft: beta}.get(type(copy.pruner), 1.0)
        largest = float(jnp.finfo(float8.FORMATS[copy.format]).max)
        assert 0.25 < float(jnp.max(jnp.abs(x.astype(jnp.float32)))) * grows / float(undo) / largest < 1.001
        assert jnp.dtype(form.dtype).name.startswith(f"float8_{copy.format}")


@pytest.mark.kernels
def test_fp8_shows_what_is_not_finite():
    x = normal((1, 128, 64)).at[0, 3, 5].set(jnp.inf).at[0, 9, 9].set(jnp.nan)
    ((form, undo),) = calls.copies(x, (Copy("e4m3"),), target=HERE)
    bad = ~np.isfinite(np.asarray(form, np.float32))
    assert bad[0, 3, 5]
    assert bad[0, 9, 9]
    assert bad.sum() == 2
    np.testing.assert_allclose(np.asarray(form, np.float32)[~bad] * undo, np.asarray(x, np.float32)[~bad], atol=0.2)


@pytest.mark.kernels
def test_zeros_have_forms():
    ((form, undo),) = calls.copies(
        jnp.zeros((1, 128, 64), jnp.bfloat16), (Copy("e5m2", packed=True, pruner=mse(2, 4)),), target=HERE
    )
    assert (nm.unpack(form).astype(jnp.float32) == 0).all()
    assert jnp.isfinite(undo)


# ---- derivatives of activation functions ----


@pytest.mark.parametrize("f", list(activations._DERIVATIVES), ids=lambda f: f.__name__)
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
@pytest.mark.parametrize("p", [mvue(2, 4), soft(2, 4), identity], ids=str)
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
    same(packed, calls.compress(made, -2, p, key=3, state=1.25, target=HERE))


# ---- rounding at random ----


def test_nearest_rounding_is_what_it_was():
    x = normal((64, 64), jnp.float32)
    np.testing.assert_array_equal(float8.cast(x, "e4m3"), x.astype(jnp.float8_e4m3fn))
