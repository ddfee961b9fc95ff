"""Where a data set lies: in the folder asked for, else in ``$NMJAX_DATA``, else where the system keeps it."""

import os
from collections.abc import Iterable
from pathlib import Path

from experiments.errors import Mistake


def find(names: Iterable[str | Path], dir: str | Path = "", system: Iterable[str | Path] = (), how: str = "") -> Path:
    """The first of ``names``, files or folders, that is there.

    Looked for in ``dir``, which is ``--config.data.dir``, then in the working directory, in ``$NMJAX_DATA`` and in the
    ``system`` folders; the earlier place wins, and in it the earlier name. An absolute name is taken as it is. ``how``
    says how to get what is missing.
    """
    places: list[tuple[str, Path]] = []
    if dir:
        places.append((f"{dir} (--config.data.dir)", _folder(dir, "--config.data.dir")))
    places.append(("the working directory", Path()))
    if env := os.environ.get("NMJAX_DATA"):
        places.append((f"{env} ($NMJAX_DATA)", _folder(env, "$NMJAX_DATA")))
    places += [(str(folder), Path(folder)) for folder in system]
    names = [Path(name).expanduser() for name in names]
    for _, folder in places:
        for name in names:
            if (found := folder / name).exists():
                return found
    wanted = (
        f"no {names[0]}" if len(names) == 1 else f"none of {', '.join(map(str, names[:4]))}{', ...' * (len(names) > 4)}"
    )
    looked = ", ".join(place for place, _ in places) + ("" if env else "; $NMJAX_DATA, a folder of data, is not set")
    raise Mistake(f"found {wanted} in {looked}." + (f" {how}" if how else ""))


def _folder(path: str | Path, setting: str) -> Path:
    folder = Path(path).expanduser()
    if not folder.is_dir():
        what = "is a file, not a folder" if folder.exists() else "does not exist"
        raise Mistake(f"{setting} is {str(path)!r}, which {what}. Give the folder that holds the data.")
    return folder
