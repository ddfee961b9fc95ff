"""Studies: pages whose every method is known, results that are kept as they come, and tables made of them."""

import json

import numpy as np
import pytest

from experiments import command, reproduce, settings, sweep
from experiments.errors import Mistake
from experiments.studies import descent
from tests.runs import as_people_run_it as as_people_run_it

VARIANTS = [f"experiments/studies/{name}.py:{size}" for name in ("sdgp", "s_ste", "pgf") for size in ("cpu", "gpu")]
KINDS = [("mvue", "resnet"), ("mvue", "vit"), ("mvue", "gpt"), ("composed", "vit"), ("composed", "gpt"), ("pgf", "qk")]
VARIANTS += [f"experiments/studies/{name}.py:{kind}_{size}" for name, kind in KINDS for size in ("cpu", "gpu")]


@pytest.mark.parametrize("page", VARIANTS)
def test_every_method_of_every_study_is_known(page):
    config = command.load(page)
    asked = command.read(["launch.py", f"--config={page}"]).changes()
    found = sweep.members(config, asked)
    assert len(found) == len({m.name for m in found}) >= 30
    assert {m.config.seed for m in found} == {0, 1, 2}
    recipes = {str(settings.recipe(m.config, 1000)) for m in found}
    assert len(recipes) == len(found) // 3
    first = asked[0]
    assert "dense" in first.values()


LINE = {
    "format": 1, "run": "stages=dense,seed=0", "changes": {"sparsity.stages": "dense", "seed": 0}, "outcome": "finished",
    "metric": "accuracy", "figures": {"accuracy": 0.9, "hardened_accuracy": 0.9}, "steps": 10, "flops": [2, 2],
    "devices": "1 x cpu", "command": "python launch.py --config=experiments/studies/sdgp.py:cpu --sweep", "versions": {"jax": "0.0"}, "notes": ["A note."],
}  # fmt: skip


def line(method, seed, accuracy, **more):
    figures = {"accuracy": accuracy, "hardened_accuracy": accuracy}
    changes = {"sparsity.stages": method, "seed": seed}
    return LINE | {"run": f"stages={method},seed={seed}", "changes": changes, "figures": figures} | more


def written(tmp_path, *lines, name="sdgp_cpu"):
    (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    return tmp_path


def test_a_table_is_what_its_results_say(tmp_path):
    """By hand: differences of 1 and 2 points are 1.5 on average, with a standard error of 0.5."""
    lines = [line("dense", 0, 0.90), line("dense", 1, 0.92), line("sdgp(2,4)", 1, 0.94, flops=[2, 1])]
    lines += [line("sdgp(2,4)", 0, 0.5), line("sdgp(2,4)", 0, 0.91)]  # run again: the last one counts
    lines += [line("sdgp(1,8)", 0, float("nan"), outcome="diverged: the loss is nan at step 3")]
    text, svg = reproduce.block("sdgp_cpu", written(tmp_path, *lines))
    rows = [row for row in text.splitlines() if row.startswith("| `")]
    assert rows[0] == "| `dense` | 91.00 ± 1.41 |  | 95.3 |  | 1.000 | 2 of 2 |  |"
    assert rows[1] == "| `sdgp(2,4)` | 92.50 ± 2.12 | +1.50 ± 0.50 | 95.2 | -0.1 | 0.500 | 2 of 2 |  |"
    assert rows[2] == "| `sdgp(1,8)` |  |  | 94.7 | -0.6 | 1.000 | 0 of 2 | seed 0 diverged, seed 1 missing |"
    assert "Not run: `sdgp(2,4,rescale=False,select='random')`, " in text
    assert (
        "`python launch.py --config=experiments/studies/sdgp.py:cpu --sweep --results=experiments/results/sdgp_cpu.jsonl`"
        in text
    )
    assert text.rstrip().endswith("A note.")
    assert svg.startswith('<svg xmlns="http://www.w3.org/2000/svg"')
    assert "prefers-color-scheme:dark" in svg
    assert svg.count(">sdgp(2,4)<") == 1


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (
            "",
            "there is no .*sdgp_cpu.jsonl: python launch.py --config=experiments/studies/sdgp.py:cpu --sweep --results=",
        ),
        ('{"run": "a"}\n', "line 1 is no line of results .KeyError: 'format'"),
        (
            '{"format": 0, "run": "a"}\n',
            "line 1 is of format 0, and this reads 1: take the line out, and run it again by python",
        ),
        ('{"form', r"line 1 is no line of results \(.*take it out, and run what is missing by python"),
        (
            json.dumps(line("dense", 0, 0.9, command="python launch.py --config=a.py --sweep")),
            "line 1 was made by another command",
        ),
        (json.dumps(line("dense", 0, 0.9)), "has not both dense runs and others yet: python launch.py"),
    ],
)
def test_results_that_cannot_be_read_say_why(text, why, tmp_path):
    if text:
        (tmp_path / "sdgp_cpu.jsonl").write_text(text)
    with pytest.raises(Mistake, match=why):
        reproduce.block("sdgp_cpu", tmp_path)


def test_every_study_is_found_by_the_name_of_its_results():
    for page in VARIANTS:
        name = page.removeprefix("experiments/studies/").replace(".py:", "_")
        assert f"--config={page} --sweep --results=experiments/results/{name}.jsonl" in reproduce._command(name)
    with pytest.raises(Mistake, match="nothing_cpu names no study"):
        reproduce._command("nothing_cpu")


def test_the_page_is_what_its_results_say():
    text = reproduce.PAGE.read_text()
    assert reproduce.page(text)[0] == text
    assert all((reproduce.RESULTS / f"{name}.svg").exists() for name in reproduce.BLOCK.findall(text))


@pytest.mark.parametrize("method", ["ste(2,4)", "s_ste(gradient='dense')"])
def test_a_small_step_descends_as_predicted(method):
    """By its first-order term, where no mask jumps; under the old mask it descends too, as the gradient has it."""
    small = ["steps=6", "batch=8", "data.name=pydoc", "data.length=32", "learning_rate.peak=1e-5"]
    small += ["learning_rate.warmup=0", "learning_rate.shape=constant"]
    rows = descent.run(method, 0, tuple(f"--config.{change}" for change in small))["rows"]
    assert rows["step"] == [0, 5]
    assert all(value > 1e-3 for value in rows["predicted"])
    if method != "ste(2,4)":
        np.testing.assert_allclose(rows["actual"], rows["predicted"], rtol=0.1)
    else:
        assert all(value > 1e-3 for value in rows["under the old mask"])
    assert 0 < max(rows["flips"]) < 0.05
    assert ("under the old mask" in rows) == (method == "ste(2,4)")
