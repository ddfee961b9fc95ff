"""The random numbers of a run depend on its seed."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import nmjax as nm
from nmjax.nnx.layers import layers
from tests.experiments.runs import as_people_run_it as as_people_run_it, shared


def test_the_noise_of_each_layer_is_that_of_the_seed():
    program = shared("configs/vit_24.py:smoke")
    found = []
    for seed in (0, 1):
        state = program.init(jnp.uint32(seed))
        model = nnx.merge(program.graph, state.params, state.rest)
        sites = {layer.path: layer.site for layer in layers(model) if layer.site is not None}
        words = {path: site.words[...].ravel() for path, site in sites.items() if site.words is not None}
        alone = nm.nnx.sparsify(program.task.make(nnx.Rngs(0)), program.recipe, seed=jax.random.key(seed))
        for layer in layers(alone):
            if layer.path in words:
                np.testing.assert_array_equal(words[layer.path], layer.site.words[...].ravel())
        found += map(tuple, words.values())
    assert found
    assert len(set(map(tuple, np.asarray(found).tolist()))) == len(found)
