"""Data sets of other modules: ``config.data.name = "mylab.data:spirals"``."""

from pathlib import Path
from typing import TypeVar

from experiments.errors import Mistake, mistaken
from nmjax.core import names

Set = TypeVar("Set")


def load(name: str, dir: str | Path, kind: type[Set]) -> Set:
    """Return the data set that a function of another module gives.

    Args:
      name: ``module:name`` of the function, as in "mylab.data:spirals".
      dir: The one argument that the function is called with: ``config.data.dir``, which may be empty.
      kind: What the function has to return: `images.Images`, `text.Text` or `labelled.Labelled`.

    Raises:
      Mistake: The name cannot be imported, is no function, or returns something else.
    """
    with mistaken("config.data.name"):
        make = names.load(name)
    if not callable(make):
        raise Mistake(f"config.data.name={name!r} is a {type(make).__name__}, not a function of a folder.")
    data = make(str(dir))
    if not isinstance(data, kind):
        wanted = f"{kind.__module__}.{kind.__name__}({', '.join(kind.__annotations__)})"
        raise Mistake(f"config.data.name={name!r} returns a {type(data).__name__}, not {wanted}.")
    return data
