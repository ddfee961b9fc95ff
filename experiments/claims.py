"""The claims of a study, judged by its results as docs/evidence/method.md says."""

import math
import statistics
from collections.abc import Sequence, Sized
from pathlib import Path
from typing import Any, NamedTuple

import nmjax as nm
from experiments import config_files, members
from experiments.errors import Mistake
from experiments.recorded import Study, read, search_of, study
from experiments.report import effects
from experiments.report.effects import Effect
from experiments.studies import Claim, Design, SanityCheck, decided, times
from experiments.training import settings

SCORES = ("loss", "accuracy", "validation loss")  # of the hardened networks; verdicts are by each of them
POINTS = 0.005  # a difference of accuracy that matters
NOT_RUN, NO_COUNT = "not run", "does not count"


class Group(NamedTuple):
    """The runs of a config."""

    changes: dict[str, Any]  # what the config changes, without the seed
    scores: dict[str, dict[int, float]]  # by score that of each finished run by seed, of hardened networks if there are
    flops: float  # the effective FLOPs of a run
    steps: float  # the steps of a run
    time: float  # the time of all steps of a run, as a share of dense
    bytes: float  # the median temporary memory of a step
    lost: dict[int, str]  # the outcomes of the runs that did not finish, by seed
    hardened: bool  # whether there are hardened networks
    flips: list[dict[str, list]]  # the flip rates of each run that measured some: "step" and "flip_rate"

    @property
    def losses(self) -> dict[int, float]:
        """The test loss of each finished run by seed."""
        return self.scores["loss"]

    def results(self, score: str) -> dict[int, float]:
        """Return a score by seed, turned so that larger is better."""
        return {seed: -value if "loss" in score else value for seed, value in self.scores[score].items()}


class Judgement(NamedTuple):
    """A claim with its verdicts."""

    claim: Claim
    verdict: str  # by the loss, or why there is none
    differences: dict[str, Effect]  # by score the first config minus the second, if there are enough runs
    verdicts: dict[str, str]  # by score
    seeds: int  # the number of seeds that both configs have


class Judged(NamedTuple):
    """A study with its verdicts."""

    name: str  # of its results
    study: Study
    lines: list[dict]  # its results
    groups: dict[str, Group]  # by name
    seeds: Sequence[int]  # that each config should have
    check: SanityCheck
    failed: str  # why the study does not pass its sanity check; "" if it passes
    harm: Effect | None  # the loss of the config that has to be worse minus that of dense, if there are enough runs
    judgements: list[Judgement]
    over_dense: dict[str, Effect]  # by config the loss minus that of dense, as far as it is known
    scattered: dict[str, list[str]]  # by score the configs whose results scatter too much to share their variance
    search: dict[str, dict[float, float]]  # by config the mean validation loss by learning rate; empty without a search


def judged(name: str, results: Path) -> Judged:
    """Return a study with its verdicts.

    Args:
      name: The name of its results, such as "recipe_vit_cpu".
      results: The folder of the results.

    Raises:
      Mistake: If the results cannot be read, or are of a config that the study does not have.
    """
    its_study, path = study(name), results / f"{name}.jsonl"
    lines, search = read(path), search_of(its_study.design, results)
    design = decided(its_study.design, search)
    by_changes = {str(sorted(of.items())): group for group, of in design.groups.items()}
    runs: dict[str, list[dict]] = {group: [] for group in design.groups}
    for line in lines:
        own = {field: value for field, value in line["changes"].items() if field != "seed"}
        group = by_changes.get(str(sorted(own.items())))
        if group is None or line["changes"]["seed"] not in design.seeds:
            raise Mistake(f"{path}: the run {line['run']} is not in the study. Delete its line.")
        runs[group].append(line)
    for group, of in runs.items():
        _check(path, group, of)
    groups = {group: group_of(design.groups[group], of) for group, of in runs.items()}
    return judge(name, its_study, design, lines, groups, step_times(name, results), results)._replace(search=search)


def _check(path: Path, group: str, lines: list[dict]) -> None:
    """Refuse the runs of a config if a figure is not finite, or if not all runs have the same figures."""
    done = {line["changes"]["seed"]: line["figures"] for line in lines if line["outcome"] == "finished"}
    where = lambda seed: f"{path}: the run of “{group}” with seed {seed}"
    for seed, figures in done.items():
        for name, value in figures.items():
            if not math.isfinite(value):
                raise Mistake(f"{where(seed)} finished, but its {name} is {value}. Delete its line.")
    known = dict.fromkeys(name for figures in done.values() for name in figures)
    for seed, figures in done.items():
        if missing := [name for name in known if name not in figures]:
            raise Mistake(f"{where(seed)} has no {missing[0]}, but other runs of it have one. Delete its line.")


def step_times(name: str, results: Path) -> dict[str, float]:
    """Return the times of a step of the configs of a study, as shares of dense. Without times it is empty.

    Args:
      name: The name of the results of the study.
      results: The folder of the results.
    """
    paths = (results / f"times_{device}.jsonl" for device in ("cpu", "gpu"))
    lines = [line for path in paths if path.exists() for line in read(path)]
    return next((times.shares(line["rows"]) for line in lines if line["case"]["study"] == name), {})


def recipe_of(one: Study, changes: dict[str, Any]) -> nm.Recipe:
    """Return the recipe of a study's config with some changes. Shares of a run are taken of 1,000 steps.

    Two configs that prune the same values in the same way have the same recipe.
    """
    (member,) = members.listed(config_files.load(one.config_file), [{"seed": 0} | changes])
    return settings.recipe(member.config, 1000)


def group_of(changes: dict[str, Any], lines: list[dict]) -> Group:
    """Return the config of some changes, made of the lines of its runs."""
    done = [line for line in lines if line["outcome"] == "finished"]
    figures = {line["changes"]["seed"]: line["figures"] for line in done}
    hardened = {"loss": "hardened_loss", "accuracy": "hardened_accuracy", "validation_loss": "validation_hardened_loss"}
    scores = {
        score: {seed: of.get(best, of[name]) for seed, of in figures.items() if name in of}
        for score, (name, best) in zip(SCORES, hardened.items(), strict=True)
    }
    middle = lambda values: statistics.median(values) if values else math.nan
    memory = [of["step_bytes"] for line in done if "step_bytes" in (of := line.get("measured") or {})]
    sparsity = [line.get("curves", {}).get("sparsity", {}) for line in done]
    return Group(
        changes,
        scores,
        middle([line["flops"][1] * line["steps"] for line in done]),
        middle([line["steps"] for line in done]),
        math.nan,
        middle(memory),
        {line["changes"]["seed"]: line["outcome"] for line in lines if line["outcome"] != "finished"},
        all("hardened_loss" in line["figures"] for line in done),
        [curves for curves in sparsity if any(curves.get("flip_rate") or ())],
    )


def judge(
    name: str, its_study: Study, design: Design, lines: list[dict], groups: dict[str, Group],
    times_of: dict[str, float], results: Path,
) -> Judged:  # fmt: skip
    """Return the study with its verdicts. All configs share in the variance but the one that has to be worse."""
    check, seeds, claims = design.check, design.seeds, design.claims
    same = {group: 1.0 for group, of in groups.items() if times_of and list(of.changes) == ["steps"]}  # a step of dense
    steps, times_of = groups["dense"].steps, times_of | same
    groups = {group: of._replace(time=times_of.get(group, math.nan) * of.steps / steps) for group, of in groups.items()}
    used = {group: of for group, of in groups.items() if group != check.worse}
    values = {score: {group: of.results(score) for group, of in used.items()} for score in SCORES}
    margins = dict.fromkeys(SCORES, check.margin) | {"accuracy": POINTS}
    found = {score: _effects(values[score], claims, margins[score]) for score in SCORES}
    harm = _harm(groups, check)
    failed, judgements = _failed(groups, check, harm, results), []
    for claim in claims:
        of_claim = {score: of[claim] for score, of in found.items() if claim in of}
        none = NO_COUNT if failed else _unfinished(groups, claim, seeds)  # then no score has a verdict
        verdicts = {} if none else {s: effects.verdict(claim.kind, e, margins[s]) for s, e in of_claim.items()}
        differences = {score: _turned(e) if "loss" in score else e for score, e in of_claim.items()}
        shared = len({*groups[claim.first].losses} & {*groups[claim.second].losses})
        judgements.append(Judgement(claim, none or verdicts.get("loss", NOT_RUN), differences, verdicts, shared))
    losses = values["loss"]
    over = [group for group in used if group != "dense" and _shared(losses, group, "dense") > 1]
    over_dense = map(_turned, effects.effects(losses, [(group, "dense") for group in over]))
    scattered = {score: wild for score in SCORES if (wild := sorted(effects.scattered(values[score])))}
    known = dict(zip(over, over_dense, strict=True))
    return Judged(name, its_study, lines, groups, seeds, check, failed, harm, judgements, known, scattered, {})


def _turned(effect: Effect) -> Effect:
    return effect._replace(difference=-effect.difference)


def _effects(values: dict[str, dict[int, float]], claims: list[Claim], margin: float) -> dict[Claim, Effect]:
    """Return the effects of the claims that can be judged. Each p-value tests what its claim says."""
    known = [claim for claim in claims if _shared(values, claim.first, claim.second) > 1]
    tested = [-margin if claim.kind == "as good as" else 0.0 for claim in known]
    found = effects.effects(values, [(claim.first, claim.second) for claim in known], tested, len(claims))
    return dict(zip(known, found, strict=True))


def _shared(values: dict[str, dict[int, float]], first: str, second: str) -> int:
    """Return the number of seeds that two configs have in common."""
    return len({*values[first]} & {*values[second]})


def _unfinished(groups: dict[str, Group], claim: Claim, seeds: Sequence[int]) -> str:
    """Return why a claim is not judged yet, or "": runs diverged, or are missing."""
    names = (claim.first, claim.second)
    lost = [f"{_count(groups[name].lost)} of “{name}” diverged" for name in names if groups[name].lost]
    if lost:
        return f"{effects.OPEN}: {' and '.join(lost)}"
    left = sum(seed not in groups[name].losses for name in names for seed in seeds)
    if left == 2 * len(seeds):
        return NOT_RUN
    return f"not finished: {left} of {2 * len(seeds)} runs are missing" if left else ""


def _count(runs: Sized) -> str:
    return "1 run" if len(runs) == 1 else f"{len(runs)} runs"


# ---- the sanity check ----


def simple(data: str, results: Path) -> dict[str, float]:
    """Return the scores of simple methods on some data, by method: accuracies of images, losses of a text."""
    scores = {}
    for line in read(results / "baselines_cpu.jsonl"):
        if line["case"]["data"] == data:
            rows = line["rows"]
            scores[line["case"]["method"]] = (rows["loss"] if "loss" in rows else rows["accuracy"])[0]
    return scores


def limit(check: SanityCheck, results: Path) -> float:
    """Return the score that the dense network has to pass."""
    if isinstance(check.limit, float):
        return check.limit
    known = simple(check.data, results)
    if check.limit not in known:
        made_by = study("baselines_cpu").command
        raise Mistake(
            f"{results / 'baselines_cpu.jsonl'} has no {check.limit} of {check.data}. Make it with: {made_by}"
        )
    return known[check.limit]


def mean(group: Group, score: str, seeds: Sequence[int] | None = None) -> float:
    """Return the mean score of the runs of a config, or of those of some seeds."""
    values = [value for seed, value in group.scores[score].items() if seeds is None or seed in seeds]
    return statistics.fmean(values) if values else math.nan


def _harm(groups: dict[str, Group], check: SanityCheck) -> Effect | None:
    """Return how much worse the config is that has to be worse than dense; None if there are too few runs."""
    pair = {group: groups[group].losses for group in (check.worse, "dense")}
    return effects.effects(pair, [(check.worse, "dense")])[0] if _shared(pair, check.worse, "dense") > 1 else None


def _failed(groups: dict[str, Group], check: SanityCheck, harm: Effect | None, results: Path) -> str:
    """Return why a study does not pass its sanity check, or ""."""
    reached, needed = mean(groups["dense"], check.metric), limit(check, results)
    if math.isnan(reached):
        return "no dense network finished"
    if reached < needed if check.metric == "accuracy" else reached > needed:
        return f"the dense network reaches {score(check, reached)}, and needs {score(check, needed)}"
    if harm is None:
        lost = f": {_count(groups[check.worse].lost)} of it diverged" if groups[check.worse].lost else ""
        return f"dense and “{check.worse}”, which has to be worse, have fewer than two seeds in common{lost}"
    return (
        "" if harm.interval()[0] > check.margin else f"“{check.worse}” is not worse than dense by more than the margin"
    )


def score(check: SanityCheck, value: float) -> str:
    """Return a score by which dense networks are judged, as text."""
    return f"{100 * value:.1f} %" if check.metric == "accuracy" else f"{value:.3f} {check.unit}"
