"""Code of others: a pruner, a model, a data set and a task in a folder outside the repository: those of the pages."""

import doctest
import json
import os
import re
import subprocess
import sys

import pytest
from flax import nnx

from experiments import command, config_files, load, recorded, report
from experiments.data import images, others, text
from experiments.errors import Failed, Mistake
from experiments.training import settings, tasks
from tests.experiments.runs import configured


def page(name: str, *numbers: int) -> str:
    """Return the code of some snippets of a page of docs/how_to, which a reader puts into a file."""
    text = (config_files.ROOT / "docs" / "how_to" / f"{name}.md").read_text()
    blocks = [block for block in re.findall(r"(?ms)^```python\n(.*?)^```$", text) if ">>> " in block]
    examples = (example for n in numbers for example in doctest.DocTestParser().get_examples(blocks[n]))
    return "".join(example.source for example in examples)


TASK = page("task", 0)
FILES = {"mylab": page("pruner", 0), "mixer": page("model", 0), "spirals": page("data", 1, 3), "sine": TASK}


@pytest.mark.slow
def test_a_feed_that_ends_too_early_is_told(tmp_path, monkeypatch):
    source = TASK.replace("sine:Sine", "short:Sine").replace("while True:", "for _ in range(start, 6):")
    (tmp_path / "short.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    words = ["launch.py", "--config=short.py", "--config.steps=8", "--config.evaluate=3", "--workdir=run"]
    for _ in range(2):  # the second time from its last checkpoint
        with configured(), pytest.raises(Failed, match="the feed of the task ended after step 6 of 8. It has to go on"):
            command.main(words, "")
        about = json.loads((tmp_path / "run" / "run.json").read_text())
        assert about["outcome"].startswith("failed: the feed of the task ended")
    sys.modules.pop("short", None)


@pytest.fixture
def outside(tmp_path, monkeypatch):
    """Make a folder outside the repository the current one."""
    for name, source in FILES.items():
        (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in FILES:
        sys.modules.pop(name, None)


def read(config_file: str, *changes: str):
    return command.read(["launch.py", f"--config={config_file}", *(f"--config.{change}" for change in changes)]).config


def test_a_model_gets_the_fields_of_the_config_and_what_the_task_fixes(outside):
    config = read("mixer.py")
    assert settings.foreign_names(config) == ["mixer:Mixer"]
    model = tasks.task(config).model
    fixed = {"image": 8, "channels": 1, "classes": 10, "dtype": None}
    assert (model.args[1], model.keywords) == ("mixer:Mixer", fixed | {"patch": 2, "width": 32})


@pytest.mark.parametrize(
    ("field", "said"),
    [
        ("model.name=mixr:Mixer", "config.model.name: there is no module 'mixr'. Start in the folder that holds it"),
        ("model.name=mixer:Mixr", r"config.model.name: mixer:Mixr: the module mixer .* Did you mean mixer:Mixer\?"),
        ("model.name=mixer:common", "config.model.name='mixer:common' is a module, not a subclass of nnx.Module"),
        (
            "model.name=flax.nnx:Linear",
            "config.model.name='flax.nnx:Linear': missing a required argument: 'in_features'. It is called with rngs",
        ),
        ("model.name=builtins:dict", "config.model.name='builtins:dict' makes a dict, not an nnx.Module"),
        ("model.name=mixer", r"config.model.name='mixer' is not known. Write one of resnet, vit"),
        ("data.name=spiral:load", "config.data.name: there is no module 'spiral'"),
        ("data.name=spirals:np", "config.data.name='spirals:np' is a module, not a function of a folder"),
        (
            "data.name=spirals:notes",
            r"returns a Text, not experiments.data.images.Images\(name, train, test, classes, note\)",
        ),
        ("experiment=sine:Sin", r"has no name 'Sin'. Did you mean sine:Sine\?"),
        ("experiment=sine:Net", "config.experiment='sine:Net' is not a task: it has no make, example, feed"),
        ("experiment=sine:common", "config.experiment='sine:common' is a module, not a class with the members of Task"),
        ("sparsity.inner=dw_g=mylab:abov(0.5,4)", r"has no name 'abov'. Did you mean mylab:above\?"),
    ],
)  # fmt: skip
def test_what_is_of_the_wrong_kind_is_refused_in_one_line(outside, field, said):
    config = read("mixer.py", field)
    with pytest.raises(Mistake, match=said) as caught:
        settings.recipe(config, 100), tasks.task(config).make(nnx.Rngs(0))
    assert "\n" not in str(caught.value)


def test_data_sets_of_images_are_checked(outside):
    good = others.load("spirals:load", "", images.Images)
    (x, y), test = good.train, good.test
    assert images.load("spirals:load").train[1].dtype == "int32"
    for wrong, said in [
        (good._replace(train=(x / 255, y)), r"train has images of float64 \(320, 8, 8, 1\), not uint8"),
        (good._replace(train=(x[..., 0], y)), r"train has images of uint8 \(320, 8, 8\), not uint8 \(n, height"),
        (good._replace(train=(x, y[:-1])), r"train has labels of int64 \(319,\), not one whole number for each of 320"),
        (good._replace(train=(x, y + 1)), "train has labels from 1 to 2, and 2 classes are named"),
        (good._replace(test=(test[0][:, 1:], test[1])), r"test has images of \(7, 8, 1\), not of \(8, 8, 1\)"),
    ]:
        with pytest.raises(Mistake, match=said):
            images._checked("spirals:load", wrong)


def test_texts_are_checked(outside):
    notes = text.load("spirals:notes")
    assert notes.train.dtype == "uint8"
    assert notes.decode([0, 1]) == "ab"
    with pytest.raises(Mistake, match="train has tokens from 0 to 6, and the vocabulary is 6"):
        text._checked("spirals:notes", notes._replace(vocabulary=6))
    with pytest.raises(Mistake, match=r"test is float64 \(100,\), not a 1-D array of whole numbers"):
        text._checked("spirals:notes", notes._replace(test=notes.test / 2))
    with pytest.raises(Mistake, match="leave config.data.test empty"):
        text.load("spirals:notes", tokenizer="gpt2.json")


def test_the_folder_of_a_config_file_and_the_current_folder_can_be_imported(outside, tmp_path_factory, monkeypatch):
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p != str(outside)])
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    config = read(str(outside / "mixer.py"), "data.name=spirals:load")
    assert tasks.task(config).examples == 288  # of 320, without the validation split


READERS = {
    "only names that you write yourself": lambda: command.read(["launch.py", "--mode=eval", "--workdir=run"]),
    "only if you ask for it": lambda: load.load_run("run"),
}


@pytest.mark.parametrize("said", READERS)
def test_settings_in_the_directory_of_a_run_import_nothing(said, outside):
    """They are not a person's own words."""
    (outside / "evil.py").write_text("raise SystemExit('it ran')\n")
    (outside / "run").mkdir()
    (outside / "run" / "run.json").write_text('{"name": "x"}')
    for change in (
        "model.name=evil:Boom",
        "data.name=evil:boom",
        "experiment=evil:Boom",
        "sparsity.inner=dw_g=evil:boom()",
        "rules=((r'.*', 'ste(evil:boom())'),)",
    ):
        config = read("mixer.py", "model.name=vit", change)
        (outside / "run" / "config.json").write_text(config.to_json_best_effort())
        with pytest.raises(Mistake, match=f"config.json names evil:[bB]oom, .*{said}"):
            READERS[said]()
    assert "evil" not in sys.modules


def test_results_and_reports_import_nothing(outside):
    (outside / "evil.py").write_text("raise SystemExit('it ran')\n")
    line = json.loads((config_files.ROOT / "experiments/results/held_vit_cpu.jsonl").read_text().partition("\n")[0])
    line["changes"] |= {"sparsity.blocks": "dw_g=evil:boom()", "experiment": "evil:Boom", "model.name": "evil:Boom"}
    (outside / "held_vit_cpu.jsonl").write_text(json.dumps(line))
    with pytest.raises(Mistake, match="another config: the config file has changed since"):
        recorded.read(outside / "held_vit_cpu.jsonl")
    (outside / "run").mkdir()
    (outside / "run" / "run.json").write_text(json.dumps({"name": "a run"}))
    (outside / "run" / "config.json").write_text(read("mixer.py", "model.name=evil:Boom").to_json_best_effort())
    assert "evil:Boom" in report.write(outside / "run").read_text()
    assert "evil" not in sys.modules


@pytest.mark.processes
def test_a_report_is_written_in_any_folder(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text('{"name": "x"}')
    elsewhere = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, config_files.ROOT / "experiments" / "report", "run"]
    done = subprocess.run(command, cwd=tmp_path, env=elsewhere, capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, "run/report.html"), done.stderr
    assert (tmp_path / "run" / "report.html").is_file()
