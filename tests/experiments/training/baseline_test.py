"""The baseline of a run: its config, its recorded figures, and the sentence that compares them."""

import json
import math
import re

import pytest

import nmjax as nm
from experiments import command, config_files, files
from experiments.errors import Mistake
from experiments.training import baseline, digest
from tests.experiments.runs import as_people_run_it as as_people_run_it

VIT = "configs/vit_24.py:smoke"


def read(*words: str):
    return command.read(["launch.py", *words]).config


def of(*changes: str) -> baseline.Baseline:
    config = read(f"--config={VIT}", *(f"--config.{change}" for change in changes))
    config_file = "configs/vit_dense.py:smoke"
    return baseline.Baseline(config_file, baseline.of(config, config_files.load(VIT), config_files.load(config_file)))


@pytest.mark.parametrize("config_file", config_files.names())
def test_the_baseline_of_a_config_file_is_that_without_pruning(config_file):
    config = config_files.load(config_file)
    if not config.baseline:
        assert "dense" in config_file or "imagenet" in config_file or "gpt2" in config_file
        return
    dense = baseline.of(config, config, config_files.load(config.baseline))
    own, other = digest.identity(config).lasting, digest.identity(dense).lasting
    changed = {name.partition(".")[0] for name in own | other if own.get(name) != other.get(name)}
    assert changed == {"rules", "sparsity"} | ({"model"} if config.model.get("scores") else set())
    assert baseline.Baseline(config.baseline, dense).label == "dense"


def test_a_baseline_takes_over_what_the_run_changes():
    found = of("batch=32", "seed=7", "learning_rate.peak=0.5", "sparsity.blocks=s_ste(2,4)", "masked_decay=0.1").config
    wanted = read("--config=configs/vit_dense.py:smoke", "--config.batch=32", "--config.seed=7")
    wanted.learning_rate.peak = 0.5
    assert digest.identity(found).lasting == digest.identity(wanted).lasting


def recorded(
    folder,
    its_baseline: baseline.Baseline,
    seed: int,
    accuracy: float,
    version=nm.__version__,
    outcome="finished",
    **more,
):
    config = its_baseline.config.copy_and_resolve_references()
    config.seed = seed
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(digest.identity(config).text)
    about = {"outcome": outcome, "figures": {"accuracy": accuracy}, "versions": {"nmjax": version}, **more}
    (folder / "run.json").write_text(json.dumps(about))


def test_runs_of_the_baseline_are_found_and_others_are_not(tmp_path, monkeypatch):
    monkeypatch.setattr(baseline, "RESULTS", tmp_path / "none.jsonl")
    own, its_baseline = tmp_path / "runs" / "own", of("seed=1")
    recorded(tmp_path / "runs" / "a", its_baseline, 0, 0.5)
    recorded(tmp_path / "runs" / "b" / "baseline", its_baseline, 1, 0.6)
    recorded(own / "baseline", its_baseline, 1, 0.7, measured={"step_seconds": 0.5})
    recorded(tmp_path / "runs" / "other_batch", of("batch=32"), 2, 0.1)
    recorded(tmp_path / "runs" / "other_version", its_baseline, 3, 0.1, version="0.0.1")
    recorded(tmp_path / "runs" / "running", its_baseline, 4, 0.1, outcome="running")
    recorded(tmp_path / "runs" / "from_another", its_baseline, 8, 0.1, origin={"directory": "a", "step": 40})
    (tmp_path / "runs" / "notes").mkdir()
    (tmp_path / "runs" / "text.txt").write_text("no folder")
    recorded(tmp_path / "runs" / "broken", its_baseline, 5, 0.1)
    (tmp_path / "runs" / "broken" / "config.json").write_text("{")
    for name, about in {"list": [], "number": 3, "no figures": {"outcome": "finished"}, "odd": {"outcome": 1}}.items():
        recorded(tmp_path / "runs" / name, its_baseline, 6, 0.1)
        (tmp_path / "runs" / name / "run.json").write_text(json.dumps(about))
    for name, config in {"config": b"[]", "bytes": b"\xff\xfe", "rules": b'{"rules": 3}'}.items():
        recorded(tmp_path / "runs" / name, its_baseline, 7, 0.1)
        (tmp_path / "runs" / name / "config.json").write_bytes(config)
    found = baseline.figures(its_baseline, own, "accuracy")
    assert found == [baseline.Figure(0, 0.5), baseline.Figure(1, 0.7, {"step_seconds": 0.5})]  # the run's own counts


def test_a_run_of_the_config_file_without_pruning_is_a_dense_baseline_too(tmp_path, monkeypatch):
    """The dense runs of a sweep over methods are such runs."""
    monkeypatch.setattr(baseline, "RESULTS", tmp_path / "none.jsonl")
    config = read(f"--config={VIT}", "--config.sparsity.blocks=dense", "--config.seed=4")
    recorded(tmp_path / "dense", baseline.Baseline("", config), 4, 0.5)
    recorded(tmp_path / "pruned", baseline.Baseline("", read(f"--config={VIT}", "--config.seed=5")), 5, 0.6)
    assert baseline.figures(of(), tmp_path / "own", "accuracy") == [baseline.Figure(4, 0.5)]


def test_a_change_that_the_baseline_cannot_have_is_refused():
    config, unchanged = read("--config=configs/gpt_24.py:smoke"), config_files.load("configs/gpt_24.py:smoke")
    config.data.length = 64
    dense = config_files.load("configs/gpt_dense.py:smoke")
    with dense.unlocked():
        del dense.data["length"]
    with pytest.raises(Mistake, match="no field data.length, so the baseline cannot have your value"):
        baseline.of(config, unchanged, dense)


def test_a_baseline_of_another_experiment_is_refused():
    config = config_files.load("configs/gpt_24.py:smoke")
    with pytest.raises(
        Mistake,
        match="is a config file of the experiment 'image', but this run is of 'text'. Name a config file of the same",
    ):
        baseline.of(config, config, config_files.load("configs/vit_dense.py:smoke"))


def test_lines_of_results_are_found_by_their_digest(tmp_path, monkeypatch):
    its_baseline = of()
    config = its_baseline.config.copy_and_resolve_references()
    config.seed = 3
    right = {"changes": {"seed": 3}, "outcome": "finished", "config": digest.identity(config).digest}
    right |= {"figures": {"hardened_accuracy": 0.9, "accuracy": 0.8}, "versions": {"nmjax": "0.0.1"}}
    wrong = [right | {"config": "0" * 12}, right | {"outcome": "diverged: loss"}]
    (tmp_path / "recorded_baselines.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [*wrong, right]))
    monkeypatch.setattr(baseline, "RESULTS", tmp_path / "recorded_baselines.jsonl")
    assert baseline.figures(its_baseline, tmp_path / "runs" / "own", "accuracy") == [baseline.Figure(3, 0.9, {}, True)]


def test_the_own_baseline_counts_before_the_recorded_one_and_that_before_neighbours(tmp_path, monkeypatch):
    own, its_baseline = tmp_path / "runs" / "own", of()
    line = {"changes": {}, "outcome": "finished", "config": digest.identity(its_baseline.config).digest}
    line |= {"figures": {"accuracy": 0.8}, "versions": {"nmjax": "0.0.1"}}
    (tmp_path / "recorded_baselines.jsonl").write_text(json.dumps(line) + "\n")
    monkeypatch.setattr(baseline, "RESULTS", tmp_path / "recorded_baselines.jsonl")
    score = lambda: [found.score for found in baseline.figures(its_baseline, own, "accuracy")]
    recorded(tmp_path / "runs" / "a", its_baseline, 0, 0.5)
    assert score() == [0.8]
    recorded(own / "baseline", its_baseline, 0, 0.7)
    assert score() == [0.7]


def test_the_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(baseline, "RESULTS", tmp_path / "none.jsonl")
    own, its_baseline = tmp_path / "runs" / "own", of()
    own.mkdir(parents=True)
    (own / "config.json").write_text(digest.identity(read(f"--config={VIT}")).text)
    scores = {"hardened_accuracy": 0.978, "accuracy": 0.979}
    say = lambda **measured: baseline.comparison(its_baseline, own, "accuracy", scores, [200.0, 146.0], measured)
    assert say() == (
        "97.80% hardened, 0.73 of the dense FLOPs; no run of configs/vit_dense.py:smoke to compare with: train that "
        "config file too, with the same changes, or use --with_baseline"
    )
    recorded(own / "baseline", its_baseline, 0, 0.98, measured={"step_seconds": 0.2, "step_bytes": 4000})
    sparse, dense = "97.80% hardened, 0.73 of the dense FLOPs", "; dense 98.00% (1 seed)"
    assert say() == sparse + dense
    assert say(step_seconds=0.194) == f"{sparse}, 0.97 of the time of dense{dense}"
    both = f"{sparse}, 0.97 of the time and 1.10 of the temporary memory of dense{dense}"
    assert say(step_seconds=0.194, step_bytes=4400) == both
    for seed, accuracy in ((1, 0.982), (2, 0.99)):
        recorded(tmp_path / "runs" / str(seed), its_baseline, seed, accuracy)
    error = math.sqrt(sum((a - 0.984) ** 2 for a in (0.98, 0.982, 0.99)) / 2 / 3)
    assert say().endswith(f"dense 98.40% ± {error:.2%} (3 seeds)")
    assert baseline.comparison(None, own, "accuracy", {"accuracy": 1.0}, [1.0, 1.0], {}) == ""
    loss = baseline.comparison(its_baseline, own, "loss", {"loss": 1.5}, [2.0, 1.0], {})  # its runs have none
    assert loss.startswith("loss 1.5000 (lower is better), 0.50 of the dense FLOPs; no run of")
    dense = tmp_path / "alone" / "dense"
    recorded(dense, its_baseline, 0, 0.9)  # the run is finished, and is not compared with itself
    said = baseline.comparison(its_baseline, dense, "accuracy", {"accuracy": 0.9}, [2.0, 2.0], {})
    assert said == "90.00%, 1.00 of the dense FLOPs"  # --with_baseline would train the same again
    loss = baseline.comparison(its_baseline, own, "loss", {"loss": 1.5, "hardened_loss": 1.6}, [2.0, 2.0], {})
    assert loss.startswith("hardened loss 1.6000 (lower is better), 1.00 of")


@pytest.mark.slow
def test_a_baseline_is_trained_first_and_compared_with(tmp_path, capsys):
    words = ["launch.py", f"--config={VIT}", f"--workdir={tmp_path / 'run'}", "--with_baseline"]
    command.main(words, "")
    about, beside = (
        json.loads((folder / "run.json").read_text()) for folder in (tmp_path / "run", tmp_path / "run/baseline")
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
    before = files.lines(tmp_path / "run/baseline/metrics.jsonl")
    run = json.loads((tmp_path / "run" / "run.json").read_text())
    (tmp_path / "run" / "run.json").write_text(json.dumps(run | {"comparison": "there was no baseline"}))
    command.main(words, "")  # again: both are finished, and compared again
    assert capsys.readouterr().out.count("finished already") == 2
    assert files.lines(tmp_path / "run/baseline/metrics.jsonl") == before
    assert json.loads((tmp_path / "run" / "run.json").read_text())["comparison"] == about["comparison"]
