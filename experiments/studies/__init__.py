"""Studies that test the papers' claims.

Each file with a ``design`` is such a study. It has a variant for two CPU cores, and some have one for a GPU.

This makes the missing runs::

    python launch.py --config=experiments/studies/NAME.py:VARIANT --sweep \\
        --results=experiments/results/NAME_VARIANT.jsonl

``python -m experiments.reproduce`` writes the results into REPRODUCTION.md.
"""

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, NamedTuple

from ml_collections import ConfigDict

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
    """

    network: str
    data: str
    metric: Literal["accuracy", "loss"]
    limit: float | str
    worse: str
    margin: float
    unit: str


Changes = dict[str, Any]  # of a config, by field


class Design(NamedTuple):
    """A study with claims, in one variant.

    Attributes:
      config: The config that its runs change.
      check: What its networks have to pass.
      seeds: The seeds of every config.
      groups: What each config changes, by its name.
      claims: The claims that it judges.
    """

    config: ConfigDict
    check: SanityCheck
    seeds: Sequence[int]
    groups: dict[str, Changes]
    claims: list[Claim]


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


def launched(design: Callable[[str], Design]) -> tuple[Callable[..., ConfigDict], Callable[..., list[Changes]]]:
    """Return what launch.py calls in a config file, get_config and get_sweep, of a study.

    Runs of a config follow each other and share a program.

    Args:
      design: Returns the study in a variant.
    """

    def get_sweep(variant: str = "") -> list[Changes]:
        of = design(variant)
        return [changes | {"seed": seed} for changes in of.groups.values() for seed in of.seeds]

    return lambda variant="": design(variant).config, get_sweep
