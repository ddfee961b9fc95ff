"""Simple methods on the data of the studies. The dense network of a study has to be better than these.

    python -m experiments.studies baselines

Images: ridge regression on the pixels, and the nearest training images. Sentences with labels: naive Bayes on words and
pairs of words. A text: tables of n-grams of bytes with back-off. They read Fashion-MNIST, CIFAR-10, SST-2 and the books
from $NMJAX_DATA. The penalty, the number of neighbours and the pseudo-count are chosen on validation data, a tenth of
the training data. The test data is scored once.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int
from ml_collections import ConfigDict
from sklearn.feature_extraction.text import CountVectorizer
from sklearn.linear_model import RidgeClassifier
from sklearn.naive_bayes import MultinomialNB
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline

from experiments.data import images, labelled, text, validation
from experiments.report.words import markdown_table

VALIDATION = 0.1
PENALTIES = tuple(10.0**power for power in range(-3, 3))  # relative to the mean variance of a pixel
NEIGHBOURS = (1, 3, 5, 10, 20)
PSEUDO_COUNTS = (0.1, 0.3, 1.0, 3.0)
ORDERS = (2, 3, 5)
BOOKS = {"name": "books_train.txt", "test": "books_val.txt"}
CASES = [{"data": name, "method": method} for name in ("fashion_mnist", "cifar10") for method in ("ridge", "nearest")]
CASES += [{"data": "sst2", "method": "bag of words"}]
CASES += [{"data": data, "method": f"{order}-gram"} for data in ("books", "books_start") for order in ORDERS]
START = 1024 * 256 + 1  # bytes of the test text: those on which methods.py tests its GPT


class Examples(NamedTuple):
    """Inputs, as vectors or texts, and their labels."""

    x: np.ndarray
    y: Int[np.ndarray, " n"]


# ---- images and sentences ----

Predict = Callable[[np.ndarray], Int[np.ndarray, " n"]]


def ridge(train: Examples, penalty: float) -> Predict:
    """Return the classifier of linear regression on the labels, with a squared penalty.

    Args:
      train: The training examples.
      penalty: The factor of the squared weights, relative to the mean variance of a feature.
    """
    alpha = penalty * len(train.x) * float(np.var(train.x, 0, dtype=np.float64).mean())
    return RidgeClassifier(alpha).fit(*train).predict


def nearest(train: Examples, count: int) -> Predict:
    """Return the classifier by the majority of the nearest training examples; among equals the smallest class."""
    return KNeighborsClassifier(count, algorithm="brute").fit(*train).predict


def bag_of_words(train: Examples, pseudo: float) -> Predict:
    """Return the naive Bayes classifier of the words of a text, and of the pairs of words that follow each other.

    Each word counts once in a text. Words that the training texts lack do not count.

    Args:
      train: The training texts with their labels.
      pseudo: The number that is added to the counts of each word.
    """
    words = CountVectorizer(binary=True, ngram_range=(1, 2), token_pattern=r"\S+")
    return make_pipeline(words, MultinomialNB(alpha=pseudo)).fit(*train).predict


CLASSIFIERS: dict[str, tuple[Callable[[Examples, Any], Predict], tuple]] = {
    "ridge": (ridge, PENALTIES),
    "nearest": (nearest, NEIGHBOURS),
    "bag of words": (bag_of_words, PSEUDO_COUNTS),
}


def accuracy(train: Examples, test: Examples, method: str) -> tuple[float, float, float]:
    """Return the accuracy on the test examples, that on validation examples, and what was chosen by it.

    Args:
      train: The training examples; a share of them is for validation.
      test: The test examples.
      method: A key of `CLASSIFIERS`.
    """
    make, choices = CLASSIFIERS[method]
    kept, held = validation.positions(train.y, VALIDATION)
    part, rest = (Examples(train.x[at], train.y[at]) for at in (kept, held))
    scores = {choice: float((make(part, choice)(rest.x) == rest.y).mean()) for choice in choices}
    best = max(scores, key=scores.__getitem__)
    return float((make(train, best)(test.x) == test.y).mean()), scores[best], best


# ---- text ----


def ngram_loss(train: Int[np.ndarray, " n"], test: Int[np.ndarray, " m"], order: int, vocabulary: int) -> float:
    """Return the mean loss, in nats a token, of a table of n-grams with back-off by Witten and Bell's method.

    The probability of token t after a context of n - 1 tokens is ``(c(t) + d q(t)) / (c + d)``. Here c counts the
    context, c(t) counts t after it, d is the number of different tokens after it, and q is the probability of t after
    the context without its first token. If the training text lacks the context, the probability is q. The q of the
    empty context is the same for all tokens.

    Args:
      train: The tokens that are counted.
      test: The tokens that are predicted.
      order: n.
      vocabulary: The number of different tokens.
    """
    probability = np.full(len(test), 1 / vocabulary)
    seen, wanted = np.zeros(len(train), np.int64), np.zeros(len(test), np.int64)  # contexts by number; -1: not known
    for length in range(1, order + 1):
        skip = length - 1  # the first tokens have no context of this length
        codes, places, counts = np.unique(
            seen[skip:] * vocabulary + train[skip:].astype(np.int64), return_inverse=True, return_counts=True
        )
        contexts = int(seen.max()) + 1
        different = np.bincount(codes // vocabulary, minlength=contexts)
        total = np.bincount(codes // vocabulary, counts, contexts)
        asked = wanted[skip:] * vocabulary + test[skip:].astype(np.int64)
        at = np.minimum(np.searchsorted(codes, asked), len(codes) - 1)
        known = wanted[skip:] >= 0
        found = known & (codes[at] == asked)
        context = np.where(known, wanted[skip:], 0)
        count, d, c = np.where(found, counts[at], 0), different[context], total[context]
        lower = probability[skip:]
        usable = known & (c > 0)
        probability[skip:] = np.where(usable, (count + d * lower) / np.where(usable, c + d, 1), lower)
        # the context of the next token is the n-gram that ends here
        seen = np.concatenate([np.zeros(length, np.int64), places[:-1]])
        wanted = np.concatenate([np.full(length, -1, np.int64), np.where(found, at, -1)[:-1]])
    return float(-np.log(probability).mean())


# ---- the study ----


def config(data: str, method: str) -> ConfigDict:
    """Return the fields that identify a case."""
    _, chosen = CLASSIFIERS.get(method, (None, ()))
    return ConfigDict({"data": data, "method": method, "chosen_from": chosen, "validation": VALIDATION})


def run(data: str, method: str) -> tuple[dict[str, list], list[str]]:
    """Return the score of a method on the test data, and the notes on the data."""
    if data in ("books", "books_start"):
        found = text.load(**BOOKS)
        test = found.test if data == "books" else found.test[:START]
        loss = ngram_loss(found.train, test, int(method.partition("-")[0]), found.vocabulary)
        return {"loss": [float(f"{loss:.5g}")]}, [found.note] if found.note else []
    if data == "sst2":
        found = labelled.load("sst2_train", test="sst2_dev")
        pairs = [([one.text for one in part], [one.label for one in part]) for part in (found.train, found.test)]
        train, test = (Examples(np.array(texts, object), np.array(labels)) for texts, labels in pairs)
    else:
        found = images.load(data)
        pairs = (found.train, found.test)
        train, test = (Examples(x.reshape(len(x), -1).astype(np.float32) / 255, y) for x, y in pairs)
    rows = zip(("accuracy", "validation_accuracy", "chosen"), accuracy(train, test, method), strict=True)
    return {name: [float(f"{value:.5g}")] for name, value in rows}, [found.note] if found.note else []


_NAMES = {
    "fashion_mnist": "Fashion-MNIST",
    "cifar10": "CIFAR-10, a lossy JPEG copy",
    "sst2": "SST-2",
    "books": "books, bytes",
    "books_start": "the first 262,145 bytes of the test books",
}
_CHOSEN = {"ridge": "penalty {:g}", "nearest": "k = {:.0f}", "bag of words": "pseudo-count {:g}"}
_METHODS = {
    "ridge": "ridge regression",
    "nearest": "k nearest neighbours",
    "bag of words": "naive Bayes on words and pairs of words",
}


def figure(lines: list[dict]) -> tuple[str, dict[str, str]]:
    """Return a table, and no pictures."""
    rows = [["data", "method", "test", "chosen on validation data"]]
    for line in lines:
        data, method = line["case"]["data"], line["case"]["method"]
        found = line["rows"]
        score = f"{found['loss'][0]:.3f} nats a byte" if "loss" in found else f"{100 * found['accuracy'][0]:.1f} %"
        chosen = _CHOSEN[method].format(found["chosen"][0]) if "chosen" in found else ""
        rows.append([_NAMES[data], _METHODS.get(method, method), score, chosen])
    return markdown_table(rows), {}
