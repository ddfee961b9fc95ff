"""Paths of layers that differ only in numbers, as one short text or one regular expression."""

import math
import re
from collections.abc import Hashable, Iterable, Sequence
from typing import TypeVar

Item = TypeVar("Item")


def alike(items: Iterable[tuple[str, Hashable, Item]]) -> list[list[Item]]:
    """Return the items of (path, key, item) in groups whose keys are equal and whose paths differ in numbers only.

    >>> alike([("blocks/0/up", 4, "a"), ("head", 4, "b"), ("blocks/1/up", 4, "c"), ("blocks/2/up", 8, "d")])
    [['a', 'c'], ['b'], ['d']]
    """
    groups: dict[tuple[Hashable, ...], list[Item]] = {}
    for path, key, item in items:
        groups.setdefault((*re.split(r"\d+", path), key), []).append(item)
    return list(groups.values())


def short(paths: Sequence[str]) -> str:
    """Return paths that differ in numbers only as one text.

    >>> short(["blocks/0/up", "blocks/1/up", "blocks/3/up"])
    'blocks/0-1,3/up'
    """
    parts = [re.split(r"(\d+)", path) for path in paths]
    texts_at = [list(dict.fromkeys(texts)) for texts in zip(*parts, strict=True)]
    if math.prod(map(len, texts_at)) == len(paths):
        return "".join(texts[0] if len(texts) == 1 else _numbers(texts) for texts in texts_at) or "(the model)"
    at = next(i for i, texts in enumerate(texts_at) if len(texts) > 1)
    return ", ".join(short([path for path, p in zip(paths, parts, strict=True) if p[at] == n]) for n in texts_at[at])


def gathered(paths: Iterable[str]) -> list[str]:
    """Return paths that differ in their last name as one.

    >>> gathered(["mlp/up", "mlp/down", "head"])
    ['mlp/(up|down)', 'head']
    """
    last_names: dict[str, list[str]] = {}
    for path in paths:
        front, slash, last = path.rpartition("/")
        last_names.setdefault(front + slash, []).append(last)
    return [front + (names[0] if len(names) == 1 else f"({'|'.join(names)})") for front, names in last_names.items()]


def patterns(paths: Sequence[str], others: Iterable[str]) -> list[str]:
    """Return regular expressions that match paths, which differ in numbers only, and match no other layer.

    Args:
      paths: The paths.
      others: The paths of the other layers of the model.

    >>> patterns(["blocks/0/up", "blocks/1/up"], ["head"])
    ['blocks/\\\\d+/up']
    >>> patterns(["blocks/0/up", "blocks/1/up"], ["blocks/2/up"])
    ['blocks/0/up', 'blocks/1/up']
    """
    exact = [re.escape(path) for path in paths]
    if len(paths) > 1:
        whole = re.sub(r"\d+", r"\\d+", exact[0])
        if not any(re.fullmatch(whole, other) for other in others):
            return [whole]
    return exact


def _numbers(numbers: list[str]) -> str:
    """Return numbers as ranges: 0, 1, 2, 5 as 0-2,5."""
    runs: list[list[str]] = []
    for n in sorted(numbers, key=int):
        if runs and int(n) == int(runs[-1][-1]) + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    return ",".join(run[0] if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
