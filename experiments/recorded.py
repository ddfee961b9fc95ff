"""Results of studies, experiments/results/*.jsonl: read and checked."""

import datetime
import re
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from experiments import collected, config_files, members
from experiments.errors import Mistake
from experiments.files import of_json
from experiments.studies import SEARCH, Design, __main__ as looks, named, search_losses
from experiments.training import digest
from experiments.training.settings import shortened

LOOKED = ("case", "rows", "outcome", "began", "ended", "versions", "notes")  # fields of a line that are read
SWEPT = ("changes", "devices", "outcome", "steps", "flops", "began", "ended", "versions", "notes")
SWEEP = re.compile(r"launch\.py --config=experiments/studies/\w+\.py:\w+ --sweep\b")  # studies may share runs
RESULTS = Path(__file__).parent / "results"


class Study(NamedTuple):
    """The study that some results belong to."""

    module: ModuleType
    variant: str
    config_file: str  # FILE:VARIANT; "" if the study is no sweep
    short: str  # a part of every command that made a line of its results
    command: str  # makes the results that are missing

    @property
    def design(self) -> Design:
        """Its runs and its claims, if it is a sweep. If it has a search, they have no learning rates yet."""
        return self.module.design(self.variant)


def seconds(line: dict) -> float:
    """Return how long the run of a line took, including the parts before it was continued."""
    began, ended = (datetime.datetime.fromisoformat(line[at]) for at in ("began", "ended"))
    return line.get("seconds", (ended - began).total_seconds())  # old lines have only the time of the last part


def study(name: str) -> Study:
    """Return the study of the results of a name: "held_vit_cpu" are those of studies/held.py:vit_cpu."""
    try:
        module, variant = named(name)
    except KeyError:
        words = "is not the name of a study. Write a name such as held_vit_cpu, for studies/held.py:vit_cpu."
        raise Mistake(f"{name} {words}") from None
    stem = module.__name__.rpartition(".")[2]
    if stem in looks.NAMES:
        return Study(module, variant, "", looks.command(stem), looks.command(stem))
    config_file = f"experiments/studies/{stem}.py:{variant}"
    short = f"python launch.py --config={config_file} --sweep"
    return Study(module, variant, config_file, short, f"{short} --results=experiments/results/{name}.jsonl")


def read(path: Path) -> list[dict]:
    """Return the last line of every run in a file of results.

    Raises:
      Mistake: If there is no file, or if a line cannot be read, or if it was made by another command or config.
    """
    its_study = study(path.stem)
    if not path.exists():
        raise Mistake(f"there is no {path}. Make it with: {its_study.command}")
    last_of_run = {}
    try:
        texts = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise Mistake(f"{path} is not text: {error}. Delete it, and make it with: {its_study.command}") from error
    for number, text in enumerate(texts, 1):
        line = _checked(text, f"{path}, line {number}", its_study)
        last_of_run[str(line["changes"]) if its_study.config_file else line["run"]] = line
    return list(last_of_run.values())


def search_of(design: Design, results: Path = RESULTS) -> dict[str, dict[float, float]]:
    """Return what the search of a study found, as `search_losses`; empty if it has no search.

    Args:
      design: The study.
      results: The folder of the results.

    Raises:
      Mistake: The results of the search cannot be read, or runs are missing.
    """
    if design.search is None:
        return {}
    path = results / f"{design.search.study}{SEARCH}.jsonl"
    return search_losses(design, read(path) if path.exists() else [], study(path.stem).command)


def _checked(text: str, where: str, its_study: Study) -> dict:
    again = f"Delete the line, and make it again with: {its_study.command}"
    try:
        line = of_json(text)
        form, _, made_by = line["format"], line["run"], line.get("command", "")
        if form == collected.FORMAT and "config" in line:
            for field in SWEPT if its_study.config_file else LOOKED:
                line[field]
            if its_study.config_file:
                figures = line["figures"] if line["outcome"] == "finished" else {}  # only finished runs have some
                numbers = [*figures.values(), *line["flops"], line["steps"], line.get("seconds", 0)]
                if not all(isinstance(number, int | float) for number in numbers):
                    raise TypeError("one of figures, flops, steps and seconds is not a number")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise Mistake(f"{where} is not a line of results ({type(error).__name__}: {error}). {again}") from error
    if form != collected.FORMAT:
        raise Mistake(f"{where} has format {form}, but only format {collected.FORMAT} can be read. {again}")
    by_a_sweep = bool(its_study.config_file) and SWEEP.search(made_by) is not None
    if "--config." in made_by or not (by_a_sweep or its_study.short in made_by):
        raise Mistake(f"{where} was made by another command: {shortened(made_by)}. {again}")
    try:
        made = _digest(its_study, line)
    except Mistake as error:
        raise Mistake(f"{where} has changes that no run can have ({shortened(str(error))}). {again}") from error
    if line.get("config") != made:
        raise Mistake(f"{where} was made with another config: the config file has changed since. {again}")
    return line


def _digest(its_study: Study, line: dict) -> str:
    """Return the digest of the config that the run of a line would have now."""
    if not its_study.config_file:
        return digest.identity(its_study.module.config(**line["case"])).digest
    return members.listed(config_files.load(its_study.config_file), [line["changes"]])[0].identity.digest
