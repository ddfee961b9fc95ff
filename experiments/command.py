"""The command line: flags, a config file and changes to it. What is wrong with them is refused in one line."""

import contextlib
import gc
import itertools
import os
import re
import shlex
import sys
import time
from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import ConfigDict, config_flags

from experiments import config_files, members, sweep, usage
from experiments.errors import Mistake, Stopped, meant
from experiments.files import of_json, text
from experiments.scale import processes, trackers
from experiments.training import digest, lock, provenance, record


def main(argv: list[str], head: str) -> None:
    """Read a command line, and do what it asks for.

    Args:
      argv: The command line.
      head: The usage, with which --help begins.
    """
    config_files.importable(Path.cwd())
    if {"-h", "--help", "-help"} & set(argv):
        print(usage.text(head, _split(argv)[1], config_files.summaries()))
        return
    asked = read(argv)
    if asked.mode == "config":
        print(usage.listing(asked.config))
        return
    with processes.joined(asked.distributed):
        carry_out(asked, shlex.join(["python", *argv]))


def carry_out(asked: "Args", words: str) -> None:
    """Do what a command line asks for.

    Args:
      asked: The command line, read.
      words: The command line itself, which is recorded.
    """
    _check(asked)
    if processes.count() > 1:
        own = digest.identity(asked.config).fields | asked.alike() | provenance.versions()
        processes.same(own | {"git": provenance.git()})
    try:
        from experiments.training import device, modes  # with all of JAX, which a mistake above does without
    except ModuleNotFoundError as error:
        raise Mistake(f"the package {error.name} is missing: pip install -r requirements.txt.") from error
    gc.freeze()  # imported objects stay for good, and are not searched while programs are traced
    device.keep_memory()
    _cache_programs()
    if asked.sweeping and not asked.planned:
        _sweep(asked, Path(asked.workdir or f"runs/{members.folder(asked.name)}-sweep"), words)
        return
    config = asked.config
    if asked.planned:
        config = members.at(members.listed(config, asked.changes()), asked.sweep_index).config
    origin = Path(asked.origin) if asked.origin else None
    workdir = Path(asked.workdir or f"runs/{members.folder(asked.name)}-{time.strftime('%Y%m%d-%H%M%S')}")
    new = asked.mode == "train" and not asked.workdir
    with lock.new(workdir) if new else contextlib.nullcontext(workdir) as workdir:
        again = f"The same command with --workdir={workdir}" if new else "The same command"  # the name holds the time
        baseline = _baseline(asked, config) if asked.mode == "train" else None
        run = modes.Run(asked.name, config, workdir, asked.labels, baseline)
        traced, program = asked.profile or 0, None
        if asked.with_baseline:
            program = modes.checked(run, origin, traced)  # mistakes are told before the baseline is trained
            beside = modes.Run(f"{asked.name}, its baseline", baseline.config, workdir / "baseline", asked.labels)
            stopped_by = modes.carry_out("train", [beside], words, tracker=asked.tracker or "", again=again)
            if stopped_by:
                raise Stopped(
                    f"interrupted by {stopped_by.name} after the last step of the baseline. {again} continues.",
                    stopped_by,
                )
        modes.carry_out(asked.mode, [run], words, origin, program, asked.tracker or "", traced=traced, again=again)


def _baseline(asked: "Args", config: ConfigDict) -> Any:
    """Return the baseline of a run, or None if its config file names none."""
    if not config.baseline:
        return None
    from experiments.training import baseline

    variant = config_files.split(asked.config_file)[1]
    config_file = f"{config.baseline}:{variant}" if variant and ":" not in config.baseline else config.baseline
    own, other = config_files.load(asked.config_file), config_files.load(config_file)
    return baseline.Baseline(config_file, baseline.of(config, own, other))


def _check(asked: "Args") -> None:
    """Refuse flags that do not go together."""
    mode, seeds = asked.mode, asked.seeds_at_once
    if mode == "eval" and not asked.workdir:
        raise Mistake("--mode=eval needs --workdir, the directory of a run.")
    if asked.sweeping and (asked.origin or mode != "train" and not asked.planned):
        raise Mistake(
            "--sweep and --sweep_index train: leave out --from and --mode. Only --sweep_index=N can be combined with "
            "--mode=plan."
        )
    if asked.profile and (mode != "train" or asked.sweep):
        flag = "--sweep" if asked.sweep else f"--mode={mode}"
        raise Mistake(f"--profile={asked.profile} needs a single run that trains: leave out {flag}.")
    if asked.with_baseline and (mode != "train" or asked.sweeping):
        raise Mistake("--with_baseline trains one run and its baseline: leave out --sweep, --sweep_index and --mode.")
    if asked.with_baseline and not asked.config.baseline:
        raise Mistake(f"--with_baseline: {asked.config_file} names no baseline. Write --config.baseline=FILE.")
    if asked.tracker:
        if mode != "train":
            raise Mistake(f"--tracker needs a run that trains. With --mode={mode}, leave it out.")
        trackers.check(asked.tracker)
    if asked.labels and mode != "train":
        raise Mistake(f"--tag and --note need a run that trains. With --mode={mode}, leave them out.")
    if seeds < 1 or seeds > 1 and (not asked.sweep or asked.sweep_index is not None):
        raise Mistake(
            f"--seeds_at_once={seeds}: write at least 1. A number above 1 needs --sweep, and cannot be combined with "
            "--sweep_index."
        )
    if seeds > 1 and processes.count() > 1:
        raise Mistake(f"--seeds_at_once={seeds} needs a single process: leave out --distributed.")
    if asked.results:
        _check_results(asked)
    members.check_seed(asked.config)


def _check_results(asked: "Args") -> None:
    """Refuse a file of results that no run would write, or that cannot be written."""
    path, flag = Path(asked.results), f"--results={asked.results}"
    if not asked.sweeping or asked.planned:
        raise Mistake(f"{flag} needs a sweep that trains. Add --sweep or --sweep_index=N, and leave out --mode=plan.")
    if path.is_dir():
        raise Mistake(f"{flag} is a folder. Write the name of a file, such as {path / 'all.jsonl'}.")
    if path.name == "results.jsonl":
        raise Mistake(
            f"{flag}: a sweep writes its own file of this name, and would remove other lines. Write another name, such "
            f"as {path.with_name('all.jsonl')}."
        )
    if not path.parent.is_dir():
        raise Mistake(f"{flag}: there is no folder {path.parent}. Create it, or write another name.")
    try:
        path.open("ab").close()
    except OSError as error:
        raise Mistake(f"{flag} cannot be written: {error.strerror or error}. Write another name.") from error


def _cache_programs() -> None:
    """Keep compiled programs in the folder `cache()`, unless JAX_COMPILATION_CACHE_DIR is set; "" keeps none."""
    import jax

    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        jax.config.update("jax_compilation_cache_dir", str(cache()))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


def _sweep(asked: "Args", workdir: Path, words: str) -> None:
    from experiments.training import modes

    def side_by_side(group: list[members.Member], program: modes.Program) -> Any:
        runs = [
            modes.Run(each.name, each.config, workdir / each.folder, asked.labels, _baseline(asked, each.config))
            for each in group
        ]
        traced = asked.profile or 0
        return modes.carry_out(
            "train", runs, words, program=program, tracker=asked.tracker or "", plans=plans, traced=traced
        )

    plans: list[Any] = []  # those that runs have shown
    make = lambda member: modes.make_program(member.config)
    results = Path(asked.results) if asked.results else None
    runs = members.listed(asked.config, asked.changes())
    for member in runs if asked.sweep_index is None else [members.at(runs, asked.sweep_index)]:
        modes.check(member.config, member.name)
    sweep.run(runs, workdir, asked.sweep_index, asked.seeds_at_once, make, side_by_side, results, asked.labels)


class Args:
    """A command line, read. Each flag of `usage.FLAGS` is an attribute.

    Attributes:
      config: The settings of the config file, with the changes of the command line.
      config_file: FILE or FILE:VARIANT.
    """

    def __init__(self, config: ConfigDict, config_file: str, values: flags.FlagValues):
        self.config, self.config_file, self._flags = config, config_file, values

    def __getattr__(self, name: str) -> Any:
        return self._flags[name].value

    @property
    def labels(self) -> dict[str, Any]:
        """The tags and the note of the run, as record.labels returns them."""
        return record.labels(self.tag, self.note)

    @property
    def origin(self) -> str:
        """The directory of the run that this one begins with, or ""."""
        return getattr(self, "from")

    @property
    def sweeping(self) -> bool:
        """Return True if the command is about the config file's sweep."""
        return self.sweep or self.sweep_index is not None

    @property
    def planned(self) -> bool:
        """Return True if the command plans one run of a sweep."""
        return self.mode == "plan" and self.sweep_index is not None

    @property
    def name(self) -> str:
        """Return a name of the config file and its variant."""
        file, *variant = self.config_file.split(":", 1)
        return Path(file).stem + "".join(f"_{part}" for part in variant if part)

    def alike(self) -> dict[str, Any]:
        """Return the flags that all processes of a run have to agree on."""
        own = set(usage.FLAGS) - {"distributed", "seeds_at_once", "tag", "note"}
        return {"--config": self.config_file} | {f"--{name}": getattr(self, name) for name in sorted(own)}

    def changes(self) -> list[dict]:
        """Return what every run of the config file's sweep changes."""
        changes = config_files.sweep(self.config_file)
        if isinstance(changes, list) and all(isinstance(change, dict) for change in changes):
            for field in (field for change in changes for field in change):
                _exists(self.config, field)
        return changes


def cache() -> Path:
    """Return the folder of compiled programs, which make the next start quick."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nmjax" / "compiled"


def read(argv: list[str]) -> Args:
    """Read a command line.

    Without --config, --mode=eval reads the settings of the run in --workdir. They may not name other modules: only a
    config file or a command line that a person gives may have Python import anything.
    """
    words, config_file = _split(argv)
    if config_file:
        config = config_files.load(config_file)
    else:
        workdir = next((w.removeprefix("--workdir=") for w in words if w.startswith("--workdir=")), "")
        if "--mode=eval" in words and not workdir:
            raise Mistake("--mode=eval needs --workdir=DIR, the directory of a run.")
        if "--mode=eval" not in words:
            usage.check_flags(words, config_files.load(config_files.names()[0]))
            raise Mistake("--config=FILE is missing, such as --config=configs/vit_24.py. --help lists them.")
        config, config_file = _recorded(Path(workdir) / "config.json"), Path(workdir).name
    fields = [word.removeprefix("--config.").partition("=")[0] for word in words[1:] if word.startswith("--config.")]
    new = [field for field in fields if _adds_method(config, field)]
    for field in fields:
        _exists(config, field)
    values = _flags()
    usage.check_flags(words, config)
    before, sys.argv = sys.argv, words  # config_flags looks for changes there
    try:
        config_flags.DEFINE_config_dict("config", config, flag_values=values)
        rest = values(words)
    except (flags.Error, TypeError, ValueError) as error:
        raise Mistake(usage.plain(" ".join(str(error).split())) + ".") from error
    finally:
        sys.argv = before
    if rest[1:]:
        raise Mistake(f"{rest[1]!r} is not a flag. To change a setting, write --config.FIELD=VALUE.")
    for name in (field.removeprefix("sparsity.") for field in new):
        if name not in (method for _, method in config.rules):
            others = ", ".join(old for old in config.sparsity if old != name)
            hint = f", or change one of {others}." if others else "."
            raise Mistake(
                f"--config.sparsity.{name}: no rule uses {name!r}. Also write "
                f"--config.rules=\"((PATTERN,'{name}'),...)\"{hint}"
            )
    return Args(config, config_file, values)


def _split(argv: list[str]) -> tuple[list[str], str | None]:
    """Return the words of a command line without --config=FILE, and this FILE. Flags get the form --NAME=VALUE."""
    words, config_file, given = argv[:1], None, iter(argv[1:])
    for word in given:
        flag = re.fullmatch(r"--?(\w+)((?:[.=].*)?)", word, re.DOTALL)
        if flag is None or flag[1] not in ("config", *usage.FLAGS):
            words.append(word)
            continue
        name, rest = flag.groups()
        if not rest and (name == "config" or usage.FLAGS[name][0]):  # its value is the next word
            rest = "".join(f"={value}" for value in itertools.islice(given, 1))
        if name == "config" and rest.startswith("="):
            config_file = rest[1:]
        else:
            words.append(f"--{name}{rest}")
    return words, config_file


def _adds_method(config: ConfigDict, field: str) -> bool:
    """Return whether a field is a new name in config.sparsity. If so, add it, so that it can be set."""
    front, _, name = field.partition(".")
    if front != "sparsity" or not name or "." in name or name in config.sparsity:
        return False
    with config.unlocked():
        config.sparsity[name] = ""
    return True


def _flags() -> flags.FlagValues:
    """Return the flags of `usage.FLAGS`, with their defaults."""
    more: dict[str, tuple] = {  # flags that are no texts, or whose default is not ""
        "mode": (flags.DEFINE_enum, "train", usage.FLAGS["mode"][0].split("|")),
        "tracker": (flags.DEFINE_enum, None, list(trackers.TRACKERS)),
        "sweep_index": (flags.DEFINE_integer, None),
        "seeds_at_once": (flags.DEFINE_integer, 1),
        "profile": (flags.DEFINE_integer, None),
        "tag": (flags.DEFINE_multi_string, None),
        "note": (flags.DEFINE_string, None),
    }
    values = flags.FlagValues()
    for name, (form, words) in usage.FLAGS.items():
        define, *defaults = more.get(name, (flags.DEFINE_string, "") if form else (flags.DEFINE_boolean, False))
        bound = {"lower_bound": 1} if name == "profile" else {}
        define(name, *defaults, words, flag_values=values, **bound)
    return values


def _recorded(path: Path) -> ConfigDict:
    """Return the config of a run's directory, if it names nothing that would have to be imported."""
    if not path.is_file():
        has = "it has no config.json" if path.parent.is_dir() else "there is no such directory"
        raise Mistake(f"--workdir={path.parent} holds no run: {has}. Give the directory of a run.")
    from experiments.training import settings  # with all of JAX, which another command line does without

    try:
        held = of_json(text(path))
        foreign = settings.foreign_names(ConfigDict(held)) if isinstance(held, dict) else []
        if not foreign:
            settings.check_recorded(held)
    except (OSError, ValueError) as error:
        raise Mistake(
            f"{path} is damaged: {error}. Replace it by the config.json of a run with the same config and seed."
        ) from error
    if foreign:
        raise Mistake(
            f"{path} names {', '.join(foreign)}, and only names that you write yourself are imported, not those read "
            "from a file. Add the --config=FILE and the --config.FIELD=VALUE that the run was trained with."
        )
    return ConfigDict(held)


def _exists(config: ConfigDict, field: str) -> None:
    """Refuse a change to a field that the config does not have."""
    value, path = config, "config"
    for part in field.split("."):
        if not isinstance(value, ConfigDict):
            raise Mistake(f"--config.{field}: {path} is {value!r}, and has no fields.")
        if part not in value:
            hint = meant(part, value.keys(), f"{path}.{{}}")
            raise Mistake(f"--config.{field}: {path} has no field {part!r}.{hint} It has {', '.join(value.keys())}.")
        value, path = value[part], f"{path}.{part}"
    if isinstance(value, ConfigDict):
        fields = ", ".join(f"--{path}.{name}" for name in value) or f"none; write --{path}.NAME=VALUE"
        raise Mistake(f"--config.{field} is a group of fields. Set one of them: {fields}.")
