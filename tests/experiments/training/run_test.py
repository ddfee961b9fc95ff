"""Runs, end to end and small: every config file, the step against one written out by hand, what a run leaves behind."""

import json
import math
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from experiments import command, config_files, files
from experiments.bench import train as bench
from experiments.errors import Failed, Mistake
from experiments.training import image
from experiments.training.checkpoints import Checkpoints
from tests.experiments.runs import (
    as_people_run_it as as_people_run_it,
    once,
    program,
    shared,
    steps,
    xla_flags,
)
from tests.experiments.training.board_test import events
from tests.products.routes_test import packers

pytestmark = pytest.mark.sampled


# ---- config files ----


@pytest.mark.parametrize("config_file", config_files.names())
@pytest.mark.slow
def test_every_config_file_plans_and_takes_a_step(config_file):
    made = shared(f"{config_file}:smoke")
    state, shown = steps(made, 1)
    assert math.isfinite(shown[0]["loss"])
    assert shown[0]["gradient_norm"] > 0
    assert int(state.step) == 1
    dense, effective = made.plan.training
    assert (effective < dense) == ("dense" not in config_file)
    assert not made.plan.refused


@pytest.mark.parametrize(
    ("config_file", "parameters"),
    [
        ("configs/resnet50_imagenet.py", 25_557_032),
        ("configs/vitb_imagenet.py", 86_567_656),
        ("configs/gpt2_124m.py", 124_439_808 + (50304 - 50257) * 768),
    ],
)
@pytest.mark.slow
def test_the_papers_sizes_plan(config_file, parameters):
    """Their data need not be there."""
    made = program(config_file)
    assert made.plan.parameters == parameters
    assert 0.4 < made.plan.training[1] / made.plan.training[0] < 0.95


# ---- the step ----


@pytest.mark.slow
def test_a_dense_step_is_the_one_written_out_by_hand():
    made = program("configs/vit_dense.py:smoke", "--config.optimizer=sgd(momentum=0.9)")  # Adam makes much of rounding
    step, theirs = bench.plain(made, made.task)
    ours = made.init(jnp.uint32(0))._replace(params=jax.tree.map(jnp.copy, theirs[1]))
    arrays = next(iter(made.task.feed(0, 0, made.mesh)))
    for _ in range(3):
        theirs, loss = step(theirs, arrays)
        ours, shown = made.train(ours, arrays)
        np.testing.assert_allclose(float(shown["loss"]), float(loss), rtol=1e-5)
    for a, b in zip(jax.tree.leaves(ours.params), jax.tree.leaves(theirs[1]), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vit_dense", "resnet_sdgp"])
def test_the_step_is_sgds_and_micro_batches_make_the_whole_batchs(name):
    changes = ["--config.optimizer=sgd", "--config.clip=0", "--config.learning_rate.warmup=0"]
    made = [program(f"configs/{name}.py:smoke", f"--config.accumulate={k}", *changes) for k in (1, 4)]
    first = jax.tree.map(np.asarray, made[0].init(jnp.uint32(0)).params)
    (whole, seen), (parts, also) = (steps(m, 1) for m in made)
    moved = [
        [np.asarray(a) - b for a, b in zip(*map(jax.tree.leaves, (s.params, first)), strict=True)]
        for s in (whole, parts)
    ]
    norm = np.sqrt(sum((m.astype(np.float64) ** 2).sum() for m in moved[0]))
    np.testing.assert_allclose(norm, made[0].config.learning_rate.peak * seen[0]["gradient_norm"], rtol=1e-3)
    if name == "vit_dense":  # statistics of a batch, and noise, are a micro-batch's own
        np.testing.assert_allclose(seen[0]["loss"], also[0]["loss"], rtol=1e-5)
        for a, b in zip(*moved, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-3 * np.abs(a).max() + 1e-9)


@pytest.mark.kernels
def test_weights_are_packed_once_for_all_micro_batches():
    """Each of the six layers packs its weight before the loop over micro-batches, and its gradient in it."""
    words = ["--config.accumulate=4", "--config.dtype=bfloat16", "--config.backend=interpret", "--config.model.depth=1"]
    made = program("configs/vit_sste.py:smoke", *words)
    arrays = next(iter(made.task.feed(0, 0, made.mesh)))
    jaxpr = jax.make_jaxpr(made.train_step)(made.shapes, arrays).jaxpr
    bodies = [eqn.params["jaxpr"].jaxpr for eqn in jaxpr.eqns if eqn.primitive.name == "scan"]
    in_loops = [len(packers(body)) for body in bodies]
    assert (len(packers(jaxpr)), [count for count in in_loops if count]) == (12, [6])


@pytest.mark.slow
def test_averaged_weights_follow_and_are_those_evaluated():
    made = program("configs/resnet_24.py:smoke", "--config.ema=0.75", "--config.steps=40", "--config.batch=64")
    before = made.init(jnp.uint32(0))
    before = jax.tree.map(np.asarray, (before.params, before.rest))
    state, _ = steps(made, 1)
    for a, old, now in zip(*map(jax.tree.leaves, (state.ema, before, (state.params, state.rest))), strict=True):
        np.testing.assert_allclose(
            a, 0.1 * old + 0.9 * now if old.dtype == np.float32 else now, atol=1e-6
        )  # 1/10 < 0.75
    found = made.evaluate(state)["loss"]
    assert found == made.evaluate(state._replace(params=state.ema[0], rest=state.ema[1]))["loss"]
    assert found != made.evaluate(state._replace(ema=(state.params, state.rest)))["loss"]
    state, _ = steps(
        made, 40
    )  # so do the means of BatchNorm: averages of weights alone would be scored by others' means
    plain = made.evaluate(state._replace(ema=(state.params, state.rest)))
    assert made.evaluate(state)["accuracy"] > 0.7 * plain["accuracy"] > 0.3


@pytest.mark.slow
def test_the_scales_of_sparse_layers_are_not_averaged():
    """A stage makes a new one. The averaged model has it at once, as the model in training does."""
    stages = "y_w=ste(stages(((0,identity),(2,soft(2,4)))))"
    changes = ("--config.model.depth=1", "--config.ema=0.9", f"--config.sparsity.blocks={stages}")
    made = program("configs/vit_24.py:smoke", *changes)
    before, (state, _) = steps(made, 1)[0], steps(made, 4)
    flat = [jax.tree_util.tree_leaves_with_path(rest) for rest in (before.rest, state.rest, state.ema[1])]
    scales = [v for v in zip(*flat, strict=True) if v[0][1].dtype == jnp.float32 and "state" in str(v[0][0])]
    assert len(scales) == 6  # of a block's layers
    for (path, old), (_, now), (_, averaged) in scales:
        assert old != now, path
        assert averaged == now, path
    moved = [(a != b).any() for a, b in zip(*map(jax.tree.leaves, (state.ema[0], state.params)), strict=True)]
    assert all(moved)


@pytest.mark.slow
def test_what_decays_is_what_this_steps_masks_drop():
    """Held masks are renewed at a step's beginning; the decay sees them as the products of that step do."""
    changes = ["--config.sparsity.stages=y_w=ste(hold(mse(2,4),every=2))", "--config.optimizer=sgd"]
    changes += [
        "--config.learning_rate.shape=constant",
        "--config.learning_rate.warmup=0",
    ]  # the optimizer's count is new
    plain, decayed = (
        program("configs/resnet_24.py:smoke", *changes, f"--config.masked_decay={lam}") for lam in (0.0, 0.5)
    )
    state, _ = steps(plain, 2)
    arrays, rate = next(iter(plain.task.feed(0, 0, plain.mesh))), float(plain.rate(2))
    copies = [jax.tree.map(jnp.copy, state) for _ in range(2)]
    before = jax.tree.map(np.asarray, state.params)
    (a, _), (b, _) = (
        plain.train(copies[0], arrays),
        decayed.train(copies[1]._replace(opt=decayed.init(jnp.uint32(0)).opt), arrays),
    )
    masks = jax.tree.leaves(jax.tree.map(np.asarray, plain.masks(a)))
    pairs = zip(masks, *map(jax.tree.leaves, (before, a.params, b.params)), strict=True)
    dropped = [(np.asarray(x - y), np.where(mask, 0, rate * 0.5 * w)) for mask, w, x, y in pairs if mask.ndim]
    assert dropped
    for found, wanted in dropped:
        np.testing.assert_allclose(found, wanted, atol=1e-6)


@pytest.mark.slow
def test_a_dense_start_is_measured_as_dense():
    text = "y_w=ste(stages(((0,identity),(1,mse(2,4)))))"
    adam = "--config.optimizer=step_adam(after=50%, before=75%)"
    made = program("configs/resnet_24.py:smoke", f"--config.sparsity.stages={text}", adam)
    state, _ = steps(made, 1)
    found = made.measure(state, next(iter(made.task.feed(0, 0, made.mesh))))["density"]
    assert {float(v) for v in found.values()} == {1.0}


@pytest.mark.slow
def test_the_first_layer_costs_no_dx_with_any_optimizer():
    words = ["configs/vit_24.py:smoke", "--config.rules=(('positions','dense'),('.*','sdgp(1,2)'))"]
    adam, step_adam = (program(*words, *more) for more in ([], ["--config.optimizer=step_adam(after=1,before=2)"]))
    assert step_adam.flops == adam.flops


@pytest.mark.slow
def test_another_seed_is_another_run_of_the_same_program():
    made = program("configs/resnet_24.py:smoke", "--config.sparsity.stages=s_ste(2,4)")
    arrays = next(iter(made.task.feed(0, 0, made.mesh)))
    found = [float(made.train(made.init(jnp.uint32(seed)), arrays)[1]["loss"]) for seed in (0, 1, 0)]
    assert found[0] == found[2] != found[1]
    assert made.train._cache_size() == made.compiled_init._cache_size() == 1


@pytest.mark.slow
def test_hardened_weights_are_scored_beside_those_in_training():
    made = program("configs/vit_pgf.py:smoke", "--config.steps=100")
    found = made.evaluate(made.init(jnp.uint32(0)))  # nothing has faded yet: hard weights are others
    assert found["loss"] != found["hardened_loss"]
    assert 0 <= found["hardened_accuracy"] <= 1
    made = shared("configs/vit_sste.py:smoke")
    found = made.evaluate(made.init(jnp.uint32(0)))
    np.testing.assert_allclose(found["loss"], found["hardened_loss"], rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("value", [None, 0, 7, 100, 255])
def test_moments_are_exact_of_many_images(value):
    """A channel that is constant has a deviation of one."""
    images = np.random.default_rng(0).integers(
        0, 256, (20_000, 32, 32, 3) if value is None else (10, 8, 8, 3), np.uint8
    )
    images[..., 1] = images[..., 1] // 2 if value is None else value
    mean, std = image.moments(images)
    deviations = [1 if value is not None and c == 1 else images[..., c].std(dtype=np.float64) / 255 for c in range(3)]
    np.testing.assert_allclose(mean, [images[..., c].mean(dtype=np.float64) / 255 for c in range(3)], rtol=1e-6)
    np.testing.assert_allclose(std, deviations, rtol=1e-6)


@pytest.mark.slow
def test_scores_are_means_over_the_test_split_alone():
    made = shared("configs/resnet_24.py:smoke")
    state, task = made.init(jnp.uint32(0)), made.task
    model = nnx.merge(made.graph, state.params, state.rest)
    model.eval()
    x, y = task.set.test
    logits = model((x / np.float32(255) - task.mean) / task.std)
    assert made.evaluate(state)["accuracy"] == pytest.approx(float((logits.argmax(-1) == y).mean()), abs=1e-6)


@pytest.mark.slow
def test_measures_by_layer():
    made = program("configs/resnet_mvue.py:smoke", "--config.sparsity.stages=dw_g=mvue(2,4); y_w=ste(mse(2,4))")
    state = made.init(jnp.uint32(0))
    found = made.measure(state, next(iter(made.task.feed(0, 0, made.mesh))))
    assert {float(v) for v in found["density"].values()} == {0.5}
    assert set(found["gradient_variance"]) == set(found["density"])
    assert all(v > 0 for v in found["gradient_variance"].values())
    flips = made.flips(made.masks(state), made.masks(made.init(jnp.uint32(1))))
    assert all(0.3 < float(v) < 0.7 for v in flips.values())  # independent masks: each keeps half


@pytest.mark.slow
def test_weights_that_are_drawn_have_no_flips():
    """They may have no mask, as with mvue. Everything else is measured."""
    made = program("configs/vit_24.py:smoke", "--config.sparsity.blocks=y_w=ste(mvue(2,4))")
    state = made.init(jnp.uint32(0))
    assert made.flips(made.masks(state), made.masks(state)) == {}
    found = made.measure(state, next(iter(made.task.feed(0, 0, made.mesh))))
    assert {float(v) for v in found["density"].values()} == {0.5}
    assert made.hardening_refusal


# ---- whole runs ----


def launch(*words: str, code: int = 0, **env: str):
    done = subprocess.run(
        [sys.executable, "launch.py", *words],
        capture_output=True,
        text=True,
        cwd=config_files.ROOT,
        env=os.environ | {"COLUMNS": "120"} | env,
    )
    assert done.returncode == code, done.stdout[-2000:] + done.stderr[-2000:]
    return done


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """A small run, its directory, and what it printed."""

    def make(folder):
        done = launch("--config=configs/vit_sste.py:smoke", f"--workdir={folder / 'vit'}")
        (folder / "said").write_text(done.stdout)

    folder = once(tmp_path_factory, "finished", make)
    return folder / "vit", (folder / "said").read_text()


@pytest.mark.processes
def test_a_run_shows_what_it_does(finished):
    workdir, said = finished
    parts = ["devices", "4 x cpu", "16 = 4 devices x 4", "4 steps", "effective", "6 of 8 layers 2:4", "step 4/4"]
    for part in [*parts, "hardened", str(workdir / "report.html")]:
        assert part in said


@pytest.mark.processes
def test_a_run_leaves_its_directory(finished):
    workdir, _ = finished
    about = json.loads((workdir / "run.json").read_text())
    assert about["outcome"] == "finished"
    assert about["command"].startswith("python launch.py --config=configs/vit_sste.py:smoke")
    assert {"python", "jax", "flax", "nmjax"} <= set(about["versions"])
    assert about["machine"]["processor"]
    assert about["machine"]["threads"] == int(os.environ["NPROC"])
    assert len(about["git"]["commit"]) == 40
    assert json.loads((workdir / "config.json").read_text())["sparsity"] == {"blocks": "s_ste(2,4)"}
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "train"] == [1, 2, 3, 4]
    assert [line["step"] for line in lines if line["kind"] == "eval"] == [2, 4]
    measured = [line for line in lines if line["kind"] == "sparsity"]
    assert [line["step"] for line in measured] == [0, 2]
    assert all(value == 0.5 for value in measured[0]["density"].values())
    assert len(measured[1]["flip_rate"]) == len(measured[0]["density"]) == 6
    assert 0 < sum(measured[1]["flip_rate"].values()) < 6 * 0.2
    page = (workdir / "report.html").read_text()
    assert "<svg" in page
    assert "blocks/0/mlp/up" in page
    assert "http://" not in page.replace("http://www.w3.org", "")
    assert sorted(p.name for p in (workdir / "checkpoints").iterdir()) == ["2", "4"]


@pytest.mark.processes
def test_the_number_of_devices_changes_rounding_alone(finished, tmp_path):
    launch("--config=configs/vit_sste.py:smoke", f"--workdir={tmp_path / 'one'}", XLA_FLAGS=xla_flags(1))
    assert '"1 x cpu"' in (tmp_path / "one" / "run.json").read_text()
    told = [
        [line for line in files.lines(d / "metrics.jsonl") if line["kind"] == "train"]
        for d in (finished[0], tmp_path / "one")
    ]
    for four, single in zip(*told, strict=True):
        for name in ("loss", "gradient_norm", "accuracy"):
            np.testing.assert_allclose(four[name], single[name], rtol=1e-4)


@pytest.mark.processes
def test_tensorboard_reads_its_events(finished):
    found = {}
    for event in events(finished[0] / "tensorboard"):
        for value in event.summary.value:
            found.setdefault(value.tag, []).append(event.step)
    assert found["train/loss"] == [1, 2, 3, 4]
    assert found["eval/hardened_accuracy"] == [2, 4]
    assert found["sparsity/flip_rate/blocks/0/mlp/up/kernel"] == [0, 2]


@pytest.mark.processes
def test_a_finished_run_is_evaluated_from_its_checkpoint(finished):
    workdir, _ = finished
    said = launch(f"--workdir={workdir}", "--mode=eval").stdout
    last = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()][-1]
    assert f"last, step 4, test: accuracy {last['accuracy']:.2%}, hardened {last['hardened_accuracy']:.2%}" in said
    assert "best, step" in said
    comparison = json.loads((workdir / "run.json").read_text())["comparison"]
    assert comparison
    assert f"at its end  {comparison}" in said


@pytest.mark.processes
def test_a_finished_run_is_left_as_it_is_and_a_directory_is_of_one_config(finished):
    workdir, _ = finished
    before = {path: path.stat().st_mtime_ns for path in workdir.rglob("*") if path.is_file()}
    assert launch("--config=configs/vit_sste.py:smoke", f"--workdir={workdir}").stdout.startswith("finished already")
    done = launch("--config=configs/vit_dense.py:smoke", f"--workdir={workdir}", "--mode=eval", code=2)
    assert "sparsity.blocks: 's_ste(2,4)' there, None here" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert before == {path: path.stat().st_mtime_ns for path in workdir.rglob("*") if path.is_file()}


@pytest.mark.slow
def test_what_a_checkpoint_holds_is_not_what_training_goes_on_to_write(tmp_path):
    """States are donated, and saved while later steps run."""
    made = shared("configs/resnet_24.py:smoke")
    state, _ = steps(made, 1)
    kept = jax.tree.map(np.array, state)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, state, [], best=True)
    for _, arrays in zip(range(5), made.task.feed(0, 1, made.mesh), strict=False):
        state, _ = made.train(state, arrays)
    checkpoints.close()
    step, found, _ = Checkpoints(tmp_path).restore(made.shapes, best=True)
    assert step == 1
    jax.tree.map(np.testing.assert_array_equal, found, kept)


@pytest.fixture
def shades(tmp_path):
    """A folder of images, dark and light ones, and the words of a run on it."""
    from PIL import Image

    for i, split in enumerate(("train", "train", "train", "val")):
        for name, colour in (("dark", 20), ("light", 230)):
            (tmp_path / "data" / split / name).mkdir(parents=True, exist_ok=True)
            for k in range(4):
                Image.new("RGB", (40, 30), (colour + k,) * 3).save(tmp_path / "data" / split / name / f"{i}{k}.jpg")
    config = f"--config=configs/resnet_24.py:folder --config.data.dir={tmp_path / 'data'} --config.data.size=16".split()
    few = ["--config.epochs=0", "--config.steps=6", "--config.batch=8", "--config.measure=0"]
    small = ["--config.model.size=tiny", "--config.dtype=float32"]
    return tmp_path / "data", ["launch.py", *config, *few, *small, f"--workdir={tmp_path / 'run'}"]


@pytest.mark.slow
def test_a_folder_of_images_is_streamed(shades, tmp_path):
    words = [*shades[1], "--config.data.flip=true"]
    command.main(words, "")
    found = [line for line in files.lines(tmp_path / "run" / "metrics.jsonl") if line["kind"] == "test"]
    assert found[-1]["accuracy"] in {k / 8 for k in range(9)}
    with pytest.raises(Mistake, match="holds 2 classes.*--config.data.classes=2"):
        command.main([*words, "--config.data.classes=3"], "")


@pytest.mark.slow
def test_images_that_cannot_be_read_are_skipped_where_that_is_asked(shades, tmp_path, capfd):
    """Each is named once, by the training and all evaluations of the run together."""
    data, words = shades
    broken = [
        data / "train" / "dark" / "11.jpg",
        data / "train" / "light" / "23.jpg",
        data / "val" / "light" / "30.jpg",
    ]
    for file, text in zip(broken, (b"", b"no picture", broken[2].read_bytes()[:-200]), strict=True):
        file.write_bytes(text)
    with pytest.raises(Failed, match="cannot be read as an image .*--config.data.skip=true"):
        command.main(words, "")
    capfd.readouterr()
    words = [*words[:-1], f"--workdir={tmp_path / 'skips'}", "--config.data.skip=true", "--config.evaluate=2"]
    command.main(words, "")
    said = capfd.readouterr().out
    assert [said.count(f"{file} cannot be read as an image (") for file in broken] == [1, 1, 1]
    assert "): skipped, 3 in all" in said
    lines = files.lines(tmp_path / "skips" / "metrics.jsonl")
    assert len([line for line in lines if line["kind"] == "eval"]) == 3
    tested = [line["accuracy"] for line in lines if line["kind"] == "test"]
    assert tested
    assert all(
        min(abs(accuracy * 7 - k) for k in range(8)) < 1e-5 for accuracy in tested
    )  # of the seven that are there


@pytest.mark.slow
def test_a_language_model_writes(tmp_path):
    (text := tmp_path / "mine.txt").write_text("To be, or not to be, that is the question. " * 200)
    words = ["--config.measure=0", f"--config.data.name={text}", f"--workdir={tmp_path / 'run'}"]
    command.main(["launch.py", "--config=configs/gpt_sste.py:smoke", *words], "")
    written = json.loads((tmp_path / "run" / "text.json").read_text())
    assert len(written["samples"]) == 2
    assert written["prompt"]
    assert {"loss", "hardened_loss"} <= {
        name for line in files.lines(tmp_path / "run" / "metrics.jsonl") for name in line
    }
