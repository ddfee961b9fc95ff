"""A sweep goes on when one of its runs cannot, and its file of results loses no line."""

import contextlib
import json
import signal
import subprocess
from types import SimpleNamespace

import pytest

from experiments import collected, config_files, files, members, sweep
from experiments.errors import Failed, Mistake, Stopped, Taken
from experiments.training import digest, lock


def of_seeds(count=3):
    return members.listed(config_files.load("configs/vit_24.py:smoke"), [{"seed": seed} for seed in range(count)])


def ended(workdir, member, outcome="finished", began="2026-01-01T00:00:00"):
    """Write what a run leaves behind."""
    folder = workdir / member.folder
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.json").write_text(json.dumps({"outcome": outcome, "began": began, "figures": {"loss": 1.0}}))
    (folder / "config.json").write_text(member.identity.text)


class Runs:
    """Stands for training. Runs of some seeds raise an error; the others finish."""

    def __init__(self, workdir, errors=None, made=None, streamed=False):
        self.workdir, self.errors, self.made, self.streamed = workdir, errors or {}, made or {}, streamed
        self.trained = []

    def make(self, member):
        if error := self.made.get(member.config.seed):
            raise error
        return SimpleNamespace(task=SimpleNamespace(streamed=self.streamed))

    def train(self, group, program):
        for member in group:
            if error := self.errors.get(member.config.seed):
                raise error
        for member in group:
            (folder := self.workdir / member.folder).mkdir(parents=True, exist_ok=True)
            with lock.held(folder):
                ended(self.workdir, member)
        self.trained.append([member.config.seed for member in group])

    def sweep(self, runs, index=None, at_once=1, results=None):
        sweep.run(runs, self.workdir, index, at_once, self.make, self.train, results)


def test_how_long_the_rest_takes(tmp_path, monkeypatch, capsys):
    clock = iter([0.0, 100.0, 200.0, 500.0, 600.0, 601.0, 700.0, 701.0])
    monkeypatch.setattr(sweep, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    runs = Runs(tmp_path)
    ended(tmp_path, of_seeds(5)[3])
    runs.sweep(of_seeds(5))
    heads = [line for line in capsys.readouterr().out.splitlines() if line.startswith("====")]
    assert heads == [
        "==== seed=0 (1 of 5) ====",
        "==== seed=1 (2 of 5), about 5 min left ====",  # three runs are left, and one took 100 s
        "==== seed=2 (3 of 5), about 6 min 40 s left ====",  # two, and the mean is 200 s
        "==== seed=4 (5 of 5), about 2 min 14 s left ====",
    ]


CANNOT = {  # which seed raises what, while it is trained or while its program is made
    "an error": (0, RuntimeError("out of memory"), False),
    "a failure": (0, Failed("no"), False),
    "an error before its folder exists": (0, ValueError("no such file"), True),
    "an exit with a code": (0, SystemExit(3), True),
    "an exit with a text": (0, SystemExit("no data"), True),
    "a mistake of a later run": (1, Mistake("too wide"), True),
}


@pytest.mark.parametrize(("seed", "error", "made"), CANNOT.values(), ids=CANNOT)
def test_the_others_are_trained_if_one_cannot_be(seed, error, made, tmp_path, capsys):
    runs = Runs(tmp_path / "sweep", **{"made" if made else "errors": {seed: error}})
    all_runs = of_seeds()
    all_runs[seed].config.unlock()
    all_runs[seed].config.batch = 32  # a program of its own
    with pytest.raises(Failed, match=f"1 of the runs failed: seed={seed}"):
        runs.sweep(all_runs)
    assert runs.trained == [[other] for other in range(3) if other != seed]
    said = str(error) if isinstance(error, Mistake | Failed) else f"{type(error).__name__}: {error}"
    assert f"seed={seed}: {said}" in capsys.readouterr().out
    assert len(files.lines(tmp_path / "sweep" / "results.jsonl")) == 2


@pytest.mark.parametrize(("error", "index"), [(Mistake("no data"), None), (RuntimeError("no data"), 0)])
def test_a_mistake_of_the_first_run_and_any_error_of_the_only_one_end_the_sweep(error, index, tmp_path):
    runs = Runs(tmp_path, {0: error})
    with pytest.raises(type(error), match="no data"):
        runs.sweep(of_seeds(), index=index)
    assert not runs.trained


@pytest.mark.parametrize(
    "text", ['{"mine": 1}\n', "notes\n", "[1]\n", '{"format": 1, "run": "a", "config": "b"}\nmine\n']
)
def test_results_of_somebody_else_are_not_replaced(text, tmp_path):
    (tmp_path / "results.jsonl").write_text(text)
    runs = Runs(tmp_path)
    with pytest.raises(Mistake, match="results.jsonl is not the results of a sweep, which would replace it"):
        runs.sweep(of_seeds())
    assert not runs.trained
    assert (tmp_path / "results.jsonl").read_text() == text


def test_a_taken_run_leaves_those_beside_it(tmp_path, capsys):
    runs = Runs(tmp_path, {3: Taken("another process writes to seed=3")})
    with pytest.raises(Failed, match="not done: seed=3. Other processes"):
        runs.sweep(of_seeds(4), at_once=4)
    assert sorted(seed for group in runs.trained for seed in group) == [0, 1, 2]
    assert capsys.readouterr().out.count("another process writes to seed=3") == 2  # it is tried again at the end


@pytest.mark.parametrize(
    ("told", "finished", "trained"),
    [(None, False, [[1], [2], [0]]), (signal.SIGTERM, False, [[1]]), (None, True, [[1], [2]])],
)
def test_a_run_that_another_process_had_is_trained_at_the_end(told, finished, trained, tmp_path):
    """Unless the other process has finished it, or the sweep is told to stop."""
    runs, all_runs = Runs(tmp_path), of_seeds(3)
    (place := tmp_path / all_runs[0].folder).mkdir()
    train, other = runs.train, contextlib.ExitStack()
    other.enter_context(lock.held(place))

    def and_the_other_ends(group, program):
        train(group, program)
        if finished:
            ended(tmp_path, all_runs[0])
        other.close()
        return told

    runs.train = and_the_other_ends
    stops = contextlib.nullcontext()
    if told:
        stops = pytest.raises(Stopped, match="interrupted by SIGTERM after the last step of seed=1")
    with stops:
        runs.sweep(all_runs)
    assert runs.trained == trained


@pytest.mark.slow
def test_runs_are_left_to_the_process_that_writes_them_and_no_program_is_made_for_them(tmp_path, capsys):
    made, runs = [], Runs(tmp_path)
    make = runs.make
    runs.make = lambda member: made.append(member.config.batch) or make(member)
    all_runs = of_seeds(4)
    for member in all_runs[:2]:
        member.config.unlock()
        member.config.batch = 32
    with contextlib.ExitStack() as other:
        for number in (0, 1, 3):  # both runs with a batch of 32, and one of the two others
            (place := tmp_path / all_runs[number].folder).mkdir()
            other.enter_context(lock.held(place))
        with pytest.raises(Failed, match="not done: seed=0, seed=1, seed=3. Other processes are training these runs"):
            runs.sweep(all_runs, at_once=4)
        assert made == [all_runs[2].config.batch]
        assert runs.trained == [[2]]
        assert capsys.readouterr().out.count("is being written by process") == 3
        with pytest.raises(Taken, match="is being written by process"):
            runs.sweep(all_runs, index=1)
    runs.sweep(all_runs)
    assert runs.trained == [[2], [0], [1], [3]]
    assert (tmp_path / "seed=2" / "report.html").exists()  # it was missing


def test_only_runs_that_differ_in_their_seed_alone_are_trained_together(tmp_path, capsys):
    base = config_files.load("configs/vit_24.py:smoke")
    found = members.listed(base, [{"batch": batch, "seed": seed} for seed in range(3) for batch in (16, 32)])

    def trained(name, at_once, runs=found, streamed=False):
        done = Runs(tmp_path / name, streamed=streamed)
        with contextlib.suppress(Failed):  # a run diverged before
            done.sweep(runs, at_once=at_once)
        return done.trained

    assert trained("2", 2) == [[0, 1], [0, 1], [2], [2]]
    assert trained("9", 9) == [[0, 1, 2], [0, 1, 2]]
    ended(tmp_path / "3", found[0], "diverged: the loss")
    assert trained("3", 9) == [[0, 1, 2], [1, 2]]  # those of the other batch come first
    (config := found[0].config.copy_and_resolve_references()).unlock()
    config.steps = 5
    ended(tmp_path / "4", found[0]._replace(identity=digest.identity(config)), "diverged: the loss")
    with pytest.raises(Mistake, match=r"batch=16-seed=0 holds a run of another config \(steps: 5 there, 4 here\)"):
        trained("4", 9)
    capsys.readouterr()
    assert trained("s", 9, found[::2], streamed=True) == [[0], [1], [2]]
    assert capsys.readouterr().out.count("one after another, because their data are streamed") == 1


def test_results_of_two_sweeps_that_began_in_the_same_second(tmp_path):
    one, other = (
        of_seeds(2),
        members.listed(config_files.load("configs/vit_sste.py:smoke"), [{"seed": s} for s in range(2)]),
    )
    for folder, runs in (("one", one), ("other", other)):
        for member in runs:
            ended(tmp_path / folder, member)
        collected.add(runs, tmp_path / folder, tmp_path / "all.jsonl")
        collected.add(runs, tmp_path / folder, tmp_path / "all.jsonl")
    found = files.lines(tmp_path / "all.jsonl")
    assert [line["run"] for line in found] == ["seed=0", "seed=1"] * 2
    assert len({line["config"] for line in found}) == 4


def test_results_that_cannot_be_written_are_told_at_the_end(tmp_path, capsys):
    (tmp_path / "all.jsonl").mkdir()
    runs = Runs(tmp_path / "runs")
    with pytest.raises(Failed, match=r"all\.jsonl cannot be written: .*\. Run the same command again: it adds"):
        runs.sweep(of_seeds(), results=tmp_path / "all.jsonl")
    assert runs.trained == [[0], [1], [2]]
    assert capsys.readouterr().out.count("cannot be written") == 1
    (tmp_path / "all.jsonl").rmdir()
    runs.sweep(of_seeds(), results=tmp_path / "all.jsonl")
    assert len(files.lines(tmp_path / "all.jsonl")) == 3


def test_a_run_whose_results_are_in_a_file_is_not_trained_again(tmp_path, capsys):
    one, other, results = Runs(tmp_path / "one"), Runs(tmp_path / "other"), tmp_path / "all.jsonl"
    one.sweep(of_seeds(2), results=results)
    before = results.read_text()
    other.sweep(of_seeds(3), results=results)
    assert other.trained == [[2]]
    assert f"2 of 3 runs are not trained, because their results are known: 2 in {results}." in capsys.readouterr().out
    assert results.read_text().startswith(before)
    assert [line["run"] for line in files.lines(results)] == ["seed=0", "seed=1", "seed=2"]
    again = Runs(tmp_path / "again")
    again.sweep(of_seeds(3), results=results)
    assert not again.trained
    assert len(files.lines(results)) == 3
    capsys.readouterr()
    again.sweep(of_seeds(3), index=1, results=results)
    assert not again.trained
    assert capsys.readouterr().out.startswith("1 of 1 runs are not trained")


def test_results_of_another_sweep_are_taken_under_the_names_of_this_one(tmp_path, capsys):
    one, results = Runs(tmp_path / "one"), tmp_path / "one.jsonl"
    one.sweep(of_seeds(2), results=results)
    files.append(results, lambda old: [old[1] | {"config": "another"}, old[1] | {"format": 2, "figures": {}}])
    (tmp_path / "notes.jsonl").write_text('{"config": 1}\n[2]\ncut off')
    changes = [{"seed": seed, "batch": batch} for batch in (16, 48) for seed in (0, 1)]
    found = members.listed(config_files.load("configs/vit_24.py:smoke"), changes)
    assert (
        config_files.load("configs/vit_24.py:smoke").batch == 16
    )  # so the first two runs are those of the other sweep
    runs = Runs(tmp_path / "runs")
    runs.sweep(found, results=tmp_path / "other.jsonl")
    assert runs.trained == [[0], [1]]
    assert f"2 of 4 runs are not trained, because their results are known: 2 in {results}." in capsys.readouterr().out
    lines = files.lines(tmp_path / "other.jsonl")
    assert [line["run"] for line in lines] == [member.name for member in found]
    assert [line["changes"] for line in lines] == changes
    assert [line["folder"] for line in lines] == [member.folder for member in found]
    assert lines[0]["figures"] == {"loss": 1.0}
    assert len(files.lines(results)) == 4


def test_runs_of_one_config_are_each_trained(tmp_path):
    """Such as with and without model.lean, which changes what a step takes and not what it computes."""
    config = config_files.load("configs/vit_24.py:smoke")
    Runs(tmp_path / "one").sweep(members.listed(config, [{"seed": 0}]), results=tmp_path / "all.jsonl")
    both = members.listed(config, [{"model.lean": lean, "seed": 0} for lean in (False, True)])
    assert both[0].identity.digest == both[1].identity.digest
    runs = Runs(tmp_path / "runs")
    runs.sweep(both, results=tmp_path / "all.jsonl")
    assert runs.trained == [[0], [0]]


def test_a_sweep_that_got_a_field_finds_its_runs(tmp_path):
    """The folder "peak=0.1" of a sweep over the rate is "peak=0.1-seed=0" when seeds are added."""
    config = config_files.load("configs/vit_24.py:smoke")
    rates = [{"learning_rate.peak": rate, "seed": 0} for rate in (0.1, 0.2)]
    runs = Runs(tmp_path)
    runs.sweep(members.listed(config, rates))
    more = members.listed(config, [*rates, *({**change, "seed": 1} for change in rates)])
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
    config = config_files.load("configs/vit_24.py:smoke")
    config.unlock()
    config.data.size = "S"
    changes = [{"model.size": "smoke"}, {"data.size": "T"}]
    assert [member.name for member in members.listed(config, changes)] == ["model.size=smoke", "data.size=T"]
