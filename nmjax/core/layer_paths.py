"""Paths of layers that differ only in numbers, as one short text or one regular expression."""

import math
import re
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, TypeVar

Item = TypeVar("Item")


def by_number(path: str) -> list[Any]:
    """Return the key that sorts paths with their numbers by value.

    >>> sorted(["blocks/10/up", "blocks/9/up", "blocks/head"], key=by_number)
    ['blocks/9/up', 'blocks/10/up', 'blocks/head']
    """
    return [int(s) if s.isdigit() else s for s in re.split(r"(\d+)", path)]


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


def folded(reasons: Iterable[tuple[str, str]]) -> list[str]:
    """Join pairs (path, reason) into few lines. Reasons that differ only in numbers share a line with the first.

    >>> folded([("up/0", "3 values do not fit"), ("up/1", "3 values do not fit"), ("head", "5 values do not fit")])
    ['up/0-1: 3 values do not fit Likewise in another layer: head.']
    """
    kinds: dict[str, list[tuple[str, str]]] = {}
    for path, reason in reasons:
        kinds.setdefault(re.sub(r"\d+((, | x )\d+)*,?", "0", reason), []).append((path, reason))
    lines: list[str] = []
    for same in kinds.values():
        first = alike((path, None, path) for path, reason in same if reason == same[0][1])[0]
        rest = [path for path, _ in same if path not in first]
        line = f"{short(first)}: {same[0][1]}"
        if rest:
            count = f"{len(rest)} other layers" if len(rest) > 1 else "another layer"
            line += f" Likewise in {count}: {', '.join(gathered(map(short, alike((p, None, p) for p in rest))))}."
        lines.append(line)
    return lines


def patterns(paths: Iterable[str], others: Iterable[str]) -> list[str]:
    """Return few regular expressions that match all of these paths, and no other layer.

    Args:
      paths: The paths.
      others: The paths of the other layers of the model.

    >>> patterns(["blocks/0/up", "blocks/1/up", "blocks/0/down", "blocks/1/down"], ["head"])
    ['blocks/\\\\d+/(up|down)']
    >>> patterns(["blocks/0/up", "blocks/2/up"], ["blocks/1/up"])
    ['blocks/(0|2)/up']
    """
    paths, others = list(dict.fromkeys(paths)), list(others)
    found: list[str] = []
    for same in alike((path, None, path) for path in paths):
        found += _of_alike([re.split(r"(\d+)", path) for path in same], others)
    merged = gathered(found)
    wrong = lambda pattern: any(re.fullmatch(pattern, other) for other in others)
    return found if any(map(wrong, merged)) else merged


def _of_alike(parts: list[list[str]], others: list[str]) -> list[str]:
    """Return regular expressions for paths that differ only in numbers, which stand at the odd places."""
    known = {"".join(path) for path in parts}
    for any_number in (True, False):
        texts: list[str] = []
        for names in zip(*parts, strict=True):
            different = list(dict.fromkeys(names))
            if len(different) == 1:
                texts.append(re.escape(different[0]))
            else:
                texts.append(r"\d+" if any_number else f"({'|'.join(different)})")
        whole = "".join(texts)
        if not any(re.fullmatch(whole, other) for other in others if other not in known):
            return [whole]
    at = next(place for place, names in enumerate(zip(*parts, strict=True)) if len(set(names)) > 1)
    numbers = dict.fromkeys(path[at] for path in parts)
    return [one for n in numbers for one in _of_alike([path for path in parts if path[at] == n], others)]


def _numbers(numbers: list[str]) -> str:
    """Return numbers as ranges: 0, 1, 2, 5 as 0-2,5."""
    runs: list[list[str]] = []
    for n in sorted(numbers, key=int):
        if runs and int(n) == int(runs[-1][-1]) + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    return ",".join(run[0] if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
