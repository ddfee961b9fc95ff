"""Texts with labels: JSON lines, or docstrings of Python's standard library; and their tokens."""

import ast
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.data import others, reading, text, validation
from experiments.data.find import find
from experiments.errors import Mistake, mistaken
from experiments.files import of_json
from nmjax.core import names
from nmjax.oneshot import texts

_MODULES = ("asyncio", "email", "http", "importlib", "logging", "multiprocessing", "unittest", "urllib", "xml")
_TEST = 0.1  # share of the examples that is for the test, if there is no file for it


class Example(NamedTuple):
    """A text, or a pair of texts, and its label."""

    text: str
    text_b: str | None
    label: int


class Labelled(NamedTuple):
    """Texts with labels.

    Write a function that returns one to train on data of your own, in any module::

        # mylab/data.py                         config.data.name = "mylab.data:reviews"
        def reviews(dir):                       # dir is config.data.dir, which may be empty
            train, test = [Example("fine", None, 1), ...], [Example("poor", None, 0), ...]
            return Labelled("reviews", train, test, ("bad", "good"))

    Attributes:
      name: The name of the data, as the header of a run shows it.
      train: The examples for training.
      test: The examples for the test.
      classes: The names of the labels, in the order of their numbers.
      note: A sentence to show beside the numbers, or "".
    """

    name: str
    train: Sequence[Example]
    test: Sequence[Example]
    classes: tuple[str, ...]
    note: str = ""


class Tokens(NamedTuple):
    """The tokens of texts as arrays of one length.

    Attributes:
      tokens: int32 (n, length), filled with 0 after the last token.
      second: The place where the second text begins, int32 (n,); ``length`` if there is none.
      size: The number of tokens, int32 (n,).
      labels: int32 (n,).
    """

    tokens: np.ndarray
    second: np.ndarray
    size: np.ndarray
    labels: np.ndarray


# ---- texts ----


def load(name: str, dir: str | Path = "", test: str = "") -> Labelled:
    """Return texts with labels.

    Args:
      name: One of these, or ``module:name`` of a function that takes ``dir`` and returns a `Labelled`:

        - ``docstrings``: docstrings of nine packages of Python's standard library. The label is the package.
        - a file .jsonl or .jsonl.gz: a JSON object in each line, with "text", "label", and perhaps "text_b". Labels are
          whole numbers from 0 on, or names.
      dir: The folder that is searched first. `find` lists the others.
      test: The file for the test; "" means a tenth of the examples.

    Raises:
      Mistake: The data are missing or cannot be read.

    >>> data = load("docstrings")
    >>> len(data.classes), len(data.train) > 5 * len(data.test)
    (9, True)
    """
    if test and (names.is_foreign(name) or name == "docstrings"):
        raise Mistake(f"config.data.name={name!r} has its own test texts: leave config.data.test empty.")
    if names.is_foreign(name):
        return others.load(name, dir, Labelled)
    if name == "docstrings":
        return _divided(name, _docstrings(), _MODULES, f"docstrings of {text.PYTHON}")
    files = [_read(each, dir) for each in (name, test) if each]
    classes = _classes([label for rows in files for *_, label in rows], name)
    numbers = {label: number for number, label in enumerate(classes)}
    parts = [[Example(a, b, numbers[label]) for a, b, label in rows] for rows in files]
    shown = tuple(map(str, classes))
    return _divided(name, parts[0], shown, "") if len(parts) == 1 else Labelled(name, parts[0], parts[1], shown)


def _divided(name: str, examples: Sequence[Example], classes: tuple[str, ...], note: str) -> Labelled:
    """Return data with a tenth of the examples for the test. Each class gives its share."""
    train, test = validation.positions(np.array([one.label for one in examples]), _TEST)
    return Labelled(name, [examples[i] for i in train], [examples[i] for i in test], classes, note)


def _docstrings() -> list[Example]:
    """Return the first paragraphs of docstrings, if they have six words. "it" replaces the name of the package."""
    found = {}
    root = Path(sysconfig.get_path("stdlib"))
    for label, module in enumerate(_MODULES):
        for path in sorted((root / module).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                    text = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split()).replace(module, "it")
                    if len(text.split()) >= 6:
                        found.setdefault(text, label)
    if len(set(found.values())) < len(_MODULES):
        raise Mistake(f"{root} has no sources of Python's standard library. Write --config.data.name=FILE.jsonl.")
    return [Example(text, None, label) for text, label in found.items()]


def _read(name: str, dir: str | Path) -> list[tuple[str, str | None, Any]]:
    """Return the text, the second text and the label of each line of a file."""
    ends = ("",) if name.endswith((".jsonl", ".gz")) else ("", ".jsonl", ".jsonl.gz")
    path = find([f"{name}{end}" for end in ends], dir, how="Add --config.data.dir=DIR.")
    try:
        lines = reading.whole(path).decode().split("\n")
    except UnicodeDecodeError as error:
        raise Mistake(f"{path} cannot be read: {error}.") from None
    rows = [_row(f"{path}, line {number}", line) for number, line in enumerate(lines, 1) if line.strip()]
    if not rows:
        raise Mistake(f"{path} has no examples.")
    return rows


def _row(where: str, line: str) -> tuple[str, str | None, Any]:
    wanted = 'a JSON object with "text" and "label", and perhaps "text_b"'
    try:
        found = of_json(line)
    except ValueError as error:
        raise Mistake(f"{where}: this is not JSON ({error}). A line is {wanted}.") from error
    if not isinstance(found, dict):
        raise Mistake(f"{where}: this is {type(found).__name__}. A line is {wanted}.")
    missing = [name for name in ("text", "label") if name not in found]
    if missing:
        held = ", ".join(repr(name[:40]) for name in list(found)[:10]) or "nothing"
        verb = "is" if len(missing) == 1 else "are"
        raise Mistake(
            f"{where}: {' and '.join(map(repr, missing))} {verb} missing; the line has {held}. A line is {wanted}."
        )
    text, second, label = found["text"], found.get("text_b"), found["label"]
    if not isinstance(text, str) or not isinstance(second, str | None):
        raise Mistake(f"{where}: text and text_b are strings.")
    if isinstance(label, bool) or not isinstance(label, int | str):
        raise Mistake(f"{where}: a label is a whole number or a name, got {repr(label)[:40]}.")
    return text, second, label


def _classes(labels: Sequence[Any], name: str) -> list[Any]:
    """Return the labels in the order of their numbers."""
    kinds = {type(label) for label in labels}
    if len(kinds) > 1:
        raise Mistake(f"{name}: some labels are numbers and some are names. Write all of them in one way.")
    classes = sorted(set(labels))
    if kinds == {int} and classes != list(range(len(classes))):
        raise Mistake(f"{name}: labels that are numbers are 0, 1, ..., classes - 1; got {str(classes[:9])[:200]}.")
    if len(classes) < 2:
        raise Mistake(f"{name}: all labels are {repr(classes[0])[:40]}, so there is nothing to learn.")
    return classes


# ---- tokens ----


def tokenizer(path: Path) -> Any:
    """Return the tokenizer of a checkpoint: its ``tokenizer.json``.

    Args:
      path: The folder of the checkpoint.
    """
    with mistaken():
        return texts.tokenizer(path / "tokenizer.json")


def encode(words: Any, examples: Sequence[Example], length: int) -> Tokens:
    """Return the tokens of examples. Longer ones are cut to ``length``, the longer text of a pair first.

    Args:
      words: A tokenizer.
      examples: The examples.
      length: The greatest number of tokens. The arrays are as long as the longest example needs,
        rounded up to a multiple of 8, but not longer than ``length``.
    """
    words.enable_truncation(length, strategy="longest_first")
    pairs = [one.text if one.text_b is None else (one.text, one.text_b) for one in examples]
    with mistaken(), texts.failing("the tokenizer of the checkpoint cannot encode the examples"):
        encoded = words.encode_batch(pairs)
    size = np.array([len(one.ids) for one in encoded], np.int32)
    longest = min(length, -(-int(size.max(initial=1)) // 8) * 8)
    tokens = np.zeros((len(encoded), longest), np.int32)
    second = np.full(len(encoded), longest, np.int32)
    for row, one in enumerate(encoded):
        tokens[row, : len(one.ids)] = one.ids
        if 1 in one.type_ids:
            second[row] = one.type_ids.index(1)
    return Tokens(tokens, second, size, np.array([one.label for one in examples], np.int32))
