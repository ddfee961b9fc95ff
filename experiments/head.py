"""The head of REPRODUCTION.md: how many claims hold, what the networks reach, and the table of the main claims."""

from collections.abc import Hashable, Iterator
from pathlib import Path

from experiments.claims import Judged, Judgement, judged, recipe_of
from experiments.evidence import HEAD, dense, differs, done, has_gate_runs, interval, seeds, simple_methods
from experiments.report import effects
from experiments.report.words import markdown_table
from experiments.studies import STUDIES, methods

QUESTIONS = {  # what a sparse method is: the kind of the claim, and how the name of the second arm begins
    "as good as dense training": ("as good as", "dense"),
    "better than a narrower dense network": ("better than", "narrower dense"),
    "better than a shorter dense run": ("better than", "shorter dense"),
}


def summary(results: Path) -> str:
    """Return what the networks reach, and a table of how many claims hold.

    Args:
      results: The folder of the results.
    """
    studies = [one for one in _with_results(results) if has_gate_runs(one)]
    return "\n\n".join([*_networks(studies, results), *_counts(studies), *_otherwise(studies)])


def main_claims(results: Path) -> str:
    """Return the table of the main claims of all studies, and which studies are not in it, or not finished.

    Args:
      results: The folder of the results.
    """
    rows, begun, found = [], [], _with_results(results)
    for one in found:
        if not has_gate_runs(one):
            begun.append(f"`{one.name}` ({done(one)})")
            continue
        if any(seed not in arm.losses | arm.lost for arm in one.arms.values() for seed in one.seeds):
            begun.append(f"`{one.name}` ({done(one)}; its claims with all runs are judged)")
        rows += [_row(judgement, one) for judgement in one.judgements if judgement.claim.first_screen]
    networks = list(dict.fromkeys(row[0] for row in rows))
    head = ["network", *HEAD[:3], "other verdicts", "seeds", "gate"]
    parts = [markdown_table([head, *sorted(rows, key=lambda row: networks.index(row[0]))])]
    if begun:
        parts.append(f"Not finished: {', '.join(begun)}.")
    if missing := [f"`{name}`" for name in STUDIES if name not in {one.name for one in found}]:
        parts.append(
            f"Not run yet: {', '.join(missing)}. The files of [experiments/studies](studies) have their claims."
        )
    return "\n\n".join(parts)


def _row(judgement: Judgement, one: Judged) -> list[str]:
    """Return the row of a main claim."""
    by = {"accuracy": judgement.by_accuracy, "validation loss": judgement.by_validation}
    own = _plain(judgement.verdict)
    others = [f"{name}: {verdict}" for name, verdict in by.items() if verdict and _plain(verdict) != own]
    passed = "not passed" if one.failed else "passed"
    shown = [judgement.claim.text, judgement.verdict, interval(judgement.loss, 4), "; ".join(others)]
    return [one.gate.network, *shown, seeds(judgement, one), passed]


def _plain(verdict: str) -> str:
    """Return a verdict without the words that its kind adds.

    >>> _plain("does not hold: worse"), _plain("holds: better by less than the margin"), _plain("holds")
    ('worse', 'better by less than the margin', 'holds')
    """
    return verdict.removeprefix("does not hold: ").removeprefix("holds: ")


def _with_results(results: Path) -> list[Judged]:
    return [judged(name, results) for name in STUDIES if (results / f"{name}.jsonl").exists()]


def _counts(studies: list[Judged]) -> list[str]:
    """Return a table of how many sparse methods are as good as dense training, or better than their rivals.

    It is the only element of the list. Without verdicts the list is empty.
    """
    verdicts: dict[tuple[str, str], list[str]] = {}
    for network in dict.fromkeys(one.gate.network for one in studies):
        verdicts |= {(network, question): [] for question in QUESTIONS}
    for asked, verdict in _once(studies):
        verdicts[asked].append(verdict)
    rows = [["network", "claim: a sparse method is", *effects.KINDS]]
    for (network, question), found in verdicts.items():
        counts = [f"{sum(effects.kind(verdict) == kind for verdict in found)}" for kind in effects.KINDS]
        if QUESTIONS[question][0] == "as good as":
            counts[list(effects.KINDS).index(effects.NO_DIFFERENCE)] = "–"  # is not a verdict on these claims
        if found:
            rows.append([network, question, *counts])
    return [markdown_table(rows)] if rows[1:] else []


def _otherwise(studies: list[Judged]) -> list[str]:
    """Return a sentence on how many verdicts would be others by other scores, if there are verdicts."""
    judgements = [judgement for one in studies if not one.failed for judgement in one.judgements]
    judgements = [judgement for judgement in judgements if effects.kind(judgement.verdict)]
    by_validation = sum(differs(judgement, judgement.by_validation) for judgement in judgements)
    accuracies = [judgement for judgement in judgements if judgement.by_accuracy]
    by_accuracy = sum(differs(judgement, judgement.by_accuracy) for judgement in accuracies)
    if not judgements:
        return []
    return [
        f"The studies have {len(judgements)} verdicts by the test loss. By the validation loss {by_validation} of them "
        f"are different. By the accuracy {by_accuracy} of {len(accuracies)} are different. The tables of the studies "
        "have these verdicts."
    ]


def _once(studies: list[Judged]) -> Iterator[tuple[tuple[str, str], str]]:
    """Yield the verdicts of `_counts`, each with its network and its question, a key of `QUESTIONS`.

    Several studies may judge a method in the same layers of the same network. Then only the one with the most seeds
    counts. Random masks do not count: they are there to compare with.
    """
    found: dict[tuple[str, Hashable, str], Judgement] = {}
    for one in studies:
        for judgement in one.judgements:
            claim = judgement.claim
            if one.failed or claim.first.startswith("random") or not effects.kind(judgement.verdict):
                continue
            for question, (kind, second) in QUESTIONS.items():
                if claim.kind == kind and claim.second.startswith(second):
                    key = (one.gate.network, recipe_of(one.study, one.arms[claim.first].changes), question)
                    if key not in found or judgement.seeds > found[key].seeds:
                        found[key] = judgement
    return (((network, question), judgement.verdict) for (network, _, question), judgement in found.items())


def _networks(studies: list[Judged], results: Path) -> list[str]:
    """Return a paragraph for each network: what it and simple methods reach, and which studies do not pass their gate.

    Args:
      studies: The studies that are judged.
      results: The folder of the results.
    """
    of_network: dict[str, list[Judged]] = {}
    for one in studies:
        of_network.setdefault(one.gate.network, []).append(one)
    parts = []
    for network, ones in of_network.items():
        gate, scores = ones[0].gate, sorted({dense(one) for one in ones} - {""})
        metric = "an accuracy" if gate.metric == "accuracy" else "a loss"
        spread = " to ".join(dict.fromkeys((scores[0], scores[-1]))) if scores else ""
        reaches = f"Dense training reaches {metric} of {spread}, " if scores else ""
        count = "one study" if len(ones) == 1 else f"{len(ones)} studies"
        failed = "; ".join(f"`{one.name}` does not pass: {one.failed}" for one in ones if one.failed)
        passed = "It passes its gate" if len(ones) == 1 else "All pass their gate"
        parts.append(
            f"**{network}**, {count}, {_devices(ones)}. {reaches}{', '.join(simple_methods(gate, results))}. "
            f"{failed or passed}. The margin is {gate.margin:g} {gate.unit}.{_scale(ones)}"
        )
    return parts


def _devices(studies: list[Judged]) -> str:
    """Return in words on what the runs of studies were made."""
    devices = dict.fromkeys(line["devices"] for one in studies for line in one.lines)
    return "run on " + " and ".join("a CPU" if name == "1 x cpu" else name for name in devices)


def _scale(studies: list[Judged]) -> str:
    """Return sentences on what a difference is worth: what narrower dense networks add to the loss."""
    narrower = {}
    for one in studies:
        base = one.arms["dense"].flops
        for name, effect in one.over_dense.items():
            if name == methods.HALF or name.startswith("narrower dense"):
                narrower.setdefault(f"{one.arms[name].flops / base:.2f}", f"{interval(effect, 4)}")
    shown = dict(sorted(narrower.items())[:2])  # those with the fewest FLOPs
    parts = [f"with {share} of the FLOPs {more}" for share, more in shown.items()]
    return f" The loss of narrower dense networks minus that of dense is: {', '.join(parts)}." if parts else ""
