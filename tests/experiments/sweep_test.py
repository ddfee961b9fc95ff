"""Many runs of one config file: named by what differs, done once, compiled once for all seeds, trained side by side."""

import json
import math
import os
import re
import signal
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import command, config_files, files, members
from experiments.errors import Failed, Mistake, Stopped
from experiments.scale import signals
from experiments.training import checkpoints, loop, program, record
from experiments.training.checkpoints import Checkpoints
from tests.experiments.runs import as_people_run_it as as_people_run_it, once, program as made_of, start, timeless

pytestmark = pytest.mark.sampled

CONFIG_FILE = """
from configs import common

def get_config(variant=""):
    c = common.vit("smoke")
    c.unlock()
    c.model.depth, c.measure = 1, "0"
    c.rules, c.sparsity = ((r".*mlp.*", "blocks"), (r".*", "dense")), dict(blocks="ste(2,4)")
    return c.lock()

def get_sweep(variant=""):
    return [{"sparsity.blocks": text, "seed": seed} for text in ("ste(2,4)", "s_ste(2,4)") for seed in (0, 1)]
"""


def sweep_of(changes):
    """Return the config file with another sweep."""
    return f"{CONFIG_FILE[: CONFIG_FILE.index('def get_sweep')]}def get_sweep():\n    return {changes}\n"


def words_of(tmp_path, text=CONFIG_FILE):
    (tmp_path / "mine.py").write_text(text)
    return ["launch.py", f"--config={tmp_path / 'mine.py'}", f"--workdir={tmp_path / 'runs'}"]


def results(tmp_path):
    return [json.loads(line) for line in (tmp_path / "runs" / "results.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_a_sweep_runs_what_is_not_done(tmp_path, monkeypatch, capsys):
    made = []
    first = program.Program.__init__
    monkeypatch.setattr(program.Program, "__init__", lambda self, *args: (made.append(1), first(self, *args))[1])
    words = [*words_of(tmp_path), f"--results={tmp_path / 'all.jsonl'}"]
    command.main([*words, "--sweep_index=3"], "")
    assert [line["run"] for line in results(tmp_path)] == ["blocks=s_ste(2,4),seed=1"]
    command.main([*words, "--sweep"], "")
    said = capsys.readouterr().out
    assert "4 runs: 4 finished." in said
    page, table = ((tmp_path / "runs" / f"compare.{end}").read_text() for end in ("html", "md"))
    assert said.endswith(f"{tmp_path / 'runs' / 'compare.html'}\n")
    assert "| blocks=s_ste(2,4) |" in table
    assert "2 configs, 4 runs" in page
    assert said.count("2 of 8 layers 2:4; --mode=plan shows them") == 3  # of the index; then once for each method
    assert "left of" not in said  # the table of the plan
    assert len(made) == 3  # of the index; then one for each method, whatever the seeds
    found = results(tmp_path)
    assert [line["changes"] for line in found] == [
        {"sparsity.blocks": text, "seed": seed} for text in ("ste(2,4)", "s_ste(2,4)") for seed in (0, 1)
    ]
    assert all(line["figures"]["loss"] > 0 and line["steps"] == 4 and len(line["flops"]) == 2 for line in found)
    held = [json.loads(line) for line in (tmp_path / "all.jsonl").read_text().splitlines()]
    curves = [line.pop("curves") for line in held]
    assert held == found[3:] + found[:3]  # as they came, each once
    assert curves[0]["eval"]["step"] == [2, 4]
    lines = files.lines(tmp_path / "runs" / held[0]["folder"] / "metrics.jsonl")
    evaluated = [line["loss"] for line in lines if line["kind"] == "eval"]
    assert curves[0]["eval"]["loss"] == pytest.approx(evaluated, rel=1e-4)
    assert sorted(path.name for path in (tmp_path / "runs").glob("*/")) == sorted(line["folder"] for line in found)
    assert found[3]["folder"] == "blocks=s_ste-2-4-seed=1"
    alone = ["--config.sparsity.blocks=ste(2,4)", "--config.seed=1", f"--workdir={tmp_path / 'alone'}"]
    command.main([*words[:2], *alone], "")
    assert json.loads((tmp_path / "alone" / "run.json").read_text())["figures"] == found[1]["figures"]
    before = (tmp_path / "runs" / "results.jsonl").read_text()
    with (tmp_path / "all.jsonl").open("r+") as file:  # a line that a full disk cut off is one more to be added
        file.truncate(len(file.read()) - 9)
    command.main([*words, "--sweep"], "")
    assert len(made) == 4
    assert (tmp_path / "runs" / "results.jsonl").read_text() == before
    assert len(files.lines(tmp_path / "all.jsonl")) == 4
    words_of(tmp_path, CONFIG_FILE.replace('("ste(2,4)", "s_ste(2,4)")', '("s_ste(2,4)", "mvue(2,4)")'))
    command.main([*words, "--sweep"], "")  # runs that are listed no longer keep their lines
    assert [line["run"] for line in results(tmp_path)[2:4]] == [f"blocks=mvue(2,4),seed={seed}" for seed in (0, 1)]
    assert results(tmp_path)[:2] + results(tmp_path)[4:] == found[2:] + found[:2]


@pytest.mark.slow
def test_a_run_that_diverges_is_told_and_the_others_are_done(tmp_path, capsys):
    words = words_of(tmp_path, sweep_of("[{'learning_rate.peak': p} for p in (1e38, 1e-3)]"))
    with pytest.raises(Failed, match=r"1 of the runs failed: peak=1e.38"):
        command.main([*words, "--sweep", "--config.optimizer=sgd", "--config.clip=0"], "")
    assert [line["outcome"].partition(":")[0] for line in results(tmp_path)] == ["diverged", "finished"]
    capsys.readouterr()
    with pytest.raises(
        Failed, match=r"1 of the runs failed: peak=1e.38"
    ):  # it would diverge again, and is not repeated
        command.main([*words, "--sweep", "--config.optimizer=sgd", "--config.clip=0"], "")
    assert "2 runs: 1 diverged, 1 finished." in capsys.readouterr().out


def test_folders_need_no_quotes_and_are_the_same_at_every_start():
    config = command.read(["launch.py", "--config=configs/vit_24.py"]).config
    texts = [
        "dense",
        "ste(2,4)",
        "ste(2,4",
        "mdgf(2,4,linear(1,0,30%)); dw_g=mvue(2,4)",
        "x" * 150,
        "x" * 151,
        "$(rm)",
    ]
    changes = [{"sparsity.blocks": text, "learning_rate.peak": 1e-5} for text in texts]
    folders = [member.folder for member in members.listed(config, changes)]
    assert folders[0] == "blocks=dense"
    assert folders[1] == "blocks=ste-2-4"
    assert re.fullmatch(r"blocks=ste-2-4-[0-9a-f]{6}", folders[2])  # the same letters: it gets digits of its own
    assert folders[3] == "blocks=mdgf-2-4-linear-1-0-30pct-dw_g=mvue-2-4"
    assert folders[6] == "blocks=-rm"
    assert len({folder.lower() for folder in folders}) == len(texts)
    for folder in folders:
        assert re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._=+-]{0,120}", folder)
        assert subprocess.run(["sh", "-c", f"echo {folder}"], capture_output=True, text=True).stdout == f"{folder}\n"
    again = members.listed(config, changes + [{"sparsity.blocks": "s_ste(2,4)", "learning_rate.peak": 1e-5}])
    assert [member.folder for member in again][:-1] == folders  # also if runs are added at the end
    assert [member.name for member in again][3] == "blocks=mdgf(2,4,linear(1,0,30%)); dw_g=mvue(2,4)"


WRONG = {
    "{}": "has to return a list of changes",
    "[1, 2]": "has to return a list of changes",
    "[('seed', 0)]": "has to return a list of changes",
    "[{'batc': 3}]": "--config.batc: config has no field 'batc'. Did you mean config.batch",
    "[{'batch': 'x'}]": "batch='x'",
    "[{'seed': 1}, {'seed': 1}]": "has two runs named seed=1",
    "[{'seed': 0}, {'seed': -1}]": "config.seed=-1 is not from 0",
    "[{'seed': 0}, {'seed': 1, 'sparsity.blocks': 'sste_typo(2,4)'}]": "blocks=sste_typo.*: config.rules.*sste_typo",
    "[{'seed': 0}, {'seed': 0, 'optimizer': 'adamm'}]": "optimizer=adamm: .*Did you mean 'adam'",
    "1 / 0": r"mine.py, line \d+: ZeroDivisionError",
}


@pytest.mark.parametrize("text", WRONG)
def test_a_mistake_in_any_run_is_told_before_the_first(text, tmp_path):
    words = words_of(tmp_path, sweep_of(text))
    with pytest.raises(Mistake, match=WRONG[text]):
        command.main([*words, "--sweep"], "")
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_told_after_the_last_step_a_sweep_ends_with_that_run(tmp_path, monkeypatch):
    keep = record.Record.keep
    monkeypatch.setattr(
        record.Record, "keep", lambda self, *what: (signal.raise_signal(signal.SIGTERM), keep(self, *what))
    )
    words = words_of(tmp_path)
    with pytest.raises(
        Stopped, match=r"SIGTERM after the last step of blocks=ste\(2,4\),seed=0\. The same command continues"
    ):
        command.main([*words, "--sweep"], "")
    assert [line["outcome"] for line in results(tmp_path)] == ["finished"]


@pytest.mark.slow
def test_words_of_a_sweep(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")  # narrower tables fold words
    words = words_of(tmp_path)
    command.main([*words, "--sweep_index=3", "--mode=plan"], "")
    assert "ste(soft(2,4))" in capsys.readouterr().out  # the config file itself has ste(mse(2,4))
    assert [path.name for path in tmp_path.iterdir()] == ["mine.py"]
    with pytest.raises(Mistake, match="has no function get_sweep"):
        command.main(["launch.py", "--config=configs/vit_pgf.py", "--sweep"], "")
    assert [m.name for m in members.listed(config_files.load(words[1].removeprefix("--config=")), [{"seed": 3}])] == [
        "seed=3"
    ]


# ---- side by side ----

SEEDS = sweep_of("[{'seed': s} for s in range(4)]").replace('"0"', '"50%"')
SEEDS = SEEDS.replace("return c.lock()", "c.optimizer = 'sgd'\n    return c.lock()")


@pytest.fixture(scope="session")
def alone(tmp_path_factory):
    """Four runs, one after another."""

    def make(folder):
        config = words_of(folder, SEEDS)[1]
        process = start(folder / "runs", os.environ["JAX_COMPILATION_CACHE_DIR"], "--sweep", devices=4, config=[config])
        said = process.communicate(timeout=300)[0]
        assert process.returncode == 0, said

    return once(tmp_path_factory, "one_after_another", make) / "runs"


@pytest.fixture
def programs(monkeypatch):
    """The programs that are made."""
    made, first = [], program.Program.__init__
    monkeypatch.setattr(program.Program, "__init__", lambda self, *args: (made.append(self), first(self, *args))[1])
    return made


def about(directory):
    return json.loads((directory / "run.json").read_text())


def left(directory):
    """Return the files of a run, without the inside of checkpoints and names with a time in them."""
    paths = [path.relative_to(directory) for path in directory.rglob("*")]
    deep = lambda path: "checkpoints" in path.parts and len(path.parts) > 2 or path.parent.name == "tensorboard"
    return sorted(str(path) for path in paths if not deep(path))


def alike(here, there, shapes, last=4):
    """Check that two directories hold the same lines, figures and last state, to rounding."""
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    ours, theirs = timeless(here), timeless(there)[: len(timeless(here))]
    assert [line.keys() for line in ours] == [line.keys() for line in theirs]
    for ours_of, theirs_of in zip(ours, theirs, strict=True):
        jax.tree.map(lambda a, b: a == b if isinstance(a, str) else close(a, b), ours_of, theirs_of)
    states = [Checkpoints(directory).restore(shapes) for directory in (here, there)]
    assert [state.step for state in states] == [last, last]
    jax.tree.map(close, *(state.state for state in states))
    assert about(here)["figures"] == pytest.approx(about(there)["figures"], rel=1e-4)


@pytest.mark.processes
def test_side_by_side_every_run_is_as_it_would_be_alone(alone, programs, tmp_path, capsys):
    command.main([*words_of(tmp_path, SEEDS), "--sweep", "--seeds_at_once=2"], "")
    said = capsys.readouterr().out
    for part in (
        "seed=0, seed=1 (1, 2 of 4)",
        "seed=2, seed=3 (3, 4 of 4)",
        "4 runs: 4 finished.",
        "2 runs; the figures",
    ):
        assert part in said
    assert said.count("step 3/4") == said.count("step 4/4  loss") == 2  # a line for both
    (made,) = programs
    for seed in range(4):
        here, there = (folder / f"seed={seed}" for folder in (tmp_path / "runs", alone))
        alike(here, there, made.shapes)
        assert about(here)["trained_with"] == [f"seed={seed ^ 1}"]
        assert json.loads((here / "config.json").read_text())["seed"] == seed
        assert left(here) == left(there)
        assert [line for line in files.lines(here / "metrics.jsonl") if line["kind"] == "train"][-1]["per_second"] > 0
    assert "trained_with" not in about(alone / "seed=0")
    figures = {line["run"]: line["figures"]["loss"] for line in results(tmp_path)}
    assert len(set(figures.values())) == 4
    both, functions = made.beside(2), ("train", "score", "hard_score", "harden", "measure", "masks", "flips")
    assert [getattr(both, name)._cache_size() for name in functions] == [1] * 7  # for both groups
    assert [getattr(made, name)._cache_size() for name in ("train", "measure")] == [0] * 2
    assert all(getattr(made, name)._cache_size() <= 1 for name in ("score", "hard_score"))  # of each best checkpoint
    command.main(["launch.py", f"--workdir={tmp_path / 'runs' / 'seed=3'}", "--mode=eval"], "")
    assert f"last, step 4, test: accuracy {about(here)['figures']['accuracy']:.2%}" in capsys.readouterr().out


@pytest.mark.processes
def test_one_that_diverges_leaves_the_others_as_they_are(alone, programs, monkeypatch, tmp_path, capsys):
    train = program.Program.train_step

    def poisoned(self, state, arrays):
        bad = (state.seed == 1) & (state.step == 2)
        params = jax.tree.map(lambda w: jnp.where(bad, jnp.nan, w), state.params)
        return train(self, state._replace(params=params), arrays)

    monkeypatch.setattr(program.Program, "train_step", poisoned)
    with pytest.raises(Failed, match="1 of the runs failed: seed=1"):
        command.main([*words_of(tmp_path, SEEDS), "--sweep", "--seeds_at_once=4"], "")
    said = capsys.readouterr().out
    assert "seed=1: the loss is nan at step 3 (step 2 was finite). The checkpoint of step 2 is kept in" in said
    assert "4 runs: 3 finished, 1 diverged." in said.replace(
        "1 finished, 1 diverged, 2 finished", "3 finished, 1 diverged"
    )
    for seed in (0, 2, 3):
        alike(tmp_path / "runs" / f"seed={seed}", alone / f"seed={seed}", programs[0].shapes)
    lost = tmp_path / "runs" / "seed=1"
    assert about(lost)["outcome"] == "diverged: the loss is nan at step 3 (step 2 was finite)"
    assert [line["step"] for line in files.lines(lost / "metrics.jsonl") if line["kind"] == "train"] == [1, 2]
    assert checkpoints.steps(lost) == [2]
    assert len(list((lost / "checkpoints").glob("failed-*"))) == 1
    assert (lost / "report.html").exists()
    with pytest.raises(Failed, match="1 of the runs failed: seed=1"):  # it would diverge again, and is not repeated
        command.main([*words_of(tmp_path, SEEDS), "--sweep", "--seeds_at_once=4"], "")
    assert len(programs) == 1


@pytest.mark.processes
def test_one_that_diverges_at_the_end_leaves_the_others_as_they_are(monkeypatch, tmp_path):
    """Without validation data, the last evaluation is the test."""
    score = loop.Loop.score
    bad = lambda i, scores: scores | {"loss": math.nan} if i == 1 else scores
    monkeypatch.setattr(
        loop.Loop, "score", lambda self, split: {i: bad(i, scores) for i, scores in score(self, split).items()}
    )
    words = [*words_of(tmp_path, SEEDS), "--config.data.validation=0", "--config.evaluate=100%", "--config.measure=0"]
    with pytest.raises(Failed, match="1 of the runs failed: seed=1"):
        command.main([*words, "--sweep", "--seeds_at_once=4"], "")
    assert [line["outcome"].partition(":")[0] for line in results(tmp_path)] == [
        "finished",
        "diverged",
        *2 * ["finished"],
    ]


def stopping(monkeypatch):
    """Tell runs to stop after their first step."""

    def now(self):
        self.signal = signal.SIGTERM
        return True

    monkeypatch.setattr(signals.Stop, "now", now)


@pytest.mark.rare
@pytest.mark.processes
def test_begun_side_by_side_and_gone_on_with_alone_and_the_other_way_round(
    alone, programs, monkeypatch, tmp_path, capsys
):
    words, runs = words_of(tmp_path, SEEDS), tmp_path / "runs"
    with monkeypatch.context() as told:
        stopping(told)
        with pytest.raises(
            Stopped, match=r"interrupted by SIGTERM after step 1\. (The checkpoint of step 1 is kept .*){2}"
        ) as stop:
            command.main([*words, "--sweep", "--seeds_at_once=2"], "")
        assert stop.value.code == 143
        for seed in (2, 3):
            with pytest.raises(Stopped):
                command.main([*words, f"--sweep_index={seed}"], "")
    assert [about(runs / f"seed={seed}")["outcome"] for seed in range(4)] == ["interrupted"] * 4
    (runs / "seed=0" / "checkpoints" / "1" / "checksums.json").write_text("{}")
    with pytest.raises(Failed, match="1 of the runs failed: seed=0"):  # as it would alone
        command.main([*words, "--sweep", "--seeds_at_once=2"], "")
    command.main([*words, "--sweep", "--seeds_at_once=2"], "")
    said = capsys.readouterr().out
    assert [about(runs / f"seed={seed}").get("trained_with") for seed in range(4)] == [
        None,
        ["seed=2"],
        ["seed=1"],
        None,
    ]
    assert said.count("continuing from step 1 of 4") == 3
    assert "seed=0: None of the checkpoints in" in said
    for seed in range(4):
        alike(runs / f"seed={seed}", alone / f"seed={seed}", programs[0].shapes)


FORMS = {
    "vit_sste": ["model.depth=1", "mesh.fsdp=2", "mesh.tensor=2"],
    "resnet_24": ["sparsity.stages=fst(every=2)", "ema=0.9", "masked_decay=1e-3"],
    "gpt_sste": ["model.depth=1", "accumulate=2", "optimizer=step_adam(after=50%, before=75%)", "batch=8"],
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.rare] * (n == "resnet_24")) for n in FORMS])
@pytest.mark.slow
def test_a_step_side_by_side_is_that_of_each_alone(name):
    made = made_of(f"configs/{name}.py:smoke", *(f"--config.{change}" for change in FORMS[name]))
    both, arrays = made.beside(2), next(iter(made.task.feed(0, 0, made.mesh)))
    states = [made.init(jnp.uint32(seed)) for seed in (3, 8)]
    state = both.together(states)
    if name == "resnet_24":  # a mask that is renewed every other step costs nothing between
        assert "stablehlo.case" in both.train.lower(state, arrays).as_text()
    for _ in range(3):
        found = [made.train(state, arrays) for state in states]
        states = [state for state, _ in found]
        state, shown = both.train(state, arrays)
        for label in shown:
            np.testing.assert_allclose(shown[label], [each[label] for _, each in found], rtol=1e-4)
    for number, wanted in enumerate(states):
        part = both.part(state, number)
        assert jax.tree.map(lambda v: v.sharding, part) == jax.tree.map(lambda v: v.sharding, wanted)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), part, wanted)
