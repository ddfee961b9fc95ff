"""A sweep goes on when one of its runs cannot, and its file of results loses no line."""

import json
import subprocess
from types import SimpleNamespace

import pytest

from experiments import command, files, pages, sweep
from experiments.errors import Failed, Mistake, Taken
from tests.experiments.sweep_test import PAGE, page


def members(count=3):
    return sweep.members(pages.load("configs/vit_24.py:smoke"), [{"seed": seed} for seed in range(count)])


def ended(workdir, member, outcome="finished", began="2026-01-01T00:00:00"):
    """Write what a run leaves behind."""
    folder = workdir / member.folder
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.json").write_text(json.dumps({"outcome": outcome, "began": began, "figures": {"loss": 1.0}}))
    (folder / "config.json").write_text(member.identity.text)


class Runs:
    """Stands for training. Runs of some seeds raise an error; the others finish."""

    def __init__(self, workdir, errors=None, made=None):
        self.workdir, self.errors, self.made, self.trained = workdir, errors or {}, made or {}, []

    def make(self, member):
        if error := self.made.get(member.config.seed):
            raise error
        return SimpleNamespace(task=SimpleNamespace(streamed=False))

    def train(self, group, program):
        for member in group:
            if error := self.errors.get(member.config.seed):
                raise error
        for member in group:
            ended(self.workdir, member)
        self.trained.append([member.config.seed for member in group])

    def sweep(self, runs, index=None, at_once=1, results=None):
        sweep.run(runs, self.workdir, index, at_once, self.make, self.train, results)


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), Failed("no")])
def test_the_others_are_trained_if_the_first_fails(error, tmp_path, capsys):
    runs = Runs(tmp_path, {0: error})
    with pytest.raises(Failed, match="1 of the runs failed: seed=0"):
        runs.sweep(members())
    assert runs.trained == [[1], [2]]
    assert len(files.lines(tmp_path / "results.jsonl")) == 2
    assert "seed=0" in capsys.readouterr().out


def test_a_mistake_of_the_first_run_ends_the_sweep(tmp_path):
    runs = Runs(tmp_path, {0: Mistake("no data")})
    with pytest.raises(Mistake, match="no data"):
        runs.sweep(members())
    assert not runs.trained


def test_a_mistake_of_a_later_run_does_not(tmp_path, capsys):
    runs = Runs(tmp_path, made={1: Mistake("too wide")})
    all_runs = members()
    all_runs[1].config.unlock()
    all_runs[1].config.batch = 32  # needs a program of its own
    with pytest.raises(Failed, match="1 of the runs failed: seed=1"):
        runs.sweep(all_runs)
    assert runs.trained == [[0], [2]]
    assert "seed=1: too wide" in capsys.readouterr().out


def test_the_error_of_the_only_run_is_raised(tmp_path):
    with pytest.raises(RuntimeError, match="out of memory"):
        Runs(tmp_path, {1: RuntimeError("out of memory")}).sweep(members(), index=1)


def test_a_taken_run_leaves_those_beside_it(tmp_path, capsys):
    runs = Runs(tmp_path, {3: Taken("another process writes to seed=3")})
    with pytest.raises(Failed, match="other processes write to these runs .*: seed=3$"):
        runs.sweep(members(4), at_once=4)
    assert sorted(seed for group in runs.trained for seed in group) == [0, 1, 2]
    assert capsys.readouterr().out.count("another process writes to seed=3") == 1


def test_results_of_two_sweeps_that_began_in_the_same_second(tmp_path):
    one, other = members(2), sweep.members(pages.load("configs/vit_sste.py:smoke"), [{"seed": s} for s in range(2)])
    for folder, runs in (("one", one), ("other", other)):
        for member in runs:
            ended(tmp_path / folder, member)
        sweep.add(runs, tmp_path / folder, tmp_path / "all.jsonl")
        sweep.add(runs, tmp_path / folder, tmp_path / "all.jsonl")
    found = files.lines(tmp_path / "all.jsonl")
    assert [line["run"] for line in found] == ["seed=0", "seed=1"] * 2
    assert len({line["config"] for line in found}) == 4


def test_results_that_cannot_be_written_are_told_at_the_end(tmp_path, capsys):
    (tmp_path / "all.jsonl").mkdir()
    runs = Runs(tmp_path / "runs")
    with pytest.raises(Failed, match=r"all\.jsonl cannot be written: .*\. The same command adds the lines"):
        runs.sweep(members(), results=tmp_path / "all.jsonl")
    assert runs.trained == [[0], [1], [2]]
    assert capsys.readouterr().out.count("cannot be written") == 1
    (tmp_path / "all.jsonl").rmdir()
    runs.sweep(members(), results=tmp_path / "all.jsonl")
    assert len(files.lines(tmp_path / "all.jsonl")) == 3


LISTS = {
    "[1, 2]": "has to return a list of changes",
    "[('seed', 0)]": "has to return a list of changes",
    "[{'seed': 0}, {'seed': -1}]": "config.seed=-1 is not from 0",
    "[{'seed': 0}, {'seed': 1, 'sparsity.blocks': 'sste_typo(2,4)'}]": "blocks=sste_typo.*: config.rules.*sste_typo",
    "[{'seed': 0}, {'seed': 0, 'optimizer': 'adamm'}]": "optimizer=adamm: .*Did you mean 'adam'",
}


@pytest.mark.parametrize("text", LISTS)
def test_a_mistake_in_any_run_is_told_before_the_first(text, tmp_path):
    words = page(tmp_path, PAGE[: PAGE.index("def get_sweep")] + f"def get_sweep():\n    return {text}\n")
    with pytest.raises(Mistake, match=LISTS[text]):
        command.main([*words, "--sweep"], "")
    assert not (tmp_path / "runs").exists()


def test_files_of_results_that_are_refused(tmp_path):
    words = [*page(tmp_path), "--sweep"]
    with pytest.raises(Mistake, match=r"a sweep writes its own file of this name.* such as \S+all\.jsonl\."):
        command.main([*words, f"--results={tmp_path / 'results.jsonl'}"], "")
    with pytest.raises(Mistake, match=r"--results=/proc/all\.jsonl cannot be written"):
        command.main([*words, "--results=/proc/all.jsonl"], "")
    assert not (tmp_path / "runs").exists()


def test_a_sweep_that_got_a_field_finds_its_runs(tmp_path):
    """The folder "peak=0.1" of a sweep over the rate is "peak=0.1-seed=0" when seeds are added."""
    config = pages.load("configs/vit_24.py:smoke")
    rates = [{"learning_rate.peak": rate, "seed": 0} for rate in (0.1, 0.2)]
    runs = Runs(tmp_path)
    runs.sweep(sweep.members(config, rates))
    more = sweep.members(config, [*rates, *({**change, "seed": 1} for change in rates)])
    with pytest.raises(Mistake) as error:
        runs.sweep(more)
    moves = [line.split() for line in str(error.value).splitlines() if line.startswith("mv ")]
    assert [move[1:] for move in moves] == [
        [f"{tmp_path}/peak={rate}", f"{tmp_path}/peak={rate}-seed=0"] for rate in (0.1, 0.2)
    ]
    for move in moves:
        subprocess.run(move, check=True)
    runs.sweep(more)
    assert runs.trained == [[0], [0], [1], [1]]


def test_fields_with_one_last_part_are_named_in_full():
    config = pages.load("configs/vit_24.py:smoke")
    config.unlock()
    config.data.size = "S"
    changes = [{"model.size": "smoke"}, {"data.size": "T"}]
    assert [member.name for member in sweep.members(config, changes)] == ["model.size=smoke", "data.size=T"]
