"""The meaning of the words of a config."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import nmjax as nm
from configs import common
from experiments.errors import Mistake
from experiments.training import settings


@pytest.fixture(autouse=True)
def _standard():
    with jax.numpy_dtype_promotion("standard"):  # Optax's Adam mixes dtypes
        yield


@pytest.mark.parametrize(("text", "steps"), [("5%", 100), ("30", 30), ("0", 0), ("2.5%", 50), ("100%", 2000)])
def test_durations(text, steps):
    assert settings.duration(text, 2000, "x") == steps


@pytest.mark.parametrize("text", ["", "5 %%", "-1", "often", "nan", "inf%"])
def test_no_durations(text):
    with pytest.raises(Mistake, match="config.evaluate.*is not a duration"):
        settings.duration(text, 2000, "config.evaluate")


def test_lengths():
    c = common.run()
    c.epochs, c.batch = 3.0, 100
    assert settings.steps(c, 1437) == 43
    c.epochs, c.steps = 0.0, 7
    assert settings.steps(c, 1437) == 7
    c.epochs = 1.0
    assert settings.steps(c, 1437) == 7


def test_recipes_count_in_shares_of_the_run():
    c = common.run()
    c.rules = ((r"a/.*", "mine"), (r".*", "fst(dense_from=50%)"))
    c.sparsity = {"mine": "mdgf(1,8,linear(1,0,70%))"}
    recipe = settings.recipe(c, 2000)
    assert recipe("a/b") == nm.methods.mdgf(1, 8, nm.linear(1, 0, 1400))
    assert recipe("b") == nm.methods.fst(dense_from=1000)


def test_a_share_is_a_whole_number_before_its_sign():
    assert settings.in_steps("linear(1,0,.5%)", 2000) == "linear(1,0,10)"
    assert settings.in_steps("linear(1,0,1e1%)", 2000) == "linear(1,0,1e1%)"  # the parser refuses this


def rate(total=1000, **changes):
    c = common.run()
    c.learning_rate.update(changes)
    return settings.learning_rate(c, total)


def test_the_rate_warms_up_linearly_and_falls_by_a_cosine():
    f = rate(peak=2.0, warmup="10%", end=0.5)
    steps = np.array([0, 49, 99, 100, 550, 1000])
    after = 0.5 + 1.5 * (1 + np.cos(np.pi * np.array([0, 450, 900]) / 900)) / 2
    np.testing.assert_allclose([float(f(jnp.int32(s))) for s in steps[:3]], 2.0 * (steps[:3] + 1) / 101, rtol=1e-6)
    np.testing.assert_allclose([float(f(jnp.int32(s))) for s in steps[3:]], after, rtol=1e-6)


def test_other_shapes():
    assert float(rate(peak=2.0, warmup="0", shape="constant")(700)) == 2.0
    np.testing.assert_allclose(float(rate(peak=2.0, warmup="0", shape="linear", end=1.0)(500)), 1.5)


def updates(c, params, grads, **extra):
    tx = settings.optimizer(c, optax.constant_schedule(0.5), 100)
    return tx.update(grads, tx.init(params), params, **extra)[0]


PARAMS = {"up": {"kernel": jnp.array([1.0, -2.0]), "bias": jnp.array([3.0])}}
GRADS = {"up": {"kernel": jnp.array([3.0, 4.0]), "bias": jnp.array([0.0])}}


@pytest.mark.slow
def test_sgd_clips_first_and_decays_kernels_only():
    c = common.run()
    c.optimizer = "sgd(weight_decay=0.1)"
    c.clip = 1.0
    found = updates(c, PARAMS, GRADS)["up"]
    np.testing.assert_allclose(found["kernel"], -0.5 * np.array([0.6 + 0.1, 0.8 - 0.2]), rtol=1e-6)
    np.testing.assert_allclose(found["bias"], [0.0])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "more"), [("adamw", ""), ("lion", ""), ("step_adam", ", after=10%, before=50%")])
def test_decay_is_of_kernels_only(name, more):
    c = common.run()
    c.optimizer = f"{name}(weight_decay=0.1{more})"
    plain, c.optimizer = updates(c, PARAMS, GRADS), f"{name}(weight_decay=0.0{more})"
    without = updates(c, PARAMS, GRADS)
    np.testing.assert_allclose(
        plain["up"]["kernel"] - without["up"]["kernel"], -0.05 * PARAMS["up"]["kernel"], rtol=1e-4
    )
    np.testing.assert_allclose(plain["up"]["bias"], without["up"]["bias"])


def test_masked_decay_comes_after_clipping():
    c = common.run()
    c.optimizer, c.clip, c.masked_decay = "sgd", 1.0, 0.1
    masks = {"up": {"kernel": jnp.array([True, False]), "bias": jnp.array(True)}}
    found = updates(c, PARAMS, GRADS, masks=masks)["up"]
    np.testing.assert_allclose(found["kernel"], -0.5 * np.array([0.6, 0.8 - 0.2]), rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["lars(weight_decay=0.1)", "adafactor(weight_decay_rate=0.1)", "adadelta(weight_decay=0.1)"]
)
def test_an_optimizer_with_a_mask_of_another_name_leaves_biases(name):
    c = common.run()
    c.optimizer = name
    still = jax.tree.map(jnp.zeros_like, GRADS)
    found = updates(c, PARAMS, still)["up"]
    assert np.all(found["bias"] == 0)
    assert np.all(found["kernel"] != 0)
