"""The validation split: no step sees it, and it chooses the best checkpoint. The test split is scored at the end."""

import contextlib
import json
import signal

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict

from experiments import command, files
from experiments.data import images, validation
from experiments.errors import Mistake, Stopped
from experiments.training import checkpoints, digest, modes, tasks
from experiments.training.checkpoints import Checkpoints
from tests.experiments.runs import as_people_run_it as as_people_run_it, program


def read(*words: str):
    return command.read(["launch.py", *words]).config


def train(workdir, *words: str) -> list[dict]:
    """Train a run here, and return the lines of its metrics."""
    run = modes.Run("small", read(*words), workdir)
    modes.carry_out("train", [run], "python launch.py --workdir=run")
    return files.lines(workdir / "metrics.jsonl")


@pytest.mark.parametrize("share", [0.0, 0.001, 0.1, 0.25, 0.9])
def test_every_class_gives_its_share(share):
    labels = images.load("digits").train[1]
    train, held_out = validation.positions(labels, share)
    assert sorted([*train, *held_out]) == list(range(len(labels)))
    assert len(held_out) == (max(1, round(share * len(labels))) if share else 0)
    for digit in range(10):
        count = np.sum(labels == digit)
        assert abs(np.sum(labels[held_out] == digit) - share * count) <= 1


@pytest.fixture
def pictures(tmp_path):
    """A folder of 120 images in 8 classes, and the words of a command for it."""
    from PIL import Image

    for name, shade in ((f"class{i}", 30 * i) for i in range(8)):
        (tmp_path / name).mkdir()
        for k in range(15):
            Image.new("RGB", (9, 7), (shade, k, k)).save(tmp_path / name / f"{k}.png")
    return ["--config=configs/vit_24.py:folder", f"--config.data.dir={tmp_path}", "--config.data.size=32"]


def test_every_class_of_a_folder_gives_its_share(pictures):
    """A tenth of each class is the test split, and a tenth of the rest is for validation."""
    task = tasks.task(read(*pictures))
    files, labels = zip(*(task.splits[name] for name in ("train", "validation", "test")), strict=True)
    assert [len(part) for part in files] == [97, 11, 12]
    assert len(set().union(*files)) == 120
    assert sorted(np.bincount(labels[1], minlength=8)) == [1] * 5 + [2] * 3
    for part, numbers in zip(files, labels, strict=True):
        assert [f"class{number}" for number in numbers] == [file.split("/")[-2] for file in part]
    few = (
        "the validation split has 11 images: one image changes the accuracy by 9.09 points. config.data.validation "
        "sets it"
    )
    assert ("note", few) in task.facts
    assert few in task.notes


@pytest.mark.parametrize(
    ("share", "said"), [(0, None), (0.009, "1 image: one image changes the accuracy by 100 points")]
)
def test_a_folder_with_another_share(pictures, share, said):
    task = tasks.task(read(*pictures, f"--config.data.validation={share}"))
    assert len(task.splits["validation"][0]) == (said is not None)
    assert [said in note for note in task.notes[1:]] == ([True] if said else [])


@pytest.mark.slow
@pytest.mark.parametrize(("config_file", "share"), [("vit_24.py:folder", 0.1), ("vitb_imagenet.py", 0.01)])
def test_a_plan_without_the_folder_has_its_counts(config_file, share):
    sizes = ["--config.data.examples=1_281_167", "--config.data.classes=1000", "--config.data.dir=/nowhere"]
    task = tasks.task(read(f"--config=configs/{config_file}", *sizes), plan=True)
    count = round(1_281_167 * share)
    assert dict(task.facts)["data"].endswith(
        f": {1_281_167 - count:,} training images, {count:,} validation; 1,000 classes"
    )
    assert len(task.notes) == 1  # that the data are missing


def test_few_images_in_memory_have_a_note_too(tmp_path):
    x = np.zeros((44, 8, 8), np.uint8)
    np.savez(tmp_path / "a.npz", x=x[:40], y=np.arange(40) % 4, x_test=x[40:], y_test=np.arange(4))
    task = tasks.task(read("--config=configs/vit_24.py", f"--config.data.name={tmp_path / 'a.npz'}"))
    assert [note[:34] for note in task.notes] == ["the validation split has 4 images:"]
    assert not tasks.task(read("--config=configs/vit_24.py")).notes  # 144 digits


def test_no_batch_holds_an_image_of_the_validation_split():
    made = program("configs/vit_dense.py:smoke", "--config.data.crop=0", "--config.data.smoothing=0")
    task, whole = made.task, images.load("digits").train[0].astype(np.float32)
    means, deviations = task.mean, task.std
    seen = set()
    [arrays] = [next(iter(task.feed(0, 0, made.mesh)))]
    batch = jax.jit(lambda step: task.batch(arrays, 0, step, made.mesh)[0])
    for step in range(task.examples // 16 + 1):  # an epoch
        pixels = np.rint((np.asarray(batch(step)) * deviations + means) * 255)
        seen |= {image.astype(np.uint8).tobytes() for image in pixels}
    held_out, test = ({x.tobytes() for x in task.splits[name][0]} for name in ("validation", "test"))
    assert len(seen) == task.examples == len(whole) - 144
    assert not seen & held_out
    assert not seen & test
    assert not held_out & test


def test_no_window_holds_a_token_of_the_validation_split():
    task = tasks.task(read("--config=configs/gpt_dense.py:smoke"))
    whole = task.set.train
    at = len(whole) - round(0.1 * len(whole))
    np.testing.assert_array_equal(task.train, whole[:at])
    np.testing.assert_array_equal(task.windows["validation"][0], whole[at : at + 33])
    np.testing.assert_array_equal(task.windows["test"][0], task.set.test[:33])


SMALL = ["--config=configs/vit_24.py:smoke", "--config.steps=12", "--config.evaluate=2", "--config.measure=0"]


@pytest.mark.slow
def test_the_best_of_validation_and_the_last_are_scored_on_the_test_split(tmp_path):
    """A rate that rises a thousandfold makes the first evaluation the best by far, on every CPU."""
    words = ["--config=configs/gpt_24.py:smoke", *SMALL[1:], "--config.data.windows=20", "--config.ema=0.5"]
    rate = {"peak": 0.003, "end": 3, "shape": "linear", "warmup": 0}
    words += [*(f"--config.learning_rate.{name}={value}" for name, value in rate.items()), "--config.clip=0"]
    lines = train(tmp_path / "run", *words)
    evaluations = {line["step"]: line["hardened_loss"] for line in lines if line["kind"] == "eval"}
    best, last = [line for line in lines if line["kind"] == "test"]
    assert last["step"] == 12
    assert best["step"] == min(evaluations, key=evaluations.get) < 12
    made = modes.make_program(read(*words))
    with contextlib.closing(Checkpoints(tmp_path / "run")) as saved:
        for line, of_best in ((best, True), (last, False)):
            step, state, _ = saved.restore(made.shapes, best=of_best)
            wanted = made.evaluate(state, "test")
            assert (step, {name: line[name] for name in wanted}) == (line["step"], pytest.approx(wanted))
            assert made.evaluate(state, "validation")["hardened_loss"] == pytest.approx(evaluations[step])


@pytest.mark.rare
@pytest.mark.slow
def test_a_run_that_gets_no_better_stops_and_is_finished(tmp_path):
    words = [
        *SMALL,
        "--config.learning_rate.peak=0",
        "--config.stop=4",
    ]  # a rate of 0: the first evaluation is the best
    lines = train(tmp_path / "run", *words)
    assert [line["step"] for line in lines if line["kind"] == "eval"] == [2, 4, 6]
    assert [line["step"] for line in lines if line["kind"] == "test"] == [2, 6]
    assert checkpoints.steps(tmp_path / "run")[-1] == 6
    about = json.loads((tmp_path / "run" / "run.json").read_text())
    assert ["stopped early", "after step 6 of 12"] in about["summary"]
    assert (about["steps"], about["planned_steps"]) == (6, 12)

    def killed(*_):
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:  # killed after the last checkpoint, before it is finished
        patch.setattr("experiments.training.loop.Loop.finish", killed)
        with pytest.raises(KeyboardInterrupt):
            train(tmp_path / "again", *words)
    again = train(tmp_path / "again", *words)
    number = lambda line: {name: value for name, value in line.items() if name != "seconds"}
    stable = lambda lines: [number(line) for line in lines if line["kind"] in ("eval", "test")]
    assert stable(again) == stable(lines)


@pytest.mark.slow
def test_runs_side_by_side_do_not_stop_early(tmp_path):
    config = read(*SMALL, "--config.stop=4")
    runs = [modes.Run(name, config, tmp_path / name) for name in "ab"]
    with pytest.raises(Mistake, match="config.stop='4': runs side by side end together. Leave out --seeds_at_once"):
        modes.carry_out("train", runs, "python launch.py --sweep")


@pytest.mark.slow
def test_a_run_stopped_by_hand_goes_on_to_its_next_evaluation(tmp_path, monkeypatch):
    """At a step without an evaluation a run does not stop early, also if it begins again there."""
    words = [*SMALL, "--config.learning_rate.peak=0", "--config.stop=4", "--config.evaluate=3"]  # at 3, 6, 9, 12

    def now(self):
        self.asked = getattr(self, "asked", 0) + 1
        self.signal = signal.SIGTERM if self.asked == 8 else None
        return self.asked == 8

    with monkeypatch.context() as patch:
        patch.setattr("experiments.scale.signals.Stop.now", now)
        with pytest.raises(Stopped):
            train(tmp_path / "run", *words)
    lines = train(tmp_path / "run", *words)
    assert [line["step"] for line in lines if line["kind"] == "eval"] == [3, 6, 9]
    assert [line["step"] for line in lines if line["kind"] == "test"] == [3, 9]


SEEN = {  # what another run was trained with, beside a run with validation=0.1 and test=""
    "the same": ({}, None),
    "another set": ({"name": "b.txt", "validation": 0.0, "test": "b.txt"}, None),
    "validation": ({"validation": 0.0}, "was trained with config.data.validation=0.0, and may"),
    "test": ({"test": "b.txt"}, "was trained with config.data.test='b.txt', and may have learned from the test"),
}


@pytest.mark.parametrize(("there", "said"), SEEN.values(), ids=SEEN)
def test_a_state_that_may_have_seen_a_split_is_no_origin(there, said, tmp_path, monkeypatch):
    """The test split is the end of the text if config.data.test is empty, and that end is trained on if it is not."""
    fields = {"name": "a.txt", "dir": None, "validation": 0.1, "test": ""}
    own, other = (digest.identity(ConfigDict({"data": data})) for data in (fields, fields | there))
    monkeypatch.setattr(modes, "refuse_without_checkpoints", lambda *_: None)
    (tmp_path / "config.json").write_text(other.text)
    with contextlib.nullcontext() if said is None else pytest.raises(Mistake, match=said):
        modes.refuse_origin(tmp_path, own)
