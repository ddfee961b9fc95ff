"""Studies that choose a learning rate for each config by a search: what they choose, and what they refuse."""

import json
import re
import shutil

import pytest

from experiments import claims, config_files, members, recorded, reproduce
from experiments.errors import Mistake
from experiments.studies import RATE, SEARCH, Search, rivals
from experiments.training import digest

NAME = "rivals_resnet_cpu"
RATES, SEEDS, MASK = (0.1, 0.2, 0.4), (200, 201), "random 1:16 mask"
GROUPS = recorded.study(NAME).design.groups
LOSSES = {
    "dense": 0.6,
    rivals.NARROWER: 0.61,
    rivals.NARROWEST: 0.63,
    rivals.SDGP: 0.7,
    rivals.SR_STE: 0.605,
    MASK: 0.9,
}
CHOSEN = {"dense": 0.2, rivals.SDGP: 0.4, rivals.SR_STE: 0.1, rivals.NARROWER: 0.4, rivals.NARROWEST: 0.2}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Give the search two seeds, and the study four. The mask has three of them."""
    monkeypatch.setitem(rivals.SEARCHES, "resnet_cpu", Search(NAME, RATES, SEEDS))
    monkeypatch.setattr(rivals, "RESNET_SEEDS", range(100, 104))


def line(name, changes, **figures):
    study = recorded.study(name)
    (member,) = members.listed(config_files.load(study.config_file), [changes])
    return {
        "format": 1, "run": member.name, "changes": changes, "outcome": "finished", "metric": "accuracy",
        "figures": figures, "steps": member.config.steps, "flops": [2.0, 2.0], "measured": {}, "devices": "1 x cpu",
        "began": "2026-01-01T00:00:00+00:00", "ended": "2026-01-01T00:00:30+00:00", "command": study.short,
        "versions": {"jax": "0.0"}, "notes": [], "config": digest.identity(member.config).digest,
    }  # fmt: skip


def searching(chosen=CHOSEN):
    """Return the lines of a search. The means of the validation losses are 1.0 with the chosen rates, and else 1.1.

    With the second seed alone, with the weights in training, and on the test data, other rates are the best.
    """
    return [
        line(
            NAME + SEARCH, GROUPS[name] | {RATE: rate, "seed": seed},
            hardened_loss=3.0 if rate == chosen[name] else 2.0, validation_loss=3 - rate,
            validation_hardened_loss={200: 0.9, 201: 1.1}[seed] if rate == chosen[name] else {200: 1.4, 201: 0.8}[seed],
        )
        for name in GROUPS if name != MASK for rate in RATES for seed in SEEDS
    ]  # fmt: skip


def finished(rates=CHOSEN, seeds=range(100, 104)):
    """Return the lines of all runs of the study."""
    return [
        line(NAME, changes | ({RATE: rates[name]} if name in rates else {}) | {"seed": seed},
             accuracy=0.78, hardened_accuracy=0.78, loss=9.0, validation_loss=9.0, validation_accuracy=0.78,
             hardened_loss=LOSSES[name] + 0.001 * (seed % 3),
             validation_hardened_loss=0.6)
        for name, changes in GROUPS.items() for seed in (seeds[:3] if name == MASK else seeds)
    ]  # fmt: skip


def written(folder, search, lines=()):
    shutil.copy(reproduce.RESULTS / "baselines_cpu.jsonl", folder)
    for name, of in ((NAME + SEARCH, search), (NAME, lines)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in of))
    return folder


def test_a_config_gets_the_rate_with_the_lowest_mean_validation_loss(tmp_path):
    one = claims.judged(NAME, written(tmp_path, searching(), finished()))
    assert {name: group.changes.get(RATE) for name, group in one.groups.items()} == CHOSEN | {MASK: None}
    text, _ = reproduce.block(NAME, tmp_path)
    assert re.search(rf"\| {MASK} \|.*\| 3 of 3 \|", text)
    assert re.search(r"\| SDGP 2:4 \|.*\| 4 of 4 \|", text)
    assert "| validation loss in the search | rate 0.1 | rate 0.2 | rate 0.4 | chosen |" in text
    assert "| SDGP 2:4 | 1.1000 | 1.1000 | 1.0000 | 0.4 |" in text
    assert "| SR-STE 2:4 | 32 | 30 [30, 30] |" in text  # half way between 29 and 32, the root of their product
    assert "| SDGP 2:4 | 32 | ≤ 23 [≤ 23, ≤ 23] |" in text
    assert "| SR-STE 2:4 is better than a narrower dense network at the same FLOPs of inference | " in text


def test_a_rate_whose_run_diverged_is_not_chosen(tmp_path):
    """Of SDGP one of two runs with the rate 0.4. With each other rate the mean is the same, so the first one counts."""
    lines = searching()
    (lost,) = (one for one in lines if one["changes"] == GROUPS[rivals.SDGP] | {RATE: 0.4, "seed": 200})
    lost |= {"outcome": "diverged: the loss is nan at step 3", "figures": {}}
    losses = recorded.search_of(recorded.study(NAME).design, written(tmp_path, lines))
    assert losses[rivals.SDGP] == pytest.approx({0.1: 1.1, 0.2: 1.1, 0.4: float("inf")})
    for one in lines:
        if one["changes"].get("sparsity.stages") == "sdgp(2,4)":
            one |= {"outcome": "diverged: the loss is nan at step 3", "figures": {}}
    why = f"{NAME}: “SDGP 2:4” diverged with each rate of its search. Give it other rates."
    with pytest.raises(Mistake, match=re.escape(why)):
        claims.judged(NAME, written(tmp_path, lines, finished()))


@pytest.mark.parametrize("count", [0, 1, 29])
def test_a_study_whose_search_is_missing_is_refused(count, tmp_path, monkeypatch, capsys):
    """In one sentence with the command, by `reproduce` and by the sweep. Of 30 runs a few are there, or no file."""
    results = written(tmp_path, searching()[:count], finished())
    if not count:
        (results / f"{NAME}{SEARCH}.jsonl").unlink()
    why = f"{NAME} has no learning rates, because {30 - count} of 30 runs of its search are missing. Make them with: "
    command = f"python launch.py --config=experiments/studies/rivals.py:resnet_cpu{SEARCH} --sweep --results="
    monkeypatch.setattr(reproduce, "page", lambda path: reproduce.block(NAME, results))
    assert reproduce.main([]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(why + command)
    monkeypatch.setattr(recorded, "search_of", lambda design: found(design, results))
    with pytest.raises(Mistake, match=re.escape(why)):
        rivals.get_sweep("resnet_cpu")
    assert len(rivals.get_sweep(f"resnet_cpu{SEARCH}")) == 30


found = recorded.search_of


def test_the_runs_of_a_study_have_the_rates_of_its_search(tmp_path, monkeypatch):
    results = written(tmp_path, searching())
    monkeypatch.setattr(recorded, "search_of", lambda design: found(design, results))
    runs = rivals.get_sweep("resnet_cpu")
    assert runs[:4] == [{"sparsity.stages": "dense", RATE: 0.2, "seed": seed} for seed in range(100, 104)]
    assert runs[-1] == {"sparsity.stages": GROUPS[MASK]["sparsity.stages"], "seed": 102}
    assert len(runs) == 23


def test_seeds_of_a_search_are_none_of_the_study(tmp_path, monkeypatch):
    monkeypatch.setitem(rivals.SEARCHES, "resnet_cpu", Search(NAME, RATES, (200, 102)))
    with pytest.raises(Mistake, match=f"{NAME}: the seed 102 is one of its search too. Give the search other seeds."):
        claims.judged(NAME, written(tmp_path, searching(), finished()))


def test_a_run_with_another_rate_is_refused(tmp_path):
    """Its line would be judged as if the search had chosen its rate."""
    results = written(tmp_path, searching(CHOSEN | {"dense": 0.4}), finished())
    with pytest.raises(Mistake, match="the run stages=dense is not in the study. Delete its line"):
        claims.judged(NAME, results)


def test_nothing_is_judged_before_all_runs_are_done(tmp_path):
    """All runs but the last one: of a study without a search most claims would be judged."""
    results = written(tmp_path, searching(), finished()[:-1])
    text, pictures = reproduce.block(NAME, results)
    said, _, source = text.partition("\n\n")
    assert said == "Not finished: 22 of 23 runs are done. The study is judged when all are done."
    assert source.startswith("Command: ")
    assert source.count("\n") == 1
    assert not pictures
