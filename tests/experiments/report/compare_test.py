"""Runs beside each other: the numbers of the table, its marks, its page."""

import json
import math
import random
import re

import pytest
from scipy import stats

from experiments.report import __main__ as command, compare, compare_page
from experiments.report.runs import read
from experiments.report.words import distinct
from tests.experiments.report.report_test import Tags


def run(folder, method, seed, accuracy, outcome="finished", flops=(10, 8)):
    folder.mkdir(parents=True)
    about = {"name": f"m={method},seed={seed}", "outcome": outcome, "metric": "accuracy", "flops": flops, "steps": 100}
    about |= {"notes": ["of a lossy copy"]}
    if outcome == "finished":
        about["figures"] = {"accuracy": accuracy, "hardened_accuracy": accuracy - 0.01}
    (folder / "run.json").write_text(json.dumps(about))
    (folder / "config.json").write_text(json.dumps({"seed": seed, "sparsity": {"blocks": method}, "batch": 4}))
    lines = [{"step": s, "seconds": s, "kind": "eval", "hardened_accuracy": accuracy * s / 100} for s in (50, 100)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def edit(folder, **fields):
    """Change fields of a run's run.json."""
    about = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(about | fields))


@pytest.fixture
def study(tmp_path):
    for seed, (dense, sparse) in enumerate([(0.90, 0.91), (0.92, 0.90), (0.94, 0.95)]):
        run(tmp_path / f"a{seed}", "dense", seed, dense, flops=(10, 10))
        run(tmp_path / f"b{seed}", "s_ste(2,4)", seed, sparse)
    run(tmp_path / "c0", "<i>mse</i>", 0, 0.5)
    run(tmp_path / "c1", "<i>mse</i>", 1, 0.0, outcome="diverged: the loss is nan at step 7")
    (tmp_path / "results.jsonl").touch()
    return tmp_path


def test_means_spreads_and_paired_differences(study):
    dense, sparse, odd = compare.compare_folders([study]).rows
    assert (dense.name, sparse.name, odd.name) == ("blocks=dense", "blocks=s_ste(2,4)", "blocks=<i>mse</i>")
    assert dense.mean == pytest.approx(0.91)  # hardened
    assert dense.mean_error == pytest.approx(0.02 / math.sqrt(3))  # the standard error
    mean, error = sparse.others["accuracy"]
    assert mean == pytest.approx(0.92)
    assert error == pytest.approx(math.sqrt((0.01**2 + 0.02**2 + 0.03**2) / 2 / 3))
    differences = [0.01, -0.02, 0.01]
    assert sparse.difference == pytest.approx(0, abs=1e-12)
    spread = math.sqrt(sum(d * d for d in differences) / 2)
    assert sparse.error == pytest.approx(spread / math.sqrt(3))
    assert (dense.cost, sparse.cost, odd.seeds) == (1, 0.8, "1 of 3")
    assert odd.marks == "seed 1 diverged, seed 2 missing"
    assert (odd.mean_error, odd.error) == (None, None)  # of one seed nothing is known
    other = compare.compare_folders([study], baseline="blocks=s_ste(2,4)").rows
    assert other[0].difference == pytest.approx(0, abs=1e-12)
    assert other[0].cost == 1.25


def test_the_page_and_the_text(study, capsys):
    assert command.main([str(study)]) == 0
    said = capsys.readouterr().out
    assert "| blocks=dense | 91.00 % ± 1.15 | 3 of 3 | the baseline | 1.000 |  | 92.00 % ± 1.15 |  |" in said
    assert "| blocks=s_ste(2,4) | 91.00 % ± 1.53 | 3 of 3 | -0.00 ± 1.00, may be chance | 0.800 |  | 92.00 %".replace(
        "-0.00", "+0.00"
    ) in said.replace("-0.00", "+0.00")
    assert "| config | hardened accuracy | seeds | difference to the baseline | effective FLOPs" in said
    assert "± is the standard error of the number before it, over seeds." in said
    assert "of a lossy copy" in said
    assert said.startswith((study / "compare.md").read_text())
    text = (study / "compare.html").read_text()
    assert text.count("<svg") == 3  # the mark of the page, curves, the frontier
    tags = Tags(text)
    assert not [r for r in tags.references if not r.startswith(("#", "data:"))]
    assert "i" not in tags.tags


def test_what_cannot_be_compared(study, capsys):
    assert command.main([str(study / "a0"), str(study / "a0")]) == 2
    assert "are the same run" in capsys.readouterr().err
    assert command.main([str(study), "--baseline", "blocks=x"]) == 2
    assert "--baseline='blocks=x' is none of the configs: 'blocks=dense'" in capsys.readouterr().err
    (study / "empty").mkdir()
    assert command.main([str(study / "empty")]) == 2
    assert "is not the folder of a run or of runs" in capsys.readouterr().err


def test_seeds_alone(tmp_path):
    for seed in (0, 1):
        run(tmp_path / str(seed), "dense", seed, 0.9)
    (row,) = compare.compare_folders([tmp_path]).rows
    assert (row.name, row.seeds, row.mean) == ("m=dense", "2 of 2", pytest.approx(0.89))


def test_runs_without_a_common_seed_are_compared_unpaired(tmp_path):
    """The difference is that of the means; its variance is the sum of the variances of the means."""
    for seed, accuracy in ((0, 0.90), (1, 0.94)):
        run(tmp_path / f"a{seed}", "dense", seed, accuracy, flops=(10, 10))
    for seed, accuracy in ((2, 0.80), (3, 0.82), (4, 0.87)):
        run(tmp_path / f"b{seed}", "mse", seed, accuracy)
    comparison = compare.compare_folders([tmp_path])
    row = comparison.rows[1]
    assert row.difference == pytest.approx(0.83 - 0.92)
    variances = (0.02**2 * 2 / 1 / 2, (0.03**2 + 0.01**2 + 0.04**2) / 2 / 3)
    assert row.error == pytest.approx(math.sqrt(sum(variances)))
    assert (row.paired, comparison.rows[0].paired) == (False, False)
    assert "| -9.00 ± 2.89, unpaired, may be chance |" in compare.markdown(comparison)
    run(tmp_path / "c0", "soft", 0, 0.91)
    assert compare.compare_folders([tmp_path]).rows[2].difference == pytest.approx(0.01)  # paired by seed 0
    run(tmp_path / "d9", "one", 9, 0.5)
    assert compare.compare_folders([tmp_path]).rows[3].error is None  # of one run nothing is known


@pytest.mark.parametrize("paired", [True, False])
def test_whether_a_difference_may_be_chance_is_decided_by_a_t_test(tmp_path, paired):
    draw, told = random.Random(7), []
    for case in range(40):
        both = [[draw.gauss(0.9 - 0.02 * i, 0.01) for _ in range(2 + case % 4)] for i in (0, 1)]
        for i, method in enumerate(("dense", "mse")):
            for seed, accuracy in enumerate(both[i]):
                number = seed if paired else 10 * i + seed
                run(tmp_path / f"{case}/{method}{seed}", method, number, accuracy, flops=(10, 10 - i))
        row = compare.compare_folders([tmp_path / str(case)]).rows[1]
        p = (stats.ttest_rel(*both) if paired else stats.ttest_ind(*both, equal_var=False)).pvalue
        assert (row.paired, row.apart) == (paired, p < 0.05)
        told.append(row.apart)
    assert 5 < sum(told) < 35  # both cases occur


def test_a_note_says_that_data_sets_differ(tmp_path):
    sentence = "The runs have different data sets, so their scores cannot be compared."
    for n, (data, differs) in enumerate([
        (({"name": "digits"}, {"name": "mine.npz"}), True),
        (({"name": "folder", "dir": "/a"}, {"name": "folder", "dir": "/b"}), True),
        (({"name": "digits", "dir": "/a"}, {"name": "digits", "dir": "/b"}), False),
        (({"name": "x.txt", "dir": "/a"}, {"name": "x.txt", "dir": "/b"}), True),
        (({"name": "x.txt"}, {"name": "x.txt", "windows": 1}), True),
        (({"name": "x.txt", "tokenizer": "bytes"}, {"name": "x.txt", "tokenizer": "t.json"}), True),
        (({"name": "digits"}, None), False),  # not known
    ]):  # fmt: skip
        for name, method, own in zip("ab", ("dense", "mse"), data, strict=True):
            path = run(tmp_path / str(n) / name, method, 0, 0.9)
            config = json.loads((path / "config.json").read_text()) | ({} if own is None else {"data": own})
            (path / "config.json").write_text(json.dumps(config))
        assert (sentence in compare.markdown(compare.compare_folders([tmp_path / str(n)]))) == differs


def test_a_note_says_that_files_of_one_name_had_other_content(tmp_path):
    for name, method, data in (("a", "dense", "00ff00ff"), ("b", "mse", "0000ffff")):
        edit(run(tmp_path / name, method, 0, 0.9), data=data)
    assert compare.DATA_DIFFER in compare.compare_folders([tmp_path]).notes
    edit(tmp_path / "b", data="00ff00ff")
    assert compare.DATA_DIFFER not in compare.compare_folders([tmp_path]).notes


def test_a_run_that_began_with_another_is_a_row_of_its_own(tmp_path):
    """Also if its config and its seed are those of a run from scratch."""
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        run(tmp_path / name, "dense", seed, 0.9)
    edit(tmp_path / "b", origin={"directory": "pre/w", "step": 40})
    scratch, warm = compare.compare_folders([tmp_path]).rows
    assert (scratch.seeds, warm.seeds, warm.name) == ("2 of 2", "1 of 2", "from=pre/w at step 40")


def test_a_finished_run_without_a_score_is_marked(tmp_path):
    for seed, accuracy in enumerate((0.9, float("nan"))):
        run(tmp_path / str(seed), "dense", seed, accuracy)
    (row,) = compare.compare_folders([tmp_path]).rows
    assert (row.seeds, row.marks) == ("1 of 2", "seed 1 without a score")


@pytest.mark.parametrize("name", ["compare.md", "compare.html"])
def test_a_page_of_somebody_is_not_replaced(study, name, capsys):
    (study / name).write_text("my notes of a year")
    assert command.main([str(study)]) == 2
    assert f"{study / name} is not a comparison of runs" in capsys.readouterr().err
    assert (study / name).read_text() == "my notes of a year"
    (study / name).unlink()
    assert command.main([str(study)]) == command.main([str(study)]) == 0  # its own are written anew


def test_a_note_says_that_devices_differ(tmp_path):
    sentence = "The runs were made on different devices, so their times and their memory cannot be compared."
    for n, (devices, differs) in enumerate([
        (("1 x cpu", "1 x NVIDIA H200"), True),
        (("1 x cpu", "1 x cpu"), False),
        (("1 x cpu", None), False),  # not known
    ]):  # fmt: skip
        for name, method, own in zip("ab", ("dense", "mse"), devices, strict=True):
            path = run(tmp_path / str(n) / name, method, 0, 0.9)
            about = json.loads((path / "run.json").read_text())
            (path / "run.json").write_text(json.dumps(about | ({} if own is None else {"header": [["devices", own]]})))
        assert (sentence in compare.markdown(compare.compare_folders([tmp_path / str(n)]))) == differs


def test_large_losses_and_equal_differences_say_nothing_wrong(tmp_path):
    for seed in (0, 1):
        run(tmp_path / f"a/d{seed}", "dense", seed, 1e90 * (1 + seed), flops=(10, 10))
        run(tmp_path / f"a/m{seed}", "mse", 5 + seed, 2e90 * (1 + seed))
        run(tmp_path / f"b/d{seed}", "dense", seed, 0.9 + 0.01 * seed, flops=(10, 10))
        run(tmp_path / f"b/m{seed}", "mse", seed, 0.89 + 0.01 * seed)
    assert compare.compare_folders([tmp_path / "a"]).rows[1].apart is False
    assert compare.compare_folders([tmp_path / "b"]).rows[1].apart is None  # both seeds lost one image


def test_the_time_of_a_run_is_that_of_all_its_parts(tmp_path):
    path = run(tmp_path / "a", "dense", 0, 0.9)
    times = {"began": "2026-01-31T12:00:00+00:00", "ended": "2026-01-31T12:00:14+00:00"}
    for extra, wanted in (({}, 14), ({"seconds": 27.5}, 27.5)):
        edit(path, **times, **extra)
        assert compare.compare_folders([path]).rows[0].time == wanted


def test_the_dense_runs_are_the_baseline(tmp_path):
    run(tmp_path / "a", "mse", 0, 0.8)
    run(tmp_path / "b", "dense", 0, 0.9, flops=(10, 10))
    assert compare.compare_folders([tmp_path]).base == 1
    assert compare.compare_folders([tmp_path], "blocks=mse").base == 0
    assert "The baseline is blocks=dense: the only dense config." in compare.markdown(
        compare.compare_folders([tmp_path])
    )
    assert "The baseline is blocks=mse: from --baseline." in compare.markdown(
        compare.compare_folders([tmp_path], "blocks=mse")
    )


@pytest.mark.parametrize("metric", ["accuracy", "loss"])
def test_of_several_dense_configs_the_best_on_the_validation_split_is_the_baseline(tmp_path, metric, capsys):
    """By the mean over seeds. The test scores have another order."""
    tests, validations = [0.5, 0.6, 0.9, 0.7], [[0.5, 0.5], [0.7, 0.7], [0.6, 0.65], [0.9, 0.2]]
    sign = -1 if metric == "loss" else 1
    for n, (test, scores) in enumerate(zip(tests, validations, strict=True)):
        for seed, score in enumerate(scores):
            figures = {metric: 1 + sign * test, f"validation_{metric}": 1 + sign * score}
            edit(run(tmp_path / f"{n}{seed}", f"dense{n}", seed, 0, flops=(10, 10)), metric=metric, figures=figures)
    edit(run(tmp_path / "a", "mse", 0, 0), metric=metric, figures={metric: 9.0, f"validation_{metric}": sign * 9.0})
    edit(run(tmp_path / "b", "late", 0, 0, outcome="running", flops=(10, 10)), metric=metric)
    assert command.main([str(tmp_path), "--baseline=blocks=mse"]) == 0
    comparison = compare.compare_folders([tmp_path])
    assert comparison.names[comparison.base] == "blocks=dense1"
    why = "The baseline is blocks=dense1: it has the best validation score of the dense configs."
    assert why in compare.markdown(comparison)
    assert why in compare_page.render(comparison)
    edit(tmp_path / "00", figures={metric: 1 + sign * 0.5})  # a seed without a validation score: the other one has it
    assert compare.compare_folders([tmp_path]).names[comparison.base] == "blocks=dense1"
    edit(tmp_path / "01", figures={metric: 1 + sign * 0.5})
    comparison = compare.compare_folders([tmp_path])
    assert comparison.names[comparison.base] == "blocks=dense2"
    assert (
        "it has the best test score of the dense configs, and some of these have no validation score."
        in compare.markdown(comparison)
    )


def test_without_a_dense_config_or_a_score_the_first_is_the_baseline(tmp_path):
    run(tmp_path / "a", "mse", 0, 0.8)
    run(tmp_path / "b", "ste", 0, 0.9)
    comparison = compare.compare_folders([tmp_path])
    assert (comparison.base, comparison.why) == (0, "the first config, because none is dense")
    for name in "cd":
        run(tmp_path / name, f"dense {name}", 0, 0.9, outcome="running", flops=(10, 10))
    comparison = compare.compare_folders([tmp_path])
    assert (comparison.base, comparison.why) == (2, "the first dense config, because none has a score yet")
    edit(tmp_path / "c", flops=[0, 0])
    assert compare.compare_folders([tmp_path]).rows[0].cost is None


def test_runs_that_go_on_are_compared_by_the_scores_that_they_have(tmp_path):
    for name in ("a", "b"):
        run(tmp_path / name, name, 0, 0.9, outcome="running")
    assert compare.compare_folders([tmp_path]).metric == "hardened_accuracy"
    for name in ("a", "b"):
        path = tmp_path / name / "metrics.jsonl"
        path.write_text(path.read_text().replace("hardened_", ""))
    assert compare.compare_folders([tmp_path]).metric == "accuracy"


def test_a_comparison_says_of_which_split_its_scores_are(tmp_path):
    run(tmp_path / "a", "dense", 0, 0.9, flops=(10, 10))
    run(tmp_path / "b", "mse", 0, 0.8)
    comparison = compare.compare_folders([tmp_path])
    assert compare.markdown(comparison).count("Scores are from the test split. The baseline") == 1
    page = compare_page.render(comparison)
    assert "Means over seeds, of the test split." in page
    for name in "ab":
        edit(tmp_path / name, figures={"hardened_accuracy": 0.8, "validation_hardened_accuracy": 0.9})
    comparison = compare.compare_folders([tmp_path])
    legend = (
        "Scores are from the test split. Columns named validation are from the validation split. Use those to choose a "
    )
    assert legend in compare.markdown(comparison)
    page = compare_page.render(comparison)
    assert legend in page
    assert "Means over seeds, of the validation split." in page
    assert "<figcaption>Scores are from the test split. FLOPs of the whole run" in page
    edit(tmp_path / "b", figures={"hardened_accuracy": 0.8})
    assert "of the validation or the test split." in compare_page.render(compare.compare_folders([tmp_path]))


def test_the_time_of_a_run(tmp_path):
    for seed, minutes in ((0, 1), (1, 2)):
        run(tmp_path / str(seed), "dense", seed, 0.9)
        about = json.loads((tmp_path / str(seed) / "run.json").read_text())
        about |= {"began": "2026-01-31T12:00:00+00:00", "ended": f"2026-01-31T12:0{minutes}:00+00:00"}
        (tmp_path / str(seed) / "run.json").write_text(json.dumps(about))
    (row,) = compare.compare_folders([tmp_path]).rows
    assert row.time == 90
    for seed in (0, 1):
        edit(tmp_path / str(seed), trained_with=["a", "b"])  # three runs share the time
    assert compare.compare_folders([tmp_path]).rows[0].time == 30
    for seed in (0, 1):
        edit(tmp_path / str(seed), trained_with=[])
    assert "| 1 min 30 s |" in compare.markdown(compare.compare_folders([tmp_path]))


def test_the_page_lies_beside_the_runs_and_links_to_their_reports(tmp_path, monkeypatch, capsys):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for name, method, seed in (("a", "dense", 0), ("b", "mse", 0), ("c", "mse", 1)):
        run(tmp_path / "runs" / name, method, seed, 0.9)
        (tmp_path / "runs" / name / "report.html").write_text("a report")
    (tmp_path / "runs" / "c" / "report.html").unlink()
    monkeypatch.chdir(elsewhere)
    assert command.main([str(tmp_path / "runs" / name) for name in "abc"]) == 0
    page = (tmp_path / "runs" / "compare.html").read_text()
    assert not list(elsewhere.iterdir())
    assert [r for r in Tags(page).references if not r.startswith(("#", "data:"))] == ["a/report.html", "b/report.html"]
    assert '<a href="a/report.html">blocks=dense</a>' in page
    assert 'blocks=mse <small>seeds <a href="b/report.html">0</a></small>' in page
    assert command.main([str(tmp_path / "runs" / name) for name in "ab"] + ["--to", str(elsewhere / "x")]) == 0
    assert "../../runs/a/report.html" in (elsewhere / "x" / "compare.html").read_text()
    capsys.readouterr()


def test_the_memory_of_a_device_is_a_column_if_runs_tell_it(tmp_path):
    for seed, peak in ((0, 3e9), (1, 2e9)):
        run(tmp_path / str(seed), "dense", seed, 0.9)
        with (tmp_path / str(seed) / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": 100, "seconds": 1.0, "kind": "train", "process_memory": peak}) + "\n")
    run(tmp_path / "2", "mse", 0, 0.9)
    comparison = compare.compare_folders([tmp_path])
    assert [row.memory for row in comparison.rows] == [3e9, None]
    table = compare.markdown(comparison).splitlines()
    assert [cell.strip() for cell in table[0].split("|")][7] == "process memory"
    assert "| 3GB |" in table[2]
    assert "Process memory is the most" in compare.markdown(comparison)


def test_what_a_step_takes_is_a_share_of_the_baselines(tmp_path):
    for seed in (0, 1):
        edit(
            run(tmp_path / f"a{seed}", "dense", seed, 0.9, flops=(10, 10)), measured={"step_seconds": 0.2 + 0.2 * seed}
        )
        taken = {"step_seconds": 0.15, "step_bytes": 3000}
        edit(run(tmp_path / f"b{seed}", "rows", seed, 0.8), measured=taken)
    comparison = compare.compare_folders([tmp_path])
    assert [row.steps_time for row in comparison.rows] == pytest.approx([1, 0.5])  # of the means 0.3 and 0.15
    assert [row.temporary for row in comparison.rows] == [None, None]  # the baseline's is not known
    assert [group.seconds for group in comparison.groups] == pytest.approx([30, 15])  # of 100 steps
    table = compare.markdown(comparison)
    assert "| effective FLOPs | time of all steps | time of a run |" in table
    assert " 0.800 | 0.500 | " in table
    page = compare_page.render(comparison)
    assert page.count("<svg") == 4  # the mark of the page, curves, by FLOPs, by time
    assert "Time of all steps, without compilation and evaluations." in page
    edit(tmp_path / "b1", steps=50)  # it stopped early
    assert compare.compare_folders([tmp_path]).groups[1].seconds == pytest.approx((15 + 7.5) / 2)


def test_a_score_that_a_run_lacks_is_no_column(tmp_path):
    run(tmp_path / "a", "dense", 0, 0.9)
    run(tmp_path / "b", "mse", 0, 0.8)
    about = json.loads((tmp_path / "b" / "run.json").read_text())
    about["figures"]["loss"] = 1.0
    (tmp_path / "b" / "run.json").write_text(json.dumps(about))
    assert compare.compare_folders([tmp_path]).others == ["accuracy"]


def test_figures_tell_methods_apart(tmp_path):
    """Long names that differ in the middle have labels that differ, and the table has the colours of the figures."""
    methods = [f"mdgf(2,4,linear(1,0,{share}%)); drhs_g=mvue(2,4)" for share in (30, 50, 70)] + ["dense"]
    for number, method in enumerate(methods):
        run(tmp_path / str(number), method, 0, 0.8 + 0.02 * number)
    assert command.main([str(tmp_path / str(number)) for number in range(4)]) == 0
    page = (tmp_path / "compare.html").read_text()
    labels = re.findall(">([^<>]*)</text>", page)
    for label in ("…30%)); drhs_g=mv…", "…50%)); drhs_g=mv…", "…70%)); drhs_g=mv…", "dense"):
        assert labels.count(label) == 2  # in the curves, and against effective FLOPs
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


def test_flops_are_the_mean_of_seeds_that_stopped_at_other_steps(tmp_path):
    for seed, steps in enumerate((40, 100, 100)):
        edit(run(tmp_path / f"a{seed}", "dense", seed, 0.9), steps=steps)
    (group,) = compare.groups([read(tmp_path / f"a{seed}") for seed in range(3)])
    assert group.cost == (800, 640)
