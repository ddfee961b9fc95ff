"""Claims of studies: the verdicts that their results give, their sanity checks and baselines, and bad results."""

import json
import math
import re
import shutil

import jax
import numpy as np
import pytest
from flax import nnx
from scipy import stats

import nmjax as nm
from experiments import claims, config_files, evidence, members, recorded, reproduce
from experiments.errors import Mistake
from experiments.report import effects
from experiments.studies import ABOUT, BOOKS, STUDIES, __main__ as looks, times
from experiments.training import digest, settings

NAME = "recipe_vit_cpu"
FLOOR = "random 1:16 mask"
DW = "MdGf (30 %) + MVUE(dw)"


def line(group, seed, loss, accuracy=0.88, name=NAME, **more):
    study = recorded.study(name)
    changes = study.design.groups[group] | {"seed": seed}
    (member,) = members.listed(config_files.load(study.config_file), [changes])
    return {
        "format": 1, "run": member.name, "changes": changes, "outcome": "finished", "metric": "accuracy",
        "figures": {"accuracy": 0.1, "hardened_accuracy": accuracy, "hardened_loss": loss, "loss": 9.0},
        "steps": member.config.steps, "flops": [2.0, 2.0], "measured": {"step_bytes": 100},
        "devices": "1 x cpu", "began": "2026-01-01T00:00:00+00:00", "ended": "2026-01-01T00:00:30+00:00",
        "command": study.short, "versions": {"jax": "0.0"}, "notes": [],
        "config": digest.identity(member.config).digest,
    } | more  # fmt: skip


def written(folder, lines, name=NAME):
    shutil.copy(reproduce.RESULTS / "baselines_cpu.jsonl", folder)
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    return folder


def runs(group, losses, **more):
    return [line(group, 10 + n, loss, **more) for n, loss in enumerate(losses)]


DENSE = [0.330, 0.331, 0.329, 0.332]
GOOD = [*runs("dense", DENSE), *runs(FLOOR, [0.43, 0.44, 0.42, 0.43])]


@pytest.fixture(autouse=True)
def four_seeds(monkeypatch):
    monkeypatch.setattr(recorded.study(NAME).module, "SEEDS", range(10, 14))


def test_a_verdict_is_that_of_the_differences(tmp_path):
    """The interval of two methods is that of a paired t test. The second is worse by 0.05 ± 0.001 nats."""
    sparse = [0.381, 0.380, 0.380, 0.381]
    one = claims.judged(NAME, written(tmp_path, [*GOOD, *runs(DW, sparse, accuracy=0.87)]))
    first = one.judgements[0]
    assert (first.claim.text, first.verdict, first.seeds) == (f"{DW} is as good as dense", effects.WORSE, 4)
    other, loss = stats.ttest_rel(sparse, DENSE).confidence_interval(0.95), first.differences["loss"]
    assert (loss.difference, *loss.interval()) == pytest.approx((0.05, other.low, other.high))
    assert first.differences["accuracy"].difference == pytest.approx(-0.01)
    assert one.over_dense[DW].interval() == pytest.approx(loss.interval())
    assert one.judgements[1].verdict == "not finished: 4 of 8 runs are missing"
    assert one.failed == ""


@pytest.mark.parametrize(
    ("sparse", "verdict"),
    [
        ([0.331, 0.331, 0.330, 0.332], effects.HOLDS),
        ([0.335, 0.336, 0.334, 0.337], effects.SLIGHTLY),  # the margin is 0.01
        ([0.338, 0.350, 0.339, 0.361], effects.OPEN),
    ],
)
def test_the_margin_decides(sparse, verdict, tmp_path):
    assert claims.judged(NAME, written(tmp_path, [*GOOD, *runs(DW, sparse)])).judgements[0].verdict == verdict


def test_the_tables_say_what_was_measured(tmp_path):
    lines = [*GOOD, *runs(DW, [0.340, 0.341, 0.339], flops=[2.0, 1.5])]
    text, pictures = reproduce.block(NAME, written(tmp_path, lines))
    rows = {row.split(" | ")[0].removeprefix("| "): row for row in text.splitlines() if row.startswith("| ")}
    assert (
        rows["dense"] == "| dense | 0.3305 | 88.00 | 1.00 | 1.00 | 4 of 4 |  |"
    )  # a column without values is left out
    assert "| 0.75 | 1.00 | 3 of 4 | seeds missing: 13 |" in rows[DW]
    assert "| 0 of 4 | seeds missing" in rows[f"narrower dense, FLOPs of “{DW}”"]
    assert f"The study passes its sanity check: “{FLOOR}” minus dense is +0.0995 [+0.0" in text
    assert "The margin is 0.01 nats, or 0.5 points." in text
    shown = f"| {DW} is as good as dense | not finished: 1 of 8 runs are missing | +0.0100 [+0.0100, +0.0100] |"
    assert rows[f"{DW} is as good as dense"].startswith(shown)
    assert rows[f"{DW} is as good as dense"].endswith("] |  | 3 of 4 |")  # there is no verdict by the accuracy either
    assert "Not in the pictures, because fewer than two seeds were run: narrower dense, FLOPs of" in text
    assert pictures.keys() == {f"{NAME}_{cost}" for cost in ("flops", "bytes")}
    assert pictures[f"{NAME}_flops"].count(f">{DW}<") == 1


def test_times_are_those_of_steps_in_turn(tmp_path):
    """By hand: steps take 1.5 of the time of dense steps. The shorter run has 4,401 of 6,000 steps, which are dense."""
    shorter = f"shorter dense, FLOPs of “{DW}”"
    seconds = {"dense": [9.0, 1.0, 2.0, 3.0], DW: [9.0, 1.5, 3.0, 30.0], shorter: [9.0, 7.0, 7.0, 7.0]}
    times_of = {"format": 1, "run": f"study={NAME}", "case": {"study": NAME}, "outcome": "finished", "rows": seconds}
    times_of |= {"config": digest.identity(times.config(NAME)).digest, "command": looks.command("times"), "notes": []}
    times_of |= {"began": "", "ended": "", "versions": {}}
    results = written(tmp_path, [*GOOD, *runs(DW, DENSE), *runs(shorter, DENSE)])
    assert {str(group.time) for group in claims.judged(NAME, results).groups.values()} == {"nan"}
    assert "The times of this study have not been measured. Measure them with: " in reproduce.block(NAME, results)[0]
    (results / "times_cpu.jsonl").write_text(json.dumps(times_of) + "\n")
    groups = claims.judged(NAME, results).groups
    assert (groups["dense"].time, groups[DW].time) == (1.0, 1.5)
    assert groups[shorter].time == pytest.approx(4401 / 6000)
    assert f"{NAME}_time" in reproduce.block(NAME, results)[1]
    shutil.copy(results / "times_cpu.jsonl", results / "times_gpu.jsonl")  # a GPU may time a study of a CPU
    (results / "times_cpu.jsonl").unlink()
    assert claims.judged(NAME, results).groups[DW].time == 1.5
    assert not [path for path in reproduce.unplaced("", results) if "times" in path.name]
    (results / "times_cpu.jsonl").write_text(json.dumps(times_of | {"config": "0123456789ab"}) + "\n")
    with pytest.raises(
        Mistake, match=r"times_cpu.jsonl, line 1 was made with another config: the config file has changed since"
    ):
        claims.judged(NAME, results)


def test_claims_whose_runs_are_missing_count_too(tmp_path):
    """Their number corrects the p-values: with eleven claims, the smallest p is multiplied by eleven."""
    one = claims.judged(NAME, written(tmp_path, [*GOOD, *runs(DW, [0.331, 0.3325, 0.3302, 0.3333])]))
    first, *others = one.judgements
    assert {len(judgement.differences) for judgement in others} == {0}
    values = {"dense": dict(enumerate(DENSE)), DW: dict(enumerate([0.331, 0.3325, 0.3302, 0.3333]))}
    alone = effects.effects(
        {group: {s: -v for s, v in of.items()} for group, of in values.items()}, [(DW, "dense")], [-0.01]
    )
    assert first.differences["loss"].p == pytest.approx(min(11 * alone[0].p, 1))


def test_a_run_that_diverged_is_no_good_run(tmp_path):
    diverged = line(DW, 13, 0.0, outcome="diverged: the loss is nan at step 3")
    del diverged["figures"]  # only a finished run has figures
    text, _ = reproduce.block(NAME, written(tmp_path, [*GOOD, *runs(DW, DENSE[:3]), diverged]))
    assert f"| {DW} is as good as dense | undecided: 1 run of “{DW}” diverged |" in text
    assert "| 3 of 4 | seed 13 diverged: the loss is nan at step 3 |" in text


def test_the_making_of_runs_is_told(tmp_path):
    machines = [{"machine": {"processor": "A", "threads": threads}} for threads in (1, 2)]
    machines[1]["git"] = {"dirty": True}
    lines = [line("dense", 10, 0.5), line("dense", 10, 0.33, **machines[0]), line("dense", 11, 0.33, **machines[1])]
    text, _ = reproduce.block(NAME, written(tmp_path, [*lines, *runs(FLOOR, [0.43, 0.44], notes=["A note."])]))
    assert "Lines of runs that were repeated: 1. The last line of each run counts." in text
    assert "The runs differ in threads: 1 and 2 and not recorded." in text
    assert "The runs differ in processor: A and not recorded." in text
    assert text.count("A note.") == 1
    assert "Runs with uncommitted code: 1." in text


SHORT = "MdGf 2:4 (30 %) + MVUE(dw)"


def test_the_main_claims_say_what_they_are_about(tmp_path):
    text, pictures = reproduce.block("claims", written(tmp_path, [*GOOD, *runs(DW, DENSE)]))
    lines = [row for row in text.splitlines() if row.startswith("| ")]
    assert lines[2] == f"| configs/vit_24.py | {SHORT} vs dense | ViT | +0.000 [+0.000, +0.000] | 4 | matches |"
    assert lines[3].startswith(f"|  | {SHORT} vs narrower dense | ViT |  | 0 of 4 | not finished: 4 of 8")
    assert "MVUE(dw, dx) vs MdGf" not in text
    assert "Not run yet: `methods_vit_cpu`, `methods_gpt_cpu`," in text
    assert not pictures


@pytest.mark.parametrize(
    ("kind", "verdict", "word"),
    [
        ("as good as", effects.HOLDS, "matches"),
        ("as good as", effects.SLIGHTLY, "matches, slightly worse"),
        ("as good as", effects.WORSE, "worse"),
        ("better than", effects.HOLDS, "better"),
        ("better than", effects.SMALL, "slightly better"),
        ("better than", effects.NO_DIFFERENCE, "no difference"),
        ("better than", effects.SLIGHTLY_WORSE, "worse by less than the margin"),
        ("better than", effects.OPEN, "undecided"),
    ],
)
def test_a_line_has_its_verdict_in_a_word(kind, verdict, word, tmp_path):
    one = claims.judged(NAME, written(tmp_path, [*GOOD, *runs(DW, DENSE)]))
    first = one.judgements[0]._replace(verdict=verdict, verdicts={"loss": verdict})
    first = first._replace(claim=first.claim._replace(kind=kind))
    assert evidence.line(first, one)[-1] == word
    other = first._replace(verdicts={"loss": verdict, "accuracy": effects.OPEN})
    assert evidence.line(other, one)[-1] == word + (" †" if verdict != effects.OPEN else "")


def counted(results):
    """Return the table of counts by network: by the beginning of a row's title its cell."""
    head, _, *rows = [row.strip("| ").split(" | ") for row in reproduce.block("counts", results)[0].splitlines()]
    keys = ("data", "dense", "2:4", "random", "sparser", "others", "narrower", "shorter")
    assert len(rows) == len(keys)
    return {network: {key: row[n + 1] for key, row in zip(keys, rows, strict=True)} for n, network in enumerate(head)}


def of_study(name, **losses):
    """Return lines of the configs of a study, with these losses by seed. Its random config is much worse."""
    losses = {"dense": DENSE, FLOOR: np.add(DENSE, 0.1).tolist()} | losses
    first = 10 if name == NAME else 0
    return [line(group, first + seed, loss, name=name) for group, of in losses.items() for seed, loss in enumerate(of)]


NARROWER, SHORTER = (f"{word} dense, FLOPs of “{DW}”" for word in ("narrower", "shorter"))
UP, TEN = (lambda more, of=DENSE: np.add(of, more).tolist()), np.resize(DENSE, 10).tolist()
FIVE, VIT = TEN[:5], "ViT, Fashion-MNIST"
MATCH, NONE = {"2:4": "1 of 1"}, {"2:4": "0 of 1"}


@pytest.mark.parametrize(
    ("studies", "counts"),
    [
        ({NAME: {DW: DENSE}}, {"ViT": MATCH}),
        ({NAME: {DW: UP(0.07)}}, {"ViT": NONE}),
        (  # better than the shorter run; the narrower network is as good
            {NAME: {DW: DENSE, NARROWER: UP([0.001, -0.001, 0, 0]), SHORTER: UP([0.05, 0.051, 0.049, 0.05])}},
            {"ViT": MATCH | {"narrower": "0 of 1", "shorter": "1 of 1"}},
        ),
        (  # each network by itself
            {
                NAME: {DW: DENSE},
                "finetuning_sst2_cpu": {"dense": FIVE, "STE 2:4": UP(0.05, FIVE), FLOOR: UP(0.5, FIVE)},
            },
            {"ViT": MATCH, "MiniLM": NONE},
        ),
        (  # worse with four seeds, as good with ten: a method of two studies counts once, with the most seeds
            {NAME: {DW: UP(0.07)}, "methods_vit_cpu": {"dense": TEN, DW: TEN, FLOOR: UP(0.1, TEN)}},
            {"ViT": MATCH},
        ),
        (  # another method counts beside it, by what it prunes
            {NAME: {DW: DENSE}, "equal_flops_cpu": {"dense": TEN, "MdGf 1:16": TEN, FLOOR: UP(0.1, TEN)}},
            {"ViT": MATCH | {"sparser": "1 of 1"}},
        ),
        (
            {"residual_cpu": {"dense": FIVE, "SDGP 2:4": UP(0.07, FIVE), FLOOR: UP(0.1, FIVE)}},
            {"ResNet": {"others": "0 of 1"}},
        ),
        (  # a random mask does not count, and has a line of its own
            {"methods_vit_cpu": {"dense": TEN, "random 2:4 mask": TEN, FLOOR: UP(0.1, TEN)}},
            {"ViT": {"random": "matches"}},
        ),
    ],
)
def test_sparse_methods_are_counted_beside_what_the_networks_reach(studies, counts, tmp_path):
    for name, losses in studies.items():
        written(tmp_path, of_study(name, **losses), name)
    found = counted(tmp_path)
    empty = dict.fromkeys(("2:4", "random", "sparser", "others", "narrower", "shorter"), "–")
    shown = {network: {key: of[key] for key in empty} for network, of in found.items()}
    assert shown == {network: empty | of for network, of in counts.items()}
    if "ViT" in counts:
        assert (found["ViT"]["data"], found["ViT"]["dense"]) == ("Fashion-MNIST", "88.0 %")
    if [*studies] == [NAME]:
        said = f"**{VIT}**, one study, run on a CPU. It passes its sanity check. The margin is 0.01 nats."
        assert said in reproduce.block("networks", tmp_path)[0]


def test_a_margin_is_told_in_flops_too(tmp_path):
    """By hand: 0.75 of the FLOPs cost 0.02, so 0.1 of them cost 0.008. The noise is that of the four seeds."""
    lines = of_study(NAME, **{NARROWER: UP([0.019, 0.021, 0.02, 0.02])})
    for each in lines:
        if "model.width" in each["changes"] or "model.hidden" in each["changes"]:
            each["flops"] = [1.5, 1.5 * lines[0]["steps"] / each["steps"]]
    text = reproduce.block("networks", written(tmp_path, lines))[0]
    half = stats.t.ppf(0.975, 3) * math.sqrt(2e-6 / 3 / 4)
    of = lambda factor: f"{factor * 0.02:+.4f} [{factor * (0.02 - half):+.4f}, {factor * (0.02 + half):+.4f}]"
    assert f"minus that of dense is {of(1)} with 0.75 of the FLOPs. " in text
    assert f"By the one with 0.75, dense pays {of(0.4)} for 10 % of its FLOPs." in text


def test_a_study_that_does_not_pass_is_named(tmp_path):
    results = written(tmp_path, [*runs("dense", DENSE, accuracy=0.8), *runs(FLOOR, [0.43, 0.44, 0.42, 0.43])])
    other = "methods_vit_cpu"
    written(results, [line(group, seed, loss, name=other) for group, losses in (("dense", DENSE), (FLOOR, [0.5, 0.51]))
                      for seed, loss in enumerate(losses)], other)  # fmt: skip
    text = reproduce.block("networks", results)[0]
    assert f"2 studies, run on a CPU. `{NAME}` does not pass: " in text
    assert "pass their sanity check" not in text
    found = counted(results)["ViT"]
    counts = {found[key] for key in ("2:4", "sparser", "others", "narrower", "shorter")}
    assert (found["dense"], counts) == ("80.0 % to 88.0 %", {"–"})  # no claim of these studies counts


@pytest.mark.parametrize("lines", [runs(FLOOR, DENSE), [*runs("dense", DENSE), *runs(FLOOR, DENSE[:1])]])
def test_a_study_whose_sanity_check_has_no_runs_yet_is_not_judged(lines, tmp_path):
    results = written(tmp_path, [*lines, *runs(DW, DENSE)])
    groups = len(claims.judged(NAME, results).groups)
    assert groups > 3
    done = f"{len(lines) + len(DENSE)} of {4 * groups} runs"
    text, pictures = reproduce.block(NAME, results)
    assert f"Not finished: {done} are done. The study is judged when dense and “{FLOOR}” have two runs each." in text
    assert not pictures
    screen = reproduce.block("claims", results)[0]
    assert f"Not finished: `{NAME}` ({done})." in screen
    assert DW not in screen


DIVERGED = "diverged: the loss is nan at step 3"


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        (
            [*runs("dense", DENSE, accuracy=0.869), *runs(FLOOR, DENSE)],
            "the dense network reaches 86.9 %, and needs 87.0 %",
        ),
        (
            [*runs("dense", DENSE), *(line(FLOOR, seed, 0.0, outcome=DIVERGED) for seed in (10, 11))],
            f"dense and “{FLOOR}”, which has to be worse, have fewer than two seeds in common: 2 runs of it diverged",
        ),
        ([*runs("dense", DENSE), *runs(FLOOR, DENSE)], f"“{FLOOR}” is not worse than dense by more than the margin"),
        (
            [*(line("dense", seed, 0.0, outcome=DIVERGED) for seed in (10, 11)), *runs(FLOOR, DENSE)],
            "no dense network finished",
        ),
    ],
)
def test_a_sanity_check_that_is_not_passed_is_told(lines, why, tmp_path):
    results = written(tmp_path, [*lines, *runs(DW, DENSE)])
    assert claims.judged(NAME, results).failed == why
    assert f"The study does not pass its sanity check: {why}." in reproduce.block(NAME, results)[0]
    screen = reproduce.block("claims", results)[0]
    assert not any(judgement.verdicts for judgement in claims.judged(NAME, results).judgements)
    assert screen.count("| does not count |") == 3
    assert f"`{NAME}` does not pass: {why}. The margin is 0.01 nats." in reproduce.block("networks", results)[0]
    assert "nan" not in screen.replace("loss is nan", "")


def test_flips_are_drawn_for_configs_whose_masks_change(tmp_path):
    curves = lambda *rates: {"curves": {"eval": {}, "sparsity": {"step": [0, 10], "flip_rate": [*rates]}}}
    sparse = runs(DW, [0.331, 0.332], **curves(0.001, 0.02))
    held = runs(FLOOR, [0.43, 0.44], **curves(0.0, 0.1))  # at a step at which it gets a new mask
    lines = [*runs("dense", DENSE), *sparse, *held]
    text, pictures = reproduce.block(NAME, written(tmp_path, lines))
    assert f"](results/{NAME}_flips.svg)" in text
    drawn = pictures[f"{NAME}_flips"]
    assert DW in drawn
    assert FLOOR not in drawn
    assert ">2.0 %<" in drawn
    assert f"{NAME}_flips" not in reproduce.block(NAME, written(tmp_path, GOOD))[1]


def test_configs_without_a_hardened_network_are_named(tmp_path):
    """Their weights are drawn at random, and the loss is that in training."""
    drawn = [line(DW, 10 + n, 0.0, figures={"accuracy": 0.88, "loss": 0.35 + 0.001 * n}) for n in range(4)]
    results = written(tmp_path, [*GOOD, *drawn])
    assert claims.judged(NAME, results).groups[DW].losses[11] == 0.351
    assert f"Configs without a hardened network: {DW}. They draw" in reproduce.block(NAME, results)[0]
    assert "Configs without a hardened network" not in reproduce.block(NAME, written(tmp_path, GOOD))[0]


def test_a_verdict_by_other_scores_stands_beside_that_by_the_loss(tmp_path):
    """The method is as good as dense by the loss. It is worse by the accuracy, and by the loss on validation data."""
    scores = lambda loss, validation: {
        "figures": {
            "accuracy": 0.1, "hardened_accuracy": 0.88 if loss == validation else 0.87, "hardened_loss": loss,
            "loss": 9.0, "validation_hardened_loss": validation, "validation_loss": 9.0,
        }
    }  # fmt: skip
    dense = [line("dense", 10 + n, 0.0, **scores(loss, loss)) for n, loss in enumerate(DENSE)]
    better = [0.3301, 0.3312, 0.3290, 0.3320]
    sparse = [line(DW, 10 + n, 0.0, **scores(loss, loss + 0.05)) for n, loss in enumerate(better)]
    results = written(tmp_path, [*dense, *sparse, *GOOD[4:]])
    first = claims.judged(NAME, results).judgements[0]
    verdicts = {"loss": effects.HOLDS, "accuracy": effects.WORSE, "validation loss": effects.WORSE}
    assert (first.verdict, first.verdicts) == (effects.HOLDS, verdicts)
    assert first.differences["validation loss"].difference == pytest.approx(np.mean(better) + 0.05 - np.mean(DENSE))
    row = next(row for row in reproduce.block(NAME, results)[0].splitlines() if "as good as dense | holds" in row)
    assert "| does not hold: worse, +0.0501 [+0.0" in row
    assert "| 4 | matches † |" in reproduce.block("claims", results)[0]
    said = "1 verdicts by the test loss. By the validation loss 1 of them are different. By the accuracy 1 of 1"
    assert said in reproduce.block("networks", results)[0]


def test_missing_seeds_are_named_below_the_main_claims(tmp_path):
    screen = reproduce.block("claims", written(tmp_path, [*GOOD[1:], *runs(DW, DENSE)]))[0]
    assert f"Not finished: `{NAME}` (11 of " in screen
    assert "; its claims with all runs are judged)." in screen


def without(field):
    return lambda: {name: value for name, value in line("dense", 10, 0.3).items() if name != field}


def elsewhere():
    """Return the line of a method that the study does not have."""
    changes = {"sparsity.blocks": "ste(2,4)", "seed": 10}
    (member,) = members.listed(config_files.load(recorded.study(NAME).config_file), [changes])
    return line("dense", 10, 0.3, changes=changes, config=digest.identity(member.config).digest)


def with_figures(seed, **figures):
    return lambda: [*runs(DW, [0.33]), line(DW, seed, 0.0, figures=figures)]


OTHER = "python launch.py --config=experiments/studies/methods.py:vit_cpu --sweep --results=a.jsonl"
FIELDS = ("figures", "devices", "flops", "outcome", "changes", "steps", "began", "ended", "versions")
NO_NUMBERS = ({"figures": None}, {"figures": {"loss": "0.3"}}, {"flops": None}, {"flops": [None, 1.0]}, {"steps": "9"})
AGAIN = "Delete the line, and make it again with: python launch.py --config="
REFUSED = {  # lines after good ones, or a text: made when the seeds of the study are the tests' own; and why
    "nan": (lambda: runs(DW, [0.33, math.nan]), "with seed 11 finished, but its hardened_loss is nan. Delete its line"),
    "no hardened loss": (
        with_figures(11, accuracy=0.88, loss=0.35),
        "“MdGf .*” with seed 11 has no hardened_accuracy, but other runs of it have one",
    ),
    "no validation": (
        with_figures(11, accuracy=0.1, hardened_accuracy=0.88, hardened_loss=0.33, loss=9.0, validation_loss=0.3),
        "“MdGf .*” with seed 10 has no validation_loss, but other runs of it have one",
    ),
    "another seed": (lambda: line("dense", 3, 0.3), "jsonl: the run .* is not in the study. Delete its line"),
    "another method": (elsewhere, "jsonl: the run .* is not in the study. Delete its line"),
    "another command": (
        lambda: line("dense", 10, 0.3, command="python launch.py --config=a.py --sweep"),
        "line 9 was made by another command",
    ),
    "by hand": (
        lambda: line("dense", 10, 0.3, command=f"{OTHER} --config.steps=6000"),
        "line 9 was made by another command",
    ),
    "no command": (without("command"), "line 9 was made by another command"),
    "another config": (
        lambda: line("dense", 10, 0.3, config="0123456789ab"),
        "line 9 was made with another config: the config file has changed since",
    ),
    "no format": (without("format"), "line 9 is not a line of results .KeyError: 'format'"),
    "another format": (
        lambda: line("dense", 10, 0.3, format=0),
        f"line 9 has format 0, but only format 1 can be read. {AGAIN}",
    ),
    "cut": (lambda: b'{"form', rf"line 1 is not a line of results \(.*{AGAIN}"),
    "no text": (lambda: b"\xff\xfe", rf"{NAME}.jsonl is not text: .* Delete it, and make it with: python launch.py"),
    "no file": (None, rf"there is no .*{NAME}.jsonl. Make it with: python launch.py --config=.* --sweep --results="),
    **{
        str(change): (
            lambda change=change: line("dense", 10, 0.3, **change),
            r"line 9 is not a line of results \(\w+Error: .*\)",
        )
        for change in NO_NUMBERS
    },
    **{
        f"without {field}": (without(field), rf"line 9 is not a line of results \(KeyError: '{field}'\). {AGAIN}")
        for field in FIELDS
    },
}


@pytest.mark.parametrize("case", REFUSED)
def test_results_that_are_not_those_of_the_study_are_refused(case, tmp_path):
    make, why = REFUSED[case]
    found = make and make()
    if isinstance(found, bytes):
        (written(tmp_path, GOOD) / f"{NAME}.jsonl").write_bytes(found)
    elif found:
        written(tmp_path, [*GOOD, *([found] if isinstance(found, dict) else found)])
    with pytest.raises(Mistake, match=why):
        claims.judged(NAME, tmp_path)


def test_studies_share_runs_of_the_same_config(tmp_path):
    """The config decides, and not which of the studies has made the run."""
    assert claims.judged(NAME, written(tmp_path, [each | {"command": OTHER} for each in GOOD])).failed == ""


def test_a_run_that_was_continued_took_the_time_of_its_parts(tmp_path):
    lines = [line("dense", 10, 0.33, seconds=3600.0), line("dense", 11, 0.33, seconds=1800.0), *GOOD[4:]]
    assert [recorded.seconds(each) for each in lines[1:3]] == [1800, 30]
    assert "The 6 runs took 1 h." in reproduce.block(NAME, written(tmp_path, lines))[0]


def test_a_limit_that_was_not_computed_is_told(tmp_path):
    results = tmp_path / "baselines_cpu.jsonl"
    results.write_text("")
    why = r"baselines_cpu.jsonl has no 5-gram of books_start. Make it with: python -m experiments.studies baselines"
    with pytest.raises(Mistake, match=why):
        claims.limit(BOOKS, tmp_path)


def test_runs_that_scatter_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(recorded.study(NAME).module, "SEEDS", range(10, 18))
    draw = np.random.default_rng(0)
    quiet = lambda: (0.33 + 0.001 * draw.standard_normal(8)).tolist()
    groups = [DW, f"narrower dense, FLOPs of “{DW}”", f"shorter dense, FLOPs of “{DW}”"]
    lines = [each for group in ("dense", *groups[1:]) for each in runs(group, quiet())]
    lines += runs(DW, (0.33 + 0.02 * draw.standard_normal(8)).tolist()) + runs(FLOOR, [0.5] * 8)
    text, _ = reproduce.block(NAME, written(tmp_path, lines))
    assert re.search(rf"scatter much more than those of others, by the test loss.*: {re.escape(DW)}\.", text)
    for each in lines:  # now they scatter by the validation loss only
        figures = each["figures"]
        each["figures"] = figures | {"validation_loss": figures["hardened_loss"], "hardened_loss": quiet()[0]}
    text, _ = reproduce.block(NAME, written(tmp_path, lines))
    assert re.search(rf"scatter much more than those of others, by the validation loss.*: {re.escape(DW)}\.", text)
    assert "of others, by the test loss" not in text


@pytest.mark.parametrize("name", STUDIES)
def test_claims_are_about_arms_of_the_study(name):
    module, variant = recorded.study(name)[:2]
    _, check, seeds, groups, said, search = module.design(variant)
    assert len({str(changes) for changes in groups.values()}) == len(groups)
    assert {group for claim in said for group in (claim.first, claim.second)} <= {*groups}
    assert check.worse in groups
    if search is None:
        assert len(module.get_sweep(variant)) == len(groups) * len(seeds)
    else:
        assert search.study == name
        assert not {*search.seeds} & {*seeds}


def test_the_main_claims_follow_their_rule():
    """A config file's method meets dense training and its baselines; a paper's meets one other, once a network."""
    found = {}
    for one in map(recorded.study, STUDIES):
        for claim in one.design.claims:
            if claim.about:
                found.setdefault((claim.about, one.design.check.network), []).append((one.module, claim))
    assert {about for about, _ in found} == {*ABOUT}
    for (about, network), claims_of in found.items():
        seconds = {claim.second.partition(",")[0] for _, claim in claims_of}
        if about.startswith("configs/"):
            assert "dense" in seconds, (about, network)
            assert seconds <= {"dense", "narrower dense", "shorter dense"}, (about, network)
        else:
            assert len(seconds) == 1, (about, network, seconds)


@pytest.mark.parametrize("about", [about for about in ABOUT if about.startswith("configs/")])
def test_a_main_claim_about_a_config_is_about_its_method(about):
    config = config_files.load(about)
    for one in map(recorded.study, STUDIES):
        for claim in one.design.claims:
            if claim.about == about:
                method = claims.recipe_of(one, one.design.groups[claim.first])
                assert method == settings.recipe(config, 1000)


ON_GPUS = ("methods_vit_gpu", "methods_gpt_gpu", "recipe_vit_gpu", "residual_gpu")


@pytest.mark.slow
@pytest.mark.parametrize("name", [*STUDIES, *ON_GPUS])
def test_baselines_have_as_many_flops(name):
    """The narrower and the shorter network cost what the method costs, to within 1 %; in inference to within 3 %."""
    study = recorded.study(name)
    base, groups = config_files.load(study.config_file), study.design.groups
    config = lambda group: members.listed(base, [groups[group] | {"seed": 0}])[0].config
    found = 0
    for dense_baseline in groups:
        asked = re.fullmatch("(.*), (inference )?FLOPs of “(.*)”", dense_baseline)
        if asked:
            found += 1
            kind, inference, method = asked.groups()
            number, off = (0, 0.03) if inference else (1, 0.01)
            cost, wanted = (flops(config(name))[number] for name in (dense_baseline, method))
            assert cost == pytest.approx(wanted, rel=off), (kind, method)
    assert found >= (1 if base.experiment == "finetune" else 2)


def flops(config):
    """Return the effective FLOPs of an inference, and those of a run."""
    make, x = network(config)
    plan = nm.nnx.plan(nnx.eval_shape(make), settings.recipe(config, config.steps), x)
    return plan.forward[1], plan.over(config.steps, data_gradients=False)[1] * config.steps


MINILM = {"width": 384, "depth": 6, "heads": 12, "hidden": 1536, "vocabulary": 30522, "length": 512, "classes": 2}


def network(config):
    """Return a function that makes the model of a config, and the shape of its inputs."""
    tokens = lambda: jax.ShapeDtypeStruct((config.batch, config.data.length), "int32")
    if config.experiment == "finetune":
        return lambda: nm.models.BERT(**MINILM, rngs=nnx.Rngs(0)), tokens()
    kind = {"vit": nm.models.ViT, "gpt": nm.models.GPT, "resnet": nm.models.ResNet}[config.model.name]
    sizes = getattr(nm.models, config.model.name).SIZES[config.model.size]
    sizes = sizes | {key: value for key, value in config.model.to_dict().items() if key not in ("name", "size")}
    if kind is nm.models.GPT:
        return lambda: kind(**sizes, vocabulary=256, length=config.data.length, rngs=nnx.Rngs(0)), tokens()
    side, channels = (28, 1) if config.data.name == "fashion_mnist" else (32, 3)
    sizes |= {"channels": channels, "classes": 10} | ({"image": side} if kind is nm.models.ViT else {})
    return lambda: kind(**sizes, rngs=nnx.Rngs(0)), jax.ShapeDtypeStruct(
        (config.batch, side, side, channels), "float32"
    )
