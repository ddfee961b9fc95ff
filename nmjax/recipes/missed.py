"""Parameters that a rule matches, outside registered layers."""

import warnings
from typing import NamedTuple

from nmjax.core import layer_paths


class Missed(NamedTuple):
    """A parameter that a rule matches, outside registered layers.

    Attributes:
      path: Its path.
      shape: Its shape.
      kind: The name of the class of the module that holds it.
    """

    path: str
    shape: tuple[int, ...]
    kind: str


def report(missed: list[Missed], register: str, paths: list[str], strict: bool, stacklevel: int) -> None:
    """Warn of parameters that a rule matches and no registered layer has, or refuse them.

    Args:
      missed: These parameters.
      register: The function that registers a layer, such as "nm.nnx.register_layer".
      paths: The paths of the registered layers.
      strict: True to raise an error.
      stacklevel: As in `warnings.warn`, for the caller of this function.

    Raises:
      ValueError: There are such parameters, and ``strict`` is True.
    """
    if not missed:
        return
    weight = missed[0].path.rpartition("/")[2]
    lead = "Rules of the recipe match these parameters, but no registered layer has them, so they stay dense:"
    why = (
        f'If a layer multiplies by such a parameter, register it: {register}({missed[0].kind}, weight="{weight}"). A '
        "parameter that is used elsewhere too, as the table of a tied head is, stays dense."
    )
    tell(lead, missed, paths, why, strict, stacklevel + 1)


def tell(lead: str, missed: list[Missed], paths: list[str], why: str, strict: bool, stacklevel: int) -> None:
    """Warn of parameters or layers that a rule matches and that are not pruned, or refuse them.

    Args:
      lead: The first line.
      missed: The parameters or layers. Those that are alike share a line.
      paths: The paths that rules may match.
      why: The reason or the remedy.
      strict: True to raise an error.
      stacklevel: As in `warnings.warn`, for the caller of this function.
    """
    lines = [
        f"  {layer_paths.short([one.path for one in same])} {same[0].shape}, of {same[0].kind}"
        for same in layer_paths.alike((one.path, (one.shape, one.kind), one) for one in missed)
    ]
    gone = [one.path for one in missed]
    rules = [f'(r"{p}", "dense")' for p in layer_paths.patterns(gone, [p for p in paths if p not in gone])]
    remedy = f"If they are to stay dense, write rules that come before the others: {', '.join(rules)}."
    message = "\n".join([lead, *lines, why, remedy])
    if strict:
        raise ValueError(message)
    warnings.warn(message, stacklevel=stacklevel + 1)
