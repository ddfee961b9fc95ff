"""Names of objects in other packages: ``module:name``, such as ``mylab.pruners:above``.

A text or a config may name a pruner, a schedule, a method, a model, a data set or a task that is not part of nmjax.
"""

import difflib
import importlib
import re
import traceback
from typing import Any

_WORD = r"[^\W\d]\w*+"  # the possessive "+" and the lookbehind let one pass search a long text
PATTERN = rf"(?<![\w.]){_WORD}(?:\.{_WORD})*+:{_WORD}"

STRING = r"'(?:\\.|[^'\\])*'|\"(?:\\.|[^\"\\])*\""
TOKEN = re.compile(rf"{STRING}|(?P<name>{PATTERN})")


def foreign_names(text: str) -> list[str]:
    """Return every ``module:name`` in a text, without importing anything.

    >>> foreign_names("s_ste(2,4); dw_g=chain(mylab:above(0.5,4),fp8('e5m2'))")
    ['mylab:above']
    """
    return [match["name"] for match in TOKEN.finditer(text) if match["name"]]


def is_foreign(name: str) -> bool:
    """Return True if a name has the form ``module:name``.

    >>> is_foreign("mylab.pruners:above"), is_foreign("mse"), is_foreign("2:4")
    (True, False, False)
    """
    return re.fullmatch(PATTERN, name) is not None


def load(name: str) -> Any:
    """Import the module of ``module:name`` and return the object of that name.

    Args:
      name: A module on Python's path, a colon, and a name at the top level of the module.

    Returns:
      A class, a function or a value.

    Raises:
      ValueError: The name is not of this form, the module cannot be imported, or it has no such name.

    >>> load("math:sqrt")(4)
    2.0
    """
    if not is_foreign(name):
        raise ValueError(f"{name!r} is not of the form module:name, as in mylab.pruners:above.")
    path, _, attribute = name.partition(":")
    module = _module(path)
    if not hasattr(module, attribute):
        public = [n for n in dir(module) if not n.startswith("_")]
        near = difflib.get_close_matches(attribute, public, 1, 0.5)
        hint = f" Did you mean {path}:{near[0]}?" if near else ""
        file = getattr(module, "__file__", None) or "a module of Python"
        raise ValueError(f"{name}: the module {path} ({file}) has no name {attribute!r}.{hint}")
    return getattr(module, attribute)


def _module(path: str) -> Any:
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if path == missing or path.startswith(f"{missing}."):
            raise ValueError(
                f"there is no module {missing!r}. Start in the folder that holds it, add that folder to PYTHONPATH, or "
                "install it."
            ) from error
        raise ValueError(
            f"the module {path} cannot be imported, because it needs {missing!r}, which is missing."
        ) from error
    except Exception as error:  # a module is a program of its own, so it may raise anything
        frames = traceback.extract_tb(error.__traceback__)
        place = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(f"the module {path} cannot be imported: {reason}{place}.") from error
