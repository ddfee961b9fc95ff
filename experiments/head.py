"""The head of REPRODUCTION.md: how many sparse methods are as good as dense training, and the main claims."""

import functools
import re
from collections.abc import Callable, Hashable
from pathlib import Path

from experiments.claims import Judged, Judgement, judged, recipe_of
from experiments.errors import Mistake
from experiments.evidence import HEAD, dense, differs, done, has_gate_runs, interval, seeds, simple_methods
from experiments.report import effects
from experiments.report.words import markdown_table
from experiments.studies import ABOUT, STUDIES, methods

QUESTIONS = {  # what a sparse method is: the kind of the claim, and how the name of the second arm begins
    "as good as dense": ("as good as", "dense"),
    "better than narrower dense": ("better than", "narrower dense"),
    "better than shorter dense": ("better than", "shorter dense"),
}
OTHERWISE = "verdict by another score, if it differs"


def counts(results: Path) -> str:
    """Return the table of the networks: what dense training reaches, and how many sparse methods are as good or better.

    Args:
      results: The folder of the results.
    """
    studies = _judged(results)
    verdicts = _once(studies)
    rows = [["network", "dense training", "a simple method", *QUESTIONS]]
    for network, ones in _networks(studies).items():
        cells = [_counted(verdicts.get((network, question), [])) for question in QUESTIONS]
        rows.append([network, _spread(ones), next(reversed(simple_methods(ones[0].gate, results)), ""), *cells])
    return markdown_table(rows)


def _counted(verdicts: list[str]) -> str:
    """Return how many claims hold, and in brackets the other verdicts.

    >>> _counted(["holds", "undecided", "holds", "does not hold: worse"])
    '2 of 4 (1 worse, 1 undecided)'
    >>> _counted(["holds"]), _counted([])
    ('1 of 1', 'not compared')
    """
    if not verdicts:
        return "not compared"
    number = {kind: sum(effects.kind(verdict) == kind for verdict in verdicts) for kind in effects.KINDS}
    others = [f"{count} {kind}" for kind, count in number.items() if count and kind != effects.HOLDS]
    return f"{number[effects.HOLDS]} of {len(verdicts)}" + (f" ({', '.join(others)})" if others else "")


def networks(results: Path) -> str:
    """Return paragraphs on the networks and their gates, and how many verdicts would be others by other scores.

    Args:
      results: The folder of the results.
    """
    studies = _judged(results)
    parts = [_network(name, ones) for name, ones in _networks(studies).items()]
    return "\n\n".join([*parts, *_otherwise(studies)])


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
        rows += [_row(judgement, one) for judgement in one.judgements if judgement.claim.about]
    head = ["config or paper", "network", *HEAD[:3], OTHERWISE, "seeds", "gate"]
    known = [*_networks(found)]
    rows.sort(key=lambda row: (ABOUT.index(row[0]), known.index(row[1])))
    parts = [markdown_table([head, *rows])]
    if begun:
        parts.append(f"Not finished: {', '.join(begun)}.")
    if missing := [f"`{name}`" for name in STUDIES if name not in {one.name for one in found}]:
        parts.append(
            f"Not run yet: {', '.join(missing)}. The files of [experiments/studies](studies) have their claims."
        )
    return "\n\n".join(parts)


def asked(text: str, results: Path, section: Callable[[str], str]) -> str:
    """Return the table of the claims that a block asks for.

    Args:
      text: The lines of the block: questions, and studies with a regular expression of their claims.
      results: The folder of the results.
      section: Returns the address of the section of a study.

    Raises:
      Mistake: If the study has no such claim.
    """
    rows, question, of = [], "", functools.cache(lambda name: judged(name, results))
    for line in text.strip().splitlines():
        name, colon, claim = line.partition(": ")
        if not colon:
            question = line
            continue
        one = of(name)
        found = [judgement for judgement in one.judgements if re.fullmatch(claim, judgement.claim.text)]
        if not found:
            raise Mistake(f"{name} has no claim {claim!r}. Its claims are in experiments/studies.")
        for judgement in found:
            _, network, *cells, _ = _row(judgement, one)
            rows.append([question, f"[{network}]({section(name)})", *cells])
            question = ""
    table = [["question", "network", *HEAD[:3], OTHERWISE, "seeds"], *rows]
    return markdown_table(table if any(row[0] for row in rows) else [row[1:] for row in table])


def _row(judgement: Judgement, one: Judged) -> list[str]:
    """Return the row of a main claim."""
    by = {"accuracy": judgement.by_accuracy, "validation loss": judgement.by_validation}
    others = [f"{verdict} ({name})" for name, verdict in by.items() if differs(judgement, verdict)]
    passed = "not passed" if one.failed else "passed"
    shown = [judgement.claim.text, judgement.verdict, interval(judgement.loss, 4), "; ".join(others)]
    return [judgement.claim.about, one.gate.network, *shown, seeds(judgement, one), passed]


def _with_results(results: Path) -> list[Judged]:
    return [judged(name, results) for name in STUDIES if (results / f"{name}.jsonl").exists()]


def _judged(results: Path) -> list[Judged]:
    """Return the studies that have the runs of their gates."""
    return [one for one in _with_results(results) if has_gate_runs(one)]


def _networks(studies: list[Judged]) -> dict[str, list[Judged]]:
    """Return the studies by their networks."""
    found: dict[str, list[Judged]] = {}
    for one in studies:
        found.setdefault(one.gate.network, []).append(one)
    return found


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


def _once(studies: list[Judged]) -> dict[tuple[str, str], list[str]]:
    """Return the verdicts that are counted, by their network and their question, a key of `QUESTIONS`.

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
    verdicts: dict[tuple[str, str], list[str]] = {}
    for (network, _, question), judgement in found.items():
        verdicts.setdefault((network, question), []).append(judgement.verdict)
    return verdicts


def _network(name: str, studies: list[Judged]) -> str:
    """Return a paragraph on the studies of a network: their devices, gates and margin."""
    count = "one study" if len(studies) == 1 else f"{len(studies)} studies"
    failed = "; ".join(f"`{one.name}` does not pass: {one.failed}" for one in studies if one.failed)
    passed = "It passes its gate" if len(studies) == 1 else "All pass their gate"
    gate = studies[0].gate
    margin = f"The margin is {gate.margin:g} {gate.unit}."
    return f"**{name}**, {count}, {_devices(studies)}. {failed or passed}. {margin}{_scale(studies)}"


def _spread(studies: list[Judged]) -> str:
    """Return what dense training reaches in studies, as text: the lowest and the highest score."""
    scores = sorted({dense(one) for one in studies} - {""})
    return " to ".join(dict.fromkeys((scores[0], scores[-1]))) if scores else ""


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
    parts = [f"{more} with {share} of the FLOPs" for share, more in shown.items()]
    return f" The loss of a narrower dense network minus that of dense is {' and '.join(parts)}." if parts else ""
