"""The head of REPRODUCTION.md: how many claims hold, what the networks reach, and the table of the main claims."""

from collections.abc import Hashable, Iterator
from pathlib import Path

from experiments.claims import Judged, Judgement, judged, recipe_of
from experiments.evidence import HEAD, cells, dense, done, has_gate_runs, interval, simple_methods
from experiments.report import effects
from experiments.report.words import markdown_table
from experiments.studies import STUDIES, methods

QUESTIONS = {  # what a sparse method is: the kind of the claim, and how the name of the second arm begins
    "as good as dense training": ("as good as", "dense"),
    "better than a narrower dense network": ("better than", "narrower dense"),
    "better than a shorter dense run": ("better than", "shorter dense"),
}
VERDICTS = ("holds", "does not hold", effects.OPEN)


def summary(results: Path) -> str:
    """Return a table of how many claims hold, and what the networks reach.

    Args:
      results: The folder of the results.
    """
    studies = [one for one in _with_results(results) if has_gate_runs(one)]
    return "\n\n".join([*_counts(studies), *_networks(studies, results)])


def main_claims(results: Path) -> str:
    """Return the table of the main claims of all studies, and which studies are not in it.

    Args:
      results: The folder of the results.
    """
    head, rows, begun, found = ["network", *HEAD[:4], "seeds"], [], [], _with_results(results)
    for one in found:
        if not has_gate_runs(one):
            begun.append(f"`{one.name}` ({done(one)})")
            continue
        for judgement in one.judgements:
            if judgement.claim.first_screen:
                *shown, _, seeds = cells(judgement, one)
                rows.append([one.gate.network, *shown, seeds])
    networks = list(dict.fromkeys(row[0] for row in rows))
    parts = [markdown_table([head, *sorted(rows, key=lambda row: networks.index(row[0]))])]
    if begun:
        parts.append(f"Not finished, and not judged yet: {', '.join(begun)}.")
    if missing := [f"`{name}`" for name in STUDIES if name not in {one.name for one in found}]:
        parts.append(
            f"Not run yet: {', '.join(missing)}. The files of [experiments/studies](studies) have their claims."
        )
    return "\n\n".join(parts)


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
    rows = [["network", "a sparse method is", *VERDICTS]]
    for (network, question), found in verdicts.items():
        number = lambda start, found=found: sum(verdict.startswith(start) for verdict in found)
        held, failed, undecided = (number(start) for start in VERDICTS)
        worse = "" if QUESTIONS[question][0] == "as good as" else f" ({number(effects.WORSE)} worse)"
        if found:
            rows.append([network, question, f"{held}", f"{failed}{worse if failed else ''}", f"{undecided}"])
    return [markdown_table(rows)] if rows[1:] else []


def _once(studies: list[Judged]) -> Iterator[tuple[tuple[str, str], str]]:
    """Yield the verdicts of `_counts`, each with its network and its question, a key of `QUESTIONS`.

    Several studies may judge a method in the same layers of the same network. Then only the one with the most seeds
    counts. Random masks do not count: they are there to compare with.
    """
    found: dict[tuple[str, Hashable, str], Judgement] = {}
    for one in studies:
        for judgement in one.judgements:
            claim = judgement.claim
            if one.failed or claim.first.startswith("random") or not judgement.verdict.startswith(VERDICTS):
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
        halves = [one.over_dense[methods.HALF] for one in ones if methods.HALF in one.over_dense]
        scale = f" Half the width adds {interval(halves[0], 4)} to the loss of dense training." if halves else ""
        parts.append(
            f"**{network}**, {count}. {reaches}{', '.join(simple_methods(gate, results))}. {failed or passed}. "
            f"The margin is {gate.margin:g} {gate.unit}.{scale}"
        )
    return parts
