"""A method among those of a study: trained, judged and drawn; continued; and what is refused."""

import importlib.util
import json
import shutil
import sys

import pytest

from experiments import claims, command, frontier, recorded, reproduce
from tests.experiments.runs import as_people_run_it as as_people_run_it

CONFIG_FILE = '''
"""A study of a few steps on digits."""

from configs import common
from experiments.studies import Claim, Design, SanityCheck, launched


def design(variant=""):
    c = common.vit("smoke")
    c.unlock()
    c.model.depth, c.model.width, c.model.hidden, c.steps, c.measure, c.evaluate = 1, 64, 256, 8, "0", "100%"
    c.rules, c.sparsity = ((r".*mlp.*", "blocks"), (r".*", "dense")), dict(blocks="dense")
    c.lock()
    narrow = {"model.width": 48, "model.hidden": 192}
    groups = {"dense": {"sparsity.blocks": "dense"}, "STE": {"sparsity.blocks": "ste(2,4)"}, "dense, narrower": narrow}
    claims = [Claim("STE is as good as dense", "STE", "as good as", "dense")]
    check = SanityCheck("ViT, digits", "fashion_mnist", "accuracy", 0.0, "dense, narrower", 1e-9, unit="nats")
    return Design(c, check, [0, 1, 2], groups, claims)


get_config, get_sweep = launched(design)
'''


@pytest.fixture
def study(tmp_path, monkeypatch):
    """Return the config file of a study that was run, with its results in the place of the repository's."""
    config_file, results = tmp_path / "toy.py", tmp_path / "results"
    config_file.write_text(CONFIG_FILE)
    results.mkdir()
    spec = importlib.util.spec_from_file_location("toy", config_file)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "toy", module)
    spec.loader.exec_module(module)
    short = f"python launch.py --config={config_file}:cpu --sweep"
    toy = recorded.Study(module, "cpu", f"{config_file}:cpu", short, short)
    shutil.copy(reproduce.RESULTS / "baselines_cpu.jsonl", results)
    found = recorded.study
    for where in (recorded, claims):
        monkeypatch.setattr(where, "study", lambda name: toy if name == "toy_cpu" else found(name))
    monkeypatch.setattr(frontier, "STUDIES", ("toy_cpu",))
    monkeypatch.setattr(frontier, "RESULTS", results)
    words = ["launch.py", f"--config={config_file}:cpu", "--sweep", f"--results={results / 'toy_cpu.jsonl'}"]
    command.main([*words, f"--workdir={tmp_path / 'study'}"], "")
    return config_file


@pytest.mark.slow
def test_a_method_is_trained_and_judged_among_others(study, tmp_path, capsys):
    workdir = tmp_path / "mine"
    words = ["--method", "mdgf(2,4,linear(1,0,50%))", "--config", f"{study}:cpu", f"--workdir={workdir}"]
    assert frontier.main([*words, "--seeds=2"]) == 0
    said = capsys.readouterr().out
    assert "2 runs, about" in said
    assert "The study does not pass its sanity check: “dense, narrower” is not worse" in said
    assert "better than “dense, narrower”" not in said  # the config that has to be worse
    assert "| your method is as good as dense | " in said
    assert "| your method is better than “STE” | " in said
    assert "Each try scores the test data." in said
    groups = (workdir / "frontier.md").read_text()
    assert groups.count("| 2 of 2 |") == 4  # also of the configs that have three runs
    page = (workdir / "frontier.html").read_text()
    assert page.count("<figure><svg") == 2  # by FLOPs and memory; the times of this study were not measured
    assert page.count('<th scope="row">your method</th>') == 1
    assert frontier.main(words) == 0  # goes on, with a seed more
    assert "1 runs, about" in capsys.readouterr().out
    lines = [json.loads(line) for line in (workdir / "results.jsonl").read_text().splitlines()]
    assert [line["changes"]["seed"] for line in lines] == [0, 1, 2]
    assert "| your method | " in (workdir / "frontier.md").read_text()
    assert frontier.main([*words[:1], "sr_ste(2,4)", *words[2:]]) == 2
    assert "config.py belongs to another method or study. Give another --workdir=DIR." in capsys.readouterr().err


@pytest.mark.rare
@pytest.mark.slow
def test_what_a_study_refuses(study, tmp_path, capsys):
    config = ["--config", f"{study}:cpu", f"--workdir={tmp_path / 'mine'}"]
    for method, why in (
        ("stee(2,4)", "'stee'"),
        ("ste(2,4) ", "the study has this method, as “STE”"),
        ("dense", "the study has this method, as “dense”"),
    ):
        assert frontier.main(["--method", method, *config]) == 2
        assert why in capsys.readouterr().err
        assert not (tmp_path / "mine").exists()
    results = tmp_path / "results" / "toy_cpu.jsonl"
    lines = results.read_text().splitlines(keepends=True)
    results.write_text("".join(line for line in lines if "'model.width': 48" not in str(json.loads(line)["changes"])))
    assert frontier.main(["--method", "sr_ste(2,4)", *config]) == 2
    assert "is not finished: 6 of 9 runs are done. Make the others with: python launch.py" in capsys.readouterr().err
    results.write_text("".join(lines))
    (tmp_path / "file").write_text("")
    assert frontier.main(["--method", "sr_ste(2,4)", *config[:2], f"--workdir={tmp_path / 'file'}"]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_a_config_file_that_is_no_study_is_refused(capsys):
    assert frontier.main(["--method", "ste(2,4)", "--config", "configs/vit_24.py"]) == 2
    assert "--config=configs/vit_24.py is not the config file of a study with results. " in capsys.readouterr().err


@pytest.mark.rare
@pytest.mark.slow
def test_other_devices_are_told(study, tmp_path, capsys):
    results = tmp_path / "results" / "toy_cpu.jsonl"
    results.write_text(results.read_text().replace('"devices": "', '"devices": "2 x H100, not '))
    words = ["--method", "sr_ste(2,4)", "--config", f"{study}:cpu", f"--workdir={tmp_path / 'mine'}", "--seeds=2"]
    assert frontier.main(words) == 0
    said = capsys.readouterr().out
    assert "2 runs. How long they take on " in said
    assert "The study was made on 2 x H100, not " in said
    assert "Draw no conclusions from small differences" in said


def test_more_seeds_than_the_study_has_are_refused(capsys):
    assert frontier.main(["--method", "ste(2,4); dw_g=mvue(1,4)", "--seeds=21"]) == 2
    assert "--seeds=21: the study has 20 seeds. Write --seeds=20 or fewer." in capsys.readouterr().err


def test_one_seed_is_refused(capsys):
    assert frontier.main(["--method", "ste(2,4)", "--seeds=1"]) == 2
    assert "--seeds=1: a comparison needs two seeds. Write --seeds=2 or more." in capsys.readouterr().err
