"""Config files: Python files with a function get_config(). Their mistakes are reported in one line."""

import contextlib
import importlib.util
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from ml_collections import ConfigDict

from experiments.errors import Mistake, meant

ROOT = Path(__file__).parent.parent


def importable(folder: Path) -> None:
    """Let ``module:name`` name the modules of a folder. Installed modules and this repository's come first."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def load(config_file: str) -> ConfigDict:
    """Return the settings of a config file, FILE or FILE:VARIANT. Afterwards the modules beside it can be imported."""
    file, variant = split(config_file)
    if not Path(file).is_file():
        hint = meant(file, names(), "{}") or " --help lists the config files."
        raise Mistake(f"--config={config_file}: there is no file {file}.{hint}")
    if not file.endswith(".py"):
        raise Mistake(f"--config={config_file}: a config file is a .py file. --help lists those of the repository.")
    importable(Path(file).parent.resolve())
    module = _module(file)
    if not hasattr(module, "get_config"):
        raise Mistake(f"{file} is not a config file: it has no function get_config(variant='').")
    with _its_own(file):
        return module.get_config(variant) if variant else module.get_config()


def sweep(config_file: str) -> list[dict]:
    """Return what the runs of a config file's sweep change."""
    file, variant = split(config_file)
    module = _module(file)
    if not hasattr(module, "get_sweep"):
        raise Mistake(f"--sweep: {file} has no function get_sweep(), which gives the changes of every run.")
    with _its_own(file):
        return module.get_sweep(variant) if variant else module.get_sweep()


def split(config_file: str) -> tuple[str, str]:
    """Return the path and the variant of a config file. A path that is not found may be one of this repository."""
    file, _, variant = config_file.partition(":")
    if not Path(file).is_file() and (ROOT / file).is_file():
        file = str(ROOT / file)
    return file, variant


def _module(file: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location("config_file", file)
    module = importlib.util.module_from_spec(spec)
    with _its_own(file):
        spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def _its_own(file: str) -> Iterator[None]:
    """Turn an error in a config file into a `Mistake` with the line of the file."""
    try:
        yield
    except Mistake:
        raise
    except Exception as error:  # a config file is a program of its own, so it may raise anything
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename.endswith(file)]
        where = f"{file}, line {lines[-1]}" if lines else file
        raise Mistake(f"{where}: {type(error).__name__}: {' '.join(str(error).split())}") from error


def names() -> list[str]:
    """Return the paths of this repository's config files."""
    return sorted(f"configs/{p.name}" for p in (ROOT / "configs").glob("*.py") if p.stem not in ("common", "__init__"))


def summaries() -> dict[str, str]:
    """Return the first line of the docstring of every config file."""
    return {name: (ROOT / name).read_text().split('"""')[1].strip().partition("\n")[0] for name in names()}
