"""The search for data: in ``config.data.dir``, the current folder, ``$NMJAX_DATA`` and folders of the system."""

import os
from collections.abc import Iterable
from pathlib import Path

from experiments.errors import Missing, Mistake

ABSENT = "the data are missing; a plan does not need them"  # a note of tasks


def find(names: Iterable[str | Path], dir: str | Path = "", system: Iterable[str | Path] = (), how: str = "") -> Path:
    """Return the first file or folder that exists.

    The places are searched in this order: ``dir``, the current folder, ``$NMJAX_DATA``, the ``system`` folders. In each
    place the names are tried in their order.

    Args:
      names: Names of files or folders. An absolute name is taken as it is.
      dir: The value of ``--config.data.dir``, or "".
      system: Folders in which the system keeps data.
      how: A sentence that says how to get the data, for the error.

    Returns:
      The path.

    Raises:
      Missing: None exists, or ``dir`` or ``$NMJAX_DATA`` does not exist.
      Mistake: ``dir`` or ``$NMJAX_DATA`` is a file.
    """
    places: list[tuple[str, Path | None]] = []
    if dir:
        places.append((f"{dir} (--config.data.dir)", _folder(dir, "--config.data.dir")))
    places.append(("the current folder", Path()))
    if env := os.environ.get("NMJAX_DATA"):
        places.append((f"{env} ($NMJAX_DATA)", _folder(env, "$NMJAX_DATA")))
    else:
        places.append(("$NMJAX_DATA (not set)", None))
    places += [(str(folder), Path(folder)) for folder in system]
    names = [Path(name).expanduser() for name in names]
    for _, folder in places:
        for name in names if folder else ():
            if (folder / name).exists():
                return folder / name
    missing = f"no {names[0]}" if len(names) == 1 else f"none of {', '.join(map(str, names[:4]))}"
    searched = ", ".join(place for place, _ in places)
    raise Missing(f"found {missing}{', ...' * (len(names) > 4)} in {searched}." + (f" {how}" if how else ""))


def _folder(path: str | Path, setting: str) -> Path:
    folder = Path(path).expanduser()
    if not folder.is_dir():
        what, kind = ("is a file, not a folder", Mistake) if folder.exists() else ("does not exist", Missing)
        raise kind(f"{setting} is {str(path)!r}, which {what}. Give the folder that holds the data.")
    return folder
