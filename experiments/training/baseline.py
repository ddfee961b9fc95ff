"""The baseline of a run: the run that it is compared with, such as the same run without pruning.

A config file names that of its baseline (``config.baseline``). The figures of a baseline come from finished runs of its
config: from the run that --with_baseline trained in the folder of the run, from the results in this repository, and
from other runs in the parent folder of the run.
"""

import contextlib
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ml_collections import ConfigDict

import nmjax as nm
from experiments.errors import Mistake
from experiments.files import lines
from experiments.training import digest, record
from experiments.training.screen import form

RESULTS = Path(__file__).parent.parent / "results" / "recorded_baselines.jsonl"  # of the dense config files
MEASURED = {"step_seconds": "time", "step_bytes": "temporary memory"}  # of a step, in run.json
FOLDER = "baseline"  # where --with_baseline trains the baseline, in the folder of the run
_OWN = ("rules", "sparsity", "backend", "masked_decay", "baseline")  # fields that a baseline does not take from the run


class Baseline(NamedTuple):
    """The run that another run is compared with."""

    config_file: str
    config: ConfigDict

    @property
    def label(self) -> str:
        """Return "dense" if the baseline prunes nothing, else the name of its config file."""
        dense = _dense(digest.identity(self.config).fields)
        return "dense" if dense else Path(self.config_file.partition(":")[0]).stem


class Figure(NamedTuple):
    """The score of a finished run of the baseline's config, and what a step of it takes."""

    seed: int
    score: float
    measured: Mapping[str, float] = {}  # as in run.json; empty if it was not trained for this run
    recorded: bool = False  # True if it comes from the repository's results


def of(config: ConfigDict, unchanged: ConfigDict, baseline: ConfigDict) -> ConfigDict:
    """Return the config of a baseline: its config file, with the changes that the run makes to its own config file.

    Args:
      config: The settings of the run.
      unchanged: The config of the run's config file, without changes.
      baseline: The config of the baseline's config file.

    Raises:
      Mistake: The baseline is of another kind of experiment, or has no field that the run changes.
    """
    if baseline.experiment != unchanged.experiment:
        raise Mistake(
            f"config.baseline={config.baseline!r} is a config file of the experiment {baseline.experiment!r}, but this "
            f"run is of {unchanged.experiment!r}. Name a config file of the same experiment, or write "
            "--config.baseline= to do without a baseline."
        )
    baseline = baseline.copy_and_resolve_references()
    own, before, fields = (digest.identity(each).fields for each in (config, unchanged, baseline))
    changed = {name: own[name] for name in own if name.partition(".")[0] not in _OWN and own[name] != before.get(name)}
    lacking = next((name for name in changed if name not in fields), None)
    if lacking:
        raise Mistake(
            f"config.baseline={config.baseline!r}: that config file has no field {lacking}, so the baseline cannot "
            "have your value of it. Add the field to the config file of the baseline, or write --config.baseline= "
            "to do without a baseline."
        )
    baseline.update_from_flattened_dict(changed)
    return baseline


def figures(baseline: Baseline, workdir: Path, metric: str) -> list[Figure]:
    """Return what finished runs of the baseline's config reached, one for each seed.

    Runs of other versions of nmjax do not count, except those that this repository has recorded.

    Args:
      baseline: The baseline.
      workdir: The directory of the run that is compared with it.
      metric: "accuracy" or "loss". The score of hardened weights counts if there is one.
    """
    found: dict[int, Figure] = {}

    def add(seed: int, about: dict[str, Any], **more: Any) -> None:
        scores = about["figures"]
        score = scores.get(f"hardened_{metric}", scores.get(metric))
        if isinstance(score, float) and (more.get("recorded") or about["versions"]["nmjax"] == nm.__version__):
            found[seed] = Figure(seed, score, **more)  # of one seed the last counts

    beside = [*sorted(workdir.parent.glob("*")), *sorted(workdir.parent.glob(f"*/{FOLDER}"))]
    for seed, about in _runs(baseline, [folder for folder in beside if folder != workdir]):
        add(seed, about)
    for seed, about in _recorded(baseline):
        add(seed, about, recorded=True)
    for seed, about in _runs(baseline, [workdir / FOLDER]):
        add(seed, about, measured=about.get("measured", {}))
    return [found[seed] for seed in sorted(found)]


def _recorded(baseline: Baseline) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the seed and the line of every run of the baseline in the repository's results."""
    for line in lines(RESULTS):
        seed = line["changes"].get("seed", 0)
        config = baseline.config.copy_and_resolve_references()
        config.seed = seed
        if (
            line["outcome"] == "finished"
            and not line.get("origin")
            and line["config"] == digest.identity(config).digest
        ):
            yield seed, line


def _runs(baseline: Baseline, folders: list[Path]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the seed and the run.json of every finished run of the baseline in some folders."""
    wanted = _compared(digest.identity(baseline.config))
    for folder in folders:
        with contextlib.suppress(Exception):  # files in other folders may be damaged, and must not stop the run
            about = record.read(folder)
            if about is None or about["outcome"] != "finished" or about.get("origin"):
                continue  # a run that began with the state of another has learned for longer
            identity = digest.recorded(folder)
            if _compared(identity) == wanted and isinstance(about["figures"], dict) and about["versions"]["nmjax"]:
                yield identity.fields["seed"], about


def _compared(identity: digest.Identity) -> dict[str, Any]:
    """Return the fields that a run of the baseline has to share. Of runs that prune nothing, the rules do not count."""
    dense = _dense(identity.fields)
    left_out = ("seed", "rules", "sparsity", "backend", "masked_decay") if dense else ("seed",)
    shared = {name: value for name, value in identity.lasting.items() if name.partition(".")[0] not in left_out}
    return shared | {"dense": dense}


def _dense(fields: dict[str, Any]) -> bool:
    """Return whether every rule of a config names the method "dense"."""
    return all(fields.get(f"sparsity.{name}", name) == "dense" for _, name in fields["rules"])


def comparison(
    baseline: Baseline | None, workdir: Path, metric: str, scores: dict[str, float], flops: list[float],
    measured: Mapping[str, float],
) -> str:  # fmt: skip
    """Return a text that compares a run's score with its baseline's, or "" if its config file names no baseline.

    Args:
      baseline: The baseline of the run, if it has one.
      workdir: The run's directory.
      metric: "accuracy" or "loss".
      scores: The run's scores on the test split.
      flops: FLOPs of a step, dense and effective.
      measured: What a step of the run takes, as in run.json.
    """
    if baseline is None:
        return ""
    hardened = f"hardened_{metric}" in scores
    text = form(metric, scores[f"hardened_{metric}" if hardened else metric])
    if metric == "loss":
        text = "hardened " * hardened + f"loss {text} (lower is better)"
    else:
        text += " hardened" * hardened
    text += f", {flops[1] / flops[0]:.2f} of the dense FLOPs"
    found = figures(baseline, workdir, metric)
    if not found and _compared(digest.recorded(workdir)) == _compared(digest.identity(baseline.config)):
        return text  # the run is its own baseline, as a dense run of a sweep
    if not found:
        how = "train that config file too, with the same changes, or use --with_baseline"
        return f"{text}; no run of {baseline.config_file} to compare with: {how}"
    beside = next((each.measured for each in found if each.measured), {})
    both = {name: word for name, word in MEASURED.items() if measured.get(name) and beside.get(name)}
    if both:
        shares = " and ".join(f"{measured[name] / beside[name]:.2f} of the {word}" for name, word in both.items())
        text += f", {shares} of {baseline.label}"
    return f"{text}; {baseline.label} {_mean(found, metric)}"


def _mean(found: list[Figure], metric: str) -> str:
    """Return the mean of the scores of some seeds with its standard error.

    >>> _mean([Figure(0, 0.98), Figure(1, 0.982), Figure(2, 0.99)], "accuracy")
    '98.40% ± 0.31% (3 seeds)'
    >>> _mean([Figure(0, 0.98, recorded=True)], "accuracy")
    '98.00% (1 recorded seed)'
    """
    values = [each.score for each in found]
    text, seeds = form(metric, statistics.fmean(values)), "seed" if len(values) == 1 else "seeds"
    if len(values) > 1:
        text += f" ± {form(metric, statistics.stdev(values) / len(values) ** 0.5)}"
    recorded = sum(each.recorded for each in found)
    if recorded == len(found):
        seeds = f"recorded {seeds}"
    elif recorded:
        seeds += f", {recorded} of them recorded"
    return f"{text} ({len(values)} {seeds})"
