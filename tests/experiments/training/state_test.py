"""States of runs: their noise is that of their seed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import nmjax as nm
from experiments.training.state import State, reseeded
from nmjax.nnx.layers import layers
from tests.experiments.runs import as_people_run_it as as_people_run_it, program, shared


class Net(nnx.Module):
    """A sparse layer, dropout, and a count that training changes."""

    def __init__(self, rngs):
        self.layer, self.dropout = nnx.Linear(8, 8, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)


def model(seed):
    key = jax.random.key(seed)
    return nm.nnx.sparsify(Net(nnx.Rngs(key)), nm.Recipe({"layer": "s_ste(2,4)"}), seed=key)


def state(seed):
    _, params, rest = (nnx.as_pure(part) for part in nnx.split(model(seed), nnx.Param, ...))
    return State(jnp.int32(7), jnp.uint32(seed), params, rest, (), (params, rest))


def by_path(tree):
    return {nm.metrics.path(path): value for path, value in jax.tree_util.tree_flatten_with_path(tree)[0]}


@pytest.mark.slow
def test_a_state_with_the_noise_of_another_seed():
    """The words of pruning noise and the keys of dropout are those of the other seed. All else stays."""
    old, other = state(0), state(1)
    new = reseeded(old, other.seed, other.rest, model(0))
    assert (int(new.seed), int(new.step)) == (1, 7)
    assert new.params is old.params
    assert new.ema[0] is old.ema[0]
    for rest in (new.rest, new.ema[1]):
        before, wanted = by_path(old.rest), by_path(other.rest)
        noise = {path for path in before if path.endswith(("words", "key"))}
        assert len(noise) >= 2
        for path, value in by_path(rest).items():
            assert bool(jnp.all(value == (wanted if path in noise else before)[path]))
        for path in noise:
            assert bool(jnp.any(before[path] != wanted[path]))


@pytest.mark.slow
def test_the_noise_of_each_layer_is_that_of_the_seed():
    made = shared("configs/vit_24.py:smoke")
    found = []
    for seed in (0, 1):
        state = made.init(jnp.uint32(seed))
        model = nnx.merge(made.graph, state.params, state.rest)
        states = {layer.path: layer.state for layer in layers(model) if layer.state is not None}
        words = {path: state.words[...].ravel() for path, state in states.items() if state.words is not None}
        alone = nm.nnx.sparsify(made.task.make(nnx.Rngs(0)), made.recipe, seed=jax.random.key(seed))
        for layer in layers(alone):
            if layer.path in words:
                np.testing.assert_array_equal(words[layer.path], layer.state.words[...].ravel())
        found += map(tuple, words.values())
    assert found
    assert len(set(map(tuple, np.asarray(found).tolist()))) == len(found)


@pytest.mark.slow
@pytest.mark.parametrize("config", ["configs/vit_24.py:smoke", "configs/gpt_24.py:smoke"])
def test_a_step_gives_the_mean_gradient_of_its_micro_batches_to_pruners_that_choose_by_it(config):
    """The scores of movement are minus the weight times that gradient, which the first step of SGD takes from it."""
    text = "--config.sparsity.blocks=y_w=ste(movement(2,4))"
    rate = ("--config.learning_rate.peak=1.0", "--config.learning_rate.warmup=0")
    made = program(config, text, "--config.accumulate=2", "--config.optimizer=sgd()", "--config.clip=0.0", *rate)
    first = by_path(made.init(jnp.uint32(0)).params)  # train donates its state
    state = made.init(jnp.uint32(0))
    state, figures = made.train(state, next(iter(made.task.feed(0, 0, made.mesh))))
    scores = {path: v for path, v in by_path(state.rest).items() if path.endswith("/nm_state/state/y_w/0")}
    assert len(scores) >= 4
    for path, found in scores.items():
        kernel = path.partition("/nm_state")[0] + "/kernel"
        gradient = (first[kernel] - by_path(state.params)[kernel]) / figures["learning_rate"]
        wanted = -first[kernel] * gradient
        np.testing.assert_allclose(found, wanted, atol=1e-3 * float(jnp.abs(wanted).max()), err_msg=path)
