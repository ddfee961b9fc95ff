"""The command line: flags, a page of settings and changes to it; and what is wrong with them, in one line."""

import contextlib
import difflib
import gc
import importlib.util
import json
import os
import shlex
import sys
import time
import traceback
from pathlib import Path
from typing import NamedTuple

from absl import flags
from ml_collections import ConfigDict, config_flags

from experiments import sweep
from experiments.errors import Mistake
from experiments.scale import processes, sinks
from experiments.training import digest, provenance

ROOT = Path(__file__).parent.parent


def main(argv: list[str], usage: str) -> None:
    """Read the command, and run it."""
    if {"-h", "--help", "-help"} & set(argv):
        print(f"{usage.strip()}\n\nconfigs:\n{listing()}")
        return
    asked = read(argv)
    with processes.joined(asked.distributed):
        carry_out(asked, shlex.join(["python", *argv]))


def carry_out(asked: "Asked", words: str) -> None:
    """What a command line asks for; ``words`` are the line."""
    config, mode = asked.config, asked.mode
    if mode == "eval" and not asked.workdir:
        raise Mistake("--mode=eval wants --workdir, the directory of a run.")
    sweeping = asked.sweep or asked.index is not None
    planned = mode == "plan" and asked.index is not None
    if sweeping and (mode != "train" and not planned or asked.origin):
        raise Mistake("--sweep trains: it goes without --from, and without --mode but for --sweep_index=N --mode=plan.")
    if asked.sink:
        if mode != "train":
            raise Mistake(f"--sink is sent what a run writes while it trains: it goes without --mode={mode}.")
        sinks.check(asked.sink)
    if asked.at_once < 1 or asked.at_once > 1 and (not asked.sweep or asked.index is not None):
        raise Mistake(f"--seeds_at_once={asked.at_once}: at least 1, and more of a --sweep that has no --sweep_index.")
    if asked.at_once > 1 and processes.count() > 1:
        raise Mistake(f"--seeds_at_once={asked.at_once} is for one process: it goes without --distributed.")
    results = Path(asked.results) if asked.results else None
    if results and (not sweeping or planned or not results.parent.is_dir() or results.is_dir()):
        raise Mistake(f"--results={asked.results} is a file, in a folder that is there, for the runs of a --sweep.")
    place = f"{asked.name}-sweep" if sweeping else f"{asked.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    if processes.count() > 1:
        own = digest.identity(config).fields | asked.alike() | provenance.versions()
        processes.same(own | {"git": provenance.git()})
    workdir = Path(processes.agreed(lambda: asked.workdir or f"runs/{place}"))
    if not 0 <= config.seed < 2**32:
        raise Mistake(f"config.seed={config.seed} is not from 0 to 4,294,967,295.")
    try:
        import jax

        from experiments.training import modes, tasks  # with all of JAX, which a mistake above does without
    except ModuleNotFoundError as error:
        raise Mistake(f"the package {error.name} is missing: pip install -r requirements.txt.") from error

    gc.freeze()  # what is imported stays, and need not be looked through while programs are traced
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:  # or it is jax's own affair; "" is none
        jax.config.update("jax_compilation_cache_dir", str(cache()))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    if planned:
        config = sweep.at(sweep.members(config, asked.changes()), asked.index).config
    if not sweeping or planned:
        origin, alone = Path(asked.origin) if asked.origin else None, modes.Run(asked.name, config, workdir)
        modes.carry_out(mode, [alone], tasks.task(config), words, origin, sink=asked.sink)
        return

    def side_by_side(members, program):
        runs = [modes.Run(member.name, member.config, workdir / member.name) for member in members]
        return modes.carry_out("train", runs, program.task, words, program=program, sink=asked.sink)

    make = lambda member: modes.Program(member.config, tasks.task(member.config))
    sweep.run(sweep.members(config, asked.changes()), workdir, asked.index, asked.at_once, make, side_by_side, results)


class Asked(NamedTuple):
    """What a command line asks for."""

    config: ConfigDict
    page: str
    workdir: str
    mode: str
    origin: str  # the run to begin with
    distributed: str
    sweep: bool
    index: int | None
    at_once: int  # runs of a sweep that differ in their seed alone
    sink: str  # what a run's numbers are sent to beside its files
    results: str  # a file that is given a line for every run of a sweep that is finished, or has diverged

    @property
    def name(self) -> str:
        """Of the page and its variant."""
        file, *variant = self.page.split(":", 1)
        return Path(file).stem + "".join(f"_{part}" for part in variant if part)

    def alike(self) -> dict:
        """What all processes of a run are asked for."""
        return {
            "--config": self.page,
            **{f"--{name}": getattr(self, name) for name in ("workdir", "mode", "sweep", "sink", "results")},
        } | {
            "--from": self.origin,
            "--sweep_index": self.index,
        }

    def changes(self) -> list[dict]:
        """The runs of the page's sweep."""
        file, _, variant = self.page.partition(":")
        module = _module(file)
        if not hasattr(module, "get_sweep"):
            raise Mistake(f"--sweep: {file} has no function get_sweep(), which gives the changes of every run.")
        with _its_own(file):
            found = module.get_sweep(variant) if variant else module.get_sweep()
        for change in found if isinstance(found, list) else ():
            for field in change:
                _exists(self.config, field)
        return found


def cache() -> Path:
    """Where compiled programs are kept, so that the next start is quick."""
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "nmjax" / "compiled"


def read(argv: list[str]) -> Asked:
    """The words of a command line."""
    words, page = [], None
    for i, word in enumerate(argv):
        if word.startswith("--config="):
            page = word.removeprefix("--config=")
        elif word == "--config" and i + 1 < len(argv):
            page = argv[i + 1]
        elif i == 0 or argv[i - 1] != "--config":
            words.append(word)
    own = next((w.removeprefix("--workdir=") for w in words if w.startswith("--workdir=")), "")
    if not page and "--mode=eval" in words and (Path(own) / "config.json").is_file():
        config, page = ConfigDict(json.loads((Path(own) / "config.json").read_text())), Path(own).name
    elif page:
        config = load(page)
    else:
        raise Mistake(f"--config=PAGE is missing: one of {', '.join(pages())}.")
    for word in words[1:]:
        if word.startswith("--config."):
            _exists(config, word.removeprefix("--config.").partition("=")[0])
    values = flags.FlagValues()
    flags.DEFINE_string("workdir", "", "the run's directory", flag_values=values)
    flags.DEFINE_string("from", "", "a run whose last state this one begins with", flag_values=values)
    flags.DEFINE_enum("mode", "train", ["train", "eval", "plan"], "what to do", flag_values=values)
    flags.DEFINE_string("distributed", "", "auto, off or HOST:PORT,N,I", flag_values=values)
    flags.DEFINE_boolean("sweep", False, "all runs of the page's get_sweep()", flag_values=values)
    flags.DEFINE_integer("sweep_index", None, "one of them", flag_values=values)
    flags.DEFINE_integer("seeds_at_once", 1, "runs trained side by side", flag_values=values)
    flags.DEFINE_string("results", "", "a file that is given the results of a sweep", flag_values=values)
    flags.DEFINE_enum("sink", None, list(sinks.SINKS), "what numbers are sent to beside files", flag_values=values)
    before, sys.argv = sys.argv, words  # where config_flags looks for changes
    try:
        config_flags.DEFINE_config_dict("config", config, flag_values=values)
        rest = values(words)
    except (flags.Error, TypeError, ValueError) as error:
        raise Mistake(" ".join(str(error).split()) + ".") from error
    finally:
        sys.argv = before
    if rest[1:]:
        raise Mistake(f"{rest[1]!r} is no flag: settings are --config.FIELD=VALUE.")
    origin, sink = values["from"].value, values.sink or ""
    where = (values.workdir, values.mode, origin, values.distributed)
    how = (values.sweep, values.sweep_index, values.seeds_at_once)
    return Asked(config, page, *where, *how, sink, values.results)


def load(page: str) -> ConfigDict:
    """The settings of a page, FILE or FILE:VARIANT."""
    file, _, variant = page.partition(":")
    if not Path(file).is_file():
        near = difflib.get_close_matches(file, pages(), 1, 0.4)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise Mistake(f"--config={page}: there is no file {file}.{hint} There are {', '.join(pages())}.")
    if not file.endswith(".py"):
        raise Mistake(f"--config={page}: a page of settings is a .py file. There are {', '.join(pages())}.")
    module = _module(file)
    if not hasattr(module, "get_config"):
        raise Mistake(f"{file} is no page of settings: it has no function get_config(variant='').")
    with _its_own(file):
        return module.get_config(variant) if variant else module.get_config()


def _module(file: str):
    spec = importlib.util.spec_from_file_location("page", file)
    module = importlib.util.module_from_spec(spec)
    with _its_own(file):
        spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def _its_own(file: str):
    """What is wrong in a page, and where."""
    try:
        yield
    except Mistake:
        raise
    except Exception as error:  # a page is a person's own program: whatever is wrong in it, say where
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename.endswith(file)]
        where = f"{file}, line {lines[-1]}" if lines else file
        raise Mistake(f"{where}: {type(error).__name__}: {' '.join(str(error).split())}") from error


def _exists(config: ConfigDict, field: str) -> None:
    """Refuse a change to what the page does not have."""
    here, known = config, "config"
    for part in field.split("."):
        if not isinstance(here, ConfigDict):
            raise Mistake(f"--config.{field}: {known} is {here!r}, and has no fields.")
        if part not in here:
            near = difflib.get_close_matches(part, here.keys(), 1, 0.5)
            hint = f" Did you mean {known}.{near[0]}?" if near else ""
            raise Mistake(f"--config.{field}: {known} has no field {part!r}.{hint} It has {', '.join(here.keys())}.")
        here, known = here[part], f"{known}.{part}"


def pages() -> list[str]:
    return sorted(f"configs/{p.name}" for p in (ROOT / "configs").glob("*.py") if p.stem not in ("common", "__init__"))


def listing() -> str:
    """Every page with the first sentence of what it says of itself."""
    rows = []
    for page in pages():
        said = (ROOT / page).read_text().split('"""')[1].strip().partition("\n")[0]
        rows.append(f"  {page:<32}{said}")
    return "\n".join(rows)
