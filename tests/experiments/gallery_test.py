"""The gallery: which config files it shows, and what its index links to."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from experiments import command, gallery
from experiments.training import digest
from tests.experiments.report.report_test import Tags

CONFIGS = Path(gallery.ROOT) / "configs"
SHELVES = (gallery.Shelf("small", "Small <runs>", ("vit_dense", "vit_24")),)


def run(folder, accuracy, effective):
    folder.mkdir(parents=True)
    about = {"name": folder.name, "outcome": "finished", "metric": "accuracy", "flops": [10, effective], "steps": 100}
    about |= {"began": "2026-01-31T12:00:00+00:00", "ended": "2026-01-31T12:01:30+00:00", "notes": ["of 8x8 digits"]}
    about |= {"figures": {"accuracy": accuracy, "hardened_accuracy": accuracy - 0.01}}
    if folder.name != "vit_dense":
        about["comparison"] = f"{accuracy:.2%}, 0.60 of the dense FLOPs; dense 98.24% ± 0.09% (3 recorded seeds)"
    (folder / "run.json").write_text(json.dumps(about))
    (folder / "config.json").write_text(json.dumps({"seed": 0, "sparsity": folder.name}))
    (folder / "metrics.jsonl").write_text('{"step": 100, "seconds": 9, "kind": "eval", "hardened_accuracy": 0.9}\n')
    for name in ("plan.html", "text.json"):
        (folder / name).write_text(json.dumps({"prompt": f"{name} of {folder.name}"}))
    np.savez(folder / "pictures.npz", mask=np.eye(4, dtype=bool), mask_name=f"mask of {folder.name}", mask_m=4)
    (folder / "checkpoints").mkdir()


@pytest.fixture
def runs(tmp_path):
    run(tmp_path / "runs" / "vit_dense", 0.98, 10)
    run(tmp_path / "runs" / "vit_24", 0.96, 6)
    return tmp_path / "runs"


def test_every_config_file_is_shown_or_said_not_to_be():
    shown = [name for shelf in gallery.SHELVES for name in shelf.names]
    names = {path.stem for path in CONFIGS.glob("*.py")} - {"common"}
    assert sorted([*shown, *gallery.NOT_RUN]) == sorted(names)
    assert all(shelf.names[0].endswith("_dense") for shelf in gallery.SHELVES)


def test_the_index_links_to_reports_and_comparisons_that_are_there(runs, tmp_path):
    index = gallery.write(runs, tmp_path / "out", SHELVES)
    text = index.read_text()
    links = Tags(text).links
    assert links == ["vit_dense.html", "vit_24.html", "compare-small.html"]
    assert all((index.parent / link).exists() for link in links)
    assert "Small &lt;runs&gt;" in text
    assert "To compare methods, train several seeds" in text
    for cell in (
        "95.00 %",
        "dense 98.24% ± 0.09% (3 recorded seeds)",
        "0.600",
        "of 8x8 digits",
        "dense Vision Transformer",
    ):
        assert cell in text, cell
    assert "1 min 30 s" not in text  # other runs may have taken part of the machine
    assert "vit_dense" in (index.parent / "compare-small.html").read_text()


def test_the_table_of_the_site_links_to_the_same(runs):
    text = gallery.markdown(runs, "../gallery/", SHELVES)
    assert re.findall(r'href="([^"]+)"', text) == [
        f"../gallery/{name}.html" for name in ("vit_dense", "vit_24", "compare-small")
    ]
    assert "| 95.00 % | dense 98.24% ± 0.09% (3 recorded seeds) | 0.600 |\n" in text


def test_the_pages_compare_a_run_with_the_seeds_of_its_report_only(runs, tmp_path):
    """The one dense run of the gallery is one of many: its difference contradicted that of the report."""
    index = gallery.write(runs, tmp_path / "out", SHELVES)
    pages = [index.read_text(), *((index.parent / f"{name}.html").read_text() for name in ("compare-small", "vit_24"))]
    for text in [*pages, gallery.markdown(runs, "", SHELVES)]:
        assert "-2.00" not in text  # 95 % of vit_24, less 97 % of the gallery's vit_dense
    assert "98.24% ± 0.09%" in pages[2]
    assert gallery.NO_DIFFERENCE in pages[1]


def test_what_a_report_needs_is_kept(runs, tmp_path, monkeypatch):
    monkeypatch.setattr(gallery, "SHELVES", SHELVES)
    (tmp_path / "kept" / "vit_24").mkdir(parents=True)
    (tmp_path / "kept" / "vit_24" / "mine.txt").write_text("of somebody")
    (tmp_path / "kept" / "vit_24" / "run.json").write_text("of an earlier run")
    gallery.keep(runs, tmp_path / "kept")
    assert {p.name for p in (tmp_path / "kept" / "vit_24").iterdir()} == {*gallery.FILES, "mine.txt"}
    assert (tmp_path / "kept" / "vit_24" / "run.json").read_text() == (runs / "vit_24" / "run.json").read_text()
    with pytest.raises(gallery.Mistake, match="must be another folder"):
        gallery.keep(runs, tmp_path / "kept" / ".." / "runs")
    reports = ("vit_24.html", "vit_dense.html", "compare-small.html", "index.html")
    for folder in (runs, tmp_path / "kept"):
        gallery.write(folder, tmp_path / folder.name / "out", SHELVES)
    for name in reports:
        text = (runs / "out" / name).read_text()
        assert (tmp_path / "kept" / "out" / name).read_text() == text
    for words in ("plan.html of vit_24", "mask of vit_24"):
        assert words in (runs / "out" / "vit_24.html").read_text()


def test_the_committed_runs_have_finished_and_are_those_of_the_config_files():
    for shelf in gallery.SHELVES:
        for name in shelf.names:
            about = json.loads((gallery.RESULTS / name / "run.json").read_text())
            assert (about["outcome"], about["git"]["dirty"]) == ("finished", False)
            assert about["command"] == f"python launch.py --config=configs/{name}.py --workdir=runs/gallery/{name}"
            # `make gallery` and `python -m experiments.gallery --keep` renew them after a change of a config file
            now = digest.identity(command.read(["launch.py", f"--config=configs/{name}.py"]).config)
            assert digest.recorded(gallery.RESULTS / name).lasting == now.lasting


@pytest.mark.processes
def test_a_config_file_is_trained_once(tmp_path, capfd):
    gallery.train("resnet_dense:smoke", tmp_path / "run")
    first = (tmp_path / "run" / "run.json").read_text()
    assert json.loads(first)["outcome"] == "finished"
    gallery.train("resnet_dense:smoke", tmp_path / "run")
    assert (tmp_path / "run" / "run.json").read_text() == first
    assert "finished already" in capfd.readouterr().out
    with pytest.raises(RuntimeError, match=r"--config=configs/resnet_24.py:smoke failed, so the gallery stops"):
        gallery.train("resnet_24:smoke", tmp_path / "run")  # a folder with a run of other settings
    assert "holds a run of another config" in capfd.readouterr().err
