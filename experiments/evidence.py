"""The tables and pictures of studies with claims: of each study, and of all studies together."""

import functools
import math
import re
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

import numpy as np

import nmjax as nm
from experiments.claims import POINTS, Judged, Judgement, judged, mean, recipe_of, score, simple
from experiments.errors import Mistake
from experiments.recorded import study
from experiments.report import curves as cv, effects
from experiments.report.effects import Effect
from experiments.report.words import markdown_table, percent, signed
from experiments.studies import ABOUT, RATE, STUDIES, Claim, SanityCheck, methods, seeds_of

HEAD = [
    "claim", "verdict by the loss", "difference of the loss, 95 % interval",
    "verdict by the accuracy", "difference of the accuracy, points",
    "validation loss, if its verdict differs", "seeds",
]  # fmt: skip
MATCHES = "as good as dense"
QUESTIONS = {  # what a sparse method is: the kind of the claim, and how the name of the second config begins
    MATCHES: ("as good as", "dense"),
    "better than narrower dense": ("better than", "narrower dense"),
    "better than shorter dense": ("better than", "shorter dense"),
}
PRUNED = {  # what a sparse config prunes, and what its line in the first table says
    "2:4 weights": "match dense, with 2:4 weights",
    "sparser weights": "match dense, with 1:4 to 1:64 weights",
    "others": "match dense, with pruned gradients or activations",
}
BETTER = {
    "better than narrower dense": "better than a narrower dense network",
    "better than shorter dense": "better than a shorter dense run",
}
RESULTS = {  # a verdict in a word or two
    "as good as": {effects.HOLDS: "matches", effects.SLIGHTLY: "matches, slightly worse"},
    "better than": {effects.HOLDS: "better", effects.SMALL: "slightly better", effects.NO_DIFFERENCE: "no difference"},
}
LINE = ["compared", "network", "loss minus the other's, 95 % interval", "seeds", "result"]
BASELINE = re.compile(", (inference )?FLOPs of “.*”")  # in the name of a dense baseline: of what it has the FLOPs
ELSE = "†"  # after a result that is another one by another score

LEGEND = {  # the words of the tables
    "Config": "one setup that is trained with several seeds: a method, or dense training with a given width and number "
    "of steps. Narrower dense networks and shorter dense runs have about the same FLOPs as a sparse method.",
    "Loss and accuracy": "those of the hardened network, which is the one that is used after training, on test data. "
    "The loss is the cross-entropy in nats; for text, in nats a byte. A lower loss is better.",
    "Difference": "the first config minus the second, with its 95 % interval. The interval says how uncertain the mean "
    "over the seeds is. The test data is always the same.",
    "Margin": "the largest difference that does not matter. Each study says what it is.",
    "As good as": "“holds” if a test shows that the first config is better, or worse by less than the margin. “Does "
    "not hold: worse” if a test shows that it is worse by more than the margin.",
    "Better than": "“holds” if a test shows that the first config is better. “Does not hold: worse” if a test shows "
    "that it is worse. “No difference that matters” if the interval contains 0 and lies within ± the margin.",
    "By less than the margin": "a test finds a difference, but the whole interval lies within ± the margin. For “as "
    "good as”: the whole interval is on the worse side of 0.",
    "Undecided": "none of these. p-values are corrected for the number of claims, and intervals are not. So a claim "
    "can be undecided although its interval excludes 0, or lies within ± the margin. “No difference that matters” is "
    "not corrected either, so some of these verdicts may be chance.",
    "FLOPs, time and memory": "shares of dense. FLOPs are counted. For the time, the steps of all configs are measured "
    "in turn, and the share is the median of several rounds. A step of a shorter dense run counts as a step of dense. "
    "The temporary memory is what a step needs besides its arguments and results.",
}


def legend() -> str:
    """Return an explanation of the words of the tables in Markdown."""
    return "\n".join(f"- **{term}**: {text}" for term, text in LEGEND.items())


def has_check_runs(one: Judged) -> bool:
    """Return whether a study is judged: the configs of its sanity check have two runs each.

    A study with a search is judged when all its runs are done.
    """
    if one.search:
        return not any(missing(one, name) for name in one.groups)
    return all(len(one.groups[name].losses) + len(one.groups[name].lost) > 1 for name in ("dense", one.check.worse))


def missing(one: Judged, name: str) -> list[int]:
    """Return the seeds of a config of a study whose runs are missing."""
    group = one.groups[name]
    return [seed for seed in seeds_of(name, one.check, one.seeds) if seed not in group.losses | group.lost]


def done(one: Judged) -> str:
    """Return in words how many runs of a study are done."""
    runs = sum(len(group.losses) + len(group.lost) for group in one.groups.values())
    return f"{runs} of {sum(len(seeds_of(name, one.check, one.seeds)) for name in one.groups)} runs"


def dense(one: Judged) -> str:
    """Return what the dense network reaches, as text."""
    value = mean(one.groups["dense"], one.check.metric, one.seeds)
    return "" if math.isnan(value) else score(one.check, value)


def simple_methods(check: SanityCheck, results: Path) -> list[str]:
    """Return what simple methods reach on the data of a sanity check, as texts: the best is the last."""
    names = {"ridge": "ridge regression", "nearest": "k nearest neighbours", "bag of words": "naive Bayes"}
    scores = sorted(simple(check.data, results).items(), key=lambda each: each[1], reverse=check.metric == "loss")
    return [f"{names.get(method, f'a table of {method}s')} {score(check, value)}" for method, value in scores]


def reached(one: Judged, results: Path) -> str:
    """Return sentences on what the dense network and simple methods reach, on the sanity check and on the margin."""
    passed = f"The study passes its sanity check: “{one.check.worse}” minus dense is {interval(one.harm, 4)}."
    outcome = f"The study does not pass its sanity check: {one.failed}." if one.failed else passed
    outcome += f" The margin is {one.check.margin:g} {one.check.unit}, or {100 * POINTS:g} points."
    if not one.groups["dense"].losses:
        return f"`{one.name}` ({one.check.network}). {outcome}"
    others = ", ".join(simple_methods(one.check, results))
    numbers = f"seeds {one.seeds[0]} to {one.seeds[-1]}"
    return (
        f"`{one.name}` ({one.check.network}, {numbers}): the dense network reaches {dense(one)} ({others}). {outcome}"
    )


def claim_rows(one: Judged) -> list[list[str]]:
    """Return the rows of the table of all claims of a study; the first is its head."""
    rows = [HEAD]
    for judgement in one.judgements:
        difference, verdict = judgement.differences.get, judgement.verdicts.get
        other = f"{verdict('validation loss')}, {interval(difference('validation loss'), 4)}"
        rows.append([
            judgement.claim.text,
            judgement.verdict,
            interval(difference("loss"), 4),
            verdict("accuracy", ""),
            interval(difference("accuracy"), 2, 100.0),
            other if differs(judgement, "validation loss") else "",
            seeds(judgement, one),
        ])  # fmt: skip
    return rows


def differs(judgement: Judgement, score: str) -> bool:
    """Return whether the verdict by a score differs from that by the loss. Both have to be verdicts."""
    both = judgement.verdicts.get(score, ""), judgement.verdict
    return all(map(effects.kind, both)) and effects.plain(both[0]) != effects.plain(both[1])


def seeds(judgement: Judgement, one: Judged) -> str:
    """Return the number of seeds of a claim as text."""
    return f"{judgement.seeds}" if judgement.seeds == len(one.seeds) else f"{judgement.seeds} of {len(one.seeds)}"


def interval(effect: Effect | None, digits: int, factor: float = 1.0) -> str:
    """Return a difference with its 95 % interval as text."""
    if effect is None:
        return ""
    low, high = effect.interval()
    number = lambda value: f"{round(factor * value, 9) + 0.0:+.{digits}f}"  # so that every machine rounds 0.035 alike
    return f"{number(effect.difference)} [{number(low)}, {number(high)}]"


def config_rows(one: Judged) -> list[list[str]]:
    """Return the rows of the table of the configs, what they reach and what they cost; the first is its head."""
    head = ["config", "loss", "accuracy %", "FLOPs", "time of all steps", "temporary memory", "runs", "remarks"]
    rows, base = [head], one.groups["dense"]
    for name, group in one.groups.items():
        left, wanted = missing(one, name), seeds_of(name, one.check, one.seeds)
        reaches = [mean(group, score, one.seeds) for score in ("loss", "accuracy")]
        marks = [f"seed {seed} {outcome}" for seed, outcome in group.lost.items()]
        marks += [f"seeds missing: {', '.join(map(str, left))}"] if left else []
        shares = [
            value / of for value, of in ((group.flops, base.flops), (group.time, base.time), (group.bytes, base.bytes))
        ]
        rows.append([
            name,
            "" if math.isnan(reaches[0]) else f"{reaches[0]:.4f}",
            "" if math.isnan(reaches[1]) else f"{100 * reaches[1]:.2f}",
            *("" if math.isnan(share) else f"{share:.2f}" for share in shares),
            f"{len({*group.losses} & {*wanted})} of {len(wanted)}",
            "; ".join(marks),
        ])  # fmt: skip
    filled = [any(cells) for cells in zip(*rows[1:], strict=True)]
    return [[cell for cell, keep in zip(row, filled, strict=True) if keep] for row in rows]


def search_rows(one: Judged) -> list[list[str]]:
    """Return the rows of the table of the search of a study: mean validation losses; the first row is its head."""
    rates = one.study.design.search.rates
    rows = [["validation loss in the search", *(f"rate {rate:g}" for rate in rates), "chosen"]]
    for name, losses in one.search.items():
        rows.append([name, *(f"{losses[rate]:.4f}" for rate in rates), f"{one.groups[name].changes[RATE]:g}"])
    return rows


def width_rows(one: Judged) -> list[list[str]]:
    """Return the rows of the table of dense networks as good as sparse ones, by their width; the first is its head.

    A dense network between two widths is taken to have a loss on the line between theirs, along the logarithm of the
    width. At the narrowest and the widest network the search ends, and says so with ≤ and ≥.
    """
    own = one.study.design.config.model.width
    width = lambda name: one.groups[name].changes.get("model.width", own)
    dense = [name for name, group in one.groups.items() if name == "dense" or kind_of(group.changes) == "narrower"]
    sparse = [name for name in one.groups if name not in (*dense, one.check.worse)]
    seeds = [seed for seed in one.seeds if all(seed in one.groups[name].losses for name in (*dense, *sparse))]
    losses = lambda name: [one.groups[name].losses[seed] for seed in seeds]
    dense.sort(key=width)
    rows = [["sparse config", "its width", "width of a dense network with its loss, 95 % interval"]]
    for name in sparse if len(seeds) > 1 else []:
        found = effects.crossing([math.log(width(each)) for each in dense], list(map(losses, dense)), losses(name))
        ends = {math.log(width(dense[0])): "≤ ", math.log(width(dense[-1])): "≥ "}
        where, low, high = (f"{ends.get(each, '')}{math.exp(each):.0f}" for each in found)
        rows.append([name, f"{width(name)}", f"{where} [{low}, {high}]"])
    return rows


# ---- pictures ----

COLOURS = {"sparse": "s1", "narrower": "s0", "shorter": "s3", "yours": "s4"}
COSTS = {
    "flops": "effective FLOPs of the run, as a share of dense",
    "time": "time of all steps, as a share of dense",
    "bytes": "temporary memory of a step, as a share of dense",
}


def frontier(one: Judged, cost: str, yours: str = "") -> str:
    """Return the picture of what the configs reach and cost: the sparse ones, narrower ones and shorter ones.

    Args:
      one: The study.
      cost: A key of `COSTS`.
      yours: The name of a config with a colour of its own.
    """
    points: dict[str, list[cv.Point]] = {"sparse": [], "narrower": [], "shorter": []}
    for line in ("narrower", "shorter"):
        points[line].append(cv.Point("dense", 1.0, 0.0, None, COLOURS[line]))
    for name, effect in one.over_dense.items():
        group = one.groups[name]
        kind = kind_of(group.changes)
        share = getattr(group, cost) / getattr(one.groups["dense"], cost)
        if not math.isnan(share):
            low, high = effect.interval()
            colour = COLOURS["yours" if name == yours else kind]
            points[kind].append(cv.Point(BASELINE.sub("", name), share, effect.difference, (high - low) / 2, colour))
    up = f"difference of the loss from dense, {one.check.unit}, with 95 % intervals"
    named = {kind if kind in ("sparse", "yours") else f"dense, {kind}": colour for kind, colour in COLOURS.items()}
    return cv.frontier(
        f"{one.name}-{cost}", points["sparse"], [points["narrower"], points["shorter"]],
        alt=f"{up}, by {COSTS[cost]}.", along=COSTS[cost], up=up, say=signed, best=min,
        keys={name: colour for name, colour in named.items() if name != "yours" or yours},
    )  # fmt: skip


def kind_of(changes: dict[str, Any]) -> str:
    """Return "sparse", "narrower" or "shorter" for what a config changes. A narrower network may change its steps too.

    >>> kind_of({"sparsity.blocks": "ste(2,4)", "steps": 10})
    'sparse'
    >>> kind_of({"model.width": 14, "steps": 10}), kind_of({"steps": 9})
    ('narrower', 'shorter')
    """
    for kind, group in (("sparse", "sparsity."), ("narrower", "model.")):
        if any(field.startswith(group) for field in changes):
            return kind
    return "shorter"


def costs(one: Judged) -> list[str]:
    """Return the keys of `COSTS` by which configs can be drawn: those that are known of dense."""
    base = one.groups["dense"]
    return [cost for cost in COSTS if one.over_dense and not math.isnan(getattr(base, cost))]


FLIPS = "Share of a mask that changes at a step: mean of the layers, with the range of the seeds"


def flips(one: Judged) -> str:
    """Return the picture of the flip rates of the sparse configs over the steps, or "" if no run measured a flip."""
    curve = lambda run: cv.Curve("", np.array(run["step"]), np.array(run["flip_rate"]))
    shown = {name: group for name, group in one.groups.items() if group.flips and not _held(group.changes)}
    found = {name: [curve(run) for run in group.flips] for name, group in shown.items()}
    if not found:
        return ""
    style = lambda n: {"colour": f"s{n % 8}", "dash": "-" if n < 8 else "--"}
    drawn = [cv.banded(curves, group, **style(n)) for n, (group, curves) in enumerate(found.items())]
    return cv.draw(
        f"{one.name}-flips",
        drawn,
        alt=f"{FLIPS}.",
        up="share of a mask that changes at a step",
        say=percent,
        bounds=(0,),
        wide=True,
    )


def _held(changes: dict[str, Any]) -> bool:
    """Return whether masks are held. Then flips happen at some steps only, and they are measured at a few steps."""
    return any(word in str(value) for value in changes.values() for word in ("hold(", "fst("))


def section(name: str, results: Path) -> tuple[list[str], dict[str, str]]:
    """Return the paragraphs of a study, and its pictures as SVG by their names."""
    one = judged(name, results)
    if not has_check_runs(one):
        enough = "all are done" if one.search else f"dense and “{one.check.worse}” have two runs each"
        return [f"Not finished: {done(one)} are done. The study is judged when {enough}."], {}
    pictures = {f"{name}_{cost}": cv.standalone(frontier(one, cost)) for cost in costs(one)}
    words = "Difference of the loss from dense, by"
    parts = [f"![{words} {COSTS[cost]}](results/{name}_{cost}.svg)" for cost in costs(one)]
    if drawn := flips(one):
        pictures[f"{name}_flips"] = cv.standalone(drawn)
        parts.append(f"![{FLIPS}](results/{name}_flips.svg)")
    tables = [claim_rows(one), config_rows(one), *([width_rows(one), search_rows(one)] if one.search else [])]
    parts += [reached(one, results), *map(markdown_table, tables), *remarks(one, results)]
    return parts, pictures


def remarks(one: Judged, results: Path) -> list[str]:
    """Return what a reader of the results should know: what is not shown, and which runs another machine made."""
    found = []
    drawn = [name for name, group in one.groups.items() if not group.hardened]
    if drawn:
        found.append(
            f"Configs without a hardened network: {'; '.join(drawn)}. They draw weights or activations at random. "
            "Their loss is that of the network in training."
        )
    for groups in dict.fromkeys(map(tuple, one.scattered.values())):
        scores = ", by the ".join(score for score, theirs in one.scattered.items() if tuple(theirs) == groups)
        scores = re.sub(r"^loss", "test loss", scores)
        found.append(
            f"Configs whose runs scatter much more than those of others, by the {scores}, so that each has its own "
            f"variance: {'; '.join(groups)}."
        )
    if math.isnan(one.groups["dense"].time):
        timed = study(f"times_{one.name.rpartition('_')[2]}")
        found.append(f"The times of this study have not been measured. Measure them with: `{timed.command}`.")
    few = [group for group in one.groups if group not in (*one.over_dense, "dense", one.check.worse)]
    if few:
        found.append(f"Not in the pictures, because fewer than two seeds were run: {', '.join(few)}.")
    path = results / f"{one.name}.jsonl"
    repeated = sum(bool(text.strip()) for text in path.read_text().splitlines()) - len(one.lines)
    if repeated:
        found.append(f"Lines of runs that were repeated: {repeated}. The last line of each run counts.")
    dirty = sum((line.get("git") or {}).get("dirty", False) for line in one.lines)
    if dirty:
        found.append(f"Runs with uncommitted code: {dirty}.")
    made = [{"devices": line["devices"]} | (line.get("machine") or {}) | line["versions"] for line in one.lines]
    for field in dict.fromkeys(field for each in made for field in each):
        kinds = dict.fromkeys(str(each.get(field, "not recorded")) for each in made)
        if len(kinds) > 1:
            found.append(f"The runs differ in {field}: {' and '.join(kinds)}.")
    return [*found, *(f"Note: {note}." for note in dict.fromkeys(note for line in one.lines for note in line["notes"]))]


# ---- all studies together ----


def counts(results: Path) -> str:
    """Return the first table: what dense training reaches in each network, and how many sparse methods match it.

    Args:
      results: The folder of the results.
    """
    studies = _judged(results)
    found, networks = _once(studies), _networks(studies)
    rows = [["", *map(_short_network, networks)], ["data", *(name.partition(", ")[2] for name in networks)]]
    rows.append(["dense training reaches", *map(_spread, networks.values())])
    for kind, title in PRUNED.items():
        of = lambda name, kind=kind: [verdict for what, verdict in found.get((name, MATCHES), []) if what == kind]
        rows.append([title, *(_counted(of(name)) for name in networks)])
    rows.insert(4, ["a random 2:4 mask that never changes", *(_random(ones) for ones in networks.values())])
    for question, title in BETTER.items():
        rows.append([title, *(_counted([v for _, v in found.get((name, question), [])]) for name in networks)])
    return markdown_table(rows)


def _random(studies: list[Judged]) -> str:
    """Return how a random 2:4 mask that never changes compares with dense training, in a word."""
    found = [(one, each) for one in studies for each in one.judgements if each.claim.first == "random 2:4 mask"]
    found = [(one, each) for one, each in found if each.claim.second == "dense" and effects.kind(each.verdict)]
    results = [line(judgement, one)[-1] for one, judgement in found]
    return results[0] if results else "–"


def _short_network(name: str) -> str:
    return name.partition(",")[0]


def _counted(verdicts: list[str]) -> str:
    """Return how many claims hold.

    >>> _counted(["holds", "undecided", "holds", "does not hold: worse"]), _counted([])
    ('2 of 4', '–')
    """
    held = sum(effects.kind(verdict) == effects.HOLDS for verdict in verdicts)
    return f"{held} of {len(verdicts)}" if verdicts else "–"


def pruned(recipe: nm.Recipe) -> str:
    """Return what a recipe prunes, a key of `PRUNED`.

    >>> pruned(nm.Recipe({"mlp": "ste(2,4); dw_g=mvue(1,4)"})), pruned(nm.Recipe({".*": "mdgf(1,8,linear(1,0,9))"}))
    ('2:4 weights', 'sparser weights')
    >>> pruned(nm.Recipe({".*": "dw_g=mvue(2,4)"}))
    'others'
    """
    weights = [str(sparsity.y_w) for _, sparsity in recipe.rules]
    patterns = [(int(n), int(m)) for text in weights for n, m in re.findall(r"\((\d+),(\d+)", text)]
    if not patterns:
        return "others"
    return "2:4 weights" if all(2 * n == m for n, m in patterns) else "sparser weights"


def networks(results: Path) -> str:
    """Return paragraphs on the networks and their sanity checks, and how many verdicts would be others by other scores.

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
        if not has_check_runs(one):
            begun.append(f"`{one.name}` ({done(one)})")
            continue
        if any(missing(one, name) for name in one.groups):
            begun.append(f"`{one.name}` ({done(one)}; its claims with all runs are judged)")
        rows += [(one, judgement) for judgement in one.judgements if judgement.claim.about]
    known = [*_networks(found)]
    rows.sort(key=lambda row: (ABOUT.index(row[1].claim.about), known.index(row[0].check.network)))
    of = [judgement.claim.about for _, judgement in rows]
    named = ["" if n and about == of[n - 1] else about for n, about in enumerate(of)]
    lines = [[about, *line(judgement, one)] for about, (one, judgement) in zip(named, rows, strict=True)]
    parts = [markdown_table([["config or paper", *LINE], *lines])]
    if begun:
        parts.append(f"Not finished: {', '.join(begun)}.")
    if left := [f"`{name}`" for name in STUDIES if name not in {one.name for one in found}]:
        parts.append(f"Not run yet: {', '.join(left)}. The files of [experiments/studies](studies) have their claims.")
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
    for asked_for in text.strip().splitlines():
        name, colon, claim = asked_for.partition(": ")
        if not colon:
            question = asked_for
            continue
        one = of(name)
        found = [judgement for judgement in one.judgements if re.fullmatch(claim, judgement.claim.text)]
        if not found:
            raise Mistake(f"{name} has no claim {claim!r}. Its claims are in experiments/studies.")
        for judgement in found:
            names, network, *cells = line(judgement, one)
            rows.append([question, names, f"[{network}]({section(name)})", *cells])
            question = ""
    table = [["question", *LINE], *rows]
    return markdown_table(table if any(row[0] for row in rows) else [row[1:] for row in table])


def line(judgement: Judgement, one: Judged) -> list[str]:
    """Return a claim in one short row: what is compared, where, the difference of the loss, the seeds, the result."""
    by, claim = judgement.verdicts, judgement.claim
    result = RESULTS[claim.kind].get(judgement.verdict, effects.plain(judgement.verdict))
    result += f" {ELSE}" if any(differs(judgement, score) for score in by) else ""
    difference = interval(judgement.differences.get("loss"), 3)
    return [compared(claim), _short_network(one.check.network), difference, seeds(judgement, one), result]


def compared(claim: Claim) -> str:
    """Return what a claim compares, in few words.

    >>> compared(Claim("", "S-STE + MVUE(dw)", "as good as", "dense"))
    'S-STE 2:4 + MVUE(dw) vs dense'
    >>> text = "MdGf is better than a network that has slightly more FLOPs (feed-forward layers)"
    >>> compared(Claim(text, "MdGf 1:16", "better than", "narrower dense, FLOPs of “MdGf 1:16”"))
    'MdGf 1:16 vs narrower dense, which has slightly more FLOPs (feed-forward layers)'
    """
    sides = [_with_pattern(BASELINE.sub("", name)) for name in (claim.first, claim.second)]
    more = ", which has slightly more FLOPs" if "slightly more FLOPs" in claim.text else ""
    more += ", which has fewer FLOPs" if ", with more FLOPs," in claim.text else ""
    layers = re.search("queries|feed-forward layers", re.sub("narrower feed-forward layers", "", claim.text))
    where = {"queries": " (queries, keys, feed-forward)", "feed-forward layers": " (feed-forward layers)"}
    return f"{' vs '.join(sides)}{more}{where[layers[0]] if layers else ''}"


def _with_pattern(name: str) -> str:
    """Return the name of a config with its pattern, which is 2:4 if the name has none."""
    if re.search(r"\d:\d", name) or re.match("((narrower|narrowest|shorter) )?dense", name):
        return name
    return re.sub("^[^ ,]+", lambda word: f"{word[0]} 2:4", name)


def _with_results(results: Path) -> list[Judged]:
    return [judged(name, results) for name in STUDIES if (results / f"{name}.jsonl").exists()]


def _judged(results: Path) -> list[Judged]:
    """Return the studies that have the runs of their sanity checks."""
    return [one for one in _with_results(results) if has_check_runs(one)]


def _networks(studies: list[Judged]) -> dict[str, list[Judged]]:
    """Return the studies by their networks."""
    found: dict[str, list[Judged]] = {}
    for one in studies:
        found.setdefault(one.check.network, []).append(one)
    return found


def _otherwise(studies: list[Judged]) -> list[str]:
    """Return a sentence on how many verdicts would be others by other scores, if there are verdicts."""
    judgements = [judgement for one in studies if not one.failed for judgement in one.judgements]
    judgements = [judgement for judgement in judgements if effects.kind(judgement.verdict)]
    by = lambda score: sum(differs(judgement, score) for judgement in judgements)
    accuracies = sum("accuracy" in judgement.verdicts for judgement in judgements)
    if not judgements:
        return []
    return [
        f"The studies have {len(judgements)} verdicts by the test loss. By the validation loss {by('validation loss')} "
        f"of them are different. By the accuracy {by('accuracy')} of {accuracies} are different. The tables of the "
        "studies have these verdicts."
    ]


def _once(studies: list[Judged]) -> dict[tuple[str, str], list[tuple[str, str]]]:
    """Return the verdicts that are counted, by their network and their question, a key of `QUESTIONS`.

    Several studies may judge a method in the same layers of the same network. Then only the one with the most seeds
    counts. Random masks do not count: they are there to compare with. Each verdict stands behind what its config
    prunes, a key of `PRUNED`.
    """
    found: dict[tuple[str, Hashable, str], Judgement] = {}
    for one in studies:
        for judgement in one.judgements:
            claim = judgement.claim
            if one.failed or claim.first.startswith("random") or not effects.kind(judgement.verdict):
                continue
            for question, (kind, second) in QUESTIONS.items():
                if claim.kind == kind and claim.second.startswith(second):
                    key = (one.check.network, recipe_of(one.study, one.groups[claim.first].changes), question)
                    if key not in found or judgement.seeds > found[key].seeds:
                        found[key] = judgement
    verdicts: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for (network, recipe, question), judgement in found.items():
        verdicts.setdefault((network, question), []).append((pruned(recipe), judgement.verdict))
    return verdicts


def _network(name: str, studies: list[Judged]) -> str:
    """Return a paragraph on the studies of a network: their devices, sanity checks and margin."""
    count = "one study" if len(studies) == 1 else f"{len(studies)} studies"
    failed = "; ".join(f"`{one.name}` does not pass: {one.failed}" for one in studies if one.failed)
    passed = "It passes its sanity check" if len(studies) == 1 else "All pass their sanity check"
    check = studies[0].check
    margin = f"The margin is {check.margin:g} {check.unit}."
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
    narrower: dict[float, Effect] = {}  # by the share of the FLOPs
    for one in studies:
        base = one.groups["dense"].flops
        for name, effect in one.over_dense.items():
            share = round(one.groups[name].flops / base, 2)
            if share < 1 and (name == methods.HALF or name.startswith("narrower dense")):
                narrower.setdefault(share, effect)
    if not narrower:
        return ""
    fewest = sorted(narrower)[:2]
    costs = " and ".join(f"{interval(narrower[share], 4)} with {share:.2f} of the FLOPs" for share in fewest)
    said = f" The loss of a narrower dense network minus that of dense is {costs}."
    near = {share: effect.standard_error / (1 - share) for share, effect in narrower.items() if share > 0.5}
    if near:
        surest = min(near, key=near.__getitem__)
        tenth = interval(narrower[surest], 4, 0.1 / (1 - surest))
        said += f" By the one with {surest:.2f}, dense pays {tenth} for 10 % of its FLOPs."
    return said
