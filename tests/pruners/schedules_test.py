"""Schedules against closed forms, at their edges, as data and as values."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import nmjax as nm

CASES = {
    nm.constant(0.3): {0: 0.3, 10**6: 0.3},
    nm.linear(1, 0, 10): {0: 1, 1: 0.9, 5: 0.5, 10: 0, 11: 0},
    nm.linear(1, 0, 3, begin=7): {3: 1, 7: 1, 10: 0},
    nm.linear(2, 4, 4, begin=3): {0: 2, 3: 2, 5: 3, 7: 4, 100: 4},
    nm.cosine(1, 0, 10): {0: 1, 5: 0.5, 10: 0, 20: 0},
    nm.cosine(1, 0, 7): {0: 1, 7: 0},
    nm.cosine(0, 3, 4, begin=4): {4: 0, 6: 1.5, 8: 3},
    nm.exponential(1e-4): {0: 1, 10920: np.exp(-1.092), 109200: np.exp(-10.92)},
    nm.exponential(1e-3, begin=100, end=1100): {0: 1, 100: 1, 1099: np.exp(-0.999), 1100: 0, 9999: 0},
    nm.stairs(((0, 1.0), (10, 0.5), (20, 0.0))): {0: 1, 9: 1, 10: 0.5, 19: 0.5, 20: 0, 10**6: 0},
    nm.optax_schedule("linear_schedule", 1.0, 0.0, transition_steps=10): {0: 1, 5: 0.5, 10: 0},
}


@pytest.mark.parametrize("schedule", CASES, ids=str)
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_values(schedule, wrap):
    call = wrap(schedule)
    for step, value in CASES[schedule].items():
        got = call(jnp.int32(step))
        assert got.dtype == jnp.float32
        assert got.shape == ()
        exact = value in (0, 1) and not isinstance(schedule, nm.optax_schedule)  # ends decide between dense and n:m
        near = {"rtol": 0} if exact else {"rtol": 1e-5, "atol": 1e-7}
        np.testing.assert_allclose(got, value, **near)
        np.testing.assert_allclose(schedule(step), value, **near)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("begin", [0, 2**24 + 1, 2**30 + 7])
def test_steps_that_float32_cannot_count(wrap, begin):
    """Steps beyond 2**24 differ by one. The factor is that of the difference, and the end is not a step early."""
    for shape in (nm.linear, nm.cosine):
        at = wrap(shape(1, 0, 3, begin=begin))
        near = wrap(shape(1, 0, 3))
        assert [float(at(jnp.int32(begin + i))) for i in range(5)] == [float(near(jnp.int32(i))) for i in range(5)]
    fading = wrap(nm.exponential(0.5, begin=begin, end=begin + 3))
    got = [float(fading(jnp.int32(begin + i))) for i in range(4)]
    np.testing.assert_allclose(got, [1, np.exp(-0.5), np.exp(-1), 0], rtol=1e-6)


@pytest.mark.parametrize("steps", [100_000, 2**24 + 1, 20_000_001, 2**31 - 1])
def test_a_long_ramp_ends_at_its_end_alone(steps):
    """The step at which `decay` says that its weights are n:m (`phases`) is the first one with the factor 0."""
    for ramp in (nm.linear(1, 0, steps), nm.cosine(1, 0, steps)):
        assert nm.decay(nm.mse(2, 4), ramp).phases[-1] == steps
        assert float(ramp(jnp.int32(steps))) == 0
        assert 0 < float(ramp(jnp.int32(steps - 1))) < 2e-5
        np.testing.assert_allclose(float(ramp(jnp.int32(steps // 2))), 0.5, rtol=1e-6)


def test_optax_by_name_is_optax():
    ours = nm.optax_schedule("warmup_cosine_decay_schedule", 0.0, 1.0, 10, 100)
    theirs = optax.warmup_cosine_decay_schedule(0.0, 1.0, 10, 100)
    for step in (0, 5, 10, 50, 100):
        np.testing.assert_array_equal(ours(step), theirs(step))


def test_equal_schedules_share_a_trace():
    @jax.jit
    @chex.assert_max_traces(n=1)
    def at(step):
        return nm.linear(1, 0, 10)(step)

    for step in range(5):
        at(step)
    assert nm.linear(1, 0, 10) == nm.linear(1.0, 0.0, np.int64(10))
    assert hash(nm.linear(1, 0, 10)) == hash(nm.linear(1.0, 0.0, np.int64(10)))
    assert nm.optax_schedule("constant_schedule", 1.0) == nm.optax_schedule("constant_schedule", 1.0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nm.linear(1, 0, 0), "steps must be at least 1"),
        (lambda: nm.linear(1, 0, 1.5), "steps must be a whole number, got 1.5"),
        (lambda: nm.constant(float("nan")), "must be a number"),
        (lambda: nm.constant("1"), "must be a number"),
        (lambda: nm.stairs(((1, 1.0),)), "must start at step 0"),
        (lambda: nm.stairs(((0, 1.0), (5, 0.5), (5, 0.1))), "rise"),
        (lambda: nm.stairs(()), r"takes rows \(\(0, first\)"),
        (
            lambda: nm.optax_schedule("cosine_schedul", 1.0),
            "optax has no schedule 'cosine_schedul'. It has .*cosine_decay_schedule",
        ),
        (lambda: nm.optax_schedule("cosine_decay_schedule"), "missing"),
        (lambda: nm.constant(jnp.float32(1)), "got an array"),
        (lambda: nm.stairs(((0, "a"),)), "must be a number, got 'a'"),
        (lambda: nm.stairs(((0, float("nan")),)), "must be a number"),
        (lambda: nm.exponential(1.0, end="x"), "end must be a whole number"),
        (
            lambda: nm.optax_schedule("piecewise_constant_schedule", 1.0, {10: 0.5}),
            r"For piecewise constant values write stairs\(",
        ),
    ],
)
def test_bad_schedules_say_so(make, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make()


def test_the_order_of_keywords_does_not_matter():
    one = nm.optax_schedule("linear_schedule", init_value=1.0, end_value=0.0, transition_steps=10)
    other = nm.optax_schedule("linear_schedule", transition_steps=10, end_value=0.0, init_value=1.0)
    assert one == other
    assert hash(one) == hash(other)
    assert nm.parse(f"mdgf(2,4,{one})") == nm.parse(f"mdgf(2,4,{other})")


def test_decay_of_a_random_pruner_takes_a_seed_that_is_traced():
    p = nm.decay(nm.uniform(2, 4, rescale=False), nm.linear(1, 0, 10))
    w = jnp.arange(1.0, 9.0)
    inside = jax.jit(lambda w: p(w, ctx=nm.Ctx(key=0, step=5)))(w)
    np.testing.assert_array_equal(inside, p(w, ctx=nm.Ctx(key=0, step=5)))
