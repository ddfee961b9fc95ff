"""Weights, predictions and metrics out of the directories of runs, against the program's own evaluation."""

import contextlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from ml_collections import ConfigDict

import nmjax as nm
from experiments import command, config_files, files, load
from experiments.data import images, text
from experiments.errors import Failed, Mistake
from experiments.load import LoadedRun, load_run
from experiments.training import checkpoints as saved, modes, tasks
from experiments.training.checkpoints import Checkpoints
from tests.experiments.outside_test import TASK
from tests.experiments.runs import as_people_run_it as as_people_run_it, once, xla_flags

pytestmark = pytest.mark.slow

SMALL = ["--config.steps=12", "--config.evaluate=4", "--config.measure=0"]
CONFIGS = {
    "averaged": [  # an image run on four devices that share its parameters, with averages, and state of a pruner
        "--config=configs/vit_24.py:smoke",
        "--config.model.depth=1",
        "--config.sparsity.blocks=y_w=ste(hold(mse(2,4),every=3)); dw_g=mvue_approx(2,4)",
        "--config.ema=0.9",
        "--config.mesh.fsdp=4",
    ],
    "resnet": ["--config=configs/resnet_24.py:smoke", "--config.data.smoothing=0.1"],  # with means of BatchNorm
    "text": ["--config=configs/gpt_24.py:smoke", "--config.model.depth=1", "--config.data.windows=20"],
}


def train(folder: Path, *words: str) -> Path:
    """Train a run here, so that its best checkpoint is the last but one."""
    config = command.read(["launch.py", *words]).config
    modes.carry_out("train", [modes.Run("small", config, folder / "run")], "python launch.py --workdir=run")
    for step, best in {4: False, 8: True, 12: False}.items():
        path = folder / "run" / "checkpoints" / str(step)
        if path.exists():
            saved.write_checksums(path, best, [])
    return folder / "run"


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """Return the directory of a run, which is trained when it is first asked for."""

    def run(name: str) -> Path:
        make = lambda folder: train(folder, *CONFIGS[name], *SMALL)
        return once(tmp_path_factory, f"load_{name}", make) / "run"

    made = {}
    return lambda name: made.get(name) or made.setdefault(name, run(name))


def evaluated(workdir: Path, best: bool):
    """Return the program of a run and the state of a checkpoint, as --mode=eval has them."""
    program = modes.make_program(command.read(["launch.py", "--mode=eval", f"--workdir={workdir}"]).config)
    with contextlib.closing(Checkpoints(workdir)) as checkpoints:
        _, state, _ = checkpoints.restore(program.shapes, best=best, rename_damaged=False)
    return program, state


def nats(logits: np.ndarray, labels: np.ndarray) -> float:
    """Return the mean cross-entropy, in float64."""
    x = np.float64(logits)
    right = np.take_along_axis(x, labels[..., None], -1)[..., 0]
    return float(np.mean(np.log(np.exp(x - x.max(-1, keepdims=True)).sum(-1)) + x.max(-1) - right))


def paths(state) -> dict[str, np.ndarray]:
    return {"/".join(map(str, path)): np.asarray(value) for path, value in nnx.to_flat_state(state)}


# ---- of the program's own evaluation ----


@pytest.mark.parametrize("name", ["averaged", "resnet"])
@pytest.mark.parametrize("checkpoint", ["last", "best"])
def test_images_are_scored_as_by_the_program(trained, name, checkpoint):
    workdir = trained(name)
    run, (program, state) = load_run(workdir, checkpoint), evaluated(workdir, checkpoint == "best")
    wanted, (x, y) = program.evaluate(state), images.load("digits").test
    assert run.step == int(state.step) == {"last": 12, "best": 8}[checkpoint]
    for hardened, prefix in {True: "hardened_", False: ""}.items():
        logits = run.predict(x, hardened=hardened)
        assert isinstance(logits, np.ndarray)
        np.testing.assert_allclose(nats(logits, y), wanted[f"{prefix}loss"], rtol=1e-5)
        assert np.mean(logits.argmax(-1) == y) == pytest.approx(wanted[f"{prefix}accuracy"], abs=1e-6)
    for kind, split in {"eval": "validation", "test": "test"}.items():
        if kind == "test" and checkpoint == "best":  # the fixture calls another checkpoint the best than the run did
            continue
        [line] = [line for line in run.metrics[kind] if line["step"] == run.step]  # what the run itself measured
        assert line in files.lines(workdir / "metrics.jsonl")
        x, y = program.task.splits[split]
        np.testing.assert_allclose(nats(run.predict(x), y), line["hardened_loss"], rtol=1e-5)


def test_texts_are_scored_as_by_the_program(trained):
    workdir = trained("text")
    run, (program, state) = load_run(workdir), evaluated(workdir, best=False)
    windows = np.int32(program.task.windows["test"])
    wanted = program.evaluate(state)
    for hardened, prefix in {True: "hardened_", False: ""}.items():
        logits = run.predict(windows[:, :-1], hardened=hardened)
        np.testing.assert_allclose(nats(logits, windows[:, 1:]), wanted[f"{prefix}loss"], rtol=1e-5)


@pytest.mark.parametrize("name", CONFIGS)
def test_weights_are_those_that_the_evaluation_uses(trained, name):
    workdir, found = trained(name), {}
    for checkpoint in ("last", "best"):
        run, (program, state) = load_run(workdir, checkpoint), evaluated(workdir, checkpoint == "best")
        hard = nnx.merge(program.hardened_graph, program.harden(state))
        wanted = paths(nnx.as_pure(nnx.state(hard, nnx.Param)))
        assert run.weights.keys() == wanted.keys()
        for path, array in run.weights.items():
            np.testing.assert_array_equal(array, wanted[path])
        patterns = {path: pattern for path, pattern in nm.nnx.patterns(run.hardened).items() if pattern is not None}
        assert patterns
        for path, pattern in patterns.items():
            groups = np.moveaxis(run.weights[path], pattern.axes[-1], -1) if len(pattern.axes) == 1 else None
            if groups is not None:  # at most two of every four
                assert np.count_nonzero(groups.reshape(-1, 4), axis=-1).max() <= 2
        params, rest = state.ema if run.config.ema else (state.params, state.rest)
        _, own, others = nnx.split(run.model, nnx.Param, ...)
        for mine, theirs in ((own, params), (others, rest)):
            jax.tree.map(np.testing.assert_array_equal, nnx.as_pure(mine), theirs)
        found[checkpoint] = run.weights
    assert any((found["last"][path] != found["best"][path]).any() for path in found["last"])


def test_a_run_of_several_devices_lies_on_one_and_starts_no_mesh(trained, monkeypatch):
    workdir = trained("averaged")
    monkeypatch.setattr(jax, "make_mesh", lambda *_, **__: pytest.fail("a mesh"))
    run = load_run(workdir)
    assert run.config.mesh.fsdp == 4
    places = {device for leaf in jax.tree.leaves(nnx.state((run.model, run.hardened))) for device in leaf.devices()}
    assert places == {jax.devices()[0]}


@pytest.mark.processes
def test_a_run_of_several_devices_is_loaded_on_a_machine_of_one(trained):
    """This is the code of docs/how_to/weights.md."""
    page = (config_files.ROOT / "docs/how_to/weights.md").read_text()
    code = page.split("```python\n")[1].split("```")[0]
    assert code.count("\n") <= 6
    workdir = trained("averaged")
    code = code.replace("runs/first", str(workdir)) + "import jax; print(jax.device_count(), kernel[0, 0].item())"
    env = {"XLA_FLAGS": xla_flags(1), "JAX_PLATFORMS": "cpu", "PATH": "", "HOME": str(workdir)}
    done = subprocess.run([sys.executable, "-c", code], cwd=config_files.ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    count, value = done.stdout.split()
    assert count == "1"
    assert float(value) == load_run(workdir).weights["blocks/0/mlp/up/kernel"][0, 0]


# ---- without the data ----


@pytest.mark.parametrize("name", ["averaged", "text"])
def test_the_data_set_is_not_needed(trained, name, monkeypatch):
    workdir = trained(name)
    for module in (images, text):
        monkeypatch.setattr(module, "load", lambda *_: pytest.fail("the data set was read"))
    assert load_run(workdir).weights


# ---- inputs ----


def test_images_may_be_integers_or_floats_and_one_alone(trained):
    run, x = load_run(trained("averaged")), images.load("digits").test[0][:5]
    wanted = run.predict(x)
    for same in (np.int64(x), np.float64(x), jnp.asarray(x, jnp.bfloat16), x.tolist()):
        np.testing.assert_array_equal(run.predict(same), wanted)
    compiled = run._apply._cache_size()
    run.predict(x[::-1])
    assert run._apply._cache_size() == compiled
    assert run.predict(x[0]).shape == (10,)
    np.testing.assert_allclose(run.predict(x[0]), wanted[0], rtol=1e-4, atol=1e-5)
    direct = run.hardened(jnp.asarray((x / 255 - run.sizes["mean"]) / run.sizes["std"], jnp.float32))
    np.testing.assert_allclose(wanted, direct, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda x: x / 255, r"these are from 0 to 1. Multiply by 255"),
        (lambda x: x - 1.0, r"pixels from 0 to 255 and normalises them itself, got -1 to 25\d"),
        (lambda x: np.where(x > 9, np.nan, x), "pixels from 0 to 255 .* got nan to nan"),
        (lambda x: x[..., 0], r"images of shape \[batch, height, width, 1\], .* got \(5, 8, 8\)"),
        (lambda x: x[:0], r"got \(0, 8, 8, 1\)"),
        (lambda x: x[:, :4], r"predict: images are of shape \[batch, 8, 8, 1\], got \(5, 4, 8, 1\)"),
        (lambda x: x.astype(complex), "got complex128"),
    ],
)
def test_other_images_are_refused_in_one_line(trained, wrong, said):
    run, x = load_run(trained("averaged")), images.load("digits").test[0][:5]
    with pytest.raises(Mistake, match=said) as caught:
        run.predict(wrong(x))
    assert "\n" not in str(caught.value)
    with pytest.raises(Mistake, match="one array, got 2"):
        run.predict(x, x)


def test_texts_may_be_tokens_or_a_str(trained):
    run = load_run(trained("text"))
    wanted = run.predict([list(b"a text")])
    assert wanted.shape == (1, 6, 256)
    np.testing.assert_array_equal(run.predict("a text"), wanted[0])
    np.testing.assert_array_equal(run.predict(list(b"a text")), wanted[0])
    for wrong, said in {
        "": r"predict takes tokens, .* got uint8 \(0,\)",
        "x" * 5000: r"predict: tokens are integers of shape \[batch, time\], with a time from 1 to length=",
        (0.5, 1.0): r"got float64 \(2,\)",
        (3, 256): "the tokens are from 3 to 256, and the vocabulary is 256",
    }.items():
        with pytest.raises(Mistake, match=said):
            run.predict(wrong)
    run.config.data.tokenizer = "gpt2.json"
    with pytest.raises(Mistake, match="tokens of the run are bytes, and here they are not"):
        run.predict("a text")


# ---- a task of one's own ----


def test_a_task_of_ones_own(tmp_path, monkeypatch):
    (tmp_path / "own_sine.py").write_text(TASK.replace("sine:Sine", "own_sine:Sine"))
    monkeypatch.syspath_prepend(tmp_path)
    workdir = train(tmp_path, f"--config={tmp_path / 'own_sine.py'}", *SMALL)
    module = sys.modules.pop("own_sine")
    with pytest.raises(
        Mistake, match=r"config.json names own_sine:Sine, .* write load_run\(DIR, foreign=True\)"
    ) as said:
        load_run(workdir)
    assert "own_sine" not in sys.modules
    assert "\n" not in str(said.value)
    run = load_run(workdir, foreign=True)
    x, y = module.Sine(run.config).test
    line = run.metrics["eval"][-1]
    assert line["step"] == run.step == 12
    np.testing.assert_allclose(np.mean((run.predict(x) - y) ** 2), line["hardened_loss"], rtol=1e-5)
    np.testing.assert_allclose(np.mean((run.predict(x, hardened=False) - y) ** 2), line["loss"], rtol=1e-5)
    assert run.weights["up/kernel"].shape == (4, 32)
    assert repr(run) == f"LoadedRun({workdir}, step 12, Net)"
    sys.modules.pop("own_sine")
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path != str(tmp_path)])
    with pytest.raises(Mistake, match="there is no module 'own_sine'"):
        load_run(workdir, foreign=True)


# ---- what is not there, or damaged ----


def change(workdir: Path, field: str, values: dict) -> None:
    path = workdir / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {field: config[field] | values}))


def test_what_is_no_run_is_refused_in_one_line(trained, tmp_path):
    def refused(said: str, error=Mistake, **options) -> None:
        with pytest.raises(error, match=said) as caught:
            load_run(workdir, **options)
        assert "\n" not in str(caught.value)

    workdir = tmp_path / "none"
    refused("none is not a run directory: it has no run.json")
    workdir = shutil.copytree(trained("averaged"), tmp_path / "run")
    refused("checkpoint='first' is not known. .*Write one of best, last", checkpoint="first")
    for path in (workdir / "checkpoints").iterdir():
        saved.write_checksums(path, False, [])
    refused(r"run holds no best checkpoint: .* Write checkpoint='last'", checkpoint="best")
    config = (workdir / "config.json").read_text()
    change(workdir, "model", {"depth": 2})
    refused(r"checkpoints/12 holds no state of this model: .*blocks.*1", Failed)
    (workdir / "config.json").write_text(config)
    change(workdir, "model", {"width": 32})
    refused(r"checkpoints/12 holds no state of this model: \S+ is .* in the checkpoint and .* in this run$", Failed)
    (workdir / "config.json").write_text("{")
    refused("config.json cannot be read as JSON")
    (workdir / "config.json").unlink()
    refused("config.json is missing, or has no experiment, rules, sparsity, backend, ema")
    (workdir / "config.json").write_text(config)
    shutil.rmtree(workdir / "checkpoints")
    refused("run holds no checkpoints. Give the directory of a run that has saved one")


def test_a_damaged_checkpoint_is_told_and_the_one_before_it_read(trained, tmp_path):
    workdir = shutil.copytree(trained("averaged"), tmp_path / "run")
    for step in (12, 8):
        file = next((workdir / "checkpoints" / str(step) / "state" / "d").iterdir())
        file.write_bytes(file.read_bytes()[:-1])
        if step == 12:
            with pytest.warns(UserWarning, match="The checkpoint of step 12 is damaged"):
                assert load_run(workdir).step == 8
    with (
        pytest.warns(UserWarning, match="is damaged"),
        pytest.raises(Failed, match="None of the checkpoints in .* can be read"),
    ):
        load_run(workdir)
    assert sorted(path.name for path in (workdir / "checkpoints").iterdir()) == ["12", "8"]


def test_a_model_without_a_final_form_has_no_hardened_weights():
    recipe = nm.Recipe(((".*", "y_w=ste(uniform(2,4))"),))
    model = nm.nnx.sparsify(nnx.Linear(8, 4, rngs=nnx.Rngs(0)), recipe)
    run = LoadedRun(Path("runs/first"), ConfigDict(), 3, model, {}, {})
    for use in (lambda: run.hardened, lambda: run.weights, lambda: run.predict(np.ones((1, 8), np.float32))):
        with pytest.raises(Mistake, match="the model of runs/first has no hardened form: .*uniform"):
            use()
    assert run.predict(np.ones((1, 8), np.float32), hardened=False).shape == (1, 4)


def test_packed_products_are_not_demanded_of_this_machine(trained, tmp_path):
    """A run of backend "pallas" was trained on a GPU. On a CPU its products cannot be packed, and it can be read."""
    workdir = shutil.copytree(trained("text"), tmp_path / "run")
    wanted = load_run(workdir).predict("a text")
    config = json.loads((workdir / "config.json").read_text())
    (workdir / "config.json").write_text(json.dumps(config | {"backend": "pallas"}))
    np.testing.assert_array_equal(load_run(workdir).predict("a text"), wanted)


def test_tasks_record_what_their_models_are_made_with():
    for name in ("vit_24", "gpt_24"):
        task = tasks.task(command.read(["launch.py", f"--config=configs/{name}.py:smoke"]).config)
        assert json.loads(json.dumps(task.sizes)) == task.sizes


def test_the_schedules_of_a_run_that_stopped_early_are_those_of_its_whole_length(trained):
    about = json.loads((trained("resnet") / "run.json").read_text())
    config = ConfigDict(json.loads((trained("resnet") / "config.json").read_text()))
    assert load._described(config, about | {"steps": 5})[1] == about["planned_steps"] == 12
