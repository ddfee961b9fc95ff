"""Runs beside each other: the numbers of the table, its marks, its page."""

import json
import math
import random
import re

import pytest
from scipy import stats

from experiments.report import __main__ as command, compare, compare_page
from experiments.report.words import distinct
from tests.experiments.report.report_test import Tags


def run(folder, method="dense", seed=0, accuracy=0.9, outcome="finished", flops=None, config=(), lines=(), **about):
    """Make a run of 100 steps. A dense run costs 10 FLOPs a step, and others 8."""
    folder.mkdir(parents=True)
    fields = {"name": f"m={method},seed={seed}", "outcome": outcome, "metric": "accuracy", "steps": 100}
    fields |= {"flops": flops or ((10, 10) if method.startswith("dense") else (10, 8)), "notes": ["of a lossy copy"]}
    if outcome == "finished":
        fields["figures"] = {"accuracy": accuracy, "hardened_accuracy": accuracy - 0.01}
    (folder / "run.json").write_text(json.dumps(fields | about))
    config = {"seed": seed, "sparsity": {"blocks": method}, "batch": 4} | dict(config)
    (folder / "config.json").write_text(json.dumps(config))
    lines = [{"step": s, "kind": "eval", "hardened_accuracy": accuracy * s / 100} for s in (50, 100)] + list(lines)
    (folder / "metrics.jsonl").write_text("".join(json.dumps({"seconds": 1, **line}) + "\n" for line in lines))
    return folder


def compared(folder, baseline=""):
    return compare.compare_folders([folder], baseline)


@pytest.fixture
def study(tmp_path):
    for seed, (dense, sparse) in enumerate([(0.90, 0.91), (0.92, 0.90), (0.94, 0.95)]):
        run(tmp_path / f"a{seed}", "dense", seed, dense)
        run(tmp_path / f"b{seed}", "s_ste(2,4)", seed, sparse)
    run(tmp_path / "c0", "<i>mse</i>", 0, 0.5)
    run(tmp_path / "c1", "<i>mse</i>", 1, 0.0, outcome="diverged: the loss is nan at step 7")
    (tmp_path / "results.jsonl").touch()
    return tmp_path


def test_means_spreads_and_paired_differences(study):
    dense, sparse, odd = compared(study).rows
    assert (dense.name, sparse.name, odd.name) == ("blocks=dense", "blocks=s_ste(2,4)", "blocks=<i>mse</i>")
    assert (dense.mean, dense.mean_error) == pytest.approx((0.91, 0.02 / math.sqrt(3)))  # hardened; the standard error
    assert sparse.others["accuracy"] == pytest.approx((0.92, math.sqrt((0.01**2 + 0.02**2 + 0.03**2) / 2 / 3)))
    spread = math.sqrt((0.01**2 + 0.02**2 + 0.01**2) / 2)
    assert (sparse.difference, sparse.error) == pytest.approx((0, spread / math.sqrt(3)), abs=1e-12)
    assert (dense.cost, sparse.cost, odd.seeds, odd.mean_error, odd.error) == (1, 0.8, "1 of 3", None, None)
    assert odd.marks == "seed 1 diverged, seed 2 missing"
    other = compared(study, "blocks=s_ste(2,4)").rows
    assert (other[0].difference, other[0].cost) == pytest.approx((0, 1.25), abs=1e-12)


def test_the_page_and_the_text(study, capsys):
    assert command.main([str(study)]) == command.main([str(study)]) == 0  # its own pages are written anew
    said = capsys.readouterr().out
    assert "| blocks=dense | 91.00 % ± 1.15 | the baseline |  | 3 of 3 | 1.000 |  | 92.00 % ± 1.15 |  |" in said
    half = 100 * stats.t.ppf(0.975, 2) * math.sqrt((0.01**2 + 0.02**2 + 0.01**2) / 2 / 3)
    shown = rf"may be chance \| [-+]0.00 \[-{half:.2f}, \+{half:.2f}\]"
    assert re.search(rf"\| blocks=s_ste\(2,4\) \| 91.00 % ± 1.53 \| {shown} \| 3 of 3 \| 0.800", said)
    assert "| blocks=<i>mse</i> | 49.00 % | cannot be told | -40.00 | 1 of 3 |" in said
    head = "| config | hardened accuracy | compared | difference in points, 95 % interval | seeds | effective FLOPs"
    assert head in said
    for words in ("± is the standard error of the number before it, over seeds.", "of a lossy copy"):
        assert words in said
    assert said.startswith((study / "compare.md").read_text())
    text = (study / "compare.html").read_text()
    assert text.count("<svg") == 3  # the mark of the page, curves, the frontier
    tags = Tags(text)
    assert not tags.links
    assert "i" not in tags.tags
    for name in ("compare.md", "compare.html"):  # a page of somebody is not replaced
        (study / name).write_text("my notes of a year")
        assert command.main([str(study)]) == 2
        assert f"{study / name} is not a comparison of runs" in capsys.readouterr().err
        assert (study / name).read_text() == "my notes of a year"
        (study / name).unlink()


def test_what_cannot_be_compared(study, capsys):
    (study / "empty").mkdir()
    for args, why in (
        ([study / "a0", study / "a0"], "are the same run"),
        ([study, "--baseline=blocks=x"], "--baseline='blocks=x' is none of the configs: 'blocks=dense'"),
        ([study / "empty"], "is not the folder of a run or of runs"),
    ):
        assert command.main([str(arg) for arg in args]) == 2
        assert why in capsys.readouterr().err


def test_runs_without_a_common_seed_are_compared_unpaired(tmp_path):
    """The difference is that of the means; its variance is the sum of the variances of the means."""
    for seed, accuracy in ((0, 0.90), (1, 0.94)):
        run(tmp_path / f"a{seed}", "dense", seed, accuracy)
    (row,) = compared(tmp_path).rows
    assert (row.name, row.seeds, row.paired) == ("m=dense", "2 of 2", False)  # seeds alone
    for seed, accuracy in ((2, 0.80), (3, 0.82), (4, 0.87)):
        run(tmp_path / f"b{seed}", "mse", seed, accuracy)
    row = compared(tmp_path).rows[1]
    variances = (0.02**2 * 2 / 1 / 2, (0.03**2 + 0.01**2 + 0.04**2) / 2 / 3)
    assert (row.difference, row.error) == pytest.approx((0.83 - 0.92, math.sqrt(sum(variances))))
    text = compare.markdown(compared(tmp_path))
    assert re.search(r"\| may be chance \| -9.00 \[-\d+.\d\d, \+\d.\d\d\], unpaired \|", text)
    run(tmp_path / "c0", "soft", 0, 0.91)
    run(tmp_path / "d9", "one", 9, 0.5)
    assert compared(tmp_path).rows[2].difference == pytest.approx(0.01)  # paired by seed 0
    assert compared(tmp_path).rows[3].error is None  # of one run nothing is known


@pytest.mark.parametrize("paired", [True, False])
def test_whether_a_difference_may_be_chance_is_decided_by_a_t_test(tmp_path, paired):
    draw, told = random.Random(7), []
    for case in range(40):
        both = [[draw.gauss(0.9 - 0.02 * i, 0.01) for _ in range(2 + case % 4)] for i in (0, 1)]
        for i, method in enumerate(("dense", "mse")):
            for seed, accuracy in enumerate(both[i]):
                run(tmp_path / f"{case}/{method}{seed}", method, seed if paired else 10 * i + seed, accuracy)
        row = compared(tmp_path / str(case)).rows[1]
        p = (stats.ttest_rel(*both) if paired else stats.ttest_ind(*both, equal_var=False)).pvalue
        assert (row.paired, row.apart) == (paired, p < 0.05)
        told.append(row.apart)
        test = stats.ttest_rel(*both[::-1]) if paired else stats.ttest_ind(*both[::-1], equal_var=False)
        assert row.interval == pytest.approx(tuple(test.confidence_interval(0.95)))
        words = compare.WORSE if row.difference < 0 else compare.BETTER
        assert compare.verdict(row, "accuracy") == (words if row.apart else compare.CHANCE)
        assert (compare.verdict(row, "loss") == words) is False
    assert 5 < sum(told) < 35  # both cases occur


def test_large_losses_and_equal_differences_say_nothing_wrong(tmp_path):
    for seed in (0, 1):
        run(tmp_path / f"a/d{seed}", "dense", seed, 1e90 * (1 + seed))
        run(tmp_path / f"a/m{seed}", "mse", 5 + seed, 2e90 * (1 + seed))
        run(tmp_path / f"b/d{seed}", "dense", seed, 0.9 + 0.01 * seed)
        run(tmp_path / f"b/m{seed}", "mse", seed, 0.89 + 0.01 * seed)
    assert compared(tmp_path / "a").rows[1].apart is False
    assert compared(tmp_path / "b").rows[1].apart is None  # both seeds lost one image


def data(**fields):
    return {"config": {"data": fields}}


@pytest.mark.parametrize(
    ("both", "note"),
    [
        ((data(name="digits"), data(name="mine.npz")), compare.DATA_DIFFER),
        ((data(name="folder", dir="/a"), data(name="folder", dir="/b")), compare.DATA_DIFFER),
        ((data(name="digits", dir="/a"), data(name="digits", dir="/b")), ""),
        ((data(name="x.txt", dir="/a"), data(name="x.txt", dir="/b")), compare.DATA_DIFFER),
        ((data(name="x.txt"), data(name="x.txt", windows=1)), compare.DATA_DIFFER),
        ((data(name="x", tokenizer="bytes"), data(name="x", tokenizer="t.json")), compare.DATA_DIFFER),
        ((data(name="digits"), {}), ""),  # not known
        (({"data": "00ff00ff"}, {"data": "0000ffff"}), compare.DATA_DIFFER),  # checksums
        (({"data": "00ff00ff"}, {"data": "00ff00ff"}), ""),
        (({"header": [["devices", "1 x cpu"]]}, {"header": [["devices", "1 x H200"]]}), compare.DEVICES_DIFFER),
        (({"header": [["devices", "1 x cpu"]]}, {"header": [["devices", "1 x cpu"]]}), ""),
        (({"header": [["devices", "1 x cpu"]]}, {}), ""),  # not known
    ],
)
def test_a_note_says_what_cannot_be_compared(tmp_path, both, note):
    for name, method, own in zip("ab", ("dense", "mse"), both, strict=True):
        run(tmp_path / name, method, **own)
    assert compared(tmp_path).notes == [*filter(None, [note]), "of a lossy copy"]
    assert note in compare.markdown(compared(tmp_path))


def test_a_run_that_began_with_another_is_a_row_of_its_own(tmp_path):
    """Also if its config and its seed are those of a run from scratch. A run without a score is marked."""
    run(tmp_path / "a")
    run(tmp_path / "b", origin={"directory": "pre/w", "step": 40})
    run(tmp_path / "c", seed=1, accuracy=float("nan"))
    scratch, warm = compared(tmp_path).rows
    assert (scratch.seeds, warm.seeds, warm.name) == ("1 of 2", "1 of 2", "from=pre/w at step 40")
    assert scratch.marks == "seed 1 without a score"


@pytest.mark.parametrize("metric", ["accuracy", "loss"])
def test_the_baseline_is_the_dense_config_that_is_best_on_the_validation_split(tmp_path, metric):
    """By the mean over seeds; the test scores have another order. Without such a score or config it is another one."""
    sign = -1 if metric == "loss" else 1
    scored = lambda test, valid: {metric: 1 + sign * test, f"validation_{metric}": 1 + sign * valid}
    said = lambda: (lambda c: (c.names[c.base].removeprefix("blocks="), c.why))(compared(tmp_path))
    run(tmp_path / "a", "mse", metric=metric, figures=scored(8, 8))
    run(tmp_path / "b", "ste", metric=metric, figures=scored(9, 9))
    assert said() == ("mse", "the first config, because none is dense")
    run(tmp_path / "c", "dense late", metric=metric, outcome="running")
    assert said() == ("dense late", "the only dense config")
    run(tmp_path / "d", "dense later", metric=metric, outcome="running")
    assert said() == ("dense late", "the first dense config, because none has a score yet")
    tests, validations = [0.5, 0.6, 0.9, 0.7], [[0.5, 0.5], [0.7, 0.7], [0.6, 0.65], [0.9, 0.2]]
    for n, (test, scores) in enumerate(zip(tests, validations, strict=True)):
        for seed, score in enumerate(scores):
            run(tmp_path / f"{n}{seed}", f"dense{n}", seed, metric=metric, figures=scored(test, score))
    why = "it has the best validation score of the dense configs"
    assert said() == ("dense1", why)
    assert f"The baseline is blocks=dense1: {why}." in compare.markdown(compared(tmp_path))
    assert f"The baseline is blocks=dense1: {why}." in compare_page.render(compared(tmp_path))
    assert compared(tmp_path, "blocks=mse").why == "from --baseline"
    for name in ("00", "01"):  # now a dense config has no validation score
        about = json.loads((tmp_path / name / "run.json").read_text()) | {"figures": {metric: 1 + sign * 0.5}}
        (tmp_path / name / "run.json").write_text(json.dumps(about))
    why = "it has the best test score of the dense configs, and some of these have no validation score"
    assert said() == ("dense2", why)


def test_runs_that_go_on_are_compared_by_the_scores_that_they_have(tmp_path):
    for name in ("a", "b"):
        run(tmp_path / name, name, outcome="running")
    assert compared(tmp_path).metric == "hardened_accuracy"
    for name in ("a", "b"):
        path = tmp_path / name / "metrics.jsonl"
        path.write_text(path.read_text().replace("hardened_", ""))
    assert compared(tmp_path).metric == "accuracy"


def test_a_comparison_says_of_which_split_its_scores_are(tmp_path):
    run(tmp_path / "a/a")
    run(tmp_path / "a/b", "mse", figures={"accuracy": 0.9, "hardened_accuracy": 0.9, "loss": 1.0})
    assert compared(tmp_path / "a").others == ["accuracy"]  # a score that a run lacks is no column
    assert "Scores are from the test split. The baseline" in compare.markdown(compared(tmp_path / "a"))
    assert "Scores of the test split." in compare_page.render(compared(tmp_path / "a"))
    for name in "ab":
        run(tmp_path / "b" / name, name, figures={"hardened_accuracy": 0.8, "validation_hardened_accuracy": 0.9})
    page = compare_page.render(compared(tmp_path / "b"))
    assert "Columns named validation are from the validation split. Use those to choose a config" in page
    assert "Scores of the validation split." in page
    assert "<figcaption>Scores are from the test split." in page
    run(tmp_path / "b/c", "c", figures={"hardened_accuracy": 0.8})
    assert "of the validation or the test split." in compare_page.render(compared(tmp_path / "b"))


def test_the_page_lies_beside_the_runs_and_links_to_their_reports(tmp_path, monkeypatch, capsys):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for name, method, seed in (("a", "dense", 0), ("b", "mse", 0), ("c", "mse", 1)):
        (run(tmp_path / "runs" / name, method, seed) / "report.html").write_text("a report")
    (tmp_path / "runs" / "c" / "report.html").unlink()
    monkeypatch.chdir(elsewhere)
    assert command.main([str(tmp_path / "runs" / name) for name in "abc"]) == 0
    page = (tmp_path / "runs" / "compare.html").read_text()
    assert not list(elsewhere.iterdir())
    assert Tags(page).links == ["a/report.html", "b/report.html"]
    assert '<a href="a/report.html">blocks=dense</a>' in page
    assert 'blocks=mse <small>seeds <a href="b/report.html">0</a></small>' in page
    assert command.main([str(tmp_path / "runs" / name) for name in "ab"] + ["--to", str(elsewhere / "x")]) == 0
    assert "../../runs/a/report.html" in (elsewhere / "x" / "compare.html").read_text()


def test_what_runs_and_steps_take(tmp_path):
    """Means over seeds; of steps, FLOPs and temporary memory shares of the baseline's."""
    beside = [f"m=dense,seed={seed}" for seed in range(3)]  # three runs share the time
    ended = {"began": "2026-01-31T12:00:00+00:00"}
    peak = lambda of: {"lines": [{"step": 100, "kind": "train", "process_memory": of}]}
    for seed, minutes in ((0, 1), (1, 2)):
        taken = {"measured": {"step_seconds": 0.2 + 0.2 * seed}, "ended": f"2026-01-31T12:0{minutes}:00+00:00"}
        taken["trained_with"] = [name for name in beside if name != beside[seed]]
        run(tmp_path / f"a{seed}", "dense", seed, **ended, **taken, **peak(3e9 - seed))
    taken = {"step_seconds": 0.15, "step_bytes": 3000}
    more = {"measured": taken, "trained_with": ["m=rows,seed=1", "m=rows,seed=2"]}
    run(tmp_path / "b0", "rows", 0, seconds=82.5, began=ended["began"], ended=ended["began"], **more)
    run(tmp_path / "b1", "rows", 1, steps=50, **more)  # it stopped early
    found = compared(tmp_path)
    dense, rows = found.rows
    assert (dense.time, rows.time) == (30, 27.5)  # that of all parts of a run that was continued
    assert [group.seconds for group in found.groups] == pytest.approx([30, (15 + 7.5) / 2])
    assert (rows.steps_time, rows.cost) == pytest.approx((11.25 / 30, 0.6))
    assert (rows.temporary, dense.memory, rows.memory) == (None, 3e9, None)  # the baseline's is not known
    head, _, first = compare.markdown(found).splitlines()[:3]
    assert "| effective FLOPs | time of all steps | time of a run | process memory |" in head
    assert "| 30 s | 3GB |" in first
    page = compare_page.render(found)
    assert page.count("<svg") == 4  # the mark of the page, curves, by FLOPs, by time
    for words in ("By time of all steps", "Process memory is the most"):
        assert words in page


def at(began, ended):
    """Return when a run of 2026 began and ended, by minutes."""
    return {key: f"2026-01-31T12:{minute:02}:00+00:00" for key, minute in (("began", began), ("ended", ended))}


@pytest.mark.parametrize(
    ("dense", "sparse", "comparable"),
    [
        ((at(0, 1), at(1, 2)), (at(2, 3), at(3, 5)), True),  # one after another
        ((at(0, 1), at(1, 2)), (at(2, 3), at(1, 5)), False),  # two at once
        ((at(0, 2), at(0, 2)), (at(2, 5), at(2, 5)), False),  # two at once, and not in one program
        (
            (at(0, 1) | {"header": [["devices", "1 x cpu"]]},),
            (at(1, 2) | {"header": [["devices", "1 x H200"]]},),
            False,
        ),
        (
            (at(0, 1),),
            (at(1, 2) | {"trained_with": ["m=mse,seed=1"]},),
            False,
        ),  # it shared the machine with another seed
        (({},), ({},), True),  # not known
    ],
)
def test_times_are_compared_if_runs_were_alone_on_their_machine(tmp_path, dense, sparse, comparable):
    for method, runs in (("dense", dense), ("mse", sparse)):
        for seed, about in enumerate(runs):
            measured = {"step_seconds": 0.1, "step_bytes": 1}
            run(tmp_path / f"{method}{seed}", method, seed, measured=measured, **({"seconds": 60.0} | about))
    found = compared(tmp_path)
    assert found.rows[1].comparable == comparable
    row = compare.markdown(found).splitlines()[3]
    assert ("| not comparable | 1.000 | not comparable |" in row) == (not comparable)
    assert ("| 1.000 | 1.000 | 1 min |" in row or "| 1.000 | 1.000 | 30 s |" in row) == comparable
    assert (compare.TIMES_DIFFER in found.notes) == (not comparable)
    assert ("<h3>By time of all steps</h3>" in compare_page.render(found)) == comparable


def test_one_test_image_is_no_mountain(tmp_path):
    """The axis of differences has a range of two points at least, and the caption says what an image is worth."""
    header = [["data", "digits: 1,293 training images, 144 validation, 360 test; 10 classes"]]
    for seed in range(3):
        run(tmp_path / f"a{seed}", "dense", seed, 0.98, header=header, unit="images")
        run(tmp_path / f"b{seed}", "mse", seed, 0.98 + (seed - 1) / 360, header=header, unit="images")
    page = compare_page.render(compared(tmp_path))
    ticks = [float(tick.replace("−", "-")) for tick in re.findall(r">(0|[+−]\d\.\d)</text>", page)]
    assert max(ticks) - min(ticks) >= 1.5
    assert "One of the 360 test examples is 0.28 points." in page


def test_figures_tell_methods_apart(tmp_path):
    """Long names that differ in the middle have labels that differ, and the table has the colours of the figures."""
    methods = [f"mdgf(2,4,linear(1,0,{share}%)); dw_g=mvue(2,4)" for share in (30, 50, 70)] + ["dense"]
    for number, method in enumerate(methods):
        run(tmp_path / str(number), method, 0, 0.8 + 0.02 * number)
    page = compare_page.render(compared(tmp_path))
    labels = [label.partition("\u2003")[2] or label for label in re.findall(">([^<>]*)</text>", page)]
    for label in ("…30%)); dw_g=mvue…", "…50%)); dw_g=mvue…", "…70%)); dw_g=mvue…", "dense, the baseline"):
        assert labels.count(label) == 1  # in the curves, or the baseline in the other picture
    assert len([label for label in labels if "mvue(2,4)" in label]) == 3  # whole names, against effective FLOPs
    assert all(f'style="background:var(--s{n})"' in page for n in range(4))


@pytest.mark.parametrize(
    "names",
    [
        ["a=1", "a=2"],
        ["dense", "dense; x=1", "dense; x=2"],
        [f"{'y' * 30}{n}{'z' * 30}" for n in range(12)],
        [f"f({n},{m})" for n in range(5) for m in (8, 16)],
        ["same", "same"],
        ["", "a"],
        ["only"],
    ],
)
def test_labels_are_short_and_all_different(names):
    labels = distinct(names)
    assert len(set(labels)) == len(names)
    assert all(len(label) <= 18 for label in labels)
