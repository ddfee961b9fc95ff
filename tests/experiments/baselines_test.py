"""Baselines against closed forms, and against slow programs that follow the definitions."""

from collections import Counter

import numpy as np
import pytest

from experiments.studies import baselines
from experiments.studies.baselines import Examples


def probabilities(train, history, order, vocabulary):
    """Witten and Bell's probabilities of all next tokens, by counting in the text."""
    found = np.full(vocabulary, 1 / vocabulary)
    for length in range(order):
        if length > len(history):
            break
        context = tuple(history[len(history) - length :])
        ends = (i for i in range(length, len(train)) if tuple(train[i - length : i]) == context)
        after = Counter(train[i] for i in ends)
        if not after:
            break
        c, d = sum(after.values()), len(after)
        found = np.array([(after[t] + d * found[t]) / (c + d) for t in range(vocabulary)])
    return found


@pytest.mark.parametrize("order", [1, 2, 3, 5])
@pytest.mark.parametrize("seed", range(4))
def test_ngrams_against_counting(order, seed):
    draw = np.random.default_rng(seed)
    train, test = draw.integers(0, 4, 60), draw.integers(0, 5, 40)  # token 4 is never trained
    losses = []
    for at, token in enumerate(test):
        known = probabilities(train.tolist(), test[:at].tolist(), order, 5)
        assert known.sum() == pytest.approx(1)
        losses.append(-np.log(known[token]))
    assert baselines.ngram_loss(train, test, order, 5) == pytest.approx(np.mean(losses), rel=1e-12)


@pytest.mark.parametrize("penalty", [0.1, 10.0])
def test_ridge_is_the_solution_of_its_equations(penalty):
    draw = np.random.default_rng(0)
    x, y = draw.standard_normal((200, 6)).astype(np.float32), draw.integers(0, 3, 200)
    x[:, 0] += 2 * y
    predict = baselines.ridge(Examples(x, y), penalty)
    centred, targets = x - x.mean(0), np.eye(3)[y]
    variance = (centred**2).sum() / 6
    rows = np.vstack([centred, np.sqrt(penalty * variance) * np.eye(6)])  # the penalty as further examples of zero
    weights = np.linalg.lstsq(rows, np.vstack([targets - targets.mean(0), np.zeros((6, 3))]), rcond=None)[0]
    new = draw.standard_normal((50, 6)).astype(np.float32)
    assert (predict(new) == np.argmax((new - x.mean(0)) @ weights + targets.mean(0), 1)).all()


def test_a_bag_of_words_by_hand():
    """Class 0 has the words a, b and a b; class 1 has a, c and a c. Each word of the five has one count more."""
    train = Examples(np.array(["A b b", "a c", "c"], object), np.array([0, 1, 1]))
    # of "b a d" 0: 1/3 · 2/8 · 2/8, and 1: 2/3 · 2/9 · 1/9, where d is not known; of "a" 1/3 · 2/8 < 2/3 · 2/9
    found = baselines.bag_of_words(train, 1.0)(np.array(["b a d", "a", ""]))
    assert found.tolist() == [0, 1, 1]


def test_a_bag_of_words_has_pairs_and_each_word_once():
    predict = lambda first, second, text: baselines.bag_of_words(
        Examples(np.array([first, second], object), np.array([0, 1])), 1.0
    )(np.array([text])).item()  # fmt: skip
    assert predict("not bad good", "bad not good", "not bad") == 0
    assert predict("not bad good", "bad not good", "bad not") == 1
    assert predict("x x x x y", "x z", "x") == 1  # 2/10 < 2/9, and 5/15 > 2/9 if repeated words counted


def test_the_pseudo_count_is_chosen_on_validation_texts():
    texts = [f"word{i % 7} {'good' if i % 2 else 'bad'}" for i in range(80)]
    train, test = Examples(np.array(texts), np.arange(80) % 2), Examples(np.array(["bad", "good"]), np.zeros(2))
    score, on_validation, chosen = baselines.accuracy(train, test, "bag of words")
    assert (score, on_validation) == (0.5, 1.0)
    assert chosen in baselines.PSEUDO_COUNTS


@pytest.mark.parametrize("count", [1, 3, 10])
def test_nearest_against_sorting(count):
    draw = np.random.default_rng(1)
    x, y, new = draw.standard_normal((80, 5)).astype(np.float32), draw.integers(0, 4, 80), draw.standard_normal((30, 5))
    wanted = []
    for one in new.astype(np.float32):
        order = np.argsort(((x - one) ** 2).sum(1))[:count]
        wanted.append(np.argmax(np.bincount(y[order], minlength=4)))
    assert (baselines.nearest(Examples(x, y), count)(new.astype(np.float32)) == wanted).all()


@pytest.mark.parametrize("method", ["ridge", "nearest"])
def test_the_test_data_chooses_nothing(method):
    draw = np.random.default_rng(2)
    x, y = draw.standard_normal((300, 4)).astype(np.float32), draw.integers(0, 2, 300)
    x[:, 0] += 3 * y
    train, test = Examples(x[:200], y[:200]), Examples(x[200:], y[200:])
    score, on_validation, chosen = baselines.accuracy(train, test, method)
    turned, same, also = baselines.accuracy(train, Examples(test.x, 1 - test.y), method)
    assert (on_validation, chosen) == (same, also)
    assert score == pytest.approx(1 - turned)
    assert score > 0.8


def test_a_table_of_results():
    lines = [
        {"case": {"data": "fashion_mnist", "method": "ridge"}, "rows": {"accuracy": [0.812], "chosen": [0.1]}},
        {"case": {"data": "books", "method": "5-gram"}, "rows": {"loss": [1.68]}},
    ]
    table, pictures = baselines.figure(lines)
    assert "| Fashion-MNIST | ridge regression | 81.2 % | penalty 0.1 |" in table
    assert "| books, bytes | 5-gram | 1.680 nats a byte |" in table
    assert pictures == {}
