"""Blocks that are called on their own, and the reasons why they cannot be."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import nmjax as nm
from nmjax.nnx import between, one_shot
from nmjax.nnx.batches import Call
from nmjax.nnx.between import NotAlone
from nmjax.nnx.blocks import Blocks
from tests.nnx.calibration_test import Unusual, by_whole_calls

RNG = np.random.default_rng(0)
PATHS = [f"blocks/{i}" for i in range(3)]
ARRAYS = [jnp.asarray(RNG.normal(size=(rows, 8)), jnp.float32) for rows in (16, 24)]


class Strange(nnx.Module):
    """Blocks that are called in ways that only the whole model can follow."""

    def __init__(self, kind):
        self.kind = kind
        make = {"refusing": Refusing, "remembering": Remembering, "returning": Returning}.get(kind, Flexible)
        self.blocks = nnx.List([make(8, 8, rngs=nnx.Rngs(i)) for i in range(3)])
        if kind == "tied":
            self.blocks[1].kernel = self.blocks[0].kernel

    def __call__(self, x):
        for i, block in enumerate(self.blocks):
            if self.kind == "idle" and i == 1:
                continue
            args = {"module": (self.blocks[0],), "unhashable": ({1},), "hashable": (frozenset({1}),)}
            y = block(x, *args.get(self.kind, ()))
            x = jnp.tanh(y[0] if self.kind == "returning" else y)
            if self.kind == "remembering":
                x = x / block.largest
            if self.kind == "twice" and i == 2:
                x = block(x)
        return x


class Flexible(nnx.Linear):
    def __call__(self, x, more=None):
        return super().__call__(x)


class Refusing(Flexible):
    def __init_subclass__(cls, **options):
        super().__init_subclass__(**options)


class Remembering(Flexible):
    def __call__(self, x, more=None):
        y = super().__call__(x)
        self.largest = nnx.data(1 + jnp.abs(y).max())
        return y


class Returning(Flexible):
    def __call__(self, x, more=None):
        return super().__call__(x), "text"


def found(model, batches=ARRAYS):
    return Blocks.find(model, PATHS, PATHS, [Call.of(batch) for batch in batches])


INSIDE = "one is called in a scan, a checkpoint, a branch or a compiled function"
REASONS = {
    **dict.fromkeys(("jit", "checkpoint", "vmap", "cond"), (Unusual, INSIDE)),
    "order": (Unusual, "batches of different shapes call them in different orders"),
    "outside": (Unusual, "blocks/2 is called twice"),
    "twice": (Strange, "blocks/2 is called twice"),
    "tied": (Strange, "two of them share a variable"),
    "idle": (Strange, "the call does not call blocks/1"),
    "module": (Strange, "blocks/0 takes or returns a module or a variable"),
    "unhashable": (Strange, "blocks/0 takes an argument that is neither an array nor hashable"),
    "returning": (Strange, "blocks/0 returns something that is not an array"),
    "refusing": (Strange, "the class Refusing has an __init_subclass__ of its own"),
}


@pytest.mark.parametrize("kind", REASONS)
def test_the_reason_why_blocks_cannot_be_called_on_their_own(kind):
    make, reason = REASONS[kind]
    assert found(make(kind)) == NotAlone(reason)


@pytest.mark.parametrize("model", [Unusual("shape"), Unusual(""), Strange("hashable")], ids=lambda model: model.kind)
def test_the_arguments_of_blocks_are_those_of_the_whole_call(model):
    """Also after weights have changed, and without the outputs that no later block needs."""
    blocks = found(model)
    assert isinstance(blocks, Blocks)
    assert blocks.paths == PATHS
    for block in model.blocks:
        block.kernel[...] = 2 * block.kernel[...]
    for number in range(3):
        calls = blocks.calls(number)
        for call, x in zip(calls, ARRAYS, strict=True):
            np.testing.assert_allclose(call.args[0], recorded(model, x)[number], rtol=1e-5, atol=1e-5)
            assert call.args[1:] == ((frozenset({1}),) if model.kind == "hashable" else ())
        blocks.run(number, calls)
        later = [set().union(*(way.needs for way in own[number + 1 :])) for own in blocks.ways]
        kept = [{i for i, v in enumerate(outputs) if v != [None]} for outputs in blocks.outputs]
        assert kept == [{i for i in own if i <= number} for own in later]
    if model.kind == "shape":
        assert [[way.needs for way in own] for own in blocks.ways] == [[set(), {0}, {1}]] * 2


def recorded(model, x):
    """Return what a call of a model gives to its blocks."""
    seen = []
    copy = nnx.clone(model)
    for i, block in enumerate(model.blocks):
        copy.blocks[i] = Recording(nnx.clone(block), seen)
    copy(x)
    return seen


class Recording(nnx.Module):
    def __init__(self, block, seen):
        self.block, self.seen = block, nnx.static(seen)

    def __call__(self, x, *args):
        self.seen.append(x)
        return self.block(x, *args)


@pytest.mark.slow
def test_an_error_of_the_model_is_told_and_the_whole_model_is_called():
    """The model reads what a block has left, and a block that is not called leaves nothing."""
    model = Strange("remembering")
    with pytest.warns(UserWarning, match="the whole model is called for each block, which takes longer") as caught:
        pruned = nm.nnx.prune(model, "ste(2,4)", ARRAYS)
    assert "so raised AttributeError: 'Remembering' object has no attribute 'largest'" in str(caught[0].message)
    assert caught[0].filename == __file__
    right = by_whole_calls(model, (2, 4), ARRAYS, [[path] for path in PATHS])
    for own, wanted in zip(pruned.model.blocks, right.blocks, strict=True):
        np.testing.assert_allclose(own.kernel[...], wanted.kernel[...], atol=2e-5)


def test_an_error_of_the_search_is_raised(monkeypatch):
    def broken(program, results):
        raise RuntimeError("a mistake")

    monkeypatch.setattr(between, "_part", broken)
    with pytest.raises(RuntimeError, match="a mistake"):
        nm.nnx.prune(Unusual(""), "ste(2,4)", ARRAYS)


@pytest.mark.slow
def test_an_error_after_the_last_block_does_not_matter():
    class Counting(nnx.Module):
        def __init__(self):
            self.blocks = nnx.List([Remembering(8, 8, rngs=nnx.Rngs(i)) for i in range(3)])

        def __call__(self, x):
            for block in self.blocks:
                x = jnp.tanh(block(x))
            return x / sum(block.largest for block in self.blocks)

    model = Counting()
    blocks = found(model)
    assert isinstance(blocks, Blocks)
    pruned = nm.nnx.prune(model, "ste(2,4)", ARRAYS)
    right = by_whole_calls(model, (2, 4), ARRAYS, [[path] for path in PATHS])
    for own, wanted in zip(pruned.model.blocks, right.blocks, strict=True):
        np.testing.assert_allclose(own.kernel[...], wanted.kernel[...], atol=2e-5)


@pytest.mark.parametrize("kind", ["", "jit"])
def test_the_progress_bar_says_why(kind, monkeypatch):
    titles = []
    monkeypatch.setattr(one_shot, "_shown", lambda groups, title: titles.append(title) or groups)
    nm.nnx.prune(Unusual(kind), "ste(2,4)", ARRAYS, progress=True)
    assert titles == ["Pruning" + (f", with the whole model for each block, because {INSIDE}" if kind else "")]


def test_a_model_whose_blocks_draw_noise_of_their_own():
    """The count of a model's noise does not move, so all calls of a block see the same."""

    class Noisy(nnx.Module):
        def __init__(self):
            self.drop = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
            self.blocks = nnx.List([Flexible(8, 8, rngs=nnx.Rngs(i)) for i in range(3)])

        def __call__(self, x):
            for block in self.blocks:
                x = jnp.tanh(block(self.drop(x)))
            return x

    blocks = found(Noisy())
    first, again = blocks.calls(0), blocks.calls(0)
    jax.tree.map(np.testing.assert_array_equal, first, again)
    assert (np.asarray(first[0].args[0]) == 0).any()
