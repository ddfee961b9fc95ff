"""Tests of a report's errors, its live page, its plan page and its explanations of words."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from experiments import report
from experiments.report import runs, words
from experiments.report.examples import LEVELS, PAIRS, image_uri
from tests.experiments.report.report_test import HOSTILE, Tags, image_run, lines, write_run, written

ROOT = Path(report.__file__).parents[2]


def with_pictures(folder, **arrays):
    """A run of images with more arrays in its pictures.npz."""
    image_run(folder)
    with np.load(folder / "pictures.npz") as found:
        kept = dict(found)
    np.savez(folder / "pictures.npz", **kept | arrays)
    return folder


# ---- images ----


def test_a_confusion_matrix_has_a_row_for_each_class(tmp_path):
    confusion = np.array([[5, 0, 1], [0, 6, 0], [2, 1, 5]])
    page, tags = written(with_pictures(tmp_path / "run", confusion=confusion))
    assert "4 of 20 test images are classified wrongly (20 %)." in tags.text
    rows = re.findall(r'<tr><th scope="row">(\w+)</th>((?:<td[^>]*>[^<]*</td>)+)</tr>', page)
    found = {name: re.findall(r"<td[^>]*>([^<]*)</td>", cells) for name, cells in rows}
    assert found["cat"] == ["5", "", "1", "83.3 %"]
    assert found["ship"] == ["2", "1", "5", "62.5 %"]
    assert '<th scope="row">cat</th><td class="right" style="--share:83.3%">5</td>' in page
    assert page.count('class="right" style') == 3
    assert page.count('class="wrong" style') == 3
    pairs = re.findall("<li>(.*?)</li>", page)
    assert [re.sub("<.*?>", "", pair) for pair in pairs if "taken" in pair] == [
        "ship taken for cat: 2 of 8", "cat taken for ship: 1 of 6", "ship taken for dog: 1 of 8",
    ]  # fmt: skip


def test_many_classes_are_a_list_of_pairs(tmp_path):
    rng = np.random.default_rng(0)
    confusion = np.diag(np.full(1000, 40)) + (rng.random((1000, 1000)) < 1e-4)
    np.fill_diagonal(confusion, 40)
    confusion[7, 999] = 9
    page, tags = written(with_pictures(tmp_path / "run", confusion=confusion))
    assert 'class="values confusion"' not in page
    assert f"{confusion.sum() - 40_000} of" in tags.text
    pairs = [re.sub("<.*?>", "", pair) for pair in re.findall("<li>(.*?)</li>", page) if "taken" in pair]
    assert len(pairs) == PAIRS
    assert pairs[0] == "class 7 taken for class 999: 9 of " + str(confusion[7].sum())
    assert len(page) < 200_000
    page, tags = written(with_pictures(tmp_path / "right", confusion=np.diag([3, 3, 3])))
    assert "0 of 9 test images are classified wrongly (0 %)." in tags.text
    assert "confused most" not in tags.text


@pytest.mark.parametrize("size", [8, 128])
@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_images_of_any_channels_are_shown(size, channels):
    kind = "png" if size == 8 else "jpeg"
    assert image_uri(np.zeros((size, size, channels), np.uint8)).startswith(f"data:image/{kind};base64,")


def test_the_hardest_images_are_shown_with_their_losses(tmp_path):
    arrays = {"hardest_images": np.zeros((2, 8, 8, 1), np.uint8), "hardest_labels": np.array([0, 1])}
    arrays |= {"hardest_predictions": np.array([2, 1]), "hardest_confidence": np.array([0.875, 0.5])}
    page, tags = written(with_pictures(tmp_path / "run", hardest_loss=np.array([4.25, 0.75]), **arrays))
    section = page[page.index('<section id="hardest">') :]
    assert re.findall('alt="([^"]*)"', section) == ["cat, taken for ship", "dog, recognised"]
    assert "loss 4.25" in tags.text
    assert "87.5 %" in tags.text


# ---- text ----


@pytest.mark.slow
def test_the_hardest_windows_are_shaded_by_their_losses(tmp_path):
    run = write_run(tmp_path / "run", about={"unit": "tokens"})
    pieces = [["a<b", None], [" no", 0.0], [" half", 1.0], [" half too", 1.01], [" all", 2.0], [HOSTILE, 2.0]]
    (run / "text.json").write_text(json.dumps({"hardest": [{"loss": 1.5, "pieces": pieces}]}))
    page, tags = written(run)
    section = page[page.index('<section id="hardest">') :]
    quote = re.search("<blockquote>(.*?)</blockquote>", section, re.DOTALL)[1]
    assert quote.startswith(f'<small>1.5 nats per token</small>a&lt;b no<span class="loss{LEVELS // 2}"> half half too')
    assert f'<span class="loss{LEVELS}"> all&lt;script' in quote
    assert "0 to 2 nats and more" in tags.text


# ---- a run that goes on ----


def test_a_run_that_goes_on_says_how_far_it_is_and_reloads(tmp_path):
    run = write_run(tmp_path / "run", about={"outcome": "running", "ended": None, "steps": 8000, "summary": []})
    page, tags = written(run)
    assert "step 2,000 of 8,000, about 4 min left" in tags.text  # 50 steps in 2 s
    assert '<meta http-equiv="refresh" content="8">' in page  # an evaluation every 8 s
    write_run(run)
    page, tags = written(run)
    assert "http-equiv" in page
    assert "refresh" not in page
    assert "left" not in re.sub("<style>.*?</style>", "", page, flags=re.DOTALL).split("<nav")[0]


@pytest.mark.parametrize(("every", "seconds"), [(0.01, 5), (20.4, 20), (3600, 60)])
def test_a_page_reloads_about_as_often_as_it_is_written(tmp_path, every, seconds):
    metrics = [{"kind": "eval", "step": n, "seconds": every * n, "loss": 1.0} for n in (1, 2, 3)]
    assert report.read(write_run(tmp_path, metrics, about={"outcome": "running"})).reload == seconds
    assert report.read(write_run(tmp_path, metrics, about={"outcome": "diverged: x"})).reload == 0
    run = report.read(write_run(tmp_path, [], about={"outcome": "running", "steps": 10}))
    assert (run.progress, run.reload) == ("", 5)
    one = [{"kind": "train", "step": 3, "seconds": 1.0, "loss": 1.0}]
    assert report.read(write_run(tmp_path, one, about={"steps": 10})).progress == "step 3 of 10"


# ---- the plan ----


def test_the_plan_is_a_page_and_a_part_of_the_report(tmp_path):
    run = write_run(tmp_path / "run")
    plan = "<table><tr><td>y_w=ste(mse(2,4))</td></tr></table>"
    (run / "plan.html").write_text(report.plan_page(f"a {HOSTILE}", plan))
    page = (run / "plan.html").read_text()
    assert page.count(plan) == 1
    assert "<script" not in page
    assert page.startswith("<!doctype html>")
    assert Tags(page).links == ["report.html"]
    assert runs.read(run).plan_html == plan
    rendered = report.write(run).read_text()
    assert rendered.count(plan) == 1
    assert '<a href="plan.html">' in rendered
    assert '<a href="plan.html">' not in report.render(report.read(run), plan_page="")
    (run / "plan.html").write_text(plan)  # as earlier versions wrote it
    assert runs.read(run).plan_html == plan


# ---- words ----


def test_the_glossary_has_every_meaning_of_a_report():
    glossary = " ".join((ROOT / "docs" / "glossary.md").read_text().replace("`", "").split())
    for term, meaning in words.TERMS.items():
        assert " ".join(meaning.split()) in glossary, term


def test_words_of_a_run_are_explained_in_its_report(tmp_path):
    run = with_pictures(tmp_path / "run", confusion=np.diag([1, 1, 1]))
    write_run(run, lines(200), about={"header": [["FLOPs a step", "3 M dense, 2 M effective (0.73)"]]})
    page, tags = written(run)
    found = re.findall("<dt>(.*?)</dt>", "".join(re.findall('<details class="terms">.*?</details>', page)))
    assert {"hardened", "effective", "train", "eval", "gradient norm", "best", "confidence"} <= set(found)
    assert len(found) == len(set(found))
    assert "Smoothing: the faint line shows single values" in tags.text
