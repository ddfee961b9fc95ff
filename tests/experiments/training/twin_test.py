"""The twin of a run: its config, its recorded figures, and the sentence that compares them."""

import json
import math
import re

import pytest

from experiments import command, config_files, files
from experiments.errors import Mistake
from experiments.training import digest, twin
from tests.experiments.runs import as_people_run_it as as_people_run_it

VIT = "configs/vit_24.py:smoke"


def read(*words: str):
    return command.read(["launch.py", *words]).config


def of(*changes: str) -> twin.Twin:
    config = read(f"--config={VIT}", *(f"--config.{change}" for change in changes))
    config_file = "configs/vit_dense.py:smoke"
    return twin.Twin(config_file, twin.of(config, config_files.load(VIT), config_files.load(config_file)))


@pytest.mark.parametrize("config_file", config_files.names())
def test_the_twin_of_a_config_file_is_that_without_pruning(config_file):
    config = config_files.load(config_file)
    if not config.twin:
        assert "dense" in config_file or "imagenet" in config_file or "gpt2" in config_file
        return
    dense = twin.of(config, config, config_files.load(config.twin))
    own, other = digest.identity(config).lasting, digest.identity(dense).lasting
    changed = {name.partition(".")[0] for name in own | other if own.get(name) != other.get(name)}
    assert changed == {"rules", "sparsity"} | ({"model"} if config.model.get("scores") else set())
    assert twin.Twin(config.twin, dense).label == "dense"


def test_a_twin_takes_over_what_the_run_changes():
    found = of("batch=32", "seed=7", "learning_rate.peak=0.5", "sparsity.blocks=s_ste(2,4)", "masked_decay=0.1").config
    wanted = read("--config=configs/vit_dense.py:smoke", "--config.batch=32", "--config.seed=7")
    wanted.learning_rate.peak = 0.5
    assert digest.identity(found).lasting == digest.identity(wanted).lasting


def recorded(folder, its_twin: twin.Twin, seed: int, accuracy: float, version="0.1.0", outcome="finished", **more):
    config = its_twin.config.copy_and_resolve_references()
    config.seed = seed
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(digest.identity(config).text)
    about = {"outcome": outcome, "figures": {"accuracy": accuracy}, "versions": {"nmjax": version}, **more}
    (folder / "run.json").write_text(json.dumps(about))


def test_runs_of_the_twin_are_found_and_others_are_not(tmp_path, monkeypatch):
    monkeypatch.setattr(twin, "RESULTS", tmp_path / "none.jsonl")
    own, its_twin = tmp_path / "runs" / "own", of("seed=1")
    recorded(tmp_path / "runs" / "a", its_twin, 0, 0.5)
    recorded(tmp_path / "runs" / "b" / "twin", its_twin, 1, 0.6)
    recorded(own / "twin", its_twin, 1, 0.7, measured={"step_seconds": 0.5})
    recorded(tmp_path / "runs" / "other_batch", of("batch=32"), 2, 0.1)
    recorded(tmp_path / "runs" / "other_version", its_twin, 3, 0.1, version="0.0.1")
    recorded(tmp_path / "runs" / "running", its_twin, 4, 0.1, outcome="running")
    recorded(tmp_path / "runs" / "from_another", its_twin, 8, 0.1, origin={"directory": "a", "step": 40})
    (tmp_path / "runs" / "notes").mkdir()
    (tmp_path / "runs" / "text.txt").write_text("no folder")
    recorded(tmp_path / "runs" / "broken", its_twin, 5, 0.1)
    (tmp_path / "runs" / "broken" / "config.json").write_text("{")
    for name, about in {"list": [], "number": 3, "no figures": {"outcome": "finished"}, "odd": {"outcome": 1}}.items():
        recorded(tmp_path / "runs" / name, its_twin, 6, 0.1)
        (tmp_path / "runs" / name / "run.json").write_text(json.dumps(about))
    for name, config in {"config": b"[]", "bytes": b"\xff\xfe", "rules": b'{"rules": 3}'}.items():
        recorded(tmp_path / "runs" / name, its_twin, 7, 0.1)
        (tmp_path / "runs" / name / "config.json").write_bytes(config)
    found = twin.figures(its_twin, own, "accuracy")
    assert found == [twin.Figure(0, 0.5), twin.Figure(1, 0.7, {"step_seconds": 0.5})]  # what was trained beside counts


def test_a_run_of_the_config_file_without_pruning_is_a_dense_twin_too(tmp_path, monkeypatch):
    """The dense runs of a sweep over methods are such runs."""
    monkeypatch.setattr(twin, "RESULTS", tmp_path / "none.jsonl")
    config = read(f"--config={VIT}", "--config.sparsity.blocks=dense", "--config.seed=4")
    recorded(tmp_path / "dense", twin.Twin("", config), 4, 0.5)
    recorded(tmp_path / "pruned", twin.Twin("", read(f"--config={VIT}", "--config.seed=5")), 5, 0.6)
    assert twin.figures(of(), tmp_path / "own", "accuracy") == [twin.Figure(4, 0.5)]


def test_a_change_that_the_twin_cannot_have_is_refused():
    config, unchanged = read("--config=configs/gpt_24.py:smoke"), config_files.load("configs/gpt_24.py:smoke")
    config.data.length = 64
    dense = config_files.load("configs/gpt_dense.py:smoke")
    with dense.unlocked():
        del dense.data["length"]
    with pytest.raises(Mistake, match="that config file has no field data.length, so the twin cannot have your value"):
        twin.of(config, unchanged, dense)


def test_a_twin_of_another_experiment_is_refused():
    config = config_files.load("configs/gpt_24.py:smoke")
    with pytest.raises(
        Mistake,
        match="is a config file of the experiment 'image', but this run is of 'text'. Name a config file of the same",
    ):
        twin.of(config, config, config_files.load("configs/vit_dense.py:smoke"))


def test_lines_of_results_are_found_by_their_digest(tmp_path, monkeypatch):
    its_twin = of()
    config = its_twin.config.copy_and_resolve_references()
    config.seed = 3
    right = {"changes": {"seed": 3}, "outcome": "finished", "config": digest.identity(config).digest}
    right |= {"figures": {"hardened_accuracy": 0.9, "accuracy": 0.8}, "versions": {"nmjax": "0.1.0"}}
    wrong = [right | {"config": "0" * 12}, right | {"outcome": "diverged: loss"}]
    (tmp_path / "twins.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [*wrong, right]))
    monkeypatch.setattr(twin, "RESULTS", tmp_path / "twins.jsonl")
    assert twin.figures(its_twin, tmp_path / "runs" / "own", "accuracy") == [twin.Figure(3, 0.9, {}, True)]


def test_the_own_twin_counts_before_the_recorded_one_and_that_before_neighbours(tmp_path, monkeypatch):
    own, its_twin = tmp_path / "runs" / "own", of()
    line = {"changes": {}, "outcome": "finished", "config": digest.identity(its_twin.config).digest}
    line |= {"figures": {"accuracy": 0.8}, "versions": {"nmjax": "0.1.0"}}
    (tmp_path / "twins.jsonl").write_text(json.dumps(line) + "\n")
    monkeypatch.setattr(twin, "RESULTS", tmp_path / "twins.jsonl")
    score = lambda: [found.score for found in twin.figures(its_twin, own, "accuracy")]
    recorded(tmp_path / "runs" / "a", its_twin, 0, 0.5)
    assert score() == [0.8]
    recorded(own / "twin", its_twin, 0, 0.7)
    assert score() == [0.7]


def test_the_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(twin, "RESULTS", tmp_path / "none.jsonl")
    own, its_twin = tmp_path / "runs" / "own", of()
    own.mkdir(parents=True)
    (own / "config.json").write_text(digest.identity(read(f"--config={VIT}")).text)
    scores = {"hardened_accuracy": 0.978, "accuracy": 0.979}
    say = lambda **measured: twin.comparison(its_twin, own, "accuracy", scores, [200.0, 146.0], measured)
    assert say() == (
        "97.80% hardened, 0.73 of the dense FLOPs; no run of configs/vit_dense.py:smoke to compare with: train that "
        "config file too, with the same changes, or use --with_twin"
    )
    recorded(own / "twin", its_twin, 0, 0.98, measured={"step_seconds": 0.2, "step_bytes": 4000})
    sparse, dense = "97.80% hardened, 0.73 of the dense FLOPs", "; dense 98.00% (1 seed)"
    assert say() == sparse + dense
    assert say(step_seconds=0.194) == f"{sparse}, 0.97 of the time of dense{dense}"
    both = f"{sparse}, 0.97 of the time and 1.10 of the temporary memory of dense{dense}"
    assert say(step_seconds=0.194, step_bytes=4400) == both
    for seed, accuracy in ((1, 0.982), (2, 0.99)):
        recorded(tmp_path / "runs" / str(seed), its_twin, seed, accuracy)
    error = math.sqrt(sum((a - 0.984) ** 2 for a in (0.98, 0.982, 0.99)) / 2 / 3)
    assert say().endswith(f"dense 98.40% ± {error:.2%} (3 seeds)")
    assert twin.comparison(None, own, "accuracy", {"accuracy": 1.0}, [1.0, 1.0], {}) == ""
    loss = twin.comparison(its_twin, own, "loss", {"loss": 1.5}, [2.0, 1.0], {})  # the runs of the twin have no loss
    assert loss.startswith("loss 1.5000 (lower is better), 0.50 of the dense FLOPs; no run of")
    dense = tmp_path / "alone" / "dense"
    recorded(dense, its_twin, 0, 0.9)  # the run is finished, and is not compared with itself
    said = twin.comparison(its_twin, dense, "accuracy", {"accuracy": 0.9}, [2.0, 2.0], {})
    assert said == "90.00%, 1.00 of the dense FLOPs"  # --with_twin would train the same again
    loss = twin.comparison(its_twin, own, "loss", {"loss": 1.5, "hardened_loss": 1.6}, [2.0, 2.0], {})
    assert loss.startswith("hardened loss 1.6000 (lower is better), 1.00 of")


@pytest.mark.slow
def test_a_twin_is_trained_first_and_compared_with(tmp_path, capsys):
    words = ["launch.py", f"--config={VIT}", f"--workdir={tmp_path / 'run'}", "--with_twin"]
    command.main(words, "")
    about, beside = (
        json.loads((folder / "run.json").read_text()) for folder in (tmp_path / "run", tmp_path / "run/twin")
    )
    assert (about["outcome"], beside["outcome"]) == ("finished", "finished")
    assert about["figures"].keys() > {"accuracy", "hardened_accuracy", "validation_accuracy", "validation_loss"}
    share = about["flops"][1] / about["flops"][0]
    score, dense = about["figures"]["hardened_accuracy"], beside["figures"]["hardened_accuracy"]
    (own,), (others,) = about["measured"].items(), beside["measured"].items()
    assert own[0] == others[0] == "step_bytes"  # four steps are too few to tell their time
    costs = f"{share:.2f} of the dense FLOPs, {own[1] / others[1]:.2f} of the temporary memory of dense"
    assert about["comparison"] == f"{score:.2%} hardened, {costs}; dense {dense:.2%} (1 seed)"
    assert about["comparison"] in (tmp_path / "run" / "report.html").read_text()
    assert re.search(r"in short +\d", capsys.readouterr().out)
    before = files.lines(tmp_path / "run/twin/metrics.jsonl")
    run = json.loads((tmp_path / "run" / "run.json").read_text())
    (tmp_path / "run" / "run.json").write_text(json.dumps(run | {"comparison": "there was no twin"}))
    command.main(words, "")  # again: both are finished, and compared again
    assert capsys.readouterr().out.count("finished already") == 2
    assert files.lines(tmp_path / "run/twin/metrics.jsonl") == before
    assert json.loads((tmp_path / "run" / "run.json").read_text())["comparison"] == about["comparison"]
