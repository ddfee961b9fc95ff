"""The runs of a sweep: what each changes, its name, and its directory."""

import contextlib
import hashlib
import re
import shlex
from pathlib import Path
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from experiments.errors import Mistake
from experiments.training import digest
from experiments.training.digest import Identity

EXAMPLE = "[{'seed': 0}, {'seed': 1, 'sparsity.blocks': 'dense'}]"


class Member(NamedTuple):
    """One run of a sweep."""

    name: str  # says in full what this run changes
    folder: str  # its directory, a name that needs no quotes in a shell
    changes: dict[str, Any]
    config: ConfigDict
    identity: Identity


def listed(config: ConfigDict, changes: list[dict[str, Any]]) -> list[Member]:
    """Return the runs of a list of changes. Each is named by the fields that are not the same in all of them.

    The same list gives the same names and the same folders, so that a sweep that is started again finds its runs.

    Args:
      config: The settings of the config file.
      changes: For each run the fields that it changes, by dotted names.

    Raises:
      Mistake: If the list is of another kind, if a change does not fit its field, or if two runs have one name.
    """
    if not isinstance(changes, list) or not changes or not all(isinstance(c, dict) for c in changes):
        raise Mistake(f"get_sweep() has to return a list of changes, such as {EXAMPLE}.")
    fields = dict.fromkeys(field for change in changes for field in change)
    varied = [field for field in fields if len({repr(change.get(field)) for change in changes}) > 1]
    named_by = varied or list(fields)[:1]
    runs = [_member(config, change, named_by) for change in changes]
    names = [member.name for member in runs]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise Mistake(f"get_sweep() has two runs named {twice[0]}. Every run has to differ from the others.")
    taken: set[str] = set()
    for number, member in enumerate(runs):
        folder = member.folder
        if folder.lower() in taken:  # in lower case, because some file systems ignore case
            folder = f"{folder}-{_digest(member.name)}"
        taken.add(folder.lower())
        runs[number] = member._replace(folder=folder)
    return runs


def _member(config: ConfigDict, change: dict[str, Any], named_by: list[str]) -> Member:
    changed = config.copy_and_resolve_references()
    for field, value in change.items():
        _set(changed, field, value)
    check_seed(changed)
    last = [field.rpartition(".")[2] for field in named_by]
    short = {field: end if last.count(end) == 1 else field for field, end in zip(named_by, last, strict=True)}
    name = ",".join(f"{short[field]}={change[field]}" for field in named_by if field in change) or "run"
    return Member(name, folder(name), change, changed.lock(), digest.identity(changed))


def check_seed(config: ConfigDict) -> None:
    """Refuse a seed that no key can be made of."""
    if not 0 <= config.seed < 2**32:
        raise Mistake(f"config.seed={config.seed} is not from 0 to 4,294,967,295.")


def folder(name: str) -> str:
    """Return a name of a directory that needs no quotes in a shell: letters, digits and ``._=+-``.

    >>> folder("blocks=mdgf(2,4,linear(1,0,30%)); dw_g=mvue(2,4),seed=0")
    'blocks=mdgf-2-4-linear-1-0-30pct-dw_g=mvue-2-4-seed=0'
    """
    plain = re.sub(r"[^\w.=+-]+", "-", name.replace("%", "pct"), flags=re.ASCII).strip("-.") or "run"
    return plain if len(plain) <= 120 else f"{plain[:110]}-{_digest(name)}"


def _digest(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:6]


def _set(config: ConfigDict, field: str, value: Any) -> None:
    try:
        with config.unlocked():
            config.update_from_flattened_dict({field: value})
    except (TypeError, KeyError) as error:
        raise Mistake(f"get_sweep(): {field}={value!r}: {' '.join(str(error).split())}") from error


def at(runs: list[Member], index: int) -> Member:
    """Return the run of an index, and refuse an index that the sweep does not have."""
    if not 0 <= index < len(runs):
        raise Mistake(f"--sweep_index={index}: the sweep has {len(runs)} runs, from 0 to {len(runs) - 1}.")
    return runs[index]


def refuse_other_names(runs: list[Member], workdir: Path) -> None:
    """Refuse a directory that holds a run of the sweep in a folder of another name, because the sweep got a field."""
    folders = {member.folder for member in runs}
    wanted = {member.identity.digest: member.folder for member in runs if not (workdir / member.folder).exists()}
    moves = []
    for path in sorted(workdir.glob("*/config.json")) if wanted else []:
        with contextlib.suppress(Mistake):  # it is damaged
            new = wanted.get(digest.recorded(path.parent).digest)
            if new and path.parent.name not in folders:
                moves.append(shlex.join(["mv", str(path.parent), str(workdir / new)]))
    if moves:
        raise Mistake(
            "Some runs of this sweep are in folders with other names. The sweep would train them again. "
            f"Rename the folders:\n{chr(10).join(moves)}\nOr write another --workdir."
        )
