"""Studies that test the papers' claims.

Each file with a ``design`` is such a study. It has a variant for two CPU cores, and some have one for a GPU.

This makes the missing runs::

    python launch.py --config=experiments/studies/NAME.py:VARIANT --sweep \\
        --results=experiments/results/NAME_VARIANT.jsonl

``python -m experiments.reproduce`` writes the results into REPRODUCTION.md.
"""

import importlib
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, NamedTuple

from ml_collections import ConfigDict

from experiments.errors import Mistake

SMALL_VIT = dict(  # 16 tokens of Fashion-MNIST; the width is a multiple of 64, for groups of 64
    name="vit", size="tiny", width=64, hidden=256, depth=2, patch=7, pool="mean", scan=False, remat=False
)
INTERVALS = dict(evaluate="25%", measure="25%")  # a run takes seconds: more would cost too much of its time


STUDIES = (  # those with claims, in the order of REPRODUCTION.md
    "recipe_vit_cpu",
    "methods_vit_cpu",
    "methods_gpt_cpu",
    "equal_flops_cpu",
    "equal_flops_qk_cpu",
    "residual_cpu",
    "rivals_resnet_cpu",
    "rivals_gpt_cpu",
    "held_vit_cpu",
    "unbiased_vit_cpu",
    "whole_rows_vit_cpu",
    "forms_vit_cpu",
    "finetuning_sst2_cpu",
)

ABOUT = (  # what the main claims are about, in their order: the methods of config files, and papers
    "configs/vit_24.py",
    "configs/gpt_24.py",
    "configs/finetune_24.py",
    "S-STE",
    "PGF",
    "SDGP",
    "MVUE",
)


class Claim(NamedTuple):
    """A claim about two configs of a study.

    Attributes:
      text: The claim as a sentence without a full stop.
      first: The name of the config that is said to be better, or as good.
      kind: What the claim says of the first config and the second.
      second: The name of the other config.
      about: What it is a main claim about, one of `ABOUT`; "" if it is not a main claim.
    """

    text: str
    first: str
    kind: Literal["better than", "as good as"]
    second: str
    about: str = ""


class SanityCheck(NamedTuple):
    """The condition of a study: it counts only if its networks pass.

    Attributes:
      network: The network and its data, as "ViT, Fashion-MNIST".
      data: The data of `baselines` with which simple methods are scored.
      metric: The dense network is judged by its "accuracy" or its "loss" on the test data.
      limit: The score that the dense network has to reach; or the name of a simple method, for the score of it.
      worse: The name of the config that has to be worse than dense by more than the margin.
      margin: The largest difference of the loss that does not matter.
      unit: The unit of the loss.
      seeds: How many of the study's seeds the config that has to be worse has; None for all.
    """

    network: str
    data: str
    metric: Literal["accuracy", "loss"]
    limit: float | str
    worse: str
    margin: float
    unit: str
    seeds: int | None = None


Changes = dict[str, Any]  # of a config, by field
RATE = "learning_rate.peak"
SEARCH = "_search"  # ends the variant, and so the name of the results, of the search of a study


class Search(NamedTuple):
    """How a study chooses a learning rate for each config, before its own runs.

    Each config is trained with each rate and each seed of the search. It gets the rate with the lowest mean validation
    loss of the hardened network. The config that has to be worse is not searched: it keeps the rate of the config file.

    Attributes:
      study: The name of the study.
      rates: The learning rates that are tried.
      seeds: The seeds of these runs, none of which is a seed of the study.
    """

    study: str
    rates: Sequence[float]
    seeds: Sequence[int]


class Design(NamedTuple):
    """A study with claims, in one variant.

    Attributes:
      config: The config that its runs change.
      check: What its networks have to pass.
      seeds: The seeds of every config; the one that has to be worse may have only the first of them.
      groups: What each config changes, by its name.
      claims: The claims that it judges.
      search: How it chooses learning rates; None if all configs have that of the config.
    """

    config: ConfigDict
    check: SanityCheck
    seeds: Sequence[int]
    groups: dict[str, Changes]
    claims: list[Claim]
    search: Search | None = None


WORSE = "random 1:16 mask"  # the config that has to be worse
RANDOM = "y_w=ste(hold(uniform(1,16,rescale=False)))"  # its method: one random mask for the whole run
RANDOM_2_4 = "y_w=ste(hold(uniform(2,4,rescale=False)))"  # the same at 2:4, to compare ways to choose a mask with
FASHION = SanityCheck("ViT, Fashion-MNIST", "fashion_mnist", "accuracy", 0.87, worse=WORSE, margin=0.01, unit="nats")
CIFAR = SanityCheck("ViT, CIFAR-10", "cifar10", "accuracy", 0.8, worse=WORSE, margin=0.01, unit="nats")
BOOKS = SanityCheck(
    "GPT, bytes of books", "books_start", "loss", "5-gram", worse=WORSE, margin=0.01, unit="nats a byte"
)


def named(name: str) -> tuple[ModuleType, str]:
    """Return the module and the variant of a study: "held_vit_cpu" is that of held.py in the variant vit_cpu.

    Raises:
      KeyError: There is no such study.
    """
    known = [path.stem for path in Path(__file__).parent.glob("[a-z]*.py") if name.startswith(f"{path.stem}_")]
    if not known:
        raise KeyError(name)
    stem = max(known, key=len)
    return importlib.import_module(f"experiments.studies.{stem}"), name.removeprefix(f"{stem}_")


def dense_baseline(word: str, method: str) -> str:
    """Return the name of a config that has the same FLOPs as a method.

    Args:
      word: How it comes to these FLOPs, as "narrower dense".
      method: The name of the method.

    >>> dense_baseline("shorter dense", "STE")
    'shorter dense, FLOPs of “STE”'
    """
    return f"{word}, FLOPs of “{method}”"


def one_of(variant: str, known: Iterable[str]) -> str:
    """Return a variant, or the first of those that are known if it is empty. Refuse others."""
    names = list(known)
    if variant and variant not in names:
        raise ValueError(f"there is no variant {variant!r}: write one of {', '.join(names)}")
    return variant or names[0]


def groups(field: str, given: Mapping[str, str | Changes]) -> dict[str, Changes]:
    """Return the configs of a study: dense training, those that are given, and the one that has to be worse.

    Args:
      field: The field of the config that holds a method.
      given: By name the text of a method, or else what a config changes.
    """
    found = {"dense": "dense", **given, WORSE: RANDOM}
    return {name: {field: one} if isinstance(one, str) else one for name, one in found.items()}


def better(first: str, second: str, text: str = "", about: str = "") -> Claim:
    """Return the claim that a config is better than another one."""
    return Claim(text or f"{first} is better than {second}", first, "better than", second, about)


def as_good(first: str, second: str = "dense", text: str = "", about: str = "") -> Claim:
    """Return the claim that a config is as good as another one."""
    return Claim(text or f"{first} is as good as {second}", first, "as good as", second, about)


def searched(design: Design) -> Design:
    """Return the search of a study: its configs with each learning rate, and no claims."""
    assert design.search is not None
    names = [name for name in design.groups if name != design.check.worse]
    tried = {
        f"{name}, rate {rate:g}": design.groups[name] | {RATE: rate} for name in names for rate in design.search.rates
    }
    return design._replace(seeds=design.search.seeds, groups=tried, claims=[], search=None)


def search_losses(design: Design, lines: Iterable[dict], again: str) -> dict[str, dict[float, float]]:
    """Return what the search of a study found: for each config the mean validation loss by learning rate.

    Args:
      design: The study.
      lines: The results of its search.
      again: The command that makes those that are missing.

    Raises:
      Mistake: Runs of the search are missing, it shares a seed with the study, or all runs of a config diverged.
    """
    search = design.search
    if search is None:
        return {}
    if shared := sorted({*search.seeds} & {*design.seeds}):
        raise Mistake(f"{search.study}: the seed {shared[0]} is one of its search too. Give the search other seeds.")
    known = {_changed(line["changes"]): _validation_loss(line) for line in lines}
    wanted = [changes | {"seed": seed} for changes in searched(design).groups.values() for seed in search.seeds]
    if missing := sum(_changed(run) not in known for run in wanted):
        raise Mistake(
            f"{search.study} has no learning rates, because {missing} of {len(wanted)} runs of its search are missing. "
            f"Make them with: {again}"
        )
    found = {}
    for name, changes in design.groups.items():
        if name != design.check.worse:
            loss = lambda rate, changes=changes: statistics.fmean(
                known[_changed(changes | {RATE: rate, "seed": seed})] for seed in search.seeds
            )
            found[name] = {rate: loss(rate) for rate in search.rates}
            if min(found[name].values()) == math.inf:
                raise Mistake(f"{search.study}: “{name}” diverged with each rate of its search. Give it other rates.")
    return found


def decided(design: Design, losses: dict[str, dict[float, float]]) -> Design:
    """Return a study whose configs have the learning rates with the lowest losses of its search.

    Args:
      design: The study.
      losses: What `search_losses` returns.
    """
    rates = {name: min(by_rate, key=by_rate.__getitem__) for name, by_rate in losses.items()}
    own = {name: changes | ({RATE: rates[name]} if name in rates else {}) for name, changes in design.groups.items()}
    return design._replace(groups=own)


def _changed(changes: Changes) -> str:
    """Return what tells the runs of a study apart."""
    return str(sorted(changes.items()))


def _validation_loss(line: dict) -> float:
    """Return the validation loss of the hardened network of a run; infinity if the run diverged."""
    if line["outcome"] != "finished":
        return math.inf
    return line["figures"].get("validation_hardened_loss", line["figures"]["validation_loss"])


def seeds_of(group: str, check: SanityCheck, seeds: Sequence[int]) -> Sequence[int]:
    """Return the seeds that a config of a study should have.

    Args:
      group: The name of the config.
      check: The sanity check of the study.
      seeds: The seeds of the study.
    """
    return seeds[: check.seeds] if group == check.worse else seeds


def launched(design: Callable[[str], Design]) -> tuple[Callable[..., ConfigDict], Callable[..., list[Changes]]]:
    """Return what launch.py calls in a config file, get_config and get_sweep, of a study.

    Runs of a config follow each other and share a program.

    Args:
      design: Returns the study in a variant.
    """

    def get_sweep(variant: str = "") -> list[Changes]:
        from experiments import recorded  # here because it reads studies

        of = design(variant)
        of = decided(of, recorded.search_of(of))
        runs = [(of.groups[name], seed) for name in of.groups for seed in seeds_of(name, of.check, of.seeds)]
        return [changes | {"seed": seed} for changes, seed in runs]

    return lambda variant="": design(variant).config, get_sweep
