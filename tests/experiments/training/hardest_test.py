"""The errors of a model: counted over batches, compared with counts over all examples at once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.training import hardest
from tests.experiments.runs import program, shared

CONFIG_FILE = "configs/vit_24.py:smoke"


def softmax(logits):
    shares = np.exp(logits - logits.max(-1, keepdims=True))
    return shares / shares.sum(-1, keepdims=True)


def look(logits, x, y):
    return hardest.of_labels(logits, y, {"images": x}, hardest.IMAGES)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 7, 50, 64])
def test_errors_of_batches_are_those_of_all_images(size):
    """The last batch is filled up with images of label -1, which do not count."""
    rng = np.random.default_rng(0)
    logits, y = rng.normal(size=(50, 4)).astype(np.float32) * 3, rng.integers(0, 4, 50)
    x = np.arange(50, dtype=np.uint8)[:, None, None, None] * np.ones((1, 2, 2, 1), np.uint8)
    spare = -50 % size
    padded = [np.concatenate([v, np.zeros((spare, *v.shape[1:]), v.dtype) + fill]) for v, fill in ((logits, 9), (x, 0))]
    labels = np.concatenate([y, np.full(spare, -1)])
    batches = [slice(i, i + size) for i in range(0, 50 + spare, size)]
    looks = (look(*map(jnp.asarray, (padded[0][b], padded[1][b], labels[b]))) for b in batches)
    every, errors = hardest.errors(looks, 4, hardest.IMAGES)
    predictions, shares = logits.argmax(-1), softmax(logits)
    np.testing.assert_array_equal(every["labels"], y)
    np.testing.assert_array_equal(every["predictions"], predictions)
    expected = np.zeros((4, 4), int)
    for truth, taken in zip(y, predictions, strict=True):
        expected[truth, taken] += 1
    np.testing.assert_array_equal(errors["confusion"], expected)
    loss = -np.log(shares[np.arange(50), y])
    worst = np.argsort(-loss)[: hardest.IMAGES]
    np.testing.assert_array_equal(errors["images"], x[worst])
    np.testing.assert_array_equal(errors["labels"], y[worst])
    np.testing.assert_allclose(errors["loss"], loss[worst], rtol=1e-5)
    np.testing.assert_allclose(errors["confidence"], shares.max(-1)[worst], rtol=1e-5)


@pytest.mark.slow
def test_fewer_images_than_are_kept():
    found = look(jnp.zeros((4, 3)), jnp.zeros((4, 2, 2, 1), jnp.uint8), jnp.array([0, 2, -1, -1]))
    every, errors = hardest.errors([found], 3, hardest.IMAGES)
    assert len(errors["loss"]) == len(every["labels"]) == 2
    assert errors["confusion"].sum() == 2
    assert hardest.errors([], 3, hardest.IMAGES) == ({}, {})


@pytest.mark.slow
def test_the_hardest_windows_and_their_tokens():
    rng = np.random.default_rng(1)
    windows, logits = rng.integers(97, 123, (9, 6)), rng.normal(size=(9, 5, 128)).astype(np.float32)
    counts = np.arange(9) < 8
    losses = -np.log(np.take_along_axis(softmax(logits), windows[:, 1:, None], -1))[..., 0]
    arrays = [tuple(map(jnp.asarray, (logits[b], windows[b], counts[b]))) for b in (slice(0, 3), slice(3, 9))]
    found = hardest.windows((hardest.of_windows(*a) for a in arrays), decode)
    worst = np.argsort(-losses[:8].mean(-1))[: hardest.WINDOWS]
    np.testing.assert_allclose([window["loss"] for window in found], losses[worst].mean(-1), rtol=1e-5)
    for window, k in zip(found, worst, strict=True):
        assert [text for text, _ in window["pieces"]] == [chr(c) for c in windows[k]]
        assert window["pieces"][0][1] is None
        np.testing.assert_allclose([loss for _, loss in window["pieces"][1:]], losses[k], rtol=1e-5)


def decode(tokens):
    return bytes(np.asarray(tokens, np.uint8)).decode(errors="replace")


def test_bytes_of_one_character_are_one_piece():
    text = "aé語b"
    tokens = np.frombuffer(text.encode(), np.uint8)  # 1 + 2 + 3 + 1 bytes
    losses = np.arange(1.0, len(tokens))
    assert hardest.pieces(tokens, losses, decode) == [("a", None), ("é", 1.5), ("語", 4.0), ("b", 6.0)]
    broken = np.array([97, 255, 98, 99], np.uint8)
    texts, means = zip(*hardest.pieces(broken, np.ones(3), decode), strict=True)
    assert "".join(texts) == decode(broken)
    assert set(means) == {None, 1.0}


def test_a_decoder_that_drops_the_first_space_keeps_it_within():
    words = ["The", " cat", " sat"]
    drop = lambda tokens: "".join(words[t] for t in tokens).lstrip(" ")
    assert hardest.pieces(np.array([0, 1, 2]), np.array([1.0, 2.0]), drop) == [
        ("The", None),
        (" cat", 1.0),
        (" sat", 2.0),
    ]


@pytest.mark.slow
def test_the_pictures_of_a_run_have_the_errors_of_its_evaluation():
    """The share of the diagonal is the accuracy of the hardened weights on the test split."""
    run = shared(CONFIG_FILE)
    state = run.init(np.uint32(0))
    found, scores = run.pictures(state), run.evaluate(state, "test")
    confusion = found["confusion"]
    assert confusion.sum() == len(run.task.set.test[0])
    np.testing.assert_array_equal(confusion.sum(1), np.bincount(run.task.set.test[1], minlength=10))
    assert np.trace(confusion) / confusion.sum() == pytest.approx(scores["hardened_accuracy"])
    assert found["hardest_loss"][0] >= scores["hardened_loss"]
    assert np.all(np.diff(found["hardest_loss"]) <= 0)
    np.testing.assert_array_equal(found["labels"], run.task.set.test[1][:: 360 // 24][:24])


@pytest.mark.rare
@pytest.mark.slow
def test_devices_and_runs_side_by_side_show_the_same_errors():
    one = shared(CONFIG_FILE)
    wanted = one.pictures(one.init(np.uint32(1)))
    many = program(CONFIG_FILE, "--config.mesh.fsdp=2")
    assert many.mesh.size == jax.device_count() > 1
    both = many.beside(2)
    states = both.together([many.init(np.uint32(seed)) for seed in (0, 1)])
    found = many.pictures(both.part(states, 1))
    np.testing.assert_array_equal(found["confusion"], wanted["confusion"])
    np.testing.assert_array_equal(found["hardest_images"], wanted["hardest_images"])
    np.testing.assert_allclose(found["hardest_loss"], wanted["hardest_loss"], rtol=1e-4)
