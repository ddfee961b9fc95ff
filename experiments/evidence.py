"""The claims of the studies, judged by their results as docs/evidence/method.md says."""

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from experiments.errors import Mistake
from experiments.recorded import Study, read, study
from experiments.report import dots, effects
from experiments.report.effects import Effect
from experiments.report.words import markdown_table
from experiments.studies import Claim, Gate

STUDIES = (
    "recipe_vit_cpu",
    "methods_vit_cpu",
    "methods_gpt_cpu",
    "equal_flops_cpu",
    "equal_flops_qk_cpu",
    "held_vit_cpu",
    "unbiased_vit_cpu",
)  # in the order of the page
POINTS = 0.005  # a difference of accuracy that matters


class Arm(NamedTuple):
    """The runs of an arm.

    Attributes:
      changes: What the arm changes, without the seed.
      losses: The test loss of each finished run by seed, of the hardened network.
      accuracies: The accuracies, if the runs have any.
      flops: The effective FLOPs of a run.
      seconds: The median time of all steps of a run.
      bytes: The median temporary memory of a step.
      lost: The seeds of the runs that did not finish, with their outcomes.
    """

    changes: dict[str, Any]
    losses: dict[int, float]
    accuracies: dict[int, float]
    flops: float
    seconds: float
    bytes: float
    lost: dict[int, str]


class Judgement(NamedTuple):
    """A claim with its verdict, by the loss.

    Attributes:
      claim: The claim.
      verdict: What the loss says.
      loss: The difference of the losses, the first arm minus the second. None if there are too few runs.
      accuracy: The difference of the accuracies. None if there are too few runs, or no accuracies.
      by_accuracy: What the accuracy says; "" if it is None.
      seeds: The number of seeds that both arms have.
    """

    claim: Claim
    verdict: str
    loss: Effect | None
    accuracy: Effect | None
    by_accuracy: str
    seeds: int


class Judged(NamedTuple):
    """A study with its verdicts.

    Attributes:
      name: The name of its results.
      study: The study.
      lines: Its results.
      arms: Its arms by name.
      seeds: The seeds that each arm should have.
      gate: Its gate.
      failed: Why the study does not pass its gate; "" if it passes.
      judgements: The judged claims.
      uneven: The arms whose runs scatter too much to share their variance.
    """

    name: str
    study: Study
    lines: list[dict]
    arms: dict[str, Arm]
    seeds: Sequence[int]
    gate: Gate
    failed: str
    judgements: list[Judgement]
    uneven: list[str]


NOT_RUN = "not run"


def judged(name: str, results: Path) -> Judged:
    """Return a study with its verdicts.

    Args:
      name: The name of its results, such as "recipe_vit_cpu".
      results: The folder of the results.

    Raises:
      Mistake: If the results cannot be read, or are of an arm that the study does not have.
    """
    its_study, path = study(name), results / f"{name}.jsonl"
    module, variant = its_study.module, its_study.variant
    lines = read(path)
    changes, wanted = module.arms(variant), module.seeds(variant)
    by_changes = {str(sorted(of.items())): arm for arm, of in changes.items()}
    runs: dict[str, list[dict]] = {arm: [] for arm in changes}
    for line in lines:
        own = {field: value for field, value in line["changes"].items() if field != "seed"}
        arm = by_changes.get(str(sorted(own.items())))
        if arm is None or line["changes"]["seed"] not in wanted:
            raise Mistake(f"{path} has the run {line['run']}, but the study does not. Remove its line.")
        runs[arm].append(line)
    arms = {arm: arm_of(changes[arm], of) for arm, of in runs.items()}
    gate = module.gate(variant)
    return judge(name, its_study, lines, arms, wanted, gate, module.claims(variant), results)


def arm_of(changes: dict[str, Any], lines: list[dict]) -> Arm:
    """Return the arm of some changes, made of the lines of its runs."""
    done = [line for line in lines if line["outcome"] == "finished"]
    figures = {line["changes"]["seed"]: line["figures"] for line in done}
    of = lambda name: {seed: of.get(f"hardened_{name}", of.get(name)) for seed, of in figures.items() if name in of}
    middle = lambda values: statistics.median(values) if values else math.nan
    measured = [line | line["measured"] for line in done if line.get("measured")]
    return Arm(
        changes,
        of("loss"),
        of("accuracy"),
        middle([line["flops"][1] * line["steps"] for line in done]),
        middle([line["step_seconds"] * line["steps"] for line in measured if "step_seconds" in line]),
        middle([line["step_bytes"] for line in measured if "step_bytes" in line]),
        {line["changes"]["seed"]: line["outcome"] for line in lines if line["outcome"] != "finished"},
    )


def judge(
    name: str, its_study: Study, lines: list[dict], arms: dict[str, Arm], seeds: Sequence[int], gate: Gate,
    claims: list[Claim], results: Path,
) -> Judged:  # fmt: skip
    """Return the study with its verdicts. Arms without a claim do not share in the variance."""
    used = dict.fromkeys(arm for claim in claims for arm in (claim.first, claim.second))
    losses = {arm: {seed: -loss for seed, loss in arms[arm].losses.items()} for arm in used}
    accuracies = {arm: arms[arm].accuracies for arm in used}
    known = [c for c in claims if _comparable(losses, c)]
    by_loss = dict(zip(known, effects.effects(losses, [(c.first, c.second) for c in known]).effects, strict=True))
    scored = [c for c in claims if _comparable(accuracies, c)]
    found = effects.effects(accuracies, [(c.first, c.second) for c in scored]).effects
    by_accuracy = dict(zip(scored, found, strict=True))
    judgements = []
    for claim in claims:
        loss, accuracy = by_loss.get(claim), by_accuracy.get(claim)
        judgements.append(
            Judgement(
                claim,
                _verdict(claim, loss, gate.margin) if loss else NOT_RUN,
                loss and loss._replace(difference=-loss.difference),
                accuracy,
                _verdict(claim, accuracy, POINTS) if accuracy else "",
                len({*arms[claim.first].losses} & {*arms[claim.second].losses}),
            )
        )
    failed = _failed(arms, gate, results)
    return Judged(name, its_study, lines, arms, seeds, gate, failed, judgements, sorted(effects.scattered(losses)))


def _comparable(values: dict[str, dict[int, float]], claim: Claim) -> bool:
    """Return whether both arms of a claim have two seeds in common."""
    return len({*values[claim.first]} & {*values[claim.second]}) > 1


def _verdict(claim: Claim, effect: Effect, margin: float) -> str:
    return {"better than": effects.is_better, "as good as": effects.is_as_good}[claim.kind](effect, margin)


# ---- the gate ----


def simple(data: str, results: Path) -> dict[str, float]:
    """Return the scores of simple methods on some data, by method: accuracies of images, losses of a text."""
    scores = {}
    for line in read(results / "baselines_cpu.jsonl"):
        if line["case"]["data"] == data:
            rows = line["rows"]
            scores[line["case"]["method"]] = (rows["loss"] if "loss" in rows else rows["accuracy"])[0]
    return scores


def limit(gate: Gate, results: Path) -> float:
    """Return the score that the dense network has to pass."""
    return gate.limit if isinstance(gate.limit, float) else simple(gate.data, results)[gate.limit]


def mean(arm: Arm, metric: str) -> float:
    """Return the mean loss or accuracy of an arm."""
    values = (arm.losses if metric == "loss" else arm.accuracies).values()
    return statistics.fmean(values) if values else math.nan


def _failed(arms: dict[str, Arm], gate: Gate, results: Path) -> str:
    """Return why a study does not pass its gate, or ""."""
    reached, needed = mean(arms["dense"], gate.metric), limit(gate, results)
    if math.isnan(reached):
        return "the dense network was not run"
    if reached < needed if gate.metric == "accuracy" else reached > needed:
        return f"the dense network reaches {score(gate, reached)}, and the gate is {score(gate, needed)}"
    pair = {arm: arms[arm].losses for arm in (gate.worse, "dense")}
    try:
        low, _ = effects.effects(pair, [(gate.worse, "dense")]).effects[0].interval(0.9)
    except effects.Unknown:
        return f"“{gate.worse}”, which has to be worse than dense, was not run with the same seeds"
    return "" if low > gate.margin else f"“{gate.worse}” is not worse than dense by more than the margin"


def score(gate: Gate, value: float) -> str:
    """Return a score by which dense networks are judged, as text."""
    return f"{100 * value:.1f} %" if gate.metric == "accuracy" else f"{value:.3f} {gate.unit}"


# ---- tables ----


def first_screen(results: Path) -> str:
    """Return the table of the main claims of all studies, and a sentence for each network.

    Args:
      results: The folder of the results.
    """
    rows = [["claim", "here", "loss, 95 % interval", "accuracy in points, 95 % interval", "seeds", "network", "gate"]]
    sentences: dict[str, None] = {}
    for name in STUDIES:
        if not (results / f"{name}.jsonl").exists():
            module, variant = study(name)[:2]
            main = [claim for claim in module.claims(variant) if claim.first_screen]
            rows += [[claim.text, NOT_RUN, "", "", "0", module.gate(variant).network, ""] for claim in main]
            continue
        one = judged(name, results)
        main = [judgement for judgement in one.judgements if judgement.claim.first_screen]
        rows += [[*_cells(judgement, one), one.gate.network, one.failed or "passed"] for judgement in main]
        sentences[reached(one, results)] = None
    return "\n\n".join([markdown_table(rows), *sentences])


def reached(one: Judged, results: Path) -> str:
    """Return a sentence on what the dense network and simple methods reach."""
    gate = one.gate
    names = {"ridge": "ridge regression", "nearest": "the nearest training images"}
    others = [
        f"{names.get(method, f'a table of {method}s')} {score(gate, value)}"
        for method, value in simple(gate.data, results).items()
    ]
    dense = score(gate, mean(one.arms["dense"], gate.metric))
    return f"{gate.network}: the dense network of `{one.name}` reaches {dense}; {', '.join(others)}."


def claims_table(one: Judged) -> str:
    """Return the table of all claims of a study in Markdown."""
    return markdown_table(claim_rows(one))


def claim_rows(one: Judged) -> list[list[str]]:
    """Return the rows of the table of all claims; the first is its head."""
    rows = [["claim", "here", "loss, 95 % interval", "accuracy in points, 95 % interval", "seeds"]]
    return [*rows, *(_cells(judgement, one) for judgement in one.judgements)]


def _cells(judgement: Judgement, one: Judged) -> list[str]:
    seeds = f"{judgement.seeds}" if judgement.seeds == len(one.seeds) else f"{judgement.seeds} of {len(one.seeds)}"
    accuracy = _interval(judgement.accuracy, 2, 100.0)
    if judgement.by_accuracy and judgement.by_accuracy != judgement.verdict:
        accuracy += f": {judgement.by_accuracy}"
    return [judgement.claim.text, judgement.verdict, _interval(judgement.loss, 4), accuracy, seeds]


def _interval(effect: Effect | None, digits: int, factor: float = 1.0) -> str:
    """Return a difference with its 95 % interval as text."""
    if effect is None:
        return ""
    low, high = effect.interval()
    number = lambda value: f"{factor * value:+.{digits}f}"
    return f"{number(effect.difference)} [{number(low)}, {number(high)}]"


def arms_table(one: Judged) -> str:
    """Return the table of the arms of a study in Markdown: what they reach, and what they cost."""
    return markdown_table(arm_rows(one))


def arm_rows(one: Judged) -> list[list[str]]:
    """Return the rows of the table of the arms; the first is its head."""
    head = ["arm", "loss", "accuracy %", "FLOPs", "time of all steps", "temporary memory", "runs", ""]
    rows, dense = [head], one.arms["dense"]
    for name, arm in one.arms.items():
        missing = [seed for seed in one.seeds if seed not in arm.losses and seed not in arm.lost]
        marks = [f"seed {seed} {outcome}" for seed, outcome in arm.lost.items()]
        marks += [f"seeds missing: {', '.join(map(str, missing))}"] if missing else []
        shares = [
            value / base
            for value, base in ((arm.flops, dense.flops), (arm.seconds, dense.seconds), (arm.bytes, dense.bytes))
        ]
        rows.append([
            name,
            "" if not arm.losses else f"{mean(arm, 'loss'):.4f}",
            "" if not arm.accuracies else f"{100 * mean(arm, 'accuracy'):.2f}",
            *("" if math.isnan(share) else f"{share:.3f}" for share in shares),
            f"{len(arm.losses)} of {len(one.seeds)}",
            "; ".join(marks),
        ])  # fmt: skip
    return rows


# ---- pictures ----

COSTS = {
    "flops": "effective FLOPs of the run, as a share of dense",
    "seconds": "time of all steps, as a share of dense",
    "bytes": "temporary memory of a step, as a share of dense",
}


def frontier(one: Judged, cost: str, yours: str = "") -> str:
    """Return the picture of what the arms reach and cost: the sparse ones, narrower ones and shorter ones.

    Args:
      one: The study.
      cost: A key of `COSTS`.
      yours: The name of an arm with a colour of its own.
    """
    values = {name: {seed: -loss for seed, loss in arm.losses.items()} for name, arm in one.arms.items()}
    points: dict[str, list[dots.Point]] = {"sparse": [], "narrower": [], "shorter": []}
    for name, arm in one.arms.items():
        dense = not any(field.startswith("sparsity.") for field in arm.changes)
        kind = ("shorter" if "steps" in arm.changes else "narrower") if dense else "sparse"
        colour = COLOURS["yours" if name == yours else kind]
        share = getattr(arm, cost) / getattr(one.arms["dense"], cost)
        if name == one.gate.worse or math.isnan(share) or len({*values[name]} & {*values["dense"]}) < 2:
            continue
        if name == "dense":
            for line in ("narrower", "shorter"):
                points[line].append(dots.Point("dense", 1.0, 0.0, None, COLOURS[line]))
            continue
        effect = effects.effects(values, [(name, "dense")]).effects[0]
        low, high = effect.interval()
        points[kind].append(dots.Point(name, share, -effect.difference, (high - low) / 2, colour))
    up = f"loss less that of dense, {one.gate.unit}, with 95 % intervals"
    named = {kind if kind in ("sparse", "yours") else f"dense, {kind}": colour for kind, colour in COLOURS.items()}
    return dots.frontier(
        f"{one.name}-{cost}", points["sparse"], [line for line in (points["narrower"], points["shorter"]) if line],
        alt=f"{up}, by {COSTS[cost]}.", along=COSTS[cost], up=up, say="{:+.3f}".format, best=min,
        keys={name: colour for name, colour in named.items() if name != "yours" or yours},
    )  # fmt: skip


COLOURS = {"sparse": "s1", "narrower": "s0", "shorter": "s3", "yours": "s4"}


def costs(one: Judged) -> list[str]:
    """Return the keys of `COSTS` by which the arms can be drawn: those that are known of dense."""
    dense = one.arms["dense"]
    return [cost for cost in COSTS if len(dense.losses) > 1 and not math.isnan(getattr(dense, cost))]


def section(name: str, results: Path) -> tuple[list[str], dict[str, str]]:
    """Return the paragraphs of a study, and its pictures as SVG by their names."""
    one = judged(name, results)
    shown = costs(one)
    pictures = {f"{name}_{cost}": dots.standalone(frontier(one, cost)) for cost in shown}
    parts = [f"![Loss by {COSTS[cost]}](results/{name}_{cost}.svg)" for cost in shown]
    gate = f"It does not pass its gate: {one.failed}. It shows nothing." if one.failed else "It passes its gate."
    parts += [gate, claims_table(one), arms_table(one), LEGEND]
    if one.uneven:
        parts.append(
            f"Runs that scatter much more than others, so that they have their own variance: {', '.join(one.uneven)}."
        )
    return parts, pictures


LEGEND = (
    "Losses and accuracies are of the hardened networks on test data. A difference is that of the first arm minus the "
    "second; less loss is better. FLOPs, time and memory are shares of dense. FLOPs are counts."
)
