"""Many runs of one page: named by what differs, done once, compiled once for all seeds."""

import json

import pytest

from experiments import command, program, sweep
from experiments.errors import Failed, Mistake
from tests.runs import as_people_run_it as as_people_run_it

PAGE = """
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


def page(tmp_path, text=PAGE):
    (tmp_path / "page.py").write_text(text)
    return ["launch.py", f"--config={tmp_path / 'page.py'}", f"--workdir={tmp_path / 'runs'}"]


def results(tmp_path):
    return [json.loads(line) for line in (tmp_path / "runs" / "results.jsonl").read_text().splitlines()]


def test_a_sweep_runs_what_is_not_done(tmp_path, monkeypatch, capsys):
    made = []
    first = program.Program.__init__
    monkeypatch.setattr(program.Program, "__init__", lambda self, *args: (made.append(1), first(self, *args))[1])
    words = page(tmp_path)
    command.main([*words, "--sweep_index=3"], "")
    assert [line["run"] for line in results(tmp_path)] == ["blocks=s_ste(2,4),seed=1"]
    command.main([*words, "--sweep"], "")
    said = capsys.readouterr().out
    assert "4 runs: 4 finished." in said
    assert len(made) == 3  # of the index; then one for each method, whatever the seeds
    found = results(tmp_path)
    assert [line["changes"] for line in found] == [
        {"sparsity.blocks": text, "seed": seed} for text in ("ste(2,4)", "s_ste(2,4)") for seed in (0, 1)
    ]
    assert all(line["figures"]["loss"] > 0 and line["steps"] == 4 and len(line["flops"]) == 2 for line in found)
    alone = ["--config.sparsity.blocks=ste(2,4)", "--config.seed=1", f"--workdir={tmp_path / 'alone'}"]
    command.main([*words[:2], *alone], "")
    assert json.loads((tmp_path / "alone" / "run.json").read_text())["figures"] == found[1]["figures"]
    before = (tmp_path / "runs" / "results.jsonl").read_text()
    command.main([*words, "--sweep"], "")
    assert len(made) == 4
    assert (tmp_path / "runs" / "results.jsonl").read_text() == before


def test_a_run_that_diverges_is_told_and_the_others_are_done(tmp_path, capsys):
    text = (
        PAGE[: PAGE.index("def get_sweep")]
        + "def get_sweep():\n    return [{'learning_rate.peak': p} for p in (1e38, 1e-3)]\n"
    )
    words = page(tmp_path, text)
    with pytest.raises(Failed, match=r"1 of the runs failed: peak=1e.38"):
        command.main([*words, "--sweep", "--config.optimizer=sgd", "--config.clip=0"], "")
    assert [line["outcome"].partition(":")[0] for line in results(tmp_path)] == ["diverged", "finished"]
    capsys.readouterr()
    command.main([*words, "--sweep", "--config.optimizer=sgd", "--config.clip=0"], "")  # it would diverge again
    assert "2 runs: 1 diverged, 1 finished." in capsys.readouterr().out


WRONG = {
    "{}": "gives a list of changes",
    "[{'batc': 3}]": "--config.batc: config has no field 'batc'. Did you mean config.batch",
    "[{'batch': 'x'}]": "batch='x'",
    "[{'seed': 1}, {'seed': 1}]": "has two runs named seed=1",
    "1 / 0": r"page.py, line \d+: ZeroDivisionError",
}


@pytest.mark.parametrize("text", WRONG)
def test_a_sweep_that_is_wrong(text, tmp_path):
    words = page(tmp_path, PAGE[: PAGE.index("def get_sweep")] + f"def get_sweep():\n    return {text}\n")
    with pytest.raises(Mistake, match=WRONG[text]):
        command.main([*words, "--sweep"], "")


def test_words_of_a_sweep(tmp_path):
    words = page(tmp_path)
    with pytest.raises(Mistake, match="--sweep_index=4: the sweep has 4 runs, from 0 to 3"):
        command.main([*words, "--sweep_index=4"], "")
    with pytest.raises(Mistake, match="--sweep trains: it goes without --mode and --from"):
        command.main([*words, "--sweep", "--mode=plan"], "")
    with pytest.raises(Mistake, match="has no function get_sweep"):
        command.main(["launch.py", "--config=configs/vit_dense.py", "--sweep"], "")
    assert [m.name for m in sweep.members(command.load(words[1].removeprefix("--config=")), [{"seed": 3}])] == [
        "seed=3"
    ]
